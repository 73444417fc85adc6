"""Parts of the measures: floats with details, points as vectors."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np


class Detailed(float):
    """A float with details: the attributes that a subclass annotates."""

    def __new__(cls, value: float, *details: float) -> Self:
        self = super().__new__(cls, value)
        vars(self).update(zip(cls.__annotations__, details, strict=True))
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (float(self), *vars(self).values())

    def __repr__(self) -> str:
        details = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({float(self)!r}, {details})"

    def __str__(self) -> str:
        return repr(float(self))


def as_vector(x: Any) -> np.ndarray:
    """Returns the elements of a tree of floating arrays, float64 (d,), d >= 1, finite.

    Raises:
      TypeError: a leaf that is not floating.
      ValueError: no elements, or one that is not finite.
    """
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"x must have floating leaves, got {jnp.result_type(leaf)}")
    parts = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(x)]
    flat = np.concatenate([np.zeros(0), *parts])
    if not flat.size or not np.isfinite(flat).all():
        raise ValueError("x must have elements, all of them finite")
    return flat
