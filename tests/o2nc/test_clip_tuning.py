"""Clips of O2NC that follow a quantile: what one record moves, noise, charge, restarts."""

import dataclasses
import functools
import math
from typing import Any

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.mechanism.clip_tuning import next_clip
from tests import drawn

TUNING = plans.ClipTuning(
    target_unclipped_quantile=0.7, learning_rate=0.4, count_noise_multiplier=3.0
)
D, PERIOD, B1, B2 = 3, 3, 6, 2
KEYS = Keys.insecure(5)
SEVERAL: dict[str, Any] = {
    "sampling": sampling.MultiPassRestarts(period=PERIOD),
    "prefix_noise": "independent",
}


def make(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": 40,
        "num_steps": 10,
        "sampling": sampling.SinglePassRestarts(
            period=PERIOD, restart_batch_size=B1, batch_size=B2
        ),
        "relation": "replace_one",
        "restart_l2_clip_norm": 2.0,
        "l2_clip_norm": 0.6,
        "smoothing_radius": 0.1,
        "max_step": 1.0,
        "window": 3,
        "oracle": "first_order",
        "direction": "ball",
        "difference": "common",
        "prefix_noise": "tree",
        "noise_multiplier": 1.0,
        "clip_tuning": TUNING,
        "delta": 1e-5,
    }
    return plans.O2NC(**(base | changes))


def count_grid_of(plan: plans.O2NC) -> Any:
    return plan.numbers.count_grid


def squares(params: jax.Array, batch: jax.Array) -> jax.Array:
    """A record's gradient is its number, in every coordinate; so is a change of one."""
    return batch * jnp.sum(params + params**2 / 2)


@functools.cache
def stepped(plan: plans.O2NC, value_fn: Any) -> Any:
    """The transformation, and its step as one program for each phase."""
    tx: Any = jaxdp.private_oracle(plan, KEYS)

    def step(state: Any, params: Any, t: Any, data: Any, mask: Any, phase: str) -> Any:
        batch = sampling.batch(plan, KEYS, t, data, phase=phase)
        batch = dataclasses.replace(batch, mask=batch.mask & mask[: len(batch.mask)])
        given = {"value_fn": value_fn, "batch": batch, "phase": phase}
        _, after = tx.update(None, state, params, **given)
        return after

    return tx, jax.jit(step, static_argnums=5)


# --- what one record moves ---

OTHERS = [0.5, -1.0, 5.0, -7.0, 0.0]
#: A coordinate of a record's gradient over the clip, and what it adds to the count.
RECORDS = [(0.0, 1), (0.9, 1), (1.1, -1), (-1e30, -1), (math.nan, 0), (math.inf, 0)]


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1.7e4])
def test_a_record_moves_releases_by_what_is_charged_whatever_the_clip(
    factor: float,
) -> None:
    """Of both phases, in units of the noise: twice the bound; the count by one at most."""
    plan = make(num_steps=6, noise_multiplier=0.0)
    tx, step = stepped(plan, squares)
    grids, count_grid = plan.numbers.noise.grids, count_grid_of(plan)
    clip = jnp.full(2, grids["restart"].l2_clip_norm * factor, jnp.float32)
    before = tx.init(jnp.zeros(D))._replace(clip=clip)
    changes = step(
        before, jnp.zeros(D), 0, jnp.zeros(40), jnp.ones(B1, bool), "restart"
    )
    for phase, rows in (("restart", B1), ("difference", B2)):
        state, t = (before, 0) if phase == "restart" else (changes, 1)
        # At zero the gradient is a record's number; from there to one it grows by that.
        at = jnp.zeros(D) if phase == "restart" else jnp.ones(D)
        first, bound = (0 if t == 0 else B1), grids[phase].l2_clip_norm * factor
        unit = float(grids[phase].noise_unit) * factor
        limit = grids[phase].limit or 2 ** grids[phase].bits
        scale, sums, halves = bound / math.sqrt(D), [], []
        for value, there in [(x, True) for x, _ in RECORDS] + [(1.0, False)]:
            batch = [*(np.array(OTHERS[: rows - 1]) * scale), value * scale]
            data = jnp.zeros(40).at[first : first + rows].set(jnp.array(batch))
            mask = jnp.ones(rows, bool).at[-1].set(there)
            data, after = data.astype(jnp.float32), None
            after = step(state, at, t, data, mask, phase)
            increment = after.estimate - (0 if t == 0 else state.estimate)
            sums.append(np.rint(np.asarray(increment, np.float64) / unit))
            count = float(after.release[1]) / float(count_grid.noise_unit)
            halves.append(round(count / 2**count_grid.bits))
        moved = np.array(sums[:-1]) - sums[-1]
        # Of units that are 2**shift of the noise's.
        assert np.square(moved).sum(axis=1).max() <= (limit << grids[phase].shift) ** 2
        assert np.linalg.norm(moved[3]) > 0.99 * (limit << grids[phase].shift)
        apart = np.square(moved[:, None] - moved).sum(axis=-1)
        assert apart.max() <= (2 * limit << grids[phase].shift) ** 2
        counted = [half for _, half in RECORDS] if t == 0 else [0] * len(RECORDS)
        assert [half - halves[-1] for half in halves[:-1]] == counted


# --- noise, and where clips move ---


def test_noise_is_that_of_the_plan_over_clips_that_move_at_restarts() -> None:
    """Every integer, of keys of its own; each restart's clip follows the last count."""
    plan = make(noise_multiplier=2.0)
    tx, step = stepped(plan, squares)
    nothing, mask = jnp.full(40, jnp.nan), jnp.ones(B1, bool)
    names = [p.name for p in plan.phases for _ in range(p.num_steps)]
    state, seen = tx.init(jnp.zeros(D)), []
    for t in range(plan.num_steps):
        phase = names[t % PERIOD]
        after = step(state, jnp.zeros(D), t, nothing, mask, phase)
        kept = 0 if phase == "restart" else np.asarray(state.estimate, np.float64)
        seen.append((np.asarray(after.estimate, np.float64) - kept, after))
        state = after
    first = plan.numbers.noise.grids["restart"].l2_clip_norm
    assert float(seen[0][1].clip[0]) == np.float32(first)
    unit, std = drawn.unit_of_means(plan), drawn.std_of_node(plan)
    count_grid = count_grid_of(plan)
    root = keys_lib.stream(KEYS.noise, "counts", context=int(plan.digest[:8], 16))
    count_std = drawn.whole(3.0 * 2 * 2**count_grid.bits)
    for t, (increment, after) in enumerate(seen):
        period, at = divmod(t, PERIOD)
        if at == 0:
            key = keys_lib.at_step(drawn.correlated_root(plan, KEYS), period)
            want = drawn.increments(plan.correlation, key, std, D, PERIOD)
            if t:  # What the last restart of all released moved its clip.
                before = seen[t - PERIOD][1]
                moved = next_clip(TUNING, before.clip[0], before.release[1])
                assert float(after.clip[0]) == pytest.approx(float(moved), rel=1e-6)
                assert after.clip[0] == seen[t - 1][1].clip[1]
            count = float(after.release[1]) / float(count_grid.noise_unit)
            (integer,) = drawn.integers(keys_lib.at_step(root, t), count_std, 1)
            assert count == pytest.approx(integer, rel=1e-6, abs=0.5)
        else:
            assert np.array_equal(after.clip, seen[t - at][1].clip)
            assert after.release[1] == 0
        scale = unit * float(after.clip[0]) / first
        # An estimate is a float32 sum.
        np.testing.assert_allclose(increment / scale, want[at], rtol=1e-5, atol=3)
    clips = [float(after.clip[0]) for _, after in seen[::PERIOD]]
    assert np.ptp(clips) > 0.01 * first
    past = step(state, jnp.zeros(D), plan.num_steps, nothing, mask, names[1])
    assert np.array_equal(past.clip, state.clip) and not past.release.any()


def test_a_phase_at_another_step_moves_no_clip() -> None:
    tx, step = stepped(make(), squares)
    state = tx.init(jnp.zeros(D))
    data, mask = jnp.ones(40), jnp.ones(B1, bool)
    state = step(state, jnp.zeros(D), 0, data, mask, "restart")
    batch = sampling.batch(make(), KEYS, 0, data, phase="restart")
    batch = dataclasses.replace(batch, step=state.horizon.count)
    given: Any = {"value_fn": squares, "batch": batch, "phase": "restart"}
    after = jax.jit(lambda s: tx.update(None, s, jnp.zeros(D), **given)[1])(state)
    assert int(after.horizon.count) == 2
    np.testing.assert_array_equal(after.clip, state.clip)


def test_states_show_the_clip_and_hide_what_noise_is_drawn_from() -> None:
    state = jaxdp.public(jaxdp.private_oracle(make(), KEYS).init(jnp.zeros(D)))
    assert state.counts is None and state.noise is None
    assert state.clip.shape == (2,)


def test_clips_follow_the_quantile_of_the_norms_at_restarts() -> None:
    """From a clip that is ten times too large or too small, with next to no noise."""
    tuning = plans.ClipTuning(
        target_unclipped_quantile=0.5, learning_rate=0.7, count_noise_multiplier=1e-3
    )
    for start in (10.0, 0.1):
        plan = make(
            num_examples=50,
            num_steps=60,
            restart_l2_clip_norm=start,
            l2_clip_norm=0.3 * start,
            clip_tuning=tuning,
            noise_multiplier=1e-4,
            max_step=1e-3,
            **SEVERAL,
        )
        data = jnp.linspace(0.5, 1.5, 50)  # Norms are these, along one coordinate.
        result = jaxdp.fit(
            plan,
            KEYS,
            jnp.zeros(D),
            data,
            value_fn=lambda params, batch: batch * params[0],
        )
        counts = np.asarray(result.info.releases)[::PERIOD, 1]
        assert abs(counts[-1]) < 0.05 and abs(counts[0]) > 0.45


# --- what they cost ---


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
@pytest.mark.parametrize("several", [False, True])
def test_sums_and_counts_are_charged_as_one(relation: Any, several: bool) -> None:
    """From the integers alone, of every record: by what a step moves over its noise."""
    changes: dict[str, Any] = {"relation": relation} | (SEVERAL if several else {})
    tuned, plain = make(**changes), make(**changes, clip_tuning=None)
    assert float(tuned.epsilon()) == pytest.approx(float(plain.epsilon()), rel=1e-6)
    moves = drawn.moves(tuned)
    columns = np.square(tuned.correlation.strategy()).sum(axis=0)
    count_grid = count_grid_of(tuned)
    of_count = (moves * 2**count_grid.bits / count_grid.noise_std) ** 2
    costs = []
    for t in range(tuned.num_steps):
        phase = "difference" if t % PERIOD else "restart"
        grid = tuned.numbers.noise.grids[phase]
        bound = (grid.limit or 2**grid.bits) << grid.shift
        own = (moves * bound / grid.noise_std) ** 2 * columns[t % PERIOD]
        costs.append(own + (of_count if phase == "restart" else 0))
    cost = sum(costs) if several else max(costs)
    assert 0.98 < cost <= 1


def test_samples_and_counts_are_charged_by_step() -> None:
    """By hand: a restart's sum and its count are one sampled release."""
    sampler = sampling.MultiPassRestarts(
        period=PERIOD, restart_sampling_prob=0.3, sampling_prob=0.1
    )
    changes = SEVERAL | {"sampling": sampler, "num_examples": 1000}
    plan = make(**changes, noise_multiplier=1.5)
    restarts, size = 4, 300
    ours = plan.step_std("restart") * size / plan.restart_l2_clip_norm
    count = count_grid_of(plan)
    halves = count.noise_std / 2**count.bits  # Over a half, as the sum's over the clip.
    assert halves / 2 == pytest.approx(3.0 * math.sqrt(restarts) * 0.3, rel=1e-4)
    both = (ours**-2 + halves**-2) ** -0.5
    rest = plan.step_std("difference") * 100 / plan.l2_clip_norm
    rows = {p.name: p.batch_size for p in plan.phases}
    accountant = PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
    for q, name, std, steps in (
        (0.3, "restart", both, restarts),
        (0.1, "difference", rest, 10 - restarts),
    ):
        event = dp.TruncatedSubsampledGaussianDpEvent(1000, q, rows[name], std)
        accountant.compose(event, steps)
    want = accountant.get_epsilon(1e-5)
    assert float(plan.epsilon()) == pytest.approx(want, rel=1e-3)
    calibrated = plan.calibrate(epsilon=3.0, delta=1e-5)
    assert 2.99 < calibrated.epsilon() <= 3.0


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_calibration_comes_close_to_the_noise_of_the_counts(share: float) -> None:
    """The cost goes on beyond it without a jump, and the search turns back."""
    count = 22.58
    plan = make(
        **SEVERAL
        | {
            "num_examples": 2000,
            "sampling": sampling.MultiPassRestarts(
                period=3, restart_sampling_prob=0.5, sampling_prob=0.005
            ),
            "restart_l2_clip_norm": 98.0,
            "l2_clip_norm": 200.0,
            "clip_tuning": dataclasses.replace(TUNING, count_noise_multiplier=count),
        },
        noise_multiplier=share * count,
    )
    budget = 1.01 * plan.epsilon(delta=1e-6)
    found = plan.calibrate(epsilon=budget, delta=1e-6)
    assert found.noise_multiplier == pytest.approx(share * count, rel=0.02)
    assert 0.999 * budget < found.epsilon() <= budget


def test_a_shortened_plan_still_restarts_twice() -> None:
    short = jaxdp.auditing.shortened(make(), 1)
    assert isinstance(short, plans.O2NC) and short.clip_tuning == TUNING
    assert (short.num_steps, short.sampling.period) == (2, 1)
    assert short.epsilon() == pytest.approx(make().epsilon(), rel=1e-6)


@pytest.mark.parametrize("changes", [{}, SEVERAL], ids=["one pass", "several"])
def test_counts_need_a_share_of_the_noise(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="count_noise_multiplier must exceed"):
        make(**changes, noise_multiplier=3.0)
    with pytest.raises(ValueError, match="count_noise_multiplier must exceed"):
        make(**changes, noise_multiplier=None).calibrate(epsilon=0.9, delta=1e-5)


# --- plans ---


def test_nothing_is_promised_of_clips_that_move() -> None:
    plan = plans.O2NC.certified(
        num_examples=100_000,
        dim=20,
        epsilon=8.0,
        delta=1e-6,
        relation="replace_one",
        lipschitz=1.0,
        initial_gap=1.0,
        smoothing_radius=0.5,
    )
    assert plan.theorem is not None
    assert dataclasses.replace(plan, clip_tuning=TUNING).theorem is None


def test_texts_of_plans_without_tuning_have_none() -> None:
    assert "clip_tuning" not in make(clip_tuning=None).to_json()
    again = plans.from_json(make().to_json())
    assert again == make() and again.digest == make().digest
    assert make(clip_tuning=None).numbers.count_grid is None


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"clip_tuning": "median"}, TypeError, "clip_tuning must be"),
        (
            {
                "l2_clip_norm": math.inf,
                "restart_l2_clip_norm": math.inf,
                "noise_multiplier": None,
            },
            ValueError,
            "clip_tuning must be None without finite clips",
        ),
        ({"num_steps": 3}, ValueError, "clip_tuning must be None where a run has one"),
    ],
)
def test_wrong_tuning_is_named(changes: Any, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        make(**changes)
