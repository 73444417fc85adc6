"""Processes of ``--distributed`` that meet: who is missing is named, strangers are not.

Who must have come before the time is over is connected before it begins, and the others
wait for one another: no test depends on how fast threads are.
"""

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jaxdp.cli import cluster, launch, main, meeting
from jaxdp.cli.parsing import Preempted, UsageError

#: Seconds that no test waits for.
LONG = 120


@pytest.fixture
def port() -> Iterator[int]:
    with launch.held_port() as (number, _):
        yield number


@pytest.fixture
def listener(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where process 0 will listen, already open for those that come."""
    with meeting._listener(f"localhost:{port}") as found:
        monkeypatch.setattr(meeting, "_listener", lambda address: found)
        yield found


def meet(port: int, index: int, count: int, patience: float = LONG) -> str:
    """How a process ends, in words; '' if all have met."""
    try:
        meeting.meet(f"localhost:{port}", index, count, patience)
    except (Preempted, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def together(port: int, *who: tuple[int, int]) -> list[str]:
    with ThreadPoolExecutor(len(who)) as threads:
        return [*threads.map(lambda one: meet(port, *one), who)]


class Guests(contextlib.ExitStack):
    """Connections to process 0, made before it looks."""

    def __init__(self, port: int):
        super().__init__()
        self.port = port

    def come(self, words: bytes, host: str = "localhost") -> socket.socket:
        guest = socket.create_connection((host, self.port), LONG)
        guest.sendall(words)
        return self.enter_context(guest)


def heard(guest: socket.socket) -> bytes:
    with guest.makefile("rb") as answers:
        return answers.read()


def test_all_meet_and_the_port_is_free_again(port: int) -> None:
    """Also of those that come before process 0, and again at once."""
    for _ in range(3):
        assert together(port, (2, 3), (1, 3), (0, 3)) == ["", "", ""]
    assert meet(port, 0, 1) == ""


def test_who_is_missing_is_named(port: int, listener: Any) -> None:
    del listener
    with Guests(port) as guests:
        came = guests.come(b"jaxdp 2 5\n")
        guests.come(b"jaxdp 4 5\n").close()
        said = meet(port, 0, 5, patience=0)
        assert said == (
            "Preempted: --distributed waited 0 s for process 1 and process 3 and process "
            "4 of 5, which did not come, or ended"
        )
        assert heard(came).decode() == f"jaxdp: {said.partition('--distributed ')[2]}\n"


def test_a_process_that_comes_again_is_one(port: int, listener: Any) -> None:
    del listener
    with Guests(port) as guests:
        guests.come(b"jaxdp 1 3\n").close()
        came = [guests.come(b"jaxdp %d 3\n" % index) for index in (1, 2)]
        assert meet(port, 0, 3) == ""
        assert [heard(guest) for guest in came] == [b"jaxdp: \n"] * 2


def test_one_index_or_another_count_ends_all_at_once(port: int) -> None:
    said = "UsageError: --distributed must have "
    two = f"{said}an INDEX for each process, got 1 in two"
    assert together(port, (0, 3), (1, 3), (1, 3)) == [two] * 3
    other = f"{said}one COUNT, got 3 in process 1 and 2 in process 0"
    assert together(port, (1, 3), (0, 2)) == [other] * 2


def test_strangers_are_not_heard(
    port: int, listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they end a meeting, or keep it: one says nothing, and one too much."""
    del listener
    monkeypatch.setattr(meeting, "_MOMENT", 0.1)
    strangers = (
        *(b"", b"\n", b"\x00\xff\x80", b"jaxdp 1 2", b"jaxdp 0 2\n", b"jaxdp 2 2\n"),
        *(b"jaxdp -1 2\n", b"GET / HTTP/1.1\r\n\r\n", b"jaxdp 1 2\n" * 100),
    )
    with Guests(port) as guests:
        for words in strangers:
            guests.come(words)
        guests.come(b"").close()
        came = guests.come(b"jaxdp 1 2\n")
        assert meet(port, 0, 2) == ""
        assert heard(came) == b"jaxdp: \n"


def test_process_0_is_waited_for(port: int) -> None:
    """Through ends of connections, and answers of other programs."""
    said = meet(port, 1, 4, patience=0.1)
    assert said.startswith(
        "Preempted: --distributed waited 0.1 s for process 0 of 4, which did not answer "
        f"at localhost:{port}: "
    )
    with (
        meeting._listener(f"localhost:{port}") as listener,
        ThreadPoolExecutor(1) as threads,
    ):
        told = threads.submit(meet, port, 1, 4)
        for words in (b"", b"HTTP/1.1 400\r\n", b"jaxdp: \x1b\n", b"jaxdp: so\n"):
            with listener.accept()[0] as guest:
                assert guest.recv(64) == b"jaxdp 1 4\n"
                guest.sendall(words)
        assert told.result(LONG) == "UsageError: --distributed so"


def test_it_listens_where_jax_will(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At all interfaces, also without IPv6, or where JAX is told."""
    address = f"nowhere.invalid:{port}"
    every = [("127.0.0.1", True)]
    if socket.has_dualstack_ipv6():
        with (
            contextlib.suppress(OSError),
            socket.create_server(("::1", 0), family=socket.AF_INET6),
        ):
            every.append(("::1", True))
    for host, six in (*every, ("127.0.0.1", False)):
        with (
            mock.patch.object(socket, "has_dualstack_ipv6", lambda s=six: s),
            meeting._listener(address),
            Guests(port) as guests,
        ):
            guests.come(b"", host)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:0")
    with meeting._listener(address) as found:
        assert found.getsockname()[0] == "127.0.0.1" != found.getsockname()[1] != port
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0")
    with pytest.raises(UsageError, match="BIND_ADDRESS must be HOST:PORT, got"):
        meeting._listener(address)


def test_a_port_that_is_taken_is_named(port: int) -> None:
    with meeting._listener(f"localhost:{port}"):
        said = meet(port, 0, 2)
    assert (
        f"--distributed must have a PORT that is free at process 0, got {port}: "
        in said
    )


def test_a_run_that_waits_in_vain_spends_nothing(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is to be tried again: with 2 it would end a job of Kubernetes."""
    monkeypatch.setattr(cluster, "_PATIENCE", 0.1)
    words = ["train", "--dataset", "wine", "--out", str(tmp_path / "run")]
    assert main([*words, "--distributed", f"localhost:{port},0,2"]) == 75
    assert capsys.readouterr().err == (
        "jaxdp: process 0 of 2 waits at most 0.1 s for the others\n"
        "jaxdp: --distributed waited 0.1 s for process 1 of 2, which did not come, or "
        "ended\n"
    )
    assert not (tmp_path / "run").exists()
