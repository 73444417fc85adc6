"""Tables and figures of pages, made from the kept results: no figure is typed.

A table is described by a few lines of TOML. ``case`` and ``metric`` name a row of the JSON
file, with ``{row}`` and ``{column}`` filled in; a row or a column that differs in more is a
mapping, of these keys or of further words to fill in. A row's ``file`` is read in place of
the table's, and ``text`` is a cell of words.

``python -m bench._kept README.md`` writes the tables of a plain Markdown file again, where
such a description stands in a comment. The documentation has a directive for it
(``docs/_extensions/kept.py``).
"""

import functools
import json
import math
import pathlib
import re
import sys
import tomllib
from collections.abc import Mapping
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
#: What a description may say of a cell; other words of a row or a column are filled in.
KEYS = {"file", "case", "metric", "field", "digits", "missing", "baseline", "text"}


def path_of(name: str) -> pathlib.Path:
    """Returns the file of ``device/name``, or of ``cpu/name``."""
    return RESULTS / f"{name if '/' in name else f'cpu/{name}'}.json"


@functools.cache
def rows(name: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Returns the rows of a kept result, by case and metric."""
    path = path_of(name)
    if not path.exists():
        raise ValueError(f"{name!r} has no kept result: {path} does not exist")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        found.setdefault((row["case"], row["metric"]), []).append(row)
    return found


def number(value: float, digits: int) -> str:
    """Writes a number with so many significant digits."""
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    rounded = float(f"{value:.{digits}g}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(decimals, 0)}f}"


def figure(
    name: str,
    case: str,
    metric: str,
    field: str = "value",
    digits: int = 3,
    missing: str | None = None,
    baseline: str | None = None,
) -> str:
    """Returns one figure as text, with its 95% interval where the row has one.

    Of rows that differ in their baseline the first is taken, if none is named.

    Raises:
      ValueError: for a row or a field that the file does not have, unless ``missing``
        says what stands in its place.
    """
    found = rows(name).get((case, metric), [])
    row = next((r for r in found if baseline in (None, r["baseline"])), None)
    if row is None or row[field] is None:
        if missing is not None:
            return missing
        raise ValueError(f"{name} has no {field} of case {case!r}, metric {metric!r}")
    if field in ("unit", "note"):
        return row.get("note") or row["unit"]  # Older files have notes in units.
    value, width = row[field], row.get("half_width") if field == "value" else None
    if not width:
        return number(value, digits)
    # An interval has two digits, and its value as many behind the point.
    places = min(len(number(width, 2).partition(".")[2]), 4)
    if value and abs(value) < 0.5 / 10**places:
        return f"{number(value, 2)} ± {number(width, 2)}"
    return f"{value:.{places}f} ± {width:.{places}f}"


def table(name: str, text: str) -> str:
    """Returns the Markdown table that a description in TOML asks for.

    Raises:
      ValueError: for a description with other keys than those of the module's docstring,
        and for rows that the file does not have.
    """
    spec = tomllib.loads(text)
    if not {"rows", "columns"} <= set(spec):
        raise ValueError(f"a table of {name} must have rows and columns, got {text!r}")
    lines, columns = spec.pop("rows"), spec.pop("columns")
    if unknown := set(spec) - KEYS:
        raise ValueError(f"a table of {name} has unknown keys {sorted(unknown)}")
    made = {"": [*lines]}
    for head, column in columns.items():
        cells = [cell(name, spec, line, column) for line in lines.values()]
        if any(cells):  # Else nothing of it is kept, and ``missing`` is an empty text.
            made[head] = cells
    out = ["| " + " | ".join(made) + " |", "|" + "---|" * len(made)]
    out += ("| " + " | ".join(row) + " |" for row in zip(*made.values(), strict=True))
    return "\n".join(out)


def cell(name: str, spec: Mapping[str, Any], row: Any, column: Any) -> str:
    """Returns a cell of a table; what a column says comes before what a row says."""
    options, filled = dict(spec), {}
    for key, part in (("row", row), ("column", column)):
        words = part if isinstance(part, dict) else {key: part}
        options |= {k: v for k, v in words.items() if k in KEYS}
        filled |= {k: v for k, v in words.items() if k not in KEYS}
    if "text" in options:
        return options["text"].format(**filled)
    for key in ("file", "case", "metric"):
        if key in options:
            options[key] = options[key].format(**filled)
    return figure(options.pop("file", name), **options)


TABLE = re.compile(r"(<!-- kept (\S+)\n(.*?)-->\n).*?(?=<!-- end -->)", re.DOTALL)


def refreshed(text: str) -> str:
    """Returns a Markdown text whose tables are made anew from their descriptions."""

    def made(found: re.Match[str]) -> str:
        head, name, spec = found.groups()
        return f"{head}\n{table(name, spec)}\n\n"

    return TABLE.sub(made, text)


def main(paths: list[str]) -> None:
    """Writes the tables of the named files again."""
    for path in map(pathlib.Path, paths):
        text = path.read_text(encoding="utf-8")
        if (new := refreshed(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"{path}: tables made anew")


if __name__ == "__main__":
    main(sys.argv[1:])
