"""Audits of plans that draw vertices: sampled transcripts, and one draw enumerated."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from bench import _vertex_laws
from jaxdp import auditing, plans, sampling
from jaxdp.auditing import bounds, draws, vertices
from jaxdp.cli import main
from jaxdp.kernels import simplex
from jaxdp.saddle.theory import charges
from tests.auditing.mutations import plan_named

SADDLE = plan_named("saddle")
CONVEX = plans.ConvexSimplex(
    num_examples=12,
    num_steps=6,
    sampling=sampling.SinglePass(2),
    relation="zero_out",
    dim=5,
    linf_clip_norm=2.0,
    num_draws=3,
    refresh_every=2,
).calibrate(epsilon=6.0, delta=1e-5)
WOLFE, OF_ALL = plan_named("frank_wolfe"), plan_named("frank_wolfe of all")
SYNTHETIC = plans.SyntheticData(
    num_examples=20,
    num_steps=5,
    relation="replace_one",
    domain_size=8,
    num_queries=6,
).calibrate(epsilon=3.0, delta=1e-5)


# --- sampled transcripts ---------------------------------------------------------------


@pytest.mark.slow  # A study; the laws of its draws are below.
def test_a_record_of_saddle_is_told_and_no_more_than_accounted() -> None:
    """Below with probability 1 - 1e-6; zCDP of two coins has at most 0.9 of it."""
    found = auditing.audit(SADDLE, num_runs=20_000)
    assert found.passed
    assert found.epsilon == SADDLE.epsilon() == pytest.approx(9.01, abs=0.01)
    assert 0.62 * found.epsilon < found.epsilon_lower < found.epsilon
    assert found.canary == "saturating record in step 0, against its negative"
    assert found.method.endswith("zCDP")
    assert (found.num_tested, found.num_steps) == (16_000, 4)


@pytest.mark.parametrize(
    "plan",
    # tests/saddle has the draws of the last too.
    [
        SADDLE,
        WOLFE,
        OF_ALL,
        pytest.param(CONVEX, marks=pytest.mark.slow),
    ],
    ids=["Saddle", "FrankWolfe", "full batches", "ConvexSimplex"],
)
def test_vertices_are_drawn_from_the_laws_that_are_claimed(plan: Any) -> None:
    """Every count of every law, on every data set: each fails with 1e-6 in all."""
    pairs = vertices.canaries(plan)
    data = list(dict.fromkeys(d for c in pairs for d in (c.first, c.second)))
    made = vertices.transcripts(plan, data, 3000, seed=1)
    for one, transcripts in zip(data, made, strict=True):
        laws = vertices.laws(plan, one)
        counts = np.bincount(transcripts.reshape(-1), minlength=laws.size)
        counts = counts.reshape(laws.shape)
        number = counts.sum(axis=1, keepdims=True)
        possible = (laws < 0) & (number > 0)
        assert np.all(counts[~possible] == 0)
        p, n = np.exp(laws[possible]), np.broadcast_to(number, laws.shape)[possible]
        level = 1e-6 / (2 * laws.size * len(data))
        low = scipy.stats.binom.ppf(level, n, p)
        high = scipy.stats.binom.isf(level, n, p)
        assert np.all((low <= counts[possible]) & (counts[possible] <= high))
    # With the same keys, a record in a later batch changes nothing before.
    later = next(c for c in pairs if "among others" in c.name)
    one, other = (made[data.index(d)] for d in later[1:3])
    # Frank-Wolfe draws from a step's own batch; of full batches none comes before.
    before = vertices.num_laws(plan) // 2 + (plan is not WOLFE)
    so_far = one // vertices.width(plan) < (0 if plan is OF_ALL else before)
    assert np.array_equal(one[so_far], other[so_far])
    assert plan is CONVEX or not np.array_equal(one, other)


@pytest.mark.slow  # A study; draws.py enumerates what a run draws.
def test_claimed_likelihoods_of_queries_are_those_of_the_run() -> None:
    """Under either data set the other's likelihood ratio has the mean 1."""
    (canary,) = vertices.canaries(SYNTHETIC)
    made = vertices.transcripts(SYNTHETIC, canary[1:3], 5000, seed=2)
    learned = vertices.attacks(SYNTHETIC, canary, made[0, :10], made[1, :10])
    for sign, transcripts in zip((-1, 1), made, strict=True):
        ratio = np.exp(sign * learned["likelihood ratio"](transcripts))
        error = ratio.std() / np.sqrt(len(ratio))
        assert abs(ratio.mean() - 1) < 5 * error  # Of lognormals, that of 1e-6.
        assert ratio.std() > 0.3  # They do tell the data sets apart.


# --- what is refused, and made shorter -------------------------------------------------


def test_long_plans_are_shortened_at_the_same_epsilon() -> None:
    long = plans.Saddle(
        num_examples=5000,
        num_steps=1000,
        sampling=sampling.SinglePass(5),
        relation="zero_out",
        dim_x=600,
        dim_y=10,
        linf_clip_norm_x=1.0,
        linf_clip_norm_y=0.5,
        num_draws=40,
    ).calibrate(epsilon=3.0, delta=1e-5)
    short = auditing.shortened(long, 1)
    assert (short.num_steps, short.num_examples, short.num_draws) == (2, 10, 31)
    assert (short.dim_x, short.dim_y) == (16, 10)
    assert short.epsilon() == pytest.approx(3.0, rel=1e-3)
    ratio = long.step_size_x / long.step_size_y
    assert short.step_size_x / short.step_size_y == pytest.approx(ratio)
    assert auditing.shortened(SADDLE, 4) is SADDLE
    queries = plans.SyntheticData(
        num_examples=10_000,
        num_steps=300,
        relation="replace_one",
        domain_size=256,
        num_queries=896,
    ).calibrate(epsilon=1.0, delta=1e-6)
    short = auditing.shortened(queries, 4)
    assert (short.num_steps, short.num_examples, short.num_queries) == (4, 64, 16)
    assert short.epsilon() == pytest.approx(1.0, rel=1e-3)


BIAS_REDUCED = plans.SaddleBiasReduced(
    num_examples=200,
    relation="replace_one",
    dim_x=4,
    dim_y=4,
    linf_clip_norm_x=1.0,
    linf_clip_norm_y=1.0,
    vertex_budget=16,
    level_seed=0,
).calibrate(epsilon=3.0, delta=1e-5)
REFUSED = {
    "got SaddleBiasReduced, which releases those of its output": BIAS_REDUCED,
    'plan must have sampler="integer"': dataclasses.replace(SADDLE, sampler="float"),
    "the plan has no step_size_x yet": dataclasses.replace(
        SADDLE, step_size_x=None, step_size_y=None
    ),
    "plan must have steps that depend on data": SADDLE.with_step_size(0.0),
    "plan must have num_draws <= 31": dataclasses.replace(SADDLE, num_draws=32),
}


@pytest.mark.parametrize("said", REFUSED)
def test_plans_that_cannot_be_audited_are_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        auditing.audit(REFUSED[said])


@pytest.mark.slow  # test_command.py has the command, of another family.
def test_the_command_audits_plans_of_draws(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text(SYNTHETIC.to_json(), encoding="utf-8")
    assert main(["audit", str(path), "--num-runs", "10000", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"] == "SyntheticData, 5 steps, replace_one"
    assert answer["audited_num_steps"] == 4
    assert answer["audited_step_size_y"] > SYNTHETIC.step_size_y
    assert "noise_multiplier" not in answer
    assert 0.4 * 3 < answer["epsilon_lower"] < answer["epsilon"] <= 3


def test_the_command_refuses_a_bias_reduced_plan(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text(BIAS_REDUCED.to_json(), encoding="utf-8")
    assert main(["audit", str(path)]) == 2
    assert "every vertex that it draws" in capsys.readouterr().err


# --- one draw, enumerated --------------------------------------------------------------


@pytest.mark.parametrize("sensitivity", [3.5e-3, 0.05, 0.5])
def test_the_certified_sampler_keeps_what_a_draw_claims(sensitivity: float) -> None:
    """At d = 4096 and scores that are spread over 60 octaves; nothing is random here."""
    both = draws.neighbours(sensitivity)
    assert min(x.min() for x in both) < -50 * 2**simplex.BITS
    error = simplex.LOG_ERROR
    claimed = 2 * sensitivity + 2 * error
    found = _vertex_laws.compare(*map(draws.certified_law, both), claimed)
    assert 2 * sensitivity - 2 * error < found.bounded_range <= claimed
    assert found.delta == 0
    assert found.rho <= (sensitivity + error) ** 2 / 2
    # And no less than that is claimed: with no range for rounding, it would be too much.
    assert _vertex_laws.compare(*map(draws.certified_law, both), sensitivity).delta > 0
    assert found.rho > 0.9 * sensitivity**2 / 2


def test_a_float_sampler_does_not() -> None:
    both = draws.neighbours(3.5e-3)
    laws = [draws.float_law(x) for x in both]
    assert all(law.sum() == 1 for law in laws)
    assert min(np.sum(law == 0) for law in laws) > 1000
    found = _vertex_laws.compare(*laws, 7e-3 + 2 * simplex.LOG_ERROR)
    assert 1e-6 < found.delta < 1e-4
    assert found.bounded_range > 20
    # Where no score is small there is nothing to see.
    mild = [draws.float_law(x) for x in draws.neighbours(3.5e-3, dim=100, spread=0.5)]
    assert _vertex_laws.compare(*mild, 7e-3 + 1e-4).delta < 1e-7


def test_what_is_enumerated_is_what_is_drawn() -> None:
    assert draws.integers_only(SADDLE)
    assert not draws.integers_only(dataclasses.replace(SADDLE, sampler="float"))
    found, epsilon = draws.audited(SADDLE)
    assert found <= epsilon
    assert epsilon == pytest.approx(2 * SADDLE.sensitivity, rel=1e-5)


def test_a_float_sampler_in_certified_mode_is_the_result(monkeypatch: Any) -> None:
    monkeypatch.setattr(draws, "integers_only", lambda plan: False)
    found = auditing.audit(SADDLE, num_runs=1000)
    assert not found.passed
    assert found.delta == 0
    assert found.epsilon_lower > 20
    assert found.method.startswith("enumerated law")


# --- the rule --------------------------------------------------------------------------


def test_rho_is_bounded_by_what_two_coins_tell() -> None:
    """Of two Gaussians of rho-zCDP, exactly; of the worst bounded range, too."""
    rule = bounds.Rule(1e-5, 1e-6, zcdp=True)
    for rho in (0.05, 0.5, 3.0):
        mu = np.sqrt(2 * rho)
        at = np.linspace(-2, mu + 2, 41)
        errors = zip(
            scipy.stats.norm.sf(at), scipy.stats.norm.cdf(at - mu), strict=True
        )
        found = [bounds.epsilon_lower(a, b, rule)[0] for a, b in errors]
        true = charges.epsilon(rho, 1e-5)
        assert 0.85 * true < max(found) < true
    # A draw of range r is r^2/8-zCDP; a coin of odds e^(r/2) or e^(-r/2) attains nearly it.
    bias = 1 / (1 + np.exp(0.1))
    found, true = (
        bounds.epsilon_lower(bias, bias, rule)[0],
        charges.epsilon(0.2**2 / 8, 1e-5),
    )
    assert 0.99 * true < found < true
    # A pure claim is refuted where the rho that goes with it is, and not before.
    pure = bounds.Rule(0.0, 1e-6, zcdp=True, per_root_rho=0.2 / math.sqrt(0.2**2 / 8))
    assert 0.19 < bounds.epsilon_lower(bias, bias, pure)[0] < 0.2
    assert bounds.epsilon_lower(0.5, 0.5, rule)[0] == 0
    assert bounds.epsilon_lower(1.0, 1.0, rule)[0] == 0
