"""Audits of functions without plans of their own; planted faults name these tests.

Where nothing is planted, an audit fails by chance with probability 1e-6 at most.
"""

import pytest

from jaxdp.auditing import functions


def test_private_gap() -> None:
    found = functions.private_gap()
    assert found.passed
    assert found.epsilon == pytest.approx(8.0, abs=0.01)  # Of a Gaussian, mu = 1 / 0.6.
    assert 0.35 * found.epsilon < found.epsilon_lower


def test_private_goldstein() -> None:
    found = functions.private_goldstein()
    assert found.passed
    assert found.epsilon == pytest.approx(2.0, abs=0.01)  # mu = 1 / 2.
    assert 0.7 * found.epsilon < found.epsilon_lower


def test_tune() -> None:
    """No chance in it: more than one trial's 1.0, and less than the three charged."""
    found = functions.tune()
    assert found.passed
    assert found.epsilon == pytest.approx(3.0, abs=0.01)
    assert found.epsilon_lower > 1.4


def test_the_law_of_trials_is_that_of_the_code() -> None:
    """Geometric at shape 1, whatever the candidates; not all paths are followed."""
    law = functions.law_of_trials(3.0, 5)
    for count, probability in law.items():
        assert probability == pytest.approx((2 / 3) ** (count - 1) / 3, rel=1e-12)
    assert sorted(law) == list(range(1, len(law) + 1))
    assert 0 < 1 - sum(law.values()) < 1e-4
