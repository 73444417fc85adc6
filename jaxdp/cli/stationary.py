"""Second-order stationary points on the command line: the problem and its report."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp import metrics, models, plans
from jaxdp.cli import curvature
from jaxdp.cli.errors import UsageError
from jaxdp.cli.task import Task
from jaxdp.metrics.second_order import SospAlpha

MODEL = "factorization"
#: Public records from which on a deviation is taken for typical.
_LEAST_PUBLIC = 30
#: Parameters up to which Hessians are formed.
_MOST_DENSE = 500
#: A threshold below so much of the start's curvature is told from it by a noised Hessian.
_MARGIN = 0.9


def of_features(task: Task, rank: int, hessian: str) -> tuple[Task, curvature.Smooth]:
    """Returns the ``sosp`` task: principal directions of features, from the saddle at 0.

    Records are made unit vectors, each by itself, and are read in a random order, which is
    a function of their number alone: a batch is of records in a row, and data are often
    sorted.

    Args:
      task: of any data set; only its features count.
      rank: directions, at most as many as features.
      hessian: mode of the plan.

    Returns:
      The task, and what its plan knows: constants that hold of any records, and how much
      the public ones differ from each other.

    Raises:
      UsageError: too few public records, or too many parameters for dense Hessians.
    """
    dataset = task.dataset
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
    task = task._replace(
        model=MODEL,
        loss=MODEL,
        init=lambda key: problem.start,
        value_fn=problem.value_fn,
        metric="test_captured_variance",
        metric_fn=jax.jit(lambda params: models.captured_variance(params, public)),
        data=(models.unit_rows(dataset.train[0])[order],),
        alpha_fn=_alpha_fn(problem, public),
    )
    deviation = models.moment_deviation(public)
    radius, constants = problem.radius, problem.constants
    return task, curvature.Smooth(problem.dim, radius, *constants, deviation)


def check_start(task: Task, plan: plans.SOSP, start: Any) -> None:
    """Refuses a plan whose run would end at the start, with a certificate for it.

    By public records, before anything is spent. Only a released Hessian has a threshold
    by which that can be told.

    Raises:
      UsageError: such a plan.
    """
    assert task.alpha_fn is not None and plan.theorem is not None
    threshold = plan.curvature_threshold
    found = task.alpha_fn(start)
    if threshold is None or threshold < _MARGIN * -found.min_eigenvalue:
        return
    raise UsageError(
        "--epsilon or the number of records must be larger, or --accuracy smaller: a "
        f"certificate would be of alpha {plan.theorem.alpha:.3g}, which the saddle at the "
        f"start has with {found:.3g}, so that the run would end there"
    )


def _alpha_fn(
    problem: models.PrincipalDirections, public: np.ndarray
) -> Callable[[Any], SospAlpha]:
    rho = problem.constants.hessian_lipschitz

    def alpha(params: Any) -> SospAlpha:
        return metrics.sosp_alpha(problem.value_fn, params, (public,), rho)

    return alpha


def report(
    task: Task, plan: plans.SOSP, start: Any, found: Any, outcome: dict[str, Any]
) -> dict[str, Any]:
    """Returns the report's fields on the stationarity of the start and of the result.

    Both are measured on public records: the certificate alone is of the private ones.

    Args:
      task: as :func:`of_features` makes it.
      plan: the run's.
      start: initial parameters.
      found: those that are returned.
      outcome: of the run.
    """
    assert task.alpha_fn is not None
    before, after = task.alpha_fn(start), task.alpha_fn(found)
    return {
        "test_alpha_of_start": float(before),
        "test_min_eigenvalue_of_start": before.min_eigenvalue,
        "test_alpha": float(after),
        "test_gradient_norm": after.gradient_norm,
        "test_min_eigenvalue": after.min_eigenvalue,
        "excludes_start": _excludes(outcome, before),
        "certificate": _said(plan, outcome, before),
    }


def _excludes(outcome: dict[str, Any], start: float) -> bool | None:
    """Returns True if the certificate excludes the start; None without a certificate."""
    alpha = outcome["alpha"]
    return None if alpha is None else alpha < start


def _said(plan: plans.SOSP, outcome: dict[str, Any], start: float) -> str:
    """Describes the guarantee of a certificate, or why there is none."""
    if not outcome["certified"]:
        return f"none: {outcome['ended']}"
    alpha = outcome["alpha"]
    if alpha is None or plan.theorem is None:
        return "an escape from the point failed, but nothing is promised of such a plan"
    # What the plan takes for typical is that of the public records.
    words = (
        f"alpha {alpha:.3g} but for a probability of "
        f"{plan.theorem.promise.failure_probability:.2g}, if sampling errors are typical"
    )
    if alpha < start:
        return (
            f"{words}; the saddle at the start does not have it: its own is {start:.3g} on "
            "public records"
        )
    return (
        f"{words}; it says little: the saddle at the start has it too, with {start:.3g} on "
        "public records; more records or budget make it smaller"
    )


def noise(plan: plans.SOSP) -> str:
    """Describes the noise of a plan, and the quantities that it is added to."""
    words = (
        f"{plan.noise_multiplier:.4g} x sensitivity on means of "
        f"{plan.refresh_batch_size} gradients and on how they change "
        f"({plan.prefix_noise}): {plan.noise_std:.3g} a coordinate at most"
    )
    if plan.escape_steps is None:
        return words
    batch = f"means of {plan.hessian_batch_size}"
    if plan.hessian == "released":
        return f"{words}; on {batch} Hessians: {plan.escape_std:.3g} an entry"
    return f"{words}; on products with {batch} Hessians: {plan.escape_std:.3g}"


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
