"""The study of synthetic tables beside peers: its figures, and what it has shown."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow

BENCH = "tables"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "tables.json"
CASES = ("a: 295 pairs, n = 10000", "a: 295 pairs, n = 100000")
MIXED = ("c: pairs of ten columns, n = 1000",)


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(KEPT.read_text())["rows"]
    return {(row["case"], row["metric"]): row for row in rows}


def test_tables_are_of_the_sizes_that_are_said(bench: Any) -> None:
    cases = {case.name[0]: case for case in bench.cases(quick=False)}
    found = {
        n: (c.queries.num_queries, c.queries.domain_size) for n, c in cases.items()
    }
    assert found["a"] == (295, 5040)
    assert found["b"] == found["d"] == (448, 256)
    assert found["c"][1] == 17280
    for case in cases.values():
        codes = case.records(1000, 0)
        assert codes.min() >= 0 and codes.max() < case.queries.domain_size
        true = np.bincount(codes, minlength=case.queries.domain_size) / 1000
        assert bench.errors(case, true.astype(np.float32), codes) == pytest.approx(
            (0, 0), abs=1e-6
        )


@pytest.mark.parametrize("case", [*CASES, *MIXED])
def test_what_is_chosen_is_no_worse_than_peers(kept: Any, case: str) -> None:
    """Within the intervals of both."""
    metric = "total variation: "
    ours = kept[case, f"{metric}synthesize"]
    peers = [
        row
        for (name, what), row in kept.items()
        if name == case and what.startswith(f"{metric}mbi")
    ]
    assert len(peers) >= 2 and ours["count"] >= 5
    for peer in peers:
        assert ours["value"] - ours["half_width"] < peer["value"] + peer["half_width"]
    assert ours["value"] < 0.7 * kept[case, f"{metric}algorithm 5"]["value"]


def test_flags_by_the_commands_own_choice(kept: Any) -> None:
    at = "b: 448 triples of flags, n = 100000"
    # Of MWEM by single queries, in the saddle study.
    assert kept[at, "largest error: synthesize"]["value"] < 0.0019
