r"""Algorithm 5: a histogram that answers queries as the data do."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state, validate
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.types import Run
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import players
from jaxdp.saddle.grids import ScoreGrid
from jaxdp.saddle.oracles.queries import Queries
from jaxdp.sampling import batches


class QueryNumbers(NamedTuple):
    """Numbers of the plan that :func:`synthetic_data` reads."""

    run: Run
    sampler: str
    domain_size: int
    num_queries: int  # with the negations
    query_range: float
    grid_bits: int  # of queries
    histogram_step_size: float
    grid: ScoreGrid


class SyntheticState(NamedTuple):
    """State of :func:`synthetic_data`. Public but for the fields called secret."""

    horizon: run_state.Horizon
    totals: jax.Array  # shape=(m,), dtype=int32; answers of the data; secret
    fractions: jax.Array  # shape=(m,), dtype=int32; of how they moved scores; secret
    scores: jax.Array  # shape=(2 m,), dtype=int32; of queries and negated ones; secret
    logits: jax.Array  # shape=(domain_size,), dtype=float32; follows from the releases
    total: jax.Array  # shape=(domain_size,), dtype=float32; sum of histograms so far
    roots: tuple[jax.Array, ...]  # keys of what is drawn; secret
    release: jax.Array  # shape=(1,), dtype=float32; the query that the step drew

    count, exhausted = run_state.count, run_state.exhausted
    SECRET = ("totals", "fractions", "scores", "roots")
    KEPT = ("totals", "fractions", "scores")
    __repr__ = run_state.hiding_repr


def synthetic_data(plan: Any, keys: keys_lib.Keys) -> Algorithm:
    r"""Fits a histogram over a finite domain to the data's answers to m queries.

    The one player holds a histogram, the other one weights of the queries and of their
    negations. Each step draws one query from the second player (an exponential mechanism,
    the only thing that is released), moves the histogram towards what that query misses,
    and the scores of all queries by how far the histogram is off.

    ``params`` of ``init`` is the histogram to start from (domain_size,), public
    (``plan.uniform()``). ``step`` takes the records as codes, integers (n,), and the
    queries (``jaxdp.Marginals``, ``jaxdp.QueryMatrix``) as ``value_fn``; it reads the
    records in its first step. ``output`` gives the mean of the histograms, private as it
    is; records are drawn from it with :func:`jaxdp.synthetic_records`.

    Args:
      plan: a ``jaxdp.plans.SyntheticData`` with its step sizes.
      keys: a ``jaxdp.Keys``.

    Privacy:
      A step releases one query's number. All records are in every score: one moves those
      of step t by at most ``plan.sensitivity_at(t)``, exactly, for scores are integers.

    Raises:
      TypeError, ValueError: a plan of another family or without step sizes, bare keys; in
        ``init`` and ``step`` sizes that are not the plan's.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> queries = jaxdp.Marginals(sizes=(2, 2), degree=2)
      >>> plan = jaxdp.plans.SyntheticData(
      ...     num_examples=100, num_steps=3, relation="replace_one",
      ...     domain_size=queries.domain_size,
      ...     num_queries=2 * queries.num_queries,  # The queries and their negations.
      ... ).calibrate(epsilon=1.0, delta=1e-6)
      >>> algorithm = jaxdp.synthetic_data(plan, jaxdp.Keys.insecure(0))
      >>> state, codes = algorithm.init(plan.uniform()), jnp.zeros(100, jnp.int32)
      >>> for _ in range(plan.num_steps):
      ...     state, info = algorithm.step(state, codes, value_fn=queries)
      >>> histogram = algorithm.output(state)
      >>> histogram.shape, round(float(histogram.sum()), 4)
      ((4,), 1.0)

    References:
      As :func:`jaxdp.saddle_mirror_descent`, Algorithm 5.
    """
    p, begun, roots = players.prepare(plan, keys, "synthetic_data", "vertices_y")
    half = p.num_queries // 2
    grid = p.grid
    finer = grid.bits - p.grid_bits  # Totals on the grid of the scores.
    # What one unit of a centred query moves a score by, of which the data's is a mean.
    unit = p.run.num_examples * 2.0**grid.bits * grid.multiplier / 2.0**grid.shift
    step_size = np.float32(p.histogram_step_size * p.query_range / 2)

    def init(params: Any) -> SyntheticState:
        start = players.start("x", params, p.domain_size)
        known = start if run_state.is_placeholder(params) else params
        logits = jnp.log(jnp.asarray(known, jnp.float32))
        run_state.begin_run(params, keys, p.run.family)
        nothing = jnp.zeros((half,), jnp.int32)
        scores = jnp.zeros((2 * half,), jnp.int32)
        total = jnp.zeros_like(logits)
        release = jnp.zeros((1,), jnp.float32)
        state = SyntheticState(
            begun, nothing, nothing, scores, logits, total, roots, release
        )
        return jax.tree.map(jnp.array, state)

    def step(state: SyntheticState, data: Any, *, value_fn: Any) -> tuple[Any, Any]:
        queries = value_fn
        validate.instance(Queries, value_fn=queries)
        _check(p, queries)
        batches.check_data(p.run, data)
        active, horizon = run_state.advance(p.run, state)
        count = state.horizon.count
        totals = jax.lax.cond(
            count == 0, lambda: queries.totals(data) << finer, lambda: state.totals
        )
        histogram = jax.nn.softmax(state.logits)
        key = keys_lib.at_step(state.roots[0], count)
        drawn = players.draw(p.sampler, key, state.scores, 1)[0]
        # x minimises -<q, x>.
        sign = jnp.where(drawn < half, step_size, -step_size)
        logits = state.logits + sign * queries.values(drawn % half)
        moved, fractions = _taken(grid, totals, state.fractions)
        model = jnp.round(jnp.float32(unit) * queries.evaluate(histogram))
        increment = moved - model.astype(jnp.int32)
        both = jnp.concatenate([increment, -increment])
        release = run_state.zero_where_done(
            active, drawn.astype(jnp.float32).reshape(1)
        )
        scores = simplex.moved(state.scores, both)
        total = state.total + histogram
        new = (totals, fractions, scores, logits - logits.max(), total)
        old = (state.totals, state.fractions, state.scores, state.logits, state.total)
        kept = [jnp.where(active, a, b) for a, b in zip(new, old, strict=True)]
        state = SyntheticState(horizon, *kept, roots=state.roots, release=release)
        return state, players.Info(release)

    return Algorithm(run_state.of_outlines_too(init), step, output)


def output(state: SyntheticState) -> jax.Array:
    """Returns the mean of the histograms so far, float32 (domain_size,)."""
    steps = jnp.maximum(state.horizon.count, 1).astype(jnp.float32)
    return state.total / steps


def _check(p: QueryNumbers, queries: Queries) -> None:
    wanted = (p.domain_size, p.num_queries, p.query_range, p.grid_bits)
    given = (
        queries.domain_size,
        2 * queries.num_queries,
        queries.query_range,
        queries.bits,
    )
    if wanted != given:
        raise ValueError(
            "value_fn must be queries of the plan's domain_size, num_queries (twice those "
            f"given, for the negations), query_range and grid_bits, {wanted}, got {given}"
        )


def _taken(
    grid: ScoreGrid, totals: jax.Array, fractions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the change of the scores by the totals in a step, and the fraction left.

    After t steps they have moved by floor(t * total * multiplier / 2**shift), exactly:
    what a step rounds away is kept for the next. So one record moves a score that never
    saturated by t times what it moves it by in a step and one unit at most, not t units.
    """
    whole = grid.change(totals)
    product = totals.astype(jnp.uint32) * jnp.uint32(grid.multiplier)  # Modulo 2**32.
    below = (product & jnp.uint32(2**grid.shift - 1)).astype(jnp.int32)
    fractions = fractions + below
    carry = fractions >> grid.shift
    return whole + carry, fractions - (carry << grid.shift)


def synthetic_records(
    keys: keys_lib.Keys, histogram: jax.Array, num_records: int
) -> jax.Array:
    """Draws records from a histogram: post-processing if the histogram is private.

    Args:
      keys: a ``jaxdp.Keys``, that of the run or another; it is not spent.
      histogram: weights (domain_size,), >= 0; they need not sum to one.
      num_records: how many; >= 1.

    Returns:
      Codes, int32 (num_records,), independent.

    Raises:
      TypeError: bare keys, or no integer. ValueError: no such histogram or number, or
        keys from entropy that a traced function closes over.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> histogram = jnp.array([0.0, 0.5, 0.5, 0.0])
      >>> codes = jaxdp.synthetic_records(jaxdp.Keys.insecure(0), histogram, 100)
      >>> codes.shape, sorted(set(codes.tolist()))
      ((100,), [1, 2])
    """
    keys = keys_lib.check(keys)
    keys_lib.check_given(keys, keys.noise)
    validate.integer(num_records=num_records)
    weights = np.asarray(histogram, np.float32)
    if weights.ndim != 1:
        raise ValueError(
            f"histogram must have shape (domain_size,), got {weights.shape}"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ValueError(
            "histogram must be finite numbers >= 0, not all of them zero, got "
            f"{weights[:4]}..."
        )
    key = keys_lib.stream(keys.noise, "records", 0)
    return simplex.sample_float(key, jnp.log(weights), num_records)
