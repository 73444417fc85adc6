"""Parts of the saddle-point algorithms: scores, vertex draws and a step's records."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from jaxdp.core.types import Run
from jaxdp.kernels import polytope, simplex
from jaxdp.sampling import batches

#: The most numbers of a step that are logged.
MOST_LOGGED = 64
_LOGIT = np.float32(np.log(2) / 2**simplex.BITS)


class Info(NamedTuple):
    """Release of one step. Public."""

    release: jax.Array  # shape=(R,), dtype=float32


def prepare(
    plan: Any, keys: Any, family: str, *roles: str
) -> tuple[Any, run_state.Horizon, tuple[jax.Array, ...]]:
    """Returns a plan's numbers, the horizon of a new run and the secret keys of its draws.

    One key a role; steps are folded into them. The horizon is private with keys from
    entropy and the certified sampler.

    Raises:
      TypeError, ValueError: bare keys, a plan of another family or without step sizes.
    """
    run_state.check_family(plan, family)
    numbers = plan.numbers
    keys = keys_lib.check(keys)
    private = keys.private and numbers.sampler == "integer"
    context = numbers.run.context
    roots = tuple(keys_lib.stream(keys.noise, role, context=context) for role in roles)
    return numbers, run_state.new_horizon(numbers.run, private=private), roots


def start(name: str, weights: Any, size: int) -> jax.Array:
    """Returns the scores (size,) of the public weights that a player starts from.

    Raises:
      ValueError: not weights (size,): non-negative, and of sum 1.
    """
    if run_state.is_placeholder(weights):
        return jnp.zeros((size,), jnp.int32)
    weights = weights if hasattr(weights, "dtype") else np.asarray(weights)
    if weights.shape != (size,) or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"params must have floating weights of shape ({size},) for {name}, one for "
            f"each vertex that the plan has, got shape {weights.shape} of {weights.dtype}"
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


def draw(sampler: str, key: jax.Array, scores: jax.Array, num: int) -> jax.Array:
    """Draws ``num`` independent vertices of an iterate: an exponential mechanism."""
    if sampler == "integer":
        return simplex.sample(key, scores, num)
    logits = scores.astype(jnp.float32) * _LOGIT
    return simplex.sample_float(key, logits, num, jnp.float32(0))


def mean(vertices: jax.Array, size: int) -> jax.Array:
    """Computes the mean of drawn vertices, as weights float32 (size,)."""
    counts = simplex.counts(vertices, size)
    # By their sum, not a constant: XLA divides by one in some programs, on a mesh, and
    # multiplies by its inverse in others.
    return counts.astype(jnp.float32) / counts.sum().astype(jnp.float32)


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


def batch(
    run: Run, data: Any, first: jax.Array, size: int, active: jax.Array
) -> tuple[Any, jax.Array]:
    """Returns ``size`` consecutive records from ``first`` on, and their mask.

    Raises:
      ValueError: data of another number of records than the plan's.
    """
    batches.check_data(run, data)
    data = jax.tree.map(lambda x: jnp.asarray(batches.narrowed(x)), data)
    records = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), data)
    return records, batches.present(records, jnp.full((size,), active))
