"""Stored plans: read as they were written, with the same digest, event and epsilon."""

import json
import pickle
import re
from typing import Any

import numpy as np
import pytest

from jaxdp import accounting, plans
from jaxdp.accounting import lattice, renyi
from jaxdp.mechanism import plan as plan_lib
from tests import golden

STORED: dict[str, dict[str, Any]] = json.loads(golden.FILE.read_text())
#: Of closed forms, and of PLD, whose convolutions round by version and by processor.
EXACT, ROUNDED = 1e-12, 1e-8
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")


def test_every_kind_of_plan_is_stored() -> None:
    kinds = {json.loads(known["plan"])["plan"] for known in STORED.values()}
    assert kinds == set(plan_lib._PLANS)
    assert len(STORED) >= 40


@pytest.mark.parametrize("name", STORED)
def test_a_stored_plan_means_what_it_did(name: str) -> None:
    """Floats of the event to 1e-12: another machine's libraries may round others."""
    known = STORED[name]
    plan = plans.from_json(known["plan"])
    assert plan.to_json() == known["plan"]
    found = golden.described(plan)
    assert (found["digest"], found["relation"]) == (known["digest"], known["relation"])
    rounded = plan.epsilon(delta=plan.delta or 1e-5).accountant == "PLD"
    within = ROUNDED if rounded else EXACT
    assert found["epsilon"] == pytest.approx(known["epsilon"], rel=within)
    assert _NUMBER.sub("#", found["event"]) == _NUMBER.sub("#", known["event"])
    numbers = (map(float, _NUMBER.findall(x["event"])) for x in (found, known))
    assert list(numbers.__next__()) == pytest.approx(
        list(numbers.__next__()), rel=1e-12
    )


@pytest.mark.parametrize("name", STORED)
def test_every_plan_has_a_renyi_divergence(name: str) -> None:
    """At no order it implies less than the plan's epsilon, and about that at the best."""
    plan = plans.from_json(STORED[name]["plan"])
    event, relation = lattice.ideal(plan.event), plan.event_relation
    delta = plan.delta or 1e-5
    epsilon = accounting.epsilon(event, relation, delta)
    orders = (2, 3, 4, 6, 9, 14, 20, 30, 45, 70, 120, 250)
    implied = [
        renyi.implied(renyi.divergence(event, relation, order), delta, order)
        for order in orders
    ]
    # Where RDP accounts it, it has orders between, and pure sums besides.
    slack = 1e-9 if epsilon.accountant in ("PLD", "Gaussian closed form") else 0.1
    assert (1 - slack) * epsilon <= min(implied)
    assert min(implied) < 1.5 * epsilon or epsilon > 30


@pytest.mark.parametrize("name", STORED)
def test_a_plan_file_has_its_format(name: str) -> None:
    """It is read with the number and without, and is in no digest."""
    known = STORED[name]
    plan = plans.from_json(known["plan"])
    text = plan.file_text()
    assert json.loads(text) == {"format": 1, **json.loads(known["plan"])}
    assert plans.from_json(text) == plan
    assert plans.from_json(text).digest == known["digest"]


@pytest.mark.parametrize("name", STORED)
def test_a_plan_describes_itself(name: str) -> None:
    plan = plans.from_json(STORED[name]["plan"])
    described = plan.describe()
    assert described.noise
    assert described.released
    stds = np.asarray(described.stds, float)
    assert stds.shape in {(), (plan.num_steps,)}
    assert np.isfinite(stds).all()
    draws = described.released == "vertices"
    assert ((stds == 0) if draws else (stds > 0)).all()


@pytest.mark.parametrize("name", STORED)
def test_a_plan_that_was_used_can_be_pickled(name: str) -> None:
    plan = plans.from_json(STORED[name]["plan"])
    assert plan.describe() is not None
    assert plan.numbers is not None
    again = pickle.loads(pickle.dumps(plan))
    assert (again, again.digest) == (plan, plan.digest)


@pytest.mark.parametrize("name", STORED)
def test_a_number_too_large_for_a_float_is_refused(name: str) -> None:
    fields = json.loads(STORED[name]["plan"])
    for field, value in fields.items():
        if type(value) is float:
            text = json.dumps(fields | {field: 10**400})
            with pytest.raises(ValueError):
                plans.from_json(text)


@pytest.mark.parametrize("version", [2, 0, "1", 1.0, True, None])
def test_another_format_is_refused(version: Any) -> None:
    fields = json.loads(next(iter(STORED.values()))["plan"])
    with pytest.raises(ValueError, match=f"format must be .*, got {version!r}"):
        plans.from_json(json.dumps({"format": version, **fields}))


@pytest.mark.slow  # Seventeen searches, 20 s.
def test_a_design_chooses_what_it_did() -> None:
    """Floats to 1e-9, for searches end at tolerances.

    Of stored searches for second-order points, alpha does not include rounding: less than
    a hundredth.
    """
    for name, plan in golden.made():
        if "certified" not in name and "theorem" not in name:
            continue
        found, known = plan.to_json(), STORED[name]["plan"]
        if name.startswith("SOSP, certified"):
            alphas = [
                json.loads(x)["theorem"]["promise"]["alpha"] for x in (found, known)
            ]
            assert alphas[1] < alphas[0] < 1.01 * alphas[1], name
            found = found.replace(repr(alphas[0]), repr(alphas[1]))
        assert _NUMBER.sub("#", found) == _NUMBER.sub("#", known), name
        numbers = [list(map(float, _NUMBER.findall(text))) for text in (found, known)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-9), name
