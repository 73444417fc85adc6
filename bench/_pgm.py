r"""Peers on mbi's graphical models: Gaussian on all marginals, MST, and AIM.

The mechanisms are written here, from their papers, for mbi holds estimation alone. All are
under replace-one: a record moves the counts of a marginal by sqrt(2) in L2, and the L1
distance from a table by 2. Models are fitted by mbi's ``MirrorDescent`` in float64.

References:
  McKenna, Sheldon and Miklau, Graphical-model based estimation and inference for
  differential privacy, 2019 (PGM). McKenna, Miklau and Sheldon, Winning the NIST contest,
  2021 (MST). McKenna, Mullins, Sheldon and Miklau, AIM, 2022.
"""

import contextlib
import importlib.util
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp import accounting
from jaxdp.saddle.theory import charges

Columns = tuple[int, ...]
#: Of the last fit (mbi's default is 1000), more where steps are quick; and of those that
#: only choose what is measured next.
_STEPS, _MORE_STEPS, _FEWER_STEPS = 1000, 3000, 200
_FEW_CELLS = 10_000
_SQUARED, _L1 = 2, 2  # sensitivities of a marginal under replace-one


def installed() -> bool:
    """Returns whether mbi is there."""
    return importlib.util.find_spec("mbi") is not None


@contextlib.contextmanager
def double() -> Iterator[Any]:
    """Gives mbi, with JAX in float64 as it advises."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("mbi")


class Records:
    """A table's marginals, its noise, and models that are fitted to it.

    All candidates are in every fit, those that are not measured with a weight of nearly
    zero: so mbi compiles one program, and not one for every set of measured marginals.
    """

    def __init__(
        self,
        mbi: Any,
        codes: np.ndarray,
        sizes: Sequence[int],
        candidates: Sequence[Columns],
        seed: int,
    ):
        self.mbi, self.sizes = mbi, tuple(sizes)
        self.rng = np.random.default_rng(seed)
        self.n = len(codes)
        self.table = np.bincount(codes, minlength=math.prod(sizes)).reshape(self.sizes)
        self.domain = mbi.Domain(tuple(map(str, range(len(sizes)))), self.sizes)
        self.sums = {one: np.zeros(self.cells(one)) for one in candidates}
        self.precisions = dict.fromkeys(candidates, 0.0)
        self.model: Any = None
        self.fitted = self.table / self.n

    def _of(self, table: np.ndarray, one: Columns) -> np.ndarray:
        others = tuple(i for i in range(len(self.sizes)) if i not in one)
        return table.sum(others).reshape(-1)

    def cells(self, one: Columns) -> int:
        """Returns the number of cells of a marginal."""
        return math.prod(self.sizes[i] for i in one)

    def distance(self, one: Columns) -> float:
        """Returns the L1 distance of a marginal's counts from those of the model."""
        return float(np.abs(self._of(self.table, one) - self.modelled(one)).sum())

    def modelled(self, one: Columns) -> np.ndarray:
        """Returns the counts that the model has."""
        return self._of(self.fitted, one) * self.n

    def measure(self, one: Columns, std: float) -> None:
        """Measures a marginal with noise of a deviation in counts."""
        noise = std * self.rng.normal(size=self.cells(one))
        self.sums[one] += (self._of(self.table, one) + noise) / std**2
        self.precisions[one] += 1 / std**2

    def fit(self, steps: int | None = None) -> None:
        """Fits the model to all that was measured, from the model so far."""
        if steps is None:
            steps = _MORE_STEPS if self.table.size <= _FEW_CELLS else _STEPS
        least = 1e-9 * max(self.precisions.values())
        given = []
        for one, precision in self.precisions.items():
            mean = self.sums[one] / max(precision, least)
            names = tuple(map(str, one))
            std = max(precision, least) ** -0.5
            given.append(self.mbi.LinearMeasurement(mean, names, std))
        oracle = self.mbi.marginal_oracles.brute_force_marginals
        fitter = self.mbi.estimation.MirrorDescent(marginal_oracle=oracle)
        self.model = fitter.estimate(
            self.domain,
            given,
            known_total=float(self.n),
            iters=steps,
            warm_start=self.model,
        )
        potentials = sum(
            np.asarray(factor.expand(self.domain).values)
            for factor in self.model.potentials.tables.values()
        )
        weights = np.exp(potentials - np.max(potentials))
        self.fitted = weights / weights.sum()

    def draw(self, scores: Sequence[float], rho: float, sensitivity: float) -> int:
        """Draws by the exponential mechanism, of a range r that is r^2/8-zCDP."""
        nats = math.sqrt(8 * rho) / (2 * sensitivity)
        return int(
            np.argmax(nats * np.array(scores) + self.rng.gumbel(size=len(scores)))
        )


def subsets(workload: Sequence[Columns]) -> list[Columns]:
    """Returns all sets of columns that are within one of the workload."""
    found = {
        one
        for most in workload
        for size in range(1, len(most) + 1)
        for one in itertools.combinations(most, size)
    }
    return sorted(found, key=lambda one: (len(one), one))


def candidates(peer: str, workload: Sequence[Columns]) -> list[Columns]:
    """Returns the marginals that a peer may measure."""
    if peer == "aim":
        return subsets(workload)
    return [one for one in subsets(workload) if len(one) <= 2]


def gaussian(
    table: Records, workload: Sequence[Columns], epsilon: float, delta: float
) -> None:
    """Measures all marginals of the workload at once, by the exact Gaussian mechanism."""
    mu = accounting.gaussian_mu(epsilon, delta)
    for one in workload:
        table.measure(one, math.sqrt(_SQUARED * len(workload)) / mu)
    table.fit()


def mst(
    table: Records, workload: Sequence[Columns], epsilon: float, delta: float
) -> None:
    """Measures columns, and the pairs of a tree that is drawn: a third of rho each."""
    del workload
    rho, width = charges.rho_budget(epsilon, delta), len(table.sizes)
    for i in range(width):
        table.measure((i,), math.sqrt(_SQUARED * width / (2 * rho / 3)))
    table.fit()
    pairs = list(itertools.combinations(range(width), 2))
    far = {p: table.distance(p) for p in pairs}
    group = list(range(width))
    chosen = []
    for _ in range(width - 1):
        left = [p for p in pairs if group[p[0]] != group[p[1]]]
        at = table.draw([far[p] for p in left], rho / 3 / (width - 1), _L1)
        a, b = left[at]
        group = [group[a] if g == group[b] else g for g in group]
        chosen.append((a, b))
    for pair in chosen:
        table.measure(pair, math.sqrt(_SQUARED * len(chosen) / (2 * rho / 3)))
    table.fit()


def aim(
    table: Records,
    workload: Sequence[Columns],
    epsilon: float,
    delta: float,
    rounds_per_column: int = 16,
) -> None:
    """Measures columns, and what a model knows worst, with noise that is annealed.

    With ``rounds_per_column`` at 16 it is the published one. Candidates are all subsets of
    the workload's sets, weighed by how much of the workload they share.
    """
    rho, width = charges.rho_budget(epsilon, delta), len(table.sizes)
    weights = {
        one: sum(len(set(one) & set(other)) for other in workload)
        for one in subsets(workload)
    }
    rounds = rounds_per_column * width
    std = math.sqrt(_SQUARED * rounds / (2 * 0.9 * rho))
    share = 0.1 * rho / rounds
    spent = 0.0
    for i in range(width):
        table.measure((i,), std)
        spent += _SQUARED / (2 * std**2)
    table.fit(_FEWER_STEPS)
    last = False
    while not last:
        if rho - spent < 2 * (_SQUARED / (2 * std**2) + share):
            last, left = True, rho - spent
            std = math.sqrt(_SQUARED / (2 * 0.9 * left))
            share = 0.1 * left
        spent += _SQUARED / (2 * std**2) + share
        before = {one: table.modelled(one) for one in weights}
        expected = {
            one: math.sqrt(2 / math.pi) * std * table.cells(one) for one in weights
        }
        scores = [
            weight * (table.distance(one) - expected[one])
            for one, weight in weights.items()
        ]
        at = table.draw(scores, share, _L1 * max(weights.values()))
        one = list(weights)[at]
        table.measure(one, std)
        table.fit(None if last else _FEWER_STEPS)
        if np.abs(table.modelled(one) - before[one]).sum() <= expected[one]:
            std, share = std / 2, 4 * share
