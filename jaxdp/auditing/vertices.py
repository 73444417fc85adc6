r"""Plans that draw vertices: neighbouring data sets, and transcripts of the draws.

The losses are linear, so that gradients are the records' alone: one record saturates the
clip at every vertex, up at one half of them and down at the other, and no other record
says anything. Of queries, it answers all in one way. What is observed are all vertices
that a run releases; the scores of the run are then known to the attacker, who knows the
plan, up to which of two data sets it was.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.auditing import simulation
from jaxdp.core.keys import Keys
from jaxdp.saddle.oracles import MatrixGame, VertexGradients
from jaxdp.saddle.oracles.queries import QueryMatrix
from jaxdp.saddle.plans import ConvexSimplex, Saddle, SyntheticData

#: Plans whose runs release every vertex that they draw.
VertexPlan = Saddle | ConvexSimplex | SyntheticData

#: The most draws of a step of Saddle whose vertices are all released.
MOST_DRAWS = 31
_STEEP = 1e6  # a gradient over the clip
_CELLS = 2**22  # scores of one run, times runs, that are simulated at once


class DataSet(NamedTuple):
    """Data set whose records contribute zero, except for one.

    Attributes:
      record: what the one is: its gradients are clipped to the bound, up at one half of
        the vertices and down at the other ("plus"), or the other way round ("minus"); or
        they are not numbers; or zero ("absent").
      index: its place.
      players: whose gradients these are, of "xy"; those of the other are zero.
      crowded: whether every other record saturates the bound too, at every other vertex.
    """

    record: Literal["plus", "minus", "nan", "absent"]
    index: int = 0
    players: str = "xy"
    crowded: bool = False


class Canary(NamedTuple):
    """Pair of neighbouring data sets, with a name for people."""

    name: str
    first: DataSet
    second: DataSet


def canaries(plan: VertexPlan) -> tuple[Canary, ...]:
    """Returns the pairs of data sets that an audit compares.

    The worst record is in the first batch: it moves all scores but the first. It is the
    last row there, which a batch that overlaps would read again. Others are NaN; or come
    later, among records that saturate; or move one player alone. Against each stands its
    negative, where records are replaced, and else one of zeros.
    """
    replaced = plan.relation == "replace_one"
    other = "minus" if replaced else "absent"
    against = "its negative" if replaced else "none"

    def pair(name: str, first: DataSet) -> Canary:
        second = first._replace(record=other)
        return Canary(f"{name}, against {against}", first, second)

    if isinstance(plan, SyntheticData):  # Codes are never NaN, and read in every step.
        return (pair("record that answers all queries alike", DataSet("plus")),)
    size = plan.sampling.rows(plan.num_examples)
    last, later = size - 1, plan.num_steps // 2
    found = [
        pair("saturating record in step 0", DataSet("plus", last)),
        pair("record of NaN in step 0", DataSet("nan", last)),
        pair(
            f"saturating record in step {later} among others",
            DataSet("plus", later * size + last, crowded=True),
        ),
    ]
    if isinstance(plan, Saddle):
        only_y = DataSet("plus", last, "y")
        found.append(pair("record in step 0 that x does not see", only_y))
    return tuple(found)


def width(plan: VertexPlan) -> int:
    """Returns the number of a player's vertices; the larger one of two players."""
    if isinstance(plan, Saddle):
        return max(plan.dim_x, plan.dim_y)
    return plan.dim if isinstance(plan, ConvexSimplex) else plan.num_queries


def num_laws(plan: VertexPlan) -> int:
    """Returns the number of laws that a run draws from: one for each step and player."""
    return plan.num_steps * (2 if isinstance(plan, Saddle) else 1)


def rows(
    plan: Saddle | ConvexSimplex, data: DataSet, player: str, dim: int
) -> np.ndarray:
    """Returns the records' gradients by a player's vertices, over its clip: (n, dim)."""
    found = np.zeros((plan.num_examples, dim))
    found[:, ::2] = _STEEP * data.crowded
    one = {"plus": _STEEP, "minus": -_STEEP, "nan": np.nan, "absent": 0.0}
    half = np.where(np.arange(dim) < dim / 2, 1, -1)
    found[data.index] = one[data.record] * half * (player in data.players)
    return found


def queries(plan: SyntheticData) -> QueryMatrix:
    """Returns identical queries: the highest answer in cell 0, the lowest in cell 1."""
    high = plan.query_range / 2
    matrix = np.zeros((plan.num_queries // 2, plan.domain_size))
    matrix[:, :2] = high, -high
    return QueryMatrix(matrix, low=-high, high=high, bits=plan.grid_bits)


def transcripts(
    plan: VertexPlan, data: Sequence[DataSet], num_runs: int, seed: int
) -> np.ndarray:
    """Simulates ``num_runs`` runs of a plan on each data set; returns the drawn vertices.

    What runs is ``plan.algorithm``, step by step, under jit, vmap and scan. Every run has
    a noise root of its own, the same on every data set; all have the direction and
    sampling roots of ``Keys.insecure(seed)``.

    Returns:
      int32 (len(data), num_runs, L): of each vertex, its number plus :func:`width` times
      the number of the law that it was drawn from: step t of ``ConvexSimplex`` (the
      source of the vertex) and of ``SyntheticData``; 2 t of x and 2 t + 1 of y in
      ``Saddle``. Vertices of Saddle are in the order of step, player and draw.
    """
    run = _compiled(plan, Keys.insecure(seed))
    records = jax.tree.map(
        lambda *parts: np.stack(parts), *(_records(plan, one) for one in data)
    )
    own = simulation.make_keys(simulation.run_seeds(num_runs, seed))
    at_once = min(num_runs, max(_CELLS // (len(data) * (width(plan) + 64)), 1))
    parts = []
    for begin in range(0, num_runs, at_once):
        # The last part overlaps the one before it: one shape, compiled once.
        first = min(begin, num_runs - at_once)
        part = slice(first, first + at_once)
        made = run(records, jax.tree.map(lambda x, at=part: x[at], own))
        parts.append(np.asarray(made)[:, begin - first :])
    return np.concatenate(parts, axis=1)


class _Linear(VertexGradients):
    """Loss whose gradients are the records themselves."""

    domain_x = domain_y = None

    def _sums(self, query: Any, records: Any, mask: jax.Array) -> Any:
        return self._row_sums(query, records, None, mask)


def _records(plan: VertexPlan, data: DataSet) -> Any:
    """Returns the data that the plan's algorithm takes."""
    if isinstance(plan, SyntheticData):
        codes = np.full(plan.num_examples, -1, np.int32)  # Those count nothing.
        codes[data.index] = {"plus": 0, "minus": 1}.get(data.record, -1)
        return codes
    if isinstance(plan, ConvexSimplex):
        return np.float32(plan.linf_clip_norm * rows(plan, data, "x", plan.dim))
    return (
        np.float32(plan.linf_clip_norm_x * rows(plan, data, "x", plan.dim_x)),
        np.float32(plan.linf_clip_norm_y * rows(plan, data, "y", plan.dim_y)),
    )


def _compiled(plan: VertexPlan, public: Keys) -> Callable[..., jax.Array]:
    """Returns the compiled simulation: (records of W data sets, keys (n,)) -> (W, n, L)."""
    value_fn: Any = MatrixGame()
    if isinstance(plan, ConvexSimplex):
        value_fn = _Linear()
    if isinstance(plan, SyntheticData):
        value_fn = queries(plan)

    def run(data_sets: Any, own: Keys) -> jax.Array:
        algorithm = plan.algorithm(simulation.run_keys(plan, own, public))

        def drawn(records: Any) -> jax.Array:
            def step(state: Any, _: None) -> tuple[Any, jax.Array]:
                state, info = algorithm.step(state, records, value_fn=value_fn)
                return state, info.release

            start = algorithm.init(plan.uniform())
            end, made = jax.lax.scan(step, start, None, length=plan.num_steps)
            if isinstance(plan, ConvexSimplex):
                # In the order of the iterates that they come from, which is public.
                vertices = end.drawn.reshape(-1)[end.schedule.slots]
                place = jnp.arange(vertices.size)
                law = jnp.searchsorted(end.schedule.offsets, place, side="right") - 1
            else:
                vertices = made.reshape(num_laws(plan), -1).astype(jnp.int32)
                law = jnp.arange(num_laws(plan))[:, None]
            return (law * width(plan) + vertices).reshape(-1).astype(jnp.int32)

        return jax.vmap(drawn)(data_sets)

    return jax.jit(jax.vmap(run, in_axes=(None, 0), out_axes=1))
