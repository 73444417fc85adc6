"""What every kernel of prefix-sum noise promises: its linear map, its law, its memory."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.kernels import node_noise, prefix_noise, sphere, threefry

KEYS = jax.random.split(jax.random.key(5), 2)
SIZE = 40_000
PERIODS = (1, 2, 3, 4, 5, 8, 16, 37)
TREES = ("tree", "tree_regenerated", "tree_incremental")


def increments(
    kernel: prefix_noise.PrefixNoise, keys: jax.Array, like: Any
) -> list[Any]:
    """All of a period, stacked, for each key; the state is full of NaN at the begin."""

    @jax.jit
    def period(key: jax.Array) -> Any:
        def step(state: Any, t: jax.Array) -> tuple[Any, Any]:
            noise, state = kernel.increment(key, state, t, like)
            return state, noise

        state = jax.tree.map(lambda s: jnp.full_like(s, jnp.nan), kernel.init(like))
        return jax.lax.scan(step, state, jnp.arange(kernel.period, dtype=jnp.int32))[1]

    return [jax.tree.map(np.asarray, period(key)) for key in keys]


def linear_map(
    kernel: prefix_noise.PrefixNoise, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray:
    """What a kernel makes of the draws of its steps: the matrix, column by column."""
    unit = jnp.eye(kernel.period, dtype=jnp.float32)

    def draw(key: jax.Array, step: jax.Array, like: Any) -> Any:
        ours = jnp.all(jax.random.key_data(key) == jax.random.key_data(KEYS[0]))
        row = jnp.where(ours, unit[step], jnp.nan)
        return jax.tree.map(lambda _: row, like)

    with monkeypatch.context() as patch:
        patch.setattr(node_noise, "draw", draw)
        like = {"w": jnp.zeros(kernel.period)}
        return increments(kernel, KEYS[:1], like)[0]["w"].astype(np.float64)


@functools.cache
def drawn(name: str) -> np.ndarray:
    """The increments of two periods of 37 steps, (2, 37, SIZE)."""
    like = {"w": jax.ShapeDtypeStruct((SIZE,), jnp.bfloat16)}
    periods = increments(prefix_noise.make(name, 37), KEYS, like)
    return np.stack([noise["w"] for noise in periods])


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("name", prefix_noise.NAMES)
def test_the_linear_map_is_the_inverse_of_the_strategy(
    name: str, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = prefix_noise.make(name, period)
    increment, c = linear_map(kernel, monkeypatch), kernel.strategy()
    ones = np.tri(period)
    np.testing.assert_allclose(increment @ c, np.eye(period), atol=3e-6)
    np.testing.assert_allclose(ones @ increment @ c, ones, atol=1e-5)  # B C = A
    assert (np.triu(c, 1) == 0).all() and (np.diag(c) > 0).all()  # adaptive
    for norms, matrix, axis in (
        (kernel.column_norms(), c, 0),
        (kernel.prefix_norms(), ones @ increment, 1),
        (kernel.increment_norms(), increment, 1),
    ):
        assert norms.shape == (period,) and norms.dtype == np.float64
        np.testing.assert_allclose(norms, np.linalg.norm(matrix, axis=axis), rtol=1e-5)
    # Nothing is ever let out without noise of its own, at the last step least of all.
    assert (np.diag(increment) > 0.5).all()


@pytest.mark.parametrize("name", prefix_noise.NAMES)
def test_the_noise_is_the_map_of_the_draws_of_its_period(name: str) -> None:
    """Of ``node_noise.draw`` under the same key and no other; float32, at every step."""
    like = {"w": jnp.zeros(50)}
    draw = jax.jit(lambda key, t: node_noise.draw(key, t, like)["w"])
    inverse = np.linalg.inv(prefix_noise.make(name, 37).strategy())
    assert drawn(name).dtype == np.float32
    for key, noise in zip(KEYS, drawn(name)[:, :, :50], strict=True):
        xi = np.stack([draw(key, jnp.int32(t)) for t in range(37)])
        np.testing.assert_allclose(noise, inverse @ xi, atol=2e-5)
        assert (noise != 0).all() and (noise.sum(axis=0) != 0).all()


@pytest.mark.parametrize("period", PERIODS)
def test_the_three_trees_are_one(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same integers on the same draws."""
    stored, *others = (
        linear_map(prefix_noise.make(name, period), monkeypatch) for name in TREES
    )
    for other in others:
        np.testing.assert_array_equal(other, stored)


def test_the_three_trees_draw_the_same() -> None:
    """Up to the order of a few additions."""
    for name in TREES[1:]:
        np.testing.assert_allclose(drawn(name), drawn(TREES[0]), atol=4e-6)


@pytest.mark.parametrize("name", prefix_noise.NAMES)
def test_covariances(name: str) -> None:
    """Coordinates are samples of 37 prefix sums, and of another period's, which are new.

    Each entry is within 6.5 of its standard errors: 74 * 75 / 2 entries, 8e-11 each.
    """
    sums = np.cumsum(drawn(name).astype(np.float64), axis=1).reshape(74, SIZE)
    b = np.tri(37) @ np.linalg.inv(prefix_noise.make(name, 37).strategy())
    law = np.kron(np.eye(2), b @ b.T)
    error = np.sqrt((np.outer(np.diag(law), np.diag(law)) + law**2) / SIZE)
    assert np.max(np.abs(sums @ sums.T / SIZE - law) / error) < 6.5
    assert np.max(np.abs(sums.mean(axis=1)) / np.sqrt(np.diag(law) / SIZE)) < 6.5
    # The elements of one draw are not correlated either.
    lag = np.mean(sums[:, 1:] * sums[:, :-1], axis=1) / np.diag(law)
    assert np.max(np.abs(lag)) < 6.5 / np.sqrt(SIZE)


def test_variances_by_hand() -> None:
    """Those of the digest: three of the tree, two of Honaker's estimate."""

    def law(name: str) -> np.ndarray:
        b = np.tri(16) @ np.linalg.inv(prefix_noise.make(name, 16).strategy())
        return np.pad(b @ b.T, (1, 0))  # counted from 1

    tree, honaker = law("tree"), law("honaker")
    assert tree[15, 15] == pytest.approx(4)
    assert tree[16, 16] == pytest.approx(1)
    assert tree[12, 14] == pytest.approx(2)
    assert tree[7, 8] == pytest.approx(0)
    assert honaker[8, 8] == pytest.approx(8 / 15)
    assert honaker[7, 7] == pytest.approx(1 + 2 / 3 + 4 / 7)


# Mean and maximum over steps of ||B_t||^2 max_i ||C e_i||^2. Honaker's is printed for the
# columns of a tree of all nodes, floor(log2 T) + 1.
TABLE = {
    "tree": ((10.31, 20.00), (36.04, 72.00), (78.00, 156.0)),
    "honaker": ((7.09, 13.86), (21.62, 43.21), (44.22, 88.44)),
    "sqrt_toeplitz": ((3.229, 3.779), (7.122, 8.015), (12.61, 13.79)),
    "blt_1": ((3.24, 3.85), (8.03, 9.59), (19.56, 23.37)),
    "blt_2": ((3.229, 3.779), (7.168, 8.111), (13.26, 14.83)),
    "blt_3": ((3.229, 3.779), (7.125, 8.019), (12.70, 13.93)),
    "independent": ((8.50, 16.0), (128.5, 256.0), (2048, 4096.0)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_variances_at_equal_sensitivity(name: str) -> None:
    for period, printed in zip((16, 256, 4096), TABLE[name], strict=True):
        kernel = prefix_noise.make(name, period)
        columns = np.max(kernel.column_norms() ** 2)
        if name == "honaker":
            assert columns < period.bit_length()
            columns = period.bit_length()
        variances = kernel.prefix_norms() ** 2 * columns
        # Half a unit of the last digit, which is the second to the fourth after the point.
        np.testing.assert_allclose(
            (variances.mean(), variances.max()), printed, rtol=5.1e-4, atol=5.1e-3
        )


def test_sensitivity_of_unequal_steps() -> None:
    kernel = prefix_noise.make("tree", 8)  # counts 4, 3, 3, 2, 3, 2, 2, 1
    leaf = np.array([0.5, 1, 1, 1, 1, 1, 1, 1.7])
    assert prefix_noise.sensitivity(kernel, leaf) == pytest.approx(3**0.5)
    leaf[7] = 2.0
    assert prefix_noise.sensitivity(kernel, leaf) == pytest.approx(2)
    leaf[0] = 1.5
    assert prefix_noise.sensitivity(kernel, leaf) == pytest.approx(3)
    assert prefix_noise.sensitivity(kernel, np.zeros(8)) == 0
    for bad in (np.ones(7), np.ones((8, 1)), 1.0):
        with pytest.raises(ValueError, match="leaf_sensitivities must have shape"):
            prefix_noise.sensitivity(kernel, np.asarray(bad))
    for bad in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="finite and at least 0"):
            prefix_noise.sensitivity(kernel, np.full(8, float(bad)))


def test_draws_are_those_of_the_documented_keys() -> None:
    """Of the step and the leaf's path alone: other leaves and their order do not matter."""
    shapes = {"v": (2, 3), "a": (4,), "w": (2, 3)}

    def draws(*paths: str) -> Any:
        like = {path: jnp.zeros(shapes[path], jnp.int32) for path in paths}
        return jax.jit(lambda t: node_noise.draw(KEYS[0], t, like))(jnp.int32(3))

    together = draws("v", "a", "w")
    for path, noise in together.items():
        step_key = jax.random.fold_in(KEYS[0], 3)
        leaf_key = jax.random.fold_in(step_key, np.uint32(sphere.leaf_id(path)))
        expected = threefry.secret_normal(leaf_key, shapes[path])
        np.testing.assert_allclose(noise, expected, rtol=1e-5)
    np.testing.assert_array_equal(draws("w")["w"], together["w"])
    assert not np.any(together["v"] == together["w"])
    assert draws() == {}


@pytest.mark.parametrize("name", prefix_noise.NAMES)
def test_several_runs_at_once_and_one_step_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vmap over keys, over keys and steps, and eager steps: the same noise as in a scan."""

    def draw(key: jax.Array, step: jax.Array, like: jax.Array) -> jax.Array:
        words = jax.random.key_data(threefry.fold_in(key, step)).astype(jnp.float32)
        return words[:1] * jnp.float32(2**-32)  # Cheap to compile.

    monkeypatch.setattr(node_noise, "draw", draw)
    kernel, like = prefix_noise.make(name, 6), jnp.zeros(1)
    expected = np.stack(increments(kernel, KEYS, like))

    def step(key: jax.Array, state: Any, t: jax.Array) -> Any:
        return kernel.increment(key, state, t, like)

    state = other = jax.vmap(lambda _: kernel.init(like))(jnp.arange(2))
    together = jax.jit(jax.vmap(step, in_axes=(0, 0, None)))
    apart = jax.jit(jax.vmap(step))
    eager = kernel.init(like)
    for t in range(6):
        noise, state = together(KEYS, state, jnp.int32(t))
        np.testing.assert_allclose(noise, expected[:, t], atol=2e-6)
        noise, other = apart(KEYS, other, jnp.full(2, t, jnp.int32))
        np.testing.assert_allclose(noise, expected[:, t], atol=2e-6)
        noise, eager = kernel.increment(KEYS[1], eager, t, like)
        np.testing.assert_allclose(noise, expected[1, t], atol=2e-6)


STATE_ROWS = {
    "tree": 7,
    "honaker": 7,
    "sqrt_toeplitz": 63,
    "blt_1": 1,
    "blt_2": 2,
    "blt_3": 3,
}


@pytest.mark.parametrize("name", prefix_noise.NAMES)
def test_the_state_is_updated_in_place(name: str) -> None:
    """Two periods of 64 steps in nested loops need few vectors beside their state."""
    size, kernel = 2**16, prefix_noise.make(name, 64)
    like = jax.ShapeDtypeStruct((size,), jnp.float32)

    def run(x: jax.Array, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        def period(p: jax.Array, carry: Any) -> Any:
            def step(t: jax.Array, carry: Any) -> Any:
                x, state = carry
                noise, state = kernel.increment(period_key, state, t, like)
                return x + noise, state

            period_key = threefry.fold_in(key, p)
            return jax.lax.fori_loop(0, 64, step, carry)

        return jax.lax.fori_loop(0, 2, period, (x, state))

    state = kernel.init(like)
    rows = sum(leaf.size for leaf in jax.tree.leaves(state)) / size
    assert rows == STATE_ROWS.get(name, 0)
    lowered = jax.jit(run, donate_argnums=(0, 1)).lower(jnp.zeros(size), state, KEYS[0])
    memory: Any = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * size * (1 + rows)
    vectors = {"honaker": 2, "tree_regenerated": 3}.get(name, 1)
    assert memory.temp_size_in_bytes < 4 * size * (vectors + 0.1)


def test_names_and_periods() -> None:
    for name, period in itertools.product(prefix_noise.NAMES, (1, 7)):
        kernel = prefix_noise.make(name, period)
        assert kernel.period == period
        assert kernel == prefix_noise.make(name, period)
        assert hash(kernel) == hash(prefix_noise.make(name, period))
    with pytest.raises(ValueError, match=r"name must be one of tree, .*got 'oak'"):
        prefix_noise.make("oak", 3)
    for name in prefix_noise.NAMES:
        for period in (0, -1, 2**30 + 1):
            with pytest.raises(ValueError, match="period must be from 1"):
                prefix_noise.make(name, period)
        for period in (2.0, True, "3"):
            with pytest.raises(TypeError, match="period must be an integer"):
                prefix_noise.make(name, period)  # pyright: ignore[reportArgumentType]


def test_a_step_is_one_integer() -> None:
    kernel = prefix_noise.make("independent", 3)
    for step in (jnp.float32(1), jnp.arange(2)):
        with pytest.raises(ValueError, match="step must be one integer"):
            kernel.increment(KEYS[0], (), step, jnp.zeros(2))
