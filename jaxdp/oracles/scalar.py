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

from jaxdp._types import ValueFn, ZerothOrderPlan
from jaxdp.kernels import clip, finite_difference
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

    Returns:
      float32 (K,): released; or (K + 1,), with the noised count over the normalizer at the
      end. With an infinite clip (the non-private limit) there is no
      grid and no noise, and the finite slopes are averaged as they are.

    Source: DPZero (Zhang et al., ICML 2024), Algorithm 2, with the fixed-point sum of
    one or several directions.
    """
    slopes = finite_difference.slopes(
        value_fn,
        params,
        records,
        rows,
        smoothing_radius=plan.smoothing_radius,
        microbatch_size=microbatch_size,
    )
    return release_sum(plan, slopes, mask, noise, bound)


def release_sum(
    plan: ZerothOrderPlan,
    rows: jax.Array,
    mask: jax.Array,
    noise: jax.Array,
    bound: float | jax.Array,
) -> jax.Array:
    """Bounds rows (B, K), sums them exactly, adds integer noise, divides by a constant."""
    if plan.grid_bits is None:
        kept = jnp.where(mask[:, None], clip.clip_vector(rows, jnp.inf), 0)
        return kept.sum(axis=0).astype(jnp.float32) / jnp.float32(plan.normalizer)
    bits, constant = plan.grid_bits, plan.normalizer
    total = clip.grid_sum(rows, mask, bound, bits, order=plan.norm_order)
    if plan.clip_tuning is None:
        return clip.from_grid(total + noise, bound, bits, constant)
    count = _count_within(rows, mask, bound, bits)
    return jnp.concatenate(
        [
            clip.from_grid(total + noise[:-1], bound, bits, constant),
            clip.from_grid(count + noise[-1:], 0.5, bits, constant),
        ]
    )


def _count_within(
    rows: jax.Array, mask: jax.Array, bound: float | jax.Array, bits: int
) -> jax.Array:
    """Records within the bound minus records beyond it, in units of 2**-bits: int32 (1,).

    Masked rows and rows that are not finite are in neither.
    """
    counts = mask & jnp.all(jnp.isfinite(rows), axis=-1)
    within = jnp.linalg.norm(rows.astype(jnp.float32), axis=-1) <= bound
    signs = jnp.where(counts, jnp.where(within, 1, -1), 0)
    return signs.sum(dtype=jnp.int32)[None] * 2**bits
