r"""Private second-order stationary points: certificates, what they cost, other methods.

Everything is under replace-one at delta = 1e-6, from exact saddles (and maxima) of
problems in 10 dimensions whose expected loss has a closed form: a sum of cosines, and the
factorisation of a matrix of rank one. "alpha" is the least for which the returned point is
alpha-second-order stationary for the expected loss. Every seed has its own records and
noise.

(a) the settings of a prototype of the method, and its figures beside ours: medians, largest
    values and shares that agree, or not, with those of so many runs
    (``bench/_sosp_rules.py`` says when); and a released Hessian, which it has not;
(b) the library's certified settings with their default noise, and simpler methods at the
    same budget on the same records (``bench/_sosp_compare.py`` has them);
(c) alpha against n at epsilon 1, each kind of noise with the accuracy for which its own
    expected records are n, fixed batches with that of ours at n/2 or n/4, DP-SGD with its
    best batch; the slope is that of a line through the logarithms of all runs. The
    paper's rates, n^(-1/2) where privacy decides and n^(-1/3) beyond, are for the longest
    ways that the assumptions allow, of a length that grows as alpha falls. From this saddle
    the way has one length, so alpha falls faster.

``--out DIR`` draws (c), and the records of (b). The runs of each part are kept in
``DIR/sosp_parts`` and taken from there by the next run, so that a study that is stopped
goes on; delete the folder to measure anew.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

from bench import _harness
from bench import _sosp_cells as cells
from bench import _sosp_compare as compare
from bench import _sosp_plot as plot
from bench import _sosp_prototype as prototype
from bench._sosp_cells import Cell
from jaxdp.cli import plots

PNG = "sosp.png"
PARTS = "sosp_parts"
Part = Callable[[], list[Cell]]
SIZES = (
    compare.Size("cosine", 1.0, 100_000),
    compare.Size("cosine", 2.0, 50_000),
    compare.Size("factorization", 1.0, 1_500_000, 0.005, 20, 8),
    compare.Size("factorization", 2.0, 800_000, 0.005, 20, 8),
)
GROWING = (20_000, 60_000, 200_000, 600_000)
#: Of the prototype's rows: a few that take seconds, for a quick run.
QUICK = (4, 7)
QUICK_METHODS = (compare.OURS, compare.REFRESHES, compare.NO_ESCAPE)
QUICK_SIZE = dataclasses.replace(SIZES[1], n=20_000, others=2)


def parts() -> dict[str, Part]:
    """The parts of the kept study."""
    found: dict[str, Part] = {}
    # Those of one plan have the same records. A tracked Hessian takes long.
    for name, of in prototype.groups().items():
        seeds = range(20 if "tracked" in name else 40)
        found[f"a_{name}"] = functools.partial(prototype.cells, of, seeds)
    found["a_released"] = functools.partial(compare.released, range(40))
    for i, size in enumerate(SIZES):
        seeds, tuning = range(size.seeds), range(min(4, size.others // 4))
        found[f"b_{i}"] = functools.partial(compare.table_b, size, seeds)
        found[f"b_{i}_tuned"] = functools.partial(
            compare.table_b_tuned, size, seeds, tuning
        )
    for n in GROWING:
        twenty, four = range(20), range(4)
        found[f"c_{n}"] = functools.partial(compare.table_c, n, twenty, four)
        found[f"c_{n}_fixed"] = functools.partial(
            compare.table_c_fixed, n, twenty, four
        )
    return found


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
    if quick:
        found = prototype.cells([prototype.CASES[i] for i in QUICK], range(3))
        found += compare.table_b(QUICK_SIZE, range(3), QUICK_METHODS)
        return report(found)
    found = [
        cell for name, part in parts().items() for cell in run_part(name, part, out)
    ]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plots.save(plot.draw(found), out / PNG)
    return report(found)


def report(found: Sequence[Cell]) -> list[_harness.Row]:
    """The rows of cells, table by table."""
    rows: list[_harness.Row] = []
    first = [cell for cell in found if cell.table == "a"]
    for cell in first:
        rows += cells.rows(cell)
    rows += cells.agreement(first)
    second = [cell for cell in found if cell.table == "b"]
    for case in dict.fromkeys(cell.case for cell in second):
        rows += compare.rows_b([cell for cell in second if cell.case == case])
    return rows + compare.rows_c([cell for cell in found if cell.table == "c"])
