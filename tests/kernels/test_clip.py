"""Clipping: finite-safe, and integers whose bound holds exactly."""

import functools
import math
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

from jaxdp.kernels import clip, lattice_gaussian, sphere
from jaxdp.kernels import finite_difference as fd

settings = hypothesis.settings(
    derandomize=True, database=None, deadline=None, max_examples=120
)
FLOATS = st.floats(width=32) | st.sampled_from(
    [3.4e38, -3e38, 1.2e38, 9e37, 1e19, -1e-30, 1e-38, 1e-45, 1.0, -1.0, 0.0]
).map(lambda v: float(np.float32(v)))
# Powers of two and others; 1e-3 is rounded up in float32, 0.1 too.
BOUNDS = st.sampled_from([1e-30, 1e-3, 0.1, 1.0, 2.5, 1e6, 1e30])
# Slack of a float32 norm: a few roundings of 6e-8 each.
SLACK = 1e-6


def rows_strategy(width: int, count: int = 4) -> Any:
    return hnp.arrays(np.float32, (count, width), elements=FLOATS)


def reference(x: np.ndarray, bound: float) -> np.ndarray:
    """Rows clipped in float64; a row that is not finite is zero."""
    x = x.astype(np.float64)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        norm = np.linalg.norm(x, axis=-1, keepdims=True)
        clipped = np.where(norm > bound, x * (bound / norm), x)
    finite = np.isfinite(x).all(axis=-1, keepdims=True)
    return np.where(finite, clipped, 0)


clip_scalar = jax.jit(clip.clip_scalar)
clip_vector = jax.jit(clip.clip_vector, static_argnames="order")
to_grid = jax.jit(clip.to_grid, static_argnums=3, static_argnames=("order", "limit"))
grid_sum = jax.jit(clip.grid_sum, static_argnums=3, static_argnames=("order", "limit"))
_within = jax.jit(clip._within, static_argnums=1)


def within(*parts: Any, limit: int) -> jax.Array:
    """Asks whether rows, the parts of which are given, are within the limit."""
    return _within([jnp.atleast_2d(part) for part in parts], limit)


def in_parts(rows: Any) -> dict[str, Any]:
    """Returns rows in three parts, of which one has two axes besides, and one none."""
    head = (rows.shape[1] - 1) // 2 // 2 * 2
    return {
        "head": rows[:, :head].reshape(len(rows), 2, -1),
        "middle": rows[:, head:-1],
        "last": rows[:, -1],
    }


# --- floats ---


@settings
@hypothesis.given(x=rows_strategy(3), bound=BOUNDS | st.just(math.inf))
def test_clip_vector_against_numpy(x: np.ndarray, bound: float) -> None:
    """Bound, direction, and rows inside it untouched; non-finite rows are zero."""
    out = np.asarray(clip_vector(x, bound))
    expected = reference(x, bound)
    norms = np.linalg.norm(out.astype(np.float64), axis=1)
    assert np.isfinite(out).all()
    assert np.all(norms <= bound * (1 + SLACK))
    # Subnormal numbers, and 1e-37 of the row's largest, are flushed on some devices.
    atol = 1e-36 * max(1, min(bound, 1e30))
    np.testing.assert_allclose(out, expected, rtol=SLACK, atol=atol)
    inside = np.linalg.norm(x.astype(np.float64), axis=1) < bound * (1 - SLACK)
    tiny = abs(x[inside]) < 2e-38
    np.testing.assert_array_equal(np.where(tiny, 0, out[inside]), x[inside] * ~tiny)


@settings
@hypothesis.given(x=rows_strategy(3), bound=BOUNDS)
def test_clipping_again_changes_nothing(x: np.ndarray, bound: float) -> None:
    once = np.asarray(clip_vector(x, bound))
    again = np.asarray(clip_vector(once, bound))
    np.testing.assert_allclose(again, once, rtol=4e-7, atol=1e-36 * max(1, bound))


@settings
@hypothesis.given(x=rows_strategy(3), bound=BOUNDS | st.just(math.inf))
def test_clip_scalar_against_numpy(x: np.ndarray, bound: float) -> None:
    out = np.asarray(clip_scalar(x, bound))
    limit = np.float32(bound)
    expected = np.where(np.isfinite(x), np.clip(x, -limit, limit), 0)
    np.testing.assert_array_equal(
        np.where(abs(x) < 2e-38, 0, out), expected * ~(abs(x) < 2e-38)
    )
    assert np.all(abs(out) <= limit)  # not an ulp more


def test_a_record_with_a_nan_is_zero_in_all_elements_and_alone() -> None:
    x = np.repeat(np.array([[1, 1, 2, 2, 2, 2]], np.float32), 3, axis=0)
    x[1, 0], x[2, 5] = np.nan, -np.inf
    np.testing.assert_array_equal(clip_vector(x, 1e3).sum(axis=1), [10, 0, 0])


@pytest.mark.parametrize("batch_ndim", [0, 1, 2])
def test_records_lie_in_the_leading_axes(batch_ndim: int) -> None:
    x = np.arange(24, dtype=np.float32).reshape(*(2, 3)[:batch_ndim], -1) - 7
    out = clip_vector(x, 5.0)
    flat = x.reshape(math.prod(x.shape[:batch_ndim]), -1)
    np.testing.assert_allclose(
        out, reference(flat, 5.0).reshape(x.shape), rtol=SLACK, atol=1e-6
    )


def test_values_near_the_largest_float_are_clipped() -> None:
    """Their inverse is subnormal; where that is flushed, the row looks like zeros."""
    x = np.array([[3e38, 3e38], [1e38, 1e10], [3.4e38, 0], [0, -9e37]], np.float32)
    for bound in (1e-3, 1.0, 1e3):
        out = np.asarray(clip_vector(x, bound), np.float64)
        np.testing.assert_allclose(np.linalg.norm(out, axis=1), bound, rtol=SLACK)
        np.testing.assert_allclose(out[0, 0], bound / math.sqrt(2), rtol=SLACK)


def test_float64_beyond_float32_is_clipped() -> None:
    with jax.enable_x64(True):
        x = np.array([[1e300, 1e300], [1e-300, 0.0], [3.0, 4.0], [np.inf, 0.0]])
        out = np.asarray(clip_vector(x, 1.0))
    expected = [[0.5**0.5, 0.5**0.5], [1e-300, 0], [0.6, 0.8], [0, 0]]
    np.testing.assert_allclose(out, expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_clipped_by_its_float32_norm(dtype: Any) -> None:
    """A float16 norm overflows at 65504; a bfloat16 one has three digits."""
    largest = float(jnp.finfo(dtype).max)
    x = jnp.array([[largest] * 300, [0.001] * 300, [jnp.nan] * 300], dtype)
    out = clip_vector(x, 1.0)
    assert out.dtype == dtype
    norms = np.linalg.norm(np.asarray(out, np.float64), axis=1)
    np.testing.assert_allclose(norms[0], 1, rtol=float(jnp.finfo(dtype).eps))
    np.testing.assert_array_equal(out[1], x[1])
    assert norms[2] == 0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0, 1)])
def test_no_records_or_no_numbers(shape: tuple[int, int]) -> None:
    x = jnp.zeros(shape)
    assert clip_vector(x, 1.0).shape == shape
    total = grid_sum(x, jnp.ones(shape[0], bool), 1.0, 16)
    np.testing.assert_array_equal(total, np.zeros(shape[1], np.int32), strict=True)


# --- integers ---


def python_norms(c: np.ndarray) -> list[int]:
    """Squared norms of integer rows, in Python's integers."""
    return [sum(int(v) ** 2 for v in row) for row in c]


@settings
@hypothesis.given(
    x=rows_strategy(3),
    mask=hnp.arrays(bool, 4),
    bound=BOUNDS,
    bits=st.sampled_from([8, 13, 16]),
)
def test_grid_against_numpy(
    x: np.ndarray, mask: np.ndarray, bound: float, bits: int
) -> None:
    """Exact bound, rounded towards zero, within one unit; masked rows are zero."""
    c = np.asarray(to_grid(x, mask, bound, bits))
    assert c.dtype == np.int32
    assert max(python_norms(c)) <= 4**bits
    exact = np.where(mask[:, None], reference(x, bound), 0) * (2.0**bits / bound)
    assert np.all(abs(c) <= abs(exact) + 1e-2)
    assert np.all(abs(c) >= abs(exact) - 1.5)
    assert np.all((c == 0) | (np.sign(c) == np.sign(exact)))


@settings
@hypothesis.given(
    x=rows_strategy(1), mask=hnp.arrays(bool, 4), bound=BOUNDS, bits=st.just(16)
)
def test_one_number_reaches_the_bound(
    x: np.ndarray, mask: np.ndarray, bound: float, bits: int
) -> None:
    c = np.asarray(to_grid(x, mask, bound, bits))
    exact = np.where(mask[:, None], reference(x, bound), 0) * (2.0**bits / bound)
    assert np.all(abs(c) <= 2**bits)
    assert np.all(abs(c - exact) <= 0.5 + 1e-2)
    beyond = mask[:, None] & np.isfinite(x) & (abs(x) > bound * (1 + SLACK))
    assert np.all(abs(c[beyond]) == 2**bits)


def test_one_number_is_rounded_to_nearest() -> None:
    x = np.random.default_rng(5).uniform(-1, 1, size=(5000, 1)).astype(np.float32)
    c = np.asarray(to_grid(x, np.ones(len(x), bool), 1.0, 12))
    np.testing.assert_array_equal(c, np.round(x.astype(np.float64) * 2**12))


def test_integers_are_verified_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the float clip a per mille too long, rows beyond 2^k would still be 0."""
    monkeypatch.setattr(clip, "_MARGIN", 1.001)
    x = np.random.default_rng(6).normal(scale=100, size=(1000, 4)).astype(np.float32)
    # A function of its own, so that no trace with the right margin is reused.
    run = jax.jit(lambda x, mask: clip.to_grid(x, mask, 1.0, 16))
    c = run(x, np.ones(len(x), bool))
    norms = python_norms(np.asarray(c))
    assert max(norms) <= 2**32
    assert min(norms) == 0


def test_rows_that_a_float_clip_lets_through() -> None:
    """Integer pairs barely outside 2^16, such as (4402, 65388): norm^2 = 2^32 + 852."""
    a = np.arange(1, 2**16)
    b = np.floor(np.sqrt(2.0**32 - a**2)).astype(np.int64) + 1
    rows = np.stack([a, b], axis=1)
    square = np.square(rows).sum(axis=1)
    rows = rows[(square > 2**32) & (square < 2**32 + 1000)]
    assert [4402, 65388] in rows.tolist()
    assert len(rows) > 300
    x = (rows / 65536).astype(np.float32)  # exact
    # What a clip followed by truncation gives, without margin and check.
    naive = np.trunc(np.asarray(clip_vector(x, 1.0)) * 65536).astype(np.int64)
    assert max(python_norms(naive)) > 2**32
    c = np.asarray(to_grid(x, np.ones(len(x), bool), 1.0, 16))
    assert max(python_norms(c)) <= 2**32
    assert min(python_norms(c)) >= (2**16 - 2) ** 2  # no row is dropped
    # The same directions at many magnitudes.
    scales = np.exp(np.random.default_rng(0).uniform(0, 60, size=(500, 1, 1)))
    many = (x * scales).astype(np.float32).reshape(-1, 2)
    c = np.asarray(to_grid(many, np.ones(len(many), bool), 1.0, 16), np.int64)
    assert np.square(c).sum(axis=1).max() <= 2**32
    assert np.square(c).sum(axis=1).min() >= (2**16 - 2) ** 2


@pytest.mark.parametrize(("width", "count"), [(2, 100_000), (3, 50_000), (64, 3000)])
@pytest.mark.parametrize("bits", [8, 16])
def test_exact_bound_on_random_rows(width: int, count: int, bits: int) -> None:
    """No row exceeds 2^k, and no finite row is dropped by the check."""
    generator = np.random.default_rng(width)
    x = generator.normal(size=(count, width))
    x *= np.exp(generator.uniform(-1, 20, size=(count, 1)))
    x = x.astype(np.float32)
    bound = 0.7
    c = np.asarray(to_grid(x, np.ones(count, bool), bound, bits), np.int64)
    norms = np.square(c).sum(axis=1)
    assert norms.max() <= 4**bits
    beyond = np.linalg.norm(x.astype(np.float64), axis=1) > bound
    assert np.sqrt(norms[beyond].min()) >= 2**bits - math.sqrt(width) - 1


@pytest.mark.parametrize("width", [1, 2, 7, 64])
@pytest.mark.parametrize("bits", [8, 16])
def test_exact_bound_in_l1(width: int, bits: int) -> None:
    """No row exceeds 2^k, none is dropped, and none within the bound is shortened."""
    generator = np.random.default_rng(width)
    x = generator.normal(size=(20_000, width))
    x *= np.exp(generator.uniform(-6, 20, size=(len(x), 1)))
    x, bound, mask = x.astype(np.float32), 0.7, np.arange(len(x)) % 5 > 0
    c = np.asarray(to_grid(x, mask, bound, bits, order=1), np.int64)
    norms = np.abs(c).sum(axis=1)
    assert norms.max() <= 2**bits
    assert not c[~mask].any()
    true = np.abs(x.astype(np.float64)).sum(axis=1)
    beyond = mask & (true > bound)
    # Truncation takes less than a unit from each number, the margin 2**-18 of all.
    assert norms[beyond].min() >= 2**bits - width - 1
    inside = mask & (true <= 0.99 * bound)
    error = np.abs(c[inside] - x[inside] * (2**bits / bound))
    assert error.max() <= 1.0001


@pytest.mark.parametrize(
    ("width", "order"),
    [
        *((1, 2), (3, 1), (64, 2)),
        *(
            pytest.param(width, order, marks=pytest.mark.slow)
            for width, order in ((1, 1), (3, 2), (64, 1))
        ),
    ],
)
def test_a_limit_below_the_grid_is_the_bound(width: int, order: int) -> None:
    """The bound is so many units: none above, none dropped, none within it shortened."""
    generator = np.random.default_rng(width)
    x = generator.normal(size=(5000, width))
    x *= np.exp(generator.uniform(-6, 20, size=(len(x), 1)))
    x, bound, mask = x.astype(np.float32), 0.7, np.arange(len(x)) % 5 > 0
    true = np.linalg.norm(x.astype(np.float64), axis=1, ord=order)
    beyond = mask & (true > bound * (1 + SLACK))
    inside = mask & (true <= 0.99 * bound)
    for limit in (40_001, 301):
        c = np.asarray(to_grid(x, mask, bound, 16, order=order, limit=limit), np.int64)
        norms = np.abs(c).sum(axis=1) if order == 1 else np.square(c).sum(axis=1)
        assert norms.max() <= limit**order
        assert not c[~mask].any()
        lost = width if order == 1 else math.sqrt(width)
        least = norms[beyond].min() ** (1 / order)
        assert least == limit if width == 1 else least >= limit - lost - 1
        exact = x[inside].astype(np.float64) * (limit / bound)
        assert np.abs(c[inside] - exact).max() <= (0.51 if width == 1 else 1.0001)
    total = grid_sum(x, mask, bound, 16, order=order, limit=301)
    np.testing.assert_array_equal(total, c.sum(axis=0))


def test_l1_integers_are_verified_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip, "_MARGIN", 1.01)
    x = np.random.default_rng(6).normal(scale=100, size=(1000, 4)).astype(np.float32)
    run = jax.jit(lambda x, mask: clip.to_grid(x, mask, 1.0, 16, order=1))
    norms = np.abs(np.asarray(run(x, np.ones(len(x), bool)))).sum(axis=1)
    assert norms.max() <= 2**16
    assert norms.min() == 0


def test_l1_rows_are_limited_to_what_int32_can_sum() -> None:
    with pytest.raises(ValueError, match="2\\*\\*15 columns"):
        clip.to_grid(jnp.ones((1, 2**15 + 1)), jnp.ones(1, bool), 1.0, 16, order=1)


@settings
@hypothesis.given(x=rows_strategy(3), bound=BOUNDS | st.just(math.inf))
def test_clip_in_l1_against_numpy(x: np.ndarray, bound: float) -> None:
    out = np.asarray(clip_vector(x, bound, order=1))
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        norm = np.abs(wide).sum(axis=-1, keepdims=True)
        expected = np.where(norm > bound, wide * (bound / norm), wide)
    expected = np.where(np.isfinite(wide).all(axis=-1, keepdims=True), expected, 0)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-37)


def test_long_rows_are_not_dropped() -> None:
    """A float32 norm of 200 000 numbers is accurate enough for the margin."""
    generator = np.random.default_rng(1)
    x = np.stack([generator.normal(size=200_000), np.full(200_000, 3.0)])
    c = to_grid(x.astype(np.float32), np.ones(2, bool), 1.0, 16)
    norms = np.sqrt(np.square(np.asarray(c, np.int64)).sum(axis=1))
    assert max(norms) <= 65536
    # Truncation takes half a unit from each of 200 000 numbers of about 150 units.
    assert min(norms) > 65536 * 0.99


def with_norm(square: int, length: int) -> np.ndarray:
    """Integers below 2^16 whose squares sum to exactly ``square``."""
    out = np.zeros(length, np.int64)
    head = length - 12
    out[:head] = math.isqrt(square // length)
    left = square - head * math.isqrt(square // length) ** 2
    for j in range(head, length):
        out[j] = min(math.isqrt(left), 2**16 - 1)
        left -= int(out[j]) ** 2
    assert left == 0
    return out


@pytest.mark.parametrize("length", [12, 2**16, 150_000, 65_537])
def test_within_is_exact(length: int) -> None:
    """At the limit, one below and one above; at any number of 16-bit limbs."""
    for limit in (2**8, 301, 40_001, 2**16 - 1, 2**16):
        squares = [limit**2 - 1, limit**2, limit**2 + 1]
        rows = np.stack([with_norm(s, length) for s in squares])
        assert list(np.square(rows).sum(axis=1)) == squares
        whole = jnp.asarray(rows, jnp.int32)
        for parts in ([whole], list(in_parts(whole).values())):
            got = _within(parts, limit)
            np.testing.assert_array_equal(got, [True, True, False])


@settings
@hypothesis.given(
    c=hnp.arrays(np.int32, (4, 3), elements=st.integers(0, 2**16 - 1)),
    limit=st.sampled_from([2**8, 2**15 - 7, 2**15, 60_001, 2**16]),
)
def test_within_against_python_integers(c: np.ndarray, limit: int) -> None:
    expected = [n <= limit**2 for n in python_norms(c)]
    np.testing.assert_array_equal(within(c, limit=limit), expected)


def test_within_does_not_overflow_on_long_rows_of_large_numbers() -> None:
    """Far above the bound, and at it with more than 2^32 in the low limbs alone."""
    assert not within(jnp.full(200, 2**16 - 1), limit=2**16)
    assert within(jnp.full(2**16, 2**8), limit=2**16)
    assert 66_051 * 255**2 < 2**32 < 66_052 * 255**2
    assert not within(jnp.full(66_052, 255), limit=2**16)
    assert not within(jnp.full(66_000, 255), jnp.full(52, 255), limit=2**16)


@pytest.mark.parametrize("order", [1, 2])
def test_rows_in_parts_are_clipped_as_whole_ones(order: int) -> None:
    """Of dyadic numbers, whose norms are exact in any order; other parts bring a NaN.

    Of the others up to a unit in the last place of a norm: then one grid unit.
    """
    generator = np.random.default_rng(5)
    x = generator.integers(-8, 9, (6, 30)).astype(np.float32) / 4
    x[:, 5] = 2  # The largest, by which norms are scaled: a power of two.
    x[1] *= 128
    x[2, -1], x[3, 0] = np.nan, np.inf
    mask = np.arange(6) != 4
    how: dict[str, Any] = {"order": order}
    for exact, rows in ((True, x), (False, x * generator.uniform(size=x.shape))):
        rows = rows.astype(np.float32)
        for bound in (0.5, 4.0, 1e4):
            clipped = clip_vector(in_parts(rows), bound, **how)
            units = to_grid(in_parts(rows), mask, bound, 12, **how)
            whole = (
                clip_vector(rows, bound, **how),
                to_grid(rows, mask, bound, 12, **how),
            )
            for parts, expected, atol in (
                (clipped, whole[0], 1e-5),
                (units, whole[1], 1),
            ):
                each = [parts[name].reshape(6, -1) for name in in_parts(rows)]
                found = np.concatenate(each, axis=1)
                atol = 0 if exact else atol
                np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
            assert not np.any(np.asarray(whole[1])[[2, 3, 4]])
            assert np.any(np.asarray(whole[1])[1])
            total = grid_sum(in_parts(rows), mask, bound, 12, **how)
            chex.assert_trees_all_equal(total, {k: v.sum(0) for k, v in units.items()})


# --- sums ---


@pytest.mark.parametrize("width", [1, 3])
def test_sums_do_not_depend_on_the_order(width: int) -> None:
    x = np.random.default_rng(2).standard_cauchy((1000, width)).astype(np.float32)
    mask = np.arange(1000) % 3 > 0
    total = grid_sum(x, mask, 1.0, 16)
    assert total.dtype == jnp.int32
    order = np.random.default_rng(3).permutation(1000)
    np.testing.assert_array_equal(grid_sum(x[order], mask[order], 1.0, 16), total)
    np.testing.assert_array_equal(
        np.asarray(to_grid(x[mask], np.ones(mask.sum(), bool), 1.0, 16)).sum(0), total
    )
    none = grid_sum(np.full_like(x, np.nan), np.zeros(1000, bool), 1.0, 16)
    np.testing.assert_array_equal(none, np.zeros(width))


def test_sensitivity_is_attained_exactly() -> None:
    """f_i = s_i M v.x: a flipped sign moves the sum by 2^(k+1), zeroing by 2^k."""
    v = jnp.array([1.0, -2.0, 0.5])
    rows = sphere.directions(jax.random.key(3), v, law="sphere")

    def loss(x: jax.Array, signs: jax.Array) -> jax.Array:
        return signs * (1e6 * (v @ x))

    @jax.jit
    def table(signs: jax.Array) -> jax.Array:
        return fd.slopes(loss, jnp.zeros(3), signs, rows, smoothing_radius=1e-2)

    def total(slopes: np.ndarray, bits: int) -> int:
        return int(grid_sum(slopes, np.ones(6, bool), 0.3, bits)[0])

    def with_third(value: float) -> np.ndarray:
        signs = np.array([1, -1, value, 1, -1, 1], np.float32)
        return np.asarray(table(jnp.asarray(signs)))

    start, others = with_third(1), np.arange(6) != 2
    for bits in (8, 16):
        assert abs(total(start, bits)) == 2 * 2**bits
        moved = [total(with_third(s), bits) - total(start, bits) for s in (-1, 0)]
        assert [abs(m) for m in moved] == [2 ** (bits + 1), 2**bits]
        for bad in (np.nan, np.inf, -np.inf):  # as if it were zero
            slopes = with_third(bad)
            assert total(slopes, bits) - total(start, bits) == moved[1]
            np.testing.assert_array_equal(slopes[others], start[others])


def test_no_overflow_at_40_000_records() -> None:
    """All at the bound, at zero noise and at the noise of a demanding plan."""
    for noise in (0.0, 400.0, 2e4):
        bits = clip.grid_bits(40_000, noise)
        x = np.full((40_000, 1), 1e30, np.float32)
        total = int(grid_sum(x, np.ones(len(x), bool), 1.0, bits)[0])
        assert total == 40_000 * 2**bits
        assert total + 8 * noise * 2**bits < 2**31


@settings
@hypothesis.given(rows=st.integers(1, 10**7), noise=st.floats(0, 1e6))
def test_grid_bits(rows: int, noise: float) -> None:
    """The most bits, up to 16, at which the sum and 8 deviations fit an int32.

    The noise is then within what the sampler draws, in every case.
    """
    ulp = 1 + 1e-12  # of a logarithm in float64

    def fits(bits: int) -> bool:
        return (rows + 8 * noise) * 2**bits <= (2**31 - 1) * ulp

    possible = [bits for bits in range(17) if fits(bits)]
    if max(possible, default=0) < 8:
        with pytest.raises(ValueError, match=f"^{rows} records a step.*at least 8"):
            clip.grid_bits(rows, noise)
    else:
        bits = clip.grid_bits(rows, noise)
        assert bits == max(possible)
        assert round(noise * 2**bits) <= lattice_gaussian.MAX_STD


@pytest.mark.parametrize(
    ("rows", "noise", "bits"),
    [
        (1437, 100.0, 16),
        (32767, 0.0, 16),
        (32768, 0.0, 15),  # 2^15 records at 2^16 would be 2^31: one too many
        (40_000, 0.0, 15),
        (40_000, 5000.0, 14),
        (100, 2.0**6, 16),  # 2^22 units of noise: more than a float32 could carry
        (100, 4083.0, 16),
        (100, 4084.0, 15),  # 100 + 8 * 4084 > 2^15
        (100, 2.0**20 - 100, 8),
    ],
)
def test_grid_bits_by_hand(rows: int, noise: float, bits: int) -> None:
    assert clip.grid_bits(rows, noise) == bits


def test_heavier_tails_ask_for_more_room() -> None:
    assert clip.grid_bits(40_000, 5000.0, deviations=32) == 13
    assert clip.grid_bits(40_000, 0.0, deviations=32) == 15


def test_grid_of_slopes_round_trips() -> None:
    """Clipped mean in float64 against the integers: an error of half a unit a record."""
    x = np.random.default_rng(4).normal(size=(500, 1)).astype(np.float32)
    bound, mask = 0.9, np.ones(500, bool)
    total = functools.partial(grid_sum, x, mask, bound)(16)
    got = float(total[0]) * bound / (2**16 * 500)
    exact = reference(x, bound).mean()
    assert abs(got - exact) < bound * 2**-17 + 1e-7
