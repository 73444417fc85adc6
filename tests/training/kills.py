"""Runs that end as a killed process does: at a chosen line of their ledger."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxdp.training import ledger

_ROOT = Path(__file__).resolve().parents[2]
#: Environment of processes whose runs wait for a signal after their first chunk.
WAITING = {
    "PYTHONPATH": os.pathsep.join((str(_ROOT / "tests" / "waiting"), str(_ROOT)))
}


class Killed(Exception):
    """Stands for the end of the process."""


def count_lines(folder: Path) -> int:
    """Counts the lines of a run's ledger: 3 after its first chunk."""
    path = folder / ledger.LEDGER
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextlib.contextmanager
def killed(
    lines: int, *, checkpoint: bool = False, ahead: bool = False
) -> Iterator[None]:
    """A run within ends when its ledger has so many lines.

    Args:
      lines: of the ledger; 1 is its header.
      checkpoint: it ends before the line after them, so with the checkpoint that follows
        the last one. Else at once.
      ahead: the last of these lines is in ``secret/`` only: it ends between the writes.
    """
    append, save = ledger.Ledger._append, ledger.Ledger.save

    def dying(self: ledger.Ledger, fields: dict[str, Any]) -> None:
        if count_lines(self.folder) >= lines:
            raise Killed
        append(self, fields)
        if count_lines(self.folder) >= lines and not checkpoint:
            raise Killed

    def saving(self: ledger.Ledger, name: str, content: bytes, *, secret: bool) -> None:
        save(self, name, content, secret=secret)
        if ahead and name == "chain.json" and count_lines(self.folder) == lines - 1:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(ledger.Ledger, "_append", dying)
        patch.setattr(ledger.Ledger, "save", saving)
        yield
        pytest.fail(f"ended before its ledger had {lines} lines")
