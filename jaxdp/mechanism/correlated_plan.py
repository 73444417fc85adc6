"""Base of plans with correlated noise: one Gaussian mechanism per period."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp.core import validate
from jaxdp.core.types import Grid
from jaxdp.kernels import clip, toeplitz_noise
from jaxdp.kernels import prefix_noise as noises
from jaxdp.mechanism import blt
from jaxdp.mechanism.sum_plan import SumPlan

#: A little more noise, for what fixed point rounds in what is carried from step to step.
_MORE = 1 + 5e-6


@dataclasses.dataclass(frozen=True)
class BLTNumbers:
    """Parameters of a buffered Toeplitz kernel.

    Attributes:
      buf_decay: in [0, 1], one for each buffer.
      output_scale: at least 0, one for each buffer.
    """

    buf_decay: tuple[float, ...]
    output_scale: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # JSON has lists.
            object.__setattr__(self, field.name, tuple(getattr(self, field.name)))


def check_fine(
    correlation: noises.PrefixNoise, std: int, noise_multiplier: float | None
) -> None:
    """Raises ValueError if non-integral noise has a std below 256 grid units."""
    if 0 < std < 256 and not correlation.integral:
        raise ValueError(
            "noise_multiplier must be larger with this prefix_noise, got "
            f"{noise_multiplier:.4g}: its noise is only {std} units of the grid on which "
            'sums are exact; take prefix_noise="tree"'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedPlan(SumPlan):
    r"""Plan whose steps each release a bounded mean, plus noise correlated over a period.

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
        validate.one_of(noises.NAMES, prefix_noise=self.prefix_noise)
        if self.blt_numbers is not None:
            validate.instance(BLTNumbers, blt_numbers=self.blt_numbers)
            buffers = len(self.blt_numbers.buf_decay)
            if self.prefix_noise != f"blt_{buffers}":
                raise ValueError(
                    f"blt_numbers must have as many buffers as prefix_noise = "
                    f"{self.prefix_noise!r} says, got {buffers}"
                )
        super().__post_init__()

    @property
    def steps_per_pass(self) -> int:
        """Number of steps of one pass over the data; the noise restarts with each pass."""
        return self.num_steps

    @property
    def num_passes(self) -> int:
        """Largest number of steps that can read one record."""
        return self.sampling.max_participations(self.num_examples, self.num_steps)

    @property
    def noise_period(self) -> int:
        """Number of steps from one restart of the noise to the next."""
        raise NotImplementedError

    @property
    def clips(self) -> dict[str, tuple[float, float]]:
        """Clip norm and normalizer of each phase, by the phase's name."""
        raise NotImplementedError

    @property
    def correlation(self) -> noises.PrefixNoise:
        """Noise kernel of one period, which holds the matrix C."""
        if self.blt_numbers is not None:
            numbers = dataclasses.asdict(self.blt_numbers)
            return toeplitz_noise.Buffered(self.noise_period, **numbers)
        return noises.make(self.prefix_noise, self.noise_period)

    def with_optimised_noise(self, num_buffers: int = 3) -> Self:
        """Returns the same plan with a buffered Toeplitz C optimised for its period.

        Uses ``jax_privacy`` (the extra ``mf``), in up to half a minute the first time. The
        guarantee stays: the noise follows from C.

        Args:
          num_buffers: 1, 2 or 3.

        Raises:
          ImportError: ``jax_privacy`` is not installed.
        """
        validate.integer(num_buffers=num_buffers, at_most=3)
        found = blt.optimise_blt(self.noise_period, num_buffers)
        numbers = BLTNumbers(found.buf_decay, found.output_scale)
        name = f"blt_{num_buffers}"
        return dataclasses.replace(self, prefix_noise=name, blt_numbers=numbers)

    @property
    def leaf_sensitivities(self) -> np.ndarray:
        """Sensitivity s of each step's mean, float64 (period,)."""
        raise NotImplementedError

    @functools.cached_property
    def sensitivity(self) -> float:
        """L2 sensitivity of Cd, the sequence d of means times the matrix C."""
        return noises.sensitivity(self.correlation, self.leaf_sensitivities)

    @property
    def normalizer(self) -> float:
        """Constant 1, because the bounded and noised quantities are means."""
        return 1.0

    @property
    def node_std(self) -> float:
        """Standard deviation sigma of one coordinate of one node's noise."""
        noise = self._noise
        return noise * self.sensitivity if noise else 0.0

    @property
    def noise_std(self) -> float:
        """Largest standard deviation of a coordinate's noise in the running sum."""
        return self.node_std * _longest(self.correlation)

    def step_std(self, phase: str) -> float:
        """Returns the standard deviation of a coordinate of a node's noise in a phase."""
        return self.node_std

    def rows_of(self, phase: str) -> int:
        """Returns the largest number of records that a step of a phase reads."""
        return next(each.batch_size for each in self.phases if each.name == phase)

    def grid(self, phase: str) -> Grid:
        """Returns the grid of a phase: clip norm, grid unit, normalizer and integer noise.

        Where noise is carried from step to step all phases share its unit, and a bound is a
        whole number of units: lower than ``clips`` says by less than 2**-7 of it.
        """
        bound, size = self.clips[phase]
        if math.isinf(bound):  # The non-private limit.
            return Grid(bound, None, size, 0)
        if isinstance(self.correlation, toeplitz_noise.Independent):
            in_clips = self.step_std(phase) * size / bound
            bits = clip.grid_bits(self.rows_of(phase), in_clips)
            return Grid(bound, bits, size, math.ceil(in_clips * 2**bits))
        unit = self._noise_unit
        units = bound / size / unit
        # A power of two remains one, whatever the quotient rounds.
        shift = max(0, math.ceil(math.log2(units * (1 - 1e-12))) - 16)
        limit = math.floor(units / 2**shift * (1 + 1e-12))
        std = math.ceil(self.node_std / unit * _MORE)
        check_fine(self.correlation, std, self.noise_multiplier)
        bits = (limit - 1).bit_length()
        return Grid(limit * 2**shift * unit * size, bits, size, std, limit, shift)

    @property
    def _noise_unit(self) -> float:
        """Noise unit that all phases share, in units of the released means."""
        moves = [bound / size for bound, size in self.clips.values()]
        # A number that wraps before it is multiplied would be another: so far none does.
        deviations = 8 if self.correlation.integral else 16
        noise = deviations * self.node_std * self.correlation.largest_norm()
        most = max(
            self.rows_of(name) * bound / size + noise
            for name, (bound, size) in self.clips.items()
        )
        least = min(moves)
        bits = min(16, math.floor(math.log2((2**31 - 1) / (most / least))))
        if bits < 8:
            raise ValueError(
                "noise_multiplier must be such that a step's sum and its noise leave 8 "
                "bits for one record's contribution, got "
                f"{self.noise_multiplier:.4g}, which leaves {bits}: ask for a larger "
                "epsilon, or bring the clips over their batch sizes closer together"
            )
        return least * 2.0**-bits

    @property
    def grid_bits(self) -> int | None:
        """Grid bits of the coarsest phase; None without a clip."""
        bits = [self.grid(phase).bits for phase in self.clips]
        return None if None in bits else min(b for b in bits if b is not None)

    @property
    def grid_noise_std(self) -> int:
        """Largest standard deviation of a node's noise over the phases, in noise units."""
        return max(self.grid(phase).noise_std for phase in self.clips)

    def rows(self) -> list[tuple[str, str]]:
        out = super().rows()
        if self.noise_multiplier is not None:
            at = [name for name, _ in out].index("noise_std")
            out.insert(at, ("node_std", f"{self.node_std:.6g}"))
        return out


@functools.lru_cache(maxsize=64)
def _longest(kernel: noises.PrefixNoise) -> float:
    """Returns the largest L2 norm of a row of B, where BC is the prefix-sum matrix."""
    return float(kernel.prefix_norms().max())
