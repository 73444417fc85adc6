"""The command line's ``--algorithm saddle``: groups, a run, its report, going on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import matplotlib.image
import numpy as np
import pytest

from jaxdp import models, plans, sampling, training
from jaxdp.cli import main, options, prepare, saddle, train
from jaxdp.cli import task as tasks
from tests.training import kills

SADDLE = ("--dataset", "diabetes", "--algorithm", "saddle", "--group", "sex")
CHANGES = {
    "num_steps": 4,
    "num_draws": 2,
    "radius": 2.0,
    "clip_x": 0.5,
    "step_ratio": 0.3,
}
METRICS = ("test_accuracy", "test_average_error", "test_worst_group_error")


def run(*words: object) -> int:
    return main([str(word) for word in words])


def reported(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def trained(out: Path) -> int:
    words = [w for name, x in CHANGES.items() for w in (f"--{name}", x)]
    more = ("--epsilon", 3, "--group-probabilities", "0.6,0.4", "--seed", 5, "--quiet")
    return run("train", *SADDLE, *words, *more, "--out", out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every option."""
    out = tmp_path_factory.mktemp("saddle") / "run"
    assert trained(out) == 0
    return out


def test_options_reach_the_plan(folder: Path) -> None:
    plan = plans.Saddle.from_json((folder / "plan.json").read_text())
    assert plan.sampling == sampling.SinglePass(88)  # 353 records, 4 steps
    assert (plan.num_examples, plan.num_steps, plan.num_draws) == (353, 4, 2)
    assert (plan.dim_x, plan.dim_y) == (2 * 11 * 2, 2)
    assert plan.center_gradients and plan.sampler == "integer"
    # The bounds of losses and gradients, with the smallest share of a group.
    odds = np.exp(2.0)
    of_x = 2 * odds / (1 + odds) / 0.4
    assert plan.linf_clip_norm_x == pytest.approx(0.5 * of_x)
    assert plan.linf_clip_norm_y == pytest.approx(np.log((1 + odds) / 2) / 0.4 / 2)
    steps: Any = plan.step_size_x, plan.step_size_y
    x = steps[0] * plan.linf_clip_norm_x / np.sqrt(np.log(plan.dim_x))
    y = steps[1] * plan.linf_clip_norm_y / np.sqrt(np.log(plan.dim_y))
    assert y / x == pytest.approx(0.3)


def test_report_says_what_was_spent_and_how_groups_fare(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {*train.FILES, "secret"}
    plan = plans.from_json((folder / "plan.json").read_text())
    report = reported(folder)
    # The budget that was asked for, all but the rounding of step sizes.
    assert 3 * (1 - 1e-3) < report["epsilon"] <= 3
    assert report["epsilon"] == float(plan.epsilon())
    assert (report["delta"], report["relation"]) == (1e-5, "replace_one")
    assert (report["private"], report["seed_source"]) == (False, "insecure")
    assert (report["algorithm"], report["loss"]) == ("saddle", "cross_entropy")
    assert report["recipe"] == CHANGES
    assert (report["group"], report["num_test_examples"]) == ("sex", 89)
    assert report["group_probabilities"] == {"sex 1": 0.6, "sex 2": 0.4}
    errors = report["test_group_errors"]
    assert report["test_worst_group_error"] == max(errors.values())
    assert report["test_average_error"] == pytest.approx(1 - report["test_accuracy"])
    # 52 and 37 of the public records.
    mean = (52 * errors["sex 1"] + 37 * errors["sex 2"]) / 89
    assert mean == pytest.approx(report["test_average_error"])
    for name in (train.PROGRESS, train.RELEASES):
        height, width = matplotlib.image.imread(folder / name).shape[:2]
        assert min(height, width) > 400


def test_parameters_are_a_linear_model_s(folder: Path) -> None:
    with np.load(folder / train.PARAMS) as file:
        kernel, bias = file["Dense_0/kernel"], file["Dense_0/bias"]
        weights = file["group_weights"]
    assert weights.sum() == pytest.approx(1)
    dataset = models.above(models.load("diabetes"), models.DIABETES_THRESHOLD)
    x, y = dataset.test
    accuracy = np.mean(np.argmax(x @ kernel + bias, axis=1) == y)
    assert accuracy == pytest.approx(reported(folder)["test_accuracy"], abs=1e-6)
    # In an l1 ball as a model of features in [-1, 1].
    ball = np.abs(kernel / 2).sum() + np.abs(bias + kernel.sum(axis=0) / 2).sum()
    assert ball <= 2.0 * (1 + 1e-5)


def test_same_seed_same_run_and_a_killed_one_goes_on(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """As a kill leaves it: the last steps are under way, nothing is written."""
    out = tmp_path / "run"
    with kills.killed(2):
        trained(out)
    assert run("train", "--resume", "--out", out) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "3 vertices of either player in each of 4 steps of 88 records" in shown
    assert "error of the worst group" in shown
    with np.load(folder / train.PARAMS) as file, np.load(out / train.PARAMS) as again:
        for name in file:
            np.testing.assert_array_equal(again[name], file[name])
    assert all(reported(out)[name] == reported(folder)[name] for name in METRICS)
    assert run("train", "--resume", "--out", out, "--radius", 9) == 2
    assert "--radius must be left out with --resume or be as it was" in (
        capsys.readouterr().err
    )


def test_other_commands_read_its_plan_and_none_replays_it(
    folder: Path, capsys: Any
) -> None:
    assert run("replay", folder) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "plan must be one of slopes to be replayed, got Saddle" in shown
    assert run("epsilon", "--plan", folder / "plan.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == reported(folder)["epsilon"]
    assert (found["num_steps"], found["noise_multiplier"]) == (4, None)


def test_other_algorithms_report_the_same_groups(tmp_path: Path) -> None:
    words = ("--dataset", "diabetes", "--group", "sex", "--num-steps", 3, "--seed", 0)
    words = (*words, "--algorithm", "dpgd", "--quiet", "--out", tmp_path)
    assert run("train", *words) == 0
    report = reported(tmp_path)
    assert report["num_examples"] == 353
    assert set(report["test_group_errors"]) == {"sex 1", "sex 2"}
    assert report["test_worst_group_error"] == max(report["test_group_errors"].values())
    plain = prepare.prepare(options.DPGD(dataset="diabetes", seed=0))
    assert (plain.task.metric, plain.task.groups) == ("test_mse", None)


def test_recipe_is_of_the_data_set_and_the_budget() -> None:
    command = options.Saddle(dataset="digits", group="class", seed=0)
    job = prepare.prepare(command)
    assert job.recipe == saddle.find("digits")
    assert isinstance(job.plan, plans.Saddle)
    assert (job.plan.dim_x, job.plan.dim_y) == (2 * 650, 10)
    assert (job.plan.num_steps, job.plan.sampling.batch_size) == (37, 38)
    assert float(job.plan.epsilon()) == pytest.approx(2, rel=1e-3)
    assert prepare.initial(job.task, job.keys)[0].shape == (1300,)
    for name in (*models.DATASETS, "somebody's file"):
        for epsilon in (0.1, 2.0, 1e3):
            plan = saddle.make_plan(
                saddle.find(name),
                saddle.Players(20, 3, 5.0, 2.0),
                num_examples=100,
                epsilon=epsilon,
                delta=1e-5,
            )
            assert plan.epsilon() <= epsilon


def test_own_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, (60, 2))
    x[:, 1] = 5 * rng.integers(0, 3, 60)
    y = np.where(x[:, 0] > 5, "yes", "no")
    lines = ["a,b,answer", *(f"{p},{q},{s}" for (p, q), s in zip(x, y, strict=True))]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines))
    command = options.Saddle(
        dataset=str(path),
        label="answer",
        classes=("no", "yes"),
        bounds=(0.0, 10.0),
        test_fraction=0.5,
        group="b",
        group_values=(0.0, 10.0),
        seed=0,
    )
    task = tasks.of_network(command)
    assert task.groups is not None
    both = np.concatenate([task.groups.train, task.groups.test])
    np.testing.assert_array_equal(
        np.sort(both), np.sort(np.select([x[:, 1] == 0, x[:, 1] == 10], [0, 1], -1))
    )
    assert task.groups.names == ("b 0", "b 10")
    job = prepare.prepare(
        dataclasses.replace(command, group="class", group_values=None)
    )
    assert job.task.groups is not None
    assert job.task.groups.names == ("no", "yes")
    zero = jax.tree.map(np.zeros_like, task.init(jax.random.key(0)))
    assert task.errors_fn is not None
    assert np.asarray(task.errors_fn(zero)).shape == (2,)


WRONG = [
    ("--group bmi", "--group must be class or sex with --dataset diabetes, got 'bmi'"),
    ("--group-probabilities .5,.4", "--group-probabilities must be 2 numbers > 0 that"),
    ("--group-probabilities .5,.2,.3", "--group-probabilities must be 2 numbers"),
    ("--group-probabilities 1.5,-.5", "--group-probabilities must be 2 numbers > 0"),
    ("--group-probabilities half", "--group-probabilities must be numbers P,P,..."),
    ("--group-values 1,2", "--group-values is for a .csv or .npz --dataset only"),
    ("--dataset digits", "--group must be class with --dataset digits, got 'sex'"),
    ("--dataset quadratic_identity", "--group is for a --dataset of real records only"),
    ("--model mlp", "unknown option --model; jaxdp train saddle --help lists all"),
    ("--loss hinge", "unknown option --loss; jaxdp train saddle --help lists all"),
    ("--l2-clip-norm 1", "unknown option --l2-clip-norm"),
    ("--momentum .9", "unknown option --momentum"),
    ("--sampling-prob .1", "unknown option --sampling-prob"),
    ("--learning-rate 1", "unknown option --learning-rate"),
    ("--batch-size 4", "unknown option --batch-size"),
    ("--direction sphere", "unknown option --direction"),
    ("--num-steps 1", "--num-steps must be an integer >= 2 and <= 353, got 1"),
    ("--num-steps 354", "--num-steps must be an integer >= 2 and <= 353, got 354"),
    ("--num-draws 0", "--num-draws must be an integer >= 1"),
    ("--radius 0", "--radius must be a number > 0, got 0.0"),
    ("--clip-x -1", "--clip-x must be a number > 0, got -1.0"),
    ("--step-ratio 0", "--step-ratio must be a number > 0, got 0.0"),
    ("--epsilon 0", "--epsilon must be a number > 0, got 0.0"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[w for w, _ in WRONG])
def test_wrong_argument_gives_one_line(
    words: str, said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was spent")

    monkeypatch.setattr(training, "fit", never)
    assert run("train", *SADDLE, *words.split(), "--out", tmp_path) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("jaxdp: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert not list(tmp_path.iterdir())


def test_saddle_needs_groups(capsys: Any) -> None:
    assert run("train", "--dataset", "diabetes", "--algorithm", "saddle") == 2
    said = "--group must be given with --algorithm saddle: class, or a column"
    assert said in capsys.readouterr().err
