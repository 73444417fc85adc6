r"""Synthetic tables: pairs of columns and correlations, beside noisy marginals and others.

The mixed table: eight columns (age, education, sex, income, region, married, hours, owner)
in 16000 cells, with 28 pairs, whose dependences are made up. Everything private is at
(1, 1e-5)-DP under replace-one, or (0.1, 1e-5). Figures are means over seeds, against the
private records themselves: the total variation of a pair's table, and the error of a
correlation, over 15 pairs of columns that have an order.

*Noisy pairs* are the 28 tables with the noise that measured marginals have, set to zero
where negative and scaled to sum one: no synthetic table, for they contradict one another.
*Resampled* are as many records drawn from the private ones: the error of a sample, without
privacy. *Independent columns* are the product of the true single columns.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxdp
from bench import _harness
from jaxdp.data import binning, quality, synthesis

DELTA = 1e-5
SPEC = {
    "age": {"edges": [18, 30, 40, 50, 65, 90]},
    "education": {"values": ["none", "school", "bachelor", "master", "phd"]},
    "sex": {"values": ["f", "m"]},
    "income": {"edges": [0, 10000, 20000, 35000, 60000, 300000]},
    "region": {"values": ["N", "E", "S", "W"]},
    "married": {"values": ["yes", "no"]},
    "hours": {"edges": [0, 30, 40, 50, 81]},
    "owner": {"values": ["yes", "no"]},
}
BINS = binning.binning(SPEC)
PAIRS = synthesis.marginals(BINS.sizes, (2,))


def records(num_examples: int, seed: int) -> np.ndarray:
    """Makes codes of the mixed table, int32 (num_examples,)."""
    rng, n = np.random.default_rng(seed), num_examples
    age = np.clip(rng.normal(42, 14, n), 18, 89).round()
    level = rng.choice(5, n, p=[0.1, 0.4, 0.3, 0.15, 0.05])
    male = rng.integers(0, 2, n)
    logs = 9.5 + 0.25 * level + 0.012 * (age - 40) + 0.1 * male + rng.normal(0, 0.4, n)
    region = rng.choice(4, n, p=[0.4, 0.3, 0.2, 0.1])
    single = rng.random(n) >= 1 / (1 + np.exp(-(age - 35) / 8))
    hours = np.clip(rng.normal(36 + 4 * male, 8, n), 0, 80).round()
    rents = rng.random(n) >= 1 / (1 + np.exp(-(logs - 10.2) * 2))
    numbers = {"age": age, "income": np.exp(logs), "hours": hours}
    cells = {"education": level, "sex": male, "region": region}
    cells |= {"married": single.astype(int), "owner": rents.astype(int)}
    for name, values in numbers.items():
        column = BINS.columns[BINS.names.index(name)]
        cells[name] = np.searchsorted(column.edges[1:-1], values, side="right")
    return np.ravel_multi_index([cells[name] for name in BINS.names], BINS.sizes)


def weights_of(codes: np.ndarray) -> np.ndarray:
    """Shares of the cells: float32 (domain_size,)."""
    counts = np.bincount(codes, minlength=BINS.domain_size)
    return (counts / len(codes)).astype(np.float32)


def noisy_pairs(weights: np.ndarray, noise_std: float, seed: int) -> quality.Tables:
    """Tables of all pairs with noise, made distributions one by one."""
    rng = np.random.default_rng(seed)
    found = {}
    for columns, table in quality.tables(BINS, weights).items():
        noised = np.maximum(table + noise_std * rng.normal(size=table.shape), 0)
        found[columns] = noised / noised.sum()
    return found


def errors(tables: quality.Tables, true: quality.Tables) -> tuple[float, float, float]:
    """Mean and largest total variation of pairs, mean error of the correlations."""
    pairs = [columns for columns in true if len(columns) == 2]
    far = [quality.total_variation(tables[c], true[c]) for c in pairs]
    numbers, off = quality.scores(BINS), []
    for one, other in pairs:
        if one in numbers and other in numbers:
            both = [
                quality.correlation(t[one, other], numbers[one], numbers[other])
                for t in (tables, true)
            ]
            off.append(abs(both[0] - both[1]))
    return float(np.mean(far)), float(np.max(far)), float(np.mean(off))


def methods(
    codes: np.ndarray, epsilon: float, seed: int
) -> Iterator[tuple[str, quality.Tables]]:
    """Name and tables of each."""
    n, weights = len(codes), weights_of(codes)
    rng = np.random.default_rng(seed)
    budget: dict[str, Any] = {"relation": "replace_one", "delta": DELTA}
    budget |= {"num_examples": n, "epsilon": epsilon}
    measured = synthesis.planned(PAIRS, method="marginals", **budget)
    assert measured.noise_std is not None
    yield "noisy pairs", noisy_pairs(weights, measured.noise_std, seed)
    for degrees in ((1,), (2,), (1, 2), (3,)):
        queries = synthesis.marginals(BINS.sizes, degrees)
        choice = synthesis.planned(queries, method="marginals", **budget)
        keys = jaxdp.Keys.insecure(seed)
        result = synthesis.release(choice, keys, codes, queries)
        drawn = weights_of(synthesis.drawn(keys, result.histogram, n))
        words = " and ".join(map(str, degrees))
        yield f"marginals of {words}, records", quality.tables(BINS, drawn)
    played = synthesis.planned(PAIRS, method="mirror_descent", **budget)
    keys = jaxdp.Keys.insecure(seed)
    result = synthesis.release(played, keys, codes, PAIRS)
    drawn = weights_of(synthesis.drawn(keys, result.histogram, n))
    yield "mirror descent, records", quality.tables(BINS, drawn)
    yield "resampled", quality.tables(BINS, weights_of(rng.choice(codes, n)))
    product = np.ones(())
    for i in range(len(BINS.sizes)):
        product = product[..., None] * quality.tables(BINS, weights)[(i,)]
    flat = product.reshape(-1).astype(np.float32)
    yield "independent columns", quality.tables(BINS, flat)
    uniform = np.full(BINS.domain_size, 1 / BINS.domain_size, np.float32)
    yield "uniform", quality.tables(BINS, uniform)


def run(quick: bool) -> list[_harness.Row]:
    """Rows of the mixed table, and of both methods on many queries."""
    seeds = 1 if quick else 10
    cases = [(2000, 1.0)] if quick else [(20_000, 1.0), (20_000, 0.1), (2000, 1.0)]
    rows = []
    for n, epsilon in cases:
        found: dict[str, list[tuple[float, float, float]]] = {}
        for seed in range(seeds):
            codes = records(n, seed)
            true = quality.tables(BINS, weights_of(codes))
            for name, tables in methods(codes, epsilon, seed):
                found.setdefault(name, []).append(errors(tables, true))
        case = f"n = {n}, epsilon {epsilon:g}"
        for name, values in found.items():
            means = [_harness.mean(one) for one in np.transpose(values)]
            for what, mean in zip(
                ("pairs: total variation", "worst pair", "correlations: error"),
                means,
                strict=True,
            ):
                rows.append(_harness.averaged(case, f"{what}: {name}", mean, seeds))
    flags = [(10, 2, 3000)] if quick else [(14, 5, 300), (14, 7, 3000)]
    return rows + many_queries(flags, 1 if quick else 5)


def many_queries(cases: list[tuple[int, int, int]], seeds: int) -> list[_harness.Row]:
    """Largest error of a query by both methods, with more queries than records too."""
    rows = []
    for width, degree, n in cases:
        queries = synthesis.marginals((2,) * width, (degree,))
        case = f"{width} flags, sets of {degree}, n = {n}, epsilon 1"
        budget: dict[str, Any] = {"epsilon": 1.0, "delta": DELTA, "num_examples": n}
        for method in ("marginals", "mirror_descent"):
            choice = synthesis.planned(
                queries, relation="replace_one", method=method, **budget
            )
            worst = []
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                hidden = rng.random((n, 1)) < 0.5
                flags = rng.random((n, width)) < np.where(hidden, 0.7, 0.2)
                codes = flags @ 2 ** np.arange(width)[::-1]
                keys = jaxdp.Keys.insecure(seed)
                result = synthesis.release(choice, keys, codes, queries)
                true = np.bincount(codes, minlength=queries.domain_size) / n
                off = jnp.asarray(result.histogram - true, jnp.float32)
                worst.append(float(jnp.max(jnp.abs(queries.evaluate(off)))) / 2)
            name = f"worst query: {method.replace('_', ' ')}"
            rows.append(_harness.averaged(case, name, _harness.mean(worst), seeds))
    return rows
