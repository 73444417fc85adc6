"""Private clip tuning: what it releases, whither it moves, and what it reveals."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.mechanism.clip_tuning import next_clip
from tests import drawn

TUNING = plans.ClipTuning(
    target_unclipped_quantile=0.7, learning_rate=0.2, count_noise_multiplier=3.0
)


def make_plan(**changes: Any) -> plans.DPZero:
    base: dict[str, Any] = {
        "num_examples": 6,
        "num_steps": 3,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 2.0,
        "smoothing_radius": 0.0,
        "direction": "rademacher",
        "noise_multiplier": 1.0,
        "clip_tuning": TUNING,
        "delta": 1e-5,
    }
    return plans.DPZero(**(base | changes))


def linear(params: jax.Array, batch: jax.Array) -> jax.Array:
    """The slopes of record i along any of our directions are +-batch[i]."""
    return batch * params[0]


def run(
    plan: plans.DPZero, keys: Keys, data: Any, mask: Any = None, table: Any = None
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Releases and clips of every step, the clip after the last, and the state."""
    tx: Any = jaxdp.dpzero(plan, keys, noise_table=table)
    params = jnp.zeros(2)

    def body(state: Any, _: None) -> Any:
        clip = state.clip
        _, state = tx.update(
            None, state, params, value_fn=linear, batch=data, mask=mask
        )
        return state, (state.release, clip)

    @jax.jit
    def steps(state: Any) -> Any:
        return jax.lax.scan(body, state, None, length=plan.num_steps)

    state, (releases, clips) = steps(tx.init(params))
    return np.asarray(releases), np.append(clips, state.clip), state


# What one record does.


def integers(
    data: list[list[float]], masks: list[list[bool]] | None = None, num: int = 1
) -> np.ndarray:
    """For each data set, the sums of one step without noise, in units of 2**-k."""
    plan = make_plan(num_steps=1, num_directions=num)
    table = np.zeros((1, num + 1), np.int32)
    tx: Any = jaxdp.dpzero(plan, Keys.insecure(0), noise_table=table)
    params = jnp.zeros(2)

    @jax.jit
    @jax.vmap
    def release(batch: jax.Array, mask: jax.Array) -> jax.Array:
        start = tx.init(params)
        given = {"value_fn": linear, "batch": batch, "mask": mask}
        return tx.update(None, start, params, **given)[1].release

    records = jnp.asarray(data, jnp.float32)
    there = np.ones(records.shape, bool) if masks is None else np.asarray(masks)
    unit = np.full(num + 1, plan.l2_clip_norm)
    unit[-1] = 0.5
    exact = np.asarray(release(records, jnp.asarray(there)), np.float64)
    return np.rint(exact * plan.normalizer / unit * 2**plan.grid_bits).astype(int)


OTHERS = [0.5, -1.0, 5.0, -7.0, 0.0]
# A record and what it adds to the count, in halves.
RECORDS = [
    (0.0, 1),
    (1.5, 1),
    (-2.0, 1),
    (2.1, -1),
    (-1e30, -1),
    (math.nan, 0),
    (math.inf, 0),
]


@pytest.mark.parametrize("num", [1, 3])
def test_a_record_counts_a_half_for_or_against(num: int) -> None:
    size, unit = math.sqrt(num), 2**16  # Of the vector of K slopes; of a half.
    gone = integers([[*OTHERS, 0.0]], [[True] * 5 + [False]], num)
    moves = integers([[*OTHERS, x / size] for x, _ in RECORDS], num=num) - gone
    assert (moves[:, -1] // unit).tolist() == [half for _, half in RECORDS]
    squared = np.square(moves[:, :-1]).sum(axis=1)
    assert squared.max() <= unit**2
    # Two records differ by at most twice as much, in the sums and in the count.
    apart = moves[:, None] - moves
    assert np.square(apart[..., :-1]).sum(axis=-1).max() <= (2 * unit) ** 2
    assert np.abs(apart[..., -1]).max() == 2 * unit


def test_padded_rows_count_nothing_whatever_they_hold() -> None:
    """A padded row's slope may be small: then it would count as within the clip."""
    data = [[*OTHERS, record] for record, _ in RECORDS]
    got = integers(data, [[True] * 5 + [False]] * len(data))
    assert np.all(got == got[0])
    assert got[0, -1] == (3 - 2) * 2**16
    np.testing.assert_array_equal(integers(data, [[False] * 6] * len(data)), 0)


def test_the_count_has_noise_of_its_own() -> None:
    """Of its own key and law: every integer of sums and counts, from the plan alone."""
    plan = make_plan(num_steps=2000, num_directions=2)
    keys = Keys.insecure(3)
    # Records that are no numbers count nothing: what is left is noise.
    releases, clips, _ = run(plan, keys, jnp.full(6, jnp.nan))
    bits = drawn.bits_of_sum(plan)
    # The unit of sums follows the clip; that of counts is of a half.
    slope_units = clips[:-1, None].astype(np.float64) / 2**bits / plan.normalizer
    slopes = np.rint(releases[:, :2] / slope_units).astype(np.int64)
    np.testing.assert_array_equal(slopes, drawn.sums(plan, keys, 2))
    count = drawn.in_units(releases[:, 2], 0.5 / 2**bits / plan.normalizer)
    np.testing.assert_array_equal(count, drawn.counts(plan, keys))
    assert plan.grid_noise_std == drawn.std_of_sum(plan)
    assert plan.numbers.count_grid is not None
    assert plan.numbers.count_grid.noise_std == drawn.whole(3 * 2 * 2**16)
    table = np.concatenate([slopes, count[:, None]], axis=1).astype(np.float64)
    # Relative error of a std from n draws: 1 / sqrt(2 n); five of them.
    for column, std in zip(
        table.T, (plan.grid_noise_std,) * 2 + (6 * 2**16,), strict=True
    ):
        assert column.std() == pytest.approx(std, rel=5 / math.sqrt(2 * 2000))
    correlation = np.abs(np.corrcoef(table.T) - np.eye(3))
    assert correlation.max() < 5 / math.sqrt(2000)
    other, _, _ = run(plan, Keys.insecure(4), jnp.full(6, jnp.nan))
    assert np.mean(other == releases) < 1e-3


def test_sum_and_count_together_cost_what_the_plan_says() -> None:
    """Moves over noise, squared and added: the pair is one Gaussian of m."""
    for m in (0.5, 1.0, 2.9):
        plan = make_plan(noise_multiplier=m)
        assert plan.numbers.count_grid is not None
        unit = 2 * 2**plan.grid_bits  # A replaced record: two clips, or two halves.
        squared = (unit / plan.grid_noise_std) ** 2 + (
            unit / plan.numbers.count_grid.noise_std
        ) ** 2
        assert squared <= m**-2
        assert squared == pytest.approx(m**-2, rel=1e-4)


# Where the clip goes.


@pytest.mark.parametrize("start", [0.01, 300.0])
def test_the_clip_finds_the_quantile(start: float) -> None:
    sizes = np.linspace(0.1, 10.0, 1000)
    signs = np.where(np.arange(1000) % 2, 1, -1)
    plan = make_plan(num_examples=1000, num_steps=300, l2_clip_norm=start)
    data = jnp.asarray(sizes * signs, jnp.float32)
    _, clips, _ = run(plan, Keys.insecure(0), data)
    want = np.quantile(sizes, 0.7)
    assert not 0.2 < clips[0] / want < 5
    # The count's noise is 0.006 of the records; 30 steps of memory leave little of it.
    np.testing.assert_allclose(clips[-50:], want, rtol=0.05)


def test_the_releases_alone_give_the_clips() -> None:
    """Bit for bit: by the formula, and by the transformation that replays a run."""
    plan = make_plan(num_steps=20, num_directions=2)
    keys = Keys.insecure(1)
    data = jnp.asarray([*OTHERS, 1.9])
    releases, clips, state = run(plan, keys, data)
    assert len(set(clips.tolist())) > 15
    step = jax.jit(lambda clip, count: next_clip(TUNING, clip, count))
    clip = jnp.float32(plan.l2_clip_norm)
    for t in range(20):
        assert clip == clips[t]
        want = clips[t] * math.exp(-0.2 * (float(releases[t, -1]) + 0.5 - 0.7))
        clip = step(clip, releases[t, -1])
        assert float(clip) == pytest.approx(want, rel=1e-6)
    tx = plan.replay(keys.direction)

    @jax.jit
    def replayed(start: Any) -> Any:
        def body(state: Any, release: jax.Array) -> Any:
            clip = state.clip
            _, state = tx.update(None, state, jnp.zeros(2), release=release)
            return state, clip

        return jax.lax.scan(body, start, jnp.asarray(releases))

    again, seen = replayed(tx.init(jnp.zeros(2)))
    np.testing.assert_array_equal(seen, clips[:-1])
    assert again.clip == state.clip


def test_sums_are_bounded_by_the_clip_of_their_step() -> None:
    """Records far beyond every clip: the sum is their number times the current one."""
    plan = make_plan(num_steps=8, relation="zero_out", noise_multiplier=0.01)
    releases, clips, _ = run(plan, Keys.insecure(2), jnp.full(6, 1e20))
    assert len(set(clips.tolist())) == 9
    np.testing.assert_allclose(np.abs(releases[:, 0]), clips[:-1], rtol=0.05)


def test_past_the_horizon_the_clip_stands_still() -> None:
    plan = make_plan(num_steps=2)
    tx = jaxdp.dpzero(plan, Keys.insecure(0))
    state, seen = tx.init(jnp.zeros(2)), []
    update = jax.jit(
        lambda s: tx.update(
            None, s, jnp.zeros(2), value_fn=linear, batch=jnp.asarray([*OTHERS, 1.0])
        )[1]
    )
    for _ in range(4):
        state = update(state)
        seen.append(float(state.clip))
    assert len(set(seen)) == 2
    assert seen[1] == seen[2] == seen[3]
    assert not state.release.any()


def test_clips_stay_in_the_range_of_plans() -> None:
    for count, limit in ((1e6, 1e-30), (-1e6, 1e30)):
        got = next_clip(TUNING, jnp.float32(1.0), jnp.float32(count))
        assert float(got) == pytest.approx(limit, rel=1e-6)


# The state, and whole runs.


def test_the_clip_is_public_and_nothing_else_is_new() -> None:
    plan = make_plan()
    _, clips, state = run(plan, Keys.insecure(0), jnp.asarray([*OTHERS, 1.0]))
    shown = jaxdp.public(state)
    assert shown.noise is None
    assert shown.clip == clips[-1]
    fixed = jaxdp.dpzero(make_plan(clip_tuning=None), Keys.insecure(0))
    assert fixed.init(jnp.zeros(2)).clip is None


def test_wrong_noise_tables_are_refused() -> None:
    table = np.zeros((3, 1), np.int32)
    with pytest.raises(ValueError, match="noise_table"):
        jaxdp.dpzero(make_plan(), Keys.insecure(0), noise_table=table)


def test_a_run_with_a_ledger_is_replayed_to_the_bit(tmp_path: Any) -> None:
    plan = make_plan(num_steps=12)
    data, params = jnp.asarray([*OTHERS, 1.0]), jnp.zeros(2)
    result = jaxdp.fit(
        plan,
        Keys.insecure(0),
        params,
        data,
        value_fn=linear,
        optimizer=optax.sgd(0.1),
        ledger=tmp_path / "run",
        chunk=5,
    )
    assert result.info.releases.shape == (12, 2)
    again = jaxdp.replay(tmp_path / "run", params, optimizer=optax.sgd(0.1))
    np.testing.assert_array_equal(again.params, result.params)
    np.testing.assert_array_equal(again.info.releases, result.info.releases)
    assert result.report["epsilon"] == pytest.approx(float(plan.epsilon(delta=1e-5)))
