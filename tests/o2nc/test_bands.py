"""Banded matrices that are optimised: they are at their optimum, and below the root."""

import numpy as np
import pytest

from jaxdp.kernels import prefix_noise, toeplitz_noise
from jaxdp.o2nc.bands import optimised_bands


def worst(
    column: tuple[float, ...], period: int, separation: int | None = None
) -> float:
    """Noise in the worst prefix sum at equal sensitivity, as a plan computes it."""
    kernel = toeplitz_noise.Banded(period, column)
    moved = prefix_noise.sensitivity(kernel, np.ones(period), separation)
    return moved * float(kernel.prefix_norms().max())


@pytest.mark.parametrize(
    ("period", "bands", "separation"),
    [(100, 4, None), (1000, 10, None), (60, 6, 6), (64, 4, 6), (390, 50, 100)],
)
def test_bands_are_at_their_optimum(
    period: int, bands: int, separation: int | None
) -> None:
    """No small change of a number lowers the worst noise, and the root has more."""
    found = optimised_bands(period, bands, separation)
    assert len(found) == bands
    assert [round(c, 6) for c in found] == list(found)
    best = worst(found, period, separation)
    for i in range(1, bands):
        for change in (-2e-3, 2e-3):
            other = np.array(found)
            other[i] += change
            column = tuple(np.minimum.accumulate(other))
            assert worst(column, period, separation) > best
    root = toeplitz_noise.SquareRoot(period, bands).coefficients()[:bands]
    assert best < 0.99 * worst(tuple(root), period, separation)


def test_two_bands_are_those_of_a_search() -> None:
    grid = np.linspace(0, 1, 1001)
    noises = [worst((1.0, c), 200) for c in grid]
    assert optimised_bands(200, 2)[1] == pytest.approx(
        grid[np.argmin(noises)], abs=6e-4
    )


def test_bands_of_short_periods_and_of_all_steps() -> None:
    """One band is independent noise; of all bands the square root is the best."""
    assert optimised_bands(5, 1) == optimised_bands(1, 3) == (1.0,)
    assert len(optimised_bands(5, 9)) == 5
    root = toeplitz_noise.SquareRoot(60).coefficients()
    np.testing.assert_allclose(optimised_bands(60, 60), root, atol=1e-4)
