"""Problems whose gradients and central differences are known, beside the quadratic one.

Tests compare oracles with them, benchmarks time them; :func:`jaxdp.data.problems
.centered_quadratic` has their class.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.data.problems import (
    Hessian,
    Problem,
    effective_rank,
    exact_slope,
    hessian_diagonal,
)

Array = jax.Array
Batch = tuple[jax.Array | np.ndarray, ...]


def _num_records(batch: Batch) -> int:
    return batch[0].shape[0]


def _rows(batch: Batch, row: Array) -> Array:
    """Repeats a row for each record: shape (B, ...)."""
    return jnp.broadcast_to(row, (_num_records(batch), *row.shape))


def quadratic(hessian: Hessian = "identity", dim: int = 4) -> Problem:
    r"""f_i(x) = x^T A x / 2, the same for every record; a batch only counts them.

    With it the law of a whole noisy run is known (dpzero, test 1).

    Args:
      hessian: A, as in ``hessian_diagonal``.
      dim: d.
    """
    diagonal = hessian_diagonal(hessian, dim)

    def value_fn(x: Array, batch: Batch) -> Array:
        return _rows(batch, jnp.sum(jnp.asarray(diagonal, x.dtype) * x**2) / 2)

    def gradient_fn(x: Array, batch: Batch) -> Array:
        return _rows(batch, jnp.asarray(diagonal, x.dtype) * x)

    return Problem(
        name=f"quadratic_{hessian}",
        dim=dim,
        value_fn=value_fn,
        gradient_fn=gradient_fn,
        slope_fn=exact_slope(gradient_fn),
        smoothness=float(diagonal.max()),
        effective_rank=effective_rank(diagonal),
        lipschitz=None,
    )


def cubic(dim: int = 4) -> Problem:
    r"""f_i(x) = sum_j x_j^3 / 6, the same for every record.

    Its central difference exceeds u^T grad f by exactly radius^2 sum_j u_j^3 / 6; a
    one-sided difference is off by a first-order term.

    Args:
      dim: d.
    """
    validate.integer(at_least=1, dim=dim)

    def value_fn(x: Array, batch: Batch) -> Array:
        return _rows(batch, jnp.sum(x**3) / 6)

    def gradient_fn(x: Array, batch: Batch) -> Array:
        return _rows(batch, x**2 / 2)

    def slope_fn(x: Array, batch: Batch, u: Array, radius: float) -> Array:
        return gradient_fn(x, batch) @ u + radius**2 * jnp.sum(u**3) / 6

    return Problem("cubic", dim, value_fn, gradient_fn, slope_fn, None, None, None)


def linear_adversarial(vector: np.ndarray, scale: float = 1e6) -> Problem:
    r"""f_i(x) = s_i M v^T x, batch = (s,), s of shape (B,): the worst a record can do.

    Every slope is s_i M v^T u, far beyond any clip for a large M: flipping one sign
    moves the clipped sum by exactly 2C, zeroing one record by exactly C.

    Args:
      vector: v, shape (d,).
      scale: M > 0.
    """
    validate.positive(scale=scale)
    v = np.asarray(vector, np.float64)
    if v.ndim != 1 or not v.size:
        raise ValueError(f"vector must have shape (d,), d >= 1; got shape {v.shape}")

    def gradient_fn(x: Array, batch: Batch) -> Array:
        (signs,) = batch
        return (
            jnp.asarray(signs, x.dtype)[:, None] * jnp.asarray(scale * v, x.dtype)[None]
        )

    def value_fn(x: Array, batch: Batch) -> Array:
        (signs,) = batch
        # One inner product for all records, so that equal signs get equal bits.
        return jnp.asarray(signs, x.dtype) * jnp.vdot(
            jnp.asarray(scale * v, x.dtype), x
        )

    return Problem(
        name="linear_adversarial",
        dim=v.size,
        value_fn=value_fn,
        gradient_fn=gradient_fn,
        slope_fn=exact_slope(gradient_fn),
        smoothness=0.0,
        effective_rank=1.0,
        lipschitz=float(scale * np.linalg.norm(v)),  # for |s_i| <= 1
    )


def pseudo_huber(dim: int = 100) -> Problem:
    r"""f_i(x) = sum_j sqrt(1 + (x_j - xi_ij)^2) / j, batch = (xi,).

    Lipschitz, smooth, with the curvature envelope H = diag(1/j): every assumption of
    DPZero's theorem 3 holds, so its rate can be simulated.

    Args:
      dim: d. Its effective rank is the d-th harmonic number, 5.19 at d = 100.
    """
    weights = hessian_diagonal("inverse", dim)

    def offsets(x: Array, batch: Batch) -> tuple[Array, Array]:
        (xi,) = batch
        difference = x[None] - xi
        return difference, jnp.sqrt(1 + difference**2)

    def value_fn(x: Array, batch: Batch) -> Array:
        _, root = offsets(x, batch)
        return jnp.sum(jnp.asarray(weights, x.dtype)[None] * root, -1)

    def gradient_fn(x: Array, batch: Batch) -> Array:
        difference, root = offsets(x, batch)
        return jnp.asarray(weights, x.dtype)[None] * difference / root

    def slope_fn(x: Array, batch: Batch, u: Array, radius: float) -> Array:
        # sqrt(1 + p^2) - sqrt(1 + m^2) = (p - m)(p + m) / (sum of the roots): no
        # cancellation for small radii, unlike the difference of the losses.
        (plus, root_plus), (minus, root_minus) = (
            offsets(x + s * radius * u, batch) for s in (1, -1)
        )
        terms = (plus + minus) / (root_plus + root_minus) * u[None]
        return jnp.sum(jnp.asarray(weights, x.dtype)[None] * terms, -1)

    return Problem(
        name="pseudo_huber",
        dim=dim,
        value_fn=value_fn,
        gradient_fn=gradient_fn,
        slope_fn=slope_fn,
        smoothness=1.0,
        effective_rank=effective_rank(weights),
        lipschitz=float(np.linalg.norm(weights)),
    )
