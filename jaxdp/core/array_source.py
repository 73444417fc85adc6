"""Records in NumPy arrays, which may be memory-mapped files, and digests of them."""

import functools
import hashlib
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxdp.core import validate
from jaxdp.core.source import Source

#: Bytes that are read at once where all records are, as for a digest.
_AT_ONCE = 2**24
#: Bytes of an array up to which its map may stay in memory: the fastest way to its rows.
_SMALL = 2**28

#: Where a file lies, and what a change of it changes.
Stamp = tuple[int, int, int, int]


class ArraySource(Source):
    """Rows of NumPy arrays, which may be memory-mapped files: those are never read whole.

    Arrays of up to 256 MiB are read through their map, whose pages stay in the process's
    memory until others need it. Of larger ones each row is read by a call of the system, as
    a map would keep up to 2 MB for a row of a kilobyte. (Views with steps, and systems
    without ``os.preadv``, are read through the map.)

    Args:
      arrays: pytree of NumPy arrays with one number of rows, such as
        ``np.load("x.npy", mmap_mode="r")`` or ``np.memmap``. Do not change them in place:
        of arrays without a file that is not seen. A file that another process changes
        through a mapping of its own is seen once the system writes it back.

    Raises:
      TypeError: a leaf that is no NumPy array of numbers. ValueError: no array, no rows, or
        arrays with other numbers of rows.

    Example:
      >>> import pathlib, tempfile
      >>> import numpy as np
      >>> import jaxdp
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "x.npy"
      >>> np.save(path, np.arange(12.0).reshape(6, 2))
      >>> source = jaxdp.data.ArraySource({"x": np.load(path, mmap_mode="r")})
      >>> len(source), source.rows(np.array([4, 1]))["x"].tolist()
      (6, [[8.0, 9.0], [2.0, 3.0]])
    """

    def __init__(self, arrays: Any):
        named = jax.tree_util.tree_leaves_with_path(arrays)
        wanted = "arrays must be NumPy arrays of numbers with one number of rows"
        if not named:
            raise ValueError(f"{wanted}, got no array")
        for path, leaf in named:
            place = f"arrays{jax.tree_util.keystr(path)}"
            if not isinstance(leaf, np.ndarray):
                raise TypeError(f"{wanted}, got a {type(leaf).__name__} at {place}")
            if not validate.is_numeric(leaf):
                name = validate.dtype_name(leaf.dtype)
                raise TypeError(f"{wanted}, got dtype {name} at {place}")
            if (
                leaf.shape[:1] != named[0][1].shape[:1]
                or not leaf.ndim
                or not len(leaf)
            ):
                raise ValueError(f"{wanted}, got shape {leaf.shape} at {place}")
        self._arrays, self._leaves = arrays, [leaf for _, leaf in named]
        files = [_file(leaf) for leaf in self._leaves]
        self._files = stamps(file for file in files if file is not None)
        _check_maps(self._leaves)
        self._read = [_reader(self, leaf) for leaf in self._leaves]

    def __len__(self) -> int:
        return len(self._leaves[0])

    def rows(self, indices: np.ndarray) -> Any:
        found = [read(indices) for read in self._read]
        return jax.tree.structure(self._arrays).unflatten(found)

    def digest(self) -> bytes:
        state = hashlib.sha256()
        named = jax.tree_util.tree_leaves_with_path(self._arrays)
        for (path, leaf), read in zip(named, self._read, strict=True):
            state.update(head(path, leaf).encode())
            step = max(1, _AT_ONCE * len(leaf) // max(1, leaf.nbytes))
            for first in range(0, len(leaf), step):
                here = np.arange(first, min(first + step, len(leaf)))
                state.update(octets(read(here)))
        return state.digest()

    def check(self) -> None:
        check_files(self._files)


def _root(leaf: np.ndarray) -> Any:
    """Returns the array whose memory another one shows."""
    root: Any = leaf
    while isinstance(root.base, np.ndarray):
        root = root.base
    return root


def _file(leaf: np.ndarray) -> Any:
    """Returns the path of the file that an array is a map of, or a view of one."""
    root = _root(leaf)
    return root.filename if isinstance(root, np.memmap) else None


def _check_maps(leaves: Iterable[np.ndarray]) -> None:
    """Requires maps of the files that are there now: another has other records in a row."""
    for leaf in leaves:
        path, root = _file(leaf), _root(leaf)
        if path is None or not root.nbytes:
            continue
        now = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0)
        if _mapped(now) != _mapped(root):
            raise ValueError(
                "data must be maps of files as they are now, got one of a file that was "
                f"exchanged since, at {path!r}"
            )


def _mapped(array: np.ndarray) -> str:
    """Returns device and inode of the file in an array's memory; empty if nobody says."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            for line in lines:
                places, _, _, device, inode, *_ = line.split(maxsplit=5)
                begin, end = (int(place, 16) for place in places.split("-"))
                if begin <= array.ctypes.data < end:
                    return f"{device} {inode}"
    except OSError:
        pass  # Not Linux.
    return ""


def _reader(owner: Any, leaf: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what reads rows of an array, from its file if it can; ``owner`` keeps it."""
    root, path = _root(leaf), _file(leaf)
    # What a map of mode "c" was changed to is in no file.
    path = None if getattr(root, "mode", "") == "c" else path
    mapped = leaf.flags.c_contiguous and isinstance(root.base, mmap.mmap)
    # Where nobody says which file is mapped, the one of that name may be another.
    known = mapped and hasattr(os, "preadv") and _mapped(root)
    if leaf.nbytes <= _SMALL or path is None or not known:
        return lambda indices: np.asarray(leaf)[indices]
    offset = root.offset + leaf.ctypes.data - root.ctypes.data
    file = os.open(path, os.O_RDONLY)
    weakref.finalize(owner, os.close, file)
    return functools.partial(_read, file, offset, leaf.dtype, leaf.shape)


def _read(
    file: int, offset: int, dtype: np.dtype, shape: tuple[int, ...], indices: np.ndarray
) -> np.ndarray:
    """Reads rows from a file, those that follow each other by one call."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < shape[0]:
        raise IndexError(f"indices must be from 0 to {shape[0] - 1}, got {indices}")
    out = np.empty((len(indices), *shape[1:]), dtype)
    size = math.prod(shape[1:]) * dtype.itemsize
    target = memoryview(octets(out))
    first = np.flatnonzero(np.diff(indices, prepend=-2) != 1)
    begins = [*(first * size).tolist(), len(target)]
    places = (offset + indices[first].astype(np.int64) * size).tolist()
    for (begin, end), at in zip(itertools.pairwise(begins), places, strict=True):
        part = target[begin:end]
        while count := os.preadv(file, (part,), at):
            if count == len(part):
                break
            part, at = part[count:], at + count
        else:
            raise ValueError(
                f"data must not change under a run, but a file ends at byte {at}"
            )
    return out


def stamps(files: Iterable[str | os.PathLike[str]]) -> dict[str, Stamp]:
    """Returns where each file lies, and its size and time; ValueError if one is missing."""
    paths = sorted({os.path.abspath(file) for file in files})
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"data must be files that are there, got {path!r}")
    return {path: _stamp(path) for path in paths}


def _stamp(path: str) -> Stamp:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def check_files(known: dict[str, Stamp]) -> None:
    """Requires files of which nothing has changed that :func:`stamps` returned."""
    for path, stamp in known.items():
        try:
            same = _stamp(path) == stamp
        except OSError:
            raise ValueError(
                f"data must not change under a run, but {path!r} is gone"
            ) from None
        if not same:
            raise ValueError(
                f"data must not change under a run, but {path!r} is another file now, or "
                "of another size or time"
            )


def head(path: Any, leaf: np.ndarray) -> str:
    """Returns path, dtype and shape of a leaf, which its digest begins with."""
    return f"{jax.tree_util.keystr(path)}:{leaf.dtype}:{leaf.shape};"


def octets(array: np.ndarray) -> Any:
    """Returns the bytes of an array, in the order of its rows."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
