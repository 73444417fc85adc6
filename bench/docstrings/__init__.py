"""Two small language models, pretrained here, tuned privately: ``make demo-lm``.

A RoBERTa and a Llama of a million parameters each are pretrained on the sources of this
Python's standard library (:mod:`.corpus` says which files, :mod:`.pretraining` how). From
private docstrings they learn which family of modules a docstring comes from: RoBERTa as one
of four words, Llama as an answer that it writes (:mod:`.finetuning`). DPZero, DP-LoRA and
DP-SGD at epsilon 2 and 6 and without noise, beside the start (zero-shot) and the majority
class. Every figure is the accuracy on held-out public docstrings, a mean over insecure
seeds with the 95% interval of Student's t; delta = 1e-5.
Beside them stand the seconds of each part: on the wall, and of the processor, of all
threads, which other work on the machine changes less.

With ``--out DIR`` it leaves the pretrained models there, as Hugging Face folders with the
records beside them, so that ``jaxdp finetune`` runs on them, and a plot.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import rich.progress
from matplotlib.figure import Figure

from bench import _harness
from jaxdp.cli import plots

EPSILONS = (2.0, 6.0, None)
PRETRAINING_STEPS = 400
TASKS = {"encoder": "classification", "decoder": "instruction"}
SEEDS = (0, 1, 2, 3)
ACCURACY, ZERO_SHOT, MAJORITY = "accuracy", "zero-shot", "majority class"
WALL, PROCESSOR = "wall time", "processor time"


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """Rows of the study; quick: few steps, one seed, epsilon and method of each task."""
    for package in ("tokenizers", "safetensors"):
        if said := _harness.missing(package):
            return [_harness.Row("docstrings", ACCURACY, None, said)]
    from bench.docstrings import corpus

    seconds: list[_harness.Row] = []
    with clocked(seconds, "all parts"):
        with clocked(seconds, "reading"):
            text = corpus.load()
        rows = [
            _harness.Row("private records", "number", len(text.train), ""),
            _harness.Row("public records", "number", len(text.eval), ""),
            # All classes are as frequent.
            _harness.Row("all tasks", MAJORITY, 1 / len(text.classes), ACCURACY),
        ]
        with tempfile.TemporaryDirectory() as spare, _bar() as bar:
            folder, kinds = pathlib.Path(spare) if out is None else out, [*TASKS]
            with ThreadPoolExecutor(2) as pool:  # A run fills one core.
                make = lambda kind: _start(text, kind, folder, quick, bar)  # noqa: E731
                with clocked(seconds, "pretraining"):
                    starts = [*pool.map(make, kinds)]
                for kind, start in zip(kinds, starts, strict=True):
                    with clocked(seconds, TASKS[kind]):
                        rows += _of_task(text, TASKS[kind], start, quick, bar, pool)
    if out is not None:
        plots.save(plot(rows), out / "docstrings.png")
    return [*rows, *seconds]


@contextlib.contextmanager
def clocked(rows: list[_harness.Row], part: str) -> Iterator[None]:
    """Adds rows of the seconds that a part took: on the wall, and of this process."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    processor, wall = time.process_time() - processor, time.perf_counter() - wall
    rows.append(_harness.Row(part, WALL, wall, "s"))
    rows.append(_harness.Row(part, PROCESSOR, processor, "s"))


def _bar() -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    )


def _start(text: Any, kind: str, folder: pathlib.Path, quick: bool, bar: Any) -> Any:
    """A pretrained model, which is left in a folder with the records beside it."""
    from bench.docstrings import pretraining

    steps = 20 if quick else PRETRAINING_STEPS
    lane = bar.add_task(f"{kind}, pretraining", total=steps)
    start = pretraining.pretrain(
        text,
        pretraining.CONFIGS[kind],
        folder / kind,
        num_steps=steps,
        progress=lambda step, value: bar.update(lane, completed=step),
    )
    for name, records in (("train", text.train), ("eval", text.eval)):
        if start.tokenizer.is_decoder:
            records = pretraining.conversations(start.tokenizer, records)
        lines = (json.dumps(record) + "\n" for record in records)
        (folder / kind / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return start


def _of_task(
    text: Any, task: Any, start: Any, quick: bool, bar: Any, pool: Any
) -> list[_harness.Row]:
    """Rows of a task: what the model is without training, every method and budget."""
    from bench.docstrings import finetuning

    methods, seeds = finetuning.METHODS[task], SEEDS[:1] if quick else SEEDS
    movings: set[Any] = {method.moving for method in methods.values()}
    problems = {moving: finetuning.problem(text, start, moving) for moving in movings}

    def row(cell: Any, lane: Any) -> _harness.Row:
        case, epsilon = cell
        method = methods[case]
        if quick:
            recipe = dataclasses.replace(method.recipe, num_steps=10)
            method = method._replace(recipe=recipe)
        found = []
        for seed in seeds:
            found.append(finetuning.run(problems[method.moving], method, epsilon, seed))
            bar.advance(lane)
        mean = _harness.mean(found)
        metric = f"{case}, {told(epsilon)}"
        return _harness.averaged(task, metric, mean, len(seeds), ACCURACY)

    of = next(iter(problems.values()))
    cells = [(case, epsilon) for case in methods for epsilon in EPSILONS]
    cells = [("DP-LoRA", 6.0)] if quick else cells
    lanes = [
        bar.add_task(f"{task}: {c}, {told(e)}", total=len(seeds)) for c, e in cells
    ]
    rows = [_harness.Row(task, ZERO_SHOT, of.accuracy(of.params), ACCURACY)]
    return [*rows, *pool.map(row, cells, lanes)]


def told(epsilon: float | None) -> str:
    """What the rows say of a budget."""
    if epsilon is None:
        return "not private"
    return "neither noise nor clip" if epsilon == math.inf else f"epsilon {epsilon:g}"


def plot(rows: list[_harness.Row]) -> Figure:
    """Accuracy by method and budget, of rows that were just made or are kept."""
    found = {(row.case, row.metric): row for row in rows if row.unit == ACCURACY}
    fig, axes = plots.figure(1, len(TASKS), figsize=(10, 3.8))
    colors = plots.ORANGE, plots.BLUE, plots.BLACK
    for axis, task in zip(axes, TASKS.values(), strict=True):
        metrics = [metric for case, metric in found if case == task]
        methods = [*dict.fromkeys(m.rpartition(", ")[0] for m in metrics if ", " in m)]
        for number, (epsilon, color) in enumerate(zip(EPSILONS, colors, strict=True)):
            points = [found.get((task, f"{m}, {told(epsilon)}")) for m in methods]
            there = [(i, point) for i, point in enumerate(points) if point is not None]
            axis.errorbar(
                [point.value for _, point in there],
                [-i + 0.15 * (1 - number) for i, _ in there],
                xerr=[point.half_width or 0.0 for _, point in there],
                fmt="o",
                ms=4,
                capsize=3,
                color=color,
                label=told(epsilon),
            )
        zero_shot, majority = found[task, ZERO_SHOT], found["all tasks", MAJORITY]
        for one, style in ((zero_shot, ":"), (majority, "--")):
            axis.axvline(
                one.value, color=plots.BLACK, linestyle=style, lw=1, label=one.metric
            )
        axis.set_yticks([-i for i in range(len(methods))], methods)
        axis.set_xlabel("share of public records answered rightly")
        axis.set_title(task, loc="left", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    fig.suptitle(
        "Families of modules from private docstrings: means and 95% intervals",
        fontsize="medium",
    )
    return fig
