r"""DPZero: private zeroth-order gradients from one noised number per direction.

.. math::
   y_{t,k} = \frac{1}{\bar B}\Big(\sum_i \mathrm{clip}_C(s_{t,i})_k + Z_{t,k}\Big),
   \qquad g_t = \frac1K \sum_k y_{t,k} u_{t,k}

with the slopes s of :mod:`jaxdp.kernels.finite_difference`. The dimension enters
neither sensitivity nor noise.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import keys as keys_lib
from jaxdp import noise as noise_lib
from jaxdp import sampling
from jaxdp._types import PathPredicate, ValueFn, ZerothOrderPlan
from jaxdp.kernels import finite_difference, sphere
from jaxdp.oracles import scalar
from jaxdp.transforms import _common


class DPZeroState(NamedTuple):
    """State of :func:`dpzero`. No field holds anything that depends on data un-noised."""

    horizon: _common.Horizon
    direction: jax.Array  # shape=(), key of all directions; public
    noise: jax.Array  # int32 (num_steps, K) exact table, or key () for float noise
    release: jax.Array  # shape=(K,), dtype=float32; y of the last step

    SECRET = ("noise",)

    @property
    def count(self) -> jax.Array:
        return self.horizon.count

    @property
    def exhausted(self) -> jax.Array:
        return self.horizon.exhausted


def exact_noise(plan: ZerothOrderPlan, keys: keys_lib.Keys, name: str) -> np.ndarray:
    """The run's discrete Gaussians, int32 (num_steps, K): secret.

    A deterministic function of the noise root and the plan, drawn on the host.
    """
    secret = keys_lib.exact_noise_secret(keys)
    coins = noise_lib.Coins(secret, name, plan.digest, 0)
    shape = (plan.num_steps, plan.num_directions)
    table = noise_lib.discrete_gaussian(coins, plan.grid_noise_std, shape)
    # The sum wraps modulo 2**32 like int32 does, so truncating bits loses nothing.
    return (table & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def dpzero(
    plan: ZerothOrderPlan,
    keys: keys_lib.Keys,
    *,
    trainable: _common.Trainable = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    noise_table: jax.Array | np.ndarray | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Private zeroth-order gradients as an optax transformation.

    Stands first in a chain: incoming updates are ignored and may be None. ``update``
    takes ``value_fn`` (losses (B,) of a batch), ``batch`` and, for padded full batches,
    ``mask``; unknown keywords are ignored. Outgoing updates point uphill, as gradients do,
    and have the dtypes of the params.

    Args:
      plan: a ``jaxdp.plans.DPZero`` with noise.
      keys: a ``jaxdp.Keys``; read when the transformation is built.
      trainable: which leaves move: None for all, a predicate on the path, or a pytree of
        bools. The others get zero updates and no direction.
      stacked: predicate on the path: leaves whose first axis counts layers.
      microbatch_size: records evaluated at once.
      noise_table: the exact noise, int32 (num_steps, K), for tests and audits; reports
        of such a run say ``"private": false``.

    Privacy:
      Each step releases K numbers whose noise the plan's event pays for; everything else
      is post-processing. Past ``plan.num_steps`` releases and updates are zero. ``init``
      begins a run: keys from entropy serve one, and ``update`` must not be called twice
      with one state on different data, for the noise is a function of the state.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: the plan has no noise; traced
        keys with exact noise; masked params; a moving leaf that is not floating point;
        a batch that the plan's sampler did not draw.

    References:
      Zhang, Li, Thekumparampil, Oh, He, `DPZero: Private Fine-Tuning of Language Models
      without Backpropagation <https://arxiv.org/abs/2310.09639>`_, 2024, Algorithm 2.
    """
    keys = keys_lib.check(keys)
    _common.check_plan(plan, "dpzero")
    direction_root = _common.direction_root(keys)
    if noise_table is not None and plan.noise != "discrete":
        raise ValueError('noise_table must be None with a plan of noise="gaussian"')
    if plan.noise == "gaussian":
        noise: Any = _common.noise_root(plan, keys)
    elif noise_table is not None:
        noise = _checked_table(plan, noise_table)
    else:
        noise = exact_noise(plan, keys, "dpzero")
    # Noise that was handed in is not ours to vouch for.
    start = _common.horizon(plan, keys, vouched=noise_table is None)

    def draw(key: jax.Array, params: Any, moves: PathPredicate) -> sphere.Direction:
        return sphere.directions(
            key,
            params,
            law=plan.direction,
            num=plan.num_directions,
            trainable=moves,
            stacked=stacked,
        )

    def init_fn(params: Any) -> DPZeroState:
        _common.refuse_masked(params, "dpzero")
        moves = _common.moving(params, trainable)
        # Refuses too many orthonormal rows and colliding leaves, draws nothing.
        jax.eval_shape(lambda key: draw(key, params, moves), direction_root)
        if noise_table is None:
            _common.begin_run(params, keys, "dpzero")
        # Copies, because callers donate their state.
        at, root, secret = jax.tree.map(jnp.array, (start, direction_root, noise))
        release = jnp.zeros((plan.num_directions,), jnp.float32)
        return DPZeroState(at, root, secret, release)

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
        params = _common.need_params(params, "dpzero")
        _common.refuse_masked(params, "dpzero")
        records, kept = sampling.resolve(plan, batch, mask, private=keys.private)
        count = state.horizon.count
        active, horizon = _common.advance(plan, state.horizon)
        moves = _common.moving(params, trainable)
        rows = draw(keys_lib.at_step(state.direction, count), params, moves)
        if plan.noise == "gaussian":
            size = plan.num_directions
            integers = _common.rounded_normal(plan, state.noise, count, size)
        else:
            integers = jax.lax.dynamic_index_in_dim(state.noise, count, keepdims=False)
        y = scalar.release_slopes(
            plan,
            value_fn,
            params,
            records,
            kept,
            rows,
            integers,
            microbatch_size=microbatch_size,
        )
        y = _common.zero_where_done(active, y)
        gradient = finite_difference.combine(y, rows, params)
        return gradient, state._replace(horizon=horizon, release=y)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _checked_table(plan: ZerothOrderPlan, table: Any) -> jax.Array:
    shape, dtype = np.shape(table), jnp.result_type(table)
    want = (plan.num_steps, plan.num_directions)
    if shape != want or dtype != jnp.int32:
        raise ValueError(
            f"noise_table must be int32 of shape {want}, got {dtype} of shape {shape}"
        )
    return jnp.asarray(table)
