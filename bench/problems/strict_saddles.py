r"""Strict saddles of three kinds, with the curvature of their critical points.

Beside :func:`jaxdp.models.cosine_grid`, whose class they share: no local minimum that is
not global, and a negative eigenvalue at every other critical point.

=============================  ========================================================
:func:`quartic_saddle`         one saddle between two minima
:func:`low_rank_factorization` of a matrix by ``U U^T``, any rank
:func:`phase_retrieval`        the largest record is far above the typical one
=============================  ========================================================

References:
  Ge, Jin and Zheng, No spurious local minima in nonconvex low rank problems, 2017; Sun,
  Qu and Wright, A geometric analysis of phase retrieval, 2018.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.models.strict_saddles import CriticalPoint, StrictSaddleProblem

Array = jax.Array
Batch = tuple[jax.Array | np.ndarray, ...]


def quartic_saddle(
    dim: int = 10,
    *,
    negative_curvature: float = 1.0,
    quartic: float = 1.0,
    quadratic_noise: float = 0.3,
    linear_noise: float = 0.1,
    radius: float = 1.5,
) -> StrictSaddleProblem:
    r"""Builds a problem with a saddle at 0, batch = (v, s, w): (B, d), (B,), (B, d).

    .. math:: f(x; v, s, w) = \tfrac12x^\top(A+s\,\nu vv^\top)x + \tfrac c4\|x\|^4
      + \langle w,x\rangle, \quad A=\mathrm{diag}(1,\dots,1,-\lambda), \qquad
      F(x) = \tfrac12x^\top Ax+\tfrac c4\|x\|^4

    s is a fair sign, v uniform on the unit sphere and w on the sphere of radius
    ``linear_noise``. Points: "saddle" at 0 and "minimum" at
    :math:`\sqrt{\lambda/c}\,e_d`; its negative is the other one. All three constants
    are attained.

    Args:
      dim: d >= 2.
      negative_curvature: lambda > 0, at 0.
      quartic: c > 0.
      quadratic_noise: nu >= 0.
      linear_noise: norm of w, >= 0.
      radius: of the ball of the constants; the minima lie inside.
    """
    validate.integer(at_least=2, dim=dim)
    validate.positive(
        negative_curvature=negative_curvature, quartic=quartic, radius=radius
    )
    validate.non_negative(quadratic_noise=quadratic_noise, linear_noise=linear_noise)
    distance = math.sqrt(negative_curvature / quartic)
    _radius_holds_minimum(radius, distance)
    diagonal = np.ones(dim)
    diagonal[-1] = -negative_curvature

    def value_fn(x: Array, batch: Batch) -> Array:
        v, s, w = (jnp.asarray(array, x.dtype) for array in batch)
        quadratic = quadratic_noise / 2 * s * (v @ x) ** 2
        return quadratic + w @ x + population_fn(x)

    def population_fn(x: Array) -> Array:
        square = x**2
        quadratic = jnp.vdot(jnp.asarray(diagonal, x.dtype), square)
        return quadratic / 2 + quartic / 4 * jnp.sum(square) ** 2

    def make_data(num_examples: int, seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        v, s = _signed_directions(rng, num_examples, dim)
        return v, s, (linear_noise * _sphere(rng, num_examples, dim)).astype(np.float32)

    minimum = np.zeros(dim)
    minimum[-1] = distance
    gap = negative_curvature**2 / (4 * quartic)
    at_minimum = min(1 + negative_curvature, 2 * negative_curvature)
    # The ball holds the minimum, so the curvature at 0 is nowhere the largest.
    steepest = 1 + quadratic_noise
    return StrictSaddleProblem(
        name="quartic_saddle",
        shape=(dim,),
        value_fn=value_fn,
        population_fn=population_fn,
        make_data=make_data,
        radius=radius,
        lipschitz=steepest * radius + quartic * radius**3 + linear_noise,
        smoothness=steepest + 3 * quartic * radius**2,
        hessian_lipschitz=6 * quartic * radius,
        least_value=-gap,
        points={
            "minimum": CriticalPoint(minimum, at_minimum, 0.0),
            "saddle": CriticalPoint(np.zeros(dim), -negative_curvature, gap),
        },
    )


def low_rank_factorization(
    dim: int = 10,
    rank: int = 1,
    *,
    spectrum: Sequence[float] = (1.0, 0.6, 0.2),
    noise: float = 0.3,
    radius: float = 1.3,
) -> StrictSaddleProblem:
    r"""Builds a low-rank matrix seen through rank-one noise, batch = (v, s).

    .. math:: f(U; v, s) = \tfrac14\|UU^\top-Y\|_F^2 - \tfrac14\|Y\|_F^2, \quad
      Y = M^\star + R\,s\,vv^\top, \quad U\in\mathbb R^{d\times r}

    v of shape (B, d) is uniform on the unit sphere and s of shape (B,) a fair sign, so
    that F is f with :math:`M^\star=\mathrm{diag}(\lambda_1,\lambda_2,\dots,0)` for Y.
    The columns of a critical point are :math:`\sqrt{\lambda_i}e_i` for some of the i, up
    to rotation.

    Points: "minimum" has the first r of them, "saddle" the r from the second on,
    "saddle_3" those from the third on, as far as the spectrum goes; "zero" has none. At
    the minimum the least eigenvalue is 0 for r > 1: rotations change nothing. G and M are
    bounds: where the spectrum is shorter than d, no record reaches their part that is due
    to :math:`\lambda_1`.

    Args:
      dim: d, rows of U.
      rank: r, columns of U.
      spectrum: the eigenvalues above 0 in falling order: at least r + 1, at most d.
      noise: R >= 0.
      radius: of the ball of the constants; the minimum lies inside.
    """
    validate.integer(dim=dim, rank=rank)
    validate.non_negative(noise=noise)
    validate.positive(radius=radius)
    values = np.asarray(spectrum, np.float64)
    if (
        values.ndim != 1
        or not rank < len(values) <= dim
        or not np.isfinite(values).all()
        or not (np.diff(values, append=0) < 0).all()
    ):
        raise ValueError(
            f"spectrum must be from {rank + 1} to {dim} numbers > 0 in falling order, "
            f"got {spectrum}"
        )
    _radius_holds_minimum(radius, math.sqrt(values[:rank].sum()))
    diagonal = np.zeros(dim)
    diagonal[: len(values)] = values

    def population_fn(x: Array) -> Array:
        rows = jnp.sum(x**2, axis=1)
        gram = jnp.einsum("ij,ik->jk", x, x)
        linear = jnp.vdot(jnp.asarray(diagonal, x.dtype), rows)
        return jnp.sum(gram**2) / 4 - linear / 2

    def value_fn(x: Array, batch: Batch) -> Array:
        v, s = (jnp.asarray(array, x.dtype) for array in batch)
        # No record needs its matrix: <U U^T, v v^T> is the square of v^T U.
        return population_fn(x) - noise / 2 * s * jnp.sum((v @ x) ** 2, axis=1)

    def make_data(num_examples: int, seed: int) -> Batch:
        return _signed_directions(np.random.default_rng(seed), num_examples, dim)

    def point(first: int) -> CriticalPoint:
        """Returns the critical point of the eigenvectors from ``first`` on, from 0."""
        x = np.zeros((dim, rank))
        taken = np.arange(first, first + rank)
        x[taken, np.arange(rank)] = np.sqrt(values[taken])
        smallest = values[taken[-1]]
        # Turn a column towards an eigenvector that is missing; stretch it; rotate.
        turned = smallest - np.delete(diagonal, taken).max()
        least = min(turned, 2 * smallest, *([0.0] if rank > 1 else []))
        gap = np.sum(values[:rank] ** 2 - values[taken] ** 2) / 4
        return CriticalPoint(x, float(least), float(gap))

    best = float(np.sum(values[:rank] ** 2)) / 4
    points = {"minimum": point(0), "saddle": point(1)}
    for first in range(2, len(values) - rank + 1):
        points[f"saddle_{first + 1}"] = point(first)
    points["zero"] = CriticalPoint(np.zeros((dim, rank)), -float(values[0]), best)
    largest = float(values[0])
    return StrictSaddleProblem(
        name=f"low_rank_factorization_{rank}",
        shape=(dim, rank),
        value_fn=value_fn,
        population_fn=population_fn,
        make_data=make_data,
        radius=radius,
        lipschitz=radius * (radius**2 + largest + noise),
        smoothness=3 * radius**2 + largest + noise,
        hessian_lipschitz=6 * radius,
        least_value=-best,
        points=points,
    )


def phase_retrieval(dim: int = 10, *, radius: float = 1.0) -> StrictSaddleProblem:
    r"""Builds phase retrieval of a unit vector, batch = (a,), a of shape (B, d).

    .. math:: f(x; a) = \tfrac14\big((a^\top x)^2-(a^\top x^\star)^2\big)^2, \qquad
      F(x) = \frac d{d+2}\cdot\tfrac14\big[3\|x\|^4+3-2\|x\|^2-4\langle x,x^\star\rangle^2
      \big]

    with :math:`x^\star=e_1` and a uniform on the sphere of radius :math:`\sqrt d`.
    Points: "minimum" at :math:`x^\star` (its negative is the other one), "maximum" at 0,
    and "saddle" at :math:`e_2/\sqrt3`, one of the sphere of them. All three constants are
    attained, and grow with d squared while the typical record's do not: clip below them.

    Args:
      dim: d >= 2.
      radius: of the ball of the constants, >= 1.
    """
    validate.integer(at_least=2, dim=dim)
    validate.positive(radius=radius)
    _radius_holds_minimum(radius, 1.0)
    scale = dim / (dim + 2)

    def value_fn(x: Array, batch: Batch) -> Array:
        a = jnp.asarray(batch[0], x.dtype)
        return ((a @ x) ** 2 - a[:, 0] ** 2) ** 2 / 4

    def population_fn(x: Array) -> Array:
        square = jnp.sum(x**2)
        return scale / 4 * (3 * square**2 + 3 - 2 * square - 4 * x[0] ** 2)

    def make_data(num_examples: int, seed: int) -> Batch:
        validate.integer(num_examples=num_examples)
        a = math.sqrt(dim) * _sphere(np.random.default_rng(seed), num_examples, dim)
        return (a.astype(np.float32),)

    signal, other = np.eye(dim)[:2]
    return StrictSaddleProblem(
        name="phase_retrieval",
        shape=(dim,),
        value_fn=value_fn,
        population_fn=population_fn,
        make_data=make_data,
        radius=radius,
        lipschitz=dim**2 * radius**3,
        smoothness=3 * dim**2 * radius**2,
        hessian_lipschitz=6 * dim**2 * radius,
        least_value=0.0,
        points={
            "minimum": CriticalPoint(signal, 2 * scale, 0.0),
            "saddle": CriticalPoint(other / math.sqrt(3), -2 * scale, 2 / 3 * scale),
            "maximum": CriticalPoint(np.zeros(dim), -3 * scale, 3 / 4 * scale),
        },
    )


def _radius_holds_minimum(radius: float, norm: float) -> None:
    if radius < norm:
        raise ValueError(
            f"radius must be at least the norm of the minimum, {norm:.4g}; got {radius}"
        )


def _sphere(rng: np.random.Generator, num: int, dim: int) -> np.ndarray:
    """Draws uniform points of the unit sphere of R^dim, shape (num, dim), float64."""
    validate.integer(num_examples=num)
    normals = rng.standard_normal((num, dim))
    return normals / np.linalg.norm(normals, axis=1, keepdims=True)


def _signed_directions(
    rng: np.random.Generator, num: int, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws unit vectors (num, dim), float32, and fair signs (num,), int8."""
    directions = _sphere(rng, num, dim).astype(np.float32)
    return directions, rng.choice(np.array([-1, 1], np.int8), num)
