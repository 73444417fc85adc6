"""Baselines of the study of docstrings: without clip and noise, and by AdamW.

What :mod:`bench.docstrings` leaves out, which would make ``make demo-lm`` too long: some of
its methods without noise and clip, and DP-LoRA whose noised gradients AdamW steps by, the
first-order method of the DPZero paper's tables. The models are pretrained anew, on another
processor perhaps to other bits: the study's own methods stand beside their baselines, from
the same start. Runs are those of :mod:`bench.docstrings.finetuning`.

Without a clip a method of classification keeps its step size. In the instruction task it is
smaller, the better of two, and that of AdamW is the best of four, by single runs on a fifth
of the private records that was held out.
"""

import dataclasses
import math
import pathlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from bench import _harness
from bench import docstrings as study

#: Step sizes without a clip, of task and method, that differ from those of the study.
UNCLIPPED = {
    ("instruction", "DP-LoRA"): 0.15,
    ("instruction", "DP-SGD, all parameters"): 0.06,
}
SEEDS = (0, 1, 2, 3, 4)
ADAMW = "DP-AdamW, LoRA"
ADAMW_RATE = 1e-2


class Cell(NamedTuple):
    """A method of a task; epsilon None is without noise, infinity without a clip too."""

    task: str
    name: str
    epsilon: float | None


CELLS = (
    Cell("classification", "DP-LoRA", 2.0),
    Cell("classification", "DP-LoRA", math.inf),
    Cell("classification", ADAMW, 2.0),
    Cell("classification", "DPZero, head", math.inf),
    Cell("instruction", "DP-LoRA", 2.0),
    Cell("instruction", "DP-LoRA", math.inf),
    Cell("instruction", "DP-SGD, all parameters", math.inf),
)


def method(cell: Cell) -> Any:
    """The study's method, with another optimizer or step size where a cell has one."""
    from bench.docstrings import finetuning

    of_task: Any = finetuning.METHODS[cell.task]  # pyright: ignore
    found = of_task["DP-LoRA" if cell.name == ADAMW else cell.name]
    changed: dict[str, Any] = {}
    if cell.name == ADAMW:
        changed = {"optimizer": "adamw", "learning_rate": ADAMW_RATE}
    elif cell.epsilon == math.inf and (cell.task, cell.name) in UNCLIPPED:
        changed = {"learning_rate": UNCLIPPED[cell.task, cell.name]}
    return found._replace(recipe=dataclasses.replace(found.recipe, **changed))


def run(quick: bool) -> list[_harness.Row]:
    """Rows of every start and cell; quick: few steps, one seed and cell."""
    for package in ("tokenizers", "safetensors"):
        if said := _harness.missing(package):
            return [_harness.Row("baselines", study.ACCURACY, None, said)]
    from bench.docstrings import corpus, finetuning, pretraining

    cells = CELLS[:1] if quick else CELLS
    seeds = SEEDS[:1] if quick else SEEDS
    steps = 4 if quick else study.PRETRAINING_STEPS
    kinds = {task: kind for kind, task in study.TASKS.items()}
    rows: list[_harness.Row] = []
    seconds: list[_harness.Row] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        with study.clocked(seconds, "reading"):
            text = corpus.load()

        def start(task: str) -> Any:
            config = pretraining.CONFIGS[kinds[task]]
            place = pathlib.Path(folder) / task
            return pretraining.pretrain(text, config, place, num_steps=steps)

        tasks = [*dict.fromkeys(cell.task for cell in cells)]
        with study.clocked(seconds, "pretraining"):
            starts = dict(zip(tasks, pool.map(start, tasks), strict=True))
        movings = {(cell.task, method(cell).moving) for cell in cells}
        problems = {(t, m): finetuning.problem(text, starts[t], m) for t, m in movings}
        for task in tasks:
            of = next(p for (t, _), p in problems.items() if t == task)
            rows.append(zero_shot(task, of.accuracy(of.params)))

        def accuracies(cell: Cell) -> list[float]:
            how = method(cell)
            if quick:
                recipe = dataclasses.replace(how.recipe, num_steps=10)
                how = how._replace(recipe=recipe)
            of = problems[cell.task, how.moving]
            return [finetuning.run(of, how, cell.epsilon, seed) for seed in seeds]

        with study.clocked(seconds, "runs"):
            rows += map(averaged, cells, pool.map(accuracies, cells))
    return [*rows, *seconds]


def zero_shot(task: str, accuracy: float) -> _harness.Row:
    """Row of a model that was only pretrained."""
    return _harness.Row(task, study.ZERO_SHOT, accuracy, study.ACCURACY)


def averaged(cell: Cell, found: list[float]) -> _harness.Row:
    """Row of the mean over seeds, with the step size as its note."""
    metric, mean = f"{cell.name}, {study.told(cell.epsilon)}", _harness.mean(found)
    row = _harness.averaged(cell.task, metric, mean, len(found), study.ACCURACY)
    rate = method(cell).recipe.learning_rate
    return dataclasses.replace(row, note=f"step size {rate:g}")
