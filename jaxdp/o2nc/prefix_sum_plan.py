"""The plan of private prefix sums of bounded updates."""

import dataclasses
from typing import Any, ClassVar, Self

import numpy as np
import optax

from jaxdp import sampling
from jaxdp.core import validate
from jaxdp.core.correlated_noise import CorrelatedNumbers
from jaxdp.core.keys import Keys
from jaxdp.kernels import prefix_noise, toeplitz_noise
from jaxdp.kernels.prefix_noise import PrefixNoise
from jaxdp.mechanism import blt
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description
from jaxdp.mechanism.sum_plan import SumPlan, noise_on_each
from jaxdp.mechanism.sums import CorrelatedSums
from jaxdp.o2nc.bands import optimised_bands
from jaxdp.o2nc.prefix_sum import private_prefix_sum

#: The kernel that can be cut to bands, and the one whose bands are the plan's numbers.
_BANDED, _OWN = "sqrt_toeplitz", "toeplitz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixSum(SumPlan):
    """Plan of means of clipped per-record updates, whose noise adds up to little.

    One pass over the data costs what one Gaussian release costs. P passes of
    ``ShuffledEpochs`` cost P of them, for noise restarts with each. Those of
    ``CyclicEpochs`` are one release, whose noise is correlated over the whole run; it has
    less noise in all sums. Of these three no amplification is claimed. Steps of
    ``CyclicPoisson`` cost what sampled releases of independent noise cost, for their noise
    is correlated over fewer steps than lie between two that can read one record.

    Attributes:
      sampling: ``SinglePass``, ``ShuffledEpochs``, ``CyclicEpochs`` or ``CyclicPoisson``.
      prefix_noise: the name of the noise's matrix C, one of
        ``jaxdp.kernels.prefix_noise.NAMES``; with ``CyclicEpochs`` of its ``REPEATABLE``,
        with ``CyclicPoisson`` ``"sqrt_toeplitz"`` or ``"independent"``; and ``"toeplitz"``
        with all of them, whose C is given by ``coefficients``.
      blt_numbers: of a buffered Toeplitz C, in place of those that ship for the name; see
        :meth:`with_optimised_noise`.
      period: steps from one restart of the noise to the next; None is a whole pass, and
        with cyclic samplers the whole run.
      bands: of ``"sqrt_toeplitz"``, over how many steps noise is correlated; None is all of
        a period, and with ``CyclicPoisson`` its ``num_groups``, the most that it allows.
      coefficients: of ``"toeplitz"``, the first column of C: numbers that fall from 1, one
        for each band; see :meth:`with_optimised_bands`. They are public, and C is what they
        say: the noise follows from them, and no choice of them costs privacy.

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
    bands: int | None = dataclasses.field(default=None, metadata={"omit_none": True})
    coefficients: tuple[float, ...] | None = dataclasses.field(
        default=None, metadata={"omit_none": True}
    )

    family: ClassVar[str] = "prefix_sum"
    released: ClassVar[str] = "prefix sums"
    takes_updates: ClassVar[bool] = True
    samplers: ClassVar[tuple[type, ...]] = (
        sampling.SinglePass,
        sampling.ShuffledEpochs,
        sampling.CyclicEpochs,
        sampling.CyclicPoisson,
    )
    nested: ClassVar[dict[str, Any]] = {"blt_numbers": blt.BLTNumbers}

    def __post_init__(self) -> None:
        validate.instance(self.samplers, sampling=self.sampling)
        if self.period is not None:
            validate.integer(period=self.period)
        names = (*prefix_noise.NAMES, _OWN)
        blt.check_names(self.prefix_noise, self.blt_numbers, names)
        if self._cyclic:
            names = (*prefix_noise.REPEATABLE, _OWN)
            if self._num_groups:
                names = (_BANDED, _OWN, "independent")
            validate.one_of(names, prefix_noise=self.prefix_noise)
            if self.period is not None:
                raise ValueError(
                    f"period must be None with sampling.{type(self.sampling).__name__}, "
                    f"whose noise does not restart within the run, got {self.period}"
                )
        if self.bands is not None:
            self._check_bands(self.bands)
        self._check_coefficients()
        super().__post_init__()

    def _check_coefficients(self) -> None:
        found = self.coefficients
        if (self.prefix_noise == _OWN) != (found is not None):
            raise ValueError(
                f"coefficients must be given with prefix_noise = {_OWN!r}, and None with "
                f"another, got {found} with {self.prefix_noise!r}"
            )
        if found is None:
            return
        found = toeplitz_noise.falling(found, "coefficients")
        object.__setattr__(self, "coefficients", found)  # JSON has lists.
        most = self._num_groups
        if most and len(found) > most:
            raise ValueError(
                f"coefficients must be at most {most} numbers, one for each group of the "
                f"sampler, got {len(found)}: a row of C would hold two steps of a record"
            )

    def _check_bands(self, bands: int) -> None:
        # Beyond the groups, a row of C would hold two steps of a record.
        validate.integer(bands=bands, at_most=self._num_groups)
        if self.prefix_noise != _BANDED:
            raise ValueError(
                f"bands must be None with prefix_noise = {self.prefix_noise!r}, got "
                f"{bands}: only {_BANDED!r} has bands"
            )

    @property
    def _cyclic(self) -> bool:
        """True if noise is correlated over steps that can read one record again."""
        return isinstance(self.sampling, sampling.CyclicEpochs | sampling.CyclicPoisson)

    @property
    def _num_groups(self) -> int | None:
        """Number of groups that are sampled in turn; None where none are."""
        return getattr(self.sampling, "num_groups", None)

    @property
    def steps_per_pass(self) -> int:
        """Number of steps of one pass over the data."""
        if self._num_groups:
            return self._num_groups
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
        size = self.sampling.expected_batch_size(self.num_examples)
        again = isinstance(self.sampling, sampling.CyclicEpochs)
        return CorrelatedSums(
            **self._common(),
            clips={"step": (self.l2_clip_norm, size)},
            phases=self.phases,
            correlation=self._kernel(period),
            separation=self.steps_per_pass if again else None,
        )

    def _kernel(self, period: int) -> PrefixNoise:
        if self.coefficients is not None:
            return toeplitz_noise.Banded(period, self.coefficients)
        bands = self.bands or self._num_groups
        if bands is None or self.prefix_noise != _BANDED:
            return blt.kernel(self.prefix_noise, self.blt_numbers, period)
        return toeplitz_noise.SquareRoot(period, min(bands, period))

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

    def with_optimised_bands(self, bands: int | None = None) -> Self:
        """Returns the same plan with a banded C of the least noise in the sum of a period.

        At the same budget: the sensitivity and the noise follow from C. What is gained over
        the square root with as many bands is the more the longer the period is beside
        them, and single steps pay for it with more noise each. The numbers are found in
        about a second, from the steps, the bands and the steps between two that read one
        record, and are kept in ``coefficients``: a stored plan has the same noise on every
        machine, one that is optimised there anew may differ in the last digits.

        Args:
          bands: over how many steps noise is correlated; None is the plan's own, else the
            steps of a pass. With cyclic samplers no more than these: a row of C would hold
            two steps of a record.

        Raises:
          ValueError: more bands than that, or none.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.PrefixSum(
          ...     num_examples=6000, num_steps=1000, relation="replace_one",
          ...     sampling=jaxdp.sampling.CyclicPoisson(num_groups=4, sampling_prob=0.1),
          ...     l2_clip_norm=1.0, prefix_noise="sqrt_toeplitz",
          ... ).calibrate(epsilon=2.0, delta=1e-6)
          >>> found = plan.with_optimised_bands()
          >>> [round(c, 2) for c in found.coefficients]
          [1.0, 0.89, 0.84, 0.78]
          >>> round(found.noise_std / plan.noise_std, 2), found.epsilon() == plan.epsilon()
          (0.91, True)
        """
        separation = getattr(self.sums, "separation", None)
        most = self._num_groups or separation
        if bands is None:
            bands = self.bands or len(self.coefficients or ()) or self.steps_per_pass
            bands = min(bands, most or bands)
        validate.integer(bands=bands, at_most=most)
        found = optimised_bands(self.noise_period, bands, separation)
        return dataclasses.replace(
            self,
            prefix_noise=_OWN,
            blt_numbers=None,
            bands=None,
            coefficients=found,
        )

    def describe(self) -> Description:
        _, size = self.clips["step"]
        noise = noise_on_each(self, f"means of {size:.5g} records")
        over = getattr(self.correlation, "bands", None) or self.noise_period
        noise += f", correlated over {over} steps ({self.prefix_noise})"
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
