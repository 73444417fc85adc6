"""Duties of every method of the registry; after them, those of makers of gradients.

Each method is compiled once for a step, once for seeds side by side and once for ``fit``;
most assertions are about one run of it.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxdp
from jaxdp import Keys, plans, sampling
from tests import methods
from tests.methods import (
    BATCH,
    GRADIENT_MAKERS,
    KEYS,
    METHODS,
    PARAMS,
    Method,
    N,
    numbers,
    own,
    ran,
    steps,
    value_fn,
)

#: Of each family one, and of each law of noise: the fast tests. Others are their variants.
FIRST = {
    "dpzero-sphere-1",
    "dpzero-gaussian-2-laplace-zero_out",
    "dpgd_zeroth_order",
    "dpgd",
    "o2nc",
    "prefix_sum",
    "sosp",
    "saddle",
    "bias_reduced",
    "convex",
    "frank_wolfe",
    "synthetic",
    "mwem",
}
#: Where a whole run is compiled for one duty.
FEWER = {"dpzero-sphere-1", "dpgd", "o2nc-slopes", "sosp", "saddle"}


def these(cases: Any, first: Any = FIRST, name: str = "method") -> Any:
    """Parametrises a test by methods; those that are not among the first are slow."""
    slow = pytest.mark.slow  # What only a variant could have is in its method's folder.
    given = [m if m.name in first else pytest.param(m, marks=slow) for m in cases]
    return pytest.mark.parametrize(name, given, ids=str)


FITTED = [m for m in METHODS if m.fits]
#: For what compiles nothing.
ALL = pytest.mark.parametrize("method", METHODS, ids=str)
#: For what is about steps, whose program these tests share.
STEPS = these(METHODS)


def test_every_family_is_here() -> None:
    own = {name for name, kind in vars(plans).items() if hasattr(kind, "family")}
    assert own == {type(method.plan).__name__ for method in METHODS}
    assert {method.name for method in METHODS} >= FIRST | FEWER | AUDITED
    for first in (FIRST, CHAINED):
        assert own == {type(m.plan).__name__ for m in METHODS if m.name in first}


def same(one: Any, other: Any) -> bool:
    pairs = zip(numbers(one), numbers(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def releases(run: Any) -> np.ndarray:
    return np.array([step.state.release for step in run])


# --- a run ---------------------------------------------------------------------------


@STEPS
def test_same_keys_same_updates(method: Method) -> None:
    again = steps(method, Keys.insecure(3))
    for a, b in zip(ran(method), again, strict=True):
        assert same((a.updates, a.params, a.state), (b.updates, b.params, b.state))
    other = releases(steps(method, Keys.insecure(4)))
    assert not np.allclose(releases(ran(method)), other)
    if method.bounds is not None:  # Not draws of few vertices.
        assert np.any(other[0] != releases(ran(method))[0])
        assert not same(ran(method)[0].updates, ran(method)[1].updates)


@STEPS
def test_structure_and_dtypes_stay(method: Method) -> None:
    begun = method.make(method.plan, KEYS).init(method.params)
    for step in ran(method):
        chex.assert_trees_all_equal_shapes_and_dtypes(begun, step.state)
        chex.assert_trees_all_equal_shapes_and_dtypes(method.params, step.params)
        if not isinstance(methods.made(method)[0], jaxdp.Algorithm):
            chex.assert_trees_all_equal_shapes_and_dtypes(step.updates, method.params)


@STEPS
def test_traced_once(method: Method) -> None:
    ran(method)
    assert methods.COUNTS[method] == dict.fromkeys(method.phases, 1)


@STEPS
def test_a_donated_state_takes_nothing_else_along(method: Method) -> None:
    """Of what the caller began it with: start, keys and transformation serve again."""
    keys, start = Keys.insecure(3), own(method.params)
    rows = jnp.ones(N, bool) if method.reads == "rows" else None
    given = (keys, jnp.int32(0), method.data, rows, method.phases[0])
    _, step = methods.made(method)
    tx = method.make(method.plan, keys)
    for _ in range(2):
        state = tx.init(start)
        updates, _ = step(state, start, *given)
        assert any(x.is_deleted() for x in jax.tree.leaves(state))
        assert same(updates, ran(method)[0].updates)
    assert same(start, method.params)


@STEPS
def test_past_the_horizon_nothing_leaves(method: Method) -> None:
    """Updates and release are zero, and no more of the state changes."""
    *whole, last, late = ran(method)
    assert bool(last.state.horizon.exhausted)
    for step in whole:
        assert not bool(step.state.horizon.exhausted)
    assert np.any(last.state.release)
    report = jaxdp.report(method.plan, late.state)
    assert report["steps_done"] == method.plan.num_steps
    assert not np.any(late.state.release)
    assert not any(map(np.any, numbers(late.updates)))
    assert same(silenced(left(method, last.state)), left(method, late.state))
    if method.follows is methods.SGD:
        assert same(last.params, late.params)
    else:  # It projects, and projects again.
        chex.assert_trees_all_close(last.params, late.params, rtol=0, atol=1e-7)


def left(method: Method, state: Any) -> Any:
    """What a late step leaves: all of an algorithm's state, what a transform shows.

    Of O2NC, whose points and estimate are public and go on, the count.
    """
    if isinstance(methods.made(method)[0], jaxdp.Algorithm):
        return state
    shown = jaxdp.public(state)
    return shown.oracle.horizon if hasattr(shown, "oracle") else shown


def silenced(state: Any) -> Any:
    """A state without its last release."""

    def zeros(path: Any, x: Any) -> Any:
        return jnp.zeros_like(x) if getattr(path[-1], "name", "") == "release" else x

    return jax.tree_util.tree_map_with_path(zeros, state)


def secret_nodes(tree: Any) -> Iterator[Any]:
    """Nodes of a state that name secrets, however deep."""
    inner = (tree,)
    if hasattr(type(tree), "SECRET"):
        yield tree
        inner = tuple(getattr(tree, name) for name in tree._fields)
    elif isinstance(tree, tuple):
        inner = tree
    else:
        return
    for node in inner:
        yield from secret_nodes(node)


@STEPS
def test_secrets_are_named_and_dropped(method: Method) -> None:
    """No field, and no bytes, are left of them: of noise and of what is not noised."""
    state = ran(method)[1].state
    nodes = list(secret_nodes(state))
    assert nodes
    shown = jaxdp.public(state)
    secrets = {name for node in nodes for name in node.SECRET}
    for node in secret_nodes(shown):
        assert all(getattr(node, name) is None for name in node.SECRET)
    assert secrets & {"noise", "root", "roots", "refresh"}
    assert same(shown.release, state.release)
    hidden = [getattr(node, name) for node in nodes for name in node.SECRET]
    needles = [
        x[..., :4].tobytes() if x.dtype == np.uint32 else x.tobytes()
        for x in numbers(hidden)
        if x.size >= 4 and np.any(x)
    ]
    assert needles
    whole, text = cloudpickle.dumps(state), cloudpickle.dumps(shown)
    for needle in needles:
        assert needle in whole and needle not in text


#: Audits map over keys, and compare with runs by hand: tests/auditing.
AUDITED = {"dpzero-orthonormal-3", "dpzero-tuned", "dpgd_zeroth_order", "o2nc"}


@these([m for m in METHODS if m.name not in AUDITED], FEWER)
def test_seeds_side_by_side_in_one_loop(method: Method) -> None:
    """A scan, and vmap over insecure keys: noise is drawn inside, for each its own."""
    if getattr(method.plan, "noise", "") == "laplace":
        pytest.skip("Laplace noise is drawn on the host, which no traced key reaches")
    phases = method.phases[: sum(p.num_steps for p in method.plan.phases)]
    whole = method.plan.num_steps // len(phases)
    mask = jnp.ones(N, bool) if method.reads == "rows" else None

    def run(seed: jax.Array) -> Any:
        keys = Keys.insecure(seed)
        tx = method.make(method.plan, keys)
        step = methods.stepped(method, tx)

        def period(carry: Any, first: jax.Array) -> Any:
            params, state = carry
            seen = []
            for i, phase in enumerate(phases):
                given = (keys, first + i, method.data, mask, phase)
                updates, state = step(state, params, *given)
                params = methods.moved(method, params, updates)
                seen.append(state.release)
            return (params, state), jnp.stack(seen)

        begun = (method.params, tx.init(method.params))
        times = len(phases) * jnp.arange(whole)
        return jax.lax.scan(period, begun, times)[1]

    got = jax.jit(jax.vmap(run))(jnp.array([3, 4]))
    got = np.asarray(got).reshape(2, whole * len(phases), -1)
    want = releases(ran(method))[: got.shape[1]]
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-4)
    assert not np.allclose(got[1], want)


# --- fit and its record --------------------------------------------------------------


def fit(method: Method, **options: Any) -> jaxdp.FitResult:
    return jaxdp.fit(
        method.plan,
        options.pop("keys", Keys.insecure(3)),
        method.params,
        options.pop("data", method.data),
        value_fn=method.value_fn,
        optimizer=method.optimizer,
        **options,
    )


@functools.cache
def whole(method: Method) -> jaxdp.FitResult:
    return fit(method)


@these(FITTED, FEWER | {"synthetic"})
def test_fit_is_the_loop_by_hand(method: Method) -> None:
    """Releases, the point that is returned, and the report."""
    result, last = whole(method), ran(method)[-2]
    want = releases(ran(method)[:-1])
    np.testing.assert_allclose(result.info.releases, want, rtol=1e-5, atol=1e-5)
    point = method.plan.returned(last.state, last.params)
    chex.assert_trees_all_close(result.params, point, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_equal_shapes_and_dtypes(result.params, method.params)
    if method.plan.family != "sosp":  # Its best point may be the start.
        assert not same(result.params, method.params)
    by_hand = jaxdp.report(method.plan, last.state)
    for name, value in by_hand.items():
        assert result.report[name] == value, name
    assert by_hand["algorithm"] == method.plan.family
    json.dumps(result.report, allow_nan=False)


#: Of each family one, where ``fit`` is compiled already if it is anywhere.
CHAINED = FIRST - {"dpzero-gaussian-2-laplace-zero_out", "o2nc"} | {"o2nc-slopes"}


@these(METHODS, CHAINED)
def test_trained_whole_in_a_chain_of_optax(method: Method) -> None:
    """All twelve families; what comes out is that of ``fit``, an algorithm's to the bit."""
    tx = method.make(method.plan, Keys.insecure(3))
    algorithm = isinstance(tx, jaxdp.Algorithm)
    if algorithm:
        tx = jaxdp.as_transform(tx)
    chain = optax.chain(tx, method.optimizer or optax.identity())
    taken = dataclasses.replace(method, reads="data") if algorithm else method
    step = methods.stepped(taken, chain)

    @functools.partial(jax.jit, static_argnums=3)
    def moved(params: Any, state: Any, t: Any, phase: str) -> tuple[Any, Any]:
        mask = jnp.ones(N, bool) if method.reads == "rows" else None
        updates, state = step(state, params, KEYS, t, method.data, mask, phase)
        return optax.apply_updates(params, updates), state

    params, state = method.params, chain.init(method.params)
    released = []
    for t, phase in enumerate(method.phases[:-1]):
        params, state = moved(params, state, jnp.int32(t), phase)
        released.append(state[0].release)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, method.params)
    assert jaxdp.report(method.plan, state)["steps_done"] == method.plan.num_steps
    if not method.fits:
        want = releases(ran(method)[:-1])
        np.testing.assert_allclose(np.array(released), want, rtol=1e-5, atol=1e-5)
        return
    result = whole(method)
    point = method.plan.returned(state[0], params)
    if algorithm:
        assert same(released, list(result.info.releases))
        assert same(point, result.params)
        chex.assert_trees_all_close(params, result.params, rtol=0, atol=1e-6)
        return
    np.testing.assert_allclose(released, result.info.releases, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(point, result.params, rtol=1e-4, atol=1e-5)


@these(FITTED, FEWER | {"synthetic", "dpzero-gaussian-2-laplace-zero_out"})
def test_a_study_is_fit_of_every_seed(method: Method) -> None:
    """The last of four seeds is that of KEYS."""

    def score(result: jaxdp.FitResult) -> jax.Array:
        return sum(
            (x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum()
            for x in jax.tree.leaves(result.params)
        )  # pyright: ignore[reportReturnType]

    result = jaxdp.study(
        method.plan,
        method.params,
        method.data,
        value_fn=method.value_fn,
        score_fn=score,
        optimizer=(lambda: method.optimizer) if method.gradients else None,
        seeds=4,
    )
    want = float(score(whole(method)))
    np.testing.assert_allclose(result.scores[0, 3], want, rtol=1e-3, atol=1e-4)
    if method.plan.family != "sosp":
        # Two seeds may draw the same few vertices.
        least = 3 if method.plan.family == "frank_wolfe" else 4
        assert len(np.unique(result.scores)) >= least


class Killed(Exception):
    """Stands for the end of the process."""


# Those of these two are killed in their folders.
@these(
    [m for m in FITTED if m.name not in ("saddle", "sosp")],
    {"dpzero-sphere-1", "dpgd", "o2nc-slopes", "synthetic"},
)
def test_an_interrupted_run_goes_on_to_the_same_bits(
    method: Method, tmp_path: Path
) -> None:
    """In chunks, with a callback and a record; and it is replayed where it can be."""
    shown: list[Any] = []

    def die(*given: Any) -> None:
        shown.append(given)
        raise Killed

    with pytest.raises(Killed):
        fit(method, ledger=tmp_path / "run", chunk=2, callback=die)
    ((step, params, info),) = shown
    assert step == min(2, method.plan.num_steps)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, method.params)
    assert same(info.releases, whole(method).info.releases[:step])
    result = jaxdp.resume(
        tmp_path / "run",
        method.params,
        method.data,
        value_fn=method.value_fn,
        optimizer=method.optimizer,
        callback=lambda *given: shown.append(given),
    )
    assert same(result.params, whole(method).params)
    assert same(result.info.releases, whole(method).info.releases)
    assert shown[-1][0] == method.plan.num_steps
    if method.plan.family != "o2nc":  # It shows its iterate, and returns an average.
        assert same(shown[-1][1], result.params)
    assert result.report["steps_charged"] == method.plan.num_steps
    record = json.loads((tmp_path / "run" / "report.json").read_text())
    assert record["steps_charged"] == method.plan.num_steps
    if not method.plan.replayable:
        with pytest.raises(ValueError, match="must be one of slopes to be replayed"):
            jaxdp.replay(tmp_path / "run", method.params)
        return
    again = jaxdp.replay(tmp_path / "run", method.params, optimizer=method.optimizer)
    chex.assert_trees_all_close(again.params, result.params, rtol=1e-6, atol=1e-6)
    if method.plan.family == "dpzero":
        assert same(again.params, result.params)


# --- what one record does, and where noise comes from --------------------------------


BOUNDED = [
    pytest.param(
        m, place, marks=() if m.name in FIRST else pytest.mark.slow
    )  # as STEPS
    for m in METHODS
    if m.bounds
    for place in m.bounds
]


@pytest.mark.parametrize(("method", "place"), BOUNDED, ids=str)
def test_one_record_moves_a_release_by_its_bound_and_no_more(
    method: Method, place: int
) -> None:
    """The same noise, the same points, and two records that pull apart as they can."""
    walk = np.random.default_rng(5).normal(size=len(method.phases)).cumsum()
    points = [
        jax.tree.map(lambda x, s=s: x + 0.1 * s, method.params) for s in walk.tolist()
    ]
    one, other = (
        [method.seen(step.updates, step.state) for step in run]
        for run in (
            steps(method, data=d, points=points) for d in method.neighbours(place)
        )
    )
    order = (
        1 if getattr(method.plan, "noise", "") == "laplace" else 2
    )  # What its noise hides.
    moved = [
        float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b), order))
        for a, b in zip(one, other, strict=True)
    ]
    bound = (method.bounds or {})[place]
    assert max(moved) <= bound * (1 + 1e-4)
    assert max(moved) > 0.95 * bound


def all_releases(method: Method, keys: Keys) -> np.ndarray:
    """Releases of a run on data of which they say nothing: noise alone."""
    return releases(steps(method, keys, method.silent))[:-1]


@STEPS
def test_noise_comes_from_secret_roots_alone(method: Method) -> None:
    """Another direction root changes no noise; the others under one direction root do.

    Whatever the secret roots are, they are taken together.
    """
    one, two = (Keys.insecure(i) for i in (1, 2))
    first = all_releases(method, one)
    turned = all_releases(method, dataclasses.replace(one, direction=two.direction))
    at = slice(None, method.points)
    np.testing.assert_allclose(turned[at], first[at], rtol=1e-5, atol=1e-7)
    other = all_releases(method, dataclasses.replace(two, direction=one.direction))
    assert np.any(first) and np.any(other != first)
    # Where a release is a norm of what was noised: every one of them.
    if first.shape[1] == 1 and method.bounds is not None:
        assert np.all(other != first)


# --- keys and arguments --------------------------------------------------------------


@ALL
def test_a_state_that_a_traced_function_closes_over_is_refused(method: Method) -> None:
    """As a constant of a program, a compilation cache would keep its root in a file."""
    rows = jnp.ones(N, bool) if method.reads == "rows" else None
    data = jax.tree.map(jnp.asarray, method.data)

    def trace(keys: Keys, *, horizon: bool = False) -> None:
        tx = method.make(method.plan, keys)
        state = tx.init(jax.tree.map(jnp.array, method.params))
        step = methods.stepped(method, tx)

        def closing(given: Any, params: Any, keys: Any, data: Any) -> Any:
            own = state._replace(horizon=given) if horizon else state
            return step(own, params, keys, 0, data, rows, method.phases[0])

        jax.eval_shape(closing, state.horizon, method.params, keys, data)

    trace(KEYS)
    with pytest.raises(ValueError, match="state must be an argument of the function"):
        trace(Keys.from_entropy())
    # Its root is a constant where only its public part is an argument.
    if "horizon" in method.make(method.plan, KEYS).init(method.params)._fields:
        with pytest.raises(ValueError, match="state must be an argument"):
            trace(Keys.from_entropy(), horizon=True)


@ALL
def test_keys_from_entropy_begin_one_run(method: Method) -> None:
    """Two runs of one plan would share their noise; and a report says whose keys."""
    tx = method.make(method.plan, Keys.from_entropy())
    for traced in (jax.jit(tx.init), jax.jit(lambda _: tx.init(method.params))):
        with pytest.raises(ValueError, match=r"^keys .*jax.jit\(tx.init\)"):
            traced(method.params)
    report = jaxdp.report(method.plan, tx.init(method.params))
    assert report["private"] is True
    assert report["epsilon"] == float(method.plan.epsilon())
    with pytest.raises(ValueError, match="already served"):
        tx.init(method.params)
    insecure = method.make(method.plan, KEYS).init(method.params)
    assert jaxdp.report(method.plan, insecure)["private"] is False


@ALL
def test_bare_keys_and_plans_of_another_family_are_refused(method: Method) -> None:
    for bad in (jax.random.key(0), 0, None, "x"):
        with pytest.raises(TypeError, match=r"keys must be a jaxdp\.Keys"):
            method.make(method.plan, bad)
    for other in (jaxdp.dpgd, jaxdp.saddle_mirror_descent, jaxdp.private_prefix_sum):
        if other is not method.make:
            with pytest.raises(ValueError, match="family"):
                other(method.plan, KEYS)


@ALL
def test_a_plan_without_noise_is_refused(method: Method) -> None:
    bare = method.bare
    if bare is None:
        bare = dataclasses.replace(method.plan, noise_multiplier=None)
    with pytest.raises(ValueError, match=r"noise_multiplier|calibrate"):
        method.make(bare, KEYS)


@ALL
def test_a_plan_states_no_epsilon_of_steps_that_it_has_not(method: Method) -> None:
    """A loop that goes on releases nothing, and spends no more than the plan."""
    plan: Any = dataclasses.replace(method.plan, delta=method.plan.delta or 1e-5)
    last = plan.num_steps
    assert plan.spent(last) == pytest.approx(plan.epsilon(), rel=1e-6)
    assert plan.spent(1) <= (1 + 1e-6) * plan.spent(last)
    part = f"num_steps must be an integer >= 1 and <= {last}, got"
    for wrong in (0, last + 1):
        with pytest.raises(ValueError, match=part):
            plan.spent(wrong)


@ALL
def test_numbers_far_out_of_use_are_named(method: Method) -> None:
    with pytest.raises(ValueError, match="epsilon must be at most"):
        method.plan.calibrate(epsilon=1e300, delta=1e-5)
    if not hasattr(method.plan, "with_noise"):
        return
    for noise in (1e-300, 1e-160, 1e300):
        with pytest.raises(ValueError, match="noise_multiplier must be 0 or in"):
            method.plan.with_noise(noise_multiplier=noise)


@these(FITTED)
def test_data_of_another_size_are_refused(method: Method) -> None:
    fewer = jax.tree.map(lambda x: x[:-1], method.data)
    with pytest.raises(ValueError, match="num_examples"):
        fit(method, data=fewer)
    tx, _ = methods.made(method)
    if isinstance(tx, jaxdp.Algorithm):
        with pytest.raises(ValueError, match="num_examples"):
            tx.step(tx.init(method.params), fewer, value_fn=method.value_fn)


def mixed_by_python(losses: jax.Array) -> jax.Array:
    """Losses around their mean, which Python takes over all that it is given."""

    def centred(x: Any) -> np.ndarray:
        return np.asarray(x - np.mean(x))

    own = jax.lax.stop_gradient(losses)
    shape = jax.ShapeDtypeStruct(own.shape, own.dtype)
    less = jax.pure_callback(centred, shape, own, vmap_method="expand_dims")
    return losses * jax.lax.stop_gradient(less)


@these(
    [m for m in FITTED if m.name not in ("mwem", "synthetic", "saddle", "bias_reduced")]
)
def test_losses_that_python_mixes_are_refused(method: Method) -> None:
    """Also where each record is evaluated alone, and ``vmap`` lifts the loss."""
    fn: Any = method.value_fn
    if isinstance(fn, jaxdp.Problem):
        of_one = fn.value_fn
        mixing: Any = dataclasses.replace(
            fn, value_fn=lambda *given: mixed_by_python(of_one(*given))
        )
    else:
        mixing = lambda params, batch: mixed_by_python(fn(params, batch))  # noqa: E731
    with pytest.raises(ValueError, match=r"not per record|record by record"):
        fit(dataclasses.replace(method, value_fn=mixing))


# --- makers of gradients -------------------------------------------------------------


CASES = these(GRADIENT_MAKERS, name="case")
#: One of slopes and one of gradients, where what is tested is around them.
TWO = [m for m in GRADIENT_MAKERS if m.name in ("dpzero-sphere-1", "dpgd")]
MAKERS = [m for m in METHODS if not (m.plan.runs_algorithm or m.plan.takes_updates)]
FEW = pytest.mark.parametrize("case", TWO, ids=str)


def begun(case: Method) -> Any:
    return case.make(case.plan, KEYS).init(case.params)


def update(case: Method, batch: Any = BATCH, mask: Any = None) -> tuple[Any, Any]:
    """The first step's updates and state, by the program of the case."""
    if mask is None:
        mask = jnp.ones(N, bool)
    given = (KEYS, jnp.int32(0), batch, mask, case.phases[0])
    return methods.made(case)[1](own(begun(case)), PARAMS, *given)


def updating(tx: Any, params: Any = PARAMS, updates: Any = None, **given: Any) -> Any:
    """``state -> (updates, state)``, not compiled."""
    given = {"value_fn": value_fn, "batch": BATCH} | given
    return lambda state: tx.update(updates, state, params, **given)


def test_incoming_updates_and_unknown_keywords_are_ignored() -> None:
    """They are in no program."""
    for case in TWO:
        tx = case.make(case.plan, KEYS)
        plain = updating(tx)
        other = updating(tx, updates=PARAMS, value=1.0, loss="x")
        texts = {str(jax.make_jaxpr(f)(tx.init(PARAMS))) for f in (plain, other)}
        assert len(texts) == 1


@CASES
def test_updates_have_the_dtypes_of_the_params(case: Method) -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = case.make(case.plan, KEYS)
    updates, _ = jax.eval_shape(updating(tx, params), tx.init(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


@CASES
def test_zero_noise_and_infinite_clip_recover_the_non_private_method(
    case: Method,
) -> None:
    plan = dataclasses.replace(case.plan, l2_clip_norm=math.inf, noise_multiplier=0)
    tx = case.make(plan, KEYS)
    state = tx.init(PARAMS)
    updates, _ = jax.jit(updating(tx))(state)
    assert case.non_private is not None
    want = jax.jit(case.non_private)(PARAMS, BATCH, state)
    chex.assert_trees_all_close(updates, want, rtol=1e-3, atol=1e-4)
    assert plan.epsilon(delta=1e-5) == math.inf


@CASES
def test_public_looks_inside_every_pytree(case: Method) -> None:
    tx = optax.chain(case.make(case.plan, KEYS), optax.adam(0.1))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    shown = jaxdp.public({"train": state, "keys": KEYS})
    assert shown["train"].opt_state[0].noise is None
    assert shown["train"].opt_state[0].release is not None
    assert shown["keys"] is None
    with pytest.raises(TypeError, match="hides"):
        jaxdp.public([object()])


@CASES
def test_masked_and_partitioned_params_are_refused(case: Method) -> None:
    tx = case.make(case.plan, KEYS)
    mask = {"w": True, "layers": {"b": False}}
    with pytest.raises(ValueError, match="trainable="):
        optax.masked(tx, mask).init(PARAMS)
    labels = {"w": "a", "layers": {"b": "b"}}
    with pytest.raises(ValueError, match="trainable="):
        optax.partition({"a": tx, "b": optax.set_to_zero()}, labels).init(PARAMS)


@CASES
def test_trainable_names_the_leaves_that_move(case: Method) -> None:
    """A tree of flags and a function of the path give the same program."""
    params = {**PARAMS, "layers": {"b": jnp.zeros((2, 2))}}
    flags = {"w": True, "layers": {"b": False}}
    given = (flags, lambda path: path == "w")
    tx, same_tx = (case.make(case.plan, KEYS, trainable=t) for t in given)
    # Three rows of orthonormal directions fit the three elements of w.
    state = tx.init(params)
    texts = {str(jax.make_jaxpr(updating(x, params))(state)) for x in (tx, same_tx)}
    assert len(texts) == 1
    updates, _ = jax.jit(updating(tx, params))(state)
    assert np.any(updates["w"]) and not np.any(updates["layers"]["b"])


@CASES
def test_integer_leaves_raise_with_their_path_unless_frozen(case: Method) -> None:
    params = {**PARAMS, "layers": {"b": jnp.ones((2, 2), jnp.int32)}}
    with pytest.raises(ValueError, match=r"'layers/b'.*int32.*trainable="):
        case.make(case.plan, KEYS).init(params)
    tx = case.make(case.plan, KEYS, trainable=lambda path: path == "w")
    updates, _ = jax.eval_shape(updating(tx, params), tx.init(params))
    assert updates["layers"]["b"].dtype == jnp.int32


@CASES
def test_params_are_needed(case: Method) -> None:
    tx = case.make(case.plan, KEYS)
    with pytest.raises(ValueError, match="params"):
        tx.update(None, tx.init(PARAMS), value_fn=value_fn, batch=BATCH)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@CASES
def test_a_non_finite_record_contributes_zero(case: Method, bad: float) -> None:
    """As if the record were masked: nothing else moves by a bit."""
    x, y = BATCH
    keep = jnp.arange(N) != 5
    got, _ = update(case, batch=(x, y.at[5].set(bad)))
    want, _ = update(case, mask=keep)
    chex.assert_trees_all_equal(got, want)


@pytest.mark.skipif(
    jax.default_backend() != "cpu",
    reason="GPUs round a product by how many rows it has",
)
@CASES
def test_rows_beyond_the_records_change_no_bit(case: Method) -> None:
    """Padding, and rows that the plan has no records for, whatever the mask says."""
    longer = jax.tree.map(lambda x: jnp.concatenate([x, 1e3 + x]), BATCH)
    want, _ = update(case)
    for rows in (N, 2 * N):
        got, _ = update(case, longer, jnp.arange(2 * N) < rows)
        chex.assert_trees_all_equal(got, want)


@CASES
def test_an_empty_batch_is_pure_noise(case: Method) -> None:
    mask = jnp.zeros(N, bool)
    got, after = update(case, mask=mask)
    same, _ = update(case, jax.tree.map(lambda x: x * 1e6, BATCH), mask)
    chex.assert_trees_all_equal(got, same)
    assert np.all(np.isfinite(after.release)) and np.any(after.release)


def written_out(params: Any, batch: Any) -> jax.Array:
    """Sums written out: elementwise in the record."""
    x, _ = batch
    terms = [x[:, i] * params["w"][i] for i in range(3)]
    return jnp.sqrt(1 + jnp.square(terms[0] + terms[1] + terms[2]))


@functools.cache
def in_one_piece(case: Method) -> Any:
    tx = case.make(case.plan, KEYS)
    return jax.jit(updating(tx, value_fn=written_out))(tx.init(PARAMS))[0]


#: The loop is the same for the others, of another length.
SIZES = [
    pytest.param(m, size, marks=() if m in TWO and size > 1 else pytest.mark.slow)
    for m in GRADIENT_MAKERS
    for size in ((1, 7, 24, 100) if m in TWO else (7, 100))
]


@pytest.mark.parametrize(("case", "size"), SIZES, ids=str)
def test_a_microbatch_size_changes_nothing_for_elementwise_losses(
    case: Method, size: int
) -> None:
    tx = case.make(case.plan, KEYS, microbatch_size=size)
    got, _ = jax.jit(updating(tx, value_fn=written_out))(tx.init(PARAMS))
    assert case.plan.grid_bits is not None
    unit = case.plan.l2_clip_norm * 2.0**-case.plan.grid_bits
    if "dpzero" in case.name:
        chex.assert_trees_all_equal(got, in_one_piece(case))
    else:  # Gradients contract sums anew.
        slack = 2 * unit if case.name == "dpgd" else 0.0
        chex.assert_trees_all_close(got, in_one_piece(case), rtol=0, atol=slack)


@CASES
def test_foreign_batches_are_refused_when_traced(case: Method) -> None:
    # More than there are records, so never truncated: sampled Laplace noise is accounted
    # for nothing else.
    sampler = sampling.TruncatedPoisson(sampling_prob=0.25, max_batch_size=100)
    other = dataclasses.replace(case.plan, sampling=sampler)
    drawn = sampling.batch(other, KEYS, 0, BATCH)

    def tried(plan: Any, batch: Any, keys: Keys = KEYS) -> None:
        tx = case.make(plan, keys)
        state = tx.init(PARAMS)
        jax.eval_shape(lambda: updating(tx, batch=batch)(state))

    tried(other, drawn)
    with pytest.raises(ValueError, match="TruncatedPoisson"):
        tried(case.plan, drawn)
    with pytest.raises(ValueError, match="raw"):
        tried(other, BATCH)
    # Drawn with a seed that everybody knows, a sample amplifies nothing.
    with pytest.raises(ValueError, match="insecure"):
        tried(other, drawn, Keys.from_entropy())
    with pytest.raises(ValueError, match="num_examples"):
        tried(dataclasses.replace(other, num_examples=N + 1), drawn)


@CASES
def test_wrong_numbers_of_rows_are_refused(case: Method) -> None:
    tx = case.make(case.plan, KEYS)
    state = tx.init(PARAMS)
    short = jax.tree.map(lambda x: x[:-1], BATCH)
    with pytest.raises(ValueError, match="num_examples"):
        updating(tx, batch=short)(state)
    with pytest.raises(ValueError, match="mask"):
        updating(tx, mask=jnp.ones(3, bool))(state)


# --- inside optax and flax -----------------------------------------------------------


@these(TWO, {"dpgd"}, "case")
def test_under_inject_hyperparams_step_sizes_vary(case: Method) -> None:
    def chained(learning_rate: Any) -> Any:
        return optax.chain(case.make(case.plan, KEYS), optax.scale(-learning_rate))

    tx = optax.inject_hyperparams(chained)(learning_rate=0.1)
    state, run = tx.init(PARAMS), jax.jit(updating(tx))
    small, _ = run(state)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2)
    large, _ = run(state)
    chex.assert_trees_all_close(jax.tree.map(lambda x: 2 * x, small), large, rtol=1e-6)


@CASES
def test_privacy_constants_refuse_to_be_injected(case: Method) -> None:
    def chained(l2_clip_norm: Any) -> Any:
        plan = dataclasses.replace(case.plan, l2_clip_norm=l2_clip_norm)
        return case.make(plan, KEYS)

    tx = optax.inject_hyperparams(chained)(l2_clip_norm=1.0)
    with pytest.raises(TypeError, match="l2_clip_norm"):
        tx.init(PARAMS)


@FEW
def test_one_release_per_logical_step_under_multi_steps(case: Method) -> None:
    tx = optax.MultiSteps(case.make(case.plan, KEYS), every_k_schedule=2)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    state, run = tx.init(PARAMS), jax.jit(updating(tx, updates=zeros))
    updates = []
    for _ in range(4):
        out, state = run(state)
        updates.append(out)
    assert int(state.inner_opt_state.count) == 2
    moved = [bool(np.any(out["w"])) for out in updates]
    assert moved == [False, True, False, True]
    chex.assert_trees_all_close(updates[1], update(case)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", MAKERS, ids=str)
def test_optax_must_not_call_a_maker_where_it_has_no_effect(case: Method) -> None:
    tx = case.make(case.plan, KEYS)
    late = optax.chain(optax.sgd(0.1), optax.chain(tx))
    state = late.init(case.params)
    with pytest.raises(ValueError, match="must be first in optax"):
        jax.eval_shape(
            lambda: late.update(None, state, case.params, value_fn=1, batch=1)
        )
    several = optax.MultiSteps(optax.chain(tx, optax.sgd(0.1)), every_k_schedule=2)
    if case.plan.sampling.whole:
        several.init(case.params)
    else:
        with pytest.raises(ValueError, match="must not be within optax"):
            several.init(case.params)


@FEW
def test_updates_of_zeros_are_taken_where_optax_needs_a_tree(case: Method) -> None:
    tx = optax.apply_if_finite(case.make(case.plan, KEYS), max_consecutive_errors=3)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    out, state = jax.jit(updating(tx, updates=zeros))(tx.init(PARAMS))
    chex.assert_trees_all_close(out, update(case)[0], rtol=1e-5, atol=1e-5)
    assert int(state.inner_state.count) == 1


@these(TWO, {"dpgd"}, "case")
def test_chains_with_momentum_adam_schedule_free_and_decay(case: Method) -> None:
    """The maker inside is conformant by the other tests: here it is what follows it."""
    chains = [
        optax.chain(case.make(case.plan, KEYS), after)
        for after in (
            optax.sgd(0.1, momentum=0.9),
            optax.adamw(0.1),
            optax.contrib.schedule_free_sgd(0.1),
            optax.sgd(optax.cosine_decay_schedule(0.1, 5)),
        )
    ]

    @jax.jit
    def moved(states: Any) -> Any:
        made = [updating(tx)(s) for tx, s in zip(chains, states, strict=True)]
        return [optax.apply_updates(PARAMS, updates) for updates, _ in made]

    for params in moved([tx.init(PARAMS) for tx in chains]):
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(params))
        assert np.any(params["w"] != PARAMS["w"])


@FEW
def test_inside_a_linen_train_state(case: Method) -> None:
    model = nn.Dense(1)
    x, y = BATCH
    variables = model.init(jax.random.key(0), x[:1])
    tx = optax.chain(case.make(case.plan, KEYS), optax.sgd(0.1))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    def losses(params: Any, batch: Any) -> jax.Array:
        features, target = batch
        return jnp.square(state.apply_fn({"params": params}, features)[:, 0] - target)

    @jax.jit
    def step(state: TrainState) -> TrainState:
        return jaxdp.apply_gradients(state, value_fn=losses, batch=(x, y))

    after = step(step(state))
    assert int(after.opt_state[0].count) == int(after.step) == 2
    assert np.any(after.params["kernel"] != state.params["kernel"])


@FEW
def test_inside_an_nnx_optimizer(case: Method) -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    definition, _ = nnx.split(model)
    start = np.array(model.kernel[...])
    tx = optax.chain(case.make(case.plan, KEYS), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def losses(params: Any, batch: Any) -> jax.Array:
        features, target = batch
        return jnp.square(nnx.merge(definition, params)(features)[:, 0] - target)

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer) -> None:
        params = nnx.state(model, nnx.Param)
        optimizer.update(model, params, value_fn=losses, batch=BATCH)

    for _ in range(2):
        step(model, optimizer)
    assert int(optimizer.opt_state[0].horizon.count[...]) == 2
    assert np.any(np.asarray(model.kernel[...]) != start)
    for held in (optimizer, optimizer.opt_state):
        found = jaxdp.report(case.plan, held)
        assert found["steps_done"] == 2 and found["private"] is False
