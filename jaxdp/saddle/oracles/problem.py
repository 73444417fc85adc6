"""Any per-record loss, by automatic differentiation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxdp.kernels.finite_difference import on_one_record, over_records
from jaxdp.saddle.oracles.sums import (
    Domain,
    Query,
    VertexGradients,
    check_losses,
    finite,
)


@dataclasses.dataclass(frozen=True)
class Problem(VertexGradients):
    r"""A saddle-point problem :math:`\min_x\max_y` of the mean of ``value_fn``.

    Every record is differentiated alone, as a batch of one, so no record sees another.
    Its gradients, B rows of each player, are stored: ``microbatch_size`` bounds them.

    Like all problems it is also a loss of :class:`jaxdp.plans.DPGD`, whose parameters are
    the pair of points: ``problem((x, y), batch)``.

    Attributes:
      value_fn: ``value_fn(x, y, batch) -> losses (B,)``, convex in x and concave in y;
        for a convex problem ``value_fn(x, batch)``.
      domain_x: polytope of x; None is the simplex.
      domain_y: polytope of y; None is the simplex.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def value_fn(x, y, batch):
      ...     return batch * (x @ y)
      >>> problem = jaxdp.Problem(value_fn, jaxdp.Simplex(2), jaxdp.Simplex(2))
      >>> x, y = jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0])
      >>> problem(x, y, jnp.array([2.0])).tolist()
      [1.0]
      >>> problem((x, y), jnp.array([2.0])).tolist()
      [1.0]
    """

    value_fn: Callable[..., jax.Array]
    domain_x: Domain | None = None
    domain_y: Domain | None = None

    def _values(self, *args: Any) -> jax.Array:
        return self.value_fn(*args)

    def _sums(
        self, query: Query, records: Any, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        points = (query.x,) if query.y is None else (query.x, query.y)

        def loss(points: tuple[jax.Array, ...], record: Any) -> jax.Array:
            losses = on_one_record(self.value_fn, *points, record)
            return check_losses("value_fn", losses, (1,))[0]

        differentiate = over_records(jax.value_and_grad(loss), in_axes=(None, 0))
        losses, gradients = differentiate(points, records)
        ok = mask & finite(losses[:, None])
        rows_y = None if query.y is None else gradients[1]
        return self._row_sums(query, gradients[0], rows_y, ok)


def as_problem(
    value_fn: VertexGradients | Callable[..., jax.Array],
) -> VertexGradients:
    """Returns a problem as it is, or ``value_fn`` as a :class:`Problem` on simplices.

    Raises:
      TypeError: ``value_fn`` is neither.
    """
    if isinstance(value_fn, VertexGradients):
        return value_fn
    if callable(value_fn):
        return Problem(value_fn)
    raise TypeError(
        "value_fn must be a problem or a function value_fn(x, y, batch) -> losses (B,), "
        f"got {value_fn!r} of type {type(value_fn).__name__}"
    )
