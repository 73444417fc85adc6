"""Results of designs for vertex sampling: plan fields, bound, admissible step sizes."""

import dataclasses
import math
from typing import Any

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.saddle.theory import bounds, charges, levels, steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Fields that the settings of all vertex-sampling plans share.

    Attributes:
      name: of a theorem, or ``"certified"``.
      num_examples: n.
      relation: neighbours.
      num_steps: T, or S as executed.
      promise: the bound and its parts, at these numbers.
      steps: the largest step sizes that privacy admits, in exact arithmetic.
    """

    name: str
    num_examples: int
    relation: Relation
    num_steps: int
    promise: bounds.Promise
    steps: steps.Steps

    @property
    def bound(self) -> float:
        """Bound on the expected error."""
        return self.promise.bound

    def __str__(self) -> str:
        return f"{self.name}: {self.promise}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaddleSettings(Settings):
    """Settings for Algorithm 1 (saddle points).

    Attributes:
      dim_x: vertices of the player that minimises.
      dim_y: vertices of the player that maximises.
      batch_size: B = floor(n / T).
      num_draws: K.
      linf_clip_norm_x: L0.
      linf_clip_norm_y: L0.
      step_size_x: tau.
      step_size_y: tau.
    """

    dim_x: int
    dim_y: int
    batch_size: int
    num_draws: int
    linf_clip_norm_x: float
    linf_clip_norm_y: float
    step_size_x: float
    step_size_y: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasReducedSettings(Settings):
    """Settings for Algorithms 2 and 3 (bias reduction); the seed gives ``num_steps``.

    Attributes:
      dim_x: vertices of the player that minimises.
      dim_y: vertices of the player that maximises.
      vertex_budget: U.
      max_level: M.
      level_seed: public seed of the levels.
      batches: ``"equalized"`` or ``"proportional"``.
      batch_sizes: by level, M + 1 of them.
      linf_clip_norm_x: L0, of each of a gradient's three parts.
      linf_clip_norm_y: L0.
      step_size_x: tau.
      step_size_y: tau.
      expected_steps: between which numbers the expected number of steps lies.
      batch_alpha: of proportional batches.
      paper_vertex_budget: U before rounding.
      paper_rate: sqrt(l G^2 M^2 / U): the theorem's bound, but for a constant.
    """

    dim_x: int
    dim_y: int
    vertex_budget: int
    max_level: int
    level_seed: int
    batches: str
    batch_sizes: tuple[int, ...]
    linf_clip_norm_x: float
    linf_clip_norm_y: float
    step_size_x: float
    step_size_y: float
    expected_steps: tuple[float, float]
    batch_alpha: float | None = None
    paper_vertex_budget: float | None = None
    paper_rate: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvexSettings(Settings):
    """Settings for Algorithm 4 (convex problems).

    Attributes:
      dim: vertices.
      batch_size: B = floor(n / T).
      num_draws: K.
      refresh_every: q.
      linf_clip_norm: L0.
      step_size: tau.
    """

    dim: int
    batch_size: int
    num_draws: int
    refresh_every: int
    linf_clip_norm: float
    step_size: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticSettings(Settings):
    """Settings for Algorithm 5 (synthetic data); ``steps`` apply to y.

    Attributes:
      domain_size: cells.
      num_queries: closed under negation.
      query_range: largest less smallest answer of one query.
      step_size_x: of the distribution.
      step_size_y: of the queries.
      paper_bound: the theorem's, with its constant; None if certified.
    """

    domain_size: int
    num_queries: int
    query_range: float
    step_size_x: float
    step_size_y: float
    paper_bound: float | None = None


def read(kind: type[Settings], **fields: Any) -> Any:
    """Builds settings of a kind from the fields of their JSON."""
    nested: dict[str, Any] = {
        "promise": bounds.Promise(**fields["promise"]),
        "steps": steps.Steps(**fields["steps"]),
    }
    for name in ("batch_sizes", "expected_steps"):
        if name in fields:
            nested[name] = tuple(fields[name])
    return kind(**fields | nested)


# --- arguments -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Checked arguments: the data, the budget, and constants of the loss.

    Attributes:
      num_examples: n >= 1.
      dims: vertices of each player, at least 2.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      lipschitz: L0 > 0.
      smoothness: L1 >= 0.
      second_order_smoothness: L2 >= 0, or None.
    """

    num_examples: int
    dims: dict[str, int]
    epsilon: float
    delta: float
    relation: Relation
    lipschitz: float
    smoothness: float
    second_order_smoothness: float | None

    def __post_init__(self) -> None:
        validate.integer(num_examples=self.num_examples)
        validate.integer(at_least=2, **self.dims)
        validate.positive(epsilon=self.epsilon, lipschitz=self.lipschitz)
        validate.probability(delta=self.delta)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        validate.non_negative(smoothness=self.smoothness)
        if self.second_order_smoothness is not None:
            validate.non_negative(second_order_smoothness=self.second_order_smoothness)

    @property
    def log_dim(self) -> float:
        """Entropy of all players' uniform points: the sum of log(dim)."""
        return math.fsum(math.log(d) for d in self.dims.values())

    @property
    def log_inverse_delta(self) -> float:
        """Logarithm of 1 / delta."""
        return math.log(1 / self.delta)

    @property
    def rho(self) -> float:
        """Privacy budget in zCDP."""
        return charges.rho_budget(self.epsilon, self.delta)

    @property
    def moved(self) -> float:
        """Sensitivity of a coordinate of a sum of gradients that are clipped at L0."""
        return accounting.sensitivity(self.relation, self.lipschitz)

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of the problem, as keyword arguments of the bounds of one pass."""
        return {
            "log_dim": self.log_dim,
            "lipschitz": self.lipschitz,
            "smoothness": self.smoothness,
            "second_order_smoothness": self.second_order_smoothness,
        }

    @property
    def budget(self) -> dict[str, Any]:
        """Budget, relation and L0, as keyword arguments of the admissible step sizes."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "relation": self.relation,
            "lipschitz": self.lipschitz,
        }

    def need_second_order(self, what: str) -> None:
        """Raises ValueError for a first-order-smooth problem: L2 is None."""
        if self.second_order_smoothness is None:
            raise ValueError(
                f"second_order_smoothness must be a number >= 0 for {what}, got None"
            )


def check_synthetic(
    num_examples: int,
    domain_size: int,
    num_queries: int,
    query_range: float,
    delta: float,
    relation: Relation,
) -> None:
    """Checks the arguments of Algorithm 5's settings, except epsilon."""
    validate.integer(num_examples=num_examples)
    validate.integer(at_least=2, domain_size=domain_size, num_queries=num_queries)
    validate.positive(query_range=query_range)
    if query_range > 2:
        raise ValueError(
            f"query_range must be <= 2, for answers in [-1, 1], got {query_range!r}"
        )
    validate.probability(delta=delta)
    validate.one_of(accounting.RELATIONS, relation=relation)


# --- from numbers to settings --------------------------------------------------------


def least(useful: float, private: float | None) -> float:
    """Returns the smaller of a step size for utility and one for privacy."""
    return float(useful if private is None else min(useful, private))


def settled_saddle(
    name: str,
    p: Problem,
    num_steps: int,
    num_draws: int,
    step_size: float,
    admitted: steps.Steps,
) -> SaddleSettings:
    """Builds the settings of Algorithm 1, with their bound."""
    return SaddleSettings(
        name=name,
        num_examples=p.num_examples,
        relation=p.relation,
        num_steps=num_steps,
        promise=as_floats(
            bounds.saddle(
                num_steps=num_steps,
                num_draws=num_draws,
                step_size=step_size,
                **p.constants,
            )
        ),
        steps=admitted,
        **p.dims,
        batch_size=p.num_examples // num_steps,
        num_draws=num_draws,
        linf_clip_norm_x=float(p.lipschitz),
        linf_clip_norm_y=float(p.lipschitz),
        step_size_x=step_size,
        step_size_y=step_size,
    )


def as_floats(promise: bounds.Promise) -> bounds.Promise:
    """Converts a promise's fields to Python floats, for JSON."""
    fields = dataclasses.asdict(promise)
    return bounds.Promise(**{name: float(x) for name, x in fields.items()})


def settled_bias_reduced(
    name: str,
    p: Problem,
    *,
    vertex_budget: int,
    max_level: int,
    level_seed: int,
    useful_step: float,
    paper: dict[str, float] | None = None,
) -> BiasReducedSettings:
    """Draws the levels; adds batches, admissible step sizes and the bound.

    ``paper`` holds the paper's own numbers, None for a certified design.
    """
    executed = levels.executed(
        level_seed, vertex_budget=vertex_budget, max_level=max_level
    )
    own = paper or {}
    if paper is None:
        sizes = levels.equalized(
            executed, num_examples=p.num_examples, max_level=max_level
        )
    else:
        sizes = levels.proportional(max_level, alpha=paper["batch_alpha"])
    admitted = steps.saddle_bias_reduced(
        executed=executed,
        max_level=max_level,
        batch_sizes=sizes,
        paper_vertex_budget=own.get("paper_vertex_budget"),
        alpha=own.get("batch_alpha"),
        **p.budget,
    )
    private = admitted.certified if paper is None else admitted.paper
    step = least(useful_step, private)
    promise = bounds.saddle_bias_reduced(
        vertex_budget=vertex_budget, max_level=max_level, step_size=step, **p.constants
    )
    low, high = bounds.expected_steps(vertex_budget, max_level)
    return BiasReducedSettings(
        name=name,
        num_examples=p.num_examples,
        relation=p.relation,
        num_steps=len(executed),
        promise=as_floats(promise),
        steps=admitted,
        dim_x=p.dims["dim_x"],
        dim_y=p.dims["dim_y"],
        vertex_budget=vertex_budget,
        max_level=max_level,
        level_seed=level_seed,
        batches="equalized" if paper is None else "proportional",
        batch_sizes=tuple(int(b) for b in sizes),
        linf_clip_norm_x=float(p.lipschitz),
        linf_clip_norm_y=float(p.lipschitz),
        step_size_x=step,
        step_size_y=step,
        expected_steps=(float(low), float(high)),
        **own,
    )


def settled_convex(
    name: str,
    p: Problem,
    num_steps: int,
    num_draws: int,
    refresh_every: int,
    step_size: float,
    admitted: steps.Steps,
) -> ConvexSettings:
    """Builds the settings of Algorithm 4, with their bound."""
    numbers: dict[str, Any] = {
        "num_steps": num_steps,
        "num_draws": num_draws,
        "refresh_every": refresh_every,
        "step_size": step_size,
    }
    return ConvexSettings(
        name=name,
        num_examples=p.num_examples,
        relation=p.relation,
        promise=as_floats(bounds.convex(**numbers, **p.constants)),
        steps=admitted,
        **p.dims,
        batch_size=p.num_examples // num_steps,
        linf_clip_norm=float(p.lipschitz),
        **numbers,
    )


def settled_synthetic(
    name: str,
    *,
    num_examples: int,
    domain_size: int,
    num_queries: int,
    query_range: float,
    relation: Relation,
    num_steps: int,
    step_size_x: float,
    step_size_y: float,
    admitted: steps.Steps,
    paper_bound: float | None = None,
) -> SyntheticSettings:
    """Builds the settings of Algorithm 5, with their bound."""
    half = query_range / 2  # The bound is for answers in [-1, 1], and scales.
    centred = bounds.synthetic(
        num_examples=num_examples,
        num_steps=num_steps,
        step_size_x=step_size_x * half,
        step_size_y=step_size_y * half,
        log_domain=math.log(domain_size),
        log_queries=math.log(num_queries),
    )
    terms = dataclasses.asdict(centred).items()
    promise = bounds.Promise(**{name: half * x for name, x in terms})
    return SyntheticSettings(
        name=name,
        num_examples=num_examples,
        relation=relation,
        num_steps=num_steps,
        promise=as_floats(promise),
        steps=admitted,
        domain_size=domain_size,
        num_queries=num_queries,
        query_range=float(query_range),
        step_size_x=step_size_x,
        step_size_y=step_size_y,
        paper_bound=paper_bound,
    )
