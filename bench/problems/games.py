r"""Saddle-point problems beside :func:`jaxdp.models.rock_paper_scissors`, of its class.

===========================  ==========================================================
:func:`two_by_two`           no player's equilibrium is uniform
:func:`diagonal_game`        the maximiser picks a coordinate of x, times its cost
:func:`max_loss`             the largest of d quadratic losses, each of one coordinate
:func:`quadratic_game`       strongly convex-concave, equilibrium in the interior
===========================  ==========================================================
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.models.games import Game, bilinear

Array = jax.Array


def two_by_two(*, sign_scale: float = 0.5) -> Game:
    r"""A = (3, -1; -1, 1)/3: both play (1/3, 2/3), and the value is 1/9."""
    mixed = np.array([1, 2]) / 3
    a = np.array([[3.0, -1.0], [-1.0, 1.0]]) / 3
    return bilinear("two_by_two", a, mixed, mixed, sign_scale)


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
    return bilinear("diagonal_game", np.diag(c), mixed, mixed, sign_scale)


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
