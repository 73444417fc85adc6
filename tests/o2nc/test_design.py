"""The certified design: least of the bound, and true to what it promises."""

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from jaxdp import accounting
from jaxdp.kernels import prefix_noise
from jaxdp.mechanism.design import Design
from jaxdp.o2nc.theory import bounds, budget, design, estimators
from tests.o2nc import numbers
from tests.o2nc.numbers import schedule_of

COMMON: dict[str, Any] = {
    "num_examples": 20_000,
    "dim": 10,
    "lipschitz": 1.0,
    "initial_gap": 1.0,
    "smoothing_radius": 1.0,
    "epsilon": 2.0,
    "delta": 1e-6,
    "relation": "zero_out",
}


def make(**changes: Any) -> Design:
    return design.certified(**(COMMON | changes))


def recomputed(found: Design, **changes: Any) -> bounds.GoldsteinPromise:
    """The bound of the numbers that stand in the settings, at exact noise."""
    problem = COMMON | changes
    kernel = prefix_noise.make(found.prefix_noise, found.period)
    leaves = np.full(
        found.period,
        accounting.sensitivity(found.relation, found.l2_clip_norm) / found.batch_size,
    )
    first = accounting.sensitivity(found.relation, found.restart_l2_clip_norm)
    leaves[0] = first / found.restart_batch_size
    mu = accounting.gaussian_mu(problem["epsilon"], problem["delta"])
    std = prefix_noise.sensitivity(kernel, leaves) / mu
    return bounds.promise(
        bounds.Constants(**{x: problem[x] for x in COMMON}),
        estimators.Estimator.of(found),
        schedule_of(found),
        noise_variance=problem["dim"] * (std * max(kernel.prefix_norms())) ** 2,
        clip_bias=found.promise.clip_bias,
    )


PROBLEMS: dict[str, dict[str, Any]] = {
    "few records": {"num_examples": 4},
    "one dimension": {"dim": 1, "num_examples": 500},
    "many records": {"num_examples": 10**8, "dim": 100},
    "replaced": {"relation": "replace_one", "prefix_noise": "tree"},
    "units": {"lipschitz": 7.0, "smoothing_radius": 0.01, "initial_gap": 0.0},
    "shared": {"share_directions": True, "num_directions": 3},
    "sphere": {"direction": "sphere", "num_directions": 500, "dim": 20},
    "independent": {"difference": "independent", "num_examples": 10**6},
    "one-sided": {"difference": "one_sided", "epsilon": 50.0, "num_examples": 10**7},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_settings_are_what_the_promise_is_about(name: str) -> None:
    problem = COMMON | PROBLEMS[name]
    found = make(**PROBLEMS[name])
    again = dataclasses.astuple(recomputed(found, **PROBLEMS[name]))
    assert dataclasses.astuple(found.promise) == pytest.approx(again, rel=1e-12)
    assert found.learning_rate == found.promise.learning_rate
    assert found.promise.goldstein_radius == 2 * problem["smoothing_radius"]
    assert found.smoothing_radius == problem["smoothing_radius"]
    # One pass, whole windows, and the whole ball used.
    sizes = (found.restart_batch_size, found.batch_size)
    steps = bounds.num_steps(problem["num_examples"], found.period, *sizes)
    assert found.num_steps % found.window == 0 and found.num_steps <= steps
    assert steps < found.num_steps + found.num_steps / found.window  # M = T // K
    reach = bounds.window_radius(found.window, found.reset) * found.max_step
    assert reach == pytest.approx(problem["smoothing_radius"]) and found.window >= 2
    assert (found.name, found.paper_noise_std) == ("certified", None)
    fields = found.as_dict()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields


def test_defaults() -> None:
    found = make(dim=1000)
    assert (found.num_directions, found.direction) == (64, "orthonormal")
    assert (found.difference, found.prefix_noise) == ("antithetic", "blt_3")
    assert make().num_directions == 10
    assert str(found).startswith("certified: E|grad| <= ")


@pytest.mark.parametrize("prefix_noise", ["blt_3", "tree"])
@pytest.mark.parametrize(
    ("num_examples", "dim", "epsilon"),
    [(3000, 3, 1.0), (10**6, 20, 4.0), (10**9, 50, 8.0)],
)
def test_nothing_near_or_far_is_better(
    num_examples: int, dim: int, epsilon: float, prefix_noise: str
) -> None:
    """Against 4000 settings drawn at random, and 3000 near the one found."""
    changes: dict[str, Any] = {"num_examples": num_examples, "dim": dim}
    problem = bounds.Constants(**COMMON | changes | {"epsilon": epsilon})
    found = make(**changes, epsilon=epsilon, prefix_noise=prefix_noise)
    estimator = estimators.Estimator(min(dim, 64), "orthonormal", "antithetic")
    rng = np.random.default_rng(0)

    def bound(period: int, b1: int, b2: int, count: int) -> float:
        window = int(bounds.num_steps(num_examples, period, b1, b2)) // count
        if window < 2:
            return math.inf
        step = problem.smoothing_radius / bounds.window_radius(window, True)
        schedule = bounds.Schedule(
            period, b1, b2, window, count, step, prefix_noise=prefix_noise
        )
        return design.proven(problem, estimator, schedule)[2].bound

    count = found.num_steps // found.window
    best = (found.period, found.restart_batch_size, found.batch_size, count)
    assert bound(*best) == pytest.approx(found.promise.bound)
    highs = np.array([min(2000, num_examples // 2), *3 * [num_examples]])
    far = np.exp(rng.random((1000, 4)) * np.log(highs)).astype(int)
    near = np.rint(best * np.exp(0.5 * rng.standard_normal((1000, 4)))).astype(int)
    tried = np.clip(np.concatenate([far, near]), 1, highs)
    assert (
        min(bound(*(int(x) for x in row)) for row in tried)
        >= 0.99 * found.promise.bound
    )


# --- the digests' tables --------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "num_examples", "delta", "value", "tuned"),
    [
        (10, 10**6, 1e-6, 0.160, (2454, 1023, 4092, 16)),
        (100, 10**6, 1e-6, 0.322, (34, 1, 2048, 1)),
        (100, 10**8, 1e-9, 0.062, (31012, 4095, 65520, 64)),
        (1000, 10**8, 1e-9, 0.229, (10**5, 4095, 65520, 64)),
    ],
)
def test_examples_of_the_digest(
    dim: int, num_examples: int, delta: float, value: float, tuned: tuple[int, ...]
) -> None:
    """Kornowski digest 3.3, with its clips: its bound at its optimum, and none above."""
    changes: dict[str, Any] = {"dim": dim, "num_examples": num_examples, "delta": delta}
    problem = bounds.Constants(**COMMON | changes | {"epsilon": 1.0})
    slope = 1 + math.sqrt(dim**2 / (dim - 1) / 1024)
    spread = estimators.kappa(dim) + dim / 32

    class Digests(estimators.Estimator):
        """With the digest's clips."""

        def clips(self, dim: int, movement: Any, failure: Any = None) -> Any:
            return slope, movement * spread

    estimator = Digests(1024, "sphere", "antithetic")

    def at(kernel: str, window: int, count: int, *sizes: int, reset: bool) -> Any:
        period, b1, b2 = sizes
        step = 1 / bounds.window_radius(window, reset)
        norms = budget._norms(kernel, period)
        worst = max(slope / b1 * norms[0], 2 * step * spread / b2 * norms[1])
        return bounds.promise(
            problem,
            estimator,
            bounds.Schedule(period, b1, b2, window, count, step),
            noise_variance=dim * (worst * norms[2] / problem.mu) ** 2,
        )

    window, *sizes = tuned
    count = int(bounds.num_steps(num_examples, *sizes)) // window
    same = at("tree", window, count, *sizes, reset=False)
    error = math.sqrt(
        same.restart_variance + same.difference_variance + same.noise_variance
    )
    digests = same.start + (1 + error) / math.sqrt(window) + 2 * error
    assert digests == pytest.approx(value, rel=5e-3)
    best = same.bound
    assert best <= digests
    for kernel in ("tree", "blt_3"):
        least, found = design.one_pass(problem, estimator, kernel)
        sizes = (found.period, found.restart_batch_size, found.batch_size)
        same = at(kernel, found.window, found.num_windows, *sizes, reset=True)
        assert least == pytest.approx(same.bound)
        assert least <= best * (1 + 1e-9)
        best = least


def test_restarting_every_step_wins_with_few_records() -> None:
    """And not with many: the digests' conclusion, for one and the same problem."""
    problem: dict[str, Any] = {"dim": 100, "epsilon": 1.0}
    few = make(**problem, num_examples=10**6)
    many = make(**problem, num_examples=10**9)
    assert few.period == 1 and few.window > 10 and few.batch_size == 1
    assert many.period > 100 and many.restart_batch_size > many.batch_size
    assert few.promise.bound > 3 * many.promise.bound


# --- what helps -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"num_examples": 10**5}, {"num_examples": 10**6}),
        ({"epsilon": 0.5}, {"epsilon": 5.0}),
        ({"delta": 1e-9}, {"delta": 1e-5}),
        ({"relation": "replace_one"}, {"relation": "zero_out"}),
        ({"dim": 100}, {"dim": 10}),
        ({"num_directions": 2}, {"num_directions": 8}),
        ({"direction": "sphere"}, {"direction": "orthonormal"}),
        ({"share_directions": True}, {"share_directions": False}),
        ({"initial_gap": 5.0}, {"initial_gap": 0.5}),
        ({"smoothing_radius": 0.1}, {"smoothing_radius": 1.0}),
        (
            {"prefix_noise": "tree", "num_examples": 10**8},
            {"prefix_noise": "blt_3", "num_examples": 10**8},
        ),
        (
            {"difference": "independent", "num_examples": 10**8},
            {"difference": "antithetic", "num_examples": 10**8},
        ),
    ],
)
def test_what_lowers_the_bound(worse: dict[str, Any], better: dict[str, Any]) -> None:
    assert make(**better).promise.bound < make(**worse).promise.bound


def test_units_cancel() -> None:
    """The bound is in units of L; a step, in units of the radius."""
    base = make()
    found = make(lipschitz=3.0, smoothing_radius=0.1, initial_gap=0.3)
    assert found.promise.bound == pytest.approx(3 * base.promise.bound)
    assert found.max_step == pytest.approx(0.1 * base.max_step)
    assert found.restart_l2_clip_norm == pytest.approx(3 * base.restart_l2_clip_norm)
    assert found.l2_clip_norm == pytest.approx(3 * base.l2_clip_norm)
    assert found.learning_rate == pytest.approx(base.learning_rate * 0.1 / 3)


def test_relations_without_replacement_are_the_same() -> None:
    first, second = make(), make(relation="add_or_remove")
    assert second == Design(**{**first, "relation": "add_or_remove"})


def test_bias_only_where_a_clip_may_bite() -> None:
    """At d = 10 the sure clip is the smaller one; at d = 1000 the likely one is."""
    assert make().promise.clip_bias == 0
    high = make(dim=1000, lipschitz=2.0)
    assert high.promise.clip_bias == 2 * bounds.FAILURE
    assert high.restart_l2_clip_norm < 0.2 * 2 * numbers.grad_clip(
        1000, 64, "orthonormal"
    )


@pytest.mark.parametrize("law", ["orthonormal", "sphere"])
def test_certified_clips_do_not_clip(law: Any) -> None:
    """On kinks and linear losses of the worst slope, at the longest movement."""
    lip, radius = 3.0, 0.2
    found = make(
        dim=12,
        lipschitz=lip,
        smoothing_radius=radius,
        direction=law,
        num_directions=6,
        epsilon=8.0,
    )
    rng = np.random.default_rng(0)
    u = rng.standard_normal((500, 12, 6))
    u = (
        np.linalg.qr(u)[0]
        if law == "orthonormal"
        else u / np.linalg.norm(u, axis=1)[:, None]
    )
    u = u.transpose(0, 2, 1)
    a = np.eye(12)[0]
    y = 2 * found.max_step * a
    for f in (lambda x: lip * x[..., 0], lambda x: -lip * np.abs(x[..., 0])):
        at = [f(z + s * radius * u) for z, s in itertools.product((0 * y, y), (1, -1))]
        at_x, at_y = (at[0] - at[1]) / 2, (at[2] - at[3]) / 2
        for scores, clip in (
            (at_x, found.restart_l2_clip_norm),
            (at_x - at_y, found.l2_clip_norm),
            (at[0] - at[2], found.l2_clip_norm),
        ):
            vector = np.einsum("nm,nmd->nd", scores * 12 / (radius * 6), u)
            assert np.max(np.linalg.norm(vector, axis=1)) <= clip * (1 + 1e-9)


# --- arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_examples": 3}, ValueError, "num_examples must be an integer >= 4"),
        ({"smoothing_radius": -1.0}, ValueError, "radius must be a number > 0"),
        (
            {"direction": "gaussian"},
            ValueError,
            "direction must be one of 'orthonormal'",
        ),
        ({"difference": "crn"}, ValueError, "difference must be one of 'antithetic'"),
        ({"prefix_noise": "blt"}, ValueError, "prefix_noise must be one of 'tree'"),
        ({"share_directions": 1}, TypeError, "share_directions must be a bool"),
        ({"num_directions": 11}, ValueError, "num_directions must be .* <= 10"),
        (
            {"num_directions": 65, "dim": 100},
            ValueError,
            "num_directions must be an integer >= 1 and <= 64",
        ),
        (
            {"num_directions": 0, "direction": "sphere"},
            ValueError,
            "num_directions must be an integer >= 1, got 0",
        ),
    ],
)
def test_bad_arguments_are_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**changes)
