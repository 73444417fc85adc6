"""Audits of second-order plans: records of each role move short runs as claimed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdp import auditing, plans, sampling
from jaxdp.auditing import second_order, short_run
from jaxdp.cli import main
from tests.auditing.mutations import plan_named


def make(**changes: Any) -> plans.SOSP:
    plan = plan_named("sosp")
    assert isinstance(plan, plans.SOSP)
    return dataclasses.replace(plan, **changes)


RUNS = {
    "products": make(),
    "running Hessian": make(
        hessian="tracked",
        hessian_lipschitz=1.0,
        dim=2,
        prefix_noise="blt_3",
        relation="zero_out",
        escapes_per_refresh=2,
    ),
    "released Hessian": make(
        hessian="released",
        hessian_lipschitz=1.0,
        hessian_batch_size=60,
        num_examples=150,
        curvature_threshold=0.1,
        escape_steps=1,
        dim=5,
    ),
    "two passes, filter": make(
        sampling=sampling.AdaptiveCursor(num_passes=2),
        num_examples=12,
        hessian_filter=True,
        escape_noise_std=0.1,
    ),
}


@pytest.mark.parametrize(
    "name",
    # Of other Hessians; what a record moves of them is in tests/sosp too.
    [n if n == "products" else pytest.param(n, marks=pytest.mark.slow) for n in RUNS],
)
def test_a_canary_moves_its_roles_by_what_is_claimed(name: str) -> None:
    """The same noise on both data sets, so that the difference is the record's alone."""
    plan = short_run.shortened(RUNS[name], 4)
    pairs = second_order.canaries(plan)
    data = list(dict.fromkeys(d for c in pairs for d in (c.first, c.second)))
    made = second_order.transcripts(plan, data, 5, seed=0)
    clips = {"plus": 1, "minus": -1, "nan": 0, "absent": 0}
    roles = set()
    for canary in pairs:
        one, other = (made[data.index(d)] for d in (canary.first, canary.second))
        apart = clips[canary.first.record] - clips[canary.second.record]
        want = np.broadcast_to(apart * canary.moves, one.shape)
        # A product is read from a point that it moves little; an eigenvalue is not linear.
        rough = 0.05 if plan.hessian == "released" else 5e-3
        np.testing.assert_allclose(one - other, want, atol=rough)
        role = canary.name.split(", ")[1]
        if role not in roles and plan.num_passes == 1:
            # The first canary of each role is worth what the plan is charged for.
            charged = (2 if plan.relation == "replace_one" else 1) ** 2
            spent = charged * np.sum(canary.moves * canary.weights)
            assert spent == pytest.approx(1 / 2.0**2, rel=0.01)
        roles.add(role)
    assert roles == {"refresh", "difference", "Hessian"}
    assert np.all(made[..., -1] == 0)  # No run goes another way than the dry run.


@pytest.mark.slow  # A study; what a record moves is above, to the digit.
def test_a_record_is_told_and_no_more_than_accounted() -> None:
    """Below with probability 1 - 1e-6, from 40000 runs."""
    plan = make()
    found = auditing.audit(plan, num_runs=40_000)
    assert found.epsilon == plan.epsilon() == pytest.approx(1.99, abs=0.01)
    assert 0.7 * found.epsilon < found.epsilon_lower < found.epsilon
    assert found.method.endswith("Gaussian trade-off")


@pytest.mark.parametrize("name", RUNS)
def test_a_short_run_is_short_and_has_the_same_epsilon(name: str) -> None:
    plan = dataclasses.replace(RUNS[name], num_steps=10_000)
    short = auditing.shortened(plan, 3)
    assert isinstance(short, plans.SOSP)
    # Less is charged for the sampler of fewer draws.
    assert plan.epsilon() * (1 - 1e-5) < short.epsilon() <= plan.epsilon()
    assert short.noise_multiplier == plan.noise_multiplier
    assert short.max_differences == 3
    assert short.num_steps < 30
    assert short.num_examples <= plan.num_examples
    assert short_run.shortened(short, 3) == short
    # One that was asked for is not made shorter (or longer) when it is audited.
    for num_steps in (3, 12):
        chosen = short_run.shortened(RUNS[name], num_steps)
        assert short_run.prepared(chosen) == chosen
    assert short_run.prepared(RUNS[name]) == short_run.shortened(RUNS[name])


@pytest.mark.slow  # test_command.py has the command, of another family.
def test_the_command_audits_a_plan(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text(make(escape_steps=None).to_json(), encoding="utf-8")
    words = ["audit", str(path), "--num-runs", "10000", "--num-steps", "2", "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"] is True
    assert answer["plan"] == "SOSP, 40 steps, replace_one"
    assert answer["audited_max_differences"] == 2
    assert answer["noise_multiplier"] == answer["audited_noise_multiplier"] == 2.0
    assert 0.8 < answer["epsilon_lower"] < answer["epsilon"]


def test_a_plan_without_noise_is_refused() -> None:
    plan = make(noise_multiplier=None)
    for call in (auditing.audit, lambda p: auditing.shortened(p, 4)):
        with pytest.raises(ValueError, match="plan must have noise to be audited"):
            call(plan)
