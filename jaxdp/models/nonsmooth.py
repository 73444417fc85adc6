r"""A nonsmooth problem with known constants, on which O2NC is run and judged.

It draws its own data, so that its Lipschitz constant and its initial gap are known without
looking at any. Losses are computed in the parameters' dtype (float64 under x64).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.metrics.goldstein import on_unit_sphere as sphere

Array = jax.Array
Batch = tuple[jax.Array | np.ndarray, ...]


class NonsmoothProblem(NamedTuple):
    """Lipschitz per-record loss with its constants; d parameters, B records.

    ``gradient_fn`` is right wherever the loss has a gradient and gives a subgradient of
    one branch elsewhere. ``smoothed_gradient_fn`` is that of the loss averaged over the
    ball of a radius around x; None where no closed form is known.
    """

    name: str
    dim: int  # d
    lipschitz: float  # L: largest gradient norm of a record's loss, records as drawn
    initial_gap: float  # at least F(x0) - inf F, F the expected loss of a drawn record
    x0: np.ndarray  # shape (d,), float32
    value_fn: Callable[[Array, Batch], Array]  # (x, batch) -> losses, shape (B,)
    gradient_fn: Callable[[Array, Batch], Array]  # (x, batch) -> shape (B, d)
    smoothed_gradient_fn: Callable[[Array, Batch, float], Array] | None  # (..., radius)
    make_data: Callable[[int, int], Batch]  # (num_examples, seed) -> float32 batch


def mean_gradient_fn(
    problem: NonsmoothProblem, batch: Batch
) -> Callable[[Array], Array]:
    """Returns the gradient function of a fixed batch's mean loss, for Goldstein norms.

    Args:
      problem: of which ``value_fn`` is differentiated.
      batch: all evaluation records. For ``max_of_linear`` the single record z = 0 stands
        for the expected loss, since E z = 0 and z enters linearly.

    Returns:
      x, shape (d,) -> gradient, shape (d,).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> problem = jaxdp.models.max_of_linear(dim=3)
      >>> gradient = jaxdp.models.mean_gradient_fn(problem, (jnp.zeros((1, 3)),))
      >>> round(float(jnp.linalg.norm(gradient(jnp.ones(3)))), 3)  # A unit vector a_j.
      1.0
    """
    return jax.grad(lambda x: jnp.mean(problem.value_fn(x, batch)))


def max_of_linear(
    dim: int = 8, num_pairs: int = 16, linear_norm: float = 0.5, seed: int = 0
) -> NonsmoothProblem:
    r"""f(x; z) = max_j <a_j, x> + <z, x>, batch = (z,), z of shape (B, d).

    The a_j are ``num_pairs`` random unit vectors and their negatives, so the maximum is
    at least 0, and 0 at x = 0. z is
    uniform on the sphere of radius ``linear_norm``. x0 is all ones.

    Args:
      dim: d.
      num_pairs: half the number of linear pieces.
      linear_norm: norm of z, >= 0.
      seed: of the a_j.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> problem = jaxdp.models.max_of_linear(dim=3)
      >>> batch = problem.make_data(5, seed=0)
      >>> problem.value_fn(jnp.zeros(3), batch).tolist()
      [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    validate.integer(dim=dim, num_pairs=num_pairs)
    validate.non_negative(linear_norm=linear_norm)
    half = sphere(np.random.default_rng(seed), num_pairs, dim)
    pieces = np.concatenate([half, -half])

    def value_fn(x: Array, batch: Batch) -> Array:
        (z,) = batch
        return jnp.asarray(z, x.dtype) @ x + jnp.max(jnp.asarray(pieces, x.dtype) @ x)

    def gradient_fn(x: Array, batch: Batch) -> Array:
        (z,) = batch
        a = jnp.asarray(pieces, x.dtype)
        return jnp.asarray(z, x.dtype) + a[jnp.argmax(a @ x)]

    return NonsmoothProblem(
        name="max_of_linear",
        dim=dim,
        lipschitz=1.0 + linear_norm,
        initial_gap=float(np.max(np.sum(pieces, axis=1))),  # F(x0) - 0
        x0=np.ones(dim, np.float32),
        value_fn=value_fn,
        gradient_fn=gradient_fn,
        smoothed_gradient_fn=None,
        make_data=linear_parts(dim, linear_norm),
    )


def linear_parts(dim: int, norm: float) -> Callable[[int, int], Batch]:
    """Returns a function that draws z uniformly on a sphere of radius ``norm``."""

    def make_data(num_examples: int, seed: int) -> Batch:
        validate.integer(num_examples=num_examples)
        z = norm * sphere(np.random.default_rng(seed), num_examples, dim)
        return (z.astype(np.float32),)

    return make_data
