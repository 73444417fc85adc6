"""When a figure of the stationary-point study agrees with one of other runs.

A prototype is known by medians, maxima and shares of some runs, and none
of their values. If those runs and ours have one distribution, whatever it is, then

* the rank of an order statistic of theirs among our values has a known law, so that there
  is an interval of our values in which it lies with probability 95%;
* given how many of all runs were certified, how many of them are ours is hypergeometric
  (Fisher's exact test).

A figure *agrees* if it is inside of the interval, widened by half a unit of its last digit,
or has a p-value of at least 5%. Of many that agree in truth one in twenty does not; so it
*differs*, and is *far off* only where the same holds at 99.9%.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

CONFIDENCE, CERTAIN = 0.95, 0.999
#: The verdict where there are too few runs for one.
UNKNOWN = "too few runs"


class Told(NamedTuple):
    """A figure of some runs, as it was written down: rounded to ``unit``."""

    value: float
    runs: int
    unit: float


class Interval(NamedTuple):
    low: float
    high: float


class Compared(NamedTuple):
    """A figure beside that of other runs, the 95% interval for theirs, and the verdict."""

    value: float
    told: Told
    interval: Interval
    verdict: str


class Slope(NamedTuple):
    """Of a straight line, with its standard error."""

    value: float
    error: float


def order_interval(
    values: Sequence[float] | np.ndarray,
    runs: int,
    rank: int,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Where the ``rank``-th smallest of ``runs`` more values lies, with this probability.

    Distribution-free; infinite on a side on which so few values say nothing.

    Args:
      values: independent, of the distribution of those to come.
      runs: how many those are.
      rank: from 1 to ``runs``.
      confidence: of the interval, shared equally by its sides.
    """
    ordered = [-math.inf, *np.sort(np.asarray(values, np.float64)), math.inf]
    below = np.cumsum(_below(len(values), runs, rank))
    side = (1 - confidence) / 2
    # k of ours are below it: then it lies between the k-th and the next.
    low = int(np.searchsorted(below, side, side="right"))
    above = np.cumsum(_below(len(values), runs, runs + 1 - rank))
    high = len(values) + 1 - int(np.searchsorted(above, side, side="right"))
    return Interval(float(ordered[low]), float(ordered[high]))


@functools.cache
def _below(ours: int, runs: int, rank: int) -> np.ndarray:
    """Probability that k of ours are below their ``rank``-th smallest, k = 0 .. ours."""
    ways = math.comb(ours + runs, runs)
    found = [
        math.comb(k + rank - 1, k) * math.comb(ours - k + runs - rank, ours - k) / ways
        for k in range(ours + 1)
    ]
    return np.array(found)


def median_interval(
    values: Sequence[float] | np.ndarray, told: Told, confidence: float = CONFIDENCE
) -> Interval:
    """Where the median of their runs lies; of an even number, the middle two."""
    low = order_interval(values, told.runs, (told.runs + 1) // 2, confidence).low
    high = order_interval(values, told.runs, told.runs // 2 + 1, confidence).high
    return Interval(low - told.unit / 2, high + told.unit / 2)


def largest_interval(
    values: Sequence[float] | np.ndarray, told: Told, confidence: float = CONFIDENCE
) -> Interval:
    """Where the largest of their runs lies."""
    low, high = order_interval(values, told.runs, told.runs, confidence)
    return Interval(low - told.unit / 2, high + told.unit / 2)


def verdict(inside: Sequence[bool]) -> str:
    """Of whether a figure is inside at 95%, and at 99.9%."""
    agrees, possible = inside
    return "agrees" if agrees else "differs" if possible else "far off"


def compare(
    value: float,
    values: Sequence[float] | np.ndarray,
    told: Told,
    interval_of: Callable[..., Interval],
) -> Compared:
    """Whether their figure lies where such runs as ours have it."""
    found = [interval_of(values, told, level) for level in (CONFIDENCE, CERTAIN)]
    if not any(map(math.isfinite, found[0])):
        return Compared(value, told, found[0], UNKNOWN)
    inside = [i.low <= told.value <= i.high for i in found]
    return Compared(value, told, found[0], verdict(inside))


def judge_share(ours: int, of: int, theirs: int, runs: int) -> str:
    """Whether two counts of successes agree: Fisher's exact test."""
    table = [[ours, of - ours], [theirs, runs - theirs]]
    _, p = scipy.stats.fisher_exact(table)
    p = float(p)  # pyright: ignore[reportArgumentType]
    return verdict([p >= 1 - CONFIDENCE, p >= 1 - CERTAIN])


def share_interval(count: int, of: int, confidence: float = CONFIDENCE) -> Interval:
    """Of a probability, from its successes: Clopper and Pearson's, exact."""
    found = scipy.stats.binomtest(count, of).proportion_ci(confidence, method="exact")
    return Interval(float(found.low), float(found.high))


def spread(values: Sequence[float] | np.ndarray) -> Interval:
    """Of the median of the distribution: the order statistics at 95%, distribution-free."""
    ordered = np.sort(np.asarray(values, np.float64))
    num = len(ordered)
    cut = int(scipy.stats.binom.ppf((1 - CONFIDENCE) / 2, num, 0.5))
    if cut == 0:
        return Interval(-math.inf, math.inf)
    return Interval(float(ordered[cut - 1]), float(ordered[num - cut]))


def slope(
    sizes: Sequence[float], values: Sequence[Sequence[float] | np.ndarray]
) -> Slope:
    """Of the logarithm of each value in that of its size: least squares over all runs.

    The error is that of the regression's residuals: it holds what the seeds scatter, and
    how far a straight line is off.
    """
    x = np.log(np.repeat(sizes, [len(of) for of in values]))
    y = np.log(np.concatenate([np.asarray(of, np.float64) for of in values]))
    x, y = x - x.mean(), y - y.mean()
    value = float(x @ y / (x @ x))
    rest = float(np.sum((y - value * x) ** 2)) / (len(x) - 2)
    return Slope(value, math.sqrt(rest / float(x @ x)))
