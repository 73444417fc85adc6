"""The file format of releases: what is written is read, torn or foreign lines are not."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from jaxdp.training import ledger

HEADER = {"run": "0123", "plan": "{}"}


SECRET = {"keys": "deep", "key": "0f" * 32}


def create(folder: Path) -> ledger.Ledger:
    return ledger.Ledger.create(folder, plan="{}", header=HEADER, secret=SECRET)


def rows(first: int, last: int, width: int = 3) -> np.ndarray:
    """Awkward numbers: no two alike, with a NaN, an infinity and a subnormal."""
    out = np.random.default_rng(first).normal(size=(last - first, width))
    out[0] = [np.nan, -np.inf, 1e-42][:width]
    return out.astype(np.float32)


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    with create(tmp_path / "run") as book:
        for first, last in ((0, 4), (4, 5)):
            book.intend(first, last, 0)
            book.record(first, rows(first, last))
        book.intend(5, 9, 0)
    found = ledger.read(tmp_path / "run")
    assert found.header == {"ledger": 1} | HEADER
    want = np.concatenate([rows(0, 4), rows(4, 5)])
    np.testing.assert_array_equal(found.releases.view(np.uint32), want.view(np.uint32))
    assert found.intents == ((0, 4, 0), (4, 5, 0), (5, 9, 0))
    assert found.outstanding == (5, 9, 0)
    assert found.charged == 9
    by_file = ledger.read(tmp_path / "run" / ledger.LEDGER)
    assert by_file.intents == found.intents


def test_lines_are_json_and_small(tmp_path: Path) -> None:
    with create(tmp_path) as book:
        for first in range(0, 10_000, 100):
            book.intend(first, first + 100, 0)
            book.record(first, rows(first, first + 100, 1))
    path = tmp_path / ledger.LEDGER
    assert path.stat().st_size < 100_000
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_second_attempt_charges_again(tmp_path: Path) -> None:
    with create(tmp_path) as book:
        book.intend(0, 4, 0)
        book.intend(0, 3, 1)
        book.record(0, rows(0, 3))
    found = ledger.read(tmp_path)
    assert found.outstanding is None
    assert (len(found.releases), found.charged) == (3, 7)


def test_a_torn_line_was_never_written(tmp_path: Path) -> None:
    with create(tmp_path) as book:
        book.intend(0, 2, 0)
        book.record(0, rows(0, 2))
        book.intend(2, 4, 0)
    path = tmp_path / ledger.LEDGER
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[0] + 1, len(whole)):
        path.write_bytes(whole[:size])
        found = ledger.read(tmp_path)
        lines = whole[:size].count(b"\n")
        assert len(found.intents) == (lines >= 2) + (lines >= 4)
        assert len(found.releases) == 2 * (lines >= 3)
    path.write_bytes(whole[:-5])
    book, found, secret = ledger.Ledger.open(tmp_path)
    with book:
        assert secret == SECRET | {"run": "0123"}
        # It was written ahead in ``secret/``: what was going to be released counts.
        assert found.outstanding == (2, 4, 0)
        assert path.read_bytes() == whole
        book.record(2, rows(2, 4))
    assert len(ledger.read(tmp_path).releases) == 4
    ledger.Ledger.open(tmp_path)[0].close()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "without one"),
        ([{"ledger": 2}], "format 2"),
        (["?"], "line 1"),
        ([{"ledger": 1}, {"intent": [1, 2], "attempt": 0}], "line 2.*after step 0"),
        ([{"ledger": 1}, {"intent": [0, 0], "attempt": 0}], "line 2"),
        ([{"ledger": 1}, {"intent": [0, 1]}], "line 2.*attempt"),
        ([{"ledger": 1}, {"releases": [0, 1], "float32": "AAAA"}], "line 2"),
        ([{"ledger": 1}, {"releases": [0, 1], "float32": "AAAAAA=="}], "without inten"),
        ([{"ledger": 1}, {"other": 1}], "line 2"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, lines: list, message: str) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / ledger.LEDGER).write_text(text)
    with pytest.raises(ValueError, match=message):
        ledger.read(tmp_path)


def test_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ledger must be a run's folder"):
        ledger.read(tmp_path)
    with pytest.raises(ValueError, match="ledger must be a run's folder"):
        ledger.Ledger.open(tmp_path / "none")


def test_one_process_at_a_time_and_no_overwriting(tmp_path: Path) -> None:
    with create(tmp_path), pytest.raises(ValueError, match="another run holds"):
        ledger.Ledger.open(tmp_path)
    with pytest.raises(ValueError, match="without a run"):
        create(tmp_path)
    ledger.Ledger.open(tmp_path)[0].close()


def test_secrets_of_another_run_are_refused(tmp_path: Path) -> None:
    create(tmp_path).close()
    path = tmp_path / ledger.SECRET / ledger.RUN
    path.write_text(json.dumps(SECRET | {"run": "4567"}))
    with pytest.raises(ValueError, match="that of another run"):
        ledger.Ledger.open(tmp_path)
    create(tmp_path / "other").close()  # Nothing is held.


def test_a_run_that_goes_on_is_not_discarded(tmp_path: Path) -> None:
    with create(tmp_path), pytest.raises(ValueError, match="another run holds"):
        ledger.discard(tmp_path)
    assert ledger.read(tmp_path).header["run"] == "0123"
    ledger.discard(tmp_path)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["lock"]
    create(tmp_path).close()


def test_header_that_json_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        ledger.Ledger.create(
            tmp_path / "run", plan="{}", header=HEADER | {"x": {1}}, secret=SECRET
        )
    assert not (tmp_path / "run").exists()


def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)  # The widest: modes must not depend on it.
    try:
        with create(tmp_path / "run") as book:
            book.save("checkpoint", b"x", secret=True)
            book.save("report.json", b"{}", secret=False)
    finally:
        os.umask(before)
    hidden = tmp_path / "run" / ledger.SECRET
    assert stat.S_IMODE(hidden.stat().st_mode) == 0o700
    for path in hidden.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {p.name for p in hidden.iterdir()} == {
        *("run.json", "chain.json", "checkpoint", "lock")
    }
    (hidden / "run.json").unlink()
    with pytest.raises(ValueError, match="secrets"):
        ledger.Ledger.open(tmp_path / "run")


# --- who may write the public part does not decide what counts ------------------------


def written(folder: Path) -> list[bytes]:
    """A ledger of two chunks and an intent; its lines."""
    with create(folder) as book:
        for first, last in ((0, 2), (2, 4)):
            book.intend(first, last, 1)
            book.record(first, rows(first, last))
        book.intend(4, 6, 1)
    return (folder / ledger.LEDGER).read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_ledger_that_was_cut_back_is_refused(kept: int, tmp_path: Path) -> None:
    """All but its last line, which is put back: what a kill may leave, and no more."""
    lines = written(tmp_path)
    path = tmp_path / ledger.LEDGER
    path.write_bytes(b"".join(lines[:kept]))
    if kept < len(lines) - 1:
        with pytest.raises(ValueError, match=f"cut back: {kept} lines are left of 6"):
            ledger.Ledger.open(tmp_path)
        assert path.read_bytes() == b"".join(lines[:kept])
        path.write_bytes(b"".join(lines))
    book, found, _ = ledger.Ledger.open(tmp_path)
    book.close()
    assert found.outstanding == (4, 6, 1)
    assert path.read_bytes() == b"".join(lines)


def test_a_ledger_that_was_edited_is_refused(tmp_path: Path) -> None:
    lines = written(tmp_path)
    path = tmp_path / ledger.LEDGER
    other = json.loads(lines[2])["float32"]
    changes = {
        "an attempt turned back": (5, b'"attempt":1', b'"attempt":0'),
        "an earlier one": (1, b'"attempt":1', b'"attempt":0'),
        "a shorter intent": (5, b"[4,6]", b"[4,5]"),
        "a release": (4, json.loads(lines[4])["float32"].encode(), other.encode()),
        "the header": (0, b"0123", b'0123", "private": "no'),
        "a space": (4, b":", b": "),
    }
    for name, (number, old, new) in changes.items():
        line = lines[number].replace(old, new)
        assert line != lines[number], name
        edited = [*lines[:number], line, *lines[number + 1 :]]
        path.write_bytes(b"".join(edited))
        with pytest.raises(ValueError, match="edited or exchanged"):
            ledger.Ledger.open(tmp_path)
        assert path.read_bytes() == b"".join(edited), name
    # What a run might have written next, but did not.
    path.write_bytes(b"".join([*lines, lines[4].replace(b"[2,4]", b"[4,6]")]))
    with pytest.raises(ValueError, match="edited or exchanged"):
        ledger.Ledger.open(tmp_path)
    path.write_bytes(b"".join(lines))
    ledger.Ledger.open(tmp_path)[0].close()


def test_another_ledger_or_plan_is_refused(tmp_path: Path) -> None:
    """Of a run with the same name and key too: only the chain tells them apart."""
    lines = written(tmp_path / "one")
    with create(tmp_path / "other") as book:
        book.intend(0, 2, 0)
    path = tmp_path / "one" / ledger.LEDGER
    path.write_bytes((tmp_path / "other" / ledger.LEDGER).read_bytes())
    with pytest.raises(ValueError, match="cut back"):
        ledger.Ledger.open(tmp_path / "one")
    (tmp_path / "other" / ledger.LEDGER).write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="edited or exchanged"):
        ledger.Ledger.open(tmp_path / "other")
    path.write_bytes(b"".join(lines))
    plan = tmp_path / "one" / ledger.PLAN
    for content in ("{ }\n", "{}"):
        plan.write_text(content)
        with pytest.raises(ValueError, match="is another than that of the run"):
            ledger.Ledger.open(tmp_path / "one")
    plan.write_text("{}\n")
    ledger.Ledger.open(tmp_path / "one")[0].close()
    (tmp_path / "one" / ledger.SECRET / "chain.json").unlink()
    with pytest.raises(ValueError, match="to go on"):
        ledger.Ledger.open(tmp_path / "one")


@pytest.mark.parametrize("line", range(1, 6))
@pytest.mark.parametrize("where", ["before", "between", "torn", "after"])
def test_every_kill_can_be_taken_up(
    where: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the line is written ahead, between the two writes, within and after them."""
    whole = written(tmp_path / "whole")

    class Killed(Exception):
        pass

    def save(self: ledger.Ledger, name: str, content: bytes, *, secret: bool) -> None:
        dies = json.loads(content)["lines"] == line
        if dies and where == "before":
            raise Killed
        real(self, name, content, secret=secret)
        path = self.folder / ledger.LEDGER
        if dies and where != "between":
            torn = whole[line] if where == "after" else whole[line][:-1]
            path.write_bytes(path.read_bytes() + torn)
        if dies:
            raise Killed

    real = ledger.Ledger.save
    monkeypatch.setattr(ledger.Ledger, "save", save)
    with pytest.raises(Killed):
        written(tmp_path / "run")
    monkeypatch.setattr(ledger.Ledger, "save", real)
    ledger.Ledger.open(tmp_path / "run")[0].close()
    there = (tmp_path / "run" / ledger.LEDGER).read_bytes()
    assert there == b"".join(whole[: line + (where != "before")])
    ledger.Ledger.open(tmp_path / "run")[0].close()  # And once more.
