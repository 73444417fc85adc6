"""Costs against sizes: slopes and their reasons, and every program at small sizes."""

from typing import Any

import jax
import numpy as np
import pytest

BENCH = "scale"


def test_slope_is_of_the_three_largest_sizes(bench: Any) -> None:
    sizes = [1, 10, 100, 1000]
    assert bench.slope(sizes, [7.0, 2.0, 20.0, 200.0]) == pytest.approx(1)
    assert bench.slope(sizes, [1.0, 5.0, 5.0, 5.0]) == pytest.approx(0)


def test_a_slope_that_is_not_one_says_why(bench: Any) -> None:
    sizes = [10, 100, 1000]
    exact = bench.fitted("n", "time", sizes, [3.0, 30.0, 300.0], "because")
    other = bench.fitted("n", "time", sizes, [3.0, 20.0, 150.0], "because")
    none = bench.fitted("n", "time", sizes, [0.0, 0.0, 0.0], "because")
    assert (exact.value, exact.note) == (pytest.approx(1), "")
    assert other.value < 0.95 and other.note == "because"
    assert none.value is None and none.note.startswith("skipped")
    assert exact.unit == other.unit == none.unit == ""


@pytest.mark.parametrize(
    ("name", "size"),
    [("poisson", 256), ("full", 256), ("several", 2), ("whole", 3)],
)
def test_programs_run(bench: Any, name: str, size: int) -> None:
    for leaf in jax.tree.leaves(getattr(bench, name)(size)()):
        assert np.isfinite(leaf).all() if leaf.dtype == np.float32 else True


def test_an_axis_has_a_row_for_each_size_and_one_for_its_slope(bench: Any) -> None:
    rows = bench.timed(
        "d, gaussian", [10, 100, 1000], lambda d: bench.vector("gaussian", d), 1, "x"
    )
    assert [row.case for row in rows[:-1]] == [
        f"d, gaussian, d = {d}" for d in (10, 100, 1000)
    ]
    assert all(row.value > 0 and row.unit == "ms" for row in rows[:-1])
    assert rows[-1].metric == "slope of time"


def test_memory_of_abstract_shapes_grows_with_d(bench: Any) -> None:
    """A perturbed copy, and the parameters themselves."""
    rows = bench.abstract("rademacher", [10**7, 10**8, 10**9])
    for metric in ("memory of params", "temp memory"):
        (found,) = [row for row in rows if row.metric == f"slope of {metric}"]
        assert found.value == pytest.approx(1, abs=bench.EXACT), metric
        assert found.note == ""
    (largest,) = [
        row.value
        for row in rows
        if row.metric == "memory of params" and "1e+09" in row.case
    ]
    assert largest == pytest.approx(4000, rel=1e-3)


def test_devices_share_the_records(bench: Any) -> None:
    rows = bench.devices(quick=True)
    assert not [row.note for row in rows if row.note.startswith("skipped")]
    operations = [row.value for row in rows if row.metric == "operations of a device"]
    assert operations[1] == pytest.approx(operations[0] / 2, rel=0.1)
    assert operations[2] == pytest.approx(operations[0] / 8, rel=0.2)
    counts = [row.value for row in rows if row.metric == "collectives of a device"]
    assert counts[1:] == [1, 1]


def test_the_full_batch_that_no_grid_holds_is_told(bench: Any) -> None:
    assert "bits for one contribution" in bench.too_many().note
