"""First-order and scalar estimates: their errors and clips; practical clips."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxdp.o2nc.oracle import ORACLES
from jaxdp.o2nc.theory import estimators
from tests.o2nc import numbers

Array = np.ndarray


def directions(rng: np.random.Generator, shape: tuple[int, ...], law: str) -> Array:
    """Unit vectors (..., m, d), independent or orthonormal."""
    gauss = rng.standard_normal(shape)
    if law == "orthonormal":
        return np.linalg.qr(gauss.swapaxes(-1, -2))[0].swapaxes(-1, -2)
    return gauss / np.linalg.norm(gauss, axis=-1, keepdims=True)


def ball(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Uniform in the unit ball: of the sphere in two more dimensions, all but two."""
    return directions(rng, (*shape[:-1], shape[-1] + 2), "sphere")[..., :-2]


# --- gradients -----------------------------------------------------------------------


def first(x: Array) -> Array:
    return np.eye(x.shape[-1])[0]


def triangle(x: Array, period: float) -> Array:
    """Of a wave along the first axis: opposite signs half a period apart."""
    sign = np.where(np.floor(2 * x[..., 0] / period) % 2, 1.0, -1.0)
    return sign[..., None] * first(x)


def kink(x: Array) -> Array:
    return np.sign(x[..., :1]) * first(x)


def norm(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def largest(x: Array) -> Array:
    """Of max |x_i|."""
    at = np.abs(x).argmax(axis=-1)[..., None]
    return np.where(np.arange(x.shape[-1]) == at, np.sign(x), 0.0)


MOVE = 0.02
GRADIENTS: list[Callable[[Array], Array]] = [
    functools.partial(triangle, period=2 * MOVE),
    kink,
    norm,
    largest,
]


def changes(
    grad: Callable[[Array], Array], difference: str, num: int, dim: int, m: int
) -> Array:
    """Mean changes (num, dim) of a gradient between 0 and MOVE along the first axis."""
    rng = np.random.default_rng(dim * 1000 + m)
    u = ball(rng, (num, m, dim))
    v = u if difference == "common" else ball(rng, (num, m, dim))
    return (grad(u) - grad(v + MOVE * first(u))).mean(axis=1)


@pytest.mark.parametrize("difference", ["common", "independent"])
@pytest.mark.parametrize(("dim", "m"), [(1, 16), (3, 1), (4, 64), (20, 200)])
def test_changes_of_gradients_are_within_their_clips(
    difference: Any, dim: int, m: int
) -> None:
    """Test 11 of Kornowski et al. at three probabilities, and surely."""
    num = 1000
    for grad in GRADIENTS:
        length = np.linalg.norm(changes(grad, difference, num, dim, m), axis=1)
        for failure in (0.3, 0.01, 1e-9):
            clip = numbers.diff_clip(dim, m, "ball", difference, MOVE, failure)
            over = int(np.sum(length > clip * (1 + 1e-9)))
            # Binomial: five standard deviations and five.
            assert over <= num * failure + 5 * math.sqrt(num * failure) + 5 * (
                failure > 1e-6
            )
        sure = numbers.diff_clip(dim, m, "ball", difference, MOVE)
        assert sure == 2 and np.max(length) <= 2 + 1e-9
        second = numbers.diff_moments(
            dim, m, "ball", difference, MOVE / math.sqrt(7 / 6)
        )
        # Of 1000 squares: a relative standard error of at most 0.05.
        assert np.mean(length**2) <= 1.3 * second.total


def test_a_wave_has_the_largest_scatter() -> None:
    """No less than 4 / m and 2 / m is right for all Lipschitz losses."""
    wave = GRADIENTS[0]
    for difference, want in (("common", 4), ("independent", 2)):
        found = changes(wave, difference, 4000, 4, 50)
        assert np.mean(np.sum(found**2, axis=1)) * 50 == pytest.approx(want, rel=0.15)
        moments = numbers.diff_moments(4, 50, "ball", difference, 1e-6)
        assert moments.direction * 50 == want
        assert moments.total == pytest.approx(moments.direction, rel=1e-6)


def test_a_gradient_is_never_longer_than_one() -> None:
    for failure in (None, 1e-9):
        assert numbers.grad_clip(30, 64, "ball", failure) == 1
    assert numbers.practical_grad_clip(30, 64, "ball") == 1
    assert numbers.grad_moments(30, 64, "ball") == (1, 1)


def test_clips_of_changes_in_the_digests_form_are_larger() -> None:
    """Kornowski digest 3.4: it adds what may be added in squares."""
    for m in (100, 10_000):
        for movement in (1e-4, 0.05):
            for difference, root in (("independent", math.sqrt(2)), ("common", 2.0)):
                found = numbers.diff_clip(50, m, "ball", difference, movement, 1e-8)
                smooth = estimators.kappa(50) * movement
                tail = root / math.sqrt(m) * math.sqrt(2 * math.log(1e8))
                digests = smooth + root / math.sqrt(m) + tail
                assert tail < found <= min(2.0, digests)
                assert found > min(2.0, 0.8 * digests)


# --- slopes --------------------------------------------------------------------------


def values(name: str, x: Array) -> Array:
    if name == "linear":
        return x[..., 0]
    if name == "norm":
        return np.linalg.norm(x + 0.1, axis=-1)
    return np.max(x, axis=-1)


def slopes(name: str, u: Array) -> Array:
    """(..., m) along directions of length sqrt(d), about 0, at a radius of 1."""
    return math.sqrt(u.shape[-1]) * (values(name, u) - values(name, -u)) / 2


@pytest.mark.parametrize("law", ["orthonormal", "sphere"])
@pytest.mark.parametrize(("dim", "m"), [(1, 1), (2, 2), (5, 5), (30, 1), (60, 40)])
def test_slopes_are_within_their_clips(law: Any, dim: int, m: int) -> None:
    rng = np.random.default_rng(dim + m)
    num = 1000
    u = directions(rng, (num, m, dim), law)
    for name in ("linear", "norm", "max"):
        length = np.linalg.norm(slopes(name, u), axis=1)
        for failure in (0.3, 0.01, 1e-9):
            clip = numbers.slopes_clip(dim, m, law, failure)
            over = int(np.sum(length > clip * (1 + 1e-9)))
            assert over <= num * failure + 5 * math.sqrt(num * failure) + 5 * (
                failure > 1e-6
            )
        assert np.max(length) <= numbers.slopes_clip(dim, m, law) * (1 + 1e-9)


def test_clips_of_slopes() -> None:
    """Those of GRAD for orthonormal directions; for others coinciding ones are worst."""
    for failure in (None, 1e-8):
        grad = numbers.grad_clip(50, 20, "orthonormal", failure)
        found = numbers.slopes_clip(50, 20, "orthonormal", failure)
        assert found == pytest.approx(grad * 20 / math.sqrt(50))
    u = np.broadcast_to(np.eye(7)[0], (3, 7))
    length = np.linalg.norm(slopes("linear", u))
    assert length == pytest.approx(numbers.slopes_clip(7, 3, "sphere"))
    # The norm is near sqrt(m), whatever the largest of the slopes is.
    near = numbers.slopes_clip(1000, 400, "sphere", 1e-8)
    want = math.sqrt(1000 / 999) * (20 + math.sqrt(2 * math.log(1e8)))
    assert near == pytest.approx(want)
    one = math.sqrt(1000 / 999) * math.sqrt(2 * math.log(2e8))
    assert numbers.slopes_clip(1000, 1, "sphere", 1e-8) == pytest.approx(one)


# --- practical clips -----------------------------------------------------------------


@pytest.mark.parametrize("law", ["orthonormal", "sphere"])
@pytest.mark.parametrize("dim", [2, 10, 100])
def test_linear_losses_seldom_reach_practical_clips(law: Any, dim: int) -> None:
    """Kornowski digest 3.4: none of 2500 there; here no more than 1 in 1000 must be.

    Of 2500 with probability 1/1000 each, more than 14 are with probability 1e-7.
    """
    rng = np.random.default_rng(dim)
    for m in (1, 4, 16, 64):
        if law == "orthonormal" and m > dim:
            continue
        u = directions(rng, (2500, m, dim), law)
        c = slopes("linear", u)
        grad = np.einsum("nm,nmd->nd", c, u) * math.sqrt(dim) / m
        clip = numbers.practical_grad_clip(dim, m, law)
        length = np.linalg.norm(grad, axis=1)
        assert np.sum(length > clip * (1 + 1e-9)) <= 14
        assert clip < 3.5 * np.quantile(length, 0.999)
        assert clip <= numbers.grad_clip(dim, m, law)
        clip = numbers.practical_slopes_clip(dim, m, law)
        assert np.sum(np.linalg.norm(c, axis=1) > clip * (1 + 1e-9)) <= 14
        assert clip <= numbers.slopes_clip(dim, m, law)


def test_practical_clips_of_the_digest() -> None:
    """Kornowski digest 3.4, d = 1000, m = 16; and far below the proven ones."""
    assert numbers.practical_grad_clip(1000, 16, "sphere") == pytest.approx(
        17.6, abs=0.1
    )
    assert numbers.practical_grad_clip(1000, 16, "orthonormal") < 16
    for law in ORACLES["zeroth_order"].directions:
        proven = numbers.grad_clip(1000, 64, law, 1e-12)
        assert numbers.practical_grad_clip(1000, 64, law) < 0.6 * proven
    clip = numbers.practical_diff_clip(100, 64, "sphere", "antithetic", 0.01, 0.5)
    want = 0.005 * math.sqrt(estimators.kappa(100) ** 2 + 100**2 / 64)
    assert clip == pytest.approx(want)


@pytest.mark.parametrize("difference", ["common", "independent"])
def test_kinks_seldom_reach_practical_clips_of_gradients(difference: Any) -> None:
    for dim, m in ((4, 64), (20, 200)):
        found = changes(kink, difference, 2500, dim, m)
        clip = numbers.practical_diff_clip(dim, m, "ball", difference, MOVE)
        assert np.sum(np.linalg.norm(found, axis=1) > clip) <= 14
        proven = numbers.diff_clip(dim, m, "ball", difference, MOVE, 1e-12)
        assert clip < (0.6 if difference == "common" else 0.9) * proven


@pytest.mark.parametrize("oracle", ["zeroth_order", "first_order"])
def test_practical_clips_are_fractions_of_less_than_what_is_sure(oracle: Any) -> None:
    moves = np.geomspace(1e-4, 4, 9)
    for law in ORACLES[oracle].directions:
        for difference in ORACLES[oracle].differences:
            for dim, m in ((1, 1), (2, 2), (40, 16)):
                found, half = (
                    numbers.practical_diff_clip(dim, m, law, difference, moves, x)
                    for x in (1.0, 0.5)
                )
                sure = numbers.diff_clip(dim, m, law, difference, moves)
                assert np.all(found <= sure) and np.all(np.diff(found) >= 0)
                assert half == pytest.approx(found / 2)
