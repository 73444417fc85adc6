"""Bounding one record's contribution, and summing without rounding error.

Every clip here is *finite-safe*: a record whose contribution holds a NaN or an
infinity contributes zero; it neither spreads nor raises. Sums are integers on a grid of
``2**-bits`` of the bound: exact, free of order, so that a record moves them by what
the theorem says and not by what float32 makes of it.

==========================  ================  ==============================
contribution of a record    clipped to        on the grid
==========================  ================  ==============================
finite, norm <= bound       itself            rounded
finite, norm > bound        norm = bound      rounded
NaN or +-infinity anywhere  0                 0
masked row                  0                 0
bound = infinity            itself if finite  (no grid)
==========================  ================  ==============================
"""

import math

import jax
import jax.numpy as jnp

# A float32 clip can end an ulp above its bound, and float32 norms of long vectors
# are a little low; the integers are checked exactly, this only keeps rows that
# reach the bound from failing that check.
_MARGIN = 1 - 2**-18

# What is summed for a norm of order 1 or 2, and what is made of the sum.
_NORMS = {1: (jnp.abs, lambda total: total), 2: (jnp.square, jnp.sqrt)}


def clip_scalar(x: jax.Array, bound: float | jax.Array) -> jax.Array:
    """Clips every element to ``[-bound, bound]``; non-finite elements become 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import clip
      >>> clip.clip_scalar(jnp.array([0.5, -3.0, jnp.nan]), 1.0).tolist()
      [0.5, -1.0, 0.0]
    """
    limit = jnp.asarray(bound, x.dtype)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), 0)


def clip_vector(x: jax.Array, bound: float | jax.Array, *, order: int = 2) -> jax.Array:
    """Clips rows ``x (..., K)`` to L2 norm ``bound``; a row with a non-finite is 0.

    The result may exceed the bound by rounding (a few ulps); where the bound must be
    exact, :func:`to_grid` checks the integers. ``order=1`` clips the L1 norm. Huge finite
    values do not overflow: norms are taken after scaling by the largest element.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import clip
      >>> rows = jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.inf, 0.0]])
      >>> lengths = jnp.linalg.norm(clip.clip_vector(rows, 1.0), axis=1)
      >>> [round(length, 4) for length in lengths.tolist()]
      [1.0, 0.5, 0.0]
    """
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x = jnp.where(jnp.all(jnp.isfinite(x), axis=-1)[..., None], x, 0)
    peak = jnp.max(jnp.abs(x), axis=-1, initial=0).astype(wide)
    # The inverse of a number near the largest is subnormal, and flushed to zero on
    # CPU (also where the source divides): the row would look like zeros and pass.
    tiny = float(jnp.finfo(wide).tiny)
    inverse = 1 / jnp.clip(peak, tiny, 1 / tiny)
    power, root = _NORMS[order]
    unit = x.astype(wide) * inverse[..., None]
    norm = root(jnp.sum(power(unit), axis=-1))
    limit = jnp.asarray(bound, wide)
    over = norm > limit * inverse
    # In two factors, for their product may underflow where the result does not.
    factor = jnp.where(over, limit, 0) / jnp.where(over, norm, 1)
    # What is subnormal beside the peak, and flushed to zero, need not be so beside the
    # bound.
    tiniest = x.astype(wide) * (inverse * factor)[..., None]
    small = jnp.where(jnp.abs(unit) < tiny, tiniest, unit * factor[..., None])
    return jnp.where(over[..., None], small.astype(x.dtype), x)


def grid_bits(rows: int, noise_over_bound: float, *, deviations: int = 8) -> int:
    r"""Returns bits k of the grid :math:`2^{-k}` of the bound such that the sum fits int32.

    .. math:: k = \min(16, \lfloor\log_2((2^{31} - 1) / (\text{rows} + 8 m))\rfloor)

    with m the standard deviation of the noise over the bound: the sum of ``rows``
    contributions and eight standard deviations of noise (``deviations`` of them, for
    noise of heavier tails) stay below 2**31. (Beyond that the sum wraps, which is still
    post-processing.) So the noise is at most 2**28 units.

    Raises:
      ValueError: fewer than 8 bits would be left.

    Example:
      >>> from jaxdp.kernels import clip
      >>> clip.grid_bits(rows=256, noise_over_bound=10.0)
      16
      >>> clip.grid_bits(rows=10**6, noise_over_bound=10.0)
      11
    """
    most = rows + deviations * noise_over_bound
    bits = min(16, math.floor(math.log2((2**31 - 1) / most)))
    if bits < 8:
        raise ValueError(
            f"{rows} records a step with noise of {noise_over_bound:.4g} times the clip "
            f"leave {bits} bits for one contribution; at least 8 are needed, so use "
            "smaller batches or less noise"
        )
    return bits


def _within(c: jax.Array, limit: int) -> jax.Array:
    """Returns True where sum(c**2) <= limit**2 along the last axis, in exact integers.

    Limbs of 16 bits in uint32. Elements must be below limit <= 2**16 in size, and
    rows not far above the bound (they come out of a float clip).
    """
    square = jnp.square(c.astype(jnp.uint32))
    low, high = square & 0xFFFF, square >> 16
    chunk = 2**16
    if c.shape[-1] > chunk:  # 2**16 limbs of 16 bits are the most that fit.
        pad = [(0, 0)] * (c.ndim - 1) + [(0, -c.shape[-1] % chunk)]
        split = (*c.shape[:-1], -1, chunk)
        low = jnp.pad(low, pad).reshape(split).sum(axis=-1, dtype=jnp.uint32)
        high = jnp.pad(high, pad).reshape(split).sum(axis=-1, dtype=jnp.uint32)
        high, low = high + (low >> 16), low & 0xFFFF
    low = low.sum(axis=-1, dtype=jnp.uint32)
    high = high.sum(axis=-1, dtype=jnp.uint32) + (low >> 16)
    low = low & 0xFFFF
    limit_high, limit_low = divmod(limit**2, 2**16)
    return (high < limit_high) | ((high == limit_high) & (low <= limit_low))


def to_grid(
    x: jax.Array,
    mask: jax.Array,
    bound: float | jax.Array,
    bits: int,
    *,
    order: int = 2,
    limit: int | None = None,
) -> jax.Array:
    """Clips rows to ``bound`` and puts them on the grid: integers of norm <= 2**bits.

    Args:
      x: contributions ``(B, K)``, floating.
      mask: ``(B,)`` bool; a False row contributes zero whatever it holds.
      bound: bound on the norm of one row; finite, > 0.
      bits: k; one grid unit is ``bound * 2**-k``. At most 16.
      order: of the norm: 1 (K at most 2**15) or 2.
      limit: so many units, instead of ``2**bits``, are the bound; at most ``2**bits``.

    Returns:
      int32 ``(B, K)``, each row of norm at most ``2**bits``: verified in integers, not
      assumed. K = 1 rounds to nearest and reaches ``2**bits``; K > 1 rounds towards zero,
      because rounding to nearest can lengthen a row.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import clip
      >>> rows = jnp.array([[0.5], [9.0], [0.5]])
      >>> kept = jnp.array([True, True, False])
      >>> clip.to_grid(rows, kept, bound=1.0, bits=8).tolist()
      [[128], [256], [0]]
    """
    most = 2**bits if limit is None else limit
    unit = jnp.asarray(most / bound, jnp.float32)
    keep = mask[:, None]
    if x.shape[-1] == 1:
        clipped = clip_scalar(x, bound).astype(jnp.float32)
        c = jnp.clip(jnp.round(clipped * unit), -(most), most)
        return jnp.where(keep, c, 0).astype(jnp.int32)
    if order == 1 and x.shape[-1] > 2**15:
        raise ValueError(f"rows must have at most 2**15 columns, got {x.shape[-1]}")
    clipped = clip_vector(x.astype(jnp.float32), bound * _MARGIN, order=order)
    c = jnp.trunc(clipped * unit)
    c = jnp.clip(c, -(most - 1), most - 1).astype(jnp.int32)
    magnitude = jnp.abs(c)
    within = magnitude.sum(axis=-1) <= most if order == 1 else _within(magnitude, most)
    return jnp.where(keep & within[:, None], c, 0)


def grid_sum(
    x: jax.Array,
    mask: jax.Array,
    bound: float | jax.Array,
    bits: int,
    *,
    order: int = 2,
    limit: int | None = None,
) -> jax.Array:
    """Sums :func:`to_grid` over records: int32 ``(K,)``, exact in any order.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import clip
      >>> rows, kept = jnp.array([[0.5], [9.0], [jnp.nan]]), jnp.ones(3, bool)
      >>> clip.grid_sum(rows, kept, bound=1.0, bits=8).tolist()
      [384]
    """
    c = to_grid(x, mask, bound, bits, order=order, limit=limit)
    return c.sum(axis=0, dtype=jnp.int32)
