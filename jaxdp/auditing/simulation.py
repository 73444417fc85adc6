"""Transcripts of the compiled mechanism on neighbouring data sets."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import sampling
from jaxdp.auditing import units
from jaxdp.auditing.canaries import VALUES, DataSet, amplitudes, num_records, phases
from jaxdp.auditing.units import Unit
from jaxdp.core.keys import Keys
from jaxdp.dpzero.transform import laplace_noise

# Slope of the canary over the clip: so steep that in no direction it stays below.
_STEEP = 1e6
_CELLS = 2**23  # numbers of one run, times runs, that are simulated at once
# Where noise is scaled with the distance of two queries: how far apart they are, over the
# longest move of the learner. The last is the same point again.
_MOVES = (1.0, 0.5, 2.0, 0.0)
_LEAST = 2.0**-20  # to which share of a clip it is scaled at least


class Rows(NamedTuple):
    """Rows of a data set as a run gets them, and which of them are there."""

    data: Any
    present: Any  # bool (n,)


def transcripts(
    plan: Any, data: Sequence[DataSet], num_runs: int, seed: int
) -> np.ndarray:
    """Simulates ``num_runs`` runs of a plan on each data set; returns their releases.

    All data sets have rows of one unit.

    What runs is ``plan.transform`` on batches of ``jaxdp.sampling.batch``, under jit, vmap
    and scan. Laplace noise is drawn on the host, by the function that the transformation
    itself calls. Every run has noise and sampling roots of its own, the same on every
    data set; all have the direction root of ``Keys.insecure(seed)``, and its sampling root
    too where the order of records need not be secret.

    The canary's loss is linear and steep, and zero at the query, so that nothing would be
    different at other queries, but for rounding. And it grows with the step, so that its
    change from step to step is as steep. The queries stay at zero; or, where noise is
    scaled with their distance, follow a public path.

    Returns:
      float32 (len(data), num_runs, num_steps, R): releases in standard deviations of the
      claimed noise. R is the number of directions, and one more if the clip is tuned; of
      gradients that of their coordinates. Of ``plans.O2NC`` it is d + 1: the increment of
      the released estimate (at least as many coordinates as slopes), a count before the
      last if the clip is tuned, and the increment's logged norm.
    """
    seeds, public = run_seeds(num_runs, seed), Keys.insecure(seed)
    own = make_keys(seeds)
    rows = stacked([_rows(plan, one) for one in data])
    grown = np.stack([amplitudes(plan, one) for one in data])
    run = _compiled(plan, public, data[0].unit)
    # Where no run draws records of its own, what it adds is no more than its releases.
    numbers = len(data) * _parameters(plan)["x"].size
    if plan.sampling.amplifies:
        numbers = sum(x.size for x in jax.tree.leaves(rows.data))
    given = own, noise_tables(plan, seeds, own, public)
    return in_parts(
        lambda part: run(rows, grown, *part), given, num_runs, _CELLS // numbers
    )


def stacked(trees: Sequence[Any]) -> Any:
    """Stacks the leaves of trees of one structure."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def in_parts(run: Callable[[Any], Any], given: Any, num_runs: int, at_once: int) -> Any:
    """Simulates runs in parts of one size, ``at_once`` at the most; returns all of them.

    ``run`` makes a tree of arrays (W, n, ...) of the arguments of n runs: of rows of
    ``given``, a tree of arrays (num_runs, ...).
    """
    at_once, parts = max(1, min(num_runs, at_once)), []
    for begin in range(0, num_runs, at_once):
        # The last part overlaps the one before it: one shape, compiled once.
        first = min(begin, num_runs - at_once)
        part = operator.itemgetter(slice(first, first + at_once))
        new = operator.itemgetter((slice(None), slice(begin - first, None)))
        made = jax.tree.map(np.asarray, run(jax.tree.map(part, given)))
        parts.append(jax.tree.map(new, made))
    return jax.tree.map(lambda *made: np.concatenate(made, axis=1), *parts)


def run_seeds(num_runs: int, seed: int) -> np.ndarray:
    """Returns a different seed of ``Keys.insecure`` for every run: uint32 (num_runs,)."""
    start = np.random.default_rng(seed).integers(2**32, dtype=np.uint64)
    return ((start + np.arange(num_runs, dtype=np.uint64)) % 2**32).astype(np.uint32)


#: The keys of several runs from their seeds (n,): a pytree with n in front.
make_keys = jax.jit(jax.vmap(Keys.insecure))


def run_keys(plan: Any, own: Keys, public: Keys) -> Keys:
    """Returns a run's keys: its own roots, except for those that everybody may know."""
    sampling_root = own.sampling if plan.sampling.amplifies else public.sampling
    return dataclasses.replace(own, direction=public.direction, sampling=sampling_root)


def batch_of(
    plan: Any, keys: Keys, step: jax.Array, rows: Rows, phase: str
) -> dict[str, Any]:
    """Returns arguments of ``update``: batch, phase, and the mask of an external batch."""
    if isinstance(plan.sampling, sampling.External):
        return {"batch": rows.data, "mask": rows.present, "phase": phase}
    batch = sampling.batch(plan, keys, step, rows, phase=phase)
    read, here = batch.records.data, batch.mask & batch.records.present
    return {
        "batch": dataclasses.replace(batch, records=read, mask=here),
        "phase": phase,
    }


def noise_tables(
    plan: Any, seeds: np.ndarray, own: Keys, public: Keys
) -> np.ndarray | None:
    """Returns the Laplace noise of every run, int32 (n, T, R); None if not host-drawn."""
    if getattr(plan, "noise", None) != "laplace":
        return None
    keys = run_keys(plan, Keys.insecure(int(seeds[0])), public)
    tables = np.stack(
        [
            laplace_noise(
                plan.numbers, dataclasses.replace(keys, noise_words=w), plan.family
            )
            for w in np.asarray(own.noise_words)
        ]
    )
    # The other secret roots were the first run's: see that nothing comes from them.
    last = run_keys(plan, Keys.insecure(int(seeds[-1])), public)
    state: Any = plan.transform(last, trainable=moves).init(_parameters(plan))
    if not np.array_equal(state.noise, tables[-1]):
        raise RuntimeError(
            f"the noise that {type(plan).__name__}.transform draws is not that of the "
            "audited runs; an audit of it would say nothing"
        )
    return tables


def moves(path: str) -> bool:
    """Selects the parameters that move; losses read the query and the step number too."""
    return path == "x"


def _parameters(plan: Any) -> dict[str, jax.Array]:
    zeros = jnp.zeros(max(2, getattr(plan, "num_directions", 1)))
    return {"x": zeros, "query": zeros, "step": jnp.zeros((), jnp.int32)}


def walk(plan: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the queries' first coordinate, float32 (T,), and the noise scales (T,)."""
    steps, scales = plan.num_steps, np.ones(plan.num_steps)
    if not getattr(plan, "scale_with_movement", False):
        return np.zeros(steps, np.float32), scales
    longest = 2 * plan.max_step
    queries = np.zeros(steps, np.float32)
    for t in range(1, steps):
        length = _MOVES[t % len(_MOVES)] * longest
        queries[t] = queries[t - 1] - math.copysign(length, queries[t - 1])
    moved = np.abs(np.diff(queries)) / longest
    changes = np.array(phases(plan)) == "difference"
    scales[1:] = np.where(changes[1:], np.clip(moved, _LEAST, 1), 1)
    return queries, scales


def _rows(plan: Any, data: DataSet) -> Rows:
    """Returns the gradients of the records' linear losses, and which rows are present."""
    size = num_records(plan)
    slopes = np.zeros((size, _parameters(plan)["x"].size), np.float32)
    bounds: Any = getattr(plan, "clips", {"step": (plan.l2_clip_norm, size)})
    steep = _STEEP * max(bound for bound, _ in bounds.values())
    slopes[:, 0] = steep * data.crowded
    slopes[data.index] = 0
    slopes[data.index, data.axis] = steep * VALUES[data.record]
    # Users who are not there have no records, which the transform itself must see.
    present = np.ones(size, bool)
    present[data.index] = data.record != "absent" or data.unit is not units.RECORD
    return Rows(data.unit.data(slopes, data.index, data.record), present)


def _compiled(plan: Any, public: Keys, unit: Unit) -> Callable[..., jax.Array]:
    """Returns the compiled simulation: releases (W, n, T, R) of n runs on W data sets.

    Of the rows, amplitudes (W, T), keys (n,), and tables (n, T, R) or None.
    """
    params = _parameters(plan)
    queries, scales = (jnp.asarray(x, jnp.float32) for x in walk(plan))

    def value_fn(params: Any, slopes: Any, grown: jax.Array) -> jax.Array:
        from_query = params["x"] - params["query"]
        losses = jnp.sum(slopes * from_query, axis=-1)
        return losses * grown[params["step"]]

    def run(
        data_sets: Any, grown: jax.Array, own: Keys, table: jax.Array | None
    ) -> jax.Array:
        keys = run_keys(plan, own, public)
        given = {} if table is None else {"noise_table": table}
        tx: Any = plan.transform(keys, trainable=moves, **given)

        def step(
            rows: Rows, grown: jax.Array, phase: str, state: Any, t: jax.Array
        ) -> tuple[Any, jax.Array]:
            query = params["x"].at[0].set(queries[t])
            here = {"x": query, "query": query, "step": t}
            loss = unit.loss(functools.partial(value_fn, grown=grown))
            given = batch_of(plan, keys, t, rows, phase)
            update, after = tx.update(None, state, here, value_fn=loss, **given)
            released, std = _released(plan, phase, state, update["x"], after)
            return after, released / (std * scales[t])

        def releases(rows: Rows, grown: jax.Array) -> jax.Array:
            def period(state: Any, first: jax.Array) -> tuple[Any, jax.Array]:
                made = []
                for phase in plan.phases:
                    steps = first + jnp.arange(phase.num_steps)
                    one = functools.partial(step, rows, grown, phase.name)
                    state, part = jax.lax.scan(one, state, steps)
                    made.append(part)
                    first = first + phase.num_steps
                return state, jnp.concatenate(made)

            length = sum(phase.num_steps for phase in plan.phases)
            starts = jnp.arange(0, plan.num_steps, length)
            made = jax.lax.scan(period, tx.init(params), starts)[1]
            # What goes beyond the plan releases nothing.
            return made.reshape(-1, made.shape[-1])[: plan.num_steps]

        return jax.vmap(releases)(data_sets, grown)

    return jax.jit(jax.vmap(run, in_axes=(None, None, 0, 0), out_axes=1))


def _released(
    plan: Any, phase: str, before: Any, update: jax.Array, after: Any
) -> tuple[jax.Array, Any]:
    """Returns the numbers that a step releases, (R,), and their noise's claimed deviation.

    That is one node's, of correlated noise; and at the largest scale, of scaled noise.
    """
    if plan.released == "gradients":
        if plan.clip_tuning is None:
            return update, plan.noise_std
        return jnp.append(update, after.release[-1]), _tuned(plan, update.size, before)
    if plan.released == "increments":
        kept = 0 if phase == "restart" else before.oracle.estimate
        # Of a slope it moves the estimate by a direction, over how many there are.
        slopes = plan.describe().slopes
        length = math.sqrt(update.size) / slopes if slopes else 1.0
        released = jnp.append(after.oracle.estimate - kept, after.release[::-1])
        std = plan.step_std(phase) * length
        if plan.clip_tuning is None:
            return released, std
        of_count = plan.numbers.count_grid
        std *= after.oracle.clip[0] / plan.grid("restart").l2_clip_norm
        count = of_count.noise_std * of_count.noise_unit
        return released, jnp.full(len(released), std).at[-2].set(count)
    if plan.isotropic:
        # One number, the coordinate along a direction of the length sqrt(d).
        return after.release, plan.noise_std / math.sqrt(update.size)
    if plan.clip_tuning is None:
        return after.release, plan.noise_std
    return after.release, _tuned(plan, plan.num_directions, before)


def _tuned(plan: Any, size: int, before: Any) -> jax.Array:
    """Returns the deviations of the noise on a sum with a tuned clip, and on the count."""
    in_clips = plan.sensitivity / plan.l2_clip_norm / plan.normalizer
    sums = plan.noise_std * before.clip / plan.l2_clip_norm
    # Of a count, a record is a half.
    count = plan.clip_tuning.count_noise_multiplier * in_clips / 2
    return jnp.append(jnp.full(size, sums), count)
