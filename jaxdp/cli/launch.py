"""``jaxdp launch``: processes on this machine that run one command together."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, TextIO

from jaxdp.cli import PREEMPTED, options
from jaxdp.cli.parsing import UsageError
from jaxdp.training.stopping import SIGNALS

#: Those that ``--distributed`` is an option of.
_TOGETHER = ("train", "finetune")


def run(command: options.Launch, words: list[str]) -> int:
    """Starts the processes and waits for them; returns the worst of their exit codes.

    Where one dies the others are killed: they would wait for it, and what they did is on
    record. SIGTERM and SIGUSR1 go to all of them. With ``--json`` the last line is an
    object with the exit codes: those of the processes that were killed here are 137.
    """
    if not words or words[0] not in _TOGETHER:
        got = repr(words[0]) if words else "nothing"
        raise UsageError(
            f"after --, the command must be one of {', '.join(_TOGETHER)}; got {got}"
        )
    count = command.processes
    begin = [sys.executable, "-m", "jaxdp.cli", *words]
    pipe = subprocess.PIPE
    with held_port() as (port, held):
        at = f"localhost:{port}"
        # Secrets pass between the processes: not where other machines could ask for them.
        own = os.environ | {"JAX_COORDINATOR_BIND_ADDRESS": at}
        jobs = [
            subprocess.Popen(
                [*begin, f"--distributed={at},{index},{count}"],
                env=own,
                text=True,
                stdout=pipe,
                stderr=pipe,
                pass_fds=held,
            )
            for index in range(count)
        ]

    def forward(number: int, frame: object) -> None:
        del frame
        for job in jobs:
            if job.poll() is None:
                job.send_signal(number)

    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, forward) for number in numbers}
    relays = [
        threading.Thread(target=_relay, args=(f"[{index}] ", *streams))
        for index, job in enumerate(jobs)
        for streams in ((job.stdout, sys.stdout), (job.stderr, sys.stderr))
    ]
    try:
        for relay in relays:
            relay.start()
        code = _wait(jobs)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
        for relay in relays:
            relay.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    if command.json:
        codes = [_code(job.returncode) for job in jobs]
        print(json.dumps({"exit_code": code, "exit_codes": codes}))
    return code


@contextlib.contextmanager
def held_port() -> Iterator[tuple[int, list[int]]]:
    """Yields a free port, and the descriptor that keeps it for processes that inherit it.

    Linux gives it to no other socket as long as one of them lives, but for what asks for
    this port with SO_REUSEADDR, as process 0 does. Elsewhere another program may take it
    before that.
    """
    with socket.socket() as held:
        held.bind(("localhost", 0))
        port = held.getsockname()[1]
        kept = sys.platform == "linux"
        if kept:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            held.close()
        yield port, [held.fileno()] if kept else []


def _code(code: int) -> int:
    """Returns an exit code as a shell has it, also where a signal ended the process."""
    return 128 - code if code < 0 else code


def _wait(jobs: list[subprocess.Popen[str]]) -> int:
    """Waits until all have ended, or one has died; returns the worst exit code."""
    while True:
        codes = [job.poll() for job in jobs]
        ended = [_code(code) for code in codes if code is not None]
        if len(ended) == len(jobs) or {*ended} - {0, PREEMPTED}:
            return max(ended)
        time.sleep(0.05)


def _relay(prefix: str, source: IO[str], sink: TextIO) -> None:
    with source:
        for line in source:
            sink.write(prefix + line)
            sink.flush()
