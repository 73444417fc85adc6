"""What each of two processes does that run one plan together.

``test_parallel.py`` starts them and compares what they print.
"""

import hashlib
from typing import Any

import jax
import numpy as np
import optax

import jaxdp
from jaxdp import sampling
from jaxdp.core import keys as keys_lib
from tests.training.problem import DATA, PARAMS, make_plan, value_fn

PLAN = make_plan(
    num_steps=6, sampling=sampling.TruncatedPoisson(sampling_prob=0.5), num_directions=2
)
SIZE = 5
ARGUMENTS: dict[str, Any] = {
    "value_fn": value_fn,
    "optimizer": optax.sgd(0.1, momentum=0.9),
    "microbatch_size": SIZE,
}


def digest(tree: Any) -> str:
    leaves = (np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def refusal(function: Any) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def main(folder: str) -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    own = jaxdp.Keys.from_entropy()
    shared = own.broadcast()

    def run(keys: Any, **kwargs: Any) -> Any:
        args = ARGUMENTS | {"mesh": mesh} | kwargs
        return jaxdp.fit(PLAN, keys, PARAMS, DATA, **args)

    shown: list[int] = []
    seen = (
        {"callback": lambda step, *_: shown.append(step)}
        if jax.process_index() == 0
        else {}
    )
    result = run(jaxdp.Keys.insecure(1), ledger=folder, chunk=2, **seen)
    return {
        "devices": jax.device_count(),
        "own keys": refusal(lambda: run(own)),
        # Slices of another size: some records would be read twice, others never.
        "own slices": refusal(
            lambda: run(
                jaxdp.Keys.insecure(1), microbatch_size=SIZE + jax.process_index()
            )
        ),
        "resume": refusal(
            lambda: jaxdp.resume(folder, PARAMS, DATA, mesh=mesh, **ARGUMENTS)
        ),
        "keys": keys_lib.fingerprint(shared).hex(),
        "private": shared.private,
        # Each process for itself would have the same noise on data of its own.
        "alone": refusal(lambda: jaxdp.fit(PLAN, shared, PARAMS, DATA, **ARGUMENTS)),
        "together": run(shared).report["private"],
        "shown": shown,
        "digest": digest((result.params, result.info)),
        "steps": result.report["steps_done"],
    }
