r"""Plans that draw vertices: neighbouring data sets, transcripts of the draws, attacks.

The losses are linear, so that gradients are the records' alone: one record saturates the
clip at every vertex, up at one half of them and down at the other, and no other record
says anything. Of queries, it answers all in one way. What is observed are all vertices
that a run releases; the scores of the run are then known to the attacker, who knows the
plan, up to which of two data sets it was. The attacker follows the scores of both, given
the vertices that were released, in exact integers of its own: nothing of the attacks calls
the code that is audited.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from jaxdp.auditing import simulation
from jaxdp.auditing.attacks import Score
from jaxdp.auditing.canaries import VALUES, Canary, DataSet, against
from jaxdp.core.keys import Keys
from jaxdp.kernels import simplex
from jaxdp.saddle.oracles import MatrixGame, VertexGradients
from jaxdp.saddle.oracles.queries import QueryMatrix

#: The most draws of a step of Saddle whose vertices are all released.
MOST_DRAWS = 31
_STEEP = 1e6  # a gradient over the clip
_CELLS = 2**22  # scores of one run, times runs, that are simulated at once
_PAIRS = 2**22  # cells at most, of a table of pairs
_NATS = np.log(2) / 2**simplex.BITS


class Player(NamedTuple):
    """One player of a plan's game: its vertices, and the grid of its scores."""

    name: str  # "x" or "y"
    dim: int
    clip: float
    grid: Any


def players(plan: Any) -> tuple[Player, ...]:
    """Returns the players whose vertices a run releases; queries are those of y."""
    if plan.released == "queries":
        return (Player("y", plan.num_queries, plan.query_range / 2, plan.grid),)
    if plan.released in ("vertices of iterates", "vertices of batches"):
        return (Player("x", plan.dim, plan.linf_clip_norm, plan.grid),)
    x, y = plan.grids
    return (
        Player("x", plan.dim_x, plan.linf_clip_norm_x, x),
        Player("y", plan.dim_y, plan.linf_clip_norm_y, y),
    )


def canaries(plan: Any) -> tuple[Canary, ...]:
    """Returns the pairs of data sets that an audit compares.

    The worst record is in the first batch: it moves all scores but the first. It is the
    last row there, which a batch that overlaps would read again. Others are NaN; or come
    later, among records that saturate; or move one player alone. A full batch has no later
    ones.
    """
    if plan.released == "queries":  # Codes are never NaN, and read in every step.
        name = "record that answers all queries alike"
        return (against(plan, name, DataSet("plus")),)
    size = plan.sampling.rows(plan.num_examples)
    last, later = size - 1, plan.num_steps // 2
    if size == plan.num_examples:
        later = 0
    found = {
        "saturating record in step 0": DataSet("plus", last),
        "record of NaN in step 0": DataSet("nan", last),
        f"saturating record in step {later} among others": DataSet(
            "plus", later * size + last, crowded=True
        ),
    }
    if len(players(plan)) == 2:
        only_y = DataSet("plus", last, players="y")
        found["record in step 0 that x does not see"] = only_y
    return tuple(against(plan, name, data) for name, data in found.items())


def width(plan: Any) -> int:
    """Returns the number of a player's vertices; the larger one of two players."""
    return max(player.dim for player in players(plan))


def num_laws(plan: Any) -> int:
    """Returns the number of laws that a run draws from: one for each step and player."""
    return plan.num_steps * len(players(plan))


def rows(plan: Any, data: DataSet, player: Player) -> np.ndarray:
    """Returns the records' gradients by a player's vertices, over its clip: (n, dim)."""
    found = np.zeros((plan.num_examples, player.dim))
    found[:, ::2] = _STEEP * data.crowded
    half = np.where(np.arange(player.dim) < player.dim / 2, 1, -1)
    found[data.index] = _STEEP * VALUES[data.record] * half
    if player.name not in data.players:
        found[data.index] = 0
    return found


def queries(plan: Any) -> QueryMatrix:
    """Returns identical queries: the highest answer in cell 0, the lowest in cell 1."""
    high = plan.query_range / 2
    matrix = np.zeros((plan.num_queries // 2, plan.domain_size))
    matrix[:, :2] = high, -high
    return QueryMatrix(matrix, low=-high, high=high, bits=plan.grid_bits)


def transcripts(
    plan: Any, data: Sequence[DataSet], num_runs: int, seed: int
) -> np.ndarray:
    """Simulates runs of ``plan.algorithm``, as :func:`.simulation.transcripts` does.

    Returns:
      int32 (len(data), num_runs, L): of each vertex, its number plus :func:`width` times
      the number of the law that it was drawn from: step t of ``ConvexSimplex`` (the
      source of the vertex) and of ``SyntheticData``; 2 t of x and 2 t + 1 of y in
      ``Saddle``. Vertices of Saddle are in the order of step, player and draw.
    """
    run = _compiled(plan, Keys.insecure(seed))
    records = simulation.stacked([_records(plan, one) for one in data])
    own = simulation.make_keys(simulation.run_seeds(num_runs, seed))
    at_once = _CELLS // (len(data) * (width(plan) + 64))
    return simulation.in_parts(lambda k: run(records, k), own, num_runs, at_once)


class _Linear(VertexGradients):
    """Loss whose gradients are the records themselves."""

    domain_x = domain_y = None

    def _sums(self, query: Any, records: Any, mask: jax.Array) -> Any:
        return self._row_sums(query, records, None, mask)


def _records(plan: Any, data: DataSet) -> Any:
    """Returns the data that the plan's algorithm takes."""
    if plan.released == "queries":
        codes = np.full(plan.num_examples, -1, np.int32)  # Those count nothing.
        codes[data.index] = {"plus": 0, "minus": 1}.get(data.record, -1)
        return codes
    found = tuple(
        np.float32(player.clip * rows(plan, data, player)) for player in players(plan)
    )
    return found if len(found) == 2 else found[0]


def _compiled(plan: Any, public: Keys) -> Callable[..., jax.Array]:
    """Returns the compiled simulation: (records of W data sets, keys (n,)) -> (W, n, L)."""
    by_iterate = plan.released == "vertices of iterates"
    value_fn: Any = _Linear() if len(players(plan)) == 1 else MatrixGame()
    if plan.released == "queries":
        value_fn = queries(plan)

    def run(data_sets: Any, own: Keys) -> jax.Array:
        algorithm = plan.algorithm(simulation.run_keys(plan, own, public))

        def drawn(records: Any) -> jax.Array:
            def step(state: Any, _: None) -> tuple[Any, jax.Array]:
                state, info = algorithm.step(state, records, value_fn=value_fn)
                return state, info.release

            start = algorithm.init(plan.uniform())
            end, made = jax.lax.scan(step, start, None, length=plan.num_steps)
            if by_iterate:
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


# --- attacks ------------------------------------------------------------------------


def attacks(
    plan: Any, canary: Canary, first: np.ndarray, second: np.ndarray
) -> dict[str, Score]:
    """Returns all attacks by name, learned from transcripts of the canary's two data sets.

    * *likelihood ratio*: the claimed one, of independent draws from softmaxes.
    * *histogram*: ratios of counts, law by law. It finds any other law of a vertex.
    * *pairs*: of counts of two vertices at once, of the same draw in a step and the next,
      and of both players in a step: it finds what draws have in common.
    """
    cells = num_laws(plan) * width(plan)
    found = {
        "likelihood ratio": _likelihood_ratio(plan, (canary.first, canary.second)),
        "histogram": _histogram(first, second, cells),
    }
    if plan.released != "vertices of iterates" and cells**2 <= _PAIRS:
        found["pairs"] = _pairs(plan, first, second)
    return found


def _likelihood_ratio(plan: Any, data: Sequence[DataSet]) -> Score:
    first, second = data
    if plan.released == "queries":
        return lambda x: _answered(plan, first, x) - _answered(plan, second, x)
    one, other = (laws(plan, each) for each in data)
    table = (one - other).reshape(-1)
    return lambda transcripts: table[transcripts].sum(axis=1)


def laws(plan: Any, data: DataSet) -> np.ndarray:
    """Returns the plan's log-probabilities (laws, width) of vertices; 0 where none is."""
    every = players(plan)
    found = np.zeros((plan.num_steps, len(every), width(plan)))
    for i, player in enumerate(every):
        found[:, i, : player.dim] = _drawn_from(plan, data, player)
    return found.reshape(-1, width(plan))


def _drawn_from(plan: Any, data: DataSet, player: Player) -> np.ndarray:
    """Returns log-probabilities (T, dim) of one player's vertices at each step."""
    if plan.released == "vertices of batches":
        return _drawn_by_batches(plan, data, player)
    grid = player.grid
    units = np.clip(np.nan_to_num(rows(plan, data, player)), -1, 1)
    units = units.astype(np.int64) * 2**grid.bits
    size = plan.sampling.rows(plan.num_examples)
    sign = 1 if player.name == "y" else -1
    scores = np.zeros(player.dim, np.int64)
    found = []
    for step in range(plan.num_steps):
        found.append(log_softmax(scores * _NATS))
        total = units[step * size : (step + 1) * size].sum(axis=0)
        scores = scores + sign * ((total * grid.multiplier) >> grid.shift)
        scores = np.maximum(scores - scores.max(), simplex.LOWEST)
    return np.stack(found)


def _drawn_by_batches(plan: Any, data: DataSet, player: Player) -> np.ndarray:
    """Returns the same of draws from the scores of a step's batch alone."""
    grid = player.grid
    units = np.clip(np.nan_to_num(rows(plan, data, player)), -1, 1)
    units = units.astype(np.int64) * 2**grid.bits
    size = plan.sampling.rows(plan.num_examples)
    found = []
    for step in range(plan.num_steps):
        first = 0 if size == plan.num_examples else step * size
        total = units[first : first + size].sum(axis=0)
        above = (total - total.min()) * grid.multiplier >> grid.shift
        found.append(log_softmax(np.maximum(-above, simplex.LOWEST) * _NATS))
    return np.stack(found)


def _answered(plan: Any, data: DataSet, transcripts: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities (n,) of each run's drawn queries."""
    # All are alike, so only two things are drawn: a query or a negated one.
    half, grid = plan.num_queries // 2, plan.grid
    value = float(queries(plan).values(0)[0])
    total = {"plus": 1, "minus": -1}.get(data.record, 0) * 2**grid.bits
    unit = plan.num_examples * 2.0**grid.bits * grid.multiplier / 2.0**grid.shift
    step_size = plan.histogram_step_size * plan.query_range / 2
    scores = np.zeros((len(transcripts), 2), np.int64)
    # Of the first cell; the second has the negative.
    logits = np.zeros(len(transcripts))
    found = np.zeros(len(transcripts))
    for step, drawn in enumerate(transcripts.T):
        negated = (drawn % plan.num_queries >= half).astype(int)
        law = log_softmax(scores * _NATS, axis=1) - np.log(half)
        found += np.take_along_axis(law, negated[:, None], axis=1)[:, 0]
        high, low = np.exp(logits), np.exp(-logits)
        answer = (high - low) / (high + low + plan.domain_size - 2)
        logits = logits + step_size * (1 - 2 * negated) * value
        so_far, before = (
            (t * total * grid.multiplier) >> grid.shift for t in (step + 1, step)
        )
        change = so_far - before - np.rint(unit * answer).astype(np.int64)
        scores = scores + np.stack([change, -change], axis=1)
        scores -= scores.max(axis=1, keepdims=True)
        scores = np.maximum(scores, simplex.LOWEST)
    return found


def _histogram(first: np.ndarray, second: np.ndarray, size: int) -> Score:
    counts = [np.bincount(x.reshape(-1), minlength=size) + 1 for x in (first, second)]
    ratio = np.log(counts[0] / counts[1])
    return lambda transcripts: ratio[transcripts].sum(axis=1)


def _pairs(plan: Any, first: np.ndarray, second: np.ndarray) -> Score:
    size = num_laws(plan) * width(plan)
    shape = (plan.num_steps, num_laws(plan) // plan.num_steps, -1)

    def paired(transcripts: np.ndarray) -> np.ndarray:
        x = transcripts.reshape(len(transcripts), *shape).astype(np.int64)
        pairs = [x[:, :-1] * size + x[:, 1:], x[:, :, :-1] * size + x[:, :, 1:]]
        return np.concatenate([p.reshape(len(x), -1) for p in pairs], axis=1)

    learned = _histogram(paired(first), paired(second), size**2)
    return lambda transcripts: learned(paired(transcripts))
