"""Memory that the compiled program of a run needs, from shapes: no weights are made."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jaxdp.core.keys import Keys
from jaxdp.core.types import ValueFn
from jaxdp.mechanism.plan import Plan
from jaxdp.training import loop, parallel, preparing


class Memory(NamedTuple):
    """Bytes that a run's program needs on one device.

    Attributes:
      parameters: of all leaves, frozen ones too, as far as the device holds them.
      temporaries: what a step makes and drops: activations, gradients, their sums.
      total: both, with the data and the run's state.
    """

    parameters: int
    temporaries: int
    total: int


def needed(
    plan: Plan,
    params: Any,
    data: Any,
    *,
    value_fn: ValueFn,
    trainable: Any = None,
    stacked: Any = None,
    microbatch_size: int | None = None,
    mesh: Mesh | None = None,
) -> Memory:
    """Compiles the program of a run for the present device, and returns what it needs.

    The loop is that of ``fit``, with plain steps for an optimizer. Nothing is drawn and
    nothing is computed: neither ``params`` nor ``data`` need hold values.

    Args:
      plan: with noise. Its steps cost time to compile, whatever their number.
      params: arrays or ``jax.ShapeDtypeStruct``, with shardings where there is a mesh.
      data: all records, or their shapes.
      value_fn: of ``fit``, like what follows.
      trainable: which leaves move.
      stacked: which leaves have layers in front.
      microbatch_size: records evaluated at once.
      mesh: of the run.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> from jaxdp.training import memory
      >>> plan = jaxdp.plans.DPGD(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).with_noise(noise_multiplier=2.0)
      >>> params = jax.ShapeDtypeStruct((1000,), jnp.float32)
      >>> data = jax.ShapeDtypeStruct((8, 1000), jnp.float32)
      >>> losses = lambda w, x: ((w - x) ** 2).sum(axis=-1)
      >>> found = memory.needed(plan, params, data, value_fn=losses)
      >>> found.parameters, found.temporaries > 4 * 8 * 1000
      (4000, True)
    """
    task = preparing.Task(
        plan=plan,
        params=params,
        data=data,
        value_fn=value_fn,
        optimizer=optax.sgd(1e-6),
        microbatch_size=microbatch_size,
        mesh=mesh,
        trainable=trainable,
        stacked=stacked,
    )
    keys, maker = Keys.insecure(0), preparing.maker_options(task)
    lowered = preparing.lowered(task, plan.transform(keys, **maker), keys)
    # Those of a mesh may be of a machine that is not here.
    device = (
        parallel.device_of(None, params, data) if mesh is None else mesh.devices.flat[0]
    )
    options = loop.compiler_options(device.platform)
    found: Any = lowered.compile(compiler_options=options)
    sizes = found.memory_analysis()
    held = 0
    for leaf in jax.tree.leaves(params):
        place = getattr(leaf, "sharding", None)
        shape = leaf.shape if place is None else place.shard_shape(leaf.shape)
        held += jax.ShapeDtypeStruct(shape, leaf.dtype).size * leaf.dtype.itemsize
    total = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    total += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return Memory(held, sizes.temp_size_in_bytes, total)
