"""Predicted memory is that of the program which ``fit`` compiles."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxdp import Keys, plans, sampling
from jaxdp.training import loop, memory, preparing

WIDTH, ROWS = 512, 16
SHAPES = {
    "a": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    "frozen": jax.ShapeDtypeStruct((WIDTH,), jnp.bfloat16),
}
DATA = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
COMMON: Any = {
    "num_examples": ROWS,
    "num_steps": 2,
    "sampling": sampling.FullBatch(),
    "relation": "replace_one",
    "l2_clip_norm": 1.0,
    "noise_multiplier": 1.0,
}


def losses(params: Any, x: jax.Array) -> jax.Array:
    return jnp.sum((x @ params["a"] + params["frozen"].astype(x.dtype)) ** 2, axis=-1)


def needed(plan: Any, **options: Any) -> memory.Memory:
    return memory.needed(
        plan, SHAPES, DATA, value_fn=losses, trainable=lambda p: p == "a", **options
    )


def test_gradients_of_each_record_are_counted() -> None:
    one, four = (needed(plans.DPGD(**COMMON), microbatch_size=n) for n in (1, 4))
    gradient = 4 * WIDTH**2
    assert one.parameters == four.parameters == gradient + 2 * WIDTH
    assert four.temporaries - one.temporaries >= 3 * gradient
    assert one.total >= one.parameters + one.temporaries
    slopes = needed(plans.DPZero(**COMMON, smoothing_radius=1e-3))
    assert slopes.temporaries < four.temporaries
    assert one.temporaries < 3 * gradient  # No copy of a row in one vector, or padded.


@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_it_is_the_program_of_a_run(microbatch_size: int | None) -> None:
    plan = plans.DPGD(**COMMON)
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), SHAPES)
    task = preparing.Task(
        plan,
        params,
        jnp.ones(DATA.shape),
        losses,
        optax.sgd(1e-6),
        microbatch_size,
        None,
        lambda path: path == "a",
        None,
    )
    keys = Keys.insecure(3)
    transform = preparing.make_transform(task, keys)
    carry = loop.start(plan, transform, task.optimizer, params)
    made_of = plan, transform, task.optimizer, losses
    program = loop.make_program(*made_of, trainable=task.trainable)
    whole = lambda c, k, d: program(c, k, d, 0, 2)  # noqa: E731
    lowered = jax.jit(whole, donate_argnums=0).lower(carry, keys, task.data)
    made: Any = lowered.compile(compiler_options=loop.compiler_options("cpu"))
    found = needed(plan, microbatch_size=microbatch_size)
    assert found.temporaries == made.memory_analysis().temp_size_in_bytes
