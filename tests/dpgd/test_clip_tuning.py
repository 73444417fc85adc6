"""Clips of gradients that follow a quantile: what one record moves, noise, charge."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import Keys, dpgd, plans, sampling
from jaxdp.mechanism.clip_tuning import next_clip
from tests import drawn

TUNING = plans.ClipTuning(
    target_unclipped_quantile=0.7, learning_rate=0.2, count_noise_multiplier=3.0
)
D, BITS = 3, 16


def make(**changes: Any) -> plans.DPGD:
    base: dict[str, Any] = {
        "num_examples": 6,
        "num_steps": 3,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 2.0,
        "noise_multiplier": 1.0,
        "clip_tuning": TUNING,
        "delta": 1e-5,
    }
    return plans.DPGD(**(base | changes))


def linear(params: jax.Array, batch: jax.Array) -> jax.Array:
    """A record's gradient is the record."""
    return batch @ params


def run(plan: plans.DPGD, keys: Keys, data: Any) -> tuple[Any, Any, Any, Any]:
    """Gradients, counts and clips of all steps, and the last state."""
    tx: Any = dpgd(plan, keys)
    params = jnp.zeros(D)

    def step(state: Any, _: None) -> Any:
        clip = state.clip
        given = {"value_fn": linear, "batch": data}
        gradient, state = tx.update(None, state, params, **given)
        return state, (gradient, state.release[-1], clip)

    @jax.jit
    def steps(state: Any) -> Any:
        return jax.lax.scan(step, state, None, length=plan.num_steps)

    state, (gradients, counts, clips) = steps(tx.init(params))
    return gradients, counts, clips, state


OTHERS = [0.5, -1.0, 5.0, -7.0, 0.0]
#: A coordinate of a record's gradient, and what it adds to the count, in halves.
RECORDS = [
    (0.0, 1),
    (1.5, 1),
    (2.1, -1),
    (-1e30, -1),
    (math.nan, 0),
    (math.inf, 0),
]


def test_a_record_moves_sum_and_count_by_no_more_than_is_charged() -> None:
    plan = make(num_steps=1, noise_multiplier=0.0)
    tx: Any = dpgd(plan, Keys.insecure(0))
    params = jnp.zeros(D)

    @jax.jit
    @jax.vmap
    def released(last: jax.Array, there: jax.Array) -> tuple[jax.Array, jax.Array]:
        data = jnp.append(jnp.asarray(OTHERS, jnp.float32), last)
        mask = jnp.ones(6, bool).at[5].set(there)
        given = {"value_fn": linear, "batch": jnp.tile(data[:, None], D), "mask": mask}
        gradient, state = tx.update(None, tx.init(params), params, **given)
        return gradient, state.release[-1]

    lasts = jnp.asarray([x / math.sqrt(D) for x, _ in RECORDS] + [1e3], jnp.float32)
    there = jnp.asarray([True] * len(RECORDS) + [False])
    bits = plan.grid_bits
    assert bits == BITS
    gradients, counts = map(np.asarray, released(lasts, there))
    sums = np.rint(gradients.astype(np.float64) * 6 / 2.0 * 2**bits)
    halves = np.rint(counts.astype(np.float64) * 6 / 0.5 * 2**bits) / 2**bits
    sums, halves = sums[:-1] - sums[-1], halves[:-1] - halves[-1]
    assert halves.tolist() == [half for _, half in RECORDS]
    assert np.square(sums).sum(axis=1).max() <= (2**bits) ** 2
    apart = sums[:, None] - sums
    assert np.square(apart).sum(axis=-1).max() <= (2 * 2**bits) ** 2


def test_noise_of_sums_and_counts_is_that_of_the_plan() -> None:
    """Every integer, with keys of their own; the sums' unit is that of the step's clip."""
    plan, keys = make(num_steps=40), Keys.insecure(3)
    gradients, counts, clips, state = run(plan, keys, jnp.zeros((6, D)))
    unit = drawn.unit_of_sum(plan) * np.asarray(clips, np.float64) / plan.l2_clip_norm
    got = np.asarray(gradients, np.float64) / unit[:, None]
    np.testing.assert_allclose(got, drawn.sums(plan, keys, D), rtol=1e-6)
    # Gradients of zero are within: six halves.
    bits = drawn.bits_of_sum(plan)
    halves = np.asarray(counts, np.float64) * 6 / 0.5 * 2**bits - 6 * 2**bits
    np.testing.assert_allclose(halves, drawn.counts(plan, keys), atol=0.5, rtol=1e-6)
    for t, clip in enumerate(clips):
        after = clips[t + 1] if t + 1 < len(clips) else state.clip
        assert float(next_clip(TUNING, clip, counts[t])) == pytest.approx(float(after))
    assert np.ptp(np.asarray(clips)) > 0.01


def test_sum_and_count_are_charged_as_one_release() -> None:
    tuned, plain = make(), make(clip_tuning=None)
    assert tuned.epsilon() == plain.epsilon()
    both = (tuned.noise_std / plain.noise_std) ** -2 + 3.0**-2
    assert both == pytest.approx(1)
    with pytest.raises(ValueError, match="count_noise_multiplier must exceed"):
        make(noise_multiplier=3.0)


def test_the_clip_follows_the_quantile_of_the_norms() -> None:
    """From a clip that is a hundred times too large, with next to no noise."""
    tuning = plans.ClipTuning(
        target_unclipped_quantile=0.5, learning_rate=0.5, count_noise_multiplier=1e-3
    )
    norms = np.linspace(0.5, 1.5, 101)
    data = np.zeros((101, D), np.float32)
    data[:, 0] = norms
    plan = make(
        num_examples=101,
        num_steps=60,
        l2_clip_norm=100.0,
        clip_tuning=tuning,
        noise_multiplier=1e-4,
    )
    clips = np.asarray(run(plan, Keys.insecure(0), jnp.asarray(data))[2])
    assert abs(clips[-1] - 1.0) < 0.05
    assert clips[0] == 100


def test_texts_of_plans_without_tuning_have_none() -> None:
    assert "clip_tuning" not in make(clip_tuning=None).to_json()
    again = plans.from_json(make().to_json())
    assert again == make() and again.digest == make().digest
    assert plans.from_json(make(clip_tuning=None).to_json()).clip_tuning is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"clip_tuning": "median"}, TypeError),
        ({"l2_clip_norm": math.inf, "noise_multiplier": None}, ValueError),
    ],
)
def test_wrong_tuning_is_named(changes: dict[str, Any], error: type) -> None:
    with pytest.raises(error, match="clip_tuning"):
        make(**changes)
