"""Recommendation of a plan for a synthetic table: by the rule of ``jaxdp synthesize``."""

from typing import Any, get_args

from jaxdp.data import synthesis
from jaxdp.planner import claims
from jaxdp.planner.results import PlannedTable
from jaxdp.saddle.oracles.queries import Marginals


def candidates(
    queries: Marginals, budget: dict[str, Any], shared: dict[str, Any]
) -> tuple[tuple[PlannedTable, ...], str]:
    """Plans of every method, the one of :func:`.synthesis.chosen` first; and why."""
    first = synthesis.planned(queries, **shared, **budget)
    found = [first]
    for method in get_args(synthesis.Method):
        if method != first.method:
            more = synthesis.planned(queries, method=method, **shared, **budget)
            found.append(more)
    return tuple(_planned(queries, choice) for choice in found), first.reason


def _planned(queries: Marginals, choice: synthesis.Choice) -> PlannedTable:
    plan: Any = choice.plan
    std, noise, measured = choice.noise_std, None, 0
    if std is not None:
        noise = synthesis.expected_noise(plan.queries, std)
        measured = plan.num_start + plan.num_steps - 1
    theorem = getattr(plan, "theorem", None)
    bound = None if theorem is None else float(theorem.promise.bound)
    return PlannedTable(
        plan,
        choice.method,
        noise,
        measured,
        bound,
        memory=4 * queries.domain_size,
        measured=claims.TABLES[choice.method],
    )
