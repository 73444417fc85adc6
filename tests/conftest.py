"""What every test has: shared programs, and memory that is given back.

The registry of methods is :mod:`tests.methods`.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxdp.training import loop

# Compiled programs are shared by the tests, the processes that run them and those that they
# start. Compiling is most of what the tests take, and many compile the same program.
if jax.config.jax_compilation_cache_dir is None:
    for name, value in {
        "jax_compilation_cache_dir": str(Path(__file__).parents[1] / ".jax_cache"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)

# Less of what LLVM does, in one piece a program: a seventh of what the tests take. Tests of
# the wheel and the pages of the documentation are compiled as every user's programs are.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
    )


# Figures of float32 are compared, which TF32 does not give.
if jax.default_backend() != "cpu":
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests of minutes first: at the end one process would wait for the other."""
    first = "test_parallel.py", "test_processes_that_share_a_model"
    items.sort(key=lambda item: not any(name in item.nodeid for name in first))


def pytest_collection_finish() -> None:
    """Leaves modules and tests, which all stay, out of each collection of garbage.

    Tracing makes objects by the million, nearly all of which are freed without one: where
    collections are rarer, tests that trace take an eighth less.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _programs_of_one_module() -> Iterator[None]:
    """Forgets compiled programs after each module: thousands would fill the memory.

    The C library keeps what they leave in pieces, unless it is told to give it back.
    """
    yield
    jax.clear_caches()
    loop._programs.clear()
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
