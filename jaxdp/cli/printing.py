"""Printing of what a command found."""

import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def show(answer: Mapping[str, Any]) -> None:
    """Prints names and values as a table, floats with six digits."""
    import rich
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in answer.items():
        table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    rich.print(table)


def conclude(command: Any, report: pathlib.Path, table: "Callable[[], Table]") -> None:
    """Prints the end of a run: its public report, a table of it, or nothing."""
    if command.json:
        print(json.dumps(json.loads(report.read_text(encoding="utf-8"))))
    elif not command.quiet:
        import rich

        rich.print(table())


def has_bar(command: Any) -> bool:
    """Returns True if the command is to draw progress bars, as it can on a terminal."""
    return not (command.quiet or command.json) and sys.stdout.isatty()
