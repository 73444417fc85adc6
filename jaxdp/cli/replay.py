"""``jaxdp replay``: the parameters of a run from its ledger."""

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import training
from jaxdp.cli import language, options, recipes, record
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.cli.prepare import initial_key
from jaxdp.cli.printing import show
from jaxdp.core import keys as keys_lib
from jaxdp.core.averaging import polyak_output
from jaxdp.training import ledger as ledger_lib
from jaxdp.training.ledger import LEDGER

#: Where the parameters go: of ``jaxdp train``, and of ``jaxdp finetune``.
REPLAYED, REPLAYED_MODEL = "replayed.npz", "replayed"


class _Kind(NamedTuple):
    """Initial parameters of a run, and the paths and format of its parameter files."""

    initial: Any
    out: pathlib.Path
    save: Callable[[pathlib.Path, Any], None]
    written: str  # in the run's folder
    load: Callable[[pathlib.Path], Any]


def run(command: options.Replay) -> int:
    """Rebuilds a run's parameters, writes them, and compares them with the run's own.

    Returns 1 where the run's own are there and are others.
    """
    folder = command.folder
    ledger = record.read(folder, "FOLDER")
    recipe = record.recipe_of(ledger)
    home = folder if folder.is_dir() else folder.parent
    tuned = record.said(ledger, options.Finetune)
    if tuned is None:
        kind = _trained(command, home, ledger)
    else:
        model = record.options_of(options.Finetune, tuned)
        kind = _finetuned(command, home, ledger, model)
    optimizer = recipe and recipes.make_optimizer(recipe)
    with usage(command, "FOLDER"):
        replayed = training.replay(ledger, kind.initial, optimizer=optimizer)
    params = replayed.params
    if recipe is not None and recipe.average:
        params = polyak_output(replayed.info.state)
    identical, compared = _compared(kind, home / kind.written, params)
    if identical is False:
        compared += _elsewhere(ledger.header)
    try:
        kind.save(kind.out, params)
    except OSError as error:
        raise UsageError(f"--out must be one that can be written: {error}") from error
    file = folder / LEDGER if folder.is_dir() else folder
    answer = {
        "steps": len(ledger.releases),
        "num_steps": ledger.header["plan"]["num_steps"],
        "private": ledger.header["private"],
        "bytes_of_ledger": file.stat().st_size,
        "bytes_of_parameters": sum(
            np.asarray(x).nbytes for x in jax.tree.leaves(params)
        ),
        "identical": identical,
        "compared": compared,
        "written": str(kind.out),
    }
    if command.json:
        print(json.dumps(answer))
    else:
        del answer["identical"]  # What was compared says it in words.
        show({name.replace("_", " "): value for name, value in answer.items()})
    return 1 if identical is False else 0


def _trained(
    command: options.Replay, home: pathlib.Path, ledger: ledger_lib.Record
) -> _Kind:
    """Returns the kind of a ``jaxdp train`` run, whose parameters are ``.npz`` files."""
    out, leaves = command.out or home / REPLAYED, ledger.header["leaves"]
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"--out must be a file in a folder that exists, got '{out}'")
    _check_new(out, home / REPLAYED, home / record.PARAMS)
    path = command.initial or home / record.INITIAL
    load = lambda path: record.load_params(path, leaves)  # noqa: E731
    try:
        initial = load(path)
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(
            f"--initial must be the initial parameters of the run, got '{path}': {error}"
        ) from error
    return _Kind(initial, out, record.save_params, record.PARAMS, load)


def _finetuned(
    command: options.Replay,
    home: pathlib.Path,
    ledger: ledger_lib.Record,
    tuned: options.Finetune,
) -> _Kind:
    """Returns the kind of a ``jaxdp finetune`` run, whose parameters are checkpoints."""
    language.require()
    out = command.out or home / REPLAYED_MODEL
    if (out.exists() and not out.is_dir()) or not out.parent.is_dir():
        raise UsageError(f"--out must be a folder, in one that exists, got '{out}'")
    source = str(command.initial or tuned.model)
    if out.resolve() == pathlib.Path(source).resolve():
        raise UsageError(f"--out must be another folder than the model's, got '{out}'")
    _check_new(out, home / REPLAYED_MODEL, home / language.MODEL)
    model = language.model_of(tuned, source, "--initial")
    # Drawn where the folder lacks something, and then taken from the record.
    key = initial_key(keys_lib.root_from_hex(ledger.header["direction"]))
    initial = language.initial(tuned, model, source, key, "--initial")
    initial = language.recorded(initial, home, ledger.header, "--initial")
    return _Kind(
        initial,
        out,
        lambda out, params: language.save(out, source, model, params),
        language.MODEL,
        lambda path: language.load(path, model, tuned),
    )


def _check_new(out: pathlib.Path, usual: pathlib.Path, wrote: pathlib.Path) -> None:
    """Refuses to overwrite anything but what an earlier replay wrote as ``usual``."""
    if out.resolve() == wrote.resolve():
        raise UsageError(f"--out must be another than the run's own, got '{out}'")
    full = any(out.iterdir()) if out.is_dir() else out.exists()
    if full and out.resolve() != usual.resolve():
        what = "a new or empty folder" if out.is_dir() else "a new file"
        raise UsageError(f"--out must be {what} or '{usual}', got '{out}'")


def _compared(kind: _Kind, path: pathlib.Path, params: Any) -> tuple[bool | None, str]:
    """Compares the rebuilt parameters with the run's own; None where these are absent."""
    name = kind.written
    if not path.exists():
        return None, f"there is no {name}"
    other = False, f"{name} holds other parameters"
    try:
        wrote = jax.tree.leaves(kind.load(path))
        pairs = list(zip(jax.tree.leaves(params), wrote, strict=True))
    except (OSError, ValueError):
        return other
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return other
    # A run that diverged has NaN.
    if all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
        return True, f"identical to {name}, to the bit"
    far = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    return False, f"up to {far:.3g} away from {name}"


def _elsewhere(header: dict[str, Any]) -> str:
    """Says where the run was, if bits may differ by that: replays are equal up to rounding.

    Empty for the same kind of device and version of JAX.
    """
    was = header["device"], header["versions"]["jax"]
    here = jax.devices()[0].device_kind, jax.__version__
    if was == here:
        return ""
    ran, this = (f"on {device} with jax {version}" for device, version in (was, here))
    return f"; the run was {ran}, this is {this}"
