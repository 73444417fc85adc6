"""Losses of several public parameters, relative to the median of each record."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.kernels.finite_difference import on_one_record, over_records
from jaxdp.saddle.oracles.sums import (
    Domain,
    Query,
    VertexGradients,
    check_losses,
    row_sums,
)


@dataclasses.dataclass(frozen=True)
class Candidates(VertexGradients):
    r"""The problem :math:`f(x;z)=\sum_kx_k\ell(\theta_k;z)` of K public parameters.

    A record's vertex gradient has a number for every candidate: its loss there, relative to
    the median of the record's own finite losses. A loss that is not finite counts as the
    largest, the bound. A record without a finite loss counts zero for all candidates, and
    so does a blank one, whose floating numbers are all NaN: a loss that compares would be
    finite. A median: one candidate that is far off then hides no difference of the others,
    as it would by the middle of their range.

    Attributes:
      value_fn: ``value_fn(params, batch) -> losses (B,)``. Every record is evaluated
        alone, as a batch of one, at one candidate after the other.
      candidates: K pytrees of one structure and of the same shapes; public.
    """

    value_fn: Callable[[Any, Any], jax.Array]
    candidates: Sequence[Any]
    domain_x: Domain | None = dataclasses.field(default=None, init=False)
    domain_y: Domain | None = dataclasses.field(default=None, init=False)

    def _sums(
        self, query: Query, records: Any, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        def loss(params: Any, record: Any) -> jax.Array:
            losses = on_one_record(self.value_fn, params, record)
            return check_losses("value_fn", losses, (1,))[0]

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *self.candidates)
        of_all = over_records(loss, in_axes=(None, 0))
        losses = jax.lax.map(lambda params: of_all(params, records), stacked).T
        rows, known = relative(losses, query.bound_x.clip)
        known = mask & known & ~blank(records)
        return row_sums(None, rows, known, query.bound_x, query.center), None


def blank(records: Any) -> jax.Array:
    """Returns bool (B,): True for records whose floating numbers are all NaN.

    A record without floating numbers is never blank.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.saddle.oracles.candidates import blank
      >>> x = jnp.array([[1.0, jnp.nan], [jnp.nan, jnp.nan]])
      >>> blank((x, jnp.array([0, 1]))).tolist()
      [False, True]
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(records)]
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    found = jnp.full(len(leaves[0]), bool(floats))
    for leaf in floats:
        found &= jnp.isnan(leaf.reshape(len(leaf), -1)).all(axis=1)
    return found


def relative(losses: jax.Array, bound: float) -> tuple[jax.Array, jax.Array]:
    """Returns losses relative to the median of their row, clipped, and which rows count.

    Args:
      losses: float32 (B, K); may be anything.
      bound: C > 0.

    Returns:
      float32 (B, K) in [-C, C]: a row depends on the same row alone. Bool (B,): False
      where no loss is finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.saddle.oracles.candidates import relative
      >>> relative(jnp.array([[1.0, 3.0, 2.5, jnp.nan]]), 1.0)[0].tolist()
      [[-1.0, 0.5, 0.0, 1.0]]
    """
    finite = jnp.isfinite(losses)
    count = finite.sum(axis=-1, keepdims=True)
    ordered = jnp.sort(jnp.where(finite, losses, jnp.inf), axis=-1)
    # Halved first: the sum of two large numbers may overflow where the middle does not.
    middle = sum(
        jnp.take_along_axis(ordered, jnp.maximum(place, 0) // 2, axis=-1) / 2
        for place in (count - 1, count)
    )
    apart = jnp.clip(losses - middle, -bound, bound)
    return jnp.where(finite, apart, bound), count[..., 0] > 0
