r"""Privacy cost of the draws of mirror descent with vertex sampling: zCDP, and pure.

A vertex is drawn with probability proportional to :math:`e^{s_j}`, s the score. If one
record moves every :math:`s_j` by at most :math:`\Delta`, and the sampler's probabilities
are off by factors within a range of :math:`e^{2e}` in all, then the logarithm of the ratio
of two neighbours' laws ranges over at most :math:`2\Delta + 2e`: the draw is
:math:`\rho`-zCDP with :math:`\rho = (\Delta + e)^2 / 2`. That logarithm is positive
somewhere and negative somewhere, so the draw is purely :math:`(2\Delta + 2e)`-DP as well,
which costs less where draws are few (``pure``). Draws add up, given those before:
of one player at one step, of both players, of all steps. Records of disjoint batches do
not, so the charge is the worst record's. Draws before a record's batch tell nothing of it.

Sensitivities :math:`\Delta` (``delta``, of either player ``delta_x`` and ``delta_y``) are
of the scores that are drawn from, to one record, exact, rounding included; they know the
relation. ``error`` is :math:`e` of the sampler; ``num_steps`` is T, ``num_draws`` K and
``refresh_every`` q, all at least 1.

Reference:
  Gonzalez, Guzman, Paquette (arXiv 2403.02912), 2024, whose proofs charge more. That a
  draw of range r is r^2/8-zCDP: Cesar and Rogers, Bounding, Concentrating, and Truncating,
  2021.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp import accounting
from jaxdp.core import validate


def draw(delta: Any, error: float = 0.0, *, pure: bool = False) -> Any:
    """Returns rho of one draw, for a score sensitivity or an array of them.

    With ``pure``, here and below, the epsilon at delta = 0 in place of rho.
    """
    moved = np.asarray(delta, float) + error
    return 2 * moved if pure else np.square(moved) / 2


def vertices(level: Any) -> Any:
    """Counts one player's data-dependent draws at a step of a level, output included."""
    return 2 ** (np.asarray(level, np.int64) + 1) + 1


def vertex_sampling(
    delta_x: float,
    delta_y: float,
    *,
    num_steps: int,
    num_draws: int,
    error: float = 0.0,
    pure: bool = False,
) -> float:
    """Returns rho of Algorithm 1: K + 1 draws of each player per step but the first.

    0 for one step, whose draws are uniform.
    """
    validate.integer(num_steps=num_steps, num_draws=num_draws)
    validate.non_negative(delta_x=delta_x, delta_y=delta_y, error=error)
    each = sum(float(draw(delta, error, pure=pure)) for delta in (delta_x, delta_y))
    return (num_steps - 1) * (num_draws + 1) * each


def bias_reduced(
    deltas_x: np.ndarray,
    deltas_y: np.ndarray,
    levels: np.ndarray,
    *,
    error: float = 0.0,
    pure: bool = False,
) -> float:
    r"""Returns rho of Algorithms 2 and 3, given the levels: the worst record's charge.

    .. math:: \max_r \frac{(\Delta_{x,r}+e)^2 + (\Delta_{y,r}+e)^2}2
              \sum_{t>r} (2^{N_t + 1} + 1)

    Levels are drawn without a look at the data, so what holds given any levels holds.
    Sensitivities (S,) are those of a record of each executed step, whose ``levels`` are
    integers N >= 0 (S,). 0 for no step or one.
    """
    levels = np.asarray(levels, np.int64)
    each = draw(deltas_x, error, pure=pure) + draw(deltas_y, error, pure=pure)
    if not levels.shape == np.shape(deltas_x) == np.shape(deltas_y):
        raise ValueError(
            "levels must have one entry for each of deltas_x and deltas_y, got shapes "
            f"{levels.shape}, {np.shape(deltas_x)}, {np.shape(deltas_y)}"
        )
    if levels.size < 2:
        return 0.0
    later = np.cumsum(vertices(levels)[::-1])[::-1][1:]
    return float(np.max(each[:-1] * later))


def convex(
    delta: float,
    *,
    num_steps: int,
    num_draws: int,
    refresh_every: int,
    error: float = 0.0,
    pure: bool = False,
) -> float:
    """Returns rho of Algorithm 4: K draws at every refresh but the first, and K final ones.

    A draw from a mean of iterates is a draw from one of them, chosen without a look at
    the data; each is within the bound, and so is their mixture. 0 for one step, after
    which nothing that depends on data is drawn.
    """
    validate.integer(
        num_steps=num_steps, num_draws=num_draws, refresh_every=refresh_every
    )
    validate.non_negative(delta=delta, error=error)
    if num_steps == 1:
        return 0.0
    period = min(refresh_every, num_steps)
    times = period + num_steps // period - 1
    return num_draws * times * float(draw(delta, error, pure=pure))


def synthetic(
    delta: float,
    *,
    num_steps: int,
    last_draw: bool = True,
    error: float = 0.0,
    pure: bool = False,
) -> float:
    """Returns rho of Algorithm 5: one query per step t > 1, from t - 1 sums over all data.

    ``delta`` is of one step, (t - 1) delta at step t; ``last_draw`` says whether the query
    of step T is drawn, which no iterate needs.
    """
    validate.integer(num_steps=num_steps)
    validate.non_negative(delta=delta, error=error)
    m = num_steps - 1 if last_draw else max(num_steps - 2, 0)
    if pure:  # Sum over i = 1..m of 2 (i delta + e).
        return m * (m + 1) * delta + 2 * m * error
    # Sum over i = 1..m of (i delta + e)^2 / 2.
    squares = m * (m + 1) * (2 * m + 1) / 6
    return (squares * delta**2 + m * (m + 1) * delta * error + m * error**2) / 2


def measured(
    noise_multiplier: float,
    delta: float,
    *,
    num_start: int,
    num_rounds: int,
    error: float = 0.0,
) -> float:
    """Returns rho of marginals that are measured: some at once, then one after each draw.

    Each measurement is a Gaussian sum of that noise multiplier; ``delta`` is the
    sensitivity of the scores of each draw.
    """
    validate.integer(num_start=num_start)
    validate.integer(at_least=0, num_rounds=num_rounds)
    validate.non_negative(delta=delta, error=error)
    sums = accounting.gaussian_rho(noise_multiplier, num_start + num_rounds)
    return sums + num_rounds * float(draw(delta, error))


# --- budgets -------------------------------------------------------------------------


def epsilon(rho: float, delta: float) -> float:
    """Returns the epsilon that a plan of this rho reports."""
    return float(accounting.epsilon(*accounting.zcdp(rho), delta))


@functools.lru_cache(maxsize=256)
def rho_budget(epsilon: float, delta: float) -> float:
    """Returns the largest rho whose accounted epsilon stays within a budget.

    From below, to a relative 1e-12.
    """
    validate.positive(epsilon=epsilon)
    validate.probability(delta=delta)

    def fits(rho: float) -> bool:
        return accounting.epsilon(*accounting.zcdp(rho), delta) <= epsilon

    low = 1.0
    while not fits(low):
        low /= 2
    while fits(2 * low):
        low *= 2
    return _largest(fits, low, 2 * low)


def admissible(charge: Callable[[float], float], rho: float) -> float:
    """Returns the largest step size whose charge stays within rho.

    ``charge`` gives rho of a step size >= 0, or the pure epsilon where ``rho`` is one, and
    grows with it. Proportional to its square, as without a sampler's error, it gives the
    closed form; else bisection. Infinity where no step size costs anything.

    Raises:
      ValueError: the sampler's error alone, with no step at all, costs more.
    """
    validate.positive(rho=rho)
    least = charge(0.0)
    if least > rho:
        raise ValueError(
            "the budget must cover the sampler's error, which alone costs "
            f"{least:.4g} at this number of draws, got {rho!r}: take fewer steps or "
            "draws, or a larger epsilon"
        )
    if charge(1.0) == least:
        return math.inf
    if least == 0.0:
        step = math.sqrt(rho / charge(1.0))
        for _ in range(4):  # Rounding.
            if rho * (1 - 1e-12) < charge(step) <= rho:
                return step
            step = math.nextafter(step, 0.0)
    high = 1.0
    while charge(high) <= rho:
        high *= 2
    low = high / 2
    while charge(low) > rho and low > 1e-300:
        low, high = low / 2, low
    return _largest(lambda step: charge(step) <= rho, low, high)


def _largest(fits: Callable[[float], bool], low: float, high: float) -> float:
    """Returns the largest number that fits; ``low`` does and ``high`` does not."""
    for _ in range(200):
        middle = (low + high) / 2
        if high - low <= 1e-12 * high or not low < middle < high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
