"""Noised means of per-record updates, with noise that cancels in their running sums."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.core import correlated_noise, release, run_state
from jaxdp.core import keys as keys_lib
from jaxdp.kernels import finite_difference, parts, sphere
from jaxdp.mechanism.plan import Plan
from jaxdp.sampling import batches


class PrivatePrefixSumState(NamedTuple):
    """State of :func:`private_prefix_sum`. No field holds un-noised data."""

    horizon: run_state.Horizon
    noise: correlated_noise.Correlated  # secret
    total: Any  # like the params, float32: noised sum since the last restart; public
    release: jax.Array  # shape=(1,), dtype=float32; norm of the last noised mean

    SECRET = ("noise",)
    __repr__ = run_state.hiding_repr
    count, exhausted = run_state.count, run_state.exhausted


def private_prefix_sum(
    plan: Plan, keys: keys_lib.Keys
) -> optax.GradientTransformationExtraArgs:
    """Clips per-record updates, averages them, and adds noise that sums to little.

    As in ``optax.contrib.differentially_private_aggregate``, the incoming updates have the
    records in front: leaves (B, ...), such as ``jax.vmap(jax.grad(loss), (None, 0))``
    gives. (A single bounded update is a batch of one: ``x[None]``.) ``update`` also takes
    the ``batch`` of ``jaxdp.sampling.batch`` that they come from, whose mask counts.

    Outgoing updates are noised means, one a step. Their sums from one restart to the next
    have the noise of ``plan.correlation``, far less than independent noise would leave in
    them: with ``optax.sgd`` after it the params are such sums (DP-FTRL). ``state.total`` is
    the current one.

    Args:
      plan: a ``jaxdp.plans.PrefixSum`` with noise.
      keys: a ``jaxdp.Keys``.

    Privacy:
      Each step releases d numbers; one record moves the sum of a step that reads it by at
      most ``plan.l2_clip_norm`` (twice that if replaced), enforced on integers. What the
      plan charges rests on which steps read a record: the updates of a step must be
      functions of its batch's records, each of its own, and of what was released before.
      Noise restarts with every period and, but for cyclic samplers, with every pass over
      the data. With ``CyclicEpochs`` the plan charges what a record moves in all passes,
      with ``CyclicPoisson`` a sampled release for each step of its group. Inside
      ``optax.masked`` the other leaves pass through as they came, un-noised and with their
      records in front: use ``optax.partition`` and let something else consume them.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: a plan of another family or
        without noise; updates without as many rows as the batch.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.PrefixSum(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.SinglePass(2),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).with_noise(noise_multiplier=2.0)
      >>> keys, data, params = jaxdp.Keys.insecure(0), jnp.ones((8, 2)), jnp.zeros(2)
      >>> tx = jaxdp.private_prefix_sum(plan, keys)
      >>> batch = jaxdp.sampling.batch(plan, keys, 0, data)
      >>> each = params - batch.records  # gradients of half the squared distance, by record
      >>> mean, state = tx.update(each, tx.init(params), batch=batch)
      >>> each.shape, mean.shape
      ((2, 2), (2,))

    References:
      Kairouz et al., `Practical and Private (Deep) Learning without Sampling or Shuffling
      <https://arxiv.org/abs/2103.00039>`_, 2021; Denisov et al., `Improved Differential
      Privacy for SGD via Optimal Private Linear Operators on Adaptive Streams
      <https://arxiv.org/abs/2202.08312>`_, 2022.
    """
    keys = keys_lib.check(keys)
    run_state.check_plan(plan, "prefix_sum")
    numbers: correlated_noise.CorrelatedNumbers = plan.numbers
    run = numbers.run
    ((phase, grid),) = numbers.grids.items()
    start = run_state.new_horizon(run, private=keys.private and numbers.noisy)

    def init_fn(params: Any) -> PrivatePrefixSumState:
        places = parts.sections(params, _all, parts.leaves_apart(params))
        run_state.begin_run(params, keys, "prefix_sum")
        begun = (start, correlated_noise.begin(numbers, keys, places))
        at, noise = jax.tree.map(jnp.array, begun)
        total = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), params)
        return PrivatePrefixSumState(at, noise, total, jnp.zeros((1,), jnp.float32))

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, batch: Any, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        _, kept = batches.resolve(
            run,
            batch,
            None,
            keys=keys,
            step=state.horizon.count,
        )
        rows = finite_difference.num_rows(updates)
        if rows != len(kept):
            raise ValueError(
                "updates must have the records of the batch in front, "
                f"{len(kept)} rows; got {rows}"
            )
        _check_shapes(updates, state.total)
        active, horizon = run_state.advance(run, state)
        where = correlated_noise.place(numbers, state.horizon.count)
        apart = parts.leaves_apart(state.total)
        each = parts.split(updates, _all, apart)
        places = parts.sections(state.total, _all, apart)
        noise, correlated = correlated_noise.draw(
            numbers, state.noise, where, places, phase
        )
        summed = release.bounded_sum(grid, each, kept)
        mean = release.noised_mean(grid, summed, noise)
        mean = run_state.zero_where_done(active, mean)
        out = parts.join(mean, state.total, _all)
        total = jax.tree.map(
            lambda t, u: u + jnp.where(where.at == 0, 0, t), state.total, out
        )
        total = jax.tree.map(lambda t, u: jnp.where(active, u, t), state.total, total)
        out = jax.tree.map(lambda u, x: u.astype(x.dtype), out, updates)
        norm = optax.tree.norm(mean).reshape(1)
        return out, PrivatePrefixSumState(horizon, correlated, total, norm)

    return run_state.transformation(init_fn, update_fn)


def _check_shapes(updates: Any, params: Any) -> None:
    """Raises ValueError unless updates have the shapes of the params behind the records."""
    structures = jax.tree.structure(updates), jax.tree.structure(params)
    if structures[0] != structures[1]:
        raise ValueError(
            f"updates must be a tree like the params {structures[1]}, got {structures[0]}"
        )
    for (path, x), like in zip(
        jax.tree_util.tree_leaves_with_path(updates),
        jax.tree.leaves(params),
        strict=True,
    ):
        if x.shape[1:] != like.shape:
            raise ValueError(
                "updates must have the shapes of the params behind the records, got "
                f"{x.shape} for the leaf {sphere.path_str(path)!r} of shape {like.shape}"
            )


def _all(path: str) -> bool:
    return True
