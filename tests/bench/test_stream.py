"""The benchmark of data in files, on small files."""

import json
from pathlib import Path
from typing import Any

import pytest

BENCH = "stream"

pytestmark = pytest.mark.slow


def test_rows_of_throughput(bench: Any, tmp_path: Path) -> None:
    """(That both sides give the same bits is asserted there.)"""
    rows = bench.throughput("linear", (), 8, 400, 3, 2, tmp_path)
    assert [row.metric for row in rows] == [
        "size of the data",
        "steps per second",
        "steps per second, memory",
    ]
    assert all(row.value > 0 for row in rows)
    assert rows[1].baseline == "memory" and rows[1].ratio > 0


def test_reading_is_hidden_behind_steps_that_cost_more() -> None:
    """In the kept rows: within a twentieth of data in memory."""
    path = Path(__file__).resolve().parents[2] / "bench/results/cpu/stream.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for case in ("4 x 2048 hidden, by calls", "one core computes"):
        (ratio,) = (
            row["ratio"]
            for row in rows
            if row["metric"] == "steps per second" and case in row["case"]
        )
        assert ratio > 0.95, case


def test_rows_of_memory(bench: Any, tmp_path: Path) -> None:
    """The file, of 400 MB, is not held: what it adds is less than a fourth of it."""
    rows = bench.memory("a large file", 400 * 10**6, 256, tmp_path)
    found = {row.metric: row for row in rows}
    if found["peak memory"].value is None:
        pytest.skip("needs /proc")
    peak = found["peak memory"]
    assert peak.value - peak.value / peak.ratio < 100
    assert not list(tmp_path.iterdir())
