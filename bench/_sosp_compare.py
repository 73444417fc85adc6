"""Tables (b) and (c): the library's certified settings, and simpler methods beside them.

All are plans of the same family at the same budget, with the same clips and step size, on
the same records:

``certified``
    ``plans.SOSP.certified`` with typical deviations; its noise of differences is blt_3.
``tree``, ``sqrt_toeplitz``, ``independent``
    the same with another noise, for which batches are chosen anew.
``independent, short``
    with at most 7 differences between refreshes, where this noise is at its best.
``fixed batches``
    every difference reads as many records, and a longer way is a refresh. How many is
    tuned.
``refreshes only``
    no differences at all, but escapes: their share of the error is given to refreshes,
    whose batches are smaller by the square root of 2.
``no escape``
    no test of curvature: the point that is returned has the smallest estimated gradient.
``DP-SGD``
    neither differences nor escapes, with the same batches; ``DP-SGD, tuned`` with the best
    of some batch sizes.

What is tuned is tuned on runs of other seeds, and the choice is not charged: this compares
methods and is no private procedure. A method without escapes never stops by itself. It is
judged by its last iterate, and by all points that it passes: "told when to stop" counts the
records up to the first that is as good as a certificate says, which nobody could know who
runs it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench import _harness
from bench import _sosp_cells as cells
from bench import _sosp_rules as rules
from bench import _sosp_runs as runs
from bench._sosp_cells import Cell
from bench._sosp_runs import Entry, Runs
from jaxdp import plans
from jaxdp.models.strict_saddles import StrictSaddleProblem
from jaxdp.sosp.theory import design

DELTA = 1e-6
OURS = "certified"
NOISES = ("tree", "sqrt_toeplitz", "independent")
FIXED, REFRESHES, NO_ESCAPE = "fixed batches", "refreshes only", "no escape"
SGD, SGD_TUNED = "DP-SGD", "DP-SGD, tuned"
SHORT = "independent, short"
#: Shares of a refresh's batch that are tried for fixed ones, and for DP-SGD's. From the
#: saddle of the factorisation the way is longer, and takes more steps.
FIXED_SHARES = {"cosine": (0.1, 0.3, 1.0), "factorization": (0.03, 0.1, 0.3)}
SGD_SHARES = {
    "cosine": (1 / 16, 1 / 8, 1 / 4, 1 / 2),
    "factorization": (1 / 64, 1 / 32, 1 / 16, 1 / 8),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """A problem at its saddle, with a budget.

    Attributes:
      problem: "cosine" or "factorization".
      epsilon: at delta = 1e-6.
      n: records.
      accuracy: gamma; None takes the least whose expected records fit, with no margin:
        these problems have one saddle.
      seeds: how many runs of the certified settings.
      others: how many of each other method, on the first of their records.
    """

    problem: str
    epsilon: float
    n: int
    accuracy: float | None = None
    seeds: int = 40
    others: int = 40

    @property
    def name(self) -> str:
        return f"{self.problem}, saddle, epsilon {self.epsilon:g}, n = {self.n}"

    @property
    def of(self) -> StrictSaddleProblem:
        return runs.cosine() if self.problem == "cosine" else runs.factorization()


def certified(size: Size, **more: Any) -> plans.SOSP:
    """The library's settings, for deviations that are typical of the problem."""
    problem = size.of
    if size.problem == "cosine":
        # Every phase moves a record's sine and cosine by .28 in standard deviation.
        part = 0.3
        deviations = (part, part * problem.smoothness, part * problem.smoothness)
    else:
        deviations = (0.1, 0.3, 0.3)
    gradient_std, difference_std, hessian_std = deviations
    numbers: dict[str, Any] = {
        "epsilon": size.epsilon,
        "delta": DELTA,
        "num_examples": size.n,
        "dim": problem.dim,
        "relation": "replace_one",
        "lipschitz": problem.lipschitz,
        "smoothness": problem.smoothness,
        "hessian_lipschitz": problem.hessian_lipschitz,
        "gradient_std": gradient_std,
        "difference_std": difference_std,
        "hessian_std": hessian_std,
        "trigger_factor": 3.0,
    } | more
    accuracy = size.accuracy
    if accuracy is None:
        accuracy = design.least_accuracy(design.Choices(**numbers), 1)
    return plans.SOSP.certified(**numbers, accuracy=accuracy)


def promised(plan: plans.SOSP) -> float:
    assert plan.theorem is not None
    return plan.theorem.promise.alpha


def methods(size: Size) -> dict[str, plans.SOSP]:
    """The plans of all methods that have nothing to tune, ours first."""
    ours = certified(size)
    short = {"prefix_noise": "independent", "max_differences": 7}
    found = {OURS: ours}
    found |= {name: certified(_same(size, ours), prefix_noise=name) for name in NOISES}
    found[SHORT] = certified(_same(size, ours), **short)
    found[REFRESHES] = refreshes_only(ours)
    found[NO_ESCAPE] = dataclasses.replace(ours, escape_steps=None)
    found[SGD] = sgd(ours, ours.refresh_batch_size)
    return found


def _same(size: Size, ours: plans.SOSP) -> Size:
    """The same accuracy for a method that is to be compared in records."""
    return dataclasses.replace(size, accuracy=promised(ours) / 4)


def refreshes_only(ours: plans.SOSP) -> plans.SOSP:
    batch = math.ceil(ours.refresh_batch_size / math.sqrt(2))
    return dataclasses.replace(ours, max_differences=0, refresh_batch_size=batch)


def sgd(ours: plans.SOSP, batch: int) -> plans.SOSP:
    """Steps with means of fresh records, as many as there are records for."""
    return dataclasses.replace(
        ours,
        max_differences=0,
        escape_steps=None,
        refresh_batch_size=batch,
        num_steps=max(ours.num_examples // batch, 1),
    )


def fixed(ours: plans.SOSP, batch: int) -> plans.SOSP:
    """Differences of the same number of records each."""
    return dataclasses.replace(ours, difference_batch_size=batch)


def tuned(
    size: Size, plans_of: Mapping[str, plans.SOSP], target: float, seeds: Sequence[int]
) -> str:
    """The best of some plans on runs of tuning seeds, by :func:`score`."""
    entries = {k: Entry(plan, "saddle", target) for k, plan in plans_of.items()}
    other = [runs.TUNING + seed for seed in seeds]
    found = runs.collect(size.of, size.n, entries, other)
    return min(found, key=lambda name: score(found[name]))


def score(found: Runs) -> tuple[float, float]:
    """Least is best: the share of runs that fail, then the records that are needed.

    Without escapes a run fails whose last iterate is worse than a certificate would say,
    and then the median of its alpha counts.
    """
    if found.escapes.any():
        kept = found.certified & found.good
        return 1 - float(kept.mean()), cells.median(found.needed)
    fails = found.last > found.promised
    return float(fails.mean()), float(np.median(found.last))


def shown(cell: Cell) -> np.ndarray:
    """The alpha of what a method puts out: DP-SGD's last iterate."""
    return cell.runs.last if cell.method == SGD_TUNED else cell.runs.alpha


def table_b(
    size: Size, seeds: Sequence[int], only: Sequence[str] | None = None
) -> list[Cell]:
    """All methods at one size that have nothing to tune, or only some; ours is there."""
    every = {k: v for k, v in methods(size).items() if only is None or k in only}
    if size.problem != "cosine":
        # Its many records take long: other noise is compared on the cosine.
        every = {k: v for k, v in every.items() if k not in NOISES}
    ours = {OURS: every.pop(OURS)}
    notes = {OURS: _told(ours[OURS])}
    return _cells(size, ours, seeds, notes) + _cells(size, every, seeds[: size.others])


def table_b_tuned(
    size: Size, seeds: Sequence[int], tuning: Sequence[int]
) -> list[Cell]:
    """The two that have: fixed batches and DP-SGD."""
    every, notes = {}, {}
    for name, of in tunable(size, certified(size)).items():
        best = tuned(size, of, promised(certified(size)), tuning)
        every[name] = of[best]
        notes[name] = f"{best} records, the best of {', '.join(of)}"
    return _cells(size, every, seeds[: size.others], notes)


def _cells(
    size: Size,
    every: Mapping[str, plans.SOSP],
    seeds: Sequence[int],
    notes: Mapping[str, str] | None = None,
) -> list[Cell]:
    target = promised(certified(size))
    entries = {name: Entry(plan, "saddle", target) for name, plan in every.items()}
    found = runs.collect(size.of, size.n, entries, seeds)
    told = notes or {}
    return [
        Cell("b", size.name, name, found[name], size.n, told.get(name, ""))
        for name in every
    ]


def tunable(size: Size, ours: plans.SOSP) -> dict[str, dict[str, plans.SOSP]]:
    """The plans of each method that are tried, by the records of a batch."""
    batch = ours.refresh_batch_size

    def sizes(shares: Sequence[float]) -> list[int]:
        return [max(1, round(share * batch)) for share in shares]

    return {
        FIXED: {str(k): fixed(ours, k) for k in sizes(FIXED_SHARES[size.problem])},
        SGD_TUNED: {str(k): sgd(ours, k) for k in sizes(SGD_SHARES[size.problem])},
    }


def _told(plan: plans.SOSP) -> str:
    assert plan.theorem is not None
    return (
        f"gamma = {plan.theorem.promise.accuracy:.3g}, b = {plan.refresh_batch_size}, "
        f"c = {plan.difference_batch_rate:.4g}, b_H = {plan.hessian_batch_size}, "
        f"{plan.escape_steps} steps of an escape, "
        f"{plan.theorem.promise.expected_records} records expected"
    )


def released(seeds: Sequence[int]) -> list[Cell]:
    """The library's settings with a released Hessian, beside the rows of table (a)."""
    size = Size("cosine", 2.0, 200_000, 0.03)
    plan = certified(size, hessian="released")
    entries = {OURS: Entry(plan, "saddle", promised(plan))}
    found = runs.collect(size.of, size.n, entries, seeds)
    name, note = f"{size.name}, gamma 0.03, released Hessian", _told(plan)
    return [Cell("a", name, OURS, found[OURS], size.n, note)]


def table_c(n: int, seeds: Sequence[int], tuning: Sequence[int]) -> list[Cell]:
    """Each method with the least accuracy that its own expected records allow at n.

    DP-SGD has none; it is tuned for what the certified settings promise.
    """
    size = Size("cosine", 1.0, n)
    ours = certified(size)
    every = {OURS: ours}
    every |= {name: certified(size, prefix_noise=name) for name in NOISES}
    entries = {k: Entry(plan, "saddle", promised(plan)) for k, plan in every.items()}
    target, of = promised(ours), tunable(size, ours)[SGD_TUNED]
    best = tuned(size, of, target, tuning)
    entries[SGD_TUNED] = Entry(of[best], "saddle", target)
    found = runs.collect(size.of, n, entries, seeds)
    return [Cell("c", size.name, name, found[name], n) for name in entries]


def table_c_fixed(n: int, seeds: Sequence[int], tuning: Sequence[int]) -> list[Cell]:
    """Fixed batches: the accuracy that certified settings have for part of the records.

    The least of two at which three runs in four are certified, each with the better of two
    sizes; if it is neither, the larger.
    """
    size, entry = Size("cosine", 1.0, n), None
    other = [runs.TUNING + seed for seed in tuning]
    for part in (2, 4):
        fewer = certified(dataclasses.replace(size, n=n // part))
        ours = certified(_same(size, fewer))
        batches = [round(share * ours.refresh_batch_size) for share in (0.1, 0.3)]
        entries = {
            str(k): Entry(fixed(ours, k), "saddle", promised(ours)) for k in batches
        }
        found = runs.collect(size.of, n, entries, other)
        best = min(found, key=lambda k: score(found[k]))
        entry = entries[best]
        if score(found[best])[0] <= 0.25:
            break
    assert entry is not None
    found = runs.collect(size.of, n, {FIXED: entry}, seeds)
    return [Cell("c", size.name, FIXED, found[FIXED], n)]


# --- rows ------------------------------------------------------------------------------


def rows_b(found: Sequence[Cell]) -> list[_harness.Row]:
    """Of one size: each method's records beside ours."""
    (ours,), rows = [cell for cell in found if cell.method == OURS], []
    needed = cells.median(ours.runs.needed)
    for cell in found:
        of, title = cell.runs, cell.title
        both = of.certified & of.good
        metric = f"share certified with alpha at most {of.promised:.4g}"
        row = cells.share(title, metric, both)
        note = f"{row.note}; {cell.note}" if cell.note else row.note
        rows.append(dataclasses.replace(row, note=note))
        rows.append(cells.share(title, "share that returns a saddle", of.saddle))
        rows += cells.certificates(cell)[-1:]
        for metric, values in (("", of.alpha), (" of the last iterate", of.last)):
            value, unit = float(np.median(values)), cells.told_median(values)
            rows.append(_harness.Row(title, f"alpha{metric}", value, unit))
        rows.append(_records(title, "records", of.records, needed))
        rows.append(_records(title, "records to a certificate", of.needed, needed))
        reach = cells.median(ours.runs.reached)
        rows.append(_records(title, "records, told when to stop", of.reached, reach))
    return rows


def _records(title: str, metric: str, values: np.ndarray, ours: float) -> _harness.Row:
    value = cells.median(values)
    if not math.isfinite(value):
        unit = f"not in {int(np.isinf(values).sum())} of {len(values)} runs"
        return _harness.Row(title, metric, None, unit)
    ratio = value / ours if math.isfinite(ours) else None
    unit = cells.told_median(values)
    return _harness.Row(title, metric, value, unit, OURS, ratio)


def rows_c(found: Sequence[Cell]) -> list[_harness.Row]:
    """Medians by n, and the slope of each method."""
    rows = []
    for cell in found:
        of = cell.runs
        value, unit = float(np.median(shown(cell))), cells.told_median(shown(cell))
        rows.append(_harness.Row(cell.title, "alpha", value, unit))
        if cell.method != SGD_TUNED:
            value, both = of.promised, of.certified & of.good
            rows.append(_harness.Row(cell.title, "alpha certified", value, ""))
            rows.append(cells.share(cell.title, "share certified, rightly", both))
    for method in dict.fromkeys(cell.method for cell in found):
        of = [cell for cell in found if cell.method == method]
        if len(of) < 3:
            continue
        sizes = [cell.n for cell in of]
        m = rules.slope(sizes, [shown(cell) for cell in of])
        unit = f"± {m.error:.2g} (standard error), n = {sizes[0]} to {sizes[-1]}"
        title = f"(c) cosine, saddle, epsilon 1: {method}"
        rows.append(
            _harness.Row(title, "slope in n", m.value, unit, "-1/2", -2 * m.value)
        )
    return rows
