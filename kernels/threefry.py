"""Random bits, written out so that XLA can fuse them.

``jax.random`` lowers threefry to a loop on CPU: slow on large arrays, and a
fusion barrier. The same twenty rounds written out in ``jnp`` give the same
bits (a test compares them), fuse into whatever consumes them, and need no
temporary. The bits do not depend on ``jax_threefry_partitionable``.

Keys are of two kinds. *Public* ones (directions) are JAX's threefry-2x32 keys of 64
bits. *Secret* ones (noise, sampling) have 128 bits: typed keys of threefry-4x32 (Salmon et
al., 2011, twenty rounds), made by :func:`secret_key`. :func:`fold_in`, :func:`bits` and
:func:`permuted` take either kind.

The normals of public directions come from a keyed integer hash, which is cheaper: a
direction must look random to a loss function, not to an adversary, who is told it anyway.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two 32-bit words of a scalar typed threefry key."""
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
    """Computes twenty rounds of threefry-2x32 (Salmon et al., 2011) in uint32."""
    ks = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + ks[0], x1 + ks[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r))) ^ x0
        x0 = x0 + ks[(i + 1) % 3]
        x1 = x1 + ks[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


_ROTATIONS_4 = (
    (10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20),
)  # fmt: skip
Block = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _threefry4(key: Block, counter: Block) -> Block:
    """Computes twenty rounds of threefry-4x32 (Salmon et al., 2011) in uint32."""
    ks = (*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ jnp.uint32(0x1BD11BDA))
    x = [c + k for c, k in zip(counter, key, strict=True)]
    for i in range(20):
        # Of two mixes a round, the odd rounds' cross over.
        for to, other, r in zip(
            (0, 2), (1, 3) if i % 2 == 0 else (3, 1), _ROTATIONS_4[i % 8], strict=True
        ):
            x[to] = x[to] + x[other]
            turned = (x[other] << jnp.uint32(r)) | (x[other] >> jnp.uint32(32 - r))
            x[other] = turned ^ x[to]
        if i % 4 == 3:
            x = [word + ks[(i // 4 + 1 + j) % 5] for j, word in enumerate(x)]
            x[3] = x[3] + jnp.uint32(i // 4 + 1)
    return x[0], x[1], x[2], x[3]


#: What a block of a secret key is for.
_DRAWS, _CHILDREN, _BITS, _PLACES = 0, 1, 2, 3


def _refuse(*args: Any) -> NoReturn:
    raise NotImplementedError(
        "secret keys are for the functions of jaxdp.kernels.threefry, which say what a "
        "number is drawn for; jax.random does not"
    )


# A secret key is the cipher's four words, and up to three that go into its counters: what
# is folded in costs nothing until there is no place left.
_SECRET = {
    size: jax.extend.random.define_prng_impl(
        key_shape=(size,),
        seed=_refuse,
        split=_refuse,
        random_bits=_refuse,
        fold_in=_refuse,
        name=f"threefry4x32_{size - 4}",
        tag="fry4",
    )
    for size in (4, 5, 6, 7)
}


def secret_key(words: jax.Array | np.ndarray) -> jax.Array:
    """Makes typed secret keys from their words, uint32 (..., 4): 128 bits each.

    (One to three words more are those of keys into which something was folded.)

    Example:
      >>> import numpy as np
      >>> from jaxdp.kernels import threefry
      >>> words = np.arange(4, dtype=np.uint32)  # Not a secret.
      >>> threefry.is_secret(threefry.secret_key(words))
      True
    """
    return jax.random.wrap_key_data(jnp.asarray(words), impl=_SECRET[words.shape[-1]])


def is_secret(key: jax.Array) -> bool:
    """Returns True if a typed key is a secret key of 128 bits, which JAX's rbg is not.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import threefry
      >>> threefry.is_secret(jax.random.key(0))
      False
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return typed and jax.random.key_impl(key) in _SECRET.values()


def _secret_words(key: jax.Array) -> jax.Array:
    """Returns the words of one secret key, shape=(4..7,)."""
    words = jax.random.key_data(key) if is_secret(key) else None
    if words is None or words.ndim != 1:
        raise ValueError(
            f"key must be one secret key, got dtype {key.dtype} of shape {key.shape}; see "
            "threefry.secret_key, and jax.vmap for several"
        )
    return words


def for_role(key: jax.Array, role: int) -> jax.Array:
    """Derives the secret key of a role, from 1 to 2**16 - 1, from a settled key.

    Example:
      >>> import numpy as np
      >>> from jaxdp.kernels import threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> one, two = threefry.for_role(key, 1), threefry.for_role(key, 2)
      >>> bool(threefry.bits(one, ()) == threefry.bits(two, ()))
      False
    """
    words = _secret_words(key)
    if len(words) != 4:
        raise ValueError(
            f"key must be a settled secret key, got one of {len(words)} words"
        )
    if not 1 <= role < 2**16:
        raise ValueError(f"role must be from 1 to 2**16 - 1, got {role}")
    return secret_key(jnp.concatenate([words, jnp.full((1,), role, jnp.uint32)]))


def secret_block(
    key: jax.Array, index: jax.Array, number: int | jax.Array = 0, use: int = _DRAWS
) -> Block:
    """Computes four uniform uint32 words for every index, from it and the key alone.

    Args:
      key: a secret key (:func:`secret_key`), shape=().
      index: integers, any shape; counts modulo 2**32.
      number: further blocks of the same index have other numbers, below 64.
      use: keeps apart what one key serves for.

    Returns:
      Four arrays of that shape. All that an element needs comes from one evaluation, which
      XLA fuses into its consumer.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from jaxdp.kernels import threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> words = threefry.secret_block(key, jnp.arange(3))
      >>> len(words), words[0].shape, words[0].dtype
      (4, (3,), dtype('uint32'))
    """
    words = _secret_words(key)
    if isinstance(number, int) and not 0 <= number < 64:
        # It would run into the bits that say what the block is for.
        raise ValueError(f"number must be from 0 to 63, got {number}")
    size = len(words)
    zero = jnp.zeros(jnp.shape(index), jnp.uint32)
    role, one, other = (words[i] if i < size else jnp.uint32(0) for i in (4, 5, 6))
    code = (role << jnp.uint32(16)) | jnp.uint32(size << 8 | use << 6)
    code = code | jnp.asarray(number, jnp.uint32)
    counter = index.astype(jnp.uint32), zero + code, zero + one, zero + other
    return _threefry4((words[0], words[1], words[2], words[3]), counter)


@functools.partial(jax.jit, inline=True)
def settled(key: jax.Array) -> jax.Array:
    """Returns a secret key of four words for one into which something was folded.

    Example:
      >>> import jax
      >>> import numpy as np
      >>> from jaxdp.kernels import threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> folded = threefry.fold_in(key, 7)
      >>> [jax.random.key_data(k).size for k in (folded, threefry.settled(folded))]
      [6, 4]
    """
    if len(_secret_words(key)) == 4:
        return key
    words = secret_block(key, jnp.zeros((), jnp.uint32), use=_CHILDREN)
    return secret_key(jnp.stack(words))


def _folded(key: jax.Array, data: jax.Array) -> jax.Array:
    words = _secret_words(key)
    if len(words) == 7:
        words = jax.random.key_data(settled(key))
    if len(words) == 4:
        words = jnp.concatenate([words, jnp.zeros((1,), jnp.uint32)])
    return secret_key(jnp.concatenate([words, data.astype(jnp.uint32).reshape(1)]))


def held(key: jax.Array) -> jax.Array:
    """Returns the same secret key, computed before anything is drawn from it.

    XLA would otherwise compute a key that changes within a loop again in every consumer,
    and keep vectors of the cipher's words in memory, three to twelve for each draw.

    Example:
      >>> import numpy as np
      >>> from jaxdp.kernels import threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> bool(threefry.held(key) == key)
      True
    """
    return secret_key(jax.lax.optimization_barrier(_secret_words(key)))


# Traced once per shape and inlined: an eager call compiles one program, not a hundred
# operations.
_inlined = functools.partial(jax.jit, static_argnums=1, inline=True)


def fold_in(key: jax.Array, data: int | jax.Array) -> jax.Array:
    """Computes ``jax.random.fold_in`` bit for bit, without its loop.

    A secret key, which JAX does not fold, becomes another secret key.

    Args:
      key: typed threefry key, shape=(), of either kind; so is what is returned.
      data: integer in [0, 2**32), shape=().

    Example:
      >>> import jax
      >>> from jaxdp.kernels import threefry
      >>> key = jax.random.key(0)
      >>> bool(threefry.fold_in(key, 7) == jax.random.fold_in(key, 7))
      True
    """
    low = np.uint32(data) if isinstance(data, int) else data.astype(jnp.uint32)
    return _fold_in(key, low)


@functools.partial(jax.jit, inline=True)
def _fold_in(key: jax.Array, low: jax.Array) -> jax.Array:
    if is_secret(key):
        return _folded(key, low)
    k0, k1 = _words(key)
    return jax.random.wrap_key_data(
        jnp.stack(_threefry(k0, k1, jnp.uint32(0), low)), impl="threefry2x32"
    )


def _counters(shape: tuple[int, ...]) -> jax.Array:
    """Counts the elements of an array, uint32.

    Axis by axis: a flat count that is reshaped would be stored on a TPU, and sent between
    devices that share the array.
    """
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"an array of {size} elements exceeds the 2**32 counters")
    if not size:
        return jnp.zeros(shape, jnp.uint32)
    total = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]))
        total += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return total


@_inlined
def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Computes ``jax.random.bits(key, shape)`` bit for bit: uint32, fusible.

    (Of a secret key: one word of each block.)

    Example:
      >>> import jax
      >>> from jaxdp.kernels import threefry
      >>> drawn = threefry.bits(jax.random.key(0), (3,))
      >>> drawn.shape, drawn.dtype
      ((3,), dtype('uint32'))
    """
    if is_secret(key):
        return secret_block(held(key), _counters(shape), use=_BITS)[0]
    k0, k1 = _words(key)
    a, b = _threefry(k0, k1, jnp.uint32(0), _counters(shape))
    return a ^ b


def _mix(x: jax.Array) -> jax.Array:
    """Mixes 32 bits invertibly with low bias (C. Wellons' ``lowbias32``)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _hash(k0: jax.Array, k1: jax.Array, counters: jax.Array) -> jax.Array:
    """Hashes counters for public directions: two mixes, each under one word of the key."""
    return _mix(_mix(counters ^ k0) + k1)


@_inlined
def hashed(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws uint32 words by the hash of public directions: quickly, and no secrets.

    They look random to what does not know the hash, as a loss and a rounding do.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import threefry
      >>> drawn = threefry.hashed(jax.random.key(0), (3,))
      >>> drawn.shape, drawn.dtype
      ((3,), dtype('uint32'))
    """
    return _hash(*_words(key), _counters(shape))


#: Words of :func:`stored_words` that share a key, which is looked up once for all.
BLOCK = 64


def stored_bits(key: jax.Array, size: int) -> jax.Array:
    """Draws ``bits(key, (size,))`` and stores them in memory.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import threefry
      >>> key = jax.random.key(0)
      >>> bool((threefry.stored_bits(key, 5) == threefry.bits(key, (5,))).all())
      True
    """
    return stored_words(key[None], [size])[:size]


def stored_words(keys: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Draws ``bits(key, (size,))`` of many keys and stores them in memory, in one array.

    A loop is the one thing XLA does not fuse into its consumers. Words that are read
    more often than they cost to draw (packed signs: 32 elements each, three times a
    step) would otherwise be drawn again for every element. One loop draws them all: a
    loop for each leaf would be compiled as often as there are leaves. They stay in one
    array, of which each use reads a slice: the slices would be a second copy.

    Args:
      keys: typed threefry keys of public directions, shape=(P,).
      sizes: how many words are drawn from each.

    Returns:
      uint32, shape=(N,): the words of a key begin at a multiple of :data:`BLOCK`, right
      after those of the key before. The last ones are nobody's: cut off, they would be
      copied.

    Raises:
      ValueError: secret keys, of whose words only two would count.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import threefry
      >>> keys = jax.vmap(jax.random.key)(jax.numpy.arange(2))
      >>> words = threefry.stored_words(keys, [5, 100])
      >>> bool((words[64:164] == threefry.bits(keys[1], (100,))).all())
      True
    """
    if is_secret(keys):
        raise ValueError(
            "keys must be one threefry key of 64 bits each, not secret ones"
        )
    counted = np.asarray(sizes, np.int64)
    # Four rounds are a loop, and long enough to vectorise. A few words are cheaper drawn
    # again than a loop is to start: one round, which XLA unrolls and fuses.
    rounds = 4 if sum(sizes) > 256 else 1

    def draw(row: tuple[jax.Array, ...]) -> jax.Array:
        k0, k1, begin, _ = row
        counters = begin + jax.lax.iota(jnp.uint32, BLOCK)[None]
        a, b = _threefry(k0, k1, jnp.uint32(0), counters)
        return a ^ b

    return jax.lax.map(draw, _blocks(keys, counted, BLOCK, rounds)).reshape(-1)


def _blocks(
    keys: jax.Array, sizes: np.ndarray, block: int, rounds: int
) -> tuple[jax.Array, ...]:
    """Cuts the counters of many keys into blocks, for a loop of so many rounds.

    Returns:
      Of each block both words of its key, where it begins and where its key's counters
      end, uint32 (rounds, rows, 1). Those that fill the last round are beyond an end.
    """
    counts = -(-sizes // block)
    ends = np.cumsum(counts)
    rows = -(-int(ends[-1]) // rounds)
    index: Any = np.arange(rounds * rows, dtype=np.uint32)
    # On the host, unless the program would carry a long table.
    lib: Any = np if len(index) <= 2**14 else jnp
    index = index if lib is np else jax.lax.iota(jnp.uint32, len(index))
    owner = lib.searchsorted(lib.asarray(ends.astype(np.uint32)), index, side="right")
    owner = lib.minimum(owner, len(ends) - 1)
    begins = lib.asarray((ends - counts).astype(np.uint32))
    begin = (index - begins[owner]) * np.uint32(block)
    end = lib.asarray(sizes.astype(np.uint32))[owner]
    end = lib.where(index < np.uint32(ends[-1]), end, np.uint32(0))
    words = jax.random.key_data(keys)[owner]
    return tuple(
        jnp.asarray(x).reshape(rounds, rows, 1)
        for x in (words[:, 0], words[:, 1], begin, end)
    )


@functools.partial(jax.jit, static_argnums=2, inline=True)
def permuted(key: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Returns the images of some indices under a random permutation of [0, size).

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

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import threefry
      >>> order = threefry.permuted(jax.random.key(0), jnp.arange(10), size=10)
      >>> sorted(order.tolist()) == list(range(10))
      True
    """
    bits = (size - 1).bit_length()
    low = bits // 2
    low_mask, high_mask = np.uint32(2**low - 1), np.uint32(2 ** (bits - low) - 1)

    def mixed(counter: jax.Array, half: jax.Array) -> jax.Array:
        if is_secret(key):
            return secret_block(key, half, counter, _PLACES)[0]
        return _threefry(*_words(key), counter, half)[0]

    def twice(i: jax.Array, halves: tuple[jax.Array, jax.Array]) -> tuple:
        left, right = halves
        counter = jnp.asarray(2 * i, jnp.uint32)
        left ^= mixed(counter, right) & high_mask
        right ^= mixed(counter + 1, left) & low_mask
        return left, right

    def again(x_and_due: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, due = x_and_due
        left, right = jax.lax.fori_loop(0, 8, twice, (x >> low, x & low_mask))
        x = jnp.where(due, (left << low) | right, x)
        return x, x >= np.uint32(size)

    start = index.astype(jnp.uint32), jnp.ones(jnp.shape(index), bool)
    done = jax.lax.while_loop(lambda x_and_due: jnp.any(x_and_due[1]), again, start)
    return done[0].astype(jnp.int32)


# log2(m) on [1, 2), from the highest power down: absolute error 2.2e-6 (Chebyshev).
_LOG2 = (
    -0.025123231112957, 0.27003777027130127, -1.247963786125183, 3.249469518661499,
    -5.301712512969971, 6.089898109436035, -3.0346033573150635,
)  # fmt: skip
# Giles, "Approximating the erfinv function" (2010), single precision: erfinv(u) / u as
# polynomials of -log(1 - u**2), in the centre and in the tails.
_ERFINV_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def _horner(x: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    total = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = total * x + jnp.float32(c)
    return total


def _log2(x: jax.Array) -> jax.Array:
    """Computes log2 of positive normal floats, with an absolute error of 2.2e-6."""
    word = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = ((word >> 23) - 127).astype(jnp.float32)
    mantissa = jax.lax.bitcast_convert_type((word & 0x7FFFFF) | 0x3F800000, jnp.float32)
    return exponent + _horner(mantissa, _LOG2)


def _inverse_normal(words: jax.Array) -> jax.Array:
    """Maps uniform words to standard normals: see :func:`normal`."""
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
    """Draws standard normals in float32, for public directions only.

    Hashed words through an inverse that is within 2e-6 (relative) of the exact one, far
    cheaper than ``jax.random.normal``. 2**24 values, and the support ends at
    5.42 standard deviations; secret noise is :mod:`jaxdp.kernels.lattice_gaussian`'s.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import threefry
      >>> z = threefry.normal(jax.random.key(0), (10_000,))
      >>> z.dtype, bool(abs(z.mean()) < 0.05), bool(abs(z.std() - 1) < 0.05)
      (dtype('float32'), True, True)
    """
    return _inverse_normal(hashed(key, shape))


@functools.partial(jax.jit, inline=True)
def normal_at(key: jax.Array, index: jax.Array) -> jax.Array:
    """Draws elements of ``normal(key, shape).reshape(-1)`` at indices of any shape.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import threefry
      >>> key = jax.random.key(0)
      >>> some = threefry.normal_at(key, jnp.array([4, 2]))
      >>> bool((some == threefry.normal(key, (5,))[jnp.array([4, 2])]).all())
      True
    """
    return _inverse_normal(_hash(*_words(key), index.astype(jnp.uint32)))


def normal_sum_of_squares(keys: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Computes the sum of squares of ``normal(key, (size,))`` of many keys, float32 ().

    One loop over them all, of which XLA stores nothing but lanes: element after element
    is added to one of them. Lanes are halved until one is left. So the order of all sums
    is that of the program, in every program and for any number of such sums beside each
    other, and the float32 error stays far below one in 1e6.

    Args:
      keys: typed threefry keys, shape=(P,).
      sizes: how many normals are drawn from each.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import threefry
      >>> keys = jax.vmap(jax.random.key)(jax.numpy.arange(2))
      >>> total = threefry.normal_sum_of_squares(keys, [100, 7])
      >>> parts = [threefry.normal(keys[0], (100,)), threefry.normal(keys[1], (7,))]
      >>> bool(abs(total - sum((x**2).sum() for x in parts)) < 1e-3)
      True
    """
    counted = np.asarray(sizes, np.int64)
    total = int(counted.sum())
    if total == 0:
        return jnp.zeros((), jnp.float32)
    if counted.max() >= 2**32:
        raise ValueError(
            f"an array of {counted.max()} elements exceeds the 2**32 counters"
        )
    # Blocks of one key are short enough that few of their elements are beyond it.
    block = 2 ** min(max((total // (16 * len(counted))).bit_length() - 1, 4), 14)
    lanes = 2 ** min(max((total // 64).bit_length(), 16), 24)
    rounds = -(-int((-(-counted // block)).sum()) * block // lanes)
    blocks = _blocks(keys, counted, block, rounds)
    zero = zero_after(blocks[0])

    def add(lanes: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        k0, k1, begin, end = row
        counters = begin + jax.lax.iota(jnp.uint32, block)[None]
        squares = jnp.square(_inverse_normal(_hash(k0, k1, counters)))
        squares = jnp.where(counters < end, squares, 0)
        # Not contracted into the sum: the norm is taken in several programs.
        return lanes + rounded(squares, zero), None

    start = jnp.full((blocks[0].shape[1], block), zero.astype(jnp.float32))
    left, _ = jax.lax.scan(add, start, blocks)
    # A reduction first, of two: a single round would be fused into all that follows.
    left = jnp.sum(left.reshape(2, -1), axis=0)
    while left.size > 1:
        left = jnp.pad(left, (0, left.size % 2))
        left = left[: left.size // 2] + left[left.size // 2 :]
    return left[0]


def zero_after(after: jax.Array) -> jax.Array:
    """Returns int32 zero, shape=(), unknown to compilers before ``after`` exists.

    It comes from the bits of one element, so a NaN in ``after`` (one record's
    activation) cannot reach the perturbation, which every record shares.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import threefry
      >>> int(threefry.zero_after(jnp.array([jnp.nan, 1.0])))
      0
    """
    # Not of a flat view, which devices that share ``after`` would gather.
    first = jax.lax.slice(after, [0] * after.ndim, [min(n, 1) for n in after.shape])
    if first.size == 0:
        return jnp.zeros((), jnp.int32)
    word = jax.lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.itemsize}"))
    n = word.reshape(()).astype(jnp.int32)
    return (n * (n + 1)) & 1  # The product of neighbours is even, also modulo 2**32.


def keys_after(keys: jax.Array, after: jax.Array) -> jax.Array:
    """Returns the same typed keys, to the bit, not available before ``after``.

    XLA merges equal computations: what is drawn twice from one key would be drawn once
    and kept alive in between. What is drawn from ordered keys is drawn anew.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import threefry
      >>> keys = jax.random.key(0)[None]
      >>> bool((threefry.keys_after(keys, jnp.ones(3)) == keys).all())
      True
    """
    data = jax.random.key_data(keys) + zero_after(after).astype(jnp.uint32)
    if is_secret(keys):
        return secret_key(data)
    return jax.random.wrap_key_data(data, impl="threefry2x32")


@jax.custom_jvp
def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Rounds ``x`` to its own dtype, whatever it is used for.

    What goes straight into a product or a sum may be contracted with it, in one program
    and not in another, and a rounding to 16 bits may be left out. Nothing does so through
    the integers, with a ``zero``, int32 (), that no compiler knows to be one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import threefry
      >>> x = jnp.array([0.1, 0.2])
      >>> threefry.rounded(x, threefry.zero_after(x)).dtype
      dtype('float32')
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer) + zero.astype(integer)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


@rounded.defjvp
def _rounded_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Passes the tangent of ``x`` through, because a bitcast has none."""
    return rounded(*primals), tangents[0]
