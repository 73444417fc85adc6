"""Settings that minimise what is proven, under noise that is private whatever happens.

No theorem's formulas: the bound of :mod:`jaxdp.plans.o2nc.bounds` is computed for many
settings, with clips that leave Lipschitz losses alone and noise for the whole budget, and
the least one is taken. Restarting at every step is one of the choices, and often wins with
few records.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp import _validate
from jaxdp._types import Relation
from jaxdp.kernels import prefix_noise as kernels
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.plans.o2nc import bounds, theorems
from jaxdp.plans.o2nc.theorems import Estimator, Problem, Settings

#: Longest period that is tried.
_LONGEST = 2**14
#: Of the numbers on the grids, from the first search to the last.
_RATIOS = (1.5, 1.15, 1.04)


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
    direction: bounds.Direction = "orthonormal",
    num_directions: int | None = None,
    difference: bounds.Difference = "antithetic",
    share_directions: bool = False,
    prefix_noise: str = "blt_3",
) -> Settings:
    """Period, batches and window of least proven bound.

    Privacy rests on the clips alone. That the bound holds, and that clips do not bite
    (except with a probability that the bound includes), rests on the constants.

    Args:
      num_examples: n >= 4, read in a single pass.
      dim: d, parameters that move.
      lipschitz: L, of every record's loss.
      initial_gap: F at the start above its infimum.
      radius: of the smoothed loss; the guarantee is at twice that.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      direction: law of the directions.
      num_directions: m; None takes the smaller of d and 64, the most that may be
        orthonormal. A record costs 2 m values of its loss at a restart, up to 4 m
        elsewhere.
      difference: how DIFF's two points share directions.
      share_directions: whether the records of a batch do: cheaper, and the directions'
        part of the error does not fall with the batch.
      prefix_noise: name of the noise kernel.

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
    _validate.one_of(bounds.DIRECTIONS, direction=direction)
    _validate.one_of(bounds.DIFFERENCES, difference=difference)
    _validate.one_of(kernels.NAMES, prefix_noise=prefix_noise)
    _validate.instance(bool, share_directions=share_directions)
    most = min(dim, MAX_ORTHONORMAL)
    m = most if num_directions is None else num_directions
    at_most = most if direction == "orthonormal" else None
    _validate.integer(at_most=at_most, num_directions=m)
    estimator = Estimator(int(m), direction, difference, share_directions)
    clip = functools.partial(theorems.clips, problem, estimator, failure=bounds.FAILURE)
    best = search(problem, estimator, prefix_noise, clip)
    reach = bounds.window_radius(best.window, True)
    return theorems.settled(
        "certified",
        problem,
        estimator=estimator,
        period=best.period,
        restart_batch_size=best.restart_batch_size,
        batch_size=best.batch_size,
        window=best.window,
        num_windows=best.num_windows,
        max_step=radius / reach,
        reset=True,
        prefix_noise=prefix_noise,
        failure=bounds.FAILURE,
    )


class Choice(NamedTuple):
    """A point of the search, and its bound."""

    bound: float
    period: int
    restart_batch_size: int
    batch_size: int
    window: int
    num_windows: int


#: ``clip(max_step) -> (C1, C2, bias)``.
Clip = Callable[[bounds.Number], tuple[float, bounds.Number, float]]


def search(p: Problem, estimator: Estimator, prefix_noise: str, clip: Clip) -> Choice:
    """The least bound over a coarse grid, and then over finer ones around the best."""
    norms = functools.cache(functools.partial(_norms, prefix_noise))
    evaluate = functools.partial(_best, p, estimator, norms, clip)
    n, longest = p.num_examples, min(_LONGEST, p.num_examples // 2)
    # Also 2^h - 1, at which a tree's last leaf costs no level.
    periods = {2**h for h in range(longest.bit_length())}
    periods |= {max(1, x - 1) for x in periods} | {3 * x // 2 for x in periods}
    sizes = _around(1, n, _RATIOS[0], 60)
    best = min(evaluate(x, sizes, sizes, sizes) for x in periods if x <= longest)
    for ratio in _RATIOS[1:]:
        lists = [
            _around(best.restart_batch_size, n, ratio),
            _around(best.batch_size, n, ratio),
            _around(best.num_windows, n, ratio),
        ]
        near = _around(best.period, longest, ratio)
        best = min(best, *(evaluate(int(x), *lists) for x in near))
    return best


def _around(x: int, at_most: int, ratio: float, reach: int = 3) -> np.ndarray:
    """Integers in [1, at_most] at powers of a ratio from x, and x's neighbours."""
    powers = np.rint(x * ratio ** np.arange(-reach, reach + 1.0))
    powers = np.append(powers, [x - 1, x + 1])
    return np.unique(np.clip(powers, 1, at_most)).astype(np.int64)


def _norms(prefix_noise: str, period: int) -> tuple[float, float, float]:
    """Longest column of the first leaf and of the others, and longest row."""
    kernel = kernels.make(prefix_noise, period)
    columns = kernel.column_norms()
    others = float(max(columns[1:], default=0.0))
    return float(columns[0]), others, float(max(kernel.prefix_norms()))


def _best(
    p: Problem,
    estimator: Estimator,
    norms: Callable[[int], tuple[float, float, float]],
    clip: Clip,
    period: int,
    restart_batch_sizes: np.ndarray,
    batch_sizes: np.ndarray,
    window_counts: np.ndarray,
) -> Choice:
    """The best of all combinations at one period."""
    if period == 1:
        batch_sizes = np.ones(1, np.int64)  # There are no other steps.
    b1, b2, count = np.meshgrid(
        restart_batch_sizes, batch_sizes, window_counts, indexing="ij", sparse=True
    )
    window = bounds.num_steps(p.num_examples, period, b1, b2) // count
    possible = window >= 2
    window = np.maximum(window, 2)
    max_step = p.radius / bounds.window_radius(window, True)
    c1, c2, bias = clip(max_step)
    first, others, row = norms(period)
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
        noise_variance=p.dim * (p.moved / p.mu * leaf * row) ** 2,
        clip_bias=bias,
        **dataclasses.asdict(estimator),
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
