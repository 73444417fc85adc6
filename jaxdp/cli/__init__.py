"""Command line: ``train``, ``finetune``, ``epsilon``, ``calibrate``, and so on.

A wrong argument gives one line on standard error and exit code 2, before anything is
spent or written; Ctrl-C gives one line and exit code 130. A traceback is a bug of ours.
"""

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from jaxdp.cli import kinds, options
from jaxdp.cli.errors import UsageError, flag

_HELP = {"-h", "--help"}
DESCRIPTION = "Differentially private optimisation in JAX."
# The frame of tyro's complaints, and what parts them: blanks and hyphens where the
# terminal has no other characters.
_FRAME = "╭╮╰╯│ "
_RULE = re.compile("^[─-]+$", re.MULTILINE)


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    Args:
      args: words after ``jaxdp``; those of the process if None.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        return _dispatch(_parse(words))
    except UsageError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except SystemExit as done:  # tyro, after --help
        return int(done.code or 0)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"jaxdp: {line}", file=sys.stderr)
    return code


def _dispatch(command: Any) -> int:
    """Runs a command; returns its exit code."""
    # Imported late: training brings flax and matplotlib, which the others do without.
    if isinstance(command, options.Train):
        from jaxdp.cli import train

        train.run(command)
    elif isinstance(command, options.Finetune):
        from jaxdp.cli import finetune

        finetune.run(command)
    elif isinstance(command, options.Synthesize):
        from jaxdp.cli import synthesize

        synthesize.run(command)
    elif isinstance(command, options.Replay):
        from jaxdp.cli import replay

        replay.run(command)
    elif isinstance(command, options.Audit):
        from jaxdp.cli import audit

        return audit.run(command)
    else:
        from jaxdp.cli import budget

        budget.run(command)
    return 0


def _parse(words: list[str]) -> Any:
    """Parses the words into a command.

    Raises:
      UsageError: they say none. SystemExit: help was asked for, and printed.
    """
    known = ", ".join(options.COMMANDS)
    if not words:
        raise UsageError(f"a command must be given, one of {known}; see jaxdp --help")
    if words[0] not in (*options.COMMANDS, *_HELP):
        raise UsageError(
            f"the command, first, must be one of {known}; got {words[0]!r}"
        )
    said = io.StringIO()
    with contextlib.redirect_stderr(said), _wide(_HELP.isdisjoint(words)):
        try:
            return tyro.cli(
                options.Command, prog="jaxdp", description=DESCRIPTION, args=words
            )
        except SystemExit as done:
            if not done.code:
                raise
    raise UsageError(_one_line(said.getvalue(), words))


@contextlib.contextmanager
def _wide(wide: bool) -> Iterator[None]:
    """Keeps tyro from breaking its lines, which are read below, not shown."""
    before = os.environ.get("COLUMNS")
    if wide:
        os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


def _one_line(box: str, words: list[str]) -> str:
    """Extracts a one-line message from tyro's framed error.

    A complaint that is not known below keeps its own words, so that another version of
    tyro changes the wording at most.
    """
    command = words[0]
    _, *lines = (line.strip(_FRAME) for line in box.splitlines())  # Without the title.
    parts = [part.split() for part in _RULE.split("\n".join(lines)) if part.strip()]
    said, *more = (" ".join(part) for part in parts)
    near = re.findall(r"--\w[\w-]*(?= [A-Z])", " ".join(more[:1]))
    meant = [option for option in dict.fromkeys(near) if option not in _HELP]
    if found := re.match(r"Error parsing (\S+): (.*)", said):
        return f"{found[1]} {found[2]}"
    if found := re.match(r"Missing value for argument '([^']+)'", said):
        return f"{found[1]} must be {_allowed(command, found[1])}, got nothing"
    if found := re.match(r"Missing from [\w ]+: (--\S+)", said):
        return f"{found[1]} must be {_allowed(command, found[1])}, got nothing"
    if found := re.match(r"Missing from [\w ]+: ([A-Z]+) (.*?)\.? \(required\)", said):
        return f"{found[1]} must be given, got nothing: {found[2]}"
    if found := re.match(r"Unrecognized options: (.*)", said):
        token, *_ = found[1].split(", ")
        # tyro reports the 3 of --quiet=3 alone.
        whole = [w for w in words if w == token or w.endswith(f"={token}")]
        kind = "option" if whole and whole[0].startswith("-") else "argument"
        hint = f"did you mean {' or '.join(meant)}? " if meant else ""
        return (
            f"unknown {kind} {[*whole, token][0]}; {hint}"
            f"jaxdp {command} --help lists all"
        )
    return said


def _allowed(command: str, option: str) -> str:
    """Describes the values that an option allows."""
    for field in dataclasses.fields(options.COMMANDS[command]):
        if flag(field.name) == option:
            return kinds.allowed(options.COMMANDS[command], field.name)
    return "a value"
