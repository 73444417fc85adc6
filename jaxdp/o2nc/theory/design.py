r"""Certified designs: schedules of least proven bound, with noise for the whole budget.

No theorem's formulas: the bound of :mod:`jaxdp.o2nc.theory.bounds` is computed for many
schedules, with clips that leave Lipschitz losses alone and noise for the whole budget, and
the least one is taken. Restarting at every step is one of the choices, and often wins with
few records.

Several passes are another: there the noise of every step is paid, and the data do not limit
the number of steps, only noise and cost do. What is found restarts at every step (no
problem is known to us where it does not). The error of a window's mean is what counts, and
fresh noise of the size of L at each of M steps is averaged down to :math:`L/\sqrt M`, where
Theorem 4.1 of Kornowski et al. keeps the error of every estimate as small as its target. So
:math:`T = \Phi L^2/(\alpha\beta^3)` steps need :math:`n = \sqrt{dT}/\mu` records with
gradients: :math:`\sqrt d` in place of that theorem's :math:`d^{3/4}`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdp.core import validate
from jaxdp.kernels import prefix_noise as kernels
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.mechanism.design import Design
from jaxdp.o2nc.oracle import DEFAULT, ORACLES, Difference, Direction, Name
from jaxdp.o2nc.theory import bounds, budget
from jaxdp.o2nc.theory.bounds import Constants, GoldsteinPromise, Schedule
from jaxdp.o2nc.theory.estimators import ESTIMATORS, Estimator, Number

#: Longest period that is tried in a single pass.
_LONGEST = 2**14
#: Most steps of several passes that are tried.
MOST_STEPS = 2**16


def certified(
    *,
    oracle: Name = DEFAULT,
    multi_pass: bool = False,
    direction: Direction | None = None,
    num_directions: int | None = None,
    difference: Difference | None = None,
    share_directions: bool | None = None,
    prefix_noise: str | None = None,
    gradient_cost: float = 1.0,
    max_evaluations: float | None = None,
    **constants: Any,
) -> Design:
    """Searches for the period, batches or steps, and window of least proven bound.

    Privacy rests on the clips alone. That the bound holds, and that clips do not bite
    (except with a probability that the bound includes), rests on the constants.

    Args:
      oracle: a key of ``ORACLES``; one of slopes restarts at every step.
      multi_pass: whether every step reads all records, not one pass. The bound then
        includes how far they can be from the population, and the number of steps is
        chosen, up to 2^16. Bounds and noise of differences are scaled with the movement
        where proven clips are proportional to it.
      direction: law of the directions; None takes ``"orthonormal"``, or ``"ball"`` for
        the first-order oracle.
      num_directions: m; None takes the smaller of d and 64, the most that may be
        orthonormal, or 64 points of the ball. A record costs 2 m values of its loss at a
        restart, up to 4 m elsewhere; or one gradient, and 2 m elsewhere.
      difference: how DIFF's two points share directions; None takes ``"antithetic"``, or
        ``"independent"`` points of the ball. Common ones have less error where losses are
        smooth in pieces, but nothing of that is proven.
      share_directions: whether the records of a batch do: cheaper, and the directions'
        part of the error does not fall with the batch. None for the scalar oracle alone,
        which must.
      prefix_noise: name of the noise kernel; None takes ``"blt_3"``, or
        ``"independent"``, the only one with ``multi_pass``.
      gradient_cost: how many values of a loss a gradient costs; for ``max_evaluations``.
      max_evaluations: the most values of one record's loss, gradients included, that the
        run may take. A single pass reads fewer records if it must.
      **constants: those of :class:`~jaxdp.o2nc.theory.bounds.Constants`.

    Returns:
      The design, of the name ``"certified"``: see :func:`designed`.

    Raises:
      ValueError: an argument out of range. TypeError: of the wrong kind, or missing.
    """
    c = Constants(**constants)
    validate.instance(bool, multi_pass=multi_pass)
    validate.one_of(tuple(ORACLES), oracle=oracle)
    asks, kind = ORACLES[oracle], ESTIMATORS[oracle]
    direction = asks.directions[0] if direction is None else direction
    difference = kind.proven if difference is None else difference
    validate.one_of(asks.directions, direction=direction)
    validate.one_of(asks.differences, difference=difference)
    share = bool(asks.shares) if share_directions is None else share_directions
    validate.instance(bool, share_directions=share)
    asks.check_shares(oracle, share)
    limit = min(c.dim, MAX_ORTHONORMAL)
    m = (kind.points or limit) if num_directions is None else num_directions
    at_most = limit if direction == "orthonormal" else None
    validate.integer(at_most=at_most, num_directions=m)
    e = kind(int(m), direction, difference, share)
    noises = ("independent",) if multi_pass else kernels.NAMES
    noise = noises[0] if multi_pass else "blt_3"
    noise = noise if prefix_noise is None else prefix_noise
    validate.one_of(noises, prefix_noise=noise)
    validate.positive(gradient_cost=gradient_cost)
    unit = gradient_cost if asks.gradients else 1.0
    prices = (unit * e.calls[0], unit * e.calls[1])
    most = np.inf
    if max_evaluations is not None:
        validate.positive(max_evaluations=max_evaluations)
        least = prices[0] * (2 * c.num_examples if multi_pass else 4)
        if max_evaluations < least:
            raise ValueError(
                f"max_evaluations must be at least {least:g}, for two steps of these "
                f"estimates, got {max_evaluations!r}"
            )
        most = float(max_evaluations)
    if multi_pass:
        _, schedule = several_passes(c, e, prices, most)
    else:
        _, schedule = one_pass(c, e, noise, (most / prices[0], most / max(prices)))
    return designed("certified", c, e, schedule, failure=bounds.FAILURE)


# --- what a schedule implies ---------------------------------------------------------


def proven(
    c: Constants,
    e: Estimator,
    s: Schedule,
    *,
    failure: float | None = bounds.FAILURE,
    rate_factor: float | None = None,
    unheld: float = np.inf,
) -> tuple[Number, Number, GoldsteinPromise]:
    """Returns C1, C2 at the largest movement, and the promise at exact noise.

    The bias from clipping is 0 if neither clip is ever exceeded. Every record takes an
    equal share of the failures each time it is read. Where nothing fails, clipping changes
    nothing; elsewhere the norm is at most L.

    ``failure`` is the probability that any clip of the run is active (None for never), and
    ``unheld`` the rounding where no grid holds a step's sum; the other arguments are those
    of :func:`jaxdp.o2nc.theory.bounds.promise`, a single pass at one period.
    """
    movement = 2 * s.max_step / c.smoothing_radius
    found = sure = e.clips(c.dim, movement)
    bias = 0.0
    if failure is not None:
        reads = s.num_steps if s.multi_pass else 1
        each = failure / c.num_examples / reads  # Their product can overflow.
        found = e.clips(c.dim, movement, each)
        same = np.equal(found[0], sure[0]) & np.equal(found[1], sure[1])
        bias = np.where(same, 0.0, failure * c.lipschitz)
    clips = (c.lipschitz * found[0], c.lipschitz * found[1])
    rounding = budget.rounding(c, e, s, clips)
    promise = bounds.promise(
        c,
        e,
        s,
        noise_variance=budget.noise_variance(c, e, s, clips),
        clip_bias=bias,
        rate_factor=rate_factor,
        rounding=np.where(np.isfinite(rounding), rounding, unheld),
    )
    return *clips, promise


class Printed(NamedTuple):
    """Numbers that a theorem prints, to compare a plan with; None where it has none."""

    noise_std: float | None = None  # of a node; of a restart in several passes
    num_directions: int | None = None
    difference_noise_std: float | None = None  # in several passes, of the other steps


def designed(
    name: str,
    c: Constants,
    e: Estimator,
    s: Schedule,
    failure: float | None,
    rate_factor: float | None = None,
    paper: Printed | None = None,
) -> Design:
    """Builds a design: adds clips, the bound at exact noise, its step size, and costs.

    The arguments are those of :func:`proven`, with a schedule of plain numbers, and a
    theorem's name, or ``"certified"``.

    Returns:
      The plan's fields except the noise; ``promise``, a
      :class:`~jaxdp.o2nc.theory.bounds.GoldsteinPromise`; the paper's numbers;
      ``evaluations`` and ``gradients``, the values and gradients of one record's loss that
      the whole run takes.
    """
    # Of a theorem's numbers no plan need be possible: they are reported without it.
    *clips, promise = proven(
        c, e, s, failure=failure, rate_factor=rate_factor, unheld=0.0
    )
    promise = GoldsteinPromise(*(float(x) for x in dataclasses.astuple(promise)))
    steps = int(s.num_steps)
    restarts = math.ceil(steps / s.period)
    calls = (
        float(restarts) * s.restart_batch_size * e.calls[0]
        + float(steps - restarts) * s.batch_size * e.calls[1]
    )
    gradients, paper = e.asks.gradients, paper or Printed()
    return Design(
        name=name,
        dim=int(c.dim),
        num_examples=int(c.num_examples),
        num_steps=steps,
        period=int(s.period),
        restart_batch_size=int(s.restart_batch_size),
        batch_size=int(s.batch_size),
        relation=c.relation,
        restart_l2_clip_norm=float(clips[0]),
        l2_clip_norm=float(clips[1]),
        smoothing_radius=float(c.smoothing_radius),
        num_directions=e.num_directions,
        direction=e.direction,
        difference=e.difference,
        share_directions=e.share_directions,
        prefix_noise=s.prefix_noise,
        max_step=float(s.max_step),
        learning_rate=promise.learning_rate,
        window=int(s.window),
        reset=s.reset,
        promise=promise,
        paper_noise_std=paper.noise_std,
        paper_num_directions=paper.num_directions,
        oracle=e.oracle,
        multi_pass=s.multi_pass,
        scale_with_movement=s.scale_with_movement,
        evaluations=0.0 if gradients else calls,
        gradients=calls if gradients else 0.0,
        paper_difference_noise_std=paper.difference_noise_std,
    )


# --- the search ----------------------------------------------------------------------

#: A bound, and the schedule that has it.
Found = tuple[float, Schedule]


def one_pass(
    c: Constants,
    e: Estimator,
    prefix_noise: str,
    most: tuple[float, float] = (np.inf, np.inf),
) -> Found:
    """Searches for the schedule of least bound that reads every record once at most.

    An oracle of slopes restarts at every step. ``most`` are the records that may be read
    if all steps are restarts, and else.
    """
    n = c.num_examples
    fresh, other = (int(min(n, x)) for x in most)
    longest = min(_LONGEST, other // 2)
    if e.asks.slopes or longest < 2:
        longest = 1

    def at(
        period: int, sizes: np.ndarray, rests: np.ndarray, counts: np.ndarray
    ) -> Found:
        if period == 1:
            rests = np.ones(1, np.int64)  # There are no other steps.
        else:  # Not much more than a period of them.
            rests = np.unique(np.minimum(rests, 2 * n // period))
        b1, b2, count = np.meshgrid(sizes, rests, counts, indexing="ij", sparse=True)
        read = fresh if period == 1 else other
        window = bounds.num_steps(read, period, b1, b2) // count
        step = c.smoothing_radius / bounds.window_radius(np.maximum(window, 2), True)
        schedule = Schedule(
            period,
            b1,
            b2,
            np.maximum(window, 2),
            count,
            step,
            prefix_noise=prefix_noise,
        )
        return _least(c, e, schedule, window >= 2)

    def evaluate(periods: np.ndarray, *sizes: np.ndarray) -> Found:
        return min(at(int(x), *sizes) for x in periods)

    # Also 2^h - 1, at which a tree's last leaf costs no level.
    periods = {2**h for h in range(longest.bit_length())}
    periods |= {max(1, x - 1) for x in periods} | {3 * x // 2 for x in periods}
    longer = np.array([x for x in periods if 1 < x <= longest])
    sizes = [_grid(n, 1.6)] * 3
    # Two valleys: fresh estimates at every step, and differences.
    starts = [[np.ones(1), *sizes], [longer, *sizes]][: 1 + bool(len(longer))]
    limits = {"restart_batch_size": n, "batch_size": n, "num_windows": n}
    ratios = (1.4, 1.2, 1.1, 1.05, 1.02)
    return _search(evaluate, starts, {"period": longest, **limits}, ratios)


def several_passes(
    c: Constants,
    e: Estimator,
    prices: tuple[float, float] = (0.0, 0.0),
    most: float = np.inf,
) -> Found:
    """Searches for the schedule of least bound of which every step reads all records.

    An oracle of slopes restarts at every step. ``prices`` are what a record costs at a
    restart and at another step, ``most`` the largest cost of a run, enough for a window of
    two steps.

    Raises:
      ValueError: so many records, or so much noise, that no grid holds a step's sum.
    """
    n = c.num_examples
    scaled = e.difference in e.asks.proportional

    def evaluate(periods: np.ndarray, windows: np.ndarray, counts: np.ndarray) -> Found:
        # A learner that starts at rest moves in no shorter.
        windows = windows[windows >= 2]
        period, window, count = np.meshgrid(
            periods, windows, counts, indexing="ij", sparse=True
        )
        step = c.smoothing_radius / bounds.window_radius(window, True)
        schedule = Schedule(
            period, n, n, window, count, step, True, True, scale_with_movement=scaled
        )
        steps = schedule.num_steps
        restarts = -(-steps // period)
        price = restarts * prices[0] + (steps - restarts) * prices[1]
        possible = (period <= steps) & (steps <= MOST_STEPS) & (n * price <= most)
        return _least(c, e, schedule, possible)

    limits = {
        "period": 1 if e.asks.slopes else MOST_STEPS,
        "window": MOST_STEPS,
        "num_windows": MOST_STEPS // 2,
    }
    start = [_grid(x, 1.5) for x in limits.values()]
    best = _search(evaluate, [start], limits, (1.15, 1.04, 1.01))
    if not np.isfinite(best[0]):
        raise ValueError(
            "num_examples and epsilon must leave 8 bits for one record's contribution to "
            f"a sum over all of them with its noise, got {n} and {c.epsilon!r}: take a "
            "single pass, or samples"
        )
    return best


def _search(
    evaluate: Callable[..., Found],
    starts: list[list[np.ndarray]],
    limits: Mapping[str, int],
    ratios: tuple[float, ...],
) -> Found:
    """Searches on coarse grids, then on finer ones around the best of each.

    ``evaluate`` gives the best of the grids, one for each number of the schedule that
    ``limits`` names and bounds; ``ratios`` are those of the finer grids, one by one.
    """

    def finer(best: Found, ratio: float) -> Found:
        near = (around(getattr(best[1], x), most, ratio) for x, most in limits.items())
        return min(best, evaluate(*near))

    return min(functools.reduce(finer, ratios, evaluate(*start)) for start in starts)


def _least(c: Constants, e: Estimator, schedules: Schedule, possible: Number) -> Found:
    """Returns the least bound of an array of schedules, and its schedule."""
    bound = np.where(possible, proven(c, e, schedules)[2].bound, np.inf)
    at = np.unravel_index(np.argmin(bound), bound.shape)
    chosen = [np.broadcast_to(x, bound.shape)[at].item() for x in schedules]
    return float(bound[at]), Schedule(*chosen)


def around(x: int, at_most: int, ratio: float, reach: int = 3) -> np.ndarray:
    """Returns integers in [1, at_most] at powers of a ratio from x, and x's neighbours."""
    powers = np.rint(x * ratio ** np.arange(-reach, reach + 1.0))
    powers = np.append(powers, [x - 1, x + 1])
    return np.unique(np.clip(powers, 1, at_most)).astype(np.int64)


def _grid(at_most: int, ratio: float) -> np.ndarray:
    """Returns integers from 1 to a limit, at powers of a ratio."""
    return around(1, at_most, ratio, math.ceil(math.log(at_most) / math.log(ratio)))
