"""Averages of iterates: against NumPy, inside a chain, and in the loop."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core.averaging import polyak_average, polyak_output
from jaxdp.models import networks

PARAMS = {"w": jnp.asarray([1.0, -2.0, 3.0]), "b": jnp.asarray(0.5)}
STEPS = [jax.tree.map(lambda p, t=t: 0.1 * (t + 1) * p, PARAMS) for t in range(7)]


def iterate(tx: Any, params: Any, steps: list[Any]) -> tuple[list[Any], Any]:
    """Applies updates in turn; the iterates after each, and the last state."""
    state, iterates = tx.init(params), []
    for step in steps:
        updates, state = jax.jit(tx.update)(step, state, params)
        params = optax.apply_updates(params, updates)
        iterates.append(params)
    return iterates, state


@pytest.mark.parametrize("start_step", [0, 3, 6])
def test_is_the_mean_of_the_iterates_after_the_start(start_step: int) -> None:
    tx = polyak_average(start_step)
    iterates, state = iterate(tx, PARAMS, STEPS)
    plain, _ = iterate(optax.identity(), PARAMS, STEPS)
    chex.assert_trees_all_equal(iterates, plain)  # Updates pass unchanged.
    want = jax.tree.map(lambda *x: np.mean(x[start_step:], axis=0), *iterates)
    chex.assert_trees_all_close(polyak_output(state), want, rtol=1e-6)


def test_is_the_current_iterate_until_the_start() -> None:
    tx = polyak_average(100)
    chex.assert_trees_all_equal(polyak_output(tx.init(PARAMS)), PARAMS)
    iterates, state = iterate(tx, PARAMS, STEPS)
    chex.assert_trees_all_close(polyak_output(state), iterates[-1], rtol=1e-6)


def test_small_weights_survive_low_precision() -> None:
    """In bfloat16, 1 + 0.004 is 1: a mean kept in it would never move."""
    params = jnp.ones((), jnp.bfloat16)
    tx = polyak_average()
    state = tx.init(params)
    for step in range(300):
        zero, other = jnp.zeros((), jnp.bfloat16), jnp.ones((), jnp.bfloat16)
        _, state = tx.update(other if step >= 200 else zero, state, params)
    assert polyak_output(state).dtype == jnp.float32
    np.testing.assert_allclose(polyak_output(state), 1 + 100 / 300, rtol=1e-5)


def test_leaves_that_do_not_move_stay() -> None:
    params = {"count": jnp.asarray(3), "w": jnp.ones(2)}
    tx = polyak_average()
    updates = {"count": jnp.asarray(0), "w": jnp.ones(2)}
    _, state = tx.update(updates, tx.init(params), params)
    want = {"count": jnp.asarray(3), "w": jnp.full(2, 2.0)}
    chex.assert_trees_all_equal(polyak_output(state), want)
    chex.assert_trees_all_equal_dtypes(polyak_output(state), params)


def test_state_has_its_own_buffers() -> None:
    params = jnp.ones(3)
    state = polyak_average().init(params)
    params.delete()  # As a caller does that donates its params.
    np.testing.assert_array_equal(polyak_output(state), np.ones(3))


@pytest.mark.parametrize("start", [-1, 1.5, True])
def test_start_must_be_an_integer(start: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="start_step must be an integer"):
        polyak_average(start)


def test_refuses_what_holds_no_average() -> None:
    with pytest.raises(ValueError, match="params must be passed"):
        polyak_average().update(PARAMS, polyak_average().init(PARAMS))
    with pytest.raises(ValueError, match="got none"):
        polyak_output(optax.sgd(0.1).init(PARAMS))
    two = optax.chain(polyak_average(), polyak_average())
    with pytest.raises(ValueError, match="got 2"):
        polyak_output(two.init(PARAMS))


@pytest.fixture
def run() -> Any:
    """fit on a small linear model, with an average over the last 6 of 23 steps."""
    x = jax.random.normal(jax.random.key(0), (40, 5))
    y = (x[:, 0] > 0).astype(jnp.int32)
    network = networks.linear(5, 2)
    plan = plans.DPZero(
        num_examples=40,
        num_steps=23,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-2,
        noise_multiplier=2.0,
    )
    params = network.init(jax.random.key(1))
    parts = (optax.ema(0.9, debias=False), optax.sgd(0.1), polyak_average(17))
    optimizer = optax.chain(*parts)

    def fit(**kwargs: Any) -> jaxdp.FitResult:
        keys = Keys.insecure(0)
        options = {"value_fn": network.value_fn, "optimizer": optimizer}
        return jaxdp.fit(plan, keys, params, (x, y), **options, **kwargs)

    return fit


@pytest.mark.slow  # A run of fit; the mean itself is above.
def test_loop_hands_out_the_average(run: Any) -> None:
    """One program and chunks, to the bit; the callback's states lead to the same mean."""
    seen: list[tuple[Any, Any]] = []
    whole = run()
    parts = run(chunk=1, callback=lambda _, p, info: seen.append((p, info.state)))
    averaged = polyak_output(whole.info.state)
    chex.assert_trees_all_equal(averaged, polyak_output(parts.info.state))
    chex.assert_trees_all_equal(averaged, polyak_output(seen[-1][1]))
    want = jax.tree.map(lambda *x: np.mean(x, axis=0), *(p for p, _ in seen[17:]))
    chex.assert_trees_all_close(averaged, want, rtol=1e-5, atol=1e-7)
    leaves = zip(jax.tree.leaves(averaged), jax.tree.leaves(whole.params), strict=True)
    assert any(np.any(a != b) for a, b in leaves)
