"""What plans share whose noise is correlated: one mechanism a period, one event."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdp import _validate
from jaxdp._types import Grid
from jaxdp.kernels import clip, toeplitz_noise
from jaxdp.kernels import prefix_noise as noises
from jaxdp.plans import _blt
from jaxdp.plans._base import SumPlan


@dataclasses.dataclass(frozen=True)
class BLTNumbers:
    """The numbers of a buffered Toeplitz kernel.

    Attributes:
      buf_decay: in [0, 1], one for each buffer.
      output_scale: at least 0, one for each buffer.
    """

    buf_decay: tuple[float, ...]
    output_scale: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # JSON has lists.
            object.__setattr__(self, field.name, tuple(getattr(self, field.name)))


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
      blt_numbers: of a buffered Toeplitz C, in place of those that ship for the name; see
        :meth:`with_optimised_noise`.

    References:
      Denisov et al., `Improved Differential Privacy for SGD via Optimal Private Linear
      Operators on Adaptive Streams <https://arxiv.org/abs/2202.08312>`_, 2022, Theorem 2.1.
    """

    prefix_noise: str = "blt_3"
    blt_numbers: BLTNumbers | None = None

    nested: ClassVar[dict[str, Any]] = {"blt_numbers": BLTNumbers}

    def __post_init__(self) -> None:
        _validate.one_of(noises.NAMES, prefix_noise=self.prefix_noise)
        if self.blt_numbers is not None:
            _validate.instance(BLTNumbers, blt_numbers=self.blt_numbers)
            buffers = len(self.blt_numbers.buf_decay)
            if self.prefix_noise != f"blt_{buffers}":
                raise ValueError(
                    f"blt_numbers must have as many buffers as prefix_noise = "
                    f"{self.prefix_noise!r} says, got {buffers}"
                )
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
    def clips(self) -> dict[str, tuple[float, float]]:
        """Of each phase: bound on one record's vector, and what sums are divided by."""
        raise NotImplementedError

    @property
    def correlation(self) -> noises.PrefixNoise:
        """The noise of a period: the kernel, which knows C."""
        if self.blt_numbers is not None:
            numbers = dataclasses.asdict(self.blt_numbers)
            return toeplitz_noise.Buffered(self.noise_period, **numbers)
        return noises.make(self.prefix_noise, self.noise_period)

    def with_optimised_noise(self, num_buffers: int = 3) -> Self:
        """The same plan with a buffered Toeplitz C that is optimised for its period.

        By ``jax_privacy`` (the extra ``mf``), in up to half a minute the first time. The
        guarantee stays: the noise follows from C.

        Args:
          num_buffers: 1, 2 or 3.

        Raises:
          ImportError: ``jax_privacy`` is not installed.
        """
        _validate.integer(num_buffers=num_buffers, at_most=3)
        found = _blt.optimise_blt(self.noise_period, num_buffers)
        numbers = BLTNumbers(found.buf_decay, found.output_scale)
        name = f"blt_{num_buffers}"
        return dataclasses.replace(self, prefix_noise=name, blt_numbers=numbers)

    @property
    def leaf_sensitivities(self) -> np.ndarray:
        """s, float64 (period,): how far one record moves the mean of each step."""
        raise NotImplementedError

    @functools.cached_property
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
        return self.node_std * _longest(self.correlation).prefix

    def step_std(self, phase: str) -> float:
        """Standard deviation of a coordinate of a node's noise in a phase's steps."""
        return self.node_std

    def rows_of(self, phase: str) -> int:
        """The most records that a step of a phase reads."""
        return next(each.batch_size for each in self.phases if each.name == phase)

    def grid(self, phase: str) -> Grid:
        """How the sums of a phase are bounded, noised and averaged."""
        bound, size = self.clips[phase]
        if math.isinf(bound):  # The non-private limit.
            return Grid(bound, None, size, 0.0)
        rows, in_clips = self.rows_of(phase), self.step_std(phase) * size / bound
        most = in_clips * _longest(self.correlation).increment
        try:
            bits = clip.grid_bits(rows, most, exact_noise=False)
        except ValueError as error:
            raise ValueError(
                f"noise_multiplier must be such that the noise on the sum of a {phase!r} "
                f"step of {rows} records is at most 4096 of its clips {bound:.4g}, got "
                f"{self.noise_multiplier:.4g}, which makes {most:.4g}: ask for a larger "
                "epsilon, or bring the clips over their batch sizes closer together"
            ) from error
        # A little more, for what float32 rounds in the noise and in this number.
        return Grid(bound, bits, size, in_clips * 2**bits * (1 + 5e-6))

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


class _Longest(NamedTuple):
    """Of the rows of B and of the inverse of C."""

    prefix: float
    increment: float


@functools.lru_cache(maxsize=64)
def _longest(kernel: noises.PrefixNoise) -> _Longest:
    return _Longest(
        float(kernel.prefix_norms().max()), float(kernel.increment_norms().max())
    )
