"""Vertex-gradient sums against loops over records in NumPy; bounds to the bit."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp import check_isolation
from jaxdp.kernels.polytope import L1Ball, Polytope, Simplex
from jaxdp.saddle.oracles import (
    Bound,
    LinearModel,
    MatrixGame,
    MaxOfLosses,
    Problem,
    VertexGradients,
    as_problem,
)

# All numbers are multiples of 1/8 and small, so that float32 and float64 compute the same
# and sums can be compared to the bit.
B, P, Q = 9, 4, 3
RNG = np.random.default_rng(5)


def dyadic(*shape: int, largest: int = 16) -> np.ndarray:
    return RNG.integers(-largest, largest + 1, shape).astype(np.float32) / 8


MATRIX = dyadic(P, Q)
X = np.asarray([0.5, 0.25, 0.125, 0.125], np.float32)
Y = np.asarray([0.25, 0.5, 0.25], np.float32)
MASK = np.asarray([1, 1, 0, 1, 1, 1, 0, 1, 1], bool)
PROBABILITIES = (0.5, 0.25, 0.25)
TRIANGLES = Polytope(RNG.integers(-2, 3, (5, P)))
DOMAINS = {"simplex": None, "ball": L1Ball(P, 2.0), "polytope": TRIANGLES}

VECTORS = (dyadic(B, P), dyadic(B, Q))
MATRICES = dyadic(B, P, Q)
TARGETS = dyadic(B)
LINEAR = (VECTORS[0], TARGETS)
GROUPS = (*LINEAR, RNG.integers(0, Q, B).astype(np.int32))


def squared(prediction: Any, target: Any) -> Any:
    return (prediction - target) ** 2 / 2


def logistic(prediction: Any, target: Any) -> Any:
    return jnp.log1p(jnp.exp(-prediction * target))


def squared_loss(x: Any, batch: Any) -> Any:
    return squared(batch[0] @ x, batch[1])


def several(x: Any, batch: Any) -> Any:
    """Three losses (B, Q) of one record."""
    features, shifts = batch
    return (features @ x)[:, None] * shifts


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A problem, the same as a plain function, and its gradients written down."""

    make: Callable[..., VertexGradients]
    value_fn: Callable[..., Any]
    gradients: Callable[[Any], tuple[np.ndarray, ...]]  # batch -> (B, P) and (B, Q)
    batch: Any
    players: int = 2

    @property
    def y(self) -> Any:
        return Y if self.players == 2 else None


def quadratic(x: Any, y: Any, batch: Any) -> Any:
    a, b = batch
    return a @ x + b @ y + x @ MATRIX @ y + x @ x / 2 - y @ y / 2


def by_record(matrix: np.ndarray, batch: Any, scale: float = 1.0) -> tuple[Any, Any]:
    return matrix @ Y + scale * batch[0], X @ matrix + scale * batch[1]


def group_gradients(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    features, targets, group = batch
    p = np.asarray(PROBABILITIES)[group]
    residual = features @ X - targets
    rows_x = (Y[group] / p * residual)[:, None] * features
    return rows_x, np.eye(Q)[group] * (squared(features @ X, targets) / p)[:, None]


CASES = {
    "problem": Case(
        lambda domain: Problem(quadratic, domain),
        quadratic,
        lambda z: tuple(
            rows + own for rows, own in zip(by_record(MATRIX, z), (X, -Y), strict=True)
        ),
        VECTORS,
    ),
    "convex": Case(
        lambda domain: Problem(squared_loss, domain),
        squared_loss,
        lambda z: ((z[0] @ X - z[1])[:, None] * z[0],),
        LINEAR,
        players=1,
    ),
    "game": Case(
        lambda domain: MatrixGame(MATRIX, scale=0.5, domain_x=domain),
        lambda x, y, z: x @ MATRIX @ y + (z[0] @ x + z[1] @ y) / 2,
        lambda z: by_record(MATRIX, z, 0.5),
        VECTORS,
    ),
    "matrices": Case(
        lambda domain: MatrixGame(MATRIX, records="matrices", domain_x=domain),
        lambda x, y, z: jnp.einsum("p,bpq,q->b", x, MATRIX + z, y),
        lambda z: ((MATRIX + z) @ Y, np.swapaxes(MATRIX + z, 1, 2) @ X),
        MATRICES,
    ),
    "linear": Case(
        lambda domain: LinearModel(squared, domain_x=domain),
        squared_loss,
        lambda z: ((z[0] @ X - z[1])[:, None] * z[0],),
        LINEAR,
        players=1,
    ),
    "several": Case(
        lambda domain: MaxOfLosses(several, domain_x=domain),
        lambda x, y, z: several(x, z) @ y,
        lambda z: ((z[1] @ Y)[:, None] * z[0], (z[0] @ X)[:, None] * z[1]),
        VECTORS,
    ),
    "groups": Case(
        lambda domain: MaxOfLosses(squared_loss, lambda z: z[2], PROBABILITIES, domain),
        lambda x, y, z: (
            squared_loss(x, z[:2]) * y[z[2]] / jnp.asarray(PROBABILITIES)[z[2]]
        ),
        group_gradients,
        GROUPS,
    ),
}
STRUCTURED = [name for name in CASES if name not in ("problem", "convex")]
# No coordinate of a gradient reaches WIDE, many are beyond NARROW.
WIDE, NARROW = Bound(256.0, 12), Bound(1.0, 5)


def sums(
    problem: VertexGradients,
    y: Any,
    batch: Any,
    mask: Any = MASK,
    bound: Bound = WIDE,
    **options: Any,
) -> tuple[Any, Any]:
    run = compiled(problem, bound, y is None, tuple(options.items()))
    return run(X, y, batch, mask)


@functools.lru_cache
def compiled(
    problem: Any, bound: Bound, alone: bool, options: Any
) -> Callable[..., Any]:
    def run(x: Any, y: Any, batch: Any, mask: Any) -> Any:
        other = None if alone else bound
        return problem.gradient_sums(x, y, batch, mask, bound, other, **dict(options))

    return jax.jit(run)


def vertices(domain: Any, dim: int) -> np.ndarray:
    domain = Simplex(dim) if domain is None else domain
    return np.asarray(domain.point(jnp.eye(domain.num_vertices)), np.float64)


def expected(
    rows: np.ndarray, domain: Any, kept: np.ndarray, bound: Bound, center: bool
) -> np.ndarray:
    """The sum (m,), record by record."""
    corners = vertices(domain, rows.shape[1])
    total = np.zeros(len(corners), np.int64)
    for row, keep in zip(rows.astype(np.float64), kept, strict=True):
        if keep:
            g = corners @ row
            if center:
                g -= (g.max() + g.min()) / 2
            g = np.clip(g, -bound.clip, bound.clip)
            total += np.rint(g / bound.clip * 2**bound.bits).astype(np.int64)
    return total


#: Where x may be, and whether gradients are centred.
PLACES = [("simplex", False), ("ball", False), ("simplex", True), ("polytope", True)]
#: Two places a case; neighbours in the list of cases have the other two. Below, each case
#: is compared with automatic differentiation in the polytope too.
PAIRS = [(name, *PLACES[(i + j) % 4]) for j in (0, 2) for i, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "where", "center"), PAIRS)
def test_equals_a_loop_over_records(name: str, where: str, center: bool) -> None:
    case, domain = CASES[name], DOMAINS[where]
    problem = case.make(domain)
    for bound in (NARROW,) if where == "ball" else (WIDE, NARROW):
        if name == "linear" and bound is NARROW:
            continue  # Clips a record as a whole: its own test.
        got = sums(problem, case.y, case.batch, bound=bound, center=center)
        rows = case.gradients(case.batch)
        for total, row, polytope in zip(got, rows, (domain, None), strict=False):
            assert total.dtype == jnp.int32
            want = expected(row, polytope, MASK, bound, center)
            np.testing.assert_array_equal(total, want)
        assert (got[1] is None) == (case.players == 1)


@pytest.mark.parametrize("name", CASES)
def test_is_called_like_the_function(name: str) -> None:
    case = CASES[name]
    points = (X, Y)[: case.players]
    got = case.make(None)(*points, case.batch)
    np.testing.assert_allclose(got, case.value_fn(*points, case.batch), rtol=1e-6)


@pytest.mark.parametrize("name", STRUCTURED)
def test_fast_path_equals_automatic_differentiation(name: str) -> None:
    """On records that are not dyadic: at most one unit a record apart."""
    case = CASES[name]
    rng = np.random.default_rng(1)
    batch = jax.tree.map(
        lambda z: z if z.dtype == np.int32 else z + rng.uniform(size=z.shape) / 8,
        jax.tree.map(np.asarray, case.batch),
    )
    batch = jax.tree.map(
        lambda z: jnp.asarray(z, z.dtype.name.replace("64", "32")), batch
    )
    bound = Bound(64.0, 16)
    fast = sums(case.make(TRIANGLES), case.y, batch, bound=bound, center=True)
    slow = sums(
        Problem(case.value_fn, TRIANGLES), case.y, batch, bound=bound, center=True
    )
    for i, (a, b) in enumerate(zip(fast, slow, strict=True)):
        assert (a is None) == (b is None) == (i >= case.players)
        if i < case.players:
            assert np.any(b)
            np.testing.assert_allclose(a, b, atol=MASK.sum())


def spoil(batch: Any, row: int, value: float) -> Any:
    """The first number of one record replaced."""
    leaves, structure = jax.tree.flatten(batch)
    first = np.array(leaves[0])
    first[(row, *(0,) * (first.ndim - 1))] = value
    return jax.tree.unflatten(structure, [first, *leaves[1:]])


@pytest.mark.parametrize("name", CASES)
def test_records_that_are_not_finite_count_zero_for_both(name: str) -> None:
    case = CASES[name]
    for domain in (TRIANGLES,):
        problem = case.make(domain)
        without = MASK.copy()
        without[4] = False
        want = sums(problem, case.y, case.batch, without, NARROW)
        assert any(
            np.any(a != b)
            for a, b in zip(
                want, sums(problem, case.y, case.batch, MASK, NARROW), strict=True
            )
            if a is not None
        )
        for value in (np.nan, np.inf, -np.inf):
            got = sums(problem, case.y, spoil(case.batch, 4, value), MASK, NARROW)
            jax.tree.map(np.testing.assert_array_equal, got, want)


def test_one_nan_in_a_long_row_is_found() -> None:
    """A maximum over a row of this length would pass over it on CPU."""
    rows = np.ones((8, 4096), np.float32)
    rows[3, 700], rows[5, 1], rows[6, -1] = np.nan, np.inf, -np.inf
    model = LinearModel(lambda p, t: p)
    point, bound = np.full(4096, 2.0**-12), Bound(1.0, 4)
    total, _ = model.gradient_sums(
        point, None, (rows, rows[:, 0]), np.ones(8, bool), bound, None
    )
    np.testing.assert_array_equal(total, np.full(4096, 5 * 2**4))


def test_overflow_in_one_player_drops_the_record_for_both() -> None:
    """Also where only a vertex's product overflows, or only the loss does."""
    spoiled = spoil(VECTORS, 4, 3e38)
    without = MASK & (np.arange(B) != 4)
    game = MatrixGame(MATRIX, domain_x=L1Ball(P, 10.0))
    jax.tree.map(
        np.testing.assert_array_equal,
        sums(game, Y, spoiled),
        sums(game, Y, VECTORS, without),
    )

    def value(x: Any, y: Any, z: Any) -> Any:
        bad = jax.lax.stop_gradient(jnp.where(z[0][:, 0] > 1e38, jnp.nan, 0.0))
        return z[1] @ y + bad

    problem = Problem(value)
    jax.tree.map(
        np.testing.assert_array_equal,
        sums(problem, Y, spoiled),
        sums(problem, Y, VECTORS, without),
    )


def test_a_hidden_nan_in_the_features_counts() -> None:
    """A derivative that maps NaN to a number must not let the record in."""
    model = LinearModel(
        lambda p, t: jnp.maximum(1 - p * t, 0),
        lambda p, t: jnp.where(p * t < 1, -t, 0.0),
    )
    for value in (np.nan, np.inf):
        got = sums(model, None, spoil(LINEAR, 4, value))
        want = sums(model, None, LINEAR, MASK & (np.arange(B) != 4))
        np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("name", CASES)
def test_masked_rows_and_microbatches_change_no_bit(name: str) -> None:
    case = CASES[name]
    rng = np.random.default_rng(3)
    batch = jax.tree.map(
        lambda z: z if z.dtype == np.int32 else rng.normal(size=z.shape).astype("f4"),
        case.batch,
    )
    problem = case.make(L1Ball(P, 2.0))
    bound = Bound(2.0, 16)
    want = sums(problem, case.y, batch, bound=bound, center=True)
    rubbish = spoil(spoil(batch, 2, np.nan), 6, 1e30)
    jax.tree.map(
        np.testing.assert_array_equal,
        sums(problem, case.y, rubbish, bound=bound, center=True),
        want,
    )
    padded = jax.tree.map(lambda z: np.concatenate([z, z[:1], z[2:6]]), batch)
    mask = np.concatenate([MASK, np.zeros(5, bool)])
    for rows, kept, size in ((batch, MASK, 4), (padded, mask, None)):
        got = sums(
            problem,
            case.y,
            rows,
            kept,
            bound,
            center=True,
            microbatch_size=size,
        )
        jax.tree.map(np.testing.assert_array_equal, got, want)


EXTREME = {
    "problem": (VECTORS, (np.full(P, 1e6), np.full(Q, -1e6))),
    "convex": (LINEAR, (np.full(P, 1e6), np.float32(-1e6))),
    "game": (VECTORS, (np.full(P, 1e6), np.full(Q, -1e6))),
    "matrices": (MATRICES, np.full((P, Q), 1e6)),
    "linear": (LINEAR, (np.full(P, 1e6), np.float32(-1e6))),
    "several": (VECTORS, (np.full(P, 1e6), np.full(Q, 1e6))),
    "groups": (GROUPS, (np.full(P, 1e6), np.float32(-1e6), np.int32(1))),
}


@pytest.mark.parametrize("name", CASES)
def test_huge_gradients_reach_the_bound_and_stay_there(name: str) -> None:
    """1e6 times too large: one record is 2**bits units, its negative minus as many."""
    case = CASES[name]
    batch, record = EXTREME[name]
    opposite = jax.tree.map(
        lambda z: z if z.dtype == np.int32 else -z,
        jax.tree.map(np.asarray, record),
    )
    problem = case.make(None)
    mask = np.ones(B, bool)
    totals = []
    for one in (record, opposite):
        changed = jax.tree.map(np.array, batch)
        for leaf, value in zip(
            jax.tree.leaves(changed), jax.tree.leaves(one), strict=True
        ):
            leaf[0] = value
        totals.append(sums(problem, case.y, changed, mask, NARROW))
    nothing = sums(problem, case.y, batch, mask & (np.arange(B) > 0), NARROW)
    most = 2**NARROW.bits
    moved = [
        np.max(np.abs(np.asarray(a) - b))
        for total in totals
        for a, b in zip(total, nothing, strict=True)
        if a is not None
    ]
    assert set(moved) == {most}
    if name in ("problem", "game", "matrices"):  # Odd in the record: the worst case.
        for a, b in zip(*totals, strict=True):
            assert np.max(np.abs(a - b)) == 2 * most


NUMBERS = st.floats(width=32) | st.floats(-8, 8, width=32)


@pytest.mark.parametrize("name", CASES)
def test_one_record_moves_a_sum_by_no_more_than_the_bound(name: str) -> None:
    case = CASES[name]
    bound = Bound(0.3, 7)
    batch = jax.tree.map(np.asarray, case.batch)
    sizes = [leaf[0].size for leaf in jax.tree.leaves(batch)]
    runs = []
    for domain, center in ((None, True), (TRIANGLES, False)):
        problem = case.make(domain)

        def run(
            batch: Any,
            mask: Any,
            problem: VertexGradients = problem,
            center: bool = center,
        ) -> Any:
            other = None if case.y is None else bound
            out = problem.gradient_sums(
                X, case.y, batch, mask, bound, other, center=center
            )
            return [total for total in out if total is not None]

        runs.append(jax.jit(run))

    def replaced(numbers: list[float]) -> Any:
        leaves, structure = jax.tree.flatten(batch)
        parts = np.split(np.asarray(numbers, np.float32), np.cumsum(sizes)[:-1])
        out = []
        for leaf, part in zip(leaves, parts, strict=True):
            new = np.array(leaf)
            if new.dtype == np.int32:  # Groups that exist and groups that do not.
                part = np.nan_to_num(part).clip(-5, 5).astype(np.int32)
            new[0] = part.reshape(new.shape[1:])
            out.append(new)
        return jax.tree.unflatten(structure, out)

    numbers = st.lists(NUMBERS, min_size=sum(sizes), max_size=sum(sizes))

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(numbers, numbers)
    def check(one: list[float], other: list[float]) -> None:
        everyone = np.ones(B, bool)
        for run in runs:
            a, b = (run(replaced(z), everyone) for z in (one, other))
            none = run(batch, everyone & (np.arange(B) > 0))
            for with_one, with_other, without in zip(a, b, none, strict=True):
                assert np.max(np.abs(with_one - with_other)) <= 2 * 2**bound.bits
                assert np.max(np.abs(with_one - without)) <= 2**bound.bits

    check()


@pytest.mark.parametrize("name", ["problem", "game", "several"])
def test_a_common_shift_changes_nothing_when_centered(name: str) -> None:
    """Adding <c 1, x> adds c to every coordinate of a record's gradient."""
    case = CASES[name]
    shift = np.arange(B, dtype=np.float32)[:, None] * 4

    def shifted(x: Any, y: Any, z: Any) -> Any:
        records, by = z
        return case.value_fn(x, y, records) + by[:, 0] * (x.sum() - 2 * y.sum())

    problem = Problem(shifted)
    plain, moved = (
        sums(problem, Y, (case.batch, by), bound=NARROW, center=True)
        for by in (np.zeros_like(shift), shift)
    )
    jax.tree.map(np.testing.assert_array_equal, plain, moved)
    uncentered = sums(problem, Y, (case.batch, shift), bound=NARROW)
    assert np.any(np.asarray(uncentered[0]) != plain[0])


def test_one_sided_losses_fit_half_the_clip_when_centered() -> None:
    """Losses in [0, 4]: clipped to 2 and centred, nothing is lost."""
    problem = MaxOfLosses(lambda x, z: z[0] + 0 * x.sum(), domain_x=None)
    losses = np.abs(dyadic(B, Q, largest=32))
    _, total = sums(problem, Y, (losses,), bound=Bound(2.0, 10), center=True)
    middle = (losses.max(axis=1) + losses.min(axis=1)) / 2
    want = ((losses - middle[:, None])[MASK] * 2**9).sum(axis=0)
    np.testing.assert_array_equal(total, want)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("where", DOMAINS)
def test_linear_model_clips_a_record_as_a_whole(where: str, center: bool) -> None:
    """A record's direction is kept: scaled until its largest coordinate is the clip."""
    domain, bound = DOMAINS[where], Bound(1.0, 12)
    got, _ = sums(LinearModel(squared, domain_x=domain), None, LINEAR, bound=bound,
                  center=center)  # fmt: skip
    rows = CASES["linear"].gradients(LINEAR)[0] @ vertices(domain, P).T
    if center:
        rows = rows - (rows.max(axis=1) + rows.min(axis=1))[:, None] / 2
    peak = np.abs(rows).max(axis=1)
    assert np.any(peak[MASK] > 1) and np.any(peak[MASK] > 0)
    rows = rows / np.maximum(peak, 1)[:, None]
    want = np.rint(rows[MASK] * 2**12).sum(axis=0)
    np.testing.assert_allclose(got, want, atol=MASK.sum())


def test_linear_model_takes_a_derivative() -> None:
    def derivative(prediction: Any, target: Any) -> Any:
        return -target * jax.nn.sigmoid(-prediction * target)

    signs = (LINEAR[0], np.sign(TARGETS + 0.01).astype(np.float32))
    given_one = sums(LinearModel(logistic, derivative), None, signs)
    np.testing.assert_allclose(
        given_one[0], sums(LinearModel(logistic), None, signs)[0], atol=MASK.sum()
    )


def temporary_bytes(problem: VertexGradients, *arguments: Any) -> int:
    two = arguments[1] is not None

    def run(x: Any, y: Any, batch: Any, mask: Any) -> Any:
        return problem.gradient_sums(
            x, y, batch, mask, WIDE, WIDE if two else None, center=True
        )

    compiled = jax.jit(run).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a bound for this compiler")
def test_nothing_of_the_size_of_the_features_is_stored() -> None:
    rows, dim = 256, 4096

    def like(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    mask = like(rows, dtype=jnp.bool_)
    linear = (like(rows, dim), like(rows))
    features = 4 * rows * dim
    for domain in (L1Ball(dim, 3.0),):
        model = LinearModel(logistic, domain_x=domain)
        assert temporary_bytes(model, like(dim), None, linear, mask) < features / 2
    groups = MaxOfLosses(squared_loss, lambda z: z[2], [2.0**-12] * dim)
    batch = (like(rows, 8), like(rows), like(rows, dtype=jnp.int32))
    assert temporary_bytes(groups, like(8), like(dim), batch, mask) < features / 20


def test_records_of_no_group_count_zero() -> None:
    problem = CASES["groups"].make(None)
    for group in (-1, Q, 2**31 - 1):
        labels = GROUPS[2].copy()
        labels[4] = group
        batch = (*LINEAR, labels)
        jax.tree.map(
            np.testing.assert_array_equal,
            sums(problem, Y, batch),
            sums(problem, Y, GROUPS, MASK & (np.arange(B) != 4)),
        )
        assert np.asarray(problem(X, Y, batch))[4] == 0  # pyright: ignore[reportCallIssue]


def test_known_saddle_point_of_the_largest_loss() -> None:
    """Digest of the paper, test 18: at the solution both players are indifferent."""
    w = np.asarray([1, 2, 4, 0.5], np.float32)
    a = np.asarray([0.5, 0.4, 0.4, 0.3], np.float32)
    inverse = 1 / np.sqrt(w)
    c = ((a.sum() - 1) / inverse.sum()) ** 2
    x, y = a - np.sqrt(c / w), inverse / inverse.sum()
    np.testing.assert_allclose(x, [0.33431, 0.28284, 0.31716, 0.06569], atol=1e-5)
    problem = MaxOfLosses(lambda x, z: z * w / 2 * (x - a) ** 2)
    bound = Bound(1.0, 16)
    rows = np.ones((2, 1), np.float32)
    sum_x, sum_y = problem.gradient_sums(x, y, rows, np.ones(2, bool), bound, bound)
    assert sum_y is not None
    assert np.ptp(sum_x) <= 2 and np.ptp(sum_y) <= 2
    np.testing.assert_allclose(sum_y[0] / 2**17, 0.0137258, atol=2e-5)


def test_mean_over_all_draws_of_vertices() -> None:
    """Digest of the paper, test 8, by enumeration: K draws of a quadratic's vertices.

    The gradient at their mean is unbiased, the value too high by tr(H C) / (2 K).
    """
    hessian = np.asarray(RNG.normal(size=(P, P)), np.float32)
    hessian = hessian @ hessian.T
    point = np.asarray([0.5, 0.3, 0.15, 0.05], np.float32)

    def value_fn(x: Any, z: Any) -> Any:
        return z * (x @ hessian @ x) / 2

    problem = Problem(value_fn)
    pairs = np.stack(np.meshgrid(np.arange(P), np.arange(P)), -1).reshape(-1, 2)
    draws = np.eye(P, dtype=np.float32)[pairs].mean(axis=1)
    chance = point[pairs].prod(axis=1)
    one, mask, bound = np.ones(1, np.float32), np.ones(1, bool), Bound(16.0, 16)

    def total(x: Any) -> Any:
        return problem.gradient_sums(x, None, one, mask, bound, None)[0]

    every = jax.jit(jax.vmap(total))(draws)
    np.testing.assert_allclose(chance @ every, total(point), atol=1.5)
    excess = chance @ jax.vmap(lambda x: problem(x, one)[0])(draws)
    covariance = np.diag(point) - np.outer(point, point)
    np.testing.assert_allclose(
        excess - problem(point, one)[0],
        np.trace(hessian @ covariance) / 4,
        rtol=1e-4,
    )


def test_as_problem() -> None:
    problem = CASES["game"].make(None)
    assert as_problem(problem) is problem
    assert as_problem(quadratic) == Problem(quadratic)
    with pytest.raises(TypeError, match="value_fn"):
        as_problem(3)  # pyright: ignore[reportArgumentType]


def test_values_are_isolated() -> None:
    for name in ("game", "matrices", "groups"):
        case = CASES[name]
        problem: Any = case.make(None)
        check_isolation(
            lambda points, z, problem=problem: problem(*points, z), (X, Y), case.batch
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[:3]}, "x must be a vector of shape \\(4,\\)"),
        ({"x": X[None]}, "x must"),
        ({"mask": MASK[:3]}, "mask"),
        ({"mask": MASK.astype(np.int32)}, "mask"),
        ({"bound_y": None}, "bound_y"),
        ({"y": None}, "bound_y"),
        ({"y": None, "bound_y": None}, "y must"),
        ({"bound_x": 1.0}, "bound_x"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"center": 1}, "center"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": X,
        "y": Y,
        "batch": VECTORS,
        "mask": MASK,
        "bound_x": WIDE,
        "bound_y": WIDE,
    }
    game = MatrixGame(MATRIX, domain_x=Simplex(P))
    with pytest.raises((ValueError, TypeError), match=message):
        game.gradient_sums(**arguments | change)


def test_bad_problems_are_named() -> None:
    rows, fine = np.ones((2**15, 1), np.float32), Bound(1.0, 16)
    everyone, point = np.ones(2**15, bool), np.ones(1)
    with pytest.raises(ValueError, match="fits int32"):
        MatrixGame().gradient_sums(point, point, (rows, rows), everyone, fine, fine)
    for bad in (0.0, -1.0, float("inf"), 1e-40, 1e40):
        with pytest.raises(ValueError, match="clip"):
            Bound(bad, 8)
    for bits in (0, 17):
        with pytest.raises(ValueError, match="bits"):
            Bound(1.0, bits)
    with pytest.raises(ValueError, match="matrix"):
        MatrixGame(np.full((2, 2), np.nan))
    with pytest.raises(ValueError, match="records"):
        MatrixGame(records="rows")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="belong together"):
        MaxOfLosses(squared_loss, group_probabilities=[0.5, 0.5])
    with pytest.raises(ValueError, match="at least two"):
        MaxOfLosses(squared_loss, lambda z: z[2], [1.0])
    with pytest.raises(ValueError, match=r"group_probabilities\[1\]"):
        MaxOfLosses(squared_loss, lambda z: z[2], [0.5, 0.0])
    with pytest.raises(ValueError, match="y must be None"):
        sums(LinearModel(squared), Y, LINEAR)
    for value_fn in (
        lambda x, y, z: jnp.zeros(()),
        lambda x, y, z: jnp.zeros(1, jnp.int32),
    ):
        with pytest.raises(ValueError, match="value_fn must return"):
            sums(Problem(value_fn), Y, VECTORS)
    with pytest.raises(ValueError, match="group_fn must return integers"):
        sums(MaxOfLosses(squared_loss, lambda z: z[1], PROBABILITIES), Y, GROUPS)
