"""Batches: drawn at a fixed shape, and checked where they are used."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdp.core import display, validate
from jaxdp.core import keys as keys_lib
from jaxdp.core.source import Source
from jaxdp.core.types import Run, UserRecords
from jaxdp.kernels import finite_difference, threefry
from jaxdp.sampling.samplers import AnySampler, Sampler


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("records", "mask", "index", "step", "drawn_by"),
    meta_fields=("sampler", "num_examples", "private", "phase"),
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Records of one step. Secret, like the data.

    Attributes:
      records: pytree with leading axis B; masked rows hold some record and count nothing.
        None of a batch that was only drawn (:func:`draw`).
      mask: bool (B,).
      index: int32 (B,); where in the data each row lies. Randomness of a record's own must
        be drawn by it: its row may depend on which other records were sampled.
      sampler: what drew it; static.
      num_examples: of how many records; static.
      private: whether secret keys from entropy drew it; static.
      phase: name of the plan's phase that it is a step of; static.
      step: shape=(), dtype=int32; which step it was drawn for.
      drawn_by: shape=(), dtype=uint32; hash of the keys from entropy that drew it, 0 where
        they were traced or insecure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FixedSize(4),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> keys = jaxdp.Keys.insecure(0)
      >>> batch = jaxdp.sampling.batch(plan, keys, 0, jnp.arange(8.0))
      >>> batch.records.shape, int(batch.mask.sum()), batch.sampler
      ((4,), 4, FixedSize(batch_size=4))
    """

    records: Any
    mask: jax.Array
    index: jax.Array
    sampler: AnySampler
    num_examples: int
    private: bool
    phase: str
    step: jax.Array
    drawn_by: Any = dataclasses.field(default_factory=lambda: np.uint32(0))

    def __repr__(self) -> str:
        """Returns shapes and dtypes, and what is static: the numbers are secret."""
        records, mask, index = map(display.tree, (self.records, self.mask, self.index))
        return (
            f"Batch(records={records}, mask={mask}, index={index}, "
            f"sampler={self.sampler!r}, num_examples={self.num_examples}, "
            f"phase={self.phase!r})"
        )

    def with_records(self, records: Any) -> "Batch":
        """Returns the batch with these rows, which were read by its ``index``.

        Args:
          records: pytree of arrays whose row b is record ``index[b]`` of the data; where
            the mask is False, any record. NumPy arrays are copied.

        Raises:
          ValueError: no array, or one without a row for each index.
          TypeError: an array that is not of numbers.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FixedSize(4),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> keys, data = jaxdp.Keys.insecure(0), jnp.arange(8.0)
          >>> drawn = jaxdp.sampling.draw(plan, keys, 0)
          >>> batch = drawn.with_records(data[drawn.index])
          >>> same = jaxdp.sampling.batch(plan, keys, 0, data)
          >>> bool((batch.records == same.records).all())
          True
        """
        wanted = f"records must be arrays with the batch's {self.mask.shape[0]} rows"
        named = jax.tree_util.tree_leaves_with_path(records)
        if not named:
            raise ValueError(f"{wanted}, got no array")
        for path, leaf in named:
            if np.shape(leaf)[:1] != self.mask.shape:
                place = f"records{jax.tree_util.keystr(path)}"
                raise ValueError(f"{wanted}, got shape {np.shape(leaf)} at {place}")

        def own(leaf: Any) -> jax.Array:
            leaf = narrowed(leaf, "records")
            # NumPy's are copied now: JAX reads them later, when the next step's rows may
            # be there.
            shared = isinstance(leaf, np.ndarray)
            return jax.block_until_ready(jnp.array(leaf)) if shared else leaf

        return dataclasses.replace(self, records=jax.tree.map(own, records))


def narrowed(leaf: Any, name: str = "data") -> jax.Array | np.ndarray:
    """Returns an array whose numbers, if JAX does not hold them, are the nearest it does.

    JAX would wrap integers: a code outside of its domain would become one inside. It would
    warn of one float that is too large, and becomes infinite, or is a signalling NaN. And
    its errors about texts quote them.

    Raises:
      TypeError: ``leaf``, of the argument ``name``, is no array of numbers.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    if not validate.is_numeric(array):
        raise TypeError(
            f"{name} must be numbers, got dtype {validate.dtype_name(array.dtype)}"
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and dtype != array.dtype:
        limits = np.iinfo(dtype)
        array = np.clip(array, limits.min, limits.max).astype(dtype)
    elif array.dtype.kind in "fc" and dtype != array.dtype:
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(dtype)
    return array


def check_data(run: Run, data: Any, name: str = "data") -> None:
    """Requires every leaf of ``data`` to have ``run.num_examples`` rows of numbers.

    Raises:
      ValueError: no leaves, or another number of rows. TypeError: a leaf that is no number
        and no array of numbers.
    """
    wanted = (
        f"{name} must be arrays whose first axis has the plan's num_examples = "
        f"{run.num_examples} records"
    )
    if isinstance(data, Source):
        raise TypeError(
            f"{wanted}, got a {type(data).__name__}: sources are for jaxdp.fit and "
            "jaxdp.resume; a loop by hand reads rows by jaxdp.sampling.draw"
        )
    if isinstance(data, Iterator):
        raise TypeError(
            f"{wanted}, got a {type(data).__name__}: what can be read once, in its own "
            "order, cannot be sampled. jaxdp.data.IteratorSource reads it with SinglePass"
        )
    if isinstance(data, Batch):
        raise TypeError(f"{wanted}, got a {type(data).__name__}")
    named = jax.tree_util.tree_leaves_with_path(data)
    if not named:
        raise ValueError(f"{wanted}, got no array")
    for path, leaf in named:
        place = f"{name}{jax.tree_util.keystr(path)}"
        dtype = getattr(leaf, "dtype", None)
        if dtype is None and not validate.is_numeric(leaf):
            raise TypeError(f"{wanted}, got a {type(leaf).__name__} at {place}")
        if not validate.is_numeric(leaf):
            raise TypeError(
                f"{name} must be numbers, got dtype {validate.dtype_name(dtype)} at "
                f"{place}: make integers of texts, labels and dates by a public table, "
                "np.searchsorted(names, x)"
            )
        shape = np.shape(leaf)
        if not shape or shape[0] != run.num_examples:
            hint = "; lists are taken apart, np.asarray makes one array of a list"
            listed = any(hasattr(key, "idx") for key in path) and len(named) > 8
            raise ValueError(
                f"{wanted}, got shape {shape} at {place}{hint if listed else ''}"
            )


def shuffled(keys: keys_lib.Keys, data: Any) -> Any:
    """Returns ``data`` in a random order, for methods that read records in order.

    The order depends on no record, so a record that is replaced stays in its place. No
    amplification is claimed for it; it need not be secret.

    Args:
      keys: a ``jaxdp.Keys``; their sampling root is read.
      data: pytree of arrays with one number of rows.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: no leaves, different numbers of
        rows, or keys from entropy that a traced function closes over.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> data = jaxdp.sampling.shuffled(jaxdp.Keys.insecure(0), jnp.arange(8))
      >>> sorted(data.tolist())
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    keys = keys_lib.check(keys)
    keys_lib.check_given(keys, keys.sampling)
    size = finite_difference.num_rows(data, "data")
    key = keys_lib.stream(keys.sampling, "order")
    index = threefry.permuted(key, jnp.arange(size), size)
    return jax.tree.map(lambda x: jnp.asarray(narrowed(x))[index], data)


def batch(
    plan: Any,
    keys: keys_lib.Keys,
    step: int | jax.Array,
    data: Any,
    *,
    phase: str | None = None,
) -> Batch:
    """Draws the batch of one step with the plan's sampler.

    Args:
      plan: any plan; its ``sampling`` and ``num_examples`` are read.
      keys: their sampling root is read. Where a function is traced (``jax.jit``), keys from
        entropy are an argument of it.
      step: index of the step, shape=(); may be traced.
      data: pytree of arrays with ``plan.num_examples`` rows.
      phase: name of the phase (of ``plan.phases``) that the step belongs to; plans of one
        phase need none. In a single pass a step of another phase has a batch without
        records.

    Returns:
      A :class:`Batch` of static shape. Nothing of it may be released. NumPy arrays in
      ``data`` are not copied (a full batch holds the very same), and JAX reads them when it
      comes to it: do not change them in place while a step may not be done.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: wrong number of rows, a phase
        that the plan does not have, a sampler that draws no batches, or keys that a traced
        function closes over.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FixedSize(4),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> data = {"x": jnp.ones((8, 2)), "y": jnp.zeros(8)}
      >>> batch = jaxdp.sampling.batch(plan, jaxdp.Keys.insecure(0), 0, data)
      >>> batch.records["x"].shape
      (4, 2)
    """
    keys_lib.check(keys)
    validate.instance(Sampler, **{"plan.sampling": plan.run.sampling})
    check_data(plan.run, data)
    drawn = draw(plan, keys, step, phase=phase)
    if drawn.sampler.of_phase(drawn.phase).whole:
        return dataclasses.replace(drawn, records=jax.tree.map(narrowed, data))
    records = jax.tree.map(lambda x: jnp.asarray(narrowed(x))[drawn.index], data)
    return dataclasses.replace(drawn, records=records)


def draw(
    plan: Any, keys: keys_lib.Keys, step: int | jax.Array, *, phase: str | None = None
) -> Batch:
    """Draws which records a step reads, for a loop that reads them itself.

    ``drawn.with_records(rows)``, with the rows of ``drawn.index``, is what :func:`batch`
    makes of data in memory, to the bit.

    Args:
      plan: any plan; its ``sampling`` and ``num_examples`` are read.
      keys: their sampling root is read. Where a function is traced (``jax.jit``), keys from
        entropy are an argument of it.
      step: index of the step, shape=(); may be traced.
      phase: as in :func:`batch`.

    Returns:
      A :class:`Batch` without records (None). Its ``index`` is as secret as the keys where
      the plan's sampling amplifies: whoever sees which records are read knows the sample.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: a phase that the plan does not
        have, a sampler that draws no batches, or keys that a traced function closes over.

    Example:
      >>> import numpy as np
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=10**8, num_steps=3, sampling=jaxdp.sampling.FixedSize(4),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> drawn = jaxdp.sampling.draw(plan, jaxdp.Keys.insecure(0), 0)
      >>> rows = np.stack([np.full(2, i) for i in np.asarray(drawn.index)])  # Read them.
      >>> drawn.with_records(rows).records.shape
      (4, 2)
    """
    keys = keys_lib.check(keys)
    run: Run = plan.run
    sampler, n = run.sampling, run.num_examples
    validate.instance(Sampler, **{"plan.sampling": sampler})
    # Places of records are 32-bit integers: others would come back as those of before.
    validate.integer(at_most=2**31 - 1, **{"plan.num_examples": n})
    phase = check_phase(run, phase)
    if sampler.amplifies:
        keys_lib.check_given(keys, keys.sampling)
    key = keys_lib.stream(keys.sampling, "sampling", context=run.context)
    index, mask = sampler.of_phase(phase).draw(key, step, n)
    at = jnp.asarray(step, jnp.int32)
    if index is None:
        index = jnp.arange(n, dtype=jnp.int32)
    mark = keys_lib.sampling_mark(keys)
    return Batch(None, mask, index, sampler, n, keys.private, phase, at, mark)


def check_phase(run: Run, phase: str | None) -> str:
    """Returns the name of a phase of the plan; the only one if None is given.

    Raises:
      ValueError: no such phase, or None where there are several.
    """
    names = [each.name for each in run.phases]
    if phase is None and len(names) == 1:
        return names[0]
    if phase not in names:
        shown = ", ".join(map(repr, names))
        raise ValueError(f"phase must be one of the plan's, {shown}; got {phase!r}")
    return phase


def resolve(
    run: Run,
    batch: Any,
    mask: jax.Array | None,
    *,
    keys: keys_lib.Keys,
    step: jax.Array,
    phase: str | None = None,
) -> tuple[Any, jax.Array]:
    """Returns records and mask of a transform's batch, if the plan allows the batch.

    Users without records are masked (:func:`present`).

    Args:
      run: the plan's.
      batch: a :class:`Batch` of the plan's sampler; or raw arrays, with full batches and
        external ones.
      mask: bool (B,), for raw arrays with padded rows only. What full batches have beyond
        all records is masked, too, by place: padding comes last.
      keys: those of the transform, with which batches that sample are to be drawn.
      step: shape=(), int32; the transform's own count. A batch that was drawn for another
        step, or with other keys from entropy, counts nothing (all rows masked):
        accountants of samplers rest on every step having the batch that is its own. Full
        batches are all alike.
      phase: name of the phase of the step; None for plans of one phase.

    Raises:
      ValueError: a batch of another sampler, phase, number of records or keys; raw
        arrays where the plan samples; another number of rows. Raised when traced.
    """
    records, kept = _allowed(run, batch, mask, keys=keys, step=step, phase=phase)
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(records)):
        records = jax.tree.map(narrowed, records)
    return records, present(records, kept)


def unit_of(data: Any) -> str:
    """Returns ``"user"`` where data have records grouped by user, else ``"record"``.

    It is what neighbouring data sets differ in, and what a release of them costs.
    """
    nodes = jax.tree.leaves(data, is_leaf=lambda x: isinstance(x, UserRecords))
    grouped = any(isinstance(node, UserRecords) for node in nodes)
    return "user" if grouped else "record"


def present(records: Any, mask: jax.Array | None = None) -> Any:
    """Masks users without records, wherever ``records`` have users; else None or ``mask``.

    Whoever is not there counts nothing anywhere, as the relations of users that come or go
    have it: no loss may make something of an empty row.
    """
    nodes = jax.tree.leaves(records, is_leaf=lambda x: isinstance(x, UserRecords))
    for node in nodes:
        if isinstance(node, UserRecords):
            there = jnp.any(jnp.asarray(node.mask), axis=1)
            mask = there if mask is None else mask & there
    return mask


def _allowed(
    run: Run,
    batch: Any,
    mask: jax.Array | None,
    *,
    keys: keys_lib.Keys,
    step: jax.Array,
    phase: str | None,
) -> tuple[Any, jax.Array]:
    if isinstance(batch, Batch):
        if batch.sampler != run.sampling:
            raise ValueError(
                f"batch was drawn by {batch.sampler!r}, but the plan accounts for "
                f"{run.sampling!r}; draw it with jaxdp.sampling.batch(plan, ...)"
            )
        if batch.num_examples != run.num_examples:
            raise ValueError(
                f"batch was drawn from {batch.num_examples} records, but the plan has "
                f"num_examples = {run.num_examples}"
            )
        phase = check_phase(run, phase)
        if batch.phase != phase:
            raise ValueError(
                f"batch is of a step of the phase {batch.phase!r}, but phase is {phase!r}"
            )
        if keys.private and not batch.private and batch.sampler.amplifies:
            raise ValueError(
                "batch was drawn with insecure keys, but amplification needs a secret "
                "sample: draw it with the keys of the transform"
            )
        if mask is not None:
            raise ValueError("mask must be None with a Batch, which carries its own")
        if batch.records is None:
            raise ValueError(
                "batch must have records, got one of jaxdp.sampling.draw without any: "
                "batch.with_records(rows)"
            )
        if batch.sampler.whole:
            return batch.records, batch.mask
        kept = batch.mask & (batch.step == step)
        mark, drawn_by = keys_lib.sampling_mark(keys), batch.drawn_by
        if not mark:
            return batch.records, kept
        if isinstance(drawn_by, Tracer):
            return batch.records, kept & ((drawn_by == mark) | (drawn_by == 0))
        if np.asarray(drawn_by) not in (mark, 0):
            raise ValueError(
                "batch must be drawn with the keys of the transform, got one of other "
                "keys: samples that several runs share, or that change within a run, are "
                "not those that the plan accounts for"
            )
        return batch.records, kept
    if run.sampling.draws and not run.sampling.whole:
        raise ValueError(
            f"batch must be a jaxdp.sampling.Batch drawn by {run.sampling!r}, got raw "
            "arrays, for which no amplification can be accounted; draw it with "
            "jaxdp.sampling.batch(plan, keys, step, data)"
        )
    most = run.sampling.rows(run.num_examples)
    rows = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.shape(leaf)}
    if mask is None and run.sampling.whole:
        check_data(run, batch, "batch")
        return batch, jnp.ones((most,), bool)
    if not run.sampling.whole and (len(rows) != 1 or max(rows) > most):
        raise ValueError(
            f"batch must be arrays with at most {most} rows, the plan's batch_size, "
            f"padding included; got {sorted(rows)} rows"
        )
    if mask is None:
        return batch, jnp.ones((max(rows),), bool)
    mask = jnp.asarray(mask)
    if rows != set(mask.shape) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask must be bool of shape (B,) with B the rows of batch {sorted(rows)}, "
            f"got {mask.dtype} of shape {mask.shape}"
        )
    seen = not isinstance(mask, Tracer) and mask.is_fully_addressable
    if seen and np.asarray(mask)[most:].any():
        raise ValueError(
            f"mask must be False beyond the first {most} rows, all records: padding comes "
            "last"
        )
    # What a full batch has beyond its records is padding, by place: were masked rows not
    # counted, the mask of one record would decide whether another is read.
    return batch, mask & (jnp.arange(mask.size) < most)
