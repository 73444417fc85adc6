"""A base of small integers under adapters: its losses, its memory, what moves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys
from jaxdp.models.language import LanguageModel, LoRA, OPTConfig, tasks, tiny_config
from jaxdp.models.language.modules import adapter_only, dequantised, quantised

WIDTH, LAYERS = 128, 6
CONFIG = OPTConfig(
    vocab_size=40,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    max_position_embeddings=20,
    ffn_dim=4 * WIDTH,
)
MODEL = LanguageModel(config=CONFIG, adapter=LoRA(rank=2))
TASK = tasks.prompt(MODEL, (3, 4))
PARAMS = MODEL.init(jax.random.key(0))
PLAN = jaxdp.plans.DPZero(
    num_examples=4,
    num_steps=2,
    sampling=jaxdp.sampling.FullBatch(),
    relation="replace_one",
    l2_clip_norm=1.0,
    smoothing_radius=1e-2,
    noise_multiplier=1.0,
    delta=1e-2,
    direction="rademacher",
)


BATCH = {
    "tokens": jax.random.randint(jax.random.key(1), (4, 6), 3, 40),
    "mask": jnp.ones((4, 6), bool),
    "position": jnp.full(4, 5),
    "label": jnp.asarray([0, 1, 0, 1]),
}


def as_floats(params: Any) -> Any:
    """The base that integers stand for."""
    if not isinstance(params, dict):
        return params
    out = {n: as_floats(x) for n, x in params.items() if n != "kernel_scale"}
    if "kernel_scale" in params:
        out["kernel"] = dequantised(params["kernel"], params["kernel_scale"])
    return out


@pytest.mark.parametrize(("dtype", "most"), [("int8", 127), ("int4", 7)])
def test_losses_are_those_of_the_kernels_that_integers_stand_for(
    dtype: str, most: int
) -> None:
    """To the bit; those kernels are within half a unit of their column of the first."""
    small = jax.eval_shape(lambda p: quantised(p, dtype), PARAMS)
    kernel = small["layers"]["attention"]["query"]["kernel"]
    assert kernel.dtype == dtype and kernel.shape == (LAYERS, WIDTH, WIDTH)
    small = quantised(PARAMS, dtype)
    floats = as_floats(small)
    assert jax.tree.structure(floats) == jax.tree.structure(PARAMS)
    up, was = (p["layers"]["mlp"]["up"]["kernel"] for p in (floats, PARAMS))
    unit = jnp.max(jnp.abs(was), axis=1, keepdims=True) / most
    assert bool((jnp.abs(up - was) <= 0.5001 * unit).all())
    assert float(jnp.max(jnp.abs(up - was) / unit)) > 0.4
    losses = jax.jit(TASK.value_fn)
    np.testing.assert_array_equal(losses(small, BATCH), losses(floats, BATCH))


@pytest.mark.slow  # Two runs of a language model are compiled.
def test_adapters_train_on_integers_which_stay() -> None:
    """And as on the floats that these stand for, to a rounding; alone they cannot move."""
    small = quantised(PARAMS)
    given: dict[str, Any] = {
        "value_fn": TASK.value_fn,
        "stacked": LanguageModel.is_stacked,
        "optimizer": optax.sgd(1e-2),
    }
    with pytest.raises(ValueError, match=r"kernel' of params has dtype int8, which"):
        jaxdp.fit(PLAN, Keys.insecure(0), small, BATCH, **given)
    given["trainable"] = adapter_only
    found = jaxdp.fit(PLAN, Keys.insecure(0), small, BATCH, **given).params
    want = jaxdp.fit(PLAN, Keys.insecure(0), as_floats(small), BATCH, **given).params
    lora = found["layers"].pop("lora")
    small["layers"].pop("lora")
    jax.tree.map(np.testing.assert_array_equal, found, small)
    assert float(jnp.abs(lora["query"]["b"]).max()) > 0
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # noqa: E731
    jax.tree.map(close, lora, want["layers"]["lora"])


def llama_plan(gradients: bool) -> Any:
    common: dict[str, Any] = {
        "num_examples": 4,
        "num_steps": 2,
        "sampling": jaxdp.sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "noise_multiplier": 0.1,
        "delta": 1e-2,
    }
    if gradients:
        return jaxdp.plans.DPGD(**common)
    return jaxdp.plans.DPZero(**common, smoothing_radius=1e-2)


@pytest.mark.parametrize(
    "dtype",
    ["int4", pytest.param("int8", marks=pytest.mark.slow)],  # Two programs.
)
@pytest.mark.parametrize("method", ["dpzero", "dp-lora"])
def test_a_llama_of_integers_lends_both_methods_its_adapter(
    method: str, dtype: str
) -> None:
    """Its frozen leaves stay to the bit; the adapter is that over the floats they mean.

    JAX has no rule for int4 beside floats, which an optimizer must not meet.
    """
    model = LanguageModel(config=tiny_config("llama"), adapter=LoRA(rank=2))
    plan, task = llama_plan(method == "dp-lora"), tasks.generation(model, span_length=2)
    small = quantised(jax.jit(model.init)(jax.random.key(0)), dtype)
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), (4, 6), 3, 50),
        "mask": jnp.ones((4, 6), bool),
        "span": jnp.zeros((4, 6), bool).at[:, 4:].set(True),
    }
    given: dict[str, Any] = {"value_fn": task.value_fn, "trainable": adapter_only}
    given["optimizer"] = optax.sgd(1e-1)
    if method == "dpzero":
        given["stacked"] = LanguageModel.is_stacked
    found = jaxdp.fit(plan, Keys.insecure(0), small, batch, **given).params
    if dtype == "int8":
        floats = as_floats(small)
        want = jaxdp.fit(plan, Keys.insecure(0), floats, batch, **given).params
        lora = [x["layers"]["lora"] for x in (found, want)]
        near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)  # noqa: E731
        jax.tree.map(near, *lora)
    lora, was = found["layers"].pop("lora"), small["layers"].pop("lora")
    assert found["layers"]["mlp"]["gate"]["kernel"].dtype == dtype
    jax.tree.map(np.testing.assert_array_equal, found, small)
    for part in ("query", "value"):
        assert float(jnp.abs(lora[part]["b"] - was[part]["b"]).max()) > 1e-3


def test_a_step_holds_the_integers_and_a_layer() -> None:
    """By the compiler: nothing as large as the base in floats, or as half of it."""
    maker = jaxdp.dpzero(
        PLAN,
        Keys.insecure(0),
        trainable=adapter_only,
        stacked=LanguageModel.is_stacked,
    )
    tx = optax.chain(maker, optax.sgd(1e-2))

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(
            None, state, params, value_fn=TASK.value_fn, batch=BATCH
        )
        params = jaxdp.apply_updates(params, updates, keys=Keys.insecure(0), step=0)
        return params, state

    small = jax.eval_shape(quantised, PARAMS)
    state = jax.eval_shape(tx.init, small)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    found: Any = jitted.lower(small, state).compile().memory_analysis()
    floats = sum(x.size for x in jax.tree.leaves(small) if x.dtype == jnp.int8)
    layer = 4 * floats // LAYERS
    assert found.argument_size_in_bytes < 1.3 * floats  # Beside them, tables and norms.
    assert found.temp_size_in_bytes < 1.5 * layer < 4 * floats / 2
