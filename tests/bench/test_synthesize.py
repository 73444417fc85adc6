"""The study of synthetic tables: its figures, and what it has shown."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxdp.data import quality

pytestmark = pytest.mark.slow

BENCH = "synthesize"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "synthesize.json"
METRICS = ("pairs: total variation", "worst pair", "correlations: error")


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(KEPT.read_text())["rows"]
    return {(row["case"], row["metric"]): row for row in rows}


def test_errors_are_those_of_the_tables(bench: Any) -> None:
    """Nothing is off from itself; the uniform table by what NumPy finds."""
    codes = bench.records(500, 0)
    weights = bench.weights_of(codes)
    true = quality.tables(bench.BINS, weights)
    assert bench.errors(true, true) == (0, 0, 0)
    sizes = bench.BINS.sizes
    uniform = np.full(bench.BINS.domain_size, 1 / bench.BINS.domain_size, np.float32)
    table, far = weights.reshape(sizes), []
    for i in range(8):
        for j in range(i + 1, 8):
            pair = table.sum(tuple(k for k in range(8) if k not in (i, j)))
            far.append(np.abs(pair - 1 / pair.size).sum() / 2)
    found = bench.errors(quality.tables(bench.BINS, uniform), true)
    assert found[:2] == pytest.approx((np.mean(far), np.max(far)), abs=1e-5)


# Over 10 s: six programs, one for each set of marginals.
def test_quick_run_has_all_rows(bench: Any, kept: dict[Any, Any]) -> None:
    rows = {(row.case, row.metric): row for row in bench.run(quick=True)}
    assert {name for _, name in rows} == {name for _, name in kept}
    assert all(np.isfinite(row.value) for row in rows.values())


@pytest.mark.parametrize("case", ["n = 20000, epsilon 1", "n = 2000, epsilon 1"])
def test_what_was_shown(kept: dict[Any, Any], case: str) -> None:
    """Measured pairs are better than mirror descent and than the noisy pairs."""

    def at(method: str) -> np.ndarray:
        return np.array([kept[case, f"{m}: {method}"]["value"] for m in METRICS])

    ours = at("marginals of 2, records")
    assert np.all(ours < 0.6 * at("mirror descent, records"))
    assert np.all(ours[:2] < at("noisy pairs")[:2])
    assert ours[2] < 1.1 * at("noisy pairs")[2]
    for case, row in kept.items():
        if case[1].endswith("query: marginals"):
            other = kept[case[0], "worst query: mirror descent"]
            assert row["value"] < other["value"]
