"""The search for second-order points, step by step against the plain reference.

The reference begins each iteration at the library's point and is given the library's very
draws, made again from the secret roots: integers, whose standard deviations are computed
here from the plan's public numbers, and of the plan's grids only their units are taken. Its
clips are those of real numbers. Integers must be the same, vectors the same up to the grid
and float32.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.kernels import lattice_gaussian, prefix_noise
from jaxdp.sosp import state as sosps
from tests.sosp import reference as ref
from tests.sosp.cases import CosineGrid
from tests.sosp.rules import check

pytestmark = pytest.mark.slow

D, N = 4, 250
A = D**-0.5
LOSS = CosineGrid(D)


def value_fn(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Losses (B,): of a scale, and a shift of the grid."""
    return rows[:, 0] * A * jnp.cos(x + rows[:, 1:]).sum(axis=-1)


ORACLES: dict[str, Any] = {
    "gradient": lambda x, z: z[0] * LOSS.gradient(x, z[1:]),
    "hessian_product": lambda x, z, v: z[0] * LOSS.hessian_product(x, z[1:], v),
    "hessian": lambda x, z: z[0] * LOSS.hessian(x, z[1:]),
}


def records(seed: int, *, wild: bool) -> np.ndarray:
    """Of scale 1; or of scales up to 30, with a few that are not finite."""
    rng = np.random.default_rng(seed)
    rows = np.column_stack([np.ones(N), rng.uniform(-0.5, 0.5, (N, D))])
    if wild:
        rows[:, 0] = np.exp(rng.normal(size=N))
        rows[rng.integers(N, size=12), 0] = 30.0
        rows[3::28, 2] = [np.nan, np.inf, -np.inf] * 3
    return rows.astype(np.float32)


#: The least batches, and clips that nothing of scale 1 reaches (a hair above, for float32
#: rounds, and a clip on the way rounds again).
ROOM = 1.001
BASE: dict[str, Any] = {
    "num_examples": N,
    "num_steps": 40,
    "relation": "replace_one",
    "l2_clip_norm": ROOM,
    "smoothness": A * ROOM,
    "refresh_batch_size": 25,
    "difference_batch_rate": 40.0,
    "drift_limit": 1.0,
    "max_differences": 7,
    "trigger_norm": 0.35,
    "escape_steps": 6,
    "escape_radius": 0.4,
    "escape_noise_std": 0.03,
    "hessian_batch_size": 15,
    "hessian_clip_norm": A * ROOM,
    "noise_multiplier": 0.2,
    "stop_at_certificate": False,
}
#: Of scales above 1, most are clipped.
TIGHT = {"l2_clip_norm": 0.5, "smoothness": 0.4, "hessian_clip_norm": 0.3}
MATRIX = {"dim": D, "hessian_lipschitz": A * ROOM}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {"prefix_noise": "tree", "stop_at_certificate": True},
    "queries in escapes": TIGHT
    | {
        "query_in_escape": True,
        "max_differences": 3,
        "drift_limit": 0.15,
        "num_passes": 2,
        "relation": "add_or_remove",
    },
    "tracked": MATRIX
    | TIGHT
    | {
        "hessian": "tracked",
        "hessian_norm": "frobenius",
        "query_in_escape": True,
        "escapes_per_refresh": 2,
        "num_passes": 2,
    },
    "tracked, operator norm": MATRIX
    | {
        "hessian": "tracked",
        # Of this norm the library has an upper bound, d**(1 / 64) times it at most.
        "hessian_clip_norm": A * 1.03,
        "hessian_difference_rate": 60.0,
        "num_passes": 3,
    },
    "released": MATRIX
    | TIGHT
    | {
        "hessian": "released",
        "curvature_threshold": 0.12,
        "escape_steps": 1,
        "num_passes": 2,
    },
    "filter": {
        "hessian_filter": True,
        "prefix_noise": "sqrt_toeplitz",
        "escape_steps": 12,
        "noise_multiplier": 0.45,
        "num_passes": 3,
    },
    "no escapes, fixed batches, no noise": {
        "escape_steps": None,
        "smoothness": 3
        * A,  # So slow that rounding does not decide which point is best.
        "refresh_batch_size": 60,
        "difference_batch_size": 25,
        "noise_multiplier": 0.0,
        "num_passes": 2,
    },
}


@functools.cache
def made(name: str) -> plans.SOSP:
    numbers = BASE | CASES[name]
    cursor = sampling.AdaptiveCursor(num_passes=numbers.pop("num_passes", 1))
    return plans.SOSP(**numbers, sampling=cursor)


@functools.cache
def compiled(name: str) -> Any:
    algorithm = jaxdp.sosp(made(name), Keys.insecure(1), microbatch_size=8)

    @jax.jit
    def step(state: Any, data: jax.Array) -> Any:
        return algorithm.step(state, data, value_fn=value_fn)[0]

    return algorithm.init, step


@functools.partial(jax.jit, static_argnums=2)
def drawn(root: jax.Array, step: jax.Array, size: int, law: Any) -> jax.Array:
    return lattice_gaussian.draw(keys_lib.at_step(root, step), (size,), law)


def integers(root: jax.Array, step: int, size: int, std: int) -> np.ndarray:
    if std == 0:
        return np.zeros(size)
    return _wide(drawn(root, jnp.int32(step), size, lattice_gaussian.law(std)))


@functools.partial(jax.jit, static_argnums=0)
def increments(
    kernel: prefix_noise.PrefixNoise, root: jax.Array, epoch: jax.Array, laws: Any
) -> Any:
    """All of a period, (K, d): integers, or fixed point."""
    like = jax.ShapeDtypeStruct((D,), jnp.float32)
    key = keys_lib.at_step(root, epoch)

    def step(state: Any, k: jax.Array) -> Any:
        noise, state = kernel.increment(key, state, k, like, laws)
        return state, noise

    steps = jnp.arange(kernel.period, dtype=jnp.int32)
    return jax.lax.scan(step, kernel.init(like), steps)[1]


def on_grid(std: float, unit: float) -> int:
    """In units, rounded up; a little more, for what is rounded elsewhere."""
    return math.ceil(std / unit * (1 + 5e-6) * (1 - 1e-12))


class Drawn:
    """What the library draws, in the units of the plan's definitions."""

    def __init__(self, plan: plans.SOSP, spider: Any, root: Any = None) -> None:
        self.noise, self.root = spider.noise, root
        m = plan.noise_multiplier
        assert m is not None
        kappa = 2 if plan.relation == "replace_one" else 1
        self.kernel = prefix_noise.make(plan.prefix_noise, max(plan.max_differences, 1))
        self.base_std = m * kappa * plan.l2_clip_norm / plan.refresh_batch_size
        longest = self.kernel.column_norms().max()
        self.node_std = m * kappa / plan.difference_batch_rate * longest
        self.plan, self.noise_multiplier, self.kappa = plan, m, kappa
        self.matrix_std = m * kappa * plan.hessian_clip_norm / plan.hessian_batch_size

    def base(self, epoch: int) -> np.ndarray:
        grid: Any = self.plan.roles.refresh.grid
        unit = self.plan.l2_clip_norm * 2.0**-grid.bits / self.plan.refresh_batch_size
        # The library counts refreshes from 1.
        std = on_grid(self.base_std, unit)
        return unit * integers(self.noise.refresh, epoch + 1, D, std)

    def increment(self, epoch: int, k: int) -> np.ndarray:
        grid: Any = self.plan.roles.difference.grid
        unit = 2.0**-grid.bits / self.plan.difference_batch_rate
        std = on_grid(self.node_std, unit)
        if std == 0:
            return np.zeros(D)
        laws = self.kernel.laws(std)
        rows = increments(self.kernel, self.noise.difference, epoch + 1, laws)
        behind = 0.0 if rows.low is None else 2.0**-32 * _wide(rows.low)
        return unit * (_wide(rows.high) + behind)[k]

    def escape(self, step: int) -> np.ndarray:
        unit = self.product_unit()
        return unit * integers(self.root, step, D, on_grid(self.product_std(), unit))

    def product_unit(self) -> float:
        plan = self.plan
        if plan.hessian == "tracked":
            return plan.roles.hessian.grid.product_unit
        longest = plan.hessian_clip_norm * plan.escape_radius
        return (
            longest * 2.0 ** -plan.roles.hessian.grid(D).bits / plan.hessian_batch_size
        )

    def product_std(self) -> float:
        """What an escape's products need, and what is rounded in them besides."""
        plan, unit = self.plan, self.product_unit()
        if plan.hessian_filter:
            return plan.escape_noise_std
        times = (plan.escape_steps or 1) - 1
        move = self.kappa * plan.hessian_clip_norm / plan.hessian_batch_size
        move *= plan.escape_radius
        if plan.hessian == "tracked":
            times *= plan.escapes_per_refresh
            frobenius = plan.hessian_norm == "frobenius"
            # A matrix that was bounded by its operator norm grows on the grid, of bits so
            # few that its Frobenius norm fits.
            grown = 1 if frobenius else 1 + D * 2.0**-15
            # Float32's product with a matrix of four clips at most.
            longest = 4 * plan.hessian_clip_norm * plan.escape_radius * grown
            longest *= 1 if frobenius else math.sqrt(D)
            rounded = (D + 6) * 2.0**-24 * longest
            move = (move * grown + 2 * rounded) * (1 + 1e-6)
        # The product on its grid.
        move += math.sqrt(D) * unit
        private = self.noise_multiplier * move * math.sqrt(times)
        return max(plan.escape_noise_std, private)

    def hessian(self, step: int) -> np.ndarray:
        """Diagonal, and upper triangle over the root of 2: lengths are Frobenius norms."""
        matrix = np.zeros((D, D))
        row, column = np.triu_indices(D)
        grid: Any = self.plan.roles.hessian.grid
        unit = self.plan.hessian_clip_norm * 2.0**-grid.bits
        unit /= self.plan.hessian_batch_size
        std = on_grid(self.matrix_std, unit)
        flat = unit * integers(self.root, step, D * (D + 1) // 2, std)
        matrix[row, column] = flat / np.where(row == column, 1, math.sqrt(2))
        return matrix + matrix.T - np.diag(np.diag(matrix))


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def both(
    name: str, x0: np.ndarray, data: np.ndarray
) -> tuple[list[Any], list[ref.Record]]:
    """The library's states, the first before any step, and the reference's records."""
    plan = made(name)
    init, step = compiled(name)
    states = [init(jnp.asarray(x0, jnp.float32))]
    while not bool(states[-1].horizon.exhausted):
        states.append(step(states[-1], data))
        assert len(states) <= plan.num_steps + 1
    found = ref.run(
        plan,
        x0,
        _wide(data),
        **ORACLES,
        noise=Drawn(plan, states[0].spider, states[0].escape.root),
        points=[_wide(state.point) for state in states[:-1]],
    )
    return states, found


KINDS = {"none": 0, "refresh": 1, "difference": 2, "stopped": 0}
ENDS = {
    "": sosps.RUNNING,
    "certificate": sosps.CERTIFICATE,
    "no records for a query": sosps.DATA,
    "no records for a Hessian": sosps.DATA,
    "out of steps": sosps.STEPS,
}


def compare(plan: plans.SOSP, before: Any, after: Any, r: ref.Record) -> None:
    """One step: equal integers, near vectors."""
    spider, escape = after.spider, after.escape
    read = {role: last - first for role, _, first, last in r.reads}
    integers = {
        "kind": (int(after.release[0]), KINDS[r.branch]),
        "records": (
            int(after.release[1]),
            read.get("gradient", 0) + read.get("difference", 0),
        ),
        "of Hessians": (
            int(after.records - before.records),
            sum(size for role, size in read.items())
            - read.get("gradient", 0)
            - read.get("difference", 0),
        ),
        "cursor": (int(spider.cursor), r.cur),
        "pass": (int(spider.passes), r.cur_pass),
        "since": (int(spider.since), r.k),
        "refreshes": (int(spider.refreshes), r.epoch + 1),
        "triggered": (int(after.escapes - before.escapes), int(r.triggered)),
        "active": (bool(escape.active), r.esc),
        "cool": (int(escape.cool), r.cool),
        "rank": (int(after.best.rank), r.best[2]),
        "ended": (int(after.ended), ENDS[r.why]),
        "done": (bool(after.horizon.exhausted), r.done),
    }
    if r.esc:
        integers["left"] = (int(escape.left), r.left)
    if plan.hessian == "tracked":
        integers["escapes since"] = (int(escape.since), r.n_esc)
    different = {k: v for k, v in integers.items() if v[0] != v[1]}
    assert not different, (r.t, different)
    near = estimate_unit(plan, r)
    np.testing.assert_allclose(spider.estimate, r.gtilde, rtol=1e-5, atol=near)
    np.testing.assert_allclose(spider.drift, r.drift, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(spider.reference, r.x_ref.astype(np.float32))
    point, norm, _ = r.best
    np.testing.assert_allclose(after.best.norm, norm, rtol=1e-4, atol=2 * near)
    # The best may be where an escape ended.
    near = (near + product_unit(plan)) / plan.smoothness
    np.testing.assert_allclose(after.best.point, point, rtol=2e-6, atol=near)
    if r.x_new is None:
        np.testing.assert_array_equal(after.point, before.point)
    else:
        np.testing.assert_allclose(after.point, r.x_new, rtol=2e-6, atol=near)


def unit(grid: Any) -> float:
    """Of a record's contribution to the sum."""
    return grid.l2_clip_norm * 2.0**-grid.bits


def estimate_unit(plan: plans.SOSP, r: ref.Record) -> float:
    """Rounding towards zero, and float32: two units of each query of the epoch.

    The clip of a difference, as of its mean, is what its batch was chosen for: no more
    than the drift and one record's worth.
    """
    steps = (
        unit(plan.roles.difference.grid) * plan.difference_batch_rate * (1 + r.drift)
    )
    return 2 * unit(plan.roles.refresh.grid) + 2 * (r.k + 1) * steps + 2e-6


def product_unit(plan: plans.SOSP) -> float:
    """Two units of a product, or of a jump's direction."""
    if plan.escape_steps is None:
        return 0.0
    if plan.hessian == "tracked":
        record = plan.hessian_clip_norm * 2.0**-13 * plan.escape_radius
        return 2 * plan.roles.hessian.grid.product_unit + 4 * record
    if plan.hessian == "released":  # An eigenvector moves more than its matrix.
        return 100 * unit(plan.roles.hessian.grid)
    grid = plan.roles.hessian.grid(D)
    fine = plan.hessian_clip_norm * plan.escape_radius
    return 4 * fine * 2.0**-16 + 2 * fine * 2.0**-grid.bits / plan.hessian_batch_size


STARTS = {
    "saddle": np.array([0.0, 0.0, np.pi, np.pi]),
    "maximum": np.zeros(D),
    "slope": np.array([1.0, -2.0, 0.5, 2.5]),
}
#: What each case must meet, besides refreshes and differences.
MET: dict[str, set[str]] = {
    # (Out of records run two of the others; here each run ends with a certificate.)
    "as it is": {"none", "failed", "escaped", "certificate", "rank -1"},
    "queries in escapes": {"held", "failed", "no records for a Hessian", "pass 1"},
    "tracked": {"escaped", "no records for a query", "pass 1"},
    "tracked, operator norm": {"none", "failed", "out of steps", "pass 2"},
    "released": {"none", "failed", "escaped", "no records for a Hessian", "pass 1"},
    "filter": {"failed", "filtered", "pass 1", "rank 1", "rank 2"},
    "no escapes, fixed batches, no noise": {"no records for a query", "pass 1"},
}


@pytest.mark.parametrize("name", CASES)
def test_step_by_step(name: str) -> None:
    plan, met = made(name), set()
    for seed, x0 in enumerate(STARTS.values()):
        data = records(seed, wild="smoothness" in CASES[name])
        states, found = both(name, x0.astype(np.float32), data)
        assert len(found) == len(states) - 1
        check(plan, x0.astype(np.float32), found)
        for (before, after), r in zip(itertools.pairwise(states), found, strict=True):
            compare(plan, before, after, r)
            flags = ("triggered", "escaped", "failed", "filtered")
            met |= {r.branch, r.why, f"rank {r.best[2]}", f"pass {r.cur_pass}"}
            met |= {flag for flag in flags if getattr(r, flag)}
            if r.branch == "difference" and r.drift >= plan.drift_limit:
                met.add("held")  # No refresh in the middle of an escape.
    assert MET[name] | {"refresh", "difference"} <= met, met


def test_the_gradient_alone() -> None:
    """In a chain it is SpiderBoost: the machine without escapes."""
    plan = dataclasses.replace(
        made("as it is"), max_differences=3, num_steps=25, escape_steps=None
    )
    scale = optax.scale(-1 / plan.smoothness)
    tx = optax.chain(jaxdp.private_spider(plan, Keys.insecure(2)), scale)
    data = records(5, wild=True)

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        updates, state = tx.update(None, state, x, value_fn=value_fn, batch=data)
        return state, optax.apply_updates(x, updates)

    x = jnp.asarray(STARTS["slope"], jnp.float32)
    states, points = [tx.init(x)], [x]
    while not bool(states[-1][0].exhausted):
        state, x = step(states[-1], points[-1])
        states.append(state)
        points.append(x)
    found = ref.run(
        plan,
        STARTS["slope"],
        _wide(data),
        **ORACLES,
        noise=Drawn(plan, states[0][0].spider),
        points=[_wide(x) for x in points[:-1]],
    )
    kinds = {r.branch for r in found}
    assert kinds == {"refresh", "difference", "stopped"}
    assert len(found) == len(states) - 1
    for after, x, r in zip(states[1:], points[1:], found, strict=True):
        spider = after[0].spider
        assert int(spider.cursor) == r.cur and int(spider.refreshes) == r.epoch + 1
        assert int(after[0].release[0]) == KINDS[r.branch]
        np.testing.assert_allclose(
            spider.estimate, r.gtilde, rtol=1e-5, atol=estimate_unit(plan, r)
        )
        if r.x_new is not None:
            near = estimate_unit(plan, r) / plan.smoothness
            np.testing.assert_allclose(x, r.x_new, rtol=2e-6, atol=near)
    np.testing.assert_array_equal(points[-1], points[-2])


# --- what one record can do ---

ESCAPE = 6
SHORT = BASE | {
    "noise_multiplier": 0.0,
    "num_steps": 2 * ESCAPE + 1,
    # Steps so short, at given points, that nothing leaves an escape.
    "smoothness": 1000.0,
    "difference_batch_rate": 0.02,
    "escape_radius": 0.6,
    "escape_steps": ESCAPE,
    "escape_noise_std": 1e-3,
    "trigger_norm": 1e9,
    "drift_limit": 1e9,
    "query_in_escape": True,
}


#: The shift of a record whose Hessian at 0 is along the first axis alone.
ALONE = np.array([0, *[np.pi / 2] * (D - 1)], np.float32)


def given_points() -> np.ndarray:
    """Two escapes: from 0, .45 away, back to 0 and the plain step, and the same again."""
    points = np.zeros((2 * ESCAPE + 1, D), np.float32)
    angles = 0.25 * (np.arange(1, ESCAPE) - 3)
    for begin in (1, ESCAPE + 2):
        points[begin : begin + ESCAPE - 1, 0] = 0.45 * np.cos(angles)
        points[begin : begin + ESCAPE - 1, 1] = 0.45 * np.sin(angles)
    return points


@pytest.mark.parametrize("hessian", ["on_demand", "tracked"])
def test_what_one_record_moves(hessian: str) -> None:
    """Along given points, without noise: each role's bound, and nothing of the others.

    A record of scale 1e6 is replaced by its opposite, and reaches the bounds; by nothing,
    which moves half.
    """
    more = MATRIX | {"hessian": hessian, "escapes_per_refresh": 2}
    plan = plans.SOSP(**SHORT | (more if hessian == "tracked" else {}))
    algorithm = jaxdp.sosp(plan, Keys.insecure(4), microbatch_size=8)
    points = given_points()
    clean = records(7, wild=False)

    @jax.jit
    def run(data: jax.Array) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            state = algorithm.step(state._replace(point=x), data, value_fn=value_fn)[0]
            spider = state.spider
            place = spider.cursor, state.escapes, spider.refreshes, spider.since
            return state, (spider.estimate, state.point, place)

        return jax.lax.scan(step, algorithm.init(points[0]), points)[1]

    def released(data: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any]:
        """Estimates, and products: what the steps of the escapes are made of."""
        estimates, after, places = jax.tree.map(np.asarray, run(data))
        inside = [t for t in range(len(points)) if t not in (ESCAPE - 1, 2 * ESCAPE)]
        steps = (_wide(points[inside]) - after[inside]) * plan.smoothness
        anchors = [0 if t < ESCAPE else ESCAPE + 1 for t in inside]
        plain = inside.index(ESCAPE)
        products = steps - _wide(estimates[anchors])
        return _wide(estimates), np.delete(products, plain, axis=0), places

    cursor, escapes, refreshes, since = released(clean)[2]
    assert escapes.tolist() == [1] * (ESCAPE + 1) + [2] * ESCAPE
    begins = [0, *(np.flatnonzero(np.diff(refreshes)) + 1), len(points)]
    assert len(begins) == 3
    strategy = prefix_noise.make("blt_3", 7).strategy()
    # One record serves in one escape on demand; tracked, in those of the epoch.
    served = (1 if hessian == "on_demand" else 2) * (ESCAPE - 1)
    each = plan.hessian_clip_norm / plan.hessian_batch_size * plan.escape_radius
    bounds = {
        "refresh": plan.l2_clip_norm / plan.refresh_batch_size,
        "difference": np.linalg.norm(strategy[:, 0]) / plan.difference_batch_rate,
        "escape": math.sqrt(served) * each,
    }
    most = dict.fromkeys(bounds, 0.0)
    # The first and the last record of each step, and of its queries; and one unread.
    ends = {0, 25, *cursor.tolist()}
    for i in sorted(ends | {c - 1 for c in ends if c} | {N - 1}):
        huge, opposite, absent = (clean.copy() for _ in range(3))
        for data, scale in ((huge, 1e6), (opposite, -1e6), (absent, np.nan)):
            data[i] = [scale, *ALONE]
        estimates, products, places = released(huge)
        for data, kappa in ((opposite, 2), (absent, 1)):
            other, others, also = released(data)
            for one, two in zip(places, also, strict=True):
                np.testing.assert_array_equal(one, two)
            change = estimates - other
            found = dict.fromkeys(bounds, 0.0)
            for begin, end in itertools.pairwise(begins):
                asked = np.diff(since[begin:end]) > 0
                rows = np.diff(change[begin:end], axis=0)[asked]
                c = strategy[: len(rows), : len(rows)]
                found["refresh"] += float(np.linalg.norm(change[begin]))
                found["difference"] += float(np.linalg.norm(c @ rows))
            found["escape"] = float(np.linalg.norm(products - others))
            met = [role for role in found if found[role] > 2e-3 * bounds[role]]
            assert len(met) <= (i < cursor[-1]), (i, found)
            # No product is asked of what a Hessian became after its last anchor.
            if hessian == "on_demand":
                assert len(met) == (i < cursor[-1]), (i, found)
            for role in met:
                assert found[role] <= kappa * bounds[role] * (1 + 1e-3), (i, role)
                most[role] = max(most[role], found[role] / (kappa * bounds[role]))
    # Reached, but for the last of the products, which is not seen here; and tracked, for
    # those that see another part of the Hessian, and differences cut off by a refresh.
    assert most["refresh"] > 0.999
    assert most["difference"] > (0.999 if hessian == "on_demand" else 0.98)
    assert most["escape"] > (0.89 if hessian == "on_demand" else 0.4)
