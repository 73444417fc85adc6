r"""Duality gap of a pair of points in a convex-concave problem.

.. math:: \mathrm{Gap}(x, y) = \max_{w\in\mathcal Y}F(x, w) - \min_{v\in\mathcal X}F(v, y)
  \ge 0

for F convex in x and concave in y, both on polytopes given by their vertices
(:mod:`jaxdp.kernels.polytope`; the simplex unless another is named).

Measure the expected F, or that of public records: it is what the theorems bound. The gap on
the training records is neither that nor private; :mod:`jaxdp.saddle.private_gap` releases
a bound on it.

References:
  Gonzalez, Guzman, Paquette (arXiv 2403.02912), 2024; Tseng, On accelerated proximal
  gradient methods for convex-concave optimization, 2008; Jaggi, Revisiting Frank-Wolfe,
  2013 (the certificate).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
      num_steps: of the solver, over both players.
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


def _floating(name: str, value: Any) -> jax.Array:
    if jnp.ndim(value) != 1 or not jnp.size(value):
        raise ValueError(
            f"{name} must have shape (d,), d >= 1; got shape {jnp.shape(value)}"
        )
    return jnp.asarray(value, jnp.result_type(value, jnp.float32))


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

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> game = jnp.array([[0.0, 1.0], [1.0, 0.0]])
      >>> def value_fn(x, y):
      ...     return x @ game @ y
      >>> even = jnp.array([0.5, 0.5])
      >>> gap = jaxdp.metrics.duality_gap(value_fn, even, even)
      >>> round(gap.value, 3), gap.error < 1e-3
      (0.0, True)
    """
    x, y = _floating("x", x), _floating("y", y)
    over_x = _domain("domain_x", domain_x, len(x))
    over_y = _domain("domain_y", domain_y, len(y))
    validate.positive(tolerance=tolerance)
    validate.integer(max_steps=max_steps)
    *found, steps, more = ends(value_fn, x, y, over_x, over_y, tolerance, max_steps)
    low, high, below, above = map(float, found)
    if not all(map(math.isfinite, (low, high, below, above))):
        raise ValueError(
            "value_fn must be finite, with a finite gradient, on its domain"
        )
    # max F(x, .) lies in [-above, -below].
    lower = max(-above - high, 0.0)
    return Interval(lower, max(-below - low, lower), int(steps) + int(more))


def ends(
    value_fn: Callable[[Any, Any], Any],
    x: jax.Array,
    y: jax.Array,
    over_x: Any,
    over_y: Any,
    tolerance: float,
    max_steps: int,
) -> tuple[jax.Array, ...]:
    """Bounds the two values whose difference is the gap; may be traced.

    Arguments are those of :func:`duality_gap`, unchecked, and polytopes.

    Returns:
      Bounds from below and above on the least F(., y), the same for the least -F(x, .),
      and the steps that each took.
    """
    limits = tolerance, max_steps
    low, high, steps = _minimize(value_fn, over_x, "x", x.dtype, y, *limits)
    below, above, more = _minimize(value_fn, over_y, "y", y.dtype, x, *limits)
    return low, high, below, above, steps, more


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
    """Bounds the least value of one player's problem: of -F if it is y's.

    By accelerated projected gradients with restarts. Returns the bounds and the steps.
    """

    def objective(weights: jax.Array) -> jax.Array:
        point = domain.point(weights)
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
