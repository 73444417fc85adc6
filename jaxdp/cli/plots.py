"""Plots as PNG files, at ``path`` and under a ``title``, drawn without a display."""

import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: Okabe and Ito's colours, told apart by every kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, YELLOW, BLACK = "#56B4E9", "#E69F00", "#000000"

_LABELS = {
    "test_accuracy": "accuracy",
    "test_mse": "mean squared error",
    "test_loss": "mean loss",
    "test_token_f1": "F1 of the words",
    "test_captured_variance": "captured variance",
}
_SHARES = ("test_accuracy", "test_token_f1", "test_captured_variance")


def figure(rows: int = 1, columns: int = 1, **kwargs: Any) -> tuple[Figure, Any]:
    """Returns a figure and its axes, in the style of all our plots."""
    fig = Figure(layout="constrained", **kwargs)
    axes = fig.subplots(rows, columns, sharex=rows > 1)
    for axis in np.atleast_1d(axes).flat:
        plain(axis)
    return fig, axes


def plain(axis: Axes) -> None:
    """Gives an axis our grid and spines."""
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def titled(axis: Axes, text: str) -> None:
    """Gives an axis a title."""
    axis.set_title(text, loc="left", fontsize="medium")


def percent(axis: Axes) -> None:
    """Writes the numbers of a vertical axis as percentages."""
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")


def save(fig: Figure, path: pathlib.Path) -> None:
    """Writes a PNG at 150 dots per inch."""
    with warnings.catch_warnings():  # A name that the font lacks is shown as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        fig.savefig(path, dpi=150, format="png")


def progress(
    path: pathlib.Path,
    *,
    title: str,
    steps: Sequence[int],
    metrics: Sequence[float],
    metric: str,
    spent: Sequence[tuple[int, float]] | None,
    delta: float | None,
    start: float | None = None,
    returned: float | None = None,
    returned_is: str | None = None,
    groups: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Plots the metric on public records, and below it the budget, against steps.

    ``metrics`` are those of public records at ``steps``, ``spent`` is (t, epsilon after t
    steps), None where nothing bounds it, ``start`` the metric before training, ``returned``
    the metric of what is returned where that is not the last point, and ``returned_is``
    that in words. ``groups`` have errors at ``steps``, then perhaps of what is returned.
    """
    rows = 1 + bool(groups) + bool(spent)
    fig, axes = figure(rows, figsize=(7, 1.6 + 2 * rows))
    top: Axes = np.atleast_1d(axes)[0]
    fig.suptitle(title)
    top.plot(steps, metrics, color=BLUE, linewidth=1.6)
    if start is not None:
        top.axhline(start, color=ORANGE, linestyle="--", linewidth=1.2)
    label = _LABELS[metric]
    top.set_ylabel(f"{label}\non held-out public records")
    end = metrics[-1] if returned is None else returned
    if np.isfinite(end):
        top.plot(steps[-1], end, "o", color=BLUE, clip_on=False)
        said = f"final {label}: {end:.4g}"
        said += "" if returned is None else f", of {returned_is} (dot)"
        said += "" if start is None else f"; before training: {start:.4g} (dashed)"
        titled(top, said)
    if metric in _SHARES:
        top.set_ylim(0, 1)
        percent(top)
    if groups:
        _group_errors(axes[1], steps, groups)
    bottom: Axes = np.atleast_1d(axes)[-1]
    if spent:
        times, epsilons = zip(*spent, strict=True)
        bottom.plot(times, epsilons, color=ORANGE, linewidth=1.6)
        bottom.plot(times[-1], epsilons[-1], "o", color=ORANGE, clip_on=False)
        bottom.set_ylabel(f"spent: ε at δ = {delta:g}")
        titled(bottom, f"final ε: {epsilons[-1]:.4g}")
        bottom.set_ylim(bottom=0)
    bottom.set_xlabel("step")
    bottom.set_xlim(0, steps[-1])
    save(fig, path)


def _group_errors(
    axis: Axes, steps: Sequence[int], groups: Mapping[str, np.ndarray]
) -> None:
    """Plots the error of every group against steps, with the worst one marked."""
    named = len(groups) <= 3
    for i, (name, errors) in enumerate(groups.items()):
        color = (SKY, GREEN, PURPLE)[i] if named else "0.7"
        label = name if named else ("each group" if i == 0 else None)
        axis.plot(steps, errors[: len(steps)], color=color, linewidth=1, label=label)
    table = np.array(list(groups.values()))
    worst = np.max(table, axis=0, where=~np.isnan(table), initial=0)
    style: dict[str, Any] = {"color": ORANGE, "label": "the worst"}
    axis.plot(steps, worst[: len(steps)], linestyle="--", linewidth=1.6, **style)
    axis.plot(steps[-1], worst[-1], "o", color=ORANGE, clip_on=False)
    name = list(groups)[int(np.nanargmax(table[:, -1]))]
    said = f"final error of the worst group: {worst[-1]:.4g} ({name})"
    titled(axis, said)
    axis.set_ylabel("error of the groups\non the same records")
    axis.set_ylim(0, 1)
    percent(axis)
    axis.legend(frameon=False, fontsize="small", ncols=len(groups) + 1)


def dot_style(
    values: np.ndarray, least: float, most: float, all_: float
) -> dict[str, Any]:
    """Returns the style of so many dots; pixels, for there may be very many."""
    size = max(least, min(most, all_ / values.size))
    return {"s": size, "linewidths": 0, "rasterized": True, "alpha": 0.5}


def releases(
    path: pathlib.Path,
    *,
    title: str,
    releases: np.ndarray,
    noise_std: float | np.ndarray,
    num_parameters: int | None = None,
    released: str = "gradient",
    follows_movement: bool = False,
) -> None:
    """Plots the releases of each step against the level of the noise alone.

    ``releases``, shape=(num_steps, K), are slopes, or with ``num_parameters`` the norms of
    gradients of that many numbers; ``released`` says of what. ``noise_std`` is of each
    released number; for norms, it may be one a step, and ``follows_movement`` if it is
    smaller where a step moved less.
    """
    fig, axis = figure(figsize=(7, 3.9))
    num_steps, width = releases.shape
    steps = np.arange(1, num_steps + 1)
    dots = dot_style(releases, 1.0, 9.0, 2e4)
    if num_parameters is None:
        if noise_std:
            low, high = -2 * noise_std, 2 * noise_std
            label = f"noise alone: ±2 standard deviations (±{high:.3g})"
            style: dict[str, Any] = {"color": YELLOW, "alpha": 0.25, "linewidth": 0}
            axis.axhspan(low, high, **style, zorder=0, label=label)
        for k in range(width):
            name = "released slope" if k == 0 else None
            axis.scatter(steps, releases[:, k], color=BLUE, label=name, **dots)
        window = max(1, num_steps // 30)
        mean = np.convolve((releases**2).mean(1), np.ones(window) / window, "valid")
        at = steps[: len(mean)] + (window - 1) / 2
        label = f"released slopes: root mean square over {window} steps"
        axis.plot(at, np.sqrt(mean), color=BLACK, linewidth=1.6, label=label)
        if noise_std:
            label = f"noise alone: root mean square ({noise_std:.3g})"
            style = {"color": ORANGE, "linewidth": 1.4, "linestyle": "--"}
            axis.axhline(noise_std, **style, label=label)
        axis.set_ylabel("mean of the records' slopes\nalong the direction")
    else:
        label = f"released {released}"
        axis.plot(steps, releases[:, 0], color=BLUE, linewidth=1.2, label=label)
        level = np.broadcast_to(noise_std * np.sqrt(num_parameters), (num_steps,))
        low, high = f"{level.min():.3g}", f"{level.max():.3g}"
        between = low if low == high else f"{low} to {high}"
        label = f"noise alone ({'at most ' * follows_movement}{between})"
        axis.plot(steps, level, color=ORANGE, linestyle="--", label=label)
        axis.set_ylabel("Euclidean norm")
        axis.set_ylim(bottom=0)
    fig.suptitle(title)
    axis.set_xlabel("step")
    axis.set_xlim(0, num_steps)
    legend: dict[str, Any] = {"loc": "outside lower center", "ncols": 2}
    scale = 4 / np.sqrt(dots["s"])
    fig.legend(**legend, fontsize="small", frameon=False, markerscale=scale)
    save(fig, path)
