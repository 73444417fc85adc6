"""The command line: runs end to end, one line for every mistake, the demo's claim."""

import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import shtab

import jaxdp
from jaxdp import accounting, models, planner, plans, sampling, training
from jaxdp.cli import (
    budget,
    launch,
    main,
    options,
    parser,
    prepare,
    recipes,
    record,
    train,
)
from jaxdp.cli import task as tasks
from jaxdp.cli.parsing import UsageError, flag
from jaxdp.data.datasets import split_rows
from jaxdp.planner import problems
from jaxdp.training import budgets, ledger
from tests.training import kills

REPORT_FIELDS = {
    *("algorithm", "dataset", "num_examples", "num_steps", "epsilon", "delta"),
    *("relation", "accountant", "noise_multiplier", "private", "seed_source"),
    *("compile_seconds", "train_seconds", "steps_per_second", "device", "versions"),
}
QUICK = ("--dataset", "wine", "--num-steps", "40", "--quiet")
WRITTEN = {*train.FILES, "secret"}
#: What compiles fastest.
TINY = ("--dataset", "quadratic_identity", "--algorithm", "gd", "--num-steps", 3)
#: Likewise, with noise.
FEW = ("--dataset", "quadratic_identity", "--algorithm", "dpgd", "--num-steps", 5)
#: Of a report: no step was lost.
DONE = {"steps_charged": 3000, "steps_done": 3000}


def run(*words: object) -> int:
    return main([str(word) for word in words])


def reported(folder: Path) -> dict[str, Any]:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    text = (folder / train.REPORT).read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse)


def pixels(path: Path) -> tuple[int, int, bytes]:
    """Width, height and the uncompressed rows of a PNG."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    rows, at = b"", 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        rows += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
    return width, height, zlib.decompress(rows)


def check_plot(path: Path) -> None:
    """A picture of a size one can read, with something drawn in several colours."""
    width, height, rows = pixels(path)
    assert width >= 900
    assert height >= 450
    assert len(set(rows[:: max(1, len(rows) // 20_000)])) > 10


# --- train -------------------------------------------------------------------------


def test_train_writes_everything(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "a" / "run"
    assert run("train", *QUICK, "--seed", 3, "--epsilon", 4, "--out", out) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert {p.name for p in out.iterdir()} == WRITTEN
    check_plot(out / train.PROGRESS)
    check_plot(out / train.RELEASES)

    report = reported(out)
    assert REPORT_FIELDS | {"test_accuracy"} <= set(report)
    assert (report["private"], report["seed_source"]) == (False, "insecure")
    assert (report["algorithm"], report["dataset"]) == ("dpzero", "wine")
    assert (report["num_examples"], report["num_steps"]) == (142, 40)
    assert report["steps_done"] == 40
    plan = plans.from_json((out / "plan.json").read_text())
    assert (plan.num_steps, plan.delta, plan.relation) == (40, 1e-5, "replace_one")
    assert report["noise_multiplier"] == plan.noise_multiplier
    assert report["epsilon"] == float(plan.epsilon()) <= 4
    assert report["epsilon"] == pytest.approx(4, rel=1e-3)
    assert report["recipe"]["num_steps"] == 40

    # The accuracy is that of the written parameters on the public records.
    dataset = models.load("wine")
    network = models.network_for(dataset)
    with np.load(out / train.PARAMS) as file:
        dense = {name.removeprefix("Dense_0/"): file[name] for name in file.files}
    accuracy = network.metric_fn({"Dense_0": dense}, *dataset.test)
    assert report["test_accuracy"] == pytest.approx(float(accuracy))


def test_train_from_entropy_is_private_and_the_table_says_what_was_spent(
    tmp_path: Path, capsys: Any
) -> None:
    assert run("train", *FEW, "--out", tmp_path) == 0
    report = reported(tmp_path)
    assert (report["private"], report["seed_source"]) == (True, "entropy")
    shown = capsys.readouterr()
    for word in ("spent: epsilon", "2 at delta 1e-05", "reached", "replace_one"):
        assert word in shown.out
    assert shown.err == ""


def test_options_reach_the_run(tmp_path: Path) -> None:
    changes = {
        "l2_clip_norm": 0.5,
        "smoothing_radius": 0.01,
        "num_directions": 2,
        "direction": "rademacher",
        "learning_rate": 0.07,
        "schedule": "cosine",
        "momentum": 0.5,
        "average": 0.5,
    }
    words = [w for name, v in changes.items() for w in ("--" + name, v)]
    extra = ("--relation", "replace_one", "--delta", 1e-3, "--batch-size", 30)
    more = ("--microbatch-size", 16, "--seed", 1)
    assert run("train", *QUICK, *words, *extra, *more, "--out", tmp_path) == 0
    report = reported(tmp_path)
    assert report["recipe"] == changes | {"num_steps": 40, "optimizer": "sgd"}
    plan = plans.from_json((tmp_path / "plan.json").read_text())
    assert isinstance(plan, plans.DPZero)
    assert (plan.num_directions, plan.direction) == (2, "rademacher")
    assert (plan.smoothing_radius, plan.l2_clip_norm) == (0.01, 0.5)
    assert (plan.relation, plan.delta) == ("replace_one", 1e-3)
    assert plan.sampling == sampling.TruncatedPoisson(sampling_prob=30 / 142)
    assert report["accountant"] == plan.epsilon().accountant
    assert report["epsilon"] == pytest.approx(2, rel=1e-2)


@pytest.mark.slow  # One more run; averages are in core/test_averaging.py.
def test_average_is_what_comes_out(tmp_path: Path) -> None:
    def outcome(command: options.DPGD) -> train.Outcome:
        job = prepare.prepare(command)
        params = prepare.initial(job.task, job.keys)
        return train.train(job, command, params)

    command = options.DPGD(
        dataset="quadratic_identity",
        num_steps=30,
        average=0.5,
        seed=1,
        out=tmp_path / "averaged",
    )
    job = prepare.prepare(command)
    averaged = outcome(command)
    plain = outcome(dataclasses.replace(command, average=0.0, out=tmp_path / "plain"))
    np.testing.assert_array_equal(averaged.releases, plain.releases)
    a, b = jax.tree.leaves(averaged.params), jax.tree.leaves(plain.params)
    assert any(
        np.any(np.asarray(x) != np.asarray(y)) for x, y in zip(a, b, strict=True)
    )
    loss = float(job.task.metric_fn(averaged.params))
    assert averaged.report["test_loss"] == averaged.metrics[-1] == loss


@pytest.mark.parametrize(
    ("words", "metric"),
    [
        (("--algorithm", "mezo", "--dataset", "quadratic_inverse"), "test_loss"),
        pytest.param(
            ("--algorithm", "gd", "--model", "mlp", "--hidden", "8,4"),
            "test_accuracy",
            marks=pytest.mark.slow,
        ),
        (
            ("--algorithm", "dpgd", "--dataset", "diabetes", "--relation", "zero_out"),
            "test_mse",
        ),
    ],
)
def test_other_runs(words: tuple[str, ...], metric: str, tmp_path: Path) -> None:
    assert run("train", *QUICK, "--seed", 1, *words, "--out", tmp_path) == 0
    report = reported(tmp_path)
    private = not {"mezo", "gd"} & set(words)
    assert (report["epsilon"] is not None) == private
    assert report["private"] is False
    assert math.isfinite(report[metric])
    assert report["algorithm"] == words[1]
    assert (report["relation"] == "zero_out") == ("zero_out" in words)
    for name in (train.PROGRESS, train.RELEASES):
        width, height, _ = pixels(tmp_path / name)
        assert min(width, height) > 400


def test_regression_error_is_in_the_target_s_unit() -> None:
    task = tasks.of_network(options.DPZero(dataset="diabetes"))
    dataset = models.load("diabetes")
    zero = jax.tree.map(np.zeros_like, task.init(jax.random.key(0)))
    want = np.mean((400 * dataset.test[1]) ** 2)
    np.testing.assert_allclose(float(task.metric_fn(zero)), want, rtol=1e-5)


def test_own_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, (60, 2))
    y = np.where(x[:, 0] > 5, "yes", "no")
    lines = ["a,b,answer", *(f"{p},{q},{s}" for (p, q), s in zip(x, y, strict=True))]
    csv, npz = tmp_path / "mine.csv", tmp_path / "mine.npz"
    csv.write_text("\n".join(lines))
    bounds = tmp_path / "bounds.json"
    bounds.write_text('{"a": [0, 10], "b": [0, 20]}')
    np.savez(npz, x=x, target=x[:, 1])
    words = ("--label", "answer", "--bounds", bounds, "--classes", "no,yes")
    more = ("--algorithm", "gd", "--quiet", "--test-fraction", 0.5)
    out = tmp_path / "run"
    assert run("train", "--dataset", csv, *words, *more, "--out", out) == 0
    assert (reported(out)["dataset"], reported(out)["num_examples"]) == ("mine", 30)
    command = options.DPZero(
        dataset=str(npz),
        label="target",
        task="regression",
        bounds=(0.0, 10.0),
        label_bounds=(0.0, 20.0),
        test_fraction=0.2,
    )
    with pytest.raises(UsageError, match="--test-fraction must be given"):
        tasks.of_network(dataclasses.replace(command, test_fraction=None))
    dataset = tasks.of_network(command).dataset
    assert (dataset.num_examples, dataset.target_bounds) == (48, (0.0, 20.0))
    assert dataset.train[0].max() > 2 * dataset.train[1].max() - 0.1


def test_records_that_would_count_zero_are_said_before_the_run(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the held-out records, which are public."""
    lines = [f"3e38,{1 + i % 3},{i / 60},{i % 2}" for i in range(60)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["a,kind,b,ill", *lines]))

    def said(**given: Any) -> list[str]:
        shared = {"test_fraction": 0.5, "out": tmp_path / "run", "label": "ill"}
        shared |= {"l2_clip_norm": 1.0, "learning_rate": 0.1}
        command = options.DPZero(dataset=str(path), **(shared | given))
        return train.doubts(prepare.prepare(command))

    (line,) = said()
    assert "the columns 'a' and 'b' are of very different sizes" in line
    monkeypatch.setattr(train, "_UNLIKE", math.inf)
    assert said() == []
    assert said(group="kind", group_values=(1.0, 2.0, 3.0)) == []
    (line,) = said(group="kind", group_values=(1.0, 7.0))
    assert (
        "of the 30 held-out public records belong to no group of --group kind" in line
    )
    with pytest.raises(UsageError, match=r"--group-values must be .* none of the 30"):
        said(group="kind", group_values=(7.0, 8.0))
    (line,) = said(label="a", task="regression")  # Its square is infinite.
    assert "the loss of 30 of the 30 held-out public records is not finite" in line
    with pytest.raises(UsageError, match="must be given where the held-out records"):
        said(label="a", task="regression", learning_rate=None)

    def stop(*args: Any) -> Any:
        raise UsageError("here the run would begin")

    monkeypatch.setattr(train, "_initial", stop)
    words = ("--label", "ill", "--test-fraction", 0.5, "--bounds", "100,200")
    words += ("--l2-clip-norm", 1, "--learning-rate", 0.1)
    assert run("train", "--dataset", path, *words) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("jaxdp: warning: --bounds leave out more than half")
    assert "'a', 'kind', 'b'" in first and last == "jaxdp: here the run would begin"


def test_classes_that_are_not_there_are_said_before_the_run(tmp_path: Path) -> None:
    lines = [f"{i / 60},{('no', 'yes')[i % 2]}" for i in range(100)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["a,ill", *lines]))

    def said(*classes: str) -> list[str]:
        shared: dict[str, Any] = {"test_fraction": 0.5, "out": tmp_path / "run"}
        shared |= {"l2_clip_norm": 1.0, "learning_rate": 0.1}
        given = options.DPZero(
            dataset=str(path), label="ill", classes=classes, **shared
        )
        return train.doubts(prepare.prepare(given))

    assert said("no", "yes") == []
    (line,) = said("no", "perhaps", "yes")
    assert line.startswith("no held-out public record is of 'perhaps': are these")


def test_private_labels_decide_nothing_that_is_public(
    tmp_path: Path, capsys: Any
) -> None:
    """A run's files and words stay but for what has noise; the set is of public ones."""
    lines = [f"{i / 60},{('no', 'yes')[i % 2]}" for i in range(60)]
    path = tmp_path / "mine.csv"
    words = ["train", "--dataset", path, "--label", "ill", "--test-fraction", 0.5]
    words += ["--bounds", "0,1", "--group", "class", "--num-steps", 3, "--seed", 1]
    words += ["--l2-clip-norm", 1, "--learning-rate", 0.1, "--overwrite"]
    kept, _ = split_rows(60, 0.5, 0, "test_fraction")
    said = []
    for other in ("", "yes", "maybe", "perhaps"):
        changed = list(lines)
        changed[kept[3]] = f"0.5,{other}"
        path.write_text("\n".join(["a,ill", *changed]))
        assert run(*words, "--out", tmp_path / "run") == 0
        words_of = capsys.readouterr()
        report = reported(tmp_path / "run")
        noised = [k for k in report if k.startswith("test_")]
        groups = set(report["test_group_errors"])
        for name in noised:
            report.pop(name)
        said.append((report, groups, words_of.err.count("\n")))
    assert groups == {"no", "yes"}
    assert all(one == said[0] for one in said)
    path.write_text("\n".join(["a,ill", *(x.replace("yes", "no") for x in lines)]))
    assert run(*words, "--out", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxdp: --classes must be given where the held-out public")


def test_warnings_of_others_are_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """They may be about one private record, as NumPy's of an overflow."""
    prepared = train.prepare

    def warned(*given: Any) -> Any:
        warnings.warn("overflow encountered in cast", RuntimeWarning, stacklevel=2)
        warnings.warn("bounds are wide", UserWarning, stacklevel=2)
        return prepared(*given)

    monkeypatch.setattr(train, "prepare", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("train", *FEW, "--quiet", "--out", tmp_path / "run") == 0
    said = capsys.readouterr().err
    assert "jaxdp: warning: --bounds are wide" in said and "overflow" not in said


def test_version(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxdp {jaxdp.__version__}\n"


def test_a_shell_completes_commands_algorithms_and_options() -> None:
    """By the script that shtab writes, run by bash itself."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    script = shtab.complete(parser(), shell="bash", root_prefix="jaxdp")
    for words, wanted in (
        ("jaxdp syn", ["synthesize"]),
        ("jaxdp train o2", ["o2nc"]),
        ("jaxdp train dpzero --smoothing", ["--smoothing-radius"]),
        ("jaxdp synthesize --deg", ["--degree"]),
    ):
        asked = f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}"
        shown = 'printf "%s\\n" "${COMPREPLY[@]}"'
        lines = [script, asked, "_shtab_jaxdp", shown]
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == wanted, done.stderr


def test_the_report_for_machines(tmp_path: Path, capsys: Any) -> None:
    assert run("train", *TINY, "--json", "--out", tmp_path) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == reported(tmp_path)


def test_a_run_that_learned_nothing_says_so(tmp_path: Path, capsys: Any) -> None:
    words = ("train", "dpgd", "--dataset", "wine", "--num-steps", 5, "--seed", 0)
    for rate, said in ((1e-9, True), (1.0, False)):
        out = tmp_path / str(rate)
        given = ("--learning-rate", rate, "--epsilon", 20, "--quiet", "--out", out)
        assert run(*words, *given) == 0
        shown = capsys.readouterr().err
        assert ("the mean loss of the held-out public records was" in shown) == said


def test_command_as_a_process(tmp_path: Path) -> None:
    """As a person types it: no output on standard error, a table on the other."""

    def process(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "jaxdp.cli", *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    done = process("train", *TINY)
    assert (done.returncode, done.stderr) == (0, "")
    assert "test loss" in done.stdout
    assert "\x1b" not in done.stdout  # No colours and no bar into a pipe.
    assert reported(tmp_path / "runs" / "quadratic_identity")["num_steps"] == 3
    wrong = process("train", "--epsilon", -3)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "jaxdp: --epsilon must be a number > 0, got -3.0\n"


# --- the folder --------------------------------------------------------------------


def test_folder_of_an_earlier_run_is_kept_and_so_are_other_files(
    tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    words = ("train", *TINY, "--quiet", "--out", out)
    assert run(*words, "--seed", 0) == 0
    before = (out / "ledger.jsonl").read_bytes()
    assert run(*words, "--seed", 1) == 2
    shown = capsys.readouterr().err
    assert "--resume" in shown and "--overwrite" in shown
    assert (out / "ledger.jsonl").read_bytes() == before
    assert run(*words, "--seed", 1, "--overwrite") == 0
    assert (out / "ledger.jsonl").read_bytes() != before
    assert {p.name for p in out.iterdir()} == WRITTEN

    (tmp_path / "thesis.txt").write_text("mine")
    into = ("train", *TINY, "--quiet", "--out", tmp_path)
    assert run(*into) == 2
    assert "--out must be a new or empty folder" in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()
    assert run(*into, "--overwrite") == 0
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_failed_run_leaves_no_files_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ("train", *TINY, "--quiet", "--out", tmp_path)
    assert run(*words) == 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "fit", interrupted)
    assert run(*words, "--overwrite") == 130
    assert capsys.readouterr().err == "jaxdp: interrupted\n"
    left = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"plan.json", "initial.npz", "lock"}
    monkeypatch.undo()
    assert run(*words) == 0  # Nothing was spent: no record to keep.


def test_a_bug_shows_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(training, "fit", broken)
    with pytest.raises(ValueError, match="a bug"):
        run("train", *TINY, "--out", tmp_path)


# --- resume and replay -------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that was killed in its middle, and what it would have ended with."""
    home = tmp_path_factory.mktemp("killed")
    options = ("--momentum", 0.9, "--num-directions", 1, "--relation", "zero_out")
    words = ("train", *QUICK, "--seed", 3, *options)
    assert run(*words, "--out", home / "whole") == 0
    with kills.killed(24):
        run(*words, "--out", home / "run")
    return home / "run", dict(np.load(home / "whole" / "params.npz"))


def check_params(file: Path, want: dict[str, Any]) -> None:
    with np.load(file) as got:
        assert set(got) == set(want)
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value)


def test_replay_does_not_write_over_the_run(killed: Any, capsys: Any) -> None:
    folder = killed[0].parent / "whole"
    content = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for name, part in (
        ("params.npz", "another than the run's own"),
        ("initial.npz", "a new file or"),
    ):
        assert run("replay", folder, "--out", folder / name) == 2
        assert f"--out must be {part}" in capsys.readouterr().err
    assert content == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_resumed_run_ends_as_if_undisturbed(
    killed: Any, tmp_path: Path, capsys: Any
) -> None:
    out, want = shutil.copytree(killed[0], tmp_path / "run"), killed[1]
    assert run("train", "--resume", "--out", out, "--quiet") == 0
    check_params(out / "params.npz", want)
    assert {p.name for p in out.iterdir()} == WRITTEN
    report = reported(out)
    assert (report["steps_done"], report["steps_charged"]) == (40, 40)
    assert run("replay", out, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["compared"] == "identical to params.npz, to the bit"
    assert shown["identical"] is True
    assert (shown["steps"], shown["num_steps"]) == (40, 40)
    check_params(out / "replayed.npz", want)
    # The ledger and the initial parameters are all that it takes.
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("ledger.jsonl", "initial.npz"):
        (alone / name).write_bytes((out / name).read_bytes())
    assert run("replay", alone / "ledger.jsonl", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["identical"], shown["compared"]) == (None, "there is no params.npz")
    check_params(alone / "replayed.npz", want)


def test_replay_that_gives_other_parameters_fails(
    killed: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, want = shutil.copytree(killed[0].parent / "whole", tmp_path / "run"), killed[1]
    file, name = out / "params.npz", next(iter(want))
    np.savez(file, **want | {name: want[name] + 1})
    assert run("replay", out, "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["identical"], shown["compared"]) == (
        False,
        "up to 1 away from params.npz",
    )
    check_params(out / "replayed.npz", want)
    # Elsewhere replays are equal up to rounding: it says so.
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.0.1")
        assert run("replay", out) == 1
    assert "with jax 0.0.1" in capsys.readouterr().out
    np.savez(file, **{name: want[name]})
    assert run("replay", out) == 1
    for other in (want[name].astype(np.float64) * (1 + 1e-9), want[name][None]):
        np.savez(file, **want | {name: other})
        capsys.readouterr()
        assert run("replay", out, "--json") == 1
        shown = json.loads(capsys.readouterr().out)
        assert shown["compared"] == "params.npz holds other parameters"
    file.unlink()
    assert run("replay", out) == 0
    # A run that diverged is replayed as it was.
    lost = jax.tree.map(lambda x: np.full_like(x, np.nan), want)
    np.savez(file, **lost)
    monkeypatch.setattr("jaxdp.cli.replay.polyak_output", lambda _: lost)
    assert run("replay", out) == 0


def test_a_finished_run_without_its_report_is_resumed(tmp_path: Path) -> None:
    """DP-GD is not replayed: its metric is taken once, at the end."""
    out = tmp_path / "run"
    assert run("train", *FEW, "--seed", 1, "--quiet", "--out", out) == 0
    want = dict(np.load(out / "params.npz"))
    for name in ("report.json", "params.npz"):
        (out / name).unlink()
    assert run("train", "--resume", "--out", out, "--quiet") == 0
    check_params(out / "params.npz", want)
    assert reported(out)["steps_done"] == 5


def test_one_command_begins_goes_on_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As a job is requeued: a kill before the plan, a signal, when it is over."""
    out, fit = tmp_path / "run", training.fit
    options = ("train", *FEW, "--seed", 1, "--json", "--out")
    assert run(*options, tmp_path / "whole") == 0
    want = dict(np.load(tmp_path / "whole" / "params.npz"))
    (out / "secret").mkdir(parents=True)
    for name in ("secret/lock", "initial.npz.part"):
        (out / name).touch()

    def preempted(*args: Any, callback: Any, **kwargs: Any) -> Any:
        def then(step: int, *rest: Any) -> None:
            callback(step, *rest)
            if step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

        return fit(*args, callback=then, **kwargs)

    monkeypatch.setattr(training, "fit", preempted)
    words = (*options, out, "--resume", "auto")
    capsys.readouterr()
    assert run(*words) == 75
    assert capsys.readouterr() == (
        "",
        "jaxdp: stopped by SIGUSR1 after step 2 of 5, all on record; --resume goes on\n",
    )
    assert not (out / "report.json").exists()
    (tmp_path / "auto.toml").write_text('resume = "auto"\n')
    for again in (words, (*options, out, "--config", tmp_path / "auto.toml")):
        assert run(*again) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["steps_done"], report["steps_charged"]) == (5, 5)
        check_params(out / "params.npz", want)


def test_launch_kills_the_others_and_says_how_all_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Where process 1 of two dies, by a program that stands for Python's.

    JAX would listen for the others at all interfaces, if it were not told.
    """
    program, told = tmp_path / "python", tmp_path / "told"
    program.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f'*,1,2) echo "$JAX_COORDINATOR_BIND_ADDRESS $*" > {told}; exit 3;;\n'
        "esac\nexec sleep 300\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert run("launch", "--processes", 2, "--json", "--", "train") == 3
    want = {"exit_code": 3, "exit_codes": [137, 3]}
    assert json.loads(capsys.readouterr().out) == want
    at, *words = told.read_text().split()
    assert at.startswith("localhost:") and words[-1] == f"--distributed={at},1,2"


@pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux alone")
def test_the_port_of_launched_processes_is_held_until_they_end() -> None:
    with launch.held_port() as (port, held):
        job = subprocess.Popen(["sleep", "300"], pass_fds=held)

    with socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("localhost", port))
        job.kill()
        job.wait()
        other.bind(("localhost", port))


@pytest.mark.slow  # Up to eight processes, of which each imports and compiles.
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_launched_processes_stop_and_go_on_together(
    count: int, devices: int, tmp_path: Path
) -> None:
    """With four devices in all; SIGTERM comes to the one that started them."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    options = ("train", *FEW, "--seed", 1, "--json", "--out")
    words = (*options, out, "--resume", "auto")
    flags = f"--xla_force_host_platform_device_count={devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

    def launch(**more: str) -> subprocess.Popen[str]:
        start = [
            "-m",
            "jaxdp.cli",
            "launch",
            "--processes",
            count,
            "--json",
            "--",
            *words,
        ]
        return subprocess.Popen(
            [sys.executable, *map(str, start)],
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": "2"}
            | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with launch(**kills.WAITING) as job:
        # Signals are passed on before lines are.
        assert job.stderr and job.stderr.readline()
        while job.poll() is None and kills.count_lines(out) < 3:
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
        shown, error = job.communicate(timeout=600)
    assert job.returncode == 75, error
    want = {"exit_code": 75, "exit_codes": [75] * count}
    assert json.loads(shown.splitlines()[-1]) == want
    for index in range(count):
        assert f"[{index}] waits for its signal" in error
        assert f"[{index}] jaxdp: stopped by SIGTERM after step 1 of 5" in error
    with launch() as job:
        shown, error = job.communicate(timeout=600)
    assert job.returncode == 0, error
    (line,) = (x for x in shown.splitlines() if x.startswith('[0] {"'))
    assert json.loads(line[4:])["steps_charged"] == 5
    assert json.loads(shown.splitlines()[-1]) == {
        "exit_code": 0,
        "exit_codes": [0] * count,
    }
    assert len([x for x in shown.splitlines() if '{"' in x]) == 2
    assert {p.name for p in out.iterdir()} == WRITTEN
    assert run(*options, whole, "--microbatch-size", 2500) == 0
    check_params(out / "params.npz", dict(np.load(whole / "params.npz")))


_WAITING = """
import os, signal, time
from jaxdp.cli import cluster
cluster._join(("localhost:{port}", 0, 1))
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
"""


def test_sigterm_ends_a_process_that_has_joined_and_not_begun() -> None:
    """JAX would take it, and the run would begin all the same."""
    with launch.held_port() as (port, _):
        words = [sys.executable, "-c", _WAITING.format(port=port)]
        done = subprocess.run(words, check=False, timeout=100)
    assert done.returncode == -signal.SIGTERM


def test_resume_refuses_what_changed_and_new_attempt_charges(
    killed: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(killed[0], tmp_path / "run")
    again = ("train", "--resume", "--out", out, "--quiet")
    # Whoever edits the public part must not choose what is counted in the data.
    path = out / "ledger.jsonl"
    whole = path.read_bytes()
    assert b'"test_fraction": null' in whole
    path.write_bytes(whole.replace(b'"test_fraction": null', b'"test_fraction": 0.9'))
    with monkeypatch.context() as patched:
        patched.setattr("jaxdp.cli.train.prepare", lambda command: pytest.fail("read"))
        assert run(*again) == 2
    assert "--resume: ledger must be as its run left it" in capsys.readouterr().err
    path.write_bytes(whole)
    for words, part in (
        (("--num-steps", 41), "--num-steps must be left out with --resume"),
        # Given as its default, it is given all the same.
        (
            ("--relation", "replace_one"),
            "--relation must be left out with --resume or be",
        ),
        (("--seed", 4), "--seed must be left out with --resume or be as it was, 3"),
        (("--microbatch-size", 9), "microbatch_size is 9 and was None; losses"),
        (("--dataset", "breast_cancer"), "--dataset must be left out"),
    ):
        assert run(*again, *words) == 2
        assert part in capsys.readouterr().err
    assert run(*again, "--microbatch-size", 9, "--new-attempt") == 0
    assert reported(out)["steps_done"] == 39
    assert run("replay", out) == 0
    shown = capsys.readouterr().out
    assert "39" in shown
    assert "identical" in shown


def test_resume_refuses_an_option_that_the_record_does_not_know(
    killed: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version: given as its default, it changes nothing."""
    out = shutil.copytree(killed[0], tmp_path / "run")
    again = ("train", "--resume", "--out", out, "--quiet")
    said = record.said

    def older(*given: Any) -> Any:
        known = said(*given)
        assert known is not None and known.pop("keep_noise_roots") is False
        return known

    monkeypatch.setattr(record, "said", older)
    assert run(*again, "--keep-noise-roots") == 2
    part = (
        "--keep-noise-roots must be left out with --resume of a run from before there"
    )
    assert part in capsys.readouterr().err
    assert run(*again, "--no-keep-noise-roots") == 0


def test_what_a_run_says_of_time_and_keeps_of_noise(
    tmp_path: Path, capsys: Any
) -> None:
    """Time is public for data that are; noise roots are gone unless they are kept."""
    table = tmp_path / "mine.csv"
    rows = (f"{x},{x % 3},{'ab'[x % 2]}" for x in range(40))
    table.write_text("\n".join(["age,size,kind", *rows]))
    file = ("--dataset", table, "--label", "kind", "--classes", "a,b")
    file += ("--bounds", "0,40", "--test-fraction", 0.5)
    file += ("--l2-clip-norm", 1, "--learning-rate", 0.1)
    times = {"compile_seconds", "train_seconds", "steps_per_second"}
    small = (*FEW, "--seed", 1)
    for name, words, public, kept in (
        ("named", (), True, False),
        ("kept", ("--timings", "secret", "--keep-noise-roots"), False, True),
        ("file", file, False, False),
        ("shown", (*file, "--timings", "public"), True, False),
    ):
        out = tmp_path / name
        capsys.readouterr()
        assert run("train", *small, *words, "--out", out) == 0
        printed = capsys.readouterr().out
        assert ("steps/s" in printed) == ("compile" in printed) == public
        assert "cpu" in printed
        assert times & reported(out).keys() == (times if public else set())
        hidden = json.loads((out / "secret" / "timing.json").read_text())
        assert hidden.keys() == times
        secret = json.loads((out / "secret" / "run.json").read_text())
        assert (set(secret["keys"]["noise_words"]) != {"0"}) == kept
    assert run("train", "--resume", "--out", tmp_path / "kept", "--quiet") == 0
    again = json.loads((tmp_path / "kept" / "secret" / "run.json").read_text())
    assert set(again["keys"]["noise_words"]) != {"0"}
    assert not times & reported(tmp_path / "kept").keys()


# --- wrong arguments ---------------------------------------------------------------


def mistakes(name: str) -> list[tuple[str, list[str]]]:
    """Reads words, and what the line must say: the argument, what it may be or was."""
    base, found = "", []
    for line in Path(__file__).with_name(name).read_text().splitlines():
        if line.startswith("["):
            base = line[1:-1] + " "
        elif line and line[0] != "#":
            words, _, parts = line.partition("=> ")
            assert parts
            found.append((base + words.strip(), parts.split(" | ")))
    return found


WRONG = mistakes("cli_mistakes.txt")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a good and a bad file."""
    (tmp_path / "my.csv").write_text("a,b\n1,0\n2,1\n3,0\n4,1\n")
    (tmp_path / "bad.csv").write_text("a,b\n1,0\nx,1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "parts"), WRONG, ids=[w for w, _ in WRONG])
def test_wrong_argument_gives_one_line(
    words: str,
    parts: list[str],
    folder: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was spent")

    monkeypatch.setattr(training, "fit", never)
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("jaxdp: ")
    assert shown.err.count("\n") == 1 == shown.err[-1:].count("\n")
    for part in parts:
        assert part in shown.err
    assert sorted(p.name for p in folder.iterdir()) == ["bad.csv", "my.csv"]


@pytest.mark.parametrize("name", options.ALGORITHMS)
def test_options_of_other_algorithms_are_unknown(name: str, capsys: Any) -> None:
    fields = {
        n: {f.name for f in dataclasses.fields(x)}
        for n, x in options.ALGORITHMS.items()
    }
    others = set().union(*fields.values()) - fields[name]
    assert len(others) > 10
    for option in others:
        assert run("train", name, flag(option), 1) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"jaxdp: unknown option {flag(option)}; ")
        assert shown.endswith(f"jaxdp train {name} --help lists all\n")


@pytest.mark.parametrize("words", ["--help", "train -h", "calibrate --help"])
def test_help(words: str, capsys: Any) -> None:
    assert main(words.split()) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: jaxdp")
    assert shown.err == ""


def test_help_fits_a_screen_and_shows_an_algorithm_s_own_options(capsys: Any) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(f"{code}: " in " ".join(lines) for code in (0, 1, 2, 130, 141))
    own = {"o2nc": "--max-step", "saddle": "--num-draws", "sosp": "--rank"}
    for algorithm in options.ALGORITHMS:
        assert main(["train", algorithm, "--help"]) == 0
        shown = capsys.readouterr().out
        for name, option in own.items():
            assert (option in shown) == (name == algorithm)
        assert ("--epsilon" in shown) == (algorithm not in ("mezo", "gd"))


@pytest.mark.parametrize(
    "words", ["train --help", "epsilon --noise-multiplier 1 --num-steps 3"]
)
def test_closed_pipe_shows_no_traceback(words: str) -> None:
    command = f"{sys.executable} -m jaxdp.cli {words} | true"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_spellings_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Underscores, values that begin with a hyphen, and the algorithm in either place."""
    found: list[Any] = []
    monkeypatch.setattr(train, "run", found.append)
    for words in ("--algorithm dpgd", "--algorithm=dpgd"):
        run("train", "--batch_size", 3, *words.split(), "--bounds", "-1,1")
    run("train", "dpgd", "--batch-size=3", "--bounds=-1,1", "--no-progress")
    one, two, last = found
    assert one == two == options.DPGD(batch_size=3, bounds=(-1.0, 1.0))
    assert last == dataclasses.replace(one, progress=False)


# --- epsilon and calibrate ---------------------------------------------------------


def printed(capsys: Any, *words: object) -> dict[str, Any]:
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("relation", "sampled"),
    [
        *((relation, False) for relation in accounting.RELATIONS),
        # Searches of seconds each.
        ("add_or_remove", True),
        pytest.param("replace_one", True, marks=pytest.mark.slow),
        pytest.param("zero_out", True, marks=pytest.mark.slow),
    ],
)
def test_numbers_are_the_plan_s(relation: Any, sampled: bool, capsys: Any) -> None:
    """Sampled, every relation has another epsilon: one that got lost would be seen."""
    words: tuple[object, ...] = ("--relation", relation)
    sampler: Any = sampling.FullBatch()
    if sampled:
        words = (*words, "--num-examples", 500, "--batch-size", 50)
        sampler = sampling.TruncatedPoisson(sampling_prob=0.1)
    plan = plans.DPZero(
        num_examples=500,
        num_steps=100,
        sampling=sampler,
        relation=relation,
        l2_clip_norm=3.0,
        smoothing_radius=1e-3,
    )
    common = (*words, "--delta", 1e-6)
    got = printed(capsys, "calibrate", "--epsilon", 1.5, "--num-steps", 100, *common)
    multiplier = got["noise_multiplier"]
    if not sampled:  # Which takes seconds otherwise.
        exact = plan.calibrate(epsilon=1.5, delta=1e-6)
        assert multiplier == exact.noise_multiplier
    spent = plan.with_noise(noise_multiplier=multiplier).epsilon(delta=1e-6)
    assert got["relation"] == relation
    assert got["epsilon"] == float(spent) == pytest.approx(1.5, rel=1e-2)
    assert got["epsilon"] <= 1.5
    assert got["accountant"] == spent.accountant
    noise = ("--noise-multiplier", multiplier)
    back = printed(capsys, "epsilon", *noise, "--num-steps", 100, *common)
    assert back == got
    if not sampled:
        steps = printed(capsys, "calibrate", "--epsilon", 1.5, *noise, *common)
        assert steps["num_steps"] == 100


def test_epsilon_of_a_plan_file(tmp_path: Path, capsys: Any) -> None:
    plan = plans.DPGD(
        num_examples=100,
        num_steps=20,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
    )
    path = tmp_path / "plan.json"
    path.write_text(plan.calibrate(epsilon=3.0, delta=1e-4).to_json())
    got = printed(capsys, "epsilon", "--plan", path)
    assert (got["delta"], got["relation"], got["num_steps"]) == (1e-4, "zero_out", 20)
    assert got["epsilon"] == pytest.approx(3.0)
    other = printed(capsys, "epsilon", "--plan", path, "--delta", 1e-6)
    assert other["epsilon"] > got["epsilon"]
    path.write_text(plan.to_json())
    assert run("epsilon", "--plan", path) == 2
    assert "--plan must have a noise_multiplier" in capsys.readouterr().err


def test_no_noise_is_no_privacy(capsys: Any) -> None:
    words = ("epsilon", "--noise-multiplier", 0, "--num-steps", 5)
    assert printed(capsys, *words)["epsilon"] is None
    assert run(*words) == 0
    assert "infinite" in capsys.readouterr().out


# --- recipes and the study ---------------------------------------------------------


def test_every_combination_has_a_recipe() -> None:
    for name in (*models.DATASETS, "somebody's file"):
        for model in options.MODELS:
            for algorithm in recipes.ALGORITHMS:
                for epsilon in (0.1, 2.0, 50.0):
                    found = recipes.find(name, model, algorithm, epsilon)
                    plan = recipes.make_plan(
                        found, algorithm, num_examples=100, epsilon=epsilon, delta=1e-5
                    )
                    private = algorithm in ("dpzero", "dpgd")
                    assert math.isfinite(plan.epsilon(delta=1e-5)) == private


# Over 10 s on a busy machine: two rehearsals and a run, each a program of its own.
def test_steps_of_a_file_are_the_planner_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its held-out records; what is given stays, and so does what is on record."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (300, 5)).astype(np.float32)
    path, out = tmp_path / "mine.npz", tmp_path / "run"
    np.savez(path, x=x, y=(x[:, 0] > 0).astype(np.int32))
    words = ["--dataset", path, "--label", "y", "--test-fraction", 0.5, "--out", out]
    assert run("train", "dpgd", *words, "--num-steps", 20, "--seed", 1, "--quiet") == 0
    recipe = reported(out)["recipe"]
    assert (recipe["average"], recipe["num_steps"]) == (planner.gradients.AVERAGED, 20)

    def job(**more: Any) -> prepare.Job:
        shared = {"dataset": str(path), "label": "y", "test_fraction": 0.5}
        shared |= {"num_steps": 20, "out": tmp_path / "other"}
        return prepare.prepare(options.DPGD(**shared | more))

    made = job(l2_clip_norm=recipe["l2_clip_norm"] / 2)
    assert made.recipe["l2_clip_norm"] == recipe["l2_clip_norm"] / 2
    task, plan = made.task, plans.from_json((out / "plan.json").read_text())
    start = prepare.initial(task, jaxdp.Keys.insecure(0))
    found = planner.planned(plan, task.value_fn, start, task.dataset.test)
    assert found.plan == plan
    assert found.learning_rate == recipe["learning_rate"]
    # Half the clip has half the noise.
    assert made.recipe["learning_rate"] == pytest.approx(
        2 * found.learning_rate, rel=0.01
    )

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("planned again")

    monkeypatch.setattr(planner, "planned", never)
    assert run("train", "--resume", "--out", out, "--quiet") == 0
    assert reported(out)["recipe"] == recipe
    given = {"l2_clip_norm": 0.5, "learning_rate": 0.25}
    assert job(**given).recipe == recipe | given


def test_budgets_of_a_recipe_s_rows_ascend() -> None:
    for rows in (*recipes.RECIPES.values(), recipes.PLAIN):
        budgets = [most for most, _ in rows]
        assert budgets == sorted(budgets)
        assert budgets[-1] == math.inf


def test_cosine_and_momentum_are_optax_s() -> None:
    recipe = recipes.Recipe(
        num_steps=10, learning_rate=0.5, schedule="cosine", momentum=0.9
    )
    tx = recipes.make_optimizer(recipe)
    assert tx is not None
    assert recipes.make_optimizer(dataclasses.replace(recipe)) is tx
    params = np.ones(2, np.float32)
    state, moving = tx.init(params), 0.0
    for t in range(10):
        updates, state = tx.update(np.full(2, t, np.float32), state, params)
        moving = 0.9 * moving + 0.1 * t
        rate = 0.5 * (1 + math.cos(math.pi * t / 10)) / 2
        np.testing.assert_allclose(updates, -rate * moving, rtol=1e-5, atol=1e-6)


def test_adamw_is_optax_s_and_changes_no_bit_of_leaves_that_are_frozen() -> None:
    rng = np.random.default_rng(0)
    params: Any = {
        "base": np.array([-0.0, 0.0, 3.0], np.float32),
        "lora": rng.normal(size=4).astype(np.float32),
    }
    recipe = recipes.Recipe(num_steps=5, learning_rate=0.5, optimizer="adamw")
    tx = recipes.make_optimizer(recipe, lambda path: path == "lora")
    of_optax = optax.adamw(0.5)
    found, want = params, params["lora"]
    state, known = tx.init(found), of_optax.init(want)
    assert optax.tree.size(state) == optax.tree.size(known)  # No moments of the base.
    for _ in range(5):
        gradient = {"base": np.zeros(3, np.float32), "lora": rng.normal(size=4)}
        updates, state = tx.update(gradient, state, found)
        found = optax.apply_updates(found, updates)
        updates, known = of_optax.update(gradient["lora"], known, want)
        want = optax.apply_updates(want, updates)
    assert np.asarray(found["base"]).tobytes() == params["base"].tobytes()
    assert np.asarray(found["lora"]).tobytes() == np.asarray(want).tobytes()


def test_epsilon_over_time_ends_at_the_plan_s() -> None:
    job = prepare.prepare(options.DPZero(seed=0))
    times, spent = zip(
        *train.spent_over_time(job.plan, list(range(30, 3001, 30)), DONE) or (),
        strict=True,
    )
    assert (times[0], times[-1]) == (1, 3000)
    assert spent[-1] == float(job.plan.epsilon())
    assert list(spent) == sorted(spent)
    first = dataclasses.replace(job.plan, num_steps=1)
    assert spent[0] == float(first.epsilon())


def test_sampler_takes_the_whole_as_a_full_batch() -> None:
    for words in ({"sampling_prob": 1.0}, {"batch_size": 7}, {}):
        command = options.Epsilon(**words)  # pyright: ignore
        assert budget.sampler(command, 7) == sampling.FullBatch()


def test_a_run_that_was_killed_before_it_began_is_not_charged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget has room for one run; the same command finds what it had reserved."""
    budget = jaxdp.Budget.create(
        tmp_path / "budget", epsilon=3.0, delta=1e-4, relation="replace_one"
    )
    out = tmp_path / "run"
    train = ["train", "--dataset", "digits_4x4", "--epsilon", "2", "--num-steps", "3"]
    train += ["--seed", "0", "--quiet", "--budget", str(budget.folder)]
    train += ["--out", str(out), "--resume", "auto"]

    def kill(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(budgets, "begin", kill)
        assert main(train) == 130
    (reserved,) = budget.reservations
    assert not (out / ledger.LEDGER).exists()
    assert main(train) == 0
    assert budget.reservations == (reserved,)
    assert ledger.read(out).header["run"] == reserved.run
    assert main([*train[:-2], "--overwrite"]) == 2  # That is another run.


def test_a_budget_is_made_reserved_shown_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "budget")
    words = ["budget", folder, "--epsilon", "3", "--delta", "1e-4"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spent"] == {"epsilon": 0, "delta": 0}
    assert main(words) == 2
    train = ["train", "--dataset", "digits_4x4", "--epsilon", "2", "--num-steps", "3"]
    train += ["--seed", "0", "--quiet", "--budget", folder]
    first = [*train, "--out", str(tmp_path / "a"), "--resume", "auto"]
    assert main(first) == 0
    assert main(first) == 0  # Goes on, and reserves nothing.
    assert main([*train, "--out", str(tmp_path / "b")]) == 2
    assert not (tmp_path / "b").exists()
    assert "--budget must have room for dpzero" in capsys.readouterr().err
    # Another budget than that of the run.
    other, none = str(tmp_path / "other"), {"epsilon": 0, "delta": 0}
    assert main(["budget", other, *words[2:]]) == 0
    assert main([*first, "--budget", other]) == 2
    ids = [jaxdp.Budget(where).id for where in (folder, other)]
    error = capsys.readouterr().err
    assert all(each in error for each in ids)
    assert jaxdp.Budget(other).spent() == none
    # New noise is charged anew, in that budget.
    again = ["train", "--out", first[-3], "--resume", "--new-attempt", "--quiet"]
    assert main(again) == 2
    assert (
        f"the run was reserved, {ids[0]}, with --new-attempt" in capsys.readouterr().err
    )
    # A run that was begun without it has nothing reserved.
    alone = [*train[:-2], "--out", str(tmp_path / "c")]
    assert main(alone) == 0
    assert main([*alone, "--resume", "--budget", folder]) == 2
    assert "--budget must be left out with --resume" in capsys.readouterr().err
    assert main(["budget", folder, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (run,) = shown["reservations"]
    assert run["epsilon"] == shown["spent"]["epsilon"] <= 2
    assert shown["left"]["epsilon"] == pytest.approx(1, abs=1e-6)
    assert main(["budget", folder]) == 0
    assert "left epsilon" in capsys.readouterr().out
    assert main(["budget", str(tmp_path)]) == 2


def test_a_budget_of_divergences_takes_sampled_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More of them than epsilons add up to; what is shown names the order."""
    folder = str(tmp_path / "budget")
    words = ["budget", folder, "--epsilon", "3", "--delta", "1e-4"]
    assert main([*words, "--composition", "renyi", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    shared = jaxdp.Budget(folder)
    assert made["composition"] == "renyi"
    assert made["order"] == shared.header["order"] >= 2
    sampler = sampling.TruncatedPoisson(sampling_prob=0.1)
    plan = plans.DPZero(
        num_examples=1437,
        num_steps=30,
        sampling=sampler,
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
    ).with_noise(noise_multiplier=3.0, delta=1e-6)
    for _ in range(5):
        shared.reserve(plan)
    assert sum(each.epsilon for each in shared.reservations) > 3
    capsys.readouterr()
    assert main(["budget", folder]) == 0
    shown = capsys.readouterr().out
    assert "order" in shown and "left renyi_divergence" in shown
    train = ["train", "--dataset", "digits_4x4", "--epsilon", "2.9", "--num-steps", "3"]
    train += ["--batch-size", "200", "--budget", folder, "--out", str(tmp_path / "run")]
    assert main(train) == 2
    assert "of renyi_divergence it has" in capsys.readouterr().err


# --- recommend ---------------------------------------------------------------------


def test_recommend_prints_a_command_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--dataset", "wine", "--epsilon", 2, "--delta", 1e-3)
    few = ("--forward-only", "--num-passes", 80)
    assert run("recommend", *words, *few) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    said = last.removeprefix("jaxdp ").removesuffix(
        " and the options of data, model and budget."
    )
    assert said.startswith("train dpzero --num-steps 10 ")
    assert said.endswith(" --average 0.25 --relation replace_one")
    out = tmp_path / "run"
    assert run(*said.split(), *words, "--seed", 0, "--out", out, "--quiet") == 0
    assert reported(out)["epsilon"] <= 2
    assert run("recommend", *words, *few, "--num-public", 40, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["public"].startswith("With 40 public records")
    (found,) = answer["candidates"]
    assert (found["algorithm"], found["num_passes"]) == ("dpzero", 80)
    assert found["memory"] > 0 and "bench digits" in found["measured"]
    assert "from_theorem()" in found["proven"]
    assert run("recommend", *words, "--num-passes", 1) == 2
    assert "--num-passes must be at least 3" in capsys.readouterr().err


@pytest.mark.parametrize("group", [None, "class"])
def test_recommend_reads_held_out_records_alone(
    group: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def seen(value_fn: Any, params: Any, records: Any, **given: Any) -> Any:
        public = models.load("wine").test
        for part, other in zip(records, public, strict=False):
            np.testing.assert_array_equal(part, other)
        raise UsageError("held out")

    monkeypatch.setattr(planner, "recommend", seen)
    words = [] if group is None else ["--group", group]
    assert run("recommend", "--dataset", "wine", *words) == 2
    assert "held out" in capsys.readouterr().err


def test_recommend_of_a_table_is_what_synthesize_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bins = tmp_path / "bins.json"
    bins.write_text('{"a": {"edges": [0, 1, 2, 3]}, "b": {"values": ["x", "y"]}}')
    words = ("recommend", "--bins", bins, "--epsilon", 1)
    assert run(*words, "--num-examples", 5000) == 0
    said = capsys.readouterr().out
    assert "Recommendation: MWEM" in said
    assert "jaxdp synthesize --method marginals --degree 2" in said
    assert run(*words, "--num-examples", 5000, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    methods = [one["method"] for one in found["candidates"]]
    assert methods[0] == "marginals" and len(methods) == 3
    assert run(*words) == 2
    assert "--num-examples must be given with --bins" in capsys.readouterr().err
    assert run(*words, "--num-examples", 9, "--num-passes", 9) == 2
    assert "--num-passes is for a data set" in capsys.readouterr().err
    assert run("recommend", "--degree", 2) == 2
    assert "--degree is for --bins only" in capsys.readouterr().err


@pytest.mark.filterwarnings("always:epsilon=100 lets a release")
def test_recommend_warns_once_of_all_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bins.json").write_text('{"a": {"edges": [0, 1, 2]}}')
    words = ("--bins", tmp_path / "bins.json", "--num-examples", 50, "--degree", 1)
    for _ in range(2):  # Each command anew.
        assert run("recommend", *words, "--epsilon", 100) == 0
        assert capsys.readouterr().err.count("epsilon=100 lets a release raise") == 1


@pytest.mark.slow  # Some ten seconds: two programs, and many plans.
def test_recommend_of_groups_prints_a_command_that_trains(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one family alone: each has a program of its own."""
    few = {x: make for x, make in problems._GAMES.items() if "full" in x}
    monkeypatch.setattr(problems, "_GAMES", few)
    words = ("--dataset", "diabetes", "--group", "sex")
    assert run("recommend", *words, "--num-passes", 12) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("jaxdp train saddle --group sex ")
    assert "--method descent_ascent" in line and "--one-pass" not in line
    trained = line.removeprefix("jaxdp ").partition(" and the options")[0].split()
    more = ("--dataset", "diabetes", "--seed", 0, "--quiet", "--out", tmp_path / "run")
    assert run(*trained, *more) == 0
    assert run("recommend", *words, "--model", "mlp") == 2
    assert "--model must be linear with --group" in capsys.readouterr().err
