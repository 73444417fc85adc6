"""The standard normals behind prefix-sum noise: one tree of them for each step.

A period has one secret key. What its step t draws is a function of that key, t and the
leaf's path alone, so that a kernel may draw it again instead of storing it, and a leaf's
noise does not depend on the other leaves.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import sphere, threefry

#: Steps and twice a step must fit into int32.
MAX_PERIOD = 2**30


def check_period(period: int) -> None:
    """Raises unless ``period`` is an integer from 1 to :data:`MAX_PERIOD`."""
    if not isinstance(period, int) or isinstance(period, bool):
        raise TypeError(f"period must be an integer, got {period!r}")
    if not 1 <= period <= MAX_PERIOD:
        raise ValueError(f"period must be from 1 to 2**30, got {period}")


def zeros(like: Any, rows: int | None = None) -> Any:
    """A tree of float32 zeros shaped like ``like``, or ``rows`` of them in each leaf."""
    front = () if rows is None else (rows,)
    return jax.tree.map(lambda x: jnp.zeros((*front, *x.shape), jnp.float32), like)


def as_step(step: int | jax.Array) -> jax.Array:
    """``step`` as an int32 scalar, traced or not."""
    step = jnp.asarray(step)
    if step.shape or not jnp.issubdtype(step.dtype, jnp.integer):
        raise ValueError(
            f"step must be one integer, got shape {step.shape}, dtype {step.dtype}"
        )
    return step.astype(jnp.int32)


def draw(key: jax.Array, step: jax.Array, like: Any) -> Any:
    """Standard normals of one step of a period.

    Args:
      key: typed threefry key of this period, shape=(); secret.
      step: int32, shape=().
      like: pytree of arrays or ``jax.ShapeDtypeStruct``; only paths and shapes are read.

    Returns:
      A tree like ``like``, float32: ``threefry.secret_normal`` under ``fold_in(fold_in(key,
      step), hash of the leaf's path)``.

    Raises:
      ValueError: two leaves have one identity and would share their noise.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    paths = [sphere.path_str(path) for path, _ in leaves]
    ids = [sphere.leaf_id(path) for path in paths]
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"two of the leaves {', '.join(paths)} hash to the same identity and would "
            "share their noise; rename one of them"
        )
    if not leaves:
        return treedef.unflatten([])
    # In a loop, which XLA does not fuse: see sphere.
    step_key = threefry.fold_in(key, step)
    keys = jax.lax.map(
        lambda i: threefry.fold_in(step_key, i), jnp.asarray(np.array(ids, np.uint32))
    )
    draws = [
        threefry.secret_normal(keys[i], tuple(leaf.shape))
        for i, (_, leaf) in enumerate(leaves)
    ]
    return treedef.unflatten(draws)
