"""Properties that are computed once for the numbers of a plan."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value")


class kept(Generic[Value]):
    """Property of a frozen dataclass that is computed once for its fields as they are.

    Unlike with ``functools.cached_property`` a value never outlives the fields that it was
    computed from, even where somebody changes one of a frozen dataclass: what a plan
    charges and what it runs follow from the same numbers.
    """

    def __init__(self, func: Callable[[Any], Value]) -> None:
        self.func = func
        self.__doc__ = func.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._place = f"_kept_{name}"

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> Value: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        fields = tuple(getattr(instance, f.name) for f in dataclasses.fields(instance))
        known = vars(instance).get(self._place)
        if known is None or known[0] != fields:
            known = (fields, self.func(instance))
            vars(instance)[self._place] = known
        return known[1]
