"""The benchmark's Llama-like loss against the same model, written down record by record."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from bench import lm_step
from bench.problems import llama
from jaxdp.kernels import finite_difference, perturb, sphere
from jaxdp.models.language import LanguageModel, num_parameters

TINY = llama.Llama(
    vocab_size=50,
    hidden_size=16,
    layers=2,
    heads=4,
    key_heads=2,
    intermediate_size=24,
    dtype="float32",
)
LOSS = TINY.prompt(lm_step.WORDS)
RADIUS = 0.05


def reference(params: Any, tokens: Any, position: int, label: int) -> float:
    """One record's loss in NumPy: one layer, one head and one token after the other."""
    length, size = position + 1, TINY.head_size  # Nothing after it counts.

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + TINY.epsilon) * scale

    def rotated(x: np.ndarray, at: int) -> np.ndarray:
        turned = np.empty(size)
        for i in range(size // 2):
            angle = at / TINY.base ** (2 * i / size)
            a, b = x[i], x[i + size // 2]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    x = params["embedding"][tokens[:length]]
    for layer in range(TINY.layers):
        own = {name: leaf[layer] for name, leaf in params["layers"].items()}
        y = norm(x, own["attention_norm"])
        query, key, value = (y @ own[name] for name in ("query", "key", "value"))
        mixed = np.zeros_like(x)
        for head in range(TINY.heads):
            group = head // (TINY.heads // TINY.key_heads)
            here = slice(head * size, (head + 1) * size)
            there = slice(group * size, (group + 1) * size)
            for t in range(length):
                scores = [
                    rotated(query[t, here], t) @ rotated(key[s, there], s)
                    for s in range(t + 1)
                ]
                weights = np.exp(np.array(scores) / math.sqrt(size))
                mixed[t, here] = weights / weights.sum() @ value[: t + 1, there]
        x = x + mixed @ own["output"]
        y = norm(x, own["mlp_norm"])
        gate = y @ own["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ own["up"])) @ own["down"]
    last = norm(x, params["final_norm"])[-1]
    scores = params["head"][list(lm_step.WORDS)] @ last
    return math.log(np.exp(scores).sum()) - scores[label]


@pytest.fixture(scope="module")
def problem() -> tuple[Any, Any]:
    params = jax.tree.map(
        lambda x: 8 * x, TINY.init(jax.random.key(0))
    )  # No small losses.
    return params, jax.tree.map(jnp.asarray, lm_step.batch(3, 9, TINY.vocab_size))


@pytest.mark.parametrize("law", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("scale", [RADIUS, -RADIUS])
def test_losses_are_those_of_the_reference(
    problem: Any, law: Any, scale: float
) -> None:
    params, data = problem
    rows = sphere.directions(
        jax.random.key(1), params, law=law, stacked=LanguageModel.is_stacked
    )
    one = sphere.select(rows, 0)
    losses = perturb.losses_at(LOSS, params, data, one, jnp.float32(scale))
    moved = perturb.perturb(params, one, jnp.float32(scale))
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), moved)
    expected = [
        reference(wide, np.asarray(tokens), int(position), int(label))
        for tokens, position, label in zip(
            data["tokens"], data["position"], data["label"], strict=True
        )
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(expected) > 0.1


def test_no_record_is_in_the_slopes_of_another(problem: Any) -> None:
    params, data = problem
    jaxdp.check_isolation(LOSS, params, data)
    rows = sphere.directions(
        jax.random.key(2),
        params,
        law="gaussian",
        num=2,
        stacked=LanguageModel.is_stacked,
    )

    @jax.jit
    def slopes(data: Any) -> jax.Array:
        return finite_difference.slopes(
            LOSS, params, data, rows, smoothing_radius=RADIUS
        )

    before = slopes(data)
    other = jax.tree.map(lambda x: x.at[1].set(x[2]), data)
    after = slopes(other)
    assert bool(jnp.all(before[1] != after[1]))
    np.testing.assert_array_equal(before[::2], after[::2])


def test_shapes_are_those_of_eight_billions() -> None:
    of = llama.Llama()
    shapes = jax.eval_shape(of.init, jax.random.key(0))
    assert num_parameters(shapes) == 8_030_261_248
    layers = shapes["layers"]
    assert layers["key"].shape == (32, 4096, 1024)
    assert layers["gate"].shape == (32, 4096, 14336)
