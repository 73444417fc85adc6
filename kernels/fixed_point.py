"""Numbers in fixed point: 32 bits before the point and 32 behind it.

Made of two 32-bit words, because the library runs without 64-bit types, and never of
floats, whose roundings depend on the value. Everything is modulo ``2**32`` units, as
int32 sums are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: One, in units of the last place.
ONE = 2**32
#: The last place, which two results of one rounding differ by at most.
ULP = 2.0**-32


class Fixed(NamedTuple):
    """``high + low / 2**32``, elementwise; ``low`` is None where all are integers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import fixed_point
      >>> half = fixed_point.Fixed(jnp.int32(2), jnp.uint32(2**31))
      >>> fixed_point.to_float(half).item()
      2.5
    """

    high: jax.Array  # int32
    low: jax.Array | None = None  # uint32, same shape


def from_int(x: jax.Array) -> Fixed:
    """Converts int32 integers to fixed point with a fraction of zero.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import fixed_point
      >>> x = fixed_point.from_int(jnp.array([7, -1]))
      >>> x.high.tolist(), x.low.tolist()
      ([7, -1], [0, 0])
    """
    return Fixed(x, jnp.zeros(x.shape, jnp.uint32))


def to_float(x: Fixed) -> jax.Array:
    """Converts to float32, exactly up to two roundings.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import fixed_point
      >>> x = fixed_point.from_int(jnp.array([7, -1]))
      >>> fixed_point.to_float(x).tolist()
      [7.0, -1.0]
    """
    units = x.high.astype(jnp.float32)
    return (
        units if x.low is None else units + x.low.astype(jnp.float32) * np.float32(ULP)
    )


def add(a: Fixed, b: Fixed) -> Fixed:
    """Returns ``a + b`` exactly.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import fixed_point
      >>> x = fixed_point.Fixed(jnp.int32(1), jnp.uint32(2**31))
      >>> fixed_point.to_float(fixed_point.add(x, x)).item()
      3.0
    """
    if a.low is None or b.low is None:
        return Fixed(a.high + b.high, b.low if a.low is None else a.low)
    low = a.low + b.low
    carry = (low < b.low).astype(jnp.int32)
    return Fixed(a.high + b.high + carry, low)


def sub(a: Fixed, b: Fixed) -> Fixed:
    """Returns ``a - b`` exactly.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import fixed_point
      >>> x = fixed_point.Fixed(jnp.int32(1), jnp.uint32(2**31))
      >>> three = fixed_point.from_int(jnp.int32(3))
      >>> fixed_point.to_float(fixed_point.sub(x, three)).item()
      -1.5
    """
    if b.low is None:
        return Fixed(a.high - b.high, a.low)
    low = -b.low if a.low is None else a.low - b.low
    # Seen on the difference, not on a, which it may then replace in place.
    borrow = (low > ~b.low).astype(jnp.int32)
    return Fixed(a.high - b.high - borrow, low)


def numerator(x: float) -> int:
    """Returns the integer k for which ``k / 2**32`` is nearest to ``x``, in [0, 1].

    Example:
      >>> from jaxdp.kernels import fixed_point
      >>> fixed_point.numerator(0.75) / fixed_point.ONE
      0.75
    """
    if not 0 <= x <= 1:
        raise ValueError(f"a fraction must be in [0, 1], got {x}")
    return round(x * ONE)  # The product is exact.


def scaled(x: Fixed, k: int | jax.Array) -> Fixed:
    """Returns ``x k / 2**32``, rounded towards minus infinity by less than an ulp.

    Args:
      x: with a fraction, any shape.
      k: an integer from 0 to ``2**32``, or uint32, shape=().

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import fixed_point
      >>> x = fixed_point.from_int(jnp.array([3, -3]))
      >>> half = fixed_point.numerator(0.5)
      >>> fixed_point.to_float(fixed_point.scaled(x, half)).tolist()
      [1.5, -1.5]
    """
    if x.low is None:
        raise ValueError("x must have a fraction: the product has one")
    if isinstance(k, int) and k == ONE:
        return x
    word = jnp.asarray(k, jnp.uint32)
    # As an integer, x is low + 2**32 unsigned(high), less 2**64 where high is negative:
    # the product is the two words' products, less k 2**64 there.
    unsigned = x.high.astype(jnp.uint32)
    below = high_product(x.low, word)
    low = unsigned * word + below
    carry = (low < below).astype(jnp.uint32)
    negative = (x.high >> 31).astype(jnp.uint32)  # All ones, or none.
    high = high_product(unsigned, word) - (word & negative) + carry
    return Fixed(high.astype(jnp.int32), low)


def high_product(x: jax.Array, k: jax.Array) -> jax.Array:
    """Returns ``x k // 2**32`` of uint32, from products of 16 bits by 16.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import fixed_point
      >>> int(fixed_point.high_product(jnp.uint32(2**31), jnp.uint32(7)))
      3
    """
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    x1, x0, k1, k0 = x >> half, x & mask, k >> half, k & mask
    a, b = x1 * k0, x0 * k1
    middle = ((x0 * k0) >> half) + (a & mask) + (b & mask)  # Three times below 2**16.
    return x1 * k1 + (a >> half) + (b >> half) + (middle >> half)


def tree_map(fn: Callable[..., Any], *trees: Any) -> Any:
    """Applies ``jax.tree.map`` with every :class:`Fixed` taken for a leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import fixed_point
      >>> tree = {"w": fixed_point.from_int(jnp.arange(3))}
      >>> fixed_point.tree_map(fixed_point.to_float, tree)["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    return jax.tree.map(fn, *trees, is_leaf=lambda x: isinstance(x, Fixed))
