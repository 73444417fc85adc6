"""Quality of synthetic tables: distances, correlations and their intervals."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

from jaxdp.data import binning, quality, synthesis

BINS = binning.binning(
    {
        "age": {"edges": [0, 20, 40, 60, 100]},
        "smoker": {"values": ["no", "yes"]},
        "town": {"values": ["A", "B", "C"]},
    }
)
RNG = np.random.default_rng(0)
TABLE = RNG.dirichlet(np.ones(24)).reshape(BINS.sizes)
OTHER = RNG.dirichlet(np.ones(24)).reshape(BINS.sizes)


def given(queries: Any, shares: np.ndarray, noise_std: float) -> quality.Measurements:
    stds = np.full(len(queries.columns), noise_std)
    return quality.Measurements(queries, shares, stds)


def test_tables_are_sums() -> None:
    found = quality.tables(BINS, TABLE.reshape(-1).astype(np.float32))
    assert list(found) == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]
    for columns, table in found.items():
        others = tuple(i for i in range(3) if i not in columns)
        np.testing.assert_allclose(table, TABLE.sum(others), atol=1e-6)


def test_measured_tables_are_of_the_least_noise() -> None:
    """A column comes from its own marginal, or from the pair with the fewest cells."""
    queries = synthesis.marginals(BINS.sizes, (2,))
    shares = np.concatenate(
        [TABLE.sum(2).reshape(-1), TABLE.sum(1).reshape(-1), TABLE.sum(0).reshape(-1)]
    )
    found = quality.measured(given(queries, shares, 0.1))
    assert found.stds[(0, 1)] == pytest.approx(0.1)
    assert found.stds[(0,)] == pytest.approx(0.1 * np.sqrt(2))  # Of (0, 1).
    assert found.stds[(1,)] == pytest.approx(0.1 * np.sqrt(3))  # Of (1, 2).
    for columns, table in found.tables.items():
        others = tuple(i for i in range(3) if i not in columns)
        np.testing.assert_allclose(table, TABLE.sum(others), atol=1e-6)
    own = quality.measured(
        given(synthesis.marginals(BINS.sizes, (1,)), shares[:9], 0.1)
    )
    assert set(own.tables) == {(0,), (1,), (2,)}
    none = given(queries, shares, 0.1)._replace(noise_stds=np.array([0.1, np.inf, 0.2]))
    found = quality.measured(none)  # Of one that was not measured, nothing.
    assert set(found.tables) == {(0,), (1,), (2,), (0, 1), (1, 2)}
    assert found.stds[(1, 2)] == pytest.approx(0.2)


def test_correlation_is_numpys() -> None:
    rows, columns = np.array([10.0, 30, 50, 80]), np.array([0.0, 1])
    table = TABLE.sum(2)
    cells = np.array(list(itertools.product(range(4), range(2))))
    cov = np.cov(rows[cells[:, 0]], columns[cells[:, 1]], aweights=table.reshape(-1))
    wanted = cov[0, 1] / np.sqrt(cov[0, 0] * cov[1, 1])
    assert quality.correlation(table, rows, columns) == pytest.approx(wanted)
    assert quality.correlation(3 * table, rows, columns) == pytest.approx(wanted)
    constant = np.array([[0.0, 1], [0, 0], [0, 0], [0, 0]])
    assert np.isnan(quality.correlation(constant, rows, columns))


@pytest.mark.parametrize("std", [0.002, 0.02])
def test_intervals_hold_the_truth_as_often_as_they_say(std: float) -> None:
    """Of 400 noised tables: 95%, less five deviations of that share (p < 1e-6)."""
    rows, columns = np.array([10.0, 30, 50, 80]), np.array([0.0, 1])
    true, synthetic = TABLE.sum(2), OTHER.sum(2)
    far = quality.total_variation(synthetic, true)
    related = quality.correlation(true, rows, columns)
    rng = np.random.default_rng(1)
    held = np.zeros(2)
    for _ in range(400):
        noised = true + std * rng.normal(size=true.shape)
        low, high = quality.distance_interval(synthetic, noised, std)
        held[0] += low <= far <= high
        near = 0.7 * true + 0.3 * synthetic
        low, high = quality.correlation_interval(near, noised, std, rows, columns)
        held[1] += low <= related <= high
    assert np.all(held / 400 >= 0.95 - 5 * np.sqrt(0.95 * 0.05 / 400))


def test_intervals_say_that_nothing_is_seen() -> None:
    rows, columns = np.arange(4.0), np.arange(2.0)
    table = TABLE.sum(2)
    noised = table + np.random.default_rng(0).normal(size=table.shape)
    interval = quality.correlation_interval(table, noised, 1.0, rows, columns)
    assert interval == (-1, 1)
    low, high = quality.distance_interval(table, noised, 1.0)
    assert (low, high) == (0, 1)


def test_report_of_all_columns_and_pairs() -> None:
    synthetic, other = (x.reshape(-1).astype(np.float32) for x in (TABLE, OTHER))
    queries = synthesis.marginals(BINS.sizes, (1,))
    shares = np.concatenate([OTHER.sum((1, 2)), OTHER.sum((0, 2)), OTHER.sum((0, 1))])
    counts = quality.measured(given(queries, shares, 1e-6))
    found = quality.judged(BINS, synthetic, counts, {"test": other})
    json.dumps(found, allow_nan=False)
    by_name: dict[Any, Any] = {tuple(one["columns"]): one for one in found["tables"]}
    assert len(by_name) == 6
    far = np.abs(TABLE.sum((1, 2)) - OTHER.sum((1, 2))).sum() / 2
    age = by_name[("age",)]
    assert age["test"] == pytest.approx(far, abs=1e-6)
    assert age["interval"] == pytest.approx([far, far], abs=1e-4)
    assert "interval" not in by_name[("age", "town")]  # Pairs were not measured.
    (related,) = found["correlations"]  # Towns have no order.
    assert related["columns"] == ["age", "smoker"]
    middles = np.array([10.0, 30, 50, 80]), np.array([0.0, 1])
    for name, table in (("synthetic", TABLE), ("test", OTHER)):
        wanted = quality.correlation(table.sum(2), *middles)
        assert related[name] == pytest.approx(wanted, abs=1e-5)
    short = quality.summarised(found)
    assert {name: one["count"] for name, one in short.items()} == {
        "columns": 3,
        "pairs": 3,
        "correlations": 1,
    }
    worst = max(one["test"] for one in found["tables"] if len(one["columns"]) == 2)
    assert short["pairs"]["test"]["worst"] == worst
    off = abs(related["synthetic"] - related["test"])
    assert short["correlations"]["test"]["mean"] == pytest.approx(off)


def test_correlations_are_of_the_records_without_blanks() -> None:
    """As those of the table that has no cells of blanks; where all are blank, none."""
    spec = {
        "age": {"edges": [0, 20, 40, 60, 100], "missing": "mark"},
        "smoker": {"values": ["no", "yes"], "missing": "mark"},
    }
    made = binning.binning(spec)
    table = np.random.default_rng(2).dirichlet(np.ones(15)).reshape(made.sizes)
    queries = synthesis.marginals(made.sizes, (2,))
    for blank in (False, True):
        if blank:
            table = np.where(np.arange(5)[:, None] < 4, 0, table)
            table /= table.sum()
        shares = table.reshape(-1)
        counts = quality.measured(given(queries, shares, 1e-6))
        synthetic = shares.astype(np.float32)
        (found,) = quality.judged(made, synthetic, counts, {})["correlations"]
        if blank:
            assert (found["synthetic"], found["interval"]) == (None, [-1, 1])
            continue
        middles = np.array([10.0, 30, 50, 80]), np.array([0.0, 1])
        wanted = float(quality.correlation(table[:4, :2], *middles))
        assert found["synthetic"] == pytest.approx(wanted, abs=1e-5)
        assert found["interval"] == pytest.approx([wanted, wanted], abs=1e-4)


def test_a_constant_column_has_no_correlation() -> None:
    table = np.zeros(BINS.sizes)
    table[0] = TABLE[0] / TABLE[0].sum()
    weights = table.reshape(-1).astype(np.float32)
    found = quality.judged(BINS, weights, None, {"test": weights})
    assert found["correlations"][0]["synthetic"] is None
    assert quality.summarised(found)["correlations"] == {"count": 1}
    json.dumps(found, allow_nan=False)
