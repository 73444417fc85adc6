"""Floats with details of their computation."""

from typing import Any, Self


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
