"""Habits that a program can check: first words of docstrings, files of the project."""

import re
import tomllib

import pytest

import jaxdp
from tests import house

TREES = house.modules()


@pytest.mark.parametrize("path", TREES)
def test_docstrings_name_what_they_are_about(path: str) -> None:
    """A first line such as "What is read." points at a thing that it should name."""
    assert not list(house.pointing(TREES[path]))


def test_a_pointing_docstring_is_found() -> None:
    tree = house.ast.parse('def f():\n    """What is read."""')
    assert list(house.pointing(tree)) == ["What is read."]


def test_versions_agree() -> None:
    project = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["project"]
    cited = (house.ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", cited, re.M) == [project["version"]]


def test_contributing_is_short() -> None:
    assert len((house.ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 80


def test_lazy_modules_are_listed() -> None:
    assert {"auditing", "metrics", "models", "fit"} <= set(dir(jaxdp))
    assert not {name for name in dir(jaxdp) if not hasattr(jaxdp, name)}
