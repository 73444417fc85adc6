"""DP-GD: clipped per-record gradients, the first-order baseline."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.types import Grid, PathPredicate, Run, ValueFn
from jaxdp.dpgd import oracle
from jaxdp.kernels import parts
from jaxdp.kernels.finite_difference import AxisName, zero_update
from jaxdp.kernels.sphere import path_str
from jaxdp.mechanism.clip_tuning import ClipTuning, next_clip
from jaxdp.mechanism.plan import Plan
from jaxdp.sampling import batches


class GradientNumbers(NamedTuple):
    """Frozen numbers of a plan that :func:`dpgd` reads."""

    run: Run
    grid: Grid
    count_grid: Grid | None  # of clip tuning's counts
    clip_tuning: ClipTuning | None


class DPGDState(NamedTuple):
    """State of :func:`dpgd`."""

    horizon: run_state.Horizon
    noise: jax.Array  # shape=(), key; secret
    # shape=(1,), dtype=float32; norm of the last noised gradient; or (2,), with the count
    # of clip tuning
    release: jax.Array
    clip: Any  # shape=(), dtype=float32, of the next step, or None: a constant; public

    SECRET = ("noise",)
    __repr__ = run_state.hiding_repr
    count, exhausted = run_state.count, run_state.exhausted


def moving_part(
    value_fn: ValueFn, params: Any, moves: PathPredicate
) -> tuple[dict[str, jax.Array], ValueFn]:
    """Returns the leaves that move, by path, and the losses as a function of these."""
    named = jax.tree_util.tree_leaves_with_path(params)
    part = {path_str(p): leaf for p, leaf in named if moves(path_str(p))}

    def losses(moved: Any, batch: Any) -> jax.Array:
        whole = jax.tree_util.tree_map_with_path(
            lambda p, leaf: moved.get(path_str(p), leaf), params
        )
        return value_fn(whole, batch)

    return part, losses


def dpgd(
    plan: Plan,
    keys: keys_lib.Keys,
    *,
    trainable: run_state.Trainable = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
    shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes noised sums of clipped per-record gradients an optax transformation.

    Used as :func:`jaxdp.dpzero` is, with the same keywords of ``update``; it needs
    backpropagation and a ``value_fn`` that can be differentiated.

    Args:
      plan: a ``jaxdp.plans.DPGD`` with noise.
      keys: a ``jaxdp.Keys``.
      trainable: which leaves move; as in :func:`jaxdp.dpzero`.
      microbatch_size: records differentiated at once: their gradients are all stored.
      axis_name: as in :func:`jaxdp.dpzero`; d integers are added over the devices.
      shardings: of the params, a tree like them (``jax.tree.map(lambda x: x.sharding,
        params)``), where devices share leaves: their gradients and noise stay where they
        are. None takes all of them for whole. Releases are the same up to rounding.

    Privacy:
      Each step releases d numbers, and a count where the plan tunes its clip. Noise is
      discrete Gaussian, added on the grid of the integer sum. ``init`` begins a run: keys
      from entropy serve one, and ``update`` must not be called twice with one state on
      different data. Contributions are rounded towards zero, which shrinks coordinates of
      a few grid units (d in the millions).

    Raises:
      As :func:`jaxdp.dpzero`; also TypeError or ValueError: ``shardings`` that are none, of
      leaves that the params do not have, or along axes that the ``shard_map`` around
      ``update`` splits.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPGD(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).with_noise(noise_multiplier=2.0)
      >>> tx = optax.chain(jaxdp.dpgd(plan, jaxdp.Keys.insecure(0)), optax.sgd(0.1))
      >>> losses = lambda w, x: ((w - x) ** 2).sum(axis=-1)
      >>> params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
      >>> updates, state = tx.update(
      ...     None, state, params, value_fn=losses, batch=jnp.ones((8, 2))
      ... )
      >>> updates.shape, int(state[0].count)
      ((2,), 1)

    References:
      DPZero paper, Section 2 (DP-GD); Abadi et al., 2016.
    """
    keys = keys_lib.check(keys)
    run_state.check_plan(plan, "dpgd")
    numbers: GradientNumbers = plan.numbers
    run, grid, count_grid, tuning = numbers
    root = run_state.noise_root(run, keys)
    start = run_state.new_horizon(run, private=keys.private and grid.noise_std > 0)
    shared = run_state.shared_leaves(shardings)

    def init_fn(params: Any) -> DPGDState:
        run_state.refuse_misplaced(params, "dpgd", run)
        run_state.check_shared(shared, params)
        run_state.moving(params, trainable)
        run_state.begin_run(params, keys, "dpgd")
        # Copies, because callers donate their state.
        at, key = jax.tree.map(jnp.array, (start, root))
        release = jnp.zeros((1 if tuning is None else 2,), jnp.float32)
        bound = None if tuning is None else jnp.float32(grid.l2_clip_norm)
        return DPGDState(at, key, release, bound)

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
        del updates, extra_args  # No gradient comes in; other arguments are not ours.
        params = run_state.whole_params(
            params, "dpgd", run, axis_name, state=state, batch=batch, mask=mask
        )
        count = state.horizon.count
        records, kept = batches.resolve(run, batch, mask, keys=keys, step=count)
        active, horizon = run_state.advance(run, state)
        moves = run_state.moving(params, trainable)
        run_state.check_whole_parts(shared, moves)
        part, of_part = moving_part(value_fn, params, moves)
        apart = parts.leaves_apart(part, shared)
        at, counted = grid, None
        if count_grid is not None:
            at = grid._replace(l2_clip_norm=state.clip)
            counted = run_state.count_noise(state.noise, count, count_grid.noise_std)
        gradient, within = oracle.release_gradient(
            at,
            of_part,
            part,
            records,
            kept,
            run_state.gaussian(
                state.noise,
                count,
                parts.sections(part, oracle.every, apart),
                grid.noise_std,
            ),
            apart=apart,
            count_grid=count_grid,
            count_noise=counted,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
        )
        bound = state.clip
        if tuning is not None:
            bound = jnp.where(active, next_clip(tuning, bound, within[0]), bound)
        gradient, within = run_state.zero_where_done(active, (gradient, within))
        norm = optax.tree.norm(gradient).astype(jnp.float32).reshape(1)
        out = jax.tree_util.tree_map_with_path(
            lambda p, leaf: gradient.get(path_str(p), zero_update(leaf)), params
        )
        release = jnp.concatenate([norm, within])
        return out, state._replace(horizon=horizon, release=release, clip=bound)

    return run_state.transformation(init_fn, update_fn)
