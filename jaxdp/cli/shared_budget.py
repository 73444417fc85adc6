"""``jaxdp budget``: the budget that all runs on one data set share."""

import json
import pathlib
from typing import Any

from jaxdp.cli import cluster, options
from jaxdp.cli.parsing import usage
from jaxdp.cli.printing import show
from jaxdp.mechanism.plan import Plan
from jaxdp.training import parallel
from jaxdp.training.budgets import Budget


def run(command: options.SharedBudget) -> None:
    """Makes a budget, or shows what is spent of it and what is left."""
    if command.epsilon is not None:
        with usage(command, "FOLDER"):
            made = Budget.create(
                command.folder,
                epsilon=command.epsilon,
                delta=command.delta,
                relation=command.relation,  # pyright: ignore[reportArgumentType]
                unit=command.unit,
                composition=command.composition,  # pyright: ignore[reportArgumentType]
            )
    else:
        with usage(command, "FOLDER"):
            made = Budget(command.folder)
    header, reservations = made.header, made.reservations
    names = ("relation", "unit", "composition", "order")  # The last of "renyi" alone.
    about = {name: header[name] for name in names if name in header} | {"id": made.id}
    total = {"epsilon": header["epsilon"], "delta": header["delta"]}
    spent, left = made.spent(), made.left()
    if command.json:
        listed = [each._asdict() for each in reservations]
        parts = {"total": total, "spent": spent, "left": left, "reservations": listed}
        print(json.dumps(about | parts))
        return
    rows: dict[str, Any] = dict(about)
    for part, numbers in (("total", total), ("spent", spent), ("left", left)):
        rows |= {f"{part} {name}": value for name, value in numbers.items()}
    for index, each in enumerate(reservations, 1):
        rows[f"{index}. {each.what}"] = f"epsilon {each.epsilon:.6g} at {each.delta:g}"
    show(rows)


def of_run(command: Any) -> Budget | None:
    """Returns the budget that ``--budget`` names; None without one."""
    if command.budget is None:
        return None
    with usage(command, "--budget"):
        return Budget(command.budget)


def check(command: Any, plan: Plan, out: pathlib.Path) -> None:
    """Refuses a run for which its budget has no room, before its folder is made.

    What a run that goes on costs was reserved when it began.
    """
    budget = None if command.resume else of_run(command)
    # Only the first of several processes knows what was reserved for the folder.
    if budget is not None and parallel.writes(cluster.mesh_of(command)):
        with usage(command, "--budget"):
            budget.check(plan, out)


def reserve(command: Any, plan: Plan, what: str) -> None:
    """Reserves what a command releases without ``fit`` in its budget, if it has one."""
    budget = of_run(command)
    if budget is not None:
        with usage(command, "--budget"):
            budget.reserve(plan, what=what)
