"""``jaxdp audit``: an empirical lower bound on the epsilon of a plan."""

import dataclasses
import json
import math
import sys
from typing import Any

import rich
from rich.table import Table

from jaxdp import auditing
from jaxdp.cli import budget, options
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.cli.printing import show
from jaxdp.mechanism.plan import Plan

#: The least number of runs of the lattice adversary.
_LEAST_LATTICE_RUNS = 100


def run(command: options.Audit) -> int:
    """Prints the result of the audit; returns 1 if a bound exceeds the accounted epsilon.

    A plan of more steps than ``--num-steps`` is audited with so many steps, and so much
    less noise that its epsilon is the same: a step of a long run shows too little of a
    record to be measured. Of correlated noise the periods get shorter instead; a plan that
    draws vertices takes longer steps, with fewer vertices to draw from; of second-order
    points it is a drill with short periods and escapes.

    The lattice adversary attacks the first steps of the plan as it is. It is all there is
    of a plan whose updates come from elsewhere. 1 also if low digits are not what noise
    leaves of them.
    """
    plan: Plan = budget.read_plan(command, command.plan, "PLAN")
    noise = getattr(plan, "noise_multiplier", 1.0)  # Vertices are drawn without any.
    if not noise:
        raise UsageError(
            f"PLAN must have noise to be audited, got noise_multiplier = {noise}"
        )
    if command.lattice_runs and command.lattice_runs < _LEAST_LATTICE_RUNS:
        raise UsageError(
            f"--lattice-runs must be 0 or an integer >= {_LEAST_LATTICE_RUNS}, got "
            f"{command.lattice_runs}"
        )
    audited = found = lattice = None
    delta = command.delta
    shared: dict[str, Any] = {"delta": delta, "seed": command.seed}
    shared["unit"] = command.unit
    with usage(command, "PLAN"):
        if not (plan.takes_updates and command.lattice_runs):
            audited = auditing.shortened(plan, command.num_steps, delta=delta)
            found = auditing.audit(audited, num_runs=command.num_runs, **shared)
        if command.lattice_runs:
            lattice = auditing.lattice(plan, num_runs=command.lattice_runs, **shared)
    passed = all(one.passed for one in (found, lattice) if one is not None)
    answer = _answer(plan, audited, found) | {"passed": passed}
    if command.json:
        print(json.dumps(answer | {"lattice": _lattice(lattice)}))
    else:
        show(answer)
        if lattice is not None:
            _show_lattice(lattice)
    if found is not None and found.passed and found.epsilon_lower < found.epsilon / 4:
        print(
            "jaxdp: so low a bound shows little; take more runs, or audit a plan with an "
            "epsilon of 1 to 5",
            file=sys.stderr,
        )
    return 0 if passed else 1


def _show_lattice(lattice: auditing.LatticeResult) -> None:
    """Prints the lattice adversary's result, and a table with one row a release."""
    answer: dict[str, Any] = {
        "lattice_flagged": lattice.flagged,
        "lattice_epsilon_lower": lattice.epsilon_lower,
        "lattice_method": lattice.method,
        "lattice_runs": lattice.num_runs,
    }
    if lattice.reason:
        answer = {"lattice": f"not applicable: {lattice.reason}"}
    if lattice.left_out:
        answer["lattice_left_out"] = "; ".join(lattice.left_out)
    show(answer)
    if not lattice.sites:
        return
    columns = ("lattice", "noise", "numbers", "even", "even tails", "p", "worst")
    table = Table(*columns, box=None)
    for x in lattice.sites:
        tails = f"{x.even:.4f}", f"{x.even_tails:.4f}", f"{x.p_value:.2g}"
        noise = f"{x.noise_std:.4g}", str(x.num_numbers)
        table.add_row(x.name, *noise, *tails, x.statistic)
    rich.print(table)


def _lattice(lattice: auditing.LatticeResult | None) -> dict[str, Any] | None:
    """Returns the lattice result for JSON, with None for NaN."""
    if lattice is None:
        return None
    answer = dataclasses.asdict(lattice)
    for site in answer["sites"]:
        floats = {n: x for n, x in site.items() if isinstance(x, float)}
        site |= {name: None for name, x in floats.items() if math.isnan(x)}
    return answer | {"applicable": lattice.applicable, "flagged": lattice.flagged}


#: What an audited plan may have instead of the run's, where it has it.
_CHANGED = (
    *("noise_multiplier", "step_size", "step_size_x", "step_size_y", "dim", "dim_x"),
    *("dim_y", "num_draws", "num_queries", "max_differences", "escape_steps"),
)


def _answer(
    plan: Plan, audited: Plan | None, found: auditing.AuditResult | None
) -> dict[str, Any]:
    run = {"plan": f"{type(plan).__name__}, {plan.num_steps} steps, {plan.relation}"}
    noise = getattr(plan, "noise_multiplier", None)
    if noise is not None:
        run |= {"noise_multiplier": noise}
    if audited is None or found is None:
        return run
    here = {name: getattr(audited, name, None) for name in _CHANGED}
    here["period"] = getattr(audited, "noise_period", None)
    return {
        **run,
        "audited_num_steps": audited.num_steps,
        **{f"audited_{k}": value for k, value in here.items() if value is not None},
        **{k: v for k, v in dataclasses.asdict(found).items() if k != "num_steps"},
    }
