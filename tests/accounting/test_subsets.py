"""Random subsets of one size: the pair, its table, and what many steps cost."""

import dataclasses
import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.special import ndtr

from jaxdp import accounting, plans, sampling
from jaxdp.accounting import spending, subsets

SWAP = dp.NeighboringRelation.REPLACE_ONE
DELTA = 1e-5


def guarantee(m: float, steps: int, n: int, size: int) -> accounting.Guarantee:
    return accounting.fixed_size_gaussian(
        m, steps, num_examples=n, batch_size=size, relation="replace_one"
    )


# --- One step ------------------------------------------------------------------------

X = np.linspace(-14.0, 16.0, 60_001)


def law(shares: dict[float, float], x: np.ndarray = X) -> np.ndarray:
    """Mass on the cells of a line of a mixture of N(mean, 1)."""
    found = np.zeros(len(x) - 1)
    for mean, share in shares.items():
        below, above = ndtr(x - mean), ndtr(mean - x)
        found += share * np.where(x[1:] < mean, np.diff(below), -np.diff(above))
    return found


def hockey_stick(p: np.ndarray, r: np.ndarray, alpha: float) -> float:
    return float(np.maximum(p - alpha * r, 0).sum())


def of_subsets(values: tuple[float, ...], size: int) -> np.ndarray:
    """Output law of a sum over a random subset of numbers, in standard deviations."""
    every = list(itertools.combinations(values, size))
    shares: dict[float, float] = {}
    for chosen in every:
        mean = math.fsum(chosen)
        shares[mean] = shares.get(mean, 0.0) + 1 / len(every)
    return law(shares)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_data_sets_are_further_apart_and_some_are_as_far(size: int):
    """At every alpha, below 1 too; half of the distance would be exceeded."""
    n, clip, alphas = 5, 0.6, np.exp([-1.0, -0.3, 0.0, 0.3, 1.0])
    curve = subsets.deltas(size / n, 2 * clip, np.abs(np.log(alphas)))
    curve = np.where(alphas < 1, alphas * curve + 1 - alphas, curve)
    half = subsets.deltas(size / n, clip, np.abs(np.log(alphas)))
    rng, largest = np.random.default_rng(0), np.zeros(len(alphas))
    corners = [
        (-1.0,) * 4 + (1.0, -1.0),
        (1.0,) * 4 + (1.0, -1.0),
        (-1.0,) * 4 + (-1.0, 1.0),
    ]
    others = [tuple(row) for row in rng.uniform(-1, 1, (20, 6))]
    for *common, here, there in np.array([*corners, *others]) * clip:
        p, r = (of_subsets((*common, last), size) for last in (here, there))
        got = np.array([hockey_stick(p, r, alpha) for alpha in alphas])
        assert np.all(got <= curve + 1e-6)
        largest = np.maximum(largest, got)
    np.testing.assert_allclose(largest, curve, atol=1e-6)
    assert np.all(largest[alphas >= 1] > half[alphas >= 1] + 1e-3)


@pytest.mark.parametrize("q", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("mu", [0.05, 1.0, 4.0])
def test_deltas_are_the_integral_that_defines_them(q: float, mu: float):
    epsilons = np.array([0.0, 1e-4, 0.1, 1.0, 2.0])
    away, there = law({0.0: 1.0}), law({0.0: 1 - q, mu: q})
    want = [hockey_stick(there, away, math.exp(e)) for e in epsilons]
    got = subsets.deltas(q, mu, epsilons)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize(("q", "mu"), [(0.01, 0.1), (0.1, 1.0), (0.9, 3.0), (1.0, 0.5)])
def test_the_table_is_the_profile_on_its_grid_and_above_it_between(q: float, mu: float):
    interval = 1e-2 * mu * q
    table = subsets.distribution(q, mu, interval)
    at = np.arange(0, 300, 7) * interval
    np.testing.assert_allclose(
        table.get_delta_for_epsilon(at),
        subsets.deltas(q, mu, at),
        rtol=1e-9,
        atol=1e-15,
    )
    between = at + interval / 2
    got, exact = table.get_delta_for_epsilon(between), subsets.deltas(q, mu, between)
    assert np.all(got >= exact * (1 - 1e-9) - 1e-15)
    np.testing.assert_allclose(got, exact, rtol=0.02)
    # Below 1 as well, where the relation's symmetry gives it; and nothing is missing.
    below = np.exp(-at) * subsets.deltas(q, mu, at) - np.expm1(-at)
    np.testing.assert_allclose(
        table.get_delta_for_epsilon(-at[::-1]), below[::-1], rtol=1e-9
    )
    masses = table._pmf_remove.to_dense_pmf()._probs  # pyright: ignore
    assert masses.sum() == pytest.approx(1, abs=1e-12)
    assert 0 < table.get_delta_for_epsilon(1e9) < 1e-20  # What is cut off is infinite.


@pytest.mark.parametrize("m", [1e-3, 0.03, 1.0, 1e6])
@pytest.mark.parametrize("size", [1, 999])
def test_extreme_noise_is_accounted(m: float, size: int):
    few, many = (
        accounting.epsilon(*guarantee(m, t, 1000, size), DELTA) for t in (1, 50)
    )
    whole = accounting.epsilon(
        *accounting.full_batch_gaussian(m, 50, "replace_one"), DELTA
    )
    assert 0 <= few <= many <= whole * (1 + 1e-3) + 1e-4
    assert math.isfinite(many)


def test_next_to_no_noise_is_no_privacy():
    for m in (2e-5, 1e-6):  # Losses so far apart that their exponentials overflow.
        assert accounting.epsilon(*guarantee(m, 5, 1000, 10), DELTA) == math.inf


# --- Many steps ----------------------------------------------------------------------


FINE = np.linspace(-9.0, 11.0, 400_001)


def composed_delta(
    p: np.ndarray, r: np.ndarray, steps: int, epsilon: float, spread: float = 0.0
) -> float:
    """Bounds the delta of products of two laws, given by masses of cells, by FFT.

    From below: cells are merged, and losses rounded down to a grid. From above: rounded
    up, after the ``spread`` > 0 of losses within a cell is added, and what has no finite
    loss counts in full.
    """
    grid, reach = 2e-4, 6.0
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.log(p) - np.log(r) + spread
    kept = (p > 0) & (np.abs(loss) < reach)
    places = (np.ceil if spread else np.floor)(loss[kept] / grid).astype(int)
    half = round(reach / grid)
    masses = np.zeros(2 * half + 1)
    np.add.at(masses, places + half, p[kept])
    length = 2 ** math.ceil(math.log2(steps * 2 * half + 1))
    total = np.fft.irfft(np.fft.rfft(masses, length) ** steps, length)
    at = (np.arange(length) - steps * half) * grid
    finite = np.maximum(-np.expm1(np.minimum(epsilon - at, 0)), 0) @ total
    beyond = 1 - (1 - max(1 - masses.sum(), 0.0)) ** steps if spread else 0.0
    return float(finite + beyond)


def worst_pair(q: float, mu: float) -> tuple[np.ndarray, np.ndarray]:
    """The pair of the profile, as masses of cells: both directions' large losses.

    Losses above 0 are those of (1-q) Q + q P against Q, those below of the reverse, and
    the rest of either mass lies at 0.
    """
    away, there = law({0.0: 1.0}, FINE), law({0.0: 1 - q, mu: q}, FINE)
    high = there > away
    p = np.concatenate([there[high], away[high], [0.0]])
    r = np.concatenate([away[high], there[high], [0.0]])
    p[-1] = r[-1] = 1 - p.sum()
    return p, r


@pytest.mark.parametrize(
    ("size", "m", "steps"), [(10, 1.0, 1), (10, 1.0, 12), (50, 3.0, 12), (2, 0.5, 25)]
)
def test_many_steps_are_between_independent_bounds(size: int, m: float, steps: int):
    """And a run exists that costs nearly as much: one direction in every step."""
    q, got = size / 100, guarantee(m, steps, 100, size)
    epsilon = 0.7 * float(accounting.epsilon(*got, DELTA))
    delta, pair = accounting.delta(*got, epsilon), worst_pair(q, 1 / m)
    spread = (FINE[1] - FINE[0]) / m
    low, high = (composed_delta(*pair, steps, epsilon, s) for s in (0.0, spread))
    assert low * (1 - 1e-5) <= delta <= high * (1 + 1e-5)
    assert high < 1.15 * low
    away, there = law({0.0: 1.0}, FINE), law({0.0: 1 - q, 1 / m: q}, FINE)
    attained = composed_delta(there, away, steps, epsilon)
    assert 0.4 * delta < attained <= delta * (1 + 1e-5)


# --- What it changed -----------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-9, 1e-30])
@pytest.mark.parametrize(
    ("n", "size", "m", "steps"),
    [
        (1024, 64, 5.156, 10_000),
        (1000, 1, 0.7, 3),
        (100, 99, 2.0, 50),
        (24, 1, 0.75, 4),
    ],
)
def test_never_more_than_by_rdp_which_it_was(n, size, m, steps, delta):
    event, relation = guarantee(m, steps, n, size)
    by_rdp = RdpAccountant(neighboring_relation=relation).compose(event)
    got = accounting.epsilon(event, relation, delta)
    assert got <= by_rdp.get_epsilon(delta)
    assert delta < 1e-12 or got.accountant == "PLD"
    assert accounting.delta(event, relation, 30.0) <= by_rdp.get_delta(30.0)


def test_plans_are_calibrated_to_it_with_few_tables():
    plan = plans.DPZero(
        num_examples=1024,
        num_steps=10_000,
        sampling=sampling.FixedSize(64),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
    )
    spending._composed.cache_clear()
    plan = plan.calibrate(epsilon=2.0, delta=DELTA)
    assert spending._composed.cache_info().misses <= 2
    assert 2.0 * (1 - 2e-5) <= plan.epsilon() <= 2.0
    assert plan.epsilon().accountant == "PLD"
    # By RDP it would cost more than twice as much; Poisson samples cost little less.
    by_rdp = RdpAccountant(neighboring_relation=plan.event_relation).compose(plan.event)
    assert by_rdp.get_epsilon(DELTA) > 4.5
    rate = sampling.TruncatedPoisson(sampling_prob=64 / 1024)
    assert 1.9 < dataclasses.replace(plan, sampling=rate).epsilon() < 2.0


def test_subsets_compose_with_full_batches_under_one_relation():
    full = accounting.full_batch_gaussian(20.0, 5, "replace_one", among_sampled=True)
    both = accounting.composed([full, guarantee(2.0, 50, 100, 10)])
    spent = accounting.epsilon(*both, DELTA)
    assert spent.accountant == "PLD"
    parts = [
        accounting.epsilon(*each, DELTA) for each in (full, guarantee(2.0, 50, 100, 10))
    ]
    assert max(parts) < spent < sum(parts) + 0.05


def test_no_noise_is_not_private():
    leaf = dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(0.0))
    assert accounting.epsilon(leaf, SWAP, DELTA) == math.inf
