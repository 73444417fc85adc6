"""Checkpoint folders for the command line: initial models and tuned ones."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.cli import options, record
from jaxdp.cli.parsing import UsageError, flag, usage
from jaxdp.kernels.sphere import path_str
from jaxdp.models.language import LanguageModel, LoRA, Prefix, adapter_only, checkpoint
from jaxdp.training import parallel, replaying

#: In a run's folder: the tuned model; and in that, its privacy card.
MODEL, CARD = "model", "README.md"

#: What a tokenizer is kept in, as far as there is each.
_TOKENIZER = (
    *("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("chat_template.jinja", "generation_config.json"),
)
_CHECKPOINT = (
    *("config.json", "adapters.safetensors"),
    *("adapter_config.json", "adapter_model.safetensors"),
)
_ADAPTERS = {"lora": LoRA, "prefix": Prefix}


def require() -> None:
    """Refuses to go on without the packages that read checkpoints and texts."""
    try:
        import safetensors  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"language models need the package {error.name}: "
            "pip install 'jaxdp-optim[lm]'"
        ) from error


def model_of(
    command: options.Finetune, folder: str, option: str = "--model"
) -> LanguageModel:
    """Returns the model that a command tunes, from its folder's config; reads no weights.

    ``option`` is what gives the folder, here and below.
    """
    with usage(command, option):
        config, there = checkpoint.read_config(folder), checkpoint.read_adapter(folder)
        apart = checkpoint.base_of(folder) is not None
    if command.quantised and there is not None and not apart:
        raise UsageError(
            f"{option} must have no adapter beside its weights with --quantised, whose "
            f"result is an adapter for them; got {there}"
        )
    adapter = there
    if command.trainable in _ADAPTERS:
        kind = _ADAPTERS[command.trainable]
        if there is not None and not isinstance(there, kind):
            raise UsageError(
                f"--trainable must be all or that of the adapter in {option}, {there}; "
                f"got {command.trainable}"
            )
        given = {
            field.name: getattr(command, f"{command.trainable}_{field.name}")
            for field in dataclasses.fields(kind)
        }
        changes = {name: value for name, value in given.items() if value is not None}
        adapter = dataclasses.replace(there or kind(), **changes)
        if there not in (None, adapter):
            name, value = next(iter(changes.items()))
            raise UsageError(
                f"{flag(f'{command.trainable}_{name}')} must be left out or be as in the "
                f"adapter of {option}, {there}; got {value}"
            )
    num_labels = len(command.labels) if command.task == "head" else None
    with usage(command):
        return LanguageModel(
            config=config,
            compute_dtype=command.compute_dtype,  # pyright: ignore
            adapter=adapter,
            num_labels=num_labels,
        )


def initial(
    command: options.Finetune,
    model: LanguageModel,
    folder: str,
    key: jax.Array,
    option: str = "--model",
    placing: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the initial parameters: the folder's, and new ones that it lacks.

    New adapters and heads are drawn from ``key``, which is public. All are on the host, or
    on the devices that ``placing`` says, without ever being on the host together.
    """
    new = None if model.num_labels is None else key
    with usage(command, option):
        _, params = checkpoint.load(
            folder,
            num_labels=model.num_labels,
            new_heads=new,
            dtype=command.dtype,
            quantised=command.quantised,
            sharding=placing,
        )
    params = model.with_new_parts(params, key)
    if placing is None:
        return jax.device_get(params)
    return parallel.moved(params, placing(params))


def recorded(
    params: Any, home: pathlib.Path, header: dict[str, Any], option: str = "--model"
) -> Any:
    """Returns initial parameters with a run's recorded draws in place of new ones.

    ``params`` are as :func:`initial` made them, ``home`` is the run's folder, with what
    :func:`drawn` found, and ``header`` of its ledger.
    """
    shapes = replaying.describe_leaves(params)
    if shapes != header["leaves"]:
        paths = shapes.keys() | header["leaves"].keys()
        wrong = [n for n in sorted(paths) if shapes.get(n) != header["leaves"].get(n)]
        raise UsageError(
            f"{option} must be the folder of the run's model, got one of other parameters: "
            f"{', '.join(wrong[:3])}{' and others' if wrong[3:] else ''}"
        )
    small = _small(params)
    if not small:
        return params
    try:
        kept = record.load_params(home / record.INITIAL, small)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{home / record.INITIAL} must be what the run drew where its model had "
            f"nothing: {error}"
        ) from error
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _like(leaf, kept.get(path_str(path), leaf)), params
    )


def _like(leaf: Any, value: Any) -> Any:
    """Returns a value where the leaf is: on the host, or on its devices."""
    if isinstance(leaf, jax.Array):
        return parallel.moved(value, leaf.sharding)
    return np.asarray(value)


def drawn(params: Any) -> dict[str, np.ndarray]:
    """Returns adapters and classification head, which a run may have drawn; on the host.

    All processes call this where parameters are split between them.
    """
    return {path: parallel.on_host(leaf) for path, leaf in _small(params).items()}


def _small(params: Any) -> dict[str, Any]:
    return {path: leaf for path, leaf in flat(params).items() if adapter_only(path)}


def flat(params: Any) -> dict[str, Any]:
    """Returns a dictionary path -> leaf."""
    return {path_str(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}


def save(folder: pathlib.Path, source: str, model: LanguageModel, params: Any) -> None:
    """Writes a checkpoint that can be loaded, with the tokenizer of the one before it.

    Of a base of integers, the adapter alone, with the folder of the base. All processes
    call this where parameters are split between them.
    """
    leaves, base = jax.tree.leaves(params), None
    if any(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves):
        base = checkpoint.base_of(source) or source
    checkpoint.save(folder, model.config, params, adapter=model.adapter, base=base)
    if not folder.is_dir():  # Another process wrote it.
        return
    for name in _TOKENIZER:
        if (pathlib.Path(source) / name).is_file():
            shutil.copyfile(pathlib.Path(source) / name, folder / name)


def load(folder: pathlib.Path, model: LanguageModel, command: options.Finetune) -> Any:
    """Loads the parameters that :func:`save` wrote, in the dtypes of a command.

    Raises:
      ValueError, OSError: they are not there, or are another model's.
    """
    dtypes: Any = {"dtype": command.dtype, "quantised": command.quantised}
    return checkpoint.load(folder, num_labels=model.num_labels, **dtypes)[1]


def discard(folder: pathlib.Path) -> None:
    """Removes a tuned model: what :func:`save` wrote, and the card; other files stay."""
    if not folder.is_dir():
        return
    for path in [*folder.glob("model*.safetensors*")]:
        path.unlink()
    for name in (*_CHECKPOINT, *_TOKENIZER, CARD):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
