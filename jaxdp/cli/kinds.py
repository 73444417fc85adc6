"""Kinds of values that options take: parsers, and descriptions for errors."""

import dataclasses
import json
import pathlib
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import tyro

from jaxdp import accounting


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Description of the values that an option allows."""

    words: str


def kind(
    metavar: str, allowed: str, parse: Callable[[str], Any], missing: str = "none"
) -> tuple[Any, Allowed]:
    """Returns the annotations of an option of one value: its parser and description.

    Args:
      metavar: what help calls the value.
      allowed: what it may be, in words.
      parse: reads it; raises ValueError or OSError.
      missing: what help calls None.
    """

    def instance(words: list[str]) -> Any:
        try:
            return parse(words[0])
        except (ValueError, OSError):
            raise ValueError(f"must be {allowed}, got {words[0]!r}") from None

    spec = tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=instance,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [missing if value is None else str(value)],
    )
    return spec, Allowed(allowed)


def allowed(command: type, name: str) -> str:
    """Describes the values that a command's field allows."""
    hint = typing.get_type_hints(command, include_extras=True)[name]
    words = [x.words for x in typing.get_args(hint) if isinstance(x, Allowed)]
    return words[0] if words else "a value"


def choice(*names: str, missing: str = "none") -> tuple[Any, Allowed]:
    """Returns the annotations of an option that takes one of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    shown = ", ".join(names)
    return kind("|".join(names), f"one of {shown}", parse, missing)


def numbers(text: str) -> tuple[float, ...]:
    """Parses numbers separated by commas."""
    return tuple(float(part) for part in text.split(","))


def pair(text: str) -> tuple[float, float]:
    """Parses two numbers, LOW,HIGH."""
    low, high = numbers(text)
    return low, high


def widths(text: str) -> tuple[int, ...]:
    """Parses integers >= 1, separated by commas."""
    widths = tuple(int(part) for part in text.split(","))
    if min(widths) < 1:
        raise ValueError
    return widths


def bounds(text: str) -> tuple[float, float] | Mapping[str, Any]:
    """Parses LOW,HIGH, or reads the entries of every column from a JSON file."""
    if not text.endswith(".json"):
        return pair(text)
    columns = json.loads(pathlib.Path(text).read_text(encoding="utf-8"))
    if not isinstance(columns, dict):
        raise ValueError
    return columns


def classes(text: str) -> int | tuple[str, ...]:
    """Parses a number of classes, or their names separated by commas."""
    if text.isdecimal():
        return int(text)
    return tuple(part.strip() for part in text.split(","))


def words(text: str) -> tuple[str, ...]:
    """Parses words separated by commas."""
    parts = tuple(part.strip() for part in text.split(","))
    if "" in parts:
        raise ValueError
    return parts


def number(missing: str = "none") -> tuple[Any, Allowed]:
    """Returns the annotations of an option that takes a number."""
    return kind("NUMBER", "a number", float, missing)


def integer(missing: str = "none") -> tuple[Any, Allowed]:
    """Returns the annotations of an option that takes an integer."""
    return kind("INTEGER", "an integer", int, missing)


def path(missing: str = "none") -> tuple[Any, Allowed]:
    """Returns the annotations of an option that takes a path."""
    return kind("PATH", "a path", pathlib.Path, missing)


Relation = Annotated[str, *choice(*accounting.RELATIONS)]
SamplingProb = Annotated[float | None, *number("1")]
MaybeNumber = Annotated[float | None, *number()]
MaybeInteger = Annotated[int | None, *integer()]
NumberOfRecipe = Annotated[float | None, *number("recipe")]
IntegerOfRecipe = Annotated[int | None, *integer("recipe")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
