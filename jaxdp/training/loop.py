"""The compiled loop over a plan's steps.

A run is one compiled program, sampling included. With callbacks or a ledger the same
steps run in compiled chunks, to the same bits.
"""

import dataclasses
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jaxdp import accounting, sampling
from jaxdp.core import averaging, display, precision, run_state
from jaxdp.core import keys as keys_lib
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.precision import widened
from jaxdp.core.types import Phase, ValueFn
from jaxdp.kernels.sphere import path_str
from jaxdp.kernels.stochastic_rounding import is_narrow
from jaxdp.mechanism.plan import Plan
from jaxdp.training import reporting

_MAX_PROGRAMS = 64
_programs: "OrderedDict[Any, Any]" = OrderedDict()
_programs_lock = threading.Lock()


class FitInfo(NamedTuple):
    """Releases of each step, and the optimizer's state without secrets. Public.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> result = jaxdp.fit(
      ...     plan, jaxdp.Keys.insecure(0), jnp.zeros(2), jnp.ones((8, 2)),
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1), optimizer=optax.sgd(0.1),
      ... )
      >>> result.info.releases.shape
      (3, 1)
    """

    releases: jax.Array  # shape=(num_steps, K), dtype=float32
    state: Any  # of ``optimizer``, secret fields None: jaxdp.polyak_output reads it

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        return display.Table("FitInfo", info_rows(self))


class CallbackInfo(FitInfo):
    """:class:`FitInfo` for a callback, with what the run has spent so far. Public.

    Attributes:
      plan: of the run.
      charged: steps that count as released, those of lost chunks and attempts among them;
        at a step that ``resume`` replays, as many as when the run came there.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> def show(step, params, info):
      ...     print(step, info.charged, round(info.epsilon(delta=1e-5), 2))
      >>> result = jaxdp.fit(
      ...     plan, jaxdp.Keys.insecure(0), jnp.zeros(2), jnp.ones((8, 2)),
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1), optimizer=optax.sgd(0.1),
      ...     callback=show, chunk=1,
      ... )
      1 1 1.99
      2 2 2.94
      3 3 3.71
    """

    plan: Plan
    charged: int

    def __new__(cls, releases: Any, state: Any, plan: Plan, charged: int) -> Self:
        """Makes the tuple ``(releases, state)`` with two attributes."""
        made = super().__new__(cls, releases, state)
        made.plan, made.charged = plan, charged
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Returns what copies are made of."""
        return *self, self.plan, self.charged

    def _replace(self, **fields: Any) -> Self:
        return type(self)(*FitInfo(*self)._replace(**fields), self.plan, self.charged)

    def epsilon(self, delta: float | None = None) -> accounting.Epsilon:
        """Computes the epsilon of all steps that are charged so far.

        Closed forms cost nothing; for sampled plans it may take a second: nothing is
        computed before it is asked for.

        Privacy:
          What ``plan.spent`` says holds: a run that is stopped because of its own releases
          has spent the epsilon of the whole plan.

        Args:
          delta: at which delta; by default the plan's.

        Returns:
          A float that names its accountant.

        Raises:
          ValueError: no delta, here or in the plan.
        """
        plan: Any = self.plan  # A dataclass, whatever its family.
        delta = plan.delta if delta is None else delta
        if delta is None:
            raise ValueError("delta must be given where the plan has none, got None")
        return dataclasses.replace(plan, delta=delta).spent(self.charged)


def _joined(more: tuple[Plan, int], leaves: Any) -> CallbackInfo:
    releases, state = leaves
    return CallbackInfo(releases, state, *more)


jax.tree_util.register_pytree_node(
    CallbackInfo, lambda info: (tuple(info), (info.plan, info.charged)), _joined
)


class FitResult(NamedTuple):
    """Result of ``fit``. Public, except for the timings in ``report``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> result = jaxdp.fit(
      ...     plan, jaxdp.Keys.insecure(0), jnp.zeros(2), jnp.ones((8, 2)),
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1), optimizer=optax.sgd(0.1),
      ... )
      >>> result.params.shape, result.report["steps_done"], result.report["private"]
      ((2,), 3, False)
    """

    params: Any
    info: FitInfo
    report: dict[str, Any]

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        return result_table("FitResult", self.params, self.info, self.report)


def info_rows(info: FitInfo) -> list[tuple[str, str]]:
    """Returns the shapes of releases and optimizer state, for displays."""
    rows = [("releases", display.shape(info.releases))]
    return [*rows, *display.shapes("optimizer state", info.state)]


def result_table(
    name: str, params: Any, info: FitInfo, report: dict[str, Any]
) -> display.Table:
    """Returns the display of a run's result: guarantee, shapes and report."""
    rows = [*display.shapes("params", params), *info_rows(info)]
    if not report:
        return display.Table(name, rows)
    said = reporting.Report(report)
    return display.Table(f"{name}: {said.guarantee()}", [*said.rows(), *rows])


class Carry(NamedTuple):
    """State that the loop carries. ``opt_state`` holds secrets (noise)."""

    params: Any
    opt_state: Any
    releases: jax.Array  # shape=(num_steps, K), dtype=float32


#: What runs: a transform of gradients, or an algorithm that owns its iterates.
Transform = optax.GradientTransformationExtraArgs | Algorithm

#: ``callback(step, params, info)`` after each chunk, on the host, with public values.
Callback = Callable[[int, Any, CallbackInfo], None]


def start(
    plan: Plan,
    transform: Transform,
    optimizer: optax.GradientTransformation,
    params: Any,
    *,
    donate: bool = False,
) -> Carry:
    """Returns the carry before the first step, whose buffers the program takes.

    They are its own, or with ``donate`` those of ``params``.
    """
    if not donate:
        params = jax.tree.map(jnp.array, params)
    opt_state: Any = (transform.init(params), optimizer_state(optimizer, params))
    taken = {buffer_of(leaf) for leaf in jax.tree.leaves(params)}

    def own(leaf: Any) -> Any:
        """Copies what keeps params, or stands twice: a buffer is given away once."""
        buffer = buffer_of(leaf)
        known = buffer in taken
        taken.add(buffer)
        return jnp.array(leaf) if known else leaf

    opt_state = jax.tree.map(own, opt_state)
    width = opt_state[0].release.shape[0]
    return Carry(params, opt_state, jnp.zeros((plan.num_steps, width), jnp.float32))


def optimizer_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Returns the optimizer's first state, in float32 of parameters of 16 bits.

    Numbers of Python and NumPy in it become arrays, as a program returns them.
    """

    def array(x: Any) -> Any:
        return x if isinstance(x, jax.Array) else jnp.asarray(x, jnp.result_type(x))

    state = jax.tree.map(array, optimizer.init(params))
    if not any(map(is_narrow, jax.tree.leaves(params))):
        return state
    # By its dtypes alone: a copy of all parameters in float32 is never there.
    outline = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))  # noqa: E731
    wide = widened(jax.tree.map(outline, params))
    like = jax.eval_shape(optimizer.init, wide)

    def as_like(x: Any, to: Any) -> Any:
        key = jnp.issubdtype(to.dtype, jax.dtypes.prng_key)
        return x if key else jnp.asarray(x, to.dtype)

    return jax.tree.map(as_like, state, like)


def buffer_of(leaf: Any) -> int | object:
    """Returns the address of an array's buffer, or what is equal to nothing else."""
    plain = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    if not plain or jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or not leaf.size:
        return object()
    return leaf.addressable_data(0).unsafe_buffer_pointer()


def make_program(
    plan: Plan,
    transform: Transform,
    optimizer: optax.GradientTransformation,
    value_fn: ValueFn,
    replay: optax.GradientTransformationExtraArgs | None = None,
    batch_fn: Callable[..., sampling.Batch] | None = None,
    trainable: Any = None,
) -> Callable[..., Carry]:
    """Returns the pure function that runs steps of a plan, for jit, vmap and export.

    Args:
      plan: what runs.
      transform: ``plan.transform(keys)`` or ``plan.algorithm(keys)``; its state holds all
        it needs of the keys, so the program serves other keys of the same plan.
      optimizer: what follows it. It is given the released gradient, its own state and
        the params, and nothing else: whatever it does is post-processing.
      value_fn: per-record losses; only the transform sees them, and the data.
      replay: ``plan.replay`` of a plan that has one: makes the gradient from a release.
      batch_fn: makes the batch of a step; None is ``sampling.batch``, of whole data.
      trainable: leaves that the optimizer may move, as in :func:`jaxdp.fit`.

    Returns:
      ``program(carry, keys, data, first, last) -> carry``: the steps [first, last), where
      ``first`` is a multiple of the phases' total length. Python integers make one loop
      of known length; arrays make a loop that serves chunks of any length.
    """
    period = sum(phase.num_steps for phase in plan.phases)

    def one(
        keys: keys_lib.Keys, data: Any, phase: Phase, step: jax.Array, carry: Carry
    ) -> Carry:
        if isinstance(transform, Algorithm):
            made, _ = transform.step(carry.opt_state[0], data, value_fn=value_fn)
            return logged(carry, carry.params, made, carry.opt_state[1], step)
        of_step = batch_fn or sampling.batch
        batch = of_step(plan, keys, step, data, phase=phase.name)
        update: Any = transform.update  # Typed for trees; it takes None.
        gradient, made = update(
            None,
            carry.opt_state[0],
            carry.params,
            value_fn=value_fn,
            batch=batch,
            phase=phase.name,
        )
        given = {"gradient": gradient} if replay is None else {"replay": replay}
        of_step = optimizer, carry, made, step, keys.direction
        return applied(*of_step, trainable=trainable, **given)

    def program(
        carry: Carry,
        keys: keys_lib.Keys,
        data: Any,
        first: int | jax.Array,
        last: int | jax.Array,
    ) -> Carry:
        def periods(index: jax.Array, carry: Carry) -> Carry:
            step = first + index * period
            for place, phase in enumerate(plan.phases):
                steps = functools.partial(one, keys, data, phase)
                # The first step of a period is always due; a later one may lie past the
                # end, where its zero would overwrite the last release.
                if place == 0 and phase.num_steps == 1:
                    carry = steps(step, carry)
                else:
                    end = jnp.minimum(step + phase.num_steps, last)
                    carry = jax.lax.fori_loop(step, end, steps, carry)
                step = step + phase.num_steps
            return carry

        count = -(-(last - first) // period)
        if not plan.may_stop:
            return jax.lax.fori_loop(0, count, periods, carry)

        def more(at: tuple[jax.Array, Carry]) -> jax.Array:
            return (at[0] < count) & ~at[1].opt_state[0].horizon.exhausted

        def next_period(at: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            return at[0] + 1, periods(*at)

        return jax.lax.while_loop(more, next_period, (jnp.int32(0), carry))[1]

    return program


def applied(
    optimizer: optax.GradientTransformation,
    carry: Carry,
    made: Any,
    step: jax.Array,
    direction: jax.Array,
    *,
    trainable: Any,
    gradient: Any = None,
    replay: optax.GradientTransformationExtraArgs | None = None,
) -> Carry:
    """Returns the carry after a step, by post-processing of the step's release.

    A run and its replay both come here, so that they do the same. XLA must not fuse it with
    what comes before: it would be rounded otherwise in one program than in the other. The
    gradient is made here too where that is possible: elsewhere, it would be a second copy
    of the parameters.

    ``made`` is the transform's state after the step; ``direction`` the public root, from
    which parameters of 16 bits are rounded; ``gradient`` is given for a plan that has no
    replay. Leaves that are not ``trainable`` stay as they are, whatever the optimizer says:
    weight decay would move them.
    """
    moves = run_state.moving(carry.params, trainable)

    def move(operands: Any) -> Any:
        gradient, release, state, rest, params, root = operands
        wide = widened(params)
        if replay is not None:
            update: Any = replay.update
            gradient, _ = update(None, state, wide, release=release)
        updates, after = optimizer.update(widened(gradient), rest, wide)
        _check_optimizer(params, updates, rest, after)
        after = averaging.with_frozen(after, params, moves)
        moved = precision.moved(params, updates, root, step)
        return jax.tree_util.tree_map_with_path(
            lambda path, old, new: new if moves(path_str(path)) else old, params, moved
        ), after

    def stay(operands: Any) -> Any:
        *_, rest, params, _ = operands
        return params, rest

    def in_a_branch(operands: Any) -> Any:
        """Moves in a branch that is always taken, which XLA compiles by itself."""
        return jax.lax.cond(step >= 0, move, stay, operands)

    def between_barriers(operands: Any) -> Any:
        """Moves between barriers: an accelerator's host would read a branch's predicate."""
        barrier = jax.lax.optimization_barrier
        return barrier(move(barrier(operands)))

    operands = (gradient, made.release, *carry.opt_state, carry.params, direction)
    ways: dict[str, Any] = {"cpu": in_a_branch, "default": between_barriers}
    params, rest = jax.lax.platform_dependent(operands, **ways)
    return logged(carry, params, made, rest, step)


def _check_optimizer(params: Any, updates: Any, before: Any, after: Any) -> None:
    """Requires updates of the params' shapes, and a state that keeps shapes and dtypes."""
    shapes = functools.partial(jax.eval_shape, lambda *trees: trees)
    params, updates, before, after = shapes(params, updates, before, after)
    must = "return updates of the shapes of the params"
    try:
        chex.assert_trees_all_equal_shapes(params, updates)
        must = "keep the shapes and dtypes of its state"
        chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    except AssertionError as error:
        named = jax.tree.leaves(params)
        whole = all(jnp.issubdtype(x.dtype, jnp.floating) for x in named)
        hint = (
            "" if whole else "; keep it off integers: optax.masked(optimizer, floating)"
        )
        raise ValueError(f"optimizer must {must}{hint}: {error}") from None


def logged(carry: Carry, params: Any, made: Any, rest: Any, step: jax.Array) -> Carry:
    """Returns the carry after a step, with the step's release written."""
    row = made.release[None]
    releases = jax.lax.dynamic_update_slice_in_dim(carry.releases, row, step, 0)
    return Carry(params, (made, rest), releases)


def compiled(
    key: Any,
    build: Callable[[], Any],
    usable: Callable[[Any], bool] = lambda program: True,
) -> tuple[Any, float]:
    """Returns the compiled program of a key, and the seconds its compilation took now.

    One that is kept is taken if it is ``usable``, and replaced otherwise.
    """
    try:
        hash(key)
    except TypeError:  # A value_fn that cannot be looked up is compiled every time.
        key = object()
    with _programs_lock:
        if key in _programs and usable(_programs[key]):
            _programs.move_to_end(key)
            return _programs[key], 0.0
    begin = time.perf_counter()
    program = build()
    seconds = time.perf_counter() - begin
    with _programs_lock:
        _programs[key] = program
        if len(_programs) > _MAX_PROGRAMS:
            _programs.popitem(last=False)
    return program, seconds


def compiler_options(platform: str) -> dict[str, Any]:
    """Returns XLA's options for the programs of a run on devices of a platform.

    Vectors of 512 bits draw normals and random bits faster where a CPU has them. They
    change none of those bits, but products may be summed in another order.
    """
    return {"xla_cpu_prefer_vector_width": 512} if platform == "cpu" else {}


def signature(tree: Any) -> Any:
    """Returns structure, shapes, dtypes and shardings, which determine a program."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, x.dtype, x.sharding) for x in leaves)


def whole_periods(plan: Plan, chunk: int) -> int:
    """Rounds ``chunk`` down to whole periods, at least one."""
    period = sum(phase.num_steps for phase in plan.phases)
    return max(period, chunk // period * period)
