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

import functools
import math
from typing import Any

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


def clip_vector(x: Any, bound: float | jax.Array, *, order: int = 2) -> Any:
    """Clips rows ``x (..., K)`` to L2 norm ``bound``; a row with a non-finite is 0.

    The result may exceed the bound by rounding (a few ulps); where the bound must be
    exact, :func:`to_grid` checks the integers. ``order=1`` clips the L1 norm. Huge finite
    values do not overflow: norms are taken after scaling by the largest element.

    ``x`` may be a tree of arrays (B, ...), each of which holds a part of every row. What
    follows is computed where a part is, and of other parts only a number for each row is
    needed: devices that share a part do not gather it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import clip
      >>> rows = jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.inf, 0.0]])
      >>> lengths = jnp.linalg.norm(clip.clip_vector(rows, 1.0), axis=1)
      >>> [round(length, 4) for length in lengths.tolist()]
      [1.0, 0.5, 0.0]
    """
    parts, structure = jax.tree.flatten(x)
    rows = parts[0].shape[:-1] if parts[0] is x else parts[0].shape[:1]
    double = any(part.dtype == jnp.float64 for part in parts)
    wide = jnp.float64 if double else jnp.float32
    finite = _all([jnp.isfinite(part) for part in parts], len(rows))
    parts = [jnp.where(_beside(finite, part), part, 0) for part in parts]
    peak = jnp.zeros(rows, wide)
    for part in parts:
        most = jnp.max(jnp.abs(part), axis=_columns(part, len(rows)), initial=0)
        peak = jnp.maximum(peak, most.astype(wide))
    # The inverse of a number near the largest is subnormal, and flushed to zero on
    # CPU (also where the source divides): the row would look like zeros and pass.
    tiny = float(jnp.finfo(wide).tiny)
    inverse = 1 / jnp.clip(peak, tiny, 1 / tiny)
    power, root = _NORMS[order]
    units = [part.astype(wide) * _beside(inverse, part) for part in parts]
    norm = root(sum(jnp.sum(power(u), axis=_columns(u, len(rows))) for u in units))
    limit = jnp.asarray(bound, wide)
    over = norm > limit * inverse
    # In two factors, for their product may underflow where the result does not.
    factor = jnp.where(over, limit, 0) / jnp.where(over, norm, 1)

    def clipped(part: jax.Array, unit: jax.Array) -> jax.Array:
        # What is subnormal beside the peak, and flushed to zero, need not be so beside the
        # bound.
        tiniest = part.astype(wide) * _beside(inverse * factor, part)
        small = jnp.where(jnp.abs(unit) < tiny, tiniest, unit * _beside(factor, part))
        return jnp.where(_beside(over, part), small.astype(part.dtype), part)

    return structure.unflatten(map(clipped, parts, units))


def _columns(part: jax.Array, lead: int = 1) -> tuple[int, ...]:
    """Returns the axes of a part but those of its rows."""
    return tuple(range(lead, part.ndim))


def _beside(each: jax.Array, part: jax.Array) -> jax.Array:
    """Returns a number for each row, in a shape that broadcasts against a part."""
    return each[(..., *(None for _ in range(part.ndim - each.ndim)))]


def _all(parts: list[jax.Array], lead: int) -> jax.Array:
    """Returns True for rows of which all of every part is."""
    each = [jnp.all(part, axis=_columns(part, lead)) for part in parts]
    return functools.reduce(jnp.logical_and, each)


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


def _within(parts: list[jax.Array], limit: int) -> jax.Array:
    """Returns True for rows of which sum(c**2) <= limit**2, in exact integers.

    Limbs of 16 bits in uint32. Elements must be below limit <= 2**16 in size, and
    rows not far above the bound (they come out of a float clip).
    """
    total = jnp.uint32(0), jnp.uint32(0)
    for c in parts:
        square = jnp.square(c.astype(jnp.uint32))
        low, high = square & 0xFFFF, square >> 16
        while low.ndim > 1:  # Axis by axis, so that no device needs another's elements.
            low, high = _last_axis(low), _last_axis(high)
            low, high = low.sum(-1, dtype=jnp.uint32), high.sum(-1, dtype=jnp.uint32)
            low, high = low & 0xFFFF, high + (low >> 16)
        low, high = low + total[0], high + total[1]
        total = low & 0xFFFF, high + (low >> 16)
    low, high = total
    limit_high, limit_low = divmod(limit**2, 2**16)
    return (high < limit_high) | ((high == limit_high) & (low <= limit_low))


def _last_axis(limbs: jax.Array) -> jax.Array:
    """Returns an array whose last axis is in two, if it was longer than 2**16.

    So many limbs of 16 bits are the most that a sum holds.
    """
    size, chunk = limbs.shape[-1], 2**16
    if size <= chunk:
        return limbs
    # Devices that share the axis share the longer one of the two, if that divides it.
    least = -(-size // chunk)
    few = next((f for f in range(least, chunk + 1) if size % f == 0), None)
    if few is None:
        pad = [(0, 0)] * (limbs.ndim - 1) + [(0, -size % chunk)]
        return jnp.pad(limbs, pad).reshape(*limbs.shape[:-1], -1, chunk)
    return limbs.reshape(*limbs.shape[:-1], size // few, few)


def to_grid(
    x: Any,
    mask: jax.Array,
    bound: float | jax.Array,
    bits: int,
    *,
    order: int = 2,
    limit: int | None = None,
) -> Any:
    """Clips rows to ``bound`` and puts them on the grid: integers of norm <= 2**bits.

    Args:
      x: contributions ``(B, K)``, floating; or a tree of arrays ``(B, ...)`` that each
        hold a part of every row, K elements in all.
      mask: ``(B,)`` bool; a False row contributes zero whatever it holds.
      bound: bound on the norm of one row; finite, > 0.
      bits: k; one grid unit is ``bound * 2**-k``. At most 16.
      order: of the norm: 1 (K at most 2**15) or 2.
      limit: so many units, instead of ``2**bits``, are the bound; at most ``2**bits``.

    Returns:
      int32 like ``x``, each row of norm at most ``2**bits``: verified in integers, not
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
    columns = sum(math.prod(part.shape[1:]) for part in jax.tree.leaves(x))
    if columns == 1:

        def nearest(part: jax.Array) -> jax.Array:
            clipped = clip_scalar(part, bound).astype(jnp.float32)
            return jnp.clip(jnp.round(clipped * unit), -(most), most)

        return _kept(mask, jax.tree.map(nearest, x))
    if order == 1 and columns > 2**15:
        raise ValueError(f"rows must have at most 2**15 columns, got {columns}")
    single = jax.tree.map(lambda part: part.astype(jnp.float32), x)
    clipped = clip_vector(single, bound * _MARGIN, order=order)

    def towards_zero(part: jax.Array) -> jax.Array:
        return jnp.clip(jnp.trunc(part * unit), -(most - 1), most - 1).astype(jnp.int32)

    units = jax.tree.map(towards_zero, clipped)
    sizes = [jnp.abs(part) for part in jax.tree.leaves(units)]
    if order == 1:
        within = sum(part.sum(axis=_columns(part)) for part in sizes) <= most
    else:
        within = _within(sizes, most)
    return _kept(mask & within, units)


def _kept(rows: jax.Array, units: Any) -> Any:
    """Returns integers, zero in the rows that do not count."""
    return jax.tree.map(
        lambda part: jnp.where(_beside(rows, part), part, 0).astype(jnp.int32), units
    )


def grid_sum(
    x: Any,
    mask: jax.Array,
    bound: float | jax.Array,
    bits: int,
    *,
    order: int = 2,
    limit: int | None = None,
) -> Any:
    """Sums :func:`to_grid` over records: int32 ``(K,)``, exact in any order.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import clip
      >>> rows, kept = jnp.array([[0.5], [9.0], [jnp.nan]]), jnp.ones(3, bool)
      >>> clip.grid_sum(rows, kept, bound=1.0, bits=8).tolist()
      [384]
    """
    units = to_grid(x, mask, bound, bits, order=order, limit=limit)
    return jax.tree.map(lambda part: part.sum(axis=0, dtype=jnp.int32), units)
