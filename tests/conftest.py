"""Registries: one line here puts a transform through the whole conformance suite."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdp
from jaxdp import plans, sampling
from jaxdp.mechanism.sum_plan import SumPlan

# Compiled programs are shared by the tests, the processes that run them and those that they
# start. Compiling is most of what the tests take, and many compile the same program.
if jax.config.jax_compilation_cache_dir is None:
    for name, value in {
        "jax_compilation_cache_dir": str(Path(__file__).parents[1] / ".jax_cache"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)

NUM_EXAMPLES = 24
BATCH = (
    jax.random.normal(jax.random.key(1), (NUM_EXAMPLES, 3)),
    jax.random.normal(jax.random.key(2), (NUM_EXAMPLES,)),
)
PARAMS = {
    "w": jnp.asarray([0.3, -0.2, 0.1]),
    "layers": {"b": jnp.asarray([[0.5, 0.1], [0.2, -0.4]])},
}


def value_fn(params: Any, batch: Any) -> jax.Array:
    """A smooth loss (B,) that moves every leaf of PARAMS and is elementwise in it."""
    x, y = batch
    residual = x @ params["w"] + jnp.sum(params["layers"]["b"]) - y
    return jnp.sqrt(1 + residual**2)


@dataclasses.dataclass(frozen=True)
class Case:
    """One gradient maker: its plan and constructor, and its non-private limit."""

    name: str
    plan: SumPlan
    make: Callable[..., optax.GradientTransformationExtraArgs]
    #: gradient of the non-private method at (params, batch), given the transform's state
    non_private: Callable[[Any, Any, Any], Any]

    def __str__(self) -> str:
        return self.name


def _mezo(law: str, num: int) -> Callable[[Any, Any, Any], Any]:
    def gradient(params: Any, batch: Any, state: Any) -> Any:
        """MeZO, plainly: the difference of two mean losses times the direction."""
        from jaxdp.core import keys
        from jaxdp.kernels import sphere

        key = keys.at_step(state.direction, state.count)
        rows = sphere.directions(key, params, law=law, num=num)
        total = jax.tree.map(jnp.zeros_like, params)
        for k in range(num):
            u = sphere.materialise(sphere.select(rows, k), params)
            plus = jax.tree.map(lambda p, d: p + 1e-2 * d, params, u)
            minus = jax.tree.map(lambda p, d: p - 1e-2 * d, params, u)
            slope = value_fn(plus, batch).mean() - value_fn(minus, batch).mean()
            total = optax.tree.add_scale(total, slope / 2e-2 / num, u)
        return total

    return gradient


def _mean_gradient(params: Any, batch: Any, state: Any) -> Any:
    del state
    return jax.grad(lambda p: value_fn(p, batch).mean())(params)


COMMON: dict[str, Any] = {
    "num_examples": NUM_EXAMPLES,
    "num_steps": 5,
    "sampling": sampling.FullBatch(),
    "relation": "replace_one",
    "l2_clip_norm": 0.7,
    "noise_multiplier": 1.5,
    "delta": 1e-5,
}


def _zeroth_order(law: str, num: int, **changes: Any) -> Case:
    plan = plans.DPZero(
        smoothing_radius=1e-2, direction=law, num_directions=num, **COMMON | changes
    )
    name = "-".join(["dpzero", law, str(num), *changes.values()])
    return Case(name, plan, jaxdp.dpzero, _mezo(law, num))


#: Every transform that makes gradients.
GRADIENT_MAKERS = (
    _zeroth_order("sphere", 1),
    _zeroth_order("gaussian", 1),
    _zeroth_order("rademacher", 2),
    _zeroth_order("orthonormal", 3),
    _zeroth_order("rademacher", 2, noise="laplace", relation="zero_out"),
    Case(
        "dpgd_zeroth_order",
        plans.DPGDZerothOrder(smoothing_radius=1e-2, **COMMON),
        jaxdp.dpgd_zeroth_order,
        _mezo("sphere", 1),
    ),
    Case("dpgd", plans.DPGD(**COMMON), jaxdp.dpgd, _mean_gradient),
)


@pytest.fixture(scope="module", autouse=True)
def _programs_of_one_module() -> Iterator[None]:
    """Forgets compiled programs after each module: thousands would fill the memory."""
    yield
    jax.clear_caches()


@pytest.fixture(params=GRADIENT_MAKERS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param
