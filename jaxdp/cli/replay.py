"""``jaxdp replay``: the parameters of a run from its ledger."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import rich
from rich.table import Table

from jaxdp import training
from jaxdp.cli import options, recipes, record
from jaxdp.cli.errors import UsageError, usage
from jaxdp.ledger import LEDGER
from jaxdp.transforms.averaging import polyak_output

REPLAYED = "replayed.npz"


def run(command: options.Replay) -> None:
    """Rebuilds, writes and compares.

    Raises:
      UsageError: a folder that holds no such run, or a file that cannot be written.
    """
    folder = command.folder
    ledger = record.read(folder, "FOLDER")
    recipe = record.recipe_of(ledger)
    home = folder if folder.is_dir() else folder.parent
    out = command.out or home / REPLAYED
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"--out must be a file in a folder that exists, got '{out}'")
    initial = _initial(command, home, ledger.header)
    with usage(command, "FOLDER"):
        replayed = training.replay(
            ledger, initial, optimizer=recipes.make_optimizer(recipe)
        )
    params = replayed.params
    if recipe.average:
        params = polyak_output(replayed.info.state)
    try:
        record.save_params(out, params)
    except OSError as error:
        raise UsageError(
            f"--out must be a file that can be written: {error}"
        ) from error
    answer = {
        "steps": len(ledger.releases),
        "num_steps": ledger.header["plan"]["num_steps"],
        "private": ledger.header["private"],
        "bytes_of_ledger": (folder / LEDGER if folder.is_dir() else folder)
        .stat()
        .st_size,
        "bytes_of_parameters": sum(
            np.asarray(x).nbytes for x in jax.tree.leaves(params)
        ),
        "compared": _compared(home, ledger.header["leaves"], params),
        "written": str(out),
    }
    if command.json:
        print(json.dumps(answer))
        return
    table = Table(show_header=False, box=None)
    for name, value in answer.items():
        table.add_row(name.replace("_", " "), str(value))
    rich.print(table)


def _initial(
    command: options.Replay, home: pathlib.Path, header: dict[str, Any]
) -> Any:
    path = command.initial or home / record.INITIAL
    try:
        return record.load_params(path, header["leaves"])
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(
            f"--initial must be the initial parameters of the run, got '{path}': {error}"
        ) from error


def _compared(folder: pathlib.Path, leaves: dict[str, Any], params: Any) -> str:
    """How the rebuilt parameters compare with those that the run wrote."""
    path = folder / record.PARAMS
    if not path.is_file():
        return f"there is no {record.PARAMS}"
    try:
        wrote = jax.tree.leaves(record.load_params(path, leaves))
    except (OSError, ValueError):
        return f"{record.PARAMS} holds other parameters"
    pairs = list(zip(jax.tree.leaves(params), wrote, strict=True))
    if all(np.array_equal(a, b) for a, b in pairs):
        return f"identical to {record.PARAMS}, to the bit"
    far = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    return f"up to {far:.3g} away from {record.PARAMS}"
