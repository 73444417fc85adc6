r"""Curvature queries: records' Hessians, times a vector or whole, bounded and noised.

Three queries, of which a method uses one:

* :func:`release_product`: the mean over a stretch of records of Hessian-vector products,
  each clipped, plus noise. No matrix is ever formed.
* :func:`add_hessians` and :func:`release_tracked`: an exact running sum of clipped
  matrices, of which products with vectors are released, with noise. The sum itself is
  secret.
* :func:`release_matrix`: a mean of clipped matrices, released once, with noise in
  coordinates in which its Frobenius norm is the norm; all that follows is post-processing.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import release
from jaxdp.core.types import Grid
from jaxdp.kernels import stretch
from jaxdp.kernels.finite_difference import over_records
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.sosp.gradients import Loss, Records

#: Which query a plan uses: products, products with a running sum, or whole matrices.
Hessian = Literal["on_demand", "tracked", "released"]
HESSIANS: tuple[Hessian, ...] = get_args(Hessian)
#: Norm of one record's matrix that is bounded.
HessianNorm = Literal["operator", "frobenius"]
HESSIAN_NORMS: tuple[HessianNorm, ...] = get_args(HessianNorm)

#: Bits of one record's product.
RECORD_BITS = 16
#: How much shorter than the radius a vector may count as: by a factor of 2**12.
MAX_HALVINGS = 12
#: Squarings by which a matrix's operator norm is bounded: to within d**(1 / 64).
_SQUARINGS = 5
#: Above what float32 makes of that bound.
_SLACK = 1 + 1e-4


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


def halvings(grid: ProductGrid, length: jax.Array) -> jax.Array:
    """Counts the halvings of the radius that leave it at least ``length``: int32.

    The count is at most :data:`MAX_HALVINGS`.
    """
    shorter = grid.radius * 0.5 ** np.arange(1, MAX_HALVINGS + 1)
    return (length <= jnp.asarray(shorter, jnp.float32)).sum(dtype=jnp.int32)


def reach(grid: ProductGrid, times: jax.Array) -> jax.Array:
    """Returns the radius after ``times`` halvings: the length that a vector counts as."""
    return jnp.float32(grid.radius) * jnp.exp2(-times.astype(jnp.float32))


def release_product(
    grid: ProductGrid,
    loss: Loss,
    point: jax.Array,
    vector: jax.Array,
    times: jax.Array,
    records: Records,
    noise: Fixed,
) -> jax.Array:
    """Releases the mean of clipped Hessian-vector products plus noise.

    Each record's product is put on a grid of 2**-16 of its bound, which is as fine as the
    vector is short: curvature of any size moves it. Where the noise is large, float32 has
    not so many digits for it, so the exact sum is rounded, once, to the grid of the noise.

    Args:
      grid: bounds and noise.
      loss: of one record.
      point: float32 (d,), where the Hessians are.
      vector: float32 (d,).
      times: int32, shape=(), of :func:`halvings`; public.
      records: the stretch; none give noise alone.
      noise: integers (d,), in units of the grid; secret.

    Returns:
      float32 (d,): released. One record moves it by the clip times (``reach`` and
      ``grid.rounding``) over the normalizer (for replace-one, twice that).
    """
    point, vector = records.on_each(point, vector)

    def products(some: Any) -> jax.Array:
        def product(record: Any) -> jax.Array:
            gradient = lambda at: jax.grad(loss)(at, record)  # noqa: E731
            return jax.jvp(gradient, (point,), (vector,))[1]

        return over_records(product)(some)

    bound = grid.l2_clip_norm * reach(grid, times)
    fine = Grid(bound, RECORD_BITS, grid.normalizer, 0)
    total = release.bounded_stretch(fine, products, point.size, *records)
    coarse = stretch.shifted(total, RECORD_BITS - grid.bits + times)
    released = Grid(
        grid.l2_clip_norm * grid.radius, grid.bits, grid.normalizer, grid.noise_std
    )
    return release.noised_mean(released, coarse, noise)


def hessians(loss: Loss, point: jax.Array, some: Any) -> jax.Array:
    """Computes the Hessians of records at one point, float32 (B, d, d)."""
    return over_records(jax.hessian(loss), in_axes=(None, 0))(point, some)


def add_hessians(
    grid: TrackedGrid,
    loss: Loss,
    total: stretch.Wide,
    point: jax.Array,
    reference: jax.Array | None,
    records: Records,
) -> stretch.Wide:
    """Adds clipped Hessians of a stretch, or their changes, to a running sum: secret.

    Args:
      grid: how they are clipped and counted.
      loss: of one record.
      total: integers (d * d,), in units of ``grid.unit``.
      point: float32 (d,).
      reference: float32 (d,): the change from there is taken. None: the Hessian itself.
      records: the stretch. Its mean of matrices is added, each bounded so that one record
        moves the sum by ``grid.record_move`` (twice that if replaced), whatever their
        number.

    Returns:
      The exact sum: every record's integers have a norm of at most ``2**bits``, plus d
      for the operator norm (rounding towards zero).
    """
    dim = point.size
    at = records.on_each(point, *([] if reference is None else [reference]))

    def rows(some: Any) -> jax.Array:
        found = hessians(loss, at[0], some)
        if reference is not None:
            found -= hessians(loss, at[1], some)
        return found.reshape(-1, dim * dim)

    def within(some: Any) -> jax.Array:
        found = operator_clipped(rows(some).reshape(-1, dim, dim), limit)
        return found.reshape(-1, dim * dim)

    limit = jnp.float32(grid.record_move) * records.count.astype(jnp.float32)
    rows_of, bits, bound = rows, grid.bits, limit
    if grid.norm == "operator":
        # The grid's own bound is on the Frobenius norm, which may be larger.
        wide = frobenius_bits(dim)
        rows_of, bits, bound = within, grid.bits + wide, limit * 2.0**wide
    one, small = Grid(bound, bits, 1.0, 0), _in_parts(records, dim)
    return stretch.plus(total, release.bounded_stretch(one, rows_of, dim**2, *small))


def _in_parts(records: Records, dim: int) -> Records:
    """Returns records that are read few at once, for each has ``dim**2`` numbers."""
    return records._replace(size=min(records.size, max(1, 2**20 // dim**2)))


def frobenius_bits(dim: int) -> int:
    """Bounds log2 of the ratio of Frobenius norm to operator norm by an integer."""
    return math.ceil(math.log2(max(dim, 1)) / 2)


def operator_clipped(matrices: jax.Array, bound: float | jax.Array) -> jax.Array:
    """Scales matrices (B, d, d) to an operator norm of at most ``bound``.

    By an upper bound on the norm that is at most d**(1 / 64) too large: the Frobenius norm
    of a high power of the matrix, to that power's root. (An estimate by power iteration
    would be a lower bound, and certify nothing.) Matrices with a NaN or an infinity, and
    those of which float32 does not hold the norm, are zero.
    """
    both = (matrices + matrices.swapaxes(1, 2)) / 2
    ok = jnp.isfinite(both).all(axis=(1, 2), keepdims=True)
    safe = jnp.where(ok, both, 0)
    norm = operator_bound(safe)[:, None, None]
    limit = jnp.asarray(bound, jnp.float32)
    # What passes has been compared: a norm that is NaN would keep nothing.
    return jnp.where(norm <= limit, safe, safe * (limit / jnp.maximum(norm, limit)))


def operator_slack(dim: int) -> float:
    """Bounds the factor by which :func:`operator_bound` exceeds the operator norm."""
    return dim ** (1 / 2 ** (_SQUARINGS + 1)) * _SLACK**2


def operator_bound(matrices: jax.Array) -> jax.Array:
    """Computes upper bounds (B,) on operator norms of symmetric matrices (B, d, d)."""
    peak = jnp.max(jnp.abs(matrices), axis=(1, 2), initial=0)
    # The inverse of a number near the largest is subnormal, and flushed to zero on CPU.
    scale = jnp.minimum(peak, 1 / jnp.finfo(jnp.float32).tiny)
    power = matrices / jnp.where(peak > 0, scale, 1)[:, None, None]
    log_norm = jnp.log(scale)  # -inf, for a matrix of zeros
    for i in range(_SQUARINGS + 1):
        if i:
            power = jnp.matmul(power, power, precision="highest")
        norm = jnp.sqrt(jnp.sum(power**2, axis=(1, 2)))
        norm = jnp.where(peak > 0, norm, 1)
        power /= norm[:, None, None]
        log_norm += jnp.log(norm) / 2**i
    return jnp.exp(log_norm) * _SLACK


def frozen(grid: TrackedGrid, total: stretch.Wide, dim: int) -> jax.Array:
    """Returns the mean Hessian of a running sum, float32 (d, d): secret."""
    return (stretch.to_float(total) * jnp.float32(grid.unit)).reshape(dim, dim)


def release_tracked(
    grid: TrackedGrid, hessian: jax.Array, vector: jax.Array, noise: Fixed
) -> jax.Array:
    """Releases a product of a running sum with a vector, plus noise, on a grid.

    Args:
      grid: of the product: ``product_unit`` and the noise. What float32 makes of the
        product is in the plan's sensitivity.
      hessian: float32 (d, d), of :func:`frozen`; secret.
      vector: float32 (d,), shorter than the plan's escape radius.
      noise: integers (d,), in units of the grid; secret.

    Returns:
      float32 (d,): released.
    """
    product = jnp.matmul(hessian, vector, precision="highest")
    units = jnp.round(product * jnp.float32(1 / grid.product_unit))
    # As integers: a float sum would round what depends on data before the noise hides it.
    products = Grid(grid.product_unit, 0, 1.0, grid.noise_std)
    return release.noised_mean(products, units.astype(jnp.int32), noise)


def release_matrix(
    grid: Grid, loss: Loss, point: jax.Array, records: Records, noise: Fixed
) -> jax.Array:
    """Releases the mean of clipped Hessians plus symmetric noise.

    Args:
      grid: its clip bounds the Frobenius norm of one record's Hessian.
      loss: of one record.
      point: float32 (d,).
      records: the stretch.
      noise: integers (d (d + 1) / 2,), in grid units; secret.

    Returns:
      float32 (d, d), symmetric: released. The coordinates are the diagonal and the upper
      triangle times the root of 2, in which lengths are Frobenius norms: one record moves
      them by the clip over the normalizer (twice that if replaced).
    """
    dim = point.size
    (point,) = records.on_each(point)
    upper = np.triu_indices(dim)
    scale = np.where(upper[0] == upper[1], 1, math.sqrt(2)).astype(np.float32)

    def rows(some: Any) -> jax.Array:
        return hessians(loss, point, some)[:, upper[0], upper[1]] * scale

    small = _in_parts(records, dim)
    total = release.bounded_stretch(grid, rows, len(scale), *small)
    flat = release.noised_mean(grid, total, noise) * (1 / scale)
    half = jnp.zeros((dim, dim), jnp.float32).at[upper].set(flat)
    return half + half.T - jnp.diag(jnp.diag(half))
