r"""Duality gap of a pair of points in a convex-concave problem.

.. math:: \mathrm{Gap}(x, y) = \max_{w\in\mathcal Y}F(x, w) - \min_{v\in\mathcal X}F(v, y)
  \ge 0

for F convex in x and concave in y, both on polytopes given by their vertices
(:mod:`jaxdp.kernels.polytope`; the simplex unless another is named).

========================  =============================================================
:func:`bilinear_gap`      exact, from the matrix of the game
:func:`duality_gap`       any F: a certified interval. One step of it is exact wherever a
                          player's problem is linear, as a mixture of losses is in y
:func:`linear_gap_bound`  any F: an upper bound from one gradient; equal if F is bilinear
:func:`excess_risk`       x alone: F(x) minus the least F, as an interval
========================  =============================================================

Measure the expected F, or that of public records: it is what the theorems bound. The gap on
the training records is neither that nor private; :mod:`jaxdp.saddle.private_gap` releases
a bound on it.

References:
  Gonzalez, Guzman and Paquette, `Mirror descent algorithms with nearly
  dimension-independent rates for differentially-private stochastic saddle-point problems
  <https://arxiv.org/abs/2403.02912>`_, 2024; Tseng, On accelerated proximal gradient
  methods for convex-concave optimization, 2008; Jaggi, Revisiting Frank-Wolfe, 2013 (the
  certificate).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import validate
from jaxdp.kernels import polytope

#: A polytope, a matrix of its vertices (m, p), or None for the simplex.
Domain = Any


class Interval(NamedTuple):
    """A number that is certain to lie between two others, but for rounding.

    Attributes:
      lower: at most the number.
      upper: at least the number.
      num_steps: of the solver, over both players; 0 where a formula gave it.
    """

    lower: float
    upper: float
    num_steps: int

    @property
    def value(self) -> float:
        """The middle, which is off by at most :attr:`error`."""
        return (self.lower + self.upper) / 2

    @property
    def error(self) -> float:
        """Half of the width."""
        return (self.upper - self.lower) / 2


def _domain(name: str, domain: Domain, dim: int) -> Any:
    """Returns the domain as a polytope whose points have ``dim`` coordinates."""
    if domain is None:
        return polytope.Simplex(dim)
    if not hasattr(domain, "vertex_gradient"):
        domain = polytope.Polytope(domain)
    if domain.dim != dim:
        raise ValueError(
            f"{name} must be a polytope in {dim} dimensions, got one in {domain.dim}"
        )
    return domain


def _vector(name: str, value: Any) -> None:
    if jnp.ndim(value) != 1 or not jnp.size(value):
        raise ValueError(
            f"{name} must have shape (d,), d >= 1; got shape {jnp.shape(value)}"
        )


def _floating(name: str, value: Any) -> jax.Array:
    _vector(name, value)
    return jnp.asarray(value, jnp.result_type(value, jnp.float32))


def bilinear_gap(
    x: Any,
    y: Any,
    matrix: Any,
    *,
    linear_x: Any = None,
    linear_y: Any = None,
    domain_x: Domain = None,
    domain_y: Domain = None,
) -> Interval:
    r"""Computes the exact duality gap of a bilinear F.

    .. math:: F(x, y) = x^\top A y + \langle b,x\rangle + \langle c,y\rangle, \quad
      \mathrm{Gap} = \langle b,x\rangle + \max_j\langle A^\top x+c, w_j\rangle
      - \langle c,y\rangle - \min_i\langle Ay+b, v_i\rangle

    Args:
      x: point (p,) of its polytope.
      y: point (q,) of its polytope.
      matrix: A, (p, q); x minimises.
      linear_x: b (p,); None is zero.
      linear_y: c (q,); None is zero.
      domain_x: polytope, or matrix of vertices; None is the simplex.
      domain_y: the same for y.

    Returns:
      An :class:`Interval` without width, computed in float64 on the host (the vertices
      of a polytope in its own dtype).

    Raises:
      ValueError: shapes that do not fit one another.
    """
    a, b, c, p, q = (
        np.asarray(0.0 if v is None else v, np.float64)
        for v in (matrix, linear_x, linear_y, x, y)
    )
    _vector("x", p)
    _vector("y", q)
    if a.shape != (len(p), len(q)):
        raise ValueError(f"matrix must have shape {(len(p), len(q))}, got {a.shape}")
    for name, v, size in (("linear_x", b, len(p)), ("linear_y", c, len(q))):
        if v.shape not in ((), (size,)):
            raise ValueError(f"{name} must have shape ({size},), got {v.shape}")
    down, up = a @ q + b, a.T @ p + c
    least = _on_vertices(_domain("domain_x", domain_x, len(p)), down).min()
    most = _on_vertices(_domain("domain_y", domain_y, len(q)), up).max()
    gap = float(np.sum(b * p) + most - np.sum(c * q) - least)
    return Interval(gap, gap, 0)


def _on_vertices(domain: Any, gradient: np.ndarray) -> np.ndarray:
    if isinstance(domain, polytope.Simplex):
        return gradient  # In float64, which JAX would round.
    return np.asarray(domain.vertex_gradient(jnp.asarray(gradient)), np.float64)


def duality_gap(
    value_fn: Callable[[Any, Any], Any],
    x: Any,
    y: Any,
    *,
    domain_x: Domain = None,
    domain_y: Domain = None,
    tolerance: float = 1e-4,
    max_steps: int = 5000,
) -> Interval:
    r"""Bounds the duality gap of any convex-concave function from both sides, certified.

    Both inner problems are solved by accelerated projected gradient steps on the weights
    of the vertices, and bounded from the other side by Frank and Wolfe's certificate
    :math:`\min\varphi\ge\varphi(v)-\langle\nabla\varphi(v),v\rangle+\min_i\langle
    \nabla\varphi(v),v_i\rangle`. A player whose problem is linear needs one step: so the
    game is solved exactly in y if F is a mixture of losses, with weights y.

    Args:
      value_fn: (x, y) -> F, shape=(), differentiable; convex in x and concave in y.
        Hashable, and traceable by JAX: the same object is compiled once.
      x: point (p,) of its polytope, floating.
      y: point (q,) of its polytope, floating.
      domain_x: polytope, or matrix of vertices; None is the simplex.
      domain_y: the same for y.
      tolerance: the width of each player's interval to stop at, in units of F.
      max_steps: of each player; where they end first, the width says so.

    Returns:
      An :class:`Interval`; certain but for the rounding of F and its gradients in the
      dtype of x and y (float64 under x64).

    Raises:
      ValueError: an argument of another shape, or out of its range.
    """
    x, y = _floating("x", x), _floating("y", y)
    over_x = _domain("domain_x", domain_x, len(x))
    over_y = _domain("domain_y", domain_y, len(y))
    limits = tolerance, max_steps
    low, high, steps = _least(value_fn, over_x, x.dtype, y, *limits)
    below, above, more = _least(value_fn, over_y, y.dtype, x, *limits, player="y")
    # max F(x, .) lies in [-above, -below].
    lower = max(-above - high, 0.0)
    return Interval(lower, max(-below - low, lower), steps + more)


def excess_risk(
    value_fn: Callable[[Any], Any],
    x: Any,
    *,
    domain: Domain = None,
    tolerance: float = 1e-4,
    max_steps: int = 5000,
) -> Interval:
    """Bounds F(x) minus the least value of a convex F on a polytope from both sides.

    Args:
      value_fn: x -> F, shape=(), convex, differentiable, hashable.
      x: a point (p,) of the polytope, floating.
      domain: a polytope, or a matrix of vertices; None is the simplex.
      tolerance: the width to stop at, in units of F.
      max_steps: where they end first, the width says so.

    Returns:
      An :class:`Interval`, as :func:`duality_gap` does.
    """
    x = _floating("x", x)
    over = _domain("domain", domain, len(x))
    low, high, steps = _least(value_fn, over, x.dtype, None, tolerance, max_steps)
    reached = float(value_fn(x))
    lower = max(reached - high, 0.0)
    return Interval(lower, max(reached - low, lower), steps)


def linear_gap_bound(
    value_fn: Callable[[Any, Any], Any],
    x: Any,
    y: Any,
    *,
    domain_x: Domain = None,
    domain_y: Domain = None,
) -> float:
    r"""Bounds the duality gap from above by one gradient.

    .. math:: \langle\nabla_xF,x\rangle-\min_i\langle\nabla_xF,v_i\rangle
      +\max_j\langle\nabla_yF,w_j\rangle-\langle\nabla_yF,y\rangle

    The gap itself if F is bilinear.

    Args:
      value_fn: (x, y) -> F, as for :func:`duality_gap`.
      x: point (p,) of its polytope, floating.
      y: point (q,) of its polytope, floating.
      domain_x: polytope, or matrix of vertices; None is the simplex.
      domain_y: the same for y.
    """
    x, y = _floating("x", x), _floating("y", y)
    over_x = _domain("domain_x", domain_x, len(x))
    over_y = _domain("domain_y", domain_y, len(y))
    down, up = jax.grad(value_fn, (0, 1))(x, y)
    bound_x = jnp.vdot(down, x) - jnp.min(over_x.vertex_gradient(down))
    bound_y = jnp.max(over_y.vertex_gradient(up)) - jnp.vdot(up, y)
    return float(bound_x + bound_y)


def _least(
    value_fn: Callable[..., Any],
    domain: Any,
    dtype: Any,
    other: Any,
    tolerance: float,
    max_steps: int,
    *,
    player: str = "x",
) -> tuple[float, float, int]:
    """Bounds the least value of one player's problem: of -F if it is y's."""
    validate.positive(tolerance=tolerance)
    validate.integer(max_steps=max_steps)
    low, high, steps = _minimize(
        value_fn, domain, player, dtype, other, tolerance, max_steps
    )
    if not math.isfinite(low) or not math.isfinite(high):
        raise ValueError(
            "value_fn must be finite, with a finite gradient, on its domain"
        )
    return float(low), float(high), int(steps)


class _State(NamedTuple):
    """State of Tseng's method, whose points are mixtures of points of the simplex."""

    slow: jax.Array  # (m,)
    fast: jax.Array  # (m,)
    weight: jax.Array  # of the fast point
    curvature: jax.Array
    lower: jax.Array
    upper: jax.Array
    count: jax.Array


@functools.partial(jax.jit, static_argnames=("value_fn", "domain", "player", "dtype"))
def _minimize(
    value_fn: Callable[..., Any],
    domain: Any,
    player: str,
    dtype: Any,
    other: Any,
    tolerance: float,
    max_steps: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Minimises by accelerated projected gradients with restarts; returns the bounds."""

    def objective(weights: jax.Array) -> jax.Array:
        point = domain.point(weights)
        if other is None:
            return value_fn(point)
        return value_fn(point, other) if player == "x" else -value_fn(other, point)

    m = domain.num_vertices
    start = jnp.full(m, 1 / m, dtype)
    first, slope = jax.value_and_grad(objective)(start)
    slack = 8 * jnp.finfo(dtype).eps

    def body(s: _State) -> _State:
        middle = (1 - s.weight) * s.slow + s.weight * s.fast
        value, g = jax.value_and_grad(objective)(middle)
        lower = value - jnp.vdot(g, middle) + jnp.min(g)
        corner = objective(jax.nn.one_hot(jnp.argmin(g), m, dtype=dtype))

        def step(curvature: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            # A common shift changes nothing, and keeps what will be positive small.
            far = (g - jnp.min(g)) / (s.weight * curvature)
            fast = optax.projections.projection_simplex(s.fast - far)
            fast = fast / jnp.sum(fast)
            slow = (1 - s.weight) * s.slow + s.weight * fast
            return fast, slow, objective(slow)

        def too_flat(curvature: jax.Array) -> jax.Array:
            _, slow, reached = step(curvature)
            moved = slow - middle
            model = value + jnp.vdot(g, moved) + curvature / 2 * jnp.vdot(moved, moved)
            return reached > model + slack * (1 + jnp.abs(value))

        curvature = jax.lax.while_loop(too_flat, lambda c: 2 * c, s.curvature)
        fast, slow, reached = step(curvature)
        # Of gradients, which still tell where values are equal up to rounding.
        uphill = jnp.vdot(g, slow - s.slow) > 0
        weight = (jnp.sqrt(s.weight**4 + 4 * s.weight**2) - s.weight**2) / 2
        upper = jnp.minimum(jnp.minimum(s.upper, corner), reached)
        return _State(
            slow=slow,
            fast=jnp.where(uphill, slow, fast),
            weight=jnp.where(uphill, 1, weight).astype(dtype),
            curvature=curvature,
            lower=jnp.maximum(s.lower, lower),
            upper=upper,
            count=s.count + 1,
        )

    def unfinished(s: _State) -> jax.Array:
        return (s.upper - s.lower > tolerance) & (s.count < max_steps)

    end = jax.lax.while_loop(
        unfinished,
        body,
        _State(
            slow=start,
            fast=start,
            weight=jnp.ones((), dtype),
            curvature=1e-2 * (jnp.max(slope) - jnp.min(slope)) + slack,
            lower=jnp.array(-jnp.inf, dtype),
            upper=first,
            count=jnp.zeros((), jnp.int32),
        ),
    )
    return end.lower, end.upper, end.count
