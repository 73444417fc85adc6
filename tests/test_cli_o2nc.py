"""The command line's ``--algorithm o2nc``: a run, going on with it, its record."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdp import plans, sampling, training
from jaxdp.cli import main, o2nc, options, prepare, train
from tests.training import kills

O2NC = ("--dataset", "breast_cancer", "--algorithm", "o2nc", "--loss", "hinge")
CHANGES = {
    "num_steps": 10,
    "period": 4,
    "restart_batch_size": 20,
    "batch_size": 5,
    "window": 5,
    "restart_l2_clip_norm": 1.5,
    "l2_clip_norm": 0.5,
    "smoothing_radius": 0.2,
    "num_directions": 3,
    "direction": "sphere",
    "max_step": 0.3,
    "learning_rate": 0.05,
    "prefix_noise": "blt_1",
}


def run(*words: object) -> int:
    return main([str(word) for word in words])


def trained(out: Path) -> int:
    words = [w for name, x in CHANGES.items() for w in (f"--{name}", x)]
    more = ("--model", "mlp", "--hidden", 3, "--epsilon", 8, "--seed", 5, "--quiet")
    return run("train", *O2NC, *words, *more, "--out", out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every option, of a ReLU network with hinge loss."""
    out = tmp_path_factory.mktemp("o2nc") / "run"
    assert trained(out) == 0
    return out


def test_options_reach_the_plan_and_the_report(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {*train.FILES, "secret"}
    plan = plans.O2NC.from_json((folder / "plan.json").read_text())
    sampler = sampling.SinglePassRestarts(period=4, restart_batch_size=20, batch_size=5)
    of_sampler = ("period", "restart_batch_size", "batch_size")
    same = {name: x for name, x in CHANGES.items() if name not in of_sampler}
    want = plans.O2NC(
        num_examples=455, sampling=sampler, relation="replace_one", **same
    )
    assert plan == want.calibrate(epsilon=8.0, delta=1e-5)
    report = json.loads((folder / "report.json").read_text())
    single = {"oracle": "zeroth_order", "multi_pass": False}
    single |= {"restart_sampling_prob": None, "sampling_prob": None}
    assert report["recipe"] == CHANGES | single
    assert (report["algorithm"], report["loss"]) == ("o2nc", "hinge")
    assert (report["steps_done"], report["seed_source"]) == (10, "insecure")
    assert report["epsilon"] == float(plan.epsilon()) <= 8


def test_metric_is_that_of_what_is_returned(tmp_path: Path) -> None:
    command = options.O2NC(
        dataset="quadratic_identity",
        num_steps=4,
        num_directions=1,
        seed=1,
        out=tmp_path,
    )
    job = prepare.prepare(command)
    params = prepare.initial(job.task, job.keys)
    outcome = train.train(job, command, params, progress=False)
    loss = float(job.task.metric_fn(outcome.params))
    assert outcome.report["test_loss"] == outcome.returned == loss
    assert loss != outcome.metrics[-1]  # That of the last query.


def test_killed_run_goes_on_and_is_not_replayed(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    with np.load(folder / train.PARAMS) as file:
        want = dict(file)
    with kills.killed(4):  # In its second period, an intent is last.
        trained(out)
    report = json.loads((folder / "report.json").read_text())
    assert run("train", "--resume", "--out", out, "--quiet") == 0
    with np.load(out / train.PARAMS) as file:
        assert set(file) == set(want)
        for name, value in want.items():
            np.testing.assert_array_equal(file[name], value)
    again = json.loads((out / "report.json").read_text())
    for name in ("test_accuracy", "steps_charged"):
        assert again[name] == report[name]
    assert run("replay", out) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "got O2NC, whose releases are as large as the parameters" in shown


def test_its_plan_is_read_by_epsilon_and_audited(folder: Path, capsys: Any) -> None:
    path = folder / "plan.json"
    assert run("epsilon", "--plan", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["epsilon"], found["num_steps"]) == (pytest.approx(8.0), 10)
    assert run("audit", path, "--num-runs", 1000, "--num-steps", 2, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["plan"] == "O2NC, 10 steps, replace_one"


def test_table_and_noise_of_the_plot(folder: Path) -> None:
    plan: Any = plans.from_json((folder / "plan.json").read_text())
    report = json.loads((folder / "report.json").read_text())
    table = train.spending("o2nc", plan, report)
    said = " ".join(str(cell) for cell in table.columns[1].cells)
    assert (
        "each of 10 means of 20 or 5 records, correlated over 4 steps (blt_1)" in said
    )
    found = plan.describe().stds
    want = plan.node_std * plan.correlation.increment_norms()
    np.testing.assert_array_equal(found, [*want, *want, *want[:2]])
    fresh = dataclasses.replace(
        plan, sampling=sampling.SinglePassRestarts(period=1, restart_batch_size=20)
    )
    said = train.spending("o2nc", fresh, report).columns[1].cells
    assert any(str(x).endswith("each of 10 means of 20 records") for x in said)


def test_recipe_is_one_pass_in_whole_windows() -> None:
    job = prepare.prepare(options.O2NC(dataset="wine", seed=0))
    assert isinstance(job.plan, plans.O2NC)
    assert (job.plan.num_steps, job.plan.window) == (8, 8)  # 142 records by 16.
    assert (job.plan.num_directions, job.plan.learning_rate) == (42, None)  # d = 42
    plan = o2nc.make_plan(o2nc.find(8.0) | {"window": 3}, 142)
    plan = plan.calibrate(epsilon=8.0, delta=1e-5)
    assert (plan.num_steps, plan.window, plan.num_windows) == (6, 3, 2)


WRONG = [
    ("--momentum .9", "unknown option --momentum; jaxdp train o2nc --help lists all"),
    ("--average .5", "unknown option --average"),
    ("--schedule cosine", "unknown option --schedule"),
    ("--sampling-prob .1", "--sampling-prob is for --multi-pass only, got 0.1"),
    ("--batch-size 4", "--batch-size is for --period 2 or more only, got 1"),
    ("--l2-clip-norm 4", "--l2-clip-norm is for --period 2 or more only, got 1"),
    ("--prefix-noise tree", "--prefix-noise is for --period 2 or more only, got 1"),
    ("--prefix-noise fenwick", "--prefix-noise must be one of tree,"),
    ("--period 0", "--period must be an integer >= 1, got 0"),
    ("--period 4 --batch-size 0", "--batch-size must be an integer >= 1, got 0"),
    ("--restart-batch-size 300", "--restart-batch-size must leave 2 steps"),
    ("--num-steps 1000", "--num-steps must be an integer >= 1 and <= 28, got 1000"),
    ("--window 1", "--window must be an integer >= 2, got 1"),
    ("--window 9 --num-steps 7", "--window must be at most num_steps = 7"),
    ("--max-step -1", "--max-step must be a number > 0, got -1.0"),
    ("--restart-l2-clip-norm inf", "--restart-l2-clip-norm must be a number > 0"),
    ("--smoothing-radius 0", "--smoothing-radius must be a number > 0, got 0.0"),
    ("--direction gaussian", "--direction must be one of 'orthonormal', 'sphere'"),
    ("--num-directions 63", "--num-directions must be at most min(d, 64) = 62"),
    ("--loss squared_error", "--loss must be 'cross_entropy' or 'hinge' for class"),
    ("--loss logistic", "--loss must be one of cross_entropy, hinge, squared_error"),
    (
        "--dataset diabetes",
        "--loss must be 'squared_error' for regression, got 'hinge'",
    ),
    ("--dataset quadratic_identity", "--loss is for a --dataset of real records only"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[w for w, _ in WRONG])
def test_wrong_argument_gives_one_line(
    words: str, said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was spent")

    monkeypatch.setattr(training, "fit", never)
    assert run("train", *O2NC, *words.split(), "--out", tmp_path) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("jaxdp: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert not list(tmp_path.iterdir())
