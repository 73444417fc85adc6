"""What the README says works: its Python runs, its commands and files exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> dict[str, str]:
    """The fenced Python blocks of a Markdown text, by the line they start at."""
    return {
        f"line {text.count(chr(10), 0, block.start(1)) + 1}": block.group(1)
        for block in BLOCK.finditer(text)
    }


# Pages of docs/ are executed when the site is built.
BLOCKS = python_blocks(README)


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\n```console\nmake\n```\n```python\ny\n```\n"
    assert python_blocks(text) == {"line 3": "x = 1\n", "line 9": "y\n"}
    assert README.count("```python") == len(python_blocks(README))


def test_there_is_an_example() -> None:
    assert BLOCKS


@pytest.mark.parametrize("code", BLOCKS.values(), ids=BLOCKS.keys())
def test_example_runs(code: str, tmp_path: Path) -> None:
    # As a reader would: a file of its own, in another folder.
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    targets = set(phony.split())
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    code = re.findall(r"`(make [^`]*)`|^(make .*)$", README, re.MULTILINE)
    words = [(a or b).partition("#")[0].split()[1:] for a, b in code]
    named = {
        word for line in words for word in line if re.fullmatch(r"[a-z][a-z-]*", word)
    }
    assert {"demo", "test"} <= named <= targets
    told = set(re.findall(r'echo "make ([a-z-]+) ', makefile))
    assert targets == told | {"help"}


def test_files_exist() -> None:
    """Links of pages outside of docs/; those inside are checked when it is built."""
    for page in ROOT.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (page.parent / path).exists(), path
