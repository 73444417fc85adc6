"""Accuracy on digits: DPZero beside DP-GD and what no privacy would reach.

A linear softmax model on 1437 training records, judged on 360 held-out public ones;
full batches, delta = 1e-5, replace-one. Hyper-parameters are those of the command line
(``jaxdp/cli/recipes.py``), chosen on validation splits of the training records. Every
figure is a mean over insecure seeds with the 95% interval of Student's t; the seed draws
directions and noise, while the split of the data stays.

With ``--out DIR`` it draws accuracy against epsilon, the post-processing, and accuracy
over clip and step size.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import jaxdp
from bench import _harness
from bench._harness import Mean, mean
from jaxdp import models, training
from jaxdp.cli import plots, recipes
from jaxdp.cli.recipes import Recipe
from jaxdp.core.averaging import polyak_output
from jaxdp.models.networks import Network

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
NAMES = {
    "dpzero": "DPZero",
    "plain": "DPZero, plain",
    "dpgd": "DP-GD",
    "mezo": "MeZO, not private",
    "gd": "gradient descent, not private",
}


class Cell(NamedTuple):
    """One set of runs that differ by their seed alone."""

    algorithm: recipes.Algorithm
    recipe: Recipe
    epsilon: float  # without meaning where the algorithm is not private


# --- runs --------------------------------------------------------------------------


@functools.lru_cache
def problem() -> tuple[models.Dataset, Network, Any]:
    """The data, the model, and its initial parameters, which are zero."""
    dataset = models.load("digits")
    network = models.network_for(dataset)
    return dataset, network, network.init(jax.random.key(0))


def accuracies(cell: Cell, seeds: Iterable[int]) -> np.ndarray:
    """Test accuracy of each seed; shape=(seeds, 2): the last iterate, the average."""
    dataset, network, params = problem()
    plan = recipes.make_plan(
        cell.recipe,
        cell.algorithm,
        num_examples=dataset.num_examples,
        epsilon=cell.epsilon,
        delta=DELTA,
    )
    rows = []
    for seed in seeds:
        result = jaxdp.fit(
            plan,
            jaxdp.Keys.insecure(seed),
            params,
            dataset.train,
            value_fn=network.value_fn,
            optimizer=recipes.make_optimizer(cell.recipe),
        )
        points = [result.params]
        if cell.recipe.average:
            points.append(polyak_output(result.info.state))
        scores = [float(network.metric_fn(p, *dataset.test)) for p in points]
        rows.append((scores[0], scores[-1]))
    return np.array(rows)


def run_cells(cells: Iterable[Cell], seeds: Sequence[int]) -> dict[Cell, np.ndarray]:
    """:func:`accuracies` of every cell, as many at once as there are cores."""
    # What has no randomness needs one seed: full batches, no noise, no directions.
    jobs = {cell: seeds[:1] if cell.algorithm == "gd" else seeds for cell in set(cells)}
    # Long ones first, so that none is left alone at the end.
    order = sorted(jobs, key=lambda c: -c.recipe.num_steps * c.recipe.num_directions)
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda cell: accuracies(cell, jobs[cell]), order)
        return dict(zip(order, results, strict=True))


# --- the study ---------------------------------------------------------------------


def cell(name: str, epsilon: float) -> Cell:
    """The cell of a method at a budget, with the command line's recipe."""
    if name == "plain":
        # The average rides along: it changes nothing about the run.
        plain = recipes.for_budget(recipes.PLAIN, epsilon)
        averaged = recipes.find("digits", "linear", "dpzero", epsilon).average
        return Cell("dpzero", dataclasses.replace(plain, average=averaged), epsilon)
    algorithm: Any = name
    return Cell(
        algorithm, recipes.find("digits", "linear", algorithm, epsilon), epsilon
    )


def variants(epsilon: float) -> dict[str, tuple[Cell, int]]:
    """Post-processing, each alone and together: cell, and column of the accuracies.

    Step sizes were chosen for each on validation splits: cosine steps, which are half as
    long on average, start at 1.5 times the size.
    """
    plain, best = cell("plain", epsilon), cell("dpzero", epsilon)

    def changed(base: Cell, factor: float, **changes: Any) -> Cell:
        rate = base.recipe.learning_rate * factor
        recipe = dataclasses.replace(base.recipe, learning_rate=rate, **changes)
        return base._replace(recipe=recipe)

    return {
        "plain": (plain, 0),
        "Polyak averaging": (plain, 1),
        "momentum 0.9": (changed(plain, 1.0, momentum=0.9), 0),
        "cosine steps": (changed(plain, 1.5, schedule="cosine"), 0),
        "K = 4 directions": (best, 0),
        "K = 4 and averaging": (best, 1),
        "all four": (changed(best, 1.5, momentum=0.9, schedule="cosine"), 1),
    }


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """The study's rows; with ``out`` its plots."""
    seeds = range(3 if quick else 5)
    epsilons = (0.5, 2.0, 8.0) if quick else EPSILONS
    tuned = (2.0,) if quick else (2.0, 8.0)
    curves = {name: {e: cell(name, e) for e in epsilons} for name in ("dpzero", "dpgd")}
    if not quick:
        curves["plain"] = {e: cell("plain", e) for e in epsilons}
    levels = {name: cell(name, 0.0) for name in ("mezo", "gd")}
    tables = {e: variants(e) for e in tuned}
    wanted = [c for curve in curves.values() for c in curve.values()]
    wanted += levels.values()
    wanted += [c for table in tables.values() for c, _ in table.values()]
    found = run_cells(wanted, seeds)

    def point(name: str, of: Cell) -> Mean:
        column = 0 if name == "plain" else 1
        return mean(found[of][:, column])

    level_means = {name: point(name, c) for name, c in levels.items()}
    curve_means = {
        name: {e: point(name, c) for e, c in curve.items()}
        for name, curve in curves.items()
    }
    table_samples = {
        e: {name: found[c][:, column] for name, (c, column) in table.items()}
        for e, table in tables.items()
    }
    rows = _headline(curve_means, level_means, len(seeds))
    for e, samples in table_samples.items():
        rows += _post_processing(e, samples)
    grid = heat_map(quick) if out is not None or not quick else None
    if grid is not None:
        rows.append(grid.best())
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plots.save(_draw_curves(curve_means, level_means, len(seeds)), out / CURVES)
        plots.save(_draw_variants(table_samples, len(seeds)), out / VARIANTS)
        assert grid is not None
        plots.save(_draw_grid(grid), out / GRID)
    return rows


def _headline(
    curves: dict[str, dict[float, Mean]], levels: dict[str, Mean], num_seeds: int
) -> list[_harness.Row]:
    best = levels["mezo"].value
    cases = {NAMES[name]: m for name, m in levels.items()}
    for name, curve in curves.items():
        cases |= {f"{NAMES[name]}, epsilon {e:g}": m for e, m in curve.items()}
    return [
        _row(case, m, num_seeds, "MeZO", m.value / best) for case, m in cases.items()
    ]


def _row(
    case: str, m: Mean, num_seeds: int, baseline: str, ratio: float
) -> _harness.Row:
    count = num_seeds if m.half_width else 1  # Without noise all seeds are the same.
    return _harness.averaged(case, "test accuracy", m, count, "share", baseline, ratio)


def _post_processing(
    epsilon: float, samples: dict[str, np.ndarray]
) -> list[_harness.Row]:
    first, *_ = samples.values()
    plain = mean(first).value
    rows = []
    for name, values in samples.items():
        m = mean(values)
        case = f"epsilon {epsilon:g}: {name}"
        rows.append(_row(case, m, len(values), "plain", m.value / plain))
    return rows


# --- clip and step size ------------------------------------------------------------


class Grid(NamedTuple):
    """Validation accuracy of plain DPZero over clip and step size."""

    clips: tuple[float, ...]
    rates: tuple[float, ...]
    accuracy: np.ndarray  # shape=(clips, rates); mean over seeds
    num_steps: int
    num_seeds: int
    epsilon: float

    def best(self) -> _harness.Row:
        """The largest accuracy, and where it is."""
        i, j = np.unravel_index(np.argmax(self.accuracy), self.accuracy.shape)
        where = f"clip {self.clips[i]:g}, step size {self.rates[j]:g}"
        return _harness.Row(
            f"epsilon {self.epsilon:g}: best of {self.accuracy.size}: {where}",
            "validation accuracy",
            float(self.accuracy.max()),
            f"n={self.num_seeds}",
        )


def heat_map(quick: bool, epsilon: float = 2.0) -> Grid:
    """Plain DPZero on a validation split, for every clip and step size.

    One program for each clip, which is a constant of the plan; step sizes and seeds are
    lanes of it.
    """
    clips = (0.25, 1.0, 4.0) if quick else (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    rates = tuple(0.0125 * 4**i for i in range(3))
    if not quick:
        rates = tuple(0.00625 * 2**i for i in range(7))
    seeds = range(1 if quick else 2)
    plain = recipes.for_budget(recipes.PLAIN, epsilon)

    def row(clip: float) -> np.ndarray:
        recipe = dataclasses.replace(plain, l2_clip_norm=clip)
        return np.mean(_lanes(recipe, epsilon, rates, seeds), axis=0)

    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        accuracy = np.stack(list(pool.map(row, clips)))
    return Grid(clips, rates, accuracy, plain.num_steps, len(seeds), epsilon)


def _lanes(
    recipe: Recipe, epsilon: float, rates: Sequence[float], seeds: Sequence[int]
) -> np.ndarray:
    """Validation accuracy, shape=(seeds, rates), in one compiled program."""
    whole, network, params = problem()
    dataset = models.validation_split(whole)
    plan = recipes.make_plan(
        recipe,
        "dpzero",
        num_examples=dataset.num_examples,
        epsilon=epsilon,
        delta=DELTA,
    )
    # The step size is a number of the state, so lanes may differ in it.
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
    keys = [jaxdp.Keys.insecure(seed) for seed in seeds]
    makers = [plan.transform(k) for k in keys]
    carries = [training.start(plan, maker, optimizer, params) for maker in makers]
    program = training.make_program(plan, makers[0], optimizer, network.value_fn)

    def one(rate: jax.Array, carry: training.Carry, keys: jaxdp.Keys) -> jax.Array:
        maker, sgd = carry.opt_state
        sgd = sgd._replace(hyperparams={"learning_rate": rate})
        carry = carry._replace(opt_state=(maker, sgd))
        done = program(carry, keys, dataset.train, 0, plan.num_steps)
        return network.metric_fn(done.params, *dataset.test)

    over_rates = jax.vmap(one, in_axes=(0, None, None))
    over_both = jax.jit(jax.vmap(over_rates, in_axes=(None, 0, 0)))
    carries, keys = (jax.tree.map(lambda *x: jnp.stack(x), *c) for c in (carries, keys))
    return np.asarray(over_both(jnp.asarray(rates, jnp.float32), carries, keys))


# --- plots -------------------------------------------------------------------------

CURVES = "accuracy_against_epsilon.png"
VARIANTS = "post_processing.png"
GRID = "accuracy_over_clip_and_step_size.png"


def _percent(value: float, _: int | None = None) -> str:
    return f"{100 * value:.0f}%"


def _draw_curves(
    curves: dict[str, dict[float, Mean]], levels: dict[str, Mean], num_seeds: int
) -> Figure:
    fig, axis = plots.figure(figsize=(7, 4.8))
    styles = {
        "dpzero": (plots.BLUE, "o", "-"),
        "plain": (plots.SKY, "s", "--"),
        "dpgd": (plots.ORANGE, "^", "-"),
        "mezo": (plots.GREEN, None, "-."),
        "gd": (plots.BLACK, None, ":"),
    }
    labels = NAMES | {
        "dpzero": "DPZero: 4 directions, averaged",
        "plain": "DPZero: 1 direction, last iterate",
    }
    for name, m in levels.items():
        color, _, line = styles[name]
        axis.axhline(m.value, color=color, linestyle=line, label=NAMES[name])
        low, high = m.value - m.half_width, m.value + m.half_width
        axis.axhspan(low, high, color=color, alpha=0.12, linewidth=0)
    # Apart by a little, so that error bars do not hide each other.
    for shift, (name, curve) in zip((1.0, 1.03, 0.97), curves.items(), strict=False):
        color, marker, line = styles[name]
        axis.errorbar(
            [e * shift for e in curve],
            [m.value for m in curve.values()],
            yerr=[m.half_width for m in curve.values()],
            color=color,
            marker=marker,
            linestyle=line,
            capsize=3,
            label=labels[name],
        )
    epsilons = list(next(iter(curves.values())))
    axis.set_xscale("log")
    axis.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axis.minorticks_off()
    axis.set_xlabel("budget ε at δ = $10^{-5}$ (replace-one; log scale)")
    axis.set_ylabel("accuracy on held-out public records")
    axis.yaxis.set_major_formatter(_percent)
    axis.set_ylim(top=1)
    axis.set_title(
        f"Digits, linear model: mean of {num_seeds} seeds, bars and band: its 95% interval",
        fontsize="medium",
    )
    axis.legend(loc="lower right", fontsize="small", frameon=False)
    return fig


def _draw_variants(
    tables: dict[float, dict[str, np.ndarray]], num_seeds: int
) -> Figure:
    fig, axes = plots.figure(1, len(tables), figsize=(3 + 4 * len(tables), 3.4))
    for k, (axis, (epsilon, samples)) in enumerate(
        zip(np.atleast_1d(axes), tables.items(), strict=True)
    ):
        places = np.arange(len(samples))[::-1]
        means = [mean(values) for values in samples.values()]
        for place, values in zip(places, samples.values(), strict=True):
            spots = np.full(len(values), place)
            axis.scatter(values, spots, s=14, color=plots.SKY, zorder=1)
        axis.errorbar(
            [m.value for m in means],
            places,
            xerr=[m.half_width for m in means],
            fmt="o",
            color=plots.BLUE,
            capsize=3,
        )
        axis.axvline(means[0].value, color=plots.BLACK, linewidth=0.8, linestyle=":")
        axis.set_yticks(places, list(samples) if k == 0 else [])
        axis.xaxis.set_major_formatter(_percent)
        axis.set_xlabel("accuracy on held-out public records")
        axis.set_title(f"ε = {epsilon:g}", fontsize="medium")
    fig.suptitle(
        f"DPZero: post-processing at no cost in privacy ({num_seeds} seeds; mean with "
        "its 95% interval)",
        fontsize="medium",
    )
    return fig


def _draw_grid(grid: Grid) -> Figure:
    fig, axis = plots.figure(figsize=(7.2, 4.8))
    axis.grid(False)
    axis.spines[:].set_visible(False)
    image = axis.imshow(grid.accuracy, origin="lower", cmap="cividis", aspect="auto")
    axis.set_xticks(range(len(grid.rates)), [f"{r:g}" for r in grid.rates])
    axis.set_yticks(range(len(grid.clips)), [f"{c:g}" for c in grid.clips])
    middle = (grid.accuracy.min() + grid.accuracy.max()) / 2
    for (i, j), value in np.ndenumerate(grid.accuracy):
        color = "black" if value > middle else "white"
        axis.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color=color)
    axis.set_xlabel("step size")
    axis.set_ylabel("clip C on one record's slope")
    bar = fig.colorbar(image, ax=axis, format=_percent)
    bar.set_label("accuracy on the validation split")
    seeds = f"{grid.num_seeds} seeds" if grid.num_seeds > 1 else "1 seed"
    axis.set_title(
        f"Plain DPZero, ε = {grid.epsilon:g}, {grid.num_steps} steps, {seeds}: "
        "accuracy in %\non a validation split of the training records, as one tunes",
        fontsize="medium",
    )
    return fig
