r"""Two-point finite differences of per-record losses.

.. math:: s_i = \frac{f_i(x+\lambda u) - f_i(x-\lambda u)}{2\lambda}

one number per record and direction: *central*, so exact on quadratics for every
:math:`\lambda`. With :math:`\lambda = 0` the limit :math:`u^\top\nabla f_i(x)` is taken
by forward-mode differentiation: no cancellation, still no backpropagation.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxdp.kernels import perturb
from jaxdp.kernels.sphere import (
    Direction,
    in_words,
    leaf_direction,
    path_str,
    select,
    wide,
)
from jaxdp.kernels.threefry import rounded, zero_after

# Up to this many (records x parameters) both signs are evaluated together: the time of a
# small model is its number of operations. Beyond it they follow one another, so that no
# more than one perturbed copy is alive.
_SMALL = 2**17

ValueFn = Callable[[Any, Any], jax.Array] | perturb.LazyLoss
#: Of one axis of a mesh, or of several.
AxisName = str | tuple[str, ...]
#: Axis of a mesh whose two devices evaluate the losses at +radius and at -radius. Along
#: all other axes the records of a batch are shared.
SIGNS = "signs"


def check_losses(losses: Any, rows: int) -> None:
    """Requires an array of shape (rows,); ValueError for what else a loss returns.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference
      >>> finite_difference.check_losses(jnp.zeros(3), rows=3)
    """
    shape = getattr(losses, "shape", f"a {type(losses).__name__}")
    if shape != (rows,):
        raise ValueError(
            f"value_fn must return one loss per record: shape ({rows},) for a batch of "
            f"{rows}, got {shape}; jaxdp.per_record lifts a loss of one record. A measure "
            "of the whole data set, such as its F1 or AUC, is no such loss: train one per "
            "record, and choose thresholds by the measure on public records"
        )


def _checked(losses: jax.Array, batch: Any) -> jax.Array:
    """Checks that losses have the shape (B,), and casts them to float32 or wider."""
    check_losses(losses, num_rows(batch))
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise ValueError(f"value_fn must return floating losses, got {losses.dtype}")
    return losses.astype(wide(losses.dtype))


def num_rows(batch: Any, name: str = "batch") -> int:
    """Returns B, the common leading axis of all leaves of a batch of that name.

    Raises:
      ValueError: no leaves, a scalar leaf, or leaves that disagree.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference
      >>> finite_difference.num_rows((jnp.zeros((5, 2)), jnp.zeros(5)))
      5
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if not shapes or any(not s for s in shapes) or len({s[0] for s in shapes}) != 1:
        raise ValueError(
            f"{name} must be arrays with one common leading axis of records, got shapes "
            f"{shapes}"
        )
    return shapes[0][0]


def _slope(
    value_fn: ValueFn, params: Any, batch: Any, direction: Direction, radius: float
) -> jax.Array:
    """Computes the slopes (B,) along one direction."""

    def losses(scale: jax.Array, after: jax.Array | None = None) -> jax.Array:
        values = perturb.losses_at(value_fn, params, batch, direction, scale, after)
        return _checked(values, batch)

    dtype = _wide(params)
    if radius == 0:
        return _derivative(losses, jnp.zeros((), dtype))
    signs = jnp.asarray([radius, -radius], dtype)
    if _small(batch, direction):
        plus, minus = jax.vmap(losses)(signs)
    elif isinstance(value_fn, perturb.LazyLoss) and direction.stacked:
        # In a loop: what scans its layers is compiled once, not twice. The direction waits
        # for the sign, or XLA would draw it before the loop and keep it. (Without layers
        # to scan, a loop holds another copy of what it perturbs.)
        plus, minus = jax.lax.map(lambda scale: losses(scale, scale[None]), signs)
    else:
        plus = losses(jnp.asarray(radius, dtype))
        minus = losses(jnp.asarray(-radius, dtype), plus)
    return (plus - minus) / jnp.asarray(2 * radius, plus.dtype)


def _shared_signs(
    value_fn: ValueFn, params: Any, batch: Any, rows: Direction, radius: float
) -> jax.Array:
    """Computes the slopes (B, K) on two devices, each of which evaluates one sign."""
    check_signs(jax.lax.axis_size(SIGNS), radius, "axis_name")
    sign = 1 - 2 * jax.lax.axis_index(SIGNS)
    scale = jnp.asarray(radius, _wide(params))
    scale *= sign.astype(scale.dtype)
    params, batch = on_each((params, batch), SIGNS)

    def one(direction: Direction) -> jax.Array:
        values = perturb.losses_at(value_fn, params, batch, direction, scale)
        return _checked(values, batch)

    losses = _columns(one, value_fn, batch, rows)
    # Two numbers, one of them negated: their sum is plus - minus, NaN and inf included.
    difference = jax.lax.psum(losses * sign.astype(losses.dtype), SIGNS)
    return difference / jnp.asarray(2 * radius, losses.dtype)


def check_signs(size: int, radius: float, name: str) -> None:
    """Requires an axis of two devices, and a slope of two signs; ``name`` is in the error.

    Example:
      >>> from jaxdp.kernels import finite_difference
      >>> finite_difference.check_signs(2, 1e-3, "mesh")
    """
    if size != 2:
        raise ValueError(
            f"{name} must have 2 devices along {SIGNS!r}, one for each sign of a slope, "
            f"got {size}: records are shared along axes of other names"
        )
    if radius == 0:
        raise ValueError(
            f"{name} must have no axis {SIGNS!r} where smoothing_radius is 0, a derivative "
            "without two signs: share the records, along an axis of another name"
        )


def _wide(params: Any) -> Any:
    return wide(*map(jnp.result_type, jax.tree.leaves(params)))


def _small(batch: Any, direction: Direction) -> bool:
    return num_rows(batch) * direction.dim <= _SMALL


def _derivative(losses: Callable[[jax.Array], jax.Array], zero: jax.Array) -> jax.Array:
    """Computes the forward-mode limit (B,) of a slope, for losses that have one.

    Raises:
      ValueError: JAX cannot differentiate the losses, or their derivative is zero because
        of what they are made of (counts, comparisons, argmax): nothing would be learned.
    """
    jax.eval_shape(losses, zero)  # What fails without derivatives is another mistake.
    try:
        one = jnp.ones_like(zero)
        return jax.jvp(lambda s: _differentiable(losses(s), s), (zero,), (one,))[1]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"smoothing_radius must be > 0 for a loss without a derivative: {error}"
        ) from error


@jax.custom_jvp
def _differentiable(losses: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the losses; their derivative raises if they are constant by structure."""
    del scale  # Its tangent is not zero: JAX asks only where one of them is not.
    return losses


@functools.partial(_differentiable.defjvp, symbolic_zeros=True)
def _differentiable_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    if isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
        raise ValueError("value_fn has the derivative zero everywhere")
    return primals[0], tangents[0]


def sum_microbatches(
    fn: Callable[[tuple[Any, jax.Array]], Any],
    batch: tuple[Any, jax.Array],
    size: int | None,
    axis_name: AxisName | None = None,
) -> Any:
    """Sums ``fn((records, mask))`` over slices of ``size`` records, and over devices.

    Every record is in one slice, and every slice on one device. All devices evaluate as
    many slices; those beyond the last record are masked. All slices have one shape (the
    last one begins early, and what it has in common with the one before is masked), so a
    sum of integers does not depend on how many devices there are.

    Args:
      fn: sums over a slice, a tree of arrays; must count masked rows as zero.
      batch: records and their mask (B,): the same on every device.
      size: records at once; None is all, or a device's equal part of them.
      axis_name: mesh axis, or several, whose devices share the slices; None is one
        device. :data:`SIGNS` is none of them.

    Returns:
      What ``fn`` returns, summed: by one ``psum``, so the same on every device.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference
      >>> def total(part):
      ...     records, mask = part
      ...     return jnp.sum(jnp.where(mask, records, 0))
      >>> batch = jnp.arange(10), jnp.ones(10, bool)
      >>> finite_difference.sum_microbatches(total, batch, size=4).item()
      45
    """
    check_sums(axis_name)
    rows = num_rows(batch[0])
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    size = -(-rows // devices) if size is None else size
    count = -(-rows // size)
    share = -(-count // devices)
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * share

    def add(own: int | jax.Array, total: Any) -> Any:
        index = first + own
        start = jnp.minimum(index * size, rows - size)
        part, kept = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), batch
        )
        # Beyond the last slice the product below may overflow, and be less than start.
        fresh = (start + jnp.arange(size) >= index * size) & (index < count)
        return jax.tree.map(jnp.add, total, fn((part, kept & fresh)))

    if count == 1:
        total = fn(batch)  # As one device does it, on each; what the first has counts.
        if axis_name is not None:
            total = jax.tree.map(lambda x: jnp.where(first == 0, x, 0), total)
    else:
        like = jax.eval_shape(fn, jax.tree.map(lambda x: x[:size], batch))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        zero = on_each(zeros, axis_name)
        total = jax.lax.fori_loop(0, share, add, zero)
    return total if axis_name is None else jax.lax.psum(total, axis_name)


def check_sums(axis_name: AxisName | None) -> None:
    """Requires axes whose devices can share the records of a sum: none is ``SIGNS``.

    Example:
      >>> from jaxdp.kernels import finite_difference
      >>> finite_difference.check_sums(("data", "rows"))
    """
    if SIGNS in axes_of(axis_name):
        raise ValueError(
            f"axis_name must not be {SIGNS!r} here, got {axis_name!r}: what is summed has "
            "no two signs to share"
        )


def axes_of(axis_name: AxisName | None) -> tuple[str, ...]:
    """Returns the names of axes as a tuple; ValueError if one is there twice.

    Example:
      >>> from jaxdp.kernels import finite_difference
      >>> finite_difference.axes_of("data"), finite_difference.axes_of(None)
      (('data',), ())
    """
    if axis_name is None:
        return ()
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis_name must name each axis once, got {axis_name!r}")
    return axes


def on_each(tree: Any, axis_name: AxisName | None) -> Any:
    """Casts values that all devices share to values of each device.

    Derivatives of a device's own losses need this: a ``shard_map`` that checks replication
    sums those by shared values over all devices, before anything is clipped.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference
      >>> tree = finite_difference.on_each({"w": jnp.ones(2)}, None)  # One device.
      >>> tree["w"].tolist()
      [1.0, 1.0]
    """
    return tree if axis_name is None else jax.lax.pcast(tree, axis_name, to="varying")


def varying(tree: Any) -> frozenset[str]:
    """Returns the axes of a ``shard_map`` along which devices may differ in some array.

    Only one that checks replication can tell.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference
      >>> sorted(finite_difference.varying(jnp.ones(2)))  # One device.
      []
    """
    found: set[str] = set()
    for leaf in jax.tree.leaves(tree):
        kind: Any = jax.typeof(leaf)
        manual = getattr(kind, "manual_axis_type", None)
        found |= getattr(kind, "vma", set()) if manual is None else manual.varying
    return frozenset(found)


def per_record(fn: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """Lifts a loss of one record, ``fn(params, record) -> ()``, to a batch by vmap.

    ``fn`` is traced: Python cannot branch on the values of its arguments.

    Raises:
      ValueError: when traced, where ``fn`` calls Python with all records at once, as
        :func:`over_records` has it.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def loss(params, record):
      ...     x, y = record
      ...     return (x @ params - y) ** 2
      >>> value_fn = jaxdp.per_record(loss)
      >>> value_fn(jnp.ones(2), (jnp.eye(2), jnp.array([1.0, 3.0]))).tolist()
      [0.0, 4.0]
    """
    return over_records(fn, in_axes=(None, 0))


def on_one_record(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on a batch of one record, its last argument, without that axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference
      >>> finite_difference.on_one_record(lambda x: 2 * x, jnp.ones(())).tolist()
      [2.0]
    """
    *others, record = args
    return fn(*others, jax.tree.map(lambda x: x[None], record))


def over_records(
    fn: Callable[..., Any], in_axes: int | tuple[int | None, ...] = 0
) -> Callable[..., Any]:
    """Lifts a function of one record as ``jax.vmap`` does, and refuses what mixes records.

    Those are calls out of JAX that would be given all records at once, of the function as
    it is lifted: also those of its derivatives. A rule of the function's own for ``vmap``,
    a collective over devices, and random bits of other keys than threefry's, which ``vmap``
    draws together, are not looked for.

    Args:
      fn: of one record.
      in_axes: 0 for arguments with records in front, None for others; one for all, or each.

    Returns:
      A function of records. Raises ValueError when traced, where ``fn`` calls Python or a
      foreign function by another ``vmap_method`` than ``"sequential"``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference
      >>> centred = lambda x: (x - x.mean())[0]
      >>> alone = lambda x: finite_difference.on_one_record(centred, x)
      >>> finite_difference.over_records(alone)(jnp.arange(3.0)).tolist()
      [0.0, 0.0, 0.0]
    """

    def checked(*one: Any) -> Any:
        # A function of its own: of the same one JAX would remember an earlier trace. What
        # is looked at is what runs: a second trace could give another program.
        made, like = jax.make_jaxpr(lambda *given: fn(*given), return_shape=True)(*one)
        for name in _methods(made.jaxpr):
            if name not in (None, "sequential", "sequential_unrolled"):
                raise ValueError(
                    "losses must call Python, or a foreign function, record by record "
                    "where losses are evaluated on each record alone, by "
                    f"vmap_method='sequential', got {name!r}: given the whole batch, it "
                    "may let one record's loss depend on another"
                )
        out = jax.extend.core.jaxpr_as_fun(made)(*jax.tree.leaves(one))
        return jax.tree.unflatten(jax.tree.structure(like), out)

    return jax.vmap(checked, in_axes)


def _methods(jaxpr: Any) -> Iterator[Any]:
    """Yields how the callbacks of a program and of what it calls are lifted by vmap."""
    for equation in jaxpr.eqns:
        if "vmap_method" in equation.params:
            yield equation.params["vmap_method"]
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)  # Of one with its constants.
                if hasattr(inner, "eqns"):
                    yield from _methods(inner)


def slopes(
    value_fn: ValueFn,
    params: Any,
    batch: Any,
    rows: Direction,
    *,
    smoothing_radius: float,
    share_signs: bool = False,
) -> jax.Array:
    """Computes the slopes of every record along every direction.

    Args:
      value_fn: ``value_fn(params, batch) -> losses (B,)``, or a ``LazyLoss``.
      params: pytree.
      batch: pytree with leading axis B.
      rows: K directions (leading axis K), see :func:`jaxdp.kernels.sphere.directions`.
      smoothing_radius: lambda >= 0, in units of the parameters; it multiplies vectors of
        norm about sqrt(d). 0 takes the forward-mode limit.
      share_signs: within a ``jax.shard_map``, whether the two devices of its mesh's axis
        :data:`SIGNS` evaluate one sign each. Both are given the same arguments and get the
        same slopes; B K floats pass between them.

    Returns:
      ``(B, K)`` in float32 (or the losses' dtype if wider); loss per unit of parameter.
      Neither bounded nor private: rows may be NaN or infinite.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference, sphere
      >>> def value_fn(params, batch):
      ...     return batch @ params
      >>> params, batch = jnp.zeros(3), jnp.eye(3)
      >>> rows = sphere.directions(jax.random.key(0), params, law="rademacher", num=2)
      >>> table = finite_difference.slopes(
      ...     value_fn, params, batch, rows, smoothing_radius=0.5
      ... )
      >>> table.shape, abs(table).tolist()
      ((3, 2), [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    """
    if share_signs:
        return _shared_signs(value_fn, params, batch, rows, smoothing_radius)

    def one(direction: Direction) -> jax.Array:
        return _slope(value_fn, params, batch, direction, smoothing_radius)

    return _columns(one, value_fn, batch, rows)


def _columns(
    one: Callable[[Direction], jax.Array],
    value_fn: ValueFn,
    batch: Any,
    rows: Direction,
) -> jax.Array:
    """Computes the columns (B, K) of K directions, or of one."""
    if rows.scale.shape[0] == 1:
        return one(select(rows, 0))[:, None]
    return _each(one, value_fn, batch, rows)


def _each(
    one: Callable[[Direction], jax.Array],
    value_fn: ValueFn,
    batch: Any,
    rows: Direction,
) -> jax.Array:
    """Computes the columns (B, K) of K directions."""
    if isinstance(value_fn, perturb.LazyLoss) and not _small(batch, rows):
        return jax.lax.map(one, rows).T  # Beside each other they would be K models.
    return jax.vmap(one, out_axes=1)(rows)


def changes(
    value_fn: ValueFn,
    params: Any,
    previous: Any,
    batch: Any,
    rows: Direction,
    *,
    smoothing_radius: float,
) -> jax.Array:
    r"""One-sided scores :math:`(f(x+\lambda u)-f(y+\lambda u))/\lambda` of every record.

    As :func:`slopes`, with ``params`` x and ``previous`` y, a tree like it; the directions
    are the same at both points, and lambda is > 0.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference, sphere
      >>> def value_fn(params, batch):
      ...     return batch @ params
      >>> here, there, batch = jnp.ones(2), jnp.zeros(2), jnp.eye(2)
      >>> rows = sphere.directions(jax.random.key(0), here, law="rademacher")
      >>> table = finite_difference.changes(
      ...     value_fn, here, there, batch, rows, smoothing_radius=0.5
      ... )
      >>> table.tolist()
      [[2.0], [2.0]]
    """
    radius = jnp.asarray(smoothing_radius, _wide(params))

    def one(direction: Direction) -> jax.Array:
        here, there = (
            _checked(perturb.losses_at(value_fn, at, batch, direction, radius), batch)
            for at in (params, previous)
        )
        return (here - there) / radius.astype(here.dtype)

    return _each(one, value_fn, batch, rows)


def zero_update(leaf: Any) -> jax.Array:
    """Returns the update of a leaf that does not move: zeros of its shape and dtype.

    Integers of fewer than 8 bits have zeros of int8: JAX promotes no such dtype, so that an
    optimizer could not scale it. A zero that XLA knows costs a large leaf nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference
      >>> leaves = jnp.ones(2, jnp.int4), jnp.ones(2, jnp.bfloat16)
      >>> [str(finite_difference.zero_update(leaf).dtype) for leaf in leaves]
      ['int8', 'bfloat16']
    """
    dtype = leaf.dtype
    small = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
    return jnp.zeros(leaf.shape, jnp.int8 if small else dtype)


def combine(weights: jax.Array, rows: Direction, like: Any) -> Any:
    r"""Computes the tree :math:`\frac1K\sum_k w_k u_k`; frozen leaves are zero.

    Args:
      weights: ``(K,)`` float32.
      rows: K directions.
      like: pytree that gives shapes and dtypes (sums are in float32).

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import finite_difference, sphere
      >>> rows = sphere.directions(jax.random.key(0), jnp.zeros(4), law="rademacher")
      >>> step = finite_difference.combine(jnp.array([3.0]), rows, jnp.zeros(4))
      >>> abs(step).tolist()
      [3.0, 3.0, 3.0, 3.0]
    """
    num = rows.scale.shape[0]

    def term(one: Direction, weight: jax.Array) -> Any:
        def leaf(path: tuple[Any, ...], x: Any) -> jax.Array:
            name = path_str(path)
            if name not in one.paths:
                return jnp.zeros(x.shape, jnp.float32)
            return weight * leaf_direction(one, name, tuple(x.shape))

        return jax.tree_util.tree_map_with_path(leaf, like)

    if num == 1:
        total = term(select(rows, 0), weights[0])
    else:
        # Of the weights, which may differ from device to device: so must the first sum.
        start = zero_after(weights).astype(jnp.float32)
        zeros = jax.tree.map(lambda x: jnp.full(x.shape, start), like)

        def add(carry: Any, row: tuple[Direction, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, term(*row)), None

        total, _ = jax.lax.scan(add, zeros, (rows, weights / num))
    zero = zero_after(weights)

    def finished(path: tuple[Any, ...], t: jax.Array, x: Any) -> jax.Array:
        name = path_str(path)
        if name not in rows.paths:
            return zero_update(x)
        return in_words(rows, name, rounded(t, zero).astype(x.dtype))

    return jax.tree_util.tree_map_with_path(finished, total, like)
