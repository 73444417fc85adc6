"""The plot of the stationary-point study."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from bench import _sosp_cells as cells
from bench import _sosp_compare as compare
from bench import _sosp_rules as rules
from bench._sosp_cells import Cell
from jaxdp.cli import plots

_STYLES = {
    compare.OURS: (plots.BLUE, "o", "-"),
    "sqrt_toeplitz": (plots.SKY, "s", "--"),
    "tree": (plots.GREEN, "^", "-"),
    "independent": (plots.PURPLE, "v", "-"),
    compare.FIXED: (plots.YELLOW, "D", "--"),
    compare.SGD_TUNED: (plots.ORANGE, "X", ":"),
}
_LABELS = {compare.OURS: "certified (blt_3)"}


def draw(found: Sequence[Cell]) -> Figure:
    """Alpha against n; the share that is certified; records to a certificate."""
    fig, (left, middle, right) = plots.figure(1, 3, figsize=(15, 4.8))
    growing = [cell for cell in found if cell.table == "c"]
    for place, (method, style) in enumerate(_STYLES.items()):
        of = sorted((c for c in growing if c.method == method), key=lambda c: c.n)
        if of:
            _line(left, of, style, place)
            if method != compare.SGD_TUNED:
                _shares(middle, of, style, place)
    sizes = sorted({cell.n for cell in growing})
    for axis in (left, middle):
        axis.set_xscale("log")
        axis.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axis.minorticks_off()
        axis.set_xlabel("records n")
    left.set_yscale("log")
    left.set_ylabel("alpha: measured (filled), certified (hollow)")
    left.set_title(
        "cosine, from the saddle, ε = 1: medians, bars: 95% intervals",
        fontsize="medium",
    )
    middle.set_ylim(-0.03, 1.05)
    middle.set_ylabel("share certified, rightly")
    middle.set_title("the same runs", fontsize="medium")
    _bars(right, [cell for cell in found if cell.table == "b"])
    fig.legend(
        *left.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        fontsize="small",
        frameon=False,
    )
    return fig


def _line(axis, of: Sequence[Cell], style: tuple[str, str, str], place: int) -> None:
    color, marker, line = style
    n = np.array([cell.n for cell in of]) * (1 + 0.04 * (place - 2.5))
    values = np.array([np.median(compare.shown(cell)) for cell in of])
    low, high = np.array([rules.spread(compare.shown(cell)) for cell in of]).T
    axis.errorbar(
        n,
        values,
        yerr=[values - low, high - values],
        color=color,
        marker=marker,
        linestyle=line,
        markersize=5,
        capsize=2,
        linewidth=1.2,
        label=_LABELS.get(of[0].method, of[0].method),
    )
    if of[0].method != compare.SGD_TUNED:
        told = [cell.runs.promised for cell in of]
        axis.plot(
            n, told, color=color, marker=marker, linestyle="", mfc="white", alpha=0.6
        )


def _shares(axis, of: Sequence[Cell], style: tuple[str, str, str], place: int) -> None:
    color, marker, line = style
    n = np.array([cell.n for cell in of]) * (1 + 0.04 * (place - 2.5))
    flags = [cell.runs.certified & cell.runs.good for cell in of]
    values = np.array([f.mean() for f in flags])
    low, high = np.array([rules.share_interval(int(f.sum()), len(f)) for f in flags]).T
    axis.errorbar(
        n,
        values,
        yerr=[np.maximum(values - low, 0), np.maximum(high - values, 0)],
        color=color,
        marker=marker,
        linestyle=line,
        markersize=5,
        capsize=2,
        linewidth=1.2,
    )


def _bars(axis, found: Sequence[Cell]) -> None:
    """Records to a certificate over ours, of the methods that give any."""
    cases = list(dict.fromkeys(cell.case for cell in found))
    methods = [m for m in dict.fromkeys(cell.method for cell in found) if m in _BARRED]
    for column, case in enumerate(cases):
        of = {cell.method: cell for cell in found if cell.case == case}
        ours = cells.median(of[compare.OURS].runs.needed)
        for row, method in enumerate(methods):
            if method not in of:
                continue
            value = cells.median(of[method].runs.needed) / ours
            y = -row - 0.18 * (column - (len(cases) - 1) / 2)
            color = (plots.BLUE, plots.SKY, plots.ORANGE, plots.YELLOW)[column % 4]
            if np.isfinite(value):
                label = case.replace(", saddle", "") if row == 0 else None
                axis.barh(y, value, height=0.17, color=color, label=label)
            else:
                axis.text(0.02, y, "most runs out of data", va="center", fontsize=5)
    axis.axvline(1, color=plots.BLACK, linewidth=0.8)
    axis.set_yticks([-i for i in range(len(methods))], methods)
    axis.set_ylim(0.5 - len(methods), 0.5)
    axis.set_xlabel("records to a certificate, over those of certified settings")
    axis.legend(
        fontsize="x-small",
        frameon=False,
        ncols=2,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
    )


_BARRED = (
    compare.OURS,
    *compare.NOISES,
    compare.SHORT,
    compare.FIXED,
    compare.REFRESHES,
)
