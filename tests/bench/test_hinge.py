"""The table of kinks: its runs are the command line's, and what it has shown."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import jaxdp
from jaxdp.cli import options, prepare
from jaxdp.training import loop

pytestmark = pytest.mark.slow

BENCH = "hinge"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "hinge.json"


def test_runs_are_the_command_line_s(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every seed: the plan, data and losses of ``jaxdp train``."""
    command = options.O2NC(
        dataset="breast_cancer",
        oracle="first_order",
        multi_pass=True,
        loss="hinge",
        epsilon=8.0,
        seed=0,
    )
    chosen = dict(bench.algorithms())["o2nc, first-order, many passes"]
    job = bench.job_of("linear", 8.0, chosen)
    assert job.plan == prepare.prepare(command).plan
    given = []

    def fit(plan: Any, keys: Any, params: Any, data: Any, **kwargs: Any) -> Any:
        given.append((plan, keys.private, data, kwargs))
        return loop.FitResult(params, Any, {})

    monkeypatch.setattr(jaxdp, "fit", fit)
    found = bench.accuracies(job, 2)
    for plan, private, data, kwargs in given:
        assert (plan, private) == (job.plan, False)
        assert data is job.task.data
        assert kwargs == {"value_fn": job.task.value_fn, "optimizer": None}
    start = float(job.task.metric_fn(prepare.initial(job.task, job.keys)))
    np.testing.assert_allclose(found, [start, start])


def test_rows_and_plot(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    names = [name for name, _ in bench.algorithms()]
    assert len(names) == len(set(names)) == 7
    some = [item for item in bench.algorithms() if "scalar" in item[0]]
    monkeypatch.setattr(bench, "algorithms", lambda: iter(some))
    monkeypatch.setattr(bench, "MODELS", {"linear": None, "mlp": (2,)})
    monkeypatch.setattr(bench, "accuracies", lambda job, num_seeds: [0.5, 0.75])
    rows = bench.run(True, tmp_path)
    assert [row.case for row in rows[1:]] == [
        f"{model}, {name}, epsilon {epsilon:g}"
        for model in bench.MODELS
        for name, _ in some
        for epsilon in bench.EPSILONS
    ]
    assert {row.value for row in rows[1:]} == {0.625}
    assert (rows[-1].count, rows[-1].note) == (2, "200 steps")
    assert rows[0].value == pytest.approx(2 / 3)
    assert (tmp_path / bench.PNG).stat().st_size > 10_000


def test_kept_results_are_of_these_rows(bench: Any) -> None:
    kept = json.loads(KEPT.read_text())["rows"]
    assert {row["case"] for row in kept[1:]} == {
        f"{model}, {name}, epsilon {epsilon:g}"
        for model in bench.MODELS
        for name, _ in bench.algorithms()
        for epsilon in bench.EPSILONS
    }
