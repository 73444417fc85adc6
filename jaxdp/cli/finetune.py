"""``jaxdp finetune``: run, report, plots and the tuned model."""

import functools
import json
import math
import pathlib
import sys
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from jaxdp import training
from jaxdp.cli import (
    cluster,
    language,
    options,
    plots,
    recipes,
    record,
    shared_budget,
)
from jaxdp.cli.finetune_prepare import Job, out_of, prepare
from jaxdp.cli.language import CARD, MODEL
from jaxdp.cli.prepare import keys_of
from jaxdp.cli.printing import conclude
from jaxdp.cli.record import INITIAL
from jaxdp.cli.train import (
    PROGRESS,
    RELEASES,
    duration,
    fitted,
    reported,
    spending,
    spent_over_time,
    written,
)
from jaxdp.core import keys as keys_lib
from jaxdp.models import show_values
from jaxdp.models.language import LanguageModel, num_parameters
from jaxdp.training import parallel, statements
from jaxdp.training.ledger import LEDGER, PLAN, REPORT, replace

FILES = (PLAN, LEDGER, INITIAL, REPORT, PROGRESS, RELEASES)


class Outcome(NamedTuple):
    """Result of a run; all of it public."""

    params: Any
    releases: np.ndarray  # shape=(num_steps, K)
    steps: list[int]
    metrics: list[dict[str, float]]  # at these steps, of which the first is 0
    report: dict[str, Any]
    ended: bytes | None  # report of a run that had ended: its card has the digest


def run(command: options.Finetune) -> None:
    """Checks everything, trains, writes the folder and prints what was reached."""
    language.require()
    with cluster.joined(command, out_of(command)) as (command, out, own):
        begun = functools.partial(record.begun_or_recorded, command, out, own)
        _run(cluster.agreed(command, begun))


def _run(command: options.Finetune) -> None:
    keys = keys_of(command)  # Of several processes, all wait here.
    job = _prepared(command, keys)
    for line in job.warnings:
        print(f"jaxdp: warning: {line}", file=sys.stderr)
    if not command.resume:
        drawn = language.drawn(job.params)
        cluster.agreed(command, lambda: _begin(job, drawn))
    outcome = train(job)
    # They gather what is split between them; where one cannot write, all end.
    cluster.agreed(command, lambda: write(job, outcome))
    conclude(command, job.out / REPORT, lambda: summary(job, outcome))


def _prepared(command: options.Finetune, keys: keys_lib.Keys) -> Job:
    """Checks all that a command names; nothing is written."""
    with show_values(command.show_values):
        job = prepare(command, keys)
    cluster.agreed(command, lambda: shared_budget.check(command, job.plan, job.out))
    return job


def _begin(job: Job, drawn: dict[str, np.ndarray]) -> None:
    """Writes the folder of a new run: its initial parameters and plan."""
    with record.begun(job.command, job.out, job.plan, FILES):
        language.discard(job.out / MODEL)
        if drawn:
            record.save_params(job.out / INITIAL, drawn)


# --- the run -----------------------------------------------------------------------


def train(job: Job) -> Outcome:
    """Runs the plan, or the rest of it; metrics are taken on public records."""
    command, ended = job.command, _ended(job)
    steps, metrics = [0], [job.judge.fn(jax.tree.map(jnp.asarray, job.params))]

    def evaluate(step: int, params: Any, info: training.FitInfo) -> None:
        del info
        steps.append(step)
        metrics.append(job.judge.fn(params))

    with warnings.catch_warnings():
        # Said before, of the dtype that counts.
        warnings.filterwarnings("ignore", "smoothing_radius", UserWarning)
        result = fitted(
            job,
            command,
            job.params,
            job.train,
            {
                "trainable": job.trainable,
                "stacked": LanguageModel.is_stacked
                if job.plan.draws_directions
                else None,
                "chunk": command.eval_every,
                "note": record.note(command, job.numbers) | {"eval": job.shown},
            },
            value_fn=job.task.value_fn,
            optimizer=recipes.make_optimizer(job.recipe, job.trainable),
            callback=evaluate,
        )
    report = _report(job, result.report, metrics)
    releases = np.asarray(result.info.releases)
    return Outcome(result.params, releases, steps, metrics, report, ended)


def _ended(job: Job) -> bytes | None:
    """Returns the report of a run that had ended, where the loop writes its own."""
    path = job.out / REPORT
    if not (job.command.resume and path.exists()):
        return None
    there = path.read_bytes()
    try:
        fields = {*json.loads(there)}
    except (TypeError, ValueError, RecursionError):  # No report.
        return None
    # Which the loop's own report has not: it knows no public records.
    return there if "num_test_examples" in fields else None


def _report(
    job: Job, of_fit: dict[str, Any], metrics: list[dict[str, float]]
) -> dict[str, Any]:
    """Returns the loop's report with the command line's fields."""
    command = job.command
    moving, leaves = job.trainable, language.flat(job.params)
    fields = {
        "dataset": pathlib.Path(command.train).stem,
        "model": pathlib.Path(command.model).resolve().name,
        "task": command.task,
        "method": command.method,
        "trainable": command.trainable,
        "num_parameters": num_parameters(job.params),
        "num_trainable": sum(
            leaf.size for path, leaf in leaves.items() if moving is None or moving(path)
        ),
        "num_test_examples": job.judge.num_examples,
        **_finite(metrics[-1]),
        **_finite({f"zero_shot_{name}": x for name, x in metrics[0].items()}),
        "recipe": job.numbers,
        "note": "The number of records is public; all records of --eval are public.",
    }
    return reported(of_fit, fields, "safetensors", "tokenizers")


def _finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """Returns None for what JSON cannot say: the perplexity of a model that diverged."""
    return {name: x if math.isfinite(x) else None for name, x in metrics.items()}


# --- after the run -----------------------------------------------------------------


def write(job: Job, outcome: Outcome) -> None:
    """Writes the results of a run; plan.json was written before the run."""
    language.save(job.out / MODEL, job.command.model, job.model, outcome.params)
    report = outcome.report
    title = f"{report['model']} on {report['dataset']} ({job.task.name})"
    metric = next(iter(outcome.metrics[0]))
    values = [one[metric] for one in outcome.metrics]
    plots.progress(
        job.out / PROGRESS,
        title=title,
        steps=outcome.steps,
        metrics=values,
        metric=metric,
        spent=spent_over_time(job.plan, outcome.steps[1:], report),
        delta=job.plan.delta,
        start=values[0],
    )
    plots.releases(
        job.out / RELEASES,
        title=title,
        releases=outcome.releases,
        noise_std=job.plan.noise_std,
        num_parameters=None if job.plan.replayable else report["num_trainable"],
    )
    lines = outcome.ended or written(report, job.command.timings)
    replace(job.out / REPORT, lines)
    card = job.out / MODEL / CARD
    # One that is there was written by this run; somebody may have added to it since.
    if parallel.writes(cluster.mesh_of(job.command)) and not card.exists():
        replace(card, statements.statement(job.out).to_card().encode())


def summary(job: Job, outcome: Outcome) -> Table:
    """Returns a table of the privacy spent and the metrics reached."""
    report = outcome.report
    title = f"{report['method']}: {report['model']} on {report['dataset']} "
    title += f"({report['task']})"
    table = spending(title, job.plan, report)
    table.add_row(
        "trained",
        f"{report['num_trainable']:,} of {report['num_parameters']:,} parameters, "
        f"--trainable {report['trainable']}",
    )
    for name in outcome.metrics[0]:
        table.add_row(
            f"reached: {name.replace('_', ' ')}",
            f"{outcome.metrics[-1][name]:.4f} on {report['num_test_examples']} public "
            f"records; before training {outcome.metrics[0][name]:.4f}",
        )
    table.add_row(*duration(report, job.command.timings))
    table.add_row("data", report["note"])
    written = [name for name in FILES if (job.out / name).exists()]
    written += [f"{MODEL}/", f"{MODEL}/{CARD}"]
    table.add_row("written", f"{job.out}: {', '.join(written)}")
    return table
