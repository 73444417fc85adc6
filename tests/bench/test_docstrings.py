"""The study of docstrings: what is read, what becomes a record, and what is asked."""

import collections
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from bench.docstrings import corpus, finetuning, pretraining
from jaxdp.models.language import LanguageModel

pytestmark = pytest.mark.slow

FAMILIES = {"mail": ("post", "letters"), "sound": ("audio",)}
VERBS = ("Reads", "Writes", "Opens", "Closes", "Sends", "Counts", "Sorts", "Merges")


def write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def module(noun: str, *more: str) -> str:
    """A module whose functions have docstrings of their own, and a line of code."""
    docs = [f"{verb} one {noun} after another." for verb in VERBS] + [*more]
    defs = [
        f'def f{i}():\n    """{doc}"""\n    return {i}' for i, doc in enumerate(docs)
    ]
    return "\n".join([f"ORIGIN = '{noun}'", *defs]) + "\n"


@pytest.fixture
def library(tmp_path: pathlib.Path) -> pathlib.Path:
    return write(
        tmp_path,
        {
            "post.py": module("letter", "Both families say exactly this."),
            "audio/wave.py": module("tone", "Both families say exactly this."),
            "other.py": "# Reads one letter, after another!\nx = 1\n",
        },
    )


def texts(found: corpus.Corpus) -> list[str]:
    return [record["text"] for record in found.train + found.eval]


def test_tests_and_installed_packages_are_not_read(tmp_path: pathlib.Path) -> None:
    kept = ["a.py", "email/b.py", "testing.py"]
    left = ["test/c.py", "email/tests/d.py", "site-packages/e.py", "config-3.11-x/f.py"]
    root = write(tmp_path, dict.fromkeys(kept + left, ""))
    found = [path.relative_to(root).as_posix() for path in corpus.files(root)]
    assert found == sorted(kept)


def test_docstrings_are_taken_out_of_the_source(tmp_path: pathlib.Path) -> None:
    text = '"""Of the module."""\nclass A:\n    """Of\n    A."""\n    x = "kept"\n'
    write(tmp_path, {"m.py": text, "broken.py": "def ("})
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (source,) = corpus.sources(tmp_path)
    assert source.docstrings == ("Of the module.", "Of\nA.")
    assert "Of" not in source.without_docstrings
    assert 'x = "kept"' in source.without_docstrings


def test_no_record_is_in_the_public_text(library: pathlib.Path) -> None:
    found = corpus.load(FAMILIES, library)
    # A comment of another module has the words of one: that one is dropped.
    assert "Reads one letter after another." not in texts(found)
    assert "Writes one letter after another." in texts(found)
    public = " ".join(found.public)
    assert not [text for text in texts(found) if text in public]
    assert "ORIGIN = 'letter'" in public  # code without its docstrings


def test_text_of_two_classes_is_no_record(library: pathlib.Path) -> None:
    assert "Both families say exactly this." not in texts(
        corpus.load(FAMILIES, library)
    )


def test_a_record_stands_once_and_classes_are_balanced(library: pathlib.Path) -> None:
    write(library, {"letters.py": module("LETTER")})  # the same, but for case
    found = corpus.load(FAMILIES, library)
    lower = [text.lower() for text in texts(found)]
    assert len(set(lower)) == len(lower)
    for records in (found.train, found.eval):
        sizes = collections.Counter(record["label"] for record in records)
        assert len(set(sizes.values())) == 1
        assert set(sizes) == set(FAMILIES)
    assert not set(map(str, found.train)) & set(map(str, found.eval))


def test_names_of_the_modules_are_taken_out(tmp_path: pathlib.Path) -> None:
    more = "Posts what Audio and post do, but not poster."
    root = write(tmp_path, {"post.py": module("x", more), "audio.py": module("y")})
    found = texts(corpus.load(FAMILIES, root))
    assert "Posts what and do, but not poster." in found
    assert more not in found


def test_a_class_without_records_is_refused(tmp_path: pathlib.Path) -> None:
    root = write(tmp_path, {"post.py": module("letter")})
    with pytest.raises(ValueError, match="sound: 0"):
        corpus.load(FAMILIES, root)


def test_every_module_has_one_class() -> None:
    for families in (corpus.FAMILIES, corpus.OTHER_FAMILIES):
        modules = [name for names in families.values() for name in names]
        assert len(set(modules)) == len(modules)
    # Gone from later Pythons, or there in all of them.
    assert {"email", "asyncio", "inspect", "json"} <= sys.stdlib_module_names


def test_windows_have_the_question_behind_them_then_a_word_and_the_end() -> None:
    text, question = np.arange(10, 110, dtype=np.int32), np.array([5, 6], np.int32)
    of = pretraining.Windows(
        text,
        begin=np.zeros(100, int),
        end=np.full(100, 100),
        words=text,
        share=np.full(110, 1 / 110),
        weight=np.ones(110),
        before=np.zeros(0, np.int32),
        after=question,
        config=pretraining.CONFIGS["decoder"],
    )
    found, end = pretraining.draw(of, np.random.default_rng(0)), 2
    for i in range(0, pretraining.BATCH_SIZE, 8):
        asked = int(found.asked[i, 0])
        row, length = found.tokens[i], asked - 1
        assert (np.diff(row[:length]) == 1).all()  # the window, as it stands
        assert row[length:].tolist()[:4] == [5, 6, found.near[i, 0], end]
        assert found.mask[i].sum() == length + 4
        near = found.near[i][found.near_weights[i] > 0]
        assert not set(near) & set(row[:length])
        ends = np.minimum(abs(near - row[0]), abs(near - row[length - 1]))
        assert (ends <= pretraining.NEAR).all()
        told = found.positions[i], found.targets[i], found.weights[i]
        for position, target, weight in zip(*told, strict=True):
            if weight:
                assert target == row[position + 1]
                assert position + 1 < length or target == end
    assert found.weights.sum() > pretraining.BATCH_SIZE


def test_an_answer_counts_where_it_matches(
    library: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, config = corpus.load(FAMILIES, library), pretraining.CONFIGS["decoder"]
    tokenizer = pretraining.train_tokenizer(found, config)
    model = LanguageModel(config=config)
    start = pretraining.Pretrained(model, model.init(jax.random.key(0)), tokenizer)
    of = finetuning.problem(found, start, "LoRA")
    answers = of.train["tokens"][of.train["span"]].reshape(-1, pretraining.SPAN)
    assert {tokenizer.decode(answer).strip() for answer in answers} == set(FAMILIES)
    assert (answers[:, -1] == config.ends[0]).all()
    # A model that is not trained writes something else.
    assert of.accuracy(of.params) == 0
    # One class in place of all answers is right for half of the records.
    always = np.tile(answers[:1], (len(found.eval), 1))
    monkeypatch.setattr(finetuning.generation, "generate", lambda *_, **__: always)
    assert of.accuracy(of.params) == 0.5


def test_kept_rows_are_those_that_were_asked_for() -> None:
    """The head learns what was asked of DPZero; LoRA and all parameters do not."""
    path = pathlib.Path("bench/results/cpu/docstrings.json")
    rows = json.loads(path.read_text())["rows"]
    found = {(row["case"], row["metric"]): row for row in rows}
    for budget in ("epsilon 2", "epsilon 6", "not private"):
        for case, methods in (
            ("classification", ("head", "LoRA", "all parameters")),
            ("instruction", ("LoRA",)),
        ):
            names = [*(f"DPZero, {name}" for name in methods), "DP-LoRA"]
            widths = [found[case, f"{x}, {budget}"]["half_width"] for x in names]
            assert all(width > 0 for width in widths)
    head = found["classification", "DPZero, head, epsilon 2"]
    assert head["value"] - head["half_width"] > 0.6
    for name in ("LoRA", "all parameters"):
        assert found["classification", f"DPZero, {name}, epsilon 2"]["value"] < 0.6
