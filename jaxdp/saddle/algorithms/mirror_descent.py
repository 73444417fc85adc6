r"""Algorithm 1: mirror descent for saddle points, its gradients taken at drawn vertices."""

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

ROLES = ("vertices_x", "vertices_y")


class SaddleNumbers(NamedTuple):
    """Numbers of the plan that :func:`saddle_mirror_descent` reads."""

    run: Run
    sampler: str
    center_gradients: bool  # before they are clipped
    dims: tuple[int, int]  # vertices of x and y
    batch_size: int
    num_draws: int  # K
    output: str  # "fresh" or "mean"
    grids: tuple[ScoreGrid, ScoreGrid]


class SaddleState(NamedTuple):
    """State of :func:`saddle_mirror_descent` and of :func:`saddle_bias_reduced`."""

    horizon: run_state.Horizon
    scores_x: jax.Array  # shape=(dim_x,), dtype=int32; secret: never noised or shown
    scores_y: jax.Array  # shape=(dim_y,), dtype=int32; secret
    counts_x: jax.Array  # shape=(dim_x,), dtype=int32; of vertices that were put out
    counts_y: jax.Array  # shape=(dim_y,), dtype=int32
    roots: tuple[jax.Array, ...]  # keys of what is drawn; secret
    release: jax.Array  # shape=(R,), dtype=float32; the vertices that the step drew

    count, exhausted = run_state.count, run_state.exhausted
    SECRET = ("scores_x", "scores_y", "roots")
    KEPT = ("scores_x", "scores_y")
    __repr__ = run_state.hiding_repr


def saddle_mirror_descent(
    plan: Any,
    keys: keys_lib.Keys,
    *,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Algorithm:
    r"""Minimises over x and maximises over y, each a mixture of the vertices of a polytope.

    Each player's iterate is the softmax of its scores and is never released. A step draws
    K vertices from each (exponential mechanisms: no noise is added to anything), takes
    every record's gradient at their mean, clips its coordinates, and moves the scores by
    the batch's means, x down and y up; the paper's printed sign lets both descend. One more
    vertex from each iterate goes into the output.

    ``params`` of ``init`` are weights of the vertices to start from, (x (dim_x,), y
    (dim_y,)), as ``plan.uniform()`` makes them. ``step`` takes the whole data set and
    ``value_fn(x, y, batch) -> (B,)``, or a problem of ``jaxdp`` (``Problem``,
    ``MatrixGame``, ``LinearModel``, ``MaxOfLosses``). ``output`` gives weights of the
    vertices, (x, y).

    Args:
      plan: a ``jaxdp.plans.Saddle`` with its step sizes.
      keys: a ``jaxdp.Keys``.
      microbatch_size: records whose gradients are taken at once.
      axis_name: mesh axis, or several, whose devices share the records of a batch, as in
        :func:`jaxdp.dpzero`. One integer for each vertex is added over them; every device
        has all scores.

    Privacy:
      A step releases 2 (K + 1) vertices. One record is read in one step, and moves every
      later score by at most ``plan.sensitivity_x`` (``_y``), exactly: scores are integers.
      The state holds them, un-noised: they are secret, and what ``jaxdp.public`` drops.

    Raises:
      TypeError, ValueError: a plan of another family or without step sizes, bare keys; in
        ``init`` and ``step`` sizes that are not the plan's.

    Example:
      >>> import functools
      >>> import jax
      >>> import jaxdp
      >>> game = jaxdp.models.rock_paper_scissors(dim=4)
      >>> plan = jaxdp.plans.Saddle(
      ...     num_examples=256, num_steps=4, sampling=jaxdp.sampling.SinglePass(64),
      ...     relation="replace_one", dim_x=4, dim_y=4,
      ...     linf_clip_norm_x=1.5, linf_clip_norm_y=1.5,
      ... ).calibrate(epsilon=1.0, delta=1e-6)
      >>> algorithm = jaxdp.saddle_mirror_descent(plan, jaxdp.Keys.insecure(0))
      >>> state, data = algorithm.init(plan.uniform()), game.make_data(256, seed=0)
      >>> step = jax.jit(functools.partial(algorithm.step, value_fn=game.value_fn))
      >>> for _ in range(plan.num_steps):
      ...     state, info = step(state, data)
      >>> [weights.shape for weights in algorithm.output(state)]
      [(4,), (4,)]

    References:
      Gonzalez, Guzman, Paquette, `Mirror Descent Algorithms with Nearly
      Dimension-Independent Rates for Differentially-Private Stochastic Saddle-Point
      Problems <https://arxiv.org/abs/2403.02912>`_, 2024, Algorithm 1, corrected.
    """
    p, begun, roots = players.prepare(plan, keys, "saddle", *ROLES)
    num, size = p.num_draws, p.batch_size

    def init(params: Any) -> SaddleState:
        width = 2 * (num + 1)
        width = width if width <= players.MOST_LOGGED else 2
        return begin(p, keys, begun, roots, params, width)

    def step(state: SaddleState, data: Any, *, value_fn: Any) -> tuple[Any, Any]:
        run_state.refuse_differing(axis_name, state=state, data=data)
        problem = oracles.as_problem(value_fn)
        domain_x, domain_y = players.domains(problem, *p.dims)
        active, horizon = run_state.advance(p.run, state)
        count = state.horizon.count
        key_x, key_y = (keys_lib.at_step(root, count) for root in state.roots)
        # Independent draws: the last one is for the output.
        drawn_x = players.draw(p.sampler, key_x, state.scores_x, num + 1)
        drawn_y = players.draw(p.sampler, key_y, state.scores_y, num + 1)
        records, mask = players.batch(p.run, data, count * size, size, active)
        grid_x, grid_y = p.grids
        totals: Any = problem.gradient_sums(
            domain_x.point(players.mean(drawn_x[:num], p.dims[0])),
            domain_y.point(players.mean(drawn_y[:num], p.dims[1])),
            records,
            mask,
            grid_x.bound,
            grid_y.bound,
            center=p.center_gradients,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
        )
        fresh, every = (drawn_x[num:], drawn_y[num:]), (drawn_x, drawn_y)
        return after(
            state,
            horizon,
            active,
            (-grid_x.change(totals[0]), grid_y.change(totals[1])),
            every if p.output == "mean" else fresh,
            jnp.concatenate(fresh if state.release.size == 2 else every),
        )

    return Algorithm(run_state.of_outlines_too(init), step, output)


def begin(
    p: Any,
    keys: keys_lib.Keys,
    horizon: run_state.Horizon,
    roots: tuple[jax.Array, ...],
    params: Any,
    width: int,
) -> SaddleState:
    """Returns the state before the first step and spends the keys."""
    if run_state.is_placeholder(params):
        params = (params, params)
    if not isinstance(params, tuple | list) or len(params) != 2:
        raise ValueError(
            "params must be the players' weights, (x (dim_x,), y (dim_y,)), as "
            f"plan.uniform() gives them; got {type(params).__name__}"
        )
    scores_x = players.start("x", params[0], p.dims[0])
    scores_y = players.start("y", params[1], p.dims[1])
    run_state.begin_run(params, keys, p.run.family)
    counts = (jnp.zeros_like(scores_x), jnp.zeros_like(scores_y))
    release = jnp.zeros((width,), jnp.float32)
    state = SaddleState(horizon, scores_x, scores_y, *counts, roots, release)
    return jax.tree.map(jnp.array, state)  # Copies, because callers donate their state.


def after(
    state: SaddleState,
    horizon: run_state.Horizon,
    active: jax.Array,
    increments: tuple[jax.Array, jax.Array],
    shown: tuple[jax.Array, jax.Array],
    release: jax.Array,
) -> tuple[SaddleState, players.Info]:
    """Returns state and info after a step that drew ``shown`` for the output."""
    by = active.astype(jnp.int32)
    release = run_state.zero_where_done(active, release.astype(jnp.float32))
    x = simplex.moved(state.scores_x, increments[0])
    y = simplex.moved(state.scores_y, increments[1])
    new = SaddleState(
        horizon,
        jnp.where(active, x, state.scores_x),
        jnp.where(active, y, state.scores_y),
        state.counts_x.at[shown[0]].add(by),
        state.counts_y.at[shown[1]].add(by),
        state.roots,
        release,
    )
    return new, players.Info(release)


def output(state: SaddleState) -> tuple[jax.Array, ...]:
    """Returns each vertex's share of the output's draws, float32 (dim_x,), (dim_y,)."""
    counts = (state.counts_x, state.counts_y)  # All zero before the first step.
    totals = (jnp.maximum(c.sum(), 1).astype(jnp.float32) for c in counts)
    return tuple(c.astype(jnp.float32) / t for c, t in zip(counts, totals, strict=True))
