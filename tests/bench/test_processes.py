"""Runs of several processes beside those of one device: a small one, and the kept ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = "processes"

KEPT = Path(__file__).resolve().parents[2] / "bench/results/cpu/processes.json"
#: Differences from one device: of releases in standard deviations of their noise, and of
#: parameters in their greatest movement. A loss of about 1 rounds by 2^-24, a slope divides
#: that by twice the radius of 1e-3, and its noise is of 0.6: 5e-5 for each of the roundings
#: that add up in a mean over records.
TOLERANCE = 1e-3


def test_numbers_differ_that_are_not_the_same_bits(bench: Any) -> None:
    a = np.asarray([1.0, 0.0, np.nan, 2.0], np.float32)
    assert bench.differing(a, a) == 0
    assert bench.differing(a, np.asarray([1.0, -0.0, np.nan, 2 + 2**-22])) == 2


def test_kept_rows_of_every_layout(bench: Any) -> None:
    rows = {
        (row["case"], row["metric"]): row
        for row in json.loads(KEPT.read_text())["rows"]
    }
    for method in bench.METHODS:
        for layout, (count, devices) in bench.LAYOUTS.items():
            check(rows, f"{method}, {layout}", count, devices)


# Six runs in processes of their own, of which each traces its program: a minute or two.
@pytest.mark.slow
def test_a_run_that_two_processes_share(bench: Any) -> None:
    rows = {(row.case, row.metric): row.__dict__ for row in bench.run(quick=True)}
    for layout, (count, devices) in bench.QUICK.items():
        check(rows, f"DPZero, {layout}", count, devices)


def check(rows: dict[Any, Any], case: str, count: int, devices: int) -> None:
    """Shares of a quarter, a run like that of one device, and the same one after a kill."""
    if count * devices == 1:
        assert rows[case, "parameters of a device"]["value"] == 1
    else:
        # Norms, a few numbers, are on every device.
        share = rows[case, "parameters of a device"]["value"]
        assert share == pytest.approx(1 / 4, rel=0.01)
        share = rows[case, "parameters of a process"]["value"]
        assert share == pytest.approx(1 / count, rel=0.01)
        for what in ("releases", "parameters"):
            row = rows[case, f"{what}, greatest difference from 1 device"]
            assert row["ratio"] < TOLERANCE, (case, what)
    assert rows[case, "charged steps after a kill"]["value"] == 8
    for what in ("releases", "parameters"):
        assert rows[case, f"{what} that differ after a kill"]["value"] == 0
