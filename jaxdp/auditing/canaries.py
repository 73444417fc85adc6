"""Neighbouring data sets: records that move releases as far as they may, and others."""

import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxdp import sampling
from jaxdp.auditing import units
from jaxdp.auditing.units import Unit
from jaxdp.core.keys import Keys

#: Contribution of a record in units of its bound, by its kind.
VALUES = {"plus": 1.0, "minus": -1.0, "nan": math.nan, "absent": 0.0}


class DataSet(NamedTuple):
    """Data set whose records, or users, contribute zero, except for one."""

    #: Kind of the one: it saturates every bound, upwards ("plus") or downwards ("minus"),
    #: or is not a number, or contributes nothing either ("absent").
    record: Literal["plus", "minus", "nan", "absent"]
    index: int = 0  # its place
    axis: int = 0  # the parameter that its loss depends on
    #: Of its contribution in each step; where 0, it has none. None for 1 in all.
    signs: tuple[int, ...] | None = None
    players: str = "xy"  # whose gradients these are; those of another player are zero
    crowded: bool = False  # whether every other record saturates the bounds too
    unit: Unit = units.RECORD  # what each of them is


class Canary(NamedTuple):
    """Pair of neighbouring data sets.

    ``moves``, float64 (T,) or (T, R): by how many standard deviations of the claimed noise
    one clip of the record moves each release; None where vertices are drawn. ``weights`` of
    that shape: of the claimed likelihood ratio of correlated noise, up to a factor.
    """

    name: str  # for people
    first: DataSet  # with the canary
    second: DataSet  # with what the relation puts in its place
    moves: Any = None
    weights: Any = None

    def of(self, unit: Unit) -> "Canary":
        """Returns the pair with a unit in the place of a record."""
        first, second = (x._replace(unit=unit) for x in (self.first, self.second))
        name = self.name.replace(units.RECORD.name, unit.name)
        return self._replace(name=name, first=first, second=second)

    def shifts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns how far the record moves each release, in both data sets."""
        one, other = (VALUES[data.record] for data in (self.first, self.second))
        return np.nan_to_num(one) * self.moves, other * self.moves


def against(
    plan: Any, name: str, first: DataSet, moves: Any = None, weights: Any = None
) -> Canary:
    """Returns the canary of a data set and its neighbour under the plan's relation.

    That is the record's negative, where records are replaced, and else one that
    contributes nothing: zeroed, removed or never added.
    """
    replaced = plan.relation == "replace_one"
    second = first._replace(record="minus" if replaced else "absent")
    name = f"{name}, against {'its negative' if replaced else 'none'}"
    return Canary(name, first, second, moves, weights)


def of_sums(plan: Any) -> tuple[Canary, ...]:
    """Returns the canaries of a plan that releases one noised sum a step.

    * A record that saturates the clip, at either end of the data.
    * One whose loss is not a number; it has to count nothing.
    * Some that saturate it in a part of the steps, as a loss may that depends on public
      parameters. Of any two steps one of them is in the one and not in the other: noise
      that the two share is then no more in their difference, but the record is.
    """
    distance = plan.l2_clip_norm / (plan.sensitivity * plan.noise_multiplier)
    pair = functools.partial(_pair, plan, np.full(plan.num_steps, distance))
    return *_ends(pair, num_records(plan)), *_digits(pair, plan.num_steps, off=0)


def of_increments(plan: Any) -> tuple[Canary, ...]:
    """Returns the canaries of a plan that releases an estimate and its changes.

    Those of sums, with the other sign in the other steps, for a change between two queries
    vanishes only if both losses do; besides, one that counts in restarts alone, one in all
    other steps, and one among records that saturate, so that the estimate is large.

    Where records are read once, one in each of several leaves of a period: the first,
    a middle one, the last, and the worst, which a record moves by the most of what the
    noise protects. Each is the last row of its batch, which a batch that overlaps would
    read again.
    """
    return _every_step(plan) if plan.multi_pass else _leaves(plan)


def num_records(plan: Any) -> int:
    """Returns the number of records of a data set; with external batches, of one batch."""
    if isinstance(plan.sampling, sampling.External):
        return plan.sampling.rows(plan.num_examples)
    return plan.num_examples


def phases(plan: Any) -> list[str]:
    """Returns the name of every step's phase."""
    names = [p.name for p in plan.phases for _ in range(p.num_steps)]
    periods = -(-plan.num_steps // len(names))
    return (names * periods)[: plan.num_steps]


def amplitudes(plan: Any, data: DataSet) -> np.ndarray:
    """Returns the factor of a data set's losses in each step, float32 (T,).

    The factor grows, so that the change from one step to the next has the sign of the
    second. It is NaN where a change is to count nothing.
    """
    steps = np.arange(plan.num_steps)
    signs = np.ones(plan.num_steps) if data.signs is None else np.array(data.signs)
    changes = np.array(phases(plan)) == "difference"
    return np.where((signs == 0) & changes, np.nan, signs * (steps + 1)).astype("f4")


def _pair(plan: Any, distances: np.ndarray, name: str, first: DataSet) -> Canary:
    signs = 1 if first.signs is None else np.abs(first.signs)
    return against(plan, name, first, signs * distances)


def _ends(pair: Any, num_records: int) -> tuple[Canary, ...]:
    return (
        pair("saturating record, first", DataSet("plus")),
        pair("saturating record, last", DataSet("plus", num_records - 1, 1)),
        pair("record of NaN, first", DataSet("nan")),
    )


def _digits(pair: Any, num_steps: int, *, off: int) -> list[Canary]:
    """Returns one canary a binary digit: sign 1 in steps that have it, else ``off``."""
    found = []
    for bit in range((num_steps - 1).bit_length()):
        signs = tuple(1 if step >> bit & 1 else off for step in range(num_steps))
        name = f"saturating record, in steps of binary digit {bit}"
        found.append(pair(name, DataSet("plus", signs=signs)))
    return found


def _every_step(plan: Any) -> tuple[Canary, ...]:
    """Returns canaries of a plan with independent noise whose steps may all read them."""
    names = phases(plan)
    moved = {p: bound / n / plan.step_std(p) for p, (bound, n) in plan.clips.items()}
    pair = functools.partial(_pair, plan, np.array([moved[name] for name in names]))
    found = [*_ends(pair, plan.num_examples), *_digits(pair, plan.num_steps, off=-1)]
    for phase in plan.clips if len(set(names)) > 1 else ():
        signs = tuple(int(name == phase) for name in names)
        data = DataSet("plus", signs=signs)
        found.append(pair(f"saturating record, in each {phase}", data))
    crowded = DataSet("plus", crowded=True)
    return (*found, pair("saturating record among others", crowded))


def _leaves(plan: Any) -> tuple[Canary, ...]:
    """Returns canaries of a plan whose steps are leaves of periods of correlated noise."""
    names, period = phases(plan), min(plan.noise_period, plan.num_steps)
    moves = plan.leaf_sensitivities * plan.correlation.column_norms()
    worst = int(np.argmax(moves[:period]))
    second, latest = min(1, period - 1), (plan.num_steps // period - 1) * period

    def pair(name: str, record: Any, step: int, *, crowded: bool = False) -> Canary:
        leaf, phase = step % plan.noise_period, names[step]
        of = f"leaf {leaf + 1} of {plan.noise_period}, step {step}"
        name = f"{name} in {of}{' (worst)' if leaf == worst else ''}"
        read = sampling.batch(
            plan, Keys.insecure(0), step, np.arange(plan.num_examples), phase=phase
        )
        first = DataSet(record, int(read.records[-1]), crowded=crowded)
        bound, rows = plan.clips[phase]
        moves = np.where(np.arange(plan.num_steps) == step, 1.0, 0.0)
        weights = leaf_weights(plan, step)
        return against(plan, name, first, bound / rows / plan.node_std * moves, weights)

    steps = sorted({0, period // 2, period - 1, worst, latest + worst})
    return (
        *(pair("saturating record", "plus", step) for step in steps),
        pair("saturating record among others", "plus", second, crowded=True),
        pair("record of NaN", "nan", second),
    )


def leaf_weights(plan: Any, step: int) -> np.ndarray:
    r"""Returns the weights (T,) of the releases that tell a record of one step best.

    The increments x of its period are a mean plus :math:`C^{-1}\xi`; the record moves the
    mean of leaf i alone, along one direction. So :math:`Cx` has independent noise, is moved
    along :math:`Ce_i`, and :math:`\langle Ce_i, Cx\rangle` tells all.
    """
    leaf = step % plan.noise_period
    begin = step - leaf
    count = min(plan.noise_period, plan.num_steps - begin)
    strategy = plan.correlation.strategy()[:count, :count]
    weights = np.zeros(plan.num_steps)
    weights[begin : begin + count] = strategy.T @ strategy[:, leaf]
    return weights
