"""The loop: a plan and data in, the plan's output point out.

A run is one compiled program, sampling included. With a callback the same steps run in
compiled chunks, to the same bits.
"""

import functools
import importlib.metadata
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import progress as rich_progress

from jaxdp import _validate, sampling
from jaxdp import keys as keys_lib
from jaxdp._types import PathPredicate, Phase, ValueFn
from jaxdp.plans._base import GaussianSumPlan
from jaxdp.transforms._common import public

_MAX_PROGRAMS = 64
_programs: "OrderedDict[Any, Any]" = OrderedDict()
_programs_lock = threading.Lock()


class FitInfo(NamedTuple):
    """What left the run, step by step. Public."""

    releases: jax.Array  # shape=(num_steps, K), dtype=float32
    state: Any  # of ``optimizer``, secret fields None: jaxdp.polyak_output reads it


class FitResult(NamedTuple):
    """What ``fit`` returns. Public."""

    params: Any
    info: FitInfo
    report: dict[str, Any]


class Carry(NamedTuple):
    """What the loop carries. ``opt_state`` holds secrets (noise)."""

    params: Any
    opt_state: Any
    releases: jax.Array  # shape=(num_steps, K), dtype=float32


#: ``callback(step, params, info)`` after each chunk, on the host, with public values.
Callback = Callable[[int, Any, FitInfo], None]


def start(
    plan: GaussianSumPlan,
    maker: optax.GradientTransformationExtraArgs,
    optimizer: optax.GradientTransformation,
    params: Any,
) -> Carry:
    """The carry before the first step, in buffers of its own, for they are donated."""
    params = jax.tree.map(jnp.array, params)
    opt_state: Any = (maker.init(params), optimizer.init(params))
    width = opt_state[0].release.shape[0]
    return Carry(params, opt_state, jnp.zeros((plan.num_steps, width), jnp.float32))


def make_program(
    plan: GaussianSumPlan,
    maker: optax.GradientTransformationExtraArgs,
    optimizer: optax.GradientTransformation,
    value_fn: ValueFn,
) -> Callable[..., Carry]:
    """The pure function that runs steps of a plan: for jit, vmap and export.

    Args:
      plan: what runs.
      maker: ``plan.transform(keys)``; its state holds all it needs of the keys, so the
        program serves other keys of the same plan.
      optimizer: what follows it. It is given the released gradient, its own state and
        the params, and nothing else: whatever it does is post-processing.
      value_fn: per-record losses; only the maker sees them, and the data.

    Returns:
      ``program(carry, keys, data, first, last) -> carry``: the steps [first, last), where
      ``first`` is a multiple of the phases' total length. Python integers make one loop
      of known length; arrays make a loop that serves chunks of any length.
    """
    period = sum(phase.num_steps for phase in plan.phases)

    def one(
        keys: keys_lib.Keys, data: Any, phase: Phase, step: jax.Array, carry: Carry
    ) -> Carry:
        batch = sampling.batch(plan, keys, step, data)
        update: Any = maker.update  # Typed for trees; None is what makers expect.
        gradient, made = update(
            None,
            carry.opt_state[0],
            carry.params,
            value_fn=value_fn,
            batch=batch,
            phase=phase.name,
        )
        updates, rest = optimizer.update(gradient, carry.opt_state[1], carry.params)
        params = optax.apply_updates(carry.params, updates)
        row = made.release[None]
        releases = jax.lax.dynamic_update_slice_in_dim(carry.releases, row, step, 0)
        return Carry(params, (made, rest), releases)

    def program(
        carry: Carry,
        keys: keys_lib.Keys,
        data: Any,
        first: int | jax.Array,
        last: int | jax.Array,
    ) -> Carry:
        def periods(index: jax.Array, carry: Carry) -> Carry:
            step = first + index * period
            for phase in plan.phases:
                steps = functools.partial(one, keys, data, phase)
                if phase.num_steps == 1:
                    carry = steps(step, carry)
                else:
                    end = jnp.minimum(step + phase.num_steps, last)
                    carry = jax.lax.fori_loop(step, end, steps, carry)
                step = step + phase.num_steps
            return carry

        count = -(-(last - first) // period)
        return jax.lax.fori_loop(0, count, periods, carry)

    return program


def _compiled(key: Any, build: Callable[[], Any]) -> tuple[Any, float]:
    """The compiled program of a key and the seconds its compilation took now."""
    try:
        hash(key)
    except TypeError:  # A value_fn that cannot be looked up is compiled every time.
        key = object()
    with _programs_lock:
        if key in _programs:
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


def _signature(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, x.dtype, x.sharding) for x in leaves)


def fit(
    plan: GaussianSumPlan,
    keys: keys_lib.Keys,
    params: Any,
    data: Any,
    *,
    value_fn: ValueFn,
    optimizer: optax.GradientTransformation | None = None,
    trainable: Any = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    callback: Callback | None = None,
    chunk: int | None = None,
    progress: bool = False,
) -> FitResult:
    """Runs a plan on data.

    Args:
      plan: a plan with noise.
      keys: a ``jaxdp.Keys``; keys from entropy serve one run.
      params: initial parameters; they must not depend on the data.
      data: pytree of arrays with ``plan.num_examples`` rows.
      value_fn: ``value_fn(params, batch) -> losses (B,)`` or a ``jaxdp.LazyLoss``.
      optimizer: what turns gradients into updates (post-processing, costs no privacy):
        ``optax.sgd(0.1)``. None adds gradients as they are.
      trainable: which leaves move (None, predicate on the path, pytree of bools).
      stacked: predicate on the path: leaves whose first axis counts layers.
      microbatch_size: records evaluated at once.
      callback: ``callback(step, params, info)`` after each chunk, with public values:
        evaluate public data in it, save, plot.
      chunk: steps between callbacks; default a hundredth of the run, at least 1.
      progress: draws a progress bar.

    Returns:
      ``FitResult(params, info, report)``, all public: the last iterate, the releases of
      every step, and what was spent. No metric on private data is computed.

    Raises:
      TypeError, ValueError: wrong arguments, named, before anything is compiled or spent.
    """
    _validate.instance(GaussianSumPlan, plan=plan)
    keys = keys_lib.check(keys)
    sampling.check_data(plan, data)
    if not callable(value_fn):
        raise TypeError(f"value_fn must be callable, got {value_fn!r}")
    for name, size in (("microbatch_size", microbatch_size), ("chunk", chunk)):
        if size is not None:
            _validate.integer(**{name: size})
    options = {"trainable": trainable, "microbatch_size": microbatch_size}
    if stacked is not None:
        options["stacked"] = stacked
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable or None, got {callback!r}")
    optimizer = optax.identity() if optimizer is None else optimizer
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer must be an optax.GradientTransformation, got {optimizer!r}"
        )
    keys_lib.check_unspent(keys, plan.family)
    maker = plan.transform(keys, **options)
    data = jax.tree.map(jnp.asarray, data)
    program = make_program(plan, maker, optimizer, value_fn)
    in_chunks = callback is not None or progress or chunk is not None

    def build() -> Any:
        """Compiles from shapes alone, so that no mistake found here spends the keys."""
        carry = jax.eval_shape(lambda p: start(plan, maker, optimizer, p), params)
        if in_chunks:
            step = jax.ShapeDtypeStruct((), jnp.int32)
            jitted = jax.jit(program, donate_argnums=0)
            return jitted.lower(carry, keys, data, step, step).compile()
        whole = lambda c, k, d: program(c, k, d, 0, plan.num_steps)  # noqa: E731
        return jax.jit(whole, donate_argnums=0).lower(carry, keys, data).compile()

    flags = tuple(x if callable(x) else bool(x) for x in jax.tree.leaves(trainable))
    functions = (value_fn, optimizer, flags, stacked)
    shapes = _signature((jax.tree.map(jnp.asarray, params), keys, data))
    cache_key = (plan.digest, functions, microbatch_size, in_chunks, shapes)
    compiled, compile_seconds = _compiled(cache_key, build)

    carry = start(plan, maker, optimizer, params)  # Spends the keys.
    if in_chunks:
        size = _whole_periods(plan, chunk or max(1, plan.num_steps // 100))
        run = functools.partial(_in_chunks, compiled, plan, callback, progress)
        carry, seconds = run(carry, keys, data, size)
    else:
        begin = time.perf_counter()
        carry = jax.block_until_ready(compiled(carry, keys, data))
        seconds = time.perf_counter() - begin

    timing = {
        "compile_seconds": compile_seconds,
        "train_seconds": seconds,
        "steps_per_second": plan.num_steps / seconds,
    }
    final = (
        report(plan, carry.opt_state[0]) | {"seed_source": keys.seed_source} | timing
    )
    info = FitInfo(carry.releases, public(carry.opt_state[1]))
    return FitResult(carry.params, info, final)


def _whole_periods(plan: GaussianSumPlan, chunk: int) -> int:
    period = sum(phase.num_steps for phase in plan.phases)
    return max(period, chunk // period * period)


def _in_chunks(
    compiled: Any,
    plan: GaussianSumPlan,
    callback: Callback | None,
    progress: bool,
    carry: Carry,
    keys: keys_lib.Keys,
    data: Any,
    chunk: int,
) -> tuple[Carry, float]:
    """Runs chunk after chunk; the seconds leave out the callbacks."""
    seconds = 0.0
    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
        disable=not progress,
        transient=True,
    )
    with bar:
        task = bar.add_task(plan.family, total=plan.num_steps)
        for first in range(0, plan.num_steps, chunk):
            last = min(first + chunk, plan.num_steps)
            bounds = jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32)
            begin = time.perf_counter()
            carry = jax.block_until_ready(compiled(carry, keys, data, *bounds))
            seconds += time.perf_counter() - begin
            bar.update(task, completed=last)
            if callback is not None:
                # Copies: the next chunk takes these buffers.
                shown = carry.params, public(carry.opt_state[1])
                params, state = jax.tree.map(jnp.array, shown)
                releases = jnp.asarray(np.array(carry.releases)[:last])
                callback(last, params, FitInfo(releases, state))
    return carry, seconds


def report(
    plan: GaussianSumPlan, state: Any, *, delta: float | None = None
) -> dict[str, Any]:
    """What a run under ``plan`` has spent: for loops written by hand.

    Args:
      plan: the plan.
      state: the gradient maker's state, or a chain's state that starts with it.
      delta: default is the plan's.

    Returns:
      A dictionary that JSON can hold. ``epsilon`` is the whole plan's at ``delta`` (None
      without a delta or where it is infinite); ``private`` is true only for keys from
      entropy and a finite epsilon.

    Raises:
      ValueError: the state does not come from this plan.
    """
    state = state if hasattr(state, "horizon") else state[0]
    horizon = getattr(state, "horizon", None)
    if horizon is None:
        raise ValueError(
            f"state must be the state of {plan.family}, or of a chain that starts with "
            f"it; got {type(state).__name__}"
        )
    want = [int(plan.digest[i : i + 8], 16) for i in (0, 8)]
    if np.asarray(horizon.digest).tolist() != want:
        raise ValueError("state was made by another plan than the one given")
    delta = plan.delta if delta is None else delta
    spent = plan.epsilon(delta=delta) if delta is not None else None
    finite = spent is not None and np.isfinite(spent)
    return {
        "algorithm": plan.family,
        "num_examples": plan.num_examples,
        "num_steps": plan.num_steps,
        "steps_done": int(horizon.count),
        "relation": plan.relation,
        "sampling": repr(plan.sampling),
        "l2_clip_norm": plan.l2_clip_norm,
        "noise_multiplier": plan.noise_multiplier,
        "noise_std": plan.noise_std,
        "epsilon": float(spent) if spent is not None and finite else None,
        "delta": delta,
        "accountant": spent.accountant if spent is not None else None,
        "private": bool(horizon.private) and bool(finite),
        "device": jax.devices()[0].device_kind,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    names = {"jaxdp": "jaxdp-optim"} | {
        name: name for name in ("jaxlib", "optax", "dp-accounting")
    }
    out = {"jax": jax.__version__}
    for name, distribution in names.items():
        try:
            out[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out
