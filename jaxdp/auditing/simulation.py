"""Neighbouring data sets, and transcripts of the compiled mechanism on them."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import sampling
from jaxdp.keys import Keys
from jaxdp.plans._base import SumPlan
from jaxdp.plans.o2nc import O2NC
from jaxdp.transforms.dpzero import exact_noise

# Slope of the canary over the clip: so steep that in no direction it stays below.
_STEEP = 1e6
_CELLS = 2**23  # numbers of one run, times runs, that are simulated at once

_CLIPS = {"plus": 1, "minus": -1, "nan": 0, "absent": 0}


class DataSet(NamedTuple):
    """Records that contribute zero, but for one.

    Attributes:
      record: what the one is: its slopes are clipped to the bound ("plus", "minus"), or
        are not a number; or its row is masked.
      index: its place.
      axis: the parameter that its loss depends on.
      bit: in steps whose number lacks this binary digit it is zero; -1 for no digit.
      crowded: whether every other record saturates the bound too, all of them along the
        first parameter.
    """

    record: Literal["plus", "minus", "nan", "absent"]
    index: int = 0
    axis: int = 0
    bit: int = -1
    crowded: bool = False


class Canary(NamedTuple):
    """Two neighbouring data sets.

    Attributes:
      name: for people.
      first: with the canary.
      second: with what the relation puts in its place.
      distance: by how many standard deviations of the claimed noise one clip moves a
        release.
      step: the one that reads the record; None if every one may.
    """

    name: str
    first: DataSet
    second: DataSet
    distance: float
    step: int | None = None

    def moves(self, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """How far the record moves each release (T,) in the two data sets.

        In standard deviations of the claimed noise.
        """
        steps = np.arange(num_steps)
        where = _active(self.first.bit, steps) * self.distance
        if self.step is not None:
            where = where * (steps == self.step)
        one, other = (_CLIPS[data.record] for data in (self.first, self.second))
        return one * where, other * where


def canaries(plan: SumPlan) -> tuple[Canary, ...]:
    """The pairs of data sets that an audit of a plan looks at.

    * A record that saturates the clip, at either end of the data.
    * One whose loss is not a number; it has to count nothing.
    * Some that saturate it in a part of the steps, as a loss may that depends on public
      parameters. Of any two steps one of them is in the one and not in the other: noise
      that the two share is then no more in their difference, but the record is.
    * Where noise is correlated over a period, one in each of several leaves: the first,
      a middle one, the last, and the worst, which a record moves by the most of what the
      noise protects. Each is the last row of its batch, which a batch that overlaps would
      read again. One more among records that saturate, so that the estimate is large.

    Against each stands its negative, where records are replaced, and else a masked row:
    zeroed, removed or never added, a record contributes to nothing.
    """
    if isinstance(plan, O2NC):
        return _leaf_canaries(plan)
    noise: Any = plan.noise_multiplier
    distance = plan.l2_clip_norm / (plan.sensitivity * noise)
    last = num_records(plan) - 1

    def pair(name: str, record: Any, index: int, axis: int, bit: int = -1) -> Canary:
        return _pair(plan, name, DataSet(record, index, axis, bit), distance)

    return (
        pair("saturating record, first", "plus", 0, 0),
        pair("saturating record, last", "plus", last, 1),
        pair("record of NaN, first", "nan", 0, 0),
        *(
            pair(
                f"saturating record, in steps of binary digit {bit}", "plus", 0, 0, bit
            )
            for bit in range((plan.num_steps - 1).bit_length())
        ),
    )


def _pair(
    plan: SumPlan, name: str, first: DataSet, distance: float, step: int | None = None
) -> Canary:
    """A data set and its neighbour."""
    replaced = plan.relation == "replace_one"
    against = "its negative" if replaced else "none"
    second = first._replace(record="minus" if replaced else "absent")
    return Canary(f"{name}, against {against}", first, second, distance, step)


def _leaf_canaries(plan: O2NC) -> tuple[Canary, ...]:
    """Canaries of a plan whose steps are the leaves of a period of correlated noise."""
    period = min(plan.noise_period, plan.num_steps)
    moves = plan.leaf_sensitivities * plan.correlation.column_norms()
    worst = int(np.argmax(moves[:period]))
    second, latest = min(1, period - 1), (plan.num_steps // period - 1) * period

    def pair(name: str, record: Any, step: int, *, crowded: bool = False) -> Canary:
        leaf, phase = step % plan.noise_period, _phase(plan, step)
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


def _phase(plan: SumPlan, step: int) -> str:
    """The name of the phase that a step belongs to."""
    names = [p.name for p in plan.phases for _ in range(p.num_steps)]
    return names[step % len(names)]


def transcripts(
    plan: SumPlan, data: Sequence[DataSet], num_runs: int, seed: int
) -> np.ndarray:
    """What ``num_runs`` runs of a plan release, on each of several data sets.

    What runs is ``plan.transform`` on batches of ``jaxdp.sampling.batch``, under jit, vmap
    and scan. Exact noise is drawn on the host, by the function that the transformation
    itself calls. Every run has noise and sampling roots of its own, the same on every
    data set; all have the direction root of ``Keys.insecure(seed)``, and its sampling root
    too where the order of records need not be secret.

    The parameters stay at zero: the canary's loss is linear and steep, so that nothing
    would be different anywhere else, but for rounding. And it grows with the step, so
    that its change from step to step is as steep.

    Returns:
      float32 (len(data), num_runs, num_steps, R): releases in standard deviations of the
      claimed noise. R is the number of directions, and one more if the clip is tuned;
      for a plan without directions it is that of the coordinates of the update, which is
      what such a plan releases. For ``plans.O2NC`` it is d + 1: the increment of the
      released estimate, and its norm as it is logged.

    Raises:
      RuntimeError: the noise is not what the plan's transformation would draw.
    """
    seeds, public = run_seeds(num_runs, seed), Keys.insecure(seed)
    own = make_keys(seeds)
    tables = None
    if plan.noise != "gaussian":
        tables = _tables(plan, seeds, np.asarray(own.noise_words), public)
    records = jax.tree.map(
        lambda *rows: np.stack(rows), *(_records(plan, one) for one in data)
    )
    run = _compiled(plan, public)
    # Where no run draws records of its own, what it adds is no more than its releases.
    numbers = len(data) * _parameters(plan)["x"].size
    if plan.sampling.amplifies:
        numbers = records["slopes"].size
    at_once = min(num_runs, max(_CELLS // numbers, 1))
    parts = []
    for begin in range(0, num_runs, at_once):
        # The last part overlaps the one before it: one shape, compiled once.
        first = min(begin, num_runs - at_once)
        part = slice(first, first + at_once)
        given = jax.tree.map(operator.itemgetter(part), (own, tables))
        made = run(records, *given)
        parts.append(np.asarray(made)[:, begin - first :])
    return np.concatenate(parts, axis=1)


def run_seeds(num_runs: int, seed: int) -> np.ndarray:
    """A different seed of ``Keys.insecure`` for every run: uint32 (num_runs,)."""
    start = np.random.default_rng(seed).integers(2**32, dtype=np.uint64)
    return ((start + np.arange(num_runs, dtype=np.uint64)) % 2**32).astype(np.uint32)


def num_records(plan: SumPlan) -> int:
    """Records of a data set; where somebody else makes the batches, those of one."""
    if isinstance(plan.sampling, sampling.External):
        return plan.sampling.rows(plan.num_examples)
    return plan.num_examples


def _parameters(plan: SumPlan) -> dict[str, jax.Array]:
    """Those that move, and the number of the step, which losses may read."""
    dim = max(2, getattr(plan, "num_directions", 1))
    return {"x": jnp.zeros(dim), "step": jnp.zeros((), jnp.int32)}


def _moves(path: str) -> bool:
    return path == "x"


def _active(bit: Any, step: Any) -> Any:
    """Whether a record is not zero in a step, for arrays of either; -1 is no bit."""
    return (bit < 0) | (step >> abs(bit) & 1 == 1)


def _records(plan: SumPlan, data: DataSet) -> dict[str, np.ndarray]:
    """Gradients of the records' linear losses, their bits, and which rows are there."""
    rows = num_records(plan)
    slopes = np.zeros((rows, _parameters(plan)["x"].size), np.float32)
    bounds: Any = getattr(plan, "clips", {"step": (plan.l2_clip_norm, rows)})
    steep = _STEEP * max(bound for bound, _ in bounds.values())
    one = {"plus": steep, "minus": -steep, "nan": math.nan}
    slopes[:, 0] = steep * data.crowded
    slopes[data.index] = 0
    slopes[data.index, data.axis] = one.get(data.record, 0.0)
    present = np.ones(rows, bool)
    present[data.index] = data.record != "absent"
    return {"slopes": slopes, "bit": np.full(rows, data.bit), "present": present}


def _compiled(plan: SumPlan, public: Keys) -> Callable[..., jax.Array]:
    """(records of W data sets, keys (n,), tables (n, T, R) or None) -> (W, n, T, R)."""
    params = _parameters(plan)

    def value_fn(params: Any, batch: Any) -> jax.Array:
        losses = jnp.sum(batch["slopes"] * params["x"], axis=-1) * (params["step"] + 1)
        return jnp.where(_active(batch["bit"], params["step"]), losses, 0)

    def run(data_sets: Any, own: Keys, table: jax.Array | None) -> jax.Array:
        keys = run_keys(plan, own, public)
        given = {} if table is None else {"noise_table": table}
        tx: Any = plan.transform(keys, trainable=_moves, **given)

        def step(
            records: Any, phase: str, state: Any, t: jax.Array
        ) -> tuple[Any, jax.Array]:
            here = params | {"step": t}
            given = _batch(plan, keys, t, records, phase)
            update, after = tx.update(None, state, here, value_fn=value_fn, **given)
            released = _released(plan, phase, state, update, after)
            return after, released / _unit(plan, state)

        def releases(records: Any) -> jax.Array:
            def period(state: Any, first: jax.Array) -> tuple[Any, jax.Array]:
                made = []
                for phase in plan.phases:
                    steps = first + jnp.arange(phase.num_steps)
                    one = functools.partial(step, records, phase.name)
                    state, part = jax.lax.scan(one, state, steps)
                    made.append(part)
                    first = first + phase.num_steps
                return state, jnp.concatenate(made)

            length = sum(phase.num_steps for phase in plan.phases)
            starts = jnp.arange(0, plan.num_steps, length)
            made = jax.lax.scan(period, tx.init(params), starts)[1]
            # What goes beyond the plan releases nothing.
            return made.reshape(-1, made.shape[-1])[: plan.num_steps]

        return jax.vmap(releases)(data_sets)

    return jax.jit(jax.vmap(run, in_axes=(None, 0, 0), out_axes=1))


def _released(plan: Any, phase: str, before: Any, update: Any, after: Any) -> jax.Array:
    """All that leaves a step: (R,)."""
    if isinstance(plan, O2NC):
        kept = 0 if phase == "restart" else before.oracle.estimate
        return jnp.append(after.oracle.estimate - kept, after.release)
    return after.release if hasattr(plan, "num_directions") else update["x"]


def _unit(plan: Any, state: Any) -> Any:
    """Standard deviation of the noise that is claimed for the release after a state.

    Where it is correlated, that of one node.
    """
    if isinstance(plan, O2NC):
        return plan.node_std
    if getattr(plan, "isotropic", False):
        # One number, the coordinate along a direction of the length sqrt(d).
        return plan.noise_std / math.sqrt(_parameters(plan)["x"].size)
    if getattr(plan, "clip_tuning", None) is None:
        return plan.noise_std
    in_clips = plan.sensitivity / plan.l2_clip_norm / plan.normalizer
    sums = plan.noise_std * state.clip / plan.l2_clip_norm
    # Of a count, a record is a half.
    count = plan.clip_tuning.count_noise_multiplier * in_clips / 2
    return jnp.append(jnp.full(plan.num_directions, sums), count)


def run_keys(plan: Any, own: Keys, public: Keys) -> Keys:
    """A run's keys: its own roots, but for those that everybody may know."""
    sampling_root = own.sampling if plan.sampling.amplifies else public.sampling
    return dataclasses.replace(own, direction=public.direction, sampling=sampling_root)


def _batch(plan: SumPlan, keys: Keys, step: jax.Array, records: Any, phase: str) -> Any:
    """What ``update`` is given of a step: batch, mask if there is one, and phase."""
    if isinstance(plan.sampling, sampling.External):
        return {"batch": records, "mask": records["present"], "phase": phase}
    batch = sampling.batch(plan, keys, step, records, phase=phase)
    here = batch.mask & batch.records["present"]
    return {"batch": dataclasses.replace(batch, mask=here), "phase": phase}


#: The keys of several runs from their seeds (n,): a pytree with n in front.
make_keys = jax.jit(jax.vmap(Keys.insecure))


class _Remembering:
    """A plan whose derived numbers are computed once: a digest costs as much as a draw."""

    def __init__(self, plan: SumPlan):
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._plan, name)
        setattr(self, name, value)
        return value


def _tables(
    plan: SumPlan, seeds: np.ndarray, words: np.ndarray, public: Keys
) -> np.ndarray:
    """The exact noise of every run, int32 (n, T, R), from its ``noise_words`` (n, 8)."""
    numbers: Any = _Remembering(plan)
    keys = run_keys(plan, Keys.insecure(int(seeds[0])), public)
    draw = functools.partial(exact_noise, numbers, name=plan.family)
    tables = np.stack([draw(dataclasses.replace(keys, noise_words=w)) for w in words])
    # The other secret roots were the first run's: see that nothing comes from them.
    own = run_keys(plan, Keys.insecure(int(seeds[-1])), public)
    state: Any = plan.transform(own, trainable=_moves).init(_parameters(plan))
    if not np.array_equal(state.noise, tables[-1]):
        raise RuntimeError(
            f"the noise that {type(plan).__name__}.transform draws is not that of the "
            "audited runs; an audit of it would say nothing"
        )
    return tables
