"""The file format of releases: what is written is read, torn or foreign lines are not."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from jaxdp import ledger

HEADER = {"run": "0123", "plan": "{}"}


def create(folder: Path) -> ledger.Ledger:
    return ledger.Ledger.create(
        folder, plan="{}", header=HEADER, secret={"keys": "deep"}
    )


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
        assert secret == {"keys": "deep", "run": "0123"}
        assert found.outstanding is None
        book.intend(2, 3, 0)  # Where the torn line was.
    assert ledger.read(tmp_path).intents == ((0, 2, 0), (2, 3, 0))


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
    path.write_text(json.dumps({"keys": "deep", "run": "4567"}))
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
            tmp_path / "run", plan="{}", header=HEADER | {"x": {1}}, secret={}
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
    assert {p.name for p in hidden.iterdir()} == {"run.json", "checkpoint", "lock"}
    (hidden / "run.json").unlink()
    with pytest.raises(ValueError, match="secrets"):
        ledger.Ledger.open(tmp_path / "run")
