"""Choice of the smoothing parameter, and settings of the smoothing theorem."""

import math
from typing import NamedTuple

from jaxdp.core import validate


def lasry_lions_smoothing(goldstein_radius: float, lipschitz: float) -> float:
    r"""Returns the smoothing alpha / (3 L), whose stationary points are stationary for h.

    A point at which the gradient of :math:`\tilde h_\lambda` is at most beta is
    :math:`(\alpha,\beta)`-Goldstein stationary for h: the gradient is a mean of
    subgradients of h within :math:`3\lambda L` of x (Lemma B.3).

    Args:
      goldstein_radius: alpha > 0, in units of x.
      lipschitz: L > 0, in units of h / x.

    Returns:
      The smoothing lambda, in units of x^2 / h.

    Raises:
      ValueError: a number that is not positive.
    """
    validate.positive(goldstein_radius=goldstein_radius, lipschitz=lipschitz)
    return goldstein_radius / (3 * lipschitz)


class LasryLionsSettings(NamedTuple):
    """Settings of Theorem B.5, with hidden constants and logarithms set to 1.

    Attributes:
      smoothing: lambda, of every record's loss.
      smoothness: 1 / lambda, of the smoothed losses.
      num_examples: records that suffice.
      printed_num_examples: by the printed formula; for comparison only, its units do not
        match.
    """

    smoothing: float
    smoothness: float
    num_examples: float
    printed_num_examples: float


def lasry_lions_settings(
    *,
    dim: int,
    epsilon: float,
    lipschitz: float,
    goldstein_radius: float,
    goldstein_norm: float,
    distance: float,
) -> LasryLionsSettings:
    r"""Computes the settings of Theorem B.5, corrected; numbers only.

    .. math:: \lambda=\frac{\alpha}{3L},\qquad n=\frac{R^{1/3}Ld^{2/3}}{\varepsilon
      \alpha^{1/3}\beta}+\frac{L\sqrt d}{\varepsilon\beta}

    The smoothed losses go to a private solver for smooth losses that takes exponential time
    (Lowy, Ullman and Wright, 2024). It is not part of this library, so nothing here makes a
    release. The point that it returns is stationary component by component
    (:func:`lasry_lions_mean`), a weaker notion than Goldstein's for the mean loss.

    The paper prints :math:`L^{4/3}` for L, from a smoothness of :math:`L/\lambda` where
    :math:`1/\lambda` holds, and drops the second term, which is the smaller one only if
    :math:`R\sqrt d\ge\alpha`.

    Args:
      dim: d.
      epsilon: of (epsilon, delta); the theorem hides log(1 / delta).
      lipschitz: L, of every record's loss.
      goldstein_radius: alpha > 0.
      goldstein_norm: beta > 0, wanted.
      distance: R > 0, at least the distance from x0 to the minimisers of the mean of the
        *smoothed* losses. They are not those of the mean loss: for 2 |x| and |x - 1| at
        lambda = 0.1 these are 0.1 and 0.

    Returns:
      :class:`LasryLionsSettings`.

    Raises:
      TypeError, ValueError: a number of another type or out of its range.
    """
    validate.integer(dim=dim)
    validate.positive(epsilon=epsilon, goldstein_norm=goldstein_norm, distance=distance)
    smoothing = lasry_lions_smoothing(goldstein_radius, lipschitz)
    leading = (distance * dim**2 / goldstein_radius) ** (1 / 3)
    leading /= epsilon * goldstein_norm
    second = lipschitz * math.sqrt(dim) / (epsilon * goldstein_norm)
    return LasryLionsSettings(
        smoothing=smoothing,
        smoothness=1 / smoothing,
        num_examples=leading * lipschitz + second,
        printed_num_examples=leading * lipschitz ** (4 / 3),
    )
