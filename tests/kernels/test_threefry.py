"""The written-out generator against ``jax.random``, known answers and NumPy."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxdp.core import keys as keys_lib
from jaxdp.kernels import lattice_gaussian, threefry
from tests.kernels.cipher import block

KEY = jax.random.key(2024)
SHAPES = [(), (0,), (3, 500)]


def reference(
    key: tuple[int, int], x0: np.ndarray, x1: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with twenty rounds, as the paper's pseudo-code has it."""
    rotations = [13, 15, 26, 6, 17, 29, 16, 24]
    mask = 0xFFFFFFFF
    k = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x0 = (x0.astype(np.uint64) + k[0]) & mask
    x1 = (x1.astype(np.uint64) + k[1]) & mask
    for i in range(20):
        r = rotations[i % 8]
        x0 = (x0 + x1) & mask
        x1 = (((x1 << r) | (x1 >> (32 - r))) & mask) ^ x0
        if i % 4 == 3:
            j = i // 4 + 1
            x0 = (x0 + k[j % 3]) & mask
            x1 = (x1 + k[(j + 1) % 3] + j) & mask
    return x0.astype(np.uint32), x1.astype(np.uint32)


@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        # The vectors that come with the authors' library (Random123).
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        (
            (0x13198A2E, 0x03707344),
            (0x243F6A88, 0x85A308D3),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ],
)
def test_known_answers(
    key: tuple[int, int], counter: tuple[int, int], answer: tuple[int, int]
) -> None:
    words = map(jnp.uint32, (*key, *counter))
    assert tuple(map(int, threefry._threefry(*words))) == answer
    expected = reference(key, *(np.array(c, np.uint32) for c in counter))
    assert tuple(map(int, expected)) == answer


def test_bits_are_the_reference() -> None:
    k0, k1 = map(int, jax.random.key_data(KEY))
    a, b = reference((k0, k1), np.zeros(1000, np.uint32), np.arange(1000))
    np.testing.assert_array_equal(threefry.bits(KEY, (1000,)), a ^ b)


def test_bits_are_those_of_jax_random() -> None:
    """For every shape, and for several keys under vmap."""

    def draws(bits: Callable[..., jax.Array]) -> Callable[[jax.Array], list[jax.Array]]:
        def draw(key: jax.Array) -> list[jax.Array]:
            several = jax.vmap(lambda k: bits(k, (9,)))(jax.random.split(key, 5))
            return [several, *(bits(key, shape) for shape in SHAPES)]

        return jax.jit(draw)

    ours, theirs = draws(threefry.bits)(KEY), draws(jax.random.bits)(KEY)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_bits_do_not_depend_on_the_partitionable_flag() -> None:
    usual = threefry.bits(KEY, (12,))
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(threefry.bits(KEY, (12,)), usual)


@pytest.mark.parametrize("data", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_fold_in_is_that_of_jax_random(data: int) -> None:
    expected = jax.random.key_data(jax.random.fold_in(KEY, np.uint32(data)))
    for folded in (
        threefry.fold_in(KEY, data),
        jax.jit(threefry.fold_in)(KEY, jnp.uint32(data)),
    ):
        assert jnp.issubdtype(folded.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(jax.random.key_data(folded), expected)


def test_fold_in_vmaps_over_keys_and_data() -> None:
    keys, data = jax.random.split(KEY, 4), jnp.arange(4, dtype=jnp.int32)
    ours = jax.vmap(threefry.fold_in)(keys, data)
    theirs = jax.vmap(jax.random.fold_in)(keys, data)
    np.testing.assert_array_equal(
        jax.random.key_data(ours), jax.random.key_data(theirs)
    )


def test_fold_in_refuses_what_is_no_32_bit_integer() -> None:
    for data in (-1, 2**32):
        with pytest.raises(OverflowError):
            threefry.fold_in(KEY, data)


def test_stored_bits_are_bits() -> None:
    sizes = (0, 3, 256, 257, 1000)

    @jax.jit
    def both(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        return [(threefry.stored_bits(key, s), threefry.bits(key, (s,))) for s in sizes]

    for stored, plain in both(KEY):
        np.testing.assert_array_equal(stored, plain, strict=True)


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(TypeError, match="typed jax key"):
        threefry.bits(jnp.zeros(2, jnp.uint32), (3,))
    with pytest.raises(ValueError, match="one threefry key"):
        threefry.bits(jax.random.split(KEY, 3), (3,))
    # JAX's rbg keys have as many words as secret ones: their type tells them apart.
    for impl in ("rbg", "unsafe_rbg"):
        with pytest.raises(ValueError, match="one threefry key"):
            threefry.bits(jax.random.key(0, impl=impl), (3,))
    with pytest.raises(TypeError, match="typed jax key"):
        threefry.bits(jnp.zeros(4, jnp.uint32), (3,))


def test_too_many_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="2\\*\\*32 counters"):
        threefry.bits(KEY, (2**16, 2**16))
    with pytest.raises(ValueError, match="2\\*\\*32 counters"):
        threefry.normal_sum_of_squares(KEY[None], [2**32])


@pytest.fixture(scope="module")
def inverse() -> tuple[np.ndarray, np.ndarray]:
    """Normals of words all over the range and dense at its ends and its middle."""
    ends = np.arange(4096)
    index = np.concatenate(
        [ends, 2**23 - 2048 + ends, 2**24 - 1 - ends, np.arange(0, 2**24, 61)]
    )
    words = jnp.asarray((index << 8).astype(np.uint32))
    normals = np.asarray(jax.jit(threefry._inverse_normal)(words))
    lower = np.minimum(index, 2**24 - 1 - index)  # the tail that is small is accurate
    exact = scipy.special.ndtri((lower + 0.5) / 2**24)
    return normals, np.where(index == lower, exact, -exact)


def test_normals_are_the_inverse_of_the_distribution(
    inverse: tuple[np.ndarray, np.ndarray],
) -> None:
    """Within 2e-6 (1.01e-6 over all 2^24 words), up to the ends at 5.42."""
    got, exact = inverse
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, exact, rtol=2e-6, atol=0)
    assert got.max() == -got.min() == pytest.approx(5.42, abs=1e-3)
    np.testing.assert_array_equal(got[:4096], -got[8192 : 8192 + 4096])


def hashed(key: jax.Array, size: int) -> np.ndarray:
    """Words of public directions: lowbias32 under each word of the key."""

    def mix(x: np.ndarray) -> np.ndarray:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return x ^ (x >> 16)

    k0, k1 = map(int, jax.random.key_data(key))
    return mix((mix(np.arange(size, dtype=np.uint64) ^ k0) + k1) & 0xFFFFFFFF)


def test_normals_are_the_inverse_of_hashed_words() -> None:
    """For several keys under vmap; any shape is the flat one reshaped."""
    keys = jax.random.split(KEY, 3)
    normals = jax.jit(jax.vmap(lambda k: threefry.normal(k, (5, 7))))(keys)
    words = np.stack([hashed(key, 35).reshape(5, 7) for key in keys])
    exact = scipy.special.ndtri(((words >> 8) + 0.5) / 2**24)
    np.testing.assert_allclose(normals, exact, rtol=2e-6, atol=1e-12)
    assert threefry.normal(KEY, ()) == threefry.normal(KEY, (1,))[0]


def test_hashed_normals_are_normal_and_uncorrelated() -> None:
    """Law, lags that are powers of two, and neighbouring keys: 6 standard errors."""
    count = 2**19
    draw = jax.jit(
        jax.vmap(lambda i: threefry.normal(threefry.fold_in(KEY, i), (count,)))
    )
    z = np.asarray(draw(jnp.arange(2, dtype=jnp.uint32)), np.float64)
    assert scipy.stats.kstest(z[0], "norm").pvalue > 1e-6
    assert abs(np.mean(z**2) - 1) < 6 * math.sqrt(2 / z.size)
    assert abs(np.mean(z**4) - 3) < 6 * math.sqrt(96 / z.size)
    products = [z[0] * z[1], z[0] ** 2 * z[1], (z[0] ** 2 - 1) * (z[1] ** 2 - 1)]
    for lag in (1, 2, 16, 256, 2**16):
        a, b = z[0, lag:], z[0, :-lag]
        products += [a * b, (a**2 - 1) * (b**2 - 1)]
    for product in products:
        assert abs(product.mean()) < 6 * product.std() / math.sqrt(product.size)


SIZES = [
    [0],
    [1],
    [0, 21, 0, 5],
    [2**16],
    [3 * 2**16 + 3, 1, 700],
]


@pytest.mark.parametrize("sizes", SIZES)
def test_sum_of_squares_is_that_of_the_normals(sizes: list[int]) -> None:
    """Of no element, of one, of several keys, and in several rounds of a loop."""
    keys = jax.random.split(KEY, len(sizes))

    @jax.jit
    def both(keys: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        normals = [threefry.normal(k, (n,)) for k, n in zip(keys, sizes, strict=True)]
        return threefry.normal_sum_of_squares(keys, sizes), normals

    total, normals = both(keys)
    exact = sum(np.square(np.asarray(x, np.float64)).sum() for x in normals)
    np.testing.assert_allclose(total, exact, rtol=3e-7)


@pytest.mark.parametrize("sizes", SIZES[2:])
def test_sum_of_squares_has_the_same_bits_beside_others(sizes: list[int]) -> None:
    """Alone, one after the other, and vectorised: the order of sums is the program's."""
    several = jax.vmap(lambda key: jax.random.split(key, len(sizes)))(
        jax.random.split(KEY, 7)
    )
    total = lambda keys: threefry.normal_sum_of_squares(keys, sizes)  # noqa: E731
    beside = jax.jit(jax.vmap(total))(several)
    in_turn = jax.jit(lambda several: jax.lax.map(total, several))(several)
    np.testing.assert_array_equal(beside, in_turn)
    np.testing.assert_array_equal(beside[0], jax.jit(total)(several[0]))


def test_sum_of_squares_is_one_loop() -> None:
    """Over 400 keys and 1.3e9 elements: 80 rounds, and at most 2^24 lanes in memory."""
    sizes = [2048 * 8192] * 48 + [2048] * 340 + [50272 * 2048, 2048 * 2048 * 96]
    keys = jax.eval_shape(lambda key: jax.random.split(key, len(sizes)), KEY)
    text = (
        jax.jit(lambda keys: threefry.normal_sum_of_squares(keys, sizes))
        .lower(keys)
        .as_text()
    )
    # That of the blocks' owners, a binary search, and that of the sum.
    assert text.count("stablehlo.while") == 2
    lanes = [int(n) * int(m) for n, m in re.findall(r"tensor<(\d+)x(\d+)xf32>", text)]
    assert max(lanes) <= 2**24
    rounds = -(-sum(-(-n // 2**14) for n in sizes) // (2**24 // 2**14))
    assert rounds <= 80
    assert f"tensor<{rounds}x" in text


@pytest.mark.parametrize(
    "size",
    [
        *(1, 3, 64, 65, 1000),
        *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 7, 2**12)),
    ],
)
def test_permuted_is_a_permutation(size: int) -> None:
    permute = jax.jit(threefry.permuted, static_argnums=2)
    everywhere = permute(KEY, jnp.arange(size), size)
    assert everywhere.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(everywhere), np.arange(size))
    # Each index by itself, in any shape.
    some = jnp.arange(size)[::3].reshape(-1, 1)
    np.testing.assert_array_equal(permute(KEY, some, size), everywhere[::3, None])
    if size > 60:
        other = permute(threefry.fold_in(KEY, 1), jnp.arange(size), size)
        assert np.count_nonzero(np.asarray(other) == everywhere) < size / 4


def test_permuted_orders_are_equally_likely() -> None:
    """The 60 ways to take three of five (failure < 1e-6)."""
    keys = jax.vmap(lambda i: threefry.fold_in(KEY, i))(jnp.arange(24_000))
    permute = jax.jit(jax.vmap(lambda k: threefry.permuted(k, jnp.arange(3), 5)))
    orders = np.asarray(permute(keys)) @ [25, 5, 1]
    counts = np.bincount(orders, minlength=125)
    assert np.count_nonzero(counts) == 60
    assert scipy.stats.chisquare(counts[counts > 0]).pvalue > 1e-6


# --- secret keys ---


DRAWS, CHILDREN, BITS, PLACES = range(4)
ROOT = [2**32 - 1, 0x243F6A88, 7, 2**31]
# By what was folded in: a key of each length. (Its role, then context, step, one more.)
SECRETS = {
    "root": ROOT,
    "role": [*ROOT, 2**16 - 1],
    "context": [*ROOT, 2**16 - 1, 2**32 - 5],
    "step": [*ROOT, 2**16 - 1, 2**32 - 5, 2**31 + 3],
}

#: The shortest and the longest, and those between.
BETWEEN_SLOW = [
    *("root", "step"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("role", "context")),
]


def secret(words: list[int]) -> jax.Array:
    return threefry.secret_key(np.array(words, np.uint32))


def words_of(key: jax.Array) -> list[int]:
    return np.asarray(jax.random.key_data(key)).tolist()


def secret_words(key: list[int], index: int, use: int, number: int = 0) -> list[int]:
    """The block of a secret key of 4 to 7 words, from the layout of its counter."""
    role, one, other = [*key[4:], 0, 0, 0][:3]
    code = role << 16 | len(key) << 8 | use << 6 | number
    return block(key[:4], [index, code, one, other])


def settled_words(key: list[int]) -> list[int]:
    return key if len(key) == 4 else secret_words(key, 0, CHILDREN)


def folded_words(key: list[int], data: int) -> list[int]:
    """Role 0 is that of a key without one; a full key is settled first."""
    if len(key) == 7:
        key = settled_words(key)
    return [*key, 0, data] if len(key) == 4 else [*key, data]


@pytest.mark.parametrize("kind", SECRETS)
def test_secret_blocks_are_the_reference(kind: str) -> None:
    """For every use and number, at the first and the last indices."""
    key, index = SECRETS[kind], [0, 1, 2**31, 2**32 - 1]
    for use in (DRAWS, CHILDREN, BITS, PLACES):
        for number in (0, 3, 63):
            found = threefry.secret_block(
                secret(key), jnp.array(index, jnp.uint32), number, use
            )
            expected = [secret_words(key, i, use, number) for i in index]
            np.testing.assert_array_equal(np.stack(found, axis=1), expected)


@pytest.mark.parametrize("kind", SECRETS)
def test_secret_fold_in_settled_and_bits_are_the_reference(kind: str) -> None:
    key = SECRETS[kind]
    for data in (0, 1, 2**31, 2**32 - 1):
        expected = folded_words(key, data)
        assert words_of(threefry.fold_in(secret(key), data)) == expected
        traced = jax.jit(threefry.fold_in)(secret(key), jnp.uint32(data))
        assert words_of(traced) == expected and threefry.is_secret(traced)
    for data in (-1, 2**32):
        with pytest.raises(OverflowError):
            threefry.fold_in(secret(key), data)
    settled = threefry.settled(secret(key))
    assert words_of(settled) == settled_words(key)
    assert threefry.is_secret(settled)
    for shape in SHAPES:
        drawn = threefry.bits(secret(key), shape)
        some = range(0, math.prod(shape), 97)
        expected = [secret_words(key, i, BITS)[0] for i in some]
        assert drawn.shape == shape and drawn.dtype == jnp.uint32
        np.testing.assert_array_equal(drawn.reshape(-1)[::97], expected)


def permuted_of(key: list[int], i: int, size: int) -> int:
    """The Feistel network in Python's integers, until it comes back into the range."""
    bits = (size - 1).bit_length()
    low = bits // 2
    while True:
        left, right = i >> low, i % 2**low
        for number in range(0, 16, 2):
            left ^= secret_words(key, right, PLACES, number)[0] % 2 ** (bits - low)
            right ^= secret_words(key, left, PLACES, number + 1)[0] % 2**low
        i = left << low | right
        if i < size:
            return i


@pytest.mark.parametrize("kind", BETWEEN_SLOW)
def test_secret_permutations_are_the_reference(kind: str) -> None:
    permute = jax.jit(threefry.permuted, static_argnums=2)
    for size in (1, 37):
        places = permute(secret(SECRETS[kind]), jnp.arange(size), size)
        expected = [permuted_of(SECRETS[kind], i, size) for i in range(size)]
        assert places.dtype == jnp.int32 and sorted(expected) == list(range(size))
        np.testing.assert_array_equal(places, expected)
    some = [0, 1, 10**9, 2**31 - 1]
    places = permute(secret(SECRETS[kind]), jnp.array(some, jnp.int32), 2**31)
    assert places.tolist() == [permuted_of(SECRETS[kind], i, 2**31) for i in some]


def test_roles_are_the_fifth_word() -> None:
    for role in (1, 2, 2**16 - 1):
        assert words_of(threefry.for_role(secret(ROOT), role)) == [*ROOT, role]
    for role in (0, -1, 2**16):
        with pytest.raises(ValueError, match="role must be from 1 to 2"):
            threefry.for_role(secret(ROOT), role)


def test_streams_of_secret_roots() -> None:
    """Four words, the role, the plan's digest and the step, and then a settled key."""
    root = secret(ROOT)
    stream = keys_lib.stream(root, "noise", 9, context=77)
    assert words_of(stream) == [*ROOT, keys_lib.ROLES["noise"], 77, 9]
    assert words_of(keys_lib.stream(root, "noise", context=77)) == words_of(stream)[:-1]
    deeper = threefry.fold_in(stream, 5)
    assert words_of(deeper) == [*settled_words(words_of(stream)), 0, 5]


def test_no_two_secret_streams_are_the_same() -> None:
    """Keys of all lengths, with small numbers and with those of the layout's own fields.

    Every one has counters of its own: what tells them apart is the pair of the four
    words and the block's counter, of which the cipher is one to one.
    """
    firsts = (0, 4, 0x0640, 2**32 - 1)
    numbers = (0, 1, 2, 4, 6, 0x0400, 0x0600, 2**16, 2**16 - 1, 2**32 - 1)
    paths = list(itertools.product(firsts, numbers, numbers))
    roots = {None: secret(ROOT)}
    roots |= {role: threefry.for_role(secret(ROOT), role) for role in (1, 4, 6, 0x0640)}

    @jax.jit
    def below(key: jax.Array, data: jax.Array) -> list[jax.Array]:
        """One, two and three numbers folded in."""
        found = [threefry.fold_in(key, data[0])]
        for n in (1, 2):
            found.append(threefry.fold_in(found[-1], data[n]))
        return [threefry.bits(k, (2,)) for k in found]

    seen: dict[tuple[int, ...], Any] = {}
    for role, key in roots.items():
        levels = jax.vmap(below, in_axes=(None, 0))(key, jnp.array(paths, jnp.uint32))
        for depth, drawn in enumerate(levels, start=1):
            for path, words in zip(paths, drawn.tolist(), strict=True):
                name = (role, *path[:depth])
                assert seen.setdefault(tuple(words), name) == name
    each = len(firsts) * (1 + len(numbers) + len(numbers) ** 2)
    assert len(seen) == len(roots) * each


@pytest.mark.parametrize("kind", BETWEEN_SLOW)
def test_the_uses_of_one_secret_key_share_no_block(kind: str) -> None:
    """Numbers, bits, places and children: every call to the cipher has its own input."""
    asked: list[tuple[int, ...]] = []

    def note(key: tuple[jax.Array, ...], counter: tuple[jax.Array, ...]) -> tuple:
        shape = jnp.shape(counter[0])
        words = [np.broadcast_to(w, shape).reshape(-1) for w in (*key, *counter)]
        asked.extend(map(tuple, np.stack(words, axis=1).tolist()))
        return tuple(jnp.zeros(shape, jnp.uint32) for _ in range(4))

    key, index = secret(SECRETS[kind]), jnp.arange(40, dtype=jnp.uint32)
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(threefry, "_threefry4", note)
        lattice_gaussian.draw_fine(key, (40,), lattice_gaussian.law(100, fine=True))
        assert len(asked) == len(set(asked)) == 4 * 40
        threefry.bits(key, (40,))
        assert len(asked) == len(set(asked)) == 5 * 40
        threefry.settled(key)
        children = kind != "root"  # A root stands for itself.
        assert len(asked) == len(set(asked)) == 5 * 40 + children
        threefry.permuted(key, index, 64)
        places = asked[5 * 40 + children :]
        # Several elements have one half, and then its block, in common.
        assert len(places) == 16 * 40
        assert not set(places) & set(asked[: 5 * 40 + children])
        assert {word[5] & 0x3F for word in places} == set(range(16))
        below = threefry.fold_in(key, 3)  # Of a full key: from its child.
        before = set(asked)
        del asked[:]
        lattice_gaussian.draw(below, (40,), lattice_gaussian.law(100))
        threefry.bits(below, (40,))
        assert len(asked) == len(set(asked)) == 3 * 40 and not set(asked) & before


# Short and long, so that what is folded in is counted, or makes a new key.
@pytest.mark.parametrize("kind", ["root", pytest.param("step", marks=pytest.mark.slow)])
def test_secret_keys_under_jit_vmap_and_scan(kind: str) -> None:
    """The same bits in every program."""

    def use(key: jax.Array, i: jax.Array) -> list[jax.Array]:
        child = threefry.fold_in(key, i)
        settled = jax.random.key_data(threefry.settled(child))
        found = [threefry.bits(child, (3,)), settled]
        # (A settled key within a permutation takes XLA long to compile.)
        return [*found, threefry.permuted(key, i, 9)] if kind == "root" else found

    index = jnp.arange(2, dtype=jnp.uint32)
    key = secret(SECRETS[kind])
    alone = [jax.jit(use)(key, i) for i in index]
    expected = jax.tree.map(lambda *x: np.stack(x), *alone)
    stacked = jax.vmap(lambda _: key)(index)
    assert threefry.is_secret(stacked) and stacked.shape == (2,)
    for found in (
        jax.jit(jax.vmap(use))(stacked, index),
        jax.lax.scan(lambda c, pair: (c, use(*pair)), 0, (stacked, index))[1],
    ):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_keys_after_are_the_same_keys() -> None:
    """Of both kinds and all lengths, alone and several; whatever they wait for."""
    several = jax.vmap(lambda i: threefry.fold_in(secret(ROOT), i))(jnp.arange(3))
    for key in (KEY, jax.random.split(KEY, 3), *map(secret, SECRETS.values()), several):
        for after in (jnp.float32(jnp.nan), jnp.array([3, 4], jnp.int32), jnp.zeros(0)):
            same = jax.jit(threefry.keys_after)(key, after)
            assert same.dtype == key.dtype and same.shape == key.shape
            np.testing.assert_array_equal(
                jax.random.key_data(same), jax.random.key_data(key)
            )


def test_what_is_no_secret_key_is_refused() -> None:
    some = jnp.zeros(3, jnp.uint32)
    several = jax.vmap(lambda i: threefry.fold_in(secret(ROOT), i))(some)
    rbg = jax.random.key(0, impl="rbg")
    for bad in (KEY, rbg, jnp.zeros(4, jnp.uint32)):
        assert not threefry.is_secret(bad)
    for bad in (KEY, rbg, jnp.zeros(4, jnp.uint32), several):
        for use in (
            lambda key: threefry.secret_block(key, some),
            threefry.settled,
            lambda key: threefry.for_role(key, 1),
            lambda key: lattice_gaussian.draw(key, (2,), lattice_gaussian.law(9)),
        ):
            with pytest.raises(ValueError, match="key must be one secret key"):
                use(bad)
    with pytest.raises(ValueError, match="key must be one secret key"):
        threefry.fold_in(several, 1)
    with pytest.raises(ValueError, match="settled secret key, got one of 5 words"):
        threefry.for_role(secret(SECRETS["role"]), 1)
    with pytest.raises(ValueError, match="2\\*\\*32 counters"):
        threefry.bits(secret(ROOT), (2**16, 2**16))
    for use in (threefry.normal, threefry.stored_bits):
        with pytest.raises(ValueError, match="one threefry key"):
            use(secret(ROOT), (3,) if use is threefry.normal else 3)
    for size in (2, 3, 8):
        with pytest.raises((KeyError, ValueError)):
            threefry.secret_key(np.zeros(size, np.uint32))


def test_jax_random_draws_nothing_from_secret_keys() -> None:
    """It would use the key for what the library draws from it, or drop its words."""
    for words in SECRETS.values():
        for use in (
            jax.random.bits,
            jax.random.normal,
            jax.random.split,
            lambda key: jax.random.fold_in(key, 1),
        ):
            with pytest.raises(NotImplementedError, match="secret keys are for"):
                use(secret(words))


@pytest.mark.parametrize("number", [-1, 64])
def test_blocks_beyond_those_of_a_use_are_refused(number: int) -> None:
    key = threefry.secret_key(np.arange(4, dtype=np.uint32))
    with pytest.raises(ValueError, match="number must be from 0 to 63"):
        threefry.secret_block(key, jnp.zeros(2, jnp.uint32), number)
