r"""Private variance-reduced gradients on batches as large as the point has moved.

.. math::
   \tilde g_t = \mathrm{mean}\,\nabla f(x_t) + n_t
   \quad\text{(refresh)}, \qquad
   \tilde g_t = \tilde g_{t-1} + \big(\mathrm{mean}[\nabla f(x_t) - \nabla f(x_{ref})]
   + n_t\big) \quad\text{(difference)}

A difference reads :math:`\lceil c\,M\|x_t - x_{ref}\|\rceil` fresh records: one record then
moves its mean by at most :math:`1/c`, however far the point went. The noise of differences
is correlated from one refresh to the next, so that what adds up stays small.

Everything that decides how many records are read, and when to begin anew, was released
before; so at any step it is determined which query a record can be in, and it is in one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree

from jaxdp.core import correlated_noise, run_state, validate
from jaxdp.core import keys as keys_lib
from jaxdp.core.types import ValueFn
from jaxdp.kernels import stretch, threefry
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.sphere import path_str
from jaxdp.sampling import batches
from jaxdp.sosp import gradients
from jaxdp.sosp.roles import SOSPNumbers

NONE, REFRESH, DIFFERENCE = 0, 1, 2
#: Numbers in a slice of records, for gradients that are taken at once.
_SLICE = 2**20


class Running(NamedTuple):
    """State of the noise of later queries. Secret."""

    refresh: jax.Array  # shape=(), key; the number of the refresh is folded into it
    difference: jax.Array  # shape=(), key; the same, and the number of the difference
    state: Any  # of the correlation

    SECRET = ("refresh", "difference", "state")
    KEPT = ("state",)  # A checkpoint may lie between two refreshes.
    __repr__ = run_state.hiding_repr


class Spider(NamedTuple):
    """The running estimate of a gradient. Public, all but the noise."""

    reference: jax.Array  # shape=(d,), dtype=float32; point of the last query
    estimate: jax.Array  # shape=(d,), dtype=float32; released
    since: jax.Array  # shape=(), dtype=int32; differences since the refresh; -1: none
    drift: jax.Array  # shape=(), dtype=float32; smoothness times the way since then
    cursor: jax.Array  # shape=(), dtype=int32; first record of this pass not spent
    passes: jax.Array  # shape=(), dtype=int32; that are over
    records: jax.Array  # shape=(), dtype=int32; read so far
    refreshes: jax.Array  # shape=(), dtype=int32
    differences: jax.Array  # shape=(), dtype=int32; of the whole run
    noise: Running  # secret


class Query(NamedTuple):
    """Query at a point: its kind and its records. Public: it follows from releases."""

    kind: jax.Array  # shape=(), dtype=int32; NONE, REFRESH or DIFFERENCE
    moved: jax.Array  # shape=(), dtype=float32; smoothness times the way from reference
    records: jax.Array  # shape=(), dtype=int32; of the gradient
    extra: jax.Array  # shape=(), dtype=int32; of a Hessian, after them
    turn: jax.Array  # shape=(), dtype=bool; whether a new pass begins with it
    fits: jax.Array  # shape=(), dtype=bool; whether there are records for it


def begin(numbers: SOSPNumbers, keys: keys_lib.Keys, flat: jax.Array) -> Spider:
    """Returns the estimate's state before the first query.

    Raises:
      ValueError: so many numbers that the grid would round contributions to zero.
    """
    if not isinstance(flat, Tracer) and not np.isfinite(flat).all():
        raise ValueError("params must be finite, got a NaN or an infinity")
    refresh, difference = numbers.roles.refresh.grid, numbers.roles.difference.grid
    for grid in (refresh, difference):
        check_dim(flat.size, grid.bits)
    correlated_noise.check_rounding(
        numbers.correlation,
        flat.size,
        numbers.noise_multiplier,
        difference.noise_std,
    )
    context = numbers.run.context
    noise = Running(
        keys_lib.stream(keys.noise, "refresh", context=context),
        # Settled: refresh and step are folded in, at no cost in the program.
        threefry.settled(keys_lib.stream(keys.noise, "noise", context=context)),
        numbers.correlation.init(_like(flat.size)),
    )
    zero, none = jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32)
    drift, estimate = jnp.zeros(()), jnp.zeros_like(flat)
    return Spider(flat, estimate, none, drift, zero, zero, zero, zero, zero, noise)


def check_dim(dim: int, bits: int | None) -> None:
    """Raises ValueError if a record's coordinates would be rounded to zero."""
    if bits is not None and dim > 4 ** (bits - 2):
        raise ValueError(
            f"params must have at most {4 ** (bits - 2)} elements under this plan, got "
            f"{dim}: the noise leaves {bits} bits for one record's contribution, and its "
            "coordinates would be rounded to zero; use smaller batches or less noise"
        )


def ask(
    numbers: SOSPNumbers,
    spider: Spider,
    point: jax.Array,
    *,
    hold: jax.Array | bool = False,
    renew: jax.Array | bool = False,
    extra: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> Query:
    """Decides the next query at ``point``: none, a difference or a refresh.

    The query also says whether enough records are left.

    Args:
      numbers: batch sizes and limits.
      spider: after the last query.
      point: float32 (d,).
      hold: whether the drift causes no refresh now.
      renew: whether a refresh is wanted for other reasons.
      extra: records that are read besides, from (whether it is a refresh, moved).
    """
    moved = jnp.float32(numbers.smoothness) * jnp.linalg.norm(point - spider.reference)
    # Not (moved < limit), which refreshes where a point is no longer finite.
    due = ~(spider.drift + moved < numbers.drift_limit) & ~jnp.asarray(hold)
    due |= jnp.asarray(renew)
    due |= (spider.since < 0) | (spider.since + 1 > numbers.max_differences)
    rate, most = numbers.difference_batch_rate, numbers.run.num_examples + 1
    if numbers.difference_batch_size is None:
        want = jnp.ceil(jnp.float32(rate) * moved)
        # Beyond the data (or no number at all): more than there are.
        want = jnp.where(want < most, want, most).astype(jnp.int32)
        difference = jnp.maximum(want, 1)
    else:
        difference = jnp.int32(numbers.difference_batch_size)
        due |= ~(moved * jnp.float32(rate) <= numbers.difference_batch_size)
    other = jnp.where(moved > 0, DIFFERENCE, NONE)
    kind = jnp.where(due, REFRESH, other).astype(jnp.int32)
    whole = jnp.int32(numbers.refresh_batch_size)
    sizes = jnp.stack([jnp.int32(0), whole, difference])

    def needed(kind: jax.Array) -> tuple[jax.Array, jax.Array]:
        if extra is None:
            return sizes[kind], jnp.int32(0)
        more = jnp.where(kind == NONE, 0, extra(kind == REFRESH, moved))
        return sizes[kind], more.astype(jnp.int32)

    records, more = needed(kind)
    turn = spider.cursor + records + more > numbers.run.num_examples
    last = spider.passes + 1 >= numbers.num_passes
    # One noise must not cover a record twice: a pass begins with a refresh.
    kind = jnp.where(turn & ~last, REFRESH, kind)
    records, more = needed(kind)
    return Query(kind, moved, records, more, turn & ~last, ~(turn & last))


def asked(
    numbers: SOSPNumbers,
    loss: gradients.Loss,
    spider: Spider,
    point: jax.Array,
    query: Query,
    data: Any,
    mask: jax.Array | None,
    size: int,
    axis_name: AxisName | None = None,
) -> Spider:
    """Returns the estimate after a query, which must fit; releases d numbers.

    The cursor is moved by ``query.records`` and not by what else is read.
    """
    first = jnp.where(query.turn, 0, spider.cursor)
    noise = spider.noise
    records = gradients.Records(data, mask, first, query.records, size, axis_name)

    def same() -> Spider:
        return spider

    def refresh() -> Spider:
        number = spider.refreshes + 1
        grid = numbers.roles.refresh.grid
        drawn = run_state.gaussian(noise.refresh, number, point.size, grid.noise_std)
        return spider._replace(
            reference=point,
            estimate=gradients.release_gradient(grid, loss, point, records, drawn),
            since=jnp.zeros_like(spider.since),
            drift=jnp.zeros_like(spider.drift),
            refreshes=number,
            cursor=first + query.records,
            passes=spider.passes + query.turn.astype(jnp.int32),
            records=spider.records + query.records,
        )

    def difference() -> Spider:
        grid, like = numbers.roles.difference.grid, _like(point.size)
        key = keys_lib.at_step(noise.difference, spider.refreshes)
        drawn, state = correlated_noise.increment(
            numbers.correlation,
            key,
            noise.state,
            spider.since,
            like,
            grid.noise_std,
        )
        change = gradients.release_difference(
            grid, loss, point, spider.reference, records, drawn
        )
        return spider._replace(
            reference=point,
            # What was released before comes second: data are never rounded at its scale.
            estimate=change + spider.estimate,
            since=spider.since + 1,
            drift=spider.drift + query.moved,
            differences=spider.differences + 1,
            cursor=first + query.records,
            records=spider.records + query.records,
            noise=noise._replace(state=state),
        )

    return jax.lax.switch(query.kind, [same, refresh, difference])


def flattened(params: Any, name: str) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """Returns all parameters in one float32 vector, and the way back.

    Raises:
      ValueError: a leaf of another dtype, whose differences of gradients would be the
        rounding of its numbers; it is named.
    """
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in leaves):
        raise ValueError(f"{name} moves all params; do not wrap it in optax.masked")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.result_type(leaf) != jnp.float32:
            raise ValueError(
                f"params must have float32 leaves for {name}, got {path_str(path)!r} of "
                f"dtype {jnp.result_type(leaf)}"
            )
    flat, unravel = ravel_pytree(params)
    if not flat.size and not run_state.is_placeholder(params):
        raise ValueError("params must have at least one element, got none")
    return flat, unravel


def slice_size(numbers: SOSPNumbers, dim: int, microbatch_size: int | None) -> int:
    """Returns the records to differentiate at once: by default, about a million numbers.

    But not so many that most of a small batch's slice would be masked.
    """
    if microbatch_size is None:
        usual = max(32, numbers.refresh_batch_size // 8)
        microbatch_size = max(1, min(_SLICE // max(dim, 1), usual, stretch.MAX_SLICE))
    validate.integer(at_most=stretch.MAX_SLICE, microbatch_size=microbatch_size)
    return min(microbatch_size, numbers.run.num_examples)


class PrivateSpiderState(NamedTuple):
    """State of :func:`private_spider`. No field holds un-noised data."""

    horizon: run_state.Horizon
    spider: Spider
    release: jax.Array  # shape=(3,), dtype=float32; kind, records, norm of the estimate

    count, exhausted = run_state.count, run_state.exhausted


def private_spider(
    plan: Any, keys: keys_lib.Keys, *, microbatch_size: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Makes the adaptive variance-reduced gradient an optax transformation.

    Stands first in a chain; incoming updates are ignored and may be None.
    ``optax.chain(private_spider(plan, keys), optax.scale(-1 / smoothness))`` is private
    SpiderBoost. ``update`` takes ``value_fn`` and ``batch``:
    all records, as ``jaxdp.sampling.batch`` gives them for the plan, or as arrays (with
    ``mask``, bool (n,), where some are absent), of which a step reads those that its cursor
    is at. Unknown keywords are ignored. After the records are spent, or ``plan.num_steps``
    updates, updates are zero and ``state.exhausted`` is true.

    Args:
      plan: a ``jaxdp.plans.SOSP`` with noise; what it says of escapes is not used.
      keys: a ``jaxdp.Keys``.
      microbatch_size: records differentiated at once, at most 2**14; each takes d numbers.
        None: about a million numbers.

    Privacy:
      A step releases d numbers, a refresh or an increment. One record is in one of them in
      each pass, and moves its mean by at most ``l2_clip_norm / refresh_batch_size`` or
      ``1 / difference_batch_rate`` (twice that if replaced), enforced on integers. How
      many records a step reads is public.

    Raises:
      TypeError: bare keys, or params that are not given. ValueError: a plan of another
        family or without noise; params that are not float32, or too many of them.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import jaxdp
      >>> problem = jaxdp.models.cosine_grid(dim=4)
      >>> plan = jaxdp.plans.SOSP.certified(
      ...     num_examples=200_000, dim=4, relation="replace_one",
      ...     epsilon=2.0, delta=1e-6, lipschitz=1.0, smoothness=1.0, hessian_lipschitz=1.0,
      ... )
      >>> keys, params = jaxdp.Keys.insecure(0), jnp.ones(4)
      >>> tx = optax.chain(jaxdp.private_spider(plan, keys), optax.scale(-1.0))
      >>> state, data = tx.init(params), problem.make_data(plan.num_examples, seed=0)
      >>> updates, state = tx.update(
      ...     None, state, params, value_fn=problem.value_fn, batch=data
      ... )
      >>> updates.shape
      (4,)

    References:
      Liu, Talwar, `Adaptive Batch Size for Privately Finding Second-Order Stationary
      Points <https://arxiv.org/abs/2410.07502>`_, 2025, Algorithms 1, 3 and 4 (their
      gradient part, corrected).
    """
    keys = keys_lib.check(keys)
    run_state.check_plan(plan, "sosp")
    numbers: SOSPNumbers = plan.numbers
    run = numbers.run
    private = keys.private and bool(numbers.noise_multiplier)
    start = run_state.new_horizon(run, private=private)

    def init_fn(params: Any) -> PrivateSpiderState:
        run_state.refuse_misplaced(params, "private_spider", run)
        flat, _ = flattened(params, "private_spider")
        spider = begin(numbers, keys, flat)
        slice_size(numbers, flat.size, microbatch_size)
        run_state.begin_run(params, keys, run.family)
        state = PrivateSpiderState(start, spider, jnp.zeros((3,), jnp.float32))
        return jax.tree.map(jnp.array, state)  # Copies: callers donate their state.

    def update_fn(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value_fn: ValueFn,
        batch: Any,
        mask: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        del updates, extra_args
        params = run_state.need_params(params, "private_spider", run)
        data, kept = batches.resolve(
            run,
            batch,
            mask,
            keys=keys,
            step=state.horizon.count,
        )
        flat, unravel = flattened(params, "private_spider")
        loss = gradients.record_loss(value_fn, unravel)
        query = ask(numbers, state.spider, flat)
        active, horizon = run_state.advance(run, state)
        active &= ~state.horizon.exhausted & query.fits
        count = jnp.where(active, horizon.count, state.horizon.count)
        horizon = horizon._replace(count=count, exhausted=horizon.exhausted | ~active)
        kind = jnp.where(active, query.kind, NONE)
        query = query._replace(kind=kind)
        size = slice_size(numbers, flat.size, microbatch_size)
        spider = asked(numbers, loss, state.spider, flat, query, data, kept, size)
        estimate = jnp.where(active, spider.estimate, 0)
        records = jnp.where(kind == NONE, 0, query.records)
        parts = (kind, records, jnp.linalg.norm(estimate))
        release = jnp.stack([x.astype(jnp.float32) for x in parts])
        return unravel(estimate), PrivateSpiderState(horizon, spider, release)

    return run_state.transformation(init_fn, update_fn)


def _like(dim: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((dim,), jnp.float32)
