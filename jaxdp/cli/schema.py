"""``jaxdp schema``: a first schema of a table, from public rows."""

import json

from jaxdp.cli import options
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.cli.printing import show
from jaxdp.data import schema as schema_lib


def run(command: options.MakeSchema) -> None:
    """Guesses a schema, writes it and says what it is."""
    if command.out.exists() and not command.overwrite:
        raise UsageError(
            f"--out must be a new file, or --overwrite given: {command.out}"
        )
    with usage(command, "--public"):
        found = schema_lib.guess(command.public, command.label)
    text = json.dumps(found.as_dict(), indent=2)
    try:
        command.out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out must be one that can be written: {error}") from error
    if command.json:
        print(json.dumps(found.as_dict()))
        return
    rows = {name: _said(column) for name, column in found.columns.items()}
    label = ", ".join(found.classes) or f"number, {found.label_bounds}"
    show(
        {
            **rows,
            f"{found.label} (label)": label,
            "written": f"{command.out}: read it; bounds, categories and classes are public "
            "from now on, so no private row may have had a part in them",
        }
    )


def _said(column: schema_lib.Column) -> str:
    parts = [column.type]
    if column.bounds is not None:
        parts.append("{} to {}".format(*column.bounds))
    if column.categories:
        parts.append(", ".join(column.categories))
    if column.missing == "mark":
        parts.append("may be missing")
    return "; ".join(parts)
