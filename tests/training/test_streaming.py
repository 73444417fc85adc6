"""Data that is not in memory: the bits of data in memory, and what is refused."""

import os
import threading
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import array_source
from jaxdp.core import keys as keys_lib
from jaxdp.data import ArraySource, ItemSource, IteratorSource, ParquetSource
from jaxdp.training import streaming

N, D = 400, 3
#: In float64, as files often are: JAX has them in float32.
X = np.sin(np.arange(N * D, dtype=np.float64)).reshape(N, D)
DATA = {"x": X, "y": (np.arange(N) % 3 == 0).astype(np.int8)}
PARAMS = {"w": jnp.ones((D, 4)), "v": jnp.ones(4)}
SGD = optax.sgd(0.1)
POISSON = sampling.TruncatedPoisson(sampling_prob=0.05)


def value_fn(params: Any, batch: Any) -> jax.Array:
    z = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    return jnp.logaddexp(0, z) - batch["y"] * z


def make_plan(sampler: Any, **changes: Any) -> Any:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": 13,
        "sampling": sampler,
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "smoothing_radius": 1e-2,
        "noise_multiplier": 2.0,
        "delta": 1e-5,
    }
    return plans.DPZero(**(base | changes))


def make_restarts(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": 11,
        "relation": "replace_one",
        "restart_l2_clip_norm": 3.0,
        "l2_clip_norm": 0.5,
        "smoothing_radius": 0.5,
        "max_step": 0.06,
        "window": 5,
        "learning_rate": 0.02,
        "noise_multiplier": 0.2,
        "delta": 1e-5,
    }
    return plans.O2NC(**base | changes)


@pytest.fixture
def source(tmp_path: Path) -> ArraySource:
    """The data in memory-mapped files."""
    for name, array in DATA.items():
        np.save(tmp_path / f"{name}.npy", array)
    return ArraySource(
        {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in DATA}
    )


def fit(plan: Any, data: Any, **options: Any) -> Any:
    args = {"value_fn": value_fn, "optimizer": SGD, "check_isolation": False}
    return jaxdp.fit(plan, Keys.insecure(3), PARAMS, data, **(args | options))


def test_steps_read_their_own_records_of_a_large_map(
    source: ArraySource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which ``resume`` finds again; a small one is read whole."""
    plan, maps = make_plan(POISSON, num_steps=4), source._arrays
    opened: list[Any] = []
    original = streaming.opened

    def spy(data: Any, plan: Any) -> Any:
        opened.append(data)
        return original(data, plan)

    monkeypatch.setattr(streaming, "opened", spy)
    whole = fit(plan, maps, ledger=tmp_path / "small")
    assert not opened
    monkeypatch.setattr(streaming, "_LARGE", DATA["x"].nbytes - 1)
    again = fit(plan, maps, ledger=tmp_path / "large")
    options: Any = {"value_fn": value_fn, "optimizer": SGD, "check_isolation": False}
    ended = jaxdp.resume(tmp_path / "large", PARAMS, maps, **options)
    assert [type(data) for data in opened] == [ArraySource] * 2
    for result in (again, ended):
        chex.assert_trees_all_equal(result.params, whole.params)


@pytest.mark.parametrize("began", ["whole", "map", "map, then JAX"])
def test_a_run_goes_on_as_it_began_with_a_map_or_without(
    began: str, source: ArraySource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one of before, whose header does not say how it began."""
    plan, maps = make_plan(POISSON, num_steps=4), source._arrays
    monkeypatch.setattr(streaming, "_LARGE", DATA["x"].nbytes - 1)
    first, then = (DATA, maps) if began == "whole" else (maps, DATA)
    if "JAX" in began:  # Whose floats have 32 bits, as those of the map then.
        monkeypatch.setattr(streaming, "_LARGE", DATA["x"].nbytes // 2 - 1)
        np.save(tmp_path / "x.npy", X.astype(np.float32))
        first = maps | {"x": np.load(tmp_path / "x.npy", mmap_mode="r")}
        then = jax.tree.map(jnp.asarray, DATA)
    with pytest.raises(jaxdp.Stopped):
        fit(
            plan, first, ledger=tmp_path / "run", chunk=1, stop=iter([0, 0, 1]).__next__
        )
    if began == "whole":
        file = tmp_path / "run" / "ledger.jsonl"
        assert '"streamed": false' in file.read_text()
    options: Any = {"value_fn": value_fn, "optimizer": SGD, "check_isolation": False}
    ended = jaxdp.resume(tmp_path / "run", PARAMS, then, **options)
    chex.assert_trees_all_equal(ended.params, fit(plan, DATA).params)


def test_what_is_changed_in_place_beside_a_map_is_a_copy(
    source: ArraySource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also what NumPy calls a map, and is a copy of one."""
    copied = np.load(tmp_path / "y.npy", mmap_mode="r").copy()
    assert isinstance(copied, np.memmap)
    maps = source._arrays | {"y": copied}
    monkeypatch.setattr(streaming, "_LARGE", DATA["x"].nbytes - 1)
    plan = make_plan(POISSON, num_steps=4)

    def change(*_: Any) -> None:
        copied[:] = 1 - copied

    whole = fit(plan, DATA)
    changed = fit(plan, maps, chunk=1, callback=change)
    chex.assert_trees_all_equal(changed.params, whole.params)
    fit(plan, DATA | {"x": maps["x"].copy()})  # Which warns of nothing.
    (tmp_path / "x.npy").unlink()
    with pytest.warns(
        UserWarning, match="read whole: data must be files that are there"
    ):
        gone = fit(plan, source._arrays)
    chex.assert_trees_all_equal(gone.params, whole.params)


@pytest.mark.parametrize("small", [0, 2**28])
def test_a_file_that_was_exchanged_after_it_was_mapped_is_not_read(
    small: int, source: ArraySource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One person could be in two rows: in features of the one file, labels of the other."""
    plan, maps = make_plan(POISSON, num_steps=4), source._arrays
    monkeypatch.setattr(array_source, "_SMALL", small)
    monkeypatch.setattr(streaming, "_LARGE", DATA["x"].nbytes - 1)
    np.save(tmp_path / "other.npy", DATA["x"][::-1])
    (tmp_path / "other.npy").rename(tmp_path / "x.npy")
    with pytest.raises(ValueError, match="a file that was exchanged since"):
        ArraySource(maps)
    with pytest.warns(UserWarning, match="read whole: .* exchanged since"):
        found = fit(plan, maps)
    chex.assert_trees_all_equal(found.params, fit(plan, DATA).params)


@pytest.mark.parametrize(
    ("sampler", "changes", "said"),
    [
        (sampling.FullBatch(), {}, "reads all records in a step"),
        (POISSON, {"y": jnp.asarray(DATA["y"])}, "not all .* are NumPy arrays"),
        (sampling.TruncatedPoisson(sampling_prob=0.5), {}, "makes a number for each"),
        (POISSON, {"x": "c"}, "may change in place, unless .* mode='r'"),
        (POISSON, {"x": "r+"}, "may change in place, unless .* mode='r'"),
    ],
    ids=["all", "JAX", "half", "c", "r+"],
)
def test_a_large_map_that_is_read_whole_warns(
    sampler: Any,
    changes: Any,
    said: str,
    source: ArraySource,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """When arguments are checked, before anything is read."""
    if isinstance(mode := changes.get("x"), str):
        changes = {"x": np.load(tmp_path / "x.npy", mmap_mode=mode)}  # pyright: ignore
    plan, maps = make_plan(sampler), source._arrays | changes
    monkeypatch.setattr(streaming, "_LARGE", DATA["x"].nbytes - 1)
    monkeypatch.setattr(streaming, "_MOST_WORDS", N - ("number" in said))
    with (
        pytest.warns(
            UserWarning, match=f"data has a memory-mapped array .*{said}"
        ) as found,
        pytest.raises(TypeError, match="microbatch_size must be"),
    ):
        fit(plan, maps, microbatch_size="few")
    assert [x.filename for x in found] == [__file__]


class Items:
    """A reader of single records, as grain's are."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return {name: array[index] for name, array in DATA.items()}


def parquet(folder: Path) -> ParquetSource:
    """In row groups of 50 records, by the columns' names."""
    import pyarrow as pa
    from pyarrow import parquet

    x = pa.FixedSizeListArray.from_arrays(X.reshape(-1), D)
    path = folder / "records.parquet"
    parquet.write_table(pa.table({"x": x, "y": DATA["y"]}), path, row_group_size=50)
    return ParquetSource(path)


def source_of(kind: str, maps: ArraySource, folder: Path) -> jaxdp.data.Source:
    if kind == "items":
        return ItemSource(Items())
    if kind == "grain":
        import grain

        return ItemSource(grain.MapDataset.source(Items()))
    if kind == "datasets":
        import datasets

        return ItemSource(datasets.Dataset.from_dict(DATA).with_format("numpy"))
    if kind == "parquet":
        return parquet(folder)
    if kind == "concatenated":
        parts = [
            {k: v[cut] for k, v in DATA.items()} for cut in (np.s_[:70], np.s_[70:])
        ]
        return jaxdp.data.concatenated(map(ArraySource, parts))
    return maps


SAMPLERS = {
    "maps": POISSON,
    "items": sampling.FixedSize(16),
    "grain": sampling.ShuffledEpochs(60),
    "datasets": sampling.CyclicEpochs(60),
    "parquet": sampling.CyclicPoisson(num_groups=3, sampling_prob=0.2),
    "concatenated": sampling.SinglePass(30),
}


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [*SAMPLERS.items(), *(("maps", each) for each in list(SAMPLERS.values())[1:])],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_the_bits_of_data_in_memory(
    kind: str,
    sampler: Any,
    source: ArraySource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kind of source once, and each sampler, whose draws do not see the source.

    Also in blocks of 3 steps, which do not divide the chunks of 5, nor those the run.
    """
    plan, read = make_plan(sampler), source_of(kind, source, tmp_path)
    whole = fit(plan, DATA)
    monkeypatch.setattr(streaming, "_BLOCK", 3 * sampler.rows(N) * (4 * D + 1))
    again = fit(plan, read, chunk=5)
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)


@pytest.mark.parametrize("wide", [False, True])
def test_files_have_the_precision_of_the_caller(wide: bool) -> None:
    """Another thread reads them, whose precision is its own."""
    plan = make_plan(POISSON, num_steps=4)
    like = {"x": X, "y": np.arange(N)}
    with jax.enable_x64(wide):
        whole = fit(plan, like)
        again = fit(plan, ArraySource(like), chunk=2)
    chex.assert_trees_all_equal(again.params, whole.params)


def test_keys_from_entropy_draw_the_same_from_files(
    source: ArraySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches of a block carry a hash of their keys, each its own."""
    plan, keys = make_plan(POISSON), Keys.from_entropy()
    args: Any = {"value_fn": value_fn, "optimizer": SGD, "check_isolation": False}
    whole = jaxdp.fit(plan, keys, PARAMS, DATA, **args)
    monkeypatch.setattr(
        keys_lib, "_spent", set()
    )  # The same noise, for the comparison.
    again = jaxdp.fit(plan, keys, PARAMS, source, chunk=5, **args)
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "sampling": sampling.SinglePassRestarts(
                period=4, restart_batch_size=40, batch_size=8
            ),
            "num_directions": 2,
        },
        # Every step is a restart: a program of one phase is compiled in half the time.
        {
            "sampling": sampling.MultiPassRestarts(period=1, restart_sampling_prob=0.1),
            "oracle": "scalar",
            "share_directions": True,
            "direction": "sphere",
            "prefix_noise": "independent",
            "delta": None,
        },
    ],
    ids=["SinglePassRestarts", "MultiPassRestarts"],
)
def test_the_bits_of_restarts(changes: dict[str, Any], source: ArraySource) -> None:
    """A large batch and small ones in each period; the last period is cut."""
    plan = make_restarts(**changes)
    whole = fit(plan, DATA, optimizer=None)
    again = fit(plan, source, optimizer=None, chunk=8)
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)


@pytest.mark.slow
def test_phases_of_a_source_that_fills_one_array() -> None:
    """The rows of the second phase are read over those of the first."""
    size, dim = 1000, 1500
    records = np.random.default_rng(0).normal(size=(4 * size, dim)).astype(np.float32)

    class Reused(ArraySource):
        held = np.empty((2 * size, dim), np.float32)

        def rows(self, indices: np.ndarray) -> Any:
            return np.take(
                records, indices, axis=0, out=self.held[: len(indices)], mode="clip"
            )

    plan = plans.O2NC(
        num_examples=4 * size,
        num_steps=4,
        sampling=sampling.SinglePassRestarts(
            period=2, restart_batch_size=size, batch_size=size
        ),
        relation="replace_one",
        restart_l2_clip_norm=3.0,
        l2_clip_norm=0.5,
        smoothing_radius=0.5,
        max_step=0.06,
        window=5,
        num_directions=2,
        learning_rate=0.02,
        noise_multiplier=0.2,
        delta=1e-5,
    )
    given: Any = {"optimizer": None, "check_isolation": False}
    given |= {"value_fn": lambda w, x: jnp.sqrt(1 + (x @ w - 1.0) ** 2)}
    whole, *others = (
        jaxdp.fit(plan, Keys.insecure(0), jnp.zeros(dim), of, **given)
        for of in (records, *[Reused(records)] * 4)
    )
    for again in others:
        chex.assert_trees_all_equal(again.info.releases, whole.info.releases)


def test_one_chunk_is_read_while_another_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next block is read before the steps of the last one are seen as done.

    They wait for it here, so that the test does not depend on which is faster.
    """
    plan, threads, waited = make_plan(POISSON, num_steps=4), [], []
    read, steps = [threading.Event() for _ in range(5)], streaming.steps

    class Watched(ArraySource):
        def rows(self, indices: np.ndarray) -> Any:
            read[len(threads)].set()
            threads.append((threading.current_thread().name, len(indices)))
            return super().rows(indices)

    def waiting(run: Any, *given: Any) -> Any:
        def running(carry: Any, keys: Any, block: Any, *bounds: Any) -> Any:
            last = int(bounds[1])
            # The first event is of the records that tell shapes.
            waited.append(last == 4 or read[last + 1].wait(timeout=20))
            return run(carry, keys, block, *bounds)

        return steps(running, *given)

    monkeypatch.setattr(streaming, "steps", waiting)
    fit(plan, Watched(DATA), chunk=1)
    assert waited == [True] * 4
    names, sizes = zip(*threads, strict=True)
    # The first and the last record, then the rows of each step.
    assert sizes == (2, *[POISSON.rows(N)] * 4)
    assert names[0] == threading.current_thread().name and len(set(names[1:])) == 1
    assert "jaxdp-source" in names[1]
    assert not any("jaxdp-source" in t.name for t in threading.enumerate())


def test_rows_by_hand_are_the_same_batch(source: ArraySource) -> None:
    plan, keys = make_plan(POISSON), Keys.insecure(3)
    drawn = sampling.draw(plan, keys, 4)
    batch = drawn.with_records(source.rows(np.asarray(drawn.index)))
    chex.assert_trees_all_equal(batch, sampling.batch(plan, keys, 4, DATA))
    maker = plan.transform(keys)
    state = maker.init(PARAMS)
    with pytest.raises(ValueError, match=r"batch must have records.*with_records"):
        jax.eval_shape(
            lambda: maker.update(None, state, PARAMS, value_fn=value_fn, batch=drawn)
        )
    with pytest.raises(
        ValueError, match=r"48 rows, got shape \(3,\) at records\['x'\]"
    ):
        drawn.with_records({"x": np.zeros(3)})
    with pytest.raises(ValueError, match="got no array"):
        drawn.with_records(None)


class Lying(ArraySource):
    """A source that can be made to lie, or to break, in one of its calls."""

    calls, at, how = 0, 10**9, None

    def rows(self, indices: np.ndarray) -> Any:
        self.calls += 1
        found = super().rows(indices)
        return found if self.calls < self.at or self.how is None else self.how(found)


def lying(at: int, how: Any) -> Lying:
    source = Lying(DATA)
    source.at, source.how = at, how
    return source


def broken(found: Any) -> Any:
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda rows: {"x": rows["x"]}, r"records of .* 'y'"),
        (lambda rows: rows | {"x": rows["x"][:-1]}, r"float64\[47, 3\].*48 indices"),
        (lambda rows: rows | {"x": rows["x"][:, :2]}, r"float64\[48, 2\]"),
        (lambda rows: rows | {"y": rows["y"].astype(float)}, r"float64\[48\]"),
    ],
    ids=["structure", "rows", "shape", "dtype"],
)
def test_rows_that_are_not_what_they_were(how: Any, words: str) -> None:
    """In a later fetch: before what it is for is charged or computed."""
    with pytest.raises(ValueError, match=words):
        fit(make_plan(POISSON), lying(3, how), chunk=1)


class TooLong(ArraySource):
    def __len__(self) -> int:
        return super().__len__() + 1


@pytest.mark.parametrize(
    ("sampler", "data", "error", "words"),
    [
        (
            POISSON,
            lambda: ArraySource(X[:-1]),
            ValueError,
            "400 records, got .* of 399",
        ),
        (POISSON, lambda: TooLong(X[:-1]), ValueError, "its length says.*IndexError"),
        (POISSON, lambda: lying(1, lambda x: {"x": [1, 2]}), TypeError, "NumPy arrays"),
        (
            POISSON,
            lambda: lying(1, lambda x: {"x": np.array(["a", "b"])}),
            TypeError,
            r"must be numbers, got dtype text at data\['x'\]",
        ),
        (POISSON, lambda: lying(1, lambda x: {}), ValueError, "got none"),
        (sampling.FullBatch(), lambda: ArraySource(X), TypeError, "read all records"),
        (
            sampling.ShuffledEpochs(20),
            lambda: IteratorSource(iter([X]), N),
            TypeError,
            r"must be SinglePass.*\(IteratorSource\).*nobody takes",
        ),
        (POISSON, lambda: iter([X]), TypeError, "cannot be sampled"),
    ],
    ids=lambda x: getattr(type(x), "__name__", None),
)
def test_what_is_refused_before_keys_are_spent(
    sampler: Any, data: Any, error: Any, words: str
) -> None:
    keys = Keys.from_entropy()
    for _ in range(2):
        with pytest.raises(error, match=words):
            jaxdp.fit(
                make_plan(sampler),
                keys,
                PARAMS,
                data(),
                value_fn=value_fn,
                optimizer=SGD,
            )
    with pytest.raises(TypeError, match=r"sources are for jaxdp\.fit"):
        sampling.batch(make_plan(POISSON), Keys.insecure(0), 0, ArraySource(X))


@pytest.mark.parametrize("kind", ["maps", "parquet"])
def test_a_file_that_changed_since_it_was_opened_spends_no_keys(
    kind: str, source: ArraySource, tmp_path: Path
) -> None:
    """They serve a run over the file that is there now."""
    keys, path = Keys.from_entropy(), tmp_path / "y.npy"
    read = source_of(kind, source, tmp_path)
    if kind == "parquet":
        path = tmp_path / "records.parquet"
    args: Any = {"value_fn": value_fn, "optimizer": SGD, "check_isolation": False}
    os.utime(path, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{path.name}' is another file now"):
            jaxdp.fit(make_plan(POISSON), keys, PARAMS, read, **args)
    again = ArraySource(DATA) if kind == "maps" else parquet(tmp_path)
    jaxdp.fit(make_plan(POISSON), keys, PARAMS, again, chunk=5, **args)
    with pytest.raises(ValueError, match="already served"):
        jaxdp.fit(make_plan(POISSON), keys, PARAMS, again, chunk=5, **args)


def test_a_single_pass_over_what_is_read_once() -> None:
    """Also where more comes than was said; where less does, that is named."""
    plan = make_plan(sampling.SinglePass(30))
    more = {k: np.concatenate([v, v[:50]]) for k, v in DATA.items()}

    def read(length: int) -> IteratorSource:
        cuts = (slice(i, min(i + 70, length)) for i in range(0, length, 70))
        return IteratorSource(({k: v[cut] for k, v in more.items()} for cut in cuts), N)

    whole = fit(plan, DATA)
    for length in (N, N + 50):
        again = fit(plan, read(length))
        chex.assert_trees_all_equal(again.params, whole.params)
    with pytest.raises(ValueError, match=f"{N} records, got an iterator .* after 350"):
        fit(plan, read(350))


# --- the record ---------------------------------------------------------------------


def resume(folder: Path, data: Any, **options: Any) -> Any:
    args = {"value_fn": value_fn, "optimizer": SGD, "check_isolation": False}
    return jaxdp.resume(folder, PARAMS, data, **(args | options))


@pytest.mark.parametrize("fetch", [2, 3, 4], ids=["first", "under way", "next chunk"])
def test_a_run_goes_on_at_the_record_where_reading_failed(
    fetch: int, tmp_path: Path, source: ArraySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 5 steps and blocks of 3: a chunk is two fetches."""
    monkeypatch.setattr(streaming, "_BLOCK", 3 * POISSON.rows(N) * (4 * D + 1))
    plan, how = make_plan(POISSON), {"chunk": 5}
    whole = fit(plan, source, ledger=tmp_path / "whole", **how)
    run = tmp_path / "run"
    with pytest.raises(OSError, match="disk is gone") as caught:
        fit(plan, lying(fetch, broken), ledger=run, **how)
    lines = (run / "ledger.jsonl").read_text().splitlines()
    # The first block of a chunk is read before the chunk is charged; a later one is not.
    charged = {2: 0, 3: 1, 4: 1}[fetch]
    assert sum('"intent"' in line for line in lines) == charged, lines
    said = {2: "No step from 0 on", 3: "steps 0 to 4 were", 4: "No step from 5 on"}
    assert said[fetch] in caught.value.__notes__[0]
    other = ArraySource(DATA | {"x": X + (np.arange(N) == 7)[:, None]})
    with pytest.raises(ValueError, match="data are not those of the run"):
        resume(run, other)
    again = resume(run, source)
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)
    assert again.report["steps_charged"] == plan.num_steps


def test_a_file_that_changes_under_the_run(source: ArraySource, tmp_path: Path) -> None:
    """The chunk after the change is not charged: its rows were read, and then refused."""
    run, path = tmp_path / "run", tmp_path / "y.npy"

    def touch(step: int, *_: Any) -> None:
        if step == 4:
            os.utime(path, ns=(1, 1))

    plan = make_plan(POISSON)
    with pytest.raises(ValueError, match=r"y\.npy' is another file now"):
        fit(plan, source, ledger=run, chunk=2, callback=touch)
    lines = (run / "ledger.jsonl").read_text().splitlines()
    # The steps 4 and 5 may have been read before.
    assert sum('"intent"' in line for line in lines) in (2, 3)
    assert len(lines) % 2 == 1  # Each has its releases.
    with pytest.raises(ValueError, match=r"y\.npy' is another file now"):
        resume(run, source)
    reopened = ArraySource(
        {k: np.load(tmp_path / f"{k}.npy", mmap_mode="r") for k in DATA}
    )
    again = resume(run, reopened)  # Of the same content.
    assert again.report["steps_charged"] == plan.num_steps


def test_what_is_read_once_has_no_record(tmp_path: Path) -> None:
    plan, keys = make_plan(sampling.SinglePass(30)), Keys.from_entropy()
    once = IteratorSource(iter([DATA]), N)
    for _ in range(2):
        with pytest.raises(ValueError, match="ledger must be None"):
            jaxdp.fit(
                plan,
                keys,
                PARAMS,
                once,
                value_fn=value_fn,
                optimizer=SGD,
                ledger=tmp_path / "run",
            )
    assert not (tmp_path / "run").exists()


# --- many records -------------------------------------------------------------------


class Counting(jaxdp.data.Source):
    """1e8 records that are computed from their indices."""

    def __init__(self, size: int):
        self.size, self.seen = size, []

    def __len__(self) -> int:
        return self.size

    def rows(self, indices: np.ndarray) -> Any:
        self.seen.append(indices)
        return np.stack([indices % 1000, indices % 7], axis=1).astype(np.float32)

    def digest(self) -> bytes:
        return b"counting"

    def check(self) -> None:
        pass


LARGE = 10**8


def test_a_hundred_million_records() -> None:
    """Nothing is as large as the data: no array that is there while it runs."""
    plan = make_plan(
        sampling.TruncatedPoisson(sampling_prob=64 / LARGE),
        num_examples=LARGE,
        num_steps=4,
    )
    source, sizes = Counting(LARGE), []
    loss = lambda w, x: (x - w).sum(axis=1) / 1000  # noqa: E731
    before = {id(x): x for x in jax.live_arrays()}  # Of other tests.

    def measured(*_: Any) -> None:
        made = (x for x in jax.live_arrays() if id(x) not in before)
        sizes.append(max(x.nbytes for x in made))

    result = jaxdp.fit(
        plan,
        Keys.insecure(0),
        jnp.zeros(2),
        source,
        value_fn=loss,
        optimizer=SGD,
        chunk=2,
        callback=measured,
    )
    assert result.report["steps_done"] == 4
    assert len(sizes) == 2 and 0 < max(sizes) < 2**20
    drawn = source.seen[-1]
    assert drawn.dtype == np.int64 and drawn.size == 2 * plan.sampling.rows(LARGE)
    assert LARGE // 2 < drawn.max() < LARGE
    large = make_plan(sampling.FixedSize(LARGE // 16), num_examples=LARGE)
    with pytest.raises(ValueError, match="less than a 32nd of 100000000"):
        streaming.opened(source, large)


@pytest.mark.parametrize(
    "sampler",
    [
        sampling.TruncatedPoisson(sampling_prob=64 / LARGE),
        sampling.FixedSize(64),
        sampling.ShuffledEpochs(64),
        sampling.CyclicEpochs(64),
        sampling.CyclicPoisson(num_groups=5, sampling_prob=320 / LARGE),
        sampling.SinglePass(64),
        sampling.SinglePassRestarts(period=2, restart_batch_size=64, batch_size=8),
        sampling.MultiPassRestarts(
            period=2, restart_sampling_prob=64 / LARGE, sampling_prob=32 / LARGE
        ),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_draws_of_a_hundred_million_records(sampler: Any) -> None:
    """By no program that has an array of their number; each among all the records.

    (They are all in the lower half by chance 2^-60 at most.)
    """
    changes: dict[str, Any] = {"num_examples": LARGE, "num_steps": 4}
    if sampler.one_size:
        plan: Any = make_plan(sampler, **changes)
    else:
        plan = make_restarts(sampling=sampler, prefix_noise="independent", **changes)
    draw: Any = streaming.drawing(plan, 4)
    made = draw.lower(Keys.insecure(0), jnp.int32(0)).compile()
    memory = made.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2**20
    for phase, drawn in made(Keys.insecure(0), jnp.int32(0)).items():
        rows = sampler.of_phase(phase).rows(LARGE)
        index, mask = np.asarray(drawn.index), np.asarray(drawn.mask)
        assert index.shape == mask.shape == (4 // len(plan.phases), rows)
        for own, present in zip(index, mask, strict=True):
            assert len({*own[present]}) == present.sum() > 0
        if "Pass" not in type(sampler).__name__ or sampler.amplifies:
            assert LARGE // 2 < index[mask].max() < LARGE


def test_rows_are_in_the_precision_of_jax() -> None:
    """Integers of 64 bits are not wrapped."""
    rows = streaming._own(np.array([2**32, -(2**40), 5]), 4)
    assert rows.tolist() == [2**31 - 1, -(2**31), 5, 0]
