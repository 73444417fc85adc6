"""The plans of DPZero and of DPGD-0th."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, Self

import jax
import optax

from jaxdp import sampling
from jaxdp.core import validate
from jaxdp.core.keys import Keys
from jaxdp.core.types import Grid, Perturbation
from jaxdp.dpzero import theorems
from jaxdp.dpzero import transform as transforms
from jaxdp.dpzero.clip_tuning import ClipTuning
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.mechanism.design import Design
from jaxdp.mechanism.events import Noise
from jaxdp.mechanism.plan import Description
from jaxdp.mechanism.sum_plan import SumPlan, described

DirectionLaw = Literal["sphere", "gaussian", "rademacher", "orthonormal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlopeSumPlan(SumPlan):
    r"""Base of the DPZero paper's plans, whose steps release noised sums of slopes.

    Attributes:
      smoothing_radius: :math:`\lambda` >= 0, in units of the parameters, times a vector of
        norm about sqrt(d); 0 takes exact directional derivatives, forward-mode.
      direction: law of the directions.
      noise: ``"discrete"``, discrete Gaussians. (``"gaussian"``, once float32 noise that
        leaked the parity of the sum, is taken to mean the same.)
      output: what a run returns: ``"last"``, the last iterate, or ``"random"``, the
        paper's iterate before a uniformly random step (free, but no cheaper either).
      theorem: what :meth:`from_theorem` took the numbers from; None elsewhere. Run such a
        plan with ``optax.sgd(plan.theorem.learning_rate)``. It also has the theorem's
        bound, and the noise of the paper's formula, which is only reported.
    """

    smoothing_radius: float
    direction: DirectionLaw = "sphere"
    noise: Noise = "discrete"  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    output: Literal["last", "random"] = "last"
    theorem: theorems.Prescription | None = None

    replayable: ClassVar[bool] = True
    released: ClassVar[str] = "slopes"
    draws_directions: ClassVar[bool] = True
    nested: ClassVar[dict[str, Any]] = {
        "clip_tuning": ClipTuning,
        "theorem": functools.partial(theorems.Prescription.read, {}),
    }
    isotropic: ClassVar[bool]
    laws: ClassVar[tuple[str, ...]]
    noises: ClassVar[tuple[Noise, ...]] = ("discrete",)

    def __post_init__(self) -> None:
        if self.noise == "gaussian":
            object.__setattr__(self, "noise", "discrete")
        validate.non_negative(smoothing_radius=self.smoothing_radius)
        validate.one_of(self.laws, direction=self.direction)
        validate.one_of(self.noises, noise=self.noise)
        validate.one_of(("last", "random"), output=self.output)
        super().__post_init__()

    @classmethod
    def designed(cls, name: str, **constants: Any) -> Design:
        """Returns the plan's fields by a theorem, with full batches and without noise.

        Args:
          name: ``"3"``, ``"3'"`` or ``"F.4"`` for ``DPZero``; ``"1"``, ``"2"``, ``"F.2"``
            or ``"F.3"`` for ``DPGDZerothOrder``.
          **constants: of :func:`jaxdp.dpzero.theorems.prescribed`.
        """
        found = theorems.prescribed(name, family=cls.family, **constants)
        return Design(
            num_examples=constants["num_examples"],
            num_steps=found.num_steps,
            relation=constants["relation"],
            l2_clip_norm=found.l2_clip_norm,
            smoothing_radius=found.smoothing_radius,
            direction=constants.get("direction", "sphere"),
            output=found.output,
            theorem=found,
        )

    @classmethod
    def _of(cls, design: Design, *, epsilon: float, delta: float) -> Self:
        plan = cls(sampling=sampling.FullBatch(), **design)
        return plan.calibrate(epsilon=epsilon, delta=delta)

    def perturbation(self, dim: int) -> Perturbation:
        return Perturbation(self.smoothing_radius)

    @property
    def num_directions(self) -> int:
        """Number K of directions per step."""
        return 1

    @property
    def numbers_per_step(self) -> int:
        # The most that there can be, slopes and a count: one noise for candidates of a
        # search that differ in their number of directions.
        return MAX_ORTHONORMAL + 1

    @property
    def clip_tuning(self) -> ClipTuning | None:
        """Parameters of private clip tuning; None for a constant clip."""
        return None

    @property
    def grid_noise_scale(self) -> int:
        """Scale of the integer Laplace noise; 0 for Gaussians.

        Rounded up and one more: that unit makes up for what discrete noise is worse than
        the continuous one that is accounted (``accounting.full_batch_laplace``).
        """
        if self.noise != "laplace" or self.grid_bits is None or self._noise == 0:
            return 0
        over_clip = self._noise * self._sensitivity_over_clip
        return math.ceil(over_clip * 2**self.grid_bits / math.sqrt(2)) + 1

    @property
    def grid_noise_std(self) -> int:
        if self.noise == "laplace":
            return math.ceil(math.sqrt(2) * self.grid_noise_scale)
        return super().grid_noise_std

    @property
    def grid_count_std(self) -> int:
        """Standard deviation of the integer noise on the count of clip tuning."""
        if self.clip_tuning is None or self.grid_bits is None or self._noise == 0:
            return 0
        count = self.clip_tuning.count_noise_multiplier
        return math.ceil(count * self._sensitivity_over_clip * 2**self.grid_bits)

    @property
    def count_grid(self) -> Grid | None:
        """Grid of clip tuning's count; a record contributes a half for or against."""
        if self.clip_tuning is None:
            return None
        return Grid(0.5, self.grid_bits, self.normalizer, self.grid_count_std)

    @property
    def _sum_noise(self) -> float:
        if self.clip_tuning is None:
            return self._noise
        return self.clip_tuning.sum_noise_multiplier(self._noise)

    @property
    def _largest_noise(self) -> float:
        if self.clip_tuning is None or self._noise == 0:
            return self._noise
        return max(self._sum_noise, self.clip_tuning.count_noise_multiplier)

    def returned(self, state: Any, params: Any) -> Any:
        return transforms.dpzero_output(state, params)

    def describe(self) -> Description:
        return described(self)

    def replay(
        self, direction: jax.Array, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        return transforms.replay(self, direction, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPZero(SlopeSumPlan):
    r"""Private zeroth-order optimisation: K noised sums of slopes a step.

    Privacy: one record moves the K sums by at most ``sensitivity`` in L2, whatever the
    loss. The K numbers share one vector clip and cost what one number costs. Where
    batches are sampled and more than one number leaves a step (K >= 2, or clip tuning),
    the accountant's statement under replace-one and zero-out has been verified
    numerically for vectors and proved for one number only.

    With ``noise="laplace"`` the guarantee is pure: ``calibrate(epsilon=..., delta=0)``.
    The vector clip is then in L1 (so in L2 too), noise is exact discrete Laplace, and
    sampled batches are those of a ``TruncatedPoisson`` that never truncates, under
    zero-out and add-or-remove. It needs far more noise than a small delta would: for T
    sums over full batches 0.35 sqrt(T) times that of (2, 1e-5).

    Attributes:
      num_directions: K; at most 64.
      noise: ``"discrete"`` or ``"laplace"``: exact integers, drawn on the host.
      clip_tuning: None, or how the clip moves from ``l2_clip_norm``, with
        ``noise="discrete"`` only. ``noise_multiplier`` remains what a whole step is
        charged for; the sum's own is larger. ``sensitivity`` and ``noise_std`` are then
        those of the first step, and scale with the clip.

    References:
      Zhang et al., `DPZero <https://arxiv.org/abs/2310.09639>`_, 2024, Algorithm 2.
    """

    num_directions: int = 1  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    clip_tuning: ClipTuning | None = None  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    family: ClassVar[str] = "dpzero"
    isotropic: ClassVar[bool] = False
    laws: ClassVar[tuple[str, ...]] = (
        "sphere",
        "gaussian",
        "rademacher",
        "orthonormal",
    )
    noises: ClassVar[tuple[Noise, ...]] = ("discrete", "laplace")

    def __post_init__(self) -> None:
        validate.integer(num_directions=self.num_directions, at_most=MAX_ORTHONORMAL)
        if self.clip_tuning is not None:
            validate.instance(ClipTuning, clip_tuning=self.clip_tuning)
            if self.noise != "discrete" or math.isinf(self.l2_clip_norm):
                raise ValueError(
                    'clip_tuning must be None unless noise="discrete" and l2_clip_norm is '
                    f"finite, got noise={self.noise!r} and {self.l2_clip_norm!r}"
                )
        super().__post_init__()

    def transform(
        self, keys: Keys, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        return transforms.dpzero(self, keys, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPGDZerothOrder(SlopeSumPlan):
    """DPGD-0th, the paper's baseline: clipped vectors, noise in every coordinate.

    ``l2_clip_norm`` bounds one record's *vector*, slope times direction, whose norm is
    sqrt(d) slopes. Privacy needs no more than DPZero's noise: what is added across the
    direction only hurts.

    References:
      Zhang et al., `DPZero <https://arxiv.org/abs/2310.09639>`_, 2024, Algorithm 1.
    """

    family: ClassVar[str] = "dpgd_zeroth_order"
    isotropic: ClassVar[bool] = True
    # Those whose norm is sqrt(d) exactly, so that the bound on slopes is a constant.
    laws: ClassVar[tuple[str, ...]] = ("sphere", "rademacher")

    def transform(
        self, keys: Keys, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        return transforms.dpgd_zeroth_order(self, keys, **kwargs)
