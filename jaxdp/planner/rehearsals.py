"""Rehearsals: runs on public records with the noise of the private run.

Their laws are those of the algorithms, but in float32: softmaxes stand for certified draws,
and clipped gradients are not rounded to a grid. In return all numbers of a plan are
arguments of the program, and one program of a method serves every plan. Noise on a mean
depends on the number of records by its size alone, which is kept. A batch is of the public
records in turn, and of all of them where it is larger.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.core.averaging import polyak_output
from jaxdp.core.keys import at_step
from jaxdp.kernels.clip import clip_vector
from jaxdp.kernels.finite_difference import num_rows, on_one_record, over_records
from jaxdp.saddle.oracles.sums import finite, middle, mirrored, vertex_rows

#: The most vertices that a step draws of a player.
MOST_DRAWS = 256
#: Records whose gradients are taken at once.
_CHUNK = 64

Points = tuple[jax.Array, ...]


class Game(NamedTuple):
    """A problem of one player or two, with public records."""

    problem: Any
    records: Any
    domains: tuple[Any, ...]
    start: Points  # of descent and ascent

    @property
    def dims(self) -> list[int]:
        """Numbers of vertices."""
        return [domain.num_vertices for domain in self.domains]

    def at(self, weights: Any) -> Points:
        """Returns points of weights of the vertices."""
        pairs = zip(self.domains, weights, strict=True)
        return tuple(domain.point(one) for domain, one in pairs)


def gradients(problem: Any, points: Points, records: Any) -> tuple[Points, jax.Array]:
    """Computes the records' gradients by each point, (B, p), and which are finite, (B,)."""

    def loss(points: Any, record: Any) -> jax.Array:
        return on_one_record(problem, *points, record)[0]

    rows = over_records(jax.grad(loss), (None, 0))(points, records)
    ok = jnp.ones(num_rows(records), bool)
    for part in rows:
        ok = ok & finite(part)
    return rows, ok


def _mean(of: Game, points: Points, step: Any, size: Any, bounded: Callable) -> Any:
    """Computes the mean of bounded gradients over ``size`` records, the batch of a step.

    ``bounded`` takes gradients and which of them count, and returns rows and the same.
    """
    count = num_rows(of.records)
    size = jnp.minimum(size, count)
    first = step * size % count

    def part(i: Any) -> Any:
        place = i * _CHUNK + jnp.arange(_CHUNK)
        where = (first + place) % count
        some = jax.tree.map(lambda leaf: leaf[where], of.records)
        rows, ok = bounded(*gradients(of.problem, points, some))
        ok = (ok & (place < size))[:, None]
        return jax.tree.map(lambda x: jnp.where(ok, x, 0).sum(axis=0) / size, rows)

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(part, 0))
    add = lambda i, total: jax.tree.map(jnp.add, total, part(i))  # noqa: E731
    return jax.lax.fori_loop(0, -(-size // _CHUNK), add, zeros)


def _vertex_mean(of: Game, weights: Any, step: Any, size: Any, clips: Any) -> Points:
    """Computes a batch's mean of centred, clipped derivatives by weights of vertices."""

    def bounded(rows: Points, ok: jax.Array) -> tuple[Points, jax.Array]:
        found = []
        for domain, part, bound in zip(of.domains, rows, clips, strict=True):
            part, ok = vertex_rows(domain, part, ok)
            found.append(jnp.clip(part - middle(domain, part), -bound, bound))
        return tuple(found), ok

    means = _mean(of, of.at(weights), step, size, bounded)
    return tuple(map(mirrored, of.domains, means))


def _draws(key: jax.Array, weights: jax.Array, count: int = MOST_DRAWS + 1) -> Any:
    """Draws ``count`` vertices with probability in proportion to their weights."""
    sums = jnp.cumsum(weights)
    at = jax.random.uniform(key, (count,)) * sums[-1]
    return jnp.minimum(jnp.searchsorted(sums, at, side="right"), len(weights) - 1)


def _mean_of(vertices: jax.Array, counted: jax.Array, dim: int) -> jax.Array:
    """Computes the mean of those vertices that count, as weights (dim,)."""
    totals = jnp.zeros(dim).at[vertices].add(counted.astype(jnp.float32))
    return totals / jnp.sum(totals)


class Mirror(NamedTuple):
    """Numbers of mirror descent of two players; those below ``levels`` are by level.

    The gradient of a step is the sum of ``factors`` times gradients at means of the first
    ``num_draws``, (levels, G) each.
    """

    num_steps: Any
    step_sizes: Any
    clips: Any
    levels: Any  # of each step; where they are too few, the last one is of the others
    batch_sizes: Any
    num_draws: Any
    factors: Any
    outputs: Any  # first and last of the draws that count for the output, (levels, 2)


def mirror(of: Game, plan: Mirror, key: jax.Array) -> Points:
    """Rehearses ``Saddle`` or ``SaddleBiasReduced``: returns the points that it gives."""
    at = jnp.arange(MOST_DRAWS + 1)

    def step(t: Any, carry: Any) -> Any:
        scores, outputs = carry
        level = plan.levels[jnp.minimum(t, len(plan.levels) - 1)]
        keys = [at_step(at_step(key, t), player) for player in range(2)]
        drawn = [
            _draws(k, jax.nn.softmax(s)) for k, s in zip(keys, scores, strict=True)
        ]

        def gradient(number: Any) -> Points:
            pairs = zip(drawn, of.dims, strict=True)
            seen = [_mean_of(one, at < number, dim) for one, dim in pairs]
            return _vertex_mean(of, seen, t, plan.batch_sizes[level], plan.clips)

        found = jax.vmap(gradient)(plan.num_draws[level])
        first, last = plan.outputs[level]
        shown = ((first <= at) & (at <= last)).astype(jnp.float32)
        moved, totals = [], []
        for i, sign in enumerate((-1, 1)):
            score = (
                scores[i] + sign * plan.step_sizes[i] * plan.factors[level] @ found[i]
            )
            moved.append(score - jnp.max(score))
            totals.append(outputs[i].at[drawn[i]].add(shown))
        return moved, totals

    zeros = [jnp.zeros(dim) for dim in of.dims]
    _, totals = jax.lax.fori_loop(0, plan.num_steps, step, (zeros, zeros))
    return of.at([total / jnp.sum(total) for total in totals])


class Convex(NamedTuple):
    """Numbers of ``ConvexSimplex``."""

    num_steps: Any
    step_size: Any
    clip: Any
    batch_size: Any
    num_draws: Any
    refresh_every: Any


def convex(of: Game, plan: Convex, key: jax.Array) -> Points:
    """Rehearses ``ConvexSimplex``: the mean of vertices of the last average."""
    (dim,), counted = of.dims, jnp.arange(MOST_DRAWS + 1) < plan.num_draws

    def drawn(t: Any, average: jax.Array) -> jax.Array:
        return _mean_of(_draws(at_step(key, t), average), counted, dim)

    def step(t: Any, carry: Any) -> Any:
        scores, average, seen = carry
        average = average + (jax.nn.softmax(scores) - average) / (t + 1)
        new = (t < plan.refresh_every) | ((t + 1) % plan.refresh_every == 0)
        seen = jnp.where(new, drawn(t, average), seen)
        (mean,) = _vertex_mean(of, [seen], t, plan.batch_size, [plan.clip])
        scores = scores - plan.step_size * mean
        return scores - jnp.max(scores), average, seen

    start = (jnp.zeros(dim), jnp.zeros(dim), jnp.zeros(dim))
    _, average, _ = jax.lax.fori_loop(0, plan.num_steps, step, start)
    return of.at([drawn(plan.num_steps, average)])


class FrankWolfe(NamedTuple):
    """Numbers of ``FrankWolfe``."""

    num_steps: Any
    inverse_temperature: Any
    clip: Any
    batch_size: Any


def frank_wolfe(of: Game, plan: FrankWolfe, key: jax.Array) -> Points:
    """Rehearses ``FrankWolfe``: the last iterate."""
    (dim,) = of.dims

    def step(t: Any, weights: jax.Array) -> jax.Array:
        (mean,) = _vertex_mean(of, [weights], t, plan.batch_size, [plan.clip])
        likely = jax.nn.softmax(-plan.inverse_temperature * mean)
        vertex = _draws(at_step(key, t), likely, 1)
        rate = 2 / (t + 3)
        return ((1 - rate) * weights).at[vertex].add(rate)

    weights = jnp.full(dim, 1 / dim)
    return of.at([jax.lax.fori_loop(0, plan.num_steps, step, weights)])


class Descent(NamedTuple):
    """Numbers of DP-SGDA."""

    num_steps: Any
    step_size: Any
    clip: Any
    batch_size: Any
    noise_std: Any  # of a mean


def descent_ascent(
    of: Game,
    optimizer: Callable[[Any], optax.GradientTransformation],
    plan: Descent,
    key: jax.Array,
) -> Points:
    """Rehearses DP-SGDA: the mean of the iterates."""

    def bounded(rows: Points, ok: jax.Array) -> tuple[jax.Array, jax.Array]:
        joined = jnp.where(ok[:, None], jnp.concatenate(rows, axis=1), 0)
        return clip_vector(joined, plan.clip), ok

    made, split = optimizer(plan.step_size), len(of.start[0])

    def step(t: Any, carry: Any) -> Any:
        points, state = carry
        mean = _mean(of, points, t, plan.batch_size, bounded)
        noise = jax.random.normal(at_step(key, t), mean.shape)
        mean = mean + plan.noise_std * noise
        updates = mean[:split], mean[split:]
        updates, state = made.update(updates, state, points)
        return optax.apply_updates(points, updates), state

    start = (of.start, made.init(of.start))
    return polyak_output(jax.lax.fori_loop(0, plan.num_steps, step, start)[1])
