"""``jaxdp report``: the privacy statement of a run, from the public files of its folder."""

import io
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdp.cli import options
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.training import ledger, statements

#: Columns of the text in a file.
_WIDTH = 100


def run(command: options.Report) -> None:
    """Computes the statement, and prints or writes it."""
    output, chosen = command.output, "json" if command.json else command.format
    if output is not None and output.exists() and not command.overwrite:
        raise UsageError(
            f"--output must be a new file, or --overwrite given; got {str(output)!r}"
        )
    with usage(command, "RUN"):
        found = statements.statement(command.folder)
    if chosen == "text":
        table, file = _table(found), None if output is None else io.StringIO()
        console = Console(file=file, width=None if file is None else _WIDTH)
        console.print(table)
        text = "" if file is None else file.getvalue()
    elif chosen == "json":
        text = (json.dumps(found.fields) if output is None else found.to_json()) + "\n"
    else:
        text = found.to_html() if chosen == "html" else found.to_card()
    if output is None:
        print(text, end="")
        return
    try:
        ledger.replace(output, text.encode())
    except OSError as error:
        raise UsageError(
            f"--output must be one that can be written: {error}"
        ) from error


def _table(found: statements.Statement) -> Table:
    """Returns the statement as a table, a section of it for each part."""
    title = f"Privacy statement: {found.verdict}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(max_width=30)
    table.add_column(overflow="fold")
    for part in found.sections():
        table.add_section()
        table.add_row(Text(part.heading, style="bold"), "")
        for name, value in part.rows:
            table.add_row(Text(f"  {name}"), Text(value))
        for item in part.items:
            table.add_row("", Text(f"- {item}"))
    return table
