"""What is proven where every step reads all records: noise, directions, population."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import betainc

from jaxdp import accounting
from jaxdp.o2nc.theory import bounds, budget, estimators
from jaxdp.o2nc.theory.bounds import Constants, Schedule
from jaxdp.o2nc.theory.estimators import Estimator, SlopesEstimator
from tests.o2nc import numbers
from tests.o2nc.numbers import promise

Array = np.ndarray

SETTING: dict[str, Any] = {
    "dim": 6,
    "lipschitz": 2.0,
    "initial_gap": 3.0,
    "smoothing_radius": 0.5,
    "num_directions": 4,
    "direction": "orthonormal",
    "difference": "antithetic",
    "share_directions": False,
    "period": 5,
    "restart_batch_size": 40,
    "batch_size": 40,
    "window": 20,
    "num_windows": 7,
    "max_step": 0.01,
    "reset": True,
    "noise_variance": 0.3,
    "multi_pass": True,
}


# --- the promise ---------------------------------------------------------------------


def test_only_directions_and_noise_make_errors() -> None:
    found = promise(**SETTING)
    assert found.restart_variance == pytest.approx(4 * 36 / (5 * 4 * 40))
    grows = 4 * 7 / 6 * (0.01 / 0.5) ** 2 * 36 / 4 / 40
    assert found.difference_variance == pytest.approx(4 * grows)
    want = bounds.generalisation(6, 40, 2.0, 0.5, 0.01 * 140 + 0.5)
    assert found.generalisation == want > 0
    total = found.start + found.regret + found.estimation + want
    assert found.bound == pytest.approx(total)
    assert found.goldstein_radius == 1.0
    assert f"generalisation {want:.3g}, rounding 0; variance" in str(found)
    single = promise(**SETTING | {"multi_pass": False})
    assert single.generalisation == 0 and "generalisation" not in str(single)
    assert single.restart_variance == pytest.approx(found.restart_variance)
    assert found.bound - want == pytest.approx(single.bound)
    # Shared directions are not averaged out by records.
    shared = promise(**SETTING | {"share_directions": True})
    assert shared.restart_variance == pytest.approx(40 * found.restart_variance)
    ball = {"direction": "ball", "difference": "independent"}
    gradients = promise(**SETTING | ball)
    assert gradients.restart_variance == pytest.approx(4 / 40)
    assert gradients.difference_variance == pytest.approx(4 * 4 * 2 / (4 * 40))
    # A fresh batch scatters besides.
    batch = promise(**SETTING | ball | {"multi_pass": False})
    assert batch.difference_variance > gradients.difference_variance


# --- noise ---------------------------------------------------------------------------

PROBLEM: dict[str, Any] = {
    "num_examples": 1000,
    "dim": 6,
    "epsilon": 2.0,
    "delta": 1e-6,
    "relation": "replace_one",
    "lipschitz": 2.0,
    "initial_gap": 3.0,
    "smoothing_radius": 0.5,
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("period", "steps"), [(1, 30), (4, 30), (30, 30), (7, 1000)])
def test_no_division_of_the_budget_has_less_noise(
    period: int, steps: int, scaled: bool
) -> None:
    """Brute force over the share of restarts."""
    p = Constants(**PROBLEM)
    estimator = Estimator(4, "orthonormal", "antithetic")
    c1, c2 = 3.0, 0.4
    schedule = Schedule(
        period, 1, 1, steps, 1, 0.1, multi_pass=True, scale_with_movement=scaled
    )
    found = budget.noise_variance(p, estimator, schedule, (c1, c2))
    first = math.ceil(steps / period)
    mu = accounting.gaussian_mu(2.0, 1e-6)
    share = np.linspace(0, 1, 20_001)[1 : None if period == 1 else -1]
    one = first * (2 * c1 / 1000 / mu) ** 2 / share
    rest = np.zeros_like(one)
    if period > 1:
        each = (steps - first) * (2 * c2 / 1000 / mu) ** 2 / (1 - share)
        rest = (period - 1) * each * (7 / 24 if scaled else 1)
    assert found == pytest.approx(6 * np.min(one + rest), rel=1e-5)
    slopes = SlopesEstimator(4, "orthonormal", "antithetic", True)
    half = budget.noise_variance(p, slopes, schedule, (c1, c2))
    assert half == pytest.approx(found / 4)


def test_noise_of_movements() -> None:
    """Saturated steps on a line: 7/24 of the variance at twice the longest step."""
    rng = np.random.default_rng(0)
    runs, period, c1, c2 = 20_000, 9, 3.0, 0.4
    p = Constants(**PROBLEM)
    estimator = Estimator(4, "orthonormal", "antithetic")
    schedule = Schedule(period, 1, 1, 90, 1, 0.1, True, True, True)
    found = budget.noise_variance(p, estimator, schedule, (c1, c2)) / 6
    one, two = math.sqrt(10) * 2 * c1 / 1000, math.sqrt(80) * 2 * c2 / 1000
    one, two = one / p.mu, two * math.sqrt(7 / 24 * 8) / p.mu
    s = rng.random((runs, period))
    move = (1 - s[:, :-1] + s[:, 1:]) / 2  # Over 2 D.
    assert np.mean(move**2) == pytest.approx(7 / 24, rel=0.01)
    noise = rng.standard_normal((runs, period))
    noise[:, 0] *= math.sqrt(one * (one + two))
    noise[:, 1:] *= move * math.sqrt(two * (one + two) / (7 / 24 * 8))
    # A relative standard error of 1% of the mean of 20000 squares.
    assert np.mean(noise.sum(axis=1) ** 2) == pytest.approx(found, rel=0.06)


# --- a whole run ---------------------------------------------------------------------


class Distances:
    """Losses |<a_i, x> - b_i|, and their smoothed mean's exact gradient."""

    def __init__(self, num: int, dim: int, radius: float) -> None:
        rng = np.random.default_rng(3)
        self.a = rng.standard_normal((num, dim))
        self.a /= np.linalg.norm(self.a, axis=1, keepdims=True)
        self.b = 0.3 * rng.standard_normal(num)
        self.radius = radius

    def values(self, x: Array) -> Array:
        """(..., n, m) of points (..., n, m, d)."""
        return np.abs(np.einsum("nd,...nmd->...nm", self.a, x) - self.b[:, None])

    def mean(self, x: Array) -> Array:
        return np.abs(x @ self.a.T - self.b).mean(axis=-1)

    def gradient(self, x: Array) -> Array:
        """(..., d): of the mean over the ball, by the incomplete beta function."""
        s = (x @ self.a.T - self.b) / self.radius
        dim = self.a.shape[1]
        inside = betainc(0.5, (dim + 1) / 2, np.minimum(s**2, 1))
        return (np.sign(s) * inside) @ self.a / len(self.a)


@pytest.mark.parametrize("law", ["orthonormal", "sphere"])
def test_a_run_s_errors_are_within_the_promise(law: Any) -> None:
    """Algorithm 4 with noise scaled by the movement, its learner, and 60 windows."""
    loss, rng = Distances(15, 4, 0.5), np.random.default_rng(0)
    m, period, window, count, radius = 2, 6, 12, 6, 0.5
    runs, n, d = 60, 15, 4
    step = radius / bounds.window_radius(window, True)
    stds = (0.1, 0.05)
    noise = d * (stds[0] ** 2 + (period - 1) * 7 / 24 * stds[1] ** 2)
    proven = promise(
        dim=d,
        lipschitz=1.0,
        initial_gap=float(loss.mean(np.ones(d))),
        smoothing_radius=radius,
        num_directions=m,
        direction=law,
        difference="antithetic",
        share_directions=False,
        period=period,
        restart_batch_size=n,
        batch_size=n,
        window=window,
        num_windows=count,
        max_step=step,
        reset=True,
        noise_variance=noise,
        multi_pass=True,
    )

    def estimate(x: Array, u: Array) -> Array:
        """GRAD of every record, (runs, n, d)."""
        at = x[:, None, None]
        slope = loss.values(at + radius * u) - loss.values(at - radius * u)
        return np.einsum("rnm,rnmd->rnd", slope * d / (2 * radius * m), u)

    def draw() -> Array:
        gauss = rng.standard_normal((runs, n, m, d))
        if law == "orthonormal":
            return np.linalg.qr(gauss.swapaxes(-1, -2))[0].swapaxes(-1, -2)
        return gauss / np.linalg.norm(gauss, axis=-1, keepdims=True)

    x, delta = np.ones((runs, d)), np.zeros((runs, d))
    query = release = x
    errors, clean, stationary = np.zeros((window * count, 2)), 0 * x, []
    for t in range(window * count):
        if t % window == 0:
            delta, gradients = 0 * delta, []
        before, query = query, x + rng.random((runs, 1)) * delta
        x = x + delta
        u, fresh = draw(), rng.standard_normal((runs, d))
        if t % period == 0:
            mean = estimate(query, u).mean(axis=1)
            clean, release = mean, mean + stds[0] * fresh
        else:
            mean = (estimate(query, u) - estimate(before, u)).mean(axis=1)
            move = np.linalg.norm(query - before, axis=1, keepdims=True)
            clean = clean + mean
            release = release + mean + stds[1] * move / (2 * step) * fresh
        true = loss.gradient(query)
        errors[t] = [np.mean(np.sum((g - true) ** 2, 1)) for g in (clean, release)]
        gradients.append(true)
        delta = delta - proven.learning_rate * release
        length = np.linalg.norm(delta, axis=1, keepdims=True)
        delta = delta * np.minimum(1, step / np.maximum(length, 1e-30))
        if (t + 1) % window == 0:
            stationary.append(np.linalg.norm(np.mean(gradients, 0), axis=1).mean())
    by_phase = errors.reshape(-1, period, 2).mean(axis=0)
    # Means of 60 runs and 12 periods: a relative standard error of about 3%.
    assert by_phase[0, 0] <= 1.15 * proven.restart_variance
    allowed = proven.restart_variance + proven.difference_variance
    assert np.all(by_phase[:, 0] <= 1.15 * allowed)
    assert np.all(by_phase[:, 1] <= 1.15 * (allowed + noise))
    assert by_phase[-1, 1] > by_phase[0, 1] > d * stds[0] ** 2
    assert np.mean(stationary) <= proven.bound - proven.generalisation


@pytest.mark.parametrize("law", ["orthonormal", "sphere"])
def test_linear_losses_attain_the_error_of_directions(law: Any) -> None:
    """All of V_d / m but what the true gradient itself takes."""
    rng = np.random.default_rng(1)
    n, m, d = 5, 3, 8
    a = np.eye(d)[:n]
    u = rng.standard_normal((4000, n, m, d))
    if law == "orthonormal":
        u = np.linalg.qr(u.swapaxes(-1, -2))[0].swapaxes(-1, -2)
    else:
        u /= np.linalg.norm(u, axis=-1, keepdims=True)
    c = np.einsum("rnmd,nd->rnm", u, a) * d
    mean = np.einsum("rnm,rnmd->rd", c, u) / (m * n)
    error = np.mean(np.sum((mean - a.mean(0)) ** 2, axis=1)) * n
    want = d / m - 1 if law == "orthonormal" else (d - 1) / m
    assert error == pytest.approx(want, rel=0.06)  # 4000 squares: 2%.
    assert want <= numbers.grad_moments(d, m, law).direction


# --- records and the population ------------------------------------------------------


def test_generalisation_by_hand() -> None:
    found = bounds.generalisation(10, 10**6, 2.0, 0.5, 30.0)
    net = 1 + 4 * 30 * estimators.kappa(10) * 1000 / 0.5
    want = 2 / 1000 * (2 + math.sqrt(20 * math.log(net)))
    assert found == pytest.approx(want)
    sure = bounds.generalisation(10, 10**6, 2.0, 0.5, 30.0, 1e-9)
    logs = 20 * math.log(net) + 2 * math.log(1e9)
    assert sure == pytest.approx(2 / 1000 * (2 + math.sqrt(logs)))
    assert bounds.generalisation(10, 1, 2.0, 0.5, 30.0) == 4.0


def cells(rng: np.random.Generator, runs: int, n: int, count: int) -> Array:
    """Mean slopes (runs, count) of n records: 0 or 1 in every cell, by a coin."""
    return rng.binomial(n, 0.5, size=(runs, count)) / n


@pytest.mark.parametrize("width", [0.002, 0.05, 1.0])
def test_no_sup_over_a_line_is_above_it(width: float) -> None:
    """Slopes by coins in cells narrower than, and as wide as, the ball."""
    rng = np.random.default_rng(0)
    runs, n, radius, reach = 200, 50, 0.5, 20.0
    count = round(2 * (reach + radius) / width)
    slopes = 2 * cells(rng, runs, n, count) - 1
    sums = np.cumsum(np.pad(slopes, ((0, 0), (1, 0))), axis=1)
    ball = max(1, round(2 * radius / width))
    smooth = np.abs(sums[:, ball:] - sums[:, :-ball]) / ball
    worst = smooth.max(axis=1)
    bound = bounds.generalisation(1, n, 1.0, radius, reach)
    assert np.mean(worst) <= bound
    seldom = bounds.generalisation(1, n, 1.0, radius, reach, 0.01)
    # Binomial: 2 expected; more than 14 with probability 1e-8.
    assert np.sum(worst > seldom) <= 14
    if width == 1.0:
        assert np.mean(worst) > 0.25 * bound


def test_without_smoothing_there_is_no_such_bound() -> None:
    """Kornowski digest E15: every slope of F is 1/2; one of the records' mean is 0."""
    for n in (5, 10):
        slopes = cells(np.random.default_rng(n), 1, n, 20 * 2**10)[0]
        assert slopes.min() == 0  # But for a probability of exp(-20) at most.
        # Of the ball of a hundredth of the line, there is.
        ball = len(slopes) // 100
        sums = np.cumsum(np.pad(slopes, (1, 0)))
        smooth = (sums[ball:] - sums[:-ball]) / ball
        assert np.max(np.abs(smooth - 0.5)) < 0.2
