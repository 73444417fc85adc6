r"""Synthetic tables from marginals that are measured with noise.

Two methods, both a ``plans.MWEM``, whose bound, integer noise, accountant and ledger are
the library's own. ``"marginals"`` counts every cell of every marginal, and all counts get
Gaussian noise of one release. ``"mwem"`` does so for single columns, and goes on with the
marginals that the histogram so far knows worst, one a round: fewer marginals, with less
noise. The histogram is fitted to what was measured. :func:`chosen` chooses by a rule
on public numbers, which can be wrong, as for the flags with a class of
``bench/tables.py``.

Mirror descent (``plans.SyntheticData``) releases one query a step instead. What
:func:`chosen` takes was better wherever both were measured (``bench/tables.py``); rounds
where all should be measured can be worse than it.

References:
  McKenna, Sheldon and Miklau, `Graphical-model based estimation and inference for
  differential privacy <https://arxiv.org/abs/1901.09136>`_, 2019.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import plans, training
from jaxdp.core import keys as keys_lib
from jaxdp.core.types import Relation
from jaxdp.data import quality
from jaxdp.saddle.oracles.queries import Marginals

Method = Literal["marginals", "mwem", "mirror_descent"]

#: Total variation that noise gives a marginal, all being measured, above which rounds are
#: taken: better where few columns depend on one another (``bench/tables.py``).
MUCH_NOISE = 0.1


def marginals(sizes: Sequence[int], degrees: Sequence[int]) -> Marginals:
    """Returns the queries of all sets of columns of the given sizes.

    Args:
      sizes: cells of each column.
      degrees: numbers of columns of a set, each in [1, len(sizes)].

    Raises:
      ValueError: a degree that is out of range or there twice, named ``degree``.
    """
    width = len(sizes)
    if not degrees or len(set(degrees)) < len(degrees):
        raise ValueError(f"degree must be different integers, got {tuple(degrees)}")
    for degree in degrees:
        if not 1 <= degree <= width:
            raise ValueError(
                f"degree must be an integer >= 1 and <= {width}, got {degree}"
            )
    if len(degrees) == 1:
        return Marginals(tuple(sizes), degrees[0])
    sets = [itertools.combinations(range(width), degree) for degree in sorted(degrees)]
    return Marginals(tuple(sizes), attributes=tuple(itertools.chain(*sets)))


# --- the release -------------------------------------------------------------------


def measurement(
    queries: Marginals, *, num_examples: int, relation: Relation
) -> plans.MWEM:
    """Returns the plan that releases all marginals once; noise is to be calibrated.

    One record moves the counts by at most ``sqrt(M) * plan.sensitivity`` in L2, of M
    marginals: it lies in one cell of each at most, of blanks or of others.
    """
    return plans.MWEM(
        num_examples=num_examples,
        num_steps=1,
        relation=relation,
        sizes=queries.sizes,
        attributes=queries.columns,
        num_start=len(queries.columns),
    )


def rounds(
    queries: Marginals, num_rounds: int, *, num_examples: int, relation: Relation
) -> plans.MWEM:
    """Returns the plan that measures columns, and then a marginal a round.

    Rounds draw from all marginals, columns among them; noise is to be calibrated.
    """
    columns = tuple((i,) for i in range(len(queries.sizes)))
    more = tuple(one for one in queries.columns if len(one) > 1)
    return plans.MWEM(
        num_examples=num_examples,
        num_steps=1 + num_rounds,
        relation=relation,
        sizes=queries.sizes,
        attributes=columns + more,
        num_start=len(columns),
    )


def expected_noise(queries: Marginals, noise_std: float) -> float:
    """Returns by how much noise moves a measured marginal, in total variation, on average.

    Args:
      queries: the marginals.
      noise_std: deviation of the noise on each share.
    """
    cells = float(np.mean(np.diff(queries.offsets)))
    # The mean of the absolute value of normal noise, half of it summed over the cells.
    return cells * noise_std / math.sqrt(2 * math.pi)


def chosen(queries: Marginals, noise_std: float) -> tuple[Method, str]:
    """Returns the method for a table, by public numbers, and why.

    Rounds are taken where they measure fewer marginals than there are, and noise would
    drown those if all were measured. Elsewhere, measuring all is better on tables in which
    most pairs of columns depend on one another, and rounds may be where few do; nothing
    public tells which.

    Args:
      queries: the marginals.
      noise_std: deviation of the noise on a share, of all measured at once.
    """
    count, fewer = len(queries.columns), 2 * len(queries.sizes)
    if count <= fewer:
        return "marginals", f"{count} tables are no more than rounds would measure"
    noise = expected_noise(queries, noise_std)
    said = f"noise would move each of {count} tables by {noise:.2g} in total variation"
    if noise > MUCH_NOISE:
        return "mwem", f"{said} if all were measured, which is over {MUCH_NOISE:g}"
    return "marginals", f"{said}, which is not over {MUCH_NOISE:g}"


class Choice(NamedTuple):
    """A calibrated plan, its method, and why that one; public."""

    method: Method
    plan: plans.MWEM | plans.SyntheticData
    #: Deviation of the noise on each measured share; None of mirror descent.
    noise_std: float | None
    reason: str


def planned(
    queries: Marginals,
    *,
    num_examples: int,
    relation: Relation,
    epsilon: float,
    delta: float,
    method: Method | Literal["auto"] = "auto",
    num_steps: int | None = None,
) -> Choice:
    """Returns the calibrated plan of a method.

    Args:
      queries: all marginals that are to be answered.
      num_examples: n; public.
      relation: which data sets are neighbours.
      epsilon: budget of the release.
      delta: budget of the release.
      method: how queries are answered; ``"auto"`` takes what :func:`chosen` says.
      num_steps: of mirror descent, by default by its bound; or rounds of ``"mwem"``, by
        default one for each column.

    Raises:
      ValueError: no noise meets the budget.
    """
    size: dict[str, Any] = {"num_examples": num_examples, "relation": relation}
    budget = {"epsilon": epsilon, "delta": delta}
    reason = "it was asked for"
    if method == "auto":
        all_at_once = measurement(queries, **size).calibrate(**budget)
        method, reason = chosen(queries, all_at_once.noise_std)
        if method == "marginals":
            return Choice(method, all_at_once, all_at_once.noise_std, reason)
    if method != "mirror_descent":
        plan = measurement(queries, **size)
        if method == "mwem":
            plan = rounds(queries, num_steps or len(queries.sizes), **size)
        plan = plan.calibrate(**budget)
        return Choice(method, plan, plan.noise_std, reason)
    steps = {} if num_steps is None else {"num_steps": num_steps}
    # The bound's step leaves budget where steps are few, of which ``certified`` warns; the
    # largest was better.
    played = plans.SyntheticData._from_theorem(
        "certified",
        num_examples=num_examples,
        domain_size=queries.domain_size,
        num_queries=2 * queries.num_queries,  # And the negations.
        query_range=queries.query_range,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        **steps,
    )
    return Choice(method, played.calibrate(**budget), None, reason)


class Release(NamedTuple):
    """Result of a run; public."""

    histogram: np.ndarray  # shape=(domain_size,), dtype=float32
    #: What was measured, and of which marginals; None of mirror descent.
    measured: quality.Measurements | None
    #: 95% interval of the share of records outside the domain; None of mirror descent.
    outside: tuple[float, float] | None
    report: dict[str, Any]


def release(
    choice: Choice,
    keys: keys_lib.Keys,
    codes: np.ndarray,
    queries: Marginals,
    *,
    progress: bool = False,
) -> Release:
    """Runs a plan on codes and returns the histogram.

    Args:
      choice: of :func:`planned`, for as many records.
      keys: of this run.
      codes: integers (n,); private. One outside the domain counts in no cell, and what a
        marginal lacks of sum one is spread over its cells: such a record lies in all alike.
      queries: those of the plan.
      progress: draws a progress bar, where there is more than one step.
    """
    plan: Any = choice.plan
    value_fn: Any = queries  # Of three arguments, not two.
    if choice.noise_std is None:
        start = jnp.full(queries.domain_size, 1 / queries.domain_size, jnp.float32)
    else:
        value_fn, start = plan.queries, plan.uniform()
    result = training.fit(
        plan, keys, start, codes, value_fn=value_fn, progress=progress
    )
    if choice.noise_std is None:
        return Release(np.asarray(result.params), None, None, result.report)
    histogram, shares, times = map(np.asarray, result.params)
    with np.errstate(divide="ignore"):
        stds = choice.noise_std / np.sqrt(times)  # Infinite where nothing was measured.
    lengths = np.diff(plan.queries.offsets)
    lacks = 1 - np.add.reduceat(shares, plan.queries.offsets[:-1])
    shares = shares + np.repeat(np.where(times > 0, lacks / lengths, 0), lengths)
    found = quality.Measurements(plan.queries, shares, stds)
    return Release(histogram, found, _outside(lacks, lengths, stds), result.report)


def _outside(
    lacks: np.ndarray, lengths: np.ndarray, stds: np.ndarray
) -> tuple[float, float]:
    """Returns an interval of the share of records in no cell: post-processing.

    Each measured marginal lacks that share, plus the noise of all its cells.
    """
    precisions = 1 / (lengths * stds**2)
    share = np.sum(precisions * lacks) / np.sum(precisions)
    quantile = statistics.NormalDist().inv_cdf((1 + quality.COVERAGE) / 2)
    reach = quantile / math.sqrt(np.sum(precisions))
    low, high = np.clip([share - reach, share + reach], 0, 1)
    return float(low), float(high)


def drawn(keys: keys_lib.Keys, histogram: np.ndarray, num_records: int) -> np.ndarray:
    """Draws records of a histogram by systematic sampling: post-processing.

    Every cell gets its expected number of records, rounded up or down, and the cells of
    the first columns together as well. Independent records (``jaxdp.synthetic_records``)
    would add the sampling error of a data set of that size.

    Args:
      keys: of the run; not spent.
      histogram: weights (domain_size,), >= 0, not all zero.
      num_records: how many.

    Returns:
      Codes, int64 (num_records,), in random order.
    """
    draws = keys_lib.uniforms(keys, (num_records + 1,))
    ends = np.cumsum(np.asarray(histogram, np.float64))
    places = (np.arange(num_records) + draws[-1]) / num_records * ends[-1]
    codes = np.searchsorted(ends, places, side="right")
    # A place may round up to the end of all; the last cell with weight is the one before.
    codes = np.minimum(codes, np.flatnonzero(histogram)[-1])
    return codes[np.argsort(draws[:-1])]
