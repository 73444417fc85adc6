"""Plans of second-order points: neighbouring data sets, transcripts and attacks.

What runs is short (:mod:`jaxdp.auditing.short_run`). What is observed of it is each
released gradient, and each product with a Hessian, or the lowest eigenvalue of one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.auditing import attacks as linear_attacks
from jaxdp.auditing import short_run, simulation
from jaxdp.auditing.attacks import Score
from jaxdp.auditing.canaries import VALUES, Canary, DataSet, against
from jaxdp.auditing.short_run import Script, Trace
from jaxdp.auditing.units import Unit
from jaxdp.core.keys import Keys
from jaxdp.sosp.spider import NONE, REFRESH

_CELLS = 2**19  # numbers of one run, times runs and data sets, simulated at once
#: Of the queries of a role, those whose records are canaries, besides the worst one.
_PLACES = {"refresh": [-1], "difference": [-2, -1], "Hessian": [0]}


def canaries(plan: Any) -> tuple[Canary, ...]:
    """Returns the pairs of data sets that an audit of a short run compares.

    Records of every role, where the claim is worst, and besides those of the last refresh,
    of the last two differences (before which a query beyond the end of the data would read
    again) and of the first Hessian; the last row of a batch, which one that overlaps would
    read. Also one of NaN in each role, and one among records that saturate.
    """
    found = []
    for role, rows in _roles(plan, short_run.dry_run(plan).trace).items():
        # The lowest eigenvalue shows a record where the others are curved downwards.
        crowded = plan.hessian == "released" and role == "Hessian"
        kinds: list[Any] = [
            (one, "saturating record {}", "plus", crowded) for one in rows
        ]
        kinds.append((rows[0], "record of NaN {}", "nan", crowded))
        if role == "difference":
            kinds.append((rows[0], "saturating record {} among others", "plus", True))
        for (row, claimed), name, kind, among in kinds:
            data = DataSet(kind, row, crowded=among)
            found.append(against(plan, f"{name.format(row)}, {role}", data, *claimed))
    return tuple(found)


def _roles(plan: Any, trace: Trace) -> dict[str, list[tuple[int, Any]]]:
    """Returns each role's rows to audit with their claims, the most influential first."""
    last, kind = trace.first + trace.rows - 1, trace.kind
    found = {"refresh": last[kind == REFRESH], "difference": last[kind > REFRESH]}
    if plan.escape_steps is not None and plan.hessian == "tracked":
        found["Hessian"] = (last + trace.extra)[trace.extra > 0]
    elif plan.escape_steps is not None:
        found["Hessian"] = trace.hessian[trace.began] + plan.hessian_batch_size - 1
    chosen = {}
    for role, rows in found.items():
        claims = [(int(row), _claimed(plan, trace, int(row))) for row in rows]
        strong = [float(np.sum(moves * weights)) for _, (moves, weights) in claims]
        if claims:
            places = [int(np.argmax(strong)), *_PLACES[role]]
            number = len(claims)
            unique = dict.fromkeys(i % number for i in places if -i <= number)
            chosen[role] = [claims[i] for i in unique]
    return chosen


def _claimed(plan: Any, trace: Trace, row: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns the claimed moves of the releases by a record, and likelihood-ratio weights.

    Each noise is independent, but for that of a period's differences, :math:`C^{-1}\xi`:
    their weights are :math:`C^\top C` times how far they are moved.
    """
    num_steps, dim = len(trace.kind), short_run.dim(plan)
    moves = np.zeros((num_steps, 2 * dim + 1))
    inside = (trace.first <= row) & (row < trace.first + trace.rows)
    fresh = trace.kind == REFRESH
    one = plan.l2_clip_norm / plan.refresh_batch_size / plan.refresh_noise_std
    moves[inside & fresh, 0] = one
    one = 1 / plan.difference_batch_rate / plan.node_std
    moves[inside & ~fresh & (trace.kind != NONE), 0] = one
    if plan.escape_steps is not None:
        # Of a clipped record to a product with a vector of the radius, or to a matrix.
        one = plan.hessian_clip_norm / plan.hessian_batch_size
        one = one if plan.hessian == "released" else one * plan.escape_radius
        moves[:, dim] = _times(plan, trace, row) * one / plan.escape_std
    weights = moves.copy()
    for number in set(trace.refreshes.tolist()):
        steps = np.flatnonzero((trace.refreshes == number) & (trace.kind > REFRESH))
        strategy = plan.correlation.strategy()[: len(steps), : len(steps)]
        weights[steps, 0] = strategy.T @ strategy @ moves[steps, 0]
    return moves, weights


def _times(plan: Any, trace: Trace, row: int) -> np.ndarray:
    """Returns a record's count in each step's Hessian, times the vector's length: (T,)."""
    if plan.hessian != "tracked":
        first, size = trace.hessian, plan.hessian_batch_size
        return ((first <= row) & (row < first + size)) * trace.length
    first = trace.first + trace.rows
    kept = 1.0 * ((first <= row) & (row < first + trace.extra))
    for t in range(1, len(kept)):
        kept[t] += kept[t - 1] * (trace.kind[t] != REFRESH)
    return kept * trace.length


def transcripts(
    plan: Any, data: Sequence[DataSet], num_runs: int, seed: int
) -> np.ndarray:
    """Simulates short runs, between prescribed points, of ``plan.algorithm``.

    The rest is as :func:`.simulation.transcripts` does it.

    Returns:
      float32 (len(data), num_runs, num_steps, 2 d + 1), in standard deviations of the
      claimed noise: the released gradient, or its change (in those of a node), and the
      product with a Hessian, each first along the direction in which records move it. Of
      a released matrix, its lowest eigenvalue. Zero where nothing is released. The last
      number is 1 where a run went another way than the dry run, else 0.
    """
    runner = _runner(plan, seed, data[0].unit)
    run = jax.jit(jax.vmap(runner, in_axes=(None, None, 0), out_axes=1))
    script = short_run.dry_run(plan)
    signs = simulation.stacked([_signs(plan, one) for one in data])
    own = simulation.make_keys(simulation.run_seeds(num_runs, seed))
    return simulation.in_parts(
        lambda keys: run(signs, script, keys), own, num_runs, _CELLS // len(data)
    )


def _signs(plan: Any, data: DataSet) -> Any:
    """Returns the signs of the records' losses, as a run gets them."""
    signs = np.full(plan.num_examples, -1.0 * data.crowded, np.float32)  # Downwards.
    signs[data.index] = VALUES[data.record]
    return data.unit.data(signs, data.index, data.record)


def attacks(
    plan: Any, canary: Canary, first: np.ndarray, second: np.ndarray
) -> dict[str, Score]:
    """Returns attacks as :func:`jaxdp.auditing.attacks.attacks`, on such transcripts."""
    dim = short_run.dim(plan)

    def claimed(transcripts: np.ndarray) -> np.ndarray:
        kept = linear_attacks.finite(transcripts)
        return np.einsum("ntr,tr->n", kept, canary.weights)

    def project(transcripts: np.ndarray) -> np.ndarray:
        along = transcripts[..., [0, dim, 2 * dim]]
        return along.reshape(len(along), -1)

    return {
        "likelihood ratio": claimed,
        "linear": linear_attacks.linear(first, second),
        "histogram": linear_attacks.histogram(project, first, second),
    }


def _runner(plan: Any, seed: int, unit: Unit) -> Callable[..., jax.Array]:
    """Returns the simulation: (W data sets, script, keys) -> (W, T, 2 d + 1)."""
    public, value_fn = Keys.insecure(seed), unit.loss(short_run.value_fn(plan))

    def run(data_sets: Any, script: Script, own: Keys) -> jax.Array:
        algorithm = short_run.algorithm(plan, simulation.run_keys(plan, own, public))

        def released(signs: Any) -> jax.Array:
            def step(carry: Any, now: Script) -> tuple[Any, jax.Array]:
                before = short_run.joined(now.before, carry)
                after, _ = algorithm.step(before, signs, value_fn=value_fn)
                deviates = jnp.any(short_run.progress(after) != now.progress)
                seen = jnp.append(_released(plan, before, after), deviates)
                return short_run.split(after)[1], seen

            start = algorithm.init(jnp.zeros(short_run.dim(plan)))
            return jax.lax.scan(step, short_run.split(start)[1], script)[1]

        return jax.vmap(released)(data_sets)

    return run


def _released(plan: Any, before: Any, after: Any) -> jax.Array:
    """Returns a step's gradient and product in standard deviations of the noise (2 d,)."""
    kind, last = after.release[0], before.spider.estimate
    change = after.spider.estimate - jnp.where(kind == REFRESH, 0, last)
    unit = jnp.where(kind == REFRESH, plan.refresh_noise_std, plan.node_std)
    gradient = _turned(plan, jnp.where(kind == NONE, 0, change) / unit)
    if plan.escape_steps is None:
        return jnp.concatenate([gradient, jnp.zeros_like(change)])
    moved = after.point - before.point
    if plan.hessian == "released":
        began = after.escapes > before.escapes
        lowest = -jnp.linalg.norm(moved) * plan.hessian_lipschitz
        product = jnp.zeros_like(moved).at[0].set(jnp.where(began, lowest, 0))
    else:
        product = -moved * plan.smoothness - after.escape.gradient
        product = jnp.where(short_run.observable(before, after), product, 0)
        product = _turned(plan, product)
    return jnp.concatenate([gradient, product / plan.escape_std])


def _turned(plan: Any, x: jax.Array) -> jax.Array:
    """Rotates a vector to coordinates along the axis and across it."""
    axis = short_run.axis(plan)
    if len(axis) == 1:
        return x
    basis = np.stack([axis, [-axis[1], axis[0]]])
    return jnp.matmul(jnp.asarray(basis), x, precision="highest")
