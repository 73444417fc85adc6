"""Base of plans with one noised sum per step: clip, grid, event and calibration."""

import dataclasses
import math
from typing import Any, ClassVar, Literal, Self, get_args

from jaxdp import accounting, sampling
from jaxdp.core import validate
from jaxdp.core.types import Grid, Relation
from jaxdp.kernels import clip
from jaxdp.mechanism import events
from jaxdp.mechanism.plan import Description, Plan

#: Samplers whose batches have one size.
_ONE_SIZE = tuple(
    kind
    for kind in get_args(sampling.AnySampler)
    if kind
    not in (
        sampling.SinglePassRestarts,
        sampling.MultiPassRestarts,
        sampling.AdaptiveCursor,
    )
)

Vary = Literal["noise_multiplier", "num_steps"]


def check_clip(name: str, value: Any) -> None:
    """Checks that a clip norm is in [1e-30, 1e30] or infinite."""
    validate.positive(allow_inf=True, **{name: value})
    # Where float32 holds the clip, its grid and their inverses with room to spare.
    if not (1e-30 <= value <= 1e30 or math.isinf(value)):
        raise ValueError(
            f"{name} must be in [1e-30, 1e30], or infinity without noise, got {value!r}"
        )


def described(plan: "SumPlan") -> Description:
    """Describes a plan of equal sums."""
    size = f"{plan.noise_multiplier:.4g} x sensitivity {plan.sensitivity:.4g}"
    sums = f"each of {plan.num_steps} sums of {plan.normalizer:.5g} records"
    noise = f"{size if plan.noise_multiplier else 'none'} on {sums}"
    return Description(noise, stds=plan.noise_std)


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

    @property
    def noise(self) -> events.Noise:
        """Law of the noise: discrete Gaussians, unless a subclass has another."""
        return "discrete"

    @property
    def numbers_per_step(self) -> int:
        """Largest number of noised values that a step releases."""
        return accounting.MAX_NUMBERS

    def __post_init__(self) -> None:
        validate.integer(num_examples=self.num_examples)
        validate.instance(self.samplers, sampling=self.sampling)
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
        validate.non_negative(noise_multiplier=self.noise_multiplier)
        if self.noise_multiplier > 0:
            if math.isinf(self.l2_clip_norm):
                raise ValueError(
                    "l2_clip_norm must be finite when noise_multiplier > 0, got inf: "
                    "without a bound no noise is private"
                )
            accounting.self_check(self._guarantee)
        _ = self.grid_bits  # Raises if the sum cannot fit.

    def _check_delta(self, delta: float) -> None:
        if not (delta == 0 and self.noise == "laplace"):
            validate.probability(delta=delta)

    # Bound and noise.

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the released sum, in L2, or in L1 with Laplace noise."""
        return accounting.sensitivity(self.relation, self.l2_clip_norm)

    @property
    def normalizer(self) -> float:
        """Constant divisor of the sums: the expected batch size."""
        return self.sampling.expected_batch_size(self.num_examples)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum, divided by ``normalizer``."""
        noise = self._sum_noise
        return noise * self.sensitivity / self.normalizer if noise else 0.0

    @property
    def grid_bits(self) -> int | None:
        """Bits k of the grid, whose unit is 2**-k times the clip; None without a clip."""
        if math.isinf(self.l2_clip_norm):
            return None
        return clip.grid_bits(
            self.sampling.rows(self.num_examples),
            self._largest_noise * self._sensitivity_over_clip,
            # Where either law has a mass below 1e-14.
            deviations=32 if self.noise == "laplace" else 8,
        )

    @property
    def grid_noise_std(self) -> int:
        """Standard deviation of the integer noise in grid units, rounded up."""
        if self.grid_bits is None:
            return 0
        over_clip = self._sum_noise * self._sensitivity_over_clip
        return math.ceil(over_clip * 2**self.grid_bits)

    @property
    def norm_order(self) -> int:
        """Order of the norm in which contributions are bounded."""
        return 1 if self.noise == "laplace" else 2

    def grid(self, phase: str) -> Grid:
        """Returns the grid of a phase: clip, unit, normalizer and integer noise."""
        del phase  # There is one.
        return Grid(
            self.l2_clip_norm,
            self.grid_bits,
            self.normalizer,
            self.grid_noise_std,
            order=self.norm_order,
        )

    @property
    def _sensitivity_over_clip(self) -> float:
        return accounting.sensitivity(self.relation, 1.0)

    @property
    def _noise(self) -> float:
        if self.noise_multiplier is None:
            raise ValueError(
                "the plan has no noise_multiplier yet: call "
                ".calibrate(epsilon=..., delta=...) or .with_noise(noise_multiplier=...)"
            )
        return self.noise_multiplier

    @property
    def _sum_noise(self) -> float:
        """Noise multiplier of the sum; at least the one that a step is charged for."""
        return self._noise

    @property
    def _largest_noise(self) -> float:
        """Largest noise multiplier among the releases of a step."""
        return self._sum_noise

    # Accounting.

    @property
    def _guarantee(self) -> accounting.Guarantee:
        return self._guarantee_of(self._noise, self.num_steps)

    def spent(self, num_steps: int) -> accounting.Epsilon:
        # With the noise of the whole run, where a shorter one would have less.
        guarantee, delta = self._guarantee_of(self._noise, num_steps), self.delta
        assert delta is not None
        return accounting.epsilon(*guarantee, delta)

    def _guarantee_of(
        self, noise_multiplier: float, steps: int
    ) -> accounting.Guarantee:
        ideal = events.guarantee(
            self.noise,
            self.sampling,
            self.relation,
            num_examples=self.num_examples,
            num_steps=steps,
            noise_multiplier=noise_multiplier,
        )
        return self._drawn(ideal, noise_multiplier, steps)

    def _drawn(
        self, ideal: accounting.Guarantee, noise_multiplier: float, steps: int
    ) -> accounting.Guarantee:
        """Returns the guarantee with the error of the integer Gaussian sampler added."""
        if self.noise == "laplace" or not noise_multiplier:
            return ideal
        # (A record that pushes another out of a full batch moves the sum by 2C.)
        moves = 2 / self._sensitivity_over_clip if self.sampling.amplifies else 1.0
        return accounting.drawn(
            ideal,
            num_steps=steps,
            numbers_per_step=self.numbers_per_step,
            reach=moves / noise_multiplier,
        )

    def calibrate(
        self, *, epsilon: float, delta: float, vary: Vary = "noise_multiplier"
    ) -> Self:
        """Returns a plan of at most (epsilon, delta), with least noise or most steps.

        Args:
          epsilon: > 0.
          delta: in (0, 1); with Laplace noise also 0.
          vary: ``"noise_multiplier"``, or ``"num_steps"`` for a plan that has noise.
        """
        validate.positive(epsilon=epsilon)
        self._check_delta(delta)
        validate.one_of(("noise_multiplier", "num_steps"), vary=vary)
        if vary == "num_steps":
            steps = accounting.calibrate_num_steps(
                lambda t: self._guarantee_of(self._noise, t),
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

    def with_noise(
        self, *, noise_multiplier: float, delta: float | None = None
    ) -> Self:
        """Returns the same plan with this noise; 0 is the non-private limit."""
        delta = self.delta if delta is None else delta
        return dataclasses.replace(self, noise_multiplier=noise_multiplier, delta=delta)

    def mechanism(self) -> dict[str, Any]:
        return {
            "l2_clip_norm": self.l2_clip_norm,
            "noise_multiplier": self.noise_multiplier,
            "noise_std": self.noise_std,
        }

    def rows(self) -> list[tuple[str, str]]:
        out = super().rows()
        if self.noise_multiplier is not None:
            out.append(("sensitivity", f"{self.sensitivity:.6g}"))
            out.append(("noise_std", f"{self.noise_std:.6g}"))
            if self.delta is not None:
                spent = self.epsilon()
                out.append(("epsilon", f"{spent:.6g} ({spent.accountant})"))
        return out
