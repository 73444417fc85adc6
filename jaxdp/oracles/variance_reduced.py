"""The variance-reduced query: an estimate of a gradient, or of how it changed.

What is released at a step is the increment of a running estimate: the mean of clipped
per-record vectors (GRAD where a period begins, DIFF elsewhere), plus noise that is
correlated over the period. One record is read in one step and moves that step's sum by at
most the phase's ``l2_clip_norm`` in L2 (twice that if replaced), enforced on integers; what
the correlation makes of it is in the plan's ``sensitivity``.

The sum that the noise is added to holds this step's records alone: no un-noised running
estimate exists anywhere.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp._types import Grid, IncrementPlan, PathPredicate, ValueFn
from jaxdp.kernels import clip, finite_difference, smoothed_gradient, sphere
from jaxdp.kernels.finite_difference import AxisName


def release_increment(
    plan: IncrementPlan,
    value_fn: ValueFn,
    params: Any,
    previous: Any,
    records: Any,
    mask: jax.Array,
    key: jax.Array,
    noise: jax.Array,
    *,
    phase: str,
    moves: PathPredicate,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """Releases (sum of clipped vectors + noise) / normalizer.

    Args:
      plan: estimators, and the grid of each phase.
      value_fn: per-record losses.
      params: where the gradient is wanted.
      previous: where it was released last; read in differences only.
      records: pytree with leading axis B.
      mask: bool (B,); a False row contributes zero.
      key: of the step's directions; public.
      noise: float32 (d,), in standard deviations of a node; secret.
      phase: ``"restart"`` (GRAD) or ``"difference"`` (DIFF); static.
      moves: which leaves move; they have d elements.
      stacked: leaves whose first axis counts layers.
      microbatch_size: records evaluated at once. Changes neither bound nor noise.
      axis_name: mesh axis whose devices share the records, as in
        :func:`jaxdp.oracles.scalar.release_slopes`.

    Returns:
      float32 (d,): released.

    Source: Zhang, Tran & Cutkosky, ICLR 2024, Algorithms 1, 2 and 4; Kornowski, Liu &
    Talwar, ICML 2025, Algorithm 3.
    """
    params, previous = (
        finite_difference.on_each(tree, axis_name) for tree in (params, previous)
    )

    def draw(key: jax.Array) -> sphere.Direction:
        return sphere.directions(
            key,
            params,
            law=plan.direction,
            num=plan.num_directions,
            trainable=moves,
            stacked=stacked,
        )

    shared: dict[str, Any] = {
        "smoothing_radius": plan.smoothing_radius,
        "share": plan.share_directions,
    }

    def total(part: tuple[Any, jax.Array]) -> jax.Array:
        (some, places), kept = part
        if phase == "restart":
            vectors = smoothed_gradient.gradients(
                value_fn, params, some, places, key, draw, **shared
            )
        else:
            vectors = smoothed_gradient.differences(
                value_fn,
                params,
                previous,
                some,
                places,
                key,
                draw,
                kind=plan.difference,
                **shared,
            )
        return bounded_sum(
            plan.grid(phase), smoothed_gradient.flat(vectors, moves), kept
        )

    places = jnp.arange(finite_difference.num_rows(records), dtype=jnp.uint32)
    summed = finite_difference.sum_microbatches(
        total, ((records, places), mask), microbatch_size, axis_name
    )
    return noised_mean(plan.grid(phase), summed, noise)


def bounded_sum(grid: Grid, rows: jax.Array, mask: jax.Array) -> jax.Array:
    """The sum of clipped rows (B, d): int32 (d,), not noised yet.

    Without a bound (the non-private limit), the finite rows as they are, in float32.
    """
    if grid.bits is None:
        rows = clip.clip_vector(rows, jnp.inf)
        return jnp.where(mask[:, None], rows, 0).sum(axis=0)
    return clip.grid_sum(rows, mask, grid.l2_clip_norm, grid.bits)


def noised_mean(grid: Grid, total: jax.Array, noise: jax.Array) -> jax.Array:
    """Adds noise to what :func:`bounded_sum` gave and divides by a constant: released.

    The noise is rounded to the grid: what comes out is the ideal Gaussian mechanism's
    output, rounded. (What remains of float32 is the tail of its normals.)
    """
    if grid.bits is None:
        return total.astype(jnp.float32) / jnp.float32(grid.normalizer)
    scaled = jnp.round(noise * jnp.float32(grid.noise_scale)).astype(jnp.int32)
    return clip.from_grid(total + scaled, grid.l2_clip_norm, grid.bits, grid.normalizer)
