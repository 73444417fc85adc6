"""Cells of the stationary-point study: runs of one plan from one start, and their rows."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from bench import _harness
from bench import _sosp_rules as rules
from bench._sosp_runs import Runs


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs of a method at one size.

    Attributes:
      table: of the study: "a", "b" or "c".
      case: problem, start, budget and size.
      method: which plan.
      runs: of all seeds.
      n: records.
      note: parameters, for a person.
      told: figures of a prototype of the method, by metric.
      told_certified: how many of its runs were certified, and of how many.
    """

    table: str
    case: str
    method: str
    runs: Runs
    n: int
    note: str = ""
    told: dict[str, rules.Told] = dataclasses.field(default_factory=dict)
    told_certified: tuple[int, int] | None = None

    @property
    def title(self) -> str:
        return f"({self.table}) {self.case}: {self.method}"


def save(path: pathlib.Path, cells: Sequence[Cell]) -> None:
    """Writes cells as JSON; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        [dataclasses.asdict(cell) for cell in cells], default=np.ndarray.tolist
    )
    path.write_text(text + "\n")


def load(path: pathlib.Path) -> list[Cell]:
    """What :func:`save` wrote."""
    found = []
    for cell in json.loads(path.read_text()):
        promised = cell["runs"].pop("promised")
        arrays = {name: np.array(values) for name, values in cell["runs"].items()}
        cell["runs"] = Runs(promised=promised, **arrays)
        cell["told"] = {name: rules.Told(*told) for name, told in cell["told"].items()}
        certified = cell["told_certified"]
        cell["told_certified"] = None if certified is None else tuple(certified)
        found.append(Cell(**cell))
    return found


#: Of the metrics, which are medians of which numbers of a run.
MEDIANS = (
    "records",
    "gradient records",
    "refreshes",
    "differences",
    "escapes",
    "steps",
    "alpha",
)


def numbers(runs: Runs, metric: str) -> np.ndarray:
    """What a metric is the median of, or the largest of."""
    if metric == "gradient records":
        return runs.records - runs.hessian_records
    return getattr(runs, metric.removeprefix("largest "))


def compared(cell: Cell, metric: str) -> rules.Compared:
    """A metric of a cell beside the prototype's figure."""
    values, told = numbers(cell.runs, metric), cell.told[metric]
    if metric.startswith("largest "):
        return rules.compare(float(values.max()), values, told, rules.largest_interval)
    return rules.compare(float(np.median(values)), values, told, rules.median_interval)


def judged_share(cell: Cell) -> str:
    """Whether the share of certificates agrees with the prototype's."""
    assert cell.told_certified is not None
    count = int(cell.runs.certified.sum())
    return rules.judge_share(count, len(cell.runs), *cell.told_certified)


def rows(cell: Cell) -> list[_harness.Row]:
    """The figures of a cell, the prototype's beside them where it has them."""
    found = [_median(cell, metric) for metric in MEDIANS]
    found.append(_largest(cell))
    found += certificates(cell)
    if cell.note:
        first = found[0]
        found[0] = dataclasses.replace(first, note=f"{first.note}; {cell.note}")
    return found


def _median(cell: Cell, metric: str) -> _harness.Row:
    values = numbers(cell.runs, metric)
    return _row(cell, metric, float(np.median(values)), told_median(values))


def told_median(values: np.ndarray) -> str:
    """That a figure is a median, and its interval where there are enough values."""
    low, high = rules.spread(values)
    if not math.isfinite(high - low):
        return f"median, n={len(values)}"
    return f"median; [{low:.4g}, {high:.4g}] (95%, n={len(values)})"


def _largest(cell: Cell) -> _harness.Row:
    metric = "largest alpha"
    value = float(cell.runs.alpha.max())
    return _row(cell, metric, value, f"certificates say {cell.runs.promised:.4g}")


def _row(cell: Cell, metric: str, value: float, unit: str) -> _harness.Row:
    if metric not in cell.told:
        return _harness.Row(cell.title, metric, value, unit)
    found = compared(cell, metric)
    unit += f"; the prototype's {found.told.value:g} of {found.told.runs} runs: "
    unit += (
        f"{found.verdict} (95%: {found.interval.low:.4g} to {found.interval.high:.4g})"
    )
    ratio = value / found.told.value
    return _harness.Row(cell.title, metric, value, unit, "prototype", ratio)


def certificates(cell: Cell) -> list[_harness.Row]:
    """Returns how many runs are certified, whether it is true, and that no saddle is."""
    runs, title = cell.runs, cell.title
    row = share(title, "share certified", runs.certified)
    if cell.told_certified is not None:
        theirs, of = cell.told_certified
        note = f"{row.note}; the prototype's {theirs} of {of}: {judged_share(cell)}"
        ratio = row.value / (theirs / of) if row.value is not None else None
        row = dataclasses.replace(row, note=note, baseline="prototype", ratio=ratio)
    found = [row]
    kept = runs.good[runs.certified]
    if len(kept):
        metric = f"share of certificates with alpha at most {runs.promised:.4g}"
        found.append(share(title, metric, kept))
    saddles = int((runs.certified & runs.saddle).sum())
    unit = f"of {int(runs.certified.sum())} certificates"
    return [*found, _harness.Row(title, "certified saddles", saddles, unit)]


def share(title: str, metric: str, flags: np.ndarray) -> _harness.Row:
    """A share, with its exact 95% interval."""
    count, of = int(flags.sum()), len(flags)
    low, high = rules.share_interval(count, of)
    unit = f"{count} of {of}; [{low:.3g}, {high:.3g}] (95%)"
    return _harness.Row(title, metric, count / of, unit)


def agreement(cells: Sequence[Cell]) -> list[_harness.Row]:
    """Returns how many figures of the prototype agree, and which are far off."""
    verdicts = {
        f"{cell.case}, {metric}": compared(cell, metric).verdict
        for cell in cells
        for metric in cell.told
    }
    verdicts |= {
        f"{cell.case}, share certified": judged_share(cell)
        for cell in cells
        if cell.told_certified is not None
    }
    verdicts = {k: v for k, v in verdicts.items() if v != rules.UNKNOWN}
    if not verdicts:
        return []
    good = sum(verdict == "agrees" for verdict in verdicts.values())
    off = [name for name, verdict in verdicts.items() if verdict == "far off"]
    unit = f"of {len(verdicts)}; far off: {'; '.join(off) or 'none'}"
    row = _harness.Row(
        "(a) all figures of the prototype",
        "within sampling error",
        good,
        unit,
        "figures",
        good / len(verdicts),
    )
    return [row]


def median(values: np.ndarray) -> float:
    """The median, which may be infinite."""
    ordered = np.sort(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return float(low + high) / 2 if math.isfinite(high) else math.inf
