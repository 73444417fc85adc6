"""Options of commands: dataclasses with kinds of values, their parser, usage errors."""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from jaxdp.cli import config

Options = TypeVar("Options")

#: What the library calls a thing that an option of another name gives.
_RENAMED = {"path": "dataset", "num": "num_directions"}
#: The option that every command has beside its own.
_CONFIG = "config"


class UsageError(Exception):
    """Error of a wrong argument: one line on standard error and exit code 2."""


class Preempted(Exception):
    """End of a command to be given again: one line on standard error and exit code 75."""


def flag(name: str) -> str:
    """Returns the spelling of a field on the command line."""
    return "--" + name.replace("_", "-")


def refuse(command: Any, names: Iterable[str], where: str, there: bool) -> None:
    """Refuses options that are given and would have no effect."""
    for name in names:
        value = getattr(command, name, None)
        if value is not None and value is not False and not there:
            raise UsageError(f"{flag(name)} is for {where} only, got {value}")


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


# --- kinds of values ---------------------------------------------------------------


class Kind(NamedTuple):
    """Values that an option takes."""

    metavar: str  # what help calls one
    allowed: str  # what it may be, in words
    parse: Callable[[str], Any]  # raises ValueError or OSError
    check: Callable[..., None] | None = None  # of the value's range: check(name=value)
    positional: bool = False  # given by place, under its metavar
    alone: bool = False  # also without a value, which is True; --no-... is False

    def read(self, text: str) -> Any:
        """Parses a word; the error says what would be allowed."""
        try:
            return self.parse(text)
        except (ValueError, OSError):
            wrong = f"must be {self.allowed}, got {text!r}"
            raise argparse.ArgumentTypeError(wrong) from None


def choice(*names: str) -> Kind:
    """Returns the kind of an option that takes one of some names."""
    return Kind(
        "|".join(names), f"one of {', '.join(names)}", lambda x: names[names.index(x)]
    )


def choice_or_pattern(*names: str) -> Kind:
    """Returns the kind of an option that takes one of some names, or a path's pattern."""

    def read(text: str) -> str:
        return text if {"/", "*"} & set(text) else names[names.index(text)]

    said = f"one of {', '.join(names)}, or a pattern of paths, as layers/attention/*"
    return Kind("|".join((*names, "PATTERN")), said, read)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _pair(text: str) -> tuple[float, float]:
    low, high = _numbers(text)
    return low, high


def _widths(text: str) -> tuple[int, ...]:
    widths = tuple(int(part) for part in text.split(","))
    if min(widths) < 1:
        raise ValueError
    return widths


def _bounds(text: str) -> tuple[float, float] | Mapping[str, Any]:
    if not text.endswith(".json"):
        return _pair(text)
    columns = json.loads(pathlib.Path(text).read_text(encoding="utf-8"))
    if not isinstance(columns, dict):
        raise ValueError
    return columns


def _classes(text: str) -> int | tuple[str, ...]:
    if text.isdecimal():
        return int(text)
    return tuple(part.strip() for part in text.split(","))


def class_names(classes: Any) -> Any:
    """Returns names of classes; "0", "1", ... for a count of them."""
    return tuple(map(str, range(classes))) if isinstance(classes, int) else classes


def _words(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if "" in parts:
        raise ValueError
    return parts


def _axes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {name.strip(): int(size) for name, _, size in pairs}
    if len(sizes) < len(pairs) or "" in sizes or min(sizes.values()) < 1:
        raise ValueError
    return sizes


def _place(text: str) -> tuple[str, int, int]:
    address, index, count = text.split(",")
    host, _, port = address.rpartition(":")
    known = host.encode("idna") and port.isdecimal()
    if not known or not 0 < int(port) < 2**16:
        raise ValueError
    return address, int(index), int(count)


NUMBER = Kind("NUMBER", "a number", float)
INTEGER = Kind("INTEGER", "an integer", int)
PATH = Kind("PATH", "a path", pathlib.Path)
FOLDER = Kind("FOLDER", "a folder", str)
FILE = Kind("FILE", "a file", str)
NAME = Kind("NAME", "a name", str)
TEXT = Kind("TEXT", "a text", str)
DATASET = Kind("NAME|PATH", "a data set", str)
PAIR = Kind("LOW,HIGH", "numbers LOW,HIGH", _pair)
VALUES = Kind("V,V,...", "numbers V,V,...", _numbers)
SHARES = Kind("P,P,...", "numbers P,P,...", _numbers)
DEGREES = Kind("INT,...", "integers >= 1 with commas between them", _widths)
WIDTHS = Kind("WIDTH,...", "integers >= 1, as in 64,32", _widths)
AXES = Kind("AXIS=SIZE,...", "sizes of axes, as in data=8", _axes)
PLACE = Kind(
    "HOST:PORT,INDEX,COUNT",
    "HOST:PORT,INDEX,COUNT or given alone",
    _place,
    alone=True,
)
WORDS = Kind("WORD,...", "words", _words)
CLASSES = Kind("K|NAME,...", "a number or names of classes", _classes)
BOUNDS = Kind(
    "LOW,HIGH|FILE",
    "numbers LOW,HIGH or a JSON file with [low, high] of every column",
    _bounds,
)


# --- options -----------------------------------------------------------------------


def opt(kind: Kind, about: str, unset: str | None = None, default: Any = None) -> Any:
    """Declares a dataclass field that is an option of one value.

    Args:
      kind: of its values.
      about: its help.
      unset: what help says of a default of None.
      default: its value where it is not given; ``...`` where it must be.
    """
    said = {"kind": kind, "about": about, "unset": unset}
    if default is ...:
        return dataclasses.field(metadata=said)
    return dataclasses.field(default=default, metadata=said)


def switch(about: str, default: bool = False) -> Any:
    """Declares a dataclass field that is an option without a value."""
    return dataclasses.field(default=default, metadata={"kind": None, "about": about})


def check(command: Any) -> None:
    """Checks the range of every option."""
    for field in dataclasses.fields(command):
        value, kind = getattr(command, field.name), field.metadata["kind"]
        if kind is not None and kind.check is not None and value is not None:
            with usage(command):
                kind.check(**{field.name: value})


# --- the parser --------------------------------------------------------------------


def parse(
    options: type[Options],
    words: list[str],
    prog: str,
    more: str,
    aside: tuple[str, ...] = (),
    file: Mapping[str, Any] | None = None,
) -> Options:
    """Reads options from the words of a command line, and from its ``--config``.

    ``options`` is a dataclass of :func:`opt` and :func:`switch` fields, ``prog`` the
    command as help calls it, ``more`` what help ends with, ``aside`` keys of the file that
    are read elsewhere, ``file`` its content if that was read: a pipe gives it once.
    SystemExit: help was printed.
    """
    fields = {field.name: field for field in _fields(options)}
    parser = _parser(options, prog, more)
    given = _read(parser, fields, words, prog)
    if (path := once(given.pop(_CONFIG, None))) is not None:
        with naming(path):
            found = config.read(path) if file is None else file
            found = {k: x for k, x in found.items() if k not in aside}
            kinds = {name: field.metadata["kind"] for name, field in fields.items()}
            known = {
                name: kind is None or (None if kind.alone else False)
                for name, kind in kinds.items()
                if kind is None or not kind.positional
            }
            same = list(config.words(found, known, f"{prog} --help lists all"))
            given = _read(parser, fields, same, prog) | given
    for name, field in fields.items():
        missing = given.get(name) is None
        if field.default is dataclasses.MISSING and missing:
            kind, about = field.metadata["kind"], field.metadata["about"]
            if kind.positional:
                raise UsageError(f"{kind.metavar} must be given, got nothing: {about}")
            raise UsageError(f"{flag(name)} must be {kind.allowed}, got nothing")
    command = options(**given)
    vars(command)["given"] = frozenset(given)
    return command


def once(paths: list[pathlib.Path] | None) -> pathlib.Path | None:
    """Returns the file of ``--config``, which may be given once."""
    if paths and len(paths) > 1:
        named = ", ".join(map(str, paths))
        raise UsageError(f"{flag(_CONFIG)} must be given once, got {named}")
    return paths[0] if paths else None


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Lets errors about the options of a file name the file."""
    try:
        yield
    except (UsageError, ValueError) as error:
        raise UsageError(f"--config {str(path)!r}: {error}") from None


def _read(
    parser: argparse.ArgumentParser,
    fields: Mapping[str, dataclasses.Field[Any]],
    words: list[str],
    prog: str,
) -> dict[str, Any]:
    """Returns the options that the words give."""
    try:
        given, unknown = parser.parse_known_args(_joined(words))
    except argparse.ArgumentError as error:
        # A switch has two spellings, of which the first is its name.
        name, said = str(error.argument_name).partition("/")[0], error.message
        field = fields.get(name.strip("-").replace("-", "_"))
        kind = PATH if field is None else field.metadata["kind"]  # None: --config.
        if kind is None:
            said = said.replace("ignored explicit argument", "takes no value, got")
        elif not said.startswith("must"):
            said = f"must be {kind.allowed}, got nothing"
        raise UsageError(f"{name} {said}") from None
    if unknown:
        word = unknown[0]
        known = [*map(flag, fields), flag(_CONFIG)]
        near = difflib.get_close_matches(word, known, cutoff=0.8)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        what = "option" if word.startswith("-") else "argument"
        raise UsageError(f"unknown {what} {word}; {hint}{prog} --help lists all")
    return vars(given)


def together(
    prog: str, commands: Mapping[str, type], algorithms: Mapping[str, type]
) -> argparse.ArgumentParser:
    """Returns one parser of all commands; ``algorithms`` are those of ``train``."""
    whole = argparse.ArgumentParser(prog=prog)
    places = whole.add_subparsers()

    def add(places: Any, name: str, options: type) -> argparse.ArgumentParser:
        summary = str(options.__doc__).partition("\n")[0]
        parents = [_parser(options, name, "")]
        return places.add_parser(name, help=summary, parents=parents, add_help=False)

    below = places.add_parser("train", help="Train on a data set.").add_subparsers()
    for name, options in algorithms.items():
        add(below, name, options)
    for name, options in commands.items():
        add(places, name, options)
    return whole


def some(options: type, words: list[str]) -> dict[str, Any]:
    """Reads options from words of which others may be of no option; nothing is refused."""
    with contextlib.suppress(argparse.ArgumentError):
        return vars(_parser(options, "", "").parse_known_args(_joined(words))[0])
    return {}


def _fields(options: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(options)


def _joined(words: list[str]) -> list[str]:
    """Spells options with hyphens, and joins them to values that begin with one."""
    out: list[str] = []
    for word in words:
        if re.match(r"-[\d.]", word) and out and re.fullmatch("--[^=]+", out[-1]):
            out[-1] += f"={word}"
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        out.append(name + equals + value)
    return out


def _parser(options: type, prog: str, more: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [OPTIONS]",
        description=inspect.getdoc(options),
        epilog=more,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    # In groups, by the class that declares them: those of the command first.
    left = {field.name: field for field in _fields(options)}
    for owner in options.__mro__[:-1]:
        own = [left.pop(n) for n in inspect.get_annotations(owner) if n in left]
        title = str(owner.__doc__).rstrip(".").lower()
        group = parser if owner is options else parser.add_argument_group(title)
        for field in own:
            _add(group, field)
        if group is parser:
            about = "TOML file of options; those on the command line come before it."
            group.add_argument(
                flag(_CONFIG),
                metavar="FILE",
                type=PATH.read,
                action="append",
                help=about,
            )
    return parser


def _add(group: Any, field: dataclasses.Field[Any]) -> None:
    kind, about = field.metadata["kind"], field.metadata["about"]
    name = flag(field.name)
    if kind is None:
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=about)
    elif kind.positional:
        place: dict[str, Any] = {"nargs": "?", "default": None, "type": kind.read}
        group.add_argument(field.name, metavar=kind.metavar, help=about, **place)
    elif kind.alone:
        word: dict[str, Any] = {"nargs": "?", "const": True, "type": kind.read}
        group.add_argument(name, metavar=kind.metavar, help=about, **word)
        off: dict[str, Any] = {"action": "store_false", "help": argparse.SUPPRESS}
        group.add_argument(f"--no-{name[2:]}", dest=field.name, **off)
    else:
        unset = field.metadata["unset"] if field.default is None else field.default
        if unset not in (None, dataclasses.MISSING):
            about += f" (default: {unset})"
        group.add_argument(name, metavar=kind.metavar, type=kind.read, help=about)
