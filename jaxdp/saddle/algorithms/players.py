"""Helpers of the saddle-point methods: scores, vertex draws and a step's records."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdp import sampling
from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.types import DataPlan, ScoreGrid, VertexPlan
from jaxdp.kernels import polytope, simplex
from jaxdp.saddle import oracles

#: The most numbers of a step that are logged.
MOST_LOGGED = 64
_LOGIT = np.float32(np.log(2) / 2**simplex.BITS)


class Info(NamedTuple):
    """Release of one step. Public."""

    release: jax.Array  # shape=(R,), dtype=float32


def check(plan: Any, keys: Any, family: str) -> keys_lib.Keys:
    """Requires a plan of this family that has its steps, and keys.

    Raises:
      TypeError, ValueError: as they say.
    """
    run_state.check_family(plan, family)
    plan.check_ready()
    return keys_lib.check(keys)


def horizon(plan: VertexPlan | Any, keys: keys_lib.Keys) -> run_state.Horizon:
    """Returns the horizon of a new run.

    It is private with keys from entropy and the certified sampler.
    """
    return run_state.new_horizon(
        plan.run, private=keys.private and plan.sampler == "integer"
    )


def roots(plan: DataPlan, keys: keys_lib.Keys, *roles: str) -> tuple[jax.Array, ...]:
    """Returns the secret keys of the draws, one a role; steps are folded into them."""
    context = plan.run.context
    return tuple(keys_lib.stream(keys.noise, role, context=context) for role in roles)


def start(name: str, weights: Any, size: int) -> jax.Array:
    """Returns the scores (size,) of the public weights that a player starts from.

    Raises:
      ValueError: not weights (size,): non-negative, and of sum 1.
    """
    shape = jnp.shape(weights)
    if shape != (size,) or not jnp.issubdtype(jnp.result_type(weights), jnp.floating):
        raise ValueError(
            f"params must have floating weights of shape ({size},) for {name}, one for "
            f"each vertex that the plan has, got shape {shape} of "
            f"{jnp.result_type(weights)}"
        )
    weights = jnp.asarray(weights)
    if not isinstance(weights, Tracer):
        known = np.asarray(weights, np.float64)
        if not (known >= 0).all() or abs(known.sum() - 1) > 1e-3:
            raise ValueError(
                f"params must have weights >= 0 that sum to 1 for {name}, got "
                f"{known[:4]}... of sum {known.sum():.4g}"
            )
    return simplex.from_probabilities(weights.astype(jnp.float32))


def draw(
    plan: VertexPlan | Any, key: jax.Array, scores: jax.Array, num: int
) -> jax.Array:
    """Draws ``num`` independent vertices of an iterate: an exponential mechanism."""
    if plan.sampler == "integer":
        return simplex.sample(key, scores, num)
    logits = scores.astype(jnp.float32) * _LOGIT
    return simplex.sample_float(key, logits, num, jnp.float32(0))


def mean(vertices: jax.Array, size: int) -> jax.Array:
    """Computes the mean of drawn vertices, as weights float32 (size,)."""
    return simplex.counts(vertices, size).astype(jnp.float32) / vertices.shape[0]


def shares(counts: jax.Array) -> jax.Array:
    """Computes each vertex's share of the counts, float32; zeros without counts."""
    return counts.astype(jnp.float32) / jnp.maximum(counts.sum(), 1)


def bound(grid: ScoreGrid) -> oracles.Bound:
    """Returns the bound of a player's contributions, in units of its grid."""
    return oracles.Bound(grid.clip, grid.bits)


def change(total: jax.Array, grid: ScoreGrid) -> jax.Array:
    """Computes the exact int32 change of the scores by a total of contributions."""
    return simplex.scaled(total, grid.multiplier, grid.shift)


def moved(active: jax.Array, scores: jax.Array, increment: jax.Array) -> jax.Array:
    """Returns the scores after a step, unchanged if the step is not active."""
    return jnp.where(active, simplex.moved(scores, increment), scores)


def domains(problem: Any, *sizes: int) -> list[Any]:
    """Returns the polytopes of a problem's players; the simplex is the default.

    Raises:
      ValueError: other numbers of vertices than the plan's.
    """
    found = []
    for name, size in zip("xy", sizes, strict=False):
        domain = getattr(problem, f"domain_{name}", None)
        domain = polytope.Simplex(size) if domain is None else domain
        if domain.num_vertices != size:
            raise ValueError(
                f"value_fn must have a domain_{name} of {size} vertices, as the plan has "
                f"them, got {domain.num_vertices}"
            )
        found.append(domain)
    return found


def rows(
    plan: DataPlan, data: Any, first: jax.Array, size: int, active: jax.Array
) -> tuple[Any, jax.Array]:
    """Returns ``size`` consecutive records from ``first`` on, and their mask.

    Raises:
      ValueError: data of another number of records than the plan's.
    """
    sampling.check_data(plan.run, data)
    records = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), first, size), data
    )
    return records, jnp.full((size,), active)
