"""Conversion of tables to codes of a finite domain, and back, by given bins.

Bins are public: they are never learned from the records. A record that they do not
describe (a number that is none, a value that no list has) is no error, for an error would
tell that somebody has it: unless the column names a value for all others, the record gets
the code -1, which counts zero in every query. A column may have a cell for its blanks.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data import tables
from jaxdp.data import values as values_lib
from jaxdp.data.schema import MISSING

#: The most cells of a domain: tables of that size are held in memory, several at a time.
MAX_CELLS = 2**22
#: The code of a record that the bins do not describe.
OUTSIDE = -1

_ALLOWED = (
    'a mapping from each column to {"edges": [0, 18, 65, 120]}, at least three ascending '
    'finite numbers, or to {"values": ["f", "m"]}, at least two different values, of '
    'which "other" may name the one for all unknown values; "missing": "mark" beside '
    "either makes blanks one more cell"
)


@dataclasses.dataclass(frozen=True)
class Column:
    """One column's bins; made by :func:`binning`.

    Attributes:
      name: in the header of the table.
      edges: ascending numbers, one more than bins. A bin holds its low edge and not its
        high one; numbers beyond the edges belong to the first and the last bin.
      values: the texts of a column of categories, instead.
      other: which of the values stands for texts that are none of them; None: no value.
      missing: whether blanks are a cell, the last. A blank is a text of
        :data:`jaxdp.data.schema.MISSING` that is none of the values.
    """

    name: str
    edges: tuple[int | float, ...] = ()
    values: tuple[str, ...] = ()
    other: str | None = None
    missing: bool = False

    @property
    def num_cells(self) -> int:
        return (len(self.values) or len(self.edges) - 1) + self.missing

    @functools.cached_property
    def integral(self) -> bool:
        """True if all edges are integers; numbers are then written as integers."""
        return all(isinstance(edge, int) for edge in self.edges)

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """Label of each cell, in words."""
        ends = itertools.pairwise(self.edges)
        own = self.values or tuple(f"{low:g} to {high:g}" for low, high in ends)
        return own + ("missing",) * self.missing

    def texts(self, cells: np.ndarray, uniforms: np.ndarray) -> list[str]:
        """Writes a value of each cell: its category, a number drawn in its bin, or a blank.

        Args:
          cells: integers (n,) in [0, num_cells).
          uniforms: float64 (n,) in [0, 1): which number of the bin.
        """
        blank = self.num_cells - 1 if self.missing else None
        if self.values:
            return ["" if cell == blank else self.values[cell] for cell in cells]
        return [
            ""
            if cell == blank
            else _within(
                self.edges[cell], self.edges[cell + 1], float(u), self.integral
            )
            for cell, u in zip(cells, uniforms, strict=True)
        ]

    def cells(self, texts: Iterable[str]) -> np.ndarray:
        """Returns the cell of each text: int32, or -1 for none."""
        texts = [text.strip() for text in texts]
        found = self._described(texts)
        if self.missing:
            blank = [text in MISSING and text not in self.values for text in texts]
            found[np.array(blank, bool)] = self.num_cells - 1
        return found

    def _described(self, texts: Sequence[str]) -> np.ndarray:
        if self.values:
            known = {text: i for i, text in enumerate(self.values)}
            others = OUTSIDE if self.other is None else known[self.other]
            return np.array([known.get(text, others) for text in texts], np.int32)
        numbers = np.array([tables.number(text) for text in texts], np.float64)
        inner = np.array(self.edges[1:-1], np.float64)
        bins = np.searchsorted(inner, numbers, side="right")
        return np.where(np.isnan(numbers), OUTSIDE, bins).astype(np.int32)

    def undescribed(self, texts: Sequence[str]) -> list[str]:
        """Says which of PUBLIC texts have no cell, how many, and what describes them."""
        found = zip(texts, self.cells(texts), strict=True)
        outside = [text.strip() for text, cell in found if cell == OUTSIDE]
        blanks = sum(text in MISSING for text in outside)
        others = len(outside) - blanks
        said = []
        if blanks:
            said.append(f'blanks ({blanks}; "missing": "mark" describes them)')
        if others and self.values:
            said.append(f'values of no list ({others}; "other" names one for them)')
        elif others:
            said.append(f"texts that are no numbers ({others})")
        return said


def _within(low: Any, high: Any, uniform: float, integral: bool) -> str:
    """Returns a number in [low, high): an integer, or of six digits if that lies within."""
    if integral:
        return str(low + min(int(uniform * (high - low)), high - low - 1))
    # Both ends are scaled, so that nothing overflows; rounding may reach the high one.
    number = min(low * (1 - uniform) + high * uniform, math.nextafter(high, low))
    short = f"{number:.6g}"
    return short if low <= float(short) < high else repr(max(float(low), number))


@dataclasses.dataclass(frozen=True)
class Binning:
    """All columns' bins: a product domain; made by :func:`binning`."""

    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of cells of each column."""
        return tuple(column.num_cells for column in self.columns)

    @property
    def domain_size(self) -> int:
        return math.prod(self.sizes)

    def encode(self, rows: Sequence[Sequence[str]]) -> np.ndarray:
        """Encodes records as codes; each depends on its own record alone.

        Args:
          rows: n records of texts, in the order of the columns.

        Returns:
          int32 (n,), in [0, domain_size), the last column moving fastest; -1 where a
          column has no cell for the text.

        Privacy:
          A record lies in one cell of each column, or in none of any. Cells of blanks are
          cells as all others: a record with a blank moves one count of each marginal, and
          the sensitivity is that of bins without them.
        """
        codes = np.zeros(len(rows), np.int64)
        inside = np.ones(len(rows), bool)
        for j, column in enumerate(self.columns):
            cells = column.cells(row[j] for row in rows)
            inside &= cells != OUTSIDE
            codes = codes * column.num_cells + cells
        return np.where(inside, codes, OUTSIDE).astype(np.int32)

    def decode(self, codes: np.ndarray, uniforms: np.ndarray) -> list[list[str]]:
        """Decodes codes to texts: a category, a number drawn within the bin, or a blank.

        Args:
          codes: integers (n,) in [0, domain_size).
          uniforms: float64 (n, columns) in [0, 1).
        """
        cells = np.unravel_index(np.asarray(codes), self.sizes)
        columns = [
            column.texts(numbers, draws)
            for column, numbers, draws in zip(
                self.columns, cells, uniforms.T, strict=True
            )
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def undescribed(self, rows: Sequence[Sequence[str]]) -> str:
        """Says which columns have no cell for some of PUBLIC records, and the remedy."""
        said = []
        for column, texts in zip(self.columns, zip(*rows, strict=True), strict=True):
            if found := column.undescribed(texts):
                said.append(f"column {column.name!r}: {', '.join(found)}")
        return "; ".join(said)


# --- what is given -----------------------------------------------------------------


def binning(bins: Mapping[str, Any] | str | pathlib.Path) -> Binning:
    """Reads bins, from a mapping or a JSON file of one.

    ``{"age": {"edges": [0, 18, 40, 65, 120]}, "sex": {"values": ["f", "m", "x"], "other":
    "x"}}`` has 4 times 3 cells; ``"missing": "mark"`` makes blanks of a column one more.

    Raises:
      ValueError: no such file, another form, or more than ``MAX_CELLS`` cells in all.
    """
    if not isinstance(bins, Mapping):
        bins = _read_json(pathlib.Path(bins))
    if not bins:
        raise ValueError(f"bins must be {_ALLOWED}; got no column")
    made = Binning(tuple(_column(name, spec) for name, spec in bins.items()))
    if made.domain_size > MAX_CELLS:
        product = " x ".join(str(size) for size in made.sizes)
        raise ValueError(
            f"bins must have at most {MAX_CELLS} cells in all, one for each combination; "
            f"got {product} = {made.domain_size}"
        )
    return made


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a name is there twice")
        return dict(pairs)

    try:
        text = path.read_text(encoding="utf-8-sig")
        bins = json.loads(text, object_pairs_hook=unique)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"bins must be a JSON file, got {str(path)!r}: {values_lib.decoding(error)}"
        ) from error
    if not isinstance(bins, dict):
        raise ValueError(f"bins must be {_ALLOWED}; got a {type(bins).__name__}")
    return bins


def _column(name: str, spec: Any) -> Column:
    where = f"bins must be {_ALLOWED}; column {name!r} has {spec!r}"
    keys = set(spec) if isinstance(spec, Mapping) else set()
    missing = "missing" in keys
    if missing and spec["missing"] != "mark":
        raise ValueError(where)
    keys -= {"missing"}
    if keys == {"edges"} and isinstance(spec["edges"], list | tuple):
        edges = tuple(spec["edges"])
        good = all(type(e) in (int, float) and math.isfinite(e) for e in edges)
        rising = good and all(a < b for a, b in itertools.pairwise(edges))
        if len(edges) >= 3 and rising:
            return Column(name, edges=edges, missing=missing)
    if keys in ({"values"}, {"values", "other"}) and isinstance(
        spec["values"], list | tuple
    ):
        good = all(type(value) in (int, str) for value in spec["values"])
        values = tuple(str(value).strip() for value in spec["values"])
        other = str(spec["other"]).strip() if "other" in keys else None
        different = len(set(values)) == len(values) >= 2
        blank = missing and "" in values  # Two cells would be written alike.
        if good and different and not blank and (other is None or other in values):
            return Column(name, values=values, other=other, missing=missing)
    raise ValueError(where)


# --- tables ------------------------------------------------------------------------


def read_rows(path: str | pathlib.Path, names: Sequence[str]) -> list[list[str]]:
    """Reads the named columns of a CSV file with a header line; others are left out.

    Returns:
      One list of texts for each row, in the order of ``names``.

    Raises:
      ValueError: no such file, a Parquet file, no such columns, or a row of another length.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() == ".parquet":
        raise ValueError(f"path must be a CSV file, got {str(path)!r}: write it as one")
    header, body = tables.read_cells(path)
    for name in names:
        if header.count(name) != 1:
            raise ValueError(
                f"the header of {str(path)!r} must have each column of the bins once, "
                f"got {header.count(name)} of {name!r}{values_lib.only(header)}"
            )
    for i, (line, cells) in enumerate(body):
        tables.check_width(f"row {i + 1} (line {line})", path, cells, len(header))
    where = [header.index(name) for name in names]
    return [[cells[j] for j in where] for _, cells in body]
