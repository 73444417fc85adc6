"""Nonsmooth problems: gradients against the losses, constants against random points."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import problems
from jaxdp import models
from jaxdp.models import nonsmooth

# Closed forms of public problems: no method reads them.
pytestmark = pytest.mark.slow

NUM = 40
PROBLEMS = {
    "l1_linear": problems.l1_linear(6),
    "max_of_linear": nonsmooth.max_of_linear(6, num_pairs=5),
    "robust_regression": problems.robust_regression(6),
    "median_regression": problems.robust_regression(6, cap=math.inf),
    "relu_network": problems.relu_network(num_features=3, num_hidden=4),
}
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def points(problem: nonsmooth.NonsmoothProblem) -> jax.Array:
    """Small, middling and far ones."""
    x = RNG.standard_normal((12, problem.dim)) * np.repeat([0.1, 1.0, 30.0], 4)[:, None]
    return jnp.asarray(np.concatenate([x, problem.x0[None] + 0.01 * x[:1]]))


def smoothed(problem, x, batch, radius):
    assert problem.smoothed_gradient_fn is not None
    return problem.smoothed_gradient_fn(x, batch, radius)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_and_the_lipschitz_constant(name):
    problem = PROBLEMS[name]
    batch = problem.make_data(NUM, 1)
    x = points(problem)
    losses = jax.jit(jax.vmap(lambda p: problem.value_fn(p, batch)))(x)
    gradients = jax.jit(jax.vmap(lambda p: problem.gradient_fn(p, batch)))(x)
    assert losses.shape == (len(x), NUM) and losses.dtype == jnp.float64
    assert problem.x0.shape == (problem.dim,) and problem.x0.dtype == np.float32
    jacobian = jax.jacobian(lambda p: problem.value_fn(p, batch))
    np.testing.assert_allclose(gradients, jax.jit(jax.vmap(jacobian))(x), atol=1e-12)
    norms = np.linalg.norm(gradients, axis=-1)
    bound = problem.lipschitz * (1 + 1e-6)  # records are rounded to float32
    assert norms.max() <= bound
    assert norms.max() >= 0.6 * problem.lipschitz  # and not much too large
    # Along segments as well, where no gradient is read.
    apart = np.linalg.norm(x[:, None] - x[None], axis=-1)[..., None]
    assert np.all(np.abs(losses[:, None] - losses[None]) <= bound * apart)


@pytest.mark.parametrize("name", PROBLEMS)
def test_mean_gradient(name):
    problem = PROBLEMS[name]
    batch = problem.make_data(NUM, 2)
    x = points(problem)[5]
    found = jax.jit(nonsmooth.mean_gradient_fn(problem, batch))(x)
    np.testing.assert_allclose(
        found, problem.gradient_fn(x, batch).mean(axis=0), atol=1e-12
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_data_and_the_initial_gap(name):
    problem = PROBLEMS[name]
    batch = problem.make_data(20_000, 3)
    assert all(len(array) == 20_000 and array.dtype == np.float32 for array in batch)
    again, other = problem.make_data(20_000, 3), problem.make_data(20_000, 4)
    assert all(np.array_equal(a, b) for a, b in zip(batch, again, strict=True))
    assert not np.array_equal(batch[0], other[0])
    # Nothing is below 0 in expectation. Means of losses within +-12 (targets) or of
    # standard deviation below 0.5 (the rest): ten deviations of the mean or more.
    start = float(jnp.mean(problem.value_fn(jnp.asarray(problem.x0), batch)))
    assert start <= problem.initial_gap + (0.3 if name == "median_regression" else 0.04)
    assert start >= 0.5 * problem.initial_gap
    x = points(problem)
    means = jax.jit(jax.vmap(lambda p: jnp.mean(problem.value_fn(p, batch))))(x)
    scale = 1 + np.linalg.norm(x, axis=1)
    assert np.all(np.asarray(means) >= -0.04 * scale)


@pytest.mark.parametrize("name", ["l1_linear", "max_of_linear"])
def test_linear_parts_are_exactly_on_the_sphere_with_mean_zero(name):
    problem = PROBLEMS[name]
    (z,) = problem.make_data(20_000, 0)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 0.5, rtol=1e-6)
    # Each coordinate has variance 1/24: 7 standard deviations of its mean.
    assert np.abs(z.mean(axis=0)).max() < 7 * math.sqrt(0.25 / 6 / 20_000)
    zero = (np.zeros((1, problem.dim)),)
    start = problem.value_fn(jnp.asarray(problem.x0, jnp.float64), zero)
    assert float(start[0]) == pytest.approx(problem.initial_gap)


def test_closed_form_of_the_smoothed_l1_gradient():
    problem = problems.l1_linear(5)
    x, zero = jnp.asarray([0.1, -0.3, 0.5, 0.69, -2.0]), (np.zeros((1, 5)),)
    (at_x,) = smoothed(problem, x, zero, 0.7)
    (at_y,) = smoothed(problem, x + 0.05, zero, 0.7)
    expected = (0.118170, -0.317789, 0.426405, 0.447210, -0.447214)
    np.testing.assert_allclose(at_x, expected, atol=6e-7)
    np.testing.assert_allclose(
        at_x - at_y, (-0.056090, -0.042806, -0.011499, -3.2e-6, 0), atol=6e-7
    )
    for ratio, value in ((0.1, 0.25485), (0.2, 0.48761), (0.6, 0.96983)):
        found = problems.smoothed_sign(jnp.asarray(ratio), 1.0, 10)
        assert float(found) == pytest.approx(value, abs=6e-6)


@pytest.mark.parametrize(
    "name", ["l1_linear", "robust_regression", "median_regression"]
)
def test_smoothed_gradients_are_means_over_the_ball(name):
    problem, radius, num = PROBLEMS[name], 1.5, 20_000
    batch = problem.make_data(4, 5)
    x = jnp.asarray(RNG.standard_normal(problem.dim))
    z = RNG.standard_normal((num, problem.dim + 2))
    ball = (z / np.linalg.norm(z, axis=1, keepdims=True))[:, : problem.dim]
    sampled = jax.jit(jax.vmap(lambda u: problem.gradient_fn(x + radius * u, batch)))(
        ball
    )
    error = np.asarray(sampled.std(axis=0)) / math.sqrt(num)
    expected = smoothed(problem, x, batch, radius)
    # 24 coordinates at 6 standard errors: below 1e-6 in all.
    assert np.all(np.abs(sampled.mean(axis=0) - expected) <= 6 * error + 1e-12)
    assert error.max() > 1e-4
    # And with a small radius they are the gradients.
    np.testing.assert_allclose(
        smoothed(problem, x, batch, 1e-9), problem.gradient_fn(x, batch)
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_records_are_isolated_and_float32_works(name):
    problem = PROBLEMS[name]
    batch = problem.make_data(5, 6)
    x = (problem.x0 + RNG.standard_normal(problem.dim)).astype(np.float32)
    value_fn = jax.jit(problem.value_fn)
    changed = tuple(array.copy() for array in batch)
    changed[0][2] = 1e3
    before, after = value_fn(x, batch), value_fn(x, changed)
    assert before.dtype == jnp.float32
    np.testing.assert_array_equal(np.delete(before, 2), np.delete(after, 2))


def test_a_capped_loss_ignores_a_record_far_off():
    problem = problems.robust_regression(3, cap=2.0)
    batch = (np.eye(3)[:2], np.array([100.0, 1.0]))
    gradients = problem.gradient_fn(jnp.zeros(3), batch)
    np.testing.assert_array_equal(gradients, [[0, 0, 0], [0, -1, 0]])
    np.testing.assert_array_equal(problem.value_fn(jnp.zeros(3), batch), [2, 1])


def test_the_network_starts_at_zero_and_its_problem_is_not_linear():
    problem = problems.relu_network(num_features=4, num_hidden=8)
    a, y = problem.make_data(4000, 0)
    assert problem.dim == 8 * 5
    assert np.linalg.norm(a, axis=1).max() <= 1 and set(np.unique(y)) == {-1.0, 1.0}
    losses = problem.value_fn(jnp.asarray(problem.x0), (a, y))
    np.testing.assert_allclose(losses, 1, atol=1e-6)
    fit = np.linalg.lstsq(a, y)[0]
    assert abs(np.mean(np.sign(a @ fit) == y) - 0.5) < 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: problems.l1_linear(0), "dim must be"),
        (lambda: problems.l1_linear(2, linear_norm=-1.0), "linear_norm must be"),
        (lambda: models.max_of_linear(2, num_pairs=0), "num_pairs must be"),
        (lambda: problems.robust_regression(2, cap=0.0), "cap must be"),
        (lambda: problems.relu_network(1), "num_features must be"),
        (lambda: problems.relu_network(2, num_hidden=3), "num_hidden must be even"),
        (lambda: problems.l1_linear(2).make_data(0, 0), "num_examples must be"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
