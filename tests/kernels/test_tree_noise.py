"""The binary tree against the tables of the papers and plain NumPy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.kernels import (
    lattice_gaussian,
    node_noise,
    prefix_noise,
    threefry,
    tree_noise,
)

KEY = threefry.secret_key(np.array([8, 2, 7, 1], np.uint32))

# NODE(t) for t = 1, ..., 16: the nodes that a prefix is made of, (first step, last step).
NODES = [
    [(1, 1)],
    [(1, 2)],
    [(1, 2), (3, 3)],
    [(1, 4)],
    [(1, 4), (5, 5)],
    [(1, 4), (5, 6)],
    [(1, 4), (5, 6), (7, 7)],
    [(1, 8)],
    [(1, 8), (9, 9)],
    [(1, 8), (9, 10)],
    [(1, 8), (9, 10), (11, 11)],
    [(1, 8), (9, 12)],
    [(1, 8), (9, 12), (13, 13)],
    [(1, 8), (9, 12), (13, 14)],
    [(1, 8), (9, 12), (13, 14), (15, 15)],
    [(1, 16)],
]
# In how many nodes each step is.
COUNTS = {
    1: [1],
    2: [2, 1],
    4: [3, 2, 2, 1],
    7: [3, 2, 2, 1, 2, 1, 1],
    8: [4, 3, 3, 2, 3, 2, 2, 1],
    13: [4, 3, 3, 2, 3, 2, 2, 1, 3, 2, 2, 1, 1],
    16: [5, 4, 4, 3, 4, 3, 3, 2, 4, 3, 3, 2, 3, 2, 2, 1],
}
# Which draws the first increments hold, with their signs.
INCREMENTS = [
    {1: 1},
    {2: 1, 1: -1},
    {3: 1},
    {4: 1, 3: -1, 2: -1},
    {5: 1},
    {6: 1, 5: -1},
    {7: 1},
    {8: 1, 7: -1, 6: -1, 4: -1},
]


def nodes(t: int) -> list[tuple[int, int]]:
    """NODE(t) as the papers print it: the binary expansion from the top."""
    found, begin = [], 0
    for level in reversed(range(t.bit_length())):
        if begin + 2**level <= t:
            found.append((begin + 1, begin + 2**level))
            begin += 2**level
    return found


def test_nodes() -> None:
    assert [nodes(t) for t in range(1, 17)] == NODES
    c = tree_noise.Stored(16).strategy()
    b = np.tri(16) @ np.linalg.inv(c)
    for t, expected in enumerate(NODES):
        used = np.flatnonzero(np.round(b[t]))
        rows = [np.flatnonzero(c[node]) + 1 for node in used]
        assert [(row[0], row[-1]) for row in rows] == expected
        assert [len(row) for row in rows] == [
            last - first + 1 for first, last in expected
        ]
    np.testing.assert_allclose(b, np.round(b), atol=1e-12)


def test_a_prefix_is_a_partition_into_its_nodes() -> None:
    """Every t up to 64, from the strategy of 64 steps: exactly, with integers."""
    c = tree_noise.Stored(64).strategy()
    for t in range(1, 65):
        ends = [last for _, last in nodes(t)]
        np.testing.assert_array_equal(c[np.array(ends) - 1].sum(0), np.arange(64) < t)
        assert len(ends) == t.bit_count()
    norms = tree_noise.Stored(64).prefix_norms() ** 2
    np.testing.assert_allclose(norms, [t.bit_count() for t in range(1, 65)])


@pytest.mark.parametrize("period", COUNTS)
def test_counts(period: int) -> None:
    columns = tree_noise.Stored(period).column_norms() ** 2
    np.testing.assert_allclose(columns, COUNTS[period])


def test_counts_of_every_period() -> None:
    """The first step is in floor(log2 T) + 1 nodes, no other in more than floor(log2 T)."""
    for period in range(2, 300):
        first, *rest = tree_noise.Stored(period).column_norms() ** 2
        assert round(first) == period.bit_length()
        assert round(max(rest)) == period.bit_length() - 1


def test_new_nodes_in_all() -> None:
    """One a step; a tree of all nodes would have 2 T - popcount(T), 71 for 37."""
    assert tree_noise.Stored(37).strategy().shape == (37, 37)
    assert sum(_trailing_zeros(t) + 1 for t in range(1, 38)) == 71


def _trailing_zeros(t: int) -> int:
    return (t & -t).bit_length() - 1


def test_first_increments() -> None:
    inverse = np.linalg.inv(tree_noise.Incremental(8).strategy())
    for row, terms in zip(inverse, INCREMENTS, strict=True):
        expected = np.zeros(8)
        for t, sign in terms.items():
            expected[t - 1] = sign
        np.testing.assert_allclose(row, expected, atol=1e-12)


def test_the_increments_add_up_to_the_nodes_of_a_prefix() -> None:
    """Any prefix from the key alone: one draw for each of its nodes."""
    like, stored = jnp.zeros(20), tree_noise.Stored(37)
    laws, zeros = stored.laws(1000), jnp.zeros(20, jnp.int32)

    def step(carry: tuple[jax.Array, jax.Array], t: jax.Array):
        total, state = carry
        noise, state = stored.increment(KEY, state, t, like, laws)
        assert noise.low is None
        return (total + noise.high, state), total + noise.high

    @jax.jit
    def both() -> tuple[jax.Array, jax.Array]:
        steps = jnp.arange(37, dtype=jnp.int32)
        sums = jax.lax.scan(step, (zeros, stored.init(like)), steps)[1]
        return sums, jax.lax.map(lambda t: node_noise.draw(KEY, t, like, laws), steps)

    sums, draws = map(np.asarray, both())
    assert sums.dtype == np.int32 and np.std(sums) > 500
    for t in range(1, 38):
        ends = [last for _, last in nodes(t)]
        np.testing.assert_array_equal(draws[np.array(ends) - 1].sum(0), sums[t - 1])


# The least is what the last level of 37 steps, 0.582 of a node, allows on a fine grid.
@pytest.mark.parametrize("std", [127, 1000, 2**26])
def test_honakers_draws_are_rounded_up(std: int) -> None:
    """To the integer above the std of what is new at each level."""
    laws = tree_noise.Honaker(37).laws(std)
    for level, fresh in enumerate(tree_noise._estimate_weights(6)[1]):
        above = math.ceil(std * fresh - 1e-6)  # The first is the std itself.
        assert above >= std * fresh - 1e-6 > above - 1
        expected = lattice_gaussian.law(above, fine=True)
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.map(lambda x, level=level: x[level], laws),
            expected,
        )


def test_small_nodes_of_honaker_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 75 on a fine grid"):
        tree_noise.Honaker(37).laws(126)


def test_honaker_is_estimation_from_below() -> None:
    """Its law is that of the printed recursion, which draws a normal for every node."""
    period = 37
    levels = period.bit_length()
    variance = [1.0]
    for _ in range(levels):
        variance.append(2 * variance[-1] / (1 + 2 * variance[-1]))
    number = sum(_trailing_zeros(t) + 1 for t in range(1, period + 1))
    drawn = iter(np.eye(number))
    stored, rows = np.zeros((levels, number)), []
    for t in range(1, period + 1):
        current, level = next(drawn), 0
        while (t - 1) >> level & 1:
            weight = variance[level + 1]
            current = weight * next(drawn) + (1 - weight) * (stored[level] + current)
            level += 1
        stored[level] = current
        rows.append(sum(stored[j] for j in range(levels) if t >> j & 1))
    printed = np.array(rows)
    kernel = tree_noise.Honaker(period)
    ours = np.tri(period) @ np.linalg.inv(kernel.strategy())
    np.testing.assert_allclose(ours @ ours.T, printed @ printed.T, atol=1e-8)


@pytest.mark.parametrize("period", [1, 2, 3, 4, 16, 37])
def test_honakers_columns_are_the_least(period: int) -> None:
    """Of this covariance no factor has shorter columns; all nodes of a tree have longer."""
    kernel = tree_noise.Honaker(period)
    b = np.tri(period) @ np.linalg.inv(kernel.strategy())
    factor = np.linalg.solve(np.linalg.cholesky(b @ b.T), np.tri(period))
    np.testing.assert_allclose(
        np.linalg.norm(factor, axis=0), kernel.column_norms(), rtol=1e-9
    )
    # Nodes of the whole tree that hold step i: at level j while the node ends by T.
    steps = np.arange(period)
    counts = sum(((steps >> j) + 1) << j <= period for j in range(period.bit_length()))
    assert np.all(kernel.column_norms() ** 2 <= counts + 1e-12)
    assert prefix_noise.make("honaker", period) == kernel


def test_stored_trees_have_no_loop_whose_length_is_data() -> None:
    """For it the host of a GPU would wait; drawn again, nodes are too dear to draw all."""
    like = jnp.zeros(3)
    for tree, loops in ((tree_noise.Stored(13), 0), (tree_noise.Incremental(13), 1)):
        state, laws = tree.init(like), tree.laws(1000)

        def step(state: Any, t: jax.Array, tree: Any = tree, laws: Any = laws) -> Any:
            return tree.increment(KEY, state, t, like, laws)

        program = jax.make_jaxpr(step)(state, jnp.int32(0))
        assert str(program).count("while[") == loops
