"""The table of worst groups: its runs are the command line's, and what it has shown."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import jaxdp
from jaxdp.cli import options, prepare
from jaxdp.training import loop

pytestmark = pytest.mark.slow

BENCH = "groups"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "groups.json"


def test_runs_are_the_command_line_s(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every seed: the plan, data and losses of ``jaxdp train``, judged as there."""
    job = bench.job_of("diabetes", "saddle", 8.0)
    command = options.Saddle(dataset="diabetes", group="sex", epsilon=8.0, seed=0)
    assert job.plan == prepare.prepare(command).plan
    given = []

    def fit(plan: Any, keys: Any, params: Any, data: Any, **kwargs: Any) -> Any:
        given.append((plan, keys.private, data, kwargs))
        return loop.FitResult(params, Any, {})

    monkeypatch.setattr(jaxdp, "fit", fit)
    found = bench.errors(job, 2)
    for plan, private, data, kwargs in given:
        assert (plan, private) == (job.plan, False)
        assert data is job.task.data
        assert kwargs == {"value_fn": job.task.value_fn, "optimizer": None}
    start = prepare.initial(job.task, job.keys)
    errors: Any = job.task.errors_fn
    want = [1 - float(job.task.metric_fn(start)), float(errors(start).max())]
    np.testing.assert_allclose(found, [want, want], rtol=1e-6)


def test_rows_are_means_and_ratios(bench: Any) -> None:
    base, found = np.array([[0.2, 0.4], [0.4, 0.4]]), np.array([[0.1, 0.2], [0.2, 0.4]])
    rows = bench._rows("saddle", found, "dpgd", base)
    assert [row.metric for row in rows] == list(bench.METRICS)
    assert [row.value for row in rows] == pytest.approx([0.15, 0.3])
    assert [row.ratio for row in rows] == pytest.approx([0.5, 0.75])
    assert all(row.baseline == "dpgd" and row.count == 2 for row in rows)
    assert all(row.ratio is None for row in bench._rows("gd", found))


def test_kept_result_says_who_wins(bench: Any) -> None:
    """At so few records vertex sampling loses, a little or by far; it is no guess."""
    kept = json.loads(KEPT.read_text())
    values = {(r["case"], r["metric"]): r["value"] for r in kept["rows"]}

    def error(case: str) -> float:
        return values[case, bench.METRICS[0]]

    for epsilon in ("2", "8"):
        for dataset, guess in (("diabetes by sex", 0.5), ("digits by class", 0.9)):
            dpgd = error(f"{dataset}: dpgd, epsilon {epsilon}")
            saddle = error(f"{dataset}: saddle, epsilon {epsilon}")
            assert dpgd < guess - 0.1
            assert saddle < guess - 0.1
    assert error("digits by class: dpzero, epsilon 8") < 0.1
    assert error("digits by class: saddle, epsilon 8") > 0.15
