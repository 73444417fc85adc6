"""Noise that is correlated over a period, in the state of a transformation."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import keys as keys_lib
from jaxdp._types import PrefixSumPlan
from jaxdp.transforms import _common


class Correlated(NamedTuple):
    """Noise of the steps to come. Secret."""

    root: jax.Array  # shape=(), key; periods and steps are folded into it
    state: Any  # of plan.correlation, float32

    SECRET = ("root", "state")


class Place(NamedTuple):
    """Where a step lies. Public."""

    period: jax.Array  # shape=(), dtype=int32; counts from 0 over the whole run
    at: jax.Array  # shape=(), dtype=int32; step in the period, from 0


def begin(plan: PrefixSumPlan, keys: keys_lib.Keys, dim: int) -> Correlated:
    """Before the first step of a run over ``dim`` numbers.

    Raises:
      ValueError: so many numbers that the grid would round contributions to zero.
    """
    for phase in plan.phases:
        bits = plan.grid(phase.name).bits
        if bits is not None and math.sqrt(dim) > 2**bits / 4:
            raise ValueError(
                f"params must have at most {4 ** (bits - 2)} elements that move under this "
                f"plan, got {dim}: the noise leaves {bits} bits for one record's "
                f"contribution to a {phase.name!r} step, and its coordinates would be "
                "rounded to zero; use smaller batches or less noise"
            )
    state = plan.correlation.init(_like(dim))
    return Correlated(_common.noise_root(plan, keys), state)


def place(plan: PrefixSumPlan, count: jax.Array) -> Place:
    """A new period begins every ``plan.correlation.period`` steps, and with every pass."""
    period, steps = plan.correlation.period, plan.steps_per_pass
    number, step = jnp.divmod(count, np.int32(steps))
    within, at = jnp.divmod(step, np.int32(period))
    return Place(number * np.int32(-(-steps // period)) + within, at)


def draw(
    plan: PrefixSumPlan, noise: Correlated, where: Place, dim: int
) -> tuple[jax.Array, Correlated]:
    """The noise of one step, float32 (dim,) in standard deviations of a node."""
    key = keys_lib.at_step(noise.root, where.period)  # Drawn anew in every period.
    drawn, state = plan.correlation.increment(key, noise.state, where.at, _like(dim))
    return drawn, noise._replace(state=state)


def _like(dim: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((dim,), jnp.float32)
