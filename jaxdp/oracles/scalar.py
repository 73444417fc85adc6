"""The zeroth-order query: K clipped slopes of every record, summed and noised.

What is released is the vector of K sums. One record moves it by at most
``l2_clip_norm`` in L2 if it is zeroed, added or removed, and by twice that if it is
replaced: both are enforced on integers, for every loss, direction and radius.
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
    microbatch_size: int | None = None,
) -> jax.Array:
    """Releases (sum of clipped slopes + noise) / normalizer.

    Args:
      plan: bound, grid, normalizer and smoothing radius.
      value_fn: per-record losses.
      params: current parameters.
      records: pytree with leading axis B.
      mask: bool (B,); a False row contributes zero.
      rows: K directions; public.
      noise: int32 (K,), in grid units; secret.
      microbatch_size: records evaluated at once. Changes neither bound nor noise.

    Returns:
      float32 (K,): released. With an infinite clip (the non-private limit) there is no
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
    return release_sum(plan, slopes, mask, noise)


def release_sum(
    plan: ZerothOrderPlan, rows: jax.Array, mask: jax.Array, noise: jax.Array
) -> jax.Array:
    """Bounds rows (B, K), sums them exactly, adds integer noise, divides by a constant."""
    if plan.grid_bits is None:
        kept = jnp.where(mask[:, None], clip.clip_vector(rows, jnp.inf), 0)
        return kept.sum(axis=0).astype(jnp.float32) / jnp.float32(plan.normalizer)
    total = clip.grid_sum(rows, mask, plan.l2_clip_norm, plan.grid_bits)
    return clip.from_grid(
        total + noise, plan.l2_clip_norm, plan.grid_bits, plan.normalizer
    )
