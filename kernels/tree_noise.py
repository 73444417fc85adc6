"""Prefix-sum noise of the binary (Fenwick) tree, and Honaker's estimate on it.

Step t (here from 1) adds one node, the sum over its last ``2**ctz(t)`` steps. A prefix sum
is a sum of nodes, as t is a sum of powers of two, and so is its noise. Its increment is the
noise of the new node minus that of the nodes it takes in, which end at ``t - 2**i`` for
i < ctz(t). :class:`Stored`, :class:`Regenerated` and :class:`Incremental` give the same
noise; they differ in memory and in what is drawn again.

The interface is :class:`jaxdp.kernels.prefix_noise.PrefixNoise`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import node_noise


def _levels(period: int) -> int:
    """Levels of the tree: those of the steps 1..period."""
    return period.bit_length()


def _trailing_zeros(t: Any) -> Any:
    """Number of trailing zero bits of positive integers, NumPy's or JAX's."""
    if isinstance(t, np.ndarray):
        return np.bitwise_count(~t & (t - 1)).astype(np.int64)
    return jax.lax.population_count(~t & (t - 1))


def _row(store: Any, i: jax.Array) -> Any:
    """Row ``i`` of every leaf."""
    return jax.tree.map(
        lambda s: jax.lax.dynamic_index_in_dim(s, i, keepdims=False), store
    )


def _set_row(store: Any, i: jax.Array, row: Any) -> Any:
    """``store`` with row ``i`` of every leaf replaced, in place where it is donated."""
    return jax.tree.map(
        lambda s, r: jax.lax.dynamic_update_index_in_dim(s, r, i, axis=0), store, row
    )


def _minus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.subtract, a, b)


@dataclasses.dataclass(frozen=True)
class _Fenwick:
    """The factorisation that the three forms of the tree share.

    Attributes:
      period: steps of one period.
    """

    period: int

    def __post_init__(self) -> None:
        node_noise.check_period(self.period)

    def column_norms(self) -> np.ndarray:
        """Square roots of the numbers of nodes that a step is part of."""
        count, node = np.zeros(self.period), np.arange(1, self.period + 1)
        while (inside := node <= self.period).any():
            count += inside
            node += node & -node
        return np.sqrt(count)

    def prefix_norms(self) -> np.ndarray:
        """Square roots of the numbers of nodes that a prefix is made of."""
        t = np.arange(1, self.period + 1)
        return np.sqrt(np.bitwise_count(t).astype(np.float64))

    def increment_norms(self) -> np.ndarray:
        """Square roots of the numbers of nodes in an increment."""
        return np.sqrt(1.0 + _trailing_zeros(np.arange(1, self.period + 1)))

    def strategy(self) -> np.ndarray:
        """Rows are nodes: which steps each of them sums."""
        t = np.arange(1, self.period + 1)
        begin = t & (t - 1)
        return ((t > begin[:, None]) & (t <= t[:, None])).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Stored(_Fenwick):
    """The tree with the last node of each level stored: one draw a step.

    State: ``floor(log2(period)) + 1`` rows for each leaf.
    """

    def init(self, like: Any) -> Any:
        """Zeros; no step reads a row before it was written in the same period."""
        return node_noise.zeros(like, _levels(self.period))

    def increment(
        self, key: jax.Array, state: Any, step: int | jax.Array, like: Any
    ) -> tuple[Any, Any]:
        """See :class:`jaxdp.kernels.prefix_noise.PrefixNoise`."""
        step = node_noise.as_step(step)
        level = _trailing_zeros(step + 1)
        state = _set_row(state, level, node_noise.draw(key, step, like))
        # Read back from the row: with the draw itself XLA would keep a second copy of the
        # store, or draw twice.
        new = _row(state, level)
        noise = jax.lax.fori_loop(0, level, lambda i, n: _minus(n, _row(state, i)), new)
        return noise, state


@dataclasses.dataclass(frozen=True)
class Incremental(_Fenwick):
    """The tree without state: the nodes that an increment takes in are drawn again.

    ``1 + ctz(t)`` draws a step, less than two on average.
    """

    def init(self, like: Any) -> Any:
        """No state."""
        del like
        return ()

    def increment(
        self, key: jax.Array, state: Any, step: int | jax.Array, like: Any
    ) -> tuple[Any, Any]:
        """See :class:`jaxdp.kernels.prefix_noise.PrefixNoise`."""
        step = node_noise.as_step(step)

        def take_in(i: jax.Array, noise: Any) -> Any:
            ended = step - (jnp.int32(1) << i)
            return _minus(noise, node_noise.draw(key, ended, like))

        new = node_noise.draw(key, step, like)
        level = _trailing_zeros(step + 1)
        return jax.lax.fori_loop(0, level, take_in, new), state


@dataclasses.dataclass(frozen=True)
class Regenerated(_Fenwick):
    """The tree with random access: the noise of any prefix sum, drawn from the key.

    As many draws as the prefix has nodes, and an increment is the difference of two
    prefixes. Where steps come in order, :class:`Incremental` is cheaper.
    """

    def init(self, like: Any) -> Any:
        """No state."""
        del like
        return ()

    def prefix(self, key: jax.Array, count: int | jax.Array, like: Any) -> Any:
        """The noise on the sum of the first ``count`` steps, in node stds.

        Args:
          key: typed threefry key of this period, shape=(); secret.
          count: int32, shape=(), from 0 to ``period``; may be traced.
          like: pytree; only paths and shapes are read.

        Returns:
          A tree like ``like``, float32; zeros for ``count=0``.
        """
        count = node_noise.as_step(count)

        def add(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            node, total = carry
            draw = node_noise.draw(key, node - 1, like)
            return node & (node - 1), jax.tree.map(jnp.add, total, draw)

        start = count, node_noise.zeros(like)
        return jax.lax.while_loop(lambda carry: carry[0] > 0, add, start)[1]

    def increment(
        self, key: jax.Array, state: Any, step: int | jax.Array, like: Any
    ) -> tuple[Any, Any]:
        """See :class:`jaxdp.kernels.prefix_noise.PrefixNoise`."""
        step = node_noise.as_step(step)
        noise = _minus(self.prefix(key, step + 1, like), self.prefix(key, step, like))
        return noise, state


def _estimate_weights(levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Honaker's estimates in terms of earlier ones: see :class:`Honaker`.

    Returns:
      ``kept`` (levels, levels): the weight in an estimate at level j of the stored one at
      level i < j, 0 otherwise; ``fresh`` (levels,): the std of what is new in it.
    """
    leaves = 2.0 ** np.arange(1, levels + 1) - 1  # Nodes below and at each level.
    kept = np.tril(leaves[None] / leaves[:, None], -1)
    return kept, np.sqrt((leaves + 2) / (3 * leaves))


@dataclasses.dataclass(frozen=True)
class Honaker:
    """The tree, each node estimated from itself and all nodes below it.

    The estimate of a node weighs its own noisy sum with the sum of its children's
    estimates, so that the variance falls from 1 to ``2**j / (2**(j + 1) - 1)`` at level j.
    With m_j = ``2**(j + 1) - 1``, the noise of an estimate at level j is that of the left
    siblings on the way down to its last leaf, with weight m_i / m_j at level i < j, and
    something that appears nowhere before, of variance (m_j + 2) / (3 m_j). That is drawn as
    one normal: the law is the same as with a normal for every node, at one draw a step. And
    the strategy is square, with columns a little shorter than the roots of the numbers of
    nodes: what is released says less than the noisy nodes would.

    State: ``floor(log2(period)) + 1`` rows for each leaf.

    Attributes:
      period: steps of one period.

    References:
      J. Honaker, Efficient use of differentially private binary trees, 2015 (estimation
      from below).
    """

    period: int

    def __post_init__(self) -> None:
        node_noise.check_period(self.period)

    def init(self, like: Any) -> Any:
        """Zeros; no step reads a row before it was written in the same period."""
        return node_noise.zeros(like, _levels(self.period))

    def increment(
        self, key: jax.Array, state: Any, step: int | jax.Array, like: Any
    ) -> tuple[Any, Any]:
        """See :class:`jaxdp.kernels.prefix_noise.PrefixNoise`."""
        step = node_noise.as_step(step)
        level = _trailing_zeros(step + 1)
        weights, stds = _estimate_weights(_levels(self.period))
        kept = jnp.asarray(weights, jnp.float32)[level]
        fresh = jnp.asarray(stds, jnp.float32)[level]
        new = jax.tree.map(lambda xi: fresh * xi, node_noise.draw(key, step, like))

        def take_in(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            estimate, noise = carry
            row = _row(state, i)
            estimate = jax.tree.map(lambda e, s: e + kept[i] * s, estimate, row)
            noise = jax.tree.map(lambda n, s: n - (1 - kept[i]) * s, noise, row)
            return estimate, noise

        estimate, noise = jax.lax.fori_loop(0, level, take_in, (new, new))
        return noise, _set_row(state, level, estimate)

    def column_norms(self) -> np.ndarray:
        """Lengths of the columns of :meth:`strategy`."""
        squares = np.zeros(self.period)
        for node, row in self._rows():
            squares[node - len(row) : node] += row**2
        return np.sqrt(squares)

    def prefix_norms(self) -> np.ndarray:
        """Roots of the sums of the variances of the estimates in a prefix."""
        t = np.arange(1, self.period + 1)
        level = np.arange(_levels(self.period))
        return np.sqrt(((t[:, None] >> level) & 1) @ self._variances())

    def increment_norms(self) -> np.ndarray:
        """Stds of the increments, whose estimates are independent."""
        kept, fresh = _estimate_weights(_levels(self.period))
        dropped = np.tril(1 - kept, -1)
        of_level = np.sqrt(fresh**2 + dropped**2 @ self._variances())
        return of_level[_trailing_zeros(np.arange(1, self.period + 1))]

    def strategy(self) -> np.ndarray:
        """Row t: what step t's draw is added to, in its own std."""
        rows = np.zeros((self.period, self.period))
        for node, row in self._rows():
            rows[node - 1, node - len(row) : node] = row
        return rows

    def _variances(self) -> np.ndarray:
        """Of the estimates, by level."""
        size = 2.0 ** np.arange(_levels(self.period))
        return size / (2 * size - 1)

    def _rows(self) -> list[tuple[int, np.ndarray]]:
        """Each node (by its last step, from 1) with its row on the steps that it sums."""
        kept, fresh = _estimate_weights(_levels(self.period))
        # Of a node's 2**j steps the last one is new, and 2**i before it are estimated at
        # level i: what their estimates have is taken off.
        patterns = []
        for level, std in enumerate(fresh):
            parts = [np.full(2**i, 1 - kept[level, i]) for i in reversed(range(level))]
            patterns.append(np.concatenate([*parts, np.ones(1)]) / std)
        nodes = np.arange(1, self.period + 1)
        levels = _trailing_zeros(nodes)
        return [(int(t), patterns[j]) for t, j in zip(nodes, levels, strict=True)]
