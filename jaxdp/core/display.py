"""Displays of results: a table of one screen in a terminal, an HTML table in a notebook.

A class gives its names and values in ``_table`` and takes both displays from here::

    __repr__, _repr_html_ = display.as_text, display.as_html
"""

import dataclasses
import html
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.core import validate
from jaxdp.kernels.sphere import path_str

#: Columns and lines of a screen.
WIDTH, HEIGHT = 100, 40
#: Lines of one value, and leaves of a tree that are named.
_LINES, _LEAVES = 3, 8
#: Lines of a note that are shown.
_NOTE = 30
#: Columns of a name at most.
_NAME = 36
_LEFT = ' style="text-align: left"'


class Table(NamedTuple):
    """Rows of a display under a title.

    Example:
      >>> table = Table("Run", [("steps", "40"), ("loss", "a < b")])
      >>> print(table.text())
      Run
        steps  40
        loss   a < b
      >>> "<td" in table.html() and "a &lt; b" in table.html()
      True

    Attributes:
      title: what the table shows, in one line.
      rows: cells of each row; a name and a value, unless there is a ``head``.
      head: names of the columns; empty for names and values.
      note: after the table: a line, or a few.
    """

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    note: str = ""

    def text(self) -> str:
        """Returns the table as text of at most 40 lines and 100 columns."""
        top = textwrap.wrap(plain(self.title), WIDTH, max_lines=2, placeholder=" ...")
        end = [
            line
            for part in self.note.split("\n")
            for line in textwrap.wrap(
                plain(part), WIDTH, max_lines=5, placeholder=" ..."
            )
        ]
        if len(end) > _NOTE:
            end = [*end[: _NOTE - 1], "..."]
        rows = [self.head, *self.rows] if self.head else self.rows
        rows = [list(map(plain, row)) for row in rows]
        lines = list(_grid(rows) if self.head else _pairs(rows))
        room = HEIGHT - len(top) - len(end)
        if len(lines) > room:
            left = len(lines) - room + 1
            lines = [*lines[: room - 1], f"  ... and {left} more lines"]
        return "\n".join([*top, *lines, *end])

    def html(self) -> str:
        """Returns the table as HTML; colours and fonts are the page's."""
        title = (
            f"<caption{_LEFT}>{_escaped(self.title)}</caption>" if self.title else ""
        )
        out = [f"<table>{title}"]
        if self.head:
            cells = "".join(f'<th scope="col">{_escaped(x)}</th>' for x in self.head)
            out.append(f"<thead><tr>{cells}</tr></thead>")
        out.append("<tbody>")
        for first, *rest in self.rows:
            cells = f'<th scope="row"{_LEFT}>{_escaped(first)}</th>'
            cells += "".join(f"<td{_LEFT}>{_escaped(x)}</td>" for x in rest)
            out.append(f"<tr>{cells}</tr>")
        note = f"<p>{_escaped(self.note)}</p>" if self.note else ""
        return "\n".join([*out, "</tbody></table>" + note])


def plain(text: Any) -> str:
    r"""Returns a text in one line, with a sign in place of what a terminal would obey.

    Example:
      >>> plain("a\nb\x1b[2J") == "a b\N{REPLACEMENT CHARACTER}[2J"
      True
    """
    line = " ".join(str(text).split("\n"))
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def _escaped(value: str) -> str:
    lines = map(plain, str(value).split("\n"))
    return "<br>".join(html.escape(line) for line in lines)


def _pairs(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Returns lines of names and values; long values go on below themselves."""
    width = min(_NAME, max((len(name) for name, _ in rows), default=0))
    for name, value in rows:
        name = name if len(name) <= width else name[: width - 3] + "..."
        room = WIDTH - width - 4
        parts = textwrap.wrap(value, room, max_lines=_LINES, placeholder=" ...") or [""]
        for i, part in enumerate(parts):
            yield f"  {'' if i else name:<{width}}  {part}".rstrip()


def _grid(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Returns lines of aligned cells, cut at the width of a screen."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  " + "  ".join(map(str.ljust, row, widths)).rstrip()
        yield line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."


def as_text(self: Any) -> str:
    """Returns the display of a result in a terminal: its ``__repr__``."""
    return self._table().text()


def as_html(self: Any) -> str:
    """Returns the display of a result in a notebook: its ``_repr_html_``."""
    return self._table().html()


def number(value: Any) -> str:
    """Returns a value in a few characters: floats with six digits.

    Example:
      >>> number(1 / 3), number(None), number({"a": 0.5, "b": [1, 2]})
      ('0.333333', 'none', 'a 0.5, b [1, 2]')
    """
    if value is None:
        return "none"
    if getattr(value, "shape", ()):
        return shape(value)
    if isinstance(value, float):
        return f"{float(value):.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        shown = ", ".join(map(number, value[:12]))
        return f"[{shown}, ...]" if len(value) > 12 else f"[{shown}]"
    return str(value)


def fields(record: Any, title: str | None = None) -> Table:
    """Returns the table of a dataclass's fields, titled by its class.

    Example:
      >>> @dataclasses.dataclass
      ... class Bound:
      ...     steps: int
      ...     error: float
      >>> print(fields(Bound(3, 0.25)).text())
      Bound
        steps  3
        error  0.25
    """
    names = [field.name for field in dataclasses.fields(record)]
    rows = [(name, number(getattr(record, name))) for name in names]
    return Table(title or type(record).__name__, rows)


def shape(leaf: Any) -> str:
    """Returns dtype and shape of an array, never its numbers.

    Example:
      >>> shape(np.zeros((3, 2), np.float32)), shape("abc")
      ('float32[3, 2]', 'str')
    """
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{validate.dtype_name(leaf.dtype)}{list(leaf.shape)}"


def tree(of: Any) -> str:
    """Returns a tree in one line, with dtypes and shapes for its leaves.

    Example:
      >>> tree({"x": np.zeros((3, 2)), "y": (np.zeros(3, int), 5)})
      '{x: float64[3, 2], y: (int64[3], int)}'
    """
    return str(jax.tree.map(_described, of)).replace("'", "")


class _Described(str):
    """Dtype and shape, in place of an array."""


def _described(leaf: Any) -> str:
    # A node of a tree may show itself by this function, when its leaves are described.
    return leaf if isinstance(leaf, _Described) else _Described(shape(leaf))


def shapes(name: str, tree: Any) -> list[tuple[str, str]]:
    """Returns rows of the shapes of a tree's leaves; numbers are not shown.

    Example:
      >>> shapes("params", {"w": np.zeros((3, 2)), "b": np.zeros(2)})
      [('params', '8 numbers in 2 leaves'), ('  b', 'float64[2]'), ('  w', 'float64[3, 2]')]
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if len(leaves) == 1 and not leaves[0][0]:
        return [(name, shape(leaves[0][1]))]
    total = sum(int(np.prod(np.shape(leaf))) for _, leaf in leaves)
    ending = "leaf" if len(leaves) == 1 else "leaves"
    rows = [(name, f"{total:,} numbers in {len(leaves)} {ending}")]
    rows += [(f"  {path_str(at)}", shape(leaf)) for at, leaf in leaves[:_LEAVES]]
    if len(leaves) > _LEAVES:
        rows.append(("  ...", f"and {len(leaves) - _LEAVES} more leaves"))
    return rows
