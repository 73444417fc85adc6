"""Runs that are told to stop: they end after the chunk that is under way, and resume."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

#: What clusters send before they kill: SIGTERM; SIGUSR1 by ``sbatch --signal=USR1@120``.
SIGNALS = ("SIGTERM", "SIGUSR1")


class Stopped(Exception):
    """Run that was told to stop before its last step: ``jaxdp.resume`` goes on with it.

    Attributes:
      step: steps that are done and on record.

    Example:
      >>> import jaxdp
      >>> jaxdp.Stopped(step=20).step
      20
    """

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}, as it was told to; it can resume")
        self.step = step


class StopSignal:
    """Record of whether a signal has come; made by :func:`stop_on_signal`.

    Example:
      >>> import jaxdp
      >>> with jaxdp.stop_on_signal() as stop:
      ...     print(stop(), stop.name)
      False None
    """

    def __init__(self) -> None:
        self.name: str | None = None

    def __call__(self) -> bool:
        """Returns True once a signal has come."""
        return self.name is not None


@contextlib.contextmanager
def stop_on_signal(*signals: str) -> Iterator[StopSignal]:
    """Takes signals within a block, for ``fit(..., stop=)`` to end a run between chunks.

    A cluster that takes a machine back sends SIGTERM and kills some time later: chunks
    should be shorter than that. (A run that is killed resumes too; the chunk that was under
    way is computed again.) At the end of the block the handlers are as they were.

    Args:
      signals: their names, by default SIGTERM and SIGUSR1.

    Yields:
      What ``fit`` and ``resume`` take as ``stop``: a function that returns True once a
      signal has come, and whose ``name`` is then that signal's.

    Raises:
      ValueError: a name of no signal; not in the main thread, where Python has signals.

    Example:
      >>> import os, signal, tempfile
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
      >>> def preempt(step, params, info):
      ...     os.kill(os.getpid(), signal.SIGTERM)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     try:
      ...         with jaxdp.stop_on_signal() as stop:
      ...             jaxdp.fit(
      ...                 plan, keys, params, data, ledger=folder, chunk=1, stop=stop,
      ...                 callback=preempt, **task,
      ...             )
      ...     except jaxdp.Stopped as stopped:
      ...         print(stopped.step, stop.name)
      ...     result = jaxdp.resume(folder, params, data, **task)
      1 SIGTERM
      >>> result.report["steps_done"], result.report["steps_charged"]
      (3, 3)
    """
    # Windows has no SIGUSR1.
    chosen = signals or tuple(x for x in SIGNALS if hasattr(signal, x))
    for name in chosen:
        if not (isinstance(name, str) and name in signal.Signals.__members__):
            raise ValueError(
                f"signals must be names of signals, such as 'SIGTERM', got {name!r}"
            )
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "stop_on_signal must be called in the main thread, where Python handles "
            f"signals, got {threading.current_thread().name!r}"
        )
    stop = StopSignal()

    def handle(number: int, frame: object) -> None:
        del frame
        stop.name = signal.Signals(number).name

    before: dict[signal.Signals, Any] = {}
    try:
        for name in dict.fromkeys(chosen):
            try:
                before[_number(name)] = signal.signal(_number(name), handle)
            except OSError as error:
                raise ValueError(
                    f"signals must be such as a process can take, got {name!r}"
                ) from error
        yield stop
    finally:
        for number, handler in before.items():
            # None: it was not Python that set it, and Python cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _number(name: str) -> signal.Signals:
    return signal.Signals[name]
