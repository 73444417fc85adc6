"""Integer scores and the two samplers, against Python's integers and float64."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp.kernels import simplex

KEY = jax.random.key(2024)
DIMS = [1, 2, 15, 16, 17, 257, 4097]
INT32 = st.integers(-(2**31), 2**31 - 1)
#: Of a chi-square statistic, where a test may fail by chance.
UNLIKELY = 1e-7

sample = jax.jit(simplex.sample, static_argnames="num")
sample_float = jax.jit(simplex.sample_float, static_argnames="num")
weights = jax.jit(simplex._weights)
levels_of = jax.jit(lambda s: simplex._levels(simplex._bounds(s), simplex._shared))


def scores_of(dim: int, octaves: float, seed: int = 0) -> jax.Array:
    """Gaussian scores of a standard deviation in octaves."""
    rng = np.random.default_rng(seed)
    raw = np.clip(rng.normal(size=dim) * octaves * 2**24, -(2**30), 2**30)
    return simplex.normalized(jnp.asarray(raw.astype(np.int32)))


def log_weights(scores: jax.Array) -> np.ndarray:
    """Of the realised probabilities, up to a constant, in float64."""
    upper, lower = (np.asarray(x, np.float64) for x in weights(scores))
    return np.log(upper * 2.0**32 + lower)


def floored(scores: jax.Array) -> np.ndarray:
    """Exact log-weights, none below the lowest that is told apart."""
    octaves = np.asarray(scores, np.float64) / 2**24
    return math.log(2) * np.maximum(octaves, -simplex.OCTAVES)


def python_weight(score: int) -> int:
    below = min(-score, simplex.OCTAVES * 2**24)
    octaves, x = divmod(below, 2**24)
    total = simplex._FINE[-1]
    for c in reversed(simplex._FINE[:-1]):
        (t1, t0), (x1, x0) = divmod(total, 4096), divmod(x, 4096)
        total = c - (t1 * x1 + (t1 * x0 + t0 * x1) // 4096)
    return (total // 4) * 2 ** (simplex.OCTAVES - octaves)


def python_bound(score: int) -> int:
    octaves, x = divmod(min(-score, simplex.OCTAVES * 2**24), 2**24)
    total = simplex._COARSE[-1]
    for c in reversed(simplex._COARSE[:-1]):
        total = c - total * (x // 256) // 2**16
    return total * 2**11 // 2**octaves + 1


def python_levels(bounds: list[int]) -> list[list[int]]:
    """Leaves, then sums of 16 over 16, rounded up, to one."""
    levels = [bounds]
    while len(levels) == 1 or len(levels[-1]) > 1:
        x = levels[-1]
        sums = [sum(x[i : i + 16]) for i in range(0, len(x), 16)]
        levels.append([-(-s // 16) for s in sums])
    return levels


def chi_square(drawn: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of the counts; vertices that are hardly expected go together."""
    expected = probabilities * len(drawn)
    observed = np.bincount(drawn, minlength=len(expected))
    rare = expected < 10
    if rare.any():
        expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
        observed = np.append(observed[~rare], observed[rare].sum())
    if expected[-1] < 1:
        expected, observed = expected[:-1], observed[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(scipy.stats.chi2.sf(statistic, max(len(expected) - 1, 1)))


# --- scores ---


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(total=INT32, multiplier=st.integers(0, 2**16 - 1))
@hypothesis.example(total=-(2**31), multiplier=2**16 - 1)
@hypothesis.example(total=2**31 - 1, multiplier=2**16 - 1)
@hypothesis.example(total=-1, multiplier=1)
def test_scaled_is_the_floor(total: int, multiplier: int) -> None:
    for shift in (0, 1, 15, 16, 17, 30, 46):
        expected = total * multiplier // 2**shift
        if -(2**31) <= expected < 2**31:
            assert int(simplex.scaled(jnp.int32(total), multiplier, shift)) == expected


@pytest.mark.parametrize(
    ("multiplier", "shift", "name"),
    [
        (-1, 0, "multiplier"),
        (2**16, 0, "multiplier"),
        (1, -1, "shift"),
        (1, 47, "shift"),
    ],
)
def test_scaled_names_what_is_wrong(multiplier: int, shift: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        simplex.scaled(jnp.int32(1), multiplier, shift)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(scores=st.lists(INT32, min_size=4, max_size=4))
@hypothesis.example(scores=[2**31 - 1, -(2**31), 0, 1])
@hypothesis.example(scores=[-(2**31), -(2**31), -(2**31) + 5, -(2**31)])
def test_normalized_saturates(scores: list[int]) -> None:
    expected = [max(s - max(scores), -(2**30)) for s in scores]
    result = simplex.normalized(jnp.asarray(scores, jnp.int32))
    assert result.tolist() == expected


def test_moved_does_not_overflow() -> None:
    scores = jnp.asarray([0, -(2**30), -(2**30), -7], jnp.int32)
    increment = jnp.asarray([-(2**30), -(2**30), 2**30, 2**30], jnp.int32)
    # -2**30, -2**31, 0 and 2**30 - 7.
    result = simplex.moved(scores, increment).tolist()
    assert result == [-(2**30), -(2**30), -(2**30) + 7, 0]


def test_saturation_widens_no_range() -> None:
    """Of the difference that one record makes, in the scores and in the weights."""
    rng = np.random.default_rng(1)
    scores = scores_of(300, 30)
    h = rng.integers(-1000, 1001, 300).astype(np.int32)
    moved = simplex.moved(scores, jnp.asarray(h))
    change = np.asarray(moved - scores)
    assert (np.asarray(scores) == simplex.LOWEST).any()
    assert np.ptp(change) <= np.ptp(h)


def test_probabilities_and_back() -> None:
    p = np.array([0.5, 0.25, 0.2, 0.05, 0.0], np.float32)
    scores = simplex.from_probabilities(jnp.asarray(p))
    assert scores.dtype == jnp.int32
    assert scores.tolist()[::4] == [0, -(2**30)]
    octaves = np.asarray(scores, np.float64) * 2.0**-simplex.BITS
    np.testing.assert_allclose(2**octaves / np.sum(2**octaves), p, atol=1e-6)


def test_entropic_step_is_multiplicative_weights() -> None:
    rng = np.random.default_rng(0)
    x, g = rng.dirichlet(np.ones(9)), rng.normal(size=9)
    log_x = jnp.log(jnp.float32(x))
    logits, top = simplex.entropic_step(log_x, jnp.float32(g), 0.3, jnp.max(log_x))
    expected = x * np.exp(-0.3 * g)
    np.testing.assert_allclose(
        jax.nn.softmax(logits), expected / expected.sum(), rtol=1e-5
    )
    assert float(logits.max()) == float(top)
    np.testing.assert_allclose(top, (log_x - log_x.max() - 0.3 * g).max(), rtol=1e-5)


def test_counts() -> None:
    counts = simplex.counts(jnp.asarray([3, 0, 3], jnp.int32), 5)
    assert counts.tolist() == [1, 0, 0, 2, 0]


# --- weights ---


def test_every_fraction() -> None:
    """All 2**24 of them: the stated error, and bounds that are bounds and close."""
    power, bound = jax.jit(simplex._power), jax.jit(simplex._bounds)
    low, high, block = math.inf, -math.inf, 2**21
    for start in range(0, 2**24, block):
        fraction = np.arange(start, start + block, dtype=np.uint32)
        m = np.asarray(power(fraction), np.int64)
        error = np.log(m) + math.log(2) * (fraction / 2**24 - 24)
        low, high = min(low, error.min()), max(high, error.max())
        v = np.asarray(bound(-fraction.astype(np.int32)), np.int64)
        assert (v * 2**32 >= m * 2**35).all()
        assert v.max() <= 2**27 + 1
        assert ((v - 1) * 2**32 <= m * 2**35 * 1.00024).all()
    assert 0.9 * simplex.LOG_ERROR < high - low <= simplex.LOG_ERROR


def test_weights_are_those_of_python() -> None:
    rng = np.random.default_rng(3)
    edges = [0, -1, -(2**24) + 1, -(2**24), -(35 * 2**24) + 1, -35 * 2**24, -(2**30)]
    scores = np.append(rng.integers(-(2**30), 1, 500), edges).astype(np.int32)
    upper, lower = (np.asarray(x).tolist() for x in weights(scores))
    bounds = np.asarray(simplex._bounds(jnp.asarray(scores))).tolist()
    for s, u, w, v in zip(scores.tolist(), upper, lower, bounds, strict=True):
        assert u * 2**32 + w == python_weight(s)
        assert v == python_bound(s)
        assert python_weight(s) <= v * 2**32


@pytest.mark.parametrize("octaves", [1, 2, 5, 6, 20])
@pytest.mark.parametrize("dim", [1000, 4096, 100_000])
def test_realised_probabilities(dim: int, octaves: float) -> None:
    """Within the stated error of the softmax; between neighbours, of twice Delta."""
    unit = math.log(2) * 2**-24
    bound = round(3.5e-3 / unit)  # Delta, in units of a score.
    scores = scores_of(dim, octaves)
    h = np.random.default_rng(7).integers(-bound, bound + 1, dim).astype(np.int32)
    neighbour = simplex.moved(scores, jnp.asarray(h))
    for x in (scores, neighbour):
        assert np.ptp(log_weights(x) - floored(x)) <= simplex.LOG_ERROR
    loss = np.ptp(log_weights(neighbour) - log_weights(scores))
    assert loss <= unit * np.ptp(h) + 2 * simplex.LOG_ERROR
    assert loss >= 0.9 * 2 * unit * bound


def realised_by_float(logits: np.ndarray) -> np.ndarray:
    """Exact probabilities of `sample_float` of at most 16**3 logits."""

    def accepted(prefixes: np.ndarray) -> np.ndarray:
        """How many of the 2**24 uniforms lie below each prefix: by bisection."""
        total = prefixes[:, -1:]
        low, high = np.zeros(prefixes.shape, np.int64), np.full(prefixes.shape, 2**24)
        while (low < high).any():
            middle = (low + high) // 2
            u = middle.astype(np.float32) * np.float32(2**-24)
            below = u * total < prefixes
            active = low < high
            low = np.where(active & below, middle + 1, low)
            high = np.where(active & ~below, middle, high)
        return low

    top = jnp.max(logits)
    leaves = jnp.exp(logits - top)
    levels = [np.asarray(x) for x in simplex._levels(leaves, simplex._grouped)]
    p = np.ones(1)
    for level in [*levels[-2::-1], np.asarray(leaves)]:
        groups = np.pad(level, (0, -len(level) % 16)).reshape(-1, 16)
        below = accepted(np.cumsum(groups, axis=1, dtype=np.float32))
        share = np.diff(below, axis=1, prepend=0) / 2**24
        p = (p[:, None] * share).reshape(-1)[: len(level)]
    return p


def test_the_float_sampler_has_no_bound() -> None:
    """Why there is another: it never draws what a neighbour's data would let it draw."""
    scores = scores_of(1000, 5 / math.log(2))
    h = np.random.default_rng(7).choice([-84_000, 84_000], 1000).astype(np.int32)
    sets = [scores, simplex.moved(scores, jnp.asarray(h))]
    unit = np.float32(math.log(2) * 2**-24)
    p, q = (realised_by_float(np.asarray(s, np.float32) * unit) for s in sets)
    np.testing.assert_allclose([p.sum(), q.sum()], 1)
    assert ((p == 0) != (q == 0)).any()
    for s in sets:
        assert np.isfinite(log_weights(s)).all()
    # With mild logits no test would notice.
    mild = realised_by_float(np.asarray(scores_of(1000, 1), np.float32) * unit)
    exact = floored(scores_of(1000, 1))
    exact = np.exp(exact - np.log(np.exp(exact).sum()))
    np.testing.assert_allclose(mild, exact, rtol=2e-3)


# --- positions ---


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("octaves", [0, 2, 15])
def test_positions(dim: int, octaves: float) -> None:
    """A weight has as many accepted positions as units: the first, the last, the next."""
    scores = scores_of(dim, octaves, seed=dim)
    bounds = [python_bound(s) for s in scores.tolist()]
    expected = python_levels(bounds)
    levels = levels_of(scores)
    assert [x.tolist() for x in levels] == expected[1:]
    # Where intervals begin, in units of a weight, from the root to the leaves.
    starts = [0]
    for depth in range(len(expected) - 2, -1, -1):
        unit, values, above = 2**32 * 16**depth, expected[depth], starts
        starts = []
        for i, value in enumerate(values):
            begin = above[i // 16] if i % 16 == 0 else starts[-1] + values[i - 1] * unit
            starts.append(begin)
            end = above[i // 16] + expected[depth + 1][i // 16] * unit * 16
            assert begin + value * unit <= end
    chosen = range(dim) if dim < 300 else range(0, dim, 13)
    positions, owners = [], []
    for j in chosen:
        weight = python_weight(int(scores[j])) if dim < 300 else None
        weight = weight or python_weight(scores.tolist()[j])
        assert weight <= bounds[j] * 2**32
        positions += [starts[j], starts[j] + weight - 1, starts[j] + weight]
        owners += [j, j, None]
    depth = len(levels)
    columns = []
    for position in positions:
        high, low = divmod(position, 2**32)
        root, path = divmod(high, 16**depth)
        digits = sum(path // 16 ** (depth - 1 - k) % 16 * 16**k for k in range(depth))
        columns.append((root, digits, low))
    inside = np.array([root < expected[-1][0] for root, _, _ in columns])
    words = np.array(columns, np.uint64).astype(np.uint32).T
    index, accepted = map(
        np.asarray, jax.jit(simplex._locate)(scores, levels, *map(jnp.asarray, words))
    )
    first = np.array([0 if j is None else j for j in owners])
    owned = np.array([j is not None for j in owners])
    assert accepted[owned].all()
    np.testing.assert_array_equal(index[owned], first[owned])
    # The one after is another's, or no one's.
    previous = np.repeat(list(chosen), 3)
    after = ~owned & inside & accepted
    assert (index[after] == previous[after] + 1).all()
    for k in np.flatnonzero(after):
        assert positions[k] == starts[index[k]]


@pytest.mark.parametrize("total", [1, 3, 17, 2**16 + 1, 2**20, 2**27 + 1])
def test_the_root_is_uniform(total: int) -> None:
    """What is rejected leaves every remainder equally often."""
    last = 2**32 // total * total - 1
    words = np.array([[0, total, last, min(last + 1, 2**32 - 1)]], np.uint32)
    value, uniform = simplex._root(jnp.asarray(words), jnp.uint32(total))
    assert np.asarray(value)[:3].tolist() == [0, 0, total - 1]
    assert np.asarray(uniform).tolist() == [True, True, True, last == 2**32 - 1]


def test_the_root_takes_the_first_word_that_it_may() -> None:
    last = 2**32 // 17 * 17 - 1
    words = np.array([[5, last + 1, last + 1], [1, 6, last + 1], [1, 1, last + 1]])
    value, uniform = simplex._root(jnp.asarray(words, jnp.uint32), jnp.uint32(17))
    assert np.asarray(value)[:2].tolist() == [5, 6]
    assert np.asarray(uniform).tolist() == [True, True, False]
    words = jax.random.bits(KEY, (3, 200_000))
    value, uniform = simplex._root(words, jnp.uint32(17))
    assert bool(uniform.all())
    assert chi_square(np.asarray(value), np.full(17, 1 / 17)) > UNLIKELY


# --- draws ---


@pytest.mark.parametrize(
    "dim",
    [2, 4099, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (17, 257))],
)
def test_draws_follow_the_softmax(dim: int) -> None:
    """All of them, and the first half: the order is that of iid draws."""
    num = 200_000
    scores = scores_of(dim, 2)
    logits = jnp.asarray(floored(scores), jnp.float32)
    exact = np.exp(floored(scores))
    exact /= exact.sum()
    for draw, x in ((sample, scores), (sample_float, logits)):
        drawn = np.asarray(draw(KEY, x, num=num))
        assert drawn.dtype == np.int32
        assert 0 <= drawn.min() <= drawn.max() < dim
        assert int(simplex.counts(jnp.asarray(drawn), dim).sum()) == num
        assert chi_square(drawn, exact) > UNLIKELY
        assert chi_square(drawn[: num // 2], exact) > UNLIKELY
        if dim == 2:  # Neighbours in the order are independent.
            pairs = 2 * drawn[:-1:2] + drawn[1::2]
            assert chi_square(pairs, np.outer(exact, exact).ravel()) > UNLIKELY


@pytest.mark.parametrize("draw", [sample, sample_float])
def test_one_vertex(draw: functools.partial) -> None:
    dtype = jnp.int32 if draw is sample else jnp.float32
    assert draw(KEY, jnp.zeros(1, dtype), 5).tolist() == [0] * 5


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA for CPUs")
def test_sums_of_a_float_tree_are_fused_with_what_they_sum() -> None:
    """No library's routine, which would write as many numbers as it sums to new memory."""
    given = jax.ShapeDtypeStruct((2**16,), jnp.float32)
    draw = functools.partial(simplex.sample_float, num=8, top=jnp.float32(0))
    program = jax.jit(draw).lower(jax.eval_shape(lambda: KEY), given).compile()
    assert "kCustom" not in program.as_text()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4 * 2**16


def test_the_float_sampler_never_draws_minus_infinity() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    logits[::2] = -np.inf
    drawn = np.asarray(sample_float(KEY, jnp.asarray(logits), 200_000))
    assert (drawn % 2 == 1).all()
    lonely = jnp.full(300, -jnp.inf).at[217].set(-1e30)
    assert (np.asarray(sample_float(KEY, lonely, 1000)) == 217).all()


def test_rejections_are_drawn_again() -> None:
    """One vertex at the maximum, all others far below, where rounding up is worst."""
    scores = jnp.full(300_000, -30 * 2**24, jnp.int32).at[123_456].set(0)
    drawn = np.asarray(sample(KEY, scores, 4096))
    # The rest has mass 2.8e-4: a dozen expected losses at most, with failure < 1e-7.
    assert (drawn != 123_456).sum() <= 12


@pytest.mark.parametrize(
    "draw", [sample, pytest.param(sample_float, marks=pytest.mark.slow)]
)
def test_under_vmap_and_scan(draw: functools.partial) -> None:
    x = jnp.stack([scores_of(300, 2, seed) for seed in range(3)])
    if draw is sample_float:
        x = x.astype(jnp.float32) * jnp.float32(2**-24)
    keys = jax.random.split(KEY, 3)
    single = jnp.stack([draw(k, s, 64) for k, s in zip(keys, x, strict=True)])
    one = functools.partial(draw, num=64)
    several = jax.jit(jax.vmap(lambda k, s: one(k, s)))(keys, x)
    np.testing.assert_array_equal(several, single)
    scanned = jax.jit(lambda k, s: jax.lax.map(lambda a: one(*a), (k, s)))
    np.testing.assert_array_equal(scanned(keys, x), single)


def test_the_same_with_x64() -> None:
    scores = scores_of(300, 2)
    expected = sample(KEY, scores, 64)
    with jax.enable_x64(True):
        again = sample(KEY, scores, 64)
    assert again.dtype == jnp.int32
    np.testing.assert_array_equal(again, expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "num", "message"),
    [
        ((3, 2), None, 1, "shape"),
        ((0,), None, 1, "shape"),
        ((3,), jnp.int8, 1, "must be"),
        ((3,), None, 0, "num"),
    ],
)
def test_samplers_name_what_is_wrong(
    shape: tuple[int, ...], dtype: object, num: int, message: str
) -> None:
    for draw, own in (
        (simplex.sample, jnp.int32),
        (simplex.sample_float, jnp.float32),
    ):
        with pytest.raises(ValueError, match=message):
            draw(KEY, jnp.zeros(shape, dtype or own), num)
