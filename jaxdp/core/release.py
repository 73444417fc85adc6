r"""The sensitive step: contributions of records bounded, summed, noised and divided.

.. math::
   \frac{1}{\bar B}\Big(\sum_i \mathrm{clip}_C(x_i) + Z\Big)

The only place in the library where this is done: every method's oracle computes the
contributions :math:`x_i` of its records and comes here with the grid of its plan. On a
:class:`~jaxdp.core.types.Grid` of integers, one record moves the sum by at most the clip
(twice that if replaced), exactly and for every contribution. The noise is added to these
integers; whatever floats make of the noised sum is post-processing. The divisor is a
constant, never the number of records that a step happened to read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core.types import Grid
from jaxdp.kernels import clip, finite_difference, fixed_point, stretch
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.fixed_point import Fixed


def bounded_sum(grid: Grid, rows: Any, mask: jax.Array) -> Any:
    """Sums clipped contributions exactly; secret, for it is not noised yet.

    Args:
      grid: clip (a constant, or an array shape=() that is public) and grid unit.
      rows: floating (B, K), one row a record; one with a NaN or an infinity counts zero.
        Or a tree of arrays (B, ...), each with a part of every row.
      mask: bool (B,); a False row counts zero.

    Returns:
      int32 (K,), in grid units; or a tree of them. Without a clip (the non-private limit),
      the sum of the finite rows as they are, floating.
    """
    if grid.bits is None:

        def plain(part: jax.Array) -> jax.Array:
            kept = mask.reshape(-1, *(1 for _ in part.shape[1:]))
            return jnp.where(kept, part, 0).sum(axis=0)

        return jax.tree.map(plain, clip.clip_vector(rows, jnp.inf))
    bound, bits, limit = grid.l2_clip_norm, grid.bits, grid.limit
    return clip.grid_sum(rows, mask, bound, bits, order=grid.order, limit=limit)


def counted_sum(
    grid: Grid, count_grid: Grid | None, rows: Any, mask: jax.Array
) -> tuple[Any, jax.Array | None]:
    """Sums clipped contributions, and counts those within the clip; secret.

    A record counts a half if the norm of its row is within the clip, the negative of a half
    if it is beyond, and zero if the row is not finite or masked.

    Args:
      grid: as in :func:`bounded_sum`, like ``rows`` and ``mask``.
      count_grid: of the count, with a clip of a half; None: nothing is counted.
      rows: see there.
      mask: see there.

    Returns:
      The sum, and the count, int32 (1,), or None; each in units of its grid.
    """
    total = bounded_sum(grid, rows, mask)
    if count_grid is None:
        return total, None
    squares, finite = jnp.zeros(len(mask), jnp.float32), True
    for part in jax.tree.leaves(rows):
        columns = tuple(range(1, part.ndim))
        squares += jnp.sum(jnp.square(part.astype(jnp.float32)), axis=columns)
        finite &= jnp.isfinite(part).all(axis=columns)
    within = jnp.sqrt(squares) <= grid.l2_clip_norm
    halves = jnp.where(within, jnp.float32(0.5), jnp.float32(-0.5))
    halves = jnp.where(finite, halves, 0)[:, None]
    return total, bounded_sum(count_grid, halves, mask)


def bounded_stretch(
    grid: Grid,
    rows_of: Callable[[Any], jax.Array],
    dim: int,
    data: Any,
    mask: jax.Array | None,
    first: jax.Array,
    count: jax.Array,
    size: int,
    axis_name: AxisName | None = None,
) -> stretch.Wide:
    """Sums clipped contributions of a stretch of records exactly; secret.

    The same as :func:`bounded_sum` in two words, for stretches whose place and length are
    known only at run time: :func:`jaxdp.kernels.stretch.grid_sum`, on the grid.
    """
    assert grid.bits is not None
    bound, bits = grid.l2_clip_norm, grid.bits
    how: dict[str, Any] = {"bound": bound, "bits": bits, "size": size}
    return stretch.grid_sum(
        rows_of, dim, data, mask, first, count, **how, axis_name=axis_name
    )


def noised_mean(grid: Grid, total: Any, noise: Any) -> Any:
    """Adds noise to a bounded sum and divides it by a constant: released.

    Args:
      grid: of the sum.
      total: of :func:`bounded_sum` or :func:`bounded_stretch`, (K,), or a tree.
      noise: ``Fixed`` (K,), in units of the grid's noise, or a tree of them; secret.

    Returns:
      float32 (K,), or a tree.

    Raises:
      ValueError: another shape than the noise's; or, in a ``shard_map`` that checks
        replication, sums that devices with the same noise do not share.
    """

    def mean(total: Any, noise: Fixed) -> jax.Array:
        if grid.bits is None:
            return total.astype(jnp.float32) / jnp.float32(grid.normalizer)
        apart = finite_difference.varying(total) - finite_difference.varying(noise)
        if grid.noise_std and apart:
            raise ValueError(
                f"devices along {min(apart)!r} have sums of their own and one noise: give "
                "them all the same params, state and batch, or leave the axis out of the "
                "axis_names of jax.shard_map, for XLA to partition"
            )
        # Broadcast, one sum would be released several times, each under other noise.
        shape = jnp.shape(total.low if isinstance(total, stretch.Wide) else total)
        if shape != noise.high.shape:
            raise ValueError(
                f"noise must have the shape {shape} of the sum, got {noise.high.shape}"
            )
        if isinstance(total, stretch.Wide):
            units = stretch.to_float(stretch.add(total, noise.high))
        else:
            units = ((total << grid.shift) + noise.high).astype(jnp.float32)
        if noise.low is not None:
            units += noise.low.astype(jnp.float32) * np.float32(fixed_point.ULP)
        return units * jnp.asarray(grid.noise_unit, jnp.float32)

    wide = lambda x: isinstance(x, stretch.Wide)  # noqa: E731
    return jax.tree.map(mean, total, noise, is_leaf=wide)
