"""Entropic mirror descent: its closed form, its regret, the simplex, and optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from jaxdp.saddle.entropic import EntropicDescentState, entropic_descent

D = 6
UNIFORM = jnp.full(D, 1 / D)


def gradients(steps: int, dim: int = D, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, dim)).astype(np.float32)


def run(tx: Any, params: Any, steps: Any) -> tuple[Any, Any, Any]:
    """All iterates, in one scan; the last params and state."""

    def step(carry: Any, gradient: Any) -> Any:
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    start = (params, tx.init(params))
    (params, state), all_of_them = jax.jit(jax.lax.scan, static_argnums=0)(
        step, start, steps
    )
    return all_of_them, params, state


@pytest.mark.parametrize("schedule", [False, True])
def test_is_the_softmax_of_the_summed_gradients(schedule: bool) -> None:
    start = jnp.asarray([0.4, 0.3, 0.1, 0.1, 0.1, 0.0])
    g = gradients(20)
    rates = 0.3 / np.sqrt(1 + np.arange(20)) if schedule else np.full(20, 0.3)
    rate = (lambda count: 0.3 / jnp.sqrt(1 + count)) if schedule else 0.3
    iterates, _, state = run(entropic_descent(rate), start, g)
    with np.errstate(divide="ignore"):
        scores = np.log(np.float64(start)) - np.cumsum(rates[:, None] * g, axis=0)
    np.testing.assert_allclose(iterates, special.softmax(scores, axis=1), atol=3e-7)
    assert np.all(np.asarray(iterates)[:, -1] == 0)  # What was zero stays zero.
    assert state.count == 20 and state.logits.dtype == jnp.float32


@pytest.mark.parametrize("dim", [2, 50])
@pytest.mark.parametrize("rate", [0.01, 0.2, 2.0])
def test_regret_is_below_its_bound(dim: int, rate: float) -> None:
    """Lemma A.1, for gradients with a drift and for an adversary's."""
    steps = 200
    g = gradients(steps, dim, seed=1) + 0.3 * np.arange(dim, dtype=np.float32) / dim
    g[steps // 2 :] *= -1
    start = jnp.full(dim, 1 / dim)
    iterates, _, _ = run(entropic_descent(rate), start, g)
    played = np.concatenate([start[None], np.asarray(iterates)[:-1]])
    regret = np.sum(played * g) - g.sum(axis=0).min()
    bound = np.log(dim) / rate + rate / 2 * np.sum(np.abs(g).max(axis=1) ** 2)
    assert regret <= bound


def test_stays_on_the_simplex() -> None:
    iterates, _, _ = run(entropic_descent(0.5), UNIFORM, 3 * gradients(10_000))
    assert np.all(np.asarray(iterates) >= 0)
    np.testing.assert_allclose(np.sum(iterates, axis=1), 1, atol=D * 6e-8)


def test_a_weight_that_vanished_comes_back() -> None:
    """In bfloat16 and even in float32 it is zero at the turn; its logit is not."""
    push = jnp.zeros((80, D)).at[:40, 0].set(10).at[40:, 0].set(-10.2)
    for dtype in (jnp.bfloat16, jnp.float32):
        start = UNIFORM.astype(dtype)
        iterates, last, _ = run(entropic_descent(1.0), start, push.astype(dtype))
        assert iterates.dtype == dtype
        assert iterates[39, 0] == 0
        assert last[0] > 0.9


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_points_are_exact_in_the_dtype_of_the_params(dtype: Any) -> None:
    """Within units in the last place of the softmax of what was summed in float64."""
    with jax.enable_x64(dtype == jnp.float64):
        g = gradients(30, seed=3).astype(np.float64)
        if dtype != jnp.float64:
            g = np.asarray(g.astype(dtype), np.float64)
        start = jnp.asarray([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125], dtype)
        iterates, _, state = run(entropic_descent(0.125), start, jnp.asarray(g, dtype))
        assert iterates.dtype == dtype
        assert state.logits.dtype == jnp.promote_types(dtype, jnp.float32)
        exact = special.softmax(
            np.log(np.asarray(start, np.float64)) - 0.125 * np.cumsum(g, axis=0), axis=1
        )
        # Logits of the same dtype were rounded 30 times.
        ulps = 16 if dtype in (jnp.float32, jnp.float64) else 2
        if jnp.finfo(dtype).bits == 16:  # The ways are short: points are rounded once.
            np.testing.assert_array_equal(iterates, exact.astype(dtype))
        far = np.abs(np.asarray(iterates, np.float64) / exact - 1)
        assert np.max(far) < ulps * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(), (3, 0)])
def test_a_leaf_without_points_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="leaf 'x' is float32 of shape"):
        entropic_descent(0.1).init({"x": jnp.zeros(shape)})
    none = jnp.zeros((0, 3))  # No points, of a simplex with three vertices.
    state = entropic_descent(0.1).init(none)
    assert entropic_descent(0.1).update(none, state, none)[0].shape == (0, 3)


def test_rounding_does_not_accumulate_in_bfloat16() -> None:
    g = gradients(300, seed=2).astype(jnp.bfloat16)
    start = jnp.asarray([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125], jnp.bfloat16)
    _, low, _ = run(entropic_descent(0.1), start, g)
    _, high, _ = run(entropic_descent(0.1), start.astype(jnp.float32), g)
    np.testing.assert_allclose(
        low.astype(jnp.float32),
        high.astype(jnp.bfloat16).astype(jnp.float32),
        rtol=0.01,
    )


def test_leading_axes_hold_points_of_their_own() -> None:
    """Also where one row's scores lie far from another's."""
    g = gradients(30).reshape(30, 1, D) * np.asarray([[1.0], [1e4]], np.float32)
    rows, _, _ = run(entropic_descent(0.1), jnp.stack([UNIFORM] * 2), g)
    for i in range(2):
        one, _, _ = run(entropic_descent(0.1), UNIFORM, g[:, i])
        np.testing.assert_array_equal(rows[:, i], one)
    tx = entropic_descent(0.1)
    start = jnp.stack([UNIFORM] * 2)
    mapped, _ = jax.vmap(tx.update)(g[0], jax.vmap(tx.init)(start), start)
    np.testing.assert_allclose(start + mapped, rows[0], atol=1e-7)


def test_composes() -> None:
    """Under masked, partition, chain, inject_hyperparams and MultiSteps."""
    params = {"x": UNIFORM, "w": jnp.ones(3)}
    grads = {"x": jnp.arange(6.0), "w": jnp.ones(3)}
    mixed = {"x": True, "w": False}
    want = jax.nn.softmax(-0.1 * grads["x"])

    def point(tx: Any, times: int = 1) -> Any:
        state, moved = tx.init(params), params
        for _ in range(times):
            updates, state = jax.jit(tx.update)(grads, state, moved)
            moved = optax.apply_updates(moved, updates)
        return moved

    labels = {"x": "simplex", "w": "plain"}
    rules = {"simplex": entropic_descent(0.1), "plain": optax.sgd(0.5)}
    halved = optax.chain(optax.scale(0.5), entropic_descent(0.2))
    injected = optax.inject_hyperparams(entropic_descent)(learning_rate=0.1)
    by_schedule = optax.inject_hyperparams(entropic_descent)(
        learning_rate=lambda count: 0.1 / (1 + count)
    )
    several = optax.MultiSteps(entropic_descent(0.1), every_k_schedule=3)
    for tx, times, others in (
        (optax.masked(entropic_descent(0.1), mixed), 1, 2.0),
        (optax.partition(rules, labels), 1, 0.5),
        (optax.masked(halved, mixed), 1, 2.0),
        (optax.masked(injected, mixed), 1, 2.0),
        (optax.masked(by_schedule, mixed), 1, 2.0),
        (optax.masked(several.gradient_transformation(), mixed), 3, None),
    ):
        moved = point(tx, times)
        np.testing.assert_allclose(moved["x"], want, atol=1e-6)
        if others is not None:
            np.testing.assert_array_equal(moved["w"], jnp.full(3, others))


def test_bad_input_is_named() -> None:
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="learning_rate"):
            entropic_descent(bad)
    tx = entropic_descent(0.1)
    with pytest.raises(ValueError, match="'b'"):
        tx.init({"a": UNIFORM, "b": jnp.ones(())})
    with pytest.raises(ValueError, match="int32"):
        tx.init(jnp.ones(3, jnp.int32))
    state = tx.init(UNIFORM)
    assert isinstance(state, EntropicDescentState)
    with pytest.raises(ValueError, match="params"):
        tx.update(UNIFORM, state)
