"""The componentwise Goldstein norm against sets that are known, and its solver."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import problems
from jaxdp import metrics
from jaxdp.metrics import componentwise_goldstein_norm, goldstein

# A measure on public data.
pytestmark = pytest.mark.slow

RADIUS = 0.5


def per_record(loss):
    """(x, record) -> () as gradients (x, batch) -> (B, ...)."""
    return jax.vmap(jax.grad(loss), in_axes=(None, 0))


distances = per_record(lambda x, r: r[1] * jnp.sum(jnp.abs(x - r[0])))
parabolas = per_record(lambda x, r: jnp.sum((x - r) ** 2) / 2)


def mean_of(gradients, data):
    return lambda x: jax.tree.map(lambda g: g.mean(axis=0), gradients(x, data))


# --- exact values ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "near", "exact"),
    [
        # |x|: [-1, 1] if x is within 0.5 of 0, else a sign. 3 |x - 0.9| likewise.
        (-0.2, "the first", 1.0),  # ([-1, 1] - 3) / 2
        (0.8, "the second", 0.0),  # (1 + [-3, 3]) / 2
        (0.45, "both", 0.0),
        (-0.7, "none", 2.0),
        (1.7, "none", 2.0),
    ],
)
def test_two_distances(x, near, exact):
    del near
    data = jnp.asarray([[0.0, 1.0], [0.9, 3.0]])
    found = componentwise_goldstein_norm(distances, jnp.asarray([x]), data, RADIUS)
    assert found == pytest.approx(exact, abs=1e-6)
    assert found.lower <= found <= found.lower + 1e-6


def test_weaker_than_the_norm_of_the_mean():
    # -|x| and |x| + x / 2: the mean is x / 4, the records' parts are [-1, 1] and more.
    slopes = jnp.asarray([[-1.0, 0.0], [1.0, 0.5]])
    gradients = per_record(lambda x, r: jnp.sum(r[0] * jnp.abs(x) + r[1] * x))
    x = jnp.asarray([0.1])
    of_mean = metrics.goldstein_norm(mean_of(gradients, slopes), x, RADIUS)
    assert of_mean == pytest.approx(0.25)
    found = componentwise_goldstein_norm(gradients, x, slopes, RADIUS)
    assert 0 <= found < 1e-6


def test_smooth_losses():
    # Parabolas: every gradient moves by the radius at most, each in the same direction.
    rng = np.random.default_rng(0)
    data = rng.standard_normal((7, 4)).astype(np.float32)
    x = data.mean(axis=0) + np.float32([0.8, 0, 0, 0])
    found = componentwise_goldstein_norm(parabolas, x, data, RADIUS)
    assert found == pytest.approx(0.8 - RADIUS, abs=1e-4) and found >= 0.3 - 1e-5
    near = componentwise_goldstein_norm(parabolas, x, data, 1.0)
    assert 0 <= near < 1e-5


def test_smooth_losses_are_no_more_than_the_radius_away():
    # H-smooth records: the gradient of the mean is at most the norm plus H radius.
    rng = np.random.default_rng(1)
    gradients = per_record(lambda x, a: jnp.cos(x @ a))  # H = ||a||^2
    for radius in (0.05, 0.2):
        data = rng.standard_normal((6, 3)).astype(np.float32)
        x = rng.standard_normal(3).astype(np.float32)
        smoothness = np.max(np.sum(data**2, axis=1))
        found = componentwise_goldstein_norm(gradients, x, data, radius)
        gradient = np.linalg.norm(mean_of(gradients, data)(x))
        assert found < gradient <= found + smoothness * radius


# --- beside the Goldstein norm -------------------------------------------------------


def test_one_record_is_the_goldstein_norm():
    gradients = per_record(lambda x, r: jnp.sqrt(jnp.sum((x - r) ** 2)) + x[0] / 3)
    x, data = jnp.asarray([0.6, -0.5, 0.3]), jnp.zeros((1, 3))
    options = {"num_samples": 64, "num_rounds": 8, "seed": 3}
    found = componentwise_goldstein_norm(gradients, x, data, RADIUS, **options)
    mean = metrics.goldstein_norm(mean_of(gradients, data), x, RADIUS, **options)
    assert found > 0.1
    assert found == pytest.approx(mean, abs=1e-5)
    assert found.num_gradients == mean.num_gradients == 64 + 2 * 8


@pytest.mark.parametrize("name", ["robust_regression", "relu_network"])
def test_at_most_the_goldstein_norm_of_the_mean(name):
    problem = {
        "robust_regression": problems.robust_regression(3),
        "relu_network": problems.relu_network(num_hidden=2),
    }[name]
    data = problem.make_data(20, 0)
    x = problem.x0 + 0.3
    of_mean = metrics.goldstein_norm(
        lambda y: problem.gradient_fn(y, data).mean(axis=0), x, 0.2
    )
    found = componentwise_goldstein_norm(problem.gradient_fn, x, data, 0.2)
    assert found.lower <= found <= of_mean + 1e-6
    assert found.gap <= 1e-10


# --- the solver ----------------------------------------------------------------------


def test_least_point_of_a_mean_is_that_of_all_its_vertices():
    rng = np.random.default_rng(2)
    for dim, num, offset in itertools.product((1, 2, 4), (2, 4), (0.0, 1.0, 3.0)):
        g = rng.standard_normal((5, num, dim)) + offset
        rows = itertools.product(range(5), repeat=num)
        vertices = np.array([goldstein._vertex(g, np.array(r)) for r in rows])
        exact = np.linalg.norm(goldstein.least_on_simplex(vertices) @ vertices)
        v, gap, _ = goldstein._least_of_mean(g, vertices[:1], 1e-12)
        assert np.linalg.norm(v) == pytest.approx(exact, abs=1e-6)
        assert gap <= 1e-10


def test_the_gap_is_that_over_the_whole_mean():
    # A large tolerance stops early: the bounds still hold, and the lower is not trivial.
    g = np.random.default_rng(4).standard_normal((20, 10, 3)) + 1.0
    exact, _, _ = goldstein._least_of_mean(g, g.mean(axis=1)[:1], 1e-12)
    early, gap, _ = goldstein._least_of_mean(g, g.mean(axis=1)[:1], 0.02)
    norm, least = np.linalg.norm(early), np.linalg.norm(exact)
    assert norm > least * (1 + 1e-6)
    assert norm - gap / norm <= least


def test_trees_and_batches():
    rng = np.random.default_rng(5)
    data = {"a": rng.standard_normal((4, 3)).astype(np.float32)}
    x = {"w": jnp.asarray([[0.3], [-0.5]]), "b": jnp.asarray(0.2)}

    def loss(p, r):
        return jnp.abs(r["a"][:2] @ p["w"][:, 0] + p["b"] - r["a"][2])

    flat, unravel = jax.flatten_util.ravel_pytree(x)
    plain = per_record(lambda p, r: loss(unravel(p), r))
    options = {"num_samples": 20, "num_rounds": 3}
    found = componentwise_goldstein_norm(per_record(loss), x, data, 0.3, **options)
    same = componentwise_goldstein_norm(plain, flat, data, 0.3, batch_size=7, **options)
    assert found == pytest.approx(same, abs=1e-6)


X, DATA = jnp.ones(2), jnp.ones((3, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(parabolas, X, DATA, 0.0), ValueError, "radius"),
        (lambda f: f(parabolas, X, DATA, 1.0, num_samples=0), ValueError, "num_samp"),
        (lambda f: f(parabolas, X, DATA, 1.0, tolerance=0.0), ValueError, "tolerance"),
        (lambda f: f(parabolas, X, DATA[:0], 1.0), ValueError, "data must be arrays"),
        (lambda f: f(parabolas, X, jnp.ones(()), 1.0), ValueError, "data must be"),
        (lambda f: f(parabolas, jnp.arange(2), DATA, 1.0), TypeError, "x must have"),
        (
            lambda f: f(lambda x, r: x, X, DATA, 1.0),
            ValueError,
            "one gradient for each",
        ),
        (lambda f: f(lambda x, r: r[:, :1], X, DATA, 1.0), ValueError, "a tree like x"),
        (lambda f: f(lambda x, r: r / 0, X, DATA, 1.0), ValueError, "finite gradients"),
    ],
)
def test_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call(componentwise_goldstein_norm)
