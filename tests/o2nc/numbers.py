"""Bounds of plain numbers, given all together."""

from typing import Any

from jaxdp.mechanism.design import Design
from jaxdp.o2nc.theory import bounds
from jaxdp.o2nc.theory.bounds import Constants, Schedule
from jaxdp.o2nc.theory.estimators import Estimator

#: Of which the bound at a given noise does not depend.
BUDGET: dict[str, Any] = {
    "num_examples": 1000,
    "epsilon": 1.0,
    "delta": 1e-6,
    "relation": "zero_out",
}


def split(numbers: dict[str, Any]) -> tuple[Constants, Estimator, Schedule]:
    """The three parts of a problem; every number belongs to one."""
    numbers = dict(numbers)
    kinds = (Constants, Estimator, Schedule)
    parts = [
        kind(**{x: numbers.pop(x) for x in kind.__annotations__ if x in numbers})
        for kind in kinds
    ]
    assert not numbers
    return tuple(parts)  # type: ignore


def promise(
    *,
    noise_variance: Any,
    clip_bias: Any = 0.0,
    rate_factor: float | None = None,
    rounding: Any = 0.0,
    **numbers: Any,
) -> bounds.GoldsteinPromise:
    """``bounds.promise`` of keywords alone."""
    return bounds.promise(
        *split(BUDGET | numbers),
        noise_variance=noise_variance,
        clip_bias=clip_bias,
        rate_factor=rate_factor,
        rounding=rounding,
    )


def schedule_of(found: Design) -> Schedule:
    """The schedule of a design."""
    fields = {x: found[x] for x in Schedule.__annotations__ if x in found}
    return Schedule(num_windows=found.num_steps // found.window, **fields)
