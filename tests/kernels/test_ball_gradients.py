"""Gradients at points of a ball: unbiased for the gradient of the smoothed loss."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.kernels import perturb, smoothed_gradient, sphere

KEY = jax.random.key(7)
RADIUS = 0.7
LOSSES: dict[str, Callable[[Any, Any], jax.Array]] = {
    "linear": lambda x, batch: batch @ x,
    "kink": lambda x, batch: jnp.abs(x[0]) + 0 * batch,
    "quadratic": lambda x, batch: jnp.sum(x**2) / 2 + 0 * batch,
    "quartic": lambda x, batch: jnp.sum(x**2) ** 2 / 4 + 0 * batch,
}


def everything(path: str) -> bool:
    del path
    return True


def run(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    records: Any,
    *,
    previous: Any = None,
    kind: str = "common",
    m: int = 1,
    law: str = "ball",
    key: jax.Array = KEY,
    moves: Callable[[str], bool] = everything,
    places: jax.Array | None = None,
) -> Any:
    """The gradients of all records, or their change if there is a previous point."""
    draw = functools.partial(
        sphere.directions, like=params, law=law, num=m, trainable=moves
    )
    if places is None:
        places = jnp.arange(len(jax.tree.leaves(records)[0]), dtype=jnp.uint32)
    options: dict[str, Any] = {"smoothing_radius": RADIUS, "moves": moves}
    args = (records, places, key, draw)
    if previous is None:
        return smoothed_gradient.ball_gradients(loss, params, *args, **options)
    return smoothed_gradient.ball_differences(
        loss, params, previous, *args, kind=kind, **options
    )


@functools.cache
def compiled(name: str, m: int = 1, law: str = "ball", kind: str = "common") -> Any:
    """``(x, records, previous or None) -> (B, d)`` for one of LOSSES."""

    @jax.jit
    def call(x: jax.Array, records: jax.Array, previous: Any) -> jax.Array:
        options: dict[str, Any] = {"m": m, "law": law, "kind": kind}
        return run(LOSSES[name], x, records, previous=previous, **options)

    def convert(x: Any, records: Any, previous: Any = None) -> np.ndarray:
        x, records = jnp.asarray(x, jnp.float32), jnp.asarray(records, jnp.float32)
        if previous is not None:
            previous = jnp.asarray(previous, jnp.float32)
        return np.asarray(call(x, records, previous), np.float64)

    return convert


def deviation(samples: np.ndarray, expected: Any) -> np.ndarray:
    """Of every coordinate's mean, in standard errors; a rounding counts for nothing."""
    error = samples.std(axis=0) / math.sqrt(len(samples))
    return np.abs(samples.mean(axis=0) - np.asarray(expected)) / (error + 1e-7)


# A mean is off by more than this with a probability below 1e-8.
SIGMAS = 6


# --- against a plain implementation ---


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow) if kind is None else kind
        for kind in (None, *smoothed_gradient.BALL_KINDS)
    ],
)
def test_it_is_the_formula(kind: str | None) -> None:
    """A smooth loss on two leaves: one record and one point after another, float64."""
    d, m, fold = 5, 3, jax.random.fold_in
    rng = np.random.default_rng(1)
    a = rng.normal(size=(4, d)).astype(np.float32)
    x, y = (rng.normal(size=d).astype(np.float32) for _ in range(2))

    def tree(v: Any) -> Any:
        return {"u": jnp.asarray(v[:2]), "w": jnp.asarray(v[2:]).reshape(3, 1)}

    def flat(t: Any) -> jax.Array:
        return jnp.concatenate([t["u"], t["w"][:, 0]])

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.sqrt(1 + (batch @ flat(params) - 1) ** 2)

    @jax.jit
    def call(params: Any, previous: Any, records: jax.Array) -> Any:
        previous = None if kind is None else previous
        return run(loss, params, records, previous=previous, kind=kind or "", m=m)

    @jax.jit
    def points(key: jax.Array) -> jax.Array:
        rows = sphere.directions(key, tree(x), law="ball", num=m)
        return jax.vmap(lambda one: flat(sphere.materialise(one, tree(x))))(rows)

    def grad(at: np.ndarray, key: jax.Array, i: int) -> np.ndarray:
        total = np.zeros(d)
        for b in np.asarray(points(key), np.float64) / math.sqrt(d):
            assert np.linalg.norm(b) <= 1 + 1e-6
            inner = a[i].astype(np.float64) @ (at + RADIUS * b) - 1
            total += inner / math.sqrt(1 + inner**2) * a[i]
        return total / m

    got = call(tree(x), tree(y), jnp.asarray(a))
    for leaf, shape in {"u": (4, 2), "w": (4, 3, 1)}.items():
        assert got[leaf].shape == shape
        assert got[leaf].dtype == jnp.float32
    for i in range(4):
        key = fold(KEY, i)
        name = sphere.leaf_id("directions of the other point")
        expected = grad(x, key, i)
        if kind is not None:
            other = key if kind == "common" else fold(key, name)
            expected = expected - grad(y, other, i)
        one = flat(jax.tree.map(lambda v, i=i: v[i], got))
        np.testing.assert_allclose(one, expected, atol=2e-6)


# --- unbiased for the gradient of the mean over the ball ---


@pytest.mark.slow  # A study; the formula is above.
def test_one_kink_in_ten_dimensions() -> None:
    """|x_1|: in closed form; points on the sphere have another mean."""
    records = np.zeros(100_000)
    table = [(0.1, 0.25485, 0.2301), (0.2, 0.48761, 0.4446), (0.6, 0.96983, 0.9490)]
    for ratio, ball, surface in table:
        x = np.zeros(10)
        x[0] = RADIUS * ratio
        for law, expected in (("ball", ball), ("sphere", surface)):
            got = compiled("kink", m=4, law=law)(x, records)[:, 0]
            # The figures are rounded: the sphere's to 4 digits.
            error = got.std() / math.sqrt(len(got))
            assert abs(got.mean() - expected) < SIGMAS * error + 5e-5
            if law == "sphere":
                assert deviation(got, ball) > SIGMAS


@pytest.mark.slow  # A study; the formula is above.
def test_the_change_of_a_kink() -> None:
    """Both kinds have the closed form's mean; a common term is 0 or 2 and rarely 2."""
    records, ratios = np.zeros(100_000), (0.2, 0.1)
    x, y = (np.eye(10)[0] * RADIUS * r for r in ratios)
    expected = 0.48761 - 0.25485
    second = {}
    for kind in smoothed_gradient.BALL_KINDS:
        got = compiled("kink", kind=kind)(x, records, y)[:, 0]
        error = got.std() / math.sqrt(len(got))
        assert abs(got.mean() - expected) < SIGMAS * error + 1e-5
        second[kind] = np.mean(got**2)
        if kind == "common":
            assert set(np.unique(got)) == {0.0, 2.0}
    # w^2 = 2w if common; two signs of their own otherwise: 2 - 2 E[sign] E[sign'].
    spread = SIGMAS * 4 / math.sqrt(len(records))
    assert abs(second["common"] - 2 * expected) < spread
    assert abs(second["independent"] - (2 - 2 * 0.48761 * 0.25485)) < spread


@pytest.mark.parametrize("law", ["ball", "sphere"])
@pytest.mark.slow  # A study; the formula is above.
def test_a_quartic(law: str) -> None:
    """|x|^4 / 4: (|z|^2 + radius^2) z over the ball; the sphere adds 2 / d."""
    z = np.array([0.5, -0.2, 0.1, 0.0, 0.3])
    got = compiled("quartic", m=4, law=law)(z, np.zeros(50_000))
    factor = 1 if law == "ball" else 1 + 2 / 5
    assert np.all(deviation(got, (z @ z + factor * RADIUS**2) * z) < SIGMAS)
    if law == "sphere":
        assert np.max(deviation(got, (z @ z + RADIUS**2) * z)) > 2 * SIGMAS


@pytest.mark.slow  # A study; the formula is above.
def test_quadratics() -> None:
    """|x|^2 / 2: means z and z - y, and the second moments of what is left."""
    d, m, records = 10, 3, np.zeros(20_000)
    z = np.linspace(-0.5, 0.4, d)
    y = z[::-1]
    # E|radius * mean of m points|^2
    moment = RADIUS**2 * d / (d + 2) / m

    def squares_are(samples: np.ndarray, expected: float) -> None:
        assert deviation(np.sum(samples**2, axis=1), expected) < SIGMAS

    got = compiled("quadratic", m)(z, records)
    assert np.all(deviation(got, z) < SIGMAS)
    squares_are(got - z, moment)
    got = compiled("quadratic", m, kind="independent")(z, records, y)
    assert np.all(deviation(got, z - y) < SIGMAS)
    squares_are(got - (z - y), 2 * moment)
    got = compiled("quadratic", m)(z, records, y)
    np.testing.assert_allclose(got, np.broadcast_to(z - y, got.shape), atol=1e-6)


@pytest.mark.slow  # A study; the formula is above.
def test_linear_losses() -> None:
    """The gradient itself, to the rounding of a mean; no change, to the bit."""
    a = np.random.default_rng(3).normal(size=(50, 10)).astype(np.float32)
    x, y = np.full(10, 0.3), np.linspace(-1, 1, 10)
    np.testing.assert_allclose(compiled("linear", 3)(x, a), a, rtol=3e-7)
    for kind in smoothed_gradient.BALL_KINDS:
        got = compiled("linear", 3, kind=kind)(x, a, y)
        np.testing.assert_array_equal(got, np.zeros((50, 10)))


def test_equal_gradients_cancel_to_the_bit() -> None:
    """Products that a sum could be contracted with, and an unmoved point."""

    def steep(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.exp(batch[:, 0]) * (batch @ x) / 3

    @jax.jit
    def call(x: jax.Array, y: jax.Array, records: jax.Array) -> list[jax.Array]:
        wave = lambda x, b: jnp.sin(b @ x)  # noqa: E731
        return [
            run(steep, x, records, previous=y, m=3),
            run(wave, x, records, previous=x, m=3),
        ]

    rng = np.random.default_rng(4)
    x, y = (jnp.asarray(rng.normal(size=6), jnp.float32) for _ in range(2))
    records = jnp.asarray(rng.normal(size=(9, 6)), jnp.float32)
    for got in call(x, y, records):
        np.testing.assert_array_equal(got, np.zeros((9, 6)))


@pytest.mark.slow  # A study; the formula is above.
def test_bounds_on_lipschitz_losses() -> None:
    """At most L and 2L, whatever the records are."""
    d, rng = 6, np.random.default_rng(5)
    w = rng.normal(size=(64, 20, d))
    w /= np.linalg.norm(w, ord=2, axis=(1, 2), keepdims=True)
    v = rng.normal(size=(64, 20))
    v /= np.linalg.norm(v, axis=1, keepdims=True)

    def network(x: jax.Array, batch: Any) -> jax.Array:
        inner, outer = batch
        return jnp.sum(outer * jnp.maximum(inner @ x, 0), axis=-1)

    @jax.jit
    def call(x: jax.Array, y: jax.Array, records: Any) -> list[jax.Array]:
        two = [
            run(network, x, records, previous=y, kind=kind, m=2)
            for kind in smoothed_gradient.BALL_KINDS
        ]
        return [run(network, x, records, m=2), *two]

    records = (jnp.asarray(w, jnp.float32), jnp.asarray(v, jnp.float32))
    one, *two = call(jnp.full(d, 0.3), jnp.full(d, -0.3), records)
    assert 0 < np.linalg.norm(one, axis=1).max() <= 1 + 1e-5
    for got in two:
        assert 0 < np.linalg.norm(got, axis=1).max() <= 2 + 1e-5


# --- the same bits everywhere ---


def smooth(x: jax.Array, batch: jax.Array) -> jax.Array:
    """A loss whose gradient is elementwise in the record, and exact in the point."""
    return jnp.sum((x[None] - batch) ** 2, axis=1) / 2


def test_same_bits_in_every_program() -> None:
    """In slices of the batch, beside other keys, step after step."""
    rng = np.random.default_rng(6)
    x, y = (jnp.asarray(rng.normal(size=5), jnp.float32) for _ in range(2))
    records = jnp.asarray(rng.normal(size=(11, 5)), jnp.float32)
    places = jnp.arange(11, dtype=jnp.uint32)
    others = [jax.random.key(i) for i in (8, 9, 10)]
    keys = jnp.stack([*others[:2], KEY, others[2]]).reshape(2, 2)

    def rows(key: jax.Array, some: jax.Array, at: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"m": 2, "key": key, "places": at}
        return run(smooth, x, some, previous=y, kind="independent", **options)

    once = jax.jit(rows)
    whole = once(KEY, records, places)
    assert not np.any(whole[0] == whole[1])
    for start in range(0, 11 - 3, 3):
        some = slice(start, start + 3)
        part = once(KEY, records[some], places[some])
        np.testing.assert_array_equal(part, whole[some])

    @jax.jit
    def loop(keys: jax.Array) -> jax.Array:
        beside = jax.vmap(rows, in_axes=(0, None, None))
        step = lambda carry, pair: (carry, beside(pair, records, places))  # noqa: E731
        return jax.lax.scan(step, None, keys)[1]

    # Beside other keys the radius of the ball's point is a vector's power and not a
    # number's, which some processors round otherwise: an ulp of a point.
    np.testing.assert_allclose(loop(keys)[1, 0], whole, rtol=0, atol=2e-6)


def test_points_belong_to_places() -> None:
    """One record under several names: other points; under one name: the same."""
    x, record = jnp.ones(3), jnp.zeros((4, 3))

    @jax.jit
    def call(places: jax.Array) -> jax.Array:
        return run(smooth, x, record, places=places)

    got = call(jnp.asarray([0, 5, 5, 1], jnp.uint32))
    np.testing.assert_array_equal(got[1], got[2])
    assert not np.any(got[0] == got[1])
    assert not np.any(got[0] == got[3])


# --- leaves ---


def test_frozen_and_integer_leaves() -> None:
    """They are zero, do not count in d, and are neither moved nor differentiated."""
    seen: list[str] = []

    @jax.custom_jvp
    def undifferentiated(x: jax.Array) -> jax.Array:
        return x

    @undifferentiated.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        seen.append("frozen")
        return primals[0], tangents[0]

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        picked = jnp.take(params["w"], params["index"])
        frozen = undifferentiated(params["frozen"])
        return jnp.sqrt(1 + (batch @ picked + frozen.sum()) ** 2)

    def alone(w: Any, batch: jax.Array) -> jax.Array:
        return jnp.sqrt(1 + (batch @ jnp.take(w["w"], index) + frozen.sum()) ** 2)

    index, frozen = jnp.asarray([2, 0]), jnp.asarray([0.25, 0.5])
    w = jnp.asarray([0.1, -0.4, 0.3])
    params = {"frozen": frozen, "index": index, "w": w}
    records = jnp.asarray(np.random.default_rng(7).normal(size=(4, 2)), jnp.float32)

    @jax.jit
    def call(params: Any, records: jax.Array) -> Any:
        moves = lambda path: path == "w"  # noqa: E731
        previous = params | {"w": -params["w"]}
        full = run(loss, params, records, previous=previous, moves=moves)
        one, two = {"w": params["w"]}, {"w": -params["w"]}
        return full, run(alone, one, records, previous=two)

    got, expected = call(params, records)
    assert not seen
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-6, atol=1e-7)
    assert np.any(got["w"] != 0)
    for name in ("frozen", "index"):
        assert got[name].shape == (4, 2)
        assert got[name].dtype == jnp.float32
        np.testing.assert_array_equal(got[name], np.zeros((4, 2)))


def test_parameters_of_16_bits() -> None:
    """x + scale * v in float32, rounded once; what comes out is float32."""
    x = jnp.asarray([1.0, -2.0, 0.5], jnp.bfloat16)

    def loss(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32) ** 2) / 2 + 0 * batch

    with jax.numpy_dtype_promotion("standard"):
        got = jax.jit(lambda x: run(loss, x, jnp.zeros(1)))(x)

    @jax.jit
    def direction(key: jax.Array) -> jax.Array:
        row = sphere.select(sphere.directions(key, x, law="ball"), 0)
        return sphere.materialise(row, x)

    v = np.asarray(direction(jax.random.fold_in(KEY, 0)))
    point = np.asarray(x, np.float32) + np.float32(RADIUS / math.sqrt(3)) * v
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(
        got[0], jnp.asarray(point).astype(jnp.bfloat16).astype(jnp.float32)
    )


def test_nan_stays_with_its_record() -> None:
    records = np.ones((50, 10))
    records[1, 2], records[2, 3] = np.nan, np.inf
    for previous in (None, np.zeros(10)):
        got = compiled("linear", 3)(np.ones(10), records, previous)
        assert not np.isfinite(got[1]).all()
        assert not np.isfinite(got[2]).all()
        assert np.isfinite(got[[0, *range(3, 50)]]).all()


def test_points_are_visited_one_after_the_other() -> None:
    """Memory: more points are not more gradients."""
    d, records = 4096, 8

    def temporary(m: int) -> int:
        def call(x: jax.Array, batch: jax.Array) -> jax.Array:
            # Gaussian: the norms of the other laws are taken for all points at once.
            wave = lambda x, b: jnp.sin(b @ x)  # noqa: E731
            return run(wave, x, batch, m=m, law="gaussian")

        lowered = jax.jit(call).lower(
            jax.ShapeDtypeStruct((d,), jnp.float32),
            jax.ShapeDtypeStruct((records, d), jnp.float32),
        )
        analysis: Any = lowered.compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporary(40) - temporary(4) < 4 * records * d


# --- what is refused ---


def test_bad_arguments() -> None:
    x, records = jnp.ones(2), jnp.ones((3, 2))
    wrongs = (lambda x, b: (b @ x).sum(), lambda x, b: b * x[None])
    lazy: Any = perturb.LazyLoss(lambda x, batch, at: batch @ at("", x))
    for previous in (None, x):
        with pytest.raises(TypeError, match=r"value_fn.*first-order.*LazyLoss"):
            run(lazy, x, records, previous=previous)
        for wrong in wrongs:
            call = functools.partial(run, wrong, x, records, previous=previous)
            with pytest.raises(ValueError, match=r"value_fn.*shape \(1,\).*per_record"):
                jax.eval_shape(call)
    with pytest.raises(ValueError, match=r"kind must be one of common.*'antithetic'"):
        run(LOSSES["linear"], x, records, previous=x, kind="antithetic")
