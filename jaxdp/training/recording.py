"""Records of a run: written while it runs, and read to resume it in another process."""

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import io
import json
import operator
import os
import pathlib
import platform
import re
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.kernels import sphere
from jaxdp.mechanism.plan import Plan
from jaxdp.training import (
    budgets,
    digests,
    loop,
    parallel,
    preparing,
    replaying,
    reporting,
    streaming,
)
from jaxdp.training import ledger as ledger_lib

#: Bytes of leaves that move beyond which a run that can be replayed writes no checkpoints:
#: its releases give them back sooner than they would be written a hundred times.
_LARGE = 2**26

#: Where a program calls Python, or hands numbers to the host: pure_callback, io_callback,
#: debug.callback and debug.print.
_CALLBACK = re.compile(r"custom_call @\w*callback|is_host_transfer = true")
#: What changes bits and is not in a program's text: in the environment, and in JAX.
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_FLAGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    *("jax_disable_most_optimizations", "jax_optimization_level"),
    "jax_exec_time_optimization_effort",
)
#: Of /proc/cpuinfo; of the features, those of instructions that compute.
_CPU = ("model name", "cpu family", "model", "stepping", "CPU part", "CPU variant")
_FEATURES = re.compile(r"(s*sse|avx|fma|f16c|amx|bmi|adx|asimd|sve|sme|fp16|bf16)\w*")


@dataclasses.dataclass(kw_only=True)
class Recorder:
    """Writer of intents, releases and checkpoints of one process's part of a run."""

    ledger: ledger_lib.Ledger  # open and locked
    run: str  # its name in the header
    replayable: bool  # whether the releases give the parameters back
    frozen: frozenset[str]  # paths of leaves that do not move, and are in no checkpoint
    attempt: int = 0  # whose noise covers the next steps
    #: An intent that is charged and whose steps are computed again.
    outstanding: ledger_lib.Intent | None = None
    charged: int = 0  # steps that count as released, those of every attempt
    done: int = 0  # steps whose releases are recorded

    def before(self, first: int, last: int) -> None:
        """Charges the steps [first, last), before they are computed; no intent twice."""
        intent = ledger_lib.Intent(first, last, self.attempt)
        if intent != self.outstanding:  # Computed again, with the noise of its intent.
            self.ledger.intend(*intent)
            self.charged += last - first
        self.outstanding = None

    def after(
        self, first: int, last: int, carry: loop.Carry, gathered: "Gathered"
    ) -> None:
        """Records the steps [first, last), before their carry is shown to anybody."""
        carry = parallel.here(carry)
        self.ledger.record(first, np.asarray(carry.releases)[first:last])
        self.done = last
        self.checkpoint(carry, gathered)

    def checkpoint(self, carry: loop.Carry, gathered: "Gathered") -> None:
        """Writes a checkpoint of the carry, or a digest for large replayable runs."""
        carry = parallel.here(carry)
        if self._has_checkpoints(carry):
            content = self._pack(carry, gathered)
            self.ledger.supersede(
                ledger_lib.CHECKPOINT, by=ledger_lib.BEFORE, content=content
            )
        else:
            digest = gathered.digest or digests.of_params(carry.params)
            known = {"run": self.run, "step": self.done, "params": digest}
            self.ledger.save(ledger_lib.DIGEST, json.dumps(known).encode(), secret=True)

    def _has_checkpoints(self, carry: loop.Carry) -> bool:
        if not self.replayable:
            return True
        if digests.scattered(_kept_leaves(carry, self.frozen)):
            return False
        size = sum(x.nbytes for x in _moving(carry.params, self.frozen).values())
        return size <= _LARGE

    def _pack(self, carry: loop.Carry, gathered: "Gathered") -> bytes:
        # As bytes: NumPy's format has no bfloat16.
        arrays: dict[str, Any] = {
            name: np.frombuffer(words.tobytes(), np.uint8)
            for name, words in _kept_words(carry, self.frozen, gathered).items()
        }
        file = io.BytesIO()
        np.savez(file, run=self.run, step=self.done, **arrays)
        return file.getvalue()

    def finish(
        self,
        carry: loop.Carry,
        gathered: "Gathered",
        report: dict[str, Any],
        *,
        keep_noise_roots: bool,
    ) -> None:
        """Erases the noise roots of a finished run, unless kept, and writes the report.

        Whoever comes by ``secret/`` later could subtract the noise from all releases, and
        try data sets against the digest of the data, whose key is beside it.
        What stays gives the run's result again, and no step more: the last checkpoint
        without its secret fields, and keys whose secret roots are zeros. (Renamed files
        are gone for whoever reads the folder, not for who reads the disk.)
        """
        hidden = json.loads(self.ledger.load(ledger_lib.RUN) or b"")
        if not keep_noise_roots:
            if not hidden.get("ended"):
                carry = parallel.here(carry)
                if self._has_checkpoints(carry):
                    bare = carry._replace(opt_state=_blank(carry.opt_state))
                    content = self._pack(bare, gathered)
                    self.ledger.save(ledger_lib.CHECKPOINT, content, secret=True)
                self.ledger.forget(ledger_lib.BEFORE)
                hidden |= {"ended": True, "keys": _forgotten(hidden["keys"])}
            for attempt in hidden["attempts"]:
                attempt.get("same", {}).pop(_DATA, None)
            content = json.dumps(hidden).encode()
            self.ledger.save(ledger_lib.RUN, content, secret=True)
        timing = {name: report[name] for name in reporting.TIMING}
        self.ledger.save(ledger_lib.TIMING, _text(timing), secret=True)
        public = {k: v for k, v in report.items() if k not in reporting.TIMING}
        self.ledger.save(ledger_lib.REPORT, _text(public), secret=False)


def check_unit(at: "Resumed", task: preparing.Task) -> None:
    """Requires data of the unit that the run is on record with: so it was charged."""
    unit = at.record.header.get("unit", "record")
    if task.unit != unit:
        raise ValueError(
            f"data must be of the unit that the run was recorded with, {unit!r}, got "
            f"{task.unit!r}: what it spent was charged, and is reported, as of a {unit}"
        )


class Gathered(NamedTuple):
    """Digest and leaves that all processes of a run compute together.

    Attributes:
      digest: of parameters that the releases give back.
      leaves: others of a checkpoint, whole, by their places in it. Secret.
    """

    digest: str = ""
    leaves: Mapping[str, np.ndarray] = MappingProxyType({})


def gather(plan: Plan, frozen: frozenset[str], carry: loop.Carry) -> Gathered:
    """Returns what a record needs of split leaves; all processes call this together.

    Leaves of checkpoints are gathered one at a time, whole on every device meanwhile.
    """
    if plan.replayable:
        return Gathered(digests.of_scattered(carry.params))
    kept = _kept_leaves(carry, frozen).items()
    return Gathered(
        leaves={i: parallel.on_host(x) for i, x in kept if digests.scattered(x)}
    )


def _text(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2) + "\n").encode()


def _forgotten(words: dict[str, Any]) -> dict[str, Any]:
    """Returns keys as text, with zeros for all that is secret."""
    shown = ("direction", "private")
    return {k: v if k in shown else "0" * len(v) for k, v in words.items()}


def _blank(state: Any) -> Any:
    """Returns a state whose secret fields are zeros."""

    def has_secrets(node: Any) -> bool:
        return hasattr(type(node), "SECRET")

    def zeros(leaf: Any) -> Any:
        if _is_key(leaf):
            return keys_lib.from_words(np.zeros_like(_words(leaf)))
        return np.zeros(leaf.shape, leaf.dtype)

    def blanked(node: Any) -> Any:
        if not has_secrets(node):
            return node
        fields = zip(node._fields, node, strict=True)
        secret = frozenset(node.SECRET)
        return type(node)(
            *(jax.tree.map(zeros, x) if f in secret else _blank(x) for f, x in fields)
        )

    return jax.tree.map(blanked, state, is_leaf=has_secrets)


def calls_python(text: str) -> bool:
    """Returns True if a program calls Python: its text is not all that it computes then."""
    return _CALLBACK.search(text) is not None


def machines(mesh: Mesh | None, device: Any) -> dict[str, Any]:
    """Returns what decides bits and is no argument of a run, of every process; all wait.

    ``device`` is the process's first one of the run.
    """
    config: Any = jax.config
    own = {
        "jax": jax.__version__,
        "jaxlib": reporting.versions()["jaxlib"],
        "device": device.device_kind,
        **{name: os.environ.get(name, "") for name in _ENVIRONMENT},
        **{name: str(getattr(config, name, None)) for name in _FLAGS},
        "compiler_options": loop.compiler_options(device.platform),
        **({"processor": _processor()} if device.platform == "cpu" else {}),
    }
    if not parallel.several_processes(mesh):
        return own
    every = [json.loads(x) for x in parallel.gathered(mesh, json.dumps(own))]
    parts = (
        {f"{name} of process {index}": x for name, x in one.items()}
        for index, one in enumerate(every)
    )
    return functools.reduce(operator.or_, parts, {"processes": len(every)})


#: Conditions that are keyed digests.
_DATA, _PROGRAM, _NUMBERS = "data", "losses, optimizer", "numbers of the optimizer"


def first_numbers(carry: loop.Carry) -> str:
    """Returns digests of the state that the optimizer begins with, as text.

    It is no part of a program's text: hyperparameters that are numbers of the state, seeds,
    accumulators. All processes call this.
    """
    # Each by itself, wherever it is: a program for each shape, not for each leaf.
    leaves = jax.tree.leaves(carry.opt_state[1])
    words = (jax.random.key_data(x) if _is_key(x) else x for x in leaves)
    return " ".join(map(digests.of_params, words))


def _conditions(
    task: preparing.Task, text: str, key: bytes, machines: dict[str, Any]
) -> dict[str, Any]:
    """Returns the conditions that a resumed run must meet but for digests of numbers.

    For ``secret/``. ``text``, that of the program of a chunk with its losses and optimizer,
    is in it as a keyed digest, as the data are: without the key nobody can try out data or
    losses against them.
    """
    return {
        "microbatch_size": task.microbatch_size,
        "devices": 1 if task.mesh is None else task.mesh.size,
        "mesh": {} if task.mesh is None else dict(task.mesh.shape),
        # Sums of losses are added in the order of the shards.
        **({"sharding": split} if (split := parallel.layout(task.params)) else {}),
        **machines,
        _PROGRAM: _keyed(key, text.encode()),
    }


def _keyed(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, "sha256").hexdigest()


def _digest(data: Any) -> bytes:
    if not isinstance(data, streaming.Stream):
        return digests.sha256(data).digest()
    digest = data.source.digest()
    data.source.check()  # That it was the digest of one state of its files.
    return digest


@functools.cache
def _processor() -> str:
    """Returns the processor that XLA compiles for: model, and instructions that compute."""
    try:  # JAX calls every CPU "cpu". Not all systems say more.
        text = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    pairs = (line.partition(":") for line in text.splitlines())
    lines = {name.strip(): value.strip() for name, _, value in pairs}
    features = (lines.get("flags") or lines.get("Features") or "").split()
    known = " ".join(sorted(x for x in features if _FEATURES.fullmatch(x)))
    said = [f"{name} {lines[name]}" for name in _CPU if name in lines]
    digest = hashlib.sha256(known.encode()).hexdigest()[:8]
    return ", ".join([platform.machine(), *said, f"features {digest}"])


def new(
    folder: Any,
    task: preparing.Task,
    keys: keys_lib.Keys,
    text: str,
    chunk: int,
    note: dict[str, Any],
    machines: dict[str, Any],
    budget: budgets.Budget | None,
    initial: dict[str, str],
) -> Callable[[str, str], Recorder]:
    """Returns what creates the folder of a new run and returns its recorder.

    It takes the name under which the run is reserved in its budget, if it has one, and
    :func:`first_numbers`. What the caller gave is read before: the keys are spent between
    the two. ``initial`` are digests of the leaves of the parameters, by path.
    """
    plan, params = task.plan, task.params
    moving, layered = replaying.chosen_leaves(params, **task.leaves)
    words = keys_lib.to_hex(keys)
    header = {
        "private": keys.private,
        "plan": json.loads(plan.to_json()),
        "direction": words["direction"],
        "law": getattr(plan, "direction", None),
        "direction_version": sphere.VERSION,
        "prng": replaying.prng(),
        "leaves": replaying.describe_leaves(params),
        "trainable": moving,
        "stacked": layered,
        "params": initial,
        "unit": task.unit,
        "chunk": chunk,
        "microbatch_size": task.microbatch_size,
        "streamed": isinstance(task.data, streaming.Stream),
        "device": parallel.device_of(task.mesh, params, keys, task.data).device_kind,
        "versions": reporting.versions(),
        "budget": None if budget is None else budget.id,
        "note": note,
    }
    key = secrets.token_bytes(32)
    same = _conditions(task, text, key, machines)
    same[_DATA] = _keyed(key, _digest(task.data))
    attempt = {"salt": "", "same": same}
    hidden = {"keys": words, "key": key.hex(), "attempts": [attempt]}

    def begun(reserved: str, numbers: str) -> Recorder:
        same[_NUMBERS] = _keyed(key, numbers.encode())
        run = reserved or secrets.token_hex(16)
        if budget is not None:
            budgets.begin(budget, run)
        ledger = ledger_lib.Ledger.create(
            folder, plan=plan.file_text(), header={"run": run} | header, secret=hidden
        )
        frozen = replaying.frozen_of(header)
        return Recorder(
            ledger=ledger, run=run, replayable=plan.replayable, frozen=frozen
        )

    return begun


@dataclasses.dataclass(frozen=True)
class Resumed:
    """State of a resumed run: its ledger, plan, keys and attempt.

    Of several processes the first has the folder; the others have what it read.
    """

    mesh: Mesh | None
    ledger: ledger_lib.Ledger | None  # open and locked; of process 0
    record: ledger_lib.Record  # what it says
    hidden: dict[str, Any]  # what secret/run.json says; of process 0
    plan: Plan
    attempt: int  # whose noise covers the next steps
    new: bool  # whether that attempt begins now
    ended: bool  # whether the run is over and its noise forgotten: no step can follow
    keys: keys_lib.Keys  # of that attempt
    last: int  # the step at which the budget ends

    @property
    def done(self) -> int:
        """Number of steps whose releases are recorded."""
        return len(self.record.releases)

    def charged(self, step: int) -> int:
        """Returns how many steps counted as released when a step was, or will be, done."""
        if step <= self.done:
            intents = (i for i in self.record.intents if i.first < step)
            return sum(i.last - i.first for i in intents)
        lost = self.record.outstanding
        # What was under way is charged already, and made again, unless by a new attempt.
        covered = self.done if lost is None or self.new else lost.last
        return self.record.charged + max(0, step - covered)

    def load(self, *names: str) -> list[bytes | None]:
        """Reads files of ``secret/``, for all processes."""
        ledger = self.ledger
        read = lambda: {} if ledger is None else {x: ledger.load(x) for x in names}  # noqa: E731
        return list(parallel.from_first(self.mesh, read).values())

    def recorder(
        self, task: preparing.Task, text: str, numbers: str, machines: dict[str, Any]
    ) -> Recorder | None:
        """Returns the recorder; ValueError unless all is as when this attempt began.

        For a new attempt, stores the present conditions instead. None but in process 0.
        """
        if self.ledger is None:
            return None
        key = bytes.fromhex(self.hidden["key"])
        attempts, outstanding = self.hidden["attempts"], self.record.outstanding
        same = attempts[self.attempt].get("same", {})
        now = _conditions(task, text, key, machines)
        if not self.ended or _NUMBERS in same:  # Older versions kept no digest of them.
            now[_NUMBERS] = _keyed(key, numbers.encode())
        if not self.ended or _DATA in same:  # Which a run that is over has no more.
            now[_DATA] = _keyed(key, _digest(task.data))
        if self.new and not self.ended:
            attempts[self.attempt]["same"] = now
            content = json.dumps(self.hidden).encode()
            self.ledger.save(ledger_lib.RUN, content, secret=True)
            outstanding = None
        elif not self.new:
            _compare(same, now)
            if outstanding is not None and calls_python(text):
                raise ValueError(
                    "value_fn must be all JAX for steps that were under way to be computed "
                    f"again, but the program calls Python, and the steps "
                    f"{outstanding.first} to {outstanding.last - 1} were lost: nothing "
                    "tells whether Python would answer as it did, and the same noise would "
                    f"cover what it answers now. {_WAY_OUT}"
                )
        return Recorder(
            ledger=self.ledger,
            run=self.record.header["run"],
            replayable=self.plan.replayable,
            frozen=replaying.frozen_of(self.record.header),
            attempt=self.attempt,
            outstanding=outstanding,
            charged=self.record.charged,
            done=self.done,
        )


#: What every refusal ends with.
_WAY_OUT = (
    "A new attempt (new_attempt=True) draws new noise and charges the steps that were "
    "under way again"
)


def _compare(was: dict[str, Any], now: dict[str, Any]) -> None:
    changed = []
    for name in was | now:  # What one of them lacks differs.
        value, is_now = was.get(name), now.get(name)
        if is_now != value and name in (_DATA, _PROGRAM, _NUMBERS):
            changed.append(f"{name} are not those of the run")
        elif is_now != value:
            changed.append(f"{name} is {is_now!r} and was {value!r}")
    if changed:
        raise ValueError(
            f"ledger must be resumed as the run was begun, but {'; '.join(changed)}: "
            "steps that were under way would release other numbers under the same noise. "
            f"{_WAY_OUT}"
        )


def take_up(
    folder: Any,
    plan: Plan | None,
    params: Any,
    *,
    new_attempt: bool,
    mesh: Mesh | None = None,
) -> Resumed:
    """Opens a run's folder and decides which attempt's noise covers the next steps.

    Of several processes, the first opens it, and gives the others what they need: the
    roots, and no key of the chain.
    """
    ledger: ledger_lib.Ledger | None = None
    hidden: dict[str, Any] = {}
    with contextlib.ExitStack() as on_error:

        def opened() -> dict[str, bytes | None]:
            nonlocal ledger, hidden
            ledger, _, hidden = ledger_lib.Ledger.open(folder)
            on_error.callback(ledger.close)
            salts = [attempt["salt"] for attempt in hidden["attempts"]]
            # Fresh, so that two copies of a folder never share the noise of an attempt.
            known = {"salts": salts, "fresh": secrets.token_hex(32)}
            known |= {"keys": hidden["keys"], "ended": bool(hidden.get("ended"))}
            return {"lines": ledger.verified, "known": json.dumps(known).encode()}

        found = parallel.from_first(mesh, opened)
        record = ledger_lib.parsed(found["lines"] or b"", folder)
        known = json.loads(found["known"] or b"")
        done, outstanding, ended = (
            len(record.releases),
            record.outstanding,
            known["ended"],
        )
        anew = parallel.where_any(mesh, lambda: new_attempt)()

        def checked() -> tuple[Plan, keys_lib.Keys, int]:
            recorded = replaying.plan_of(record)
            if plan is not None and plan.digest != recorded.digest:
                raise ValueError(
                    f"plan must be the plan of the run,\n{recorded}\ngot another:\n{plan}"
                )
            if new_attempt != anew:
                raise ValueError(
                    "new_attempt must be the same in all processes, got True in some only"
                )
            left = recorded.num_steps - record.charged
            if new_attempt and not ended:
                _check_new_attempt(recorded, outstanding, left)
            return recorded, keys_lib.from_hex(known["keys"]), left

        recorded, keys, left = parallel.together(mesh, checked)
        replaying.check_params(record.header, params, mesh)
        # An attempt counts from its first intent.
        attempt = record.intents[-1].attempt if record.intents else 0
        salts = known["salts"]
        if new_attempt and not ended:
            salts.append(known["fresh"] if keys.private else "")
            attempt, outstanding = len(salts) - 1, None
            if ledger is not None:
                hidden["attempts"].append({"salt": salts[-1]})
        keys = keys_lib.renewed(keys, attempt, bytes.fromhex(salts[attempt]))
        last = (done if outstanding is None else outstanding.last) + left
        last = done if ended else last
        on_error.pop_all()
        return Resumed(
            *(mesh, ledger, record, hidden, recorded, attempt),
            *(new_attempt, ended, keys, last),
        )


def _check_new_attempt(plan: Plan, lost: ledger_lib.Intent | None, left: int) -> None:
    """Refuses a new attempt if epsilon has no room for charging the lost steps again."""
    steps = plan.num_steps
    reads = plan.sampling.max_participations(plan.num_examples, steps)
    why = ""
    if not plan.sampling.repeatable or reads < steps:
        # Lost batches would be read again, and new orders of the running epoch drawn.
        why = "records that were read cannot be read again"
    elif len(plan.phases) > 1 or plan.charges_fall:
        why = "a step that was lost may cost more than the last one"
    # (Where every step reads all records, one that is made again costs no more than the
    # step at the end that is left out for it, unless charges fall with the steps.)
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


def checkpoints(at: Resumed) -> dict[int, dict[str, np.ndarray]]:
    """Returns the content of the ledger's checkpoints by step.

    A checkpoint of another run, or of steps that are not on record, is left out: the
    folder may have been copied while it changed.
    """
    found = {}
    for content in at.load(ledger_lib.BEFORE, ledger_lib.CHECKPOINT):
        if content is None:
            continue
        with np.load(io.BytesIO(content)) as file:
            arrays = dict(file)
        step = int(arrays["step"])
        if str(arrays["run"]) == at.record.header["run"] and step <= at.done:
            found[step] = arrays
    return found


def checked_from(at: Resumed) -> int:
    """Returns the step from which the record is computed again: its last chunk's first.

    It is the end of the record, so that nothing is computed again, where a new attempt
    begins, which draws new noise, or has begun without a chunk on record yet: the last
    chunk may be one of other data then.
    """
    chunk = at.record.last_recorded
    if at.new or chunk is None or chunk.attempt != at.attempt:
        return at.done
    return chunk.first


def check_recomputed(
    at: Resumed,
    first: int,
    carry: loop.Carry,
    gathered: Gathered,
    known: dict[str, np.ndarray] | None,
) -> None:
    """Requires that steps from ``first`` on gave what is on record again, to the bit.

    ``known`` is the checkpoint after them, if there is one. What they gave is thrown away:
    it is the same, or it is shown to nobody.
    """
    carry = parallel.here(carry)
    got = np.asarray(carry.releases)[first : at.done]
    want = at.record.releases[first:]
    same = got.tobytes() == want.astype(got.dtype).tobytes()
    if same and known is not None:
        frozen = replaying.frozen_of(at.record.header)
        kept = _kept_words(carry, frozen, gathered)
        same = all(x.tobytes() == known[i].tobytes() for i, x in kept.items())
    if not same:
        raise ValueError(
            "ledger must be resumed where its last chunk comes out again as it is on "
            f"record, to the bit, but here the steps {first} to {at.done - 1} give other "
            "numbers: the machine or its settings are others, or the losses are, or they "
            "are not deterministic. The next steps would not be those of this run, and "
            "steps that were under way would release other numbers under the same noise. "
            f"{_WAY_OUT}"
        )


def replayed_to(at: Resumed) -> tuple[int, str]:
    """Returns the step and digest that :func:`check_replayed` needs; else 0 and ""."""
    (content,) = at.load(ledger_lib.DIGEST)
    known: Any = json.loads(content) if content else {"run": ""}
    if known["run"] != at.record.header["run"] or known["step"] > at.done:
        return 0, ""
    return known["step"], known["params"]


def check_replayed(at: Resumed, digest: str, params: Any) -> None:
    """Requires that a replay gave the parameters of the run, to the bit.

    Steps that were under way are computed again under the noise that they had: at other
    parameters, that would be one noise over two sums. (A new attempt draws new noise.)
    Of several processes all call this, and all raise where one does.
    """
    if not digest or at.new:
        return
    got = digests.of_params(parallel.here(params), like=digest)

    def check() -> None:
        if got != digest:
            raise ValueError(
                "ledger must be resumed where its replay gives the parameters of the run, "
                f"to the bit, but here it gives others. {_WAY_OUT}"
            )

    parallel.together(at.mesh, check)


def _kept_leaves(carry: loop.Carry, frozen: frozenset[str]) -> dict[str, jax.Array]:
    """Returns the leaves of a checkpoint by their places in params and state. Secret.

    All that neither the roots nor the initial parameters give back.
    """
    made, rest = carry.opt_state
    state = jax.tree.leaves((run_state.without_roots(made), rest))
    after = len(jax.tree.leaves(carry.params))
    kept = _moving(carry.params, frozen) | dict(enumerate(state, after))
    return {f"{place}": leaf for place, leaf in kept.items()}


def _kept_words(
    carry: loop.Carry, frozen: frozenset[str], gathered: Gathered
) -> dict[str, np.ndarray]:
    """Returns the leaves of a checkpoint as NumPy arrays. Secret."""
    return {
        i: gathered.leaves[i] if digests.scattered(x) else _words(x)
        for i, x in _kept_leaves(carry, frozen).items()
    }


def _moving(params: Any, frozen: frozenset[str]) -> dict[int, jax.Array]:
    """Returns the leaves that move, by their places."""
    named = enumerate(jax.tree_util.tree_leaves_with_path(params))
    return {i: x for i, (path, x) in named if sphere.path_str(path) not in frozen}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)


def _words(leaf: Any) -> np.ndarray:
    """Returns a leaf as a NumPy array; for a typed key, its words."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def restore(
    arrays: dict[str, np.ndarray], carry: loop.Carry, frozen: frozenset[str]
) -> loop.Carry:
    """Returns the carry of a checkpoint, from the one of the run's beginning.

    Fills the leaves that no root gives back; the noise stays, and so do frozen leaves, the
    initial ones (:func:`replaying.check_params`). (Noise that is correlated over a period
    has a state that moves with the steps. A checkpoint lies between periods, where that
    state starts anew; or the state is kept, and so is what else depends on data: a
    checkpoint is secret.)
    """
    made, rest = carry.opt_state
    kept = run_state.without_roots(made)
    old, structure = jax.tree.flatten((carry.params, kept, rest))
    stay = set(range(len(jax.tree.leaves(carry.params))))
    stay -= set(_moving(carry.params, frozen))
    new = []
    for i, leaf in enumerate(old):
        if i in stay:
            new.append(leaf)
            continue
        like = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if f"{i}" not in arrays or arrays[f"{i}"].nbytes != like.nbytes:
            raise ValueError(
                "ledger must have whole checkpoints in secret/, and optimizer a state like "
                f"that of the run, got another array {i} of the state: give the optimizer "
                "that the run began with"
            )
        content = arrays[f"{i}"].tobytes()
        words = np.frombuffer(content, like.dtype).reshape(like.shape)
        new.append(keys_lib.from_words(words) if _is_key(leaf) else _put(words, leaf))
    params, kept, rest = jax.tree.unflatten(structure, new)
    state = (_with_roots(kept, made), rest)
    return carry._replace(params=params, opt_state=state)


def _put(words: np.ndarray, like: Any) -> jax.Array:
    """Returns an array of these numbers, where ``like`` is if that is on a mesh."""
    place = getattr(like, "sharding", None)
    if not isinstance(place, NamedSharding):
        return jnp.asarray(words)
    # Each process puts its own parts onto its devices.
    return jax.make_array_from_callback(words.shape, place, lambda at: words[at])


def _with_roots(kept: Any, made: Any) -> Any:
    """Returns a checkpoint's state, with fields that roots give back from a fresh one."""
    if not hasattr(made, "_fields"):
        return kept
    fresh = run_state.rootless(made) if hasattr(made, "SECRET") else ()
    fields = zip(made._fields, kept, made, strict=True)
    return type(made)(
        *(new if name in fresh else _with_roots(old, new) for name, old, new in fields)
    )
