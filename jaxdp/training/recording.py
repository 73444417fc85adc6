"""What a run writes while it goes on, and how another process takes it up."""

import dataclasses
import hmac
import io
import json
import secrets
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import keys as keys_lib
from jaxdp import ledger as ledger_lib
from jaxdp.kernels import sphere
from jaxdp.plans._plan import Plan
from jaxdp.sampling import AdaptiveCursor
from jaxdp.training import loop, parallel, replaying, reporting
from jaxdp.transforms import _common

_CHECKPOINT = "checkpoint.npz"
#: Bytes of parameters beyond which a run that can be replayed writes no checkpoints: its
#: releases give them back sooner than they would be written a hundred times.
_LARGE = 2**26
#: What is written instead: by it a replay is seen to give the same parameters.
_DIGEST = "params.json"


class Recorder:
    """Writes intents, releases and checkpoints of one process's part of a run."""

    def __init__(
        self,
        ledger: ledger_lib.Ledger,
        run: str,
        attempt: int = 0,
        outstanding: ledger_lib.Intent | None = None,
        charged: int = 0,
        *,
        replayable: bool,
    ):
        self.ledger = ledger
        self._replayable = replayable
        #: Steps that count as released, those of every attempt.
        self.charged = charged
        self._run = run
        self._attempt = attempt
        self._outstanding = outstanding

    def before(self, first: int, last: int) -> None:
        """To be called before the steps [first, last) are computed."""
        intent = ledger_lib.Intent(first, last, self._attempt)
        if intent != self._outstanding:  # Computed again, with the noise of its intent.
            self.ledger.intend(*intent)
            self.charged += last - first
        self._outstanding = None

    def after(self, first: int, last: int, carry: loop.Carry) -> None:
        """To be called with the carry after them, before it is shown to anybody."""
        carry = parallel.here(carry)
        self.ledger.record(first, np.asarray(carry.releases)[first:last])
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(carry.params))
        if size <= _LARGE or not self._replayable:
            self.ledger.save(_CHECKPOINT, _pack(self._run, last, carry), secret=True)
        else:
            digest = replaying.digest_of(carry.params).hexdigest()
            content = {"run": self._run, "step": last, "params": digest}
            self.ledger.save(_DIGEST, json.dumps(content).encode(), secret=True)


class Program(NamedTuple):
    """What must be the same for the same steps to give the same bits, data aside."""

    microbatch_size: int | None
    devices: int  # that share a batch
    text: str  # of the program of a chunk: losses, optimizer and all else

    def conditions(self, key: bytes, data: Any) -> dict[str, Any]:
        """What is compared, data and text by digests with a key: for ``secret/``.

        Without the key nobody can try out data or losses against them.
        """

        def keyed(content: bytes) -> str:
            return hmac.new(key, content, "sha256").hexdigest()

        return {
            "data": keyed(replaying.digest_of(data).digest()),
            "microbatch_size": self.microbatch_size,
            "devices": self.devices,
            "jax": jax.__version__,
            "jaxlib": reporting.versions()["jaxlib"],
            "device": jax.devices()[0].device_kind,
            "losses, optimizer": keyed(self.text.encode()),
        }


def create(
    folder: Any,
    plan: Plan,
    keys: keys_lib.Keys,
    params: Any,
    data: Any,
    *,
    trainable: _common.Trainable,
    stacked: Any,
    program: Program,
    chunk: int,
    note: dict[str, Any],
) -> Recorder:
    """The folder of a new run."""
    moving, layered = replaying.chosen_leaves(params, trainable, stacked)
    words = keys_lib.to_hex(keys)
    run = secrets.token_hex(16)
    header = {
        "run": run,
        "private": keys.private,
        "plan": json.loads(plan.to_json()),
        "direction": words["direction"],
        "law": getattr(plan, "direction", None),
        "direction_version": sphere.VERSION,
        "prng": replaying.prng(),
        "leaves": replaying.describe_leaves(params),
        "trainable": moving,
        "stacked": layered,
        "params": replaying.digest_of(params).hexdigest(),
        "chunk": chunk,
        "microbatch_size": program.microbatch_size,
        "device": jax.devices()[0].device_kind,
        "versions": reporting.versions(),
        "note": note,
    }
    key = secrets.token_bytes(32)
    attempt = {"salt": "", "same": program.conditions(key, data)}
    hidden = {"keys": words, "key": key.hex(), "attempts": [attempt]}
    ledger = ledger_lib.Ledger.create(
        folder, plan=plan.to_json(), header=header, secret=hidden
    )
    return Recorder(ledger, run, replayable=plan.replayable)


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run stands that is taken up again.

    Attributes:
      ledger: open and locked.
      record: what it says.
      hidden: what ``secret/run.json`` says.
      plan: of the run.
      attempt: whose noise covers the next steps.
      new: whether that attempt begins now.
      keys: of that attempt.
      last: the step at which the budget ends.
    """

    ledger: ledger_lib.Ledger
    record: ledger_lib.Record
    hidden: dict[str, Any]
    plan: Plan
    attempt: int
    new: bool
    keys: keys_lib.Keys
    last: int

    @property
    def done(self) -> int:
        """Steps whose releases are recorded."""
        return len(self.record.releases)

    def recorder(self, program: Program, data: Any) -> Recorder:
        """Compares what must be the same, or writes down what it is from now on.

        Raises:
          ValueError: something is not as it was when this attempt began.
        """
        now = program.conditions(bytes.fromhex(self.hidden["key"]), data)
        attempts, outstanding = self.hidden["attempts"], self.record.outstanding
        if self.new:
            attempts[self.attempt]["same"] = now
            content = json.dumps(self.hidden).encode()
            self.ledger.save(ledger_lib.RUN, content, secret=True)
            outstanding = None
        else:
            _compare(attempts[self.attempt]["same"], now)
        run, charged = self.record.header["run"], self.record.charged
        return Recorder(
            self.ledger,
            run,
            self.attempt,
            outstanding,
            charged,
            replayable=self.plan.replayable,
        )


def _compare(was: dict[str, Any], now: dict[str, Any]) -> None:
    changed = []
    for name, value in was.items():
        if now[name] != value and name in ("data", "losses, optimizer"):
            changed.append(f"{name} are not those of the run")
        elif now[name] != value:
            changed.append(f"{name} is {now[name]!r} and was {value!r}")
    if changed:
        raise ValueError(
            f"ledger must be resumed as the run was begun, but {'; '.join(changed)}: "
            "steps that were under way would release other numbers under the same noise. "
            "A new attempt (new_attempt=True) draws new noise and charges them again"
        )


def take_up(
    folder: Any, plan: Plan | None, params: Any, *, new_attempt: bool
) -> Resumed:
    """Opens a run's folder and decides whose noise covers what comes next.

    Raises:
      ValueError: as :func:`jaxdp.resume`.
    """
    ledger, record, hidden = ledger_lib.Ledger.open(folder)
    try:
        return _decide(ledger, record, hidden, plan, params, new_attempt)
    except BaseException:
        ledger.close()
        raise


def _decide(
    ledger: ledger_lib.Ledger,
    record: ledger_lib.Record,
    hidden: dict[str, Any],
    plan: Plan | None,
    params: Any,
    new_attempt: bool,
) -> Resumed:
    recorded = replaying.plan_of(record)
    if plan is not None and plan.digest != recorded.digest:
        raise ValueError(
            f"plan must be the plan of the run,\n{recorded}\ngot another:\n{plan}"
        )
    replaying.check_params(record.header, params)
    keys = keys_lib.from_hex(hidden["keys"])
    outstanding = record.outstanding
    left = recorded.num_steps - record.charged
    if new_attempt:
        _check_new_attempt(recorded, outstanding, left)
        # Fresh, so that two copies of a folder never share the noise of an attempt.
        salted = secrets.token_hex(32) if keys.private else ""
        hidden["attempts"].append({"salt": salted})
        outstanding = None
    # An attempt counts from its first intent.
    attempt = record.intents[-1].attempt if record.intents else 0
    if new_attempt:
        attempt = len(hidden["attempts"]) - 1
    salt = bytes.fromhex(hidden["attempts"][attempt]["salt"])
    keys = keys_lib.renewed(keys, attempt, salt)
    last = (len(record.releases) if outstanding is None else outstanding.last) + left
    return Resumed(ledger, record, hidden, recorded, attempt, new_attempt, keys, last)


def _check_new_attempt(plan: Plan, lost: ledger_lib.Intent | None, left: int) -> None:
    """Refuses to charge steps again that the plan's epsilon has no room for."""
    steps = plan.num_steps
    reads = plan.sampling.max_participations(plan.num_examples, steps)
    why = ""
    if isinstance(plan.sampling, AdaptiveCursor) or reads < steps:
        # Lost batches would be read again, and new orders of the running epoch drawn. (Of
        # a cursor several queries may be one step.)
        why = "records that were read cannot be read again"
    elif len(plan.phases) > 1:
        why = "a restart that was lost may cost more than the last step"
    # (Where every step reads all records, one that is made again costs no more than the
    # step at the end that is left out for it: charges do not fall with the steps.)
    if why:
        raise ValueError(
            "new_attempt must be for a plan that charges every step by itself, and all "
            f"alike, got one of {plan.sampling!r}: {why}"
        )
    if lost is not None and left < 1:
        raise ValueError(
            f"new_attempt must stay within the plan's epsilon, but its {plan.num_steps} "
            f"releases are spent: the steps {lost.first} to {lost.last - 1} that were "
            "lost count as released"
        )


def restore(at: Resumed, carry: loop.Carry) -> tuple[int, loop.Carry]:
    """Step and carry of the last checkpoint, if the ledger knows of it; else 0 and carry.

    A checkpoint of another run, or of steps that are not on record (a folder that was
    copied while it changed), is none.
    """
    content = at.ledger.load(_CHECKPOINT)
    if content is None:
        return 0, carry
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    step = int(arrays["step"])
    if str(arrays["run"]) != at.record.header["run"] or step > at.done:
        return 0, carry
    return step, _unpack(arrays, carry)


def replayed_to(at: Resumed) -> tuple[int, str]:
    """Step and digest by which :func:`check_replayed` judges a replay; else 0 and ""."""
    content = at.ledger.load(_DIGEST)
    known: Any = json.loads(content) if content else {"run": ""}
    if known["run"] != at.record.header["run"] or known["step"] > at.done:
        return 0, ""
    return known["step"], known["params"]


def check_replayed(at: Resumed, digest: str, params: Any) -> None:
    """Requires that a replay gave the parameters of the run, to the bit.

    Steps that were under way are computed again under the noise that they had: at other
    parameters, that would be one noise over two sums.

    Raises:
      ValueError: they are others, and no new noise is drawn.
    """
    if digest and not at.new and replaying.digest_of(params).hexdigest() != digest:
        raise ValueError(
            "ledger must be resumed where its replay gives the parameters of the run, to "
            "the bit, but here it gives others. A new attempt (new_attempt=True) draws new "
            "noise and charges the steps that were under way again"
        )


def _kept_leaves(carry: loop.Carry) -> list[jax.Array]:
    """What a checkpoint holds: what the roots do not give back. Secret."""
    made, rest = carry.opt_state
    return jax.tree.leaves((carry.params, _common.without_roots(made), rest))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)


def _words(leaf: Any) -> np.ndarray:
    """A leaf as NumPy has it; of a typed key its words."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _pack(run: str, step: int, carry: loop.Carry) -> bytes:
    # As bytes: NumPy's format has no bfloat16.
    arrays: dict[str, Any] = {
        f"{i}": np.frombuffer(_words(leaf).tobytes(), np.uint8)
        for i, leaf in enumerate(_kept_leaves(carry))
    }
    file = io.BytesIO()
    np.savez(file, run=run, step=step, **arrays)
    return file.getvalue()


def _unpack(arrays: dict[str, np.ndarray], carry: loop.Carry) -> loop.Carry:
    """Fills the leaves of a fresh carry that no root gives back; the noise stays.

    (Noise that is correlated over a period has a state that moves with the steps. A
    checkpoint lies between periods, where that state starts anew; or the state is kept,
    and so is what else depends on data: a checkpoint is secret.)
    """
    made, rest = carry.opt_state
    kept = _common.without_roots(made)
    old, structure = jax.tree.flatten((carry.params, kept, rest))
    new = []
    for i, leaf in enumerate(old):
        like = _words(leaf)
        content = arrays[f"{i}"].tobytes()
        words = np.frombuffer(content, like.dtype).reshape(like.shape)
        new.append(keys_lib.from_words(words) if _is_key(leaf) else jnp.asarray(words))
    params, kept, rest = jax.tree.unflatten(structure, new)
    state = (_with_roots(kept, made), rest)
    return carry._replace(params=params, opt_state=state)


def _with_roots(kept: Any, made: Any) -> Any:
    """What a checkpoint held, with the other secret fields of a fresh state."""
    if not hasattr(made, "_fields"):
        return kept
    fresh = _common.rootless(made) if hasattr(made, "SECRET") else ()
    fields = {
        name: getattr(made, name)
        if name in fresh
        else _with_roots(getattr(kept, name), getattr(made, name))
        for name in made._fields
    }
    return type(made)(**fields)
