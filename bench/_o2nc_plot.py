"""The plot of the scaling study."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench import _harness
from bench import _o2nc_cells as cells
from bench import _o2nc_methods as methods
from bench import _o2nc_rules as rules
from bench._o2nc_cells import Cell
from jaxdp.cli import plots

Style = tuple[str, str, str]
_GREY = "#777777"
_METHODS: dict[str, Style] = {
    methods.OURS: (plots.BLUE, "o", "-"),
    methods.FIRST: (plots.SKY, "s", "-"),
    methods.SEVERAL: (plots.GREEN, "^", "-"),
    methods.SEVERAL_FIRST: (plots.YELLOW, "v", "-"),
    methods.SCALAR: (plots.PURPLE, "D", "-"),
    methods.NAIVE: (_GREY, "P", "-"),
    methods.EXACT: (plots.ORANGE, "x", "--"),
    methods.PRINTED: (plots.ORANGE, "X", "-"),
    methods.KORNOWSKI: (plots.BLACK, "*", "-"),
}
_NOISES: dict[str, Style] = {
    "tree": (plots.GREEN, "^", "-"),
    "honaker": (plots.YELLOW, "v", "-"),
    "sqrt_toeplitz": (plots.SKY, "s", "-"),
    "blt_2": (plots.PURPLE, "D", "--"),
    "blt_3": (plots.BLUE, "o", "-"),
    "independent": (_GREY, "P", "-"),
}


def draw(
    found: Sequence[Cell], savings: Mapping[str, Mapping[int, np.ndarray]]
) -> Figure:
    """Norms against records, dimension and calls; what a gradient saves."""
    # Axes of their own: those of two rows share theirs in the figures of the library.
    fig = Figure(layout="constrained", figsize=(15, 9))
    axes = fig.subplots(2, 3)
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    (prescribed, tuned, noise), (dims, calls, saved) = axes
    titles = {
        prescribed: "as prescribed, d = 20",
        tuned: "tuned clips, windows and steps, d = 20",
        noise: "kinds of noise, restarts every 64 steps, d = 20",
    }
    _curves(prescribed, found, "n", "n", _METHODS, label=True)
    _curves(tuned, found, "n, tuned", "n", _METHODS)
    _curves(noise, found, "noise, n", "n", _NOISES, label=True)
    _curves(dims, found, "d, tuned", "dim", _METHODS)
    _against_calls(calls, found)
    for axis, title in titles.items():
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel("records n")
    dims.set_title(_title_of_dims(found), fontsize="medium")
    dims.set_xlabel("dimension d")
    for axis in (prescribed, tuned, noise, dims, calls):
        axis.set_ylabel("window norm")
    if noise.get_legend_handles_labels()[0]:
        noise.legend(frameon=False, fontsize="small")
    calls.set_title("tuned, d = 20, all sizes", fontsize="medium")
    calls.set_xlabel("values of a loss (and gradients) that a run takes")
    _savings(saved, savings)
    fig.legend(
        *prescribed.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        fontsize="medium",
        frameon=False,
    )
    return fig


def _title_of_dims(found: Sequence[Cell]) -> str:
    of = [c for c in found if c.study == "d, tuned"]
    several = {c.n for c in of if c.method in methods.MULTI_PASS}
    single = {c.n for c in of} - several
    title = f"tuned, n = {', '.join(f'{n:,}' for n in sorted(single))}"
    if several:
        title += f"; multi-pass {', '.join(f'{n:,}' for n in sorted(several))}"
    return title


def _curves(
    axis: Any,
    found: Sequence[Cell],
    study: str,
    along: str,
    styles: Mapping[str, Style],
    *,
    label: bool = False,
) -> None:
    sizes: set[int] = set()
    for name, style in styles.items():
        of = cells.of(found, study, name)
        x = np.array([getattr(cell, along) for cell in of])
        sizes |= set(x.tolist())
        _line(axis, x, of, style, name if label else None)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks: list[int] = []
    for size in sorted(sizes):  # Not so near to one another that they overlap.
        if not ticks or size >= 1.9 * ticks[-1]:
            ticks.append(size)
    axis.set_xticks(ticks, [f"{x:,}" for x in ticks], fontsize="small")
    _plain_numbers(axis)


def _plain_numbers(axis: Any) -> None:
    axis.minorticks_off()
    low, high = axis.get_ylim()
    ticks = [t for t in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0) if low <= t <= high]
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])


def _line(axis: Any, x: Any, of: Sequence[Cell], style: Style, label: Any) -> None:
    color, marker, line = style
    if not of:
        return
    found = [_harness.mean(cell.window_norm) for cell in of]
    axis.errorbar(
        x,
        [m.value for m in found],
        yerr=[m.half_width for m in found],
        color=color,
        marker=marker,
        linestyle=line,
        markersize=6,
        capsize=2,
        linewidth=1.3,
        label=label,
    )


def _against_calls(axis: Any, found: Sequence[Cell]) -> None:
    for name, style in _METHODS.items():
        of = cells.of(found, "n, tuned", name)
        x = np.array([cell.values + cell.gradients for cell in of])
        _line(axis, x, of, style, None)
    axis.set_xscale("log")
    axis.set_yscale("log")
    _plain_numbers(axis)


def _savings(axis: Any, savings: Mapping[str, Mapping[int, np.ndarray]]) -> None:
    colors = (plots.BLUE, plots.ORANGE, plots.GREEN)
    dims: set[int] = set()
    for color, (kind, of) in zip(colors, savings.items(), strict=False):
        x = np.array(list(of))
        dims |= set(x.tolist())
        found = [_harness.mean(v) for v in of.values()]
        m = rules.slope(of)
        axis.errorbar(
            x,
            [f.value for f in found],
            yerr=[f.half_width for f in found],
            color=color,
            marker="o",
            capsize=2,
            label=f"{kind}: slope {m.value:.2f} ± {m.half_width:.2f}",
        )
    x = np.array(sorted(dims))
    if len(x):
        axis.plot(x, x, color=plots.BLACK, linestyle=":", label="d")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(x, [str(d) for d in x])
        ticks = (0.2, 0.5, 1, 2, 5, 10, 20, 40)
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    axis.set_xlabel("dimension d")
    axis.set_ylabel("directions over points of the ball")
    axis.set_title("for the same error of an estimate", fontsize="medium")
    axis.legend(frameon=False, fontsize="small")
