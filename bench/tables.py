r"""Synthetic tables beside their peers: a dense table, flags, and a mixed table.

Everything is under replace-one, errors are against the private records, and intervals are
over seeds of records and noise. Cases:

(a) six columns of 2 to 7 cells (5040 in all), all pairs: 295 queries, at (1, 1e-6). All
    pairs depend on one another, by a random log-linear model.
(b) eight binary columns, all triples: 448 queries over 256 cells, at (1, 1e-6). Records of
    the saddle study's random populations.
(c) ten columns, ordinal, categorical and binary (17280 cells), of which few pairs depend
    on one another; all pairs, or all triples, at delta 1e-5.
(d) records of (b) with a hidden class, so few that noise is most of a table.

Methods: *marginals* and *MWEM* are those of ``jaxdp synthesize``, whose own choice, by
public numbers, is *synthesize*; *algorithm 5* is ``plans.SyntheticData`` with 1000 steps,
or 3000 in (b). Peers are :mod:`bench._pgm`'s on ``mbi``, skipped where that is not
installed. Synthetic records are not drawn: histograms are compared. The explicit MWEM of
single queries is in the saddle study, on the populations of (b).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jaxdp
from bench import _harness, _pgm, problems
from bench import synthesize as mixed
from jaxdp.data import synthesis


class Case(NamedTuple):
    """A table, its queries and budget; and which methods are tried."""

    name: str
    sizes: tuple[int, ...]
    degree: int
    num_examples: int
    epsilon: float
    delta: float
    records: Callable[[int, int], np.ndarray]  # (n, seed) -> codes
    peers: tuple[str, ...]
    steps: int = 1000  # of algorithm 5

    @property
    def queries(self) -> jaxdp.Marginals:
        """The marginals that are to be answered."""
        return synthesis.marginals(self.sizes, (self.degree,))


# --- the tables --------------------------------------------------------------------

DENSE = (2, 3, 4, 5, 6, 7)
FLAGS = (2,) * 8
MIXED = (5, 3, 2, 4, 3, 2, 3, 2, 2, 2)


@functools.cache
def dense_population() -> np.ndarray:
    """Makes shares (5040,) of a log-linear model with random terms for all pairs."""
    rng, width = np.random.default_rng(0), len(DENSE)
    logits = np.zeros(DENSE)

    def term(columns: tuple[int, ...], scale: float) -> np.ndarray:
        shape = [DENSE[i] if i in columns else 1 for i in range(width)]
        return scale * rng.normal(size=shape)

    for i in range(width):
        logits = logits + term((i,), 0.7)
    for i in range(width):
        for j in range(i + 1, width):
            logits = logits + term((i, j), 0.4)
    weights = np.exp(logits - logits.max()).reshape(-1)
    return weights / weights.sum()


def dense(n: int, seed: int) -> np.ndarray:
    """Draws codes of the dense table."""
    population = dense_population()
    return np.random.default_rng(seed).choice(len(population), n, p=population)


def random_flags(n: int, seed: int) -> np.ndarray:
    """Draws codes of the saddle study's population of that seed; column 0 is bit 0."""
    codes = problems.binary_domain(seed=seed).make_data(n, seed)
    bits = codes[:, None] >> np.arange(8) & 1
    return np.asarray(np.ravel_multi_index(tuple(bits.T), FLAGS))


def hidden_flags(n: int, seed: int) -> np.ndarray:
    """Draws codes of flags that a hidden class makes likely or not."""
    rng = np.random.default_rng(seed)
    likely = np.where(rng.random((n, 1)) < 0.5, 0.7, 0.2)
    flags = (rng.random((n, 8)) < likely).astype(int)
    return np.asarray(np.ravel_multi_index(tuple(flags.T), FLAGS))


def mixed_records(n: int, seed: int) -> np.ndarray:
    """Draws codes of ten columns: those of the other study, coarser, and two more."""
    cells = np.unravel_index(mixed.records(n, seed), mixed.BINS.sizes)
    age, level, sex, income, region, married, hours, owner = map(np.asarray, cells)
    rng = np.random.default_rng(seed + 1_000_000)
    children = rng.random(n) < np.where(married == 0, 0.7, 0.15)
    smoker = rng.random(n) < 0.35 - 0.06 * level
    level, income = np.array([0, 0, 1, 2, 2])[level], np.minimum(income, 3)
    region, hours = np.minimum(region, 2), np.minimum(hours, 2)
    columns = (age, level, sex, income, region, married, hours, owner, children, smoker)
    codes = np.ravel_multi_index(tuple(c.astype(int) for c in columns), MIXED)
    return np.asarray(codes)


_TWO = ("gaussian", "mst")


def cases(quick: bool) -> list[Case]:
    """Returns the cases; of a quick run fewer and smaller ones.

    Peers are left out where a run of them takes minutes.
    """
    fixed, every = (1.0, 1e-6, dense), (*_TWO, "aim")
    found = [
        Case("a: 295 pairs, n = 10000", DENSE, 2, 10_000, *fixed, every),
        Case("a: 295 pairs, n = 100000", DENSE, 2, 100_000, *fixed, _TWO),
    ]
    name = "b: 448 triples of flags, n = 100000"
    flags = FLAGS, 3, 100_000, 1.0, 1e-6, random_flags
    found.append(Case(name, *flags, ("gaussian",), steps=3000))
    for kind, degree, n, tried in (
        ("pairs", 2, 1000, every),
        ("pairs", 2, 10_000, every),
        ("triples", 3, 1000, ()),
    ):
        name = f"c: {kind} of ten columns, n = {n}"
        table = MIXED, degree, n, 1.0, 1e-5, mixed_records
        found.append(Case(name, *table, tried))
    for n in (300, 1000):
        name = f"d: triples of flags with a class, n = {n}"
        found.append(Case(name, FLAGS, 3, n, 1.0, 1e-5, hidden_flags, ()))
    if quick:
        few = found[0]._replace(num_examples=1000, peers=("gaussian",), steps=100)
        return [few._replace(name="a: 295 pairs, n = 1000")]
    return found


# --- the methods -------------------------------------------------------------------


def errors(case: Case, histogram: np.ndarray, codes: np.ndarray) -> tuple[float, float]:
    """Mean total variation of the marginals, and the largest error of a query."""
    true = np.bincount(codes, minlength=len(histogram)) / len(codes)
    off = jnp.asarray(histogram - true, jnp.float32)
    far = np.abs(np.asarray(case.queries.counts(off)))
    return float(np.add.reduceat(far, case.queries.offsets[:-1]).mean() / 2), far.max()


def ours(case: Case) -> dict[str, synthesis.Choice]:
    """Returns the calibrated plans of our methods, by name."""
    budget: dict[str, Any] = {"epsilon": case.epsilon, "delta": case.delta}
    budget |= {"num_examples": case.num_examples, "relation": "replace_one"}
    plan = functools.partial(synthesis.planned, case.queries, **budget)
    return {
        "marginals": plan(method="marginals"),
        "MWEM": plan(method="mwem"),
        "algorithm 5": plan(method="mirror_descent", num_steps=case.steps),
    }


def chosen(case: Case) -> str:
    """Returns the name of the method that ``jaxdp synthesize`` takes."""
    found = synthesis.planned(
        case.queries,
        num_examples=case.num_examples,
        relation="replace_one",
        epsilon=case.epsilon,
        delta=case.delta,
    )
    return {"marginals": "marginals", "mwem": "MWEM"}[found.method]


def measured(case: Case, seeds: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """Name and errors of every method, for each seed; ``"skipped: ..."`` for none."""
    tables = {seed: case.records(case.num_examples, seed) for seed in seeds}
    for name, choice in ours(case).items():
        found = []
        for seed, codes in tables.items():
            keys = jaxdp.Keys.insecure(seed)
            result = synthesis.release(choice, keys, codes, case.queries)
            found.append(errors(case, result.histogram, codes))
        yield name, found
    yield from peers(case, tables)


def peers(case: Case, tables: dict[int, np.ndarray]) -> Iterator[tuple[str, Any]]:
    """The same of the peers on mbi."""
    makes = {"gaussian": _pgm.gaussian, "mst": _pgm.mst, "aim": _pgm.aim}
    names = {"gaussian": "mbi, Gaussian on all", "mst": "mbi, MST", "aim": "mbi, AIM"}
    for peer in case.peers:
        if not _pgm.installed():
            yield names[peer], _harness.missing("mbi")
            continue
        found = []
        workload = case.queries.columns
        candidates = workload if peer == "gaussian" else _pgm.candidates(peer, workload)
        with _pgm.double() as mbi:
            for seed, codes in tables.items():
                table = _pgm.Records(mbi, codes, case.sizes, candidates, seed)
                makes[peer](table, workload, case.epsilon, case.delta)
                found.append((seed, table.fitted.reshape(-1)))
        yield names[peer], [errors(case, h, tables[seed]) for seed, h in found]


METRICS = ("total variation", "largest error")


def run(quick: bool) -> list[_harness.Row]:
    """Rows of all cases; what ``jaxdp synthesize`` chooses is there twice."""
    seeds = range(1 if quick else 5)
    rows = []
    for case in cases(quick):
        best = chosen(case)
        for name, found in measured(case, seeds):
            for i, metric in enumerate(METRICS):
                if isinstance(found, str):
                    skipped = f"{metric}: {name}"
                    rows.append(_harness.Row(case.name, skipped, None, "", note=found))
                    continue
                value = _harness.mean([one[i] for one in found])
                labels = [name, "synthesize"] if name == best else [name]
                for label in labels:
                    said = f"takes {name}" if label == "synthesize" else ""
                    about = (case.name, f"{metric}: {label}", value, len(seeds))
                    rows.append(_harness.averaged(*about, unit=said))
    return rows
