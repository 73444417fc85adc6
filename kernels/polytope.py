r"""Polytopes given by their vertices: a point is a mixture, a gradient one number a vertex.

A player on :math:`\mathrm{conv}\{v_1,\dots,v_m\}` plays weights of the simplex of its m
vertices: :math:`x=\sum_i\lambda_iv_i`, and the derivative by the weight of vertex i is
:math:`\langle\nabla_xf,v_i\rangle`. Nothing else of an algorithm on the simplex changes.

============  ======================================  ============
polytope      vertices                                how many (m)
============  ======================================  ============
``Simplex``   the unit vectors                        dim
``L1Ball``    +radius e_j, then -radius e_j           2 dim
``Polytope``  the given rows                          m
============  ======================================  ============

All have ``dim`` coordinates and ``num_vertices`` m; ``point`` takes weights (..., m) to the
point (..., dim), and ``vertex_gradient`` a gradient (..., dim) to the weights' derivative
(..., m).

References:
  Gonzalez, Guzman and Paquette, Mirror Descent Algorithms with Nearly
  Dimension-Independent Rates for Differentially-Private Stochastic Saddle-Point
  Problems, arXiv 2403.02912, appendix C.
"""

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _check_dim(dim: Any) -> None:
    if isinstance(dim, bool) or not isinstance(dim, numbers.Integral):
        raise TypeError(
            f"dim must be an integer >= 1, got {dim!r} of type {type(dim).__name__}"
        )
    if dim < 1:
        raise ValueError(f"dim must be an integer >= 1, got {dim!r}")


#: Full float32. An accelerator's default rounds the factors of a product first.
_FULL = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Simplex:
    """Probability vectors of length ``dim``; their own weights.

    Attributes:
      dim: number of coordinates, which is the number of vertices.

    Raises:
      TypeError, ValueError: ``dim`` is no integer >= 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> simplex = jaxdp.Simplex(3)
      >>> simplex.num_vertices
      3
      >>> simplex.point(jnp.array([0.5, 0.5, 0.0])).tolist()
      [0.5, 0.5, 0.0]
    """

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self.dim)

    @property
    def num_vertices(self) -> int:
        """Number of vertices, ``dim``."""
        return self.dim

    def point(self, weights: jax.Array) -> jax.Array:
        """Returns the point of weights ``(..., dim)``: the weights themselves.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> jaxdp.Simplex(2).point(jnp.array([0.25, 0.75])).tolist()
          [0.25, 0.75]
        """
        return weights

    def vertex_gradient(self, gradient: jax.Array) -> jax.Array:
        """Returns the derivative by the weights, which is the gradient ``(..., dim)``.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> jaxdp.Simplex(2).vertex_gradient(jnp.array([1.0, -2.0])).tolist()
          [1.0, -2.0]
        """
        return gradient


@dataclasses.dataclass(frozen=True)
class L1Ball:
    """Vectors of l1 norm at most ``radius``, around zero.

    Attributes:
      dim: number of coordinates p; there are 2 p vertices.
      radius: finite, > 0.

    Raises:
      TypeError, ValueError: ``dim`` is no integer >= 1, ``radius`` no finite number > 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> ball = jaxdp.L1Ball(dim=2, radius=3.0)
      >>> ball.num_vertices
      4
      >>> ball.point(jnp.array([0.5, 0.0, 0.0, 0.5])).tolist()
      [1.5, -1.5]
    """

    dim: int
    radius: float

    def __post_init__(self) -> None:
        _check_dim(self.dim)
        radius = self.radius
        if isinstance(radius, bool) or not isinstance(radius, numbers.Real):
            raise TypeError(
                f"radius must be a number > 0, got {radius!r} of type "
                f"{type(radius).__name__}"
            )
        if not 0 < radius < math.inf:
            raise ValueError(f"radius must be a finite number > 0, got {radius!r}")

    @property
    def num_vertices(self) -> int:
        """Number of vertices, ``2 * dim``."""
        return 2 * self.dim

    def point(self, weights: jax.Array) -> jax.Array:
        """Returns the point ``(..., dim)`` of weights ``(..., 2 * dim)`` of the vertices.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> ball = jaxdp.L1Ball(dim=2, radius=3.0)
          >>> ball.point(jnp.array([0.0, 0.0, 1.0, 0.0])).tolist()
          [-3.0, 0.0]
        """
        positive, negative = weights[..., : self.dim], weights[..., self.dim :]
        return jnp.asarray(self.radius, weights.dtype) * (positive - negative)

    def vertex_gradient(self, gradient: jax.Array) -> jax.Array:
        """Returns the derivative by the weights ``(..., 2 * dim)``.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> ball = jaxdp.L1Ball(dim=2, radius=3.0)
          >>> ball.vertex_gradient(jnp.array([1.0, -2.0])).tolist()
          [3.0, -6.0, -3.0, 6.0]
        """
        scaled = jnp.asarray(self.radius, gradient.dtype) * gradient
        return jnp.concatenate([scaled, -scaled], axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Polytope:
    """The convex hull of the rows of a public matrix.

    Compared and hashed by identity, as it holds an array.

    Attributes:
      vertices: ``(m, p)``, finite; copied to float32.

    Raises:
      ValueError: no such matrix, or a number that float32 cannot hold.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> triangle = jaxdp.Polytope([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
      >>> triangle.dim, triangle.num_vertices
      (2, 3)
      >>> triangle.point(jnp.array([0.5, 0.25, 0.25])).tolist()
      [1.0, 1.0]
    """

    vertices: Any

    def __post_init__(self) -> None:
        given = np.asarray(self.vertices)
        if given.ndim != 2 or 0 in given.shape:
            raise ValueError(
                f"vertices must be a matrix (m, p) of numbers, got shape {given.shape}"
            )
        with np.errstate(over="ignore"):
            vertices = given.astype(np.float32)
        if not np.isfinite(vertices).all():
            raise ValueError("vertices must be finite in float32")
        vertices.setflags(write=False)
        object.__setattr__(self, "vertices", vertices)

    @property
    def dim(self) -> int:
        """Number of coordinates p."""
        return self.vertices.shape[1]

    @property
    def num_vertices(self) -> int:
        """Number m of vertices."""
        return self.vertices.shape[0]

    def point(self, weights: jax.Array) -> jax.Array:
        """Returns the point ``(..., dim)`` of weights ``(..., num_vertices)``.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> segment = jaxdp.Polytope([[0.0, 0.0], [4.0, 2.0]])
          >>> segment.point(jnp.array([0.5, 0.5])).tolist()
          [2.0, 1.0]
        """
        vertices = jnp.asarray(self.vertices, weights.dtype)
        return jnp.matmul(weights, vertices, precision=_FULL)

    def vertex_gradient(self, gradient: jax.Array) -> jax.Array:
        """Returns the derivative by the weights ``(..., num_vertices)``.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> segment = jaxdp.Polytope([[0.0, 0.0], [4.0, 2.0]])
          >>> segment.vertex_gradient(jnp.array([1.0, -1.0])).tolist()
          [0.0, 2.0]
        """
        vertices = jnp.asarray(self.vertices.T, gradient.dtype)
        return jnp.matmul(gradient, vertices, precision=_FULL)
