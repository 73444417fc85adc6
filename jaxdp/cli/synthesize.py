"""``jaxdp synthesize``: synthetic records of a table, by private answers to queries."""

import csv
import io
import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from jaxdp import plans
from jaxdp.cli import (
    options,
    overlap,
    parsing,
    plots,
    record,
    shared_budget,
    train,
)
from jaxdp.cli.parsing import UsageError, flag, usage
from jaxdp.cli.prepare import can_be_written, keys_of
from jaxdp.cli.printing import conclude, has_bar
from jaxdp.core import keys as keys_lib
from jaxdp.data import binning, quality, synthesis
from jaxdp.data.datasets import split_rows
from jaxdp.models import show_values
from jaxdp.saddle.oracles import queries as queries_lib
from jaxdp.training.ledger import PLAN, REPORT, replace

HISTOGRAM, QUALITY, PLOT = "histogram.npz", "quality.json", "queries.png"
FILES = (PLAN, REPORT, HISTOGRAM, QUALITY, PLOT)
#: Number of the format of ``quality.json``.
QUALITY_FORMAT = 1
#: Expected total variation by noise in a table above which a warning says so.
_LARGE_NOISE = 0.1

_SPLIT_SEED = 0
#: Methods that take a number of steps.
_STEPPED = ("mwem", "mirror_descent")
#: What answers queries, and how its errors are called in the report.
_CANDIDATES = {
    "synthetic records": "",
    "released histogram": "_released",
    "uniform histogram": "_uniform",
}
#: The names of references in plots and tables.
_PUBLIC, _PRIVATE = "public records", "the private records (not private)"
#: And of the same in the reports.
_NAMES = {_PUBLIC: "test", _PRIVATE: "unsafe"}


class Job(NamedTuple):
    """Checked inputs of a run: bins, queries, records, plan, keys and folder."""

    bins: binning.Binning
    queries: queries_lib.Marginals
    codes: np.ndarray  # shape=(n,), dtype=int32; private
    public: np.ndarray | None  # shape=(n_public,), dtype=int32
    choice: synthesis.Choice
    keys: keys_lib.Keys
    num_records: int
    folder: pathlib.Path


class Outcome(NamedTuple):
    """Result of a run; public, except for ``unsafe`` numbers that were asked for."""

    histogram: np.ndarray  # shape=(domain_size,), dtype=float32
    codes: np.ndarray  # shape=(num_records,), dtype=int64
    uniforms: np.ndarray  # shape=(num_records, columns); of the numbers within bins
    quality: dict[str, Any]
    report: dict[str, Any]


def run(command: options.Synthesize) -> None:
    """Checks everything, releases, writes table and folder, prints what was reached."""
    with show_values(command.show_values):
        job = prepare(command)
    shared_budget.reserve(command, job.choice.plan, f"synthesize {command.output}")
    outcome = release(job, command)
    write(job, command, outcome)
    conclude(command, job.folder / REPORT, lambda: summary(job, command, outcome))


# --- before the run ----------------------------------------------------------------


def prepare(command: options.Synthesize) -> Job:
    """Checks the options and makes all that they name, from cheap to costly."""
    folder = command.report or pathlib.Path("runs", command.output.stem)
    _check_paths(command, folder)
    if command.public is not None and command.test_fraction is not None:
        raise UsageError(
            "--test-fraction must be left out where --public is given, got "
            f"{command.test_fraction}"
        )
    parsing.check(command)
    with usage(command):
        bins = binning.binning(command.bins)
        queries = synthesis.marginals(bins.sizes, command.degree)
    if command.num_steps is not None and command.method not in _STEPPED:
        raise UsageError(
            f"--num-steps is for --method {' or '.join(_STEPPED)} only, got "
            f"{command.num_steps}"
        )
    keys = keys_of(command)
    rows = _rows(command, "input", bins)
    codes, public, shown = bins.encode(rows), None, []
    if command.public is not None:
        shown = _rows(command, "public", bins)
        public = bins.encode(shown)
        _refuse_private(command, rows, shown, codes, public)
    if command.test_fraction is not None:
        with usage(command):
            kept, held_out = split_rows(
                len(codes), command.test_fraction, _SPLIT_SEED, "test_fraction"
            )
        codes, public = codes[kept], codes[held_out]
        shown = [rows[i] for i in held_out]
    if public is not None and np.all(public == binning.OUTSIDE):
        option = "--public" if command.public else "--test-fraction"
        raise UsageError(
            f"{option} must give public records that --bins describes, got "
            f"{len(public)} that it does not: {bins.undescribed(shown)}"
        )
    with usage(command, "--epsilon"):  # What is wrong with the numbers together.
        choice = synthesis.planned(
            queries,
            num_examples=len(codes),
            relation=command.relation,  # pyright: ignore[reportArgumentType]
            epsilon=command.epsilon,
            delta=command.delta,
            num_steps=command.num_steps,
            method=command.method,  # pyright: ignore[reportArgumentType]
        )
    if public is not None:
        _warn_of_undescribed(bins, shown, public)
    _warn_of_noise(choice)
    num_records = command.num_records or len(codes)
    return Job(bins, queries, codes, public, choice, keys, num_records, folder)


def _warn_of_undescribed(
    bins: binning.Binning, shown: list[list[str]], public: np.ndarray
) -> None:
    """Warns where the bins do not describe PUBLIC records; private ones say nothing."""
    if outside := int(np.sum(public == binning.OUTSIDE)):
        warnings.warn(
            f"the bins do not describe {outside} of {len(public)} public records; such "
            f"records lie in no cell and blur the table: {bins.undescribed(shown)}",
            stacklevel=2,
        )


def _warn_of_noise(choice: synthesis.Choice) -> None:
    """Warns where the noise on a table is larger than what tables usually tell."""
    if choice.noise_std is None:
        return
    measured: Any = choice.plan
    noise = synthesis.expected_noise(measured.queries, choice.noise_std)
    cells = float(np.mean(np.diff(measured.queries.offsets)))
    if noise > _LARGE_NOISE:
        warnings.warn(
            f"noise moves the {cells:.3g} cells of a measured table by {noise:.2g} in "
            "total variation, where 1 is all of it: fewer bins, a smaller --degree, more "
            "records or a larger --epsilon are needed",
            stacklevel=2,
        )


def _refuse_private(
    command: options.Synthesize, rows: Any, shown: Any, codes: Any, public: Any
) -> None:
    """Refuses private records as public ones, compared as texts and as codes."""
    with usage(command, "--public"):  # A folder on the way that may not be read.
        same = command.public and overlap.same_file(command.input, command.public)
    if same:
        raise UsageError(
            f"--public must be another file than --input, got {str(command.public)!r}: "
            "metrics are published without noise"
        )
    about = ("--public", "--input", command.public)
    overlap.refuse(map(tuple, rows), map(tuple, shown), *about)
    overlap.refuse(codes.tolist(), public.tolist(), *about)


def _rows(
    command: options.Synthesize, name: str, bins: binning.Binning
) -> list[list[str]]:
    """Reads the records of an option's file, as texts."""
    path = getattr(command, name)
    with usage(command, flag(name)):
        rows = binning.read_rows(path, bins.names)
    if not rows:
        raise UsageError(f"{flag(name)} must have records, got none in {str(path)!r}")
    return rows


def _check_paths(command: options.Synthesize, folder: pathlib.Path) -> None:
    """Refuses to write over what is there, or where nothing can be written."""
    output = command.output
    if output.is_dir():
        raise UsageError(f"--output must be a file, got the folder {str(output)!r}")
    written = {output.resolve(), output.with_name(output.name + ".part").resolve()}
    for name in ("input", "bins", "public"):
        path = getattr(command, name)
        if path is not None and path.exists() and path.resolve() in written:
            raise UsageError(
                f"--output must be another file than {flag(name)}, and not be written by "
                f"way of it, got {str(output)!r} and {str(path)!r}"
            )
    if output.exists() and not command.overwrite:
        raise UsageError(
            f"--output must be a new file, or --overwrite given; got {str(output)!r}"
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--report must be a folder, got the file {str(folder)!r}")
    if folder.is_dir() and any(folder.iterdir()) and not command.overwrite:
        raise UsageError(
            "--report must be a new or empty folder, or --overwrite given; got "
            f"{str(folder)!r}"
        )
    for name in FILES:
        if (folder / name).is_dir():
            raise UsageError(
                f"--report must be a folder in which {name} is no folder, got "
                f"{str(folder)!r}"
            )
    for option, path in (("--output", output.parent), ("--report", folder)):
        if not can_be_written(path):
            raise UsageError(f"{option} must be where files can be written, got {path}")


# --- the run -----------------------------------------------------------------------


def release(job: Job, command: options.Synthesize) -> Outcome:
    """Runs the plan, draws the records and judges them."""
    result = synthesis.release(
        job.choice,
        job.keys,
        job.codes,
        job.queries,
        progress=has_bar(command),
    )
    codes = synthesis.drawn(job.keys, result.histogram, job.num_records)
    shape = job.num_records, len(job.bins.columns)
    uniforms = keys_lib.uniforms(job.keys, shape, index=1)
    outcome = Outcome(result.histogram, codes, uniforms, {}, {})
    judged = _judged(job, command, outcome, result)
    outcome = outcome._replace(quality=judged)
    return outcome._replace(report=_report(job, command, result.report, outcome))


def _judged(
    job: Job, command: options.Synthesize, outcome: Outcome, result: synthesis.Release
) -> dict[str, Any]:
    """Compares the records with what was measured and with all references."""
    counts = None if result.measured is None else quality.measured(result.measured)
    named = {_NAMES[name]: codes for name, codes in _compared(job, command).items()}
    weights = {name: _weights(codes, job) for name, codes in named.items()}
    judged = quality.judged(job.bins, _weights(outcome.codes, job), counts, weights)
    outside: dict[str, Any] = {
        name: float(np.mean(codes == binning.OUTSIDE)) for name, codes in named.items()
    }
    if result.outside is not None:
        outside["interval"] = list(result.outside)
    return {"note": quality.NOTE, "undescribed": outside, **judged}


def _compared(job: Job, command: options.Synthesize) -> dict[str, np.ndarray]:
    """Returns the codes of what answers are compared with, by name."""
    given = {} if job.public is None else {_PUBLIC: job.public}
    return given | ({_PRIVATE: job.codes} if command.unsafe_metrics else {})


def references(job: Job, command: options.Synthesize) -> dict[str, np.ndarray]:
    """Returns the histograms of sum 1 that answers are compared with, by name."""
    given = _compared(job, command).items()
    return {name: _weights(codes, job) for name, codes in given}


def _weights(codes: np.ndarray, job: Job) -> np.ndarray:
    size = job.queries.domain_size
    counts = np.asarray(queries_lib.histogram(jnp.asarray(codes), domain_size=size))
    return (counts / max(1, counts.sum())).astype(np.float32)


def errors(job: Job, outcome: Outcome, reference: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the absolute error of each query (m,), by name of the answering histogram."""
    uniform = np.full_like(reference, 1 / len(reference))
    weights = _weights(outcome.codes, job), outcome.histogram, uniform
    means = jax.jit(job.queries.evaluate)
    half = job.queries.half_range
    return {
        name: half * np.abs(np.asarray(means(jnp.asarray(one - reference))))
        for name, one in zip(_CANDIDATES, weights, strict=True)
    }


def _report(
    job: Job, command: options.Synthesize, of_fit: dict[str, Any], outcome: Outcome
) -> dict[str, Any]:
    """Returns the loop's report with the command line's fields."""
    fields: dict[str, Any] = {
        "input": command.input.name,
        "columns": dict(zip(job.bins.names, job.bins.sizes, strict=True)),
        "domain_size": job.queries.domain_size,
        "degree": list(command.degree),
        "method": job.choice.method,
        "method_reason": job.choice.reason,
        "num_queries": job.queries.num_queries,
        "num_records": job.num_records,
        "num_test_examples": 0 if job.public is None else len(job.public),
        "plan": json.loads(job.choice.plan.to_json()),
        "note": _note(job, command),
    }
    for name, reference in references(job, command).items():
        prefix = _NAMES[name]
        found = errors(job, outcome, reference)
        for kind, suffix in _CANDIDATES.items():
            fields[f"{prefix}_worst_query_error{suffix}"] = float(found[kind].max())
    fields["quality"] = quality.summarised(outcome.quality)
    outside = outcome.quality["undescribed"]
    fields["undescribed"] = {k: x for k, x in outside.items() if k != _NAMES[_PRIVATE]}
    return train.reported(of_fit, fields)


def _note(job: Job, command: options.Synthesize) -> str:
    notes = ["Bins were given, and the number of records is public."]
    if job.public is not None:
        held_out = "The held-out records count as public."
        notes.append("Judged on given public records." if command.public else held_out)
        if outside := int(np.sum(job.public == binning.OUTSIDE)):
            notes.append(f"The bins do not describe {outside} of the public records.")
    if command.unsafe_metrics:
        notes.append("Report and plot are not private: numbers called unsafe are true.")
    return " ".join(notes)


# --- after the run -----------------------------------------------------------------


def write(job: Job, command: options.Synthesize, outcome: Outcome) -> None:
    """Writes the table and the folder."""
    try:
        command.output.parent.mkdir(parents=True, exist_ok=True)
        job.folder.mkdir(parents=True, exist_ok=True)
        replace(command.output, _csv(job, outcome))
        replace(job.folder / PLAN, (job.choice.plan.file_text() + "\n").encode())
        record.save_params(job.folder / HISTOGRAM, outcome.histogram)
        judged = {"format": QUALITY_FORMAT, **outcome.quality}
        text = json.dumps(judged, indent=1) + "\n"
        replace(job.folder / QUALITY, text.encode())
        _plot(job, command, outcome)
        replace(job.folder / REPORT, train.written(outcome.report, command.timings))
    except OSError as error:
        raise UsageError(
            f"--output and --report must be where files can be written: {error}"
        ) from error


def _csv(job: Job, outcome: Outcome) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(job.bins.names)
    writer.writerows(job.bins.decode(outcome.codes, outcome.uniforms))
    return text.getvalue().encode()


def queries(
    path: pathlib.Path,
    *,
    title: str,
    errors: Mapping[str, Mapping[str, np.ndarray]],
    columns: Mapping[str, tuple[Sequence[str], Mapping[str, np.ndarray]]],
    correlations: Sequence[Mapping[str, Any]],
) -> None:
    """Plots the errors of all queries, the columns' shares and the pairs' correlations.

    ``errors``, perhaps empty: what is compared with -> what answers -> its errors (m,),
    drawn largest first.
    ``columns``: name -> (labels of the cells, whose -> shares of the cells).
    ``correlations``, perhaps empty: those of :func:`jaxdp.data.quality.judged`.
    """
    chosen = list(columns.items())
    rows = -(-len(chosen) // 3)
    heights = [3.6] * len(errors) + [2.6] * rows + [3.6] * bool(correlations)  # Inches.
    fig = Figure(layout="constrained", figsize=(9, sum(heights) + 0.6))
    fig.suptitle(title, fontsize="medium")
    grid = fig.add_gridspec(len(heights), 3, height_ratios=heights)
    for row, (where, curves) in enumerate(errors.items()):
        axis = fig.add_subplot(grid[row, :])
        plots.plain(axis)
        colors = (plots.BLUE, plots.GREEN, plots.ORANGE)
        for (name, values), color in zip(curves.items(), colors, strict=False):
            ranks = np.arange(1, len(values) + 1)
            label = f"{name}: worst {values.max():.4f}, mean {values.mean():.4f}"
            axis.plot(ranks, np.sort(values)[::-1], color=color, label=label)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("queries, worst first")
        axis.set_ylabel("error of the share of records")
        plots.titled(axis, f"on {where}")
        axis.legend(frameon=False, fontsize="small")
    for i, (name, (labels, shares)) in enumerate(chosen):
        axis = fig.add_subplot(grid[len(errors) + i // 3, i % 3], axisbelow=True)
        plots.plain(axis)
        width = 0.8 / len(shares)
        bars = []
        for k, values in enumerate(shares.values()):
            at = np.arange(len(labels)) + (k - (len(shares) - 1) / 2) * width
            color = (plots.BLUE, plots.PURPLE, plots.YELLOW)[k]
            bars.append(axis.bar(at, values, width, color=color))
        if i == 0:
            where: Any = "outside lower center"
            fig.legend(bars, list(shares), loc=where, ncols=3, frameon=False)
        some = range(0, len(labels), -(-len(labels) // 6))
        texts = [labels[j] for j in some]
        long = sum(map(len, texts)) > 24
        turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if long else {}
        axis.set_xticks(some, texts, **turned)
        axis.tick_params(labelsize="small")
        plots.titled(axis, name)
        plots.percent(axis)
    if correlations:
        _plot_correlations(fig.add_subplot(grid[-1, :]), correlations)
    plots.save(fig, path)


def _plot_correlations(axis: Any, correlations: Sequence[Mapping[str, Any]]) -> None:
    """Draws each pair's correlations, with the interval of the private ones."""
    plots.plain(axis)
    shown = [one for one in correlations if one["synthetic"] is not None]
    shown.sort(key=lambda one: one["synthetic"])
    for name, label, mark, color in (
        ("synthetic", "synthetic records", "o", plots.BLUE),
        ("test", _PUBLIC, "x", plots.PURPLE),
        ("unsafe", _PRIVATE, "+", plots.YELLOW),
    ):
        known = [
            (i, one[name]) for i, one in enumerate(shown) if one.get(name) is not None
        ]
        if known:
            axis.plot(*zip(*known, strict=True), mark, color=color, label=label)
    ends = [(i, *one["interval"]) for i, one in enumerate(shown) if "interval" in one]
    if ends:
        label = "the private records: 95% interval, from counts with noise"
        axis.vlines(*zip(*ends, strict=True), color=plots.GREEN, label=label)
    names = [" and ".join(one["columns"]) for one in shown]
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.tick_params(labelsize="small")
    plots.titled(axis, "correlations (of bins' middles, of 0 and 1 for two categories)")
    if shown or ends:
        axis.legend(frameon=False, fontsize="small")


def _plot(job: Job, command: options.Synthesize, outcome: Outcome) -> None:
    compared = references(job, command)
    shown = {"synthetic records": _weights(outcome.codes, job)} | compared
    queries(
        job.folder / PLOT,
        title=f"{command.input.name}: {job.queries.num_queries} shares by "
        f"{_words(command.degree)} of {len(job.bins.columns)} columns, "
        f"ε = {command.epsilon:g}, δ = {command.delta:g}",
        errors={name: errors(job, outcome, one) for name, one in compared.items()},
        columns={
            column.name: (column.labels, _shares(job, axis, shown))
            for axis, column in enumerate(job.bins.columns)
        },
        correlations=outcome.quality["correlations"],
    )


def _words(numbers: Sequence[int]) -> str:
    """Writes numbers as "1, 2 or 3"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _shares(job: Job, axis: int, weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the marginal of one column, by name of the histogram."""
    sizes = job.bins.sizes
    others = tuple(i for i in range(len(sizes)) if i != axis)
    return {name: table.reshape(sizes).sum(others) for name, table in weights.items()}


def summary(job: Job, command: options.Synthesize, outcome: Outcome) -> Table:
    """Returns a table of the privacy spent and the errors reached."""
    report = outcome.report
    plan, queries = job.choice.plan, job.queries
    released = (
        f"{plan.num_steps} draws from {queries.num_queries} queries and their "
        f"negations, on {queries.domain_size} cells"
    )
    if isinstance(plan, plans.MWEM):
        first = plan.queries.columns[: plan.num_start]
        shares = int(plan.queries.offsets[plan.num_start])
        drawn = (
            f" and {plan.num_steps - 1} more that are drawn"
            if plan.num_steps > 1
            else ""
        )
        released = (
            f"{shares} shares of records in {len(first)} marginals{drawn}, of "
            f"{queries.domain_size} cells, each with noise of deviation "
            f"{plan.noise_std:.2g}"
        )
    title = f"synthetic {command.input.name}"
    table = train.spending(title, plan, report, ("released", released))
    table.add_row("method", f"{job.choice.method}: {job.choice.reason}")
    for prefix, where in (("test", _PUBLIC), ("unsafe", _PRIVATE)):
        name = f"{prefix}_worst_query_error"
        if name in report:
            table.add_row(
                "worst query error",
                f"{report[name]:.4f} on {where} (released histogram "
                f"{report[f'{name}_released']:.4f}, uniform "
                f"{report[f'{name}_uniform']:.4f})",
            )
    for name, found in report["quality"].items():
        for source, where in (
            ("interval", "at most, by the measured counts (95% each)"),
            ("test", f"on {_PUBLIC}"),
            ("unsafe", f"on {_PRIVATE}"),
        ):
            if source in found:
                one = found[source]
                table.add_row(
                    f"{name} ({found['count']})",
                    f"off by {one['mean']:.3f} (mean), {one['worst']:.3f} (worst: "
                    f"{', '.join(one['where'])}) {where}",
                )
    if ends := report["undescribed"].get("interval"):
        low, high = ends
        table.add_row(
            "undescribed records",
            f"{low:.1%} to {high:.1%} of the private ones, by the measured counts (95%), "
            "which take them as spread evenly over all cells",
        )
    table.add_row(*train.duration(report, command.timings))
    table.add_row("data", report["note"])
    table.add_row("written", f"{command.output} and {job.folder}: {', '.join(FILES)}")
    return table
