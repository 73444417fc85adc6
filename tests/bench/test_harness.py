"""The benchmarks' harness on a trivial benchmark: pairs, rows, JSON, arguments."""

import json
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> Iterator[types.SimpleNamespace]:
    """``bench`` is run from the root of the repository and never installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import bench.__main__ as command
        from bench import _harness as harness

        yield types.SimpleNamespace(command=command, harness=harness)


@pytest.fixture
def trivial(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the benchmark ``trivial`` and leaves no other."""

    def run(quick: bool) -> list[Any]:
        size = 1000 if quick else 2000
        x = jnp.ones(size)
        program = jax.jit(jnp.sin).lower(x).compile()
        sides = {"sin": lambda: program(x), "twice": lambda: program(program(x))}
        seconds = bench.harness.alternate(sides, rounds=3)
        temp = bench.harness.temp_bytes(program)
        return [
            bench.harness.paired("sin", "time", seconds, "sin", "twice"),
            bench.harness.speed("sin", "sines", seconds, "sin", "twice", size),
            bench.harness.Row("sin", "temp", float(temp), "bytes"),
            bench.harness.Row("sin", "time", None, "skipped: no reason"),
        ]

    monkeypatch.setattr(bench.command, "names", lambda: ["trivial"])
    module = types.SimpleNamespace(run=run)
    monkeypatch.setitem(sys.modules, "bench.trivial", module)


def test_a_benchmark_prints_a_table_and_writes_json(
    bench: Any, trivial: None, tmp_path: pathlib.Path, capsys: Any
) -> None:
    path = tmp_path / "new" / "trivial.json"
    assert bench.command.main(["trivial", "--quick", "--json", str(path)]) == 0
    assert "bench trivial on cpu" in capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(path.read_text(), parse_constant=refuse)
    assert [*document][:3] == ["name", "device", "versions"]
    assert [*document][3:] == ["quick", "commit", "load_average", "rows"]
    assert document["quick"] is True
    assert document["commit"] is None or len(document["commit"].rstrip("+")) == 40
    assert document["load_average"] >= 0
    assert document["name"] == "trivial"
    assert document["device"].startswith("cpu")
    assert {"python", "jax", "jaxlib", "numpy"} <= document["versions"].keys()
    assert document["versions"]["jax"] == jax.__version__
    keys = [
        *("case", "metric", "value", "unit", "baseline", "ratio"),
        *("half_width", "count", "note"),
    ]
    assert [list(row) for row in document["rows"]] == [keys] * 4
    time, speed, temp, skipped = document["rows"]
    assert (time["unit"], time["baseline"]) == ("ms", "twice")
    assert time["value"] > 0
    assert speed["ratio"] == pytest.approx(1 / time["ratio"])
    assert speed["value"] == pytest.approx(1000 / (time["value"] / 1e3))
    assert (temp["baseline"], temp["ratio"]) == (None, None)
    assert (skipped["value"], skipped["unit"]) == (None, "")
    assert skipped["note"] == "skipped: no reason"


def test_no_name_runs_them_all(bench: Any, trivial: None, capsys: Any) -> None:
    assert bench.command.main(["--quick"]) == 0
    assert "bench trivial" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonsense"], "argument name: invalid choice: 'nonsense'"),
        (["--quick", "--json", "x.json"], "argument --json: needs NAME"),
    ],
)
def test_wrong_arguments_exit_with_2_before_anything_runs(
    bench: Any, trivial: None, capsys: Any, argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.command.main(argv)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_benchmarks_are_found_on_the_disk(bench: Any) -> None:
    names = bench.command.names()
    assert {"kernels", "dpzero_step", "loop"} <= set(names)
    assert not any(name.startswith("_") for name in names)


def test_sides_alternate_and_reverse_every_round(bench: Any) -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = bench.harness.alternate(sides, rounds=3, warmup=1)
    assert "".join(calls) == "abbaabba"
    assert [len(seconds[name]) for name in "ab"] == [3, 3]


def test_ratio_is_the_median_of_the_pairs(bench: Any) -> None:
    """A machine that slows down for a round slows both sides; one spike is ignored."""
    seconds = {"a": [1.0, 10.0, 99.0], "b": [2.0, 20.0, 2.0]}
    assert bench.harness.ratio(seconds, "a", "b") == 0.5
    row = bench.harness.paired("c", "m", seconds, "a", "b", per=10)
    assert (row.value, row.unit, row.baseline, row.ratio) == (1000.0, "ms", "b", 0.5)
    assert bench.harness.speed("c", "m", seconds, "a", "b", 5) == bench.harness.Row(
        "c", "m", 0.5, "1/s", "b", 2.0
    )


def test_a_missing_library_is_a_reason_to_skip(bench: Any) -> None:
    assert not bench.harness.missing("jax")
    assert bench.harness.missing("no_such_library") == (
        "skipped: no_such_library is not installed"
    )
