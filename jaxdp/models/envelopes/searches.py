r"""Searches for the least value of a function plus a quadratic, with proven bounds.

A search is a generator: it yields points, shape (k, d), as offsets from x, is sent the
function's values (k,) and gradients (k, d) there, and returns a :class:`Smoothed`. Who
evaluates decides how many searches run side by side. Plain NumPy in float64; the bounds
allow for the rounding of the sums here, not for that of the function.

References:
  Kelley, The cutting-plane method for solving convex programs, 1960; Wolfe, Finding the
  nearest point in a polytope, 1976; Lasry and Lions, A remark on regularization in Hilbert
  spaces, 1986.
"""

import math
from collections.abc import Generator
from typing import NamedTuple

import numpy as np

#: Points asked for, and what is known of the function there; None: not asked for.
Search = Generator[np.ndarray, tuple[np.ndarray, np.ndarray | None], "Smoothed"]

_ROUNDING = 2.0**-48  # of what is summed: by so much the bounds are widened
_CONTRADICTION = 1e-12  # likewise: by so much a wrong constant must show


class Smoothed(NamedTuple):
    """Value and gradient of a smoothed function at a point, with error bounds.

    Attributes:
      lower: at most the value.
      upper: at least the value.
      gradient: shape (d,), float64.
      gradient_error: at least the Euclidean distance from ``gradient`` to the gradient.
      num_values: evaluations of the function.
      num_gradients: evaluations of its gradient.
    """

    lower: float
    upper: float
    gradient: np.ndarray
    gradient_error: float
    num_values: int
    num_gradients: int

    @property
    def value(self) -> float:
        """The middle of the bounds, which is off by at most half of :attr:`gap`."""
        return (self.lower + self.upper) / 2

    @property
    def gap(self) -> float:
        """``upper - lower``."""
        return self.upper - self.lower


def cutting_planes(
    dim: int,
    smoothing: float,
    weak_convexity: float,
    tolerance: float,
    max_evaluations: int,
) -> Search:
    r"""Minimises h(x + u) + ||u||^2 / (2 lambda) for weakly convex h, lambda w < 1.

    A subgradient at :math:`u_i` bounds h from below by a quadratic of curvature -w, and so
    the sum by one of curvature :math:`\mu=1/\lambda-w`, the same for every i. The least
    value of their maximum is a quadratic program over the simplex, any point of which is a
    lower bound. Its minimiser is the next point.
    """
    modulus = 1 / smoothing - weak_convexity
    points, slopes = np.empty((0, dim)), np.empty((0, dim))
    constants, weights = np.empty(0), np.empty(0)
    point = best = np.zeros(dim)
    reference, lower, upper = 0.0, -math.inf, math.inf
    while True:
        values, gradients = yield point[None]
        assert gradients is not None
        value, gradient = float(values[0]), gradients[0]
        if not len(points):
            reference = value
        value -= reference
        total = float(value + point @ point / (2 * smoothing))
        if total < upper:
            upper, best = total, point
        scale = (
            abs(reference) + abs(total) + float(np.max(np.abs(constants), initial=0))
        )
        _check("weak_convexity", weak_convexity, lower - upper, scale)
        points = np.append(points, point[None], axis=0)
        slope = gradient + weak_convexity * point
        constant = value - gradient @ point - weak_convexity / 2 * point @ point
        slopes = np.append(slopes, slope[None], axis=0)
        constants = np.append(constants, constant)
        weights = np.append(weights, 0.0 if len(weights) else 1.0)
        weights = least_on_simplex(slopes, -modulus * constants, weights)
        point = -(weights @ slopes) / modulus
        found = float(weights @ constants - modulus / 2 * point @ point)
        # A cut that is violated raises the bound: unless rounding ends the search.
        stuck, lower = found <= lower, max(lower, found)
        if upper - lower <= tolerance or stuck or len(points) >= max_evaluations:
            break
    slack = _ROUNDING * scale
    lower, upper = reference + lower - slack, reference + max(upper, lower) + slack
    distance = math.sqrt(2 * (upper - lower) / modulus)
    return Smoothed(
        lower,
        upper,
        -best / smoothing,
        distance / smoothing,
        len(points),
        len(points),
    )


def branch_and_bound(
    dim: int,
    smoothing: float,
    lipschitz: float,
    weak_convexity: float | None,
    tolerance: float,
    max_evaluations: int,
    *,
    double: bool,
) -> Search:
    r"""Computes the Moreau envelope, or the Lasry-Lions smoothing, of any Lipschitz h.

    Boxes cover the ball that all minimisers lie in. On each of them, h is bounded from its
    value at the centre, and the sum with a quadratic by a quadratic that is separable;
    those with the lower bounds are cut in three. If ``double``, the outer variable z
    follows the points evaluated so far: with :math:`h_i` at :math:`y_i`,

    .. math:: \tilde h_\lambda(x)\le\max_z\min_i\Big[h_i+\frac{\|y_i-z\|^2}{4\lambda}
      -\frac{\|z-x\|^2}{2\lambda}\Big]

    is a quadratic program over the simplex, and any z gives a lower bound. One tree of
    boxes serves all z. (The inner minimum may be restricted to a ball around x that holds
    the minimisers at the best z: the saddle point stays one.)
    """
    width = (2 if double else 1) * smoothing  # of the quadratic ||y - z||^2 / (2 width)
    reach = (3 if double else 1) * smoothing * lipschitz
    centers, halves = np.zeros((1, dim)), np.full((1, dim), reach)
    values, gradients = yield centers
    reference = float(values[0])
    values = values - reference
    weights, z = np.ones(1), np.zeros(dim)
    lower, best = -math.inf, z
    while True:
        totals = values + np.sum(centers**2, axis=1) / (2 * width)
        scale = abs(reference) + float(np.max(np.abs(totals)))
        if double:
            weights = least_on_simplex(centers, width * totals, weights)
            z = -(weights @ centers)
            upper = float(weights @ totals + z @ z / (2 * width))
        else:
            upper, best = float(np.min(totals)), centers[np.argmin(totals)]
        bounds = _lipschitz_bounds(centers - z, halves, width, lipschitz)
        if gradients is not None and weak_convexity is not None:
            sharper = _weakly_convex_bounds(
                centers - z, halves, width, gradients, weak_convexity
            )
            bounds = np.maximum(bounds, sharper)
        bounds += values
        if double:
            bounds -= z @ z / (2 * smoothing)
        low = float(np.min(bounds))
        if low > lower:
            lower, best = low, (z if double else best)
        if upper - lower <= tolerance or len(values) + 2 > max_evaluations:
            break
        # The lower half of the gap, but for few rounds no less than a sixteenth of the
        # boxes: those below upper - tolerance are all cut in the end.
        num = np.sum(bounds <= low + (upper - low) / 2)
        num = max(num, min(len(values) // 16, np.sum(bounds < upper - tolerance)))
        chosen = np.argsort(bounds, kind="stable")[:num]
        chosen = chosen[: (max_evaluations - len(values)) // 2]
        axes = np.argmax(halves[chosen], axis=1)
        halves[chosen, axes] /= 3
        steps = np.zeros((len(chosen), dim))
        steps[np.arange(len(chosen)), axes] = 2 * halves[chosen, axes]
        steps = np.concatenate([steps, -steps])
        chosen = np.tile(chosen, 2)
        new, slopes = yield centers[chosen] + steps
        new = new - reference
        length = np.linalg.norm(steps, axis=1)
        excess = np.abs(new - values[chosen]) - lipschitz * length
        _check("lipschitz", lipschitz, excess.max(), scale)
        if gradients is not None and slopes is not None and weak_convexity is not None:
            linear = np.sum(gradients[chosen] * steps, axis=1) - new + values[chosen]
            excess = linear - weak_convexity / 2 * length**2
            _check("weak_convexity", weak_convexity, excess.max(), scale)
            gradients = np.concatenate([gradients, slopes])
        centers = np.concatenate([centers, centers[chosen] + steps])
        halves = np.concatenate([halves, halves[chosen]])
        values = np.concatenate([values, new])
        weights = np.concatenate([weights, np.zeros(len(new))])
    slack = _ROUNDING * scale
    left = bounds <= upper + slack
    lower, upper = reference + lower - slack, reference + max(upper, lower) + slack
    if double:
        gradient, distance = best / smoothing, math.sqrt(2 * width * (upper - lower))
    else:  # every minimiser lies in one of the boxes that are left
        corners = np.abs(centers[left] - best) + halves[left]
        gradient = -best / smoothing
        distance = float(np.max(np.linalg.norm(corners, axis=1)))
    return Smoothed(
        lower,
        upper,
        gradient,
        distance / smoothing,
        len(values),
        0 if gradients is None else len(gradients),
    )


def _lipschitz_bounds(
    offsets: np.ndarray, halves: np.ndarray, width: float, lipschitz: float
) -> np.ndarray:
    r"""Bounds h - h(c) + ||y - z||^2 / (2 width) on boxes around c from below.

    Offsets are c - z.

    With R the distance to a corner, :math:`-L\|t\|\ge-\frac L2(R+\|t\|^2/R)` there: a
    separable quadratic, and tight at the corners.
    """
    radius = np.linalg.norm(halves, axis=1)
    curvature = 1 / width - lipschitz / radius
    least = _least_in_box(offsets / width, curvature, halves)
    return least + np.sum(offsets**2, axis=1) / (2 * width) - lipschitz * radius / 2


def _weakly_convex_bounds(
    offsets: np.ndarray,
    halves: np.ndarray,
    width: float,
    gradients: np.ndarray,
    weak_convexity: float,
) -> np.ndarray:
    """Bounds the same function from below by the subgradients at the centres."""
    curvature = np.full(len(offsets), 1 / width - weak_convexity)
    least = _least_in_box(gradients + offsets / width, curvature, halves)
    return least + np.sum(offsets**2, axis=1) / (2 * width)


def _least_in_box(
    slopes: np.ndarray, curvatures: np.ndarray, halves: np.ndarray
) -> np.ndarray:
    """Returns the least ``<slope, t> + curvature ||t||^2 / 2`` over ``|t_i| <= half_i``."""
    curvature = np.broadcast_to(curvatures[:, None], slopes.shape)
    at_end = curvature * halves**2 / 2 - np.abs(slopes) * halves
    inside = np.abs(slopes) < curvature * halves
    safe = np.where(inside, curvature, 1.0)
    return np.sum(np.where(inside, -(slopes**2) / (2 * safe), at_end), axis=1)


def _check(name: str, value: float, excess: float, scale: float) -> None:
    """Raises if a bound from a constant lies above the function: the constant is wrong."""
    if excess > _CONTRADICTION * scale:
        raise ValueError(
            f"{name} must be that of value_fn; {value!r} is too small: a bound that "
            f"follows from it is off by {excess:.2g}"
        )


def least_on_simplex(
    points: np.ndarray, costs: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Minimises ``||w @ points||^2 / 2 + w @ costs`` over the simplex, by active sets.

    Wolfe's algorithm for the nearest point, with a linear term. Rounding may stop it
    early: what is returned lies in the simplex always.

    Args:
      points: shape (k, d).
      costs: shape (k,).
      weights: to start from, shape (k,).

    Returns:
      The weights, shape (k,), at least 0, of sum 1.
    """
    support = np.flatnonzero(weights)
    part = weights[support]
    for _ in range(100 + 10 * points.shape[1]):
        v = part @ points[support]
        slopes = points @ v + costs
        new = int(np.argmin(slopes))
        if not part @ slopes[support] > slopes[new] or new in support:
            break
        grown = _shrink(points, costs, np.append(support, new), np.append(part, 0.0))
        step = grown[1] @ points[grown[0]] - v
        fall = part @ costs[support] - grown[1] @ costs[grown[0]]
        if not fall > step @ (v + step / 2):  # rounding: no further
            break
        support, part = grown
    weights = np.zeros(len(points))
    weights[support] = part
    return weights


def _shrink(
    points: np.ndarray, costs: np.ndarray, support: np.ndarray, part: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Drops points until the minimiser over their affine hull lies between them."""
    tiny = 1e-14
    while True:
        base = int(np.argmax(part))  # the differences to it keep small ones exact
        sides = np.delete(points[support] - points[support[base]], base, axis=0)
        rise = np.delete(costs[support] - costs[support[base]], base)
        rise = rise + sides @ points[support[base]]
        gram = sides @ sides.T
        # Along what dependent points share there is no curvature: run to the boundary.
        curvatures, axes = np.linalg.eigh(gram)
        curvatures = np.maximum(curvatures, max(1e-15 * np.trace(gram), 1e-200))
        moved = axes @ (axes.T @ -rise / curvatures)
        target = np.insert(moved, base, 1 - moved.sum())
        outside = target <= tiny
        if not outside.any():
            return support, target / target.sum()
        ratio = part[outside] / np.maximum(part[outside] - target[outside], tiny)
        part = part + np.min(ratio) * (target - part)
        part[np.flatnonzero(outside)[np.argmin(ratio)]] = 0
        support, part = support[part > tiny], part[part > tiny]
        part = part / part.sum()
