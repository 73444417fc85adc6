"""Checkpoint folders in Hugging Face's layout: ``config.json`` and safetensors.

A folder holds ``model.safetensors``, or shards and ``model.safetensors.index.json``. One
stacked leaf of ours is one tensor a layer there, and kernels are (out, in). LoRA is beside
them in the format of peft. A prefix, for which that layout has no names, is in
``adapters.safetensors`` under ours. Pickled weights are never read: unpickling runs what
the file says.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import keys, validate
from jaxdp.kernels.sphere import path_str
from jaxdp.models.language import _files, _peft, _placing
from jaxdp.models.language import config as configs
from jaxdp.models.language._files import ADAPTERS, CONFIG, INDEX, WEIGHTS, Path, Tensor
from jaxdp.models.language._names import FAMILIES, Family, is_language_head
from jaxdp.models.language.config import Config, RobertaConfig
from jaxdp.models.language.modules import INTEGERS, integers
from jaxdp.models.language.modules import quantised as quantised_tree
from jaxdp.models.language.network import (
    Adapter,
    LanguageModel,
    LoRA,
    Prefix,
    adapter_only,
)
from jaxdp.training import digests, parallel

Params = dict[str, Any]

#: Dtypes of parameters, and of what is written.
DTYPES = ("float32", "bfloat16", "float16")


# --- leaves and tensors ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Leaf of the parameters, and its tensors in a checkpoint.

    Attributes:
      path: ours.
      shape: ours, with the layers in front where the leaf is stacked.
      names: of the tensors, one or one for each layer; none for an adapter's leaf.
      dtype: of what is written.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    dtype: Any = jnp.float32

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        shape = self.shape[1:] if LanguageModel.is_stacked(self.path) else self.shape
        return shape[::-1] if self._transposed else shape

    @property
    def tensor_bytes(self) -> int:
        return jnp.dtype(self.dtype).itemsize * int(np.prod(self.tensor_shape))

    @property
    def _transposed(self) -> bool:
        return self.path.endswith("/kernel")

    def transpose(self, array: np.ndarray) -> np.ndarray:
        """Converts a tensor to our layer of the leaf, or the other way round."""
        return array.T if self._transposed else array

    def reverse(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Converts a part of our layer of the leaf to that of a tensor."""
        return index[::-1] if self._transposed else index


def _leaves(
    config: Config, adapter: Adapter | None, num_labels: int | None
) -> dict[str, _Leaf]:
    """Returns all of a model's leaves by path, with shapes from the model itself."""
    family = FAMILIES[config.model_type]
    model = LanguageModel(config=config, adapter=adapter, num_labels=num_labels)
    any_key = keys.from_words(np.zeros(2, np.uint32))  # only shapes are asked for
    leaves = {}
    for path, leaf in _flat(jax.eval_shape(model.init, any_key)).items():
        name = "" if _is_adapter(path) else family.name(path)
        count = leaf.shape[0] if LanguageModel.is_stacked(path) else 1
        first = config.num_hidden_layers - count  # The first layer may lack a leaf.
        layers = range(first, first + count)
        names = tuple(name.format(layer) for layer in layers) if name else ()
        leaves[path] = _Leaf(path, leaf.shape, names)
    return leaves


def _language_head(leaves: Mapping[str, _Leaf]) -> set[str]:
    """Returns the paths of the leaves that only a language model reads."""
    return {p for p, x in leaves.items() if any(map(is_language_head, x.names))}


def _is_adapter(path: str) -> bool:
    return adapter_only(path) and not _is_head(path)


def _is_head(path: str) -> bool:
    return path.startswith("classifier/")


def _head_tensors(leaves: Mapping[str, _Leaf]) -> dict[str, _Leaf]:
    """Returns the leaves of a classification head by the names of their tensors."""
    return {leaf.names[0]: leaf for path, leaf in leaves.items() if _is_head(path)}


def _flat(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path."""
    return {path_str(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _nested(flat: Mapping[str, Any]) -> Params:
    """Returns the tree of leaves that are given by path."""
    tree: Params = {}
    for path, leaf in flat.items():
        *modules, name = path.split("/")
        below = tree
        for module in modules:
            below = below.setdefault(module, {})
        below[name] = leaf
    return tree


# --- loading -----------------------------------------------------------------------


def read_config(folder: Path) -> Config:
    """Reads the configuration in a checkpoint folder, or of the base that it names.

    Raises:
      ValueError: no ``config.json``, an unknown family, or an option
        that is not supported, by name.

    Example:
      >>> import json, pathlib, tempfile
      >>> from jaxdp.models.language import checkpoint, tiny_config
      >>> folder, fields = pathlib.Path(tempfile.mkdtemp()), tiny_config("opt").to_json()
      >>> _ = (folder / "config.json").write_text(json.dumps(fields))
      >>> checkpoint.read_config(folder).num_hidden_layers
      2
    """
    path = pathlib.Path(base_of(folder) or folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"folder {str(folder)!r} has no {CONFIG}")
    fields = _files.read_json(path)
    try:
        return configs.from_json(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def base_of(folder: Path) -> str | None:
    """Reads which folder an adapter's weights are in; None if they lie beside it.

    :func:`save` with ``base=`` and peft write such folders, without a ``config.json``.

    Raises:
      ValueError: no such folder, or a base folder without ``config.json``.

    Example:
      >>> import tempfile
      >>> from jaxdp.models.language import checkpoint
      >>> print(checkpoint.base_of(tempfile.mkdtemp()))
      None
    """
    root, found = _files.folder_of(folder), None
    if (root / CONFIG).is_file():
        return None
    if (path := root / _files.PEFT_CONFIG).is_file():
        found = _files.read_json(path).get("base_model_name_or_path")
    elif (path := root / ADAPTERS).is_file():
        found = _about(path).get("base")
    if found is not None and not (pathlib.Path(str(found)) / CONFIG).is_file():
        raise ValueError(
            f"{path} must name the folder of its base model, with {CONFIG}, got {found!r}"
        )
    return found


def read_adapter(folder: Path) -> Adapter | None:
    """Reads which adapter a folder holds; None without one.

    LoRA is in ``adapter_config.json`` and ``adapter_model.safetensors``, as peft writes it,
    a prefix in ``adapters.safetensors``.

    Raises:
      ValueError: an ``adapter_config.json`` of another method than LoRA of queries and
        values, by the option, or a file that :func:`save` did not write.

    Example:
      >>> import tempfile
      >>> from jaxdp.models.language import checkpoint
      >>> print(checkpoint.read_adapter(tempfile.mkdtemp()))
      None
    """
    root = _files.folder_of(folder)
    if (root / _files.PEFT_CONFIG).is_file():
        return _peft.read_config(root, fused=read_config(root).fused)
    path = root / ADAPTERS
    if not path.is_file():
        return None
    fields = _about(path)
    fields.pop("base", None)
    kind = fields.pop("kind", None)
    if kind not in ("prefix", "head"):
        raise ValueError(f"{path} must hold a prefix or a head, as save() writes it")
    return Prefix(**fields) if kind == "prefix" else None


def _about(path: pathlib.Path) -> dict[str, Any]:
    """Reads what :func:`save` says of an adapter in its file."""
    return json.loads(_files.header(path)[1].get("adapter", "{}"))


def load(
    folder: Path,
    *,
    num_labels: int | None = None,
    new_heads: jax.Array | None = None,
    dtype: Any = "float32",
    quantised: str | None = None,
    sharding: _placing.Placing | None = None,
) -> tuple[Config, Params]:
    """Reads a checkpoint, one leaf at a time.

    Weights of other widths are rounded to ``dtype``, or widened. What the task does not
    read is dropped where it is known: poolers, tables of position numbers, further copies
    of tied weights, and for classification the head of the language model. Anything else
    that does not fit is an error. Adapters come with it where the folder has them
    (:func:`read_adapter` says which). What is held at any time is what was loaded so far
    and one leaf.

    Args:
      folder: with ``config.json`` and safetensors, sharded or not; or with an adapter
        alone, whose weights are in :func:`base_of`.
      num_labels: of a classification head; None loads a language model.
      new_heads: a typed JAX key, from which the classification head is drawn if the
        checkpoint has none.
      dtype: of the parameters: ``"float32"``, ``"bfloat16"`` or ``"float16"``, which take
        half the memory, and which :func:`jaxdp.fit` trains too. Adapters and the
        classification head are float32 in any case.
      quantised: ``"int8"`` or ``"int4"``, to round the layers' kernels leaf by leaf as
        :func:`~jaxdp.models.language.quantised` does.
      sharding: a mesh, on whose axis ``"model"`` :func:`~jaxdp.models.language.shardings`
        splits the parameters, or a function from the tree of their shapes
        (``jax.ShapeDtypeStruct``) to one of ``NamedSharding``. Each device then gets its
        part of each tensor, and the host holds no more than one tensor's at any time.

    Returns:
      The configuration and the parameters as
      :class:`~jaxdp.models.language.network.LanguageModel` lays them out.

    Raises:
      ValueError: no such folder, files that cannot be read, a configuration that is not
        supported; tensors that are missing, unexpected or of a wrong shape or type, all
        in one message.
      TypeError: ``sharding`` is, or returns, something else.
      ImportError: without the extra ``[lm]``.

    Example:
      >>> import tempfile
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, checkpoint, tiny_config
      >>> config = tiny_config("opt")
      >>> shapes = jax.eval_shape(LanguageModel(config=config).init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, config, params)
      >>> again, loaded = checkpoint.load(folder)
      >>> again == config, loaded["embedding"]["tokens"].shape
      (True, (50, 16))
    """
    if num_labels is not None:
        validate.integer(at_least=2, num_labels=num_labels)
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    validate.one_of(DTYPES, dtype=name)
    if quantised is not None:
        validate.one_of(INTEGERS, quantised=quantised)
    root = _files.folder_of(folder)
    home = pathlib.Path(base_of(root) or root)
    config, adapter = read_config(root), read_adapter(root)
    family = FAMILIES[config.model_type]
    wanted = _leaves(config, adapter, num_labels)
    if num_labels is not None:
        for path in _language_head(wanted):
            del wanted[path]
    small: dict[str, jax.Array] = {}
    if isinstance(adapter, LoRA):
        small = _peft.read(root, config, adapter, _head_tensors(wanted))
    elif adapter is not None or home != root:
        small = _read_adapters(root / ADAPTERS, wanted)
    stored = _files.tensors(home, family)
    if new_heads is not None and not any(map(_is_head, small)):
        _drop_absent_classifier(wanted, stored)
    _name_output_bias(wanted, stored, config)
    problems = _problems(wanted, stored, family, config, num_labels, small)
    if problems:
        raise ValueError(
            f"the tensors in {str(home)!r} are not those of its {CONFIG}; "
            + "; ".join(problems)
        )
    wanted = {
        path: dataclasses.replace(
            leaf, dtype=jnp.dtype("float32" if adapter_only(path) else name)
        )
        for path, leaf in wanted.items()
    }
    places = _places(sharding, wanted, config, num_labels, quantised)
    of_leaf = {} if places is None else _flat(places)
    flat = dict(small)
    for path, leaf in wanted.items():
        if not leaf.names or path in small:
            continue
        flat[path] = _read(leaf, stored, of_leaf.get(path))
        if quantised and path.startswith("layers/") and path.endswith("/kernel"):
            flat[path], flat[f"{path}_scale"] = integers(flat[path], quantised)
    params = _nested(flat)
    if new_heads is not None:
        model = LanguageModel(config=config, num_labels=num_labels)
        params = model.with_new_parts(params, new_heads)
    if places is not None:  # What is small and not of the files.
        params = parallel.moved(params, places)
    return config, params


def _places(
    sharding: _placing.Placing | None,
    wanted: Mapping[str, _Leaf],
    config: Config,
    num_labels: int | None,
    quantised: str | None,
) -> Any:
    """Returns where the parameters are to be, a tree of shardings; None if nowhere."""
    if sharding is None:
        return None
    leaves = {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in wanted.items()}
    model = LanguageModel(config=config, num_labels=num_labels)
    any_key = keys.from_words(np.zeros(2, np.uint32))  # only shapes are asked for
    shapes = jax.eval_shape(model.with_new_parts, _nested(leaves), any_key)
    if quantised is not None:
        shapes = jax.eval_shape(lambda tree: quantised_tree(tree, quantised), shapes)
    return _placing.places(sharding, shapes)


def _drop_absent_classifier(
    wanted: dict[str, _Leaf], stored: Mapping[str, Tensor]
) -> None:
    """Drops the classification head from ``wanted`` if the checkpoint has none."""
    head = [leaf for path, leaf in wanted.items() if _is_head(path)]
    if not any(name in stored for leaf in head for name in leaf.names):
        for leaf in head:
            del wanted[leaf.path]


def _name_output_bias(
    wanted: dict[str, _Leaf], stored: Mapping[str, Tensor], config: Config
) -> None:
    """Sets the name of RoBERTa's output bias to the one that the checkpoint has.

    It has two names; untied, transformers adds the decoder's.
    """
    names = ["lm_head.bias", "lm_head.decoder.bias"]
    names = names if config.tie_word_embeddings else names[::-1]
    if "head/bias" in wanted and isinstance(config, RobertaConfig):
        name = next((n for n in names if n in stored), names[0])
        wanted["head/bias"] = dataclasses.replace(wanted["head/bias"], names=(name,))


def _problems(
    wanted: Mapping[str, _Leaf],
    stored: Mapping[str, Tensor],
    family: Family,
    config: Config,
    num_labels: int | None,
    known: Mapping[str, Any],
) -> list[str]:
    """Lists the missing, wrong and unexpected tensors of a checkpoint.

    Leaves that are ``known`` may be there too, as of a head beside an adapter's own.
    """
    tensors = {name: x for x in wanted.values() for name in x.names}
    also = {name for path in known for name in wanted[path].names}
    tensors = {name: leaf for name, leaf in tensors.items() if name not in also}
    missing = [name for name in tensors if name not in stored]
    wrong = []
    for name in tensors.keys() - missing:
        shape, dtype = stored[name].shape, stored[name].dtype
        if shape != tensors[name].tensor_shape:
            wrong.append(f"{name} has {shape}, must have {tensors[name].tensor_shape}")
        elif dtype not in _files.FLOATS:
            names = " or ".join(_files.FLOATS)
            wrong.append(f"{name} is {dtype}, must be {names}")
    copies = {}
    if config.tie_word_embeddings and num_labels is None:
        copies = {c: n for c, n in family.tied.items() if c in stored}
    if not (missing or wrong):
        wrong += [
            f"{copy} is not {name}, as tie_word_embeddings in {CONFIG} says (false would "
            "train both)"
            for copy, name in copies.items()
            if not np.array_equal(stored[copy].array(), stored[name].array())
        ]
    unexpected = [
        name
        for name in stored.keys() - tensors.keys() - copies.keys() - also
        if not family.useless.fullmatch(name)
        and not (num_labels is not None and is_language_head(name))
        and not (name == "lm_head.bias" and "lm_head.decoder.bias" in tensors)
    ]
    hint = ""
    if missing and all(_is_head(tensors[n].path) for n in missing):
        hint = " (new_heads= draws a classification head)"
    return [
        f"{kind}: {_files.listed(items)}{more}"
        for kind, items, more in (
            ("missing", missing, hint),
            ("wrong", wrong, ""),
            ("unexpected", unexpected, ""),
        )
        if items
    ]


def _read(leaf: _Leaf, stored: Mapping[str, Tensor], place: Any) -> jax.Array:
    """Reads one leaf, tensor by tensor, into the array that is kept."""
    dtype, is_stacked = leaf.dtype, LanguageModel.is_stacked(leaf.path)
    if place is not None:

        def part(layer: int, index: tuple[slice, ...]) -> np.ndarray:
            read = stored[leaf.names[layer]].part(leaf.reverse(index))
            return np.ascontiguousarray(leaf.transpose(read), dtype)

        if is_stacked:
            return _placing.stacked(leaf.shape, dtype, place, part)
        return _placing.whole(leaf.shape, place, functools.partial(part, 0))

    def read(name: str) -> np.ndarray:
        return np.ascontiguousarray(leaf.transpose(stored[name].array()), dtype)

    if not is_stacked:
        (name,) = leaf.names
        return jax.block_until_ready(jnp.asarray(read(name)))
    zeros, put = _placing.programs(leaf.shape, dtype, None)
    array = zeros()
    for layer, name in zip(range(leaf.shape[0]), leaf.names, strict=True):
        # Waited for, or the tensors of several layers would be held until copied.
        array = jax.block_until_ready(put(array, read(name), layer))
    return array


def _read_adapters(
    path: pathlib.Path, wanted: Mapping[str, _Leaf]
) -> dict[str, jax.Array]:
    """Reads the leaves of an adapter, or of a head, stored as we have them."""
    want = {p: leaf.shape for p, leaf in wanted.items() if adapter_only(p)}
    stored = _files.arrays(path)
    have = {name: x.shape for name, x in stored.items()}
    # A head is in the weights, or here where they are elsewhere; few tasks read it.
    alike = want.keys() & have.keys()
    want, have = (
        {p: x for p, x in of.items() if _is_adapter(p) or p in alike}
        for of in (want, have)
    )
    if problems := _files.misfits(want, have):
        raise ValueError(f"{path} does not fit the model: {_files.listed(problems)}")
    return {name: jnp.asarray(stored[name], jnp.float32) for name in want}


# --- saving ------------------------------------------------------------------------


def save(
    folder: Path,
    config: Config,
    params: Params,
    *,
    adapter: Adapter | None = None,
    base: Path | None = None,
    max_shard_bytes: int = 2 * 10**9,
) -> None:
    """Writes a checkpoint that :func:`load` and transformers read, in the params' dtypes.

    Tied weights are written once. All files are complete before any of them gets its
    name. Those of an earlier checkpoint in the folder are replaced; other files stay.

    Args:
      folder: made if it does not exist.
      config: of the model.
      params: all its parameters, of float32 or 16 bits; where there is a classification
        head, the head of the language model may be missing. If they are split between
        processes, all of these call this, and the first one writes. One tensor is
        whole on every device at a time.
      adapter: whose leaves ``params`` has. ``LoRA`` is written as peft does it: with peft
        installed, transformers loads the tuned model, and the weights alone without. A
        prefix is written to ``adapters.safetensors``, which transformers does not read.
      base: the folder of the weights, if they are not to be written: what
        :func:`~jaxdp.models.language.adapter_only` selects is written alone, as peft does,
        with this folder's absolute path. Other parameters may be quantised.
      max_shard_bytes: of one file, unless one tensor is larger. No more is held in memory
        beside ``params``.

    Raises:
      ValueError: parameters that are not those of ``config`` and ``adapter``, by name.
      ImportError: without the extra ``[lm]``.

    Example:
      >>> import os, tempfile
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, checkpoint, tiny_config
      >>> config = tiny_config("opt")
      >>> shapes = jax.eval_shape(LanguageModel(config=config).init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, config, params)
      >>> sorted(os.listdir(folder))
      ['config.json', 'model.safetensors']
    """
    validate.integer(max_shard_bytes=max_shard_bytes)
    save_file = _files.safetensors().numpy.save_file
    family, flat = FAMILIES[config.model_type], _flat(params)
    output = flat.get("classifier/output/kernel")
    num_labels = None if output is None else int(output.shape[-1])
    leaves = _leaves(config, adapter, num_labels)
    if num_labels is not None and not (head := _language_head(leaves)) & set(flat):
        leaves = {p: leaf for p, leaf in leaves.items() if p not in head}
    if base is not None:
        flat = {p: x for p, x in flat.items() if adapter_only(p)}
        leaves = {p: leaf for p, leaf in leaves.items() if adapter_only(p)}
        if not leaves:
            raise ValueError(
                "params must have an adapter or a classification head with base="
            )
        # Absolute: it is read from any working directory.
        base = str(pathlib.Path(base).resolve())
    _check_params(flat, leaves, adapter)
    leaves = {
        path: dataclasses.replace(leaf, dtype=flat[path].dtype)
        for path, leaf in leaves.items()
    }

    tensors = [
        (name, leaf, layer)
        for leaf in leaves.values()
        for layer, name in enumerate(leaf.names)
    ]
    roberta = isinstance(config, RobertaConfig)
    if roberta and "head/bias" in leaves and not config.tie_word_embeddings:
        tensors.append(("lm_head.decoder.bias", leaves["head/bias"], 0))
    shards = _shards(tensors, max_shard_bytes) if base is None else []
    alone = _is_adapter if base is None else adapter_only
    small = {p: parallel.on_host(x) for p, x in flat.items() if alone(p)}
    arrays_of = (
        {n: _tensor(leaf, flat[leaf.path], i) for n, leaf, i in shard}
        for shard in shards
    )
    root = pathlib.Path(folder)
    try:
        if not _writes(params):
            return
        # By the one that writes: others, which may not see it, would wait for each other.
        if base is not None and not pathlib.Path(base, CONFIG).is_file():
            raise ValueError(f"base must be a folder with {CONFIG}, got {base!r}")
        root.mkdir(parents=True, exist_ok=True)
        with _files.replacing(root) as path_of:
            weight_map = {}
            for number, arrays in enumerate(arrays_of, 1):
                file = f"model-{number:05}-of-{len(shards):05}.safetensors"
                file = WEIGHTS if len(shards) == 1 else file
                save_file(arrays, path_of(file), metadata={"format": "pt"})
                weight_map |= dict.fromkeys(arrays, file)
                del arrays  # Or the next shard would be made beside this one.
            if len(shards) > 1:
                size = sum(leaf.tensor_bytes for _, leaf, _ in tensors)
                index = {"metadata": {"total_size": size}, "weight_map": weight_map}
                _files.write_json(path_of(INDEX), index)
            if isinstance(adapter, LoRA):
                causal = config.is_decoder and num_labels is None
                heads = {
                    name: _tensor(leaf, small[leaf.path], 0)
                    for name, leaf in _head_tensors(leaves).items()
                    if leaf.path in small
                }
                _peft.write(path_of, config, adapter, small, causal, base, heads)
            elif adapter is not None or base is not None:
                about: dict[str, Any] = {"kind": "head"}
                if adapter is not None:
                    about = {"kind": "prefix", **dataclasses.asdict(adapter)}
                # One text: safetensors writes several in any order.
                about |= {} if base is None else {"base": base}
                metadata = {"adapter": json.dumps(about)}
                arrays = {p: np.ascontiguousarray(x) for p, x in small.items()}
                save_file(arrays, path_of(ADAPTERS), metadata=metadata)
            if base is None:
                fields = _config_fields(config, family, num_labels)
                _files.write_json(path_of(CONFIG), fields)
    finally:
        # Every tensor is gathered by all processes, also by one that writes none or fails.
        if digests.scattered(params):
            for _ in arrays_of:
                pass


def _writes(params: Params) -> bool:
    """Returns False where parameters are split between processes, but in the first."""
    for leaf in jax.tree.leaves(params):
        if digests.scattered(leaf):
            processes = {device.process_index for device in leaf.sharding.device_set}
            return jax.process_index() == min(processes)
    return True


def _check_params(
    flat: Mapping[str, Any], leaves: Mapping[str, _Leaf], adapter: Adapter | None
) -> None:
    """Raises unless the parameters are those leaves."""
    problems = [f"{path} is missing" for path in leaves.keys() - flat.keys()]
    problems += [f"{path} is unexpected" for path in flat.keys() - leaves.keys()]
    problems += [
        f"{path} has {tuple(flat[path].shape)} of {flat[path].dtype}, must have "
        f"{leaf.shape} of {' or '.join(DTYPES)}"
        for path, leaf in leaves.items()
        if path in flat
        and (flat[path].shape != leaf.shape or flat[path].dtype.name not in DTYPES)
    ]
    if problems:
        small = any(path.endswith("/kernel_scale") for path in flat)
        hint = "; base= writes an adapter without them" if small else ""
        raise ValueError(
            f"params must be those of config and adapter = {adapter}: "
            f"{_files.listed(problems)}{hint}"
        )


def _tensor(leaf: _Leaf, value: Any, layer: int) -> np.ndarray:
    """Returns one tensor of a leaf, contiguous because safetensors writes raw memory."""
    array = value[layer] if LanguageModel.is_stacked(leaf.path) else value
    return np.ascontiguousarray(leaf.transpose(parallel.on_host(array)))


def _shards(
    tensors: list[tuple[str, _Leaf, int]], max_bytes: int
) -> list[list[tuple[str, _Leaf, int]]]:
    """Groups the tensors in order, each group of at most ``max_bytes`` or of one tensor."""
    shards: list[list[tuple[str, _Leaf, int]]] = [[]]
    room = max_bytes
    for tensor in tensors:
        size = tensor[1].tensor_bytes
        if shards[-1] and size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def _config_fields(
    config: Config, family: Family, num_labels: int | None
) -> dict[str, Any]:
    """Returns ``config.json``, with the fields that tell transformers the model's class."""
    fields = config.to_json()
    fields["architectures"] = [family.architectures[num_labels is not None]]
    if num_labels is not None:
        labels = [f"LABEL_{i}" for i in range(num_labels)]
        fields["id2label"] = {str(i): label for i, label in enumerate(labels)}
        fields["label2id"] = {label: i for i, label in enumerate(labels)}
    return fields
