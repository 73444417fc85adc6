"""Per-record updates to noised means whose sums have little noise."""

import dataclasses
import functools
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
from tests import drawn

KEYS = Keys.insecure(4)
N, B, D = 24, 4, 3
EPOCHS = sampling.ShuffledEpochs(batch_size=B)  # Six steps each.


def make(**changes: Any) -> plans.PrefixSum:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": 6,
        "sampling": sampling.SinglePass(batch_size=B),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "noise_multiplier": 1.0,
    }
    return plans.PrefixSum(**base | changes)


@functools.cache
def compiled(plan: plans.PrefixSum) -> Any:
    tx = jaxdp.private_prefix_sum(plan, KEYS)

    def update(state: Any, data: jax.Array, t: jax.Array) -> Any:
        batch = sampling.batch(plan, KEYS, t, data)
        tree = {"a": batch.records[:, :2], "b": batch.records[:, 2]}
        return tx.update(tree, state, batch=batch)

    return tx, jax.jit(update)


LIKE = {"a": jnp.zeros(2), "b": jnp.zeros(())}


def run(plan: plans.PrefixSum, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Means and running sums (T, D) of a run on rows of updates (N, D)."""
    tx, update = compiled(plan)
    state, means, totals = tx.init(LIKE), [], []
    for t in range(plan.num_steps):
        out, state = update(state, jnp.asarray(data, jnp.float32), jnp.asarray(t))
        means.append([*out["a"], out["b"]])
        totals.append([*state.total["a"], state.total["b"]])
    return np.array(means), np.array(totals)


def rows(seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(N, D))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_without_noise_it_is_the_mean_of_clipped_rows() -> None:
    data = rows() * np.linspace(0.1, 3, N)[:, None]
    means, totals = run(make(noise_multiplier=0.0), data)
    lengths = np.linalg.norm(data, axis=1, keepdims=True)
    clipped = data / np.maximum(1, lengths)
    expected = clipped.reshape(6, B, D).mean(axis=1)
    np.testing.assert_allclose(means, expected, atol=2e-4)
    np.testing.assert_allclose(totals, np.cumsum(means, axis=0), atol=1e-5)


@pytest.mark.slow  # A study; every number is in the next test.
def test_noise_starts_anew_with_every_period_and_pass() -> None:
    """Running sums of zeros: their covariance is the plan's, block by block."""
    plan = make(sampling=EPOCHS, num_steps=12, period=4, prefix_noise="tree")

    def noise(seed: jax.Array) -> jax.Array:
        keys = Keys.insecure(seed)
        tx = jaxdp.private_prefix_sum(plan, keys)

        def step(state: Any, t: jax.Array) -> Any:
            batch = sampling.batch(plan, KEYS, t, jnp.zeros((N, 40)))
            _, state = tx.update(batch.records, state, batch=batch)
            return state, state.total

        return jax.lax.scan(step, tx.init(jnp.zeros(40)), jnp.arange(12))[1]

    drawn = jax.jit(lambda seeds: jax.lax.map(noise, seeds))(jnp.arange(400))
    flat = np.asarray(drawn, np.float64).transpose(0, 2, 1).reshape(-1, 12)
    got = flat.T @ flat / len(flat) / plan.node_std**2
    b = np.tril(np.ones((4, 4))) @ np.linalg.inv(plan.correlation.strategy())
    block = b @ b.T
    expected = np.zeros((12, 12))
    for first, size in ((0, 4), (4, 2), (6, 4), (10, 2)):  # A pass is six steps.
        expected[first : first + size, first : first + size] = block[:size, :size]
    scale = np.sqrt(np.diag(expected))
    error = np.sqrt(2 / len(flat)) * np.outer(scale, scale)
    assert (np.abs(got - expected) < 6 * error).all()  # Below 1e-6 in all.


@pytest.mark.parametrize(
    ("name", "relation"),
    [
        ("blt_2", "zero_out"),
        # Integers: in fast tests in test_gradient.py.
        pytest.param("tree", "replace_one", marks=pytest.mark.slow),
        pytest.param("honaker", "zero_out", marks=pytest.mark.slow),
        pytest.param("independent", "replace_one", marks=pytest.mark.slow),
    ],
)
def test_means_without_signal_are_the_noise(name: str, relation: str) -> None:
    """Every number of a run, from the plan's numbers and its keys."""
    plan = make(
        sampling=EPOCHS,
        num_steps=12,
        period=4,
        prefix_noise=name,
        relation=relation,
        noise_multiplier=2.3,
    )
    means, _ = run(plan, np.zeros((N, D)))
    std, root = drawn.std_of_node(plan), drawn.correlated_root(plan, KEYS)
    want = [
        drawn.increments(
            plan.correlation, keys_lib.at_step(root, number), std, D, steps
        )
        for number, steps in enumerate((4, 2, 4, 2))  # A pass is six steps.
    ]
    assert std == plan.grid_noise_std
    unit = drawn.unit_of_means(plan)
    if plan.correlation.integral:
        got = drawn.in_units(means, unit)
        np.testing.assert_array_equal(got, np.concatenate(want))
    else:  # Three roundings of float32.
        np.testing.assert_allclose(means / unit, np.concatenate(want), rtol=2e-7)


CYCLIC = sampling.CyclicEpochs(batch_size=B)


@pytest.mark.parametrize("name", ["blt_2", "independent"])
def test_noise_goes_on_through_passes_of_one_order(name: str) -> None:
    plan = make(sampling=CYCLIC, num_steps=15, prefix_noise=name)
    means, totals = run(plan, np.zeros((N, D)))
    std, root = drawn.std_of_node(plan), drawn.correlated_root(plan, KEYS)
    key = keys_lib.at_step(root, 0)  # One period for all.
    want = drawn.increments(plan.correlation, key, std, D, 15)
    np.testing.assert_allclose(means / drawn.unit_of_means(plan), want, rtol=2e-7)
    np.testing.assert_allclose(totals, np.cumsum(means, axis=0), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "relation"), [("blt_3", "replace_one"), ("independent", "add_or_remove")]
)
def test_an_attack_finds_what_passes_of_one_order_cost(
    name: str, relation: str
) -> None:
    """The likelihood ratio of the record that is first in its pass shifts by mu stds.

    It is ``C`` times the releases, projected on what the record moves. Runs of both data
    sets have the same keys, so the shift is exact; the std is within six standard errors.
    """
    runs, noise = 400, 1.6
    plan = make(
        sampling=CYCLIC,
        num_steps=15,
        prefix_noise=name,
        relation=relation,
        noise_multiplier=noise,
    )
    here = relation == "replace_one"

    def released(seed: jax.Array, sign: jax.Array) -> jax.Array:
        keys = Keys.insecure(seed)
        tx = jaxdp.private_prefix_sum(plan, keys)
        first = sampling.batch(plan, keys, 0, jnp.arange(N)).records[0]
        data = jnp.zeros((N, 1)).at[first].set(sign)

        def step(state: Any, t: jax.Array) -> Any:
            batch = sampling.batch(plan, keys, t, data)
            out, state = tx.update(batch.records, state, batch=batch)
            return state, out

        return jax.lax.scan(step, tx.init(jnp.zeros(1)), jnp.arange(15))[1]

    both = jax.jit(
        lambda sign: jax.lax.map(lambda s: released(s, sign), jnp.arange(runs))
    )
    one, other = (
        np.asarray(both(s), np.float64)[..., 0] for s in (1.0, -1.0 if here else 0.0)
    )
    matrix = plan.correlation.strategy()
    moved = matrix[:, ::6].sum(axis=1) / np.linalg.norm(matrix[:, ::6].sum(axis=1))
    gap = ((one - other) @ matrix.T) @ moved
    np.testing.assert_allclose(gap / plan.node_std, 1 / noise, rtol=1e-2)
    spread = ((other @ matrix.T) @ moved).std()
    assert abs(spread / plan.node_std - 1) < 6 / math.sqrt(2 * runs)


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_independent_noise_of_sampled_groups(relation: str) -> None:
    """Of the multiplier's size in each step, and alike in no two (failure below 1e-6)."""
    runs, noise, groups, steps, q = 500, 1.3, 4, 10, 0.5
    sampler = sampling.CyclicPoisson(num_groups=groups, sampling_prob=q)
    plan = make(
        sampling=sampler,
        num_steps=steps,
        prefix_noise="independent",
        relation=relation,
        noise_multiplier=noise,
    )
    moves = 2 if relation == "replace_one" else 1
    std = noise * moves / (q * N / groups)  # Over the mean size of a batch of a group.
    assert plan.node_std == pytest.approx(std)

    def released(seed: jax.Array) -> jax.Array:
        keys = Keys.insecure(seed)
        tx = jaxdp.private_prefix_sum(plan, keys)

        def step(state: Any, t: jax.Array) -> Any:
            batch = sampling.batch(plan, keys, t, jnp.zeros((N, D)))
            out, state = tx.update(batch.records, state, batch=batch)
            return state, out

        return jax.lax.scan(step, tx.init(jnp.zeros(D)), jnp.arange(steps))[1]

    x = np.asarray(jax.jit(lambda s: jax.lax.map(released, s))(jnp.arange(runs)))
    every = np.swapaxes(x, 1, 2).reshape(-1, steps)  # A column for each step.
    error = 1 / math.sqrt(len(every))
    # Of 10 deviations and 55 products; six standard errors.
    assert np.abs(every.std(axis=0) / std - 1).max() < 6 * error / math.sqrt(2)
    correlation = np.corrcoef(every, rowvar=False) - np.eye(steps)
    assert np.abs(correlation).max() < 6 * error


@pytest.mark.parametrize(
    ("name", "changes", "relation"),
    [
        ("sqrt_toeplitz", {"bands": 4}, "zero_out"),
        ("sqrt_toeplitz", {"bands": 2}, "replace_one"),
        ("toeplitz", {"coefficients": (1.0, 0.9, 0.8, 0.3)}, "zero_out"),
        ("independent", {}, "zero_out"),
    ],
)
def test_an_attack_finds_what_sampled_steps_cost(
    name: str, changes: Any, relation: str
) -> None:
    """In each block of rows of C that one of a record's steps is in, its coin moves it.

    By the same length each time it was drawn, by nothing else, and with noise of one std:
    sampled Gaussian mechanisms, one for each of the steps. (Failure below 1e-6.)
    """
    runs, noise, groups, steps, q = 300, 1.6, 4, 15, 0.5
    sampler = sampling.CyclicPoisson(
        num_groups=groups, sampling_prob=q, max_batch_size=6
    )
    plan = make(
        sampling=sampler,
        num_steps=steps,
        prefix_noise=name,
        relation=relation,
        noise_multiplier=noise,
        **changes,
    )
    here, record = relation == "replace_one", 9  # Of group 1.

    def released(seed: jax.Array, sign: jax.Array) -> jax.Array:
        keys = Keys.insecure(seed)
        tx = jaxdp.private_prefix_sum(plan, keys)
        data = jnp.zeros((N, 1)).at[record].set(sign)

        def step(state: Any, t: jax.Array) -> Any:
            batch = sampling.batch(plan, keys, t, data)
            drawn = sampling.batch(plan, keys, t, jnp.arange(N))
            out, state = tx.update(batch.records, state, batch=batch)
            here = jnp.any((drawn.records == record) & drawn.mask)
            return state, (out[0], here)

        return jax.lax.scan(step, tx.init(jnp.zeros(1)), jnp.arange(steps))[1]

    both = jax.jit(
        lambda sign: jax.lax.map(lambda s: released(s, sign), jnp.arange(runs))
    )
    (one, coins), (other, _) = (both(s) for s in (1.0, -1.0 if here else 0.0))
    matrix, coins = plan.correlation.strategy(), np.asarray(coins)
    gap = (np.asarray(one, np.float64) - np.asarray(other, np.float64)) @ matrix.T
    rest = np.asarray(other, np.float64) @ matrix.T
    own = range(1, steps, groups)
    assert not np.delete(coins, own, axis=1).any()
    share = coins[:, own].mean()
    assert abs(share - q) < 6 * math.sqrt(q * (1 - q) / (runs * len(own)))
    seen = np.zeros_like(gap)
    length = np.linalg.norm(matrix, axis=0).max()
    for t in own:
        column = matrix[:, t]
        seen += np.outer(coins[:, t], column) * plan.node_std / noise / length
        along = rest @ column / np.linalg.norm(column)
        # Where the record is not drawn under zero-out, what is left is noise.
        spread = (along if not here else along[~coins[:, t]]).std()
        assert abs(spread / plan.node_std - 1) < 6 / math.sqrt(2 * runs * 0.4)
    np.testing.assert_allclose(gap / plan.node_std, seen / plan.node_std, atol=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_one_record_moves_a_mean_by_at_most_its_share(bad: float) -> None:
    plan = make()
    data = rows()
    means, _ = run(plan, data)
    other = data.copy()
    other[5] = bad
    moved = run(plan, other)[0] - means
    assert np.isfinite(moved).all()
    sizes = np.linalg.norm(moved, axis=1)
    assert sizes[1] <= 2 * plan.l2_clip_norm / B * (1 + 1e-6)
    np.testing.assert_array_equal(np.delete(moved, 1, axis=0), 0)


def test_masked_rows_count_nothing() -> None:
    plan = make(noise_multiplier=0.0)
    tx = jaxdp.private_prefix_sum(plan, KEYS)
    batch = sampling.batch(plan, KEYS, 0, jnp.asarray(rows(), jnp.float32))
    mask = jnp.array([True, False, True, False])
    masked = dataclasses.replace(batch, mask=mask)
    start = tx.init(jnp.zeros(D))
    out, _ = jax.jit(lambda b: tx.update(b.records, start, batch=b))(masked)
    expected = rows()[[0, 2]].sum(axis=0) / B  # Not over the rows that are there.
    np.testing.assert_allclose(out, expected, atol=1e-4)


def test_it_stands_in_a_chain() -> None:
    """DP-FTRL: per-record gradients in, params that are private prefix sums out."""
    plan = make(
        sampling=EPOCHS, num_steps=60, noise_multiplier=0.1, prefix_noise="blt_2"
    )
    data = jnp.asarray(rows(3), jnp.float32)
    tx = optax.chain(jaxdp.private_prefix_sum(plan, KEYS), optax.sgd(0.5))

    def body(carry: Any, t: jax.Array) -> Any:
        x, state = carry
        batch = sampling.batch(plan, KEYS, t, data)
        per_record = jax.vmap(
            jax.grad(lambda x, z: jnp.sum((x - z) ** 2) / 2), (None, 0)
        )
        updates, state = tx.update(per_record(x, batch.records), state, x, batch=batch)
        return (optax.apply_updates(x, updates), state), None

    start = (jnp.ones(D), tx.init(jnp.ones(D)))
    (x, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(60)))(start)
    assert np.linalg.norm(x - rows(3).mean(axis=0)) < 0.3
    assert jaxdp.public(state)[0].noise is None
    assert jaxdp.report(plan, state)["steps_done"] == 60


def test_wrong_arguments_are_named() -> None:
    plan = make()
    tx = jaxdp.private_prefix_sum(plan, KEYS)
    state = tx.init(jnp.zeros(D))
    batch = sampling.batch(plan, KEYS, 0, jnp.zeros((N, D)))
    with pytest.raises(ValueError, match="4 rows; got 3"):
        tx.update(batch.records[:3], state, batch=batch)
    with pytest.raises(ValueError, match="got raw arrays"):
        tx.update(batch.records, state, batch=batch.records)
    other = plans.DPGD(
        num_examples=N,
        num_steps=2,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
    )
    with pytest.raises(ValueError, match="family 'prefix_sum', got DPGD"):
        jaxdp.private_prefix_sum(other, KEYS)
    with pytest.raises(ValueError, match="plan must be one whose transformation reads"):
        jaxdp.fit(
            plan,
            KEYS,
            jnp.zeros(D),
            jnp.zeros((N, D)),
            value_fn=lambda p, b: b,
            optimizer=optax.sgd(0.1),
        )
    with pytest.raises(TypeError, match=r"jaxdp\.Keys"):
        jaxdp.private_prefix_sum(plan, jax.random.key(0))
