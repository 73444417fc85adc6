"""``jaxdp audit``: what it prints, and its exit codes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import jaxdp
from jaxdp import auditing, plans, sampling
from jaxdp.cli import main
from tests.auditing.plans_of_faults import plan_named

PLAN = plans.DPZero(
    num_examples=50,
    num_steps=3000,
    sampling=sampling.FullBatch(),
    relation="replace_one",
    l2_clip_norm=1.0,
    smoothing_radius=1e-3,
    noise="discrete",  # So that nothing is drawn on the host.
).calibrate(epsilon=2.0, delta=1e-5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json(), encoding="utf-8")
    return path


def run(*words: object) -> int:
    return main(["audit", *map(str, words)])


def test_a_long_plan_is_audited_shortened(path: Path, capsys: Any) -> None:
    assert run(path, "--num-runs", 10_000, "--json") == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert shown.err == ""
    assert answer["passed"] is True
    assert answer["epsilon"] == pytest.approx(2.0)
    assert 1.0 < answer["epsilon_lower"] < answer["epsilon"]
    assert answer["num_runs"] == 10_000
    assert answer["unit"] == answer["lattice"]["unit"] == "record"
    assert answer["plan"] == "DPZero, 3000 steps, replace_one"
    assert answer["audited_num_steps"] == 4
    assert answer["audited_noise_multiplier"] < answer["noise_multiplier"] / 20


def test_a_bound_above_the_accounted_epsilon_is_exit_code_1(
    path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def violated(plan: Any, **kwargs: Any) -> auditing.AuditResult:
        asked.update(kwargs, num_steps=plan.num_steps)
        return auditing.AuditResult(
            epsilon_lower=2.5,
            epsilon=2.0,
            delta=1e-6,
            failure_prob=1e-6,
            method="linear, Gaussian trade-off",
            canary="saturating user, first, against its negative",
            unit="user",
            num_runs=5000,
            num_tested=3000,
            num_steps=2,
            false_positive_rate=0.1,
            false_negative_rate=0.2,
        )

    monkeypatch.setattr(auditing, "audit", violated)
    options = ("--num-runs", 5000, "--num-steps", 2, "--delta", 1e-6, "--seed", 3)
    assert run(path, *options, "--lattice-runs", 0, "--unit", "user") == 1
    wanted = {"num_runs": 5000, "num_steps": 2, "delta": 1e-6, "seed": 3}
    assert asked == wanted | {"unit": "user"}
    shown = capsys.readouterr().out.split()
    assert {"2.5", "5000", "trade-off", "user", "False"} <= set(shown)


def test_a_plan_without_losses_has_no_users(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_named("saddle").to_json(), encoding="utf-8")
    assert run(path, "--unit", "user") == 2
    assert "jaxdp: --unit must be 'record' for Saddle" in capsys.readouterr().err


def test_a_weak_audit_says_so(
    path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = auditing.audit(auditing.shortened(PLAN, 2), num_runs=2000)
    weak = dataclasses.replace(honest, epsilon_lower=0.1)
    monkeypatch.setattr(auditing, "audit", lambda plan, **kwargs: weak)
    assert run(path, "--lattice-runs", 0) == 0
    assert "so low a bound shows little" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.json"], "PLAN must be a readable plan.json, got 'missing.json'"),
        (["{}"], "PLAN must"),
        (["PATH", "--num-runs", "10"], "--num-runs must be an integer >= 1000"),
        (["PATH", "--num-steps", "0"], "--num-steps must be an integer >= 1"),
        (["PATH", "--delta", "2"], "--delta must be a number in (0, 1)"),
        (["PATH", "--seed", "-1"], "--seed must be an integer >= 0"),
        (["PATH", "--seed", "x"], "--seed must be an integer, got 'x'"),
        (["PATH", "--unit", "group"], "--unit must be one of record, user"),
        (["PATH", "--runs", "5"], "unknown option --runs"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    words: list[str], said: str, path: Path, capsys: Any
) -> None:
    assert run(*(path if word == "PATH" else word for word in words)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"jaxdp: {said}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("text", ["{}", "no json"])
def test_a_file_that_is_no_plan_is_refused(text: str, path: Path, capsys: Any) -> None:
    path.write_text(text, encoding="utf-8")
    assert run(path) == 2
    assert "PLAN: text must be the JSON of a plan" in capsys.readouterr().err


def test_a_plan_without_noise_is_refused(path: Path, capsys: Any) -> None:
    path.write_text(PLAN.with_noise(noise_multiplier=0).to_json(), encoding="utf-8")
    assert run(path) == 2
    assert "PLAN must have noise to be audited" in capsys.readouterr().err


def test_auditing_is_public() -> None:
    assert jaxdp.auditing.audit is auditing.audit
