"""Losses of a linear prediction: one residual a record, no gradient of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.kernels.finite_difference import on_one_record, over_records
from jaxdp.kernels.polytope import L1Ball, Polytope
from jaxdp.saddle.oracles.sums import (
    Domain,
    Query,
    VertexGradients,
    check_losses,
    finite,
    middle,
    mirrored,
    sum_units,
    vertex_rows,
)


@dataclasses.dataclass(frozen=True)
class LinearModel(VertexGradients):
    r"""A convex problem :math:`f(x;z)=\phi(\langle a_z,x\rangle,t_z)`.

    A batch is ``(features (B, p), targets)``; targets are a pytree with leading axis B.

    The gradient is the residual :math:`r=\phi'` times the features, so a clip of r bounds
    it: :math:`|r|\le C/\max_j|a_j|`, with a_j the features of the vertices (minus the
    middle of their range with ``center=True``). The record's direction is kept. No
    gradients of the size of the features are stored, at most a byte a feature (over a
    ``Polytope``, the features of its vertices).

    Attributes:
      loss: phi; ``loss(predictions (B,), targets) -> losses (B,)``, convex in the
        predictions and elementwise.
      derivative: its derivative by the predictions, of the same form; None
        differentiates ``loss``.
      domain_x: polytope of x; None is the simplex.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def squared(prediction, target):
      ...     return (prediction - target) ** 2
      >>> ball = jaxdp.L1Ball(dim=2, radius=1.0)
      >>> problem = jaxdp.LinearModel(squared, domain_x=ball)
      >>> batch = jnp.eye(2), jnp.array([0.0, 2.0])  # Features and targets.
      >>> problem(jnp.array([1.0, 0.0]), batch).tolist()
      [1.0, 4.0]
    """

    loss: Callable[[jax.Array, Any], jax.Array]
    derivative: Callable[[jax.Array, Any], jax.Array] | None = None
    domain_x: Domain | None = None
    domain_y: None = dataclasses.field(default=None, init=False)

    def _values(self, x: jax.Array, batch: Any) -> jax.Array:
        features, targets = batch
        return self.loss(_predictions(features, x), targets)

    def _sums(
        self, query: Query, records: Any, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        if query.y is not None:
            raise ValueError("y must be None: a linear model has one player")
        features, targets = jnp.asarray(records[0], jnp.float32), records[1]
        predictions = _predictions(features, query.x)
        residual = self._residuals(predictions, targets)
        ok = mask & finite(features)
        ok = ok & jnp.isfinite(predictions) & jnp.isfinite(residual)
        rows = features
        if isinstance(self.domain_x, Polytope):
            rows, ok = vertex_rows(self.domain_x, features, ok)
        elif isinstance(self.domain_x, L1Ball):  # A scalar's work, not the features'.
            residual = residual * jnp.float32(self.domain_x.radius)
        shift = (
            middle(self.domain_x, rows) if query.center else jnp.zeros_like(rows[:, :1])
        )
        peak = jnp.max(jnp.abs(rows - shift), axis=-1)
        # What overflows is no gradient; the generic problem drops such a record too.
        ok = ok & jnp.isfinite(residual * peak)
        bound = query.bound_x
        limit = jnp.float32(bound.clip) / jnp.where(peak > 0, peak, 1)
        residual = jnp.clip(jnp.where(ok, residual, 0), -limit, limit)
        total = sum_units(
            lambda part: part[0][:, None] * (part[1] - part[2]),
            (residual, rows, shift),
            ok,
            bound,
        )
        return mirrored(self.domain_x, total), None

    def _residuals(self, predictions: jax.Array, targets: Any) -> jax.Array:
        """Computes the derivative phi' of each record alone: (B,)."""
        name, fn = "derivative", self.derivative
        if fn is None:
            name, fn = "loss", self.loss

        def one(prediction: jax.Array, target: Any) -> jax.Array:
            values = on_one_record(fn, prediction[None], target)
            return check_losses(name, values, (1,))[0]

        one = jax.grad(one) if self.derivative is None else one
        return over_records(one)(predictions, targets)


def _predictions(features: jax.Array, x: jax.Array) -> jax.Array:
    """Computes <a, x> of each record alone: a matrix product rounds by its shape."""
    return jnp.sum(features * x, axis=-1)
