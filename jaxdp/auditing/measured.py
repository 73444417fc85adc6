r"""Plans that measure marginals: neighbouring data sets, transcripts, the claimed attack.

All records but one are in the first cell of every column. The one is in the last cell of
every second column, or, in its place, in the last cell of the others: where a histogram is
uniform, that moves the scores of marginals as far apart as one record can. What is observed
are all measured shares, and which marginals were drawn. The attacker, who knows the plan,
computes the laws of both from what was released before, in integers of its own.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from jaxdp.auditing import simulation
from jaxdp.auditing.attacks import Score, finite
from jaxdp.auditing.canaries import Canary, DataSet, against
from jaxdp.core.keys import Keys
from jaxdp.kernels import simplex

_CELLS = 2**22  # numbers of one run, times runs, that are simulated at once
#: Cells and records at most of a shortened plan.
MOST_CELLS, MOST_RECORDS = 32, 64
# Relative to the mean variance: above what float32 rounds, below any noise.
_RIDGE = 1e-9
_NATS = math.log(2) / 2**simplex.BITS


class Transcripts(NamedTuple):
    """Columns of a transcript's steps: each is (num_runs, T) or (num_runs, T, m)."""

    drawn: np.ndarray  # -1 in the first step
    measured: np.ndarray  # shares, 0 where none
    model: np.ndarray  # counts of the histogram before the step, rounded


def canaries(plan: Any) -> tuple[Canary, ...]:
    """Returns the pairs of data sets that an audit compares."""
    last = plan.num_examples - 1
    return (against(plan, "record that moves scores apart", DataSet("plus", last)),)


def codes(plan: Any, data: DataSet) -> np.ndarray:
    """Returns the records of a data set, int32 (n,)."""
    found = np.zeros(plan.num_examples, np.int32)
    if data.record == "absent":
        found[data.index] = -1
        return found
    odd = np.arange(len(plan.sizes)) % 2 == (1 if data.record == "minus" else 0)
    cells = np.where(odd, np.array(plan.sizes) - 1, 0)
    found[data.index] = np.ravel_multi_index(tuple(cells), plan.sizes)
    return found


def shortened(plan: Any, num_steps: int) -> Any:
    """Returns the plan with fewer steps, and of few cells and records."""
    changes: dict[str, Any] = {}
    if plan.num_steps > num_steps:
        changes["num_steps"] = num_steps
    if plan.num_examples > MOST_RECORDS:
        changes["num_examples"] = MOST_RECORDS
    sizes = plan.sizes
    while len(sizes) > 1 and math.prod(sizes) > MOST_CELLS:
        sizes = sizes[:-1]
    if sizes != plan.sizes:
        inside = [max(one) < len(sizes) for one in plan.attributes]
        kept = tuple(
            one for one, known in zip(plan.attributes, inside, strict=True) if known
        )
        start = sum(inside[: plan.num_start])
        changes |= {"sizes": sizes, "attributes": kept or ((0,),)}
        changes["num_start"] = max(start, 1)
    if not changes:
        return plan
    return dataclasses.replace(plan, noise_multiplier=None, **changes)


def refused(plan: Any) -> str:
    """Returns why a plan cannot be audited, or nothing."""
    if plan.noise_multiplier:
        return ""
    return f"have noise to be audited, got noise_multiplier = {plan.noise_multiplier!r}"


def transcripts(
    plan: Any, data: Sequence[DataSet], num_runs: int, seed: int
) -> np.ndarray:
    """Simulates runs of ``plan.algorithm``, as :func:`.simulation.transcripts` does.

    Returns:
      float32 (len(data), num_runs, T, 1 + 2 m): the fields of :class:`Transcripts`.
    """
    public, queries = Keys.insecure(seed), plan.queries
    # One step more, which is not run: its noise is the same, and the last one fits longest.
    longer = dataclasses.replace(plan, num_steps=plan.num_steps + 1)
    which = np.repeat(np.arange(len(queries.columns)), np.diff(queries.offsets))

    def sums(fit: Any) -> jax.Array:
        return fit.shares * fit.times[which]

    def run(records: Any, own: Keys) -> jax.Array:
        algorithm = longer.algorithm(simulation.run_keys(plan, own, public))

        def step(state: Any, _: None) -> tuple[Any, jax.Array]:
            model = queries.counts(state.fit.histogram) * plan.num_examples
            after, info = algorithm.step(state, records, value_fn=queries)
            new = sums(after.fit) - sums(state.fit)
            return after, jnp.concatenate([info.release[:1], new, jnp.round(model)])

        begun = algorithm.init(plan.uniform())
        return jax.lax.scan(step, begun, None, length=plan.num_steps)[1]

    both = jax.vmap(run, in_axes=(0, None))
    compiled = jax.jit(jax.vmap(both, in_axes=(None, 0), out_axes=1))
    records = np.stack([codes(plan, one) for one in data])
    own = simulation.make_keys(simulation.run_seeds(num_runs, seed))
    numbers = queries.domain_size + plan.num_steps * (1 + 2 * queries.num_queries)
    at_once = _CELLS // (len(data) * numbers)
    return simulation.in_parts(lambda k: compiled(records, k), own, num_runs, at_once)


def read(plan: Any, made: np.ndarray) -> Transcripts:
    """Returns the fields of transcripts (num_runs, T, 1 + 2 m)."""
    size = plan.queries.num_queries
    drawn = np.rint(made[..., 0]).astype(np.int64)
    measured = made[..., 1 : 1 + size].astype(float)
    return Transcripts(drawn, measured, np.rint(made[..., 1 + size :]).astype(np.int64))


def attacks(
    plan: Any, canary: Canary, first: np.ndarray, second: np.ndarray
) -> dict[str, Score]:
    """Returns all attacks by name.

    * *likelihood ratio*: the claimed one, of the noise and of the draws together.
    * *covariance*: the same, but of noise that has the covariance of its first cells in all
      steps, which is learned. It finds what noise has in common between steps.
    * *draws*: of the draws alone.
    """
    counts = [true_counts(plan, data) for data in (canary.first, canary.second)]

    means = [each / plan.num_examples for each in counts]
    apart, middle = means[0] - means[1], (means[0] + means[1]) / 2
    learned = (first, means[0]), (second, means[1])
    noise = np.concatenate([_leading(plan, made, mean)[0] for made, mean in learned])
    covariance = noise.T @ noise / len(noise)
    ridge = _RIDGE * np.trace(covariance) / len(covariance)
    precision = np.linalg.inv(covariance + ridge * np.eye(len(covariance)))

    def draws(made: np.ndarray) -> np.ndarray:
        seen = read(plan, made)
        one, other = (log_draws(plan, seen, each) for each in counts)
        return (one - other).sum(axis=1)

    def claimed(made: np.ndarray) -> np.ndarray:
        seen = read(plan, made)
        off = np.where(measured_cells(plan, seen), seen.measured - middle, 0)
        return draws(made) + (off @ apart).sum(axis=1) / plan.noise_std**2

    def correlated(made: np.ndarray) -> np.ndarray:
        off, at = _leading(plan, made, middle)
        return draws(made) + ((off @ precision) * apart[at]).sum(axis=1)

    return {"likelihood ratio": claimed, "covariance": correlated, "draws": draws}


def _leading(
    plan: Any, made: np.ndarray, mean: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what was measured less its mean, (num_runs, k), and of which cells it is.

    All cells of the first step, and of the others as many as every marginal has, so that
    noise that steps share is in the same columns, whatever was drawn.
    """
    seen, offsets = read(plan, made), plan.queries.offsets
    start, width = int(offsets[plan.num_start]), int(np.min(np.diff(offsets)))
    drawn = offsets[seen.drawn[:, 1:], None] + np.arange(width)
    begun = np.broadcast_to(np.arange(start), (len(made), start))
    at = np.concatenate([begun, drawn.reshape(len(made), -1)], axis=1)
    step = np.repeat(
        np.arange(plan.num_steps), [start] + [width] * (plan.num_steps - 1)
    )
    found = seen.measured[np.arange(len(made))[:, None], step, at]
    return finite(found - mean[at]), at


def true_counts(plan: Any, data: DataSet) -> np.ndarray:
    """Counts the records in every cell of every marginal, int64 (m,)."""
    inside = codes(plan, data)
    inside = inside[inside >= 0]
    table = np.bincount(inside, minlength=math.prod(plan.sizes)).reshape(plan.sizes)
    axes = range(len(plan.sizes))
    parts = [
        table.sum(tuple(a for a in axes if a not in one)) for one in plan.attributes
    ]
    return np.concatenate([part.reshape(-1) for part in parts])


def measured_cells(plan: Any, seen: Transcripts) -> np.ndarray:
    """Returns True where a step measured a cell, bool (num_runs, T, m)."""
    offsets = plan.queries.offsets
    which = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    later = which == seen.drawn[..., None]
    return np.where(seen.drawn[..., None] < 0, which < plan.num_start, later)


def log_draws(plan: Any, seen: Transcripts, counts: np.ndarray) -> np.ndarray:
    """Returns the claimed log-probabilities of the draws (num_runs, T); 0 of none."""
    offsets, grid = plan.queries.offsets[:-1], plan.score_grid
    errors = np.add.reduceat(np.abs(counts - seen.model), offsets, axis=-1)
    each = grid.multiplier * 2.0 ** (grid.bits - grid.shift) * _NATS
    law = log_softmax((errors - np.array(plan.penalties)) * each, axis=-1)
    drawn = np.maximum(seen.drawn, 0)[..., None]
    found = np.take_along_axis(law, drawn, axis=-1)[..., 0]
    return np.where(seen.drawn < 0, 0.0, found)
