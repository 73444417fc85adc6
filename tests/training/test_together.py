"""What processes agree on, in one process that takes itself for one of two."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxdp.training import parallel

MESH: Any = SimpleNamespace(is_multi_process=True)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What is gathered; the other process says the same."""
    said: list[np.ndarray] = []

    def gather(x: np.ndarray) -> np.ndarray:
        said.append(x)
        return np.stack([x, x])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    return said


class Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("this error cannot be shown")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), b"KeyboardInterrupt()"),
        (SystemExit(3), b"3"),
        (ValueError("no file \udcff"), rb"no file \udcff"),
        (Mute(), b"Mute"),
    ],
    ids=["Ctrl-C", "exit", "no Unicode", "none"],
)
def test_whatever_ends_one_process_is_said_to_the_others(
    gathers: list[np.ndarray], error: BaseException, said: bytes
) -> None:
    def ends() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        parallel.together(MESH, ends)
    assert caught.value is error
    assert gathers[1].tobytes() == said


def test_a_stop_that_raises_is_said_to_the_others(gathers: list[np.ndarray]) -> None:
    """Before any process waits for what another one's would have answered."""

    def broken() -> bool:
        raise ValueError("the clock is broken")

    with pytest.raises(ValueError, match="the clock is broken"):
        parallel.where_any(MESH, broken)()
    assert gathers[1].tobytes() == b"the clock is broken"
    assert parallel.where_any(MESH, lambda: True)()
    assert not parallel.where_any(MESH, lambda: False)()


def test_what_another_process_refused_is_raised(monkeypatch: Any) -> None:
    monkeypatch.setattr(parallel, "gathered", lambda mesh, text: [text, "no room"])
    with pytest.raises(parallel.Refused, match="process 1 of the run refused: no room"):
        parallel.together(MESH, lambda: 3)


def test_leaves_move_by_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """One array is a leaf twice: it stays in one place, and moves to the other."""
    here, there = (SimpleNamespace(is_fully_addressable=False, at=i) for i in range(2))
    x, y = (SimpleNamespace(sharding=here, name=name) for name in "xy")
    monkeypatch.setattr(
        parallel,
        "_spread",
        lambda places: (
            lambda leaves: [
                (leaf.name, place) for leaf, place in zip(leaves, places, strict=True)
            ]
        ),
    )
    got = parallel.moved([x, x, y], [here, there, here])
    assert got == [x, ("x", there), y]


def test_what_is_read_is_sent_in_pieces(
    gathers: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of any size, and some that are not there; the last piece is cut."""
    sent: list[np.ndarray] = []

    def broadcast(x: np.ndarray) -> np.ndarray:
        sent.append(x)
        return x

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    monkeypatch.setattr(parallel, "_PIECE", 3)
    files = {"a": bytes(range(50)), "none": None, "empty": b"", "b": b"xyz"}
    assert parallel.from_first(MESH, lambda: files) == files
    assert [len(x) for x in sent] == [3, 3, 3, 3, 2]
    assert parallel.from_first(MESH, lambda: {"none": None}) == {"none": None}
