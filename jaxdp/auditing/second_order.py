"""Plans of second-order points: neighbouring data sets, transcripts and attacks.

What runs is a drill (:mod:`jaxdp.auditing.drill`). What is observed of it is each released
gradient, and each product with a Hessian, or the lowest eigenvalue of one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.auditing import attacks as linear_attacks
from jaxdp.auditing import drill, simulation
from jaxdp.auditing.attacks import Score
from jaxdp.auditing.drill import Trace
from jaxdp.core.keys import Keys
from jaxdp.sosp.plan import SOSP
from jaxdp.sosp.spider import NONE, REFRESH

_CELLS = 2**19  # numbers of one run, times runs and data sets, simulated at once
#: Of the queries of a role, those whose records are canaries, besides the worst one.
_PLACES = {"refresh": [-1], "difference": [-2, -1], "Hessian": [0]}


class DataSet(NamedTuple):
    """Data set whose records contribute zero, except for one.

    Attributes:
      record: what the one is: it saturates every bound ("plus", "minus"), or is not a
        number, or contributes nothing either ("absent").
      index: its place.
      crowded: whether all others saturate the bounds too, downwards.
    """

    record: Literal["plus", "minus", "nan", "absent"]
    index: int
    crowded: bool = False


class Canary(NamedTuple):
    """Pair of neighbouring data sets.

    Attributes:
      name: for people.
      first: with the canary.
      second: with what the relation puts in its place.
      moves: float64 (T, R): by how many standard deviations of the claimed noise one clip
        of the record moves each number of a transcript.
      weights: float64 (T, R): of the claimed likelihood ratio.
    """

    name: str
    first: DataSet
    second: DataSet
    moves: np.ndarray
    weights: np.ndarray


def canaries(plan: SOSP) -> tuple[Canary, ...]:
    """Returns the pairs of data sets that an audit of a drill compares.

    Records of every role, where the claim is worst, and besides those of the last refresh,
    of the last two differences (before which a query beyond the end of the data would read
    again) and of the first Hessian; the last row of a batch, which one that overlaps would
    read. Also
    one of NaN in each role, and one among records that saturate. Against each stands its
    negative, where records are replaced, and else one of zeros.
    """
    trace = drill.rehearsed(plan).trace
    replaced = plan.relation == "replace_one"
    other = "minus" if replaced else "absent"
    against = "its negative" if replaced else "none"
    found = []

    def add(name: str, data: DataSet, claimed: Any) -> None:
        name = f"{name}, against {against}"
        found.append(Canary(name, data, data._replace(record=other), *claimed))

    for role, rows in _roles(plan, trace).items():
        # The lowest eigenvalue shows a record where the others are curved downwards.
        crowded = plan.hessian == "released" and role == "Hessian"
        for row, claimed in rows:
            name = f"saturating record {row}, {role}"
            add(name, DataSet("plus", row, crowded), claimed)
        row, claimed = rows[0]
        add(f"record of NaN {row}, {role}", DataSet("nan", row, crowded), claimed)
        if role == "difference":
            name = f"saturating record {row} among others, {role}"
            add(name, DataSet("plus", row, crowded=True), claimed)
    return tuple(found)


def _roles(plan: SOSP, trace: Trace) -> dict[str, list[tuple[int, Any]]]:
    """Returns each role's rows to audit with their claims, the most influential first."""
    last, kind = trace.first + trace.rows - 1, trace.kind
    found = {"refresh": last[kind == REFRESH], "difference": last[kind > REFRESH]}
    if plan.escape_steps is not None:
        own = trace.hessian[trace.began] + plan.hessian_batch_size - 1
        if plan.hessian == "tracked":
            own = (last + trace.extra)[trace.extra > 0]
        found["Hessian"] = own
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


def _claimed(plan: SOSP, trace: Trace, row: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns the claimed moves of the releases by a record, and likelihood-ratio weights.

    Each noise is independent, but for that of a period's differences, :math:`C^{-1}\xi`:
    their weights are :math:`C^\top C` times how far they are moved.
    """
    num_steps, dim = len(trace.kind), drill.dim(plan)
    moves = np.zeros((num_steps, 2 * dim + 1))
    inside = (trace.first <= row) & (row < trace.first + trace.rows)
    fresh = trace.kind == REFRESH
    one = plan.l2_clip_norm / plan.refresh_batch_size / plan.refresh_noise_std
    moves[inside & fresh, 0] = one
    one = 1 / plan.difference_batch_rate / plan.node_std
    moves[inside & ~fresh & (trace.kind != NONE), 0] = one
    if plan.escape_steps is not None:
        moves[:, dim] = _times(plan, trace, row) * _product(plan) / plan.escape_std
    weights = moves.copy()
    for number in set(trace.refreshes.tolist()):
        steps = np.flatnonzero((trace.refreshes == number) & (trace.kind > REFRESH))
        strategy = plan.correlation.strategy()[: len(steps), : len(steps)]
        weights[steps, 0] = strategy.T @ strategy @ moves[steps, 0]
    return moves, weights


def _times(plan: SOSP, trace: Trace, row: int) -> np.ndarray:
    """Returns a record's count in each step's Hessian, times the vector's length: (T,).

    The length is relative to the escape radius, and 0 in steps without a product.
    """
    if plan.hessian == "tracked":
        first = trace.first + trace.rows
        size = trace.extra
        kept = np.zeros(len(first))
        inside = (first <= row) & (row < first + size)
        for t in range(len(kept)):
            before = kept[t - 1] if t and trace.kind[t] != REFRESH else 0.0
            kept[t] = before + inside[t]
    else:
        first, size = trace.hessian, plan.hessian_batch_size
        kept = 1.0 * ((first <= row) & (row < first + size))
    return kept * trace.length


def _product(plan: SOSP) -> float:
    """Returns a clipped record's contribution to a product with a vector of radius length.

    For a released Hessian it is the contribution to the matrix.
    """
    one = plan.hessian_clip_norm / plan.hessian_batch_size
    return one if plan.hessian == "released" else one * plan.escape_radius


def transcripts(
    plan: SOSP, data: Sequence[DataSet], num_runs: int, seed: int
) -> np.ndarray:
    """Simulates ``num_runs`` runs of a drill on each data set; returns their releases.

    What runs is ``plan.algorithm``, step by step, under jit, vmap and scan, between
    prescribed points. Every run has a noise root of its own, the same on every data set.

    Returns:
      float32 (len(data), num_runs, num_steps, 2 d + 1), in standard deviations of the
      claimed noise: the released gradient, or its change (in those of a node), and the
      product with a Hessian, each first along the direction in which records move it. Of
      a released matrix, its lowest eigenvalue. Zero where nothing is released. The last
      number is 1 where a run went another way than the rehearsal, else 0.
    """
    run = jax.jit(jax.vmap(_runner(plan, seed), in_axes=(None, None, 0), out_axes=1))
    steps = drill.rehearsed(plan).steps
    records = np.stack([_records(plan, one) for one in data])
    own = simulation.make_keys(simulation.run_seeds(num_runs, seed))
    at_once = min(num_runs, max(_CELLS // len(data), 1))
    parts = []
    for begin in range(0, num_runs, at_once):
        # The last part overlaps the one before it: one shape, compiled once.
        first = min(begin, num_runs - at_once)
        part = slice(first, first + at_once)
        made = run(records, steps, jax.tree.map(lambda x, at=part: x[at], own))
        parts.append(np.asarray(made)[:, begin - first :])
    return np.concatenate(parts, axis=1)


def attacks(
    plan: SOSP, canary: Canary, first: np.ndarray, second: np.ndarray
) -> dict[str, Score]:
    """Returns attacks as :func:`jaxdp.auditing.attacks.attacks`, on drill transcripts."""
    dim = drill.dim(plan)
    chosen = canary.weights

    def claimed(transcripts: np.ndarray) -> np.ndarray:
        kept = linear_attacks.finite(transcripts)
        return np.einsum("ntr,tr->n", kept, chosen)

    def project(transcripts: np.ndarray) -> np.ndarray:
        along = transcripts[..., [0, dim, 2 * dim]]
        return along.reshape(len(along), -1)

    return {
        "likelihood ratio": claimed,
        "linear": linear_attacks.linear(first, second),
        "histogram": linear_attacks.histogram(project, first, second),
    }


def _records(plan: SOSP, data: DataSet) -> np.ndarray:
    """Returns the signs of the records' losses."""
    signs = np.full(plan.num_examples, -1.0 * data.crowded, np.float32)
    values = {"plus": 1.0, "minus": -1.0, "nan": np.nan, "absent": 0.0}
    signs[data.index] = values[data.record]
    return signs


def _runner(plan: SOSP, seed: int) -> Callable[..., jax.Array]:
    """Returns the simulation: (signs (W, n), drill steps, keys) -> (W, T, 2 d + 1)."""
    public, value_fn = Keys.insecure(seed), drill.value_fn(plan)

    def run(data_sets: jax.Array, steps: drill.Step, own: Keys) -> jax.Array:
        keys = simulation.run_keys(plan, own, public)
        algorithm = plan.algorithm(keys, microbatch_size=drill.slice_size(plan))

        def released(signs: jax.Array) -> jax.Array:
            def step(carry: Any, now: Any) -> tuple[Any, jax.Array]:
                before = drill.joined(now.before, carry)
                after, _ = algorithm.step(before, signs, value_fn=value_fn)
                deviates = jnp.any(drill.course(after) != now.course)
                seen = jnp.append(_released(plan, before, after), deviates)
                return drill.split(after)[1], seen

            start = drill.split(algorithm.init(jnp.zeros(drill.dim(plan))))[1]
            return jax.lax.scan(step, start, steps)[1]

        return jax.vmap(released)(data_sets)

    return run


def _released(plan: SOSP, before: Any, after: Any) -> jax.Array:
    """Returns a step's gradient and product in standard deviations of the noise (2 d,)."""
    kind, last = after.release[0], before.spider.estimate
    change = after.spider.estimate - jnp.where(kind == REFRESH, 0, last)
    unit = jnp.where(kind == REFRESH, plan.refresh_noise_std, plan.node_std)
    gradient = jnp.where(kind == NONE, 0, change) / unit
    if plan.escape_steps is None:
        return jnp.concatenate([_turned(plan, gradient), jnp.zeros_like(change)])
    moved = after.point - before.point
    if plan.hessian == "released":
        began = after.escapes > before.escapes
        lowest = -jnp.linalg.norm(moved) * plan.hessian_lipschitz
        product = jnp.zeros_like(moved).at[0].set(jnp.where(began, lowest, 0))
    else:
        product = -moved * plan.smoothness - after.escape.gradient
        product = jnp.where(drill.shows(before, after), product, 0)
        product = _turned(plan, product)
    return jnp.concatenate([_turned(plan, gradient), product / plan.escape_std])


def _turned(plan: SOSP, x: jax.Array) -> jax.Array:
    """Rotates a vector to coordinates along the axis and across it."""
    axis = drill.axis(plan)
    if len(axis) == 1:
        return x
    basis = np.stack([axis, [-axis[1], axis[0]]])
    return jnp.matmul(jnp.asarray(basis), x, precision="highest")
