r"""Convex problems on one simplex with known answers, and a domain for synthetic data.

The counterparts of :mod:`bench.problems.games` without a second player, for private convex
optimisation over a simplex and for private synthetic data.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.models.games import signs

Array = jax.Array
Batch = tuple[jax.Array | np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ConvexProblem:
    """A convex problem on one simplex, with its constants and its answer.

    Attributes:
      name: for tables.
      dim: number of coordinates.
      value_fn: (x, batch) -> losses (B,).
      population_fn: x -> the expected loss, shape=().
      excess_fn: x -> expected loss minus the least one, exact, in float64.
      make_data: (num_examples, seed) -> batch.
      lipschitz: largest absolute partial derivative of a record's loss.
      smoothness: largest absolute second derivative.
      second_smoothness: largest absolute third derivative.
      minimizer: (dim,), float64.
    """

    name: str
    dim: int
    value_fn: Callable[[Array, Batch], Array]
    population_fn: Callable[[Any], Any]
    excess_fn: Callable[[Any], float]
    make_data: Callable[[int, int], Batch]
    lipschitz: float
    smoothness: float
    second_smoothness: float
    minimizer: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class BinaryDomain:
    """Records of binary attributes, all their marginals of one order, and a population.

    A record is the code of its cell: attribute i is bit i.

    Attributes:
      num_attributes: k; there are 2**k cells.
      queries: float32 (number of queries, 2**k), 0 or 1: whether a cell has given values
        in given attributes. Without their negations.
      population: float64 (2**k,), of sum 1: what records are drawn from.
    """

    num_attributes: int
    queries: np.ndarray
    population: np.ndarray

    def make_data(self, num_examples: int, seed: int) -> np.ndarray:
        """Draws the codes of independent records, int32 (num_examples,)."""
        validate.integer(num_examples=num_examples)
        rng = np.random.default_rng(seed)
        return rng.choice(
            len(self.population), size=num_examples, p=self.population
        ).astype(np.int32)

    def frequencies(self, codes: Any) -> np.ndarray:
        """Computes the share of the records in each cell, float64 (2**k,)."""
        counts = np.bincount(np.asarray(codes), minlength=len(self.population))
        return counts / counts.sum()

    def max_error(self, weights: Any, reference: Any = None) -> float:
        """Computes the largest absolute error of a query on ``weights`` (2**k,).

        Args:
          weights: of the cells, of sum 1.
          reference: the weights to be told; None is the population.
        """
        true = self.population if reference is None else np.asarray(reference)
        difference = np.asarray(weights, np.float64) - true
        return float(np.abs(self.queries @ difference).max())


def sparse_regression(
    dim: int = 100, target: Sequence[float] = (0.5, 0.3, 0.2)
) -> ConvexProblem:
    r"""Least squares on the simplex: :math:`f(x;a,b)=\frac12(\langle a,x\rangle-b)^2`.

    a is a vector of independent signs and :math:`b=\langle a,x^*\rangle`, so that the
    excess risk is :math:`\frac12\|x-x^*\|_2^2`: .185 at the uniform point for d = 100. A
    batch is (a, b), int8 (B, d) and float32 (B,).

    Args:
      dim: d.
      target: the first coordinates of x*, >= 0 of sum 1; the others are 0.
    """
    validate.integer(at_least=len(target), dim=dim)
    best = np.zeros(dim)
    best[: len(target)] = target
    if (best < 0).any() or not math.isclose(best.sum(), 1, abs_tol=1e-9):
        raise ValueError(f"target must be >= 0, of sum 1; got {target!r}")

    def value_fn(x: Array, batch: Batch) -> Array:
        a, b = batch
        return (jnp.asarray(a, x.dtype) @ x - jnp.asarray(b, x.dtype)) ** 2 / 2

    def make_data(num_examples: int, seed: int) -> Batch:
        a = signs(np.random.default_rng(seed), num_examples, dim)
        return a, (a @ best.astype(np.float32)).astype(np.float32)

    return ConvexProblem(
        name="sparse_regression",
        dim=dim,
        value_fn=value_fn,
        population_fn=lambda x: jnp.sum((x - jnp.asarray(best, x.dtype)) ** 2) / 2,
        excess_fn=lambda x: float(np.sum((np.asarray(x, np.float64) - best) ** 2) / 2),
        make_data=make_data,
        lipschitz=2.0,
        smoothness=1.0,
        second_smoothness=0.0,
        minimizer=best,
    )


def binary_domain(
    num_attributes: int = 8,
    order: int = 3,
    *,
    concentration: float = 0.05,
    seed: int = 0,
) -> BinaryDomain:
    """Builds all marginals of one order of binary attributes, and a random population.

    Args:
      num_attributes: k, at most 16.
      order: attributes to a marginal: C(k, order) 2**order queries.
      concentration: of the Dirichlet law of the population; small ones are spiky.
      seed: of the population.
    """
    validate.integer(at_most=16, num_attributes=num_attributes)
    validate.integer(at_most=num_attributes, order=order)
    validate.positive(concentration=concentration)
    cells = np.arange(2**num_attributes)
    bits = cells[:, None] >> np.arange(num_attributes) & 1
    queries = [
        (bits[:, list(chosen)] == values).all(axis=1)
        for chosen in itertools.combinations(range(num_attributes), order)
        for values in itertools.product((0, 1), repeat=order)
    ]
    rng = np.random.default_rng(seed)
    population = rng.dirichlet(np.full(len(cells), concentration))
    return BinaryDomain(num_attributes, np.array(queries, np.float32), population)
