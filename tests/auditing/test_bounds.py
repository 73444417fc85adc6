"""From errors to epsilon: exact coverage, known trade-offs, synthetic mechanisms."""

import math

import numpy as np
import pytest
import scipy.stats
from scipy.special import ndtr

from jaxdp.accounting import gaussian_epsilon
from jaxdp.auditing import bounds

DELTA = 1e-5
FAILURE = 1e-6


@pytest.mark.parametrize("failure", [0.05, 1e-3, 1e-6])
def test_upper_limit_covers_by_exact_enumeration(failure: float) -> None:
    count = np.arange(41)
    limits = bounds.upper_limit(count, 40, failure)
    assert np.all(np.diff(limits) > 0)
    assert limits[-1] == 1
    # Just above a limit the coverage is least.
    truths = np.concatenate(
        [np.linspace(1e-6, 1 - 1e-6, 999), limits[:-1] * (1 + 1e-9)]
    )
    for truth in truths:
        below = limits < truth
        assert scipy.stats.binom.pmf(count, 40, truth)[below].sum() <= failure * (
            1 + 1e-6
        )
    # And it is tight: no smaller limit covers.
    at = limits[:-1]
    np.testing.assert_allclose(scipy.stats.binom.cdf(count[:-1], 40, at), failure, 1e-6)


def test_upper_limit_is_clopper_and_pearson() -> None:
    two_sided = scipy.stats.binomtest(7, 500).proportion_ci(1 - 2e-4, method="exact")
    assert float(bounds.upper_limit(7, 500, 1e-4)) == pytest.approx(two_sided.high)


def test_error_rates_count_strictly_above_the_threshold() -> None:
    first, second = np.array([1.0, 2.0, 2.0, 3.0]), np.array([0.0, 2.0, 5.0])
    false_positive, false_negative = bounds.error_rates(
        first, second, np.array([2.0]), failure_prob=0.02
    )
    assert false_positive == bounds.upper_limit(1, 3, 0.01)  # 5
    assert false_negative == bounds.upper_limit(3, 4, 0.01)  # 1, 2, 2


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_exact_errors_of_gaussians(mu: float) -> None:
    truth = gaussian_epsilon(mu, DELTA)
    by_definition = []
    for at in np.linspace(-3, mu + 5, 60):
        errors = float(ndtr(-at)), float(ndtr(at - mu))
        found, rule = bounds.epsilon_lower(*errors, bounds.Rule(DELTA, FAILURE, True))
        assert rule == "Gaussian trade-off"
        assert found == pytest.approx(truth, rel=1e-6)
        found, rule = bounds.epsilon_lower(*errors, bounds.Rule(DELTA, FAILURE, False))
        assert rule == "definition of (epsilon, delta)"
        assert found <= truth * (1 + 1e-9)
        by_definition.append(found)
    assert max(by_definition) > 0.9 * truth


def test_randomised_response_is_met_exactly() -> None:
    flip = 1 / (1 + math.exp(1.5))
    for delta in (0.0, 1e-3):
        rule = bounds.Rule(delta, FAILURE, False)
        found, _ = bounds.epsilon_lower(flip, flip, rule)
        assert found == pytest.approx(math.log((1 - flip - delta) / flip))
    assert bounds.epsilon_lower(flip, flip, bounds.Rule(0.0, FAILURE, False))[
        0
    ] == pytest.approx(1.5)


def test_useless_and_perfect_attacks() -> None:
    for gaussian in (True, False):
        rule = bounds.Rule(DELTA, FAILURE, gaussian)
        assert bounds.epsilon_lower(1.0, 1.0, rule)[0] == 0
        assert bounds.epsilon_lower(0.5, 0.5, rule)[0] == 0
        same = np.random.default_rng(0).normal(size=1000)
        assert bounds.best_threshold(same, same, rule)[1] == 0
        # Two atoms, either way round.
        ones, zeros = np.ones(1000), np.zeros(1000)
        threshold, best = bounds.best_threshold(ones, zeros, rule)
        assert 0 <= threshold < 1
        assert best > math.log(1000 / 20)


def _audited(mu: float, *, runs: int, seed: int, gaussian: bool) -> float:
    """The bound for one Gaussian at distance mu: chosen on half, tested on half."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(mu, 1, 2 * runs), rng.normal(0, 1, 2 * runs)
    rule = bounds.Rule(DELTA, FAILURE, gaussian)
    threshold, _ = bounds.best_threshold(first[:runs], second[:runs], rule)
    errors = bounds.error_rates(
        first[runs:], second[runs:], threshold, failure_prob=FAILURE
    )
    return bounds.epsilon_lower(float(errors[0]), float(errors[1]), rule)[0]


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_synthetic_gaussian_is_bounded_closely(mu: float) -> None:
    """Each bound is above the truth with probability at most 1e-6."""
    truth = gaussian_epsilon(mu, DELTA)
    for seed in range(3):
        assert (
            0.88 * truth < _audited(mu, runs=150_000, seed=seed, gaussian=True) < truth
        )
        assert (
            0.4 * truth < _audited(mu, runs=150_000, seed=seed, gaussian=False) < truth
        )


def test_half_the_noise_is_flagged() -> None:
    claimed = gaussian_epsilon(0.5, DELTA)
    assert _audited(1.0, runs=10_000, seed=0, gaussian=True) > 1.5 * claimed
    assert _audited(1.0, runs=100_000, seed=0, gaussian=False) > claimed


def test_failure_probability_is_kept() -> None:
    """At failure 0.1, 400 tests of a fixed threshold: more than 40 + 5 std is 4e-7."""
    rng = np.random.default_rng(3)
    truth = float(ndtr(-0.5))
    wrong = 0
    for _ in range(400):
        first, second = rng.normal(1, 1, 300), rng.normal(0, 1, 300)
        a, b = bounds.error_rates(first, second, 0.5, failure_prob=0.1)
        wrong += bool(a < truth or b < truth)
    assert 0 < wrong < 40 + 5 * math.sqrt(400 * 0.1 * 0.9)
