r"""Marginals that are measured, and a histogram that is fitted to them round by round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdp.core import keys as keys_lib
from jaxdp.core import release, run_state, validate
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.types import Grid, Run
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import players
from jaxdp.saddle.grids import ScoreGrid
from jaxdp.saddle.oracles import queries as queries_lib
from jaxdp.saddle.oracles.queries import Marginals
from jaxdp.sampling import batches

#: Steps of the fit between two rounds, from the histogram so far; and after the last.
_FIT_STEPS, _LAST_FIT_STEPS = 50, 1000
#: Weight of the divergence from the start, in units of the variance of a measured share:
#: without it, a histogram of few records fits the noise. Tables of 300 to 20000 records
#: lose nothing by it where noise is small, and a fifth of the error where it is large.
PRIOR_WEIGHT = 10.0
#: Weight of a cell that has none, where its logarithm is taken.
_LEAST = 1e-30


class MarginalNumbers(NamedTuple):
    """Numbers of the plan that :func:`mwem` reads."""

    run: Run
    queries: Marginals
    num_start: int
    noise_std: float  # of a measured share
    grid: Grid  # of the counts
    score_grid: ScoreGrid
    lowest_score: int  # counts below the largest score at which scores saturate
    penalties: tuple[int, ...]  # counts, by marginal


class FittedHistogram(NamedTuple):
    """Histogram and measured shares, with which a run begins and ends. Public."""

    histogram: jax.Array  # shape=(domain_size,), dtype=float32, of sum 1
    shares: jax.Array  # shape=(m,), dtype=float32; means of the measured shares, else 0
    times: jax.Array  # shape=(marginals,), dtype=float32; how often each was measured


class MarginalState(NamedTuple):
    """State of :func:`mwem`. Public but for the fields called secret."""

    horizon: run_state.Horizon
    cells: jax.Array  # shape=(m,), dtype=int32; counts of the records; secret
    start: jax.Array  # shape=(domain_size,), dtype=float32; logarithm of the start
    fit: FittedHistogram
    roots: tuple[jax.Array, ...]  # keys of the noise and of what is drawn; secret
    #: shape=(2,), dtype=float32; the marginal that the step drew, -1 in the first one, and
    #: the norm of the shares that it measured.
    release: jax.Array

    count, exhausted = run_state.count, run_state.exhausted
    SECRET = ("cells", "roots")
    KEPT = ("cells",)
    __repr__ = run_state.hiding_repr


def mwem(plan: Any, keys: keys_lib.Keys) -> Algorithm:
    r"""Measures marginals of a table, the worst known ones next, and fits a histogram.

    The first step measures the plan's first ``num_start`` marginals, all at once. Each
    further step draws one marginal by the exponential mechanism, measures it, and fits
    the histogram to all that was measured so far. The score of a marginal is the L1
    distance of its counts from those of the histogram, less the L1 norm that the noise of
    a measurement has on average. Counts get discrete Gaussian noise.

    ``params`` of ``init`` is the point to start from, public (``plan.uniform()``): a
    histogram, and shares that were measured before, if any. ``step`` takes the records as
    codes, integers (n,), and ``plan.queries`` as ``value_fn``; it reads the records in its
    first step, and a code outside the domain counts in no cell. ``output`` gives the
    fitted histogram, the mean measured shares, and how often each marginal was measured.

    Args:
      plan: a ``jaxdp.plans.MWEM`` with noise.
      keys: a ``jaxdp.Keys``.

    Privacy:
      One record moves the counts of a marginal by at most ``plan.sensitivity`` in L2, and
      each score by at most ``plan.score_sensitivity``: both are exact, for counts and
      scores are integers, and what they are compared with follows from earlier releases.

    Raises:
      TypeError, ValueError: a plan of another family or without noise, bare keys; in
        ``init`` and ``step`` sizes or queries that are not the plan's.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.MWEM(
      ...     num_examples=100, num_steps=3, relation="replace_one", sizes=(2, 3, 2),
      ...     attributes=((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)), num_start=3,
      ... ).calibrate(epsilon=1.0, delta=1e-6)
      >>> algorithm = jaxdp.mwem(plan, jaxdp.Keys.insecure(0))
      >>> state, codes = algorithm.init(plan.uniform()), jnp.zeros(100, jnp.int32)
      >>> for _ in range(plan.num_steps):
      ...     state, info = algorithm.step(state, codes, value_fn=plan.queries)
      >>> fit = algorithm.output(state)
      >>> fit.histogram.shape, float(fit.times.sum())
      ((12,), 5.0)

    References:
      Hardt, Ligett and McSherry, A simple and practical algorithm for differentially
      private data release, 2012, with whole marginals in place of single queries; McKenna,
      Mullins, Sheldon and Miklau, `AIM: an adaptive and iterative mechanism for
      differentially private synthetic data <https://arxiv.org/abs/2201.12677>`_, 2022,
      whose score this is.
    """
    keys = keys_lib.check(keys)
    run_state.check_plan(plan, "mwem")
    p: MarginalNumbers = plan.numbers
    queries, last = p.queries, p.run.num_steps - 1
    begun = run_state.new_horizon(p.run, private=keys.private and p.grid.noise_std > 0)
    roots = (
        run_state.noise_root(p.run, keys),
        keys_lib.stream(keys.noise, "vertices_y", context=p.run.context),
    )

    def init(params: Any) -> MarginalState:
        known = plan.uniform() if run_state.is_placeholder(params) else params
        fit = _checked(queries, known)
        run_state.begin_run(params, keys, p.run.family)
        cells = jnp.zeros((queries.num_queries,), jnp.int32)
        start = jnp.log(jnp.maximum(fit.histogram, _LEAST))
        nothing = jnp.zeros((2,), jnp.float32)
        state = MarginalState(begun, cells, start, fit, roots, nothing)
        return jax.tree.map(jnp.array, state)

    def step(state: MarginalState, data: Any, *, value_fn: Any) -> tuple[Any, Any]:
        if value_fn != queries:
            raise ValueError(f"value_fn must be the plan's queries, got {value_fn!r}")
        queries_lib.check_codes(data)
        batches.check_data(p.run, data)
        active, horizon = run_state.advance(p.run, state)
        count, size = state.horizon.count, queries.domain_size
        cells = jax.lax.cond(
            count == 0,
            lambda: queries.counts(queries_lib.histogram(data, domain_size=size)),
            lambda: state.cells,
        )
        fit, released = _begin(p, state.roots, cells, state.fit)
        if last:
            fit, released = jax.lax.cond(
                count == 0,
                lambda: (fit, released),
                lambda: _measure(p, state.roots, count, cells, state.fit),
            )
        length = jnp.where(count == last, _LAST_FIT_STEPS, _FIT_STEPS)
        histogram = fitted(
            queries,
            fit,
            jnp.float32(p.noise_std**2 * PRIOR_WEIGHT),
            state.start,
            jnp.where(active, length, 0),
        )
        fit = fit._replace(histogram=histogram)
        cells, fit = jax.tree.map(
            lambda new, old: jnp.where(active, new, old),
            (cells, fit),
            (state.cells, state.fit),
        )
        released = run_state.zero_where_done(active, released)
        state = MarginalState(horizon, cells, state.start, fit, state.roots, released)
        return state, players.Info(released)

    return Algorithm(run_state.of_outlines_too(init), step, output)


def output(state: MarginalState) -> FittedHistogram:
    """Returns the fitted histogram and what was measured."""
    return state.fit


def _checked(queries: Marginals, fit: Any) -> FittedHistogram:
    """Returns the point to start from; ValueError for other shapes or no weights."""
    validate.instance(FittedHistogram, params=fit)
    wanted = (queries.domain_size,), (queries.num_queries,), (len(queries.columns),)
    if (found := tuple(map(jnp.shape, fit))) != wanted:
        raise ValueError(f"params must have leaves of shapes {wanted}, got {found}")
    players.start("the histogram", fit.histogram, queries.domain_size)
    if not any(isinstance(x, Tracer) for x in fit):
        times = np.asarray(fit.times)
        if not (np.isfinite(np.asarray(fit.shares)).all() and (times >= 0).all()):
            raise ValueError("params must have finite shares, and times >= 0")
    return FittedHistogram(*(jnp.asarray(x, jnp.float32) for x in fit))


# --- the release -------------------------------------------------------------------


def _begin(
    p: MarginalNumbers, roots: Any, cells: jax.Array, fit: FittedHistogram
) -> tuple[FittedHistogram, jax.Array]:
    """Measures the first marginals, in the first step."""
    size = int(p.queries.offsets[p.num_start])
    noise = run_state.gaussian(roots[0], 0, size, p.grid.noise_std)
    measured = release.noised_mean(p.grid, cells[:size], noise)
    times = jnp.asarray(_spread(p.queries, fit.times[: p.num_start]))
    shares = fit.shares.at[:size].set(
        (fit.shares[:size] * times + measured) / (times + 1)
    )
    fit = fit._replace(shares=shares, times=fit.times.at[: p.num_start].add(1))
    return fit, jnp.stack([jnp.float32(-1), jnp.linalg.norm(measured)])


def _measure(
    p: MarginalNumbers, roots: Any, count: Any, cells: jax.Array, fit: FittedHistogram
) -> tuple[FittedHistogram, jax.Array]:
    """Draws the marginal that the histogram knows worst, and measures it."""
    key = keys_lib.at_step(roots[1], count)
    drawn = simplex.sample(key, scores(p, cells, fit.histogram), 1)[0]
    offsets = p.queries.offsets
    widest = int(np.max(np.diff(offsets)))
    first = jnp.asarray(offsets)[drawn]
    inside = jnp.arange(widest) < jnp.asarray(np.diff(offsets))[drawn]

    def taken(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(jnp.pad(x, (0, widest)), (first,), (widest,))

    noise = run_state.gaussian(roots[0], count, widest, p.grid.noise_std)
    measured = release.noised_mean(p.grid, taken(cells), noise)
    times = fit.times[drawn]
    known = taken(fit.shares)
    change = jnp.where(inside, (measured - known) / (times + 1), 0)
    at = jnp.where(inside, first + jnp.arange(widest), fit.shares.size)
    shares = fit.shares.at[at].add(change, mode="drop")
    fit = fit._replace(shares=shares, times=fit.times.at[drawn].add(1))
    norm = jnp.linalg.norm(jnp.where(inside, measured, 0))
    return fit, jnp.stack([drawn.astype(jnp.float32), norm])


def scores(p: MarginalNumbers, cells: jax.Array, histogram: jax.Array) -> jax.Array:
    """Computes the integer scores (marginals,) from which the next one is drawn; secret.

    The L1 distance of a marginal's counts from those of the histogram, rounded, less the
    marginal's penalty, saturated, and scaled: normalized as :mod:`jaxdp.kernels.simplex`
    has it.
    """
    queries, grid = p.queries, p.score_grid
    shares = (queries.evaluate(histogram) + 1) / 2
    model = jnp.round(jnp.float32(p.run.num_examples) * shares).astype(jnp.int32)
    marginals = np.arange(len(queries.columns), dtype=np.int32)
    which = np.repeat(marginals, np.diff(queries.offsets))
    errors = jax.ops.segment_sum(
        jnp.abs(cells - model), which, len(marginals), indices_are_sorted=True
    )
    errors = errors - jnp.asarray(p.penalties, jnp.int32)
    below = jnp.maximum(errors - jnp.max(errors), -p.lowest_score)
    return simplex.normalized(grid.change(below << grid.bits))


# --- the fit -----------------------------------------------------------------------


def _spread(queries: Marginals, values: jax.Array) -> jax.Array:
    """Repeats one value a marginal, of the first ones, for each of its cells."""
    counts = np.diff(queries.offsets)[: len(values)]
    return jnp.repeat(values, counts, total_repeat_length=int(counts.sum()))


def fitted(
    queries: Marginals,
    fit: FittedHistogram,
    prior_weight: jax.Array,
    start: jax.Array,
    num_steps: int | jax.Array,
) -> jax.Array:
    r"""Fits a histogram to measured shares: post-processing.

    Minimises :math:`\sum_A t_A\|A p - s_A\|^2/2 + w D(p \| p_0)` over histograms p, the sum
    over marginals that were measured t times, by accelerated mirror descent with a proven
    step: the error is squared over marginals, each of which moves by at most the L1 norm of
    a step.

    Args:
      queries: all marginals.
      fit: what was measured, and the histogram to go on from.
      prior_weight: w, shape=().
      start: :math:`\log p_0`, float32 (domain_size,).
      num_steps: of the fit; may be traced.

    Returns:
      float32 (domain_size,), of sum 1.

    References:
      Tseng, `On accelerated proximal gradient methods for convex-concave optimization
      <https://www.mit.edu/~dimitrib/PTseng/papers/apgm.pdf>`_, 2008, Algorithm 1, with the
      relative entropy as its distance.
    """
    # Queries are centred, 2 share - 1; of sum 1, so that what that adds to all cells of a
    # gradient alike moves nothing.
    answers = 2 * fit.shares - 1
    weights = _spread(queries, fit.times) / 4
    smoothness = jnp.maximum(jnp.sum(fit.times), 1)

    def step(_: Any, carry: Any) -> Any:
        histogram, logits, momentum = carry
        moving = jax.nn.softmax(start + logits)
        at = histogram + momentum * (moving - histogram)
        gradient = queries.combined(weights * (queries.evaluate(at) - answers))
        scale = momentum * smoothness
        logits = (scale * logits - gradient) / (scale + prior_weight)
        logits = logits - jnp.max(logits)
        histogram += momentum * (jax.nn.softmax(start + logits) - histogram)
        squared = momentum**2
        momentum = (jnp.sqrt(squared**2 + 4 * squared) - squared) / 2
        return histogram, logits, momentum

    begun = jnp.log(jnp.maximum(fit.histogram, _LEAST)) - start
    carry = fit.histogram, begun - jnp.max(begun), jnp.float32(1)
    return jax.lax.fori_loop(0, num_steps, step, carry)[0]
