"""Variance-reduced query: an estimate of a gradient, or of its change.

What is released at a step is the increment of a running estimate: the mean of clipped
per-record vectors (GRAD where a period begins, DIFF elsewhere; of values, or of gradients),
plus noise. One record moves the sum of a step that reads it by at most the phase's
``l2_clip_norm`` in L2 (twice that if replaced), enforced on integers; what the noise's
correlation and further steps make of it is in the plan's ``sensitivity``.

The scalar oracle releases the mean of clipped slopes along directions that all records
share, and makes its estimate of that: as many numbers as there are directions.

The sum that the noise is added to holds this step's records alone: no un-noised running
estimate exists anywhere.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.core import release
from jaxdp.core.correlated_noise import CorrelatedNumbers
from jaxdp.core.types import PathPredicate, ValueFn
from jaxdp.kernels import finite_difference, smoothed_gradient, sphere
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.fixed_point import Fixed


class IncrementNumbers(NamedTuple):
    """Frozen numbers of a plan that the oracles read."""

    noise: CorrelatedNumbers
    oracle: str
    max_step: float
    scale_with_movement: bool
    smoothing_radius: float
    num_directions: int
    direction: str
    difference: str
    share_directions: bool


def release_size(numbers: IncrementNumbers, dim: int) -> int:
    """Returns the number of values that a step releases, given the d that move."""
    return numbers.num_directions if numbers.oracle == "scalar" else dim


def release_increment(
    numbers: IncrementNumbers,
    value_fn: ValueFn,
    params: Any,
    previous: Any,
    records: Any,
    places: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    noise: Fixed,
    *,
    phase: str,
    moves: PathPredicate,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """Releases (sum of clipped vectors + noise) / normalizer.

    Args:
      numbers: estimators, and the grid of each phase.
      value_fn: per-record losses.
      params: where the gradient is wanted.
      previous: where it was released last; read in differences, of which bound and noise
        may be proportional to the distance of the two.
      records: pytree with leading axis B.
      places: uint32 (B,), names of the records' own directions: what a record's are must
        not depend on which others are in the batch.
      mask: bool (B,); a False row contributes zero.
      key: of the step's directions; public.
      noise: (:func:`release_size`,), in units of the phase's noise; secret.
      phase: ``"restart"`` (GRAD) or ``"difference"`` (DIFF); static.
      moves: which leaves move; they have d elements.
      stacked: leaves whose first axis counts layers.
      microbatch_size: records evaluated at once. Changes neither bound nor noise.
      axis_name: mesh axis whose devices share the records, as in
        :func:`jaxdp.dpzero.oracle.release_slopes`.

    Returns:
      float32 (d,): released; of the scalar oracle a function of what is.

    Source: Zhang, Tran & Cutkosky, ICLR 2024, Algorithms 1, 2, 4 and 6; Kornowski, Liu &
    Talwar, ICML 2025, Algorithms 3 to 6.
    """
    grid = numbers.noise.grids[phase]
    if numbers.scale_with_movement and phase == "difference":
        share = _moved(params, previous, moves) / (2 * numbers.max_step)
        # All of the bound at most, and never nothing, which has no grid.
        share = jnp.clip(share, 2.0**-20, 1)
        grid = grid._replace(l2_clip_norm=grid.l2_clip_norm * share)
    params, previous, places = (
        finite_difference.on_each(tree, axis_name)
        for tree in (params, previous, places)
    )

    def draw(key: jax.Array, num: int = numbers.num_directions) -> sphere.Direction:
        return sphere.directions(
            key,
            params,
            law=numbers.direction,
            num=num,
            trainable=moves,
            stacked=stacked,
        )

    def total(part: tuple[Any, jax.Array]) -> jax.Array:
        (some, places), kept = part
        if numbers.oracle == "scalar":
            along = draw(key)
            radius = smoothed_gradient.scale(numbers.smoothing_radius, along.dim)
            rows = finite_difference.slopes(
                value_fn, params, some, along, smoothing_radius=radius
            )
        else:
            points = (params,) if phase == "restart" else (params, previous)
            place = (some, places, key)
            rows = _estimates(numbers, value_fn, points, place, draw, moves)
        return release.bounded_sum(grid, rows, kept)

    summed = finite_difference.sum_microbatches(
        total, ((records, places), mask), microbatch_size, axis_name
    )
    released = release.noised_mean(grid, summed, noise)
    if numbers.oracle != "scalar":
        return released
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), params
    )
    estimate = finite_difference.combine(released, draw(key), like)
    return smoothed_gradient.flat(jax.tree.map(lambda x: x[None], estimate), moves)[0]


def _moved(params: Any, previous: Any, moves: PathPredicate) -> jax.Array:
    """Computes the distance of two query points; public."""
    apart = jax.tree.map(
        lambda x, y: (jnp.asarray(x, jnp.float32) - jnp.asarray(y, jnp.float32))[None],
        params,
        previous,
    )
    return jnp.linalg.norm(smoothed_gradient.flat(apart, moves))


def _estimates(
    numbers: IncrementNumbers,
    value_fn: ValueFn,
    points: tuple[Any, ...],
    records: tuple[Any, jax.Array, jax.Array],
    draw: Any,
    moves: PathPredicate,
) -> jax.Array:
    """Computes GRAD at a point, or DIFF of two, of every record (B, d); not bounded.

    ``records`` are those, their places, and the key. With gradients GRAD takes one of each
    record.
    """
    options: dict[str, Any] = {"smoothing_radius": numbers.smoothing_radius}
    grad: Callable[..., Any] = smoothed_gradient.gradients
    diff: Callable[..., Any] = smoothed_gradient.differences
    one = draw
    if numbers.oracle == "first_order":
        options["moves"], one = moves, functools.partial(draw, num=1)
        grad, diff = (
            smoothed_gradient.ball_gradients,
            smoothed_gradient.ball_differences,
        )
    else:
        options["share"] = numbers.share_directions
    if len(points) == 1:
        vectors = grad(value_fn, *points, *records, one, **options)
    else:
        options["kind"] = numbers.difference
        vectors = diff(value_fn, *points, *records, draw, **options)
    return smoothed_gradient.flat(vectors, moves)
