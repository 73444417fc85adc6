"""Three roles that share the data: sensitivity, noise and grid of each."""

import functools
import math

from jaxdp import accounting
from jaxdp.core.types import Grid, ProductGrid, TrackedGrid
from jaxdp.kernels import clip, stretch
from jaxdp.kernels import prefix_noise as noises
from jaxdp.mechanism import sums
from jaxdp.mechanism.plan import Plan
from jaxdp.sampling import AdaptiveCursor
from jaxdp.sosp import hessian as oracles
from jaxdp.sosp.theory import settings

#: A little more noise, for what float32 rounds in the numbers of a grid, and for what
#: fixed point rounds in correlated noise.
_MORE = 1 + 5e-6
#: How long a running Hessian may get, in clips, before a refresh.
_GROWTH = 4.0
_EPS = 2.0**-24  # float32's rounding


class RolesPlan(Plan):
    """Base of the SOSP plan: sensitivities, noise, grids and guarantee from its fields.

    Each role is a Gaussian mechanism of one ``noise_multiplier`` over its own exact
    sensitivity. A record is in one role in each pass, so the run is one Gaussian event a
    pass.
    """

    # Fields of the subclass.
    sampling: AdaptiveCursor  # pyright: ignore[reportIncompatibleVariableOverride]
    l2_clip_norm: float
    refresh_batch_size: int
    difference_batch_rate: float
    max_differences: int
    escape_steps: int | None
    escape_radius: float
    escape_noise_std: float
    hessian_batch_size: int
    hessian_clip_norm: float
    smoothness: float
    prefix_noise: str
    hessian: settings.Hessian
    hessian_norm: settings.HessianNorm
    hessian_difference_rate: float | None
    escapes_per_refresh: int
    hessian_filter: bool
    dim: int | None
    noise_multiplier: float | None

    @property
    def num_passes(self) -> int:
        """Number E of passes: the most queries that one record can be in."""
        return self.sampling.num_passes

    @property
    def _noise(self) -> float:
        if self.noise_multiplier is None:
            raise ValueError(
                "the plan has no noise_multiplier yet: call "
                ".calibrate(epsilon=..., delta=...) or .with_noise(noise_multiplier=...)"
            )
        return self.noise_multiplier

    @property
    def _guarantee(self) -> accounting.Guarantee:
        return self._guarantee_of(self._noise)

    def _guarantee_of(self, noise_multiplier: float) -> accounting.Guarantee:
        ideal = accounting.full_batch_gaussian(
            noise_multiplier, self.num_passes, self.relation
        )
        if not noise_multiplier:
            return ideal
        return accounting.drawn(
            ideal,
            num_steps=self.num_steps,
            numbers_per_step=self._numbers_per_step,
            reach=1 / noise_multiplier,
        )

    @property
    def _numbers_per_step(self) -> int:
        """Largest count of values in a step: a gradient, and a product or a matrix.

        Params of another size than ``dim`` are refused; where it is not given, any size
        is charged for.
        """
        if self.dim is None:
            return 2 * accounting.MAX_NUMBERS
        more = math.comb(self.dim + 1, 2) if self.hessian == "released" else self.dim
        return self.dim + more

    @property
    def _moves(self) -> float:
        """Sensitivity of a sum in units of the clip: 2 under replace-one, else 1."""
        return accounting.sensitivity(self.relation, 1.0)

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the sum of a refresh; other roles have their own."""
        return self._moves * self.l2_clip_norm

    @property
    def refresh_sensitivity(self) -> float:
        """L2 sensitivity of the mean of a refresh."""
        return self.sensitivity / self.refresh_batch_size

    @property
    def difference_sensitivity(self) -> float:
        """L2 sensitivity of the mean of a difference, whatever its batch size."""
        return self._moves / self.difference_batch_rate

    @property
    def hessian_sensitivity(self) -> float:
        """L2 sensitivity of all products of the escapes that one record serves in.

        With the filter it is the limit that the filter keeps. Of a released matrix it is
        the sensitivity in Frobenius norm.
        """
        one = self._moves * self.hessian_clip_norm / self.hessian_batch_size
        if self.hessian == "released":
            return one
        if self.hessian_filter:
            return self.escape_noise_std / self._noise if self._noise else 0.0
        assert self.escape_steps is not None
        if self.hessian == "tracked":
            times = self.escapes_per_refresh * (self.escape_steps - 1)
            return self._product_sensitivity * math.sqrt(times)
        return one * self.escape_radius * math.sqrt(self.escape_steps - 1)

    @property
    def refresh_noise_std(self) -> float:
        """Standard deviation of a coordinate's noise in a refresh."""
        return self._noise * self.refresh_sensitivity

    @property
    def node_std(self) -> float:
        """Standard deviation of a coordinate of one node's noise, in differences."""
        longest = float(self.correlation.column_norms().max())
        return self._noise * self.difference_sensitivity * longest

    @property
    def difference_noise_std(self) -> float:
        """Largest standard deviation of the differences' noise in the estimate."""
        return self.node_std * float(self.correlation.prefix_norms().max())

    @property
    def noise_std(self) -> float:
        """Largest standard deviation of the estimate's noise over its steps."""
        return math.hypot(self.refresh_noise_std, self.difference_noise_std)

    @property
    def escape_std(self) -> float:
        """Standard deviation of the noise of an escape's steps, or of a released matrix."""
        least = 0.0 if self.hessian == "released" else self.escape_noise_std
        return max(least, self._noise * self.hessian_sensitivity)

    @property
    def correlation(self) -> noises.PrefixNoise:
        """Noise kernel of the differences between two refreshes, which holds C."""
        return _correlation(self.prefix_noise, max(self.max_differences, 1))

    @property
    def refresh_grid(self) -> Grid:
        """Grid of the means of gradients."""
        noise = self._noise * self._moves
        bits = _bits("refresh", noise)
        std = math.ceil(noise * 2**bits * _MORE)
        return Grid(self.l2_clip_norm, bits, self.refresh_batch_size, std)

    @property
    def difference_grid(self) -> Grid:
        """Grid of the means of gradient changes, whose clip grows with their batch."""
        longest = float(self.correlation.column_norms().max())
        node = self._noise * self._moves * longest
        bits = _bits("difference", node * self.correlation.largest_norm())
        std = math.ceil(node * 2**bits * _MORE)
        sums.check_fine(self.correlation, std, self.noise_multiplier)
        return Grid(1 / self.difference_batch_rate, bits, 1.0, std)

    @property
    def hessian_budget(self) -> float:
        """Limit on an escape's sum of squared lengths; infinite without the filter."""
        if not (self.hessian_filter and self._noise):
            return math.inf
        move = self._moves * self.hessian_clip_norm / self.hessian_batch_size
        # Less by what float32 may lose in the sum.
        kept = max(0.0, 1 - 1e-5 - 2 * (self.escape_steps or 0) * _EPS)
        return (self.escape_noise_std / (move * self._noise)) ** 2 * kept

    def product_grid(self, dim: int) -> ProductGrid:
        """Returns the grid of the means of Hessian-vector products in ``dim`` dimensions.

        Exact sums are rounded down to the grid of the noise, each coordinate by less than
        a unit: a record moves them by up to root d units more than it does itself.
        """
        clip_norm, rows = self.hessian_clip_norm, self.hessian_batch_size
        radius = self.escape_radius
        noise = self.escape_std * rows / (clip_norm * radius)
        bits = _bits("escape", noise)
        rounding = math.sqrt(dim) * 2.0**-bits / self._moves
        if not self.hessian_filter:
            exact = self._noise * self.hessian_sensitivity * rows / (clip_norm * radius)
            noise = max(noise, exact * (1 + rounding))
        std = math.ceil(noise * 2**bits * _MORE)
        return ProductGrid(clip_norm, radius, bits, rows, std, rounding * radius)

    @property
    def matrix_grid(self) -> Grid:
        """Grid of the means of released Hessians."""
        noise = self._noise * self._moves
        bits = _bits("Hessian", noise)
        std = math.ceil(noise * 2**bits * _MORE)
        return Grid(self.hessian_clip_norm, bits, self.hessian_batch_size, std)

    # A running Hessian.

    @property
    def hessian_change_rate(self) -> float:
        """Records of a tracked Hessian's change over hessian_lipschitz times distance."""
        if self.hessian_difference_rate is not None:
            return self.hessian_difference_rate
        return self.hessian_batch_size / min(self.hessian_clip_norm, self.smoothness)

    @property
    def hessian_drift_limit(self) -> float:
        """Largest norm that a tracked Hessian may reach before a refresh, in clips."""
        return _GROWTH

    @property
    def _matrix_bits(self) -> int:
        """Bits of a tracked Hessian's grid: one record's contribution is 2**bits units."""
        assert self.dim is not None
        if self.hessian_norm == "frobenius":
            return 16
        # The grid bounds the Frobenius norm, up to root d times the operator norm.
        return 16 - oracles.frobenius_bits(self.dim)

    @property
    def _product_unit(self) -> float:
        """Grid unit of the released products with a tracked Hessian."""
        assert self.escape_steps is not None
        one = self._moves * self.hessian_clip_norm / self.hessian_batch_size
        one *= self.escape_radius
        times = math.sqrt(self.escapes_per_refresh * (self.escape_steps - 1))
        # With twice what is rounded before: more than what this grid adds.
        rounded = self._noise * times * (1 + 4 * self._product_rounding / one)
        noise = 2 * max(self.escape_noise_std / one, rounded)
        largest = 2 * _GROWTH * self.hessian_batch_size
        bits = min(_bits("escape", noise), math.floor(30 - math.log2(largest)))
        return one * 2.0**-bits

    @property
    def _product_sensitivity(self) -> float:
        """L2 sensitivity of a product with a tracked Hessian, including float32 rounding.

        Sums are exact. The rounding of products depends on data, and is charged.
        """
        assert self.dim is not None
        move = self._moves * self.hessian_clip_norm / self.hessian_batch_size
        exact = move * self._on_grid * self.escape_radius * (1 + 1e-6)
        unit = math.sqrt(self.dim) * self._product_unit
        return exact + 2 * self._product_rounding + unit

    @property
    def _on_grid(self) -> float:
        """Factor by which the grid may enlarge the norm of a record's matrix."""
        assert self.dim is not None
        if self.hessian_norm == "frobenius":
            return 1.0
        return 1 + self.dim * 2.0**-self._matrix_bits

    @property
    def _product_rounding(self) -> float:
        """Bound on the float32 error of a product with a tracked Hessian, in L2."""
        assert self.dim is not None
        longest = _GROWTH * self.hessian_clip_norm * self._on_grid  # Of the sum.
        if self.hessian_norm == "operator":
            longest *= math.sqrt(self.dim)  # Its Frobenius norm.
        return (self.dim + 6) * _EPS * longest * self.escape_radius * (1 + 1e-6)

    @property
    def tracked_grid(self) -> TrackedGrid:
        """Grid of a tracked Hessian, and of the products with it."""
        unit = self._product_unit
        return TrackedGrid(
            self.hessian_norm,
            self._matrix_bits,
            self.hessian_clip_norm / self.hessian_batch_size,
            unit,
            math.ceil(self.escape_std / unit * _MORE),
        )


@functools.lru_cache(maxsize=64)
def _correlation(name: str, period: int) -> noises.PrefixNoise:
    return noises.make(name, period)


def _bits(name: str, noise_over_clip: float) -> int:
    """Returns the grid bits of one record's contribution, for noise of so many clips."""
    try:
        # Sums are of two words, so only those over a slice must fit into one; the largest
        # noise that is ever drawn must not wrap.
        return clip.grid_bits(stretch.MAX_SLICE, noise_over_clip, deviations=32)
    except ValueError as error:
        raise ValueError(
            f"noise_multiplier must be such that the noise on the sum of each {name} is at "
            f"most 2**18 of its clips, got {noise_over_clip:.4g} of them: ask for a larger "
            "epsilon, or less escape_noise_std"
        ) from error
