"""What plans share whose noise is correlated: one mechanism a period, one event."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxdp import _validate
from jaxdp._types import Grid
from jaxdp.kernels import clip
from jaxdp.kernels import prefix_noise as noises
from jaxdp.plans._base import SumPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedPlan(SumPlan):
    r"""Each step releases a bounded mean plus noise that is correlated over a period.

    The means of a period are :math:`d_1, \dots, d_T`, and :math:`d_t + (C^{-1}\xi)_t` is
    released, with :math:`\xi` independent normals of standard deviation :math:`\sigma` and
    a lower triangular C. That is post-processing of :math:`Cd + \xi`, one Gaussian
    mechanism however the means depend on what was released before. If one record moves
    :math:`d_i` by at most :math:`s_i`, and no other mean of the period, its sensitivity is
    :math:`\max_i s_i\|Ce_i\|`.

    Attributes:
      prefix_noise: the name of C, one of ``jaxdp.kernels.prefix_noise.NAMES``.

    References:
      Denisov et al., `Improved Differential Privacy for SGD via Optimal Private Linear
      Operators on Adaptive Streams <https://arxiv.org/abs/2202.08312>`_, 2022, Theorem 2.1.
    """

    prefix_noise: str = "blt_3"

    def __post_init__(self) -> None:
        _validate.one_of(noises.NAMES, prefix_noise=self.prefix_noise)
        super().__post_init__()

    @property
    def steps_per_pass(self) -> int:
        """After so many steps a record may be read again, and noise restarts."""
        return self.num_steps

    @property
    def num_passes(self) -> int:
        """In how many periods one record can be."""
        return self.sampling.max_participations(self.num_examples, self.num_steps)

    @property
    def noise_period(self) -> int:
        """Steps from one restart of the noise to the next."""
        raise NotImplementedError

    @property
    def clips(self) -> dict[str, tuple[float, int]]:
        """Of each phase: bound on one record's vector, and records of a batch."""
        raise NotImplementedError

    @property
    def correlation(self) -> noises.PrefixNoise:
        """The noise of a period: the kernel, which knows C."""
        return noises.make(self.prefix_noise, self.noise_period)

    @property
    def leaf_sensitivities(self) -> np.ndarray:
        """s, float64 (period,): how far one record moves the mean of each step."""
        raise NotImplementedError

    @property
    def sensitivity(self) -> float:
        """How far one record moves the sequence Cd of the released means, in L2."""
        return noises.sensitivity(self.correlation, self.leaf_sensitivities)

    @property
    def normalizer(self) -> float:
        """One: what is released, bounded and noised are means."""
        return 1.0

    @property
    def node_std(self) -> float:
        """sigma: standard deviation of one coordinate of one node's noise."""
        noise = self._noise
        return noise * self.sensitivity if noise else 0.0

    @property
    def noise_std(self) -> float:
        """Standard deviation of a coordinate's noise in the running sum: its worst step."""
        return self.node_std * float(self.correlation.prefix_norms().max())

    def grid(self, phase: str) -> Grid:
        """How the sums of a phase are bounded, noised and averaged."""
        bound, rows = self.clips[phase]
        if math.isinf(bound):  # The non-private limit.
            return Grid(bound, None, rows, 0.0)
        in_clips = self.node_std * rows / bound
        most = in_clips * float(self.correlation.increment_norms().max())
        bits = clip.grid_bits(rows, most, exact_noise=False)
        # A little more, for what float32 rounds in the noise and in this number.
        return Grid(bound, bits, rows, in_clips * 2**bits * (1 + 1e-6))

    @property
    def grid_bits(self) -> int | None:
        """The coarsest phase's; None without a clip."""
        bits = [self.grid(phase).bits for phase in self.clips]
        return None if None in bits else min(b for b in bits if b is not None)

    @property
    def grid_noise_std(self) -> int:
        """Standard deviation of a node's noise in grid units, rounded up."""
        return math.ceil(max(self.grid(phase).noise_scale for phase in self.clips))

    def rows(self) -> list[tuple[str, str]]:
        out = super().rows()
        if self.noise_multiplier is not None:
            at = [name for name, _ in out].index("noise_std")
            out.insert(at, ("node_std", f"{self.node_std:.6g}"))
        return out


def check_clip(name: str, value: Any) -> None:
    """What ``l2_clip_norm`` may be, for another bound."""
    _validate.positive(allow_inf=True, **{name: value})
    if not (1e-30 <= value <= 1e30 or math.isinf(value)):
        raise ValueError(
            f"{name} must be in [1e-30, 1e30], or infinity without noise, got {value!r}"
        )
