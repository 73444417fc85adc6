"""Principal directions: their loss, its constants, the saddle, what is measured."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import models
from jaxdp.metrics import sosp_alpha
from jaxdp.models import PrincipalDirections

# Closed forms of public problems: no method reads them.
pytestmark = pytest.mark.slow

CASES = [(5, 1, 1.0), (5, 1, 0.4), (4, 2, 1.3), (3, 3, 1.0)]


def points(problem: PrincipalDirections, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Factors at zero and on the ball's surface, records on the sphere; some extreme."""
    rng = np.random.default_rng(seed)
    d, r = problem.num_features, problem.rank
    u = rng.standard_normal((300, d, r))
    u[:100] = 0
    u[:100, 0, 0] = 1  # Aligned with a coordinate, and so
    z = rng.standard_normal((300, d))
    z[:50] = np.eye(d)[rng.integers(0, d, 50)]  # with the record, or across it.
    u[::3, :, :-1] = 0
    u *= problem.radius / np.linalg.norm(u, axis=(1, 2), keepdims=True).clip(1e-9)
    u[:10] = 0  # Also where the loss is steepest downwards.
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    return jnp.asarray(u, jnp.float32), jnp.asarray(z, jnp.float32)


def test_loss_is_the_distance_of_matrices() -> None:
    problem = PrincipalDirections(4, 2)
    u, z = points(problem)
    u, z = u[7], z[:5]
    outer = z[:, :, None] * z[:, None, :]
    full = jnp.sum((u @ u.T - outer) ** 2, axis=(1, 2)) - jnp.sum(z**2, axis=1) ** 2
    np.testing.assert_allclose(problem.value_fn(u, (z,)), full / 4, atol=1e-6)


@pytest.mark.parametrize(("num_features", "rank", "radius"), CASES)
def test_constants_bound_every_record(
    num_features: int, rank: int, radius: float
) -> None:
    problem = PrincipalDirections(num_features, rank, radius)
    size = problem.dim

    def loss(flat: jax.Array, z: jax.Array) -> jax.Array:
        return problem.value_fn(flat.reshape(num_features, rank), (z[None],))[0]

    @jax.jit
    @jax.vmap
    def derivatives(u: jax.Array, z: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        flat = u.ravel()
        hessian = jax.hessian(loss)
        change = jax.jvp(lambda x: hessian(x, z), (flat,), (w,))[1]
        return jax.grad(loss)(flat, z), hessian(flat, z), change

    u, z = points(problem)
    w = u.reshape(-1, size) / radius  # Where the Hessian changes most.
    gradient, hessian, change = map(np.asarray, derivatives(u, z, w))
    found = (
        np.linalg.norm(gradient, axis=1).max(),
        np.abs(np.linalg.eigvalsh(hessian)).max(),
        np.abs(np.linalg.eigvalsh(change)).max(),
        np.linalg.norm(hessian, axis=(1, 2)).max(),
    )
    for largest, bound in zip(found, problem.constants, strict=True):
        assert largest <= bound * (1 + 1e-5)
    if rank == 1:  # All but the gradient's are attained; it is beyond R = 0.7.
        share = np.array(found) / np.array(problem.constants)
        assert np.all(share[1:3] > 0.999)
        assert share[3] > 0.85  # The term in z is bounded by itself.
        assert share[0] > 0.999 or radius < 0.7


def test_zero_is_a_strict_saddle_and_the_eigenvectors_are_the_minimum() -> None:
    problem = PrincipalDirections(5, 2)
    rng = np.random.default_rng(0)
    x = models.unit_rows(rng.standard_normal((400, 5)) * [3, 2, 1, 0.5, 0.1])
    values, vectors = np.linalg.eigh(x.T.astype(np.float64) @ x / len(x))
    of_each = jax.vmap(
        jax.grad(lambda u, z: problem.value_fn(u, (z[None],))[0]), (None, 0)
    )
    assert not np.any(of_each(problem.start, jnp.asarray(x)))  # Each record's.
    rho = problem.constants.hessian_lipschitz
    alpha = sosp_alpha(problem.value_fn, problem.start, (x,), rho)
    assert alpha.min_eigenvalue == pytest.approx(-values[-1], rel=1e-5)
    assert alpha == pytest.approx(values[-1] ** 2 / rho, rel=1e-5)
    best = jnp.asarray(vectors[:, -2:] * np.sqrt(values[-2:]), jnp.float32)
    assert np.linalg.norm(best) <= 1
    assert sosp_alpha(problem.value_fn, best, (x,), rho) < 1e-6
    assert models.captured_variance(best, x) == pytest.approx(1, abs=1e-5)


def test_captured_variance_is_of_the_span() -> None:
    x = np.diag([3.0, 2.0, 1.0]).astype(np.float32)  # Moments 9, 4 and 1, over 3.
    one = jnp.asarray([[0.0], [0.1], [0.0]])
    assert models.captured_variance(one, x) == pytest.approx(4 / 9, rel=1e-5)
    assert models.captured_variance(-7 * one, x) == pytest.approx(4 / 9, rel=1e-5)
    mixed = jnp.asarray([[1.0, 1.0], [1.0, -1.0], [0.0, 0.0]])
    assert models.captured_variance(mixed, x) == pytest.approx(1, rel=1e-5)
    twice = jnp.concatenate([one, one], axis=1)
    assert models.captured_variance(twice, x) == pytest.approx(4 / 13, rel=1e-5)
    for rank in (1, 2):
        assert models.captured_variance(jnp.zeros((3, rank)), x) == 0


def test_moment_deviation_is_the_largest_along_a_direction() -> None:
    problem = PrincipalDirections(4)
    rng = np.random.default_rng(0)
    x = models.unit_rows(rng.normal([2, 0, 0, 0], 1, (2000, 4)))
    found = models.moment_deviation(x)
    outer = x[:, :, None] * x[:, None, :].astype(np.float64)
    apart = outer - outer.mean(axis=0)
    v = rng.standard_normal((4, 500))
    v /= np.linalg.norm(v, axis=0)
    stds = np.sqrt(np.mean(np.sum((apart @ v) ** 2, axis=1), axis=0))
    assert 0.98 * found < stds.max() <= found * (1 + 1e-6) <= 0.5
    # Of gradients as well, over the length of U.
    u = jnp.asarray(0.7 * v[:, :1], jnp.float32)
    each = jax.vmap(
        jax.grad(lambda u, z: problem.value_fn(u, (z[None],))[0]), (None, 0)
    )
    gradients = np.asarray(each(u, jnp.asarray(x)))[:, :, 0]
    std = np.sqrt(np.sum(np.var(gradients, axis=0)))
    assert std == pytest.approx(0.7 * stds[0], rel=1e-4)
    half = np.repeat(np.eye(2), 5, axis=0)  # The most that there is.
    assert models.moment_deviation(half) == 0.5


def test_unit_rows() -> None:
    x = models.unit_rows(np.array([[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]]))
    assert x.dtype == np.float32
    np.testing.assert_allclose(x, [[0.6, 0.8], [0, 0], [1, 0]], rtol=3e-7)
    many = models.unit_rows(np.random.default_rng(0).uniform(size=(1000, 16)))
    lengths = np.linalg.norm(many.astype(np.float64), axis=1)
    assert lengths.max() <= 1 and lengths.min() > 1 - 1e-6
    assert np.isnan(models.unit_rows(np.array([[np.nan, 1.0]]))).all()


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"num_features": 0}, "num_features must be"),
        ({"rank": 0}, "rank must be an integer >= 1 and <= 4, got 0"),
        ({"rank": 5}, "rank must be an integer >= 1 and <= 4, got 5"),
        ({"radius": 0.0}, "radius must be a number > 0"),
        ({"radius": math.inf}, "radius must be"),
    ],
)
def test_wrong_numbers(numbers: dict[str, float], said: str) -> None:
    given: dict = {"num_features": 4} | numbers
    with pytest.raises(ValueError, match=said):
        PrincipalDirections(**given)
