"""Printing of what a command found."""

from collections.abc import Mapping
from typing import Any

import rich
from rich.table import Table


def show(answer: Mapping[str, Any]) -> None:
    """Prints names and values as a table, floats with six digits."""
    table = Table(show_header=False, box=None)
    for name, value in answer.items():
        table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    rich.print(table)
