r"""All oracles of private O2NC side by side: norm against records and dimension.

The loss is :math:`\|x\|_1/\sqrt d + \langle z, x\rangle` with ||z|| = 1/2, so L = 3/2,
from a point of norm 3 and a gap of 3 in every dimension; (8, 1e-5) under replace-one;
smoothing radius 1/4, so that the start is six times as far from the minimum as Goldstein's
radius, 1/2. Every seed has its own data, directions and noise; no two sizes share a seed.

"window norm" is what the theorems bound: the mean over windows of the norm of the mean of
:math:`\nabla\hat F` at the window's queries, in closed form. It is 1 at the start. Windows
differ between methods, but the queries of all reach no further than the smoothing radius
from their mean, so that it bounds the Goldstein norm of what is returned. That is measured
too: an upper bound at radius 1/2 for the expected loss, of the means of four windows, one
from each quarter of the run (the window that is returned is drawn uniformly).

"n" has the settings that theorems prescribe or that have the least proven bound; "n, tuned"
practical clips and, for every method, the best of 12 combinations: two lengths of windows,
three step sizes, and two of what it has else (the fraction of the clip of differences, the
restart period or the batch), chosen at one size and kept, relative to what is prescribed,
at all others and in all dimensions. The choice is not charged: this compares algorithms.
Theorem 3.1 is run with m = d, for its own m (10^9 and up) cannot be. Several passes take at
most 250 times what restarts with all records do, as prescribed, and as many steps if tuned;
they read n records a step, so their sizes are smaller. What a run asks for, values of a
record's loss or gradients, is in its rows.

"records of ours over those of ..." is for the norm that the other method reaches at its
largest sizes, between sizes on lines through the logarithms of the means; the interval is a
bootstrap's over seeds. Where a curve is below the norm at its least size, or never falls to
it, the ratio is a bound. "proven bound" has the records at which explicit bounds fall to a
norm, for which nothing is run.

"directions over points of the ball" is how many directions the zeroth-order oracle needs
for the error that the first-order one has with one point, both of independent ones: at x
with normal coordinates of size radius / sqrt(d), and at a query a tenth of the radius away.

"clips" has the share of estimates, without noise, that are longer than a clip, at 100
queries of a private run with 32 fresh records each, computed outside of the library: a run
never logs it. Of ``robust_regression`` too, where each record has kinks of its own.

A slope is that of the logarithms of all runs, with its 95% interval; means have that of
Student's t. ``--out DIR`` draws the plot. Parts are kept in ``DIR/o2nc_scaling_parts`` and
taken from there by the next run; delete the folder to measure anew.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures

import numpy as np

from bench import _harness, problems
from bench import _o2nc_bounds as proven
from bench import _o2nc_calls as asked
from bench import _o2nc_cells as cells
from bench import _o2nc_methods as methods
from bench import _o2nc_plot as plot
from bench import _o2nc_rules as rules
from bench import _o2nc_runs as runs
from bench._o2nc_cells import Cell, Part
from bench._o2nc_methods import Shape
from jaxdp.cli import plots
from jaxdp.models.nonsmooth import NonsmoothProblem

PNG, PARTS = "o2nc_scaling.png", "o2nc_scaling_parts"
SEEDS, DIM = 20, 20
SIZES = (2_000, 6_000, 18_000, 54_000)
SEVERAL_SIZES = (150, 500, 1_500, 5_000)
DIMS = (5, 10, 20, 40)
#: Where shapes are tuned and dimensions are compared; seeds to tune on.
MIDDLE, SEVERAL_MIDDLE, TUNING = 6_000, 1_500, 4
#: Where kinds of noise are compared; all kinds are in the same shape.
NOISE_SHAPE, NOISE_DIMS = Shape(stretch=0.3, period=64, fraction=0.3), (5, 20, 40)
QUICK = (methods.OURS, methods.PRINTED)
QUICK_SIZES = (2_000, 6_000)


# --- parts -------------------------------------------------------------------------


def seeds(place: int, count: int = SEEDS) -> range:
    """The seeds of a size: no two sizes have one in common."""
    return range(1000 * place, 1000 * place + count)


def middle(method: str) -> int:
    return SEVERAL_MIDDLE if method in methods.MULTI_PASS else MIDDLE


def tune(method: str) -> tuple[Shape, _harness.Row]:
    """The shape of least mean window norm, on seeds that nothing else is run on."""
    n, own = middle(method), seeds(99, TUNING)
    tried: dict[Shape, float] = {}
    for shape in methods.shapes(method):
        plan = methods.tuned(method, n, DIM, shape)
        assert plan.learning_rate is not None
        rates = [plan.learning_rate * rate for rate in methods.RATES]
        found = runs.run_seeds(plan, DIM, own, rates)
        for rate, of in zip(methods.RATES, found, strict=True):
            norms = [runs.window_norm(plan, run) for run in of]
            tried[shape._replace(rate=rate)] = float(np.mean(norms))
    best = min(tried, key=lambda shape: tried[shape])
    unit = f"least of {len(tried)} shapes at n = {n}, d = {DIM}: {best}"
    return best, _harness.Row(f"tuned: {method}", "window norm", tried[best], unit)


def of_method(method: str) -> Part:
    """A method at all sizes, as prescribed and tuned; and tuned in all dimensions."""
    shape, row = tune(method)
    sizes = SEVERAL_SIZES if method in methods.MULTI_PASS else SIZES
    n, found = middle(method), []
    for i, size in enumerate(sizes):
        plan = methods.prescribed(method, size, DIM)
        found.append(cells.run("n", method, plan, DIM, seeds(i)))
        plan = methods.tuned(method, size, DIM, shape)
        found.append(cells.run("n, tuned", method, plan, DIM, seeds(i)))
        if size == n:
            found.append(dataclasses.replace(found[-1], study="d, tuned"))
    for i, dim in enumerate(DIMS):
        if dim != DIM:
            plan = methods.tuned(method, n, dim, shape)
            found.append(cells.run("d, tuned", method, plan, dim, seeds(10 + i)))
    return Part(found, [row])


def of_noise(name: str) -> Part:
    """Our single pass with one kind of noise, in one shape for all."""
    found = []
    for i, n in enumerate(SIZES):
        plan = methods.tuned(methods.OURS, n, DIM, NOISE_SHAPE, name)
        found.append(cells.run("noise, n", name, plan, DIM, seeds(20 + i)))
        if n == MIDDLE:
            found.append(dataclasses.replace(found[-1], study="noise, d"))
    for i, dim in enumerate(NOISE_DIMS):
        if dim != DIM:
            plan = methods.tuned(methods.OURS, MIDDLE, dim, NOISE_SHAPE, name)
            found.append(cells.run("noise, d", name, plan, dim, seeds(30 + i)))
    return Part(found)


def of_clips(method: str) -> Part:
    """How often proven and practical clips act on what the oracle estimates."""
    return Part(rows=clip_rows(method, middle(method), CLIPPED))


CLIPPED = (runs.problem(DIM), problems.robust_regression(DIM))
FRACTIONS = (1.0, 0.3, 0.1)


def clip_rows(
    method: str,
    n: int,
    problems: Sequence[NonsmoothProblem],
    num_queries: int = 100,
) -> list[_harness.Row]:
    """Of the run of a certified plan, on each problem."""
    plan = methods.prescribed(method, n, DIM)
    rows = []
    for of in problems:
        scaled = methods.with_lipschitz(plan, of.lipschitz / CLIPPED[0].lipschitz)
        found = asked.lengths(scaled, of, seed=0, num_queries=num_queries)
        clips = {"proven": scaled}
        for fraction in FRACTIONS:
            clips[f"practical, {fraction:g}"] = scaled.with_practical_clips(
                dim=DIM, lipschitz=of.lipschitz, fraction=fraction
            )
        for name, with_clips in clips.items():
            for phase, share in asked.clipped(with_clips, found).items():
                if phase == "restart" and name.startswith("practical, 0"):
                    continue  # The fraction is of differences.
                case = f"clips: {method}, {of.name}"
                metric = f"share of {phase}s above the {name} clip"
                rate = share.count / share.of
                rows.append(_harness.Row(case, metric, rate, str(share)))
    return rows


def parts() -> dict[str, Callable[[], Part]]:
    """The parts of the kept study."""
    found: dict[str, Callable[[], Part]] = {"bounds": lambda: Part(rows=proven.rows())}
    for i, method in enumerate(methods.METHODS):
        found[f"method_{i}"] = functools.partial(of_method, method)
    for name in methods.KERNELS:
        found[f"noise_{name}"] = functools.partial(of_noise, name)
    for i, method in enumerate(methods.CERTIFIED):
        found[f"clips_{i}"] = functools.partial(of_clips, method)
    every = range(SEEDS), 2000, asked.KINDS, DIMS
    found["savings"] = lambda: Part(savings=saving(*every))
    return found


def run_part(name: str, part: Callable[[], Part], out: pathlib.Path | None) -> Part:
    """A part: measured, or as kept in ``out``."""
    path = None if out is None else out / PARTS / f"{name}.json"
    if path is not None and path.exists():
        return cells.load(path)
    found = part()
    if path is not None:
        cells.save(path, found)
    return found


# --- the study ---------------------------------------------------------------------


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """The study's rows; with ``out`` its plot, and its parts to go on from."""
    if quick:
        found = [quick_part()]
    else:
        every = parts()
        with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(lambda name: run_part(name, every[name], out), every))
    measured = [cell for part in found for cell in part.cells]
    savings = {kind: of for part in found for kind, of in part.savings.items()}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plots.save(plot.draw(measured, savings), out / PNG)
    rows = report(measured) + saving_rows(savings)
    return rows + [row for part in found for row in part.rows]


def quick_part() -> Part:
    """Two methods at two sizes, as prescribed; clips at a few queries."""
    found = [
        cells.run("n", method, methods.prescribed(method, n, DIM), DIM, seeds(i, 3))
        for method in QUICK
        for i, n in enumerate(QUICK_SIZES)
    ]
    rows = clip_rows(methods.OURS, QUICK_SIZES[0], CLIPPED[:1], 10)
    return Part(found, rows, saving(range(3), 200, asked.KINDS[:1], DIMS[::2]))


def saving(
    own: Sequence[int], draws: int, kinds: Sequence[str], dims: Sequence[int]
) -> dict[str, dict[int, np.ndarray]]:
    """By kind of estimate and dimension, a number a seed."""
    return {
        kind: {dim: asked.saving(kind, dim, own, draws) for dim in dims}
        for kind in kinds
    }


def saving_rows(
    savings: Mapping[str, Mapping[int, np.ndarray]],
) -> list[_harness.Row]:
    """Directions over points of the ball, and how that grows with the dimension."""
    rows = []
    for kind, of in savings.items():
        case = f"directions over points of the ball: {kind}"
        for dim, values in of.items():
            m = _harness.mean(values)
            against = "d", m.value / dim
            row = _harness.averaged(case, f"d = {dim}", m, len(values), "", *against)
            rows.append(row)
        m = rules.slope(of)
        count = sum(map(len, of.values()))
        rows.append(_harness.averaged(case, "slope in d", m, count))
    return rows


def report(found: Sequence[Cell]) -> list[_harness.Row]:
    """The rows of cells; slopes; records that ours needs over those of others."""
    rows = [row for cell in found for row in cells.rows(cell)]
    rows += cells.slopes(found)
    for study in ("n", "n, tuned"):
        for metric in cells.METRICS:
            for other in (methods.PRINTED, methods.EXACT):
                rows += needed_rows(found, study, metric, other)
    return rows


def needed_rows(
    found: Sequence[Cell], study: str, metric: str, other: str
) -> list[_harness.Row]:
    """For the norms that the other method reaches with its two largest sizes."""
    name = cells.METRICS[metric]
    ours = cells.curve(cells.of(found, study, methods.OURS), "n", name)
    theirs = cells.curve(cells.of(found, study, other), "n", name)
    rows = []
    for n in list(theirs)[-2:] if ours else []:
        norm = float(np.mean(theirs[n]))
        ratio = rules.needed_ratio(ours, theirs, norm)
        case = f"{study}: records of ours over those of {other}, d = {DIM}"
        unit = f"for a {metric} of {norm:.3g}; {ratio}"
        rows.append(_harness.Row(case, f"at its n = {n}", ratio.value, unit))
    return rows
