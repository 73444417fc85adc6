"""Which oracle is recommended, and why."""

import dataclasses
from typing import Any

import pytest

from jaxdp.o2nc.oracle import ORACLES
from jaxdp.o2nc.theory import design, recommend

COMMON: dict[str, Any] = {
    "num_examples": 10**5,
    "dim": 10,
    "lipschitz": 1.0,
    "initial_gap": 1.0,
    "smoothing_radius": 1.0,
    "epsilon": 2.0,
    "delta": 1e-6,
    "relation": "zero_out",
}


def make(**changes: Any) -> recommend.Recommendation:
    return recommend.recommend(**(COMMON | changes))


def kind(found: recommend.Recommendation) -> tuple[str, bool]:
    return found.design.oracle, found.design.multi_pass


def check(found: recommend.Recommendation, most: float = float("inf")) -> None:
    """The rule: of those within the limit, the cheapest near the least bound."""
    within = [i for i, cost in enumerate(found.costs) if cost <= most]
    least = min(found.candidates[i].promise.bound for i in within)
    near = [i for i in within if found.candidates[i].promise.bound <= 1.05 * least]
    assert found.chosen == min(near, key=lambda i: found.costs[i])
    assert found.plan is None
    lines = str(found).splitlines()
    assert lines[-1] == found.reason
    assert len(lines) == len(found.candidates) + 2
    table = lines[:-1]
    assert len({line.index("bound") for line in table[:1]}) == 1
    starred = [i for i, line in enumerate(table[1:]) if line.startswith("*")]
    assert starred == [found.chosen]
    for line, c in zip(table[1:], found.candidates, strict=True):
        assert (
            c.oracle in line
            and f"{c.promise.bound:.3g}" in line
            and f"{c.period}" in line
        )
        assert f"{c.num_steps}" in line
        assert f"{c.restart_batch_size}" in line


def test_candidates_are_the_certified_designs() -> None:
    found = make(gradient_cost=3.0)
    kinds = [(c.oracle, c.multi_pass) for c in found.candidates]
    assert kinds == [(x, y) for x in ORACLES for y in (False, True)]
    for c, cost in zip(found.candidates, found.costs, strict=True):
        again = design.certified(**COMMON, oracle=c.oracle, multi_pass=c.multi_pass)
        assert c == again and cost == c.evaluations + 3 * c.gradients
    # Where there are no gradients, nothing that takes them.
    values = make()
    assert [c for c in found.candidates if c.oracle != "first_order"] == list(
        values.candidates
    )
    check(found)
    check(values)
    assert dataclasses.replace(values, plan=1).plan == 1


# --- regimes -------------------------------------------------------------------------


def test_many_records_of_low_dimension() -> None:
    """A single pass, whose differences and correlated noise need no second look."""
    found = make(num_examples=10**8)
    assert kind(found) == ("zeroth_order", False) and found.design.period > 100
    assert "Take the zeroth_order oracle in a single pass: its proven" in found.reason
    assert f"{found.design.promise.bound:.3g}, is the least." in found.reason
    check(found)


def test_few_records_are_read_often() -> None:
    found = make(num_examples=10**4)
    assert kind(found) == ("zeroth_order", True)
    check(found)
    # Unless that may not cost so much.
    most = 1e6
    cheap = make(num_examples=10**4, max_evaluations=most)
    assert kind(cheap) == ("zeroth_order", False)
    assert cheap.costs[cheap.chosen] <= most and cheap.design.promise.bound > 1.2 * (
        found.design.promise.bound
    )
    check(cheap, most)


def test_cheap_gradients_are_taken_and_dear_ones_are_not() -> None:
    changes: dict[str, Any] = {"num_examples": 10**6, "dim": 100}
    found = make(**changes, gradient_cost=3.0)
    assert kind(found) == ("first_order", False)
    check(found)
    # Bounds a few percent apart: the cost decides.
    cheap, dear = (make(num_examples=10**4, gradient_cost=x) for x in (3.0, 100.0))
    assert kind(cheap) == ("first_order", True)
    assert kind(dear) == ("zeroth_order", True)
    assert "is within 5% of the least, " in dear.reason
    assert "of the first_order oracle in several passes, and it costs 0." in dear.reason
    check(dear)


def test_what_is_too_dear_is_listed_and_not_taken() -> None:
    changes: dict[str, Any] = {"num_examples": 10**4, "gradient_cost": 1000.0}
    most = 5e6
    found = make(**changes, max_evaluations=most)
    over = [i for i, cost in enumerate(found.costs) if cost > most]
    assert over and found.chosen not in over and len(found.candidates) == 6
    words = found.reason.split("Above max_evaluations = 5e+06: ")[1]
    assert words.count("the first_order oracle in several passes") == 1
    check(found, most)
    with pytest.raises(ValueError, match=r"max_evaluations must be at least .* got 3"):
        make(**changes, max_evaluations=3)


def test_bounds_that_say_nothing() -> None:
    found = make(num_examples=10**3, dim=1000)
    assert found.design.promise.bound > 1
    assert "But no norm is above L = 1: the bound says nothing" in found.reason
    check(found)
    assert "says nothing" not in make().reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_cost": 0.0}, "gradient_cost must be a number > 0"),
        ({"max_evaluations": -1}, "max_evaluations must be a number > 0"),
        ({"smoothing_radius": 0.0}, "radius must be a number > 0"),
        ({"num_examples": 3}, "num_examples must be an integer >= 4"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)
