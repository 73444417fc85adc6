"""Recommendation of an oracle: all certified designs for one problem, side by side."""

import dataclasses
from typing import Any

from jaxdp.core import display, validate
from jaxdp.mechanism.design import Design
from jaxdp.o2nc.oracle import ORACLES, Name
from jaxdp.o2nc.theory import design

#: Bounds so near to the least one count as equal: then the cost decides.
NEAR = 1.05

_HEAD = ("", "oracle", "passes", "bound", "start", "regret", "estimation", "clips")
_HEAD += ("generalisation", "records per step", "steps", "period", "cost")


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Certified designs of several oracles, and the recommended one.

    Attributes:
      candidates: one for each oracle, in one pass and in several.
      chosen: index of the one to take.
      reason: why, in a sentence or two.
      costs: of each candidate's run, in values of one record's loss.
      plan: the chosen one's, where a plan was asked for.
    """

    candidates: tuple[Design, ...]
    chosen: int
    reason: str
    costs: tuple[float, ...]
    plan: Any = None

    @property
    def design(self) -> Design:
        """Design of the recommended candidate."""
        return self.candidates[self.chosen]

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        head = ("oracle", "passes", "bound", "records per step", "steps", "cost")
        rows = [
            (
                ("* " if i == self.chosen else "") + found.oracle,
                "several" if found.multi_pass else "one",
                f"{found.promise.bound:.3g}",
                f"{found.restart_batch_size}",
                f"{found.num_steps}",
                f"{cost:.2g}",
            )
            for i, (found, cost) in enumerate(
                zip(self.candidates, self.costs, strict=True)
            )
        ]
        title = f"Recommendation: {self.design.oracle}, marked by *"
        return display.Table(title, rows, head, self.reason)

    def __str__(self) -> str:
        """Returns a table of the candidates, its columns aligned, and the reason."""
        rows: list[tuple[str, ...]] = [_HEAD]
        compared = zip(self.candidates, self.costs, strict=True)
        for i, (found, cost) in enumerate(compared):
            p = found.promise
            parts = (p.start, p.regret, p.estimation, p.clip_bias, p.generalisation)
            records = f"{found.restart_batch_size}"
            if found.period > 1 and found.batch_size != found.restart_batch_size:
                records += f", then {found.batch_size}"
            name = ("*" if i == self.chosen else "", found.oracle)
            numbers = [f"{x:.3g}" for x in (p.bound, *parts)]
            size = (records, f"{found.num_steps}", f"{found.period}", f"{cost:.2g}")
            passes = "several" if found.multi_pass else "one"
            rows.append((*name, passes, *numbers, *size))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        # Words to the left, numbers to the right.
        ways = [f"{'<' if i < 3 else '>'}{width}" for i, width in enumerate(widths)]
        cells = [map(format, row, ways) for row in rows]
        lines = ["  ".join(row).rstrip() for row in cells]
        return "\n".join([*lines, self.reason])


def cost(found: Design, gradient_cost: float = 1.0) -> float:
    """Returns the cost of a design's run, in values of one record's loss."""
    return found.evaluations + gradient_cost * found.gradients


def recommend(
    *,
    gradient_cost: float | None = None,
    max_evaluations: float | None = None,
    **constants: Any,
) -> Recommendation:
    """Compares the certified designs of all oracles, in one pass and in several.

    Taken is the least proven bound; or, of those within 5% of it, what costs least. A
    bound is what is proven of the worst loss with these constants, not a forecast.

    Args:
      gradient_cost: how many values of a record's loss its gradient costs; None where
        there are no gradients, and no first-order oracle is compared.
      max_evaluations: the most values of one record's loss, gradients included, that the
        run may take. What cannot be run within it is listed, and not taken.
      **constants: those of :class:`~jaxdp.o2nc.theory.bounds.Constants`; ``initial_gap``
        is a bound for the population and for the records' mean.

    Returns:
      The comparison.

    Raises:
      ValueError: an argument out of range, or no oracle within ``max_evaluations``.
      TypeError: of the wrong kind, or missing.
    """
    if gradient_cost is not None:
        validate.positive(gradient_cost=gradient_cost)
    if max_evaluations is not None:
        validate.positive(max_evaluations=max_evaluations)
    unit = 1.0 if gradient_cost is None else gradient_cost
    oracles: list[Name]
    oracles = [x for x in ORACLES if gradient_cost or not ORACLES[x].gradients]

    def found(oracle: Name, multi_pass: bool) -> Design | None:
        choices: dict[str, Any] = {"oracle": oracle, "multi_pass": multi_pass}
        limited = {"gradient_cost": unit, "max_evaluations": max_evaluations}
        # What is above the limit is listed all the same, what no grid holds is not.
        for limits in (limited, {}):
            try:
                return design.certified(**constants, **choices, **limits)
            except ValueError:
                if not multi_pass and not limits.get("max_evaluations"):
                    raise
        return None

    every = [found(x, several) for x in oracles for several in (False, True)]
    candidates = tuple(x for x in every if x is not None)
    costs = tuple(cost(x, unit) for x in candidates)
    lipschitz = constants["lipschitz"]
    chosen, reason = _chosen(candidates, costs, lipschitz, max_evaluations)
    return Recommendation(candidates, chosen, reason, costs)


def _chosen(
    candidates: tuple[Design, ...],
    costs: tuple[float, ...],
    lipschitz: float,
    max_evaluations: float | None,
) -> tuple[int, str]:
    """Returns the index of the recommended candidate and the reason."""
    most = float("inf") if max_evaluations is None else max_evaluations
    within = [i for i, cost in enumerate(costs) if cost <= most]
    if not within:
        raise ValueError(
            f"max_evaluations must be at least {min(costs):.3g} for one of these "
            f"designs, got {max_evaluations!r}"
        )
    least = min(within, key=lambda i: candidates[i].promise.bound)
    near = [
        i
        for i in within
        if candidates[i].promise.bound <= NEAR * candidates[least].promise.bound
    ]
    chosen = min(near, key=lambda i: costs[i])
    best = candidates[least].promise.bound
    over = [_name(x) for x, cost in zip(candidates, costs, strict=True) if cost > most]
    reason = f"Take {_name(candidates[chosen])}: "
    if chosen == least:
        reason += f"its proven bound, {best:.3g}, is the least."
    else:
        reason += (
            f"its proven bound, {candidates[chosen].promise.bound:.3g}, is within "
            f"{NEAR - 1:.0%} of the least, {best:.3g} of {_name(candidates[least])}, and "
            f"it costs {costs[chosen] / costs[least]:.2g} times as much."
        )
    if over:
        reason += f" Above max_evaluations = {max_evaluations:g}: {', '.join(over)}."
    if best >= lipschitz:
        reason += (
            f" But no norm is above L = {lipschitz:g}: the bound says nothing, and more "
            "records or a larger epsilon are needed."
        )
    return chosen, reason


def _name(found: Design) -> str:
    """Describes an oracle and its number of passes in words."""
    passes = "several passes" if found.multi_pass else "a single pass"
    return f"the {found.oracle} oracle in {passes}"
