"""Kernels are tested in a strict house: no silent promotion of ranks or dtypes.

A kernel that relies on one computes in a shape or a precision that nobody wrote down.
"""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def strict() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield
