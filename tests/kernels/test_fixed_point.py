"""Fixed point against Python's integers."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxdp.kernels import fixed_point

# Units of the last place, and fractions of 2**32.
EXTREMES = [0, 1, -1, 2**32, -(2**32), 2**63 - 1, -(2**63), 2**32 - 1, 1 - 2**32, 2**62]
FRACTIONS = [0, 1, 2, 2**16 - 1, 2**16, 2**31, 2**32 - 1]

WORDS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.lists(st.tuples(WORDS, WORDS), min_size=8, max_size=8)


def fixed(units: list[int]) -> fixed_point.Fixed:
    """From counts of units of the last place."""
    high = np.array([wrapped(u) >> 32 for u in units], np.int32)
    low = np.array([u % 2**32 for u in units], np.uint32)
    return fixed_point.Fixed(jnp.asarray(high), jnp.asarray(low))


def units(x: fixed_point.Fixed) -> list[int]:
    assert x.low is not None
    assert (x.high.dtype, x.low.dtype) == (jnp.int32, jnp.uint32)
    pairs = zip(np.asarray(x.high).tolist(), np.asarray(x.low).tolist(), strict=True)
    return [high * 2**32 + low for high, low in pairs]


def wrapped(u: int) -> int:
    """What 64 bits make of it."""
    return (u + 2**63) % 2**64 - 2**63


add, sub = jax.jit(fixed_point.add), jax.jit(fixed_point.sub)
scaled = jax.jit(fixed_point.scaled)


def check(pairs: list[tuple[int, int]], k: int) -> None:
    a, b = ([pair[i] for pair in pairs] for i in range(2))
    both = fixed(a), fixed(b)
    assert units(both[0]) == a
    assert units(add(*both)) == [wrapped(x + y) for x, y in pairs]
    assert units(sub(*both)) == [wrapped(x - y) for x, y in pairs]
    assert units(scaled(both[0], jnp.uint32(k))) == [x * k >> 32 for x in a]


@pytest.mark.parametrize("k", FRACTIONS)
def test_extremes(k: int) -> None:
    check([(a, b) for a in EXTREMES for b in EXTREMES], k)


@hypothesis.given(NUMBERS, st.integers(0, 2**32 - 1))
@hypothesis.settings(deadline=None, max_examples=200)
def test_any_numbers(pairs: list[tuple[int, int]], k: int) -> None:
    check(pairs, k)


def test_numbers_of_python_scale_too() -> None:
    x = fixed(EXTREMES)
    for k in (*FRACTIONS, 2**32):
        assert units(fixed_point.scaled(x, k)) == [u * k >> 32 for u in EXTREMES]
    with pytest.raises(ValueError, match="x must have a fraction"):
        fixed_point.scaled(fixed_point.Fixed(x.high), 3)


def test_integers_among_them() -> None:
    """A fraction that is not there is zero, and stays away where there is no other."""
    x, n = fixed(EXTREMES), jnp.arange(len(EXTREMES), dtype=jnp.int32)
    bare, whole = fixed_point.Fixed(n), fixed_point.from_int(n)
    for fn in (fixed_point.add, fixed_point.sub):
        assert units(fn(x, bare)) == units(fn(x, whole))
        assert units(fn(bare, x)) == units(fn(whole, x))
        assert fn(bare, bare).low is None
    np.testing.assert_array_equal(fixed_point.add(bare, bare).high, 2 * n)
    np.testing.assert_array_equal(
        fixed_point.sub(bare, fixed_point.Fixed(2 * n)).high, -n
    )


def test_numerators() -> None:
    for x, k in (
        (0, 0),
        (1, 2**32),
        (0.5, 2**31),
        (2.0**-33, 0),
        (1 - 2.0**-40, 2**32),
    ):
        assert fixed_point.numerator(x) == k
    assert fixed_point.numerator(0.7) == 3006477107  # 0.7 * 2**32 = 3006477107.2
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="a fraction must be in"):
            fixed_point.numerator(bad)


def test_floats() -> None:
    """Within two roundings; an integer that a float holds stays what it is."""
    random = np.random.default_rng(3)
    values = random.integers(-(2**56), 2**56, 1000).tolist()
    floats = np.asarray(fixed_point.to_float(fixed(values)), np.float64)
    assert floats.dtype == np.float64
    np.testing.assert_allclose(
        floats, np.array(values) * 2.0**-32, rtol=2**-22, atol=2**-22
    )
    n = jnp.array([-5, 0, 2**24], jnp.int32)
    for x in (fixed_point.Fixed(n), fixed_point.from_int(n)):
        assert fixed_point.to_float(x).dtype == jnp.float32
        np.testing.assert_array_equal(fixed_point.to_float(x), [-5, 0, 2**24])


def test_a_fixed_is_a_leaf_of_its_tree() -> None:
    tree = {"a": fixed([5, -7]), "b": (fixed([1]),)}
    total = fixed_point.tree_map(fixed_point.add, tree, tree)
    assert units(total["a"]) == [10, -14]
    assert units(total["b"][0]) == [2]
