"""Preparation of ``jaxdp train``: checks every option and builds the run."""

import importlib
import os
import pathlib
from typing import Any, NamedTuple

import jax
import optax

from jaxdp import plans
from jaxdp.cli import options, parsing
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.cli.record import INITIAL, SCHEMA
from jaxdp.cli.task import Chosen, Task, is_file
from jaxdp.core import keys as keys_lib
from jaxdp.mechanism.plan import Plan
from jaxdp.training.ledger import LEDGER, LOCK, PLAN, RESERVED, SECRET

_INITIAL = 0x696E6974  # Keeps initial parameters and directions apart.
_BEFORE_PLAN = {
    SECRET,
    *(f"{x}{end}" for x in (INITIAL, SCHEMA) for end in ("", ".part")),
}
_BEFORE_PLAN |= {f"{PLAN}.part"}


class Job(NamedTuple):
    """Checked inputs of a run: task, recipe, plan, keys and folder."""

    task: Task
    algorithm: str
    recipe: dict[str, Any]
    plan: Plan
    optimizer: optax.GradientTransformation | None
    averaged: bool
    keys: keys_lib.Keys
    out: pathlib.Path


def prepare(command: options.Train, keys: keys_lib.Keys | None = None) -> Job:
    """Checks the options and makes all that they name, from cheap to costly.

    ``keys`` are those of :func:`keys_of`, for which several processes wait.
    """
    parsing.check(command)
    keys = keys_of(command) if keys is None else keys
    algorithm = importlib.import_module(f"jaxdp.cli.{command.module}")
    chosen: Chosen = algorithm.prepare(command, keys)
    out = out_of(command)
    if not command.resume:
        check_folder(out, command.overwrite)
    return Job(**chosen._asdict(), algorithm=command.algorithm, keys=keys, out=out)


def out_of(command: options.Train) -> pathlib.Path:
    """Returns the folder of a run: of a file's data, by the name of the file."""
    name = command.dataset
    return command.out or pathlib.Path(
        "runs", pathlib.Path(name).stem if is_file(name) else name
    )


def keys_of(command: options.Output) -> keys_lib.Keys:
    """Returns the keys of a run, of its seed if it has one."""
    with usage(command):
        if command.seed is None:
            keys = keys_lib.Keys.from_entropy()
            return keys.broadcast() if jax.process_count() > 1 else keys
        return keys_lib.Keys.insecure(command.seed)


def initial(task: Task, keys: keys_lib.Keys) -> Any:
    """Returns the initial parameters, which are public and no function of the data."""
    return task.init(initial_key(keys.direction))


def initial_key(direction: jax.Array) -> jax.Array:
    """Returns the key of the initial parameters, derived from a run's public root."""
    return keys_lib.stream(direction, "direction", context=_INITIAL)


def check_folder(out: pathlib.Path, overwrite: bool) -> None:
    """Refuses a folder that holds a person's other files, or cannot be written."""
    if out.is_dir():
        if (out / LEDGER).exists() and not overwrite:
            raise UsageError(
                "--out must be a folder without the record of a run, or --resume (or "
                "--resume auto) given to go on with it, or --overwrite to lose it; got "
                f"{str(out)!r}"
            )
        if any(out.iterdir()) and not overwrite and not _is_ours(out):
            raise UsageError(
                "--out must be a new or empty folder or that of an earlier run, or "
                f"--overwrite given; got {str(out)!r}, which holds other files"
            )
    elif out.exists() or out.is_symlink():
        raise UsageError(f"--out must be a folder, got {str(out)!r}, which is a file")
    if not can_be_written(out):
        raise UsageError(
            f"--out must be a folder that can be written, got {str(out)!r}"
        )


def can_be_written(folder: pathlib.Path) -> bool:
    """Returns True if a folder, or the nearest one above that there is, may be written."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _is_ours(out: pathlib.Path) -> bool:
    """Returns True if a folder holds an earlier run: a plan that can be read.

    Or if it holds nothing but what a run writes before its plan, and was killed there.
    """
    hidden = out / SECRET
    if hidden.is_dir() and {path.name for path in out.iterdir()} <= _BEFORE_PLAN:
        return {path.name for path in hidden.iterdir()} <= {LOCK, RESERVED}
    try:
        plans.from_json((out / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
