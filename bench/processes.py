"""One run on one device, on eight, and in two and four processes of these eight together.

A small Llama, tuned by DPZero and by DP-GD: on eight virtual devices of a CPU, of which
each has a quarter of the parameters and half of the records. The parameters are split
*between* the processes, as far as there are several: none has them all.

- The parameters of a device and of a process, over all of them.
- The greatest difference of a released number, and of a parameter at the end, from the run
  on one device, which has the same keys. Sums over devices have another order.
- The same run in a new folder, of which process 0 is killed (SIGKILL) after the second of
  four chunks, and all others then; new processes resume it. Counted are the steps that are
  charged in the end, and what is not to the bit as in the run that nobody killed.

What DPZero releases are slopes, one a step. Of DP-GD they are gradients, of which the last
of each chunk is compared, and what the record has of each step: its length.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxdp
from bench import _harness, lm_step
from jaxdp import plans, sampling
from jaxdp.cli import launch
from jaxdp.models import language
from jaxdp.models.language import tasks
from jaxdp.training import parallel

ROOT = pathlib.Path(__file__).resolve().parents[1]
METHODS = {"DPZero": plans.DPZero, "DP-GD": plans.DPGD}
#: Processes, and devices of each.
LAYOUTS = {
    "1 device": (1, 1),
    "8 devices of 1 process": (1, 8),
    "2 processes of 4 devices": (2, 4),
    "4 processes of 2 devices": (4, 2),
}
QUICK = {"1 device": (1, 1), "2 processes of 2 devices": (2, 2)}
#: Devices that split the parameters; the others share the records.
PARTS = 4
RECORDS, LENGTH, VOCABULARY = 64, 16, 512
STEPS, CHUNK, KILLED = 8, 2, 4
RATE = 1e-2

Row = _harness.Row
Found = dict[str, np.ndarray]


def run(quick: bool) -> list[Row]:
    """Rows of every method on all devices and processes, each run a few processes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in ["DPZero"] if quick else METHODS:
            one: Found = {}
            for layout, size in (QUICK if quick else LAYOUTS).items():
                place = pathlib.Path(folder) / f"{method}, {layout}"
                print(place.name, file=sys.stderr, flush=True)
                said = trained(method, size, place / "once")
                found = read(place / "once")
                one = one or found
                rows += compared(place.name, said, found, one)
                rows += interrupted(place.name, method, size, place, found)
    return rows


# --- what the processes have written -------------------------------------------------


def compared(case: str, said: dict[str, float], found: Found, one: Found) -> list[Row]:
    """Rows of what devices hold, and of differences from one device."""
    rows = [
        Row(case, f"parameters of a {who}", said[who], "share")
        for who in ("device", "process")
    ]
    if found is one:
        return rows
    moved = np.abs(one["parameters"] - one["start"]).max()
    scales = {
        "releases": ("standard deviation of the noise", said["noise_std"]),
        "parameters": ("greatest movement of a parameter", moved),
    }
    for name, (scale, size) in scales.items():
        off = float(np.abs(found[name] - one[name]).max())
        metric = f"{name}, greatest difference from 1 device"
        rows.append(Row(case, metric, off, "", scale, off / float(size)))
    return rows


def interrupted(
    case: str, method: str, size: tuple[int, int], place: pathlib.Path, once: Found
) -> list[Row]:
    """Rows of a run that is killed and resumed, beside the one that is not."""
    trained(method, size, place / "again", "die")
    before = read(place / "again")
    assert f"step {STEPS}" not in before
    trained(method, size, place / "again", "resume")
    after = read(place / "again")
    shown = {x for found in (before, after) for x in found if x.startswith("step")}
    assert shown == {x for x in once if x.startswith("step")}, shown
    books = [jaxdp.ledger.read(place / x / "run") for x in ("once", "again")]
    pairs = [(books[0].releases, books[1].releases)]
    pairs += [(once[name], x[name]) for x in (before, after) for name in shown & {*x}]
    released = sum(differing(*pair) for pair in pairs)
    return [
        Row(case, "charged steps after a kill", books[1].charged, "steps"),
        Row(case, "releases that differ after a kill", released, "numbers"),
        Row(
            case,
            "parameters that differ after a kill",
            differing(once["parameters"], after["parameters"]),
            "numbers",
        ),
    ]


def differing(a: np.ndarray, b: np.ndarray) -> int:
    """Counts float32 numbers that are not the same bits."""
    words = (np.ascontiguousarray(x, np.float32).view(np.uint32) for x in (a, b))
    return int(np.count_nonzero(np.not_equal(*words)))


def read(folder: pathlib.Path) -> Found:
    """Returns the arrays of a folder by name, and all releases as one."""
    found = {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}
    steps = [found[name] for name in sorted(found) if name.startswith("step")]
    return found | {"releases": np.concatenate(steps)}


# --- processes -----------------------------------------------------------------------


def trained(
    method: str, size: tuple[int, int], folder: pathlib.Path, how: str = "end"
) -> dict[str, float]:
    """Trains in processes that end, die or resume; returns what the first one says."""
    count, devices = size
    flags = f"--xla_force_host_platform_device_count={devices}"
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parents[1] / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    of_device = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "8"}
    folder.mkdir(parents=True, exist_ok=True)
    with launch.held_port() as (port, held):
        words = [method, how, str(folder), f"localhost:{port}", str(count)]
        jobs = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.processes", *words, str(index)],
                cwd=ROOT,
                env=cache | os.environ | of_device,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=held,
            )
            for index in range(count)
        ]
    try:
        out, error = jobs[0].communicate(timeout=600)
        if how == "die":
            assert jobs[0].returncode == -signal.SIGKILL, error
            return {}
        ends = [error, *(job.communicate(timeout=600)[1] for job in jobs[1:])]
        assert not any(job.returncode for job in jobs), "\n".join(ends)
        return json.loads(out.splitlines()[-1])
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def main(
    method: str, how: str, place: str, address: str, count: str, index: str
) -> None:
    """Runs a method's plan as one of several processes, or resumes it."""
    if int(count) > 1:  # Before JAX is asked for devices.
        jax.distributed.initialize(address, int(count), int(index))
    folder, first = pathlib.Path(place), int(index) == 0
    model, params, data = problem()
    mesh = None
    if jax.device_count() > 1:
        # Neighbours along the model axis are of different processes, where they can be.
        devices = np.asarray(jax.devices()).reshape(PARTS, -1).T
        mesh = Mesh(devices, ("data", "model"))
        places = language.shardings(params, mesh, axis="model")
        params = jax.device_put(params, places)
    plan = plan_of(method)

    def keep(name: str, tree: Any) -> None:
        numbers = np.concatenate(
            [parallel.on_host(x).ravel() for x in jax.tree.leaves(tree)]
        )
        if first:
            np.save(folder / f"{name}.npy", numbers)

    def callback(step: int, params: Any, info: Any) -> None:
        slopes = parallel.on_host(info.releases)[step - CHUNK : step]
        keep(f"step {step}", slopes if plan.replayable else info.state[0].trace)
        keep("parameters", params)
        if how == "die" and first and step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    keep("start", params)
    given: dict[str, Any] = {
        "value_fn": tasks.prompt(model, lm_step.WORDS).value_fn,
        # Its trace is the last gradient.
        "optimizer": optax.sgd(RATE, momentum=0.0),
        "mesh": mesh,
        "callback": callback,
        "check_isolation": False,
    }
    book = folder / "run"
    if how == "resume":
        jaxdp.resume(book, params, data, **given)
    else:
        stacked = model.is_stacked if plan.replayable else None
        more = {"ledger": book, "chunk": CHUNK, "stacked": stacked}
        jaxdp.fit(plan, jaxdp.Keys.insecure(0), params, data, **given, **more)
    said = {
        "device": held(params, 1),
        "process": held(params),
        "noise_std": plan.noise_std,
    }
    print(json.dumps(said))


def problem() -> tuple[language.LanguageModel, Any, Any]:
    """Returns a Llama with random parameters, and random records for its prompt."""
    config = lm_step.llama(64, 2, 8, 8, 128, vocabulary=VOCABULARY)
    model = language.LanguageModel(config=config)
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    return model, params, lm_step.batch(RECORDS, LENGTH, VOCABULARY)


def plan_of(method: str) -> Any:
    """Returns the plan of a method, of half of the records a step."""
    given: dict[str, Any] = {
        "num_examples": RECORDS,
        "num_steps": STEPS,
        "sampling": sampling.TruncatedPoisson(sampling_prob=0.5),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "noise_multiplier": 1.0,
    }
    if METHODS[method].draws_directions:
        given |= {"smoothing_radius": 1e-3, "l2_clip_norm": 10.0}
    return METHODS[method](**given)


def held(params: Any, devices: int | None = None) -> float:
    """Returns the share of the parameters on so many devices here; on all, if None."""
    size = 0
    for leaf in jax.tree.leaves(jax.tree.map(jnp.asarray, params)):
        shards = leaf.addressable_shards[:devices]
        size += sum({str(x.index): x.data.nbytes for x in shards}.values())
    return size / sum(leaf.nbytes for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    main(*sys.argv[1:])
