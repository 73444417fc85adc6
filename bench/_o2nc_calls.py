"""What estimates without noise show: how many directions they need, how often clips act.

Of the study's synthetic data, outside of any release: nothing of this is ever logged.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import _o2nc_runs as runs
from bench import _sosp_rules as rules
from jaxdp import plans, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.models.nonsmooth import NonsmoothProblem
from jaxdp.o2nc import oracle as variance_reduced
from jaxdp.o2nc.theory import estimators


def estimates(
    plan: plans.O2NC,
    of: NonsmoothProblem,
    phase: str,
    x: jax.Array,
    previous: jax.Array,
    records: Any,
    key: jax.Array,
) -> jax.Array:
    """What the oracle would bound of every record, (B, d); of the scalar one its vector."""
    free = dataclasses.replace(
        plan,
        num_examples=4,
        num_steps=2,
        window=2,
        sampling=sampling.SinglePassRestarts(
            period=1 if plan.oracle == "scalar" else 2, restart_batch_size=1
        ),
        scale_with_movement=False,
        noise_multiplier=0.0,
        restart_l2_clip_norm=math.inf,
        l2_clip_norm=math.inf,
    )
    moves = lambda path: True  # noqa: E731
    size = variance_reduced.release_size(free.numbers, x, moves, {})
    none = run_state.gaussian(key, 0, size, std=0)

    def one(record: Any, place: jax.Array) -> jax.Array:
        found, _ = variance_reduced.release_increment(
            free.numbers,
            of.value_fn,
            x,
            previous,
            jax.tree.map(lambda a: a[None], record),
            place[None],
            jnp.ones(1, bool),
            key,
            none,
            phase=phase,
            moves=moves,
        )
        return found * free.grid(phase).normalizer

    count = len(jax.tree.leaves(records)[0])
    return jax.vmap(one)(records, jnp.arange(count, dtype=jnp.uint32))


# --- clips -------------------------------------------------------------------------


class Clipped(NamedTuple):
    """Number of records, of some, whose estimates are longer than a clip."""

    count: int
    of: int

    def __str__(self) -> str:
        low, high = rules.share_interval(self.count, self.of)
        return f"{self.count} of {self.of}; [{low:.2g}, {high:.2g}] (95%)"


def count_clipped(lengths: np.ndarray, clip: np.ndarray | float) -> Clipped:
    """Of lengths, how many are above their clip; what is not finite is.

    By more than float32 rounds: a gradient is as long as a Lipschitz constant.
    """
    within = lengths <= np.asarray(clip) * (1 + 1e-5)
    return Clipped(int(np.sum(~within)), lengths.size)


class Lengths(NamedTuple):
    """Of un-noised estimates along a run, one row a query; queries' distances."""

    restart: np.ndarray  # (queries, records)
    difference: np.ndarray  # (queries, records); no column for the scalar oracle
    moved: np.ndarray  # (queries, 1), over the longest move


def lengths(
    plan: plans.O2NC,
    of: NonsmoothProblem,
    seed: int,
    num_queries: int = 100,
    num_records: int = 32,
) -> Lengths:
    """At queries of a private run of the plan, of fresh records of its kind."""
    data = of.make_data(plan.num_examples, seed)
    keys = keys_lib.Keys.insecure(seed)
    path = jax.jit(functools.partial(runs.queries, of, plan))(keys, data)
    places = np.random.default_rng(seed).integers(1, len(path), num_queries)
    x, previous = np.asarray(path)[places], np.asarray(path)[places - 1]
    fresh = of.make_data(num_queries * num_records, seed + 1)
    fresh = jax.tree.map(
        lambda a: a.reshape(num_queries, num_records, *a.shape[1:]), fresh
    )
    each = jax.vmap(lambda i: keys_lib.at_step(keys.direction, i))(
        jnp.arange(num_queries)
    )

    @functools.partial(jax.jit, static_argnums=0)
    def along(phase: str, x: Any, previous: Any, fresh: Any, each: Any) -> jax.Array:
        def one(args: Any) -> jax.Array:
            found = estimates(plan, of, phase, *args)
            return jnp.linalg.norm(found, axis=-1)

        return jax.lax.map(one, (x, previous, fresh, each))

    arguments = (jnp.asarray(x), jnp.asarray(previous), fresh, each)
    restart = np.asarray(along("restart", *arguments))
    moved = np.linalg.norm(x - previous, axis=1, keepdims=True) / (2 * plan.max_step)
    if plan.oracle == "scalar":
        # Slopes along orthonormal directions: as long as their vector, but for a factor.
        restart = restart * plan.num_directions / math.sqrt(of.dim)
        return Lengths(restart, np.zeros((num_queries, 0)), moved)
    return Lengths(restart, np.asarray(along("difference", *arguments)), moved)


def clipped(plan: plans.O2NC, found: Lengths) -> dict[str, Clipped]:
    """Of restarts and of differences, with the clips of a plan."""
    share = np.minimum(found.moved, 1) if plan.scale_with_movement else 1.0
    rates = {"restart": count_clipped(found.restart, plan.restart_l2_clip_norm)}
    if found.difference.size:
        clip = plan.l2_clip_norm * share * np.ones_like(found.difference)
        rates["difference"] = count_clipped(found.difference, clip)
    return rates


# --- directions ----------------------------------------------------------------------

#: Distance of two queries, over the smoothing radius.
MOVED = 0.1
KINDS = ("restart", "independent difference", "common difference")


def error_per_direction(
    oracle: str, kind: str, dim: int, seed: int, draws: int
) -> float:
    """E |estimate - mean|^2 of one record and one direction, where all kinks are near.

    Directions are independent, so that the error of m of them is this over m. At x, whose
    coordinates are normal of size radius / sqrt(d), and at a query MOVED radii from it;
    the record is that of the seed.
    """
    of = runs.problem(dim)
    first_order = oracle == "first_order"
    difference: estimators.Difference
    if kind == "common difference":
        difference = "common" if first_order else "antithetic"
    else:
        difference = "independent"
    plan = plans.O2NC(
        num_examples=4,
        num_steps=2,
        sampling=sampling.SinglePassRestarts(period=2, restart_batch_size=1),
        relation="replace_one",
        noise_multiplier=0.0,
        restart_l2_clip_norm=math.inf,
        l2_clip_norm=math.inf,
        smoothing_radius=runs.RADIUS,
        max_step=runs.RADIUS,
        window=2,
        oracle="first_order" if first_order else "zeroth_order",
        direction="ball" if first_order else "sphere",
        difference=difference,
    )
    rng = np.random.default_rng([seed, dim])
    x = rng.standard_normal(dim) * runs.RADIUS / math.sqrt(dim)
    step = rng.standard_normal(dim)
    y = x + MOVED * runs.RADIUS * step / np.linalg.norm(step)
    (z,) = of.make_data(1, seed)
    phase = "restart" if kind == "restart" else "difference"
    # The same record many times: each has directions of its own.
    records = (np.repeat(z, draws, axis=0),)
    key = keys_lib.Keys.insecure(seed).direction
    found = _estimates(plan, dim, phase, jnp.float32(y), jnp.float32(x), records, key)
    return float(np.var(np.asarray(found, np.float64), axis=0, ddof=1).sum())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _estimates(plan: Any, dim: int, phase: str, *arguments: Any) -> jax.Array:
    return estimates(plan, runs.problem(dim), phase, *arguments)


def saving(kind: str, dim: int, seeds: Sequence[int], draws: int = 2000) -> np.ndarray:
    """Directions over points of the ball for the same error, a number a seed."""
    return np.array(
        [
            error_per_direction("zeroth_order", kind, dim, seed, draws)
            / error_per_direction("first_order", kind, dim, seed, draws)
            for seed in seeds
        ]
    )
