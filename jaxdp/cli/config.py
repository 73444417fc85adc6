"""Options of a command in a TOML file, for ``--config``.

Keys are the long options of the command, with dashes or underscores. What is on the
command line counts before the file.
"""

import difflib
import pathlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Options by name: whether each is a switch; None for one that also takes a value.
Known = Mapping[str, bool | None]


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file of options; keys come with underscores.

    Raises:
      ValueError: no such file, no TOML, a table, or a key that is given twice.
    """
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"the file cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the file is no TOML: {error}") from error
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in found:
            raise ValueError(f"key {key!r} is given twice, with dashes and underscores")
        found[name] = value
    return found


def words(given: Mapping[str, Any], known: Known, more: str = "") -> Iterator[str]:
    """Yields the words of a command line that gives the same options.

    Args:
      given: of :func:`read`.
      known: the options that may be given.
      more: what an error about an unknown key ends with.

    Raises:
      ValueError: an unknown key, or a value that no option takes.
    """
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"unknown key {name!r}; {_hint(name, known)}{more}")
        option = name.replace("_", "-")
        if not known[name] and not (known[name] is None and isinstance(value, bool)):
            yield f"--{option}={_text(name, value)}"
        elif not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        else:
            yield f"--{option}" if value else f"--no-{option}"


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"did you mean {near[0]!r}? " if near else ""


def _text(name: str, value: Any) -> str:
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | float | str):
            raise ValueError(
                f"{name} must be a number, a text or a list of them, got {part!r}"
            )
        if isinstance(value, list) and "," in str(part):
            raise ValueError(f"{name} must have no comma within a part, got {part!r}")
    return ",".join(map(str, parts))
