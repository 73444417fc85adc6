"""Quality of a synthetic table: its columns, pairs of columns and correlations.

Three references are possible: public records, the private records (which is not private)
and measured counts. The last were released with noise of a known deviation, so that
intervals for the distance to the private records follow from them, and cost nothing.

Records that the bins do not describe lie in no cell. Intervals are of the private table in
which those are spread evenly over all cells, which is what is measured and fitted; if they
are a share q, it is at most q from the table of the described records alone, in total
variation. The other references are of described records.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.binning import Binning
from jaxdp.saddle.oracles.queries import Marginals

#: Probability with which each interval holds what it is of; of correlations, about that.
COVERAGE = 0.95
#: What the numbers of a report are of.
NOTE = (
    "interval is of the private records; those that the bins do not describe, whose share "
    "is in undescribed, are spread evenly over all cells. test and unsafe are of described "
    "records alone. Correlations are of records without a blank in either column."
)
_DRAWS = 1000  # Of simulated noise; its seed is fixed, for the noise is no secret.

#: Sets of one or two columns.
Columns = tuple[int, ...]
#: Shares of the cells of each set: arrays with an axis for each column.
Tables = dict[Columns, np.ndarray]


class Measured(NamedTuple):
    """Noised tables, and the deviation of the noise on a cell of each."""

    tables: Tables
    stds: dict[Columns, float]


def tables(bins: Binning, weights: np.ndarray) -> Tables:
    """Returns the shares of all columns and pairs.

    Args:
      bins: of the columns.
      weights: of each cell of the domain (domain_size,); of sum 1.
    """
    columns = range(len(bins.columns))
    sets = [*((c,) for c in columns), *itertools.combinations(columns, 2)]
    queries = Marginals(bins.sizes, attributes=tuple(sets))
    answers = _answers(queries, jnp.asarray(weights, jnp.float32))
    shares = (np.asarray(answers) + 1) / 2
    return _split(queries, shares)


@functools.partial(jax.jit, static_argnums=0)
def _answers(queries: Marginals, weights: jax.Array) -> jax.Array:
    return queries.evaluate(weights)


def _split(queries: Marginals, shares: np.ndarray) -> Tables:
    parts = np.split(np.asarray(shares, np.float64), queries.offsets[1:-1])
    return {
        columns: part.reshape([queries.sizes[c] for c in columns])
        for columns, part in zip(queries.columns, parts, strict=True)
    }


class Measurements(NamedTuple):
    """Noised shares of marginals; public."""

    queries: Marginals
    shares: np.ndarray  # shape=(m,)
    #: shape=(marginals,); deviation of the noise on a share, infinite of none measured.
    noise_stds: np.ndarray


def measured(given: Measurements) -> Measured:
    """Returns all columns and pairs that noised marginals tell of.

    Each is summed from the marginal in which its cells have the least noise.
    """
    found = Measured({}, {})
    parts = _split(given.queries, given.shares).items()
    for (columns, table), noise_std in zip(parts, given.noise_stds, strict=True):
        for size in (1, 2):
            for some in itertools.combinations(columns, size):
                others = tuple(i for i, c in enumerate(columns) if c not in some)
                summed = math.prod(table.shape[i] for i in others)
                std = noise_std * math.sqrt(summed)
                if std < found.stds.get(some, math.inf):
                    found.stds[some] = std
                    found.tables[some] = table.sum(others)
    return found


# --- distances ---------------------------------------------------------------------


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    """Returns half of the summed differences of two tables."""
    return float(np.abs(one - other).sum() / 2)


def distance_interval(
    table: np.ndarray, noised: np.ndarray, noise_std: float
) -> tuple[float, float]:
    """Returns an interval for the total variation between a table and the true one.

    By the triangle inequality the distance to the noised table is off by half of the
    noise's L1 norm at most, whatever the table was fitted to.

    Args:
      table: shares of a synthetic table.
      noised: true shares plus noise.
      noise_std: deviation of the noise on each cell.
    """
    noise = np.random.default_rng(0).normal(size=(_DRAWS, table.size))
    norms = noise_std * np.abs(noise).sum(1) / 2
    reach = float(np.quantile(norms, COVERAGE))
    near = total_variation(table, noised)
    return max(0.0, near - reach), min(1.0, near + reach)


def correlation(table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> Any:
    """Returns the correlation of two columns from their table; NaN where one is constant.

    Args:
      table: shares (..., k, l); noised ones may be negative. NaN where their sum is not
        positive.
      rows: numbers of the first column's cells (k,).
      columns: numbers of the second column's cells (l,).
    """
    total = table.sum((-2, -1), keepdims=True)
    table = np.where(total > 0, table, np.nan) / np.where(total > 0, total, 1)
    one, other = table.sum(-1), table.sum(-2)
    x = rows - (one @ rows)[..., None]
    y = columns - (other @ columns)[..., None]
    covariance = np.einsum("...kl,...k,...l->...", table, x, y)
    squares = np.einsum("...k,...k->...", one, x**2) * np.einsum(
        "...l,...l->...", other, y**2
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(squares > 0, covariance / np.sqrt(squares), np.nan)


def correlation_interval(
    table: np.ndarray,
    noised: np.ndarray,
    noise_std: float,
    rows: np.ndarray,
    columns: np.ndarray,
) -> tuple[float, float]:
    """Returns an interval for the true correlation, by simulated noise on a table.

    It holds it with a probability of about 95%. The error of the noised table's correlation
    is taken to be distributed as if the synthetic table were the true one (the basic
    bootstrap), which on a skewed table gave 92% of 300 runs; all of [-1, 1] where noise
    leaves nothing to see.
    """
    noise = noise_std * np.random.default_rng(0).normal(size=(_DRAWS, *table.shape))
    errors = correlation(table + noise, rows, columns) - correlation(
        table, rows, columns
    )
    seen = correlation(noised, rows, columns)
    if not (np.isfinite(seen) and np.isfinite(errors).all()):
        return -1.0, 1.0
    low, high = np.quantile(errors, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(np.clip(seen - high, -1, 1)), float(np.clip(seen - low, -1, 1))


def scores(bins: Binning) -> dict[int, np.ndarray]:
    """Returns the numbers of the cells of columns that have an order.

    The middle of each bin; 0 and 1 for a column of two categories. A column of more
    categories has none, nor has the cell of blanks, the last.
    """
    found = {}
    for i, column in enumerate(bins.columns):
        if column.edges:
            edges = np.array(column.edges, np.float64)
            found[i] = edges[:-1] / 2 + edges[1:] / 2
        elif len(column.values) == 2:
            found[i] = np.arange(2.0)
    return found


# --- the report --------------------------------------------------------------------


def judged(
    bins: Binning,
    synthetic: np.ndarray,
    counts: Measured | None,
    references: dict[str, np.ndarray],
) -> dict[str, list[dict[str, Any]]]:
    """Compares a synthetic table with all that is known, column by column.

    Args:
      bins: of the columns.
      synthetic: weights of the cells of its records (domain_size,).
      counts: noised tables, if there are.
      references: weights of other records, by their name in the report.

    Returns:
      ``{"tables": [...], "correlations": [...]}``, for JSON. A table is of one or two
      ``columns``, with the total variation to each reference by its name, and
      ``interval``, which holds the one to the private records; those that no bin describes
      are spread evenly over all cells. A correlation, of the records without a blank in
      either column, has ``synthetic`` and that of each reference, and ``interval`` of the
      private ones.
    """
    own = tables(bins, synthetic)
    others = {name: tables(bins, weights) for name, weights in references.items()}
    numbers = scores(bins)
    distances, correlations = [], []
    for columns, table in own.items():
        names = {"columns": [bins.names[c] for c in columns]}
        far: dict[str, Any] = {
            name: total_variation(table, one[columns]) for name, one in others.items()
        }
        known = counts is not None and columns in counts.tables
        if counts is not None and known:
            noised = counts.tables[columns], counts.stds[columns]
            far["interval"] = list(distance_interval(table, *noised))
        distances.append(names | far)
        if len(columns) < 2 or not all(c in numbers for c in columns):
            continue
        axes = numbers[columns[0]], numbers[columns[1]]
        present = tuple(slice(len(axis)) for axis in axes)  # No blanks.
        found: dict[str, Any] = {
            "synthetic": _finite(correlation(table[present], *axes))
        }
        for name, one in others.items():
            found[name] = _finite(correlation(one[columns][present], *axes))
        if counts is not None and known:
            noised = counts.tables[columns][present], counts.stds[columns]
            ends = correlation_interval(table[present], *noised, *axes)
            found["interval"] = list(ends)
        correlations.append(names | found)
    return {"tables": distances, "correlations": correlations}


def summarised(judged: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns the means and the worst of :func:`judged`, for columns, pairs, correlations.

    Returns:
      ``{"columns": {...}, "pairs": {...}, "correlations": {...}}``, each with its
      ``count`` and, by the name of each reference, the ``mean``, the ``worst`` and
      ``where`` that is. Of ``interval`` they are of the upper ends; of correlations, of
      the distance to the farther end.
    """
    groups: dict[str, list[dict[str, Any]]] = {"columns": [], "pairs": []}
    for one in judged["tables"]:
        groups["columns" if len(one["columns"]) == 1 else "pairs"].append(one)
    groups["correlations"] = [
        {"columns": one["columns"]} | _differences(one)
        for one in judged["correlations"]
    ]
    return {name: _group(rows) for name, rows in groups.items()}


def _differences(row: dict[str, Any]) -> dict[str, float]:
    """Returns how far a synthetic correlation is from the others, where both are known."""
    own = row["synthetic"]
    found = {}
    for name, value in row.items():
        if name in ("columns", "synthetic") or value is None or own is None:
            continue
        ends = value if isinstance(value, list) else [value]
        found[name] = max(abs(own - end) for end in ends)
    return found


def _group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"count": len(rows)}
    for name in ("interval", "test", "unsafe"):
        values = [
            (row[name][1] if isinstance(row[name], list) else row[name], row["columns"])
            for row in rows
            if name in row
        ]
        if values:
            worst, where = max(values)
            mean = float(np.mean([value for value, _ in values]))
            found[name] = {"mean": mean, "worst": worst, "where": where}
    return found


def _finite(x: Any) -> float | None:
    """Returns a number for JSON, which has no NaN."""
    return float(x) if np.isfinite(x) else None
