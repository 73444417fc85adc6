r"""Algorithms 2 and 3: mirror descent with a multilevel gradient of reduced bias."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.types import Run
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.saddle import oracles
from jaxdp.saddle.algorithms import mirror_descent, players
from jaxdp.saddle.algorithms.mirror_descent import SaddleState
from jaxdp.saddle.grids import LevelGrids


class BiasReducedNumbers(NamedTuple):
    """Numbers of the plan that :func:`saddle_bias_reduced` reads."""

    run: Run
    sampler: str
    center_gradients: bool  # before they are clipped
    dims: tuple[int, int]  # vertices of x and y
    levels: tuple[int, ...]  # of each step
    batch_sizes: tuple[int, ...]  # by level
    grids: tuple[tuple[LevelGrids, ...], ...]  # by level, of x and y


def saddle_bias_reduced(
    plan: Any,
    keys: keys_lib.Keys,
    *,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Algorithm:
    r"""Runs :func:`jaxdp.saddle_mirror_descent` with gradients of a smaller bias.

    A step of level N draws :math:`2^{N+1}` vertices of each player and adds to the gradient
    at the first one :math:`C_M2^N` times how the gradient at the mean of all of them
    differs from that at the mean of the first half. Over the random level these
    differences telescope, so that the bias is that of :math:`2^{M+1}` vertices at the cost
    of a few. Levels, and so the sizes of the batches, depend on no data: they are the
    plan's, drawn from its ``level_seed``.

    Args:
      plan: a ``jaxdp.plans.SaddleBiasReduced`` with its step sizes.
      keys: as in :func:`jaxdp.saddle_mirror_descent`, like ``microbatch_size`` and errors.
      microbatch_size: records whose gradients are taken at once.
      axis_name: see there.

    Privacy:
      A step of level N releases :math:`2(2^{N+1}+1)` vertices. One record is read in one
      step; each of its three gradients is clipped by itself.

    Example:
      >>> import jax
      >>> import jaxdp
      >>> game = jaxdp.models.rock_paper_scissors(dim=4)
      >>> plan = jaxdp.plans.SaddleBiasReduced(
      ...     num_examples=2000, relation="replace_one", dim_x=4, dim_y=4,
      ...     linf_clip_norm_x=1.5, linf_clip_norm_y=1.5,
      ...     vertex_budget=40, level_seed=0,
      ... ).calibrate(epsilon=1.0, delta=1e-6)
      >>> algorithm = jaxdp.saddle_bias_reduced(plan, jaxdp.Keys.insecure(0))
      >>> state, data = algorithm.init(plan.uniform()), game.make_data(2000, seed=0)
      >>> def one_step(state):
      ...     state, info = algorithm.step(state, data, value_fn=game.value_fn)
      ...     return algorithm.output(state)
      >>> [weights.shape for weights in jax.eval_shape(one_step, state)]
      [(4,), (4,)]

    References:
      As :func:`jaxdp.saddle_mirror_descent`, Algorithms 2 and 3, corrected.
    """
    p, begun, roots = players.prepare(
        plan, keys, "saddle_bias_reduced", *mirror_descent.ROLES
    )
    levels = np.array(p.levels, np.int32)
    sizes = [p.batch_sizes[level] for level in p.levels]
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.int32)
    most = 2 ** (max(p.levels) + 1)

    def init(params: Any) -> SaddleState:
        return mirror_descent.begin(p, keys, begun, roots, params, 2)

    def step(state: SaddleState, data: Any, *, value_fn: Any) -> tuple[Any, Any]:
        run_state.refuse_differing(axis_name, state=state, data=data)
        problem = oracles.as_problem(value_fn)
        active, horizon = run_state.advance(p.run, state)
        count = jnp.minimum(state.horizon.count, len(levels) - 1)
        at = jnp.asarray(levels)[count]
        # Independent draws, for the highest level; a lower one uses the first of them. The
        # one after those is for the output.
        number = jnp.int32(2) << at
        domains = players.domains(problem, *p.dims)
        points, shown = [], []
        for domain, root, scores, dim in zip(
            domains, state.roots, (state.scores_x, state.scores_y), p.dims, strict=True
        ):
            key = keys_lib.at_step(root, count)
            seen = players.draw(p.sampler, key, scores, most + 1)
            means = [_mean(seen, n, dim) for n in (number, jnp.int32(1), number // 2)]
            points.append(jnp.stack([domain.point(mean) for mean in means]))
            shown.append(jax.lax.dynamic_slice_in_dim(seen, number, 1))
        branches = [
            functools.partial(
                _increments, p, problem, data, n, microbatch_size, axis_name
            )
            for n in range(max(p.levels) + 1)
        ]
        first = jnp.asarray(starts)[count]
        increments = jax.lax.switch(at, branches, points, first, active)
        return mirror_descent.after(
            state, horizon, active, increments, tuple(shown), jnp.concatenate(shown)
        )

    return Algorithm(run_state.of_outlines_too(init), step, mirror_descent.output)


def _mean(vertices: jax.Array, number: jax.Array, size: int) -> jax.Array:
    """Computes the mean of the first ``number`` vertices, as weights float32 (size,)."""
    counted = jnp.arange(len(vertices)) < number
    total = jnp.zeros(size, jnp.int32).at[vertices].add(counted.astype(jnp.int32))
    return total.astype(jnp.float32) / number.astype(jnp.float32)


def _increments(
    p: BiasReducedNumbers,
    problem: Any,
    data: Any,
    level: int,
    microbatch_size: int | None,
    axis_name: AxisName | None,
    points: list[jax.Array],
    first: jax.Array,
    active: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs Algorithm 2 at one level: returns the increments of both players' scores.

    ``points`` are means of all vertices, of the first one and of the first half, stacked.
    """
    size = p.batch_sizes[level]
    records, mask = players.batch(p.run, data, first, size, active)
    grids_x, grids_y = p.grids[level]

    def totals(point: tuple[jax.Array, ...]) -> Any:
        """Returns the sums of gradients at a point: compiled once for all of them."""
        return problem.gradient_sums(
            *point,
            records,
            mask,
            grids_x.base.bound,
            grids_y.base.bound,
            center=p.center_gradients,
            microbatch_size=microbatch_size and min(microbatch_size, size),
            axis_name=axis_name,
        )

    taken = 3 if level else 2  # At level 0 the first half is the first vertex.
    found = jax.lax.map(totals, tuple(x[:taken] for x in points))
    x, y = ((each[0], each[taken - 1], each[1]) for each in found)
    return -combined(level, grids_x, *x), combined(level, grids_y, *y)


def combined(
    level: int, grids: LevelGrids, every: jax.Array, half: jax.Array, one: jax.Array
) -> jax.Array:
    """Computes the increment of the scores from the totals at the three points.

    At level 0 half of the vertices is the first one, and what is taken away of it is less
    than what is added: :math:`C_M g_+ - (C_M - 1) g_1`.
    """
    if level == 0:
        return grids.difference.change(every) - grids.base.change(one)
    return grids.difference.change(every - half) + grids.base.change(one)
