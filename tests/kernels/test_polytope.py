"""Polytopes by hand: points, and gradients by the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.kernels.polytope import L1Ball, Polytope, Simplex

SQUARE = np.asarray([[0, 0], [2, 0], [2, 1], [0, 1]], np.float32)
CASES = [
    (Simplex(3), np.eye(3)),
    (Simplex(1), np.eye(1)),
    (L1Ball(2, 1.5), np.asarray([[1.5, 0], [0, 1.5], [-1.5, 0], [0, -1.5]])),
    (Polytope(SQUARE), SQUARE),
    (Polytope(np.asarray([[1, 2, 3]])), np.asarray([[1, 2, 3]])),
]
Domain = Simplex | L1Ball | Polytope


@pytest.mark.parametrize(("domain", "vertices"), CASES)
def test_is_the_hull_of_its_vertices(domain: Domain, vertices: np.ndarray) -> None:
    m, p = vertices.shape
    assert (domain.num_vertices, domain.dim) == (m, p)
    np.testing.assert_array_equal(domain.point(jnp.eye(m)), vertices)
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(m), (2, 3)).astype(np.float32)
    gradient = rng.normal(size=(2, 3, p)).astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(domain.point)(weights), weights @ vertices, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        jax.jit(domain.vertex_gradient)(gradient),
        gradient @ vertices.T,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(("domain", "vertices"), CASES)
def test_vertex_gradient_is_the_derivative_by_the_weights(
    domain: Domain, vertices: np.ndarray
) -> None:
    del vertices
    weights = jnp.full(domain.num_vertices, 1 / domain.num_vertices)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x + 0.3))

    by_weights = jax.grad(lambda w: loss(domain.point(w)))(weights)
    by_hand = domain.vertex_gradient(jax.grad(loss)(domain.point(weights)))
    np.testing.assert_allclose(by_hand, by_weights, rtol=1e-5, atol=1e-6)


def test_keeps_a_copy_of_its_vertices() -> None:
    given = SQUARE.copy()
    domain = Polytope(given)
    given[:] = 7
    np.testing.assert_array_equal(domain.vertices, SQUARE)
    with pytest.raises(ValueError, match="read-only"):
        domain.vertices[0, 0] = 1
    assert hash(domain) == hash(domain) and domain != Polytope(SQUARE)
    assert L1Ball(2, 1.0) == L1Ball(2, 1.0)


def test_bad_input_is_named() -> None:
    for bad in (0, -1):
        with pytest.raises(ValueError, match="dim"):
            Simplex(bad)
    with pytest.raises(TypeError, match="dim"):
        Simplex(2.0)  # pyright: ignore[reportArgumentType]
    for radius in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="radius"):
            L1Ball(2, radius)
    with pytest.raises(TypeError, match="radius"):
        L1Ball(2, True)
    for vertices in (np.ones(3), np.ones((0, 3)), np.full((2, 2), np.nan), [[1e39]]):
        with pytest.raises(ValueError, match="vertices"):
            Polytope(vertices)
