"""Parameters of 16 bits: steps that are added right in mean, from public random bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.kernels import sphere, stochastic_rounding
from jaxdp.kernels.stochastic_rounding import is_narrow


def apply_updates(
    params: Any, updates: Any, *, keys: keys_lib.Keys, step: int | jax.Array
) -> Any:
    """Adds updates to params as ``optax.apply_updates`` does, but loses none to 16 bits.

    A leaf of bfloat16 or float16 is summed in float32 and rounded up or down with the
    probabilities that keep the mean: a step below half the distance of neighbouring numbers
    moves few elements by that distance, in place of none. Leaves of integers stay as they
    are, and others are added as Optax adds them, to the bit. ``jaxdp.fit`` does this by
    itself.

    Args:
      params: pytree of arrays.
      updates: pytree like ``params``, of any floating dtypes. Float32 is best: give the
        optimizer :func:`jaxdp.widened` params and gradients.
      keys: the ``jaxdp.Keys`` of the run; its direction root is read, and nothing is spent.
      step: index of the step, from 0, shape=(): the same bits come for the same step.

    Returns:
      A tree like ``params``, of its dtypes.

    Privacy:
      Post-processing: the random bits come from the public direction root, and depend on
      no record.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``, or ``step`` no integer. ValueError: a
        negative step, or two leaves of 16 bits with one path.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> for step in range(10):  # Each is a quarter of what moves a number of 16 bits.
      ...     updates = jnp.full(10_000, 1e-3)
      ...     keys = jaxdp.Keys.insecure(0)
      ...     params = jaxdp.apply_updates(params, updates, keys=keys, step=step)
      >>> params.dtype, round(float(params.astype(jnp.float32).mean()), 3)
      (dtype(bfloat16), 1.01)

    References:
      Gupta et al., `Deep Learning with Limited Numerical Precision
      <https://arxiv.org/abs/1502.02551>`_, 2015.
    """
    keys = keys_lib.check(keys)
    if not isinstance(step, jax.Array | np.ndarray):
        validate.integer(at_least=0, step=step)
    elif np.shape(step) or not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(f"step must be an integer, got {step.dtype}{np.shape(step)}")
    return moved(params, updates, keys.direction, step)


def moved(
    params: Any, updates: Any, direction: jax.Array, step: int | jax.Array
) -> Any:
    """Returns :func:`apply_updates` of a direction root."""
    named = jax.tree_util.tree_leaves_with_path(params)
    paths = [sphere.path_str(path) for path, leaf in named if is_narrow(leaf)]
    keys: dict[str, jax.Array] = {}
    if len({*paths}) < len(paths):  # Their bits would be the same.
        raise ValueError(
            f"params must have a path of its own for each leaf, got {paths}"
        )
    if paths:
        key = keys_lib.stream(direction, "rounding", step)
        keys = dict(zip(paths, sphere.leaf_keys(key, paths), strict=True))

    def leaf(path: tuple[Any, ...], p: Any, u: Any) -> Any:
        if p is not None and not jnp.issubdtype(jnp.result_type(p), jnp.inexact):
            return p
        own = keys.get(sphere.path_str(path))
        if own is None:
            whole: Any = p
            return optax.apply_updates(whole, u)
        return stochastic_rounding.add(own, jnp.asarray(p), jnp.asarray(u))

    return jax.tree_util.tree_map_with_path(
        leaf, params, updates, is_leaf=lambda x: x is None
    )


def widened(tree: Any) -> Any:
    """Returns a tree whose leaves of bfloat16 and float16 are float32; others as they are.

    What an optimizer should see of parameters of 16 bits, and of their gradients: its
    moments are then float32, and no step is rounded before it is added.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> tree = jnp.ones(2, jnp.bfloat16), jnp.arange(2)
      >>> [str(leaf.dtype) for leaf in jaxdp.widened(tree)]
      ['float32', 'int32']
    """

    def leaf(x: Any) -> Any:
        if not is_narrow(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=jnp.float32)
        return jnp.asarray(x, jnp.float32)

    return jax.tree.map(leaf, tree)
