"""The exact trade-off between epsilon and delta of a Gaussian of distance mu."""

import math
from collections.abc import Callable

import numpy as np
import scipy.optimize
from scipy.special import log_ndtr, ndtri

from jaxdp.core import validate


def gaussian_delta(mu: float, epsilon: float) -> float:
    r"""Computes the least delta at ``epsilon`` for telling N(0, 1) from N(mu, 1).

    .. math::
      \Phi(-\varepsilon/\mu + \mu/2) - e^\varepsilon \Phi(-\varepsilon/\mu - \mu/2)

    References:
      Balle & Wang, `Improving the Gaussian Mechanism
      <https://arxiv.org/abs/1805.06530>`_, 2018, Theorem 8.
    """
    if mu == 0 or epsilon == math.inf:
        return 0.0
    if mu == math.inf:
        return 1.0
    upper = log_ndtr(mu / 2 - epsilon / mu)
    lower = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(-np.exp(upper) * np.expm1(min(lower - upper, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Computes the least epsilon >= 0 with :func:`gaussian_delta` at most ``delta``.

    Args:
      mu: >= 0 or infinity.
      delta: in (0, 1).
    """
    validate.probability(delta=delta)
    if not mu >= 0:
        raise ValueError(f"mu must be a number >= 0 or infinity, got {mu!r}")
    if mu == math.inf:
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    # There the formula's first term alone is below delta.
    high = mu * (mu / 2 - float(ndtri(delta)) + 1e-6)
    x = root(lambda e: gaussian_delta(mu, e) - delta, 0.0, high)
    return raised_until(lambda e: gaussian_delta(mu, e) <= delta, x)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Computes the largest mu with ``gaussian_delta(mu, epsilon) <= delta``.

    T Gaussian sums are (epsilon, delta)-DP if and only if ``sqrt(T) / noise_multiplier``
    is at most this.

    Args:
      epsilon: >= 0, finite.
      delta: in (0, 1).
    """
    validate.non_negative(epsilon=epsilon)
    validate.probability(delta=delta)

    def enough(noise: float) -> bool:
        return gaussian_delta(1 / noise, epsilon) <= delta

    low = high = 1.0
    while enough(low):
        low /= 2
    while not enough(high):
        high *= 2
    noise = root(lambda m: gaussian_delta(1 / m, epsilon) - delta, low, high)
    return 1 / raised_until(enough, noise)


def gaussian_rho(noise_multiplier: float, num_steps: int = 1) -> float:
    r"""Computes the zCDP of Gaussian sums: :math:`T / 2 m^2`, the least of any sequence.

    Args:
      noise_multiplier: m > 0, std over the sensitivity.
      num_steps: T >= 1.
    """
    validate.positive(noise_multiplier=noise_multiplier)
    validate.integer(num_steps=num_steps)
    return num_steps / (2 * noise_multiplier**2)


def root(
    f: Callable[[float], float], low: float, high: float, xtol: float = 1e-300
) -> float:
    """Finds a root of ``f`` between points of opposite sign, by default to all digits."""
    return float(scipy.optimize.brentq(f, low, high, xtol=xtol))  # pyright: ignore[reportArgumentType]


def raised_until(
    enough: Callable[[float], bool], x: float, step: float = 1e-15
) -> float:
    """Increases ``x`` in small, growing steps until ``enough(x)`` holds.

    A computed root may lie on either side of the exact one.
    """
    while not enough(x):
        x, step = x * (1 + step), 2 * step
    return x
