"""Attacks on drawn vertices: scores of a run, larger for the first of two data sets.

The attacker follows the scores of both data sets, given the vertices that were released,
in exact integers of its own: nothing here calls the code that is audited. Transcripts are
those of :func:`jaxdp.auditing.vertices.transcripts`: each vertex with the number of the
law that it is claimed to be drawn from.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import log_softmax

from jaxdp.auditing.attacks import Score
from jaxdp.auditing.canaries import Canary, DataSet
from jaxdp.auditing.vertices import Player, num_laws, players, queries, rows, width
from jaxdp.kernels import simplex

_NATS = np.log(2) / 2**simplex.BITS
_PAIRS = 2**22  # cells at most, of a table of pairs


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
