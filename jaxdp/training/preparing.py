"""Preparation of a run: checks of its arguments, its transformation, its program."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state, validate
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.source import Source
from jaxdp.core.types import PathPredicate, ValueFn
from jaxdp.kernels.sphere import path_str
from jaxdp.mechanism.plan import Plan
from jaxdp.sampling import batches
from jaxdp.training import (
    isolation,
    loop,
    parallel,
    replaying,
    resolution,
    streaming,
)

#: One object, by which a compiled program is found again.
_IDENTITY = optax.identity()


class Task(NamedTuple):
    """Arguments that ``fit`` and ``resume`` share."""

    plan: Plan
    params: Any
    data: Any
    value_fn: Any
    optimizer: Any  # an optax.GradientTransformation; None before it is checked
    microbatch_size: int | None
    mesh: Mesh | None
    trainable: Any
    stacked: Any

    @property
    def leaves(self) -> dict[str, Any]:
        """``trainable`` and ``stacked``, by name."""
        return {"trainable": self.trainable, "stacked": self.stacked}

    @property
    def unit(self) -> str:
        """Whose data neighbouring data sets differ in: ``"record"`` or ``"user"``."""
        return unit_of(self.data)


def unit_of(data: Any) -> str:
    """Returns ``"user"`` for records that are grouped by user, else ``"record"``."""
    data = data.like if isinstance(data, streaming.Stream) else data
    return batches.unit_of(data)


def checked(
    task: Task, callback: Any, *, streams: bool = True, streamed: bool | None = None
) -> Task:
    """Returns a task whose arguments are checked, with data that cannot change in place.

    A source becomes a ``streaming.Stream``, where the caller ``streams``. ``streamed``: of
    a run that goes on, whether it began with a source; None of a new run. It waits for no
    other process.
    """
    stream, data = None, task.data
    if not (streams and isinstance(data, Source)):
        batches.check_data(task.plan.run, data)
    whole = "" if streams else "a study has its data on the device"
    data = streaming.of_maps(data, task.plan, streamed, whole=whole)
    if isinstance(data, Source):
        stream = streaming.opened(data, task.plan)
    parallel.check_algorithm(task.mesh, task.plan, task.params)
    parallel.check_signs(task.mesh, task.plan, task.params)
    validate.is_callable(value_fn=task.value_fn)
    if task.microbatch_size is not None:
        validate.integer(microbatch_size=task.microbatch_size)
    if task.stacked is not None:
        validate.is_callable(stacked=task.stacked)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable or None, got {callback!r}")
    check_optimizer(task.plan, task.optimizer)
    optimizer = _IDENTITY if task.optimizer is None else task.optimizer

    if stream is not None:
        return task._replace(optimizer=optimizer, data=stream)

    def own(array: Any) -> jax.Array:
        if isinstance(array, jax.Array):
            return array
        # A copy, made now: JAX may share memory with NumPy, or copy it later.
        return jax.block_until_ready(jnp.array(batches.narrowed(array)))

    return task._replace(optimizer=optimizer, data=jax.tree.map(own, task.data))


def on_mesh(task: Task) -> Task:
    """Returns a checked task whose data are on every device; all processes wait here."""
    if isinstance(task.data, streaming.Stream):
        return task  # Its blocks will be.
    return task._replace(data=parallel.on_all(task.mesh, task.data))


def check_donated(params: Any, data: Any, mesh: Mesh | None, keys: Any = None) -> None:
    """Requires parameters whose buffers a run can take and update in place.

    TypeError for a leaf that is no ``jax.Array``; ValueError for one that is on another
    device, is deleted, or shares its buffer with another leaf or with the data.
    """
    place, split = parallel.place(mesh, params, data, keys), parallel.split(params)
    arrays = [x for x in jax.tree.leaves(data) if isinstance(x, jax.Array)]
    buffers = {loop.buffer_of(x) for x in arrays if not x.is_deleted()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        named = f"donate_params must be for what fit can take, got {path_str(path)!r}"
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"{named} as a {type(leaf).__name__}: jax.device_put makes it an array"
            )
        if leaf.is_deleted():
            raise ValueError(f"{named}, which is deleted: a run took it already")
        if path not in split and not leaf.sharding.is_equivalent_to(place, leaf.ndim):
            raise ValueError(
                f"{named} on {leaf.sharding}, where the run needs it on {place}: "
                "jax.device_put(params, that), or donate_params=False, which copies them"
            )
        buffer = loop.buffer_of(leaf)
        if buffer in buffers:
            raise ValueError(
                f"{named} in the buffer of another leaf or of the data: copy it"
            )
        buffers.add(buffer)


def check_reads_losses(plan: Plan) -> None:
    """Requires a plan that makes its updates itself, from losses of records."""
    if plan.takes_updates:
        raise ValueError(
            f"plan must be one whose transformation reads losses, got "
            f"{type(plan).__name__}, which noises updates that are made elsewhere: put "
            "jaxdp.private_prefix_sum into a chain"
        )


def check_optimizer(plan: Plan, optimizer: Any) -> None:
    """Requires an optimizer for plans whose updates are gradients, and None for others."""
    if optimizer is None:
        if plan.makes_steps or plan.runs_algorithm:
            return
        raise ValueError(
            f"optimizer must be given for {plan.family}, whose updates are gradients: "
            "optax.sgd(0.1), or another that goes down; got None, which would add them "
            "as they are and climb"
        )
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "optimizer must be an optax.GradientTransformation, got "
            f"{validate.shown(optimizer)}"
        )
    if plan.makes_steps:
        raise ValueError(
            f"optimizer must be None for {plan.family}, which makes the steps itself, got "
            f"{optimizer!r}"
        )


@dataclasses.dataclass(eq=False)
class Compiled:
    """Compiled program of a task, which equal tasks share as long as it is kept.

    Attributes:
      program: as XLA has it.
      mesh: of its arguments.
      device: to which arguments without a mesh are committed, if they are.
      text: of the program, if asked for; else "".
      check: of the loss that is in it, for parameters; None where none was asked for.
      refused: whether :func:`check_losses` refused the loss.
    """

    program: Any
    mesh: Mesh | None
    device: Any
    text: str
    check: Callable[[Any], None] | None = None
    refused: bool = False

    def run(self, *given: Any) -> Any:
        """Runs the program on arguments, which are placed on the mesh.

        What it gives is committed where arguments were: another computation stays there.
        """
        return self.kept(self.program(*parallel.placed(self.mesh, *given)))

    def kept(self, made: Any) -> Any:
        """Commits what a run has where its arguments were committed, if they were."""
        return made if self.device is None else jax.device_put(made, self.device)


def check_losses(
    plan: Plan,
    params: Any,
    data: Any,
    value_fn: ValueFn,
    check_isolation: bool,
    program: Compiled | None = None,
) -> None:
    """Checks that no loss depends on others' records, if a plan evaluates whole batches.

    That of a ``program`` is the loss as it was when the program was traced: it may have
    changed since, as that of a module that is in another mode now.
    """
    if not (check_isolation and plan.evaluates_batches):
        return
    params, place = _spread(params)
    if program is None or program.check is None:
        _made_up_check(value_fn, params, data, place)(params)
        return
    try:
        program.check(params)
    except ValueError:
        program.refused = True
        raise


def _made_up_check(
    value_fn: ValueFn,
    params: Any,
    data: Any,
    place: Any,
    moves: PathPredicate | None = None,
) -> Callable[[Any], None]:
    data = data.like if isinstance(data, streaming.Stream) else data
    shapes = jax.eval_shape(lambda data: data, data)
    return isolation.made_up_check(value_fn, params, shapes, place, moves)


def _spread(params: Any) -> tuple[Any, Any]:
    """Returns parameters where losses are checked, and where these come to."""
    params = jax.tree.map(jnp.asarray, params)
    mesh, place = parallel.mesh_of(params), None
    if mesh is not None:  # Where they are split, and the others with them.
        place = parallel.place(mesh)
        params = parallel.moved(params, parallel.shardings(mesh, params, params))
    else:  # No program of several devices or processes.
        params = parallel.here(params)
    return params, place


def make_transform(task: Task, keys: keys_lib.Keys) -> Any:
    """Returns the plan's transformation or algorithm, with the options of the run."""
    if task.plan.runs_algorithm:
        return _algorithm(task, keys)
    check_reads_losses(task.plan)
    options = maker_options(task)
    size = run_state.size(task.params, run_state.moving(task.params, task.trainable))
    if getattr(task.plan, "direction", None) == "orthonormal":
        _warn_of_rows(task, size)
    resolution.warn_if_unresolved(
        task.plan.perturbation(size),
        task.params,
        trainable=task.trainable,
        stacklevel=3,
    )
    if task.plan.makes_steps:
        plan: Any = task.plan  # Whose steps have a longest one.
        resolution.warn_if_scattered(
            plan.max_step, task.params, trainable=task.trainable, stacklevel=3
        )
    return task.plan.transform(keys, **options)


def maker_options(task: Task) -> dict[str, Any]:
    """Returns the options of the plan's ``transform``; only shapes of params are read."""
    options = {"trainable": task.trainable, "microbatch_size": task.microbatch_size}
    parallel.check_layers(task.params, task.stacked)
    axes = parallel.record_axes(task.mesh, task.params)
    places = parallel.split(task.params)
    if task.plan.sums_vectors and places:
        options["shardings"] = jax.tree_util.tree_map_with_path(
            lambda path, _: places.get(path), task.params
        )
        # XLA's partitioner refuses to sum split arrays along an axis of a single device.
        mesh: Any = task.mesh
        axes = tuple(name for name in axes if mesh.shape[name] > 1)
    if axes:
        options["axis_name"] = axes
    if task.stacked is not None:
        if not task.plan.draws_directions:
            raise ValueError(
                f"stacked must be None for {task.plan.family}, which draws no directions, "
                f"got {task.stacked!r}"
            )
        options["stacked"] = task.stacked
    return options


def _warn_of_rows(task: Task, dim: int) -> None:
    """Warns of orthonormal directions where parameters are split: they are not."""
    if not parallel.split(task.params):
        return
    plan: Any = task.plan
    mebibytes = 4 * plan.num_directions * dim / 2**20
    warnings.warn(
        f"direction='orthonormal' makes one matrix of {plan.num_directions} x {dim} "
        f"numbers, which every device holds whole ({mebibytes:.3g} MiB), though params are "
        "split over the mesh; those of direction='sphere' are made where the params are",
        stacklevel=4,
    )


def _algorithm(task: Task, keys: keys_lib.Keys) -> Algorithm:
    """Returns the algorithm of a plan that owns its iterates."""
    unused = ["trainable", "stacked"]
    if not task.plan.differentiates:
        unused.append("microbatch_size")
    for name in unused:
        if getattr(task, name) is not None:
            raise ValueError(
                f"{name} must be None for {task.plan.family}, which has no use for it, "
                f"got {getattr(task, name)!r}"
            )
    axes = parallel.record_axes(task.mesh, task.params) or None
    algorithm = task.plan.algorithm(
        keys, microbatch_size=task.microbatch_size, axis_name=axes
    )
    with keys_lib.shapes_only():
        jax.eval_shape(algorithm.init, task.params)  # Raises if params do not fit.
    return algorithm


def compiled(
    task: Task,
    transform: Any,
    keys: keys_lib.Keys,
    chunk: int | None,
    with_text: bool,
    check_isolation: bool,
) -> tuple[Compiled, float]:
    """Returns the compiled program of a task, and the seconds its compilation took now.

    It may be that of an earlier run, with the loss as it was then. It is none whose loss
    was refused, nor where losses are to be checked one that has no check: the loss is
    another one now, perhaps. ``chunk`` is the steps of a chunk, None for one program of the
    whole run.
    """
    plan, optimizer, mesh, data = task.plan, task.optimizer, task.mesh, task.data
    batch_fn = None
    if isinstance(data, streaming.Stream):
        assert chunk is not None
        batch_fn, data = streaming.batch, streaming.shapes(plan, data, keys, chunk)
    if with_text and getattr(jax.config, "jax_use_simplified_jaxpr_constants", False):
        raise ValueError(
            "jax_use_simplified_jaxpr_constants must be off where programs are compared, "
            "as for a ledger: what value_fn closes over would be no part of their text"
        )

    def build() -> Compiled:
        made = lowered(task, transform, keys, chunk, data, batch_fn)
        options = loop.compiler_options(device.platform)
        text = made.as_text() if with_text else ""
        check = None
        if needed:  # Traced now, as the program was.
            params, place = _spread(task.params)
            moves = run_state.moving(params, task.trainable)
            check = _made_up_check(task.value_fn, params, task.data, place, moves)
        made = made.compile(compiler_options=options)
        return Compiled(made, mesh, committed, text, check)

    leaves = replaying.chosen_leaves(task.params, **task.leaves)
    shapes = loop.signature((jax.tree.map(jnp.asarray, task.params), keys, data))
    given = task.params, keys, task.data
    committed = None if mesh is not None else parallel.committed(*given)
    device = parallel.device_of(mesh, *given)
    how = (task.microbatch_size, mesh, committed, device, chunk is None, with_text)
    # What its state holds beside arrays may have changed, where it is the same object.
    state = jax.tree.structure(outline(task, transform))
    key = (plan.digest, task.value_fn, optimizer, *leaves, *how, shapes, state)
    needed = check_isolation and plan.evaluates_batches

    def usable(kept: Compiled) -> bool:
        return not kept.refused and (kept.check is not None or not needed)

    return loop.compiled(key, build, usable)


def lowered(
    task: Task,
    transform: Any,
    keys: keys_lib.Keys,
    chunk: int | None = None,
    data: Any = None,
    batch_fn: Any = None,
) -> Any:
    """Lowers a task's program from shapes alone, so that no mistake here spends the keys.

    ``data`` are the task's, or given with the ``batch_fn`` that makes batches of them.
    """
    plan, optimizer, mesh = task.plan, task.optimizer, task.mesh
    data = task.data if data is None else data
    replay = None
    if plan.replayable:  # Its update reads the key of directions from the state.
        replay = plan.replay(keys.direction, **task.leaves)
    value_fn = task.value_fn
    if plan.evaluates_batches:  # So is the loss that is checked.
        value_fn = isolation.traced_anew(value_fn)
    program = loop.make_program(
        plan, transform, optimizer, value_fn, replay, batch_fn, task.trainable
    )
    carry = outline(task, transform)
    given: Any = (keys, data)
    if chunk is None:
        whole = lambda c, k, d: program(c, k, d, 0, plan.num_steps)  # noqa: E731
    else:
        whole, step = program, jax.ShapeDtypeStruct((), jnp.int32)
        given += step, step
    if mesh is not None:
        return parallel.lowered(mesh, whole, carry, *given)
    device = parallel.device_of(None, task.params, *given)
    # By shapes, whose text is the same on every device: another may resume the run.
    with jax.default_device(device):
        given = jax.eval_shape(lambda *given: given, *given)
        return parallel.lowered(None, whole, carry, *given)


def outline(task: Task, transform: Any) -> loop.Carry:
    """Returns the shapes of the carry of a run, and on a mesh where they are."""

    def start(params: Any) -> loop.Carry:
        return loop.start(task.plan, transform, task.optimizer, params)

    with keys_lib.shapes_only():
        carry = jax.eval_shape(start, task.params)
    if task.mesh is None:
        return carry
    places = parallel.shardings(task.mesh, task.params, carry)
    return jax.tree.map(_at, carry, places)


def _at(shape: jax.ShapeDtypeStruct, place: Any) -> jax.ShapeDtypeStruct:
    return shape.update(sharding=place)
