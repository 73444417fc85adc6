r"""What private mirror descent is compared with: other methods, tuned as well as we can.

Private, under replace-one (one Gaussian event, for batches are disjoint):

* :func:`dp_sgda`, Euclidean descent and ascent with clipped and noised gradients;
  :func:`tune_sgda` takes the best mean of a grid of steps, step sizes (3 to 100 times those
  of theory matter) and, if asked, clips *by the population gap of the very runs that are
  reported*: in the baseline's favour, and not charged to it.

Not private: :func:`mirror_prox`, :func:`frank_wolfe`.

References:
  Nemirovski, Prox-method with rate of convergence O(1/t), 2004.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import accounting
from jaxdp.accounting import gaussian
from jaxdp.models.games import Game

#: (x, y, batch, clip) -> the sums of a batch's gradients, each record's clipped jointly.
SumsFn = Callable[[Any, Any, Any, Any], tuple[jax.Array, jax.Array]]

NUM_STEPS = (2, 4, 8, 16, 32, 64, 128, 256)
STEP_FACTORS = (1.0, 3.0, 10.0, 30.0, 100.0)
CLIP_FACTORS = (1.0, 0.3, 0.2, 0.1)
OUTPUTS = ("before", "after")


class Pair(NamedTuple):
    """A point of each player."""

    x: jax.Array
    y: jax.Array


class Averages(NamedTuple):
    """Means of the points of T steps.

    Attributes:
      before: of those that the gradients were taken at, the uniform one among them.
      after: of those that the steps arrived at.
    """

    before: Pair
    after: Pair


def zcdp_rho(epsilon: float, delta: float) -> float:
    """The largest rho whose zCDP is (epsilon, delta)-DP by the accountant."""

    def spent(rho: float) -> float:
        return float(accounting.epsilon(*accounting.zcdp(rho), delta))

    return gaussian.root(lambda r: spent(r) - epsilon, 1e-12, 1e3 * epsilon, 1e-12)


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """The least std over the sensitivity of one Gaussian sum, by its exact curve."""
    return 1 / accounting.gaussian_mu(epsilon, delta)


# --- Euclidean descent and ascent ----------------------------------------------------


def clipped_sums(value_fn: Callable[[Any, Any, Any], Any]) -> SumsFn:
    """From any per-record loss: holds the gradients of a whole batch."""

    def loss(x: Any, y: Any, record: Any) -> Any:
        return value_fn(x, y, jax.tree.map(lambda v: v[None], record))[0]

    def sums(x: Any, y: Any, batch: Any, clip: Any) -> tuple[jax.Array, jax.Array]:
        rows = jax.vmap(jax.grad(loss, (0, 1)), (None, None, 0))(x, y, batch)
        norms = jnp.sqrt(sum(jnp.sum(g**2, axis=1) for g in rows))
        scales = jnp.minimum(1, clip / jnp.maximum(norms, 1e-30))
        return scales @ rows[0], scales @ rows[1]

    return sums


def game_sums(game: Game) -> SumsFn:
    """The same for the records of a game: norms and sums are products with the signs."""

    def sums(x: Any, y: Any, batch: Any, clip: Any) -> tuple[jax.Array, jax.Array]:
        a, b = (signs.astype(jnp.float32) for signs in batch)
        s, dim = game.sign_scale, game.dim_x + game.dim_y
        g_x, g_y = jax.grad(game.population_fn, (0, 1))(x, y)
        common = g_x @ g_x + g_y @ g_y + s**2 * dim
        norms = jnp.sqrt(jnp.maximum(common + 2 * s * (a @ g_x + b @ g_y), 1e-30))
        scales = jnp.minimum(1, clip / norms)
        total = jnp.sum(scales)
        return total * g_x + s * (scales @ a), total * g_y + s * (scales @ b)

    return sums


@functools.partial(jax.jit, static_argnames=("sums_fn", "dim_x", "dim_y", "num_steps"))
def dp_sgda(
    sums_fn: SumsFn,
    data: Any,
    key: jax.Array,
    *,
    dim_x: int,
    dim_y: int,
    num_steps: int,
    step_size: Any,
    l2_clip_norm: Any,
    noise_multiplier: Any,
) -> Averages:
    """One pass of private descent and ascent from the uniform points.

    Args:
      sums_fn: the gradients.
      data: the records, pytree with leading axis n; n - T floor(n/T) of them are not used.
      key: of the noise.
      dim_x: number of coordinates of x.
      dim_y: number of coordinates of y.
      num_steps: T; each step has a batch of its own.
      step_size: of both players.
      l2_clip_norm: of a record's gradients, jointly. Replacing one moves a sum by twice it.
      noise_multiplier: std over that. The whole run is one ``GaussianDpEvent`` of it: a
        record is in one batch.

    Returns:
      Both means: they are post-processing, and may be chosen between.
    """
    size = len(jax.tree.leaves(data)[0]) // num_steps
    batches = jax.tree.map(
        lambda v: v[: num_steps * size].reshape(num_steps, size, *v.shape[1:]), data
    )
    std = noise_multiplier * 2 * l2_clip_norm

    def step(at: Pair, inputs: Any) -> tuple[Pair, Averages]:
        batch, step_key = inputs
        noise_xy = std * jax.random.normal(step_key, (dim_x + dim_y,))
        g_x, g_y = sums_fn(*at, batch, l2_clip_norm)
        project = optax.projections.projection_simplex
        x = project(at.x - step_size / size * (g_x + noise_xy[:dim_x]))
        y = project(at.y + step_size / size * (g_y + noise_xy[dim_x:]))
        return Pair(x, y), Averages(at, Pair(x, y))

    start = Pair(jnp.full(dim_x, 1 / dim_x), jnp.full(dim_y, 1 / dim_y))
    keys = jax.random.split(key, num_steps)
    _, points = jax.lax.scan(step, start, (batches, keys))
    return jax.tree.map(lambda v: jnp.mean(v, axis=0), points)


def no_op_clip(game: Game) -> float:
    """The l2 norm that no record's gradient exceeds: its coordinates' bound, sqrt(d)."""
    return game.lipschitz * math.sqrt(game.dim_x + game.dim_y)


def theory_step(
    dim: int, num_examples: int, num_steps: int, clip: float, noise_multiplier: float
) -> float:
    r""":math:`\sqrt2/\sqrt{T(c^2+d\sigma^2)}`: the diameter over the gradients' norms."""
    std = noise_multiplier * 2 * clip / (num_examples // num_steps)
    return math.sqrt(2 / (num_steps * (clip**2 + dim * std**2)))


class TunedSgda(NamedTuple):
    """The best of a grid.

    Attributes:
      gaps: float64 (number of seeds,), population gaps of the best entry's runs.
      num_steps: T of the best entry.
      step_factor: its step size over :func:`theory_step`.
      clip_factor: its clip over :func:`no_op_clip`.
      output: ``"before"`` or ``"after"``.
      table: mean gap of every (num_steps, step_factor, clip_factor, output).
    """

    gaps: np.ndarray
    num_steps: int
    step_factor: float
    clip_factor: float
    output: str
    table: dict[tuple[int, float, float, str], float]


def tune_sgda(
    game: Game,
    num_examples: int,
    seeds: Sequence[int],
    *,
    noise_multiplier: float,
    num_steps: Sequence[int] = NUM_STEPS,
    step_factors: Sequence[float] = STEP_FACTORS,
    clip_factors: Sequence[float] = CLIP_FACTORS,
    outputs: Sequence[str] = OUTPUTS,
) -> TunedSgda:
    """DP-SGDA on fresh records for each seed, with the parameters that are best on average.

    Args:
      game: with its records.
      num_examples: n.
      seeds: of records and noise.
      noise_multiplier: of :func:`dp_sgda`.
      num_steps: the grid of T, up to n.
      step_factors: the grid of step sizes, over those of theory.
      clip_factors: the grid of clips, over the one that clips nothing.
      outputs: the means to choose between.
    """
    sums_fn, dims = game_sums(game), {"dim_x": game.dim_x, "dim_y": game.dim_y}
    grid = list(itertools.product(step_factors, clip_factors))
    found: dict[tuple[int, float, float, str], list[float]] = {}
    for seed in seeds:
        data = tuple(jnp.asarray(v) for v in game.make_data(num_examples, seed))
        for steps in num_steps:
            clips = [no_op_clip(game) * clip for _, clip in grid]
            sizes = [
                factor
                * theory_step(
                    sum(dims.values()), num_examples, steps, clip, noise_multiplier
                )
                for (factor, _), clip in zip(grid, clips, strict=True)
            ]

            def run(key: Any, size: Any, clip: Any, data: Any, steps: int) -> Averages:
                return dp_sgda(
                    sums_fn,
                    data,
                    key,
                    **dims,
                    num_steps=steps,
                    step_size=size,
                    l2_clip_norm=clip,
                    noise_multiplier=noise_multiplier,
                )

            keys = jax.random.split(jax.random.key(seed), len(grid))
            many = jax.vmap(run, (0, 0, 0, None, None))
            ends = many(keys, jnp.array(sizes), jnp.array(clips), data, steps)
            for output, (x, y) in jax.tree.map(np.asarray, ends)._asdict().items():
                for entry, *point in zip(grid, x, y, strict=True):
                    if output in outputs:
                        gaps = found.setdefault((steps, *entry, output), [])
                        gaps.append(game.gap_fn(*point))
    table = {entry: float(np.mean(gaps)) for entry, gaps in found.items()}
    best = min(table, key=lambda entry: table[entry])
    return TunedSgda(np.array(found[best]), *best, table)


# --- not private ---------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("value_fn", "dim_x", "dim_y", "num_steps"))
def mirror_prox(
    value_fn: Callable[[Any, Any], Any],
    *,
    dim_x: int,
    dim_y: int,
    num_steps: int,
    step_size: float,
) -> Pair:
    """Entropic mirror prox from the uniform points; the mean of the points looked ahead.

    Args:
      value_fn: (x, y) -> F, smooth, convex in x and concave in y.
      dim_x: number of coordinates of x.
      dim_y: number of coordinates of y.
      num_steps: two gradients each.
      step_size: at most 1 over the largest second derivative of F; the gap is then at most
        the sum of the logarithms of the dimensions over ``step_size * num_steps``.
    """
    gradient = jax.grad(value_fn, (0, 1))

    def moved(logits: Pair, at: Pair) -> Pair:
        g_x, g_y = gradient(*at)
        x, y = logits.x - step_size * g_x, logits.y + step_size * g_y
        return Pair(x - jnp.max(x), y - jnp.max(y))

    def step(state: tuple[Pair, Pair], _: None) -> tuple[tuple[Pair, Pair], None]:
        logits, total = state
        ahead = Pair(*map(jax.nn.softmax, moved(logits, _softmax(logits))))
        total = Pair(total.x + ahead.x, total.y + ahead.y)
        return (moved(logits, ahead), total), None

    zero = Pair(jnp.zeros(dim_x), jnp.zeros(dim_y))
    (_, total), _ = jax.lax.scan(step, (zero, zero), None, num_steps)
    return Pair(total.x / num_steps, total.y / num_steps)


def _softmax(logits: Pair) -> Pair:
    return Pair(jax.nn.softmax(logits.x), jax.nn.softmax(logits.y))


@functools.partial(jax.jit, static_argnames=("value_fn", "dim", "num_steps"))
def frank_wolfe(
    value_fn: Callable[[Any], Any], *, dim: int, num_steps: int
) -> jax.Array:
    """Frank-Wolfe on the simplex from the uniform point, with steps 2/(t + 2), t = 1, ..

    Args:
      value_fn: x -> F, smooth and convex.
      dim: number of coordinates.
      num_steps: a gradient each.
    """

    def step(t: Any, x: jax.Array) -> jax.Array:
        vertex = jax.nn.one_hot(jnp.argmin(jax.grad(value_fn)(x)), dim)
        return x + 2 / (t + 2.0) * (vertex - x)

    return jax.lax.fori_loop(1, num_steps + 1, step, jnp.full(dim, 1 / dim))
