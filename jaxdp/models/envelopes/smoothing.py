"""Moreau envelopes and Lasry-Lions smoothings, by the search that the constants allow."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.models.envelopes import evaluation, searches
from jaxdp.models.envelopes.searches import Smoothed

MAX_DIM = 10
MAX_RECORDS = 200


def moreau_envelope(
    value_fn: Callable[[Any], Any],
    x: Any,
    smoothing: float,
    *,
    gradient_fn: Callable[[Any], Any] | None = None,
    weak_convexity: float | None = None,
    lipschitz: float | None = None,
    tolerance: float = 1e-8,
    max_evaluations: int = 100_000,
) -> Smoothed:
    r"""Computes the Moreau envelope of h at x, and its gradient :math:`(x-y^*)/\lambda`.

    A minimiser y* need not be unique where :math:`\lambda w\ge1`, and then there is no
    gradient: ``gradient_error`` covers every minimiser that is left.

    Args:
      value_fn: h, (d,) -> (), traceable by JAX, evaluated in float64. The same object is
        compiled once.
      x: shape (d,), d <= 10.
      smoothing: lambda > 0, in units of x^2 / h.
      gradient_fn: (d,) -> (d,), a subgradient of h; None differentiates ``value_fn``, which
        is right for maxima and absolute values of smooth functions. Read only with
        ``weak_convexity``.
      weak_convexity: w >= 0, in units of h / x^2; None where unknown.
      lipschitz: L > 0 of h, in units of h / x; needed unless lambda w < 1, and else not
        read.
      tolerance: the gap to stop at, > 0, in units of h.
      max_evaluations: of h, at which to stop in any case.

    Returns:
      A :class:`Smoothed`.

    Raises:
      TypeError: a constant that is no number.
      ValueError: a number out of its range, neither constant, an x of another shape or of
        more than 10 coordinates, values that are not finite float64 scalars, or that
        contradict a constant.
    """
    method = _method(
        x,
        smoothing,
        weak_convexity,
        lipschitz,
        tolerance,
        max_evaluations,
        double=False,
    )
    return evaluation.solve(method, value_fn, gradient_fn, np.asarray(x, np.float64))[0]


def lasry_lions(
    value_fn: Callable[[Any], Any],
    x: Any,
    smoothing: float,
    *,
    gradient_fn: Callable[[Any], Any] | None = None,
    weak_convexity: float | None = None,
    lipschitz: float | None = None,
    tolerance: float = 1e-8,
    max_evaluations: int = 100_000,
) -> Smoothed:
    r"""Computes the Lasry-Lions smoothing of h at x, and its gradient.

    The outer problem is strongly concave with modulus :math:`1/2\lambda`, so a gap g leaves
    the gradient off by at most :math:`2\sqrt{g/\lambda}`.

    Args:
      value_fn: as in :func:`moreau_envelope`, as are all others.
      x: shape (d,).
      smoothing: lambda.
      gradient_fn: of h.
      weak_convexity: w.
      lipschitz: L; needed unless 2 lambda w <= 1, and else not read.
      tolerance: the gap to stop at.
      max_evaluations: of h.

    Returns:
      A :class:`Smoothed`.

    Raises:
      TypeError, ValueError: as :func:`moreau_envelope`.
    """
    method = _method(
        x, smoothing, weak_convexity, lipschitz, tolerance, max_evaluations, double=True
    )
    return evaluation.solve(method, value_fn, gradient_fn, np.asarray(x, np.float64))[0]


def lasry_lions_mean(
    value_fn: Callable[[Any, Any], Any],
    x: Any,
    data: Any,
    smoothing: float,
    *,
    gradient_fn: Callable[[Any, Any], Any] | None = None,
    weak_convexity: float | None = None,
    lipschitz: float | None = None,
    tolerance: float = 1e-8,
    max_evaluations: int = 100_000,
) -> Smoothed:
    r"""Computes the mean over records of the Lasry-Lions smoothings of their losses.

    Not the smoothing of the mean: the minimisers of :math:`\tilde F=\frac1n\sum_i\tilde
    f_i` are not those of F. Where :math:`\|\nabla\tilde F(x)\|\le\beta`, the mean of the
    records' Goldstein subdifferentials at radius :math:`3\lambda L` holds a vector of norm
    at most beta: :func:`jaxdp.metrics.componentwise_goldstein_norm`.

    Args:
      value_fn: (x, batch) -> losses (B,), as everywhere in the library.
      x: shape (d,), d <= 10.
      data: pytree with leading axis n <= 200, the records.
      smoothing: lambda.
      gradient_fn: (x, batch) -> (B, d), or None.
      weak_convexity: w, of every record's loss.
      lipschitz: L, of every record's loss.
      tolerance: the gap to stop at, of each record.
      max_evaluations: of each record's loss.

    Returns:
      A :class:`Smoothed`: means of the values, bounds, gradients and errors; totals of
      the evaluations.

    Raises:
      TypeError, ValueError: as :func:`moreau_envelope`; or more than 200
        records, or arrays without one number of them.
    """
    method = _method(
        x, smoothing, weak_convexity, lipschitz, tolerance, max_evaluations, double=True
    )
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(
            "data must be arrays with one number of records along the first axis, got "
            f"{sorted(lengths)}"
        )
    ((n,),) = lengths
    if not 1 <= n <= MAX_RECORDS:
        raise ValueError(f"data must have 1 to {MAX_RECORDS} records, got {n}")
    point = np.asarray(x, np.float64)
    found = evaluation.solve(method, value_fn, gradient_fn, point, data, n)
    return Smoothed(
        float(np.mean([one.lower for one in found])),
        float(np.mean([one.upper for one in found])),
        np.mean([one.gradient for one in found], axis=0),
        float(np.mean([one.gradient_error for one in found])),
        sum(one.num_values for one in found),
        sum(one.num_gradients for one in found),
    )


def _method(
    x: Any,
    smoothing: float,
    weak_convexity: float | None,
    lipschitz: float | None,
    tolerance: float,
    max_evaluations: int,
    *,
    double: bool,
) -> evaluation.Method:
    """Chooses the search that the asserted constants allow."""
    validate.positive(smoothing=smoothing, tolerance=tolerance)
    validate.integer(max_evaluations=max_evaluations)
    if weak_convexity is not None:
        validate.non_negative(weak_convexity=weak_convexity)
    if lipschitz is not None:
        validate.positive(lipschitz=lipschitz)
    point = np.asarray(x, np.float64)
    if point.ndim != 1 or not 1 <= len(point) <= MAX_DIM:
        raise ValueError(
            f"x must have shape (d,), 1 <= d <= {MAX_DIM}; got shape {point.shape}"
        )
    if not np.isfinite(point).all():
        raise ValueError("x must be finite")
    dim = len(point)
    bound = (0.5 if double else 1.0) / smoothing
    if weak_convexity is not None and (
        weak_convexity < bound or (double and weak_convexity == bound)
    ):
        plan = (dim, smoothing, weak_convexity, tolerance, max_evaluations)
        start = functools.partial(searches.cutting_planes, *plan)
        return evaluation.Method(start, reads_gradients=True, asks_for_one=True)
    if lipschitz is None:
        raise ValueError(
            f"lipschitz must be given unless weak_convexity is at most {bound:g}, got "
            f"weak_convexity={weak_convexity!r}"
        )
    start = functools.partial(
        searches.branch_and_bound,
        dim,
        smoothing,
        lipschitz,
        weak_convexity,
        tolerance,
        max_evaluations,
        double=double,
    )
    reads = weak_convexity is not None
    return evaluation.Method(start, reads_gradients=reads, asks_for_one=False)
