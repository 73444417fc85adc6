"""Runs that end as a killed process does: at a chosen line of their ledger."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxdp.training import ledger


class Killed(Exception):
    """Stands for the end of the process."""


def _lines(book: ledger.Ledger) -> int:
    return (book.folder / ledger.LEDGER).read_bytes().count(b"\n")


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
        if _lines(self) >= lines:
            raise Killed
        append(self, fields)
        if _lines(self) >= lines and not checkpoint:
            raise Killed

    def saving(self: ledger.Ledger, name: str, content: bytes, *, secret: bool) -> None:
        save(self, name, content, secret=secret)
        if ahead and name == "chain.json" and _lines(self) == lines - 1:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(ledger.Ledger, "_append", dying)
        patch.setattr(ledger.Ledger, "save", saving)
        yield
        pytest.fail(f"ended before its ledger had {lines} lines")
