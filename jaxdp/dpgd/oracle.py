"""The first-order query: clipped per-record gradients, summed and noised.

What is released is a vector of d numbers; one record moves it by at most
``l2_clip_norm`` in L2 (twice that if replaced), enforced on integers.

Plans that tune their clip also release how many records lie within it, each of them
counted as a half for or against: one record moves that count by a half, or by one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.core import release
from jaxdp.core.types import Grid, ValueFn
from jaxdp.kernels import finite_difference, parts
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.fixed_point import Fixed


def gradients(
    value_fn: ValueFn, params: Any, records: Any, apart: parts.Apart = parts.NONE
) -> Any:
    """Computes the gradients of records: neither bounded nor private.

    Args:
      value_fn: per-record losses; differentiated.
      params: the trainable parameters only, floating leaves.
      records: pytree with leading axis B.
      apart: leaves of ``params`` whose gradients stay apart, as in ``kernels.parts``.

    Returns:
      (B, d), or ``kernels.parts.Parts`` with such leaves.
    """

    def loss(params: Any, record: Any) -> jax.Array:
        losses = finite_difference.on_one_record(value_fn, params, record)
        finite_difference.check_losses(losses, 1)
        return losses[0]

    lifted = finite_difference.over_records(jax.grad(loss), in_axes=(None, 0))
    return parts.split(lifted(params, records), every, apart)


def release_gradient(
    grid: Grid,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    mask: jax.Array,
    noise: Any,
    *,
    apart: parts.Apart = parts.NONE,
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
      noise: ``Fixed`` (d,), in grid units, or a tree like the gradients'; secret.
      apart: as in :func:`gradients`.
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

    def total(part: tuple[Any, jax.Array]) -> tuple[Any, jax.Array | None]:
        rows = gradients(value_fn, params, part[0], apart)
        return release.counted_sum(grid, count_grid, rows, part[1])

    summed, counted = finite_difference.sum_microbatches(
        total, (records, mask), microbatch_size, axis_name
    )
    count = jnp.zeros((0,), jnp.float32)
    if count_grid is not None and count_noise is not None:
        count = release.noised_mean(count_grid, counted, count_noise)
    gradient = parts.join(release.noised_mean(grid, summed, noise), params, every)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, params), count


def every(path: str) -> bool:
    """Returns True: all of the leaves that are given move."""
    return True
