"""Compilers for devices that are not there: an H100, and TPUs of several kinds.

XLA's own compilers run without a device. An H100 is described by its public data sheet; a
TPU by the name of its topology. ``make accelerators`` makes the environments that have the
compilers and runs ``python -m bench accelerators`` in them.
"""

import dataclasses
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from bench import _accelerators_hlo

# A TPU's compiler asks its machine where it is, unless it is told.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
# One process a chip, where there is a chip.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

#: Data sheet of an H100 SXM (NVIDIA H100 Tensor Core GPU Architecture, v1.04, appendix A),
#: in the form that XLA reads.
_H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32
 shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048
 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
 clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536
 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3" runtime_version { major: 12 minor: 8 }"""


#: H100 SXM and H200 SXM: NVIDIA's data sheets; a vector operation is half of a fused
#: multiply-add of 132 multiprocessors x 128 lanes at 1.98 GHz, 64 of them for integers.
#: v5e, v5p and v6e: docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e. No rate of their vector
#: units is published.
RATES = {
    "H100": _accelerators_hlo.Rates(3.35e12, 989e12, 33.5e12, 16.7e12),
    "H200": _accelerators_hlo.Rates(4.8e12, 989e12, 33.5e12, 16.7e12),
    "v5e": _accelerators_hlo.Rates(819e9, 197e12),
    "v5p": _accelerators_hlo.Rates(2765e9, 459e12),
    "v6e": _accelerators_hlo.Rates(1640e9, 918e12),
}
#: Bytes of main memory.
MEMORY = {"H100": 80e9, "H200": 141e9, "v5e": 16e9, "v5p": 95e9, "v6e": 32e9}
#: As JAX names the devices.
KINDS = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
}


def missing(chip: str) -> str:
    """Returns ``"skipped: ..."`` where this environment has no compiler for a chip."""
    name = "jax_cuda12_plugin" if chip.startswith("H") else "libtpu"
    if importlib.util.find_spec(name) is None:
        return f"skipped: {name} is not installed (make accelerators)"
    return ""


@functools.cache
def topology(chip: str, board: str = "") -> Any:
    """The devices of a board; of a chip's smallest, one H100 or 2 x 2 TPUs, by default."""
    if chip.startswith("H"):
        return topologies.get_topology_desc(
            platform="cuda", target_config=_H100, topology="1x1x1"
        )
    name = f"{chip}:" + (board or ("2x2x1" if chip == "v5p" else "2x2"))
    return topologies.get_topology_desc(platform="tpu", topology_name=name)


def mesh(chip: str) -> Mesh:
    """The mesh of a board's devices, whose records are shared."""
    return Mesh(np.array(topology(chip).devices), ("data",))


@dataclasses.dataclass
class Compiled:
    """A program as its compiler made it.

    Attributes:
      seconds: of tracing, lowering and compiling; cpu: of all cores.
      memory: argument, output, aliased, temporary and peak bytes.
      flops, bytes: of the compiler's own cost analysis, a loop's body once; None: none.
      text: of the program.
    """

    seconds: float
    cpu: float
    memory: Mapping[str, int]
    flops: float | None
    bytes: float | None
    text: str

    def on(self, chip: str | None) -> _accelerators_hlo.Program:
        """What the text says that the program does, at the rates of a chip."""
        return _accelerators_hlo.Program(self.text, RATES[chip] if chip else None)


def compile_for(
    chip: str,
    fn: Callable[..., Any],
    args: Any,
    *,
    donate: tuple[int, ...] = (),
    on: Mesh | None = None,
) -> Compiled:
    """Compiles a function of shapes for one chip, or for a mesh of them."""
    place: Any = (
        SingleDeviceSharding(topology(chip).devices[0])
        if on is None
        else NamedSharding(on, PartitionSpec())
    )
    if on is not None:
        copied = PartitionSpec()
        fn = jax.shard_map(
            fn, mesh=on, in_specs=copied, out_specs=copied, check_vma=False
        )
    jitted = jax.jit(fn, in_shardings=place, out_shardings=place, donate_argnums=donate)
    begin, used = time.perf_counter(), time.process_time()
    compiled = jitted.lower(*args).compile()
    taken = time.perf_counter() - begin, time.process_time() - used
    return described(compiled, *taken)


def described(compiled: Any, seconds: float = 0, cpu: float = 0) -> Compiled:
    """Returns what is known of a compiled program, of any device."""
    found = compiled.memory_analysis()
    memory = {
        name: int(getattr(found, f"{name}_size_in_bytes"))
        for name in ("argument", "output", "alias", "temp")
    }
    memory["peak"] = sum(memory.values()) - 2 * memory["alias"]
    cost = compiled.cost_analysis() or {}
    return Compiled(
        seconds,
        cpu,
        memory,
        cost.get("flops"),
        cost.get("bytes accessed"),
        compiled.as_text(),
    )
