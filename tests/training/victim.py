"""``python -m tests.training.victim FOLDER [FILES] [--wait]``: a run that is killed.

Begins a run in the folder, or goes on with the one that is there. With FILES it reads its
records from the files of that folder as it needs them. With ``--wait`` it never ends.
"""

import dataclasses
import itertools
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import optax

import jaxdp
from jaxdp import sampling
from jaxdp.training import ledger
from tests.training.problem import DATA, PARAMS, make_plan, value_fn

PLAN = make_plan(
    num_steps=6000,
    sampling=sampling.TruncatedPoisson(sampling_prob=0.4),
    direction="gaussian",
    num_directions=2,
)
#: Over files.
FEWER = dataclasses.replace(PLAN, num_steps=600)
ARGUMENTS = {"value_fn": value_fn, "optimizer": optax.adam(0.01)}
CHUNK = 10
WAIT = "--wait"
#: Chunks that a process with ``--wait`` begins: twenty processes do not come to the end of
#: ``PLAN``, nor two to that of ``FEWER``.
CHUNKS = 25


def main(folder: pathlib.Path, files: pathlib.Path | None = None) -> None:
    # Compiled once for all processes; the same program gives the same bits.
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    plan, data = PLAN, DATA
    if files is not None:
        maps = (np.load(files / f"{name}.npy", mmap_mode="r") for name in "xy")
        plan, data = FEWER, jaxdp.data.ArraySource(tuple(maps))
    if (folder / ledger.LEDGER).exists():
        jaxdp.resume(folder, PARAMS, data, keep_noise_roots=True, **ARGUMENTS)
    else:
        keys = jaxdp.Keys.from_entropy()
        jaxdp.fit(plan, keys, PARAMS, data, ledger=folder, chunk=CHUNK, **ARGUMENTS)


def wait_for_the_kill() -> None:
    """Halts runs with an open intent after some chunks, however late the kill comes."""
    intend, begun = ledger.Ledger.intend, itertools.count(1)

    def halting(*args: Any) -> None:
        intend(*args)
        while next(begun) >= CHUNKS:
            time.sleep(1)

    ledger.Ledger.intend = halting


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[-1] == WAIT:
        words.pop()
        wait_for_the_kill()
    main(*map(pathlib.Path, words))
