"""The plans of DPZero and of DPGD-0th, whose steps release noised sums of slopes."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, Self

import jax
import numpy as np
import optax

from jaxdp import sampling
from jaxdp.core import run_state, validate
from jaxdp.core.keys import Keys
from jaxdp.core.types import PathPredicate, Relation, ValueFn
from jaxdp.dpzero import theorems
from jaxdp.dpzero import transform as transforms
from jaxdp.dpzero.transform import SlopeNumbers
from jaxdp.kernels import finite_difference
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.mechanism.clip_tuning import ClipTuning
from jaxdp.mechanism.design import Design, given
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.laws import LAWS, Noise
from jaxdp.mechanism.plan import Contributions
from jaxdp.mechanism.sum_plan import SumPlan, described
from jaxdp.mechanism.sums import Sums

#: Most slopes of a record in a step: the bits of a release are shared among them.
MAX_DIRECTIONS = 1024

DirectionLaw = Literal["sphere", "gaussian", "rademacher", "orthonormal"]


_read = functools.partial(theorems.Prescription.read, {})


class SlopePlan(SumPlan):
    """Plan of steps that release noised slopes, or sums of slopes times directions."""

    smoothing_radius: float
    direction: DirectionLaw
    output: Literal["last", "random"]
    theorem: theorems.Prescription | None
    num_directions: Any
    clip_tuning: Any

    #: Whether the clip is of vectors, slope times direction, and so is the noise.
    isotropic: ClassVar[bool] = False
    released: ClassVar[str] = "slopes"
    draws_directions: ClassVar[bool] = True
    shares_signs: ClassVar[bool] = True
    #: Laws of directions and of noise that there may be.
    laws: ClassVar[tuple[str, ...]]
    noises: ClassVar[tuple[Noise, ...]] = ("discrete",)
    nested: ClassVar[dict[str, Any]] = {"theorem": _read}
    #: Function that builds the transformation.
    made_by: ClassVar[Any]
    _replayed = staticmethod(transforms.replay)

    def __post_init__(self) -> None:
        if self.noise == "gaussian":  # The older name.
            object.__setattr__(self, "noise", "discrete")
        validate.non_negative(smoothing_radius=self.smoothing_radius)
        validate.one_of(self.laws, direction=self.direction)
        validate.one_of(self.noises, noise=self.noise)
        validate.one_of(("last", "random"), output=self.output)
        super().__post_init__()

    def _sums(self) -> Sums:
        tuning: ClipTuning | None = self.clip_tuning
        return Sums(
            **self._common(),
            l2_clip_norm=self.l2_clip_norm,
            law=LAWS[self.noise],
            # Slopes and a count: one noise for candidates of a search that differ in
            # their number of directions, up to 64.
            numbers=max(MAX_ORTHONORMAL, getattr(self, "num_directions", 1)) + 1,
            count_noise_multiplier=tuning and tuning.count_noise_multiplier,
        )

    @kept
    def numbers(self) -> SlopeNumbers:
        sums: Any = self.sums
        same = ("run", "clip_tuning", "smoothing_radius", "num_directions", "direction")
        same += ("isotropic", "noise_std", "output")
        return SlopeNumbers(
            grid=sums.grid(),
            count_grid=sums.count_grid,
            noise_scale=sums.noise_scale if sums.law.exact else None,
            **{name: getattr(self, name) for name in same},
        )

    def contributions(
        self,
        value_fn: ValueFn,
        params: Any,
        records: Any,
        key: Any,
        *,
        trainable: Any = None,
        stacked: Any = None,
    ) -> Contributions:
        """Computes the slopes of records in a run's first step, see ``Plan.contributions``.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> value_fn = lambda w, x: (x * w).sum(axis=-1)
          >>> found = plan.contributions(
          ...     value_fn, jnp.zeros(2), jnp.ones((4, 2)), jax.random.key(0)
          ... )
          >>> found.rows.shape, found.l2_clip_norm
          ((4, 1), 1.0)
        """
        moves = run_state.moving(params, trainable)
        rows = transforms.draw_directions(self.numbers, key, params, moves, stacked)
        slopes = finite_difference.slopes(
            value_fn, params, records, rows, smoothing_radius=self.smoothing_radius
        )
        length = math.sqrt(rows.dim) if self.isotropic else 1.0
        bound, std = self.l2_clip_norm / length, self.noise_std / length
        return Contributions(slopes, bound, std, self.num_directions)

    describe = described

    def returned(self, state: Any, params: Any) -> Any:
        return transforms.dpzero_output(state, params)

    @classmethod
    def _designed(cls, name: str, **constants: Any) -> Design:
        found = theorems.prescribed(name, family=cls.family, **constants)
        names = ("num_steps", "l2_clip_norm", "smoothing_radius", "output")
        return Design(
            num_examples=constants["num_examples"],
            relation=constants["relation"],
            direction=constants.get("direction", "sphere"),
            sampling=sampling.FullBatch(),
            theorem=found,
            **{name: found[name] for name in names},
        )

    @classmethod
    def _of(cls, design: Design, *, epsilon: float, delta: float) -> Self:
        return cls(**design).calibrate(epsilon=epsilon, delta=delta)

    def transform(
        self,
        keys: Keys,
        *,
        trainable: run_state.Trainable = None,
        stacked: PathPredicate | None = None,
        microbatch_size: int | None = None,
        axis_name: AxisName | None = None,
        noise_table: jax.Array | np.ndarray | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Builds :func:`jaxdp.dpzero`, or :func:`jaxdp.dpgd_zeroth_order`.

        Their arguments are the same.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> tx = plan.transform(jaxdp.Keys.insecure(0))
          >>> tx.init(jnp.zeros(2)).release.shape
          (1,)
        """
        return type(self).made_by(
            self,
            keys,
            trainable=trainable,
            stacked=stacked,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
            noise_table=noise_table,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPZero(SlopePlan):
    r"""Private zeroth-order optimisation: K noised sums of slopes a step.

    Privacy: one record moves the K sums by at most ``sensitivity`` in L2, whatever the
    loss. The K numbers share one vector clip and cost what one number costs.

    With ``noise="laplace"`` the guarantee is pure: ``calibrate(epsilon=..., delta=0)``.
    The vector clip is then in L1 (so in L2 too), noise is exact discrete Laplace, and
    sampled batches are those of a ``TruncatedPoisson`` that never truncates, under
    zero-out and add-or-remove. It needs far more noise than a small delta would: for T
    sums over full batches 0.35 sqrt(T) times that of (2, 1e-5).

    Attributes:
      smoothing_radius: :math:`\lambda` >= 0, in units of the parameters, times a vector of
        norm about sqrt(d); 0 takes exact directional derivatives, forward-mode.
      direction: law of the directions.
      noise: ``"discrete"``, discrete Gaussians, or ``"laplace"``: exact integers, drawn on
        the host. (``"gaussian"``, once float32 noise that leaked the parity of the sum, is
        taken to mean ``"discrete"``.)
      output: what a run returns: ``"last"``, the last iterate, or ``"random"``, the
        paper's iterate before a uniformly random step (free, but no cheaper either).
      theorem: what :meth:`from_theorem` took the numbers from; None elsewhere. Its
        ``learning_rate`` is the step size to run with.
      num_directions: K; at most 1024, or 64 of the law "orthonormal".
      clip_tuning: None, or how the clip moves from ``l2_clip_norm``, with
        ``noise="discrete"`` only. ``noise_multiplier`` remains what a whole step is
        charged for; the sum's own is larger. ``sensitivity`` and ``noise_std`` are then
        those of the first step, and scale with the clip.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=1437, num_steps=1000, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> float(round(plan.epsilon(), 2)), plan.sensitivity
      (2.0, 2.0)

    References:
      Zhang et al., `DPZero <https://arxiv.org/abs/2310.09639>`_, 2024, Algorithm 2.
    """

    smoothing_radius: float
    direction: DirectionLaw = "sphere"
    noise: Noise = "discrete"
    output: Literal["last", "random"] = "last"
    theorem: theorems.Prescription | None = None
    num_directions: int = 1
    clip_tuning: ClipTuning | None = None

    family: ClassVar[str] = "dpzero"
    made_by: ClassVar[Any] = transforms.dpzero
    laws: ClassVar[tuple[str, ...]] = (
        "sphere",
        "gaussian",
        "rademacher",
        "orthonormal",
    )
    noises: ClassVar[tuple[Noise, ...]] = ("discrete", "laplace")
    nested: ClassVar[dict[str, Any]] = {
        "clip_tuning": ClipTuning,
        "theorem": _read,
    }

    def __post_init__(self) -> None:
        most = MAX_ORTHONORMAL if self.direction == "orthonormal" else MAX_DIRECTIONS
        validate.integer(num_directions=self.num_directions, at_most=most)
        if self.clip_tuning is not None:
            validate.instance(ClipTuning, clip_tuning=self.clip_tuning)
            if self.noise != "discrete" or math.isinf(self.l2_clip_norm):
                raise ValueError(
                    'clip_tuning must be None unless noise="discrete" and l2_clip_norm is '
                    f"finite, got noise={self.noise!r} and {self.l2_clip_norm!r}"
                )
        super().__post_init__()

    @classmethod
    def from_theorem(
        cls,
        theorem: Literal["3", "3'", "F.4"] | theorems.Theorem,
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        smoothness: float,
        effective_rank: float | None = None,
        initial_gap: float | None = None,
        value_bound: float | None = None,
        pl_constant: float | None = None,
        direction: theorems.Law = "sphere",
        per_record_rank: bool = False,
    ) -> Self:
        r"""Returns the calibrated plan that a theorem prescribes, with exact noise.

        Batches are full. Run it with ``optax.sgd(plan.theorem.learning_rate)``.
        ``plan.theorem`` also has the theorem's bound, and the noise of the paper's
        formula, which is only reported.

        Args:
          theorem: ``"3"``, ``"3'"`` or ``"F.4"``.
          num_examples: n, records in the data set.
          dim: d, parameters that move.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours. The paper's theorems are about
            ``"replace_one"``; ``"3'"`` takes every relation.
          lipschitz: L, of every record's loss.
          smoothness: :math:`\ell`, Lipschitz constant of every record's gradient.
          effective_rank: r in [1, d]: some H with :math:`-H\preceq\nabla^2F\preceq H`
            everywhere has norm at most :math:`\ell` and trace at most r times its norm.
          initial_gap: F at the start less its minimum; only the bound needs it.
          value_bound: bound on abs(F) at every iterate; for ``"3"`` and ``"F.4"``.
          pl_constant: :math:`\mu_{PL} \le \ell`; for ``"F.4"``.
          direction: law of the directions; ``"gaussian"`` for ``"3'"`` only.
          per_record_rank: for ``"3'"``: whether every record's loss has the effective rank
            r, not only their mean.

        Raises:
          ValueError: a theorem of another algorithm, a constant that is missing or out of
            range, or a relation or direction that the theorem does not cover.
          TypeError: a constant that is no number, or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero.from_theorem(
          ...     "3'", num_examples=100_000, dim=20, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0, effective_rank=5.0,
          ... )
          >>> plan.num_steps, round(plan.theorem.learning_rate, 4)
          (99243, 0.0357)
        """
        return cls._from_theorem(**given(locals()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPGDZerothOrder(SlopePlan):
    """DPGD-0th, the paper's baseline: clipped vectors, noise in every coordinate.

    ``l2_clip_norm`` bounds one record's *vector*, slope times direction, whose norm is
    sqrt(d) slopes. Privacy needs no more than DPZero's noise: what is added across the
    direction only hurts.

    Attributes:
      smoothing_radius: as in :class:`DPZero`.
      direction: a law of vectors whose norm is sqrt(d) exactly, so that the bound on slopes
        is a constant.
      noise: ``"discrete"``.
      output: as in :class:`DPZero`.
      theorem: as in :class:`DPZero`.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPGDZerothOrder(
      ...     num_examples=1437, num_steps=1000, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> float(round(plan.epsilon(), 2)), plan.sensitivity
      (2.0, 2.0)

    References:
      Zhang et al., `DPZero <https://arxiv.org/abs/2310.09639>`_, 2024, Algorithm 1.
    """

    smoothing_radius: float
    direction: DirectionLaw = "sphere"
    noise: Noise = "discrete"
    output: Literal["last", "random"] = "last"
    theorem: theorems.Prescription | None = None

    family: ClassVar[str] = "dpgd_zeroth_order"
    made_by: ClassVar[Any] = transforms.dpgd_zeroth_order
    isotropic: ClassVar[bool] = True
    num_directions: ClassVar[int] = 1
    clip_tuning: ClassVar[ClipTuning | None] = None
    laws: ClassVar[tuple[str, ...]] = ("sphere", "rademacher")

    @classmethod
    def from_theorem(
        cls,
        theorem: Literal["1", "2", "F.2", "F.3"] | theorems.Theorem,
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        smoothness: float,
        effective_rank: float | None = None,
        initial_gap: float | None = None,
        value_bound: float | None = None,
        pl_constant: float | None = None,
        direction: theorems.Law = "sphere",
        per_record_rank: bool = False,
    ) -> Self:
        r"""Returns the calibrated plan that a theorem prescribes, with exact noise.

        Batches are full. Run it with ``optax.sgd(plan.theorem.learning_rate)``.
        ``plan.theorem`` also has the theorem's bound, and the noise of the paper's
        formula, which is only reported.

        Args:
          theorem: ``"1"``, ``"2"``, ``"F.2"`` or ``"F.3"``.
          num_examples: as in :meth:`DPZero.from_theorem`, like the next six.
          dim: d.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: ``"replace_one"``.
          lipschitz: L.
          smoothness: :math:`\ell`.
          effective_rank: r in [1, d]; for ``"2"`` and ``"F.3"``.
          initial_gap: F at the start less its minimum; only the bound needs it.
          value_bound: checked, and not used.
          pl_constant: :math:`\mu_{PL} \le \ell`; for ``"F.2"`` and ``"F.3"``.
          direction: ``"sphere"`` or ``"rademacher"``.
          per_record_rank: checked, and not used.

        Raises:
          ValueError: a theorem of another algorithm, a constant that is missing or out of
            range, or a relation or direction that the theorem does not cover.
          TypeError: a constant that is no number, or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPGDZerothOrder.from_theorem(
          ...     "2", num_examples=100_000, dim=20, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0, effective_rank=5.0,
          ... )
          >>> plan.num_steps, plan.l2_clip_norm
          (8218, 20.0)
        """
        return cls._from_theorem(**given(locals()))
