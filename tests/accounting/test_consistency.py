import math
from collections.abc import Iterator

import dp_accounting as dp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant, rdp_privacy_accountant

from jaxdp import accounting
from jaxdp.accounting import Guarantee, consistency

RELATIONS = tuple(dp.NeighboringRelation)
ADD, SWAP = RELATIONS[0], RELATIONS[1]
GAUSSIAN = dp.GaussianDpEvent(3.0)
LAPLACE = dp.LaplaceDpEvent(3.0)
POISSON = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(3.0))
TRUNCATED = dp.TruncatedSubsampledGaussianDpEvent(100, 0.1, 12, 3.0)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    consistency._check_leaf.cache_clear()
    yield
    consistency._check_leaf.cache_clear()


def steps(leaf: dp.DpEvent, relation: dp.NeighboringRelation = ADD) -> Guarantee:
    return Guarantee(dp.SelfComposedDpEvent(leaf, 50), relation)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("m", [1e-3, 12.5, 1e6])
@pytest.mark.parametrize("q", [1e-9, 1e-4, 0.3])
def test_the_installed_version_agrees_with_itself(relation, m, q):
    gaussian = dp.GaussianDpEvent(m)
    for leaf in (
        gaussian,
        dp.PoissonSampledDpEvent(q, gaussian),
        dp.TruncatedSubsampledGaussianDpEvent(200, q, 40, m),
        dp.TruncatedSubsampledGaussianDpEvent(200, q, 200, m),
    ):
        accounting.self_check(steps(leaf, relation))


@pytest.mark.parametrize("scale", [1e-3, 12.5, 1e6])
def test_laplace_and_subsets_are_checked(scale):
    for relation in (ADD, dp.NeighboringRelation.REPLACE_SPECIAL):
        plain = dp.LaplaceDpEvent(scale)
        for leaf in (plain, dp.PoissonSampledDpEvent(0.1, plain)):
            accounting.self_check(steps(leaf, relation))
    for size in (1, 30, 100):
        gaussian = dp.GaussianDpEvent(scale)
        leaf = dp.SampledWithoutReplacementDpEvent(100, size, gaussian)
        accounting.self_check(steps(leaf, SWAP))


@pytest.mark.parametrize("records", [10**9, 2**31 - 1, 2**31, 2**40])
def test_random_subsets_of_very_many_records_are_accounted(records):
    """A divergence of 1e-17 is a domain error in dp-accounting's RDP."""
    given = {"num_examples": records, "batch_size": 1, "relation": "replace_one"}
    found = accounting.fixed_size_gaussian(2.0, 3, **given)
    accounting.self_check(found)
    assert 0 <= accounting.epsilon(*found, 1e-12) < 1e-3


def test_what_is_selected_from_is_checked_by_itself(monkeypatch):
    one = accounting.full_batch_gaussian(3.0, 50, "zero_out")
    guarantee = accounting.repeat_and_select(one, mean=10, shape=1)
    accounting.self_check(guarantee)
    consistency._check_leaf.cache_clear()
    broken_pld(monkeypatch, standard_deviation=0.999)
    with pytest.raises(RuntimeError, match="contradicts itself"):
        accounting.self_check(guarantee)


def test_other_events_are_checked():
    for relation in RELATIONS:
        accounting.self_check(steps(dp.ZCDpEvent(0.01), relation))
        accounting.self_check(Guarantee(dp.NonPrivateDpEvent(), relation))
        accounting.self_check(Guarantee(dp.ComposedDpEvent([]), relation))
        zero = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.0))
        accounting.self_check(steps(zero, relation))
    tree = dp.SingleEpochTreeAggregationDpEvent(10.0, [4, 8])
    accounting.self_check(Guarantee(tree, dp.NeighboringRelation.REPLACE_SPECIAL))


def test_results_are_remembered():
    for _ in range(3):
        accounting.self_check(steps(POISSON))
    assert consistency._check_leaf.cache_info().misses == 1


def broken_pld(monkeypatch: pytest.MonkeyPatch, **changed: float) -> None:
    """PLD whose Gaussians take some arguments times a factor."""
    honest = privacy_loss_distribution.from_gaussian_mechanism

    def build(**kwargs):
        for name, factor in changed.items():
            if name in kwargs:
                kwargs[name] *= factor
        return honest(**kwargs)

    monkeypatch.setattr(privacy_loss_distribution, "from_gaussian_mechanism", build)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("leaf", [GAUSSIAN, POISSON, TRUNCATED])
@pytest.mark.parametrize("factor", [0.5, 0.999, 1.001, 2.0])
def test_a_pld_with_another_multiplier_is_caught(monkeypatch, leaf, relation, factor):
    broken_pld(monkeypatch, standard_deviation=factor)
    with pytest.raises(RuntimeError, match="contradicts itself"):
        accounting.self_check(steps(leaf, relation))


@pytest.mark.parametrize("leaf", [POISSON, TRUNCATED])
def test_a_pld_with_another_sampling_probability_is_caught(monkeypatch, leaf):
    broken_pld(monkeypatch, sampling_prob=0.99)
    with pytest.raises(RuntimeError, match="exact trade-off"):
        accounting.self_check(steps(leaf))


@pytest.mark.parametrize("leaf", [GAUSSIAN, POISSON])
@pytest.mark.parametrize("factor", [0.5, 0.999, 1.001, 2.0])
def test_an_rdp_with_another_multiplier_is_caught(monkeypatch, leaf, factor):
    honest = rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian

    def compute(q, noise_multiplier, orders):
        return honest(q, noise_multiplier * factor, orders)

    name = "_compute_rdp_poisson_subsampled_gaussian"
    monkeypatch.setattr(rdp_privacy_accountant, name, compute)
    with pytest.raises(RuntimeError, match="RDP"):
        accounting.self_check(steps(leaf))


@pytest.mark.parametrize("factor", [0.5, 0.999, 1.001, 2.0])
def test_a_laplace_of_another_scale_is_caught(monkeypatch, factor):
    honest = privacy_loss_distribution.from_laplace_mechanism

    def build(parameter, **kwargs):
        return honest(parameter * factor, **kwargs)

    monkeypatch.setattr(privacy_loss_distribution, "from_laplace_mechanism", build)
    for leaf in (dp.LaplaceDpEvent(3.0), dp.PoissonSampledDpEvent(0.1, LAPLACE)):
        with pytest.raises(RuntimeError, match="exact trade-off"):
            accounting.self_check(steps(leaf))


@pytest.mark.parametrize("factor", [0.5, 0.999, 1.001, 2.0])
def test_random_subsets_of_another_multiplier_are_caught(monkeypatch, factor):
    name = "_compute_rdp_sample_wor_gaussian"
    honest = getattr(rdp_privacy_accountant, name)

    def compute(q, noise_multiplier, orders):
        return honest(q, noise_multiplier * factor, orders)

    monkeypatch.setattr(rdp_privacy_accountant, name, compute)
    with pytest.raises(RuntimeError, match="order 2"):
        accounting.self_check(
            steps(dp.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN), SWAP)
        )


@pytest.mark.parametrize("leaf", [GAUSSIAN, POISSON, LAPLACE, dp.ZCDpEvent(0.1)])
def test_an_rdp_that_ignores_counts_is_caught(monkeypatch, leaf):
    """As the library's development version did for one event."""
    honest = RdpAccountant._maybe_compose

    def maybe_compose(self, event, count, do_compose):
        return honest(self, event, min(count, 1), do_compose)

    monkeypatch.setattr(RdpAccountant, "_maybe_compose", maybe_compose)
    with pytest.raises(RuntimeError, match="count"):
        accounting.self_check(steps(leaf))


def test_a_pld_that_ignores_counts_is_caught(monkeypatch):
    distribution = privacy_loss_distribution.PrivacyLossDistribution
    monkeypatch.setattr(distribution, "self_compose", lambda self, *args: self)
    with pytest.raises(RuntimeError, match="count"):
        accounting.self_check(steps(POISSON))


def test_another_closed_form_is_caught(monkeypatch):
    honest = dp.get_epsilon_gaussian
    monkeypatch.setattr(
        dp, "get_epsilon_gaussian", lambda sigma, delta: honest(sigma * 1.001, delta)
    )
    with pytest.raises(RuntimeError, match="closed forms"):
        accounting.self_check(steps(GAUSSIAN))


# The exact trade-offs that the accountants are held against.


@pytest.mark.parametrize("q", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("part", [0.0, 0.2, 0.7, 1.1])
def test_delta_of_sampled_laplace_is_the_integral_that_defines_it(q, scale, part):
    epsilon = part * math.log1p(q * math.expm1(1 / scale))
    # Midpoints of a grid that has the kinks, 0 and 1, among its points.
    dx = scale / 20_000
    x = (np.arange(-40 * 20_000, 41 * 20_000) + 0.5) * dx
    away = np.exp(-np.abs(x) / scale) / (2 * scale)
    there = np.exp(-np.abs(x - 1) / scale) / (2 * scale)
    mixed = (1 - q) * away + q * there
    want = max(
        float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * dx)
        for a, b in ((mixed, away), (away, mixed))
    )
    got = consistency._laplace_delta(q, scale, epsilon)
    assert got == pytest.approx(want, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("q", [1e-3, 0.2, 1.0])
@pytest.mark.parametrize(("a", "b"), [(0.5, 0.0), (0.0, -0.5), (2.0, -2.0)])
@pytest.mark.parametrize("epsilon", [-0.1, 0.05, 1.0])
def test_delta_of_mixtures_is_the_integral_that_defines_it(q, a, b, epsilon):
    def density(x: float, shift: float) -> float:
        norm = scipy.stats.norm
        return float((1 - q) * norm.pdf(x) + q * norm.pdf(x, shift))

    def excess(x: float) -> float:
        return max(density(x, a) - math.exp(epsilon) * density(x, b), 0.0)

    want = sum(
        scipy.integrate.quad(excess, x, x + 3, epsabs=1e-10, limit=200)[0]
        for x in range(-12, 12, 3)
    )
    got = consistency._mixture_delta(q, a, b, epsilon)
    assert got == pytest.approx(want, rel=1e-6, abs=1e-8)
