"""Sources of records that are not in memory: indexed objects, Parquet files, iterators."""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import array_source, validate
from jaxdp.core.source import Source


class ItemSource(Source):
    """Records of anything that has a length and gives record i for ``items[i]``.

    So a ``RandomAccessDataSource`` of grain, a ``datasets.Dataset`` with the format
    ``"numpy"``, a ``torch.utils.data.Dataset`` of arrays.

    Structure, shapes and dtypes are those of ``like``, and public. An item is cast to them
    where no value changes, or floats are rounded, and one that does not fit takes part as
    nothing: its floats are NaN, so that its loss is NaN and counts zero, and its integers
    are zeros. It is not refused: one private record would decide whether the run ends. An
    error that reading an item raises ends it nevertheless, for it may be that of a disk.

    Args:
      items: what is indexed; each item a pytree of numbers and arrays. Another thread asks.
      files: paths of the files that it reads: a run is refused where one changes. Without
        them nobody sees a change while a run is under way.
      like: an item, or its ``jax.ShapeDtypeStruct`` leaves. None takes item 0, whose
        shapes and dtypes must then be public: they decide which other items fit (after a
        whole number, no fraction does).

    Raises:
      TypeError: ``items`` has no ``__len__`` or ``__getitem__``.

    Example:
      >>> import numpy as np
      >>> import jaxdp
      >>> items = [{"x": 1.5, "y": 0}, {"x": 2.5, "y": 1}, {"y": 1}]
      >>> source = jaxdp.data.ItemSource(items, like={"x": 0.0, "y": 0})
      >>> source.rows(np.array([1, 0, 2]))["x"].tolist()
      [2.5, 1.5, nan]
    """

    def __init__(
        self,
        items: Any,
        files: Iterable[str | os.PathLike[str]] = (),
        *,
        like: Any = None,
    ):
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
            raise TypeError(
                "items must have a length and give record i for items[i], got a "
                f"{type(items).__name__}: IteratorSource is for what can be read once"
            )
        self._items, self._files = items, array_source.stamps(files)
        # Zeros in the public shapes: of ``like``, or of item 0 once that was read.
        self._like: Any = None if like is None else jax.tree.map(_zeros, like)

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, indices: np.ndarray) -> Any:
        found = [self._item(int(i)) for i in indices]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *found)

    def digest(self) -> bytes:
        state = hashlib.sha256(f"{len(self)}".encode())
        for i in range(len(self)):
            for path, array in jax.tree_util.tree_leaves_with_path(self._item(i)):
                state.update(array_source.head(path, array).encode())
                state.update(array_source.octets(array))
        return state.digest()

    def _item(self, i: int) -> Any:
        """Returns a copy of item i in the public shapes and dtypes."""
        # Copies: who makes an item may use its memory for the next one.
        if self._like is None:
            self._like = jax.tree.map(_zeros, self._items[0])
        return _record_like(self._like, self._items[i])

    def check(self) -> None:
        array_source.check_files(self._files)


class ParquetSource(Source):
    """Columns of Parquet files, by row groups.

    Parquet packs records into groups, and a record is had by unpacking all of its group:
    of each group that a fetch needs, once. Small groups (``row_group_size=`` of
    ``pyarrow.parquet.write_table``) make sampling faster; arrays of ``np.save`` need
    no unpacking. It needs pyarrow: ``pip install 'jaxdp-optim[tables]'``.

    A record with a null in any of the columns has NaN for floats, and zeros for integers
    and bools: where its loss is NaN then, it counts zero. It is not refused: one private
    record would decide whether the run ends.

    Args:
      paths: one file or several, which follow each other.
      columns: names of the columns that are read, of numbers, bools, or lists of one
        size; None is all. Records are dicts of these.

    Raises:
      TypeError: a column of another type. ValueError: no such file or column, no records,
        or files with other columns.

    Example:
      >>> import jaxdp
      >>> source = jaxdp.data.ParquetSource(["part-0.parquet"])  # doctest: +SKIP
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
    ):
        try:
            from pyarrow import parquet  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                "ParquetSource needs pyarrow: pip install 'jaxdp-optim[tables]'"
            ) from error
        several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not several:
            raise ValueError("paths must be at least one file, got none")
        self._files = array_source.stamps(several)
        if len({stamp[:2] for stamp in self._files.values()}) < len(several):
            raise ValueError(
                "paths must be of different files, or a record would be there twice; got "
                f"one that two of them lead to in {list(map(str, several))}"
            )
        opened = [parquet.ParquetFile(path) for path in several]
        schema = opened[0].schema_arrow
        self._columns = list(schema.names if columns is None else columns)
        for path, file in zip(several, opened, strict=True):
            for name in self._columns:
                _check_column(schema, file.schema_arrow, name, path)
        self._groups = [
            (file, group) for file in opened for group in range(file.num_row_groups)
        ]
        sizes = [f.metadata.row_group(group).num_rows for f, group in self._groups]
        self._begins = list(itertools.accumulate(sizes, initial=0))
        if not len(self):
            raise ValueError(f"paths must hold records, got none in {several}")

    def __len__(self) -> int:
        return self._begins[-1]

    def rows(self, indices: np.ndarray) -> Any:
        return _gathered(indices, self._begins, self._group)

    def digest(self) -> bytes:
        state = hashlib.sha256()
        for begin, end in itertools.pairwise(self._begins):
            found = self.rows(np.arange(begin, end))
            for path, leaf in jax.tree_util.tree_leaves_with_path(found):
                state.update(array_source.head(path, leaf).encode())
                state.update(array_source.octets(leaf))
        return state.digest()

    def check(self) -> None:
        array_source.check_files(self._files)

    def _group(self, place: int, indices: np.ndarray) -> dict[str, np.ndarray]:
        file, group = self._groups[place]
        table = file.read_row_group(group, columns=self._columns, use_threads=False)
        read = {name: _numbers(table.column(name)) for name in self._columns}
        lacks = ~np.logical_and.reduce([whole for _, whole in read.values()])[indices]
        found = {name: array[indices] for name, (array, _) in read.items()}
        for array in found.values():
            array[lacks] = _nothing(array[:1])
        return found


class IteratorSource(Source):
    r"""Blocks of records that can be read once, in their own order.

    Each record is in one step of a run with ``sampling.SinglePass``, which costs what one
    step costs. Nothing else can be said of it: a sampler that draws records at random must
    be able to read any of them in any step, and an order that somebody else has shuffled
    earns no amplification. A run over it can write no ledger, because nothing tells whether
    the same records come again after a kill.

    Args:
      blocks: iterator over pytrees of NumPy arrays with leading axis of any length, all of
        one structure and, without ``like``, of one dtype. It yields each record once.
      num_examples: how many records it has in all. What comes beyond them is in no step;
        where fewer come than the steps read, the run ends there, with an error.
      like: one record of the public shapes and dtypes, or ``jax.ShapeDtypeStruct``\ s. A
        record that they do not hold has NaN for floats and zeros for integers, as in
        :class:`ItemSource`; without ``like``, a block of another dtype ends the run. A
        block of another structure always does, and one of texts or complex numbers, in
        which one record decides how all others are read: give an array of objects then.

    Raises:
      TypeError: ``blocks`` is no iterable. ValueError: it is empty.

    Example:
      >>> import numpy as np
      >>> import jaxdp
      >>> blocks = (np.arange(3.0) + 3 * i for i in range(4))
      >>> source = jaxdp.data.IteratorSource(blocks, num_examples=12)
      >>> source.rows(np.arange(4)).tolist(), source.rows(np.arange(4, 6)).tolist()
      ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0])
    """

    once: ClassVar[bool] = True

    def __init__(self, blocks: Iterable[Any], num_examples: int, *, like: Any = None):
        validate.integer(num_examples=num_examples)
        if not isinstance(blocks, Iterable):
            raise TypeError(
                "blocks must be an iterable of blocks of records, got "
                f"{validate.shown(blocks)}"
            )
        self._blocks: Iterator[Any] = iter(blocks)
        self._size, self._read = num_examples, 0
        self._held: list[Any] = []  # Blocks that are not read to their end.
        self._like: Any = None if like is None else jax.tree.map(_zeros, like)
        self._leaves: dict[
            str, str
        ] = {}  # Shapes and dtypes by path: of the first block.
        while not self._held:
            self._more()

    def __len__(self) -> int:
        return self._size

    def rows(self, indices: np.ndarray) -> Any:
        wanted = np.arange(self._read, self._read + len(indices))
        if not np.array_equal(indices, wanted):
            raise ValueError(
                f"data is read once, in order, and the next record is {self._read}: the "
                "records that were read are gone; make another IteratorSource"
            )
        while sum(map(_length, self._held)) < len(indices):
            self._more()
        held = jax.tree.map(lambda *x: np.concatenate(x), *self._held)
        self._held = [jax.tree.map(lambda x: x[len(indices) :], held)]
        self._read += len(indices)
        return jax.tree.map(lambda x: x[: len(indices)], held)

    def digest(self) -> bytes:
        raise ValueError("data must be readable again for a digest, got an iterator")

    def check(self) -> None:
        pass

    def example(self) -> Any:
        return jax.tree.map(lambda x: x[:1], self._held[0])

    def _more(self) -> None:
        # A copy: who makes a block may use its memory for the next one.
        block = jax.tree.map(np.array, next(self._blocks, None))
        known = self._read + sum(map(_length, self._held))
        if not jax.tree.leaves(block):
            raise ValueError(
                f"data must have num_examples = {self._size} records, got an iterator that "
                f"ended after {known}"
            )
        if len({len(leaf) for leaf in jax.tree.leaves(block)}) > 1:
            raise ValueError("blocks must have leaves of one length each")
        if not _length(block):
            return
        if self._like is not None:
            block = _records_like(self._like, block, known)
        named = jax.tree_util.tree_leaves_with_path(block)
        leaves = {jax.tree_util.keystr(path): _shown(leaf) for path, leaf in named}
        self._leaves = self._leaves or leaves
        for name in self._leaves | leaves:
            got, first = (x.get(name, "nothing") for x in (leaves, self._leaves))
            if got != first:
                raise ValueError(
                    "blocks must be of one structure, shapes and dtypes, got "
                    f"{got} at blocks{name} from record {known} on, and {first} before: "
                    "give like=, and what does not fit has NaN or zeros"
                )
        self._held.append(block)


class _Concatenated(Source):
    """Sources that follow each other."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources
        self._begins = list(itertools.accumulate(map(len, sources), initial=0))

    def __len__(self) -> int:
        return self._begins[-1]

    def rows(self, indices: np.ndarray) -> Any:
        return _gathered(
            indices, self._begins, lambda place, at: self._sources[place].rows(at)
        )

    def digest(self) -> bytes:
        state = hashlib.sha256()
        for source in self._sources:
            state.update(f"{len(source)};".encode() + source.digest())
        return state.digest()

    def check(self) -> None:
        for source in self._sources:
            source.check()


def concatenated(sources: Iterable[Source]) -> Source:
    """Returns one source of several, whose records follow each other: files in shards.

    Args:
      sources: at least one; all of one structure, shapes and dtypes.

    Raises:
      TypeError: one that is no source, or that can be read once only. ValueError: none, or
        records of other structures, shapes or dtypes.

    Example:
      >>> import numpy as np
      >>> import jaxdp
      >>> parts = [jaxdp.data.ArraySource(np.arange(3.0) + 3 * i) for i in range(2)]
      >>> source = jaxdp.data.concatenated(parts)
      >>> len(source), source.rows(np.array([5, 0, 3])).tolist()
      (6, [5.0, 0.0, 3.0])
    """
    parts = list(sources)
    if not parts:
        raise ValueError("sources must be at least one, got none")
    if len({*map(id, parts)}) < len(parts):
        raise ValueError(
            "sources must differ, or a record would be there twice; got one of them twice"
        )
    for source in parts:
        validate.instance(Source, sources=source)
        if source.once:
            raise TypeError(
                f"sources must be readable in any order, got {type(source).__name__}"
            )
    examples = [source.example() for source in parts]
    first, *others = [jax.tree.map(_record, example) for example in examples]
    for place, other in enumerate(others, 1):
        if other != first:
            got, at_first = (jax.tree.map(_shown, examples[i]) for i in (place, 0))
            raise ValueError(
                f"sources must have records of one shape and dtype, got {got} in source "
                f"{place} and {at_first} in source 0"
            )
    return _Concatenated(parts)


def _zeros(like: Any) -> np.ndarray:
    like = like if hasattr(like, "dtype") else np.asarray(like)
    return np.zeros(like.shape, like.dtype)


def _numbers(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns a Parquet column in its dtype, and which rows have no null."""
    column = column.combine_chunks()
    size, present = getattr(column.type, "list_size", None), column.is_valid()
    whole = present.to_numpy(zero_copy_only=False)
    values = column
    if size is not None:  # ``flatten`` would leave out lists that are null.
        values = column.values.slice(column.offset * size, len(column) * size)
        inner = values.is_valid().to_numpy(zero_copy_only=False)
        whole = whole & inner.reshape(len(column), size).all(axis=1)
    kind = values.slice(0, 0).to_numpy(zero_copy_only=False).dtype  # Of no nulls.
    if values.null_count and kind.kind != "f":  # As floats, integers would be rounded.
        values = values.fill_null(kind.type(0).item())
    array = values.to_numpy(zero_copy_only=False).astype(kind, copy=False)
    return (array if size is None else array.reshape(len(column), size)), whole


def _record_like(like: Any, record: Any) -> Any:
    """Returns a record in the shapes and dtypes of another, or one with nothing in it."""
    try:
        return jax.tree.map(_cast, like, record)
    except (TypeError, ValueError):
        return jax.tree.map(_nothing, like)


def _records_like(like: Any, block: Any, begin: int) -> Any:
    """Returns the records of a block, from number ``begin``, as :func:`_record_like` does.

    Raises:
      TypeError: a leaf of texts or complex numbers, which one record makes of all others.
    """

    def check(path: Any, x: np.ndarray, y: np.ndarray) -> None:
        if y.dtype != x.dtype and y.dtype.kind not in "biufO":
            raise TypeError(
                f"blocks must hold numbers like {x.dtype}, or objects, got "
                f"{validate.dtype_name(y.dtype)} at blocks{jax.tree_util.keystr(path)} "
                f"from record {begin} on: one record would change how all others are read"
            )

    jax.tree_util.tree_map_with_path(check, like, block)
    same = jax.tree.map(
        lambda x, y: (x.dtype, x.shape) == (y.dtype, y.shape[1:]), like, block
    )
    if all(jax.tree.leaves(same)):
        return block
    rows = (jax.tree.map(lambda x, i=i: x[i], block) for i in range(_length(block)))
    return jax.tree.map(
        lambda *x: np.stack(x), *(_record_like(like, row) for row in rows)
    )


def _cast(like: np.ndarray, leaf: Any) -> np.ndarray:
    """Returns a leaf as an array like another; TypeError or ValueError if it is none."""
    with np.errstate(all="ignore"):  # What is too large becomes infinite, unsaid.
        array = np.array(leaf)
        if array.shape != like.shape:
            raise ValueError
        floats = jnp.issubdtype(like.dtype, jnp.inexact)
        if floats and np.can_cast(array.dtype, like.dtype, "same_kind"):
            return array.astype(like.dtype)
        if array.dtype.kind not in "biuf":
            raise TypeError
        cast = array.astype(like.dtype)
        if not np.array_equal(cast, array):  # One that is too large would wrap.
            raise ValueError
    return cast


def _nothing(like: np.ndarray) -> np.ndarray:
    """Returns NaN, or zeros where the dtype has none."""
    return np.full_like(like, np.nan if jnp.issubdtype(like.dtype, jnp.inexact) else 0)


def _record(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape[1:])}"


def _shown(leaf: Any) -> str:
    return f"{validate.dtype_name(leaf.dtype)}{list(leaf.shape[1:])}"


def _length(block: Any) -> int:
    return len(jax.tree.leaves(block)[0])


def _gathered(indices: np.ndarray, begins: Sequence[int], read: Any) -> Any:
    """Reads rows part by part, and returns them in the order of ``indices``."""
    places = np.searchsorted(begins, indices, side="right") - 1
    out: Any = None
    for place in np.unique(places):
        here = np.flatnonzero(places == place)
        found = read(int(place), indices[here] - begins[place])
        if out is None:
            out = jax.tree.map(
                lambda x: np.empty((len(indices), *x.shape[1:]), x.dtype), found
            )
        for to, leaf in zip(jax.tree.leaves(out), jax.tree.leaves(found), strict=True):
            to[here] = leaf
    return out


def _check_column(first: Any, schema: Any, name: str, path: Any) -> None:
    import pyarrow  # pyright: ignore[reportMissingImports]

    for each in (first, schema):
        if name not in each.names:
            raise ValueError(
                f"columns must be of {', '.join(map(repr, each.names))} in {str(path)!r}, "
                f"got {name!r}"
            )
        if each.names.count(name) > 1:
            raise ValueError(
                f"columns must be of one name each in {str(path)!r}, got "
                f"{each.names.count(name)} of the name {name!r}"
            )
    kind = schema.field(name).type
    if kind != first.field(name).type:
        raise ValueError(
            f"paths must have one type in column {name!r}, got {kind} in {str(path)!r} and "
            f"{first.field(name).type} in the first"
        )
    types, inner = pyarrow.types, getattr(kind, "value_type", kind)  # Of a list.
    numbers = (types.is_integer, types.is_floating, types.is_boolean)
    of_numbers = any(holds(inner) for holds in numbers)
    of_any_size = types.is_list(kind) or types.is_large_list(kind)
    if of_numbers and (inner is kind or types.is_fixed_size_list(kind)):
        return
    advice = "make integers of texts, labels and dates by a public table"
    if of_numbers and of_any_size:
        advice = "cast it to a fixed_size_list, the type of lists of one size"
    raise TypeError(
        f"columns must be of numbers, or of lists of one size, got {name!r} of {kind}: "
        f"{advice}"
    )
