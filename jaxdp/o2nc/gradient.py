r"""Private gradient estimates as running sums of released changes.

.. math::
   \tilde g_1 = \mathrm{GRAD}(w_1) + n_1, \qquad
   \tilde g_t = \tilde g_{t-1} + \big(\mathrm{DIFF}(w_t, w_{t-1}) + n_t\big)

from one restart to the next. In a single pass the noise :math:`n` is correlated over the
period, so that what adds up in :math:`\tilde g_t` stays small. The bracket is evaluated
first: un-noised data are never rounded at the scale of the rest.

A clip that is tuned moves at restarts alone. Each release over its clip is that of the
plan, whatever was released before, and a clip that moved at every step would cost no more.
But noise that is correlated cancels in a running sum only if all of it has one scale.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import correlated_noise, run_state
from jaxdp.core import keys as keys_lib
from jaxdp.core.types import PathPredicate, ValueFn
from jaxdp.kernels import parts
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.mechanism.clip_tuning import next_clip
from jaxdp.mechanism.plan import Plan
from jaxdp.o2nc import oracle
from jaxdp.sampling import batches


class PrivateOracleState(NamedTuple):
    """State of :func:`private_oracle`. No field holds un-noised data."""

    horizon: run_state.Horizon
    noise: correlated_noise.Correlated  # secret
    direction: jax.Array  # shape=(), key of all directions; public
    previous: Any  # params of the last release; public
    # shape=(d,), dtype=float32, or Parts of it; the last released gradient
    estimate: Any
    # shape=(1,), dtype=float32; norm of the last released increment; or (2,), with the
    # count of clip tuning, zero where a step released none
    release: jax.Array
    counts: Any  # shape=(), key of the noise on counts, or None; secret
    # shape=(2,), dtype=float32; clip of restarts in this period and in the next, or None: a
    # constant; public
    clip: Any

    SECRET = ("noise", "counts")
    __repr__ = run_state.hiding_repr
    count, exhausted = run_state.count, run_state.exhausted


def private_oracle(
    plan: Plan,
    keys: keys_lib.Keys,
    *,
    trainable: run_state.Trainable = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
    shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes the oracles of ``plans.O2NC`` an optax transformation.

    Stands first in a chain, before :func:`jaxdp.o2nc`: incoming updates are ignored and may
    be None. ``update`` takes ``value_fn``, ``batch`` (of ``jaxdp.sampling.batch``) and
    ``phase``, the static name of the step's phase in ``plan.phases``; unknown keywords are
    ignored. Outgoing updates are the released gradient estimate at the params. An oracle
    of gradients needs a loss that can be differentiated.

    Args:
      plan: a ``jaxdp.plans.O2NC`` with noise.
      keys: a ``jaxdp.Keys``.
      trainable: which leaves move; as in :func:`jaxdp.dpzero`.
      stacked: leaves whose first axis counts layers; as in :func:`jaxdp.dpzero`.
      microbatch_size: records evaluated at once; each takes d numbers.
      axis_name: as in :func:`jaxdp.dpzero`; d integers are added over the devices.
      shardings: of the params, where devices share leaves; as in :func:`jaxdp.dpgd`.

    Privacy:
      Each step releases d numbers, an increment of the running estimate; the estimate is
      their sum. (An oracle of slopes releases ``num_directions`` numbers, and its estimate
      is a function of them.) One record moves the sum of a step that reads it by at most
      the phase's clip, or its share by the distance from the last query; in a single pass
      one step reads it. Where the plan tunes its clips a restart releases a count besides,
      which one record moves by a half, or by one if replaced. Where ``phase`` is not that
      of the step, no record is read: what comes out is noise. ``init`` begins a run: keys
      from entropy serve one, and ``update`` must not be called twice with one state on
      different data. Noise is discrete Gaussian, added to the integer sum; contributions
      are rounded towards zero.

    Raises:
      As :func:`jaxdp.dpgd`; ValueError also for a phase that the plan does not have.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> sampling = jaxdp.sampling.SinglePassRestarts(period=2, restart_batch_size=4)
      >>> plan = jaxdp.plans.O2NC(
      ...     num_examples=20, num_steps=4, sampling=sampling, relation="replace_one",
      ...     restart_l2_clip_norm=1.0, l2_clip_norm=0.5, smoothing_radius=0.1,
      ...     max_step=0.01, window=2,
      ... ).with_noise(noise_multiplier=2.0)
      >>> keys, data, params = jaxdp.Keys.insecure(0), jnp.ones((20, 2)), jnp.zeros(2)
      >>> tx = jaxdp.private_oracle(plan, keys)
      >>> batch = jaxdp.sampling.batch(plan, keys, 0, data, phase="restart")
      >>> value_fn = lambda w, x: jnp.abs(w - x).sum(axis=-1)
      >>> update = jax.jit(tx.update, static_argnames=("value_fn", "phase"))
      >>> gradient, state = update(
      ...     None, tx.init(params), params, value_fn=value_fn, batch=batch,
      ...     phase="restart",
      ... )
      >>> gradient.shape
      (2,)

    Source: Zhang, Tran & Cutkosky, ICLR 2024, Algorithms 1, 2, 4 and 6; Kornowski, Liu &
    Talwar, ICML 2025, Algorithms 3 to 5. (First-order oracles in several passes are
    Algorithm 4 with the gradients of equation (10) at points of Algorithm 5.)
    """
    keys = keys_lib.check(keys)
    run_state.check_plan(plan, "o2nc")
    numbers: oracle.IncrementNumbers = plan.numbers
    carried, run = numbers.noise, numbers.noise.run
    start = run_state.new_horizon(run, private=keys.private and carried.noisy)
    direction = keys_lib.stream(keys.direction, "direction", context=run.context)
    tuning, count_grid = numbers.clip_tuning, numbers.count_grid
    root = clips = None
    if tuning is not None:
        root = keys_lib.stream(keys.noise, "counts", context=run.context)
        clips = np.full(2, carried.grids["restart"].l2_clip_norm, np.float32)
    shared = run_state.shared_leaves(shardings)

    def init_fn(params: Any) -> PrivateOracleState:
        run_state.refuse_misplaced(params, "private_oracle", run)
        run_state.check_shared(shared, params)
        moves = run_state.moving(params, trainable)
        run_state.begin_run(params, keys, "o2nc")
        # Copies, because callers donate their state.
        apart = parts.leaves_apart(params, shared)
        size = oracle.release_size(numbers, params, moves, apart)
        begun = (start, correlated_noise.begin(carried, keys, size), direction, params)
        at, noise, directions, previous, counts, clip = jax.tree.map(
            jnp.array, (*begun, root, clips)
        )
        sections = parts.sections(params, moves, apart)
        zeros = lambda section: jnp.zeros(section.shape, jnp.float32)  # noqa: E731
        estimate = jax.tree.map(zeros, sections)
        release = jnp.zeros((1 if tuning is None else 2,), jnp.float32)
        return PrivateOracleState(
            at, noise, directions, previous, estimate, release, counts, clip
        )

    def update_fn(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value_fn: ValueFn,
        batch: Any,
        phase: str | None = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        del updates, extra_args  # No gradient comes in; other arguments are not ours.
        params = run_state.whole_params(
            params, "private_oracle", run, axis_name, state=state, batch=batch
        )
        phase = batches.check_phase(run, phase)
        count = state.horizon.count
        records, kept = batches.resolve(
            run,
            batch,
            None,
            keys=keys,
            step=count,
            phase=phase,
        )
        active, horizon = run_state.advance(run, state)
        moves = run_state.moving(params, trainable)
        run_state.check_whole_parts(shared, moves)
        where = correlated_noise.place(carried, count)
        restart = phase == "restart"
        apart = parts.leaves_apart(params, shared)
        size = oracle.release_size(numbers, params, moves, apart)
        noise, correlated = correlated_noise.draw(
            carried, state.noise, where, size, phase
        )
        clip, counted = state.clip, None
        if clip is not None:
            clip = jnp.where(where.at == 0, clip[1], clip)
        if restart and count_grid is not None:
            counted = run_state.gaussian(state.counts, count, 1, count_grid.noise_std)
        increment, within = oracle.release_increment(
            numbers,
            value_fn,
            params,
            state.previous,
            records,
            batch.index.astype(jnp.uint32),  # The plan's samplers make batches.
            kept & ((where.at == 0) == restart),
            keys_lib.at_step(state.direction, count),
            noise,
            phase=phase,
            moves=moves,
            apart=apart,
            stacked=stacked,
            restart_clip=None if clip is None else clip[0],
            count_noise=counted,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
        )
        increment = run_state.zero_where_done(active, increment)
        estimate = increment
        if not restart:
            estimate = jax.tree.map(jnp.add, estimate, state.estimate)
        estimate = run_state.zero_where_done(active, estimate)
        tree = parts.join(estimate, params, moves)
        out = jax.tree.map(lambda g, p: g.astype(jnp.result_type(p)), tree, params)
        released = optax.tree.norm(increment).reshape(1)
        if tuning is not None and clip is not None:
            if restart:
                following = clip.at[1].set(next_clip(tuning, clip[0], within[0]))
                clip = jnp.where(where.at == 0, following, clip)
            else:
                within = jnp.zeros((1,), jnp.float32)
            clip = jnp.where(active, clip, state.clip)
            within = run_state.zero_where_done(active, within)
            released = jnp.concatenate([released, within])
        return out, state._replace(
            horizon=horizon,
            noise=correlated,
            previous=params,
            estimate=estimate,
            release=released,
            clip=clip,
        )

    return run_state.transformation(init_fn, update_fn)
