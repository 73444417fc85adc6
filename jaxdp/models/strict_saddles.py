r"""A nonconvex problem whose strict saddles and their curvature are known.

The search for second-order stationary points is run and judged on it. The expected loss F
has a closed form, no local minimum that is not global, and a negative eigenvalue at every
other critical point.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate

Array = jax.Array
Batch = tuple[jax.Array | np.ndarray, ...]


class CriticalPoint(NamedTuple):
    """A point where the gradient of the expected loss is zero.

    Attributes:
      x: float64, of the shape of the parameters.
      min_eigenvalue: of the Hessian of the expected loss there.
      initial_gap: B, how far the expected loss there lies above its least value.
    """

    x: np.ndarray
    min_eigenvalue: float
    initial_gap: float


@dataclasses.dataclass(frozen=True, eq=False)
class StrictSaddleProblem:
    """A smooth per-record loss with its constants and its critical points.

    The constants bound the derivatives of every record's loss, on the ball of
    ``radius`` around 0 (in the Frobenius norm of the parameters).

    Attributes:
      name: for tables.
      shape: of the parameters, which are one array.
      value_fn: (x, batch) -> losses (B,), in the dtype of x.
      population_fn: x -> the expected F, shape=().
      make_data: (num_examples, seed) -> a batch, float32 and int8.
      radius: of the ball; infinity where the constants hold everywhere.
      lipschitz: G, the largest gradient norm.
      smoothness: M, the largest absolute eigenvalue of a Hessian.
      hessian_lipschitz: rho, the Lipschitz constant of the Hessian in operator norm.
      least_value: of F.
      points: critical points by name. Each problem has a "minimum", which is global, and
        a "saddle".
    """

    name: str
    shape: tuple[int, ...]
    value_fn: Callable[[Array, Batch], Array]
    population_fn: Callable[[Array], Array]
    make_data: Callable[[int, int], Batch]
    radius: float
    lipschitz: float
    smoothness: float
    hessian_lipschitz: float
    least_value: float
    points: Mapping[str, CriticalPoint]

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)


def cosine_grid(
    dim: int = 10,
    *,
    weights: Sequence[float] | None = None,
    half_width: float = 0.5,
    num_at_maximum: int = 2,
) -> StrictSaddleProblem:
    r"""Builds cosines with a random phase, batch = (z,), z of shape (B, d).

    .. math:: f(x; z) = \sum_ja_j\cos(x_j+z_j), \quad z_j\sim U[-h, h], \qquad
      F(x) = \frac{\sin h}h\sum_ja_j\cos x_j

    Points: "minimum", all at pi; "maximum", all at 0; "saddle", the first few at 0 and
    the rest at pi. All three constants are attained.

    Args:
      dim: d >= 2.
      weights: a > 0, of length d; None is :math:`1/\sqrt d` each, so that G is 1.
      half_width: h in (0, pi).
      num_at_maximum: coordinates at 0 in the saddle, at least 1 and below d.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> problem = jaxdp.models.cosine_grid(dim=4)
      >>> saddle = problem.points["saddle"]
      >>> saddle.x.round(2).tolist(), saddle.min_eigenvalue < 0
      ([0.0, 0.0, 3.14, 3.14], True)
    """
    validate.integer(at_least=2, dim=dim)
    validate.integer(at_most=dim - 1, num_at_maximum=num_at_maximum)
    validate.positive(half_width=half_width)
    if half_width >= math.pi:
        raise ValueError(f"half_width must be below pi, got {half_width}")
    a = np.full(dim, dim**-0.5) if weights is None else np.asarray(weights, np.float64)
    if a.shape != (dim,) or not (np.isfinite(a) & (a > 0)).all():
        raise ValueError(f"weights must be {dim} numbers > 0, got {weights}")
    shrink = math.sin(half_width) / half_width

    def value_fn(x: Array, batch: Batch) -> Array:
        (z,) = batch
        return jnp.cos(x[None] + jnp.asarray(z, x.dtype)) @ jnp.asarray(a, x.dtype)

    def population_fn(x: Array) -> Array:
        return shrink * jnp.vdot(jnp.asarray(a, x.dtype), jnp.cos(x))

    def make_data(num_examples: int, seed: int) -> Batch:
        validate.integer(num_examples=num_examples)
        shape = num_examples, dim
        z = np.random.default_rng(seed).uniform(-half_width, half_width, shape)
        return (z.astype(np.float32),)

    def point(num: int) -> CriticalPoint:
        """Returns the critical point with the first ``num`` coordinates at 0."""
        x = np.where(np.arange(dim) < num, 0.0, math.pi)
        least = -a[:num].max() if num else a.min()
        gap = 2 * shrink * a[:num].sum()
        return CriticalPoint(x, shrink * float(least), float(gap))

    return StrictSaddleProblem(
        name="cosine_grid",
        shape=(dim,),
        value_fn=value_fn,
        population_fn=population_fn,
        make_data=make_data,
        radius=math.inf,
        lipschitz=float(np.linalg.norm(a)),
        smoothness=float(a.max()),
        hessian_lipschitz=float(a.max()),
        least_value=-shrink * float(a.sum()),
        points={
            "minimum": point(0),
            "saddle": point(num_at_maximum),
            "maximum": point(dim),
        },
    )
