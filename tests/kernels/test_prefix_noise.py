"""What every kernel of prefix-sum noise promises: its linear map, its law, its memory."""

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.kernels import (
    fixed_point,
    lattice_gaussian,
    node_noise,
    prefix_noise,
    sphere,
    threefry,
    toeplitz_noise,
    tree_noise,
)

KEYS = jax.vmap(threefry.secret_key)(
    np.array([[5, 0, 2**32 - 1, 3], [6, 0, 2**32 - 1, 3]], np.uint32)
)
SIZE = 40_000
STD = 2**20
PERIODS = [
    *(1, 37),
    *(pytest.param(period, marks=pytest.mark.slow) for period in (2, 3, 4, 5, 8, 16)),
]
#: A buffered kernel with one buffer and with three is that with two, but for its tables;
#: both trees draw the same and make the same of it; bands are bands, whatever numbers.
LIKE_OTHERS = ("blt_1", "blt_3", "tree_incremental", "toeplitz, 4 bands")
BANDED, OWN = "sqrt_toeplitz, 5 bands", "toeplitz, 4 bands"
NAMES = (*prefix_noise.NAMES, BANDED, OWN)
ONE_OF_A_KIND = [
    pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name
    for name in NAMES
]
TREES = ("tree", "tree_incremental")


def make(name: str, period: int) -> prefix_noise.PrefixNoise:
    if name == BANDED:
        return toeplitz_noise.SquareRoot(period, bands=5)
    if name == OWN:
        return toeplitz_noise.Banded(period, (1.0, 0.9, 0.83, 0.1))
    return prefix_noise.make(name, period)


def increments(
    kernel: prefix_noise.PrefixNoise, keys: jax.Array, like: Any, std: int = STD
) -> list[Any]:
    """All of a period, stacked, for each key; the state is no zeros at the begin."""
    laws = kernel.laws(std)

    @jax.jit
    def period(key: jax.Array) -> Any:
        def step(state: Any, t: jax.Array) -> tuple[Any, Any]:
            noise, state = kernel.increment(key, state, t, like, laws)
            return state, noise

        state = jax.tree.map(lambda s: jnp.full_like(s, 123456789), kernel.init(like))
        return jax.lax.scan(step, state, jnp.arange(kernel.period, dtype=jnp.int32))[1]

    return [jax.tree.map(np.asarray, period(key)) for key in keys]


def as_float(x: fixed_point.Fixed) -> np.ndarray:
    """float64, exact to 53 bits."""
    low = 0 if x.low is None else np.asarray(x.low, np.float64) * 2.0**-32
    return np.asarray(x.high, np.float64) + low


def draw_stds(kernel: prefix_noise.PrefixNoise) -> np.ndarray:
    """Of the draws of every step, in stds of a node."""
    if not isinstance(kernel, tree_noise.Honaker):
        return np.ones(kernel.period)
    fresh = tree_noise._estimate_weights(kernel.period.bit_length())[1]
    return fresh[tree_noise._trailing_zeros(np.arange(1, kernel.period + 1))]


def patch_draws(patch: pytest.MonkeyPatch, draw: Any) -> None:
    """Puts ``draw(key, step) -> int32`` in place of what every leaf gets."""

    def integers(key: jax.Array, step: jax.Array, like: Any, law: Any) -> Any:
        return jax.tree.map(lambda _: draw(key, step), like)

    def fine(key: jax.Array, step: jax.Array, like: Any, law: Any) -> Any:
        return jax.tree.map(fixed_point.from_int, integers(key, step, like, law))

    patch.setattr(node_noise, "draw", integers)
    patch.setattr(node_noise, "fine", fine)


def impulses(period: int) -> Any:
    """Element t is one std at step t and zero at the others, under one key only."""
    unit = STD * jnp.eye(period, dtype=jnp.int32)

    def draw(key: jax.Array, step: jax.Array) -> jax.Array:
        ours = jnp.all(jax.random.key_data(key) == jax.random.key_data(KEYS[0]))
        return jnp.where(ours, unit[step], jnp.int32(12345678))

    return draw


def linear_map(
    kernel: prefix_noise.PrefixNoise, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray:
    """What a kernel makes of the draws of its steps: the matrix, column by column."""
    with monkeypatch.context() as patch:
        patch_draws(patch, impulses(kernel.period))
        like = {"w": jnp.zeros(kernel.period)}
        noise = increments(kernel, KEYS[:1], like)[0]["w"]
    assert (noise.low is None) == kernel.integral
    return as_float(noise) / STD * draw_stds(kernel)


@functools.cache
def drawn(name: str) -> np.ndarray:
    """The increments of two periods of 37 steps in stds of a node, (2, 37, SIZE)."""
    like = {"w": jax.ShapeDtypeStruct((SIZE,), jnp.bfloat16)}
    periods = increments(make(name, 37), KEYS, like)
    return np.stack([as_float(noise["w"]) for noise in periods]) / STD


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("name", NAMES)
def test_the_linear_map_is_the_inverse_of_the_strategy(
    name: str, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make(name, period)
    increment, c = linear_map(kernel, monkeypatch), kernel.strategy()
    ones = np.tri(period)
    np.testing.assert_allclose(increment @ c, np.eye(period), atol=1e-12)
    np.testing.assert_allclose(ones @ increment @ c, ones, atol=1e-11)  # B C = A
    assert (np.triu(c, 1) == 0).all() and (np.diag(c) > 0).all()  # adaptive
    for norms, matrix, axis in (
        (kernel.column_norms(), c, 0),
        (kernel.prefix_norms(), ones @ increment, 1),
        (kernel.increment_norms(), increment, 1),
    ):
        assert norms.shape == (period,) and norms.dtype == np.float64
        np.testing.assert_allclose(norms, np.linalg.norm(matrix, axis=axis), rtol=1e-11)
    # Nothing is ever let out without noise of its own, at the last step least of all.
    assert (np.diag(increment) > 0.5).all()


def exact_strategy(kernel: prefix_noise.PrefixNoise) -> list[list[Fraction]]:
    """C without a rounding, rows in units and not in stds, from the numbers in use."""
    period = kernel.period
    if isinstance(kernel, tree_noise.Honaker):
        dropped = tree_noise._estimate_weights(period.bit_length())[0].tolist()
        rows = []
        for t in range(1, period + 1):
            level, row = (t & -t).bit_length() - 1, [Fraction(0)] * period
            row[t - 1] = Fraction(1)
            for i in range(level):
                for s in range(t - 2 * 2**i, t - 2**i):
                    row[s] = Fraction(dropped[level][i], 2**32)
            rows.append(row)
        return rows
    if not isinstance(kernel, toeplitz_noise.SquareRoot | toeplitz_noise.Buffered):
        return [[Fraction(x) for x in row] for row in kernel.strategy().tolist()]
    c = [Fraction(1)]
    for lag in range(1, period):
        if isinstance(kernel, toeplitz_noise.Buffered):
            numbers = zip(*kernel._numerators(), strict=True)
            parts = [Fraction(k * d ** (lag - 1), 2 ** (32 * lag)) for d, k in numbers]
            c.append(sum(parts, Fraction(0)))
        else:
            c.append(Fraction(int(kernel._numerators()[lag]), 2**32))
    return [
        [c[t - s] if s <= t else Fraction(0) for s in range(period)]
        for t in range(period)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_noise_solves_the_exact_equations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C n is xi up to the roundings that the kernel admits, in rationals.

    The draws have large integers and all their fractions, so that carries count.
    """
    kernel = make(name, 37)
    random, numbers = np.random.default_rng(11), 6
    high = random.integers(-(2**27), 2**27, (37, numbers)).astype(np.int32)
    low = random.integers(0, 2**32, (37, numbers)).astype(np.uint32)

    def integers(key: jax.Array, step: jax.Array, like: Any, law: Any) -> Any:
        return jax.tree.map(lambda _: jnp.asarray(high)[step], like)

    def fine(key: jax.Array, step: jax.Array, like: Any, law: Any) -> Any:
        x = fixed_point.Fixed(jnp.asarray(high)[step], jnp.asarray(low)[step])
        return jax.tree.map(lambda _: x, like)

    with monkeypatch.context() as patch:
        patch.setattr(node_noise, "draw", integers)
        patch.setattr(node_noise, "fine", fine)
        noise = increments(kernel, KEYS[:1], jnp.zeros(numbers))[0]

    def exact(high: np.ndarray, low: np.ndarray | None) -> list[list[Fraction]]:
        low = np.zeros_like(high) if low is None else low
        both = zip(high.tolist(), low.tolist(), strict=True)
        return [
            [Fraction(a * 2**32 + b, 2**32) for a, b in zip(*row, strict=True)]
            for row in both
        ]

    xi = exact(high, None if kernel.integral else low)
    n, c, most = exact(*noise), exact_strategy(kernel), Fraction(0)
    as_used = kernel.strategy() * draw_stds(kernel)[:, None]
    np.testing.assert_allclose(np.array(c, np.float64), as_used, rtol=1e-15)
    for t, own in enumerate(draw_stds(kernel)):
        for i in range(numbers):
            rest = sum(c[t][s] * n[s][i] for s in range(37)) - xi[t][i]
            assert rest >= 0
            most = max(most, rest / Fraction(float(own)))
    # Half of each rounding on average: the bound is no empty one.
    bound = kernel.rounding()
    assert 0.3 * bound <= most <= bound
    assert (bound == 0) == kernel.integral


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_the_noise_is_the_map_of_the_draws_of_its_period(name: str) -> None:
    """Of the node draws under the same key and law and no other."""
    like, kernel = {"w": jnp.zeros(50)}, make(name, 37)
    laws = kernel.laws(STD)
    draw = node_noise.draw if kernel.integral else node_noise.fine

    @jax.jit
    def step(key: jax.Array, t: jax.Array, law: Any) -> fixed_point.Fixed:
        drawn = draw(key, t, like, law)["w"]
        return (
            drawn if isinstance(drawn, fixed_point.Fixed) else fixed_point.Fixed(drawn)
        )

    def law(t: int) -> lattice_gaussian.Law:
        if name != "honaker":
            return laws
        level = ((t + 1) & -(t + 1)).bit_length() - 1
        return jax.tree.map(lambda x: x[level], laws)

    inverse = np.linalg.inv(kernel.strategy())
    for key, noise in zip(KEYS, drawn(name)[:, :, :50], strict=True):
        xi = np.stack([as_float(step(key, jnp.int32(t), law(t))) for t in range(37)])
        xi = xi / STD / draw_stds(kernel)[:, None]
        np.testing.assert_allclose(noise, inverse @ xi, atol=1e-12)
        assert (noise != 0).all() and (noise.sum(axis=0) != 0).all()


@pytest.mark.parametrize("period", PERIODS)
def test_the_three_trees_are_one(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same integers on the same draws."""
    stored, other = (linear_map(make(name, period), monkeypatch) for name in TREES)
    np.testing.assert_array_equal(other, stored)


def test_both_trees_draw_the_same() -> None:
    np.testing.assert_array_equal(drawn(TREES[1]), drawn(TREES[0]))


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_number_of_increments_and_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, like = make(name, 37), jnp.zeros(37)
    laws, state, found = kernel.laws(STD), kernel.init(like), []
    with monkeypatch.context() as patch:
        patch_draws(patch, impulses(37))
        step = jax.jit(lambda state, t: kernel.increment(KEYS[0], state, t, like, laws))
        for t in range(37):
            noise, state = step(state, jnp.int32(t))
            held = jax.tree.leaves(
                [noise, state], is_leaf=lambda x: isinstance(x, fixed_point.Fixed)
            )
            found += [as_float(fixed_point.Fixed(*held[0]))]
            for x in held[1:]:
                x = x if isinstance(x, fixed_point.Fixed) else fixed_point.Fixed(x)
                found += list(as_float(x).reshape(-1, 37))
    stds = np.linalg.norm(np.array(found) / STD * draw_stds(kernel), axis=1)
    assert kernel.largest_norm() == pytest.approx(stds.max(), rel=1e-9)


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_covariances(name: str) -> None:
    """Coordinates are samples of 37 prefix sums, and of another period's, which are new.

    Each entry is within 6.5 of its standard errors: 74 * 75 / 2 entries, 8e-11 each.
    """
    sums = np.cumsum(drawn(name), axis=1).reshape(74, SIZE)
    b = np.tri(37) @ np.linalg.inv(make(name, 37).strategy())
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
        b = np.tri(16) @ np.linalg.inv(make(name, 16).strategy())
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
        kernel = make(name, period)
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


def test_what_rounding_adds() -> None:
    """Each number of each release by so much at most: an L2 length."""
    kernel = toeplitz_noise.Buffered(4, (0.5,), (0.25,))
    assert prefix_noise.rounding_shift(kernel, 9) == 3.5 * 2.0**-32 * math.sqrt(36)
    assert prefix_noise.rounding_shift(prefix_noise.make("tree", 4), 9) == 0
    # Beside one unit, for a billion numbers.
    for name in NAMES:
        assert prefix_noise.rounding_shift(make(name, 64), 10**9) < 0.01


def test_draws_are_those_of_the_documented_keys() -> None:
    """Of the step and the leaf's path alone: other leaves and their order do not matter."""
    shapes = {"v": (2, 3), "a": (4,), "w": (2, 3)}

    def draws(draw: Any, law: Any, *paths: str) -> Any:
        like = {path: jnp.zeros(shapes[path], jnp.int8) for path in paths}
        return jax.jit(lambda t: draw(KEYS[0], t, like, law))(jnp.int32(3))

    root = np.asarray(jax.random.key_data(KEYS[0])).tolist()
    for draw, plain, law in (
        (node_noise.draw, lattice_gaussian.draw, lattice_gaussian.law(1000)),
        (
            node_noise.fine,
            lattice_gaussian.draw_fine,
            lattice_gaussian.law(1000, fine=True),
        ),
    ):
        together = draws(draw, law, "v", "a", "w")
        alone = jax.jit(plain, static_argnums=1)
        for path, noise in together.items():
            # No role, the step, and the leaf: the key's words, one after the other.
            words = [*root, 0, 3, int(sphere.leaf_id(path))]
            leaf_key = threefry.secret_key(np.array(words, np.uint32))
            jax.tree.map(
                np.testing.assert_array_equal,
                jax.tree.leaves(noise),
                jax.tree.leaves(alone(leaf_key, shapes[path], law)),
            )
            assert isinstance(noise, fixed_point.Fixed) == (draw is node_noise.fine)
        jax.tree.map(
            np.testing.assert_array_equal, draws(draw, law, "w")["w"], together["w"]
        )
        assert draws(draw, law) == {}
        high = {path: jax.tree.leaves(noise)[0] for path, noise in together.items()}
        assert high["v"].dtype == jnp.int32
        assert not np.any(high["v"] == high["w"])


@pytest.mark.parametrize("draw", [node_noise.draw, node_noise.fine])
def test_small_leaves_are_drawn_by_one_program(draw: Any) -> None:
    """So that what is compiled does not grow with their number; each in its own shape.

    (That their bits are those of a leaf alone: the test above.)
    """
    law = lattice_gaussian.law(1000, fine=draw is node_noise.fine)

    def ciphers(*sizes: int) -> int:
        like = {f"{i:02}": jnp.zeros((size, 1)) for i, size in enumerate(sizes)}
        drawn = jax.jit(lambda t: draw(KEYS[0], t, like, law))
        for noise, leaf in zip(
            drawn.eval_shape(3).values(), like.values(), strict=True
        ):
            chex.assert_equal_shape([*jax.tree.leaves(noise), leaf])
        return drawn.lower(3).as_text().count("stablehlo.xor")

    few = ciphers(3, 60)
    assert 0 < few == ciphers(*[3, 60, 17] * 10)
    # Larger leaves by themselves: what is drawn together is held in memory.
    assert ciphers(4096, 4096) < ciphers(4097, 4097)


@pytest.mark.slow  # As methods in test_conformance.py.
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_several_runs_at_once_and_one_step_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vmap over keys, over keys and steps, and eager steps: the same noise as in a scan."""

    def draw(key: jax.Array, step: jax.Array) -> jax.Array:
        words = jax.random.key_data(threefry.fold_in(key, step))  # Cheap to compile.
        return (words[:1] >> jnp.uint32(8)).astype(jnp.int32)

    patch_draws(monkeypatch, draw)
    kernel, like = make(name, 6), jnp.zeros(1)
    laws = kernel.laws(STD)
    expected = [as_float(noise) for noise in increments(kernel, KEYS, like)]

    def step(key: jax.Array, state: Any, t: jax.Array) -> Any:
        return kernel.increment(key, state, t, like, laws)

    state = other = jax.vmap(lambda _: kernel.init(like))(jnp.arange(2))
    together = jax.jit(jax.vmap(step, in_axes=(0, 0, None)))
    apart = jax.jit(jax.vmap(step))
    eager = kernel.init(like)
    for t in range(6):
        of_step = np.stack([noise[t] for noise in expected])
        noise, state = together(KEYS, state, jnp.int32(t))
        np.testing.assert_array_equal(as_float(noise), of_step)
        noise, other = apart(KEYS, other, jnp.full(2, t, jnp.int32))
        np.testing.assert_array_equal(as_float(noise), of_step)
        noise, eager = kernel.increment(KEYS[1], eager, t, like, laws)
        np.testing.assert_array_equal(as_float(noise), of_step[1])


# Vectors of 32 bits: two for each number with a fraction.
STATE_ROWS = {
    "tree": 7,
    "honaker": 14,
    "sqrt_toeplitz": 126,
    BANDED: 8,
    OWN: 6,
    "blt_1": 2,
    "blt_2": 4,
    "blt_3": 6,
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a bound for this compiler")
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_the_state_is_updated_in_place(name: str) -> None:
    """Two periods of 64 steps in nested loops need few vectors beside their state."""
    size, kernel = 2**16, make(name, 64)
    like, laws = jax.ShapeDtypeStruct((size,), jnp.float32), kernel.laws(STD)

    def run(x: jax.Array, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        def period(p: jax.Array, carry: Any) -> Any:
            def step(t: jax.Array, carry: Any) -> Any:
                x, state = carry
                noise, state = kernel.increment(period_key, state, t, like, laws)
                return x + fixed_point.to_float(noise), state

            period_key = threefry.fold_in(key, p)
            return jax.lax.fori_loop(0, 64, step, carry)

        return jax.lax.fori_loop(0, 2, period, (x, state))

    state = kernel.init(like)
    rows = sum(leaf.size for leaf in jax.tree.leaves(state)) / size
    assert rows == STATE_ROWS.get(name, 0)
    lowered = jax.jit(run, donate_argnums=(0, 1)).lower(jnp.zeros(size), state, KEYS[0])
    memory: Any = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * size * (1 + rows)
    # The CPU writes the two words of a result one after the other, and copies what the
    # second still reads. Words of a draw are not stored: see threefry.held.
    vectors = {
        "tree": 1,
        "tree_incremental": 1,
        "honaker": 5,
        "sqrt_toeplitz": 2,
        BANDED: 2,
        OWN: 2,
        "blt_1": 4,
        "blt_2": 7,
        "blt_3": 10,
    }.get(name, 0)
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
            kernel.increment(KEYS[0], (), step, jnp.zeros(2), kernel.laws(1))
