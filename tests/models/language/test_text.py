import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxdp.models import show_values
from jaxdp.models.language import generation, network, text
from jaxdp.models.language.config import OPTConfig, RobertaConfig, tiny_config

CORPUS = [
    "A great film, and a good one. It was great, it was good.",
    "A terrible film, and a bad one. It was terrible, it was bad.",
    "yes or no? The answer is yes. The answer is no.",
] * 5
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
BOS, PAD, EOS, MASK = 0, 1, 2, 4
SIZES: Any = {
    "vocab_size": 400,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ROBERTA = RobertaConfig(**SIZES, intermediate_size=24, max_position_embeddings=66)
OPT = OPTConfig(**SIZES, ffn_dim=24, max_position_embeddings=64)
UNICODE = "naïve — 日本語 🎉 \u200b"
LONG = "A great film, and a terrible one. " * 40


def byte_level_bpe() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="module")
def roberta() -> text.Tokenizer:
    return text.Tokenizer(byte_level_bpe(), ROBERTA, MASK)


@pytest.fixture(scope="module")
def opt() -> text.Tokenizer:
    return text.Tokenizer(byte_level_bpe(), OPT)


def row(batch: dict[str, np.ndarray], index: Any) -> list[int]:
    """The tokens of a row, which must be what the mask says and no padding."""
    tokens, mask = batch["tokens"][index], batch["mask"][index]
    count = int(mask.sum())
    assert mask[:count].all() and (tokens[count:] == PAD).all()
    return tokens[:count].tolist()


# --- tokenizers --------------------------------------------------------------------


def test_a_lone_surrogate_is_a_replacement_character(roberta: text.Tokenizer) -> None:
    """JSON may have one; an error would be about one private record."""
    (lone,) = json.loads('["a \\ud83c film"]')
    assert roberta.encode(lone) == roberta.encode("a \N{REPLACEMENT CHARACTER} film")


@pytest.mark.parametrize(
    "string", ["", "A great film.", " great", UNICODE, "\n\n", LONG]
)
def test_a_text_survives(roberta: text.Tokenizer, string: str) -> None:
    tokens = roberta.encode(string)
    assert not {BOS, PAD, EOS, MASK} & set(tokens)
    assert roberta.decode(tokens) == string
    assert roberta.decode([BOS, *tokens, EOS, PAD, MASK]) == string


@settings(max_examples=50, deadline=None)
@given(string=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_no_text_makes_a_special_token(roberta: text.Tokenizer, string: str) -> None:
    for special in ("", *SPECIAL):
        tokens = roberta.encode(string + special)
        assert not {BOS, PAD, EOS, MASK} & set(tokens)
        assert roberta.decode(tokens) == string + special


def write_config(folder: pathlib.Path, config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config.to_json()))


@pytest.mark.parametrize("files", ["whole", "vocabulary and merges"])
@pytest.mark.parametrize("config", [ROBERTA, OPT])
def test_both_layouts_are_read(config: Any, files: str, tmp_path: pathlib.Path) -> None:
    backend = byte_level_bpe()
    write_config(tmp_path, config)
    if files == "whole":
        backend.enable_padding(length=50)  # which is no business of the file's
        backend.enable_truncation(3)
        backend.save(str(tmp_path / "tokenizer.json"))
    else:
        backend.model.save(str(tmp_path))
        assert (tmp_path / "merges.txt").is_file()
    loaded = text.Tokenizer.load(tmp_path)
    want = text.Tokenizer(byte_level_bpe(), config)
    assert loaded.mask_token_id == MASK
    for string in (*CORPUS[:3], UNICODE, "<mask> <s>", ""):
        assert loaded.encode(string) == want.encode(string)
        tokens = [*loaded.start, *loaded.encode(string), EOS, PAD]
        assert loaded.decode(tokens) == string


def test_the_space_before_the_first_word_is_a_setting(tmp_path: pathlib.Path) -> None:
    write_config(tmp_path, OPT)
    byte_level_bpe().model.save(str(tmp_path))
    setting = json.dumps({"add_prefix_space": True})
    (tmp_path / "tokenizer_config.json").write_text(setting)
    tokenizer = text.Tokenizer.load(tmp_path)
    assert tokenizer.encode("great") == tokenizer.encode(" great")


def test_what_is_saved_is_loaded(
    roberta: text.Tokenizer, tmp_path: pathlib.Path
) -> None:
    write_config(tmp_path, ROBERTA)
    roberta.save(tmp_path)
    again = text.Tokenizer.load(tmp_path)
    assert again.encode(LONG) == roberta.encode(LONG)
    assert (again.config, again.mask_token_id) == (ROBERTA, MASK)


@pytest.mark.parametrize("file", ["special_tokens_map.json", "tokenizer_config.json"])
def test_special_tokens_are_the_model_s(file: str, tmp_path: pathlib.Path) -> None:
    write_config(tmp_path, OPT)
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "</s>", "mask_token": {"content": "<unk>", "lstrip": True}}
    (tmp_path / file).write_text(json.dumps(names))
    tokenizer = text.Tokenizer.load(tmp_path)
    assert tokenizer.start == [EOS]  # of OPT
    assert tokenizer.mask_token_id == 3
    names = {"pad_token": {"content": "<unk>"}}
    (tmp_path / file).write_text(json.dumps(names))
    with pytest.raises(ValueError, match=r"pad_token '<unk>'.* is token 3.*is 1"):
        text.Tokenizer.load(tmp_path)


#: Special tokens of folders on Hugging Face's hub: of config.json (bos, eos), of
#: generation_config.json, and what the tokenizer names (bos, eos, pad).
FOLDERS: dict[str, tuple[str, Any, Any, dict[str, int]]] = {
    "Llama-2": ("llama", (1, 2), 2, {"bos": 1, "eos": 2}),
    # An early one: its chat's end in generation_config.json alone.
    "Llama-3-Instruct": (
        *("llama", (128000, 128001), [128001, 128009]),
        {"bos": 128000, "eos": 128009},
    ),
    "Mistral with ChatML": ("mistral", (1, 32000), None, {"bos": 1, "eos": 32000}),
    "Qwen2.5": ("qwen2", (151643, 151643), 151643, {"eos": 151643, "pad": 151643}),
    "Qwen2.5-Instruct": (
        *("qwen2", (151643, 151645), [151645, 151643]),
        {"eos": 151645, "pad": 151643},
    ),
    "Qwen2.5, tuned on chats": (
        *("qwen2", (151643, 151643), None),
        {"eos": 151645, "pad": 151643},
    ),
    # Its beginning is not the one that its config.json says.
    "DeepSeek-R1-Distill-Qwen": (
        *("qwen2", (151643, 151643), 151643),
        {"bos": 151646, "eos": 151643, "pad": 151643},
    ),
    "gemma-3-it": ("gemma3_text", (2, [1, 106]), [1, 106], {"bos": 2, "eos": 1}),
    "Phi-3": ("phi3", (1, 32000), [32000, 32007], {"bos": 1, "eos": 32000}),
    "SmolLM3": ("smollm3", (128000, 128012), 128012, {"eos": 128012}),
    "Qwen2.5, its chat's end in config.json alone": (
        *("qwen2", (None, 151645), None),
        {"eos": 151643, "end": 151645},
    ),
    "no names": ("llama", (1, 2), None, {}),
}


def decoder_folder(
    folder: pathlib.Path,
    kind: str,
    special: Any,
    generation: Any,
    named: dict[str, int],
    words: int = 3,
) -> pathlib.Path:
    """A folder without weights, whose tokenizer has some words and what it names."""
    vocabulary = {f"<{token}>": token for token in named.values()}
    free = [i for i in range(words) if i not in named.values()]  # A number, one token.
    vocabulary |= {f"w{i}": i for i in free}
    unknown = f"w{free[0]}"
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unknown))
    backend.add_special_tokens([f"<{token}>" for token in named.values()])
    backend.save(str(folder / "tokenizer.json"))
    bos, eos = special
    config = tiny_config(
        kind, vocab_size=151936, bos_token_id=bos, eos_token_id=eos, pad_token_id=0
    )
    write_config(folder, config)
    names = {f"{x}_token": f"<{token}>" for x, token in named.items() if x != "end"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if generation is not None:
        fields = json.dumps({"eos_token_id": generation})
        (folder / "generation_config.json").write_text(fields)
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_decoders_tokenizers_are_taken(name: str, tmp_path: pathlib.Path) -> None:
    """Tables of tokens are padded, and chats end with tokens of their own."""
    loaded = text.Tokenizer.load(decoder_folder(tmp_path, *FOLDERS[name]))
    assert loaded.config.vocab_size == 151936


QWEN = (151643, [151645, 151643])


@pytest.mark.parametrize(
    ("special", "named"),
    [
        (QWEN, {"eos": 5}),
        (QWEN, {"eos": 5, "pad": 0}),
        (QWEN, {"bos": 4, "eos": 5}),
        (QWEN, {"pad": 0}),  # No token is the model's end.
        (QWEN, {}),
        ((1, 2), {"bos": 2, "eos": 1}),  # Each is the other's.
        ((2, 0), {"bos": 1, "eos": 1}),
    ],
)
def test_a_decoder_s_tokenizer_of_another_model_is_refused(
    special: Any, named: dict[str, int], tmp_path: pathlib.Path
) -> None:
    folder = decoder_folder(tmp_path, "qwen2", special, None, named, words=50)
    with pytest.raises(ValueError, match=r"belongs to another model: of its 5.* names"):
        text.Tokenizer.load(folder)


def test_a_decoder_s_texts_begin_with_what_its_tokenizer_adds(
    tmp_path: pathlib.Path,
) -> None:
    """And special tokens above the model's are left alone, for no text becomes one."""
    backend = byte_level_bpe()
    config = tiny_config(
        "qwen2", vocab_size=backend.get_vocab_size(), eos_token_id=(EOS, PAD)
    )
    assert text.Tokenizer(backend, config).start == []
    backend.add_special_tokens(["<image>"])
    template = tokenizers.processors.TemplateProcessing
    around = "<unk> $A </s>"
    backend.post_processor = template(
        single=around, special_tokens=[("<unk>", 3), ("</s>", EOS)]
    )
    tokenizer = text.Tokenizer(backend, config)
    assert (tokenizer.start, tokenizer.end) == ([3], [])
    assert len(tokenizer.encode("<image>")) > 1
    batch = text.encode_generation(
        tokenizer,
        [{"text": "good", "answer": "bad"}],
        max_length=16,
        template="{text}",
        answer="answer",
        span_length=8,
    )
    words = [*tokenizer.encode("good"), *tokenizer.encode(" bad")]
    assert batch["tokens"][0][batch["mask"][0]].tolist() == [3, *words, EOS]
    backend.add_tokens(["word"])
    with pytest.raises(ValueError, match=r"the tokenizer has .* tokens, but vocab"):
        text.Tokenizer(backend, config)


def test_tokenizers_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="folder"):
        text.Tokenizer.load(tmp_path / "nowhere")
    write_config(tmp_path, OPT)
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor vocab\.json"):
        text.Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer in"):
        text.Tokenizer.load(tmp_path)


def test_more_tokens_than_the_model_has() -> None:
    small = OPTConfig(
        **SIZES | {"vocab_size": 300}, ffn_dim=1, max_position_embeddings=9
    )
    with pytest.raises(ValueError, match="vocab_size of the model is 300"):
        text.Tokenizer(byte_level_bpe(), small)
    with pytest.raises(ValueError, match="mask_token_id must be below 400, got 400"):
        text.Tokenizer(byte_level_bpe(), ROBERTA, 400)


def test_label_words(roberta: text.Tokenizer) -> None:
    words = roberta.label_words(["great", " terrible"])
    assert [roberta.decode([word]) for word in words] == [" great", " terrible"]
    with pytest.raises(ValueError, match=r"'xylophone' must be one token.*'Ġ?x"):
        roberta.label_words(["great", "xylophone"])
    with pytest.raises(ValueError, match="must differ"):
        roberta.label_words(["great", "great"])


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    write_config(tmp_path, OPT)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxdp-optim\[lm\]'"):
        text.Tokenizer.load(tmp_path)


# --- texts that follow others ------------------------------------------------------

#: As Llama 2 and Phi-3, Mistral, T5, Gemma, and GPT-2 with a space before the first word.
SPACES = ("prepend", "first", "always", "none", "bytes")


def with_spaces(kind: str) -> text.Tokenizer:
    """A tokenizer of a Llama's kind: spaces are letters, and one may begin every text."""
    words = ("good", "bad", "film", "It", "was", "a", ":")
    space = "Ġ" if kind == "bytes" else "▁"
    letters = sorted({*"".join(words), "Ċ" if kind == "bytes" else "\n"} - {space})
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, space: 3}
    vocab |= {x: 4 + i for i, x in enumerate(letters)}
    merges = []
    for word in words:
        for i in range(1, len(word)):
            merges.append((word[:i], word[i]))
            vocab.setdefault(word[: i + 1], len(vocab))
        merges.append((space, word))
        vocab.setdefault(space + word, len(vocab))
    merges = list(dict.fromkeys(merges))
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    replaced = normalizers.Replace(" ", space)
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
    elif kind == "none":
        backend.normalizer = replaced
    elif kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    special = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 24}
    config = tiny_config("llama", vocab_size=len(vocab), **special)
    return text.Tokenizer(backend, config)


def test_a_text_that_follows_has_no_part_of_what_is_before_it() -> None:
    """Where a token would be of both, another text stands before it."""
    words = {"\u2581": 3, "a": 4, "\u2581a": 5, ".": 6, "\n": 7, "\n\u2581": 8}
    merges = [("\n", "\u2581"), ("\u2581", "a")]
    backend = tokenizers.Tokenizer(models.BPE(words, merges))
    spaced = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaced])
    made = text.Tokenizer(backend, tiny_config("llama"))
    assert made.encode("\n a") == [3, 8, 4] and made.encode(" a") == [3, 5]
    assert made.encode_after(" a") == [5]
    # One that takes spaces away in place of putting one there is asked for the text alone.
    backend.normalizer = normalizers.Sequence([normalizers.Strip(right=False), spaced])
    made = text.Tokenizer(backend, tiny_config("llama"))
    assert made.encode_after(" a") == made.encode(" a") == [4]


@pytest.mark.parametrize("kind", SPACES)
def test_pieces_have_the_tokens_of_the_whole_text(kind: str) -> None:
    made = with_spaces(kind)

    def whole(string: str) -> list[int]:
        return made.backend.encode(string).ids

    form: Any = {"max_length": 24, "span_length": 4}
    for template, answer, want in (
        ("{text} It was", "good", "a film It was good"),
        ("{text}: ", " bad film", "a film: bad film"),
        ("It was {text}\n", "good", "It was a film\ngood"),
        ("a: {text}:{text}.\n", "a", "a: a film:a film.\na"),
        ("{text}\n\n", "\u00e9\u00e9", "a film\n\n\u00e9\u00e9"),
    ):
        record = {"text": "a film", "answer": answer}
        batch = text.encode_generation(made, [record], template=template, **form)
        assert batch["tokens"][0][batch["mask"][0]].tolist() == [*whole(want), 1]
        assert batch["tokens"][0][batch["span"][0]].tolist()[-1] == 1
    words = made.label_words(["good", "bad"])
    assert words == [whole(f"It was {word}")[-1] for word in ("good", "bad")]
    batch = text.encode_choices(
        made, [{"text": "a film"}], template="{text}:", choices=["good", "bad"], **form
    )
    for c, word in enumerate(("good", "bad")):
        got = batch["tokens"][0, c][batch["mask"][0, c]]
        assert got.tolist() == whole(f"a film: {word}")
    batch = text.encode_classification(
        made, [{"text": "a film"}], max_length=24, template="{text} It was {mask}"
    )
    assert batch["tokens"][0][batch["mask"][0]].tolist() == whole("a film It was")


@settings(max_examples=50, deadline=None)
@given(string=st.text(st.characters(exclude_categories=["Cs"]), max_size=9))
def test_bytes_have_the_same_tokens_wherever_they_stand(
    roberta: text.Tokenizer, string: str
) -> None:
    for piece in (string, " " + string, "\n" + string):
        assert roberta.encode_after(piece) == roberta.encode(piece)


def test_what_no_text_can_stand_before_is_encoded_alone() -> None:
    """One token is of whatever stands before, and of what follows."""
    made = with_spaces("prepend")
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 2}, "<unk>"))
    backend.normalizer = made.backend.normalizer
    alone = text.Tokenizer(backend, made.config)
    assert alone.encode_after("a") == alone.encode("a") == [2]
    bare = text.Tokenizer(
        tokenizers.Tokenizer(models.WordLevel({"b": 2}, "none")), made.config
    )
    assert bare.encode_after("b") == [2]


# --- classification ----------------------------------------------------------------

PROMPT = "{text} It was {mask}."


def test_a_prompt(roberta: text.Tokenizer) -> None:
    record = {"text": "A great film."}
    batch = text.encode_classification(
        roberta, [record], max_length=32, template=PROMPT
    )
    assert batch["tokens"].dtype == batch["position"].dtype == np.int32
    assert batch["tokens"].shape == (1, 32) and batch["mask"].dtype == bool
    tokens = row(batch, 0)
    before, after = roberta.encode("A great film. It was"), roberta.encode(".")
    assert tokens == [BOS, *before, MASK, *after, EOS]  # no space before the mask
    assert batch["position"].tolist() == [tokens.index(MASK)]


@pytest.mark.parametrize("truncate", ["left", "right"])
@pytest.mark.parametrize(
    "string", ["", "good", LONG, UNICODE * 20, "<mask>" * 30, " " * 99]
)
def test_the_mask_token_survives(
    roberta: text.Tokenizer, string: str, truncate: Any
) -> None:
    batch = text.encode_classification(
        roberta, [{"text": string}], max_length=24, template=PROMPT, truncate=truncate
    )
    tokens, whole = row(batch, 0), roberta.encode(string)
    end = [*roberta.encode(" It was"), MASK, *roberta.encode("."), EOS]
    assert tokens[-len(end) :] == end and tokens[0] == BOS
    assert tokens.count(MASK) == 1
    assert tokens[batch["position"][0]] == MASK
    kept = tokens[1 : -len(end)]
    assert len(kept) == min(len(whole), 24 - 1 - len(end))
    assert kept == (whole[: len(kept)] if truncate == "right" else whole[-len(kept) :])


def test_two_fields_share_what_is_left(roberta: text.Tokenizer) -> None:
    template = "{one} ? {mask} , {two}"
    long, short = roberta.encode(LONG), roberta.encode("good")

    def fields(one: str, two: str, length: int) -> tuple[list[int], list[int]]:
        record = {"one": one, "two": two, "unused": 3}
        batch = text.encode_classification(
            roberta, [record], max_length=length, template=template
        )
        tokens, middle = row(batch, 0), roberta.encode(" ?")
        where = batch["position"][0]
        comma = len(roberta.encode(" ,"))
        return tokens[1 : where - len(middle)], tokens[where + 1 + comma : -1]

    room = 40 - 2 - len(roberta.encode(" ?")) - 1 - len(roberta.encode(" ,"))
    one, two = fields("good", LONG, 40)
    assert one == short and len(two) == room - len(short)
    one, two = fields(LONG, LONG, 40)
    assert {len(one), len(two)} <= {room // 2, room - room // 2}
    assert len(one) + len(two) == room
    assert one == long[: len(one)]
    assert two == roberta.encode(" " + LONG)[: len(two)]
    assert fields("", "", 40) == ([], [])


def test_a_head_reads_the_whole_text(roberta: text.Tokenizer) -> None:
    batch = text.encode_classification(
        roberta, [{"text": "good"}, {"text": LONG}], max_length=9
    )
    assert batch.keys() == {"tokens", "mask"}
    assert row(batch, 0) == [BOS, *roberta.encode("good"), EOS]
    assert row(batch, 1) == [BOS, *roberta.encode(LONG)[:7], EOS]
    pair = text.encode_classification(
        roberta, [{"a": "good", "b": "bad"}], max_length=64, template="{a}{sep}{sep}{b}"
    )
    want = [BOS, *roberta.encode("good"), EOS, EOS, *roberta.encode("bad"), EOS]
    assert row(pair, 0) == want


@pytest.mark.parametrize("template", ["{text} It was {mask}", "{text} It was"])
def test_a_decoder_s_prompt_ends_before_the_word(
    opt: text.Tokenizer, template: str
) -> None:
    batch = text.encode_classification(
        opt, [{"text": "A film."}, {"text": LONG}], max_length=16, template=template
    )
    assert row(batch, 0) == [EOS, *opt.encode("A film. It was")]
    assert batch["position"].tolist() == [len(row(batch, 0)) - 1, 15]
    assert row(batch, 1)[-len(opt.encode(" It was")) :] == opt.encode(" It was")
    with pytest.raises(ValueError, match=r"must end with \{mask\}"):
        text.encode_classification(
            opt, [{"text": ""}], max_length=16, template="{text} {mask}."
        )


def test_templates_that_do_not_fit(roberta: text.Tokenizer) -> None:
    def encode(template: str, length: int = 16) -> None:
        text.encode_classification(
            roberta, [{"text": "good"}], max_length=length, template=template
        )

    with pytest.raises(ValueError, match=r"record 1 has no field 'sentence'$"):
        encode("{sentence} {mask}")
    with pytest.raises(
        ValueError, match="room for 6 tokens, but the template alone has"
    ):
        encode("It was a great film, and a terrible one. {text} {mask}", 8)
    # Each field has a token at least: else all records would be the same.
    fixed = len(roberta.encode(" It was")) + 3
    encode(PROMPT.replace(".", "{text}"), fixed + 2)
    with pytest.raises(ValueError, match=r"^max_length leaves room for .* 2 fields"):
        encode(PROMPT.replace(".", "{text}"), fixed + 1)
    with pytest.raises(ValueError, match="at most once"):
        encode("{mask} {mask}")
    with pytest.raises(ValueError, match="names in braces"):
        encode("{} {mask}")
    with pytest.raises(ValueError, match="names in braces"):
        encode("{text:>10}")
    with pytest.raises(ValueError, match="template"):
        encode("{text")
    with pytest.raises(ValueError, match=r"max_length must be .* <= 64, got 65"):
        encode("{text}", 65)
    with pytest.raises(ValueError, match="truncate"):
        text.encode_classification(roberta, [], max_length=8, truncate="middle")
    unmasked = text.Tokenizer(byte_level_bpe(), ROBERTA)
    with pytest.raises(ValueError, match="has no mask token"):
        text.encode_classification(unmasked, [], max_length=8, template="{mask}")
    assert text.template_fields("{a} {{x}} {mask} {b}{sep}") == ["a", "b"]
    encode("{{{text}}}")


def test_a_field_must_be_text(roberta: text.Tokenizer) -> None:
    records = [{"text": "good"}, {"text": None}]
    with pytest.raises(ValueError, match="record 2: text must be text"):
        text.encode_classification(roberta, records, max_length=8)
    assert row(text.encode_classification(roberta, [{"text": 7}], max_length=8), 0)


# --- choices and answers -----------------------------------------------------------


def test_choices_of_every_record(opt: text.Tokenizer) -> None:
    records = [{"text": "A film."}, {"text": LONG}]
    batch = text.encode_choices(
        opt,
        records,
        max_length=24,
        template="{text} It was",
        choices=["great", "xylophone"],
        span_length=12,
    )
    assert batch["tokens"].shape == batch["span"].shape == (2, 2, 24)
    assert batch["valid"].tolist() == [[True, True]] * 2
    for i in range(2):
        prompts = []
        for c, word in enumerate([" great", " xylophone"]):
            tokens, span = row(batch, (i, c)), batch["span"][i, c]
            count = int(span.sum())
            assert tokens[-count:] == opt.encode(word)
            assert span[len(tokens) - count : len(tokens)].all()
            prompts.append(tokens[:-count])
        assert prompts[0] == prompts[1]  # however long the choice is
        assert prompts[0][0] == EOS
        assert opt.decode(prompts[0]).endswith(" It was")
    assert len(row(batch, (1, 0))) == 24 - 12 + 1


def test_unequal_numbers_of_choices(opt: text.Tokenizer) -> None:
    records = [
        {"q": "yes or no?", "options": ["yes", "no"]},
        {"q": "", "options": ["no"]},
    ]
    batch = text.encode_choices(
        opt,
        records,
        max_length=32,
        template="{q}\n",
        choices="options",
        span_length=4,
        num_choices=3,
    )
    assert batch["valid"].tolist() == [[True, True, False], [True, False, False]]
    assert not batch["mask"][~batch["valid"]].any()
    assert not batch["span"][~batch["valid"]].any()
    assert (batch["tokens"][~batch["valid"]] == PAD).all()
    # After a new line no space begins the choice.
    want = [EOS, *opt.encode("yes or no?"), *opt.encode("\n"), *opt.encode("yes")]
    assert row(batch, (0, 0)) == want


def test_choices_that_do_not_fit(opt: text.Tokenizer, roberta: text.Tokenizer) -> None:
    def encode(records: Any, choices: Any = "options", **more: Any) -> Any:
        given: Any = {"max_length": 16, "template": "a", "span_length": 3}
        return text.encode_choices(opt, records, choices=choices, **given | more)

    texts = ["good", "great terrible film, yes or no"]
    long = encode([{"options": texts}], num_choices=2)
    assert long["span"].sum(axis=-1).tolist() == [[len(opt.encode(" good")), 3]]
    with pytest.raises(ValueError, match="record 2 must have 1 to 2 choices, got 3"):
        encode([{"options": ["a"]}, {"options": ["a", "b", "c"]}], num_choices=2)
    with pytest.raises(ValueError, match="record 1 must have 1 to 2 choices, got 0"):
        encode([{"options": []}], num_choices=2)
    with pytest.raises(ValueError, match="record 1: choice 2 is empty"):
        encode([{"options": ["a", " "]}], num_choices=2)
    with pytest.raises(ValueError, match="record 1: options must be a list of texts"):
        encode([{"options": "ab"}], num_choices=2)
    with pytest.raises(TypeError, match="num_choices"):
        encode([{"options": ["a"]}])
    with pytest.raises(ValueError, match="choices must be two texts or more"):
        encode([{}], ["a"])
    # Of the same choices for every record none is cut.
    whole = len(opt.encode(" " + texts[1]))
    with pytest.raises(ValueError, match=f"span_length must be .* >= {whole}, .*got 3"):
        encode([], texts)
    with pytest.raises(ValueError, match="choices must not be empty"):
        encode([], ["a", ""])
    with pytest.raises(ValueError, match="tokenizer must be a decoder's"):
        text.encode_choices(
            roberta, [], max_length=16, template="", choices=["a", "b"], span_length=2
        )


def test_choices_must_differ_in_their_tokens(opt: text.Tokenizer) -> None:
    def encode(records: Any, choices: Any = "options", **more: Any) -> Any:
        given: Any = {"max_length": 16, "template": "a", "span_length": 3}
        return text.encode_choices(opt, records, choices=choices, **given | more)

    with pytest.raises(ValueError, match="must differ in their tokens, got 'good ' as"):
        encode([], ["good", "bad", "good "])
    same = ["bad", "great terrible film, yes", "great terrible film, no"]
    with pytest.raises(ValueError, match="record 2: choices 2 and 3 must differ"):
        encode([{"options": ["a", "b"]}, {"options": same}], num_choices=3)
    found = encode([{"options": same}], num_choices=3, span_length=9)
    assert found["valid"].all()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"options": x} for x in (["a", "a"], ["a", "b", "c"], [], ["a", " "], "ab")),
        *({"options": None}, {}, {"options": ["a", "b"], "q": None}),
    ],
    ids=["equal", "too many", "none", "empty", "a text", "null", "missing", "no text"],
)
def test_no_private_record_s_choices_stop_a_run(
    opt: text.Tokenizer, wrong: Any
) -> None:
    """It has none; what its file says otherwise is the others'."""
    records: Any = [{"q": "a", "options": ["a", "b"]}, {"q": "a"} | wrong]
    given: Any = {"max_length": 16, "template": "{q}", "span_length": 3}
    given["num_choices"] = 2
    given |= {"choices": "options"}
    with pytest.raises(ValueError, match="record 2"):
        text.encode_choices(opt, records, **given)
    found = text.encode_choices(opt, records, private=True, **given)
    assert found["valid"].tolist() == [[True, True], [False, False]]
    alone = text.encode_choices(opt, records[:1], **given)
    for name, rows in alone.items():
        np.testing.assert_array_equal(found[name][:1], rows)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"q": "a", "answer": x} for x in ([], [1], None, {})),
        *({"q": "a"}, {"answer": "a"}, {"q": None, "answer": "a"}),
    ],
    ids=["none", "a number", "null", "object", "missing", "no field", "no text"],
)
def test_no_private_record_s_text_stops_a_run(opt: text.Tokenizer, wrong: Any) -> None:
    """It is padding; the others are as they are without it."""
    records: Any = [{"q": "a", "answer": "b"}, wrong, {"q": "", "answer": ""}]
    given: Any = {"max_length": 16, "template": "{q}", "span_length": 3}
    with pytest.raises(ValueError, match=r"^record 2"):
        text.encode_generation(opt, records, **given)
    found = text.encode_generation(opt, records, private=True, **given)
    others = text.encode_generation(opt, records[::2], **given)
    assert not (found["mask"][1].any() or found["span"][1].any())
    assert (found["tokens"][1] == PAD).all()
    for name, rows in others.items():
        np.testing.assert_array_equal(found[name][::2], rows)
    del given["span_length"]
    if isinstance(wrong.get("q"), str):
        return
    with pytest.raises(ValueError, match=r"^record 2"):
        text.encode_classification(opt, records, **given)
    found = text.encode_classification(opt, records, private=True, **given)
    assert found.pop("valid").tolist() == [True, False, True]
    assert found["position"][1] == 0
    for name, rows in text.encode_classification(opt, records[::2], **given).items():
        np.testing.assert_array_equal(found[name][::2], rows)


def test_no_private_record_stops_a_run_by_what_the_package_raises(
    roberta: text.Tokenizer,
) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 5, " a": 6}, "none"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = text.Tokenizer(words, OPT)
    records: Any = [{"q": "a", "answer": "a"}, {"q": "b", "answer": "a"}]
    given: Any = {"max_length": 9, "template": "{q}", "span_length": 3}
    with pytest.raises(Exception, match="UNK"):
        text.encode_generation(made, records, **given)
    found = text.encode_generation(made, records, private=True, **given)
    assert found["span"].any(axis=1).tolist() == [True, False]
    # Rust's panics are no Exception of Python.
    words.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+b"), "isolated")
    records[1]["q"] = 40 * "a"
    with pytest.raises(BaseException, match="retry-limit") as caught:
        text.encode_generation(made, records, **given)
    assert not isinstance(caught.value, Exception)
    found = text.encode_generation(made, records, private=True, **given)
    assert found["span"].any(axis=1).tolist() == [True, False]


def test_what_is_public_is_refused_of_private_records_too(
    roberta: text.Tokenizer, opt: text.Tokenizer
) -> None:
    records: Any = [{"q": "a", "answer": "a", "choices": ["a", "b"]}]
    form: Any = {"private": True, "max_length": 4, "template": "It was {q} {mask} ."}
    with pytest.raises(ValueError, match="max_length leaves room for 2 tokens"):
        text.encode_classification(roberta, records, **form)
    form |= {"max_length": 8, "span_length": 3, "template": "It was a film. {q}"}
    with pytest.raises(ValueError, match="max_length leaves room for"):
        text.encode_generation(opt, records, **form)
    with pytest.raises(ValueError, match="max_length leaves room for"):
        text.encode_choices(opt, records, choices="choices", num_choices=2, **form)


def test_a_prompt_must_leave_room_for_what_is_written(opt: text.Tokenizer) -> None:
    records = [{"q": "no"}, {"q": LONG}]
    batch = text.encode_generation(
        opt, records, max_length=50, template="{q}", answer="q", span_length=10
    )
    prompt = int((batch["mask"] & ~batch["span"]).sum(axis=1).max())
    assert prompt == 40
    model = network.LanguageModel(config=OPT)
    given: Any = {"model": model, "params": None, "data": batch}  # Nothing is traced.
    with pytest.raises(ValueError, match=r"max_new_tokens must be .* 24, .*got 25"):
        generation.generate(**given, max_new_tokens=25)


def test_answers(opt: text.Tokenizer) -> None:
    records = [
        {"question": "yes or no?", "answer": "yes"},
        {"question": LONG, "answer": ["The answer is no.", "no"]},
        {"question": "", "answer": ""},
        {"question": "", "answer": LONG},
    ]
    batch = text.encode_generation(
        opt,
        records,
        max_length=40,
        template="Question: {question}\nAnswer: ",
        span_length=14,
        truncate="left",
    )
    for i, answer in enumerate(["yes", "The answer is no.", "", LONG]):
        tokens, span = row(batch, i), batch["span"][i]
        marked = tokens[-int(span.sum()) :]
        assert span[: len(tokens)].tolist() == [False] * (len(tokens) - len(marked)) + [
            True
        ] * len(marked)
        whole = opt.encode(" " + answer.strip()) if answer else []
        assert marked == [*whole[:13], EOS]
        prompt = opt.decode(tokens[: -len(marked)])
        assert prompt.startswith("Question:") and prompt.endswith("\nAnswer:")
    assert len(row(batch, 1)) <= 40
    assert opt.decode(row(batch, 1)).count("one.") >= 1  # the end of the question
    with pytest.raises(ValueError, match="record 1 has no field 'answer'"):
        text.encode_generation(
            opt, [{"q": ""}], max_length=16, template="{q}", span_length=4
        )
    with pytest.raises(ValueError, match="record 1: answer must have a text"):
        text.encode_generation(
            opt, [{"answer": []}], max_length=16, template="", span_length=4
        )


def test_the_length_does_not_depend_on_the_records(opt: text.Tokenizer) -> None:
    for records in ([{"text": ""}], [{"text": LONG}] * 3):
        batch = text.encode_classification(opt, records, max_length=12)
        assert batch["tokens"].shape == (len(records), 12)


# --- files -------------------------------------------------------------------------


def write(path: pathlib.Path, content: str) -> pathlib.Path:
    path.write_text(content, encoding="utf-8")
    return path


def test_records_of_each_format(tmp_path: pathlib.Path) -> None:
    want = [{"text": '"a" b, ü', "label": "1"}, {"text": "", "label": "0"}]
    lines = [json.dumps(record) for record in want]
    jsonl = write(tmp_path / "a.jsonl", "\n".join([lines[0], "", lines[1], ""]))
    table = write(tmp_path / "a.csv", '\ufefftext,label\n"""a"" b, ü",1\n"",0\n')
    tabbed = write(tmp_path / "a.tsv", 'text\tlabel\n"a" b, ü\t1\n\t0\n')
    for path in (jsonl, table, tabbed):
        assert text.read_records(path, fields=["text", "label"]) == want


def test_a_record_is_one_line_with_windows_line_ends_too(
    tmp_path: pathlib.Path,
) -> None:
    path = write(tmp_path / "a.csv", "text,label\r\none,1\r\n\r\nthree\r\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 4: has 1 cells, but .* 2"):
        text.read_records(path)


def test_what_a_record_holds_takes_no_other(tmp_path: pathlib.Path) -> None:
    """The number of records is public: a quote that is open may not go over lines."""
    rest = 'pipe of 8",1\nfilm,0\n'
    path = write(tmp_path / "a.csv", 'text,label\n"big pipe,0\n' + rest)
    with pytest.raises(
        ValueError, match=r"a\.csv, line 2: must be one record, got one"
    ):
        text.read_records(path)
    for cell in ("", '"', "x"):  # A blank line where a record is one cell.
        path = write(tmp_path / "b.tsv", f"text\na\n{cell}\nb\n")
        assert [r["text"] for r in text.read_records(path)] == ["a", cell, "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: is not JSON"),
        (
            "a.jsonl",
            '{"a": 1}\n{"a": ' + "7" * 5000 + "}\n",
            r"a\.jsonl, line 2: must hold numbers that Python reads, got a value that",
        ),
        ("a.jsonl", "\n[1, 2]\n", "line 2: must hold an object, got a value"),
        ("a.jsonl", '{"a": 1}\n{"b": 2}\n', "line 2: has no field 'a'$"),
        ("a.jsonl", "", r"a\.jsonl has no records"),
        ("a.csv", "a,b\n", r"a\.csv has no records"),
        ("a.csv", "a,a\n1,2\n", "line 1: must name each field once"),
        ("a.csv", 'a,b\n"x"y,2\n', r"a\.csv cannot be read"),
        ("a.tsv", "b\n1\n", "line 2: has no field 'a'$"),
        ("a.tsv", "a\tb\n1\t2\n3\n", "line 3: has 1 cells, but the first line has 2$"),
        ("a.txt", "", r"must end in \.jsonl, \.csv, \.tsv"),
    ],
)
def test_files_that_cannot_be_read(
    name: str, content: str, message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ValueError, match=message):
        text.read_records(write(tmp_path / name, content), fields=["a"])


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "a.jsonl",
            ['{"a": "x", "b"', "[1]", "7", '{"b": ' + "7" * 5000 + "}", "[" * 10**5],
        ),
        ("a.tsv", ["x", "x\ty\tz", "x\t" + "y" * 200_000]),
        ("a.csv", ["x", "x,y,z", '"x"y,z']),
    ],
)
def test_a_private_line_that_is_no_record_is_an_empty_one(
    name: str, lines: list[str], tmp_path: pathlib.Path
) -> None:
    """One person's record may not decide whether a run begins, or how many there are."""
    good, mark = {"a": "x", "b": "y"}, {".tsv": "\t", ".csv": ","}.get(name[1:], "")
    head, line = ([f"a{mark}b"], f"x{mark}y") if mark else ([], json.dumps(good))
    path = tmp_path / name
    for wrong in lines:
        write(path, "\n".join([*head, line, wrong, line]))
        assert text.read_records(path, private=True) == [good, {}, good]
        with pytest.raises(ValueError, match=r"line [23]|cannot be read"):
            text.read_records(path)
    # A carriage return in a line, and one of blanks.
    returned = line.replace("x", "x\r") if mark else f"{line}\r{line}"
    for odd in (returned, "\u2003"):
        path.write_bytes("\n".join([*head, line, odd, line, ""]).encode())
        assert text.read_records(path, private=True) == [good, {}, good]
    path.write_bytes("\r\n".join([*head, line, line, "", ""]).encode())
    assert text.read_records(path, private=True) == [good, good]
    path.write_bytes("\n".join([*head, line]).replace("y", "\xff").encode("latin1"))
    assert text.read_records(path, private=True) == [{"a": "x", "b": "\ufffd"}]
    with pytest.raises(ValueError, match="is not UTF-8"):
        text.read_records(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('"a"b,c\nx,y\n', "cannot be read"),
        ('a,b\n"x,y\nx,y\n', "line 2: must be one record, got one up to line 3"),
        ("a,a\nx,y\n", "line 1: must name each field once"),
    ],
)
def test_a_header_and_cells_over_lines_are_refused_of_private_files_too(
    content: str, said: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ValueError, match=said):
        text.read_records(write(tmp_path / "a.csv", content), private=True)


def test_a_file_that_is_no_text(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        text.read_records(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="existing file"):
        text.read_records(tmp_path / "b.csv")


def test_labels() -> None:
    records = [{"label": 1}, {"label": "no"}, {"label": "1 "}]
    found = text.labels(records, "label", ["no", 1])
    assert found.tolist() == [1, 0, 1] and found.dtype == np.int32
    with pytest.raises(
        ValueError, match="record 2: label must be one of a, 1, got a value that"
    ):
        text.labels(records, "label", ["a", 1])
    with pytest.raises(ValueError, match="record 1 has no field 'y'"):
        text.labels(records, "y", ["a", "b"])
    with pytest.raises(ValueError, match="different names"):
        text.labels(records, "label", ["a", "a"])
    private = [
        {"label": x} for x in ("no", "maybe", "", None, 1.5, [3], {"a": 1}, " 1")
    ]
    found = text.labels(private, "label", ["no", 1], private=True)
    assert found.tolist() == [0, -1, -1, -1, -1, -1, -1, 1]
    blank = text.labels([{"label": None}, {}], "label", ["None", "x"], private=True)
    assert blank.tolist() == [-1, -1]


def test_labels_that_pandas_made_floats() -> None:
    """Of a column with a missing label; as JSON numbers, and as cells."""
    made: Any = [1.0, 0.0, -0.0, "1.0", "0.0 ", 1, "1"]
    want = [1, 0, 0, 1, 0, 1, 1]
    records = [{"label": x} for x in made]
    for private in (False, True):
        found = text.labels(records, "label", [0, 1], private=private)
        assert found.tolist() == want
    named = text.labels(records[:2], "label", ["0.0", "1.0", "1", "0"])
    assert named.tolist() == [1, 0]  # What a class is called comes first.
    reverse = text.labels([*records, {"label": "1.00"}], "label", ["0.0", "1.0"])
    assert reverse.tolist() == [*want, 1]
    with pytest.raises(ValueError, match=r"must be one of 0\.0, 1\.0, got"):
        text.labels([{"label": 2}], "label", ["0.0", "1.0"])
    none = [0.5, 1e300, float("nan"), float("inf"), "1.5", "1.", ".0", "1.0.0", "x.0"]
    none += ["9" * 5000 + ".0", None]
    wrong = [{"label": x} for x in none]
    found = text.labels(wrong, "label", [0, 1, "x"], private=True)
    assert found.tolist() == [-1] * len(none)
    for record in wrong:
        with pytest.raises(ValueError, match="record 1: label must be"):
            text.labels([record], "label", [0, 1, "x"])


# What messages say of private records.


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "b", "label": 0}\n["Jane-HIV"]\n'),
        ("a.jsonl", '{"text": "b", "label": 0}\n{"Jane-HIV": "b"}\n'),
        ("a.jsonl", '{"text": "b", "label": 0}\n{"Jane-HIV\n'),
        ("a.jsonl", '{"text": "b", "label": 0}\n{"text": "b", "label": "Jane-HIV"}\n'),
        (
            "a.jsonl",
            '{"text": "b", "label": 0}\n{"text": "b", "label": ["Jane-HIV"]}\n',
        ),
        ("a.csv", "text,label\nb,Jane-HIV\n"),
        ("a.csv", "text,label\nb,0,Jane-HIV\n"),
        ("a.csv", "Jane-HIV,0\nb,1\n"),
        ("a.tsv", "Jane-HIV\tJane-HIV\nb\t1\n"),
    ],
)
def test_messages_say_the_line_and_quote_nothing(
    name: str, content: str, tmp_path: pathlib.Path
) -> None:
    path = write(tmp_path / name, content)

    def read() -> None:
        text.labels(text.read_records(path, ["text", "label"]), "label", [0, 1])

    with pytest.raises(ValueError, match=rf"{name}, line [12]") as error:
        read()
    assert "Jane" not in str(error.value)
    with show_values(), pytest.raises(ValueError, match=r"a\.\w+, line [12]"):
        read()


def test_a_byte_that_is_no_text_is_not_quoted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\nab\xe9c,1\n")
    with pytest.raises(ValueError, match="byte 13 is not UTF-8") as error:
        text.read_records(tmp_path / "a.csv")
    assert "e9" not in str(error.value)
