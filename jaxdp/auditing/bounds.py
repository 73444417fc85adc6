"""Lower bounds on epsilon from the errors of an attack."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import scipy.stats
from scipy.special import ndtri

from jaxdp import accounting
from jaxdp.accounting import gaussian_epsilon
from jaxdp.core import validate

#: Orders of Renyi divergences at which zCDP is put to the test.
_ORDERS = np.concatenate([1 + np.geomspace(1e-3, 1, 20), np.geomspace(2.1, 60, 40)])


class Rule(NamedTuple):
    """Settings of a lower bound: delta, failure probability, and the claimed guarantee."""

    delta: float  # in [0, 1)
    failure_prob: float  # in (0, 1), of a bound above the truth
    gaussian: bool = False  # whether a sequence of Gaussians is claimed
    zcdp: bool = False  # whether zero-concentrated differential privacy is
    per_root_rho: float | None = (
        None  # pure epsilon over sqrt(rho), where that is claimed
    )


def upper_limit(
    count: int | np.ndarray, trials: int, failure_prob: float
) -> np.ndarray:
    """Returns Clopper and Pearson's upper limit of a probability, of successes in trials.

    With probability ``failure_prob``, at most, the limit is below the truth.
    """
    validate.integer(trials=trials)
    validate.probability(failure_prob=failure_prob)
    count = np.asarray(count)
    others = np.maximum(trials - count, 1)
    limit = scipy.stats.beta.isf(failure_prob, count + 1, others)
    return np.where(count == trials, 1.0, limit)


def error_rates(
    first: np.ndarray,
    second: np.ndarray,
    threshold: float | np.ndarray,
    *,
    failure_prob: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns upper limits of the false-positive rate and the false-negative rate.

    The attack says "the first" where a score, of (n,) and (m,), is above the threshold. For
    a threshold that was fixed without these scores, both limits hold together with
    probability at least ``1 - failure_prob``, however the scores of the two data sets
    depend on one another: each limit gets half of it.
    """
    missed = np.searchsorted(np.sort(first), threshold, side="right")
    rejected = np.searchsorted(np.sort(second), threshold, side="right")
    return (
        upper_limit(len(second) - rejected, len(second), failure_prob / 2),
        upper_limit(missed, len(first), failure_prob / 2),
    )


def epsilon_lower(
    false_positive: float, false_negative: float, rule: Rule
) -> tuple[float, str]:
    r"""Returns the least epsilon that allows such error rates, and the rule that gives it.

    (epsilon, delta)-privacy by its definition allows errors :math:`\alpha, \beta` with

    .. math:: 1 - \beta \le \delta + e^\varepsilon \alpha

    and the same with the two exchanged. Two Gaussians at distance :math:`\mu` allow those
    with :math:`\Phi^{-1}(1 - \alpha) - \Phi^{-1}(\beta) \le \mu`: so a claim of Gaussians
    is refuted by less, and at the mu that is left epsilon follows from delta. So is a
    claim of :math:`\rho`-zCDP: the Renyi divergences of order a of the attack's answers,
    which no post-processing raises, must not exceed :math:`\rho a`. Epsilon follows from
    the least rho that is left, as the accountant has it; a pure epsilon is proportional to
    its root, as sensitivities are. The arguments are upper limits of alpha and beta, in
    (0, 1].
    """
    strengths = _strengths(false_positive, false_negative, rule)
    by_definition = max(float(strengths[1]), 0.0)
    if rule.gaussian:
        by_curve = gaussian_epsilon(max(float(strengths[0]), 0.0), rule.delta)
        if by_curve >= by_definition:
            return by_curve, "Gaussian trade-off"
    if rule.zcdp and strengths[-1] > 0:
        rho = float(strengths[-1])
        if rule.per_root_rho is None:
            by_rho = float(accounting.epsilon(*accounting.zcdp(rho), rule.delta))
        else:
            by_rho = rule.per_root_rho * math.sqrt(rho)
        if by_rho >= by_definition:
            return by_rho, "zCDP"
    return by_definition, "definition of (epsilon, delta)"


def best_threshold(
    first: np.ndarray, second: np.ndarray, rule: Rule
) -> tuple[float, float]:
    """Returns the threshold with the highest bound on these scores, and that bound.

    It is a valid bound only on scores that did not choose the threshold.
    """
    candidates = _candidates(first, second)
    errors = error_rates(first, second, candidates, failure_prob=rule.failure_prob)

    def bound(at: int) -> float:
        return epsilon_lower(float(errors[0][at]), float(errors[1][at]), rule)[0]

    # Each rule's bound rises with its strength.
    best = max((int(np.argmax(x)) for x in _strengths(*errors, rule)), key=bound)
    return float(candidates[best]), bound(best)


class Attempt(NamedTuple):
    """Attack on one canary: its chosen threshold, and the scores that will test it."""

    attack: str
    canary: str
    threshold: float
    promise: float  # the bound that it gives on the runs it was chosen on
    first: np.ndarray  # scores of the runs that are to test it, on the first data set
    second: np.ndarray  # and on the second one


def attempt(
    attack: str,
    canary: str,
    scores: tuple[np.ndarray, np.ndarray],
    choose: int,
    rule: Rule,
) -> Attempt:
    """Returns the attempt with the threshold that the first ``choose`` scores choose."""
    first, second = scores
    chosen = best_threshold(first[:choose], second[:choose], rule)
    return Attempt(attack, canary, *chosen, first[choose:], second[choose:])


class Tested(NamedTuple):
    """Result of the most promising attempt on the scores that did not choose it."""

    attempt: Attempt
    epsilon_lower: float
    how: str  # the rule that gives it
    false_positive: float
    false_negative: float


def tested(attempts: Iterable[Attempt], rule: Rule) -> Tested:
    """Bounds epsilon by the attempt that promises most, on its other scores."""
    # max keeps the scores of one attempt at a time.
    best = max(attempts, key=lambda one: one.promise)
    errors = error_rates(
        best.first, best.second, best.threshold, failure_prob=rule.failure_prob
    )
    false_positive, false_negative = map(float, errors)
    found = epsilon_lower(false_positive, false_negative, rule)
    return Tested(best, *found, false_positive, false_negative)


def _strengths(
    false_positive: float | np.ndarray, false_negative: float | np.ndarray, rule: Rule
) -> tuple[np.ndarray, ...]:
    """Returns the least Gaussian mu and the least epsilon that allow these errors.

    Both may be negative. Where zCDP is claimed, the least rho is the third value.
    """
    alpha, beta = np.asarray(false_positive), np.asarray(false_negative)
    with np.errstate(divide="ignore"):
        accepted = np.log(np.maximum(1 - beta - rule.delta, 0)) - np.log(alpha)
        rejected = np.log(np.maximum(1 - alpha - rule.delta, 0)) - np.log(beta)
    found = -ndtri(alpha) - ndtri(beta), np.maximum(accepted, rejected)
    return (*found, _rho(alpha, beta)) if rule.zcdp else found


def _rho(alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Returns the largest ratio of Renyi divergence to order; 0 if laws may be equal."""
    apart = 1 - beta > alpha

    def over_order(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        p, q, a = p[..., None], q[..., None], _ORDERS
        heads = a * np.log(p) + (1 - a) * np.log(q)
        tails = a * np.log1p(-p) + (1 - a) * np.log1p(-q)
        return np.max(np.logaddexp(heads, tails) / (a - 1) / a, axis=-1)

    first, second = np.where(apart, 1 - beta, 0.5), np.where(apart, alpha, 0.5)
    both = np.maximum(over_order(first, second), over_order(1 - second, 1 - first))
    return np.where(apart, both, 0.0)


def _candidates(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns candidate thresholds: score ranks dense at both ends, and an even grid."""
    found = []
    for scores in (np.sort(first), np.sort(second)):
        last = len(scores) - 1
        tail = np.geomspace(1, last + 1, 100).astype(int) - 1
        ranks = [tail, last - tail, np.linspace(0, last, 200).astype(int)]
        # Evenly spaced too: two clusters are parted where neither has a score.
        found += [scores[np.concatenate(ranks)], np.linspace(scores[0], scores[-1], 50)]
    return np.unique(np.concatenate(found))
