"""Several passes: how the noise is divided, what it costs, and what a plan refuses."""

import dataclasses
import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from jaxdp import accounting, plans, sampling
from jaxdp.accounting import lattice
from jaxdp.accounting.gaussian import gaussian_epsilon

N, STEPS, PERIOD = 1000, 22, 4


def make(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": STEPS,
        "sampling": sampling.MultiPassRestarts(period=PERIOD),
        "relation": "replace_one",
        "restart_l2_clip_norm": 2.0,
        "l2_clip_norm": 0.5,
        "smoothing_radius": 0.5,
        "max_step": 0.1,
        "window": 4,
        "num_directions": 2,
        "prefix_noise": "independent",
        "noise_multiplier": 1.5,
    }
    return plans.O2NC(**base | changes)


def counts(plan: plans.O2NC) -> tuple[int, int]:
    restarts = math.ceil(plan.num_steps / plan.sampling.period)
    return restarts, plan.num_steps - restarts


@pytest.mark.parametrize("relation", accounting.RELATIONS)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_noise_costs_what_its_multiplier_says(relation: Any, scaled: bool) -> None:
    plan = make(relation=relation, scale_with_movement=scaled)
    one, two = (
        accounting.sensitivity(relation, c) / N
        for c in (plan.restart_l2_clip_norm, plan.l2_clip_norm)
    )
    first, rest = counts(plan)
    cost = first * (one / plan.step_std("restart")) ** 2
    # In units of its own clip a step that moved less is noised alike.
    cost += rest * (two / plan.step_std("difference")) ** 2
    assert math.sqrt(cost) == pytest.approx(1 / 1.5, rel=1e-12)
    spent = plan.epsilon(delta=1e-5)
    charge, missed = lattice.sampler_error(plan.event)
    assert 0 < charge < 1e-6 and missed < 1e-12
    ideal = gaussian_epsilon(1 / 1.5, (1e-5 - missed) * math.exp(-charge))
    assert spent == pytest.approx(ideal + charge, rel=1e-12)
    assert spent.accountant == "Gaussian closed form"
    theirs = PLDAccountant(plan.event_relation).compose(plan.event).get_epsilon(1e-5)
    assert theirs == pytest.approx(spent, rel=2e-3)


@pytest.mark.parametrize("scaled", [False, True])
def test_no_other_division_of_the_noise_is_better(scaled: bool) -> None:
    plan = make(scale_with_movement=scaled)
    share = 7 / 24 if scaled else 1.0
    first, rest = counts(plan)
    one, two = plan.leaf_sensitivities[0], plan.leaf_sensitivities[1]

    def worst(fraction: float) -> float:
        """Variance at the end of a period, restarts having a fraction of the budget."""
        variance = first * one**2 / fraction
        return variance + (PERIOD - 1) * share * rest * two**2 / (1 - fraction)

    best = min(worst(f) for f in np.linspace(0.001, 0.999, 999))
    ours = (plan.noise_std / 1.5) ** 2
    assert ours <= best * (1 + 1e-12)
    assert ours == pytest.approx(best, rel=1e-4)
    assert plan.noise_std == pytest.approx(1.5 * plan.sensitivity)
    ends = plan.step_std("restart") ** 2
    ends += (PERIOD - 1) * share * plan.step_std("difference") ** 2
    assert plan.noise_std == pytest.approx(math.sqrt(ends))


def test_calibration_reaches_the_budget() -> None:
    plan = make(noise_multiplier=None).calibrate(epsilon=2.0, delta=1e-6)
    assert plan.epsilon() == pytest.approx(2.0, rel=1e-9)
    restarts = make(sampling=sampling.MultiPassRestarts(period=1), num_steps=16)
    assert restarts.noise_std == pytest.approx(1.5 * math.sqrt(16) * 2 * 2.0 / N)
    assert [p.name for p in restarts.phases] == ["restart"]


def test_a_run_shorter_than_its_period_is_one_period() -> None:
    whole, longer = (
        make(num_steps=3, window=3, sampling=sampling.MultiPassRestarts(period=period))
        for period in (3, 100)
    )
    assert longer.sensitivity == pytest.approx(whole.sensitivity, rel=1e-12)
    for phase in ("restart", "difference"):
        assert longer.step_std(phase) == pytest.approx(whole.step_std(phase), rel=1e-12)
    assert longer.epsilon(delta=1e-5) == pytest.approx(whole.epsilon(delta=1e-5))


def test_practical_clips_keep_the_guarantee() -> None:
    plan = make(noise_multiplier=None).calibrate(epsilon=2.0, delta=1e-6)
    other = plan.with_practical_clips(dim=10, lipschitz=1.0)
    assert other.l2_clip_norm != plan.l2_clip_norm
    assert other.epsilon() == pytest.approx(2.0, rel=1e-9)
    # Of samples it depends on the ratio of the clips.
    sampled = make(
        num_examples=2000,
        sampling=dataclasses.replace(SAMPLED, period=3, sampling_prob=0.02),
        relation="zero_out",
        restart_l2_clip_norm=10.0,
        l2_clip_norm=0.1,
        smoothing_radius=0.1,
        max_step=0.05,
        noise_multiplier=4.0,
        delta=1e-6,
    )
    with pytest.raises(ValueError, match=r"noise_multiplier must be None or 0 .* 4\.0"):
        sampled.with_practical_clips(dim=10, lipschitz=1.0)
    bare = dataclasses.replace(sampled, noise_multiplier=None)
    other = bare.with_practical_clips(dim=10, lipschitz=1.0)
    kept = dataclasses.replace(other, noise_multiplier=4.0).epsilon()
    assert kept > 2 * sampled.epsilon()


SAMPLED: Any = sampling.MultiPassRestarts(
    period=PERIOD, restart_sampling_prob=0.3, sampling_prob=0.05
)


@pytest.mark.parametrize(
    ("relation", "noise", "excess"),
    [("replace_one", 4.0, 1.01), ("zero_out", 8.0, 1.15)],
)
def test_samples_of_the_same_noise_cost_a_little_more(
    relation: Any, noise: float, excess: float
) -> None:
    """A record that is drawn weighs 1/q as much: what is saved is time."""
    given: dict[str, Any] = {"relation": relation, "noise_multiplier": noise}
    whole, plan = make(**given), make(**given, sampling=SAMPLED)
    assert plan.noise_std == pytest.approx(whole.noise_std)
    spent = plan.epsilon(delta=1e-5)
    assert spent.accountant == "PLD"
    assert 1 < spent / whole.epsilon(delta=1e-5) < excess
    assert [p.batch_size for p in plan.phases] == [408, 96]
    # Sums are divided by what is expected, whatever is drawn.
    assert [plan.grid(p.name).normalizer for p in plan.phases] == [300.0, 50.0]


def test_the_event_of_samples_is_that_of_each_step() -> None:
    """By hand: std over C of a step's sum, under the relation that doubles it."""
    plan = make(sampling=dataclasses.replace(SAMPLED, restart_sampling_prob=None))
    first, rest = counts(plan)
    whole = plan.step_std("restart") * N / plan.restart_l2_clip_norm
    part = plan.step_std("difference") * 50 / plan.l2_clip_norm
    relation = dp.NeighboringRelation.REPLACE_ONE
    accountant = PLDAccountant(relation)
    accountant.compose(dp.GaussianDpEvent(whole), first)
    accountant.compose(dp.TruncatedSubsampledGaussianDpEvent(N, 0.05, 96, part), rest)
    want = accountant.get_epsilon(1e-5)
    assert plan.event_relation == relation
    assert plan.epsilon(delta=1e-5) == pytest.approx(want, rel=1e-3)
    # The restarts alone, in closed form: less than the whole, and most of it.
    mu = math.sqrt(first) * 2 / whole
    assert gaussian_epsilon(mu, 1e-5) < want


def test_events_that_compose_are_of_one_relation() -> None:
    whole = accounting.full_batch_gaussian(3.0, 4, "replace_one")
    among = accounting.full_batch_gaussian(3.0, 4, "replace_one", among_sampled=True)
    both = accounting.epsilon(*accounting.composed([among, among]), 1e-5)
    twice = accounting.epsilon(*accounting.composed([whole, whole]), 1e-5)
    exact = gaussian_epsilon(math.sqrt(8) / 3, 1e-5)
    assert twice == pytest.approx(exact, rel=1e-12)
    assert both == pytest.approx(exact, rel=2e-3)
    with pytest.raises(ValueError, match="guarantees must be of one relation, got"):
        accounting.composed([whole, among])
    with pytest.raises(
        ValueError, match=r"guarantees must be of one relation, got \[\]"
    ):
        accounting.composed([])


def test_a_plan_is_read_back() -> None:
    for plan in (make(), make(sampling=SAMPLED), make(oracle="first_order", **BALL)):
        assert plans.from_json(plan.to_json()) == plan
        assert plan.digest == plans.from_json(plan.to_json()).digest
    assert "restart_std" in str(make())


BALL: dict[str, Any] = {"direction": "ball", "difference": "common"}
SCALAR: dict[str, Any] = {
    "oracle": "scalar",
    "share_directions": True,
    "sampling": sampling.SinglePassRestarts(period=1, restart_batch_size=20),
    "prefix_noise": "blt_3",
}


def test_a_scalar_release_is_noised_by_number_not_by_coordinate() -> None:
    plan = make(**SCALAR, num_directions=4)
    node = 1.5 * 2 * 2.0 / 20
    assert plan.node_std == pytest.approx(node)
    # d coordinates of the estimate have node^2 d / m together.
    assert plan.noise_std == pytest.approx(node / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"oracle": "second_order"}, "oracle must be one of"),
        ({"direction": "ball"}, "direction must be one of 'orthonormal', 'sphere'"),
        ({"oracle": "first_order"}, "direction must be one of 'ball'"),
        (
            {"oracle": "first_order", "direction": "ball"},
            "difference must be one of 'common', 'independent'",
        ),
        ({"difference": "common"}, "difference must be one of 'antithetic'"),
        (
            {"oracle": "first_order", **BALL, "share_directions": True},
            r"share_directions must be False with oracle='first_order', got True",
        ),
        (
            SCALAR | {"share_directions": False},
            r"share_directions must be True with oracle='scalar', got False",
        ),
        (
            {"oracle": "scalar", "share_directions": True},
            r"sampling.period must be 1 with oracle='scalar', got 4",
        ),
        ({"prefix_noise": "blt_3"}, "prefix_noise must be 'independent' with"),
        (
            SCALAR | {"scale_with_movement": True},
            "scale_with_movement must be False with sampling.SinglePassRestarts",
        ),
        ({"scale_with_movement": 1}, "scale_with_movement must be"),
        ({"sampling": sampling.FullBatch()}, "sampling must be"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"period": 0}, "period must be"),
        ({"period": 2, "sampling_prob": 1.0}, r"sampling_prob must be .* \(0, 1\)"),
        ({"period": 2, "restart_sampling_prob": 0.0}, "restart_sampling_prob must be"),
        (
            {"period": 1, "sampling_prob": 0.5},
            "sampling_prob must be None with period=1",
        ),
    ],
)
def test_bad_samplers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        sampling.MultiPassRestarts(**changes)


def test_the_number_of_steps_is_no_budget() -> None:
    with pytest.raises(ValueError, match="vary must be 'noise_multiplier'"):
        make().calibrate(epsilon=1.0, delta=1e-5, vary="num_steps")


def test_without_clips_there_is_no_noise() -> None:
    free = {"restart_l2_clip_norm": math.inf, "l2_clip_norm": math.inf}
    plan = make(**free, noise_multiplier=0.0)
    assert plan.noise_std == 0
    assert plan.epsilon(delta=1e-5) == math.inf
    with pytest.raises(ValueError, match="l2_clip_norm must be finite"):
        make(**free)
