"""What Lasry-Lions smoothing costs: rows, and the figures that are told of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxdp.models import envelopes

pytestmark = pytest.mark.slow

BENCH = "envelopes"  # For the fixture `bench`.
ROOT = Path(__file__).resolve().parents[2]


def test_rows(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "bowl, cutting planes"
    monkeypatch.setattr(bench, "CASES", {name: bench.CASES[name]})
    rows = bench.run(True)
    assert [row.case for row in rows] == [f"{name}, d = {d}, to 1e-06" for d in (2, 5)]
    assert all(5 < row.value < 20 for row in rows)


def test_kept_figures_are_those_of_the_docs(bench: Any) -> None:
    kept = json.loads((ROOT / "bench/results/cpu/envelopes.json").read_text())["rows"]
    cases = [
        f"{name}, d = {dim}, to {tolerance:.0e}"
        for name, (_, _, sizes) in bench.CASES.items()
        for dim, tolerance in sizes
    ]
    assert [row["case"] for row in kept] == cases
    said = str(envelopes.__doc__).replace("\n", " ")
    for row in kept:
        assert f" {row['value']:.0f}" in said, row["case"]
    # The page renders its figures from the kept rows: all of them.
    page = (ROOT / "docs/results/nonsmooth.md").read_text()
    assert all(f'case = "{case}"' in page for case in cases)
