"""DPZero: its law, its sensitivity, its noise (digest, section 6)."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.stats

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys
from jaxdp.dpzero.transform import draw_directions, laplace_noise
from jaxdp.kernels import lattice_gaussian, sphere
from tests import drawn


def make_plan(**changes: Any) -> plans.DPZero:
    base: dict[str, Any] = {
        "num_examples": 8,
        "num_steps": 4,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 2.0,
        "smoothing_radius": 1e-2,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
    }
    return plans.DPZero(**(base | changes))


# The whole iteration against its closed form.

HESSIAN = np.array([1, 1 / 2, 1 / 3, 1 / 4])


def second_moment(law: str, steps: int, lr: float, noise_std: float) -> np.ndarray:
    """E x x^T after ``steps``, from the recursion of the digest's test 1."""
    d = HESSIAN.size
    a, p = np.diag(HESSIAN), np.ones((d, d))
    for _ in range(steps):
        m = a @ p @ a
        q = 2 * m + np.trace(m) * np.eye(d)
        if law == "sphere":
            q = d / (d + 2) * q
        if law == "rademacher":
            q = q - 2 * np.diag(np.diag(m))
        drift = a @ p + p @ a
        p = p - lr * drift + lr**2 * (q + noise_std**2 * np.eye(d))
    return p


@pytest.mark.slow  # A study; each number is in the tests around.
@pytest.mark.parametrize(
    ("law", "printed"),
    [
        ("sphere", 0.3336517),
        pytest.param("gaussian", 0.3446647, marks=pytest.mark.slow),
        pytest.param("rademacher", 0.3326139, marks=pytest.mark.slow),
    ],
)
def test_closed_form_law_of_the_whole_iteration(law: str, printed: float) -> None:
    lr, noise_std, steps, clip = 0.05, 0.3, 20, 64.0
    want = 0.5 * HESSIAN @ np.diag(second_moment(law, steps, lr, noise_std))
    assert want == pytest.approx(printed, abs=1e-6)
    plan = make_plan(
        num_examples=1,
        num_steps=steps,
        relation="zero_out",
        l2_clip_norm=clip,
        noise_multiplier=noise_std / clip,
        direction=law,
    )
    assert plan.noise_std == pytest.approx(noise_std)

    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum(HESSIAN * params**2) + 0 * batch

    def run(seed: jax.Array) -> jax.Array:
        tx = optax.chain(jaxdp.dpzero(plan, Keys.insecure(seed)), optax.scale(-lr))

        def body(_: int, carry: Any) -> Any:
            params, state = carry
            updates, state = tx.update(
                None, state, params, value_fn=loss, batch=jnp.zeros(1)
            )
            return optax.apply_updates(params, updates), state

        start = jnp.ones(4)
        params, _ = jax.lax.fori_loop(0, steps, body, (start, tx.init(start)))
        return 0.5 * jnp.sum(HESSIAN * params**2)

    runs = 200_000
    values = np.asarray(jax.jit(jax.vmap(run))(jnp.arange(runs)), np.float64)
    error = values.std() / math.sqrt(runs)
    assert error < 7e-4
    # Five standard errors: failure probability 6e-7.
    assert abs(values.mean() - want) < 5 * error
    for wrong in (noise_std / 2, noise_std * 2):  # The test would notice.
        other = 0.5 * HESSIAN @ np.diag(second_moment(law, steps, lr, wrong))
        assert abs(values.mean() - other) > 5 * error


# Sensitivity.

SIGNS = jnp.asarray([1, -1, 1, 1, -1, 1, -1, 1], jnp.float32)


def adversarial(params: jax.Array, batch: jax.Array) -> jax.Array:
    """s_i M v^T x: every slope is far beyond the clip."""
    return batch * 1e6 * jnp.sum(params)


@functools.cache
def silent_step(plan: plans.DPZero) -> Any:
    """(batch, mask) -> what one step releases, without noise; one program for a plan."""
    table = np.zeros((plan.num_steps, plan.num_directions), np.int32)
    tx = jaxdp.dpzero(plan, Keys.insecure(0), noise_table=table)
    params = jnp.ones(5)
    state = tx.init(params)

    def update(batch: jax.Array, mask: Any) -> jax.Array:
        given: Any = {"value_fn": adversarial, "batch": batch, "mask": mask}
        return tx.update(None, state, params, **given)[1].release

    return jax.jit(update)


def grid_total(plan: plans.DPZero, batch: jax.Array, mask: Any = None) -> np.ndarray:
    """The integer sum of one step, without noise."""
    release = silent_step(plan)(batch, mask)
    scale = plan.normalizer * 2.0**plan.grid_bits / plan.l2_clip_norm
    return np.rint(np.asarray(release, np.float64) * scale).astype(int)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out", "add_or_remove"])
def test_sensitivity_is_attained_exactly(relation: str) -> None:
    plan = make_plan(relation=relation)
    unit = 2**plan.grid_bits
    base = grid_total(plan, SIGNS)
    flipped = grid_total(plan, SIGNS.at[2].multiply(-1))
    zeroed = grid_total(plan, SIGNS.at[2].set(0))
    gone = grid_total(plan, SIGNS, jnp.arange(8) != 2)
    assert abs(flipped - base) == 2 * unit
    assert abs(zeroed - base) == unit
    np.testing.assert_array_equal(zeroed, gone)
    moved = {"replace_one": flipped}.get(relation, zeroed)
    share = abs(moved - base)[0] / unit * plan.l2_clip_norm
    assert share == pytest.approx(plan.sensitivity, rel=1e-12)


@pytest.mark.parametrize("num", [4, 256, pytest.param(2, marks=pytest.mark.slow)])
def test_sensitivity_of_several_directions_is_one_vector_clip(num: int) -> None:
    plan = make_plan(num_directions=num, direction="rademacher")
    unit = 2**plan.grid_bits
    moved = grid_total(plan, SIGNS.at[2].multiply(-1)) - grid_total(plan, SIGNS)
    squared = int((moved.astype(object) ** 2).sum())
    assert squared <= (2 * unit) ** 2
    assert squared > (2 * unit * 0.999) ** 2


@pytest.mark.parametrize(("direction", "most"), [("sphere", 1024), ("orthonormal", 64)])
def test_most_directions(direction: str, most: int) -> None:
    make_plan(num_directions=most, direction=direction)
    with pytest.raises(ValueError, match=f"num_directions must be .* <= {most}, got"):
        make_plan(num_directions=most + 1, direction=direction)


@pytest.mark.parametrize("num", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_sensitivity_under_laplace_is_in_l1(num: int) -> None:
    """Four slopes of one size: in L2 they could move the sum twice as far in L1."""
    plan = make_plan(num_directions=num, direction="rademacher", noise="laplace")
    unit = 2**plan.grid_bits
    base = grid_total(plan, SIGNS)
    for other, most in ((-1, 2 * unit), (0, unit)):
        moved = grid_total(plan, SIGNS.at[2].multiply(other)) - base
        assert 0.999 * most < np.abs(moved).sum() <= most


@pytest.mark.parametrize(
    "relation",
    [
        *("replace_one", "add_or_remove"),
        pytest.param("zero_out", marks=pytest.mark.slow),
    ],
)
def test_the_integers_have_the_std_that_epsilon_asks_for(relation: str) -> None:
    """From epsilon alone: Gaussian trade-off, adversarial sensitivity, drawn integers.

    What a run draws is the sampler's output for exactly this number of units.
    """
    epsilon, delta, steps = 2.0, 1e-5, 400
    plan = make_plan(num_steps=steps, relation=relation, noise_multiplier=None)
    plan = plan.calibrate(epsilon=epsilon, delta=delta)
    assert plan.epsilon(delta=delta) == pytest.approx(epsilon, rel=1e-6)
    unit = 2**plan.grid_bits
    flip = abs(grid_total(plan, SIGNS.at[2].multiply(-1)) - grid_total(plan, SIGNS))[0]
    distance = flip if relation == "replace_one" else unit

    def spent(mu: float) -> float:
        phi = scipy.stats.norm.cdf
        right = math.exp(epsilon) * phi(-epsilon / mu - mu / 2)
        return float(phi(-epsilon / mu + mu / 2) - right)

    mu = scipy.optimize.brentq(lambda x: spent(x) - delta, 1e-3, 10)
    want = distance * math.sqrt(steps) / mu
    # The sampler is charged for, and units are whole: a little more than the ideal noise.
    assert want <= plan.grid_noise_std < want * (1 + 1e-6) + 1
    assert drawn.std_of_sum(plan) == plan.grid_noise_std
    got = releases(plan, Keys.insecure(1))
    key = drawn.root(plan, Keys.insecure(1))
    law = lattice_gaussian.law(plan.grid_noise_std)
    table = [
        lattice_gaussian.draw(keys.at_step(key, jnp.int32(t)), (1,), law)
        for t in range(0, steps, 40)
    ]
    unit = np.float32(drawn.unit_of_sum(plan))
    np.testing.assert_array_equal(got[::40], np.float32(table) * unit)
    noise = got / unit
    # Relative error of a std from 400 draws: 1/sqrt(800); five of them.
    assert noise.std() == pytest.approx(want, rel=5 / math.sqrt(2 * steps))


def test_no_overflow_at_forty_thousand_records_full_batch() -> None:
    rows = 40_000
    plan = make_plan(num_examples=rows, num_steps=1, noise_multiplier=100.0)
    assert rows * 2**plan.grid_bits + 8 * plan.grid_noise_std < 2**31
    assert (rows * 2 + 8 * 400) * 2**plan.grid_bits > 2**30  # And no bit wasted.
    total = grid_total(plan, jnp.ones(rows))
    assert abs(total[0]) == rows * 2**plan.grid_bits


# Noise.


def constant(params: jax.Array, batch: jax.Array) -> jax.Array:
    return 0 * jnp.sum(params) + 0 * batch


SGD = optax.sgd(0.1)  # Once, for programs are known by it.


def releases(plan: plans.DPZero, keys: Keys) -> np.ndarray:
    result = jaxdp.fit(
        plan,
        keys,
        jnp.ones(3),
        jnp.ones(plan.num_examples),
        value_fn=constant,
        optimizer=SGD,
    )
    return np.asarray(result.info.releases)


@pytest.mark.parametrize(
    ("num", "relation"),
    [(1, "replace_one"), (3, "zero_out"), (1, "add_or_remove"), (256, "zero_out")],
)
def test_without_signal_the_releases_are_the_noise(num: int, relation: str) -> None:
    """Every integer of a run, from the plan's numbers and its keys."""
    plan = make_plan(
        num_steps=50, num_directions=num, relation=relation, noise_multiplier=1.7
    )
    run_keys = Keys.insecure(11)
    got = releases(plan, run_keys)
    want = drawn.sums(plan, run_keys, num)
    assert want.shape == (50, num)
    unit = drawn.unit_of_sum(plan)
    np.testing.assert_array_equal(drawn.in_units(got, unit), want)
    np.testing.assert_array_equal(got, want.astype(np.float32) * np.float32(unit))


@pytest.mark.slow  # A study; every integer is in the test above.
def test_noise_law() -> None:
    """Kolmogorov-Smirnov on 1e5 draws accepts the std and rejects 0.95 and 1.05 of it."""
    plan = make_plan(num_steps=2000, num_directions=50)
    draws = releases(plan, Keys.insecure(1)).ravel() / plan.noise_std

    def pvalue(std: float) -> float:
        return scipy.stats.kstest(draws, scipy.stats.norm(scale=std).cdf).pvalue

    assert draws.size == 100_000
    assert pvalue(1.0) > 1e-6 > max(pvalue(0.95), pvalue(1.05))
    assert abs(scipy.stats.kurtosis(draws)) < 5 * math.sqrt(24 / draws.size)


@pytest.mark.slow  # For every method in test_conformance.py.
def test_many_runs_in_one_program_draw_what_each_draws_alone() -> None:
    """Under vmap over traced keys: no kind of noise is kept for studies."""
    plan = make_plan(num_steps=3, num_directions=2)

    def run(seed: jax.Array) -> jax.Array:
        tx: Any = jaxdp.dpzero(plan, Keys.insecure(seed))
        params = jnp.ones(3)

        def step(state: Any, _: None) -> Any:
            given = {"value_fn": constant, "batch": jnp.ones(8)}
            _, state = tx.update(None, state, params, **given)
            return state, state.release

        return jax.lax.scan(step, tx.init(params), None, length=3)[1]

    got = jax.jit(jax.vmap(run))(jnp.arange(5))
    for seed in range(5):
        want = drawn.sums(plan, Keys.insecure(seed), 2)
        alone = drawn.in_units(got[seed], drawn.unit_of_sum(plan))
        np.testing.assert_array_equal(alone, want)


def test_gaussian_is_another_name_of_the_discrete_law() -> None:
    """Plans that were written when floats were noise: same plan, same digest, same run."""
    plan, other = make_plan(), make_plan(noise="gaussian")
    assert other == plan
    assert other.noise == "discrete"
    assert other.digest == plan.digest
    with pytest.raises(ValueError, match="noise must be one of 'discrete', 'laplace'"):
        make_plan(noise="normal")


def test_laplace_under_traced_keys_names_the_way_out() -> None:
    """It is drawn on the host when the transformation is built."""
    plan = make_plan(noise="laplace")
    with pytest.raises(ValueError, match='noise="discrete"'):
        jax.vmap(
            lambda seed: jaxdp.dpzero(plan, Keys.insecure(seed)).init(jnp.ones(3))
        )(jnp.arange(2))


def test_laplace_noise_law() -> None:
    """Of the stated standard deviation, and of the scale that epsilon asks for."""
    steps = 2000
    plan = make_plan(num_steps=steps, num_directions=50, noise="laplace")
    plan = plan.calibrate(epsilon=2.0, delta=0)
    table = laplace_noise(plan.numbers, Keys.insecure(1), "dpzero").ravel()
    assert plan.grid_bits is not None
    scale = steps * 2 ** (plan.grid_bits + 1) / 2.0  # One step costs 2 / steps.

    def pvalue(factor: float) -> float:
        law = scipy.stats.laplace(scale=factor * scale)
        return scipy.stats.kstest(table, law.cdf).pvalue

    assert pvalue(1.0) > 1e-6 > max(pvalue(0.95), pvalue(1.05))
    claimed = plan.noise_std / plan.l2_clip_norm * plan.normalizer * 2**plan.grid_bits
    assert math.sqrt(2) * scale == pytest.approx(claimed, rel=1e-6)
    got = releases(plan, Keys.insecure(1)).ravel()
    unit = plan.l2_clip_norm / 2**plan.grid_bits / plan.normalizer
    np.testing.assert_array_equal(got, table.astype(np.float32) * np.float32(unit))


# Every method with its own noise is in test_conformance.py.
@pytest.mark.parametrize(
    "noise", ["laplace", pytest.param("discrete", marks=pytest.mark.slow)]
)
def test_noise_ignores_the_direction_root_and_follows_the_noise_root(
    noise: str,
) -> None:
    plan = make_plan(noise=noise, num_steps=30)
    one, other = Keys.insecure(1), Keys.insecure(2)
    base = releases(plan, one)
    moved = dataclasses.replace(one, direction=other.direction)
    np.testing.assert_array_equal(base, releases(plan, moved))
    # Laplace noise is drawn on the host, from words of its own.
    root = "noise_words" if noise == "laplace" else "noise"
    changed = dataclasses.replace(one, **{root: getattr(other, root)})
    assert not np.any(base == releases(plan, changed))
    other_root = "noise" if noise == "laplace" else "noise_words"
    same = dataclasses.replace(one, **{other_root: getattr(other, other_root)})
    np.testing.assert_array_equal(base, releases(plan, same))


def test_directions_ignore_the_noise_root() -> None:
    one, other = Keys.insecure(1), Keys.insecure(2)
    plan = make_plan(num_steps=1)

    @jax.jit
    def update(k: Keys) -> jax.Array:
        tx = jaxdp.dpzero(plan, k)
        out, state = tx.update(
            None,
            tx.init(jnp.ones(6)),
            jnp.ones(6),
            value_fn=constant,
            batch=jnp.ones(8),
        )
        return out / state.release

    mixed = dataclasses.replace(one, noise=other.noise, noise_words=other.noise_words)
    np.testing.assert_allclose(update(one), update(mixed), rtol=1e-6)
    assert not np.allclose(update(one), update(other))


def test_large_noise_leaves_fewer_bits_and_never_wraps() -> None:
    """Every standard deviation is a law of the sampler's; the most is 2**28 units."""
    for multiplier in (0.1, 10.0, 500.0, 2000.0, 1e5, 4e5):
        plan = make_plan(noise_multiplier=multiplier)
        bits, std = plan.grid_bits, plan.grid_noise_std
        assert bits == drawn.bits_of_sum(plan)
        assert std == drawn.std_of_sum(plan) <= lattice_gaussian.MAX_STD
        assert 8 * 2**bits + 8 * (std - 1) < 2**31
        lattice_gaussian.law(std)
    assert bits is not None and bits < 16
    with pytest.raises(ValueError, match="bits"):
        _ = make_plan(noise_multiplier=1e6)


# The normaliser and the batch.


def test_a_batch_of_three_and_of_seventy_divide_by_the_same_constant() -> None:
    sampler = sampling.TruncatedPoisson(sampling_prob=0.1, max_batch_size=90)
    plan = make_plan(num_examples=100, sampling=sampler)
    table = np.zeros((plan.num_steps, 1), np.int32)
    tx = jaxdp.dpzero(plan, Keys.insecure(0), noise_table=table)
    totals = []
    for size in (3, 70):
        mask = jnp.arange(90) < size
        start = jnp.zeros((), jnp.int32)
        batch = sampling.Batch(
            jnp.ones(90),
            mask,
            jnp.arange(90),
            sampler,
            100,
            private=False,
            phase="step",
            step=start,
        )
        _, state = tx.update(
            None, tx.init(jnp.ones(5)), jnp.ones(5), value_fn=adversarial, batch=batch
        )
        totals.append(abs(float(state.release[0])) / size)
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)
    assert totals[0] == pytest.approx(plan.l2_clip_norm / 10, rel=1e-6)


# Limits.


def step(tx: Any, params: Any, loss: Any, data: Any) -> Any:
    """The first step of a transformation, compiled."""
    state = tx.init(params)
    return jax.jit(lambda s, p: tx.update(None, s, p, value_fn=loss, batch=data))(
        state, params
    )


def test_one_direction_of_several_is_dpzero_itself() -> None:
    """A6 with K = 1 is A4: same direction, slope and sum, whatever K's code does."""
    one = make_plan(num_directions=1)
    zeros = np.zeros((4, 1), np.int32)
    tx = jaxdp.dpzero(one, Keys.insecure(0), noise_table=zeros)
    data = jnp.linspace(-1, 1, 8)

    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sum(params) + batch)

    params = jnp.arange(5.0)
    _, state = step(tx, params, loss, data)
    two = make_plan(num_directions=2, l2_clip_norm=2e3)  # The clip is not active.
    ty = jaxdp.dpzero(two, Keys.insecure(0), noise_table=np.zeros((4, 2), np.int32))
    _, state2 = step(ty, params, loss, data)
    unit = 2e3 / 2**two.grid_bits
    assert abs(float(state.release[0] - state2.release[0])) < 2 * unit


@pytest.mark.parametrize("law", ["gaussian", "sphere"])
def test_small_directions_are_drawn_once_and_replayed_to_the_bit(law: str) -> None:
    """Both signs and the update read them; a replay, another program, computes the same."""
    plan = make_plan(num_directions=3, direction=law)
    tx, data = jaxdp.dpzero(plan, Keys.insecure(0)), jnp.linspace(-1, 1, 8)
    params = {"w": jnp.linspace(-1, 1, 640).reshape(64, 10), "b": jnp.arange(10.0)}

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sum(params["w"] * params["b"]) + batch)

    start = tx.init(params)
    one = jax.jit(lambda s, p: tx.update(None, s, p, value_fn=loss, batch=data))
    updates, state = one(start, params)
    again = plan.replay(Keys.insecure(0).direction)
    follow = jax.jit(lambda s, p, r: again.update(None, s, p, release=r))
    replayed, _ = follow(again.init(params), params, state.release)
    jax.tree.map(np.testing.assert_array_equal, updates, replayed)
    rows = draw_directions(
        plan.numbers, start.direction, params, lambda path: path == "w", None
    )
    assert rows.stored["w"].shape == (3, 64, 10)


def test_smoothing_radius_zero_is_the_limit() -> None:
    """The forward-mode variant equals small radii on a smooth loss."""
    data = jnp.linspace(-1, 1, 8)

    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sum(params) + batch)

    def release(radius: float) -> float:
        plan = make_plan(smoothing_radius=radius)
        tx = jaxdp.dpzero(
            plan, Keys.insecure(0), noise_table=np.zeros((4, 1), np.int32)
        )
        params = jnp.arange(5.0)
        _, state = step(tx, params, loss, data)
        return float(state.release[0])

    errors = [abs(release(r) - release(0)) for r in (0.3, 0.1, 0.03)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert errors[2] < 1e-2 * abs(release(0))


def test_wrong_noise_tables_are_refused() -> None:
    plan = make_plan()
    for bad in (np.zeros((4, 2), np.int32), np.zeros((4, 1), np.float32)):
        with pytest.raises(ValueError, match="noise_table"):
            jaxdp.dpzero(plan, Keys.insecure(0), noise_table=bad)


def test_handed_in_noise_is_not_vouched_for() -> None:
    plan, secret = make_plan(), Keys.from_entropy()
    own = jaxdp.dpzero(plan, secret).init(jnp.ones(5))
    table = drawn.sums(plan, secret, 1).astype(np.int32)
    tx = jaxdp.dpzero(plan, secret, noise_table=table)
    with pytest.raises(ValueError, match="already served"):  # It samples the same.
        tx.init(jnp.ones(5))
    tx = jaxdp.dpzero(plan, Keys.from_entropy(), noise_table=table)
    given = tx.init(jnp.ones(5))
    assert jaxdp.report(plan, own)["private"] is True
    assert jaxdp.report(plan, given)["private"] is False


def test_clipping_the_vectors_is_clipping_the_slopes() -> None:
    """All records share one direction: clip_C(s u) = clip_{C/|u|}(s) u (digest A1)."""
    data = jnp.linspace(-3, 3, 8)
    params = jnp.arange(5.0)

    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sum(params) * batch)

    vector_clip = 1.5
    plan = make_plan(l2_clip_norm=vector_clip / math.sqrt(5))
    tx = jaxdp.dpzero(plan, Keys.insecure(0), noise_table=np.zeros((4, 1), np.int32))
    state = tx.init(params)
    got, _ = step(tx, params, loss, data)
    rows = sphere.directions(keys.at_step(state.direction, 0), params, law="sphere")
    u = np.asarray(sphere.materialise(sphere.select(rows, 0), params), np.float64)
    plus, minus = (np.asarray(loss(params + s * u, data)) for s in (1e-2, -1e-2))
    vectors = ((plus - minus) / 2e-2)[:, None] * u
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert (norms > vector_clip).sum() >= 3
    clipped = vectors * np.minimum(1, vector_clip / norms)
    np.testing.assert_allclose(got, clipped.mean(axis=0), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "law",
    [
        "sphere",
        *(
            pytest.param(law, marks=pytest.mark.slow)
            for law in ("rademacher", "gaussian")
        ),
    ],
)
def test_stacked_leaves_draw_layer_by_layer(law: str) -> None:
    """A lazy two-layer scan and the materialised loss release the same bits."""
    params = {"layers": jax.random.normal(jax.random.key(0), (2, 4, 4))}
    data = jax.random.normal(jax.random.key(1), (8, 4))

    def plain(params: Any, batch: jax.Array) -> jax.Array:
        out, _ = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"]
        )
        return out.sum(axis=1)

    def lazy(params: Any, batch: jax.Array, at: Any) -> jax.Array:
        def layer(x: jax.Array, row: Any) -> Any:
            i, w = row
            return jnp.tanh(x @ at("layers", w, layer=i, after=x)), None

        rows = (jnp.arange(2), params["layers"])
        return jax.lax.scan(layer, batch, rows)[0].sum(axis=1)

    tx: Any = jaxdp.dpzero(
        make_plan(direction=law), Keys.insecure(0), stacked=lambda p: p == "layers"
    )
    out = [step(tx, params, fn, data) for fn in (plain, jaxdp.LazyLoss(lazy))]
    np.testing.assert_array_equal(out[0][0]["layers"], out[1][0]["layers"])
    np.testing.assert_array_equal(out[0][1].release, out[1][1].release)


def test_a_layer_of_an_undeclared_leaf_is_refused() -> None:
    def lazy(params: Any, batch: jax.Array, at: Any) -> jax.Array:
        return batch * jnp.sum(at("w", params["w"][0], layer=0))

    params = {"w": jnp.ones((2, 3))}
    tx = jaxdp.dpzero(make_plan(), Keys.insecure(0))
    with pytest.raises(ValueError, match="stacked="):
        tx.update(
            None,
            tx.init(params),
            params,
            value_fn=jaxdp.LazyLoss(lazy),
            batch=jnp.ones(8),
        )


def test_too_many_orthonormal_rows_are_refused_at_init() -> None:
    plan = make_plan(direction="orthonormal", num_directions=6)
    with pytest.raises(ValueError, match="orthonormal"):
        jaxdp.dpzero(plan, Keys.insecure(0)).init(jnp.ones(5))
