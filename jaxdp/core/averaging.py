"""Averages of the iterates: post-processing of releases, at no cost in privacy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.core import run_state, validate
from jaxdp.core.precision import widened
from jaxdp.core.types import PathPredicate
from jaxdp.kernels import sphere


class PolyakState(NamedTuple):
    """State of :func:`polyak_average`. Public: it depends on data by the params alone."""

    count: jax.Array  # shape=(), dtype=int32; updates seen
    average: Any  # like the params, floating leaves in float32 or better


def polyak_average(start_step: int = 0) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the mean of the iterates after step ``start_step``; passes updates on.

    Stands last in a chain, where updates are what is added to the params, and changes
    nothing about the run: read the mean with :func:`polyak_output`. Until
    ``start_step`` the mean is the current iterate. Of leaves that ``jaxdp.fit`` does not
    train, it is the leaf itself.

    .. math:: \bar\theta_t = \frac1{t-t_0}\sum_{s=t_0+1}^t \theta_s

    Args:
      start_step: :math:`t_0`, how many of the first iterates are left out. Three
        quarters of the steps average the last quarter.

    Privacy:
      Post-processing: iterates are functions of the initial params and of releases.

    Raises:
      TypeError, ValueError: ``start_step`` is no integer >= 0; ``update`` without params.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> tx = optax.chain(optax.sgd(1.0), jaxdp.polyak_average(start_step=1))
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     updates, state = tx.update(-jnp.ones(2), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params.tolist(), jaxdp.polyak_output(state).tolist()
      ([3.0, 3.0], [2.5, 2.5])

    References:
      Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
    """
    validate.integer(at_least=0, start_step=start_step)

    def init_fn(params: Any) -> PolyakState:
        # Copies, because callers donate params and state.
        average = jax.tree.map(lambda p: jnp.array(p, _wide(p)), params)
        return PolyakState(jnp.zeros((), jnp.int32), average)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, PolyakState]:
        del extra_args
        if params is None:
            raise ValueError("params must be passed to update: they are averaged")
        count = state.count + 1
        weight = 1 / jnp.maximum(count - start_step, 1).astype(jnp.float32)
        after = optax.apply_updates(widened(params), widened(updates))

        def mean(new: jax.Array, old: jax.Array) -> jax.Array:
            if not jnp.issubdtype(old.dtype, jnp.inexact):
                return jnp.asarray(new, old.dtype)
            return old + weight.astype(old.dtype) * (new.astype(old.dtype) - old)

        average = jax.tree.map(mean, after, state.average)
        return updates, PolyakState(count, average)

    return run_state.transformation(init_fn, update_fn)


def _wide(leaf: Any) -> Any:
    """Returns the dtype of the average: at least float32, so that small weights count."""
    dtype = jnp.result_type(leaf)
    return sphere.wide(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def with_frozen(state: Any, params: Any, moves: PathPredicate) -> Any:
    """Returns a state of the optimizer with the params for frozen leaves of its averages.

    Updates that an average counts may move such leaves, by weight decay; the run does not.
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    frozen = {path: leaf for path, leaf in named if not moves(sphere.path_str(path))}

    def restored(node: Any) -> Any:
        if not isinstance(node, PolyakState):
            return node
        average = jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.asarray(frozen.get(path, x), x.dtype), node.average
        )
        return node._replace(average=average)

    return jax.tree.map(restored, state, is_leaf=lambda x: isinstance(x, PolyakState))


def polyak_output(state: Any) -> Any:
    """Returns the averaged params, in float32 or better: :func:`polyak_average`'s point.

    ``state`` is the transform's or any tree that holds it once (ValueError if not): a
    chain's state, or ``FitInfo.state``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> tx = optax.chain(optax.sgd(1.0), jaxdp.polyak_average())
      >>> state = tx.init(jnp.zeros(2))
      >>> _, state = tx.update(-jnp.ones(2), state, jnp.zeros(2))
      >>> jaxdp.polyak_output(state).tolist()
      [1.0, 1.0]
    """
    return run_state.only(PolyakState, state, "jaxdp.polyak_average").average
