"""Cells of the scaling study: the runs of one plan, kept as JSON, and their rows."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from bench import _harness
from bench import _o2nc_methods as methods
from bench import _o2nc_rules as rules
from bench import _o2nc_runs as runs
from jaxdp import plans


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs of a method at one size.

    Attributes:
      study: "n", "n, tuned", "d, tuned", "noise, n" or "noise, d".
      method: which plan.
      n: records.
      dim: d.
      window_norm: a number a seed; see ``bench/_o2nc_runs.py``.
      goldstein: the same.
      values: of one record's loss, that a run takes.
      gradients: the same.
      note: parameters, for a person.
    """

    study: str
    method: str
    n: int
    dim: int
    window_norm: list[float]
    goldstein: list[float]
    values: float
    gradients: float
    note: str

    @property
    def title(self) -> str:
        return f"{self.study}: {self.method}, d = {self.dim}, n = {self.n}"


def run(
    study: str, method: str, plan: plans.O2NC, dim: int, seeds: Sequence[int]
) -> Cell:
    """Runs a plan, and measures it."""
    found = runs.measure(plan, runs.run_seeds(plan, dim, seeds), seeds)
    return Cell(
        study,
        method,
        plan.num_examples,
        dim,
        found.window_norm.tolist(),
        found.goldstein.tolist(),
        *methods.calls(plan),
        note=note(plan),
    )


def note(plan: plans.O2NC) -> str:
    """What a person wants to know of a plan."""
    sizes = [f"{size:g}" for _, size in plan.clips.values()]
    return (
        f"{plan.num_steps} steps, restart every {plan.sampling.period}, window "
        f"{plan.window}, batches {', '.join(sizes)}"
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """What is kept of a part of the study.

    Attributes:
      cells: runs.
      rows: what is no cell.
      savings: kind of estimate -> dimension -> a number a seed.
    """

    cells: list[Cell] = dataclasses.field(default_factory=list)
    rows: list[_harness.Row] = dataclasses.field(default_factory=list)
    savings: dict[str, dict[int, np.ndarray]] = dataclasses.field(default_factory=dict)


def save(path: pathlib.Path, part: Part) -> None:
    """Writes a part as JSON; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(part), default=np.ndarray.tolist)
    path.write_text(text + "\n")


def load(path: pathlib.Path) -> Part:
    """What :func:`save` wrote."""
    found = json.loads(path.read_text())
    savings = {
        kind: {int(dim): np.array(values) for dim, values in of.items()}
        for kind, of in found.get("savings", {}).items()
    }
    return Part(
        [Cell(**cell) for cell in found["cells"]],
        [_harness.Row(**row) for row in found["rows"]],
        savings,
    )


# --- rows --------------------------------------------------------------------------

METRICS = {"window norm": "window_norm", "Goldstein norm": "goldstein"}


def rows(cell: Cell) -> list[_harness.Row]:
    """What is measured of a cell, and what its runs take."""
    found = []
    for metric, name in METRICS.items():
        m = _harness.mean(getattr(cell, name))
        count = len(cell.window_norm)
        found.append(_harness.averaged(cell.title, metric, m, count))
    for metric in ("values", "gradients"):
        count = getattr(cell, metric)
        if count:
            found.append(_harness.Row(cell.title, metric, count, cell.note))
    return found


def of(cells: Sequence[Cell], study: str, method: str) -> list[Cell]:
    """The cells of a study and a method, by size."""
    found = [c for c in cells if c.study == study and c.method == method]
    return sorted(found, key=lambda c: (c.n, c.dim))


def curve(cells: Sequence[Cell], axis: str, metric: str) -> dict[int, np.ndarray]:
    """Size -> values of a metric; ``axis`` is "n" or "dim"."""
    return {getattr(c, axis): np.array(getattr(c, metric)) for c in cells}


def slopes(cells: Sequence[Cell]) -> list[_harness.Row]:
    """Of the window norm in n and in d, method by method."""
    found = []
    for study in dict.fromkeys(c.study for c in cells):
        axis = "n" if study in ("n", "n, tuned", "noise, n") else "dim"
        for method in dict.fromkeys(c.method for c in cells if c.study == study):
            along = curve(of(cells, study, method), axis, "window_norm")
            if len(along) < 3:
                continue
            m = rules.slope(along)
            count = sum(map(len, along.values()))
            metric = f"slope of the window norm in {axis[0]}"
            case = f"{study}: {method}"
            found.append(_harness.averaged(case, metric, m, count))
    return found
