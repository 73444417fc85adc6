"""Vectors over the leaves that move: one array, or parts where leaves are large or shared.

A record's gradient is one vector, whose norm is clipped and to which noise is added.
Concatenated from leaves that devices share, it would be gathered on each of them, and of
large leaves it would be a copy. So such leaves stay *apart*: they are parts of the vector,
in their own shapes and where they are. All others are joined: the programs of many small
parts would be long. Without leaves apart the vector is a plain array.

Which elements a part has does not change what is drawn for them (:func:`sections`).
"""

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import sphere
from jaxdp.kernels.node_noise import Section
from jaxdp.kernels.sphere import PathPredicate

#: Leaves that stay apart, by path; those of one shape that lie alike have equal values.
Apart = Mapping[str, Hashable]
NONE: Apart = {}
#: Leaves of so many elements stay apart on any device: 16 MiB of float32.
LARGE = 2**22


class Parts(NamedTuple):
    """Vector of which some leaves stay apart: a pytree of its parts.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import parts
      >>> tree = {"b": jnp.ones((4, 2)), "w": jnp.ones((4, 3, 2))}
      >>> vector = parts.split(tree, lambda path: True, {"w": "columns"})
      >>> vector.joined.shape, vector.apart["w"].shape, vector.apart["b"]
      ((4, 2), (4, 3, 2), None)
    """

    joined: Any  # (..., n), of all leaves that are not apart; None if there are none
    apart: Any  # the tree, with None for leaves that are not apart


def leaves_apart(tree: Any, shared: Apart = NONE) -> Apart:
    """Returns the leaves of a tree that stay apart: large ones, and those in ``shared``.

    Args:
      tree: pytree of arrays, of which only paths and shapes are read.
      shared: leaves that devices share, by path, and how they do.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import parts
      >>> shapes = {"b": (2,), "w": (4096, 1024)}
      >>> tree = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
      >>> parts.leaves_apart(tree), parts.leaves_apart(tree, {"b": "halves"})
      ({'w': None}, {'b': 'halves', 'w': None})
    """
    found: dict[str, Hashable] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = sphere.path_str(path)
        if name in shared or math.prod(np.shape(leaf)) >= LARGE:
            found[name] = shared.get(name)
    return found


def split(tree: Any, moves: PathPredicate, apart: Apart = NONE) -> Any:
    """Concatenates the leaves that move, (B, ...), but for those that stay apart.

    Args:
      tree: leaves with one row for each record in front.
      moves: predicate on the path; others are left out.
      apart: leaves that stay as they are.

    Returns:
      (B, d), or :class:`Parts` if any leaf that moves is apart.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import parts
      >>> tree = {"b": jnp.ones((4, 2)), "w": jnp.ones((4, 3, 2))}
      >>> parts.split(tree, lambda path: path == "w").shape
      (4, 6)
    """
    named = jax.tree_util.tree_leaves_with_path(tree)
    moving = [(sphere.path_str(p), x) for p, x in named if moves(sphere.path_str(p))]
    rows = [x.reshape(len(x), -1) for path, x in moving if path not in apart]
    joined = jnp.concatenate(rows, axis=1) if rows else None
    if not any(path in apart for path, _ in moving):
        return joined
    return Parts(joined, _only(tree, moves, apart))


def join(vector: Any, like: Any, moves: PathPredicate) -> Any:
    """Returns the tree of a vector of :func:`split`, with zeros where nothing moves.

    Args:
      vector: (d,), or :class:`Parts`: without rows.
      like: tree of arrays of the leaves' shapes.
      moves: as in :func:`split`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import parts
      >>> like = {"b": jnp.ones(2), "w": jnp.ones((3, 2))}
      >>> tree = parts.join(jnp.arange(6.0), like, lambda path: path == "w")
      >>> tree["b"].tolist(), tree["w"].tolist()
      ([0.0, 0.0], [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    """
    vector = vector if isinstance(vector, Parts) else Parts(vector, None)
    own = {
        sphere.path_str(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(vector.apart)
    }
    dtype = jax.tree.leaves(vector)[0].dtype
    at = 0

    def leaf(path: Any, x: Any) -> jax.Array:
        nonlocal at
        name, shape = sphere.path_str(path), np.shape(x)
        if not moves(name):
            return jnp.zeros(shape, dtype)
        if name in own:
            return own[name]
        begin, at = at, at + math.prod(shape)
        return vector.joined[begin:at].reshape(shape)

    return jax.tree_util.tree_map_with_path(leaf, like)


def sections(tree: Any, moves: PathPredicate, apart: Apart = NONE) -> Any:
    """Returns where the elements of :func:`split` lie in the vector of all leaves.

    In the form of a row of what it returns, for :mod:`jaxdp.kernels.node_noise`: an element
    has the same noise, whether its leaf is apart or not.

    Raises:
      ValueError: two leaves that stay apart have one path.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import parts
      >>> tree = {"b": jnp.ones(2), "w": jnp.ones((3, 2))}
      >>> found = parts.sections(tree, lambda path: True, {"w": "columns"})
      >>> found.apart["w"].index().tolist()
      [[2, 3], [4, 5], [6, 7]]
    """
    ranges, own, at = [], {}, 0
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name, shape = sphere.path_str(path), tuple(np.shape(x))
        if not moves(name):
            continue
        begin, at = at, at + math.prod(shape)
        if name in own:
            raise ValueError(
                f"two of the leaves have the path {name!r} and would share their noise; "
                "rename one of them"
            )
        if name in apart:
            own[name] = Section(shape, ((begin, at),), apart[name])
        elif ranges and ranges[-1][1] == begin:
            ranges[-1] = ranges[-1][0], at
        else:
            ranges.append((begin, at))
    size = sum(end - begin for begin, end in ranges)
    # Without any leaf, as of optax's placeholder for params, the vector is empty.
    joined = Section((size,), tuple(ranges)) if ranges or not own else None
    if not own:
        return joined
    return Parts(joined, _only(tree, moves, apart, own))


def _only(tree: Any, moves: PathPredicate, apart: Apart, own: Any = None) -> Any:
    """Returns a tree with None in the leaves that are joined; ``own`` leaves, if given."""

    def leaf(path: Any, x: Any) -> Any:
        name = sphere.path_str(path)
        if name not in apart or not moves(name):
            return None
        return x if own is None else own[name]

    return jax.tree_util.tree_map_with_path(leaf, tree)
