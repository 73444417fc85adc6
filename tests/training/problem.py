"""A small problem that every test of the record uses; no Flax, for subprocesses."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import plans, sampling

N, D = 24, 7
_X = jnp.sin(jnp.arange(N * D, dtype=jnp.float32)).reshape(N, D)
DATA = (_X, (_X[:, 0] > 0).astype(jnp.float32))
PARAMS = {
    "hidden": {"w": jnp.cos(jnp.arange(D * 5, dtype=jnp.float32)).reshape(D, 5)},
    "out": jnp.asarray([0.3, -0.2, 0.1, 0.4, -0.5]),
}


def value_fn(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    z = jnp.tanh(x @ params["hidden"]["w"]) @ params["out"]
    return jnp.logaddexp(0, z) - y * z


def make_plan(**changes: Any) -> plans.DPZero:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": 23,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "smoothing_radius": 1e-2,
        "noise_multiplier": 2.0,
        "delta": 1e-5,
    }
    return plans.DPZero(**(base | changes))
