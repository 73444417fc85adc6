r"""Goldstein stationarity of a point of a nonsmooth, nonconvex function.

The Goldstein subdifferential :math:`\partial_\alpha h(x)` is the convex hull of the
gradients of h in the ball of radius alpha around x. Its element of least norm is zero at
a local minimum, even on a kink, and as long as it is not, a step of length alpha against
it lowers h by alpha times its norm. A sampled hull lies inside, so the least norm over it
is an *upper* bound; it is never a lower one.

:func:`componentwise_goldstein_norm` lets each record choose its own points, for

.. math:: \frac1n\sum_i\partial_\alpha f_i(x)\supseteq\partial_\alpha F(x),\qquad
  F=\frac1n\sum_if_i.

Its least norm is at most that of F, and a weaker notion, but it keeps two properties: if
every loss is H-smooth, :math:`\|\nabla F(x)\|` exceeds it by at most :math:`H\alpha`, and
a step of length alpha against the least element lowers F by alpha times its norm.

The gradients must be those of one fixed objective, read on the same records at every
point. A hull of gradients with noise of their own overfits the noise: at a true norm of 1
and noise of norm 3 it shows 3.1, 1.2, 0.5 and 0.2 with 1, 8, 64 and 512 samples.

References:
  Section 2 of Zhang, Tran and Cutkosky, `Private zeroth-order nonsmooth nonconvex
  optimization <https://arxiv.org/abs/2406.19579>`_, 2024; definition B.1 of Kornowski, Liu
  and Talwar, `Improved sample complexity for private nonsmooth nonconvex optimization
  <https://arxiv.org/abs/2410.05880>`_, 2025; Lawson and Hanson, Solving least squares
  problems, 1974.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax.flatten_util import ravel_pytree

from jaxdp.core import validate
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.metrics.parts import Detailed, as_vector

GradFn = Callable[[Any], Any]


class GoldsteinNorm(Detailed):
    """Upper bound on the Goldstein norm: a float with details of its computation.

    Attributes:
      gap: duality gap of the last minimum-norm problem, in squared units of a gradient.
      lower: a lower bound on the least norm *over the sampled hull*. How far the number
        can still fall with more steps of the solver; more samples may bring it lower.
      num_gradients: gradients in the hull.
    """

    gap: float
    lower: float
    num_gradients: int


def goldstein_norm(
    grad_fn: GradFn,
    x: Any,
    radius: float,
    *,
    num_samples: int = 512,
    num_rounds: int = 32,
    batch_size: int = 64,
    tolerance: float = 1e-12,
    seed: int = 0,
) -> GoldsteinNorm:
    r"""Bounds the norm of the least element of a Goldstein subdifferential from above.

    The minimum-norm point v of gradients sampled in the ball (half of the points) and on
    its sphere, then column generation: each round adds the gradients at
    :math:`x-\alpha v/\|v\|` and at a random point on the way there, where they oppose v
    most. Points are kept inside the ball after rounding to the dtype of x. The
    point x itself is not read: on a kink, automatic differentiation need not return a
    subgradient, while random points miss the kinks.

    Loose where kinks are separable and the dimension is high: of the l1 norm with one of
    20 coordinates near 0 it returns about sqrt(20) for sqrt(19).

    Args:
      grad_fn: the exact gradient of one fixed objective: takes a tree like x, returns one
        of the same shapes. Traceable by JAX; the same object is compiled once.
      x: pytree of floating arrays, d elements in all.
      radius: alpha > 0, in units of x. A guarantee of the algorithms for the smoothed
        function at alpha is one for the function itself at 2 alpha.
      num_samples: gradients in the first hull.
      num_rounds: rounds of column generation, two gradients each.
      batch_size: gradients evaluated at once; bounds the memory.
      tolerance: the gap to stop at, over the largest squared norm of a gradient. Where
        rounding stops the solver first, the gap says so.
      seed: of the sampled points; public.

    Returns:
      A :class:`GoldsteinNorm`, which is a float. It is a statistic of the records that
      ``grad_fn`` reads, and not private.

    Raises:
      TypeError: a leaf of x that is not floating.
      ValueError: a number out of its range, x without elements, a radius that the dtype of
        x does not resolve, gradients of other shapes, or gradients that are not finite.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> grad = jax.grad(lambda x: jnp.sum(jnp.abs(x)))
      >>> at_kink = jaxdp.metrics.goldstein_norm(grad, jnp.zeros(2), radius=0.1)
      >>> bool(at_kink < 0.1)
      True
      >>> away = jaxdp.metrics.goldstein_norm(grad, jnp.array([1.0, 1.0]), radius=0.1)
      >>> round(away**2, 4)
      2.0
    """
    ball = _in_ball(grad_fn, x, radius, batch_size)
    return _least_norm(*ball, num_samples, num_rounds, tolerance, seed)


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
    r"""Bounds the least norm in the mean of the records' Goldstein subdifferentials.

    All records are read at the same points, and each has a hull of its own. Memory: ``n d
    (num_samples + 2 num_rounds)`` numbers of 8 bytes.

    Args:
      grad_fn: (x, batch) -> a tree like x with a leading axis B, the gradients of the
        records' losses. Traceable by JAX; the same object is compiled once.
      x: as in :func:`goldstein_norm`, as are all others.
      data: pytree with leading axis n, the records.
      radius: alpha.
      num_samples: gradients in each record's first hull.
      num_rounds: of column generation, two gradients a record each.
      batch_size: points at which all records are read at once.
      tolerance: of the gap.
      seed: of the points.

    Returns:
      A :class:`GoldsteinNorm`; its ``lower`` is over the mean of the sampled hulls, and
      ``num_gradients`` counts those of all records. Not private.

    Raises:
      TypeError, ValueError: as :func:`goldstein_norm`; or arrays in ``data`` without one
        number of records.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def gradients(x, batch):
      ...     return jnp.sign(x - batch)
      >>> data = jnp.array([[-1.0], [0.0], [1.0]])
      >>> norm = jaxdp.metrics.componentwise_goldstein_norm(
      ...     gradients, jnp.zeros(1), data, radius=0.1
      ... )
      >>> bool(norm < 0.1)
      True
    """
    data = jax.tree.map(jnp.asarray, data)
    if not num_rows(data, "data"):
        raise ValueError("data must be arrays with records, got none")
    ball = _in_ball(grad_fn, x, radius, batch_size, data)
    return _least_norm(*ball, num_samples, num_rounds, tolerance, seed)


def _least_norm(
    dim: int,
    gradients: Callable[[np.ndarray], np.ndarray],
    num_samples: int,
    num_rounds: int,
    tolerance: float,
    seed: int,
) -> GoldsteinNorm:
    """Samples hulls of gradients, one a record, and adds more until the rounds are over."""
    validate.integer(num_samples=num_samples)
    validate.integer(at_least=0, num_rounds=num_rounds)
    validate.positive(tolerance=tolerance)
    rng = np.random.default_rng(seed)
    inside = num_samples // 2
    offsets = _in_unit_ball(rng, inside, dim)
    edge = on_unit_sphere(rng, num_samples - inside, dim)
    g = gradients(np.concatenate([offsets, edge]))
    if g.shape[1] == 1:
        vertices = g[:, 0]
    else:
        vertices = _vertex(g, np.argmin(np.sum(g**2, axis=2), axis=0))[None]
    vector, gap, vertices = _least_of_mean(g, vertices, tolerance)
    for _ in range(num_rounds):
        norm = np.linalg.norm(vector)
        # Zero, as far as the tolerance can tell, has no direction to search.
        if norm**2 <= tolerance * _largest(g):
            break
        lengths = np.array([[1.0], [rng.uniform()]])
        g = np.concatenate([g, gradients(-lengths * vector / norm)])
        vector, gap, vertices = _least_of_mean(g, vertices, tolerance)
    value = float(np.linalg.norm(vector))
    lower = max(value - gap / value, 0.0) if value > 0 else 0.0
    return GoldsteinNorm(value, gap, lower, g.shape[0] * g.shape[1])


def _least_of_mean(
    gradients: np.ndarray, vertices: np.ndarray, tolerance: float
) -> tuple[np.ndarray, float, np.ndarray]:
    """Finds the least point of the mean of hulls, beginning with some of its vertices.

    Args:
      gradients: shape (k, n, d), the hulls of n records.
      vertices: of the mean, shape (m, d).
      tolerance: of the gap, over the largest squared norm of a gradient.

    Returns:
      The point v; ``||v||^2 - min <u, v>`` over the mean, which is at least the squared
      distance from v to the true point; and the vertices that v lies between.
    """
    shortest = np.inf
    while True:
        weights = least_on_simplex(vertices)
        v = weights @ vertices
        # A linear function is least over a mean where it is over each part.
        new = _vertex(gradients, np.argmin(gradients @ v, axis=0))
        gap = max(float(v @ v - new @ v), 0.0)
        vertices = vertices[weights > 0]
        if gap <= tolerance * _largest(gradients) or not v @ v < shortest:  # rounding
            return v, gap, vertices
        shortest = v @ v
        vertices = np.concatenate([vertices, new[None]])


def _vertex(gradients: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Computes the mean of one gradient of each record, shape (d,)."""
    return np.mean(gradients[rows, np.arange(gradients.shape[1])], axis=0)


def _largest(gradients: np.ndarray) -> float:
    return float(np.max(np.sum(gradients**2, axis=-1)))


def least_on_simplex(points: np.ndarray, costs: np.ndarray | None = None) -> np.ndarray:
    r"""Minimises ``||w @ points||^2 / 2 + w @ costs`` over the simplex, in float64.

    The dual is to minimise :math:`\|y\|^2/2+t` over t at least all
    :math:`-c_i-\langle p_i,y\rangle`. With :math:`(t-t_0+s^2)^2/2s^2` for t it is a least
    distance to a polyhedron, which non-negative least squares find; :math:`t_0` moves to
    the t that was found, and then w is improved on its support. What rounding leaves, far
    below 1e-12 of the largest squared norm, is the caller's to measure.

    Args:
      points: shape (k, d), k, d >= 1.
      costs: shape (k,); None is zero.

    Returns:
      The weights, shape (k,), at least 0, of sum 1.
    """
    scale = np.sqrt(_largest(points)) or 1.0
    p, c = points / scale, np.zeros(len(points))
    if costs is not None:
        c = (costs - np.min(costs)) / scale**2
    s, level, least = 30.0, 0.0, np.inf
    best = weights = np.eye(1, len(p))[0]
    for _ in range(6):
        rows = np.vstack([p.T, np.full(len(p), s), s**2 - level - c])
        weights = scipy.optimize.nnls(rows, np.eye(1, len(rows), len(rows) - 1)[0])[0]
        weights /= weights.sum()
        v = weights @ p
        level = -float(v @ v + weights @ c)
        support = np.flatnonzero(weights)
        sides = p[support] - p[support[0]]
        rise = sides @ v + c[support] - c[support[0]]
        step = np.linalg.lstsq(sides @ sides.T, -rise, rcond=1e-15)[0]
        step[0] -= step.sum()
        for w in (weights, weights + np.bincount(support, step, len(p))):
            slopes = p @ (w @ p) + c
            gap = float(w @ slopes - slopes.min())
            if w.min() >= 0 and gap < least:
                best, least = w, gap
        if least <= 1e-15:
            break
    return best / best.sum()


def _in_ball(
    grad_fn: Callable[..., Any],
    x: Any,
    radius: float,
    batch_size: int,
    data: Any = None,
) -> tuple[int, Callable[[np.ndarray], np.ndarray]]:
    """Returns d, and the gradients of one function, or of records, around one point.

    The function takes offsets in the unit ball (k, d) and gives finite gradients (k, n, d).
    """
    validate.positive(radius=radius)
    validate.integer(batch_size=batch_size)
    x = jax.tree.map(jnp.asarray, x)
    center, dtype = as_vector(x), ravel_pytree(x)[0].dtype
    gradient = jax.eval_shape(grad_fn, x, *([] if data is None else [data]))
    for leaf in jax.tree.leaves(gradient if data is not None else ()):
        count = num_rows(data)
        if leaf.shape[:1] != (count,):
            raise ValueError(
                f"grad_fn must return one gradient for each of {count} records, got "
                f"shape {leaf.shape}"
            )
    found = _shapes(gradient, 0 if data is None else 1)
    if found != _shapes(x):
        raise ValueError(
            f"grad_fn must return a tree like x, {_shapes(x)}; got {found}"
        )
    # A rounded point is off by at most half of this: keep it inside the ball.
    precision = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(x))
    rounding = precision * (np.linalg.norm(center) + radius)
    reach = float(radius - rounding)
    if not reach > 0.5 * radius:
        raise ValueError(
            f"radius must be well above the rounding of x, {rounding:.2g}; got {radius}"
        )

    def gradients(offsets: np.ndarray) -> np.ndarray:
        points = jnp.asarray(center + reach * offsets, dtype)
        g = np.asarray(_gradients(grad_fn, batch_size, x, points, data), np.float64)
        if not np.isfinite(g).all():
            raise ValueError(
                "grad_fn must return finite gradients in the ball around x; got one that "
                "is not"
            )
        return g

    return center.size, gradients


def _shapes(tree: Any, first: int = 0) -> Any:
    """Replaces each array of the tree by its shape from an axis on, for comparison."""
    return jax.tree.map(lambda leaf: str(leaf.shape[first:]), tree)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(
    grad_fn: Callable[..., Any],
    batch_size: int,
    like: Any,
    points: jax.Array,
    data: Any,
) -> jax.Array:
    """Computes gradients at the rows of ``points``, ravelled: (k, n, d), or (k, 1, d)."""
    _, unravel = ravel_pytree(like)

    def one(point: jax.Array) -> jax.Array:
        if data is None:
            return ravel_pytree(grad_fn(unravel(point)))[0][None]
        return jax.vmap(lambda leaf: ravel_pytree(leaf)[0])(
            grad_fn(unravel(point), data)
        )

    return jax.lax.map(one, points, batch_size=min(batch_size, len(points)))


def on_unit_sphere(rng: np.random.Generator, num: int, dim: int) -> np.ndarray:
    """Draws uniform points of the unit sphere of R^dim, shape (num, dim), float64."""
    normals = rng.standard_normal((num, dim))
    return normals / np.linalg.norm(normals, axis=1, keepdims=True)


def _in_unit_ball(rng: np.random.Generator, num: int, dim: int) -> np.ndarray:
    """Draws uniform points of the ball: d coordinates of a sphere in d + 2 dimensions."""
    return on_unit_sphere(rng, num, dim + 2)[:, :dim]
