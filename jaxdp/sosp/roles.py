"""Numbers that the methods read: those of three roles that share the data, and limits.

A refresh, a difference and what is asked of Hessians are a role each: a Gaussian mechanism
of one noise multiplier over its own exact sensitivity. One record moves a sum by so many
clips (``moves``): 2 under replace-one, else 1.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from jaxdp import accounting
from jaxdp.core.types import Grid, Run
from jaxdp.kernels import clip, stretch
from jaxdp.kernels.prefix_noise import PrefixNoise
from jaxdp.mechanism import sums
from jaxdp.sosp import hessian
from jaxdp.sosp.hessian import Hessian, HessianNorm, ProductGrid, TrackedGrid

#: A little more noise, for what float32 rounds in the numbers of a grid, and for what
#: fixed point rounds in correlated noise.
_MORE = 1 + 5e-6
#: How long a running Hessian may get, in clips, before a refresh.
GROWTH = 4.0
_EPS = 2.0**-24  # float32's rounding


class Role(NamedTuple):
    """Sensitivity, noise and grid of one role."""

    sensitivity: float  # in L2, of the mean; or of all products that a record serves in
    noise_std: (
        float  # of a coordinate; of correlated noise, the largest in the estimate
    )
    grid: Any  # a Grid or a TrackedGrid
    node_std: float = 0.0  # of one node's noise, where it is correlated


def mean(
    name: str, noise_multiplier: float, moves: float, clip_norm: float, rows: int
) -> Role:
    """Computes the role of means of clipped vectors, or of matrices."""
    sensitivity = moves * clip_norm / rows
    noise = noise_multiplier * moves
    bits = grid_bits(name, noise)
    grid = Grid(clip_norm, bits, rows, accounting.integer_std(noise * 2**bits * _MORE))
    return Role(sensitivity, noise_multiplier * sensitivity, grid)


def differences(
    noise_multiplier: float, moves: float, rate: float, correlation: PrefixNoise
) -> Role:
    """Computes the role of mean changes, of which one record's is at most 1 / ``rate``."""
    longest = float(correlation.column_norms().max())
    sensitivity = moves / rate
    node_std = noise_multiplier * sensitivity * longest
    noise_std = node_std * float(correlation.prefix_norms().max())
    node = noise_multiplier * moves * longest
    bits = grid_bits("difference", node * correlation.largest_norm())
    std = accounting.integer_std(node * 2**bits * _MORE)
    sums.check_fine(correlation, std, noise_multiplier)
    return Role(sensitivity, noise_std, Grid(1 / rate, bits, 1.0, std), node_std)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
    """Role of an escape's products with means of Hessians of its own records."""

    noise_multiplier: float
    moves: float
    clip_norm: float  # bound on one record's product with a unit vector
    rows: int  # records of the mean
    radius: float  # longest vector
    times: int  # products that one record serves in
    least_std: float  # of the noise
    filtered: bool  # products are counted by what they cost; the noise is the least one

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of all products; with the filter the limit that it keeps."""
        if self.filtered:
            noise = self.noise_multiplier
            return self.least_std / noise if noise else 0.0
        move = self.moves * self.clip_norm / self.rows
        return move * self.radius * math.sqrt(self.times)

    @property
    def noise_std(self) -> float:
        """Standard deviation of a coordinate's noise in a product."""
        return max(self.least_std, self.noise_multiplier * self.sensitivity)

    @property
    def budget(self) -> float:
        """Limit on an escape's sum of squared lengths; infinite without the filter."""
        if not (self.filtered and self.noise_multiplier):
            return math.inf
        move = self.moves * self.clip_norm / self.rows
        # Less by what float32 may lose in the sum.
        kept = max(0.0, 1 - 1e-5 - 2 * (self.times + 1) * _EPS)
        return (self.least_std / (move * self.noise_multiplier)) ** 2 * kept

    def grid(self, dim: int) -> ProductGrid:
        """Returns the grid of the means of products in ``dim`` dimensions.

        Exact sums are rounded down to the grid of the noise, each coordinate by less than
        a unit: a record moves them by up to root d units more than it does itself.
        """
        clip_norm, rows, radius = self.clip_norm, self.rows, self.radius
        noise = self.noise_std * rows / (clip_norm * radius)
        bits = grid_bits("escape", noise)
        rounding = math.sqrt(dim) * 2.0**-bits / self.moves
        if not self.filtered:
            exact = self.noise_multiplier * self.sensitivity * rows
            noise = max(noise, exact / (clip_norm * radius) * (1 + rounding))
        std = accounting.integer_std(noise * 2**bits * _MORE)
        return ProductGrid(clip_norm, radius, bits, rows, std, rounding * radius)


def tracked(
    norm: HessianNorm,
    dim: int,
    *,
    noise_multiplier: float,
    moves: float,
    clip_norm: float,
    rows: int,
    radius: float,
    times: int,
    least_std: float,
) -> Role:
    """Computes the role of products with a running Hessian, of matrices of bounded norm.

    Sums are exact. What is rounded in products depends on data, and is charged: by
    float32, whose error in L2 is bounded, and to the grid of the products.
    """
    bits, on_grid = 16, 1.0  # of a record; how much longer the grid may make its matrix
    longest = GROWTH * clip_norm  # Frobenius norm of the sum
    if norm == "operator":
        # The grid bounds the Frobenius norm, up to root d times the operator norm.
        bits -= hessian.frobenius_bits(dim)
        on_grid += dim * 2.0**-bits
        longest = longest * on_grid * math.sqrt(dim)
    rounding = (dim + 6) * _EPS * longest * radius * (1 + 1e-6)
    move, often = moves * clip_norm / rows, math.sqrt(times)
    one = move * radius
    # With twice what is rounded before: more than what this grid adds.
    rounded = noise_multiplier * often * (1 + 4 * rounding / one)
    fine = grid_bits("escape", 2 * max(least_std / one, rounded))
    unit = one * 2.0 ** -min(fine, math.floor(30 - math.log2(2 * GROWTH * rows)))
    exact = move * on_grid * radius * (1 + 1e-6)
    sensitivity = (exact + 2 * rounding + math.sqrt(dim) * unit) * often
    noise_std = max(least_std, noise_multiplier * sensitivity)
    std = accounting.integer_std(noise_std / unit * _MORE)
    grid = TrackedGrid(norm, bits, clip_norm / rows, unit, std)
    return Role(sensitivity, noise_std, grid)


class Roles(NamedTuple):
    """Roles of a plan."""

    refresh: Role
    difference: Role
    hessian: Any  # Products on demand, else a Role; None: no escapes


class SOSPNumbers(NamedTuple):
    """Numbers that ``sosp`` and ``private_spider`` read; see ``jaxdp.plans.SOSP``."""

    run: Run
    roles: Roles
    correlation: PrefixNoise  # of differences
    num_passes: int
    noise_multiplier: float
    smoothness: float
    refresh_batch_size: int
    difference_batch_rate: float
    difference_batch_size: int | None
    drift_limit: float
    max_differences: int
    dim: int | None
    trigger_norm: float
    escape_steps: int | None
    escape_radius: float
    hessian: Hessian
    hessian_batch_size: int
    hessian_clip_norm: float
    hessian_lipschitz: float | None
    hessian_difference_rate: float | None
    escapes_per_refresh: int
    curvature_threshold: float | None
    query_in_escape: bool
    stop_at_certificate: bool

    @property
    def tracks(self) -> bool:
        """True if a running Hessian is kept."""
        return self.hessian == "tracked" and self.escape_steps is not None

    @property
    def step_size(self) -> np.float32:
        """Step along a gradient: 1 / smoothness.

        A factor, as are other constants of a search: XLA turns a division by a constant
        that it sees into a product. On a mesh it may not see it, and would round otherwise.
        """
        return np.float32(1 / self.smoothness)

    @property
    def own_batch(self) -> int:
        """Number of records of an escape's own Hessians."""
        return 0 if self.hessian == "tracked" else self.hessian_batch_size

    @property
    def change_rate(self) -> float:
        """Records of a tracked Hessian's change over smoothness times the way."""
        assert self.hessian_lipschitz is not None
        rate = self.hessian_difference_rate
        if rate is None:
            rate = self.hessian_batch_size / min(
                self.hessian_clip_norm, self.smoothness
            )
        return rate * self.hessian_lipschitz / self.smoothness


def grid_bits(name: str, noise_over_clip: float) -> int:
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
