"""The first-order query: clipped per-record gradients, summed and noised.

What is released is a vector of d numbers; one record moves it by at most
``l2_clip_norm`` in L2 (twice that if replaced), enforced on integers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxdp.core.types import PrivatePlan, ValueFn
from jaxdp.kernels import clip, finite_difference
from jaxdp.kernels.finite_difference import AxisName


def release_gradient(
    plan: PrivatePlan,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    mask: jax.Array,
    noise: jax.Array,
    *,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Any:
    """Releases (sum of clipped per-record gradients + noise) / normalizer.

    Args:
      plan: bound, grid and normalizer.
      value_fn: per-record losses; differentiated.
      params: the trainable parameters only, floating leaves.
      records: pytree with leading axis B.
      mask: bool (B,); a False row contributes zero.
      noise: int32 (d,), in grid units; secret.
      microbatch_size: records differentiated at once (their gradients are stored).
      axis_name: mesh axis whose devices share the records, as in
        :func:`jaxdp.dpzero.oracle.release_slopes`.

    Returns:
      A tree like ``params``: released.
    """
    flat, unravel = ravel_pytree(finite_difference.on_each(params, axis_name))

    def loss(vector: jax.Array, record: Any) -> jax.Array:
        one = jax.tree.map(lambda x: x[None], record)
        return value_fn(unravel(vector), one)[0]

    def gradients(part: Any) -> jax.Array:
        return jax.vmap(jax.grad(loss), in_axes=(None, 0))(flat, part)

    def total(part: tuple[Any, jax.Array]) -> jax.Array:
        rows, keep = gradients(part[0]), part[1]
        if plan.grid_bits is None:
            kept = clip.clip_vector(rows, jnp.inf)
            return jnp.where(keep[:, None], kept, 0).sum(axis=0)
        return clip.grid_sum(rows, keep, plan.l2_clip_norm, plan.grid_bits)

    summed = finite_difference.sum_microbatches(
        total, (records, mask), microbatch_size, axis_name
    )
    if plan.grid_bits is None:
        return unravel((summed / plan.normalizer).astype(flat.dtype))
    value = clip.from_grid(
        summed + noise, plan.l2_clip_norm, plan.grid_bits, plan.normalizer
    )
    return unravel(value.astype(flat.dtype))
