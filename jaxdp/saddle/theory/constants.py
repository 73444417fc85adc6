"""Constants of a problem, checked, and the designs that are built from chosen numbers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.mechanism.design import Design
from jaxdp.saddle.theory import bounds, charges, levels, step_sizes
from jaxdp.saddle.theory.step_sizes import StepSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Number of records and privacy budget.

    Attributes:
      num_examples: n >= 1.
      epsilon: > 0.
      delta: in (0, 1).
      relation: which data sets are neighbours; the paper's is ``"replace_one"``.
    """

    num_examples: int
    epsilon: float
    delta: float
    relation: Relation

    def __post_init__(self) -> None:
        validate.integer(num_examples=self.num_examples)
        validate.positive(epsilon=self.epsilon)
        validate.probability(delta=self.delta)
        validate.one_of(accounting.RELATIONS, relation=self.relation)

    @property
    def rho(self) -> float:
        """Privacy budget in zCDP."""
        return charges.rho_budget(self.epsilon, self.delta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants(Budget):
    """Constants of a loss, whose data are read once; subclasses name the players.

    Attributes:
      lipschitz: L0 > 0: bound on every partial derivative of a record's loss; the clips.
      smoothness: L1 >= 0: bound on how these change over an l1 distance of one.
      second_order_smoothness: L2 >= 0: the same of the derivatives' own; 0 for quadratic
        and bilinear losses, None where nothing is known.
    """

    lipschitz: float
    smoothness: float
    second_order_smoothness: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.integer(at_least=2, **self.dims)
        validate.positive(lipschitz=self.lipschitz)
        validate.non_negative(smoothness=self.smoothness)
        if self.second_order_smoothness is not None:
            validate.non_negative(second_order_smoothness=self.second_order_smoothness)

    @property
    def dims(self) -> dict[str, int]:
        """Numbers of the players' vertices, by field."""
        return {name: x for name, x in vars(self).items() if name.startswith("dim")}

    @property
    def log_dim(self) -> float:
        """Entropy of all players' uniform points, the sum of log(dim)."""
        return math.fsum(math.log(d) for d in self.dims.values())

    @property
    def sum_sensitivity(self) -> float:
        """Sensitivity of a coordinate of a sum of gradients that are clipped at L0."""
        return accounting.sensitivity(self.relation, self.lipschitz)

    @property
    def loss(self) -> dict[str, Any]:
        """Constants of the loss, as keyword arguments of the bounds of one pass."""
        names = ("lipschitz", "smoothness", "second_order_smoothness")
        return {"log_dim": self.log_dim} | {name: getattr(self, name) for name in names}

    @property
    def budget(self) -> dict[str, Any]:
        """Budget, relation and L0, as keyword arguments of the admissible step sizes."""
        names = ("epsilon", "delta", "relation", "lipschitz")
        return {name: getattr(self, name) for name in names}

    def need_second_order(self, purpose: str) -> float:
        """Returns L2; raises ValueError for a first-order-smooth problem: it is None."""
        if self.second_order_smoothness is None:
            raise ValueError(
                f"second_order_smoothness must be a number >= 0 for {purpose}, got None"
            )
        return self.second_order_smoothness


@dataclasses.dataclass(frozen=True, kw_only=True)
class GameConstants(Constants):
    """Constants of a game.

    Attributes:
      dim_x: vertices of the player that minimises, >= 2.
      dim_y: vertices of the player that maximises, >= 2.
    """

    dim_x: int
    dim_y: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimplexConstants(Constants):
    """Constants of a problem with one player.

    Attributes:
      dim: vertices, >= 2.
    """

    dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryConstants(Budget):
    """Constants of linear queries on data of which all are read at every step.

    Attributes:
      domain_size: cells, >= 2.
      num_queries: closed under negation, >= 2.
      query_range: largest less smallest answer of one query, in (0, 2]; 2 for [-1, 1], 1
        for marginals.
    """

    domain_size: int
    num_queries: int
    query_range: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"domain_size": self.domain_size, "num_queries": self.num_queries}
        validate.integer(at_least=2, **sizes)
        validate.positive(query_range=self.query_range)
        if self.query_range > 2:
            raise ValueError(
                "query_range must be <= 2, for answers in [-1, 1], got "
                f"{self.query_range!r}"
            )

    @property
    def log_sizes(self) -> tuple[float, float]:
        """Logarithms of ``domain_size`` and ``num_queries``."""
        return math.log(self.domain_size), math.log(self.num_queries)


# --- designs -------------------------------------------------------------------------


def _least(name: str, useful: float, admitted: StepSizes) -> float:
    """Returns the smaller of a step size for utility and the design's for privacy."""
    private: Any = admitted.certified if name == "certified" else admitted.paper
    return float(min(useful, private))


def _by_player(p: Constants, step_size: float) -> dict[str, float]:
    """Returns the plan fields of clips and step sizes, equal for all players."""
    players = [name.removeprefix("dim") for name in p.dims]
    clips = {f"linf_clip_norm{player}": float(p.lipschitz) for player in players}
    return clips | {f"step_size{player}": step_size for player in players}


def single_pass(
    name: str,
    p: Constants,
    bound: Callable[..., bounds.Promise],
    admits: Callable[..., StepSizes],
    useful: float,
    *,
    num_steps: int,
    **numbers: int,
) -> Design:
    """Builds the design of Algorithm 1 or 4, with the bound that it implies.

    ``bound`` and ``admits`` are the algorithm's; ``useful`` is the step size for utility;
    ``numbers`` are K, and q of Algorithm 4, under the names of the plan.
    """
    batch_size = p.num_examples // num_steps
    admitted = admits(num_steps=num_steps, batch_size=batch_size, **numbers, **p.budget)
    step_size = _least(name, useful, admitted)
    promise = bound(num_steps=num_steps, step_size=step_size, **numbers, **p.loss)
    return Design(
        name=name,
        num_examples=p.num_examples,
        relation=p.relation,
        num_steps=num_steps,
        promise=promise.scaled(),
        steps=admitted,
        **p.dims,
        batch_size=batch_size,
        **numbers,
        **_by_player(p, step_size),
    )


def bias_reduced(
    name: str,
    p: GameConstants,
    *,
    vertex_budget: int,
    max_level: int,
    level_seed: int,
    useful_step: float,
    batch_alpha: float | None = None,
    paper_vertex_budget: float | None = None,
    paper_rate: float | None = None,
) -> Design:
    """Builds the design of Algorithm 3: levels, batches, step sizes and the bound.

    With ``batch_alpha`` batches are the paper's, proportional, and so is the step size;
    without, they are equalized, and it is the certified one. ``paper_vertex_budget`` is U
    before rounding, ``paper_rate`` the theorem's bound but for a constant.
    """
    chosen = {"vertex_budget": vertex_budget, "max_level": max_level}
    executed = levels.executed(level_seed, **chosen)
    if batch_alpha is None:
        sizes = levels.equalized(
            executed, num_examples=p.num_examples, max_level=max_level
        )
    else:
        sizes = levels.proportional(max_level, alpha=batch_alpha)
    admitted = step_sizes.saddle_bias_reduced(
        executed=executed,
        max_level=max_level,
        batch_sizes=sizes,
        paper_vertex_budget=paper_vertex_budget,
        alpha=batch_alpha,
        **p.budget,
    )
    step = _least(name, useful_step, admitted)
    promise = bounds.saddle_bias_reduced(step_size=step, **chosen, **p.loss)
    return Design(
        name=name,
        num_examples=p.num_examples,
        relation=p.relation,
        num_steps=len(executed),
        promise=promise.scaled(),
        steps=admitted,
        **p.dims,
        **chosen,
        level_seed=level_seed,
        batches="equalized" if batch_alpha is None else "proportional",
        batch_sizes=sizes.tolist(),
        **_by_player(p, step),
        expected_steps=tuple(map(float, bounds.expected_steps(**chosen))),
        batch_alpha=batch_alpha,
        paper_vertex_budget=paper_vertex_budget,
        paper_rate=paper_rate,
    )


def synthetic(
    name: str,
    p: QueryConstants,
    paper_bound: float | None = None,
    *,
    num_steps: int,
    last_draw: bool,
    step_size_x: float,
    useful: float,
) -> Design:
    """Builds the design of Algorithm 5, with the bound that it implies.

    ``useful`` is the queries' step size for utility; ``paper_bound`` the theorem's.
    """
    names = ("num_examples", "query_range", "epsilon", "delta", "relation")
    own: dict[str, Any] = {field: getattr(p, field) for field in names}
    admitted = step_sizes.synthetic(num_steps=num_steps, last_draw=last_draw, **own)
    step_size_y = _least(name, useful, admitted)
    half = p.query_range / 2  # The bound is for answers in [-1, 1], and scales.
    log_domain, log_queries = p.log_sizes
    centred = bounds.synthetic(
        num_examples=p.num_examples,
        num_steps=num_steps,
        step_size_x=step_size_x * half,
        step_size_y=step_size_y * half,
        log_domain=log_domain,
        log_queries=log_queries,
    )
    return Design(
        name=name,
        num_examples=p.num_examples,
        relation=p.relation,
        num_steps=num_steps,
        promise=centred.scaled(half),
        steps=admitted,
        domain_size=p.domain_size,
        num_queries=p.num_queries,
        query_range=float(p.query_range),
        step_size_x=step_size_x,
        step_size_y=step_size_y,
        paper_bound=paper_bound,
    )
