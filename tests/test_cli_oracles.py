"""The command line's ``--oracle`` and ``--multi-pass``: runs, refusals, tables."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdp import plans, sampling, training
from jaxdp.cli import main, o2nc, options, plots, prepare, train
from jaxdp.o2nc.theory.bounds import ORACLES
from tests.training import kills

O2NC = ("--dataset", "breast_cancer", "--algorithm", "o2nc", "--loss", "hinge")
SHARED = {"restart_l2_clip_norm": 1.5, "smoothing_radius": 0.2, "max_step": 0.3}

#: Options of a tiny run of each oracle; and what else its plan has.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zeroth_order": (
        {
            "multi_pass": True,
            "num_steps": 8,
            "period": 3,
            "window": 4,
            "l2_clip_norm": 0.5,
            "num_directions": 3,
            "direction": "sphere",
        },
        {"difference": "antithetic", "scale_with_movement": True},
    ),
    "first_order": (
        {
            "multi_pass": True,
            "num_steps": 7,
            "period": 4,
            "l2_clip_norm": 0.5,
            "num_directions": 2,
            "learning_rate": 0.1,
        },
        {"direction": "ball", "difference": "common", "window": 7},
    ),
    "scalar": (
        {"restart_batch_size": 40, "num_directions": 5},
        {"share_directions": True, "num_steps": 11, "window": 11},
    ),
}


def run(*words: object) -> int:
    return main([str(word) for word in words])


def words_of(changes: dict[str, Any]) -> list[object]:
    words: list[object] = []
    for name, value in changes.items():
        words += [f"--{name}"] if value is True else [f"--{name}", value]
    return words


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each oracle that is not tests/test_cli_o2nc.py's."""
    out = {name: tmp_path_factory.mktemp(name) / "run" for name in RUNS}
    for name in RUNS:
        if name != "zeroth_order":
            assert trained(name, out[name]) == 0
    return out


def trained(name: str, out: Path) -> int:
    words = words_of({"oracle": name, **RUNS[name][0], **SHARED})
    more = ("--epsilon", 8, "--seed", 5, "--quiet", "--out", out)
    return run("train", *O2NC, *words, *more)


@pytest.fixture(scope="module")
def made(folders: dict[str, Path]) -> dict[str, Any]:
    """The plans of these runs; and of one of vectors that is not run."""
    out = {}
    for name, (changes, _) in RUNS.items():
        if name == "zeroth_order":
            shared: dict[str, Any] = {"dataset": "breast_cancer", "loss": "hinge"}
            command = options.O2NC(epsilon=8.0, seed=5, **shared, **changes, **SHARED)
            out[name] = prepare.prepare(command).plan
        else:
            text = (folders[name] / "plan.json").read_text()
            out[name] = plans.O2NC.from_json(text)
    return out


@pytest.mark.parametrize("name", RUNS)
def test_options_reach_the_plan(name: str, made: dict[str, Any]) -> None:
    plan, (changes, more) = made[name], RUNS[name]
    sampler: Any = sampling.SinglePassRestarts(
        period=1, restart_batch_size=40, batch_size=40
    )
    if changes.get("multi_pass"):
        sampler = sampling.MultiPassRestarts(period=changes["period"])
        more = more | {"prefix_noise": "independent"}
    ours = {k: x for k, x in changes.items() if k in vars(plan)}
    clip = changes.get("l2_clip_norm", SHARED["restart_l2_clip_norm"])
    want = plans.O2NC(
        num_examples=455,
        sampling=sampler,
        relation="replace_one",
        oracle=name,  # pyright: ignore[reportArgumentType]
        **{**SHARED, **ours, **more, "l2_clip_norm": clip},
    )
    assert plan == want.calibrate(epsilon=8.0, delta=1e-5)


@pytest.mark.parametrize("name", ["first_order", "scalar"])
def test_report_says_which_oracle(
    name: str, folders: dict[str, Path], made: dict[str, Any]
) -> None:
    folder, plan, (changes, _) = folders[name], made[name], RUNS[name]
    assert {p.name for p in folder.iterdir()} == {*train.FILES, "secret"}
    report = json.loads((folder / "report.json").read_text())
    found = report["recipe"]
    assert (found["oracle"], found["multi_pass"]) == (name, plan.multi_pass)
    assert {k: found[k] for k in changes} == changes
    assert report["steps_done"] == plan.num_steps
    assert report["epsilon"] == float(plan.epsilon()) <= 8
    assert math.isfinite(report["test_accuracy"])


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


def test_plans_are_read_by_epsilon(folders: dict[str, Path], capsys: Any) -> None:
    for name in ("first_order", "scalar"):
        path = folders[name] / "plan.json"
        assert run("epsilon", "--plan", path, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["epsilon"] == pytest.approx(8.0, rel=1e-3)


def table_of(plan: Any) -> str:
    report = {"epsilon": 8.0, "delta": 1e-5, "accountant": "exact"}
    report |= {"seed_source": "insecure", "private": False}
    cells = train.spending("o2nc", plan, report).columns[1].cells
    return " | ".join(str(cell) for cell in cells)


def test_tables_say_what_was_released(made: dict[str, Any]) -> None:
    plan = made["zeroth_order"]
    first, other = plan.step_std("restart"), plan.step_std("difference")
    assert (
        f"standard deviation {first:.4g} on each of 3 means of 455 records and at most "
        f"{other:.4g} on each of 5 means of 455 changes" in table_of(plan)
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
        f"{other:.4g} on each of 5 means of 455 changes" in table_of(plan)
    )
    assert plan.describe().released == "gradient or its change"
    assert not plan.describe().at_most

    plan = made["scalar"]
    assert "on each of 11 means of 40 records, of 5 slopes each" in table_of(plan)
    # The noise on d coordinates: that of 5 slopes along directions of length sqrt(d).
    np.testing.assert_allclose(
        plan.describe().stds, np.full(11, plan.node_std / math.sqrt(5))
    )
    assert plan.describe().released == "gradient, made of slopes"


def test_budget_is_spent_step_by_step(made: dict[str, Any]) -> None:
    """Of several passes: with the noise of the whole run, not of a shorter one."""
    spent = train.spent_over_time(made["first_order"], [1, 4, 7])
    assert spent is not None
    times, epsilons = zip(*spent, strict=True)
    assert times == (1, 4, 7)
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2]
    assert epsilons[2] == pytest.approx(8.0, rel=1e-6)


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


WRONG = [
    ("--oracle second_order", "--oracle must be one of zeroth_order, first_order,"),
    (
        "--restart-sampling-prob .1",
        "--restart-sampling-prob is for --multi-pass only, got 0.1",
    ),
    (
        "--multi-pass --restart-batch-size 9",
        "--restart-batch-size must be left out with --multi-pass, where steps read all "
        "records, or a share by --restart-sampling-prob; got 9",
    ),
    (
        "--multi-pass --period 2 --batch-size 9",
        "--batch-size must be left out with --multi-pass, where steps read all records, "
        "or a share by --sampling-prob; got 9",
    ),
    (
        "--multi-pass --period 2 --prefix-noise tree",
        "--prefix-noise must be independent with --multi-pass",
    ),
    (
        "--multi-pass --period 1 --sampling-prob .1",
        "--sampling-prob is for --period 2 or more only, got 1",
    ),
    (
        "--multi-pass --restart-sampling-prob 1.5",
        "--restart-sampling-prob must be a number in (0, 1), got 1.5",
    ),
    ("--multi-pass --num-steps 0", "--num-steps must be an integer >= 1"),
    ("--multi-pass --num-steps 5 --window 6", "--window must be at most num_steps = 5"),
    (
        "--oracle first_order --direction sphere",
        "--direction must be left out with --oracle first_order, whose points are uniform",
    ),
    (
        "--oracle first_order --period 1 --num-directions 3",
        "--num-directions is for --period 2 or more only, got 1",
    ),
    ("--oracle scalar --period 4", "--period must be 1 with --oracle scalar, whose"),
    (
        "--oracle scalar --num-directions 63",
        "--num-directions must be at most min(d, 64) = 62",
    ),
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
