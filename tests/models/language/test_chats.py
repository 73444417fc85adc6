"""Chats and pairs: templates as `transformers` renders them, spans, losses, refusals."""

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
from jaxdp.models import show_values
from jaxdp.models.language import (
    LanguageModel,
    chats,
    checkpoint,
    tasks,
    text,
    tiny_config,
)
from tests.models.language.golden import make_chats
from tests.models.language.golden.make_chats import ASKED, CONVERSATIONS, message
from tests.models.language.test_generation import PORTABLE

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / "golden" / "chats.json").read_text("utf-8")
)
END = make_chats.make_backend().token_to_id("</s>")
CONFIG = tiny_config(
    "llama", vocab_size=400, max_position_embeddings=400, eos_token_id=END
)


@functools.cache
def tokenizer(name: str = "qwen2") -> text.Tokenizer:
    template = make_chats.TEMPLATES[name]
    backend = make_chats.make_backend()
    return text.Tokenizer(backend, CONFIG, None, template, make_chats.NAMES)


def shown(tokens: Any, name: str = "qwen2") -> str:
    """Tokens as text, special ones with it."""
    backend = tokenizer(name).backend
    return backend.decode([int(x) for x in tokens], skip_special_tokens=False)


def encoded(made: text.Tokenizer, messages: Any, prompt: bool = False) -> list[int]:
    """A conversation's tokens, with what the next answer begins with if asked."""
    chat = made.chat(messages)
    return chat.encode(chat.render(None, prompt))


def record(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages]}


# --- templates ---------------------------------------------------------------------


@pytest.mark.parametrize("name", make_chats.TEMPLATES)
def test_tokens_are_those_of_transformers(name: str) -> None:
    for case, messages in CONVERSATIONS.items():
        want = GOLDEN[name][case]
        if want is None:
            with pytest.raises(ValueError, match="the chat template refuses its mess"):
                encoded(tokenizer(name), messages)
            continue
        for prompt in (False, True):
            got = encoded(tokenizer(name), messages, prompt)
            assert got == want[prompt], case


@pytest.mark.filterwarnings("ignore")  # of other people's libraries
@pytest.mark.parametrize("name", make_chats.TEMPLATES)
def test_live_parity(name: str) -> None:
    pytest.importorskip("transformers")
    assert make_chats.expect(make_chats.TEMPLATES[name]) == GOLDEN[name]


@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma", "phi3"])
def test_no_message_makes_a_special_token(name: str) -> None:
    """Nor takes its place: the tokens before and after are as they would be."""
    made = tokenizer(name)
    wrong = "A <|im_end|>\n<|end|> b</s><|eot_id|><end_of_turn>\ufdd0 <<s>"
    there = [message("user", wrong), message("assistant", "x<|end|>")]
    plain = [message("user", "A"), message("assistant", "x")]
    ids, others = (encoded(made, x, prompt=True) for x in (there, plain))
    added = made.backend.get_added_tokens_decoder().items()
    special = {token for token, x in added if x.special}
    kept = [token for token in ids if token in special]
    assert kept == [token for token in others if token in special]
    assert wrong in shown(ids, name).replace("\u200b", "")
    assert not special & set(made.encode(wrong))
    # A lone surrogate is another character, and no error.
    lone, other = (
        encoded(made, [message("user", f"A {x} <|end|>")])
        for x in ("\ud83c", "\N{REPLACEMENT CHARACTER}")
    )
    assert lone == other
    # What is not about the message is as it was.
    common = next(i for i, pair in enumerate(zip(ids, others)) if len({*pair}) > 1)  # noqa: B905
    assert shown(others[:common], name).endswith("A")
    batch = chats.encode_instruction(
        made, [{"messages": there}], max_length=300, span_length=99
    )
    assert shown(batch["tokens"][batch["span"]], name).startswith("x<|end|><")


def test_a_role_makes_no_special_token() -> None:
    role = "user<|im_end|>"
    ids = encoded(tokenizer(), [message("system", "s"), message(role, "hi")])
    assert ids.count(tokenizer().backend.token_to_id("<|im_end|>")) == 2


def write(folder: pathlib.Path, **files: Any) -> pathlib.Path:
    (folder / "config.json").write_text(json.dumps(CONFIG.to_json()))
    make_chats.make_backend().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


NAMED = [{"name": "rag", "template": "no"}, {"name": "default", "template": "T"}]


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"tokenizer_config__json": {"chat_template": "T"}}, "T"),
        ({"tokenizer_config__json": {"chat_template": NAMED}}, "T"),
        ({"tokenizer_config__json": {"chat_template": NAMED[:1]}}, None),
        (
            {
                "tokenizer_config__json": {"chat_template": "other"},
                "chat_template__jinja": "T",
            },
            "T",
        ),
    ],
)
def test_where_a_template_stands(
    files: dict[str, Any], want: str | None, tmp_path: pathlib.Path
) -> None:
    loaded = text.Tokenizer.load(write(tmp_path, **files))
    assert loaded.chat_template == want
    if want is None:
        with pytest.raises(ValueError, match="the tokenizer has no chat template"):
            encoded(loaded, [ASKED])
    loaded.save(tmp_path)
    assert text.Tokenizer.load(tmp_path).chat_template == want


def test_names_of_special_tokens_are_the_file_s(tmp_path: pathlib.Path) -> None:
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    settings = {**names, "chat_template": template}
    folder = write(tmp_path, tokenizer_config__json=settings)
    fields = json.loads((folder / "config.json").read_text())
    start = make_chats.make_backend().token_to_id("<s>")
    (folder / "config.json").write_text(json.dumps(fields | {"bos_token_id": start}))
    loaded = text.Tokenizer.load(folder)
    assert shown(encoded(loaded, [ASKED])) == "<s></s>"
    loaded.save(folder)
    (folder / "tokenizer_config.json").unlink()
    assert shown(encoded(text.Tokenizer.load(folder), [ASKED])) == "<s></s>"


def test_wrong_templates_are_named(tmp_path: pathlib.Path) -> None:
    for wrong, part in (({"a": 1}, "dict"), (3, "int")):
        folder = write(tmp_path, tokenizer_config__json={"chat_template": wrong})
        with pytest.raises(ValueError, match=f"chat_template .*list of named.*{part}"):
            text.Tokenizer.load(folder)
    folder = write(tmp_path, tokenizer_config__json={"chat_template": "{% if %}"})
    with pytest.raises(ValueError, match="chat_template is no template"):
        encoded(text.Tokenizer.load(folder), [ASKED])


def test_today_is_the_same_day_in_all_runs() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    made = text.Tokenizer(make_chats.make_backend(), CONFIG, None, source)
    assert shown(encoded(made, [ASKED])) == "26 Jul 2024"


def test_templates_run_in_a_sandbox() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        made = text.Tokenizer(make_chats.make_backend(), CONFIG, None, source)
        with pytest.raises(ValueError, match="refuses"):
            encoded(made, [ASKED])


def test_what_a_template_says_of_a_message_is_empty_if_private() -> None:
    source = "{{ raise_exception('no role ' + messages[0].role) }}"
    made = text.Tokenizer(make_chats.make_backend(), CONFIG, None, source)
    with pytest.raises(ValueError, match="refuses") as error:
        encoded(made, [message("xylophone", "")])
    assert "xylophone" not in str(error.value)


# --- instructions ------------------------------------------------------------------

ANSWERS = {
    "llama3": "Yes — 日本語.<|eot_id|>It was warm.<|eot_id|>",
    "qwen2": "Yes — 日本語.<|im_end|>\nIt was warm.<|im_end|>",
    "gemma": "Yes — 日本語.<end_of_turn>It was warm.<end_of_turn>",
    "mistral": " Yes — 日本語.</s> \nIt was warm.</s>",
    "phi3": "Yes — 日本語.<|end|>It was warm.<|end|></s>",
    "chatml": "Yes — 日本語.<|im_end|>\nIt was warm.<|im_end|>",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_assistant_says_counts(name: str) -> None:
    messages = CONVERSATIONS["two turns"]
    batch = chats.encode_instruction(
        tokenizer(name), [record(*messages)], max_length=200, span_length=64
    )
    assert shown(batch["tokens"][batch["span"]], name) == ANSWERS[name]
    count = int(batch["mask"].sum())
    assert batch["tokens"][0, :count].tolist() == GOLDEN[name]["two turns"][0]
    assert (batch["tokens"][0, count:] == CONFIG.padding).all()


def test_a_template_that_forgets_is_refused_but_for_one_answer() -> None:
    made = tokenizer("qwen3")
    one, two = (record(*CONVERSATIONS[f"{n} turn"]) for n in ("one",) * 2)
    batch = chats.encode_instruction(made, [one, two], max_length=90, span_length=64)
    said = batch["tokens"][0][batch["span"][0]]
    assert shown(said, "qwen3") == "<think>\n\n</think>\n\nIt is\n\ngood.<|im_end|>"
    with pytest.raises(
        ValueError, match=r"record 2: the chat template .* message 2 oth"
    ):
        chats.encode_instruction(
            made,
            [one, record(*CONVERSATIONS["two turns"])],
            max_length=200,
            span_length=64,
        )


@pytest.mark.parametrize(
    ("length", "span", "truncate", "want"),
    [
        (16, 99, "left", "\nIt was warm.<|im_end|>"),
        (10, 99, "left", "s warm.<|im_end|>"),
        (200, 4, "left", "rm.<|im_end|>"),
        (200, 4, "right", "Yes "),
        (74, 99, "right", "Yes"),
    ],
)
def test_what_is_cut(length: int, span: int, truncate: Any, want: str) -> None:
    batch = chats.encode_instruction(
        tokenizer(),
        [record(*CONVERSATIONS["two turns"])],
        max_length=length,
        span_length=span,
        truncate=truncate,
    )
    whole = GOLDEN["qwen2"]["two turns"][0]
    cut = whole[-length:] if truncate == "left" else whole[:length]
    assert batch["tokens"][0][batch["mask"][0]].tolist() == cut
    got = batch["tokens"][0][batch["span"][0]]
    assert shown(got) == want


def test_prompts_are_without_the_last_message() -> None:
    made = tokenizer()
    asked = [record(*CONVERSATIONS[name]) for name in ("one turn", "two turns")]
    batch = chats.encode_prompts(made, asked, max_length=40)
    for i, each in enumerate(asked):
        want = encoded(made, each["messages"][:-1], prompt=True)
        assert batch["tokens"][i][batch["mask"][i]].tolist() == want[-40:]
    whole = chats.encode_instruction(made, asked[:1], max_length=96, span_length=40)
    before = whole["mask"] & ~np.logical_or.accumulate(whole["span"], axis=1)
    prompt = chats.encode_prompts(made, asked[:1], max_length=96)
    np.testing.assert_array_equal(before, prompt["mask"])  # As generate cuts it.
    assert chats.answers(asked) == ["It is\n\ngood.", "\nIt was warm."]
    end = made.backend.token_to_id("<|im_end|>")
    said = np.array([*made.encode(" It is\n\ngood. "), end, *made.encode("more")])
    assert chats.decode_answer(made, said) == "It is\n\ngood."


USER, SAID = message("user", "a"), message("assistant", "b")


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({}, "has no field 'messages'"),
        ({"messages": "hi"}, "messages must be a list of one message or more"),
        ({"messages": []}, "messages must be a list of one message or more"),
        ({"messages": ["hi"]}, "each of messages must have a text as its role"),
        ({"messages": [{"role": "user"}]}, "must have a text as its content"),
        ({"messages": [{"content": "xylophone"}]}, "must have a text as its role"),
        (record(USER), "the last of messages must be the assistant's"),
        (record(message("system", "s"), SAID), "System role not supported"),
        (record(SAID), "Conversation roles must alternate"),
    ],
)
def test_wrong_conversations_are_named(wrong: dict[str, Any], part: str) -> None:
    good = record(USER, SAID)
    for call in (
        functools.partial(chats.encode_instruction, span_length=8),
        chats.encode_prompts,
    ):
        if wrong == record(SAID) and call is chats.encode_prompts:
            continue  # Nothing is asked.
        with pytest.raises(ValueError, match=r"^record 2") as error:
            call(tokenizer("gemma"), [good, wrong], max_length=64)
        assert part in str(error.value)
        assert "xylophone" not in str(error.value)


WRONG_CHATS = {
    **{f"messages {x!r}": {"messages": x} for x in (None, "hi", [], ["hi"])},
    "missing": {},
    "refused": record(SAID),
    "cut": record(message("user", "a" * 70), SAID),
    "forgets": record(*CONVERSATIONS["two turns"]),
}
WRONG_PAIRS = {
    **{f"chosen {x!r}": {"chosen": x} for x in (None, [], [USER], [1])},
    "no text": {"rejected": None},
    "no prompt": {"prompt": {}},
    "refused": {"prompt": [SAID]},
}


def check_nothing_of(call: Any, good: Any, wrong: Any, **form: Any) -> None:
    """Wrong private records are padding, the others what they are without them."""
    with pytest.raises(ValueError, match=r"^record 2"):
        call(records=[good, wrong, good], **form)
    found = call(records=[good, wrong, good], private=True, **form)
    alone = call(records=[good, good], **form)
    assert not (found["mask"][1].any() or found["span"][1].any())
    assert (found["tokens"][1] == CONFIG.padding).all()
    for name, rows in alone.items():
        np.testing.assert_array_equal(found[name][::2], rows)


@pytest.mark.parametrize("name", WRONG_CHATS)
def test_no_private_conversation_stops_a_run(name: str) -> None:
    made = tokenizer("qwen3" if name == "forgets" else "gemma")
    call = functools.partial(chats.encode_instruction, made)
    form: Any = {"max_length": 64, "span_length": 20, "truncate": "right"}
    check_nothing_of(call, record(USER, SAID), WRONG_CHATS[name], **form)


@pytest.mark.parametrize("template", [None, "{prompt}"])
@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_no_private_pair_stops_a_run(name: str, template: str | None) -> None:
    """Half of one is none, neither the first half nor the second."""
    call = functools.partial(chats.encode_preference, tokenizer("gemma"))
    form: Any = {"max_length": 64, "span_length": 20, "template": template}
    wrong = PAIR | WRONG_PAIRS[name]
    if template is not None and name == "refused":
        wrong["prompt"] = None
    check_nothing_of(call, PAIR, wrong, **form)
    same = PAIR | {"rejected": PAIR["chosen"]}
    found = call(records=[same], private=True, **form)
    assert found["span"].any()


def test_an_empty_conversation_is_named() -> None:
    made = text.Tokenizer(make_chats.make_backend(), CONFIG, None, " ")
    empty = record(message("assistant", ""))
    form: Any = {"max_length": 64, "span_length": 20}
    with pytest.raises(ValueError, match=r"^record 1: no token of an answer"):
        chats.encode_instruction(made, [empty], **form)


def test_a_template_that_says_nothing_is_named() -> None:
    made = text.Tokenizer(make_chats.make_backend(), CONFIG, None, "{# nothing #}")
    form: Any = {"max_length": 64, "span_length": 20}
    said = [record(message("user", "a"), message("assistant", "b"))]
    with pytest.raises(ValueError, match=r"^record 1: "):
        chats.encode_instruction(made, said, **form)
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ValueError, match=r"^record 1: "):
        chats.encode_preference(made, [pair], **form)


def test_an_answer_that_is_cut_away_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"record 1: no token .* max_length = 30 tokens, cut on the right",
    ):
        chats.encode_instruction(
            tokenizer(),
            [record(*CONVERSATIONS["two turns"])],
            max_length=30,
            span_length=8,
            truncate="right",
        )


def test_what_tokenizers_must_be() -> None:
    bare = text.Tokenizer(make_chats.make_backend(), CONFIG)
    encoder = text.Tokenizer(
        make_chats.make_backend(), tiny_config("roberta", vocab_size=400), None, "T"
    )
    for made, part in ((bare, "no chat template"), (encoder, "must be a decoder's")):
        for call in (chats.encode_instruction, chats.encode_preference):
            with pytest.raises(ValueError, match=part):
                call(made, [], max_length=16, span_length=8)
    with pytest.raises(ValueError, match="span_length"):
        chats.encode_instruction(tokenizer(), [], max_length=16, span_length=0)
    with pytest.raises(ValueError, match="truncate"):
        chats.encode_instruction(
            tokenizer(),
            [],
            max_length=16,
            span_length=1,
            truncate="both",  # pyright: ignore[reportArgumentType]
        )


# --- preferences -------------------------------------------------------------------

PAIR = {"prompt": "Why?", "chosen": "It was warm.", "rejected": "No"}
ROWS = [
    [message("user", "Why?"), message("assistant", x)] for x in ("It was warm.", "No")
]


@pytest.mark.parametrize(
    "pair",
    [
        PAIR,
        PAIR | {"prompt": ROWS[0][:1]},
        {"prompt": ROWS[0][:1], "chosen": ROWS[0][1:], "rejected": ROWS[1][1:]},
        {"prompt": "Why?", "chosen": ROWS[0], "rejected": ROWS[1]},
    ],
)
def test_pairs_of_a_chat(pair: dict[str, Any]) -> None:
    made = tokenizer()
    batch = chats.encode_preference(made, [pair], max_length=99, span_length=20)
    assert batch["tokens"].shape == (1, 2, 99)
    for k, answer in enumerate(("It was warm.<|im_end|>", "No<|im_end|>")):
        said = batch["tokens"][0, k][batch["span"][0, k]]
        assert shown(said) == answer
        got = shown(batch["tokens"][0, k][batch["mask"][0, k]])
        assert got == shown(encoded(made, ROWS[k]))
        assert np.flatnonzero(np.diff(batch["span"][0, k])).size == 2


@pytest.mark.parametrize("truncate", ["left", "right"])
def test_both_of_a_pair_have_the_same_prompt(truncate: Any) -> None:
    long = PAIR | {"chosen": "It was warm. " * 9}
    form: Any = {"max_length": 30, "span_length": 10, "truncate": truncate}
    batch = chats.encode_preference(tokenizer(), [long], **form)
    whole = encoded(tokenizer(), ROWS[0][:1], prompt=True)
    want = whole[-20:] if truncate == "left" else whole[:20]
    for k in range(2):
        assert batch["tokens"][0, k, :20].tolist() == want
        assert not batch["span"][0, k, :20].any()
    assert shown(batch["tokens"][0, 0, 20:]) == "It was warm. It was"[:10]
    assert batch["span"][0, 0, 20:].all()


def test_pairs_by_a_template() -> None:
    bare = text.Tokenizer(make_chats.make_backend(), CONFIG)
    batch = chats.encode_preference(
        bare, [PAIR], max_length=40, span_length=20, template="Q: {prompt}\n"
    )
    for k, answer in enumerate(("It was warm.", "No")):
        tokens = batch["tokens"][0, k][batch["mask"][0, k]]
        assert shown(tokens[:-1]) == f"Q: Why?\n{answer}" and tokens[-1] == END
        assert shown(batch["tokens"][0, k][batch["span"][0, k]][:-1]) == answer


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rejected": None}, "rejected must be text"),
        ({"chosen": ROWS[0][:1]}, "the last of chosen must be the assistant's"),
        ({"chosen": []}, "chosen must be a list of one message or more"),
        ({"prompt": []}, "prompt must be a list of one message or more"),
        ({"prompt": ROWS[0]}, "Conversation roles must alternate"),
    ],
)
def test_wrong_pairs_are_named(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=r"^record 2") as error:
        chats.encode_preference(
            tokenizer("gemma"), [PAIR, PAIR | change], max_length=64, span_length=20
        )
    assert part in str(error.value)


@pytest.mark.parametrize("same", ["It was warm.", ROWS[0]])
def test_pairs_of_equal_texts_alone_are_refused(same: Any) -> None:
    """One of them among others is not: its loss is a constant."""
    of: dict[str, Any] = {"max_length": 64, "span_length": 20}
    pairs = [PAIR | {"rejected": same}] * 2
    with pytest.raises(ValueError, match="must differ within span_length = 20 tokens"):
        chats.encode_preference(tokenizer("gemma"), pairs, **of)
    batch = chats.encode_preference(tokenizer("gemma"), [*pairs, PAIR], **of)
    assert len(batch["tokens"]) == 3


@pytest.mark.parametrize("field", PAIR)
def test_missing_fields_are_named(field: str) -> None:
    wrong = {name: x for name, x in PAIR.items() if name != field}
    for template in (None, "{prompt}"):
        with (
            show_values(),
            pytest.raises(ValueError, match=f"^record 1 has no field '{field}'"),
        ):
            chats.encode_preference(
                tokenizer(), [wrong], max_length=64, span_length=20, template=template
            )


def test_room_for_a_prompt_is_required() -> None:
    with pytest.raises(ValueError, match="max_length leaves room for 0 tokens"):
        chats.encode_preference(tokenizer(), [PAIR], max_length=20, span_length=20)


# --- losses ------------------------------------------------------------------------

SIZES: Any = {
    "vocab_size": 400,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
}
MODEL = LanguageModel(config=tiny_config("llama", **SIZES))
BETA = 0.7


@functools.cache
def params(seed: int = 2) -> Any:
    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    return jax.tree.map(
        lambda x: jnp.asarray(draw.normal(0, 0.3, x.shape), jnp.float32), shapes
    )


@functools.cache
def case(name: str) -> tuple[tasks.Task, dict[str, jax.Array]]:
    """A task, and three records of several lengths."""
    form: Any = {"max_length": 96, "span_length": 40}
    if name == "instruction":
        two = CONVERSATIONS["two turns"]
        made = [record(*x) for x in (two, CONVERSATIONS["one turn"], [USER, SAID])]
        batch: Any = chats.encode_instruction(tokenizer("chatml"), made, **form)
        task = tasks.instruction(MODEL, span_length=40)
    else:
        pairs = [PAIR, PAIR | {"prompt": "Is it?", "rejected": "Yes"}]
        pairs += [{"prompt": "a", "chosen": "b", "rejected": "c" * 60}]
        batch = chats.encode_preference(tokenizer("chatml"), pairs, **form)
        task = tasks.preference(MODEL, span_length=40, beta=BETA)
        batch["reference"] = tasks.log_likelihoods(task, params(), batch, batch_size=2)
    return task, {name: jnp.asarray(x) for name, x in batch.items()}


@jax.jit
def _log_p(weights: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    x = MODEL.logits(weights, MODEL.hidden(weights, tokens, mask))
    return jax.nn.log_softmax(x)


def sums(weights: Any, batch: Any) -> np.ndarray:
    """Log-likelihoods of each row's answer, token by token; (rows,)."""
    tokens, mask, span = (
        np.asarray(batch[n]).reshape(-1, 96) for n in ("tokens", "mask", "span")
    )
    log_p = np.asarray(_log_p(weights, tokens, mask), np.float64)
    return np.array(
        [
            sum(log_p[i, j - 1, row[j]] for j in np.flatnonzero(span[i]))
            for i, row in enumerate(tokens)
        ]
    )


def test_loss_of_an_instruction_is_its_own_mean() -> None:
    task, batch = case("instruction")
    assert (task.name, task.scores) == ("instruction", None)
    count = np.asarray(batch["span"]).sum(axis=1)
    assert len(set(count.tolist())) == 3
    found = jax.jit(task.value_fn)(params(), batch)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, -sums(params(), batch) / count, rtol=2e-5)
    assert task.likelihood is not None
    total, number = task.likelihood(params(), batch)
    np.testing.assert_allclose(total, sums(params(), batch), rtol=2e-5)
    np.testing.assert_array_equal(number, count)
    none = batch | {"span": batch["span"].at[1].set(False)}
    assert jax.jit(task.value_fn)(params(), none)[1] == 0


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("name", ["generation", "instruction", "preference"])
def test_what_is_wrong_with_a_private_record_moves_nothing(
    name: str, scale: float
) -> None:
    """Its loss is a constant at any parameters, with slopes and a gradient of zero."""
    made, form = tokenizer("chatml"), {"max_length": 96, "span_length": 40}
    task = getattr(tasks, name)(MODEL, span_length=40)
    batch: Any
    if name == "instruction":
        both: Any = [record(USER, SAID), record(USER)]
        batch = chats.encode_instruction(made, both, private=True, **form)
    elif name == "generation":
        both = [{"prompt": "a", "answer": x} for x in ("b", [])]
        form |= {"template": "{prompt}"}
        batch = text.encode_generation(made, both, private=True, **form)
    else:
        both = [PAIR, PAIR | {"rejected": None}]
        batch = chats.encode_preference(made, both, private=True, **form)
        batch["reference"] = tasks.log_likelihoods(task, params(), batch)
        np.testing.assert_array_equal(batch["reference"][1], 0)
    weights = jax.tree.map(lambda x: scale * x, params(3))
    constant = np.float32(np.log(2)) if name == "preference" else 0
    stacked = LanguageModel.is_stacked

    @jax.jit
    def found(weights: Any, batch: Any) -> Any:
        key = jax.random.key(5)
        rows = sphere.directions(key, weights, law="rademacher", num=1, stacked=stacked)
        row = sphere.select(rows, 0)
        at = functools.partial(perturb.losses_at, task.value_fn, weights, batch, row)
        sides = [at(jnp.float32(x)) for x in (0.1, -0.1)]
        gradient = jax.grad(lambda x: task.value_fn(x, batch)[1])(weights)
        return task.value_fn(weights, batch), *sides, gradient

    loss, up, down, gradient = found(weights, batch)
    for losses in (loss, up, down):
        np.testing.assert_allclose(losses[1], constant, rtol=1e-6)
        assert losses[0] != losses[1]
    assert up[1] == down[1] and up[0] != down[0]
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_no_more_than_the_answers_logits_are_formed() -> None:
    task, batch = case("instruction")
    program = str(jax.make_jaxpr(task.value_fn)(params(), batch))
    assert "f32[3,40,400]" in program and "f32[3,96,400]" not in program


def test_loss_of_a_pair_is_that_of_the_paper() -> None:
    task, batch = case("preference")
    other = params(3)
    gain = (sums(other, batch) - sums(params(), batch)).reshape(3, 2)
    want = np.log1p(np.exp(-BETA * (gain[:, 0] - gain[:, 1])))
    found = jax.jit(task.value_fn)(other, batch)
    assert found.dtype == jnp.float32 and np.ptp(want) > 0.5
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    assert task.scores is not None
    np.testing.assert_allclose(
        jax.jit(task.scores)(other, batch), BETA * gain, rtol=1e-3, atol=1e-3
    )
    chosen = tasks.predict(task, other, batch) == 0
    np.testing.assert_array_equal(chosen, gain[:, 0] > gain[:, 1])
    # Where nothing moved, nothing is preferred: to the bit, for both are one program.
    again = tasks.log_likelihoods(task, params(), batch, batch_size=2)
    np.testing.assert_array_equal(again, batch["reference"])
    start = jax.jit(task.value_fn)(params(), batch)
    np.testing.assert_allclose(start, np.log(2), atol=1e-4)

    free = tasks.preference(MODEL, span_length=40, beta=BETA, reference_free=True)
    del (bare := dict(batch))["reference"]
    total = sums(other, batch).reshape(3, 2)
    want = np.logaddexp(0, -BETA * (total[:, 0] - total[:, 1]))
    found = jax.jit(free.value_fn)(other, bare)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_derivative_of_a_pair_is_that_of_the_paper() -> None:
    """-beta sigma(-margin) (d log pi(chosen) - d log pi(rejected)), along a direction."""
    task, batch = case("preference")
    likelihood: Any = task.likelihood

    @jax.jit
    def both(weights: Any, along: Any) -> Any:
        def found(w: Any) -> Any:
            return task.value_fn(w, batch), likelihood(w, batch)[0]

        return jax.jvp(found, (weights,), (along,))

    (_, total), (got, slope) = both(params(3), params(4))
    margin = BETA * np.asarray(total - batch["reference"]) @ [1, -1]
    want = -BETA / (1 + np.exp(margin)) * (np.asarray(slope) @ [1, -1])
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["instruction", "preference"])
def test_losses_read_one_record_each(name: str) -> None:
    task, batch = case(name)
    jaxdp.check_isolation(task.value_fn, params(3), batch)
    program = jax.jit(task.value_fn)
    base = np.asarray(program(params(3), batch))
    changed = batch["tokens"].at[0].set((batch["tokens"][0] + 7) % 256)
    got = np.asarray(program(params(3), batch | {"tokens": changed}))
    assert got[0] != base[0]
    np.testing.assert_array_equal(got[1:].view(np.uint32), base[1:].view(np.uint32))
    if name == "preference":  # A loss that is NaN stays its own.
        wrong = batch["reference"].at[0].set(jnp.nan)
        got = np.asarray(program(params(3), batch | {"reference": wrong}))
        assert np.isnan(got[0])
        np.testing.assert_array_equal(got[1:].view(np.uint32), base[1:].view(np.uint32))


@pytest.mark.parametrize("name", ["instruction", "preference"])
def test_lazy_is_bit_equal_to_materialised(name: str) -> None:
    task, batch = case(name)
    weights, scale = params(3), jnp.float32(0.05)
    stacked = LanguageModel.is_stacked

    @jax.jit
    def direction(weights: Any) -> Any:
        key = jax.random.key(5)
        rows = sphere.directions(key, weights, law="rademacher", num=1, stacked=stacked)
        return sphere.select(rows, 0)

    u = direction(weights)
    jit = functools.partial(jax.jit, compiler_options=PORTABLE)
    lazily = jit(lambda u, p: perturb.losses_at(task.value_fn, p, batch, u, scale))
    formed = jit(lambda u, p: perturb.perturb(p, u, scale))
    want = jit(task.value_fn)(formed(u, weights), batch)
    got = np.asarray(lazily(u, weights))
    np.testing.assert_array_equal(got.view(np.uint32), np.asarray(want).view(np.uint32))
    assert np.any(got != np.asarray(jax.jit(task.value_fn)(weights, batch)))


def test_wrong_tasks_are_named() -> None:
    roberta = LanguageModel(config=tiny_config("roberta"), num_labels=2)
    for make in (tasks.instruction, tasks.preference):
        with pytest.raises(ValueError, match="model must be a decoder"):
            make(roberta, span_length=4)
        with pytest.raises(ValueError, match="span_length"):
            make(MODEL, span_length=0)
    with pytest.raises(ValueError, match="beta must be a number > 0"):
        tasks.preference(MODEL, span_length=4, beta=0.0)
    with pytest.raises(ValueError, match="task must be one of texts, got 'head'"):
        tasks.log_likelihoods(tasks.head(roberta), {}, {})


def test_a_template_is_kept_with_a_checkpoint(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, MODEL.config, params())
    tokenizer().save(tmp_path)
    loaded = text.Tokenizer.load(tmp_path)
    assert encoded(loaded, [ASKED]) == encoded(tokenizer(), [ASKED])
