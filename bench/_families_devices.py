"""Rows of ``bench families`` that need eight devices, in a process of its own.

``sharded``: losses of a model whose parameters lie on the devices by the default rules,
beside those on one device. Memory: the loop of a run, as ``fit`` compiles it, of the shapes
of large models; no weight is made.

XLA's compiler for CPUs stores weights of 16 bits a second time, in float32, because it
multiplies in float32. So the loop is compiled with weights of float32, of which no copy is
made, and the parameters are counted in bfloat16. Activations are float32 then, as without
``--compute-dtype bfloat16``.

``python -m bench._families_devices sharded`` (or ``memory``) prints rows as JSON.
"""

import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bench import _harness, lm_step
from jaxdp import plans
from jaxdp import sampling as samplers
from jaxdp.kernels.sphere import path_str
from jaxdp.models.language import (
    Config,
    LanguageModel,
    LoRA,
    adapter_only,
    shardings,
    tasks,
)
from jaxdp.training import memory

Row = _harness.Row
DEVICES = 8
ROWS, LENGTH = 8, 256
#: name -> (model, devices that share its parameters).
MODELS: dict[str, tuple[Config, int]] = {
    "Llama 3 8B": (lm_step.llama(), 1),
    "Llama 3 70B, each of 8 devices": (lm_step.llama(8192, 80, 64, 8, 28672), 8),
}
TINY: dict[str, tuple[Config, int]] = {
    "tiny": (lm_step.llama(64, 2, 8, 8, 128, vocabulary=512), 8)
}
#: name -> (adapter, microbatch size of gradients; None for slopes).
METHODS: dict[str, tuple[LoRA | None, int | None]] = {
    "DPZero, all parameters": (None, None),
    "DPZero, LoRA": (LoRA(), None),
    "DP-LoRA, 1 record at once": (LoRA(), 1),
    "DP-LoRA, 8 records at once": (LoRA(), 8),
}


def from_process(*words: str) -> list[Row]:
    """Rows of a process with eight virtual devices."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    done = subprocess.run(
        [sys.executable, "-m", "bench._families_devices", *words],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def main(what: str, *names: str) -> None:
    """Prints rows as JSON."""
    if what == "memory":
        chosen = TINY if names else MODELS
        rows = [row for name, of in chosen.items() for row in memory_rows(name, *of)]
    else:
        rows = [sharded(name) for name in names]
    print(json.dumps([row.__dict__ for row in rows]))


# --- losses of parameters that are split ---------------------------------------------


def sharded(name: str) -> Row:
    """Largest difference of a loss on 2 x 4 devices from that on one, over its size."""
    from bench import families

    print(name, file=sys.stderr, flush=True)
    tiny, _ = families.load(families.GOLDEN / families.CASES[name][0])
    model = LanguageModel(config=families.widened(tiny.config))
    params, data = model.init(jax.random.key(0)), families.batch()
    loss = jax.jit(lambda p, b: families.loss_of(model)(p, b))
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
    split = jax.device_put(params, shardings(params, mesh))
    kernel = split["layers"]["mlp"]["down"]["kernel"]
    assert 4 * kernel.addressable_shards[0].data.nbytes == kernel.nbytes
    want, got = np.asarray(loss(params, data)), np.asarray(loss(split, data))
    return Row(name, "sharded", float(np.max(np.abs(got - want) / np.abs(want))), "")


# --- memory of large models ----------------------------------------------------------


def memory_rows(name: str, config: Config, devices: int) -> list[Row]:
    """Rows of a model: its parameters, and each method's memory, on one device."""
    return [
        row for method in METHODS for row in method_rows(name, config, devices, method)
    ]


def method_rows(name: str, config: Config, devices: int, method: str) -> list[Row]:
    """Rows of a method on a model, in GB on one device."""
    print(name, method, file=sys.stderr, flush=True)
    adapter, microbatch_size = METHODS[method]
    model = LanguageModel(config=config, adapter=adapter)
    params, mesh = jax.eval_shape(model.init, jax.random.key(0)), None
    if devices > 1:
        on = np.asarray(jax.devices()[:devices])[None]
        mesh = Mesh(on, ("data", "model"))
        places = shardings(params, mesh)
        params = jax.tree.map(lambda x, s: x.update(sharding=s), params, places)
    data = jax.eval_shape(
        lambda: jax.tree.map(
            jnp.asarray, lm_step.batch(ROWS, LENGTH, config.vocab_size)
        )
    )
    common: Any = {
        "num_examples": ROWS,
        "num_steps": 2,
        "sampling": samplers.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "noise_multiplier": 1.0,
    }
    gradients = microbatch_size is not None
    slopes = {"smoothing_radius": 1e-3, "direction": "gaussian"}
    plan: Any = plans.DPGD(**common) if gradients else plans.DPZero(**common, **slopes)
    found = memory.needed(
        plan,
        params,
        data,
        value_fn=tasks.prompt(model, lm_step.WORDS).value_fn,
        trainable=None if adapter is None else adapter_only,
        stacked=None if gradients else LanguageModel.is_stacked,
        microbatch_size=microbatch_size,
        mesh=mesh,
    )
    parameters = sum(
        size_of(leaf) * (4 if adapter_only(path_str(path)) else 2)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    )
    total = found.total - found.parameters + parameters
    case = f"{name}, {method}"
    sizes = {
        "parameters": parameters,
        "temporaries": found.temporaries,
        "device memory": total,
    }
    return [Row(case, metric, size / 1e9, "GB") for metric, size in sizes.items()]


def size_of(leaf: Any) -> int:
    """Numbers of a leaf on one device."""
    place = getattr(leaf, "sharding", None)
    shape = leaf.shape if place is None else place.shard_shape(leaf.shape)
    return int(np.prod(shape))


if __name__ == "__main__":
    main(*sys.argv[1:])
