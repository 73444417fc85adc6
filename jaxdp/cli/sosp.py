"""Second-order stationary points on the command line: ``jaxdp train sosp``."""

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import metrics, models, plans
from jaxdp.cli import options, plots
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.cli.steps import given
from jaxdp.cli.task import Chosen, Task, dataset_of
from jaxdp.core import validate
from jaxdp.core.keys import Keys
from jaxdp.kernels import stretch
from jaxdp.metrics.second_order import SospAlpha
from jaxdp.sosp.theory import design

MODEL = "factorization"
#: Public records from which on a deviation is taken for typical.
_LEAST_PUBLIC = 30
#: Parameters up to which Hessians are formed.
_MOST_DENSE = 500
#: A threshold below so much of the start's curvature is told from it by a noised Hessian.
_MARGIN = 0.9
#: An escape begins where the estimated gradient is no longer than so many of its errors.
#: The error's noise is about a quarter of its bound: what is left goes into alpha.
_TRIGGER_FACTOR = 0.4
#: Differences between two refreshes, at most: the way down takes about half as many.
_MAX_DIFFERENCES = 24
#: Most steps: an escape is one step, or some hundreds.
_MAX_STEPS = {"released": 100, "on_demand": 1000, "tracked": 1000}

#: Settings of a ``plans.SOSP.certified`` that are options; ``accuracy`` None is the least
#: for which the records are expected to be enough; ``num_steps`` None is more than those
#: allow. The rest follows from public constants of the problem, except for the threshold of
#: escapes and the number of differences between refreshes, which were chosen after a few
#: runs on the training records of the digits.
RECIPE: dict[str, Any] = {
    "num_steps": None,
    "rank": 1,
    "accuracy": None,
    "failure_probability": 0.1,
    "hessian": "released",
    "prefix_noise": "sqrt_toeplitz",
}


def prepare(command: options.SOSP, keys: Keys) -> Chosen:
    """Returns task, recipe and plan of a command, all of it checked."""
    dataset = dataset_of(command)
    with usage(command):
        validate.integer(rank=command.rank, at_most=dataset.num_features)
        if command.microbatch_size is not None:
            validate.integer(
                at_most=stretch.MAX_SLICE, microbatch_size=command.microbatch_size
            )
    recipe = RECIPE | given(command, RECIPE)
    task, problem = of_features(dataset, command.rank, command.hessian)
    with usage(command, "--epsilon"):
        plan = make_plan(
            recipe,
            problem,
            num_examples=dataset.num_examples,
            relation=command.relation,
            epsilon=command.epsilon,
            delta=command.delta,
        )
    _check_start(alpha_of(dataset, command.rank, task.init(keys.direction)), plan)
    return Chosen(task, recipe, plan)


# --- the problem and its plan ------------------------------------------------------


class Smooth(NamedTuple):
    """Public constants of a problem: size, radius, bounds on derivatives, deviation."""

    dim: int  # parameters
    radius: float  # of the ball around the start that constants and minimum are in
    lipschitz: float  # of every record's loss
    smoothness: float  # of every record's gradient
    hessian_lipschitz: float  # of every record's Hessian
    hessian_frobenius: float  # bound on the norm of every record's Hessian
    deviation: float  # typical, of one record's Hessian along a direction


def of_features(
    dataset: models.Dataset, rank: int, hessian: str
) -> tuple[Task, Smooth]:
    """Returns the ``sosp`` task: principal directions of features, from the saddle at 0.

    Records are made unit vectors, each by itself, and are read in a random order, which is
    a function of their number alone: a batch is of records in a row, and data are often
    sorted. The plan knows constants that hold of any records, and how much the public ones
    differ from each other.
    """
    few = len(dataset.test[0])
    if few < _LEAST_PUBLIC:
        raise UsageError(
            f"--dataset must have at least {_LEAST_PUBLIC} public records (of a file, "
            f"--test-fraction), by which a typical deviation is judged, got {few}"
        )
    if hessian != "on_demand" and dataset.num_features * rank > _MOST_DENSE:
        raise UsageError(
            f"--hessian must be on_demand for more than {_MOST_DENSE} parameters, got "
            f"{hessian} for {dataset.num_features} features x --rank {rank}"
        )
    problem = models.PrincipalDirections(dataset.num_features, rank)
    public = models.unit_rows(dataset.test[0])
    order = np.random.default_rng(0).permutation(dataset.num_examples)
    radius, constants = problem.radius, problem.constants

    task = Task(
        dataset=dataset,
        model=MODEL,
        loss=MODEL,
        init=lambda key: problem.start,
        value_fn=problem.value_fn,
        metric="test_captured_variance",
        metric_fn=jax.jit(lambda params: models.captured_variance(params, public)),
        data=(models.unit_rows(dataset.train[0])[order],),
        draw=_draw,
        report_fn=functools.partial(report, functools.partial(alpha_of, dataset, rank)),
        rows_fn=rows,
    )
    deviation = models.moment_deviation(public)
    return task, Smooth(problem.dim, radius, *constants, deviation)


def alpha_of(dataset: models.Dataset, rank: int, params: Any) -> SospAlpha:
    """Computes how stationary the params are on the public records."""
    problem = models.PrincipalDirections(dataset.num_features, rank)
    public = models.unit_rows(dataset.test[0])
    rho = problem.constants.hessian_lipschitz
    return metrics.sosp_alpha(problem.value_fn, params, (public,), rho)


def make_plan(
    recipe: dict[str, Any],
    problem: Smooth,
    *,
    num_examples: int,
    relation: Any = "replace_one",
    epsilon: float,
    delta: float,
) -> plans.SOSP:
    """Returns the calibrated plan for a problem that starts in the middle of its ball."""
    released = recipe["hessian"] == "released"
    numbers: dict[str, Any] = {
        "num_examples": num_examples,
        "dim": problem.dim,
        "relation": relation,
        "lipschitz": problem.lipschitz,
        "smoothness": problem.smoothness,
        "hessian_lipschitz": problem.hessian_lipschitz,
        "failure_probability": recipe["failure_probability"],
        "num_steps": recipe["num_steps"] or _MAX_STEPS[recipe["hessian"]],
        "max_differences": _MAX_DIFFERENCES,
        "prefix_noise": recipe["prefix_noise"],
        "trigger_factor": _TRIGGER_FACTOR,
        # The whole way is one epoch.
        "drift_limit": problem.smoothness * problem.radius,
        "hessian": recipe["hessian"],
        "hessian_clip_norm": problem.hessian_frobenius if released else None,
        # The gradient is linear in the Hessian's part that depends on the record.
        "gradient_std": problem.deviation * problem.radius,
        "difference_std": problem.deviation,
        "hessian_std": problem.deviation,
    }
    numbers |= {"epsilon": epsilon, "delta": delta}
    accuracy = recipe["accuracy"] or _least_accuracy(numbers)
    return plans.SOSP.certified(**numbers, accuracy=accuracy)


def _least_accuracy(numbers: dict[str, Any]) -> float:
    """Finds the least accuracy at which a run is expected to end within the records.

    It reads one refresh, differences over the whole way, and the Hessians of the start and
    of the end. At the largest accuracy an escape begins anywhere, and alpha says nothing.
    """

    def fits(accuracy: float) -> bool:
        try:
            found = design.certified(**numbers, accuracy=accuracy)
        except ValueError:  # Not even a refresh and a Hessian.
            return False
        needed = found.promise.expected_records
        assert needed is not None  # It is of two of each, a tracked Hessian apart.
        needed /= 2
        if found.hessian != "tracked":
            needed += found.hessian_batch_size
        return needed <= found.num_examples

    low, high = 1e-6 * numbers["lipschitz"], numbers["lipschitz"] / _TRIGGER_FACTOR
    if not fits(high):
        raise ValueError(
            f"epsilon must be larger, or there must be more than num_examples = "
            f"{numbers['num_examples']} records, got {numbers['epsilon']}: at any accuracy "
            "a run would take more"
        )
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _check_start(found: SospAlpha, plan: plans.SOSP) -> None:
    """Refuses a plan whose run would end at the start, with a certificate for it.

    By public records, before anything is spent. Only a released Hessian has a threshold
    by which that can be told.
    """
    threshold = plan.curvature_threshold
    if (
        plan.theorem is None
        or threshold is None
        or threshold < _MARGIN * -found.min_eigenvalue
    ):
        return
    raise UsageError(
        "--epsilon or the number of records must be larger, or --accuracy smaller: a "
        f"certificate would be of alpha {plan.theorem.promise.alpha:.3g}, which the "
        f"saddle at the start has with {found:.3g}, so that the run would end there"
    )


# --- the report --------------------------------------------------------------------


def report(
    alpha_fn: Callable[[Any], SospAlpha],
    plan: plans.SOSP,
    start: Any,
    found: Any,
    outcome: dict[str, Any],
) -> dict[str, Any]:
    """Returns the report's fields on the stationarity of the start and of the result.

    Both are measured on public records: the certificate alone is of the private ones.
    """
    before, after, alpha = alpha_fn(start), alpha_fn(found), outcome["alpha"]
    return {
        "test_alpha_of_start": float(before),
        "test_min_eigenvalue_of_start": before.min_eigenvalue,
        "test_alpha": float(after),
        "test_gradient_norm": after.gradient_norm,
        "test_min_eigenvalue": after.min_eigenvalue,
        "excludes_start": None if alpha is None else alpha < before,
        "certificate": _said(plan, outcome, before),
    }


def _said(plan: plans.SOSP, outcome: dict[str, Any], start: float) -> str:
    """Describes the guarantee of a certificate, or why there is none."""
    alpha, promised = outcome["alpha"], plan.theorem is not None
    if not outcome["certified"]:
        unpromised = "" if promised else "; nothing is promised of such a plan"
        return f"none: {outcome['ended']}{unpromised}"
    if alpha is None or plan.theorem is None:
        return "an escape from the point failed, but nothing is promised of such a plan"
    # What the plan takes for typical is that of the public records.
    words = (
        f"alpha {alpha:.3g} but for a probability of "
        f"{plan.theorem.promise.failure_probability:.2g}, if sampling errors are typical"
    )
    own = f"{start:.3g} on public records"
    if alpha < start:
        return f"{words}; the saddle at the start does not have it: its own is {own}"
    return (
        f"{words}; it says little: the saddle at the start has it too, with {own}; more "
        "records or budget make it smaller"
    )


def escapes(
    path: pathlib.Path,
    *,
    title: str,
    releases: np.ndarray,
    noise_std: float,
    num_parameters: int,
    trigger_norm: float,
    num_examples: int,
    said: str,
) -> None:
    """Plots the gradients of a run with escapes, step by step, and the records read.

    ``releases``, shape=(num_steps, 6), are rows of ``SOSPInfo``; ``noise_std`` is of a
    coordinate of an estimated gradient, at most; an escape begins at ``trigger_norm``.
    """
    kind, spent, norm, left = releases.T[:4]
    steps = np.arange(1, len(releases) + 1)
    fig, (top, bottom) = plots.figure(2, figsize=(7, 5.6))
    fig.suptitle(title)
    asked = kind > 0
    top.plot(steps[asked], norm[asked], color=plots.BLUE, linewidth=1)
    small = asked & (norm <= trigger_norm)
    style: dict[str, Any]
    marks: tuple[tuple[np.ndarray, str, str, str], ...] = (
        (kind == 1, "s", plots.BLUE, "refresh"),
        (kind == 2, ".", plots.BLUE, "refresh and differences since"),
        (small, "o", plots.ORANGE, "an escape begins"),
    )
    for which, marker, color, label in marks:
        style = {"linestyle": "none", "color": color, "label": label}
        if marker == "o":  # Around the query's own mark.
            style |= {"markersize": 11, "fillstyle": "none"}
        if which.any():
            top.plot(steps[which], norm[which], marker, **style)
    inside = left >= 0
    if inside.any():
        style = {"color": plots.ORANGE, "alpha": 0.15, "linewidth": 0, "step": "mid"}
        style |= {"label": "steps of an escape", "transform": top.get_xaxis_transform()}
        top.fill_between(steps, 0, 1, where=inside, **style)
    top.axhline(trigger_norm, color=plots.ORANGE, linestyle="--", linewidth=1.2)
    alone = noise_std * np.sqrt(num_parameters)
    label = f"noise alone: at most {alone:.3g}"
    top.axhline(alone, color=plots.BLACK, linestyle=":", linewidth=1, label=label)
    top.set_ylim(bottom=0)
    top.set_ylabel("norm of the\nreleased gradient")
    plots.titled(top, said)
    top.legend(frameon=False, fontsize="small")
    bottom.step(steps, np.cumsum(spent), color=plots.BLUE, where="mid")
    bottom.axhline(num_examples, color=plots.BLACK, linestyle=":", linewidth=1)
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("records read\nby gradients")
    words = f"{num_examples} records in all; escapes read others (not shown)"
    plots.titled(bottom, words)
    bottom.set_xlabel("step")
    bottom.set_xlim(0, len(releases) + 1)
    plots.save(fig, path)


def _draw(path: Any, title: str, plan: plans.SOSP, outcome: Any) -> None:
    escapes(
        path,
        title=title,
        releases=outcome.releases[: outcome.report["steps_done"]],
        noise_std=plan.noise_std,
        num_parameters=sum(x.size for x in jax.tree.leaves(outcome.params)),
        trigger_norm=plan.trigger_norm,
        num_examples=plan.num_examples,
        said=f"certificate: {outcome.report['certificate'].partition(',')[0]}",
    )


def rows(job_report: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows of a summary: certificate, alpha, and how the run ended."""
    outcome = job_report["outcome"]
    queries = (
        f"{outcome['records_used']} of {job_report['num_examples']} records: refreshes "
        f"{outcome['refreshes']}, differences {outcome['differences']}, escapes "
        f"{outcome['escapes']}"
    )
    before, after = (job_report[name] for name in ("test_alpha_of_start", "test_alpha"))
    return [
        ("certificate", job_report["certificate"]),
        ("alpha on public records", f"{after:.4g}; {before:.4g} at the start"),
        ("ended", f"{outcome['ended']}, after {queries}"),
    ]
