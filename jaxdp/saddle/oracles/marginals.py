"""All marginals of a table at once, in few and large operations.

Columns are summed out one after the other, and marginals share the partial sums: all of
degree r cost about 2**(r + 2) sums over the table. A sum for each marginal would cost one
over the table each, and seconds to compile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Columns = tuple[int, ...]
#: Of the rows of two tables: those in which a column is summed out, and those where it is
#: kept.
Rows = tuple[np.ndarray, np.ndarray]


class Recipe(NamedTuple):
    """Static recipe of marginals: the order of their partial sums.

    After some columns there is a table for each number of columns that were kept. Its rows
    are their cells, for all ways to keep so many that a marginal needs, and its width is
    that of the columns to come.
    """

    sizes: tuple[int, ...]
    stages: tuple[dict[int, Rows], ...]  # of each column, by how many are kept with it
    order: np.ndarray  # where each marginal's cells are among the last tables' rows


def recipe(sizes: tuple[int, ...], marginals: Sequence[Columns]) -> Recipe:
    """Makes the recipe of marginals, each a tuple of increasing columns."""
    rows: dict[Columns, np.ndarray] = {(): np.arange(1)}
    stages = []
    for axis, size in enumerate(sizes):
        needed = {tuple(c for c in one if c <= axis) for one in marginals}
        stage: dict[int, Rows] = {}
        new: dict[Columns, np.ndarray] = {}
        for kept in range(axis + 2):
            out = [one for one in rows if len(one) == kept and one in needed]
            longer = [(*one, axis) for one in rows if len(one) == kept - 1]
            into = [one for one in longer if one in needed]
            if out or into:
                summed = [rows[one] for one in out]
                spread = [rows[one[:-1]] for one in into]
                stage[kept] = _joined(summed), _joined(spread)
                counts = [len(r) for r in summed] + [len(r) * size for r in spread]
                new |= _numbered([*out, *into], counts)
        stages.append(stage)
        rows = new
    lengths = sorted({len(one) for one in rows})
    sums = [sum(len(r) for one, r in rows.items() if len(one) == n) for n in lengths]
    starts = dict(zip(lengths, np.cumsum([0, *sums]), strict=False))
    order = np.concatenate([starts[len(one)] + rows[one] for one in marginals])
    # Of 32 bits: they index with and without JAX's 64-bit types.
    return Recipe(sizes, tuple(stages), order.astype(np.int32))


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.arange(0), *parts])


def _numbered(names: list[Columns], counts: list[int]) -> dict[Columns, np.ndarray]:
    """Assigns consecutive numbers to each name, as many as its count."""
    parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    return dict(zip(names, parts, strict=True))


def cells(recipe: Recipe, weights: jax.Array) -> jax.Array:
    """Computes every cell of every marginal.

    Args:
      recipe: of the marginals.
      weights: shape=(prod(sizes),), integers or floats.

    Returns:
      Sums of weights, of their dtype: marginal by marginal, the last column of each moving
      fastest.
    """
    tables = {0: weights.reshape(1, -1)}
    for size, stage in zip(recipe.sizes, recipe.stages, strict=True):
        new = {}
        for kept, (summed, spread) in stage.items():
            parts = []
            if len(summed):
                table = _taken(tables[kept], summed).reshape(len(summed), size, -1)
                parts.append(jnp.sum(table, axis=1, dtype=table.dtype))
            if len(spread):
                table = _taken(tables[kept - 1], spread)
                parts.append(table.reshape(len(spread) * size, -1))
            new[kept] = jnp.concatenate(parts)
        # Or else XLA may compute a sum again for each of its uses.
        tables = jax.lax.optimization_barrier(new)
    return jnp.concatenate([table[:, 0] for table in tables.values()])[recipe.order]


def _taken(table: jax.Array, rows: np.ndarray) -> jax.Array:
    """Returns some rows of a table; without a copy if they are all of it."""
    return table if np.array_equal(rows, np.arange(len(table))) else table[rows]
