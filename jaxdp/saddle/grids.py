"""Grids of integer scores: exact steps from the records' totals, and what one moves."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxdp.kernels import simplex
from jaxdp.saddle.oracles import Bound

#: One unit of a score, in nats.
UNIT = math.log(2) / 2**simplex.BITS


class ScoreGrid(NamedTuple):
    """Grid of one player's totals, and the factor from totals to scores.

    A total moves a score by ``floor(total * multiplier / 2**shift)`` units.
    """

    clip: float  # bound on a coordinate of one record's gradient
    bits: int  # a total counts units of 2**-bits of it
    multiplier: int
    shift: int

    @property
    def bound(self) -> Bound:
        """Bound of a record's contribution, in units of the grid."""
        return Bound(self.clip, self.bits)

    def change(self, total: jax.Array) -> jax.Array:
        """Computes the exact int32 change of the scores by a total of contributions."""
        return simplex.scaled(total, self.multiplier, self.shift)

    def sensitivity(self, clips: float) -> float:
        """Returns the sensitivity of a score to a record that moves a total by ``clips``.

        In nats.
        """
        if self.multiplier == 0:
            return 0.0
        # One unit more, for the floor of the product.
        return (clips * 2**self.bits * self.multiplier / 2**self.shift + 1) * UNIT


class LevelGrids(NamedTuple):
    """Score grids of one player at a level: of the difference, and of the base."""

    difference: ScoreGrid
    base: ScoreGrid

    def sensitivity(self, difference: float, base: float) -> float:
        """Returns a score's sensitivity to a record that moves totals by so many clips."""
        return self.difference.sensitivity(difference) + self.base.sensitivity(base)


def score_grid(step_size: float, clip: float, bits: int, records: float) -> ScoreGrid:
    """Returns the grid that moves scores by ``step_size`` times a mean over ``records``.

    Scores move by slightly less, because the multiplier is rounded down.

    Args:
      step_size: >= 0.
      clip: bound on a coordinate of one record's gradient.
      bits: one unit of a total is ``clip * 2**-bits``.
      records: what totals are divided by.
    """
    units = step_size * clip / (records * 2.0**bits) / UNIT  # of one unit of a total
    if units == 0:
        return ScoreGrid(clip, bits, 0, 0)
    shift = min(15 - math.floor(math.log2(units)), 46)
    return ScoreGrid(clip, bits, math.floor(units * 2.0**shift), shift)


class Totals(NamedTuple):
    """Totals of the players over a batch of one size, each with its clip."""

    clips: tuple[float, ...]
    bits: int  # a total counts units of 2**-bits of its clip
    records: int  # what totals are divided by
    sensitivity: float  # of a total, in clips

    def grids(self, steps: Sequence[float]) -> list[ScoreGrid]:
        """Returns the players' grids at these step sizes."""
        return [
            score_grid(step, clip, self.bits, self.records)
            for step, clip in zip(steps, self.clips, strict=True)
        ]

    def score_sensitivities(self, steps: Sequence[float]) -> list[float]:
        """Returns the sensitivities of the players' scores to one record, in nats."""
        return [grid.sensitivity(self.sensitivity) for grid in self.grids(steps)]


def record_bits(records: int) -> int:
    """Returns the bits of a contribution for which a sum over ``records`` fits int32.

    Raises:
      ValueError: fewer than 8 would be left.
    """
    bits = min(16, math.floor(math.log2((2**31 - 1) / records)))
    if bits < 8:
        raise ValueError(
            "num_steps must be so many that a step's records leave 8 bits for the "
            f"contribution of one: the largest total here is over {records} of them, which "
            f"leaves {bits}"
        )
    return bits
