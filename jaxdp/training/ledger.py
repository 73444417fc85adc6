"""The record of a run: every number that leaves it, written before it is used.

A run's folder::

    plan.json      the plan                                            public
    ledger.jsonl   a header, then two lines a chunk of steps           public
    report.json    what was spent, when the run is over                public
    secret/        keys, keyed digests, checkpoints, the chain, a lock mode 0700

Before a chunk is computed its *intent* is written and synchronised with the disk, after
it its *releases*: from the intent on, its steps count as released, whatever becomes of
the process. Lines of ``ledger.jsonl``, JSON each::

    {"ledger": 1, "run": ..., "plan": {...}, "direction": ..., ...}
    {"intent": [first, last], "attempt": 0}
    {"releases": [first, last], "float32": "base64 of little-endian (last - first, R)"}

A line counts when its line feed has been written. The folder holds no hash of a key or
of data outside ``secret/``: either could be tried out.

Whoever can write the public part must not decide what the next process takes for
released: the same noise would cover other sums. So ``secret/chain.json`` has a chain over
the plan and all lines, each link an HMAC of the one before and a line, under a key that
lies in ``secret/`` too. It is written *ahead*: the link of the lines that are there,
together with the line that comes next, then that line itself. A process that takes up the
folder finds one of two states, and puts the first right:

* all lines but the next one (and perhaps a torn part of it): the process ended between the
  two writes. The line is appended from ``secret/``: an intent counts as made, releases are
  not computed again.
* all lines and the next one.

Anything else is refused: a ledger that is shorter, longer, edited, of another plan or
another run, with another attempt's number. There is no kill that leads there, and no way
back, for what a cut would take away is appended again. (Who can also turn back ``secret/``
has the keys, and needs none of this.)
"""

import base64
import errno
import hashlib
import hmac
import json
import os
import pathlib
import secrets
import tempfile
from typing import Any, NamedTuple, Self

import numpy as np

try:
    import fcntl
except ImportError:  # Not on Windows, where nothing keeps two processes apart.
    fcntl = None

__all__ = ["Intent", "Record", "discard", "read", "verify"]

FORMAT = 1
PLAN, LEDGER, REPORT, SECRET = "plan.json", "ledger.jsonl", "report.json", "secret"
#: In ``secret/``: what a run needs to go on.
RUN = "run.json"
LOCK, _CHAIN = "lock", "chain.json"
#: There, too: the last checkpoint, and the one before it, from which the last chunk is
#: computed again.
CHECKPOINT, BEFORE = "checkpoint.npz", "checkpoint-before.npz"
#: What large runs that can be replayed write in place of checkpoints: by it a replay is
#: seen to give the same parameters.
DIGEST = "params.json"
#: What a run took: for its owner. How long a step takes may depend on records.
TIMING = "timing.json"
#: In ``secret/``: under which name a run was reserved in a budget (training/budgets.py).
RESERVED = "reserved"
_HIDDEN = (RUN, LOCK, _CHAIN, CHECKPOINT, BEFORE, DIGEST, TIMING, RESERVED)


class Intent(NamedTuple):
    """Steps [first, last) that were going to be released.

    Example:
      >>> import jaxdp
      >>> intent = jaxdp.ledger.Intent(first=0, last=3, attempt=0)
      >>> intent.last - intent.first
      3
    """

    first: int
    last: int
    attempt: int


class Record(NamedTuple):
    """Content of a ledger.

    Example:
      >>> import tempfile
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
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     result = jaxdp.fit(plan, keys, params, data, ledger=folder, **task)
      ...     record = jaxdp.ledger.read(folder)
      >>> record.releases.shape, record.charged, record.outstanding
      ((3, 1), 3, None)
    """

    header: dict[str, Any]  # what the run was
    releases: np.ndarray  # float32 (steps, R): a state's ``release`` each
    intents: tuple[Intent, ...]  # in the order of writing

    @property
    def outstanding(self) -> Intent | None:
        """The intent whose releases are missing, if there is one."""
        last = self.intents[-1] if self.intents else None
        return last if last is not None and last.last > len(self.releases) else None

    @property
    def last_recorded(self) -> Intent | None:
        """The intent of the last chunk whose releases are there, if there is one."""
        done = len(self.releases)
        return next((i for i in reversed(self.intents) if i.last == done), None)

    @property
    def charged(self) -> int:
        """Steps that count as released: those of every intent."""
        return sum(intent.last - intent.first for intent in self.intents)


def read(folder: str | os.PathLike[str]) -> Record:
    """Reads a run's ledger, of its folder or from its ``ledger.jsonl``.

    Raises:
      ValueError: no such file, or lines that no run writes; names the line.

    Example:
      >>> import tempfile
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
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     result = jaxdp.fit(plan, keys, params, data, ledger=folder, **task)
      ...     record = jaxdp.ledger.read(folder)
      >>> record.header["plan"]["plan"], record.releases.shape
      ('DPZero', (3, 1))
    """
    path = pathlib.Path(folder)
    path = path / LEDGER if path.is_dir() else path
    return parsed(_content(path), path)


def verify(folder: str | os.PathLike[str]) -> Record:
    """Reads a run's ledger, verified as by :meth:`Ledger.open`, and unlocks the folder.

    For what is read of a run that will go on: nothing of a ledger that somebody edited
    should decide what is done with private records.

    Example:
      >>> import tempfile
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
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     result = jaxdp.fit(plan, keys, params, data, ledger=folder, **task)
      ...     record = jaxdp.ledger.verify(folder)
      >>> record.charged
      3
    """
    path = pathlib.Path(folder)
    read(path)  # Its message where there is none.
    with _locked(path):
        return _authentic(path).record


def _content(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(
            f"ledger must be a run's folder or its {LEDGER}, got {str(path)!r}, which is "
            "not there; a run that was killed before it wrote one released nothing, and "
            "may be started again"
        ) from error
    except OSError as error:
        raise ValueError(
            f"ledger must be a run's folder or its {LEDGER}, got {str(path)!r}: {error}"
        ) from error


def parsed(text: bytes, path: str | os.PathLike[str]) -> Record:
    """Parses the lines of a ledger; errors name ``path`` and the line."""
    header: dict[str, Any] | None = None
    parts: list[np.ndarray] = []
    intents: list[Intent] = []
    done = 0
    for number, line in enumerate(_whole(text).splitlines(), start=1):
        try:
            fields = json.loads(line)
            if header is None:
                if fields["ledger"] != FORMAT:
                    raise ValueError(
                        f"format {fields['ledger']!r}, where this version of jaxdp reads "
                        f"{FORMAT}: a newer version wrote it"
                    )
                header = fields
            elif "intent" in fields:
                first, last = fields["intent"]
                intents.append(Intent(first, last, fields["attempt"]))
                if intents[-1].first != done or intents[-1].last <= done:
                    raise ValueError(f"steps {fields['intent']} after step {done}")
            else:
                first, last = fields["releases"]
                if not intents or (done, intents[-1].last) != (first, last):
                    raise ValueError(f"steps {fields['releases']} without intent")
                content = base64.b64decode(fields["float32"], validate=True)
                flat = np.frombuffer(content, dtype="<f4").astype(np.float32)
                parts.append(flat.reshape(last - first, -1))
                done = last
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"ledger must be one that a run wrote, got {os.fspath(path)!r}, line "
                f"{number}: {error!r}"
            ) from error
    if header is None:
        raise ValueError(f"ledger must have a header, got {str(path)!r} without one")
    releases = np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)
    return Record(header, releases, tuple(intents))


def _whole(text: bytes) -> bytes:
    """Returns the complete lines: a torn last one was never written."""
    return text[: text.rfind(b"\n") + 1]


class _Chain(NamedTuple):
    """The keyed chain over a ledger's lines, up to those that have been written."""

    key: bytes  # of the HMACs
    start: bytes  # the link before the first line: of the plan
    lines: int  # that are covered
    link: bytes  # of the last of them

    @classmethod
    def begin(cls, key: bytes, plan: bytes) -> Self:
        """Returns the chain of no lines; ``plan`` is the content of ``plan.json``."""
        start = hmac.digest(key, b"plan:" + hashlib.sha256(plan).digest(), "sha256")
        return cls(key, start, 0, start)

    def then(self, line: bytes) -> Self:
        """Returns the chain with one more line, given without its line feed."""
        link = hmac.digest(self.key, self.link + line, "sha256")
        return self._replace(lines=self.lines + 1, link=link)

    def ahead(self, line: bytes | None) -> bytes:
        """Returns the content of ``chain.json`` before ``line`` is appended."""
        following = None if line is None else line.decode()
        links = {"plan": self.start.hex(), "lines": self.lines, "link": self.link.hex()}
        return json.dumps(links | {"next": following}).encode()


class _Authentic(NamedTuple):
    """A ledger whose lines are those that the run wrote."""

    record: Record
    lines: bytes  # what it was parsed from: the file may be edited since
    secret: dict[str, Any]
    chain: _Chain
    size: int  # of its whole lines, in bytes
    missing: bytes  # the line that has still to be appended


def _authentic(path: pathlib.Path) -> _Authentic:
    """Verifies a ledger; ValueError unless its lines are those that the run wrote, all."""
    text, secret = _whole(_content(path / LEDGER)), _secrets(path)
    record = parsed(text, path / LEDGER)
    if secret.get("run") != record.header["run"]:
        raise ValueError(
            f"ledger must have its own {SECRET}/{RUN}, got {str(path)!r} with "
            "that of another run"
        )
    key = bytes.fromhex(secret["key"])
    try:
        known = json.loads((path / SECRET / _CHAIN).read_bytes())
        chain = _Chain.begin(key, (path / PLAN).read_bytes())
        count, link = known["lines"], bytes.fromhex(known["link"])
        begun, following = bytes.fromhex(known["plan"]), known["next"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"ledger must have its {PLAN} and {SECRET}/{_CHAIN} to go on, got "
            f"{str(path)!r}: {error!r}"
        ) from error
    lines = text.split(b"\n")[:-1]
    ahead = [] if following is None else [following.encode()]
    more, why = lines[count:], ""
    if not hmac.compare_digest(chain.start, begun):
        why = f"its {PLAN} is another than that of the run"
    elif len(lines) < count:
        why = f"it was cut back: {len(lines)} lines are left of {count + len(ahead)}"
    else:
        for line in lines[:count]:
            chain = chain.then(line)
        if not hmac.compare_digest(chain.link, link) or (more and more != ahead):
            why = (
                "it was edited or exchanged: its lines are not those that the run wrote"
            )
    if why:
        raise ValueError(
            f"ledger must be as its run left it, got {str(path)!r}, but {why}. Steps "
            "that were released could be released again, with the same noise over other "
            f"sums. Restore {LEDGER} and {PLAN}, or begin another run"
        )
    missing, size = ahead[0] if ahead and not more else b"", len(text)
    if missing:
        text += missing + b"\n"
        record = parsed(text, path / LEDGER)
    for line in ahead:
        chain = chain.then(line)
    return _Authentic(record, text, secret, chain, size, missing)


class Ledger:
    """A run's folder, held by one process. Make it with ``create`` or ``open``."""

    def __init__(
        self, folder: pathlib.Path, lock: Any, chain: _Chain, lines: bytes = b""
    ):
        self.folder = folder
        self.verified = lines  # those that were there when it was opened
        self._lock = lock
        self._chain = chain
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
          folder: may exist, without a ledger (ValueError) and another process in it.
          plan: the plan's JSON.
          header: public; the fields of the first line, ``run`` among them.
          secret: for ``secret/run.json``; ``key``, 32 bytes in hexadecimal, is the chain's.
        """
        path = pathlib.Path(folder)
        line = json.dumps({"ledger": FORMAT} | header).encode()
        hidden = json.dumps(secret | {"run": header["run"]})
        content = (plan + "\n").encode()
        chain = _Chain.begin(bytes.fromhex(secret["key"]), content).then(line)
        lock = _locked(path)
        try:
            check_new(path)
            replace(path / SECRET / RUN, hidden.encode(), mode=0o600)
            replace(path / SECRET / _CHAIN, chain.ahead(None), mode=0o600)
            replace(path / PLAN, content)
            replace(path / LEDGER, line + b"\n")
            _sync_folder(path.parent)
            return cls(path, lock, chain)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str]
    ) -> tuple[Self, Record, dict[str, Any]]:
        """Opens the folder of a run; returns the ledger, its record and its secrets.

        Raises:
          ValueError: no ledger, one in use by another process, other secrets, or lines
            that are not those that the run wrote.
        """
        path = pathlib.Path(folder)
        read(path)  # Its message where there is none.
        lock = _locked(path)
        try:
            found = _authentic(path)
            ledger = cls(path, lock, found.chain, found.lines)
            # Cuts a torn line off, and appends the one that was written ahead.
            ledger._file.truncate(found.size)
            ledger._write(found.missing)
        except BaseException:
            lock.close()
            raise
        return ledger, found.record, found.secret

    def _write(self, line: bytes) -> None:
        """Appends a line, if there is one, and synchronises the file with the disk."""
        if line:
            self._file.seek(0, os.SEEK_END)
            self._file.write(line + b"\n")
            self._file.flush()
        os.fsync(self._file.fileno())

    def intend(self, first: int, last: int, attempt: int) -> None:
        """Writes the intent to release the steps [first, last): they count from now on."""
        self._append({"intent": [first, last], "attempt": attempt})

    def record(self, first: int, releases: np.ndarray) -> None:
        """Writes releases float32 (steps, R), of the steps from ``first`` on."""
        data = np.ascontiguousarray(releases, dtype="<f4").tobytes()
        text = base64.b64encode(data).decode()
        self._append({"releases": [first, first + len(releases)], "float32": text})

    def _append(self, fields: dict[str, Any]) -> None:
        line = json.dumps(fields, separators=(",", ":")).encode()
        self.save(_CHAIN, self._chain.ahead(line), secret=True)
        self._write(line)
        self._chain = self._chain.then(line)

    def save(self, name: str, content: bytes, *, secret: bool) -> None:
        """Writes a file of the folder, whole or not at all."""
        _check_lock(self._lock, self.folder)
        path = self.folder / SECRET / name if secret else self.folder / name
        replace(path, content, mode=0o600 if secret else 0o644)

    def load(self, name: str) -> bytes | None:
        """Reads a file of ``secret/``; returns None if there is none."""
        try:
            return (self.folder / SECRET / name).read_bytes()
        except FileNotFoundError:
            return None

    def supersede(self, name: str, by: str, content: bytes) -> None:
        """Writes a file of ``secret/``; the one that was there keeps the name ``by``."""
        _check_lock(self._lock, self.folder)  # Also before a file is renamed.
        path = self.folder / SECRET / name
        if path.exists():
            os.replace(path, path.with_name(by))
        self.save(name, content, secret=True)

    def forget(self, name: str) -> None:
        """Removes a file of ``secret/``, if it is there."""
        _check_lock(self._lock, self.folder)
        (self.folder / SECRET / name).unlink(missing_ok=True)
        _sync_folder(self.folder / SECRET)

    def close(self) -> None:
        """Closes the ledger and unlocks its folder for other processes."""
        self._file.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_new(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError if the folder holds the record of a run, or cannot be made."""
    path = pathlib.Path(folder).absolute()
    try:  # A folder of this name beside it: what the system allows, only trying tells.
        there = next(x for x in (path, *path.parents) if os.path.lexists(x))
        rest = path.relative_to(there)
        if ".." in rest.parts:  # It would lead out of what is tried.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with tempfile.TemporaryDirectory(dir=there) as probe:
            pathlib.Path(probe, rest).mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path / SECRET) and not (path / SECRET).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{SECRET}: not a folder")
        for name in (PLAN, REPORT, *(f"{SECRET}/{x}" for x in _HIDDEN)):
            if (path / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{name}: a folder")
    except OSError as error:
        raise ValueError(
            f"ledger must be a folder that can be written, got {str(folder)!r}: "
            f"{error.strerror}"
        ) from None
    if (pathlib.Path(folder) / LEDGER).exists():
        raise ValueError(
            f"ledger must be a folder without a run, got {str(folder)!r}, which holds "
            "one: resume it, or choose another folder"
        )
    if (path / SECRET).is_symlink() and (path / SECRET / RUN).exists():
        raise ValueError(
            f"ledger must be a folder with a {SECRET} of its own, got {str(folder)!r}, "
            f"whose {SECRET} is a link to that of another run, or of one that was killed "
            "as it began"
        )


def discard(folder: str | os.PathLike[str]) -> None:
    """Removes the record of a run; ValueError while another process holds it.

    Example:
      >>> import tempfile
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
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     result = jaxdp.fit(plan, keys, params, data, ledger=folder, **task)
      ...     jaxdp.ledger.discard(folder)
      ...     again = jaxdp.fit(plan, keys, params, data, ledger=folder, **task)
      >>> again.report["steps_charged"]
      3
    """
    path = pathlib.Path(folder)
    with _locked(path):
        for name in (LEDGER, REPORT):
            (path / name).unlink(missing_ok=True)
        for file in (path / SECRET).iterdir():
            if file.name not in (LOCK, RESERVED):
                file.unlink()
        (path / PLAN).unlink(missing_ok=True)  # Last: it shows whose folder it is.


def reserved(folder: str | os.PathLike[str] | None) -> str:
    """Returns the name under which a run in a folder was last reserved; "" without."""
    if folder is None:
        return ""
    try:
        content = (pathlib.Path(folder) / SECRET / RESERVED).read_bytes()
    except OSError:
        return ""
    return content.decode("ascii", "replace")


def reserve(folder: str | os.PathLike[str]) -> str:
    """Writes a new name for the run that will be in a folder, and returns it."""
    path, name = pathlib.Path(folder), secrets.token_hex(16)
    with _locked(path):
        check_new(path)
        replace(path / SECRET / RESERVED, name.encode(), mode=0o600)
    return name


def _secrets(folder: pathlib.Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / SECRET / RUN).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"ledger must have its secrets to go on, got {str(folder)!r}: {error}"
        ) from error


def _locked(folder: pathlib.Path) -> Any:
    """Locks a folder, made if missing; closing the returned file unlocks it."""
    hidden = folder / SECRET
    folder.mkdir(parents=True, exist_ok=True)
    hidden.mkdir(mode=0o700, exist_ok=True)
    hidden.chmod(0o700)
    descriptor = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
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
    try:
        _check_lock(file, folder)
    except BaseException:
        file.close()
        raise
    return file


def _check_lock(file: Any, folder: pathlib.Path) -> None:
    """Requires that the file that is locked is the folder's lock: else another has it."""
    try:
        there = os.stat(folder / SECRET / LOCK)
    except FileNotFoundError:
        there = None
    if there is None or not os.path.samestat(os.fstat(file.fileno()), there):
        raise ValueError(
            "ledger must keep its lock while it is written, got "
            f"{str(folder)!r}, whose {SECRET}/{LOCK} was removed or exchanged: another "
            "run may have taken the folder"
        )


def replace(path: pathlib.Path, content: bytes, mode: int = 0o644) -> None:
    """Replaces a file as a whole: writes it under another name, then renames it."""
    part = path.with_name(path.name + ".part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(part, flags, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(folder: pathlib.Path) -> None:
    """Synchronises a folder with the disk, where the system can, so that renames last."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def __dir__() -> list[str]:
    """Lists the names for users; the rest is for what writes the record."""
    return sorted(__all__)
