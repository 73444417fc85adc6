"""GRAD and DIFF: unbiased for the ball's gradient, with the variances of the formulas."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import betainc

from jaxdp.kernels import finite_difference, parts, smoothed_gradient, sphere

Loss = Callable[[jax.Array, jax.Array], jax.Array]
KEY = jax.random.key(7)


def estimates(
    loss: Loss,
    x: jax.Array,
    records: jax.Array,
    *,
    previous: jax.Array | None = None,
    law: str = "sphere",
    m: int = 1,
    radius: float = 0.7,
    kind: str = "antithetic",
    share: bool = False,
    key: jax.Array = KEY,
) -> np.ndarray:
    """GRAD at x of every record, or DIFF from ``previous``: (B, d), compiled."""
    draw = functools.partial(sphere.directions, like=x, law=law, num=m)
    options: dict[str, Any] = {"smoothing_radius": radius, "share": share}
    places = jnp.arange(len(records), dtype=jnp.uint32)

    @jax.jit
    def run(x: jax.Array, previous: Any, records: jax.Array) -> jax.Array:
        if previous is None:
            return smoothed_gradient.gradients(
                loss, x, records, places, key, draw, **options
            )
        return smoothed_gradient.differences(
            loss, x, previous, records, places, key, draw, kind=kind, **options
        )

    return np.asarray(run(x, previous, records))


def linear(x: jax.Array, batch: jax.Array) -> jax.Array:
    return batch @ x


def check_mean(samples: np.ndarray, expected: np.ndarray) -> None:
    """Every coordinate's mean within 6 standard errors: below 1e-8 by chance."""
    error = samples.std(axis=0) / math.sqrt(len(samples))
    np.testing.assert_array_less(
        np.abs(samples.mean(axis=0) - expected), 6 * error + 1e-6
    )


# --- against a plain implementation ---


@functools.cache
def unit_rows(law: str, dim: int, num: int) -> Callable[[jax.Array], np.ndarray]:
    """Directions of length 1 of a key, float64 (num, dim); one program for all keys."""
    like = jnp.zeros(dim)

    @jax.jit
    def rows(key: jax.Array) -> jax.Array:
        drawn = sphere.directions(key, like, law=law, num=num)
        return jax.vmap(lambda one: sphere.materialise(one, like))(drawn)

    return lambda key: np.asarray(rows(key), np.float64) / math.sqrt(dim)


# Every two of them together; each kind once, and each pair of the others, fast.
@pytest.mark.parametrize(
    ("law", "share", "kind"),
    [
        ("sphere", False, None),
        ("orthonormal", False, "antithetic"),
        ("orthonormal", True, "one_sided"),
        ("sphere", True, "independent"),
        pytest.param("orthonormal", True, None, marks=pytest.mark.slow),
        pytest.param("sphere", True, "antithetic", marks=pytest.mark.slow),
        pytest.param("sphere", False, "one_sided", marks=pytest.mark.slow),
        pytest.param("orthonormal", False, "independent", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_formula(law: str, share: bool, kind: str | None) -> None:
    """One record and one direction after another, in float64."""
    d, m, radius = 5, 3, 0.7
    rng = np.random.default_rng(1)
    a = rng.normal(size=(4, d)).astype(np.float32)
    x, y = (rng.normal(size=d).astype(np.float32) for _ in range(2))

    def loss(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.abs(batch @ x - 1)

    got = estimates(
        loss,
        jnp.asarray(x),
        jnp.asarray(a),
        previous=None if kind is None else jnp.asarray(y),
        law=law,
        m=m,
        radius=radius,
        kind=kind or "",
        share=share,
    )

    units = unit_rows(law, d, m)

    def f(point: np.ndarray, i: int) -> float:
        return abs(float(a[i].astype(np.float64) @ point) - 1)

    def grad(point: np.ndarray, u: np.ndarray, i: int) -> np.ndarray:
        scores = [f(point + radius * v, i) - f(point - radius * v, i) for v in u]
        return d / (2 * radius) * np.mean(np.array(scores)[:, None] * u, axis=0)

    for i in range(4):
        fold = jax.random.fold_in
        key = KEY if share else fold(KEY, i)
        u = units(key)
        if kind is None:
            expected = grad(x, u, i)
        elif kind == "antithetic":
            expected = grad(x, u, i) - grad(y, u, i)
        elif kind == "independent":
            name = sphere.leaf_id("directions of the other point")
            expected = grad(x, u, i) - grad(y, units(fold(key, name)), i)
        else:
            scores = [f(x + radius * v, i) - f(y + radius * v, i) for v in u]
            expected = d / radius * np.mean(np.array(scores)[:, None] * u, axis=0)
        np.testing.assert_allclose(got[i], expected, atol=2e-5)


def test_unknown_kinds_are_refused() -> None:
    x = jnp.ones(2)
    with pytest.raises(ValueError, match="kind must be one of antithetic"):
        estimates(linear, x, jnp.ones((1, 2)), previous=x, kind="forward")


def test_nan_stays_with_its_record() -> None:
    records = jnp.array([[1.0, 2.0], [jnp.nan, 0.0], [0.5, 0.5]])
    got = estimates(linear, jnp.ones(2), records, m=2, law="orthonormal")
    assert np.isnan(got[1]).any()
    np.testing.assert_allclose(got[[0, 2]], np.asarray(records)[[0, 2]], rtol=1e-5)


def test_trees_are_flattened_and_rebuilt() -> None:
    tree = {"b": jnp.arange(6.0).reshape(2, 3), "a": jnp.arange(2.0), "n": jnp.ones(2)}
    batched = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree)
    moves = {"a", "b"}.__contains__
    flat = parts.split(batched, moves)
    np.testing.assert_array_equal(flat[0], [0, 1, 0, 1, 2, 3, 4, 5])
    back = parts.join(flat[1], tree, moves)
    np.testing.assert_array_equal(back["b"], 2 * tree["b"])
    np.testing.assert_array_equal(back["n"], [0, 0])


# --- unbiased for the gradient of the mean over the ball ---

POINT = np.array([0.1, -0.3, 0.5, 0.69, -2.0])


def smoothed_l1(x: np.ndarray, radius: float) -> np.ndarray:
    """The gradient of the mean of ||.||_1 / sqrt(d) over a ball, in closed form."""
    d = len(x)
    share = betainc(0.5, (d + 1) / 2, np.minimum(1, (x / radius) ** 2))
    return np.sign(x) / math.sqrt(d) * share


def l1(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(x)) / math.sqrt(len(x)) + 0 * batch


def test_the_closed_form_is_the_printed_one() -> None:
    np.testing.assert_allclose(
        smoothed_l1(POINT, 0.7),
        [0.118170, -0.317789, 0.426405, 0.447210, -0.447214],
        atol=5e-7,
    )


@pytest.mark.parametrize(
    "law", ["orthonormal", pytest.param("sphere", marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_the_ball(law: str) -> None:
    records = jnp.zeros(100_000)
    got = estimates(l1, jnp.asarray(POINT, jnp.float32), records, law=law, m=4)
    check_mean(got, smoothed_l1(POINT, 0.7))


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "antithetic" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in smoothed_gradient.KINDS
    ],
)
def test_differences_are_those_of_the_ball(kind: str) -> None:
    x, y = POINT + 0.05, POINT
    got = estimates(
        l1,
        jnp.asarray(x, jnp.float32),
        jnp.zeros(100_000),
        previous=jnp.asarray(y, jnp.float32),
        m=4,
        kind=kind,
    )
    expected = smoothed_l1(x, 0.7) - smoothed_l1(y, 0.7)
    np.testing.assert_allclose(
        -expected, [-0.056090, -0.042806, -0.011499, -3.2e-6, 0], atol=5e-7
    )
    check_mean(got, expected)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.2, 0.48761),
        pytest.param(0.1, 0.25485, marks=pytest.mark.slow),
        pytest.param(0.6, 0.96983, marks=pytest.mark.slow),
    ],
)
def test_one_kink_in_ten_dimensions(ratio: float, expected: float) -> None:
    def kink(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.abs(x[0]) + 0 * batch

    x = jnp.zeros(10).at[0].set(0.7 * ratio)
    got = estimates(kink, x, jnp.zeros(50_000), m=2)
    check_mean(got[:, :1], np.array([expected]))


def test_the_ball_in_place_of_the_sphere_is_found() -> None:
    """Directions of the ball shrink a linear gradient by d / (d + 2)."""
    d = 5
    a = np.ones((50_000, d), np.float32)
    got = estimates(linear, jnp.zeros(d), jnp.asarray(a), law="ball", m=4)
    check_mean(got, d / (d + 2) * a[0])
    error = got.std(axis=0) / math.sqrt(len(got))
    assert (np.abs(got.mean(axis=0) - a[0]) > 20 * error).all()


def test_quartic_is_smoothed_over_the_ball() -> None:
    """|x|^4 / 4: the gradient of its mean over the ball is (|z|^2 + radius^2) z."""

    def quartic(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.sum(x**2) ** 2 / 4 + 0 * batch

    x = np.array([0.5, -0.2, 0.1, 0.0, 0.3])
    got = estimates(quartic, jnp.asarray(x, jnp.float32), jnp.zeros(50_000), m=4)
    check_mean(got, (x @ x + 0.7**2) * x)


# --- variances ---


@pytest.mark.parametrize(
    ("d", "m", "law", "expected"),
    [
        pytest.param(10, 1, "sphere", 9.0, marks=pytest.mark.slow),
        pytest.param(10, 8, "sphere", 1.125, marks=pytest.mark.slow),
        pytest.param(16, 16, "sphere", 15 / 16, marks=pytest.mark.slow),
        (10, 4, "orthonormal", 10 / 4 - 1),
        pytest.param(16, 16, "orthonormal", 0.0, marks=pytest.mark.slow),
    ],
)
def test_variance_of_gradients_of_linear_losses(
    d: int, m: int, law: str, expected: float
) -> None:
    """(d - 1) / m for independent directions, d / m - 1 for orthonormal ones."""
    a = np.zeros((20_000, d), np.float32)
    a[:, 0] = 1
    got = estimates(linear, jnp.zeros(d), jnp.asarray(a), law=law, m=m)
    squares = np.sum((got - a) ** 2, axis=1)
    error = squares.std() / math.sqrt(len(squares))
    assert abs(squares.mean() - expected) < 6 * error + 1e-6


@pytest.mark.parametrize(
    "law", ["orthonormal", pytest.param("sphere", marks=pytest.mark.slow)]
)
def test_differences_of_linear_losses(law: str) -> None:
    """One-sided: second moment (d / radius)^2 <z, x - y>^2 / m; antithetic: zero."""
    d, m, radius = 10, 4, 0.7
    z = np.random.default_rng(2).normal(size=d)
    a = np.tile(z, (20_000, 1)).astype(np.float32)
    x, y = jnp.full((d,), 0.1, jnp.float32), jnp.zeros(d)
    inner = 0.1 * z.sum()
    common: dict[str, Any] = {"previous": y, "law": law, "m": m}
    one_sided = estimates(linear, x, jnp.asarray(a), kind="one_sided", **common)
    squares = np.sum(one_sided**2, axis=1)
    expected = (d / radius * inner) ** 2 / m
    if law == "orthonormal":  # The norm itself, every time.
        np.testing.assert_allclose(squares, expected, rtol=1e-3)
    error = squares.std() / math.sqrt(len(squares))
    assert abs(squares.mean() - expected) < 6 * error + 1e-3 * expected
    antithetic = estimates(linear, x, jnp.asarray(a), **common)
    np.testing.assert_allclose(antithetic, 0, atol=2e-5)


@pytest.mark.parametrize("radius", [1.0, pytest.param(0.01, marks=pytest.mark.slow)])
def test_quadratics_are_exact_with_all_directions(radius: float) -> None:
    h = np.diag([1.0, 2.0, 3.0]).astype(np.float32) + 0.5

    def quadratic(x: jax.Array, batch: jax.Array) -> jax.Array:
        return x @ jnp.asarray(h) @ x / 2 + 0 * batch

    x, y = jnp.array([1.0, -1.0, 0.5]), jnp.array([0.5, 0.0, 0.0])
    common: dict[str, Any] = {"law": "orthonormal", "m": 3, "radius": radius}
    got = estimates(quadratic, x, jnp.zeros(2), **common)
    np.testing.assert_allclose(got[0], h @ np.asarray(x), atol=3e-4)
    got = estimates(quadratic, x, jnp.zeros(2), previous=y, **common)
    np.testing.assert_allclose(got[0], h @ np.asarray(x - y), atol=3e-4)


# --- deterministic bounds ---


@pytest.mark.slow  # A study; the formula is above.
@pytest.mark.parametrize(
    "law", ["orthonormal", pytest.param("sphere", marks=pytest.mark.slow)]
)
def test_bounds_on_lipschitz_losses(law: str) -> None:
    """|GRAD| <= dL, |DIFF| <= dL|x - y| / radius, over sqrt(m) if orthonormal: float64."""
    d, m, radius, rng = 6, 4, 0.3, np.random.default_rng(3)
    w = rng.normal(size=(32, 20, d))
    w /= np.linalg.norm(w, ord=2, axis=(1, 2), keepdims=True)
    v = rng.normal(size=(32, 20))
    v /= np.linalg.norm(v, axis=1, keepdims=True)

    def network(x: jax.Array, batch: Any) -> jax.Array:
        inner, outer = batch
        return jnp.sum(outer * jnp.maximum(inner @ x, 0), axis=-1)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        records = (jnp.asarray(w), jnp.asarray(v))
        x = jnp.asarray(rng.normal(size=d) * 0.2)
        y = x + jnp.asarray(rng.normal(size=d) * 0.01)
        move = float(np.linalg.norm(x - y))
        draw = functools.partial(sphere.directions, like=x, law=law, num=m)
        args = (records, jnp.arange(32, dtype=jnp.uint32), KEY, draw)
        opts: dict[str, Any] = {"smoothing_radius": radius, "share": False}
        grad = jax.jit(lambda x: smoothed_gradient.gradients(network, x, *args, **opts))
        norms = np.linalg.norm(grad(x), axis=1)
        root = math.sqrt(m) if law == "orthonormal" else 1
        assert norms.max() <= d / (math.sqrt(2 * m) if m >= 3 and root > 1 else 1)
        for kind in ("antithetic", "one_sided"):
            diff = jax.jit(
                lambda x, y, kind=kind: smoothed_gradient.differences(
                    network, x, y, *args, kind=kind, **opts
                )
            )
            norms = np.linalg.norm(diff(x, y), axis=1)
            assert 0 < norms.max() <= d * move / radius / root


def test_the_bound_on_differences_is_attained() -> None:
    d, m, radius = 6, 4, 0.3
    a = np.zeros((1, d), np.float32)
    a[0, 0] = 1
    x = jnp.zeros(d).at[0].set(0.01)
    got = estimates(
        linear,
        x,
        jnp.asarray(a),
        previous=jnp.zeros(d),
        law="orthonormal",
        m=m,
        radius=radius,
        kind="one_sided",
    )
    bound = d * 0.01 / radius / math.sqrt(m)
    np.testing.assert_allclose(np.linalg.norm(got), bound, rtol=1e-4)


def test_changes_of_lazy_losses_are_the_same() -> None:
    """What is large is evaluated direction after direction, to the same numbers."""
    d, m = 2**16, 3
    rng = np.random.default_rng(4)
    a = jnp.asarray(rng.normal(size=(4, d)), jnp.float32)
    x, y = (jnp.asarray(rng.normal(size=d), jnp.float32) for _ in range(2))

    def eager(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.abs(batch @ x)

    from jaxdp.kernels import perturb

    lazy = perturb.LazyLoss(lambda x, batch, at: jnp.abs(batch @ at("", x)))
    rows = sphere.directions(KEY, x, law="sphere", num=m)
    got = [
        jax.jit(
            lambda x, y, f=f: finite_difference.changes(
                f, x, y, a, rows, smoothing_radius=1e-2
            )
        )(x, y)
        for f in (eager, lazy)
    ]
    np.testing.assert_allclose(got[0], got[1], rtol=1e-3, atol=2.0)
    assert got[0].shape == (4, m)
