"""The plan of synthetic data."""

import dataclasses
import math
from typing import Any, ClassVar, Literal, Self

from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.kernels import simplex
from jaxdp.mechanism.design import Design, given
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description
from jaxdp.saddle.algorithms.synthetic import QueryNumbers, output, synthetic_data
from jaxdp.saddle.grids import UNIT, ScoreGrid, score_grid
from jaxdp.saddle.plans.scores import Sampler, VertexSamplingPlan, described
from jaxdp.saddle.theory import bounds, charges
from jaxdp.sampling import FullBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticData(VertexSamplingPlan):
    r"""A private histogram whose answers to many queries are those of the data.

    Attributes:
      num_examples: n, records in the data set; public.
      num_steps: T, rounds; each releases one query's number.
      relation: which data sets are neighbours; no default. A record that is zeroed or
        absent answers the middle of the range to every query.
      domain_size: cells that a record may lie in.
      num_queries: with the negations: twice those that are given.
      query_range: largest minus smallest value of a query: 1 for marginals, which are 0 or
        1; 2 for queries in [-1, 1].
      grid_bits: of the integers that queries are rounded to (``queries.bits``): 0 for
        marginals, which are exact.
      step_size_x: :math:`\tau_x` of the histogram; costs no privacy. None is
        sqrt(0.8 log(domain_size) / T) over half the range of a query.
      step_size_y: :math:`\tau_y` of the queries' weights; None until :meth:`calibrate`.
      sampler: as in :class:`Saddle`, like all that follow.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.SyntheticData(
      ...     num_examples=10_000, num_steps=100, relation="replace_one", domain_size=64,
      ...     num_queries=40,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> bool(plan.epsilon() <= 2.0), plan.step_size_y > 0
      (True, True)

    References:
      As for :class:`Saddle`, Algorithm 5 and Theorem G.1, with the exact sensitivity.
    """

    num_examples: int
    num_steps: int
    relation: Relation
    domain_size: int
    num_queries: int
    query_range: float = 1.0
    grid_bits: int = 0
    step_size_x: float | None = None
    step_size_y: float | None = None
    sampler: Sampler = "integer"
    delta: float | None = None
    theorem: Design | None = None

    family: ClassVar[str] = "synthetic_data"
    released: ClassVar[str] = "queries"
    numbers_read: ClassVar[Any] = QueryNumbers
    runs: ClassVar[Any] = synthetic_data
    calibrated: ClassVar[str] = "step_size_y"
    step_size_fields: ClassVar[tuple[str, ...]] = ("step_size_y",)
    dim_fields: ClassVar[tuple[str, ...]] = ("num_queries",)
    point_fields: ClassVar[tuple[str, ...]] = ("domain_size",)
    #: A score moves by the data's part and the histogram's, each half of the range.
    clip_fields: ClassVar[tuple[str, ...]] = ("query_range",)
    free_fields: ClassVar[tuple[str, ...]] = ("grid_bits",)
    reported: ClassVar[dict[str, str]] = {"step_size_x": "histogram_step_size"}
    differentiates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        validate.integer(num_examples=self.num_examples, num_steps=self.num_steps)
        validate.integer(domain_size=self.domain_size)
        validate.integer(at_least=2, at_most=2**24, num_queries=self.num_queries)
        if self.num_queries % 2:
            raise ValueError(
                "num_queries must be even, queries and their negations, got "
                f"{self.num_queries}"
            )
        validate.positive(query_range=self.query_range)
        validate.integer(at_least=0, at_most=16, grid_bits=self.grid_bits)
        if self.num_examples * 2**self.grid_bits >= 2**31:
            raise ValueError(
                "num_examples must be below 2**31 over 2**grid_bits = "
                f"{2**self.grid_bits}, got {self.num_examples}"
            )
        if self.step_size_x is not None:
            validate.non_negative(step_size_x=self.step_size_x)
        self._check()

    @classmethod
    def certified(
        cls,
        *,
        num_examples: int,
        domain_size: int,
        num_queries: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        query_range: float = 1.0,
        grid_bits: int = 0,
        num_steps: int | None = None,
    ) -> Self:
        """Returns the calibrated plan; ``theorem.promise`` bounds its error.

        Privacy rests on none of the constants.

        Args:
          num_examples: n, records in the data set.
          domain_size: cells, >= 2.
          num_queries: closed under negation, >= 2.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          query_range: largest less smallest answer of one query, in (0, 2]: 1 for
            marginals, 2 for queries in [-1, 1].
          grid_bits: of the integers that queries are rounded to (``queries.bits``): 0 for
            marginals, which are exact.
          num_steps: T; None takes a third of what the bound is best at. With few, the step
            sizes of the least bound leave budget, of which a warning tells.

        Raises:
          ValueError: a constant out of range.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SyntheticData.certified(
          ...     num_examples=10_000, domain_size=64, num_queries=40, epsilon=2.0,
          ...     delta=1e-6, relation="replace_one",
          ... )
          >>> plan.theorem.name, bool(plan.epsilon() <= 2.0)
          ('certified', True)
        """
        return cls._certified(**given(locals()))

    @classmethod
    def from_theorem(
        cls,
        theorem: Literal["G.1"],
        *,
        num_examples: int,
        domain_size: int,
        num_queries: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        query_range: float = 2.0,
        grid_bits: int = 0,
        printed: bool = False,
    ) -> Self:
        """Returns the plan that Theorem G.1 prescribes, within the budget, corrected.

        For study and comparison; :meth:`certified` is better.

        Args:
          theorem: ``"G.1"``.
          num_examples: n, records in the data set.
          domain_size: cells, >= 2.
          num_queries: closed under negation, >= 2.
          epsilon: in (0, 1]; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          query_range: as in :meth:`certified`; for the exact charges only.
          grid_bits: as in :meth:`certified`.
          printed: the number of steps as printed, too small by sqrt(log(domain_size)).

        Raises:
          ValueError: a constant out of range, or an unknown theorem.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SyntheticData.from_theorem(
          ...     "G.1",
          ...     num_examples=10_000, domain_size=64, num_queries=40, epsilon=1.0,
          ...     delta=1e-6, relation="replace_one",
          ... )
          >>> plan.theorem.name, bool(plan.epsilon() <= 1.0)
          ('G.1', True)
        """
        return cls._from_theorem(**given(locals()))

    @property
    def histogram_step_size(self) -> float:
        """Step size of the histogram: ``step_size_x``, or its default for None."""
        if self.step_size_x is not None:
            return self.step_size_x
        # Of gradients within [-1, 1]; narrower ranges are centred.
        rate = bounds.synthetic_step_size_x(self.num_steps, self.domain_size)
        return float(rate) / (self.query_range / 2)

    @property
    def sampling(self) -> FullBatch:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Full-batch sampler: all records are in every score."""
        return FullBatch()

    def _grid_at(self, step: float) -> ScoreGrid:
        half = self.query_range / 2
        grid = score_grid(step, half, self.grid_bits, self.num_examples)
        if grid.shift < 0:  # Few records: their totals are scaled up first.
            bits = self.grid_bits - grid.shift
            grid = score_grid(step, half, bits, self.num_examples)
        if grid.shift > 30:
            raise ValueError(
                f"step_size_y must be larger, got {step:.4g}: a record would move scores "
                "by less than they can resolve"
            )
        return grid

    @kept
    def grid(self) -> ScoreGrid:
        """Grid of the score updates by the data."""
        self.check_ready()
        return self._grid_at(self.step_size_y or 0.0)

    def _rounding(self, step: int, step_size: float) -> float:
        """Bounds the part of the scores' sensitivity that is due to rounding, in nats.

        One unit, while no score saturates: what a step rounds away is kept for the next.
        A score that saturates, 64 octaves below the largest, loses what it had moved by;
        from there on it is another sum of roundings, with up to two units more. To get
        there takes so many steps. And no step adds more than one unit.
        """
        longest = self._longest([step_size])
        windows = math.floor(2 * step * longest / (64 * math.log(2)))
        return min(step, 1 + 2 * windows) * UNIT

    def sensitivity_at(self, step: int) -> float:
        """Returns the sensitivity of the scores of step ``step`` >= 0, in nats.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SyntheticData.certified(
          ...     num_examples=10_000, domain_size=64, num_queries=40, epsilon=2.0,
          ...     delta=1e-6, relation="replace_one",
          ... )
          >>> plan.sensitivity_at(0) < plan.sensitivity_at(plan.num_steps - 1)
          True
        """
        grid = self.grid
        if grid.multiplier == 0:
            return 0.0
        each = grid.sensitivity(self.kappa) - UNIT
        return step * each + self._rounding(step, self.step_size_y or 0.0)

    @property
    def sensitivity(self) -> float:
        """Sensitivity of a score at the last step, in nats."""
        return self.sensitivity_at(self.num_steps - 1)

    def _cost_at(self, steps: list[float], *, pure: bool = False) -> float:
        grid = self._grid_at(steps[0])
        if grid.multiplier == 0:
            return 0.0
        rounding = self._rounding(self.num_steps - 1, steps[0])  # No step's is more.
        return charges.synthetic(
            grid.sensitivity(self.kappa) - UNIT,
            num_steps=self.num_steps,
            error=simplex.LOG_ERROR + rounding,
            pure=pure,
        )

    def returned(self, state: Any, params: Any) -> Any:
        return output(state)

    def describe(self) -> Description:
        return described(f"a query in each of {self.num_steps} steps", self.sensitivity)
