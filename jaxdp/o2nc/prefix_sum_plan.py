"""The plan of private prefix sums of bounded updates."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import optax

from jaxdp import sampling
from jaxdp.core import validate
from jaxdp.core.correlated_noise import CorrelatedNumbers
from jaxdp.core.keys import Keys
from jaxdp.kernels import prefix_noise
from jaxdp.mechanism import blt
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description
from jaxdp.mechanism.sum_plan import SumPlan, noise_on_each
from jaxdp.mechanism.sums import CorrelatedSums
from jaxdp.o2nc.prefix_sum import private_prefix_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixSum(SumPlan):
    """Plan of means of clipped per-record updates, whose noise adds up to little.

    One pass over the data costs what one Gaussian release costs. P passes of
    ``ShuffledEpochs`` cost P of them, for noise restarts with each. Those of
    ``CyclicEpochs`` are one release, whose noise is correlated over the whole run; it has
    less noise in all sums. No amplification is claimed.

    Attributes:
      sampling: ``SinglePass``, ``ShuffledEpochs`` or ``CyclicEpochs``.
      prefix_noise: the name of the noise's matrix C, one of
        ``jaxdp.kernels.prefix_noise.NAMES``; with ``CyclicEpochs`` of its ``REPEATABLE``.
      blt_numbers: of a buffered Toeplitz C, in place of those that ship for the name; see
        :meth:`with_optimised_noise`.
      period: steps from one restart of the noise to the next; None is a whole pass, and
        with ``CyclicEpochs`` the whole run.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.PrefixSum(
      ...     num_examples=1437, num_steps=22, sampling=jaxdp.sampling.SinglePass(64),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> plan.num_passes, plan.noise_period, plan.prefix_noise
      (1, 22, 'blt_3')
    """

    prefix_noise: str = "blt_3"
    blt_numbers: blt.BLTNumbers | None = None
    period: int | None = None

    family: ClassVar[str] = "prefix_sum"
    released: ClassVar[str] = "prefix sums"
    takes_updates: ClassVar[bool] = True
    samplers: ClassVar[tuple[type, ...]] = (
        sampling.SinglePass,
        sampling.ShuffledEpochs,
        sampling.CyclicEpochs,
    )
    nested: ClassVar[dict[str, Any]] = {"blt_numbers": blt.BLTNumbers}

    def __post_init__(self) -> None:
        validate.instance(self.samplers, sampling=self.sampling)
        if self.period is not None:
            validate.integer(period=self.period)
        blt.check_names(self.prefix_noise, self.blt_numbers)
        if self._cyclic:
            validate.one_of(prefix_noise.REPEATABLE, prefix_noise=self.prefix_noise)
            if self.period is not None:
                raise ValueError(
                    "period must be None with sampling.CyclicEpochs, whose noise is "
                    f"correlated over the whole run, got {self.period}"
                )
        super().__post_init__()

    @property
    def _cyclic(self) -> bool:
        return isinstance(self.sampling, sampling.CyclicEpochs)

    @property
    def steps_per_pass(self) -> int:
        """Number of steps of one pass over the data."""
        if self.num_passes == 1:
            return self.num_steps
        return self.num_examples // self.sampling.rows(self.num_examples)

    @property
    def num_passes(self) -> int:
        """Largest number of steps that can read one record."""
        return self.sampling.max_participations(self.num_examples, self.num_steps)

    def _sums(self) -> CorrelatedSums:
        most = min(self._restart, self.num_steps)
        period = most if self.period is None else min(self.period, most)
        rows = self.sampling.rows(self.num_examples)
        return CorrelatedSums(
            **self._common(),
            clips={"step": (self.l2_clip_norm, rows)},
            phases=self.phases,
            correlation=blt.kernel(self.prefix_noise, self.blt_numbers, period),
            separation=self.steps_per_pass if self._cyclic else None,
        )

    @property
    def _restart(self) -> int:
        """Number of steps after which the noise restarts at the latest."""
        return self.num_steps if self._cyclic else self.steps_per_pass

    def returned(self, state: Any, params: Any) -> Any:
        return params

    @kept
    def numbers(self) -> CorrelatedNumbers:
        return self._correlated(self._restart)

    with_optimised_noise = blt.with_optimised_noise

    def describe(self) -> Description:
        rows = self.sampling.rows(self.num_examples)
        noise = noise_on_each(self, f"means of {rows} records")
        noise += f", correlated over {self.noise_period} steps ({self.prefix_noise})"
        stds = self.node_std * self.correlation.increment_norms()
        stds = np.resize(stds, self.num_steps)  # Repeats it.
        return Description(noise, "mean of updates", stds)

    def transform(self, keys: Keys) -> optax.GradientTransformationExtraArgs:
        """Builds :func:`jaxdp.private_prefix_sum`, for per-record updates from elsewhere.

        ``jaxdp.fit`` cannot run it: there are no losses to read.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.PrefixSum(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.SinglePass(2),
          ...     relation="replace_one", l2_clip_norm=1.0,
          ... ).with_noise(noise_multiplier=2.0)
          >>> tx = plan.transform(jaxdp.Keys.insecure(0))
          >>> tx.init(jnp.zeros(2)).total.shape
          (2,)
        """
        return private_prefix_sum(self, keys)
