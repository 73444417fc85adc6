"""The first-order query: clipped per-record gradients, summed and noised.

What is released is a vector of d numbers; one record moves it by at most
``l2_clip_norm`` in L2 (twice that if replaced), enforced on integers.
"""

from typing import Any

import jax
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
        one = jax.tree.map(lambda x: x[None], record)
        return value_fn(unravel(vector), one)[0]

    return jax.vmap(jax.grad(loss), in_axes=(None, 0))(flat, records)


def release_gradient(
    grid: Grid,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    mask: jax.Array,
    noise: Fixed,
    *,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Any:
    """Releases (sum of clipped per-record gradients + noise) / normalizer.

    Args:
      grid: its clip bounds the norm of one record's gradient.
      value_fn: per-record losses; differentiated.
      params: the trainable parameters only, floating leaves.
      records: pytree with leading axis B.
      mask: bool (B,); a False row contributes zero.
      noise: (d,), in grid units; secret.
      microbatch_size: records differentiated at once (their gradients are stored).
      axis_name: mesh axis whose devices share the records, as in
        :func:`jaxdp.dpzero.oracle.release_slopes`.

    Returns:
      A tree like ``params``: released.
    """
    params = finite_difference.on_each(params, axis_name)
    flat, unravel = ravel_pytree(params)

    def total(part: tuple[Any, jax.Array]) -> jax.Array:
        return release.bounded_sum(grid, gradients(value_fn, params, part[0]), part[1])

    summed = finite_difference.sum_microbatches(
        total, (records, mask), microbatch_size, axis_name
    )
    return unravel(release.noised_mean(grid, summed, noise).astype(flat.dtype))
