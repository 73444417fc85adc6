"""What Optax's own tests ask of a transformation, of each of ours and of a chain."""

from collections.abc import Callable
from typing import Any

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys
from tests import methods
from tests.methods import KEYS, METHODS, Method, N, numbers

PRIVATE = [m for m in METHODS if not m.plan.runs_algorithm]
SIMPLEX = {"w": jnp.full(4, 0.25), "v": jnp.asarray([[0.5, 0.5], [0.1, 0.9]])}


def spider(plan: Any, keys: Any) -> Any:
    return jaxdp.private_spider(plan, keys)


def oracle(plan: Any, keys: Any) -> Any:
    return jaxdp.private_oracle(plan, keys)


def _of(method: Method, make: Callable[..., Any] | None = None) -> Any:
    return method.plan, make or method.make, method.params


def _named(name: str) -> Method:
    return next(m for m in METHODS if m.name == name)


#: plan, maker and params of every transformation; the plan is None without keys.
CASES: dict[str, tuple[Any, Callable[..., Any], Any]] = {
    **{m.name: _of(m) for m in PRIVATE},
    "private_oracle": _of(_named("o2nc"), oracle),
    "private_spider": _of(_named("sosp"), spider),
    "o2nc driver": _of(_named("o2nc"), jaxdp.o2nc),
    "entropic": (None, lambda plan, keys: jaxdp.entropic_descent(0.1), SIMPLEX),
    "polyak": (None, lambda plan, keys: jaxdp.polyak_average(1), methods.PARAMS),
    "dpzero, adam": _of(
        _named("dpzero-sphere-1"),
        lambda plan, keys: optax.chain(jaxdp.dpzero(plan, keys), optax.adam(0.1)),
    ),
}
#: Those that take gradients, and no data.
PUBLIC = ("o2nc driver", "entropic", "polyak")
EACH = pytest.mark.parametrize("name", CASES)


def made(name: str, keys: Any = KEYS) -> tuple[Any, Any]:
    plan, make, params = CASES[name]
    return make(plan, keys), params


def outline(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@EACH
def test_map_params(name: str) -> None:
    """Every leaf is seen once; those like the params by the first function."""
    tx, params = made(name)
    state = tx.init(params)
    seen: list[Any] = []
    mapped = optax.tree.map_params(
        tx,
        lambda x: x * 1,
        state,
        transform_non_params=lambda x: (seen.append(x), x)[1],
    )
    chex.assert_trees_all_equal_structs(mapped, state)
    for a, b in zip(numbers(mapped), numbers(state), strict=True):
        np.testing.assert_array_equal(a, b)
    kept = len(jax.tree.leaves(state)) - len(seen)
    like_params = {"dpzero, adam": 2, "o2nc driver": 3, "entropic": 1, "polyak": 1}
    if name in like_params:
        assert kept == like_params[name] * len(jax.tree.leaves(params))


@EACH
def test_an_outline_of_params_gives_an_outline_of_a_state(name: str) -> None:
    """It begins no run: the keys serve one afterwards, and no second one."""
    private = CASES[name][0] is not None and name != "o2nc driver"
    keys = Keys.from_entropy() if private else KEYS
    tx, params = made(name, keys)
    shapes = tx.init(outline(params))
    ours = shapes[0] if name == "dpzero, adam" else shapes  # Adam's has arrays.
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(ours))
    optax.tree.map_params(tx, lambda x: x, shapes)
    state = tx.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(outline(state), outline(shapes))
    if private:
        with pytest.raises(ValueError, match="keys have already served"):
            tx.init(params)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_updates_and_states_keep_their_dtypes(name: str, dtype: Any) -> None:
    """In a branch too, where the states on both sides must be alike."""
    tx, params = made(name)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    state = tx.init(params)
    step = lambda s: tx.update(params, s, params)  # noqa: E731
    stay = lambda s: (params, s)  # noqa: E731
    updates, after = jax.eval_shape(
        lambda s: jax.lax.cond(jnp.asarray(True), step, stay, s), state
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, outline(state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [n for n in CASES if n != "dpzero, adam"])
def test_strict_promotion(name: str, dtype: str) -> None:
    """Nothing is promoted that the program does not say."""
    tx, params = made(name)
    if (name, dtype) == ("private_spider", "bfloat16"):
        pytest.skip("takes float32 alone, and says so")
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    with jax.numpy_dtype_promotion("strict"):
        traced(name, tx, params)


def traced(name: str, tx: Any, params: Any) -> Any:
    """Shapes of the updates and the state of one step."""
    if name in PUBLIC:
        step = lambda s: tx.update(params, s, params)  # noqa: E731
        return jax.eval_shape(step, tx.init(params))
    plan = CASES[name][0]
    method = next(m for m in METHODS if m.plan is plan)
    mask = jnp.ones(N, bool) if method.reads == "rows" else None
    given: dict[str, Any] = {
        "value_fn": lambda p, b: jnp.zeros(len(jax.tree.leaves(b)[0]))
    }

    def step(s: Any) -> Any:
        updates = None
        batch: Any = method.data
        if method.reads == "batch":
            batch = jaxdp.sampling.batch(
                plan, KEYS, jnp.int32(0), method.data, phase=method.phases[0]
            )
            given["phase"] = method.phases[0]
            if name == "prefix_sum":
                updates = batch.records
        else:
            given["mask"] = mask
        return tx.update(updates, s, params, batch=batch, **given)

    return jax.eval_shape(step, jax.eval_shape(tx.init, params))


def test_entropic_descent_is_exact_in_float64() -> None:
    with jax.enable_x64(True):
        params = jnp.asarray([0.2, 0.3, 0.5], jnp.float64)
        tx = jaxdp.entropic_descent(0.1)
        gradient = jnp.asarray([1.0, -2.0, 0.5], jnp.float64)
        updates, _ = tx.update(gradient, tx.init(params), params)
        assert updates.dtype == jnp.float64
        want = np.asarray(params) * np.exp(-0.1 * np.asarray(gradient))
        got = np.asarray(params + updates)
        np.testing.assert_allclose(got, want / want.sum(), rtol=1e-14)


@pytest.mark.parametrize(
    "name", [n for n in CASES if n not in ("entropic", "prefix_sum")]
)
def test_python_numbers_as_params(name: str) -> None:
    """They are leaves without axes; a run begins, or the error names the leaf."""
    plan, make, _ = CASES[name]
    tx, params = make(plan, KEYS), {"a": 1.0, "b": jnp.ones(3)}
    state = tx.init(params)
    assert jax.tree.leaves(state)
    if name in PUBLIC:
        updates, _ = tx.update({"a": 0.5, "b": jnp.ones(3)}, state, params)
    else:
        value_fn = lambda p, b: p["a"] * jnp.ones(len(jax.tree.leaves(b)[0]))  # noqa: E731
        method = next(m for m in METHODS if m.plan is plan)
        batch: Any = method.data
        given: dict[str, Any] = {"mask": jnp.ones(N, bool)}
        if method.reads == "batch":
            phase = method.phases[0]
            batch = jaxdp.sampling.batch(plan, KEYS, jnp.int32(0), batch, phase=phase)
            given = {"phase": phase}
        updates, _ = jax.eval_shape(
            lambda s: tx.update(
                None, s, params, value_fn=value_fn, batch=batch, **given
            ),
            state,
        )
    assert jnp.shape(updates["a"]) == ()


@EACH
def test_flax_writes_a_state_as_a_dictionary_and_back(name: str) -> None:
    tx, params = made(name)
    state = tx.init(params)
    again = flax.serialization.from_state_dict(
        state, flax.serialization.to_state_dict(state)
    )
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for a, b in zip(numbers(again), numbers(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_run_begins_within_an_outline() -> None:
    """By a predicate that is called in it, and leaves the trace."""
    params, made_there = methods.PARAMS, []
    busy = [False]

    def trainable(path: str) -> bool:
        if not busy[0]:
            busy[0] = True
            with jax.ensure_compile_time_eval():
                made_there.append(tx.init(params))
        return True

    plan = _named("dpgd").plan
    tx = jaxdp.dpgd(plan, Keys.from_entropy(), trainable=trainable)
    with pytest.raises(ValueError, match="outside every transformation"):
        tx.init(outline(params))
    assert not made_there


def test_points_without_weights_are_refused() -> None:
    tx = jaxdp.entropic_descent(0.1)
    with pytest.raises(ValueError, match=r"'w' is float32 of shape \(3, 0\)"):
        tx.init({"w": jnp.zeros((3, 0))})


@pytest.mark.parametrize("name", [m.name for m in PRIVATE if m.name != "prefix_sum"])
def test_empty_params_are_refused(name: str) -> None:
    tx, _ = made(name)
    with pytest.raises(ValueError, match=r"selects none of the leaves|at least one"):
        tx.init({})
