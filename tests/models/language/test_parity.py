"""Our logits and likelihoods against what `transformers` computed (see golden/)."""

import dataclasses
import functools
import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.models.language import checkpoint, generation, tasks
from jaxdp.models.language.config import FAMILIES, from_json
from jaxdp.models.language.network import LanguageModel

# Against stored outputs of other libraries; the network is in test_network.py.
pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
TOLERANCE = 1e-4


def load(folder: pathlib.Path, compute_dtype: Any = "float32"):
    num_labels = 3 if "classifier" in folder.name else None
    config, params = checkpoint.load(folder, num_labels=num_labels)
    model = LanguageModel(
        config=config, num_labels=num_labels, compute_dtype=compute_dtype
    )
    return model, params


@functools.partial(jax.jit, static_argnums=0)
def logits(model: LanguageModel, params: Any, tokens: Any, mask: Any) -> jax.Array:
    """(B, K), or (B, L, V) with zeros at padding."""
    if model.num_labels is not None:
        return model.classify(params, tokens, mask)
    out = model.logits(params, model.hidden(params, tokens, mask))
    return jnp.where(mask[..., None], out, 0)


def log_likelihood(
    model: LanguageModel, scores: jax.Array, targets: np.ndarray, span: np.ndarray
) -> np.ndarray:
    """Sum over the span of log p(target); a decoder's logits name the next token."""
    log_p = np.asarray(jax.nn.log_softmax(scores))
    if model.config.is_decoder:
        log_p = np.roll(log_p, 1, axis=1)
    chosen = np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return np.where(span, chosen, 0).sum(axis=1)


def batches(case: str) -> list[dict[str, np.ndarray]]:
    """The padded batch, and the one without padding."""
    with np.load(GOLDEN / case / "expected.npz") as file:
        arrays = dict(file)
    whole = {n[6:]: arrays.pop(n) for n in [*arrays] if n.startswith("whole_")}
    return [arrays, whole | {"mask": np.ones(whole["tokens"].shape, bool)}]


def test_golden_files_are_small_and_all_there() -> None:
    assert len(CASES) == 24
    assert sum(f.stat().st_size for f in GOLDEN.rglob("*") if f.is_file()) < 800_000


@pytest.mark.parametrize(
    "case",
    [
        # What they add to others is in test_network.py too: their leaves count.
        pytest.param(case, marks=pytest.mark.slow)
        if case not in ("roberta_mlm", "opt")
        else case
        for case in CASES
    ],
)
def test_logits_and_likelihoods_are_those_of_transformers(case: str) -> None:
    model, params = load(GOLDEN / case)
    padded, whole = batches(case)
    assert not padded["mask"].all()
    for batch in (padded, whole):
        ours = logits(model, params, batch["tokens"], batch["mask"])
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, batch["logits"], atol=TOLERANCE, rtol=0)
        if model.num_labels is None:
            sums = log_likelihood(model, ours, batch["targets"], batch["span"])
            want = batch["log_likelihood"]
            assert np.all(want < -1)
            np.testing.assert_allclose(sums, want, atol=TOLERANCE, rtol=0)


def test_generation_loss_is_the_mean_of_the_golden_likelihood() -> None:
    case = "opt_post_norm"  # with projections around its layers
    model, params = load(GOLDEN / case)
    padded, _ = batches(case)
    length = padded["tokens"].shape[1]
    task = tasks.generation(model, span_length=length)
    losses = jax.jit(task.value_fn)(params, padded)
    sums = -losses * padded["span"].sum(axis=1)
    np.testing.assert_allclose(sums, padded["log_likelihood"], atol=TOLERANCE, rtol=0)


def cross_entropy(scores: np.ndarray, label: np.ndarray) -> np.ndarray:
    scores = scores - scores.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(scores, label[:, None], axis=1)[:, 0]
    return np.log(np.exp(scores).sum(axis=1)) - chosen


@pytest.mark.parametrize("case", ["roberta_mlm", "opt"])
def test_prompt_loss_is_that_of_golden_logits_at_the_position(case: str) -> None:
    model, params = load(GOLDEN / case)
    padded, _ = batches(case)
    words, label, position = [30, 4, 17], np.array([2, 0, 1]), np.array([5, 6, 1])
    task = tasks.prompt(model, words)
    batch = padded | {"label": label, "position": position}
    want = padded["logits"][np.arange(3), position][:, words]
    assert np.ptp(want, axis=1).min() > 0.01
    for got, of in (
        (jax.jit(task.value_fn), cross_entropy(want, label)),
        (jax.jit(task.scores), want),
    ):
        np.testing.assert_allclose(got(params, batch), of, atol=TOLERANCE, rtol=0)


def test_choice_loss_is_that_of_means_of_golden_likelihoods() -> None:
    """Three choices of 11, 6 and 2 tokens: their sums have another loss."""
    model, params = load(GOLDEN / "opt")
    padded, _ = batches("opt")
    batch = {n: padded[n][None] for n in ("tokens", "mask", "span")}
    batch |= {"valid": np.ones((1, 3), bool), "label": np.array([1])}
    task = tasks.choice(model, span_length=padded["tokens"].shape[1])
    means = (padded["log_likelihood"] / padded["span"].sum(axis=1))[None]
    got = jax.jit(task.value_fn)(params, batch)
    np.testing.assert_allclose(
        got, cross_entropy(means, batch["label"]), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("case", ["roberta_mlm", "opt", "opt_post_norm"])
def test_what_stands_in_the_padding_does_not_matter(case: str) -> None:
    model, params = load(GOLDEN / case)
    padded, _ = batches(case)
    other = np.where(padded["mask"], padded["tokens"], 7)
    ours = logits(model, params, other, padded["mask"])
    np.testing.assert_allclose(ours, padded["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "case", ["opt", pytest.param("roberta_mlm", marks=pytest.mark.slow)]
)
def test_bfloat16_is_close(case: str) -> None:
    """8 bits of mantissa through two layers: percents of the spread of the logits."""
    model, params = load(GOLDEN / case, "bfloat16")
    padded, _ = batches(case)
    ours = np.asarray(logits(model, params, padded["tokens"], padded["mask"]))
    error = np.abs(ours - padded["logits"])[padded["mask"]]
    assert 1e-4 < error.max() < 0.15  # it is 16 bit, and no worse
    assert error.mean() < 0.02


# --- with transformers at hand (the extra [parity]) --------------------------------


def make_golden() -> Any:
    spec = importlib.util.spec_from_file_location(
        "make_golden", GOLDEN / "make_golden.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")  # of other people's libraries
@pytest.mark.parametrize("case", CASES)
def test_live_parity(case: str, tmp_path: pathlib.Path, record_property: Any) -> None:
    """A larger model of each kind, both ways: we load theirs, and they load ours."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    golden = make_golden()
    name, options = golden.CASES[case]
    larger = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6}
    if "num_key_value_heads" in options:  # Lists of layers, and of numbers of a head.
        larger |= {"num_hidden_layers": 3, "num_attention_heads": 12}
    if options.get("word_embed_proj_dim") == options["hidden_size"]:
        larger["word_embed_proj_dim"] = 96
    rng = np.random.default_rng(100)
    theirs = golden.make_model(name, options | larger, rng, std=0.08)
    theirs.save_pretrained(tmp_path / case)
    model, params = load(tmp_path / case)

    checkpoint.save(tmp_path / "ours", model.config, params, max_shard_bytes=100_000)
    assert (tmp_path / "ours" / checkpoint.INDEX).is_file()
    loaded, info = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info

    for whole in (False, True):
        expected = golden.expect(theirs, name, rng, whole)
        expected = {n.removeprefix("whole_"): x for n, x in expected.items()}
        tokens = expected["tokens"]
        mask = expected.get("mask", np.ones(tokens.shape, bool))
        ours = logits(model, params, tokens, mask)
        error = np.abs(ours - expected["logits"]).max()
        record_property("logits", float(error))
        assert error < TOLERANCE
        if "span" in expected:
            sums = log_likelihood(model, ours, expected["targets"], expected["span"])
            error = np.abs(sums - expected["log_likelihood"]).max()
            record_property("log_likelihood", float(error))
            assert error < TOLERANCE
        back = golden.run(loaded.eval(), tokens, None if whole else mask)
        back = back if back.ndim == 2 else np.where(mask[..., None], back, 0)
        assert np.array_equal(back, expected["logits"])


@pytest.mark.filterwarnings("ignore")  # of other people's libraries
@pytest.mark.parametrize("case", ["opt", "llama", "qwen2", "gemma2", "gemma3"])
def test_live_generation(case: str, tmp_path: pathlib.Path) -> None:
    """Greedy texts of prompts of several lengths, far longer than the windows."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    golden = make_golden()
    name, options = golden.CASES[case]
    options = options | {"max_position_embeddings": 64, "num_hidden_layers": 3}
    rng = np.random.default_rng(100)
    theirs = golden.make_model(name, options, rng)
    theirs.save_pretrained(tmp_path / case)
    model, params = load(tmp_path / case)
    tokens, mask = golden.make_tokens(rng, golden.LENGTHS, max(golden.LENGTHS))
    batch = {"tokens": tokens, "mask": mask}
    ours = generation.generate(model, params, batch, max_new_tokens=20)
    for row, length in enumerate(golden.LENGTHS):
        prompt = torch.from_numpy(tokens[row : row + 1, :length]).long()
        written = theirs.generate(prompt, max_new_tokens=20, do_sample=False)
        written = written[0, length:].numpy()
        assert np.array_equal(ours[row, : len(written)], written)
        assert np.all(ours[row, len(written) :] == golden.PAD)
    assert len(np.unique(ours)) > 3


@pytest.mark.filterwarnings("ignore")  # of other people's libraries
@pytest.mark.parametrize("kind", [*FAMILIES][2:])
def test_live_defaults(kind: str) -> None:
    """A ``config.json`` without what may be left out says the same here and there."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 7}
    sizes |= {"num_attention_heads": 32, "intermediate_size": 8}
    sizes |= {"max_position_embeddings": 32}
    theirs = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
    ours = from_json({"model_type": kind, **sizes})
    resolved = ("layer_types", "no_rope_layers", "sliding_window")
    for field in dataclasses.fields(ours):
        if field.name in theirs and field.name not in resolved:
            assert getattr(ours, field.name) == theirs[field.name], field.name
    layers = range(ours.num_hidden_layers)
    full = ["full_attention"] * len(layers)
    near = theirs.get("layer_types") or full
    near = ["sliding_attention"] * len(layers) if kind == "mistral" else near
    turned = theirs.get("no_rope_layers") or [1] * len(layers)
    rope = theirs["rope_parameters"]
    width = theirs.get("sliding_window")
    if kind == "modernbert":  # of both sides
        width = theirs["local_attention"] // 2 + 1
    for layer, (window, rotation) in zip(layers, ours.looks, strict=True):
        wanted = width if "sliding" in near[layer] else None
        base = rope.get(near[layer], rope)["rope_theta"]
        assert window == wanted
        assert (rotation and rotation.base) == (base if turned[layer] else None)
