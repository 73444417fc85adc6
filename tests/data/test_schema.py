"""Schemas: every type of column, one record at a time, errors by their place."""

import datetime
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as arrow
import pytest
from pyarrow import parquet

from jaxdp import models
from jaxdp.data import schema as schemas

COLUMNS: dict[str, Any] = {
    "city": {"type": "category", "categories": ["Lyon", "Nice"], "missing": "mark"},
    "age": {"type": "integer", "bounds": [20, 60], "missing": "mark"},
    "income": {"type": "number", "bounds": [0, 1000]},
    "since": {"type": "date", "bounds": ["2020-01-01", "2020-01-11"]},
    "member": {"type": "flag"},
    "note": {"type": "ignore"},
}
SCHEMA: dict[str, Any] = {
    "format": 1,
    "separator": ";",
    "label": {"column": "bought", "classes": ["no", "yes"]},
    "columns": COLUMNS,
}
HEADER = "city;age;income;since;member;note;bought"
ROWS = (
    "Lyon;20;500;2020-01-06;yes;abc;yes",
    "Nice;70;1e3;2020-01-01;FALSE;;no",
    "Oslo;?;0;2020-01-11;0;x;yes",
    ";40;250;2020-01-03T12:00;t;x;no",
)
#: Of each row, by hand.
WANT = np.asarray(
    [
        [1, 0, 0, -1, 0, 0, 0, 1],
        [0, 1, 0, 1, 0, 1, -1, -1],
        [0, 0, 0, 0, 1, -1, 1, -1],
        [0, 0, 1, 0, 0, -0.5, -0.5, 1],
    ]
)
NAMES = (
    *("city=Lyon", "city=Nice", "city is missing", "age", "age is missing"),
    *("income", "since", "member"),
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(*rows: str, header: str = HEADER, name: str = "mine.csv") -> Path:
        path = tmp_path / name
        path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        return path

    return written


def changed(**column: Any) -> dict[str, Any]:
    """The schema with another column ``age``."""
    return SCHEMA | {"columns": COLUMNS | {"age": column}}


def test_every_type(write: Any) -> None:
    table = schemas.load(SCHEMA).table(write(*ROWS))
    assert table.feature_names == NAMES
    np.testing.assert_allclose(table.features, WANT, atol=1e-7)
    assert table.features.dtype == np.float32
    assert table.labels.tolist() == ["yes", "no", "yes", "no"]


def test_a_data_set(write: Any) -> None:
    data = models.load_file(write(*ROWS * 5), schema=SCHEMA, test_fraction=0.2)
    assert (data.num_classes, data.class_names) == (2, ("no", "yes"))
    assert data.feature_names == NAMES and data.task == "classification"
    assert "public schema" in data.note and "read from the file" not in data.note
    target = {"column": "income", "bounds": [0, 1000]}
    columns = {n: c for n, c in COLUMNS.items() if n != "income"}
    columns["bought"] = {"type": "flag"}
    found = SCHEMA | {"label": target, "columns": columns}
    data = models.load_file(write(*ROWS * 5), schema=found, test_fraction=0.2)
    assert data.task == "regression" and data.target_bounds == (0, 1000)
    values = np.concatenate([data.train[1], data.test[1]])
    assert sorted(set(values.tolist())) == [0, 0.25, 0.5, 1]


def test_one_record_is_a_function_of_itself(write: Any) -> None:
    """Other rows may change or leave: its features stay to the bit."""
    read = schemas.load(SCHEMA).table
    every = read(write(*ROWS)).features
    for i, row in enumerate(ROWS):
        alone = read(write(row)).features
        np.testing.assert_array_equal(alone[0], every[i])
    other = read(write(ROWS[0], "Lyon;1e9;-5;2100-01-01;n;;no", *ROWS[2:])).features
    np.testing.assert_array_equal(np.delete(other, 1, 0), np.delete(every, 1, 0))


def test_order_of_columns_and_lines_without_a_header(write: Any) -> None:
    reordered = [";".join(reversed(row.split(";"))) for row in ROWS]
    header = ";".join(reversed(HEADER.split(";")))
    path = write(*reordered, header=header)
    np.testing.assert_allclose(schemas.load(SCHEMA).table(path).features, WANT)
    found = SCHEMA | {"header": HEADER.split(";"), "separator": "\t"}
    rows = [row.replace(";", "\t") for row in ROWS]
    path = write(*rows[1:], header=rows[0], name="mine.tsv")
    np.testing.assert_allclose(schemas.load(found).table(path).features, WANT)


def test_dates_of_another_format(write: Any) -> None:
    date = COLUMNS["since"] | {"date_format": "%d/%m/%Y"}
    found = schemas.load(SCHEMA | {"columns": COLUMNS | {"since": date}})
    row = ROWS[0].replace("2020-01-06", "06/01/2020")
    np.testing.assert_allclose(found.table(write(row)).features, WANT[:1])


class Series(list):
    """A column of pandas or polars: a sequence."""


class Arrow(Series):
    """A column of pyarrow, whose elements are scalars."""

    def __iter__(self) -> Any:
        return iter([Scalar(self[i]) for i in range(len(self))])


class Scalar:
    """An element of a column of pyarrow; errors are raised when it is read."""

    def __init__(self, value: Any):
        self.value = value

    def as_py(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize(
    ("names", "kind"),
    [("columns", Series), ("column_names", Series), ("column_names", Arrow)],
    ids=["pandas and polars", "datasets", "pyarrow"],
)
def test_frames(names: str, kind: Any) -> None:
    """None, NaN, dates and whole floats are cells like those of a file."""
    frame: dict[str, Any] = {
        "city": ["Lyon", "Nice", "Oslo", None],
        "age": [20.0, 70.0, float("nan"), 40.0],
        "income": np.asarray([500, 1000, 0, 250]).tolist(),
        "since": [
            datetime.date(2020, 1, 6),
            datetime.datetime(2020, 1, 1),
            "2020-01-11",
            datetime.datetime(2020, 1, 3, 12),
        ],
        "member": [True, False, False, True],
        "note": [1, 2, 3, None],
        "bought": ["yes", "no", "yes", "no"],
    }
    columns = {name: kind(values) for name, values in frame.items()}
    frame_type = type("Frame", (dict,), {names: property(lambda self: [*self])})
    table = schemas.load(SCHEMA).table(frame_type(columns))
    np.testing.assert_allclose(table.features, WANT, atol=1e-7)
    assert table.place(2) == "row 3 of the table"


def test_json_and_back(tmp_path: Path) -> None:
    found = schemas.load(SCHEMA)
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(found.as_dict()), encoding="utf-8")
    assert schemas.load(path) == found == schemas.load(found)


#: Change of the schema, and what the error says.
WRONG: dict[str, Any] = {
    "column 'age': type must be one of": changed(type="text"),
    "column 'age': bounds must be": changed(type="integer"),
    "column 'age': bounds must have low < high": changed(type="number", bounds=[1, 1]),
    "column 'age': bounds must be .low, high., numbers": changed(
        type="date", bounds=["a", "b"]
    ),
    "column 'age': categories must be different": changed(
        type="category", categories=["a", "a"]
    ),
    "column 'age': missing must be one of": changed(type="flag", missing="drop"),
    "column 'age': .*unexpected keyword": changed(type="flag", scale=1),
    "format must be 1, got 2": SCHEMA | {"format": 2},
    "schema must have 'label'": {"columns": COLUMNS},
    "must have classes or bounds": SCHEMA | {"label": {"column": "bought"}},
    "must not be a feature, too": SCHEMA
    | {"label": {"column": "age", "bounds": [0, 1]}},
    "separator must be one of": SCHEMA | {"separator": "-"},
    "at least one that is not ignored": SCHEMA
    | {"columns": {"note": {"type": "ignore"}}},
    "schema must be a JSON file": 3,
}


@pytest.mark.parametrize("message", WRONG, ids=str)
def test_wrong_schemas(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schemas.load(WRONG[message])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "Lyon;2x;5;2020-01-06;yes;;yes",
            r"row 2 \(line 3\) .*column 'age' must be of type int",
        ),
        ("Lyon;2.5;5;2020-01-06;yes;;yes", "column 'age' must be of type integer"),
        ("Lyon;20;inf;2020-01-06;yes;;yes", "column 'income' must be of type number"),
        ("Lyon;20;5;yesterday;yes;;yes", "column 'since' must be of type date"),
        ("Lyon;20;5;2020-01-06;maybe;;yes", "column 'member' must be of type flag"),
        ("Lyon;20;NA;2020-01-06;yes;;yes", "column 'income' must not be missing"),
        # Row 2 is a public one, whose label must be of a class.
        ("Lyon;20;5;2020-01-06;yes;;", "column 'bought' must be one of"),
        ("Lyon;20;5;2020-01-06;yes;;perhaps", "column 'bought' must be one of"),
        ("Lyon;20;5", r"row 2 \(line 3\) .* has 3 cells for 7 columns"),
    ],
)
def test_wrong_cells(write: Any, row: str, message: str) -> None:
    """They are named by their place, and not shown."""
    path = write(ROWS[0], row, *ROWS[2:])
    with pytest.raises(ValueError, match=message) as caught:
        models.load_file(path, schema=SCHEMA, test_fraction=0.7)
    for cell in ("2x", "yesterday", "maybe", "perhaps"):
        assert cell not in str(caught.value).replace(str(path), "")


def test_wrong_columns_and_arguments(write: Any) -> None:
    path = write(*[row + ";1" for row in ROWS], header=HEADER + ";secret")
    with pytest.raises(ValueError, match=r"1 in the table are not in the schema$"):
        models.load_file(path, schema=SCHEMA)
    without = write(*(row.partition(";")[2] for row in ROWS), header=HEADER[5:])
    with pytest.raises(ValueError, match=r"missing in the table \['city'\]"):
        models.load_file(without, schema=SCHEMA)
    for name, value in {"label": "bought", "bounds": (0, 1), "classes": 2}.items():
        with pytest.raises(ValueError, match=f"{name} must be None with a schema"):
            models.load_file(write(*ROWS), schema=SCHEMA, **{name: value})
    with pytest.raises(TypeError, match="path must be a file or a frame"):
        models.load_file(3, schema=SCHEMA)


def test_parquet_needs_its_extra(write: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write(*ROWS, name="mine.parquet")
    with pytest.raises(ValueError, match=r"jaxdp-optim\[tables\]"):
        models.load_file(path, schema=SCHEMA)


def test_a_first_schema(write: Any) -> None:
    """The narrowest types, bounds outwards, and it reads its own table."""
    rows = [
        *ROWS,
        *(f"Nice;{20 + i};{7.5 * i};2021-05-0{i + 1};no;n{i};no" for i in range(9)),
    ]
    found = schemas.guess(write(*rows), "bought")
    kinds = {name: column.type for name, column in found.columns.items()}
    assert kinds == {name: c["type"] for name, c in COLUMNS.items()} | {
        "note": "category"
    }
    assert (found.classes, found.separator) == (("no", "yes"), ";")
    assert found.columns["city"].missing == "mark"
    assert found.columns["income"].missing == "error"
    for name, low, high in (("age", 20, 70), ("income", 0, 1000)):
        bounds = found.columns[name].limits
        assert 0 <= bounds[0] <= low and high < bounds[1] <= 2 * high
    assert found.columns["since"].bounds == ("2020-01-01", "2022-01-01")
    assert len(found.table(write(*rows)).features) == len(rows)
    assert schemas.load(found.as_dict()) == found
    target = schemas.guess(
        write(*(f"{i};{i * 1.5}" for i in range(30)), header="a;b"), "b"
    )
    assert target.label_bounds == (0.0, 50.0) and not target.classes
    with pytest.raises(ValueError, match="label must be one of"):
        schemas.guess(write(*rows), "sold")


# --- real frames, where their libraries are installed -------------------------------


def test_the_missing_value_of_pandas_has_no_truth_value() -> None:
    class NAType:
        def __ne__(self, other: object) -> Any:
            return self

        def __bool__(self) -> bool:
            raise TypeError("boolean value of NA is ambiguous")

    class Frame:
        columns = ("a",)

        def __getitem__(self, name: str) -> list[Any]:
            return [NAType(), float("nan"), None, 2.0, "x "]

    _, rows, _ = schemas.cells_of(Frame())
    assert rows == [[""], [""], [""], ["2"], ["x"]]


@pytest.mark.parametrize("kind", ["pandas", "pandas, nullable", "polars", "pyarrow"])
def test_frames_give_what_the_file_gives(write: Any, kind: str) -> None:
    library, _, how = kind.partition(", ")
    # The development extra brings the others.
    load = pytest.importorskip if library == "polars" else importlib.import_module
    module = load(library)
    day = datetime.datetime
    columns: dict[str, Any] = {
        "city": ["Lyon", "Nice", "Oslo", None],
        "age": [20, 70, None, 40],
        "income": [500.0, 1e3, 0.0, 250.0],
        "since": [
            day(2020, 1, 6),
            day(2020, 1, 1),
            day(2020, 1, 11),
            day(2020, 1, 3, 12),
        ],
        "member": [True, False, False, True],
        "note": ["abc", None, "x", "x"],
        "bought": ["yes", "no", "yes", "no"],
    }
    make = module.table if library == "pyarrow" else module.DataFrame
    frame = make(columns)
    if how:
        frame = frame.convert_dtypes()
    schema = schemas.load(SCHEMA)
    found, wanted = schema.table(frame), schema.table(write(*ROWS))
    np.testing.assert_allclose(found.features, wanted.features)
    np.testing.assert_array_equal(found.labels, wanted.labels)


ONE: dict[str, Any] = {
    "label": {"column": "y", "classes": ["0", "1"]},
    "columns": {
        "t": {"type": "date", "bounds": ["1900-01-01", "2030-01-01"]},
        "x": {"type": "integer", "bounds": [0, 4]},
    },
}


class Frame(dict):
    """A frame of four rows whose column ``t`` is given."""

    def __init__(self, t: Any):
        super().__init__(t=t, x=range(4), y="0101")

    @property
    def columns(self) -> list[str]:
        return [*self]


def of_parquet(kind: str, path: Path) -> Path:
    """Writes a column whose third cell has a value that Python cannot hold."""
    if kind == "a text that is not UTF-8":
        cells = arrow.array([b"abc", b"abc", b"Zo\xeb M.", b"abc"], arrow.binary())
        text = arrow.string()
        cells = arrow.Array.from_buffers(text, 4, cells.buffers())
    else:
        days = [18_000, 18_000, 5_000_000, 18_000]
        cells = arrow.array(days, arrow.int32()).cast(arrow.date32())
    table = {"t": cells, "x": [0, 1, 2, 3], "y": ["0", "1", "0", "1"]}
    parquet.write_table(arrow.table(table), path)
    return path


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("a text that is not UTF-8", "UnicodeDecodeError", "0xeb"),
        ("a far date", "OverflowError", "out of range"),
        ("nanoseconds without pandas", "ValueError", "567993600123456789"),
    ],
)
def test_what_a_library_says_of_a_cell_is_hidden(
    tmp_path: Path, kind: str, error: str, said: str
) -> None:
    if kind == "nanoseconds without pandas":
        # The words of pyarrow, which are others where pandas is installed.
        strange = ValueError(
            f"Nanosecond resolution temporal type {said} is not safely"
        )
        source: Any = Frame(Arrow(["2001-01-01", "2001-01-01", strange, "2001-01-01"]))
        called = "the table"
    else:
        source = of_parquet(kind, tmp_path / "people.parquet")
        called = repr(str(source))
    read = schemas.load(ONE).table
    with pytest.raises(ValueError, match="kept back") as caught:
        read(source)
    assert f"row 3 of {called}, column 't' cannot be read ({error})" in str(
        caught.value
    )
    assert said not in str(caught.value).replace(str(source), "")
    # No traceback shows it either.
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    with models.show_values(), pytest.raises(ValueError, match=said):
        read(source)
    # What is ignored is not read.
    ignored = ONE["columns"] | {"t": {"type": "ignore"}}
    table = schemas.load(ONE | {"columns": ignored}).table(source)
    assert table.feature_names == ("x",)
    np.testing.assert_array_equal(table.features[:, 0], [-1, -0.5, 0, 0.5])
    assert table.labels.tolist() == ["0", "1", "0", "1"]


@pytest.mark.parametrize("kind", ["pandas", "pyarrow", "parquet", "a schema's header"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    names, cells = ["x", "Zoe", "Zoe", "y"], [[0, 1], [2, 3], [4, 5], [0, 1]]
    source: Any = pandas.DataFrame(dict(enumerate(cells))).set_axis(names, axis=1)
    called = "the header of the table"
    if kind in ("pyarrow", "parquet"):
        source = arrow.table(cells, names=names)
    if kind == "parquet":
        path = tmp_path / "mine.parquet"
        parquet.write_table(source, path)
        source, called = path, f"the header of {str(path)!r}"
    more = {"header": names} if kind == "a schema's header" else {}
    called = "header" if more else called

    def read() -> None:
        schemas.load(ONE | {"columns": {"x": ONE["columns"]["x"]}} | more).table(source)

    with pytest.raises(ValueError, match="kept back") as caught:
        read()
    assert f"{called} has one name in cells 2 and 3" in str(caught.value)
    assert "Zoe" not in str(caught.value)
    with models.show_values(), pytest.raises(ValueError, match="Zoe"):
        read()


def test_an_infinite_number_of_a_frame_warns_of_nothing() -> None:
    cells = np.array([1.0, np.inf, np.nan, 0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, rows, _ = schemas.cells_of(Frame(cells))
    assert [row[0] for row in rows] == ["1", "inf", "", "0.5"]


def test_parquet_and_datasets_give_what_the_file_gives(
    write: Any, tmp_path: Path
) -> None:
    path = write(*ROWS)
    frame = pandas.read_csv(path, sep=";")
    frame.to_parquet(tmp_path / "mine.parquet")
    schema = schemas.load(SCHEMA)
    wanted = schema.table(path).features
    parts = tmp_path / "parts.parquet"  # A folder, as Spark writes them.
    parts.mkdir()
    frame[:2].to_parquet(parts / "part-0.parquet")
    frame[2:].to_parquet(parts / "part-1.parquet")
    given: list[Any] = [tmp_path / "mine.parquet", parts]
    import datasets  # It takes a second.

    given.append(datasets.Dataset.from_pandas(frame))
    for source in given:
        np.testing.assert_allclose(schema.table(source).features, wanted)


def test_blank_records_of_a_file_without_a_header_stay(tmp_path: Path) -> None:
    """How many records there are must not follow from what the first ones hold."""
    columns = {
        "a": schemas.Column(type="integer", bounds=(0, 10), missing="mark"),
        "b": schemas.Column(type="category", categories=("x", "y"), missing="mark"),
    }
    schema = schemas.Schema(
        columns=columns, label="y", classes=("0", "1"), header=("a", "b")
    )
    for text in ("5,x\n6,y\n7,x\n", ",\n6,y\n7,x\n", ",\n,\n7,x\n"):
        (tmp_path / "table.csv").write_text(text)
        table = schema.table(tmp_path / "table.csv", labelled=False)
        assert len(table.features) == 3
    # Of one column too, where a blank record is an empty line.
    one = schemas.Schema(
        columns={"a": columns["a"]}, label="y", classes=("0", "1"), header=("a",)
    )
    for text in ("5\n6\n7\n", "\n6\n7\n", "\n\n\n"):
        (tmp_path / "table.csv").write_text(text)
        assert len(one.table(tmp_path / "table.csv", labelled=False).features) == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [([1.5], ["s3cret"]), ([1], [31337000000000]), ([1], [0.31337])],
)
def test_parts_of_other_types_are_refused_without_their_cells(
    first: list[Any], second: list[Any], tmp_path: Path
) -> None:
    """Of a folder pyarrow casts all parts to the first one's types, and quotes a cell."""
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "parts.parquet"
    path.mkdir()
    narrow = pa.int32() if first == [1] else None
    for i, column in enumerate((pa.array(first, narrow), pa.array(second))):
        parquet.write_table(pa.table({"age": column}), path / f"{i}.parquet")
    with pytest.raises(ValueError, match=r"Parquet files of one schema") as caught:
        schemas.cells_of(path)
    assert not any(word in str(caught.value) for word in ("s3cret", "31337"))
    assert caught.value.__suppress_context__
