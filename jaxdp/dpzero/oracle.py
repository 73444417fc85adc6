"""The zeroth-order query: K clipped slopes of every record, summed and noised.

What is released is the vector of K sums. One record moves it by at most ``bound`` in L2
(in L1 for plans with Laplace noise) if it is zeroed, added or removed, and by twice that
if it is replaced: both are enforced on integers, for every loss, direction and radius.

Plans that tune their clip also release how many records lie within it, each of them
counted as a half for or against: one record moves that count by a half, or by one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.core import release
from jaxdp.core.types import Grid, ValueFn
from jaxdp.kernels import finite_difference
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.kernels.sphere import Direction


def release_slopes(
    grid: Grid,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    mask: jax.Array,
    rows: Direction,
    noise: jax.Array,
    *,
    smoothing_radius: float,
    count_grid: Grid | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """Releases (sum of clipped slopes + noise) / normalizer.

    Args:
      grid: its clip bounds the norm of one record's K slopes; the unit is relative to it.
      value_fn: per-record losses.
      params: current parameters.
      records: pytree with leading axis B.
      mask: bool (B,); a False row contributes zero.
      rows: K directions; public.
      noise: int32 (K,), in grid units, or (K + 1,) with the count's at the end; secret.
      smoothing_radius: how far the parameters are moved along a direction.
      count_grid: of the count of records within the clip; None where it is not released.
      microbatch_size: records evaluated at once. Changes neither bound nor noise.
      axis_name: mesh axes whose devices share the records: each bounds and sums its part,
        the sums are added as integers, and the noise is added once, to their total. All
        arguments are the same on every device, and so is what is released. Where
        ``finite_difference.SIGNS`` is one of them, its two devices evaluate one sign each
        of the same records: what they bound and sum is the same on both, and counts once.

    Returns:
      float32 (K,): released; or (K + 1,), with the noised count over the normalizer at the
      end. With an infinite clip (the non-private limit) there is no
      grid and no noise, and the finite slopes are averaged as they are.

    Source: DPZero (Zhang et al., ICML 2024), Algorithm 2, with the fixed-point sum of
    one or several directions.
    """
    axes = finite_difference.axes_of(axis_name)
    shared = tuple(name for name in axes if name != finite_difference.SIGNS) or None
    params = finite_difference.on_each(params, shared)

    def bounded(part: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        some, kept = part
        slopes = finite_difference.slopes(
            value_fn,
            params,
            some,
            rows,
            smoothing_radius=smoothing_radius,
            share_signs=shared != (axes or None),
        )
        return release.counted_sum(grid, count_grid, slopes, kept)

    total, counted = finite_difference.sum_microbatches(
        bounded, (records, mask), microbatch_size, shared
    )
    if count_grid is None:
        return release.noised_mean(grid, total, Fixed(noise))
    slopes = release.noised_mean(grid, total, Fixed(noise[:-1]))
    count = release.noised_mean(count_grid, counted, Fixed(noise[-1:]))
    return jnp.concatenate([slopes, count])
