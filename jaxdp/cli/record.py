"""Records of the command line in a run's folder: options, initial parameters."""

import contextlib
import dataclasses
import io
import math
import pathlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.cli import options, recipes
from jaxdp.cli.parsing import UsageError, class_names, flag, usage
from jaxdp.kernels.sphere import path_str
from jaxdp.mechanism.plan import Plan
from jaxdp.training import budgets, ledger
from jaxdp.training.budgets import Budget

INITIAL, PARAMS = "initial.npz", "params.npz"
#: What the columns of a file are, as it was said: ``jaxdp predict`` reads it.
SCHEMA = "schema.json"

Command = TypeVar("Command", bound=options.Run)


def note(command: options.Run, recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns the note for the ledger's header: command, its options and the recipe."""
    given = dataclasses.asdict(command)
    if isinstance(command, options.Train):
        given = {"algorithm": command.algorithm, **given}
    chosen = {name: x for name, x in given.items() if name not in command.free}
    # Strict JSON lacks infinity.
    parts = {name: "inf" if x == math.inf else x for name, x in recipe.items()}
    return {"name": command.command, "command": chosen, "recipe": parts}


def begun_or_recorded(command: Command, out: pathlib.Path, own: bool) -> Command:
    """Returns the command of a new run in ``out``, or of the run that is there.

    ``own`` is False for a folder with the public files of a run that another process has.
    ``--resume`` is True or False from here on; "auto" is whether there is a record.
    """
    auto = command.resume == "auto"
    if command.new_attempt and command.resume is not True:
        got = "--resume auto, by which every start would be one" if auto else "none"
        raise UsageError(f"--new-attempt is for --resume only, got it with {got}")
    if not auto:
        return recorded_command(command, out, own) if command.resume else command
    if command.overwrite:
        raise UsageError(
            "--overwrite must be left out with --resume auto: a run that is there goes "
            "on, and would not be written over"
        )
    given, there = command.given, (out / ledger.LEDGER).exists()
    command = dataclasses.replace(command, resume=there)
    vars(command)["given"] = given  # No field: replace leaves it out.
    return recorded_command(command, out, own) if there else command


def recorded_command(command: Command, out: pathlib.Path, own: bool) -> Command:
    """Returns the command of the run in ``out``, resumed by ``command``."""
    kind = type(command)
    read(out, "--out")
    try:  # Before anything is done with private records as the header says.
        record = ledger.verify(out) if own else ledger.read(out)
    except ValueError as error:
        raise UsageError(f"--resume: {error}") from error
    was = said(record, kind)
    if was is None:
        raise UsageError(
            f"--out must be a folder that jaxdp {kind.command} wrote, got {str(out)!r}"
        )
    then = was.pop("algorithm", kind.algorithm)
    if then != kind.algorithm:
        raise UsageError(
            f"--algorithm must be left out with --resume or be as it was, {then}; got "
            f"{kind.algorithm}"
        )
    for field in dataclasses.fields(kind):
        now = getattr(command, field.name)
        if field.name == "labels":  # As a run keeps them.
            now = class_names(now)
        # One that is given as its default is given all the same.
        given = now != field.default or field.name in (command.given or ())
        if field.name in kind.free or not given:
            continue
        if field.name in kind.compared:
            was[field.name] = now
        elif field.name not in was:
            if now != field.default:
                raise UsageError(
                    f"{flag(field.name)} must be left out with --resume of a run from "
                    f"before there was this option, got {now}"
                )
        elif now != was[field.name] and (field.name, now) != ("method", "auto"):
            raise UsageError(
                f"{flag(field.name)} must be left out with --resume or be as it was, "
                f"{was[field.name]}; got {now}"
            )
    if own and (command.budget is not None or command.new_attempt):
        _check_budget(command, record.header)
    fields: dict[str, Any] = {name: getattr(command, name) for name in kind.free}
    return options_of(kind, was | fields | {"out": out})


def _check_budget(command: options.Run, header: dict[str, Any]) -> None:
    """Requires the budget in which a run was reserved, where one is given or needed.

    By its id, as its folder may be moved. What goes on reserves nothing, but a new attempt.
    """
    was = budgets.named_by(header)
    if command.budget is None:
        if was is not None:
            raise UsageError(
                "--budget must be that in which the run was reserved, "
                f"{was or 'one without an id'}, with --new-attempt, which is charged as a "
                "run; got none"
            )
        return
    if was is None:
        raise UsageError(
            "--budget must be left out with --resume of a run whose ledger names none: "
            "what goes on reserves nothing"
        )
    with usage(command, "--budget"):
        now = Budget(str(command.budget)).id
    if now != was:
        raise UsageError(
            "--budget must be left out with --resume or be that in which the run was "
            f"reserved, {was or 'one without an id'}; got {str(command.budget)!r}, which "
            f"is {now or 'one without an id'}"
        )


def algorithm_of(folder: pathlib.Path) -> str | None:
    """Returns the algorithm of the run in a folder; None if there is no such run."""
    try:
        options_then = said(ledger.read(folder), options.Train)
    except (OSError, ValueError):
        return None
    return None if options_then is None else options_then.get("algorithm")


def said(record: ledger.Record, kind: type[options.Run]) -> dict[str, Any] | None:
    """Returns the options in a ledger's header; None if another command wrote it."""
    try:
        note = record.header["note"]
        # Before there were several commands, none was named.
        if note.get("name", "train") != kind.command:
            return None
        given = dict(note["command"])
    except (AttributeError, KeyError, TypeError):
        return None
    return {n: tuple(x) if isinstance(x, list) else x for n, x in given.items()}


def options_of(kind: type[Command], said: dict[str, Any]) -> Command:
    """Builds a command from the options in a ledger's header."""
    known = {field.name for field in dataclasses.fields(kind)}
    # Once each algorithm had the options of all, which were not given.
    said = {n: x for n, x in said.items() if n in known or x is not False}
    said = {n: x for n, x in said.items() if x is not None and n != "algorithm"}
    for name in said:
        if name not in known:
            raise UsageError(
                "the run must be of options that this version of jaxdp has, got "
                f"{flag(name)} in its {ledger.LEDGER}"
            )
    return kind(**said)


def read(folder: pathlib.Path, option: str) -> ledger.Record:
    """Reads the ledger of a folder; errors name ``option``."""
    try:
        return ledger.read(folder)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


@contextlib.contextmanager
def begun(
    command: options.Run, out: pathlib.Path, plan: Plan, files: tuple[str, ...]
) -> Iterator[None]:
    """Makes the folder of a new run: nothing of an earlier run, and at the end the plan.

    In ``with`` more is removed and written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with usage(command, "--out"):
            ledger.discard(out)
        for name in files:  # What else an earlier run left.
            (out / name).unlink(missing_ok=True)
        yield
        ledger.replace(out / ledger.PLAN, (plan.file_text() + "\n").encode())
    except OSError as error:
        raise UsageError(
            f"--out must be a folder that can be written: {error}"
        ) from error


# --- parameters as files -----------------------------------------------------------


def save_params(path: pathlib.Path, params: Any) -> None:
    """Writes the leaves of a tree by their paths; a bare array is called ``params``."""
    arrays: dict[str, Any] = {
        path_str(where) or "params": np.asarray(leaf)
        for where, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    ledger.replace(path, file.getvalue())


def load_params(path: pathlib.Path, leaves: dict[str, Any]) -> Any:
    """Loads the arrays of a file, as a flat tree in the order of a ledger's leaves.

    Directions depend on the leaves' paths and their order alone, so the run's own tree is
    not needed.

    Raises:
      ValueError, OSError: no such file, or one of other leaves.
    """
    with np.load(path) as file:
        if set(file) != {name or "params" for name in leaves}:
            raise ValueError(f"leaves must be {sorted(leaves)}, got {sorted(file)}")
        arrays: Any = {name: file[name or "params"] for name in leaves}
    return arrays[""] if "" in arrays else OrderedDict(arrays)


def load_initial(folder: pathlib.Path, leaves: dict[str, Any]) -> Any:
    """Loads the initial parameters of a run from its folder."""
    try:
        return jax.tree.map(jnp.asarray, load_params(folder / INITIAL, leaves))
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(
            f"--out must hold the run's {INITIAL}, got {str(folder)!r}: {error}"
        ) from error


def recipe_of(record: ledger.Record) -> recipes.Recipe | None:
    """Returns the recipe of a run; None if its plan made the steps."""
    try:
        parts = record.header["note"]["recipe"]
        fields: dict[str, Any] = {
            name: math.inf if x == "inf" else x for name, x in parts.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            "FOLDER must be one that jaxdp wrote, got a ledger without a recipe: "
            "jaxdp.replay rebuilds it with the optimizer of its run"
        ) from error
    if fields.keys() <= {field.name for field in dataclasses.fields(recipes.Recipe)}:
        return recipes.Recipe(**fields)
    return None
