"""The adaptive variance-reduced gradient: queries, batches, noise, restarts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.sosp import spider as spiders
from tests import drawn

N, D = 400, 3
RNG = np.random.default_rng(0)
DATA = RNG.uniform(-1, 1, (N, D)).astype(np.float32)
NUMBERS: dict[str, Any] = {
    "num_examples": N,
    "num_steps": 50,
    "relation": "replace_one",
    "l2_clip_norm": 3.0,
    "smoothness": 1.0,
    "refresh_batch_size": 40,
    "difference_batch_rate": 20.0,
    "drift_limit": 2.0,
    "max_differences": 7,
    "prefix_noise": "tree",
    "trigger_norm": 0.1,
    "escape_steps": 5,
    "escape_radius": 0.1,
    "escape_noise_std": 0.01,
    "hessian_batch_size": 10,
    "hessian_clip_norm": 1.0,
}


def make(noise_multiplier: float = 0.0, **changes: Any) -> plans.SOSP:
    plan = plans.SOSP(**NUMBERS | changes)
    return plan.with_noise(noise_multiplier=noise_multiplier, delta=1e-5)


def loss(w: jax.Array, batch: jax.Array) -> jax.Array:
    """Of mean gradient w - mean(batch)."""
    return ((w - batch) ** 2).sum(axis=-1) / 2


def cubic(w: jax.Array, batch: jax.Array) -> jax.Array:
    """Of a change that depends on the record."""
    return (batch[:, :1] * w**2).sum(axis=-1) / 2


@functools.cache
def updater(plan: plans.SOSP, size: int) -> Any:
    """One program for all keys, points and data: the state has what it needs of keys."""
    tx = jaxdp.private_spider(plan, Keys.insecure(0), microbatch_size=size)

    @jax.jit
    def update(state: Any, w: jax.Array, data: Any) -> Any:
        return tx.update(None, state, w, value_fn=loss, batch=data)

    return update


def along(
    plan: plans.SOSP, points: list[Any], data: Any = DATA, seed: int = 0, size: int = 7
) -> list[Any]:
    """The states after updates at given points."""
    tx = jaxdp.private_spider(plan, Keys.insecure(seed), microbatch_size=size)
    update, state = updater(plan, size), tx.init(jnp.asarray(points[0], jnp.float32))
    states = []
    for point in points:
        gradient, state = update(state, jnp.asarray(point, jnp.float32), data)
        assert state.release[2] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        states.append(state)
    return states


def fixed(i: float) -> np.ndarray:
    return np.array([i, 0, 0], np.float32)


def test_estimates_are_means_over_fresh_records() -> None:
    """Without noise: of the refresh's records, plus changes, which here have no spread."""
    points = [fixed(0), fixed(0.5), fixed(0.5), fixed(0.7)]
    states = along(make(), points)
    mean = DATA[:40].mean(axis=0)
    for point, state in zip(points, states, strict=True):
        np.testing.assert_allclose(state.spider.estimate, point - mean, atol=1e-4)
    kinds = [int(s.release[0]) for s in states]
    assert kinds == [spiders.REFRESH, spiders.DIFFERENCE, 0, spiders.DIFFERENCE]
    # ceil(20 * 0.5) and ceil(20 * 0.2), where float32 has a little more than 0.2.
    assert [int(s.spider.cursor) for s in states] == [40, 50, 50, 54]
    assert [int(s.release[1]) for s in states] == [40, 10, 0, 4]


def test_refreshes_are_due_by_drift_and_by_number() -> None:
    far = along(make(), [fixed(0), fixed(1), fixed(1.9), fixed(2)])
    # Exactly the limit is too far.
    assert [int(s.spider.refreshes) for s in far] == [1, 1, 1, 2]
    assert float(far[-1].spider.drift) == 0 and int(far[-1].spider.since) == 0
    many = along(make(), [fixed(i / 100) for i in range(10)])
    assert [int(s.spider.refreshes) for s in many] == [1] * 8 + [2] * 2
    none = along(make(max_differences=0), [fixed(i / 100) for i in range(3)])
    assert [int(s.spider.refreshes) for s in none] == [1, 2, 3]


def test_fixed_batches_refresh_where_they_are_too_small() -> None:
    plan = make(difference_batch_size=10)  # good for a way of 1/2
    states = along(plan, [fixed(0), fixed(0.01), fixed(0.4), fixed(1.1)])
    assert [int(s.release[0]) for s in states] == [1, 2, 2, 1]
    assert [int(s.release[1]) for s in states] == [40, 10, 10, 40]


def test_a_point_that_is_no_number_is_refreshed() -> None:
    for bad in (np.nan, np.inf):
        states = along(make(drift_limit=1e9), [fixed(0), fixed(bad), fixed(0)])
        assert int(states[1].spider.refreshes) == 2  # nothing can be said of the way


def test_batches_depend_on_what_was_released_alone() -> None:
    """Records of the batch itself change nothing of its size."""
    points = [fixed(0), fixed(0.5)]
    other = DATA.copy()
    other[40:] = 1e6
    for a, b in zip(along(make(), points), along(make(), points, other), strict=True):
        assert int(a.spider.cursor) == int(b.spider.cursor)


def test_it_stops_before_a_query_that_does_not_fit() -> None:
    plan = make(num_examples=45)
    states = along(plan, [fixed(0), fixed(0.2), fixed(0.4), fixed(0.4)], DATA[:45])
    assert [bool(s.exhausted) for s in states] == [False, False, True, True]
    assert [int(s.spider.cursor) for s in states] == [40, 44, 44, 44]
    assert [int(s.count) for s in states] == [1, 2, 2, 2]
    assert not np.any(states[2].release)


def test_nothing_after_the_last_step() -> None:
    states = along(make(num_steps=2), [fixed(0), fixed(0.2), fixed(0.4)])
    assert [bool(s.exhausted) for s in states] == [False, True, True]
    assert not np.any(states[2].release)


def test_the_last_records_are_read_exactly() -> None:
    """A slice that reaches beyond the data does not begin earlier."""
    plan = make(num_examples=43, refresh_batch_size=40, difference_batch_rate=10.0)
    spent = DATA[:43].copy()
    spent[36:40] = 7.0  # Read by the refresh; the difference must not see them again.
    tx = jaxdp.private_spider(plan, Keys.insecure(0), microbatch_size=16)
    update = jax.jit(functools.partial(tx.update, None, value_fn=cubic, batch=spent))
    state = tx.init(jnp.zeros(D))
    before, state = update(state, jnp.asarray(fixed(0)))
    after, state = update(state, jnp.asarray(fixed(0.3)))
    want = spent[40:43, 0].mean() * 0.3
    np.testing.assert_allclose((after - before)[0], want, atol=1e-4)
    assert int(state.spider.cursor) == 43


def test_a_pass_begins_with_a_refresh() -> None:
    plan = make(
        num_examples=45, sampling=sampling.AdaptiveCursor(num_passes=2), num_steps=9
    )
    states = along(plan, [fixed(i / 5) for i in range(6)], DATA[:45])
    assert [int(s.spider.passes) for s in states] == [0, 0, 1, 1, 1, 1]
    assert [int(s.release[0]) for s in states] == [1, 2, 1, 2, 0, 0]
    assert [bool(s.exhausted) for s in states] == [False] * 4 + [True] * 2
    assert int(states[2].spider.since) == 0 and int(states[2].spider.cursor) == 40


NOTHING = np.full((N, D), np.nan, np.float32)


@pytest.mark.slow  # A study. What is added is tested with the kernels, and below.
@pytest.mark.parametrize("name", ["tree", "blt_3", "sqrt_toeplitz", "independent"])
def test_variances_of_the_estimate(name: str) -> None:
    """Records that are NaN count nothing: what is left is noise. It restarts.

    3000 runs, 3 coordinates, 10 steps: outside by chance less than 1e-6 a test.
    """
    plan = make(2.0, prefix_noise=name)
    steps = [fixed(i / 100) for i in range(10)]

    @jax.jit
    @jax.vmap
    def run(seed: jax.Array) -> jax.Array:
        tx = jaxdp.private_spider(plan, Keys.insecure(seed))
        update: Any = functools.partial(tx.update, None, value_fn=loss, batch=NOTHING)
        state = tx.init(jnp.asarray(steps[0]))
        return jax.lax.scan(lambda s, x: update(s, x)[::-1], state, np.array(steps))[1]

    runs = 3000
    drawn = np.asarray(run(jnp.arange(runs)), np.float64)
    base, node = plan.refresh_noise_std**2, plan.node_std**2
    prefix = plan.correlation.prefix_norms() ** 2
    within = np.concatenate([[0], prefix, [0, prefix[0]]])
    want = base + node * within[:10]
    got = (drawn**2).mean(axis=(0, 2))
    low, high = scipy.stats.chi2.ppf([2e-8, 1 - 2e-8], runs * D) / (runs * D)
    assert np.all(low * want < got) and np.all(got < high * want)
    # Noise of the second refresh has nothing to do with the first.
    across = (drawn[:, 7] * drawn[:, 8]).mean() / np.sqrt(want[7] * want[8])
    assert abs(across) < 5.5 / np.sqrt(runs * D)


@pytest.mark.parametrize(
    ("name", "relation"),
    [
        ("blt_2", "replace_one"),
        pytest.param("tree", "zero_out", marks=pytest.mark.slow),  # Other numbers.
    ],
)
def test_without_records_estimates_are_the_noise(name: str, relation: str) -> None:
    """Every number of refreshes and differences, from the plan's numbers and its keys.

    One record moves the sum of a refresh by its clip, and a mean of changes by one over
    the rate, twice that if it is replaced; units are 2**-16 of these moves.
    """
    plan = make(2.0, prefix_noise=name, relation=relation, max_differences=3)
    states = along(plan, [fixed(i / 100) for i in range(6)], NOTHING, seed=9)
    got = np.array([state.spider.estimate for state in states], np.float64)
    keys, kernel = Keys.insecure(9), plan.correlation
    moves = drawn.moves(plan)
    std = drawn.whole(2.0 * moves * 2**16 * drawn.MORE)
    longest = np.linalg.norm(kernel.strategy(), axis=0).max()
    node = drawn.whole(2.0 * moves * longest * 2**16 * drawn.MORE)
    large, small = 3.0 / 40 * 2.0**-16, 1 / 20 * 2.0**-16
    refresh = drawn.root(plan, keys, "refresh")
    difference = drawn.correlated_root(plan, keys)
    want = []
    for number in (1, 2):
        first = drawn.integers(keys_lib.at_step(refresh, number), std, D) * large
        rest = drawn.increments(
            kernel, keys_lib.at_step(difference, number), node, D, 3
        )
        want += [first, *(first + np.cumsum(rest, axis=0) * small)]
    assert [int(state.release[0]) for state in states] == [1, 2, 2, 2, 1, 2]
    # To a unit: float32 rounds the sums of what was released.
    np.testing.assert_allclose(got, np.array(want)[:6], rtol=0, atol=small)
    first = drawn.integers(keys_lib.at_step(refresh, 1), std, D)
    np.testing.assert_array_equal(drawn.in_units(got[0], large), first)


def test_noise_on_every_branch() -> None:
    points = [fixed(0), fixed(0.1), fixed(0.2)]
    one, two = (along(make(1.0), points, seed=seed) for seed in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert np.all(np.asarray(a.spider.estimate) != np.asarray(b.spider.estimate))
    # The noise does not depend on the data.
    clean = along(make(), points)
    other = along(make(1.0), points, DATA[::-1].copy(), seed=1)
    clean_other = along(make(), points, DATA[::-1].copy())
    for a, b, c, d in zip(one, clean, other, clean_other, strict=True):
        noise = np.asarray(a.spider.estimate) - np.asarray(b.spider.estimate)
        again = np.asarray(c.spider.estimate) - np.asarray(d.spider.estimate)
        np.testing.assert_allclose(noise, again, atol=2e-3)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_one_record_moves_one_release_by_its_bound(relation: Any) -> None:
    """However large it is; and zero where it is no number."""
    plan = make(relation=relation)
    points = [fixed(0), fixed(0.5), fixed(0.9)]
    kinds = (plan.roles.refresh.sensitivity, plan.roles.difference.sensitivity)

    def steep(w: jax.Array, batch: jax.Array) -> jax.Array:
        return (batch * w).sum(-1) + (batch[:, :1] * w**2).sum(-1) / 2

    tx = jaxdp.private_spider(plan, Keys.insecure(0))
    update = jax.jit(functools.partial(tx.update, value_fn=steep))

    def sums(row: int, value: float) -> np.ndarray:
        data = DATA.copy()
        data[row] = value
        state, out = tx.init(jnp.asarray(points[0])), []
        for point in points:
            gradient, state = update(None, state, jnp.asarray(point), batch=data)
            out.append(np.asarray(gradient, np.float64))
        return np.diff(np.array([np.zeros(D), *out]), axis=0)

    neighbour = -1e6 if relation == "replace_one" else np.nan
    for row, step in ((5, 0), (43, 1), (55, 2)):
        moved = np.linalg.norm(sums(row, 1e6) - sums(row, neighbour), axis=1)
        bound = kinds[step > 0]
        assert 0.9 * bound < moved[step] <= bound * (1 + 1e-5)
        assert np.all(np.delete(moved, step) < 1e-6)


def test_absent_rows_count_nothing() -> None:
    plan = make()
    tx = jaxdp.private_spider(plan, Keys.insecure(0))
    present = np.arange(N) % 2 == 0
    gone = np.where(present[:, None], DATA, 9.0).astype(np.float32)
    spoiled = np.where(present[:, None], DATA, np.nan).astype(np.float32)
    update = jax.jit(functools.partial(tx.update, None, value_fn=loss))
    state, w = tx.init(jnp.zeros(D)), jnp.zeros(D)
    masked, _ = update(state, w, batch=gone, mask=present)
    want, _ = update(state, w, batch=spoiled)
    np.testing.assert_array_equal(masked, want)


def test_a_loop_by_hand_is_reported() -> None:
    plan = make(1.0)
    report = jaxdp.report(plan, along(plan, [fixed(0), fixed(0.5)])[-1])
    assert report["steps_done"] == 2 and report["outcome"]["records_used"] == 50


def test_private_spiderboost_is_a_chain() -> None:
    plan = make(0.01, num_examples=N, trigger_norm=0.1)
    tx = optax.chain(
        jaxdp.private_spider(plan, Keys.insecure(3)), optax.scale(-1 / plan.smoothness)
    )
    params = {"a": jnp.ones(2), "b": {"c": jnp.ones(1)}}

    def tree_loss(p: Any, batch: jax.Array) -> jax.Array:
        return loss(jnp.concatenate([p["a"], p["b"]["c"]]), batch)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = tx.update(
            None, state, params, value_fn=tree_loss, batch=batch, other=1
        )
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for t in range(5):
        batch = sampling.batch(plan, Keys.insecure(3), t, DATA)
        params, state = step(params, state, batch)
    got = jnp.concatenate([params["a"], params["b"]["c"]])
    # One step on a quadratic; the mean of 40 records.
    np.testing.assert_allclose(got, DATA[:40].mean(axis=0), atol=0.1)


def test_secrets_are_named_and_keys_serve_one_run() -> None:
    plan = make(1.0)
    keys = Keys.from_entropy()
    tx = jaxdp.private_spider(plan, keys)
    state = tx.init(jnp.zeros(D))
    assert bool(state.horizon.private)
    noise = jaxdp.public(state).spider.noise
    assert all(field is None for field in noise)
    with pytest.raises(ValueError, match="already served"):
        tx.init(jnp.zeros(D))
    with pytest.raises(TypeError, match="keys"):
        jaxdp.private_spider(plan, jax.random.key(0))
    tx = jaxdp.private_spider(make(0.0), Keys.from_entropy())
    assert not bool(tx.init(jnp.zeros(D)).horizon.private)


def test_bad_arguments() -> None:
    tx = jaxdp.private_spider(make(), Keys.insecure(0))
    with pytest.raises(ValueError, match=r"'w'.*bfloat16"):
        tx.init({"w": jnp.zeros(D, jnp.bfloat16)})
    with pytest.raises(ValueError, match="at least one element"):
        tx.init({})
    with pytest.raises(ValueError, match="microbatch_size"):
        jaxdp.private_spider(make(), Keys.insecure(0), microbatch_size=10**5).init(
            jnp.zeros(D)
        )
    for size in (0, -3):
        with pytest.raises(ValueError, match="microbatch_size"):
            jaxdp.sosp(make(), Keys.insecure(0), microbatch_size=size).init(
                jnp.zeros(D)
            )
    state = tx.init(jnp.zeros(D))
    update: Any = tx.update
    with pytest.raises(ValueError, match="value_fn must return one loss per record"):
        update(None, state, jnp.zeros(D), value_fn=lambda w, b: jnp.sum(w), batch=DATA)
    with pytest.raises(ValueError, match="num_examples"):
        update(None, state, jnp.zeros(D), value_fn=loss, batch=DATA[1:])
    with pytest.raises(ValueError, match="params"):
        update(None, state, value_fn=loss, batch=DATA)
    other = plans.DPGD(
        num_examples=N,
        num_steps=1,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
    )
    with pytest.raises(ValueError, match="family"):
        jaxdp.private_spider(other, Keys.insecure(0))


def test_shuffled_data_are_the_same_records_in_an_order_of_the_keys() -> None:
    data = (np.arange(50), np.arange(50) * 2.0)
    one, two = (sampling.shuffled(Keys.insecure(i), data) for i in (1, 2))
    for shuffled in (one, two):
        assert sorted(shuffled[0].tolist()) == list(range(50))
        np.testing.assert_array_equal(shuffled[1], shuffled[0] * 2.0)
    assert one[0].tolist() != two[0].tolist() != list(range(50))
    with pytest.raises(ValueError, match="data"):
        sampling.shuffled(Keys.insecure(1), (np.zeros(3), np.zeros(4)))
