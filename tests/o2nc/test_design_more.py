"""Certified designs of the other oracles, in one pass and in several."""

import dataclasses
import itertools
import json
import math
import time
from typing import Any

import numpy as np
import pytest

from jaxdp import accounting, plans, sampling
from jaxdp.mechanism.design import Design
from jaxdp.o2nc.oracle import ORACLES
from jaxdp.o2nc.theory import bounds, budget, design, estimators, recommend
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
    mu = accounting.gaussian_mu(problem["epsilon"], problem["delta"])
    n, period = problem["num_examples"], found.period
    moved = accounting.sensitivity(found.relation, 1.0)
    if found.multi_pass:
        restarts = math.ceil(found.num_steps / period)
        rest = (period - 1) * (found.num_steps - restarts)
        if found.scale_with_movement:
            rest *= 7 / 24
        std = found.restart_l2_clip_norm * math.sqrt(restarts)
        std = moved / n / mu * (std + found.l2_clip_norm * math.sqrt(rest))
    else:
        assert period == 1  # Longer ones: tests/o2nc/test_design.py.
        std = moved * found.restart_l2_clip_norm / found.restart_batch_size / mu
    energy = problem["dim"] * std**2
    if found.oracle == "scalar":
        energy /= found.num_directions
    return bounds.promise(
        bounds.Constants(**{x: problem[x] for x in COMMON}),
        estimators.Estimator.of(found),
        schedule_of(found),
        noise_variance=energy,
        clip_bias=found.promise.clip_bias,
        rounding=found.promise.rounding
        / 2,  # Of it: test_rounding_is_that_of_the_grid.
    )


SEVERAL: dict[str, Any] = {"multi_pass": True}
PROBLEMS: dict[str, dict[str, Any]] = {
    "few records": SEVERAL | {"num_examples": 4},
    "one dimension": SEVERAL | {"dim": 1, "num_examples": 500},
    "many records": SEVERAL | {"num_examples": 10**6, "dim": 100},
    "very many": SEVERAL | {"num_examples": 8 * 10**6, "dim": 10**4},
    "replaced": SEVERAL | {"relation": "replace_one", "num_directions": 1},
    "units": SEVERAL | {"lipschitz": 7.0, "smoothing_radius": 0.01, "initial_gap": 0.0},
    "shared": SEVERAL | {"share_directions": True, "num_directions": 3},
    "independent": SEVERAL | {"difference": "independent", "direction": "sphere"},
    "gradients": SEVERAL | {"oracle": "first_order", "num_examples": 10**6},
    "common": SEVERAL
    | {"oracle": "first_order", "difference": "common", "dim": 100, "epsilon": 8.0},
    "scalar": SEVERAL | {"oracle": "scalar", "num_directions": 4},
    "scalar, one pass": {"oracle": "scalar", "direction": "sphere", "dim": 50},
    "gradients, one pass": {"oracle": "first_order", "num_examples": 2000},
}


@pytest.mark.parametrize("period", [1, 3, 50])
@pytest.mark.parametrize("kind", ["zeroth_order", "first_order", "scalar"])
def test_rounding_is_that_of_the_grid(kind: Any, period: int) -> None:
    """Beside the bits of the plan itself, whose kernel decides."""
    law = {"direction": "ball", "difference": "common"} if kind == "first_order" else {}
    share = kind == "scalar"
    period = 1 if share else period
    plan = plans.O2NC(
        num_examples=10**6,
        num_steps=120,
        sampling=sampling.MultiPassRestarts(period=period),
        relation="replace_one",
        restart_l2_clip_norm=3.0,
        l2_clip_norm=0.5,
        smoothing_radius=0.5,
        max_step=0.1,
        window=4,
        oracle=kind,
        num_directions=4,
        share_directions=share,
        prefix_noise="independent",
        **law,
    ).calibrate(epsilon=COMMON["epsilon"], delta=COMMON["delta"])
    problem = bounds.Constants(
        **COMMON | {"num_examples": 10**6, "relation": "replace_one", "dim": 100}
    )
    made = estimators.ESTIMATORS[kind]
    estimator = made(4, plan.direction, plan.difference, share)
    schedule = bounds.Schedule(period, 1, 1, 120, 1, 0.1, multi_pass=True)
    found = budget.rounding(problem, estimator, schedule, (3.0, 0.5))
    units = [
        p * 2.0 ** -(plan.grid(f.name).bits or 0)
        for f, p in zip(plan.phases, (3.0, 0.5), strict=False)
    ]
    steps = units[0] + sum(units[1:]) * (period - 1)
    size = math.sqrt(100 / 4 if share else 100)
    assert found == pytest.approx(size * steps, rel=1e-12)


def test_more_records_than_a_sum_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="num_examples and epsilon must leave 8 bits"):
        make(multi_pass=True, num_examples=10**8)
    found = recommend.recommend(**COMMON | {"num_examples": 10**8})
    assert not any(x.multi_pass for x in found.candidates)


@pytest.mark.parametrize("name", PROBLEMS)
def test_settings_are_what_the_promise_is_about(name: str) -> None:
    changes = PROBLEMS[name]
    problem = COMMON | changes
    found = make(**changes)
    again = dataclasses.astuple(recomputed(found, **changes))
    assert dataclasses.astuple(found.promise) == pytest.approx(again, rel=1e-12)
    assert found.promise.goldstein_radius == 2 * problem["smoothing_radius"]
    assert found.num_steps % found.window == 0 and found.window >= 2
    reach = bounds.window_radius(found.window, found.reset) * found.max_step
    assert reach == pytest.approx(problem["smoothing_radius"])
    # Clips that concentration allows: all that the run applies share the failures.
    n = problem["num_examples"]
    reads = n * found.num_steps if found.multi_pass else n
    kind = found.oracle, found.direction, found.num_directions, problem["dim"]
    _, way, m, dim = kind
    restart = numbers.slopes_clip if found.oracle == "scalar" else numbers.grad_clip
    clip = problem["lipschitz"] * restart(dim, m, way, bounds.FAILURE / reads)
    assert found.restart_l2_clip_norm == pytest.approx(clip)
    # What it costs.
    restarts = math.ceil(found.num_steps / found.period)
    rest = found.num_steps - restarts
    calls = restarts * found.restart_batch_size, rest * found.batch_size
    if found.oracle == "first_order":
        assert found.gradients == calls[0] + calls[1] * 2 * m
        assert found.evaluations == 0
    else:
        assert found.evaluations == 2 * m * calls[0] + 4 * m * calls[1]
        assert found.gradients == 0
    assert recommend.cost(found, 2.0) == found.evaluations + 2 * found.gradients
    if found.multi_pass:
        assert found.restart_batch_size == found.batch_size == n
        assert found.prefix_noise == "independent"
    if found.oracle == "scalar":
        assert found.period == 1 and found.share_directions
    scaled = found.multi_pass and found.oracle == "zeroth_order"
    assert found.scale_with_movement == (scaled and found.difference == "antithetic")
    fields = found.as_dict()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert Design.read({"promise": bounds.GoldsteinPromise}, **fields) == found


def test_defaults() -> None:
    found = make(oracle="first_order", multi_pass=True)
    assert (found.num_directions, found.direction) == (64, "ball")
    assert (found.difference, found.share_directions) == ("independent", False)
    assert make(oracle="first_order").prefix_noise == "blt_3"
    assert make(multi_pass=True, dim=100).num_directions == 64
    assert make(oracle="scalar").num_directions == 10


@pytest.mark.parametrize(
    ("oracle", "difference", "restart", "other"),
    [
        ("zeroth_order", "antithetic", 6, 12),
        ("zeroth_order", "independent", 6, 12),
        ("zeroth_order", "one_sided", 6, 6),
        ("first_order", "common", 1, 6),
        ("first_order", "independent", 1, 6),
        ("scalar", "antithetic", 6, 12),
    ],
)
def test_what_a_record_is_asked(
    oracle: Any, difference: Any, restart: int, other: int
) -> None:
    """Both ends of 3 directions, at one query or at two; a gradient, or 3 at each."""
    way = ORACLES[oracle].directions[0]
    found = estimators.ESTIMATORS[oracle](3, way, difference, oracle == "scalar")
    assert found.calls == (restart, other)
    assert found.energy(12) == (4 if oracle == "scalar" else 12)


# --- brute force ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_examples": 300_000, "epsilon": 8.0},
        {"oracle": "first_order", "num_examples": 10**6},
        {"oracle": "scalar", "num_directions": 3, "num_examples": 10**5},
        {"difference": "one_sided", "dim": 3, "max_evaluations": 3e8},
    ],
)
def test_nothing_of_a_grid_is_better(changes: dict[str, Any]) -> None:
    """All periods, windows and numbers of windows on a grid, and at random near it."""
    found = make(**SEVERAL, **changes)
    problem = bounds.Constants(
        **{k: v for k, v in (COMMON | changes).items() if k in COMMON}
    )
    estimator = estimators.Estimator.of(found)
    rng = np.random.default_rng(0)
    best = (found.period, found.window, found.num_steps // found.window)
    near = np.rint(best * np.exp(0.4 * rng.standard_normal((300, 3)))).astype(int)
    near = np.maximum(near, (1, 2, 1))
    grid = [
        (p, m, k) for p in (1, 2, 5, 30) for m in (2, 7, 40, 300) for k in (1, 9, 90)
    ]

    def bound(period: int, window: int, count: int) -> float:
        steps = window * count
        restarts = math.ceil(steps / period)
        cost = restarts * estimator.calls[0] + (steps - restarts) * estimator.calls[1]
        if cost * problem.num_examples > changes.get("max_evaluations", math.inf):
            return math.inf
        if steps > design.MOST_STEPS or (found.oracle == "scalar" and period > 1):
            return math.inf
        step = 1 / bounds.window_radius(window, True)
        schedule = bounds.Schedule(
            period,
            problem.num_examples,
            problem.num_examples,
            window,
            count,
            step,
            multi_pass=True,
            scale_with_movement=found.scale_with_movement,
        )
        return design.proven(problem, estimator, schedule)[2].bound

    assert bound(*best) == pytest.approx(found.promise.bound)
    tried = grid + [tuple(int(x) for x in row) for row in near]
    assert min(bound(*x) for x in tried) >= 0.995 * found.promise.bound


# --- what helps ----------------------------------------------------------------------


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("several", [False, True])
def test_more_records_and_budget_help(oracle: Any, several: bool) -> None:
    base = {"oracle": oracle, "multi_pass": several}
    # (In several passes the grid of a sum over more becomes coarse.)
    counts = (10**4, 10**5, 10**6) if several else (10**4, 10**5, 10**6, 10**7)
    sizes = [make(**base, num_examples=n).promise.bound for n in counts]
    assert all(b < a for a, b in itertools.pairwise(sizes))
    budgets = [make(**base, epsilon=e).promise.bound for e in (0.3, 1.0, 3.0, 10.0)]
    assert all(b < a for a, b in itertools.pairwise(budgets))


def test_gradients_help_and_scalars_do_not_at_many_directions() -> None:
    for several in (False, True):
        base: dict[str, Any] = {"multi_pass": several, "dim": 100}
        gradients = make(**base, oracle="first_order", num_examples=10**6)
        values = make(**base, num_examples=10**6)
        assert gradients.promise.bound < values.promise.bound


@pytest.mark.parametrize("dim", [2, 30, 1000])
@pytest.mark.parametrize("most", [None, 1e9])
def test_fresh_estimates_are_best_in_several_passes(
    dim: int, most: float | None
) -> None:
    """What differences save in noise, a window's mean of fresh ones saves as well.

    (Of a million records the grid is so coarse that its noise may not be small.)
    """
    for epsilon in (0.3, 3.0, 30.0):
        found = make(**SEVERAL, dim=dim, epsilon=epsilon, max_evaluations=most)
        assert found.period == 1


def test_units_cancel() -> None:
    base = make(multi_pass=True)
    found = make(multi_pass=True, lipschitz=3.0, smoothing_radius=0.1, initial_gap=0.3)
    assert found.promise.bound == pytest.approx(3 * base.promise.bound)
    assert found.max_step == pytest.approx(0.1 * base.max_step)
    assert found.promise.generalisation == pytest.approx(
        3 * base.promise.generalisation
    )


# --- what a run may cost -------------------------------------------------------------


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("several", [False, True])
def test_no_run_costs_more_than_it_may(oracle: Any, several: bool) -> None:
    base: dict[str, Any] = {"oracle": oracle, "multi_pass": several}
    free = make(**base)
    price = 5.0
    last = free.promise.bound
    for share in (0.5, 0.1):
        most = share * recommend.cost(free, price)
        found = make(**base, max_evaluations=most, gradient_cost=price)
        assert recommend.cost(found, price) <= most
        assert found.promise.bound >= last * (1 - 1e-3)
        last = found.promise.bound
    same = make(
        **base, max_evaluations=1.01 * recommend.cost(free, price), gradient_cost=price
    )
    assert same.promise.bound <= free.promise.bound * 1.05
    with pytest.raises(ValueError, match="max_evaluations must be at least"):
        make(**base, max_evaluations=1.0)


@pytest.mark.parametrize("several", [False, True])
def test_a_design_takes_about_a_second(several: bool) -> None:
    """On an idle machine; a busy one is given four."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        make(multi_pass=several, num_examples=3 * 10**6, dim=100)
        times.append(time.perf_counter() - start)
    assert min(times) < 4


# --- arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"oracle": "zeroth"}, ValueError, "oracle must be one of 'zeroth_order'"),
        ({"multi_pass": 1}, TypeError, "multi_pass must be a bool"),
        (
            {"oracle": "first_order", "direction": "sphere"},
            ValueError,
            "direction must be one of 'ball'; got 'sphere'",
        ),
        (
            {"oracle": "first_order", "difference": "antithetic"},
            ValueError,
            "difference must be one of 'common', 'independent'; got",
        ),
        (
            {"oracle": "first_order", "share_directions": True},
            ValueError,
            "share_directions must be False with oracle='first_order', got True",
        ),
        (
            {"oracle": "scalar", "share_directions": False},
            ValueError,
            "share_directions must be True with oracle='scalar', got False",
        ),
        (
            {"multi_pass": True, "prefix_noise": "blt_3"},
            ValueError,
            "prefix_noise must be one of 'independent'; got 'blt_3'",
        ),
        ({"max_evaluations": 0}, ValueError, "max_evaluations must be a number > 0"),
        ({"gradient_cost": -1.0}, ValueError, "gradient_cost must be a number > 0"),
    ],
)
def test_bad_arguments_are_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**changes)
