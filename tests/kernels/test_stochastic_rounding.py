"""Rounding to 16 bits against a plain reference, also where it could go wrong."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdp.kernels import stochastic_rounding, threefry

FORMATS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
WORDS = np.random.default_rng(0).integers(0, 2**32, 400, np.uint32)
EDGES = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)


def all_finite(name: str) -> np.ndarray:
    """Every finite number of a format, in order, in float64."""
    every = np.arange(2**16, dtype=np.uint16).view(FORMATS[name])
    with np.errstate(invalid="ignore"):  # Of signalling NaNs.
        return np.unique(every[np.isfinite(every)].astype(np.float64))


def reference(x: np.ndarray, words: np.ndarray, name: str) -> np.ndarray:
    """Away from zero if word and share of the way, of a spacing, make a whole one."""
    known = all_finite(name)
    size = np.abs(x.astype(np.float64))
    at = np.searchsorted(known, size, side="right") - 1
    low, high = known[at], known[np.minimum(at + 1, len(known) - 1)]
    share = np.where(high > low, (size - low) / np.where(high > low, high - low, 1), 0)
    # As many bits of the word as the format leaves to float32; 24 where it is subnormal.
    kept = 23 - ml_dtypes.finfo(FORMATS[name]).nmant
    fixed = (name == "float16") & (size < 2.0**-14)
    used = np.where(fixed, 24, kept)
    word = np.floor(words / 2.0 ** (32 - used)) / 2.0**used
    # Their sum is made in float32 below the least normal number.
    total = np.where(fixed, (word.astype("f4") + share.astype("f4")), word + share)
    out = np.where(total >= 1, high, low)
    return np.copysign(out, x)


def numbers(name: str) -> np.ndarray:
    """Numbers of every size between the format's, and those that it represents."""
    rng = np.random.default_rng(1)
    most = float(ml_dtypes.finfo(FORMATS[name]).max)
    exponents = rng.uniform(-30, math.log2(most), 20_000)
    x = (2.0**exponents).astype(np.float32)
    if name == "float16":  # Also where it is subnormal.
        x[:5000] = rng.uniform(0, 2.0**-13, 5000)
    x = x[x <= most]
    return x * rng.choice(np.array([-1, 1], np.float32), x.size)


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_the_plain_rule(name: str) -> None:
    x = numbers(name)
    words = np.resize(WORDS, x.size)
    words[: 4 * EDGES.size] = np.resize(EDGES, 4 * EDGES.size)
    got = stochastic_rounding.to_dtype(jnp.asarray(x), jnp.asarray(words), name)
    assert got.dtype == name
    np.testing.assert_array_equal(
        np.asarray(got).astype(np.float64), reference(x, words, name)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_represented_stays(name: str) -> None:
    """All 2**16 patterns: zeros of both signs, subnormal ones, infinities; NaN is NaN."""
    every = np.arange(2**16, dtype=np.uint16).view(FORMATS[name])
    with np.errstate(invalid="ignore"):
        x = jnp.asarray(every.astype(np.float32))
    nan = np.isnan(np.asarray(x))
    for word in EDGES:
        words = jnp.full(x.shape, word)
        got = np.asarray(stochastic_rounding.to_dtype(x, words, name))
        assert (np.isnan(got.astype(np.float32)) == nan).all()
        same = got.view(np.uint16) == every.view(np.uint16)
        assert (same | nan).all()


@pytest.mark.parametrize("name", FORMATS)
def test_beyond_the_largest_number_it_rounds_to_nearest(name: str) -> None:
    info = ml_dtypes.finfo(FORMATS[name])
    most = float(info.max)
    spacing = 2.0 ** (math.floor(math.log2(most)) - info.nmant)
    x = np.float32([most + 0.49 * spacing, most + 0.5 * spacing, np.inf])
    for word in EDGES:
        words = jnp.full(6, word)
        both = jnp.asarray(np.concatenate([x, -x]))
        got = stochastic_rounding.to_dtype(both, words, name).astype(jnp.float32)
        want = np.float32([most, np.inf, np.inf])
        np.testing.assert_array_equal(got, np.concatenate([want, -want]))
    # Below it, it is never infinite.
    below = jnp.full(400, np.float32(most - 0.01 * spacing))
    got = stochastic_rounding.to_dtype(below, jnp.asarray(WORDS), name)
    assert bool(jnp.isfinite(got).all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("at", [1.0, -0.0173, 3e-5, 300.0])
def test_the_mean_is_right(name: str, at: float) -> None:
    """A mean of 2**18 roundings at a share p: 6 standard errors, 2e-9 for each of 16 cases.

    Probability below 1e-6 that any of the cases fails by chance.
    """
    num = 2**18
    x = np.asarray(at).astype(FORMATS[name]).astype(np.float32)
    up = np.nextafter(x.astype(FORMATS[name]), FORMATS[name](np.inf))
    spacing = np.float32(up) - x
    for share in (0.03, 0.4):
        update = np.float32(share) * spacing
        leaf = jnp.full(num, x).astype(name)
        key = threefry.fold_in(jax.random.key(0), int(100 * share))
        moved = stochastic_rounding.add(key, leaf, jnp.full(num, update))
        total = np.float32(x) + np.float32(update)
        p = (float(total) - float(x)) / float(spacing)
        mean = (np.asarray(moved).astype(np.float64) - float(x)).mean() / float(spacing)
        assert abs(mean - p) < 6 * math.sqrt(p * (1 - p) / num)


def test_bits_are_a_function_of_key_and_place() -> None:
    """Of the shape too only by places; two keys are independent."""
    key, other = jax.random.key(0), jax.random.key(1)
    x, u = jnp.ones(4096, jnp.bfloat16), jnp.full(4096, 2.0**-8)
    one = stochastic_rounding.add(key, x, u)
    same = stochastic_rounding.add(key, x.reshape(64, 64), u.reshape(64, 64))
    np.testing.assert_array_equal(one, same.reshape(-1))
    differ = float((one != stochastic_rounding.add(other, x, u)).mean())
    assert abs(differ - 0.5) < 0.05


def test_leaves_that_32_bits_do_not_count() -> None:
    big = jax.ShapeDtypeStruct((3, 2**15, 2**16), jnp.bfloat16)
    update = jax.ShapeDtypeStruct(big.shape, jnp.float32)
    out = jax.eval_shape(
        stochastic_rounding.add, jax.eval_shape(jax.random.key, 0), big, update
    )
    assert out.shape == big.shape and out.dtype == big.dtype


def test_wrong_dtypes() -> None:
    x, words = jnp.ones(2), jnp.zeros(2, jnp.uint32)
    with pytest.raises(TypeError, match="float32 and one of"):
        stochastic_rounding.to_dtype(x, words, jnp.float32)
    with pytest.raises(TypeError, match="float32 and one of"):
        stochastic_rounding.to_dtype(x.astype(jnp.float16), words, jnp.float16)
