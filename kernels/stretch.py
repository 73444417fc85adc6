"""Sums over a stretch of rows whose place and length are known only at run time.

The rows lie in arrays of static shape. A loop takes them in slices of one size; of a slice
that reaches beyond the stretch, or that had to begin early because the arrays end, the
other rows are masked. So a stretch of b rows costs ``ceil(b / size)`` slices, whatever the
arrays hold, and no row outside it counts.

Sums are exact: integers on a grid (:mod:`jaxdp.kernels.clip`), in two words.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.kernels import clip, finite_difference
from jaxdp.kernels.finite_difference import AxisName

#: The most rows of a slice. Their sum, of 16 bits each, fits into an int32.
MAX_SLICE = 2**14
_WORD = 16


class Wide(NamedTuple):
    """Integers ``high * 2**16 + low``, of up to 46 bits.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stretch
      >>> total = stretch.Wide(high=jnp.int32(3), low=jnp.int32(5))
      >>> stretch.to_float(total).item() == 3 * 2**16 + 5
      True
    """

    high: jax.Array  # dtype=int32
    low: jax.Array  # dtype=int32; in [0, 2**16)


def zero(shape: tuple[int, ...]) -> Wide:
    """Returns a sum of zero.

    Example:
      >>> from jaxdp.kernels import stretch
      >>> stretch.to_float(stretch.zero((3,))).tolist()
      [0.0, 0.0, 0.0]
    """
    return Wide(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32))


def add(total: Wide, part: jax.Array) -> Wide:
    """Returns ``total + part`` exactly; ``part`` int32 of size below 2**31 - 2**16.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stretch
      >>> total = stretch.add(stretch.zero(()), jnp.int32(2**20 + 1))
      >>> int(total.high), int(total.low)
      (16, 1)
    """
    low = total.low + part
    return Wide(total.high + (low >> _WORD), low & (2**_WORD - 1))


def plus(a: Wide, b: Wide) -> Wide:
    """Returns ``a + b`` exactly.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stretch
      >>> a = stretch.add(stretch.zero(()), jnp.int32(40_000))
      >>> stretch.to_float(stretch.plus(a, a)).item()
      80000.0
    """
    low = a.low + b.low
    return Wide(a.high + b.high + (low >> _WORD), low & (2**_WORD - 1))


def shifted(total: Wide, by: jax.Array) -> Wide:
    """Returns ``floor(total / 2**by)`` exactly; ``by`` int32 from 0 to 32.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stretch
      >>> total = stretch.add(stretch.zero(()), jnp.int32(1_000_003))
      >>> stretch.to_float(stretch.shifted(total, jnp.int32(1))).item()
      500001.0
    """
    for part in (jnp.minimum(by, _WORD), jnp.maximum(by - _WORD, 0)):
        lost = total.high & ((1 << part) - 1)
        low = (total.low >> part) | (lost << (_WORD - part))
        total = Wide(total.high >> part, low)
    return total


def to_float(total: Wide) -> jax.Array:
    """Converts to float32, rounded.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stretch
      >>> total = stretch.add(stretch.zero(()), jnp.int32(-7))
      >>> stretch.to_float(total).item()
      -7.0
    """
    return total.high.astype(jnp.float32) * 2.0**_WORD + total.low.astype(jnp.float32)


def fold(
    step: Callable[[Any, Any, jax.Array], Any],
    carry: Any,
    data: Any,
    mask: jax.Array | None,
    first: jax.Array,
    count: jax.Array,
    size: int,
    axis_name: AxisName | None = None,
) -> Any:
    """Applies ``carry = step(carry, rows, kept)`` to the slices of a stretch, in order.

    Args:
      step: takes the carry, ``size`` rows of every leaf of ``data``, and which of them
        count, bool (size,).
      carry: before the first slice.
      data: pytree of arrays with n rows.
      mask: bool (n,); rows that never count. None: all do.
      first: int32, shape=(); the first row.
      count: int32, shape=(); how many rows; ``first + count`` is at most n. With 0
        nothing is done.
      size: rows of a slice, static; at most n.
      axis_name: mesh axis, or several, whose devices take the slices by turns: of D
        devices each takes every D-th one. None is one device.

    Returns:
      The carry after the last slice, on each device after its own.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stretch
      >>> def step(total, rows, kept):
      ...     return total + jnp.sum(jnp.where(kept, rows, 0))
      >>> data = jnp.arange(10.0)
      >>> first, count = jnp.int32(2), jnp.int32(5)  # Rows 2 to 6.
      >>> stretch.fold(step, jnp.float32(0), data, None, first, count, 4).item()
      20.0
    """
    rows = finite_difference.num_rows(data)
    if not 1 <= size <= rows:
        raise ValueError(f"size must be from 1 to the {rows} rows of data, got {size}")
    places = jnp.arange(size, dtype=jnp.int32)
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    own = 0 if axis_name is None else jax.lax.axis_index(axis_name)

    def take(x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, size)

    def body(at: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        done, carry = at
        begin = first + (own + done * devices) * size
        # No later than the last slice that the arrays have: a later one would be moved
        # there silently, and rows before the stretch would count.
        start = jnp.minimum(begin, rows - size)
        place = start + places
        kept = (place >= begin) & (place < first + count)
        if mask is not None:
            kept &= take(mask, start)
        some = jax.tree.map(lambda x: take(x, start), data)
        return done + 1, step(carry, some, kept)

    # In steps of 1: XLA takes one of several up to a constant 1 for a loop of no passes.
    slices = -(-(-(-count // size) - own) // devices)
    begin = (jnp.zeros((), jnp.int32), finite_difference.on_each(carry, axis_name))
    return jax.lax.while_loop(lambda at: at[0] < slices, body, begin)[1]


def grid_sum(
    rows_of: Callable[[Any], jax.Array],
    dim: int,
    data: Any,
    mask: jax.Array | None,
    first: jax.Array,
    count: jax.Array,
    *,
    bound: float | jax.Array,
    bits: int,
    size: int,
    axis_name: AxisName | None = None,
) -> Wide:
    """Sums ``rows_of(rows)`` over a stretch, each row clipped and put on the grid.

    Args:
      rows_of: from ``size`` rows of ``data`` to float (size, dim).
      dim: length of such a row.
      data: as in :func:`fold`, and so are mask, first and count.
      mask: bool (n,) or None.
      first: int32, shape=().
      count: int32, shape=().
      bound: on the L2 norm of one row, finite, > 0; may be traced.
      bits: a grid unit is ``bound * 2**-bits``; at most 16.
      size: rows of a slice, at most :data:`MAX_SLICE`.
      axis_name: as in :func:`fold`. All devices are given the same; ``rows_of`` must not
        differentiate by what a ``shard_map`` knows to be the same on all of them
        (:func:`jaxdp.kernels.finite_difference.on_each`).

    Returns:
      The exact sum of integers of L2 norm at most ``2**bits`` each. A row with a NaN or an
      infinity counts zero, as does every row outside the stretch. Devices sum by one
      ``psum``: the words are the same on all of them, and the same as those of one device.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import stretch
      >>> rows, first, count = jnp.ones((10, 1)), jnp.int32(2), jnp.int32(5)
      >>> total = stretch.grid_sum(
      ...     lambda x: x, 1, rows, None, first, count, bound=1.0, bits=8, size=4
      ... )
      >>> (stretch.to_float(total) / 2**8).tolist()
      [5.0]
    """
    if size > MAX_SLICE:
        raise ValueError(f"size must be at most {MAX_SLICE}, got {size}")

    def none(some: Any) -> jax.Array:
        del some
        zeros = jnp.zeros((size, dim), jnp.float32)
        return finite_difference.on_each(zeros, axis_name)

    def step(total: Wide, some: Any, kept: jax.Array) -> Wide:
        # In a branch that is always taken: XLA would compute the rows again for every pass
        # that the clip makes over them.
        rows = jax.lax.cond(kept.any(), rows_of, none, some)
        return add(total, clip.grid_sum(rows, kept, bound, bits))

    total = fold(step, zero((dim,)), data, mask, first, count, size, axis_name)
    if axis_name is None:
        return total

    total = jax.lax.psum(total, axis_name)  # Of low words of up to 2**15 devices.
    return add(Wide(total.high, jnp.zeros_like(total.low)), total.low)
