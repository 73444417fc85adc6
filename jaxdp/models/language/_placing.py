"""Leaves of a checkpoint that are put onto the devices of a mesh, tensor by tensor.

The host holds no more than the parts of one tensor at any time: those that its devices ask
for. Each part is read once, however many devices have it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.kernels.sphere import path_str
from jaxdp.models.language.sharding import shardings

#: Part of a tensor in our layout: ``part(layer, slices)``.
Part = Callable[[int, tuple[slice, ...]], np.ndarray]
#: Where parameters are to be: a mesh, or a function of their shapes.
Placing = Mesh | Callable[[Any], Any]


def places(placing: Placing, shapes: Any) -> Any:
    """Returns a tree of ``NamedSharding`` like ``shapes``.

    Raises:
      TypeError: ``placing`` is no mesh or function, or the function's tree is another one.
    """
    if isinstance(placing, Mesh):
        return shardings(shapes, placing)
    if not callable(placing):
        raise TypeError(
            "sharding must be a jax.sharding.Mesh, a function of the parameters' shapes or "
            f"None, got {placing!r}"
        )
    found = placing(shapes)
    wanted, given = jax.tree.structure(shapes), jax.tree.structure(found)
    if wanted != given:
        raise TypeError(
            "sharding must return a tree like its argument, with a sharding for each "
            f"leaf, {wanted}; got {given}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        if not isinstance(leaf, NamedSharding):
            raise TypeError(
                "sharding must return a jax.sharding.NamedSharding for each leaf, got "
                f"{leaf!r} for {path_str(path)!r}"
            )
    return found


def stacked(
    shape: tuple[int, ...], dtype: Any, place: NamedSharding, part: Part
) -> jax.Array:
    """Puts a leaf of one tensor for each layer onto its devices, layer by layer."""
    of: Any = place.mesh
    mesh = Mesh(of.devices, of.axis_names)  # With axes of the type Auto.
    here = NamedSharding(mesh, place.spec)
    of_layer = NamedSharding(mesh, PartitionSpec(*place.spec[1:]))
    zeros, put = programs(shape, jnp.dtype(dtype), here)
    array = zeros()
    for layer in range(shape[0]):
        one = whole(shape[1:], of_layer, functools.partial(part, layer))
        # Waited for, or the tensors of several layers would be held until copied.
        array = jax.block_until_ready(put(array, one, layer))
        del one  # It may be the host's memory itself.
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, place, shards)


@functools.lru_cache(maxsize=64)
def programs(shape: tuple[int, ...], dtype: Any, place: NamedSharding | None) -> Any:
    """Returns what makes a leaf of zeros, and what writes a layer of it in place."""

    def put(layers: jax.Array, one: jax.Array, at: int) -> jax.Array:
        one = one.reshape(layers.shape[1:])  # A smaller one would be written, too.
        return jax.lax.dynamic_update_index_in_dim(layers, one, at, 0)

    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)
    return zeros, jax.jit(put, donate_argnums=0, out_shardings=place)


def whole(
    shape: tuple[int, ...],
    place: NamedSharding,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """Puts one tensor onto its devices, of whose parts each is read once."""
    known: dict[Any, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        ranges = tuple(
            x.indices(n)[:2] for x, n in zip(index or (), shape, strict=True)
        )
        if ranges not in known:
            known[ranges] = read(tuple(slice(*x) for x in ranges))
        return known[ranges]

    made = jax.make_array_from_callback(shape, place, part)
    return jax.block_until_ready(made)
