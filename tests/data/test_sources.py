"""Sources of records that are not in memory: what they give, and what they refuse."""

import os
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp import data, models
from jaxdp.core import array_source
from jaxdp.sampling import batches
from jaxdp.training import streaming

N = 12
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
Y = np.arange(N) % 2 == 0
INDICES = np.array([11, 0, 5, 5, 7])


@pytest.fixture(autouse=True)
def files_are_read_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones too; tests of runs read those through their maps."""
    monkeypatch.setattr(array_source, "_SMALL", 0)


def mapped(folder: Path) -> dict[str, np.ndarray]:
    for name, array in (("x", X), ("y", Y)):
        np.save(folder / f"{name}.npy", array)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y")}


def parquet(folder: Path, **changes: Any) -> list[Path]:
    """Two files, of row groups of 3 records that the second file's end cuts."""
    import pyarrow as pa
    from pyarrow import parquet

    paths = []
    for part in (slice(0, 7), slice(7, N)):
        x = pa.FixedSizeListArray.from_arrays(X[part].reshape(-1), 3)
        columns = {"x": x, "y": Y[part], "name": ["a"] * len(X[part])}
        path = folder / f"{part.start}.parquet"
        parquet.write_table(pa.table(columns | changes), path, row_group_size=3)
        paths.append(path)
    return paths


class Items:
    """A reader of single records, as grain's are."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return {"x": X[index], "y": Y[index]}


def made(kind: str, folder: Path) -> data.Source:
    if kind == "arrays":
        return data.ArraySource(mapped(folder))
    if kind == "items":
        return data.ItemSource(Items())
    if kind == "grain":
        import grain

        return data.ItemSource(grain.MapDataset.source(Items()))
    if kind == "datasets":
        import datasets

        table = datasets.Dataset.from_dict({"x": X, "y": Y})
        return data.ItemSource(table.with_format("numpy"))
    if kind == "parquet":
        return data.ParquetSource(parquet(folder), columns=["x", "y"])
    found = mapped(folder)
    cuts = (slice(0, 5), slice(5, 6), slice(6, N))
    parts = [{k: v[cut] for k, v in found.items()} for cut in cuts]
    return data.concatenated(map(data.ArraySource, parts))


@pytest.mark.parametrize(
    "kind", ["arrays", "items", "grain", "datasets", "parquet", "concatenated"]
)
def test_rows_are_those_of_the_array(kind: str, tmp_path: Path) -> None:
    """In the order of the indices, one of them twice; the memory is the caller's own."""
    source = made(kind, tmp_path)
    assert len(source) == N
    rows = source.rows(INDICES)
    for name, array in (("x", X), ("y", Y)):
        np.testing.assert_array_equal(rows[name], array[INDICES])
        assert type(rows[name]) is np.ndarray and rows[name].dtype == array.dtype
    again = source.rows(INDICES[::-1])
    assert not np.shares_memory(rows["x"], again["x"])
    np.testing.assert_array_equal(source.example()["x"], X[[0, -1]])
    source.check()
    assert source.digest() == made(kind, tmp_path).digest()


@pytest.mark.parametrize("indices", [[0, -1], [N]])
def test_rows_that_are_not_there_are_refused(
    indices: list[int], tmp_path: Path
) -> None:
    """Also where the file goes on behind the view."""
    found = mapped(tmp_path)["x"]
    for array, past in ((found, 0), (found[:-2], 2)):
        with pytest.raises(IndexError, match="indices must be from 0"):
            data.ArraySource(array).rows(np.array(indices) - past * (indices == [N]))


@pytest.mark.parametrize(
    "view", [np.s_[2:9], np.s_[::2], np.s_[:, 1:]], ids=["rows", "steps", "columns"]
)
def test_views_of_files(view: Any, tmp_path: Path) -> None:
    """Of a file with a head before its numbers, beyond a page too."""
    path = tmp_path / "records"
    path.write_bytes(b"0" * 4099 + X.tobytes())
    array = np.memmap(path, np.float32, "r", offset=4099, shape=X.shape)[view]
    source = data.ArraySource(array)
    indices = np.array([0, 1, 2, 2, 3, 1])
    np.testing.assert_array_equal(source.rows(indices), X[view][indices])
    source.check()


def test_a_digest_is_of_every_record(tmp_path: Path, monkeypatch: Any) -> None:
    """Also in parts of two records; of dtypes, and of the order."""
    digests = {data.ArraySource({"x": X, "y": Y}).digest()}
    monkeypatch.setattr(array_source, "_AT_ONCE", 2 * X[0].nbytes)
    whole = data.ArraySource({"x": X, "y": Y}).digest()
    assert digests == {whole}
    for i in range(N):
        changed = X.copy()
        changed[i, 2] += 1
        digests.add(data.ArraySource({"x": changed, "y": Y}).digest())
    digests.add(data.ArraySource({"x": X[::-1], "y": Y}).digest())
    digests.add(data.ArraySource({"x": X.view(np.int32), "y": Y}).digest())
    digests.add(data.ArraySource({"y": X, "x": Y}).digest())
    assert len(digests) == N + 4


@pytest.mark.parametrize("kind", ["arrays", "parquet", "concatenated", "items"])
@pytest.mark.parametrize("how", ["written", "touched", "replaced", "removed"])
def test_a_file_that_changes_is_named(kind: str, how: str, tmp_path: Path) -> None:
    source = made(kind, tmp_path)
    if kind == "items":
        (tmp_path / "records").write_bytes(b"...")
        source = data.ItemSource(Items(), files=[tmp_path / "records"])
    path = min(tmp_path.iterdir())
    if how == "written":
        with path.open("ab") as file:
            file.write(b"0")
    elif how == "touched":
        os.utime(path, ns=(1, 1))
    elif how == "replaced":
        found, other = path.stat(), tmp_path / "other"
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(found.st_mtime_ns, found.st_mtime_ns))
        other.replace(path)
    else:
        path.unlink()
    with pytest.raises(ValueError, match=f"must not change under a run, but '{path}'"):
        source.check()


def test_files_are_not_held_in_memory(tmp_path: Path) -> None:
    """64 MiB are digested, and read here and there, in a few, and cut off by name."""
    size = 2**26
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size)
    source = data.ArraySource(np.memmap(path, np.uint8, "r").reshape(-1, 2**10))

    def mapped_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (found,) = (line for line in lines if line.startswith("RssFile"))
        return int(found.split()[1]) * 2**10

    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    before = mapped_bytes()
    source.digest()
    source.rows(np.arange(0, len(source), 2))
    assert mapped_bytes() < before + size // 4
    os.truncate(path, size // 2)
    with pytest.raises(ValueError, match=f"a file ends at byte {size - 2**10}"):
        source.rows(np.array([5, len(source) - 1]))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: data.ArraySource({}), ValueError, "got no array"),
        (lambda: data.ArraySource([[1.0]]), TypeError, r"a float at arrays\[0\]\[0\]"),
        (lambda: data.ArraySource({"x": X, "y": Y[1:]}), ValueError, r"\(11,\) at"),
        (lambda: data.ArraySource(X[:0]), ValueError, r"got shape \(0, 3\)"),
        (lambda: data.ArraySource(np.array(["a"])), TypeError, "got dtype text at"),
        (lambda: data.ItemSource(iter([1])), TypeError, "IteratorSource"),
        (lambda: data.ItemSource([1], files=["absent"]), ValueError, "that are there"),
        (lambda: data.concatenated([]), ValueError, "at least one"),
        (lambda: data.concatenated([X]), TypeError, "sources must be a Source"),
        (
            lambda: data.concatenated([data.IteratorSource([X], N)]),
            TypeError,
            "in any order, got IteratorSource",
        ),
        (
            lambda: data.concatenated(
                [data.ArraySource(X), data.ArraySource(X[:, :2])]
            ),
            ValueError,
            r"float32\[2\] in source 1 and float32\[3\] in source 0",
        ),
        (lambda: data.IteratorSource(3, N), TypeError, "blocks must be an iterable"),
        (lambda: data.IteratorSource([], N), ValueError, "ended after 0"),
    ],
)
def test_what_is_no_source(make: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_an_iterator_is_read_once_and_in_order() -> None:
    source = data.IteratorSource((X[i : i + 5] for i in range(0, N, 5)), N + 1)
    np.testing.assert_array_equal(source.example(), X[:1])
    np.testing.assert_array_equal(source.rows(np.arange(7)), X[:7])
    with pytest.raises(ValueError, match="the next record is 7"):
        source.rows(np.arange(7))
    np.testing.assert_array_equal(source.rows(np.arange(7, N)), X[7:])
    with pytest.raises(ValueError, match=r"num_examples = 13 records.*ended after 12"):
        source.rows(np.array([N]))


def test_blocks_have_the_public_dtypes() -> None:
    """One cell makes a block another dtype; the run goes on, and that record is empty."""
    like = {"x": np.int64(0), "y": np.float32(0)}
    blocks = [
        {"x": np.arange(4), "y": np.ones(4, np.float32)},
        {"x": np.array([4.0, 5.5, 6.0, np.nan]), "y": np.ones(4)},
        {"x": np.arange(8, 12), "y": np.array(["1", 2, None, 4.0], object)},
    ]
    blocks.insert(0, {"x": np.array([]), "y": np.array([])})
    blocks.insert(2, {"x": np.array([]), "y": np.array([])})
    got = data.IteratorSource(blocks, 12, like=like).rows(np.arange(12))
    assert (got["x"].dtype, got["y"].dtype) == (np.int64, np.float32)
    assert got["x"].tolist() == [0, 1, 2, 3, 4, 0, 6, 0, 0, 9, 0, 11]
    nan = np.nan
    np.testing.assert_array_equal(
        got["y"], [1, 1, 1, 1, 1, nan, 1, nan, nan, 2, nan, 4]
    )
    for wrong in (np.array(["1", 2.0]), np.array([1j, 2])):  # One record, all of them.
        source = data.IteratorSource([np.ones(2, np.float32), wrong], 4, like=nan)
        with pytest.raises(TypeError, match=r"at blocks from record 2 on: one record"):
            source.rows(np.arange(4))
    with pytest.raises(ValueError, match="leaves of one length each"):
        data.IteratorSource([{"x": np.ones(2), "y": np.ones(1)}], 2)


@pytest.mark.parametrize(
    ("strange", "said"),
    [
        (
            {"x": np.array(["2020-01-31"] * 2, "M8[D]")},
            r"datetime64\[\] at blocks\['x'\]",
        ),
        ({"x": np.array([31, 31])}, r"int64\[\] at blocks\['x'\]"),
        ({"x": np.full((2, 3), 31.0)}, r"float64\[3\] at blocks\['x'\]"),
        ({"z": np.array([31.0, 31.0])}, r"nothing at blocks\['x'\]"),
    ],
)
def test_a_block_of_another_dtype_is_named(strange: Any, said: str) -> None:
    blocks = [{"x": np.ones(3)}, {"x": np.array([])}, strange]
    source = data.IteratorSource(blocks, 5)
    with pytest.raises(ValueError, match=rf"got {said} from record 3 on") as caught:
        source.rows(np.arange(5))
    assert "float64[] before" in str(caught.value) and "31" not in str(caught.value)


def test_parquet_names_what_is_no_number(tmp_path: Path) -> None:
    paths = parquet(tmp_path)
    with pytest.raises(TypeError, match="got 'name' of string"):
        data.ParquetSource(paths)
    with pytest.raises(ValueError, match="columns must be of 'x', 'y', 'name' in"):
        data.ParquetSource(paths, columns=["z"])
    with pytest.raises(ValueError, match="paths must be at least one file"):
        data.ParquetSource([])
    (tmp_path / "latest").symlink_to(paths[0])
    for again in (paths[0], tmp_path / "latest"):
        with pytest.raises(ValueError, match="paths must be of different files, or a"):
            data.ParquetSource([*paths, again], columns=["x"])
    source = data.ParquetSource(paths, columns=["x"])
    with pytest.raises(ValueError, match="sources must differ, or a record would be"):
        data.concatenated([source, source])
    import pyarrow as pa
    from pyarrow import parquet as pq

    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="one type in column 'x'"):
        data.ParquetSource([paths[0], tmp_path / "other.parquet"], columns=["x"])
    twice = pa.table([[1], [2]], names=["x", "x"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(
        ValueError, match=r"of one name each in .* got 2 of the name 'x'"
    ):
        data.ParquetSource(tmp_path / "twice.parquet")


@pytest.mark.parametrize("make", ["list_", "large_list"])
def test_parquet_lists_of_any_size_are_to_be_cast(make: str, tmp_path: Path) -> None:
    """What is advised works; of lists of texts it is not advised."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    kind, path = getattr(pa, make), tmp_path / "lists.parquet"
    column = pa.array([[41.5, 2.0], [3.0, 4.0]], kind(pa.float64()))
    texts = pa.array([["secret"], ["b"]], kind(pa.string()))
    pq.write_table(pa.table({"x": column, "t": texts}), path)
    with pytest.raises(
        TypeError, match=r"'x' of .*: cast it to a fixed_size_list"
    ) as of:
        data.ParquetSource(path, columns=["x"])
    assert "41" not in str(of.value)
    with pytest.raises(TypeError, match=r"'t' of .*: make integers of texts") as of:
        data.ParquetSource(path, columns=["t"])
    assert "secret" not in str(of.value)
    pq.write_table(pa.table({"x": column.cast(pa.list_(pa.float64(), 2))}), path)
    rows = data.ParquetSource(path).rows(np.arange(2))
    np.testing.assert_array_equal(rows["x"], [[41.5, 2.0], [3.0, 4.0]])


def test_parquet_has_nothing_where_a_record_lacks_a_number(tmp_path: Path) -> None:
    """In all columns and in their dtypes; other records keep every digit."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    pairs = [[1.0, 2.0], [3.0, None], None, [5.0, 6.0], [7.0, 8.0], [9.0, 9.0]]
    columns = {
        "pair": pa.array(pairs, pa.list_(pa.float32(), 2)),
        "big": pa.array([2**53 + 1, 4, 5, 6, None, 7], pa.int64()),
        "half": pa.array([np.float16(x) for x in range(6)], pa.float16()),
        "bit": pa.array([True, True, True, None, True, True], pa.bool_()),
    }
    pq.write_table(pa.table(columns), tmp_path / "null.parquet")
    rows = data.ParquetSource(tmp_path / "null.parquet").rows(
        np.array([5, 0, 1, 2, 3, 4])
    )
    nan = [np.nan] * 4
    np.testing.assert_array_equal(rows["pair"], [[9, 9], [1, 2], *([[np.nan] * 2] * 4)])
    np.testing.assert_array_equal(rows["half"], [5, 0, *nan])
    assert rows["big"].tolist() == [7, 2**53 + 1, 0, 0, 0, 0]
    assert rows["bit"].tolist() == [True, True, False, False, False, False]
    assert [rows[name].dtype for name in columns] == [
        *(np.float32, np.int64, np.float16, np.bool_)
    ]


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxdp-optim\[tables\]'"):
        data.ParquetSource("x.parquet")


def test_who_reuses_memory_gives_other_records_all_the_same() -> None:
    """Blocks and items of one buffer: each record is copied before the next is made."""

    def blocks() -> Any:
        buffer = np.empty(4)
        for first in range(0, 12, 4):
            buffer[:] = np.arange(first, first + 4)
            yield buffer

    source = data.IteratorSource(blocks(), 12)
    assert source.rows(np.arange(6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert source.rows(np.arange(6, 12)).tolist() == [6, 7, 8, 9, 10, 11]

    class Items:
        buffer = np.empty(1)

        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> np.ndarray:
            self.buffer[:] = i
            return self.buffer

    assert data.ItemSource(Items()).rows(np.array([3, 1, 4])).tolist() == [
        [3],
        [1],
        [4],
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"x": [1.0, 2.0], "y": 1},
        {"x": 1.0, "y": 1},
        {"x": [[1.0], [2.0, 3.0]], "y": 1},
        {"x": ["a", "b", "c"], "y": 1},
        {"x": [1j, 2.0, 3.0], "y": 1},
        {"x": [1.0, 2.0, 3.0], "y": 0.5},
        {"x": [1.0, 2.0, 3.0], "y": 1, "z": 2},
        {"x": [1.0, 2.0, 3.0]},
        {"x": [1.0, 2.0, 3.0], "y": None},
        {"x": [1.0, 2.0, 10**400], "y": 1},
        None,
        "abc",
        object(),
    ],
)
def test_an_item_that_does_not_fit_counts_zero(other: Any) -> None:
    """It is neither refused nor said, and no other item changes."""
    items = [{"x": X[i], "y": int(Y[i])} for i in range(N)]
    before = data.ItemSource(items)
    want, digest = before.rows(INDICES), before.digest()
    assert before.digest() == digest
    items[5] = other
    source = data.ItemSource(items)
    got = source.rows(INDICES)
    fits = INDICES != 5
    for name in ("x", "y"):
        assert got[name].dtype == want[name].dtype
        np.testing.assert_array_equal(got[name][fits], want[name][fits])
    assert np.isnan(got["x"][~fits]).all() and not got["y"][~fits].any()
    assert source.digest() != digest
    # Nor does any where it is the first, and the public shapes are said.
    items[5], items[0] = {"x": X[5], "y": int(Y[5])}, other
    shapes = {
        "x": jax.ShapeDtypeStruct(X[0].shape, X.dtype),
        "y": jax.ShapeDtypeStruct((), np.int64),
    }
    for like in (items[1], shapes):
        got = data.ItemSource(items, like=like).rows(np.arange(N))
        np.testing.assert_array_equal(got["x"][1:], X[1:])
        np.testing.assert_array_equal(got["y"][1:], Y[1:])
        assert np.isnan(got["x"][0]).all() and got["y"][0] == 0


def test_items_are_cast_to_the_dtypes_of_the_first() -> None:
    items: Any = [
        {"x": np.float32(1), "y": 0},
        {"x": 2, "y": True},
        {"x": 1e300, "y": 1},
    ]
    got = data.ItemSource(items).rows(np.arange(3))
    assert (got["x"].dtype, got["y"].dtype) == (np.float32, np.int64)
    assert (got["x"].tolist(), got["y"].tolist()) == ([1, 2, np.inf], [0, 1, 1])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.bool_, np.int8, np.float32])
def test_items_of_python_s_numbers_fit_where_no_value_changes(dtype: Any) -> None:
    items: Any = [{"x": 1}, {"x": 0}, {"x": True}, {"x": -3}, {"x": 1.5}]
    got = data.ItemSource(items, like={"x": np.zeros((), dtype)}).rows(np.arange(5))
    assert got["x"].dtype == dtype and got["x"][:3].tolist() == [1, 0, 1]
    signed = np.dtype(dtype).kind in "if"
    fractions = np.dtype(dtype).kind == "f"
    assert got["x"][3:].tolist() == [-3 * signed, 1.5 * fractions]


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(np.int8, 257), (np.int32, 2**32 + 2), (np.int64, np.uint64(2**63 + 5))],
)
def test_an_item_of_too_large_an_integer_is_no_other_one(
    dtype: Any, other: Any
) -> None:
    got = data.ItemSource([2, other, np.int64(3)], like=np.zeros((), dtype))
    assert got.rows(np.arange(3)).tolist() == [2, 0, 3]


def test_a_huge_number_in_a_source_warns_of_nothing() -> None:
    """JAX holds it as infinite; its warning would be about one record."""
    items: Any = [{"x": 1.0}, {"x": 1e300}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = data.ItemSource(items).rows(np.arange(2))["x"]
        assert batches.narrowed(rows.astype(complex)).dtype == np.complex64
        for found in (streaming._own(rows, 2), batches.narrowed(rows)):
            assert found.dtype == np.float32 and np.isinf(found).tolist() == [
                False,
                True,
            ]


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(0x7FF0000000000001, np.float64), (0x7F800001, np.float32)],
)
def test_a_signalling_nan_warns_of_nothing(bits: int, dtype: Any) -> None:
    """NumPy says "invalid value encountered in cast" of it, and of no other NaN."""
    strange = np.array([bits], np.uint64 if dtype is np.float64 else np.uint32)
    rows = np.concatenate([np.ones(1, dtype), strange.view(dtype)])
    likes: list[Any] = [np.zeros((), x) for x in (np.float64, np.float32, np.int32)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in (batches.narrowed(rows), streaming._own(rows, 2)):
            assert np.isnan(found).tolist() == [False, True]
        for like in likes:
            got = data.ItemSource(list(rows), like=like).rows(np.arange(2))
            assert got[0] == 1 and (np.isnan(got[1]) or got[1] == 0)
        several = data.ItemSource([[1.0, rows[1]]], like=np.zeros(2))
        assert np.isnan(several.rows(np.arange(1))[0, 1])


#: As long as no public length.
NAME = "x" * 24
TEXTS: dict[str, np.ndarray] = {
    "text": np.array(["a", NAME]),
    "bytes": np.array([b"a", NAME.encode()]),
    "fields": np.array([("a", 1), (NAME, 2)], [("name", "U24"), ("age", "i4")]),
    "dates": np.array(["2001-01-01", "2001-01-01T12:24:24"], "M8"),
    "objects": np.array(["a", NAME], object),
    "of any length": np.array(["a", NAME], np.dtypes.StringDType()),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_no_message_tells_how_long_a_text_is_or_what_it_says(kind: str) -> None:
    """A dtype of texts holds the length of the longest, and JAX's errors quote them."""
    texts, keys = TEXTS[kind], jaxdp.Keys.insecure(0)
    plan = jaxdp.plans.DPZero(
        num_examples=2,
        num_steps=3,
        sampling=jaxdp.sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
    ).with_noise(noise_multiplier=2.0)
    task: Any = {"value_fn": lambda w, x: x, "optimizer": None}
    other = data.ArraySource(np.zeros(2))
    users: Any = {"records_per_user": 1}
    tries = [
        lambda: jaxdp.fit(plan, keys, np.zeros(2), texts, **task),
        lambda: streaming._described((), texts),
        lambda: jaxdp.sampling.batch(plan, keys, 0, texts),
        lambda: jaxdp.sampling.shuffled(keys, texts),
        lambda: jaxdp.sampling.draw(plan, keys, 0).with_records(texts),
        lambda: data.ArraySource(texts),
        lambda: data.concatenated([data.ItemSource(list(texts)), other]),
        lambda: jaxdp.by_user(np.zeros(2), texts, user_ids=[0, 1], **users),
        lambda: jaxdp.by_user(np.zeros(2), [0, 1], user_ids=texts, **users),
        lambda: models.Dataset("made up", (texts[:, None], texts), (), "regression"),
    ]
    if kind != "objects":
        like: Any = {"like": 0.0}
        tries.append(lambda: data.IteratorSource(iter([texts]), 2, **like))
    for attempt in tries:
        with pytest.raises((TypeError, ValueError)) as caught:
            attempt()
        for told in ("24", NAME, "[s]", "name"):
            assert told not in str(caught.value).replace("np.searchsorted(names", "")
    if kind != "of any length":
        grouped = jaxdp.by_user({"x": texts}, [0, 1], **users)
        assert "24" not in repr(grouped) and "[s]" not in repr(grouped)


def test_a_map_that_was_changed_in_memory_is_read_there(tmp_path: Path) -> None:
    """And a view of a map is a file, which may not change."""
    np.save(tmp_path / "x.npy", np.full((6, 2), 7.0))
    own = np.load(tmp_path / "x.npy", mmap_mode="c")
    source = data.ArraySource(own)
    own[:] = 1
    assert source.rows(np.array([5])).tolist() == [[1, 1]]
    view = data.ArraySource(np.asarray(np.load(tmp_path / "x.npy", mmap_mode="r")))
    view.check()
    np.save(tmp_path / "x.npy", np.full((6, 2), 8.0))
    with pytest.raises(ValueError, match="another file now"):
        view.check()
