"""Directions: bits against ``jax.random`` and NumPy, laws against closed forms."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp.kernels import perturb, sphere, threefry

KEY = jax.random.key(7)
LIKE = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(37), "layers": {"w": jnp.zeros((3, 9))}}
PATHS = {"a": (2, 3), "b": (37,), "layers/w": (3, 9)}
DIM = 6 + 37 + 27
# Rows that are no multiple of 32, fewer than 32, and one axis that is left for columns.
SIGNS = {"a": (45, 7), "b": (5, 7, 3), "c": (), "d": (64, 2), "layers": (2, 33, 3)}
# Statistical tests compare with 6 standard errors: 2e-9 each, under 1e-6 together.
SIGMAS = 6


def stacked(path: str) -> bool:
    return path.startswith("layers")


@functools.cache
def drawer(law: str) -> Any:
    """Compiled: key -> three directions over LIKE, as a tree of ``(3, *shape)``."""

    def draw(key: jax.Array) -> Any:
        rows = sphere.directions(key, LIKE, law=law, num=3, stacked=stacked)
        return jax.vmap(lambda one: sphere.materialise(one, LIKE))(rows)

    return jax.jit(draw)


@functools.cache
def rows_of(law: str, step: int = 0) -> dict[str, np.ndarray]:
    """Path -> ``(3, *shape)``."""
    key = KEY if step == 0 else jax.random.fold_in(KEY, step)
    leaves = jax.tree_util.tree_leaves_with_path(drawer(law)(key))
    return {sphere.path_str(p): np.asarray(x) for p, x in leaves}


def flat_rows(rows: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([x.reshape(len(x), -1) for x in rows.values()], axis=1)


@functools.cache
def sample(law: str, dim: int, num: int, count: int) -> np.ndarray:
    """``count`` independent draws of ``num`` rows: float64 (count, num, dim)."""
    draw = jax.jit(jax.vmap(lambda key: sphere.flat(key, dim, law=law, num=num)))
    keys = jax.random.split(jax.random.fold_in(KEY, 1), count)
    return np.asarray(draw(keys), np.float64)


# --- the bits, against a plain reference ---


def leaf_key(k: int, path: str, layer: int | None = None) -> jax.Array:
    digest = hashlib.sha256(path.encode()).digest()
    identity = np.uint32(int.from_bytes(digest[:4], "little"))
    key = jax.random.fold_in(jax.random.fold_in(KEY, k), identity)
    return key if layer is None else jax.random.fold_in(key, layer)


def reference_signs(words: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Row r is minus where bit 31 - r % 32 of row r // 32 of the words is set.

    Rows run over as many leading axes as give 32 of them.
    """
    axes = 0
    while axes < len(shape) and math.prod(shape[:axes]) < 32:
        axes += 1
    rows, width = math.prod(shape[:axes]), math.prod(shape[axes:])
    words = words.reshape(-1, width)
    out = np.empty((rows, width), np.float32)
    for r, c in np.ndindex(out.shape):
        out[r, c] = -1 if (int(words[r // 32, c]) >> (31 - r % 32)) & 1 else 1
    return out.reshape(shape)


def reference_words(shape: tuple[int, ...]) -> int:
    axes = 0
    while axes < len(shape) and math.prod(shape[:axes]) < 32:
        axes += 1
    return -(-math.prod(shape[:axes]) // 32) * math.prod(shape[axes:])


def reference(law: str, k: int) -> dict[str, np.ndarray]:
    """Gaussian or Rademacher direction k, leaf by leaf and layer by layer.

    ``threefry`` gives the bits of ``jax.random``: test_threefry.py compares them.
    """

    def draw(key: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
        if law == "gaussian":
            return np.asarray(threefry.normal(key, shape))
        words = np.asarray(threefry.bits(key, (reference_words(shape),)))
        return reference_signs(words, shape)

    return {
        path: np.stack([draw(leaf_key(k, path, i), s[1:]) for i in range(s[0])])
        if stacked(path)
        else draw(leaf_key(k, path), s)
        for path, s in PATHS.items()
    }


@pytest.mark.parametrize("law", ["gaussian", "rademacher"])
def test_bits_against_the_reference(law: str) -> None:
    rows = rows_of(law)
    for k in range(3):
        for path, expected in reference(law, k).items():
            np.testing.assert_array_equal(rows[path][k], expected, strict=True)


def test_signs_of_every_shape_against_the_reference() -> None:
    """The whole, a layer in a scan, and rows of a table."""
    like = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in SIGNS.items()}

    @jax.jit
    def draw(key: jax.Array) -> Any:
        rows = sphere.directions(key, like, law="rademacher", stacked=stacked)
        one = sphere.select(rows, 0)
        layer = functools.partial(sphere.leaf_direction, one, "layers", (33, 3))
        some = sphere.leaf_direction(one, "a", (45, 7), rows=jnp.array([44, 2, 33]))
        return sphere.materialise(one, like), jax.lax.map(layer, jnp.arange(2)), some

    whole, layers, some = draw(KEY)
    for name, shape in SIGNS.items():
        layered = stacked(name)
        parts = [
            reference_signs(
                np.asarray(threefry.bits(leaf_key(0, name, i), (reference_words(s),))),
                s,
            )
            for i, s in (
                [(0, shape[1:]), (1, shape[1:])] if layered else [(None, shape)]
            )
        ]
        expected = np.stack(parts) if layered else parts[0]
        np.testing.assert_array_equal(whole[name], expected, strict=True)
    np.testing.assert_array_equal(layers, whole["layers"])
    np.testing.assert_array_equal(some, np.asarray(whole["a"])[[44, 2, 33]])


def test_identity_of_a_leaf_is_the_same_on_every_machine() -> None:
    assert sphere.leaf_id("dense/kernel") == 0x2127F969
    paths = [sphere.path_str(p) for p, _ in jax.tree_util.tree_leaves_with_path(LIKE)]
    assert paths == ["a", "b", "layers/w"]


@pytest.mark.parametrize("law", ["sphere", "ball"])
def test_sphere_and_ball_are_rescaled_gaussians(law: str) -> None:
    """One norm over the whole tree, not one for each leaf."""
    rows, normals = flat_rows(rows_of(law)), flat_rows(rows_of("gaussian"))
    normals = normals.astype(np.float64)
    unit = normals / np.linalg.norm(normals, axis=1, keepdims=True)
    radius = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(rows, radius * unit, rtol=2e-6)
    if law == "sphere":
        np.testing.assert_allclose(radius, math.sqrt(DIM), rtol=1e-6)
    else:
        assert np.all(radius <= math.sqrt(DIM) * (1 + 1e-6))


def test_orthonormal_rows_are_gram_schmidt_of_the_gaussian_ones() -> None:
    """QR with positive diagonal: the factor of which Haar measure is the law."""
    normals = flat_rows(rows_of("gaussian")).astype(np.float64)
    rows = []
    for z in normals:
        for q in rows:
            z = z - (z @ q) * q
        rows.append(z / np.linalg.norm(z))
    expected = math.sqrt(DIM) * np.array(rows)
    np.testing.assert_allclose(flat_rows(rows_of("orthonormal")), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("dim", "num"),
    [
        (6, 6),
        (1000, 64),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(64, 64, marks=pytest.mark.slow),
    ],
)
def test_orthonormal_rows_are_orthogonal(dim: int, num: int) -> None:
    rows = sample("orthonormal", dim, num, 1)[0]
    np.testing.assert_allclose(rows @ rows.T / dim, np.eye(num), atol=5e-6)


@pytest.mark.parametrize(("num", "dim"), [(1, 1), (2, 2), (6, 6), (5, 19), (64, 64)])
def test_orthonormalised_rows_are_gram_schmidt_in_float64(num: int, dim: int) -> None:
    """Of 2000 matrices, with what float32 loses where rows are near dependent.

    Without the shifts one in a hundred square ones of 64 rows is lost.
    """
    count = 2000 if num < 64 else 200
    z = jax.random.normal(KEY, (count, num, dim))
    got = np.asarray(jax.jit(jax.vmap(sphere.orthonormalised))(z), np.float64)
    exact = np.swapaxes(np.asarray(z, np.float64), 1, 2)
    q, r = np.linalg.qr(exact)
    q = q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]
    assert abs(got @ np.swapaxes(got, 1, 2) - np.eye(num)).max() < 2e-6
    error = abs(got - np.swapaxes(q, 1, 2)).max(axis=(1, 2))
    assert np.all(error < 1e-6 * np.linalg.cond(exact))


def test_dependent_rows_come_out_orthogonal() -> None:
    """Equal but for 1e-6 of a row."""
    rows = jax.random.normal(KEY, (3, 5))
    rows = rows.at[2].set(rows[0] + 1e-6 * rows[1])
    q = np.asarray(sphere.orthonormalised(rows), np.float64)
    np.testing.assert_allclose(q @ q.T, np.eye(3), atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize(("num", "dim"), [(3, 5), (4, 1000)])
def test_orthonormal_rows_call_no_library(num: int, dim: int, platform: str) -> None:
    """A QR of the tall matrix is K long chains on an accelerator."""
    draw = jax.jit(lambda key: sphere.flat(key, dim, law="orthonormal", num=num))
    text = draw.trace(KEY).lower(lowering_platforms=(platform,)).as_text()
    assert "custom_call" not in text


def test_squared_norms() -> None:
    assert np.all(np.square(flat_rows(rows_of("rademacher"))) == 1)
    for law in ("sphere", "orthonormal"):
        squares = np.square(flat_rows(rows_of(law)).astype(np.float64))
        np.testing.assert_allclose(squares.sum(axis=1), DIM, rtol=2e-6)


@pytest.mark.parametrize("layered", [False, True])
def test_norm_of_a_long_vector(layered: bool) -> None:
    """A float32 sum of 2e6 squares, element after element, would be off by 1e-3."""
    like = {"w": jax.ShapeDtypeStruct((4, 500_000), jnp.float32)}

    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        rows = sphere.directions(key, like, law="sphere", stacked=lambda _: layered)
        return sphere.materialise(sphere.select(rows, 0), like)["w"]

    square = np.sum(np.square(np.asarray(draw(KEY), np.float64)))
    assert square == pytest.approx(2_000_000, rel=1e-6)


# --- the same bits everywhere ---


@pytest.mark.parametrize(
    "law",
    [
        *("sphere", "rademacher", "orthonormal"),
        # A sphere before it is rescaled, and another radius of it.
        *(pytest.param(law, marks=pytest.mark.slow) for law in ("gaussian", "ball")),
    ],
)
def test_same_bits_in_every_program(law: str) -> None:
    """Another number of rows; by leaf, by layer in a scan, next to other arithmetic."""
    # Rows of a frame are not bit for bit those of a smaller one.
    num = 3 if law == "orthonormal" else 2

    @jax.jit
    def other(key: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        rows = sphere.directions(key, LIKE, law=law, num=num, stacked=stacked)
        one = sphere.select(rows, 1)

        def body(total: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            u = sphere.leaf_direction(one, "layers/w", (9,), i)
            return total + u @ x[:9], u

        total, w = jax.lax.scan(body, x[0], jnp.arange(3))
        b = sphere.leaf_direction(one, "b", (37,))
        a = sphere.leaf_direction(one, "a", (2, 3))
        static = sphere.leaf_direction(one, "layers/w", (9,), 2)
        used = (x + 0.3 * b).sum() + total + (a * 2).sum()
        return {"a": a, "b": b, "layers/w": w, "static": static, "used": used}

    got = other(KEY, jnp.linspace(0, 1, 37))
    for path in PATHS:
        np.testing.assert_array_equal(got[path], rows_of(law)[path][1], strict=True)
    np.testing.assert_array_equal(got["static"], got["layers/w"][2])


@pytest.mark.parametrize("law", ["gaussian", "sphere", "ball"])
def test_kept_directions_are_the_same_to_the_bit(law: str) -> None:
    """The whole tree, and rows of a table."""
    like = {"a": jnp.zeros((45, 7)), "b": jnp.zeros(37)}

    @jax.jit
    def both(key: jax.Array) -> list[Any]:
        rows = sphere.directions(key, like, law=law, num=3)
        some = functools.partial(
            sphere.leaf_direction, path="a", shape=(45, 7), rows=jnp.array([44, 2])
        )
        return [
            jax.vmap(lambda one: (sphere.materialise(one, like), some(one)))(each)
            for each in (rows, sphere.kept(rows))
        ]

    drawn, kept = both(KEY)
    jax.tree.map(np.testing.assert_array_equal, drawn, kept)


def test_what_is_kept() -> None:
    """Small directions, unless their layers are stacked; signs are as they are."""

    def stored(law: str, dim: int, num: int, layered: bool = False) -> set[str]:
        def kept(key: jax.Array) -> sphere.Direction:
            like = {"w": jax.ShapeDtypeStruct((1, dim), jnp.float32)}
            stacked = lambda _: layered  # noqa: E731
            draw = functools.partial(sphere.directions, law=law, num=num)
            return sphere.kept(draw(key, like, stacked=stacked))

        return set(jax.eval_shape(kept, KEY).stored)

    assert stored("gaussian", 2**20, 4) == stored("sphere", 2**22, 1) == {"w"}
    assert stored("gaussian", 2**20, 5) == stored("gaussian", 9, 2, True) == set()
    assert stored("rademacher", 9, 2) == {"words"}


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_directions_wait_at_a_barrier_on_a_cpu_alone(platform: str) -> None:
    """Other compilers would store them whole, in float32."""
    like = {name: x for name, x in LIKE.items() if name != "layers"}

    def moved(key: jax.Array, params: Any) -> Any:
        rows = sphere.directions(key, params, law="sphere", num=2)
        return jax.vmap(lambda one: perturb.perturb(params, one, jnp.float32(1)))(rows)

    text = jax.jit(moved).trace(KEY, like).lower(lowering_platforms=(platform,))
    barriers = text.as_text().count("optimization_barrier")
    assert barriers == (2 if platform == "cpu" else 0)


@pytest.mark.parametrize("law", ["sphere", "gaussian", "rademacher"])
def test_what_a_gpu_runs_gives_the_same_bits(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_gpu(*args: Any, default: Any, cuda: Any = None, **_: Any) -> Any:
        return (cuda or default)(*args)

    expected = rows_of(law)
    monkeypatch.setattr(jax.lax, "platform_dependent", on_a_gpu)
    leaves = jax.tree_util.tree_leaves_with_path(drawer.__wrapped__(law)(KEY))
    for path, x in leaves:
        np.testing.assert_array_equal(x, expected[sphere.path_str(path)], strict=True)


def test_signs_are_stored_once_on_a_gpu() -> None:
    """Of all layers of a leaf no slice is taken: its compiler would store it."""
    like = {"a": jnp.zeros((40, 9)), "layers": jnp.zeros((3, 64, 5))}
    one = sphere.select(
        sphere.directions(KEY, like, law="rademacher", stacked=stacked), 0
    )

    def part(one: sphere.Direction) -> jax.Array:
        return sphere.leaf_direction(one, "layers", (3, 64, 5))

    def slices(platform: str) -> int:
        text = jax.jit(part).trace(one).lower(lowering_platforms=(platform,)).as_text()
        return len(re.findall(r"slice .* -> tensor<[0-9x]{2,}xui32>", text))

    assert slices("cuda") == 0 < slices("cpu")


def test_a_choice_by_platform_leaves_no_condition() -> None:
    program = jax.jit(lambda key: sphere.flat(key, 100, law="gaussian", num=2))
    assert "conditional(" not in program.lower(KEY).compile().as_text()


@pytest.mark.parametrize("law", ["gaussian", "rademacher", "sphere"])
def test_one_loop_draws_all_leaves(law: str) -> None:
    """Compiled once, whatever the number of leaves; one more folds in their paths."""

    def loops(num: int) -> int:
        like = {f"w{i}": jnp.zeros((40, 300 + i)) for i in range(num)}
        draw = jax.jit(lambda key: sphere.directions(key, like, law=law))
        return draw.lower(KEY).as_text().count("stablehlo.while")

    assert loops(2) == loops(9) == (1 if law == "gaussian" else 2)


@pytest.mark.parametrize("law", sphere.LAWS)
def test_directions_steps_and_layers_differ(law: str) -> None:
    rows, later = rows_of(law), rows_of(law, step=1)
    pairs = [
        (rows["b"][0], rows["b"][1]),
        (rows["layers/w"][0, 0], rows["layers/w"][0, 1]),
        (rows["b"][0], later["b"][0]),
        (rows["b"][0], later["b"][1]),
    ]
    for u, v in pairs:
        if law == "rademacher":  # some signs agree, some do not
            assert 0 < np.sum(u == v) < u.size
        else:
            assert not np.any(u == v)


@pytest.mark.parametrize("law", ["gaussian", "rademacher"])
def test_leaves_of_equal_shape_share_no_bits(law: str) -> None:
    like = {"u": jnp.zeros(4096), "v": jnp.zeros(4096)}
    one = sphere.select(sphere.directions(KEY, like, law=law), 0)
    u, v = sphere.materialise(one, like).values()
    if law == "gaussian":
        assert np.sum(np.asarray(u) == np.asarray(v)) <= 1
    else:  # agreement is binomial(4096, 1/2)
        assert abs(float(jnp.vdot(u, v))) < SIGMAS * math.sqrt(4096)


@pytest.mark.parametrize("law", ["gaussian", "rademacher"])
def test_other_leaves_change_nothing(law: str) -> None:
    """A leaf's bits do not depend on which other leaves exist, nor on the order."""

    def draw(key: jax.Array, names: str) -> dict[str, jax.Array]:
        like = collections.OrderedDict((n, jnp.zeros(21)) for n in names)
        return sphere.materialise(
            sphere.select(sphere.directions(key, like, law=law), 0), like
        )

    cases = ("pqr", "rqp", "q", "qsro")
    whole, *parts = jax.jit(lambda key: [draw(key, names) for names in cases])(KEY)
    for part in parts:
        for name in part.keys() & whole.keys():
            np.testing.assert_array_equal(part[name], whole[name])


def test_frozen_leaves() -> None:
    """They are zero, have no identity, do not count in d, and change no other leaf."""
    like = {"x": jnp.zeros(5), "frozen": jnp.zeros(8, jnp.int32)}
    rows = sphere.directions(KEY, like, law="sphere", trainable=lambda p: p == "x")
    alone = sphere.directions(KEY, {"x": jnp.zeros(5)}, law="sphere")
    assert rows.dim == 5
    assert list(rows.paths) == ["x"]
    tree = sphere.materialise(sphere.select(rows, 0), like)
    np.testing.assert_array_equal(tree["frozen"], np.zeros(8))
    expected = sphere.materialise(sphere.select(alone, 0), {"x": like["x"]})["x"]
    np.testing.assert_array_equal(tree["x"], expected)


# --- the laws ---

LAWS_OF_ONE = ("sphere", "gaussian", "rademacher", "orthonormal")
COUNT = 40_000
A = np.array([1.0, 2.0, 0.0, -1.0, 0.5, 1.0])


def fourth_moment(law: str, a: np.ndarray) -> np.ndarray:
    """E[(u.a)^2 u u^T]."""
    d = len(a)
    isotropic = 2 * np.outer(a, a) + a @ a * np.eye(d)
    if law == "gaussian":
        return isotropic
    if law == "rademacher":
        return isotropic - 2 * np.diag(a**2)
    return d / (d + 2) * isotropic


def check_mean(draws: np.ndarray, expected: np.ndarray | float) -> None:
    """Mean over the first axis, within SIGMAS standard errors."""
    error = draws.std(axis=0) / math.sqrt(len(draws))
    assert np.all(abs(draws.mean(axis=0) - expected) <= SIGMAS * error + 1e-5)


@pytest.mark.parametrize("law", sphere.LAWS)
def test_first_and_second_moments(law: str) -> None:
    """E u = 0 (fails for an orthonormal row whose sign QR chose) and E uu^T = I."""
    u = sample(law, 6, 3, COUNT)
    check_mean(u, 0)
    second = np.eye(6) * (6 / 8 if law == "ball" else 1)
    for k in range(3):
        check_mean(np.einsum("ni,nj->nij", u[:, k], u[:, k]), second)
    # Rows are uncorrelated (independent rows, and Haar frames too).
    check_mean(np.einsum("ni,nj->nij", u[:, 0], u[:, 1]), 0)


@pytest.mark.parametrize("law", LAWS_OF_ONE)
def test_fourth_moments(law: str) -> None:
    u = sample(law, 6, 3, COUNT)[:, 1]
    products = np.einsum("n,ni,nj->nij", np.square(u @ A), u, u)
    check_mean(products, fourth_moment(law, A))


@pytest.mark.parametrize("law", LAWS_OF_ONE)
@pytest.mark.parametrize("num", [1, 3])
def test_variance_of_the_gradient_estimate(law: str, num: int) -> None:
    """(d - 1)|a|^2, Gaussian (d + 1)|a|^2; over K; orthogonal rows (d / K - 1)|a|^2."""
    u = sample(law, 6, 3, COUNT)[:, :num]
    estimate = np.einsum("nk,nki->ni", u @ A, u) / num
    per_direction = 7 if law == "gaussian" else 5
    variance = 6 / num - 1 if law == "orthonormal" else per_direction / num
    check_mean(np.square(estimate - A).sum(axis=1), variance * (A @ A))


def test_d_orthogonal_directions_are_the_gradient() -> None:
    u = sample("orthonormal", 6, 6, 1)[0]
    np.testing.assert_allclose((u @ A) @ u / 6, A, atol=2e-6)


def test_tails_at_50_dimensions() -> None:
    """P(|u.a| >= c|a|): (u.a)^2 / d|a|^2 is beta(1/2, (d-1)/2).

    The digest's figures, 0.324, 0.0444 and 0.0019, are a simulation's: 1 % off.
    """
    u = sample("sphere", 50, 1, 60_000)[:, 0]
    a = np.linspace(-1, 2, 50)
    cosine = abs(u @ a) / np.linalg.norm(a)
    for c, quoted in ((1, 0.324), (2, 0.0444), (3, 0.0019)):
        exact = float(scipy.stats.beta.sf(c * c / 50, 0.5, 24.5))
        assert exact == pytest.approx(quoted, rel=0.01)
        error = math.sqrt(exact * (1 - exact) / len(u))
        assert abs(np.mean(cosine >= c) - exact) < SIGMAS * error


def test_radius_of_the_ball() -> None:
    """(|u|^2 / d)^(d / 2) is uniform: accepted, and the sphere's surface rejected."""
    u = sample("ball", 6, 3, COUNT)[:, 0]
    volume = (np.square(u).sum(axis=1) / 6) ** 3
    assert volume.max() <= 1 + 1e-5
    assert scipy.stats.kstest(volume, "uniform").pvalue > 1e-6
    wrong = scipy.stats.kstest(np.sqrt(volume), "uniform").pvalue
    assert wrong < 1e-6


def test_rademacher_fourth_moment_by_enumeration() -> None:
    """All 2^5 words of five signs give each sign vector once: exact moments."""
    like = jax.ShapeDtypeStruct((5,), jnp.float32)
    one = sphere.select(sphere.directions(KEY, like, law="rademacher"), 0)
    words = jnp.arange(32, dtype=jnp.uint32) << jnp.uint32(27)

    def with_word(word: jax.Array) -> jax.Array:
        stored = {"words": one.stored["words"].at[0].set(word)}
        return sphere.materialise(dataclasses.replace(one, stored=stored), like)

    u = np.asarray(jax.vmap(with_word)(words), np.float64)
    assert {tuple(row) for row in u} == set(itertools.product((-1.0, 1.0), repeat=5))
    a = np.array([1.0, -0.5, 0.25, 2.0, 0.75])
    got = np.einsum("n,ni,nj->ij", np.square(u @ a), u, u) / 32
    np.testing.assert_allclose(got, fourth_moment("rademacher", a), atol=1e-15, rtol=0)


# --- edges ---


@pytest.mark.parametrize("law", sphere.LAWS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_directions_are_float32_whatever_the_parameters(law: str, dtype: Any) -> None:
    like = {"x": jax.ShapeDtypeStruct((8,), dtype)}

    def draw() -> Any:
        rows = sphere.directions(KEY, like, law=law)
        return sphere.materialise(sphere.select(rows, 0), like)

    assert jax.eval_shape(draw)["x"] == jax.ShapeDtypeStruct((8,), jnp.float32)


@pytest.mark.parametrize(
    "law",
    [
        "orthonormal",
        *(
            pytest.param(law, marks=pytest.mark.slow)
            for law in ("sphere", "rademacher")
        ),
    ],
)
def test_leaves_of_size_zero(law: str) -> None:
    """They come through as they are and change nothing else."""
    shapes = {"e": (0, 3), "l": (3, 0), "m": (0,), "n": (0, 2), "x": (5,)}
    like = {k: jnp.zeros(s) for k, s in shapes.items()}

    @jax.jit
    def draw(key: jax.Array) -> list[Any]:
        def tree(like: Any, layers: tuple[str, ...]) -> Any:
            draw = functools.partial(sphere.directions, stacked=lambda p: p in layers)
            rows = draw(key, like, law=law, num=2)
            return sphere.materialise(sphere.select(rows, 1), like)

        return [tree(like, ("e", "l", "m")), tree({"x": like["x"]}, ())]

    tree, plain = draw(KEY)
    assert [tree[k].shape for k in "elm"] == [(0, 3), (3, 0), (0,)]
    np.testing.assert_array_equal(tree["x"], plain["x"])


def test_nothing_moves() -> None:
    like = {"x": jnp.zeros(5)}

    @jax.jit
    def draw(key: jax.Array) -> list[jax.Array]:
        frozen = functools.partial(sphere.directions, trainable=lambda _: False)
        laws = ("sphere", "ball", "gaussian", "rademacher")
        rows = [frozen(key, like, law=law) for law in laws]
        return [sphere.materialise(sphere.select(r, 0), like)["x"] for r in rows]

    for x in draw(KEY):
        np.testing.assert_array_equal(x, np.zeros(5))


def test_leaves_with_one_identity_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    same_path = {"a/b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}}
    with pytest.raises(ValueError, match=r"'a/b' and 'a/b'.*share random bits"):
        sphere.directions(KEY, same_path, law="gaussian")
    monkeypatch.setattr(sphere, "leaf_id", lambda path: 7)
    with pytest.raises(ValueError, match=r"'a' and 'b'.*share random bits"):
        sphere.directions(KEY, {"a": jnp.zeros(2), "b": jnp.zeros(2)}, law="gaussian")
    sphere.directions(  # a frozen leaf draws nothing
        KEY,
        {"a": jnp.zeros(2), "b": jnp.zeros(2)},
        law="gaussian",
        trainable=lambda p: p == "a",
    )


@pytest.mark.parametrize(
    ("law", "num", "message"),
    [
        ("cauchy", 1, "law must be one of sphere, gaussian.*got 'cauchy'"),
        ("gaussian", 0, "num must be at least 1, got 0"),
        ("orthonormal", 6, "num must be at most .* = 5 .*got 6"),
    ],
)
def test_bad_arguments(law: str, num: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sphere.directions(KEY, {"x": jnp.zeros(5)}, law=law, num=num)


def test_too_many_orthonormal_rows() -> None:
    with pytest.raises(ValueError, match=r"num must be at most .* = 64 .*got 65"):
        sphere.directions(KEY, jnp.zeros(100), law="orthonormal", num=65)


def test_a_layer_of_an_undeclared_leaf_is_refused() -> None:
    one = sphere.select(sphere.directions(KEY, {"x": jnp.zeros((2, 3))}, law="ball"), 0)
    with pytest.raises(ValueError, match=r"'x'.*stacked"):
        sphere.leaf_direction(one, "x", (3,), 0)


@pytest.mark.parametrize("law", ["rademacher", "gaussian", "sphere"])
def test_a_layer_that_is_not_there(law: str) -> None:
    """A number is refused; in a loop, no layer reads another leaf's signs."""
    params = {"x": jnp.zeros((3, 33, 2))}
    rows = sphere.directions(KEY, params, law=law, stacked=lambda p: True)
    one = sphere.select(rows, 0)
    for layer in (-1, 3):
        with pytest.raises(
            ValueError, match=f"layer must be one of the 3 .*got {layer}"
        ):
            sphere.leaf_direction(one, "x", (33, 2), layer)
    if law == "rademacher":
        at = jax.jit(lambda i: sphere.leaf_direction(one, "x", (33, 2), i))
        np.testing.assert_array_equal(at(7), at(2))


@pytest.mark.parametrize("law", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_part_is_of_its_leaf(law: str, keep: bool) -> None:
    """Another shape would get another direction; rows count from the end as well."""
    rows = sphere.directions(KEY, {"x": jnp.zeros((4, 3))}, law=law)
    one = sphere.select(sphere.kept(rows) if keep else rows, 0)
    for shape in ((3,), (3, 4), (12,)):
        with pytest.raises(ValueError, match=r"shape must be that of the leaf 'x'"):
            sphere.leaf_direction(one, "x", shape)
    whole = sphere.leaf_direction(one, "x", (4, 3))
    part = sphere.leaf_direction(one, "x", (4, 3), rows=jnp.array([-1, 0, -4]))
    np.testing.assert_array_equal(part, whole[jnp.array([3, 0, 0])])


@pytest.mark.parametrize("law", sphere.LAWS)
def test_the_cipher_is_compiled_once_for_all_layers(law: str) -> None:
    """Keys of layers are computed together: no chain of its own for each stacked leaf."""

    def ciphers(num_leaves: int) -> int:
        like = {f"layers{i}": jnp.zeros((3, 8, 2)) for i in range(num_leaves)}

        def draw(key: jax.Array) -> Any:
            rows = sphere.directions(key, like, law=law, stacked=stacked)
            one = sphere.select(rows, 0)
            whole = sphere.materialise(one, like)
            parts = [sphere.leaf_direction(one, p, (8, 2), jnp.int32(1)) for p in like]
            return whole, parts

        return jax.jit(draw).lower(KEY).as_text().count(str(0x1BD11BDA))

    assert ciphers(6) == ciphers(2) > 0
