"""``jaxdp finetune --method auto``: which method fits the device, from shapes alone.

Gradients learn more from the same budget, so they are taken where their program fits.
Shapes follow from public options, a public record and the number of records.
"""

import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdp import plans, sampling
from jaxdp.cli import cluster, options
from jaxdp.core import keys
from jaxdp.kernels import sphere
from jaxdp.models.language import LanguageModel, adapter_only, quantised, tasks
from jaxdp.training import memory


class Choice(NamedTuple):
    """Method that ``--method auto`` stands for, and why, in one line."""

    method: str
    reason: str


def choice(first: int, zeroth: int, limit: int | None, device: str) -> Choice:
    """Returns dp-lora if ``first`` bytes fit the ``limit`` of the device, else dpzero.

    Args:
      first: bytes that dp-lora needs.
      zeroth: bytes that dpzero needs.
      limit: of the device; None where it does not say.
      device: whose memory it is, in words.
    """
    said = f"dp-lora needs {_size(first)}, dpzero {_size(zeroth)}"
    if limit is None:
        return Choice("dpzero", f"{said}, and {device} does not say how much it has")
    said = f"{said}, and {device} has {_size(limit)}"
    if first <= limit:
        return Choice("dp-lora", f"{said}: gradients fit, and learn more")
    fits = "" if zeroth <= limit else ", and losses may not either"
    return Choice("dpzero", f"{said}: gradients do not fit{fits}")


def needed(
    command: options.Finetune, task: tasks.Task, record: Any, trainable: Any, rows: int
) -> int:
    """Returns the bytes that a run of a completed command needs: on a device, or a CPU.

    Args:
      command: with a method.
      task: of the command.
      record: encoded public records, of which only the shapes are read.
      trainable: predicate on the paths of leaves that move, or None.
      rows: records of a step.
    """
    placing, model = cluster.placing(command), task.model

    def initial() -> Any:
        any_key = keys.from_words(np.zeros(2, np.uint32))  # Only shapes are asked for.
        params = jax.tree_util.tree_map_with_path(cast, model.init(any_key))
        return quantised(params, command.quantised) if command.quantised else params

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        small = adapter_only(sphere.path_str(path))
        return leaf if small else leaf.astype(jnp.dtype(command.dtype))

    params, mesh = jax.eval_shape(initial), cluster.mesh_of(command)
    if placing is not None:
        places = placing(params)
        params = jax.tree.map(lambda x, s: x.update(sharding=s), params, places)
    data = {
        n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for n, x in record.items()
    }
    common: Any = {
        "num_examples": rows,
        "num_steps": 1,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "noise_multiplier": 1.0,
    }
    stacked = None
    if command.method == "dp-lora":
        plan: Any = plans.DPGD(**common)
    else:
        stacked = LanguageModel.is_stacked
        plan = plans.DPZero(
            **common,
            smoothing_radius=1e-3,
            num_directions=command.num_directions or 1,
            direction=command.direction,
        )
    found = memory.needed(
        plan,
        params,
        data,
        value_fn=task.value_fn,
        trainable=trainable,
        stacked=stacked,
        microbatch_size=command.microbatch_size,
        mesh=None if mesh is None else Mesh(mesh.devices, mesh.axis_names),
    )
    on_cpu, total = jax.default_backend() == "cpu", found.total
    # Further copies of the parameters: the initial ones, on the host or split as well; on
    # a CPU also those of a checkpoint, and of the tuned model as it is written.
    total += (3 if on_cpu else placing is not None) * found.parameters
    # The devices of a CPU share its memory.
    return total * (mesh.size if on_cpu and mesh is not None else 1)


def limit() -> tuple[int | None, str]:
    """Returns the bytes of a device that a run may take, and the device in words.

    Of a CPU they are those of the machine that are available now.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit"), f"each {device.device_kind}"
    return _available(), "this machine"


def _available(path: str = "/proc/meminfo") -> int | None:
    """Returns the bytes of memory that new programs can have, or all there are."""
    try:
        for line in pathlib.Path(path).read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass  # Not Linux.
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _size(count: int) -> str:
    """Writes bytes in GB, or in MB where they are fewer."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
