r"""Smoothing of nonsmooth losses in few dimensions, with proven errors.

The Moreau envelope and the Lasry-Lions smoothing of an L-Lipschitz h are

.. math:: M_\lambda h(x)=\min_y\Big[h(y)+\frac{\|y-x\|^2}{2\lambda}\Big],\qquad
   \tilde h_\lambda(x)=\max_z\min_y\Big[h(y)+\frac{\|y-z\|^2}{4\lambda}
   -\frac{\|z-x\|^2}{2\lambda}\Big].

:math:`\tilde h_\lambda` is differentiable for every h, L-Lipschitz with a
:math:`1/\lambda`-Lipschitz gradient :math:`(z^*-x)/\lambda`,
:math:`0\le h-\tilde h_\lambda\le L^2\lambda`, and has the minimisers of h. Where its
gradient is at most beta, x is :math:`(3\lambda L,\beta)`-Goldstein stationary for h.

* ``weak_convexity=w``: :math:`h+\frac w2\|\cdot\|^2` is convex. For :math:`2\lambda w\le1`
  both are :math:`M_\lambda h`, since :math:`-M_\lambda(-M_\lambda f)=f` for its f. Cutting
  planes take 9, 13 and 18 evaluations to 1e-6 in 2, 5 and 10 dimensions.
* ``lipschitz=L``: branch and bound by values alone, exponential in d. At
  :math:`\lambda L^2=1/2` medians are 77 to 1e-6 (d = 1), 25983 to 1e-3 (d = 2) and 77703
  to 1e-2 (d = 3; ``bench/envelopes.py``).

The bounds rest on the asserted constants, which are checked no further than a search
happens to see: read ``gap`` and ``gradient_error``. Host side, float64; not private.

References:
  Lasry and Lions, 1986; Kelley, 1960; appendix B of Kornowski, Liu and Talwar, `Improved
  sample complexity <https://arxiv.org/abs/2410.05880>`_, 2025, corrected: its (19) has h of
  the outer variable, and Fact B.2 has L for L^2 and L / lambda for 1 / lambda.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.metrics.goldstein import least_on_simplex

MAX_DIM, MAX_RECORDS = 10, 200
_ROUNDING = 2.0**-48  # of what is summed: by so much the bounds are widened
_CONTRADICTION = 1e-12  # likewise: by so much a wrong constant must show

#: (whether gradients are read, offsets from x (k, d)) -> values (k,), gradients (k, d).
Evaluate = Callable[[bool, np.ndarray], tuple[np.ndarray, np.ndarray]]
Stop = tuple[float, int]  # the gap, and the number of evaluations


class Smoothed(NamedTuple):
    """Value and gradient of a smoothed function at a point, with error bounds.

    Attributes:
      lower: at most the value.
      upper: at least the value.
      gradient: shape (d,), float64.
      gradient_error: at least the Euclidean distance from ``gradient`` to the gradient.
      num_values: evaluations of the function.
    """

    lower: float
    upper: float
    gradient: np.ndarray
    gradient_error: float
    num_values: int

    @property
    def value(self) -> float:
        """The middle of the bounds, which is off by at most half of :attr:`gap`."""
        return (self.lower + self.upper) / 2

    @property
    def gap(self) -> float:
        """``upper - lower``."""
        return self.upper - self.lower


def moreau_envelope(
    value_fn: Callable[[Any], Any],
    x: Any,
    smoothing: float,
    *,
    weak_convexity: float | None = None,
    lipschitz: float | None = None,
    tolerance: float = 1e-8,
    max_evaluations: int = 100_000,
) -> Smoothed:
    """Computes the Moreau envelope of h at x, and its gradient where it has one.

    Args:
      value_fn: h: a float64 vector (d,) -> a float64 number, traceable by JAX.
      x: shape (d,), d <= 10.
      smoothing: lambda > 0, in units of x^2 / h.
      weak_convexity: w >= 0, a constant of h that the caller asserts.
      lipschitz: L, another one: needed unless 2 lambda w <= 1 (Moreau: lambda w < 1), and
        else not read.
      tolerance: gap to stop at.
      max_evaluations: the most values of h.

    Returns:
      A :class:`Smoothed`. With ``lipschitz``, the error is infinite or large where several
      minimisers are near each other in value: there the envelope may have no gradient.

    Raises:
      TypeError, ValueError: a number of another type or out of its range, values that are
        not finite float64, a missing constant, or one that the values contradict.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import jaxdp
      >>> def h(y):  # The envelope of abs is Huber's function.
      ...     return jnp.abs(y[0])
      >>> x = np.array([2.0])
      >>> smooth = jaxdp.models.moreau_envelope(h, x, 1.0, weak_convexity=0.0)
      >>> round(smooth.value, 6), smooth.gradient.round(6).tolist()
      (1.5, [1.0])
    """
    return _smoothed(
        value_fn,
        None,
        x,
        smoothing,
        False,
        weak_convexity=weak_convexity,
        lipschitz=lipschitz,
        tolerance=tolerance,
        max_evaluations=max_evaluations,
    )


def lasry_lions(
    value_fn: Callable[[Any], Any],
    x: Any,
    smoothing: float,
    *,
    weak_convexity: float | None = None,
    lipschitz: float | None = None,
    tolerance: float = 1e-8,
    max_evaluations: int = 100_000,
) -> Smoothed:
    """Computes the Lasry-Lions smoothing of h at x, and its gradient.

    Arguments, result and errors are those of :func:`moreau_envelope`.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import jaxdp
      >>> def h(y):  # Convex: Lasry-Lions is the Moreau envelope.
      ...     return jnp.abs(y[0])
      >>> smooth = jaxdp.models.lasry_lions(h, np.array([2.0]), 0.5, weak_convexity=0.0)
      >>> round(smooth.value, 6), smooth.gap < 1e-6
      (1.75, True)
    """
    return _smoothed(
        value_fn,
        None,
        x,
        smoothing,
        True,
        weak_convexity=weak_convexity,
        lipschitz=lipschitz,
        tolerance=tolerance,
        max_evaluations=max_evaluations,
    )


def lasry_lions_mean(
    value_fn: Callable[[Any, Any], Any],
    x: Any,
    data: Any,
    smoothing: float,
    *,
    weak_convexity: float | None = None,
    lipschitz: float | None = None,
    tolerance: float = 1e-8,
    max_evaluations: int = 100_000,
) -> Smoothed:
    r"""Computes the mean over records of the Lasry-Lions smoothings of their losses.

    Not the smoothing of the mean, whose minimisers are others. Where its gradient is at
    most beta, the mean of the records' Goldstein subdifferentials at radius
    :math:`3\lambda L` holds a vector of norm at most beta:
    :func:`jaxdp.metrics.componentwise_goldstein_norm`.

    Args:
      value_fn: (x, batch) -> losses (B,), as everywhere in the library.
      x: as in :func:`moreau_envelope`, as are errors.
      data: pytree with leading axis n <= 200, the records.
      smoothing: lambda.
      weak_convexity: w, of every record's loss.
      lipschitz: L, of every record's loss.
      tolerance: gap to stop at, for each record.
      max_evaluations: the most values of each record's loss.

    Returns:
      Means of values, bounds, gradients and errors; the total of the evaluations.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import jaxdp
      >>> def losses(x, batch):
      ...     return jnp.abs(batch - x[0])
      >>> smooth = jaxdp.models.lasry_lions_mean(
      ...     losses, np.zeros(1), np.array([1.0, -2.0]), 0.5, weak_convexity=0.0
      ... )
      >>> round(smooth.value, 6), smooth.gradient.round(6).tolist()
      (1.25, [0.0])
    """
    n = num_rows(data, "data")
    if not 1 <= n <= MAX_RECORDS:
        raise ValueError(f"data must have 1 to {MAX_RECORDS} records, got {n}")
    found = []
    for i in range(n):
        record = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i : i + 1], data)
        one = _smoothed(
            value_fn,
            record,
            x,
            smoothing,
            True,
            weak_convexity=weak_convexity,
            lipschitz=lipschitz,
            tolerance=tolerance,
            max_evaluations=max_evaluations,
        )
        found.append(one)
    *means, counts = (np.array(column) for column in zip(*found, strict=True))
    lower, upper, gradient, error = (column.mean(axis=0) for column in means)
    total = int(counts.sum())
    return Smoothed(float(lower), float(upper), gradient, float(error), total)


def _smoothed(
    value_fn: Callable[..., Any],
    record: Any,
    x: Any,
    smoothing: float,
    double: bool,
    *,
    weak_convexity: float | None = None,
    lipschitz: float | None = None,
    tolerance: float = 1e-8,
    max_evaluations: int = 100_000,
) -> Smoothed:
    """Runs the search that the asserted constants allow."""
    validate.positive(smoothing=smoothing, tolerance=tolerance)
    validate.integer(max_evaluations=max_evaluations)
    if lipschitz is not None:
        validate.positive(lipschitz=lipschitz)
    x, w = np.asarray(x, np.float64), weak_convexity
    if x.ndim != 1 or not 1 <= len(x) <= MAX_DIM or not np.isfinite(x).all():
        raise ValueError(
            f"x must be finite, of shape (d,), 1 <= d <= {MAX_DIM}; got {x}"
        )
    stop, bound = (tolerance, max_evaluations), (0.5 if double else 1.0) / smoothing
    evaluated = functools.partial(_evaluated, value_fn, record, x)
    if w is not None:
        validate.non_negative(weak_convexity=w)
        if w < bound or (double and w == bound):
            return _cutting_planes(evaluated, len(x), smoothing, w, stop)
    if lipschitz is None:
        raise ValueError(
            f"lipschitz must be given unless weak_convexity is at most {bound:g}, got "
            f"weak_convexity={w!r}"
        )
    return _branch_and_bound(evaluated, len(x), smoothing, lipschitz, stop, double)


def _evaluated(
    value_fn: Callable[..., Any],
    record: Any,
    x: np.ndarray,
    differentiate: bool,
    offsets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes values (k,) and, if asked for, gradients (k, d) at ``x + offsets``."""
    size = 4 ** math.ceil(math.log(len(offsets), 4))  # few shapes: few programs
    points = np.resize(x + offsets, (size, len(x)))
    with jax.enable_x64(True):
        found = _compiled(value_fn, differentiate, jnp.asarray(points), record)
    values, gradients = (np.asarray(array)[: len(offsets)] for array in found)
    if not np.isfinite(values).all() or not np.isfinite(gradients).all():
        raise ValueError(
            "value_fn must return finite values; got one that is not, or a gradient"
        )
    return values, gradients


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(
    value_fn: Callable[..., Any], differentiate: bool, points: jax.Array, record: Any
) -> Any:
    def value(y: jax.Array) -> jax.Array:
        out = jnp.asarray(value_fn(y) if record is None else value_fn(y, record))
        if out.shape != (() if record is None else (1,)) or out.dtype != jnp.float64:
            raise ValueError(
                "value_fn must give one float64 number a point (a record) for float64 "
                f"points; got {out.dtype} of shape {out.shape}"
            )
        return out.reshape(())

    fn = jax.value_and_grad(value) if differentiate else lambda y: (value(y), y)
    return jax.lax.map(fn, points, batch_size=min(len(points), 4096))


def _cutting_planes(
    evaluate: Evaluate, dim: int, smoothing: float, weak_convexity: float, stop: Stop
) -> Smoothed:
    r"""Minimises h(x + u) + ||u||^2 / (2 lambda) for weakly convex h, lambda w < 1.

    A subgradient bounds h from below by a quadratic of curvature -w, and so the sum by one
    of curvature :math:`\mu=1/\lambda-w`. The least value of their maximum is a quadratic
    program over the simplex, any point of which is a lower bound.
    """
    modulus, (tolerance, most) = 1 / smoothing - weak_convexity, stop
    slopes, constants = np.empty((0, dim)), np.empty(0)
    point = best = np.zeros(dim)
    reference, lower, upper = math.nan, -math.inf, math.inf
    while True:
        (value,), (gradient,) = evaluate(True, point[None])
        reference = reference if len(slopes) else value
        total = value - reference + point @ point / (2 * smoothing)
        if total < upper:
            upper, best = total, point
        scale = abs(reference) + abs(total) + np.max(np.abs(constants), initial=0)
        _check("weak_convexity", weak_convexity, float(lower - upper), float(scale))
        constant = value - reference - (gradient + weak_convexity / 2 * point) @ point
        slopes = np.vstack([slopes, gradient + weak_convexity * point])
        constants = np.append(constants, constant)
        weights = least_on_simplex(slopes, -modulus * constants)
        point = -(weights @ slopes) / modulus
        found = weights @ constants - modulus / 2 * point @ point
        # A cut that is violated raises the bound: unless rounding ends the search.
        stuck, lower = found <= lower, max(lower, found)
        if upper - lower <= tolerance or stuck or len(slopes) >= most:
            break
    slack = _ROUNDING * scale
    gap = max(upper - lower, 0.0) + 2 * slack
    error = math.sqrt(2 * gap / modulus) / smoothing
    low = float(reference + lower - slack)
    return Smoothed(low, low + float(gap), -best / smoothing, error, len(slopes))


def _branch_and_bound(
    evaluate: Evaluate,
    dim: int,
    smoothing: float,
    lipschitz: float,
    stop: Stop,
    double: bool,
) -> Smoothed:
    r"""Computes either smoothing of any Lipschitz h.

    Boxes cover the ball that all minimisers lie in; those with the least lower bounds are
    cut in three. If ``double``, z follows the points evaluated so far: with :math:`h_i` at
    :math:`y_i`, :math:`\max_z\min_i[h_i+\|y_i-z\|^2/4\lambda-\|z-x\|^2/2\lambda]` bounds
    the value from above, a quadratic program over the simplex, and any z from below.
    """
    tolerance, most = stop
    width = (2 if double else 1) * smoothing  # of the quadratic ||y - z||^2 / (2 width)
    reach = (3 if double else 1) * smoothing * lipschitz
    centers, halves = np.zeros((1, dim)), np.full((1, dim), reach)
    reference = evaluate(False, centers)[0][0]
    values, z, best, lower = np.zeros(1), np.zeros(dim), np.zeros(dim), -math.inf
    while True:
        totals = values + np.sum(centers**2, axis=1) / (2 * width)
        scale = abs(reference) + np.max(np.abs(totals))
        upper = np.min(totals)
        if double:
            weights = least_on_simplex(centers, width * totals)
            z = -(weights @ centers)
            upper = weights @ totals + z @ z / (2 * width)
        else:
            best = centers[np.argmin(totals)]
        bounds = values + _least_on_boxes(centers - z, halves, width, lipschitz)
        bounds -= z @ z / (2 * smoothing)
        low = np.min(bounds)
        if low > lower:
            lower, best = low, (z if double else best)
        if upper - lower <= tolerance or len(values) + 2 > most:
            break
        # The lower half of the gap, but for few rounds no less than a sixteenth of the
        # boxes: those below upper - tolerance are all cut in the end.
        num = np.sum(bounds <= low + (upper - low) / 2)
        num = max(num, min(len(values) // 16, np.sum(bounds < upper - tolerance)))
        chosen = np.argsort(bounds, kind="stable")[:num]
        chosen = chosen[: (most - len(values)) // 2]
        axes = np.argmax(halves[chosen], axis=1)
        halves[chosen, axes] /= 3
        steps = np.zeros((len(chosen), dim))
        steps[np.arange(len(chosen)), axes] = 2 * halves[chosen, axes]
        steps, chosen = np.concatenate([steps, -steps]), np.tile(chosen, 2)
        new = evaluate(False, centers[chosen] + steps)[0] - reference
        rise = np.abs(new - values[chosen]) - lipschitz * np.linalg.norm(steps, axis=1)
        _check("lipschitz", lipschitz, rise.max(), scale)
        centers = np.concatenate([centers, centers[chosen] + steps])
        halves = np.concatenate([halves, halves[chosen]])
        values = np.concatenate([values, new])
    slack = _ROUNDING * scale
    gap = float(max(upper - lower, 0.0)) + 2 * slack
    if double:
        best, distance = -best, math.sqrt(2 * width * gap)
    else:  # every minimiser lies in one of the boxes that are left
        left = bounds <= upper + slack
        corners = np.abs(centers[left] - best) + halves[left]
        distance = float(np.max(np.linalg.norm(corners, axis=1)))
    low = float(reference + lower - slack)
    error = distance / smoothing
    return Smoothed(low, low + float(gap), -best / smoothing, error, len(values))


def _least_on_boxes(
    offsets: np.ndarray, halves: np.ndarray, width: float, lipschitz: float
) -> np.ndarray:
    r"""Bounds h - h(c) + ||y - z||^2 / (2 width) on boxes around c, offsets c - z.

    With R the distance to a corner, :math:`-L\|t\|\ge-\frac L2(R+\|t\|^2/R)` there: a
    separable quadratic, and tight at the corners.
    """
    radius = np.linalg.norm(halves, axis=1)
    slopes = offsets / width
    curvature = np.broadcast_to((1 / width - lipschitz / radius)[:, None], slopes.shape)
    at_end = curvature * halves**2 / 2 - np.abs(slopes) * halves
    inside = np.abs(slopes) < curvature * halves
    least = np.where(
        inside, -(slopes**2) / (2 * np.where(inside, curvature, 1)), at_end
    )
    return np.sum(least + offsets**2 / (2 * width), axis=1) - lipschitz * radius / 2


def _check(name: str, value: float, excess: float, scale: float) -> None:
    """Raises if a bound from a constant lies above the function: the constant is wrong."""
    if excess > _CONTRADICTION * scale:
        raise ValueError(
            f"{name} must be that of value_fn; {value!r} is too small: a bound that "
            f"follows from it is off by {excess:.2g}"
        )


class LasryLionsSettings(NamedTuple):
    """Settings of Theorem B.5, with hidden constants and logarithms set to 1."""

    smoothing: float  # lambda, of every record's loss
    smoothness: float  # 1 / lambda, of the smoothed losses
    num_examples: float  # records that suffice


def lasry_lions_settings(
    *,
    dim: int,
    epsilon: float,
    lipschitz: float,
    goldstein_radius: float,
    goldstein_norm: float,
    distance: float,
) -> LasryLionsSettings:
    r"""Computes the settings of Theorem B.5, corrected; numbers only.

    .. math:: \lambda=\frac{\alpha}{3L},\qquad n=\frac{R^{1/3}Ld^{2/3}}{\varepsilon
      \alpha^{1/3}\beta}+\frac{L\sqrt d}{\varepsilon\beta}

    L bounds every record's loss; ``goldstein_radius`` is alpha, ``goldstein_norm`` beta,
    component by component; ``distance`` R, from x0 to the minimisers of the mean of the
    *smoothed* losses. The theorem hides log(1 / delta). The private solver of the smoothed
    losses takes exponential time and is not here. The paper prints :math:`L^{4/3}` for L,
    from a smoothness of :math:`L/\lambda`, and drops the second term.

    Example:
      >>> import jaxdp
      >>> settings = jaxdp.models.lasry_lions_settings(
      ...     dim=2, epsilon=1.0, lipschitz=1.0, goldstein_radius=0.3,
      ...     goldstein_norm=0.1, distance=1.0,
      ... )
      >>> round(settings.smoothing, 4), settings.num_examples < 100
      (0.1, True)
    """
    validate.integer(dim=dim)
    validate.positive(epsilon=epsilon, goldstein_norm=goldstein_norm, distance=distance)
    validate.positive(goldstein_radius=goldstein_radius, lipschitz=lipschitz)
    leading = (distance * dim**2 / goldstein_radius) ** (1 / 3) + math.sqrt(dim)
    return LasryLionsSettings(
        smoothing=goldstein_radius / (3 * lipschitz),
        smoothness=3 * lipschitz / goldstein_radius,
        num_examples=lipschitz * leading / (epsilon * goldstein_norm),
    )
