"""``jaxdp finetune``: every task end to end, resumed, replayed, and refused in one line."""

import dataclasses
import fnmatch
import functools
import json
import random
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import numpy as safetensors

import jaxdp
from jaxdp import plans, sampling, training
from jaxdp.cli import (
    finetune,
    finetune_method,
    finetune_options,
    finetune_prepare,
    language,
    main,
    options,
    recipes,
    record,
)
from jaxdp.cli.parsing import UsageError
from jaxdp.models.language import (
    DecoderConfig,
    LanguageModel,
    LoRA,
    ModernBertConfig,
    OPTConfig,
    RobertaConfig,
    adapter_only,
    checkpoint,
    network,
    tasks,
    text,
)
from jaxdp.training import ledger as ledger_lib
from jaxdp.training import memory
from tests.test_cli import REPORT_FIELDS, check_plot, mistakes, reported, run
from tests.training import test_parallel

#: In no public file of a run: only private records have it.
SECRET = "xylophone"
TEMPLATE = "{text} It was {mask} ."
CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
STEPS = 6
NUMBERS = ("--num-steps", STEPS, "--eval-every", 2, "--max-length", 16, "--quiet")
#: Full batches: their accountant takes no time.
QUICK = (*NUMBERS, "--sampling", "full", "--learning-rate", 1e-3, "--l2-clip-norm", 9)
PROMPT = ("--task", "prompt", "--template", TEMPLATE, "--label-words", "bad,good")
WRITTEN = {*finetune.FILES, "model", "secret"}


def records(count: int, seed: int, extra: str = "") -> list[dict[str, Any]]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        label = rng.randrange(2)
        word = rng.choice((("dull", "sad"), ("warm", "bright"))[label])
        name = ("bad", "good")[label]
        made.append(
            {
                "text": f"a {word} film {extra}",
                "label": label,
                "name": name,
                "choices": ["bad", "good", "so so"][: 2 + (rng.random() < 0.5)],
                "answer": [name, "nothing"],
            }
        )
    return made


def make_tokenizer(special: list[str]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ["a dull sad warm bright film It was bad . good ."] * 9
    made.train_from_iterator(lines, trainer)
    return made


def _random(like: Any) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 0.3, like.shape).astype(np.float32)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny RoBERTa, a tiny OPT, and records of which those to train on are secret."""
    root = tmp_path_factory.mktemp("finetune")
    for name, made in {"train": records(20, 0, SECRET), "eval": records(12, 1)}.items():
        lines = "".join(json.dumps(each) + "\n" for each in made)
        (root / f"{name}.jsonl").write_text(lines)
        rows = [f"{r['text']}\t{r['name']}" for r in made]
        (root / f"{name}.tsv").write_text("\n".join(["text\tname", *rows]) + "\n")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    for family in ("roberta", "opt"):
        made = make_tokenizer(special if family == "roberta" else special[:-1])
        size: dict[str, Any] = {"vocab_size": made.get_vocab_size(), **CONFIG}
        if family == "roberta":
            config = RobertaConfig(
                **size, intermediate_size=16, max_position_embeddings=34
            )
        else:
            config = OPTConfig(**size, ffn_dim=16, max_position_embeddings=32)
        shapes = jax.eval_shape(LanguageModel(config=config).init, jax.random.key(0))
        params = jax.tree.map(_random, shapes)
        checkpoint.save(root / family, config, params)
        made.save(str(root / family / "tokenizer.json"))
    return root


@pytest.fixture(autouse=True, scope="module")
def _one_task_a_model() -> Iterator[None]:
    """Equal tasks are one object, so that a program is compiled for the first one alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("prompt", "head", "choice", "generation"):
            made = functools.cache(getattr(tasks, name))

            def once(
                model: Any, words: Any = None, made: Any = made, **more: Any
            ) -> Any:
                return made(model, *([] if words is None else [tuple(words)]), **more)

            patch.setattr(tasks, name, once)
        yield


def files(home: Path, model: str, suffix: str = "jsonl") -> tuple[object, ...]:
    train, shown = home / f"train.{suffix}", home / f"eval.{suffix}"
    return ("--model", home / model, "--train", train, "--eval", shown)


def prompt_command(home: Path, **changes: Any) -> options.Finetune:
    """Returns a command that tunes RoBERTa by a prompt, and is never run."""
    records_of: Any = {name: str(home / f"{name}.jsonl") for name in ("train", "eval")}
    return options.Finetune(
        **records_of,
        model=str(home / "roberta"),
        task="prompt",
        template=TEMPLATE,
        label_words=("bad", "good"),
        max_length=16,
        sampling="full",
        out=Path("never"),
        **changes,
    )


def replayed(folder: Path, capsys: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert run("replay", folder, "--json") == 0
    return json.loads(capsys.readouterr().out)


def weights(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


# --- runs --------------------------------------------------------------------------


def test_prompt_run_writes_everything(home: Path, tmp_path: Path, capsys: Any) -> None:
    """From entropy, with the numbers that are the default."""
    out = tmp_path / "a" / "run"
    words = (*PROMPT, *NUMBERS[:-1], "--sampling", "full", "--learning-rate", 1e-2)
    said = (*words, "--epsilon", 4, "--relation", "add_or_remove", "--out", out)
    budget = jaxdp.Budget.create(
        tmp_path / "budget", epsilon=7.0, delta=1e-4, relation="add_or_remove"
    )
    said = (*said, "--budget", budget.folder)
    assert run("finetune", *files(home, "roberta"), *said) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for word in ("4 at delta 1e-05, add_or_remove", "yes, randomness", "test accuracy"):
        assert word in shown.out
    assert "not public: --timings" in shown.out and "steps/s" not in shown.out
    assert {p.name for p in out.iterdir()} == WRITTEN - {"initial.npz"}
    check_plot(out / "progress.png")
    check_plot(out / "releases.png")

    report = reported(out)
    # How long a run on somebody's texts takes may tell of them: not in the public file.
    times = {"compile_seconds", "train_seconds", "steps_per_second"}
    assert (REPORT_FIELDS - times) | {"test_accuracy", "test_macro_f1"} <= set(report)
    assert not times & set(report)
    assert (report["private"], report["seed_source"]) == (True, "entropy")
    assert (report["model"], report["dataset"]) == ("roberta", "train")
    assert (report["num_examples"], report["num_test_examples"]) == (20, 12)
    assert report["steps_done"] == report["steps_charged"] == STEPS
    assert report["num_trainable"] == report["num_parameters"]
    plan = plans.from_json((out / "plan.json").read_text())
    (reserved,) = budget.reservations
    assert reserved.cost == {"epsilon": plan.epsilon(), "delta": plan.delta}
    again = [tmp_path / "b" if x == out else x for x in said]
    assert run("finetune", *files(home, "roberta"), *again) == 2
    assert "--budget must have room for dpzero" in capsys.readouterr().err
    assert isinstance(plan, plans.DPZero)
    assert (plan.sampling, plan.num_steps) == (sampling.FullBatch(), STEPS)
    assert (plan.l2_clip_norm, plan.smoothing_radius) == (200.0, 1e-3)
    assert (plan.direction, plan.num_directions) == ("rademacher", 1)
    assert report["epsilon"] == float(plan.epsilon()) == pytest.approx(4, rel=1e-2)

    # The metrics are those of the written model, and of the given one, on public records.
    for folder, prefix in ((out / "model", ""), (home / "roberta", "zero_shot_")):
        config, params = checkpoint.load(folder)
        tokenizer = text.Tokenizer.load(folder)
        task = tasks.prompt(
            LanguageModel(config=config), tokenizer.label_words(["bad", "good"])
        )
        public = text.read_records(home / "eval.jsonl")
        batch = text.encode_classification(
            tokenizer, public, max_length=16, template=TEMPLATE
        )
        found = tasks.predict(task, params, batch)
        right = [each["label"] for each in public]
        accuracy, f1 = tasks.accuracy(found, right), tasks.macro_f1(found, right)
        assert report[f"{prefix}test_accuracy"] == accuracy
        assert report[f"{prefix}test_macro_f1"] == f1
    assert weights(out / "model") != weights(home / "roberta")
    assert replayed(out, capsys)["compared"] == "identical to model, to the bit"
    card = (out / "model" / "README.md").read_text()
    assert run("report", out, "--format", "card") == 0
    assert capsys.readouterr().out == card
    assert "differentially private with epsilon 4 at delta 1e-05" in card
    assert "report.json | agrees with plan and ledger |" in card

    # Nothing of a private record is in what may be shown, nor any loss.
    for path in out.rglob("*"):
        if path.is_file() and "secret" not in path.parts:
            assert SECRET.encode() not in path.read_bytes()
            assert b"loss" not in path.read_bytes() or path.suffix != ".jsonl"
    assert SECRET not in shown.out


HEAD_RUN = ("--task", "head", "--labels", 2, *QUICK, "--trainable", "head")
CHOICE = ("--task", "choice", "--template", "{text} It was")


@pytest.mark.parametrize(
    ("words", "metrics"),
    [
        pytest.param(
            (
                *(*CHOICE, "--choices-field", "choices", "--num-choices", 3),
                *("--span-length", 4, "--trainable", "prefix", "--num-directions", 2),
            ),
            {"test_accuracy"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                *("--task", "generation", "--template", "{text} It was"),
                *("--span-length", 4),
            ),
            {"test_token_f1", "test_exact_match", "test_perplexity"},
            marks=pytest.mark.slow,  # A run and two replays, as of --task prompt.
        ),
    ],
    ids=["choice", "generation"],
)
def test_other_tasks(
    words: tuple[object, ...],
    metrics: set[str],
    home: Path,
    tmp_path: Path,
    capsys: Any,
) -> None:
    said = (*files(home, "opt"), *words, *QUICK, "--seed", 1, "--out", tmp_path)
    assert run("finetune", *said) == 0
    assert capsys.readouterr().err == ""
    report = reported(tmp_path)
    of_test = {name for name in report if name.startswith("test_")}
    assert of_test == metrics
    assert {f"zero_shot_{name}" for name in metrics} <= set(report)
    assert all(0 <= report[name] <= 1 for name in metrics - {"test_perplexity"})
    assert report.get("test_perplexity", 2.0) > 1
    assert (report["private"], report["task"]) == (False, words[1])
    assert (tmp_path / "initial.npz").exists() == ("prefix" in words)
    answer = replayed(tmp_path, capsys)
    assert answer["compared"] == "identical to model, to the bit"
    assert (answer["steps"], answer["num_steps"]) == (STEPS, STEPS)
    # The ledger, the model and what was drawn are all that it takes.
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("ledger.jsonl", "initial.npz"):
        if (tmp_path / name).exists():
            (alone / name).write_bytes((tmp_path / name).read_bytes())
    given = ("--initial", home / "opt", "--out", alone / "there")
    assert run("replay", alone / "ledger.jsonl", *given) == 0
    assert weights(alone / "there") == weights(tmp_path / "model")


def test_a_tuned_model_is_discarded_with_its_card(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(home / "opt", folder)
    (folder / "README.md").touch()
    (folder / "notes").touch()
    language.discard(folder)
    assert [path.name for path in folder.iterdir()] == ["notes"]
    (folder / "notes").unlink()
    (folder / "README.md").touch()
    language.discard(folder)
    assert not folder.exists()


def test_a_perplexity_without_bound_is_none_in_the_report() -> None:
    metrics = {"test_token_f1": 0.0, "test_perplexity": float("inf")}
    assert finetune._finite(metrics) == {"test_token_f1": 0.0, "test_perplexity": None}


@pytest.fixture
def gemma(home: Path, tmp_path: Path) -> Path:
    """A tiny Gemma 2 in shards of bfloat16, whose tokenizer begins texts with a token."""
    folder, made = tmp_path / "gemma", make_tokenizer(["<pad>", "</s>", "<s>"])
    begin = tokenizers.processors.TemplateProcessing
    made.post_processor = begin(single="<s> $A", special_tokens=[("<s>", 2)])
    fields = {"attn_logit_softcapping": 5.0, "sliding_window": 4, "head_dim": 4}
    config = DecoderConfig(
        model_type="gemma2",
        vocab_size=made.get_vocab_size(),
        intermediate_size=16,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=(1, 3),
        bos_token_id=2,
        **CONFIG,
        **fields,
    )
    shapes = jax.eval_shape(LanguageModel(config=config).init, jax.random.key(0))
    narrow = jax.tree.map(lambda x: _random(x).astype("bfloat16"), shapes)
    checkpoint.save(folder, config, narrow, max_shard_bytes=2000)
    made.save(str(folder / "tokenizer.json"))
    return folder


GEMMA = ("--task", "generation", "--template", "{text} It was", "--span-length", 4)


@pytest.mark.slow  # A run, as of the other tasks.
def test_a_decoder_in_shards_is_tuned_in_its_dtype(
    home: Path, gemma: Path, tmp_path: Path, capsys: Any
) -> None:
    words = (*files(home, gemma), *GEMMA, "--dtype", "bfloat16", *QUICK)
    assert run("finetune", *words, "--seed", 1, "--out", tmp_path / "run") == 0
    config, params = checkpoint.load(tmp_path / "run" / "model", dtype="bfloat16")
    assert config == checkpoint.read_config(gemma)
    _, before = checkpoint.load(gemma, dtype="bfloat16")
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), params, before)
    assert all(jax.tree.leaves(changed))
    assert text.Tokenizer.load(tmp_path / "run" / "model").start == [2]
    assert replayed(tmp_path / "run", capsys)["compared"].startswith("identical")


@pytest.mark.slow  # Two runs, as of the other tasks.
def test_modernbert_is_tuned_by_its_mask_and_by_a_head(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    folder, made = tmp_path / "modernbert", make_tokenizer(special)
    config = ModernBertConfig(
        vocab_size=made.get_vocab_size(),
        intermediate_size=16,
        max_position_embeddings=32,
        local_attention=4,
        **CONFIG,
    )
    shapes = jax.eval_shape(LanguageModel(config=config).init, jax.random.key(0))
    checkpoint.save(folder, config, jax.tree.map(_random, shapes))
    made.save(str(folder / "tokenizer.json"))
    names = zip(("cls", "pad", "sep", "unk", "mask"), special, strict=True)
    map_of = json.dumps({f"{kind}_token": token for kind, token in names})
    (folder / "special_tokens_map.json").write_text(map_of)
    _, before = checkpoint.load(folder)
    lora = ("--task", "head", "--labels", 2, "--trainable", "lora")
    for words, out in ((PROMPT, tmp_path / "prompt"), (lora, tmp_path / "head")):
        said = (*files(home, folder), *words, *QUICK, "--seed", 1, "--out", out)
        assert run("finetune", *said) == 0
        assert replayed(out, capsys)["compared"].startswith("identical")
    _, params = checkpoint.load(tmp_path / "prompt" / "model")
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), params, before)
    assert all(jax.tree.leaves(changed))
    _, params = checkpoint.load(tmp_path / "head" / "model", num_labels=2)
    np.testing.assert_array_equal(
        params["head"]["dense"]["kernel"], before["head"]["dense"]["kernel"]
    )
    assert np.any(params["layers"]["lora"]["query"]["b"])


def test_a_decoder_s_mistakes_are_named(
    home: Path, gemma: Path, tmp_path: Path, capsys: Any
) -> None:
    def said(**fields: Any) -> str:
        path = gemma / "config.json"
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | fields))
        words = (*files(home, gemma), *GEMMA, *QUICK, "--out", tmp_path / "run")
        assert run("finetune", *words) == 2
        path.write_text(before)
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    assert "model_type must be one of 'roberta', 'opt', 'modernbert', 'llama'" in said(
        model_type="mamba"
    )
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    assert "rope_scaling must be of the type" in said(rope_scaling=scaling)
    assert "layers.1" in said(num_hidden_layers=1)
    shard = next(iter(sorted(gemma.glob("model-00002*"))))
    shard.unlink()
    assert f"{shard.name} does not exist" in " ".join(said().split())


@pytest.mark.slow  # The model's is in models/language/test_network.py.
def test_lora_trains_the_adapter_alone_and_goes_on(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    lora = ("--trainable", "lora", "--lora-rank", 2, "--seed", 1)
    said = (*PROMPT, *QUICK, *lora, "--direction", "sphere")
    assert run("finetune", *files(home, "roberta"), *said, "--out", one) == 0
    report, base = reported(one), weights(home / "roberta")
    assert weights(one / "model").items() >= base.items()
    assert checkpoint.read_adapter(one / "model") == LoRA(rank=2)
    drawn = dict(np.load(one / "initial.npz"))
    assert set(drawn) == {
        f"layers/lora/{x}/{y}" for x in ("query", "value") for y in ("a", "b")
    }
    assert report["num_trainable"] == sum(x.size for x in drawn.values())
    _, tuned = checkpoint.load(one / "model")
    for path, leaf in language.flat(tuned).items():
        if path in drawn:
            assert np.any(np.asarray(leaf) != drawn[path])
    assert replayed(one, capsys)["compared"] == "identical to model, to the bit"

    # What was drawn is on record: another draw gives way to it.
    recipe = {"recipe": "roberta-large/sst-2", "trainable": "lora", "lora_rank": 2}
    command = complete(model=str(home / "roberta"), **recipe)
    model = language.model_of(command, command.model)
    fresh = language.initial(command, model, command.model, jax.random.key(9))
    for path, leaf in language.flat(fresh).items():
        assert path not in drawn or path[-1] == "b" or np.any(leaf != drawn[path])
    header = record.read(one, "").header
    for path, leaf in language.flat(language.recorded(fresh, one, header)).items():
        np.testing.assert_array_equal(leaf, drawn.get(path, leaf))

    # Another run takes up the adapter, but no other one.
    again = ("--model", one / "model", *files(home, "roberta")[2:], *said)
    assert run("finetune", *again, "--out", two) == 0
    for name, value in np.load(two / "initial.npz").items():
        np.testing.assert_array_equal(value, language.flat(tuned)[name])
    other = (*PROMPT, *QUICK, "--trainable")
    for words, part in (
        (("lora", "--lora-rank", 3), "--lora-rank must be left out or be as in"),
        (("prefix",), "--trainable must be all or that of the adapter in --model"),
    ):
        assert run("finetune", *again[:6], *other, *words, "--out", tmp_path / "x") == 2
        assert part in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("method", ["dpzero", "dp-lora"])
def test_leaves_are_tuned_by_a_pattern_of_their_paths(
    method: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    pattern, out = "layers/attention/*/bias", tmp_path / "run"
    said = (*PROMPT, *NUMBERS, "--sampling", "full", "--method", method)
    said = (*said, "--trainable", pattern, "--json")
    assert run("finetune", *files(home, "roberta"), *said, "--out", out) == 0
    assert json.loads(capsys.readouterr().out) == reported(out)
    before, after = (
        language.flat(checkpoint.load(folder)[1])
        for folder in (home / "roberta", out / "model")
    )
    moved = {p for p in before if np.any(np.asarray(before[p]) != after[p])}
    matched = {p for p in before if fnmatch.fnmatchcase(p, pattern)}
    assert moved == matched and 0 < len(matched) < len(before)
    assert reported(out)["num_trainable"] == sum(before[p].size for p in matched)
    if method == "dpzero":
        assert run("replay", out) == 0


def test_clip_and_step_of_gradients_follow_from_public_records(home: Path) -> None:
    command = prompt_command(home, method="dp-lora", microbatch_size=5, seed=1)
    job = finetune_prepare.prepare(command)
    public = text.read_records(home / "eval.jsonl")
    tokenizer = text.Tokenizer.load(home / "roberta")
    batch: Any = text.encode_classification(
        tokenizer, public, max_length=16, template=TEMPLATE
    )
    batch |= {"label": text.labels(public, "label", ("0", "1"))}
    initial = jax.device_put(job.params)
    lora = {"lora": initial["layers"]["lora"]}

    def loss(part: Any, record: Any) -> jax.Array:
        params = initial | {"layers": initial["layers"] | part}
        one = jax.tree.map(lambda x: x[None], record)
        return job.task.value_fn(params, one)[0]

    found = jax.vmap(jax.grad(loss), in_axes=(None, 0))(lora, batch)
    rows = np.concatenate([x.reshape(12, -1) for x in jax.tree.leaves(found)], axis=1)
    median = np.median(np.linalg.norm(rows, axis=1))
    assert job.plan.l2_clip_norm == pytest.approx(median / 3, rel=5e-3)
    assert job.plan.family == "dpgd" and job.plan.num_steps == 300
    longest = 1.5 / (median * np.sqrt(300) * job.plan.noise_std)
    assert job.recipe.learning_rate == pytest.approx(longest / 5, rel=6e-3)
    for number in (job.plan.l2_clip_norm, job.recipe.learning_rate):
        assert number == float(f"{number:.3g}")
    assert job.recipe.l2_clip_norm == job.command.l2_clip_norm == job.plan.l2_clip_norm
    assert float(job.plan.epsilon()) == pytest.approx(2, rel=1e-2)

    given = dataclasses.replace(command, num_steps=1, epsilon=10.0)
    quiet = finetune_prepare.prepare(given)
    step = 1 / (quiet.plan.l2_clip_norm * median)  # Of 1, if all records agree.
    assert quiet.recipe.learning_rate == pytest.approx(step, rel=5e-3)

    # AdamW divides steps by the size of gradients: of their noise, or of a clipped sum.
    given = dataclasses.replace(command, optimizer="adamw")
    adam = finetune_prepare.prepare(given)
    assert adam.plan == job.plan  # The same clip, noise and event.
    size = np.hypot(job.plan.noise_std, job.plan.l2_clip_norm / rows.shape[1] ** 0.5)
    want = job.recipe.learning_rate * size
    assert adam.recipe.learning_rate == pytest.approx(want, rel=1e-2)

    # What is given stays.
    given = dataclasses.replace(command, l2_clip_norm=0.3, learning_rate=0.2)
    job = finetune_prepare.prepare(given)
    assert (job.plan.l2_clip_norm, job.recipe.learning_rate) == (0.3, 0.2)
    given = dataclasses.replace(command, learning_rate=0.2)
    assert finetune_prepare.prepare(given).recipe.learning_rate == 0.2


def test_auto_takes_gradients_where_they_fit(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    command = prompt_command(home, method="auto", seed=1)
    asked, predict = [], finetune_method.needed

    def needed(of: options.Finetune, task: Any, record: Any, *more: Any) -> int:
        asked.append((of.method, of.trainable, more[-1]))
        tokens = set(np.ravel(record["tokens"]))
        assert tokens <= public, "private records decide"
        return predict(of, task, record, *more)

    tokenizer = text.Tokenizer.load(home / "roberta")
    shown = text.read_records(home / "eval.jsonl")
    encoded: Any = text.encode_classification(
        tokenizer, shown, max_length=16, template=TEMPLATE
    )
    public = set(np.ravel(encoded["tokens"]))
    monkeypatch.setattr(finetune_method, "needed", needed)
    for given, part in (
        ((10**9, "the device"), "is dp-lora: dp-lora needs 0."),
        ((10**5, "the device"), "is dpzero: dp-lora needs 0."),
        ((None, "the device"), "does not say"),
    ):
        monkeypatch.setattr(finetune_method, "limit", lambda given=given: given)
        job = finetune_prepare.prepare(command)
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and part in line
        method = "dp-lora" if given[0] == 10**9 else "dpzero"
        assert job.command.method == method
        assert job.plan.family == {"dp-lora": "dpgd"}.get(method, method)
        by_hand = dataclasses.replace(command, method=method)
        assert job.command == finetune_prepare.prepare(by_hand).command
    assert asked == 3 * [("dp-lora", "lora", 20), ("dpzero", "all", 20)]
    whole = dataclasses.replace(command, trainable="all", quiet=True)
    assert finetune_prepare.prepare(whole).command.method == "dpzero"
    assert capsys.readouterr().err == "" and len(asked) == 6
    with pytest.raises(UsageError, match="--method must be dpzero or dp-lora with"):
        finetune_options.check_auto(dataclasses.replace(command, distributed=True))


def test_auto_counts_the_bytes_of_integers(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Those of a base that is rounded, and of the adapter that is the default then."""
    found = []

    def needed(plan: Any, params: Any, *given: Any, **more: Any) -> Any:
        found.append((params["layers"]["mlp"]["up"]["kernel"].dtype, more["trainable"]))
        return memory.Memory(1, 1, 1)

    monkeypatch.setattr(memory, "needed", needed)
    command = prompt_command(home, method="auto", quantised="int4")
    chosen = finetune_prepare._with_method(command)
    assert chosen.method == "dp-lora"
    assert found == 2 * [(jnp.dtype("int4"), adapter_only)]


@pytest.mark.parametrize(
    ("first", "zeroth", "limit", "method", "part"),
    [
        (2e9, 1e9, 2e9, "dp-lora", "dp-lora needs 2 GB, dpzero 1 GB, and it has 2 GB"),
        (2e9 + 1, 1e9, 2e9, "dpzero", "gradients do not fit"),
        (2e9, 1.5e9, 1e9, "dpzero", "and losses may not either"),
        (3e6, 1e6, None, "dpzero", "dp-lora needs 3 MB, dpzero 1 MB, and it does not"),
    ],
)
def test_what_auto_says(
    first: float, zeroth: float, limit: float | None, method: str, part: str
) -> None:
    most = None if limit is None else int(limit)
    found = finetune_method.choice(int(first), int(zeroth), most, "it")
    assert found.method == method and part in found.reason
    bytes_here, _ = finetune_method.limit()
    assert bytes_here is None or bytes_here > 2**24


@pytest.mark.parametrize("task", ["prompt", "head", "choice"])
@pytest.mark.parametrize("wrong", [{"text": ["a film"]}, {"label": "none"}])
def test_records_of_which_none_counts_are_refused(
    task: str, wrong: Any, home: Path, tmp_path: Path
) -> None:
    path, made = tmp_path / "train.jsonl", records(20, 0)
    path.write_text("".join(json.dumps(each | wrong) + "\n" for each in made))
    words: Any = {"label_words": None, "labels": ("0", "1")} if task == "head" else {}
    asked = {"task": task, "train": str(path), "template": "{text} it was"}
    if task == "prompt":
        asked["template"] = TEMPLATE
    if task == "choice":
        asked["model"] = str(home / "opt")
    command = dataclasses.replace(prompt_command(home), **asked | words)
    with pytest.raises(
        UsageError, match=r"^--train: one record or more must have a text and"
    ):
        finetune_prepare.prepare(command)


GRADIENTS = (*PROMPT, *NUMBERS, "--sampling", "full", "--method", "dp-lora")


@pytest.mark.parametrize(("optimizer", "other"), [(None, "adamw"), ("adamw", "sgd")])
def test_gradients_of_lora_are_taken_on_record_and_go_on(
    optimizer: str | None,
    other: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Killed while it is judged: a run of gradients goes on from its checkpoint."""
    said = ("finetune", *files(home, "roberta"), *GRADIENTS, "--lora-rank", 2)
    said = said if optimizer is None else (*said, "--optimizer", optimizer)
    said = (*said, "--seed", 5, "--out")
    want, out = tmp_path / "want", tmp_path / "run"
    assert run(*said, want) == 0
    assert capsys.readouterr().err == ""
    report = reported(want)
    assert (report["algorithm"], report["method"]) == ("dpgd", "dp-lora")
    assert report["trainable"] == "lora" and report["steps_done"] == STEPS
    assert {"num_steps", "l2_clip_norm", "learning_rate"} <= set(report["recipe"])
    assert not set(finetune_options.OF_SLOPES) & set(report["recipe"])
    plan = plans.from_json((want / "plan.json").read_text())
    assert isinstance(plan, plans.DPGD)
    assert report["epsilon"] == float(plan.epsilon()) == pytest.approx(2, rel=1e-2)
    assert weights(want / "model").items() >= weights(home / "roberta").items()
    drawn = dict(np.load(want / "initial.npz"))
    assert report["num_trainable"] == sum(x.size for x in drawn.values())
    _, tuned = checkpoint.load(want / "model")
    for path, leaf in drawn.items():
        assert np.any(np.asarray(language.flat(tuned)[path]) != leaf)
    check_plot(want / "releases.png")
    note = ledger_lib.read(want).header["note"]["command"]
    assert note["method"] == "dp-lora" and note["l2_clip_norm"] == plan.l2_clip_norm
    was = optimizer or "sgd"
    assert note["optimizer"] == report["recipe"]["optimizer"] == was
    assert note["smoothing_radius"] is note["num_directions"] is None

    judged, calls = tasks.predict, iter(range(9))

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return judged(*args, **kwargs)

    monkeypatch.setattr(tasks, "predict", killed)
    assert run(*said, out) == 130
    monkeypatch.undo()
    again = ("finetune", "--resume", "--out", out, "--quiet")
    assert run(*again, "--method", "dpzero") == 2
    part = "--method must be left out with --resume or be as it was, dp-lora"
    assert part in capsys.readouterr().err
    assert run(*again, "--optimizer", other) == 2
    part = f"--optimizer must be left out with --resume or be as it was, {was}; got"
    assert part in capsys.readouterr().err
    assert run(*again, "--method", "auto") == 0  # Which is what it was.
    assert weights(out / "model") == weights(want / "model")
    assert run("replay", want) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "FOLDER: " in line


@pytest.mark.slow  # Three processes that import and compile, for two runs or more each.
def test_processes_that_share_a_model_end_as_one_does(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    """Four devices of one process, and two of each of two: the same files, to the bit."""
    same = ("finetune", *files(home, "roberta"), *QUICK, "--seed", 1)
    head = ("--task", "head", "--labels", 2, "--lora-rank", 2)
    runs = {
        "prompt": (*same, *PROMPT, "--mesh", "model=2,data=2"),
        # An adapter, and a head of which a kernel is split; both are drawn.
        "lora": (*same, *head, "--trainable", "lora", "--mesh", "data=2,model=2"),
        # What moves is whole in both, and in the checkpoints.
        "gradients": (
            *("finetune", *files(home, "roberta"), *NUMBERS, "--sampling", "full"),
            *("--seed", 1, *head, "--method", "dp-lora", "--mesh", "data=2,model=2"),
        ),
        # Integers that are split, beside an adapter that is whole.
        "int8": (
            *(*same, *PROMPT, "--quantised", "int8", "--lora-rank", 2),
            *("--mesh", "data=2,model=2"),
        ),
    }
    runs["int8 gradients"] = (
        *(*runs["gradients"], "--quantised", "int8", "--dtype", "bfloat16"),
    )
    given = json.dumps({name: [*map(str, words)] for name, words in runs.items()})
    one = tmp_path / "one"
    script = "import sys; from tests.training.two_processes import tuned; "
    script += "print(tuned(*sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, one, given],
        env=test_parallel.environment(4),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    first, second = test_parallel.results("tuned", tmp_path / "two", given, timeout=900)
    times = {"compile_seconds", "train_seconds", "steps_per_second"}
    for name in runs:
        assert first[name] == second[name] == [0, ""], done.stderr
        folders = [root / name for root in (one, tmp_path / "two")]
        reports = [reported(folder) for folder in folders]
        assert reports[0].keys() == reports[1].keys()
        for field, value in reports[0].items():
            assert field in times or reports[1][field] == value
        found = [weights(folder / "model") for folder in folders]
        assert found[0] == found[1] != weights(home / "roberta")
        kept = [{p.name for p in folder.iterdir()} for folder in folders]
        assert (
            kept[0]
            == kept[1]
            == WRITTEN - ({"initial.npz"} if name == "prompt" else set())
        )
        # Whoever has the model whole replays the run.
        if "dp-lora" not in runs[name]:
            assert replayed(folders[1], capsys)["compared"].startswith("identical")
    for name in ("prompt", "gradients"):
        stopped, resumed = f"stopped {name}", f"resumed {name}"
        assert first[stopped][0] == second[stopped][0] == 75
        assert "stopped by another process after step 2 of 6" in first[stopped][1]
        assert "stopped by SIGTERM after step 2 of 6" in second[stopped][1]
        assert first[resumed] == second[resumed] == [0, ""]
        out, whole = tmp_path / "two" / stopped, tmp_path / "two" / name
        assert weights(out / "model") == weights(whole / "model")
        assert ledger_lib.read(out).charged == STEPS
    full = "[Errno 28] full"
    refused = f"process 0 of the run refused: {full}"
    assert first["full"] == first["unrecorded"] == [f"OSError: {full}", ""]
    assert second["full"] == [2, f"jaxdp: {refused}\n"]
    assert second["unrecorded"] == [f"Refused: {refused}", ""]
    for name, what in (("other mesh", "options"), ("other eval", "eval")):
        for end in (first, second):
            assert end[name][0] == 2
            assert f"{what} must be the same in all 2 processes" in end[name][1]
        assert not (tmp_path / "two" / name).exists()


@pytest.mark.slow  # Three runs; a resumed method is in test_conformance.py.
def test_resumed_run_ends_as_if_undisturbed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Killed while it is judged, and at a record that is half written."""
    words = (
        "--task",
        "head",
        "--labels",
        2,
        *QUICK,
        "--seed",
        5,
        "--trainable",
        "head",
    )
    said = ("finetune", *files(home, "roberta"), *words)
    want, out = tmp_path / "want", tmp_path / "run"
    assert run(*said, "--out", want) == 0
    judged = tasks.predict
    calls = iter(range(9))

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:  # After the first, the one before training, and step 2's.
            raise KeyboardInterrupt
        return judged(*args, **kwargs)

    monkeypatch.setattr(tasks, "predict", killed)
    assert run(*said, "--out", out) == 130
    monkeypatch.undo()
    assert {p.name for p in out.iterdir()} == {
        *("plan.json", "ledger.jsonl", "initial.npz", "secret")
    }
    few = tmp_path / "few.jsonl"
    lines = (home / "train.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:9]))
    again = ("finetune", "--resume", "--out", out, "--quiet")
    for wrong, part in (
        (("--num-steps", 7), "--num-steps must be left out with --resume or be as it"),
        (("--train", few), "num_examples = 20"),
        (("--model", home / "opt"), "--model must be the folder of the run's model"),
    ):
        assert run(*again, *wrong) == 2
        assert part in capsys.readouterr().err
    ledger = out / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b'{"intent":[4')
    other = tmp_path / "other"  # A version with an option that this one lacks.
    other.mkdir()
    note = b'"command": {"later_option": 1, '
    newer = ledger.read_bytes().replace(b'"command": {', note, 1)
    assert note in newer
    (other / "ledger.jsonl").write_bytes(newer)
    # Its chain would be that of its own version.
    monkeypatch.setattr("jaxdp.training.ledger.verify", ledger_lib.read)
    for words in (("replay", other), ("finetune", "--resume", "--out", other)):
        assert run(*words) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "--later-option" in line
    monkeypatch.undo()
    # Files may have moved: what is in them counts.
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((home / "train.jsonl").read_bytes())
    assert run(*again, "--train", moved) == 0
    assert weights(out / "model") == weights(want / "model")
    assert {p.name for p in out.iterdir()} == WRITTEN
    times = {"compile_seconds", "train_seconds", "steps_per_second", "dataset"}
    for name, value in reported(want).items():
        assert name in times or reported(out)[name] == value
    card = out / "model" / "README.md"
    assert run("report", out, "--format", "card") == 0
    assert capsys.readouterr().out == card.read_text()
    assert run("train", "--resume", "--out", out) == 2
    assert "must be a folder that jaxdp train wrote" in capsys.readouterr().err
    # What somebody added to the card stays in this run, and goes with it.
    card.write_text("edited")
    before = (out / "report.json").read_bytes()
    # The command as it was, with the number of labels.
    assert run(*said, "--out", out, "--resume", "auto") == 0
    assert card.read_text() == "edited"
    # The file was moved: the report would have another name, and the card another digest.
    assert run(*again, "--train", home / "train.jsonl") == 0
    assert (out / "report.json").read_bytes() == before
    assert b'"dataset": "moved"' in before
    assert run(*said, "--out", out, "--overwrite") == 0
    assert run("report", out, "--format", "card") == 0
    assert capsys.readouterr().out == card.read_text()


def test_a_run_is_judged_on_the_records_that_it_began_with(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    """Whether it ended or not; else its report would be of others than its card."""
    given = (*files(home, "roberta"), "--task", "head", "--labels", 2)
    words = (*QUICK, "--seed", 5, "--trainable", "head", "--out", tmp_path / "run")
    assert run("finetune", *given, *words, "--num-steps", 2) == 0
    out = tmp_path / "run"
    shown = sorted(p for p in out.rglob("*") if p.is_file() and "secret" not in p.parts)
    before = {path: path.read_bytes() for path in shown}
    again = ("finetune", "--resume", "--out", out, "--quiet")
    few, exchanged = tmp_path / "few.jsonl", tmp_path / "exchanged.jsonl"
    lines = (home / "eval.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[1:]))
    made = "".join(json.dumps(each) + "\n" for each in records(20, 7))
    exchanged.write_text(made)
    for other in (
        ("--eval", few),
        # The private records, beside others of which nothing would be computed.
        ("--train", exchanged, "--eval", home / "train.jsonl"),
    ):
        capsys.readouterr()
        assert run(*again, *other) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert "--eval must be left out with --resume or hold the records" in line
    moved = tmp_path / "moved.jsonl"
    moved.write_text("".join(lines))
    assert run(*again, "--eval", moved) == 0
    for path, content in before.items():
        assert path.suffix == ".png" or path.read_bytes() == content
    assert run("report", out, "--format", "card") == 0
    assert (out / "model" / "README.md").read_text() == capsys.readouterr().out


def test_the_report_of_a_run_that_had_ended_is_told_by_its_fields(
    tmp_path: Path,
) -> None:
    job: Any = types.SimpleNamespace(
        out=tmp_path, command=types.SimpleNamespace(resume=True)
    )
    assert finetune._ended(job) is None
    for content, stays in (
        (b'{"dataset": "moved", "num_test_examples": 4}', True),
        (b'{"note": "zero_shot_accuracy", "zero_shot_": 1}', False),  # The loop's.
        (b'"num_test_examples"', False),
        (b'{"num_test_examples": ', False),
        (b"[[]]", False),
    ):
        (tmp_path / "report.json").write_bytes(content)
        assert finetune._ended(job) == (content if stays else None)


def test_radius_that_is_lost_in_16_bits_is_said(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def started(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "fit", started)
    small = ("--compute-dtype", "bfloat16", "--smoothing-radius", 1e-5)
    words = (*files(home, "roberta"), *PROMPT, *QUICK, *small, "--out", tmp_path)
    assert run("finetune", *words) == 130
    said, *more = capsys.readouterr().err.splitlines()
    assert said.startswith("jaxdp: warning: --smoothing-radius 1e-05 is below")
    assert "bfloat16" in said
    assert more == ["jaxdp: interrupted"]


@pytest.mark.slow  # Two programs, as of other runs here.
def test_parameters_of_16_bits_are_tuned_saved_and_replayed(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    """All but the adapter, which is float32: what stands in the record and the files."""
    out = tmp_path / "run"
    words = ("--dtype", "bfloat16", "--trainable", "lora", "--out", out)
    assert run("finetune", *files(home, "roberta"), *PROMPT, *QUICK, *words) == 0
    assert replayed(out, capsys)["compared"] == "identical to model, to the bit"
    _, found = checkpoint.load(out / language.MODEL, dtype="bfloat16")
    _, stored = checkpoint.load(home / "roberta", dtype="bfloat16")
    for name in ("tokens", "positions"):  # Frozen.
        one, other = (p["embedding"][name] for p in (found, stored))
        np.testing.assert_array_equal(one, other)
    header = ledger_lib.read(out).header["leaves"]
    assert header["layers/lora/query/b"][1] == "float32"
    assert header["embedding/tokens"][1] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (
            (*PROMPT, "--quantised", "int8", "--lora-rank", 2, *QUICK),
            {"adapter_config.json", "adapter_model.safetensors"},
        ),
        pytest.param(
            (
                *("--task", "head", "--labels", 2, "--method", "dp-lora", *NUMBERS),
                *("--quantised", "int4", "--sampling", "full", "--dtype", "bfloat16"),
            ),
            {"adapter_config.json", "adapter_model.safetensors"},
            marks=pytest.mark.slow,  # A run, as of other tasks.
        ),
        pytest.param(
            (
                *("--task", "head", "--labels", 2, "--quantised", "int8", *QUICK),
                *("--trainable", "prefix"),
            ),
            {"adapters.safetensors"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*HEAD_RUN, "--quantised", "int8"),
            {"adapters.safetensors"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lora", "lora and head", "prefix and head", "head"],
)  # The first is in the fast lane, where no other command has integers.
def test_a_base_of_integers_stays_and_its_adapter_is_saved_alone(
    words: tuple[Any, ...], written: set[str], home: Path, tmp_path: Path, capsys: Any
) -> None:
    out, base = tmp_path / "run", str(home / "roberta")
    said = ("finetune", *files(home, "roberta"), *words, "--seed", 1, "--out", out)
    assert run(*said) == 0
    assert capsys.readouterr().err == ""
    tuned = out / "model"
    assert {p.name for p in tuned.iterdir()} == written | {
        "README.md",
        "tokenizer.json",
    }
    assert checkpoint.base_of(tuned) == base
    dtype = words[words.index("--quantised") + 1]
    assert ledger_lib.read(out).header["note"]["command"]["quantised"] == dtype

    # The folder is the model: of its base's weights, rounded, and what was tuned.
    narrow = "bfloat16" if "bfloat16" in words else "float32"
    labels = 2 if "head" in words else None
    given: dict[str, Any] = {"num_labels": labels, "dtype": narrow}
    config, params = checkpoint.load(tuned, quantised=dtype, **given)
    new = None if labels is None else jax.random.key(0)
    _, before = checkpoint.load(base, quantised=dtype, new_heads=new, **given)
    flat, was = language.flat(params), language.flat(before)
    kernel = flat["layers/attention/query/kernel"]
    assert kernel.dtype == dtype and kernel.shape == (2, 8, 8)
    for path, leaf in was.items():
        if not adapter_only(path):
            np.testing.assert_array_equal(leaf, flat[path])
    moved = np.load(out / "initial.npz")
    assert {*moved} == {path for path in flat if adapter_only(path)}
    for path in moved:
        assert np.any(moved[path] != flat[path])
    adapter = checkpoint.read_adapter(tuned)
    model = LanguageModel(config=config, adapter=adapter, num_labels=labels)
    tokenizer = text.Tokenizer.load(tuned)
    template = "{text}" if labels else TEMPLATE
    public = text.read_records(home / "eval.jsonl")
    batch = text.encode_classification(
        tokenizer, public, max_length=16, template=template
    )
    task = (
        tasks.head(model)
        if labels
        else tasks.prompt(model, tokenizer.label_words(["bad", "good"]))
    )
    right = [each["label"] for each in public]
    found = tasks.accuracy(tasks.predict(task, params, batch), right)
    assert reported(out)["test_accuracy"] == found

    if "dp-lora" not in words:
        assert replayed(out, capsys)["compared"] == "identical to model, to the bit"
        assert weights(out / "replayed") == weights(tuned)
    other = ("--quantised", "int4" if dtype == "int8" else "int8")
    assert run("finetune", "--resume", "--out", out, *other) == 2
    part = f"--quantised must be left out with --resume or be as it was, {dtype}"
    assert part in capsys.readouterr().err


@pytest.mark.slow  # Two runs, as of the other tasks.
def test_texts_are_generated_by_a_base_of_integers_and_the_adapter_goes_on(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    said = ("--task", "generation", "--template", "{text} It was", "--span-length", 4)
    said = (*said, *QUICK, "--quantised", "int8", "--seed", 1)
    one, two = tmp_path / "one", tmp_path / "two"
    assert run("finetune", *files(home, "opt"), *said, "--out", one) == 0
    assert 0 <= reported(one)["test_token_f1"] <= 1 < reported(one)["test_perplexity"]
    assert replayed(one, capsys)["compared"] == "identical to model, to the bit"
    # Another run takes up the adapter; its base is still the first folder.
    again = ("--model", one / "model", *files(home, "opt")[2:], *said, "--out", two)
    assert run("finetune", *again) == 0
    assert checkpoint.base_of(two / "model") == str(home / "opt")
    for name, leaf in np.load(two / "initial.npz").items():
        _, tuned = checkpoint.load(one / "model")
        np.testing.assert_array_equal(leaf, language.flat(tuned)[name])


def test_an_adapter_beside_its_weights_has_no_base_to_name(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    config, params = checkpoint.load(home / "roberta")
    adapter = LoRA(rank=2)
    model = LanguageModel(config=config, adapter=adapter)
    params = model.with_new_parts(params, jax.random.key(0))
    checkpoint.save(tmp_path / "both", config, params, adapter=adapter)
    shutil.copy(home / "roberta" / "tokenizer.json", tmp_path / "both")
    given = ("--model", tmp_path / "both", *files(home, "roberta")[2:], *PROMPT)
    given = (*given, *QUICK, "--quantised", "int8", "--out", tmp_path / "run")
    assert run("finetune", *given) == 2
    part = "--model must have no adapter beside its weights with --quantised"
    assert part in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_choice_of_label_words_in_a_table(home: Path, tmp_path: Path) -> None:
    command = options.Finetune(
        **{name: str(home / f"{name}.tsv") for name in ("train", "eval")},
        model=str(home / "opt"),
        task="choice",
        template="{text} It was",
        label_words=("good", "bad"),
        labels=("good", "bad"),
        label_field="name",
        max_length=16,
        sampling="full",
        seed=1,
        out=tmp_path,
    )
    job = finetune_prepare.prepare(command)
    want = [each["label"] == 0 for each in records(20, 0, SECRET)]
    np.testing.assert_array_equal(job.train["label"], want)
    assert job.train["tokens"].shape == (20, 2, 16)
    assert job.command.span_length == job.train["span"].sum(axis=2).max() == 1
    metrics = job.judge.fn(job.params)
    assert set(metrics) == {"test_accuracy", "test_macro_f1"}
    assert not any(tmp_path.iterdir())


def test_span_after_a_new_line_is_that_of_the_word_alone(home: Path) -> None:
    """Without a space: "good" is of more tokens than " good"."""
    command = options.Finetune(
        **{name: str(home / f"{name}.tsv") for name in ("train", "eval")},
        model=str(home / "opt"),
        task="choice",
        template="{text}\n",
        label_words=("bad", "good"),
        labels=("bad", "good"),
        label_field="name",
    )
    tokenizer = text.Tokenizer.load(command.model)
    command = finetune_options.completed(command)
    model = language.model_of(command, command.model)
    command, _ = finetune_prepare._task(command, model, tokenizer)
    assert len(tokenizer.encode(" good")) < len(tokenizer.encode("good"))
    assert command.span_length == len(tokenizer.encode("good"))


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ({}, sampling.FullBatch()),  # 64 are more than there are.
        ({"batch_size": 5}, sampling.TruncatedPoisson(sampling_prob=0.25)),
        ({"batch_size": 5, "sampling": "fixed-size"}, sampling.FixedSize(5)),
        ({"batch_size": 20, "sampling": "fixed-size"}, sampling.FullBatch()),
        ({"sampling": "full"}, sampling.FullBatch()),
    ],
)
def test_sampling(
    words: dict[str, Any], want: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*args: Any, sampling: Any, **kwargs: Any) -> Any:
        return sampling

    monkeypatch.setattr(recipes, "make_plan", asked)  # Whose accountant takes seconds.
    command = finetune_options.with_batch_size(
        complete(task="head", labels=2, num_steps=3, **words), 20
    )
    recipe = finetune_prepare.recipe_of(command)
    assert finetune_prepare.plan_of(command, recipe, 20) == want


# --- options -----------------------------------------------------------------------


def complete(**given: Any) -> options.Finetune:
    names = {"model": "m", "train": "t", "eval": "e"} | given
    return finetune_options.completed(options.Finetune(**names))


@pytest.mark.parametrize("name", finetune_options.RECIPES)
def test_recipe_sets_options(name: str) -> None:
    said = finetune_options.RECIPES[name]
    assert {"task", "template", "num_steps", "l2_clip_norm", "direction"} <= set(said)
    got = complete(recipe=name)
    for field, value in said.items():
        assert field == "batch_size" or getattr(got, field) == value
    sizes = [finetune_options.with_batch_size(got, n).batch_size for n in (1000, 5)]
    assert sizes == [said["batch_size"], 5]
    given = complete(recipe=name, num_steps=3, trainable="lora", template="{x} {mask}")
    assert (given.num_steps, given.template) == (3, "{x} {mask}")
    assert (given.learning_rate, given.smoothing_radius) == (5e-5, 1e-2)


def test_what_is_completed_stays_as_it_is() -> None:
    for given in (
        {"recipe": "opt-1.3b/squad"},
        {"task": "head", "labels": 3, "trainable": "head"},
        {"task": "prompt", "template": "{a} {mask}", "label_words": ("no", "yes")},
    ):
        once = complete(**given)
        assert finetune_options.completed(once) == once
        finetune_options.check_numbers(once)
    assert complete(task="head", labels=3).labels == ("0", "1", "2")
    assert complete(task="head", labels=3, num_steps=7).eval_every == 1
    listed = {"choices_field": "c", "num_choices": 3}
    given = complete(recipe="opt-1.3b/boolq", **listed)
    assert (given.label_words, given.span_length) == (None, None)
    with pytest.raises(UsageError, match="--choices-field is for --task choice only"):
        complete(recipe="opt-1.3b/squad", **listed)
    with pytest.raises(UsageError, match="--recipe must be one of roberta-large/sst-2"):
        complete(recipe="bert")
    with pytest.raises(UsageError, match="--task must be left out with --recipe"):
        complete(recipe="roberta-large/rte", task="head")


def test_dtypes_are_the_model_s() -> None:
    assert typing.get_args(network.ComputeDtype) == options.COMPUTE_DTYPES
    assert checkpoint.DTYPES == options.DTYPES
    assert checkpoint.INTEGERS == options.INTEGERS


WRONG = mistakes("finetune_mistakes.txt")


@pytest.fixture(scope="module")
def folder(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good files and bad ones, to stand in."""
    root = tmp_path_factory.mktemp("wrong")
    for name in ("roberta", "opt", "train.jsonl", "eval.jsonl"):
        (root / name).symlink_to(home / name)
    (root / "linked.jsonl").symlink_to(home / "train.jsonl")
    for name in ("copied.csv", "copy.csv"):
        (root / name).write_text("text,label\na,0\nb,1\n")
    (root / "turned.csv").write_text("text,label\nb,1\na,0\n")
    (root / "secret.csv").write_text("text,label\na,0\nb,ill\n")
    rows = [
        f"{a}{b} film,{i % 2}"
        for i, (a, b) in enumerate(zip("abcdefghi", "ihgfedcba", strict=True))
    ]
    (root / "wide.csv").write_text("\n".join(["text,label", *rows]))
    (root / "longer.csv").write_text("\n".join(["text,label", *rows[::-1], "new,1"]))
    (root / "bad.jsonl").write_text('{"text": "a", "label": 0}\n{"text"\n')
    (root / "eval.txt").write_text("text\n")
    (root / "model").symlink_to(home / "roberta")
    for name in ("bare", "pickled"):
        (root / name).mkdir()
        config = (home / "roberta" / "config.json").read_bytes()
        (root / name / "config.json").write_bytes(config)
    words = (home / "roberta" / "tokenizer.json").read_bytes()
    (root / "pickled" / "tokenizer.json").write_bytes(words)
    (root / "pickled" / "pytorch_model.bin").write_bytes(b"")
    # A tokenizer of more tokens than the model has, and weights that are integers.
    shutil.copytree(home / "roberta", root / "foreign")
    name = str(root / "foreign" / "tokenizer.json")
    foreign = tokenizers.Tokenizer.from_file(name)
    foreign.add_tokens([f"<{i}>" for i in range(300)])
    foreign.save(name)
    shutil.copytree(home / "roberta", root / "integers")
    (weights,) = (root / "integers").glob("*.safetensors")
    tensors = safetensors.load_file(weights)
    first = min(name for name in tensors if name.endswith("query.weight"))
    tensors[first] = tensors[first].astype(np.int8)
    safetensors.save_file(tensors, weights)
    return root


@pytest.mark.parametrize(("words", "parts"), WRONG, ids=[w for w, _ in WRONG])
def test_wrong_argument_gives_one_line(
    words: str,
    parts: list[str],
    folder: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was spent")

    monkeypatch.setattr(training, "fit", never)
    monkeypatch.chdir(folder)
    before = sorted(p.name for p in folder.rglob("*"))
    given = words.split()
    default = {"--model": "roberta", "--train": "train.jsonl", "--eval": "eval.jsonl"}
    if "--resume" not in given:
        default |= {"--num-steps": "9"} if "--num-steps" not in given else {}
        for name, value in default.items():
            given += [name, value] if name not in given else []
    assert main(["finetune", *given]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("jaxdp: ")
    assert shown.err.count("\n") == 1
    for part in parts:
        assert part in shown.err
    assert sorted(p.name for p in folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["model", "train", "eval"])
def test_what_must_be_given(name: str, capsys: Any) -> None:
    given = {"--model": "m", "--train": "t.csv", "--eval": "e.csv"}
    del given[f"--{name}"]
    words = [word for pair in given.items() for word in pair]
    assert main(["finetune", *words, "--task", "head", "--labels", "2"]) == 2
    assert capsys.readouterr().err == f"jaxdp: --{name} must be a path, got nothing\n"


@pytest.mark.slow  # Two commands' runs, for refusals of paths.
def test_replay_writes_over_nothing_of_the_run(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    said = ("finetune", *files(home, "roberta"), *HEAD_RUN, "--seed", 1)
    tuned, trained = tmp_path / "tuned", tmp_path / "trained"
    assert run(*said, "--out", tuned) == 0
    quick = ("--dataset", "quadratic_identity", "--num-steps", 2, "--quiet")
    assert run("train", *quick, "--seed", 1, "--out", trained) == 0
    (tmp_path / "mine").mkdir()
    for name in ("mine/file", "file"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "empty").mkdir()
    content = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for folder, out, part in (
        (tuned, tuned / "model", "another than the run's own"),
        (tuned, tmp_path / "mine", "a new or empty folder or"),
        (tuned, tuned, "a new or empty folder or"),
        (trained, trained / "params.npz", "another than the run's own"),
        (trained, trained / "initial.npz", "a new file or"),
        (trained, tmp_path / "file", "a new file or"),
    ):
        assert run("replay", folder, "--out", out) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and f"--out must be {part}" in line
    assert content == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert run("replay", tuned, "--out", tmp_path / "empty") == 0
    for _ in range(2):  # What a replay wrote may be written again.
        for folder in (tuned, trained):
            assert "identical" in replayed(folder, capsys)["compared"]


def test_without_the_extra(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert run("finetune", *files(home, "roberta"), *PROMPT) == 2
    said = "jaxdp: language models need the package tokenizers: pip install "
    assert capsys.readouterr().err == f"{said}'jaxdp-optim[lm]'\n"


@pytest.mark.slow  # One more run; folders are as in test_cli.py.
def test_overwrite_takes_a_run_s_model_and_nothing_else(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ("finetune", *files(home, "roberta"), *HEAD_RUN, "--out", tmp_path)
    assert run(*said, "--seed", 1) == 0
    mine = tmp_path / "model" / "mine.txt"
    mine.write_text("mine")
    assert run(*said, "--seed", 2) == 2

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "fit", interrupted)
    assert run(*said, "--seed", 2, "--overwrite") == 130
    left = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"plan.json", "initial.npz", "lock", "mine.txt"}
