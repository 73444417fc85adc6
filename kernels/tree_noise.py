"""Prefix-sum noise of the binary (Fenwick) tree, and Honaker's estimate on it.

Step t (here from 1) adds one node, the sum over its last ``2**ctz(t)`` steps. A prefix sum
is a sum of nodes, as t is a sum of powers of two, and so is its noise. Its increment is the
noise of the new node minus that of the nodes it takes in, which end at ``t - 2**i`` for
i < ctz(t). :class:`Stored` and :class:`Incremental` give the same noise, bit for bit: all
is sums of integers. They differ in memory and in what is drawn again.

The interface is :class:`jaxdp.kernels.prefix_noise.PrefixNoise`.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import fixed_point, lattice_gaussian, node_noise
from jaxdp.kernels.fixed_point import ONE, ULP, tree_map
from jaxdp.kernels.lattice_gaussian import Law
from jaxdp.kernels.node_noise import Step


def _trailing_zeros(t: Any) -> Any:
    """Counts the trailing zero bits of positive integers, NumPy's or JAX's."""
    if isinstance(t, np.ndarray):
        return np.bitwise_count(~t & (t - 1)).astype(np.int64)
    return jax.lax.population_count(~t & (t - 1))


def _row(store: Any, i: jax.Array) -> Any:
    """Returns row ``i`` of every leaf."""
    return jax.tree.map(
        lambda s: jax.lax.dynamic_index_in_dim(s, i, keepdims=False), store
    )


def _set_row(store: Any, i: jax.Array, row: Any) -> Any:
    """Replaces row ``i`` of every leaf of ``store``, in place where it is donated."""
    return jax.tree.map(
        lambda s, r: jax.lax.dynamic_update_index_in_dim(s, r, i, axis=0), store, row
    )


def _minus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.subtract, a, b)


def _fixed(noise: Any) -> Any:
    return jax.tree.map(fixed_point.Fixed, noise)


@dataclasses.dataclass(frozen=True)
class _Fenwick:
    """The factorisation that both forms of the tree share.

    Attributes:
      period: steps of one period.
    """

    integral: ClassVar[bool] = True

    period: int

    def __post_init__(self) -> None:
        node_noise.check_period(self.period)

    def laws(self, std: int) -> Law:
        """Returns the law of every node, whose std is ``std`` units.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Stored(period=8).laws(std=1000).alias.shape
          (2048,)
        """
        return lattice_gaussian.law(std)

    def rounding(self) -> float:
        """Returns 0: only integers are added.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Stored(period=8).rounding()
          0.0
        """
        return 0.0  # Only integers are added.

    def largest_norm(self) -> float:
        """Returns the std of the longest increment; no node in the state exceeds it.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Stored(period=8).largest_norm()
          2.0
        """
        return float(self.increment_norms().max())

    def column_norms(self) -> np.ndarray:
        """Returns the roots of the numbers of nodes that a step is part of.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> (tree_noise.Stored(period=4).column_norms() ** 2).round(6).tolist()
          [3.0, 2.0, 2.0, 1.0]
        """
        count, node = np.zeros(self.period), np.arange(1, self.period + 1)
        while (inside := node <= self.period).any():
            count += inside
            node += node & -node
        return np.sqrt(count)

    def prefix_norms(self) -> np.ndarray:
        """Returns the roots of the numbers of nodes that a prefix is made of.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> (tree_noise.Stored(period=4).prefix_norms() ** 2).round(6).tolist()
          [1.0, 1.0, 2.0, 1.0]
        """
        t = np.arange(1, self.period + 1)
        return np.sqrt(np.bitwise_count(t).astype(np.float64))

    def increment_norms(self) -> np.ndarray:
        """Returns the roots of the numbers of nodes in an increment.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> (tree_noise.Stored(period=4).increment_norms() ** 2).round(6).tolist()
          [1.0, 2.0, 1.0, 3.0]
        """
        return np.sqrt(1.0 + _trailing_zeros(np.arange(1, self.period + 1)))

    def strategy(self) -> np.ndarray:
        """Returns the matrix whose rows are nodes, with ones at the steps of each.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Stored(period=3).strategy().tolist()
          [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
        """
        t = np.arange(1, self.period + 1)
        begin = t & (t - 1)
        return ((t > begin[:, None]) & (t <= t[:, None])).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Stored(_Fenwick):
    """The tree with the last node of each level stored: one draw a step.

    State: ``floor(log2(period)) + 1`` rows for each leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import tree_noise
      >>> tree = tree_noise.Stored(period=8)
      >>> tree.init({"w": jnp.zeros(3)})["w"].shape
      (4, 3)
      >>> tree.strategy().sum(axis=1).tolist()
      [1.0, 2.0, 1.0, 4.0, 1.0, 2.0, 1.0, 8.0]
    """

    def init(self, like: Any) -> Any:
        """Returns zeros; no step reads a row before it was written in the same period.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Stored(period=8).init({"w": jnp.zeros(3)})["w"].shape
          (4, 3)
        """
        return node_noise.zeros(like, self.period.bit_length())

    def increment(
        self, key: jax.Array, state: Any, step: Step, like: Any, laws: Law
    ) -> tuple[Any, Any]:
        """Returns one step's noise and the next state, as every prefix-noise kernel does.

        See :meth:`jaxdp.kernels.prefix_noise.PrefixNoise.increment`.

        Example:
          >>> import jax.numpy as jnp
          >>> import numpy as np
          >>> from jaxdp.kernels import threefry, tree_noise
          >>> tree, like = tree_noise.Stored(period=8), {"w": jnp.zeros(3)}
          >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
          >>> state, laws = tree.init(like), tree.laws(1000)
          >>> noise, state = tree.increment(key, state, 0, like, laws)
          >>> noise["w"].high.shape, state["w"].shape
          ((3,), (4, 3))
        """
        step = node_noise.as_step(step)
        level = _trailing_zeros(step + 1)
        state = _set_row(state, level, node_noise.draw(key, step, like, laws))
        # Read back from the row: with the draw itself XLA would keep a second copy of the
        # store, or draw twice.
        noise = _row(state, level)
        # All rows, of which those above count zero: one pass, and no loop whose length is
        # data, for which the host of a GPU would wait.
        for i in range(self.period.bit_length() - 1):
            taken = (i < level).astype(jnp.int32)
            noise = jax.tree.map(lambda n, s, i=i, k=taken: n - k * s[i], noise, state)
        return _fixed(noise), state


@dataclasses.dataclass(frozen=True)
class Incremental(_Fenwick):
    """The tree without state: the nodes that an increment takes in are drawn again.

    ``1 + ctz(t)`` draws a step, less than two on average.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import tree_noise
      >>> tree = tree_noise.Incremental(period=8)
      >>> tree.init({"w": jnp.zeros(3)})
      ()
      >>> (tree.prefix_norms() ** 2).round(3).tolist()
      [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 1.0]
    """

    def init(self, like: Any) -> Any:
        """Returns the state before the first step, which is empty.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Incremental(period=8).init({"w": jnp.zeros(3)})
          ()
        """
        del like
        return ()

    def increment(
        self, key: jax.Array, state: Any, step: Step, like: Any, laws: Law
    ) -> tuple[Any, Any]:
        """Returns one step's noise and the next state, as every prefix-noise kernel does.

        See :meth:`jaxdp.kernels.prefix_noise.PrefixNoise.increment`. The noise is that of
        :class:`Stored`, bit for bit.

        Example:
          >>> import jax.numpy as jnp
          >>> import numpy as np
          >>> from jaxdp.kernels import threefry, tree_noise
          >>> one, two = tree_noise.Incremental(period=8), tree_noise.Stored(period=8)
          >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
          >>> like, laws = jnp.zeros(3), one.laws(1000)
          >>> a, _ = one.increment(key, (), 0, like, laws)
          >>> b, _ = two.increment(key, two.init(like), 0, like, laws)
          >>> bool((a.high == b.high).all())
          True
        """
        step = node_noise.as_step(step)

        def take_in(i: jax.Array, noise: Any) -> Any:
            ended = step - (jnp.int32(1) << i)
            return _minus(noise, node_noise.draw(key, ended, like, laws))

        new = node_noise.draw(key, step, like, laws)
        level = _trailing_zeros(step + 1)
        return _fixed(jax.lax.fori_loop(0, level, take_in, new)), state


def _estimate_weights(levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights of earlier estimates in Honaker's: see :class:`Honaker`.

    Returns:
      ``dropped`` (levels, levels), uint32, in units of ``2**-32``: one less the weight in
      an estimate at level j of the stored one at level i < j, 0 otherwise; ``fresh``
      (levels,): the std of what is new in it.
    """
    leaves = 2.0 ** np.arange(1, levels + 1) - 1  # Nodes below and at each level.
    dropped = np.rint(ONE * np.tril(1 - leaves[None] / leaves[:, None], -1))
    return dropped.astype(np.uint32), np.sqrt((leaves + 2) / (3 * leaves))


@dataclasses.dataclass(frozen=True)
class Honaker:
    """The tree, each node estimated from itself and all nodes below it.

    The estimate of a node weighs its own noisy sum with the sum of its children's
    estimates, so that the variance falls from 1 to ``2**j / (2**(j + 1) - 1)`` at level j.
    With m_j = ``2**(j + 1) - 1``, the noise of an estimate at level j is that of the left
    siblings on the way down to its last leaf, with weight m_i / m_j at level i < j, and
    something that appears nowhere before, of variance (m_j + 2) / (3 m_j). That is drawn at
    once: the variances are the same as with a draw for every node, at one draw a step. And
    the strategy is square, with columns a little shorter than the roots of the numbers of
    nodes: what is released says less than the noisy nodes would.

    The weights are multiples of ``2**-32``, and the std of what is new is rounded up to an
    integer: the noise is a little more than the norms say, never less.

    State: ``floor(log2(period)) + 1`` rows of two words for each leaf.

    Attributes:
      period: steps of one period.

    Example:
      >>> from jaxdp.kernels import tree_noise
      >>> tree, plain = tree_noise.Honaker(period=8), tree_noise.Stored(period=8)
      >>> bool((tree.prefix_norms() <= plain.prefix_norms()).all())
      True

    References:
      J. Honaker, Efficient use of differentially private binary trees, 2015 (estimation
      from below).
    """

    integral: ClassVar[bool] = False

    period: int

    def __post_init__(self) -> None:
        node_noise.check_period(self.period)

    def laws(self, std: int) -> Law:
        """Returns the laws of all levels, stacked.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Honaker(period=8).laws(std=1000).alias.shape
          (4, 2048)
        """
        found = []  # Of all levels.
        for level in range(self.period.bit_length()):
            leaves = 2 ** (level + 1) - 1
            # Rounded up: the least integer whose square is at least this quotient.
            square = -(-(std**2) * (leaves + 2) // (3 * leaves))
            found.append(lattice_gaussian.law(1 + math.isqrt(square - 1), fine=True))
        return jax.tree.map(lambda *of_levels: np.stack(of_levels), *found)

    def init(self, like: Any) -> Any:
        """Returns zeros; no step reads a row before it was written in the same period.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Honaker(period=8).init(jnp.zeros(3)).high.shape
          (4, 3)
        """
        return node_noise.fine_zeros(like, self.period.bit_length())

    def increment(
        self, key: jax.Array, state: Any, step: Step, like: Any, laws: Law
    ) -> tuple[Any, Any]:
        """Returns one step's noise and the next state, as every prefix-noise kernel does.

        See :meth:`jaxdp.kernels.prefix_noise.PrefixNoise.increment`.

        Example:
          >>> import jax.numpy as jnp
          >>> import numpy as np
          >>> from jaxdp.kernels import threefry, tree_noise
          >>> tree, like = tree_noise.Honaker(period=8), jnp.zeros(3)
          >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
          >>> state, laws = tree.init(like), tree.laws(1000)
          >>> noise, state = tree.increment(key, state, 0, like, laws)
          >>> noise.high.shape, noise.low.dtype
          ((3,), dtype('uint32'))
        """
        step = node_noise.as_step(step)
        level = _trailing_zeros(step + 1)
        dropped = jnp.asarray(_estimate_weights(self.period.bit_length())[0])[level]
        law = jax.tree.map(lambda x: jnp.asarray(x)[level], laws)
        new = node_noise.fine(key, step, like, law)

        def take_in(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            estimate, noise = carry
            row = _row(state, i)
            part = tree_map(lambda s: fixed_point.scaled(s, dropped[i]), row)
            # The same rounding in both: an estimate is the sum of its steps' increments.
            kept = tree_map(fixed_point.sub, row, part)
            estimate = tree_map(fixed_point.add, estimate, kept)
            return estimate, tree_map(fixed_point.sub, noise, part)

        estimate, noise = jax.lax.fori_loop(0, level, take_in, (new, new))
        return noise, _set_row(state, level, estimate)

    def rounding(self) -> float:
        """Returns the most ulps of a node, one an estimate in it, over its fresh std.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Honaker(period=8).rounding() < 1e-8
          True
        """
        fresh = _estimate_weights(self.period.bit_length())[1]
        return float(np.max(np.arange(len(fresh)) / fresh)) * ULP

    def largest_norm(self) -> float:
        """Returns the std of the longest increment or estimate.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> round(tree_noise.Honaker(period=8).largest_norm(), 4)
          1.3558
        """
        return math.sqrt(max(self._variances().max(), *self.increment_norms() ** 2))

    def column_norms(self) -> np.ndarray:
        """Returns the lengths of the columns of :meth:`strategy`.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Honaker(period=4).column_norms().round(3).tolist()
          [1.601, 1.601, 1.648, 1.528]
        """
        squares = np.zeros(self.period)
        for node, row in self._rows():
            squares[node - len(row) : node] += row**2
        return np.sqrt(squares)

    def prefix_norms(self) -> np.ndarray:
        """Returns the roots of the summed variances of the estimates in a prefix.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> (tree_noise.Honaker(period=4).prefix_norms() ** 2).round(3).tolist()
          [1.0, 0.667, 1.667, 0.571]
        """
        t = np.arange(1, self.period + 1)
        level = np.arange(self.period.bit_length())
        return np.sqrt(((t[:, None] >> level) & 1) @ self._variances())

    def increment_norms(self) -> np.ndarray:
        """Returns the stds of the increments, whose estimates are independent.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Honaker(period=4).increment_norms().round(3).tolist()
          [1.0, 1.0, 1.0, 1.175]
        """
        dropped, fresh = self._weights()
        of_level = np.sqrt(fresh**2 + dropped**2 @ self._variances())
        return of_level[_trailing_zeros(np.arange(1, self.period + 1))]

    def strategy(self) -> np.ndarray:
        """Returns C: row t is the sum that step t's draw is added to, in its own std.

        Example:
          >>> from jaxdp.kernels import tree_noise
          >>> tree_noise.Honaker(period=4).strategy().round(2)
          array([[1.  , 0.  , 0.  , 0.  ],
                 [0.89, 1.34, 0.  , 0.  ],
                 [0.  , 0.  , 1.  , 0.  ],
                 [0.87, 0.87, 1.31, 1.53]])
        """
        rows = np.zeros((self.period, self.period))
        for node, row in self._rows():
            rows[node - 1, node - len(row) : node] = row
        return rows

    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns :func:`_estimate_weights` in float64."""
        dropped, fresh = _estimate_weights(self.period.bit_length())
        return dropped * ULP, fresh

    def _variances(self) -> np.ndarray:
        """Returns the variances of the estimates by level."""
        dropped, fresh = self._weights()
        found = np.zeros(len(fresh))
        for level, std in enumerate(fresh):
            kept = 1 - dropped[level, :level]
            found[level] = std**2 + kept**2 @ found[:level]
        return found

    def _rows(self) -> list[tuple[int, np.ndarray]]:
        """Returns each node (by its last step, from 1) with its row on its own steps."""
        dropped, fresh = self._weights()
        # Of a node's 2**j steps the last one is new, and 2**i before it are estimated at
        # level i: what their estimates have is taken off.
        patterns = []
        for level, std in enumerate(fresh):
            parts = [np.full(2**i, dropped[level, i]) for i in reversed(range(level))]
            patterns.append(np.concatenate([*parts, np.ones(1)]) / std)
        nodes = np.arange(1, self.period + 1)
        levels = _trailing_zeros(nodes)
        return [(int(t), patterns[j]) for t, j in zip(nodes, levels, strict=True)]
