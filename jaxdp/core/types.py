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


class DataPlan(Protocol):
    """Plan fields that the training loop and every algorithm read."""

    family: ClassVar[str]

    @property
    def num_examples(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def sampling(self) -> Any: ...
    @property
    def relation(self) -> Relation: ...
    @property
    def phases(self) -> tuple[Phase, ...]: ...
    @property
    def digest(self) -> str: ...
    @property
    def run(self) -> Run: ...


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


class ScoreGrid(NamedTuple):
    """Grid of one player's totals, and the factor from totals to scores.

    A total moves a score by ``floor(total * multiplier / 2**shift)`` units.
    """

    clip: float  # bound on a coordinate of one record's gradient
    bits: int  # a total counts units of 2**-bits of it
    multiplier: int
    shift: int


class VertexPlan(DataPlan, Protocol):
    """Plan fields of algorithms that draw vertices from softmaxes of scores."""

    @property
    def sampler(self) -> str: ...
    @property
    def center_gradients(self) -> bool: ...


class SaddlePlan(VertexPlan, Protocol):
    """Plan fields of a two-player game with a fixed batch size."""

    @property
    def dim_x(self) -> int: ...
    @property
    def dim_y(self) -> int: ...
    @property
    def num_draws(self) -> int: ...
    @property
    def output(self) -> str: ...
    @property
    def grids(self) -> tuple[ScoreGrid, ScoreGrid]: ...


class LevelGrids(NamedTuple):
    """Score grids of one player at a level: of the difference, and of the base."""

    difference: ScoreGrid
    base: ScoreGrid


class BiasReducedPlan(VertexPlan, Protocol):
    """Plan fields of a two-player game whose batch sizes depend on a level."""

    @property
    def dim_x(self) -> int: ...
    @property
    def dim_y(self) -> int: ...
    @property
    def levels(self) -> tuple[int, ...]: ...
    @property
    def batch_sizes(self) -> tuple[int, ...]: ...
    @property
    def grids(self) -> tuple[tuple[LevelGrids, LevelGrids], ...]: ...


class ConvexPlan(VertexPlan, Protocol):
    """Plan fields of a one-player problem with an averaged, lazily refreshed point."""

    @property
    def dim(self) -> int: ...
    @property
    def num_draws(self) -> int: ...
    @property
    def refresh_every(self) -> int: ...
    @property
    def grid(self) -> ScoreGrid: ...


class QueryPlan(DataPlan, Protocol):
    """Plan fields of the synthetic-data game: a histogram against queries."""

    @property
    def sampler(self) -> str: ...
    @property
    def domain_size(self) -> int: ...
    @property
    def num_queries(self) -> int: ...
    @property
    def query_range(self) -> float: ...
    @property
    def histogram_step_size(self) -> float: ...
    @property
    def grid_bits(self) -> int: ...
    @property
    def grid(self) -> ScoreGrid: ...


class TrackedGrid(NamedTuple):
    """Clip and grid of a running sum of Hessians, and noise of its products."""

    norm: str  # of a record's matrix that is bounded: "operator" or "frobenius"
    bits: int  # a unit is 2**-bits of record_move
    record_move: float  # how far one record moves the mean, if it is taken out
    product_unit: float  # grid of the products
    noise_std: int  # of their noise, in its units

    @property
    def unit(self) -> float:
        """Value of one grid unit in an entry of the mean Hessian."""
        return self.record_move * 2.0**-self.bits


class ProductGrid(NamedTuple):
    """Clip, grid and noise of Hessian-vector products, for vectors up to ``radius``."""

    l2_clip_norm: float  # bound on one record's product with a unit vector
    radius: float  # the longest vector
    bits: int  # sums are released in units of 2**-bits of the longest product's bound
    normalizer: float  # what sums are divided by
    noise_std: int  # in these units
    rounding: float  # what the grid costs, as a length of the vector


class SpiderPlan(DataPlan, Protocol):
    """Plan fields of the adaptive variance-reduced gradient (SpiderBoost)."""

    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def num_passes(self) -> int: ...
    @property
    def smoothness(self) -> float: ...
    @property
    def refresh_batch_size(self) -> int: ...
    @property
    def difference_batch_rate(self) -> float: ...
    @property
    def difference_batch_size(self) -> int | None: ...
    @property
    def drift_limit(self) -> float: ...
    @property
    def max_differences(self) -> int: ...
    @property
    def correlation(self) -> PrefixNoise: ...
    @property
    def refresh_grid(self) -> Grid: ...
    @property
    def difference_grid(self) -> Grid: ...


class SOSPPlan(SpiderPlan, Protocol):
    """Plan fields of the search for second-order stationary points."""

    @property
    def dim(self) -> int | None: ...
    @property
    def trigger_norm(self) -> float: ...
    @property
    def escape_steps(self) -> int | None: ...
    @property
    def escape_radius(self) -> float: ...
    @property
    def hessian(self) -> str: ...
    @property
    def hessian_batch_size(self) -> int: ...
    @property
    def hessian_lipschitz(self) -> float | None: ...
    @property
    def hessian_change_rate(self) -> float: ...
    @property
    def hessian_drift_limit(self) -> float: ...
    @property
    def escapes_per_refresh(self) -> int: ...
    @property
    def curvature_threshold(self) -> float | None: ...
    @property
    def query_in_escape(self) -> bool: ...
    @property
    def stop_at_certificate(self) -> bool: ...
    @property
    def hessian_budget(self) -> float: ...
    @property
    def matrix_grid(self) -> Grid: ...
    def product_grid(self, dim: int) -> ProductGrid: ...
    @property
    def tracked_grid(self) -> TrackedGrid: ...
