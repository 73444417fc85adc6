r"""Algorithm 4: convex problems, by mirror descent on anytime averages."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.types import Run
from jaxdp.kernels import simplex
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.saddle import oracles
from jaxdp.saddle.algorithms import players
from jaxdp.saddle.grids import ScoreGrid


class ConvexNumbers(NamedTuple):
    """Numbers of the plan that :func:`simplex_convex` reads."""

    run: Run
    sampler: str
    center_gradients: bool  # before they are clipped
    dim: int  # vertices
    batch_size: int
    num_draws: int  # K
    refresh_every: int  # q
    grid: ScoreGrid


class Schedule(NamedTuple):
    """Vertex draws of each step, by the averages that they are for. Public: without data.

    The average of the first t iterates is a mixture of softmaxes. To draw from it is to
    draw one of the t iterates, and a vertex of that: here the iterate is drawn before the
    run, and its vertex at the time of the iterate, which is the same law. So every vertex
    comes from a softmax of integer scores, and no average is ever formed.
    """

    slots: jax.Array  # shape=((R + 1) K,), dtype=int32; draws in order of their step
    offsets: jax.Array  # shape=(T + 1,), dtype=int32; the first draw of each step


class ConvexState(NamedTuple):
    """State of :func:`simplex_convex`."""

    horizon: run_state.Horizon
    scores: jax.Array  # shape=(dim,), dtype=int32; secret: never noised or shown
    drawn: jax.Array  # shape=(R + 1, K), dtype=int32; vertices for each point
    schedule: Schedule
    roots: tuple[jax.Array, ...]  # keys of what is drawn; secret
    release: jax.Array  # shape=(K or 1,), dtype=float32; vertices of the point in use

    count, exhausted = run_state.count, run_state.exhausted
    SECRET = ("scores", "roots")
    KEPT = ("scores",)
    __repr__ = run_state.hiding_repr


def simplex_convex(
    plan: Any,
    keys: keys_lib.Keys,
    *,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Algorithm:
    r"""Minimises a convex expected loss over mixtures of the vertices of a polytope.

    Gradients are taken at drawn means of K vertices of the *average* of the iterates, which
    moves less and less: after the first q steps a point serves for q of them. Every step
    reads a fresh batch, clips the coordinates of every record's gradient, and moves the
    scores by their mean.

    ``params`` of ``init`` are weights (dim,) of the vertices to start from, public
    (``plan.uniform()``); ``step`` takes the whole data set and ``value_fn(x, batch) ->
    (B,)`` or a problem of ``jaxdp``; ``output`` gives weights of the vertices.

    Args:
      plan: a ``jaxdp.plans.ConvexSimplex`` with its step size.
      keys: as in :func:`jaxdp.saddle_mirror_descent`, like ``microbatch_size`` and errors.
      microbatch_size: records whose gradients are taken at once.
      axis_name: see there.

    Privacy:
      K vertices are released for each point, and K for the output. One record is read in
      one step, and moves every later score by at most ``plan.sensitivity``.

    Example:
      >>> import functools
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.ConvexSimplex(
      ...     num_examples=256, num_steps=4, sampling=jaxdp.sampling.SinglePass(64),
      ...     relation="replace_one", dim=3, linf_clip_norm=1.0,
      ...     num_draws=2, refresh_every=2,
      ... ).calibrate(epsilon=1.0, delta=1e-6)
      >>> algorithm = jaxdp.simplex_convex(plan, jaxdp.Keys.insecure(0))
      >>> def value_fn(x, batch):
      ...     return jnp.sum((x - batch) ** 2, axis=1) / 2
      >>> state, data = algorithm.init(plan.uniform()), jnp.eye(3)[jnp.zeros(256, int)]
      >>> step = jax.jit(functools.partial(algorithm.step, value_fn=value_fn))
      >>> state, info = step(state, data)
      >>> weights = algorithm.output(state)
      >>> weights.shape, round(float(weights.sum()), 4)
      ((3,), 1.0)

    References:
      As :func:`jaxdp.saddle_mirror_descent`, Algorithm 4.
    """
    p, begun, roots = players.prepare(plan, keys, "convex_simplex", "vertices_x")
    run, size, num = p.run, p.batch_size, p.num_draws
    source = keys_lib.stream(keys.direction, "source", context=run.context)
    times = refresh_times(run.num_steps, p.refresh_every)

    def init(params: Any) -> ConvexState:
        scores = players.start("x", params, p.dim)
        run_state.begin_run(params, keys, run.family)
        drawn = jnp.zeros((len(times) + 1, num), jnp.int32)
        width = num if num <= players.MOST_LOGGED else 1
        release = jnp.zeros((width,), jnp.float32)
        schedule = make_schedule(source, times, run.num_steps, num)
        state = ConvexState(begun, scores, drawn, schedule, roots, release)
        return jax.tree.map(jnp.array, state)

    def step(state: ConvexState, data: Any, *, value_fn: Any) -> tuple[Any, Any]:
        run_state.refuse_differing(axis_name, state=state, data=data)
        problem = oracles.as_problem(value_fn)
        (domain,) = players.domains(problem, p.dim)
        active, horizon = run_state.advance(run, state)
        count = state.horizon.count
        drawn = jnp.where(active, _drawn(p, state, count), state.drawn)
        seen = drawn[_point_in_use(count, p.refresh_every)]
        point = players.mean(seen, p.dim)
        records, mask = players.batch(run, data, count * size, size, active)
        total, _ = problem.gradient_sums(
            domain.point(point),
            None,
            records,
            mask,
            p.grid.bound,
            None,
            center=p.center_gradients,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
        )
        scores = simplex.moved(state.scores, -p.grid.change(total))
        release = seen.astype(jnp.float32)
        if state.release.size < num:
            release = jnp.linalg.norm(point).reshape(1)
        release = run_state.zero_where_done(active, release)
        new = state._replace(
            horizon=horizon,
            scores=jnp.where(active, scores, state.scores),
            drawn=drawn,
            release=release,
        )
        return new, players.Info(release)

    return Algorithm(
        run_state.of_outlines_too(init), step, functools.partial(output, p)
    )


def output(p: ConvexNumbers, state: ConvexState) -> jax.Array:
    """Returns the mean of K vertices of the last average.

    Before the end it is that of the point in use.
    """
    last = jnp.maximum(state.horizon.count - 1, 0)
    at = _point_in_use(last, p.refresh_every)
    at = jnp.where(state.horizon.exhausted, len(state.drawn) - 1, at)
    return players.mean(state.drawn[at], p.dim)


def refresh_times(num_steps: int, refresh_every: int) -> list[int]:
    """Returns the steps, from 1, that draw a new point: 1, .., q, 2q, 3q, .."""
    early = range(1, min(refresh_every, num_steps) + 1)
    return [*early, *range(2 * refresh_every, num_steps + 1, refresh_every)]


def _point_in_use(count: jax.Array, refresh_every: int) -> jax.Array:
    """Returns the index of the point that a step uses after ``count`` earlier steps."""
    lazy = (count + 1) // refresh_every + refresh_every - 2
    return jnp.where(count < refresh_every, count, lazy)


def make_schedule(
    key: jax.Array, times: list[int], num_steps: int, num_draws: int
) -> Schedule:
    """Draws, for every vertex of every point, the iterate that it is to come from.

    The key is public; points are drawn at ``times``, the output's at ``num_steps``.
    """
    until = np.repeat(np.array([*times, num_steps]), num_draws)
    uniform = jax.random.uniform(key, until.shape, jnp.float32)
    place = uniform * until.astype(np.float32)
    steps = jnp.minimum(place.astype(jnp.int32), until - 1)
    slots = jnp.argsort(steps, stable=True).astype(jnp.int32)
    counts = jnp.zeros((num_steps + 1,), jnp.int32).at[steps + 1].add(1)
    return Schedule(slots, jnp.cumsum(counts).astype(jnp.int32))


def _drawn(p: ConvexNumbers, state: ConvexState, count: jax.Array) -> jax.Array:
    """Returns the vertices of all points, with this step's draws filled in."""
    slots, offsets = state.schedule
    key = keys_lib.at_step(state.roots[0], count)
    num, end = p.num_draws, offsets[count + 1]

    def more(carry: tuple[jax.Array, ...]) -> jax.Array:
        return carry[0] < end

    def draw(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first, part, drawn = carry
        vertices = players.draw(
            p.sampler, keys_lib.at_step(key, part), state.scores, num
        )
        places = first + jnp.arange(num)
        # What lies beyond the step's draws goes nowhere.
        where = jnp.where(places < end, slots.at[places].get(mode="clip"), drawn.size)
        return first + num, part + 1, drawn.at[where].set(vertices, mode="drop")

    begin = (offsets[count], jnp.int32(0), state.drawn.reshape(-1))
    return jax.lax.while_loop(more, draw, begin)[2].reshape(state.drawn.shape)
