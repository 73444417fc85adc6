"""The record of a run: every number that leaves it, written before it is used.

A run's folder::

    plan.json      the plan                                            public
    ledger.jsonl   a header, then two lines a chunk of steps           public
    report.json    what was spent, when the run is over                public
    secret/        keys, keyed digests, last checkpoint, a lock        mode 0700

Before a chunk is computed its *intent* is written and synchronised with the disk, after
it its *releases*: from the intent on, its steps count as released, whatever becomes of
the process. Lines of ``ledger.jsonl``, JSON each::

    {"ledger": 1, "run": ..., "plan": {...}, "direction": ..., ...}
    {"intent": [first, last], "attempt": 0}
    {"releases": [first, last], "float32": "base64 of little-endian (last - first, R)"}

A line counts when its line feed has been written. The folder holds no hash of a key or
of data outside ``secret/``: either could be tried out.
"""

import base64
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np

try:
    import fcntl
except ImportError:  # Not on Windows, where nothing keeps two processes apart.
    fcntl = None

FORMAT = 1
PLAN, LEDGER, REPORT, SECRET = "plan.json", "ledger.jsonl", "report.json", "secret"
#: In ``secret/``: what a run needs to go on.
RUN = "run.json"
_LOCK = "lock"


class Intent(NamedTuple):
    """Steps [first, last) that were going to be released."""

    first: int
    last: int
    attempt: int


class Record(NamedTuple):
    """What a ledger says.

    Attributes:
      header: what the run was.
      releases: float32 (steps, R) of the steps [0, steps): a state's ``release`` each.
      intents: in the order of writing.
    """

    header: dict[str, Any]
    releases: np.ndarray
    intents: tuple[Intent, ...]

    @property
    def outstanding(self) -> Intent | None:
        """The intent whose releases are missing, if there is one."""
        last = self.intents[-1] if self.intents else None
        return last if last is not None and last.last > len(self.releases) else None

    @property
    def charged(self) -> int:
        """Steps that count as released: those of every intent."""
        return sum(intent.last - intent.first for intent in self.intents)


def read(folder: str | os.PathLike[str]) -> Record:
    """Reads a run's ledger.

    Args:
      folder: the run's folder, or its ``ledger.jsonl``.

    Raises:
      ValueError: no such file, or lines that no run writes; names the line.
    """
    path = pathlib.Path(folder)
    path = path / LEDGER if path.is_dir() else path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"ledger must be a run's folder or its {LEDGER}, got {str(path)!r}: {error}"
        ) from error
    header: dict[str, Any] | None = None
    parts: list[np.ndarray] = []
    intents: list[Intent] = []
    done = 0
    for number, line in enumerate(_whole_lines(text), start=1):
        try:
            fields = json.loads(line)
            if header is None:
                if fields["ledger"] != FORMAT:
                    raise ValueError(f"format {fields['ledger']!r}")
                header = fields
            elif "intent" in fields:
                first, last = fields["intent"]
                intents.append(Intent(first, last, fields["attempt"]))
                if intents[-1].first != done or intents[-1].last <= done:
                    raise ValueError(f"steps {fields['intent']} after step {done}")
            else:
                part = _decode(fields)
                if not intents or [done, intents[-1].last] != fields["releases"]:
                    raise ValueError(f"steps {fields['releases']} without intent")
                parts.append(part)
                done += len(part)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"ledger must be one that a run wrote, got {str(path)!r}, line {number}: "
                f"{error!r}"
            ) from error
    if header is None:
        raise ValueError(f"ledger must have a header, got {str(path)!r} without one")
    releases = np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)
    return Record(header, releases, tuple(intents))


def _whole_lines(text: bytes) -> Iterator[bytes]:
    """Lines that end: a torn last one was never written."""
    yield from text[: text.rfind(b"\n") + 1].splitlines()


def _decode(fields: dict[str, Any]) -> np.ndarray:
    first, last = fields["releases"]
    flat = np.frombuffer(
        base64.b64decode(fields["float32"], validate=True), dtype="<f4"
    )
    return flat.reshape(last - first, -1).astype(np.float32)


class Ledger:
    """A run's folder, held by one process. Make it with ``create`` or ``open``."""

    def __init__(self, folder: pathlib.Path, lock: Any):
        self.folder = folder
        self._lock = lock
        self._file = open(folder / LEDGER, "r+b")  # noqa: SIM115  (closed by close)

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        plan: str,
        header: dict[str, Any],
        secret: dict[str, Any],
    ) -> Self:
        """Makes the folder of a new run and writes what is known before it.

        Args:
          folder: may exist, without a ledger.
          plan: the plan's JSON.
          header: public; the fields of the first line, ``run`` among them.
          secret: goes to ``secret/run.json``.

        Raises:
          ValueError: the folder holds a ledger, which is the record of another run, or
            another process makes one there.
          OSError: it cannot be written.
        """
        path = pathlib.Path(folder)
        line = json.dumps({"ledger": FORMAT} | header) + "\n"
        hidden = json.dumps(secret | {"run": header["run"]})
        lock = _locked(path)
        try:
            check_new(path)
            replace(path / SECRET / RUN, hidden.encode(), mode=0o600)
            replace(path / PLAN, (plan + "\n").encode())
            replace(path / LEDGER, line.encode())
            _sync_folder(path.parent)
            return cls(path, lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str]
    ) -> tuple[Self, Record, dict[str, Any]]:
        """Takes up the folder of a run: the ledger, what it says, and the secrets.

        Raises:
          ValueError: no ledger, one in use by another process, or other secrets.
        """
        path = pathlib.Path(folder)
        read(path)  # Its message where there is none.
        lock = _locked(path)
        try:
            record, secret = read(path), _secrets(path)
            if secret.get("run") != record.header["run"]:
                raise ValueError(
                    f"ledger must have its own {SECRET}/{RUN}, got {str(path)!r} with "
                    "that of another run"
                )
            ledger = cls(path, lock)
            ledger._cut_torn_line()
        except BaseException:
            lock.close()
            raise
        return ledger, record, secret

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        whole = self._file.read().rfind(b"\n") + 1
        self._file.truncate(whole)
        os.fsync(self._file.fileno())

    def intend(self, first: int, last: int, attempt: int) -> None:
        """Writes that the steps [first, last) will be released: they count from now on."""
        self._append({"intent": [first, last], "attempt": attempt})

    def record(self, first: int, releases: np.ndarray) -> None:
        """Writes releases float32 (steps, R), of the steps from ``first`` on."""
        data = np.ascontiguousarray(releases, dtype="<f4").tobytes()
        text = base64.b64encode(data).decode()
        self._append({"releases": [first, first + len(releases)], "float32": text})

    def _append(self, fields: dict[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        line = json.dumps(fields, separators=(",", ":")) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def save(self, name: str, content: bytes, *, secret: bool) -> None:
        """Writes a file of the folder, whole or not at all."""
        path = self.folder / SECRET / name if secret else self.folder / name
        replace(path, content, mode=0o600 if secret else 0o644)

    def load(self, name: str) -> bytes | None:
        """A file of ``secret/``; None if there is none."""
        try:
            return (self.folder / SECRET / name).read_bytes()
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Lets another process take up the folder."""
        self._file.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_new(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError if the folder holds the record of a run."""
    if (pathlib.Path(folder) / LEDGER).exists():
        raise ValueError(
            f"ledger must be a folder without a run, got {str(folder)!r}, which holds "
            "one: resume it, or choose another folder"
        )


def discard(folder: str | os.PathLike[str]) -> None:
    """Removes the record of a run, unless it is still going on.

    Raises:
      ValueError: another process holds it.
    """
    path = pathlib.Path(folder)
    with _locked(path):
        for name in (LEDGER, PLAN, REPORT):
            (path / name).unlink(missing_ok=True)
        for file in (path / SECRET).iterdir():
            if file.name != _LOCK:
                file.unlink()


def _secrets(folder: pathlib.Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / SECRET / RUN).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"ledger must have its secrets to go on, got {str(folder)!r}: {error}"
        ) from error


def _locked(folder: pathlib.Path) -> Any:
    """The open lock of a folder, which is made if need be; closing it lets go."""
    hidden = folder / SECRET
    folder.mkdir(parents=True, exist_ok=True)
    hidden.mkdir(mode=0o700, exist_ok=True)
    hidden.chmod(0o700)
    descriptor = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    file = os.fdopen(descriptor, "r+b")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            why = "which another run holds"
        else:
            why = f"whose file system has no locks ({error})"
        raise ValueError(
            f"ledger must be a folder of one run at a time, got {str(folder)!r}, {why}"
        ) from error
    return file


def replace(path: pathlib.Path, content: bytes, mode: int = 0o644) -> None:
    """Writes a file under another name, then renames it: never half of it is there."""
    part = path.with_name(path.name + ".part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(part, flags, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(folder: pathlib.Path) -> None:
    """Makes a rename last, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
