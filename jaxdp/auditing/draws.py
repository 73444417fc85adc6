r"""Enumerated law of one vertex draw: the exact probabilities that a sampler realises.

No number of runs shows that a vertex of probability :math:`10^{-6}` is never drawn. So the
sampler of a plan is also held against two neighbouring score vectors that are spread far:
its realised probabilities are computed exactly, not estimated, and compared.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core.keys import Keys
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import players

#: Vertices of the enumerated case, and the standard deviation of its scores, in octaves.
DIM, SPREAD = 4096, 8.5
#: A probability of zero counts as this: the least that 64 bits can have.
LEAST = 2.0**-64
_GRID = 2**24  # values of a float32 uniform


def neighbours(
    sensitivity: float, *, dim: int = DIM, spread: float = SPREAD
) -> tuple[np.ndarray, np.ndarray]:
    """Returns normalized scores (dim,) of two data sets that differ by one record.

    Each score differs by ``sensitivity`` nats, up or down. They are Gaussian, with a
    standard deviation of ``spread`` octaves.
    """
    draw = np.random.default_rng(0)
    scores = np.rint(spread * 2**simplex.BITS * draw.normal(size=dim)).astype(np.int64)
    # Rounded down: what is claimed is an upper limit.
    moved = int(sensitivity / math.log(2) * 2**simplex.BITS)
    other = scores + moved * draw.choice([-1, 1], dim)
    first, second = (
        np.maximum(x - x.max(), simplex.LOWEST).astype(np.int32)
        for x in (scores, other)
    )
    return first, second


def integers_only(plan: Any) -> bool:
    """Returns True if a plan's vertex draws are computed in integers throughout."""

    def draw(key: jax.Array, scores: jax.Array) -> jax.Array:
        return players.draw(plan.sampler, key, scores, 2)

    traced = jax.make_jaxpr(draw)(Keys.insecure(0).noise, jnp.zeros((64,), jnp.int32))
    return not any(jnp.issubdtype(t, jnp.floating) for t in _dtypes(traced.jaxpr))


def _dtypes(jaxpr: Any) -> set[Any]:
    """Returns the dtypes of all values that a program computes."""
    found = {v.aval.dtype for eqn in jaxpr.eqns for v in eqn.outvars}
    parts = [p for eqn in jaxpr.eqns for p in jax.tree.leaves([*eqn.params.values()])]
    inner = [getattr(p, "jaxpr", p) for p in parts]  # Of those that are closed.
    return found.union(*(_dtypes(p) for p in inner if hasattr(p, "eqns")))


def certified_law(scores: np.ndarray) -> np.ndarray:
    """Returns the certified sampler's realised probabilities, float64 (d,)."""
    # W / sum W of the weights that it accepts, summed as Python integers.
    given = jnp.asarray(scores)
    upper, lower = (np.asarray(w, np.uint64) for w in simplex._weights(given))
    limit = np.asarray(simplex._bounds(given), np.uint64) << np.uint64(32)
    # What lies above its bound is never looked at.
    weights = np.minimum((upper << np.uint64(32)) + lower, limit)
    total = sum(map(int, weights))
    return np.array([int(w) / total for w in weights])


def float_law(scores: np.ndarray) -> np.ndarray:
    """Returns probabilities of a float32 inverse CDF, counted over all 2**24 uniforms."""
    logits = scores.astype(np.float32) * np.float32(math.log(2) / 2**simplex.BITS)
    prefix = np.cumsum(np.exp(logits - logits.max()), dtype=np.float32)
    uniform = np.arange(_GRID, dtype=np.float32) * np.float32(1 / _GRID)
    below = np.searchsorted(uniform * prefix[-1], prefix, side="left")
    return np.diff(below, prepend=0) / _GRID


def bounded_range(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the range of the log-ratios of two laws (d,), where one draws a vertex."""
    drawn = (first > 0) | (second > 0)
    p, q = (np.maximum(x[drawn], LEAST) for x in (first, second))
    return float(np.ptp(np.log(p) - np.log(q)))


def audited(plan: Any) -> tuple[float, float]:
    """Returns the range of a plan's enumerated laws, and the epsilon that one draw claims.

    A draw from scores that a record moves by at most Delta is of bounded range 2 Delta +
    2 e, e = ``simplex.LOG_ERROR``, and so as private. One that computes with floats is
    taken for an inverse CDF, of which that is not true: vertices that are drawn on one
    data set are never drawn on the other.
    """
    law = certified_law if integers_only(plan) else float_law
    claimed = 2 * plan.sensitivity + 2 * simplex.LOG_ERROR
    first, second = map(law, neighbours(plan.sensitivity))
    # Doubles round the ratio of two probabilities.
    return bounded_range(first, second), claimed * (1 + 1e-12)
