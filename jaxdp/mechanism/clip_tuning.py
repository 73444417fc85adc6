"""Private clip tuning: its parameters, and how a released count moves the clip."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipTuning:
    r"""A clip that follows a quantile of the norms, for a share of a step's budget.

    Besides the sum of slopes or gradients a step releases how many of its records lie
    within the clip, each counted as a half for or against, with noise of its own. The next
    clip is

    .. math::
      \log C_{t+1} = \log C_t - \eta\Big(\frac{\tilde b_t}{\bar B} + \frac12 - \gamma\Big),
      \qquad \tilde b_t = \sum_i \big(\mathbf 1\{\|s_{t,i}\| \le C_t\} - \tfrac12\big) + Z_t

    where :math:`s_{t,i}` is a record's vector of slopes, or its gradient. It reads
    releases alone: the clip is public. Masked rows and rows that are not
    finite count nothing: a record that is zeroed out is a masked row, not one whose loss
    is constant, which would count a half for.

    Attributes:
      target_unclipped_quantile: :math:`\gamma` in (0, 1), the share of records that are
        not to be clipped.
      learning_rate: :math:`\eta` in (0, 100], per step; of ``O2NC`` per restart.
      count_noise_multiplier: standard deviation of the noise on the count over how far one
        record moves it (1 where a record is replaced, a half otherwise). It must exceed
        the plan's ``noise_multiplier``, which is that of the pair; of ``O2NC`` in several
        passes, of all sums and all counts of a run.

    Example:
      >>> import jaxdp
      >>> tuning = jaxdp.plans.ClipTuning(
      ...     target_unclipped_quantile=0.9, learning_rate=0.2, count_noise_multiplier=20.0
      ... )
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=1437, num_steps=300, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ...     clip_tuning=tuning,
      ... ).with_noise(noise_multiplier=10.0, delta=1e-5)
      >>> plan.clip_tuning.target_unclipped_quantile
      0.9
    """

    target_unclipped_quantile: float
    learning_rate: float
    count_noise_multiplier: float

    def __post_init__(self) -> None:
        target = self.target_unclipped_quantile
        validate.probability(target_unclipped_quantile=target)
        validate.positive(
            learning_rate=self.learning_rate,
            count_noise_multiplier=self.count_noise_multiplier,
        )
        if self.learning_rate > 100:  # A step by e**50 is beyond every clip.
            raise ValueError(
                f"learning_rate must be a number in (0, 100], got {self.learning_rate!r}"
            )
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, float(getattr(self, field.name)))


def next_clip(tuning: ClipTuning, bound: jax.Array, count: jax.Array) -> jax.Array:
    """Computes the clip after a step: float32, shape=().

    ``count`` is the released one over the normalizer: a half if no record was clipped.
    """
    excess = count + np.float32(0.5 - tuning.target_unclipped_quantile)
    factor = jnp.exp(excess * np.float32(-tuning.learning_rate))
    # By itself, so that a run and its replay round alike.
    factor = jax.lax.optimization_barrier(factor)
    # The range of l2_clip_norm.
    return jnp.clip(bound * factor, np.float32(1e-30), np.float32(1e30))
