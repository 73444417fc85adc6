"""``--mesh`` and ``--distributed``: devices and processes that run one command together.

Process 0 has the folder of the run. The others have a folder of their own for as long as
they run, with the public files of a run that goes on, so that no file system is shared.
"""

import contextlib
import dataclasses
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.cli import meeting, options, record
from jaxdp.cli.parsing import UsageError, flag, usage
from jaxdp.cli.prepare import check_folder
from jaxdp.core import keys as keys_lib
from jaxdp.kernels.finite_difference import SIGNS
from jaxdp.kernels.sphere import path_str
from jaxdp.mechanism.plan import Plan
from jaxdp.training import ledger, parallel

T = TypeVar("T")

#: Axis of a mesh along which the parameters of a language model are split.
MODEL = "model"
#: Seconds that a process waits for the others.
_PATIENCE = 300
#: Public files by which a command goes on with a run.
_SHARED = (ledger.LEDGER, ledger.PLAN, record.INITIAL, record.SCHEMA)


@contextlib.contextmanager
def joined(
    command: record.Command, out: pathlib.Path
) -> Iterator[tuple[record.Command, pathlib.Path, bool]]:
    """Joins the processes of a run; gives the command, its folder, whether it is the run's.

    Raises UsageError in all processes where the first refuses the folder.
    """
    if command.distributed:
        _join(command.distributed)
    mesh = mesh_of(command)
    four = getattr(command, "quantised", None) == "int4"
    if four and mesh is not None and not parallel.takes_four_bits(mesh.devices.flat):
        raise UsageError(
            "--quantised must be int8 with --mesh or --distributed on CPUs, got int4: "
            "JAX's compiled programs refuse it there"
        )
    if not parallel.several_processes(mesh):
        yield command, out, True
        return

    def read() -> dict[str, bytes | None]:
        if not command.resume or not (out / ledger.LEDGER).exists():
            if command.resume is not True:
                check_folder(out, command.overwrite)
            return {}
        with usage(command, "--resume"):
            ledger.verify(out)
        paths = (out / name for name in _SHARED)
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    try:
        files = parallel.from_first(mesh, read)
    except ValueError as error:  # Of process 0.
        raise UsageError(str(error)) from None
    if parallel.writes(mesh):
        yield command, out, True
        return
    with tempfile.TemporaryDirectory() as home:
        for name, content in files.items():
            (pathlib.Path(home) / name).write_bytes(content or b"")
        given = command.given
        quiet = {"quiet": True, "json": False, "overwrite": False}
        command = dataclasses.replace(command, out=pathlib.Path(home), **quiet)
        vars(command)["given"] = given
        yield command, pathlib.Path(home), False


def agreed(command: options.Run, call: Callable[[], T]) -> T:
    """Returns what ``call`` returns; where one process refuses, all end with its words."""
    try:
        return parallel.together(mesh_of(command), call)
    except parallel.Refused as error:
        raise UsageError(str(error)) from None


def check_alike(
    command: options.Finetune, keys: keys_lib.Keys, **arguments: Any
) -> None:
    """Requires equal keys, options and arguments in all processes; all wait here.

    Processes with a split model compute together before ``fit`` compares its arguments.
    The same file may have another name in each.
    """
    own = {*command.free, "model", "train", "eval", "timings", "keep_noise_roots"}
    given = {n: x for n, x in dataclasses.asdict(command).items() if n not in own}
    try:
        parallel.check_same(mesh_of(command), keys, options=repr(given), **arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _join(where: bool | tuple[str, int, int]) -> None:
    """Waits for the other processes of ``jax.distributed``."""
    given, who = {}, "a process"
    if isinstance(where, tuple):
        address, index, count = where
        if not 0 <= index < count:
            raise UsageError(
                f"--distributed must have an index from 0 to {count - 1}, got {index}"
            )
        given = {"coordinator_address": address, "process_id": index}
        given |= {"num_processes": count}
        who = f"process {index} of {count}"
    # Where JAX finds the others it does not say who is missing: it is who is silent here.
    line = f"jaxdp: {who} waits at most {_PATIENCE} s for the others"
    print(line, file=sys.stderr, flush=True)
    if isinstance(where, tuple):
        meeting.meet(*where, _PATIENCE)
    # JAX would take SIGTERM, and nobody would hear of it until the run begins.
    with contextlib.suppress(AttributeError):  # Of other versions of JAX.
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**given, initialization_timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            "--distributed must be given as HOST:PORT,INDEX,COUNT where JAX knows no "
            f"cluster: {error}"
        ) from error


def mesh_of(command: options.Run) -> Mesh | None:
    """Returns the mesh of a command: of ``--mesh``, or of all of several processes."""
    devices, sizes = jax.devices(), command.mesh
    if sizes is None:
        if jax.process_count() == 1:
            return None
        sizes = {"data": len(devices)}
    known = ["data", SIGNS, *([MODEL] if command.command == "finetune" else [])]
    wrong = [name for name in sizes if name not in known]
    if wrong:
        raise UsageError(
            f"--mesh must have axes of {', '.join(known)}, got {wrong[0]!r}"
        )
    total, several = math.prod(sizes.values()), jax.process_count() > 1
    if total > len(devices) or (several and total != len(devices)):
        text = ",".join(f"{name}={size}" for name, size in sizes.items())
        of = f" of {jax.process_count()} processes" if several else ""
        raise UsageError(
            f"--mesh must fit the {len(devices)} devices{of} that JAX has, got {text}, "
            f"which are {total}"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices[:total])


def check_plan(command: options.Run, plan: Plan) -> None:
    """Requires a plan that can run, and be recorded, on the command's mesh, if any."""
    mesh = mesh_of(command)
    with usage(command, flag("mesh")):
        parallel.check_algorithm(mesh, plan, ())
        parallel.check_signs(mesh, plan, ())  # Params are on one device yet.


def placing(
    command: options.Run, whole: Callable[[str], bool] | None = None
) -> Callable[[Any], Any] | None:
    """Returns what says where a language model's parameters are; None for one device.

    A function of parameters, or their shapes, to the tree of their shardings. ``whole`` is
    True for the paths of leaves that are replicated; None splits all that can be.
    """
    mesh = mesh_of(command)
    if mesh is None or MODEL not in mesh.axis_names:
        return None
    from jaxdp.models import language  # With flax.

    of = Mesh(mesh.devices, mesh.axis_names)  # As fit takes it.

    def places(params: Any) -> Any:
        with usage(command, flag("mesh")):
            found = language.shardings(params, of, axis=MODEL)
        replicated = whole
        if replicated is None:
            return found
        everywhere = NamedSharding(of, PartitionSpec())
        return jax.tree_util.tree_map_with_path(
            lambda path, place: everywhere if replicated(path_str(path)) else place,
            found,
        )

    return places
