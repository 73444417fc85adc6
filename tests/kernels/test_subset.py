"""Random subsets: laws to the last bit that matters, and what they cost."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp.core import keys as keys_lib
from jaxdp.kernels import subset, threefry

ROOT = keys_lib.stream(keys_lib.Keys.insecure(3).sampling, "sampling")
MANY = 100_000


@pytest.fixture(scope="module")
def keys() -> jax.Array:
    return jax.vmap(lambda t: keys_lib.at_step(ROOT, t))(jnp.arange(MANY))


def numbers(table: subset.Sizes) -> list[int]:
    """Thresholds as integers of 256 bits."""
    return [int.from_bytes(r.astype(">u4").tobytes(), "big") for r in table.thresholds]


# The size.


@pytest.mark.parametrize(
    ("size", "numerator", "most"),
    [
        (3, 2**31, 2),
        (12, 2**30 + 12345, 12),
        (12, 3, 5),
        (12, 2**32 - 1, 11),
        (7, 0, 3),
    ],
)
def test_a_small_table_is_exact(size: int, numerator: int, most: int) -> None:
    """Against fractions: to 2**-219 of all that is left out, and no more."""
    table = subset.sizes(size, numerator, most)
    q, found = Fraction(numerator, 2**32), Fraction(0)
    bounds = [0] * table.least + numbers(table)
    for k in range(most):
        found += math.comb(size, k) * q**k * (1 - q) ** (size - k)
        bound = Fraction(bounds[k] if k < len(bounds) else 2**256, 2**256)
        assert abs(bound - found) < Fraction(1, 2**219), k
    assert table.least + len(table.thresholds) <= most


@pytest.mark.parametrize(
    ("size", "q", "most"),
    [
        (10**6, 1e-3, 1128),
        (10**7, 1e-4, 1128),
        (2**31 - 1, 1e-5, 2**15),
        (10**6, 0.5, 9),
    ],
)
def test_a_table_is_the_distribution_function(size: int, q: float, most: int) -> None:
    """Against SciPy, whose logarithms of tails reach to both ends of a table."""
    numerator = math.floor(q * 2**32)
    table = subset.sizes(size, numerator, most)
    law = scipy.stats.binom(size, numerator / 2**32)
    bounds = numbers(table)
    if not bounds:  # Nothing comes down to so few.
        assert table.least == most
        assert law.logcdf(most) < -219 * math.log(2)
        return
    assert law.logcdf(table.least - 1) < -215 * math.log(2)
    last = table.least + len(bounds)
    assert last == most or law.logsf(last - 1) < -215 * math.log(2)
    # Where what is left out below is a 2**-40 of it.
    known = [i for i, bound in enumerate(bounds) if bound > 2**76]
    for i in (known[0], known[9], known[len(known) // 2], known[-1]):
        got = math.log(bounds[i]) - 256 * math.log(2)
        assert got == pytest.approx(law.logcdf(table.least + i), rel=1e-6, abs=1e-12)
    assert bounds == sorted(bounds)


def planted(monkeypatch: pytest.MonkeyPatch, blocks: dict[int, np.ndarray]) -> None:
    """Makes the cipher give these words, by the number of the block."""

    def block(key: jax.Array, index: jax.Array, number: int = 0, use: int = 0) -> tuple:
        return tuple(jnp.asarray(words) for words in blocks[number])

    monkeypatch.setattr(threefry, "secret_block", block)


def test_all_words_of_a_threshold_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    table = subset.sizes(10**6, 2**22, 1100)
    bounds = numbers(table)
    for rank in (0, 300, len(bounds) - 1):
        for shift in (0, 100, 255):
            for off in (-1, 0, 1):
                u = min(max(bounds[rank] + off * 2**shift, 0), 2**256 - 1)
                words = [np.uint32(u >> 32 * i & 0xFFFFFFFF) for i in range(8)][::-1]
                planted(monkeypatch, {1: np.array(words[:4]), 2: np.array(words[4:])})
                want = table.least + sum(u >= bound for bound in bounds)
                assert int(subset.drawn_size(ROOT, table)) == want


def test_sizes_are_binomial_and_truncated(keys: jax.Array) -> None:
    """Chi-square of 100 000 sizes (failure 1e-6); not related to the subset's words."""
    size, q, most = 40, 0.2, 12
    table = subset.sizes(size, math.floor(q * 2**32), most)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: subset.drawn_size(k, table)))(keys))
    share = scipy.stats.binom.pmf(np.arange(most + 1), size, q)
    share[most] = scipy.stats.binom.sf(most - 1, size, q)
    counts = np.bincount(drawn, minlength=most + 1)
    assert scipy.stats.chisquare(counts, share * MANY).pvalue > 1e-6
    first = np.asarray(
        jax.jit(jax.vmap(lambda k: subset._indices(k, 1000, 1)[0]))(keys)
    )
    related = np.corrcoef(first, drawn)[0, 1]
    assert abs(related) < scipy.stats.norm.isf(5e-7) / math.sqrt(MANY)


# The indices.


@pytest.mark.parametrize("size", [1, 5, 2**17 + 1, 10**7, 3 * 2**29, 2**31 - 1])
def test_an_index_is_a_product_of_64_bits(size: int) -> None:
    draws = 500
    counters = jnp.arange(draws, dtype=jnp.uint32)
    high, low, *_ = threefry.secret_block(ROOT, counters)
    got = subset._indices(ROOT, size, draws).astype(jnp.uint32)
    for index, *words in np.stack([got, high, low], axis=1).tolist():
        assert index == ((words[0] << 32) + words[1]) * size >> 64


@pytest.mark.parametrize("size", [5, 2**20, 10**7, 2**31 - 1])
def test_what_would_make_an_index_likelier_is_thrown_away(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Python's integers, at the edge: u of every residue next to 2**64 % size."""
    edge, found = 2**64 % size, []
    for index in (0, 1, size // 2, size - 1):
        first = -(-(index << 64) // size)  # The least u of an index.
        found += [u for u in range(first - 2, first + 3) if 0 <= u < 2**64]
    words = np.array([divmod(u, 2**32) for u in found], np.uint32).T
    planted(monkeypatch, {0: np.stack([*words, *words])})
    got = subset._indices(ROOT, size, len(found)).tolist()
    want = [size if u * size % 2**64 < edge else u * size >> 64 for u in found]
    assert got == want
    assert (size in want) is (edge != 0)  # A power of two loses none.


def test_every_ordered_subset_is_as_likely(keys: jax.Array) -> None:
    """All twenty of two out of five (chi-square, failure 1e-6), from six draws.

    They hold two values that were drawn once as often as the 5**6 sequences do.
    """
    draw = jax.jit(jax.vmap(lambda key: subset.distinct(key, 5, 2, 6)))
    index, found = (np.asarray(x) for x in draw(keys))
    whole = found.all(axis=1)
    once = [
        sum(count == 1 for count in Counter(row).values())
        for row in itertools.product(range(5), repeat=6)
    ]
    share = np.mean(np.array(once) >= 2)
    low, high = scipy.stats.binom.interval(1 - 1e-6, MANY, share)
    assert low <= whole.sum() <= high
    kinds = Counter(map(tuple, index[whole].tolist()))
    assert set(kinds) == set(itertools.permutations(range(5), 2))
    assert scipy.stats.chisquare(list(kinds.values())).pvalue > 1e-6
    # One that is alone is uniform as well, and what is not found holds no element twice.
    alone = Counter(index[found.sum(axis=1) == 1, 0].tolist())
    assert scipy.stats.chisquare([alone[i] for i in range(5)]).pvalue > 1e-6


@pytest.mark.parametrize(
    ("size", "num", "draws"), [(300, 10, 100), (30, 20, 60), (10**6, 50, 80), (3, 1, 1)]
)
def test_it_keeps_what_was_drawn_once_in_order(size: int, num: int, draws: int) -> None:
    for step in range(5):
        key = keys_lib.at_step(ROOT, step)
        drawn = subset._indices(key, size, draws).tolist()
        want = [x for x in drawn if drawn.count(x) == 1][:num]
        index, found = subset.distinct(key, size, num, draws)
        assert index[: len(want)].tolist() == want
        assert found.tolist() == [place < len(want) for place in range(num)]


def test_what_is_thrown_away_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1013  # Of no other test: programs are kept.
    drawn = jnp.array([7, size, 3, 7, 5, size, 9], jnp.int32)
    monkeypatch.setattr(subset, "_indices", lambda *_: drawn)
    index, found = subset.distinct(ROOT, size, 4, 7)
    assert index[:3].tolist() == [3, 5, 9]
    assert found.tolist() == [True, True, True, False]
    assert 0 <= int(index[3]) < size


def test_same_bits_in_every_program(keys: jax.Array) -> None:
    size, num = 2**18, 40
    table = subset.sizes(size, 2**17, num)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return *subset.distinct(key, size, num), subset.drawn_size(key, table)

    some = keys[:8]
    mapped = jax.jit(jax.vmap(draw))(some)
    _, scanned = jax.jit(lambda k: jax.lax.scan(lambda c, k: (c, draw(k)), None, k))(
        some
    )
    for i in range(8):
        for one in (draw(some[i]), jax.jit(draw)(some[i])):
            for x, y, z in zip(one, mapped, scanned, strict=True):
                np.testing.assert_array_equal(x, y[i])
                np.testing.assert_array_equal(x, z[i])
    index, found, drawn = mapped
    assert bool(found.all())
    assert all(len(set(row)) == num for row in index.tolist())
    assert len(set(drawn.tolist())) > 1


@pytest.mark.parametrize("part", [16, 32, 1000])
@pytest.mark.parametrize("size", [2**17 + 1, 10**6, 2**31 - 1])
def test_draws_hardly_ever_run_out(size: int, part: int) -> None:
    """The bound of :func:`num_draws` against the binomial tail; it asks for little more."""
    for num in {1, 7, size // part // 100, min(size // part, 10**6)}:
        draws = subset.num_draws(size, num)
        lost = (draws - num) // 2 + 1
        tail = scipy.stats.binom.logsf(lost - 1, draws, (draws - 1) / size + 2.0**-33)
        assert tail < -180 * math.log(2)
        assert draws < 1.5 * num + 80


def chosen(key: jax.Array, words: np.ndarray, num: int, below: int | None) -> list[int]:
    """The elements of the smallest 30 bits, by Python; ties by two blocks."""
    index = jnp.arange(len(words), dtype=jnp.uint32)
    blocks = [threefry.secret_block(key, index, i, threefry._BITS) for i in (1, 2)]
    more = np.stack([np.asarray(w) for block in blocks for w in block])[::-1]

    def order(i: int) -> tuple[int, ...]:
        return int(words[i]) >> 2, *map(int, more[:, i])

    some = [i for i, word in enumerate(words) if below is None or word < below]
    return sorted(some, key=order)[:num]


@pytest.mark.parametrize(
    ("size", "num", "bits", "below"),
    [
        (1, 1, 32, None), (9, 9, 1, None), (9, 4, 1, None), (300, 5, 4, None),
        (300, 70, 5, None), (300, 250, 4, 2**30), (300, 20, 5, 2**31), (40, 8, 32, 0),
    ],
)  # fmt: skip
def test_the_smallest_words_are_chosen_and_ties_by_more_bits(
    size: int, num: int, bits: int, below: int | None
) -> None:
    """Of words that differ in their first ``bits`` alone."""
    for seed in range(20):
        key = threefry.fold_in(ROOT, seed)
        words = np.asarray(threefry.bits(key, (size,))) >> (32 - bits) << (32 - bits)
        got = subset.smallest(key, jnp.asarray(words), num, below)
        index, found = (np.asarray(x) for x in got)
        want = chosen(key, words, num, below)
        assert found.tolist() == [place < len(want) for place in range(num)]
        # In order, but for those that tie far from the edge: by their places.
        assert sorted(index[found]) == sorted(want)
        np.testing.assert_array_equal(words[index[found]], words[want])


def test_words_that_differ_are_in_order(keys: jax.Array) -> None:
    for num in (3, 64, 65, 500):
        words = threefry.bits(keys[num], (500,))
        index, found = subset.smallest(keys[num], words, num)
        assert found.all()
        np.testing.assert_array_equal(index, np.argsort(np.asarray(words))[:num])


def test_every_subset_is_as_likely_where_words_tie(keys: jax.Array) -> None:
    """Of six elements with words of three bits: in the order of places it is not so."""

    def draw(key: jax.Array) -> jax.Array:
        words = threefry.bits(key, (6,)) >> 29 << 29
        return subset.smallest(key, words, 3)[0]

    drawn = np.sort(np.asarray(jax.jit(jax.vmap(draw))(keys)), axis=1)
    counts = Counter(map(tuple, drawn))
    seen = [counts[pick] for pick in itertools.combinations(range(6), 3)]
    assert scipy.stats.chisquare(seen).pvalue > 1e-6


def test_refuses() -> None:
    with pytest.raises(ValueError, match="num must be a smaller part of size = 1000"):
        subset.distinct(ROOT, 1000, 200)
    with pytest.raises(ValueError, match=r"size must be from 1 to 2\*\*31 - 1"):
        subset.distinct(ROOT, 2**31, 5)
    with pytest.raises(ValueError, match="key must be one secret key"):
        subset.distinct(jax.random.key(0), 10**6, 5)
