"""Attacks: scores of a run's transcript, larger for the first of two data sets.

Each attack learns its parameters from transcripts of both data sets, and then scores
others. Transcripts are (runs, T, R), float32, in standard deviations of the claimed
noise: R numbers that each of T steps released.
"""

import math
from collections.abc import Callable

import numpy as np

from jaxdp.auditing.canaries import Canary, phases
from jaxdp.mechanism.sum_plan import SumPlan
from jaxdp.o2nc.plan import O2NC

#: From transcripts (n, T, R) to finite scores (n,), larger for the first data set.
Score = Callable[[np.ndarray], np.ndarray]

_BINS = 64  # a step
# Relative to the mean variance: far above what float32 rounds, far below any noise.
_RIDGE = 1e-9


def attacks(
    plan: SumPlan, canary: Canary, first: np.ndarray, second: np.ndarray
) -> dict[str, Score]:
    """Returns all attacks by name, learned from transcripts of the canary's two data sets.

    * *likelihood ratio*: the claimed one, along the canary's direction; with sampled
      batches of the mixture of steps that read the canary and steps that do not; with
      correlated noise after that was undone. Of ``plans.O2NC`` it reads no norms.
    * *linear*: the difference of means over the covariance (Fisher's discriminant). It
      finds what noise has in common between steps, for what cancels has no variance.
    * *histogram*: ratios of counts, step by step. It finds any other law: a scale, a
      missing mixture; and a release that is not finite has a count of its own.
    """
    inclusion = _inclusion(plan)
    project = _projection(canary, first, second, inclusion)
    if isinstance(plan, O2NC) and not plan.multi_pass:
        claimed = _whitened(plan, canary, first, second)
    elif isinstance(plan, O2NC):
        along = _projection(canary, first[..., :-1], second[..., :-1], inclusion)
        ratio = _likelihood_ratio(plan, canary, along, inclusion)
        claimed = lambda x: ratio(x[..., :-1])  # noqa: E731
    else:
        claimed = _likelihood_ratio(plan, canary, project, inclusion)
    return {
        "likelihood ratio": claimed,
        "linear": linear(first, second),
        "histogram": histogram(project, first, second),
    }


def _inclusion(plan: SumPlan) -> np.ndarray:
    """Returns the probability (T,) that a step reads the canary; ones without sampling."""
    if not plan.sampling.amplifies:
        return np.ones(plan.num_steps)
    n, read = plan.num_examples, {}
    for phase in plan.phases:
        sampler = plan.sampling.of_phase(phase.name)
        read[phase.name] = min(sampler.expected_batch_size(n), sampler.rows(n)) / n
    return np.array([read[name] for name in phases(plan)])


def _projection(
    canary: Canary, first: np.ndarray, second: np.ndarray, inclusion: np.ndarray
) -> Score:
    """Returns a projection of transcripts onto each step's canary direction: (n, T).

    Its origin is the mean without the canary.

    The direction of a step is public, and learned from the difference of the means; so is
    the location, which takes with it all that the direction root determines.
    """
    means = [finite(x).mean(axis=0) for x in (first, second)]
    difference = means[0] - means[1]
    length = np.linalg.norm(difference, axis=-1, keepdims=True)
    along = difference / np.maximum(length, 1e-30)
    middle = np.sum((means[0] + means[1]) / 2 * along, axis=-1)
    known = inclusion * np.mean(canary.moves(len(middle)), axis=0)

    def project(x: np.ndarray) -> np.ndarray:
        return np.einsum("ntr,tr->nt", x, along) - middle + known

    return project


def _likelihood_ratio(
    plan: SumPlan, canary: Canary, project: Score, inclusion: np.ndarray
) -> Score:
    with np.errstate(divide="ignore"):
        stay, read = np.log1p(-inclusion), np.log(inclusion)

    def log_noise(x: np.ndarray) -> np.ndarray:
        if plan.noise == "laplace":
            return -math.sqrt(2) * np.abs(x)
        return -np.square(x) / 2

    def log_law(x: np.ndarray, moved: np.ndarray) -> np.ndarray:
        return np.logaddexp(stay + log_noise(x), read + log_noise(x - moved))

    def score(transcripts: np.ndarray) -> np.ndarray:
        x = finite(project(transcripts))
        here, there = (log_law(x, moved) for moved in canary.moves(x.shape[1]))
        return (here - there).sum(axis=-1)

    return score


def _whitened(
    plan: O2NC, canary: Canary, first: np.ndarray, second: np.ndarray
) -> Score:
    r"""Returns the likelihood ratio of one period of correlated noise, up to a constant.

    The increments x of the period are a mean plus :math:`C^{-1}\xi`; the record moves the
    mean of leaf i alone, along one direction. So :math:`Cx` has independent noise, is moved
    along :math:`Ce_i`, and :math:`\langle Ce_i, Cx\rangle` tells all.
    """
    assert canary.step is not None
    length, leaf = plan.noise_period, canary.step % plan.noise_period
    begin = canary.step - leaf
    steps = slice(begin, min(begin + length, plan.num_steps))
    count = steps.stop - begin
    strategy = plan.correlation.strategy()[:count, :count]
    weights = strategy.T @ strategy[:, leaf]

    def weighed(x: np.ndarray) -> np.ndarray:
        return np.einsum("t,ntr->nr", weights, finite(x[:, steps, :-1]))

    along = weighed(first).mean(axis=0) - weighed(second).mean(axis=0)
    along /= max(float(np.linalg.norm(along)), 1e-30)

    def score(transcripts: np.ndarray) -> np.ndarray:
        return weighed(transcripts) @ along

    return score


def linear(first: np.ndarray, second: np.ndarray) -> Score:
    """Returns Fisher's linear discriminant, learned from transcripts of two data sets."""
    rows = [finite(x).reshape(len(x), -1) for x in (first, second)]
    centred = [x - x.mean(axis=0) for x in rows]
    covariance = np.mean([x.T @ x / len(x) for x in centred], axis=0)
    scale = np.trace(covariance) / len(covariance) or 1.0
    ridge = _RIDGE * scale * np.eye(len(covariance))
    difference = rows[0].mean(axis=0) - rows[1].mean(axis=0)
    weights = np.linalg.solve(covariance + ridge, difference)

    def score(transcripts: np.ndarray) -> np.ndarray:
        return finite(transcripts).reshape(len(transcripts), -1) @ weights

    return score


def histogram(project: Score, first: np.ndarray, second: np.ndarray) -> Score:
    """Returns the score that sums log count ratios of projected transcripts, by column."""
    rows = [project(x) for x in (first, second)]
    edges, log_ratio = [], []
    for both in zip(*(x.T for x in rows), strict=True):
        pooled = finite(np.concatenate(both))
        cuts = np.unique(np.quantile(pooled, np.linspace(0, 1, _BINS + 1)[1:-1]))
        counts = [
            np.bincount(_bins(x, cuts), minlength=len(cuts) + 2) + 1 for x in both
        ]
        edges.append(cuts)
        log_ratio.append(np.log(counts[0] / counts[1]))

    def score(transcripts: np.ndarray) -> np.ndarray:
        steps = zip(project(transcripts).T, edges, log_ratio, strict=True)
        return sum((ratio[_bins(x, cuts)] for x, cuts, ratio in steps), np.zeros(()))

    return score


def _bins(x: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Returns the bin of each number; numbers that are not finite have the last bin."""
    finite = np.isfinite(x)
    inside = np.searchsorted(cuts, np.where(finite, x, 0), side="right")
    return np.where(finite, inside, len(cuts) + 1)


def finite(x: np.ndarray) -> np.ndarray:
    """Returns the array as float64, with zeros for numbers that are not finite."""
    return np.where(np.isfinite(x), x, 0).astype(np.float64)
