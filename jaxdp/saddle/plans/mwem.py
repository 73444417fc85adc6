"""The plan of measured marginals."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Grid, Relation
from jaxdp.kernels import clip, simplex
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description, Plan
from jaxdp.mechanism.sum_plan import with_noise
from jaxdp.saddle.algorithms.mwem import (
    FittedHistogram,
    MarginalNumbers,
    mwem,
    output,
)
from jaxdp.saddle.grids import UNIT, ScoreGrid, score_grid
from jaxdp.saddle.oracles.queries import Marginals
from jaxdp.saddle.theory import charges
from jaxdp.sampling import FullBatch

#: Nats that one count may move a score by, at most: further apart, all scores saturate.
_STEEPEST = 40.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MWEM(Plan):
    r"""A private histogram, fitted to marginals that are measured where it is worst.

    The first step measures the first marginals at once, each further step one that the
    exponential mechanism draws. All measurements have the same noise. With ``num_steps=1``
    nothing is drawn: a Gaussian release of the first marginals.

    One record counts in one cell of each marginal. Replaced, it moves the counts of one by
    ``sensitivity`` = sqrt(2) in L2, and the L1 distance to any table by 2; zeroed or
    absent, by 1 and 1.

    Attributes:
      num_examples: n, records in the data set; public.
      num_steps: 1 + T, with T rounds that draw and measure a marginal.
      relation: which data sets are neighbours; no default. A record that is zeroed or
        absent, and one with a code outside the domain, counts in no cell.
      sizes: cells of each column.
      attributes: the marginals, as in :class:`jaxdp.Marginals`; any may be drawn.
      num_start: how many of them, the first ones, the first step measures; >= 1.
      selection_share: of the cost of a round, what the draw may take; in (0, 1).
      noise_multiplier: standard deviation of the noise on a count over ``sensitivity``;
        None until :meth:`calibrate` or :meth:`with_noise`.
      delta: what :meth:`calibrate` aimed at; used by reports.

    Raises:
      ValueError, TypeError: naming the field.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.MWEM(
      ...     num_examples=10_000, num_steps=6, relation="replace_one", sizes=(2, 3, 4),
      ...     attributes=((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)), num_start=3,
      ... ).calibrate(epsilon=1.0, delta=1e-5)
      >>> bool(plan.epsilon() <= 1.0), round(plan.sensitivity, 4)
      (True, 1.4142)

    References:
      As :func:`jaxdp.mwem`. Cost: a draw of range r is r^2/8-zCDP (Cesar and Rogers, 2021),
      a Gaussian sum of noise multiplier m is 1/2m^2-zCDP (Bun and Steinke, 2016).
    """

    num_examples: int
    num_steps: int
    relation: Relation
    sizes: tuple[int, ...]
    attributes: tuple[tuple[int, ...], ...]
    num_start: int
    selection_share: float = 0.1
    noise_multiplier: float | None = None
    delta: float | None = None

    family: ClassVar[str] = "mwem"
    released: ClassVar[str] = "marginals"
    numbers_read: ClassVar[Any] = MarginalNumbers
    runs: ClassVar[Any] = mwem
    runs_algorithm: ClassVar[bool] = True
    makes_steps: ClassVar[bool] = True
    differentiates: ClassVar[bool] = False
    #: The first step measures more marginals than a later one.
    charges_fall: ClassVar[bool] = True
    unlogged: ClassVar[str] = "are whole tables of shares"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "attributes", tuple(map(tuple, self.attributes)))
        # With 8 bits of noise below a count, sums fit 32 bits.
        validate.integer(at_most=2**23 - 1, num_examples=self.num_examples)
        validate.integer(num_steps=self.num_steps)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        most = len(self.queries.columns)  # Which checks sizes and attributes.
        validate.integer(at_most=most, num_start=self.num_start)
        if self.queries.domain_size > 2**26:
            raise ValueError(
                "sizes must have a product of at most 2**26, the cells of a histogram that "
                f"is held, got {self.queries.domain_size}"
            )
        validate.integer(at_most=2**24, num_queries=self.queries.num_queries)
        validate.probability(selection_share=self.selection_share)
        if self.delta is not None:
            self._check_delta(self.delta)
        self._coerce()
        if self.noise_multiplier is None:
            return
        validate.noise_multiplier(self.noise_multiplier, least=1e-6)
        _ = self.grid  # Raises if counts and noise do not fit.
        accounting.self_check(self._guarantee)

    # What is measured.

    @kept
    def queries(self) -> Marginals:
        """All marginals: the ``value_fn`` of a run."""
        return Marginals(self.sizes, attributes=self.attributes)

    @property
    def sampling(self) -> FullBatch:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Full-batch sampler: all records are in every marginal."""
        return FullBatch()

    def uniform(self) -> FittedHistogram:
        """Returns the point to start from: uniform, with nothing measured.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.MWEM(
          ...     num_examples=100, num_steps=1, relation="replace_one", sizes=(2, 3),
          ...     attributes=((0,), (1,)), num_start=2,
          ... )
          >>> start = plan.uniform()
          >>> start.histogram.shape, start.shares.shape, start.times.shape
          ((6,), (5,), (2,))
        """
        size = self.queries.domain_size
        return FittedHistogram(
            jnp.full((size,), 1 / size, jnp.float32),
            jnp.zeros((self.queries.num_queries,), jnp.float32),
            jnp.zeros((len(self.attributes),), jnp.float32),
        )

    # Bound and noise.

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the counts of one marginal, in L2."""
        # Of a replaced record two counts move by one, and not one count by two.
        return math.sqrt(accounting.sensitivity(self.relation, 1.0))

    @property
    def score_sensitivity(self) -> int:
        """Sensitivity of a score, the L1 distance of a marginal, in counts."""
        return int(accounting.sensitivity(self.relation, 1.0))

    @property
    def normalizer(self) -> float:
        """Constant divisor of the counts: n."""
        return float(self.num_examples)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on a measured share of the records."""
        noise = validate.has_noise(self.noise_multiplier)
        return noise * self.sensitivity / self.normalizer

    @kept
    def grid(self) -> Grid:
        """Grid of the noised counts, whose units are parts of a count."""
        std = validate.has_noise(self.noise_multiplier) * self.sensitivity
        bits = clip.grid_bits(self.num_examples, std)
        return Grid(
            1.0, 0, self.normalizer, accounting.integer_std(std * 2**bits), shift=bits
        )

    def _score_grid_at(self, noise_multiplier: float) -> ScoreGrid:
        """Returns the grid of the scores at a noise."""
        steepest = _STEEPEST
        if noise_multiplier > 0:
            odds = self.selection_share / (1 - self.selection_share)
            moved = math.sqrt(odds) / noise_multiplier - UNIT - simplex.LOG_ERROR
            steepest = min(max(moved, 0.0) / self.score_sensitivity, _STEEPEST)
        grid = score_grid(steepest, 1.0, 0, 1)
        if grid.shift < 0:  # Counts are scaled up first.
            grid = score_grid(steepest, 1.0, -grid.shift, 1)
        return grid

    @kept
    def score_grid(self) -> ScoreGrid:
        """Grid of the scores from which marginals are drawn, whose clip is one count."""
        return self._score_grid_at(validate.has_noise(self.noise_multiplier))

    @property
    def lowest_score(self) -> int:
        """Counts below the largest score at which a score saturates."""
        grid = self.score_grid
        if grid.multiplier == 0:
            return 0
        each = 2.0**grid.bits * grid.multiplier / 2.0**grid.shift
        return math.floor(min(-simplex.LOWEST / each, 2.0 ** (30 - grid.bits)))

    @property
    def penalties(self) -> tuple[int, ...]:
        """Mean L1 norm of the noise on each marginal, in counts; public."""
        noise = validate.has_noise(self.noise_multiplier) * self.sensitivity
        norms = np.diff(self.queries.offsets) * noise * math.sqrt(2 / math.pi)
        return tuple(int(x) for x in np.minimum(np.rint(norms), 2.0**29))

    # Accounting.

    def rho_at(self, noise_multiplier: float, num_steps: int) -> float:
        """Returns the zCDP of the first steps at a noise multiplier > 0.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.MWEM(
          ...     num_examples=100, num_steps=9, relation="replace_one", sizes=(2, 3),
          ...     attributes=((0,), (1,), (0, 1)), num_start=2, selection_share=0.5,
          ... )
          >>> round(plan.rho_at(10.0, 1), 6), round(plan.rho_at(10.0, 9), 4)
          (0.01, 0.09)
        """
        grid = self._score_grid_at(noise_multiplier)
        return charges.measured(
            noise_multiplier,
            grid.sensitivity(self.score_sensitivity),
            num_start=self.num_start,
            num_rounds=num_steps - 1,
            error=simplex.LOG_ERROR,
        )

    def _guarantee_of(self, noise: float, num_steps: int) -> accounting.Guarantee:
        if noise == 0:
            return accounting.non_private()
        reach = math.sqrt(self.num_start) / noise
        if num_steps == 1:
            ideal = accounting.full_batch_gaussian(1 / reach, 1, self.relation)
        else:
            ideal = accounting.zcdp(self.rho_at(noise, num_steps))
        offsets = self.queries.offsets
        widest = max(int(offsets[self.num_start]), int(np.max(np.diff(offsets))))
        return accounting.drawn(
            ideal, num_steps=num_steps, numbers_per_step=widest, reach=reach
        )

    @property
    def _guarantee(self) -> accounting.Guarantee:
        noise = validate.has_noise(self.noise_multiplier)
        return self._guarantee_of(noise, self.num_steps)

    def _spent(self, num_steps: int) -> accounting.Epsilon:
        noise, delta = validate.has_noise(self.noise_multiplier), self.delta
        assert delta is not None
        return accounting.epsilon(*self._guarantee_of(noise, num_steps), delta)

    def calibrate(self, *, epsilon: float, delta: float) -> Self:
        """Returns a plan of at most (epsilon, delta), with the least noise.

        Args:
          epsilon: > 0.
          delta: in (0, 1).

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.MWEM(
          ...     num_examples=10_000, num_steps=1, relation="replace_one", sizes=(2, 3),
          ...     attributes=((0, 1),), num_start=1,
          ... ).calibrate(epsilon=2.0, delta=1e-5)
          >>> round(float(plan.epsilon()), 3), plan.epsilon().accountant
          (2.0, 'Gaussian closed form')
        """
        self._check_budget(epsilon, delta)
        noise = accounting.calibrate_noise_multiplier(
            lambda m: self._guarantee_of(m, self.num_steps), epsilon, delta
        )
        return dataclasses.replace(self, noise_multiplier=noise, delta=delta)

    with_noise = with_noise

    # Runs and reports.

    def returned(self, state: Any, params: Any) -> FittedHistogram:
        return output(state)

    def mechanism(self) -> dict[str, Any]:
        names = ("noise_multiplier", "noise_std", "num_start", "selection_share")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> Description:
        noise, rounds = self.noise_multiplier, self.num_steps - 1
        size = f"{noise:.4g} x sensitivity {self.sensitivity:.4g}" if noise else "none"
        drawn = f", and {rounds} that are drawn" if rounds else ""
        return Description(
            f"{size} on the counts of {self.num_start} marginals{drawn}",
            released="marginals",
            stds=self.noise_std,
        )

    def _derived(self) -> Sequence[tuple[str, float]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.noise_multiplier is None:
            return []
        return [("sensitivity", self.sensitivity), ("noise_std", self.noise_std)]
