"""Where the paper's algorithms win: by the dimension d and the number of records n.

Three problems, each solved by an algorithm of Gonzalez, Guzman and Paquette and by the
simpler private methods that users are sent to:

- rock-paper-scissors among d - 3 dominated strategies (gap): Algorithm 1 (``Saddle``)
  against DP-SGDA, in one pass and with full batches;
- sparse regression over a simplex (excess risk): Algorithm 4 (``ConvexSimplex``) against
  ``FrankWolfe``, in one pass and with full batches;
- all three-way marginals of binary columns, whose d cells are the domain (largest error):
  Algorithm 5 (``SyntheticData``) against ``MWEM``, at once and by rounds.

Every method has the numbers that the planner (``jaxdp.recommend``) gives it, of games and
regressions from 256 public records; none is tuned by the error. All at (1, 1e-6),
replace-one, five seeds. A ratio is of the paper's algorithm over the best of the others;
the errors of the start say what is worth nothing (of marginals, against the population).
"""

import math
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from bench import _harness, problems
from bench import _planner_families as families
from bench import _saddle_games as games
from bench import _saddle_simplex as simplex
from jaxdp.cli import plots

SEEDS = 5
RATIO, START = "over the best of the others", "start"


class Problem(NamedTuple):
    """A problem of every size, and the paper's algorithm for it."""

    make: Callable[[int, int, int], families.Planned]  # of d, n and the number of seeds
    start: Callable[[int], float]  # the error of the uniform point, by d
    paper: str  # name of the candidate
    algorithm: str
    sizes: tuple[tuple[int, int], ...]  # (d, n)


def _columns(cells: int) -> int:
    return round(math.log2(cells))


def _uniform_marginals(cells: int) -> float:
    domains = (problems.binary_domain(_columns(cells), seed=s) for s in range(SEEDS))
    uniform = np.full(cells, 1 / cells)
    return float(np.mean([domain.max_error(uniform) for domain in domains]))


PROBLEMS = {
    "game": Problem(
        families.of_game,
        games.uniform_gap,
        "Saddle",
        "Algorithm 1 over DP-SGDA",
        tuple((d, n) for d in (30, 100, 1000) for n in (1000, 10_000)),
    ),
    "regression": Problem(
        families.of_regression,
        lambda d: simplex.regression(d)[0].excess_fn(np.full(d, 1 / d)),
        "ConvexSimplex",
        "Algorithm 4 over Frank-Wolfe",
        tuple((d, n) for d in (100, 1000) for n in (1000, 10_000)),
    ),
    "marginals": Problem(
        lambda d, n, seeds: families.of_table(_columns(d), n, seeds),
        _uniform_marginals,
        "mirror_descent",
        "Algorithm 5 over MWEM and noisy marginals",
        tuple((d, n) for d in (256, 4096) for n in (1000, 10_000)),
    ),
}


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """Rows of every problem and size; quick: the smallest domain of marginals alone."""
    rows: list[_harness.Row] = []
    for name, problem in PROBLEMS.items():
        if quick and name != "marginals":
            continue
        for d, n in problem.sizes[: 1 if quick else None]:
            rows += _rows(name, problem, d, n, 2 if quick else SEEDS)
    if out is not None:
        plots.save(plot(rows), out / "crossing.png")
    return rows


def _rows(
    name: str, problem: Problem, d: int, n: int, seeds: int
) -> Iterator[_harness.Row]:
    case = f"{name}, d = {d}, n = {n}"
    yield _harness.Row(case, START, problem.start(d), "")
    found, errors_of = problem.make(d, n, seeds)
    means = {}
    for one in found.candidates:
        method = families.name_of(one)
        errors = errors_of(one)
        means[method] = _harness.mean(errors)
        yield _harness.averaged(case, method, means[method], len(errors))
    ours = means.pop(problem.paper).value
    other = min(means, key=lambda method: means[method].value)
    ratio = ours / means[other].value
    yield _harness.Row(case, RATIO, ratio, "", other, ratio)


def plot(rows: list[_harness.Row]) -> Figure:
    """The ratios against the number of records, a panel for each problem."""
    ratios = {row.case: row.ratio for row in rows if row.metric == RATIO}
    there = {case.partition(",")[0] for case in ratios}
    shown = {name: problem for name, problem in PROBLEMS.items() if name in there}
    fig, axes = plots.figure(1, len(shown), figsize=(1 + 3.5 * len(shown), 4))
    axes = np.atleast_1d(axes)
    styles = [(plots.BLUE, "o"), (plots.ORANGE, "s"), (plots.GREEN, "^")]
    for axis, (name, problem) in zip(axes, shown.items(), strict=True):
        dims = sorted({d for d, _ in problem.sizes})
        for d, (color, marker) in zip(dims, styles, strict=False):
            sizes = [n for at, n in problem.sizes if at == d]
            values = [ratios.get(f"{name}, d = {d}, n = {n}", math.nan) for n in sizes]
            axis.plot(sizes, values, color=color, marker=marker, label=f"d = {d:,}")
        axis.axhline(1, color=plots.BLACK, linewidth=1, linestyle=":")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("records n")
        axis.set_title(problem.algorithm, fontsize="medium")
        axis.legend(fontsize="small", frameon=False)
    axes[0].set_ylabel("error over the best of the others")
    return fig
