"""What draws cost, by formula and by adding up, and what budgets admit."""

import itertools
import math

import numpy as np
import pytest

from jaxdp import accounting
from jaxdp.saddle.algorithms.convex import refresh_times
from jaxdp.saddle.theory import charges, levels
from tests.saddle import reference

E = 1.5e-5

# --- one draw ------------------------------------------------------------------------


def renyi(p: np.ndarray, q: np.ndarray, alpha: float) -> float:
    return math.log(np.sum(p**alpha * q ** (1 - alpha))) / (alpha - 1)


@pytest.mark.parametrize("delta", [0.01, 0.1, 1.0])
def test_a_draw_of_bounded_range_costs_half_its_square(delta: float) -> None:
    """Over random laws and movements, and nearly attained by two halves."""
    rng = np.random.default_rng(0)
    rho = float(charges.draw(delta))
    for _ in range(200):
        scores = rng.normal(0, 3, size=rng.integers(2, 9))
        moved = scores + rng.choice([-delta, delta], size=scores.shape)
        p, q = (np.exp(s - np.logaddexp.reduce(s)) for s in (scores, moved))
        log = np.log(p / q)
        assert log.max() - log.min() <= 2 * delta * (1 + 1e-9)
        for alpha in (1.5, 2.0, 8.0):
            assert renyi(p, q, alpha) <= alpha * rho * (1 + 1e-9)
    halves = np.array([0.5, 0.5])
    tilted = halves * np.exp([delta, -delta])
    worst = renyi(halves, tilted / tilted.sum(), 1.01)
    assert worst > 1.01 * rho * (1 - 0.4 * delta**2)


@pytest.mark.parametrize("delta", [0.01, 0.1, 1.0])
def test_a_draw_of_bounded_range_is_pure(delta: float) -> None:
    """Nearly attained where one vertex has almost all of the mass."""
    rng = np.random.default_rng(0)
    for size in rng.integers(2, 9, 200):
        scores = rng.normal(0, 3, size)
        moved = scores + rng.choice([-delta, delta], size)
        p, q = (np.exp(s - np.logaddexp.reduce(s)) for s in (scores, moved))
        assert np.abs(np.log(p / q)).max() <= charges.draw(delta, pure=True) + 1e-12
    scores = np.array([0.0, -20.0])
    moved = scores + np.array([-delta, delta])
    p, q = (np.exp(s - np.logaddexp.reduce(s)) for s in (scores, moved))
    assert np.abs(np.log(p / q)).max() > 2 * delta * (1 - 1e-6)
    assert charges.draw(delta, E, pure=True) == pytest.approx(2 * (delta + E))


def test_pure_totals_are_sums_of_the_same_draws() -> None:
    """rho of n equal draws is n (d + e)^2 / 2, their pure epsilon n 2 (d + e)."""
    steps, draws, d = 6, 2, 3e-3
    totals = {
        steps * draws + steps: lambda **kw: charges.vertex_sampling(
            d, 0.0, num_steps=steps + 1, num_draws=draws, **kw
        ),
        7: lambda **kw: charges.convex(
            d, num_steps=16, num_draws=1, refresh_every=4, **kw
        ),
        4 + 5: lambda **kw: (
            charges.bias_reduced(np.full(3, d), np.zeros(3), np.array([2, 0, 1]), **kw)
            * (9 / 8)
        ),
    }
    for count, total in totals.items():
        assert total() == pytest.approx(count * d**2 / 2, rel=1e-12)
        assert total(pure=True) == pytest.approx(count * 2 * d, rel=1e-12)
    for last in (True, False):
        moved = np.arange(1, 5 if last else 4) * d
        got = charges.synthetic(d, num_steps=5, last_draw=last, error=E, pure=True)
        assert got == pytest.approx(2 * (moved + E).sum(), rel=1e-12)
    one = charges.vertex_sampling(d, d, num_steps=2, num_draws=1, error=E, pure=True)
    assert one == pytest.approx(2 * 4 * (d + E), rel=1e-12)


def test_a_samplers_error_widens_the_range() -> None:
    assert charges.draw(0.1, 0.02) == pytest.approx(0.12**2 / 2)
    assert charges.draw([0.0, 0.1]) == pytest.approx([0, 0.005])


# --- totals, by adding up ------------------------------------------------------------


def total(draws: dict[float, int], deltas: dict[float, float], error: float) -> float:
    """rho of one record: draws by step, and how far its score has moved by then."""
    moved = {t: d for t, d in deltas.items() if d > 0}
    return math.fsum(
        count * (moved[t] + error) ** 2 / 2 for t, count in draws.items() if t in moved
    )


@pytest.mark.parametrize("error", [0.0, E])
@pytest.mark.parametrize(("steps", "draws"), [(1, 1), (2, 3), (17, 4)])
def test_vertex_sampling(steps: int, draws: int, error: float) -> None:
    x, y = 1e-3, 4e-3
    counts = {float(t): draws + 1 for t in range(1, steps + 1)}
    want = max(
        sum(total(counts, {t: d * (t > r) for t in counts}, error) for d in (x, y))
        for r in counts
    )
    got = charges.vertex_sampling(x, y, num_steps=steps, num_draws=draws, error=error)
    assert got == pytest.approx(want, rel=1e-12)
    if steps == 1:
        assert got == 0


@pytest.mark.parametrize("error", [0.0, E])
def test_bias_reduced(error: float) -> None:
    rng = np.random.default_rng(1)
    for size in (1, 2, 30):
        taken = reference.levels(size, 3, size)
        x, y = rng.uniform(1e-4, 1e-2, (2, size))
        counts = {float(t): 2 ** (int(n) + 1) + 1 for t, n in enumerate(taken)}
        want = max(
            total(counts, {t: x[r] * (t > r) for t in counts}, error)
            + total(counts, {t: y[r] * (t > r) for t in counts}, error)
            for r in range(size)
        )
        got = charges.bias_reduced(x, y, taken, error=error)
        assert got == pytest.approx(want, rel=1e-12)
        used = int(np.sum(2**taken))
        each = charges.draw(x.max(), error) + charges.draw(y.max(), error)
        assert got <= 3 * used * each  # Whatever the levels are.
    assert charges.bias_reduced(np.ones(0), np.ones(0), np.zeros(0, int)) == 0


@pytest.mark.parametrize("error", [0.0, E])
@pytest.mark.parametrize("steps", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("every", [1, 4, 8, 30])
def test_convex(steps: int, every: int, error: float) -> None:
    delta, draws = 2e-3, 7
    counts = {float(t): draws for t in refresh_times(steps, every)}
    # The final draws are from the mean of iterates up to T, which a record of batch T
    # does not enter.
    counts[steps + 0.5] = draws
    want = max(
        total(counts, {t: delta * (t > r and r < steps) for t in counts}, error)
        for r in range(1, steps + 1)
    )
    got = charges.convex(
        delta, num_steps=steps, num_draws=draws, refresh_every=every, error=error
    )
    assert got == pytest.approx(want, rel=1e-12)


def test_convex_counts_final_draws_once() -> None:
    """The digest's E16: 7 refreshes and the final one, less the first, are 7."""
    one = charges.convex(1.0, num_steps=16, num_draws=1, refresh_every=4)
    assert one == 7 / 2
    assert charges.convex(1.0, num_steps=5, num_draws=3, refresh_every=8) == 15 / 2


@pytest.mark.parametrize("error", [0.0, E])
@pytest.mark.parametrize("last_draw", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 40])
def test_synthetic(steps: int, last_draw: bool, error: float) -> None:
    delta = 1e-4
    last = steps if last_draw else steps - 1
    counts = {float(t): 1 for t in range(1, last + 1)}
    want = total(counts, {t: (t - 1) * delta for t in counts}, error)
    got = charges.synthetic(delta, num_steps=steps, last_draw=last_draw, error=error)
    assert got == pytest.approx(want, rel=1e-12)
    if not last_draw and steps > 2 and error == 0:  # As the digest prints it.
        factors = (steps - 2) * (steps - 1) * (2 * steps - 3) / 6
        assert got == pytest.approx(delta**2 / 2 * factors)


# --- budgets -------------------------------------------------------------------------

RHO = [
    (0.1, 1e-6, 3.2104e-4),
    (0.5, 1e-6, 6.6415e-3),
    (1, 1e-6, 2.43558e-2),
    (1, 1e-5, 3.05559e-2),
    (2, 1e-6, 8.81522e-2),
    (4, 1e-6, 0.311065),
    (8, 1e-6, 1.05222),
]


@pytest.mark.parametrize(("epsilon", "delta", "rho"), RHO)
def test_rho_budget_is_the_digests(epsilon: float, delta: float, rho: float) -> None:
    """Table 4.2; a few more orders leave it up to a relative 1e-4 larger."""
    got = charges.rho_budget(epsilon, delta)
    assert rho * (1 - 2e-5) <= got <= rho * (1 + 1.2e-4)
    spent = charges.epsilon(got, delta)
    assert epsilon * (1 - 1e-10) < spent <= epsilon
    assert spent == accounting.epsilon(*accounting.zcdp(got), delta)
    assert charges.epsilon(got * (1 + 1e-9), delta) > epsilon
    # More than the textbook's conversion admits.
    log = math.log(1 / delta)
    textbook = (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2
    assert textbook < got


def test_epsilon_of_rho() -> None:
    """Section 6, test 7."""
    assert charges.epsilon(0.0243558, 1e-6) == pytest.approx(1.0, abs=5e-5)


@pytest.mark.parametrize("epsilon", [1e-4, 0.01, 50.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-3, 0.5])
def test_rho_budget_of_extreme_budgets(epsilon: float, delta: float) -> None:
    rho = charges.rho_budget(epsilon, delta)
    assert charges.epsilon(rho, delta) <= epsilon
    assert charges.epsilon(rho * (1 + 1e-9), delta) > epsilon


# --- step sizes ----------------------------------------------------------------------


def test_admissible_step_in_closed_form() -> None:
    rho = 0.0243558
    step = charges.admissible(
        lambda s: charges.vertex_sampling(2 * s, 2 * s, num_steps=1000, num_draws=1),
        rho,
    )
    assert step == pytest.approx(0.5 * math.sqrt(rho / (999 * 2)), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("error", [0.0, E])
def test_admissible_step_is_the_largest(scale: float, error: float) -> None:
    taken = reference.levels(0, 3, 50)
    weights = scale * levels.amplification(3)[taken]

    def charge(s: float) -> float:
        return charges.bias_reduced(s * weights, s * weights, taken, error=error)

    rho = 0.0243558
    step = charges.admissible(charge, rho)
    assert charge(step) <= rho < charge(step * (1 + 1e-11))
    if error:  # Two terms, |s w| and e, under one square.
        free = charges.admissible(lambda s: charge(s) if s else 0.0, rho)
        assert free == pytest.approx(step, rel=1e-9)


def test_nothing_released_admits_any_step() -> None:
    for error in (0.0, E):
        step = charges.admissible(
            lambda s, e=error: charges.vertex_sampling(
                s, s, num_steps=1, num_draws=1, error=e
            ),
            1e-9,
        )
        assert step == math.inf


def test_an_error_beyond_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sampler's error, which alone costs"):
        charges.admissible(
            lambda s: charges.synthetic(s, num_steps=1000, error=0.1), 1e-3
        )


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: charges.rho_budget(0.0, 1e-6), ValueError, "epsilon"),
        (lambda: charges.rho_budget(math.inf, 1e-6), ValueError, "epsilon"),
        (lambda: charges.rho_budget(1.0, 1.0), ValueError, "delta"),
        (lambda: charges.admissible(lambda s: s, 0.0), ValueError, "rho"),
        (
            lambda: charges.vertex_sampling(1, 1, num_steps=0, num_draws=1),
            ValueError,
            "num_steps",
        ),
        (
            lambda: charges.vertex_sampling(-1, 1, num_steps=2, num_draws=1),
            ValueError,
            "delta_x",
        ),
        (
            lambda: charges.convex(1, num_steps=2, num_draws=1, refresh_every=0),
            ValueError,
            "refresh_every",
        ),
        (lambda: charges.synthetic(math.nan, num_steps=2), ValueError, "delta"),
        (lambda: charges.synthetic(1, num_steps=2.0), TypeError, "num_steps"),  # pyright: ignore
        (
            lambda: charges.bias_reduced(np.ones(2), np.ones(1), np.zeros(2, int)),
            ValueError,
            "levels must have one entry",
        ),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_totals_grow_with_everything() -> None:
    """So that bisection is right."""
    grid = list(itertools.pairwise([0.0, 1e-6, 1e-3, 1.0]))
    for low, high in grid:
        for e in (0.0, E):
            for charge in (
                lambda d, e: charges.convex(
                    d, num_steps=9, num_draws=2, refresh_every=3, error=e
                ),
                lambda d, e: charges.synthetic(d, num_steps=9, error=e),
                lambda d, e: charges.vertex_sampling(
                    d, d, num_steps=9, num_draws=2, error=e
                ),
            ):
                assert charge(low, e) < charge(high, e)
                assert charge(low, 0.0) <= charge(low, e)
