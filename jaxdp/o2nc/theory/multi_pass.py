r"""Search for the settings of least proven bound where every step reads all records.

The data do not limit the number of steps, only noise and cost do: more steps are noisier.

What is found restarts at every step (no problem is known to us where it does not). The
error of a window's mean is what counts, and fresh noise of the size of L at each of M steps
is averaged down to :math:`L/\sqrt M`, where Theorem 4.1 of Kornowski et al. keeps the error
of every estimate as small as its target. So :math:`T = \Phi L^2/(\alpha\beta^3)` steps need
:math:`n = \sqrt{dT}/\mu` records with gradients: :math:`\sqrt d` in place of that
theorem's :math:`d^{3/4}`.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp.o2nc.theory import bounds
from jaxdp.o2nc.theory.settings import (
    Estimator,
    Problem,
    clips,
    law,
    multi_pass_noise,
    multi_pass_rounding,
)

#: Most steps that are tried.
LONGEST = 2**16


class Choice(NamedTuple):
    """Candidate of the search, and its bound."""

    bound: float
    period: int
    window: int
    num_windows: int


def search(
    p: Problem,
    estimator: Estimator,
    scale_with_movement: bool,
    prices: tuple[float, float] = (0.0, 0.0),
    most: float = np.inf,
) -> Choice:
    """Searches for the least bound on a coarse grid, then on finer ones around the best.

    Args:
      p: the problem.
      estimator: how gradients are estimated; the scalar oracle restarts at every step.
      scale_with_movement: whether bound and noise of a difference are.
      prices: what a record costs at a restart and at another step.
      most: the largest cost of a run, enough for a window of two steps.

    Raises:
      ValueError: so many records, or so much noise, that no grid holds a step's sum.
    """
    evaluate = functools.partial(_best, p, estimator, scale_with_movement, prices, most)
    longest = 1 if estimator.oracle == "scalar" else LONGEST
    best = evaluate(
        _powers(longest, 1.5), _powers(LONGEST, 1.5), _powers(LONGEST // 2, 1.5)
    )
    for ratio in (1.15, 1.04, 1.01):
        near = evaluate(
            around(best.period, longest, ratio),
            around(best.window, LONGEST, ratio),
            around(best.num_windows, LONGEST // 2, ratio),
        )
        best = min(best, near)
    if not np.isfinite(best.bound):
        raise ValueError(
            "num_examples and epsilon must leave 8 bits for one record's contribution to "
            f"a sum over all of them with its noise, got {p.num_examples} and "
            f"{p.epsilon!r}: take a single pass, or samples"
        )
    return best


def around(x: int, at_most: int, ratio: float, reach: int = 3) -> np.ndarray:
    """Returns integers in [1, at_most] at powers of a ratio from x, and x's neighbours."""
    powers = np.rint(x * ratio ** np.arange(-reach, reach + 1.0))
    powers = np.append(powers, [x - 1, x + 1])
    return np.unique(np.clip(powers, 1, at_most)).astype(np.int64)


def _powers(at_most: int, ratio: float) -> np.ndarray:
    """Returns integers from 1 to a limit, at powers of a ratio."""
    count = math.ceil(math.log(at_most) / math.log(ratio))
    return around(1, at_most, ratio, count)


def _best(
    p: Problem,
    estimator: Estimator,
    scale_with_movement: bool,
    prices: tuple[float, float],
    most: float,
    periods: np.ndarray,
    windows: np.ndarray,
    window_counts: np.ndarray,
) -> Choice:
    """Returns the combination of least bound."""
    # A learner that starts at rest moves in no shorter.
    windows = windows[windows >= 2]
    period, window, count = np.meshgrid(
        periods, windows, window_counts, indexing="ij", sparse=True
    )
    steps = window * count
    restarts = -(-steps // period)
    price = restarts * prices[0] + (steps - restarts) * prices[1]
    possible = (period <= steps) & (steps <= LONGEST)
    possible &= p.num_examples * price <= most
    max_step = p.radius / bounds.window_radius(window, True)
    c1, c2, bias = clips(p, estimator, max_step, bounds.FAILURE, steps)
    of_sums = (period, steps, c1, c2, scale_with_movement)
    promise = bounds.promise(
        dim=p.dim,
        lipschitz=p.lipschitz,
        initial_gap=p.initial_gap,
        radius=p.radius,
        period=period,
        restart_batch_size=p.num_examples,
        batch_size=p.num_examples,
        window=window,
        num_windows=count,
        max_step=max_step,
        reset=True,
        noise_variance=multi_pass_noise(p, estimator, *of_sums),
        rounding=multi_pass_rounding(p, estimator, *of_sums),
        clip_bias=bias,
        multi_pass=True,
        **law(estimator),
    )
    value = np.where(possible, promise.bound, np.inf)
    i, j, k = np.unravel_index(np.argmin(value), value.shape)
    return Choice(
        bound=float(value[i, j, k]),
        period=int(periods[i]),
        window=int(windows[j]),
        num_windows=int(window_counts[k]),
    )
