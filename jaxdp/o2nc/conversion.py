r"""Online-to-non-convex conversion: gradients at query points become the next points.

An online learner picks increments :math:`\|\Delta_t\|\le D` by projected gradient descent;
the point moves by them, and is queried at a random place of each segment:

.. math::
   w_t = x_t + s_t\Delta_t, \quad x_{t+1} = x_t + \Delta_t, \quad
   \Delta_{t+1} = \mathrm{Proj}_D(\Delta_t - \eta \tilde g_t), \qquad s_t\sim U[0,1]

The params of a run are the query points w, so that any gradient maker can stand before it;
x is never formed. What is returned is the mean of the queries of one window of M steps,
the window drawn uniformly.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.types import Run
from jaxdp.kernels import sphere


class DriverNumbers(NamedTuple):
    """Frozen numbers of a plan that :func:`o2nc` reads."""

    run: Run
    num_steps: int
    max_step: float
    learning_rate: float | None
    window: int
    reset: bool
    skip_last_query: bool


class O2NCState(NamedTuple):
    """State of :func:`o2nc`. Public: functions of released gradients and public coins."""

    count: jax.Array  # shape=(), dtype=int32; gradients consumed
    increment: Any  # Delta_t, like the params, floating leaves in float32
    fraction: jax.Array  # shape=(), dtype=float32; s_t, where the params lie
    squares: jax.Array  # shape=(), dtype=float32; sum of |g|^2, for the adaptive step
    mean: Any  # of this window's queries so far, float32
    output: Any  # mean of one of the complete windows, uniformly drawn
    windows: jax.Array  # shape=(), dtype=int32; complete windows
    position: jax.Array  # shape=(), key of the s_t; public
    choice: jax.Array  # shape=(), key of the window that is returned; public


def o2nc(
    plan: Any,
    keys: keys_lib.Keys,
    *,
    learning_rate: float | jax.Array | None = None,
    fractions: jax.Array | np.ndarray | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns gradients at the current params into steps to the next query point.

    Works on any gradient: ``optax.chain(jaxdp.private_oracle(plan, keys), jaxdp.o2nc(plan,
    keys))`` is the private algorithm. Outgoing updates are added to the params as they are;
    nothing that rescales them may follow. The returned point is not the params:
    see :func:`jaxdp.o2nc_output`.

    Args:
      plan: a ``jaxdp.plans.O2NC``; with or without noise.
      keys: a ``jaxdp.Keys``; its direction root is read.
      learning_rate: :math:`\eta`, in units of params squared over loss; default the plan's.
        Where both are None the step adapts: :math:`\eta_t = \sqrt2 D / (\sum_\tau
        \|\tilde g_\tau\|^2)^{1/2}`, over the window's gradients (all, without reset).
      fractions: the :math:`s_t` by segment, float32, for tests; default uniform.

    Privacy:
      Post-processing: reads no data, releases nothing of its own.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: a plan of another family;
        ``update`` without params, or without gradients.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> sampling = jaxdp.sampling.SinglePassRestarts(period=2, restart_batch_size=4)
      >>> plan = jaxdp.plans.O2NC(
      ...     num_examples=20, num_steps=4, sampling=sampling, relation="replace_one",
      ...     restart_l2_clip_norm=1.0, l2_clip_norm=0.5, smoothing_radius=0.1,
      ...     max_step=0.01, window=2,
      ... ).with_noise(noise_multiplier=2.0)
      >>> keys, params = jaxdp.Keys.insecure(0), jnp.zeros(2)
      >>> tx = jaxdp.o2nc(plan, keys)  # optax.chain(jaxdp.private_oracle(plan, keys), tx)
      >>> step, state = tx.update(jnp.array([3.0, 4.0]), tx.init(params), params)
      >>> bool(optax.tree.norm(step) <= plan.max_step)
      True

    References:
      Cutkosky, Mehta, Orabona, `Optimal Stochastic Non-smooth Non-convex Optimization
      through Online-to-Non-convex Conversion <https://arxiv.org/abs/2302.03775>`_, 2023;
      Zhang, Tran, Cutkosky, 2024, Algorithm 3 (``reset=True``); Kornowski, Liu, Talwar,
      2025, Algorithm 2 (``reset=False``).
    """
    keys = keys_lib.check(keys)
    run_state.check_family(plan, "o2nc")
    numbers: DriverNumbers = plan.driver
    context = numbers.run.context
    position = keys_lib.stream(keys.direction, "position", context=context)
    choice = keys_lib.stream(keys.direction, "output", context=context)
    rate = numbers.learning_rate if learning_rate is None else learning_rate
    radius = np.float32(numbers.max_step)
    # Queries of a window: the last one's gradient moves nothing where the learner resets.
    queries = numbers.window - numbers.skip_last_query

    def fraction(key: jax.Array, segment: jax.Array) -> jax.Array:
        if fractions is not None:
            return jnp.asarray(fractions, jnp.float32)[segment]
        word = keys_lib.words(keys_lib.at_step(key, segment), 1)[0]
        return (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)

    def init_fn(params: Any) -> O2NCState:
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), _wide(p)), params)
        start = jnp.zeros((), jnp.int32)
        output = jax.tree.map(lambda p: jnp.array(p, _wide(p)), params)
        at, squares = fraction(position, start), jnp.zeros((), jnp.float32)
        begun = (start, zeros, at, squares, zeros, output, start, position, choice)
        return O2NCState(*jax.tree.map(jnp.array, begun))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, O2NCState]:
        del extra_args
        if params is None:
            raise ValueError("params must be passed to update: they are averaged")
        if updates is None:
            raise ValueError(
                "updates must be gradients: o2nc makes none, got None; the transformation "
                "is optax.chain(jaxdp.private_oracle(plan, keys), jaxdp.o2nc(plan, keys))"
            )
        gradient = _floating(updates, params)
        active = state.count < numbers.num_steps
        window, at = jnp.divmod(state.count, np.int32(queries))
        ends = at == queries - 1
        size = optax.tree.norm(gradient, squared=True).astype(jnp.float32)
        squares = state.squares + size
        eta = rate
        if eta is None:
            tiny = jnp.finfo(jnp.float32).tiny
            eta = math.sqrt(2) * radius / jnp.sqrt(jnp.maximum(squares, tiny))
        moved = optax.tree.add_scale(state.increment, -eta, gradient)
        following = _projected(moved, radius)
        mean = _averaged(state.mean, _wider(params), at + 1)
        # What is left of this segment, then the start of the next.
        left = optax.tree.scale(1 - state.fraction, state.increment)
        if numbers.skip_last_query:
            # The window's last query: in its mean, but nobody asks there. Then the whole
            # of its segment is walked, and the next window's first query is its end.
            last = fraction(
                state.position, window * numbers.window + numbers.window - 1
            )
            unasked = optax.tree.add_scale(left, last, following)
            unasked = optax.tree.add(_wider(params), unasked)
            mean = optax.tree.where(
                ends, _averaged(mean, unasked, numbers.window), mean
            )
            left = optax.tree.where(ends, optax.tree.add(left, following), left)
        windows = state.windows + ends.astype(jnp.int32)
        taken = ends & _is_taken(state.choice, windows)
        if numbers.reset:
            squares = jnp.where(ends, 0, squares)
            following = optax.tree.where(
                ends, optax.tree.zeros_like(following), following
            )
        segment = (window + ends.astype(jnp.int32)) * numbers.window + jnp.where(
            ends, 0, at + 1
        )
        s = fraction(state.position, segment)
        step = optax.tree.add_scale(left, s, following)
        new = state._replace(
            count=state.count + 1,
            increment=following,
            fraction=s,
            squares=squares,
            mean=optax.tree.where(ends, optax.tree.zeros_like(mean), mean),
            output=optax.tree.where(taken, mean, state.output),
            windows=windows,
        )
        new = optax.tree.where(active, new, state)
        out = jax.tree.map(
            lambda u, p: jnp.where(active, u, 0).astype(jnp.result_type(p)),
            step,
            params,
        )
        return out, new

    return run_state.transformation(init_fn, update_fn)


def o2nc_output(state: Any, params: Any) -> Any:
    """Returns the point of a run: the mean of a uniformly drawn window's queries.

    Args:
      state: the state of :func:`o2nc`, or a tree that holds one, such as a chain's.
      params: the current params.

    Returns:
      A tree of the params' dtypes. Before the first window is complete, ``params``; a last
      window that is not complete is never returned. Every complete window has the same
      probability, decided by the direction root: this is free, and so is publishing all.

    Raises:
      ValueError: ``state`` holds no such state, or more than one; or ``params`` are of
        other shapes than those it was made for.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> sampling = jaxdp.sampling.SinglePassRestarts(period=2, restart_batch_size=4)
      >>> plan = jaxdp.plans.O2NC(
      ...     num_examples=20, num_steps=4, sampling=sampling, relation="replace_one",
      ...     restart_l2_clip_norm=1.0, l2_clip_norm=0.5, smoothing_radius=0.1,
      ...     max_step=0.01, window=2,
      ... ).with_noise(noise_multiplier=2.0)
      >>> tx, params = jaxdp.o2nc(plan, jaxdp.Keys.insecure(0)), jnp.zeros(2)
      >>> jaxdp.o2nc_output(tx.init(params), params).tolist()  # no window is complete
      [0.0, 0.0]

    References:
      Zhang, Tran, Cutkosky, 2024, Algorithm 3; Kornowski, Liu, Talwar, 2025, Algorithm 2.
    """
    run = run_state.only(O2NCState, state, "jaxdp.o2nc")

    def leaf(mean: Any, p: Any) -> Any:
        if isinstance(mean, optax.MaskedNode):  # Not this conversion's to move.
            return p
        dtype = jnp.result_type(p)
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.asarray(p)
        return jnp.where(jnp.asarray(run.windows) > 0, mean, p).astype(dtype)

    masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    means = jax.tree.leaves(run.output, is_leaf=masked)
    leaves, structure = jax.tree.flatten(params)  # NNX wraps those of states otherwise.
    if len(means) != len(leaves) or any(
        not masked(mean) and jnp.shape(mean) != jnp.shape(p)
        for mean, p in zip(means, leaves, strict=False)
    ):
        raise ValueError(
            "params must be of the shapes that the state was made for, got "
            f"{[jnp.shape(p) for p in leaves]}"
        )
    return structure.unflatten(
        [leaf(mean, p) for mean, p in zip(means, leaves, strict=True)]
    )


class RunState(NamedTuple):
    """State of the oracle and the conversion together: a plan's own transformation."""

    oracle: Any  # jaxdp.private_oracle's; holds secrets
    driver: O2NCState

    @property
    def horizon(self) -> run_state.Horizon:
        return self.oracle.horizon

    @property
    def release(self) -> jax.Array:
        return self.oracle.release

    count, exhausted = run_state.count, run_state.exhausted


def conversion(
    oracle: optax.GradientTransformationExtraArgs,
    driver: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Chains ``oracle`` and ``driver`` with a state that names its parts."""

    def init_fn(params: Any) -> RunState:
        state: Any = driver.init(params)
        return RunState(oracle.init(params), state)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        gradient, made = oracle.update(updates, state.oracle, params, **extra_args)
        steps, moved = driver.update(gradient, state.driver, params)
        return steps, RunState(made, moved)  # pyright: ignore[reportArgumentType]

    return run_state.transformation(init_fn, update_fn)


def _is_taken(key: jax.Array, windows: jax.Array) -> jax.Array:
    """Draws whether the j-th complete window replaces the one kept: probability 1 / j."""
    word = keys_lib.words(keys_lib.at_step(key, windows), 1)[0]
    return word % jnp.maximum(windows, 1).astype(jnp.uint32) == 0


def _projected(tree: Any, radius: np.float32) -> Any:
    """Projects onto the ball; huge norms do not overflow, and zero stays zero."""
    peak = optax.tree.norm(tree, ord=jnp.inf)
    peak = jnp.maximum(peak, jnp.finfo(jnp.float32).tiny)
    unit = optax.tree.scale(1 / peak, tree)
    norm = optax.tree.norm(unit) * peak
    return optax.tree.scale(radius / jnp.maximum(norm, radius), tree)


def _averaged(mean: Any, point: Any, count: int | jax.Array) -> Any:
    """Adds the last of ``count`` points to the mean of the others: constants stay exact."""
    weight = 1 / jnp.asarray(count, jnp.float32)
    return jax.tree.map(lambda m, p: m + weight.astype(m.dtype) * (p - m), mean, point)


def _wide(leaf: Any) -> Any:
    """Returns the state's dtype of a leaf: float32, or the leaf's own if that is wider."""
    return sphere.wide(jnp.result_type(leaf))


def _wider(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, _wide(x)), tree)


def _floating(updates: Any, params: Any) -> Any:
    """Casts gradients to the dtypes of the state; zero for leaves that cannot move."""

    def leaf(g: Any, p: Any) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(p), jnp.floating):
            return jnp.zeros(jnp.shape(p), jnp.float32)
        return jnp.asarray(g, _wide(p))

    return jax.tree.map(leaf, updates, params)
