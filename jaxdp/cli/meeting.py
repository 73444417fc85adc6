"""Meeting of the processes of ``--distributed HOST:PORT,INDEX,COUNT``, before that of JAX.

JAX aborts processes that wait in vain for another one, and does not say for which. So
process 0 first listens where JAX will, hears who comes, and tells all who is missing.
"""

import contextlib
import os
import re
import socket
import time

from jaxdp.cli.parsing import Preempted, UsageError

#: Seconds in which whoever connects says who it is, and in which a connection is made.
_MOMENT = 3
#: Seconds after which a process tries again to reach process 0.
_PAUSE = 0.2
#: Beginning of what is said where processes are missing.
_VAIN = "waited "


def meet(address: str, index: int, count: int, patience: float) -> None:
    """Waits until all processes are there.

    Raises in all that came: Preempted, to be tried again, where others did not within so
    many seconds, and at once UsageError where two have the same index or other counts.
    """
    if index:
        wrong = _come(address, index, count, patience)
    else:
        try:
            wrong = _receive(address, count, patience)
        except OSError as error:  # No more files may be open, for instance.
            raise UsageError(
                f"--distributed: process 0 cannot listen: {error}"
            ) from error
    if wrong:
        kind = Preempted if wrong.startswith(_VAIN) else UsageError
        raise kind(f"--distributed {wrong}")


def _receive(address: str, count: int, patience: float) -> str:
    """Waits for the others; tells them what is wrong, '' if nothing is, and returns it."""
    until, wrong = time.monotonic() + patience, ""
    came: list[tuple[int, socket.socket]] = []
    with _listener(address) as listener:
        while not wrong and len(came) < count - 1:
            left = max(until - time.monotonic(), 0)
            heard = _heard(listener, left)
            came = [(other, waits) for other, waits in came if not _ended(waits)]
            if heard:
                other, theirs, new = heard
                if theirs != count:
                    wrong = f"must have one COUNT, got {theirs} in process {other} and "
                    wrong += f"{count} in process 0"
                elif other in dict(came):
                    wrong = f"must have an INDEX for each process, got {other} in two"
                came.append((other, new))
            elif not left:
                names = (f"process {i}" for i in range(1, count) if i not in dict(came))
                wrong = f"{_VAIN}{patience} s for {' and '.join(names)} of {count}, "
                wrong += "which did not come, or ended"
    for _, waits in came:
        with waits, contextlib.suppress(OSError):
            waits.settimeout(_MOMENT)
            waits.sendall(f"jaxdp: {wrong}\n".encode())
    return wrong


def _listener(address: str) -> socket.socket:
    """Returns a socket that listens where JAX will: at all interfaces, if not told."""
    told = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if told and not re.fullmatch(r".+:\d{1,5}", told):
        raise UsageError(
            f"JAX_COORDINATOR_BIND_ADDRESS must be HOST:PORT, got {told!r}"
        )
    host, port = _split(told or f"[::]:{_split(address)[1]}")
    both = host == "::" and socket.has_dualstack_ipv6()
    host = "" if host == "::" and not both else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UsageError(
            f"--distributed must have a PORT that is free at process 0, got {port}: {error}"
        ) from error


def _heard(
    listener: socket.socket, left: float
) -> tuple[int, int, socket.socket] | None:
    """Returns index, count and connection of a process that comes; None if none does."""
    listener.settimeout(left)
    gone = contextlib.suppress(TimeoutError, BlockingIOError, ConnectionError)
    with gone, contextlib.ExitStack() as stack:
        new = stack.enter_context(listener.accept()[0])
        new.settimeout(_MOMENT)
        greeting = new.recv(64)
        if not greeting.endswith(b"\n"):  # It may come in two parts.
            greeting += new.recv(64)
        said = re.fullmatch(rb"jaxdp (\d{1,9}) (\d{1,9})\n", greeting)
        if said and 0 < int(said[1]) < int(said[2]):
            stack.pop_all()
            return int(said[1]), int(said[2]), new
    return None


def _ended(waits: socket.socket) -> bool:
    """Says whether a process that came has ended: while it waits it says nothing."""
    with contextlib.suppress(OSError):
        try:
            waits.setblocking(False)
            waits.recv(1)
        except BlockingIOError:
            return False
    waits.close()
    return True


def _come(address: str, index: int, count: int, patience: float) -> str:
    """Goes to process 0; returns what it says is wrong, '' if nothing is."""
    until, error = time.monotonic() + patience, "it said nothing"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(_split(address), min(left, _MOMENT)) as first:
                first.sendall(f"jaxdp {index} {count}\n".encode())
                first.settimeout(patience + 2 * _MOMENT)  # It may have come just now.
                with first.makefile("rb") as answers:
                    said = re.fullmatch(rb"jaxdp: ([ -~]*)\n", answers.readline(2**16))
            if said:
                return said[1].decode()
        except OSError as caught:
            error = str(caught)
        time.sleep(_PAUSE)
    return (
        f"{_VAIN}{patience} s for process 0 of {count}, which did not answer at {address}: "
        f"{error}"
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
