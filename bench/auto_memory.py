"""Memory that ``jaxdp finetune --method auto`` predicts, beside what the runs then need.

Each method tunes a decoder like Llama, of 84 M parameters, in a process of its own, which
loads it from a folder and writes the tuned model. Of the peak of that process, that of the
same command with a model of width 8 is taken off: an interpreter, JAX and its
compiler, which the prediction does not count. Where the ratio is above one, the prediction
is on the safe side; below one, ``auto`` could take a method that the machine cannot hold.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from bench import _harness, lm_step
from jaxdp.cli import main
from jaxdp.models import language
from jaxdp.models.language import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[1]
METHODS = ("dp-lora", "dpzero")
VOCABULARY, RECORDS = 8192, 64
#: Width, layers, heads, heads of keys, and width within a layer.
Size = tuple[int, int, int, int, int]
LARGE: Size = (640, 12, 10, 5, 2560)
QUICK: Size = (128, 12, 4, 2, 512)
NONE: Size = (8, 12, 2, 1, 8)


def run(quick: bool) -> list[_harness.Row]:
    """Returns rows of each method: what is predicted, what is needed, and their ratio."""
    if not pathlib.Path("/proc/self/status").exists():
        note = "skipped: needs /proc"
        return [_harness.Row(x, "peak memory", None, "MB", note=note) for x in METHODS]
    with tempfile.TemporaryDirectory() as name:
        home = pathlib.Path(name)
        count = write(home / "model", QUICK if quick else LARGE)
        write(home / "none", NONE)
        predicted = parse_prediction(call(home, "model", "auto")[1])
        rows = [_harness.Row("both methods", "parameters", count, "")]
        for method in METHODS[1:] if quick else METHODS:
            peak, none = (call(home, x, method)[0] for x in ("model", "none"))
            row = _harness.Row(
                method,
                "predicted",
                predicted[method],
                "MB",
                "needed",
                predicted[method] / (peak - none),
            )
            rows += [
                _harness.Row(method, "peak of a process", peak, "MB"),
                _harness.Row(method, "needed", peak - none, "MB"),
                row,
            ]
    return rows


def write(folder: pathlib.Path, size: Size) -> int:
    """Writes a random model, its tokenizer and records; counts the parameters."""
    import tokenizers

    config = lm_step.llama(*size, vocabulary=VOCABULARY)
    params: Any = language.LanguageModel(config=config).init(jax.random.key(0))
    checkpoint.save(folder, config, params)
    words = ["<unk>", "good", "bad", *(f"w{i}" for i in range(VOCABULARY - 3))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({x: i for i, x in enumerate(words)}, "<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    for first, name in enumerate(("train", "eval")):
        lines = (
            {"text": " ".join(f"w{i + j}" for j in range(60)), "label": i % 2}
            for i in range(first * RECORDS, (first + 1) * RECORDS)
        )
        text = "".join(json.dumps(x) + "\n" for x in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return sum(jnp.size(x) for x in jax.tree.leaves(params))


def call(home: pathlib.Path, model: str, method: str) -> tuple[float, str]:
    """Runs the command in a process; returns its peak in MB, and what it said."""
    given = (str(home), model, method)
    words = f"from bench import auto_memory; auto_memory.child(*{given!r})"
    made = subprocess.run(
        [sys.executable, "-c", words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return float(made.stdout.splitlines()[-1]), made.stderr


def parse_prediction(line: str) -> dict[str, float]:
    """Returns the MB of each method, of the line that ``auto`` prints."""
    found = re.findall(r"(dp-lora|dpzero) (?:needs )?([0-9.]+) (GB|MB)", line)
    return {x: float(size) * {"GB": 1000, "MB": 1}[unit] for x, size, unit in found}


def child(home: str, model: str, method: str) -> None:
    """Runs the command, and prints the peak of this process in MB."""
    folder = pathlib.Path(home) / model
    code = main(
        [
            "finetune",
            *("--model", str(folder), "--method", method, "--task", "prompt"),
            *("--train", str(folder / "train.jsonl")),
            *("--eval", str(folder / "eval.jsonl")),
            *("--template", "{text}", "--label-words", "bad,good"),
            *("--sampling", "full", "--num-steps", "3", "--max-length", "64"),
            *("--out", str(folder / method), "--seed", "0"),
        ]
    )
    assert code == 0, code
    print(_harness.peak_mebibytes() * 2**20 / 1e6)
