"""Theorems 4.1 and 6.1, and the simple method of appendix E, against plain formulas."""

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from jaxdp import accounting
from jaxdp.mechanism.design import Design
from jaxdp.o2nc.theory import bounds, estimators, theorems
from tests.o2nc import numbers

COMMON: dict[str, Any] = {
    "num_examples": 10**6,
    "dim": 10,
    "epsilon": 1.0,
    "delta": 1e-6,
    "relation": "replace_one",
    "lipschitz": 1.0,
    "initial_gap": 1.0,
    "smoothing_radius": 1.0,
}


def make(name: str, **changes: Any) -> Design:
    return theorems.prescribed(name, **(COMMON | changes))


def problem(**changes: Any) -> bounds.Constants:
    return bounds.Constants(**COMMON | changes)


# --- Theorem 4.1 ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "n", "beta", "epsilon", "delta", "steps", "a", "real", "exact"),
    [
        (100, 10**5, 0.1, 1, 1e-6, (2000, 10), 2, 4.76, (3.55, 4.49)),
        (100, 10**5, 0.1, 1, 1e-6, (2000, 10), 1, 2.20, (1.78, 2.25)),
        (100, 10**5, 0.05, 1, 1e-6, (16000, 40), 2, 4.92, (3.64, 4.60)),
        (1000, 10**6, 0.1, 1, 1e-7, (2000, 3), 2, 4.28, (3.30, 4.29)),
        (100, 10**5, 0.1, 8, 1e-6, (2000, 10), 2, 67, (4.39, 5.55)),
    ],
)
def test_printed_noise_of_four_one(
    dim: int,
    n: int,
    beta: float,
    epsilon: float,
    delta: float,
    steps: tuple[int, int],
    a: int,
    real: float,
    exact: tuple[float, float],
) -> None:
    """Kornowski digest 4: what it spends at the sensitivities that are claimed for it."""
    p = problem(
        dim=dim,
        num_examples=n,
        epsilon=float(epsilon),
        delta=delta,
        smoothing_radius=0.5,
    )
    found = theorems.multi_pass_numbers(p, beta)
    assert (found.num_steps, found.period) == steps
    assert found.max_step == pytest.approx(0.5 * beta**2)
    assert found.window == round(1 / (4 * beta**2))
    logs = math.log(1 / delta)
    t, period = steps
    one = math.sqrt(t * logs / period) / (n * epsilon)
    two = found.max_step * math.sqrt(t * dim * logs) / (0.5 * n * epsilon)
    assert found.restart_std == pytest.approx(one)
    assert found.difference_std == pytest.approx(two)
    m = dim * period / (n * one**2) + dim / (n * two**2)
    assert found.num_directions == max(1, math.ceil(m - 1e-9))
    # The claims: L for a gradient, and smoothness times the longest movement.
    first = math.ceil(t / period)
    moved = a / n, a / n * 2 * found.max_step * estimators.kappa(dim) / 0.5
    cost = [first * (moved[0] / one) ** 2, (t - first) * (moved[1] / two) ** 2]
    spent = dp.GaussianDpEvent(1 / math.sqrt(sum(cost)))
    coarse = PLDAccountant(value_discretization_interval=1e-3 * epsilon)
    theirs = coarse.compose(spent).get_epsilon(delta)
    assert theirs == pytest.approx(real, rel=5e-3)
    # Exact noise, and that it has the least variance at the end of a period.
    mu = accounting.gaussian_mu(float(epsilon), delta)
    r = [
        moved[0] * math.sqrt(first),
        moved[1] * math.sqrt((period - 1) * (t - first)),
    ]
    stds = [math.sqrt(r[0] * sum(r)) / mu, math.sqrt(r[1] * sum(r) / (period - 1)) / mu]
    assert stds[0] / one == pytest.approx(exact[0], rel=3e-3)
    assert stds[1] / two == pytest.approx(exact[1], rel=3e-3)


def test_four_one() -> None:
    """The target that n records allow, and what follows from it."""
    n, d, gap, alpha = 10**5, 20, 3.0, 0.5
    found = make("4.1", num_examples=n, dim=d, initial_gap=gap, smoothing_radius=alpha)
    beta = (math.sqrt(gap / alpha) * d**0.75 / n) ** (2 / 3)
    p = problem(num_examples=n, dim=d, initial_gap=gap, smoothing_radius=alpha)
    assert theorems.multi_pass_target(p) == pytest.approx(beta)
    assert n == pytest.approx(math.sqrt(gap) * d**0.75 / (math.sqrt(alpha) * beta**1.5))
    assert found.max_step == pytest.approx(alpha * beta**2)
    assert found.window == math.floor(1 / (4 * beta**2))
    assert found.period == math.floor(1 / (beta**2 * math.sqrt(d)))
    steps = gap / (alpha * beta**3)
    assert steps - found.window < found.num_steps <= steps + 1
    assert found.num_steps == pytest.approx((n / d**0.75) ** 2, rel=1e-3)
    assert found.restart_batch_size == found.batch_size == n
    assert found.multi_pass and not found.scale_with_movement and not found.reset
    assert (found.direction, found.difference) == ("sphere", "independent")
    assert (found.prefix_noise, found.num_directions) == ("independent", d)
    restarts = math.ceil(found.num_steps / found.period)
    rest = found.num_steps - restarts
    assert found.evaluations == pytest.approx(n * (2 * d * restarts + 4 * d * rest))
    assert found.gradients == 0
    # Clips by concentration, shared by all that is ever clipped; exact noise.
    failure = bounds.FAILURE / (n * found.num_steps)
    clip = numbers.grad_clip(d, d, "sphere", failure)
    assert found.restart_l2_clip_norm == pytest.approx(clip)
    r1 = 2 * clip * math.sqrt(restarts) / n
    r2 = 2 * found.l2_clip_norm * math.sqrt((found.period - 1) * rest) / n
    mu = accounting.gaussian_mu(1.0, 1e-6)
    assert found.promise.noise_variance == pytest.approx(d * ((r1 + r2) / mu) ** 2)
    assert found.promise.generalisation > 0
    # In any units.
    other = make(
        "4.1",
        num_examples=n,
        dim=d,
        initial_gap=gap * 0.6,
        smoothing_radius=alpha * 0.2,
        lipschitz=3.0,
    )
    assert other.num_steps == pytest.approx(found.num_steps, rel=1e-3)
    assert other.max_step == pytest.approx(0.2 * found.max_step)
    assert other.promise.bound == pytest.approx(3 * found.promise.bound, rel=1e-3)


def test_no_step_of_four_one_is_longer_than_a_window() -> None:
    """Few records: the target is at most L / 2, a window one step of a quarter."""
    found = make("4.1", num_examples=4, smoothing_radius=0.3, lipschitz=5.0)
    assert found.max_step == pytest.approx(0.3 / 4) and found.window == 1
    assert found.period == 1 and 1 < found.promise.bound < math.inf


def test_four_one_with_gradients() -> None:
    found, values = make("4.1 first-order"), make("4.1")
    same = ("num_steps", "period", "window", "max_step", "paper_noise_std")
    assert all(getattr(found, x) == getattr(values, x) for x in same)
    assert found.paper_difference_noise_std == values.paper_difference_noise_std
    assert (found.oracle, found.direction) == ("first_order", "ball")
    assert found.restart_l2_clip_norm == 1 and found.num_directions == 64
    assert found.paper_num_directions is None and found.evaluations == 0
    restarts = math.ceil(found.num_steps / found.period)
    calls = 10**6 * (restarts + 128 * (found.num_steps - restarts))
    assert found.gradients == pytest.approx(calls)
    assert found.promise.bound < values.promise.bound


def test_steps_beyond_all_machines_have_numbers() -> None:
    for name in ("4.1", "4.1 first-order"):
        found = make(name, num_examples=10**12, dim=1, epsilon=100.0)
        assert found.num_steps > 1e27 and 0 < found.promise.bound < math.inf
        assert found.evaluations + found.gradients > 1e38


# --- Theorem 6.1 ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "n", "delta", "m"),
    [(10, 10**6, 1e-6, 1.4e8), (100, 10**6, 1e-6, 3.4e7), (100, 10**8, 1e-9, 2e10)],
)
def test_six_one_is_three_one_with_gradients(
    dim: int, n: int, delta: float, m: float
) -> None:
    """Kornowski digest 3.2, and 3.4 for its m."""
    changes = {"dim": dim, "num_examples": n, "delta": delta}
    found, values = make("6.1", **changes), make("3.1", **changes)
    same = ("num_steps", "period", "window", "max_step", "paper_noise_std")
    same += ("restart_batch_size", "batch_size", "reset", "prefix_noise")
    assert all(getattr(found, x) == getattr(values, x) for x in same)
    assert found.paper_num_directions == pytest.approx(m, rel=0.15)
    reach = 1 / found.max_step
    want = math.ceil(math.log(dim / delta) * reach**2 / dim)
    assert found.paper_num_directions == want
    assert (found.oracle, found.direction) == ("first_order", "ball")
    assert found.difference == "independent" and found.restart_l2_clip_norm == 1
    assert found.promise.restart_variance == pytest.approx(1 / found.period)
    # A gradient for restarts; then both ends of 64 points.
    restarts = math.ceil(found.num_steps / found.period)
    rest = found.num_steps - restarts
    assert found.gradients == restarts * found.period + rest * 128
    assert found.evaluations == 0 and found.promise.bound < values.promise.bound


def test_six_one_with_the_papers_points() -> None:
    few = make("6.1", relation="zero_out")
    many = make("6.1", relation="zero_out", num_directions=few.paper_num_directions)
    assert many.l2_clip_norm < few.l2_clip_norm / 500
    assert many.promise.bound < 0.6 < few.promise.bound / 2


# --- appendix E ----------------------------------------------------------------------


def test_naive() -> None:
    found = make("E")
    mu = accounting.gaussian_mu(1.0, 1e-6)
    batch = math.ceil(10**1.5 / mu)
    assert (found.restart_batch_size, found.period) == (batch, 1)
    epoch = math.ceil((10**6 / (2 * batch)) ** (2 / 3))
    assert (found.window, found.max_step) == (epoch, 1 / epoch)
    windows = 10**6 // (batch * epoch)
    assert found.num_steps == windows * epoch and found.reset
    assert (found.num_directions, found.direction) == (1, "sphere")
    assert not found.share_directions and not found.multi_pass
    assert found.evaluations == found.num_steps * batch * 2
    # d L for any direction; half of what is printed moves a record's replacement.
    assert found.restart_l2_clip_norm == 10 and found.promise.clip_bias == 0
    std = 2 * 10 / (batch * mu)
    assert found.promise.noise_variance == pytest.approx(10 * std**2)
    assert found.promise.restart_variance == pytest.approx(100 / 9 / batch)
    rho = 1 / (2 * math.sqrt(math.log(1e6)))
    assert found.paper_noise_std == pytest.approx(10 / (batch * rho))
    sensitivity = 2 * 10 / batch
    # (alpha, 2 alpha rho^2) instead of (alpha, alpha rho^2 / 2): Zhang digest E3.
    assert sensitivity / found.paper_noise_std == pytest.approx(2 * rho)


def naive_bound(n: float, dim: int, rho: float, batch: float) -> float:
    """Least over the epoch of E's bound, with F = L = delta = 1."""
    size = math.sqrt(dim / batch + 1) + dim**1.5 / (batch * rho)
    # x T + size / sqrt(T) with x = B / n.
    epoch = (size * n / (2 * batch)) ** (2 / 3)
    return batch * epoch / n + size / math.sqrt(epoch)


def needed(target: float, dim: int, rho: float, batch: float | None = None) -> float:
    size = max(dim, dim**1.5 / rho) if batch is None else batch
    grid = np.geomspace(1, 1e24, 6001)
    return next(n for n in grid if naive_bound(n, dim, rho, size) <= target)


def test_rates_of_the_naive_method() -> None:
    """Zhang digest E2: d^(3/2) / (rho eps^3) with its batch; d^3 / (rho^2 eps^3) with 1."""

    def slope(first: float, last: float) -> float:
        return math.log10(last / first)

    for batch, dims, rhos in ((None, 1.5, -1), (1.0, 3, -2)):
        base = needed(0.1, 1000, 0.1, batch)
        assert slope(base, needed(0.01, 1000, 0.1, batch)) == pytest.approx(3, abs=0.02)
        found = slope(base, needed(0.1, 10_000, 0.1, batch))
        assert found == pytest.approx(dims, abs=0.05)
        found = slope(base, needed(0.1, 1000, 0.01, batch))
        assert found == pytest.approx(-rhos, abs=0.05)


def test_slopes_of_the_naive_settings() -> None:
    """The same of the settings' own bounds: n^(-1/3), whether or not privacy is free."""
    for epsilon, dim in ((0.1, 100), (1e4, 10)):
        found = [
            make("E", num_examples=n, epsilon=epsilon, dim=dim) for n in (10**8, 10**11)
        ]
        slope = math.log10(found[1].promise.bound / found[0].promise.bound) / 3
        assert slope == pytest.approx(-1 / 3, abs=0.02)
