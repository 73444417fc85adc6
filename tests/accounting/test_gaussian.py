import math

import dp_accounting as dp
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats

from jaxdp import accounting
from jaxdp.accounting import gaussian


def zcdp_std(epsilon: float, delta: float) -> float:
    """The textbook's std at distance 1: from rho + 2 sqrt(rho log(1/delta))."""
    log = math.log(1 / delta)
    root_rho = math.sqrt(log + epsilon) - math.sqrt(log)
    return 1 / math.sqrt(2) / root_rho


# epsilon, delta, then as printed in the notes: mu, std of the paper's formula, exact
# std, textbook zCDP, paper over exact, epsilon that the paper's noise really gives.
CLOSED_FORMS = [
    (1, 1e-5, 0.268051, 9.597063, 3.730632, 4.9006, 2.57, 0.356),
    (2, 1e-6, 0.448335, 5.386773, 2.230476, 2.7202, 2.42, 0.770),
    (2, 1e-5, 0.501552, 4.940868, 1.993812, 2.4993, 2.48, 0.735),
    (6, 1e-5, 1.309526, 1.719476, 0.763635, 0.8931, 2.25, 2.36),
    (8, 1e-5, 1.666031, 1.303475, 0.600229, 0.6903, 2.17, 3.23),
]


@pytest.mark.parametrize("row", CLOSED_FORMS)
def test_printed_closed_forms(row: tuple[float, ...]):
    epsilon, delta, mu, paper, exact, textbook, ratio, true_epsilon = row
    assert accounting.gaussian_mu(epsilon, delta) == pytest.approx(mu, abs=6e-7)
    assert 1 / accounting.gaussian_mu(epsilon, delta) == pytest.approx(exact, abs=6e-7)
    formula = 2 * math.sqrt(2 * math.log(math.e + epsilon / delta)) / epsilon
    assert formula == pytest.approx(paper, abs=6e-7)
    assert zcdp_std(epsilon, delta) == pytest.approx(textbook, abs=6e-5)
    assert formula / exact == pytest.approx(ratio, abs=6e-3)
    got = accounting.gaussian_epsilon(1 / formula, delta)
    assert got == pytest.approx(true_epsilon, abs=6e-4 if epsilon <= 2 else 6e-3)


def test_printed_rho():
    rho = accounting.gaussian_mu(2, 1e-5) ** 2 / 2
    assert rho == pytest.approx(0.1257771, abs=6e-8)
    rho = 10_000 / (2 * 199.3812**2)
    assert rho == pytest.approx(0.1257771, abs=6e-8)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 0.5, 3.0, 50.0])
def test_delta_is_the_integral_that_defines_it(mu: float, epsilon: float):
    """The mass of N(mu, 1) beyond e^epsilon times that of N(0, 1)."""
    start = epsilon / mu + mu / 2

    def excess(x: float) -> float:
        p, q = scipy.stats.norm.pdf(x, mu), scipy.stats.norm.pdf(x)
        return float(p - math.exp(epsilon) * q)

    want = 0.0
    if start < mu + 37:
        want, _ = scipy.integrate.quad(
            excess, start, max(start, mu) + 12, epsabs=0, epsrel=1e-9
        )
    got = accounting.gaussian_delta(mu, epsilon)
    assert got == pytest.approx(want, rel=1e-7, abs=1e-250)


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.5, 2.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.01, 0.5, 0.999])
def test_epsilon_is_the_least_that_holds(mu: float, delta: float):
    epsilon = accounting.gaussian_epsilon(mu, delta)
    assert accounting.gaussian_delta(mu, epsilon) <= delta
    if epsilon > 0:
        assert accounting.gaussian_delta(mu, epsilon * (1 - 1e-9)) > delta
    theirs = dp.get_epsilon_gaussian(1 / mu, delta)
    assert epsilon == pytest.approx(theirs, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 1.0, 8.0, 300.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_mu_is_the_largest_that_holds(epsilon: float, delta: float):
    mu = accounting.gaussian_mu(epsilon, delta)
    assert accounting.gaussian_delta(mu, epsilon) <= delta * (1 + 1e-12)
    assert accounting.gaussian_delta(mu * (1 + 1e-6), epsilon) > delta
    assert accounting.gaussian_epsilon(mu, delta) <= epsilon * (1 + 1e-12) + 1e-12
    assert 1 / mu == pytest.approx(dp.get_sigma_gaussian(epsilon, delta), rel=1e-8)


def test_limits():
    assert accounting.gaussian_delta(0.0, 1.0) == 0
    assert accounting.gaussian_delta(1.0, math.inf) == 0
    assert accounting.gaussian_delta(math.inf, 1.0) == 1
    assert accounting.gaussian_epsilon(0.0, 1e-5) == 0
    assert accounting.gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert accounting.gaussian_epsilon(1e-6, 1e-5) == 0


def test_raised_until_moves_by_little_and_only_up():
    assert gaussian.raised_until(lambda x: True, 2.0) == 2.0
    raised = gaussian.raised_until(lambda x: x >= 2.0 + 1e-12, 2.0)
    assert 2.0 + 1e-12 <= raised < 2.0 + 4e-12


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: accounting.gaussian_epsilon(-1.0, 1e-5), "mu"),
        (lambda: accounting.gaussian_epsilon(math.nan, 1e-5), "mu"),
        (lambda: accounting.gaussian_epsilon(1.0, 0.0), "delta"),
        (lambda: accounting.gaussian_mu(-1.0, 1e-5), "epsilon"),
        (lambda: accounting.gaussian_mu(1.0, 1.0), "delta"),
    ],
)
def test_refuses(call, names):
    with pytest.raises(ValueError, match=names):
        call()
