"""Files of a checkpoint folder: tensors read on demand, and writing."""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp.models.language._names import Family

Path = str | os.PathLike[str]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = "adapters.safetensors"
#: As the library peft names them.
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_REPLACED = (CONFIG, WEIGHTS, INDEX, ADAPTERS, PEFT_CONFIG, PEFT_WEIGHTS)
_SHOWN = 6  # items that an error lists
#: Dtypes of tensors that are read, as NumPy has them.
FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}


def safetensors() -> Any:
    """Imports the package safetensors, an optional dependency."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "checkpoints need the package safetensors: pip install 'jaxdp-optim[lm]'"
        ) from error
    return safetensors


def open_file(path: pathlib.Path) -> Any:
    """Opens a safetensors file, to be used in ``with``; nothing is read yet."""
    library = safetensors()
    try:
        return library.safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except library.SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None


class Stored:
    """Tensors of a checkpoint under their full names, read on demand."""

    def __init__(
        self, folder: pathlib.Path, family: Family, stack: contextlib.ExitStack
    ):
        """Opens the files of ``folder``; ``stack`` closes them."""
        self._tensors: dict[str, tuple[Any, str]] = {}  # name -> file, name in the file
        self._places: dict[
            str, tuple[pathlib.Path, int]
        ] = {}  # name -> file, first byte
        for path, names in _files(folder).items():
            file = stack.enter_context(open_file(path))
            there = set(file.keys())
            if names is not None and not there >= names:
                raise ValueError(
                    f"{path} lacks tensors that {INDEX} names: {listed(names - there)}"
                )
            places = _places(path)
            for name in there if names is None else names:
                full = family.full_name(name)
                self._tensors[full] = file, name
                self._places[full] = path, places[name]

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        file, there = self._tensors[name]
        return tuple(file.get_slice(there).get_shape())

    def dtype(self, name: str) -> str:
        file, there = self._tensors[name]
        return file.get_slice(there).get_dtype()

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor of floats; its file is mapped for so long alone."""
        path, offset = self._places[name]
        dtype, shape = FLOATS[self.dtype(name)], self.shape(name)
        if 0 in shape:  # Nothing can be mapped.
            return np.zeros(shape, dtype)[index]
        mapped = np.memmap(path, dtype, mode="r", offset=offset, shape=shape)
        return np.array(mapped[index])  # A copy, without which the map would stay.

    def array(self, name: str) -> np.ndarray:
        """Reads a tensor of floats; its file is not mapped, for pages would stay."""
        (path, offset), shape = self._places[name], self.shape(name)
        dtype, count = FLOATS[self.dtype(name)], math.prod(shape)
        array = np.fromfile(path, dtype, count=count, offset=offset)
        return array.reshape(shape)


def tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a small file, which must be of floats."""
    with open_file(path) as file:
        slices = {name: file.get_slice(name) for name in [*file.keys()]}
        dtypes = {name: x.get_dtype() for name, x in slices.items()}
        shapes = {name: tuple(x.get_shape()) for name, x in slices.items()}
    if strange := [f"{n} is {x}" for n, x in dtypes.items() if x not in FLOATS]:
        names = " or ".join(FLOATS)
        raise ValueError(f"{path} must have tensors of {names}: {listed(strange)}")
    arrays = {}
    for name, offset in _places(path).items():
        dtype, count = FLOATS[dtypes[name]], math.prod(shapes[name])
        array = np.fromfile(path, dtype, count=count, offset=offset)
        arrays[name] = array.reshape(shapes[name])
    return arrays


def _places(path: pathlib.Path) -> dict[str, int]:
    """Returns where the tensors of a safetensors file begin, which was opened before."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + about["data_offsets"][0] for name, about in header.items()}


def _files(folder: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """Returns a checkpoint's files, each with its names in the index, if there is one."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX} must have a weight_map")
        files: dict[pathlib.Path, set[str] | None] = {}
        for name, file in weight_map.items():
            # The last part alone: an index names no files outside its folder.
            names = files.setdefault(folder / pathlib.Path(str(file)).name, set())
            assert names is not None
            names.add(name)
        return files
    message = f"folder {str(folder)!r} has neither {WEIGHTS} nor {INDEX}"
    if any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.bin.index.*")):
        message += (
            "; it has pickled weights, which are never read, for unpickling runs what "
            "the file says: convert them to safetensors (save_pretrained of transformers)"
        )
    raise ValueError(message)


def folder_of(folder: Path) -> pathlib.Path:
    """Returns the path of a folder; raises if it does not exist."""
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(f"folder {str(folder)!r} does not exist, or is a file")
    return path


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads the object in a JSON file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold an object, got {type(fields).__name__}")
    return fields


def write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes an object for :func:`read_json`."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def listed(items: Iterable[str]) -> str:
    """Returns the first few of some items as text, and how many more there are."""
    items = sorted(items)
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[Callable[[str], pathlib.Path]]:
    """Yields a function from names to paths to write to; files get their names at the end.

    The weights of an earlier checkpoint are removed then, for loading would take them for
    part of this one. If the body raises, the folder is as it was.
    """
    new: dict[str, pathlib.Path] = {}

    def path_of(name: str) -> pathlib.Path:
        new[name] = folder / f".{name}.{os.getpid()}.tmp"
        return new[name]

    try:
        yield path_of
        for path in new.values():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shards = folder.glob("model-?????-of-?????.safetensors")
        for old in [*(folder / name for name in _REPLACED), *shards]:
            if old.name not in new:
                old.unlink(missing_ok=True)
        for name, path in new.items():
            path.replace(folder / name)
    finally:
        for path in new.values():
            path.unlink(missing_ok=True)
