"""The first-order query: clipped per-record gradients, summed and noised.

What is released is a vector of d numbers; one record moves it by at most
``l2_clip_norm`` in L2 (twice that if replaced), enforced on integers.

Plans that tune their clip also release how many records lie within it, each of them
counted as a half for or against: one record moves that count by a half, or by one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxdp.core import release
from jaxdp.core.types import Grid, ValueFn
from jaxdp.kernels import finite_difference
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.fixed_point import Fixed


def gradients(value_fn: ValueFn, params: Any, records: Any) -> jax.Array:
    """Computes the gradients of records, (B, d): neither bounded nor private."""
    flat, unravel = ravel_pytree(params)

    def loss(vector: jax.Array, record: Any) -> jax.Array:
        losses = finite_difference.on_one_record(value_fn, unravel(vector), record)
        finite_difference.check_losses(losses, 1)
        return losses[0]

    lifted = finite_difference.over_records(jax.grad(loss), in_axes=(None, 0))
    return lifted(flat, records)


def release_gradient(
    grid: Grid,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    mask: jax.Array,
    noise: Fixed,
    *,
    count_grid: Grid | None = None,
    count_noise: Fixed | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> tuple[Any, jax.Array]:
    """Releases (sum of clipped per-record gradients + noise) / normalizer.

    Args:
      grid: its clip bounds the norm of one record's gradient.
      value_fn: per-record losses; differentiated.
      params: the trainable parameters only, floating leaves.
      records: pytree with leading axis B.
      mask: bool (B,); a False row contributes zero.
      noise: (d,), in grid units; secret.
      count_grid: of the count of records within the clip; None where it is not released.
      count_noise: (1,), of the count; secret.
      microbatch_size: records differentiated at once (their gradients are stored).
      axis_name: mesh axis whose devices share the records, as in
        :func:`jaxdp.dpzero.oracle.release_slopes`.

    Returns:
      A tree like ``params``, and float32 (1,), the noised count over the normalizer, or
      (0,) without one: released.
    """
    params = finite_difference.on_each(params, axis_name)
    flat, unravel = ravel_pytree(params)

    def total(part: tuple[Any, jax.Array]) -> jax.Array:
        rows = gradients(value_fn, params, part[0])
        return release.counted_sum(grid, count_grid, rows, part[1])

    summed = finite_difference.sum_microbatches(
        total, (records, mask), microbatch_size, axis_name
    )
    count = jnp.zeros((0,), jnp.float32)
    if count_grid is not None and count_noise is not None:
        count = release.noised_mean(count_grid, summed[-1:], count_noise)
    gradient = release.noised_mean(grid, summed[: flat.size], noise)
    return unravel(gradient.astype(flat.dtype)), count
