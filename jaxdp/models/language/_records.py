"""Files of labelled texts, read line by line; every error names its place."""

import csv
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data import values
from jaxdp.models.language._files import Path

Record = Mapping[str, Any]


class _Read(dict[str, Any]):
    """Record with the place where it was read."""

    place: str


def read_records(
    path: Path, fields: Sequence[str] = (), *, private: bool = False
) -> list[dict[str, Any]]:
    """Reads ``.jsonl``, ``.csv`` or ``.tsv``: one record a line, as a dict.

    CSV and TSV begin with a line of names, and all their values are text. CSV cells may
    be quoted, but not go over several lines: how many records there are is public, and a
    quote that one record opens must not take others. JSON Lines hold texts of several
    lines. TSV cells are taken as they are.

    Args:
      path: the file, UTF-8.
      fields: names that every record must have.
      private: whether a line that is no record is one without fields, and not refused:
        one person's may not decide whether a run begins. It is a record all the same, so
        how many there are does not follow from what they hold. What is no UTF-8 is read
        as U+FFFD. A cell over several lines is refused.

    Raises:
      ValueError: naming the file, and the line and field at fault. What a record holds
        is said in ``with jaxdp.models.show_values():`` only, here and by all that encode
        records.
    """
    path = pathlib.Path(path)
    readers = {".jsonl": _read_jsonl, ".csv": _read_table, ".tsv": _read_table}
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise ValueError(f"path must end in {', '.join(readers)}, got {str(path)!r}")
    if not path.is_file():
        raise ValueError(f"path must be an existing file, got {str(path)!r}")
    records = []
    try:
        # utf-8-sig: spreadsheets write a byte-order mark.
        errors = "replace" if private else "strict"
        # A carriage return within a private record would make two of it.
        with path.open(
            newline="\n" if private else "", encoding="utf-8-sig", errors=errors
        ) as file:
            for line, record in readers[suffix](file, suffix, private):
                missing = [name for name in fields if name not in record]
                if missing:
                    raise _LineError(
                        line, f"has no field {missing[0]!r}{values.only(record)}"
                    )
                record = _Read(record)
                record.place = f"{path.name}, line {line}"
                records.append(record)
    except _LineError as error:
        raise ValueError(f"{path}, line {error.line}: {error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {values.decoding(error)}") from None
    if not records:
        raise ValueError(f"{path} has no records")
    return records


class _LineError(ValueError):
    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


def _read_jsonl(
    file: Any, _: str, private: bool
) -> Iterable[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not (text.strip("\r\n") if private else text.strip()):
            continue
        try:
            yield line, _object(text, line)
        except _LineError:
            if not private:
                raise
            yield line, {}


def _object(text: str, line: int) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise _LineError(line, f"is not JSON: {error}") from None
    except ValueError as error:  # An integer of thousands of digits.
        raise _LineError(
            line, "must hold numbers that Python reads" + values.got(str(error))
        ) from None
    except RecursionError:
        raise _LineError(line, "must hold lists and objects a few deep") from None
    if not isinstance(record, dict):
        raise _LineError(line, "must hold an object" + values.got(text.strip()[:40]))
    return record


def _read_table(
    file: Any, suffix: str, private: bool
) -> Iterable[tuple[int, dict[str, Any]]]:
    if suffix == ".tsv":
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(file, strict=True)
    names: list[str] = []
    before = 0
    while True:
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error:
            if not (private and names):
                raise
            cells = ["", *names]  # As many as no record has.
        if rows.line_num != before + 1:
            raise _LineError(
                before + 1,
                f"must be one record, got one up to line {rows.line_num}: a cell there has "
                "a line end between quotes, which .jsonl may hold",
            )
        before = rows.line_num
        if not cells and len(names) != 1:
            continue
        cells = cells or [""]  # A blank line where a record is one cell.
        if not names:
            names = [cell.strip() for cell in cells]
            if "" in names or len(set(names)) < len(names):
                raise _LineError(
                    rows.line_num, "must name each field once" + values.got(names)
                )
            continue
        whole = len(cells) == len(names)
        if not (whole or private):
            raise _LineError(
                rows.line_num,
                f"has {len(cells)} cells, but the first line has {len(names)}"
                + values.only(names),
            )
        yield rows.line_num, dict(zip(names, cells, strict=True)) if whole else {}


def labels(
    records: Sequence[Record],
    field: str,
    classes: Sequence[str | int],
    *,
    private: bool = False,
) -> np.ndarray:
    """Returns the class of each record, int32 (n,): the index of its text in ``classes``.

    The label ``1.0`` is of the class ``1``, and the label ``1`` of the class ``1.0``: one
    missing label makes pandas write all others of its column so. What a class is called
    comes first.

    Args:
      records: as read.
      field: name of the label.
      classes: texts of the classes.
      private: whether a record of no class gets -1, with which its loss is NaN and counts
        zero, and is not refused: one private label must not decide whether a run begins.

    Raises:
      ValueError: a record without the field, or with another text, by its number; not
        where they are private.
    """
    names = [str(name) for name in classes]
    if len(set(names)) < max(len(names), 1):
        raise ValueError(f"classes must be different names, got {[*classes]}")
    index = {_whole(name): i for i, name in enumerate(names)}
    index |= {name: i for i, name in enumerate(names)}
    out = np.empty(len(records), np.int32)
    for i, record in enumerate(records):
        if private:
            value: Any = record.get(field)
            known = isinstance(value, str | int | float)
            out[i] = _class(value, index) if known else -1
            continue
        value = text_of(record, field, i).strip()
        out[i] = _class(record[field], index)
        if out[i] < 0:
            raise ValueError(
                f"{values.place_of(record, i)}: {field} must be one of "
                f"{', '.join(names)}" + values.got(value)
            )
    return out


def _class(value: str | int | float, index: Mapping[str, int]) -> int:
    """Returns a label's class, or -1; of its own record alone."""
    return index.get(str(value).strip(), index.get(_whole(value), -1))


def _whole(value: str | int | float) -> str:
    """Returns a label's text, that of a whole number without its decimals."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", str(value).strip())  # A cell of text.


def text_of(record: Record, field: str, i: int) -> str:
    """Returns a field's text; ``i`` is the record's number from 0, for error messages."""
    if field not in record:
        raise ValueError(
            f"{values.place_of(record, i)} has no field {field!r}{values.only(record)}"
        )
    value = record[field]
    if not isinstance(value, str | int | float):
        raise ValueError(
            f"{values.place_of(record, i)}: {field} must be text" + values.got(value)
        )
    return str(value)
