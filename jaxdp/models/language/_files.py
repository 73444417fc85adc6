"""Files of a checkpoint folder: tensors read on demand, and writing."""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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


class Tensor(NamedTuple):
    """Tensor in a file, of which nothing was read."""

    path: pathlib.Path
    offset: int  # of its first byte
    dtype: str  # of FLOATS if it is one of floats
    shape: tuple[int, ...]

    def part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor of floats; its file is mapped for so long alone."""
        dtype = FLOATS[self.dtype]
        if 0 in self.shape:  # Nothing can be mapped.
            return np.zeros(self.shape, dtype)[index]
        mapped = np.memmap(self.path, dtype, "r", self.offset, self.shape)
        return np.array(mapped[index])  # A copy, without which the map would stay.

    def array(self) -> np.ndarray:
        """Reads a tensor of floats; its file is not mapped, for pages would stay."""
        count = math.prod(self.shape)
        array = np.fromfile(self.path, FLOATS[self.dtype], count, offset=self.offset)
        return array.reshape(self.shape)


def header(path: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads which tensors a safetensors file has, and what it says of itself."""
    library = safetensors()
    try:
        with library.safe_open(path, framework="numpy"):  # which checks the file
            pass
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except library.SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        fields = json.loads(file.read(size))
    said = fields.pop("__metadata__", None) or {}
    return {
        name: Tensor(path, 8 + size + x["data_offsets"][0], x["dtype"], (*x["shape"],))
        for name, x in fields.items()
    }, said


def tensors(folder: pathlib.Path, family: Family) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint under their full names."""
    found = {}
    for path, names in _files(folder).items():
        there, _ = header(path)
        if names is not None and not there.keys() >= names:
            raise ValueError(
                f"{path} lacks tensors that {INDEX} names: {listed(names - there.keys())}"
            )
        wanted = there if names is None else names
        found |= {family.full_name(name): there[name] for name in wanted}
    return found


def arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a small file, which must be of floats."""
    found, _ = header(path)
    if strange := [
        f"{n} is {x.dtype}" for n, x in found.items() if x.dtype not in FLOATS
    ]:
        names = " or ".join(FLOATS)
        raise ValueError(f"{path} must have tensors of {names}: {listed(strange)}")
    return {name: tensor.array() for name, tensor in found.items()}


def misfits(want: Mapping[str, Any], have: Mapping[str, Any]) -> list[str]:
    """Lists names whose shapes differ, or that one of two mappings alone has."""
    return [
        f"{name} has {have.get(name, 'no value')}, must have {want.get(name, 'none')}"
        for name in want.keys() | have.keys()
        if want.get(name) != have.get(name)
    ]


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
