"""Certified settings: the least bound, at steps that exact charges admit."""

import math
from typing import Any

import numpy as np
import pytest

from jaxdp.mechanism.design import Design
from jaxdp.saddle.theory import bounds, charges, design, levels, step_sizes, theorems

BUDGET: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "relation": "replace_one"}
LOSS: dict[str, Any] = {"lipschitz": 1.5, "smoothness": 1.0}

#: n, d; the digest's T, its bound where that is printed.
TABLE = [
    (10**3, 10, 99, None),
    (10**3, 100, 62, None),
    (10**3, 1000, 55, None),
    (10**4, 10, 908, 1.20),
    (10**4, 100, 663, 2.01),
    (10**4, 1000, 524, 2.73),
    (10**5, 10, 8262, 0.379),
    (10**5, 100, 7092, 0.638),
    (10**5, 1000, 5226, None),
    (10**6, 10, 99166, 0.120),
    (10**6, 100, 49886, 0.204),
]


def saddle(n: int, dim: int, **kwargs: Any) -> Design:
    arguments = BUDGET | LOSS | {"second_order_smoothness": 0.0} | kwargs
    return design.saddle(num_examples=n, dim_x=dim, dim_y=dim, **arguments)


@pytest.mark.parametrize(("n", "dim", "num_steps", "bound"), TABLE)
def test_table_7a(n: int, dim: int, num_steps: int, bound: float | None) -> None:
    """The digest's T, from a coarse grid, is within 2 % of the least bound found."""
    theirs = saddle(n, dim, num_steps=num_steps)
    ours = saddle(n, dim)
    assert theirs.num_steps == num_steps
    if bound is not None:
        assert theirs.promise.bound == pytest.approx(
            bound, abs=6e-3 if bound > 1 else 6e-4
        )
    assert ours.promise.bound <= theirs.promise.bound <= 1.02 * ours.promise.bound
    assert ours.num_draws == 1  # Quadratic.
    step = ours.step_size_x
    assert step == ours.step_size_y <= ours.steps.certified
    best = bounds.saddle_step_size(ours.num_steps, 2 * math.log(dim), 1.5)
    assert step == min(best, ours.steps.certified)


def test_no_number_of_steps_has_a_lower_bound() -> None:
    n, dim = 300, 10
    least = min(saddle(n, dim, num_steps=t).promise.bound for t in range(1, n + 1))
    assert saddle(n, dim).promise.bound == pytest.approx(least, rel=1e-12)


def test_best_number_of_steps_of_a_quadratic_game() -> None:
    """T* = (L1 / L0) n sqrt(rho / (2 l)), and 9.51 sqrt(L0 L1) l^.75 n^-.5 rho^-.25.

    They leave out the term 5 tau L0^2, and that batches are whole.
    """
    n, rho, ell = 27 * 10**6, charges.rho_budget(1.0, 1e-6), 2 * math.log(100)
    got = saddle(n, 100, lipschitz=1.0, num_steps=10**6)
    assert n * math.sqrt(rho / (2 * ell)) == pytest.approx(10**6, rel=3e-2)
    least = 9.51 * ell**0.75 * n**-0.5 * rho**-0.25
    assert got.promise.bound - 5 * got.step_size_x == pytest.approx(least, rel=1e-3)
    assert (
        0.85 * got.promise.bound
        < saddle(n, 100, lipschitz=1.0).promise.bound
        <= got.promise.bound
    )


@pytest.mark.parametrize("second_order", [1.0, None])
def test_draws_of_other_problems(second_order: float | None) -> None:
    got = saddle(10**5, 100, second_order_smoothness=second_order)
    assert got.num_draws > 1
    for t, k in ((1.1, 1.0), (1 / 1.1, 1.0), (1.0, 1.1), (1.0, 1 / 1.1)):
        num_steps, num_draws = int(got.num_steps * t), int(got.num_draws * k)
        size = 10**5 // num_steps
        admitted = step_sizes.saddle(
            num_steps=num_steps,
            num_draws=num_draws,
            batch_size=size,
            lipschitz=1.5,
            **BUDGET,
        )
        best = bounds.saddle_step_size(num_steps, 2 * math.log(100), 1.5)
        other = bounds.saddle(
            num_steps=num_steps,
            num_draws=num_draws,
            step_size=min(float(best), admitted.certified),
            log_dim=2 * math.log(100),
            second_order_smoothness=second_order,
            **LOSS,
        )
        assert got.promise.bound <= other.bound
    # Better than the theorem's numbers, at equal budget.
    name = "4.2" if second_order is None else "4.1"
    paper = theorems.saddle(
        name,
        num_examples=10**5,
        dim_x=100,
        dim_y=100,
        second_order_smoothness=second_order,
        **BUDGET | LOSS,
    )
    assert got.promise.bound < paper.promise.bound / 1.3


# --- Algorithm 3 ---------------------------------------------------------------------


def bias_reduced(n: int, **kwargs: Any) -> Design:
    arguments = BUDGET | LOSS | {"second_order_smoothness": 1.0} | kwargs
    return design.saddle_bias_reduced(num_examples=n, dim_x=100, dim_y=100, **arguments)


@pytest.mark.parametrize("n", [4, 10, 1000, 100_000])
@pytest.mark.parametrize("seed", range(5))
def test_bias_reduced_design_uses_the_data_and_the_budget(n: int, seed: int) -> None:
    got = bias_reduced(n, level_seed=seed)
    executed = levels.executed(
        seed, vertex_budget=got.vertex_budget, max_level=got.max_level
    )
    assert got.num_steps == len(executed)
    sizes = np.array(got.batch_sizes)
    used = int(sizes[executed].sum())
    assert n - len(executed) <= used <= n
    clips = 2 * 1.5 * levels.amplification(got.max_level) / sizes
    deltas = got.steps.certified * clips[executed]
    if len(executed) > 1:
        spent = charges.bias_reduced(deltas, deltas, executed)
        assert charges.epsilon(spent, 1e-6) == pytest.approx(1.0, rel=1e-6)
    assert got.step_size_x == got.step_size_y <= got.steps.certified
    assert got.batches == "equalized" and got.batch_alpha is None
    assert got.steps.paper is None and got.steps.ratio is None


def test_bias_reduction_is_for_curved_problems() -> None:
    """None where there is no bias; the digest finds Algorithm 1 better there."""
    assert bias_reduced(10**5, second_order_smoothness=0.0).max_level == 0
    assert bias_reduced(10**5, second_order_smoothness=5.0).max_level > 2
    own = bias_reduced(10**5, vertex_budget=231, max_level=3)
    assert (own.vertex_budget, own.max_level) == (231, 3)


# --- Algorithm 4 ---------------------------------------------------------------------


def convex(n: int, **kwargs: Any) -> Design:
    arguments = BUDGET | LOSS | {"second_order_smoothness": 0.0} | kwargs
    return design.convex_simplex(num_examples=n, dim=100, **arguments)


def convex_bound(n: int, t: int, k: int, q: int, smooth: float | None) -> float:
    admitted = step_sizes.convex(
        num_steps=t,
        num_draws=k,
        refresh_every=q,
        batch_size=n // t,
        lipschitz=1.5,
        **BUDGET,
    )
    numbers: dict[str, Any] = {
        "num_steps": t,
        "num_draws": k,
        "refresh_every": q,
        "log_dim": math.log(100),
        "second_order_smoothness": smooth,
        **LOSS,
    }
    step = min(float(bounds.convex_step_size(**numbers)), admitted.certified)
    return bounds.convex(**numbers, step_size=step).bound


@pytest.mark.parametrize("smooth", [0.0, 1.0, None])
def test_convex_design_is_the_best_nearby(smooth: float | None) -> None:
    n = 10**5
    got = convex(n, second_order_smoothness=smooth)
    t, k, q = got.num_steps, got.num_draws, got.refresh_every
    assert got.promise.bound == pytest.approx(
        convex_bound(n, t, k, q, smooth), rel=1e-12
    )
    for a in (-1, 0, 1):
        for b in (-1, 0, 1):
            for c in (-1, 0, 1):
                near = [max(1, round(x * 1.15**e)) for x, e in ((t, a), (k, b), (q, c))]
                assert got.promise.bound <= convex_bound(n, *near, smooth) * (1 + 5e-4)
    assert got.step_size <= 1 / (4 * 1.5 * q)
    paper = theorems.convex_simplex(
        "5.1", num_examples=n, dim=100, second_order_smoothness=smooth, **BUDGET | LOSS
    )
    assert got.promise.bound < paper.promise.bound / 1.3
    assert convex(n, second_order_smoothness=smooth, num_steps=64).num_steps == 64


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_few_records(n: int) -> None:
    for got in (saddle(n, 2), convex(n), convex(n, second_order_smoothness=None)):
        assert 1 <= got.num_steps <= n
        assert math.isfinite(got.promise.bound)


# --- Algorithm 5 ---------------------------------------------------------------------


QUERIES: dict[str, Any] = {
    "domain_size": 256,
    "num_queries": 896,
    "query_range": 2.0,
}


def synthetic(n: int, **kwargs: Any) -> Design:
    arguments = BUDGET | QUERIES | kwargs
    return design.synthetic_data(num_examples=n, **arguments)


def test_synthetic_design() -> None:
    """A third of T* = 5.5 n sqrt(rho log |Z|) / log |Q| for kappa 2; the cap on tau_y."""
    rho, n = charges.rho_budget(1.0, 1e-6), 10**4
    star = 5.477 * n * math.sqrt(rho * math.log(256)) / math.log(896)
    got = synthetic(n)
    assert got.num_steps == pytest.approx(star / 3, rel=1e-3)
    assert synthetic(n, query_range=1.0).num_steps == pytest.approx(
        2 * star / 3, rel=1e-3
    )
    assert got.step_size_x == pytest.approx(
        math.sqrt(0.8 * math.log(256) / got.num_steps)
    )
    cap = math.sqrt(math.log(896) / (2 * got.num_steps))
    assert got.step_size_y == min(cap, got.steps.certified)
    # T*, which leaves out the term 2 tau_y, is nearly the best.
    bound = {
        t: synthetic(10**6, num_steps=round(100 * star * t)).promise.bound
        for t in (0.8, 1.0, 1.25)
    }
    assert bound[1.0] < 1.01 * min(bound[0.8], bound[1.25])
    assert bound[1.0] < synthetic(10**6).promise.bound < 1.3 * bound[1.0]
    assert (
        synthetic(n).promise.bound
        < theorems.synthetic_data(
            "G.1", num_examples=n, domain_size=256, num_queries=896, **BUDGET
        ).promise.bound
    )


# --- relations and errors ------------------------------------------------------------


def test_missing_records_admit_twice_the_step() -> None:
    for call in (
        lambda r: saddle(10**4, 10, num_steps=500, relation=r).steps.certified,
        lambda r: convex(10**4, num_steps=1, relation=r).steps.certified,
        lambda r: synthetic(10**4, num_steps=99, relation=r).steps.certified,
        lambda r: (
            bias_reduced(
                10**4, vertex_budget=64, max_level=2, relation=r
            ).steps.certified
        ),
    ):
        replaced, zeroed, absent = map(
            call, ("replace_one", "zero_out", "add_or_remove")
        )
        assert zeroed == absent == pytest.approx(2 * replaced)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: saddle(10, 10, num_steps=11), ValueError, "num_steps .* <= 10"),
        (lambda: saddle(10, 10, num_steps=1.5), TypeError, "num_steps"),
        (lambda: saddle(10, 1), ValueError, "dim_x"),
        (lambda: convex(10, num_steps=0), ValueError, "num_steps"),
        (lambda: convex(10, lipschitz=-1.0), ValueError, "lipschitz"),
        (lambda: bias_reduced(3), ValueError, "num_examples"),
        (lambda: bias_reduced(10, vertex_budget=11), ValueError, "vertex_budget"),
        (
            lambda: bias_reduced(100, vertex_budget=10, max_level=3),
            ValueError,
            "max_level .* <= 2",
        ),
        (
            lambda: bias_reduced(100, second_order_smoothness=None),
            ValueError,
            "second_order_smoothness must be a number >= 0 for bias reduction",
        ),
        (lambda: synthetic(0), ValueError, "num_examples"),
        (lambda: synthetic(9, epsilon=-1.0), ValueError, "epsilon"),
        (lambda: synthetic(9, num_steps=0), ValueError, "num_steps"),
        (lambda: synthetic(9, num_queries=1), ValueError, "num_queries"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
