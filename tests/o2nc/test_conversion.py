"""Online-to-non-convex conversion against its plain form, on exact gradients."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.o2nc.conversion import O2NCState

KEYS = Keys.insecure(3)


def make(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": 10_000,
        "num_steps": 12,
        "sampling": sampling.SinglePassRestarts(period=4, restart_batch_size=2),
        "relation": "replace_one",
        "restart_l2_clip_norm": 1.0,
        "l2_clip_norm": 0.5,
        "smoothing_radius": 0.5,
        "max_step": 0.1,
        "window": 4,
        "learning_rate": 0.04,
        "noise_multiplier": 1.0,
    }
    return plans.O2NC(**base | changes)


class Trace(NamedTuple):
    """What a run saw: queries (T + 1, d), and the states before each of them."""

    queries: np.ndarray
    states: list[O2NCState]

    @property
    def last(self) -> O2NCState:
        return self.states[-1]


def run(
    plan: plans.O2NC,
    gradient: Callable[[jax.Array], jax.Array],
    start: Any,
    keys: Keys = KEYS,
    **options: Any,
) -> Trace:
    tx = jaxdp.o2nc(plan, keys, **options)
    update = jax.jit(lambda s, w: tx.update(gradient(w), s, w))
    w, state = jnp.asarray(start, jnp.float32), tx.init(jnp.asarray(start, jnp.float32))
    queries, states = [np.asarray(w)], [state]
    for _ in range(plan.num_steps):
        updates, state = update(state, w)
        w = optax.apply_updates(w, updates)
        queries.append(np.asarray(w))
        states.append(state)
    return Trace(np.stack(queries), states)


def plain(
    plan: plans.O2NC, gradient: Callable[[Any], Any], start: Any, s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Algorithm 3 as it is written, with x: queries, windows' means, increments."""
    d = plan.max_step
    x, delta = np.asarray(start, np.float64), np.zeros(np.shape(start))
    queries, means, deltas, squares = [], [], [], 0.0
    window: list[np.ndarray] = []
    segments = plan.num_windows * plan.window
    for t in range(segments):
        at = t % plan.window
        if at == 0 and plan.reset:
            delta, squares = np.zeros_like(delta), 0.0
        w = x + s[t] * delta
        x = x + delta
        deltas.append(delta)
        window.append(w)
        if at == plan.window - 1:
            means.append(np.mean(window, axis=0))
            window = []
            if plan.skip_last_query:
                continue
        queries.append(w)
        g = np.asarray(gradient(w))
        squares += float(np.sum(g * g))
        eta = plan.learning_rate
        if eta is None:
            eta = math.sqrt(2) * d / math.sqrt(squares)
        v = delta - eta * g
        delta = v * min(1, d / max(np.linalg.norm(v), 1e-30))
    return np.array(queries), np.array(means), np.array(deltas)


def test_the_trace_in_one_dimension() -> None:
    """h = x^2 / 2, exact gradients, s = 1/2: every number by hand."""
    plan = make(reset=False, num_steps=8, window=8)
    got = run(plan, lambda w: w, 1.0, fractions=np.full(9, 0.5))
    np.testing.assert_allclose(
        got.queries[:8],
        [1, 0.98, 0.9204, 0.8308, 0.7308, 0.6308, 0.5308, 0.4308],
        atol=1e-6,
    )
    deltas = [float(s.increment) for s in got.states[:5]]
    np.testing.assert_allclose(deltas, [0, -0.04, -0.0792, -0.1, -0.1], atol=1e-7)
    # x_8 = w_8 + (1 - s_8) Delta_8
    assert got.queries[7] + 0.5 * deltas[4] == pytest.approx(0.3808, abs=1e-6)


# Every two of them together.
@pytest.mark.parametrize(
    ("window", "rate", "how"),
    [
        (window, (0.04, None)[(i + j) % 2], how)
        for i, window in enumerate((2, 4, 5))
        for j, how in enumerate(("reset", "skip", "no reset"))
    ],
)
def test_it_is_the_algorithm(window: int, rate: float | None, how: str) -> None:
    plan = make(
        window=window,
        learning_rate=rate,
        reset=how != "no reset",
        skip_last_query=how == "skip",
    )
    rng = np.random.default_rng(window)
    s = rng.uniform(size=plan.num_steps * 2 + 3).astype(np.float32)
    h = np.array([1.0, 3.0, 0.2], np.float32)
    start = np.array([0.5, -0.3, 0.2])
    got = run(plan, lambda w: h * w, start, fractions=s)
    queries, means, _ = plain(plan, lambda w: h * w, start, s)
    np.testing.assert_allclose(got.queries[: len(queries)], queries, atol=2e-6)
    output = np.asarray(got.last.output)
    assert int(got.last.windows) == len(means) == plan.num_windows
    assert np.abs(means - output).max(axis=1).min() < 2e-6


def test_identities_of_a_run() -> None:
    plan = make(num_steps=60, window=8, learning_rate=0.3)
    rng = np.random.default_rng(0)
    s = rng.uniform(size=62).astype(np.float32)
    got = run(plan, jnp.sign, np.array([0.4, -0.2]), fractions=s)
    w = got.queries.astype(np.float64)
    delta = np.stack([np.asarray(t.increment, np.float64) for t in got.states])
    moves = (1 - s[:60, None]) * delta[:-1] + s[1:61, None] * delta[1:]
    np.testing.assert_allclose(np.diff(w, axis=0), moves, atol=1e-6)
    assert np.linalg.norm(delta, axis=1).max() <= plan.max_step * (1 + 1e-6)
    assert np.linalg.norm(np.diff(w, axis=0), axis=1).max() <= 2 * plan.max_step
    # With reset a window begins where the one before it ended: x_{T+1}.
    for first in range(8, 60, 8):
        assert (delta[first] == 0).all()
        end = w[first - 1] + (1 - s[first - 1]) * delta[first - 1]
        np.testing.assert_allclose(w[first], end, atol=1e-6)
        window = w[first - 8 : first]
        radius = plan.max_step * (9 / 2 - 1 / 8)
        spread = np.linalg.norm(window - window.mean(axis=0), axis=1).max()
        assert spread <= radius * (1 + 1e-5)


@pytest.mark.parametrize(("window", "factor"), [(1, 0.0), (8, 4.375)])
def test_the_radius_of_a_window_is_attained(window: int, factor: float) -> None:
    """A straight line, s = 0 in the first step and 1 in the others."""
    plan = make(reset=False, window=window, num_steps=2 * window, learning_rate=100.0)
    s = np.ones(2 * window + 2, np.float32)
    s[window] = 0
    got = run(plan, jnp.ones_like, 0.0, fractions=s)
    queries = got.queries[window : 2 * window]
    spread = np.abs(queries - queries.mean()).max()
    assert spread == pytest.approx(factor * plan.max_step, rel=1e-5)


@pytest.mark.slow  # A study of public steps.
def test_regret_is_bounded() -> None:
    """D G sqrt(T) with eta = D / (G sqrt(T)), for any gradients of norm G at most."""
    t, d = 64, 0.1
    plan = make(window=t, num_steps=t, learning_rate=d / math.sqrt(t), max_step=d)
    rng = np.random.default_rng(1)
    for kind in range(4):
        g = rng.normal(size=(t, 3)) + kind * np.array([1.0, 0, 0])
        g /= np.maximum(1, np.linalg.norm(g, axis=1, keepdims=True))
        if kind == 3:
            g = (
                np.tile([[1.0, 0, 0]], (t, 1))
                * np.where(np.arange(t) < 20, 1, -1)[:, None]
            )
        grads = jnp.asarray(g, jnp.float32)
        tx = jaxdp.o2nc(plan, KEYS)
        state, total = tx.init(jnp.zeros(3)), 0.0
        update = jax.jit(tx.update)
        for row in grads:
            total += float(row @ state.increment)
            _, state = update(row, state, jnp.zeros(3))
        best = -d * float(jnp.linalg.norm(grads.sum(axis=0)))
        assert total - best <= d * math.sqrt(t) * (1 + 1e-5)


def test_the_average_of_squared_moves() -> None:
    """7/6 D^2 where increments are saturated and collinear."""
    plan = make(reset=False, window=4, num_steps=4000, learning_rate=1e3)
    tx = jaxdp.o2nc(plan, KEYS)

    def body(carry: Any, _: None) -> Any:
        w, state = carry
        updates, state = tx.update(jnp.ones(()), state, w)
        return (w + updates, state), updates

    start = jnp.zeros(())
    _, moves = jax.jit(lambda c: jax.lax.scan(body, c, None, length=4000))(
        (start, tx.init(start))
    )
    squares = np.asarray(moves[2:], np.float64) ** 2
    # Of (1 - s + s')^2; moves beside each other share an s.
    error = 2 * squares.std() / math.sqrt(len(squares))
    assert abs(squares.mean() - 7 / 6 * plan.max_step**2) < 6 * error


def test_the_window_changes_nothing_without_reset() -> None:
    s = np.random.default_rng(2).uniform(size=14)
    paths = [
        run(make(reset=False, window=w), jnp.sign, 0.35, fractions=s).queries
        for w in (1, 4, 12)
    ]
    np.testing.assert_array_equal(paths[0], paths[1])
    np.testing.assert_array_equal(paths[0], paths[2])


def test_every_complete_window_is_returned_equally_often() -> None:
    plan = make(num_steps=14, window=4)  # Three windows, and half of one.

    def chosen(seed: jax.Array) -> jax.Array:
        tx = jaxdp.o2nc(plan, Keys.insecure(seed))
        state = tx.init(jnp.zeros(()))

        def body(state: Any, t: jax.Array) -> Any:
            return tx.update(jnp.zeros(()), state, t // 4 + 1.0)[1], None

        state, _ = jax.lax.scan(body, state, jnp.arange(14.0))
        return jaxdp.o2nc_output((state,), jnp.zeros(()))

    runs = 3000
    found = np.asarray(jax.jit(jax.vmap(chosen))(jnp.arange(runs)))
    counts = np.array([(found == k).sum() for k in (1, 2, 3)])
    assert counts.sum() == runs
    # Chi-square of two degrees beyond 30: below 1e-6.
    assert ((counts - runs / 3) ** 2 / (runs / 3)).sum() < 30


def test_before_the_first_window_the_params_are_returned() -> None:
    tx = jaxdp.o2nc(make(), KEYS)
    state = tx.init(jnp.ones(2))
    np.testing.assert_array_equal(jaxdp.o2nc_output(state, 3 * jnp.ones(2)), [3, 3])
    with pytest.raises(ValueError, match=r"state of one jaxdp\.o2nc, got none"):
        jaxdp.o2nc_output((), jnp.ones(2))
    with pytest.raises(ValueError, match="got 2"):
        jaxdp.o2nc_output((state, state), jnp.ones(2))
    with pytest.raises(ValueError, match="of the shapes that the state was made for"):
        jaxdp.o2nc_output(state, jnp.ones(1))


def test_it_stops_at_the_horizon() -> None:
    plan = make(num_steps=4, window=2)
    tx = jaxdp.o2nc(plan, KEYS)
    w, state = jnp.ones(2), tx.init(jnp.ones(2))
    for _ in range(4):
        _, state = tx.update(w, state, w)
    again, after = tx.update(w, state, w)
    np.testing.assert_array_equal(again, [0, 0])
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            continue
        np.testing.assert_array_equal(one, two)


def test_trees_keep_their_dtypes_and_what_is_fixed() -> None:
    params = {
        "half": jnp.ones(3, jnp.bfloat16),
        "wide": jnp.full((2,), 0.1),
        "count": jnp.asarray(7),
    }
    tx = jaxdp.o2nc(make(num_steps=8, window=4), KEYS)
    state = tx.init(params)
    zeros, update = jax.tree.map(jnp.zeros_like, params), jax.jit(tx.update)
    for t in range(8):
        g = zeros if t else zeros | {"half": jnp.ones(3, jnp.bfloat16)}
        updates, state = update(g, state, params)
        assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(
            jnp.result_type, params
        )
        params = optax.apply_updates(params, updates)
    output = jaxdp.o2nc_output(state, params)
    assert output["count"] == 7
    np.testing.assert_array_equal(output["wide"], np.full(2, 0.1, np.float32))
    assert (output["half"] < 1).all()


def test_infinite_and_zero_gradients_are_projected() -> None:
    plan = make(num_steps=4, window=4, learning_rate=1.0)
    tx = jaxdp.o2nc(plan, KEYS)
    state = tx.init(jnp.ones(2))
    _, state = tx.update(jnp.zeros(2), state, jnp.ones(2))
    np.testing.assert_array_equal(state.increment, [0, 0])
    _, state = tx.update(jnp.array([1e30, 0]), state, jnp.ones(2))
    np.testing.assert_allclose(state.increment, [-plan.max_step, 0], rtol=1e-6)


def test_the_step_size_can_be_injected() -> None:
    plan = make()
    inject = optax.inject_hyperparams(
        jaxdp.o2nc, static_args=("plan", "keys", "fractions")
    )
    tx = inject(plan, KEYS, learning_rate=0.02)
    state = tx.init(jnp.ones(2))
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(0.02)
    _, state = tx.update(jnp.ones(2), state, jnp.ones(2))
    np.testing.assert_allclose(state.inner_state.increment, [-0.02, -0.02], rtol=1e-5)


def test_it_stands_after_any_gradient() -> None:
    """In a chain, under jit and vmap over seeds, on a gradient that is not private."""
    plan = make(num_steps=40, window=8, max_step=0.05)

    def one(seed: jax.Array) -> jax.Array:
        keys = Keys.insecure(seed)
        tx = optax.chain(optax.clip_by_global_norm(1.0), jaxdp.o2nc(plan, keys))
        w = jnp.array([0.5, -0.5])
        state = tx.init(w)

        def body(carry: Any, _: None) -> Any:
            w, state = carry
            updates, state = tx.update(2 * jnp.sign(w), state, w)
            return (optax.apply_updates(w, updates), state), None

        (w, state), _ = jax.lax.scan(body, (w, state), None, length=40)
        return jnp.abs(w).max()

    ends = np.asarray(jax.jit(jax.vmap(one))(jnp.arange(5)))
    assert (ends < 0.4).all() and len(set(ends.tolist())) == 5


@pytest.mark.parametrize("wrap", ["masked", "partition"])
def test_it_moves_a_part_of_the_params(wrap: str) -> None:
    plan, params = make(num_steps=4, window=2), {"w": jnp.ones(2), "b": jnp.ones(())}
    tx: Any = jaxdp.o2nc(plan, KEYS)
    if wrap == "masked":
        tx = optax.masked(tx, {"w": True, "b": False})
    else:
        others = {"move": tx, "stay": optax.set_to_zero()}
        tx = optax.partition(others, {"w": "move", "b": "stay"})
    state = tx.init(params)
    grads = {"w": jnp.ones(2), "b": jnp.zeros(())}
    for _ in range(4):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    output = jaxdp.o2nc_output(state, params)
    assert output["b"] == 1 and (output["w"] < 1).all()


def test_double_precision() -> None:
    with jax.enable_x64(True):
        tx = jaxdp.o2nc(make(learning_rate=None), Keys.insecure(3))
        w = jnp.ones(2, jnp.float64)
        state = tx.init(w)
        again = jax.jit(tx.update)(w, state, w)[1]
        chex.assert_trees_all_equal_dtypes(state, again)
        assert again.increment.dtype == jnp.float64


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"keys must be a jaxdp\.Keys"):
        jaxdp.o2nc(make(), jax.random.key(0))
    other = plans.DPGD(
        num_examples=10,
        num_steps=2,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
    )
    with pytest.raises(ValueError, match="family 'o2nc', got DPGD"):
        jaxdp.o2nc(other, KEYS)
    tx = jaxdp.o2nc(make(), KEYS)
    with pytest.raises(ValueError, match="params must be passed"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    none: Any = None
    with pytest.raises(ValueError, match=r"got None; .*chain\(jaxdp\.private_oracle"):
        tx.update(none, tx.init(jnp.ones(2)), jnp.ones(2))
    # A run without its oracle has released nothing that could be reported.
    state = optax.chain(tx).init(jnp.ones(2))
    part = (
        r"releases, as plan\.transform\(keys\) makes it, .*O2NCState, which counts none"
    )
    with pytest.raises(ValueError, match=part):
        jaxdp.report(make(), state)
    bare = dataclasses.replace(make(), noise_multiplier=None)
    jaxdp.o2nc(bare, KEYS)  # Of the conversion alone, no noise is asked.
