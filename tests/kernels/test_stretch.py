"""Sums over stretches whose place and length are traced, against plain NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.kernels import clip, stretch

N, D = 23, 3
DATA = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


def reference(
    data: np.ndarray, mask: np.ndarray, first: int, count: int, bound: float, bits: int
) -> np.ndarray:
    """The sum of the rows [first, first + count), each on the grid by itself: int64."""
    total = np.zeros(D, np.int64)
    for row, kept in list(zip(data, mask, strict=True))[first : first + count]:
        if kept:
            one = clip.to_grid(jnp.asarray(row)[None], jnp.ones(1, bool), bound, bits)
            total += np.asarray(one[0], np.int64)
    return total


def as_integers(total: stretch.Wide) -> np.ndarray:
    assert np.all((np.asarray(total.low) >= 0) & (np.asarray(total.low) < 2**16))
    return np.asarray(total.high, np.int64) * 2**16 + np.asarray(total.low, np.int64)


@jax.jit
def by_slices_of_5(data: Any, mask: Any, first: Any, count: Any) -> stretch.Wide:
    return stretch.grid_sum(
        jnp.tanh, D, data, mask, first, count, bound=0.7, bits=16, size=5
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, N),
    st.integers(0, N),
    st.lists(st.booleans(), min_size=N, max_size=N),
)
def test_sums_of_any_stretch(first: int, count: int, mask: list[bool]) -> None:
    count = min(count, N - first)
    kept = np.array(mask)
    got = by_slices_of_5(DATA, kept, jnp.int32(first), jnp.int32(count))
    want = reference(np.tanh(DATA), kept, first, count, 0.7, 16)
    # (tanh of one row and of several may differ in the last bit.)
    assert np.abs(as_integers(got) - want).max() <= 2 * count


def test_rows_outside_the_stretch_never_count() -> None:
    """Not even where the last slice begins before it, nor if they are NaN or huge."""
    for first, count in ((0, 1), (20, 3), (22, 1), (3, 17), (5, 0)):
        inside = np.zeros(N, bool)
        inside[first : first + count] = True
        wild = np.where(inside[:, None], DATA, np.nan)
        wild[::2] = np.where(inside[::2, None], wild[::2], 1e30)
        args = (np.ones(N, bool), jnp.int32(first), jnp.int32(count))
        for got, want in zip(
            by_slices_of_5(wild, *args), by_slices_of_5(DATA, *args), strict=True
        ):
            np.testing.assert_array_equal(got, want)


def test_every_row_is_read_once_in_order() -> None:
    def seen(carry: jax.Array, places: jax.Array, kept: jax.Array) -> jax.Array:
        return carry.at[jnp.where(kept, places, N)].add(1, mode="drop")

    places = jnp.arange(N)
    for size in (1, 4, 23):
        for first, count in ((0, 23), (7, 9), (19, 4), (0, 0)):
            times = stretch.fold(
                seen,
                jnp.zeros(N, jnp.int32),
                places,
                None,
                jnp.int32(first),
                jnp.int32(count),
                size,
            )
            want = (np.arange(N) >= first) & (np.arange(N) < first + count)
            np.testing.assert_array_equal(times, want.astype(int))


def test_the_length_costs_slices_and_is_not_compiled_in() -> None:
    """One program for all stretches; as many turns as the stretch has slices."""
    traced = 0

    @jax.jit
    def turns(first: jax.Array, count: jax.Array) -> jax.Array:
        nonlocal traced
        traced += 1
        step = lambda carry, rows, kept: carry + 1  # noqa: E731
        return stretch.fold(step, jnp.int32(0), DATA, None, first, count, 5)

    for count in range(N):
        assert turns(jnp.int32(0), jnp.int32(count)) == -(-count // 5)
    assert traced == 1


def test_wide_sums_are_exact() -> None:
    """Far beyond 32 bits, and below zero."""
    rng = np.random.default_rng(1)
    parts = rng.integers(-(2**31) + 2**17, 2**31 - 2**17, (300, 4))
    parts[:150, 0], parts[:, 1] = 2**31 - 2**17, -(2**31) + 2**17
    total, other = stretch.zero((4,)), stretch.zero((4,))
    for i, part in enumerate(parts):
        some = jnp.asarray(part, jnp.int32)
        if i % 3:
            total = stretch.add(total, some)
        else:
            other = stretch.add(other, some)
    both = stretch.plus(total, other)
    np.testing.assert_array_equal(as_integers(both), parts.sum(axis=0))
    np.testing.assert_allclose(stretch.to_float(both), parts.sum(axis=0), rtol=2e-7)


@pytest.mark.parametrize("size", [0, N + 1])
def test_slices_must_fit_the_rows(size: int) -> None:
    with pytest.raises(ValueError, match="size must be from 1 to the 23 rows"):
        stretch.fold(lambda c, r, k: c, 0, DATA, None, jnp.int32(0), jnp.int32(1), size)


def test_slices_must_fit_the_words() -> None:
    with pytest.raises(ValueError, match="size must be at most 16384"):
        stretch.grid_sum(
            lambda x: x,
            D,
            DATA,
            None,
            jnp.int32(0),
            jnp.int32(1),
            bound=1.0,
            bits=16,
            size=2**14 + 1,
        )


def test_a_length_that_is_known_when_traced() -> None:
    """XLA must not take the loop of one slice for one of none."""
    mask, zero = np.ones(N, bool), jnp.int32(0)
    for count in (0, 1, 5, 6, N):
        fixed = jax.jit(lambda d, c=count: by_slices_of_5(d, mask, zero, c))(DATA)
        traced = by_slices_of_5(DATA, mask, zero, jnp.int32(count))
        for got, want in zip(fixed, traced, strict=True):
            np.testing.assert_array_equal(got, want)
