"""Measured marginals: bound, noise, draws, the fit, and what is refused."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxdp
from jaxdp import Keys, auditing, plans
from jaxdp.auditing import measured
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import mwem
from jaxdp.saddle.oracles import queries
from jaxdp.saddle.theory import charges
from jaxdp.training import ledger, recording
from tests.auditing.plans_of_faults import plan_named

SIZES = (4, 2, 3)
SETS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))


def make(**changes: Any) -> plans.MWEM:
    numbers: dict[str, Any] = {
        "num_examples": 1000,
        "num_steps": 4,
        "relation": "replace_one",
        "sizes": SIZES,
        "attributes": SETS,
        "num_start": 3,
    }
    return plans.MWEM(**numbers | changes)


def codes_of(n: int, seed: int = 0) -> np.ndarray:
    """Draws records whose first two columns depend on each other."""
    rng = np.random.default_rng(seed)
    first = rng.choice(4, n, p=[0.4, 0.3, 0.2, 0.1])
    second = (rng.random(n) < np.where(first < 2, 0.8, 0.1)).astype(int)
    return np.ravel_multi_index((first, second, rng.integers(0, 3, n)), SIZES)


def counted(codes: np.ndarray, sets: Any = SETS) -> np.ndarray:
    """Counts by NumPy, marginal by marginal."""
    table = np.bincount(codes[codes >= 0], minlength=24).reshape(SIZES)
    axes = range(len(SIZES))
    parts = (table.sum(tuple(a for a in axes if a not in one)) for one in sets)
    return np.concatenate([part.reshape(-1) for part in parts])


# --- what one record moves ---------------------------------------------------------


@pytest.mark.parametrize("relation", ["replace_one", "zero_out", "add_or_remove"])
def test_sensitivities_hold_and_are_reached(relation: Any) -> None:
    """Of counts and scores, over all pairs of records, one outside the domain too."""
    plan = make(relation=relation, num_examples=50).with_noise(noise_multiplier=2.0)
    others = codes_of(49)
    model = 50 * np.random.default_rng(1).dirichlet(np.ones(24)).astype(np.float32)
    histogram = jnp.asarray(model / model.sum())
    numbers = plan.numbers._replace(lowest_score=2**20)
    cells = [counted(np.append(others, code)) for code in range(-1, 24)]
    found = np.asarray(
        jax.jit(jax.vmap(lambda c: mwem.scores(numbers, c, histogram)))(
            jnp.asarray(np.stack(cells), jnp.int32)
        ),
        np.int64,
    )
    counts = np.stack([counted(np.append(others, code)) for code in range(-1, 24)])
    units = plan.score_grid.sensitivity(plan.score_sensitivity) * 2**24 / math.log(2)
    starts = plan.queries.offsets[:-1]
    apart, ranges = [], []
    for one, other in itertools.permutations(range(25), 2):
        if relation != "replace_one" and 0 not in (one, other):
            continue  # One of the two is a record that counts nothing.
        squares = np.add.reduceat((counts[one] - counts[other]) ** 2, starts)
        apart.append(math.sqrt(squares.max()))
        ranges.append(np.ptp(found[one] - found[other]))
    assert max(apart) == pytest.approx(plan.sensitivity)
    # Of 25 tables one comes close to what the model and the counts may do at the worst.
    assert 0.49 * 2 * units < max(ranges) <= 2 * units + 2


def test_a_record_moves_scores_as_far_as_is_charged() -> None:
    """Where a model is uniform and counts are not: up in one marginal, down in another."""
    (canary,) = measured.canaries(plan := plan_named("drawn marginals"))
    histogram = jnp.full(8, 1 / 8)
    scores = []
    for data in (canary.first, canary.second):
        cells = jnp.asarray(measured.true_counts(plan, data), jnp.int32)
        scores.append(np.asarray(mwem.scores(plan.numbers, cells, histogram), np.int64))
    nats = np.ptp(scores[0] - scores[1]) * math.log(2) / 2**24
    each = plan.score_grid.sensitivity(plan.score_sensitivity)
    assert nats == pytest.approx(2 * each, rel=1e-4)


def test_scores_saturate_without_overflow() -> None:
    """Little noise, many records: all scores but the largest are far below it."""
    plan = make(num_examples=5_000_000).with_noise(noise_multiplier=1e-3)
    cells = np.zeros(plan.queries.num_queries, np.int32)
    cells[plan.queries.offsets[:-1]] = 5_000_000
    start = plan.uniform().histogram
    found = np.asarray(mwem.scores(plan.numbers, jnp.asarray(cells), start))
    assert found.max() == 0
    assert found.min() >= simplex.LOWEST
    assert np.argmax(found) == 4  # The marginal of 12 cells is the farthest.
    assert np.all(np.delete(found, 4) < 0.85 * simplex.LOWEST)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_cost_is_that_of_noise_and_draws(share: float) -> None:
    plan = make(selection_share=share).calibrate(epsilon=1.0, delta=1e-5)
    noise = plan.noise_multiplier or 0
    step = 1 / (2 * noise**2)
    rho = 6 * step + 3 * step * share / (1 - share)  # 3 + 3 marginals, 3 draws.
    assert plan.rho_at(noise, 4) == pytest.approx(rho, rel=1e-3)
    assert plan.rho_at(noise, 4) <= charges.rho_budget(1.0, 1e-5)
    assert 0.999 < plan.epsilon() <= 1
    assert plan.spent(4) == plan.epsilon()
    assert plan.spent(1) < plan.spent(2) < 1
    one = make(num_steps=1).calibrate(epsilon=1.0, delta=1e-5)
    assert one.epsilon().accountant == "Gaussian closed form"
    exact = jaxdp.accounting.gaussian_mu(1.0, 1e-5)
    assert math.sqrt(3) / (one.noise_multiplier or 0) == pytest.approx(exact, rel=1e-4)
    zeroed = make(num_steps=1, relation="zero_out").calibrate(epsilon=1.0, delta=1e-5)
    assert one.noise_std == pytest.approx(math.sqrt(2) * zeroed.noise_std, rel=1e-4)


# --- a run -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transcripts() -> measured.Transcripts:
    """5000 runs on one data set, of four steps: over 10 s on a busy machine."""
    plan = plan_named("drawn marginals")
    (canary,) = measured.canaries(plan)
    made = measured.transcripts(plan, [canary.first], 5000, seed=3)
    return measured.read(plan, made[0])


def test_noise_is_the_plans_on_every_measured_cell(
    transcripts: measured.Transcripts,
) -> None:
    """Means and deviations, each of which fails with 1e-7 at the most."""
    plan = plan_named("drawn marginals")
    (canary,) = measured.canaries(plan)
    true = measured.true_counts(plan, canary.first) / plan.num_examples
    here = measured.measured_cells(plan, transcripts)
    assert np.all(np.abs(transcripts.measured[~here]) < 1e-6)
    for step in range(plan.num_steps):
        z = ((transcripts.measured[:, step] - true) / plan.noise_std)[here[:, step]]
        assert abs(z.mean()) < 5.4 / math.sqrt(z.size)
        assert abs(np.square(z).mean() - 1) < 5.4 * math.sqrt(2 / z.size)
        assert scipy.stats.kstest(z, scipy.stats.norm.cdf).pvalue > 1e-7


def test_no_two_steps_share_noise(transcripts: measured.Transcripts) -> None:
    """Of two, up to 45 of 5000 runs have a pair of cells as near; 150 with 1e-30."""
    plan = plan_named("drawn marginals")
    (canary,) = measured.canaries(plan)
    true = measured.true_counts(plan, canary.first) / plan.num_examples
    z = (transcripts.measured - true) / plan.noise_std
    z = np.where(measured.measured_cells(plan, transcripts), z, np.nan)
    for one, other in itertools.combinations(range(plan.num_steps), 2):
        near = np.abs(z[:, one, :, None] - z[:, other, None, :]) < 1e-3
        assert near.any(axis=(1, 2)).sum() < 150


def test_marginals_are_drawn_from_the_law_that_is_claimed(
    transcripts: measured.Transcripts,
) -> None:
    """By the attacker's own integers: expected counts within 5.4 deviations (1e-7)."""
    plan = plan_named("drawn marginals")
    (canary,) = measured.canaries(plan)
    counts = measured.true_counts(plan, canary.first)
    assert np.all(transcripts.drawn[:, 0] == -1)
    for marginal in range(5):
        asked = transcripts._replace(drawn=np.full_like(transcripts.drawn, marginal))
        law = np.exp(measured.log_draws(plan, asked, counts))[:, 1:]
        hits = transcripts.drawn[:, 1:] == marginal
        error = np.sqrt((law * (1 - law)).sum(0))
        assert np.all(np.abs(hits.sum(0) - law.sum(0)) < 5.4 * error)
    # Given the steps before, too: that one draws what the one before it drew.
    again = transcripts._replace(drawn=np.roll(transcripts.drawn, 1, axis=1))
    law = np.exp(measured.log_draws(plan, again, counts))[:, 2:]
    hits = transcripts.drawn[:, 2:] == transcripts.drawn[:, 1:-1]
    error = np.sqrt((law * (1 - law)).sum(0))
    assert np.all(np.abs(hits.sum(0) - law.sum(0)) < 5.4 * error)


def test_noise_and_draws_have_roots_of_their_own_that_are_secret() -> None:
    """Two, and others with other secrets: not with another public root of directions."""
    plan = make().with_noise(noise_multiplier=2.0)

    def roots(**changes: Any) -> list[bytes]:
        keys = Keys.insecure(0)
        for name, value in changes.items():
            object.__setattr__(keys, name, value)
        state = jaxdp.mwem(plan, keys).init(plan.uniform())
        return [np.asarray(jax.random.key_data(x)).tobytes() for x in state.roots]

    known, other = roots(), Keys.insecure(1)
    assert len(set(known)) == 2
    assert roots(direction=other.direction, sampling=other.sampling) == known
    assert not set(roots(noise=other.noise)) & set(known)


def test_what_rounds_leave_out_is_what_is_known() -> None:
    """Pairs that are dependent are measured first, and the histogram has them then."""
    plan = make(num_examples=20_000, num_steps=3).calibrate(epsilon=4.0, delta=1e-5)
    codes = codes_of(20_000)
    result = jaxdp.fit(
        plan,
        Keys.insecure(0),
        plan.uniform(),
        jnp.asarray(codes),
        value_fn=plan.queries,
    )
    fit = result.params
    assert fit.times.sum() == 5
    assert np.all(fit.times[:3] >= 1) and fit.times[3] >= 1  # Columns, and (0, 1).
    shares = np.asarray(plan.queries.counts(fit.histogram))
    np.testing.assert_allclose(shares, counted(codes) / 20_000, atol=0.01)
    assert result.info.releases[0, 0] == -1
    assert 3 in result.info.releases[:, 0]


def test_records_are_read_in_the_first_step_alone() -> None:
    """What others later hold is in no release."""
    plan = make(num_examples=50, num_steps=2).with_noise(noise_multiplier=2.0)
    algorithm = plan.algorithm(Keys.insecure(0))
    codes = jnp.asarray(codes_of(50))
    first, _ = algorithm.step(
        algorithm.init(plan.uniform()), codes, value_fn=plan.queries
    )
    later = [
        algorithm.step(first, x, value_fn=plan.queries)[0].fit.shares
        for x in (codes, 23 - codes)
    ]
    np.testing.assert_array_equal(*later)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_codes_that_32_bits_do_not_hold_count_in_no_cell(dtype: Any) -> None:
    """Of 64 bits, JAX would keep 32: 2**32 would be a record of the first cell."""
    plan = make(num_examples=8, num_steps=1).with_noise(noise_multiplier=1e-6)
    wrong = [2**32, 2**32 + 5, 2**31, 2**63 - 1, -(2**32) if dtype == np.int64 else 24]
    codes = np.array([*wrong, 3, 3, 23], dtype)
    fit = jaxdp.fit(
        plan, Keys.insecure(0), plan.uniform(), codes, value_fn=plan.queries
    ).params
    wanted = counted(np.array([3, 3, 23]))[: plan.queries.offsets[3]]
    found = 8 * np.asarray(fit.shares)[: wanted.size]
    np.testing.assert_allclose(found, wanted, atol=1e-3)


# --- the fit -----------------------------------------------------------------------


def fitted(shares: np.ndarray, sets: Any, noise_std: float) -> np.ndarray:
    queries = jaxdp.Marginals(SIZES, attributes=sets)
    start = jnp.full(24, 1 / 24)
    given = mwem.FittedHistogram(start, jnp.asarray(shares), jnp.ones(len(sets)))
    weight = jnp.float32(noise_std**2 * mwem.PRIOR_WEIGHT)
    return np.asarray(mwem.fitted(queries, given, weight, jnp.log(start), 1000))


def test_fit_without_noise_has_the_marginals() -> None:
    true = counted(codes_of(5000), SETS[3:]) / 5000
    histogram = fitted(true, SETS[3:], 1e-5)
    assert histogram.sum() == pytest.approx(1, abs=1e-5)
    queries = jaxdp.Marginals(SIZES, attributes=SETS[3:])
    answers = np.asarray(queries.counts(jnp.asarray(histogram)))
    np.testing.assert_allclose(answers, true, atol=2e-4)


def test_fit_is_independent_where_only_columns_are_measured() -> None:
    """The most uniform of the histograms: the product. (L-BFGS on logits lost it.)"""
    true = counted(codes_of(5000), SETS[:3]) / 5000
    one, two, three = np.split(true, [4, 6])
    product = np.einsum("i,j,k->ijk", one, two, three)
    histogram = fitted(true, SETS[:3], 1e-5).reshape(SIZES)
    np.testing.assert_allclose(histogram, product, atol=2e-3)


def test_fit_to_noise_is_better_than_the_noise() -> None:
    """Noise that no histogram can have (negative shares) is left out."""
    true = counted(codes_of(5000), SETS[3:]) / 5000
    noise = 0.05 * np.random.default_rng(0).normal(size=true.shape)
    histogram = fitted(true + noise, SETS[3:], 0.05)
    assert np.isfinite(histogram).all() and (histogram >= 0).all()
    queries = jaxdp.Marginals(SIZES, attributes=SETS[3:])
    answers = np.asarray(queries.counts(jnp.asarray(histogram)))
    assert np.square(answers - true).sum() < 0.7 * np.square(noise).sum()


# --- audits, and what is refused ---------------------------------------------------


# Over 10 s on a busy machine: three programs of a private fit each, which take longer to
# compile than their 5000 runs, and 3 or 8 s of one processor. (Faults: test_mutations.py.)
@pytest.mark.parametrize("name", ["marginals", "drawn marginals"])
def test_a_record_is_told_and_no_more_than_accounted(name: str) -> None:
    """Below with probability 1 - 1e-6."""
    plan = plan_named(name)
    found = auditing.audit(plan, num_runs=5000)
    assert found.passed
    assert 0.4 * found.epsilon < found.epsilon_lower < found.epsilon
    assert auditing.shortened(plan, 4) is plan
    digits = auditing.lattice(plan, num_runs=100)
    assert digits.passed and digits.applicable


def test_long_plans_are_shortened_at_the_same_epsilon() -> None:
    long = make(num_steps=9, sizes=(4, 2, 3, 6)).calibrate(epsilon=2.0, delta=1e-5)
    short = auditing.shortened(long, 4)
    assert (short.num_steps, short.num_examples, short.sizes) == (4, 64, SIZES)
    assert (short.attributes, short.num_start) == (SETS, 3)
    assert short.epsilon() == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_start": 0}, "num_start must be an integer >= 1"),
        ({"num_start": 7}, "num_start must be"),
        ({"sizes": (4, 1, 3)}, "sizes must be"),
        ({"attributes": ((0, 3),)}, "attributes must be"),
        ({"selection_share": 1.0}, "selection_share must be"),
        ({"noise_multiplier": 1e-9}, "noise_multiplier must be 0 or in"),
        ({"num_examples": 2**23}, "num_examples must be"),
        ({"sizes": (2,) * 30}, "sizes must have a product of at most"),
        ({"relation": "other"}, "relation must be"),
    ],
)
def test_wrong_numbers_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


def test_other_points_queries_and_records_are_refused() -> None:
    plan = make().with_noise(noise_multiplier=2.0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        jaxdp.mwem(make(), Keys.insecure(0))
    with pytest.raises(
        ValueError, match="microbatch_size must be None for MWEM, got 3"
    ):
        plan.algorithm(Keys.insecure(0), microbatch_size=3)
    algorithm = plan.algorithm(Keys.insecure(0))
    start = plan.uniform()
    with pytest.raises(TypeError, match="params"):
        algorithm.init(start.histogram)
    with pytest.raises(ValueError, match="params must have leaves of shapes"):
        algorithm.init(start._replace(times=jnp.zeros(2)))
    with pytest.raises(ValueError, match="sum to 1"):
        algorithm.init(start._replace(histogram=2 * start.histogram))
    for wrong in ({"shares": start.shares + jnp.nan}, {"times": start.times - 1}):
        with pytest.raises(ValueError, match="finite shares, and times >= 0"):
            algorithm.init(start._replace(**wrong))
    state = algorithm.init(start)
    codes = jnp.asarray(codes_of(1000))
    other = jaxdp.Marginals(SIZES, degree=2)
    with pytest.raises(ValueError, match="value_fn must be the plan's queries"):
        algorithm.step(state, codes, value_fn=other)
    with pytest.raises(ValueError, match="1000"):
        algorithm.step(state, codes[:999], value_fn=plan.queries)
    # A row of several codes would count its record several times.
    for shape in ((1000, 1), (1000, 3)):
        rows = jnp.zeros(shape, jnp.int32)
        with pytest.raises(ValueError, match=r"codes must have shape \(n,\)"):
            algorithm.step(state, rows, value_fn=plan.queries)
        with pytest.raises(ValueError, match=r"codes must have shape \(n,\)"):
            queries.histogram(rows, domain_size=24)
    for wrong in (codes.astype(jnp.float32), codes.astype(jnp.bfloat16), {"a": codes}):
        with pytest.raises(TypeError, match="codes must be integers"):
            algorithm.step(state, wrong, value_fn=plan.queries)
    none = dataclasses.replace(plan, noise_multiplier=0.0)
    assert math.isinf(none.epsilon(delta=1e-5))
    with pytest.raises(ValueError, match="plan must have noise to be audited"):
        auditing.audit(none, delta=1e-5)


def test_no_later_step_takes_the_place_of_a_lost_one() -> None:
    """The first step measures several marginals: made twice, it costs more than is left."""
    plan = make(num_steps=6).calibrate(epsilon=1.0, delta=1e-5)
    once, two = plan.spent(1), plan.spent(2)
    assert once > two - once  # In epsilon here, which is about the root of the charge.
    lost = ledger.Intent(0, 1, 0)
    with pytest.raises(ValueError, match="a step that was lost may cost more"):
        recording._check_new_attempt(plan, lost, left=5)
