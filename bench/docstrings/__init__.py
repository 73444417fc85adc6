"""A small transformer, pretrained here, tuned privately: ``make demo-lm``.

RoBERTa of a million parameters is pretrained on the sources of this Python's standard
library (:mod:`.corpus` says which files, :mod:`.pretraining` how), and then learns from
private docstrings which family of modules a docstring comes from: DPZero at epsilon 2 and
6, beside the start (zero-shot), the majority class, MeZO (DPZero without clip and noise)
and DP-SGD of ``jax_privacy``. Every figure is the accuracy on held-out public docstrings,
a mean over insecure seeds with the 95% interval of Student's t; delta = 1e-5.

With ``--out DIR`` it leaves the pretrained model there, as a Hugging Face folder with the
records beside it, so that ``jaxdp finetune`` runs on it, and a plot.
"""

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import rich.progress
from matplotlib.figure import Figure

from bench import _harness

SEEDS = (0, 1, 2, 3, 4)
EPSILONS = (2.0, 6.0)
PRETRAINING_STEPS = 500
CASE = "docstrings"

Runs = dict[tuple[str, float], list[Any]]  # (algorithm, epsilon) -> a run for each seed


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """Rows of the study; quick: fewer steps, one seed and epsilon, no DP-SGD."""
    for package in ("tokenizers", "safetensors"):
        if said := _harness.missing(package):
            return [_harness.Row(CASE, "accuracy", None, said)]
    from bench.docstrings import corpus, finetuning, pretraining

    begin = time.perf_counter()
    text = corpus.load()
    with tempfile.TemporaryDirectory() as spare, _bar() as bar:
        folder = (pathlib.Path(spare) if out is None else out) / "pretrained"
        steps = 20 if quick else PRETRAINING_STEPS
        task = bar.add_task("pretraining", total=steps)
        told = lambda step, value: bar.update(task, completed=step)  # noqa: E731
        start = pretraining.pretrain(text, folder, num_steps=steps, progress=told)
        if out is not None:
            _write_records(out, text)
        of = finetuning.problem(text, start)
        before = of.accuracy(of.params)
        runs = _runs(of, quick, bar)
    if out is not None:
        _plot(out / "docstrings.png", runs, before, of.majority)
    minutes = (time.perf_counter() - begin) / 60
    return _rows(of, before, runs, minutes)


def _bar() -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    )


def _write_records(out: pathlib.Path, text: Any) -> None:
    """The records, private and public, as ``jaxdp finetune`` reads them."""
    for name, records in (("train", text.train), ("eval", text.eval)):
        lines = (json.dumps(record) + "\n" for record in records)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _runs(of: Any, quick: bool, bar: rich.progress.Progress) -> Runs:
    from bench.docstrings import finetuning

    cells: list[Any] = [("dpzero", e) for e in EPSILONS] + [("mezo", 0.0)]
    if not _harness.missing("jax_privacy"):
        cells += [("dpsgd", e) for e in EPSILONS]
    seeds = SEEDS
    if quick:
        cells, seeds = [("dpzero", 6.0)], SEEDS[:1]
    runs: Runs = {}
    for algorithm, epsilon in cells:
        recipe = finetuning.RECIPES[algorithm]
        recipe = dataclasses.replace(recipe, num_steps=20) if quick else recipe
        name = f"{algorithm} {f'epsilon {epsilon:g}' if epsilon else ''}"
        task = bar.add_task(name, total=recipe.num_steps * len(seeds))
        runs[algorithm, epsilon] = [
            finetuning.run(
                of,
                algorithm,
                seed=seed,
                epsilon=epsilon,
                recipe=recipe,
                advance=lambda steps, task=task: bar.update(task, advance=steps),
            )
            for seed in seeds
        ]
    return runs


def _rows(of: Any, before: float, runs: Runs, minutes: float) -> list[_harness.Row]:
    row = lambda *fields: _harness.Row(CASE, *fields)  # noqa: E731
    rows = [
        row("private records", of.num_examples, ""),
        row("public records", len(of.eval["label"]), ""),
        row("majority class", of.majority, "accuracy"),
        row("zero-shot", before, "accuracy"),
    ]
    for (algorithm, epsilon), found in runs.items():
        name = f"{algorithm}{f', epsilon {epsilon:g}' if epsilon else ', not private'}"
        ends = [one.accuracies[-1] for one in found]
        mean = _harness.mean(ends)
        gain = mean.value - max(before, of.majority)
        rows.append(row(name, mean.value, "accuracy"))
        if len(ends) > 1:
            rows.append(row(f"{name}: half of its 95% interval", mean.half_width, ""))
        rows.append(row(f"{name}: above zero-shot and majority", gain, "accuracy"))
        seconds = statistics.mean(one.seconds for one in found)
        rows.append(row(f"{name}: time of a run", seconds, "s"))
    if not any(algorithm == "dpsgd" for algorithm, _ in runs):
        said = _harness.missing("jax_privacy") or "skipped: not in --quick"
        rows.append(row("dpsgd", None, said))
    return [*rows, row("all of it", minutes, "min")]


def _plot(path: pathlib.Path, runs: Runs, before: float, majority: float) -> None:
    """Accuracy over the steps of each method's runs: means over seeds."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    names = {"dpzero": "DPZero", "mezo": "MeZO, not private", "dpsgd": "DP-SGD"}
    for (algorithm, epsilon), found in runs.items():
        steps = np.asarray(found[0].steps) / found[0].steps[-1]
        mean = np.mean([one.accuracies for one in found], axis=0)
        label = names[algorithm] + (f", epsilon {epsilon:g}" if epsilon else "")
        style = {"dpzero": "-", "mezo": ":", "dpsgd": "--"}[algorithm]
        axes.plot(steps, mean, style, label=f"{label} ({found[0].steps[-1]} steps)")
    axes.axhline(before, color="0.4", linewidth=1, label="zero-shot")
    axes.axhline(majority, color="0.7", linewidth=1, label="majority class")
    axes.set_xlabel("share of the steps")
    axes.set_ylabel("accuracy on public records")
    axes.set_title(f"Which modules a docstring comes from, mean of {len(SEEDS)} seeds")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
