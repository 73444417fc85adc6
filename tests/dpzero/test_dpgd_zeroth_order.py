"""DPGD-0th against its plain form, and the iterate that the paper returns."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys
from jaxdp.dpzero import transform as transforms
from jaxdp.kernels import sphere
from tests import drawn

N = 12
DATA = (
    jnp.asarray(np.random.default_rng(0).normal(size=(N, 5)), jnp.float32),
    jnp.asarray(np.random.default_rng(1).normal(size=N), jnp.float32),
)
PARAMS = {"w": jnp.asarray([0.3, -0.2, 0.1, 0.0, 0.5]), "b": jnp.asarray(0.2)}
DIM = 6


def value_fn(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.sqrt(1 + (x @ params["w"] + params["b"] - y) ** 2)


def make(kind: Any = plans.DPGDZerothOrder, **changes: Any) -> Any:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": 4,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.5,
        "smoothing_radius": 1e-2,
        "noise_multiplier": 0.0,
    }
    return kind(**(base | changes))


def step(plan: Any, own: Keys, fn: Any = value_fn) -> Any:
    """Gradient and state of the first step."""
    tx = plan.transform(own)
    update = jax.jit(lambda s: tx.update(None, s, PARAMS, value_fn=fn, batch=DATA))
    return update(tx.init(PARAMS))


def silent(params: Any, batch: Any) -> jax.Array:
    return 0 * batch[1]


@functools.partial(jax.jit, static_argnames="law")
def first_direction(root: jax.Array, law: str) -> Any:
    """Of step 0."""
    key = keys.at_step(keys.stream(root, "direction"), 0)
    rows = sphere.directions(key, PARAMS, law=law)
    return sphere.materialise(sphere.select(rows, 0), PARAMS)


@pytest.mark.parametrize(
    "law", ["sphere", pytest.param("rademacher", marks=pytest.mark.slow)]
)
def test_it_is_the_mean_of_clipped_vectors(law: str) -> None:
    """Algorithm 1 with one vector for each record, clipped, averaged; noise off."""
    plan = make(direction=law)
    got, state = step(plan, Keys.insecure(0))
    u = first_direction(Keys.insecure(0).direction, law)
    radius = plan.smoothing_radius
    at = lambda s: jax.tree.map(lambda p, d: p + s * radius * d, PARAMS, u)  # noqa: E731
    slopes = (value_fn(at(1), DATA) - value_fn(at(-1), DATA)) / (2 * radius)
    vectors = np.outer(slopes, np.concatenate([[u["b"]], u["w"]]))
    norms = np.linalg.norm(vectors, axis=1)
    assert 2 < np.sum(norms > plan.l2_clip_norm) < N - 2
    scale = np.minimum(1, plan.l2_clip_norm / norms)
    mean = (scale[:, None] * vectors).mean(axis=0)
    np.testing.assert_allclose(np.append(got["b"], got["w"]), mean, atol=2e-5)
    # With one direction's coordinate as the release: DPZero at threshold C / sqrt(d).
    twin = make(plans.DPZero, direction=law, l2_clip_norm=1.5 / DIM**0.5)
    other, _ = step(twin, Keys.insecure(0))
    chex.assert_trees_all_close(got, other, atol=2e-5)
    assert state.release.shape == (1,)


@pytest.mark.parametrize(
    "law", ["sphere", pytest.param("rademacher", marks=pytest.mark.slow)]
)
def test_noise_is_isotropic(law: str) -> None:
    """4e4 seeds: every variance and covariance within 5.5 standard errors.

    21 entries; failure probability below 1e-6 together (4e-8 each).
    """
    plan = make(noise_multiplier=1.5, direction=law)
    seeds = jnp.arange(40_000)

    def one(seed: jax.Array) -> Any:
        tx = plan.transform(Keys.insecure(seed))
        state = tx.init(PARAMS)
        return tx.update(None, state, PARAMS, value_fn=silent, batch=DATA)[0]

    out = jax.jit(jax.vmap(one))(seeds)
    noise = np.concatenate(
        [np.asarray(out["b"])[:, None], np.asarray(out["w"])], axis=1
    )
    noise = noise / plan.noise_std
    want = np.eye(DIM)
    moments = noise.T @ noise / len(noise)
    assert np.all(np.abs(moments - want) < 5.5 * np.sqrt((1 + want) / len(noise)))
    assert stats.kstest(noise[:, 3], "norm").pvalue > 1e-7
    # Twice the noise is seen.
    assert np.any(np.abs(4 * moments - want) > 5.5 * np.sqrt(2 / len(noise)))


def test_noise_across_is_public_and_noise_along_secret() -> None:
    """One noise root, two direction roots and the reverse."""
    plan = make(noise_multiplier=1.5)
    first, second = Keys.insecure(1), Keys.insecure(2)

    def across(own: Keys) -> tuple[np.ndarray, np.ndarray]:
        made, state = step(plan, own, silent)
        flat = np.append(made["b"], made["w"])
        u = first_direction(own.direction, "sphere")
        unit = np.append(u["b"], u["w"]) / DIM**0.5
        return flat - unit * (flat @ unit), np.asarray(state.release)

    mixed = dataclasses.replace(first, noise=second.noise)
    (a, y), (b, z), (c, w) = across(first), across(mixed), across(second)
    np.testing.assert_allclose(a, b, atol=1e-5)
    assert y != z
    assert not np.allclose(a, c, atol=1e-3)
    assert w != y


@pytest.mark.parametrize(
    "relation", ["replace_one", pytest.param("zero_out", marks=pytest.mark.slow)]
)
def test_what_is_released_is_one_integer_of_the_plan(relation: str) -> None:
    """Along the direction; one record moves the vector's sum by its clip."""
    plan = make(noise_multiplier=1.5, num_steps=30, relation=relation)
    result = jaxdp.fit(
        plan,
        Keys.insecure(7),
        PARAMS,
        DATA,
        value_fn=silent,
        optimizer=optax.sgd(0.1),
    )
    # The slope's clip is shorter by the direction's norm, and so is its unit.
    unit = drawn.unit_of_sum(plan) / DIM**0.5
    got = drawn.in_units(result.info.releases, unit)
    np.testing.assert_array_equal(got, drawn.sums(plan, Keys.insecure(7), 1))


def test_gaussian_directions_are_refused() -> None:
    """Their norm varies, so the bound on a slope would."""
    with pytest.raises(ValueError, match="direction must be one of 'sphere'"):
        make(direction="gaussian")


# --- the iterate that the paper returns --------------------------------------------


def test_tau_is_uniform() -> None:
    """2e4 runs of 5 steps: chi-square at 1e-7."""
    plan = make(plans.DPZero, output="random", num_steps=5)
    draw = jax.vmap(
        lambda seed: transforms.output_step(plan.run, Keys.insecure(seed).direction)
    )
    counts = np.bincount(np.asarray(jax.jit(draw)(jnp.arange(20_000))), minlength=5)
    assert counts.shape == (5,)
    assert stats.chisquare(counts).pvalue > 1e-7
    assert stats.chisquare(counts + np.array([300, 0, 0, 0, -300])).pvalue < 1e-7


@pytest.mark.parametrize(
    "kind",
    [plans.DPZero, pytest.param(plans.DPGDZerothOrder, marks=pytest.mark.slow)],
)
def test_output_is_the_iterate_before_step_tau(kind: Any) -> None:
    plan = make(kind, output="random", noise_multiplier=1.0, num_steps=6)
    seen = set()
    for seed in range(4):
        own = Keys.insecure(seed)
        iterates: list[Any] = [PARAMS]
        result = jaxdp.fit(
            plan,
            own,
            PARAMS,
            DATA,
            value_fn=value_fn,
            optimizer=OPTIMIZER,
            chunk=1,
            callback=lambda step, params, info: iterates.append(params),  # noqa: B023
        )
        tau = int(transforms.output_step(plan.run, own.direction))
        seen.add(tau)
        chex.assert_trees_all_equal(result.params, iterates[tau])
        assert not np.array_equal(iterates[0]["w"], iterates[6]["w"])
    assert len(seen) > 1


OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def test_one_step_returns_the_initial_params() -> None:
    """T below 1 in the theorems becomes one step whose output read no record."""
    plan = make(plans.DPZero, output="random", noise_multiplier=1.0, num_steps=1)
    result = jaxdp.fit(
        plan, Keys.insecure(3), PARAMS, DATA, value_fn=value_fn, optimizer=OPTIMIZER
    )
    chex.assert_trees_all_equal(result.params, PARAMS)
    assert np.all(result.info.releases != 0)


def test_output_of_a_chain_and_of_the_last_iterate() -> None:
    plan = make(plans.DPZero, noise_multiplier=1.0)
    tx = optax.chain(jaxdp.dpzero(plan, Keys.insecure(0)), optax.sgd(0.1))
    state = tx.init(PARAMS)
    moved = jax.tree.map(lambda x: x + 1, PARAMS)
    chex.assert_trees_all_equal(jaxdp.dpzero_output(state, moved), moved)
    random = jaxdp.dpzero(make(plans.DPZero, output="random"), Keys.insecure(0))
    state = optax.chain(random, optax.sgd(0.1)).init(PARAMS)
    chex.assert_trees_all_equal(jaxdp.dpzero_output(state, moved), PARAMS)
    with pytest.raises(ValueError, match="state must hold the state of one"):
        jaxdp.dpzero_output(optax.sgd(0.1).init(PARAMS), PARAMS)
