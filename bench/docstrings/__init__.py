"""A small decoder, pretrained here, tuned privately: ``make demo-lm``.

A Llama of 0.9 million parameters is pretrained on the sources of this Python's standard
library (:mod:`.corpus` says which files, :mod:`.pretraining` how), and then learns from
private docstrings which family of modules a docstring comes from (:mod:`.finetuning`): as
one of four label words, and as an answer that it writes. DPZero and DP-SGD move its head,
LoRA or all of it, at epsilon 2 and 6 and without privacy, beside the start (zero-shot) and
the majority class. Every figure is the accuracy on held-out public docstrings, a mean over
insecure seeds with the 95% interval of Student's t; delta = 1e-5.

With ``--out DIR`` it leaves the pretrained model there, as a Hugging Face folder with the
records beside it, so that ``jaxdp finetune`` runs on it, and a plot.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import rich.progress
from matplotlib.figure import Figure

from bench import _harness
from jaxdp.cli import plots

EPSILONS = (2.0, 6.0, None)
PRETRAINING_STEPS = 400
SEEDS = (0, 1, 2)
ACCURACY, ZERO_SHOT, MAJORITY = "accuracy", "zero-shot", "majority class"
#: What of each task ``--quick`` runs.
QUICK = {"classification": [("DPZero, head", 6.0)], "instruction": []}


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """Rows of the study; quick: a few steps of one method and budget, one seed."""
    for package in ("tokenizers", "safetensors"):
        if said := _harness.missing(package):
            return [_harness.Row("docstrings", ACCURACY, None, said)]
    from bench.docstrings import corpus, finetuning, pretraining

    begin = time.perf_counter()
    text = corpus.load()
    rows = [_harness.Row("private records", "number", len(text.train), "")]
    rows.append(_harness.Row("public records", "number", len(text.eval), ""))
    with tempfile.TemporaryDirectory() as spare, _bar() as bar:
        folder = (pathlib.Path(spare) if out is None else out) / "pretrained"
        steps = 20 if quick else PRETRAINING_STEPS
        task = bar.add_task("pretraining", total=steps)
        told = lambda step, value: bar.update(task, completed=step)  # noqa: E731
        start = pretraining.pretrain(text, folder, num_steps=steps, progress=told)
        if out is not None:
            _write_records(out, text)
        for name in finetuning.METHODS:
            rows += _of_task(text, start, name, quick, bar)
    minutes = (time.perf_counter() - begin) / 60
    rows.append(_harness.Row("all of it", "time", minutes, "min"))
    if out is not None:
        plots.save(plot(rows), out / "docstrings.png")
    return rows


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


def _of_task(
    text: Any, start: Any, name: Any, quick: bool, bar: rich.progress.Progress
) -> list[_harness.Row]:
    """Rows of one task: what it is without training, and every method and budget."""
    from bench.docstrings import finetuning

    row = functools.partial(_harness.Row, name)
    methods = finetuning.METHODS[name]
    movings: list[Any] = [*dict.fromkeys(each.moving for each in methods.values())]
    problems = {
        moving: finetuning.problem(text, start, name, moving) for moving in movings
    }
    of = next(iter(problems.values()))
    rows = [row(ZERO_SHOT, of.accuracy(of.params), ACCURACY)]
    rows.append(row(MAJORITY, 1 / len(text.classes), ACCURACY))  # All are as frequent.
    seeds = SEEDS[:1] if quick else SEEDS
    cells = [(m, e) for e in EPSILONS for m in methods if e or m in finetuning.OPEN]
    for case, epsilon in QUICK[name] if quick else cells:
        method = methods[case]
        if quick:
            recipe = dataclasses.replace(method.recipe, num_steps=10)
            method = method._replace(recipe=recipe)
        title = f"{case}, {told(epsilon)}"
        lane = bar.add_task(f"{name}: {title}", total=len(seeds))
        found = []
        for seed in seeds:
            found.append(finetuning.run(problems[method.moving], method, epsilon, seed))
            bar.advance(lane)
        mean = _harness.mean([run.accuracy for run in found])
        rows.append(_harness.averaged(name, title, mean, len(seeds), ACCURACY))
        seconds = statistics.mean(run.seconds for run in found)
        rows.append(row(f"{title}: time of a run", seconds, "s"))
    return rows


def told(epsilon: float | None) -> str:
    """What the rows say of a budget."""
    return f"epsilon {epsilon:g}" if epsilon else "not private"


def plot(rows: list[_harness.Row]) -> Figure:
    """Accuracy by method and budget, of rows that were just made or are kept."""
    found = {(row.case, row.metric): row for row in rows if row.unit == ACCURACY}
    cases = [*dict.fromkeys(case for case, _ in found)]
    fig, axes = plots.figure(1, len(cases), figsize=(10, 3.8))
    colors = plots.ORANGE, plots.BLUE, plots.BLACK
    for axis, case in zip(axes, cases, strict=True):
        ends = tuple(f", {told(epsilon)}" for epsilon in EPSILONS)
        metrics = [metric for name, metric in found if name == case]
        methods = [m.removesuffix(ends[0]) for m in metrics if m.endswith(ends[0])]
        methods.reverse()
        for number, (end, color) in enumerate(zip(ends, colors, strict=True)):
            points = [found.get((case, method + end)) for method in methods]
            there = [(i, point) for i, point in enumerate(points) if point is not None]
            axis.errorbar(
                [point.value for _, point in there],
                [i + 0.15 * (1 - number) for i, _ in there],
                xerr=[point.half_width or 0.0 for _, point in there],
                fmt="o",
                ms=4,
                capsize=3,
                color=color,
                label=end.removeprefix(", "),
            )
        for name, style in ((ZERO_SHOT, ":"), (MAJORITY, "--")):
            value: Any = found[case, name].value
            axis.axvline(value, color=plots.BLACK, linestyle=style, lw=1, label=name)
        axis.set_yticks(range(len(methods)), methods)
        axis.set_xlabel("share of public records answered rightly")
        axis.set_title(case, loc="left", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    fig.suptitle(
        "Families of modules from private docstrings: means and 95% intervals",
        fontsize="medium",
    )
    return fig
