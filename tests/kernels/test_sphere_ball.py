"""The law ``ball``: uniform in the ball of radius sqrt(d), over a whole pytree."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp.kernels import perturb, sphere, threefry

KEY = jax.random.key(11)
COUNT = 40_000
# Tests of laws fail by chance with probability 1e-7 each, under 1e-6 together.
CHANCE = 1e-7
TREE = {"a": (2,), "b": (3, 1)}
LIKES: dict[str, dict[str, tuple[int, ...]]] = {
    "d = 1": {"x": (1,)},
    "d = 2": {"x": (2,)},
    "d = 5": {"x": (5,)},
    "two leaves": TREE,
}


@functools.cache
def sample(name: str, law: str = "ball", dtype: Any = jnp.float32) -> np.ndarray:
    """COUNT independent points of the unit ball: float64 (COUNT, d)."""
    like = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in LIKES[name].items()}

    def draw(key: jax.Array) -> jax.Array:
        one = sphere.select(sphere.directions(key, like, law=law), 0)
        leaves = jax.tree.leaves(sphere.materialise(one, like))
        return jnp.concatenate([x.reshape(-1) for x in leaves])

    keys = jax.random.split(KEY, COUNT)
    rows = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
    return rows / math.sqrt(rows.shape[1])


def check_mean(draws: np.ndarray, expected: np.ndarray | float) -> None:
    """Mean over the first axis, within 6 standard errors: 2e-9 by chance."""
    error = draws.std(axis=0) / math.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - expected) <= 6 * error)


def pvalue(draws: np.ndarray, law: Any) -> float:
    return float(scipy.stats.kstest(draws, law).pvalue)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("d = 1", "two leaves")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in LIKES
    ],
)
def test_the_law(name: str) -> None:
    """P(|b| <= r) = r^d; a coordinate is a shifted beta; moments; never outside."""
    b = sample(name)
    d = b.shape[1]
    radius = np.linalg.norm(b, axis=1)
    assert radius.max() <= 1 + 1e-6
    assert pvalue(radius**d, "uniform") > CHANCE
    half = scipy.stats.beta((d + 1) / 2, (d + 1) / 2).cdf
    for i in range(d):
        assert pvalue((1 + b[:, i]) / 2, half) > CHANCE
    check_mean(b, 0)
    check_mean(radius**2, d / (d + 2))
    check_mean(np.einsum("ni,nj->nij", b, b), np.eye(d) / (d + 2))


def test_other_laws_are_told_apart() -> None:
    """Another radius, another d, and a ball for each leaf instead of one over the tree."""
    radius = np.linalg.norm(sample("two leaves", "gaussian"), axis=1)
    assert pvalue(radius**5, "uniform") < CHANCE
    first = np.linalg.norm(sample("two leaves")[:, :2], axis=1)
    assert pvalue(first**2, "uniform") < CHANCE
    radius = np.linalg.norm(sample("two leaves"), axis=1)
    assert pvalue(radius**4, "uniform") < CHANCE


def test_parameters_of_16_bits_change_nothing() -> None:
    np.testing.assert_array_equal(
        sample("two leaves", dtype=jnp.bfloat16), sample("two leaves")
    )


def test_against_a_plain_implementation() -> None:
    """sqrt(d) u^(1/d) z / |z| in float64, from the words of the same keys."""
    like = {k: jnp.zeros(s) for k, s in TREE.items()}
    rows = sphere.directions(KEY, like, law="ball", num=3)
    got = jax.jit(jax.vmap(lambda one: sphere.materialise(one, like)))(rows)
    fold = jax.random.fold_in
    for k in range(3):
        key = fold(KEY, k)
        z = {
            path: np.asarray(threefry.normal(fold(key, sphere.leaf_id(path)), shape))
            for path, shape in TREE.items()
        }
        squares = sum(np.sum(np.square(x.astype(np.float64))) for x in z.values())
        word = threefry.bits(fold(key, sphere.leaf_id("radius of the ball")), ())
        radius = math.sqrt(5) * ((int(word) + 1) / 2**32) ** (1 / 5)
        for path, x in z.items():
            expected = radius * x / math.sqrt(squares)
            np.testing.assert_allclose(got[path][k], expected, rtol=2e-6)


def test_same_bits_beside_any_number_of_others() -> None:
    """A record's point does not depend on the batch.

    In more elements than XLA adds in one order whatever is beside them.
    """
    like = {"a": jnp.zeros((64, 10)), "b": jnp.zeros(10)}

    def point(key: jax.Array) -> jax.Array:
        one = sphere.select(sphere.directions(key, like, law="ball"), 0)
        moved = perturb.perturb(like, one, jnp.float32(0.3))
        return jnp.concatenate([x.reshape(-1) for x in moved.values()])

    keys = jax.random.split(KEY, 37)
    beside = jax.jit(jax.vmap(point))(keys)
    one_by_one = jax.jit(lambda keys: jax.lax.map(point, keys))(keys)
    np.testing.assert_array_equal(beside, one_by_one)
