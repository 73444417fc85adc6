"""What a device holds and exchanges where the parameters of a model are split over devices.

The loop of a run of DPZero, or of DP-GD one record at a time, as ``fit`` compiles it, of
abstract shapes in bfloat16: no weight is made. It is compiled ahead of time for 32 chips of
a v5p, where a TPU's compiler is installed (``make accelerators``): on meshes of one chip,
of 8 that split the parameters, and of 4 x 8, of which 4 share the records too. A small
model is compiled for virtual devices of a CPU elsewhere, whose compiler multiplies numbers
of 16 bits in float32 and so tells nothing of other devices' temporary memory. Each model
has a process of its own.

What is exchanged is counted in the program's text, by the results of its collectives, loops
over layers times their trips.
"""

import collections
import json
import math
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxdp
from bench import _accelerators, _harness, lm_step
from bench import _accelerators_hlo as hlo
from bench import _accelerators_programs as programs
from jaxdp import plans, training
from jaxdp.core import keys as keys_lib
from jaxdp.models.language import LanguageModel, shardings
from jaxdp.training import parallel, preparing

Row = _harness.Row
MODELS: dict[str, programs.Shape] = {
    "OPT-1.3B": lm_step.LARGE["OPT-1.3B"],
    "OPT-13B": lm_step.LARGE["OPT-13B"],
    "Llama 70B": (lm_step.llama(8192, 80, 64, 8, 28672), 8, 256),
}
#: Models of which every parameter is trained by gradients, too. (A step of larger ones has
#: more noised numbers than counters.)
OF_GRADIENTS = ("OPT-1.3B", "tiny")
TINY: dict[str, programs.Shape] = {
    "tiny": (lm_step.llama(64, 2, 8, 8, 128, vocabulary=512), 8, 16)
}
#: Devices that share the records, and those that split the parameters.
MESHES = {1: (1, 1), 8: (1, 8), 32: (4, 8)}
LAW = "gaussian"
#: What is counted: sums of integers apart from other sums.
KINDS = ("integers", *sorted(hlo.COLLECTIVES))
#: What is compiled for: 32 chips, of 95 GB each.
CHIP, BOARD = "v5p", "2x4x4"


def run(quick: bool) -> list[Row]:
    """Rows of every model, each from a process of its own."""
    if (missing := _accelerators.missing(CHIP)) and not quick:
        return [Row(CHIP, "compilation", None, missing)]
    flags = f"--xla_force_host_platform_device_count={max(MESHES)}"
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    found = []
    for name in TINY if quick else MODELS:
        done = subprocess.run(
            [sys.executable, "-m", "bench.sharded", name],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found += [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]
    return found


def device() -> str:
    """The chip that is compiled for, or the device."""
    missing = _accelerators.missing(CHIP)
    return _harness.device() if missing else f"{CHIP} (compiled ahead of time)"


def main(name: str) -> None:
    """Prints the rows of a model as JSON."""
    shape = (MODELS | TINY)[name]
    methods = (False, True) if name in OF_GRADIENTS else (False,)
    rows = [
        row
        for gradients in methods
        for devices in MESHES
        for row in rows_of(name, shape, devices, gradients=gradients)
    ]
    print(json.dumps([row.__dict__ for row in rows]))


def rows_of(
    name: str, shape: programs.Shape, devices: int, *, gradients: bool
) -> list[Row]:
    """Rows of a model on a mesh of so many devices, by DPZero or by DP-GD."""
    name = f"{name}, DP-GD" if gradients else name
    print(name, devices, file=sys.stderr, flush=True)
    case = f"{name}, {devices} devices"
    lowered, params = built(shape, MESHES[devices], gradients)
    layers = params["layers"]
    held = sum(map(_held, jax.tree.leaves(params)))
    rows = [Row(case, "parameters", held / 1e9, "GB")]
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # It does not fit: the compiler says so.
        said = next(x for x in str(error).splitlines() if "emory" in x or "hbm" in x)
        return [*rows, Row(case, "temp memory", None, "", note=f"skipped: {said}")]
    memory = compiled.memory_analysis()
    temp, layer = memory.temp_size_in_bytes, sum(map(_held, jax.tree.leaves(layers)))
    layer /= jax.tree.leaves(layers)[0].shape[0]
    program = hlo.Program(compiled.as_text())
    moved, largest = exchanged(program)
    gathered = largest["all-gather"]
    kernel = max(
        x.size * x.dtype.itemsize / x.shape[0] for x in jax.tree.leaves(layers)
    )
    return [
        *rows,
        Row(case, "arguments", memory.argument_size_in_bytes / 1e9, "GB"),
        Row(case, "temp memory", temp / 1e9, "GB"),
        Row(case, "temp memory in layers", temp / layer, "layers"),
        *(Row(case, kind, moved[kind] / 1e6, "MB") for kind in KINDS),
        Row(
            case,
            "largest all-gather over a layer's kernel",
            gathered.bytes / kernel,
            "share",
            note=gathered.name or "vectors of all layers",
        ),
    ]


def _held(x: Any) -> float:
    """Bytes of a leaf on each device."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def built(
    shape: programs.Shape, mesh_shape: tuple[int, int], gradients: bool
) -> tuple[Any, Any]:
    """Lowers the loop; returns it with the shapes of the parameters on the mesh."""
    _, rows, _ = shape
    loss, params, data = programs.language_model(shape)
    there: Any = jax.devices()
    if not _accelerators.missing(CHIP):
        there = _accelerators.topology(CHIP, BOARD).devices
    devices = np.asarray(there[: math.prod(mesh_shape)])
    mesh = Mesh(devices.reshape(mesh_shape), ("data", "model"))
    places = shardings(params, mesh)
    params = jax.tree.map(lambda x, s: x.update(sharding=s), params, places)
    of_slopes = lm_step.plan(rows, LAW)
    plan: Any = of_slopes
    keys, optimizer, again = jaxdp.Keys.insecure(0), optax.sgd(1e-6), None
    stacked, size = LanguageModel.is_stacked, None
    if gradients:
        plan = plans.DPGD(
            num_examples=rows,
            num_steps=of_slopes.num_steps,
            sampling=of_slopes.sampling,
            relation=of_slopes.relation,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
        )
        stacked, size = None, 1
    else:
        again = plan.replay(keys.direction, stacked=stacked)
    task = preparing.Task(
        plan, params, data, loss, optimizer, size, mesh, None, stacked
    )
    maker = plan.transform(keys, **preparing.maker_options(task))
    program = training.make_program(plan, maker, optimizer, loss, again)
    with keys_lib.shapes_only():
        carry = jax.eval_shape(
            lambda p: training.start(plan, maker, optimizer, p), params
        )
    kept = parallel.shardings(mesh, params, carry)
    carry = jax.tree.map(lambda x, s: x.update(sharding=s), carry, kept)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return parallel.lowered(mesh, program, carry, keys, data, step, step), params


class Result(NamedTuple):
    """The result of a collective: its bytes, and the part of the model that reads it."""

    bytes: float = 0
    name: str = ""


def exchanged(of: hlo.Program) -> tuple[dict[str, float], dict[str, Result]]:
    """Returns bytes of collectives' results in a step, and the largest, by their names.

    ``integers`` are sums of signed 32-bit integers: those of the records' slopes, or of
    their gradients.
    """
    total: dict[str, float] = collections.defaultdict(float)
    largest: dict[str, Result] = collections.defaultdict(Result)

    def visit(name: str, runs: float) -> None:
        body = of.computations[name]
        for line in body.values():
            kind = line.opcode.removesuffix("-start")
            if kind in hlo.COLLECTIVES:
                # What is sent stands before the result where that comes later.
                sent = line.opcode in ("all-gather-start", "collective-permute-start")
                arrays = line.arrays[1:2] if sent else line.arrays
                size = sum(x.size * hlo.BYTES[x.dtype] for x in arrays)
                integers = {x.dtype for x in arrays} == {"s32"}
                total["integers" if integers else kind] += runs * size
                source = re.search(
                    r'op_name="[^"]*/closed_call/(?:Block/)?([^"]*)/\w+"', line.rest
                )
                said = source[1] if source else ""
                largest[kind] = max(largest[kind], Result(size, said))
            elif kind == "while":
                trips = of._trips(line, body) or 1
                visit(of._called(line, "body")[0], runs * trips)
            else:
                key = "calls|to_apply|branch_computations|true_computation"
                for called in of._called(line, key):
                    visit(called, runs)

    visit(of.entry, 1)
    return total, largest


if __name__ == "__main__":
    main(sys.argv[1])
