"""Steps over a source: the host reads the records of a block while the device computes.

The device draws which records each step reads, by the code and keys of data in memory. A
thread reads the rows of the next block of steps meanwhile, and brings them to the device.
The compiled program is that of data in memory, but that a step takes its rows from the
block in place of the whole data: the same gather, so that the same bits come out.

Each of several processes reads all rows. None computes a block before all have compared it.

Two blocks are on the device at most, of about ``_BLOCK`` bytes each. Nothing has the size
of the data set, on the device or here, but the words of draws that :func:`opened` bounds.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdp import sampling
from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.core.array_source import ArraySource
from jaxdp.core.source import Source
from jaxdp.core.types import Phase
from jaxdp.mechanism.plan import Plan
from jaxdp.sampling import batches, samplers
from jaxdp.training import loop, parallel

#: Bytes of the records of a block; one period of steps may have more.
_BLOCK = 2**24
#: Blocks of a long run at least: nothing is computed while the first one is read.
_BLOCKS = 16
#: Bytes of a memory-mapped array beyond which steps read their own records of it.
_LARGE = 2**26
#: Records beyond which no draw may need a word for each of them, as large batches do.
_MOST_WORDS = 2**24

#: Batches of all steps of a block, by phase: records (steps * B, ...), the rest (steps, B).
Block = dict[str, sampling.Batch]


@dataclasses.dataclass(frozen=True)
class Stream:
    """A source that was checked against a plan."""

    source: Source
    like: Any  # pytree of ShapeDtypeStruct: all records, as JAX would hold them
    known: Any  # pytree of NumPy's dtypes and shapes of one record

    def rows(self, indices: np.ndarray) -> Any:
        """Reads records, which must be of the shapes and dtypes that they were."""
        found = self.source.rows(indices)
        _check_rows(found, len(indices), self.known, f"{len(indices)} indices")
        return found


def of_maps(
    data: Any, plan: Plan, streamed: bool | None = None, *, whole: str = ""
) -> Any:
    """Returns large memory-mapped arrays as a source, where steps read a part of them.

    Warns of those that are read whole nevertheless. Of a run that goes on, ``streamed``
    says whether it began with a source: it does so again. ``whole`` is a caller's reason to
    read all records.
    """
    leaves = jax.tree.leaves(data)
    large = [x for x in leaves if _is_map(x) and x.nbytes > _LARGE]
    if isinstance(data, Source) or streamed is False or not (large or streamed):
        return data
    reason = whole or _whole(plan)
    if not reason and not streamed:
        if not all(isinstance(x, np.ndarray) for x in leaves):
            reason = "not all of its leaves are NumPy arrays"
        elif any(x.mode != "r" for x in large):
            reason = "it may change in place, unless it is mapped with mode='r'"
    if not reason:
        try:
            # A change of a file is seen by its time, and one in place is none of a copy.
            keeps = lambda x: _is_map(x) and x.mode == "r"  # noqa: E731
            return ArraySource(
                jax.tree.map(lambda x: x if keeps(x) else np.array(x), data)
            )
        except ValueError as error:
            reason = str(error)
    if large:
        size = max(x.nbytes for x in large) >> 20
        said = f"data has a memory-mapped array of {size} MiB, and is read whole"
        warnings.warn(f"{said}: {reason}", stacklevel=4 if whole else 6)
    return data


def _is_map(array: Any) -> bool:
    """Returns True for a map of a file; NumPy calls copies of one memory-mapped, too."""
    return isinstance(array, np.memmap) and array.filename is not None


def _whole(plan: Plan) -> str:
    """Returns why a plan's steps need data in memory; empty where they do not."""
    if _reads_all(plan):
        return f"{plan.family} with {plan.sampling!r} reads all records in a step"
    if _draws_many(plan):
        return f"{plan.sampling!r} makes a number for each record in a step"
    return ""


def opened(source: Source, plan: Plan) -> Stream:
    """Returns a checked source, before anything is compiled or spent.

    Raises:
      TypeError: a sampler that needs all records in a step, or an order of its own of what
        can be read once; a leaf that is no array of numbers. ValueError: another length
        than the plan's, records that cannot be read, files that have changed.
    """
    n, sampler = plan.num_examples, plan.sampling
    _check_sampler(source, plan)
    if len(source) != n:
        raise ValueError(
            f"data must have the plan's num_examples = {n} records, got a "
            f"{type(source).__name__} of {len(source)}"
        )
    if _draws_many(plan):
        raise ValueError(
            "plan.sampling must draw batches of less than a 32nd of "
            f"{sampler.within_group(n)[1]} records for data that is not in memory, got "
            f"{sampler!r}: it makes a number for each"
        )
    source.check()
    try:
        found = source.example()
    except LookupError as error:
        raise ValueError(
            f"data must have the {n} records that its length says, but reading the first "
            f"and the last raised {type(error).__name__}: {error}"
        ) from error
    leaves = jax.tree.leaves(found)
    if not leaves:
        raise ValueError("data must give arrays, got none from rows([0, n - 1])")
    rows = 1 if source.once else 2
    known = jax.tree_util.tree_map_with_path(_described, found)
    _check_rows(found, rows, known, "rows([0, n - 1])")
    dtypes = jax.dtypes.canonicalize_dtype
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), dtypes(x.dtype)), found
    )
    return Stream(source, like, known)


def kind(data: Any) -> dict[str, str]:
    """Returns what processes compare first: another kind would wait at other places."""
    return {"arrays or a source as data": str(isinstance(data, Stream))}


def compared(data: Any) -> Any:
    """Returns what processes of one run compare before it: arrays, or what a source tells.

    The records of a source they compare block by block.
    """
    if not isinstance(data, Stream):
        return data
    return f"{type(data.source).__name__} of {len(data.source)}: {data.known}"


def check_recordable(data: Any) -> None:
    """Refuses a record of a run whose records cannot be read a second time."""
    if isinstance(data, Stream) and data.source.once:
        raise ValueError(
            f"ledger must be None for a {type(data.source).__name__}: on resume nothing "
            "would tell whether the same records come again, and other records would put "
            "one noise over two sums"
        )


def _reads_all(plan: Plan) -> bool:
    """Returns True if a step reads all records."""
    whole = (plan.sampling.of_phase(phase.name).whole for phase in plan.phases)
    return plan.runs_algorithm or any(whole)


def _draws_many(plan: Plan) -> bool:
    """Returns True if a draw needs words for more than :data:`_MOST_WORDS` records."""
    n, sampler = plan.num_examples, plan.sampling
    _, among = sampler.within_group(n)
    if not sampler.amplifies or among <= _MOST_WORDS:
        return False
    rows = (sampler.of_phase(phase.name).rows(n) for phase in plan.phases)
    return not all(samplers.few(x, among) for x in rows)


def _check_sampler(source: Source, plan: Plan) -> None:
    sampler = plan.sampling
    if _reads_all(plan):
        raise TypeError(
            f"data must be arrays in memory for {plan.family} with {sampler!r}, whose "
            f"steps read all records, got a {type(source).__name__}: sample a part of them "
            "in each step (TruncatedPoisson, FixedSize, ShuffledEpochs, "
            "CyclicEpochs, CyclicPoisson, SinglePass)"
        )
    if source.once and not isinstance(sampler, sampling.SinglePass):
        raise TypeError(
            "plan.sampling must be SinglePass for what is read once "
            f"({type(source).__name__}), got {sampler!r}: in its own order, no step can "
            "draw its records from all of them, so that the plan would account for a "
            "sample that nobody takes. jaxdp.data.ArraySource reads files in any order"
        )


class _Described(NamedTuple):
    """Dtype and shape of a record's leaf."""

    dtype: np.dtype
    shape: tuple[int, ...]


def _described(path: Any, leaf: Any) -> _Described:
    place = f"data{jax.tree_util.keystr(path)}"
    if not isinstance(leaf, np.ndarray):
        raise TypeError(
            f"data must give NumPy arrays, got a {type(leaf).__name__} at {place}"
        )
    if not validate.is_numeric(leaf):
        raise TypeError(
            f"data must be numbers, got dtype {validate.dtype_name(leaf.dtype)} at "
            f"{place}: make integers of texts, labels and dates by a public table, "
            "np.searchsorted(names, x)"
        )
    return _Described(leaf.dtype, leaf.shape[1:])


def _check_rows(found: Any, count: int, known: Any, asked: str) -> None:
    """Requires rows of known structure, shapes and dtypes, one for each index."""
    now = jax.tree_util.tree_map_with_path(_described, found)
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(found)}
    if now != known or lengths != {(count,)}:
        got = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", found)
        raise ValueError(
            f"data must give records of {known} and a row for each index, got {got} for "
            f"{asked}"
        )


# --- blocks ------------------------------------------------------------------------


def num_steps(plan: Plan, stream: Stream, chunk: int) -> int:
    """Returns the steps of a block: whole periods, of a chunk at most."""
    record = sum(
        math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(stream.like)
    )
    rows = sum(phase.num_steps * phase.batch_size for phase in plan.phases)
    period = sum(phase.num_steps for phase in plan.phases)
    most = max(1, _BLOCK // max(1, rows * record))
    needed = -(-min(chunk, plan.num_steps) // period)
    share = max(8, plan.num_steps // (_BLOCKS * period))
    return period * min(most, needed, share)


def drawing(plan: Plan, steps: int) -> Any:
    """Returns the compiled function (keys, first) -> :data:`Block` without records."""
    period = sum(phase.num_steps for phase in plan.phases)

    def drawn(keys: keys_lib.Keys, first: jax.Array) -> Block:
        block, start = {}, 0
        for phase in plan.phases:
            begins = np.arange(0, steps, period)[:, None] + start
            places = (begins + np.arange(phase.num_steps)).reshape(-1)
            one = functools.partial(sampling.draw, plan, keys, phase=phase.name)
            # One after the other: a draw may need a word for each record.
            block[phase.name] = jax.lax.map(one, first + jnp.asarray(places, jnp.int32))
            start += phase.num_steps
        return block

    build = lambda: jax.jit(drawn)  # noqa: E731
    return loop.compiled(("draw", plan.digest, steps), build)[0]


def shapes(plan: Plan, stream: Stream, keys: keys_lib.Keys, chunk: int) -> Block:
    """Returns the shapes of a block."""
    steps = num_steps(plan, stream, chunk)
    block = jax.eval_shape(drawing(plan, steps), keys, jnp.int32(0))

    def rows(drawn: sampling.Batch) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((drawn.mask.size, *x.shape[1:]), x.dtype),
            stream.like,
        )

    return {k: dataclasses.replace(x, records=rows(x)) for k, x in block.items()}


def batch(
    plan: Plan, keys: keys_lib.Keys, step: jax.Array, block: Block, *, phase: str
) -> sampling.Batch:
    """Takes the batch of a step out of a block: ``sampling.batch`` of the whole data."""
    del keys  # The block was drawn by them.
    fetched = block[phase]
    period, start = 0, 0
    found: Phase | None = None
    for each in plan.phases:
        if each.name == phase:
            found, start = each, period
        period += each.num_steps
    assert found is not None
    whole, within = jnp.divmod(step - (fetched.step[0] - start), period)
    at = whole * found.num_steps + within - start
    size = fetched.mask.shape[1]
    rows = at * size + jnp.arange(size, dtype=jnp.int32)
    # Of a step that is not in the block, the batch is another step's and counts nothing.
    drawn = jax.tree.map(lambda x: x[at], dataclasses.replace(fetched, records=None))
    return dataclasses.replace(
        drawn, records=jax.tree.map(lambda x: x[rows], fetched.records)
    )


# --- running -----------------------------------------------------------------------


class InMemory:
    """Steps over data that the device holds."""

    def __init__(self, run: Any, keys: keys_lib.Keys, data: Any):
        self._run, self._given = run, (keys, data)

    def __call__(self, carry: loop.Carry, first: int, last: int) -> loop.Carry:
        """Runs the steps [first, last)."""
        bounds = jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32)
        return self._run(carry, *self._given, *bounds)


class Streamed:
    """Steps over a source, whose next block is read while one is computed."""

    def __init__(
        self,
        run: Any,
        keys: keys_lib.Keys,
        plan: Plan,
        stream: Stream,
        mesh: Mesh | None,
        chunk: int,
        pool: futures.Executor,
    ):
        self._run, self._keys, self._plan = run, keys, plan
        self._stream, self._mesh, self._chunk = stream, mesh, chunk
        self._steps = num_steps(plan, stream, chunk)
        self._draw, self._pool = drawing(plan, self._steps), pool
        self._bounds: tuple[int, int] | None = None  # of the block that is being read
        self._coming: futures.Future[Block] | None = None

    def ready(self, first: int, last: int) -> None:
        """Waits for the first block of [first, last), which is charged after that only.

        Raises what reading it raised, and ValueError if the records have changed.
        """
        try:
            self._await(first, min(first + self._steps, last))
        except Exception as error:
            error.add_note(f"No step from {first} on is charged.")
            raise

    def __call__(self, carry: loop.Carry, first: int, last: int) -> loop.Carry:
        """Runs the steps [first, last), in blocks."""
        begin = first
        while first < last:
            end = min(first + self._steps, last)
            try:
                block = self._await(first, end)
            except Exception as error:
                error.add_note(
                    f"The steps {begin} to {last - 1} were under way: they are charged. "
                    "Of a run with a ledger, jaxdp.resume computes them again over the "
                    "records that there were."
                )
                raise
            self._bounds = self._coming = None
            self._prefetch(end)
            bounds = jnp.asarray(first, jnp.int32), jnp.asarray(end, jnp.int32)
            carry = self._run(carry, self._keys, block, *bounds)
            del block
            # So that two blocks are there at most.
            carry = jax.block_until_ready(carry)
            first = end
        return carry

    def _prefetch(self, first: int) -> None:
        """Begins to read the block from ``first`` on, as the steps of a run are cut."""
        if first < self._plan.num_steps:
            chunk = first - first % self._chunk + self._chunk
            self._begin(first, min(first + self._steps, chunk, self._plan.num_steps))

    def _begin(self, first: int, last: int) -> None:
        # The draw is queued before the steps that follow, and does not wait for them.
        drawn = self._draw(self._keys, jnp.asarray(first, jnp.int32))
        self._bounds = first, last
        config: Any = jax.config  # Each thread has a precision of its own.
        wide = config.jax_enable_x64
        self._coming = self._pool.submit(self._fetched, drawn, last, wide)

    def _await(self, first: int, last: int) -> Block:
        if self._coming is None or self._bounds != (first, last):
            self._begin(first, last)
        assert self._coming is not None
        mesh = self._mesh
        try:
            # Processes wait for each other in this thread: the order is that of the steps.
            block = parallel.together(mesh, self._coming.result)
            parallel.check_same(mesh, self._keys, data=block)
            return block
        except BaseException:
            self._coming = None
            raise

    def _fetched(self, drawn: Block, last: int, wide: bool) -> Block:
        """Reads the records of the steps before ``last``; those beyond are zeros."""
        with jax.enable_x64(wide):
            return self._read(drawn, last)

    def _read(self, drawn: Block, last: int) -> Block:
        source, block = self._stream.source, {}
        source.check()
        for name, part in drawn.items():
            steps, size = part.mask.shape
            # One at least: rows of a step that does not run are masked there.
            count = max(1, int(np.sum(np.asarray(part.step) < last)))
            index = np.where(part.mask, part.index, 0)  # The first, for no record.
            rows = self._stream.rows(index[:count].reshape(-1).astype(np.int64))
            # A copy: on a CPU an array of JAX may else share the memory of the source's.
            own = functools.partial(_own, size=steps * size)
            block[name] = dataclasses.replace(part, records=jax.tree.map(own, rows))
        source.check()
        if not parallel.several_processes(self._mesh):  # Else the program does.
            block = parallel.on_all(self._mesh, block)
        return jax.block_until_ready(block)


def _own(rows: np.ndarray, size: int) -> jax.Array:
    """Returns a copy of rows as JAX holds them, with zeros up to ``size`` of them."""
    missing = size - len(rows)
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
    # JAX may copy later, when a source has already put other rows into its array.
    return jax.block_until_ready(jnp.array(batches.narrowed(rows)))


@contextlib.contextmanager
def steps(
    run: Any, keys: keys_lib.Keys, plan: Plan, data: Any, mesh: Mesh | None, chunk: int
) -> Iterator[InMemory | Streamed]:
    """Returns what runs the steps of a compiled program over data, or over a stream."""
    if not isinstance(data, Stream):
        yield InMemory(run, keys, data)
        return
    with futures.ThreadPoolExecutor(1, "jaxdp-source") as pool:
        try:
            yield Streamed(run, keys, plan, data, mesh, chunk, pool)
        finally:
            pool.shutdown(cancel_futures=True)
