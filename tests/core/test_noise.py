import copy
import hashlib
import math
import pickle
import struct
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats

from jaxdp.core import noise

SECRET = bytes(range(32))
# Every statistical bound of this file fails with at most this probability, had the seed
# been drawn at random; the seeds are fixed.
FAILURE = 1e-7


def coins(*context: str | bytes | int) -> noise.Coins:
    return noise.Coins(SECRET, "test", *context)


def close(sample: np.ndarray, mean: float, std: float) -> bool:
    """Whether the mean of a sample is as expected, by the central limit theorem."""
    bound = scipy.stats.norm.isf(FAILURE / 2) * std / math.sqrt(sample.size)
    return bool(abs(sample.mean() - mean) < bound)


def gaussian_pmf(std: float, z: np.ndarray) -> np.ndarray:
    support = np.arange(-60, 61)
    return np.exp(-(z**2) / 2 / std**2) / np.exp(-(support**2) / 2 / std**2).sum()


def laplace_pmf(scale: float, z: np.ndarray) -> np.ndarray:
    ratio = math.exp(-1 / scale)
    return (1 - ratio) / (1 + ratio) * ratio ** np.abs(z)


def chi_square_p(sample: np.ndarray, pmf, scale: float) -> float:
    """P-value of a sample of integers against a pmf, rare tails put together."""
    edge = max(z for z in range(60) if sample.size * pmf(scale, np.array(z)) > 20)
    z = np.arange(-edge, edge + 1)
    p = pmf(scale, z)
    counts = np.array([np.count_nonzero(sample == k) for k in z])
    rest = (1 - p.sum(), sample.size - counts.sum())
    expected = sample.size * np.append(p, rest[0])
    observed = np.append(counts, rest[1])
    statistic = np.sum((observed - expected) ** 2 / expected)
    return float(scipy.stats.chi2.sf(statistic, z.size))


# Coins.


def test_stream_is_what_the_docstring_says():
    """Fixed for ever: stored ledgers regenerate their noise from it."""

    def part(kind: bytes, content: bytes) -> bytes:
        return kind + struct.pack("<Q", len(content)) + content

    prefix = part(b"b", SECRET) + part(b"s", b"test") + part(b"i", b"-7")
    want = b""
    for index in range(2):
        block = prefix + b"#" + struct.pack("<Q", index)
        want += hashlib.shake_256(block).digest(4096)
    stream = coins(-7)
    got = b"".join(stream.bits(64).to_bytes(8, "little") for _ in range(1024))
    assert got == want


def test_samples_are_fixed_for_ever():
    gaussian = noise.discrete_gaussian(coins("golden"), 1_000_000, 4)
    laplace = noise.discrete_laplace(coins("golden"), Fraction(7, 2), 6)
    assert gaussian.tolist() == [1372570, -768557, 1251555, 237358]
    assert laplace.tolist() == [3, 0, 4, 4, 4, -1]


def test_same_secret_and_context_same_coins():
    a, b = (noise.discrete_gaussian(coins(1, b"x"), 50, (5, 7)) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert a.shape == (5, 7)
    assert a.dtype == np.int64


@pytest.mark.parametrize(
    "other",
    [
        noise.Coins(SECRET[:-1] + b"\0", "a", "bc"),
        noise.Coins(SECRET, "ab", "c"),
        noise.Coins(SECRET, "abc"),
        noise.Coins(SECRET, "a", b"bc"),
        noise.Coins(SECRET, "a", "bc", ""),
        noise.Coins(SECRET, "a", "bc", 0),
        noise.Coins(SECRET + b"s" + struct.pack("<Q", 1) + b"a", "bc"),
    ],
)
def test_other_secret_or_context_other_coins(other: noise.Coins):
    this = noise.Coins(SECRET, "a", "bc")
    equal = sum(this.bits(64) == other.bits(64) for _ in range(100))
    assert equal == 0


def test_integer_and_text_of_it_differ():
    assert coins(1).bits(64) != coins("1").bits(64)
    assert coins(-1).bits(64) != coins(1).bits(64)


def test_coins_show_and_copy_nothing():
    stream = coins()
    assert repr(stream) == str(stream) == "Coins(<secret>)"
    assert not hasattr(stream, "__dict__")
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="copied"):
            duplicate(stream)


def test_bits_and_below_are_in_range_and_uniform():
    stream = coins("uniform")
    for k in (0, 1, 63, 64, 65, 200):
        values = [stream.bits(k) for _ in range(200)]
        assert all(0 <= v < 2**k for v in values)
        assert max(v.bit_length() for v in values) == k  # But for chance 2**-200.
    wide = np.array([stream.bits(70) / 2**70 for _ in range(20_000)])
    assert close(wide, 0.5, math.sqrt(1 / 12))
    n = 7
    counts = np.bincount([stream.below(n) for _ in range(70_000)], minlength=n)
    assert counts.size == n
    assert scipy.stats.chisquare(counts).pvalue > FAILURE
    assert {stream.below(1) for _ in range(3)} == {0}
    big = 3 * 2**90
    values = np.array([stream.below(big) / big for _ in range(20_000)])
    assert close(values, 0.5, math.sqrt(1 / 12))


@pytest.mark.parametrize(
    ("num", "den"), [(0, 1), (1, 5), (2, 3), (1, 1), (7, 3), (10**30, 3 * 10**30 + 1)]
)
def test_bernoulli_exp(num: int, den: int):
    stream = coins("bernoulli_exp", num, den)
    draws = 40_000
    hits = sum(stream._bernoulli_exp(num, den) for _ in range(draws))
    p = math.exp(-num / den)
    assert scipy.stats.binomtest(hits, draws, p).pvalue > FAILURE
    if p < 1:
        assert scipy.stats.binomtest(hits, draws, 0.85 * p).pvalue < FAILURE


def test_bernoulli_exp_of_hopeless_odds_ends_at_once():
    assert not coins()._bernoulli_exp(10**40, 1)


def test_a_word_equal_to_the_threshold_is_not_decided_by_it():
    """Exactness: 1/3 = 0.0101..., and U = 0.0101...01 0... of two words is below it."""

    class Script(noise.Coins):
        __slots__ = ()

    stream = Script(SECRET)
    third = 2**64 // 3
    for words, want in [
        ([third - 1], True),
        ([third + 1], False),
        ([third, third - 1], True),
        ([third, third + 1], False),
        ([third, third, third, 0], True),
    ]:
        stream._next_word = iter(words).__next__
        assert stream._bernoulli(1, 3) is want
        with pytest.raises(StopIteration):
            stream._next_word()


# The discrete Gaussian.


@pytest.mark.parametrize("std", [1, 2, 3])
def test_gaussian_pmf(std: int):
    draws = noise.discrete_gaussian(coins("pmf", std), std, 40_000)
    assert chi_square_p(draws, gaussian_pmf, std) > FAILURE
    assert chi_square_p(draws, gaussian_pmf, 0.9 * std) < FAILURE
    assert chi_square_p(draws, gaussian_pmf, 1.1 * std) < FAILURE


@pytest.mark.parametrize("std", [1000, 13_000_000])
def test_gaussian_moments(std: int):
    """Mean 0, variance std**2, kurtosis 3, both parities alike; 10% off is rejected."""
    z = noise.discrete_gaussian(coins("moments", std), std, 40_000)
    x = z / std
    assert close(x, 0, 1)
    assert close(x**2, 1, math.sqrt(2))
    assert close(x**4, 3, math.sqrt(96))
    assert close(z % 2, 0.5, 0.5)
    assert close(np.diff(x)[::2] ** 2, 2, math.sqrt(8))  # neighbours are independent
    for wrong in (0.9, 1.1):
        assert not close((x / wrong) ** 2, 1, math.sqrt(2))
    assert scipy.stats.kstest(x, "norm").pvalue > FAILURE
    assert scipy.stats.kstest(x / 0.9, "norm").pvalue < FAILURE


def test_gaussian_without_noise_is_zero():
    assert noise.discrete_gaussian(coins(), 0, (2, 3)).tolist() == [[0] * 3] * 2


def test_gaussian_at_the_largest_std_fits():
    draws = noise.discrete_gaussian(coins("largest"), 2**56, 1000)
    assert np.all(np.abs(draws / 2**56) < 7)
    assert np.std(draws / 2**56) > 0.8


def test_gaussian_takes_numpy_integers_and_shapes():
    got = noise.discrete_gaussian(coins(), np.int32(100_000), (2, 0))  # pyright: ignore
    assert got.shape == (2, 0)
    a = noise.discrete_gaussian(coins(), np.int32(100_000), 3)  # pyright: ignore
    np.testing.assert_array_equal(a, noise.discrete_gaussian(coins(), 100_000, (3,)))


# The discrete Laplace.


@pytest.mark.parametrize("scale", [1, 2, Fraction(1, 2), Fraction(7, 3)])
def test_laplace_pmf(scale: int | Fraction):
    draws = noise.discrete_laplace(coins("pmf", str(scale)), scale, 40_000)
    assert chi_square_p(draws, laplace_pmf, float(scale)) > FAILURE
    assert chi_square_p(draws, laplace_pmf, 0.9 * float(scale)) < FAILURE
    assert chi_square_p(draws, laplace_pmf, 1.1 * float(scale)) < FAILURE


def test_laplace_moments():
    scale = 10_000_000
    z = noise.discrete_laplace(coins("moments"), scale, 40_000)
    x = z / scale
    assert close(x, 0, math.sqrt(2))
    assert close(np.abs(x), 1, 1)
    assert not close(np.abs(x) / 0.9, 1, 1)
    assert close(z % 2, 0.5, 0.5)
    assert scipy.stats.kstest(x, "laplace").pvalue > FAILURE


def test_laplace_without_noise_is_zero():
    assert noise.discrete_laplace(coins(), 0, 3).tolist() == [0, 0, 0]


# What is refused.


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: noise.Coins("text"), TypeError, "secret"),  # pyright: ignore
        (lambda: noise.Coins(b""), ValueError, "secret"),
        (lambda: noise.Coins(SECRET, 1.5), TypeError, "context"),  # pyright: ignore
        (lambda: noise.Coins(SECRET, True), TypeError, "context"),
        (lambda: coins().bits(-1), ValueError, "k must"),
        (lambda: coins().below(0), ValueError, "n must"),
        (lambda: noise.discrete_gaussian(coins(), 1.5, 2), TypeError, "std"),  # pyright: ignore
        (lambda: noise.discrete_gaussian(coins(), -1, 2), ValueError, "std"),
        (lambda: noise.discrete_gaussian(coins(), 2**57, 2), ValueError, "std"),
        (lambda: noise.discrete_gaussian(coins(), 2, -1), ValueError, "shape"),
        (lambda: noise.discrete_gaussian(coins(), 0, (2, 1.0)), TypeError, "shape"),  # pyright: ignore
        (lambda: noise.discrete_laplace(coins(), 1.5, 2), TypeError, "scale"),  # pyright: ignore
        (lambda: noise.discrete_laplace(coins(), -1, 2), ValueError, "scale"),
        (lambda: noise.discrete_laplace(coins(), True, 2), TypeError, "scale"),
    ],
)
def test_refuses(call, error, names):
    with pytest.raises(error, match=names):
        call()
