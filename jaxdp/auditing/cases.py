"""Cases of an audit: how the plans of one kind of release are attacked."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp.accounting import Epsilon
from jaxdp.auditing import (
    attacks,
    bounds,
    canaries,
    grid_releases,
    measured,
    second_order,
    short_run,
    simulation,
    units,
    vertices,
)
from jaxdp.auditing.canaries import Canary, DataSet
from jaxdp.auditing.units import Unit
from jaxdp.core import validate
from jaxdp.core.keys import Keys
from jaxdp.mechanism.plan import Plan
from jaxdp.sampling import FullBatch

# How the runs are divided: this share to learn the attacks, as many to choose one, the
# rest to test it. Fewer where the best attack has nothing to learn.
_LEARN, _LEARN_DRAWS = 0.2, 0.1
# Vertices of a shortened plan: what one record shows does not depend on their number.
_MOST_VERTICES = 16
# And its records, where all of them are in every step: longer steps make up for them.
_MOST_RECORDS = 64


class AuditCase(NamedTuple):
    """Attack on plans of one kind of release: functions of a plan."""

    #: The pairs of data sets that are compared.
    canaries: Callable[[Any], tuple[Canary, ...]]
    #: (plan, data, num_runs, seed) -> (W, num_runs, ...): what runs on each set release.
    transcripts: Callable[[Any, Sequence[DataSet], int, int], np.ndarray]
    #: (plan, canary, first, second) -> scores by name, learned from both's transcripts.
    attacks: Callable[..., dict[str, attacks.Score]]
    #: (plan, num_steps) -> a plan that takes few steps.
    shortened: Callable[[Any, int], Any]
    #: Why transcripts cannot be audited, to end "plan must ", or "".
    refused: Callable[[Any], str] = lambda plan: ""
    #: (plan, public, unit) -> what is read as integers of a grid; None if no noise is
    #: added.
    mechanism: Callable[[Any, Keys, Unit], grid_releases.Mechanism] | None = None
    #: The plan that is audited in place of one.
    prepared: Callable[[Any], Any] = lambda plan: plan
    keeps_noise: bool = (
        False  # whether a shortened plan's epsilon is the plan's as it is
    )
    losses: bool = True  # whether runs evaluate a loss, which jaxdp.per_user can lift
    draws: bool = False  # whether vertices are drawn, and nothing else is released
    zcdp: bool = False  # whether zCDP is claimed, but of Gaussians alone
    learn: float = _LEARN  # share of the runs that attacks learn from


def case_of(plan: Plan) -> AuditCase:
    """Returns the case of a plan, by the kind of its releases."""
    validate.instance(Plan, plan=plan)
    validate.one_of(CASES, **{"plan.released": plan.released})
    return CASES[plan.released]


def unit_named(plan: Plan, unit: str) -> Unit:
    """Returns the unit of that name; ValueError if the plan has no case of it."""
    validate.one_of(units.UNITS, unit=unit)
    found = units.UNITS[unit]
    if found is not units.RECORD and not case_of(plan).losses:
        raise ValueError(
            f"unit must be {units.RECORD.name!r} for {type(plan).__name__}, whose audit "
            f"has no loss for jaxdp.per_user to lift, got {unit!r}"
        )
    return found


def accounted(plan: Any, delta: float | None) -> tuple[float, Epsilon]:
    """Returns delta and epsilon of a plan; ValueError without noise, where it adds any."""
    if not case_of(plan).draws and not plan.noise_multiplier:
        raise ValueError(
            "plan must have noise to be audited, got noise_multiplier = "
            f"{plan.noise_multiplier!r}"
        )
    epsilon = plan.epsilon(delta=delta)
    return plan.delta if delta is None else delta, epsilon


def rule_of(
    plan: Any, delta: float, epsilon: Epsilon, failure_prob: float
) -> bounds.Rule:
    """Returns the rule by which errors of an attack on a plan become an epsilon."""
    # Where who is read when is known, each run is a sequence of Gaussians.
    closed_form = epsilon.accountant == "Gaussian closed form"
    gaussian = closed_form and not plan.sampling.amplifies
    case = case_of(plan)
    pure = epsilon.accountant == "pure composition"  # So that delta = 0 is claimed.
    return bounds.Rule(
        0.0 if pure else delta,
        failure_prob,
        gaussian,
        zcdp=case.zcdp and not gaussian,
        per_root_rho=epsilon / math.sqrt(plan.rho) if case.draws and pure else None,
    )


def _shorter_sums(plan: Any, num_steps: int) -> Any:
    if plan.num_steps <= num_steps:
        return plan
    return dataclasses.replace(plan, num_steps=num_steps, noise_multiplier=None)


def _shorter_increments(plan: Any, num_steps: int) -> Any:
    """Shortens the periods too, so that there are two; with no more records than needed."""
    if plan.clip_tuning is not None:  # One restart has no next one, where clips move.
        num_steps = max(num_steps, 2)
    if plan.num_steps <= num_steps:
        return plan
    period = min(plan.sampling.period, max(num_steps // 2, 1))
    sampler = dataclasses.replace(plan.sampling, period=period)
    if plan.multi_pass:
        records = min(plan.num_examples, _MOST_RECORDS)
    else:
        records = sampler.records_per_period * -(-num_steps // period)
    return dataclasses.replace(
        plan,
        num_steps=num_steps,
        noise_multiplier=None,
        sampling=sampler,
        num_examples=records,
    )


def _shorter_draws(plan: Any, num_steps: int) -> Any:
    """Takes longer steps, two at least: in the first one nothing depends on data."""
    in_all_steps = plan.sampling == FullBatch()
    most = {"num_steps": max(num_steps, 2), "num_draws": vertices.MOST_DRAWS}
    for name in ("dim", "dim_x", "dim_y", "domain_size", "num_queries"):
        most[name] = _MOST_VERTICES
    if in_all_steps:
        most["num_examples"] = _MOST_RECORDS
    changes = {k: limit for k, limit in most.items() if getattr(plan, k, 0) > limit}
    if "num_steps" in changes and not in_all_steps:
        changes["num_examples"] = most["num_steps"] * plan.sampling.batch_size
    return dataclasses.replace(plan, **changes) if changes else plan


def _refused_draws(plan: Any) -> str:
    plan.check_ready()
    if plan.sampler != "integer":
        need, got = 'sampler="integer"', f"{plan.sampler!r}, which promises nothing"
    elif plan.rho == 0:
        need = "steps that depend on data"
        got = f"num_steps = {plan.num_steps} and rho = 0"
    else:
        return ""
    return f"have {need} to be audited, got {got}"


_SUMS = AuditCase(
    canaries.of_sums,
    simulation.transcripts,
    attacks.attacks,
    _shorter_sums,
    mechanism=grid_releases.of_slopes,
)
_INCREMENTS = AuditCase(
    canaries.of_increments,
    simulation.transcripts,
    functools.partial(attacks.attacks, logged=1),  # The norm of an increment.
    _shorter_increments,
    mechanism=grid_releases.of_increments,
)
_DRAWS = AuditCase(
    vertices.canaries,
    vertices.transcripts,
    vertices.attacks,
    _shorter_draws,
    _refused_draws,
    losses=False,
    draws=True,
    zcdp=True,
    learn=_LEARN_DRAWS,
)

#: The case of each ``Plan.released``.
CASES: dict[str, AuditCase] = {
    "slopes": _SUMS,
    "gradients": _SUMS._replace(mechanism=grid_releases.of_gradients),
    "increments": _INCREMENTS,
    "prefix sums": _SUMS._replace(
        refused=lambda plan: (
            "make its own releases to be audited, got "
            f"{type(plan).__name__}, whose updates come from elsewhere"
        ),
        mechanism=grid_releases.of_prefix_sums,
        losses=False,
    ),
    "marginals": AuditCase(
        measured.canaries,
        measured.transcripts,
        measured.attacks,
        measured.shortened,
        measured.refused,
        mechanism=grid_releases.of_marginals,
        losses=False,
        zcdp=True,
        learn=_LEARN_DRAWS,
    ),
    "queries of a search": AuditCase(
        second_order.canaries,
        second_order.transcripts,
        second_order.attacks,
        short_run.shortened,
        mechanism=grid_releases.of_search,
        prepared=short_run.prepared,
        keeps_noise=True,
    ),
    "vertices": _DRAWS,
    "vertices of iterates": _DRAWS,
    "vertices of batches": _DRAWS,
    "queries": _DRAWS,
    "vertices of the output": _DRAWS._replace(
        refused=lambda plan: (
            "release every vertex that it draws to be audited, got "
            f"{type(plan).__name__}, which releases those of its output alone; "
            "plans.Saddle draws and moves scores by the same code"
        )
    ),
}
