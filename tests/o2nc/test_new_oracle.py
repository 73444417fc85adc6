"""An oracle that the library does not have: three tables get a row, and all else works."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, auditing, plans, sampling
from jaxdp.cli import o2nc as recipes
from jaxdp.o2nc import oracle as oracles
from jaxdp.o2nc.theory import estimators
from tests.auditing.plans_of_faults import plan_named

NAME: Any = "half"
PROBLEM: dict[str, Any] = {
    "num_examples": 10**4,
    "dim": 10,
    "lipschitz": 1.0,
    "initial_gap": 1.0,
    "smoothing_radius": 1.0,
    "epsilon": 2.0,
    "delta": 1e-6,
    "relation": "zero_out",
}


def _halves(asked: oracles.Question) -> jax.Array:
    return oracles.ORACLES["scalar"].rows(asked) / 2


class HalfEstimator(estimators.SlopesEstimator):
    oracle = NAME

    @property
    def calls(self) -> tuple[float, float]:
        return 1.0, 1.0


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    row = oracles.Oracle(asks="halves", rows=_halves, shares=True, slopes=True)
    monkeypatch.setitem(oracles.ORACLES, NAME, row)
    monkeypatch.setitem(estimators.ESTIMATORS, NAME, HalfEstimator)
    for several in (False, True):
        same = recipes.CONVERSIONS["scalar", several]
        monkeypatch.setitem(recipes.CONVERSIONS, (NAME, several), same)


def test_it_is_designed_recommended_and_described() -> None:
    budget = {name: PROBLEM[name] for name in ("epsilon", "delta")}
    plan = plans.O2NC.certified(**PROBLEM, oracle=NAME)
    assert plan.oracle == NAME
    assert plan.share_directions
    assert plan.sampling.period == 1
    assert plan.theorem is not None
    read = plan.num_steps * plan.theorem.restart_batch_size
    assert plan.theorem.evaluations == read  # Of each record one.
    assert plan.epsilon() <= budget["epsilon"]
    assert plans.from_json(plan.to_json()) == plan
    assert plan.describe().slopes == plan.num_directions
    assert f"of {plan.num_directions} slopes each" in plan.describe().noise
    found = plans.O2NC.recommend(**PROBLEM)
    assert {x.oracle for x in found.candidates} == {"zeroth_order", "scalar", NAME}


def test_it_is_released() -> None:
    """Along as many orthonormal directions as parameters slopes are the gradient."""
    keys, params = Keys.insecure(3), jnp.ones(8)
    fields = recipes.find(2.0, NAME) | {"num_directions": 8}
    plan = recipes.make_plan(fields, 64)
    clips = dict.fromkeys(("restart_l2_clip_norm", "l2_clip_norm"), np.inf)
    plan = dataclasses.replace(plan, noise_multiplier=0.0, **clips)
    (phase,) = plan.phases
    row = jnp.arange(8.0)
    batch = sampling.batch(plan, keys, 0, jnp.tile(row, (64, 1)), phase=phase.name)
    given = {"value_fn": lambda w, z: z @ w, "batch": batch, "phase": phase.name}
    tx: Any = jaxdp.private_oracle(plan, keys)
    update, _ = tx.update(None, tx.init(params), params, **given)
    np.testing.assert_allclose(update, row / 2, atol=1e-4)


def test_it_is_audited() -> None:
    plan: Any = plan_named("slopes")
    found = auditing.audit(dataclasses.replace(plan, oracle=NAME), num_runs=2000)
    assert found.passed
    assert found.epsilon_lower > 0.2 * found.epsilon
