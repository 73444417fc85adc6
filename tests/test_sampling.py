"""Samplers: shapes, laws, uniform truncation, refusals."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp import Keys, plans, sampling

N = 40
DATA = (jnp.arange(N, dtype=jnp.float32), jnp.arange(N))


def plan(sampler: Any, num_examples: int = N) -> plans.DPZero:
    return plans.DPZero(
        num_examples=num_examples,
        num_steps=10,
        sampling=sampler,
        relation="add_or_remove",
        l2_clip_norm=1.0,
        smoothing_radius=0.1,
    )


def draw(sampler: Any, steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Records (steps, B) and masks of many steps."""
    p = plan(sampler)
    keys = Keys.insecure(seed)
    out = jax.jit(jax.vmap(lambda step: sampling.batch(p, keys, step, DATA)))(
        jnp.arange(steps)
    )
    return np.asarray(out.records[1]), np.asarray(out.mask)


def test_full_batch_reads_every_record_in_order() -> None:
    batch = sampling.batch(plan(sampling.FullBatch()), Keys.insecure(0), 3, DATA)
    np.testing.assert_array_equal(batch.records[1], DATA[1])
    assert np.all(batch.mask)
    assert batch.sampler == sampling.FullBatch()


def test_poisson_joins_each_record_independently() -> None:
    """Counts are binomial, records and pairs are uncorrelated (failure < 1e-6)."""
    q, steps = 0.2, 20_000
    records, mask = draw(
        sampling.TruncatedPoisson(sampling_prob=q, max_batch_size=N), steps
    )
    member = np.zeros((steps, N), bool)
    rows = np.repeat(np.arange(steps)[:, None], records.shape[1], 1)
    member[rows[mask], records[mask]] = True
    assert member.sum() == mask.sum()  # No record twice in a step.
    per_record = member.mean(axis=0)
    bound = scipy.stats.norm.isf(1e-8) * math.sqrt(q * (1 - q) / steps)
    assert np.abs(per_record - q).max() < bound
    sizes = mask.sum(axis=1)
    expected = scipy.stats.binom.pmf(np.arange(N + 1), N, q) * steps
    keep = expected > 5
    counts = np.bincount(sizes, minlength=N + 1)
    assert (
        scipy.stats.chisquare(
            np.append(counts[keep], counts[~keep].sum()),
            np.append(expected[keep], expected[~keep].sum()),
        ).pvalue
        > 1e-6
    )
    correlation = np.corrcoef(member.T) - np.eye(N)
    assert np.abs(correlation).max() < scipy.stats.norm.isf(1e-10) / math.sqrt(steps)


def test_overflow_keeps_a_uniform_subset_not_the_lowest_indices() -> None:
    size, steps = 4, 20_000
    records, mask = draw(
        sampling.TruncatedPoisson(sampling_prob=0.5, max_batch_size=size), steps
    )
    assert records.shape == (steps, size)
    assert mask.mean() > 0.99
    counts = np.bincount(records[mask], minlength=N)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6
    low = (records[mask] < N // 2).mean()
    assert abs(low - 0.5) < 4.9 * 0.5 / math.sqrt(mask.sum())


def test_masked_rows_follow_the_sampled_ones_and_empty_steps_happen() -> None:
    records, mask = draw(
        sampling.TruncatedPoisson(sampling_prob=0.01, max_batch_size=8), 500
    )
    assert np.all(np.sort(mask, axis=1)[:, ::-1] == mask)
    assert np.any(~mask.any(axis=1))
    assert records.min() >= 0
    assert records.max() < N


def test_steps_and_seeds_draw_anew_and_equal_keys_draw_the_same() -> None:
    sampler = sampling.TruncatedPoisson(sampling_prob=0.5, max_batch_size=N)
    first, again, other = (draw(sampler, 5, seed)[1].sum(axis=1) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert len(set(first.tolist())) > 1


def test_default_batch_size_leaves_four_deviations() -> None:
    sampler = sampling.TruncatedPoisson(sampling_prob=1 / 16)
    assert sampler.batch_size(1024) == 96
    assert sampler.expected_batch_size(1024) == 64
    assert sampling.TruncatedPoisson(sampling_prob=0.9).batch_size(10) == 10


@pytest.mark.parametrize("q", [0, 1, -0.1, math.nan, 2])
def test_sampling_prob_out_of_range_raises(q: float) -> None:
    with pytest.raises(ValueError, match="sampling_prob"):
        sampling.TruncatedPoisson(sampling_prob=q)


def test_max_batch_size_must_be_a_positive_integer() -> None:
    with pytest.raises(ValueError, match="max_batch_size"):
        sampling.TruncatedPoisson(sampling_prob=0.5, max_batch_size=0)
    with pytest.raises(TypeError, match="max_batch_size"):
        sampling.TruncatedPoisson(sampling_prob=0.5, max_batch_size=2.0)  # pyright: ignore[reportArgumentType]


def test_wrong_data_and_keys_raise() -> None:
    p = plan(sampling.FullBatch())
    with pytest.raises(ValueError, match="num_examples"):
        sampling.batch(p, Keys.insecure(0), 0, (jnp.ones(N - 1),))
    with pytest.raises(ValueError, match="num_examples"):
        sampling.batch(p, Keys.insecure(0), 0, ())
    with pytest.raises(TypeError, match="keys"):
        sampling.batch(p, jax.random.key(0), 0, DATA)  # pyright: ignore[reportArgumentType]


def test_batches_are_drawn_inside_a_compiled_loop() -> None:
    p = plan(sampling.TruncatedPoisson(sampling_prob=0.3, max_batch_size=N))
    keys = Keys.insecure(0)

    @jax.jit
    def total(data: Any) -> jax.Array:
        def body(step: jax.Array, acc: jax.Array) -> jax.Array:
            batch = sampling.batch(p, keys, step, data)
            return acc + jnp.where(batch.mask, batch.records[0], 0).sum()

        return jax.lax.fori_loop(0, 4, body, jnp.zeros(()))

    records, mask = draw(p.sampling, 4)
    assert float(total(DATA)) == np.where(mask, records, 0).sum()
