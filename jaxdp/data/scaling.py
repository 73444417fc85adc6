"""Scaling by public bounds: a function of one record, never of the others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.core import validate

Bounds = (
    tuple[float | Sequence[float], float | Sequence[float]]
    | Mapping[str, tuple[float, float]]
)


def scale_by_bounds(x: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """Maps [low, high] to [0, 1] and clips what lies outside: record by record.

    Args:
      x: shape (..., d).
      low: a number or shape (d,); a public constant.
      high: likewise, above low.

    Returns:
      float32, the shape of x, within [0, 1].

    Raises:
      TypeError: x holds what is no number; which one is not said.
    """
    return _shares(x, low, high).astype(np.float32)


def center_by_bounds(x: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """Maps [low, high] to [-1, 1], as :func:`scale_by_bounds` maps it to [0, 1].

    For features: what they have in common moves all outputs alike, and its gradients would
    take most of a clip that the rest needs.
    """
    return (2 * _shares(x, low, high) - 1).astype(np.float32)


def _shares(x: Any, low: Any, high: Any) -> np.ndarray:
    """Returns how far x is from low to high, float64 within [0, 1]."""
    x = validate.real_array(x=x)
    low, high = (np.asarray(end, np.float64) for end in (low, high))
    # A warning of NumPy's would tell of a single private number. Numbers are clipped before
    # they are scaled; bounds whose difference overflows leave NaN, which counts zero.
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.clip(x, low, high) - low) / (high - low)


def bound_arrays(bounds: Bounds, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns low and high of each column from any of the accepted forms.

    Args:
      bounds: (low, high), each a number or one number per column, or a mapping from
        every column's name to its (low, high).
      names: the columns.

    Returns:
      low and high, float64, shape (len(names),) each.

    Raises:
      ValueError: bounds of another form, not finite, or not low < high.
    """
    allowed = (
        "(low, high), each a finite number or one per column with low < high, or a "
        "mapping from every column's name to (low, high)"
    )
    if isinstance(bounds, Mapping):
        missing = [name for name in names if name not in bounds]
        unknown = [name for name in bounds if name not in names]
        if missing or unknown:
            raise ValueError(
                "bounds must name every feature column and no other: missing "
                f"{missing}, unknown {unknown}"
            )
    try:
        ends = bounds
        if isinstance(bounds, Mapping):
            ends = tuple(zip(*(bounds[name] for name in names), strict=True))
        low, high = (
            np.broadcast_to(np.asarray(end, np.float64), (len(names),)) for end in ends
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"bounds must be {allowed}; got {bounds!r}") from error
    bad = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high) & (low < high)))
    if bad.size:
        j = bad[0]
        raise ValueError(
            f"bounds must be {allowed}; column {names[j]!r} has ({low[j]}, {high[j]})"
        )
    return low, high
