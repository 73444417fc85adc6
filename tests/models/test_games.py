"""The games' answers are right, and their constants are those of their records."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from bench import problems
from jaxdp import models
from jaxdp.models.games import Game

# Closed forms of public problems: no method reads them.
pytestmark = pytest.mark.slow

GAMES = (
    models.rock_paper_scissors(10),
    problems.two_by_two(),
    problems.diagonal_game(),
    problems.max_loss(),
    problems.quadratic_game(),
)


@pytest.fixture(params=GAMES, ids=lambda g: g.name)
def game(request: pytest.FixtureRequest) -> Game:
    return request.param


def uniform(game: Game) -> tuple[np.ndarray, np.ndarray]:
    return np.full(game.dim_x, 1 / game.dim_x), np.full(game.dim_y, 1 / game.dim_y)


def test_equilibrium(game: Game) -> None:
    """The gap is zero there and positive elsewhere; F has the value that is stated."""
    x, y = game.equilibrium_x, game.equilibrium_y
    for point in (x, y):
        assert point.min() >= 0 and point.sum() == pytest.approx(1, abs=1e-12)
    assert game.gap_fn(x, y) == pytest.approx(0, abs=1e-12)
    assert game.gap_fn(*uniform(game)) > 0.01
    assert float(game.population_fn(jnp.asarray(x), jnp.asarray(y))) == pytest.approx(
        game.value, abs=1e-6
    )


@pytest.mark.parametrize("corner", [False, True])
def test_gap_is_that_of_a_solver(game: Game, corner: bool) -> None:
    """Also where a player has no weight on a loss, whose coordinate is then free."""
    x, y = uniform(game)
    if corner:
        y = np.eye(game.dim_y)[1]
    value_fn = jax.jit(game.population_fn)

    def least(loss: Callable[[Any], Any], dim: int) -> float:
        fn = jax.jit(jax.value_and_grad(loss))
        found = scipy.optimize.minimize(
            lambda v: [np.asarray(part, np.float64) for part in fn(jnp.asarray(v))],
            np.full(dim, 1 / dim),
            jac=True,
            bounds=[(0, 1)] * dim,
            constraints={"type": "eq", "fun": lambda v: v.sum() - 1},
            method="SLSQP",
        )
        return float(found.fun)

    gap = -least(lambda w: -value_fn(x, w), game.dim_y) - least(
        lambda v: value_fn(v, y), game.dim_x
    )
    assert game.gap_fn(x, y) == pytest.approx(gap, abs=1e-4)


@pytest.mark.parametrize(("dim", "gap"), [(10, 0.84), (100, 0.984), (1000, 0.9984)])
def test_uniform_gap_of_the_padded_game(dim: int, gap: float) -> None:
    game = models.rock_paper_scissors(dim)
    assert game.gap_fn(*uniform(game)) == pytest.approx(gap, abs=1e-9)
    assert game.lipschitz == 1.5
    np.testing.assert_allclose(game.equilibrium_x[:3], np.array([3, 6, 10]) / 19)


def test_known_values() -> None:
    assert problems.two_by_two().value == pytest.approx(1 / 9)
    np.testing.assert_allclose(problems.two_by_two().equilibrium_x, [1 / 3, 2 / 3])
    assert problems.diagonal_game().value == pytest.approx(4 / 7)
    game = problems.max_loss()
    assert game.value == pytest.approx(0.0137258, abs=5e-8)
    expected = [0.33431, 0.28284, 0.31716, 0.06569]
    np.testing.assert_allclose(game.equilibrium_x, expected, atol=5e-6)


@pytest.mark.parametrize("game", [GAMES[0], *GAMES[3:]], ids=lambda g: g.name)
def test_records(game: Game) -> None:
    """Signs of mean zero; their losses' derivatives stay within the constants."""
    n = 4096
    a, b = batch = game.make_data(n, seed=3)
    assert a.shape == (n, game.dim_x) and b.shape == (n, game.dim_y)
    assert a.dtype == np.int8 and set(np.unique(a)) == {-1, 1}
    # Hoeffding: 20 coordinates, failure probability 40 exp(-n t^2 / 2) < 1e-6.
    for signs in batch:
        assert np.abs(np.mean(signs, axis=0)).max() < 0.1
    again = game.make_data(n, seed=3)
    np.testing.assert_array_equal(a, again[0])
    assert not np.array_equal(a, game.make_data(n, seed=4)[0])

    def record(u: jax.Array, signs: jax.Array) -> jax.Array:
        one = (signs[None, : game.dim_x], signs[None, game.dim_x :])
        return game.value_fn(u[: game.dim_x], u[game.dim_x :], one)[0]

    rng = np.random.default_rng(0)
    points = [rng.dirichlet(np.full(d, 0.3), 64) for d in (game.dim_x, game.dim_y)]
    corners = itertools.product(np.eye(game.dim_x), np.eye(game.dim_y))
    u = np.concatenate(
        [np.concatenate(points, axis=1), [np.concatenate(c) for c in corners]]
    )
    u = jnp.asarray(u, jnp.float32)
    signs = jnp.asarray(np.concatenate(batch, axis=1)[: len(u)], jnp.float32)
    first = jax.jit(jax.vmap(jax.grad(record)))(u, signs)
    # Further derivatives are those of F alone.
    half = game.dim_x

    def population(u: jax.Array) -> jax.Array:
        return game.population_fn(u[:half], u[half:])

    hessian = jax.jit(jax.vmap(jax.hessian(population)))
    second = hessian(u[:32])
    assert float(jnp.abs(first).max()) <= game.lipschitz * (1 + 1e-5)
    assert float(jnp.abs(second).max()) <= game.smoothness * (1 + 1e-5)
    if game.second_smoothness:
        third = jax.jit(jax.jacfwd(jax.hessian(population)))(u[0])
        assert float(jnp.abs(third).max()) == pytest.approx(game.second_smoothness)
    else:
        assert float(jnp.ptp(second, axis=0).max()) < 1e-5
    # Not a wide bound either.
    assert float(jnp.abs(first).max()) > 0.6 * game.lipschitz
    np.testing.assert_allclose(
        jnp.mean(game.value_fn(u[0, : game.dim_x], u[0, game.dim_x :], batch)),
        game.population_fn(u[0, : game.dim_x], u[0, game.dim_x :]),
        atol=0.1,
    )


def test_sparse_regression() -> None:
    problem = problems.sparse_regression(100)
    uniform = jnp.full(100, 0.01)
    assert problem.excess_fn(uniform) == pytest.approx(0.185, abs=1e-6)
    assert problem.excess_fn(problem.minimizer) == 0
    batch = problem.make_data(4000, 0)
    # Losses are at most 2 and their variance at most .07: six standard errors.
    mean = float(jnp.mean(problem.value_fn(uniform, batch)))
    assert mean == pytest.approx(0.185, abs=0.026)
    assert float(problem.population_fn(uniform)) == pytest.approx(0.185, abs=1e-6)
    worst = jnp.eye(100)[-1]
    few = tuple(v[:64] for v in batch)
    rows = jax.jit(jax.jacobian(lambda x: problem.value_fn(x, few)))(worst)
    assert 1.5 < float(jnp.abs(rows).max()) <= problem.lipschitz


def test_binary_domain() -> None:
    domain = problems.binary_domain()
    assert domain.queries.shape == (448, 256)  # 896 with their negations
    assert set(np.unique(domain.queries)) == {0, 1}
    # The eight marginals of three attributes share the cells.
    np.testing.assert_array_equal(domain.queries.reshape(56, 8, 256).sum(axis=1), 1)
    np.testing.assert_array_equal(domain.queries.sum(axis=1), 32)
    assert domain.max_error(np.full(256, 1 / 256)) == pytest.approx(0.40, abs=0.005)
    # The first query: attributes 0, 1 and 2 are zero.
    np.testing.assert_array_equal(np.flatnonzero(domain.queries[0]) % 8, 0)
    codes = domain.make_data(50_000, 1)
    shares = domain.frequencies(codes)
    assert shares.sum() == pytest.approx(1)
    # Hoeffding over 448 queries: 896 exp(-2 n t^2) < 1e-6.
    assert domain.max_error(shares) < 0.0145
    assert domain.max_error(shares, shares) == 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: models.rock_paper_scissors(2), "dim"),
        (lambda: models.rock_paper_scissors(5, (1.0, 0.0, 1.0)), "w2"),
        (lambda: problems.diagonal_game((1.0, -1.0)), "costs"),
        (lambda: problems.max_loss((1.0, 1.0), (0.2, 0.2)), "centers"),
        (lambda: problems.max_loss((1.0,), (0.2, 0.9)), "shape"),
        (lambda: problems.quadratic_game(0), "dim_x"),
        (lambda: problems.sparse_regression(2), "dim"),
        (lambda: problems.sparse_regression(4, (0.5, 0.2)), "target"),
        (lambda: problems.binary_domain(4, 5), "order"),
        (lambda: problems.two_by_two(sign_scale=-1.0), "sign_scale"),
        (lambda: problems.two_by_two().make_data(0, 1), "num_examples"),
    ],
)
def test_refuses(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
