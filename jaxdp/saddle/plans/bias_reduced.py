"""The plan of mirror descent with gradients of reduced bias."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

import numpy as np

from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.kernels import simplex
from jaxdp.mechanism.design import Design, given
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description
from jaxdp.saddle.algorithms.bias_reduced import (
    BiasReducedNumbers,
    saddle_bias_reduced,
)
from jaxdp.saddle.algorithms.mirror_descent import output
from jaxdp.saddle.grids import LevelGrids, Totals, record_bits
from jaxdp.saddle.plans.scores import Sampler, VertexSamplingPlan, described
from jaxdp.saddle.theory import charges, levels
from jaxdp.sampling import SinglePass


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaddleBiasReduced(VertexSamplingPlan):
    r""":class:`Saddle` with gradients of reduced bias, in steps of random levels.

    Levels are drawn before the run from a public seed; batches and step sizes may depend
    on them. For smooth problems that are not quadratic; on bilinear ones, whose gradients
    have no bias, :class:`Saddle` is better.

    Attributes:
      num_examples: as in :class:`Saddle`, like the next five.
      relation: which data sets are neighbours.
      dim_x: number of vertices of x.
      dim_y: of y.
      linf_clip_norm_x: :math:`C_x`, of each of the three gradients of a record.
      linf_clip_norm_y: :math:`C_y`.
      vertex_budget: U; steps are taken while :math:`2^M` are left of it, and one of level
        N takes :math:`2^N`.
      level_seed: of the levels; any integer. Public: new ones for new runs.
      max_level: M; None is floor(log2(sqrt(U))).
      batch_alpha: :math:`\alpha`: a step of level N reads :math:`\lceil 2^N/\alpha\rceil`
        records, as in the paper; None shares all records such that each counts the same.
      budget: rho of a privacy filter: the run ends before the first step whose levels cost
        the worst record more (or find too few records), whatever else the levels are. For
        step sizes that are fixed before levels are known; needs ``batch_alpha``.
      step_size_x: as in :class:`Saddle`.
      step_size_y: of y.
      center_gradients: as in :class:`Saddle`.
      sampler: as in :class:`Saddle`, like all that follow.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.SaddleBiasReduced(
      ...     num_examples=20_000, relation="replace_one", dim_x=20, dim_y=10,
      ...     linf_clip_norm_x=1.0, linf_clip_norm_y=1.0, vertex_budget=200, level_seed=3,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> bool(plan.epsilon() <= 2.0), plan.num_steps == len(plan.levels)
      (True, True)

    References:
      As for :class:`Saddle`, Algorithms 2 and 3, with their sensitivity corrected.
    """

    num_examples: int
    relation: Relation
    dim_x: int
    dim_y: int
    linf_clip_norm_x: float
    linf_clip_norm_y: float
    vertex_budget: int
    level_seed: int
    max_level: int | None = None
    batch_alpha: float | None = None
    budget: float | None = None
    step_size_x: float | None = None
    step_size_y: float | None = None
    center_gradients: bool = False
    sampler: Sampler = "integer"
    delta: float | None = None
    theorem: Design | None = None

    family: ClassVar[str] = "saddle_bias_reduced"
    draws_each_step: ClassVar[bool] = False
    released: ClassVar[str] = "vertices of the output"
    numbers_read: ClassVar[Any] = BiasReducedNumbers
    runs: ClassVar[Any] = saddle_bias_reduced

    def __post_init__(self) -> None:
        validate.integer(
            num_examples=self.num_examples, vertex_budget=self.vertex_budget
        )
        validate.integer(at_least=-(2**63), level_seed=self.level_seed)
        validate.integer(at_least=0, at_most=20, max_level=self._top)
        if self.batch_alpha is not None:
            validate.positive(batch_alpha=self.batch_alpha)
        if self.budget is not None:
            validate.positive(budget=self.budget)
            if self.batch_alpha is None or self.step_size_x is None:
                raise ValueError(
                    "budget must come with batch_alpha and step sizes, which a filter has "
                    f"fixed before the levels; got batch_alpha = {self.batch_alpha!r}, "
                    f"step_size_x = {self.step_size_x!r}"
                )
        used = sum(self.batch_sizes[level] for level in self.levels)
        if not self.levels or used > self.num_examples:
            raise ValueError(
                f"num_examples must be at least the {max(used, 1)} records that the "
                f"{len(self.levels)} steps of this vertex_budget and batch_alpha read, got "
                f"{self.num_examples}"
            )
        self._check()

    # Designs.

    @classmethod
    def certified(
        cls,
        *,
        num_examples: int,
        dim_x: int,
        dim_y: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        smoothness: float,
        second_order_smoothness: float,
        vertex_budget: int | None = None,
        max_level: int | None = None,
        level_seed: int = 0,
    ) -> Self:
        """Returns the calibrated plan that is best at the expected charge of its levels.

        Privacy rests on none of the constants. The proven bound, which
        ``theorem.promise`` states, says nothing at most sizes.

        Args:
          num_examples: n >= 4, records in the data set.
          dim_x: vertices of the player that minimises, >= 2.
          dim_y: vertices of the player that maximises, >= 2.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L0 > 0, bound on every partial derivative of a record's loss; the clip.
          smoothness: L1 >= 0, bound on how these change over an l1 distance of one.
          second_order_smoothness: L2 >= 0: the same of the derivatives' own.
          vertex_budget: U in [4, n]; None searches.
          max_level: M with 2^M <= U / 2; None searches.
          level_seed: public seed of the levels; new ones for new runs.

        Raises:
          ValueError: a constant out of range.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SaddleBiasReduced.certified(
          ...     num_examples=100_000, dim_x=20, dim_y=10, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     second_order_smoothness=0.5,
          ... )
          >>> bool(plan.epsilon() <= 2.0), plan.num_steps == len(plan.levels)
          (True, True)
        """
        return cls._certified(**given(locals()))

    @classmethod
    def from_theorem(
        cls,
        theorem: Literal["4.3"],
        *,
        num_examples: int,
        dim_x: int,
        dim_y: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        smoothness: float,
        second_order_smoothness: float,
        level_seed: int = 0,
    ) -> Self:
        """Returns the plan that Theorem 4.3 prescribes, within the budget, corrected.

        For study and comparison; :meth:`certified` is better. Of the n records the proof
        uses about half.

        Args:
          theorem: ``"4.3"``.
          num_examples: as in :meth:`certified`, like the next seven.
          dim_x: vertices of the player that minimises.
          dim_y: vertices of the player that maximises.
          epsilon: in (0, 8 log(1/delta)); the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L0.
          smoothness: L1.
          second_order_smoothness: L2.
          level_seed: public seed of the levels.

        Raises:
          ValueError: a constant out of range, an unknown theorem, or a vertex budget
            below 4.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SaddleBiasReduced.from_theorem(
          ...     "4.3",
          ...     num_examples=100_000, dim_x=20, dim_y=10, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     second_order_smoothness=0.5,
          ... )
          >>> plan.theorem.name, bool(plan.epsilon() <= 2.0)
          ('4.3', True)
        """
        return cls._from_theorem(**given(locals()))

    # The levels.

    @property
    def _top(self) -> int:
        """Highest level M: ``max_level``, or its default for None."""
        if self.max_level is not None:
            return self.max_level
        return levels.largest_level(self.vertex_budget)

    @kept
    def levels(self) -> tuple[int, ...]:
        """Level N of each step, drawn from the seed."""
        chosen = {"vertex_budget": self.vertex_budget, "max_level": self._top}
        if self.budget is None:
            found = levels.executed(self.level_seed, **chosen)
        else:
            deltas = self._deltas(self.step_sizes)
            found = levels.filtered(
                self.level_seed,
                **chosen,
                batch_sizes=np.array(self.batch_sizes),
                deltas_x=deltas[:, 0],
                deltas_y=deltas[:, 1],
                rho=self.budget,
                num_examples=self.num_examples,
                error=simplex.LOG_ERROR,
            )
        return tuple(found.tolist())

    @kept
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch size of a step at each level 0..M."""
        if self.batch_alpha is not None:
            sizes = levels.proportional(self._top, alpha=self.batch_alpha)
        else:
            sizes = levels.equalized(
                np.array(self.levels),
                num_examples=self.num_examples,
                max_level=self._top,
            )
        return tuple(sizes.tolist())

    @property
    def num_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number S of steps that the levels allow."""
        return len(self.levels)

    @property
    def sampling(self) -> SinglePass:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Single-pass sampler with the largest batch size of all steps."""
        return SinglePass(max(self.batch_sizes[level] for level in self.levels))

    def filtered(self, *, epsilon: float, delta: float) -> Self:
        """Returns the same plan with a privacy filter that ends it at (epsilon, delta).

        Args:
          epsilon: > 0.
          delta: in (0, 1).

        Raises:
          ValueError: no step sizes or no ``batch_alpha``, which are to be fixed before.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SaddleBiasReduced(
          ...     num_examples=20_000, relation="replace_one", dim_x=20, dim_y=10,
          ...     linf_clip_norm_x=1.0, linf_clip_norm_y=1.0, vertex_budget=200,
          ...     level_seed=3, batch_alpha=0.05, step_size_x=0.1, step_size_y=0.1,
          ... ).filtered(epsilon=2.0, delta=1e-5)
          >>> bool(plan.epsilon() <= 2.0)
          True
        """
        rho = charges.rho_budget(float(epsilon), float(delta))
        return dataclasses.replace(self, budget=rho, delta=delta)

    # Grids and sensitivities.

    @property
    def amplification(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Largest bound on a gradient of any level, in clips."""
        return float(levels.amplification(self._top).max())

    @property
    def grid_bits(self) -> int:
        """Bits of a record's contribution; a difference of two totals fits int32 too."""
        return record_bits(2 * max(self.batch_sizes))

    def _level_grids(self, steps: list[float]) -> list[tuple[LevelGrids, ...]]:
        """Returns the grids of x and y at each level, at these step sizes."""
        c, clips, found = levels.normalizer(self._top), self.clips, []
        for level, size in enumerate(self.batch_sizes):
            totals = Totals(clips, self.grid_bits, size, self.kappa)
            scaled = [
                totals.grids([factor * step for step in steps])
                for factor in (c * 2**level, 1.0 if level else c - 1)
            ]
            found.append(tuple(map(LevelGrids, *scaled)))
        return found

    @kept
    def grids(self) -> tuple[tuple[LevelGrids, ...], ...]:
        """Score grids of each level, of x and of y."""
        self.check_ready()
        return tuple(self._level_grids(self.step_sizes))

    def _deltas(self, steps: list[float]) -> np.ndarray:
        """Returns a score's sensitivity to a record of a step: (M + 1, 2), of x and y."""
        kappa, found = self.kappa, []
        for level, grids in enumerate(self._level_grids(steps)):
            # Above level 0, two gradients of the record differ by up to twice the clip.
            twice = (2 if level else 1) * kappa
            found.append([g.sensitivity(twice, kappa) for g in grids])
        return np.array(found)

    @property
    def sensitivity(self) -> float:
        """Largest sensitivity of a score to one record over all steps, in nats."""
        self.check_ready()
        return float(self._deltas(self.step_sizes)[list(self.levels)].max())

    def _cost_at(self, steps: list[float], *, pure: bool = False) -> float:
        executed = np.array(self.levels)
        x, y = self._deltas(steps)[executed].T
        error = simplex.LOG_ERROR
        return charges.bias_reduced(x, y, executed, error=error, pure=pure)

    def returned(self, state: Any, params: Any) -> Any:
        return output(state)

    def describe(self) -> Description:
        draws = f"vertices of either player in each of {self.num_steps} steps"
        return described(draws, self.sensitivity)
