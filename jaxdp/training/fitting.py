"""``fit`` runs a plan on data; ``resume`` goes on with a run that was killed."""

import contextlib
import functools
import json
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.core.run_state import public
from jaxdp.core.types import PathPredicate
from jaxdp.mechanism.plan import Plan
from jaxdp.training import (
    budgets,
    digests,
    loop,
    parallel,
    preparing,
    recording,
    replaying,
    reporting,
    resolution,
    stopping,
    streaming,
)
from jaxdp.training import ledger as ledger_lib


def fit(
    plan: Plan,
    keys: keys_lib.Keys,
    params: Any,
    data: Any,
    *,
    value_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation | None = None,
    trainable: Any = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    mesh: Mesh | None = None,
    callback: loop.Callback | None = None,
    stop: Callable[[], bool] | None = None,
    ledger: str | os.PathLike[str] | None = None,
    chunk: int | None = None,
    progress: bool = False,
    note: dict[str, Any] | None = None,
    keep_noise_roots: bool = False,
    check_isolation: bool = True,
    donate_params: bool = False,
    budget: budgets.Budget | None = None,
) -> loop.FitResult:
    """Trains parameters on private data under a plan.

    Runs all steps of the plan: each draws its batch, bounds what every record contributes,
    adds the noise, and hands the noised gradient to the optimizer. The steps are one
    compiled program. The result satisfies the guarantee that ``plan.epsilon()`` states.

    Args:
      plan: what to run, from ``jaxdp.plans``, after ``calibrate`` or ``with_noise``.
      keys: all randomness of the run: ``jaxdp.Keys.from_entropy()``, which serves one run,
        or ``jaxdp.Keys.insecure(seed)``, which repeats and protects nothing.
      params: initial parameters, a pytree; they must not depend on the data. For plans of
        vertices their weights, ``plan.uniform()``.
      data: the private records, a pytree of arrays with ``plan.num_examples`` rows, which
        are brought to the device whole; or a ``jaxdp.data.Source`` of so many records, of
        which each step reads its own: to the same bits. A source is for samplers that draw
        a part of the records. Memory-mapped arrays of more than 64 MiB are a source there.
      value_fn: the loss of each record: ``value_fn(params, batch) -> losses (B,)``, not
        their mean, or a ``jaxdp.LazyLoss``. ``jaxdp.per_record`` lifts a loss of one
        record. For plans of games, convex problems over polytopes and synthetic data, what
        their algorithms take: ``value_fn(x, y, batch)``, a ``jaxdp.Problem``, queries.
      optimizer: what turns noised gradients into updates, such as ``optax.adam(1e-3)``. It
        costs no privacy. None for plans that make the steps themselves (``O2NC``,
        ``SOSP``, games); all others need one.
      trainable: leaves that are trained: None for all, a predicate on the path, or a
        pytree of bools. The others stay as they are, whatever the optimizer does (weight
        decay), and are in no checkpoint.
      stacked: predicate on the path: leaves whose first axis counts layers.
      microbatch_size: records evaluated at once, to save memory; None is all, or a
        device's equal part.
      mesh: devices that share the records of every batch; None is one device, where
        ``jax.device_put`` brought params, data or keys, or else the default. A mesh:
        ``jax.make_mesh((jax.device_count(),), ("data",))``. Params, keys and data are
        copied to each. What a private run releases is, to the bit, what one device of the
        same ``microbatch_size`` releases (where it is None, of a device's part of the
        batch). An axis of two devices named ``"signs"`` (``finite_difference.SIGNS``)
        evaluates the losses of ``DPZero`` and ``DPGDZerothOrder`` at +radius on one and
        at -radius on the other; the other axes share the records:
        ``jax.make_mesh((2, n), ("signs", "data"))``. Params may be split over the mesh
        before (``jax.device_put(params, shardings)``, ``NamedSharding``s on it). The axes
        that occur in their ``PartitionSpec`` are model axes then, and share no records.
        Params, and what has their paths and shapes in the optimizer's state, stay split
        and are returned so; directions are made where the parts are. Releases are those of
        one device up to the order in which the losses' own sums are added. ``SOSP`` and
        games take whole params and devices of one kind in one process, ``SyntheticData``
        takes no mesh. With several processes (``jax.distributed``) each of them calls
        ``fit`` with the same arguments; process 0 writes the ledger.
      callback: ``callback(step, params, info)``, called after each chunk with public
        values: evaluate public data in it, save, plot. With a mesh, they are on one device;
        params that are split over it stay so, and where they are split between processes,
        all of them give the callback, which computes with them together.
        ``info.epsilon()`` computes what was spent so far (:class:`CallbackInfo`).
      stop: ``stop() -> bool``, asked before each chunk: where it returns True, the run
        raises :class:`jaxdp.Stopped` with all on record, for ``resume`` to go on. It needs
        a ledger. ``jaxdp.stop_on_signal`` makes one of the signals that clusters send. Not
        for a condition on releases: see ``plan.spent``. With several processes all give
        it, and all stop where one does.
      ledger: folder for the record of the run (``jaxdp.ledger``): every release is
        written before it is used, so that a killed run can be taken up again
        (``jaxdp.resume``) and the parameters rebuilt (``jaxdp.replay``).
      chunk: steps between callbacks and between records; default a hundredth of the run,
        at least 1. A checkpoint follows each record, unless the parameters are large
        (64 MiB) and their releases give them back.
      progress: whether to draw a progress bar, with the rate and the size of the last
        release.
      note: public entries for the ledger's header, whatever JSON can hold.
      keep_noise_roots: whether to leave the roots of noise and sampling in the ledger's
        ``secret/`` when the run is over, for an audit that computes it again: whoever reads
        them subtracts all noise. By default they are deleted then, which costs nothing: a
        run that is over only gives its result.
      check_isolation: whether to refuse a loss of which one record's depends on another's,
        where the plan evaluates a batch at once (``DPZero``, ``DPGDZerothOrder``, ``O2NC``
        with shared directions). The loss is tried on four made-up records of the data's
        shapes and dtypes, at the initial parameters moved at random. A check, not a proof;
        a loss that ``jaxdp.per_record`` lifts passes. It warns where all losses
        there are NaN. False is for a loss that cannot take made-up records.
      donate_params: whether the run takes the buffers of ``params`` and updates them in
        place, as ``donate_argnums`` of ``jax.jit`` does, so that there is one set of
        parameters, not two. The caller's arrays are deleted when the first step begins
        (reading them raises); an argument that is refused leaves them. All leaves must be
        ``jax.Array`` where the run is: on its one device, or as ``mesh`` has them.
        What ``jax.device_put`` spread over a mesh may share a buffer with the array that it
        was made from, which is then deleted too. ``resume`` and ``replay`` need the initial
        parameters again: load them again, or make them again.
      budget: what all runs on these records may spend together (:class:`jaxdp.Budget`).
        The plan's epsilon at its delta is reserved before the first step, and refused
        beyond the total. ``resume`` reserves nothing but for a new attempt: a run stays
        within its plan. A run with a ledger that was killed before it began, and is started
        again in its folder, uses the reservation that it has.

    Returns:
      ``FitResult(params, info, report)``: the trained parameters, the releases of every
      step, and what was spent. ``params`` are the last iterate, or what the plan returns
      instead; with a mesh, a copy on each of its devices. No metric on private data is
      computed. All is public but the report's timings: how long a run takes may depend on
      its records, so ``report.json`` leaves ``compile_seconds``, ``train_seconds`` and
      ``steps_per_second`` out; ``secret/timing.json`` has them.

    Raises:
      TypeError: an argument of the wrong kind, named, before anything is compiled or spent.
      ValueError: an argument that does not fit the plan or the data, likewise.
      Stopped: ``stop`` returned True before the last step.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> data = jnp.linspace(-1.0, 1.0, 2000).reshape(1000, 2)
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=1000, num_steps=20, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=2.0, smoothing_radius=1e-3,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> result = jaxdp.fit(
      ...     plan, jaxdp.Keys.from_entropy(), jnp.ones(2), data,
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1), optimizer=optax.sgd(0.1),
      ... )
      >>> result.params.shape, result.info.releases.shape
      ((2,), (20, 1))
      >>> result.report["private"], round(result.report["epsilon"], 2)
      (True, 2.0)
    """
    validate.instance(Plan, plan=plan)
    validate.instance(
        bool,
        progress=progress,
        keep_noise_roots=keep_noise_roots,
        check_isolation=check_isolation,
        donate_params=donate_params,
    )
    keys = keys_lib.check(keys)
    mesh, params = parallel.check_mesh(mesh, params)
    # Of several processes the first writes.
    folder = ledger if parallel.writes(mesh) else None

    def checked() -> preparing.Task:
        how = optimizer, microbatch_size, mesh, trainable, stacked
        task = preparing.Task(plan, params, data, value_fn, *how)
        task = preparing.checked(task, callback)
        parallel.check_device(mesh, params=params, data=task.data, keys=keys)
        if donate_params:
            preparing.check_donated(params, task.data, mesh, keys)
        _check_stop(stop, ledger, mesh)
        if budget is not None:
            validate.instance(budgets.Budget, budget=budget)
            if parallel.writes(mesh):
                budget.check(plan, ledger, unit=task.unit)
        if chunk is not None:
            validate.integer(chunk=chunk)
        if ledger is not None:
            _check_note(note)
            streaming.check_recordable(task.data)
        if folder is not None:
            ledger_lib.check_new(folder)
        keys_lib.check_unspent(keys, plan.family)
        return task

    task = parallel.together(mesh, checked)  # One that refuses alone keeps no other.
    several = parallel.several_processes(mesh)
    in_chunks = progress or any(x is not None for x in (callback, stop, ledger, chunk))
    streams = isinstance(task.data, streaming.Stream)
    # A stream alone needs no chunks, only blocks.
    hundredth = plan.num_steps if streams and not in_chunks else plan.num_steps // 100
    size = loop.whole_periods(plan, chunk or max(1, hundredth))
    parallel.check_ledger(mesh, ledger)
    parallel.check_layout(mesh, task.params)
    parallel.check_same(
        mesh,
        keys,
        plan=plan.to_json(),
        chunk=str(size),
        stop=str(stop is not None),
        budget=str(budget is not None),
        **streaming.kind(task.data),
    )
    task = preparing.on_mesh(task)
    told = streaming.compared(task.data)
    parallel.check_same(mesh, keys, params=params, data=told)
    transform = preparing.make_transform(task, keys)
    # Also where only another process shows or writes something: all run one program.
    in_chunks, with_text = (
        in_chunks or several or streams,
        several or ledger is not None,
    )
    steps = size if in_chunks else None
    program, compile_seconds = preparing.compiled(
        task, transform, keys, steps, with_text, check_isolation
    )
    # Whatever else decides which records a process reads: microbatches, losses, leaves.
    parallel.check_same(mesh, keys, program=program.text)
    preparing.check_losses(
        plan, task.params, task.data, value_fn, check_isolation, program
    )
    before = _samples(task)
    device = parallel.device_of(mesh, task.params, keys, task.data)
    machines = recording.machines(mesh, device) if with_text else {}
    shows = parallel.where_any(mesh, lambda: callback is not None)()
    # By all processes, where none has the parameters whole.
    reads = folder is not None or digests.scattered(task.params)
    initial = digests.of_leaves(task.params) if reads else {}
    about = task, keys, program.text, size, note or {}, machines, budget, initial
    begun = parallel.together(
        mesh, lambda: None if folder is None else recording.new(folder, *about)
    )

    def reserve() -> str:
        if budget is None or not parallel.writes(mesh):
            return ""
        return budgets.reserve_run(budget, plan, ledger, unit=task.unit)

    reserved = parallel.together(mesh, reserve)
    with keys_lib.together(several):  # Spends the keys.
        carry = loop.start(
            plan, transform, task.optimizer, task.params, donate=donate_params
        )
    # By all processes, where one has a record.
    recorded = parallel.where_any(mesh, lambda: begun is not None)()
    numbers = recording.first_numbers(carry) if recorded else ""
    recorder = parallel.together(
        mesh, lambda: None if begun is None else begun(reserved, numbers)
    )
    frozen = replaying.frozen(task.params, task.trainable)
    gather = functools.partial(recording.gather, plan, frozen)
    gather = gather if recorded else _nothing
    with contextlib.nullcontext() if recorder is None else recorder.ledger:
        if in_chunks:
            asked = None if stop is None else parallel.where_any(mesh, stop)
            chunks = _Chunks(
                *(plan, size, callback, progress, asked),
                mesh=mesh,
                shows=shows,
                gather=gather,
            )
            with streaming.steps(
                program.run, keys, plan, task.data, mesh, size
            ) as step:
                carry, seconds = chunks.run(step, carry, 0, plan.num_steps, recorder)
        else:
            begin = time.perf_counter()
            carry = jax.block_until_ready(program.run(carry, keys, task.data))
            seconds = time.perf_counter() - begin
        times = compile_seconds, seconds
        keep = keep_noise_roots
        result = _result(task, keys, carry, 0, times, recorder, gather, keep)
    if recorder is None and ledger is not None:  # Process 0 counted.
        result.report["steps_charged"] = plan.num_steps
    if not several:
        _warn_of_steps(task, before, carry, result)
    return result


def resume(
    ledger: str | os.PathLike[str],
    params: Any,
    data: Any,
    *,
    value_fn: Callable[..., Any],
    plan: Plan | None = None,
    optimizer: optax.GradientTransformation | None = None,
    microbatch_size: int | None = None,
    mesh: Mesh | None = None,
    new_attempt: bool = False,
    budget: budgets.Budget | None = None,
    callback: loop.Callback | None = None,
    stop: Callable[[], bool] | None = None,
    progress: bool = False,
    keep_noise_roots: bool = False,
    check_isolation: bool = True,
) -> loop.FitResult:
    """Continues a run of ``fit(..., ledger=...)`` that was killed.

    Steps whose releases are recorded are replayed from them. Steps that were under way
    are computed again, with the same noise, which costs nothing because the same numbers
    come out: data, plan, losses, optimizer, microbatch size, mesh, version and flags of JAX
    and XLA, processor and kind of device must be those of the run. Before it goes on, the
    last recorded chunk is computed again and compared with the record to the bit: what
    else differs (a loss that is not deterministic, or has changed behind a Python callback)
    is refused. Losses that call Python (``jax.pure_callback``) are never asked again for
    steps that were under way. A run that had ended gives its result again; its data are
    not compared, as no digest of them is kept (unless ``keep_noise_roots``).

    The ledger must be as the run left it: ``secret/`` has a keyed chain over its lines and
    the plan (``jaxdp.ledger``).

    Args:
      ledger: the run's folder, with ``secret/``.
      params: the initial parameters of the run.
      data: its data.
      value_fn: its losses; deterministic on the device.
      plan: its plan; only compared with that of the folder, which counts.
      optimizer: its optimizer.
      microbatch_size: as in the run.
      mesh: as in the run, and so is how ``params`` are split over it. With several
        processes each of them calls ``resume`` with the same arguments; process 0 alone
        opens the folder, and gives the others what they need of it.
      new_attempt: allows all of these but the plan to differ. (The answers that synthetic
        data are made from are read in the first step: those of the run stay.) Steps that
        were under way are computed with new noise and charged a second time: the run ends
        that many steps early, so that it stays within the plan's epsilon.
      budget: with ``new_attempt``, the budget in which the run was reserved, if it was:
        the plan is reserved there once more, because a copy of the folder may go on with
        other noise. Otherwise nothing is reserved.
      callback: as in :func:`jaxdp.fit`; also called at the steps that are replayed, or
        once where they cannot be.
      stop: as in :func:`jaxdp.fit`.
      progress: draws a progress bar.
      keep_noise_roots: as in :func:`jaxdp.fit`.
      check_isolation: as in :func:`jaxdp.fit`.

    Returns:
      What ``fit`` would have returned, to the bit, unless steps were charged twice.

    Raises:
      ValueError: no such folder or one in use; a ledger that was cut back, edited or
        exchanged; something differs that must not, or steps computed again do; steps under
        way that called Python; a new attempt for which the plan's epsilon has no room.
      Stopped: ``stop`` returned True before the last step.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> task = dict(
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1), optimizer=optax.sgd(0.1)
      ... )
      >>> params, data, keys = jnp.zeros(2), jnp.ones((8, 2)), jaxdp.Keys.insecure(0)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     result = jaxdp.fit(plan, keys, params, data, ledger=folder, **task)
      ...     again = jaxdp.resume(folder, params, data, **task)
      >>> bool((again.params == result.params).all())
      True
    """
    validate.instance(
        bool,
        new_attempt=new_attempt,
        progress=progress,
        keep_noise_roots=keep_noise_roots,
        check_isolation=check_isolation,
    )
    if budget is not None:
        validate.instance(budgets.Budget, budget=budget)
    mesh, params = parallel.check_mesh(mesh, params)
    several = parallel.several_processes(mesh)
    at = recording.take_up(ledger, plan, params, new_attempt=new_attempt, mesh=mesh)
    with at.ledger or contextlib.nullcontext():
        leaves = replaying.leaves_of(at.record.header)
        if not at.plan.draws_directions:
            leaves["stacked"] = None
        if at.plan.runs_algorithm:
            leaves["trainable"] = None
        given = preparing.Task(
            at.plan, params, data, value_fn, optimizer, microbatch_size, mesh, **leaves
        )

        def checked() -> preparing.Task:
            _check_stop(stop, ledger, mesh)
            streamed = bool(at.record.header.get("streamed"))
            task = preparing.checked(given, callback, streamed=streamed)
            parallel.check_device(mesh, params=params, data=task.data)
            recording.check_unit(at, task)
            return task

        task = parallel.together(mesh, checked)
        kind = streaming.kind(task.data)
        parallel.check_same(mesh, at.keys, stop=str(stop is not None), **kind)
        task = preparing.on_mesh(task)
        parallel.check_same(mesh, at.keys, data=streaming.compared(task.data))
        transform = preparing.make_transform(task, at.keys)
        size = at.record.header["chunk"]
        program, compile_seconds = preparing.compiled(
            task, transform, at.keys, size, True, check_isolation
        )
        parallel.check_same(mesh, at.keys, program=program.text)
        preparing.check_losses(
            at.plan, task.params, task.data, value_fn, check_isolation, program
        )
        before = _samples(task)
        device = parallel.device_of(mesh, task.params, at.keys, task.data)
        machines = recording.machines(mesh, device)
        if at.new and not at.ended:
            reserve = functools.partial(
                budgets.reserve_attempt, *(budget, at.record.header, at.plan)
            )
            first = parallel.writes(mesh)
            parallel.together(mesh, lambda: first and reserve(unit=task.unit))
        with keys_lib.resuming(at.keys):
            carry = loop.start(at.plan, transform, task.optimizer, task.params)
        numbers = recording.first_numbers(carry)
        recorder = parallel.together(
            mesh, lambda: at.recorder(task, program.text, numbers, machines)
        )
        asked = None if stop is None else parallel.where_any(mesh, stop)
        frozen = replaying.frozen_of(at.record.header)
        gather = functools.partial(recording.gather, at.plan, frozen)
        chunks = _Chunks(
            *(at.plan, size, callback, progress, asked, at.charged, mesh),
            shows=parallel.where_any(mesh, lambda: callback is not None)(),
            gather=gather,
        )
        with streaming.steps(
            program.run, at.keys, at.plan, task.data, mesh, size
        ) as step:
            carry = program.kept(_rebuilt(task, at, carry, chunks, step, recorder))
            # A machine that rounds otherwise would go on from other parameters.
            rebuilt = carry.params, carry.opt_state[1]
            parallel.check_same(mesh, at.keys, **{"parameters and optimizer": rebuilt})
            carry, seconds = chunks.run(step, carry, at.done, at.last, recorder)
        times, keep = (compile_seconds, seconds), keep_noise_roots
        of_end = recorder, gather, keep
        result = _result(task, at.keys, carry, at.done, times, *of_end)
    if recorder is None:
        result.report["steps_charged"] = at.charged(at.last)
    if not several:
        _warn_of_steps(task, before, carry, result)
    return result


# --- what both do ------------------------------------------------------------------


#: Runs the steps [first, last) over data: (carry, first, last) -> carry.
_Step = streaming.InMemory | streaming.Streamed
#: The same without data, by releases.
_Again = Callable[[loop.Carry, int, int], loop.Carry]


def _nothing(carry: loop.Carry) -> recording.Gathered:
    """Returns what is gathered of a run without a record."""
    del carry
    return recording.Gathered()


class _Chunks(NamedTuple):
    """Division of a run into chunks, with a callback and a progress bar between them."""

    plan: Plan
    size: int
    callback: loop.Callback | None
    progress: bool
    stop: Callable[[], bool] | None = None  # asked before each chunk
    charged: Callable[[int], int] = int  # steps that count as released, after a step
    mesh: Mesh | None = None  # of processes that end together where one cannot go on
    shows: bool = False  # whether one of them has a callback
    gather: Callable[[Any], recording.Gathered] = _nothing  # for the record

    def run(
        self,
        step: _Step | _Again,
        carry: loop.Carry,
        first: int,
        last: int,
        recorder: recording.Recorder | None,
    ) -> tuple[loop.Carry, float]:
        """Runs [first, last) in chunks; returns the carry and the seconds of the steps."""
        from rich import progress

        seconds = 0.0
        bar = progress.Progress(
            "{task.description}",
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[seen]}"),
            disable=not self.progress,
            transient=True,
        )
        # A bar that is off is not begun: before rich 14.3, its end was an empty line.
        with bar if self.progress else contextlib.nullcontext():
            task = bar.add_task(self.plan.family, total=last, completed=first, seen="")
            begun = first
            while first < last and not _ended(self.plan, carry):
                if self.stop is not None and self.stop():
                    raise stopping.Stopped(first)
                # Cut at the same steps whoever takes up the run.
                end = min(first - first % self.size + self.size, last)
                begin = time.perf_counter()
                if isinstance(step, streaming.Streamed):
                    step.ready(first, end)  # What cannot be read is not charged.
                before = functools.partial(self._before, first, end, recorder)
                parallel.together(self.mesh, before)
                carry = jax.block_until_ready(step(carry, first, end))
                seconds += time.perf_counter() - begin
                after = functools.partial(
                    self._after, carry, first, end, recorder, self.gather(carry)
                )
                parallel.together(self.mesh, after)
                del after  # And what it gathered.
                if self.shows:
                    # A callback may compute with all processes: none has refused.
                    show = functools.partial(self._show, carry, end)
                    parallel.together(self.mesh, show)
                if self.progress:
                    seen = _seen(carry, end, (end - begun) / seconds)
                    bar.update(task, completed=end, seen=seen)
                first = end
        return carry, seconds

    def _before(
        self, first: int, end: int, recorder: recording.Recorder | None
    ) -> None:
        """Charges the steps [first, end)."""
        if recorder is not None:
            recorder.before(first, end)

    def _after(
        self,
        carry: Any,
        first: int,
        end: int,
        recorder: recording.Recorder | None,
        gathered: recording.Gathered,
    ) -> None:
        """Records the steps [first, end)."""
        if recorder is not None:
            recorder.after(first, end, carry, gathered)

    def _show(self, carry: loop.Carry, end: int) -> None:
        """Shows the steps to the callback of this process, if it has one."""
        shown = self.shown(carry, end)
        if self.callback is not None:
            self.callback(end, *shown)

    def shown(self, carry: loop.Carry, done: int) -> tuple[Any, loop.CallbackInfo]:
        """Copies params and info for a callback: the next chunk takes the buffers."""
        made, rest = carry.opt_state
        shown = parallel.here((self.plan.shown(made, carry.params), public(rest)))
        params, state = jax.tree.map(jnp.array, shown)
        # Not by jnp.asarray, which compiles a program for every number of steps.
        releases = jax.device_put(np.array(carry.releases)[:done])
        about = self.plan, self.charged(done)
        return params, loop.CallbackInfo(releases, state, *about)


def _seen(carry: loop.Carry, done: int, rate: float) -> str:
    """Describes how fast a run is, and the size of its last release, which is public."""
    size = float(jnp.linalg.norm(carry.releases[done - 1]))
    return f"{rate:.3g} steps/s, last release {size:.3g}"


def _ended(plan: Plan, carry: loop.Carry) -> bool:
    """Returns True if a run of a plan that may stop early has stopped."""
    return plan.may_stop and bool(carry.opt_state[0].horizon.exhausted)


def _rebuilt(
    task: preparing.Task,
    at: recording.Resumed,
    carry: loop.Carry,
    chunks: _Chunks,
    step: _Step,
    recorder: recording.Recorder | None,
) -> loop.Carry:
    """Rebuilds the carry after the recorded steps, and shows it to the callback.

    Up to where the last chunk began it is read or replayed. From there on, and for plans
    that cannot be replayed from the last checkpoint before it, the run's own program
    computes the steps again, and what it gives must be what is on record.
    """
    if at.done == 0:
        return carry
    width = carry.releases.shape[1]
    releases = jnp.asarray(replaying.filled(task.plan, at.record.releases, width))
    begin = carry._replace(releases=jnp.array(releases))
    states = recording.checkpoints(at)

    def at_state(step: int) -> loop.Carry:
        carry = begin
        if step in states:
            frozen = replaying.frozen_of(at.record.header)
            carry = recording.restore(states[step], begin, frozen)
        return carry._replace(releases=jnp.array(releases))

    stopped = at.done in states and _ended(at.plan, at_state(at.done))
    # The last chunk is computed again where steps follow it.
    goes_on = at.done < at.last and not stopped
    until = recording.checked_from(at) if goes_on else at.done
    first = max((known for known in states if known <= until), default=0)
    # These steps are done, and on record.
    chunks = chunks._replace(stop=None)
    silent = chunks._replace(callback=None, shows=False, mesh=None, gather=_nothing)
    if task.plan.replayable:
        again: Any = None  # A checkpoint alone needs no program.
        if first < until or chunks.shows:
            program = replaying.compiled(
                task.plan, task.optimizer, at.keys.direction, begin, **task.leaves
            )

            def replayed(carry: loop.Carry, *bounds: int) -> loop.Carry:
                return program(carry, releases, *(jnp.int32(x) for x in bounds))

            again = replayed

        if chunks.shows:  # In copies: a program takes what it is given.
            chunks.run(again, jax.tree.map(jnp.array, begin), 0, at.done, None)
        carry = _replayed(at, silent, again, at_state(first), first, until)
    else:
        if first < until:
            _check_recomputable(at, first)
        carry, until = at_state(first), first
    if until < at.done:
        carry, _ = silent.run(step, carry, until, at.done, None)
        known, digest = recording.replayed_to(at)
        same, end = carry, states.get(at.done)
        gathered = chunks.gather(carry)

        def check() -> None:
            recording.check_recomputed(at, until, same, gathered, end)

        parallel.together(at.mesh, check)
        if known == at.done:
            recording.check_replayed(at, digest, same.params)
        if at.done not in states and recorder is not None:
            recorder.checkpoint(carry, gathered)
    if not task.plan.replayable:

        def show_last() -> None:
            if chunks.callback is not None:
                chunks.callback(at.done, *chunks.shown(carry, at.done))

        parallel.together(at.mesh, show_last)
    return carry


def _replayed(
    at: recording.Resumed,
    silent: _Chunks,
    again: _Again,
    carry: loop.Carry,
    first: int,
    last: int,
) -> loop.Carry:
    """Replays the releases of the steps [first, last); returns the carry after them."""
    known, digest = recording.replayed_to(at)
    between = min(max(first, known), last)
    carry = silent.run(again, carry, first, between, None)[0]
    if first <= known == between:
        recording.check_replayed(at, digest, carry.params)
    return silent.run(again, carry, between, last, None)[0]


def _check_recomputable(at: recording.Resumed, first: int) -> None:
    """Raises unless steps that cannot be replayed can be computed with their own noise."""
    others = [i for i in at.record.intents if first < i.last <= at.done]
    if at.new or at.ended or any(intent.attempt != at.attempt for intent in others):
        raise ValueError(
            f"ledger must have a checkpoint of step {at.done}, got one of step {first}: "
            "the steps between belong to another attempt or to a run that is over, and "
            "their releases are too large to be logged whole"
        )


def _check_stop(stop: Any, ledger: Any, mesh: Mesh | None) -> None:
    if stop is None:
        return
    if not callable(stop):
        raise TypeError(f"stop must be callable or None, got {stop!r}")
    if isinstance(stop, contextlib.ContextDecorator):  # Called, it decorates.
        raise TypeError(
            "stop must be what the block of a context manager gets, as in `with "
            f"jaxdp.stop_on_signal() as stop:`, got the manager {stop!r}"
        )
    if ledger is None and parallel.writes(mesh):
        raise ValueError(
            "stop must be for a run with a ledger, by which it goes on, got ledger=None"
        )


def _check_note(note: Any) -> None:
    try:
        json.dumps(note, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"note must be what JSON can hold, got {note!r}") from error


def _samples(task: preparing.Task) -> list[resolution.Sample]:
    """Returns a sample of the initial parameters, which the run may take."""
    if task.plan.runs_algorithm or parallel.several_processes(task.mesh):
        return []
    return resolution.samples(task.params, task.trainable)


def _warn_of_steps(
    task: preparing.Task,
    before: list[resolution.Sample],
    carry: loop.Carry,
    result: loop.FitResult,
) -> None:
    """Warns where steps did not move what they were for, or a run ended where it began."""
    if task.plan.may_stop:
        outcome = result.report.get("outcome", {})
        if outcome.get("certified") and _same(carry.params, result.params):
            warnings.warn(
                f"the point that is certified (alpha {outcome['alpha']}) is the one that "
                "the run began at: where that is a saddle, the certificate says nothing; "
                "constants from public records, more records or a larger epsilon can "
                "exclude it",
                stacklevel=3,
            )
    elif not task.plan.runs_algorithm and getattr(task.plan, "noise_multiplier", 0):
        after = resolution.samples(carry.params, task.trainable)
        resolution.warn_if_unmoved(before, after, stacklevel=3)


def _same(one: Any, other: Any) -> bool:
    equal = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), one, other)
    return all(jax.tree.leaves(equal))


def _result(
    task: preparing.Task,
    keys: keys_lib.Keys,
    carry: loop.Carry,
    first: int,
    times: tuple[float, float],
    recorder: recording.Recorder | None,
    gather: Callable[[Any], recording.Gathered],
    keep_noise_roots: bool,
) -> loop.FitResult:
    """Returns the result of a run whose steps from ``first`` on took ``times`` now."""
    plan, (made, rest) = task.plan, carry.opt_state
    done = int(made.horizon.count) if plan.may_stop else plan.num_steps
    rate = max(0, done - first) / times[1] if times[1] > 0 else 0.0
    device = next(iter(carry.releases.sharding.addressable_devices))
    timing = dict(zip(reporting.TIMING, (*times, rate), strict=True))
    more = {"unit": task.unit, "seed_source": keys.seed_source}
    more |= {"device": device.device_kind} | timing
    report = reporting.Report(reporting.report(plan, made) | more)
    # Releases that give the parameters back need nothing at the end.
    at_end = recording.Gathered() if plan.replayable else gather(carry)
    if recorder is not None:
        report["steps_charged"] = recorder.charged
        keep = keep_noise_roots
        recorder.finish(carry, at_end, report, keep_noise_roots=keep)
    info = loop.FitInfo(carry.releases, public(rest))
    return loop.FitResult(plan.returned(made, carry.params), info, report)
