"""The largest of several losses, and the loss of the worst group of records."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.core import validate
from jaxdp.kernels.finite_difference import on_one_record, over_records
from jaxdp.kernels.polytope import Simplex
from jaxdp.saddle.oracles.sums import (
    Bound,
    Domain,
    Query,
    VertexGradients,
    check_losses,
    finite,
    row_sums,
    to_grid,
    vertex_rows,
)


@dataclasses.dataclass(frozen=True)
class MaxOfLosses(VertexGradients):
    r"""A saddle-point problem :math:`f(x,y;z)=\sum_iy_if_i(x;z)`, y on a simplex.

    ==================  ==========================  ====================================
    form                ``loss_fn(x, batch)``       :math:`f_i(x;z)`
    ==================  ==========================  ====================================
    several losses      ``(B, d_y)``                the i-th of them
    groups of records   ``(B,)``                    :math:`\mathbf 1[g_z=i]\,\ell(x;z)/p_i`
    ==================  ==========================  ====================================

    The derivative by y is the losses themselves: with groups one number a record, which
    is summed by group, so that nothing of size (B, d_y) is stored. Losses in [0, M] fit
    a clip of M/2 with ``center=True``.

    Attributes:
      loss_fn: losses of the records, convex in x.
      group_fn: ``group_fn(batch) -> (B,)`` integers in [0, d_y): the group of each record;
        None: several losses. A record of any other group counts zero.
      group_probabilities: :math:`p_i` of the d_y >= 2 groups. Public: a constant of the
        problem, not the shares of the groups in private data.
      domain_x: polytope of x; None is the simplex.

    Raises:
      TypeError, ValueError: ``group_fn`` without ``group_probabilities`` or the other way
        round, or probabilities outside (0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def losses(x, batch):
      ...     return (batch[:, :1] - x) ** 2
      >>> problem = jaxdp.MaxOfLosses(losses)
      >>> x, y = jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0])
      >>> problem(x, y, jnp.array([[1.5], [0.5]])).tolist()
      [1.0, 0.0]
    """

    loss_fn: Callable[[jax.Array, Any], jax.Array]
    group_fn: Callable[[Any], jax.Array] | None = None
    group_probabilities: Sequence[float] | None = None
    domain_x: Domain | None = None
    domain_y: Domain | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        if (self.group_fn is None) != (self.group_probabilities is None):
            raise ValueError(
                "group_fn and group_probabilities belong together, got "
                f"{self.group_fn!r} and {self.group_probabilities!r}"
            )
        if self.group_probabilities is None:
            return
        given = tuple(self.group_probabilities)
        if len(given) < 2:
            raise ValueError(
                f"group_probabilities must name at least two groups, got {given!r}"
            )
        for i, p in enumerate(given):
            validate.probability(allow_one=True, **{f"group_probabilities[{i}]": p})
        object.__setattr__(self, "group_probabilities", tuple(map(float, given)))
        object.__setattr__(self, "domain_y", Simplex(len(given)))

    def _values(self, x: jax.Array, y: jax.Array, batch: Any) -> jax.Array:
        losses = self.loss_fn(x, batch)
        if self.group_fn is None:
            return jnp.sum(losses * y, axis=-1)
        group, known = self._groups(self.group_fn(batch))
        return jnp.where(known, losses * (y * self._inverse())[group], 0)

    def _sums(
        self, query: Query, records: Any, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        if query.y is None or query.bound_y is None:
            raise ValueError("y must be a point: the weights of the losses")
        if self.group_fn is None:
            return self._several(query, query.y, records, mask)
        return self._grouped(query, query.y, query.bound_y, records, mask)

    def _several(
        self, query: Query, y: jax.Array, records: Any, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        def weighted(x: jax.Array, record: Any) -> tuple[jax.Array, jax.Array]:
            losses = on_one_record(self.loss_fn, x, record)
            losses = check_losses("loss_fn", losses, (1, y.shape[0]))[0]
            return jnp.sum(losses * y), losses

        differentiate = over_records(
            jax.grad(weighted, has_aux=True), in_axes=(None, 0)
        )
        rows_x, losses = differentiate(query.x, records)
        return self._row_sums(query, rows_x, losses, mask)

    def _grouped(
        self, query: Query, y: jax.Array, bound_y: Bound, records: Any, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        def loss(x: jax.Array, record: Any) -> jax.Array:
            losses = on_one_record(self.loss_fn, x, record)
            return check_losses("loss_fn", losses, (1,))[0]

        differentiate = over_records(jax.value_and_grad(loss), in_axes=(None, 0))
        losses, rows_x = differentiate(query.x, records)
        group, known = over_records(self._group)(records)
        losses = losses * self._inverse()[group]
        ok = mask & known & jnp.isfinite(losses) & finite(rows_x)
        weights = (y * self._inverse())[group]
        rows_x, ok = vertex_rows(self.domain_x, rows_x * weights[:, None], ok)
        sum_x = row_sums(self.domain_x, rows_x, ok, query.bound_x, query.center)
        # A record's derivative by y: one loss among zeros. Its middle is half that loss,
        # and centred it is plus one half at its group and minus one half elsewhere.
        units = to_grid(losses / 2 if query.center else losses, ok, bound_y)
        sum_y = jax.ops.segment_sum(units, group, y.shape[0])
        if query.center:
            sum_y = 2 * sum_y - jnp.sum(sum_y, dtype=jnp.int32)
        return sum_x, sum_y

    def _group(self, record: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the group of a record, (), and whether it is one of the known groups."""
        assert self.group_fn is not None
        group = jnp.asarray(on_one_record(self.group_fn, record))
        if group.shape != (1,):
            raise ValueError(
                "group_fn must return integers of shape (B,), got "
                f"shape {group.shape} for one record"
            )
        return self._groups(group[0])

    def _groups(self, group: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the groups, 0 for unknown ones, and whether they are known."""
        assert self.group_probabilities is not None
        group = jnp.asarray(group)
        if not jnp.issubdtype(group.dtype, jnp.integer):
            raise ValueError(f"group_fn must return integers, got {group.dtype}")
        known = (group >= 0) & (group < len(self.group_probabilities))
        return jnp.where(known, group, 0).astype(jnp.int32), known

    def _inverse(self) -> jax.Array:
        """Returns the inverse group probabilities 1 / p_i, (d_y,)."""
        return 1 / jnp.asarray(self.group_probabilities, jnp.float32)
