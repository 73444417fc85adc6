"""Problems with closed forms: gradients, slopes and constants against the losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import problems
from jaxdp import models
from jaxdp.data.problems import HESSIANS

DIM, BATCH = 6, 5
RNG = np.random.default_rng(0)
X, U = RNG.standard_normal(DIM), RNG.choice([-1.0, 1.0], DIM) * RNG.uniform(0.5, 2, DIM)
XI = RNG.standard_normal((BATCH, DIM))
SIGNS = np.array([1.0, -1.0, 1.0, 0.0, -1.0])

PROBLEMS = {
    **{f"quadratic_{h}": (problems.quadratic(h, DIM), XI) for h in HESSIANS},
    **{f"centered_{h}": (models.centered_quadratic(h, DIM), XI) for h in HESSIANS},
    "cubic": (problems.cubic(DIM), XI),
    "linear_adversarial": (problems.linear_adversarial(U, scale=3.0), SIGNS),
    "pseudo_huber": (problems.pseudo_huber(DIM), XI),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_and_slopes(name):
    problem, records = PROBLEMS[name]
    x, u, batch = jnp.asarray(X), jnp.asarray(U), (jnp.asarray(records),)
    assert problem.dim == DIM
    value_fn, slope_fn = jax.jit(problem.value_fn), jax.jit(problem.slope_fn)
    losses = value_fn(x, batch)
    assert losses.shape == (BATCH,) and losses.dtype == jnp.float64
    gradients, expected = jax.jit(
        lambda *args: (
            problem.gradient_fn(*args),
            jax.jacobian(problem.value_fn)(*args),
        )
    )(x, batch)
    np.testing.assert_allclose(gradients, expected, 1e-12)
    for radius in (0.5, 1e-3):
        plus, minus = (value_fn(X + s * radius * U, batch) for s in (1, -1))
        np.testing.assert_allclose(
            slope_fn(x, batch, u, radius),
            (plus - minus) / (2 * radius),
            rtol=1e-9,
            atol=1e-10,
        )


@pytest.mark.parametrize("name", PROBLEMS)
def test_records_are_isolated_and_float32_works(name):
    problem, records = PROBLEMS[name]
    x, records = X.astype(np.float32), records.astype(np.float32)
    value_fn = jax.jit(problem.value_fn)
    before = value_fn(x, (records,))
    changed = records.copy()
    changed[2] = 1e3
    after = value_fn(x, (changed,))
    assert before.dtype == jnp.float32
    np.testing.assert_array_equal(np.delete(before, 2), np.delete(after, 2))


@pytest.mark.parametrize("name", PROBLEMS)
def test_constants_bound_the_loss(name):
    problem, records = PROBLEMS[name]
    batch = (jnp.asarray(records),)
    derivatives = jax.jit(
        lambda x: (
            problem.gradient_fn(x, batch),
            jax.hessian(problem.value_fn)(x, batch),
        )
    )
    for x in (X, 0 * X, 30 * X):
        gradients, curvature = map(np.asarray, derivatives(x))
        if problem.lipschitz is not None:
            norms = np.linalg.norm(gradients, axis=-1)
            assert norms.max() <= problem.lipschitz * (1 + 1e-12)
        if problem.smoothness is not None:
            top = np.abs(np.linalg.eigvalsh(curvature)).max()
            assert top <= problem.smoothness * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("hessian", "ranks"),
    [
        ("identity", (20, 200, 2000)),
        ("inverse_sqrt", (7.595, 26.86, 87.99)),
        ("inverse", (3.598, 5.878, 8.178)),
    ],
)
def test_effective_ranks_of_the_paper(hessian, ranks):
    for dim, rank in zip((20, 200, 2000), ranks, strict=True):
        got = models.centered_quadratic(hessian, dim).effective_rank
        assert got == pytest.approx(rank, rel=2e-4)


def test_cubic_remainder_is_exact():
    problem, batch = problems.cubic(DIM), (jnp.zeros((BATCH, 1)),)
    x, u, radius = jnp.asarray(X), jnp.asarray(U), 0.25
    excess = problem.slope_fn(x, batch, u, radius) - problem.gradient_fn(x, batch) @ u
    np.testing.assert_allclose(excess, radius**2 * np.sum(U**3) / 6, rtol=1e-12)


def test_pseudo_huber_has_the_constants_of_the_digest():
    problem = problems.pseudo_huber(100)
    assert problem.effective_rank == pytest.approx(5.19, abs=0.005)
    assert problem.lipschitz == pytest.approx(1.28, abs=0.005)
    assert problem.smoothness == 1


def test_adversarial_slopes_are_exact_multiples():
    problem = problems.linear_adversarial(np.ones(DIM))
    batch = (jnp.asarray(SIGNS),)
    slopes = problem.slope_fn(jnp.zeros(DIM), batch, jnp.ones(DIM), 1e-3)
    np.testing.assert_array_equal(slopes, SIGNS * 1e6 * DIM)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: problems.quadratic("cubic"), "hessian must be one of"),  # pyright: ignore
        (lambda: models.centered_quadratic("identity", 0), "dim must be"),
        (lambda: problems.cubic(-1), "dim must be"),
        (lambda: problems.linear_adversarial(np.ones((2, 2))), "vector must"),
        (lambda: problems.linear_adversarial(np.ones(2), scale=0.0), "scale must be"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
