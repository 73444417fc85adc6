r"""Linear queries over a finite domain, answered exactly and summed in integers.

A record is a *code*: the number of its cell in a domain of :math:`|\mathcal Z|` cells. A
query gives every cell a number of a public range; its answer on a data set is the mean over
the records, and on a histogram the mean under it.

Queries are used centred and scaled, :math:`\tilde q = (q - \mathrm{mid}) / h` in [-1, 1],
where h is half of the range: a query that is 0 or 1 becomes -1 or +1, and a record that
counts zero answers what lies in the middle. A histogram's answers follow from the released
queries alone; :meth:`Queries.totals` is the one place where records enter, as integers.

The set of queries is closed under negation by whoever plays them: index j < m is
:math:`+\tilde q_j` and index m + j is :math:`-\tilde q_j`. Without the negations, the
largest of the differences would be a one-sided error.
"""

import abc
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.saddle.oracles import marginals

_MOST_BITS = 16
_USUAL_BITS = 12
#: Answers are accumulated in int32.
_LIMIT = 2**31


def histogram(
    codes: jax.Array, mask: jax.Array | None = None, *, domain_size: int
) -> jax.Array:
    """Counts the records in each cell exactly.

    Args:
      codes: integers (n,); one outside [0, domain_size) counts nowhere.
      mask: bool (n,); a False row counts nowhere. None is all True.
      domain_size: number of cells.

    Returns:
      int32 (domain_size,). One record changes one count by 1 (zero-out), or two
      (replace-one).

    Raises:
      TypeError: codes that are no integers. ValueError: another shape, by which a record
        would count more than once.
    """
    check_codes(codes)
    if codes.dtype.itemsize < 4:  # Which may not hold the size of the domain.
        codes = codes.astype(jnp.int32)
    inside = (codes >= 0) & (codes < domain_size)
    kept = inside if mask is None else inside & mask
    # A negative index would count from the end.
    where = jnp.where(kept, codes, 0)
    counts = jnp.zeros(domain_size, jnp.int32)
    return counts.at[where].add(kept.astype(jnp.int32))


def check_codes(codes: Any) -> None:
    """Raises TypeError or ValueError unless codes are integers (n,), one a record."""
    dtype = getattr(codes, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        found = type(codes).__name__ if dtype is None else dtype
        raise TypeError(f"codes must be integers, got {found}")
    if codes.ndim != 1:
        raise ValueError(f"codes must have shape (n,), got {codes.shape}")


class Queries(abc.ABC):
    """m linear queries over a finite domain; a :class:`QueryMatrix` or :class:`Marginals`.

    Hashable, and static: close over it in a function that is compiled.
    """

    @property
    @abc.abstractmethod
    def num_queries(self) -> int:
        """Number m of queries, without the negations."""

    @property
    @abc.abstractmethod
    def domain_size(self) -> int:
        """Number of weights of a histogram."""

    @property
    def num_cells(self) -> int:
        """Number of codes that records may have."""
        return self.domain_size

    @property
    @abc.abstractmethod
    def query_range(self) -> float:
        """Largest minus smallest value that a query may have; public."""

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits of the grid. A unit of :meth:`totals` is 2**-bits of a centred query."""

    @abc.abstractmethod
    def evaluate(self, weights: jax.Array) -> jax.Array:
        """Computes the means of the centred queries under a histogram.

        Args:
          weights: float32 (domain_size,), of sum 1.

        Returns:
          float32 (m,), in [-1, 1]. Linear in the weights.
        """

    @abc.abstractmethod
    def values(self, index: int | jax.Array) -> jax.Array:
        """Returns one centred query over the whole domain.

        Args:
          index: in [0, m); may be traced.

        Returns:
          float32 (domain_size,), in [-1, 1].
        """

    @abc.abstractmethod
    def _grid_sums(self, counts: jax.Array) -> jax.Array:
        """Computes the totals of integer counts (num_cells,): int32 (m,)."""

    def combined(self, coefficients: jax.Array) -> jax.Array:
        """Sums the centred queries, each times its coefficient.

        Args:
          coefficients: float32 (m,).

        Returns:
          float32 (domain_size,): the transpose of :meth:`evaluate`.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> queries = jaxdp.Marginals(sizes=(2, 2), degree=1)
          >>> queries.combined(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
          [1.0, 1.0, -1.0, -1.0]
        """
        weights = jax.ShapeDtypeStruct((self.domain_size,), jnp.float32)
        (sums,) = jax.linear_transpose(self.evaluate, weights)(coefficients)
        return sums

    def _of_cells(self, coefficients: jax.Array) -> jax.Array:
        """Computes :meth:`combined` over the records' cells: float32 (num_cells,)."""
        return self.combined(coefficients)

    def __call__(self, x: jax.Array, y: jax.Array, batch: jax.Array) -> jax.Array:
        r"""Returns the losses of the game whose saddle point is the closest histogram.

        :math:`f(x, y; z) = \sum_j y_j (q_j(z) - \langle q_j, x \rangle)` over the queries
        and their negations.

        Args:
          x: float32 (domain_size,): weights of sum 1.
          y: float32 (2 m,): weights of the queries, then of their negations.
          batch: codes, integers (n,).

        Returns:
          float32 (n,), in units of the queries.

        Source: Gonzalez, Guzman, Paquette (arXiv 2403.02912), Appendix B.
        """
        signed = y[: self.num_queries] - y[self.num_queries :]
        inside = (batch >= 0) & (batch < self.num_cells)
        says = self._of_cells(signed)[jnp.where(inside, batch, 0)]
        means = jnp.sum(signed * self.evaluate(x))
        return self.half_range * (jnp.where(inside, says, 0) - means)

    @property
    def half_range(self) -> float:
        """Half of the query range, which is one unit of a centred query."""
        return self.query_range / 2

    def totals(self, codes: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Sums the centred queries over the records: exact, not noised, not private.

        Args:
          codes: integers (n,), with n * 2**bits below 2**31. A record with a code outside
            [0, num_cells) contributes zero.
          mask: bool (n,); a False row contributes zero. None is all True.

        Returns:
          int32 (m,), in units of 2**-bits. One record contributes at most 2**bits to each
          (zero-out, add-or-remove), so that replacing one moves each by at most twice that.

        Raises:
          TypeError: codes that are no integers. ValueError: another shape, or too many.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> queries = jaxdp.Marginals(sizes=(2, 2), degree=1)
          >>> queries.totals(jnp.array([0, 1, 3])).tolist()
          [1, -1, -1, 1]
        """
        check_codes(codes)
        if codes.size * 2**self.bits >= _LIMIT:
            raise ValueError(
                f"codes must be of fewer than {_LIMIT >> self.bits} records where bits is "
                f"{self.bits}, got {codes.size}"
            )
        return self._grid_sums(histogram(codes, mask, domain_size=self.num_cells))

    def max_error(self, weights_a: jax.Array, weights_b: jax.Array) -> jax.Array:
        """Computes the largest difference of an answer between two histograms of sum 1.

        Returns:
          float32 (), in units of the queries. Of a histogram of private records, it is not
          private.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> queries = jaxdp.Marginals(sizes=(2, 2), degree=1)
          >>> uniform, first = jnp.full(4, 0.25), jnp.array([1.0, 0.0, 0.0, 0.0])
          >>> float(queries.max_error(uniform, first))
          0.5
        """
        return self.half_range * jnp.max(jnp.abs(self.evaluate(weights_a - weights_b)))


# --- any queries -------------------------------------------------------------------


class QueryMatrix(Queries):
    """Queries as the rows of a matrix.

    Args:
      matrix: float (m, num_cells); what each query says of each cell.
      low: public; no value is below it.
      high: public; no value is above it.
      bits: values are rounded, once, to a grid of 2**-bits half ranges, in [0, 16]; all
        methods use the rounded ones. None is 0 where all values are low or high, and 12
        elsewhere.
      vertices: float (domain_size, num_cells), each row a distribution over the cells:
        histograms are then weights of these vertices of a polytope, while records keep
        their cells. None is the simplex, whose vertices are the cells. (Polytopes of
        queries need nothing: their vertices are rows of the matrix.)

    Raises:
      ValueError: naming the argument.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import jaxdp
      >>> matrix = np.array([[0.0, 0.5, 1.0], [1.0, 0.0, 0.0]])
      >>> queries = jaxdp.QueryMatrix(matrix, low=0.0, high=1.0)
      >>> queries.num_queries, queries.domain_size, queries.bits
      (2, 3, 12)
    """

    def __init__(
        self,
        matrix: np.ndarray,
        *,
        low: float,
        high: float,
        bits: int | None = None,
        vertices: np.ndarray | None = None,
    ):
        values = np.asarray(matrix, np.float64)
        if values.ndim != 2 or 0 in values.shape:
            raise ValueError(
                f"matrix must have shape (queries, cells), got {values.shape}"
            )
        if not -math.inf < low < high < math.inf:
            raise ValueError(
                f"low and high must be finite and low < high, got {low} and {high}"
            )
        if not np.all((values >= low) & (values <= high)):
            raise ValueError(
                f"matrix must have all its values in [low, high] = [{low}, {high}]"
            )
        centred = (values - (low + high) / 2) / ((high - low) / 2)
        if bits is None:
            bits = 0 if np.all(np.abs(centred) == 1) else _USUAL_BITS
        validate.integer(at_least=0, at_most=_MOST_BITS, bits=bits)
        # Division may round up by an ulp; the grid takes that back.
        self._grid = np.rint(centred * 2**bits).astype(np.int32)
        self._values = self._grid.astype(np.float32) / np.float32(2**bits)
        if vertices is not None:
            self._values = _at_vertices(self._values, vertices)
        self._bits = bits
        self._range = float(high) - float(low)

    @property
    def num_queries(self) -> int:
        """Number m of queries, without the negations."""
        return self._grid.shape[0]

    @property
    def num_cells(self) -> int:
        """Number of codes that records may have, one a column of the matrix."""
        return self._grid.shape[1]

    @property
    def domain_size(self) -> int:
        """Number of weights of a histogram, one a cell or a vertex."""
        return self._values.shape[1]

    @property
    def query_range(self) -> float:
        """Largest minus smallest value that a query may have, ``high - low``."""
        return self._range

    @property
    def bits(self) -> int:
        """Bits of the grid to which values are rounded."""
        return self._bits

    def evaluate(self, weights: jax.Array) -> jax.Array:
        """Computes the means of the centred queries under a histogram.

        Args:
          weights: float32 (domain_size,), of sum 1.

        Returns:
          float32 (m,), in [-1, 1]. Linear in the weights.

        Example:
          >>> import jax.numpy as jnp
          >>> import numpy as np
          >>> import jaxdp
          >>> matrix = np.array([[0.0, 1.0], [1.0, 1.0]])
          >>> queries = jaxdp.QueryMatrix(matrix, low=0.0, high=1.0)
          >>> queries.evaluate(jnp.array([0.25, 0.75])).tolist()
          [0.5, 1.0]
        """
        return jnp.matmul(self._values, weights, precision=jax.lax.Precision.HIGHEST)

    def values(self, index: int | jax.Array) -> jax.Array:
        """Returns one centred query over the whole domain.

        Args:
          index: in [0, m); may be traced.

        Returns:
          float32 (domain_size,), in [-1, 1].

        Example:
          >>> import numpy as np
          >>> import jaxdp
          >>> matrix = np.array([[0.0, 1.0], [1.0, 1.0]])
          >>> jaxdp.QueryMatrix(matrix, low=0.0, high=1.0).values(0).tolist()
          [-1.0, 1.0]
        """
        return jnp.asarray(self._values)[index]

    def _of_cells(self, coefficients: jax.Array) -> jax.Array:
        of_records = self._grid.astype(np.float32) / np.float32(2**self._bits)
        highest = jax.lax.Precision.HIGHEST
        return jnp.matmul(coefficients, of_records, precision=highest)

    def _grid_sums(self, counts: jax.Array) -> jax.Array:
        # No partial sum is larger than the number of records times 2**bits.
        return jnp.sum(self._grid * counts, axis=1, dtype=jnp.int32)


def _at_vertices(values: np.ndarray, vertices: np.ndarray) -> np.ndarray:
    """Computes means of queries (m, num_cells) under distributions: (m, len(vertices))."""
    rows = np.asarray(vertices, np.float64)
    if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] != values.shape[1]:
        raise ValueError(
            f"vertices must have shape (vertices, {values.shape[1]}), got {rows.shape}"
        )
    if not (np.all(rows >= 0) and np.allclose(rows.sum(1), 1)):
        raise ValueError("vertices must have rows that are distributions, of sum 1")
    return np.clip(values @ rows.T, -1, 1).astype(np.float32)


# --- marginals ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Marginals(Queries):
    """All cells of some marginals of a product domain: queries that are 0 or 1.

    The code of a record with cells (c_1, ..., c_k) is ``np.ravel_multi_index(c, sizes)``:
    the last column moves fastest. Queries follow one another marginal by marginal, in the
    order of ``columns``, each in the same manner. Nothing of size m x domain_size is made:
    a marginal is a sum over axes of the table, and marginals share partial sums.

    Attributes:
      sizes: cells of each column, at least 2; k columns.
      degree: how many columns a marginal has, in [1, k]: all sets of so many columns.
      attributes: the marginals themselves instead: tuples of increasing columns.

    Raises:
      ValueError, TypeError: naming the argument.

    Example:
      >>> import numpy as np
      >>> import jaxdp
      >>> queries = jaxdp.Marginals(sizes=(2, 3), degree=1)
      >>> queries.columns, queries.num_queries, queries.domain_size
      (((0,), (1,)), 5, 6)
      >>> cells = np.array([[0, 2], [1, 0]])  # Two records, by column.
      >>> np.ravel_multi_index(tuple(cells.T), queries.sizes).tolist()
      [2, 3]
    """

    sizes: tuple[int, ...]
    degree: int | None = None
    attributes: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if not self.sizes:
            raise ValueError("sizes must have a column at least, got none")
        for size in self.sizes:
            validate.integer(at_least=2, sizes=size)
        if (self.degree is None) == (self.attributes is None):
            raise ValueError(
                "degree or attributes must be given, and not both, got "
                f"{self.degree} and {self.attributes}"
            )
        width = len(self.sizes)
        if self.degree is not None:
            validate.integer(at_most=width, degree=self.degree)
            return
        sets = tuple(tuple(columns) for columns in self.attributes or ())
        object.__setattr__(self, "attributes", sets)
        known = set(range(width))
        good = (s and set(s) <= known and sorted(set(s)) == list(s) for s in sets)
        if not sets or len(set(sets)) < len(sets) or not all(good):
            raise ValueError(
                "attributes must be different tuples of increasing columns in "
                f"[0, {width}), got {self.attributes}"
            )

    @functools.cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Columns of each marginal."""
        if self.attributes is not None:
            return self.attributes
        assert self.degree is not None
        return tuple(itertools.combinations(range(len(self.sizes)), self.degree))

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """Index at which each marginal begins, and m at the end; int32."""
        cells = [math.prod(self.sizes[c] for c in one) for one in self.columns]
        return np.cumsum([0, *cells]).astype(np.int32)

    @property
    def num_queries(self) -> int:
        """Number m of queries, the cells of all marginals together."""
        return int(self.offsets[-1])

    @property
    def domain_size(self) -> int:
        """Number of weights of a histogram, the product of the sizes."""
        return math.prod(self.sizes)

    @property
    def query_range(self) -> float:
        """Largest minus smallest value that a query may have, which is 1."""
        return 1.0

    @property
    def bits(self) -> int:
        """Bits of the grid, 0 because centred queries are -1 or 1."""
        return 0

    def evaluate(self, weights: jax.Array) -> jax.Array:
        """Computes the means of the centred queries under a histogram.

        Args:
          weights: float32 (domain_size,), of sum 1.

        Returns:
          float32 (m,), in [-1, 1]. Linear in the weights.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> queries = jaxdp.Marginals(sizes=(2, 2), degree=1)
          >>> queries.evaluate(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
          [1.0, -1.0, 1.0, -1.0]
        """
        return 2 * self._cells(weights) - jnp.sum(weights)

    def values(self, index: int | jax.Array) -> jax.Array:
        """Returns one centred query over the whole domain.

        Args:
          index: in [0, m); may be traced.

        Returns:
          float32 (domain_size,), in [-1, 1].

        Example:
          >>> import jaxdp
          >>> jaxdp.Marginals(sizes=(2, 2), degree=1).values(0).tolist()
          [1.0, 1.0, -1.0, -1.0]
        """
        which = jnp.searchsorted(self.offsets, index, side="right") - 1
        strides = jnp.asarray(self._strides)[which]
        # The cell of every code in that marginal, from the columns' own numbers.
        cell = jnp.asarray(self.offsets)[which]
        for stride, size in zip(strides, self.sizes, strict=True):
            cell = cell[..., None] + stride * jnp.arange(size, dtype=jnp.int32)
        return jnp.where(cell.reshape(-1) == index, 1.0, -1.0).astype(jnp.float32)

    def cells_of(self, codes: jax.Array) -> jax.Array:
        """Returns the one query of each marginal that is 1 for a code.

        Args:
          codes: integers (...,) in [0, domain_size).

        Returns:
          Indices of queries, int32 (..., marginals).

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> queries = jaxdp.Marginals(sizes=(2, 3), degree=1)
          >>> queries.cells_of(jnp.array([0, 5])).tolist()
          [[0, 2], [1, 4]]
        """
        cells = jnp.stack(jnp.unravel_index(codes, self.sizes), axis=-1)
        places = cells.astype(jnp.int32) @ jnp.asarray(self._strides).T
        return jnp.asarray(self.offsets[:-1]) + places

    def counts(self, weights: jax.Array) -> jax.Array:
        """Sums weights over the cells of each marginal.

        Args:
          weights: (domain_size,), integers or floats: counts of records, or a histogram.

        Returns:
          Sums of their dtype (m,). One record changes one count of each marginal by 1
          (zero-out), or two (replace-one).

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> queries = jaxdp.Marginals(sizes=(2, 2), degree=1)
          >>> queries.counts(jnp.array([1, 2, 3, 4])).tolist()
          [3, 7, 4, 6]
        """
        return self._cells(weights)

    def _grid_sums(self, counts: jax.Array) -> jax.Array:
        cells = self._cells(counts)
        return cells - (jnp.sum(counts, dtype=jnp.int32) - cells)

    def _cells(self, weights: jax.Array) -> jax.Array:
        """Computes all cells of the marginals of weights (domain_size,): (m,)."""
        return marginals.cells(self._recipe, weights)

    @functools.cached_property
    def _recipe(self) -> marginals.Recipe:
        return marginals.recipe(self.sizes, self.columns)

    @functools.cached_property
    def _strides(self) -> np.ndarray:
        """Stride of each column in the cells of a marginal, int32 (marginals, k)."""
        strides = np.zeros((len(self.columns), len(self.sizes)), np.int32)
        for row, columns in zip(strides, self.columns, strict=True):
            step = 1
            for c in reversed(columns):
                row[c] = step
                step *= self.sizes[c]
        return strides
