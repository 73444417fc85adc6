"""Runs of one plan on the problem of the scaling study, and what is measured of them."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special

import jaxdp
from bench import problems
from jaxdp import Keys, metrics, models, plans, sampling
from jaxdp.core.types import Phase
from jaxdp.models.nonsmooth import NonsmoothProblem

#: Of the smoothed loss; the guarantees are about Goldstein's subdifferential at twice it.
RADIUS = 0.25
#: The norm of x0, and the gap there: the same in every dimension.
DISTANCE = 3.0
#: In so many parts of the run one window each is looked at.
LOOKS = 4
#: Numbers that one step of all seeds at once may take; else seeds follow one another.
_AT_ONCE = 2**17


@functools.cache
def problem(dim: int) -> NonsmoothProblem:
    """The l1 norm over sqrt(d), with linear terms, from ||x0|| = gap = DISTANCE."""
    x0 = np.full(dim, DISTANCE / math.sqrt(dim), np.float32)
    return problems.l1_linear(dim)._replace(x0=x0, initial_gap=DISTANCE)


@functools.cache
def _expected_gradient(dim: int) -> Any:
    """Of the expected loss: E z = 0, and z enters linearly."""
    zero = (np.zeros((1, dim), np.float32),)
    return models.mean_gradient_fn(problem(dim), zero)


@functools.cache
def _smoothed_signs(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """``problems.smoothed_sign`` on a grid of offset / radius: see there."""
    grid = np.linspace(0, 1, 2**14 + 1)
    return grid, scipy.special.betainc(0.5, (dim + 1) / 2, grid**2)


def smoothed_gradients(points: np.ndarray) -> np.ndarray:
    """Of the expected loss, smoothed, at any number of points (..., d)."""
    dim = points.shape[-1]
    near = np.minimum(np.abs(points) / RADIUS, 1)
    signs = np.interp(near, *_smoothed_signs(dim))
    return np.sign(points) * signs / math.sqrt(dim)


# --- runs --------------------------------------------------------------------------


def queries(
    of: NonsmoothProblem,
    plan: plans.O2NC,
    keys: Keys,
    data: Any,
    learning_rate: jax.Array | float | None = None,
) -> jax.Array:
    """All queries of a whole run, (num_steps, d), in one program: those of ``fit``."""
    tx = optax.chain(
        jaxdp.private_oracle(plan, keys),
        jaxdp.o2nc(plan, keys, learning_rate=learning_rate),
    )

    def step(phase: Phase, carry: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        x, state = carry
        batch = sampling.batch(plan, keys, index, data, phase=phase.name)
        update: Any = tx.update
        updates, state = update(
            None, state, x, value_fn=of.value_fn, batch=batch, phase=phase.name
        )
        return (optax.apply_updates(x, updates), state), x

    def period(carry: Any, first: jax.Array) -> tuple[Any, jax.Array]:
        parts = []
        for phase in plan.phases:
            steps = first + jnp.arange(phase.num_steps)
            carry, seen = jax.lax.scan(functools.partial(step, phase), carry, steps)
            first = first + phase.num_steps
            parts.append(seen)
        return carry, jnp.concatenate(parts)

    x = jnp.asarray(of.x0)
    # Steps beyond the plan's last do nothing.
    starts = jnp.arange(0, plan.num_steps, plan.sampling.period)
    _, seen = jax.lax.scan(period, (x, tx.init(x)), starts)
    return seen.reshape(-1, of.dim)[: plan.num_steps]


def run_seeds(
    plan: plans.O2NC,
    dim: int,
    seeds: Sequence[int],
    rates: Sequence[float] | None = None,
) -> np.ndarray:
    """Queries (rates, seeds, num_steps, d); without rates (seeds, num_steps, d).

    Each seed has its own data, directions and noise.
    """
    of = problem(dim)
    every = [of.make_data(plan.num_examples, seed) for seed in seeds]
    data = jax.tree.map(lambda *x: jnp.stack(x), *every)
    keys = jax.vmap(Keys.insecure)(jnp.array(seeds))

    def one(keys: Keys, data: Any, rate: Any = None) -> jax.Array:
        return queries(of, plan, keys, data, rate)

    def all_seeds(rate: Any = None) -> jax.Array:
        fn = functools.partial(one, rate=rate)
        most = max(phase.batch_size for phase in plan.phases)
        if most * plan.num_directions * dim * len(seeds) <= _AT_ONCE:
            return jax.vmap(fn)(keys, data)
        return jax.lax.map(lambda each: fn(*each), (keys, data))

    if rates is None:
        return np.asarray(jax.jit(all_seeds)())
    each = jnp.asarray(rates, jnp.float32)
    return np.asarray(jax.jit(lambda r: jax.lax.map(all_seeds, r))(each))


# --- what is measured ----------------------------------------------------------------


class Measured(NamedTuple):
    """Of several runs, each a number a seed."""

    window_norm: np.ndarray  # mean over windows of |mean of smoothed gradients|
    goldstein: np.ndarray  # of the returned point, an upper bound, at 2 RADIUS


def windows(plan: plans.O2NC, run: np.ndarray) -> np.ndarray:
    """A run's queries (num_steps, d) by windows: (num_windows, queries, d)."""
    size = plan.window - plan.skip_last_query
    whole = len(run) // size
    return run[: whole * size].reshape(whole, size, -1)


def window_norm(plan: plans.O2NC, run: np.ndarray) -> float:
    """What the theorems bound: each window's own mean gradient, mean over windows."""
    means = smoothed_gradients(windows(plan, run)).mean(axis=1)
    return float(np.linalg.norm(means, axis=-1).mean())


def goldstein(
    plan: plans.O2NC, run: np.ndarray, seed: int, looks: int = LOOKS
) -> float:
    """Of the returned point, in expectation over which window's mean it is.

    A window is drawn from each of ``looks`` equal parts of the run.
    """
    points = windows(plan, run).mean(axis=1)
    rng = np.random.default_rng([seed, len(points)])
    places = (np.arange(looks) + rng.uniform(size=looks)) / looks * len(points)
    found = [
        metrics.goldstein_norm(
            _expected_gradient(run.shape[-1]),
            points[i].astype(np.float32),
            2 * RADIUS,
            num_samples=64,
            num_rounds=16,
        )
        for i in places.astype(int)
    ]
    return float(np.mean(found))


def measure(plan: plans.O2NC, runs: np.ndarray, seeds: Sequence[int]) -> Measured:
    """Of the runs of :func:`run_seeds`."""
    norms = [window_norm(plan, run) for run in runs]
    found = [goldstein(plan, run, seed) for run, seed in zip(runs, seeds, strict=True)]
    return Measured(np.array(norms), np.array(found))
