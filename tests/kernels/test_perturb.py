"""Perturbed parameters: both forms of a loss see the same bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.kernels import perturb, sphere

KEY = jax.random.key(11)
WIDTH, LAYERS, ROWS = 9, 2, 5
PARAMS = {
    "layers": {
        "w": 0.5 * jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)),
    },
    "out": jnp.linspace(-1, 1, WIDTH),
}
BATCH = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))


def stacked(path: str) -> bool:
    return path.startswith("layers/")


def network(params: Any, batch: Any, at: perturb.At) -> jax.Array:
    """Losses (B,) of a scan over stacked layers that perturbs inside its body."""

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        i, leaves = layer
        return jnp.tanh(x @ at("layers/w", leaves["w"], i, after=x)), None

    x, _ = jax.lax.scan(body, batch, (jnp.arange(LAYERS), params["layers"]))
    return x @ at("out", params["out"], after=x)


LAZY = perturb.LazyLoss(network)


def plain(params: Any, batch: Any) -> jax.Array:
    return network(params, batch, perturb.identity)


UNPERTURBED = jax.jit(plain)


def direction(law: str, like: Any = PARAMS, **kwargs: Any) -> sphere.Direction:
    draw = functools.partial(sphere.directions, law=law, stacked=stacked, **kwargs)
    return jax.jit(lambda key: sphere.select(draw(key, like), 0))(KEY)


direction_of = functools.cache(direction)


def assert_same_bits(a: Any, b: Any) -> None:
    assert a.dtype == b.dtype
    bits = [np.ascontiguousarray(x).view(f"u{a.dtype.itemsize}") for x in (a, b)]
    np.testing.assert_array_equal(*bits, strict=True)


# --- the two forms of a loss ---


# The ball is a sphere with another scale.
@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="GPUs round fused products by the program"
)
@pytest.mark.parametrize(
    "law",
    [
        *("sphere", "rademacher"),  # A sphere is a Gaussian that is rescaled.
        pytest.param("gaussian", marks=pytest.mark.slow),
    ],
)
def test_lazy_is_bit_equal_to_materialised(law: str) -> None:
    """Losses of both signs, each form compiled in a program of its own."""

    u, scale = direction_of(law), jnp.float32(0.1)

    @jax.jit
    def lazily(u: sphere.Direction, params: Any, scale: jax.Array) -> list[jax.Array]:
        plus = perturb.losses_at(LAZY, params, BATCH, u, scale)
        return [plus, perturb.losses_at(LAZY, params, BATCH, u, -scale, plus)]

    @jax.jit
    def whole(u: sphere.Direction, params: Any, scale: jax.Array) -> list[jax.Array]:
        return [perturb.losses_at(plain, params, BATCH, u, s) for s in (scale, -scale)]

    one, other = lazily(u, PARAMS, scale), whole(u, PARAMS, scale)
    assert not np.array_equal(one[0], one[1])
    for a, b in zip(one, other, strict=True):
        assert_same_bits(a, b)
    # And with the tree formed in a program of its own.
    tree = jax.jit(perturb.perturb)(PARAMS, u, scale)
    assert_same_bits(UNPERTURBED(tree, BATCH), one[0])


def test_orthonormal_directions_raise_for_a_lazy_loss() -> None:
    """Their rows are stored, which is what a lazy loss is there to avoid."""
    with pytest.raises(ValueError, match=r"direction must be 'sphere'.*'orthonormal'"):
        perturb.losses_at(LAZY, PARAMS, BATCH, direction_of("orthonormal"), 0.1)


TABLE = {"t": jax.random.normal(jax.random.key(3), (40, 3, 5))}


@pytest.mark.parametrize("law", ["sphere", "gaussian", "rademacher"])
def test_rows_of_a_leaf_are_those_of_the_whole(law: str) -> None:
    """To the bit, rows that are asked for twice included, and frozen leaves as they are."""
    u, rows = direction_of.__wrapped__(law, TABLE), jnp.asarray([[0, 39], [7, 7]])
    take = lambda u, s: perturb.view(u, s)("t", TABLE["t"], rows=rows)  # noqa: E731
    got = jax.jit(take)(u, jnp.float32(0.1))
    whole = jax.jit(perturb.perturb)(TABLE, u, jnp.float32(0.1))
    assert_same_bits(got, whole["t"][rows])
    assert np.all(np.asarray(got) != np.asarray(TABLE["t"][rows]))
    frozen = direction_of.__wrapped__(law, TABLE, trainable=lambda path: False)
    assert_same_bits(take(frozen, jnp.float32(0.1)), TABLE["t"][rows])
    assert_same_bits(perturb.identity("t", TABLE["t"], rows=rows), TABLE["t"][rows])


def test_rows_of_a_stacked_leaf_are_refused() -> None:
    at = perturb.view(direction_of("gaussian"), jnp.float32(0.1))
    with pytest.raises(ValueError, match="rows was given for the leaf 'layers/w'"):
        at("layers/w", PARAMS["layers"]["w"], rows=jnp.asarray([0]))


def test_a_lazy_loss_called_as_a_loss_is_unperturbed() -> None:
    assert_same_bits(jax.jit(LAZY)(PARAMS, BATCH), UNPERTURBED(PARAMS, BATCH))


# --- the arithmetic, against NumPy ---


def test_signs_are_added_as_numpy_adds_them() -> None:
    """x + s * (+-1) is one rounding, so every bit is NumPy's."""
    got = jax.jit(perturb.perturb)(PARAMS, direction_of("rademacher"), jnp.float32(0.1))
    u = sphere.materialise(direction_of("rademacher"), PARAMS)
    for x, sign, y in zip(*map(jax.tree.leaves, (PARAMS, u, got)), strict=True):
        step = np.where(np.asarray(sign) > 0, np.float32(0.1), -np.float32(0.1))
        assert_same_bits(y, np.asarray(x) + step)


def test_perturb_against_numpy() -> None:
    u = direction_of("sphere")
    got = jax.jit(perturb.perturb)(PARAMS, u, jnp.float32(-0.3))
    u = sphere.materialise(u, PARAMS)
    for x, z, y in zip(*map(jax.tree.leaves, (PARAMS, u, got)), strict=True):
        exact = np.asarray(x, np.float64) - np.float32(0.3) * np.asarray(z, np.float64)
        np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("law", ["rademacher", "gaussian"])
def test_half_precision_is_perturbed_in_float32_then_cast(dtype: Any, law: str) -> None:
    """At 0.5 the gap of bfloat16 is 0.004: adding in it would lose most of 0.0016.

    And a Gaussian direction in bfloat16 would have 128 values.
    """
    x = {"x": jnp.linspace(0.4, 0.6, 1000).astype(dtype)}
    scale = np.float32(1.6e-3)
    u = direction(law, x)
    # Kernels promote 16-bit parameters; the strict mode refuses to say to what.
    with jax.numpy_dtype_promotion("standard"):
        got = jax.jit(perturb.perturb)(x, u, scale)["x"]
    z = np.asarray(sphere.materialise(u, x)["x"])
    assert z.dtype == np.float32
    wide = np.asarray(x["x"]).astype(np.float32) + scale * z
    assert_same_bits(got, wide.astype(np.dtype(dtype)))


def test_float64_is_perturbed_in_float64() -> None:
    with jax.enable_x64(True):
        x = {"x": jnp.linspace(1, 2, 50, dtype=jnp.float64)}
        u = direction("gaussian", x)
        scale = jnp.asarray(1e-9, jnp.float64)
        with jax.numpy_dtype_promotion("standard"):  # as above, 64-bit parameters
            got = np.asarray(perturb.perturb(x, u, scale)["x"])
        z = np.asarray(sphere.materialise(u, x)["x"])
        assert z.dtype == np.float32
        expected = np.asarray(x["x"]) + 1e-9 * z.astype(np.float64)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=3e-16)
    assert np.all(got != np.linspace(1, 2, 50))


def test_frozen_leaves_come_back_as_they_are() -> None:
    params = {"x": jnp.ones(3), "n": jnp.arange(4), "f": jnp.full(2, jnp.nan)}
    u = direction("sphere", params, trainable=lambda p: p == "x")
    got = perturb.perturb(params, u, jnp.float32(0.5))
    assert got["n"] is params["n"]
    assert got["f"] is params["f"]
    assert not np.array_equal(got["x"], params["x"])


# --- the order of the layers ---

AFTER = [
    jnp.zeros(3),
    jnp.full((2, 2), jnp.nan),
    jnp.float32(-jnp.inf),
    -jnp.ones((2, 3), jnp.bfloat16),
    jnp.full(4, -7, jnp.int32),
    jnp.full(4, 255, jnp.uint8),
    jnp.zeros((0, 3)),
]


@pytest.mark.parametrize("law", ["gaussian", "rademacher"])
def test_after_changes_no_bit(law: str) -> None:
    """Whatever it holds: one record's NaN must not reach what all records share."""

    @jax.jit
    def ordered(u: sphere.Direction, leaf: jax.Array, after: Any) -> list[jax.Array]:
        at = perturb.view(u, jnp.float32(0.1))
        return [at("layers/w", leaf, 1, after=a) for a in after]

    @jax.jit
    def free(u: sphere.Direction, leaf: jax.Array) -> jax.Array:
        return perturb.view(u, jnp.float32(0.1))("layers/w", leaf, 1)

    u, leaf = direction_of(law), PARAMS["layers"]["w"][1]
    for got in ordered(u, leaf, AFTER):
        assert_same_bits(got, free(u, leaf))


def test_after_of_64_bits_changes_no_bit() -> None:
    with jax.enable_x64(True):
        u, leaf = direction_of("gaussian"), PARAMS["out"]
        at = perturb.view(u, jnp.float32(0.1))
        expected = at("out", leaf)
        for value in (-1.5, float("nan"), 0.0):
            after = jnp.full(3, value, jnp.float64)
            assert_same_bits(at("out", leaf, after=after), expected)


def test_a_record_with_a_nan_stays_alone() -> None:
    """Record 0, whose activations order the layers, is NaN; the others keep theirs."""
    losses = jax.jit(
        lambda b: perturb.losses_at(
            LAZY, PARAMS, b, direction_of("gaussian"), jnp.float32(0.1)
        )
    )
    clean, dirty = losses(BATCH), losses(BATCH.at[0].set(jnp.nan))
    assert np.isnan(dirty[0])
    assert_same_bits(clean[1:], dirty[1:])


def test_after_keeps_the_tangent_of_the_scale() -> None:
    """Forward mode along the scale gives the direction, ordered or not."""
    u, leaf = direction_of("gaussian"), PARAMS["out"]

    def free(scale: jax.Array) -> jax.Array:
        return perturb.view(u, scale)("out", leaf)

    def ordered(scale: jax.Array) -> jax.Array:
        return perturb.view(u, scale)("out", leaf, after=leaf * scale)

    expected = sphere.leaf_direction(u, "out", (WIDTH,))
    for fn in (free, ordered):
        tangent = jax.jvp(fn, (jnp.float32(0),), (jnp.float32(1),))[1]
        np.testing.assert_array_equal(tangent, expected)


def test_order_saves_memory() -> None:
    """Unordered, XLA may form every perturbed layer of both signs at once."""
    width = 96
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    like = {f"w{i}": weight for i in range(5)}

    def temp(ordered: bool) -> int:
        def loss(params: Any, x: jax.Array, at: perturb.At) -> jax.Array:
            for name, w in params.items():
                x = jnp.tanh(x @ at(name, w, after=x if ordered else None))
            return x.sum(axis=1)

        def step(params: Any, x: jax.Array) -> jax.Array:
            u = sphere.select(sphere.directions(KEY, like, law="rademacher"), 0)
            at = [perturb.view(u, jnp.float32(s)) for s in (0.1, -0.1)]
            return loss(params, x, at[0]) - loss(params, x, at[1])

        x = jax.ShapeDtypeStruct((4, width), jnp.float32)
        stats = jax.jit(step).lower(like, x).compile().memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes

    assert temp(True) < 0.7 * temp(False)
