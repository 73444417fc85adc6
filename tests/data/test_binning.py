"""Tables to codes and back; bins that are wrong; records that bins do not describe."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdp.data.binning import MAX_CELLS, Binning, binning, read_rows

SPEC: dict[str, Any] = {
    "age": {"edges": [0, 18, 40, 120]},
    "sex": {"values": ["f", "m"]},
    "height": {"edges": [1.0, 1.5, 2.5]},
    "town": {"values": ["A", "B", "else"], "other": "else"},
}


@pytest.fixture
def bins() -> Binning:
    return binning(SPEC)


def test_sizes_and_words(bins: Binning) -> None:
    assert bins.names == ("age", "sex", "height", "town")
    assert (bins.sizes, bins.domain_size) == ((3, 2, 2, 3), 36)
    age, sex, height, town = bins.columns
    assert age.labels == ("0 to 18", "18 to 40", "40 to 120")
    assert (sex.labels, town.labels) == (("f", "m"), ("A", "B", "else"))
    cells = np.array([0, 1, 2, 2])
    uniforms = np.array([0.0, 0.5, 0.0, 1 - 2.0**-52])
    # The high edge is in the next bin.
    assert age.texts(cells, uniforms) == ["0", "29", "40", "119"]
    assert height.texts(cells[:2], uniforms[:2]) == ["1", "2"]
    assert town.texts(cells, uniforms) == ["A", "B", "else", "else"]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-52])
def test_every_cell_comes_back(bins: Binning, uniform: float) -> None:
    codes = np.arange(bins.domain_size)
    rows = bins.decode(codes, np.full((bins.domain_size, 4), uniform))
    if uniform == 0.5:
        assert rows[0] == ["9", "f", "1.25", "A"]
        assert rows[1] == ["9", "f", "1.25", "B"]  # The last column moves fastest.
        assert rows[-1] == ["80", "m", "2", "else"]
    encoded = bins.encode(rows)
    assert encoded.dtype == np.int32
    np.testing.assert_array_equal(encoded, codes)


def test_numbers_are_drawn_over_the_whole_bin(bins: Binning) -> None:
    """All integers of a bin, each as often; within 5.5 deviations (22 of them, 1e-6)."""
    uniforms = np.random.default_rng(0).random(22_000)
    ages = bins.columns[0].texts(np.ones(22_000, int), uniforms)
    counts = np.bincount([int(age) for age in ages])
    assert set(np.flatnonzero(counts)) == set(range(18, 40))
    assert np.all(np.abs(counts[18:] - 1000) < 5.5 * np.sqrt(1000))
    heights = np.array(
        [float(x) for x in bins.columns[2].texts(np.ones(99, int), uniforms[:99])]
    )
    np.testing.assert_allclose(heights, 1.5 + uniforms[:99], rtol=1e-5)


def test_narrow_and_negative_bins_come_back() -> None:
    spec = {
        "a": {"edges": [-3, -2, 0, 1, 2]},
        "b": {"edges": [-1e308, 0.0, 1e308]},
        "c": {"edges": [0, 0.1, 0.2, 1]},
        "d": {"values": [0, 1, 10]},
        "e": {"edges": [1.0, 1.0000001, 1.0000002]},
    }
    made = binning(spec)
    codes = np.arange(made.domain_size)
    for uniform in (0.0, 0.3, 0.5, 0.9999, 1 - 2.0**-52):
        rows = made.decode(codes, np.full((made.domain_size, 5), uniform))
        np.testing.assert_array_equal(made.encode(rows), codes)


def test_edges_and_what_lies_beyond(bins: Binning) -> None:
    texts = ["-5", "0", "17.99", "18", "40", "119", "120", "121", "1e9", "inf", "-inf"]
    expected = [0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 0]
    np.testing.assert_array_equal(bins.columns[0].cells(texts), expected)


def test_what_no_bin_describes_is_no_error_and_counts_nowhere(bins: Binning) -> None:
    rows = [
        ["20", "f", "1.2", "A"],
        ["20", "x", "1.2", "A"],  # A value that is not there.
        ["", "f", "1.2", "A"],  # No number.
        ["nan", "f", "1.2", "A"],
        ["20", "", "1.2", "A"],
        ["20", " f ", "1.2", "Z"],  # "other" is for this.
    ]
    first, last = 1 * 12, 1 * 12 + 2
    np.testing.assert_array_equal(bins.encode(rows), [first, -1, -1, -1, -1, last])


BLANKS: dict[str, Any] = {
    "age": {"edges": [0, 18, 40, 120], "missing": "mark"},
    "land": {"values": ["FR", "NA", "else"], "other": "else", "missing": "mark"},
    "owner": {"values": ["no", "yes"]},
}


def test_blanks_are_one_more_cell_and_come_back() -> None:
    made = binning(BLANKS)
    assert made.sizes == (4, 4, 2)
    age, land, _ = made.columns
    assert age.labels == ("0 to 18", "18 to 40", "40 to 120", "missing")
    assert land.labels == ("FR", "NA", "else", "missing")
    assert age.integral  # Blanks do not change how numbers are written.
    codes = np.arange(made.domain_size)
    for uniform in (0.0, 0.5, 1 - 2.0**-52):
        rows = made.decode(codes, np.full((made.domain_size, 3), uniform))
        np.testing.assert_array_equal(made.encode(rows), codes)
    assert rows[-1] == ["", "", "yes"]
    assert [rows[0][0], rows[-9][0]] == ["17", "119"]


def test_which_texts_are_blanks() -> None:
    age, land, owner = binning(BLANKS).columns
    texts = ["", " ", "NA", "nan", "null", "?", "7", "unknown", "NAN"]
    assert age.cells(texts).tolist() == [3, 3, 3, 3, 3, 3, 0, -1, -1]
    # A value of the list is that value, though it is called as a blank is.
    assert land.cells(["NA", "N/A", "", "FR", "x"]).tolist() == [1, 3, 3, 0, 2]
    assert owner.cells(["", "NA", "yes"]).tolist() == [-1, -1, 1]
    assert age.cells([]).shape == (0,)


def test_words_on_what_is_not_described() -> None:
    spec = BLANKS | {"kg": {"edges": [0, 50, 200]}}
    made = binning(spec)
    rows = [["", "", "yes", "50"], ["x", "y", "", "?"], ["7", "FR", "may be", "NA"]]
    assert made.undescribed(rows) == (
        "column 'age': texts that are no numbers (1); column 'owner': blanks (1; "
        '"missing": "mark" describes them), values of no list (1; "other" names one for '
        """them); column 'kg': blanks (2; "missing": "mark" describes them)"""
    )
    assert made.undescribed(rows[:1]) == ""


def test_blanks_of_a_table_of_one_column_come_back(tmp_path: Path) -> None:
    made = binning({"age": BLANKS["age"]})
    codes = np.array([3, 0, 3, 2])
    path = tmp_path / "one.csv"
    with path.open("w", newline="") as file:
        rows = made.decode(codes, np.full((4, 1), 0.5))
        csv.writer(file, lineterminator="\n").writerows([["age"], *rows])
    np.testing.assert_array_equal(made.encode(read_rows(path, ["age"])), codes)


def test_a_code_depends_on_its_own_record_alone(bins: Binning) -> None:
    rows = bins.decode(np.array([3, 17, 35, 4]), np.full((4, 4), 0.5))
    rows[1][0] = "unknown"
    together = bins.encode(rows)
    alone = [int(bins.encode([row])[0]) for row in rows]
    assert together.tolist() == alone == [3, -1, 35, 4]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "bins must be a mapping .* got no column"),
        ({"a": [0, 1, 2]}, "column 'a' has"),
        ({"a": {}}, "column 'a' has"),
        ({"a": {"edges": [0, 1]}}, "at least three ascending finite numbers"),
        ({"a": {"edges": [0, 1, 1]}}, "ascending"),
        ({"a": {"edges": [0, 2, 1]}}, "ascending"),
        ({"a": {"edges": [0, 1, float("inf")]}}, "finite"),
        ({"a": {"edges": [0, 1, "2"]}}, "numbers"),
        ({"a": {"edges": [False, 1, 2]}}, "numbers"),
        ({"a": {"edges": "0,1,2"}}, "column 'a' has"),
        ({"a": {"edges": [0, 1, 2], "other": "x"}}, "column 'a' has"),
        ({"a": {"values": ["x"]}}, "at least two different values"),
        ({"a": {"values": ["x", "x "]}}, "different"),
        ({"a": {"values": ["1", 1]}}, "different"),
        ({"a": {"values": ["x", "y"], "other": "z"}}, '"other" may name'),
        ({"a": {"values": ["x", "y"], "edges": [0, 1, 2]}}, "column 'a' has"),
        ({"a": {"values": "xy"}}, "column 'a' has"),
        ({"a": {"values": ["x", None]}}, "column 'a' has"),
        ({"a": {"edges": [0, 1, 2], "missing": "error"}}, '"missing": "mark"'),
        ({"a": {"edges": [0, 1, 2], "missing": True}}, "column 'a' has"),
        ({"a": {"values": ["x", ""], "missing": "mark"}}, "column 'a' has"),
        ({"a": {"missing": "mark"}}, "column 'a' has"),
    ],
)
def test_wrong_bins_are_named(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        binning(spec)


def test_a_domain_has_a_largest_size() -> None:
    two = {"values": ["0", "1"]}
    most = binning({str(i): two for i in range(22)})
    assert most.domain_size == MAX_CELLS
    with pytest.raises(ValueError, match=r"at most 4194304 cells .* 2 x 2 .* 8388608"):
        binning({str(i): two for i in range(23)})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "bins.json"
    path.write_text(json.dumps(SPEC), encoding="utf-8-sig")
    assert binning(path) == binning(str(path)) == binning(SPEC)
    for text, message in [
        ("[1]", "bins must be a mapping"),
        ("{", "bins must be a JSON file"),
        ('{"a": {"values": [1, 2]}, "a": {"values": [1, 2]}}', "twice"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            binning(path)
    with pytest.raises(ValueError, match="bins must be a JSON file, got"):
        binning(tmp_path / "none.json")


def test_rows_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    text = "a,b,c\n1,x,2\n\n 3 ,\"y,z\",4\n,,\n5,'w',6\n"
    path.write_text(text, encoding="utf-8-sig")
    rows = [["2", "1"], ["4", "3"], ["", ""], ["6", "5"]]
    assert read_rows(path, ("c", "a")) == rows
    assert read_rows(str(path), ["b"]) == [["x"], ["y,z"], [""], ["'w'"]]
    path.write_text("\nb\nyes\n\nyes\n")  # Of one column, where a blank cell is a line.
    assert read_rows(path, ["b"]) == [["yes"], [""], ["yes"]]
    for text, message in [
        ("", "is empty"),
        ("a,b\n1,2\n3\n", r"row 2 \(line 3\) of .* has 1 cells"),
        ("a,c\n1,2\n", "must have each column of the bins once, got 0 of 'b'"),
        ("b,b\n1,2\n", "got 2 of 'b'"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_rows(path, ["b"])
    path.write_bytes(b"b\n\xff\n")
    with pytest.raises(ValueError, match="no UTF-8 CSV file"):
        read_rows(path, ["b"])
    with pytest.raises(ValueError, match="path must be an existing file"):
        read_rows(tmp_path / "none.csv", ["b"])
    with pytest.raises(ValueError, match=r"a CSV file, got .*b\.parquet'"):
        read_rows(tmp_path / "b.parquet", ["b"])
