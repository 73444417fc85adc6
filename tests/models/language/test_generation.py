"""Cached forward passes against whole ones, and generated texts against a plain loop."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.progress
import scipy.stats

from jaxdp.kernels import sphere
from jaxdp.models.language import (
    LanguageModel,
    LoRA,
    Prefix,
    checkpoint,
    generation,
    quantised,
    tasks,
    tiny_config,
)

GOLDEN = pathlib.Path(__file__).parent / "golden"
#: Every family and kind of positions, and adapters for some. Windows are of 4 tokens.
FAMILIES: dict[str, Any] = {
    "opt": Prefix(length=2),
    "opt_post_norm": None,
    "opt_untied": LoRA(rank=2),
    "llama": None,
    "llama_linear": None,
    "llama_scaled": None,
    "mistral": None,
    "qwen2": LoRA(rank=2),
    "qwen2_yarn": Prefix(length=2),
    "qwen3": None,
    "gemma": None,
    "gemma2": Prefix(length=2),
    "gemma3": None,
    "phi3": LoRA(rank=2),
    "phi3_long": None,
    "smollm3": Prefix(length=1),
}
FAST = ("opt", "gemma2")
PROMPT, NEW = 6, 7
#: Products by the same code on every processor: YNNPACK chooses it by the processor, and
#: of two shapes some round differently.
PORTABLE = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INVALID"}
LENGTHS = np.asarray([PROMPT, 2, 4])


@functools.cache
def case(
    family: str, size: float = 1.0
) -> tuple[LanguageModel, Any, dict[str, np.ndarray]]:
    """A model, random parameters and prompts.

    Large kernels write texts that vary, and make more of a rounding.
    """
    config = checkpoint.read_config(GOLDEN / family)
    ends: Any = {"eos_token_id": None, "pad_token_id": 1}
    config = dataclasses.replace(config, **ends)
    model = LanguageModel(config=config, adapter=FAMILIES[family])
    draw = np.random.default_rng(2)

    def one(path: Any, like: Any) -> jax.Array:
        name = sphere.path_str(path)
        std = size if name.startswith("layers") else min(size, 0.4)
        if name.endswith(("scale", "bias")):
            std = 0.2
        mean = 1.0 if name.endswith("scale") else 0.0
        return jnp.asarray(draw.normal(mean, std, like.shape), jnp.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(one, shapes)
    mask = np.arange(PROMPT) < LENGTHS[:, None]
    tokens = draw.integers(3, 40, mask.shape).astype(np.int32)
    return model, params, {"tokens": np.where(mask, tokens, 1), "mask": mask}


@functools.partial(jax.jit, static_argnums=0, compiler_options=PORTABLE)
def cached_logits(model: LanguageModel, params: Any, tokens: Any, starts: Any) -> Any:
    """(B, NEW + 1, V): of a prompt's last token, and of NEW tokens after it.

    The prompts, of different lengths, are the first tokens of each row.
    """
    rows = jnp.arange(len(tokens))
    cache = model.empty_cache(params, len(tokens), tokens.shape[1])
    places = jnp.broadcast_to(jnp.arange(PROMPT), (len(tokens), PROMPT))
    x, cache = model.hidden_after(params, tokens[:, :PROMPT], places, cache)

    def step(cache: Any, i: Any) -> tuple[Any, Any]:
        at = (starts + i)[:, None]
        x, cache = model.hidden_after(params, tokens[rows[:, None], at], at, cache)
        return cache, x[:, 0]

    _, after = jax.lax.scan(step, cache, jnp.arange(NEW))
    x = jnp.concatenate([x[rows, starts - 1][:, None], jnp.swapaxes(after, 0, 1)], 1)
    return model.logits(params, x)


@functools.partial(jax.jit, static_argnums=0, compiler_options=PORTABLE)
def whole_logits(model: LanguageModel, params: Any, tokens: Any) -> jax.Array:
    x = model.hidden(params, tokens, jnp.ones(tokens.shape, bool))
    return model.logits(params, x)


def compared(model: LanguageModel, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Cached and whole logits of the same tokens."""
    draw = np.random.default_rng(3)
    tokens = jnp.asarray(draw.integers(3, 40, (3, PROMPT + NEW)), jnp.int32)
    got = cached_logits(model, params, tokens, LENGTHS)
    want = whole_logits(model, params, tokens)
    index = LENGTHS[:, None] - 1 + np.arange(NEW + 1)
    return np.asarray(got), np.take_along_axis(np.asarray(want), index[..., None], 1)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in FAST else pytest.mark.slow) for f in FAMILIES],
)
def test_cached_logits_are_those_of_the_whole_text(family: str) -> None:
    """Also far behind a window, and where other records are at other places."""
    model, params, _ = case(family, 0.3)
    got, want = compared(model, params)
    assert np.std(want) > 0.1
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


@pytest.mark.slow  # Two more dtypes of one family.
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_cached_logits_by_parameters_of_few_bits(dtype: str) -> None:
    model, params, _ = case("qwen2", 0.3)
    if dtype == "int8":
        params = quantised(params)
    else:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    got, want = compared(model, params)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_keys_that_heads_share_are_kept_once() -> None:
    model, params, _ = case("gemma2")
    cache = model.empty_cache(params, size=3, length=13)
    config = model.config
    assert config.num_key_value_heads < config.num_attention_heads
    shape = (config.num_hidden_layers, 3, 2 + 13, config.num_key_value_heads, 6)
    assert cache.key.shape == cache.value.shape == shape


# --- greedy ------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def next_token(model: LanguageModel, params: Any, tokens: Any, length: Any) -> Any:
    mask = (jnp.arange(len(tokens)) < length)[None]
    x = model.hidden(params, tokens[None], mask)[0, length - 1]
    return jnp.argmax(model.logits(params, x))


def plainly(model: LanguageModel, params: Any, data: Any, ends: tuple = ()) -> Any:
    """Greedy continuations, by one forward pass of the whole text for each token."""
    out = np.full((len(data["tokens"]), NEW), 1)
    for row, (tokens, mask) in enumerate(
        zip(data["tokens"], data["mask"], strict=True)
    ):
        padded, start = np.zeros(PROMPT + NEW, np.int32), mask.sum()
        padded[:start] = tokens[:start]
        for i in range(NEW):
            out[row, i] = padded[start + i] = next_token(
                model, params, padded, start + i
            )
            if out[row, i] in ends:
                break
    return out


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("opt", "phi3_long", "qwen2")
        ),
    ],
)
def test_generated_tokens_are_those_of_a_plain_loop(family: str) -> None:
    model, params, data = case(family)
    got = generation.generate(model, params, data, max_new_tokens=NEW)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, plainly(model, params, data))
    assert len(np.unique(got)) > 3


def test_a_text_ends_at_any_end_token() -> None:
    model, params, data = case("opt")
    whole = plainly(model, params, data)
    ends = int(whole[0, 2]), int(whole[1, 0])
    config = dataclasses.replace(model.config, eos_token_id=ends)
    model = dataclasses.replace(model, config=config)
    got = generation.generate(model, params, data, max_new_tokens=NEW)
    want = plainly(model, params, data, ends)
    np.testing.assert_array_equal(got, want)
    assert got[1].tolist() == [ends[1]] + [1] * (NEW - 1)


def test_an_answer_is_not_read() -> None:
    model, params, data = case("opt")
    span = data["mask"] & (np.arange(PROMPT) >= LENGTHS[:, None] - 1)
    got = generation.generate(model, params, data | {"span": span}, max_new_tokens=NEW)
    asked = data | {"mask": data["mask"] & ~span}
    np.testing.assert_array_equal(got, plainly(model, params, asked))


def test_nothing_is_read_after_an_answer_begins() -> None:
    """A new line that ends a turn is not marked; nor is the next question."""
    model, params, data = case("opt")
    span = data["mask"] & (np.arange(PROMPT) == LENGTHS[:, None] - 2)
    got = generation.generate(model, params, data | {"span": span}, max_new_tokens=NEW)
    asked = data | {"mask": np.arange(PROMPT) < LENGTHS[:, None] - 2}
    np.testing.assert_array_equal(got, plainly(model, params, asked))


def test_prompts_that_are_padded_on_the_left_are_refused() -> None:
    model, params, data = case("opt")
    mask = data["mask"].copy()
    mask[1, 0] = False
    with pytest.raises(ValueError, match=r"mask must be .* before a token: 1$"):
        generation.generate(model, params, data | {"mask": mask}, max_new_tokens=NEW)


# --- independence ------------------------------------------------------------------


def test_logits_depend_on_no_other_record_to_the_bit() -> None:
    model, params, _ = case("gemma2")
    draw = np.random.default_rng(3)
    tokens = draw.integers(3, 40, (3, PROMPT + NEW)).astype(np.int32)
    base = np.asarray(cached_logits(model, params, tokens, LENGTHS))
    other, starts = tokens.copy(), LENGTHS.copy()
    other[[0, 2]], starts[[0, 2]] = other[[2, 0]] + 1, 3
    got = np.asarray(cached_logits(model, params, other, starts))
    assert np.array_equal(got[1].view(np.uint32), base[1].view(np.uint32))
    assert np.all(got[0, 1:] != base[0, 1:])
    # Nor on what stands in the padding of a prompt.
    other = tokens.copy()
    other[1, LENGTHS[1] + NEW :] = 7
    got = np.asarray(cached_logits(model, params, other, LENGTHS))
    assert np.array_equal(got.view(np.uint32), base.view(np.uint32))


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_text_depends_neither_on_other_records_nor_on_batches(drawn: bool) -> None:
    model, params, data = case("opt")
    data = {n: np.concatenate([x, x[::-1], x[:1]]) for n, x in data.items()}
    law: Any = {"temperature": 1.5, "key": jax.random.key(4)} if drawn else {}
    write = functools.partial(generation.generate, model, params, max_new_tokens=NEW)
    base = write(data, **law)
    for size in (1, 3):
        np.testing.assert_array_equal(write(data, batch_size=size, **law), base)
    others = data | {"tokens": np.where(np.arange(7)[:, None] == 2, data["tokens"], 9)}
    np.testing.assert_array_equal(write(others, **law)[2], base[2])
    # The same prompt again is the same text, but for draws: each record has its own.
    assert np.array_equal(base[0], base[6]) != drawn
    assert not np.array_equal(write(others, **law)[0], base[0])


# --- draws -------------------------------------------------------------------------

DRAWS = 4000


def pvalue(found: np.ndarray, shares: np.ndarray) -> float:
    """Of a chi-square test, where rare tokens are one cell; 0 if one cannot be."""
    counts, wanted = np.bincount(found, minlength=len(shares)), len(found) * shares
    if counts[shares == 0].any():
        return 0.0
    rare = wanted < 10
    cells = [np.append(x[~rare], x[rare].sum()) for x in (counts, wanted)]
    counts, wanted = (x[cells[1] > 0] for x in cells)
    return float(scipy.stats.chisquare(counts, wanted).pvalue)


def expected(logits: np.ndarray, law: dict[str, Any]) -> np.ndarray:
    """Shares of the tokens, by a loop over them from the most likely one on."""
    logits = logits.astype(np.float64) - logits.max()
    weights = np.exp(logits / law["temperature"])
    order = np.argsort(-weights)[: law.get("top_k")]
    shares = weights[order] / weights[order].sum()
    least = 1 + np.searchsorted(np.cumsum(shares), law.get("top_p", 1.0))
    out = np.zeros_like(weights)
    out[order[:least]] = shares[:least] / shares[:least].sum()
    return out


@pytest.mark.parametrize(
    "law",
    [
        {"temperature": 0.7},
        pytest.param({"temperature": 1.0, "top_k": 5}, marks=pytest.mark.slow),
        pytest.param(
            {"temperature": 2.0, "top_k": 20, "top_p": 0.6}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda law: "-".join(law),
)
def test_draws_have_the_law_of_the_logits(law: dict[str, Any]) -> None:
    """A right one fails with probability 2e-6; of a law a bit off the p-value is less."""
    model, params, data = case("opt")
    one = {n: np.repeat(x[:1], DRAWS, axis=0) for n, x in data.items()}
    given: dict[str, Any] = {"key": jax.random.key(8), "batch_size": 500, **law}
    found = generation.generate(model, params, one, max_new_tokens=2, **given)

    def logits(tokens: Any) -> np.ndarray:
        padded = np.zeros((1, PROMPT + NEW), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(whole_logits(model, params, padded))[0, len(tokens) - 1]

    start = [*data["tokens"][0]]

    def check(found: np.ndarray, tokens: list[int]) -> None:
        scores = logits(tokens)
        other = law | {"temperature": 2 * law["temperature"]}
        kept = expected(scores, law) > 0
        wrong = np.where(kept, expected(scores, other), 0)
        assert pvalue(found, expected(scores, law)) > 1e-6
        assert pvalue(found, wrong / wrong.sum()) < 1e-6

    start = data["tokens"][0].tolist()
    check(found[:, 0], start)
    # The second token, after the first that is drawn most often.
    first = int(np.bincount(found[:, 0]).argmax())
    check(found[found[:, 0] == first, 1], [*start, first])


# --- likelihood, progress, mistakes ------------------------------------------------


def test_perplexity_counts_tokens_not_records() -> None:
    model, params, data = case("opt")
    span = data["mask"] & (np.arange(PROMPT) >= np.asarray([1, 1, 3])[:, None])
    task = tasks.generation(model, span_length=PROMPT)
    got = tasks.perplexity(task, params, data | {"span": span}, batch_size=2)
    log_p = jax.nn.log_softmax(whole_logits(model, params, data["tokens"]))
    each = np.take_along_axis(
        np.asarray(log_p)[:, :-1], data["tokens"][:, 1:, None], axis=2
    )[..., 0]
    assert span.sum(axis=1).tolist() == [5, 1, 1]
    assert got == pytest.approx(np.exp(-each[span[:, 1:]].mean()), rel=1e-5)
    with pytest.raises(ValueError, match="data must have answers of one token"):
        tasks.perplexity(task, params, data | {"span": np.zeros_like(span)})
    with pytest.raises(ValueError, match="task must be one of texts, got 'prompt'"):
        tasks.perplexity(tasks.prompt(model, [3, 4]), params, data)


def test_a_bar_changes_nothing_and_stands_below_another(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params, data = case("opt")
    write = functools.partial(generation.generate, model, params, data)
    base = write(max_new_tokens=NEW)
    assert capsys.readouterr().out == ""
    with rich.progress.Progress(transient=True):
        got = write(max_new_tokens=NEW, progress=True)
    np.testing.assert_array_equal(got, base)
    track, drawn = rich.progress.track, []

    def seen(*given: Any, **more: Any) -> Any:
        drawn.append(given[1])
        return track(*given, **more)

    monkeypatch.setattr(rich.progress, "track", seen)
    write(max_new_tokens=NEW)
    assert drawn == []
    write(max_new_tokens=NEW, progress=True)
    assert drawn == ["generated texts"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"max_new_tokens": 15}, "max_new_tokens must be at most 14, .* of 20 tokens"),
        ({"temperature": -1.0}, "temperature must be .*got -1.0"),
        ({"temperature": 1.0}, "key must be given with temperature 1.0, got None"),
        ({"top_k": 0}, "top_k must be an integer >= 1, got 0"),
        ({"top_p": 0.0}, "top_p must be .*got 0.0"),
        ({"key": 3}, "key must be a typed JAX key or None, got 3"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"kind": "roberta"}, "model must be a decoder.*got 'roberta'"),
        ({"rows": 0}, "data must have one record or more, got none"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    kind, rows = change.pop("kind", "opt"), change.pop("rows", 2)
    data = {n: np.ones((rows, 6), t) for n, t in (("tokens", np.int32), ("mask", bool))}
    model = LanguageModel(config=tiny_config(kind))
    given: dict[str, Any] = {"max_new_tokens": 2} | change
    with pytest.raises((TypeError, ValueError), match=message):
        generation.generate(model, None, data, **given)  # Nothing is traced.
