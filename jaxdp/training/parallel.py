"""Meshes: devices that share the records of a batch, and devices that share parameters.

The whole loop runs on every device of a mesh, on the same keys and data. Along an axis that
no parameter names, each device evaluates its part of a batch; what passes between them is
the sum of integers of the oracle, once a step. Along the axis ``finite_difference.SIGNS``
two devices evaluate the two signs of the same records, and their losses pass between them.
All draw the same directions and add the same noise to the same sum, so their parameters
stay the same bits, and nothing is sent to keep them so.

Axes that occur in the ``PartitionSpec`` of a parameter are model axes. They are left to
XLA's partitioner, for which the loop is one program on whole arrays: what a record
contributes is bounded and rounded as on one device, and only the losses' own sums are added
in another order. Parameters, and what has their paths and shapes in the optimizer's state,
keep their shardings from step to step.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from jaxdp.core import keys as keys_lib
from jaxdp.kernels import finite_difference
from jaxdp.kernels.sphere import path_str
from jaxdp.mechanism.plan import Plan
from jaxdp.training import digests

T = TypeVar("T")

#: Words that a process sends to the others at once: 256 MiB.
_PIECE = 2**26


class Refused(ValueError):
    """Refusal of another process of the run."""


def refuse_set_mesh() -> None:
    """Raises ValueError within ``jax.set_mesh`` of explicit axes: all arrays have them."""
    around = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Explicit in around.axis_types:
        raise ValueError(
            "mesh must be given by mesh= alone, got the explicit mesh "
            f"{dict(around.shape)} of jax.set_mesh: call jaxdp in `with "
            "jax.set_mesh(None):`"
        )


def check_mesh(mesh: Any, params: Any) -> tuple[Mesh | None, Any]:
    """Returns the mesh of a run that starts at ``params``, and the params on it.

    All axes of that mesh are of the type Auto, whatever those of ``mesh`` are, and leaves
    that are split over ``mesh`` are split over it in place. Other leaves stay as they are.
    Of several processes all refuse what one does.
    """
    if mesh is None:
        refuse_set_mesh()
        _check_integers(mesh, params)
        check_device(mesh, params=params)
        return None, params
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
    return together(mesh, lambda: _on_mesh(mesh, params))


def takes_four_bits(devices: Any) -> bool:
    """Returns False for CPUs, where JAX's compiled programs refuse numbers of 4 bits.

    Program and arrays name other layouts, in jax 0.10.
    """
    return all(device.platform != "cpu" for device in devices)


def _check_integers(mesh: Any, params: Any) -> None:
    for path, leaf in _arrays(params):
        if leaf.dtype not in (jnp.int4, jnp.uint4):
            continue
        devices = mesh.devices.flat if isinstance(mesh, Mesh) else leaf.devices()
        if (leaf.committed or mesh is not None) and not takes_four_bits(devices):
            raise ValueError(
                "params must have 8 bits or more on a mesh of CPUs, or where they are put "
                f"onto one, got {leaf.dtype} for the leaf {path_str(path)!r}: JAX's "
                "compiled programs refuse it"
            )


def _on_mesh(mesh: Mesh, params: Any) -> tuple[Mesh, Any]:
    refuse_set_mesh()
    _check_integers(mesh, params)
    for path, leaf in _arrays(params):
        there = leaf.sharding
        if several_processes(mesh) and leaf.is_deleted():
            # Others would wait for its part of what they compute together.
            raise ValueError(
                f"params must be there, got the leaf {path_str(path)!r}, which has been "
                "deleted"
            )
        if not (_same_devices(there, mesh) or there.is_fully_replicated):
            raise ValueError(
                f"params must be on the mesh {dict(mesh.shape)} that was given, or each "
                f"leaf whole on one device, got the leaf {path_str(path)!r} on {there}: "
                "mesh= its own, or jax.device_put(params, shardings on this one)"
            )
    automatic = Mesh(mesh.devices, mesh.axis_names)

    def on_it(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not _same_devices(leaf.sharding, mesh):
            return leaf
        place = NamedSharding(automatic, leaf.sharding.spec)
        return leaf if leaf.sharding == place else jax.device_put(leaf, place)

    return automatic, jax.tree.map(on_it, params)


def _arrays(tree: Any) -> list[tuple[Any, jax.Array]]:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return [(path, leaf) for path, leaf in named if isinstance(leaf, jax.Array)]


def check_device(mesh: Mesh | None, **named: Any) -> None:
    """Requires arrays that are committed to one device at most, where there is no mesh."""
    if mesh is not None:
        return
    first: tuple[str, Any] | None = None
    for name, tree in named.items():
        for path, leaf in _arrays(tree):
            got = f"got the leaf {path_str(path)!r} on"
            if len(leaf.sharding.device_set) > 1:
                raise ValueError(
                    f"mesh must be given where {name} are on several devices, {got} "
                    f"{leaf.sharding}: mesh= that mesh; or bring them to the host: "
                    f"jax.device_get({name})"
                )
            if not leaf.committed:
                continue
            first = first or (name, leaf.device)
            if leaf.device != first[1]:
                raise ValueError(
                    f"{name} must be on {first[1]}, where leaves of {first[0]} are, {got} "
                    f"{leaf.device}: jax.device_put brings all to one device"
                )


def _same_devices(sharding: Sharding, mesh: Mesh) -> TypeGuard[NamedSharding]:
    """Returns True for a sharding over this mesh, whatever the types of the axes."""
    if not isinstance(sharding, NamedSharding):
        return False
    other: Any = sharding.mesh
    names = other.axis_names == mesh.axis_names
    return names and np.array_equal(other.devices, mesh.devices)


def split(params: Any) -> dict[Any, NamedSharding]:
    """Returns the shardings of leaves whose ``PartitionSpec`` names an axis, by path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and _axes(sharding):
            found[path] = sharding
    return found


def _axes(sharding: NamedSharding) -> set[str]:
    parts = ((x,) if isinstance(x, str) else x for x in sharding.spec if x is not None)
    return {name for part in parts for name in part}


def mesh_of(params: Any) -> Mesh | None:
    """Returns the mesh over which parameters are split, None if none of them is."""
    meshes: Any = (sharding.mesh for sharding in split(params).values())
    return next(meshes, None)


def record_axes(mesh: Mesh | None, params: Any) -> tuple[str, ...]:
    """Returns the axes of a mesh that split no parameter: they share records, or signs."""
    if mesh is None:
        return ()
    taken = set().union(*map(_axes, split(params).values()))
    return tuple(name for name in mesh.axis_names if name not in taken)


def check_layers(params: Any, stacked: Callable[[str], bool] | None) -> None:
    """Requires leaves of layers that are whole along the layers.

    A scan over them takes one layer after the other, which would be on few of the devices:
    XLA would bring all layers to all of them.
    """
    for path, sharding in split(params).items():
        name = path_str(path)
        if stacked is not None and stacked(name) and sharding.spec[0] is not None:
            raise ValueError(
                "params must not be split along the layers of a stacked leaf, got "
                f"{name!r} with {sharding.spec}: split another axis of it"
            )


def check_algorithm(mesh: Mesh | None, plan: Plan, params: Any) -> None:
    """Requires a mesh whose devices can share what a plan's algorithm, if any, reads.

    What the next step reads may follow from a float. Devices that round otherwise would
    read other records, and one of them twice; so all are alike, in one process.
    """
    if mesh is None or not plan.runs_algorithm:
        return
    if not plan.differentiates:
        raise ValueError(
            f"mesh must be None for {plan.family}, which reads every record once, in its "
            "first step: later ones have no records that devices could share"
        )
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    if several_processes(mesh) or len(kinds) > 1:
        raise ValueError(
            f"mesh must have devices of one kind in one process for {plan.family}, because "
            "others may round otherwise, and then read other records; got "
            f"{', '.join(kinds)} in {jax.process_count()} processes"
        )
    for path, sharding in split(params).items():
        raise ValueError(
            f"params must be whole on every device for {plan.family}, got the leaf "
            f"{path_str(path)!r} with {sharding.spec}: every device holds all records, of "
            "which shards would save none; share the records alone"
        )


def check_signs(mesh: Mesh | None, plan: Plan, params: Any) -> None:
    """Requires slopes of two signs, and two devices, where a mesh shares signs."""
    signs = finite_difference.SIGNS
    if mesh is None or signs not in mesh.axis_names:
        return
    if signs not in record_axes(mesh, params):
        raise ValueError(
            f"params must not be split along {signs!r}, whose devices evaluate the two "
            "signs of a slope: split them along an axis of another name"
        )
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
        if mesh_of(x) is not None:  # It may be whole in no process.
            x = digests.on_devices(x)
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

    So none waits for one that has refused. Where ``call`` itself waits for other processes,
    as one that gathers split parameters, none may raise before the last such wait.

    Raises:
      Refused: another process raised, whatever it was; in that process, what it raised.
    """
    if not several_processes(mesh):
        return call()
    result, error = None, None
    try:
        result = call()
    except BaseException as caught:  # Ctrl-C too: the others are told first.
        error = caught
    said = "" if error is None else _said(error)
    every = gathered(mesh, said)
    if error is not None:
        raise error
    for index, said in enumerate(every):
        if said:
            raise Refused(f"process {index} of the run refused: {said}")
    return cast(T, result)


def _said(error: BaseException) -> str:
    """Returns what an error says, its type where it says nothing or cannot."""
    try:
        return str(error) or repr(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def gathered(mesh: Mesh | None, text: str) -> list[str]:
    """Returns the texts of all processes, in their order; all wait here."""
    if not several_processes(mesh):
        return [text]
    # A file's name in a message may be no Unicode.
    content = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
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
    # In pieces, which pass through the devices' memory. Of others: zeros of its shape.
    sent = [
        multihost_utils.broadcast_one_to_all(words[first : first + _PIECE])
        for first in range(0, len(words), _PIECE)
    ]
    whole, at = b"".join(np.asarray(x, np.uint32).tobytes() for x in sent), 0
    result: dict[str, bytes | None] = {}
    for name, size in known.items():
        result[name] = None if size is None else whole[at : at + size]
        at += size or 0
    return result


def where_any(mesh: Mesh | None, stop: Callable[[], bool]) -> Callable[[], bool]:
    """Returns ``stop`` of any process: True in all where it is in one; all wait for all."""
    if not several_processes(mesh):
        return stop

    def anywhere() -> bool:
        here = together(mesh, lambda: bool(stop()))
        return bool(np.any(multihost_utils.process_allgather(np.uint8(here))))

    return anywhere


def place(mesh: Mesh | None, *given: Any) -> Sharding:
    """Returns the sharding of a run's arrays: all devices of its mesh, or its device."""
    if mesh is None:
        return SingleDeviceSharding(device_of(None, *given))
    return NamedSharding(mesh, PartitionSpec())


def device_of(mesh: Mesh | None, *given: Any) -> Any:
    """Returns this process's first device of a run: without a mesh, its arguments'.

    Where none of these is committed to a device, it is the default one.
    """
    if mesh is not None:
        return mesh.local_devices[0]
    return committed(*given) or jnp.zeros(()).device


def committed(*given: Any) -> Any:
    """Returns the device to which arrays are committed (:func:`check_device`), or None."""
    found = (leaf.device for _, leaf in _arrays(given) if leaf.committed)
    return next(found, None)


def layout(params: Any) -> dict[str, str]:
    """Returns how leaves are split, by path."""
    places = split(params).items()
    return {path_str(path): str(sharding.spec) for path, sharding in places}


def check_ledger(mesh: Mesh | None, ledger: Any) -> None:
    """Requires a ledger in process 0, which writes it, if in any; all wait here."""
    first, *others = gathered(mesh, "" if ledger is None else "given")
    if not first and any(others):
        raise ValueError(
            "ledger must be given in process 0, which writes it, got it in others alone"
        )


def check_layout(mesh: Mesh | None, params: Any) -> None:
    """Requires parameters that are split alike in all processes of a run; all wait here.

    Else only some of them would take part in what split parameters need all for.
    """
    if len(set(gathered(mesh, json.dumps(layout(params))))) > 1:
        raise ValueError(
            "params must be split alike in all processes of the mesh, got "
            f"{layout(params) or 'whole ones'} here"
        )


def on_all(mesh: Mesh | None, tree: Any) -> Any:
    """Copies arrays to every device of a mesh, unless they are there already."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())
    return moved(tree, jax.tree.map(lambda _: everywhere, tree))


def moved(tree: Any, places: Any) -> Any:
    """Brings arrays to their places, unless they are there already."""
    leaves, structure = jax.tree.flatten(tree)
    wanted = structure.flatten_up_to(places)
    if all(place.is_fully_addressable for place in wanted):
        return jax.device_put(tree, places)
    pairs = list(zip(leaves, wanted, strict=True))
    away = [i for i, (x, p) in enumerate(pairs) if getattr(x, "sharding", None) != p]
    spread = _spread(tuple(wanted[i] for i in away))
    new = dict(zip(away, spread([leaves[i] for i in away]), strict=True))
    return structure.unflatten(new.get(i, x) for i, x in enumerate(leaves))


def on_host(leaf: Any) -> np.ndarray:
    """Brings an array to the host, whole.

    An array that is split between processes is copied to each: all of them call this.
    """
    if digests.scattered(leaf):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


@functools.cache
def _spread(places: tuple[NamedSharding, ...]) -> Any:
    """Returns a program: nothing else copies keys to devices of other processes."""
    return jax.jit(lambda leaves: leaves, out_shardings=list(places))


def shardings(mesh: Mesh, params: Any, tree: Any) -> Any:
    """Returns where the leaves of a tree of a run are, from where its ``params`` are.

    A leaf whose path ends in that of a parameter, and which has its shape, is where that
    parameter is: moments and averages. So is one with an axis more in front, or a name more
    at the end: rows of noise, and words of its numbers. All others are on every device.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    known = split(params)
    named = jax.tree_util.tree_leaves_with_path(params)
    shapes = {path: np.shape(leaf) for path, leaf in named}

    def place(path: Any, leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        ends = (end for end in (len(path), len(path) - 1) if end >= 0)
        for name in (path[begin:end] for end in ends for begin in range(end + 1)):
            if name not in known:
                continue
            if shapes[name] == shape:
                return known[name]
            if shapes[name] == shape[1:]:
                return NamedSharding(mesh, PartitionSpec(None, *known[name].spec))
        return everywhere

    return jax.tree_util.tree_map_with_path(place, tree)


def placed(mesh: Mesh | None, carry: Any, *given: Any) -> tuple[Any, ...]:
    """Returns the arguments of a program that :func:`lowered` gave, where it takes them."""
    if mesh is None:
        return carry, *given
    return moved(carry, shardings(mesh, carry.params, carry)), *on_all(mesh, given)


def here(tree: Any) -> Any:
    """Returns this process's own copy of arrays, all on their mesh where one is split."""
    if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
        return tree  # One program can take them all.
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def lowered(
    mesh: Mesh | None, program: Callable[..., Any], carry: Any, *given: Any
) -> Any:
    """Lowers a program of a run, on every device, for its carry and other arguments.

    The carry is donated. The shardings of its ``params`` say which axes are the model's.
    """
    if mesh is None:
        return jax.jit(program, donate_argnums=0).lower(carry, *given)
    copied = PartitionSpec()
    axes = record_axes(mesh, carry.params)
    if axes:
        # Not checked: losses may hold loops whose types the check would refuse. The
        # releases are sums over devices, and all that follows is computed from them alone.
        program = jax.shard_map(
            program,
            mesh=mesh,
            axis_names=set(axes),
            in_specs=copied,
            out_specs=copied,
            check_vma=False,
        )
    places = shardings(mesh, carry.params, carry)
    everywhere = NamedSharding(mesh, copied)
    jitted = jax.jit(
        program,
        donate_argnums=0,
        in_shardings=(places, *(everywhere for _ in given)),
        out_shardings=places,
    )
    return jitted.lower(carry, *given)
