"""The plan of second-order points: what it charges, its grids, what it refuses."""

import dataclasses
import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest

import jaxdp
from jaxdp import accounting, plans, sampling
from jaxdp.accounting import RELATIONS

DELTA = 1e-6
#: As in the digest of the paper, at epsilon 2 and an accuracy of 0.03, in 10 dimensions.
NUMBERS: dict[str, Any] = {
    "num_examples": 200_000,
    "num_steps": 2000,
    "relation": "replace_one",
    "l2_clip_norm": 1.0,
    "smoothness": 10**-0.5,
    "refresh_batch_size": 8889,
    "difference_batch_rate": 32662.0,
    "drift_limit": 1.0,
    "max_differences": 2**10 - 1,
    "trigger_norm": 0.09,
    "escape_steps": 21,
    "escape_radius": 0.308007,
    "escape_noise_std": 3.86305e-3,
    "hessian_batch_size": 504,
    "hessian_clip_norm": 10**-0.5,
    "prefix_noise": "tree",
}
DENSE = {"dim": 10, "hessian_lipschitz": 10**-0.5}
MODES: dict[str, dict[str, Any]] = {
    "on_demand": {},
    "operator": {"hessian": "tracked", **DENSE},
    "frobenius": {"hessian": "tracked", "hessian_norm": "frobenius", **DENSE},
    "released": {
        "hessian": "released",
        "curvature_threshold": 0.1,
        "escape_steps": 1,
        **DENSE,
    },
    "filter": {"hessian_filter": True},
}


def make(**changes: Any) -> plans.SOSP:
    return plans.SOSP(**NUMBERS | changes)


def calibrated(epsilon: float = 2.0, **changes: Any) -> plans.SOSP:
    return make(**changes).calibrate(epsilon=epsilon, delta=DELTA)


def test_the_numbers_of_the_digest() -> None:
    plan = calibrated()
    assert plan.noise_multiplier == pytest.approx(1 / 0.448335, rel=1e-5)
    assert plan.refresh_noise_std == pytest.approx(5.0185e-4, rel=1e-4)
    # Each of ten levels has 1 / sqrt(10) of the whole.
    assert plan.node_std == pytest.approx(4.319e-4, rel=1e-3)
    assert plan.difference_noise_std == pytest.approx(math.sqrt(10) * plan.node_std)
    assert plan.escape_std == pytest.approx(3.86305e-3, rel=1e-2)
    assert calibrated(1.0).noise_multiplier == pytest.approx(4.22475, rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("noise", ["tree", "blt_3", "sqrt_toeplitz", "independent"])
def test_every_role_costs_at_most_the_target(
    mode: str, relation: str, noise: str
) -> None:
    """From the grids alone, which are what runs: the noise in units, over the worst move.

    One record moves a grid's sum by 2**bits units, or twice that if it is replaced.
    """
    few = {"max_differences": 100, "prefix_noise": noise, "relation": relation}
    plan = calibrated(**few | MODES[mode])
    moves = 2 if relation == "replace_one" else 1
    mu = accounting.gaussian_mu(float(plan.epsilon()), DELTA)
    assert plan.epsilon() == pytest.approx(2.0, rel=1e-6) and plan.epsilon() <= 2.0

    grid = plan.roles.refresh.grid
    assert moves * 2**grid.bits / grid.noise_std == pytest.approx(mu, rel=1e-4)
    assert grid.noise_std >= moves * 2**grid.bits / mu

    # The bound on a difference's record grows with the batch; the grid is of its mean.
    grid = plan.roles.difference.grid
    columns = np.linalg.norm(plan.correlation.strategy(), axis=0)
    least = moves * 2**grid.bits * columns.max() / mu
    assert least <= grid.noise_std <= least * (1 + 1e-4)

    bound, rows = plan.hessian_clip_norm, plan.hessian_batch_size
    radius = plan.escape_radius
    steps = plan.escape_steps or 0
    if mode in ("operator", "frobenius"):
        tracked = plan.roles.hessian.grid
        assert tracked.record_move == bound / rows
        std = tracked.noise_std * tracked.product_unit
        exact = moves * tracked.record_move * radius * math.sqrt(steps - 1)
        # More than exact products would need: float32's rounding is charged.
        assert exact / mu < std < 1.1 * max(exact / mu, plan.escape_noise_std)
        return
    move = moves * bound / rows
    if mode == "released":
        matrix = plan.roles.hessian.grid
        std = matrix.noise_std * bound / (2**matrix.bits * rows)
        assert std == pytest.approx(move / mu, rel=1e-4)
        assert std == pytest.approx(plan.escape_std, rel=1e-4)
        return
    for dim in (1, 10, 100_000):
        grid = plan.roles.hessian.grid(dim)
        assert 32 * grid.noise_std < 2**31
        std = grid.noise_std * bound * radius / (2**grid.bits * rows)
        assert std >= plan.escape_std
        # Sums are rounded to the grid: a unit a coordinate.
        unit = bound * radius * 2**-grid.bits / rows
        worst = move * radius + math.sqrt(dim) * unit
        assert move * grid.rounding == pytest.approx(math.sqrt(dim) * unit)
        if mode == "filter":
            assert std == pytest.approx(plan.escape_noise_std, rel=1e-4)
            # The budget is of squared lengths.
            spent = plan.roles.hessian.budget * (move / std) ** 2
            assert 0.99 * mu**2 < spent < mu**2
        else:
            assert std >= worst * math.sqrt(steps - 1) / mu


def test_the_least_noise_of_escapes_stays() -> None:
    plan = make(escape_noise_std=0.5)
    assert plan.with_noise(noise_multiplier=0.0).escape_std == 0.5
    assert plan.calibrate(epsilon=2.0, delta=DELTA).escape_std == 0.5


def test_more_steps_and_more_escapes_cost_noise_not_epsilon() -> None:
    short, long = (
        calibrated(escape_noise_std=1e-6),
        calibrated(escape_noise_std=1e-6, escape_steps=81),
    )
    assert long.noise_multiplier == short.noise_multiplier
    assert long.escape_std == pytest.approx(2 * short.escape_std)
    tracked = MODES["operator"] | {"escape_noise_std": 1e-6}
    once, four = calibrated(**tracked), calibrated(**tracked, escapes_per_refresh=4)
    assert four.escape_std == pytest.approx(2 * once.escape_std, rel=1e-3)
    assert once.escape_std > short.escape_std


@pytest.mark.parametrize(("dim", "rows"), [(2, 500), (2, 100_000), (100, 500)])
def test_products_of_running_hessians_have_noise_that_does_not_wrap(
    dim: int, rows: int
) -> None:
    """What is rounded in them is charged, and may be most of the noise."""
    for norm in ("operator", "frobenius"):
        changes = {"hessian_norm": norm, "dim": dim, "hessian_batch_size": rows}
        plan = make(**MODES["operator"] | changes).with_noise(noise_multiplier=40.0)
        grid = plan.roles.hessian.grid
        # Thirty-two deviations, and the products themselves, are less than 2**31 units.
        assert 2**8 < grid.noise_std <= 2**26
        assert grid.noise_std * grid.product_unit >= plan.escape_std


def test_passes_compose() -> None:
    two = calibrated(sampling=sampling.AdaptiveCursor(num_passes=2))
    assert two.noise_multiplier == pytest.approx(
        math.sqrt(2) * calibrated().noise_multiplier, rel=1e-9
    )


def test_the_event_is_one_gaussian_for_an_independent_accountant() -> None:
    """Default relation: the replace-one accountant would double the sensitivity again."""
    plan = calibrated(1.0)
    accountant = dp.pld.PLDAccountant(plan.event_relation).compose(plan.event)
    assert accountant.get_epsilon(DELTA) == pytest.approx(1.0, abs=2e-4)
    pitfall = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
    assert pitfall.compose(plan.event).get_epsilon(DELTA) == pytest.approx(
        2.1229, abs=1e-3
    )


def test_roles_by_an_independent_accountant() -> None:
    """Events of each role in full, as a tree and as products: none above the target."""
    plan = calibrated(1.0)
    tree = plan.node_std / plan.roles.difference.sensitivity
    one = 2 * plan.hessian_clip_norm * plan.escape_radius / plan.hessian_batch_size
    events = (
        dp.GaussianDpEvent(plan.refresh_noise_std / plan.roles.refresh.sensitivity),
        dp.SelfComposedDpEvent(dp.GaussianDpEvent(tree), 10),
        dp.SelfComposedDpEvent(dp.GaussianDpEvent(plan.escape_std / one), 20),
    )
    for event in events:
        spent = dp.pld.PLDAccountant().compose(event).get_epsilon(DELTA)
        assert spent <= 1 + 2e-4
        assert spent > 0.97


@pytest.mark.parametrize("mode", MODES)
def test_json_gives_the_plan_back(mode: str) -> None:
    plan = calibrated(**MODES[mode])
    again = plans.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    assert "noise_multiplier" in str(plan)


def test_uncalibrated_plans_run_nothing() -> None:
    plan = make()
    with pytest.raises(ValueError, match="calibrate"):
        plan.epsilon(delta=DELTA)
    for build in (jaxdp.sosp, jaxdp.private_spider):
        with pytest.raises(ValueError, match="calibrate"):
            build(plan, jaxdp.Keys.insecure(0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": sampling.FullBatch()}, "sampling"),
        ({"relation": "remove_one"}, "relation"),
        ({"smoothness": 0.0}, "smoothness"),
        ({"l2_clip_norm": math.inf}, "l2_clip_norm"),
        ({"refresh_batch_size": 200_001}, "refresh_batch_size"),
        ({"hessian_batch_size": 0}, "hessian_batch_size"),
        ({"difference_batch_rate": -1.0}, "difference_batch_rate"),
        ({"difference_batch_size": 0}, "difference_batch_size"),
        ({"max_differences": -1}, "max_differences"),
        ({"prefix_noise": "trees"}, "prefix_noise"),
        ({"escape_steps": 1}, "escape_steps"),
        ({"escape_noise_std": -1.0}, "escape_noise_std"),
        ({"hessian": "dense"}, "hessian"),
        ({"hessian_norm": "nuclear"}, "hessian_norm"),
        ({"hessian": "tracked"}, "dim"),
        ({"hessian": "tracked", "dim": 3}, "hessian_lipschitz"),
        ({"hessian": "released", **DENSE}, "curvature_threshold"),
        (MODES["released"] | {"escape_steps": 5}, "escape_steps"),
        (MODES["operator"] | {"hessian_filter": True}, "hessian_filter"),
        ({"num_examples": 2**29 + 1}, "num_examples"),
        # Clip and radius within float32, and their product or its square is not.
        (
            {"hessian_clip_norm": 1e30},
            r"clip_norm \* escape_radius must be in \[1e-18,",
        ),
        (
            MODES["operator"] | {"hessian_clip_norm": 1e20, "escape_radius": 1e9},
            r"clip_norm \* escape_radius must be in \[1e-18, 1e\+18\].*, got 1e\+29",
        ),
        (
            MODES["filter"] | {"hessian_clip_norm": 1e-20, "escape_radius": 3e19},
            r"escape_radius must be in \[1e-12, 1e\+12\]",
        ),
        (MODES["frobenius"] | {"escape_radius": 2e-19}, r"escape_radius must be in"),
        (
            MODES["operator"] | {"hessian_clip_norm": 1e-29, "escape_radius": 1e12},
            r"hessian_clip_norm / hessian_batch_size must be in \[1e-30, 1e\+30\]",
        ),
        # What float32 rounds would need more noise than it can hold.
        (
            MODES["operator"]
            | {"dim": 1000, "hessian_batch_size": 100_000, "noise_multiplier": 40.0},
            "noise_multiplier",
        ),
        (
            {
                "hessian_filter": True,
                "escape_noise_std": 1e-9,
                "noise_multiplier": 2.0,
            },
            "escape_noise_std or hessian_batch_size",
        ),
        (MODES["operator"] | {"num_examples": 9000}, "together"),
        ({"hessian_filter": 1}, "hessian_filter"),
        ({"escape_noise_std": 0.0, "noise_multiplier": 0.0}, "escape_noise_std"),
        (
            {
                "escape_noise_std": 0.0,
                "noise_multiplier": 1.0,
                "hessian_filter": True,
            },
            "escape_noise_std",
        ),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": 1e6}, "noise_multiplier"),
        # Too little for a lattice that is finer than the sums'.
        ({"noise_multiplier": 1e-4, "prefix_noise": "blt_3"}, "noise_multiplier"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_bad_numbers_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        make(**changes)


def test_without_escapes_any_radius_is_taken() -> None:
    make(escape_steps=None, hessian_clip_norm=1e-20, escape_radius=1e-15)


def test_cursors_serve_no_other_plan() -> None:
    with pytest.raises(TypeError, match="sampling"):
        plans.DPZero(
            num_examples=10,
            num_steps=1,
            sampling=sampling.AdaptiveCursor(),
            relation="replace_one",
            l2_clip_norm=1.0,
            smoothing_radius=1e-3,
        )


def test_without_differences_and_escapes_it_is_dp_sgd() -> None:
    plain = dataclasses.replace(calibrated(), max_differences=0, escape_steps=None)
    assert plain.refresh_noise_std == pytest.approx(
        (plain.noise_multiplier or 0) * plain.sensitivity / plain.refresh_batch_size
    )
    assert "escape_std" not in dict(plain.rows()) and plain.epsilon() <= 2.0
