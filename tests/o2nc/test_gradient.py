"""The private oracle: running estimates, bounds, noise, and what one record can do."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.kernels import smoothed_gradient, sphere
from jaxdp.o2nc.gradient import PrivateOracleState
from tests import drawn

KEYS = Keys.insecure(11)
D = 4
PERIOD, B1, B2, STEPS = 4, 3, 2, 10
N = 40


def make(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": STEPS,
        "sampling": sampling.SinglePassRestarts(
            period=PERIOD, restart_batch_size=B1, batch_size=B2
        ),
        "relation": "replace_one",
        "restart_l2_clip_norm": math.inf,
        "l2_clip_norm": math.inf,
        "smoothing_radius": 0.5,
        "max_step": 0.1,
        "window": 4,
        "num_directions": D,
        "learning_rate": 0.1,
        "noise_multiplier": 0.0,
    }
    return plans.O2NC(**base | changes)


BOUNDED: dict[str, Any] = {"restart_l2_clip_norm": 1.0, "l2_clip_norm": 0.5}
NOISY = BOUNDED | {"noise_multiplier": 1.0}


def records(seed: int = 0) -> jax.Array:
    z = np.random.default_rng(seed).normal(size=(N, D))
    return jnp.asarray(z / np.linalg.norm(z, axis=1, keepdims=True), jnp.float32)


def linear(x: jax.Array, batch: jax.Array) -> jax.Array:
    return batch @ x


def kinked(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.abs(batch @ x) + jnp.abs(x).sum() / 4


def present(x: jax.Array, batch: jax.Array) -> jax.Array:
    """The same, and nothing for a record of zeros."""
    return jnp.where(batch[:, 0] == 0, 0.0, kinked(x, batch))


def phases(plan: plans.O2NC) -> list[str]:
    names = [p.name for p in plan.phases for _ in range(p.num_steps)]
    return [names[t % len(names)] for t in range(plan.num_steps)]


@functools.cache
def compiled(plan: plans.O2NC, value_fn: Any, microbatch_size: int | None) -> Any:
    """The transformation, and its step as one program for each phase."""
    tx = jaxdp.private_oracle(plan, KEYS, microbatch_size=microbatch_size)

    def update(state: Any, w: jax.Array, t: jax.Array, data: Any, phase: str) -> Any:
        batch = sampling.batch(plan, KEYS, t, data, phase=phase)
        return tx.update(None, state, w, value_fn=value_fn, batch=batch, phase=phase)

    return tx, jax.jit(update, static_argnums=4)


def stepping(tx: Any, value_fn: Any) -> Any:
    """(state, params, batch, phase) -> (updates, state), compiled."""

    def update(state: Any, params: Any, batch: Any, phase: str) -> Any:
        return tx.update(
            None, state, params, value_fn=value_fn, batch=batch, phase=phase
        )

    return jax.jit(update, static_argnums=3)


def released(
    plan: plans.O2NC,
    points: np.ndarray,
    data: jax.Array,
    value_fn: Callable[..., jax.Array] = linear,
    microbatch_size: int | None = None,
) -> np.ndarray:
    """The estimates (T, d) at given points."""
    tx, step = compiled(plan, value_fn, microbatch_size)
    state = tx.init(jnp.asarray(points[0]))
    out = []
    for t, phase in enumerate(phases(plan)):
        w = jnp.asarray(points[t], jnp.float32)
        g, state = step(state, w, jnp.asarray(t), data, phase)
        out.append(np.asarray(g))
    return np.stack(out)


POINTS = np.cumsum(
    0.05 * np.random.default_rng(5).normal(size=(STEPS, D)), axis=0
).astype(np.float32)


def reads(t: int) -> range:
    """The records of a step."""
    period, at = divmod(t, PERIOD)
    first = period * (B1 + (PERIOD - 1) * B2)
    if at == 0:
        return range(first, first + B1)
    first += B1 + (at - 1) * B2
    return range(first, first + B2)


# --- against the algorithm as it is written ---


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("antithetic", False),
        pytest.param("one_sided", True, marks=pytest.mark.slow),
        pytest.param("independent", False, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_algorithm(kind: str, share: bool) -> None:
    """g_1 = mean GRAD, g_t = g_{t-1} + mean DIFF, on the records of each step."""
    plan = make(difference=kind, share_directions=share, num_directions=3)
    data, tx = records(), jaxdp.private_oracle(plan, KEYS)
    got = released(plan, POINTS, data, kinked)
    root = tx.init(jnp.asarray(POINTS[0])).direction
    draw = lambda key: sphere.directions(  # noqa: E731
        key, jnp.asarray(POINTS[0]), law="orthonormal", num=3
    )
    common: dict[str, Any] = {"smoothing_radius": 0.5, "share": share}

    @jax.jit
    def restart(x: jax.Array, index: jax.Array, key: jax.Array) -> jax.Array:
        return smoothed_gradient.gradients(
            kinked, x, data[index], index, key, draw, **common
        )

    @jax.jit
    def change(
        x: jax.Array, y: jax.Array, index: jax.Array, key: jax.Array
    ) -> jax.Array:
        return smoothed_gradient.differences(
            kinked, x, y, data[index], index, key, draw, kind=kind, **common
        )

    g = np.zeros(D)
    for t in range(STEPS):
        # A record's own directions are keyed by where it lies in the data.
        index, key = jnp.asarray(reads(t), jnp.uint32), jax.random.fold_in(root, t)
        here, there = jnp.asarray(POINTS[t]), jnp.asarray(POINTS[t - 1])
        if t % PERIOD == 0:
            g, vectors = np.zeros(D), restart(here, index, key)
        else:
            vectors = change(here, there, index, key)
        g = g + np.asarray(vectors, np.float64).mean(axis=0)
        np.testing.assert_allclose(got[t], g, atol=2e-5)


def test_all_directions_of_linear_losses_give_the_mean_of_the_restart() -> None:
    """Orthonormal, m = d, antithetic, no noise: the same gradient for a whole period."""
    data = records()
    got = released(make(), POINTS, data)
    for t in range(STEPS):
        first = list(reads(t - t % PERIOD))
        np.testing.assert_allclose(
            got[t], np.asarray(data)[first].mean(axis=0), atol=3e-5
        )


def test_a_run_on_linear_losses_is_a_straight_line() -> None:
    """Delta_t = -min(D, (t - 1) eta |z|) z / |z| exactly, as everything else is."""
    plan = make(num_steps=4, learning_rate=0.05)
    data = records()
    tx = optax.chain(jaxdp.private_oracle(plan, KEYS), jaxdp.o2nc(plan, KEYS))
    w, state = jnp.zeros(D), tx.init(jnp.zeros(D))
    update = stepping(tx, linear)
    z = np.asarray(data)[:B1].mean(axis=0)
    length = float(np.linalg.norm(z))
    for t, phase in enumerate(phases(plan)):
        delta = -min(plan.max_step, t * 0.05 * length) * z / length
        np.testing.assert_allclose(state[1].increment, delta, atol=1e-5)
        batch = sampling.batch(plan, KEYS, t, data, phase=phase)
        updates, state = update(state, w, batch, phase)
        w = optax.apply_updates(w, updates)


def test_every_step_restarts_with_a_period_of_one() -> None:
    plan = make(
        sampling=sampling.SinglePassRestarts(period=1, restart_batch_size=B1),
        num_steps=6,
    )
    assert [p.name for p in plan.phases] == ["restart"]
    data = records()
    got = released(plan, POINTS, data)
    for t in range(6):
        mean = np.asarray(data)[B1 * t : B1 * t + B1].mean(axis=0)
        np.testing.assert_allclose(got[t], mean, atol=3e-5)


def test_every_record_is_read_once() -> None:
    """Marked records: the increments that they move, one step each, in order."""
    plan = make(**BOUNDED, num_directions=1)
    steps = []
    empty = released(plan, POINTS, jnp.zeros((N, D)), present)
    for i in range(24):
        data = jnp.zeros((N, D)).at[i].set(100.0)
        other = released(plan, POINTS, data, present)
        moved = np.diff(other - empty, axis=0, prepend=0)
        moved[::PERIOD] = (other - empty)[::PERIOD]
        changed = np.flatnonzero(np.abs(moved).max(axis=1) > 1e-6)
        assert len(changed) <= 1
        steps += changed.tolist()
        if len(changed):
            assert i in reads(int(changed[0]))
    read = [t for t in range(STEPS) for _ in reads(t)]
    assert steps == read[: len(steps)] and len(steps) > 20


# --- bounds ---


@pytest.mark.parametrize("place", [0, B1, B1 + (PERIOD - 1) * B2 - 1])
def test_one_record_moves_a_mean_by_at_most_its_share(place: int) -> None:
    """Antipodal and wild records: 2C / B, attained, whatever the losses."""
    plan = make(**BOUNDED, difference="one_sided")

    def wild(x: jax.Array, batch: jax.Array) -> jax.Array:
        return batch[:, 0] * 1e6 * jnp.sum(x)

    ones = jnp.zeros((N, D)).at[place, 0]
    plus, minus = (released(plan, POINTS, ones.set(s), wild) for s in (1.0, -1.0))
    moved = np.diff(plus - minus, axis=0, prepend=0)
    moved[::PERIOD] = (plus - minus)[::PERIOD]
    sizes = np.linalg.norm(moved, axis=1)
    (t,) = np.flatnonzero(sizes > 1e-5)
    bound = 2 * 1.0 / B1 if t % PERIOD == 0 else 2 * 0.5 / B2
    assert sizes[t] <= bound * (1 + 1e-6)
    assert sizes[t] > 0.99 * bound


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_record_that_is_not_finite_counts_nothing(bad: float) -> None:
    plan = make(**BOUNDED)
    data = records()
    for place in (0, B1 + 1):
        got = released(plan, POINTS, data.at[place].set(bad), kinked)
        assert np.isfinite(got).all()
        if not math.isfinite(bad):
            without = released(plan, POINTS, data.at[place].set(0.0), present)
            chex.assert_trees_all_close(got, without, atol=1e-6)


def test_microbatches_change_nothing() -> None:
    plan, data = make(**NOISY), records()
    whole = released(plan, POINTS, data)
    parts = released(plan, POINTS, data, microbatch_size=2)  # 3 = 2 + 1 records.
    np.testing.assert_allclose(parts, whole, atol=2e-4)


# --- noise ---


@pytest.mark.parametrize("name", ["tree", "blt_2"])
@pytest.mark.slow  # A study; every number is in the next test.
def test_noise_is_that_of_the_plan(name: str) -> None:
    """Zero losses: what is released is the noise, with the plan's covariance."""
    plan = make(**NOISY, prefix_noise=name, num_steps=8, num_directions=1)
    at, data = jnp.zeros(50), jnp.zeros((N, 50))

    def run(seed: jax.Array) -> jax.Array:
        keys = Keys.insecure(seed)
        tx = jaxdp.private_oracle(plan, keys)

        def step(phase: str, state: Any, t: jax.Array) -> Any:
            batch = sampling.batch(plan, keys, t, data, phase=phase)
            g, state = tx.update(
                None, state, at, value_fn=linear, batch=batch, phase=phase
            )
            return state, g

        def period(state: Any, first: jax.Array) -> Any:
            state, g = step("restart", state, first)
            rest = functools.partial(step, "difference")
            state, others = jax.lax.scan(rest, state, first + 1 + jnp.arange(3))
            return state, jnp.concatenate([g[None], others])

        return jax.lax.scan(period, tx.init(at), jnp.array([0, 4]))[1].reshape(8, 50)

    noise = np.asarray(
        jax.jit(lambda seeds: jax.lax.map(run, seeds))(jnp.arange(400)), np.float64
    )
    flat = noise.transpose(0, 2, 1).reshape(-1, 8) / plan.node_std
    b = np.tril(np.ones((PERIOD, PERIOD))) @ np.linalg.inv(plan.correlation.strategy())
    expected = np.kron(np.eye(2), b @ b.T)
    got = flat.T @ flat / len(flat)
    # 20 000 draws: 6 standard errors, below 1e-7 over all entries.
    scale = np.sqrt(np.diag(expected))
    error = np.sqrt(2 / len(flat)) * np.outer(scale, scale)
    assert (np.abs(got - expected) < 6 * error).all()
    assert plan.noise_std == pytest.approx(
        plan.node_std * np.sqrt(np.diag(b @ b.T)).max()
    )


@pytest.mark.parametrize(
    ("name", "relation"),
    [
        ("tree", "replace_one"),
        # Numbers with fractions: in fast tests in test_prefix_sum.py.
        pytest.param("blt_2", "zero_out", marks=pytest.mark.slow),
    ],
)
def test_estimates_without_signal_are_the_noise(name: str, relation: str) -> None:
    """Every number of a run, from the plan's numbers and its keys."""
    plan = make(**NOISY, prefix_noise=name, relation=relation)
    got = released(plan, POINTS, jnp.zeros((N, D)))
    std, root = drawn.std_of_node(plan), drawn.correlated_root(plan, KEYS)
    assert std == plan.grid_noise_std
    unit = drawn.unit_of_means(plan)
    for number, first in enumerate(range(0, STEPS, PERIOD)):
        steps = min(PERIOD, STEPS - first)
        noise = drawn.increments(
            plan.correlation, keys_lib.at_step(root, number), std, D, steps
        )
        want = np.cumsum(noise, axis=0)
        estimates = got[first : first + steps]
        if plan.correlation.integral:
            np.testing.assert_array_equal(drawn.in_units(estimates, unit), want)
        else:  # Roundings of float32, some of them of what was added before.
            np.testing.assert_allclose(estimates / unit, want, rtol=1e-6, atol=0.5)


def test_released_numbers_lie_on_the_grid() -> None:
    """With integers, increments are multiples of the unit that the phases share.

    A grid unit of a phase is a whole number of them, noise included.
    """
    plan, data = make(**NOISY, prefix_noise="tree"), records()
    tx, step = compiled(plan, linear, None)
    state: Any = tx.init(jnp.asarray(POINTS[0]))
    before = np.zeros(D)
    for t, phase in enumerate(phases(plan)[:2]):
        grid = plan.grid(phase)
        assert grid.bits is not None
        _, state = step(state, jnp.asarray(POINTS[t]), jnp.asarray(t), data, phase)
        after = np.asarray(state.estimate, np.float64)
        assert grid.noise_unit == pytest.approx(drawn.unit_of_means(plan), rel=1e-12)
        units = (after - before) / grid.noise_unit
        before = after
        # The sum with the estimate is rounded to float32; the increment is not.
        assert np.abs(units - np.round(units)).max() < 0.1


@pytest.mark.parametrize(
    "phase", ["restart", pytest.param("difference", marks=pytest.mark.slow)]
)
def test_a_wrong_phase_reads_no_record(phase: str) -> None:
    """Data that would change everything change nothing."""
    plan = make(**NOISY)
    tx = jaxdp.private_oracle(plan, KEYS)
    update = stepping(tx, kinked)
    outs = []
    for data in (records(0), 100 * records(1)):
        state: Any = tx.init(jnp.asarray(POINTS[0]))
        if phase == "restart":  # One right step first.
            batch = sampling.batch(plan, KEYS, 0, records(0), phase="restart")
            _, state = update(state, jnp.ones(D), batch, "restart")
        # Drawn for a step of that phase, given at another one.
        batch = sampling.batch(
            plan, KEYS, 4 if phase == "restart" else 1, data, phase=phase
        )
        assert np.asarray(batch.mask).all()
        # That it is another step's batch would be enough to count nothing.
        batch = dataclasses.replace(batch, step=state.horizon.count)
        out, _ = update(state, jnp.zeros(D), batch, phase)
        outs.append(np.asarray(out))
    np.testing.assert_array_equal(outs[0], outs[1])


# --- state, trees, arguments ---


@pytest.mark.slow  # Each is in test_conformance.py; here both in one tree.
def test_frozen_and_narrow_leaves() -> None:
    plan = make(**NOISY)
    params = {
        "w": jnp.zeros(D, jnp.bfloat16),
        "frozen": jnp.ones(3),
        "count": jnp.asarray(2),
    }
    options: dict[str, Any] = {"trainable": lambda path: path == "w"}
    tx = plan.transform(KEYS, **options)
    state = tx.init(params)
    assert state.oracle.estimate.shape == (D,)
    update = stepping(tx, lambda p, b: b @ p["w"].astype(jnp.float32))
    for t, phase in enumerate(phases(plan)[:3]):
        batch = sampling.batch(plan, KEYS, t, records(), phase=phase)
        updates, state = update(state, params, batch, phase)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        assert (updates["frozen"] == 0).all() and updates["count"] == 0
        params = optax.apply_updates(params, updates)
    assert (params["w"] != 0).any()


@pytest.mark.slow  # Runs of fit are in test_conformance.py.
def test_chain_and_the_plans_own_transformation_agree() -> None:
    plan, data = make(**NOISY), records()
    one = plan.transform(KEYS)
    two = optax.chain(jaxdp.private_oracle(plan, KEYS), jaxdp.o2nc(plan, KEYS))
    w = jnp.ones(D)
    states: list[Any] = [one.init(w), two.init(w)]
    batch = sampling.batch(plan, KEYS, 0, data, phase="restart")
    outs = []
    for i, tx in enumerate((one, two)):
        updates, states[i] = stepping(tx, kinked)(states[i], w, batch, "restart")
        outs.append(updates)
    chex.assert_trees_all_equal(*outs)
    report = jaxdp.report(plan, states[1])
    assert report["algorithm"] == "o2nc" and report["steps_done"] == 1
    assert isinstance(states[1][0], PrivateOracleState)


def test_wrong_arguments_are_named() -> None:
    plan, data = make(**NOISY), records()
    tx = jaxdp.private_oracle(plan, KEYS)
    state = tx.init(jnp.zeros(D))
    good = sampling.batch(plan, KEYS, 0, data, phase="restart")

    def update(**changes: Any) -> None:
        given = {"value_fn": linear, "batch": good, "phase": "restart"} | changes
        tx.update(None, state, jnp.zeros(D), **given)

    with pytest.raises(
        ValueError, match="phase must be one of the plan's, 'restart', 'd"
    ):
        update(phase=None)
    with pytest.raises(ValueError, match="got 'middle'"):
        update(phase="middle")
    with pytest.raises(ValueError, match="batch is of a step of the phase 'restart'"):
        update(phase="difference")
    with pytest.raises(ValueError, match="got raw arrays"):
        update(batch=data[:B1])
    with pytest.raises(ValueError, match="phase must be one of"):
        sampling.batch(plan, KEYS, 0, data)
    with pytest.raises(ValueError, match="no noise_multiplier yet"):
        jaxdp.private_oracle(dataclasses.replace(plan, noise_multiplier=None), KEYS)
    with pytest.raises(TypeError, match=r"jaxdp\.Keys"):
        jaxdp.private_oracle(plan, jax.random.key(1))
    wide = jaxdp.private_oracle(make(**NOISY, num_directions=5), KEYS)
    start = wide.init(jnp.zeros(D))
    given: dict[str, Any] = {"value_fn": linear, "batch": good, "phase": "restart"}
    with pytest.raises(ValueError, match="at most min"):
        wide.update(None, start, jnp.zeros(D), **given)


def test_more_numbers_than_the_grid_resolves_are_refused() -> None:
    plan = make(**BOUNDED, noise_multiplier=1e4)
    bits = plan.grid_bits
    assert bits is not None and bits < 12
    tx = jaxdp.private_oracle(plan, KEYS)
    with pytest.raises(ValueError, match=f"at most {4 ** (bits - 2)} elements"):
        tx.init(jnp.zeros(4 ** (bits - 2) + 1))
