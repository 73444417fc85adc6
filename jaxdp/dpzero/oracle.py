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

from jaxdp.core.types import ValueFn, ZerothOrderPlan
from jaxdp.kernels import clip, finite_difference
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.sphere import Direction


def release_slopes(
    plan: ZerothOrderPlan,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    mask: jax.Array,
    rows: Direction,
    noise: jax.Array,
    *,
    bound: float | jax.Array,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """Releases (sum of clipped slopes + noise) / normalizer.

    Args:
      plan: grid, normalizer and smoothing radius.
      value_fn: per-record losses.
      params: current parameters.
      records: pytree with leading axis B.
      mask: bool (B,); a False row contributes zero.
      rows: K directions; public.
      noise: int32 (K,), in grid units, or (K + 1,) with the count's at the end; secret.
      bound: on the norm of one record's K slopes; the grid's unit is relative to it.
      microbatch_size: records evaluated at once. Changes neither bound nor noise.
      axis_name: mesh axis whose devices share the records: each bounds and sums its part,
        the sums are added as integers, and the noise is added once, to their total. All
        arguments are the same on every device, and so is what is released.

    Returns:
      float32 (K,): released; or (K + 1,), with the noised count over the normalizer at the
      end. With an infinite clip (the non-private limit) there is no
      grid and no noise, and the finite slopes are averaged as they are.

    Source: DPZero (Zhang et al., ICML 2024), Algorithm 2, with the fixed-point sum of
    one or several directions.
    """
    params = finite_difference.on_each(params, axis_name)

    def bounded(part: tuple[Any, jax.Array]) -> jax.Array:
        some, kept = part
        slopes = finite_difference.slopes(
            value_fn, params, some, rows, smoothing_radius=plan.smoothing_radius
        )
        return _bounded_sum(plan, slopes, kept, bound)

    total = finite_difference.sum_microbatches(
        bounded, (records, mask), microbatch_size, axis_name
    )
    return _noised(plan, total, noise, bound)


def _bounded_sum(
    plan: ZerothOrderPlan, rows: jax.Array, mask: jax.Array, bound: float | jax.Array
) -> jax.Array:
    """Bounds rows (B, K) and sums them exactly: int32 (K,), or (K + 1,) with the count.

    Not noised yet. Without a grid, the sum of the finite rows as they are.
    """
    if plan.grid_bits is None:
        return jnp.where(mask[:, None], clip.clip_vector(rows, jnp.inf), 0).sum(axis=0)
    bits = plan.grid_bits
    total = clip.grid_sum(rows, mask, bound, bits, order=plan.norm_order)
    if plan.clip_tuning is None:
        return total
    return jnp.concatenate([total, _count_within(rows, mask, bound, bits)])


def _noised(
    plan: ZerothOrderPlan, total: jax.Array, noise: jax.Array, bound: float | jax.Array
) -> jax.Array:
    """Adds integer noise to the sum of :func:`_bounded_sum` and divides by a constant."""
    bits, constant = plan.grid_bits, plan.normalizer
    if bits is None:
        return total.astype(jnp.float32) / jnp.float32(constant)
    total = total + noise
    if plan.clip_tuning is None:
        return clip.from_grid(total, bound, bits, constant)
    return jnp.concatenate(
        [
            clip.from_grid(total[:-1], bound, bits, constant),
            clip.from_grid(total[-1:], 0.5, bits, constant),
        ]
    )


def _count_within(
    rows: jax.Array, mask: jax.Array, bound: float | jax.Array, bits: int
) -> jax.Array:
    """Counts records within the bound minus those beyond it, times 2**bits: int32 (1,).

    Masked rows and rows that are not finite are in neither.
    """
    counts = mask & jnp.all(jnp.isfinite(rows), axis=-1)
    within = jnp.linalg.norm(rows.astype(jnp.float32), axis=-1) <= bound
    signs = jnp.where(counts, jnp.where(within, 1, -1), 0)
    return signs.sum(dtype=jnp.int32)[None] * 2**bits
