"""Transcripts of the compiled mechanism on neighbouring data sets."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import sampling
from jaxdp.auditing.canaries import Canary as Canary
from jaxdp.auditing.canaries import DataSet as DataSet
from jaxdp.auditing.canaries import amplitudes, phases
from jaxdp.auditing.canaries import canaries as canaries
from jaxdp.auditing.canaries import num_records as num_records
from jaxdp.core.keys import Keys
from jaxdp.dpzero.transform import laplace_noise
from jaxdp.mechanism.sum_plan import SumPlan
from jaxdp.o2nc.plan import O2NC

# Slope of the canary over the clip: so steep that in no direction it stays below.
_STEEP = 1e6
_CELLS = 2**23  # numbers of one run, times runs, that are simulated at once
# Where noise is scaled with the distance of two queries: how far apart they are, over the
# longest move of the learner. The last is the same point again.
_MOVES = (1.0, 0.5, 2.0, 0.0)
_LEAST = 2.0**-20  # to which share of a clip it is scaled at least


def transcripts(
    plan: SumPlan, data: Sequence[DataSet], num_runs: int, seed: int
) -> np.ndarray:
    """Simulates ``num_runs`` runs of a plan on each data set; returns their releases.

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
      claimed noise. R is the number of directions, and one more if the clip is tuned;
      for a plan without directions it is that of the coordinates of the update, which is
      what such a plan releases. For ``plans.O2NC`` it is d + 1: the increment of the
      released estimate, and its norm as it is logged. (The scalar oracle's estimate has
      at least as many coordinates as slopes were released.)

    Raises:
      RuntimeError: the noise is not what the plan's transformation would draw.
    """
    seeds, public = run_seeds(num_runs, seed), Keys.insecure(seed)
    own = make_keys(seeds)
    tables = noise_tables(plan, seeds, own, public)
    records = jax.tree.map(
        lambda *rows: np.stack(rows), *(_records(plan, one) for one in data)
    )
    grown = np.stack([amplitudes(plan, one) for one in data])
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
        made = run(records, grown, *given)
        parts.append(np.asarray(made)[:, begin - first :])
    return np.concatenate(parts, axis=1)


def run_seeds(num_runs: int, seed: int) -> np.ndarray:
    """Returns a different seed of ``Keys.insecure`` for every run: uint32 (num_runs,)."""
    start = np.random.default_rng(seed).integers(2**32, dtype=np.uint64)
    return ((start + np.arange(num_runs, dtype=np.uint64)) % 2**32).astype(np.uint32)


def _parameters(plan: SumPlan) -> dict[str, jax.Array]:
    """Returns initial parameters: the trainable ones, the query and the step number.

    Losses may read the query and the step number.
    """
    dim = max(2, getattr(plan, "num_directions", 1))
    zeros = jnp.zeros(dim)
    return {"x": zeros, "query": zeros, "step": jnp.zeros((), jnp.int32)}


def _moves(path: str) -> bool:
    return path == "x"


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


def _records(plan: SumPlan, data: DataSet) -> dict[str, np.ndarray]:
    """Returns the gradients of the records' linear losses, and the mask of present rows."""
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
    return {"slopes": slopes, "present": present}


def _compiled(plan: SumPlan, public: Keys) -> Callable[..., jax.Array]:
    """Returns the compiled simulation of n runs on W data sets: releases (W, n, T, R).

    It takes the records of W data sets, their amplitudes (W, T), keys (n,), and tables
    (n, T, R) or None.
    """
    params = _parameters(plan)
    queries, scales = (jnp.asarray(x, jnp.float32) for x in walk(plan))

    def run(
        data_sets: Any, grown: jax.Array, own: Keys, table: jax.Array | None
    ) -> jax.Array:
        keys = run_keys(plan, own, public)
        given = {} if table is None else {"noise_table": table}
        tx: Any = plan.transform(keys, trainable=_moves, **given)

        def step(
            records: Any, grown: jax.Array, phase: str, state: Any, t: jax.Array
        ) -> tuple[Any, jax.Array]:
            def value_fn(params: Any, batch: Any) -> jax.Array:
                from_query = params["x"] - params["query"]
                losses = jnp.sum(batch["slopes"] * from_query, axis=-1)
                return losses * grown[params["step"]]

            query = params["x"].at[0].set(queries[t])
            here = {"x": query, "query": query, "step": t}
            given = batch_of(plan, keys, t, records, phase)
            update, after = tx.update(None, state, here, value_fn=value_fn, **given)
            released = _released(plan, phase, state, update, after)
            return after, released / (_unit(plan, phase, state) * scales[t])

        def releases(records: Any, grown: jax.Array) -> jax.Array:
            def period(state: Any, first: jax.Array) -> tuple[Any, jax.Array]:
                made = []
                for phase in plan.phases:
                    steps = first + jnp.arange(phase.num_steps)
                    one = functools.partial(step, records, grown, phase.name)
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


def _released(plan: Any, phase: str, before: Any, update: Any, after: Any) -> jax.Array:
    """Returns the numbers that a step releases: (R,)."""
    if isinstance(plan, O2NC):
        kept = 0 if phase == "restart" else before.oracle.estimate
        return jnp.append(after.oracle.estimate - kept, after.release)
    return after.release if hasattr(plan, "num_directions") else update["x"]


def _unit(plan: Any, phase: str, state: Any) -> Any:
    """Returns the claimed standard deviation of the noise on the release after a state.

    With correlated noise it is that of one node; with scaled noise, that at the largest
    scale.
    """
    dim = _parameters(plan)["x"].size
    if isinstance(plan, O2NC):
        # Of a slope it moves the estimate by a direction, of length sqrt(d), over m.
        slopes = plan.oracle == "scalar"
        length = math.sqrt(dim) / plan.num_directions if slopes else 1.0
        return plan.step_std(phase) * length
    if getattr(plan, "isotropic", False):
        # One number, the coordinate along a direction of the length sqrt(d).
        return plan.noise_std / math.sqrt(dim)
    if getattr(plan, "clip_tuning", None) is None:
        return plan.noise_std
    in_clips = plan.sensitivity / plan.l2_clip_norm / plan.normalizer
    sums = plan.noise_std * state.clip / plan.l2_clip_norm
    # Of a count, a record is a half.
    count = plan.clip_tuning.count_noise_multiplier * in_clips / 2
    return jnp.append(jnp.full(plan.num_directions, sums), count)


def run_keys(plan: Any, own: Keys, public: Keys) -> Keys:
    """Returns a run's keys: its own roots, except for those that everybody may know."""
    sampling_root = own.sampling if plan.sampling.amplifies else public.sampling
    return dataclasses.replace(own, direction=public.direction, sampling=sampling_root)


def batch_of(
    plan: SumPlan, keys: Keys, step: jax.Array, records: Any, phase: str
) -> Any:
    """Returns arguments of ``update``: batch, phase, and the mask of an external batch."""
    if isinstance(plan.sampling, sampling.External):
        return {"batch": records, "mask": records["present"], "phase": phase}
    batch = sampling.batch(plan, keys, step, records, phase=phase)
    here = batch.mask & batch.records["present"]
    return {"batch": dataclasses.replace(batch, mask=here), "phase": phase}


#: The keys of several runs from their seeds (n,): a pytree with n in front.
make_keys = jax.jit(jax.vmap(Keys.insecure))


def noise_tables(
    plan: Any, seeds: np.ndarray, own: Keys, public: Keys
) -> np.ndarray | None:
    """Returns the Laplace noise of every run, int32 (n, T, R); None if not host-drawn.

    Raises:
      RuntimeError: it is not what the plan's transformation would draw.
    """
    if getattr(plan, "noise", None) != "laplace":
        return None
    return _tables(plan, seeds, np.asarray(own.noise_words), public)


def _tables(
    plan: SumPlan, seeds: np.ndarray, words: np.ndarray, public: Keys
) -> np.ndarray:
    """Draws every run's Laplace noise, int32 (n, T, R), from its ``noise_words`` (n, 8)."""
    keys = run_keys(plan, Keys.insecure(int(seeds[0])), public)
    draw = functools.partial(laplace_noise, plan.numbers, name=plan.family)
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
