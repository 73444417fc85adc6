"""The Goldstein norm against functions whose norm is known, the solvers against search."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from bench import problems
from jaxdp import metrics
from jaxdp.metrics import goldstein
from jaxdp.metrics.goldstein import least_on_simplex
from jaxdp.models import nonsmooth

# A measure on public data.
pytestmark = pytest.mark.slow

RADIUS = 0.5


norm_gradient = jax.grad(lambda x: jnp.sqrt(jnp.sum(x**2)))
square_gradient = jax.grad(lambda x: jnp.sum(x**2) / 2)
l1_gradient = jax.grad(lambda x: jnp.sum(jnp.abs(x)))


def on_sphere(rng: np.random.Generator, num: int, dim: int) -> np.ndarray:
    z = rng.standard_normal((num, dim))
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def unit(dim: int) -> np.ndarray:
    return on_sphere(np.random.default_rng(dim), 1, dim)[0].astype(np.float32)


# --- the minimum-norm point --------------------------------------------------------


def searched(gradients: np.ndarray) -> float:
    """The least norm in a hull, over the affine minimisers of all subsets of points."""
    best = np.inf
    for size in range(1, len(gradients) + 1):
        for rows in itertools.combinations(gradients, size):
            first, *rest = rows
            if rest:
                sides = np.array(rest) - first
                t = np.linalg.lstsq(sides.T, -first)[0]
                if t.min() < 0 or t.sum() > 1:
                    continue
                point = first + t @ sides
            else:
                point = first
            best = min(best, float(np.linalg.norm(point)))
    return best


def test_least_on_simplex_finds_what_a_search_over_all_faces_finds():
    rng = np.random.default_rng(0)
    for dim, num, offset in itertools.product((1, 2, 3), (1, 2, 4, 7), (0.0, 0.7, 3.0)):
        g = rng.standard_normal((num, dim)) + offset
        g[-1] = g[0]  # doubled points are no trouble
        weights = least_on_simplex(g)
        v = weights @ g
        assert np.linalg.norm(v) == pytest.approx(searched(g), abs=1e-7)
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        assert v @ v - np.min(g @ v) <= 1e-11 * np.max(np.sum(g**2, axis=1))


@pytest.mark.parametrize(
    ("num", "dim", "scale"),
    [(128, 5, 1.0), (200, 50, 1.0), (30, 200, 1.0), (30, 200, 1e-6), (30, 200, 1e6)],
)
def test_gap_of_the_least_point_is_rounding(num, dim, scale):
    # The certificate: no point of the hull is shorter, by more than the gap allows.
    g = scale * (0.3 + np.random.default_rng(num + dim).standard_normal((num, dim)))
    v = least_on_simplex(g) @ g
    assert v @ v - np.min(g @ v) <= 1e-11 * np.max(np.sum(g**2, axis=1))


def test_least_on_simplex_with_costs():
    rng = np.random.default_rng(0)
    for dim, num in [(1, 1), (1, 9), (2, 3), (3, 40), (10, 8), (10, 300)]:
        for scale in (0.0, 1e-3, 1.0, 100.0):
            points = rng.standard_normal((num, dim))
            points[-1] = points[0]  # the same point, at another cost
            costs = scale * rng.standard_normal(num)
            weights = least_on_simplex(points, costs)
            assert weights.min() >= 0 and weights.sum() == pytest.approx(1, abs=1e-12)
            slopes = points @ (weights @ points) + costs
            assert weights @ slopes - slopes.min() <= 1e-12


# --- exact values of the Goldstein norm ---------------------------------------------


@pytest.mark.parametrize(
    ("dim", "on_the_sphere"), [(2, 0.86603), (5, 0.86606), (20, 0.8676), (100, 0.880)]
)
def test_euclidean_norm(dim, on_the_sphere):
    exact = np.sqrt(1 - RADIUS**2)  # .8660 at ||x|| = 1
    x = unit(dim)
    points = x + RADIUS * on_sphere(np.random.default_rng(0), 512, dim)
    gradients = points / np.linalg.norm(points, axis=1, keepdims=True)
    sampled = np.linalg.norm(least_on_simplex(gradients) @ gradients)
    assert exact <= sampled == pytest.approx(on_the_sphere, abs=2e-3)

    found = metrics.goldstein_norm(norm_gradient, x, RADIUS)
    assert exact - 1e-6 <= found <= on_the_sphere + 3e-3
    assert found.num_gradients == 512 + 2 * 32
    assert found.gap <= 1e-12
    assert found.lower <= found <= found.lower + 1e-11
    inside = metrics.goldstein_norm(norm_gradient, 0.4 * x, RADIUS)
    assert 0 <= inside <= (1e-5 if dim < 50 else 0.2)


def test_one_round_of_column_generation_does_what_samples_do_not():
    x = unit(20)
    sampled = metrics.goldstein_norm(square_gradient, x, RADIUS, num_rounds=0)
    once = metrics.goldstein_norm(square_gradient, x, RADIUS, num_rounds=1)
    assert sampled > 0.7
    assert RADIUS - 1e-6 <= once < 0.53
    found = metrics.goldstein_norm(square_gradient, x, RADIUS)
    assert found == pytest.approx(0.5, abs=1e-5) and found >= 0.5 - 1e-6
    inside = metrics.goldstein_norm(square_gradient, 0.4 * x, RADIUS)
    assert 0 <= inside < 1e-5


def test_absolute_value():
    one = jnp.ones(1)
    assert metrics.goldstein_norm(l1_gradient, one, RADIUS) == 1
    assert metrics.goldstein_norm(l1_gradient, -0.501 * one, RADIUS) == 1
    assert metrics.goldstein_norm(l1_gradient, 0.3 * one, RADIUS) < 1e-6


def test_l1_norm():
    dim = 20
    x = np.ones(dim, np.float32)
    for near, value in ((0.01, 19), (0.45, 20)):  # the second: still loose
        x[0] = near
        found = metrics.goldstein_norm(l1_gradient, x, RADIUS)
        assert found >= np.sqrt(19) - 1e-6
        assert found == pytest.approx(np.sqrt(value), abs=1e-6)
    x[:5] = 0.02
    assert metrics.goldstein_norm(l1_gradient, x, RADIUS) >= np.sqrt(15) - 1e-6


def test_a_kink_at_the_point_itself_is_not_read():
    # Automatic differentiation says 0 at x = 0, where the function is x.
    gradient = jax.grad(lambda x: jnp.sum(jax.nn.relu(x) - jax.nn.relu(-x)))
    assert gradient(jnp.zeros(1)) == 0
    assert metrics.goldstein_norm(gradient, jnp.zeros(1), RADIUS) == 1


def test_a_hull_of_noisy_gradients_overfits_the_noise():
    # Why the gradients must be those of one objective: the true norm is 1 throughout.
    rng = np.random.default_rng(0)
    noise = 3 * on_sphere(rng, 512, 20)
    norms = [
        np.linalg.norm(least_on_simplex(g[:k]) @ g[:k])
        for g in [np.eye(20)[0] + noise]
        for k in (1, 8, 64, 512)
    ]
    assert norms[0] > 2 and norms == sorted(norms, reverse=True)
    assert norms[-1] < 0.5


def test_points_stay_in_the_ball_after_rounding():
    x = jnp.full(30, 1e3, jnp.float32)
    radius = 0.02  # the rounding of x is a seventh of it

    def gradient(y):
        distance = jnp.sqrt(jnp.sum((y - x) ** 2))  # the difference is exact
        return jnp.where(distance <= radius * (1 + 1e-6), y, jnp.nan)

    assert metrics.goldstein_norm(gradient, x, radius) > 0
    with pytest.raises(ValueError, match="radius must be well above"):
        metrics.goldstein_norm(gradient, x, 1e-4)


def test_trees_batches_and_seeds():
    x = {"w": jnp.asarray([[0.3, -0.5], [0.4, 0.7]]), "b": jnp.asarray(0.2)}

    def gradient(y):
        total = jnp.sqrt(jnp.sum(y["w"] ** 2) + y["b"] ** 2)
        return jax.tree.map(lambda leaf: leaf / total, y)

    flat, _ = jax.flatten_util.ravel_pytree(x)
    options = {"num_samples": 50, "num_rounds": 3}
    found = metrics.goldstein_norm(gradient, x, 0.3, **options)
    plain = metrics.goldstein_norm(norm_gradient, flat, 0.3, batch_size=7, **options)
    assert found == pytest.approx(plain, rel=1e-5)
    assert found == metrics.goldstein_norm(gradient, x, 0.3, **options)
    assert found != metrics.goldstein_norm(gradient, x, 0.3, seed=1, **options)
    assert metrics.goldstein_norm(gradient, x, 0.3, num_samples=1) >= 0
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), x)
    assert metrics.goldstein_norm(gradient, halves, 0.3) == pytest.approx(
        found, rel=0.1
    )


def test_is_a_number_that_pickles():
    assert jaxdp.metrics is metrics
    found = metrics.goldstein_norm(square_gradient, unit(3), RADIUS, num_samples=20)
    again = pickle.loads(pickle.dumps(found))
    assert isinstance(found, float) and again == found
    assert (again.gap, again.lower) == (found.gap, found.lower)
    assert again.num_gradients == found.num_gradients
    assert repr(found).startswith("GoldsteinNorm(0.5") and f"{found:.1f}" == "0.5"
    assert str(found) == str(float(found))


# --- points of the ball ----------------------------------------------------------------


def test_mean_gradient_is_in_the_hull():
    # Uniform points of the ball average to the closed form, which is no shorter.
    problem = problems.l1_linear(dim=5)
    record = (np.zeros((1, 5), np.float32),)
    gradient = nonsmooth.mean_gradient_fn(problem, record)
    x = np.array([0.1, -0.3, 0.5, 0.69, -2.0], np.float32)
    exact = np.linalg.norm([0.118170, -0.317789, 0.426405, 0.447210, -0.447214])
    points = x + 0.7 * goldstein._in_unit_ball(np.random.default_rng(0), 20_000, 5)
    found = jax.jit(jax.vmap(gradient))(jnp.asarray(points, jnp.float32))
    error = np.sqrt(np.sum(np.var(found, axis=0)) / 20_000)
    assert abs(np.linalg.norm(found.mean(axis=0)) - exact) <= 6 * error < 0.03
    assert metrics.goldstein_norm(gradient, x, 0.7) <= exact


@pytest.mark.parametrize("dim", [1, 4])
def test_points_are_uniform_in_the_ball(dim):
    # The mean of ||u||^2 is d / (d + 2), on the sphere it would be 1.
    points = goldstein._in_unit_ball(np.random.default_rng(0), 20_000, dim)
    squares = np.sum(points**2, axis=1)
    assert squares.max() <= 1
    error = squares.std() / np.sqrt(20_000)
    assert abs(squares.mean() - dim / (dim + 2)) <= 6 * error


# --- refusals --------------------------------------------------------------------------

X = jnp.ones(3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.goldstein_norm(l1_gradient, X, 0.0), ValueError, "radius"),
        (lambda: metrics.goldstein_norm(l1_gradient, X, -1), ValueError, "radius"),
        (lambda: metrics.goldstein_norm(l1_gradient, X, "1"), TypeError, "radius"),
        (
            lambda: metrics.goldstein_norm(l1_gradient, X, 1.0, num_samples=0),
            ValueError,
            "num_samples",
        ),
        (
            lambda: metrics.goldstein_norm(l1_gradient, X, 1.0, num_rounds=-1),
            ValueError,
            "num_rounds",
        ),
        (
            lambda: metrics.goldstein_norm(l1_gradient, X, 1.0, batch_size=0),
            ValueError,
            "batch_size",
        ),
        (
            lambda: metrics.goldstein_norm(l1_gradient, X, 1.0, tolerance=0.0),
            ValueError,
            "tolerance",
        ),
        (
            lambda: metrics.goldstein_norm(l1_gradient, jnp.arange(3), 1.0),
            TypeError,
            "x must have floating",
        ),
        (
            lambda: metrics.goldstein_norm(l1_gradient, jnp.zeros(0), 1.0),
            ValueError,
            "x must have elements",
        ),
        (
            lambda: metrics.goldstein_norm(l1_gradient, X * jnp.nan, 1.0),
            ValueError,
            "x must have elements",
        ),
        (
            lambda: metrics.goldstein_norm(lambda x: x[0], X, 1.0),
            ValueError,
            "grad_fn must return a tree like x",
        ),
        (
            lambda: metrics.goldstein_norm(lambda x: x / 0, X, 1.0),
            ValueError,
            "grad_fn must return finite",
        ),
    ],
)
def test_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()
