"""Options in a file: ``--config`` of every command, and its errors."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxdp.cli import main, options, parsing

MISTAKES = {
    'epsilom = "2"': "unknown key 'epsilom'; did you mean 'epsilon'?",
    "epsilon = 'two'": "--epsilon must be a number, got 'two'",
    "epsilon = true": "epsilon must be a number, a text or a list of them, got True",
    "epsilon = ": "the file is no TOML: Invalid value",
    "quiet = 1": "quiet must be true or false, got 1",
    "num-steps = 3\nnum_steps = 3": "key 'num_steps' is given twice",
    "[train]\nepsilon = 2": "unknown key 'train'",
    "when = 2026-01-01": "unknown key 'when'",
    "label = 2026-01-01": "label must be a number, a text or a list",
    "classes = ['a,b', 'c']": "classes must have no comma within a part, got 'a,b'",
    "config = 'other.toml'": "unknown key 'config'",
}


def read(kind: type, text: str, tmp_path: Path, *words: str) -> Any:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    given = [*words, "--config", str(path)]
    return parsing.parse(kind, given, "jaxdp test", "", aside=("algorithm",))


def test_a_file_gives_the_options_of_a_command_line(tmp_path: Path) -> None:
    text = (
        "dataset = 'wine'\nnum-steps = 40\nepsilon = 3\nlearning_rate = 0.5\n"
        "bounds = [-1, 1.5]\nhidden = [8, 4]\nmodel = 'mlp'\nquiet = true\n"
        "json = false\nprogress = false\n"
    )
    words = [
        *("--dataset", "wine", "--num-steps", "40", "--epsilon", "3", "--quiet"),
        *("--learning-rate", ".5", "--bounds", "-1,1.5", "--hidden", "8,4"),
        *("--model", "mlp", "--no-progress"),
    ]
    found = read(options.DPZero, text, tmp_path)
    assert found == parsing.parse(options.DPZero, words, "jaxdp test", "")
    assert not hasattr(found, "config")
    assert {"epsilon", "progress"} <= found.given
    assert "delta" not in found.given


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    text = "epsilon = 3\ndelta = 1e-6\nprogress = false\n"
    words = ("--epsilon", "4", "--progress")
    found = read(options.DPZero, text, tmp_path, *words)
    assert (found.epsilon, found.delta, found.progress) == (4.0, 1e-6, True)


def test_a_pipe_is_read_once(tmp_path: Path, capsys: Any) -> None:
    """``train`` looks for the algorithm in the file before it reads the options."""
    ends = os.pipe()
    os.write(ends[1], b'algorithm = "dpgd"\ndataset = "wine"\nepsilon = "two"\n')
    os.close(ends[1])
    assert main(["train", "--config", f"/dev/fd/{ends[0]}"]) == 2
    os.close(ends[0])
    assert "--epsilon must be a number, got 'two'" in capsys.readouterr().err


def test_one_file(tmp_path: Path) -> None:
    with pytest.raises(parsing.UsageError, match="--config must be given once"):
        read(options.DPZero, "epsilon = 3", tmp_path, "--config", "other.toml")


def test_a_switch_of_the_file_is_given_and_can_be_turned_off(tmp_path: Path) -> None:
    text = "keep_noise_roots = true\noverwrite = false\n"
    found = read(options.DPZero, text, tmp_path, "--no-keep-noise-roots")
    assert (found.keep_noise_roots, found.overwrite) == (False, False)
    assert {"keep_noise_roots", "overwrite"} <= found.given


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_names_the_file_and_the_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(parsing.UsageError) as caught:
        read(options.DPZero, text, tmp_path)
    assert MISTAKES[text] in str(caught.value)
    assert str(caught.value).startswith(f"--config {str(tmp_path / 'run.toml')!r}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [*options.COMMANDS.values(), options.DPZero])
def test_every_command_has_it(kind: type, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parsing.parse(kind, ["--help"], "jaxdp", "")
    out = capsys.readouterr().out
    assert "--config FILE" in out and "--json" in out


def test_a_required_option_may_be_in_the_file(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text("epsilon = 2\nnum-steps = 10\njson = true\n", encoding="utf-8")
    assert main(["calibrate", "--config", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 10


def test_the_file_may_name_the_algorithm(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text("algorithm = 'sosp'\nrank = 0\n", encoding="utf-8")
    given = ["--config", str(path)]
    assert main(["train", *given]) == 2
    assert "--rank must be an integer >= 1" in capsys.readouterr().err
    assert main(["train", "dpzero", *given]) == 2
    assert "unknown key 'rank'; jaxdp train dpzero --help" in capsys.readouterr().err
    path.write_text("algorithm = ['sosp']\n", encoding="utf-8")
    assert main(["train", *given]) == 2
    assert "--algorithm must be one of dpzero" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--config"], ["--config", "no.toml"]])
def test_a_file_that_is_not_there(words: list[str], capsys: Any) -> None:
    assert main(["epsilon", *words]) == 2
    assert capsys.readouterr().err.startswith("jaxdp: --config")


def test_the_overview_mentions_it(capsys: Any) -> None:
    assert main(["--help"]) == 0
    assert "--config FILE.toml" in capsys.readouterr().out
