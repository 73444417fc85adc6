"""Samplers: shapes, laws, uniform truncation, refusals."""

import copy
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import jaxdp
from jaxdp import Keys, accounting, plans, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.sampling import batches as batches_lib
from jaxdp.sampling import samplers

N = 40
DATA = (jnp.arange(N, dtype=jnp.float32), jnp.arange(N))


FIXED, PASS, EPOCHS, OUTSIDE = (
    sampling.FixedSize(7),
    sampling.SinglePass(7),
    sampling.ShuffledEpochs(7),
    sampling.External(7),
)
DRAWING = (
    sampling.FullBatch(),
    sampling.TruncatedPoisson(sampling_prob=0.3),
    FIXED,
    PASS,
    EPOCHS,
    sampling.CyclicEpochs(7),
    sampling.CyclicPoisson(num_groups=4, sampling_prob=0.3),
)


def plan(sampler: Any, num_examples: int = N) -> plans.DPZero:
    return plans.DPZero(
        num_examples=num_examples,
        num_steps=min(10, sampler.max_steps(num_examples)),
        sampling=sampler,
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=0.1,
    )


def draw(
    sampler: Any, steps: int, seed: int = 0, num_examples: int = N
) -> tuple[np.ndarray, np.ndarray]:
    """Records (steps, B) and masks of many steps."""
    p = plan(sampler, num_examples)
    data = jax.tree.map(lambda x: x[:num_examples], DATA)
    keys = Keys.insecure(seed)
    out = jax.jit(jax.vmap(lambda step: sampling.batch(p, keys, step, data)))(
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


# Few rows of many records.

MANY = 2**17 + 50_000
RARE = sampling.TruncatedPoisson(sampling_prob=4 / MANY, max_batch_size=7)


def drawn_rows(sampler: Any, num_examples: int, steps: int) -> tuple[Any, Any]:
    """Indices (steps, B) and masks of a sampler by itself."""
    key = keys_lib.stream(Keys.insecure(5).sampling, "sampling")
    draw = jax.jit(jax.vmap(lambda t: sampler.draw(key, t, num_examples)))
    index, mask = draw(jnp.arange(steps))
    return np.asarray(index), np.asarray(mask)


def test_few_rows_of_many_records_have_the_law_of_the_sample() -> None:
    """Sizes and places by chi-square, of records alone and of pairs (failure 5e-6)."""
    steps = 40_000
    index, mask = drawn_rows(RARE, MANY, steps)
    assert index.dtype == np.int32
    assert 0 <= index.min() <= index.max() < MANY
    ranked = np.sort(index, axis=1)
    assert (ranked[:, 1:] != ranked[:, :-1]).all()
    assert (np.sort(mask, axis=1)[:, ::-1] == mask).all()
    share = scipy.stats.binom.pmf(np.arange(8), MANY, RARE.sampling_prob)
    share[7] = scipy.stats.binom.sf(6, MANY, RARE.sampling_prob)
    counts = np.bincount(mask.sum(axis=1), minlength=8)
    assert scipy.stats.chisquare(counts, share * steps).pvalue > 1e-6
    place = np.bincount(index[mask] * 50 // MANY, minlength=50)
    assert scipy.stats.chisquare(place).pvalue > 1e-6
    # Neighbouring rows, and neighbouring steps; the lowest digits.
    both = mask[:, 1]
    for one, two in (
        (index[both, 0] * 12 // MANY, index[both, 1] * 12 // MANY),
        (index[:-1, 0] * 12 // MANY, index[1:, 0] * 12 // MANY),
        (index[:, 0] % 12, mask.sum(axis=1)),
    ):
        table = np.zeros((12, 12))
        np.add.at(table, (one, two), 1)
        table = table[:, table.any(axis=0)]
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-6


def test_few_of_many_in_subsets_of_one_size() -> None:
    index, mask = drawn_rows(sampling.FixedSize(7), MANY, 20_000)
    assert mask.all()
    ranked = np.sort(index, axis=1)
    assert (ranked[:, 1:] != ranked[:, :-1]).all()
    place = np.bincount(index.ravel() * 50 // MANY, minlength=50)
    assert scipy.stats.chisquare(place).pvalue > 1e-6


@pytest.mark.parametrize("sampler", [RARE, sampling.FixedSize(100)], ids=repr)
def test_few_rows_cost_no_pass_over_the_records(sampler: Any) -> None:
    key = keys_lib.stream(Keys.insecure(0).sampling, "sampling")

    def loop(key: jax.Array) -> Any:
        steps = jnp.arange(3)
        return jax.lax.scan(lambda c, t: (c, sampler.draw(key, t, 10**8)), None, steps)

    needs: Any = jax.jit(loop).lower(key).compile().memory_analysis()
    assert needs.temp_size_in_bytes < 2**17


@pytest.mark.parametrize(
    ("rows", "num_examples"), [(9, N), (64, 2**17), (2**13, 2**18), (10**5, 10**6)]
)
def test_other_batches_are_the_smallest_words(rows: int, num_examples: int) -> None:
    """A word for every record, as in all versions: old runs keep their batches."""
    q = rows / num_examples / 2
    sampler = sampling.TruncatedPoisson(sampling_prob=q, max_batch_size=rows)
    key = keys_lib.stream(Keys.insecure(0).sampling, "sampling")
    index, mask = jax.jit(sampler.draw, static_argnums=2)(key, 3, num_examples)
    at = keys_lib.at_step(key, 3)
    words = np.asarray(jax.jit(keys_lib.words, static_argnums=1)(at, num_examples))
    chosen = np.flatnonzero(words < math.floor(q * 2**32))
    want = chosen[np.argsort(words[chosen] >> 2, kind="stable")][:rows]
    np.testing.assert_array_equal(np.asarray(index)[np.asarray(mask)], want)


def test_what_few_rows_are_off_the_law_by_is_charged() -> None:
    """A draw is within 2**-179 of the law; every plan of such draws charges 2e-18.

    Of 2**31 steps at an epsilon of 50 there remains a part in a thousand of what the
    failures of the noise leave of it, beta = 1e-40 in each direction.
    """
    for sampler in (RARE, sampling.FixedSize(7)):
        p = plan(sampler, MANY).with_noise(noise_multiplier=1.0)
        _, missed = accounting.sampler_error(p.event)
        off = 2.0**31 * 2.0**-179 * (1 + math.exp(50))
        noise = 1.1e-40 * (1 + math.exp(50))
        assert missed >= 2e-18 > 1000 * off + noise


def test_default_batches_have_room_for_six_deviations() -> None:
    sampler = sampling.TruncatedPoisson(sampling_prob=1 / 16)
    assert sampler.rows(1024) == 64 + 6 * 8
    assert dataclasses.replace(sampler, max_deviations=4).rows(1024) == 64 + 4 * 8
    assert sampler.expected_batch_size(1024) == 64
    assert sampling.TruncatedPoisson(sampling_prob=0.9).rows(10) == 10
    with pytest.raises(ValueError, match="max_deviations"):
        sampling.TruncatedPoisson(sampling_prob=0.5, max_deviations=0)


def test_default_batches_cost_nothing_that_counts() -> None:
    """Where noise is near the clip, too; four deviations cost much there."""

    def spent(**rows: Any) -> float:
        sampler = sampling.TruncatedPoisson(sampling_prob=256 / 60_000, **rows)
        p = plans.DPGD(
            num_examples=60_000,
            num_steps=1000,
            sampling=sampler,
            relation="add_or_remove",
            l2_clip_norm=1.0,
            noise_multiplier=0.7,
        )
        return p.epsilon(delta=1e-5)

    never = spent(max_batch_size=60_000)
    assert never < spent() < 1.0002 * never
    assert spent(max_deviations=4) > 1.3 * never


@pytest.mark.parametrize(
    ("sampler", "rows"),
    [
        (sampling.TruncatedPoisson(sampling_prob=1 / 16), 96),
        (sampling.CyclicPoisson(num_groups=2, sampling_prob=1 / 8), 96),
        (sampling.MultiPassRestarts(period=2, restart_sampling_prob=1 / 16), 96),
        (sampling.TruncatedPoisson(sampling_prob=1 / 16, max_batch_size=70), 70),
        (sampling.MultiPassRestarts(period=2), 1024),
    ],
    ids=str,
)
def test_texts_of_before_mean_four_deviations(sampler: Any, rows: int) -> None:
    """And stay as they are, with those of samplers whose batches have another size."""
    said = samplers.as_dict(sampler)
    assert samplers.from_dict(said) == sampler
    before = {name: x for name, x in said.items() if name != "max_deviations"}
    found = samplers.from_dict(before)
    assert samplers.as_dict(found) == before
    batch, *_ = (phase.batch_size for phase in found.phases_of(1024))
    assert batch == rows
    assert (found == sampler) == (before == said) == (rows in (70, 1024))
    # A pickle of before has no such field.
    state = {name: x for name, x in before.items() if name != "sampler"}
    old = type(sampler).__new__(type(sampler))
    old.__setstate__(state)
    assert old == found and copy.deepcopy(sampler) == sampler
    mine = type("Mine", (type(sampler),), {})(**dataclasses.asdict(sampler))
    assert type(copy.copy(mine)) is type(mine) and copy.copy(mine) == mine
    free = dataclasses.replace(sampler, max_deviations=None)
    assert samplers.as_dict(free) == said


def test_the_sampler_of_a_phase_is_copied() -> None:
    whole = sampling.SinglePassRestarts(period=2, restart_batch_size=8, batch_size=2)
    part = whole.of_phase("restart")
    assert vars(copy.copy(part)) == vars(part)


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


# Batches of one size.


def test_integers_of_64_bits_are_not_wrapped() -> None:
    """They become the nearest of 32 bits."""
    signed, keys = np.array([2**32, -(2**40), 7, -1]), Keys.insecure(0)
    unsigned = np.array([2**32, 2**31, 7, 0], np.uint64)
    wanted = [2**31 - 1, -(2**31), 7, -1]
    for sampler in (sampling.FullBatch(), sampling.SinglePass(4)):
        batch = sampling.batch(plan(sampler, 4), keys, 0, (signed, unsigned))
        found = [np.asarray(x).tolist() for x in batch.records]
        assert found == [wanted, [2**32 - 1, 2**31, 7, 0]]
        assert batch.with_records(signed).records.tolist() == wanted
    assert sorted(sampling.shuffled(keys, signed).tolist()) == sorted(wanted)


def test_random_subsets_are_uniform() -> None:
    """All ten pairs of five records, equally often (failure < 1e-6)."""
    steps = 20_000
    records, mask = draw(sampling.FixedSize(2), steps, num_examples=5)
    assert mask.shape == (steps, 2)
    assert mask.all()
    low, high = records.min(axis=1), records.max(axis=1)
    assert np.all(low < high)
    counts = np.bincount(5 * low + high, minlength=25)
    assert np.count_nonzero(counts) == 10
    assert scipy.stats.chisquare(counts[counts > 0]).pvalue > 1e-6


def test_random_subsets_hold_each_record_with_its_probability() -> None:
    steps, q = 20_000, 7 / N
    records, _ = draw(FIXED, steps)
    assert all(len(set(row)) == 7 for row in records.tolist())
    share = np.bincount(records.ravel(), minlength=N) / steps
    bound = scipy.stats.norm.isf(1e-8) * math.sqrt(q * (1 - q) / steps)
    assert np.abs(share - q).max() < bound
    # Successive steps are independent: they share 7 * 7 / N records on average.
    member = np.zeros((steps, N), bool)
    np.put_along_axis(member, records, True, axis=1)
    shared = (member[1:] & member[:-1]).sum(axis=1).mean()
    assert abs(shared - 49 / N) < 5 * 1.0 / math.sqrt(steps)


def test_a_single_pass_reads_every_record_once_in_order() -> None:
    records, mask = draw(PASS, 5)
    assert mask.all()
    np.testing.assert_array_equal(records.ravel(), np.arange(35))
    # Past the end there is nothing to read, and nothing is released.
    assert sampling.SinglePass(7).max_steps(N) == 5


@pytest.mark.parametrize(
    ("size", "num_examples"),
    [
        (7, N),
        (5, 5),
        pytest.param(8, N, marks=pytest.mark.slow),
        pytest.param(1, 5, marks=pytest.mark.slow),
    ],
)
def test_epochs_are_partitions(size: int, num_examples: int) -> None:
    per_epoch, epochs = num_examples // size, 40
    records, mask = draw(
        sampling.ShuffledEpochs(size), per_epoch * epochs, num_examples=num_examples
    )
    assert mask.all()
    orders = records.reshape(epochs, per_epoch * size)
    for order in orders.tolist():
        assert len(set(order)) == per_epoch * size
        assert set(order) <= set(range(num_examples))
    if size < num_examples:
        assert len({tuple(order) for order in orders.tolist()}) > epochs // 2


@pytest.mark.parametrize(
    ("num_examples", "period", "steps", "left"),
    [
        # Periods of 11 records. All of 40: three, a restart of five and a step of two.
        (40, 4, 14, 0),
        (39, 4, 13, 1),
        (37, 4, 12, 4),  # Too few for another restart.
        (42, 4, 15, 0),
        (43, 4, 15, 1),
        # Restarts of five alone.
        (40, 1, 8, 0),
        (39, 1, 7, 4),
        (42, 1, 8, 2),
    ],
)
def test_restarts_read_every_record_once(
    num_examples: int, period: int, steps: int, left: int
) -> None:
    """Larger batches where a period begins, in order; nothing at a wrong phase.

    What is left over is not read, nor is anything a second time: also not past the end.
    """
    sampler = sampling.SinglePassRestarts(
        period=period, restart_batch_size=5, batch_size=2
    )
    assert sampler.max_steps(num_examples) == steps
    p = plans.O2NC(
        num_examples=num_examples,
        num_steps=steps,
        sampling=sampler,
        relation="replace_one",
        restart_l2_clip_norm=1.0,
        l2_clip_norm=1.0,
        smoothing_radius=1.0,
        max_step=1.0,
        window=2,
    )
    data = (jnp.arange(num_examples, dtype=jnp.float32), jnp.arange(num_examples))
    keys, read = Keys.insecure(0), []
    draw = {
        phase.name: jax.jit(
            lambda step, name=phase.name: sampling.batch(
                p, keys, step, data, phase=name
            )
        )
        for phase in p.phases
    }
    for step in range(steps + 2 * period):
        for phase in p.phases:
            batch = draw[phase.name](jnp.asarray(step))
            assert batch.mask.shape == (phase.batch_size,)
            here = (phase.name == "restart") == (step % period == 0)
            mask = np.asarray(batch.mask)
            if step < steps:
                assert (mask == here).all()
            assert not mask.any() or here
            index = np.asarray(batch.index)  # Of masked rows too, whoever reads them.
            assert (index >= 0).all() and (index < num_examples).all()
            read += np.asarray(batch.records[1])[mask].tolist()
        if step == steps - 1:
            assert read == list(range(num_examples - left))
    # No plan comes so far; a loop by hand that does reads nothing twice.
    assert read == list(range(len(read))) and len(read) <= num_examples
    with pytest.raises(ValueError, match="num_steps must be an integer"):
        dataclasses.replace(p, num_steps=steps + 1)


def test_several_passes_read_all_records_or_a_sample_of_each_step_s_own() -> None:
    sampler = sampling.MultiPassRestarts(period=3, sampling_prob=0.25)
    p = plans.O2NC(
        num_examples=N,
        num_steps=400,
        sampling=sampler,
        relation="replace_one",
        restart_l2_clip_norm=1.0,
        l2_clip_norm=1.0,
        smoothing_radius=1.0,
        max_step=1.0,
        window=2,
        prefix_noise="independent",
    )
    assert sampler.amplifies
    assert not sampling.MultiPassRestarts(period=3).amplifies
    restart, rest = p.phases
    assert (restart.num_steps, restart.batch_size, rest.num_steps) == (1, N, 2)
    keys = Keys.insecure(0)
    whole = sampling.batch(p, keys, 3, DATA, phase="restart")
    np.testing.assert_array_equal(whole.records[1], DATA[1])
    np.testing.assert_array_equal(whole.index, np.arange(N))

    @jax.jit
    def drawn(step: jax.Array) -> sampling.Batch:
        return sampling.batch(p, keys, step, DATA, phase="difference")

    batches = jax.vmap(drawn)(jnp.arange(400))
    assert batches.mask.shape == (400, rest.batch_size)
    np.testing.assert_array_equal(
        batches.records[1], np.asarray(DATA[1])[batches.index]
    )
    counts = np.bincount(np.asarray(batches.index)[batches.mask], minlength=N)
    # Each a binomial of 400 coins of a quarter; six standard deviations are 1e-9.
    assert np.abs(counts - 100).max() < 6 * math.sqrt(75)


def test_batches_of_two_sizes_are_for_plans_of_phases() -> None:
    two = sampling.SinglePassRestarts(period=2, restart_batch_size=4)
    with pytest.raises(TypeError, match=r"sampling must be a FullBatch or .*Restarts"):
        plan(two)


def test_cyclic_epochs_have_one_random_order() -> None:
    """Every record in one step of an epoch, at the same place of all (failure < 1e-6)."""
    of = plan(sampling.CyclicEpochs(3), 10)

    def indices(seed: jax.Array, step: jax.Array) -> jax.Array:
        return sampling.batch(of, Keys.insecure(seed), step, jnp.arange(10)).records

    seeds, steps = jnp.arange(400), jnp.arange(9)
    drawn = jax.jit(jax.vmap(jax.vmap(indices, (None, 0)), (0, None)))(seeds, steps)
    orders = np.asarray(drawn).reshape(400, 3, 9)
    assert (orders == orders[:, :1]).all()
    assert all(len(set(order)) == 9 for order in orders[:, 0].tolist())
    for place in orders[:, 0].T:
        assert scipy.stats.chisquare(np.bincount(place, minlength=10)).pvalue > 1e-7


def test_cyclic_poisson_samples_one_group_after_another() -> None:
    """Each record in steps of its group alone, by a coin each time (failure < 1e-6)."""
    steps, groups, n, q = 4000, 4, 39, 0.3
    sampler = sampling.CyclicPoisson(
        num_groups=groups, sampling_prob=q, max_batch_size=10
    )
    assert (sampler.group_size(n), sampler.rows(n)) == (9, 9)
    assert sampler.expected_batch_size(n) == pytest.approx(2.7)
    assert [sampler.max_participations(n, t) for t in (1, 4, 5)] == [1, 1, 2]
    records, mask = draw(sampler, steps, num_examples=n)
    assert (records % groups == np.arange(steps)[:, None] % groups).all()
    assert (np.sort(records)[:, 1:] > np.sort(records)[:, :-1]).all()
    taken = np.zeros((steps, n), bool)
    np.put_along_axis(taken, records, mask, axis=1)
    assert not taken[:, 36:].any()  # What is left over.
    counts = taken[:, :36].sum(axis=0)
    # Each a binomial of 1000 coins; six standard deviations are 1e-9.
    assert np.abs(counts - 1000 * q).max() < 6 * math.sqrt(1000 * q * (1 - q))
    said = [[sampler.inclusion(i, t, n) for i in range(n)] for t in range(2 * groups)]
    np.testing.assert_array_equal(
        np.array(said) > 0, taken.reshape(-1, 2 * groups, n).any(axis=0)
    )
    assert max(map(max, said)) == pytest.approx(q)
    # A coin tells nothing of the next one of the record, nor of that of another.
    own = taken[::groups, 0]
    for other in (taken[::groups, 4], np.roll(own, 1), taken[1::groups, 1]):
        assert abs(np.corrcoef(own, other)[0, 1]) < 6 / math.sqrt(1000)


def test_cyclic_poisson_costs_what_its_group_costs() -> None:
    """The least that a record can be hidden among is its group, in the steps of which."""
    for most, relation in ((None, "zero_out"), (10, "replace_one"), (10, "zero_out")):
        sampler = sampling.CyclicPoisson(
            num_groups=4, sampling_prob=0.3, max_batch_size=most
        )
        cyclic = dataclasses.replace(plan(sampler, 42), relation=relation)
        group = sampling.TruncatedPoisson(sampling_prob=0.3, max_batch_size=most)
        alone = dataclasses.replace(
            plan(group, 10), relation=relation, num_steps=3, sampling=group
        )
        one, other = (
            p.with_noise(noise_multiplier=1.3).epsilon(delta=1e-5)
            for p in (cyclic, alone)
        )
        assert cyclic.num_steps == 10 and one == pytest.approx(other, rel=1e-6)


def test_more_records_than_places_are_refused() -> None:
    """Places are 32-bit integers, which would wrap."""
    sampler = sampling.CyclicPoisson(num_groups=4, sampling_prob=1e-9)
    most = plan(sampler, 2**31 - 1)
    assert int(sampling.draw(most, Keys.insecure(0), 3).index.min()) >= 0
    with pytest.raises(ValueError, match="num_examples must be an integer"):
        plan(sampler, 3 * 2**30)
    assert plan(sampling.External(batch_size=8), 2**60).num_examples == 2**60


def test_probabilities_that_no_word_draws_are_refused() -> None:
    sampling.TruncatedPoisson(sampling_prob=2**-32)
    with pytest.raises(ValueError, match="sampling_prob must be at least 2"):
        sampling.TruncatedPoisson(sampling_prob=2.0**-33)
    with pytest.raises(ValueError, match="sampling_prob must be at least 2"):
        plan(sampling.CyclicPoisson(num_groups=4, sampling_prob=2.0**-33))


def test_bad_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="num_groups must be"):
        sampling.CyclicPoisson(num_groups=0, sampling_prob=0.3)
    with pytest.raises(TypeError, match="num_groups must be"):
        sampling.CyclicPoisson(num_groups=2.0, sampling_prob=0.3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="sampling_prob must be"):
        sampling.CyclicPoisson(num_groups=2, sampling_prob=1.0)
    with pytest.raises(
        ValueError, match="num_groups must be at most num_examples = 40"
    ):
        plan(sampling.CyclicPoisson(num_groups=N + 1, sampling_prob=0.3))


def test_epochs_are_shuffled() -> None:
    """Every record at every place, and left out, equally often (failure < 1e-5)."""
    epochs, n, size = 20_000, 10, 3
    records, _ = draw(sampling.ShuffledEpochs(size), 3 * epochs, num_examples=n)
    orders = records.reshape(epochs, 9)
    for place in range(9):
        counts = np.bincount(orders[:, place], minlength=n)
        assert scipy.stats.chisquare(counts).pvalue > 1e-6
    together = np.bincount(n * orders[:, 0] + orders[:, 1], minlength=n * n)
    assert np.count_nonzero(together) == n * (n - 1)
    assert scipy.stats.chisquare(together[together > 0]).pvalue > 1e-6
    between = np.bincount(n * orders[:-1, 0] + orders[1:, 0], minlength=n * n)
    assert scipy.stats.chisquare(between).pvalue > 1e-6


@pytest.mark.parametrize(
    ("sampler", "most", "reads"),
    [
        (sampling.FullBatch(), 2**31 - 1, 12),
        (sampling.TruncatedPoisson(sampling_prob=0.3), 2**31 - 1, 12),
        (FIXED, 2**31 - 1, 12),
        (PASS, 5, 1),
        (EPOCHS, 2**31 - 1, 3),  # Five batches an epoch.
        (OUTSIDE, 2**31 - 1, 12),
    ],
)
def test_samplers_know_how_often_they_read_a_record(
    sampler: Any, most: int, reads: int
) -> None:
    assert sampler.max_steps(N) == most
    assert sampler.max_participations(N, 12) == reads
    if sampler not in DRAWING[:2]:
        assert sampler.rows(N) == sampler.expected_batch_size(N) == 7
    if sampler == OUTSIDE or reads == 12:
        return
    records, _ = draw(sampler, min(12, most))
    assert np.bincount(records.ravel()).max() == reads


@pytest.mark.parametrize(
    "sampler",
    [
        *(DRAWING[0], DRAWING[1], EPOCHS),
        # One subset, and one epoch.
        *(pytest.param(sampler, marks=pytest.mark.slow) for sampler in (FIXED, PASS)),
    ],
    ids=repr,
)
def test_one_key_draws_one_batch_however_it_is_run(sampler: Any) -> None:
    p, steps, keys = plan(sampler), 4, Keys.insecure(0)

    def body(carry: None, step: jax.Array) -> tuple[None, Any]:
        out = sampling.batch(p, keys, step, DATA)
        return carry, (out.records[1], out.mask)

    scanned, masks = jax.jit(lambda: jax.lax.scan(body, None, jnp.arange(steps))[1])()
    records, mapped_masks = draw(sampler, steps)
    np.testing.assert_array_equal(np.asarray(scanned), records)
    np.testing.assert_array_equal(np.asarray(masks), mapped_masks)

    @jax.jit
    def third(keys: Keys) -> sampling.Batch:
        return sampling.batch(p, keys, 3, DATA)

    batch, other = third(keys), third(Keys.insecure(1))
    np.testing.assert_array_equal(np.asarray(batch.records[1]), records[3])
    assert batch.mask.shape == (sampler.rows(N),)
    assert batch.sampler == sampler
    random = sampler not in (sampling.FullBatch(), PASS)
    assert np.array_equal(batch.records[1], other.records[1]) is not random
    # Of the sampling root alone: who knows the directions does not know the sample.
    mixed = dataclasses.replace(Keys.insecure(1), sampling=keys.sampling)
    np.testing.assert_array_equal(third(mixed).records[1], batch.records[1])


# What a transform accepts.


@functools.cache
def first_batch(sampler: Any) -> sampling.Batch:
    keys = Keys.insecure(0)
    return jax.jit(lambda: sampling.batch(plan(sampler), keys, 0, DATA))()


def resolve(
    sampler: Any,
    batch: Any,
    mask: Any = None,
    *,
    private: bool = False,
    step: int = 0,
) -> Any:
    keys, at = Keys.from_entropy() if private else Keys.insecure(0), jnp.asarray(step)
    return batches_lib.resolve(plan(sampler), batch, mask, keys=keys, step=at)


@pytest.mark.parametrize("sampler", [*DRAWING, OUTSIDE], ids=repr)
def test_only_the_plans_own_batches_are_taken(sampler: Any) -> None:
    for other in DRAWING:
        batch = first_batch(other)
        if other == sampler:
            records, mask = resolve(sampler, batch)
            assert records is batch.records
            np.testing.assert_array_equal(mask, batch.mask)
            continue
        with pytest.raises(ValueError, match="batch was drawn by"):
            resolve(sampler, batch)
    if sampler not in (sampling.FullBatch(), OUTSIDE):
        with pytest.raises(ValueError, match="raw arrays"):
            resolve(sampler, DATA)


@pytest.mark.parametrize("sampler", DRAWING, ids=repr)
def test_a_batch_counts_in_its_own_step_only(sampler: Any) -> None:
    """What a record is charged for rests on it: a batch given twice counts once."""
    batch = first_batch(sampler)
    _, mask = resolve(sampler, batch, step=1)
    full = sampler == sampling.FullBatch()  # All of them are alike.
    np.testing.assert_array_equal(mask, batch.mask if full else 0 * batch.mask)


@pytest.mark.parametrize("sampler", DRAWING, ids=repr)
def test_only_amplification_needs_secret_samples(sampler: Any) -> None:
    batch = first_batch(sampler)
    if sampler.amplifies:
        with pytest.raises(ValueError, match="insecure keys"):
            resolve(sampler, batch, private=True)
    else:
        resolve(sampler, batch, private=True)
    assert sampler.amplifies is (sampler in (DRAWING[1], FIXED, DRAWING[-1]))


def test_batches_are_drawn_with_the_keys_of_the_transform() -> None:
    """Runs that share samples are not amplified apart; nor is an order that changes."""
    made = plan(FIXED).with_noise(noise_multiplier=2.0)
    keys, other = Keys.from_entropy(), Keys.from_entropy()
    tx, params = made.transform(keys), jnp.zeros(2)
    state = tx.init(params)

    def update(batch: Any, state: Any = state) -> Any:
        return tx.update(None, state, params, value_fn=linear, batch=batch)

    def draw(each: Keys) -> Any:
        return sampling.batch(made, each, 0, DATA)

    update(draw(keys))
    jax.jit(lambda each, state: update(draw(each), state))(keys, state)
    update(jax.jit(draw)(other))  # Of traced keys nothing is known.
    with pytest.raises(ValueError, match="with the keys of the transform, got one"):
        update(draw(other))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.make_jaxpr])
def test_no_program_holds_the_root_of_secret_samples(transform: Any) -> None:
    """A compilation cache would write it into a file; an argument it does not."""
    at = jnp.arange(2) if transform is jax.vmap else jnp.int32(0)
    for sampler, keys, closed in (
        (FIXED, Keys.from_entropy(), False),
        (FIXED, Keys.insecure(0), True),
        (sampling.ShuffledEpochs(batch_size=4), Keys.from_entropy(), True),
    ):
        made = plan(sampler)

        def draw(step: Any, made: Any = made, keys: Keys = keys) -> Any:
            return sampling.batch(made, keys, step, DATA).records

        if closed:
            transform(draw)(at)
            continue
        with pytest.raises(
            ValueError, match="keys must be an argument of the function"
        ):
            transform(draw)(at)
    keys = Keys.from_entropy()
    program = jax.jit(lambda keys, step: sampling.batch(made, keys, step, DATA).records)
    words = np.asarray(jax.random.key_data(keys.sampling)).tolist()
    text = program.lower(keys, 0).as_text()
    assert not any(str(word) in text for word in words)


def test_no_program_holds_a_root_of_keys_that_draw_otherwise() -> None:
    keys = Keys.from_entropy()
    for draw in (
        lambda rows: sampling.shuffled(keys, rows),
        lambda rows: jaxdp.synthetic_records(keys, np.ones(4), 9) + rows[0],
    ):
        with pytest.raises(
            ValueError, match="keys must be an argument of the function"
        ):
            jax.jit(draw)(jnp.arange(4))


def test_rows_are_copied_when_a_batch_gets_them() -> None:
    """JAX reads a NumPy array later, when it may hold the rows of the next step."""
    drawn = sampling.draw(plan(FIXED), Keys.insecure(0), 0)
    rows = np.empty((len(drawn.index), 2**18), np.float32)
    for step in range(50):
        rows[:] = step
        batch = drawn.with_records(rows)
        rows[:] = -1
        assert float(batch.records.min()) == step


def test_batches_of_other_keys_count_nothing_where_they_are_arguments() -> None:
    """Whatever was compiled before, and whatever they went through."""
    made, keys = plan(FIXED).with_noise(noise_multiplier=2.0), Keys.from_entropy()
    own, other = (
        sampling.batch(made, each, 0, DATA) for each in (keys, Keys.from_entropy())
    )
    run, at = made.run, jnp.asarray(0)
    kept = jax.jit(
        lambda batch: batches_lib.resolve(run, batch, None, keys=keys, step=at)[1]
    )
    same = jax.jit(lambda batch: batch)
    assert jax.tree.structure(own) == jax.tree.structure(other)
    for mine, foreign in ((own, other), (same(own), same(other))):
        np.testing.assert_array_equal(kept(mine), own.mask)
        assert not bool(kept(foreign).any())
    with pytest.raises(ValueError, match="with the keys of the transform, got one"):
        batches_lib.resolve(run, same(other), None, keys=keys, step=at)


def test_batches_of_all_records_are_alike() -> None:
    made = plan(sampling.FullBatch()).with_noise(noise_multiplier=2.0)
    tx, params = made.transform(Keys.from_entropy()), jnp.zeros(2)
    batch = sampling.batch(made, Keys.from_entropy(), 0, DATA)
    tx.update(None, tx.init(params), params, value_fn=linear, batch=batch)


def test_external_batches_are_arrays_of_at_most_their_size() -> None:
    seven = jax.tree.map(lambda x: x[:7], DATA)
    for rows in (3, 7):
        batch = jax.tree.map(lambda x, rows=rows: x[:rows], DATA)
        records, mask = resolve(OUTSIDE, batch)
        assert records is batch
        assert mask.shape == (rows,)
        assert bool(mask.all())
    with pytest.raises(ValueError, match="at most 7 rows"):
        resolve(OUTSIDE, DATA)
    with pytest.raises(ValueError, match="mask must be bool"):
        resolve(OUTSIDE, seven, jnp.ones(6, bool))
    with pytest.raises(ValueError, match="at most 7 rows"):
        resolve(OUTSIDE, DATA, jnp.arange(N) < 7)


def test_masking_a_record_lets_no_other_in() -> None:
    """A sum would move by two records where one is charged."""
    padded = jax.tree.map(lambda x: jnp.concatenate([x, x[:2]]), DATA)
    everybody = jnp.ones(N + 2, bool)
    resolved = jax.jit(lambda mask: resolve(sampling.FullBatch(), padded, mask)[1])
    kept = resolved(everybody)
    for place in range(N + 2):
        without = resolved(everybody.at[place].set(False))
        np.testing.assert_array_equal(without, kept.at[place].set(False))
    assert int(kept.sum()) == N
    with pytest.raises(ValueError, match=f"False beyond the first {N} rows"):
        resolve(sampling.FullBatch(), padded, everybody.at[0].set(False))


def test_external_batches_are_not_drawn() -> None:
    with pytest.raises(ValueError, match=r"somebody else makes.*mask="):
        sampling.batch(plan(OUTSIDE), Keys.insecure(0), 0, DATA)


# Whole runs.


def linear(params: jax.Array, batch: Any) -> jax.Array:
    """The slope of a record is its number, up to the direction's sign."""
    return batch[0] * params[0]


def quiet(sampler: Any, num_steps: int) -> plans.DPZero:
    """Without noise, and with a clip that no record reaches."""
    return dataclasses.replace(
        plan(sampler),
        num_steps=num_steps,
        smoothing_radius=0.0,
        direction="rademacher",
        l2_clip_norm=64.0,
        noise_multiplier=0,
    )


@pytest.mark.parametrize(
    "sampler",
    [
        DRAWING[1],
        # The same program but for the sampler's draw, which the tests above are of.
        *(
            pytest.param(sampler, marks=pytest.mark.slow)
            for sampler in (DRAWING[0], FIXED, PASS, EPOCHS)
        ),
    ],
    ids=repr,
)
def test_fit_reads_what_the_sampler_draws(sampler: Any) -> None:
    p = quiet(sampler, 5)
    result = jaxdp.fit(
        p,
        Keys.insecure(0),
        jnp.zeros(1),
        DATA,
        value_fn=linear,
        optimizer=optax.sgd(1.0),
    )
    keys = Keys.insecure(0)
    drawn = jax.jit(jax.vmap(lambda t: sampling.batch(p, keys, t, DATA)))(jnp.arange(5))
    sums = np.where(drawn.mask, drawn.records[0], 0).sum(axis=1)
    want = sums / sampler.expected_batch_size(N)
    got = np.abs(np.asarray(result.info.releases[:, 0]))
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_external_batches_are_divided_by_a_constant() -> None:
    p = quiet(OUTSIDE, 3)
    with pytest.raises(ValueError, match="somebody else makes"):
        jaxdp.fit(
            p,
            Keys.insecure(0),
            jnp.zeros(1),
            DATA,
            value_fn=linear,
            optimizer=optax.sgd(1.0),
        )
    tx: Any = jaxdp.dpzero(p, Keys.insecure(0))

    @jax.jit
    def release(batch: Any, mask: Any) -> jax.Array:
        given = {"value_fn": linear, "batch": batch, "mask": mask}
        return tx.update(None, tx.init(jnp.zeros(1)), jnp.zeros(1), **given)[1].release

    three = jax.tree.map(lambda x: x[10:13], DATA)
    total = (10 + 11 + 12) / 7  # Not over three.
    assert abs(float(release(three, None)[0])) == pytest.approx(total, rel=1e-4)
    seven = jax.tree.map(lambda x: x[10:17], DATA)
    masked = release(seven, jnp.arange(7) < 3)
    assert abs(float(masked[0])) == pytest.approx(total, rel=1e-4)


def test_external_batches_of_any_size() -> None:
    """Without a size up to all records, and sums are divided by that many."""
    every = sampling.External()
    assert every.rows(40) == 40 == every.expected_batch_size(40)
    again = plans.from_json(plan(every).to_json())
    assert again.sampling == every


@pytest.mark.parametrize(
    "kind",
    [
        sampling.FixedSize,
        sampling.SinglePass,
        sampling.ShuffledEpochs,
        sampling.CyclicEpochs,
        sampling.External,
    ],
)
def test_sizes_must_be_integers_within_the_data(kind: Any) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        kind(0)
    with pytest.raises(TypeError, match="batch_size"):
        kind(2.0)
    assert kind(batch_size=np.int64(3)) == kind(3)
    with pytest.raises(
        ValueError, match="batch_size must be at most num_examples = 40"
    ):
        plan(kind(N + 1))


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
