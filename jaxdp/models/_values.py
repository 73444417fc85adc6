"""Whether complaints about records may say what the records hold."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

_SHOWN = contextvars.ContextVar("show_values", default=False)


@contextlib.contextmanager
def show_values(shown: bool = True) -> Iterator[None]:
    """Lets error messages quote cells, labels and texts of records, in ``with``.

    Else they say file, line and column, and what was expected: standard error is often
    kept, sent or shown to people who may not see a record.

    Args:
      shown: False hides them again, inside of another ``with``.
    """
    token = _SHOWN.set(shown)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def got(value: Any) -> str:
    """How a message ends that complains about ``value``, which may be private."""
    if _SHOWN.get():
        return f", got {value!r}"
    return ", got a value that is kept back (--show-values or show_values() shows it)"


def only(names: Any) -> str:
    """Names that are there instead: of a file without a header they are a record."""
    return f", only {', '.join(map(repr, names))}" if _SHOWN.get() else ""


def place_of(record: Any, i: int) -> str:
    """Where record i, from 0, is: its number, and file and line where these are known."""
    place = getattr(record, "place", None)
    return f"record {i + 1}" + (f" ({place})" if place else "")


def decoding(error: Exception) -> str:
    """What a reader said, without the byte that it could not read."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return str(error)
