"""Divergences between two enumerated laws of a vertex draw."""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from jaxdp.auditing import draws


class Comparison(NamedTuple):
    """Divergences between the vertex laws of two neighbouring data sets."""

    bounded_range: float  # of the logarithms of the ratios of probabilities
    delta: float  # of (epsilon, delta)-privacy, exact, at a given epsilon
    rho: float  # largest Renyi divergence over its order, of either direction


def compare(first: np.ndarray, second: np.ndarray, epsilon: float) -> Comparison:
    """Compares two laws (d,) at ``epsilon``, leaving out vertices that neither can draw."""
    drawn = (first > 0) | (second > 0)
    p, q = (np.maximum(x[drawn], draws.LEAST) for x in (first, second))
    ratio = np.log(p) - np.log(q)
    delta = max(
        float(np.sum(np.maximum(a - math.exp(epsilon) * b, 0)))
        for a, b in ((first, second), (second, first))
    )
    rho = max(
        float(np.asarray(logsumexp((k - 1) * r, b=a))) / (k - 1) / k
        for k in (1.5, 2, 4, 8, 32)
        for a, r in ((p, ratio), (q, -ratio))
    )
    return Comparison(draws.bounded_range(first, second), delta, rho)
