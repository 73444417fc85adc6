"""Bounds of plain numbers, given all together."""

from typing import Any, get_type_hints

from jaxdp.mechanism.design import Design
from jaxdp.o2nc.oracle import Difference, Direction
from jaxdp.o2nc.theory import bounds
from jaxdp.o2nc.theory.bounds import Constants, Schedule
from jaxdp.o2nc.theory.estimators import (
    BallEstimator,
    Estimator,
    Moments,
    SlopesEstimator,
)

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
    estimator = BallEstimator if numbers["direction"] == "ball" else Estimator
    kinds = (Constants, estimator, Schedule)
    parts = [
        kind(**{x: numbers.pop(x) for x in get_type_hints(kind) if x in numbers})
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


# --- estimates of one record, by the numbers that they depend on -----------------------


def vectors(
    m: int, law: Direction, difference: Difference = "independent"
) -> Estimator:
    """The estimator of an oracle that releases vectors."""
    return (BallEstimator if law == "ball" else Estimator)(m, law, difference)


def grad_moments(dim: int, m: int, law: Direction) -> Moments:
    return vectors(m, law).grad_moments(dim)


def diff_moments(
    dim: int, m: int, law: Direction, difference: Difference, reach: Any
) -> Moments:
    return vectors(m, law, difference).diff_moments(dim, reach)


def grad_clip(dim: int, m: int, law: Direction, failure: Any = None) -> Any:
    return vectors(m, law).grad_clip(dim, failure)


def diff_clip(
    dim: int,
    m: int,
    law: Direction,
    difference: Difference,
    movement: Any,
    failure: Any = None,
) -> Any:
    return vectors(m, law, difference).diff_clip(dim, movement, failure)


def slopes_clip(dim: int, m: int, law: Direction, failure: Any = None) -> Any:
    return SlopesEstimator(m, law, "independent", True).slopes_clip(dim, failure)


def practical_grad_clip(dim: int, m: int, law: Direction) -> Any:
    return vectors(m, law).practical_clips(dim, 1.0)[0]


def practical_slopes_clip(dim: int, m: int, law: Direction) -> Any:
    slopes = SlopesEstimator(m, law, "independent", True)
    return slopes.practical_clips(dim, 1.0)[0]


def practical_diff_clip(
    dim: int,
    m: int,
    law: Direction,
    difference: Difference,
    movement: Any,
    fraction: float = 1.0,
) -> Any:
    return vectors(m, law, difference).practical_clips(dim, movement, fraction)[1]
