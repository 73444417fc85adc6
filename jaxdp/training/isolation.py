"""Check of record isolation, the one assumption that no clip can enforce."""

import functools
import math
import warnings
import zlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jaxdp.core.types import PathPredicate, ValueFn
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.kernels.perturb import LazyLoss, identity
from jaxdp.kernels.sphere import path_str

Array = jax.Array

#: Sets the traces that JAX remembers apart: see :func:`traced_anew`.
_TRACE = jax.make_user_context(None)
#: Made-up records: one for each way in which a record is replaced.
_ROWS = 4


def check_isolation(value_fn: ValueFn, params: Any, batch: Any, row: int = 0) -> None:
    """Replaces one record and requires every other loss to be bit-identical.

    One record's loss must not depend on another: no batch norm, no capacity-limited
    routing, no padding to the longest of the batch. A loss that breaks this breaks the
    sensitivity of every release, and no clip can mend it. It is a check, not a proof.
    :func:`jaxdp.fit` runs one like it on made-up records; run this one on public records.

    Args:
      value_fn: ``value_fn(params, batch) -> losses (B,)``.
      params: parameters to try it at, as they are and moved at random: below a layer of
        zeros, a mean over the batch goes unseen. A float that is a flag is moved, too.
      batch: at least two records that differ.
      row: the record to replace, by the next one and by zeros.

    Raises:
      ValueError: ``batch`` is too small, or another record's loss changed.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> params, batch = jnp.ones(2), jnp.arange(6.0).reshape(3, 2)
      >>> jaxdp.check_isolation(lambda w, x: x @ w, params, batch)
      >>> try:
      ...     jaxdp.check_isolation(lambda w, x: (x - x.mean()) @ w, params, batch)
      ... except ValueError as error:
      ...     print(error)
      value_fn is not per record: replacing record 0 changed the losses of records [1, 2]
    """
    rows = num_rows(batch)
    if rows < 2 or not 0 <= row < rows:
        raise ValueError(
            f"batch must hold at least two records and row={row} be one of them, "
            f"got {rows} records"
        )
    losses = jax.jit(traced_anew(value_fn))
    moved = jax.jit(lambda params: _moved(params, lambda _, leaf, moved: moved))
    for at in (params, moved(params)):
        before = np.asarray(losses(at, batch))
        for replace in (
            lambda x: x[(row + 1) % rows],
            lambda x: jnp.zeros_like(x[row]),
        ):
            changed = jax.tree.map(
                lambda x, replace=replace: x.at[row].set(replace(x)),
                jax.tree.map(jnp.asarray, batch),
            )
            _compare(before, np.asarray(losses(at, changed)), row)


def traced_anew(value_fn: ValueFn) -> ValueFn:
    """Returns the same loss, of which JAX remembers no trace from before.

    JAX remembers functions within a loss by their shapes (those that are jitted,
    rematerialised or looped over), whatever they close over or are a part of: a module may
    have been in another mode then.
    """
    trace = object()

    def anew(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with _TRACE(trace):
                return function(*args)

        return call

    if isinstance(value_fn, LazyLoss):
        return LazyLoss(anew(value_fn.fn))
    return anew(value_fn)


def made_up_check(
    value_fn: ValueFn,
    params: Any,
    data: Any,
    place: Any = None,
    moves: PathPredicate | None = None,
) -> Callable[[Any], None]:
    """Compiles a check of isolation on made-up records, for parameters like these.

    It is called with parameters, which are moved at random. Nothing of the data but shapes
    and dtypes is used. Floats are in [0, 1) and integers 0 or 1, which are classes, tokens
    and indices of nearly every loss. Four records are replaced one after the other: by
    zeros, by large positive numbers (and ones), by large negative ones (and integers and
    bools turned around), and by another record.

    Parameters, public ones, are on one device, or split over several; the losses come to
    ``place`` then, a sharding of every device. They are moved because at zeros, where many
    runs start, a batch's mean or variance often does not reach the losses. Where some stay
    in the run (``moves`` says which do not), losses are compared a second time with those
    as they are: one may be a flag of the model's mode.

    Raises:
      ValueError: the loss raised; of what is returned, or another record's loss changed.
    """
    shapes, structure = jax.tree.flatten(data)
    base = structure.unflatten(_made_up(x, i) for i, x in enumerate(shapes))
    value_fn = traced_anew(value_fn)

    paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    stays = {path for path in paths if moves is not None and not moves(path)}

    @functools.partial(jax.jit, out_shardings=place)
    def losses(params: Any, batch: Any, every: Array) -> Array:
        def shown(path: str, leaf: Any, moved: Any) -> Any:
            return jnp.where(every, moved, leaf) if path in stays else moved

        if isinstance(value_fn, LazyLoss):  # A layer at a time, and no second model.
            rest = _moved(params, shown, but=_asked(value_fn, params, batch))
            view = functools.partial(_moved_view, shown=shown)
            return value_fn.fn(rest, batch, view)
        return value_fn(_moved(params, shown), batch)

    compiled = _named(lambda: losses.lower(params, base, np.bool_(True)).compile())

    def check(params: Any) -> None:
        def at(batch: Any, every: bool = True) -> np.ndarray:
            given = params, batch, np.bool_(every)
            return _named(lambda: np.asarray(compiled(*given)))

        _compare_all(at, base)
        if stays:
            _compare_all(functools.partial(at, every=False), base)

    return check


def _named(call: Callable[[], Any]) -> Any:
    """Returns what a call gives; names the loss in what it raises."""
    try:
        return call()
    except Exception as error:
        # Of a callback's traceback, the last line says what was wrong.
        *_, last = ["", *str(error).strip().splitlines()]
        said = f"{type(error).__name__}: {last.rstrip('.')[:200]}"
        raise ValueError(
            "value_fn must take made-up records of the data's shapes and dtypes "
            f"({_ROWS} of them, floats in [0, 1) or large, integers 0 and 1), on which "
            "fit checks that one record's loss does not depend on another; it raised "
            f"{said}. If you know that it keeps "
            "records apart, check_isolation=False leaves the check out"
        ) from error


def _compare_all(at: Callable[[Any], np.ndarray], base: Any) -> None:
    """Replaces one made-up record after the other, and compares the losses of the rest."""
    before = at(base)
    if np.isnan(before.astype(np.float32)).all():
        warnings.warn(
            "value_fn is NaN on all made-up records, so that nobody has checked that one "
            "record's loss does not depend on another: try jaxdp.check_isolation on public "
            "records (check_isolation=False leaves out check and warning)",
            stacklevel=5,  # Where fit was called.
        )
        return
    for row in range(_ROWS):
        changed = jax.tree.map(lambda x, row=row: _replaced(x, row), base)
        try:
            _compare(before, at(changed), row)
        except ValueError as error:
            if not str(error).startswith("value_fn is not"):
                raise
            raise ValueError(
                f"{error}, of {_ROWS} that were made up. One record would then move a "
                "release by more than the plan accounts for: no batch norm, no means, "
                "sorting or padding over the batch. jaxdp.per_record lifts a loss of one "
                "record (check_isolation=False leaves this check out)"
            ) from None


def _made_up(data: Any, index: int) -> np.ndarray:
    """Makes up records for one leaf of the data, in a range that most losses take."""
    shape = (_ROWS, *data.shape[1:])
    bits = _hashed(np.arange(math.prod(shape), dtype=np.uint32), index)
    if not jnp.issubdtype(data.dtype, jnp.inexact):
        return (bits >> 31).reshape(shape).astype(data.dtype)
    return ((bits >> 8) * np.float32(2.0**-24)).reshape(shape).astype(data.dtype)


def _replaced(x: np.ndarray, row: int) -> np.ndarray:
    """Returns records of which one, in a way of its own, is replaced."""
    old, real = x[row], jnp.issubdtype(x.dtype, jnp.inexact)
    high = 8 + old if real else np.ones_like(old)
    low = -8 - old if real else old == 0
    out = x.copy()
    out[row] = (np.zeros_like(old), high, low, x[0])[row]
    return out


def _moved(params: Any, shown: Any, but: Collection[str] = ()) -> Any:
    """Moves parameters at random: by up to half of their size, or up to 0.1 from zero."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    named = [(path_str(path), leaf) for path, leaf in leaves]
    return structure.unflatten(
        leaf if path in but else shown(path, leaf, _moved_leaf(leaf, index))
        for index, (path, leaf) in enumerate(named)
    )


def _asked(value_fn: LazyLoss, params: Any, batch: Any) -> set[str]:
    """Returns the paths of the leaves that a lazy loss reads through its view alone."""
    asked = set()

    def view(path: str, *given: Any, **named: Any) -> Any:
        """Answers with no number of a leaf, whose own are used only where it is read."""
        asked.add(path)
        part = identity(path, *given, **named)
        return jnp.zeros(part.shape, part.dtype)

    traced = jax.make_jaxpr(lambda p: value_fn.fn(p, batch, view))(params).jaxpr
    _, read = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    pairs = zip(leaves, read, strict=True)
    return asked - {path_str(path) for (path, _), used in pairs if used}


def _moved_view(
    path: str,
    leaf: Any,
    layer: Any = None,
    after: Any = None,
    rows: Any = None,
    *,
    shown: Any,
) -> Any:
    """Returns a leaf, or its slice for a layer, moved: the ``at`` of a lazy loss."""
    del after
    moved = shown(path, leaf, _moved_leaf(leaf, zlib.crc32(path.encode()), layer))
    return moved if rows is None else moved[rows]


def _moved_leaf(leaf: Any, index: int, layer: Any = None) -> Any:
    # It keeps its signs, so that a loss of positive parameters stays defined.
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    places = jax.lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape)
    if layer is not None:  # Each layer otherwise.
        places += jnp.asarray(layer).astype(jnp.uint32) * jnp.uint32(leaf.size)
    bits = (_hashed(places, ~index) >> 8).astype(jnp.float32)
    share = (bits * 2.0**-23 - 1).astype(leaf.dtype)
    return jnp.where(leaf == 0, 0.1 * share, leaf * (1 + 0.5 * share)).astype(
        leaf.dtype
    )


def _hashed(places: Any, seed: int) -> Any:
    """Hashes each place to 32 bits: made-up numbers need no key, and no table in memory."""
    bits = places + np.uint32(0x9E3779B9 * (seed + 1) & 0xFFFFFFFF)
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # Of MurmurHash3's last steps.
        bits = (bits ^ (bits >> 16)) * np.uint32(factor)
    return bits ^ (bits >> 16)


def _compare(before: np.ndarray, after: np.ndarray, row: int) -> None:
    """Raises if a loss other than that of ``row`` changed in a bit."""
    bits = [np.ascontiguousarray(x).view(np.uint8) for x in (before, after)]
    differ = (bits[0] != bits[1]).reshape(len(before), -1).any(axis=1)
    moved = np.flatnonzero((np.arange(len(before)) != row) & differ)
    if moved.size:
        raise ValueError(
            f"value_fn is not per record: replacing record {row} changed the losses "
            f"of records {moved[:8].tolist()}"
        )
