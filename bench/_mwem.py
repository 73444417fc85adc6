r"""MWEM: synthetic data by choosing a query, measuring it, and moving the weights.

The baseline of private synthetic data, with its usual improvement: all past measurements
are replayed in every round. :func:`tune_mwem` takes the best mean of a grid of rounds and
of two outputs, *by the error of the very runs that are reported*: in the baseline's favour,
and not charged to it.

References:
  Hardt, Ligett and McSherry, A simple and practical algorithm for differentially private
  data release, 2012.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench import problems
from jaxdp.core import noise

NUM_ROUNDS = (5, 10, 20, 40, 80, 160, 320)


class Mwem(NamedTuple):
    """What a run of MWEM releases, and what it cost.

    Attributes:
      average: weights of the cells: the mean over the rounds.
      last: those after the last round.
      rho: zCDP of all choices and measurements.
    """

    average: np.ndarray
    last: np.ndarray
    rho: float


def mwem(
    queries: np.ndarray,
    counts: np.ndarray,
    seed: int,
    *,
    num_rounds: int,
    rho: float,
    num_replays: int = 20,
) -> Mwem:
    r"""MWEM on an explicit histogram: choose a query, measure it, move the weights.

    Every round spends rho/T, half on the choice and half on the measurement. A replaced
    record moves a 0/1 query's count by at most 1: the exponential mechanism on the absolute
    errors, of sharpness :math:`\eta`, is :math:`\eta^2/2`-zCDP (bounded range), and a
    discrete Gaussian of std :math:`\sigma` is :math:`1/2\sigma^2`-zCDP.

    Args:
      queries: (m, cells), 0 or 1.
      counts: integers (cells,), of the records.
      seed: of choices and noise.
      num_rounds: T.
      rho: of the run.
      num_replays: times that all measurements so far are gone through in every round.
    """
    coins = noise.Coins(b"mwem", seed)
    rng = np.random.default_rng(seed)
    q = np.asarray(queries, np.float64)
    n, cells = int(np.sum(counts)), q.shape[1]
    truth = q @ counts
    sharpness = math.sqrt(2 * rho / (2 * num_rounds))
    grid = 2**8  # Of a count, so that rounding the noise up costs nothing.
    std = math.ceil(grid / sharpness)
    measured: dict[int, list[float]] = {}
    weights, total = np.full(cells, 1 / cells), np.zeros(cells)
    for _ in range(num_rounds):
        errors = sharpness * np.abs(truth - n * (q @ weights))
        chosen = int(np.argmax(errors + rng.gumbel(size=len(errors))))
        noised = grid * int(truth[chosen]) + noise.discrete_gaussian(coins, std, 1)[0]
        measured.setdefault(chosen, []).append(float(noised / grid / n))
        answers = {j: float(np.mean(v)) for j, v in measured.items()}
        for _ in range(num_replays):
            for j, answer in answers.items():
                weights *= np.exp(q[j] * (answer - q[j] @ weights) / 2)
                weights /= weights.sum()
        total += weights
    spent = num_rounds * (sharpness**2 / 2 + (grid / std) ** 2 / 2)
    return Mwem(total / num_rounds, weights, spent)


class TunedMwem(NamedTuple):
    """The best of a grid.

    Attributes:
      errors: float64 (number of seeds,), largest errors of the best entry's runs.
      num_rounds: T of the best entry.
      output: ``"average"`` or ``"last"``.
      table: mean error of every (num_rounds, output).
    """

    errors: np.ndarray
    num_rounds: int
    output: str
    table: dict[tuple[int, str], float]


def tune_mwem(
    domain: problems.BinaryDomain,
    num_examples: int,
    seeds: Sequence[int],
    *,
    rho: float,
    num_rounds: Sequence[int] = NUM_ROUNDS,
    on_population: bool = False,
) -> TunedMwem:
    """MWEM on fresh records for each seed, with the rounds that are best on average.

    Args:
      domain: with its records.
      num_examples: n.
      seeds: of records and noise.
      rho: of a run.
      num_rounds: the grid.
      on_population: whether errors are against the population instead of the records.
    """
    found: dict[tuple[int, str], list[float]] = {}
    for seed in seeds:
        shares = domain.frequencies(domain.make_data(num_examples, seed))
        counts = np.rint(shares * num_examples).astype(int)
        truth = None if on_population else shares
        for rounds in num_rounds:
            run = mwem(domain.queries, counts, seed, num_rounds=rounds, rho=rho)
            for name, weights in (("average", run.average), ("last", run.last)):
                error = domain.max_error(weights, truth)
                found.setdefault((rounds, name), []).append(error)
    table = {entry: float(np.mean(errors)) for entry, errors in found.items()}
    best = min(table, key=lambda entry: table[entry])
    return TunedMwem(np.array(found[best]), *best, table)
