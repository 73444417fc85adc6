"""The written-out generator against ``jax.random``, known answers and NumPy."""

import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxdp.kernels import threefry

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
    with pytest.raises(ValueError, match="one threefry key"):
        threefry.bits(jax.random.key(0, impl="rbg"), (3,))


def test_too_many_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="2\\*\\*32 counters"):
        threefry.bits(KEY, (2**16, 2**16))
    with pytest.raises(ValueError, match="2\\*\\*32 counters"):
        threefry.normal_sum_of_squares(KEY, (2**16, 2**16))


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


def test_sum_of_squares_is_that_of_the_normals() -> None:
    """In blocks of 2^16: empty, scalar, a part of one, exactly one, and several."""
    shapes = [(0,), (), (7, 3), (2**16,), (3, 2**16 + 1)]

    @jax.jit
    def both(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        total = threefry.normal_sum_of_squares
        return [(total(key, s), threefry.normal(key, s)) for s in shapes]

    for total, normals in both(KEY):
        exact = np.square(np.asarray(normals, np.float64)).sum()
        np.testing.assert_allclose(total, exact, rtol=3e-7)


def wide_normal_of(a: list[int], b: list[int], monkeypatch: pytest.MonkeyPatch):
    """``wide_normal`` with the generator's two words given (and no trace cached)."""
    high, angle = jnp.array(a, jnp.uint32), jnp.array(b, jnp.uint32)
    low = jnp.zeros_like(high)
    monkeypatch.setattr(
        threefry,
        "_threefry",
        lambda k0, k1, block, count: (angle, low) if block else (high, low),
    )
    return np.asarray(inspect.unwrap(threefry.wide_normal)(KEY, (len(a),)))


def test_wide_normal_at_the_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    top = 2**32 - 1
    a = [0, 0, 0, 1, 255, 2**16, 2**24 + 1, 2**31, top - 128, top, top]
    b = [0, 2**31, 2**30, 0, 2**29, 3, 2**31 + 7, top, 5, 0, 2**31]
    z = wide_normal_of(a, b, monkeypatch)
    wide = np.array(a, np.float64), np.array(b, np.float64)
    radius = np.sqrt(-2 * np.log((wide[0] + 2.0**-32) / 2**32))
    # Words are rounded to float32, so the last digits of a large word are lost.
    expected = radius * np.cos(2 * np.pi * wide[1] / 2**32)
    assert np.isfinite(z).all()
    np.testing.assert_allclose(z, expected, rtol=2e-6, atol=4e-4)
    assert z[0] == pytest.approx(math.sqrt(128 * math.log(2)), rel=1e-6)
    assert min(z.max(), -z.min()) > 9.4  # beyond 5.42, on both sides


def test_wide_normal_law() -> None:
    """KS at a fixed seed: accepts the standard normal, rejects 10 % less and more."""
    z = np.asarray(jax.jit(lambda k: threefry.wide_normal(k, (100_000,)))(KEY))
    assert z.dtype == np.float32

    def p(std: float) -> float:
        return scipy.stats.kstest(z, scipy.stats.norm(scale=std).cdf).pvalue

    assert p(1.0) > 1e-6 > max(p(0.9), p(1.1))
    # Fourth moment: 3, with standard error sqrt(96 / n); 5 of them is 6e-7.
    assert abs(np.mean(z.astype(np.float64) ** 4) - 3) < 5 * math.sqrt(96 / len(z))
    # Neighbours are uncorrelated: standard error 1 / sqrt(n).
    assert abs(np.mean(z[1:] * z[:-1])) < 5 / math.sqrt(len(z))


def test_wide_normal_is_a_function_of_key_and_index() -> None:
    z = threefry.wide_normal(KEY, (50,))
    np.testing.assert_array_equal(z, threefry.wide_normal(KEY, (50,)))
    other = threefry.wide_normal(threefry.fold_in(KEY, 1), (50,))
    assert not np.any(np.asarray(z) == np.asarray(other))
    assert threefry.wide_normal(KEY, (0, 2)).shape == (0, 2)


def test_secret_normal_inverts_the_words() -> None:
    """Words all over the range and at its ends, against an inverse in float64."""
    rng = np.random.default_rng(7)
    spread = np.exp2(rng.uniform(0, 31, 50_000)).astype(np.uint64)  # Also near 0 and 1.
    magnitude = np.concatenate([spread, 2**31 - spread, np.zeros(1000, np.uint64)])
    low = rng.integers(0, 2**32, magnitude.size, np.uint64)
    low[-1000:] = np.exp2(rng.uniform(0, 32, 1000)).astype(np.uint64)  # The far tail.
    low[-1] = 0
    inverse = jax.jit(threefry._far_inverse_normal)
    words = (jnp.asarray(w.astype(np.uint32)) for w in (magnitude, low))
    z = np.asarray(inverse(*words), np.float64)
    mass = (magnitude + (low + 1) / 2**32) / 2**31  # Of both tails beyond z.
    rest = (2**31 - magnitude - 0.5) / 2**31
    near = scipy.special.erfinv(rest) * math.sqrt(2)
    exact = np.where(mass < 0.5, -scipy.special.ndtri(mass / 2), near)
    np.testing.assert_allclose(z, exact, rtol=4e-6)
    assert 0 < z.min() < 1e-9
    assert z.max() == z[-1] == pytest.approx(9.0802, abs=1e-4)  # Both tails: 2**-63.
    words = (jnp.asarray(w.astype(np.uint32)) for w in (magnitude + 2**31, low))
    np.testing.assert_array_equal(inverse(*words), -z)


def test_secret_normal_is_drawn_from_one_block_each() -> None:
    """All 64 bits of the reference's block, in its order."""
    k0, k1 = map(int, jax.random.key_data(KEY))
    high, low = reference((k0, k1), np.zeros(20, np.uint32), np.arange(20))
    expected = threefry._far_inverse_normal(jnp.asarray(high), jnp.asarray(low))
    z = threefry.secret_normal(KEY, (4, 5))
    np.testing.assert_allclose(z.reshape(-1), expected, rtol=1e-6)
    assert threefry.secret_normal(KEY, (0, 2)).shape == (0, 2)


def test_secret_normal_law() -> None:
    """As for :func:`test_wide_normal_law`; and the moments that tails weigh in."""
    z = np.asarray(jax.jit(lambda k: threefry.secret_normal(k, (400_000,)))(KEY))
    assert z.dtype == np.float32

    def p(std: float) -> float:
        return scipy.stats.kstest(z, scipy.stats.norm(scale=std).cdf).pvalue

    assert p(1.0) > 1e-6 > max(p(0.97), p(1.03))
    z = z.astype(np.float64)
    for power, moment, variance in ((2, 1, 2), (4, 3, 96), (6, 15, 10170)):
        error = math.sqrt(variance / z.size)
        assert abs(np.mean(z**power) - moment) < 5.5 * error
    for lag in (1, 2, 64):
        assert abs(np.mean(z[lag:] * z[:-lag])) < 5.5 / math.sqrt(z.size)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 2**12])
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
