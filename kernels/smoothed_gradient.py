r"""Vector estimates of the gradient of a smoothed loss, and of its change.

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

A loss that can be differentiated needs no scores. With v uniform in the ball of radius
:math:`\sqrt d` (law ``ball``), :math:`\frac1m\sum_j\nabla f(x+\lambda v_j)` is unbiased for
the same gradient: it is the mean of f over the ball that is differentiated. (Kornowski,
Liu & Talwar, ICML 2025: Algorithm 5 has the ball. Their equation (10) has the sphere, whose
mean is another gradient: of :math:`|x|` on the line, 0 wherever :math:`|x|<\delta`, and not
:math:`x/\delta`.) The change from y to x has two unbiased estimates:

===============  ====================================================  ===============
kind             term of one point                                     gradients
===============  ====================================================  ===============
``common``       :math:`\nabla f(x+\lambda v)-\nabla f(y+\lambda v)`   2
``independent``  the same, y with a point of its own                   2
===============  ====================================================  ===============

On an L-Lipschitz loss a term is at most 2L in size, whatever d is. Common points give zero
on linear losses, and :math:`x-y` itself on :math:`\frac12\|x\|^2`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.kernels import finite_difference, perturb, sphere
from jaxdp.kernels.finite_difference import ValueFn
from jaxdp.kernels.sphere import Direction, PathPredicate
from jaxdp.kernels.threefry import fold_in, rounded, zero_after

KINDS = ("antithetic", "one_sided", "independent")
BALL_KINDS = ("common", "independent")

#: Draws the m directions of a key.
Draw = Callable[[jax.Array], Direction]


def scale(smoothing_radius: float, dim: int) -> float:
    r"""Returns :math:`\lambda`, the factor from directions of norm sqrt(d) to radius.

    Example:
      >>> from jaxdp.kernels import smoothed_gradient
      >>> smoothed_gradient.scale(0.1, dim=100)
      0.01
    """
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
    """Computes GRAD of every record.

    Args:
      value_fn: ``value_fn(params, batch) -> losses (B,)``, or a ``LazyLoss``.
      params: pytree; d elements of it move.
      batch: pytree with leading axis B.
      places: int (B,), of the records in the data: names of their directions.
      key: typed key of the step; public.
      draw: the directions of a key, m of them.
      smoothing_radius: delta > 0, in units of the params.
      share: whether all records take the same directions.

    Returns:
      A tree like ``params``, float32, with leading axis B; zero where nothing moves.
      Neither bounded nor private: may be NaN or infinite.

    Example:
      >>> import functools
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import smoothed_gradient, sphere
      >>> x, batch = jnp.zeros(2), jnp.array([[1.0, 0.0], [0.0, 2.0]])
      >>> draw = functools.partial(sphere.directions, like=x, law="orthonormal", num=2)
      >>> vectors = smoothed_gradient.gradients(
      ...     lambda x, batch: batch @ x, x, batch, jnp.arange(2), jax.random.key(0), draw,
      ...     smoothing_radius=0.1, share=True,
      ... )
      >>> bool(jnp.allclose(vectors, batch, atol=1e-5))  # Linear losses: exact.
      True
    """

    def estimate(records: Any, key: jax.Array) -> Any:
        rows = draw(key)
        radius = scale(smoothing_radius, rows.dim)
        table = finite_difference.slopes(
            value_fn, params, records, rows, smoothing_radius=radius
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
    """Computes DIFF of every record: the smoothed gradient's change since ``previous``.

    As :func:`gradients`, with ``params`` x, ``previous`` y, and one of :data:`KINDS`.

    Raises:
      ValueError: another kind.

    Example:
      >>> import functools
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import smoothed_gradient, sphere
      >>> x, y, batch = jnp.ones(2), jnp.zeros(2), jnp.eye(2)
      >>> draw = functools.partial(sphere.directions, like=x, law="sphere", num=3)
      >>> vectors = smoothed_gradient.differences(
      ...     lambda x, batch: batch @ x, x, y, batch, jnp.arange(2), jax.random.key(0),
      ...     draw, smoothing_radius=0.1, share=True, kind="antithetic",
      ... )
      >>> bool(jnp.allclose(vectors, 0, atol=1e-4))  # Linear losses: their gradient stays.
      True
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
            other = draw(_other_key(key))
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


def ball_gradients(
    value_fn: ValueFn,
    params: Any,
    batch: Any,
    places: jax.Array,
    key: jax.Array,
    draw: Draw,
    *,
    smoothing_radius: float,
    moves: PathPredicate,
) -> Any:
    """Computes the mean gradient of every record over m points near ``params``.

    The points of a record are its own, and are visited one after the other: one gradient
    of each record is alive beside the sum. A point is formed in float32 (or wider) and
    rounded to the leaf's dtype.

    Args:
      value_fn: ``value_fn(params, batch) -> losses (B,)``; differentiated with respect to
        the leaves that move, for one record at a time.
      params: as in :func:`gradients`, and so is what is not named here.
      batch: pytree with leading axis B.
      places: int (B,).
      key: typed key of the step; public.
      draw: the directions of a key, over the leaves that move; law ``ball``.
      smoothing_radius: delta > 0.
      moves: predicate on the path: the leaves that move, of floating dtypes. No other leaf
        is differentiated.

    Returns:
      As :func:`gradients`.

    Raises:
      TypeError: a ``LazyLoss``.
      ValueError: losses of another shape.

    Example:
      >>> import functools
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import smoothed_gradient, sphere
      >>> x, batch = jnp.zeros(2), jnp.eye(2)
      >>> draw = functools.partial(sphere.directions, like=x, law="ball", num=3)
      >>> vectors = smoothed_gradient.ball_gradients(
      ...     lambda x, batch: batch @ x, x, batch, jnp.arange(2), jax.random.key(0), draw,
      ...     smoothing_radius=0.1, moves=lambda path: True,
      ... )
      >>> bool(jnp.allclose(vectors, batch))  # Linear losses: exact.
      True

    Source: Kornowski, Liu & Talwar, ICML 2025, Algorithm 5.
    """
    _refuse_lazy(value_fn)

    def estimate(record: Any, key: jax.Array) -> Any:
        rows = draw(key)
        radius = scale(smoothing_radius, rows.dim)

        def term(row: Direction) -> Any:
            return _gradient(value_fn, params, record, row, radius, moves)

        return _mean(term, (rows,), params)

    return _each(estimate, batch, places, key, share=False)


def ball_differences(
    value_fn: ValueFn,
    params: Any,
    previous: Any,
    batch: Any,
    places: jax.Array,
    key: jax.Array,
    draw: Draw,
    *,
    smoothing_radius: float,
    moves: PathPredicate,
    kind: str,
) -> Any:
    """Computes the change of every record's mean gradient since ``previous``.

    As :func:`ball_gradients` (whose source has independent points), with ``params`` x,
    ``previous`` y, and one of :data:`BALL_KINDS`.

    Raises:
      TypeError: a ``LazyLoss``.
      ValueError: another kind, or losses of another shape.

    Example:
      >>> import functools
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import smoothed_gradient, sphere
      >>> x, y, batch = jnp.ones(2), jnp.zeros(2), jnp.eye(2)
      >>> draw = functools.partial(sphere.directions, like=x, law="ball", num=3)
      >>> vectors = smoothed_gradient.ball_differences(
      ...     lambda x, batch: (batch @ x) ** 2 / 2, x, y, batch, jnp.arange(2),
      ...     jax.random.key(0), draw, smoothing_radius=0.1, moves=lambda path: True,
      ...     kind="common",
      ... )
      >>> bool(jnp.allclose(vectors, batch, atol=1e-5))  # Quadratic losses: exact.
      True
    """
    _refuse_lazy(value_fn)
    if kind not in BALL_KINDS:
        raise ValueError(f"kind must be one of {', '.join(BALL_KINDS)}; got {kind!r}")

    def estimate(record: Any, key: jax.Array) -> Any:
        here = draw(key)
        there = here if kind == "common" else draw(_other_key(key))
        radius = scale(smoothing_radius, here.dim)

        def term(here: Direction, there: Direction) -> Any:
            one = _gradient(value_fn, params, record, here, radius, moves)
            two = _gradient(value_fn, previous, record, there, radius, moves)
            return jax.tree.map(jnp.subtract, one, two)

        return _mean(term, (here, there), params)

    return _each(estimate, batch, places, key, share=False)


def _refuse_lazy(value_fn: ValueFn) -> None:
    if isinstance(value_fn, perturb.LazyLoss):
        raise TypeError(
            "value_fn must be a plain value_fn(params, batch) -> losses (B,): first-order "
            "oracles differentiate it, and take no LazyLoss"
        )


def _gradient(
    value_fn: ValueFn,
    params: Any,
    record: Any,
    row: Direction,
    radius: float,
    moves: PathPredicate,
) -> Any:
    """Computes a batch-of-one gradient at ``params + radius * row`` in float32."""
    point = perturb.perturb(params, row, jnp.asarray(radius))

    def loss(moving: dict[str, jax.Array]) -> jax.Array:
        whole = jax.tree_util.tree_map_with_path(
            lambda path, x: moving.get(sphere.path_str(path), x), point
        )
        losses = value_fn(whole, record)
        finite_difference.check_losses(losses, 1)
        return losses[0]

    leaves = jax.tree_util.tree_leaves_with_path(point)
    named = {sphere.path_str(path): x for path, x in leaves}
    slopes = jax.grad(loss)({path: x for path, x in named.items() if moves(path)})
    # Rounded before it is used, in every program alike: equal gradients cancel to zero.
    zero = zero_after(jax.random.key_data(row.leaf_keys))

    def leaf(path: tuple[Any, ...], x: Any) -> jax.Array:
        name = sphere.path_str(path)
        if name not in slopes:
            return jnp.zeros(jnp.shape(x), jnp.float32)
        return rounded(slopes[name].astype(jnp.float32), zero)

    return jax.tree_util.tree_map_with_path(leaf, params)


def _mean(term: Callable[..., Any], rows: tuple[Direction, ...], params: Any) -> Any:
    """Averages ``term(*rows)``, one after the other; leaves (1, ...), of one record."""

    def add(total: Any, each: tuple[Direction, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, term(*each)), None

    # Of the records' keys, which may differ from device to device: so must the first sum.
    start = zero_after(jax.random.key_data(rows[0].leaf_keys)).astype(jnp.float32)
    zeros = jax.tree.map(lambda x: jnp.full(jnp.shape(x), start), params)
    total, _ = jax.lax.scan(add, zeros, rows)
    num = rows[0].scale.shape[0]
    return jax.tree.map(lambda x: x[None] / num, total)


def _other_key(key: jax.Array) -> jax.Array:
    """Returns the key of the other point, if it has directions of its own."""
    return fold_in(key, sphere.leaf_id("directions of the other point"))


def _vectors(table: jax.Array, rows: Direction, params: Any) -> Any:
    """Combines scores (B, m) with the m directions to vectors, divided by m."""

    def row(weights: jax.Array) -> Any:
        return finite_difference.combine(weights, rows, like)

    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), params
    )
    return jax.vmap(row)(table.astype(jnp.float32))


def _each(
    estimate: Callable[[Any, jax.Array], Any],
    batch: Any,
    places: jax.Array,
    key: jax.Array,
    *,
    share: bool,
) -> Any:
    """Calls ``estimate(records, key)`` on all records, or on each with its own key."""
    if share:
        return estimate(batch, key)

    def one(record: Any, place: jax.Array) -> Any:
        own = fold_in(key, place)
        vectors = finite_difference.on_one_record(
            lambda alone: estimate(alone, own), record
        )
        return jax.tree.map(lambda x: x[0], vectors)

    return finite_difference.over_records(one)(batch, places)
