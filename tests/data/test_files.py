"""A CSV or NPZ of one's own: what is read, and every way to refuse it."""

import warnings

import jax
import numpy as np
import pytest

from jaxdp import models
from jaxdp.data import scaling
from jaxdp.models import groups

CSV = """age,weight,ill
10,1.5,0
20,2.5,1
30,3.5,0
40,4.5,1
50,5.5,1
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="data.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def save(tmp_path):
    def save(**arrays):
        path = tmp_path / "data.npz"
        np.savez(path, **arrays)
        return path

    return save


def _sorted(data):
    """All records in the order of their first feature."""
    x, y = (np.concatenate([a, b]) for a, b in zip(data.train, data.test, strict=True))
    order = np.argsort(x[:, 0])
    return x[order], y[order]


# --- what is read ------------------------------------------------------------------


def test_csv_as_it_is(write):
    data = models.load_file(write(CSV), label="ill", classes=2)
    x, y = _sorted(data)
    np.testing.assert_array_equal(x[:, 0], [10, 20, 30, 40, 50])
    np.testing.assert_array_equal(x[:, 1], [1.5, 2.5, 3.5, 4.5, 5.5])
    np.testing.assert_array_equal(y, [0, 1, 0, 1, 1])
    assert data.feature_names == ("age", "weight")
    assert (data.name, data.num_classes, data.num_examples) == ("data", 2, 4)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert "set of labels" not in data.note


@pytest.mark.parametrize(
    "bounds",
    [
        ((0, 0), (100, 10)),
        ([0.0, 0.0], np.array([100.0, 10.0])),
        {"age": (0, 100), "weight": (0, 10)},
        {"weight": (0, 10), "age": (0, 100)},
    ],
)
def test_csv_scaled_by_column(write, bounds):
    x, _ = _sorted(models.load_file(write(CSV), label="ill", classes=2, bounds=bounds))
    np.testing.assert_allclose(x[:, 0], [-0.8, -0.6, -0.4, -0.2, 0], rtol=1e-6)
    np.testing.assert_allclose(x[:, 1], [-0.7, -0.5, -0.3, -0.1, 0.1], rtol=1e-6)


def test_common_bounds_clip(write):
    x, _ = _sorted(models.load_file(write(CSV), label="ill", classes=2, bounds=(2, 40)))
    assert x.min() == -1 and x.max() == 1
    np.testing.assert_allclose(x[1, 0], 2 * 18 / 38 - 1, rtol=1e-6)


@pytest.mark.parametrize("bounds", [None, (0, 100)])
def test_no_statistics_of_the_data(write, bounds):
    before = models.load_file(write(CSV), label="ill", classes=2, bounds=bounds)
    after = models.load_file(
        write(CSV.replace("30,3.5", "99999,-7")), label="ill", classes=2, bounds=bounds
    )
    a, b = (np.concatenate([d.train[0], d.test[0]]) for d in (before, after))
    assert np.flatnonzero((a != b).any(axis=1)).size == 1


def test_csv_of_spreadsheets(write):
    text = "\ufeff" + CSV.replace("\n", "\r\n").replace("10,", " 10 ,") + "\r\n\r\n"
    x, _ = _sorted(models.load_file(write(text), label="ill", classes=2))
    assert x[0, 0] == 10 and len(x) == 5


def test_named_classes(write):
    text = CSV.replace(",0\n", ",no\n").replace(",1\n", ",yes\n")
    for classes in (None, ("no", "yes")):
        # Of four held-out records, two of each class.
        data = models.load_file(
            write(text), label="ill", classes=classes, test_fraction=0.8
        )
        assert data.class_names == ("no", "yes")
        np.testing.assert_array_equal(_sorted(data)[1], [0, 1, 0, 1, 1])
    swapped = models.load_file(write(text), label="ill", classes=["yes", "no"])
    np.testing.assert_array_equal(_sorted(swapped)[1], [1, 0, 1, 0, 0])
    # Numbers may be names too: labels -1 and +1, or a set that does not begin at 0.
    text = CSV.replace(",0\n", ",-1\n")
    named = models.load_file(write(text), label="ill", classes=("-1", "1"))
    np.testing.assert_array_equal(_sorted(named)[1], [0, 1, 0, 1, 1])


def test_regression(write):
    data = models.load_file(write(CSV), label="weight", task="regression")
    x, y = _sorted(data)
    assert data.num_classes is None and data.target_bounds is None
    assert data.feature_names == ("age", "ill") and x.shape == (5, 2)
    np.testing.assert_array_equal(y, [1.5, 2.5, 3.5, 4.5, 5.5])
    scaled = models.load_file(
        write(CSV), label="weight", task="regression", label_bounds=(0, 5)
    )
    np.testing.assert_allclose(_sorted(scaled)[1], [0.3, 0.5, 0.7, 0.9, 1], rtol=1e-6)
    assert scaled.target_bounds == (0, 5)


def test_npz(save):
    x = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    path = save(x=x, y=np.array([0, 1, 2, 0, 1, 2]), other=np.zeros(3))
    data = models.load_file(path, bounds=(0, 24), classes=3)
    got, y = _sorted(data)
    np.testing.assert_allclose(got, x.reshape(6, 4) / 12 - 1.0, rtol=1e-6)
    np.testing.assert_array_equal(y, [0, 1, 2, 0, 1, 2])
    assert data.feature_names == ("x0", "x1", "x2", "x3")
    flags = save(x=x, flag=np.array([True, False] * 3))
    data = models.load_file(flags, label="flag", classes=2)
    np.testing.assert_array_equal(_sorted(data)[1], [1, 0] * 3)
    names = save(x=x, kind=np.array(["a", "b"] * 3))
    assert models.load_file(names, label="kind").class_names == ("a", "b")


def test_split_depends_on_the_seed_and_the_fraction(write):
    first, again, other = (
        models.load_file(write(CSV), label="ill", test_fraction=0.4, seed=s)
        for s in (0, 0, 1)
    )
    assert len(first.test[0]) == 2
    np.testing.assert_array_equal(first.test[0], again.test[0])
    assert not np.array_equal(first.test[0], other.test[0])


# Classes are those of public records.


def _rows(labels):
    """A file of 40 rows with these labels, in turn."""
    lines = [f"{i},{i / 10},{labels[i % len(labels)]}" for i in range(40)]
    return ["age,weight,ill", *lines]


@pytest.mark.parametrize("labels", [("0", "1"), ("no", "yes")])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("other", ["2", "maybe", "-1", "0.5", "nan", ""])
def test_a_private_label_of_no_class_changes_nothing_but_its_record(
    write, labels, given, other
):
    """Neither the set of classes, nor whether there is an error, nor another record."""
    classes: int | tuple[str, ...] | None = 2 if labels == ("0", "1") else labels
    options = {"label": "ill", "test_fraction": 0.25}
    options |= {"classes": classes} if given else {}
    lines = _rows(labels)
    before = models.load_file(write("\n".join(lines)), **options)
    assert ("set of labels is that of the test" in before.note) is not given
    place = int(before.train[0][7, 0])
    lines[place + 1] = f"{place},{place / 10},{other}"
    after = models.load_file(write("\n".join(lines)), **options)
    for name in ("num_classes", "class_names", "num_examples", "note", "feature_names"):
        assert getattr(before, name) == getattr(after, name)
    for a, b in zip(before.test, after.test, strict=True):
        np.testing.assert_array_equal(a, b)
    a, b = before.train[0].copy(), after.train[0].copy()
    assert np.isnan(b[7]).all()
    a[7] = b[7] = 0
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(
        np.delete(before.train[1], 7), np.delete(after.train[1], 7)
    )
    network = models.network_for(after)
    losses = network.value_fn(network.init(jax.random.key(0)), after.train)
    np.testing.assert_array_equal(np.flatnonzero(~np.isfinite(losses)), [7])


@pytest.mark.parametrize("bounds", [None, (0, 4)])
@pytest.mark.parametrize("other", ["", "unknown", "nan", "-inf", "1e400"])
def test_a_private_target_that_is_no_number_changes_nothing_but_its_record(
    write, bounds, other
):
    lines = _rows(("0", "1"))
    options = {"label": "weight", "task": "regression", "test_fraction": 0.25}
    options["label_bounds"] = bounds
    before = models.load_file(write("\n".join(lines)), **options)
    place, public = (int(x[3, 0]) for x in (before.train[0], before.test[0]))
    changed = [*lines]
    changed[place + 1] = f"{place},{other},{place % 2}"
    after = models.load_file(write("\n".join(changed)), **options)
    np.testing.assert_array_equal(after.train[0], before.train[0])
    assert np.flatnonzero(np.isnan(after.train[1])).tolist() == [3]
    np.testing.assert_array_equal(
        np.delete(after.train[1], 3), np.delete(before.train[1], 3)
    )
    network = models.network_for(after)
    losses = network.value_fn(network.init(jax.random.key(0)), after.train)
    np.testing.assert_array_equal(np.flatnonzero(~np.isfinite(losses)), [3])
    lines[public + 1] = f"{public},{other},{public % 2}"
    at = rf"row {public + 1} .*column 'weight' must be a finite number"
    with pytest.raises(ValueError, match=at):
        models.load_file(write("\n".join(lines)), **options)


def test_a_public_label_of_no_class_is_refused_and_decides_the_set(write):
    lines = _rows(("no", "yes"))
    options = {"label": "ill", "test_fraction": 0.25}
    public = int(models.load_file(write("\n".join(lines)), **options).test[0][3, 0])
    lines[public + 1] = f"{public},{public / 10},maybe"
    path = write("\n".join(lines))
    assert models.load_file(path, **options).class_names == ("maybe", "no", "yes")
    at = rf"row {public + 1} \(line {public + 2}\).*column 'ill' must be one of"
    with pytest.raises(ValueError, match=at):
        models.load_file(path, classes=("no", "yes"), **options)


@pytest.mark.parametrize("huge", ["1.7e308", "-1.7e308"])
@pytest.mark.parametrize(
    ("label", "given"),
    [
        ("ill", {"classes": 2}),
        ("weight", {"task": "regression", "label_bounds": (0, 0.5)}),
    ],
)
def test_a_huge_number_warns_of_nothing(write, huge, label, given):
    """What NumPy says of one cell would be a release."""
    rows = [f"{i % 7},{i / 10},{i % 2}\n" for i in range(9)]
    path = write("".join(["age,weight,ill\n", *rows, f"{huge},{huge},1\n"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = models.load_file(path, label=label, bounds=(0, 7), **given)
    assert data.num_examples + len(data.test[0]) == 10
    assert np.abs(np.concatenate([data.train[0], data.test[0]])).max() == 1


def test_a_signalling_nan_and_infinite_rows_warn_of_nothing(save):
    x = np.ones((4, 2), np.float32)
    x.view(np.uint32)[2, 0] = 0x7F800001
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="row 3, column 'x0'"):
            models.load_file(save(x=x, y=np.array([0, 1, 0, 1])))
        assert np.isnan(scaling.center_by_bounds(x, 0, 1)[2, 0])
        for rows in (x, np.full((4, 2), np.inf), np.full((4, 2), 1e200)):
            assert models.unit_rows(rows).shape == (4, 2)


def test_bounds_near_the_end_of_floats_warn_of_nothing():
    x = np.array([0.0, 1.0, 1e308, 1.7e308, np.inf, -np.inf, np.nan])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = scaling.center_by_bounds(x, 0, 1.7e308)
        wide = scaling.center_by_bounds(x, -1.7e308, 1.7e308)
    np.testing.assert_allclose(
        found, [-1, -1, 20 / 17 - 1, 1, 1, -1, np.nan], rtol=1e-6
    )
    assert not np.any(np.abs(wide) > 1)


def _schema(*classes):
    return {
        "label": {"column": "ill", "classes": list(classes)},
        "columns": {
            "age": {"type": "number", "bounds": [0, 40]},
            "weight": {"type": "ignore"},
        },
    }


def test_a_schema_takes_private_labels_of_no_class_too(write):
    schema = _schema("no", "yes")
    lines = _rows(("no", "yes"))
    before = models.load_file(write("\n".join(lines)), schema=schema)
    place = round(20 * (float(before.train[0][7, 0]) + 1))
    for other in ("maybe", ""):
        lines[place + 1] = f"{place},{place / 10},{other}"
        after = models.load_file(write("\n".join(lines)), schema=schema)
        assert np.isnan(after.train[0]).any(axis=1).nonzero()[0].tolist() == [7]


def test_a_class_may_be_named_as_a_blank_is(write):
    schema = _schema("None", "yes")
    found = models.load_file(write("\n".join(_rows(("None", "yes")))), schema=schema)
    assert not np.isnan(found.train[0]).any() and set(found.train[1]) == {0, 1}


def test_a_target_that_is_no_number_is_of_no_class(write):
    lines = _rows(("0", "1"))
    options = {"label": "weight", "task": "regression", "test_fraction": 0.25}
    place = int(models.load_file(write("\n".join(lines)), **options).train[0][3, 0])
    lines[place + 1] = f"{place},unknown,0"
    found = models.load_file(write("\n".join(lines)), **options)
    x, y = groups.above(found, 2.0).train
    assert np.flatnonzero(np.isnan(x).all(axis=1)).tolist() == [3]
    assert set(y.tolist()) == {0, 1}


# --- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("1,2,3\n4,5,6\n", "begin with a header"),
        ("age,,ill\n1,2,0\n", "no name in cell 2"),
        # A quote that is not closed would take the records after it.
        (CSV.replace("30", '"30'), "no UTF-8 CSV file"),
        (CSV.replace("30", '"30').replace("50", '50"'), "no UTF-8 CSV|on one line"),
        (CSV.replace("30,", '"30\n",'), "on one line, got one on the lines 4 to 5"),
        # A record whose cells are blank stays one: their number is public.
        (CSV + ",,\n", r"row 6 \(line 7\).*finite number"),
        ("age,age,ill\n1,2,0\n", "one name in cells 1 and 2"),
        ("ill\n0\n1\n", "at least one feature column"),
        ("age;weight;ill\n1;2;0\n", "separated by commas"),
        ("age,weight,ill\n", "at least 2 rows.* got 0"),
        ("age,weight,ill\n1,2,0\n", "at least 2 rows.* got 1"),
        (
            CSV.replace("2.5", "tall"),
            r"row 2 \(line 3\), column 'weight'.*finite number",
        ),
        (CSV.replace("2.5", ""), r"row 2 \(line 3\), column 'weight'.*finite number"),
        (CSV.replace("30", "nan"), r"row 3 \(line 4\), column 'age'.*finite number"),
        (CSV.replace("30", "-inf"), r"row 3 \(line 4\), column 'age'.*finite"),
        (CSV.replace("30", "1e300"), r"row 3 \(line 4\).*column 'age'.*float32"),
        (CSV.replace("3.5,0", "3.5"), r"row 3 \(line 4\).*has 2 cells.*3 columns"),
        (
            CSV.replace("3.5,0", "3.5,"),
            r"row 3 \(line 4\).*column 'ill' must be a class, and not empty",
        ),
        (
            CSV.replace("3.5,0", "3.5,x"),
            "classes must be given where the held-out .* got 1 records of 1",
        ),
        (CSV.replace("3.5,0", "3.5,0.5"), r"row 3 .*integer >= 0.*task='regression'"),
        (CSV.replace("3.5,0", "3.5,-1"), r"row 3 .*integer >= 0.*classes="),
    ],
)
def test_csv_refused(write, text, message):
    with pytest.raises(ValueError, match=message):
        models.load_file(write(text), label="ill")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "sick"}, "label must be one of the 3 columns.*got 'sick'"),
        ({"label": None}, "label must be one of the 3 columns.*got None"),
        ({"task": "ranking"}, "task must be one of"),
        ({"classes": 1}, "classes must be an integer >= 2"),
        ({"classes": "ab"}, "classes must be a number >= 2 or a sequence"),
        ({"classes": ("0",)}, "at least two different names"),
        ({"classes": ("0", "0")}, "at least two different names"),
        (
            {"classes": ("1", "2")},
            r"row 3 \(line 4\).*column 'ill' must be one of '1', '2',",
        ),
        ({"classes": 1 + 1, "label": "age"}, r"row 3 \(line 4\).*integer 0 to 1 \(a"),
        ({"label": "age", "test_fraction": 0.6}, "51 classes with only 3 held-out"),
        ({"task": "regression", "classes": 2}, "classes is for"),
        ({"label_bounds": (0, 1)}, "label_bounds is for"),
        ({"task": "regression", "label_bounds": (1, 0)}, "label_bounds must be"),
        ({"bounds": (1, 1)}, r"bounds must be .*'age' has \(1.0, 1.0\)"),
        ({"bounds": (3, 1)}, "low < high"),
        ({"bounds": (0, float("inf"))}, "bounds must be"),
        ({"bounds": (float("nan"), 1)}, "bounds must be"),
        ({"bounds": ((0, 5), (10, 5))}, "column 'weight' has"),
        ({"bounds": ((0, 0, 0), (1, 1, 1))}, "bounds must be"),
        ({"bounds": 5}, "bounds must be"),
        ({"bounds": (0, 1, 2)}, "bounds must be"),
        ({"bounds": ("a", "b")}, "bounds must be"),
        ({"bounds": {"age": (0, 1)}}, r"missing \['weight'\]"),
        ({"bounds": {"age": (0, 1), "wt": (0, 1)}}, r"unknown \['wt'\]"),
        ({"bounds": {"age": (0, 1), "weight": 3}}, "bounds must be"),
        ({"test_fraction": 0}, "test_fraction must be"),
        ({"test_fraction": 1.5}, "test_fraction must be"),
        ({"test_fraction": 0.9}, "too few records"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_arguments_refused(write, options, message):
    with pytest.raises(ValueError, match=message):
        models.load_file(write(CSV), **{"label": "ill", **options})


def test_paths_refused(write, tmp_path):
    with pytest.raises(ValueError, match=r"path must be an existing file.*no\.csv"):
        models.load_file(tmp_path / "no.csv", label="y")
    with pytest.raises(ValueError, match=r"path must end in \.csv or \.npz"):
        models.load_file(write(CSV, "data.xlsx"), label="ill")
    with pytest.raises(ValueError, match=r"with a schema in \.tsv or \.parquet, got"):
        models.load_file(write(CSV, "data.parquet"), label="ill")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x81,\n")
    with pytest.raises(ValueError, match="no UTF-8 CSV file"):
        models.load_file(tmp_path / "bytes.csv", label="ill")
    with pytest.raises(ValueError, match="must be an NPZ file of plain arrays"):
        models.load_file(write(CSV, "text.npz"))


X, Y = np.ones((4, 2)), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "label", "message"),
    [
        ({"features": X, "y": Y}, None, "features as array 'x', it has 'features'"),
        ({"x": X, "target": Y}, None, "label must be an array.*got 'y'"),
        ({"x": X, "y": Y}, "x", "label must be an array.*got 'x'"),
        ({"x": X, "y": Y[:3]}, None, r"shape \(4,\).*got \(3,\)"),
        ({"x": X, "y": Y[:, None]}, None, r"shape \(4,\).*got \(4, 1\)"),
        ({"x": np.ones(4), "y": Y}, None, "shape .records"),
        ({"x": np.ones((4, 0)), "y": Y}, None, "shape .records"),
        ({"x": np.full((4, 2), "a"), "y": Y}, None, "real numbers.*of text$"),
        ({"x": X * [[1], [1], [np.nan], [1]], "y": Y}, None, "row 3, column 'x0'"),
        ({"x": X, "y": np.array([0, 1, np.nan, 0])}, None, "row 3 .*'y'.*integer"),
        ({"x": X[:1], "y": Y[:1]}, None, "at least 2 rows"),
        ({"x": X.astype(object), "y": Y}, None, "plain arrays"),
    ],
)
def test_npz_refused(save, arrays, label, message):
    with pytest.raises(ValueError, match=message):
        models.load_file(save(**arrays), label=label)


# What a message says of private records.

NAMED = "age,weight,ill\n1,2,0\n3,Jane-HIV,1\n5,1,Jane-HIV\n7,8,1\n9,9,0\n"
PUBLIC_LABEL = NAMED.replace("3,Jane-HIV,1\n", "").replace("7,8,1", "7,8,Jane-HIV")
PRIVATE = [
    (NAMED, {}),
    (NAMED.replace("3,Jane-HIV,1\n", ""), {}),
    (PUBLIC_LABEL, {"classes": ("0", "1")}),
    (PUBLIC_LABEL, {"classes": 2}),
    (NAMED.replace("Jane-HIV,1", "2,1").replace("Jane-HIV", "77777"), {"classes": 2}),
    ("Jane-HIV,34,yes\nJohn,40,no\n", {}),  # A file without a header.
    ("Jane-HIV,Jane-HIV,yes\nJohn,40,no\n", {}),
    ("77777,34,1\n2,40,0\n", {}),
    ("Jane-HIV\nJohn\n", {}),
    (NAMED.replace("Jane-HIV", "77777e300"), {}),
]


@pytest.mark.parametrize(("text", "options"), PRIVATE)
def test_messages_quote_no_cell_unless_they_may(write, text, options):
    with pytest.raises(ValueError) as error:
        models.load_file(write(text), label="ill", **options)
    assert "Jane" not in str(error.value)
    assert "77777" not in str(error.value)
    # Nor what it is raised from, which a log may show.
    assert "Jane" not in str(error.value.__cause__)


def test_values_are_shown_where_that_is_allowed(write):
    with (
        models.show_values(),
        pytest.raises(ValueError, match=r"row 2 \(line 3\).*got 'Jane-HIV'"),
    ):
        models.load_file(write(NAMED), label="ill")
    with (
        models.show_values(),
        models.show_values(False),
        pytest.raises(ValueError, match="kept back"),
    ):
        models.load_file(write(NAMED), label="ill")


def test_bounds_that_most_public_records_are_beyond_are_said(write):
    rows = "".join(f"{100 + i},{i / 10},{i % 2}\n" for i in range(60))
    path, given = write("age,weight,ill\n" + rows), {"label": "ill", "bounds": (0, 3)}
    with pytest.warns(UserWarning, match="columns 'age': numbers beyond") as at:
        models.load_file(path, **given)
    assert [w.filename for w in at] == [__file__]
    with pytest.warns(UserWarning, match="columns 'weight'"):
        models.load_file(
            path,
            label="weight",
            task="regression",
            label_bounds=(5, 6),
            bounds={"age": (0, 200), "ill": (0, 1)},
        )
