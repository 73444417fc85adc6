"""The plan of private online-to-non-convex conversion."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Self

import numpy as np
import optax

from jaxdp import _validate, accounting
from jaxdp._types import Phase, Relation
from jaxdp.kernels import smoothed_gradient
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.keys import Keys
from jaxdp.plans._base import check_clip
from jaxdp.plans._correlated import CorrelatedPlan
from jaxdp.plans.o2nc import bounds, design, theorems
from jaxdp.sampling import SinglePassRestarts
from jaxdp.transforms import o2nc as driver
from jaxdp.transforms.private_oracle import private_oracle


@dataclasses.dataclass(frozen=True, kw_only=True)
class O2NC(CorrelatedPlan):
    r"""One pass over the data to a Goldstein-stationary point of a nonsmooth loss.

    An oracle releases how a smoothed gradient changes from query to query and restarts
    every ``sampling.period`` steps; online-to-non-convex conversion turns its gradients
    into the next queries, in windows of ``window`` steps. The two lengths are independent.

    Every record is read in one step: all releases together are one Gaussian mechanism,
    whatever the losses are. Lipschitz constants choose the clips; nothing rests on them.

    Attributes:
      num_steps: T, queries (releases) in all.
      sampling: a ``sampling.SinglePassRestarts``: the restart period, and the records of
        its first and of its other steps.
      restart_l2_clip_norm: :math:`C_1`, bound on one record's estimate where a period
        begins (a gradient).
      l2_clip_norm: :math:`C_2`, bound on one record's estimate elsewhere (the change of a
        gradient over a move of up to ``2 max_step``).
      smoothing_radius: :math:`\delta > 0` (:math:`\alpha`), how far a perturbation moves a
        point; what is estimated is the gradient of the mean loss over such a ball.
      max_step: D, the longest increment.
      window: M, steps of a window; its mean query is a candidate for the output.
      num_directions: m, for each record, or shared.
      direction: ``"orthonormal"`` (m <= min(d, 64)) or ``"sphere"``, independent ones.
      difference: how the change is estimated: ``"antithetic"`` (four evaluations a
        direction; nothing on linear losses), ``"one_sided"`` (two; Zhang et al.) or
        ``"independent"`` (four; Kornowski et al.).
      share_directions: one set of directions for a whole batch: fewer perturbed models,
        more variance.
      learning_rate: :math:`\eta` of the online learner; None adapts it.
      reset: whether the learner starts from zero in each window.
      skip_last_query: whether a window's last query is not asked: with ``reset`` nothing
        depends on its gradient.
      theorem: where :meth:`from_theorem` or :meth:`certified` chose the numbers: what they
        promise. None elsewhere, and where a number was changed since.

    References:
      Zhang, Tran, Cutkosky, `Private Zeroth-Order Nonsmooth Nonconvex Optimization
      <https://arxiv.org/abs/2406.19579>`_, 2024; Kornowski, Liu, Talwar, `Improved Sample
      Complexity for Private Nonsmooth Nonconvex Optimization
      <https://arxiv.org/abs/2410.05880>`_, 2025.
    """

    sampling: SinglePassRestarts  # pyright: ignore[reportIncompatibleVariableOverride]
    restart_l2_clip_norm: float
    smoothing_radius: float
    max_step: float
    window: int
    num_directions: int = 1
    direction: bounds.Direction = "orthonormal"
    difference: bounds.Difference = "antithetic"
    share_directions: bool = False
    learning_rate: float | None = None
    reset: bool = True
    skip_last_query: bool = False
    theorem: theorems.Settings | None = None

    family: ClassVar[str] = "o2nc"
    draws_directions: ClassVar[bool] = True
    makes_steps: ClassVar[bool] = True
    samplers: ClassVar[tuple[type, ...]] = (SinglePassRestarts,)
    nested: ClassVar[dict[str, Any]] = {
        **CorrelatedPlan.nested,
        "theorem": theorems.read,
    }

    def __post_init__(self) -> None:
        _validate.instance(self.samplers, sampling=self.sampling)
        check_clip("restart_l2_clip_norm", self.restart_l2_clip_norm)
        check_clip("l2_clip_norm", self.l2_clip_norm)
        if math.isinf(self.restart_l2_clip_norm) != math.isinf(self.l2_clip_norm):
            raise ValueError(
                "restart_l2_clip_norm must be finite if and only if l2_clip_norm is, got "
                f"{self.restart_l2_clip_norm!r} and {self.l2_clip_norm!r}"
            )
        _validate.positive(
            smoothing_radius=self.smoothing_radius, max_step=self.max_step
        )
        _validate.one_of(bounds.DIRECTIONS, direction=self.direction)
        most = MAX_ORTHONORMAL if self.direction == "orthonormal" else None
        _validate.integer(num_directions=self.num_directions, at_most=most)
        _validate.one_of(smoothed_gradient.KINDS, difference=self.difference)
        for name in ("share_directions", "reset", "skip_last_query"):
            _validate.instance(bool, **{name: getattr(self, name)})
        if self.learning_rate is not None:
            _validate.positive(learning_rate=self.learning_rate)
        # A learner that is reset after every step never moves.
        _validate.integer(window=self.window, at_least=2 if self.reset else 1)
        if self.skip_last_query and not self.reset:
            raise ValueError(
                "skip_last_query must be False where reset is False, got True: the next "
                "window's first increment depends on that query"
            )
        super().__post_init__()
        if self.theorem is not None and not self._keeps(self.theorem):
            object.__setattr__(self, "theorem", None)

    def _keeps(self, found: theorems.Settings) -> bool:
        """Whether what was promised is about these numbers, and no more noise."""
        ours = {field.name for field in dataclasses.fields(self)}
        same = all(getattr(self, k) == v for k, v in vars(found).items() if k in ours)
        sampler = dataclasses.asdict(self.sampling)
        same = same and all(getattr(found, k) == v for k, v in sampler.items())
        if not same or self.noise_multiplier is None:
            return same
        energy = found.dim * self.noise_std**2
        return energy <= found.promise.noise_variance * (1 + 1e-6)

    @classmethod
    def from_theorem(
        cls,
        theorem: str,
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        initial_gap: float,
        smoothing_radius: float,
        num_directions: int | None = None,
    ) -> Self:
        """The plan that a theorem prescribes, corrected, with exactly calibrated noise.

        For study and comparison; :meth:`certified` is better in every respect.
        ``plan.theorem`` has the bound that is proven for these numbers, the noise of the
        paper's formula and its number of directions, which are only reported.

        Args:
          theorem: ``"4.9"`` (Zhang, Tran, Cutkosky) or ``"3.1"`` (Kornowski, Liu, Talwar).
          num_examples: n >= 4.
          dim: d, parameters that move.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours; the papers' is ``"replace_one"``.
          lipschitz: L, of every record's loss.
          initial_gap: expected loss at the start above its infimum.
          smoothing_radius: what is proven is about Goldstein's subdifferential at twice
            this radius.
          num_directions: m; None takes d.

        Raises:
          ValueError, TypeError: as :func:`jaxdp.plans.o2nc.theorems.settings`.
        """
        found = theorems.settings(
            theorem,
            num_examples=num_examples,
            dim=dim,
            epsilon=epsilon,
            delta=delta,
            relation=relation,
            lipschitz=lipschitz,
            initial_gap=initial_gap,
            radius=smoothing_radius,
            num_directions=num_directions,
        )
        return cls._of(found).calibrate(epsilon=epsilon, delta=delta)

    @classmethod
    def certified(
        cls,
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        initial_gap: float,
        smoothing_radius: float,
        **choices: Any,
    ) -> Self:
        """The plan of least proven bound: period, batches, window and step chosen.

        ``plan.theorem.promise`` says what is proven. Privacy rests on none of the
        constants.

        Args:
          num_examples: n >= 4.
          dim: d, parameters that move.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L, of every record's loss.
          initial_gap: expected loss at the start above its infimum.
          smoothing_radius: what is proven is about Goldstein's subdifferential at twice
            this radius.
          **choices: ``num_directions``, ``direction``, ``difference``,
            ``share_directions``, ``prefix_noise``, which the search leaves as they are.

        Raises:
          ValueError, TypeError: as :func:`jaxdp.plans.o2nc.design.certified`.
        """
        found = design.certified(
            num_examples=num_examples,
            dim=dim,
            epsilon=epsilon,
            delta=delta,
            relation=relation,
            lipschitz=lipschitz,
            initial_gap=initial_gap,
            radius=smoothing_radius,
            **choices,
        )
        return cls._of(found).calibrate(epsilon=epsilon, delta=delta)

    @classmethod
    def _of(cls, found: theorems.Settings) -> Self:
        """A plan without noise, with the numbers of some settings."""
        sampler = SinglePassRestarts(
            period=found.period,
            restart_batch_size=found.restart_batch_size,
            batch_size=found.batch_size,
        )
        ours = {field.name for field in dataclasses.fields(cls)}
        same = {k: v for k, v in vars(found).items() if k in ours}
        return cls(sampling=sampler, theorem=found, **same)

    @property
    def noise_period(self) -> int:
        return self.sampling.period

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.sampling.phases

    @property
    def clips(self) -> dict[str, tuple[float, int]]:
        bounds = {
            "restart": self.restart_l2_clip_norm,
            "difference": self.l2_clip_norm,
        }
        return {p.name: (bounds[p.name], p.batch_size) for p in self.phases}

    @functools.cached_property
    def leaf_sensitivities(self) -> np.ndarray:
        moves = {
            name: accounting.sensitivity(self.relation, bound) / rows
            for name, (bound, rows) in self.clips.items()
        }
        steps = [np.full(p.num_steps, moves[p.name]) for p in self.phases]
        leaves = np.concatenate(steps)
        leaves.flags.writeable = False  # It is kept: nobody else may change it.
        return leaves

    @property
    def goldstein_radius(self) -> float:
        """How far from the output the gradients lie that its window is made of.

        The farthest a query can be from its window's mean, and the smoothing radius.
        """
        reach = bounds.window_radius(self.window, self.reset) * self.max_step
        return float(reach) + self.smoothing_radius

    def rows(self) -> list[tuple[str, str]]:
        return [*super().rows(), ("goldstein_radius", f"{self.goldstein_radius:.6g}")]

    @property
    def num_windows(self) -> int:
        """Complete windows, each as likely to be returned."""
        return self.num_steps // (self.window - self.skip_last_query)

    def transform(
        self, keys: Keys, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        """The oracle and the conversion: what ``optax.chain`` of the two does."""
        oracle = private_oracle(self, keys, **kwargs)
        return driver.conversion(oracle, driver.o2nc(self, keys))

    def returned(self, state: Any, params: Any) -> Any:
        return driver.o2nc_output(state, params)
