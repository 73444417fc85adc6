"""Types that all layers share, and protocols of the plan fields that they read."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax

from jaxdp.kernels.prefix_noise import PrefixNoise

Relation = Literal["replace_one", "zero_out", "add_or_remove"]

#: ``value_fn(params, batch) -> losses (B,)``.
ValueFn = Callable[[Any, Any], jax.Array]
#: Predicate on a leaf's path, its keys joined by ``/``.
PathPredicate = Callable[[str], bool]


class Phase(NamedTuple):
    """A static stretch of steps of one shape; a plan's phases repeat."""

    name: str
    num_steps: int
    batch_size: int


class Run(NamedTuple):
    """Frozen numbers of a plan that the loop, samplers and every method read."""

    family: str
    num_examples: int  # n
    num_steps: int  # releases of the whole run
    sampling: Any  # a sampler: hashable, static
    relation: Relation
    phases: tuple[Phase, ...]
    digest: str  # SHA-256 of the plan's numbers, in hex

    @property
    def context(self) -> int:
        """Number by which the plan enters its streams of keys."""
        return int(self.digest[:8], 16)


class Perturbation(NamedTuple):
    """Size and kind of the parameter perturbation at which a plan evaluates losses.

    Attributes:
      smoothing_radius: the plan's, in units of the parameters; 0 where it moves none.
      share: how much of it one parameter moves, in root mean square.
      differences: whether losses are subtracted there, or else differentiated.
      may_be_zero: whether the plan may have the radius 0, and derivatives.
    """

    smoothing_radius: float
    share: float = 1.0
    differences: bool = True
    may_be_zero: bool = True


class Sampler(Protocol):
    """Interface of the sampler that a batch names as its own: hashable, static."""

    def rows(self, num_examples: int) -> int: ...


class ClipTuning(Protocol):
    """Settings of adaptive clipping to a target quantile of unclipped records."""

    @property
    def target_unclipped_quantile(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...


class DataPlan(Protocol):
    """Plan fields that the training loop and every algorithm read."""

    family: ClassVar[str]

    @property
    def num_examples(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def sampling(self) -> Sampler: ...
    @property
    def relation(self) -> Relation: ...
    @property
    def phases(self) -> tuple[Phase, ...]: ...
    @property
    def digest(self) -> str: ...
    @property
    def run(self) -> Run: ...


class PrivatePlan(DataPlan, Protocol):
    """Plan fields that transforms read: clip, noise and normalizer of one sum per step."""

    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def l2_clip_norm(self) -> float: ...
    @property
    def noise(self) -> str: ...
    @property
    def normalizer(self) -> float: ...
    @property
    def noise_std(self) -> float: ...
    @property
    def grid_bits(self) -> int | None: ...
    @property
    def grid_noise_std(self) -> int: ...
    def grid(self, phase: str) -> "Grid": ...


class ZerothOrderPlan(PrivatePlan, Protocol):
    """Plan fields that the zeroth-order transforms read."""

    isotropic: ClassVar[bool]

    @property
    def smoothing_radius(self) -> float: ...
    @property
    def num_directions(self) -> int: ...
    @property
    def direction(self) -> str: ...
    @property
    def norm_order(self) -> int: ...
    @property
    def grid_noise_scale(self) -> int: ...
    @property
    def grid_count_std(self) -> int: ...
    @property
    def count_grid(self) -> "Grid | None": ...
    @property
    def clip_tuning(self) -> ClipTuning | None: ...
    @property
    def output(self) -> str: ...


class Grid(NamedTuple):
    """Clip, grid, noise and normalizer of the sum of one phase's contributions."""

    l2_clip_norm: float | jax.Array  # bound on one record's contribution; public
    bits: int | None  # a grid unit is 2**-bits of it; None: no bound, no noise
    normalizer: float  # what the sum is divided by
    noise_std: int  # of a node's noise, in units of the noise
    limit: int | None = None  # so many units are the bound, instead of 2**bits
    shift: int = 0  # a grid unit is 2**shift units of the noise
    order: int = 2  # of the norm that is bounded: 1 or 2

    @property
    def noise_unit(self) -> Any:
        """Value of one unit of the noise in the released mean."""
        assert self.bits is not None
        units = 2.0**self.bits if self.limit is None else self.limit
        return self.l2_clip_norm / (units * 2.0**self.shift * self.normalizer)


class PrefixSumPlan(PrivatePlan, Protocol):
    """Plan fields of transforms that release increments of noised prefix sums."""

    @property
    def steps_per_pass(self) -> int: ...
    @property
    def correlation(self) -> PrefixNoise: ...
    def grid(self, phase: str) -> Grid: ...


class IncrementPlan(PrefixSumPlan, Protocol):
    """Plan fields of the O2NC oracles: estimators of a gradient and of its change."""

    @property
    def oracle(self) -> str: ...
    @property
    def max_step(self) -> float: ...
    @property
    def scale_with_movement(self) -> bool: ...
    @property
    def smoothing_radius(self) -> float: ...
    @property
    def num_directions(self) -> int: ...
    @property
    def direction(self) -> str: ...
    @property
    def difference(self) -> str: ...
    @property
    def share_directions(self) -> bool: ...


class DriverPlan(Protocol):
    """Plan fields of online-to-non-convex conversion, without oracle and budget."""

    family: ClassVar[str]

    @property
    def num_steps(self) -> int: ...
    @property
    def max_step(self) -> float: ...
    @property
    def learning_rate(self) -> float | None: ...
    @property
    def window(self) -> int: ...
    @property
    def reset(self) -> bool: ...
    @property
    def skip_last_query(self) -> bool: ...
    @property
    def digest(self) -> str: ...
    @property
    def run(self) -> Run: ...
