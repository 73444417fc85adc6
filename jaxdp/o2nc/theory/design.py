"""Certified designs: settings of least proven bound, with noise for the whole budget.

No theorem's formulas: the bound of :mod:`jaxdp.o2nc.theory.bounds` is computed for many
settings, with clips that leave Lipschitz losses alone and noise for the whole budget, and
the least one is taken. Restarting at every step is one of the choices, and often wins with
few records. Several passes are another: there the noise of every step is paid.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.kernels import prefix_noise as kernels
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.o2nc.theory import bounds
from jaxdp.o2nc.theory.multi_pass import around
from jaxdp.o2nc.theory.multi_pass import search as search_steps
from jaxdp.o2nc.theory.settings import Estimator, Problem, Settings, clips, law, settled
from jaxdp.o2nc.theory.theorems import POINTS

#: Longest period that is tried.
_LONGEST = 2**14
#: Of the numbers on the grids, from the first search to the last.
_RATIOS = (1.6, 1.4, 1.2, 1.1, 1.05, 1.02)


def certified(
    *,
    num_examples: int,
    dim: int,
    lipschitz: float,
    initial_gap: float,
    radius: float,
    epsilon: float,
    delta: float,
    relation: Relation,
    oracle: bounds.Oracle = "zeroth_order",
    multi_pass: bool = False,
    direction: bounds.Direction | None = None,
    num_directions: int | None = None,
    difference: bounds.Difference | None = None,
    share_directions: bool | None = None,
    prefix_noise: str | None = None,
    gradient_cost: float = 1.0,
    max_evaluations: float | None = None,
) -> Settings:
    """Searches for the period, batches or steps, and window of least proven bound.

    Privacy rests on the clips alone. That the bound holds, and that clips do not bite
    (except with a probability that the bound includes), rests on the constants.

    Args:
      num_examples: n >= 4, read in a single pass, or in every step.
      dim: d, parameters that move.
      lipschitz: L, of every record's loss.
      initial_gap: F at the start above its infimum; with ``multi_pass``, the records'
        mean loss.
      radius: of the smoothed loss; the guarantee is at twice that.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      oracle: ``"zeroth_order"``, ``"first_order"``, or ``"scalar"``, which restarts at
        every step.
      multi_pass: whether every step reads all records. The bound then includes how far
        they can be from the population, and the number of steps is chosen, up to 2^16.
        Bounds and noise of differences are scaled with the movement where proven clips
        are proportional to it.
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

    Returns:
      The settings, of the name ``"certified"``.

    Raises:
      ValueError: an argument out of range. TypeError: of the wrong kind.
    """
    problem = Problem(
        num_examples=num_examples,
        dim=dim,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        lipschitz=lipschitz,
        initial_gap=initial_gap,
        radius=radius,
    )
    validate.instance(bool, multi_pass=multi_pass)
    estimator = _estimator(
        dim, oracle, direction, num_directions, difference, share_directions
    )
    noises = ("independent",) if multi_pass else kernels.NAMES
    noise = noises[0] if multi_pass else "blt_3"
    noise = noise if prefix_noise is None else prefix_noise
    validate.one_of(noises, prefix_noise=noise)
    validate.positive(gradient_cost=gradient_cost)
    unit = gradient_cost if oracle == "first_order" else 1.0
    prices = (unit * estimator.calls[0], unit * estimator.calls[1])
    most = np.inf
    if max_evaluations is not None:
        validate.positive(max_evaluations=max_evaluations)
        least = prices[0] * (2 * num_examples if multi_pass else 4)
        if max_evaluations < least:
            raise ValueError(
                f"max_evaluations must be at least {least:g}, for two steps of these "
                f"estimates, got {max_evaluations!r}"
            )
        most = float(max_evaluations)
    find = _several_passes if multi_pass else _one_pass
    return find(problem, estimator, noise, prices, most)


def _estimator(
    dim: int,
    oracle: bounds.Oracle,
    direction: bounds.Direction | None,
    num_directions: int | None,
    difference: bounds.Difference | None,
    share_directions: bool | None,
) -> Estimator:
    """Checks the choices of an estimator and fills in the defaults."""
    validate.one_of(bounds.ORACLES, oracle=oracle)
    first_order, scalar = oracle == "first_order", oracle == "scalar"
    if direction is None:
        direction = bounds.DIRECTIONS[oracle][0]
    if difference is None:
        difference = "independent" if first_order else "antithetic"
    validate.one_of(bounds.DIRECTIONS[oracle], direction=direction)
    validate.one_of(bounds.DIFFERENCES[oracle], difference=difference)
    share = scalar if share_directions is None else share_directions
    validate.instance(bool, share_directions=share)
    if (first_order and share) or (scalar and not share):
        raise ValueError(
            f"share_directions must be {scalar} with oracle={oracle!r}, got {share}"
        )
    most = min(dim, MAX_ORTHONORMAL)
    default = POINTS if first_order else most
    m = default if num_directions is None else num_directions
    at_most = most if direction == "orthonormal" else None
    validate.integer(at_most=at_most, num_directions=m)
    return Estimator(int(m), direction, difference, share, oracle)


def _several_passes(
    p: Problem, e: Estimator, noise: str, prices: tuple[float, float], most: float
) -> Settings:
    # Only their clips are proportional to the movement.
    scaled = e.oracle == "zeroth_order" and e.difference != "independent"
    best = search_steps(p, e, scaled, prices, most)
    return settled(
        "certified",
        p,
        estimator=e,
        period=best.period,
        restart_batch_size=p.num_examples,
        batch_size=p.num_examples,
        window=best.window,
        num_windows=best.num_windows,
        max_step=p.radius / bounds.window_radius(best.window, True),
        reset=True,
        prefix_noise=noise,
        failure=bounds.FAILURE,
        multi_pass=True,
        scale_with_movement=scaled,
    )


def _one_pass(
    p: Problem, e: Estimator, noise: str, prices: tuple[float, float], most: float
) -> Settings:
    clip = functools.partial(clips, p, e, failure=bounds.FAILURE)
    best = search(p, e, noise, clip, (most / prices[0], most / max(prices)))
    return settled(
        "certified",
        p,
        estimator=e,
        period=best.period,
        restart_batch_size=best.restart_batch_size,
        batch_size=best.batch_size,
        window=best.window,
        num_windows=best.num_windows,
        max_step=p.radius / bounds.window_radius(best.window, True),
        reset=True,
        prefix_noise=noise,
        failure=bounds.FAILURE,
    )


class Choice(NamedTuple):
    """Candidate of the search, and its bound."""

    bound: float
    period: int
    restart_batch_size: int
    batch_size: int
    window: int
    num_windows: int


#: ``clip(max_step) -> (C1, C2, bias)``.
Clip = Callable[[bounds.Number], tuple[bounds.Number, bounds.Number, bounds.Number]]


def search(
    p: Problem,
    estimator: Estimator,
    prefix_noise: str,
    clip: Clip,
    most: tuple[float, float] = (np.inf, np.inf),
) -> Choice:
    """Searches for the least bound on a coarse grid, then on finer ones around the best.

    Args:
      p: the problem.
      estimator: how gradients are estimated; the scalar oracle restarts at every step.
      prefix_noise: name of the noise kernel.
      clip: see :data:`Clip`.
      most: records that may be read, if all steps are restarts, and else.
    """
    n = p.num_examples
    fresh, other = (int(min(n, x)) for x in most)
    evaluate = functools.partial(
        _best, p, estimator, prefix_noise, clip, (fresh, other)
    )
    longest = min(_LONGEST, other // 2)
    if estimator.oracle == "scalar" or longest < 2:
        longest = 1
    # Also 2^h - 1, at which a tree's last leaf costs no level.
    periods = {2**h for h in range(longest.bit_length())}
    periods |= {max(1, x - 1) for x in periods} | {3 * x // 2 for x in periods}
    sizes = around(1, n, _RATIOS[0], 60)
    # Two valleys: fresh estimates at every step, and differences.
    starts = [evaluate(1, sizes, sizes, sizes)]
    longer = [x for x in periods if 1 < x <= longest]
    if longer:
        starts.append(min(evaluate(x, sizes, sizes, sizes) for x in longer))

    def refined(best: Choice, ratio: float) -> Choice:
        lists = [
            around(best.restart_batch_size, n, ratio),
            around(best.batch_size, n, ratio),
            around(best.num_windows, n, ratio),
        ]
        near = around(best.period, longest, ratio)
        return min(best, *(evaluate(int(x), *lists) for x in near))

    return min(functools.reduce(refined, _RATIOS[1:], start) for start in starts)


@functools.lru_cache(maxsize=512)
def _norms(prefix_noise: str, period: int) -> tuple[float, float, float]:
    """Returns the norm of C's first column, the largest of its others and of B's rows."""
    kernel = kernels.make(prefix_noise, period)
    columns = kernel.column_norms()
    others = float(max(columns[1:], default=0.0))
    return float(columns[0]), others, float(max(kernel.prefix_norms()))


def _best(
    p: Problem,
    estimator: Estimator,
    prefix_noise: str,
    clip: Clip,
    records: tuple[int, int],
    period: int,
    restart_batch_sizes: np.ndarray,
    batch_sizes: np.ndarray,
    window_counts: np.ndarray,
) -> Choice:
    """Returns the combination of least bound at one period."""
    if period == 1:
        batch_sizes = np.ones(1, np.int64)  # There are no other steps.
    else:  # Not much more than a period of them.
        batch_sizes = np.unique(np.minimum(batch_sizes, 2 * p.num_examples // period))
    b1, b2, count = np.meshgrid(
        restart_batch_sizes, batch_sizes, window_counts, indexing="ij", sparse=True
    )
    read = records[0] if period == 1 else records[1]
    window = bounds.num_steps(read, period, b1, b2) // count
    possible = window >= 2
    window = np.maximum(window, 2)
    max_step = p.radius / bounds.window_radius(window, True)
    c1, c2, bias = clip(max_step)
    first, others, row = _norms(prefix_noise, period)
    leaf = np.maximum(c1 / b1 * first, c2 / b2 * others)
    promise = bounds.promise(
        dim=p.dim,
        lipschitz=p.lipschitz,
        initial_gap=p.initial_gap,
        radius=p.radius,
        period=period,
        restart_batch_size=b1,
        batch_size=b2,
        window=window,
        num_windows=count,
        max_step=max_step,
        reset=True,
        noise_variance=estimator.energy(p.dim) * (p.moved / p.mu * leaf * row) ** 2,
        clip_bias=bias,
        **law(estimator),
    )
    value = np.where(possible, promise.bound, np.inf)
    i, j, k = np.unravel_index(np.argmin(value), value.shape)
    return Choice(
        bound=float(value[i, j, k]),
        period=period,
        restart_batch_size=int(restart_batch_sizes[i]),
        batch_size=int(batch_sizes[j]),
        window=int(window[i, j, k]),
        num_windows=int(window_counts[k]),
    )
