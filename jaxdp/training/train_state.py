"""Step of a Flax ``TrainState`` whose gradients are made by its own transformation."""

import warnings
from typing import Any

import jax
import optax

from jaxdp.core import precision
from jaxdp.core.keys import Keys
from jaxdp.kernels.stochastic_rounding import is_narrow


def apply_gradients(state: Any, *, keys: Keys | None = None, **given: Any) -> Any:
    """Returns a ``TrainState`` after one step of a chain that begins with a maker.

    In place of ``state.apply_gradients``, which asks for gradients and passes nothing on
    to ``tx.update``: ``jaxdp.dpzero`` and the like make gradients themselves, from losses
    and records. To be called under ``jax.jit``::

        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        state = jaxdp.apply_gradients(state, value_fn=losses, batch=batch)

    Args:
      state: a ``flax.training.train_state.TrainState``, or whatever has ``tx``,
        ``params``, ``opt_state``, ``step`` and ``replace``.
      keys: the ``jaxdp.Keys`` of the run where params have leaves of 16 bits, which they
        round (:func:`jaxdp.apply_updates`). None rounds to nearest, and warns of such
        leaves: their small steps are lost.
      **given: keywords of ``tx.update``: ``value_fn`` and ``batch``, and what else it
        takes.

    Returns:
      The state with new ``params`` and ``opt_state``, and ``step`` raised by one. What is
      released is what ``tx`` releases.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> from flax.training.train_state import TrainState
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> tx = optax.chain(jaxdp.dpzero(plan, jaxdp.Keys.insecure(0)), optax.sgd(0.1))
      >>> state = TrainState.create(apply_fn=None, params={"w": jnp.zeros(2)}, tx=tx)
      >>> state = jaxdp.apply_gradients(
      ...     state, value_fn=lambda p, x: x @ p["w"], batch=jnp.ones((8, 2))
      ... )
      >>> int(state.step), state.params["w"].shape
      (1, (2,))
    """
    updates, opt_state = state.tx.update(None, state.opt_state, state.params, **given)
    if keys is None:
        if any(map(is_narrow, jax.tree.leaves(state.params))):
            warnings.warn(
                "keys should be given where params have leaves of 16 bits, got None: steps "
                "below half the distance of neighbouring numbers are lost",
                stacklevel=2,
            )
        params = optax.apply_updates(state.params, updates)
    else:
        params = precision.apply_updates(
            state.params, updates, keys=keys, step=state.step
        )
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)
