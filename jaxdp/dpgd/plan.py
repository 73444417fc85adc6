"""The plan of DP-GD, the first-order baseline."""

import dataclasses
import math
from typing import Any, ClassVar

import optax

from jaxdp.core import run_state, validate
from jaxdp.core.keys import Keys
from jaxdp.core.types import ValueFn
from jaxdp.dpgd import oracle
from jaxdp.dpgd.transform import GradientNumbers, dpgd, moving_part
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.mechanism.clip_tuning import ClipTuning
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Contributions
from jaxdp.mechanism.sum_plan import SumPlan, described
from jaxdp.mechanism.sums import Sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPGD(SumPlan):
    """Plan of DP-GD: steps release a sum of clipped per-record gradients, d numbers.

    It needs backpropagation. Noise is discrete Gaussian.

    Attributes:
      clip_tuning: None, or how the clip moves from ``l2_clip_norm``, as in
        :class:`DPZero`; other attributes are those of every plan of sums.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPGD(
      ...     num_examples=1437, num_steps=300, relation="add_or_remove", l2_clip_norm=1.0,
      ...     sampling=jaxdp.sampling.TruncatedPoisson(sampling_prob=0.1),
      ... ).with_noise(noise_multiplier=5.0, delta=1e-5)
      >>> plan.sensitivity, round(plan.normalizer, 1)
      (1.0, 143.7)
    """

    family: ClassVar[str] = "dpgd"
    released: ClassVar[str] = "gradients"
    sums_vectors: ClassVar[bool] = True
    nested: ClassVar[dict[str, Any]] = {"clip_tuning": ClipTuning}

    # Texts of plans without one do not name it: their digests stay those of before.
    clip_tuning: ClipTuning | None = dataclasses.field(
        default=None, metadata={"omit_none": True}
    )

    def __post_init__(self) -> None:
        if self.clip_tuning is not None:
            validate.instance(ClipTuning, clip_tuning=self.clip_tuning)
            if math.isinf(self.l2_clip_norm):
                raise ValueError(
                    "clip_tuning must be None without a finite l2_clip_norm"
                )
        super().__post_init__()

    def _sums(self) -> Sums:
        tuning = self.clip_tuning
        return Sums(
            **self._common(),
            l2_clip_norm=self.l2_clip_norm,
            count_noise_multiplier=tuning and tuning.count_noise_multiplier,
        )

    def returned(self, state: Any, params: Any) -> Any:
        return params

    @kept
    def numbers(self) -> GradientNumbers:
        sums = self.sums
        return GradientNumbers(self.run, sums.grid(), sums.count_grid, self.clip_tuning)

    def transform(
        self,
        keys: Keys,
        *,
        trainable: run_state.Trainable = None,
        microbatch_size: int | None = None,
        axis_name: AxisName | None = None,
        shardings: Any = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Builds :func:`jaxdp.dpgd`, which has the same arguments.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPGD(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0,
          ... ).with_noise(noise_multiplier=2.0)
          >>> tx = plan.transform(jaxdp.Keys.insecure(0))
          >>> tx.init(jnp.zeros(2)).release.shape
          (1,)
        """
        return dpgd(
            self,
            keys,
            trainable=trainable,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
            shardings=shardings,
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
        del key, stacked
        moves = run_state.moving(params, trainable)
        part, losses = moving_part(value_fn, params, moves)
        rows = oracle.gradients(losses, part, records)
        return Contributions(rows, self.l2_clip_norm, self.noise_std)

    describe = described
