"""``python -m tests.training.victim FOLDER``: a run that may be killed at any moment.

Begins a run in the folder, or goes on with the one that is there.
"""

import pathlib
import sys

import jax
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
ARGUMENTS = {"value_fn": value_fn, "optimizer": optax.adam(0.01)}


def main(folder: pathlib.Path) -> None:
    # Compiled once for all processes; the same program gives the same bits.
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if (folder / ledger.LEDGER).exists():
        jaxdp.resume(folder, PARAMS, DATA, keep_noise_roots=True, **ARGUMENTS)
    else:
        keys = jaxdp.Keys.from_entropy()
        jaxdp.fit(PLAN, keys, PARAMS, DATA, ledger=folder, chunk=10, **ARGUMENTS)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
