r"""Entropic mirror descent: gradients become steps on the simplex, by multiplication.

.. math:: x_{t+1} = \mathrm{softmax}(\log x_t - \eta_t g_t)

also known as exponentiated gradient or multiplicative weights. Its regret grows with
log d where that of projected gradient descent grows with d.
"""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.core import run_state, validate
from jaxdp.kernels import simplex, sphere

_step = jnp.vectorize(simplex.entropic_step, signature="(d),(d),()->(d),()")


class EntropicDescentState(NamedTuple):
    """State of :func:`entropic_descent`. Public where the gradients are."""

    count: jax.Array  # shape=(), dtype=int32; updates made
    logits: Any  # like the params, float32 or better; their softmax is the point


def entropic_descent(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns gradients into steps of entropic mirror descent on simplices.

    Every leaf holds points of a simplex along its last axis. Its logits are kept in
    float32 or better, so that a weight which is too small for the params' dtype comes back
    when the gradients say so; a weight of zero in the initial params stays zero. Outgoing
    updates are the new point minus the params: nothing that rescales them may follow, and
    what changes gradients stands before.

    For gradients :math:`g_1,\dots,g_T` and a constant step the regret against any point of
    the simplex is at most

    .. math:: \frac{\log d}\eta + \frac\eta2\sum_{t=1}^T\|g_t\|_\infty^2

    Args:
      learning_rate: :math:`\eta`, >= 0, in units of one over the gradient; or a schedule
        of it, ``step -> rate``.

    Privacy:
      None of its own: a function of the gradients that it is given. Private gradients
      make it post-processing.

    Raises:
      TypeError, ValueError: ``learning_rate`` is no such number; in ``init`` a leaf that is
        not floating, has no axis or an empty last one; ``update`` without params.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import jaxdp
      >>> optimizer = jaxdp.entropic_descent(learning_rate=0.5)
      >>> params = jnp.array([0.5, 0.5])
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.array([1.0, -1.0]), state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> bool(abs(params.sum() - 1) < 1e-6), bool(params[1] > params[0])
      (True, True)

    References:
      Gonzalez, Guzman, Paquette (arXiv 2403.02912), 2024, Algorithm 1 and Lemma A.1;
      Kivinen and Warmuth, Exponentiated Gradient versus Gradient Descent for Linear
      Predictors, 1997.
    """
    if isinstance(learning_rate, numbers.Number):  # else a schedule, or a traced value
        validate.non_negative(learning_rate=learning_rate)

    def init_fn(params: Any) -> EntropicDescentState:
        logits = jax.tree_util.tree_map_with_path(_logits, params)
        return EntropicDescentState(jnp.zeros((), jnp.int32), logits)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, EntropicDescentState]:
        del extra_args
        if params is None:
            raise ValueError("params must be passed to update: the step starts there")
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def stepped(logits: jax.Array, gradient: jax.Array) -> jax.Array:
            wide = logits.dtype
            logits, top = _step(
                logits, jnp.asarray(gradient, wide), jnp.asarray(rate, wide)
            )
            return logits - top[..., None]  # So that the largest is 0.

        def step(logits: jax.Array, point: Any) -> jax.Array:
            # Rounded to the params' dtype before, so that a short way is exact.
            return jax.nn.softmax(logits).astype(jnp.result_type(point)) - point

        logits = jax.tree.map(stepped, state.logits, updates)
        steps = jax.tree.map(step, logits, params)
        return steps, EntropicDescentState(state.count + 1, logits)

    return run_state.transformation(init_fn, update_fn)


def _logits(path: Any, leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if (
        leaf.ndim == 0
        or not leaf.shape[-1]
        or not jnp.issubdtype(leaf.dtype, jnp.floating)
    ):
        raise ValueError(
            f"params must be points of a simplex along the last axis; leaf "
            f"{sphere.path_str(path)!r} is {leaf.dtype} of shape {leaf.shape}"
        )
    return jnp.log(leaf.astype(sphere.wide(leaf.dtype)))
