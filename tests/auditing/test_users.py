"""Audits whose data sets differ in a user: what one moves, and what is flagged."""

import dataclasses
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench._lattice_plans import LATTICE_PLANS
from jaxdp import Keys, auditing, plans, sampling
from jaxdp.auditing import cases, grid_releases, units
from jaxdp.data import users as users_lib
from jaxdp.dpzero import oracle
from tests.auditing.mutations import MUTATIONS, NUM_RUNS, Mutation, faulty, plan_named
from tests.auditing.test_audit import POISSON, make

PLAN = make()


def test_a_user_is_audited_as_a_record_is() -> None:
    """A user moves a sum by one clip, so that every number is that of a record's audit."""
    of_records, of_users = (
        auditing.audit(PLAN, num_runs=10_000, unit=unit) for unit in units.UNITS
    )
    assert 0.5 * of_users.epsilon < of_users.epsilon_lower < of_users.epsilon
    assert of_users.passed
    assert of_users.canary == of_records.canary.replace("record", "user")
    assert of_users.canary != of_records.canary
    same = {"canary": of_records.canary, "unit": "record"}
    assert dataclasses.replace(of_users, **same) == of_records


def transcripts(plan: Any, unit: units.Unit) -> np.ndarray:
    case = cases.case_of(plan)
    plan = case.prepared(plan)
    found = [canary.of(unit) for canary in case.canaries(plan)]
    data = [x for canary in found for x in (canary.first, canary.second)]
    return case.transcripts(plan, data, 4, 0)


OTHERS = {
    "gradients": make(plans.DPGD, relation="add_or_remove"),
    "sampled": make(plans.DPGD, sampling=POISSON),
    "external": make(plans.DPGD, sampling=sampling.External(4)),
    "slopes": plan_named("slopes"),
    "sosp": plan_named("sosp"),
}


@pytest.mark.parametrize(
    "name",
    # An oracle bounds rows by the same code, whatever a row is.
    [
        n if n == "gradients" else pytest.param(n, marks=pytest.mark.slow)
        for n in OTHERS
    ],
)
def test_a_user_moves_all_releases_as_a_record_does(name: str) -> None:
    made = [transcripts(OTHERS[name], unit) for unit in units.UNITS.values()]
    # In deviations of the noise: a clip more would be a large part of one.
    np.testing.assert_allclose(*made, atol=1e-3)


@pytest.mark.parametrize("name", ["DPGD", pytest.param("SOSP", marks=pytest.mark.slow)])
def test_a_user_moves_low_digits_as_a_record_does(name: str) -> None:
    plan = LATTICE_PLANS[name]
    mechanism = cases.case_of(plan).mechanism
    assert mechanism is not None
    of_records, of_users = (
        grid_releases.releases(mechanism(plan, Keys.insecure(0), unit), 3, 0)
        for unit in units.UNITS.values()
    )
    for one, other in zip(of_records, of_users, strict=True):
        assert np.any(one.units[0] != one.units[1])
        np.testing.assert_array_equal(one.units, other.units)


def test_the_one_user_has_more_records_than_are_kept_or_fewer() -> None:
    rows = jnp.arange(3.0)
    for kind, kept in (("plus", units.RECORDS_PER_USER), ("minus", 1), ("absent", 0)):
        grouped = units.USER.data(rows, 1, kind)
        # The others have one too many, and two.
        most = units.RECORDS_PER_USER
        assert grouped.mask.sum(axis=1).tolist() == [most, kept, 2]
        held = np.asarray(grouped.records)[grouped.mask]
        assert held.tolist() == [*[0.0] * most, *[1.0] * kept, *[2.0] * 2]


#: Of users, in the plan "full"; test_mutations.py runs all in processes of their own.
FAULTS = [m for m in MUTATIONS if m.unit == "user" and m.plan == "full"]


@pytest.mark.parametrize("mutation", [None, *FAULTS], ids=str)
def test_faults_of_users_are_flagged(
    mutation: Mutation | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is above the accounted epsilon with the fault, and below it without."""
    modules = {"users.py": users_lib, "oracle.py": oracle}
    for path, text in faulty(mutation).items() if mutation else ():
        module = modules[Path(path).name] = types.ModuleType(path)
        exec(compile(text, path, "exec"), module.__dict__)
    users, slopes = modules["users.py"], modules["oracle.py"].release_slopes
    monkeypatch.setattr(oracle, "release_slopes", slopes)
    monkeypatch.setattr(units, "users", users)
    user = units.USER._replace(loss=users.per_user)
    monkeypatch.setitem(units.UNITS, "user", user)
    found = auditing.audit(plan_named("full"), num_runs=NUM_RUNS, unit="user")
    assert found.passed == (mutation is None)
    assert found.epsilon_lower > 0


def test_a_plan_that_reads_no_loss_is_refused() -> None:
    other = LATTICE_PLANS["PrefixSum, tree"], plan_named("saddle")
    for plan in other:
        with pytest.raises(ValueError, match=f"'record' for {type(plan).__name__}, "):
            cases.unit_named(plan, "user")
        assert cases.unit_named(plan, "record") is units.RECORD
    with pytest.raises(ValueError, match="unit must be 'record' for Saddle"):
        auditing.audit(other[1], unit="user")
    for call in (auditing.audit, auditing.lattice):
        with pytest.raises(ValueError, match="unit must be one of 'record', 'user'"):
            call(PLAN, unit="group")
