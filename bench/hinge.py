"""Private training with kinks: the hinge loss of a linear model and of a ReLU network.

breast_cancer, 455 training records, replace-one, delta = 1e-5; accuracy on 114 held-out
public records by the command line's recipes, which were chosen on validation splits of the
training records, those of the oracles with like effort (``jaxdp/cli/o2nc.py``).
``o2nc`` asks for values or gradients and releases vectors, or slopes along common
directions ("scalar"); in one pass it reads every record once. ``dpzero`` reads all at every
step. Means over seeds (of noise, directions and initial parameters) with the 95% interval
of Student's t. With ``--out DIR`` it draws them.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import jaxdp
from bench import _harness
from jaxdp import models
from jaxdp.cli import options, plots, prepare
from jaxdp.core.averaging import polyak_output
from jaxdp.o2nc.oracle import ORACLES

DELTA, HIDDEN, EPSILONS = 1e-5, 8, (2.0, 8.0)
MODELS = {"linear": None, "mlp": (HIDDEN,)}
TITLES = {"linear": "linear model", "mlp": f"ReLU network, {HIDDEN} hidden units"}
METRIC, PNG = "test accuracy", "hinge.png"


def algorithms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and options of what is compared."""
    for multi_pass in (False, True):
        passes = "many passes" if multi_pass else "one pass"
        for oracle in ORACLES:
            name = f"o2nc, {oracle.replace('_', ' ').replace(' order', '-order')}, {passes}"
            chosen = {"oracle": oracle, "multi_pass": multi_pass}
            yield name, {"algorithm": "o2nc", **chosen}
    yield "dpzero", {"algorithm": "dpzero"}


def job_of(model: str, epsilon: float, chosen: dict[str, Any]) -> prepare.Job:
    """What the command line runs."""
    return prepare.prepare(
        options.train(
            dataset="breast_cancer",
            model=model,
            hidden=MODELS[model],
            loss="hinge",
            epsilon=epsilon,
            delta=DELTA,
            seed=0,
            overwrite=True,  # Nothing is written.
            **chosen,
        )
    )


def accuracies(job: prepare.Job, num_seeds: int) -> np.ndarray:
    """Test accuracy of each seed; shape=(num_seeds,)."""
    task, scores = job.task, []
    for seed in range(num_seeds):
        keys = jaxdp.Keys.insecure(seed)
        result = jaxdp.fit(
            job.plan,
            keys,
            prepare.initial(task, keys),
            task.data,
            value_fn=task.value_fn,
            optimizer=job.optimizer,
        )
        params = polyak_output(result.info.state) if job.averaged else result.params
        scores.append(float(task.metric_fn(params)))
    return np.array(scores)


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """Rows of every model, algorithm and budget; and the share of the larger class."""
    labels = models.load("breast_cancer").test[1]
    majority = float(np.bincount(np.asarray(labels)).max() / len(labels))
    rows = [_harness.Row("majority class", METRIC, majority, "")]
    means: dict[tuple[str, str, float], _harness.Mean] = {}
    for model in MODELS:
        for name, chosen in algorithms():
            for epsilon in EPSILONS:
                job = job_of(model, epsilon, chosen)
                found = accuracies(job, 2 if quick else 20)
                mean = means[model, name, epsilon] = _harness.mean(found)
                case = f"{model}, {name}, epsilon {epsilon:g}"
                unit = f"{job.plan.num_steps} steps"
                count = len(found)
                rows.append(_harness.averaged(case, METRIC, mean, count, unit))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plots.save(_draw(means, majority), out / PNG)
    return rows


def _draw(
    means: dict[tuple[str, str, float], _harness.Mean], majority: float
) -> Figure:
    names = [name for name, _ in algorithms()]
    fig, axes = plots.figure(1, len(MODELS), figsize=(10, 4.4))
    for axis, model in zip(axes, MODELS, strict=True):
        for epsilon, color, shift in (
            (EPSILONS[0], plots.ORANGE, -0.12),
            (EPSILONS[1], plots.BLUE, 0.12),
        ):
            found = [means[model, name, epsilon] for name in names]
            axis.errorbar(
                [m.value for m in found],
                len(names) - 1 - np.arange(len(names)) - shift,
                xerr=[m.half_width for m in found],
                fmt="o",
                ms=5,
                capsize=4,
                color=color,
                label=f"ε = {epsilon:g}",
            )
        line: dict[str, Any] = {"color": plots.BLACK, "linestyle": ":"}
        axis.axvline(majority, **line, label="larger class alone")
        labels = names[::-1] if axis is axes[0] else [""] * len(names)
        axis.set_yticks(range(len(names)), labels)
        axis.set_xlabel("accuracy on held-out public records")
        axis.set_title(TITLES[model], loc="left", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    fig.suptitle(
        f"Hinge loss on breast_cancer, δ = {DELTA:g}: means and their 95% intervals",
        fontsize="medium",
    )
    return fig
