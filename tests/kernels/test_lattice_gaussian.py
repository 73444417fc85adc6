"""The sampler of integer noise against exact counts, exact laws, and Python's integers."""

import decimal
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp.kernels import lattice_gaussian, threefry
from tests.kernels import cipher

KEY = threefry.secret_key(np.array([3, 1, 4, 1], np.uint32))
D = decimal.Decimal


def counts(law: lattice_gaussian.Law) -> list[int]:
    """What each size has of the 2**127 equally likely words, read off the tables."""
    full, found = 2**116, [0] * len(law.alias)
    for slot, other in enumerate(law.alias.tolist()):
        words = [int(table[slot]) for table in law.thresholds]
        own = sum(word << 32 * (3 - i) for i, word in enumerate(words))
        if other == slot:
            own = full
        found[slot] += own
        found[other] += full - own
    return found


def ways(total: int, stride: int) -> int:
    """How many of stride**6 sums of six numbers from 0 to stride - 1 are ``total``."""
    terms = (
        (-1) ** k * math.comb(6, k) * math.comb(total - k * stride + 5, 5)
        for k in range(7)
        if total >= k * stride
    )
    return sum(terms) if 0 <= total <= 6 * (stride - 1) else 0


def log_ratios(std: int, *, fine: bool = False, parts: int = 7) -> np.ndarray:
    """(x / std, realised over ideal - 1, ideal density), for x up to ``REACH`` std.

    All cells of the table; in each of them all numbers, or some, in exact arithmetic.
    """
    law = lattice_gaussian.law(std, fine=fine)
    found = counts(law)
    assert sum(found) == 2**127
    unit = 2**32 if fine else 1
    sigma, stride = std * unit, unit << int(law.shift)
    at = {round(stride * (i + 0.37) / parts) % stride for i in range(parts)} | {0}
    places = sorted(at) if stride > parts else list(range(stride))
    weights = {
        (place, cell): ways(place + stride * cell + 3 * (stride - 1), stride)
        for place in places
        for cell in range(-3, 4)
    }

    def twice(j: int) -> int:
        j = abs(j)
        return 0 if j >= len(found) else found[j] * (1 if j else 2)

    rows = []
    with decimal.localcontext(decimal.Context(prec=60)):
        pi = D("3.14159265358979323846264338327950288419716939937510582097494")
        if sigma < 20:
            span = range(-15 * sigma, 15 * sigma + 1)
            total = sum((-D(x * x) / (2 * sigma**2)).exp() for x in span)
        else:  # The sum over the integers is the integral but for exp(-2 pi**2 20**2).
            total = D(sigma) * (2 * pi).sqrt()
        everything = D(2) ** 128 * D(stride) ** 6
        for cell in range(int(lattice_gaussian.REACH * sigma / stride) + 1):
            for place in places:
                x = stride * cell + place
                if x > lattice_gaussian.REACH * sigma:
                    continue
                have = sum(twice(cell - c) * weights[place, c] for c in range(-3, 4))
                ideal = (-D(x * x) / (2 * D(sigma) ** 2)).exp() / total
                ratio = D(have) / everything / ideal - 1
                rows.append((x / sigma, float(ratio), float(ideal * sigma)))
    return np.array(rows)


# One below and above each power of the stride, where the table is widest and narrowest.
@pytest.mark.parametrize(
    ("std", "fine"),
    [
        *((std, False) for std in (1, 5, 150, 151, 300, 301, 815_000, 2**20, 2**28)),
        (150 * 2**12 + 1, False),
        *((std, True) for std in (75, 151, 815_000)),
    ],
)
def test_the_law_is_as_close_as_is_said_in_every_cell(std: int, fine: bool) -> None:
    x, off, density = log_ratios(std, fine=fine).T
    share = density / density.sum()
    tilt = np.exp(lattice_gaussian.ORDER * np.abs(off))
    assert (share * off**2 * tilt).sum() <= lattice_gaussian.MEAN_SQUARE
    assert np.abs(off[x <= 6]).max() < 2.0**-34
    # The mean of a ratio is 1: nothing is systematically off.
    assert abs((share * off).sum()) < 2.0**-50


def test_the_closeness_is_seen_to_fail() -> None:
    """Without the deconvolution the law would be off by 2**-28 in the mean."""

    def off_by(law: lattice_gaussian.Law) -> float:
        found = np.array([float(c) for c in counts(law)]) / 2.0**127
        j = np.arange(len(found))
        # Variance of T 2**s and of six uniforms, over the wanted one.
        stride = 2.0 ** int(law.shift)
        variance = (j**2 * found).sum() * stride**2 + (stride**2 - 1) / 2
        return variance / 815_000**2 - 1

    assert abs(off_by(lattice_gaussian.law(815_000))) < 1e-13
    assert abs(off_by(lattice_gaussian.law(814_960))) > 5e-5


def python_draw(key: list[int], i: int, std: int, fine: bool = False) -> int:
    """One number from its words, in units (of 2**-32 if fine)."""
    law = lattice_gaussian.law(std, fine=fine)
    shift = int(law.shift)
    words = [cipher.block(key, [i, 4 << 8 | n, 0, 0]) for n in range(4)]
    first = words[0]
    slot = first[0] >> 20 & 2047
    have = (first[0] & 0xFFFFF) << 96 | first[1] << 64 | first[2] << 32 | first[3]
    limit = sum(int(t[slot]) << 32 * (3 - n) for n, t in enumerate(law.thresholds))
    size = slot if have < limit else int(law.alias[slot])
    table = -size if first[0] >> 31 else size
    mask = 2**shift - 1
    parts = [w & mask for w in words[1]]
    for a, b in (words[1][:2], words[1][2:]):
        parts.append((a >> shift | b >> shift << 32 - shift) & mask)
    if not fine:
        return (table << shift) + sum(parts) - 3 * (2**shift - 1)
    lows = words[2] + words[3][:2]
    low = sum((part << 32) + more for part, more in zip(parts, lows, strict=True))
    return (table << shift + 32) + low - 3 * (2 ** (shift + 32) - 1)


def test_known_answers_of_the_cipher() -> None:
    """Random123's own vectors, of the reference and of the kernel."""
    pi = "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 082efa98 ec4e6c89"
    digits = [int(word, 16) for word in pi.split()]
    for key, counter, expected in (
        ([0] * 4, [0] * 4, "9c6ca96a e17eae66 fc10ecd4 5256a7d8"),
        (digits[4:], digits[:4], "59cd1dbb b8879579 86b5d00c ac8b6d84"),
    ):
        words = [int(word, 16) for word in expected.split()]
        assert cipher.block(key, counter) == words
        ours = threefry._threefry4(
            *(tuple(jnp.asarray(x, jnp.uint32) for x in v) for v in (key, counter))
        )
        assert [int(word) for word in ours] == words


@pytest.mark.parametrize("std", [1, 2, 150, 151, 4096, 815_000, 2**26, 2**28])
def test_numbers_are_those_of_the_words(std: int) -> None:
    law, key = lattice_gaussian.law(std), [3, 1, 4, 1]
    drawn = np.asarray(lattice_gaussian.draw(KEY, (3, 50), law)).ravel()
    expected = [python_draw(key, i, std) for i in range(150)]
    wrapped = (np.array(expected) + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(drawn, wrapped)


@pytest.mark.parametrize("std", [75, 151, 815_000, 2**24])
def test_fine_numbers_are_those_of_the_words(std: int) -> None:
    law = lattice_gaussian.law(std, fine=True)
    high, low = lattice_gaussian.draw_fine(KEY, (60,), law)
    drawn = [int(h) * 2**32 + int(x) for h, x in zip(high, low, strict=True)]
    assert drawn == [python_draw([3, 1, 4, 1], i, std, True) for i in range(60)]


def test_a_longer_array_begins_with_a_shorter_one() -> None:
    law = lattice_gaussian.law(1000)
    whole = lattice_gaussian.draw(KEY, (1000,), law)
    np.testing.assert_array_equal(lattice_gaussian.draw(KEY, (7,), law), whole[:7])
    folded = threefry.fold_in(KEY, 1)
    assert not np.any(
        np.asarray(lattice_gaussian.draw(folded, (1000,), law) == whole)[:20]
    )


def test_laws_can_be_stacked_and_picked() -> None:
    stds = (40, 5000)
    laws = jax.tree.map(lambda *x: jnp.stack(x), *map(lattice_gaussian.law, stds))

    @jax.jit
    def draw(which: jax.Array) -> jax.Array:
        one = jax.tree.map(lambda x: x[which], laws)
        return lattice_gaussian.draw(KEY, (100,), one)

    for i, std in enumerate(stds):
        alone = lattice_gaussian.draw(KEY, (100,), lattice_gaussian.law(std))
        np.testing.assert_array_equal(draw(jnp.int32(i)), alone)


def test_vmap_and_scan() -> None:
    law = lattice_gaussian.law(300)
    keys = jax.vmap(lambda i: threefry.fold_in(KEY, i))(jnp.arange(3, dtype=jnp.uint32))
    together = jax.vmap(lambda k: lattice_gaussian.draw(k, (4,), law))(keys)
    one = lambda c, k: (c, lattice_gaussian.draw(k, (4,), law))  # noqa: E731
    np.testing.assert_array_equal(jax.lax.scan(one, 0, keys)[1], together)
    alone = lattice_gaussian.draw(threefry.fold_in(KEY, 2), (4,), law)
    np.testing.assert_array_equal(together[2], alone)


def test_small_deviations_have_the_discrete_law() -> None:
    """Chi-square; each fails with probability 1e-6, and sees another deviation."""
    for std in (1, 3):
        drawn = lattice_gaussian.draw(KEY, (200_000,), lattice_gaussian.law(std))
        x = np.arange(-6 * std, 6 * std + 1)
        seen = np.array([(np.asarray(drawn) == v).sum() for v in x])

        def pvalue(sigma: float, x: Any = x, seen: Any = seen) -> float:
            mass = np.exp(-(x**2) / (2 * sigma**2))
            expected = mass / mass.sum() * seen.sum()
            many = expected > 10
            return scipy.stats.chisquare(
                seen[many], expected[many] * seen[many].sum() / expected[many].sum()
            ).pvalue

        assert pvalue(std) > 1e-6 > pvalue(std * 1.02)


@pytest.mark.parametrize("std", [0, -1, 2**28 + 1])
def test_other_deviations_are_refused(std: int) -> None:
    with pytest.raises(ValueError, match="std must be from 1 to 2"):
        lattice_gaussian.law(std)


def test_what_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"std must be an integer, got 2\.5"):
        lattice_gaussian.law(2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least 75 on a fine grid"):
        lattice_gaussian.law(74, fine=True)


def residues(draw: Any, chunks: int) -> np.ndarray:
    """How many of chunks x 2e7 numbers have each residue modulo 16."""

    @jax.jit
    def low(chunk: jax.Array) -> jax.Array:
        drawn = draw(threefry.fold_in(KEY, chunk), (20_000_000,))
        return (drawn & 15).astype(jnp.uint8)

    total = np.zeros(16, np.int64)
    for i in range(chunks):
        total += np.bincount(np.asarray(low(jnp.uint32(i))), minlength=16)
    return total


# About 12 seconds on two cores: 6e8 numbers, so that 1e-4 is 4.9 standard deviations of a
# fair coin's share of heads (failure probability 1e-6).
def test_no_parity_in_many_numbers() -> None:
    law = lattice_gaussian.law(2**20)
    seen = residues(lambda key, shape: lattice_gaussian.draw(key, shape, law), 30)
    share = seen / seen.sum()
    assert abs(share[::2].sum() - 0.5) < 1e-4
    assert np.abs(share - 1 / 16).max() < 1e-4


@pytest.mark.parametrize("std", [815_000, 2**12])
def test_no_pattern_in_low_digits(std: int) -> None:
    """1e8 numbers: 2.5e-4 and 1.3e-4 are five standard deviations."""
    law = lattice_gaussian.law(std)
    seen = residues(lambda key, shape: lattice_gaussian.draw(key, shape, law), 5)
    share = seen / seen.sum()
    assert abs(share[::2].sum() - 0.5) < 2.5e-4
    assert np.abs(share - 1 / 16).max() < 1.3e-4


def test_a_rounded_float_shows_its_parity() -> None:
    """What the library did once: even numbers are 52 of 100 at 2**20."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        words = jax.random.key_data(threefry.settled(key))[:2]
        plain = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jnp.round(jax.random.normal(plain, shape) * 2**20).astype(jnp.int32)

    share = residues(draw, 1) / 20_000_000
    assert share[::2].sum() > 0.51
