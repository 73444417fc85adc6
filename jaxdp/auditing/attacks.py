"""Attacks: scores of a run's transcript, larger for the first of two data sets.

Each attack learns its parameters from transcripts of both data sets, and then scores
others. Transcripts are (runs, T, R), float32, in standard deviations of the claimed
noise: R numbers that each of T steps released.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.auditing.canaries import Canary, phases

#: From transcripts (n, T, R) to finite scores (n,), larger for the first data set.
Score = Callable[[np.ndarray], np.ndarray]

_BINS = 64  # a step
# Relative to the mean variance: far above what float32 rounds, far below any noise.
_RIDGE = 1e-9


def attacks(
    plan: Any, canary: Canary, first: np.ndarray, second: np.ndarray, *, logged: int = 0
) -> dict[str, Score]:
    """Returns all attacks by name, learned from transcripts of the canary's two data sets.

    * *likelihood ratio*: the claimed one, along the canary's direction; with sampled
      batches of the mixture of steps that read the canary and steps that do not; with
      correlated noise after that was undone.
    * *linear*: the difference of means over the covariance (Fisher's discriminant). It
      finds what noise has in common between steps, for what cancels has no variance.
    * *histogram*: ratios of counts, step by step. It finds any other law: a scale, a
      missing mixture; and a release that is not finite has a count of its own.

    The likelihood ratio leaves out the last ``logged`` numbers of a step, which follow from
    the others.
    """
    inclusion = _inclusion(plan, canary.first.index)
    project = _projection(canary, first, second, inclusion)
    width = first.shape[-1] - logged
    noised = first[..., :width], second[..., :width]
    if canary.weights is not None:
        claimed = _weighed(canary.weights, noised[0], noised[1])
    else:
        along = _projection(canary, *noised, inclusion)
        claimed = _likelihood_ratio(plan, canary, along, inclusion)
    return {
        "likelihood ratio": lambda x: claimed(x[..., :width]),
        "linear": linear(first, second),
        "histogram": histogram(project, first, second),
    }


def _inclusion(plan: Any, record: int) -> np.ndarray:
    """Returns the probability (T,) that a step reads a record; ones without sampling."""
    if not plan.sampling.amplifies:
        return np.ones(plan.num_steps)
    steps = enumerate(map(plan.sampling.of_phase, phases(plan)))
    n = plan.num_examples
    return np.array([sampler.inclusion(record, step, n) for step, sampler in steps])


def _projection(
    canary: Canary, first: np.ndarray, second: np.ndarray, inclusion: np.ndarray
) -> Score:
    """Returns a projection of transcripts onto each step's canary direction: (n, T).

    Its origin is the mean without the canary. The direction of a step is public, and
    learned from the difference of the means; so is the location, which takes with it all
    that the direction root determines.
    """
    one, other = (finite(x).mean(axis=0) for x in (first, second))
    difference = one - other
    length = np.linalg.norm(difference, axis=-1, keepdims=True)
    along = difference / np.maximum(length, 1e-30)
    middle = np.sum((one + other) / 2 * along, axis=-1)
    known = inclusion * np.mean(canary.shifts(), axis=0)
    return lambda x: np.einsum("ntr,tr->nt", x, along) - middle + known


def _likelihood_ratio(
    plan: Any, canary: Canary, project: Score, inclusion: np.ndarray
) -> Score:
    with np.errstate(divide="ignore"):
        stay, read = np.log1p(-inclusion), np.log(inclusion)

    def log_noise(x: np.ndarray) -> np.ndarray:
        laplace = plan.noise == "laplace"
        return -math.sqrt(2) * np.abs(x) if laplace else -np.square(x) / 2

    def log_law(x: np.ndarray, moved: np.ndarray) -> np.ndarray:
        return np.logaddexp(stay + log_noise(x), read + log_noise(x - moved))

    def score(transcripts: np.ndarray) -> np.ndarray:
        x = finite(project(transcripts))
        here, there = (log_law(x, moved) for moved in canary.shifts())
        return (here - there).sum(axis=-1)

    return score


def _weighed(weights: np.ndarray, first: np.ndarray, second: np.ndarray) -> Score:
    """Returns the weighed sum of steps, along the direction in which the means differ."""

    def weighed(x: np.ndarray) -> np.ndarray:
        return np.einsum("t,ntr->nr", weights, finite(x))

    along = weighed(first).mean(axis=0) - weighed(second).mean(axis=0)
    along /= max(float(np.linalg.norm(along)), 1e-30)
    return lambda transcripts: weighed(transcripts) @ along


def linear(first: np.ndarray, second: np.ndarray) -> Score:
    """Returns Fisher's linear discriminant, learned from transcripts of two data sets."""
    rows = [finite(x).reshape(len(x), -1) for x in (first, second)]
    centred = [x - x.mean(axis=0) for x in rows]
    covariance = np.mean([x.T @ x / len(x) for x in centred], axis=0)
    scale = np.trace(covariance) / len(covariance) or 1.0
    ridge = _RIDGE * scale * np.eye(len(covariance))
    difference = rows[0].mean(axis=0) - rows[1].mean(axis=0)
    weights = np.linalg.solve(covariance + ridge, difference)
    return lambda x: finite(x).reshape(len(x), -1) @ weights


def histogram(project: Score, first: np.ndarray, second: np.ndarray) -> Score:
    """Returns the score that sums log count ratios of projected transcripts, by column."""
    edges, log_ratio = [], []
    for both in zip(*(project(x).T for x in (first, second)), strict=True):
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
    inside = np.searchsorted(cuts, finite(x), side="right")
    return np.where(np.isfinite(x), inside, len(cuts) + 1)


def finite(x: np.ndarray) -> np.ndarray:
    """Returns the array as float64, with zeros for numbers that are not finite."""
    return np.where(np.isfinite(x), x, 0).astype(np.float64)
