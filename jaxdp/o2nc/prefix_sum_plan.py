"""The plan of private prefix sums of bounded updates."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import optax

from jaxdp import accounting, sampling
from jaxdp.core import validate
from jaxdp.core.keys import Keys
from jaxdp.mechanism.correlated_plan import CorrelatedPlan
from jaxdp.o2nc.prefix_sum import private_prefix_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixSum(CorrelatedPlan):
    """Plan of means of clipped per-record updates, whose noise adds up to little.

    One pass over the data costs what one Gaussian release costs; P passes cost P of them,
    for noise restarts with each. No amplification is claimed.

    Attributes:
      sampling: ``SinglePass`` or ``ShuffledEpochs``, of which every epoch is a pass.
      period: steps from one restart of the noise to the next; None is a whole pass.
    """

    period: int | None = None

    family: ClassVar[str] = "prefix_sum"
    released: ClassVar[str] = "prefix sums"
    takes_updates: ClassVar[bool] = True
    samplers: ClassVar[tuple[type, ...]] = (
        sampling.SinglePass,
        sampling.ShuffledEpochs,
    )

    def __post_init__(self) -> None:
        validate.instance(self.samplers, sampling=self.sampling)
        if self.period is not None:
            validate.integer(period=self.period)
        super().__post_init__()

    @property
    def steps_per_pass(self) -> int:
        if isinstance(self.sampling, sampling.SinglePass):
            return self.num_steps
        return self.num_examples // self.sampling.rows(self.num_examples)

    @property
    def noise_period(self) -> int:
        most = min(self.steps_per_pass, self.num_steps)
        return most if self.period is None else min(self.period, most)

    @property
    def clips(self) -> dict[str, tuple[float, float]]:
        return {"step": (self.l2_clip_norm, self.sampling.rows(self.num_examples))}

    @property
    def leaf_sensitivities(self) -> np.ndarray:
        bound, rows = self.clips["step"]
        move = accounting.sensitivity(self.relation, bound) / rows
        return np.full(self.noise_period, move)

    def transform(
        self, keys: Keys, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the transformation of incoming per-record updates; it takes no options.

        Raises:
          ValueError: options, which ``jaxdp.fit`` gives: there is nothing to fit.
        """
        if kwargs:
            raise ValueError(
                "plan must be one whose transformation reads losses, got PrefixSum, which "
                "noises updates that are made elsewhere: put jaxdp.private_prefix_sum "
                "into a chain"
            )
        return private_prefix_sum(self, keys)
