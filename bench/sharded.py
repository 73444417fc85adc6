"""What a device holds and exchanges where the parameters of a model are split over devices.

The loop of a run of DPZero, as ``fit`` compiles it, of abstract shapes in bfloat16: no
weight is made. Each model in a process of its own with 32 virtual devices of a CPU, on
meshes of one device, of 8 that split the parameters, and of 4 x 8, of which 4 share the
records too.

Bytes of arguments are those of any device. Temporary memory is that of XLA's compiler for
CPUs, which multiplies numbers of 16 bits in float32: it stores all weights a second time,
twice as long, and tells nothing of other devices. What is exchanged is counted in the
program's text, by the results of its collectives, loops over layers times their trips.
"""

import collections
import json
import math
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxdp
from bench import _accelerators_hlo as hlo
from bench import _accelerators_programs as programs
from bench import _harness, lm_step
from jaxdp import training
from jaxdp.core import keys as keys_lib
from jaxdp.models.language import LanguageModel, shardings
from jaxdp.training import parallel

Row = _harness.Row
MODELS: dict[str, programs.Shape] = {
    "OPT-1.3B": lm_step.LARGE["OPT-1.3B"],
    "OPT-13B": lm_step.LARGE["OPT-13B"],
    "Llama 70B": (lm_step.llama(8192, 80, 64, 8, 28672), 8, 256),
}
TINY: dict[str, programs.Shape] = {
    "tiny": (lm_step.llama(64, 2, 8, 8, 128, vocabulary=512), 8, 16)
}
#: Devices that share the records, and those that split the parameters.
MESHES = {1: (1, 1), 8: (1, 8), 32: (4, 8)}
LAW = "gaussian"


def run(quick: bool) -> list[Row]:
    """Rows of every model, each from a process of its own."""
    found = []
    for name in TINY if quick else MODELS:
        flags = f"--xla_force_host_platform_device_count={max(MESHES)}"
        environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
        done = subprocess.run(
            [sys.executable, "-m", "bench.sharded", name],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found += [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]
    return found


def main(name: str) -> None:
    """Prints the rows of a model as JSON."""
    shape = (MODELS | TINY)[name]
    rows = [row for devices in MESHES for row in rows_of(name, shape, devices)]
    print(json.dumps([row.__dict__ for row in rows]))


def rows_of(name: str, shape: programs.Shape, devices: int) -> list[Row]:
    """Rows of a model on a mesh of so many devices."""
    print(name, devices, file=sys.stderr, flush=True)
    compiled, params, layer = built(shape, MESHES[devices])
    memory, case = compiled.memory_analysis(), f"{name}, {devices} devices"
    sizes = {
        "parameters": params,
        "arguments": memory.argument_size_in_bytes,
        "temp memory": memory.temp_size_in_bytes,
    }
    rows = [Row(case, key, value / 1e9, "GB") for key, value in sizes.items()]
    moved, largest = exchanged(hlo.Program(compiled.as_text()))
    kinds = ("all-reduce", "all-gather", "integers", "other")
    rows += [Row(case, kind, moved[kind] / 1e6, "MB") for kind in kinds]
    share = largest["all-gather"] / layer
    return [
        *rows,
        Row(case, "largest all-gather over a layer's kernel", share, "share"),
    ]


def built(
    shape: programs.Shape, mesh_shape: tuple[int, int]
) -> tuple[Any, float, float]:
    """Compiles the loop; returns it with a device's bytes of params, and a kernel's."""
    _, rows, _ = shape
    loss, params, data = programs.language_model(shape)
    devices = np.asarray(jax.devices()[: math.prod(mesh_shape)])
    mesh = Mesh(devices.reshape(mesh_shape), ("data", "model"))
    places = shardings(params, mesh)
    params = jax.tree.map(lambda x, s: x.update(sharding=s), params, places)
    plan, stacked = lm_step.plan(rows, LAW), LanguageModel.is_stacked
    options: Any = {"stacked": stacked, "axis_name": parallel.record_axes(mesh, params)}
    keys, optimizer = jaxdp.Keys.insecure(0), optax.sgd(1e-6)
    maker = plan.transform(keys, **options)
    again = plan.replay(keys.direction, stacked=stacked)
    program = training.make_program(plan, maker, optimizer, loss, again)
    with keys_lib.shapes_only():
        carry = jax.eval_shape(
            lambda p: training.start(plan, maker, optimizer, p), params
        )
    kept = parallel.shardings(mesh, params, carry)
    carry = jax.tree.map(lambda x, s: x.update(sharding=s), carry, kept)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = parallel.lowered(mesh, program, carry, keys, data, step, step)
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(params)
    )
    kernels = jax.tree.leaves(params["layers"])
    layer = max(x.size * x.dtype.itemsize / x.shape[0] for x in kernels)
    return lowered.compile(), held, layer


def exchanged(
    of: hlo.Program,
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns bytes of collectives' results in a step, and of the largest, by their names.

    ``integers`` are sums of 32-bit integers: those of the records' slopes.
    """
    total: dict[str, float] = collections.defaultdict(float)
    largest: dict[str, float] = collections.defaultdict(float)

    def visit(name: str, runs: float) -> None:
        body = of.computations[name]
        for line in body.values():
            kind = line.opcode.removesuffix("-start")
            if kind in hlo.COLLECTIVES:
                integers = {x.dtype for x in line.arrays} == {"s32"}
                known = kind if kind in ("all-reduce", "all-gather") else "other"
                total["integers" if integers else known] += runs * line.bytes
                largest[kind] = max(largest[kind], line.bytes)
            elif kind == "while":
                trips = of._trips(line, body) or 1
                visit(of._called(line, "body")[0], runs * trips)
            elif kind != "fusion":
                key = "calls|to_apply|branch_computations|true_computation"
                for called in of._called(line, key):
                    visit(called, runs)

    visit(of.entry, 1)
    return total, largest


if __name__ == "__main__":
    main(sys.argv[1])
