"""Vectors with leaves apart: their elements and noise are those of the whole vector."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.kernels import lattice_gaussian, node_noise, parts, prefix_noise, threefry
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.kernels.node_noise import Section

KEY = threefry.secret_key(np.arange(4, dtype=np.uint32))
SHAPES = {"a": (3,), "b": (2, 5), "c": (2, 5), "d": (0,), "e": (), "f": (4, 2, 3)}
TREE = {
    "layers": {k: jnp.full(SHAPES[k], ord(k) * 1.0) for k in "abcd"},
    "top": {k: jnp.full(SHAPES[k], ord(k) * 1.0) for k in "ef"},
    "still": jnp.ones(7),
}
APARTS: list[dict[str, Any]] = [
    {},
    {"layers/b": 1},
    {"layers/b": 1, "layers/c": 1, "top/f": 2},
    {"layers/b": 1, "layers/c": 2, "still": 1},
    {f"layers/{k}": 0 for k in "abcd"} | {f"top/{k}": 0 for k in "ef"},
]
each_apart = pytest.mark.parametrize("apart", APARTS)


def moves(path: str) -> bool:
    return path != "still"


def rows_of(tree: Any) -> Any:
    """Three rows, whose elements are all different."""
    sizes = [x.size for x in jax.tree.leaves(tree)]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    leaves, structure = jax.tree.flatten(tree)

    def row(begin: int, leaf: Any, r: int) -> Any:
        own = np.arange(begin, begin + leaf.size) + 1000 * r
        return jnp.asarray(own.reshape(leaf.shape), jnp.float32)

    return structure.unflatten(
        jnp.stack([row(b, x, r) for r in range(3)])
        for b, x in zip(begins, leaves, strict=False)
    )


def put_together(vector: Any, apart: Any) -> np.ndarray:
    """Returns the elements of a vector in the order of the leaves: the plain reference."""
    if not isinstance(vector, parts.Parts):
        return np.asarray(vector)
    joined, at, found = vector.joined, 0, []
    for path, x in jax.tree_util.tree_leaves_with_path(TREE):
        name = "/".join(key.key for key in path)
        if not moves(name):
            continue
        if name in apart:
            own = vector.apart
            for key in path:
                own = own[key.key]
            found.append(np.asarray(own).reshape(-1))
        else:
            found.append(np.asarray(joined[at : at + x.size]))
            at += x.size
    return np.concatenate(found)


@each_apart
def test_a_vector_in_parts_has_the_elements_of_the_whole(apart: Any) -> None:
    tree = rows_of(TREE)
    whole, vector = parts.split(tree, moves), parts.split(tree, moves, apart)
    assert isinstance(vector, parts.Parts) == bool(set(apart) - {"still"})
    for r in range(3):
        row = jax.tree.map(lambda x, r=r: x[r], vector)
        np.testing.assert_array_equal(put_together(row, apart), whole[r])
        back = parts.join(row, TREE, moves)
        want = jax.tree.map(lambda x, r=r: x[r], tree)
        want["still"] = jnp.zeros(7)
        chex.assert_trees_all_equal(back, want)
    if isinstance(vector, parts.Parts):
        assert vector.apart["still"] is None
        shapes = [x.shape[1:] for x in jax.tree.leaves(vector.apart)]
        assert shapes == [SHAPES[p[-1]] for p in sorted(apart) if p != "still"]


@each_apart
def test_sections_are_where_their_elements_lie(apart: Any) -> None:
    found = parts.sections(TREE, moves, apart)
    index = jax.tree.map(Section.index, found)
    size = sum(math.prod(shape) for shape in SHAPES.values())
    np.testing.assert_array_equal(put_together(index, apart), np.arange(size))
    shapes = jax.tree.map(lambda section, at: section.shape == at.shape, found, index)
    assert all(jax.tree.leaves(shapes))


@each_apart
@pytest.mark.parametrize("name", ["plain", *prefix_noise.NAMES])
def test_noise_of_parts_is_that_of_the_whole_vector(
    name: str, apart: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two elements share it, and none has another than on a single device.

    Drawn in a loop, too, as many parts of one shape are.
    """
    assert_noise_is_the_whole_vectors(name, apart)
    monkeypatch.setattr(node_noise, "_WRITTEN_OUT", 1)
    assert_noise_is_the_whole_vectors(name, apart)


def assert_noise_is_the_whole_vectors(name: str, apart: Any) -> None:
    like, whole = parts.sections(TREE, moves, apart), parts.sections(TREE, moves)
    if name == "plain":
        law = lattice_gaussian.law(500)
        step = node_noise.as_step(3)
        one, many = (node_noise.draw(KEY, step, x, law) for x in (whole, like))
        np.testing.assert_array_equal(put_together(many, apart), one)
        assert len(np.unique(one)) > 30
        return
    kernel = prefix_noise.make(name, period=4)
    laws = kernel.laws(500)
    states = [kernel.init(x) for x in (whole, like)]
    for step in range(4):
        (one, states[0]), (many, states[1]) = (
            kernel.increment(KEY, state, step, x, laws)
            for state, x in zip(states, (whole, like), strict=True)
        )
        for word in range(1 if kernel.integral else 2):
            fixed = lambda x: isinstance(x, Fixed)  # noqa: E731
            picked = jax.tree.map(lambda x, w=word: x[w], many, is_leaf=fixed)
            np.testing.assert_array_equal(put_together(picked, apart), one[word])


def test_vectors_of_more_elements_than_counters_are_refused() -> None:
    """Two of their elements would have one noise."""
    half = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    tree = {"a": half, "b": half}
    for apart in ({}, {"a": 0, "b": 1}):
        with pytest.raises(ValueError, match="4294967296 elements exceeds the 2"):
            parts.sections(tree, moves, apart)
    assert parts.sections({"a": half}, moves).shape == (2**31,)


def test_leaves_of_one_path_are_refused() -> None:
    """They would be one part, and share its noise."""
    tree = {"a/b": jnp.zeros(3), "a": {"b": jnp.zeros(3)}}
    with pytest.raises(ValueError, match="two of the leaves have the path 'a/b'"):
        parts.sections(tree, moves, {"a/b": None})
    assert parts.sections(tree, moves).shape == (6,)


def test_noise_of_large_parts_is_not_stored() -> None:
    """Of six of one shape it is added where it is drawn, as that of one vector is."""
    tree = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(6)}
    like = parts.sections(tree, moves, dict.fromkeys(tree))
    law = lattice_gaussian.law(500)

    def noised(total: Any) -> Any:
        noise = node_noise.draw(KEY, node_noise.as_step(1), like, law)
        return jax.tree.map(lambda t, n: (t + n).astype(jnp.float32), total, noise)

    total = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), like)
    made: Any = jax.jit(noised).lower(total).compile().memory_analysis()
    assert made.temp_size_in_bytes < 6 * 256**2 * 4 / 10
