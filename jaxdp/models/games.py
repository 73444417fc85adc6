r"""Saddle-point problems with known answers: public, seeded, exact.

What private mirror descent is run on and judged with. x minimises and y maximises, each
over a simplex; a batch is a tuple of arrays with the same leading axis B. The records of
all games are a linear term with independent signs, whose mean is zero,

.. math:: f(x, y; a, b) = F(x, y) + s\,(\langle a,x\rangle + \langle b,y\rangle),
  \qquad a, b \in \{\pm1\}^d,

so that the expected F, its equilibrium and its gap are known without looking at any.

===========================  ==========================================================
:func:`rock_paper_scissors`  weighted, padded to any d with dominated strategies
:func:`two_by_two`           no player's equilibrium is uniform
:func:`diagonal_game`        the maximiser picks a coordinate of x, times its cost
:func:`max_loss`             the largest of d quadratic losses, each of one coordinate
:func:`quadratic_game`       strongly convex-concave, equilibrium in the interior
===========================  ==========================================================

References:
  Gonzalez, Guzman and Paquette, `Mirror descent algorithms with nearly
  dimension-independent rates for differentially-private stochastic saddle-point problems
  <https://arxiv.org/abs/2403.02912>`_, 2024: the class of problems.
"""

import dataclasses
from collections.abc import Callable, Sequence
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
    """
    validate.integer(at_least=3, dim=dim)
    w1, w2, w3 = weights
    validate.positive(w1=w1, w2=w2, w3=w3)
    a = np.zeros((dim, dim))
    a[3:, :3], a[:3, 3:] = 0.5, -0.5
    a[:3, :3] = [[0, w1, -w2], [-w1, 0, w3], [w2, -w3, 0]]
    mixed = np.zeros(dim)
    mixed[:3] = np.array([w3, w2, w1]) / (w1 + w2 + w3)
    return _bilinear("rock_paper_scissors", a, mixed, mixed, sign_scale)


def two_by_two(*, sign_scale: float = 0.5) -> Game:
    r"""A = (3, -1; -1, 1)/3: both play (1/3, 2/3), and the value is 1/9."""
    mixed = np.array([1, 2]) / 3
    a = np.array([[3.0, -1.0], [-1.0, 1.0]]) / 3
    return _bilinear("two_by_two", a, mixed, mixed, sign_scale)


def diagonal_game(
    costs: Sequence[float] = (1.0, 2.0, 4.0), *, sign_scale: float = 0.5
) -> Game:
    r"""A = diag(c): both play :math:`\propto1/c_i`, the value is :math:`1/\sum_ic_i^{-1}`.

    Args:
      costs: c, > 0.
      sign_scale: s >= 0.
    """
    for cost in costs:
        validate.positive(costs=cost)
    c = np.asarray(costs, np.float64)
    mixed = 1 / c / np.sum(1 / c)
    return _bilinear("diagonal_game", np.diag(c), mixed, mixed, sign_scale)


def max_loss(
    weights: Sequence[float] = (1.0, 2.0, 4.0, 0.5),
    centers: Sequence[float] = (0.5, 0.4, 0.4, 0.3),
    *,
    sign_scale: float = 0.1,
) -> Game:
    r"""Builds the largest of the losses :math:`F_i(x)=\frac{w_i}2(x_i-a_i)^2`, as a game.

    With :math:`s=\sum a_i>1` not all can be zero. They are equal at
    :math:`x^*_i=a_i-\sqrt{c/w_i}`, :math:`\sqrt c=(s-1)/\sum w_i^{-1/2}`, with
    :math:`y^*\propto w_i^{-1/2}` and value c/2.

    Args:
      weights: w, > 0.
      centers: a, in [0, 1].
      sign_scale: s >= 0.

    Raises:
      ValueError: the solution has a negative coordinate, or the sum of a is at most 1.
    """
    w, a = (np.asarray(v, np.float64) for v in (weights, centers))
    if w.ndim != 1 or w.shape != a.shape or not (w > 0).all() or not (a >= 0).all():
        raise ValueError("weights > 0 and centers >= 0 must have one shape (d,)")
    root = (a.sum() - 1) / np.sum(w**-0.5)
    x, y = a - root / np.sqrt(w), w**-0.5 / np.sum(w**-0.5)
    if root <= 0 or (x < 0).any():
        raise ValueError("centers must sum to more than 1, with x* = a - ... >= 0")

    def population_fn(x: Array, y: Array) -> Array:
        return jnp.vdot(
            y, jnp.asarray(w / 2, x.dtype) * (x - jnp.asarray(a, x.dtype)) ** 2
        )

    def gap_fn(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        most = np.max(w / 2 * (x - a) ** 2)
        constant = np.sum(y * w * a**2) / 2
        return float(most - _least_quadratic(y * w, -y * w * a) - constant)

    far = np.maximum(a, np.abs(1 - a))
    return Game(
        name="max_loss",
        dim_x=len(w),
        dim_y=len(w),
        population_fn=population_fn,
        gap_fn=gap_fn,
        lipschitz=float(max(np.max(w * far), np.max(w * far**2) / 2)) + sign_scale,
        smoothness=float(max(np.max(w), np.max(w * far))),
        second_smoothness=float(np.max(w)),
        equilibrium_x=x,
        equilibrium_y=y,
        value=float(root**2 / 2),
        sign_scale=sign_scale,
    )


def quadratic_game(
    dim_x: int = 4, dim_y: int = 5, *, seed: int = 0, sign_scale: float = 0.5
) -> Game:
    r"""Builds a random game with curvature of its own for each coordinate.

    .. math:: F(x,y) = \tfrac12\textstyle\sum_ip_ix_i^2 + x^\top Ay
      - \tfrac12\sum_jq_jy_j^2 + \langle b,x\rangle + \langle c,y\rangle

    with p, q uniform in [.5, 1], A in [-1, 1]; the equilibrium is drawn (Dirichlet) and
    :math:`b=-p x^*-Ay^*`, :math:`c=qy^*-A^\top x^*` make it one.

    Args:
      dim_x: number of coordinates of x.
      dim_y: number of coordinates of y.
      seed: of the game.
      sign_scale: s >= 0.
    """
    validate.integer(dim_x=dim_x, dim_y=dim_y)
    rng = np.random.default_rng(seed)
    p, q = rng.uniform(0.5, 1, dim_x), rng.uniform(0.5, 1, dim_y)
    a = rng.uniform(-1, 1, (dim_x, dim_y))
    best_x, best_y = rng.dirichlet(np.full(dim_x, 3)), rng.dirichlet(np.full(dim_y, 3))
    b, c = -p * best_x - a @ best_y, q * best_y - a.T @ best_x

    def population_fn(x: Array, y: Array) -> Array:
        return _quadratic(*(jnp.asarray(v, x.dtype) for v in (p, q, a, b, c)), x, y)

    def gap_fn(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        least = _least_quadratic(p, a @ y + b) - np.sum(q * y**2) / 2 + c @ y
        most = -_least_quadratic(q, -(a.T @ x + c)) + np.sum(p * x**2) / 2 + b @ x
        return float(most - least)

    # A partial derivative is monotone in its own coordinate and linear in the others'.
    down = np.maximum(np.abs(p + a.max(1) + b), np.abs(a.min(1) + b))
    up = np.maximum(np.abs(a.max(0) + c), np.abs(a.min(0) - q + c))
    return Game(
        name="quadratic_game",
        dim_x=dim_x,
        dim_y=dim_y,
        population_fn=population_fn,
        gap_fn=gap_fn,
        lipschitz=float(max(down.max(), up.max())) + sign_scale,
        smoothness=float(max(p.max(), q.max(), np.abs(a).max())),
        second_smoothness=0.0,
        equilibrium_x=best_x,
        equilibrium_y=best_y,
        value=float(_quadratic(p, q, a, b, c, best_x, best_y)),
        sign_scale=sign_scale,
    )


def _bilinear(
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


def _quadratic(*parts: Any) -> Any:
    p, q, a, b, c, x, y = parts
    return (p * x) @ x / 2 + x @ (a @ y) - (q * y) @ y / 2 + b @ x + c @ y


def _least_quadratic(curvature: np.ndarray, slope: np.ndarray) -> float:
    r"""Returns the least :math:`\frac12\sum c_iv_i^2+b_iv_i` on the simplex, c >= 0.

    A coordinate is :math:`v_i=\max(0,-b_i-\nu)/c_i` for the multiplier at which they sum to
    1; one without curvature takes what is left when the multiplier reaches its -b_i.
    """
    flat = curvature <= 0
    floor = np.max(-slope[flat], initial=-np.inf)
    c, b = curvature[~flat], slope[~flat]
    order = np.argsort(b)
    # With the first k of them above zero, they sum to 1 at this multiplier:
    heights, widths = np.cumsum(-b[order] / c[order]), np.cumsum(1 / c[order])
    multipliers = (heights - 1) / widths
    multiplier = max(np.max(multipliers, initial=-np.inf), floor)
    v = np.maximum(0, -b - multiplier) / c
    value = np.sum(c * v**2) / 2 + b @ v
    if flat.any():
        value -= floor * (1 - v.sum())
    return float(value)


def signs(rng: np.random.Generator, num_examples: int, dim: int) -> np.ndarray:
    """Draws independent uniform signs, int8 (num_examples, dim)."""
    validate.integer(num_examples=num_examples)
    size = num_examples * dim
    bits = np.unpackbits(np.frombuffer(rng.bytes(-(-size // 8)), np.uint8))[:size]
    return (2 * bits.astype(np.int8) - 1).reshape(num_examples, dim)
