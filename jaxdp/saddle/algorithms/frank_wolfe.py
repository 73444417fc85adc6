r"""Frank-Wolfe for convex problems: every step moves towards a vertex that is drawn."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.types import Run
from jaxdp.kernels import simplex
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.saddle import oracles
from jaxdp.saddle.algorithms import players
from jaxdp.saddle.grids import ScoreGrid


class FrankWolfeNumbers(NamedTuple):
    """Numbers of the plan that :func:`frank_wolfe` reads."""

    run: Run
    sampler: str
    center_gradients: bool  # before they are clipped
    dim: int  # vertices
    batch_size: int
    full_batch: bool  # whether every step reads all records
    grid: ScoreGrid


class FrankWolfeState(NamedTuple):
    """State of :func:`frank_wolfe`. Public but for the keys: it holds no scores."""

    horizon: run_state.Horizon
    weights: jax.Array  # shape=(dim,), dtype=float32; of the vertices, at the iterate
    roots: tuple[jax.Array, ...]  # keys of what is drawn; secret
    release: jax.Array  # shape=(1,), dtype=float32; the vertex that the step drew

    count, exhausted = run_state.count, run_state.exhausted
    SECRET = ("roots",)
    __repr__ = run_state.hiding_repr


def frank_wolfe(
    plan: Any,
    keys: keys_lib.Keys,
    *,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Algorithm:
    r"""Minimises a convex expected loss over mixtures of the vertices of a polytope.

    Step t = 1, 2, .. takes every record's gradient at the iterate, clips its derivatives by
    the weights of the vertices, and draws one vertex v by the exponential mechanism: with
    probability proportional to :math:`e^{-\tau g_v}`, where g is the mean over the batch.
    The iterate moves to :math:`x+\frac2{t+2}(v-x)`. The last one is the output.

    ``params`` of ``init`` are weights (dim,) of the vertices to start from, public
    (``plan.uniform()``); ``step`` takes the whole data set and ``value_fn(x, batch) ->
    (B,)`` or a problem of ``jaxdp``; ``output`` gives weights of the vertices.

    Args:
      plan: a ``jaxdp.plans.FrankWolfe`` with its inverse temperature.
      keys: as in :func:`jaxdp.saddle_mirror_descent`, like ``microbatch_size`` and errors.
      microbatch_size: records whose gradients are taken at once.
      axis_name: see there.

    Privacy:
      A step releases one vertex. It is drawn from integer scores of its own, each of which
      one record of the batch moves by at most ``plan.sensitivity``, exactly. The iterate is
      post-processing of the vertices.

    Example:
      >>> import functools
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.FrankWolfe(
      ...     num_examples=256, num_steps=4, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", dim=3, linf_clip_norm=1.0,
      ... ).calibrate(epsilon=1.0, delta=1e-6)
      >>> algorithm = jaxdp.frank_wolfe(plan, jaxdp.Keys.insecure(0))
      >>> def value_fn(x, batch):
      ...     return jnp.sum((x - batch) ** 2, axis=1) / 2
      >>> state, data = algorithm.init(plan.uniform()), jnp.eye(3)[jnp.zeros(256, int)]
      >>> step = jax.jit(functools.partial(algorithm.step, value_fn=value_fn))
      >>> state, info = step(state, data)
      >>> weights = algorithm.output(state)
      >>> weights.shape, round(float(weights.sum()), 4)
      ((3,), 1.0)

    References:
      Talwar, Thakurta and Zhang, `Nearly Optimal Private LASSO
      <https://papers.nips.cc/paper/5729>`_, 2015, Algorithm 2, with draws of the
      exponential mechanism; Jaggi, Revisiting Frank-Wolfe, 2013. Not the
      variance-reduced method of Asi, Feldman, Koren and Talwar, 2021.
    """
    p, begun, roots = players.prepare(plan, keys, "frank_wolfe", "vertices_x")
    size = p.batch_size

    def init(params: Any) -> FrankWolfeState:
        checked = players.start("x", params, p.dim)
        known = checked if run_state.is_placeholder(params) else params
        run_state.begin_run(params, keys, p.run.family)
        weights = jnp.asarray(known, jnp.float32)
        state = FrankWolfeState(begun, weights, roots, jnp.zeros((1,), jnp.float32))
        return jax.tree.map(jnp.array, state)

    def step(state: FrankWolfeState, data: Any, *, value_fn: Any) -> tuple[Any, Any]:
        run_state.refuse_differing(axis_name, state=state, data=data)
        problem = oracles.as_problem(value_fn)
        (domain,) = players.domains(problem, p.dim)
        active, horizon = run_state.advance(p.run, state)
        count = state.horizon.count
        first = jnp.zeros_like(count) if p.full_batch else count * size
        records, mask = players.batch(p.run, data, first, size, active)
        total, _ = problem.gradient_sums(
            domain.point(state.weights),
            None,
            records,
            mask,
            p.grid.bound,
            None,
            center=p.center_gradients,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
        )
        key = keys_lib.at_step(state.roots[0], count)
        vertex = players.draw(p.sampler, key, scores_of(p.grid, total), 1)
        rate = 2 / (count + 3).astype(jnp.float32)
        moved = (1 - rate) * state.weights
        moved = moved.at[vertex].add(rate)
        release = run_state.zero_where_done(active, vertex.astype(jnp.float32))
        new = state._replace(
            horizon=horizon,
            weights=jnp.where(active, moved, state.weights),
            release=release,
        )
        return new, players.Info(release)

    return Algorithm(run_state.of_outlines_too(init), step, output)


def output(state: FrankWolfeState) -> jax.Array:
    """Returns the weights of the vertices at the last iterate, float32 (dim,)."""
    return state.weights


def scores_of(grid: ScoreGrid, total: jax.Array) -> jax.Array:
    """Returns normalized scores int32 (dim,): minus the totals, scaled by the grid.

    The least total is subtracted first, so that scores fit however large the scale is: the
    totals of a grid of :class:`.FrankWolfe` differ by less than 2**31. A difference that
    takes a score to the lowest one or beyond counts as the least that does. Neither widens
    the range over the vertices of what one record moves, as in ``simplex.normalized``.
    """
    above = total - jnp.min(total)
    if grid.multiplier:
        lowest = -(simplex.LOWEST << grid.shift) // grid.multiplier + 1
        above = jnp.minimum(above, jnp.int32(min(lowest, 2**31 - 1)))
    return simplex.normalized(-grid.change(above))
