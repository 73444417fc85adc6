"""The plan of mirror descent with gradients of reduced bias."""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp.core import validate
from jaxdp.core.keys import Keys
from jaxdp.core.types import LevelGrids, Relation
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import bias_reduced
from jaxdp.saddle.plans.scores import Sampler, record_bits, score_grid, sensitivity
from jaxdp.saddle.plans.two_players import TwoPlayers
from jaxdp.saddle.theory import charges, design, levels, settings, theorems
from jaxdp.sampling import SinglePass


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaddleBiasReduced(TwoPlayers):
    r""":class:`Saddle` with gradients of reduced bias, in steps of random levels.

    Levels are drawn before the run from a public seed; batches and step sizes may depend
    on them. For smooth problems that are not quadratic; on bilinear ones, whose gradients
    have no bias, :class:`Saddle` is better.

    Attributes:
      num_examples: n, records in the data set; public.
      relation: which data sets are neighbours; no default. A record that is zeroed or
        absent leaves its row, which counts nothing: one of NaN does.
      dim_x: as in :class:`Saddle`, like the next three.
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
      sampler: as in :class:`Saddle`.
      delta: what :meth:`calibrate` aimed at; used by reports.
      theorem: where :meth:`from_theorem` or :meth:`certified` chose the numbers: what
        they promise. None elsewhere, and where a number was changed since.

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
    theorem: settings.BiasReducedSettings | None = None

    family: ClassVar[str] = "saddle_bias_reduced"
    released: ClassVar[str] = "vertices of the output"
    nested: ClassVar[dict[str, Any]] = {
        "theorem": functools.partial(settings.read, settings.BiasReducedSettings)
    }

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
        self._check_players()

    @classmethod
    def from_theorem(cls, theorem: str, *, delta: float, **numbers: Any) -> Self:
        """Returns the plan that Theorem 4.3 prescribes, for study.

        :meth:`certified` is better.

        Args:
          theorem: ``"4.3"``.
          delta: in (0, 1).
          **numbers: ``num_examples``, ``dim_x``, ``dim_y``, ``epsilon``, ``relation``,
            ``lipschitz``, ``smoothness``, ``second_order_smoothness``, ``level_seed``; as
            in :meth:`Saddle.from_theorem`.

        Raises:
          ValueError, TypeError: as
            :func:`jaxdp.saddle.theory.theorems.saddle_bias_reduced`.
        """
        found = theorems.saddle_bias_reduced(theorem, delta=delta, **numbers)
        return cls._of(found, delta=delta)

    @classmethod
    def certified(cls, *, epsilon: float, delta: float, **numbers: Any) -> Self:
        """Returns the plan of least bound up to constants, with all records read.

        Its charges are exact, and its promise is the bound with proven constants.

        Args:
          epsilon: > 0.
          delta: in (0, 1).
          **numbers: as for :meth:`from_theorem`, and ``vertex_budget`` and ``max_level``,
            which are searched where they are None.

        Raises:
          ValueError, TypeError: as :func:`jaxdp.saddle.theory.design.saddle_bias_reduced`.
        """
        found = design.saddle_bias_reduced(epsilon=epsilon, delta=delta, **numbers)
        return cls._of(found)._at_most(epsilon=epsilon, delta=delta)

    # The levels.

    @property
    def _top(self) -> int:
        """Highest level M: ``max_level``, or its default for None."""
        if self.max_level is not None:
            return self.max_level
        return levels.largest_level(self.vertex_budget)

    @property
    def levels(self) -> tuple[int, ...]:
        """Level N of each step, drawn from the seed."""
        return self._levels

    @functools.cached_property
    def _levels(self) -> tuple[int, ...]:
        if self.budget is not None:
            steps = [getattr(self, name) for name in self.steps]
            x, y = zip(*self._deltas(steps), strict=True)
            found = levels.filtered(
                self.level_seed,
                max_level=self._top,
                batch_sizes=np.array(self.batch_sizes),
                deltas_x=np.array(x),
                deltas_y=np.array(y),
                rho=self.budget,
                num_examples=self.num_examples,
                vertex_budget=self.vertex_budget,
                error=simplex.LOG_ERROR,
            )
        else:
            found = levels.executed(
                self.level_seed,
                vertex_budget=self.vertex_budget,
                max_level=self._top,
            )
        return tuple(int(level) for level in found)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch size of a step at each level 0..M."""
        return self._batch_sizes

    @functools.cached_property
    def _batch_sizes(self) -> tuple[int, ...]:
        if self.batch_alpha is not None:
            sizes = levels.proportional(self._top, alpha=self.batch_alpha)
        else:
            sizes = levels.equalized(
                np.array(self.levels),
                num_examples=self.num_examples,
                max_level=self._top,
            )
        return tuple(int(size) for size in sizes)

    @property
    def num_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number S of steps that the levels allow."""
        return len(self.levels)

    @property
    def sampling(self) -> SinglePass:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Single-pass sampler with the largest batch size of all steps."""
        return SinglePass(max(self.batch_sizes[level] for level in self.levels))

    def calibrate(self, *, epsilon: float, delta: float) -> Self:
        if self.budget is not None:
            raise ValueError(
                "budget must be None to be calibrated, for a filter takes step sizes as "
                f"they are; got {self.budget!r}"
            )
        return super().calibrate(epsilon=epsilon, delta=delta)

    def filtered(self, *, epsilon: float, delta: float) -> Self:
        """Returns the same plan with a privacy filter that ends it at (epsilon, delta).

        Args:
          epsilon: > 0.
          delta: in (0, 1).

        Raises:
          ValueError: no step sizes or no ``batch_alpha``, which are to be fixed before.
        """
        rho = charges.rho_budget(float(epsilon), float(delta))
        return dataclasses.replace(self, budget=rho, delta=delta)

    # Grids and sensitivities.

    @property
    def grid_bits(self) -> int:
        """Bits of a record's contribution; a difference of two totals fits int32 too."""
        return record_bits(2 * max(self.batch_sizes))

    def _grids_at(
        self, level: int, steps: list[float]
    ) -> tuple[LevelGrids, LevelGrids]:
        c = levels.normalizer(self._top)
        difference = c * 2**level
        base = 1.0 if level else c - 1
        size, bits = self.batch_sizes[level], self.grid_bits
        x, y = (
            LevelGrids(
                score_grid(difference * step, clip, bits, size),
                score_grid(base * step, clip, bits, size),
            )
            for step, clip in zip(steps, self._clips, strict=True)
        )
        return x, y

    @property
    def grids(self) -> tuple[tuple[LevelGrids, LevelGrids], ...]:
        """Score grids of each level, of x and of y."""
        self.check_ready()
        steps = [getattr(self, name) for name in self.steps]
        return tuple(self._grids_at(level, steps) for level in range(self._top + 1))

    def _deltas(self, steps: list[float]) -> list[list[float]]:
        """Returns the sensitivity of a score to a record of a step, by level and player."""
        found = []
        for level in range(self._top + 1):
            # Above level 0, two gradients of the record differ by up to twice the clip.
            twice = 2 if level else 1
            found.append(
                [
                    sensitivity(grid.difference, twice * self.kappa)
                    + sensitivity(grid.base, self.kappa)
                    for grid in self._grids_at(level, steps)
                ]
            )
        return found

    @property
    def sensitivity(self) -> float:
        """Largest sensitivity of a score to one record over all steps, in nats."""
        self.check_ready()
        deltas = self._deltas([getattr(self, name) for name in self.steps])
        return max(max(deltas[level]) for level in self.levels)

    def longest(self, steps: list[float]) -> float:
        most = float(levels.amplification(self._top).max())
        return most * max(s * c for s, c in zip(steps, self._clips, strict=True))

    def rho_at(self, steps: list[float]) -> float:
        deltas = np.array(self._deltas(steps))[np.array(self.levels)]
        return charges.bias_reduced(
            deltas[:, 0],
            deltas[:, 1],
            np.array(self.levels),
            error=simplex.LOG_ERROR,
        )

    def algorithm(self, keys: Keys, **kwargs: Any) -> Any:
        return bias_reduced.saddle_bias_reduced(self, keys, **kwargs)
