r"""Noise that spends the whole budget, in one pass and in several, as plain numbers.

**One pass.** All releases of a period are one Gaussian mechanism, whose sensitivity is the
largest product of a step's and a column norm of the noise's strategy.

**Several.** The noise of the steps is independent and adds up until the next restart. One
record moves the mean of a restart by :math:`s_1`, that of another step by :math:`s_2`; of
both kinds a run has :math:`N_1` and :math:`N_2`, and the last estimate of a period of P
steps has the variance :math:`\sigma_1^2 + (P-1)\sigma_2^2`. At a given cost
:math:`N_1 s_1^2/\sigma_1^2 + N_2 s_2^2/\sigma_2^2 = \mu^2` it is least, namely
:math:`((r_1 + r_2)/\mu)^2`, for

.. math:: \sigma_1^2 = r_1(r_1+r_2)/\mu^2, \quad
  \sigma_2^2 = \frac{r_2(r_1+r_2)}{(P-1)\mu^2}, \qquad
  r_1 = s_1\sqrt{N_1}, \quad r_2 = s_2\sqrt{(P-1)N_2} .

Noise that is scaled with the movement r is at most
:math:`\mathbb E r^2/(2D)^2 = 7/24` of that at the largest, and costs the same.
"""

import functools
from typing import NamedTuple

import numpy as np

from jaxdp.kernels import prefix_noise as kernels
from jaxdp.o2nc.theory.bounds import Constants, Schedule
from jaxdp.o2nc.theory.estimators import MOVEMENT, Estimator, Number

#: Of a record's contribution, for a plan to be possible.
_LEAST_BITS = 8
#: The variance of noise that is scaled with the movement, over that at the largest.
MOVED = MOVEMENT / 4


class Division(NamedTuple):
    """Standard deviations of the noise of several passes, for mu = 1."""

    estimate: Number  # of a period's last estimate: r_1 + r_2
    restart: Number  # of a restart's release
    difference: Number  # of another step's, at the largest movement


def divided(
    restart: Number,
    difference: Number,
    period: Number,
    steps: Number,
    scale_with_movement: bool,
) -> Division:
    """Divides the noise between restarts and differences so that estimates have least.

    ``restart`` and ``difference``, at the largest movement, are the sensitivities s_1 and
    s_2 of releases; ``period`` is P and ``steps`` T.
    """
    steps = np.asarray(steps, float)  # A theorem may ask for more than 2^63.
    restarts = np.ceil(steps / period)
    # Differences after a restart: fewer in a shorter run.
    weight = (MOVED if scale_with_movement else 1.0) * (np.minimum(period, steps) - 1)
    first = np.sqrt(restarts) * restart
    rest = np.sqrt(weight * (steps - restarts)) * difference
    total = first + rest
    later = np.where(weight > 0, weight, 1.0)
    return Division(total, np.sqrt(first * total), np.sqrt(rest * total / later))


@functools.lru_cache(maxsize=512)
def _norms(prefix_noise: str, period: int) -> tuple[float, float, float]:
    """Returns the norm of C's first column, the largest of its others and of B's rows."""
    kernel = kernels.make(prefix_noise, period)
    columns = kernel.column_norms()
    others = float(max(columns[1:], default=0.0))
    return float(columns[0]), others, float(max(kernel.prefix_norms()))


def noise_variance(
    c: Constants, e: Estimator, s: Schedule, clips: tuple[Number, Number]
) -> Number:
    """Returns E ||noise||^2 of a period's worst estimate, for the whole budget.

    A single pass is of one period; ``clips`` are C1, and C2 at the largest movement.
    """
    if s.multi_pass:
        division = divided(*clips, s.period, s.num_steps, s.scale_with_movement)
        std = c.sensitivity_over_clip / c.num_examples * division.estimate / c.mu
    else:
        first, others, row = _norms(s.prefix_noise, s.period)
        restart = c.sensitivity_over_clip * clips[0] / s.restart_batch_size
        other = c.sensitivity_over_clip * clips[1] / s.batch_size
        std = np.maximum(restart * first, other * others) / c.mu * row
    return e.energy(c.dim) * std**2


def rounding(
    c: Constants, e: Estimator, s: Schedule, clips: tuple[Number, Number]
) -> Number:
    """Bounds the L2 norm of an estimate's rounding to the grid; infinite below 8 bits.

    The sum of n contributions and its noise fill 32 bits (``jaxdp.kernels.clip.grid_bits``,
    here for arrays); each number of a contribution is rounded by less than a unit. In a
    single pass the grid mostly has its full 16 bits: the bound is of real arithmetic.
    """
    if not s.multi_pass:
        return 0.0
    _, *stds = divided(*clips, s.period, s.num_steps, s.scale_with_movement)
    over = c.sensitivity_over_clip / c.mu
    bits = [
        np.floor(np.log2((2**31 - 1) / (c.num_examples + 8 * over * std / clip)))
        for std, clip in zip(stds, clips, strict=True)
    ]
    least = np.where(np.asarray(s.period) > 1, np.minimum(*bits), bits[0])
    first, rest = (
        clip * 2.0 ** -np.minimum(16, x) for clip, x in zip(clips, bits, strict=True)
    )
    total = e.rounding(c.dim, first + (s.period - 1) * rest)
    return np.where(least >= _LEAST_BITS, total, np.inf)
