r"""Goldstein stationarity of a point of a nonsmooth, nonconvex function.

The Goldstein subdifferential :math:`\partial_\alpha h(x)` is the convex hull of the
gradients of h in the ball of radius alpha around x. Its element of least norm is zero at
a local minimum, even on a kink, and as long as it is not, a step of length alpha against
it lowers h by alpha times its norm. A sampled hull lies inside, so the least norm over it
is an *upper* bound; it is never a lower one.

The gradients must be those of one fixed objective, read on the same records at every
point. A hull of gradients with noise of their own overfits the noise: at a true norm of 1
and noise of norm 3 it shows 3.1, 1.2, 0.5 and 0.2 with 1, 8, 64 and 512 samples.

References:
  Section 2 of Zhang, Tran and Cutkosky, `Private zeroth-order nonsmooth nonconvex
  optimization <https://arxiv.org/abs/2406.19579>`_, 2024; Wolfe, Finding the nearest
  point in a polytope, 1976.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.core import validate

GradFn = Callable[[Any], Any]


class GoldsteinNorm(float):
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

    def __new__(
        cls, value: float, gap: float, lower: float, num_gradients: int
    ) -> Self:
        self = super().__new__(cls, value)
        self.gap, self.lower, self.num_gradients = gap, lower, num_gradients
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (float(self), self.gap, self.lower, self.num_gradients)

    def __repr__(self) -> str:
        return (
            f"GoldsteinNorm({float(self)!r}, gap={self.gap!r}, lower={self.lower!r}, "
            f"num_gradients={self.num_gradients})"
        )

    def __str__(self) -> str:
        return repr(float(self))


class SmoothedGradientNorm(NamedTuple):
    """The norm of the mean gradient over a ball.

    Attributes:
      value: norm of the mean of the sampled gradients; bounds the Goldstein norm from
        above, whatever was sampled.
      standard_error: root mean squared distance between that mean and the gradient of
        the smoothed function.
    """

    value: float
    standard_error: float


class MinimumNormPoint(NamedTuple):
    """The point of least norm in the convex hull of k gradients.

    Attributes:
      vector: v, shape (d,).
      weights: of the gradients, shape (k,): at least 0, their sum is 1.
      gap: ``||v||^2 - min_j <g_j, v>``, shape (): at least the squared distance from v
        to the true point, and ``min_j <g_j, v> / ||v||`` is at most its norm.
    """

    vector: Any
    weights: Any
    gap: Any


def minimum_norm_point(gradients: Any, *, tolerance: float = 1e-12) -> MinimumNormPoint:
    """Finds the minimum-norm point of a convex hull by Wolfe's active sets, on the host.

    Args:
      gradients: shape (k, d), k, d >= 1; computed with in float64.
      tolerance: the gap to stop at, over the largest squared norm of a gradient. Where
        rounding stops the solver first, the gap says so.

    Returns:
      A :class:`MinimumNormPoint` of NumPy arrays in float64.

    Raises:
      ValueError: another shape, a gradient that is not finite, or a tolerance <= 0.
    """
    validate.positive(tolerance=tolerance)
    g = np.asarray(gradients, np.float64)
    if g.ndim != 2 or 0 in g.shape:
        raise ValueError(
            f"gradients must have shape (k, d), k, d >= 1; got shape {g.shape}"
        )
    if not np.isfinite(g).all():
        raise ValueError("gradients must be finite")
    shortest = np.zeros(len(g))
    shortest[np.argmin(np.sum(g**2, axis=1))] = 1
    return _wolfe(g, shortest, tolerance)


def _wolfe(
    gradients: np.ndarray, weights: np.ndarray, tolerance: float
) -> MinimumNormPoint:
    """Runs Wolfe's algorithm from weights of an earlier solution over some of the rows."""
    scale = np.sqrt(np.max(np.sum(gradients**2, axis=1))) or 1.0
    g = gradients / scale
    gram = g @ g.T
    support = np.flatnonzero(weights)
    part = weights[support]
    v = part @ g[support]
    for _ in range(10 * len(g) + 100):
        products = g @ v
        new = int(np.argmin(products))
        if v @ v - products[new] <= tolerance or new in support:
            break
        found = _shrink_to_corral(gram, np.append(support, new), np.append(part, 0.0))
        closer = found[1] @ g[found[0]]
        if not closer @ closer < v @ v:  # rounding: no further
            break
        (support, part), v = found, closer
    weights = np.zeros(len(g))
    weights[support] = part
    v = part @ gradients[support]
    # Rounding alone can make it negative: the hull cannot.
    gap = max(float(v @ v - np.min(gradients @ v)), 0.0)
    return MinimumNormPoint(v, weights, np.float64(gap))


def _shrink_to_corral(
    gram: np.ndarray, support: np.ndarray, part: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Drops points until the nearest point of their affine hull lies between them."""
    tiny = 1e-14
    while True:
        q = gram[np.ix_(support, support)]
        # The least-norm affine combination; the ridge keeps doubled points solvable.
        nearest = np.linalg.solve(q + 1 + 1e-15 * np.eye(len(q)), np.ones(len(q)))
        nearest /= nearest.sum()
        outside = nearest <= tiny
        if not outside.any():
            return support, nearest
        # As far towards it as the hull goes; what is left with no weight goes.
        ratio = part[outside] / np.maximum(part[outside] - nearest[outside], tiny)
        part = part + np.min(ratio) * (nearest - part)
        part[np.flatnonzero(outside)[np.argmin(ratio)]] = 0
        support, part = support[part > tiny], part[part > tiny]
        part = part / part.sum()


@functools.partial(jax.jit, static_argnames="num_steps")
def minimum_norm_point_fista(
    gradients: jax.Array, *, num_steps: int = 500
) -> MinimumNormPoint:
    """Finds the minimum-norm point of a convex hull by a fixed number of FISTA steps.

    For use inside compiled programs, where the host's exact solver is out of reach. The
    gap, which it leaves larger, is reported.

    Args:
      gradients: shape (k, d), floating; computed with in its dtype.
      num_steps: accelerated projected gradient steps on the simplex, restarted wherever
        the momentum points uphill.

    Returns:
      A :class:`MinimumNormPoint` in the dtype of the gradients.

    References:
      Beck and Teboulle, 2009; O'Donoghue and Candes, 2015 (the restart).
    """
    matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    gram = matmul(gradients, gradients.T)
    top = jnp.linalg.eigvalsh(gram)[-1]
    step = 1 / jnp.where(top > 0, top, 1)

    def body(_: Any, state: tuple[jax.Array, jax.Array, jax.Array]):
        weights, point, t = state
        moved = _project_to_simplex(point - step * matmul(gram, point))
        uphill = jnp.vdot(point - moved, moved - weights) > 0
        t = jnp.where(uphill, 1.0, t)
        t_next = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
        point = moved + (t - 1) / t_next * (moved - weights)
        return moved, point, t_next

    k = len(gradients)
    start = jnp.full(k, 1 / k, gradients.dtype)
    one = jnp.ones((), gradients.dtype)
    weights, _, _ = jax.lax.fori_loop(0, num_steps, body, (start, start, one))
    v = matmul(weights, gradients)
    gap = jnp.vdot(v, v) - jnp.min(matmul(gradients, v))
    return MinimumNormPoint(v, weights, jnp.maximum(gap, 0))


def _project_to_simplex(y: jax.Array) -> jax.Array:
    """Projects onto the probability simplex by sorting."""
    falling = -jnp.sort(-y)
    counts = jnp.arange(1, len(y) + 1, dtype=y.dtype)
    excess = (jnp.cumsum(falling) - 1) / counts
    kept = jnp.sum(falling > excess)
    return jnp.maximum(y - excess[kept - 1], 0)


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
      tolerance: as in :func:`minimum_norm_point`.
      seed: of the sampled points; public.

    Returns:
      A :class:`GoldsteinNorm`, which is a float. It is a statistic of the records that
      ``grad_fn`` reads, and not private.

    Raises:
      TypeError: a leaf of x that is not floating.
      ValueError: a number out of its range, x without elements, a radius that the dtype of
        x does not resolve, gradients of other shapes, or gradients that are not finite.
    """
    validate.integer(num_samples=num_samples)
    validate.integer(at_least=0, num_rounds=num_rounds)
    validate.positive(tolerance=tolerance)
    ball = _Ball(grad_fn, x, radius, batch_size)
    rng = np.random.default_rng(seed)
    inside = num_samples // 2
    offsets = _in_unit_ball(rng, inside, ball.dim)
    edge = _on_unit_sphere(rng, num_samples - inside, ball.dim)
    g = ball.gradients(np.concatenate([offsets, edge]))
    found = minimum_norm_point(g, tolerance=tolerance)
    for _ in range(num_rounds):
        norm = np.linalg.norm(found.vector)
        # Zero, as far as the tolerance can tell, has no direction to search.
        if norm**2 <= tolerance * np.max(np.sum(g**2, axis=1)):
            break
        lengths = np.array([[1.0], [rng.uniform()]])
        g = np.concatenate([g, ball.gradients(-lengths * found.vector / norm)])
        found = _wolfe(g, np.append(found.weights, [0.0, 0.0]), tolerance)
    value = float(np.linalg.norm(found.vector))
    gap = float(found.gap)
    lower = max(value - gap / value, 0.0) if value > 0 else 0.0
    return GoldsteinNorm(value, gap, lower, len(g))


def smoothed_gradient_norm(
    grad_fn: GradFn,
    x: Any,
    radius: float,
    *,
    num_samples: int = 512,
    batch_size: int = 64,
    seed: int = 0,
) -> SmoothedGradientNorm:
    """Estimates the norm of the gradient of the function smoothed over a ball.

    The mean of the gradients at uniform points of the ball is an element of the Goldstein
    subdifferential, so its norm is an upper bound too: cheaper than
    :func:`goldstein_norm`, and larger.

    Args:
      grad_fn: as in :func:`goldstein_norm`.
      x: pytree of floating arrays.
      radius: of the ball, > 0, in units of x.
      num_samples: gradients, at least 2.
      batch_size: gradients evaluated at once.
      seed: of the sampled points; public.

    Returns:
      A :class:`SmoothedGradientNorm`.

    Raises:
      TypeError, ValueError: as :func:`goldstein_norm`.
    """
    validate.integer(at_least=2, num_samples=num_samples)
    ball = _Ball(grad_fn, x, radius, batch_size)
    points = _in_unit_ball(np.random.default_rng(seed), num_samples, ball.dim)
    g = ball.gradients(points)
    error = math.sqrt(np.sum(np.var(g, axis=0, ddof=1)) / num_samples)
    return SmoothedGradientNorm(float(np.linalg.norm(g.mean(axis=0))), error)


class _Ball:
    """The gradients of one function in the ball of one radius around one point."""

    def __init__(self, grad_fn: GradFn, x: Any, radius: float, batch_size: int):
        validate.positive(radius=radius)
        validate.integer(batch_size=batch_size)
        x = jax.tree.map(jnp.asarray, x)
        leaves = jax.tree.leaves(x)
        for leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(f"x must have floating leaves, got {leaf.dtype}")
        self.grad_fn, self.x, self.batch_size = grad_fn, x, batch_size
        flat, _ = ravel_pytree(x)
        self.dtype, self.center = flat.dtype, np.asarray(flat, np.float64)
        self.dim = self.center.size
        if not self.dim or not np.isfinite(self.center).all():
            raise ValueError("x must have elements, all of them finite")
        gradient = jax.eval_shape(grad_fn, x)
        if _shapes(gradient) != _shapes(x):
            raise ValueError(
                f"grad_fn must return a tree like x, {_shapes(x)}; got {_shapes(gradient)}"
            )
        # A rounded point is off by at most half of this: keep it inside the ball.
        precision = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
        rounding = precision * (np.linalg.norm(self.center) + radius)
        self.reach = float(radius - rounding)
        if not self.reach > 0.5 * radius:
            raise ValueError(
                f"radius must be well above the rounding of x, {rounding:.2g}; got {radius}"
            )

    def gradients(self, offsets: np.ndarray) -> np.ndarray:
        """Returns the gradients at ``center + reach * offsets`` in float64, all finite."""
        points = self.center + self.reach * offsets
        points = jnp.asarray(points, self.dtype)
        g = np.asarray(self._at(points), np.float64)
        if not np.isfinite(g).all():
            raise ValueError(
                "grad_fn must return finite gradients in the ball around x; got one that "
                "is not"
            )
        return g

    def _at(self, points: jax.Array) -> jax.Array:
        """Returns the gradients at points (k, d): shape (k, d)."""
        return _gradients(self.grad_fn, self.batch_size, self.x, points)


def _shapes(tree: Any) -> Any:
    """Replaces each array of the tree by its shape, for comparison."""
    return jax.tree.map(lambda leaf: str(leaf.shape), tree)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(
    grad_fn: GradFn, batch_size: int, like: Any, points: jax.Array
) -> jax.Array:
    """Computes gradients at the rows of ``points``, ravelled, a batch at a time."""
    _, unravel = ravel_pytree(like)

    def one(point: jax.Array) -> jax.Array:
        return ravel_pytree(grad_fn(unravel(point)))[0]

    return jax.lax.map(one, points, batch_size=min(batch_size, len(points)))


def _on_unit_sphere(rng: np.random.Generator, num: int, dim: int) -> np.ndarray:
    normals = rng.standard_normal((num, dim))
    return normals / np.linalg.norm(normals, axis=1, keepdims=True)


def _in_unit_ball(rng: np.random.Generator, num: int, dim: int) -> np.ndarray:
    """Draws uniform points of the ball: d coordinates of a sphere in d + 2 dimensions."""
    return _on_unit_sphere(rng, num, dim + 2)[:, :dim]
