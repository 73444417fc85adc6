"""README of the index page, which pyproject.toml cannot make: links lead somewhere there.

A link to a file of this repository is one to ``Source`` of ``[project.urls]``; without
that URL, its text stays.
"""

import pathlib
import re
import tomllib

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
SOURCE = PROJECT["urls"].get("Source")


def linked(match: re.Match[str]) -> str:
    """Returns a link that holds outside of the repository, or the text of one."""
    text, path = match.groups()
    return f"[{text}]({SOURCE.rstrip('/')}/blob/main/{path})" if SOURCE else text


readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)", linked, readme),
    long_description_content_type="text/markdown",
)
