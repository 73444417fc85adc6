r"""Games with known answers, on which private mirror descent is run and judged.

x minimises and y maximises, each over a simplex. The records of a game are a linear term
with independent signs, whose mean is zero,

.. math:: f(x, y; a, b) = F(x, y) + s\,(\langle a,x\rangle + \langle b,y\rangle),
  \qquad a, b \in \{\pm1\}^d,

so that the expected F, its equilibrium and its gap are known without looking at any.

References:
  Gonzalez, Guzman, Paquette (arXiv 2403.02912), 2024: the class of problems.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate

Array = jax.Array
Batch = tuple[jax.Array | np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Game:
    """A convex-concave game on two simplices, with its constants and its answer.

    Attributes:
      name: for tables.
      dim_x: number of coordinates of x, its vertices.
      dim_y: number of coordinates of y.
      population_fn: (x, y) -> the expected F, shape=().
      gap_fn: (x, y) -> the exact duality gap of the expected F, in float64.
      lipschitz: largest absolute partial derivative of a record's loss.
      smoothness: largest absolute second derivative.
      second_smoothness: largest absolute third derivative.
      equilibrium_x: (dim_x,), float64.
      equilibrium_y: (dim_y,), float64.
      value: F at the equilibrium.
      sign_scale: s, of the records' linear term.
      matrix: A where F is x'Ay, float32 (dim_x, dim_y); else None.
    """

    name: str
    dim_x: int
    dim_y: int
    population_fn: Callable[[Any, Any], Any]
    gap_fn: Callable[[Any, Any], float]
    lipschitz: float
    smoothness: float
    second_smoothness: float
    equilibrium_x: np.ndarray
    equilibrium_y: np.ndarray
    value: float
    sign_scale: float
    matrix: np.ndarray | None = None

    def value_fn(self, x: Array, y: Array, batch: Batch) -> Array:
        """Returns the losses (B,) of records (a, b): signs (B, dim_x) and (B, dim_y)."""
        a, b = batch
        signs = jnp.asarray(a, x.dtype) @ x + jnp.asarray(b, y.dtype) @ y
        return self.population_fn(x, y) + self.sign_scale * signs

    def make_data(self, num_examples: int, seed: int) -> Batch:
        """Draws records (a, b): int8 arrays (n, dim_x) and (n, dim_y) of -1 and 1."""
        rng = np.random.default_rng(seed)
        return tuple(signs(rng, num_examples, d) for d in (self.dim_x, self.dim_y))


def rock_paper_scissors(
    dim: int = 10,
    weights: tuple[float, float, float] = (1.0, 0.6, 0.3),
    *,
    sign_scale: float = 0.5,
) -> Game:
    r"""Builds the weighted game with d - 3 more strategies that no player should use.

    The winner's prize depends on the pair: the equilibrium of both players is
    :math:`\propto(w_3,w_2,w_1)`, the value 0. Whoever plays one of the other strategies
    against the three pays a half; against one another they are worth nothing. Almost all of
    the uniform point is on them, so its gap is .840, .984 and .998 for d = 10, 100, 1000.

    Args:
      dim: d >= 3.
      weights: (w_1, w_2, w_3), > 0.
      sign_scale: s >= 0.

    Example:
      >>> import jaxdp
      >>> game = jaxdp.models.rock_paper_scissors(dim=4)
      >>> game.equilibrium_x.round(3).tolist()
      [0.158, 0.316, 0.526, 0.0]
      >>> round(game.gap_fn(game.equilibrium_x, game.equilibrium_y), 6)
      0.0
      >>> a, b = game.make_data(100, seed=0)
      >>> a.shape, a.dtype
      ((100, 4), dtype('int8'))
    """
    validate.integer(at_least=3, dim=dim)
    w1, w2, w3 = weights
    validate.positive(w1=w1, w2=w2, w3=w3)
    a = np.zeros((dim, dim))
    a[3:, :3], a[:3, 3:] = 0.5, -0.5
    a[:3, :3] = [[0, w1, -w2], [-w1, 0, w3], [w2, -w3, 0]]
    mixed = np.zeros(dim)
    mixed[:3] = np.array([w3, w2, w1]) / (w1 + w2 + w3)
    return bilinear("rock_paper_scissors", a, mixed, mixed, sign_scale)


def bilinear(
    name: str, a: np.ndarray, x: np.ndarray, y: np.ndarray, sign_scale: float
) -> Game:
    """Builds the game x'Ay, given its equilibrium (x, y)."""
    validate.non_negative(sign_scale=sign_scale)
    matrix = a.astype(np.float32)
    largest = float(np.abs(a).max())

    def gap_fn(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.max(a.T @ x) - np.min(a @ y))

    return Game(
        name=name,
        dim_x=a.shape[0],
        dim_y=a.shape[1],
        population_fn=lambda x, y: jnp.vdot(x, jnp.asarray(matrix, x.dtype) @ y),
        gap_fn=gap_fn,
        lipschitz=largest + sign_scale,
        smoothness=largest,
        second_smoothness=0.0,
        equilibrium_x=x,
        equilibrium_y=y,
        value=float(x @ a @ y),
        sign_scale=sign_scale,
        matrix=matrix,
    )


def signs(rng: np.random.Generator, num_examples: int, dim: int) -> np.ndarray:
    """Draws independent uniform signs, int8 (num_examples, dim)."""
    validate.integer(num_examples=num_examples)
    size = num_examples * dim
    bits = np.unpackbits(np.frombuffer(rng.bytes(-(-size // 8)), np.uint8))[:size]
    return (2 * bits.astype(np.int8) - 1).reshape(num_examples, dim)
