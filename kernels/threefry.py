"""The threefry-2x32 generator, written out so that XLA can fuse it.

``jax.random`` lowers threefry to a loop on CPU: slow on large arrays, and a
fusion barrier. The same twenty rounds written out in ``jnp`` give the same
bits (a test compares them), fuse into whatever consumes them, and need no
temporary. The bits do not depend on ``jax_threefry_partitionable``.
"""

import functools
import math

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


@_inlined
def stored_bits(key: jax.Array, size: int) -> jax.Array:
    """``bits(key, (size,))``, made to exist in memory.

    A loop is the one thing XLA does not fuse into its consumers. Words that are read
    more often than they cost to draw (packed signs: 32 elements each, three times a
    step) would otherwise be drawn again for every element.
    """
    k0, k1 = _words(key)
    chunks = 4  # Enough to be a loop; each is still long enough to vectorise.
    width = -(-size // chunks)
    counters = _counters((width,))

    def chunk(start: jax.Array) -> jax.Array:
        a, b = _threefry(k0, k1, jnp.uint32(0), counters + start)
        return a ^ b

    starts = jnp.arange(chunks, dtype=jnp.uint32) * jnp.uint32(width)
    return jax.lax.map(chunk, starts).reshape(-1)[:size]


@_inlined
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``jax.random.normal(key, shape)`` in float32 from the same bits.

    Its support ends at 5.42 standard deviations: good for public directions;
    secret noise comes from :func:`wide_normal`.
    """
    mantissa = (bits(key, shape) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
    unit = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - jnp.float32(1)
    low = jnp.float32(-1 + 2**-24)
    uniform = jnp.maximum(low, unit * (jnp.float32(1) - low) + low)
    return jnp.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform)


@_inlined
def wide_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normals in float32 whose support ends at 6.66, not 5.42.

    Box-Muller on both output words: the radius uses all 32 bits of one word, so
    the missing tail has mass 2.8e-11 a draw instead of 6e-8.
    """
    k0, k1 = _words(key)
    a, b = _threefry(k0, k1, jnp.uint32(0), _counters(shape))
    # (a + 1) / 2**32 in (0, 1]; the float32 addition keeps small a exact.
    u = (a.astype(jnp.float32) + jnp.float32(1)) * jnp.float32(2**-32)
    radius = jnp.sqrt(jnp.float32(-2) * jnp.log(u))
    angle = b.astype(jnp.float32) * jnp.float32(2 * math.pi * 2**-32)
    return radius * jnp.cos(angle)
