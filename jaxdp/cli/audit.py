"""``jaxdp audit``: the accounted epsilon of a plan, attacked from below."""

import dataclasses
import json
import sys
from typing import Any

import rich
from rich.table import Table

from jaxdp import auditing
from jaxdp.cli import budget, options
from jaxdp.cli.errors import UsageError, usage
from jaxdp.plans._base import SumPlan
from jaxdp.plans._plan import Plan
from jaxdp.plans.sosp import SOSP


def run(command: options.Audit) -> int:
    """Prints what the audit found; 1 if the bound is above the accounted epsilon.

    A plan of more steps than ``--num-steps`` is audited with so many steps, and so much
    less noise that its epsilon is the same: a step of a long run shows too little of a
    record to be measured. Of correlated noise the periods get shorter instead; a plan that
    draws vertices takes longer steps, with fewer vertices to draw from; of second-order
    points it is a drill with short periods and escapes.
    """
    plan = _read(command)
    with usage(command, "PLAN"):
        audited = auditing.shortened(plan, command.num_steps, delta=command.delta)
        found = auditing.audit(
            audited, num_runs=command.num_runs, delta=command.delta, seed=command.seed
        )
    answer = _answer(plan, audited, found)
    if command.json:
        print(json.dumps(answer))
    else:
        table = Table(show_header=False, box=None)
        for name, value in answer.items():
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(name, shown)
        rich.print(table)
    if found.passed and found.epsilon_lower < found.epsilon / 4:
        print(
            "jaxdp: so low a bound shows little; take more runs, or audit a plan with an "
            "epsilon of 1 to 5",
            file=sys.stderr,
        )
    return 0 if found.passed else 1


def _read(command: options.Audit) -> Plan:
    plan: Plan = budget.read_plan(command, command.plan, "PLAN")
    if isinstance(plan, SumPlan | SOSP) and not plan.noise_multiplier:
        raise UsageError(
            "PLAN must have noise to be audited, got noise_multiplier = "
            f"{plan.noise_multiplier}"
        )
    return plan


#: What an audited plan may have instead of the run's, where it has it.
_CHANGED = {
    "noise_multiplier": "noise_multiplier",
    "step_size": "step_size",
    "step_size_x": "step_size_x",
    "step_size_y": "step_size_y",
    "dim": "dim",
    "dim_x": "dim_x",
    "dim_y": "dim_y",
    "num_draws": "num_draws",
    "num_queries": "num_queries",
    "period": "noise_period",
    "max_differences": "max_differences",
    "escape_steps": "escape_steps",
}


def _answer(plan: Plan, audited: Plan, found: auditing.AuditResult) -> dict[str, Any]:
    """What is printed, by name: of the run's plan first, then of the audit."""
    run = {"plan": f"{type(plan).__name__}, {plan.num_steps} steps, {plan.relation}"}
    if isinstance(plan, SumPlan | SOSP):
        run |= {"noise_multiplier": plan.noise_multiplier}
    here = {k: getattr(audited, field, None) for k, field in _CHANGED.items()}
    return {
        **run,
        "audited_num_steps": audited.num_steps,
        **{f"audited_{k}": value for k, value in here.items() if value is not None},
        **{k: v for k, v in dataclasses.asdict(found).items() if k != "num_steps"},
        "passed": found.passed,
    }
