"""Where the paper's algorithms win: the study's rows and its plot."""

from pathlib import Path
from typing import Any

import pytest

BENCH = "crossing"  # For the fixture `bench`.


@pytest.mark.slow  # Three methods of synthetic data, two runs of each.
def test_quick_run_has_all_methods(bench: Any, tmp_path: Path) -> None:
    rows = {row.metric: row for row in bench.run(quick=True, out=tmp_path)}
    methods = {"marginals", "mwem", "mirror_descent"}
    assert set(rows) == {bench.START, bench.RATIO} | methods
    others = min(rows[name].value or 0 for name in methods - {"mirror_descent"})
    ratio = (rows["mirror_descent"].value or 0) / others
    assert rows[bench.RATIO].value == pytest.approx(ratio)
    assert (tmp_path / "crossing.png").stat().st_size > 10_000
