"""Neighbouring data sets: records that move releases as far as they may, and others."""

import functools
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxdp import sampling
from jaxdp.core.keys import Keys
from jaxdp.mechanism.sum_plan import SumPlan
from jaxdp.o2nc.plan import O2NC

_CLIPS = {"plus": 1, "minus": -1, "nan": 0, "absent": 0}


class DataSet(NamedTuple):
    """Data set whose records contribute zero, except for one.

    Attributes:
      record: what the one is: its slopes are clipped to the bound ("plus", "minus"), or
        are not a number; or its row is masked.
      index: its place.
      axis: the parameter that its loss depends on.
      signs: of its contribution in each step; where 0, it has none. None for 1 in all.
      crowded: whether every other record saturates the bound too, all of them along the
        first parameter.
    """

    record: Literal["plus", "minus", "nan", "absent"]
    index: int = 0
    axis: int = 0
    signs: tuple[int, ...] | None = None
    crowded: bool = False


class Canary(NamedTuple):
    """Pair of neighbouring data sets.

    Attributes:
      name: for people.
      first: with the canary.
      second: with what the relation puts in its place.
      distance: by how many standard deviations of the claimed noise one clip moves a
        release: of every step, or float64 (T,).
      step: the one that reads the record; None if every one may.
    """

    name: str
    first: DataSet
    second: DataSet
    distance: float | np.ndarray
    step: int | None = None

    def moves(self, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the displacement (T,) of each release by the record, in both data sets.

        In standard deviations of the claimed noise.
        """
        signs = self.first.signs
        where = np.ones(num_steps) if signs is None else np.abs(signs)
        where = where * self.distance
        if self.step is not None:
            where = where * (np.arange(num_steps) == self.step)
        one, other = (_CLIPS[data.record] for data in (self.first, self.second))
        return one * where, other * where


def canaries(plan: SumPlan) -> tuple[Canary, ...]:
    """Returns the pairs of data sets that an audit of a plan compares.

    * A record that saturates the clip, at either end of the data.
    * One whose loss is not a number; it has to count nothing.
    * Some that saturate it in a part of the steps, as a loss may that depends on public
      parameters. Of any two steps one of them is in the one and not in the other: noise
      that the two share is then no more in their difference, but the record is. Of
      ``plans.O2NC`` it has the other sign in the others, for a change between two queries
      vanishes only if both losses do; besides, one counts in restarts alone, and one in
      all other steps.
    * Where records are read once, one in each of several leaves of a period: the first,
      a middle one, the last, and the worst, which a record moves by the most of what the
      noise protects. Each is the last row of its batch, which a batch that overlaps would
      read again.
    * Of ``plans.O2NC`` one more among records that saturate, so that the estimate is large.

    Against each stands its negative, where records are replaced, and else a masked row:
    zeroed, removed or never added, a record contributes to nothing.
    """
    if isinstance(plan, O2NC):
        return _every_step(plan) if plan.multi_pass else _leaf_canaries(plan)
    noise: Any = plan.noise_multiplier
    distance = plan.l2_clip_norm / (plan.sensitivity * noise)
    pair = functools.partial(_pair, plan, distance=distance)
    return (
        *_ends(pair, num_records(plan)),
        *_digits(pair, plan.num_steps, off=0),
    )


def num_records(plan: SumPlan) -> int:
    """Returns the number of records of a data set; with external batches, of one batch."""
    if isinstance(plan.sampling, sampling.External):
        return plan.sampling.rows(plan.num_examples)
    return plan.num_examples


def phases(plan: SumPlan) -> list[str]:
    """Returns the name of every step's phase."""
    names = [p.name for p in plan.phases for _ in range(p.num_steps)]
    periods = -(-plan.num_steps // len(names))
    return (names * periods)[: plan.num_steps]


def amplitudes(plan: SumPlan, data: DataSet) -> np.ndarray:
    """Returns the factor of a data set's losses in each step, float32 (T,).

    The factor grows, so that the change from one step to the next has the sign of the
    second. It is NaN where a change is to count nothing.
    """
    steps = np.arange(plan.num_steps)
    signs = np.ones(plan.num_steps) if data.signs is None else np.array(data.signs)
    changes = np.array(phases(plan)) == "difference"
    return np.where((signs == 0) & changes, np.nan, signs * (steps + 1)).astype("f4")


def _pair(
    plan: SumPlan,
    name: str,
    first: DataSet,
    distance: float | np.ndarray,
    step: int | None = None,
) -> Canary:
    """Returns the canary of a data set and its neighbour under the plan's relation."""
    replaced = plan.relation == "replace_one"
    against = "its negative" if replaced else "none"
    second = first._replace(record="minus" if replaced else "absent")
    return Canary(f"{name}, against {against}", first, second, distance, step)


def _ends(pair: Any, num_records: int) -> tuple[Canary, ...]:
    return (
        pair("saturating record, first", DataSet("plus")),
        pair("saturating record, last", DataSet("plus", num_records - 1, 1)),
        pair("record of NaN, first", DataSet("nan")),
    )


def _digits(pair: Any, num_steps: int, *, off: int) -> list[Canary]:
    """Returns one canary a binary digit: sign 1 in steps that have it, else ``off``."""
    steps = range(num_steps)

    def signs(bit: int) -> tuple[int, ...]:
        return tuple(1 if step >> bit & 1 else off for step in steps)

    return [
        pair(
            f"saturating record, in steps of binary digit {bit}",
            DataSet("plus", signs=signs(bit)),
        )
        for bit in range((num_steps - 1).bit_length())
    ]


def _every_step(plan: O2NC) -> tuple[Canary, ...]:
    """Returns canaries of a plan with independent noise whose steps may all read them."""
    names = phases(plan)
    moved = {p: bound / n / plan.step_std(p) for p, (bound, n) in plan.clips.items()}
    distance = np.array([moved[name] for name in names])
    pair = functools.partial(_pair, plan, distance=distance)

    def within(phase: str) -> Canary:
        signs = tuple(int(name == phase) for name in names)
        name = f"saturating record, in each {phase}"
        return pair(name, DataSet("plus", signs=signs))

    return (
        *_ends(pair, plan.num_examples),
        *_digits(pair, plan.num_steps, off=-1),
        *([within(name) for name in plan.clips] if len(set(names)) > 1 else []),
        pair("saturating record among others", DataSet("plus", crowded=True)),
    )


def _leaf_canaries(plan: O2NC) -> tuple[Canary, ...]:
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
        return _pair(plan, name, first, bound / rows / plan.node_std, step)

    steps = sorted({0, period // 2, period - 1, worst, latest + worst})
    return (
        *(pair("saturating record", "plus", step) for step in steps),
        pair("saturating record among others", "plus", second, crowded=True),
        pair("record of NaN", "nan", second),
    )
