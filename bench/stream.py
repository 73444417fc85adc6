"""Data in files beside data in memory: steps per second, and the peak of memory.

*Throughput*: the same plan on the same records, by ``fit`` on arrays that the device holds
and on memory-mapped files, in turn. The seconds are those of the steps (``train_seconds``):
without compilation, with all reading. The files are in the system's cache, as those of a
run that comes back to its records are; a disk that is slower than the steps is not hidden.
Reading takes a core: it is hidden behind steps that cost more than their rows do. JAX
computes with every core, and with one of them in the last case. Files of up to 256 MiB are
read through their map, larger ones by a call of the system for each row.
A block has 46 steps here: a run of no more of them reads nothing ahead.

*Memory*: the peak of a process that trains on a file and digests it for its ledger, beside
the same on a file of a hundredth of the size: a large file, and one of 100 million small
records. The files are sparse.
"""

import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench import _harness
from jaxdp import plans, sampling
from jaxdp.models import networks

FEATURES, CLASSES = 256, 10
BATCH = 256
#: Hidden layers of networks, then records and steps of a run that is not quick.
CASES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "linear": ((), 200_000, 600),
    "linear, by calls": ((), 300_000, 600),
    "256 hidden": ((256,), 200_000, 600),
    "256 hidden, by calls": ((256,), 300_000, 600),
    "2 x 1024 hidden, by calls": ((1024,) * 2, 300_000, 256),
    "4 x 2048 hidden, by calls": ((2048,) * 4, 300_000, 32),
    "2 x 1024 hidden, by calls, one core computes": ((1024,) * 2, 300_000, 256),
}
ROOT = pathlib.Path(__file__).resolve().parents[1]
SGD = optax.sgd(0.1)


def run(quick: bool) -> list[_harness.Row]:
    """Rows for each network, then those of memory."""
    rows: list[_harness.Row] = []
    for case in CASES:
        # A quick run has small files, which are all read through their maps.
        if quick and "by calls" in case:
            continue
        rows += on_one_core(case) if "one core" in case else of_case(case, quick)
    with tempfile.TemporaryDirectory() as folder:
        home = pathlib.Path(folder)
        rows += memory("a large file", 2**29 if quick else 5 * 10**9, FEATURES, home)
        return rows + memory("many records", 8 * 10 ** (6 if quick else 8), 2, home)


def of_case(case: str, quick: bool) -> list[_harness.Row]:
    """Rows of one of the networks."""
    hidden, n, steps = CASES[case]
    size = (20_000, 60, 3) if quick else (n, steps, 9)
    with tempfile.TemporaryDirectory() as folder:
        return throughput(case, hidden, BATCH, *size, pathlib.Path(folder))


def on_one_core(case: str) -> list[_harness.Row]:
    """Rows of a network in a process of its own, whose JAX has one thread."""
    code = (
        "import json; from bench import stream; "
        f"print(json.dumps([x.__dict__ for x in stream.of_case({case!r}, False)]))"
    )
    environment = os.environ | {"NPROC": "1"}
    out = subprocess.check_output(
        [sys.executable, "-c", code], cwd=ROOT, env=environment
    )
    return [_harness.Row(**row) for row in json.loads(out.splitlines()[-1])]


def make_plan(n: int, batch: int, steps: int) -> plans.DPZero:
    return plans.DPZero(
        num_examples=n,
        num_steps=steps,
        sampling=sampling.TruncatedPoisson(sampling_prob=batch / n),
        relation="zero_out",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
        direction="rademacher",
        noise_multiplier=1.0,
    )


def throughput(
    case: str,
    hidden: tuple[int, ...],
    batch: int,
    n: int,
    steps: int,
    rounds: int,
    folder: pathlib.Path,
) -> list[_harness.Row]:
    """Steps per second over files, and how many of those over arrays they are."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, n, dtype=np.int32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    files = tuple(np.load(folder / f"{k}.npy", mmap_mode="r") for k in ("x", "y"))
    plan = make_plan(n, batch, steps)
    net = (
        networks.mlp(FEATURES, CLASSES, hidden=hidden)
        if hidden
        else networks.linear(FEATURES, CLASSES)
    )
    params = net.init(jax.random.key(0))
    train = functools.partial(
        jaxdp.fit,
        plan,
        jaxdp.Keys.insecure(0),
        params,
        value_fn=net.value_fn,
        optimizer=SGD,
        check_isolation=False,
    )
    sides: dict[str, Any] = {
        "files": jaxdp.data.ArraySource(files),
        "memory": (jnp.asarray(x), jnp.asarray(y)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    found = {name: train(data) for name, data in sides.items()}  # Compiles.
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()), found["files"].params, found["memory"].params
    )
    assert all(jax.tree.leaves(same)), "files and memory must give the same bits"
    for i in range(rounds):
        for name in sides if i % 2 == 0 else reversed(sides):
            seconds[name].append(train(sides[name]).report["train_seconds"])
    size = (x.nbytes + y.nbytes) / 2**20
    shown = f"{case}, batch {batch}"
    return [
        _harness.Row(shown, "size of the data", size, "MiB"),
        _harness.speed(shown, "steps per second", seconds, "files", "memory", steps),
        _harness.Row(
            shown,
            "steps per second, memory",
            steps / statistics.median(seconds["memory"]),
            "1/s",
        ),
    ]


def memory(
    case: str, size: int, features: int, folder: pathlib.Path
) -> list[_harness.Row]:
    """Peak memory of processes that train on a file, and on one of a hundredth."""
    if not pathlib.Path("/proc/self/status").exists():
        note = "skipped: needs /proc"
        return [_harness.Row(case, "peak memory", None, "MiB", note=note)]
    peaks = {}
    for bytes_ in (size // 100, size):
        path = folder / "sparse"
        with path.open("wb") as file:
            file.truncate(bytes_ // (4 * features) * (4 * features))
        code = f"from bench import stream; stream.child({str(path)!r}, {features})"
        out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
        peaks[bytes_] = float(out.split()[-1])
        path.unlink()
    small, large = peaks.values()
    return [
        _harness.Row(case, "size of the data", size / 2**20, "MiB"),
        _harness.Row(case, "records", size // (4 * features), ""),
        _harness.Row(case, "peak memory", large, "MiB", "a hundredth", large / small),
        _harness.Row(case, "peak memory over data", large * 2**20 / size, ""),
    ]


def child(path: str, features: int) -> None:
    """Trains on a file with a ledger, and prints the peak of this process in MiB."""
    x = np.memmap(path, np.float32, "r").reshape(-1, features)
    plan = make_plan(len(x), 256, 50)
    with tempfile.TemporaryDirectory() as folder:
        jaxdp.fit(
            plan,
            jaxdp.Keys.insecure(0),
            jnp.zeros(features),
            jaxdp.data.ArraySource(x),
            value_fn=lambda w, batch: batch @ w,
            optimizer=SGD,
            ledger=folder,
            chunk=10,
        )
    print(_harness.peak_mebibytes())
