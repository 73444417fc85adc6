"""Checks of arguments, each with a message that names the argument.

Every check raises before anything is traced, written or spent. The value must
be an ordinary Python (or NumPy) number: a traced value is refused, because the
constants that decide privacy must be known when the plan is made.
"""

import collections
import dataclasses
import math
import numbers
from collections.abc import Collection, Mapping, Set, ValuesView
from typing import Any

import numpy as np


def shown(value: Any) -> str:
    """Returns a value's ``repr``; of arrays, which may be data, shape or number alone."""
    if "Tracer" in type(value).__name__:
        return "a value that JAX traces: make plans outside of jit, grad and vmap"
    shape = getattr(value, "shape", ())
    if shape:
        return f"an array of shape {shape}"
    if _holds_arrays(value):
        return f"a {type(value).__name__} with arrays"
    text = repr(value)
    return f"a {type(value).__name__}" if "\n" in text else text


def _holds_arrays(value: Any, outer: frozenset[int] = frozenset()) -> bool:
    """Returns True for containers and data classes with an array anywhere in them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | Set | ValuesView | collections.deque):
        parts = list(value)
    else:
        return False
    if id(value) in outer:  # It holds itself.
        return False
    outer |= {id(value)}
    return any(hasattr(x, "dtype") or _holds_arrays(x, outer) for x in parts)


def _real(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be {allowed}, got {shown(value)} of type {type(value).__name__}"
        )
    return float(value)


def positive(*, allow_inf: bool = False, **values: Any) -> None:
    """Requires numbers > 0; finite unless ``allow_inf``."""
    allowed = "a number > 0" + (" or infinity" if allow_inf else "")
    for name, value in values.items():
        x = _real(name, value, allowed)
        if not x > 0 or (math.isinf(x) and not allow_inf):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")


def non_negative(**values: Any) -> None:
    """Requires finite numbers >= 0."""
    for name, value in values.items():
        x = _real(name, value, "a finite number >= 0")
        if not 0 <= x < math.inf:
            raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


def noise_multiplier(value: Any, *, least: float = 1e-30) -> None:
    """Requires 0, or a number from ``least`` to 1e30."""
    non_negative(noise_multiplier=value)
    if value != 0 and not least <= value <= 1e30:
        raise ValueError(
            f"noise_multiplier must be 0 or in [{least:g}, 1e30], got {value!r}"
        )


def real_array(**values: Any) -> np.ndarray:
    """Returns one argument as float64; TypeError, which tells no number of it."""
    ((name, value),) = values.items()
    try:
        # A warning of NumPy's would tell of a single private number.
        with np.errstate(all="ignore"):
            return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise TypeError(f"{name} must be an array of numbers, got a {kind}") from None


def probability(*, allow_one: bool = False, **values: Any) -> None:
    """Requires numbers in (0, 1), or (0, 1] with ``allow_one``."""
    allowed = "a number in (0, 1]" if allow_one else "a number in (0, 1)"
    for name, value in values.items():
        x = _real(name, value, allowed)
        if not (0 < x < 1 or (allow_one and x == 1)):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")


def integer(*, at_least: int = 1, at_most: int | None = None, **values: Any) -> None:
    """Requires integers in ``[at_least, at_most]``."""
    upper = "" if at_most is None else f" and <= {at_most}"
    allowed = f"an integer >= {at_least}{upper}"
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(
                f"{name} must be {allowed}, got {shown(value)} of type "
                f"{type(value).__name__}"
            )
        if int(value) < at_least or (at_most is not None and int(value) > at_most):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")


def one_of(allowed: Collection[Any], **values: Any) -> None:
    """Requires each value to be one of a closed set."""
    for name, value in values.items():
        if value not in allowed:
            choices = ", ".join(repr(a) for a in allowed)
            raise ValueError(f"{name} must be one of {choices}; got {value!r}")


def instance(kinds: type | tuple[type, ...], **values: Any) -> None:
    """Requires each value to be an instance of one of ``kinds``."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    for name, value in values.items():
        if not isinstance(value, kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise TypeError(
                f"{name} must be a {names}, got {shown(value)} of type "
                f"{type(value).__name__}"
            )


def is_numeric(leaf: Any) -> bool:
    """Returns True for a number, or an array of numbers that JAX holds."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, int | float | complex)
    # Not bfloat16, whose kind is "V", too.
    void = getattr(dtype, "type", None) is np.void
    return not void and getattr(dtype, "kind", "f") not in "OSTUMm"


def dtype_name(dtype: Any) -> str:
    """Returns a dtype's name without what NumPy takes from the data.

    That is the length of the longest text, and the unit of the most precise date.
    """
    kind = getattr(dtype, "kind", "f")
    if kind in "STU":
        return "text"
    return dtype.type.__name__ if kind in "MmV" else str(dtype)


def is_callable(**values: Any) -> None:
    """Requires functions, or objects that are called like one."""
    for name, value in values.items():
        if not callable(value):
            raise TypeError(f"{name} must be callable, got {shown(value)}")


def has_noise(noise_multiplier: float | None) -> float:
    """Returns the noise multiplier of a plan; raises ValueError if it has none."""
    if noise_multiplier is None:
        raise ValueError(
            "the plan has no noise_multiplier yet: call "
            ".calibrate(epsilon=..., delta=...) or .with_noise(noise_multiplier=...)"
        )
    return noise_multiplier
