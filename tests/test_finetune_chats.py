"""``jaxdp finetune`` on chats and pairs: runs, resumed runs, and refusals in one line."""

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdp import plans, training
from jaxdp.cli import finetune_prepare, language, options
from jaxdp.cli.parsing import UsageError
from jaxdp.models.language import (
    DecoderConfig,
    LanguageModel,
    _chat_templates,
    chats,
    checkpoint,
    generation,
    tasks,
    text,
)
from jaxdp.training import ledger as ledger_lib
from tests.models.language.golden import make_chats
from tests.test_cli import reported, run
from tests.test_finetune import weights

SECRET = "xylophone"
STEPS = 3
NUMBERS: tuple[Any, ...] = (
    *("--num-steps", STEPS, "--eval-every", 1, "--max-length", 48, "--quiet"),
    *("--sampling", "full", "--seed", 1, "--microbatch-size", 4),
)
SLOPES = ("--learning-rate", 1e-3, "--l2-clip-norm", 9)
LORA = ("--method", "dp-lora", "--lora-rank", 2)


def records(count: int, seed: int, extra: str = "") -> list[dict[str, Any]]:
    """Chats, which are pairs as well."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        asked = f"Is {rng.choice(('it', 'this'))} {rng.random():.3f} {extra}?"
        pair = ("Yes.", "No, not at all!") if i % 2 else ("No.", "Yes indeed.")
        said = [("user", asked), ("assistant", pair[0])]
        made.append(
            {
                "messages": [{"role": r, "content": x} for r, x in said],
                "prompt": asked,
                "chosen": pair[0],
                "rejected": pair[1],
            }
        )
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen with a chat template; of the records, those to train on are secret."""
    root = tmp_path_factory.mktemp("chats")
    for name, made in (("train", records(8, 0, SECRET)), ("eval", records(6, 1))):
        lines = "".join(json.dumps(each) + "\n" for each in made)
        (root / f"{name}.jsonl").write_text(lines)
    backend = make_chats.make_backend()
    config = DecoderConfig(
        model_type="qwen2",
        vocab_size=280,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=96,
        eos_token_id=backend.token_to_id("<|im_end|>"),
    )
    shapes = jax.eval_shape(LanguageModel(config=config).init, jax.random.key(0))
    draw = np.random.default_rng(3)
    params = jax.tree.map(
        lambda x: draw.normal(0, 0.3, x.shape).astype(np.float32), shapes
    )
    checkpoint.save(root / "chat", config, params)
    text.Tokenizer(
        backend, config, None, make_chats.TEMPLATES["chatml"], make_chats.NAMES
    ).save(root / "chat")
    return root


def files(home: Path) -> tuple[object, ...]:
    train, shown = home / "train.jsonl", home / "eval.jsonl"
    return ("--model", home / "chat", "--train", train, "--eval", shown)


@pytest.mark.slow  # Three runs each; a resumed method is in test_conformance.py.
@pytest.mark.parametrize(
    ("words", "metric"),
    [
        (("--task", "instruction", "--span-length", 8, *LORA), "test_token_f1"),
        (("--task", "preference", "--beta", 0.5, *LORA), "test_accuracy"),
        (("--task", "instruction", *SLOPES), "test_token_f1"),
        (("--task", "preference", *SLOPES), "test_accuracy"),
        (
            (
                *("--task", "preference", "--template", "{prompt}"),
                *("--reference-free", *SLOPES),
            ),
            "test_accuracy",
        ),
    ],
    ids=["instruction", "preference", "slopes", "slopes of pairs", "free"],
)
def test_a_run_ends_as_if_it_had_not_been_stopped(
    words: tuple[Any, ...],
    metric: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    said = ("finetune", *files(home), *words, *NUMBERS, "--out")
    want, out = tmp_path / "want", tmp_path / "run"
    assert run(*said, want) == 0
    assert capsys.readouterr().err == ""
    report = reported(want)
    of_test = {name for name in report if name.startswith("test_")}
    of_texts = {"test_token_f1", "test_exact_match", "test_perplexity"}
    assert of_test == (of_texts if metric in of_texts else {metric})
    assert 0 <= report[metric] <= 1 and report["task"] == words[1]
    if words[1] == "preference" and "--reference-free" not in words:
        assert report["zero_shot_test_accuracy"] == 0.5  # To the bit, nothing moved.
    plan = plans.from_json((want / "plan.json").read_text())
    assert report["epsilon"] == float(plan.epsilon()) == pytest.approx(2, rel=1e-2)
    assert weights(want / "model") != weights(home / "chat")
    template = make_chats.TEMPLATES["chatml"]
    assert text.Tokenizer.load(want / "model").chat_template == template
    note = ledger_lib.read(want).header["note"]["command"]
    assert note["beta"] == {"--beta": 0.5}.get(
        words[2], 0.1 if words[1] == "preference" else None
    )
    assert note["truncate"] == ("right" if "--template" in words else "left")
    # Neither a private text nor its likelihood is in what may be shown.
    for path in want.rglob("*"):
        if path.is_file() and "secret" not in path.parts:
            assert SECRET.encode() not in path.read_bytes()
            assert b'"reference"' not in path.read_bytes()

    calls = iter(range(9))
    name = "generate" if words[1] == "instruction" else "log_likelihoods"
    home_of: Any = generation if name == "generate" else tasks
    judged = getattr(home_of, name)
    # After the likelihoods of the model before the run, and two judgements.
    first = 2 if name == "generate" or "--reference-free" in words else 4

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == first:
            raise KeyboardInterrupt
        return judged(*args, **kwargs)

    monkeypatch.setattr(home_of, name, killed)
    assert run(*said, out) == 130
    monkeypatch.undo()
    assert run("finetune", "--resume", "--out", out, "--quiet") == 0
    assert weights(out / "model") == weights(want / "model")
    assert reported(out)[metric] == report[metric]
    if SLOPES[0] in words:
        capsys.readouterr()
        assert run("replay", want, "--json") == 0
        compared = json.loads(capsys.readouterr().out)["compared"]
        assert compared == "identical to model, to the bit"


def command(home: Path, **given: Any) -> options.Finetune:
    return options.Finetune(
        **{name: str(home / f"{name}.jsonl") for name in ("train", "eval")},
        model=str(home / "chat"),
        max_length=48,
        sampling="full",
        seed=1,
        out=Path("never"),
        **given,
    )


def test_likelihoods_of_the_initial_model_travel_with_their_records(home: Path) -> None:
    """Of the folder's weights and what was drawn beside them."""
    given = command(home, task="preference", num_steps=2, trainable="prefix")
    job = finetune_prepare.prepare(given)
    tokenizer = text.Tokenizer.load(home / "chat")
    for name, part in (("train", job.train), ("eval", None)):
        pairs = text.read_records(home / f"{name}.jsonl")
        batch: Any = chats.encode_preference(
            tokenizer, pairs, max_length=48, span_length=24
        )
        if part is not None:
            np.testing.assert_array_equal(part["tokens"], batch["tokens"])
            want = tasks.log_likelihoods(job.task, job.params, batch, batch_size=5)
            np.testing.assert_allclose(part["reference"], want, rtol=1e-5)
            assert part["reference"].shape == (8, 2)
            assert part["reference"].dtype == np.float32
    assert set(language.flat(job.params)) > {"layers/prefix/key"}
    # A loss of the first step is log 2; a model that moved is judged by what it gained.
    losses = jax.jit(job.task.value_fn)(job.params, job.train)
    np.testing.assert_allclose(losses, np.log(2), rtol=1e-5)
    assert job.judge.fn(job.params) == {"test_accuracy": 0.5}
    moved = jax.tree.map(lambda x: x + np.float32(0.1) * np.sign(x), job.params)
    public: Any = batch
    gain = tasks.log_likelihoods(job.task, moved, public)
    assert np.all(gain[:, 0] > gain[:, 1])  # By length alone, which says nothing.
    gain -= tasks.log_likelihoods(job.task, job.params, public)
    share = float(np.mean(gain[:, 0] > gain[:, 1]))
    assert job.judge.fn(moved) == {"test_accuracy": share} != {"test_accuracy": 1.0}


def test_memory_of_pairs_is_predicted_with_their_references(home: Path) -> None:
    for free in (False, True):
        given = command(home, task="preference", num_steps=2, reference_free=free)
        assert finetune_prepare._needed(given, "dp-lora") > 0


def test_answers_are_judged_up_to_the_end_of_their_turn(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = finetune_prepare.prepare(command(home, task="instruction", num_steps=2))
    assert job.command.span_length == 24 and job.command.truncate == "left"
    tokenizer = text.Tokenizer.load(home / "chat")
    public = text.read_records(home / "eval.jsonl")

    def answered(
        model: Any, params: Any, data: Any, *, max_new_tokens: int, **more: Any
    ) -> Any:
        assert max_new_tokens == 24 and "span" not in data
        want = chats.encode_prompts(tokenizer, public, max_length=48)
        np.testing.assert_array_equal(data["tokens"], want["tokens"])
        end = tokenizer.backend.token_to_id("<|im_end|>")
        right = chats.answers(public)
        said = [[*tokenizer.encode(x), end, *tokenizer.encode("no")] for x in right]
        said[0] = [end]
        rows = np.full((len(said), 24), end)
        for row, tokens in zip(rows, said, strict=True):
            row[: len(tokens)] = tokens
        return rows

    monkeypatch.setattr(generation, "generate", answered)
    found = job.judge.fn(job.params)
    assert found["test_token_f1"] == found["test_exact_match"] == pytest.approx(5 / 6)
    program = jax.jit(job.task.likelihood)  # pyright: ignore[reportArgumentType]
    batch = chats.encode_instruction(tokenizer, public, max_length=48, span_length=24)
    total, count = program(job.params, batch)
    want = np.exp(-total.sum() / count.sum())
    assert found["test_perplexity"] == pytest.approx(want, rel=1e-4)


LINES: dict[str, tuple[Any, str, str]] = {
    "no JSON": ('{"messages": [', "instruction", "is not JSON"),
    "no object": ("[1]", "preference", "must hold an object"),
    "empty": ({"messages": []}, "instruction", "messages must be a list of one"),
    "user last": (
        {"messages": [{"role": "user", "content": "Why?"}]},
        "instruction",
        "the last of messages must be the assistant's",
    ),
    "long": (
        {
            "messages": [
                {"role": "user", "content": "a" * 99},
                {"role": "assistant", "content": "b"},
            ]
        },
        "instruction --truncate right",
        "no token of an answer is left within max_length = 48 tokens",
    ),
    "no field": ({"prompt": "a"}, "instruction", "has no field 'messages'"),
    "no chosen": ({"prompt": "a", "rejected": "b"}, "preference", "'chosen'"),
    "number": (
        {"prompt": "a", "chosen": ["b"], "rejected": "b"},
        "preference",
        "each of chosen must have a text as its role",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_what_is_wrong_with_private_records_counts_zero(
    name: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    """A run begins with them as with any others; they have nothing that could count."""
    wrong, task, _ = LINES[name]
    wrong = wrong if isinstance(wrong, str) else json.dumps(wrong)
    path = tmp_path / "train.jsonl"
    good = (home / "train.jsonl").read_text().splitlines(keepends=True)
    path.write_text(good[0] + wrong + "\n" + "".join(good[1:]))
    given: Any = {"task": task.split()[0], "num_steps": 2, "learning_rate": 1e-3}
    given |= {"l2_clip_norm": 9.0} | ({"truncate": "right"} if name == "long" else {})
    said = dataclasses.replace(command(home, **given), train=str(path))
    span = finetune_prepare.prepare(said).train["span"]
    assert [row.any() for row in span] == [True, False] + [True] * 7
    assert capsys.readouterr() == ("", "")
    path.write_text(2 * (wrong + "\n"))
    with pytest.raises(UsageError, match=r"^--train: ") as error:
        finetune_prepare.prepare(said)
    line = str(error.value)
    assert "no record has a field" in line or "one record or more must have" in line
    assert "\n" not in line and "line 2" not in line


@pytest.mark.parametrize("name", LINES)
def test_wrong_records_are_named_before_anything_is_spent(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was spent")

    monkeypatch.setattr(training, "fit", never)
    wrong, task, part = LINES[name]
    wrong = wrong if isinstance(wrong, str) else json.dumps(wrong)
    path = tmp_path / "wrong.jsonl"
    good = (home / "train.jsonl").read_text().splitlines(keepends=True)
    path.write_text(good[0] + wrong + "\n")
    said = (*files(home)[:4], "--eval", path, *NUMBERS)
    words = ("--task", *task.split(), "--out", tmp_path / "out")
    assert run("finetune", *said, *words) == 2
    line = capsys.readouterr().err
    assert line.startswith("jaxdp: --eval: ") and line.count("\n") == 1
    assert part in line and "line 2" in line
    assert not (tmp_path / "out").exists()


def test_a_template_without_the_package_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    _chat_templates.compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    words = ("--task", "instruction", "--out", tmp_path / "out", *NUMBERS)
    assert run("finetune", *files(home), *words) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "jinja2: pip install 'jaxdp-optim[lm]'" in line
