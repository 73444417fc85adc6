"""Visibility of record values in error messages."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

_SHOWN = contextvars.ContextVar("show_values", default=False)


@contextlib.contextmanager
def show_values(shown: bool = True) -> Iterator[None]:
    r"""Lets error messages quote cells, labels and texts of records, in ``with``.

    Else they say file, line and column, and what was expected: standard error is often
    kept, sent or shown to people who may not see a record.

    Args:
      shown: False hides them again, inside of another ``with``.

    Example:
      >>> import pathlib, tempfile
      >>> import jaxdp
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "people.csv"
      >>> _ = path.write_text("age,sick\nold,0\n30,1\n")
      >>> def message():
      ...     try:
      ...         jaxdp.models.load_file(path, label="sick", classes=2)
      ...     except ValueError as error:
      ...         return str(error)
      >>> "old" in message()
      False
      >>> with jaxdp.models.show_values():
      ...     "old" in message()
      True
    """
    token = _SHOWN.set(shown)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def got(value: Any) -> str:
    """Returns the end of an error message about ``value``, which may be private."""
    if _SHOWN.get():
        return f", got {value!r}"
    return ", got a value that is kept back (--show-values or show_values() shows it)"


def only(names: Any) -> str:
    """Returns the end of an error message: the names that exist instead.

    It is empty if values are hidden: without a header line, names are a record.
    """
    return f", only {', '.join(map(repr, names))}" if _SHOWN.get() else ""


def place_of(record: Any, i: int) -> str:
    """Returns the place of record i, from 0: its number, and file and line if known."""
    place = getattr(record, "place", None)
    return f"record {i + 1}" + (f" ({place})" if place else "")


@contextlib.contextmanager
def about(record: Any, i: int) -> Iterator[None]:
    """Puts the place of record i before the messages of errors in ``with``."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place_of(record, i)}: {error}") from None


def decoding(error: Exception) -> str:
    """Returns a reader's error message without the byte that it could not read."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return str(error)
