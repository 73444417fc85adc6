"""LoRA as the library peft writes it: ``adapter_config.json`` and a safetensors file.

There ``A`` is (rank, in) and ``B`` (out, rank), one of each for each layer and module. A
kernel of queries, keys and values in one has one pair, which is ours of queries and of
values side by side: twice the rank, and zeros where neither acts.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.language import _files
from jaxdp.models.language._files import PEFT_CONFIG, PEFT_WEIGHTS
from jaxdp.models.language._names import FAMILIES
from jaxdp.models.language.config import Config
from jaxdp.models.language.modules import LoRA, head_widths

_PARTS = ("query", "value")
#: Where peft has the model that it adapts.
_MODEL = "base_model.model."
#: Fields of the configuration that change nothing of what an adapter computes, or whose
#: effect its tensors show. Others must be empty.
_KNOWN = (
    *("peft_type", "r", "lora_alpha", "bias", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode"),
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping"),
    *("peft_version", "megatron_core", "qalora_group_size", "init_lora_weights"),
    "modules_to_save",
)
#: Classification heads, which alone may be saved beside an adapter's matrices.
_HEADS = ("classifier", "score")
#: Of these, what must be one of few; other ways to draw an adapter change its model.
_MUST: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


def read_config(folder: pathlib.Path, *, fused: bool) -> LoRA:
    """Reads which adapter a folder has."""
    path = folder / PEFT_CONFIG
    fields = _files.read_json(path)
    fields = {"bias": "none", "init_lora_weights": True, **fields}
    for name, values in _MUST.items():
        if (got := fields.get(name)) not in values:
            want = " or ".join(map(repr, values))
            raise ValueError(f"{path}: {name} must be {want}, got {got!r}")
    for name, got in fields.items():
        if got and name not in _KNOWN:
            raise ValueError(
                f"{path}: {name} must be left out or empty, for it is not supported; got "
                f"{got!r}"
            )
    if (saved := fields.get("modules_to_save")) and not set(saved) <= {*_HEADS}:
        raise ValueError(
            f"{path}: modules_to_save must be of {', '.join(_HEADS)}, got {saved!r}"
        )
    parts = len(_PARTS) if fused else 1
    rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
    if fused and (not isinstance(rank, int) or rank % parts):
        raise ValueError(
            f"{path}: r must be even, half of it of queries and half of values, which "
            f"share a kernel in this family; got {rank!r}"
        )
    try:
        return LoRA(rank=rank // parts if fused else rank, alpha=float(alpha) / parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _names(config: Config) -> dict[str, str]:
    """Returns peft's name of each of our pairs, with ``{}`` for the layer's number."""
    modules = FAMILIES[config.model_type].modules
    parts = ("qkv",) if config.fused else _PARTS
    return {x: f"{_MODEL}{modules[f'layers/attention/{x}']}" for x in parts}


def write(
    path_of: Callable[[str], pathlib.Path],
    config: Config,
    adapter: LoRA,
    flat: Mapping[str, Any],
    causal: bool,
    base: str | None,
    heads: Mapping[str, np.ndarray],
) -> None:
    """Writes both files; ``flat`` has the adapter's leaves by path.

    ``heads`` are tensors of a classification head that are not in the weights, by name.
    """
    parts, pairs = 1, {}
    for part in _PARTS:
        pairs[part] = [np.asarray(flat[f"layers/lora/{part}/{x}"]) for x in "ab"]
    if config.fused:
        (qa, qb), (va, vb) = pairs.values()
        pairs, parts = {"qkv": [np.concatenate([qa, va], axis=2), qb]}, len(_PARTS)
        b = np.zeros((len(qb), 2 * adapter.rank, sum(head_widths(config).values())))
        b[:, : adapter.rank, : qb.shape[2]] = qb
        b[:, adapter.rank :, -vb.shape[2] :] = vb
        pairs["qkv"][1] = b.astype(qb.dtype)
    names = _names(config)
    tensors = {
        f"{names[part].format(layer)}.lora_{x}.weight": np.ascontiguousarray(array.T)
        for part, pair in pairs.items()
        for x, leaf in zip("AB", pair, strict=True)
        for layer, array in enumerate(leaf)
    }
    tensors |= {f"{_MODEL}{name}": array for name, array in heads.items()}
    _files.safetensors().numpy.save_file(
        tensors, path_of(PEFT_WEIGHTS), metadata={"format": "pt"}
    )
    alpha = parts * adapter.alpha
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else "SEQ_CLS" if heads else None,
        # None where the weights lie beside the adapter.
        "base_model_name_or_path": base,
        "modules_to_save": sorted({name.split(".")[0] for name in heads}) or None,
        "r": parts * adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(name.rpartition(".")[2] for name in names.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    _files.write_json(path_of(PEFT_CONFIG), fields)


def read(
    folder: pathlib.Path, config: Config, adapter: LoRA, heads: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Reads the leaves, float32, by path; those of a classification head if it is there.

    ``heads`` are its leaves by the names of their tensors.

    Raises:
      ValueError: tensors that are not those of the configuration, by name.
    """
    parts = len(_PARTS) if config.fused else 1
    widths, rank, names = head_widths(config), adapter.rank * parts, _names(config)
    outputs = {"qkv": sum(widths.values()), **widths}
    layers = range(config.num_hidden_layers)
    wanted = {
        f"{name.format(layer)}.lora_{x}.weight": shape
        for part, name in names.items()
        for layer in layers
        for x, shape in (
            ("A", (rank, config.hidden_size)),
            ("B", (outputs[part], rank)),
        )
    }
    path = folder / PEFT_WEIGHTS
    stored = _files.arrays(path)
    of_head = tuple(f"{_MODEL}{name}." for name in _HEADS)
    saved = {n: stored.pop(n) for n in [*stored] if n.startswith(of_head)}
    if saved and heads:  # Without heads a language model is read.
        wanted |= {f"{_MODEL}{n}": leaf.tensor_shape for n, leaf in heads.items()}
        stored |= saved
    problems = _files.misfits(wanted, {n: x.shape for n, x in stored.items()})
    if problems:
        raise ValueError(f"{path} does not fit the model: {_files.listed(problems)}")

    def stacked(part: str, x: str) -> np.ndarray:
        of = [
            stored[f"{names[part].format(i)}.lora_{x}.weight"].T.astype(np.float32)
            for i in layers
        ]
        return np.stack(of)

    pairs = {part: [stacked(part, x) for x in "AB"] for part in names}
    if config.fused:
        pairs = _split(path, pairs["qkv"], adapter.rank, widths)
    found = {
        leaf.path: leaf.transpose(saved[f"{_MODEL}{name}"])
        for name, leaf in (heads if saved else {}).items()
    }
    found |= {
        f"layers/lora/{part}/{x}": leaf
        for part, pair in pairs.items()
        for x, leaf in zip("ab", pair, strict=True)
    }
    return {path: jnp.asarray(leaf, jnp.float32) for path, leaf in found.items()}


def _split(
    path: pathlib.Path, pair: list[np.ndarray], rank: int, widths: Mapping[str, int]
) -> dict[str, list[np.ndarray]]:
    """Splits the pair of a kernel of queries, keys and values in one."""
    a, b = pair
    ends = widths["query"], -widths["value"]
    query, value = b[:, :rank, : ends[0]], b[:, rank:, ends[1] :]
    if np.count_nonzero(b) != np.count_nonzero(query) + np.count_nonzero(value):
        raise ValueError(
            f"{path} must act on queries by the first half of its rank and on values by "
            "the second, and on no keys, where they share a kernel"
        )
    return {"query": [a[:, :, :rank], query], "value": [a[:, :, rank:], value]}
