"""Demands of Optax's own tests on every transformation, in loops over all of them.

``alias_test``, ``contrib/_common_test`` and ``sharding_test`` put each optimizer of Optax
through these. What they ask besides, of wrappers too, is in ``test_conformance``.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, serialization

import jaxdp
from jaxdp import Keys, plans, sampling
from tests.methods import COMMON, KEYS, METHODS, SADDLES, Method, N, numbers

#: Points of simplices, for all transformations.
PARAMS = {
    "w": jnp.asarray([0.2, 0.3, 0.5]),
    "layers": {"b": jnp.asarray([[0.4, 0.6], [0.7, 0.3]])},
}
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def losses(params: Any, batch: Any) -> jax.Array:
    """Losses (B,) of any params, without implicit promotions."""
    leaves = [jnp.asarray(x).astype(jnp.float32) for x in jax.tree.leaves(params)]
    total = sum((jnp.sum(jnp.sin(x)) for x in leaves), jnp.float32(0))
    record = jax.tree.leaves(batch)[0].astype(jnp.float32)
    return jnp.sqrt(1 + jnp.square(record.reshape(len(record), -1)[:, 0] - total))


#: ``(tx, state, params) -> (updates, state)``: the first step.
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


class Case(NamedTuple):
    """A transformation, its first step, and how many copies of params its state has."""

    name: str
    make: Callable[[Keys], Any]
    step: Step
    copies: int = 0
    spends: bool = True
    params: Any = PARAMS

    def __str__(self) -> str:
        return self.name

    @property
    def float32_only(self) -> bool:
        return self.name.startswith(("spider", "sosp"))

    @property
    def odd(self) -> bool:
        """Whether any leaves will do beside those of PARAMS."""
        return self.params is PARAMS and self.name != "entropic_descent"


def _row(params: Any) -> Any:
    """Updates like params, of no common size."""

    def leaf(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)

    return jax.tree.map(leaf, params)


def _stepped(method: Method) -> Step:
    def step(tx: Any, state: Any, params: Any) -> tuple[Any, Any]:
        given: dict[str, Any] = {"value_fn": losses}
        updates, phase = None, method.phases[0]
        if method.reads == "batch":
            zero = jnp.zeros((), jnp.int32)
            batch = sampling.batch(method.plan, KEYS, zero, method.data, phase=phase)
            given |= {"batch": batch, "phase": phase}
            if method.plan.family == "prefix_sum":
                rows = len(jax.tree.leaves(batch.records)[0])
                updates = jax.tree.map(lambda x: jnp.stack([x] * rows), _row(params))
        else:
            mask = jnp.ones(N, bool) if method.reads == "rows" else None
            given |= {"batch": method.data, "mask": mask}
        return tx.update(updates, state, params, **given)

    return step


def _of(method: Method) -> Case:
    copies = {"o2nc": 4, "prefix_sum": 1}.get(method.plan.family, 0)
    return Case(
        method.name,
        lambda keys: method.make(method.plan, keys),
        _stepped(method),
        copies + (getattr(method.plan, "output", "last") == "random"),
    )


def _chained(method: Method, after: Callable[[], Any], copies: int) -> Case:
    case = _of(method)
    return Case(
        f"{method.name}, {after.__name__}",
        lambda keys: optax.chain(case.make(keys), after()),
        case.step,
        case.copies + copies,
    )


def _fed(name: str, make: Callable[[Keys], Any], copies: int) -> Case:
    """A transformation of gradients: post-processing."""

    def step(tx: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return tx.update(_row(params), state, params)

    return Case(name, make, step, copies, spends=False)


def _adapted(method: Method) -> Case:
    """An algorithm as a transformation, of its own params and losses."""

    def step(tx: Any, state: Any, params: Any) -> tuple[Any, Any]:
        given = {"value_fn": method.value_fn, "batch": method.data}
        return tx.update(None, state, params, **given)

    return Case(
        method.name,
        lambda keys: jaxdp.as_transform(method.make(method.plan, keys)),
        step,
        2 * (method.plan.family == "sosp"),
        params=method.params,
    )


def adam() -> Any:
    return optax.adam(0.1)


MADE = {
    m.name: m
    for m in METHODS
    if m.make is jaxdp.private_spider or not m.plan.runs_algorithm
}
ADAPTED = [_adapted(m) for m in METHODS if m.name in ("sosp", *map(str, SADDLES))]
FIRST = MADE["dpzero-sphere-1"]
RANDOM = dataclasses.replace(
    FIRST,
    name="dpzero-random-output",
    plan=plans.DPZero(
        smoothing_radius=1e-2, direction="sphere", output="random", **COMMON
    ),
)
MAKERS = (
    *map(_of, MADE.values()),
    _of(RANDOM),
    _chained(MADE["dpzero-sphere-1"], adam, 2),
    _chained(MADE["spider"], jaxdp.polyak_average, 1),
    *ADAPTED,
)
CASES = (
    *MAKERS,
    _fed("o2nc-driver", lambda keys: jaxdp.o2nc(MADE["o2nc"].plan, keys), 3),
    _fed("entropic_descent", lambda keys: jaxdp.entropic_descent(0.1), 1),
    _fed("polyak_average", lambda keys: jaxdp.polyak_average(), 1),
    _fed("mix_public", lambda keys: jaxdp.mix_public(losses, np.eye(3), 0.25), 0),
)
ALL = pytest.mark.parametrize("case", CASES, ids=str)
BEGINS = pytest.mark.parametrize("case", MAKERS, ids=str)


def shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree
    )


def same(one: Any, other: Any) -> bool:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(numbers(one), numbers(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def cast(dtype: Any, params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), params)


# --- 1. optax.tree.map_params ----------------------------------------------------------


@ALL
def test_map_params(case: Case) -> None:
    """It asks for a state of a placeholder, which begins no run."""
    tx = case.make(Keys.from_entropy())
    insecure = case.make(KEYS).init(case.params)
    specs = jax.tree.map(lambda x: f"spec of {x.shape}", case.params)
    for _ in range(2):
        got = optax.tree.map_params(
            tx, lambda _, spec: spec, insecure, specs, transform_non_params=lambda _: 0
        )
        found = [x for x in jax.tree.leaves(got) if x != 0]
        assert sorted(found) == sorted(jax.tree.leaves(specs) * case.copies)
    state = tx.init(case.params)
    assert same(optax.tree.map_params(tx, lambda x: x, state), state)
    doubled = optax.tree.map_params(tx, lambda x: 2 * x, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)
    if case.spends:
        with pytest.raises(ValueError, match="already served"):
            tx.init(case.params)


@BEGINS
def test_empty_params_are_no_placeholder(case: Case) -> None:
    """Of whatever container: they are a mistake, such as a filter that finds nothing."""
    tx = case.make(Keys.from_entropy())
    if case.name == "prefix_sum":
        pytest.skip("it has no leaves to choose from")
    for none in ({}, core.freeze({})):
        with pytest.raises(
            ValueError,
            match=r"selects none of the leaves|at least one|must .* weights",
        ):
            tx.init(none)
    assert held(tx.init(case.params))


# --- 2. init of shapes -----------------------------------------------------------------


def held(tree: Any) -> list[Any]:
    """The arrays of a tree: none, where nothing can be released."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray)]


def parts(state: Any) -> list[Any]:
    """A state's nodes of this library, inside of a chain."""
    return [state] if hasattr(state, "_fields") else [state[0]]


@ALL
def test_init_of_shapes_begins_no_run(case: Case) -> None:
    """As often as one likes, before and after; of what it gives nothing is released."""
    tx = case.make(Keys.from_entropy())
    params, like = case.params, shapes(case.params)
    leaves, tree = jax.tree.flatten(like)
    leaves[0] = jax.tree.leaves(params)[0]
    made = [tx.init(like)]
    if len(leaves) > 1:
        made.append(tx.init(jax.tree.unflatten(tree, leaves)))
    state = tx.init(params)
    made.append(tx.init(like))
    if case.spends:
        with pytest.raises(ValueError, match="already served"):
            tx.init(params)
    for none in made:
        assert shapes(none) == shapes(state)
        assert not any(map(held, parts(none)))
        with pytest.raises(ValueError, match="state must be of a run that has begun"):
            case.step(tx, none, params)
        with pytest.raises((TypeError, ValueError), match="ShapeDtypeStruct"):
            jax.jit(lambda s: case.step(tx, s, params))(none)


ALGORITHMS = [m for m in METHODS if m.name not in MADE]


@pytest.mark.parametrize("method", ALGORITHMS, ids=str)
def test_init_of_shapes_begins_no_run_of_an_algorithm(method: Method) -> None:
    algorithm = method.make(method.plan, Keys.from_entropy())
    like = shapes(method.params)
    made = [algorithm.init(like), algorithm.init(like)]
    state = algorithm.init(method.params)
    with pytest.raises(ValueError, match="already served"):
        algorithm.init(method.params)
    for none in made:
        assert shapes(none) == shapes(state) and not held(none)


def accepted(init: Callable[[Any], Any], params: Any) -> bool:
    """Whether an ``init`` began a run."""
    try:
        return bool(held(init(params)))
    except ValueError as error:
        if not str(error).startswith("keys "):
            raise
        return False


@BEGINS
def test_no_two_runs_begin_beside_an_init_of_shapes(case: Case) -> None:
    """Not from several threads, and not within a compiled function."""
    tx, like = case.make(Keys.from_entropy()), shapes(case.params)

    def mapped(x: jax.Array) -> Any:
        tx.init(like)
        return accepted(tx.init, case.params), x

    assert not jax.jit(mapped)(jnp.zeros(()))[0]
    assert not jax.vmap(mapped, out_axes=(None, 0))(jnp.zeros(2))[0]
    begun: list[bool] = []

    def both() -> None:
        tx.init(like)
        begun.append(accepted(tx.init, case.params))

    threads = [threading.Thread(target=both) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 8 and sum(begun) == 1


@pytest.mark.parametrize("numbers_now", [False, True])
def test_no_run_begins_within_an_init_of_shapes(numbers_now: bool) -> None:
    """By a predicate that is called in it: what it makes there is of no use outside."""
    made: list[Any] = []
    busy = False

    def trainable(path: str) -> bool:
        nonlocal busy
        if not busy:
            busy = True
            now = (
                jax.ensure_compile_time_eval if numbers_now else contextlib.nullcontext
            )
            with now():
                made.append(tx.init(PARAMS))
            busy = False
        return True

    tx = jaxdp.dpgd(MADE["dpgd"].plan, Keys.from_entropy(), trainable=trainable)
    if numbers_now:
        with pytest.raises(ValueError, match=r"^keys .*outside every transformation"):
            tx.init(shapes(PARAMS))
        assert not made
    else:
        assert not held(tx.init(shapes(PARAMS)))
        assert all(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(made))
        with pytest.raises(jax.errors.UnexpectedTracerError):
            _ = made[0].horizon.count + 1
    busy = True
    tx.init(PARAMS)
    with pytest.raises(ValueError, match="already served"):
        tx.init(PARAMS)


# --- 3. dtypes and stable states -------------------------------------------------------


def traced(case: Case, params: Any) -> tuple[Any, Any, Any]:
    """The state before a step, and avals of its updates and of the state after it."""
    tx = case.make(KEYS)
    state = tx.init(params)
    return state, *jax.eval_shape(lambda s, p: case.step(tx, s, p), state, params)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda x: x.__name__)
@ALL
def test_dtypes_and_states_stay(case: Case, dtype: Any) -> None:
    """In a branch of a loop; updates have the dtypes of the params."""
    with jax.enable_x64(dtype == jnp.float64):
        params = cast(dtype, case.params)
        if case.float32_only and dtype != jnp.float32:
            with pytest.raises(ValueError, match="must have float32 leaves"):
                case.make(KEYS).init(params)
            return
        state, updates, after = traced(case, params)
        like = shapes(params)
        if "prefix_sum" not in case.name:
            assert updates == like
        assert shapes(after) == shapes(state)
        tx = case.make(KEYS)

        def branch(flag: Any, state: Any, params: Any) -> Any:
            def moved() -> Any:
                updates, after = case.step(tx, state, params)
                return after, optax.apply_updates(params, updates)

            return jax.lax.cond(flag, moved, lambda: (state, params))

        def loop(state: Any, params: Any) -> Any:
            def body(carry: Any, i: Any) -> Any:
                return branch(i > 0, *carry), None

            return jax.lax.scan(body, (state, params), jnp.arange(2))[0]

        assert jax.eval_shape(loop, state, params) == (shapes(state), like)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@ALL
def test_strict_promotion_of_dtypes(case: Case, dtype: Any) -> None:
    if case.float32_only and dtype != jnp.float32:
        pytest.skip("it takes float32 alone")
    if case.name == "sosp" or "adam" in case.name:
        pytest.skip("neither sosp nor optax.adam is strict")
    with jax.numpy_dtype_promotion("strict"):
        params = cast(dtype, case.params)
        _, updates, _ = traced(case, params)
        jax.eval_shape(optax.apply_updates, params, updates)


# --- 5. odd leaves ---------------------------------------------------------------------


ODD = {
    "float": 0.5,
    "empty": jnp.zeros((3, 0)),
    "scalar": jnp.asarray(0.5),
    "numpy": np.float32(0.5),
}


@pytest.mark.parametrize("leaf", ODD)
@pytest.mark.parametrize("case", [c for c in CASES if c.params is PARAMS], ids=str)
def test_odd_leaves(case: Case, leaf: str) -> None:
    """They work; what is no point of a simplex is refused by its name."""
    params = {"w": PARAMS["w"], "odd": ODD[leaf]}
    if case.name == "entropic_descent":
        with pytest.raises(ValueError, match="leaf 'odd' is float32 of shape"):
            case.make(KEYS).init(params)
        return
    state, updates, after = traced(case, params)
    assert shapes(after) == shapes(state)
    assert shapes(updates) == shapes(params)


# --- 6. utilities ----------------------------------------------------------------------


@ALL
def test_utilities_take_states(case: Case) -> None:
    state = case.make(KEYS).init(case.params)
    counts = [x for _, x in optax.tree.get_all_with_path(state, "count")]
    assert counts and not any(map(np.any, counts))
    moved = optax.tree.set(state, count=jnp.ones((), jnp.int32))
    assert shapes(moved) == shapes(state)
    words = optax.tree.unwrap_random_key_data(state)
    assert jax.tree.structure(words) == jax.tree.structure(state)
    assert same(words, state)
    again = serialization.from_state_dict(state, serialization.to_state_dict(state))
    assert same(again, state)
    again = serialization.from_bytes(words, serialization.to_bytes(words))
    assert same(again, words)


#: Where a step is compiled: the others are variants, and compile for seconds each.
COMPILED = {"dpgd", "prefix_sum", "o2nc-driver", "entropic_descent", "polyak_average"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=() if c.name in COMPILED else pytest.mark.slow)
        for c in CASES
    ],
    ids=str,
)
def test_jit_changes_nothing(case: Case) -> None:
    """Of a first step, with leaves of all kinds."""
    tx, params = case.make(KEYS), {**PARAMS, **ODD} if case.odd else case.params
    got = jax.jit(lambda p: case.step(tx, tx.init(p), p))(params)
    want = case.step(tx, tx.init(params), params)
    assert shapes(got) == shapes(want)
    if case.params is PARAMS:  # An algorithm's output may be its start for a step.
        assert any(map(np.any, jax.tree.leaves(got[0])))
    for a, b in zip(numbers(got), numbers(want), strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert case.params is not PARAMS or np.isfinite(a).all()
