"""Queries against dense NumPy matrices; what one record can change, exactly."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.saddle.oracles.queries import Marginals, Queries, QueryMatrix, histogram


def dense(sizes: Sequence[int], sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Marginals as a 0/1 matrix (m, domain_size), by the definition."""
    cells = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), 1)
    rows = [
        (cells[:, list(columns)] == cell).all(1)
        for columns in sets
        for cell in itertools.product(*(range(sizes[c]) for c in columns))
    ]
    return np.array(rows, np.float64)


def ways(columns: int, degree: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(columns), degree))


def fractional(m: int, cells: int) -> QueryMatrix:
    rng = np.random.default_rng(5)
    return QueryMatrix(rng.uniform(-1, 3, (m, cells)), low=-1.0, high=3.0, bits=6)


def grid_values(queries: Queries) -> np.ndarray:
    """All centred queries, in units of 2**-bits: integers (m, domain_size)."""
    rows = jax.jit(jax.vmap(queries.values))(jnp.arange(queries.num_queries))
    return np.asarray(rows, np.float64) * 2**queries.bits


MARGINALS = [
    (Marginals((2, 3, 4), 1), dense((2, 3, 4), ways(3, 1))),
    (Marginals((2, 3, 4), 2), dense((2, 3, 4), ways(3, 2))),
    (Marginals((3, 2, 2, 4), 3), dense((3, 2, 2, 4), ways(4, 3))),
    (Marginals((3, 2), 2), dense((3, 2), ways(2, 2))),
    (
        Marginals((3, 2, 4), attributes=((1, 2), (0,), (0, 1, 2))),
        dense((3, 2, 4), [(1, 2), (0,), (0, 1, 2)]),
    ),
]
CODES = np.array([0, 3, 3, 5, 1, -1, 2, 10**6, 4, -(2**31), 5], np.int32)
MASK = np.array([1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1], bool)
COUNTED = np.array([0, 3, 5, 1, 2, 5])


@pytest.mark.parametrize(("queries", "matrix"), MARGINALS)
def test_marginals_are_those_of_the_dense_matrix(
    queries: Marginals, matrix: np.ndarray
) -> None:
    centred = 2 * matrix - 1
    assert (queries.num_queries, queries.domain_size) == matrix.shape
    assert (queries.query_range, queries.half_range, queries.bits) == (1.0, 0.5, 0)
    np.testing.assert_array_equal(grid_values(queries), centred)
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(matrix.shape[1])).astype(np.float32)
    means = np.asarray(jax.jit(queries.evaluate)(weights))
    np.testing.assert_allclose(means, centred @ weights, atol=1e-6)
    some = rng.normal(size=len(matrix)).astype(np.float32)
    sums = np.asarray(jax.jit(queries.combined)(some))
    np.testing.assert_allclose(sums, some @ centred, atol=1e-4)
    totals = np.asarray(jax.jit(queries.totals)(CODES, MASK))
    assert totals.dtype == np.int32
    np.testing.assert_array_equal(totals, centred[:, COUNTED].sum(1))


def test_a_matrix_gives_what_marginals_give() -> None:
    marginals, rows = MARGINALS[1]
    queries = QueryMatrix(rows, low=0, high=1)
    assert (queries.query_range, queries.bits) == (1.0, 0)
    np.testing.assert_array_equal(grid_values(queries), grid_values(marginals))
    for mask in (None, jnp.asarray(MASK)):
        totals = [q.totals(jnp.asarray(CODES), mask) for q in (queries, marginals)]
        np.testing.assert_array_equal(*totals)
    weights = np.random.default_rng(1).dirichlet(np.ones(24)).astype(np.float32)
    np.testing.assert_allclose(
        queries.evaluate(weights), marginals.evaluate(weights), atol=1e-6
    )


def test_a_matrix_is_rounded_once_for_all_methods() -> None:
    queries = fractional(7, 11)
    rng = np.random.default_rng(5)
    exact = (rng.uniform(-1, 3, (7, 11)) - 1) / 2
    grid = grid_values(queries)
    np.testing.assert_array_equal(grid, np.rint(exact * 64))
    assert (queries.query_range, queries.half_range) == (4.0, 2.0)
    weights = rng.dirichlet(np.ones(11)).astype(np.float32)
    other = rng.dirichlet(np.ones(11)).astype(np.float32)
    means = np.asarray(queries.evaluate(weights))
    np.testing.assert_allclose(means, grid @ weights / 64, atol=1e-6)
    np.testing.assert_allclose(
        queries.combined(jnp.ones(7)), grid.sum(0) / 64, atol=1e-5
    )
    error = np.abs(2 * grid @ (weights - other) / 64).max()
    assert float(queries.max_error(weights, other)) == pytest.approx(error, abs=1e-6)
    totals = queries.totals(jnp.asarray(CODES), jnp.asarray(MASK))
    np.testing.assert_array_equal(totals, grid[:, COUNTED].sum(1))
    usual = QueryMatrix(np.array([[0.3, 0.7]]), low=0, high=1)
    assert usual.bits == 12


def test_error_is_in_units_of_the_queries() -> None:
    queries, matrix = MARGINALS[2]
    a, b = np.random.default_rng(2).dirichlet(np.ones(48), 2).astype(np.float32)
    error = np.abs(matrix @ (a - b)).max()
    assert float(queries.max_error(a, b)) == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("queries", [fractional(5, 9), Marginals((3, 3), 2)])
def test_game_is_the_sum_over_queries_and_negations(queries: Queries) -> None:
    grid = grid_values(queries) / 2**queries.bits * queries.half_range
    closed = np.concatenate([grid, -grid])
    rng = np.random.default_rng(3)
    x = rng.dirichlet(np.ones(9)).astype(np.float32)
    y = rng.dirichlet(np.ones(len(closed))).astype(np.float32)
    codes = np.array([0, 8, 3, -1, 9], np.int32)
    answers = np.where((codes >= 0) & (codes < 9), closed[:, codes % 9], 0)
    wanted = y @ (answers - (closed @ x)[:, None])
    np.testing.assert_allclose(queries(x, y, codes), wanted, atol=1e-5)


def test_vertices_of_a_polytope() -> None:
    rng = np.random.default_rng(4)
    matrix = rng.uniform(0, 1, (6, 8))
    vertices = rng.dirichlet(np.ones(8), 3)
    plain = QueryMatrix(matrix, low=0, high=1)
    queries = QueryMatrix(matrix, low=0, high=1, vertices=vertices)
    assert (queries.domain_size, queries.num_cells) == (3, 8)
    weights = rng.dirichlet(np.ones(3)).astype(np.float32)
    point = (weights @ vertices).astype(np.float32)
    np.testing.assert_allclose(
        queries.evaluate(weights), plain.evaluate(point), atol=1e-6
    )
    codes = jnp.array([0, 7, 7, 8], jnp.int32)
    np.testing.assert_array_equal(queries.totals(codes), plain.totals(codes))
    y = rng.dirichlet(np.ones(12)).astype(np.float32)
    np.testing.assert_allclose(
        queries(weights, y, codes), plain(point, y, codes), atol=1e-6
    )


# --- what one record can change ----------------------------------------------------


@pytest.mark.parametrize("queries", [fractional(6, 12), Marginals((2, 3, 2), 2)])
def test_one_record_moves_a_total_by_what_is_stated_and_no_more(
    queries: Queries,
) -> None:
    cells = queries.num_cells
    unit = 2**queries.bits
    base = np.random.default_rng(6).integers(0, cells, 20).astype(np.int32)
    # The first record: each cell, two codes outside, and masked.
    first = np.array([*range(cells), -1, cells], np.int32)
    codes = np.tile(base, (len(first), 1))
    codes[:, 0] = first
    totals = np.asarray(jax.jit(jax.vmap(queries.totals))(codes), np.int64)
    moved = np.abs(totals[:, None] - totals[None]).max((0, 1))
    grid = grid_values(queries)
    np.testing.assert_array_equal(moved[:], np.ptp(grid, axis=1))
    assert moved.max() <= 2 * unit
    if queries.bits == 0:
        assert moved.min() == 2 * unit  # Exactly that, for every query.
    # Zeroed, which is what a code outside and a mask are.
    zeroed = np.abs(totals - totals[-1]).max(0)
    np.testing.assert_array_equal(zeroed, np.abs(grid).max(1))
    assert zeroed.max() <= unit
    np.testing.assert_array_equal(totals[-1], totals[-2])
    mask = np.arange(20) > 0
    np.testing.assert_array_equal(queries.totals(codes[0], mask), totals[-1])


def test_totals_are_exact_where_float32_is_not() -> None:
    queries = QueryMatrix(np.array([[1.0, -1.0, 2**-16]]), low=-1, high=1, bits=16)
    codes = jnp.array([0] * 1000 + [2], jnp.int32)
    assert int(queries.totals(codes)[0]) == 1000 * 2**16 + 1
    assert queries.totals(jnp.array([1] * 32767, jnp.int32))[0] == -32767 * 2**16
    with pytest.raises(ValueError, match="fewer than 32768 records where bits is 16"):
        queries.totals(jnp.zeros(32768, jnp.int32))


def test_histogram_counts_what_is_inside() -> None:
    counts = histogram(jnp.asarray(CODES), jnp.asarray(MASK), domain_size=6)
    np.testing.assert_array_equal(counts, np.bincount(COUNTED, minlength=6))
    counts = histogram(jnp.asarray(CODES), domain_size=6)
    np.testing.assert_array_equal(counts, [1, 1, 1, 2, 1, 2])


# --- the problem of the benchmarks -------------------------------------------------


def test_three_way_marginals_of_eight_binary_columns() -> None:
    queries = Marginals((2,) * 8, 3)
    assert (2 * queries.num_queries, queries.domain_size) == (896, 256)
    people = np.random.default_rng(0).dirichlet(np.full(256, 0.05))
    uniform = jnp.full(256, 1 / 256)
    error = jax.jit(queries.max_error)(people.astype(np.float32), uniform)
    assert float(error) == pytest.approx(0.40, abs=0.005)


def test_queries_are_static_and_hashable() -> None:
    a, b = Marginals((2, 3), 2), Marginals(sizes=[2, 3], degree=2)
    assert a == b and hash(a) == hash(b)
    assert a != Marginals((2, 3), 1)
    assert len({fractional(2, 3), fractional(2, 3)}) == 2

    weights = jnp.ones(6) / 6
    evaluate = jax.jit(lambda w, q: q.evaluate(w), static_argnums=1)
    np.testing.assert_allclose(evaluate(weights, b), np.full(6, -2 / 3), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Marginals((), 1), "sizes must have a column"),
        (lambda: Marginals((2, 1), 1), "sizes must be an integer >= 2"),
        (lambda: Marginals((2, 2)), "degree or attributes must be given"),
        (lambda: Marginals((2, 2), 1, ((0,),)), "and not both"),
        (lambda: Marginals((2, 2), 3), "degree must be an integer >= 1 and <= 2"),
        (lambda: Marginals((2, 2), 0), "degree must be an integer >= 1"),
        (lambda: Marginals((2, 2), attributes=()), "attributes must be different"),
        (lambda: Marginals((2, 2), attributes=((1, 0),)), "increasing columns"),
        (lambda: Marginals((2, 2), attributes=((0, 0),)), "increasing columns"),
        (lambda: Marginals((2, 2), attributes=((0, 2),)), r"in \[0, 2\)"),
        (lambda: Marginals((2, 2), attributes=((0,), (0,))), "must be different"),
        (lambda: QueryMatrix(np.ones(3), low=0, high=1), "matrix must have shape"),
        (lambda: QueryMatrix(np.ones((2, 3)), low=1, high=1), "low < high"),
        (lambda: QueryMatrix(np.full((2, 3), 2), low=0, high=1), r"\[low, high\]"),
        (lambda: QueryMatrix(np.full((1, 2), np.nan), low=0, high=1), "all its values"),
        (lambda: QueryMatrix(np.ones((2, 3)), low=0, high=1, bits=17), "bits must be"),
        (
            lambda: QueryMatrix(np.ones((2, 3)), low=0, high=1, vertices=np.eye(2)),
            r"vertices must have shape \(vertices, 3\)",
        ),
        (
            lambda: QueryMatrix(
                np.ones((2, 3)), low=0, high=1, vertices=np.ones((1, 3))
            ),
            "rows that are distributions",
        ),
        (lambda: Marginals((2, 2), 1).totals(jnp.zeros((2, 2), int)), "shape"),
    ],
)
def test_wrong_arguments_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_codes_must_be_integers() -> None:
    with pytest.raises(TypeError, match="codes must be integers, got float32"):
        Marginals((2, 2), 1).totals(jnp.zeros(3))
