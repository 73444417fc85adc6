"""Base of plans with one noised sum per step: clip, grid, event and calibration."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

import numpy as np

from jaxdp import accounting, sampling
from jaxdp.core import validate
from jaxdp.core.correlated_noise import CorrelatedNumbers
from jaxdp.core.types import Grid, Relation
from jaxdp.kernels.prefix_noise import PrefixNoise
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description, Plan
from jaxdp.mechanism.sums import Mechanism

_ONE_SIZE = tuple(kind for kind in get_args(sampling.AnySampler) if kind.one_size)

Vary = Literal["noise_multiplier", "num_steps"]
P = TypeVar("P", bound=Plan)


def check_clip(name: str, value: Any) -> None:
    """Checks that a clip norm is in [1e-30, 1e30] or infinite."""
    validate.positive(allow_inf=True, **{name: value})
    # Where float32 holds the clip, its grid and their inverses with room to spare.
    if not (1e-30 <= value <= 1e30 or math.isinf(value)):
        raise ValueError(
            f"{name} must be in [1e-30, 1e30], or infinity without noise, got {value!r}"
        )


def described(self: Any) -> Description:
    """Describes a plan of equal sums.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> plan.describe().noise
      '2 x sensitivity 2 on each of 3 sums of 8 records'
    """
    noise = noise_on_each(self, f"sums of {self.normalizer:.5g} records")
    return Description(noise, stds=self.noise_std)


def noise_on_each(plan: Any, sums: str) -> str:
    """Describes the noise on each of a plan's sums or means, in words."""
    size = f"{plan.noise_multiplier:.4g} x sensitivity {plan.sensitivity:.4g}"
    noise = size if plan.noise_multiplier else "none"
    return f"{noise} on each of {plan.num_steps} {sums}"


def with_noise(self: P, *, noise_multiplier: float, delta: float | None = None) -> P:
    """Returns the same plan with this noise; 0 is the non-private limit.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=1437, num_steps=1000, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... )
      >>> plan = plan.with_noise(noise_multiplier=50.0, delta=1e-5)
      >>> plan.noise_multiplier, bool(plan.epsilon() < 5.0)
      (50.0, True)
    """
    plan: Any = self  # Every subclass is a dataclass.
    delta = self.delta if delta is None else delta
    return dataclasses.replace(plan, noise_multiplier=noise_multiplier, delta=delta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumPlan(Plan):
    """Plan whose steps each release one bounded sum over a batch, plus noise.

    Attributes:
      num_examples: n, records in the data set; public.
      num_steps: T, how many sums are released.
      sampling: which records a step reads.
      relation: which data sets are neighbours; no default.
      l2_clip_norm: C, bound on one record's contribution; infinity only without noise.
        (With Laplace noise it bounds the L1 norm, and so the L2 norm.)
      noise_multiplier: standard deviation of the noise on the released sum over
        ``sensitivity``; None until :meth:`calibrate` or :meth:`with_noise`.
      delta: what :meth:`calibrate` aimed at; used by reports.
    """

    num_examples: int
    num_steps: int
    sampling: sampling.AnySampler
    relation: Relation
    l2_clip_norm: float
    noise_multiplier: float | None = None
    delta: float | None = None

    #: Kinds of samplers that its accounting covers.
    samplers: ClassVar[tuple[type, ...]] = _ONE_SIZE

    def __post_init__(self) -> None:
        validate.instance(self.samplers, sampling=self.sampling)
        # Places of records that are drawn here are 32-bit integers.
        most = 2**31 - 1 if self.sampling.draws else None
        validate.integer(num_examples=self.num_examples, at_most=most)
        most = self.sampling.max_steps(self.num_examples)
        validate.integer(num_steps=self.num_steps, at_most=most)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        check_clip("l2_clip_norm", self.l2_clip_norm)
        if self.delta is not None:
            self._check_delta(self.delta)
        self._coerce()
        # Raises if noise, sampler and relation cannot be accounted together.
        self._guarantee_of(1.0, self.num_steps)
        if self.noise_multiplier is None:
            return
        validate.noise_multiplier(self.noise_multiplier)
        if self.noise_multiplier > 0:
            if math.isinf(self.l2_clip_norm):
                raise ValueError(
                    "l2_clip_norm must be finite when noise_multiplier > 0, got inf: "
                    "without a bound no noise is private"
                )
            accounting.self_check(self._guarantee)
        _ = self.grid_bits  # Raises if the sum cannot fit.

    # Bound and noise.

    def _sums(self) -> Mechanism:
        """Returns the mechanism of the plan, on which its guarantee rests."""
        raise NotImplementedError

    @kept
    def sums(self) -> Any:
        """Mechanism of the plan: one of :mod:`jaxdp.mechanism.sums`."""
        return self._sums()

    def _common(self) -> dict[str, Any]:
        """Returns the numbers that every mechanism has."""
        names = (
            "num_examples",
            "num_steps",
            "sampling",
            "relation",
            "noise_multiplier",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the released sum, in L2, or in L1 with Laplace noise.

        With correlated noise, and in several passes, that of all releases, to which
        ``noise_multiplier`` refers.
        """
        return self.sums.sensitivity

    @property
    def normalizer(self) -> float:
        """Constant divisor of sums: the expected batch size; 1 where means are noised."""
        return self.sums.normalizer

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on what updates parameters.

        Of running sums the largest of a coordinate; of noise that is scaled with the
        movement in expectation over the learner's random places, if every step is the
        longest.
        """
        return self.sums.noise_std

    @property
    def clips(self) -> Mapping[str, tuple[float, float]]:
        """Clip norm and normalizer of each phase, by the phase's name."""
        return self.sums.clips

    def step_std(self, phase: str) -> float:
        """Returns the standard deviation of a coordinate's noise in a phase's means.

        With correlated noise that of a node; with scaled noise at the largest move.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> plan.step_std("step")
          0.5
        """
        return self.sums.step_std(phase)

    def grid(self, phase: str) -> Grid:
        """Returns the grid of a phase: clip, grid unit, normalizer and integer noise.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> plan.grid("step").bits
          16
        """
        return self.sums.grid(phase)

    @property
    def grid_bits(self) -> int | None:
        """Bits of the coarsest grid, whose unit is 2**-bits of the clip; None without."""
        if any(math.isinf(bound) for bound, _ in self.clips.values()):
            return None
        bits = [self.grid(phase).bits for phase in self.clips]
        return None if None in bits else min(b for b in bits if b is not None)

    @property
    def grid_noise_std(self) -> int:
        """Largest standard deviation of integer noise over the phases, in its units."""
        return max(self.grid(phase).noise_std for phase in self.clips)

    # Correlated noise; AttributeError where each step has noise of its own.

    @property
    def correlation(self) -> PrefixNoise:
        """Noise kernel of one period, which holds the matrix C."""
        return self.sums.correlation

    @property
    def noise_period(self) -> int:
        """Number of steps from one restart of the noise to the next."""
        return self.correlation.period

    @property
    def leaf_sensitivities(self) -> np.ndarray:
        """Sensitivity s of each step's mean, float64 (period,)."""
        return self.sums.leaf_sensitivities

    @property
    def node_std(self) -> float:
        """Standard deviation sigma of one coordinate of one node's noise."""
        return self.sums.node_std

    def _correlated(self, steps_per_pass: int) -> CorrelatedNumbers:
        """Returns the numbers of noise that restarts after so many steps, at the latest."""
        grids = {phase: self.grid(phase) for phase in self.clips}
        noise = self.sums.sum_noise
        return CorrelatedNumbers(
            self.run, self.correlation, MappingProxyType(grids), steps_per_pass, noise
        )

    # Accounting.

    @property
    def _guarantee(self) -> accounting.Guarantee:
        return self.sums.guarantee

    def _spent(self, num_steps: int) -> accounting.Epsilon:
        # With the noise of the whole run, where a shorter one would have less.
        noise = validate.has_noise(self.noise_multiplier)
        guarantee, delta = self._guarantee_of(noise, num_steps), self.delta
        assert delta is not None
        return accounting.epsilon(*guarantee, delta)

    def _guarantee_of(
        self, noise_multiplier: float, steps: int
    ) -> accounting.Guarantee:
        changes: Any = {"noise_multiplier": noise_multiplier, "num_steps": steps}
        return dataclasses.replace(self.sums, **changes).guarantee

    def calibrate(
        self, *, epsilon: float, delta: float, vary: Vary = "noise_multiplier"
    ) -> Self:
        """Returns a plan of at most (epsilon, delta), with least noise or most steps.

        Args:
          epsilon: > 0.
          delta: in (0, 1); with Laplace noise also 0.
          vary: ``"noise_multiplier"``, or ``"num_steps"`` for a plan that has noise.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=1437, num_steps=1000, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... )
          >>> plan = plan.calibrate(epsilon=2.0, delta=1e-5)
          >>> longer = plan.calibrate(epsilon=4.0, delta=1e-5, vary="num_steps")
          >>> longer.num_steps > plan.num_steps, bool(longer.epsilon() <= 4.0)
          (True, True)
        """
        self._check_budget(epsilon, delta)
        validate.one_of(("noise_multiplier", "num_steps"), vary=vary)
        if vary == "num_steps":
            if not self.sums.charges_steps:
                raise ValueError(
                    "vary must be 'noise_multiplier' for this plan, got 'num_steps': what "
                    "its noise costs does not depend on the number of steps, which make "
                    "the noise larger instead"
                )
            noise = validate.has_noise(self.noise_multiplier)
            steps = accounting.calibrate_num_steps(
                lambda t: self._guarantee_of(noise, t),
                epsilon,
                delta,
                max_steps=min(self.sampling.max_steps(self.num_examples), 1_000_000),
            )
            return dataclasses.replace(self, num_steps=steps, delta=delta)
        if math.isinf(self.l2_clip_norm):
            raise ValueError("l2_clip_norm must be finite to calibrate noise, got inf")
        noise = accounting.calibrate_noise_multiplier(
            lambda m: self._guarantee_of(m, self.num_steps), epsilon, delta
        )
        return dataclasses.replace(self, noise_multiplier=noise, delta=delta)

    with_noise = with_noise

    def mechanism(self) -> dict[str, Any]:
        names = ("l2_clip_norm", "noise_multiplier", "noise_std")
        return {name: getattr(self, name) for name in names}

    def _derived(self) -> list[tuple[str, float]]:
        if self.noise_multiplier is None:
            return []
        stds = [("noise_std", self.noise_std)]
        return [("sensitivity", self.sensitivity), *self.sums.stds.items(), *stds]
