r"""Vector estimates of the gradient of a smoothed loss, and of how it changed.

With directions :math:`v` of radius :math:`\sqrt d` and the smoothing radius
:math:`\delta` (the distance that a point is moved, so :math:`\lambda=\delta/\sqrt d`
multiplies :math:`v`), for every record

.. math::
   \mathrm{GRAD}(x) = \frac1m\sum_j\frac{f(x+\lambda v_j)-f(x-\lambda v_j)}{2\lambda}v_j

is unbiased for :math:`\nabla\hat f_\delta(x)`, the gradient of the mean of f over the
*ball* of radius :math:`\delta`; the directions are on the *sphere*. The change from y to
x has three unbiased estimates:

===============  ====================================================  ===============
kind             score of one direction                                evaluations
===============  ====================================================  ===============
``antithetic``   GRAD's score at x minus its score at y                4
``one_sided``    :math:`(f(x+\lambda v)-f(y+\lambda v))/\lambda`       2
``independent``  GRAD(x) - GRAD(y), each with directions of its own    4
===============  ====================================================  ===============

The first two use the same directions at both points: on an L-Lipschitz loss a score is at
most :math:`\sqrt dL\|x-y\|/\delta` in size. The first is zero on linear losses, where the
second has its largest variance.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import finite_difference, sphere
from jaxdp.kernels.finite_difference import ValueFn
from jaxdp.kernels.sphere import Direction
from jaxdp.kernels.threefry import fold_in

KINDS = ("antithetic", "one_sided", "independent")

#: Draws the m directions of a key.
Draw = Callable[[jax.Array], Direction]


def scale(smoothing_radius: float, dim: int) -> float:
    r""":math:`\lambda`: what multiplies directions of radius sqrt(d) to move so far."""
    return smoothing_radius / math.sqrt(dim)


def gradients(
    value_fn: ValueFn,
    params: Any,
    batch: Any,
    places: jax.Array,
    key: jax.Array,
    draw: Draw,
    *,
    smoothing_radius: float,
    share: bool,
) -> Any:
    """GRAD of every record.

    Args:
      value_fn: ``value_fn(params, batch) -> losses (B,)``, or a ``LazyLoss``.
      params: pytree; d elements of it move.
      batch: pytree with leading axis B.
      places: int (B,), of the records in the step's batch: names of their directions.
      key: typed key of the step; public.
      draw: the directions of a key, m of them.
      smoothing_radius: delta > 0, in units of the params.
      share: whether all records take the same directions.

    Returns:
      A tree like ``params``, float32, with leading axis B; zero where nothing moves.
      Neither bounded nor private: may be NaN or infinite.
    """

    def estimate(records: Any, key: jax.Array) -> Any:
        rows = draw(key)
        table = finite_difference.slopes(
            value_fn,
            params,
            records,
            rows,
            smoothing_radius=scale(smoothing_radius, rows.dim),
        )
        return _vectors(table, rows, params)

    return _each(estimate, batch, places, key, share=share)


def differences(
    value_fn: ValueFn,
    params: Any,
    previous: Any,
    batch: Any,
    places: jax.Array,
    key: jax.Array,
    draw: Draw,
    *,
    smoothing_radius: float,
    share: bool,
    kind: str,
) -> Any:
    """DIFF of every record: how the smoothed gradient changed since ``previous``.

    Args:
      value_fn: as in :func:`gradients`.
      params: x.
      previous: y, a tree like it.
      batch: pytree with leading axis B.
      places: as in :func:`gradients`.
      key: typed key of the step; public.
      draw: as in :func:`gradients`.
      smoothing_radius: as in :func:`gradients`.
      share: as in :func:`gradients`.
      kind: one of :data:`KINDS`.

    Returns:
      As :func:`gradients`.

    Raises:
      ValueError: another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")

    def estimate(records: Any, key: jax.Array) -> Any:
        rows = draw(key)
        radius = scale(smoothing_radius, rows.dim)

        def slopes(at: Any, rows: Direction) -> jax.Array:
            return finite_difference.slopes(
                value_fn, at, records, rows, smoothing_radius=radius
            )

        if kind == "independent":
            other = draw(fold_in(key, sphere.leaf_id("directions of the other point")))
            one = _vectors(slopes(params, rows), rows, params)
            two = _vectors(slopes(previous, other), other, params)
            return jax.tree.map(jnp.subtract, one, two)
        if kind == "antithetic":
            table = slopes(params, rows) - slopes(previous, rows)
        else:
            table = finite_difference.changes(
                value_fn, params, previous, records, rows, smoothing_radius=radius
            )
        return _vectors(table, rows, params)

    return _each(estimate, batch, places, key, share=share)


def _vectors(table: jax.Array, rows: Direction, params: Any) -> Any:
    """(B, m) scores times directions, over m."""
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), params
    )
    combine = lambda w: finite_difference.combine(w, rows, like)  # noqa: E731
    return jax.vmap(combine)(table.astype(jnp.float32))


def _each(
    estimate: Callable[[Any, jax.Array], Any],
    batch: Any,
    places: jax.Array,
    key: jax.Array,
    *,
    share: bool,
) -> Any:
    """``estimate(records, key)`` of all records at once, or of each with its own key."""
    if share:
        return estimate(batch, key)

    def one(record: Any, place: jax.Array) -> Any:
        alone = jax.tree.map(lambda x: x[None], record)
        vectors = estimate(alone, fold_in(key, place))
        return jax.tree.map(lambda x: x[0], vectors)

    return jax.vmap(one)(batch, places)


def flat(tree: Any, moves: Callable[[str], bool]) -> jax.Array:
    """The leaves that move beside one another: (B, d), from leaves (B, ...)."""
    leaves = [
        x.reshape(len(x), -1)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if moves(sphere.path_str(path))
    ]
    return jnp.concatenate(leaves, axis=1)


def unflat(vector: jax.Array, like: Any, moves: Callable[[str], bool]) -> Any:
    """The tree of a vector (d,), float32; zero in the leaves that do not move."""
    named, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves, at = [], 0
    for path, x in named:
        shape = np.shape(x)
        if not moves(sphere.path_str(path)):
            leaves.append(jnp.zeros(shape, vector.dtype))
            continue
        leaves.append(vector[at : at + math.prod(shape)].reshape(shape))
        at += math.prod(shape)
    return jax.tree.unflatten(structure, leaves)
