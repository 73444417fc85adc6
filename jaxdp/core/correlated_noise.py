"""Noise that is correlated over a period, in the state of a transformation."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.types import Grid, Run
from jaxdp.kernels import node_noise, prefix_noise, threefry
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.kernels.prefix_noise import PrefixNoise


class CorrelatedNumbers(NamedTuple):
    """Frozen numbers of a plan whose noise is correlated over a period."""

    run: Run
    correlation: PrefixNoise  # of one period
    grids: Mapping[str, Grid]  # by the name of a phase; read-only, as plans keep it
    steps_per_pass: int  # the noise restarts with each pass
    noise_multiplier: float

    @property
    def noisy(self) -> bool:
        """True if there is any noise."""
        return any(grid.noise_std for grid in self.grids.values())


class Correlated(NamedTuple):
    """State of the correlated noise of later steps. Secret."""

    root: jax.Array  # shape=(), key; periods and steps are folded into it
    state: Any  # of the noise kernel

    SECRET = ("root", "state")
    __repr__ = run_state.hiding_repr


class Place(NamedTuple):
    """Position of a step: its period, and its index there. Public."""

    period: jax.Array  # shape=(), dtype=int32; counts from 0 over the whole run
    at: jax.Array  # shape=(), dtype=int32; step in the period, from 0


def begin(numbers: CorrelatedNumbers, keys: keys_lib.Keys, like: Any) -> Correlated:
    """Returns the noise before the first step of a run over some numbers.

    Args:
      numbers: of the plan.
      keys: of the run.
      like: size of the vector, or its sections (``kernels.parts.sections``).

    Raises:
      ValueError: so many numbers that the grid would round contributions to zero.
    """
    correlation, like = numbers.correlation, node_noise.sections_of(like)
    dim = sum(math.prod(section.shape) for section in jax.tree.leaves(like))
    for phase, grid in numbers.grids.items():
        bits = grid.bits
        if bits is not None and math.sqrt(dim) > 2**bits / 4:
            raise ValueError(
                f"params must have at most {4 ** (bits - 2)} elements that move under this "
                f"plan, got {dim}: the noise leaves {bits} bits for one record's "
                f"contribution to a {phase!r} step, and its coordinates would be "
                "rounded to zero; use smaller batches or less noise"
            )
        check_rounding(correlation, dim, numbers.noise_multiplier, grid.noise_std)
    root = run_state.noise_root(numbers.run, keys)
    # Settled, so that period and step can be folded in without a cost in the program.
    return Correlated(threefry.settled(root), correlation.init(like))


def place(numbers: CorrelatedNumbers, count: jax.Array) -> Place:
    """Returns the position of the step after ``count`` steps.

    A new period begins with every period of the noise kernel, and with every pass.
    """
    period, steps = numbers.correlation.period, numbers.steps_per_pass
    number, step = jnp.divmod(count, np.int32(steps))
    within, at = jnp.divmod(step, np.int32(period))
    return Place(number * np.int32(-(-steps // period)) + within, at)


def draw(
    numbers: CorrelatedNumbers, noise: Correlated, where: Place, like: Any, phase: str
) -> tuple[Any, Correlated]:
    """Draws the noise of one step, in the units of its phase's noise: (d,).

    ``like`` is d, or sections of a vector, of which it is a tree like them.
    """
    key = keys_lib.at_step(noise.root, where.period)  # Drawn anew in every period.
    kernel, std = numbers.correlation, numbers.grids[phase].noise_std
    drawn, state = increment(
        kernel, key, noise.state, where.at, node_noise.sections_of(like), std
    )
    return drawn, noise._replace(state=state)


def increment(
    kernel: PrefixNoise, key: jax.Array, state: Any, step: Any, like: Any, std: int
) -> tuple[Any, Any]:
    """Returns the kernel's noise of a step, zero where ``std`` is 0, and the next state."""
    if std == 0:
        return jax.tree.map(Fixed, node_noise.zeros(like)), state
    return kernel.increment(key, state, step, like, kernel.laws(std))


def check_rounding(
    kernel: PrefixNoise, dim: int, noise_multiplier: float, std: int
) -> None:
    """Raises if fixed-point rounding adds more sensitivity than the noise allows for.

    :mod:`jaxdp.kernels.prefix_noise` derives what rounding adds.
    """
    if not noise_multiplier:
        return
    spare = 4e-6 * std / noise_multiplier
    if prefix_noise.rounding_shift(kernel, dim) > spare:
        raise ValueError(
            f"params must have fewer elements that move under this plan, got {dim}: what "
            "is rounded in noise that is carried over so many steps would not be covered; "
            'use a shorter period, or prefix_noise="tree"'
        )
