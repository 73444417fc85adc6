"""Usage errors: one line that names the option."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

#: What the library calls a thing that an option of another name gives.
_RENAMED = {"path": "dataset", "num": "num_directions"}


class UsageError(Exception):
    """Error of a wrong argument: one line on standard error and exit code 2."""


def flag(name: str) -> str:
    """Returns the spelling of a field on the command line."""
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def usage(command: Any, about: str | None = None) -> Iterator[None]:
    """Turns errors of the library about arguments into a :class:`UsageError`.

    Only for calls that refuse what a person gave: elsewhere a ValueError is a bug, and
    shows its traceback.

    Args:
      command: the options; a message that begins with the name of one gets its flag.
      about: the flag that messages are about which begin with nothing known.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        message = str(error)
        fields = {f.name for f in dataclasses.fields(command)}
        found = re.match(r"\w+(?![\w./\\-])", message)  # No file's name.
        name = _RENAMED.get(found[0], found[0]) if found else ""
        if found and name in fields:
            message = flag(name) + message[found.end() :]
        elif about is not None:
            message = f"{about}: {message}"
        raise UsageError(message) from error
