"""Data parallelism: devices that share the records of a batch and agree on all else.

The whole loop runs on every device of a mesh, on the same parameters, keys and data. Each
device evaluates its part of a batch; what passes between them is the sum of integers of
the oracle, once a step. Along the axis ``finite_difference.SIGNS`` two devices evaluate
the two signs of the same records, and their losses pass between them. All draw the same
directions and add the same noise to the same sum, so their parameters stay the same bits,
and nothing is sent to keep them so.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxdp.core import keys as keys_lib
from jaxdp.kernels import finite_difference
from jaxdp.mechanism.plan import Plan
from jaxdp.training import digests

T = TypeVar("T")


def check_mesh(mesh: Any, params: Any) -> Mesh | None:
    """Returns ``mesh`` if a run that starts at ``params`` can use it."""
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    if mesh is None:
        if any(len(leaf.sharding.device_set) > 1 for leaf in arrays):
            raise ValueError(
                "mesh must be given where params are on several devices, as those of a "
                "run with a mesh are; or bring them to the host: jax.device_get(params)"
            )
        return None
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}; make one with "
            'jax.make_mesh((jax.device_count(),), ("data",))'
        )
    processes = {device.process_index for device in mesh.devices.flat}
    if processes not in ({jax.process_index()}, set(range(jax.process_count()))):
        raise ValueError(
            "mesh must have devices of this process alone or of all processes, got one of "
            f"the processes {sorted(processes)} of {jax.process_count()}"
        )
    return mesh


def check_signs(mesh: Mesh | None, plan: Plan) -> None:
    """Requires slopes of two signs, and two devices, where a mesh shares signs."""
    signs = finite_difference.SIGNS
    if mesh is None or signs not in mesh.axis_names:
        return
    if not plan.shares_signs:
        raise ValueError(
            f"mesh must have no axis {signs!r} for {plan.family}, whose steps are no "
            f"slopes of two signs, got {dict(mesh.shape)}: share the records, along an "
            "axis of another name"
        )
    radius = plan.perturbation(1).smoothing_radius
    finite_difference.check_signs(mesh.shape[signs], radius, "mesh")


def several_processes(mesh: Mesh | None) -> bool:
    """Returns True if a run on this mesh spans several processes."""
    return mesh is not None and mesh.is_multi_process


def writes(mesh: Mesh | None) -> bool:
    """Returns True if this process keeps the record of a run: exactly one does."""
    return not several_processes(mesh) or jax.process_index() == 0


def check_same(mesh: Mesh | None, keys: keys_lib.Keys, **arguments: Any) -> None:
    """Requires equal keys and arguments in all processes of a run; all wait here.

    Other keys would put other noise on the same sums; other slices of a batch would count
    records twice. ``arguments`` are texts or trees of arrays, named in the ValueError.
    """
    if not several_processes(mesh):
        return
    known = {"keys": keys_lib.fingerprint(keys)}
    for name, x in arguments.items():
        text = isinstance(x, str)
        found = hashlib.sha256(x.encode()) if text else digests.sha256(x)
        known[name] = found.digest()
    for name, digest in sorted(known.items()):  # All ask in one order.
        every = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
        if np.any(every != every[0]):
            raise ValueError(
                f"{name} must be the same in all {len(every)} processes of the mesh, got "
                "others (keys from entropy differ unless they are broadcast: "
                "jaxdp.Keys.from_entropy().broadcast())"
            )


def together(mesh: Mesh | None, call: Callable[[], T]) -> T:
    """Returns what ``call`` returns here; where it raises in one process, all raise.

    So none waits for one that has refused. ``call`` must not wait for other processes.
    """
    if not several_processes(mesh):
        return call()
    result, error = None, None
    try:
        result = call()
    except Exception as caught:
        error = caught
    said = "" if error is None else str(error) or repr(error)
    every = gathered(mesh, said)
    if error is not None:
        raise error
    for index, said in enumerate(every):
        if said:
            raise ValueError(f"process {index} of the run refused: {said}")
    return cast(T, result)


def gathered(mesh: Mesh | None, text: str) -> list[str]:
    """Returns the texts of all processes, in their order; all wait here."""
    if not several_processes(mesh):
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(content)))
    # At least one: there are no arrays of size zero to gather.
    rows = np.pad(content, (0, max(1, int(sizes.max())) - len(content)))
    every = multihost_utils.process_allgather(rows)
    pairs = zip(every, sizes, strict=True)
    return [np.asarray(row[:size], np.uint8).tobytes().decode() for row, size in pairs]


def from_first(
    mesh: Mesh | None, read: Callable[[], dict[str, bytes | None]]
) -> dict[str, bytes | None]:
    """Returns what process 0 reads, in all; they wait for it, and raise what it raises.

    What is read passes between the processes as clear as all that they send.
    """
    if not several_processes(mesh):
        return read()
    first = jax.process_index() == 0
    found = together(mesh, lambda: read() if first else {})
    sizes = {name: None if x is None else len(x) for name, x in found.items()}
    known = json.loads(gathered(mesh, json.dumps(sizes))[0])
    total = sum(x or 0 for x in known.values())
    # In words: a broadcast is a sum, which widens bytes.
    content = b"".join(x or b"" for x in found.values())
    words = np.frombuffer(content.ljust(total + -total % 4, b"\0"), np.uint32)
    sent = multihost_utils.broadcast_one_to_all(words)  # Of others: zeros of its shape.
    whole, at = np.asarray(sent, np.uint32).tobytes(), 0
    result: dict[str, bytes | None] = {}
    for name, size in known.items():
        result[name] = None if size is None else whole[at : at + size]
        at += size or 0
    return result


def where_any(mesh: Mesh | None, stop: Callable[[], bool]) -> Callable[[], bool]:
    """Returns ``stop`` of any process: True in all where it is in one; all wait for all."""
    if not several_processes(mesh):
        return stop
    return lambda: bool(np.any(multihost_utils.process_allgather(np.uint8(stop()))))


def place(mesh: Mesh | None) -> Sharding:
    """Returns the sharding of a run's arrays: all devices of its mesh, or the default."""
    if mesh is None:
        return jnp.zeros(()).sharding
    return NamedSharding(mesh, PartitionSpec())


def on_all(mesh: Mesh | None, tree: Any) -> Any:
    """Copies arrays to every device of a mesh, unless they are there already."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())
    if everywhere.is_fully_addressable:
        return jax.device_put(tree, everywhere)

    def moves(leaf: Any) -> bool:
        return getattr(leaf, "sharding", None) != everywhere

    leaves, structure = jax.tree.flatten(tree)
    new = iter(_spread(everywhere)([x for x in leaves if moves(x)]))
    return structure.unflatten([next(new) if moves(x) else x for x in leaves])


@functools.cache
def _spread(everywhere: NamedSharding) -> Any:
    """Returns a program: nothing else copies keys to devices of other processes."""
    return jax.jit(lambda leaves: leaves, out_shardings=everywhere)


def here(tree: Any) -> Any:
    """Returns this process's own copy of arrays that every device has."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def lowered(mesh: Mesh | None, program: Callable[..., Any], *given: Any) -> Any:
    """Lowers a program of a run, on every device, for arguments; the first is donated."""
    if mesh is None:
        return jax.jit(program, donate_argnums=0).lower(*given)
    copied = PartitionSpec()
    # Not checked: losses may hold loops whose types the check would refuse. The releases
    # are sums over devices, and all that follows is computed from them alone.
    each = jax.shard_map(
        program, mesh=mesh, in_specs=copied, out_specs=copied, check_vma=False
    )
    everywhere = NamedSharding(mesh, copied)
    jitted = jax.jit(
        each, donate_argnums=0, in_shardings=everywhere, out_shardings=everywhere
    )
    return jitted.lower(*given)
