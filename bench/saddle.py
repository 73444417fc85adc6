r"""Private saddle points, convex problems and synthetic data: what they reach, and others.

Everything is at (1, 1e-6)-DP under replace-one. Tables (a) to (e):

(a) algorithm 1 with T and the step size of the least explicit bound;
(b) algorithm 1 with T tuned, beside Euclidean DP-SGDA with its steps, its step size and,
    in the rows that say so, its clip and the mean that it puts out tuned as well.
    Algorithm 1 is shown with as many choices too: a clip that cuts into records, and the
    mean of all vertices. Neither choice is charged: this compares methods and is no
    private procedure;
(c) algorithm 3 with the paper's parameters and with certified ones;
(d) algorithm 4 likewise, with and without the step size's cap 1 / (4 L0 q), which only the
    proof needs, and with fewer steps; beside it Frank-Wolfe, over one batch a step or all
    records, and without privacy;
(e) algorithm 5 with the printed and the corrected number of steps, and with certified step
    sizes for queries of range 1 (0/1 marginals, the plan's default) and for range 2, half
    of them; beside it MWEM at the same zCDP.

"gap" is the population's duality gap of the point that is put out, exact; "excess risk" is
the population's; "largest error" is that of a query on the records. "paper" rows have the
paper's step sizes and what epsilon they spend. Means over seeds, of data and draws (for
(e) of populations too), with the 95% interval of Student's t.

"prototype" is a float64 NumPy implementation that shares no code with the library
(``bench/_saddle_cells.py`` says when a mean agrees with it). The DP-SGDA of table (b) is
tuned over another grid than the prototype's, so there a difference is one of grids; its
figures in (d) count as one run each, and in (e) as one population, which tells less.

With ``--out DIR`` the cells of each part are kept in ``DIR/saddle_parts``, and taken from
there by the next run: a study that is stopped goes on. Delete the folder to measure anew.
It also draws the gap against d.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent import futures

import numpy as np
from matplotlib.figure import Figure

from bench import _harness
from bench import _saddle_cells as cells
from bench import _saddle_games as games
from bench import _saddle_simplex as simplex
from bench._saddle_cells import Cell
from jaxdp.cli import plots

PNG = "saddle.png"
PARTS = "saddle_parts"
Part = Callable[[], list[Cell]]


# --- what is run -----------------------------------------------------------------------


def full_parts() -> dict[str, Part]:
    """The parts of the kept study, the ones that are looked at first in front."""
    twenty, parts = range(20), {}
    for d, n in games.TUNED:
        parts[f"b_saddle_{d}_{n}"] = functools.partial(games.tuned, d, n, twenty)
    for d, n in games.EXPLICIT:
        parts[f"a_{d}_{n}"] = functools.partial(games.explicit, d, n, twenty)
    for (d, n), same in games.SAME_STEPS.items():
        parts[f"a_same_{d}_{n}"] = functools.partial(games.explicit, d, n, twenty, same)
    for (d, n), (steps, factors, clips, few) in games.SGDA_GRIDS.items():
        parts[f"b_sgda_{d}_{n}"] = functools.partial(
            games.sgda,
            d,
            n,
            twenty,
            num_steps=steps,
            step_factors=factors,
            clip_factors=clips,
            tuning_seeds=few,
        )
    for n in (10_000, 100_000):
        parts[f"paper_{n}"] = functools.partial(games.paper, 100, n, twenty)
        for kind in ("printed T", "corrected T", *_by_range(300, 1000, 3000)):
            parts[f"e_{n}_{_slug(kind)}"] = functools.partial(
                simplex.synthetic, kind, n, twenty
            )
        parts[f"e_{n}_mwem"] = functools.partial(
            simplex.mwem, n, twenty, num_rounds=(20, 40, 80, 160, 320), tried_on=2
        )
        for kind in ("paper", "certified, capped", "certified", "by the bound"):
            parts[f"d_{n}_{_slug(kind)}"] = functools.partial(
                simplex.convex, kind, n, twenty
            )
        for kind in ("T = 64", "T = 256"):
            parts[f"d_{n}_{_slug(kind)}"] = functools.partial(
                simplex.convex, kind, n, twenty
            )
        parts[f"d_{n}_frank_wolfe"] = functools.partial(simplex.frank_wolfe, n, twenty)
    for n, levels in ((100_000, 2), (1_000_000, 2)):
        for kind in ("paper", "certified"):
            parts[f"c_{n}_{kind}"] = functools.partial(
                games.bias_reduced, kind, n, range(levels), twenty
            )
    parts["b_mirror_prox"] = _references
    return parts


def quick_parts() -> dict[str, Part]:
    """Small cells, three seeds; tuned parameters are taken from what tuning found."""
    three = range(3)
    parts: dict[str, Part] = {}
    for d, n in ((10, 1000), (100, 1000), (10, 10_000), (100, 10_000)):
        parts[f"a_{d}_{n}"] = functools.partial(games.explicit, d, n, three)
    for d, steps in ((10, 128), (100, 32)):
        parts[f"b_saddle_{d}"] = functools.partial(
            games.tuned, d, 10_000, three, num_steps=(steps,)
        )
    for d, steps, factors in ((10, 16, (3.0, 10.0)), (100, 8, (10.0, 30.0))):
        parts[f"b_sgda_{d}"] = functools.partial(
            games.sgda,
            d,
            10_000,
            three,
            num_steps=(steps,),
            step_factors=factors,
            clip_factors=(1.0, 0.2),
            tuning_seeds=2,
        )
    parts["paper"] = functools.partial(games.paper, 10, 10_000, three)
    for kind in ("paper", "T = 64"):
        parts[f"d_{_slug(kind)}"] = functools.partial(
            simplex.convex, kind, 10_000, three
        )
    for kind in ("corrected T", "T = 300, range 1"):
        parts[f"e_{_slug(kind)}"] = functools.partial(
            simplex.synthetic, kind, 10_000, three
        )
    parts["e_mwem"] = functools.partial(
        simplex.mwem, 10_000, three, num_rounds=(20, 40), tried_on=1
    )
    parts["b_mirror_prox"] = _references
    return parts


def _by_range(*num_steps: int) -> list[str]:
    return [f"T = {t}, range {r}" for t in num_steps for r in (1, 2)]


def _slug(kind: str) -> str:
    return kind.replace(" = ", "").replace(", ", "_").replace(" ", "_")


def _references() -> list[Cell]:
    return [games.without_privacy(d) for d in (10, 100)]


def run_part(name: str, part: Part, out: pathlib.Path | None) -> list[Cell]:
    """A part's cells: measured, or as kept in ``out``."""
    path = None if out is None else out / PARTS / f"{name}.json"
    if path is not None and path.exists():
        return cells.load(path)
    found = part()
    if path is not None:
        cells.save(path, found)
    return found


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """The study's rows; with ``out`` its plot, and its parts to go on from."""
    parts = quick_parts() if quick else full_parts()
    kept = None if quick else out

    def one(name: str) -> list[Cell]:
        return run_part(name, parts[name], kept)

    with futures.ThreadPoolExecutor(os.cpu_count() if quick else 1) as pool:
        every = [cell for found in pool.map(one, parts) for cell in found]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plots.save(draw(every), out / PNG)
    return report(every)


# --- what is shown ---------------------------------------------------------------------


def report(found: Sequence[Cell]) -> list[_harness.Row]:
    """The rows of cells, in the order of tables, and what follows from several."""
    rows: list[_harness.Row] = []
    for table in ("a", "paper", "b", "c", "d", "e"):
        of = [cell for cell in found if cell.table == table]
        for cell in sorted(of, key=lambda cell: (cell.n, cell.d)):
            rows += cells.rows(cell)
        if table == "a":
            rows += _slopes(of)
        if table == "b":
            rows += _growths(of) + _between(of, games.PLAIN, games.SGDA_PLAIN)
            rows += _between(of, games.ALIKE, games.SGDA_ALIKE)
        if table == "e":
            rows += _against_mwem(of)
    return rows + _against_paper(found) + cells.agreement(found)


def _slopes(found: Sequence[Cell]) -> list[_harness.Row]:
    """Of the gap in n from 1e4 on, where privacy decides; theory says -1/2."""
    rows = []
    own = [c for c in found if c.n >= 10_000 and c.method == "algorithm 1, certified"]
    for d in sorted({cell.d for cell in own}):
        of = sorted((c for c in own if c.d == d), key=lambda c: c.n)
        if len(of) < 2:
            continue
        m = cells.slope(of)
        unit = f"n = {of[0].n} to {of[-1].n}"
        rows.append(
            _harness.Row(
                f"(a) d = {d}",
                "slope in n",
                m.value,
                unit,
                "-1/2",
                -2 * m.value,
                m.half_width,
            )
        )
    return rows


def _growths(found: Sequence[Cell]) -> list[_harness.Row]:
    """Returns by what factor the gap grows from the least to the largest d."""
    rows = []
    for n in sorted({cell.n for cell in found}):
        for method in dict.fromkeys(cell.method for cell in found):
            of = [c for c in found if c.n == n and c.method == method]
            of.sort(key=lambda c: c.d)
            if len(of) < 2 or n == 0:
                continue
            value, low, high = cells.growth(of)
            metric = f"growth, d = {of[0].d} to {of[-1].d}"
            unit = f"[{low:.3g}, {high:.3g}] (95%)"
            rows.append(
                _harness.Row(f"(b) n = {n}, {method}", metric, value, unit, "d", value)
            )
    return rows


def _between(found: Sequence[Cell], one: str, other: str) -> list[_harness.Row]:
    """The gap of one method over another's."""
    rows = []
    by = {(cell.n, cell.d, cell.method): cell for cell in found}
    for (n, d, method), cell in by.items():
        if method == one and (n, d, other) in by:
            value, low, high = cells.growth([by[n, d, other], cell])
            unit = f"[{low:.3g}, {high:.3g}] (95%)"
            case = f"(b) {cells.size(n, d)}, {one}"
            rows.append(
                _harness.Row(case, "gap over the other's", value, unit, other, value)
            )
    return rows


def _against_mwem(found: Sequence[Cell]) -> list[_harness.Row]:
    """The least error of algorithm 5 over MWEM's."""
    rows = []
    for n in sorted({cell.n for cell in found}):
        of = {c.method: c for c in found if c.n == n}
        other = of.pop("MWEM, tuned", None)
        if other is None or not of:
            continue
        best = min(of.values(), key=lambda c: c.mean)
        value, low, high = cells.growth([other, best])
        unit = f"[{low:.3g}, {high:.3g}] (95%); {best.method}"
        metric = "largest error over MWEM's"
        rows.append(
            _harness.Row(
                f"(e) n = {n}, best of algorithm 5", metric, value, unit, "MWEM", value
            )
        )
    return rows


#: A table's size, and what is to be divided: certified by the paper's.
PAIRS = (
    ("paper", "theorem 4.1's T, all of epsilon", "theorem 4.1"),
    ("a", "algorithm 1, certified", "theorem 4.1"),
    ("c", "algorithm 3, certified", "algorithm 3, paper"),
    ("d", "algorithm 4, certified", "algorithm 4, paper"),
    ("e", "algorithm 5, T = 1000, range 1", "algorithm 5, corrected T"),
)


def _against_paper(found: Sequence[Cell]) -> list[_harness.Row]:
    """What exact accounting is worth: outcomes at the same epsilon and delta."""
    rows = []
    by = {(cell.size, cell.method): cell for cell in found}
    for table, ours, theirs in PAIRS:
        for (size, method), cell in by.items():
            if method != ours or (size, theirs) not in by:
                continue
            value, low, high = cells.growth([by[size, theirs], cell])
            unit = f"[{low:.3g}, {high:.3g}] (95%); at equal epsilon"
            case = f"({table}) {size}, {ours}"
            metric = f"{cell.metric} over the paper's parameters'"
            rows.append(_harness.Row(case, metric, value, unit, theirs, value))
    return rows


# --- plot ------------------------------------------------------------------------------

_STYLES = {
    games.PLAIN: (plots.BLUE, "o", "-"),
    games.ALIKE: (plots.BLUE, "s", "--"),
    games.SGDA_PLAIN: (plots.ORANGE, "^", "-"),
    games.SGDA_ALIKE: (plots.ORANGE, "v", "--"),
}


def draw(found: Sequence[Cell]) -> Figure:
    """The gap against d, table (b), a panel for each n."""
    of = [cell for cell in found if cell.table == "b" and cell.n]
    sizes = sorted({cell.n for cell in of})
    fig, axes = plots.figure(1, len(sizes), figsize=(10, 4.8))
    for axis, n in zip(np.atleast_1d(axes), sizes, strict=True):
        dims = sorted({cell.d for cell in of if cell.n == n})
        for method, (color, marker, line) in _STYLES.items():
            line_of = sorted(
                (c for c in of if c.n == n and c.method == method), key=lambda c: c.d
            )
            means = [_harness.mean(cell.values) for cell in line_of]
            axis.errorbar(
                [cell.d for cell in line_of],
                [m.value for m in means],
                yerr=[m.half_width for m in means],
                color=color,
                marker=marker,
                linestyle=line,
                markersize=4,
                capsize=3,
                label=method if n == sizes[0] else None,
            )
        axis.plot(
            dims,
            [games.uniform_gap(d) for d in dims],
            color=plots.BLACK,
            linestyle=":",
            label="uniform points" if n == sizes[0] else None,
        )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(dims, [f"{d}" for d in dims])
        axis.minorticks_off()
        ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ylim(0.015, 1.3)
        axis.set_xlabel("dimension d of either player")
        axis.set_title(f"n = {n}", fontsize="medium")
    np.atleast_1d(axes)[0].set_ylabel("duality gap")
    num = min((len(cell.values) for cell in of), default=0)
    fig.suptitle(
        "Rock-paper-scissors among d - 3 dominated strategies at ε = 1, δ = $10^{-6}$: "
        f"means of {num} seeds, bars: 95% intervals",
        fontsize="medium",
    )
    fig.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return fig
