"""The plans of vertex sampling: numbers, budgets, promises, text."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant

from jaxdp import accounting, plans, sampling
from jaxdp.kernels import simplex
from jaxdp.saddle.grids import UNIT, score_grid
from jaxdp.saddle.theory import bounds

COMMON: dict[str, Any] = {"num_examples": 10_000, "relation": "replace_one"}
PLAYERS: dict[str, Any] = {
    "dim_x": 10,
    "dim_y": 20,
    "linf_clip_norm_x": 1.5,
    "linf_clip_norm_y": 1.5,
}


def saddle(**changes: Any) -> plans.Saddle:
    numbers = {"num_steps": 100, "sampling": sampling.SinglePass(100)}
    return plans.Saddle(**COMMON | PLAYERS | numbers | changes)


def reduced(**changes: Any) -> plans.SaddleBiasReduced:
    numbers = {"vertex_budget": 64, "level_seed": 3}
    return plans.SaddleBiasReduced(**COMMON | PLAYERS | numbers | changes)


def convex(**changes: Any) -> plans.ConvexSimplex:
    numbers = {
        "num_steps": 100,
        "sampling": sampling.SinglePass(100),
        "dim": 10,
        "linf_clip_norm": 2.0,
        "num_draws": 5,
        "refresh_every": 4,
    }
    return plans.ConvexSimplex(**COMMON | numbers | changes)


def wolfe(**changes: Any) -> plans.FrankWolfe:
    numbers = {"num_steps": 30, "sampling": sampling.FullBatch()}
    return plans.FrankWolfe(
        **COMMON | numbers | {"dim": 10, "linf_clip_norm": 2.0} | changes
    )


def synthetic(**changes: Any) -> plans.SyntheticData:
    numbers = {"num_steps": 300, "domain_size": 256, "num_queries": 896}
    return plans.SyntheticData(**COMMON | numbers | changes)


MAKERS = (saddle, reduced, convex, wolfe, synthetic)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("relation", accounting.RELATIONS)
def test_calibrated_plans_spend_their_budget(make: Any, relation: str) -> None:
    plan = make(relation=relation).calibrate(epsilon=1.0, delta=1e-6)
    spent = plan.epsilon()
    # Multipliers have 15 bits: a little is left.
    assert 0.9995 < spent <= 1.0
    assert plan.delta == 1e-6 and plan.event_relation is not None
    again = accounting.epsilon(plan.event, plan.event_relation, 1e-6)
    assert again == spent


@pytest.mark.parametrize("make", MAKERS)
def test_neighbours_that_miss_a_record_allow_twice_the_step(make: Any) -> None:
    one = make(relation="replace_one").calibrate(epsilon=1.0, delta=1e-6)
    other = make(relation="zero_out").calibrate(epsilon=1.0, delta=1e-6)
    for name in one.step_size_fields:
        ratio = getattr(other, name) / getattr(one, name)
        assert math.isclose(ratio, 2, rel_tol=1e-3)


def test_step_size_is_the_digests() -> None:
    """tau_cert = B / (2 L0) sqrt(rho / ((T - 1)(K + 1))), less what integers take."""
    plan = saddle(dim_y=10).calibrate(epsilon=1.0, delta=1e-6)
    wanted = 100 / 3 * math.sqrt(2.43558e-2 / (99 * 2))
    step: Any = plan.step_size_x
    assert wanted * 0.999 < step < wanted * 1.0001
    assert plan.step_size_y == step


def test_calibration_keeps_a_given_proportion() -> None:
    plan = saddle(step_size_x=0.1, step_size_y=0.3).calibrate(epsilon=1.0, delta=1e-6)
    x, y = plan.step_size_x, plan.step_size_y
    assert x is not None and y is not None and math.isclose(y / x, 3)


def test_budgets_are_spent_by_the_formulas() -> None:
    error = simplex.LOG_ERROR
    plan = saddle(step_size_x=0.1, step_size_y=0.2, num_draws=3)
    each = (plan.sensitivity_x + error) ** 2 + (plan.sensitivity_y + error) ** 2
    assert math.isclose(plan.rho, 99 * 4 * each / 2, rel_tol=1e-12)
    ideal = 2 * 0.1 * 1.5 / 100
    assert ideal * (1 - 2**-14) < plan.sensitivity_x <= ideal + UNIT
    plan = synthetic(step_size_y=0.5)
    parts = [(plan.sensitivity_at(t) + error) ** 2 / 2 for t in range(1, 300)]
    assert math.isclose(plan.rho, math.fsum(parts), rel_tol=1e-3)
    assert plan.rho >= math.fsum(parts)
    # Queries that are 0 or 1, one record in 10 000: t tau / n.
    assert math.isclose(plan.sensitivity_at(100), 100 * 0.5 / 10_000, rel_tol=1e-3)


FEW: tuple[Any, ...] = (
    lambda **c: saddle(num_steps=2, **c),
    lambda **c: reduced(vertex_budget=4, num_examples=400, **c),
    lambda **c: convex(num_steps=2, num_draws=1, refresh_every=1, **c),
    lambda **c: synthetic(num_steps=4, num_examples=100, **c),
)


@pytest.mark.parametrize("make", FEW, ids=["saddle", "reduced", "convex", "synthetic"])
def test_few_draws_are_charged_by_their_pure_sum(make: Any) -> None:
    """The better of both, at every delta; others read the event as zCDP, a valid bound."""
    plan = make().calibrate(epsilon=1.0, delta=1e-12)
    assert plan.epsilon().accountant == "pure composition"
    assert 0.9995 < plan.epsilon() <= 1.0
    zcdp = accounting.epsilon(*accounting.zcdp(plan.rho), 1e-12)
    assert zcdp > 1.05
    theirs = RdpAccountant(neighboring_relation=plan.event_relation).compose(plan.event)
    assert theirs.get_epsilon(1e-12) >= zcdp * (1 - 1e-9)
    assert plan.epsilon(delta=0) == plan.epsilon() == plan.event.pure_epsilon
    assert plan.epsilon(delta=0.1) < plan.epsilon()
    pure = make().calibrate(epsilon=1.0, delta=0)
    assert (pure.delta, pure.step_sizes) == (0, plan.step_sizes)
    assert type(pure).from_json(pure.to_json()) == pure
    twice = accounting.composed([plan._guarantee, pure._guarantee])
    both = accounting.epsilon(*twice, 1e-30)
    assert both == pytest.approx(2 * plan.epsilon(), rel=1e-12)
    best = accounting.repeat_and_select(plan._guarantee, mean=2.0, shape=1.0)
    assert accounting.epsilon(*best, 1e-12).accountant == "RDP"


@pytest.mark.parametrize("make", MAKERS)
def test_many_draws_are_charged_by_zcdp_and_may_be_pure(make: Any) -> None:
    plan = make().calibrate(epsilon=1.0, delta=1e-6)
    assert plan.epsilon().accountant == "RDP"
    assert plan.epsilon() == accounting.epsilon(*accounting.zcdp(plan.rho), 1e-6)
    pure = make().calibrate(epsilon=1.0, delta=0)
    assert 0.99 < pure.epsilon() <= 1.0
    assert all(a < b for a, b in zip(pure.step_sizes, plan.step_sizes, strict=True))


def test_the_pure_sum_is_that_of_the_sensitivities() -> None:
    plan = synthetic(num_steps=5).calibrate(epsilon=0.1, delta=1e-6)
    moved = [plan.sensitivity_at(step) for step in range(1, 5)]
    spent = plan.epsilon(delta=0)
    assert spent >= 2 * math.fsum(moved) + 2 * 4 * simplex.LOG_ERROR
    assert spent == pytest.approx(2 * math.fsum(moved), rel=1e-3)


def test_no_pure_guarantee_with_a_filter_or_floats() -> None:
    steps = {"step_size_x": 1e-3, "step_size_y": 1e-3}
    plan = reduced(batch_alpha=0.05, **steps).filtered(epsilon=1.0, delta=1e-6)
    assert plan.event == accounting.zcdp(plan.rho).event
    for made in (plan, saddle(sampler="float", **steps)):
        with pytest.raises(ValueError, match="delta"):
            made.epsilon(delta=0)


def test_grids_are_rounded_down() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        step, clip = np.exp(rng.uniform(-8, 2, 2))
        bits, records = int(rng.integers(8, 17)), int(rng.integers(1, 10**5))
        grid = score_grid(step, clip, bits, records)
        per_clip = 2.0**grid.bits * grid.multiplier / 2.0**grid.shift * UNIT
        ideal = step * clip / records
        assert grid.multiplier < 2**16 and 0 <= grid.shift <= 46
        assert ideal * (1 - 2**-14) - UNIT * 2.0**grid.bits / 2**46 <= per_clip
        assert per_clip <= ideal * (1 + 1e-12)
        assert grid.sensitivity(2.0) <= 2 * ideal + UNIT * (1 + 1e-9)


def test_no_steps_cost_nothing_and_floats_everything() -> None:
    assert saddle(step_size_x=0.0, step_size_y=0.0).rho == 0.0
    plan = saddle(step_size_x=0.1, step_size_y=0.1, sampler="float", delta=1e-6)
    assert plan.epsilon() == math.inf
    with pytest.raises(ValueError, match="sampler"):
        saddle(sampler="float").calibrate(epsilon=1.0, delta=1e-6)


def test_a_filter_ends_within_its_budget() -> None:
    """Fixed steps, levels one by one: as many as the budget allows, and one more not."""
    steps = {"step_size_x": 0.02, "step_size_y": 0.02, "batch_alpha": 0.01}
    whole = reduced(**steps, vertex_budget=10**5, max_level=3, num_examples=10**7)
    plan = whole.filtered(epsilon=1.0, delta=1e-6)
    assert 0.8 < plan.epsilon() <= 1.0
    assert plan.levels == whole.levels[: plan.num_steps]
    longer = dataclasses.replace(plan, budget=plan.rho * 1.5)
    assert longer.num_steps > plan.num_steps
    # Records end it too.
    few = dataclasses.replace(plan, num_examples=10**5, budget=1e6)
    assert 0 < few.num_steps < plan.num_steps
    with pytest.raises(ValueError, match="budget"):
        plan.calibrate(epsilon=1.0, delta=1e-8)
    with pytest.raises(ValueError, match="batch_alpha"):
        reduced(step_size_x=0.1, step_size_y=0.1).filtered(epsilon=1.0, delta=1e-6)


CONSTANTS: dict[str, Any] = {
    "num_examples": 100_000,
    "epsilon": 1.0,
    "delta": 1e-6,
    "relation": "replace_one",
    "lipschitz": 1.5,
    "smoothness": 1.0,
    "second_order_smoothness": 0.0,
}
GAMES = CONSTANTS | {"dim_x": 100, "dim_y": 100}
CELLS: dict[str, Any] = {
    "num_examples": 10_000,
    "domain_size": 256,
    "num_queries": 896,
    "epsilon": 1.0,
    "delta": 1e-6,
    "relation": "replace_one",
}


def test_theorems_are_private_and_certified_is_better() -> None:
    """Every paper setting spends less than it may; certified steps are longer."""
    pairs: list[tuple[Any, Any]] = [
        (plans.Saddle.from_theorem("4.1", **GAMES), plans.Saddle.certified(**GAMES)),
        (
            plans.ConvexSimplex.from_theorem("5.1", **CONSTANTS, dim=100),
            plans.ConvexSimplex.certified(**CONSTANTS, dim=100),
        ),
        (
            plans.SyntheticData.from_theorem("G.1", **CELLS),
            plans.SyntheticData.certified(**CELLS),
        ),
    ]
    for paper, certified in pairs:
        assert paper.epsilon() < 0.5 and certified.epsilon() <= 1.0
        assert certified.theorem.promise.bound < paper.theorem.promise.bound
    paper = pairs[0][0]
    # Table 4.4: 0.282 is what the paper's step size spends; it admits 3.28 times that.
    assert math.isclose(paper.epsilon(), 0.282, abs_tol=2e-3)
    longest = paper.calibrate(epsilon=1.0, delta=1e-6)
    assert math.isclose(longest.step_size_x / paper.step_size_x, 3.28, abs_tol=0.03)
    reduced_ = plans.SaddleBiasReduced.from_theorem("4.3", **GAMES, level_seed=1)
    assert reduced_.epsilon() < 0.5 and reduced_.batch_alpha is not None
    assert plans.SaddleBiasReduced.certified(**GAMES).epsilon() <= 1.0


def test_budget_that_a_certified_plan_leaves_is_said() -> None:
    """The step size of the least bound is kept: a larger one promises less."""
    with pytest.warns(
        UserWarning, match=r"spends 0\.0\d+ of epsilon 1: .*calibrate"
    ) as said:
        plan = plans.SyntheticData.certified(**CELLS, num_steps=30)
    assert [warning.filename for warning in said] == [__file__]
    most = plan.calibrate(epsilon=1.0, delta=1e-6)
    assert plan.epsilon() < 0.1 and 0.99 < most.epsilon() <= 1.0
    assert plan.theorem is not None and most.theorem is None

    def bound(step: float) -> float:
        return bounds.synthetic(
            num_examples=10_000,
            num_steps=30,
            step_size_x=plan.histogram_step_size,
            step_size_y=step,
            log_domain=math.log(256),
            log_queries=math.log(896),
        ).bound

    kept = plan.step_sizes[0] / 2  # Of answers in [-1, 1].
    assert bound(kept) < min(bound(1.01 * kept), bound(0.99 * kept), bound(5 * kept))
    assert (
        plans.SyntheticData.certified(**CELLS).epsilon() > 0.9
    )  # And nothing is said.


@pytest.mark.parametrize("kind", [plans.Saddle, plans.SaddleBiasReduced])
def test_wrong_constants_are_named(kind: Any) -> None:
    missing = {name: x for name, x in GAMES.items() if name != "lipschitz"}
    for wrong in (missing, GAMES | {"lipschitzness": 1.0}, GAMES | {"dim": 3}):
        with pytest.raises(TypeError, match=r"'lipschitz|'dim'"):
            kind.certified(**wrong)
    with pytest.raises(TypeError, match="num_queries"):
        plans.SyntheticData.certified(**CELLS | {"num_queries": 2.5})


def test_designs_leave_the_grid_of_queries_alone() -> None:
    for plan in (
        plans.SyntheticData.certified(**CELLS, grid_bits=8),
        plans.SyntheticData.from_theorem("G.1", **CELLS, grid_bits=8),
    ):
        assert plan.grid_bits == 8 and plan.theorem is not None
        assert "grid_bits" not in plan.theorem


@pytest.mark.parametrize("make", MAKERS)
def test_text_gives_the_plan_back(make: Any) -> None:
    plan = make().calibrate(epsilon=1.0, delta=1e-6)
    assert plans.from_json(plan.to_json()) == plan
    assert plan.digest != make().digest
    assert "epsilon" in str(plan) and "rho" in str(plan)


def test_promises_are_kept_in_text_and_lost_with_their_numbers() -> None:
    plan = plans.Saddle.certified(**GAMES)
    again = plans.from_json(plan.to_json())
    assert again == plan and plan.theorem is not None
    changed: dict[str, Any] = {"num_draws": plan.num_draws + 1}
    assert dataclasses.replace(plan, **changed).theorem is None
    assert plan.with_step_size(0.5 * (plan.step_size_x or 0)).theorem is None
    # What the theorems are about besides.
    assert dataclasses.replace(plan, output="mean").theorem is None
    assert dataclasses.replace(plan, sampler="float").theorem is None
    with pytest.warns(UserWarning, match="spends"):
        reduced_ = plans.SaddleBiasReduced.certified(**GAMES, vertex_budget=64)
    assert reduced_.theorem is not None
    assert dataclasses.replace(reduced_, batch_alpha=1.0).theorem is None


def test_text_is_strict_json_and_defaults_follow() -> None:
    """Infinity has no place in JSON; what stands for None is not frozen."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    with pytest.warns(UserWarning, match="spends 0 of epsilon 1"):
        plan = plans.Saddle.certified(**GAMES, num_steps=1)
    assert plan.theorem is not None and plan.theorem.steps.certified == math.inf
    json.loads(plan.to_json(), parse_constant=refuse)
    assert plans.from_json(plan.to_json()) == plan
    few, many = synthetic(num_steps=100), synthetic(num_steps=10_000)
    longer = dataclasses.replace(few, num_steps=10_000)
    assert longer == many and longer.histogram_step_size < few.histogram_step_size
    wide = dataclasses.replace(reduced(), vertex_budget=400)
    assert max(wide.levels) > max(reduced().levels)


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (saddle, {"num_steps": 101}, "num_steps"),
        (saddle, {"sampling": sampling.FullBatch()}, "sampling"),
        (saddle, {"relation": "other"}, "relation"),
        (saddle, {"dim_x": 0}, "dim_x"),
        (saddle, {"dim_y": 2**24 + 1}, "dim_y"),
        (saddle, {"linf_clip_norm_x": math.inf}, "linf_clip_norm_x"),
        (saddle, {"linf_clip_norm_y": 0.0}, "linf_clip_norm_y"),
        (saddle, {"num_draws": 0}, "num_draws"),
        (saddle, {"step_size_x": 0.1}, "step_size_y"),
        (saddle, {"step_size_x": 0.1, "step_size_y": -1.0}, "step_size_y"),
        (saddle, {"step_size_x": 40.0, "step_size_y": 0.1}, "step_size_x"),
        (saddle, {"output": "last"}, "output"),
        (saddle, {"sampler": "fast"}, "sampler"),
        (saddle, {"delta": 1.0}, "delta"),
        (saddle, {"center_gradients": 1}, "center_gradients"),
        (reduced, {"vertex_budget": 0}, "vertex_budget"),
        (reduced, {"max_level": 7}, "vertex_budget"),
        (reduced, {"num_examples": 20}, "num_examples"),
        (saddle, {"num_examples": 2**31}, "num_examples must be .* <= 2147483647"),
        (reduced, {"batch_alpha": 1e-4}, "num_examples"),
        (reduced, {"batch_alpha": 1e-300}, "alpha"),
        (reduced, {"budget": 0.1}, "batch_alpha"),
        (convex, {"refresh_every": 0}, "refresh_every"),
        (convex, {"linf_clip_norm": math.nan}, "linf_clip_norm"),
        (wolfe, {"sampling": sampling.TruncatedPoisson(sampling_prob=0.1)}, "sampling"),
        (wolfe, {"sampling": sampling.SinglePass(334)}, "num_steps"),
        (wolfe, {"num_examples": 2**22}, "sampling must read less"),
        (wolfe, {"linf_clip_norm": 0.0}, "linf_clip_norm"),
        (wolfe, {"inverse_temperature": -1.0}, "inverse_temperature"),
        (wolfe, {"inverse_temperature": 1e6}, "let a record move no score by more"),
        (synthetic, {"num_queries": 7}, "num_queries"),
        (synthetic, {"query_range": 0.0}, "query_range"),
        (synthetic, {"grid_bits": 17}, "grid_bits"),
        (synthetic, {"grid_bits": 16, "num_examples": 10**6}, "num_examples"),
    ],
)
def test_wrong_numbers_are_named(make: Any, changes: Any, named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        make(**changes)


def test_rows_beyond_the_grid_are_refused() -> None:
    plan = saddle(num_examples=2**24, num_steps=1, sampling=sampling.SinglePass(2**24))
    with pytest.raises(ValueError, match="num_steps"):
        plan.calibrate(epsilon=1.0, delta=1e-9)
