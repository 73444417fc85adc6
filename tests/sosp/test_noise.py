"""Noise of the search for second-order points, on the kernels' matrices.

Why it begins again at a refresh and at a pass. How the library draws and adds it is seen in
test_against_reference.py and in test_spider.py.
"""

import numpy as np
import pytest

from jaxdp.kernels import prefix_noise, tree_noise
from tests.sosp.cases import blocks

TRAILING = [0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0, 4]
#: K: worst and mean variance of the tree, and the worst of the square root's factor.
VARIANCES = {
    1: (1, 1, 1),
    7: (9, 5.14, 2.80),
    15: (16, 8.53, 3.698),
    31: (25, 12.9, 4.65),
    127: (49, 24.7, 6.800),
    1023: (100, 50.0, 10.71),
}


def test_the_tree_of_the_kernels_is_that_of_the_reference() -> None:
    """Streamed, as sums of blocks, and as the kernel's matrix: for all prefixes."""
    size = 31
    rows = {block: i for i, block in enumerate(sorted(set(map_blocks(size))))}
    streamed = np.zeros((5, len(rows)))
    kernel = tree_noise.Stored(size)
    prefix = np.tri(size) @ np.linalg.inv(kernel.strategy())
    before: set[tuple[int, int]] = set()
    for t in range(1, size + 1):
        h = ((t & -t) - 1).bit_count()
        if t <= 16:
            assert h == TRAILING[t - 1]
        assert kernel.increment_norms()[t - 1] ** 2 == pytest.approx(1 + h)
        streamed[:h] = 0
        streamed[h] = np.eye(len(rows))[rows[t - 2**h + 1, t]]
        assert np.count_nonzero(streamed.any(axis=1)) == t.bit_count()
        here = blocks(t)
        expected = np.zeros(len(rows))
        expected[[rows[block] for block in here]] = 1
        np.testing.assert_array_equal(streamed.sum(axis=0), expected)
        # The kernel's draw of step u is the noise of the block that ends at u.
        ends = np.zeros(size)
        ends[[last - 1 for _, last in here]] = 1
        np.testing.assert_allclose(prefix[t - 1], ends, atol=1e-12)
        # Nothing is let out on old noise alone.
        assert set(here) - before
        before = set(here)
    used = np.zeros(8, int)
    for first, last in set(map_blocks(8)):
        used[first - 1 : last] += 1
    assert used.tolist() == [4, 3, 3, 2, 3, 2, 2, 1]


def map_blocks(size: int) -> list[tuple[int, int]]:
    return [block for t in range(1, size + 1) for block in blocks(t)]


@pytest.mark.parametrize("period", VARIANCES)
def test_variances_at_equal_sensitivity(period: int) -> None:
    worst, mean, root = VARIANCES[period]
    tree, toeplitz, alone = (
        prefix_noise.make(name, period)
        for name in ("tree", "sqrt_toeplitz", "independent")
    )

    def law(kernel: prefix_noise.PrefixNoise) -> np.ndarray:
        return kernel.prefix_norms() ** 2 * np.max(kernel.column_norms()) ** 2

    assert law(tree).max() == pytest.approx(worst)
    # Of the digits that are printed.
    assert law(tree).mean() == pytest.approx(mean, rel=3e-3)
    assert law(toeplitz).max() == pytest.approx(root, abs=6e-3)
    assert law(alone).max() == pytest.approx(period)
    # Both factors are A_K.
    f = np.cumprod([1.0, *((2 * i - 1) / (2 * i) for i in range(1, period))])
    a = np.cumsum(f**2)
    np.testing.assert_allclose(toeplitz.prefix_norms() ** 2, a)
    assert np.max(toeplitz.column_norms()) ** 2 == pytest.approx(a[-1])
    assert a[-1] ** 2 == pytest.approx(root, abs=6e-3)


def sequence_sensitivity(strategy: np.ndarray, first: int, end: int) -> float:
    """How far prefix sums move, in stds, when steps first..end - 1 (from 1) hold 1 more."""
    move = np.zeros(len(strategy))
    move[first - 1 : end - 1] = 1
    increments = np.diff(move, prepend=0)
    return float(np.linalg.norm(strategy @ increments))


@pytest.mark.parametrize(("steps", "squared"), [(15, 7), (31, 9), (127, 13)])
def test_noise_that_does_not_begin_again_is_too_small(steps: int, squared: int) -> None:
    """A record counts from its step until the refresh; the tree goes on, or begins again.

    sqrt(2 L - 1) against sqrt(L), the worst for the first record and a refresh after the
    longest block.
    """
    levels = steps.bit_length()
    whole = tree_noise.Stored(steps).strategy()
    found = {
        (j, q): sequence_sensitivity(whole, j, q)
        for q in range(2, steps + 2)
        for j in range(1, q)
    }
    worst = max(found, key=lambda key: found[key])
    assert found[worst] ** 2 == pytest.approx(squared) and squared == 2 * levels - 1
    assert found[1, 2 ** (levels - 1) + 1] == pytest.approx(found[worst])
    restarted = max(
        sequence_sensitivity(tree_noise.Stored(q - 1).strategy(), j, q)
        for q in (2 ** (levels - 1) + 1, steps, steps + 1)
        for j in range(1, q)
    )
    assert restarted**2 == pytest.approx(levels)


@pytest.mark.parametrize("levels", [4, 10])
def test_a_tree_across_two_passes_is_too_small(levels: int) -> None:
    """A record at leaves 1 and 2 of one tree costs 4 L - 3, where 2 L is charged."""
    strategy = tree_noise.Stored(2**levels - 1).strategy()
    both = np.linalg.norm(strategy[:, 0] + strategy[:, 1]) ** 2
    assert both == pytest.approx(4 * levels - 3)
    charged = 2 * np.max(np.linalg.norm(strategy, axis=0)) ** 2
    assert charged == pytest.approx(2 * levels)


@pytest.mark.parametrize(("period", "ratio"), [(15, 1.66), (127, 1.75)])
def test_the_square_root_across_two_passes(period: int, ratio: float) -> None:
    columns = prefix_noise.make("sqrt_toeplitz", period).strategy()
    gram = columns.T @ columns
    pairs = np.diag(gram)[:, None] + np.diag(gram) + 2 * gram
    np.fill_diagonal(pairs, 0)
    assert pairs.max() / (2 * np.diag(gram).max()) == pytest.approx(ratio, abs=0.006)
