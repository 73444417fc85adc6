"""Number of operations in the programs that XLA is given, on which compile times depend.

StableHLO operations of the whole runs and of a language model's steps of
``_accelerators_programs.py``, lowered for a CPU and not compiled. A function that is called
several times counts once; XLA writes it into each caller, so that it saves no compilation.
"A draw" is one of the secret noise, and "a block" one evaluation of its cipher: a plan with
correlated noise draws once in each phase, of four blocks.

``python -m bench.operations "fit, o2nc" ...`` prints the counts of some programs as JSON.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench import _accelerators_programs as programs
from bench import _harness
from jaxdp.kernels import lattice_gaussian, threefry

Row = _harness.Row
METRIC = "StableHLO operations"
MODEL = "RoBERTa-large"
_OPERATION = re.compile(r"= \"?(?:stablehlo|chlo)\.")


def run(quick: bool) -> list[Row]:
    """A row of every program (quick: of one run)."""
    return [
        Row(name, METRIC, counted(name), "") for name in names()[: 1 if quick else None]
    ]


def names() -> list[str]:
    """The programs: whole runs, steps of a language model, and parts of both."""
    every = programs.programs().values()
    whole = [program.name for program in every if program.group == "fit"]
    return [*whole, *(f"{MODEL}, {law}" for law in programs.LAWS), *_parts()]


def counted(name: str) -> int:
    """Counts the operations of a program, by name."""
    parts = _parts()
    fn, args = parts[name] if name in parts else programs.programs()[name].build()
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cpu",))
    return len(_OPERATION.findall(lowered.as_text()))


def _parts() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    law = lattice_gaussian.law(2**20, fine=True)

    def drawn(words: jax.Array) -> Any:
        return lattice_gaussian.draw_fine(threefry.secret_key(words), (8,), law)

    def block(words: jax.Array) -> Any:
        return threefry.secret_block(threefry.secret_key(words), jnp.arange(8))

    return {
        "a draw": (drawn, (programs.SECRET,)),
        "a block": (block, (programs.SECRET,)),
    }


def main(*chosen: str) -> None:
    """Prints the counts of some programs as JSON."""
    print(json.dumps({name: counted(name) for name in chosen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
