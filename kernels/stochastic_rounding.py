r"""Stochastic rounding to 16 bits: a sum that is right in expectation.

A number between two neighbours a < b of the 16-bit format becomes b with probability
:math:`(x-a)/(b-a)`, else a. Rounding to nearest loses every step that is shorter than half
the distance of neighbours; this loses none of them in expectation (Gupta et al., 2015).

Bits are a function of a public key and an element's place, so that the same numbers come
out wherever they are computed.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import threefry

#: The formats that are rounded to.
NARROW = ("bfloat16", "float16")


def is_narrow(leaf: Any) -> bool:
    """Returns True for an array of 16 bits, or a ``jax.ShapeDtypeStruct`` of one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stochastic_rounding
      >>> stochastic_rounding.is_narrow(jnp.zeros(2, jnp.bfloat16))
      True
    """
    return jnp.result_type(leaf).name in NARROW


def to_dtype(x: jax.Array, words: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 up or down to 16 bits, with probabilities that keep the mean.

    Args:
      x: float32, any shape. What the format represents stays as it is: zeros of both signs,
        subnormal numbers, infinities and NaN too.
      words: uniform uint32 of that shape, of which at most 24 bits are used.
      dtype: ``jnp.bfloat16`` or ``jnp.float16``.

    Returns:
      Of that dtype. The probability is exact, but for subnormal numbers of float16, where
      it is off by at most 2**-24. Beyond the largest finite number there is no mean to
      keep: rounding is to nearest, hence to infinity from half a spacing on.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stochastic_rounding
      >>> x = jnp.full((2,), 1.001)
      >>> words = jnp.array([0, 2**32 - 1], jnp.uint32)
      >>> stochastic_rounding.to_dtype(x, words, jnp.bfloat16).tolist()
      [1.0, 1.0078125]

    References:
      Gupta, Agrawal, Gopalakrishnan, Narayanan, `Deep Learning with Limited Numerical
      Precision <https://arxiv.org/abs/1502.02551>`_, 2015.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in NARROW or x.dtype != jnp.float32:
        raise TypeError(
            f"x and dtype must be float32 and one of {', '.join(NARROW)}; got {x.dtype} "
            f"and {dtype}"
        )
    dropped = 23 - jnp.finfo(dtype).nmant
    # A carry of the bits that are dropped goes into those that stay, and into the exponent.
    added = jax.lax.bitcast_convert_type(x, jnp.uint32) + (words >> (32 - dropped))
    bits = added & np.uint32(2**32 - 2**dropped)
    out = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if dtype == jnp.float16:
        # Below its least normal number neighbours are 2**-24 apart, whatever the exponent.
        scaled = jnp.abs(x) * jnp.float32(2**24)
        whole = jnp.floor(scaled)
        share = (words >> 8).astype(jnp.float32) * jnp.float32(2**-24)
        up = (share + (scaled - whole) >= 1).astype(jnp.float32)
        fixed = jnp.copysign((whole + up) * jnp.float32(2**-24), x)
        out = jnp.where(jnp.abs(x) < jnp.float32(2**-14), fixed, out)
    finite = jnp.abs(x) <= np.float32(jnp.finfo(dtype).max)  # False for NaN.
    return jnp.where(finite, out, x).astype(dtype)


def add(key: jax.Array, x: jax.Array, update: jax.Array) -> jax.Array:
    """Adds to an array of 16 bits, in float32, and rounds the sum right in mean.

    Args:
      key: typed threefry key of this leaf and step, shape=(); public.
      x: of 16 bits (:data:`NARROW`), any shape.
      update: of that shape and any floating dtype; wider ones keep more.

    Returns:
      Of the shape and dtype of ``x``: :func:`to_dtype` of the sum, with words that are a
      function of the key and of an element's place. A zero update changes no number.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stochastic_rounding
      >>> x, update = jnp.ones(10_000, jnp.bfloat16), jnp.full(10_000, 1e-3)
      >>> moved = stochastic_rounding.add(jax.random.key(0), x, update)
      >>> bool(abs(moved.astype(jnp.float32).mean() - 1.001) < 2e-4)
      True
    """
    total = x.astype(jnp.float32) + update.astype(jnp.float32)
    return to_dtype(total, _words(key, x.shape), x.dtype)


def _words(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws uint32 words of a shape, by row where 32 bits do not count the elements."""
    if math.prod(shape) < 2**32:
        return threefry.hashed(key, shape)
    rows = jax.vmap(threefry.fold_in, in_axes=(None, 0))
    keys = rows(key, jnp.arange(shape[0], dtype=jnp.uint32))
    return jax.vmap(lambda one: _words(one, shape[1:]))(keys)
