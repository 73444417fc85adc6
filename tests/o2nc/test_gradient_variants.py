"""The private oracle of gradients, of common slopes, and over several passes."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.kernels import sphere
from jaxdp.kernels.threefry import fold_in
from tests import drawn

KEYS = Keys.insecure(11)
D, N, PERIOD, STEPS = 4, 12, 3, 7
RADIUS, D_STEP = 0.5, 0.1

WHOLE = sampling.MultiPassRestarts(period=PERIOD)
SAMPLED = sampling.MultiPassRestarts(
    period=PERIOD, restart_sampling_prob=0.5, sampling_prob=0.3
)
PASS = sampling.SinglePassRestarts(period=PERIOD, restart_batch_size=2, batch_size=1)
FIRST: dict[str, Any] = {
    "oracle": "first_order",
    "direction": "ball",
    "difference": "common",
}
SCALAR: dict[str, Any] = {
    "oracle": "scalar",
    "share_directions": True,
    "sampling": sampling.SinglePassRestarts(period=1, restart_batch_size=2),
    "num_steps": 6,
}
SEVERAL: dict[str, Any] = {"sampling": WHOLE, "prefix_noise": "independent"}
#: Which no record but a steep one reaches.
BOUNDED: dict[str, Any] = {"restart_l2_clip_norm": 16.0, "l2_clip_norm": 12.0}


def make(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": STEPS,
        "sampling": PASS,
        "relation": "replace_one",
        "restart_l2_clip_norm": math.inf,
        "l2_clip_norm": math.inf,
        "smoothing_radius": RADIUS,
        "max_step": D_STEP,
        "window": 4,
        "num_directions": 2,
        "learning_rate": 0.1,
        "noise_multiplier": 0.0,
    }
    return plans.O2NC(**base | changes)


#: Every oracle and sampler that the first paper's plan has not.
VARIANTS: dict[str, dict[str, Any]] = {
    "first order": FIRST,
    "first order, several passes": FIRST | SEVERAL,
    "several passes": SEVERAL,
    "several passes, scaled": SEVERAL | {"scale_with_movement": True},
    "several passes, sampled": SEVERAL | {"sampling": SAMPLED},
    "scalar": SCALAR,
}


#: What a record's first number may say of it: that its loss is steep, and unlike at every
#: query, or no number, or that it has none.
STEEP, NAN, INF, NOTHING = 5.0, 7.0, 8.0, 9.0


def kinked(x: jax.Array, batch: jax.Array) -> jax.Array:
    code = batch[:, 0]
    plain = jnp.abs(batch @ x) + jnp.abs(x).sum() / 4 * jnp.abs(batch).sum(axis=1)
    steep = jnp.sign(code) * 1e6 * x[1] * (1 + 30 * jnp.sum(x))
    out = jnp.where(jnp.abs(code) == STEEP, steep, plain)
    # Factors, for a branch that is not taken has a gradient too.
    factor = jnp.where(code == NAN, math.nan, jnp.where(code == INF, math.inf, 0.0))
    out = out + factor * jnp.abs(x[0])
    return jnp.where(code == NOTHING, 0.0, out)


def values(x: np.ndarray, record: np.ndarray) -> float:
    return abs(record @ x) + np.abs(x).sum() / 4 * np.abs(record).sum()


def gradient(x: np.ndarray, record: np.ndarray) -> np.ndarray:
    return np.sign(record @ x) * record + np.sign(x) / 4 * np.abs(record).sum()


def records(seed: int = 0) -> jax.Array:
    z = np.random.default_rng(seed).normal(size=(N, D))
    return jnp.asarray(z / np.linalg.norm(z, axis=1, keepdims=True), jnp.float32)


POINTS = np.cumsum(
    0.05 * np.random.default_rng(5).normal(size=(STEPS, D)), axis=0
).astype(np.float32)


def phases(plan: plans.O2NC) -> list[str]:
    names = [p.name for p in plan.phases for _ in range(p.num_steps)]
    return [names[t % len(names)] for t in range(plan.num_steps)]


@functools.cache
def compiled(plan: plans.O2NC, value_fn: Any, keys_seed: int = 11) -> Any:
    keys = Keys.insecure(keys_seed)
    tx = jaxdp.private_oracle(plan, keys)

    def update(state: Any, w: jax.Array, t: Any, data: Any, phase: str) -> Any:
        batch = sampling.batch(plan, keys, t, data, phase=phase)
        given = {"value_fn": value_fn, "batch": batch, "phase": phase}
        return tx.update(None, state, w, **given)

    return tx, jax.jit(update, static_argnums=4)


def released(
    plan: plans.O2NC, data: jax.Array, value_fn: Any = kinked, points: Any = POINTS
) -> np.ndarray:
    """The estimates (T, d) at given points."""
    tx, step = compiled(plan, value_fn)
    state, out = tx.init(jnp.asarray(points[0])), []
    for t, phase in enumerate(phases(plan)):
        g, state = step(
            state, jnp.asarray(points[t]), jnp.asarray(t, jnp.int32), data, phase
        )
        out.append(np.asarray(g))
    return np.stack(out)


def increments(plan: plans.O2NC, estimates: np.ndarray) -> np.ndarray:
    kept = np.vstack([np.zeros(D), estimates[:-1]])
    restarts = np.array(phases(plan)) == "restart"
    return estimates - np.where(restarts[:, None], 0, kept)


# --- what is estimated -------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("law", "num", "share"))
def points_of(key: jax.Array, *, law: str, num: int, share: bool) -> jax.Array:
    """What is added to a query, for every record of the data (N, num, D)."""

    def one(place: jax.Array) -> jax.Array:
        own = key if share else fold_in(key, place)
        return RADIUS / math.sqrt(D) * sphere.flat(own, D, law=law, num=num)

    return jax.vmap(one)(jnp.arange(N, dtype=jnp.uint32))


def reference(plan: plans.O2NC, data: jax.Array) -> np.ndarray:
    """Record by record and point by point, with the directions that the keys give."""
    context = int(plan.digest[:8], 16)
    root = keys_lib.stream(KEYS.direction, "direction", context=context)
    first, share = plan.oracle == "first_order", plan.share_directions
    out, estimate = [], np.zeros(D)
    for t, phase in enumerate(phases(plan)):
        key = keys_lib.at_step(root, jnp.asarray(t, jnp.int32))
        num = 1 if first and phase == "restart" else plan.num_directions
        near = np.asarray(points_of(key, law=plan.direction, num=num, share=share))
        batch = sampling.batch(plan, KEYS, t, data, phase=phase)
        rows, places = np.asarray(batch.records, np.float64), np.asarray(batch.index)
        total = np.zeros(D)
        for i in np.flatnonzero(np.asarray(batch.mask)):
            total += _near(first, POINTS[t], rows[i], near[places[i]])
            if phase == "difference":
                total -= _near(first, POINTS[t - 1], rows[i], near[places[i]])
        estimate = estimate if phase == "difference" else np.zeros(D)
        estimate = estimate + total / plan.grid(phase).normalizer
        out.append(estimate)
    return np.stack(out)


def _near(
    first_order: bool, x: np.ndarray, record: np.ndarray, v: np.ndarray
) -> np.ndarray:
    if first_order:
        return np.mean([gradient(x + u, record) for u in v], axis=0)
    slopes = [values(x + u, record) - values(x - u, record) for u in v]
    rows = [s * u for s, u in zip(slopes, v, strict=True)]
    return np.mean(rows, axis=0) * D / (2 * RADIUS**2)


@pytest.mark.parametrize(
    "name",
    [
        # What they are made of is in the others.
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("first order", "several passes", "several passes, scaled")
        else name
        for name in VARIANTS
    ],
)
def test_estimates_are_those_of_the_definition(name: str) -> None:
    """But for the grid, whose units are below 3e-4."""
    plan = make(**VARIANTS[name] | BOUNDED)
    data = records()
    np.testing.assert_allclose(released(plan, data), reference(plan, data), atol=2e-3)


def test_gradients_of_linear_losses_are_exact_and_do_not_change() -> None:
    def linear(x: jax.Array, batch: jax.Array) -> jax.Array:
        return batch @ x

    data = records()
    estimates = released(make(**FIRST), data, linear)
    mean = np.asarray(data)[:2].mean(axis=0)
    np.testing.assert_allclose(estimates[:3], np.tile(mean, (3, 1)), atol=1e-6)


def test_a_scalar_release_lies_in_the_span_of_its_directions() -> None:
    plan = make(**SCALAR | BOUNDED | {"noise_multiplier": 1.0})
    root = keys_lib.stream(
        KEYS.direction, "direction", context=int(plan.digest[:8], 16)
    )
    for t, g in enumerate(released(plan, records())):
        key = keys_lib.at_step(root, jnp.asarray(t, jnp.int32))
        v = np.asarray(sphere.flat(key, D, law="orthonormal", num=2))
        outside = g - v.T @ np.linalg.lstsq(v.T, g, rcond=None)[0]
        np.testing.assert_allclose(outside, 0, atol=1e-4)
        assert np.linalg.norm(g) > 1e-2


# --- what one record does ----------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_one_record_moves_each_mean_by_its_bound_and_no_more(name: str) -> None:
    plan = make(**VARIANTS[name] | BOUNDED)
    zeros = jnp.zeros((N, D))
    pair = (zeros.at[0, 0].set(sign * STEEP) for sign in (1, -1))
    here, there = (increments(plan, released(plan, x)) for x in pair)
    distances = np.linalg.norm(here - there, axis=1)
    scaled = np.linalg.norm(np.diff(POINTS, axis=0, prepend=POINTS[:1]), axis=1)
    reached = 0
    for t, phase in enumerate(phases(plan)):
        bound = 2 * plan.clips[phase][0] / plan.clips[phase][1]
        if plan.oracle == "scalar":
            # m slopes: the estimate is shorter or longer, by sqrt(d) / m.
            bound *= math.sqrt(D) / plan.num_directions
        if plan.scale_with_movement and phase == "difference":
            bound *= min(scaled[t] / (2 * D_STEP), 1)
        assert distances[t] <= bound * (1 + 1e-6)
        reached += distances[t] > 0.99 * bound
    assert reached >= 1


@pytest.mark.parametrize("name", VARIANTS)
def test_a_record_of_no_number_counts_nothing(name: str) -> None:
    plan = make(**VARIANTS[name] | BOUNDED)
    data = records()
    broken = data.at[0, 0].set(NAN).at[2, 0].set(INF)
    got = released(plan, broken)
    want = released(plan, data.at[jnp.array([0, 2]), 0].set(NOTHING))
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()


@pytest.mark.parametrize(
    "oracle",
    [
        FIRST | SEVERAL | {"sampling": SAMPLED},
        pytest.param(SEVERAL | {"sampling": SAMPLED}, marks=pytest.mark.slow),
    ],
)
def test_directions_are_a_record_s_own_whatever_else_is_sampled(oracle: Any) -> None:
    """By its place in the data: its row says which other records were drawn."""
    plan = make(**oracle | BOUNDED)
    tx = jaxdp.private_oracle(plan, KEYS)
    data, w = records(), jnp.asarray(POINTS[0])
    batch = sampling.batch(plan, KEYS, 0, data, phase="restart")
    order = np.random.default_rng(0).permutation(len(batch.mask))
    moved = dataclasses.replace(
        batch,
        records=batch.records[order],
        mask=batch.mask[order],
        index=batch.index[order],
    )
    given: Any = {"value_fn": kinked, "phase": "restart"}
    update = jax.jit(lambda b: tx.update(None, tx.init(w), w, batch=b, **given)[0])
    one, two = update(batch), update(moved)
    np.testing.assert_array_equal(one, two)
    assert int(batch.mask.sum()) > 2


# --- noise -------------------------------------------------------------------------


def simulated(plan: plans.O2NC, runs: int, points: Any = POINTS) -> np.ndarray:
    """Estimates (runs, T, d) of losses that are all zero: the noise."""

    def zero(x: jax.Array, batch: jax.Array) -> jax.Array:
        return 0 * batch @ x

    data = jnp.zeros((N, D))
    whole = -(-plan.num_steps // plan.sampling.period) * plan.sampling.period
    walk = jnp.asarray(np.resize(points, (whole, D)))

    def run(keys: Keys) -> jax.Array:
        tx = jaxdp.private_oracle(plan, keys)

        def step(phase: str, state: Any, t: jax.Array) -> tuple[Any, Any]:
            batch = sampling.batch(plan, keys, t, data, phase=phase)
            given = {"value_fn": zero, "batch": batch, "phase": phase}
            g, state = tx.update(None, state, walk[t], **given)
            return state, g

        def period(state: Any, first: jax.Array) -> tuple[Any, jax.Array]:
            made = []
            for phase in plan.phases:
                times = first + jnp.arange(phase.num_steps)
                one = functools.partial(step, phase.name)
                state, part = jax.lax.scan(one, state, times)
                made.append(part)
                first = first + phase.num_steps
            return state, jnp.concatenate(made)

        starts = jnp.arange(0, whole, plan.sampling.period)
        made = jax.lax.scan(period, tx.init(walk[0]), starts)[1]
        return made.reshape(-1, D)[: plan.num_steps]

    seeds = jnp.arange(runs)
    return np.asarray(jax.jit(jax.vmap(lambda s: run(Keys.insecure(s))))(seeds))


RUNS = 4000


def zero(x: jax.Array, batch: jax.Array) -> jax.Array:
    return 0 * batch @ x


def test_several_passes_release_the_integers_of_their_plan() -> None:
    """Of every step: its own integers; together they cost what the plan is charged."""
    plan = make(**SEVERAL | BOUNDED | FIRST, noise_multiplier=1.5)
    got = increments(plan, released(plan, jnp.zeros((N, D)), zero))
    root, cost = drawn.correlated_root(plan, KEYS), 0.0
    for t, phase in enumerate(phases(plan)):
        bound, size = plan.clips[phase]
        in_clips = plan.step_std(phase) * size / bound
        bits = min(16, math.floor(math.log2((2**31 - 1) / (N + 8 * in_clips))))
        law = drawn.whole(in_clips * 2**bits)
        period, at = divmod(t, PERIOD)
        key = keys_lib.at_step(root, period)
        want = drawn.increments(plan.correlation, key, law, D, at + 1)[at]
        unit = bound / size * 2.0**-bits
        np.testing.assert_array_equal(drawn.in_units(got[t], unit), want)
        # A replaced record moves every sum by two clips.
        cost += (2 * 2**bits / law) ** 2
    charged = 1 / (plan.noise_multiplier or math.inf) ** 2
    assert cost <= charged
    assert cost == pytest.approx(charged, rel=1e-4)


def test_slopes_along_common_directions_have_the_integers_of_their_plan() -> None:
    plan = make(**SCALAR | BOUNDED | {"noise_multiplier": 1.5, "prefix_noise": "tree"})
    got = released(plan, jnp.zeros((N, D)), zero)
    context = int(plan.digest[:8], 16)
    public = keys_lib.stream(KEYS.direction, "direction", context=context)
    std, root = drawn.std_of_node(plan), drawn.correlated_root(plan, KEYS)
    for t, estimate in enumerate(got):
        key = keys_lib.at_step(public, jnp.asarray(t, jnp.int32))
        v = np.asarray(sphere.flat(key, D, law="orthonormal", num=2), np.float64)
        slopes = 2 * np.linalg.lstsq(v.T, estimate.astype(np.float64), rcond=None)[0]
        own = keys_lib.at_step(root, t)  # A period is one step.
        want = drawn.increments(plan.correlation, own, std, 2, 1)[0]
        found = slopes / drawn.unit_of_means(plan)
        np.testing.assert_allclose(found, want, rtol=2e-6, atol=0.5)


@pytest.mark.parametrize("sampler", [WHOLE, SAMPLED])
@pytest.mark.slow  # A study; the integers are above.
def test_noise_of_several_passes_adds_up_until_the_restart(sampler: Any) -> None:
    """A mean over 16000 squares of normals is off by 4.5% with probability 1e-6."""
    changes = {"sampling": sampler, "noise_multiplier": 1.0}
    plan = make(**SEVERAL | BOUNDED | changes)
    noise = simulated(plan, RUNS)
    first, rest = (plan.step_std(p.name) ** 2 for p in plan.phases)
    at = np.arange(STEPS) % PERIOD
    got = np.mean(noise**2, axis=(0, 2))
    np.testing.assert_allclose(got, first + at * rest, rtol=0.06)
    assert plan.noise_std**2 == pytest.approx(first + (PERIOD - 1) * rest)
    flat = noise.transpose(0, 2, 1).reshape(-1, STEPS)
    between = np.corrcoef(flat.T)[:PERIOD, PERIOD : 2 * PERIOD]
    np.testing.assert_allclose(between, 0, atol=0.05)


def test_noise_follows_the_movement() -> None:
    plan = make(**SEVERAL | BOUNDED, noise_multiplier=1.0, scale_with_movement=True)
    points = np.zeros((STEPS, D), np.float32)
    # Not at all, half of the longest, and more than it.
    points[:, 0] = D_STEP * np.array([0.0, 0.0, 1.0, 1.0, 4.0, 4.0, 4.0])
    noise = simulated(plan, RUNS, points)
    got = np.sqrt(np.mean(np.diff(noise, axis=1) ** 2, axis=(0, 2)))
    std = plan.step_std("difference")
    # Steps 1, 2, 4 and 5 are differences.
    assert got[[0, 4]].max() < 1e-5 * std
    np.testing.assert_allclose(got[[1, 3]], [std / 2, std], rtol=0.04)


@pytest.mark.slow  # A study; the integers are above.
def test_noise_of_a_scalar_release() -> None:
    plan = make(**SCALAR | BOUNDED | {"noise_multiplier": 1.0})
    noise = simulated(plan, RUNS)
    energy = np.mean(np.sum(noise**2, axis=-1), axis=0)
    np.testing.assert_allclose(energy, plan.node_std**2 * D / 2, rtol=0.12)
    assert D * plan.noise_std**2 == pytest.approx(plan.node_std**2 * D / 2)


# --- whole runs --------------------------------------------------------------------


@pytest.mark.slow  # As in test_gradient.py, whole runs.
def test_microbatches_change_nothing_but_rounding() -> None:
    plan = make(**FIRST | BOUNDED | {"noise_multiplier": 1.0})
    whole, parts = (
        jaxdp.fit(
            plan,
            KEYS,
            jnp.ones(D),
            records(),
            value_fn=kinked,
            microbatch_size=size,
        ).params
        for size in (None, 5)
    )
    np.testing.assert_allclose(whole, parts, atol=1e-3)


def test_a_lazy_loss_has_no_gradients() -> None:
    lazy = jaxdp.LazyLoss(lambda params, batch, at: batch @ at("", params))
    plan = make(**FIRST)
    tx, w = jaxdp.private_oracle(plan, KEYS), jnp.ones(D)
    batch = sampling.batch(plan, KEYS, 0, records(), phase="restart")
    with pytest.raises(TypeError, match="value_fn"):
        tx.update(None, tx.init(w), w, value_fn=lazy, batch=batch, phase="restart")


def test_a_step_of_the_wrong_phase_reads_no_record() -> None:
    plan = make(**SEVERAL | BOUNDED)
    tx, w = jaxdp.private_oracle(plan, KEYS), jnp.ones(D)
    data = records()
    batch = sampling.batch(plan, KEYS, 0, data, phase="difference")
    out, _ = tx.update(
        None, tx.init(w), w + 1, value_fn=kinked, batch=batch, phase="difference"
    )
    np.testing.assert_array_equal(out, 0)
