"""What a run writes while it goes on, and how another process takes it up."""

import hmac
import io
import secrets
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import keys as keys_lib
from jaxdp import ledger as ledger_lib
from jaxdp.kernels import sphere
from jaxdp.plans._base import SumPlan
from jaxdp.training import loop, replaying, reporting
from jaxdp.transforms import _common

_CHECKPOINT = "checkpoint.npz"


class Recorder:
    """Writes intents, releases and checkpoints of one process's part of a run."""

    def __init__(
        self,
        ledger: ledger_lib.Ledger,
        attempt: int = 0,
        outstanding: ledger_lib.Intent | None = None,
    ):
        self.ledger = ledger
        self._attempt = attempt
        self._outstanding = outstanding

    def before(self, first: int, last: int) -> None:
        """To be called before the steps [first, last) are computed."""
        intent = ledger_lib.Intent(first, last, self._attempt)
        if intent != self._outstanding:  # Computed again, with the noise of its intent.
            self.ledger.intend(*intent)
        self._outstanding = None

    def after(self, first: int, last: int, carry: loop.Carry) -> None:
        """To be called with the carry after them, before it is shown to anybody."""
        self.ledger.record(first, np.asarray(carry.releases)[first:last])
        self.ledger.save(_CHECKPOINT, _pack(last, carry), secret=True)


def create(
    folder: Any,
    plan: SumPlan,
    keys: keys_lib.Keys,
    params: Any,
    data: Any,
    *,
    trainable: _common.Trainable,
    stacked: Any,
    microbatch_size: int | None,
    chunk: int,
    note: dict[str, Any],
) -> Recorder:
    """The folder of a new run."""
    moving, layered = replaying.chosen_leaves(params, trainable, stacked)
    words = keys_lib.to_hex(keys)
    header = {
        "run": secrets.token_hex(16),
        "private": keys.private,
        "plan": plan.to_json(),
        "direction": words["direction"],
        "direction_version": sphere.VERSION,
        "prng": replaying.prng(),
        "leaves": replaying.describe_leaves(params),
        "trainable": moving,
        "stacked": layered,
        "params": replaying.digest_of(params).hexdigest(),
        "chunk": chunk,
        "same": _same(microbatch_size),
        "versions": reporting.versions(),
        "note": note,
    }
    data_key = secrets.token_bytes(32)
    hidden = {"keys": words, "data": _data_digest(data_key, data)}
    hidden |= {"data_key": data_key.hex()}
    ledger = ledger_lib.Ledger.create(
        folder, plan=plan.to_json(), header=header, secret=hidden
    )
    return Recorder(ledger)


def _same(microbatch_size: int | None) -> dict[str, Any]:
    """What must be the same for the same steps to give the same bits, data aside."""
    return {
        "microbatch_size": microbatch_size,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def _data_digest(key: bytes, data: Any) -> str:
    """Keyed, so that nobody without the key can try data out."""
    return hmac.new(key, replaying.digest_of(data).digest(), "sha256").hexdigest()


class Resumed(NamedTuple):
    """Where a run stands that is taken up again."""

    recorder: Recorder
    record: ledger_lib.Record
    keys: keys_lib.Keys
    done: int  # steps whose releases are recorded
    last: int  # step at which the budget ends


def take_up(
    folder: Any,
    plan: SumPlan | None,
    params: Any,
    data: Any,
    *,
    microbatch_size: int | None,
    new_attempt: bool,
) -> tuple[SumPlan, Resumed]:
    """Opens a run's folder and decides what may be done again.

    Raises:
      ValueError: as :func:`jaxdp.resume`.
    """
    ledger, record, hidden = ledger_lib.Ledger.open(folder)
    try:
        return _take_up(
            ledger, record, hidden, plan, params, data, microbatch_size, new_attempt
        )
    except BaseException:
        ledger.close()
        raise


def _take_up(
    ledger: ledger_lib.Ledger,
    record: ledger_lib.Record,
    hidden: dict[str, Any],
    plan: SumPlan | None,
    params: Any,
    data: Any,
    microbatch_size: int | None,
    new_attempt: bool,
) -> tuple[SumPlan, Resumed]:
    recorded = replaying.plan_of(record)
    if plan is not None and plan.digest != recorded.digest:
        raise ValueError(
            f"plan must be the plan of the run,\n{recorded}\ngot another:\n{plan}"
        )
    replaying.check_params(record.header, params)
    changed = [
        f"{name} is {_same(microbatch_size)[name]!r} and was {was!r}"
        for name, was in record.header["same"].items()
        if _same(microbatch_size)[name] != was
    ]
    digest = _data_digest(bytes.fromhex(hidden["data_key"]), data)
    if not hmac.compare_digest(digest, hidden["data"]):
        changed.insert(0, "data are not those of the run")
    if changed and not new_attempt:
        raise ValueError(
            f"ledger must be resumed as the run was begun, but {'; '.join(changed)}: "
            "steps that were under way would release other numbers under the same noise. "
            "new_attempt=True draws new noise and charges them again"
        )
    attempt = max((intent.attempt for intent in record.intents), default=0)
    outstanding = record.outstanding
    left = recorded.num_steps - record.charged
    if new_attempt:
        _check_new_attempt(recorded, outstanding, left)
        attempt, outstanding = attempt + 1, None
    done = len(record.releases)
    last = (done if outstanding is None else outstanding.last) + left
    keys = keys_lib.renewed(keys_lib.from_hex(hidden["keys"]), attempt)
    recorder = Recorder(ledger, attempt, outstanding)
    return recorded, Resumed(recorder, record, keys, done, last)


def _check_new_attempt(
    plan: SumPlan, lost: ledger_lib.Intent | None, left: int
) -> None:
    """Refuses to charge steps again that the plan's epsilon has no room for."""
    steps = plan.num_steps
    if plan.sampling.max_participations(plan.num_examples, steps) < steps:
        # Lost batches would be read again, and new orders of the running epoch drawn.
        raise ValueError(
            "new_attempt must be for a plan that charges every step by itself, got one of "
            f"{plan.sampling!r}: records that were read cannot be read again"
        )
    if lost is not None and left < 1:
        raise ValueError(
            f"new_attempt must stay within the plan's epsilon, but its {plan.num_steps} "
            f"releases are spent: the steps {lost.first} to {lost.last - 1} that were "
            "lost count as released"
        )


def restore(ledger: ledger_lib.Ledger, carry: loop.Carry) -> tuple[int, loop.Carry]:
    """The step and carry of the last checkpoint, or those given."""
    content = ledger.load(_CHECKPOINT)
    return (0, carry) if content is None else _unpack(content, carry)


def _public_leaves(carry: loop.Carry) -> list[jax.Array]:
    """What a checkpoint holds: no noise, which comes from the roots."""
    made, rest = carry.opt_state
    return jax.tree.leaves((carry.params, _common.public(made), rest))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)


def _words(leaf: Any) -> np.ndarray:
    """A leaf as NumPy has it; of a typed key its words."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _pack(step: int, carry: loop.Carry) -> bytes:
    # As bytes: NumPy's format has no bfloat16.
    arrays: dict[str, Any] = {
        f"{i}": np.frombuffer(_words(leaf).tobytes(), np.uint8)
        for i, leaf in enumerate(_public_leaves(carry))
    }
    file = io.BytesIO()
    np.savez(file, step=step, **arrays)
    return file.getvalue()


def _unpack(content: bytes, carry: loop.Carry) -> tuple[int, loop.Carry]:
    """Fills the public leaves of a fresh carry; the noise stays."""
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    made, rest = carry.opt_state
    shown = _common.public(made)
    old, structure = jax.tree.flatten((carry.params, shown, rest))
    new = []
    for i, leaf in enumerate(old):
        content = arrays[f"{i}"].tobytes()
        if _is_key(leaf):
            new.append(keys_lib.root_from_hex(content.hex()))
            continue
        like = np.asarray(leaf)
        new.append(jnp.asarray(np.frombuffer(content, like.dtype).reshape(like.shape)))
    params, shown, rest = jax.tree.unflatten(structure, new)
    secret = {name: getattr(made, name) for name in type(made).SECRET}
    state = (shown._replace(**secret), rest)
    return int(arrays["step"]), carry._replace(params=params, opt_state=state)
