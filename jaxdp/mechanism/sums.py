r"""Mechanisms of plans that release noised sums: sensitivity, noise, grids, guarantee.

A plan has one of three:

* :class:`Sums`: one bounded sum a step, each with noise of its own;
* :class:`CorrelatedSums`: bounded means whose noise is correlated over a period, of which
  one record is in one step of a pass;
* :class:`WeighedSums`: bounded means of two kinds of steps, each of which may read a
  record, with independent noise that is weighed between the kinds.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from jaxdp import accounting, sampling
from jaxdp.core import validate
from jaxdp.core.types import Grid, Phase, Relation
from jaxdp.kernels import clip, toeplitz_noise
from jaxdp.kernels import prefix_noise as noises
from jaxdp.mechanism import laws

#: A little more noise, for what fixed point rounds in what is carried from step to step.
_MORE = 1 + 5e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mechanism:
    """Fields that every mechanism has; they and its properties are as in ``SumPlan``.

    ``guarantee`` is that of all releases, and ``stds`` are shown by a table besides.

    Attributes:
      count_noise_multiplier: of the counts that are released besides, while
        ``noise_multiplier`` is that of both together; None where there are none.
    """

    num_examples: int
    num_steps: int
    sampling: sampling.AnySampler
    relation: Relation
    noise_multiplier: float | None
    count_noise_multiplier: float | None = None

    #: Whether more steps cost more.
    charges_steps = True

    @property
    def noise(self) -> float:
        """The noise multiplier; ValueError where there is none yet."""
        return validate.has_noise(self.noise_multiplier)

    @property
    def moves(self) -> float:
        """Sensitivity of a sum over the clip."""
        return accounting.sensitivity(self.relation, 1.0)

    @property
    def sum_noise(self) -> float:
        """Noise multiplier of the sums that leaves room for the counts.

        Sums and counts together cost one Gaussian release of ``noise_multiplier``.
        """
        pair, count = self.noise, self.count_noise_multiplier
        if count is None or pair == 0:
            return pair
        if count <= pair:
            raise ValueError(
                "count_noise_multiplier must exceed the plan's noise_multiplier = "
                f"{pair:.6g}, which pays for sum and count together, got {count!r}"
            )
        return (pair**-2 - count**-2) ** -0.5

    def _equal(
        self,
        law: laws.Law = laws.LAWS["discrete"],
        numbers: int = accounting.MAX_NUMBERS,
    ) -> accounting.Guarantee:
        """Returns the guarantee of steps that all have the same noise."""
        ideal = laws.guarantee(
            law,
            self.sampling,
            self.relation,
            num_examples=self.num_examples,
            num_steps=self.num_steps,
            noise_multiplier=self.noise,
        )
        return ideal if law.exact else self._drawn(ideal, self.noise, numbers)

    def _drawn(
        self,
        ideal: accounting.Guarantee,
        least: float,
        numbers: int = accounting.MAX_NUMBERS,
    ) -> accounting.Guarantee:
        """Returns the guarantee with the error of the integer Gaussian sampler added.

        Args:
          ideal: of exact noise.
          least: the smallest noise multiplier of a step, for it is moved the farthest.
          numbers: noised values of a step, at most.
        """
        if not least:
            return ideal
        # (A record that pushes another out of a full batch moves the sum by 2C.)
        moves = 2 / self.moves if self.sampling.amplifies else 1.0
        return accounting.drawn(
            ideal,
            num_steps=self.num_steps,
            numbers_per_step=numbers,
            reach=moves / least,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums(_Mechanism):
    """Bounded sums over batches, one a step, each with noise of its own.

    Attributes:
      l2_clip_norm: C, bound on one record's contribution.
      law: of the noise.
      numbers: largest number of noised values of a step.
    """

    l2_clip_norm: float
    law: laws.Law = laws.LAWS["discrete"]
    numbers: int = accounting.MAX_NUMBERS

    @property
    def sensitivity(self) -> float:
        """Sensitivity of a released sum, in L2, or in L1 with Laplace noise."""
        return accounting.sensitivity(self.relation, self.l2_clip_norm)

    @property
    def normalizer(self) -> float:
        """Constant divisor of the sums: the expected batch size."""
        return self.sampling.expected_batch_size(self.num_examples)

    @property
    def clips(self) -> dict[str, tuple[float, float]]:
        """Clip norm and normalizer of each phase, by the phase's name."""
        return {"step": (self.l2_clip_norm, self.normalizer)}

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum, divided by ``normalizer``."""
        noise = self.sum_noise
        return noise * self.sensitivity / self.normalizer if noise else 0.0

    def step_std(self, phase: str) -> float:
        del phase
        return self.noise_std

    #: Standard deviations that a table shows besides.
    stds: ClassVar[dict[str, float]] = {}

    @property
    def _bits(self) -> int | None:
        if math.isinf(self.l2_clip_norm):
            return None
        largest = self.sum_noise
        if self.noise and self.count_noise_multiplier is not None:
            largest = max(largest, self.count_noise_multiplier)
        rows = self.sampling.rows(self.num_examples)
        return clip.grid_bits(
            rows, largest * self.moves, deviations=self.law.deviations
        )

    def units(self, noise_multiplier: float) -> float:
        """Returns the standard deviation of some noise in grid units."""
        bits = self._bits
        return 0.0 if bits is None else noise_multiplier * self.moves * 2**bits

    def grid(self, phase: str = "step") -> Grid:
        del phase
        std = self.law.std(self.units(self.sum_noise))
        bound, order = self.l2_clip_norm, self.law.order
        return Grid(bound, self._bits, self.normalizer, std, order=order)

    @property
    def count_grid(self) -> Grid | None:
        """Grid of the count, to which a record gives a half or its negative, or None."""
        if self.count_noise_multiplier is None:
            return None
        units = self.units(self.count_noise_multiplier) if self.noise else 0.0
        std = accounting.integer_std(units)
        return Grid(0.5, self._bits, self.normalizer, std)

    @property
    def noise_scale(self) -> int:
        """Integer parameter of the law of the noise on the sum, in grid units."""
        return self.law.scale(self.units(self.sum_noise))

    @property
    def guarantee(self) -> accounting.Guarantee:
        return self._equal(self.law, self.numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Means(_Mechanism):
    """Bounded means of phases with a clip each.

    Attributes:
      clips: clip norm and normalizer of each phase, by the phase's name.
      phases: of a period.
      correlation: noise kernel of one period, which holds the matrix C.
      slopes: of how many released numbers a coordinate of the estimate is the mean.
      count_share: noise multiplier of one count over ``count_noise_multiplier``, that of
        all that a record may be in.
    """

    clips: Mapping[str, tuple[float, float]]
    phases: tuple[Phase, ...]
    correlation: noises.PrefixNoise
    slopes: int = 1
    count_share: float = 1.0

    #: Constant 1, because the bounded and noised quantities are means.
    normalizer = 1.0

    def __post_init__(self) -> None:
        # A plan keeps its mechanism and shows the clips: nobody may change them there.
        object.__setattr__(self, "clips", MappingProxyType(dict(self.clips)))

    @property
    def sensitivity(self) -> float:
        raise NotImplementedError

    def step_std(self, phase: str) -> float:
        raise NotImplementedError

    @property
    def node_std(self) -> float:
        """Standard deviation sigma of one coordinate of one node's noise."""
        noise = self.sum_noise
        return noise * self.sensitivity if noise else 0.0

    @property
    def count_grid(self) -> Grid | None:
        """Grid of a restart's count, to which a record gives a half or its negative."""
        if self.count_noise_multiplier is None:
            return None
        size = self.clips["restart"][1]
        in_clips = self.count_noise_multiplier * self.count_share * self.moves
        bits = clip.grid_bits(self.rows_of("restart"), in_clips)
        units = in_clips * 2**bits if self.noise else 0.0
        return Grid(0.5, bits, size, accounting.integer_std(units))

    @functools.cached_property
    def leaf_sensitivities(self) -> np.ndarray:
        """Sensitivity s of the mean of each step of a period, float64 (period,)."""
        moves = {
            name: accounting.sensitivity(self.relation, bound) / size
            for name, (bound, size) in self.clips.items()
        }
        steps = [np.full(p.num_steps, moves[p.name]) for p in self.phases]
        leaves = np.resize(np.concatenate(steps), self.correlation.period)
        leaves.flags.writeable = False  # It is kept: nobody else may change it.
        return leaves

    def rows_of(self, phase: str) -> int:
        """Returns the largest number of records that a step of a phase reads."""
        return next(each.batch_size for each in self.phases if each.name == phase)

    def grid(self, phase: str) -> Grid:
        """Returns the grid of a phase: clip norm, grid unit, normalizer, integer noise.

        Where noise is carried from step to step all phases share its unit, and a bound is a
        whole number of units: lower than ``clips`` says by less than 2**-7 of it.
        """
        bound, size = self.clips[phase]
        if math.isinf(bound):  # The non-private limit.
            return Grid(bound, None, size, 0)
        if isinstance(self.correlation, toeplitz_noise.Independent):
            in_clips = self.step_std(phase) * size / bound
            bits = clip.grid_bits(self.rows_of(phase), in_clips)
            return Grid(bound, bits, size, accounting.integer_std(in_clips * 2**bits))
        unit = self._noise_unit
        units = bound / size / unit
        # A power of two remains one, whatever the quotient rounds.
        shift = max(0, math.ceil(math.log2(units * (1 - 1e-12))) - 16)
        limit = math.floor(units / 2**shift * (1 + 1e-12))
        std = accounting.integer_std(self.node_std / unit * _MORE)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedSums(_Means):
    r"""Bounded means, one a step, plus noise that is correlated over a period.

    The means of a period are :math:`d_1, \dots, d_T`, and :math:`d_t + (C^{-1}\xi)_t` is
    released, with :math:`\xi` independent normals of standard deviation :math:`\sigma` and
    a lower triangular C. That is post-processing of :math:`Cd + \xi`, one Gaussian
    mechanism however the means depend on what was released before. If one record moves
    :math:`d_i` by at most :math:`s_i`, and no other mean of the period, its sensitivity is
    :math:`\max_i s_i\|Ce_i\|`.

    Where the period is the whole run and reads a record every b steps, it is
    :math:`s\|C(e_0 + e_b + e_{2b} + \dots)\|` (``prefix_noise.sensitivity``), and the run
    is that one mechanism.

    Where a record can be in every b-th step alone, by a coin of its own each time, and C
    has at most b bands, the run is as many sampled Gaussian mechanisms as the record has
    steps. A row of C that holds one of these steps holds no other. So each time the record
    is in other rows of :math:`Cd`, and moves them along one column of C, by the difference
    that it makes to that step's mean, which is settled before these rows are released.
    Given what was released before, that is one step with independent noise and a
    sensitivity of :math:`s\|Ce_i\|`, and its coin is new.

    Attributes:
      separation: b, the steps between two of a period that read the same record; None
        where a period reads it once.

    References:
      Denisov et al., `Improved Differential Privacy for SGD via Optimal Private Linear
      Operators on Adaptive Streams <https://arxiv.org/abs/2202.08312>`_, 2022, Theorem 2.1.
      Choquette-Choo et al., `Multi-Epoch Matrix Factorization Mechanisms for Private
      Machine Learning <https://arxiv.org/abs/2211.06530>`_, 2023 (records read again).
      Choquette-Choo et al., `(Amplified) Banded Matrix Factorization
      <https://arxiv.org/abs/2306.08153>`_, 2023, Theorem 4 (sampled records).
    """

    separation: int | None = None

    @property
    def charges_steps(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.separation is None

    @functools.cached_property
    def sensitivity(self) -> float:
        """L2 sensitivity of Cd, the sequence d of means times the matrix C."""
        return noises.sensitivity(
            self.correlation, self.leaf_sensitivities, self.separation
        )

    @property
    def noise_std(self) -> float:
        """Largest standard deviation of a coordinate's noise in the running sum.

        Of slopes the mean over the coordinates of the estimate.
        """
        return self.node_std * _longest(self.correlation) / math.sqrt(self.slopes)

    def step_std(self, phase: str) -> float:
        del phase
        return self.node_std

    @property
    def stds(self) -> dict[str, float]:
        return {"node_std": self.node_std}

    @property
    def guarantee(self) -> accounting.Guarantee:
        if self.separation is None:
            return self._equal()
        ideal = accounting.full_batch_gaussian(self.noise, 1, self.relation)
        return self._drawn(ideal, self.noise)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeighedSums(_Means):
    """Bounded means, each of which may read a record, with independent noise.

    Attributes:
      weighed: the root of a sum of squares in which the steps are weighed by their noise,
        such that the noise multiplier times it is the largest standard deviation of the
        running estimate.
      unit_stds: standard deviation of a step's noise over the noise multiplier, by phase.
    """

    weighed: float
    unit_stds: Mapping[str, float]

    charges_steps = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "unit_stds", MappingProxyType(dict(self.unit_stds)))

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of all releases, weighed by their noise."""
        return self.weighed

    @property
    def noise_std(self) -> float:
        """Largest standard deviation of a coordinate's noise in the running estimate.

        Of slopes the mean over the coordinates of the estimate.
        """
        return self.node_std / math.sqrt(self.slopes)

    def step_std(self, phase: str) -> float:
        return self.sum_noise * self.unit_stds.get(phase, 0.0) if self.noise else 0.0

    @property
    def stds(self) -> dict[str, float]:
        return {f"{p.name}_std": self.step_std(p.name) for p in self.phases}

    @property
    def guarantee(self) -> accounting.Guarantee:
        sampler, noise = self.sampling, self.noise
        if not noise or math.isinf(self.sensitivity):
            return accounting.full_batch_gaussian(noise, 1, self.relation)
        count = self.count_noise_multiplier
        left = noise**-2 - (count**-2 if count else 0.0)  # For the sums.
        if left <= 0:
            # A plan refuses this, but calibration may try it: counts alone, of so much
            # noise, as if that of the sums were infinite from here on.
            multipliers = {"restart": noise * self.count_share}
        else:
            of_sums = left**-0.5 if count else noise
            # Of the noise on a phase's sums.
            multipliers = {
                name: of_sums
                * self.unit_stds[name]
                * size
                / accounting.sensitivity(self.relation, bound)
                for name, (bound, size) in self.clips.items()
            }
            if count is not None:  # A restart's sum and its count are one release.
                both = multipliers["restart"] ** -2 + (count * self.count_share) ** -2
                multipliers["restart"] = both**-0.5
        counts = steps_of(self.num_steps, self.correlation.period)
        parts = {
            name: laws.guarantee(
                laws.LAWS["discrete"],
                sampler.of_phase(name),  # pyright: ignore[reportArgumentType]
                self.relation,
                num_examples=self.num_examples,
                num_steps=counts[name],
                noise_multiplier=multiplier,
                among_sampled=sampler.amplifies,
            )
            for name, multiplier in multipliers.items()
            if counts[name]
        }
        least = min(multipliers[name] for name in parts)
        return self._drawn(accounting.composed([*parts.values()]), least)


Mechanism = Sums | CorrelatedSums | WeighedSums


def steps_of(num_steps: int, period: int) -> dict[str, int]:
    """Counts the restarts and the differences among the first steps of a run."""
    restarts = -(-num_steps // period)
    return {"restart": restarts, "difference": num_steps - restarts}


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


@functools.lru_cache(maxsize=64)
def _longest(kernel: noises.PrefixNoise) -> float:
    """Returns the largest L2 norm of a row of B, where BC is the prefix-sum matrix."""
    return float(kernel.prefix_norms().max())
