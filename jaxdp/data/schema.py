"""Public schemas of tables: how each column becomes numbers, one record at a time.

A schema says type, bounds or categories of every column, and what missing means. It is
public, and nothing is learned from the records: the features of one are a function of that
record and the schema alone. :func:`guess` writes a first schema, from public rows.
"""

import dataclasses
import datetime
import json
import math
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxdp.core import validate
from jaxdp.data import tables, values
from jaxdp.data.scaling import center_by_bounds

FORMAT = 1
SCALED = ("number", "integer", "date")
TYPES = (*SCALED, "category", "flag", "ignore")
SEPARATORS = (",", ";", "\t", "|")
#: Texts of a cell that say that there is no value.
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?")
_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")

#: Cells of a table as texts: names of the columns, rows, and the place of a row in words.
Cells = tuple[list[str], list[list[str]], Callable[[int], str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """Rule by which one column becomes features.

    Attributes:
      type: ``"number"``, ``"integer"`` or ``"date"``, scaled to [-1, 1] by ``bounds`` and
        clipped; ``"category"``, a feature for each of ``categories``, 1 or 0 (a value that
        is none of them has zeros); ``"flag"``, 1 for true or yes and -1 for false or no;
        ``"ignore"``, which is left out.
      bounds: low and high; of a date as ISO texts.
      categories: public values of a category.
      date_format: of dates, as ``datetime.strptime`` takes it; None is ISO 8601.
      missing: ``"error"``, or ``"mark"``: zeros, and one more feature that is 1.
    """

    type: str
    bounds: tuple[Any, Any] | None = None
    categories: tuple[str, ...] = ()
    date_format: str | None = None
    missing: str = "error"

    def __post_init__(self) -> None:
        validate.one_of(TYPES, type=self.type)
        validate.one_of(("error", "mark"), missing=self.missing)
        object.__setattr__(self, "categories", tuple(map(str, self.categories)))
        repeated = len(set(self.categories)) < len(self.categories)
        if (self.type == "category") != bool(self.categories) or repeated:
            raise ValueError(
                "categories must be different texts for a category, and only there, got "
                f"{list(self.categories)}"
            )
        if (self.type in SCALED) != (self.bounds is not None):
            raise ValueError(
                f"bounds must be [low, high] for {', '.join(SCALED)}, and only there, got "
                f"{self.bounds!r}"
            )
        if self.bounds is not None:
            low, high = self.limits
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError(f"bounds must have low < high, got {self.bounds!r}")

    @property
    def limits(self) -> tuple[float, float]:
        """Bounds as numbers; of dates in days."""
        try:
            low, high = self.bounds or (0, 0)
            if self.type == "date":
                return _days(str(low), None), _days(str(high), None)
            return float(low), float(high)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"bounds must be [low, high], numbers or ISO dates, got {self.bounds!r}"
            ) from error

    def names(self, name: str) -> list[str]:
        """Returns the names of the column's features."""
        if self.type == "ignore":
            return []
        own = [f"{name}={x}" for x in self.categories] or [name]
        return own + [f"{name} is missing"] * (self.missing == "mark")

    def read(self, text: str) -> float:
        """Returns the number that a cell stands for; ValueError if it stands for none."""
        if self.type == "date":
            return _days(text, self.date_format)
        if self.type == "flag":
            return 1.0 if _is_true(text) else -1.0
        value = float(text)
        if not math.isfinite(value) or (self.type == "integer" and value % 1):
            raise ValueError
        return value

    def features(self, text: str | None) -> list[float]:
        """Returns the features of a cell, None if it is missing, which must be allowed."""
        if self.type == "ignore":
            return []
        mark = [float(text is None)] * (self.missing == "mark")
        if text is None:
            return [0.0] * max(1, len(self.categories)) + mark
        if self.type == "category":
            return [float(text == x) for x in self.categories] + mark
        value = self.read(text)
        if self.type in SCALED:
            value = float(center_by_bounds(np.asarray(value), *self.limits))
        return [value, *mark]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """Public description of a table.

    Attributes:
      columns: every column but the label, by name.
      label: name of the label's column.
      classes: public values of the label, in order; empty for regression.
      label_bounds: low and high of a regression target, which is scaled to [0, 1].
      separator: of a text file's cells.
      header: whether the first line names the columns; else their names in order.
      missing: texts of a cell that say that there is no value.
    """

    columns: Mapping[str, Column]
    label: str
    classes: tuple[str, ...] = ()
    label_bounds: tuple[float, float] | None = None
    separator: str = ","
    header: bool | tuple[str, ...] = True
    missing: tuple[str, ...] = MISSING

    def __post_init__(self) -> None:
        validate.one_of(SEPARATORS, separator=self.separator)
        if bool(self.classes) == (self.label_bounds is not None):
            raise ValueError(
                f"the label {self.label!r} must have classes or bounds, and not both"
            )
        if isinstance(self.header, tuple):
            tables.check_names("header", self.header)
        if self.label in self.columns:
            raise ValueError(f"the label {self.label!r} must not be a feature, too")
        if not any(column.type != "ignore" for column in self.columns.values()):
            raise ValueError("columns must have at least one that is not ignored")

    @property
    def task(self) -> Literal["classification", "regression"]:
        return "classification" if self.classes else "regression"

    @property
    def feature_names(self) -> tuple[str, ...]:
        parts = (column.names(name) for name, column in self.columns.items())
        return tuple(name for names in parts for name in names)

    def as_dict(self) -> dict[str, Any]:
        """Returns the schema as what JSON holds, which :func:`load` reads."""

        def said(column: Column) -> dict[str, Any]:
            fields = dataclasses.asdict(column)
            return {k: v for k, v in fields.items() if v not in (None, (), "error")}

        label: dict[str, Any] = {"column": self.label}
        label |= {"classes": self.classes} if self.classes else {}
        label |= {"bounds": self.label_bounds} if self.label_bounds else {}
        return {
            "format": FORMAT,
            "separator": self.separator,
            "header": self.header,
            "missing": self.missing,
            "label": label,
            "columns": {name: said(column) for name, column in self.columns.items()},
        }

    def table(self, source: Any, *, labelled: bool = True) -> tables.Table:
        """Reads a file or a frame as the schema says.

        Args:
          source: path of a text or parquet file, or a frame of pandas, polars, pyarrow or
            ``datasets``.
          labelled: whether there must be a label; its column may be missing without.

        Returns:
          Features on their final scale, and labels as texts. One that is none of the
          classes is the caller's to judge, blank or not: it may be private.

        Raises:
          ValueError: a column that is not there or not known, or a cell that is not what
            the schema says, by its place.
        """
        wanted = [*self.columns, *([self.label] if labelled else [])]
        read = {
            name for name, column in self.columns.items() if column.type != "ignore"
        }
        read |= {self.label} if labelled else set()
        names, rows, place = cells_of(source, self.separator, self.header, read)
        absent = [name for name in wanted if name not in names]
        unknown = set(names) - {*self.columns, self.label}
        if absent or unknown:
            raise ValueError(
                "schema must name every column and no other: missing in the table "
                f"{absent}, {len(unknown)} in the table are not in the schema"
                + values.only(sorted(unknown))
            )
        at = {name: names.index(name) for name in wanted}
        features = np.empty((len(rows), len(self.feature_names)), np.float32)
        for i, row in enumerate(rows):
            features[i] = [
                x
                for name, column in self.columns.items()
                for x in self._cell(name, column, row[at[name]], place(i))
            ]
        texts = [row[at[self.label]] if labelled else "" for row in rows]
        no_label = set(self.missing) - set(self.classes)
        labels = ["" if text in no_label else text for text in texts]
        return tables.Table(
            self.feature_names, features, np.array(labels, np.str_), self.label, place
        )

    def _cell(self, name: str, column: Column, text: str, where: str) -> list[float]:
        if text in self.missing and column.type != "ignore":
            if column.missing == "error":
                raise ValueError(
                    f"{where}, column {name!r} must not be missing: the schema says "
                    '"mark" where it may be'
                )
            return column.features(None)
        try:
            return column.features(text)
        except ValueError:
            raise ValueError(
                f"{where}, column {name!r} must be of type {column.type}"
                + values.got(text)
            ) from None


def load(source: Any) -> Schema:
    """Reads a schema from a JSON file or a mapping; ValueError names what is wrong."""
    if isinstance(source, Schema):
        return source
    if not isinstance(source, Mapping):
        try:
            source = json.loads(pathlib.Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"schema must be a JSON file: {error}") from error
    given = dict(source) if isinstance(source, Mapping) else {}
    try:
        version = given.pop("format", FORMAT)
        label = dict(given.pop("label"))
        columns = {n: dict(c) for n, c in given.pop("columns").items()}
        fields: dict[str, Any] = {n: _frozen(x) for n, x in given.items()}
        if version != FORMAT:
            raise ValueError(
                f"format must be {FORMAT}, got {version!r}: a newer version of jaxdp "
                "wrote the schema"
            )
        made = {}
        for name, column in columns.items():
            try:
                made[name] = Column(**{n: _frozen(x) for n, x in column.items()})
            except (TypeError, ValueError) as error:
                raise ValueError(f"column {name!r}: {error}") from error
        return Schema(
            columns=made,
            label=label.pop("column"),
            classes=tuple(map(str, label.pop("classes", ()))),
            label_bounds=_frozen(label.pop("bounds", None)),
            **label,
            **fields,
        )
    except KeyError as error:
        raise ValueError(f"schema must have {error}, and has {[*given]}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"schema: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_true(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError
    return text.lower() in _TRUE


def _days(text: str, date_format: str | None) -> float:
    """Returns a date in days; ValueError for another text."""
    if date_format is not None:
        moment = datetime.datetime.strptime(text, date_format)
    else:
        moment = datetime.datetime.fromisoformat(text)
    naive = moment.replace(tzinfo=None) - datetime.datetime(1970, 1, 1)
    return naive / datetime.timedelta(days=1)


# --- cells -------------------------------------------------------------------------


def cells_of(
    source: Any,
    separator: str = ",",
    header: bool | tuple[str, ...] = True,
    read: Collection[str] | None = None,
) -> Cells:
    """Returns the cells of a file or a frame, as texts.

    Args:
      source: path of a text or parquet file, or a frame.
      separator: of the cells of a text file.
      header: as in :class:`Schema`.
      read: columns of a parquet file or a frame that are read; the cells of others are
        empty. None reads all.

    Raises:
      ValueError: no such file, two columns of one name, rows of different lengths, or a
        value that Python does not hold, by its place.
    """
    if not isinstance(source, str | pathlib.Path):
        return _frame(source, "the table", read)
    path = pathlib.Path(source)
    if path.suffix.lower() == ".parquet":
        try:
            from pyarrow import parquet  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError(
                f"path {str(path)!r} needs pyarrow: pip install 'jaxdp-optim[tables]'"
            ) from None
        try:
            dataset = parquet.ParquetDataset(path)  # A file, or a folder of its parts.
            names = dataset.schema.names
            # What is there twice is refused below.
            known = [name for name in names if names.count(name) == 1]
            found = [name for name in known if read is None or name in read]
            table = dataset.read(columns=found)
        except FileNotFoundError:
            raise
        except Exception as error:  # As of a part whose column has another type.
            raise ValueError(
                f"path {str(path)!r} cannot be read as Parquet files of one schema "
                f"({type(error).__name__}){values.got(str(error))}"
            ) from None
        return _columns(names, table, repr(str(path)), read)
    rows = tables.read_rows(path, separator, header=header is True)
    names = list(header) if isinstance(header, tuple) else rows[0][1]
    if header is True:
        tables.check_header(path, names)
        rows = rows[1:]

    def place(i: int) -> str:
        return f"row {i + 1} (line {rows[i][0]}) of {str(path)!r}"

    for i, (_, cells) in enumerate(rows):
        if len(cells) != len(names):
            raise ValueError(
                f"{place(i)} has {len(cells)} cells for {len(names)} columns separated by "
                f"{separator!r}"
            )
    return names, [cells for _, cells in rows], place


def _frame(frame: Any, called: str, read: Collection[str] | None) -> Cells:
    """Returns the cells of a frame of pandas, polars, pyarrow or ``datasets``."""
    names = getattr(frame, "column_names", None)
    names = getattr(frame, "columns", None) if names is None else names
    if names is None:
        raise TypeError(
            "path must be a file or a frame of pandas, polars, pyarrow or datasets, got "
            f"{type(frame).__name__}"
        )
    return _columns([str(name) for name in names], frame, called, read)


def _columns(
    names: list[str], frame: Any, called: str, read: Collection[str] | None
) -> Cells:
    tables.check_names(f"the header of {called}", names)

    def place(i: int) -> str:
        return f"row {i + 1} of {called}"

    columns = {
        name: _texts(name, frame[name], place)
        for name in names
        if read is None or name in read
    }
    blank = [""] * max(map(len, columns.values()), default=0)
    rows = zip(*(columns.get(name, blank) for name in names), strict=True)
    return names, [list(row) for row in rows], place


def _texts(name: str, column: Iterable[Any], place: Callable[[int], str]) -> list[str]:
    """Returns a column as texts; ValueError names the place of what cannot be read."""
    texts: list[str] = []
    try:
        for value in column:  # How many there are then says where it ended.
            value = value.as_py() if hasattr(value, "as_py") else value
            texts.append(_text(value))
    except Exception as error:  # A library's own message may quote the cell.
        raise ValueError(
            f"{place(len(texts))}, column {name!r} cannot be read "
            f"({type(error).__name__}){values.got(str(error))}"
        ) from None
    return texts


def _text(value: Any) -> str:
    """Returns a value as a cell of a file has it: empty where there is none."""
    # The NA of pandas has no truth value, not even compared with itself.
    if value is None or type(value).__name__ == "NAType" or value != value:  # NaN, NaT
        return ""
    if isinstance(value, datetime.date):
        return value.isoformat()
    # Not ``value % 1``, at whose infinite numbers NumPy warns.
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


# --- a first schema, from public rows ----------------------------------------------

#: So many different values make a column a text that no category describes.
_MOST_CATEGORIES = 50


def separator_of(path: pathlib.Path) -> str:
    """Returns the separator that splits the first line of a text file most often."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline()
    return max(SEPARATORS, key=first.count)


def guess(source: Any, label: str) -> Schema:
    """Writes a first schema from PUBLIC rows; read it before it is used.

    Types are the narrowest that take every cell, bounds are rounded outwards, and
    categories are those that occur.
    """
    separator = ","
    if isinstance(source, str | pathlib.Path):
        path = pathlib.Path(source)
        if not path.is_file():
            raise ValueError(f"path must be an existing file, got {str(path)!r}")
        if path.suffix.lower() != ".parquet":
            separator = separator_of(path)
    names, rows, _ = cells_of(source, separator)
    if label not in names:
        raise ValueError(f"label must be one of {', '.join(map(repr, names))}")
    columns = {
        name: _guessed([row[i] for row in rows])
        for i, name in enumerate(names)
        if name != label
    }
    column = names.index(label)
    found = sorted({row[column] for row in rows} - set(MISSING))
    numbers = [x for x in map(tables.number, found) if x is not None]
    if len(numbers) == len(found) > 20:
        fields: dict[str, Any] = {"label_bounds": _outwards(min(numbers), max(numbers))}
    else:
        fields = {"classes": tuple(found)}
    return Schema(columns=columns, label=label, separator=separator, **fields)


def _guessed(cells: Sequence[str]) -> Column:
    present = [x for x in cells if x not in MISSING]
    missing = "mark" if len(present) < len(cells) else "error"
    different = sorted(set(present))
    numbers = [x for x in map(tables.number, present) if x is not None]
    if not present:
        return Column(type="ignore")
    if len(numbers) == len(present) and all(map(math.isfinite, numbers)):
        whole = all(x % 1 == 0 for x in numbers)
        kind = "integer" if whole else "number"
        bounds: Any = _outwards(min(numbers), max(numbers))
        return Column(type=kind, bounds=bounds, missing=missing)
    if {x.lower() for x in present} <= {*_TRUE, *_FALSE}:
        return Column(type="flag", missing=missing)
    try:
        days = [_days(x, None) for x in present]
    except ValueError:
        if len(different) > _MOST_CATEGORIES:
            return Column(type="ignore")
        return Column(type="category", categories=tuple(different), missing=missing)
    begin = datetime.date(1970, 1, 1)
    years = [(begin + datetime.timedelta(days=x)).year for x in (min(days), max(days))]
    bounds = (f"{years[0]}-01-01", f"{years[1] + 1}-01-01")
    return Column(type="date", bounds=bounds, missing=missing)


def _outwards(low: float, high: float) -> tuple[float, float]:
    """Returns round bounds with a tenth of the range to spare; of no sign that is new."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span)) / 2
    ends = [
        math.floor((low - 0.1 * span) / step) * step,
        math.ceil((high + 0.1 * span) / step) * step,
    ]
    ends[0] = max(ends[0], 0.0) if low >= 0 else ends[0]
    round_to = max(0, 2 - math.floor(math.log10(step)))
    return round(ends[0], round_to), round(ends[1], round_to)
