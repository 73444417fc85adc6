"""Worst pairs of output distributions that the accountants compose, checked numerically.

The proofs are in docs/concepts/accounting.md.
"""

import numpy as np
import pytest

from jaxdp.accounting import consistency

ALPHAS = np.exp([-0.5, -0.1, 0.0, 0.1, 0.5])

# --- Poisson samples of vectors: (1-q) N(0, I) + q N(v, I) against the same with w -----

SIDE = np.linspace(-9.0, 9.0, 401)
WEIGHT = np.exp(-(SIDE**2) / 2) * (SIDE[1] - SIDE[0]) / np.sqrt(2 * np.pi)
#: Of the sum over the grid, which has kinks between its points.
GRID = 1e-4


def plane_deltas(q: float, v: np.ndarray, w: np.ndarray) -> np.ndarray:
    """sup P(S) - alpha R(S) for moves v and w in the plane, summed over a grid."""

    def ratio(move: np.ndarray) -> np.ndarray:
        inner = move[0] * SIDE[:, None] + move[1] * SIDE
        return (1 - q) + q * np.exp(inner - move @ move / 2)

    p, r = ratio(v), ratio(w)
    return np.array([WEIGHT @ np.maximum(p - a * r, 0) @ WEIGHT for a in ALPHAS])


def line_deltas(q: float, a: float, b: float) -> np.ndarray:
    """The same of moves a and b <= a along one line."""
    deltas = [consistency._mixture_delta(q, a, b, float(np.log(x))) for x in ALPHAS]
    return np.array(deltas)


@pytest.mark.parametrize(("q", "clip"), [(0.05, 2.0), (0.3, 0.8), (1.0, 0.5)])
def test_opposite_moves_on_a_line_are_the_worst_of_vectors(q: float, clip: float):
    """And a pair that moves on one side only is not: it would be exceeded."""
    worst = line_deltas(q, clip, -clip)
    one_sided = np.maximum(line_deltas(q, clip, 0.0), line_deltas(q, 0.0, -clip))
    opposite = np.array([clip, 0.0]), np.array([-clip, 0.0])
    np.testing.assert_allclose(plane_deltas(q, *opposite), worst, atol=GRID)
    rng, exceeded = np.random.default_rng(0), 0
    for _ in range(15):
        v, w = rng.normal(size=(2, 2))
        v *= clip * rng.uniform() ** 0.25 / np.linalg.norm(v)
        w *= clip * rng.uniform() ** 0.25 / np.linalg.norm(w)
        got = plane_deltas(q, v, w)
        assert np.all(got <= worst + GRID)
        exceeded += bool(np.any(got > one_sided + 10 * GRID))
        # A record that contributes nothing in one data set: the pair of one side.
        for pair in ((v, 0 * w), (0 * v, w)):
            assert np.all(plane_deltas(q, *pair) <= one_sided + GRID)
    assert exceeded >= 5


@pytest.mark.parametrize("q", [0.1, 1.0])
def test_the_loss_grows_with_the_angle_and_with_either_move(q: float):
    """The three steps of the proof."""

    def at(angle: float, v: float = 0.9, w: float = 0.6) -> np.ndarray:
        turned = w * np.array([np.cos(angle), np.sin(angle)])
        return plane_deltas(q, np.array([v, 0.0]), turned)

    angles = [at(angle) for angle in np.linspace(0, np.pi, 7)]
    left = [at(np.pi, v=v) for v in (0.0, 0.3, 0.6, 0.9)]
    right = [at(np.pi, w=w) for w in (0.0, 0.3, 0.6, 0.9)]
    for curve in (angles, left, right):
        assert np.all(np.diff(curve, axis=0) > -2 * GRID)
        assert np.sum(curve[-1] > curve[0] + 10 * GRID) >= 3  # at least: 1 - alpha
