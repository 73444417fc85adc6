r"""A quadratic problem whose gradients and central differences have closed forms.

Parameters are one array of shape (d,); a batch is a tuple of arrays with the same leading
axis B. Everything is computed in the parameters' dtype (float64 under x64).

    slope of record i along u, radius lam:
        (f_i(x + lam u) - f_i(x - lam u)) / (2 lam)
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate

Array = jax.Array
Batch = tuple[jax.Array | np.ndarray, ...]

Hessian = Literal["identity", "inverse_sqrt", "inverse"]

HESSIANS: tuple[Hessian, ...] = get_args(Hessian)
_POWERS: dict[Hessian, float] = {"identity": 0.0, "inverse_sqrt": -0.5, "inverse": -1.0}


class Problem(NamedTuple):
    """A per-record loss with its closed forms; d parameters, B records.

    A constant is None where no finite one exists on all of R^d.
    """

    name: str
    dim: int  # d
    value_fn: Callable[[Array, Batch], Array]  # (x, batch) -> losses, shape=(B,)
    gradient_fn: Callable[[Array, Batch], Array]  # (x, batch) -> shape=(B, d)
    slope_fn: Callable[[Array, Batch, Array, float], Array]  # (x, batch, u, radius)
    smoothness: float | None  # ell: largest curvature of a record's loss
    effective_rank: float | None  # r: trace over norm of the curvature envelope
    lipschitz: float | None  # L: largest gradient norm of a record's loss


def hessian_diagonal(hessian: Hessian, dim: int) -> np.ndarray:
    """Returns the eigenvalues j^-p, j = 1..d, p = 0, 1/2, 1; shape (dim,), float64.

    Raises:
      ValueError: another name, or dim < 1.
    """
    validate.one_of(HESSIANS, hessian=hessian)
    validate.integer(at_least=1, dim=dim)
    return np.arange(1, dim + 1, dtype=np.float64) ** _POWERS[hessian]


def effective_rank(diagonal: np.ndarray) -> float:
    """Returns the trace over the largest eigenvalue of a diagonal H >= 0: r in [1, d]."""
    return float(np.sum(diagonal) / np.max(diagonal))


def centered_quadratic(hessian: Hessian = "identity", dim: int = 20) -> Problem:
    r"""f_i(x) = (x - xi_i)^T A (x - xi_i) / 2, batch = (xi,), xi of shape (B, d).

    The mean loss is minimal at the mean of xi; ``datasets.quadratic_data`` draws xi.

    Args:
      hessian: A, as in ``hessian_diagonal``.
      dim: d.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> problem = jaxdp.models.centered_quadratic("identity", dim=2)
      >>> problem.value_fn(jnp.zeros(2), (jnp.array([[3.0, 4.0]]),)).tolist()
      [12.5]

    References:
      Section 6 (Figs 1-2) of Zhang et al., `DPZero
      <https://arxiv.org/abs/2310.09639>`_, 2024.
    """
    diagonal = hessian_diagonal(hessian, dim)

    def value_fn(x: Array, batch: Batch) -> Array:
        (xi,) = batch
        return jnp.sum(jnp.asarray(diagonal, x.dtype) * (x[None] - xi) ** 2, -1) / 2

    def gradient_fn(x: Array, batch: Batch) -> Array:
        (xi,) = batch
        return jnp.asarray(diagonal, x.dtype)[None] * (x[None] - xi)

    return Problem(
        name=f"centered_quadratic_{hessian}",
        dim=dim,
        value_fn=value_fn,
        gradient_fn=gradient_fn,
        slope_fn=exact_slope(gradient_fn),
        smoothness=float(diagonal.max()),
        effective_rank=effective_rank(diagonal),
        lipschitz=None,
    )


def exact_slope(gradient_fn: Callable[[Array, Batch], Array]):
    """Returns the central difference u^T grad f of losses of degree two, for any radius."""

    def slope_fn(x: Array, batch: Batch, u: Array, radius: float) -> Array:
        del radius
        return gradient_fn(x, batch) @ u

    return slope_fn
