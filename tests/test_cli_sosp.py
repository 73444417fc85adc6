"""The command line's ``--algorithm sosp``: a saddle, a certificate, what they are worth."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from jaxdp import metrics, models, plans, training
from jaxdp.cli import main, plots, sosp, train
from tests.training import kills

SOSP = ("--dataset", "digits_4x4", "--algorithm", "sosp")
CHANGES = {
    "num_steps": 60,
    "rank": 1,
    "accuracy": 0.07,
    "failure_probability": 0.2,
    "hessian": "released",
    "prefix_noise": "sqrt_toeplitz",
}
RECORDS = ("records_used", "refreshes", "differences", "escapes")


def run(*words: object) -> int:
    return main([str(word) for word in words])


def reported(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def trained(out: Path) -> int:
    words = [w for name, x in CHANGES.items() for w in (f"--{name}", x)]
    more = ("--epsilon", 40, "--seed", 5, "--quiet")
    return run("train", *SOSP, *words, *more, "--out", out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every option, whose records are enough for a certificate."""
    out = tmp_path_factory.mktemp("sosp") / "run"
    assert trained(out) == 0
    return out


def test_options_reach_the_plan(folder: Path) -> None:
    plan = plans.SOSP.from_json((folder / "plan.json").read_text())
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


def test_report_has_the_certificate_and_what_it_is_worth(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {*train.FILES, "secret"}
    plan: Any = plans.from_json((folder / "plan.json").read_text())
    report = reported(folder)
    assert (report["algorithm"], report["model"]) == ("sosp", "factorization")
    assert (report["private"], report["recipe"]) == (False, CHANGES)
    outcome = report["outcome"]
    assert outcome["certified"] and outcome["ended"] == "certificate"
    assert outcome["alpha"] == plan.theorem.alpha
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
    for name in (train.PROGRESS, train.RELEASES):
        height, width = matplotlib.image.imread(folder / name).shape[:2]
        assert min(height, width) > 400


def test_same_seed_same_run_and_a_killed_one_goes_on(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """As a kill leaves it: the last steps are under way, nothing is written."""
    out = tmp_path / "run"
    with kills.killed(2):
        trained(out)
    assert run("train", "--resume", "--out", out) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "gradients and on how they change (sqrt_toeplitz)" in shown
    assert "at the start" in shown
    with np.load(folder / train.PARAMS) as file, np.load(out / train.PARAMS) as again:
        np.testing.assert_array_equal(again["params"], file["params"])
    before, after = reported(folder), reported(out)
    assert after["outcome"] == before["outcome"]
    assert after["certificate"] == before["certificate"]
    assert run("train", "--resume", "--out", out, "--rank", 2) == 2
    assert "--rank must be left out with --resume or be as it was" in (
        capsys.readouterr().err
    )


def test_other_commands_read_its_plan_and_none_replays_it(
    folder: Path, capsys: Any
) -> None:
    assert run("replay", folder) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "plan must be one of slopes to be replayed, got SOSP" in shown
    assert run("epsilon", "--plan", folder / "plan.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == reported(folder)["epsilon"]
    assert found["num_steps"] == 60


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


def test_report_says_what_a_certificate_is_worth() -> None:
    task = of_wine()
    start = task.init(jax.random.key(0))
    found = jnp.ones_like(start) / 4
    plan: Any = SimpleNamespace(theorem=_theorem())
    of_start = sosp.report(task.alpha_fn, plan, start, found, _outcome(0.01))
    own = of_start["test_alpha_of_start"]
    assert own == metrics.sosp_alpha(task.value_fn, start, _public(), 6.0)
    for alpha, excludes, said in (
        (own * 0.99, True, "the saddle at the start does not have it: its own"),
        (own * 1.01, False, "it says little: the saddle at the start has it too"),
        (None, None, "nothing is promised of such a plan"),
    ):
        report = sosp.report(task.alpha_fn, plan, start, found, _outcome(alpha))
        assert report["excludes_start"] is excludes
        assert ("a probability of 0.25" in report["certificate"]) is (alpha is not None)
        assert said in report["certificate"]
    none = sosp.report(
        task.alpha_fn, plan, start, found, _outcome(None, certified=False)
    )
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
    plots.escapes(
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


WRONG = [
    ("--rank 0", "--rank must be an integer >= 1 and <= 16, got 0"),
    ("--rank 17", "--rank must be an integer >= 1 and <= 16, got 17"),
    ("--accuracy 0", "--accuracy must be a number > 0, got 0.0"),
    ("--accuracy fine", "--accuracy must be a number, got 'fine'"),
    ("--failure-probability 1", "--failure-probability must be a number in (0, 1)"),
    ("--hessian none", "--hessian must be one of on_demand, tracked, released"),
    ("--prefix-noise white", "--prefix-noise must be one of"),
    ("--num-steps 0", "--num-steps must be an integer >= 1"),
    ("--epsilon 0", "--epsilon must be a number > 0, got 0.0"),
    ("--epsilon 2", "so that the run would end there"),
    ("--epsilon 40 --accuracy .4", "or --accuracy smaller: a certificate would be of"),
    (
        "--epsilon 2 --accuracy .01",
        "--accuracy must be such that a refresh and a Hessian",
    ),
    ("--epsilon .1", "--epsilon must be larger, or there must be more than"),
    (
        "--microbatch-size 100000",
        "--microbatch-size must be an integer >= 1 and <= 16384",
    ),
    ("--dataset digits --rank 64", "--hessian must be on_demand for more than 500"),
    ("--model mlp", "unknown option --model"),
    ("--loss hinge", "unknown option --loss"),
    ("--group class", "unknown option --group; jaxdp train sosp --help lists all"),
    ("--l2-clip-norm 1", "unknown option --l2-clip-norm"),
    ("--learning-rate 1", "unknown option --learning-rate"),
    ("--batch-size 4", "unknown option --batch-size"),
    ("--sampling-prob .1", "unknown option --sampling-prob"),
    ("--momentum .9", "unknown option --momentum"),
    ("--radius 1", "unknown option --radius"),
    ("--period 2", "unknown option --period"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[w for w, _ in WRONG])
def test_wrong_argument_gives_one_line(
    words: str, said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was spent")

    monkeypatch.setattr(training, "fit", never)
    assert run("train", *SOSP, *words.split(), "--out", tmp_path) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("jaxdp: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert not list(tmp_path.iterdir())
