"""Gradient and gradient-difference queries on adaptively sized batches.

What is released is the mean over a stretch of records of clipped per-record vectors, plus
noise. The stretch is chosen by a cursor that every release moves on, so a record is in one
of them. One record moves the sum of its stretch by at most the bound (twice that if
replaced), on integers.

Two kinds of stretch, in the words of the variance-reduced estimator:

* a *refresh* has a fixed number of records b, each gradient bounded by ``l2_clip_norm``;
* a *difference* has b_t records, and a change of gradient is bounded by ``b_t`` times a
  constant: one record moves the mean by a constant, however many there are. That the
  bound is at least as large as smooth losses need is what b_t is chosen for.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxdp.core import release
from jaxdp.core.types import Grid, ValueFn
from jaxdp.kernels import finite_difference
from jaxdp.kernels.finite_difference import AxisName, over_records
from jaxdp.kernels.fixed_point import Fixed


class Records(NamedTuple):
    """Stretch of consecutive records. Secret, as the data are."""

    data: Any  # pytree of arrays with n rows
    mask: jax.Array | None  # shape=(n,), dtype=bool; rows that exist
    first: jax.Array  # shape=(), dtype=int32
    count: jax.Array  # shape=(), dtype=int32
    size: int  # rows that are read at once; static
    axis_name: AxisName | None = None  # mesh axes whose devices share them; static

    def on_each(self, *points: jax.Array) -> list[jax.Array]:
        """Returns points by which each device differentiates its own records alone."""
        return finite_difference.on_each(list(points), self.axis_name)


#: One record's loss at a vector of all parameters.
Loss = Callable[[jax.Array, Any], jax.Array]


def record_loss(value_fn: ValueFn, unravel: Callable[[jax.Array], Any]) -> Loss:
    """Returns ``value_fn`` as a loss of a flat vector and a single record.

    Raises:
      ValueError: when traced, where it does not give one loss per record.
    """

    def loss(vector: jax.Array, record: Any) -> jax.Array:
        losses = finite_difference.on_one_record(value_fn, unravel(vector), record)
        finite_difference.check_losses(losses, 1)
        return losses[0]

    return loss


def each(value_fn: ValueFn, params: Any, records: Any) -> jax.Array:
    """Computes the gradients of records, (B, d): neither bounded nor private."""
    flat, unravel = ravel_pytree(params)
    loss = record_loss(value_fn, unravel)
    return over_records(jax.grad(loss), in_axes=(None, 0))(flat, records)


def release_gradient(
    grid: Grid, loss: Loss, point: jax.Array, records: Records, noise: Fixed
) -> jax.Array:
    """Releases the mean of clipped gradients plus noise.

    Args:
      grid: its clip bounds one record's gradient; its normalizer is the number of records.
      loss: of one record.
      point: float32 (d,).
      records: the stretch.
      noise: integers (d,), in grid units; secret.

    Returns:
      float32 (d,): released.
    """
    (point,) = records.on_each(point)
    gradients = over_records(functools.partial(jax.grad(loss), point))
    total = release.bounded_stretch(grid, gradients, point.size, *records)
    return release.noised_mean(grid, total, noise)


def release_difference(
    grid: Grid,
    loss: Loss,
    point: jax.Array,
    reference: jax.Array,
    records: Records,
    noise: Fixed,
) -> jax.Array:
    """Releases the mean gradient's change from ``reference`` to ``point``, plus noise.

    Arguments are as of :func:`release_gradient`, but the grid's clip, times the number of
    records, at least one, bounds the change of one record's gradient; its normalizer is 1.

    Returns:
      float32 (d,): released. One record moves the mean before the noise by the grid's
      clip (twice that if replaced), whatever the number of records.
    """
    point, reference = records.on_each(point, reference)
    gradients = over_records(jax.grad(loss), in_axes=(None, 0))
    bound = grid.l2_clip_norm * records.count.astype(jnp.float32)
    total = release.bounded_stretch(
        grid._replace(l2_clip_norm=bound),
        lambda some: gradients(point, some) - gradients(reference, some),
        point.size,
        *records,
    )
    return release.noised_mean(grid, total, noise)
