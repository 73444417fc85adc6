r"""Componentwise Goldstein stationarity of a mean of records' losses.

The Goldstein subdifferentials of the records, each a convex hull of gradients of its own
loss in the ball of radius alpha, have the Minkowski mean

.. math:: \frac1n\sum_i\partial_\alpha f_i(x)\supseteq\partial_\alpha F(x),\qquad
  F=\frac1n\sum_if_i,

for each record may choose its own points. Its least norm is at most the Goldstein norm of
F, and a weaker notion, but it keeps two properties: if every loss is H-smooth,
:math:`\|\nabla F(x)\|` exceeds it by at most :math:`H\alpha`, and a step of length alpha
against the least element lowers F by alpha times its norm. Smoothing each record's loss
(:func:`jaxdp.models.lasry_lions_mean`) leads to such points.

References:
  Definition B.1 of Kornowski, Liu and Talwar, `Improved sample complexity for private
  nonsmooth nonconvex optimization <https://arxiv.org/abs/2410.05880>`_, 2025.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.core import validate
from jaxdp.metrics import goldstein
from jaxdp.metrics.goldstein import GoldsteinNorm, MinimumNormPoint


def componentwise_goldstein_norm(
    grad_fn: Callable[[Any, Any], Any],
    x: Any,
    data: Any,
    radius: float,
    *,
    num_samples: int = 128,
    num_rounds: int = 32,
    batch_size: int = 16,
    tolerance: float = 1e-12,
    seed: int = 0,
) -> GoldsteinNorm:
    r"""Bounds the least norm in the mean of the Goldstein subdifferentials from above.

    Samples points and adds more of them as :func:`jaxdp.metrics.goldstein_norm` does: all
    records are read at the same ones, and each has a hull of its own. The least element of
    the mean of these hulls is found by Wolfe's active sets on the vertices of the mean,
    which are means of one gradient of each record; the one that opposes a vector most is
    found record by record. With one record it is ``goldstein_norm``.

    Memory: ``n d (num_samples + 2 num_rounds)`` numbers of 8 bytes.

    Args:
      grad_fn: (x, batch) -> a tree like x with a leading axis B, the gradients of the
        records' losses. Traceable by JAX; the same object is compiled once.
      x: pytree of floating arrays, d elements in all.
      data: pytree with leading axis n, the records.
      radius: alpha > 0, in units of x.
      num_samples: gradients in each record's first hull.
      num_rounds: rounds of column generation, two gradients a record each.
      batch_size: points at which all records are read at once; bounds the memory.
      tolerance: as in :func:`jaxdp.metrics.minimum_norm_point`.
      seed: of the sampled points; public.

    Returns:
      A :class:`jaxdp.metrics.GoldsteinNorm`, which is a float; its ``lower`` is over the
      mean of the sampled hulls, ``num_gradients`` counts those of all records. It is a
      statistic of the records, and not private.

    Raises:
      TypeError: a leaf of x that is not floating.
      ValueError: as :func:`jaxdp.metrics.goldstein_norm`; or arrays in ``data`` without one
        number of records.
    """
    validate.integer(num_samples=num_samples)
    validate.integer(at_least=0, num_rounds=num_rounds)
    validate.positive(tolerance=tolerance)
    records = _Records(grad_fn, x, data, radius, batch_size)
    rng = np.random.default_rng(seed)
    inside = num_samples // 2
    offsets = goldstein._in_unit_ball(rng, inside, records.dim)
    edge = goldstein._on_unit_sphere(rng, num_samples - inside, records.dim)
    g = records.gradients(np.concatenate([offsets, edge]))
    first = np.argmin(np.sum(g**2, axis=2), axis=0)
    vertices = _vertex(g, first)[None]
    found, vertices = _least(g, vertices, np.ones(1), tolerance)
    for _ in range(num_rounds):
        norm = np.linalg.norm(found.vector)
        if norm**2 <= tolerance * _largest(g):
            break
        lengths = np.array([[1.0], [rng.uniform()]])
        g = np.concatenate([g, records.gradients(-lengths * found.vector / norm)])
        found, vertices = _least(g, vertices, found.weights, tolerance)
    value, gap = float(np.linalg.norm(found.vector)), float(found.gap)
    lower = max(value - gap / value, 0.0) if value > 0 else 0.0
    return GoldsteinNorm(value, gap, lower, g.shape[0] * g.shape[1])


def _least(
    gradients: np.ndarray, vertices: np.ndarray, weights: np.ndarray, tolerance: float
) -> tuple[MinimumNormPoint, np.ndarray]:
    """Finds the least point of the mean of hulls, from one over some of its vertices.

    Args:
      gradients: shape (k, n, d), the hulls of n records.
      vertices: of the mean, shape (m, d).
      weights: of a point in their hull, shape (m,).
      tolerance: of the gap, over the largest squared norm of a gradient.

    Returns:
      The point, whose gap is that over the mean of the hulls, and the vertices that its
      weights belong to.
    """
    enough = tolerance * _largest(gradients)
    shortest = math.inf
    while True:
        found = goldstein._wolfe(vertices, weights, tolerance)
        v = found.vector
        # A linear function is least over a mean where it is over each part.
        new = _vertex(gradients, np.argmin(gradients @ v, axis=0))
        gap = max(float(v @ v - new @ v), 0.0)
        used = found.weights > 0
        vertices, weights = vertices[used], found.weights[used]
        if gap <= enough or not v @ v < shortest:  # the second: rounding
            return MinimumNormPoint(v, weights, np.float64(gap)), vertices
        shortest = v @ v
        vertices = np.concatenate([vertices, new[None]])
        weights = np.append(weights, 0.0)


def _vertex(gradients: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Computes the mean of one gradient of each record, shape (d,)."""
    return np.mean(gradients[rows, np.arange(gradients.shape[1])], axis=0)


def _largest(gradients: np.ndarray) -> float:
    return float(np.max(np.sum(gradients**2, axis=-1)))


class _Records(goldstein._Ball):
    """The gradients of each record's loss in the ball of one radius around one point."""

    def __init__(
        self,
        grad_fn: Callable[[Any, Any], Any],
        x: Any,
        data: Any,
        radius: float,
        batch_size: int,
    ):
        data = jax.tree.map(jnp.asarray, data)
        lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(data)}
        if len(lengths) != 1 or lengths & {(), (0,)}:
            raise ValueError(
                "data must be arrays with one number of records >= 1 along the first "
                f"axis, got {sorted(lengths)}"
            )
        ((self.num,),) = lengths
        self.data, self.of_records = data, grad_fn

        def mean(point: Any) -> Any:
            gradient = grad_fn(point, data)
            for leaf in jax.tree.leaves(gradient):
                if leaf.shape[:1] != (self.num,):
                    raise ValueError(
                        f"grad_fn must return one gradient for each of {self.num} "
                        f"records, got shape {leaf.shape}"
                    )
            return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), gradient)

        super().__init__(mean, x, radius, batch_size)

    def _at(self, points: jax.Array) -> jax.Array:
        """Returns the gradients of each record at points (k, d): shape (k, n, d)."""
        return _record_gradients(
            self.of_records, self.batch_size, self.x, points, self.data
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _record_gradients(
    grad_fn: Callable[[Any, Any], Any],
    batch_size: int,
    like: Any,
    points: jax.Array,
    data: Any,
) -> jax.Array:
    """Computes all records' gradients at the rows of ``points``, ravelled, in batches."""
    _, unravel = ravel_pytree(like)

    def one(point: jax.Array) -> jax.Array:
        gradient = grad_fn(unravel(point), data)
        return jax.vmap(lambda leaf: ravel_pytree(leaf)[0])(gradient)

    return jax.lax.map(one, points, batch_size=min(batch_size, len(points)))
