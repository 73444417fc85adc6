"""What each of several processes does that run one plan together.

``test_parallel.py`` starts them and compares what they print.
"""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jaxdp
from jaxdp import models, plans, sampling
from jaxdp.cli import main as command
from jaxdp.cli import record
from jaxdp.core import keys as keys_lib
from jaxdp.models.language import _files, tasks
from jaxdp.training import budgets, digests, ledger, loop
from tests.training.problem import DATA, PARAMS, make_plan, value_fn

PLAN = make_plan(
    num_steps=6, sampling=sampling.TruncatedPoisson(sampling_prob=0.5), num_directions=2
)
#: Its releases do not give the parameters back: it goes on from checkpoints.
GRADIENTS = plans.DPGD(
    **{f.name: getattr(PLAN, f.name) for f in dataclasses.fields(plans.DPGD)}
)
#: Its state has leaves of the parameters' shapes.
CARRIED = plans.O2NC(
    **{name: getattr(PLAN, name) for name in ("num_examples", "num_steps", "relation")},
    sampling=sampling.MultiPassRestarts(period=1),
    restart_l2_clip_norm=1.0,
    l2_clip_norm=1.0,
    smoothing_radius=1e-2,
    max_step=0.1,
    window=2,
    direction="sphere",
    prefix_noise="independent",
    noise_multiplier=2.0,
    delta=1e-5,
)
#: For kills, by the names of their folders: as the others, with more chunks.
VICTIMS: dict[str, Any] = {
    "whole": dataclasses.replace(PLAN, num_steps=40),
    "split": dataclasses.replace(PLAN, num_steps=40),
    "checkpoints": dataclasses.replace(GRADIENTS, num_steps=12),
    "four": dataclasses.replace(PLAN, num_steps=12),
}
SIZE = 5
#: Of which the first leaf can be split over two devices.
WIDE = {
    "hidden": {"w": np.cos(np.arange(42, dtype=np.float32)).reshape(7, 6)},
    "out": np.asarray([0.3, -0.2, 0.1, 0.4, -0.5, 0.2], np.float32),
}
ARGUMENTS: dict[str, Any] = {
    "value_fn": value_fn,
    "optimizer": optax.sgd(0.1, momentum=0.9),
    "microbatch_size": SIZE,
}
#: Trains what is whole, where the other leaf is split between processes.
ADAPTER: dict[str, Any] = {
    "trainable": {"hidden": {"w": False}, "out": True},
    "optimizer": optax.masked(
        optax.sgd(0.1, momentum=0.9), {"hidden": {"w": False}, "out": True}
    ),
}


def whole(leaf: Any) -> np.ndarray:
    if digests.scattered(leaf):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def digest(tree: Any) -> str:
    leaves = (whole(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def refusal(function: Any) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def broken(*_: Any) -> None:
    raise ValueError("the callback is broken")


def source(more: float = 0.0) -> jaxdp.data.Source:
    return jaxdp.data.ArraySource(jax.tree.map(lambda x: np.asarray(x) + more, DATA))


def interrupted(
    folder: pathlib.Path,
    plan: Any,
    mesh: Any,
    data: Any,
    budget: Any = None,
    start: Any = PARAMS,
    trained: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """What a run says that is stopped by one process, and what it ends with."""
    # Process 1 alone is told to stop, after two of three chunks.
    asked = iter([False, False, True])
    whole = ARGUMENTS | {"mesh": mesh, "ledger": folder, "chunk": 2, "budget": budget}
    whole |= trained
    whole["stop"] = lambda: jax.process_index() == 1 and next(asked)
    step = None
    try:
        jaxdp.fit(plan, jaxdp.Keys.insecure(1), start, data, **whole)
    except jaxdp.Stopped as error:
        step = error.step
    if jax.process_index() == 0:
        for copy in ("stopped", "anew"):
            shutil.copytree(folder, folder.with_name(f"{folder.name}-{copy}"))

    def resume(folder: Any = folder, params: Any = start, **kwargs: Any) -> Any:
        given = ARGUMENTS | {"mesh": mesh, "plan": plan} | kwargs
        given |= {name: x for name, x in trained.items() if name == "optimizer"}
        return jaxdp.resume(folder, params, data, **given)

    # One of them has other parameters; only one says that it is a new attempt.
    other = jax.tree.map(lambda x: x + jax.process_index(), start)
    only = jax.process_index() == 0
    refused = (
        refusal(lambda: resume(params=other)),
        refusal(lambda: resume(new_attempt=only)),
        refusal(lambda: resume(folder.with_name("none"))),
        # Where it shows the steps that are done, in process 0 alone.
        refusal(lambda: resume(callback=broken if only else None)),
    )
    # Process 1 cannot read its parameters; the other does not wait for it.
    gone = jax.tree.map(jnp.array, start)
    if not only:
        jax.tree.leaves(gone)[-1].delete()
    unread = refusal(lambda: resume(params=gone))
    # With new noise, which is charged as a run where there is a budget.
    anew = {"folder": folder.with_name(f"{folder.name}-anew"), "new_attempt": True}
    uncharged = refusal(lambda: resume(**anew)) if budget is not None else ""
    renewed = resume(**anew, budget=budget).report["steps_charged"]
    again = resume()
    report = again.report["steps_charged"]
    return {
        "stopped": step,
        "refused": refused,
        "unread": unread,
        "renewed": [uncharged, renewed],
        "resumed": [digest((again.params, again.info)), report],
    }


def split() -> tuple[Any, Any]:
    """A mesh, and parameters that are split between the processes."""
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("model", "data"))
    place = NamedSharding(mesh, PartitionSpec(None, "model"))
    params = jax.tree.map(np.copy, WIDE)
    params["hidden"]["w"] = jax.device_put(params["hidden"]["w"], place)
    return mesh, params


def quarters(folder: str) -> dict[str, Any]:
    """What a run releases of which every fourth device has a quarter of the parameters.

    On eight devices, of which each process has two and half of the parameters; its records
    are shared too, between processes.
    """
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    weights = {"w": PartitionSpec(None, "model")}
    places = {"hidden": weights, "out": PartitionSpec("model")}
    params = {
        "hidden": {"w": np.cos(np.arange(56, dtype=np.float32)).reshape(7, 8)},
        "out": np.linspace(-1, 1, 8, dtype=np.float32),
    }
    params = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, places
    )
    given = ARGUMENTS | {"mesh": mesh, "ledger": folder, "chunk": 3}
    result = jaxdp.fit(PLAN, jaxdp.Keys.insecure(1), params, DATA, **given)
    program = next(reversed(loop._programs.values())).program
    leaves = jax.tree.leaves(result.params)
    return {
        "digest": [digest(result.info), digest(result.params)],
        "exchanged": sorted(all_reduces(program.as_text())),
        "shards": [
            [*shard.data.shape] for x in leaves for shard in x.addressable_shards
        ],
        "processes": jax.process_count(),
    }


def all_reduces(text: str) -> list[str]:
    """What the all-reduces of a compiled program give, and its other collectives."""
    of = r"= (\S+|\([^()]*\)) "  # A shape, or several.
    found = re.findall(of + r"(all-reduce|all-gather|all-to-all)(?:-start)?\(", text)
    found += re.findall(of + r"(collective-\w+|reduce-scatter)(?:-start)?\(", text)
    return [re.sub(r"\{.*?\}", "", shape) + " " + name for shape, name in found]


def gone(folder: str) -> list[str]:
    """What runs say where process 1 has deleted its part of a leaf."""
    mesh, params = split()
    given = ARGUMENTS | {"mesh": mesh}
    if jax.process_index():
        params["hidden"]["w"].delete()
    keys = jaxdp.Keys.insecure(1)
    return [
        refusal(lambda: jaxdp.fit(PLAN, keys, params, DATA, **given)),
        refusal(lambda: jaxdp.resume(folder, params, DATA, **given)),
    ]


def halves(folder: pathlib.Path) -> dict[str, Any]:
    """What runs release whose parameters are split between the processes."""
    mesh, params = split()

    def run(plan: Any = PLAN, start: Any = params, **kwargs: Any) -> Any:
        given = ARGUMENTS | {"mesh": mesh} | kwargs
        return jaxdp.fit(plan, jaxdp.Keys.insecure(1), start, DATA, **given)

    shown: list[str] = []
    result = run(callback=lambda step, params, _: shown.append(digest(params)))
    weights = result.params["hidden"]["w"]
    adapted = run(GRADIENTS, **ADAPTER)
    return {
        "releases": np.asarray(result.info.releases.addressable_data(0)).tolist(),
        "columns": sorted(
            int(shard.index[1].start or 0) for shard in weights.addressable_shards
        ),
        "shown": shown,
        "digest": [digest(result.params), digest((result.params, result.info))],
        "interrupted": interrupted(folder, PLAN, mesh, DATA, start=params),
        "one whole": refusal(
            lambda: run(start=WIDE if jax.process_index() else params)
        ),
        "one whole again": refusal(
            lambda: jaxdp.resume(
                *(folder, WIDE if jax.process_index() else params, DATA),
                mesh=mesh,
                **ARGUMENTS,
            )
        ),
        "gone": gone(str(folder)),
        "gradients": checkpointed(folder.with_name("gradients"), GRADIENTS, {}),
        "frozen": checkpointed(
            folder.with_name("frozen"), GRADIENTS, {"trainable": ADAPTER["trainable"]}
        ),
        "carried": checkpointed(
            folder.with_name("carried"), CARRIED, {"optimizer": None}
        ),
        "adapted": [
            digest((adapted.params, adapted.info)),
            whole(adapted.params["hidden"]["w"]).tolist(),
            whole(adapted.params["out"]).tolist(),
        ],
        "adapter": interrupted(
            folder.with_name("adapter"),
            *(GRADIENTS, mesh, DATA),
            start=params,
            trained=ADAPTER,
        ),
    }


def checkpointed(
    folder: pathlib.Path, plan: Any, trained: dict[str, Any]
) -> dict[str, Any]:
    """What a run with checkpoints of split leaves ends with, at once and interrupted."""
    mesh, start = split()
    given = ARGUMENTS | {"mesh": mesh} | trained
    keys = jaxdp.Keys.insecure(1)
    once = jaxdp.fit(plan, keys, start, DATA, **given)
    ends = interrupted(folder, plan, mesh, DATA, start=start, trained=trained)
    given.pop("trainable", None)
    # What its checkpoint, bare of secrets, gives again.
    again = jaxdp.resume(folder, start, DATA, **given)
    return ends | {
        "digest": digest((once.params, once.info)),
        "params": jax.tree.map(lambda x: whole(x).tolist(), once.params),
        "ended": [digest((again.params, again.info)), again.report["steps_charged"]],
    }


def main(folder: str) -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    own = jaxdp.Keys.from_entropy()
    shared = own.broadcast()

    def run(keys: Any, data: Any = DATA, **kwargs: Any) -> Any:
        args = ARGUMENTS | {"mesh": mesh} | kwargs
        return jaxdp.fit(PLAN, keys, PARAMS, data, **args)

    shown: list[int] = []
    seen = (
        {"callback": lambda step, *_: shown.append(step)}
        if jax.process_index() == 0
        else {}
    )
    result = run(jaxdp.Keys.insecure(1), ledger=folder, chunk=2, **seen)
    path = pathlib.Path(folder)
    runs = {"zeroth": (PLAN, source()), "first": (GRADIENTS, DATA)}
    budgets = {"zeroth": jaxdp.Budget(path.with_name("budget"))}
    ends = {
        n: interrupted(path.with_name(n), plan, mesh, data, budgets.get(n))
        for n, (plan, data) in runs.items()
    }
    where = jax.process_index()
    short = source() if where else jaxdp.data.ArraySource(np.ones((3, 2)))
    return {
        "interrupted": ends,
        "halves": halves(path.with_name("halves")),
        "devices": jax.device_count(),
        "own keys": refusal(lambda: run(own)),
        # Slices of another size: some records would be read twice, others never.
        "own slices": refusal(
            lambda: run(
                jaxdp.Keys.insecure(1), microbatch_size=SIZE + jax.process_index()
            )
        ),
        "own records": refusal(
            lambda: run(jaxdp.Keys.insecure(1), source(float(where)))
        ),
        "own note": refusal(
            lambda: run(
                jaxdp.Keys.insecure(1),
                ledger=path.with_name("note"),
                note={"x": np.nan} if where else None,
            )
        ),
        "own ledger": refusal(
            lambda: run(
                jaxdp.Keys.insecure(1), ledger=path.with_name("own") if where else None
            )
        ),
        "source here": refusal(
            lambda: run(jaxdp.Keys.insecure(1), source() if where else DATA)
        ),
        "short source": refusal(lambda: run(jaxdp.Keys.insecure(1), short)),
        "keys": keys_lib.fingerprint(shared).hex(),
        "private": shared.private,
        # Each process for itself would have the same noise on data of its own.
        "alone": refusal(lambda: jaxdp.fit(PLAN, shared, PARAMS, DATA, **ARGUMENTS)),
        "together": run(shared).report["private"],
        "shown": shown,
        "digest": digest((result.params, result.info)),
        "steps": result.report["steps_done"],
    }


def victim(folder: str, who: str, lines: str) -> Any:
    """Begins or goes on with a run, which process ``who`` ends by SIGKILL.

    Process 0 after ``lines`` of its ledger, in the file or (an odd number) in ``secret/``
    alone; others where they are about to compute the next chunk. -1: nobody ends it. The
    run is that of the folder's name; all but "whole" have parameters that are split, and
    "checkpoints" reads its records from a source. Returns the parameters at the end.
    """
    # Compiled once for all processes; the same program gives the same bits.
    name = pathlib.Path(folder).name
    cache = pathlib.Path(folder).with_name("cache")
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    mesh, params = jax.make_mesh((jax.device_count(),), ("data",)), PARAMS
    if name != "whole":
        mesh, params = split()
    dies = int(who) == jax.process_index()
    save, write = ledger.Ledger.save, ledger.Ledger._write

    def kill(book: ledger.Ledger) -> None:
        written = (book.folder / ledger.LEDGER).read_bytes()
        if dies and written.count(b"\n") >= int(lines) // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def saving(book: ledger.Ledger, name: str, *args: Any, **kwargs: Any) -> None:
        save(book, name, *args, **kwargs)
        if int(lines) % 2:
            kill(book)

    def writing(book: ledger.Ledger, line: bytes) -> None:
        write(book, line)
        kill(book)

    ledger.Ledger.save, ledger.Ledger._write = saving, writing

    def callback(step: int, params: Any, info: Any) -> None:
        if dies and jax.process_index() and step >= int(lines) // 4:
            os.kill(os.getpid(), signal.SIGKILL)

    given = {"mesh": mesh, "callback": callback} | ARGUMENTS
    data = source() if name == "checkpoints" else DATA
    if (pathlib.Path(folder) / ledger.LEDGER).exists():
        found = jaxdp.resume(folder, params, data, keep_noise_roots=True, **given)
    else:
        keys, plan = jaxdp.Keys.insecure(1), VICTIMS[name]
        found = jaxdp.fit(plan, keys, params, data, ledger=folder, chunk=1, **given)
    return jax.tree.map(lambda x: whole(x).tolist(), found.params)


def ended(words: list[str]) -> list[Any]:
    """What a command ends with, and says."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code: Any = command(words)
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    return [code, said.getvalue()]


def tuned(folder: str, runs: str) -> dict[str, Any]:
    """How ``finetune`` ends with a model that all devices share; ``runs`` are its words.

    By two processes also where one is told to stop, where the first one's disk is full, and
    where the other has another mesh or other records.
    """
    place, words = pathlib.Path(folder), json.loads(runs)
    ends = {
        name: ended([*of_run, "--out", str(place / name)])
        for name, of_run in words.items()
    }
    if jax.process_count() == 1:
        return ends
    judge = tasks.predict
    for name in ("prompt", "gradients"):
        calls = iter(range(9))

        def told(*given: Any, calls: Any = calls, **more: Any) -> Any:
            # Before the run, and after its first chunk.
            if next(calls) == 1 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return judge(*given, **more)

        out = str(place / f"stopped {name}")
        stopped = [*words[name], "--out", out, "--resume", "auto"]
        with mock.patch.object(tasks, "predict", told):
            ends[f"stopped {name}"] = ended(stopped)
        ends[f"resumed {name}"] = ended(stopped)
    first = jax.process_index() == 0
    # The other waits for its part of every tensor, or of an evaluation.
    for name, where, function in (
        ("full", _files, "replacing"),
        ("unrecorded", ledger.Ledger, "record"),
    ):
        fails: Any = contextlib.nullcontext()
        if first:
            error = OSError(errno.ENOSPC, "full")
            fails = mock.patch.object(where, function, side_effect=error)
        with fails:
            ends[name] = ended([*words["lora"], "--out", str(place / name)])
    # Process 1 was given another mesh, or other public records.
    shown = pathlib.Path(words["prompt"][words["prompt"].index("--eval") + 1])
    other = place / f"other-{jax.process_index()}.jsonl"
    other.write_text("".join(shown.read_text().splitlines(True)[:3]))
    for name, was, now in (
        ("other mesh", "model=2,data=2", "data=4"),
        ("other eval", str(shown), str(other)),
    ):
        given = [now if x == was and not first else x for x in words["prompt"]]
        ends[name] = ended([*given, "--out", str(place / name)])
    return ends


def refusals(folder: str) -> dict[str, Any]:
    """How commands end of which one process alone cannot go on."""
    place = pathlib.Path(folder)
    me = jax.process_index()
    words = ["train", "--dataset", "quadratic_identity", "--algorithm", "dpgd"]
    words += ["--num-steps", "4", "--quiet", "--resume", "auto", "--epsilon", "2"]
    if me == 0:
        budget = place / "budget"
        jaxdp.Budget.create(budget, epsilon=3, delta=1e-4, relation="replace_one")

    def run(name: str, who: int = -1, *wrong: Any) -> list[Any]:
        """What process ``who`` ends with whose function fails, and the other one."""
        more = ["--out", str(place / name)]
        more += ["--budget", str(place / "budget")] if name == "run" else []
        fails: Any = contextlib.nullcontext()
        if who == me:
            where, function, error = wrong
            fails = mock.patch.object(where, function, side_effect=error)
        with fails:
            return ended([*words, *more])

    full, missing = OSError(errno.ENOSPC, "full"), ValueError("path must be there")
    return {
        "data": run("data", 1, models, "load", missing),
        "Ctrl-C": run("Ctrl-C", 0, models, "load", KeyboardInterrupt()),
        "folder": run("folder", 0, record, "save_params", full),
        "ledger": run("ledger", 0, ledger.Ledger, "record", full),
        "killed": run("run", 0, budgets, "begin", KeyboardInterrupt()),
        "again": run("run"),
    }
