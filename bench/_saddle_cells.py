"""Cells of the saddle study: runs of a method at one size, and what they are held to.

A cell may have a *prototype*: what independent runs of the same method in float64 NumPy
gave, in the mean over a few of them. Both are means of few runs. A cell agrees if they
differ by no more than Student's 95% interval of a difference of two such means, both with
the spread that is measured here, and half a unit of the prototype's last digit. Of many
cells that agree in truth one in twenty does not; so ``far`` says which differ by more than
the same interval at 99.9%.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats

from bench import _harness

CONFIDENCE, CERTAIN = 0.95, 0.999


@dataclasses.dataclass(frozen=True)
class Prototype:
    """The mean of some runs, as it was written down.

    Attributes:
      value: rounded to ``digits`` places.
      runs: how many that are independent.
      digits: decimal places.
    """

    value: float
    runs: int
    digits: int = 3


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs of one method at one size.

    Attributes:
      table: of the study: "a" to "e", or "paper".
      size: "n = 10000, d = 100".
      method: which algorithm, with which parameters.
      metric: what ``values`` are.
      values: one a seed.
      note: the parameters, for a person.
      bound: what is proven about the mean, if anything is.
      prototype: what it is compared with.
      n: records.
      d: vertices of a player; cells, for queries.
      facts: further numbers: name -> value.
    """

    table: str
    size: str
    method: str
    metric: str
    values: tuple[float, ...]
    n: int
    d: int
    note: str = ""
    bound: float | None = None
    prototype: Prototype | None = None
    facts: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    def margin(self, confidence: float = CONFIDENCE) -> float:
        """How far the prototype may be from the mean by chance and rounding."""
        assert self.prototype is not None
        count = len(self.values)
        spread = float(np.std(self.values, ddof=1)) if count > 1 else math.inf
        quantile = scipy.stats.t.ppf((1 + confidence) / 2, max(count - 1, 1))
        both = math.sqrt(1 / count + 1 / self.prototype.runs)
        return float(quantile) * spread * both + 0.5 * 10**-self.prototype.digits

    def agrees(self, confidence: float = CONFIDENCE) -> bool:
        """Whether the prototype's mean is within sampling error of this one."""
        assert self.prototype is not None
        return abs(self.mean - self.prototype.value) <= self.margin(confidence)


def size(n: int, d: int) -> str:
    return f"n = {n}, d = {d}"


def save(path: pathlib.Path, cells: Sequence[Cell]) -> None:
    """Writes cells as JSON; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([dataclasses.asdict(cell) for cell in cells], indent=1)
    path.write_text(text + "\n")


def load(path: pathlib.Path) -> list[Cell]:
    """What :func:`save` wrote."""
    found: list[dict[str, Any]] = json.loads(path.read_text())
    for cell in found:
        if cell["prototype"] is not None:
            cell["prototype"] = Prototype(**cell["prototype"])
        cell["values"] = tuple(cell["values"])
    return [Cell(**cell) for cell in found]


# --- rows ----------------------------------------------------------------------------


def rows(cell: Cell) -> list[_harness.Row]:
    """The figure of a cell, its bound and its further numbers."""
    case = f"({cell.table}) {cell.size}, {cell.method}"
    m = _harness.mean(cell.values)
    unit = cell.note
    against: tuple[Any, ...] = ()
    if cell.prototype is not None:
        value, runs = cell.prototype.value, cell.prototype.runs
        found = "agrees" if cell.agrees() else "differs" if not far(cell) else "far off"
        unit = f"{unit}; " if unit else ""
        unit += f"prototype {value:g} of {runs} runs: {found}"
        against = ("prototype", m.value / value)
    count = len(cell.values)
    found = [_harness.averaged(case, cell.metric, m, count, unit, *against)]
    if cell.bound is not None:
        shown = "not exceeded" if m.value <= cell.bound else "EXCEEDED"
        over = cell.bound / m.value
        row = _harness.Row(case, "bound", cell.bound, "", cell.metric, over, note=shown)
        found.append(row)
    found += [_harness.Row(case, name, value, "") for name, value in cell.facts.items()]
    return found


def far(cell: Cell) -> bool:
    """Whether chance cannot be why it differs from its prototype."""
    return not cell.agrees(CERTAIN)


def agreement(cells: Sequence[Cell]) -> list[_harness.Row]:
    """Table by table, how many of the cells with a prototype agree with it."""
    found = []
    known = [cell for cell in cells if cell.prototype is not None]
    for table in sorted({cell.table for cell in known}):
        of = [cell for cell in known if cell.table == table]
        good = sum(cell.agrees() for cell in of)
        off = [f"{cell.size}, {cell.method}" for cell in of if far(cell)]
        unit = f"of {len(of)}; far off: {'; '.join(off) or 'none'}"
        case = f"({table}) all cells"
        metric = "within sampling error"
        found.append(_harness.Row(case, metric, good, unit, "cells", good / len(of)))
    return found


def slope(cells: Sequence[Cell]) -> _harness.Mean:
    """Of the logarithm of the mean in that of n, with its 95% interval."""
    x = np.log([cell.n for cell in cells])
    weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    return _of_means(cells, weights)


def growth(cells: Sequence[Cell]) -> tuple[float, float, float]:
    """The last mean over the first, and its 95% interval (low, high)."""
    m = _of_means([cells[0], cells[-1]], np.array([-1.0, 1.0]))
    value, half = m
    return math.exp(value), math.exp(value - half), math.exp(value + half)


def _of_means(cells: Sequence[Cell], weights: np.ndarray) -> _harness.Mean:
    """A weighted sum of the logarithms of independent means, by their relative errors."""
    value = float(weights @ np.log([cell.mean for cell in cells]))
    few = min(len(cell.values) for cell in cells)
    if few < 2:
        return _harness.Mean(value, 0.0)
    errors = [
        np.std(cell.values, ddof=1) / math.sqrt(len(cell.values)) / cell.mean
        for cell in cells
    ]
    quantile = float(scipy.stats.t.ppf(0.975, few - 1))
    return _harness.Mean(value, quantile * float(np.linalg.norm(weights * errors)))
