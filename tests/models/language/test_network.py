"""The models: lazy equals materialised, one record one loss, adapters, 16 bits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.kernels import finite_difference, perturb, sphere
from jaxdp.models.language import network, tasks
from jaxdp.models.language.config import (
    ModernBertConfig,
    OPTConfig,
    RobertaConfig,
    from_json,
)

KEY = jax.random.key(5)
ROWS, LENGTH, CHOICES = 3, 10, 2
COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
ROBERTA = RobertaConfig(**COMMON, intermediate_size=32, max_position_embeddings=20)
UNTIED = RobertaConfig(
    **COMMON,
    intermediate_size=32,
    max_position_embeddings=20,
    tie_word_embeddings=False,
)
MODERN = ModernBertConfig(
    **COMMON | {"num_hidden_layers": 4},
    intermediate_size=32,
    max_position_embeddings=20,
    local_attention=6,
    classifier_pooling="mean",
)
OPT = OPTConfig(**COMMON, ffn_dim=32, max_position_embeddings=20)
NARROW = OPTConfig(
    **COMMON,
    ffn_dim=32,
    max_position_embeddings=20,
    word_embed_proj_dim=8,
    do_layer_norm_before=False,
)


def batch(choices: bool = False) -> dict[str, jax.Array]:
    """Seeded records of several lengths, for any of the tasks."""
    shape = (ROWS, CHOICES, LENGTH) if choices else (ROWS, LENGTH)
    lengths = jnp.asarray([10, 4, 7])
    lengths = lengths[:, None] - jnp.arange(CHOICES) if choices else lengths
    mask = jnp.arange(LENGTH) < lengths[..., None]
    # One is shorter than the longest, of 2: what follows it must not be in its loss.
    width = jnp.asarray([2, 1, 2])
    width = width[:, None] if choices else width
    tokens = jax.random.randint(jax.random.key(1), shape, 3, 61)
    return {
        "tokens": jnp.where(mask, tokens, 1),
        "mask": mask,
        "span": mask & (jnp.arange(LENGTH) >= (lengths - width)[..., None]),
        "valid": jnp.ones((ROWS, CHOICES), bool).at[1, 1].set(choices is False),
        "position": jnp.asarray([9, 3, 0]),
        "label": jnp.asarray([0, 0, 1]),
    }


@functools.cache
def case(name: str) -> tuple[tasks.Task, Any, dict[str, jax.Array]]:
    """A task with random parameters, and a batch for it."""
    configs = {"opt": OPT, "narrow": NARROW, "untied": UNTIED, "modern": MODERN}
    config = configs.get(name.split("-")[0], ROBERTA)
    adapter = {"lora": network.LoRA(rank=2), "prefix": network.Prefix(length=3)}
    options: dict[str, Any] = {"adapter": adapter.get(name.split("-")[-1])}
    kind = name.split("-")[1]
    if kind == "head":
        options["num_labels"] = 2
    model = network.LanguageModel(config=config, **options)
    make = {
        "prompt": lambda: tasks.prompt(model, (7, 9)),
        "head": lambda: tasks.head(model),
        "choice": lambda: tasks.choice(model, span_length=2),
        "generation": lambda: tasks.generation(model, span_length=2),
    }
    return make[kind](), random_params(model), batch(kind == "choice")


def random_params(model: network.LanguageModel) -> Any:
    """No constants, as biases, norms and LoRA's B are at first: none hides a mistake."""
    draw = np.random.default_rng(2)

    def one(path: Any, like: Any) -> jax.Array:
        name = sphere.path_str(path)
        std = 0.1 if name.endswith(("bias", "scale")) else 0.3
        mean = 1.0 if name.endswith("scale") else 0.0
        return jnp.asarray(draw.normal(mean, std, like.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(model.init, KEY))


hidden = jax.jit(network.LanguageModel.hidden, static_argnums=0)


@functools.cache
def losses_of(name: str) -> Any:
    """The losses of a case's task: one program for all tests."""
    return jax.jit(case(name)[0].value_fn)


def stacked(path: str) -> bool:
    return network.LanguageModel.is_stacked(path)


def direction(law: str, params: Any, num: int = 1) -> sphere.Direction:
    return sphere.directions(KEY, params, law=law, num=num, stacked=stacked)


def assert_same_bits(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(
        np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)
    )


# --- lazy ---


@pytest.mark.slow  # As in kernels/test_perturb.py, of a whole network.
@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("roberta-prompt-lora", "rademacher"),
        ("modern-prompt-lora", "sphere"),
        ("modern-head", "rademacher"),
        # Other models, tasks and laws: what is lazy in them is kernels/test_perturb.py's.
        pytest.param("opt-choice-prefix", "gaussian", marks=pytest.mark.slow),
        pytest.param("narrow-generation", "sphere", marks=pytest.mark.slow),
    ],
)
def test_lazy_is_bit_equal_to_materialised(name: str, law: str) -> None:
    task, params, data = case(name)
    u = jax.jit(lambda p: sphere.select(direction(law, p), 0))(params)
    scale = jnp.float32(0.05)
    lazily = functools.partial(
        jax.jit(lambda u, p, s: perturb.losses_at(task.value_fn, p, data, u, s)), u
    )
    losses = losses_of(name)
    formed = functools.partial(jax.jit(lambda u, p, s: perturb.perturb(p, u, s)), u)
    base = losses(params, data)
    assert base.shape == (ROWS,) and base.dtype == jnp.float32
    for s in (scale, -scale):
        got = lazily(params, s)
        assert_same_bits(got, losses(formed(params, s), data))
        assert np.any(np.asarray(got) != np.asarray(base))


@pytest.mark.parametrize("name", ["roberta-head", "opt-choice"])
def test_a_record_of_no_class_counts_zero(name: str) -> None:
    """Its loss is NaN; its gradient is that of a masked row, and so are all others."""
    task, params, data = case(name)
    count = len(data["label"])
    wrong = {**data, "label": data["label"].at[1].set(-1)}
    losses = jax.jit(task.value_fn)(params, wrong)
    assert np.flatnonzero(np.isnan(losses)).tolist() == [1]
    plan = jaxdp.plans.DPGD(
        num_examples=count,
        num_steps=1,
        sampling=jaxdp.sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
        noise_multiplier=0,
    )
    tx = plan.transform(jaxdp.Keys.insecure(0))
    state = tx.init(params)

    @jax.jit
    def gradient(batch: Any, mask: jax.Array) -> Any:
        given = {"value_fn": task.value_fn, "batch": batch, "mask": mask}
        return tx.update(None, state, params, **given)[0]

    present = jnp.ones(count, bool)
    got = gradient(wrong, present)
    want = gradient(data, present.at[1].set(False))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@pytest.mark.slow  # One of the above in another precision: six programs.
def test_lazy_is_bit_equal_in_sixteen_bits() -> None:
    """Where XLA may keep more than 16 bits in one program and not in the other."""
    _, params, data = case("roberta-prompt-lora")
    model = network.LanguageModel(
        config=ROBERTA, compute_dtype="bfloat16", adapter=network.LoRA(rank=2)
    )
    loss = tasks.prompt(model, (7, 9)).value_fn
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    u = jax.jit(lambda p: sphere.select(direction("rademacher", p), 0))(params)
    for tree in (params, narrow):
        lazily = jax.jit(lambda u, p, s: perturb.losses_at(loss, p, data, u, s))
        formed = jax.jit(lambda u, p, s: perturb.perturb(p, u, s))
        scale = jnp.float32(0.05)
        assert_same_bits(
            lazily(u, tree, scale), jax.jit(loss)(formed(u, tree, scale), data)
        )


@pytest.mark.slow  # Small losses' are in kernels/test_finite_difference.py.
def test_derivatives_go_through_the_lazy_loss() -> None:
    """A radius of zero, against the small radius: smooth but for ReLU's kinks.

    The small one with materialised points, to which the lazy ones are bit-equal.
    """
    task, params, data = case("roberta-head")
    rows = jax.jit(lambda p: direction("gaussian", p))(params)
    exact = jax.jit(
        lambda p, r: finite_difference.slopes(
            task.value_fn, p, data, r, smoothing_radius=0.0
        )
    )(params, rows)
    u = jax.jit(lambda r, p: sphere.materialise(sphere.select(r, 0), p))(rows, params)
    losses = losses_of("roberta-head")
    ahead, behind = (
        losses(jax.tree.map(lambda x, d, s=s: x + s * d, params, u), data)
        for s in (1e-3, -1e-3)
    )
    near = np.asarray(ahead - behind).reshape(np.shape(exact)) / 2e-3
    assert np.all(np.abs(exact) > 1e-2)
    np.testing.assert_allclose(near, exact, rtol=5e-2, atol=5e-2)


def test_orthonormal_directions_raise() -> None:
    task, params, data = case("roberta-prompt")

    def slopes(params: Any) -> jax.Array:
        rows = direction("orthonormal", params, num=2)
        return finite_difference.slopes(
            task.value_fn, params, data, rows, smoothing_radius=1e-3
        )

    with pytest.raises(ValueError, match=r"direction must be 'sphere'.*'orthonormal'"):
        jax.eval_shape(slopes, params)


@pytest.mark.parametrize(
    "name",
    [
        "roberta-prompt-lora",
        "opt-choice-prefix",
        "modern-head",
        pytest.param("modern-prompt-lora", marks=pytest.mark.slow),
        # Heads, projections and tables of their own, and besides the same leaves.
        pytest.param("roberta-head", marks=pytest.mark.slow),
        pytest.param("narrow-generation", marks=pytest.mark.slow),
        pytest.param("untied-prompt", marks=pytest.mark.slow),
        pytest.param("opt-head", marks=pytest.mark.slow),
    ],
)
def test_every_leaf_counts(name: str) -> None:
    """Each leaf alone moves the losses; lazily so, for lazy is bit-equal to materialised.

    But for the keys' bias, which a softmax over them does not see without a prefix.
    """
    _, params, data = case(name)
    losses = losses_of(name)
    base = np.asarray(losses(params, data))
    leaves, structure = jax.tree.flatten(params)
    paths = [sphere.path_str(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    for i, path in enumerate(paths):
        signs = np.where(np.arange(leaves[i].size) % 3 == 0, -0.3, 0.3)
        moved = list(leaves)
        signs = signs.reshape(leaves[i].shape).astype(np.float32)
        moved[i] = jnp.asarray(np.asarray(leaves[i]) + signs)
        got = np.asarray(losses(jax.tree.unflatten(structure, moved), data))
        seen = float(np.max(np.abs(got - base))) > 1e-5
        assert seen != (path.endswith("key/bias") and "prefix" not in name), path


# --- one record, one loss ---


@pytest.mark.parametrize(
    "name",
    ["roberta-prompt-lora", "opt-choice-prefix", "narrow-generation", "modern-head"],
)
def test_losses_read_one_record_each(name: str) -> None:
    task, params, data = case(name)
    jaxdp.check_isolation(task.value_fn, params, data)


@pytest.mark.parametrize("name", ["roberta-head", "narrow-generation", "modern-head"])
def test_padding_is_not_read(name: str) -> None:
    """Other tokens where there is no mask, to the bit; a longer padding, to a rounding.

    Nor beyond a span that is shorter than the longest: there is padding after it.
    """
    _, params, data = case(name)
    losses = losses_of(name)
    other = data | {"tokens": jnp.where(data["mask"], data["tokens"], 17)}
    assert_same_bits(losses(params, other), losses(params, data))
    longer = {
        n: jnp.pad(x, ((0, 0), (0, 5))) if x.shape == (ROWS, LENGTH) else x
        for n, x in data.items()
    }
    np.testing.assert_allclose(losses(params, longer), losses(params, data), rtol=2e-5)


def test_a_choice_that_is_not_there_is_never_chosen() -> None:
    task, params, data = case("opt-choice-prefix")
    assert task.scores is not None
    assert jax.jit(task.scores)(params, data)[1, 1] < -1e8
    # Whatever it holds: one choice left means a loss of zero.
    assert losses_of("opt-choice-prefix")(params, data)[1] == 0


def test_the_decoder_does_not_look_ahead() -> None:
    _, params, _ = case("opt-choice-prefix")
    model = network.LanguageModel(config=OPT)
    tokens, mask = batch()["tokens"], batch()["mask"]
    before = hidden(model, params, tokens, mask)[0]
    after = hidden(model, params, tokens.at[0, 6].set(5), mask)[0]
    np.testing.assert_array_equal(before[:6], after[:6])
    assert np.any(before[6:] != after[6:])


def test_a_window_of_an_encoder_has_two_sides() -> None:
    """Two layers, of which the second sees four tokens to either side, and the first all.

    A token at a distance of five is seen through the first alone: there it counts the same
    for all that see it, which a first layer of zeros takes away.
    """
    config = dataclasses.replace(
        MODERN, num_hidden_layers=2, local_attention=9, max_position_embeddings=20
    )
    model = network.LanguageModel(config=config)
    params = random_params(model)
    layers = jax.tree.map(lambda x: x, params["layers"])
    for part, name in (("attention", "output"), ("mlp", "down")):
        kernel = layers[part][name]["kernel"]
        layers[part][name] = {"kernel": kernel.at[0].set(0)}
    tokens = jnp.arange(15)[None] + 3
    mask = jnp.ones((1, 15), bool)
    whole = {**params, "layers": layers}
    before = hidden(model, whole, tokens, mask)[0, 7]
    for place in range(15):
        moved = hidden(model, whole, tokens.at[0, place].set(40), mask)[0, 7]
        assert np.array_equal(moved, before) == (abs(place - 7) > 4), place
    moved = hidden(model, params, tokens.at[0, 0].set(40), mask)[0, 7]
    assert not np.array_equal(moved, hidden(model, params, tokens, mask)[0, 7])


# --- adapters, heads, dtypes ---


@pytest.mark.parametrize(
    "adapter",
    [
        network.LoRA(rank=2),
        pytest.param(network.Prefix(length=3), marks=pytest.mark.slow),
    ],
)
def test_an_adapter_is_added_to_a_loaded_model(adapter: network.Adapter) -> None:
    plain = network.LanguageModel(config=OPT)
    model = network.LanguageModel(config=OPT, adapter=adapter)
    loaded = random_params(plain)
    params = jax.jit(model.with_new_parts)(loaded, jax.random.key(8))
    made = jax.eval_shape(model.init, KEY)
    assert jax.tree.structure(params) == jax.tree.structure(made)
    data = batch()
    before = hidden(plain, loaded, data["tokens"], data["mask"])
    after = hidden(model, params, data["tokens"], data["mask"])
    # LoRA begins as the model was; a prefix is seen at once.
    assert np.array_equal(before, after) == isinstance(adapter, network.LoRA)
    new = {sphere.path_str(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)}
    old = {sphere.path_str(p) for p, _ in jax.tree_util.tree_leaves_with_path(loaded)}
    assert {path for path in new if network.adapter_only(path)} == new - old


@pytest.mark.slow  # One program for each shape of a leaf.
@pytest.mark.parametrize("config", [ROBERTA, OPT], ids=["roberta", "opt"])
def test_initial_parameters(config: Any) -> None:
    params = jax.jit(network.LanguageModel(config=config).init)(KEY)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert np.all(np.isfinite(leaf)), path
    table = np.asarray(params["embedding"]["tokens"])
    assert 0.2 < table.std() < 0.4 and len(set(table.ravel().tolist())) > 900


@pytest.mark.slow  # A reference in NumPy.
def test_lora_is_what_its_paper_says() -> None:
    """x W + (alpha / r) x A B, by merging the product into the kernel."""
    adapter = network.LoRA(rank=2, alpha=3.0)
    model = network.LanguageModel(config=ROBERTA, adapter=adapter)
    _, params, data = case("roberta-prompt-lora")
    layers = dict(params["layers"])
    lora = layers.pop("lora")
    attention = dict(layers["attention"])
    for name in ("query", "value"):
        product = jnp.einsum("lir,lro->lio", lora[name]["a"], lora[name]["b"])
        kernel = attention[name]["kernel"] + 1.5 * product
        attention[name] = {**attention[name], "kernel": kernel}
    merged = {**params, "layers": {**layers, "attention": attention}}
    plain = network.LanguageModel(config=ROBERTA)
    np.testing.assert_allclose(
        hidden(model, params, data["tokens"], data["mask"]),
        hidden(plain, merged, data["tokens"], data["mask"]),
        atol=1e-5,
    )


@pytest.mark.slow  # test_parity.py has a model in 16 bits.
def test_sixteen_bits_compute_with_float32_weights() -> None:
    task, params, data = case("roberta-prompt")
    model = network.LanguageModel(config=ROBERTA, compute_dtype="bfloat16")
    small = tasks.prompt(model, (7, 9))
    inner = jax.eval_shape(model.hidden, params, data["tokens"], data["mask"])
    assert inner.dtype == jnp.bfloat16
    losses, wide = (jax.jit(each.value_fn)(params, data) for each in (small, task))
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, wide, atol=0.1)
    assert not np.array_equal(losses, wide)


def test_few_words_cost_the_same_logits_as_all() -> None:
    _, params, data = case("untied-prompt")
    model = network.LanguageModel(config=UNTIED)
    x = hidden(model, params, data["tokens"], data["mask"])
    whole = model.logits(params, x)
    assert whole.shape == (ROWS, LENGTH, 61)
    few = model.logits(params, x, vocabulary=jnp.asarray([60, 3]))
    np.testing.assert_allclose(few, whole[..., jnp.asarray([60, 3])], atol=1e-5)


# --- judging ---


@pytest.mark.slow  # Predictions, which no release depends on.
def test_predictions_in_batches_are_those_of_the_whole() -> None:
    task, params, data = case("roberta-prompt")
    assert task.scores is not None
    whole = np.argmax(jax.jit(task.scores)(params, data), axis=1)
    got = tasks.predict(task, params, data, batch_size=2)
    np.testing.assert_array_equal(got, whole)


def test_metrics() -> None:
    assert tasks.accuracy(
        np.asarray([1, 0, 1]), np.asarray([1, 1, 1])
    ) == pytest.approx(2 / 3)
    # Class 0: precision 1/2, recall 1; class 1: precision 1, recall 2/3.
    got = tasks.macro_f1(np.asarray([0, 0, 1, 1]), np.asarray([0, 1, 1, 1]))
    assert got == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert tasks.token_f1("The red cat!", ["a dog", "red cat"]) == 1
    assert tasks.token_f1("red cat cat", ["cat"]) == pytest.approx(0.5)
    assert tasks.token_f1("", ["cat"]) == 0 and tasks.token_f1("the", ["a"]) == 1
    assert tasks.exact_match("The red  Cat!", ["a dog", "red cat"]) == 1
    assert tasks.exact_match("cat red", ["red cat"]) == 0
    assert tasks.exact_match("", ["cat"]) == 0 and tasks.exact_match("the", ["a"]) == 1


# --- configurations and mistakes ---


def test_a_configuration_goes_through_json() -> None:
    for config in (ROBERTA, UNTIED, MODERN, OPT, NARROW):
        assert from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type must be one of 'roberta', .*got 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act must be 'gelu', got 'relu'"),
        ({"num_attention_heads": 3}, "num_attention_heads must divide .* 16, got 3"),
        ({"hidden_size": None}, "hidden_size"),
        ({"layer_norm_eps": None}, "layer_norm_eps"),
    ],
)
def test_wrong_configurations_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        from_json(ROBERTA.to_json() | change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m: tasks.prompt(m, [3]),
            "label_words must be two or more .*got \\[3\\]",
        ),
        (lambda m: tasks.prompt(m, [3, 3]), "different tokens"),
        (lambda m: tasks.prompt(m, [3, 61]), "tokens below 61"),
        (tasks.head, "num_labels"),
        (
            lambda m: tasks.choice(m, span_length=2),
            "model must be a decoder.*'roberta'",
        ),
        (lambda m: tasks.generation(m, span_length=0), "span_length"),
    ],
)
def test_wrong_tasks_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(network.LanguageModel(config=ROBERTA))
