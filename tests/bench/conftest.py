"""The benchmark that a file of tests is about."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module that the file names ``BENCH``.

    ``bench`` is run from the root of the repository and never installed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module(f"bench.{request.module.BENCH}")
