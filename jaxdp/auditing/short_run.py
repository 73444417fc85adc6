r"""Short runs of a second-order plan in which every record's role is known.

What a query reads depends on what was released, so the states of a run are forced: before
each step the points that follow from releases are prescribed, which an adversary may do,
for every release is private wherever it is asked for. Then all that is random is noise. The
step itself is the library's, with all that it decides; a dry run tells what that is.

Every record is a loss :math:`s\,(g t + q t^2/2 + h t^3/6)` of one coordinate t, with a sign
s: so steep that its gradient, its change, its Hessian and that one's change all saturate
their bounds, in one direction and with one sign. Whatever role a record gets, it moves the
release by what is claimed, and in all of its roles if a fault gives it several.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting
from jaxdp.core.keys import Keys

_STEEP = 1e3  # of a record, over its bounds
#: How far inside of the radius the steps of an escape are, and its last one, which leaves:
#: what a failed escape released last would not be seen.
_INSIDE, _LAST = 3e-3, 1e-3
_ROWS = 3  # that are read at once: few, so that a query has several slices
_DEVIATIONS = 8
# Most rows of a short run's queries.
_REFRESH_ROWS, _DIFFERENCE_ROWS, _HESSIAN_ROWS = 4, 2, 2


class Trace(NamedTuple):
    """Queries and escapes in each step, the same in all runs: arrays (T,)."""

    kind: np.ndarray  # of the gradient query: NONE, REFRESH or DIFFERENCE
    rows: np.ndarray  # that it reads
    extra: np.ndarray  # rows of a running Hessian, after them
    first: np.ndarray  # of these rows
    refreshes: np.ndarray  # after the step
    began: np.ndarray  # whether an escape began
    hessian: np.ndarray  # first row of the escape's own Hessians
    length: np.ndarray  # of the vector of a product, over the radius; 0 if none


class Script(NamedTuple):
    """Parts of each step that are the same in all runs, stacked (T, ...)."""

    before: Any  # the state, without a run's own part
    progress: jax.Array  # the counters after the step
    trace: Trace


def prepared(plan: Any) -> Any:
    """Returns the plan itself if it is a short run of any length, else one of it."""
    longest = max(plan.max_differences, plan.escape_steps or 0)
    return plan if shortened(plan, longest) == plan else shortened(plan)


def shortened(plan: Any, num_steps: int = 8) -> Any:
    """Returns the plan with the same noise, clips, modes and passes, and short periods.

    Two periods in a pass, or half of one where there are several passes: then a pass ends
    within a period. Privacy depends on none of what changes, but for the number of
    products of an escape, which the noise of the products follows. ``num_steps`` is the
    most differences between two refreshes, and the most steps of an escape (2 at least).
    """
    noise = plan.noise_multiplier * accounting.sensitivity(plan.relation, 1.0)
    released, tracked = plan.hessian == "released", plan.hessian == "tracked"
    period = min(plan.max_differences, num_steps)
    refresh = min(plan.refresh_batch_size, _REFRESH_ROWS)
    rows = _difference_rows(plan)
    # The lowest eigenvalue must be seen: those of the others take it well below the noise.
    most = math.ceil(12 * noise) + 1 if released else _HESSIAN_ROWS
    curvature = min(plan.hessian_batch_size, most)
    per_refresh = min(plan.escapes_per_refresh, 2)
    escape_steps, escapes, budget = plan.escape_steps, 0, 0.0
    if escape_steps is not None:
        escape_steps = (
            escape_steps if released else min(escape_steps, max(num_steps, 2))
        )
        escapes = per_refresh + 2 if tracked else 2
        if plan.hessian_filter:
            one = noise * plan.hessian_clip_norm / curvature
            budget = one * plan.escape_radius * math.sqrt(escape_steps - 1)
    # A pass, and the steps of all of them.
    whole = plan.num_passes == 1
    refreshes, differences = (2, 2 * period) if whole else (1, max(period // 2, 1))
    differences = min(differences, plan.max_differences * 2)
    records = refreshes * refresh + differences * rows
    if tracked:
        refreshes += whole
        records += whole * refresh + refreshes * curvature + differences
    else:
        records += escapes * curvature
    steps = plan.num_passes * (refreshes + differences)
    steps += escapes * ((escape_steps or 1) - 1)
    small = dataclasses.replace(
        plan,
        smoothness=1.0,
        num_examples=min(plan.num_examples, records),
        num_steps=min(plan.num_steps, steps),
        escapes_per_refresh=per_refresh,
        escape_steps=escape_steps,
        escape_noise_std=budget,
        refresh_batch_size=refresh,
        difference_batch_size=rows if plan.difference_batch_size else None,
        hessian_batch_size=curvature,
        max_differences=period,
        drift_limit=2 * (period + 1) * rows / plan.difference_batch_rate,
        curvature_threshold=0.0 if released else plan.curvature_threshold,
        query_in_escape=False,
        stop_at_certificate=False,
        trigger_norm=1e30,
        dim=None if plan.dim is None else min(plan.dim, 2),
    )
    return dataclasses.replace(small, smoothness=_smoothness(small))


def _difference_rows(plan: Any) -> int:
    """Returns the number of rows of a difference query."""
    most = plan.difference_batch_size or _DIFFERENCE_ROWS
    other = plan.num_examples - min(plan.refresh_batch_size, _REFRESH_ROWS)
    return min(most, _DIFFERENCE_ROWS, max(other, 1))


def _smoothness(plan: Any) -> float:
    """Returns a smoothness so large that points stay where they are prescribed."""
    products = 0.0  # An upper estimate of their length.
    if plan.escape_steps is not None and plan.hessian != "released":
        largest = plan.hessian_clip_norm * plan.escape_radius
        products = _DEVIATIONS * plan.escape_std + largest
    swing = products / (_INSIDE - _LAST) * 2.1
    gradient = plan.l2_clip_norm + 10 * plan.noise_std + plan.drift_limit
    return max(swing, 2 * gradient, 1.0) / plan.escape_radius


def _pace(plan: Any) -> float:
    """Returns the distance between the points of two successive gradient queries."""
    rate = plan.difference_batch_rate * plan.smoothness
    return (_difference_rows(plan) - 0.5) / rate


def dim(plan: Any) -> int:
    """Returns d, the number of parameters of a short run."""
    return 2 if plan.dim is None else plan.dim


def axis(plan: Any) -> np.ndarray:
    """Returns the unit vector of t, (d,)."""
    # Oblique, so that bounds on single coordinates are seen.
    return np.array([0.6, 0.8] if dim(plan) == 2 else [1.0], np.float32)


def algorithm(plan: Any, keys: Keys) -> Any:
    """Returns the plan's algorithm, which reads few rows at once."""
    most = 16 if plan.hessian == "released" else _ROWS
    return plan.algorithm(keys, microbatch_size=min(plan.num_examples, most))


def value_fn(plan: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the loss function: (parameters (d,), signs (B,)) -> losses (B,)."""
    pace, rows = _pace(plan), _difference_rows(plan)
    slope = _STEEP * plan.l2_clip_norm
    bend = rows / plan.difference_batch_rate / pace
    bend = _STEEP * max(bend, plan.hessian_clip_norm)
    twist = _STEEP * plan.hessian_clip_norm / pace

    def losses(params: jax.Array, signs: jax.Array) -> jax.Array:
        t = jnp.vdot(params, jnp.asarray(axis(plan)), precision="highest")
        return signs * t * (slope + t * (bend / 2 + t * (twist / 6)))

    return losses


def _forced(plan: Any, state: Any) -> Any:
    """Returns the state with the next query's point, gradient and cooldown prescribed."""
    escape, along = state.escape, jnp.asarray(axis(plan))
    wanted = 0
    if plan.escape_steps is not None:
        # With a running Hessian, two more than a Hessian may serve in.
        wanted = plan.escapes_per_refresh + 2 if plan.hessian == "tracked" else 2
    # The first escape fails, so that its end is seen; the others leave by the last step.
    leaves = (escape.left <= 1) & (state.escapes > 1)
    inside = jnp.where(leaves, 1 - _LAST, 1 - _INSIDE)
    there = escape.anchor + along * (inside * plan.escape_radius)
    on = state.spider.reference + along * _pace(plan)
    # As if the gradient at the anchor led out of the radius, from the last point only.
    push = -along * (plan.smoothness * plan.escape_radius * (_INSIDE + _LAST) / 2)
    gradient = jnp.where(escape.active, push, escape.gradient)
    cool = jnp.where(state.escapes < wanted, 0, 1)
    return state._replace(
        point=jnp.where(escape.active, there, on),
        escape=escape._replace(gradient=gradient, cool=cool),
    )


def observable(before: Any, after: Any) -> jax.Array:
    """Returns True if a Hessian product can be recovered from the next point."""
    # After an escape that failed it cannot.
    within = before.escape.active | (after.escapes > before.escapes)
    within &= after.horizon.count > before.horizon.count
    back = ~after.escape.active & jnp.all(after.point == after.escape.anchor)
    return within & ~back


def split(state: Any) -> tuple[Any, Any]:
    """Splits a state into the part common to all runs and the run's own part."""
    spider, escape = state.spider, state.escape
    own = spider.estimate, spider.noise, escape.hessian, escape.root
    return joined(state, (None, None, None, None)), own


def joined(public: Any, own: Any) -> Any:
    """Joins the two parts of a state: the inverse of :func:`split`."""
    estimate, noise, hessian, root = own
    return public._replace(
        spider=public.spider._replace(estimate=estimate, noise=noise),
        escape=public.escape._replace(hessian=hessian, root=root),
    )


def progress(state: Any) -> jax.Array:
    """Returns the public counters of a run, which with its points decide the next query."""
    horizon, spider, escape = state.horizon, state.spider, state.escape
    numbers = (
        *(horizon.count, horizon.exhausted, spider.since, spider.cursor),
        *(spider.passes, spider.refreshes, spider.differences),
        *(escape.active, escape.left, escape.first, escape.since),
        *(state.escapes, state.records, state.ended),
    )
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers])


@functools.lru_cache(maxsize=8)
def dry_run(plan: Any) -> Script:
    """Runs the plan on records that contribute nothing, and returns its script."""
    runs = algorithm(plan, Keys.insecure(0))
    signs = jnp.zeros(plan.num_examples)

    def step(state: Any, _: None) -> tuple[Any, Script]:
        before = _forced(plan, state)
        after, _ = runs.step(before, signs, value_fn=value_fn(plan))
        trace = _traced(plan, before, after)
        return after, Script(split(before)[0], progress(after), trace)

    start = runs.init(jnp.zeros(dim(plan)))
    run = jax.jit(lambda state: jax.lax.scan(step, state, None, plan.num_steps)[1])
    return jax.tree.map(np.asarray, run(start))


def _traced(plan: Any, before: Any, after: Any) -> Any:
    extra: Any = jnp.int32(0)
    kind, rows = (after.release[i].astype(jnp.int32) for i in (0, 1))
    if plan.hessian == "tracked":
        extra = after.records - before.records
    first = before.spider.cursor
    began = after.escapes > before.escapes
    first = jnp.where(first + rows + extra > plan.num_examples, 0, first)
    escape = after.escape
    length = jnp.linalg.norm(before.point - escape.anchor) / plan.escape_radius
    length = jnp.where(observable(before, after), length, 0)
    if plan.hessian == "released":
        length = began.astype(jnp.float32)
    refreshes = after.spider.refreshes
    made: Any = kind, rows, extra, first, refreshes, began, escape.first, length
    return Trace(*made)
