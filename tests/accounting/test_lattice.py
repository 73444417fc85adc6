"""What the sampler of integer noise costs: by hand, composed, and in every family."""

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.special import ndtr

from jaxdp import accounting, plans, sampling
from jaxdp.accounting import RELATIONS, Guarantee, lattice
from jaxdp.kernels import lattice_gaussian
from tests.kernels import test_lattice_gaussian as laws

PLAIN = accounting.full_batch_gaussian(2.0, 10, "zero_out")
POISSON = accounting.poisson_gaussian(
    2.0, 10, sampling_prob=0.1, relation="add_or_remove"
)
MIXED = accounting.composed(
    [POISSON, accounting.full_batch_gaussian(3.0, 2, "add_or_remove")]
)


def drawn(plain: Guarantee = PLAIN, numbers: int = 4, reach: float = 0.5) -> Guarantee:
    return accounting.drawn(plain, num_steps=10, numbers_per_step=numbers, reach=reach)


# --- normal noise on integers ---


def _discrete_delta(shift: int, std: int, epsilon: float) -> float:
    """Delta of the discrete Gaussian against itself shifted, by its sum."""
    z = np.arange(-20 * std, shift + 20 * std + 1, dtype=np.float64)
    loss = (z * shift - shift**2 / 2) / std**2
    z, loss = z[loss > epsilon], loss[loss > epsilon]
    mass = np.exp(-((z - shift) ** 2) / (2 * std**2)) * -np.expm1(epsilon - loss)
    whole = np.exp(-(np.arange(-20 * std, 20 * std + 1) ** 2) / (2 * std**2))
    return math.fsum(mass) / math.fsum(whole)


def test_integer_noise_is_as_private_as_the_normal_noise_that_is_charged() -> None:
    """With the deviation of the normal noise it is not, where that is an integer."""
    worse = 0
    for units in (8, 25, 200, 1000):
        for epsilon in np.linspace(0.5, 8, 40):
            charged = accounting.gaussian_delta(256 / units, float(epsilon))
            if charged > 1e-12:
                found = _discrete_delta(256, accounting.integer_std(units), epsilon)
                assert found <= charged * (1 + 1e-9)
                worse += _discrete_delta(256, units, epsilon) > charged * (1 + 1e-9)
    assert worse > 10


@pytest.mark.parametrize("units", [0.5, 3.0, 10.0])
def test_normal_noise_rounded_at_random_is_discrete_noise(units: float) -> None:
    """The derivation: the law of what comes out, by numerical integration."""
    y = np.linspace(-12 * units, 12 * units, 40_001)
    z = np.arange(-60, 61)
    rounded = np.exp(-((z[:, None] - y) ** 2) / 8)
    rounded /= np.exp(-((np.arange(-200, 201)[:, None] - y) ** 2) / 8).sum(axis=0)
    law = (rounded * np.exp(-(y**2) / (2 * units**2))).sum(axis=1)
    ideal = np.exp(-(z**2) / (2 * (units**2 + 4)))
    likely = ideal > 1e-12
    np.testing.assert_allclose(
        (law / law.sum())[likely], (ideal / ideal.sum())[likely], rtol=1e-9
    )


@pytest.mark.parametrize("units", [200, 200.5, 2**20, 2.0**30, 1e-12])
def test_deviation_of_integer_noise_by_hand(units: float) -> None:
    std = accounting.integer_std(units)
    assert isinstance(std, int)
    assert std**2 >= Fraction(units) ** 2 + 4 > (std - 1) ** 2
    assert accounting.integer_std(0) == 0


# --- by hand ---


@pytest.mark.parametrize(
    ("count", "bound"),
    [
        # At the largest order, 2**33: 40 log(10) / 2**33, and count 2**-57 besides.
        (1, 1.07222474e-8),
        (10**6, 1.07291863e-8),
        (2**29, 1.07222474e-8 + 2.0**-28),
        # Beyond, sqrt(2 count 2**-89 40 log(10)), at the order sqrt(184.207 / count v).
        (2**40, 5.7202886e-7),
        (2**42, 1.14405773e-6),
    ],
)
def test_closeness_by_hand(count: int, bound: float) -> None:
    assert lattice.closeness(count) == pytest.approx(bound, rel=1e-7)


def test_closeness_is_the_best_of_all_orders() -> None:
    """And grows with the count, by at most its root, which selection relies on."""
    orders = np.geomspace(1e3, lattice_gaussian.ORDER, 3000)
    counts = [2**k for k in range(0, 62, 3)]
    for count in counts:
        exponent = count * lattice_gaussian.MEAN_SQUARE * (orders + 1) / 2
        each = exponent + 40 * math.log(10) / orders
        assert lattice.closeness(count) == pytest.approx(each.min(), rel=1e-4)
    bounds = [lattice.closeness(count) for count in counts]
    assert bounds == sorted(bounds)
    for a, b in itertools.pairwise(bounds):
        assert a < b <= math.sqrt(8) * a * 1.01


# The deviations where the law is the farthest from the ideal one, and a usual one.
@pytest.mark.parametrize("std", [151, 301, 2**16])
def test_moments_are_those_of_the_bound(std: int) -> None:
    """Chernoff's: in both directions, each under the law that its own bound is about.

    There the mean of the log ratio is not zero but a divergence, at most half the mean
    square.
    """
    x, off, density = laws.log_ratios(std).T
    ideal, ell = density / density.sum(), np.log1p(off)
    square = lattice_gaussian.MEAN_SQUARE

    def excess(law: np.ndarray, a: float, ratio: np.ndarray) -> float:
        return float((law * (np.expm1(a * ratio) - a * ratio)).sum())

    for a in (2.0**10, 2.0**20, 2.0**28, lattice_gaussian.ORDER):
        for law, ratio in ((ideal * (1 + off), ell), (ideal, -ell)):
            assert 0 <= excess(law, a, ratio) <= a**2 * square / 2
    # Both divergences, without what cancels in float64.
    for law, ratio in ((ideal * (1 + off), -ell), (ideal, ell)):
        assert excess(law, 1.0, ratio) <= square / 2
    assert x.max() <= lattice_gaussian.REACH


def test_a_step_that_nothing_moves_far() -> None:
    """Numbers beyond 11 deviations, in two tails; and twice the share of 1e-18."""
    event = drawn(numbers=1000, reach=0.0).event
    beyond = 2 * (10_000 + 10) * ndtr(-11.0)
    assert lattice.sampler_error(event) == (
        2 * lattice.closeness(10_000),
        pytest.approx(2e-18 + beyond, rel=1e-9),
    )


def test_what_is_moved_farther_misses_more() -> None:
    reaches = (0.0, 0.5, 2.0, 5.0, 9.0, 12.0)
    missed = [lattice.sampler_error(drawn(reach=r).event)[1] for r in reaches]
    assert missed == sorted(missed) and len(set(missed)) == len(missed)
    assert missed[4] == pytest.approx(20 * ndtr(-2.0), rel=1e-6)
    assert missed[-1] == 1.0
    assert math.isinf(accounting.epsilon(*drawn(reach=12.0), 0.5))


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="num_steps must be an integer >= 1"):
        accounting.drawn(PLAIN, num_steps=0, numbers_per_step=1, reach=0.1)
    with pytest.raises(ValueError, match="numbers_per_step must be an integer >= 1"):
        accounting.drawn(PLAIN, num_steps=1, numbers_per_step=0, reach=0.1)


# --- the event ---


@pytest.mark.parametrize("plain", [PLAIN, POISSON, MIXED])
def test_it_is_equal_to_the_event_with_ideal_noise(plain: Guarantee) -> None:
    event = drawn(plain).event
    whole = plain.event
    if not isinstance(whole, dp.SelfComposedDpEvent):
        whole = dp.SelfComposedDpEvent(whole, 1)
    assert event == whole and whole == event
    other = dp.SelfComposedDpEvent(whole.event, whole.count + 1)
    assert event != other and other != event and event != 3
    assert lattice.ideal(event) == whole
    assert type(lattice.ideal(event)) is dp.SelfComposedDpEvent
    assert drawn(plain).event_relation == plain.event_relation


def test_equal_events_have_equal_hashes() -> None:
    assert hash(drawn().event) == hash(PLAIN.event)
    assert {drawn().event: 1}[PLAIN.event] == 1


def test_without_noise_nothing_is_drawn() -> None:
    none = accounting.full_batch_gaussian(0.0, 10, "zero_out")
    assert drawn(none) is none


@pytest.mark.parametrize("plain", [PLAIN, POISSON, MIXED])
@pytest.mark.parametrize("name", ["PLD", "RDP"])
def test_foreign_accountants_read_the_ideal_event(plain: Guarantee, name: str) -> None:
    def spent(event: dp.DpEvent) -> float:
        if name == "PLD":  # On a coarse grid, for the two are compared alone.
            accountant: Any = PLDAccountant(plain.event_relation, 1e-2)
        else:
            accountant = RdpAccountant(neighboring_relation=plain.event_relation)
        return accountant.compose(event).get_epsilon(1e-6)

    assert spent(drawn(plain).event) == spent(plain.event)


# --- epsilon and delta ---


def selected(plain: Guarantee) -> Guarantee:
    return accounting.repeat_and_select(plain, mean=5.0, shape=1.0)


EVENTS: dict[str, tuple[Guarantee, Guarantee]] = {
    "Gaussian": (drawn(), PLAIN),
    "sampled": (drawn(POISSON), POISSON),
    "composed": (drawn(MIXED), MIXED),
    "twice": (
        accounting.composed([drawn(), drawn()]),
        accounting.composed([PLAIN, PLAIN]),
    ),
    "selected": (selected(drawn()), selected(PLAIN)),
    "selected of composed": (selected(drawn(MIXED)), selected(MIXED)),
    "missed": (drawn(reach=5.0), PLAIN),
}


@pytest.mark.parametrize("name", EVENTS)
def test_epsilon_is_the_ideal_one_and_the_charge(name: str) -> None:
    ours, plain = EVENTS[name]
    charge, missed = lattice.sampler_error(ours.event)
    assert 0 < charge < 1e-5 and 0 < missed < 1e-7
    spent = accounting.epsilon(*ours, 1e-6)
    ideal = accounting.epsilon(*plain, (1e-6 - missed) * math.exp(-charge))
    assert spent == pytest.approx(ideal + charge, rel=1e-10)
    # Of delta too a share is lost, of the size of the charge at most.
    assert ideal < spent
    assert spent.accountant == ideal.accountant


@pytest.mark.parametrize("name", EVENTS)
def test_delta_is_the_inverse(name: str) -> None:
    ours, plain = EVENTS[name]
    charge, missed = lattice.sampler_error(ours.event)
    spent = accounting.epsilon(*ours, 1e-6)
    found = accounting.delta(*ours, spent)
    ideal = accounting.delta(*plain, spent - charge)
    assert found == pytest.approx(ideal * math.exp(charge) + missed, rel=1e-6)
    assert found <= 1e-6 * (1 + 1e-9)
    if spent.accountant != "RDP":  # Whose two conversions are not inverse.
        assert found == pytest.approx(1e-6, rel=1e-3)
    # Less than the charge is no epsilon.
    assert accounting.delta(*ours, charge / 2) == 1.0


def test_no_epsilon_at_a_delta_that_is_missed() -> None:
    ours = drawn(reach=7.0)
    _, missed = lattice.sampler_error(ours.event)
    assert missed > 1e-9
    for delta in (missed, missed / 2, 1e-18):
        spent = accounting.epsilon(*ours, delta)
        assert math.isinf(spent) and spent.accountant == "Gaussian closed form"
    assert math.isfinite(accounting.epsilon(*ours, missed * 1.01))
    with pytest.raises(ValueError, match="delta must be"):
        accounting.epsilon(*ours, 0.0)


def test_composition_adds_up() -> None:
    one, other = drawn().event, drawn(numbers=100, reach=6.0).event
    charges = np.array([lattice.sampler_error(e) for e in (one, other)])
    nested = dp.ComposedDpEvent(
        [dp.SelfComposedDpEvent(one, 3), dp.ComposedDpEvent([other, PLAIN.event])]
    )
    assert lattice.sampler_error(nested) == pytest.approx(
        tuple([3, 1] @ charges), rel=1e-12
    )
    # A sample of records leaves the noise as it is.
    sample = dp.PoissonSampledDpEvent(0.1, one)
    assert lattice.sampler_error(sample) == tuple(charges[0])
    assert lattice.sampler_error(PLAIN.event) == (0.0, 0.0)
    assert lattice.sampler_error(lattice.ideal(nested)) == (0.0, 0.0)


@pytest.mark.parametrize("mean", [1.0, 5.0, 1000.0])
def test_selection_is_charged_for_all_runs(mean: float) -> None:
    ours = accounting.repeat_and_select(drawn(), mean=mean, shape=1.0)
    charge, missed = lattice.sampler_error(drawn().event)
    most = 200 * mean * (1 + math.log(mean))
    assert lattice.sampler_error(ours.event) == pytest.approx(
        (1.01 * math.sqrt(most) * charge, most * missed), rel=1e-12
    )
    # The bound on that many runs' numbers, drawn as one, is not larger.
    assert (
        2 * lattice.closeness(math.ceil(most) * 40) <= math.sqrt(most) * charge * 1.01
    )


# --- every family ---

EXAMPLES: dict[str, Any] = {"num_examples": 1024, "l2_clip_norm": 2.0}
TUNING = plans.ClipTuning(
    target_unclipped_quantile=0.7, learning_rate=0.2, count_noise_multiplier=30.0
)
MANY = 2**32


def zeroth(**changes: Any) -> Any:
    base = EXAMPLES | {
        "num_steps": 10,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "smoothing_radius": 1e-3,
        "noise_multiplier": 2.0,
    }
    return plans.DPZero(**base | changes)


def first(kind: Any, **changes: Any) -> Any:
    base = EXAMPLES | {
        "num_steps": 10,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "noise_multiplier": 2.0,
    }
    return kind(**base | changes)


def o2nc(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": 10_000,
        "num_steps": 24,
        "sampling": sampling.SinglePassRestarts(
            period=8, restart_batch_size=10, batch_size=2
        ),
        "relation": "replace_one",
        "restart_l2_clip_norm": 3.0,
        "l2_clip_norm": 0.5,
        "smoothing_radius": 0.5,
        "max_step": 0.1,
        "window": 4,
        "noise_multiplier": 2.0,
    }
    return plans.O2NC(**base | changes)


SOSP = plans.SOSP(
    num_examples=250,
    num_steps=40,
    relation="replace_one",
    l2_clip_norm=1.0,
    smoothness=0.5,
    refresh_batch_size=25,
    difference_batch_rate=40.0,
    drift_limit=1.0,
    max_differences=7,
    trigger_norm=0.35,
    escape_steps=6,
    escape_radius=0.4,
    escape_noise_std=0.03,
    hessian_batch_size=15,
    hessian_clip_norm=0.5,
    noise_multiplier=2.0,
)
#: Slopes and a count of a step at most: charged whatever their number, so that plans that
#: differ in it need the same noise.
SLOPES = 65
#: Each family's plan: how many numbers its steps draw at most.
FAMILIES: dict[str, tuple[Any, int]] = {
    "one direction": (zeroth(), 10 * SLOPES),
    "K directions": (zeroth(num_directions=3), 10 * SLOPES),
    "tuned clip": (zeroth(num_directions=3, clip_tuning=TUNING), 10 * SLOPES),
    "sampled": (
        zeroth(
            sampling=sampling.TruncatedPoisson(sampling_prob=1 / 16, max_batch_size=96)
        ),
        10 * SLOPES,
    ),
    "gradients": (first(plans.DPGD), 10 * MANY),
    "gradients of directions": (
        first(plans.DPGDZerothOrder, smoothing_radius=1e-3),
        10 * SLOPES,
    ),
    "prefix sums": (
        first(
            plans.PrefixSum,
            sampling=sampling.SinglePass(batch_size=4),
            period=5,
            prefix_noise="blt_3",
        ),
        10 * MANY,
    ),
    "restarts": (o2nc(), 24 * MANY),
    "restarts, tuned clips": (o2nc(clip_tuning=TUNING), 24 * MANY),
    "several passes": (
        o2nc(sampling=sampling.MultiPassRestarts(period=8), prefix_noise="independent"),
        24 * MANY,
    ),
    "several passes, no differences": (
        o2nc(
            num_steps=8,
            sampling=sampling.MultiPassRestarts(period=1),
            prefix_noise="independent",
        ),
        8 * MANY,
    ),
    "second-order points": (SOSP, 2 * 40 * MANY),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_pays_for_its_numbers(name: str) -> None:
    plan, count = FAMILIES[name]
    charge, missed = lattice.sampler_error(plan.event)
    assert charge == pytest.approx(2 * lattice.closeness(count), rel=1e-12)
    assert 4 * count * 1.9e-28 <= 2 * missed < 1e-12
    ideal = accounting.epsilon(
        lattice.ideal(plan.event),
        plan.event_relation,
        (1e-5 - missed) * math.exp(-charge),
    )
    assert plan.epsilon(delta=1e-5) == pytest.approx(ideal + charge, rel=1e-9)
    assert plan.epsilon(delta=1e-5) > ideal


# (The count of a tuned clip has noise anyway.)
@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "tuned clip"])
def test_no_noise_costs_nothing_of_a_sampler(name: str) -> None:
    plan = dataclasses.replace(FAMILIES[name][0], noise_multiplier=0.0)
    assert lattice.sampler_error(plan.event) == (0.0, 0.0)
    assert math.isinf(plan.epsilon(delta=1e-5))


@pytest.mark.parametrize("relation", RELATIONS)
def test_laplace_noise_is_exact(relation: Any) -> None:
    plan = zeroth(noise="laplace", relation=relation)
    assert lattice.sampler_error(plan.event) == (0.0, 0.0)


@pytest.mark.parametrize("relation", RELATIONS)
def test_how_far_a_record_moves_sampled_sums(relation: Any) -> None:
    """2C where it pushes another out of a full batch: in deviations of the noise."""
    sampler = sampling.TruncatedPoisson(sampling_prob=1 / 16, max_batch_size=96)
    plan = zeroth(sampling=sampler, relation=relation, noise_multiplier=0.4)
    clips = 2 if relation == "replace_one" else 1
    _, missed = lattice.sampler_error(plan.event)
    farthest = 2 / (clips * 0.4)
    assert missed == pytest.approx(20 * ndtr(farthest - 11) + 2e-18, rel=1e-6)


def test_calibration_includes_the_charge() -> None:
    plan = first(plans.DPGD).calibrate(epsilon=1.0, delta=1e-6)
    charge, _ = lattice.sampler_error(plan.event)
    assert charge > 1e-7
    assert 1 - 1e-8 < plan.epsilon() <= 1.0
    ideal = accounting.epsilon(lattice.ideal(plan.event), plan.event_relation, 1e-6)
    assert ideal <= 1.0 - charge * (1 - 1e-6)
