"""BLT parameters from jax_privacy: what is asked of it and what comes back."""

import sys
import types
from typing import Any

import numpy as np
import pytest

from jaxdp.kernels import toeplitz_noise
from jaxdp.mechanism import blt


@pytest.fixture(autouse=True)
def forget() -> None:
    blt.optimise_blt.cache_clear()


def test_without_jax_privacy_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jax_privacy.matrix_factorization", None)
    with pytest.raises(ImportError, match=r"jaxdp-optim\[mf\]"):
        blt.optimise_blt(16, 2)


def test_what_is_asked_and_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def optimize(**arguments: Any) -> types.SimpleNamespace:
        asked.append(arguments)
        return types.SimpleNamespace(
            buf_decay=np.array([0.9, 0.5]), output_scale=np.array([0.2, 0.1])
        )

    fake = types.ModuleType("jax_privacy.matrix_factorization")
    fake.buffered_toeplitz = types.SimpleNamespace(optimize=optimize)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "jax_privacy", types.ModuleType("jax_privacy"))
    monkeypatch.setitem(sys.modules, "jax_privacy.matrix_factorization", fake)
    kernel = blt.optimise_blt(20, 2)
    assert kernel == toeplitz_noise.Buffered(20, (0.9, 0.5), (0.2, 0.1))
    assert blt.optimise_blt(20, 2) is kernel
    assert blt.optimise_blt(20, 2, separation=6) == kernel
    common = {"n": 20, "error": "max", "min_buffers": 2, "max_buffers": 2}
    assert asked == [
        common | {"min_sep": 1, "max_participations": 1},
        common | {"min_sep": 6, "max_participations": 4},
    ]


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="period must be from 1"):
        blt.optimise_blt(0, 2)
    for number in (0, 11):
        with pytest.raises(ValueError, match="num_buffers must be from 1 to 10"):
            blt.optimise_blt(16, number)


def test_the_optimum_is_better_than_the_numbers_of_another_period() -> None:
    pytest.importorskip("jax_privacy")

    def worst(kernel: toeplitz_noise.Buffered) -> float:
        return float(np.max(kernel.prefix_norms()) * np.max(kernel.column_norms()))

    found = blt.optimise_blt(100, 2)
    assert worst(found) < 0.999 * worst(toeplitz_noise.blt(100, 2))
