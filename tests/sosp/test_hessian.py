"""Gradients, their changes and Hessians over stretches: bounds, noise, plain references."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp.core.types import Grid
from jaxdp.kernels import lattice_gaussian, stretch, threefry
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.sosp import gradients as grad_diff
from jaxdp.sosp import hessian
from jaxdp.sosp.gradients import Records
from jaxdp.sosp.hessian import ProductGrid, TrackedGrid

N, D = 12, 4
RNG = np.random.default_rng(0)
#: Each record is a symmetric matrix A; its loss is x A x / 2, plus a cubic term.
MATRICES = RNG.normal(size=(N, D, D)).astype(np.float32)
MATRICES = (MATRICES + MATRICES.swapaxes(1, 2)) / 2
POINT, OTHER = RNG.normal(size=(2, D)).astype(np.float32)
FIRST, COUNT = 3, 7
ZERO = np.zeros(D, np.float32)
#: No noise, in units of a grid.
NONE = Fixed(jnp.zeros(D, jnp.int32))


def loss(x: jax.Array, a: jax.Array) -> jax.Array:
    return x @ a @ x / 2 + jnp.sum(x**3) * a[0, 0] / 6


def gradients(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return a @ x + a[:, :1, 0] * x**2 / 2


def matrices(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    return a + a[:, 0, 0][:, None, None] * np.diag(x)


def records(data: Any = MATRICES, count: int = COUNT) -> Records:
    return Records(jnp.asarray(data), None, jnp.int32(FIRST), jnp.int32(count), 4)


def clipped(rows: np.ndarray, bound: float) -> np.ndarray:
    """Plain L2 clip of rows; those with a NaN are zero."""
    rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0)
    norm = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return rows * np.minimum(1, bound / np.maximum(norm, 1e-30))


def spoiled(by: float = np.nan) -> np.ndarray:
    data = MATRICES.copy()
    data[FIRST + 2] = by
    return data


GRADIENT = Grid(1.5, 16, COUNT, 0)


@pytest.mark.parametrize("data", [MATRICES, spoiled(), spoiled(np.inf), spoiled(1e20)])
def test_a_refresh_is_the_mean_of_clipped_gradients(data: np.ndarray) -> None:
    got = grad_diff.release_gradient(
        GRADIENT, loss, jnp.asarray(POINT), records(data), NONE
    )
    rows = gradients(POINT, data)[FIRST : FIRST + COUNT]
    want = clipped(rows, 1.5).sum(axis=0) / COUNT
    np.testing.assert_allclose(got, want, atol=2 * 1.5 * 2**-16)


def test_a_difference_is_the_mean_of_clipped_changes() -> None:
    """One record moves it by the grid's clip, whatever the number of records."""
    grid = Grid(0.2, 16, 1.0, 0)
    release = jax.jit(
        lambda data, count: grad_diff.release_difference(
            grid, loss, POINT, OTHER, records(data)._replace(count=count), NONE
        )
    )
    for count in (1, 2, 7):
        stretch_ = slice(FIRST, FIRST + count)
        rows = (gradients(POINT, MATRICES) - gradients(OTHER, MATRICES))[stretch_]
        want = clipped(rows, 0.2 * count).sum(axis=0) / count
        got = release(MATRICES, count)
        np.testing.assert_allclose(got, want, atol=2 * 0.2 * 2**-16 * count)
        # Two arrays: what a program was given must not be changed before it is done.
        wild, opposite = MATRICES.copy(), MATRICES.copy()
        wild[FIRST] = 1e6 * np.eye(D)
        opposite[FIRST] = -1e6 * np.eye(D)
        far, near = (np.asarray(release(data, count)) for data in (wild, opposite))
        moved = np.linalg.norm(far - near)
        assert 0.399 < moved <= 0.4 * (1 + 1e-6)


@pytest.mark.parametrize("length", [2.0, 0.5, 1e-3])
@pytest.mark.parametrize("bits", [16, 11])
def test_products_are_means_of_clipped_ones(length: float, bits: int) -> None:
    grid = ProductGrid(1.1, 2.0, bits, COUNT, 3, 0.0)
    v = np.float32(length) * OTHER / np.linalg.norm(OTHER)
    times = hessian.halvings(grid, jnp.float32(length))
    reach = float(hessian.reach(grid, times))
    assert length <= reach < 2 * length and int(times) == round(np.log2(2 / reach))
    release = jax.jit(
        lambda data, count, noise: hessian.release_product(
            grid, loss, POINT, v, times, records(data)._replace(count=count), noise
        )
    )
    data = spoiled()
    rows = np.einsum("nij,j->ni", matrices(POINT, data), v)[FIRST : FIRST + COUNT]
    want = clipped(rows, 1.1 * reach).sum(axis=0) / COUNT
    # Records are as fine as the vector is short; the sum is rounded once.
    fine, unit = 1.1 * reach * 2**-16, 1.1 * 2.0 * 2**-bits / COUNT
    got = release(data, COUNT, NONE)
    np.testing.assert_allclose(got, want, atol=2 * fine + unit)
    # Noise has one unit, whatever the vector: that of the longest one's product.
    drawn = np.array([3, -1, 2**19, -(2**18)], np.int32)
    noise = release(data, 0, Fixed(jnp.asarray(drawn)))
    np.testing.assert_array_equal(np.round(np.asarray(noise, np.float64) / unit), drawn)
    # It is added to the sum as an integer: nothing of either is rounded.
    both = np.asarray(release(data, COUNT, Fixed(jnp.asarray(drawn))), np.float64)
    alone = np.round(np.asarray(got, np.float64) / unit)
    np.testing.assert_array_equal(np.round(both / unit), alone + drawn)
    # No records: nothing of the data.
    np.testing.assert_array_equal(release(spoiled(1e9), 0, NONE), ZERO)


def test_small_curvature_is_not_rounded_away() -> None:
    """A thousandth of the bound, on a grid of which a record is a fraction of a unit."""
    grid = ProductGrid(1.0, 1.0, 9, 200, 0, 0.0)
    many = np.broadcast_to(-1e-3 * np.eye(D, dtype=np.float32), (200, D, D))
    data = Records(jnp.asarray(many), None, jnp.int32(0), jnp.int32(200), 50)
    v = jnp.asarray([0.1, 0.01, -0.1, 0.0])
    got = hessian.release_product(
        grid,
        loss,
        jnp.zeros(D),
        v,
        hessian.halvings(grid, jnp.float32(0.15)),
        data,
        NONE,
    )
    np.testing.assert_allclose(got, -1e-3 * v, atol=2.0**-9 / 200)
    assert abs(float(got[0]) + 1e-4) < 2e-5


def norms(a: np.ndarray) -> np.ndarray:
    return np.abs(np.linalg.eigvalsh(a.astype(np.float64))).max(axis=-1)


@pytest.mark.parametrize("dim", [1, 2, 7, 40])
def test_operator_bounds_are_upper_and_tight(dim: int) -> None:
    rng = np.random.default_rng(dim)
    random = rng.normal(size=(20, dim, dim))
    vectors = rng.normal(size=(20, dim))
    cases = [
        random + random.swapaxes(1, 2),
        vectors[:, :, None] * vectors[:, None],  # rank one
        np.broadcast_to(np.eye(dim), (1, dim, dim)),  # all eigenvalues alike
        1e-20 * (random + random.swapaxes(1, 2)),
        1e18 * (random + random.swapaxes(1, 2)),
        np.zeros((1, dim, dim)),
    ]
    for case in cases:
        got = np.asarray(hessian.operator_bound(jnp.asarray(case, jnp.float32)))
        true = norms(case)
        assert np.all(got >= true)
        assert np.all(got <= true * hessian.operator_slack(dim))


def test_operator_clip() -> None:
    got = hessian.operator_clipped(jnp.asarray(spoiled()), 1.0)
    assert np.all(norms(np.asarray(got)) <= 1)
    assert not np.any(got[FIRST + 2])
    small = MATRICES / np.float32(norms(MATRICES).max() * 1.1)
    np.testing.assert_array_equal(hessian.operator_clipped(small, 1.0), small)


@pytest.mark.parametrize("dim", [1, 2, 17])
@pytest.mark.parametrize("value", [8.4e37, 8.6e37, 1.6e38, 3.3e38, -1.6e38])
def test_entries_near_the_largest_float_are_clipped(value: float, dim: int) -> None:
    """Whose inverse is subnormal: zero on a CPU, with which they would pass unclipped."""
    one = np.zeros((dim, dim), np.float32)
    one[0, 0] = value
    full = np.full((dim, dim), value, np.float32)
    for case in (one, full):
        both = jnp.asarray(np.stack([case, np.eye(dim, dtype=np.float32)]))
        found = hessian.operator_bound(both)
        assert not np.isnan(found).any()
        if norms(case) < 1e38:
            assert found[0] >= norms(case)
        got = np.asarray(hessian.operator_clipped(both, 0.5))
        assert np.isfinite(got).all() and np.all(norms(got) <= 0.5)
        assert norms(got[1]) > 0.4


def tracked_grid(norm: str) -> TrackedGrid:
    bits = 16 if norm == "frobenius" else 15
    return TrackedGrid(norm, bits, 1.3 / COUNT, 2.0**-12, 5)


@pytest.mark.parametrize("norm", ["operator", "frobenius"])
def test_a_running_hessian(norm: str) -> None:
    """The mean at one point, then its change to another, over other records."""
    grid = tracked_grid(norm)
    start = stretch.zero((D * D,))
    add = jax.jit(
        lambda data, total, count, other: hessian.add_hessians(
            grid,
            loss,
            total,
            POINT,
            other,
            records(data)._replace(count=count),
        ),
    )
    bound = 1.3

    def limited(found: np.ndarray, limit: float) -> np.ndarray:
        if norm == "frobenius":
            return clipped(found.reshape(-1, D * D), limit).reshape(found.shape)
        return np.asarray(hessian.operator_clipped(jnp.asarray(found), limit))

    data = spoiled()
    fresh = hessian.add_hessians(grid, loss, start, POINT, None, records(data))
    found = limited(matrices(POINT, data)[FIRST : FIRST + COUNT], bound)
    want = found.sum(axis=0) / COUNT
    got = hessian.frozen(grid, fresh, D)
    np.testing.assert_allclose(got, want, atol=2 * COUNT * grid.unit)
    assert np.abs(want - matrices(POINT, MATRICES).mean(axis=0)).max() > 0.01
    both = add(data, fresh, 2, OTHER)
    change = matrices(POINT, data) - matrices(OTHER, data)
    change = limited(change[FIRST : FIRST + 2], 2 * bound / COUNT)
    want = want + change.sum(axis=0) / 2
    got = hessian.frozen(grid, both, D)
    np.testing.assert_allclose(got, want, atol=4 * COUNT * grid.unit)


@pytest.mark.parametrize("norm", ["operator", "frobenius"])
@pytest.mark.parametrize("other", [None, OTHER])
def test_one_record_moves_a_running_hessian_by_its_bound(norm: str, other: Any) -> None:
    grid = tracked_grid(norm)

    def mean(value: float) -> np.ndarray:
        data = MATRICES.copy()
        data[FIRST + 1] = value * np.outer(OTHER, OTHER)
        total = hessian.add_hessians(
            grid, loss, stretch.zero((D * D,)), POINT, other, records(data)
        )
        return np.asarray(hessian.frozen(grid, total, D), np.float64)

    apart = mean(1e6) - mean(-1e6)
    # COUNT records: the clip grows with them, and the mean is over them.
    most = 2 * grid.record_move * (1 + D * 2.0**-grid.bits)
    size = norms(apart) if norm == "operator" else np.linalg.norm(apart)
    assert 0.9 * most < size <= most * (1 + 1e-6)


def test_tracked_products_lie_on_a_grid() -> None:
    grid = tracked_grid("operator")
    v = OTHER / np.float32(3)
    matrix = jnp.asarray(MATRICES[0])
    noise = np.array([0, 7, -1, -(2**19)], np.int32)
    drawn = Fixed(jnp.asarray(noise))
    got = np.asarray(hessian.release_tracked(grid, matrix, v, drawn), np.float64)
    units = got / grid.product_unit
    np.testing.assert_array_equal(units, np.round(units))
    want = MATRICES[0] @ v / grid.product_unit
    assert np.abs(units - noise - want).max() <= 0.501
    alone = hessian.release_tracked(grid, matrix, v, NONE)
    without = np.asarray(alone, np.float64) / grid.product_unit
    np.testing.assert_array_equal(units, without + noise)


def test_a_released_hessian_is_the_mean_of_clipped_ones() -> None:
    grid = Grid(2.0, 16, COUNT, 0)
    none = Fixed(jnp.zeros(D * (D + 1) // 2, jnp.int32))
    data = spoiled()
    got = hessian.release_matrix(grid, loss, POINT, records(data), none)
    flat = matrices(POINT, data)[FIRST : FIRST + COUNT].reshape(-1, D * D)
    want = clipped(flat, 2.0).sum(axis=0).reshape(D, D) / COUNT
    np.testing.assert_allclose(got, want, atol=2 * COUNT * 2.0 * 2**-16 / COUNT)
    np.testing.assert_array_equal(got, np.asarray(got).T)


def test_a_matrix_of_unknown_norm_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "operator_bound", lambda x: jnp.full(len(x), jnp.nan))
    found = hessian.operator_clipped(jnp.ones((2, D, D)), 1.0)
    assert not jnp.isfinite(found).any()  # A grid counts it as zero.


def test_noise_of_a_released_hessian_is_isotropic() -> None:
    """Its Frobenius product with any matrix of norm 1 is a standard normal.

    Variances of 4000 draws each: outside by chance less than 1e-6 in all.
    """
    grid = Grid(2.0, 8, 1.0, 64)
    count, draws = D * (D + 1) // 2, 4000
    key = threefry.secret_key(np.array([2, 7, 1, 8], np.uint32))
    law = lattice_gaussian.law(64)
    noise = Fixed(lattice_gaussian.draw(key, (draws, count), law))
    release = jax.jit(
        jax.vmap(
            lambda z: hessian.release_matrix(
                grid, loss, POINT, records()._replace(count=jnp.int32(0)), z
            )
        )
    )
    drawn = np.asarray(release(noise), np.float64) / (64 * 2.0 * 2**-8)
    low, high = scipy.stats.chi2.ppf([2e-8, 1 - 2e-8], draws) / draws
    for i in range(D):
        for j in range(i, D):
            unit = np.zeros((D, D))
            unit[i, j] = unit[j, i] = 1 if i == j else np.sqrt(0.5)
            variance = np.mean(np.einsum("nij,ij->n", drawn, unit) ** 2)
            assert low < variance < high
