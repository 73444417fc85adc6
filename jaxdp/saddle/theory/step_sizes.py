r"""Step sizes that a budget admits: exactly charged, and by the paper's own proofs.

The certified step size is the largest whose :mod:`jaxdp.saddle.theory.charges` stay within
(epsilon, delta), in exact arithmetic and for a sampler without error: a plan's integers
take a little off. The paper's is what its privacy propositions prove, for neighbours that
replace a record; it is 2 to 19 times smaller, because it composes pure privacy of twice
the range, and counts a record's draws before its batch. Both players' are equal.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxdp import accounting
from jaxdp.core.types import Relation
from jaxdp.saddle.theory import charges, levels


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The largest step sizes within one budget.

    Attributes:
      certified: by exact charges; infinity where nothing that depends on data is drawn.
      paper: by the paper's proposition; None in a certified design.
      fixed: the paper's with its count of draws corrected, where it needs that.
      paper_epsilon: what the paper's step size spends by exact charges.
    """

    certified: float
    paper: float | None = None
    fixed: float | None = None
    paper_epsilon: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ratio of the certified step size to the paper's; None without the latter."""
        return None if self.paper is None else self.certified / self.paper


def _within(
    charge: Callable[[float], float],
    epsilon: float,
    delta: float,
    paper: float | None,
    fixed: float | None = None,
) -> StepSizes:
    """Returns the step sizes of a charge, rho as a function of the step size."""
    return StepSizes(
        certified=charges.admissible(charge, charges.rho_budget(epsilon, delta)),
        paper=paper,
        fixed=fixed,
        paper_epsilon=None if paper is None else charges.epsilon(charge(paper), delta),
    )


def saddle(
    *,
    num_steps: int,
    num_draws: int,
    batch_size: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
) -> StepSizes:
    """Returns the step sizes of Algorithm 1 at clips of L0.

    The paper's is Proposition 4.1, which counts the vertices of one player; it holds all
    the same, except for very large epsilon.
    """
    each = accounting.sensitivity(relation, lipschitz) / batch_size

    def charge(step: float) -> float:
        return charges.vertex_sampling(
            each * step, each * step, num_steps=num_steps, num_draws=num_draws
        )

    draws = num_steps * (num_draws + 1)
    root = math.sqrt(2 * draws * math.log(1 / delta))
    paper = batch_size * epsilon / (8 * lipschitz * root)
    return _within(charge, epsilon, delta, paper, paper / math.sqrt(2))


def saddle_bias_reduced(
    *,
    executed: np.ndarray,
    max_level: int,
    batch_sizes: np.ndarray,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
    paper_vertex_budget: float | None = None,
    alpha: float | None = None,
) -> StepSizes:
    """Returns the step sizes of Algorithm 3 for given levels, at three clips of L0.

    ``executed`` are the levels (S,), ``batch_sizes`` (M + 1,) by level. The paper's is
    Proposition E.1, with its U and the proportional rule's alpha.
    """
    each = accounting.sensitivity(relation, lipschitz)
    by_level = each * levels.amplification(max_level) / np.asarray(batch_sizes)

    def charge(step: float) -> float:
        deltas = step * by_level[executed]
        return charges.bias_reduced(deltas, deltas, executed)

    paper = None
    if paper_vertex_budget is not None and alpha is not None:
        root = math.sqrt(48 * paper_vertex_budget * math.log(1 / delta))
        paper = epsilon / (9 * alpha * lipschitz * root)
    return _within(charge, epsilon, delta, paper)


def convex(
    *,
    num_steps: int,
    num_draws: int,
    refresh_every: int,
    batch_size: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
) -> StepSizes:
    """Returns the step sizes of Algorithm 4; the paper's is Proposition F.1."""
    each = accounting.sensitivity(relation, lipschitz) / batch_size

    def charge(step: float) -> float:
        return charges.convex(
            each * step,
            num_steps=num_steps,
            num_draws=num_draws,
            refresh_every=refresh_every,
        )

    draws = num_draws * (num_steps / refresh_every + refresh_every)
    root = math.sqrt(2 * draws * math.log(1 / delta))
    paper = batch_size * epsilon / (8 * lipschitz * root)
    return _within(charge, epsilon, delta, paper)


def query_sensitivity(query_range: float, relation: Relation) -> float:
    """Returns the sensitivity of a sum of answers; a missing record answers the middle."""
    return accounting.sensitivity(relation, query_range) / 2


def synthetic(
    *,
    num_examples: int,
    num_steps: int,
    query_range: float,
    epsilon: float,
    delta: float,
    relation: Relation,
    last_draw: bool = True,
) -> StepSizes:
    """Returns the step sizes of Algorithm 5 for the queries' player.

    The paper's is the condition of Theorem G.1, for answers in [-1, 1].
    """
    each = query_sensitivity(query_range, relation) / num_examples

    def charge(step: float) -> float:
        return charges.synthetic(each * step, num_steps=num_steps, last_draw=last_draw)

    root = math.sqrt(2 * num_steps * math.log(1 / delta))
    paper = num_examples * epsilon / (16 * num_steps * root)
    return _within(charge, epsilon, delta, paper)
