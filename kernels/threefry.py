"""Random bits, written out so that XLA can fuse them.

``jax.random`` lowers threefry to a loop on CPU: slow on large arrays, and a
fusion barrier. The same twenty rounds written out in ``jnp`` give the same
bits (a test compares them), fuse into whatever consumes them, and need no
temporary. The bits do not depend on ``jax_threefry_partitionable``.

Whatever must be secret (noise, sampling) and every key is threefry. The normals of
*public directions* come from a keyed integer hash, which is cheaper: a direction must
look random to a loss function, not to an adversary, who is told the direction anyway.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two 32-bit words of a scalar typed threefry key."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key must be a typed jax key, got dtype {key.dtype}")
    data = jax.random.key_data(key)
    if data.shape != (2,):
        raise ValueError(
            "key must be one threefry key, got key data of shape "
            f"{data.shape}; use jax.vmap for several"
        )
    return data[0], data[1]


def _threefry(
    k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Twenty rounds of threefry-2x32 (Salmon et al., 2011); uint32 throughout."""
    ks = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + ks[0], x1 + ks[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r))) ^ x0
        x0 = x0 + ks[(i + 1) % 3]
        x1 = x1 + ks[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


# Traced once per shape and inlined: an eager call compiles one program, not a hundred
# operations.
_inlined = functools.partial(jax.jit, static_argnums=1, inline=True)


def fold_in(key: jax.Array, data: int | jax.Array) -> jax.Array:
    """``jax.random.fold_in``, bit for bit, without its loop.

    Args:
      key: typed threefry key, shape=().
      data: integer in [0, 2**32), shape=().
    """
    low = np.uint32(data) if isinstance(data, int) else data.astype(jnp.uint32)
    return _fold_in(key, low)


@functools.partial(jax.jit, inline=True)
def _fold_in(key: jax.Array, low: jax.Array) -> jax.Array:
    k0, k1 = _words(key)
    return jax.random.wrap_key_data(
        jnp.stack(_threefry(k0, k1, jnp.uint32(0), low)), impl="threefry2x32"
    )


def _counters(shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"an array of {size} elements exceeds the 2**32 counters")
    return jax.lax.iota(jnp.uint32, size).reshape(shape)


@_inlined
def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``jax.random.bits(key, shape)``, bit for bit: uint32, fusible."""
    k0, k1 = _words(key)
    a, b = _threefry(k0, k1, jnp.uint32(0), _counters(shape))
    return a ^ b


def _mix(x: jax.Array) -> jax.Array:
    """An invertible 32-bit mixer of low bias (C. Wellons' ``lowbias32``)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _hash(k0: jax.Array, k1: jax.Array, counters: jax.Array) -> jax.Array:
    """Words of public directions: two mixes, each under one word of the key."""
    return _mix(_mix(counters ^ k0) + k1)


#: Words that share a key in :func:`stored_words`: one key is looked up for all of them.
_BLOCK = 64


def stored_bits(key: jax.Array, size: int) -> jax.Array:
    """``bits(key, (size,))``, made to exist in memory."""
    return stored_words(key[None], [(size,)])[0]


def stored_words(keys: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """``bits(key, (size,))`` of many keys, made to exist in memory.

    A loop is the one thing XLA does not fuse into its consumers. Words that are read
    more often than they cost to draw (packed signs: 32 elements each, three times a
    step) would otherwise be drawn again for every element. One loop draws them all: a
    loop for each leaf would be compiled as often as there are leaves.

    Args:
      keys: typed threefry keys, shape=(P,).
      shapes: of what is drawn from them, in their order: ``(size,)`` from one key,
        ``(N, size)`` from N.

    Returns:
      Arrays of these shapes, uint32.
    """
    blocks = [-(-shape[-1] // _BLOCK) for shape in shapes]  # Of each key.
    owners = [math.prod(shape[:-1]) for shape in shapes]
    ends = np.cumsum(np.repeat(blocks, owners), dtype=np.uint32)
    begins = ends - np.repeat(blocks, owners).astype(np.uint32)
    # Four rounds are a loop, and long enough to vectorise. A few words are cheaper drawn
    # again than a loop is to start: one round, which XLA unrolls and fuses.
    rounds = 4 if sum(math.prod(shape) for shape in shapes) > 256 else 1
    width = -(-int(ends[-1]) // rounds)
    words = jax.random.key_data(keys)

    def draw(first: jax.Array) -> jax.Array:
        block = first + jax.lax.iota(jnp.uint32, width)
        owner = jnp.searchsorted(jnp.asarray(ends), block, side="right")
        owner = jnp.minimum(owner, len(ends) - 1)  # Of blocks that fill the last round.
        begin = (block - jnp.asarray(begins)[owner]) * _BLOCK
        counters = begin[:, None] + jax.lax.iota(jnp.uint32, _BLOCK)[None]
        k0, k1 = words[owner, 0][:, None], words[owner, 1][:, None]
        a, b = _threefry(k0, k1, jnp.uint32(0), counters)
        return a ^ b

    starts = jnp.arange(rounds, dtype=jnp.uint32) * jnp.uint32(width)
    flat = jax.lax.map(draw, starts).reshape(-1)
    drawn, at = [], 0
    for shape, count, number in zip(shapes, blocks, owners, strict=True):
        size = number * count * _BLOCK
        padded = flat[at : at + size].reshape(*shape[:-1], count * _BLOCK)
        drawn.append(padded[..., : shape[-1]])
        at += size
    return drawn


@functools.partial(jax.jit, static_argnums=2, inline=True)
def permuted(key: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Where a random permutation of [0, size) takes some of the indices.

    A Feistel network of 16 rounds on the bits of an index, so that a few entries of a
    permutation cost a few words: no sort, and nothing of length ``size``. What leaves
    [0, size) goes through again until it comes back, which keeps the map one to one.
    Random enough to shuffle by; secrecy should not rest on it.

    Args:
      key: typed threefry key, shape=().
      index: integers in [0, size), any shape.
      size: at least 1, at most 2**31.

    Returns:
      int32 of the same shape.
    """
    k0, k1 = _words(key)
    bits = (size - 1).bit_length()
    low = bits // 2
    low_mask, high_mask = np.uint32(2**low - 1), np.uint32(2 ** (bits - low) - 1)

    def twice(i: jax.Array, halves: tuple[jax.Array, jax.Array]) -> tuple:
        left, right = halves
        counter = 2 * i.astype(jnp.uint32)
        left ^= _threefry(k0, k1, counter, right)[0] & high_mask
        right ^= _threefry(k0, k1, counter + 1, left)[0] & low_mask
        return left, right

    def outside(x_and_due: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(x_and_due[1])

    def again(x_and_due: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, due = x_and_due
        left, right = jax.lax.fori_loop(0, 8, twice, (x >> low, x & low_mask))
        x = jnp.where(due, (left << low) | right, x)
        return x, x >= size

    start = index.astype(jnp.uint32), jnp.ones(jnp.shape(index), bool)
    return jax.lax.while_loop(outside, again, start)[0].astype(jnp.int32)


# log2(m) on [1, 2), from the highest power down: absolute error 2.2e-6 (Chebyshev).
_LOG2 = (
    -0.025123231112957,
    0.27003777027130127,
    -1.247963786125183,
    3.249469518661499,
    -5.301712512969971,
    6.089898109436035,
    -3.0346033573150635,
)
# Giles, "Approximating the erfinv function" (2010), single precision: erfinv(u) / u as
# polynomials of -log(1 - u**2), in the centre and in the tails.
_ERFINV_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_ERFINV_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def _horner(x: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    total = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = total * x + jnp.float32(c)
    return total


def _log2(x: jax.Array) -> jax.Array:
    """Logarithm of positive normal floats, absolute error 2.2e-6."""
    word = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = ((word >> 23) - 127).astype(jnp.float32)
    mantissa = jax.lax.bitcast_convert_type((word & 0x7FFFFF) | 0x3F800000, jnp.float32)
    return exponent + _horner(mantissa, _LOG2)


def _inverse_normal(words: jax.Array) -> jax.Array:
    """Standard normals of uniform words: see :func:`normal`."""
    # Odd multiples of 2**-24 in (-1, 1): symmetric, never 0 or 1.
    odd = (words >> jnp.uint32(8)).astype(jnp.int32) * 2 + (1 - 2**24)
    u = odd.astype(jnp.float32) * jnp.float32(2**-24)
    square = (1 - u) * (1 + u)
    w = _log2(square) * jnp.float32(-math.log(2))
    centre = _horner(w - jnp.float32(2.5), _ERFINV_CENTRE)
    # w can be a rounding below 0 in the centre, where the tail is not looked at.
    tail = _horner(jnp.sqrt(jnp.maximum(w, 0)) - jnp.float32(3), _ERFINV_TAIL)
    ratio = jnp.where(w < 5, centre, tail)
    return jnp.float32(math.sqrt(2)) * u * ratio


@_inlined
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normals in float32, for public directions only.

    Hashed words through an inverse that is within 2e-6 (relative) of the exact one, far
    cheaper than ``jax.random.normal``. 2**24 values, and the support ends at
    5.42 standard deviations; secret noise comes from :func:`wide_normal`.
    """
    return _inverse_normal(_hash(*_words(key), _counters(shape)))


@functools.partial(jax.jit, inline=True)
def normal_at(key: jax.Array, index: jax.Array) -> jax.Array:
    """The elements of ``normal(key, shape).reshape(-1)`` at some indices, any shape."""
    return _inverse_normal(_hash(*_words(key), index.astype(jnp.uint32)))


@_inlined
def normal_sum_of_squares(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sum of squares of ``normal(key, shape)``, float32, shape=().

    In blocks, in a loop: XLA would otherwise store all the normals to sum them. The
    two stages keep the float32 error far below one in 1e6.
    """
    k0, k1 = _words(key)
    size, block = math.prod(shape), 2**16
    if size >= 2**32:
        raise ValueError(f"an array of {size} elements exceeds the 2**32 counters")

    def partial(start: jax.Array) -> jax.Array:
        counters = jax.lax.iota(jnp.uint32, min(size, block)) + start
        squares = jnp.square(_inverse_normal(_hash(k0, k1, counters)))
        # Not contracted into the sum: the norm is taken in several programs.
        squares = rounded(squares, zero_after(k0[None]))
        return jnp.sum(jnp.where(counters < size, squares, 0))

    starts = np.arange(0, max(size, 1), block, dtype=np.uint32)
    return jnp.sum(jax.lax.map(partial, jnp.asarray(starts)))


@_inlined
def wide_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normals in float32 whose support ends at 9.4, not 5.42.

    Box-Muller with a radius from 64 bits, so the missing tail has mass below 1e-20 a
    draw instead of 6e-8, and an angle from another block.
    """
    k0, k1 = _words(key)
    high, low = _threefry(k0, k1, jnp.uint32(0), _counters(shape))
    b, _ = _threefry(k0, k1, jnp.uint32(1), _counters(shape))
    # (high + (low + 1) / 2**32) / 2**32 in (0, 1]: small values keep their precision.
    fraction = (low.astype(jnp.float32) + jnp.float32(1)) * jnp.float32(2**-32)
    u = (high.astype(jnp.float32) + fraction) * jnp.float32(2**-32)
    radius = jnp.sqrt(jnp.float32(-2) * jnp.log(u))
    angle = b.astype(jnp.float32) * jnp.float32(2 * math.pi * 2**-32)
    return radius * jnp.cos(angle)


# erfinv(u) / u for w = -log(1 - u**2) from 5 to 43: a minimax polynomial of sqrt(w) - 4,
# fitted to values of 50 digits; relative error 3e-6 in float32.
_ERFINV_FAR_TAIL = (
    1.2868172e-05,
    -7.567255e-05,
    0.00012696543,
    -4.14028e-05,
    0.00017149257,
    -0.00093052327,
    0.0013553592,
    1.0095118,
    3.8397746,
)


def _far_inverse_normal(high: jax.Array, low: jax.Array) -> jax.Array:
    """Standard normals of 64 uniform bits: see :func:`secret_normal`."""
    one, ulp = jnp.float32(1), jnp.float32(2**-31)
    # p in (0, 1], the mass of both tails beyond the normal, from 63 bits: its relative
    # precision is that of a float. For the same of u = 1 - p, it is the complement's.
    magnitude = high & jnp.uint32(0x7FFFFFFF)
    fraction = (low.astype(jnp.float32) + one) * jnp.float32(2**-32)
    p = (magnitude.astype(jnp.int32).astype(jnp.float32) + fraction) * ulp
    complement = (magnitude ^ jnp.uint32(0x7FFFFFFF)).astype(jnp.int32)
    u = (complement.astype(jnp.float32) + jnp.float32(0.5)) * ulp
    w = jnp.float32(-math.log(2)) * _log2(p * (jnp.float32(2) - p))
    centre = _horner(w - jnp.float32(2.5), _ERFINV_CENTRE)
    tail = _horner(jnp.sqrt(jnp.maximum(w, 0)) - jnp.float32(4), _ERFINV_FAR_TAIL)
    z = jnp.float32(math.sqrt(2)) * u * jnp.where(w < 5, centre, tail)
    sign = high & jnp.uint32(0x80000000)
    word = jax.lax.bitcast_convert_type(z, jnp.uint32) ^ sign
    return jax.lax.bitcast_convert_type(word, jnp.float32)


@_inlined
def secret_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normals in float32 whose support ends at 9.08, one block each.

    As good a tail as :func:`wide_normal` at half the blocks: one sign and 63 bits of
    magnitude go through an inverse that is within 4e-6 (relative) of the exact one. The
    missing tail has mass 1.1e-19. For noise that is drawn where it is used.
    """
    return _far_inverse_normal(
        *_threefry(*_words(key), jnp.uint32(0), _counters(shape))
    )


def zero_after(after: jax.Array) -> jax.Array:
    """int32 zero, shape=(), that no compiler knows to be zero before ``after`` exists.

    It comes from the bits of one element, so a NaN in ``after`` (one record's
    activation) cannot reach the perturbation, which every record shares.
    """
    first = after.reshape(-1)[:1]
    if first.size == 0:
        return jnp.zeros((), jnp.int32)
    word = jax.lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.itemsize}"))
    n = word[0].astype(jnp.int32)
    return (n * (n + 1)) & 1  # The product of neighbours is even, also modulo 2**32.


def keys_after(keys: jax.Array, after: jax.Array) -> jax.Array:
    """The same typed keys, to the bit, not available before ``after``.

    XLA merges equal computations: what is drawn twice from one key would be drawn once
    and kept alive in between. What is drawn from ordered keys is drawn anew.
    """
    data = jax.random.key_data(keys) + zero_after(after).astype(jnp.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32")


@jax.custom_jvp
def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """``x`` as its own dtype rounds it, whatever it is used for.

    What goes straight into a product or a sum may be contracted with it, in one program
    and not in another, and a rounding to 16 bits may be left out. Nothing does so through
    the integers, with a ``zero``, int32 (), that no compiler knows to be one.
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer) + zero.astype(integer)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


@rounded.defjvp
def _rounded_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """A bitcast has no tangent; what is rounded keeps its own."""
    return rounded(*primals), tangents[0]
