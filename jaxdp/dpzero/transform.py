r"""DPZero: private zeroth-order gradients from one noised number per direction.

.. math::
   y_{t,k} = \frac{1}{\bar B}\Big(\sum_i \mathrm{clip}_C(s_{t,i})_k + Z_{t,k}\Big),
   \qquad g_t = \frac1K \sum_k y_{t,k} u_{t,k}

with the slopes s of :mod:`jaxdp.kernels.finite_difference`. The dimension enters
neither sensitivity nor noise.

DPGD-0th is the same release with noise in the other directions added afterwards:
clipping the vector :math:`s_{t,i}u_t` at C is clipping the slope at
:math:`C/\|u_t\|`, and isotropic noise is noise along :math:`u_t`, which privacy needs,
plus independent noise across it, which depends on no record and may be public.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import keys as keys_lib
from jaxdp.core import noise as noise_lib
from jaxdp.core import run_state
from jaxdp.core.types import Grid, PathPredicate, Run, ValueFn
from jaxdp.dpzero import oracle
from jaxdp.kernels import finite_difference, sphere
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.mechanism.clip_tuning import ClipTuning, next_clip
from jaxdp.mechanism.plan import Plan
from jaxdp.sampling import batches


class SlopeNumbers(NamedTuple):
    """Frozen numbers of a plan that :func:`dpzero` and :func:`dpgd_zeroth_order` read."""

    run: Run
    grid: Grid  # of the sums
    count_grid: Grid | None  # of clip tuning's counts
    clip_tuning: ClipTuning | None
    smoothing_radius: float
    num_directions: int  # K
    direction: str  # law of the directions
    isotropic: bool  # whether noise is added across the direction, too
    noise_std: float  # of the noise there
    noise_scale: int | None  # of Laplace noise from the host; None: Gaussians
    output: str  # what a run returns

    @property
    def width(self) -> int:
        """R, the number of values that a step releases."""
        return self.num_directions + (self.clip_tuning is not None)


class Kept(NamedTuple):
    """The iterate that the paper returns. Public, as every iterate is."""

    step: jax.Array  # shape=(), dtype=int32; tau
    params: Any  # x_tau, or x_0 as long as the run has not come to tau


class DPZeroState(NamedTuple):
    """State of :func:`dpzero`. No field holds anything that depends on data un-noised."""

    horizon: run_state.Horizon
    direction: jax.Array  # shape=(), key of all directions; public
    noise: jax.Array  # shape=(), key of the noise; or a table, int32 (num_steps, R)
    # shape=(R,), dtype=float32; y of the last step, and the count of clip tuning: R is K
    # or K + 1
    release: jax.Array
    output: Any  # Kept, or None where the last iterate is the output; public
    clip: Any  # shape=(), dtype=float32, of the next step, or None: a constant; public

    SECRET = ("noise",)
    __repr__ = run_state.hiding_repr
    count, exhausted = run_state.count, run_state.exhausted


def laplace_noise(numbers: SlopeNumbers, keys: keys_lib.Keys, name: str) -> np.ndarray:
    """Draws the run's Laplace noise, int32 (num_steps, K): secret.

    A deterministic function of the noise root and the plan, drawn on the host.
    """
    # Attempt 0: further ones have roots of their own.
    secret = keys_lib.exact_noise_secret(keys)
    run, scale = numbers.run, numbers.noise_scale
    if scale is None:
        raise ValueError("numbers must be of a plan with Laplace noise")
    coins = noise_lib.Coins(secret, name, run.digest, 0)
    shape = (run.num_steps, numbers.num_directions)
    table = noise_lib.discrete_laplace(coins, scale, shape)
    # The sum wraps modulo 2**32 like int32 does, so truncating bits loses nothing.
    return (table & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def step_noise(numbers: SlopeNumbers, noise: jax.Array, step: jax.Array) -> jax.Array:
    """Returns the noise of one step, int32 (R,), given a state's ``noise``: secret."""
    if noise.ndim:
        return jax.lax.dynamic_index_in_dim(noise, step, keepdims=False)
    std, num = numbers.grid.noise_std, numbers.num_directions
    slopes = run_state.gaussian(noise, step, num, std)
    if numbers.count_grid is None:
        return slopes.high
    count = run_state.count_noise(noise, step, numbers.count_grid.noise_std)
    return jnp.concatenate([slopes.high, count.high])


def dpzero(
    plan: Plan,
    keys: keys_lib.Keys,
    *,
    trainable: run_state.Trainable = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
    noise_table: jax.Array | np.ndarray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes private zeroth-order gradients an optax transformation.

    Stands first in a chain: incoming updates are ignored and may be None. ``update``
    takes ``value_fn`` (losses (B,) of a batch), ``batch`` and, for padded full batches,
    ``mask``, whose rows beyond those of the plan count nothing: padding comes last.
    Unknown keywords are ignored. Outgoing updates point uphill, as gradients do, and have
    the dtypes of the params.

    Args:
      plan: a ``jaxdp.plans.DPZero`` with noise.
      keys: a ``jaxdp.Keys``; read when the transformation is built.
      trainable: which leaves move: None for all, a predicate on the path, or a pytree of
        bools. The others get zero updates and no direction.
      stacked: predicate on the path: leaves whose first axis counts layers.
      microbatch_size: records evaluated at once; None is all, or a device's equal part.
      axis_name: the mesh axis, or several, of the ``jax.shard_map`` in which ``update`` is
        called, whose devices share the records of a batch. Each is given the same
        arguments, the *whole* batch among them, evaluates its part of it, and gets the
        same results: K integers are added over the devices (K + 1 where the clip is
        tuned). They are those of one device of the same ``microbatch_size``, which is a
        device's equal part where it is None. The two devices of an axis
        ``kernels.finite_difference.SIGNS`` evaluate one sign of each slope instead, of the
        same records. With ``check_vma=False`` nothing checks that
        keys and parameters are the same everywhere, which the guarantee rests on.
      noise_table: the noise, int32 (num_steps, K), or (num_steps, K + 1) where the plan
        tunes its clip, for tests and audits; reports of such a run say
        ``"private": false``.

    Privacy:
      Each step releases K numbers, and the count of clip tuning, whose noise the plan's
      event pays for; everything else is post-processing, :func:`dpzero_output` and the
      moving clip included. Past ``plan.num_steps`` releases and updates are zero. ``init``
      begins a run: keys from entropy serve one, which ``jax.jit(init)`` must not begin, and
      ``update`` must not be called twice with one state on different data, for the noise is
      a function of the state.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: the plan has no noise; traced
        keys with Laplace noise; masked params; a moving leaf that is not floating point;
        a batch that the plan's sampler did not draw; a state of keys from entropy that a
        traced function closes over.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> tx = optax.chain(jaxdp.dpzero(plan, jaxdp.Keys.insecure(0)), optax.sgd(0.1))
      >>> losses = lambda w, x: ((w - x) ** 2).sum(axis=-1)
      >>> params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
      >>> updates, state = tx.update(
      ...     None, state, params, value_fn=losses, batch=jnp.ones((8, 2))
      ... )
      >>> updates.shape, int(state[0].count)
      ((2,), 1)

    References:
      Zhang, Li, Thekumparampil, Oh, He, `DPZero: Private Fine-Tuning of Language Models
      without Backpropagation <https://arxiv.org/abs/2310.09639>`_, 2024, Algorithm 2.
    """
    return _maker(
        plan,
        keys,
        "dpzero",
        trainable=trainable,
        stacked=stacked,
        microbatch_size=microbatch_size,
        axis_name=axis_name,
        noise_table=noise_table,
    )


def dpgd_zeroth_order(
    plan: Plan,
    keys: keys_lib.Keys,
    *,
    trainable: run_state.Trainable = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
    noise_table: jax.Array | np.ndarray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes DPGD-0th, the DPZero paper's baseline, an optax transformation.

    Per-record vectors ``slope * direction`` are clipped in L2 and their sum gets isotropic
    noise. Used as :func:`dpzero`, with the same arguments and errors.

    Args:
      plan: a ``jaxdp.plans.DPGDZerothOrder`` with noise.
      keys: a ``jaxdp.Keys``.
      trainable: as in :func:`dpzero`, like ``stacked``, ``microbatch_size``, ``axis_name``.
      stacked: see there.
      microbatch_size: see there.
      axis_name: see there.
      noise_table: the noise along the direction, int32 (num_steps, 1), for tests.

    Privacy:
      Each step releases one number, the coordinate of the noised sum along the direction;
      one record moves that sum by at most ``plan.sensitivity``. The noise across the
      direction depends on no record: it comes from the direction root, is public, and a
      run can be replayed from its releases.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPGDZerothOrder(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> maker = jaxdp.dpgd_zeroth_order(plan, jaxdp.Keys.insecure(0))
      >>> tx = optax.chain(maker, optax.sgd(0.1))
      >>> losses = lambda w, x: ((w - x) ** 2).sum(axis=-1)
      >>> params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
      >>> updates, state = tx.update(
      ...     None, state, params, value_fn=losses, batch=jnp.ones((8, 2))
      ... )
      >>> updates.shape, int(state[0].count)
      ((2,), 1)

    References:
      Zhang et al., `DPZero <https://arxiv.org/abs/2310.09639>`_, 2024, Algorithm 1.
    """
    return _maker(
        plan,
        keys,
        "dpgd_zeroth_order",
        trainable=trainable,
        stacked=stacked,
        microbatch_size=microbatch_size,
        axis_name=axis_name,
        noise_table=noise_table,
    )


def dpzero_output(state: Any, params: Any) -> Any:
    """Returns the point of a run: ``x_tau`` of the paper, or the last iterate.

    Args:
      state: the state of :func:`dpzero` or :func:`dpgd_zeroth_order`, or a tree that holds
        one, such as a chain's.
      params: the current params.

    Returns:
      Where the plan has ``output="random"``, the params before step ``tau``, uniform on
      {0, ..., num_steps - 1} and drawn from the direction root (so with one step the
      initial params, which read no record); before step ``tau``, the initial params.
      Else ``params``.

    Raises:
      ValueError: ``state`` holds no such state, or more than one.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> state = jaxdp.dpzero(plan, jaxdp.Keys.insecure(0)).init(jnp.zeros(2))
      >>> jaxdp.dpzero_output(state, jnp.ones(2)).tolist()  # the last iterate
      [1.0, 1.0]

    References:
      Zhang et al., `DPZero <https://arxiv.org/abs/2310.09639>`_, 2024, Algorithms 1, 2.
    """
    makers = "jaxdp.dpzero or jaxdp.dpgd_zeroth_order"
    output = run_state.only(DPZeroState, state, makers).output
    return params if output is None else output.params


def output_step(run: Run, direction: jax.Array) -> jax.Array:
    """Draws tau, int32 (), uniform on {0, ..., T-1} up to 2**-32 T.

    From the direction root.
    """
    key = keys_lib.stream(direction, "output", context=run.context)
    return (keys_lib.words(key, 1)[0] % np.uint32(run.num_steps)).astype(jnp.int32)


def draw_directions(
    numbers: SlopeNumbers,
    key: jax.Array,
    params: Any,
    moves: PathPredicate,
    stacked: PathPredicate | None,
) -> sphere.Direction:
    """Draws the K directions of a step from its key, once for all if they are small."""
    rows = sphere.directions(
        key,
        params,
        law=numbers.direction,
        num=numbers.num_directions,
        trainable=moves,
        stacked=stacked,
    )
    return sphere.kept(rows)


def gradient(
    numbers: SlopeNumbers,
    release: jax.Array,
    rows: sphere.Direction,
    key: jax.Array,
    params: Any,
) -> Any:
    """Computes the gradient that a release stands for: post-processing, without data.

    ``release`` is y, float32 (K,); ``key``, public, is that of the step's directions.
    """
    if not numbers.isotropic:
        return finite_difference.combine(release, rows, params)
    # A second direction of the same step, for the noise across the first.
    moves, stacked = frozenset(rows.paths).__contains__, rows.stacked.__contains__
    two = sphere.directions(
        key, params, law="gaussian", num=2, trainable=moves, stacked=stacked
    )
    other = jax.tree.map(lambda x: x[1:], two)
    along = _inner(sphere.select(rows, 0), sphere.select(other, 0), params) / rows.dim
    std = jnp.full((1,), numbers.noise_std, jnp.float32)
    on_direction = finite_difference.combine(release - std * along, rows, params)
    across = finite_difference.combine(std, other, params)
    return jax.tree.map(jnp.add, on_direction, across)


def _inner(one: sphere.Direction, other: sphere.Direction, params: Any) -> jax.Array:
    """Computes the inner product of two directions, shape=(), float32."""
    u, v = (sphere.materialise(d, params) for d in (one, other))
    return jnp.asarray(optax.tree.vdot(u, v))


def _begin(
    numbers: SlopeNumbers, direction: jax.Array, noise: Any, start: Any, params: Any
) -> DPZeroState:
    """Returns the state before the first step, in copies, because callers donate theirs."""
    kept = None
    if numbers.output == "random":
        kept = Kept(output_step(numbers.run, direction), params)
    root = keys_lib.stream(direction, "direction")
    release = jnp.zeros((numbers.width,), jnp.float32)
    tuned = numbers.clip_tuning is not None
    bound = np.float32(numbers.grid.l2_clip_norm) if tuned else None
    state = DPZeroState(start, root, noise, release, kept, bound)
    return jax.tree.map(jnp.array, state)


def _follow(
    numbers: SlopeNumbers,
    state: DPZeroState,
    release: jax.Array,
    rows: sphere.Direction,
    key: jax.Array,
    params: Any,
) -> tuple[Any, DPZeroState]:
    """Applies a step's release to the state: both a run and its replay come here."""
    count = state.horizon.count
    active, horizon = run_state.advance(numbers.run, state)
    release = run_state.zero_where_done(active, release)
    made = gradient(numbers, release[: numbers.num_directions], rows, key, params)
    if numbers.isotropic:
        made = run_state.zero_where_done(active, made)
    output = state.output
    if output is not None:
        here = count == output.step
        # A replay sees parameters of 16 bits in float32, which changes no number.
        keep = lambda new, old: jnp.where(here, jnp.asarray(new, old.dtype), old)  # noqa: E731
        output = Kept(output.step, jax.tree.map(keep, params, output.params))
    bound = state.clip
    if numbers.clip_tuning is not None:
        moved = next_clip(numbers.clip_tuning, bound, release[-1])
        bound = jnp.where(active, moved, bound)
    return made, state._replace(
        horizon=horizon, release=release, output=output, clip=bound
    )


def replay(
    numbers: SlopeNumbers,
    direction: jax.Array,
    *,
    trainable: run_state.Trainable = None,
    stacked: PathPredicate | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation of a run whose releases are known: it reads no data.

    ``update`` takes ``release``, float32, of the shape of ``state.release``. It works on
    its own state, which holds no noise, and on that of the run's transformation. Arguments
    are those of ``plan.replay``.
    """

    def init_fn(params: Any) -> DPZeroState:
        nobody = run_state.new_horizon(numbers.run, private=False)
        return _begin(numbers, direction, None, nobody, params)

    def update_fn(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        release: jax.Array,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        del updates, extra_args
        moves = run_state.moving(params, trainable)
        key = keys_lib.at_step(state.direction, state.horizon.count)
        rows = draw_directions(numbers, key, params, moves, stacked)
        return _follow(numbers, state, release, rows, key, params)

    return run_state.transformation(init_fn, update_fn)


def _maker(
    plan: Plan,
    keys: keys_lib.Keys,
    name: str,
    *,
    trainable: run_state.Trainable = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
    noise_table: jax.Array | np.ndarray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes the transformation of a plan of the family ``name``."""
    keys = keys_lib.check(keys)
    run_state.check_plan(plan, name)
    numbers: SlopeNumbers = plan.numbers
    run, grid = numbers.run, numbers.grid
    if noise_table is not None:
        noise: Any = _checked_table(numbers, noise_table)
    elif numbers.noise_scale is not None:
        noise = laplace_noise(numbers, keys, name)
    else:
        noise = run_state.noise_root(run, keys)
    # Noise that was handed in is not ours to vouch for.
    start = run_state.new_horizon(
        run, private=keys.private and noise_table is None and grid.noise_std > 0
    )

    def init_fn(params: Any) -> DPZeroState:
        run_state.refuse_misplaced(params, name, run)
        moves = run_state.moving(params, trainable)
        if not run_state.is_placeholder(params):
            # Refuses too many orthonormal rows and colliding leaves, draws nothing.
            jax.eval_shape(
                lambda key: draw_directions(numbers, key, params, moves, stacked),
                keys.direction,
            )
        run_state.begin_run(params, keys, name)
        return _begin(numbers, keys.direction, noise, start, params)

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
            params, name, run, axis_name, state=state, batch=batch, mask=mask
        )
        count = state.horizon.count
        records, kept = batches.resolve(run, batch, mask, keys=keys, step=count)
        moves = run_state.moving(params, trainable)
        key = keys_lib.at_step(state.direction, count)
        rows = draw_directions(numbers, key, params, moves, stacked)
        integers = step_noise(numbers, state.noise, count)
        # The vector slope * direction is as long as sqrt(d) slopes.
        length = math.sqrt(rows.dim) if numbers.isotropic else 1.0
        bound = grid.l2_clip_norm / length if state.clip is None else state.clip
        y = oracle.release_slopes(
            grid._replace(l2_clip_norm=bound),
            value_fn,
            params,
            records,
            kept,
            rows,
            integers,
            smoothing_radius=numbers.smoothing_radius,
            count_grid=numbers.count_grid,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
        )
        return _follow(numbers, state, y, rows, key, params)

    return run_state.transformation(init_fn, update_fn)


def _checked_table(numbers: SlopeNumbers, table: Any) -> jax.Array:
    shape, dtype = np.shape(table), jnp.result_type(table)
    want = (numbers.run.num_steps, numbers.width)
    if shape != want or dtype != jnp.int32:
        raise ValueError(
            f"noise_table must be int32 of shape {want}, got {dtype} of shape {shape}"
        )
    return jnp.asarray(table)
