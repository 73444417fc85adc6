"""Step of a Flax ``TrainState`` whose gradients are made by its own transformation."""

from typing import Any

import optax


def apply_gradients(state: Any, **given: Any) -> Any:
    """Returns a ``TrainState`` after one step of a chain that begins with a maker.

    In place of ``state.apply_gradients``, which asks for gradients and passes nothing on
    to ``tx.update``: ``jaxdp.dpzero`` and the like make gradients themselves, from losses
    and records. To be called under ``jax.jit``::

        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        state = jaxdp.apply_gradients(state, value_fn=losses, batch=batch)

    Args:
      state: a ``flax.training.train_state.TrainState``, or whatever has ``tx``,
        ``params``, ``opt_state``, ``step`` and ``replace``.
      **given: keywords of ``tx.update``: ``value_fn`` and ``batch``, and what else it
        takes.

    Returns:
      The state with new ``params`` and ``opt_state``, and ``step`` raised by one. What is
      released is what ``tx`` releases.
    """
    updates, opt_state = state.tx.update(None, state.opt_state, state.params, **given)
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)
