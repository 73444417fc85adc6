"""Reader of CSV and NPZ files into checked arrays; every error names the cell.

No complaint says what is in it, unless ``show_values`` allows that.

Nothing here scales, splits or encodes: it only turns a file into finite numbers and
raw labels, or says in one line what is wrong with it.
"""

import csv
import itertools
import math
import pathlib
import zipfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdp.core import validate
from jaxdp.data import values

SUFFIXES = (".csv", ".npz")


class Table(NamedTuple):
    """A file's content: features as numbers, labels as they were written."""

    feature_names: tuple[str, ...]  # length d
    features: np.ndarray  # shape=(n, d), dtype=float64, finite
    labels: np.ndarray  # shape=(n,), str for CSV; the file's dtype for NPZ
    label_name: str
    place: Callable[[int], str]  # 0-based row -> where it is, for messages


def read(path: str | pathlib.Path, label: str | None) -> Table:
    """Reads a ``.csv`` or ``.npz`` file.

    Args:
      path: the file; its suffix decides the format.
      label: CSV: the label column's name, required. NPZ: the label array's name,
        ``"y"`` when None.

    Raises:
      ValueError: naming ``path`` or ``label`` and the row and column at fault.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"path must end in {' or '.join(SUFFIXES)}, or with a schema in .tsv or "
            f".parquet, got {str(path)!r}"
        )
    if not path.is_file():
        raise ValueError(f"path must be an existing file, got {str(path)!r}")
    return (_read_csv if path.suffix.lower() == ".csv" else _read_npz)(path, label)


def number(text: str) -> float | None:
    """Returns the number written in a cell, or None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None


# --- CSV ---------------------------------------------------------------------------


def read_cells(path: pathlib.Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Reads a CSV file: the header's cells, and line and cells of the rows below it."""
    rows = read_rows(path)
    return rows[0][1], rows[1:]


def read_rows(
    path: pathlib.Path, separator: str = ",", *, header: bool = True
) -> list[tuple[int, list[str]]]:
    """Reads line and cells of the rows of a text file, of which a header is the first.

    How many rows there are is public. So each record is one line, whatever its cells hold:
    blank cells are cells, and a quote that is not closed takes no other record. Empty
    lines are left out, but where rows have one cell; and blank rows above a header.

    Raises:
      ValueError: no such file, not even one row, or a row over several lines.
    """
    if not path.is_file():
        raise ValueError(f"path must be an existing file, got {str(path)!r}")
    try:
        # utf-8-sig: spreadsheets write a byte-order mark, which would otherwise
        # become part of the first column's name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            rows = [(reader.line_num, [c.strip() for c in row]) for row in reader]
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise ValueError(
            f"path {str(path)!r} is no UTF-8 CSV file: {values.decoding(error)}"
        ) from error
    for before, (line, _) in zip([0, *(line for line, _ in rows)], rows, strict=False):
        if line != before + 1:
            raise ValueError(
                f"path {str(path)!r} must have each row on one line, got one on the lines "
                f"{before + 1} to {line}: a cell there has a line end between quotes"
            )
    if header:
        rows = [*itertools.dropwhile(lambda row: not any(row[1]), rows)]
    if not rows:
        raise ValueError(f"path {str(path)!r} is empty: it must begin with a header")
    width = next((len(cells) for _, cells in rows if cells), 1)
    return [(line, cells or [""]) for line, cells in rows if cells or width == 1]


def check_width(where: str, path: pathlib.Path, cells: list[str], width: int) -> None:
    """Raises ValueError if a row has not one cell for each column of the header."""
    if len(cells) != width:
        raise ValueError(
            f"{where} of {str(path)!r} has {len(cells)} cells, but the header has "
            f"{width} columns"
        )


def _read_csv(path: pathlib.Path, label: str | None) -> Table:
    header, body = read_cells(path)
    check_header(path, header)
    if label not in header:
        # Without a header these would be the cells of a record.
        raise ValueError(
            f"label must be one of the {len(header)} columns that the first line names"
            f"{values.only(header)}; got {label!r}"
        )
    column = header.index(label)
    names = header[:column] + header[column + 1 :]
    features = np.empty((len(body), len(names)), np.float64)
    labels = []
    for i, (line, cells) in enumerate(body):
        where = f"row {i + 1} (line {line})"
        check_width(where, path, cells, len(header))
        labels.append(cells.pop(column))
        features[i] = [
            _cell(cell, f"{where}, column {name!r} of {str(path)!r}")
            for name, cell in zip(names, cells, strict=True)
        ]
    return Table(
        feature_names=tuple(names),
        features=features,
        labels=np.array(labels, dtype=np.str_),
        label_name=header[column],
        place=lambda i: f"row {i + 1} (line {body[i][0]}) of {str(path)!r}",
    )


def check_header(path: pathlib.Path, header: list[str]) -> None:
    """Raises ValueError unless the first line names every column, differently."""
    if all(number(name) is not None for name in header):
        raise ValueError(
            f"path {str(path)!r} must begin with a header line of column names, "
            "but the first line holds numbers"
        )
    for i, name in enumerate(header):
        if not name:
            raise ValueError(f"the header of {str(path)!r} has no name in cell {i + 1}")
    check_names(f"the header of {str(path)!r}", header)
    if len(header) < 2:
        raise ValueError(
            f"path {str(path)!r} must have a label and at least one feature column "
            f"separated by commas; its first line has {len(header)}"
        )


def check_names(called: str, names: Sequence[str]) -> None:
    """Raises ValueError if two columns have one name."""
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(
                f"{called} has one name in cells {names.index(name) + 1} and {i + 1}"
                + values.got(name)
            )


def _cell(text: str, where: str) -> float:
    value = number(text)
    if value is None or not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number" + values.got(text))
    return value


# --- NPZ ---------------------------------------------------------------------------


def _read_npz(path: pathlib.Path, label: str | None) -> Table:
    label = "y" if label is None else label
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise ValueError(
            f"path {str(path)!r} must be an NPZ file of plain arrays: {error}"
        ) from error
    found = ", ".join(repr(name) for name in arrays) or "none"
    if "x" not in arrays:
        raise ValueError(
            f"path {str(path)!r} must hold the features as array 'x', it has {found}"
        )
    if label == "x" or label not in arrays:
        raise ValueError(
            f"label must be an array of {str(path)!r} other than 'x' ({found}); "
            f"got {label!r}"
        )
    features, labels = _npz_features(path, arrays["x"]), arrays[label]
    if labels.dtype.kind == "b":
        labels = labels.astype(np.int32)
    if labels.shape != (len(features),):
        raise ValueError(
            f"array {label!r} of {str(path)!r} must have shape ({len(features)},), one "
            f"label per record of 'x', got {labels.shape}"
        )
    return Table(
        feature_names=tuple(f"x{j}" for j in range(features.shape[1])),
        features=features,
        labels=labels,
        label_name=label,
        place=lambda i: f"row {i + 1} of {str(path)!r}",
    )


def _npz_features(path: pathlib.Path, x: np.ndarray) -> np.ndarray:
    if x.ndim < 2 or x.dtype.kind not in "biuf" or x[:1].size == 0 < len(x):
        raise ValueError(
            f"array 'x' of {str(path)!r} must hold real numbers, shape (records, "
            f"features, ...), got shape {x.shape} of {validate.dtype_name(x.dtype)}"
        )
    width = math.prod(x.shape[1:])
    with np.errstate(all="ignore"):  # What no float64 holds is refused below.
        features = x.reshape(len(x), width).astype(np.float64)
    bad = np.argwhere(~np.isfinite(features))
    if bad.size:
        row, column = bad[0]
        raise ValueError(
            f"row {row + 1}, column 'x{column}' of {str(path)!r} must be a finite "
            f"number" + values.got(float(features[row, column]))
        )
    return features
