"""Algorithms of ``jaxdp train`` with plans of their own: ``o2nc``, ``saddle``, ``sosp``.

One run of each, with every option, is what most tests look at.
"""

import dataclasses
import functools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from jaxdp import metrics, models, plans, sampling
from jaxdp.cli import o2nc, options, parsing, plots, prepare, saddle, sosp, train
from jaxdp.cli import task as tasks
from jaxdp.models.groups import DIABETES_THRESHOLD, above
from jaxdp.o2nc.oracle import ORACLES
from tests.test_cli import DONE, check_params, reported, run
from tests.training import kills

#: Algorithm, options of the recipe, and other options, by the name of a run.
RUNS: dict[str, tuple[str, str, str]] = {
    "o2nc": (
        "o2nc",
        "--num-steps 10 --period 4 --restart-batch-size 20 --batch-size 5 --window 5 "
        "--restart-l2-clip-norm 1.5 --l2-clip-norm .5 --smoothing-radius .2 "
        "--num-directions 3 --direction sphere --max-step .3 --learning-rate .05 "
        "--prefix-noise blt_1",
        "--dataset breast_cancer --loss hinge --model mlp --hidden 3 --epsilon 8",
    ),
    "first_order": (
        "o2nc",
        "--oracle first_order --multi-pass --num-steps 7 --period 4 --l2-clip-norm .5 "
        "--num-directions 2 --learning-rate .1 --restart-l2-clip-norm 1.5 "
        "--smoothing-radius .2 --max-step .3",
        "--dataset breast_cancer --loss hinge --epsilon 8",
    ),
    "scalar": (
        "o2nc",
        "--oracle scalar --restart-batch-size 40 --num-directions 5 "
        "--restart-l2-clip-norm 1.5 --smoothing-radius .2 --max-step .3",
        "--dataset breast_cancer --loss hinge --epsilon 8",
    ),
    "saddle": (
        "saddle",
        "--num-steps 4 --num-draws 2 --radius 2 --clip-x .5 --step-ratio .3",
        "--dataset diabetes --group sex --epsilon 3 --group-probabilities .6,.4",
    ),
    "descent_ascent": (
        "saddle",
        "--method descent_ascent --num-steps 4 --radius 2 --l2-clip-norm .4 "
        "--learning-rate .2",
        "--dataset diabetes --group sex --epsilon 3 --group-probabilities .6,.4",
    ),
    "frank_wolfe": (
        "saddle",
        "--method frank_wolfe --one-pass --num-steps 4 --radius 2 --clip-x .5",
        "--dataset diabetes --group sex --epsilon 3",
    ),
    "sosp": (
        "sosp",
        "--num-steps 60 --rank 1 --accuracy .07 --failure-probability .2 "
        "--hessian released --prefix-noise sqrt_toeplitz",
        "--dataset digits_4x4 --epsilon 40",
    ),
}
#: Values of these options.
CHANGES = {
    name: parsing.some(options.ALGORITHMS[algorithm], words.split())
    for name, (algorithm, words, _) in RUNS.items()
}
MAIN = ("o2nc", "saddle", "sosp")
METRICS = ("test_accuracy", "test_average_error", "test_worst_group_error")


def trained(name: str, out: Path) -> int:
    words = " ".join(RUNS[name]).split()
    return run("train", *words, "--seed", 5, "--quiet", "--out", out)


def planned(folder: Path) -> Any:
    return plans.from_json((folder / "plan.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run by its name; each is run once."""

    @functools.cache
    def of(name: str) -> Path:
        out = tmp_path_factory.mktemp(name) / "run"
        assert trained(name, out) == 0
        return out

    return of


# --- what all do -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    # The loop of O2NC with other oracles, whose plans are made below.
    [
        pytest.param(n, marks=pytest.mark.slow) if n in ("first_order", "scalar") else n
        for n in RUNS
    ],
)
def test_run_writes_everything(name: str, folders: Any) -> None:
    folder, changes, (algorithm, _, others) = folders(name), CHANGES[name], RUNS[name]
    assert {p.name for p in folder.iterdir()} == {*train.FILES, "secret"}
    report, plan = reported(folder), planned(folder)
    assert {k: report["recipe"][k] for k in changes} == changes
    assert report["algorithm"] == algorithm
    assert (report["private"], report["seed_source"]) == (False, "insecure")
    assert (report["delta"], report["relation"]) == (1e-5, "replace_one")
    assert report["epsilon"] == float(plan.epsilon())
    epsilon = parsing.some(options.ALGORITHMS[algorithm], others.split())["epsilon"]
    assert report["epsilon"] <= epsilon * (1 + 1e-9)
    assert report["epsilon"] == pytest.approx(epsilon, rel=1e-3)
    assert math.isfinite(report.get("test_accuracy", 0))
    if not plan.may_stop:
        assert report["steps_done"] == plan.num_steps
    for picture in (train.PROGRESS, train.RELEASES):
        height, width = matplotlib.image.imread(folder / picture).shape[:2]
        assert min(height, width) > 400


def test_numbers_of_a_killed_game_are_kept(tmp_path: Path) -> None:
    """Also by a new attempt on other records, whose held-out ones would decide others."""
    table, out = tmp_path / "mine.csv", tmp_path / "run"

    def write(scale: float) -> None:
        draw = np.random.default_rng(1)
        rows = (
            f"{x},{i % 3 > 0},{i % 2}" for i, x in enumerate(scale * draw.random(60))
        )
        table.write_text("\n".join(["size,kind,group", *rows]))

    words = f"train saddle --method descent_ascent --dataset {table} --label kind "
    words += "--classes False,True --bounds 0,1 --test-fraction .5 --num-steps 4 "
    words += "--group group --group-values 0,1 --radius 30 --seed 3 --quiet --out"
    write(1.0)
    with kills.killed(2):
        run(*words.split(), out)
    shutil.copytree(out, other := tmp_path / "other")
    then = json.loads((out / "ledger.jsonl").read_text().splitlines()[0])
    assert run("train", "--resume", "--out", out, "--quiet") == 0
    write(0.5)
    again = ("train", "--resume", "--new-attempt", "--out", other, "--quiet")
    assert run(*again) == 0
    for folder in (out, other):
        assert reported(folder)["recipe"] == then["note"]["recipe"]


@pytest.mark.parametrize(
    ("name", "lines", "option", "same", "said"),
    [
        # In its second period, an intent is last.
        ("o2nc", 4, ("--window", 4), ("test_accuracy", "steps_charged"), ()),
        (
            "saddle",
            2,
            ("--radius", 9),
            METRICS,
            (
                "3 vertices of either player in each of 4 steps of 88 records",
                "error of the worst group",
            ),
        ),
        (
            "sosp",
            2,
            ("--rank", 2),
            ("outcome", "certificate"),
            ("gradients and on how they change (sqrt_toeplitz)", "at the start"),
        ),
    ],
    ids=MAIN,
)
def test_killed_run_goes_on(
    name: str,
    lines: int,
    option: tuple[str, int],
    same: tuple[str, ...],
    said: tuple[str, ...],
    folders: Any,
    tmp_path: Path,
    capsys: Any,
) -> None:
    """As a kill leaves it: steps are under way, nothing is written. The same seed too."""
    folder, out = folders(name), tmp_path / "run"
    with kills.killed(lines):
        trained(name, out)
    assert run("train", "--resume", "--out", out) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert all(words in shown for words in said)
    check_params(out / train.PARAMS, dict(np.load(folder / train.PARAMS)))
    assert all(reported(out)[field] == reported(folder)[field] for field in same)
    assert run("train", "--resume", "--out", out, *option) == 2
    assert f"{option[0]} must be left out with --resume or be as it was" in (
        capsys.readouterr().err
    )
    assert run("train", "dpgd", "--resume", "--out", out) == 2
    assert "--algorithm must be left out with --resume or be as it was" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("o2nc", "got O2NC, whose releases are as large as the parameters"),
        ("saddle", "plan must be one of slopes to be replayed, got Saddle"),
        ("sosp", "plan must be one of slopes to be replayed, got SOSP"),
    ],
)
def test_other_commands_read_its_plan_and_none_replays_it(
    name: str, said: str, folders: Any, capsys: Any
) -> None:
    folder = folders(name)
    assert run("replay", folder) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert said in shown
    assert run("epsilon", "--plan", folder / "plan.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == reported(folder)["epsilon"]
    assert found["num_steps"] == planned(folder).num_steps
    assert (found["noise_multiplier"] is None) == (name == "saddle")


def test_plan_is_audited(folders: Any, capsys: Any) -> None:
    path = folders("o2nc") / "plan.json"
    few = ("--num-runs", 1000, "--num-steps", 2, "--lattice-runs", 0, "--json")
    assert run("audit", path, *few) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["plan"] == "O2NC, 10 steps, replace_one"


# --- o2nc --------------------------------------------------------------------------


def test_o2nc_options_reach_the_plan(folders: Any) -> None:
    folder, changes = folders("o2nc"), CHANGES["o2nc"]
    plan = planned(folder)
    sampler = sampling.SinglePassRestarts(period=4, restart_batch_size=20, batch_size=5)
    of_sampler = ("period", "restart_batch_size", "batch_size")
    same = {name: x for name, x in changes.items() if name not in of_sampler}
    want = plans.O2NC(
        num_examples=455, sampling=sampler, relation="replace_one", **same
    )
    assert plan == want.calibrate(epsilon=8.0, delta=1e-5)
    report = reported(folder)
    single = {"oracle": "zeroth_order", "multi_pass": False}
    single |= {"restart_sampling_prob": None, "sampling_prob": None}
    assert report["recipe"] == changes | single
    assert report["loss"] == "hinge"
    assert report["steps_done"] == 10


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
    outcome = train.train(job, command, params)
    loss = float(job.task.metric_fn(outcome.params))
    assert outcome.report["test_loss"] == outcome.returned == loss
    assert loss != outcome.metrics[-1]  # That of the last query.


def test_table_and_noise_of_the_plot(folders: Any) -> None:
    folder = folders("o2nc")
    plan, report = planned(folder), reported(folder)
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


SHARED = {"restart_l2_clip_norm": 1.5, "smoothing_radius": 0.2, "max_step": 0.3}
#: Options of each oracle that reach the plan; and what else the plan has.
ORACLE_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zeroth_order": (
        SHARED
        | {"multi_pass": True, "num_steps": 8, "period": 3, "window": 4}
        | {"l2_clip_norm": 0.5, "num_directions": 3, "direction": "sphere"},
        {"difference": "antithetic", "scale_with_movement": True},
    ),
    "first_order": (
        CHANGES["first_order"],
        {"direction": "ball", "difference": "common", "window": 7},
    ),
    "scalar": (
        SHARED | {"restart_batch_size": 40, "num_directions": 5},
        {"share_directions": True, "num_steps": 11, "window": 11},
    ),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """The plans of the oracles."""
    data: Any = {"dataset": "breast_cancer", "loss": "hinge", "epsilon": 8.0, "seed": 5}
    return {
        name: prepare.prepare(options.O2NC(**data | {"oracle": name} | given)).plan
        for name, (given, _) in ORACLE_RUNS.items()
    }


@pytest.mark.parametrize("name", ORACLE_RUNS)
def test_oracle_s_options_reach_the_plan(name: str, made: dict[str, Any]) -> None:
    plan, (changes, more) = made[name], ORACLE_RUNS[name]
    sampler: Any = sampling.SinglePassRestarts(
        period=1, restart_batch_size=40, batch_size=40
    )
    if changes.get("multi_pass"):
        sampler = sampling.MultiPassRestarts(period=changes["period"])
        more = more | {"prefix_noise": "independent"}
    ours = {k: x for k, x in changes.items() if k in vars(plan)}
    ours = {"l2_clip_norm": 1.5, "oracle": name} | ours | more
    want = plans.O2NC(
        num_examples=455, sampling=sampler, relation="replace_one", **ours
    )
    assert plan == want.calibrate(epsilon=8.0, delta=1e-5)


def test_steps_that_cost_unlike_have_no_new_attempt(
    tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    with kills.killed(4):  # An intent is last.
        trained("first_order", out)
    refused = ("train", "--resume", "--new-attempt", "--out", out, "--quiet")
    assert run(*refused) == 2
    shown = capsys.readouterr().err
    assert "--new-attempt must be for a plan that charges every step" in shown


def test_tables_say_what_was_released(made: dict[str, Any]) -> None:
    plan = made["zeroth_order"]
    first, other = plan.step_std("restart"), plan.step_std("difference")
    assert (
        f"standard deviation {first:.4g} on each of 3 means of 455 records and at most "
        f"{other:.4g} on each of 5 means of 455 changes" in plan.describe().noise
    )
    level = plan.describe().stds
    want = np.array([first, other, other, first, other, other, first, other])
    np.testing.assert_allclose(level, want)
    assert plan.describe().at_most
    some = sampling.MultiPassRestarts(
        period=3, restart_sampling_prob=0.5, sampling_prob=0.2
    )
    said = dataclasses.replace(plan, sampling=some).describe().noise
    assert "on each of 3 means of 227.5 records and at most " in said
    assert said.endswith("on each of 5 means of 91 changes")

    plan = made["first_order"]
    first, other = plan.step_std("restart"), plan.step_std("difference")
    assert (
        f"standard deviation {first:.4g} on each of 2 means of 455 records and "
        f"{other:.4g} on each of 5 means of 455 changes" in plan.describe().noise
    )
    assert plan.describe().released == "gradient or its change"
    assert not plan.describe().at_most

    plan = made["scalar"]
    assert (
        "on each of 11 means of 40 records, of 5 slopes each" in plan.describe().noise
    )
    # The noise on d coordinates: that of 5 slopes along directions of length sqrt(d).
    np.testing.assert_allclose(
        plan.describe().stds, np.full(11, plan.node_std / math.sqrt(5))
    )
    assert plan.describe().released == "gradient, made of slopes"


def test_budget_is_spent_step_by_step(made: dict[str, Any]) -> None:
    """Of several passes: with the noise of the whole run, not of a shorter one."""
    spent = train.spent_over_time(made["first_order"], [1, 4, 7], DONE)
    assert spent is not None
    times, epsilons = zip(*spent, strict=True)
    assert times == (1, 4, 7)
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2]
    assert epsilons[2] == pytest.approx(8.0, rel=1e-6)
    lost = {"steps_charged": 7, "steps_done": 4}
    after = train.spent_over_time(made["first_order"], [1, 4], lost)
    assert after is not None
    assert [x for _, x in after] == [epsilons[1], epsilons[2]]


def test_noise_that_follows_movement_is_drawn_as_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(plots, "save", lambda fig, path: figures.append(fig))
    shared = {"title": "", "releases": np.ones((4, 1)), "num_parameters": 4}
    stds = np.array([1.0, 0.5, 1.0, 0.5])
    for bound in (False, True):
        plots.releases(tmp_path, noise_std=stds, follows_movement=bound, **shared)
    said = [[t.get_text() for t in fig.legends[0].get_texts()] for fig in figures]
    assert "noise alone (1 to 2)" in said[0]
    assert "noise alone (at most 1 to 2)" in said[1]


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("multi_pass", [False, True])
def test_every_recipe_makes_a_plan(oracle: Any, multi_pass: bool) -> None:
    for epsilon in (0.5, 2.0, 8.0):
        recipe = o2nc.find(epsilon, oracle, multi_pass=multi_pass)
        assert (recipe["oracle"], recipe["multi_pass"]) == (oracle, multi_pass)
        plan = o2nc.make_plan(recipe, 455)
        plan = plan.calibrate(epsilon=epsilon, delta=1e-5)
        assert plan.num_windows == 1
        assert float(plan.epsilon()) <= epsilon
    command = options.O2NC(dataset="wine", oracle=oracle, multi_pass=multi_pass, seed=0)
    plan: Any = prepare.prepare(command).plan
    assert (plan.oracle, plan.multi_pass) == (oracle, multi_pass)
    dim = 42
    assert plan.num_directions <= dim
    assert plan.scale_with_movement == (multi_pass and oracle == "zeroth_order")


def test_probabilities_reach_the_sampler() -> None:
    """Not in a run: to account for samples takes longer than a run of this size."""
    recipe = o2nc.find(2.0, "zeroth_order", multi_pass=True)
    changes = {"period": 4, "restart_sampling_prob": 1.0, "sampling_prob": 0.1}
    plan = o2nc.make_plan(recipe | changes, 455)
    assert plan.sampling == sampling.MultiPassRestarts(period=4, sampling_prob=0.1)
    assert plan.clips["difference"][1] == 45.5
    names = {field.name for field in dataclasses.fields(options.O2NC)}
    assert {*changes, "oracle", "multi_pass"} < names


# --- saddle ------------------------------------------------------------------------


def test_saddle_options_reach_the_plan(folders: Any) -> None:
    plan = planned(folders("saddle"))
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


def test_report_says_what_was_spent_and_how_groups_fare(folders: Any) -> None:
    report = reported(folders("saddle"))
    # The budget that was asked for, all but the rounding of step sizes.
    assert 3 * (1 - 1e-3) < report["epsilon"] <= 3
    assert report["loss"] == "cross_entropy"
    assert report["recipe"] == CHANGES["saddle"]
    assert (report["group"], report["num_test_examples"]) == ("sex", 89)
    assert report["group_probabilities"] == {"sex 1": 0.6, "sex 2": 0.4}
    errors = report["test_group_errors"]
    assert report["test_worst_group_error"] == max(errors.values())
    assert report["test_average_error"] == pytest.approx(1 - report["test_accuracy"])
    # 52 and 37 of the public records.
    mean = (52 * errors["sex 1"] + 37 * errors["sex 2"]) / 89
    assert mean == pytest.approx(report["test_average_error"])


def test_parameters_are_a_linear_model_s(folders: Any) -> None:
    folder = folders("saddle")
    with np.load(folder / train.PARAMS) as file:
        kernel, bias = file["Dense_0/kernel"], file["Dense_0/bias"]
        weights = file["group_weights"]
    assert weights.sum() == pytest.approx(1)
    dataset = above(models.load("diabetes"), DIABETES_THRESHOLD)
    x, y = dataset.test
    accuracy = np.mean(np.argmax(x @ kernel + bias, axis=1) == y)
    assert accuracy == pytest.approx(reported(folder)["test_accuracy"], abs=1e-6)
    # In an l1 ball as a model of features in [-1, 1].
    ball = np.abs(kernel / 2).sum() + np.abs(bias + kernel.sum(axis=0) / 2).sum()
    assert ball <= 2.0 * (1 + 1e-5)


@pytest.mark.slow  # One more run.
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


def test_saddle_recipe_is_of_the_data_set_and_the_budget() -> None:
    command = options.Saddle(dataset="digits", group="class", seed=0)
    job = prepare.prepare(command)
    assert job.recipe == saddle.find("digits")
    assert isinstance(job.plan, plans.Saddle)
    assert (job.plan.dim_x, job.plan.dim_y) == (2 * 650, 10)
    assert (job.plan.num_steps, job.plan.sampling.batch_size) == (37, 38)
    assert float(job.plan.epsilon()) == pytest.approx(2, rel=1e-3)
    assert prepare.initial(job.task, job.keys)[0].shape == (1300,)
    for name in (*models.DATASETS, "somebody's file"):
        for epsilon in (0.1, 2.0, 50.0):
            plan = saddle.make_plan(
                saddle.find(name),
                saddle.Players(20, 3, 5.0, 2.0),
                num_examples=100,
                epsilon=epsilon,
                delta=1e-5,
            )
            assert plan.epsilon() <= epsilon


def test_groups_of_a_file(tmp_path: Path) -> None:
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


def test_methods_of_saddle_reach_their_plans(folders: Any) -> None:
    descent = planned(folders("descent_ascent"))
    assert isinstance(descent, plans.DPGD)
    assert isinstance(descent.sampling, sampling.FullBatch)
    assert (descent.num_steps, descent.l2_clip_norm) == (4, 0.4)
    wolfe = planned(folders("frank_wolfe"))
    assert isinstance(wolfe, plans.FrankWolfe)
    assert (wolfe.dim, wolfe.sampling) == (2 * 11 * 2, sampling.SinglePass(88))
    odds = np.exp(2.0)  # As of the game, but every record counts the same.
    assert wolfe.linf_clip_norm == pytest.approx(0.5 * 2 * odds / (1 + odds))
    for name in ("descent_ascent", "frank_wolfe"):
        folder = folders(name)
        report = reported(folder)
        with np.load(folder / train.PARAMS) as file:
            kernel, bias = file["Dense_0/kernel"], file["Dense_0/bias"]
            assert ("group_weights" in file) == (name == "descent_ascent")
        x, y = above(models.load("diabetes"), DIABETES_THRESHOLD).test
        accuracy = np.mean(np.argmax(x @ kernel + bias, axis=1) == y)
        assert accuracy == pytest.approx(report["test_accuracy"], abs=1e-6)
        ball = np.abs(kernel / 2).sum() + np.abs(bias + kernel.sum(axis=0) / 2).sum()
        assert ball <= 2.0 * (1 + 1e-5)
        assert set(report["test_group_errors"]) == {"sex 1", "sex 2"}


def test_numbers_of_saddle_s_methods_come_from_held_out_records() -> None:
    command = options.Saddle(dataset="wine", group="class", method="descent_ascent")
    job = prepare.prepare(dataclasses.replace(command, seed=0))
    recipe = job.recipe
    assert job.plan.l2_clip_norm == recipe["l2_clip_norm"] > 0
    assert recipe["learning_rate"] > 0 and recipe["num_steps"] == 64
    # Private records decide none of them: others give the same.
    assert job.task.public[0].shape == (36, 13)
    alone = options.Saddle(dataset="wine", method="frank_wolfe", seed=0)
    job = prepare.prepare(alone)
    assert (job.plan.num_steps, job.task.groups) == (16, None)
    assert 0 < job.recipe["clip_x"] <= 1
    assert job.plan.epsilon() <= 2.0


@pytest.mark.parametrize(
    "given",
    [{"group": "class", "method": "descent_ascent"}, {"method": "frank_wolfe"}],
    ids=lambda given: given["method"],
)
def test_private_records_decide_no_number_of_saddle(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = options.Saddle(dataset="wine", seed=0, **given)
    before, whole = prepare.prepare(command), tasks.dataset_of(command)
    x, y = whole.train
    other = dataclasses.replace(whole, train=(8 * x, y))
    monkeypatch.setattr(tasks, "dataset_of", lambda command: other)
    after = prepare.prepare(command)
    assert (after.recipe, after.plan) == (before.recipe, before.plan)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--l2-clip-norm 1", "--l2-clip-norm is for --method descent_ascent only"),
        (
            "--method descent_ascent --num-draws 2",
            "--num-draws is for --method mirror_descent only",
        ),
        (
            "--method descent_ascent --clip-x 1",
            "--clip-x is for --method mirror_descent or frank_wolfe only",
        ),
        ("--one-pass", "--one-pass is for the other methods only"),
    ],
    ids=["clip", "draws", "share", "pass"],
)
def test_options_of_another_method_are_refused(
    words: str, said: str, capsys: Any
) -> None:
    line = f"train saddle --dataset diabetes --group sex {words}"
    assert run(*line.split()) == 2
    assert said in capsys.readouterr().err


def test_saddle_needs_groups(capsys: Any) -> None:
    assert run("train", "--dataset", "diabetes", "--algorithm", "saddle") == 2
    said = "--group must be given with --algorithm saddle: class, or a column"
    assert said in capsys.readouterr().err


# --- sosp --------------------------------------------------------------------------


def test_sosp_options_reach_the_plan(folders: Any) -> None:
    plan = planned(folders("sosp"))
    assert (plan.num_examples, plan.num_steps, plan.dim) == (1437, 60, 16)
    assert (plan.hessian, plan.prefix_noise) == ("released", "sqrt_toeplitz")
    constants = models.PrincipalDirections(16).constants
    assert plan.l2_clip_norm == constants.lipschitz
    assert plan.smoothness == constants.smoothness
    assert plan.hessian_lipschitz == constants.hessian_lipschitz
    assert plan.hessian_clip_norm == constants.hessian_frobenius
    assert plan.theorem is not None
    promise = plan.theorem.promise
    assert (promise.accuracy, promise.failure_probability) == (0.07, 0.2)
    assert float(plan.epsilon()) == pytest.approx(40)


def test_report_has_the_certificate_and_what_it_is_worth(folders: Any) -> None:
    folder = folders("sosp")
    plan, report = planned(folder), reported(folder)
    assert report["model"] == "factorization"
    assert report["recipe"] == CHANGES["sosp"]
    outcome = report["outcome"]
    assert outcome["certified"] and outcome["ended"] == "certificate"
    assert outcome["alpha"] == plan.theorem.promise.alpha
    assert outcome["records_used"] <= 1437
    assert report["steps_done"] < 60
    # The start, where nothing but the curvature tells that it is not the end.
    public = models.unit_rows(models.load("digits_4x4").test[0]).astype(np.float64)
    moments = public.T @ public / len(public)
    values = np.linalg.eigvalsh(moments)
    assert report["test_min_eigenvalue_of_start"] == pytest.approx(-values[-1])
    start = values[-1] ** 2 / 6
    assert report["test_alpha_of_start"] == pytest.approx(start)
    # The point, with the closed forms of its gradient and its Hessian.
    with np.load(folder / train.PARAMS) as file:
        u: Any = file["params"].astype(np.float64)
    assert report["test_gradient_norm"] == pytest.approx(
        np.linalg.norm(u * np.sum(u**2) - moments @ u), rel=1e-4
    )
    hessian = np.sum(u**2) * np.eye(16) + 2 * u @ u.T - moments
    least = np.linalg.eigvalsh(hessian)[0]
    assert least > 0.5
    assert report["test_min_eigenvalue"] == pytest.approx(least, rel=1e-4)
    assert report["test_alpha"] == report["test_gradient_norm"] < outcome["alpha"]
    share = float((u.T @ moments @ u)[0, 0]) / np.sum(u**2) / values[-1]
    assert report["test_captured_variance"] == pytest.approx(share, rel=1e-4)
    assert share > 0.98
    assert outcome["alpha"] < start and report["excludes_start"] is True
    assert "the saddle at the start does not have it: its own" in report["certificate"]


def of_wine() -> Any:
    return sosp.of_features(models.load("wine"), 1, "released")[0]


def test_records_are_unit_vectors_in_an_order_of_their_own() -> None:
    """Features alone, each record by itself; the order is a function of their number."""
    task = of_wine()
    x, y = task.dataset.train
    (z,) = task.data
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-6)
    inner = z @ models.unit_rows(x).T
    order = np.argmax(inner, axis=1)
    np.testing.assert_allclose(inner[np.arange(len(z)), order], 1, rtol=1e-6)
    assert sorted(order) == list(range(len(x)))
    assert np.all(np.diff(y) >= 0) and not np.all(np.diff(y[order]) >= 0)
    start = task.init(jax.random.key(0))
    assert start.shape == (13, 1) and not np.any(start)
    assert task.metric_fn(start) == 0


@pytest.mark.filterwarnings("ignore:the promise says next to nothing")
def test_accuracy_follows_from_records_and_budget() -> None:
    """The best that the records are expected to be enough for, and no function of them."""
    assert sosp.RECIPE["accuracy"] is None
    found = {}
    for num, relation, epsilon in (
        (1000, "replace_one", 2.0),
        (3000, "replace_one", 2.0),
        (3000, "zero_out", 2.0),
        (3000, "replace_one", 8.0),
        (30000, "replace_one", 8.0),
    ):
        plan = sosp.make_plan(
            sosp.RECIPE,
            sosp.Smooth(16, 1.0, 1.0, 3.0, 6.0, 5.0, 0.4),
            num_examples=num,
            relation=relation,
            epsilon=epsilon,
            delta=1e-5,
        )
        assert plan.theorem is not None
        assert plan.epsilon() <= epsilon * (1 + 1e-9)
        whole = plan.difference_batch_rate * plan.drift_limit
        records = plan.refresh_batch_size + 2 * plan.hessian_batch_size + whole
        assert 0.98 * num < records <= num
        found[num, relation, epsilon] = plan.theorem.promise.accuracy
    accuracies = list(found.values())
    assert accuracies[0] > accuracies[1] > max(accuracies[2:4])
    assert min(accuracies[2:4]) > accuracies[4]


@pytest.mark.filterwarnings("ignore:epsilon=200 lets a release")
def test_a_plan_that_promises_nothing_may_begin() -> None:
    """Its report says so. One that promises would be refused: it ends at the start."""
    recipe = sosp.RECIPE | {"hessian": "released"}
    problem = sosp.Smooth(4, 1.0, 1.0, 3.0, 6.0, 2.0, 0.4)
    plan = sosp.make_plan(recipe, problem, num_examples=350, epsilon=200.0, delta=1e-3)
    assert plan.theorem is None and plan.curvature_threshold is not None
    found: Any = type("Alpha", (float,), {"min_eigenvalue": -1e-9})(0.5)
    sosp._check_start(found, plan)
    for certified in (True, False):
        outcome = {"certified": certified, "ended": "no records", "alpha": None}
        assert "nothing is promised of such a plan" in sosp._said(plan, outcome, 0.1)
    promised: Any = SimpleNamespace(
        theorem=SimpleNamespace(promise=SimpleNamespace(alpha=0.25)),
        curvature_threshold=plan.curvature_threshold,
    )
    with pytest.raises(parsing.UsageError, match="so that the run would end there"):
        sosp._check_start(found, promised)


def test_report_says_what_a_certificate_is_worth() -> None:
    task = of_wine()
    start = task.init(jax.random.key(0))
    found = jnp.ones_like(start) / 4
    plan: Any = SimpleNamespace(theorem=_theorem())
    alpha_fn = functools.partial(sosp.alpha_of, task.dataset, 1)
    of_start = sosp.report(alpha_fn, plan, start, found, _outcome(0.01))
    own = of_start["test_alpha_of_start"]
    assert own == metrics.sosp_alpha(task.value_fn, start, _public(), 6.0)
    for alpha, excludes, said in (
        (own * 0.99, True, "the saddle at the start does not have it: its own"),
        (own * 1.01, False, "it says little: the saddle at the start has it too"),
        (None, None, "nothing is promised of such a plan"),
    ):
        report = sosp.report(alpha_fn, plan, start, found, _outcome(alpha))
        assert report["excludes_start"] is excludes
        assert ("a probability of 0.25" in report["certificate"]) is (alpha is not None)
        assert said in report["certificate"]
    none = sosp.report(alpha_fn, plan, start, found, _outcome(None, certified=False))
    assert none["certificate"] == "none: out of data"
    assert none["excludes_start"] is None


def test_plot_and_table_of_escapes_in_steps(tmp_path: Path) -> None:
    """A refresh, an escape of two steps, a difference, and another escape."""
    rows = [
        [1, 40, 0.01, 1, 0.1, 1],
        [0, 0, 0.01, 0, 0.2, -1],
        [2, 25, 0.3, -1, 0.1, 0],
        [2, 15, 0.02, -1, 0.1, 2],
    ]
    path = tmp_path / "escapes.png"
    sosp.escapes(
        path,
        title="a run",
        releases=np.array(rows),
        noise_std=0.01,
        num_parameters=4,
        trigger_norm=0.05,
        num_examples=100,
        said="certificate: none",
    )
    assert min(matplotlib.image.imread(path).shape[:2]) > 400
    numbers = {"num_examples": 5000, "epsilon": 8.0, "delta": 1e-5}
    smooth = sosp.Smooth(16, 1.0, 1.0, 3.0, 6.0, 5.0, 0.4)
    recipe = sosp.RECIPE | {"hessian": "on_demand"}
    plan = sosp.make_plan(recipe, smooth, **numbers)
    assert (plan.num_steps, plan.hessian_clip_norm) == (1000, 3.0)
    said = plan.describe().noise
    assert f"means of {plan.refresh_batch_size} gradients" in said
    assert f"products with means of {plan.hessian_batch_size} Hessians" in said


def _outcome(alpha: float | None, certified: bool = True) -> dict[str, Any]:
    return {"certified": certified, "alpha": alpha, "ended": "out of data"}


def _theorem() -> SimpleNamespace:
    return SimpleNamespace(promise=SimpleNamespace(failure_probability=0.25))


def _public() -> tuple[np.ndarray, ...]:
    return (models.unit_rows(models.load("wine").test[0]),)
