"""Decoders of every family: lazy equals materialised, windows, real configurations.

Their logits against those of `transformers` are in test_parity.py.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.kernels import perturb, sphere
from jaxdp.models.language import (
    Config,
    DecoderConfig,
    LanguageModel,
    LoRA,
    Prefix,
    checkpoint,
    num_parameters,
    rotary,
    tasks,
)
from jaxdp.models.language.config import from_json

GOLDEN = pathlib.Path(__file__).parent / "golden"
FAMILIES = ("llama_scaled", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
FAMILIES += ("phi3", "smollm3")
#: A family that has most, with an adapter each: the others are slow.
ADAPTERS = {"gemma2": Prefix(length=2), "phi3": LoRA(rank=2), "qwen2": LoRA(rank=2)}
FAST = ("gemma2", "phi3")
families = pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in FAST else pytest.mark.slow) for f in FAMILIES],
)
KEY = jax.random.key(5)
ROWS, LENGTH = 3, 9


@functools.cache
def case(family: str) -> tuple[LanguageModel, Any, Any, dict[str, jax.Array]]:
    """A model, the loss of an answer's tokens, random parameters and a batch."""
    config = checkpoint.read_config(GOLDEN / family)
    model = LanguageModel(config=config, adapter=ADAPTERS.get(family))
    draw = np.random.default_rng(2)

    def one(like: Any) -> jax.Array:  # No zeros: LoRA's B and biases begin there.
        return jnp.asarray(draw.normal(0.2, 0.3, like.shape), jnp.float32)

    params = jax.tree.map(one, jax.eval_shape(model.init, KEY))
    lengths = jnp.asarray([LENGTH, 4, 7])[:, None]
    mask = jnp.arange(LENGTH) < lengths
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 3, 40)
    span = mask & (jnp.arange(LENGTH) >= lengths - 2)
    data = {"tokens": jnp.where(mask, tokens, 1), "mask": mask, "span": span}
    return model, tasks.generation(model, span_length=2).value_fn, params, data


@functools.cache
def losses_of(family: str) -> Any:
    return jax.jit(case(family)[1])


def read(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


# --- losses ------------------------------------------------------------------------


@families
def test_lazy_is_bit_equal_to_materialised(family: str) -> None:
    model, loss, params, data = case(family)
    rows = sphere.directions(KEY, params, law="gaussian", stacked=model.is_stacked)
    one = sphere.select(rows, 0)
    lazily = jax.jit(lambda p, s: perturb.losses_at(loss, p, data, one, s))
    formed = jax.jit(lambda p, s: perturb.perturb(p, one, s))
    base = np.asarray(losses_of(family)(params, data))
    for scale in (jnp.float32(0.05), jnp.float32(-0.05)):
        got = np.asarray(lazily(params, scale))
        want = np.asarray(losses_of(family)(formed(params, scale), data))
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
        assert np.all(got != base)


@families
def test_every_leaf_counts(family: str) -> None:
    _, _, params, data = case(family)
    base = np.asarray(losses_of(family)(params, data))
    leaves, structure = jax.tree.flatten(params)
    paths = [sphere.path_str(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    for i, path in enumerate(paths):
        signs = np.where(np.arange(leaves[i].size) % 3 == 0, -0.3, 0.3)
        moved = [*leaves]
        moved[i] = leaves[i] + signs.reshape(leaves[i].shape).astype(np.float32)
        got = losses_of(family)(jax.tree.unflatten(structure, moved), data)
        assert np.max(np.abs(np.asarray(got) - base)) > 1e-5, path


@families
def test_a_loss_reads_one_record_and_no_padding(family: str) -> None:
    _, loss, params, data = case(family)
    jaxdp.check_isolation(loss, params, data)
    other = data | {"tokens": jnp.where(data["mask"], data["tokens"], 17)}
    losses = losses_of(family)
    np.testing.assert_array_equal(losses(params, other), losses(params, data))


def test_a_window_ends_before_the_first_token() -> None:
    """One layer with a window of 4: the last token sees tokens 5 to 8 of 9."""
    config = DecoderConfig.from_json(read("mistral") | {"num_hidden_layers": 1})
    model = LanguageModel(config=config)
    params = model.init(KEY)
    tokens = jnp.arange(9)[None] + 3
    hidden = jax.jit(lambda t: model.hidden(params, t, jnp.ones((1, 9), bool))[0, -1])
    for place in range(9):
        moved = hidden(tokens.at[0, place].set(30))
        assert np.array_equal(moved, hidden(tokens)) == (place < 5), place


@pytest.mark.slow  # Two compilations; `bench families` has it for every family.
def test_memory_of_a_step_is_a_forward_and_a_layer() -> None:
    """Not the parameters once more, which a materialised point has."""
    config = DecoderConfig(
        model_type="llama",
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=16,
    )
    model = LanguageModel(config=config)
    shapes = jax.eval_shape(model.init, KEY)
    data = {n: case("llama_scaled")[3][n] for n in ("tokens", "mask", "span")}
    loss = tasks.generation(model, span_length=2).value_fn

    def slope(params: Any) -> jax.Array:
        rows = sphere.directions(
            KEY, params, law="rademacher", stacked=model.is_stacked
        )
        one = sphere.select(rows, 0)
        ahead = perturb.losses_at(loss, params, data, one, jnp.float32(0.01))
        behind = perturb.losses_at(
            loss, params, data, one, jnp.float32(-0.01), after=ahead
        )
        return ahead - behind

    def needs(fn: Any) -> int:
        analysis: Any = jax.jit(fn).lower(shapes).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    layer = sum(4 * x.size // 8 for x in jax.tree.leaves(shapes["layers"]))
    assert needs(slope) < needs(lambda p: loss(p, data)) + 1.5 * layer


# --- configurations ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sorted(p.parent.name for p in GOLDEN.glob("*/config.json"))
)
def test_a_configuration_goes_through_json(name: str) -> None:
    config = from_json(read(name))
    assert from_json(json.loads(json.dumps(config.to_json()))) == config
    assert hash(config) == hash(from_json(read(name)))


#: What folders on the Hub say of themselves, and their numbers of parameters.
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, tuple[int, str, tuple[int, ...], dict[str, Any]]] = {
    # name: number, family, (vocabulary, width, layers, heads, keys, inner), the rest
    "Llama-2-7b": (6_738_415_616, "llama", (32000, 4096, 32, 32, 32, 11008), {}),
    "Llama-3.1-8B": (
        8_030_261_248,
        "llama",
        (128256, 4096, 32, 32, 8, 14336),
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
    "SmolLM2-135M": (
        134_515_008,
        "llama",
        (49152, 576, 30, 9, 3, 1536),
        {"tie_word_embeddings": True},
    ),
    "Mistral-7B-v0.1": (7_241_732_096, "mistral", (32000, 4096, 32, 32, 8, 14336), {}),
    "Qwen2.5-0.5B": (
        494_032_768,
        "qwen2",
        (151936, 896, 24, 14, 2, 4864),
        {"tie_word_embeddings": True, "use_sliding_window": False},
    ),
    "Qwen3-0.6B": (
        596_049_920,
        "qwen3",
        (151936, 1024, 28, 16, 8, 3072),
        {"tie_word_embeddings": True, "head_dim": 128, "sliding_window": None},
    ),
    "gemma-2b": (
        2_506_172_416,
        "gemma",
        (256000, 2048, 18, 8, 1, 16384),
        {"hidden_act": "gelu"},
    ),
    "gemma-2-2b": (2_614_341_888, "gemma2", (256000, 2304, 26, 8, 4, 9216), {}),
    "gemma-3-1b": (
        999_885_952,
        "gemma3_text",
        (262144, 1152, 26, 4, 1, 6912),
        {"sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1e6},
    ),
    "Phi-3-mini-4k": (
        3_821_079_552,
        "phi3",
        (32064, 3072, 32, 32, 32, 8192),
        {"sliding_window": 2047},
    ),
    "Phi-4-mini": (
        3_836_021_760,
        "phi3",
        (200064, 3072, 32, 24, 8, 8192),
        {"tie_word_embeddings": True, "partial_rotary_factor": 0.75},
    ),
    "ModernBERT-base": (
        149_655_232,
        "modernbert",
        (50368, 768, 22, 12, 12, 1152),
        {"global_rope_theta": 160000.0, "position_embedding_type": "absolute"},
    ),
    "ModernBERT-large": (
        395_881_664,
        "modernbert",
        (50368, 1024, 28, 16, 16, 2624),
        {"global_attn_every_n_layers": 3, "layer_norm_eps": 1e-5},
    ),
    "SmolLM3-3B": (3_075_098_624, "smollm3", (128256, 2048, 36, 16, 4, 11008), {}),
}


def published(name: str) -> Config:
    _, family, sizes, more = PUBLISHED[name]
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "intermediate_size")
    common = {"model_type": family, "max_position_embeddings": 8192}
    fields = common | dict(zip(names, sizes, strict=True)) | more
    return from_json(fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    model = LanguageModel(config=published(name))
    assert num_parameters(jax.eval_shape(model.init, KEY)) == PUBLISHED[name][0]


def test_windows_and_rotations_of_published_models() -> None:
    def looks(name: str) -> tuple[list[Any], list[Any]]:
        seen = published(name).looks
        return [w for w, _ in seen[:6]], [r and r.base for _, r in seen[:6]]

    assert looks("Mistral-7B-v0.1")[0] == [4096] * 6
    assert looks("gemma-2-2b")[0] == [4096, None] * 3
    assert looks("gemma-3-1b") == ([512] * 5 + [None], [1e4] * 5 + [1e6])
    assert looks("ModernBERT-base") == ([None, 65, 65] * 2, [16e4, 1e4, 1e4] * 2)
    assert looks("SmolLM3-3B") == ([None] * 6, [2e6] * 3 + [None] + [2e6] * 2)
    assert looks("Qwen2.5-0.5B")[0] == looks("Qwen3-0.6B")[0] == [None] * 6
    fields = published("Qwen2.5-0.5B").to_json()
    fields |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 20}
    late = from_json({n: x for n, x in fields.items() if n != "layer_types"})
    assert [w for w, _ in late.looks] == [None] * 20 + [9] * 4


def test_fields_of_before_and_since_rope_parameters() -> None:
    fields = published("Llama-3.1-8B").to_json()
    scaling = fields.pop("rope_scaling") | {"rope_theta": fields.pop("rope_theta")}
    assert from_json(fields | {"rope_parameters": scaling}) == published("Llama-3.1-8B")


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    (_, rotation), *_ = published("Llama-3.1-8B").looks
    assert rotation is not None
    turns, factor = rotation.frequencies(10)
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    assert factor == 1
    slow = 2 * np.pi / plain > 8192
    fast = 2 * np.pi / plain < 8192 / 4
    np.testing.assert_allclose(turns[fast], plain[fast])
    np.testing.assert_allclose(turns[slow], plain[slow] / 8)
    between = ~slow & ~fast
    assert between.any()
    assert np.all((turns < plain) & (turns > plain / 8) | ~between)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type must be one of .*'gpt2'"),
        ("llama", {"hidden_act": "relu"}, "hidden_act must be 'silu', got 'relu'"),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config must be"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads must divide .* 4"),
        ("llama", {"head_dim": 5}, "rotary .* even, got 5"),
        ("llama", {"intermediate_size": None}, "must have intermediate_size"),
        (
            "llama",
            {
                "rope_parameters": None,
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
            },
            "rope_scaling must be of the type default, linear, .* got 'dynamic'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "'llama3' must have low_freq_factor, high_freq_factor, original",
        ),
        (
            "phi3_long",
            {
                "rope_parameters": read("phi3_long")["rope_parameters"]
                | {"long_factor": [1]}
            },
            "long_factor of rope_scaling must have 2 numbers, got 1",
        ),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must be 3 of"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types must be 3"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        (
            "modernbert_mlm",
            {"layer_types": ["full_attention"]},
            "layer_types must be 3",
        ),
        (
            "modernbert_mlm",
            {"classifier_pooling": "last"},
            "classifier_pooling must be",
        ),
        ("modernbert_mlm", {"norm_bias": True}, "norm_bias must be False, got True"),
        ("modernbert_mlm", {"num_hidden_layers": 1}, "num_hidden_layers must be .* 2"),
        (
            "modernbert_mlm",
            {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling must be left out for modernbert",
        ),
    ],
)
def test_wrong_configurations_are_named(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        from_json(read(name) | change)


def test_an_option_of_another_family_is_refused() -> None:
    fields = {n: x for n, x in vars(published("gemma-2b")).items() if n in _NAMES}
    with pytest.raises(ValueError, match="sliding_window must be left out for gemma"):
        DecoderConfig(**fields | {"sliding_window": 8})


_NAMES = set(DecoderConfig.__dataclass_fields__)


def test_yarn_and_longrope_say_what_multiplies() -> None:
    yarn = rotary.Rotation(
        size=8,
        base=100.0,
        longest=64,
        scaling=(("factor", 4.0), ("rope_type", "yarn")),
    )
    assert yarn.frequencies(8)[1] == pytest.approx(0.1 * np.log(4) + 1)
    (_, long), *_ = from_json(read("phi3_long")).looks
    assert long is not None
    short, factor = long.frequencies(10)
    assert factor == pytest.approx(np.sqrt(1 + np.log(64 / 10) / np.log(10)))
    np.testing.assert_allclose(short / long.frequencies(11)[0], [3 / 1, 5 / 2])
