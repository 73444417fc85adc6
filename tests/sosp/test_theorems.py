"""Theorem 3.17, printed and corrected; the formulas of escapes; what noise is private."""

import dataclasses
import json
import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from jaxdp import accounting
from jaxdp.mechanism.design import Design
from jaxdp.sosp.theory import bounds, theorems
from tests.sosp.cases import escape_deviation, escape_failure

COMMON: dict[str, Any] = {
    "num_examples": 10**4,
    "dim": 10,
    "epsilon": 1.0,
    "delta": 1e-6,
    "relation": "replace_one",
    "lipschitz": 1.0,
    "smoothness": 1.0,
    "hessian_lipschitz": 1.0,
    "initial_gap": 1.0,
}
PRINTED = "3.17 as printed"


def make(name: str, **changes: Any) -> Design:
    return theorems.prescribed(name, **(COMMON | changes))


# --- Theorem 3.17 --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "n", "alpha", "batch", "kappa", "tau", "corrected", "corrected_tau"),
    [
        (10, 10**4, 0.0639, 313, 1, 0.016, 0.0958, 4),
        (10, 10**6, 0.0128, 6386, 1, 0.0015, 0.0186, 8),
        (100, 10**5, 0.0300, 1488, 1, 0.0052, 0.0463, 5),
        (1000, 10**4, 0.0912, 509, 2.885, 0.028, 0.1907, 3),
        (1000, 10**6, 0.0144, 7158, 1, 0.0017, 0.0228, 7),
    ],
)
def test_tables_of_the_digest(
    dim: int,
    n: int,
    alpha: float,
    batch: int,
    kappa: float,
    tau: float,
    corrected: float,
    corrected_tau: int,
) -> None:
    """Digest 3.3, whose batches are rounded to the nearest."""
    found = make(PRINTED, dim=dim, num_examples=n)
    assert found.promise.alpha == pytest.approx(alpha, abs=6e-5)
    assert 0 <= found.refresh_batch_size - batch <= 1
    assert found.drift_limit == pytest.approx(kappa, abs=6e-4)
    printed = found.promise.printed
    assert printed is not None and found.escapes_per_refresh == 1
    assert printed.escapes_per_refresh == pytest.approx(tau, rel=0.05)
    better = make("3.17", dim=dim, num_examples=n)
    assert better.promise.alpha == pytest.approx(corrected, abs=6e-5)
    assert better.escapes_per_refresh == corrected_tau


def test_the_rest_is_the_digests_formula() -> None:
    found = make(PRINTED, failure_probability=0.05)
    a, log = found.promise.alpha, math.log(1e6)
    assert found.num_steps == math.ceil(1 / a**2) == 245
    assert found.trigger_norm == pytest.approx(a * math.log(10 / 0.05) ** 3)
    assert found.escape_steps == math.ceil(1 / math.sqrt(a))
    assert found.escape_radius == pytest.approx(math.sqrt(a))
    assert found.difference_batch_rate == pytest.approx(1 / a**2)
    # A tracked Hessian's change moves no further than its first batch.
    assert found.hessian_difference_rate == found.hessian_batch_size == 314
    assert (found.hessian, found.prefix_noise) == ("tracked", "tree")
    assert found.query_in_escape and not found.stop_at_certificate
    assert found.max_differences == 245
    printed = found.promise.printed
    assert printed is not None
    assert printed.noise_std == pytest.approx(a / math.sqrt(10))
    node = (1 / 314 + a**2) * log
    assert printed.node_noise_std == pytest.approx(node)
    reach = 2 * math.sqrt(a) * math.sqrt(a**-0.5 * a**1.5 * log)
    assert printed.escape_noise_std == pytest.approx((1 / 314 + a**2) * reach)
    assert found.promise.basis == "rate"
    better = make("3.17", failure_probability=0.05)
    log_steps = math.log(10 * better.num_steps / 0.05)
    assert better.trigger_norm == pytest.approx(better.promise.alpha * log_steps**3)
    radius = bounds.noise_radius(10, 0.05 / (4 * better.num_steps))
    assert better.escape_noise_std == pytest.approx(better.promise.alpha / radius)


INTEGERS = (
    "num_steps",
    "refresh_batch_size",
    "max_differences",
    "escape_steps",
    "hessian_batch_size",
    "escapes_per_refresh",
)
#: What is not of the unit of a length to the 0: the power that it scales with.
POWERS = {"trigger_norm": 1, "drift_limit": 1, "escape_radius": -1}


def rescaled(problem: dict[str, Any], unit: float) -> dict[str, Any]:
    """The same problem in x / unit."""
    return problem | {
        "lipschitz": unit * problem["lipschitz"],
        "smoothness": unit**2 * problem["smoothness"],
        "hessian_lipschitz": unit**3 * problem["hessian_lipschitz"],
    }


def test_units_of_length_change_no_integer() -> None:
    """Digest test 13: of the corrected theorem."""
    problem = COMMON | {"lipschitz": 2.0, "hessian_lipschitz": 0.7, "dim": 30}
    one = theorems.prescribed("3.17", **problem)
    for unit in (3.0, 1 / 7):
        other = theorems.prescribed("3.17", **rescaled(problem, unit))
        for name in INTEGERS:
            assert getattr(other, name) == getattr(one, name), name
        for name, power in POWERS.items():
            want = getattr(one, name) * unit**power
            assert getattr(other, name) == pytest.approx(want, rel=1e-8)
        # The batch of one and the same step.
        step = 0.1 / unit * other.smoothness * other.difference_batch_rate
        assert step == pytest.approx(0.1 * one.smoothness * one.difference_batch_rate)


def test_units_of_length_change_the_printed_integers() -> None:
    """Its tau by 1/9, its batch's third term by 1/3, at the same point."""
    problem = theorems.TheoremConstants(**COMMON)
    other = dataclasses.replace(
        problem, lipschitz=3.0, smoothness=9.0, hessian_lipschitz=27.0
    )
    one, two = theorems.printed(problem, 0.1), theorems.printed(other, 0.3)
    assert two.escapes_per_refresh == pytest.approx(one.escapes_per_refresh / 9)
    third = math.sqrt(10)
    assert one.batch - two.batch == pytest.approx(third * (1 - 1 / 3))
    assert two.rate / one.rate == pytest.approx(1 / 3)  # 1 / c has a gradient's unit.
    whole = theorems.corrected(problem, 0.1), theorems.corrected(other, 0.3)
    assert whole[0].batch == pytest.approx(whole[1].batch)
    assert whole[0].escapes_per_refresh == whole[1].escapes_per_refresh


def test_rates() -> None:
    """Slopes of alpha: -1/3 by sampling, -1/2 by privacy; not with the printed tau."""

    def slope(low: int, high: int, **changes: Any) -> float:
        ends = [
            make("3.17", num_examples=n, **changes).promise.alpha for n in (low, high)
        ]
        return math.log(ends[1] / ends[0]) / math.log(high / low)

    assert slope(10**15, 10**18, epsilon=1e4) == pytest.approx(-1 / 3, abs=5e-3)
    assert slope(10**15, 10**18, epsilon=1e-9) == pytest.approx(-1 / 2, abs=5e-3)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="theorem must be one of"):
        make("3.4")
    with pytest.raises(ValueError, match="num_examples must be such that a refresh"):
        make(PRINTED, initial_gap=1e-12)
    for name in ("lipschitz", "smoothness", "hessian_lipschitz", "initial_gap"):
        with pytest.raises(ValueError, match=f"^{name} must be a number > 0"):
            make("3.17", **{name: 0.0})
    with pytest.raises(ValueError, match="failure_probability"):
        make("3.17", failure_probability=1.0)


@pytest.mark.parametrize("name", [str(t) for t in theorems.Theorem])
def test_json(name: str) -> None:
    found = make(name)
    fields = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert Design.read({"promise": bounds.CertifiedPoint}, **fields) == found
    line = str(found)
    assert line.startswith(f"{name}: alpha = ") and "\n" not in line


# --- escapes -------------------------------------------------------------------------


def test_deviation_of_a_free_escape() -> None:
    """Digest test 7."""
    found = escape_deviation(30, curvature=0.2, smoothness=1, noise_std=0.003)
    assert found == pytest.approx(1.07357, abs=1e-5)


@pytest.mark.parametrize(
    ("dim", "alpha", "gamma", "failure", "want", "bound"),
    [
        (10, 0.1, 0.02, 0.1, 38, 0.0946),
        (10, 0.2, 0.02, 0.05, 32, 0.0484),
        (100, 0.1, 0.01, 0.1, 45, 0.0909),
        (100, 0.05, 0.005, 0.1, 63, 0.0995),
    ],
)
def test_escape_steps(
    dim: int, alpha: float, gamma: float, failure: float, want: int, bound: float
) -> None:
    """Digest test 7: numbers, and a simulation in all dimensions."""
    numbers: dict[str, float] = {
        "curvature": math.sqrt(alpha) / 2,
        "smoothness": 1.0,
        "noise_std": gamma / bounds.noise_radius(dim, failure / 2000),
        "radius": bounds.escape_radius(gamma, 1.0),
    }
    steps = bounds.escape_steps(**numbers, failure=failure)
    assert steps == want
    found = escape_failure(steps, **numbers)
    assert found == pytest.approx(bound, abs=6e-4) and found <= failure
    assert escape_failure(want - 1, **numbers) > failure * 0.99
    # One eigenvalue -curvature, none else: 0 the others, where noise only adds up.
    rng = np.random.default_rng(dim)
    runs = 4000
    growth = np.zeros(dim)
    growth[0] = numbers["curvature"]
    v, inside = np.zeros((runs, dim)), np.ones(runs, bool)
    for _ in range(steps):
        noise = numbers["noise_std"] * rng.standard_normal((runs, dim))
        v += v * growth - noise
        inside &= np.linalg.norm(v, axis=1) < numbers["radius"]
    # A normal's tail beyond 4.9 standard errors is 5e-7.
    spread = math.sqrt(found * (1 - found) / runs)
    assert found * 0.5 < inside.mean() <= found + 4.9 * spread


def test_escape_steps_where_rounding_holds_it_back() -> None:
    """Pulled back by up to so many stds in each step but the first, it leaves later.

    Both shares are more than 30 standard errors from what they are compared with.
    """
    numbers = {"curvature": 0.3, "smoothness": 1.0, "noise_std": 1.0, "radius": 3.0}
    failure, pull = 0.05, 0.3

    def stays(steps: int | None) -> float:
        assert steps is not None
        rng = np.random.default_rng(0)
        v, inside = np.zeros(50_000), np.ones(50_000, bool)
        for step in range(steps):
            v = 1.3 * v
            v -= np.clip(v, -pull, pull) if step else 0
            v += rng.standard_normal(v.size)
            inside &= abs(v) < numbers["radius"]
        return float(inside.mean())

    few = bounds.escape_steps(**numbers, failure=failure)
    assert stays(few) > 2 * failure
    assert few == bounds.escape_steps(**numbers, failure=failure, rounding=1e-6)
    more = bounds.escape_steps(**numbers, failure=failure, rounding=pull)
    assert stays(more) < failure
    # That it stays by the law without it, and what it is pulled.
    assert more is not None
    left = escape_failure(more, **numbers)
    assert bounds.shifted(left, pull * math.sqrt(more - 1)) <= failure
    assert bounds.shifted(failure, 0.0) == pytest.approx(failure)
    # Without an end: it grows by a third a step, and noise is held.
    assert bounds.escape_steps(**numbers, failure=failure, rounding=1.0) is None


def test_noise_radius_holds_in_few_dimensions() -> None:
    """Digest E19: sqrt(d log) does not. Exact tails of the chi law, for d = 1."""
    failure = 0.01 / 4000
    radius = bounds.noise_radius(1, failure)
    assert math.erfc(radius / math.sqrt(2)) <= failure
    printed = math.sqrt(math.log(1000 / 0.01))
    assert math.erfc(printed / math.sqrt(2)) == pytest.approx(6.9e-4, rel=0.01)


# --- privacy -------------------------------------------------------------------------


def test_budgets() -> None:
    """Digest 4: mu, and the multiplier of test 11."""
    table = {0.5: 0.12411, 1: 0.23670, 2: 0.44833, 4: 0.83786, 8: 1.53155}
    for epsilon, mu in table.items():
        assert accounting.gaussian_mu(epsilon, 1e-6) == pytest.approx(mu, abs=6e-6)
    # The digest has it from a PLD, which is rounded up: exact it is 4.224679.
    assert 1 / accounting.gaussian_mu(1, 1e-6) == pytest.approx(4.22475, abs=1e-4)


def test_replace_one_doubles_a_sensitivity_that_is_already_relative() -> None:
    """Digest 4, pitfall 1: in the PLD accountant, not in our relation."""
    event = dp.GaussianDpEvent(4.22475)
    ours = PLDAccountant().compose(event).get_epsilon(1e-6)
    assert ours == pytest.approx(1.0, abs=1e-3)
    twice = PLDAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    assert twice.compose(event).get_epsilon(1e-6) == pytest.approx(2.1229, abs=1e-3)
    guarantee = accounting.full_batch_gaussian(4.22475, 1, "replace_one")
    assert guarantee.event_relation is dp.NeighboringRelation.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize(
    ("leaves", "exact", "theorem_2", "lemma", "lemma_true", "theorem_3_true"),
    [
        (2, 5.97, (12.38, 0.46), 13.82, (0.41, 0.86), (7.3, 16.9)),
        (8, 8.45, (21.44, 0.37), 13.82, (0.59, 1.24), (11.0, 26.4)),
        (64, 11.18, (30.32, 0.34), 13.82, (0.80, 1.68), (15.5, 38.4)),
        (1024, 14.01, (39.14, 0.33), 13.82, (1.02, 2.16), (20.7, 52.8)),
        (131072, 17.92, (51.04, 0.33), 13.82, (1.33, 2.83), (28.5, 75.5)),
    ],
)
def test_the_papers_noise_of_a_tree(
    leaves: int,
    exact: float,
    theorem_2: tuple[float, float],
    lemma: float,
    lemma_true: tuple[float, float],
    theorem_3_true: tuple[float, float],
) -> None:
    """Digest 4: noise over a leaf's sensitivity, and its true epsilon; (1, 1e-6)."""
    depth, log = leaves.bit_length(), math.log(1e6)

    def epsilon(noise: float, moved: float) -> float:
        return accounting.gaussian_epsilon(math.sqrt(depth) * moved / noise, 1e-6)

    least = math.sqrt(depth) / accounting.gaussian_mu(1, 1e-6)
    assert least == pytest.approx(exact, abs=6e-3)
    printed = 4 * math.sqrt(math.log(leaves) * log)
    assert printed == pytest.approx(theorem_2[0], abs=6e-3)
    assert epsilon(printed, 1) == pytest.approx(theorem_2[1], abs=6e-3)
    assert log == pytest.approx(lemma, abs=6e-3)
    for moved, by_lemma, by_theorem in zip(
        (1, 2), lemma_true, theorem_3_true, strict=True
    ):
        assert epsilon(log, moved) == pytest.approx(by_lemma, abs=6e-3)
        assert epsilon(1.0, moved) == pytest.approx(by_theorem, abs=6e-2)


def test_the_papers_noise_of_an_escape() -> None:
    """Digest 4: with a tau below 1 and one real escape; by Theorem 3.17."""
    multiplier = 2 * math.sqrt(math.log(1e6))
    assert multiplier == pytest.approx(7.43, abs=6e-3)
    for alpha, (one, two) in {0.3: (1.44, 3.08), 0.1: (3.57, 7.89)}.items():
        noise = multiplier * math.sqrt(alpha**1.5)
        for moved, want in ((1, one), (2, two)):
            found = accounting.gaussian_epsilon(moved / noise, 1e-6)
            assert found == pytest.approx(want, abs=0.02)
