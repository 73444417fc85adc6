"""What every algorithm keeps to: one line in ALGORITHMS puts it through all of this."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling

N, D, STEPS = 12, 4, 4
RNG = np.random.default_rng(0)
VECTORS = RNG.uniform(-1, 1, (N, D)).astype(np.float32)
PLAYERS: dict[str, Any] = {
    "num_examples": N,
    "relation": "replace_one",
    "dim_x": D,
    "dim_y": D,
    "linf_clip_norm_x": 1.0,
    "linf_clip_norm_y": 1.0,
}
ONE_PASS: dict[str, Any] = {"num_steps": STEPS, "sampling": sampling.SinglePass(3)}


class Case(NamedTuple):
    """An algorithm, a plan of few steps, and a problem."""

    make: Any
    plan: Any
    data: Any
    problem: Any


GAME = jaxdp.MatrixGame(RNG.uniform(-1, 1, (D, D)))
QUERIES = jaxdp.Marginals((2, 2), 1)
ALGORITHMS = {
    "saddle": Case(
        jaxdp.saddle_mirror_descent,
        plans.Saddle(**PLAYERS, **ONE_PASS),
        (VECTORS, -VECTORS),
        GAME,
    ),
    "bias_reduced": Case(
        jaxdp.saddle_bias_reduced,
        plans.SaddleBiasReduced(**PLAYERS, vertex_budget=5, level_seed=1),
        (VECTORS, -VECTORS),
        GAME,
    ),
    "convex": Case(
        jaxdp.simplex_convex,
        plans.ConvexSimplex(
            num_examples=N,
            relation="replace_one",
            dim=D,
            linf_clip_norm=1.0,
            num_draws=2,
            refresh_every=2,
            **ONE_PASS,
        ),
        VECTORS,
        jaxdp.Problem(lambda x, batch: (batch @ x) ** 2),
    ),
    "synthetic": Case(
        jaxdp.synthetic_data,
        plans.SyntheticData(
            num_examples=N,
            relation="replace_one",
            num_steps=STEPS,
            domain_size=4,
            num_queries=2 * QUERIES.num_queries,
        ),
        RNG.integers(0, 4, N).astype(np.int32),
        QUERIES,
    ),
}


@functools.cache
def ready(name: str) -> Case:
    case = ALGORITHMS[name]
    return case._replace(plan=case.plan.calibrate(epsilon=5.0, delta=1e-5))


@functools.cache
def ran(name: str) -> tuple[Any, list[Any], int]:
    """The algorithm, its states, and how often its step was traced."""
    case = ready(name)
    algorithm = case.make(case.plan, Keys.insecure(7))
    traced = 0

    def step(state: Any, data: Any) -> Any:
        nonlocal traced
        traced += 1
        return algorithm.step(state, data, value_fn=case.problem)

    jitted = jax.jit(step)
    states = [algorithm.init(case.plan.uniform())]
    for _ in range(case.plan.num_steps + 1):
        states.append(jitted(states[-1], case.data)[0])
    return algorithm, states, traced


def leaves(state: Any) -> list[np.ndarray]:
    shown = [
        jax.random.key_data(x)
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
        for x in jax.tree.leaves(state)
    ]
    return [np.asarray(x) for x in shown]


NAMES = pytest.mark.parametrize("name", ALGORITHMS)


@NAMES
def test_traced_once_and_ends(name: str) -> None:
    """Past the horizon nothing is released, and nothing but the release changes."""
    _, states, traced = ran(name)
    assert traced == 1
    assert bool(states[-1].horizon.exhausted) and not bool(states[0].horizon.exhausted)
    assert not bool(states[-3].horizon.exhausted)
    assert not np.any(states[-1].release)
    for before, after in zip(
        leaves(states[-2]._replace(release=states[-1].release)),
        leaves(states[-1]),
        strict=True,
    ):
        np.testing.assert_array_equal(before, after)


@NAMES
def test_fit_gives_the_same(name: str) -> None:
    case = ready(name)
    algorithm, states, _ = ran(name)
    result = jaxdp.fit(
        case.plan,
        Keys.insecure(7),
        case.plan.uniform(),
        case.data,
        value_fn=case.problem,
    )
    for got, want in zip(
        leaves(result.params), leaves(algorithm.output(states[-1])), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert np.isclose(got.sum(), 1, rtol=1e-5) and (got >= 0).all()
    for t, row in enumerate(result.info.releases):
        np.testing.assert_array_equal(row, states[t + 1].release)


@NAMES
def test_secrets_are_named(name: str) -> None:
    """What is public tells nothing of the scores: it is the same for other data."""
    _, states, _ = ran(name)
    shown = jaxdp.public(states[1])
    assert shown.roots is None
    for field in type(states[1]).KEPT:
        assert field in type(states[1]).SECRET and getattr(shown, field) is None


@NAMES
def test_keys_serve_one_run_and_are_needed(name: str) -> None:
    case = ready(name)
    algorithm = case.make(case.plan, Keys.from_entropy())
    with pytest.raises(ValueError, match=r"^keys .*jax.jit\(tx.init\)"):
        jax.jit(algorithm.init)(case.plan.uniform())
    assert bool(algorithm.init(case.plan.uniform()).horizon.private)
    with pytest.raises(ValueError, match="already served"):
        algorithm.init(case.plan.uniform())
    with pytest.raises(TypeError, match="keys"):
        case.make(case.plan, jax.random.key(0))
    with pytest.raises(ValueError, match="calibrate"):
        case.make(ALGORITHMS[name].plan, Keys.insecure(0))
    other = next(c for n, c in ALGORITHMS.items() if n != name)
    with pytest.raises(ValueError, match="family"):
        other.make(case.plan, Keys.insecure(0))


@NAMES
def test_the_float_sampler_is_not_private(name: str) -> None:
    case = ready(name)
    plan = dataclasses.replace(case.plan, sampler="float")
    algorithm = case.make(plan, Keys.from_entropy())
    assert not bool(algorithm.init(plan.uniform()).horizon.private)
    assert plan.epsilon() == float("inf")


@NAMES
def test_data_of_another_size_are_refused(name: str) -> None:
    case = ready(name)
    algorithm = case.make(case.plan, Keys.insecure(0))
    state = algorithm.init(case.plan.uniform())
    fewer = jax.tree.map(lambda x: x[:-1], case.data)
    with pytest.raises(ValueError, match="num_examples"):
        algorithm.step(state, fewer, value_fn=case.problem)


@NAMES
def test_a_chosen_start_is_where_it_starts(name: str) -> None:
    case = ready(name)
    algorithm = case.make(case.plan, Keys.insecure(0))
    weights = np.array([0.5, 0.25, 0.125, 0.125], np.float32)
    two = name in ("saddle", "bias_reduced")
    state = algorithm.init((weights, weights) if two else weights)
    if name == "synthetic":
        np.testing.assert_allclose(np.exp(state.logits), weights, rtol=1e-6)
    else:
        scores = state.scores_x if two else state.scores
        np.testing.assert_allclose(scores, np.array([0, -1, -2, -2]) * 2.0**24, atol=4)
