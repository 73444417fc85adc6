"""``jaxdp train``: run, report and plots."""

import functools
import importlib.metadata
import json
import math
import pathlib
import platform
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from jaxdp import models, training
from jaxdp.cli import budget, cluster, options, plots, record, shared_budget
from jaxdp.cli.parsing import Preempted, UsageError, usage
from jaxdp.cli.prepare import Job, initial, keys_of, out_of, prepare
from jaxdp.cli.printing import conclude, has_bar
from jaxdp.cli.record import INITIAL, PARAMS, SCHEMA
from jaxdp.cli.task import Task, is_file
from jaxdp.core import keys as keys_lib
from jaxdp.core.averaging import polyak_output
from jaxdp.data import schema
from jaxdp.mechanism.plan import Plan
from jaxdp.training import parallel, reporting
from jaxdp.training.ledger import LEDGER, PLAN, REPORT, replace

PROGRESS, RELEASES = "progress.png", "releases.png"
FILES = (PLAN, LEDGER, INITIAL, REPORT, PARAMS, PROGRESS, RELEASES)

_EVALUATIONS = 100


class Outcome(NamedTuple):
    """Result of a run; all of it public."""

    params: Any
    releases: np.ndarray  # shape=(num_steps, K)
    steps: list[int]
    metrics: list[float]  # at these steps, of the points there
    returned: float  # the metric of what is returned
    errors: np.ndarray  # shape=(len(steps) + 1, num_groups): by group, and of the last
    report: dict[str, Any]


def run(command: options.Train) -> None:
    """Checks everything, trains, writes the folder and prints what was reached."""
    with cluster.joined(command, out_of(command)) as (command, out, own):
        begun = functools.partial(record.begun_or_recorded, command, out, own)
        _run(cluster.agreed(command, begun))


def _run(command: options.Train) -> None:
    keys = keys_of(command)  # Of several processes, all wait here.
    job = cluster.agreed(command, lambda: _prepared(command, keys))
    params = cluster.agreed(command, lambda: _initial(job, command))
    outcome = train(job, command, params)
    moves_model = not job.plan.runs_algorithm  # Not weights of vertices.
    for line in _of_result(job.task, params, outcome.params) if moves_model else ():
        print(f"jaxdp: warning: {line}", file=sys.stderr)
    timings = command.timings
    if timings is None:  # Of data that are public anyway, nothing can be told.
        timings = "secret" if is_file(command.dataset) else "public"
    write(job, outcome, timings)
    conclude(command, job.out / REPORT, lambda: summary(job, outcome, timings))


def _prepared(command: options.Train, keys: keys_lib.Keys) -> Job:
    """Checks all that a command names, and prints warnings; nothing is written."""
    with (
        models.show_values(command.show_values),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UserWarning)
        job = prepare(command, keys)
    cluster.check_plan(command, job.plan)
    shared_budget.check(command, job.plan, job.out)
    # Others, as NumPy's, may be about a private record.
    ours = [str(x.message) for x in caught if issubclass(x.category, UserWarning)]
    flagged = [re.sub("^bounds ", "--bounds ", text) for text in ours]
    for line in [*flagged, *doubts(job)]:
        print(f"jaxdp: warning: {line}", file=sys.stderr)
    if command.resume:  # The plan that was calibrated then, to the last digit.
        job = job._replace(plan=budget.read_plan(command, job.out / PLAN, "--out"))
    return job


def doubts(job: Job) -> list[str]:
    """Returns warnings about records that would silently count zero.

    Private records are not counted: the held-out ones are of the same file.
    """
    task = job.task
    said, total = _of_table(task.dataset), len(task.dataset.test[0])
    if not job.plan.runs_algorithm:
        losses = task.value_fn(initial(task, job.keys), task.public)
        lost = int(np.sum(~np.isfinite(losses)))
        if 2 * lost > total:
            said.append(
                f"the loss of {lost} of the {total} held-out public records is not finite "
                "at the start: such records count zero, and the run would learn from noise"
            )
    if task.groups is not None:
        lost = int(np.sum(task.groups.test < 0))
        if lost == total:
            raise UsageError(
                f"--group-values must be those of --group {task.groups.group}, got "
                f"{', '.join(task.groups.names)}: none of the {total} held-out public "
                "records has one"
            )
        if 2 * lost > total:
            said.append(
                f"{lost} of the {total} held-out public records belong to no group of "
                f"--group {task.groups.group}, and count for none"
            )
    return said


#: Columns of sizes that differ by more than this take no part beside the largest.
_UNLIKE = 100.0


def _of_table(dataset: models.Dataset) -> list[str]:
    """Returns warnings about features of very different sizes and classes without records.

    Reads the held-out public records alone.
    """
    said = []
    if dataset.task == "quadratic":
        return said
    x, y = dataset.test
    sizes = np.abs(x).max(axis=0)
    there = np.flatnonzero(sizes)
    if len(there) > 1:
        least, most = there[sizes[there].argmin()], there[sizes[there].argmax()]
        if sizes[most] > _UNLIKE * max(sizes[least], 1.0):
            names = dataset.feature_names
            said.append(
                f"the columns {names[most]!r} and {names[least]!r} are of very different "
                f"sizes on the held-out public records, up to {sizes[most]:.3g} and "
                f"{sizes[least]:.3g}: the larger takes the whole clip; give --bounds or "
                "--schema"
            )
    if dataset.num_classes is not None and len(y) >= 10 * dataset.num_classes:
        absent = sorted({*range(dataset.num_classes)} - {*y.tolist()})
        if absent:
            named = [
                dataset.class_names[k] if dataset.class_names else k for k in absent
            ]
            said.append(
                f"no held-out public record is of {', '.join(map(repr, named[:8]))}: are "
                "these classes right? Nobody sees how well they are predicted"
            )
    return said


def _of_result(task: Task, before: Any, after: Any) -> list[str]:
    """Returns a warning if a run has hardly changed the loss of public records."""
    first, last = (
        float(np.nanmean(task.value_fn(at, task.public))) for at in (before, after)
    )
    if not abs(last - first) < 0.01 * abs(first):
        return []
    return [
        f"the mean loss of the held-out public records was {first:.5g} before the run and "
        f"is {last:.5g}: the steps were too short or too few; jaxdp.diagnose says more"
    ]


def _initial(job: Job, command: options.Train) -> Any:
    """Returns the initial parameters, public: drawn, or read if a run is resumed.

    A new run's folder then holds them and the plan, and nothing of an earlier run.
    """
    params = initial(job.task, job.keys)
    if command.resume:
        leaves = record.read(job.out, "--out").header["leaves"]
        flat = record.load_initial(job.out, leaves)
        return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(flat))
    with record.begun(command, job.out, job.plan, (*FILES, SCHEMA)):
        record.save_params(job.out / INITIAL, params)
        if command.schema is not None:
            known = schema.load(command.schema).as_dict()
            replace(job.out / SCHEMA, (json.dumps(known, indent=2) + "\n").encode())
    return params


# --- the run -----------------------------------------------------------------------


def fitted(
    job: Any, command: options.Run, params: Any, data: Any, of_fit: Any, **shared: Any
) -> training.FitResult:
    """Runs the plan of a job, or what is left of it.

    ``of_fit`` are arguments of a new run alone, ``shared`` those of a resumed one too.
    A signal that asks it to stop raises Preempted when a chunk is done.
    """
    mesh = cluster.mesh_of(command)
    shared |= {
        "mesh": mesh,
        "microbatch_size": command.microbatch_size,
        "progress": command.progress and has_bar(command),
        "keep_noise_roots": command.keep_noise_roots,
    }
    with training.stop_on_signal() as stop:
        shared |= {"stop": stop}
        try:
            if not command.resume:
                shared |= {"ledger": job.out, **of_fit}
                shared |= {"budget": shared_budget.of_run(command)}
                result = training.fit(job.plan, job.keys, params, data, **shared)
            else:
                shared |= {"plan": job.plan, "new_attempt": command.new_attempt}
                if command.new_attempt:
                    shared |= {"budget": shared_budget.of_run(command)}
                with usage(command, "--resume"):
                    result = training.resume(job.out, params, data, **shared)
        except training.Stopped as stopped:
            raise Preempted(
                f"stopped by {stop.name or 'another process'} after step {stopped.step} of "
                f"{job.plan.num_steps}, all on record; --resume goes on"
            ) from None
    if mesh is None:
        return result
    params, info = parallel.here((result.params, result.info))  # Of several devices.
    return result._replace(params=params, info=info)


def train(job: Job, command: options.Train, params: Any) -> Outcome:
    """Runs the plan, or the rest of it, from the initial ``params``.

    The metric is taken on public records, about a hundred times.
    """
    task, averaged, start = job.task, job.averaged, params
    steps: list[int] = []
    metrics: list[jax.Array] = []
    errors: list[jax.Array] = []

    def judge(params: Any) -> jax.Array:
        if task.errors_fn is not None:
            errors.append(task.errors_fn(params))
        return task.metric_fn(params)

    def evaluate(step: int, params: Any, info: training.FitInfo) -> None:
        steps.append(step)
        metrics.append(judge(polyak_output(info.state) if averaged else params))

    result = fitted(
        job,
        command,
        params,
        task.data,
        {
            "chunk": max(1, job.plan.num_steps // _EVALUATIONS),
            "note": record.note(command, job.recipe),
        },
        value_fn=task.value_fn,
        optimizer=job.optimizer,
        callback=evaluate,
    )
    params = polyak_output(result.info.state) if averaged else result.params
    values = [float(x) for x in metrics]
    # Plans that make the steps return another point than the last one.
    last = float(judge(params)) if job.plan.makes_steps else values[-1]
    of_groups = np.asarray(errors, float)
    releases = np.asarray(result.info.releases)
    report = _report(job, result.report, last, of_groups[-1:])
    if task.report_fn is not None:
        found = task.report_fn(job.plan, start, params, report["outcome"])
        report = finite(report | dict(found))
    return Outcome(params, releases, steps, values, last, of_groups, report)


def _report(
    job: Job, of_fit: dict[str, Any], metric: float, errors: np.ndarray
) -> dict[str, Any]:
    """Returns the loop's report with the command line's fields."""
    dataset = job.task.dataset
    fields = {
        "algorithm": job.algorithm,
        "dataset": dataset.name,
        "model": job.task.model,
        "loss": job.task.loss,
        "num_test_examples": len(dataset.test[0]),
        job.task.metric: metric,
        **_of_groups(job, metric, errors),
        "recipe": job.recipe,
        "note": dataset.note,
    }
    return reported(of_fit, fields)


def _of_groups(job: Job, metric: float, errors: np.ndarray) -> dict[str, Any]:
    """Returns the report's fields on groups; errors (1, num_groups) on public records."""
    groups = job.task.groups
    if groups is None:
        return {}
    names, there = groups.names, ~np.isnan(errors)  # Some have no public records.
    return {
        "group": groups.group,
        "group_probabilities": dict(zip(names, groups.probabilities, strict=True)),
        "test_average_error": 1 - metric,
        "test_worst_group_error": float(np.max(errors, where=there, initial=-np.inf)),
        "test_group_errors": dict(zip(names, errors[0].tolist(), strict=True)),
    }


def reported(
    of_fit: dict[str, Any], fields: dict[str, Any], *packages: str
) -> dict[str, Any]:
    """Returns the loop's report with more fields and versions, fit for strict JSON."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions |= {"numpy": np.__version__, "python": platform.python_version()}
    return finite(of_fit | fields | {"versions": of_fit["versions"] | versions})


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- after the run -----------------------------------------------------------------


def written(report: dict[str, Any], timings: str | None) -> bytes:
    """Encodes the public report; timings are left out unless ``timings`` is "public"."""
    hidden = () if timings == "public" else reporting.TIMING
    shown = {name: value for name, value in report.items() if name not in hidden}
    return (json.dumps(shown, indent=2, allow_nan=False) + "\n").encode()


def write(job: Job, outcome: Outcome, timings: str) -> None:
    """Writes the results of a run; plan.json was written before the run."""
    params = job.task.saved_fn(outcome.params)
    record.save_params(job.out / PARAMS, params)
    title = f"{job.algorithm} on {job.task.dataset.name} ({job.task.model})"
    groups = () if job.task.groups is None else job.task.groups.names
    plots.progress(
        job.out / PROGRESS,
        title=title,
        steps=outcome.steps,
        metrics=outcome.metrics,
        metric=job.task.metric,
        returned=outcome.returned if job.task.returned else None,
        returned_is=job.task.returned,
        spent=spent_over_time(job.plan, outcome.steps, outcome.report),
        delta=job.plan.delta,
        groups=dict(zip(groups, outcome.errors.T, strict=True)) if groups else None,
    )
    (job.task.draw or _draw)(job.out / RELEASES, title, job.plan, outcome)
    replace(job.out / REPORT, written(outcome.report, timings))


def _draw(path: pathlib.Path, title: str, plan: Plan, outcome: Outcome) -> None:
    """Plots the releases of a plan of slopes or gradients."""
    about = plan.describe()
    parameters = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(outcome.params))
    plots.releases(
        path,
        title=title,
        releases=outcome.releases,
        noise_std=about.stds,
        num_parameters=None if plan.replayable else parameters,
        released=about.released,
        follows_movement=about.at_most,
    )


def spent_over_time(
    plan: Plan, steps: list[int], report: Mapping[str, int]
) -> list[tuple[int, float]] | None:
    """Returns (t, epsilon after t steps) at some steps; None without a finite epsilon.

    Steps that were charged but not done, as the report has them, count from the start.
    """
    if plan.delta is None or not math.isfinite(plan.epsilon()):
        return None
    lost = report["steps_charged"] - report["steps_done"]
    # Closed forms cost nothing; other accountants take about a second for each point.
    most = 5 if plan.sampling.amplifies else 50
    chosen = [1, *steps[:: -(-len(steps) // most)], steps[-1]]
    return [(t, float(plan.spent(t + lost))) for t in sorted(set(chosen))]


def summary(job: Job, outcome: Outcome, timings: str) -> Table:
    """Returns a table of the privacy spent and the metrics reached."""
    report = outcome.report
    table = spending(f"{job.algorithm} on {job.task.dataset.name}", job.plan, report)
    metric = report[job.task.metric]
    table.add_row(
        f"reached: {job.task.metric.replace('_', ' ')}",
        f"{'not finite' if metric is None else f'{metric:.4f}'} on "
        f"{report['num_test_examples']} held-out public records",
    )
    if job.task.groups is not None:
        table.add_row("average error", f"{report['test_average_error']:.4f}")
        errors = report["test_group_errors"]
        table.add_row(
            "error of the worst group",
            f"{report['test_worst_group_error']:.4f}: "
            + ", ".join(f"{name} {_shown(error)}" for name, error in errors.items()),
        )
    for row in job.task.rows_fn(report) if job.task.rows_fn else ():
        table.add_row(*row)
    table.add_row(*duration(report, timings))
    table.add_row("data", report["note"])
    table.add_row("written", f"{job.out}: {', '.join(FILES)}")
    return table


def _shown(error: float | None) -> str:
    return "without records" if error is None else f"{error:.4f}"


def spending(
    title: str, plan: Any, report: dict[str, Any], row: tuple[str, str] | None = None
) -> Table:
    """Returns a table that begins with the privacy spent, and the plan's noise or a row."""
    table = Table(title=title, title_justify="left", show_header=False)
    epsilon = report["epsilon"]
    spent = "infinite: not private"
    if epsilon is not None:
        spent = (
            f"{epsilon:.4g} at delta {report['delta']:g}, {plan.relation} "
            f"({report['accountant']})"
        )
    insecure = report["seed_source"] == "insecure"
    private = {
        True: "yes, randomness from the operating system",
        False: "no: reproducible seed" if insecure else "no",
    }[report["private"]]
    table.add_row("spent: epsilon", spent)
    table.add_row("private", private)
    table.add_row(*(row or ("noise", plan.describe().noise)))
    table.add_section()
    return table


def duration(report: dict[str, Any], timings: str | None) -> tuple[str, str]:
    """Returns the row of a run's device and, if ``timings`` is "public", of its times.

    Standard output is often kept or sent, as the report is.
    """
    device = report["device"]
    if timings != "public":
        return "device", f"{device} (times are not public: --timings)"
    rate = report["steps_per_second"]
    return "time", (
        f"compile {report['compile_seconds']:.2f} s, train "
        f"{report['train_seconds']:.2f} s ({rate:.{0 if rate >= 10 else 2}f} steps/s) on "
        f"{device}"
    )
