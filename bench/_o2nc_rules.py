"""Statistics of the scaling study: slopes, and the records that a norm needs."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

from bench import _harness
from bench import _sosp_rules as rules

#: Draws of a bootstrap.
DRAWS = 2000
Runs = Mapping[int, np.ndarray]  # size -> a number a seed


def slope(runs: Runs) -> _harness.Mean:
    """Of the logarithm of all values in that of their size, with its 95% interval.

    Least squares over all runs: the interval holds what the seeds scatter, and how far a
    straight line is off.
    """
    values = [np.asarray(v, np.float64) for v in runs.values()]
    found = rules.slope(list(runs), values)
    free = sum(map(len, values)) - 2
    half = float(scipy.stats.t.ppf(0.975, free)) * found.error
    return _harness.Mean(found.value, half)


# --- records that a norm needs -------------------------------------------------------


class Needed(NamedTuple):
    """Records at which a curve falls to a norm; below its least size, or beyond all."""

    records: float
    beyond: str = ""  # "below" the least size, "above" the largest, or neither


class Ratio(NamedTuple):
    """Of two needed sizes, with its 95% interval; ``bound`` where a curve is too short."""

    value: float
    low: float
    high: float
    bound: str  # "at most", "at least", "not known" or ""

    def __str__(self) -> str:
        interval = f"[{self.low:.2g}, {self.high:.2g}] (95%)"
        return f"{self.bound} {self.value:.2g}; {interval}" if self.bound else interval


def reached(sizes: Sequence[int], norms: Sequence[float], norm: float) -> Needed:
    """Where a curve first falls to a norm, on lines between logarithms."""
    if norms[0] <= norm:
        return Needed(float(sizes[0]), "below")
    for i in range(1, len(sizes)):
        if norms[i] <= norm:
            before, after = norms[i - 1], norms[i]
            share = math.log(before / norm) / math.log(before / max(after, 1e-300))
            return Needed(sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** share)
    return Needed(float(sizes[-1]), "above")


def needed_ratio(
    ours: Runs, theirs: Runs, norm: float, *, seed: int = 0, draws: int = DRAWS
) -> Ratio:
    """Records that ours needs over those that theirs needs, for a mean norm.

    The interval is a bootstrap's over the seeds of every size. The ends of a curve that is
    above the norm, or below it, stand for what it needs: then the ratio is a bound.
    """
    rng = np.random.default_rng(seed)

    def needed(runs: Runs, again: bool) -> Needed:
        values = [np.asarray(v) for v in runs.values()]
        if again:
            values = [rng.choice(v, len(v)) for v in values]
        return reached(list(runs), [float(v.mean()) for v in values], norm)

    def ratio(again: bool) -> float:
        return needed(ours, again).records / needed(theirs, again).records

    bounds = {
        {"below": "at most", "above": "at least"}.get(needed(ours, False).beyond),
        {"below": "at least", "above": "at most"}.get(needed(theirs, False).beyond),
    } - {None}
    spread = [ratio(True) for _ in range(draws)]
    low, high = np.quantile(spread, [0.025, 0.975])
    bound = "not known" if len(bounds) > 1 else str(*bounds)
    return Ratio(ratio(False), float(low), float(high), bound)
