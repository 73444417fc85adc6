r"""Private second-order stationary points.

Gradient steps with an adaptive variance-reduced gradient (``private_spider``). Where its
norm is small the point may be a saddle: the method tries to *escape*, by noisy steps on the
quadratic model at this *anchor*. Either they leave a ball around it, and the run goes on
from there; or they stay, which by the law of the noise means that there is no direction of
much negative curvature: the anchor is certified.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.algorithm import Algorithm
from jaxdp.kernels import finite_difference, stretch
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.sampling import batches
from jaxdp.sosp import escapes, gradients, hessian
from jaxdp.sosp import spider as spiders
from jaxdp.sosp import state as states
from jaxdp.sosp.roles import GROWTH, SOSPNumbers
from jaxdp.sosp.state import Escape, Search, SOSPInfo, SOSPState


def sosp(
    plan: Any,
    keys: keys_lib.Keys,
    *,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Algorithm:
    r"""Finds an approximate second-order stationary point of a smooth expected loss.

    ``params`` of ``init`` are any float32 pytree; ``step`` takes the whole data set and
    ``value_fn(params, batch) -> (B,)``, twice differentiable; ``output`` gives the best
    point so far, with what is known of it in ``state.best.rank``.

    A step asks for the gradient (except in an escape, unless ``plan.query_in_escape``),
    begins an escape where its norm is at most ``plan.trigger_norm``, and moves by
    1 / ``plan.smoothness``. An escape that ends outside ``plan.escape_radius`` refutes its
    anchor, and whatever was kept of lesser rank; one that stays inside for
    ``plan.escape_steps`` steps certifies it.

    Args:
      plan: a ``jaxdp.plans.SOSP`` with noise.
      keys: a ``jaxdp.Keys``.
      microbatch_size: records differentiated at once, at most 2**14; each takes d numbers.
        None: about a million numbers.
      axis_name: mesh axis, or several, whose devices share the records that a step reads,
        as in :func:`jaxdp.dpzero`. Two integers for each number of a query are added over
        them; which records come next is decided on every device, so they must be alike.

    Privacy:
      A step releases at most a gradient query (as :func:`jaxdp.private_spider`) and a
      product with a Hessian, or a Hessian; batches, triggers, restarts and the end follow
      from them. In each pass one record is in one gradient query or in one Hessian batch.
      The state holds no un-noised number that depends on data, except with
      ``hessian="tracked"``: its running sum is secret, dropped by ``jaxdp.public``, and in
      ``secret/`` of a record.

    Raises:
      TypeError: bare keys. ValueError: a plan of another family or without noise; params
        that are not float32, of another size than the plan's, or too many of them.

    Example:
      >>> import functools
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> problem = jaxdp.models.cosine_grid(dim=4)
      >>> plan = jaxdp.plans.SOSP.certified(
      ...     num_examples=200_000, dim=4, relation="replace_one",
      ...     epsilon=2.0, delta=1e-6, lipschitz=1.0, smoothness=1.0, hessian_lipschitz=1.0,
      ... )
      >>> algorithm = jaxdp.sosp(plan, jaxdp.Keys.insecure(0))
      >>> state = algorithm.init(jnp.zeros(4))
      >>> data = problem.make_data(plan.num_examples, seed=0)
      >>> step = jax.jit(functools.partial(algorithm.step, value_fn=problem.value_fn))
      >>> state, info = step(state, data)
      >>> algorithm.output(state).shape
      (4,)

    References:
      Liu, Talwar, `Adaptive Batch Size for Privately Finding Second-Order Stationary
      Points <https://arxiv.org/abs/2410.07502>`_, 2025, Algorithm 3, completed and
      corrected: noise on refreshes too, batches from a movement that is known, restarts of
      the noise, a failed escape as a certificate.
    """
    keys = keys_lib.check(keys)
    run_state.check_plan(plan, "sosp")
    finite_difference.check_sums(axis_name)
    numbers: SOSPNumbers = plan.numbers
    run = numbers.run
    private = keys.private and bool(numbers.noise_multiplier)
    horizon = run_state.new_horizon(run, private=private)
    root = keys_lib.stream(keys.noise, "escape", context=run.context)

    def init(params: Any) -> SOSPState:
        flat, _ = spiders.flattened(params, "sosp")
        spiders.slice_size(numbers, flat.size, microbatch_size)
        spider = spiders.begin(numbers, keys, flat)
        escape = states.no_escape(numbers, flat, root)
        run_state.begin_run(params, keys, run.family)
        zero = jnp.zeros((), jnp.int32)
        best = states.Best(
            params, jnp.float32(jnp.inf), jnp.full((), states.NOTHING, jnp.int32)
        )
        release = jnp.zeros((6,), jnp.float32)
        state = SOSPState(
            horizon, params, spider, escape, best, zero, zero, zero, release
        )
        return jax.tree.map(jnp.array, state)  # Copies: callers donate their state.

    def step(
        state: SOSPState, data: Any, *, value_fn: Any
    ) -> tuple[SOSPState, SOSPInfo]:
        batches.check_data(run, data)
        run_state.check_state_given(state)
        run_state.refuse_differing(axis_name, state=state, data=data)
        flat, unravel = spiders.flattened(state.point, "sosp")
        size = spiders.slice_size(numbers, flat.size, microbatch_size)
        loss = gradients.record_loss(value_fn, unravel)
        data = jax.tree.map(batches.narrowed, data)
        search = Search(numbers, loss, data, batches.present(data), size, axis_name)
        new = _step(search, state, flat)
        new = new._replace(
            point=unravel(new.point),
            best=new.best._replace(point=unravel(new.best.point)),
        )
        return new, SOSPInfo(new.release)

    return Algorithm(
        run_state.of_outlines_too(init), step, lambda state: state.best.point
    )


def _step(search: Search, state: SOSPState, x: jax.Array) -> SOSPState:
    """Makes a step on flat vectors: the state's points are (d,)."""
    numbers = search.numbers
    escape, best = state.escape, state.best
    best = best._replace(point=spiders.flattened(best.point, "sosp")[0])
    active = ~state.horizon.exhausted & (state.horizon.count < numbers.run.num_steps)

    # The gradient, if it is asked for and there are records.
    ask = active & (numbers.query_in_escape | ~escape.active)
    query = _ask(numbers, state, x)
    no_data = ask & ~query.fits
    query = query._replace(
        kind=jnp.where(ask & query.fits, query.kind, spiders.NONE),
        turn=query.turn & ask & query.fits,
    )
    reference = state.spider.reference
    spider = spiders.asked(
        numbers,
        search.loss,
        state.spider,
        x,
        query,
        search.data,
        search.mask,
        search.size,
        search.axis_name,
    )
    spider, escape = _track(search, spider, escape, query, x, reference)
    norm = jnp.linalg.norm(spider.estimate)

    # An anchor, where the gradient is small; and records for its Hessians.
    plain = active & ~no_data & ~escape.active
    small = plain & (escape.cool <= 0) & (norm <= numbers.trigger_norm)
    # (At a point that is no number nothing is known, and records count zero.)
    small &= jnp.isfinite(x).all() & (numbers.escape_steps is not None)
    best = escapes.offer(
        best, plain, x, norm, jnp.where(small, states.UNTESTED, states.SEEN)
    )
    spider, escape, start, unfit = escapes.begin(numbers, spider, escape, small, x)
    no_data |= unfit

    # The step.
    moving = active & ~no_data
    within = moving & escape.active
    if numbers.escape_steps is None:
        y = x - spider.estimate * numbers.step_size
    elif numbers.hessian == "released":
        within = jnp.zeros((), bool)
        y, escape, best = escapes.jump(search, state, spider, escape, best, start, x)
    else:
        y, escape, best = escapes.walk(search, state, spider, escape, best, within, x)
    y = jnp.where(moving, y, x)
    cool = jnp.where(moving & ~within & ~start, escape.cool - 1, escape.cool)
    escape = escape._replace(cool=jnp.maximum(cool, 0))

    # A step that found no records may have released a gradient before.
    released = moving | (query.kind != spiders.NONE)
    count = state.horizon.count + released
    certified = numbers.stop_at_certificate & (best.rank == states.CERTIFIED)
    ended = jnp.where(count >= numbers.run.num_steps, states.STEPS, states.RUNNING)
    ended = jnp.where(certified, states.CERTIFICATE, ended)
    ended = jnp.where(no_data, states.DATA, ended)
    ended = jnp.where(active, ended, state.ended).astype(jnp.int32)
    horizon = state.horizon._replace(
        count=count,
        exhausted=state.horizon.exhausted | (active & (ended != states.RUNNING)),
    )
    left = jnp.where(within, escape.left, -1)
    spent = jnp.where(query.kind == spiders.NONE, 0, query.records)
    release = [query.kind, spent, norm, left, jnp.linalg.norm(y - x), best.rank]
    release = jnp.stack([jnp.asarray(r, jnp.float32) for r in release])
    read = jnp.where(query.kind == spiders.NONE, 0, query.extra)
    return SOSPState(
        horizon,
        y,
        spider,
        escape,
        best,
        state.escapes + start,
        state.records + read + start * numbers.own_batch,
        ended,
        run_state.zero_where_done(released, release),
    )


def _ask(numbers: SOSPNumbers, state: SOSPState, x: jax.Array) -> spiders.Query:
    """Returns the gradient query of a step, with the records of a running Hessian."""
    escape, spider = state.escape, state.spider
    if not numbers.tracks:
        return spiders.ask(numbers, spider, x, hold=escape.active)
    moved = jnp.float32(numbers.smoothness) * jnp.linalg.norm(x - spider.reference)
    grown = escape.reach + _growth(numbers, moved)
    renew = (escape.since >= numbers.escapes_per_refresh) & ~escape.active
    return spiders.ask(
        numbers,
        spider,
        x,
        hold=escape.active,
        renew=renew | ~(grown <= GROWTH),
        extra=lambda fresh, moved: jnp.where(
            fresh, numbers.hessian_batch_size, _change_batch(numbers, moved)
        ),
    )


def _change_batch(numbers: SOSPNumbers, moved: jax.Array) -> jax.Array:
    """Returns the number of records that update a running Hessian after a movement."""
    want = jnp.ceil(jnp.float32(numbers.change_rate) * moved)
    most = numbers.run.num_examples + 1
    return jnp.maximum(jnp.where(want < most, want, most).astype(jnp.int32), 1)


def _growth(numbers: SOSPNumbers, moved: jax.Array) -> jax.Array:
    """Bounds the growth of the running Hessian by one difference, in clips."""
    records = _change_batch(numbers, moved).astype(jnp.float32)
    return records * np.float32(1 / numbers.hessian_batch_size)


def _track(
    search: Search,
    spider: spiders.Spider,
    escape: Escape,
    query: spiders.Query,
    x: jax.Array,
    reference: jax.Array,
) -> tuple[spiders.Spider, Escape]:
    """Updates the running Hessian after a gradient query, on records of its own."""
    refreshed = query.kind == spiders.REFRESH
    escape = escape._replace(since=jnp.where(refreshed, 0, escape.since))
    numbers = search.numbers
    if not numbers.tracks:
        return spider, escape
    records = search.records(spider.cursor, query.extra)
    grid, total = numbers.roles.hessian.grid, escape.hessian.total

    def fresh() -> stretch.Wide:
        start = stretch.zero(total.low.shape)
        return hessian.add_hessians(grid, search.loss, start, x, None, records)

    def changed() -> stretch.Wide:
        return hessian.add_hessians(grid, search.loss, total, x, reference, records)

    total = jax.lax.switch(query.kind, [lambda: total, fresh, changed])
    grown = escape.reach + _growth(numbers, query.moved)
    reach = jnp.stack([escape.reach, jnp.float32(1), grown])[query.kind]
    read = jnp.where(query.kind == spiders.NONE, 0, query.extra)
    return (
        spider._replace(cursor=spider.cursor + read),
        escape._replace(hessian=escape.hessian._replace(total=total), reach=reach),
    )
