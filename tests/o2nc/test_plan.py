"""The plans of correlated noise: what they charge, checked three ways; what they refuse."""

import dataclasses
import itertools
import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from jaxdp import accounting, plans, sampling
from jaxdp.accounting import lattice
from jaxdp.core.types import Phase
from jaxdp.kernels import prefix_noise
from jaxdp.mechanism import blt
from jaxdp.mechanism.design import noise_cost
from tests.kernels import test_prefix_noise


def make(period: int = 8, **changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": 10_000,
        "num_steps": 3 * period,
        "sampling": sampling.SinglePassRestarts(
            period=period, restart_batch_size=10, batch_size=2
        ),
        "relation": "replace_one",
        "restart_l2_clip_norm": 3.0,
        "l2_clip_norm": 0.5,
        "smoothing_radius": 0.5,
        "max_step": 0.1,
        "window": 4,
        "noise_multiplier": 2.0,
        "delta": 1e-5,
    }
    return plans.O2NC(**base | changes)


def summed(period: int = 8, **changes: Any) -> plans.PrefixSum:
    base: dict[str, Any] = {
        "num_examples": 64,
        "num_steps": 16,
        "sampling": sampling.SinglePass(batch_size=4),
        "relation": "replace_one",
        "l2_clip_norm": 0.5,
        "period": period,
        "noise_multiplier": 2.0,
        "delta": 1e-5,
    }
    return plans.PrefixSum(**base | changes)


def test_a_promise_that_says_nothing_is_said() -> None:
    """Every point has a gradient of at most L, the start too."""
    given: dict[str, Any] = {
        "dim": 11,
        "epsilon": 2.0,
        "delta": 1e-6,
        "relation": "replace_one",
        "lipschitz": 3.3,
        "initial_gap": 2.0,
        "smoothing_radius": 0.1,
    }
    with pytest.warns(UserWarning, match=r"says next to nothing: bound .* most 3\.3"):
        plan = plans.O2NC.certified(num_examples=2000, **given)
    assert plan.theorem is not None and plan.theorem.promise.bound > 0.9 * 3.3
    good = plans.O2NC.certified(num_examples=900_000, **given)
    assert good.theorem is not None and good.theorem.promise.bound < 0.9 * 3.3


# --- accounting, three ways ---


@pytest.mark.parametrize("name", prefix_noise.NAMES)
@pytest.mark.parametrize("period", [1, 2, 4, 7, 8])
def test_epsilon_three_ways(name: str, period: int) -> None:
    """The plan's; a dense Gaussian mechanism's, leaf by leaf; dp-accounting's PLD."""
    plan = make(period, prefix_noise=name)
    # Whatever one record does at one leaf, whitened: how far apart the outputs' means are.
    strategy = plan.correlation.strategy()
    mus = []
    for i in range(period):
        bound, rows = (3.0, 10) if i == 0 else (0.5, 2)
        moved = np.zeros(period)
        moved[i] = 2 * bound / rows
        covariance = plan.node_std**2 * np.linalg.inv(strategy.T @ strategy)
        mus.append(math.sqrt(moved @ np.linalg.solve(covariance, moved)))
    ours = plan.epsilon()
    exact = dp.get_epsilon_gaussian(1 / max(mus), 1e-5)
    assert ours == pytest.approx(exact, rel=1e-6)
    assert max(mus) == pytest.approx(1 / plan.noise_multiplier, rel=1e-9)
    accountant = PLDAccountant(plan.event_relation)
    accountant.compose(plan.event)
    assert accountant.get_epsilon(1e-5) == pytest.approx(ours, rel=1e-3)


def test_the_tree_is_that_of_dp_accounting() -> None:
    """sigma / s = 6 at T = 256: 2.1657 by RDP, 1.9931 exactly."""
    plan = make(
        256,
        sampling=sampling.SinglePassRestarts(
            period=256, restart_batch_size=1, batch_size=1
        ),
        restart_l2_clip_norm=0.5,
        prefix_noise="tree",
        num_steps=256,
        noise_multiplier=6 / 3,  # Leaf 1 is in nine nodes.
    )
    assert plan.sensitivity == pytest.approx(3 * 2 * 0.5)
    assert plan.node_std == pytest.approx(6.0)
    assert plan.epsilon(delta=1e-5) == pytest.approx(1.9931, abs=1e-4)
    relation = dp.NeighboringRelation.REPLACE_SPECIAL
    tree = dp.SingleEpochTreeAggregationDpEvent(6.0, 256)
    for event in (tree, dp.GaussianDpEvent(plan.noise_multiplier)):
        theirs = RdpAccountant(neighboring_relation=relation).compose(event)
        assert theirs.get_epsilon(1e-5) == pytest.approx(2.1657, abs=1e-4)


def test_the_relation_is_charged_once() -> None:
    """4 under replace-one is 4: dp-accounting's own doubling stays out of it."""
    plan = make(1, noise_multiplier=4.0)
    assert plan.epsilon(delta=1e-5) == pytest.approx(0.926, abs=1e-3)
    trap = PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
    trap.compose(dp.GaussianDpEvent(4.0))
    assert trap.get_epsilon(1e-5) == pytest.approx(1.993, abs=1e-3)
    halves = [make(relation=r).sensitivity for r in accounting.RELATIONS]
    by_relation = dict(zip(accounting.RELATIONS, halves, strict=True))
    assert by_relation["replace_one"] == 2 * by_relation["zero_out"]
    assert by_relation["add_or_remove"] == by_relation["zero_out"]


@pytest.mark.parametrize(
    ("period", "exact"),
    [(2, 3.731), (4, 5.276), (16, 7.461), (256, 10.552), (4096, 12.923)],
)
def test_noise_of_the_papers_batches(period: int, exact: float) -> None:
    """B1 = T + 1, epsilon = 1: the digest's sigma / s_2, in which leaf 1 is free."""
    plan = make(
        period,
        num_examples=20_000,
        num_steps=period,
        window=2,
        sampling=sampling.SinglePassRestarts(
            period=period, restart_batch_size=period + 1, batch_size=1
        ),
        restart_l2_clip_norm=8.0,
        l2_clip_norm=2 * 8.0 / period,
        prefix_noise="tree",
        noise_multiplier=None,
    ).calibrate(epsilon=1.0, delta=1e-5)
    move = 2 * plan.l2_clip_norm
    assert plan.node_std / move == pytest.approx(exact, abs=2e-3)
    levels = period.bit_length() - 1
    assert plan.sensitivity == pytest.approx(move * math.sqrt(levels))


def test_the_first_leaf_is_charged_where_it_is_the_worst() -> None:
    small = sampling.SinglePassRestarts(period=8, restart_batch_size=1, batch_size=2)
    plan = make(sampling=small, prefix_noise="tree")
    assert plan.sensitivity == pytest.approx(2 * 3.0 * math.sqrt(4))
    np.testing.assert_allclose(plan.leaf_sensitivities, [6.0] + 7 * [0.5])


def test_noise_std_is_that_of_the_worst_sum() -> None:
    plan = make(prefix_noise="tree")
    assert plan.noise_std == pytest.approx(math.sqrt(3) * plan.node_std)  # Step 7.
    inverse = np.linalg.inv(plan.correlation.strategy())
    sums = np.tril(np.ones((8, 8))) @ inverse
    for name in prefix_noise.NAMES:
        plan = make(prefix_noise=name)
        inverse = np.linalg.inv(plan.correlation.strategy())
        sums = np.tril(np.ones((8, 8))) @ inverse
        worst = np.linalg.norm(sums, axis=1).max()
        assert plan.noise_std == pytest.approx(worst * plan.node_std)


# --- the grid ---


@pytest.mark.parametrize("noise", [0.0, 0.5, 50.0])
def test_sums_and_noise_fit_the_grid(noise: float) -> None:
    plan, units = make(noise_multiplier=noise), set()
    for phase, (bound, rows) in plan.clips.items():
        grid = plan.grid(phase)
        assert grid.bits is not None and 8 <= grid.bits <= 16
        assert grid.limit is not None
        record = grid.limit * 2**grid.shift  # In units of the noise.
        most = grid.noise_std * plan.correlation.increment_norms().max()
        assert rows * record + 8 * most < 2**31
        # The clip of the grid is below the plan's, by less than a unit of records, and what
        # the noise has to hide is not more than the plan's sensitivity says.
        assert bound * (1 - 2.0**-7) < grid.l2_clip_norm <= bound * (1 + 1e-9)
        unit = grid.l2_clip_norm / record / rows
        assert grid.noise_unit == pytest.approx(unit, rel=1e-12)
        units.add(float(f"{grid.noise_unit:.9g}"))
        assert grid.noise_std * unit >= plan.node_std
        assert grid.noise_std - plan.node_std / unit < 1 + 6e-6 * grid.noise_std
    assert len(units) == 1  # Of noise that goes through all phases.
    if noise == 0:
        assert plan.grid_noise_std == 0


def test_too_much_noise_for_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="noise_multiplier must be such that"):
        make(noise_multiplier=1e6)


# --- structure ---


def test_phases_and_steps() -> None:
    plan = make(8)
    assert plan.phases == (Phase("restart", 1, 10), Phase("difference", 7, 2))
    assert make(1).phases == (Phase("restart", 1, 10),)
    assert plan.sampling.records_per_period == 24
    assert plan.sampling.max_steps(48) == 16
    assert plan.sampling.max_steps(48 + 9) == 16
    assert plan.sampling.max_steps(48 + 13) == 18
    with pytest.raises(ValueError, match="num_steps must be an integer >= 1 and <= 18"):
        make(num_examples=61, num_steps=19)


@pytest.mark.parametrize(
    "plan",
    [make(), make(noise_multiplier=None, learning_rate=0.1, skip_last_query=True)],
)
def test_json(plan: plans.O2NC) -> None:
    again = plans.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    assert "node_std" in str(make())


def test_windows() -> None:
    assert make(num_steps=24, window=5).num_windows == 4
    assert make(num_steps=24, window=5, skip_last_query=True).num_windows == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": sampling.FullBatch()}, "sampling must be a SinglePassRestarts"),
        ({"restart_l2_clip_norm": 0.0}, "restart_l2_clip_norm must be a number > 0"),
        ({"restart_l2_clip_norm": math.inf}, "restart_l2_clip_norm must be finite if"),
        ({"restart_l2_clip_norm": 1e40}, r"restart_l2_clip_norm must be in \[1e-30"),
        ({"l2_clip_norm": math.inf}, "if and only if l2_clip_norm is"),
        ({"smoothing_radius": 0.0}, "smoothing_radius must be a number > 0"),
        ({"max_step": -1.0}, "max_step must be a number > 0"),
        ({"window": 1}, "window must be an integer >= 2, got 1"),
        ({"window": 2.5}, "window must be an integer"),
        ({"direction": "gaussian"}, "direction must be one of 'orthonormal', 'sphere'"),
        ({"num_directions": 65}, "num_directions must be an integer >= 1 and <= 64"),
        ({"difference": "forward"}, "difference must be one of 'antithetic'"),
        ({"prefix_noise": "forest"}, "prefix_noise must be one of 'tree'"),
        ({"learning_rate": 0.0}, "learning_rate must be a number > 0"),
        ({"reset": False, "skip_last_query": True}, "skip_last_query must be False"),
        ({"share_directions": 1}, "share_directions must be a bool"),
    ],
)
def test_wrong_numbers_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(**changes)


def test_without_reset_a_window_may_be_one_step() -> None:
    assert make(reset=False, window=1).num_windows == 24


# --- theorems and the certified design, as plans ---

PROBLEM: dict[str, Any] = {
    "num_examples": 51_200,
    "dim": 8,
    "epsilon": 8.0,
    "delta": 1e-5,
    "relation": "replace_one",
    "lipschitz": 1.5,
    "initial_gap": math.sqrt(8),
    "smoothing_radius": 0.5,
}


@pytest.mark.parametrize("theorem", ["4.9", "3.1", "certified"])
def test_plans_of_theorems(theorem: str) -> None:
    if theorem == "certified":
        plan = plans.O2NC.certified(**PROBLEM)
    else:
        plan = plans.O2NC.from_theorem(theorem, **PROBLEM)
    found = plan.theorem
    assert found is not None and found.name == theorem
    assert plan.epsilon() <= 8.0 and plan.epsilon() == pytest.approx(8.0, rel=1e-6)
    assert found.promise.goldstein_radius == 1.0
    # The bound is about the noise that the plan adds.
    energy = plan.noise_std**2 * 8
    assert found.promise.noise_variance == pytest.approx(energy, rel=1e-5)
    assert plans.from_json(plan.to_json()) == plan
    assert f"{found.promise.bound:.4g}" in str(plan)
    assert plan.num_windows * plan.window == plan.num_steps


@pytest.mark.parametrize("theorem", ["4.9", "3.1"])
def test_designs_of_many_records_are_kept(theorem: str) -> None:
    """The noise sampler's error is more there, for a record moves more units."""
    constants = PROBLEM | {"num_examples": 100_000, "epsilon": 1.0, "delta": 1e-6}
    assert plans.O2NC.from_theorem(theorem, **constants).theorem is not None


def test_a_promise_is_of_no_less_noise_than_the_plan_s() -> None:
    """At such a budget the noise sampler's error costs a fifth of the noise."""
    constants = PROBLEM | {"num_examples": 100_000, "epsilon": 36.0, "delta": 1e-9}
    plan = plans.O2NC.certified(**constants)
    assert noise_cost(plan) > 1.1
    assert plan.theorem is not None
    promised = plan.theorem.promise.noise_variance
    assert 0.9 * promised < PROBLEM["dim"] * plan.noise_std**2 <= promised * (1 + 1e-6)
    again = plan.with_noise(noise_multiplier=1.05 * (plan.noise_multiplier or 0))
    assert again.theorem is None


def test_certified_beats_the_theorems() -> None:
    certified = plans.O2NC.certified(**PROBLEM).theorem
    others = [plans.O2NC.from_theorem(t, **PROBLEM).theorem for t in ("4.9", "3.1")]
    assert certified is not None
    for other in others:
        assert other is not None and certified.promise.bound < other.promise.bound / 2


def test_a_promise_ends_with_what_it_is_about() -> None:
    plan = plans.O2NC.certified(**PROBLEM)
    assert dataclasses.replace(plan, learning_rate=1.0).theorem is None
    assert dataclasses.replace(plan, window=7).theorem is None
    noise = plan.noise_multiplier
    assert noise is not None
    assert plan.with_noise(noise_multiplier=2 * noise).theorem is None
    assert plan.with_noise(noise_multiplier=noise / 2).theorem is not None
    assert plan.calibrate(epsilon=9.0, delta=1e-5).theorem is not None
    assert plan.calibrate(epsilon=7.0, delta=1e-5).theorem is None


def test_numbers_of_ones_own_for_buffered_noise() -> None:
    numbers = plans.BLTNumbers((0.9, 0.5), (0.2, 0.25))
    plan = make(prefix_noise="blt_2", blt_numbers=numbers)
    shipped = make(prefix_noise="blt_2")
    assert plan.epsilon() == shipped.epsilon()
    assert plan.sensitivity != shipped.sensitivity
    column = plan.correlation.strategy()[:, 0]
    decay = [0.2 * 0.9**i + 0.25 * 0.5**i for i in range(7)]
    np.testing.assert_allclose(column, [1, *decay], rtol=1e-6)
    assert plans.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="as many buffers as prefix_noise = 'blt_3'"):
        make(blt_numbers=numbers)


def test_noise_that_is_optimised_for_the_period() -> None:
    pytest.importorskip("jax_privacy")
    shipped = make(24, prefix_noise="blt_2", num_steps=48)
    plan = shipped.with_optimised_noise(2)
    assert plan.epsilon() == shipped.epsilon()
    assert plan.noise_std < shipped.noise_std * 1.001
    assert plans.from_json(plan.to_json()) == plan


def test_derived_numbers_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        make().leaf_sensitivities[:] = 0


def test_the_radius_of_the_output() -> None:
    plan = make(window=8, reset=False, max_step=0.1, smoothing_radius=0.5)
    assert plan.goldstein_radius == pytest.approx(0.5 + 0.4375)
    assert plans.O2NC.certified(**PROBLEM).goldstein_radius == pytest.approx(1.0)


def test_unknown_theorems_are_refused() -> None:
    with pytest.raises(ValueError, match=r"theorem must be one of '4\.9', '3\.1'"):
        plans.O2NC.from_theorem("4.8", **PROBLEM)


# --- private prefix sums ---


def test_one_pass_costs_what_one_release_costs() -> None:
    plan = summed()
    spent, missed = lattice.sampler_error(plan.event)
    assert 0 < spent < 1e-6
    left = (1e-5 - missed) * math.exp(-spent)
    ideal = dp.get_epsilon_gaussian(2.0, left)
    assert plan.epsilon() == pytest.approx(ideal + spent, rel=1e-9)
    plan = summed(prefix_noise="tree")
    assert plan.noise_period == 8
    assert plan.sensitivity == pytest.approx(2 * 0.5 / 4 * 2)
    assert summed(prefix_noise="tree", period=None).noise_period == 16


def cyclic(**changes: Any) -> plans.PrefixSum:
    """Three passes of six steps, of which the last lacks two; four records are left."""
    given = {"period": None, "sampling": sampling.CyclicEpochs(10), "num_steps": 16}
    return summed(**given | changes)


@pytest.mark.parametrize("name", prefix_noise.REPEATABLE)
@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove"])
def test_passes_of_one_order_are_one_release(name: str, relation: Any) -> None:
    """The sensitivity is the worst over places and signs, by the matrix itself."""
    plan = cyclic(prefix_noise=name, relation=relation)
    assert plan.noise_period == 16 and plan.num_passes == 3
    share = (2 if relation == "replace_one" else 1) * 0.5 / 10
    matrix = plan.correlation.strategy()
    assert (matrix >= 0).all()
    longest = max(
        float(np.linalg.norm(matrix[:, place::6] @ np.array(signs)))
        for place in range(6)
        for signs in itertools.product((-1, 1), repeat=len(range(place, 16, 6)))
    )
    assert plan.sensitivity == pytest.approx(share * longest, rel=1e-9)
    assert plan.node_std == pytest.approx(2 * plan.sensitivity)
    spent, missed = lattice.sampler_error(plan.event)
    left = (1e-5 - missed) * math.exp(-spent)
    ideal = dp.get_epsilon_gaussian(2.0, left)
    assert plan.epsilon() == pytest.approx(ideal + spent, rel=1e-9)
    assert plan.spent(3) == pytest.approx(plan.epsilon(), rel=1e-6)
    assert plans.from_json(plan.to_json()) == plan


def test_passes_of_one_order_have_less_noise() -> None:
    budget: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}
    restarted = cyclic(sampling=sampling.ShuffledEpochs(10), num_steps=60)
    whole = cyclic(num_steps=60).calibrate(**budget)
    restarted = restarted.calibrate(**budget)
    # Noise of ten passes adds up in the sum of a whole run.
    assert whole.noise_std < 0.85 * math.sqrt(10) * restarted.noise_std
    independent = cyclic(num_steps=60, prefix_noise="independent").calibrate(**budget)
    assert whole.noise_std < 0.6 * independent.noise_std


def test_passes_of_one_order_refuse() -> None:
    with pytest.raises(ValueError, match="prefix_noise must be one of 'sqrt_toepl"):
        cyclic(prefix_noise="tree")
    with pytest.raises(ValueError, match="period must be None with sampling"):
        cyclic(period=4)
    with pytest.raises(ValueError, match="vary must be 'noise_multiplier'"):
        cyclic().calibrate(epsilon=1.0, delta=1e-5, vary="num_steps")
    kernel = prefix_noise.make("tree", 4)
    with pytest.raises(ValueError, match="where a period reads a record again, got St"):
        prefix_noise.sensitivity(kernel, np.ones(4), separation=2)


def sampled(**changes: Any) -> plans.PrefixSum:
    """Steps that sample one of six groups of ten records."""
    given = {
        "sampling": sampling.CyclicPoisson(num_groups=6, sampling_prob=0.5),
        "prefix_noise": "sqrt_toeplitz",
    }
    return cyclic(**given | changes)


#: Nothing like the square root, and of as many numbers as there are steps in a pass.
OWN: dict[str, Any] = {
    "prefix_noise": "toeplitz",
    "coefficients": (1.0, 0.9, 0.9, 0.7, 0.2, 0.1),
}


@pytest.mark.parametrize(
    "changes", [{}, {"bands": 6}, {"bands": 4}, {"bands": 1}, OWN], ids=str
)
@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_bands_that_are_sampled_cost_what_independent_noise_costs(
    changes: Any, relation: Any
) -> None:
    plan = sampled(**changes, relation=relation)
    assert plan.noise_period == 16 and plan.num_passes == 3
    # No row of C holds two of a record's steps.
    matrix = plan.correlation.strategy()
    for place in range(6):
        assert (np.count_nonzero(matrix[:, place::6], axis=1) <= 1).all()
    # One record in one step, over the expected size of a batch.
    share = (2 if relation == "replace_one" else 1) * 0.5 / 5
    longest = float(np.linalg.norm(matrix, axis=0).max())
    assert plan.sensitivity == pytest.approx(share * longest, rel=1e-9)
    assert plan.node_std == pytest.approx(2 * plan.sensitivity)
    alone = plans.DPGD(
        num_examples=10,
        num_steps=3,
        sampling=sampling.TruncatedPoisson(sampling_prob=0.5),
        relation=relation,
        l2_clip_norm=0.5,
        noise_multiplier=2.0,
        delta=1e-5,
    )
    assert plan.epsilon() == pytest.approx(alone.epsilon(), rel=1e-6)
    assert plan.spent(6) < plan.spent(7) < plan.epsilon()
    assert plans.from_json(plan.to_json()) == plan
    assert "means of 5 records, correlated over" in plan.describe().noise


def test_sampled_bands_have_less_noise_than_sampled_releases() -> None:
    """In the sum of a run, at one budget; and amplification is no loss beside epochs."""
    budget: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}
    given: dict[str, Any] = {"num_examples": 6000, "num_steps": 200}
    sampler = sampling.CyclicPoisson(num_groups=10, sampling_prob=0.25)
    bands = sampled(**given, sampling=sampler).calibrate(**budget)
    plain = sampled(**given, sampling=sampler, prefix_noise="independent")
    assert bands.noise_std < 0.8 * plain.calibrate(**budget).noise_std


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove"])
@pytest.mark.parametrize("column", [OWN["coefficients"], (1.0, 0.8, 0.3), (1.0,)])
def test_no_record_moves_the_prefix_sums_by_more_than_is_charged(
    column: tuple[float, ...], relation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mu by the covariance of the prefix sums that the kernel releases, over all inputs.

    The record is in any steps that are six or more apart, and moves each either way: mu is
    no more than the plan charges, and that much where its steps and signs are the worst.
    """
    plan = cyclic(**OWN | {"coefficients": column, "relation": relation})
    made = test_prefix_noise.linear_map(plan.correlation, monkeypatch)
    sums = np.tri(16) @ made * plan.node_std  # Noise of the sums, of draws of std 1.
    covariance = sums @ sums.T
    share = (2 if relation == "replace_one" else 1) * 0.5 / 10
    apart = [
        steps
        for count in (1, 2, 3)
        for steps in itertools.combinations(range(16), count)
        if all(b - a >= 6 for a, b in itertools.pairwise(steps))
    ]
    moved = [
        np.eye(16)[list(steps)].T @ np.array(signs)
        for steps in apart
        for signs in itertools.product((-1, 1), repeat=len(steps))
    ]
    shift = np.tri(16) @ np.array(moved).T * share
    mu = np.sqrt(np.sum(shift * np.linalg.solve(covariance, shift), axis=0)).max()
    assert mu == pytest.approx(1 / plan.noise_multiplier, rel=1e-9)


def test_bands_of_a_stored_plan() -> None:
    """They are in its text, digit by digit; a text without has those of the root."""
    root = sampled(bands=4)
    plan = root.with_optimised_bands()
    assert plan.coefficients is not None and len(plan.coefficients) == 4
    read = plans.from_json(plan.to_json())
    assert read == plan and read.digest == plan.digest != root.digest
    assert read.correlation == plan.correlation
    used = plan.correlation.coefficients()
    np.testing.assert_allclose(used[:4], plan.coefficients, atol=2.0**-33)
    assert "coefficients" not in root.to_json()
    assert plan.epsilon() == root.epsilon()
    assert plan.noise_std < root.noise_std
    assert "over 4 steps (toeplitz)" in plan.describe().noise
    # Its own bands, those that are asked for, or those of a pass.
    assert plan.with_optimised_bands() == plan
    for bands, changes in ((3, {"bands": 3}), (6, {})):
        found = sampled().with_optimised_bands(**changes).coefficients
        assert found is not None and len(found) == bands
    back = dataclasses.replace(
        plan, prefix_noise="sqrt_toeplitz", coefficients=None, bands=4
    )
    assert back == root


def test_coefficients_refuse() -> None:
    for column in ((1.0, -0.5), (0.5, 0.25), (1.0, 0.5, 0.75), ()):
        with pytest.raises(ValueError, match="coefficients must fall from 1"):
            sampled(**OWN | {"coefficients": column})
    with pytest.raises(ValueError, match="coefficients must be at most 6 numbers"):
        sampled(**OWN | {"coefficients": (1.0,) * 7})
    assert cyclic(**OWN | {"coefficients": (1.0,) * 7}).sensitivity > 0
    for changes in ({"coefficients": (1.0, 0.5)}, {"prefix_noise": "toeplitz"}):
        with pytest.raises(
            ValueError, match="coefficients must be given with prefix_n"
        ):
            cyclic(**changes)
    with pytest.raises(ValueError, match="only 'sqrt_toeplitz' has bands"):
        sampled(**OWN, bands=2)
    with pytest.raises(ValueError, match="blt_numbers must have as many buffers"):
        cyclic(**OWN, blt_numbers=plans.BLTNumbers((0.5,), (0.5,)))
    for plan in (sampled(), cyclic()):
        most = getattr(plan.sums, "separation", None) or 6
        with pytest.raises(ValueError, match=f"bands must be an integer .* <= {most}"):
            plan.with_optimised_bands(most + 1)
    wide = cyclic(prefix_noise="sqrt_toeplitz", bands=20)
    assert wide.with_optimised_bands().noise_std < wide.noise_std
    for column in ("10", (1.0, None), ((1.0,),), (True, False), 1.0, np.eye(2)):
        with pytest.raises(TypeError, match="coefficients must be a list or tuple of"):
            sampled(**OWN | {"coefficients": column})
    zeros = [sampled(**OWN | {"coefficients": (1.0, zero)}) for zero in (0.0, -0.0)]
    assert zeros[0].digest == zeros[1].digest


def test_sampled_bands_refuse() -> None:
    with pytest.raises(ValueError, match="bands must be an integer >= 1 and <= 6"):
        sampled(bands=7)
    for name in ("blt_3", "tree"):
        with pytest.raises(ValueError, match="prefix_noise must be one of 'sqrt_toep"):
            sampled(prefix_noise=name)
    with pytest.raises(ValueError, match="period must be None with sampling"):
        sampled(period=4)
    with pytest.raises(ValueError, match="only 'sqrt_toeplitz' has bands"):
        summed(bands=2)


@pytest.mark.parametrize("changes", [{}, {"prefix_noise": "independent"}, {"bands": 2}])
def test_noise_of_sampled_groups_is_not_optimised(
    changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by the plan's own words, before half a minute has passed."""

    def never(*given: Any) -> Any:
        raise AssertionError("it was optimised")

    monkeypatch.setattr(blt, "optimise_blt", never)
    with pytest.raises(ValueError, match=r"prefix_noise must be one of .*got 'blt_3'"):
        sampled(**changes).with_optimised_noise()


def test_bands_of_passes() -> None:
    """Of one order: the sensitivity is that of a cut matrix, and the memory is less."""
    plan = cyclic(prefix_noise="sqrt_toeplitz", bands=3)
    matrix = plan.correlation.strategy()
    assert np.count_nonzero(matrix[:, 0]) == 3
    longest = np.linalg.norm(matrix[:, ::6].sum(axis=1))
    assert plan.sensitivity == pytest.approx(2 * 0.5 / 10 * longest, rel=1e-9)


def test_noise_that_is_optimised_for_passes() -> None:
    pytest.importorskip("jax_privacy")
    shipped = cyclic(num_steps=60)
    plan = shipped.with_optimised_noise(3)
    assert plan.epsilon() == shipped.epsilon()
    assert plan.noise_std < shipped.noise_std
    assert plan.blt_numbers != summed(60, num_steps=16).with_optimised_noise(3)


def test_passes_are_charged_and_restart() -> None:
    epochs = sampling.ShuffledEpochs(batch_size=10)  # Six steps, four records left.
    plan = summed(sampling=epochs, num_steps=15, period=4, prefix_noise="tree")
    assert plan.steps_per_pass == 6 and plan.num_passes == 3
    mu = math.sqrt(3) / plan.noise_multiplier
    spent, missed = lattice.sampler_error(plan.event)
    assert 0 < spent < 1e-6
    left = (1e-5 - missed) * math.exp(-spent)
    ideal = dp.get_epsilon_gaussian(1 / mu, left)
    assert plan.epsilon() == pytest.approx(ideal + spent, rel=1e-9)
    # A period never runs over the end of a pass.
    assert dataclasses.replace(plan, period=50).noise_period == 6
    with pytest.raises(TypeError, match="sampling must be a SinglePass or ShuffledEp"):
        summed(sampling=sampling.FullBatch())
    with pytest.raises(ValueError, match="period must be an integer >= 1"):
        summed(period=0)
