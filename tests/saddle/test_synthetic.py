"""Algorithm 5: synthetic data."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, plans
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import players, synthetic
from jaxdp.saddle.grids import UNIT
from tests.saddle import reference

QUERIES = jaxdp.Marginals((2, 3, 2), 2)
N, STEPS = 50, 12
CODES = np.random.default_rng(0).integers(0, 12, N).astype(np.int32)


def make(**changes: Any) -> plans.SyntheticData:
    numbers: dict[str, Any] = {
        "num_examples": N,
        "num_steps": STEPS,
        "relation": "replace_one",
        "domain_size": 12,
        "num_queries": 2 * QUERIES.num_queries,
        "step_size_y": 0.7,
    }
    return plans.SyntheticData(**numbers | changes)


def dense() -> np.ndarray:
    """Centred queries (m, 12)."""
    return np.stack([QUERIES.values(j) for j in range(QUERIES.num_queries)])


def test_a_run_is_the_plain_algorithm() -> None:
    """Scores to the bit but for the histogram's rounding; the output given the draws."""
    plan = make()
    algorithm = jaxdp.synthetic_data(plan, Keys.insecure(0))
    step = jax.jit(functools.partial(algorithm.step, value_fn=QUERIES))
    state = algorithm.init(plan.uniform())
    m, matrix = QUERIES.num_queries, dense()
    totals = matrix[:, CODES].sum(axis=1).astype(np.int64)
    logits, mean, model = np.zeros(12), np.zeros(12), np.zeros(m)
    unit = N * 2**plan.grid.bits * plan.grid.multiplier / 2**plan.grid.shift
    for t in range(STEPS):
        finer = 2 ** (plan.grid.bits - plan.grid_bits)
        data = np.array([t * int(a) * finer * plan.grid.multiplier for a in totals])
        half = (data >> plan.grid.shift) - np.rint(model)
        want = np.concatenate([half, -half])
        # Each step rounds the histogram's part once.
        np.testing.assert_allclose(state.scores, want - want.max(), atol=2 * t + 64)
        state, info = step(state, CODES)
        x = np.exp(logits) / np.exp(logits).sum()
        mean += x / STEPS
        model = model + unit * (matrix @ x)
        j = int(info.release[0])
        q = matrix[j % m] * (1 if j < m else -1)
        logits = logits + plan.histogram_step_size / 2 * q
    np.testing.assert_allclose(algorithm.output(state), mean, rtol=1e-5)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_scores_move_by_what_is_charged(
    relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record moves the scores of step t by t times its part and one unit at most."""
    plan, share, script = make(relation=relation), 0.0, reference.Script()
    monkeypatch.setattr(players, "draw", script.draw)
    algorithm = jaxdp.synthetic_data(plan, Keys.insecure(0))
    step = functools.partial(algorithm.step, value_fn=QUERIES)

    @jax.jit
    def run(data: Any) -> Any:
        state = algorithm.init(plan.uniform())
        return jax.lax.fori_loop(0, STEPS, lambda _, s: step(s, data)[0], state)

    for seed in range(4):
        rng = np.random.default_rng(seed)
        other = CODES.copy()
        # A code outside the domain is a record that is zeroed.
        other[rng.integers(0, N)] = -1 if relation == "zero_out" else 11 - CODES[0]
        draws = [rng.integers(0, plan.num_queries, 1) for _ in range(STEPS)]
        found = [script.run(draws, lambda x=x: run(x)) for x in (CODES, other)]
        for t, (a, b) in enumerate(zip(*found, strict=True)):
            delta = plan.sensitivity_at(t)
            reached = reference.check_draw(a, b, delta)
            share = max(share, reached if t else 0.0)
            if t == 0:
                np.testing.assert_array_equal(a, b)
    assert share > 0.95


def test_rounding_does_not_add_up() -> None:
    """After T steps one unit, not T: the sensitivity of the last step is T times one's."""
    plan = make(num_steps=10_000, step_size_y=1e-4, num_examples=100_000)
    one = plan.sensitivity_at(1)
    assert plan.sensitivity_at(9_999) <= 9_999 * one - 9_998 * UNIT * (1 - 1e-6)


def test_saturated_scores_are_within_what_is_charged() -> None:
    """Steps so long that scores saturate: neighbours' scores, to the unit.

    A score that was cut off begins a new sum of roundings.
    """
    plan = make(num_examples=2 * 10**9, num_steps=40, step_size_y=43.9)
    grid, longest = plan.grid, int(43.9 / 2 / UNIT)
    assert plan.sensitivity_at(30) > 30 * (plan.sensitivity_at(1) - UNIT) + 2 * UNIT
    rng, share = np.random.default_rng(3), 0.0
    n = plan.num_examples * 2**grid.bits
    take = jax.jit(functools.partial(synthetic._taken, grid))
    for _ in range(30):
        totals = rng.integers(-n // 2, n // 2, 6).astype(np.int32)
        other = totals + (rng.choice([-2, 2], 6) * 2**grid.bits).astype(np.int32)
        runs = [
            (jnp.asarray(t), jnp.zeros(6, jnp.int32), jnp.zeros(12, jnp.int32))
            for t in (totals, other)
        ]
        for t in range(1, 40):
            model = jnp.asarray(rng.integers(-longest, longest, 6), jnp.int32)
            after = []
            for total, fractions, scores in runs:
                moved, fractions = take(total, fractions)
                by = jnp.concatenate([moved - model, model - moved])
                after.append((total, fractions, simplex.moved(scores, by)))
            runs = after
            h = np.asarray(runs[0][2], np.int64) - np.asarray(runs[1][2], np.int64)
            spread = (h.max() - h.min()) * UNIT
            assert spread <= 2 * plan.sensitivity_at(t) * (1 + 1e-12)
            share = max(share, spread / (2 * plan.sensitivity_at(t)))
    assert share > 0.5


@pytest.mark.slow  # A study.
def test_answers_come_close_and_records_follow_them() -> None:
    """Digest problem 21, small: 5 binary attributes, all 2-way marginals, epsilon 4."""
    queries = jaxdp.Marginals((2,) * 5, 2)
    rng = np.random.default_rng(1)
    codes = rng.choice(32, 5000, p=rng.dirichlet(np.full(32, 0.1))).astype(np.int32)
    plan = plans.SyntheticData(
        num_examples=5000,
        num_steps=200,
        relation="replace_one",
        domain_size=32,
        num_queries=2 * queries.num_queries,
    ).calibrate(epsilon=4.0, delta=1e-6)
    assert 3.99 < plan.epsilon() <= 4.0
    keys = Keys.insecure(0)
    result = jaxdp.fit(plan, keys, plan.uniform(), codes, value_fn=queries)
    truth = jnp.asarray(np.bincount(codes, minlength=32) / 5000, jnp.float32)
    start = float(queries.max_error(jnp.asarray(plan.uniform()), truth))
    error = float(queries.max_error(result.params, truth))
    assert start > 0.25 and error < 0.1
    np.testing.assert_allclose(result.params.sum(), 1, rtol=1e-5)
    made = np.asarray(jaxdp.synthetic_records(keys, result.params, 20_000))
    drawn = jnp.asarray(np.bincount(made, minlength=32) / 20_000, jnp.float32)
    # 20 000 records: six standard deviations of a share are 0.02.
    assert float(queries.max_error(drawn, result.params)) < 0.02


@pytest.mark.parametrize(
    "histogram", [[0.5, -0.1, 0.6], [0.5, np.nan, 0.6], [0.0, 0.0], [[1.0]], []]
)
def test_records_are_drawn_from_histograms_only(histogram: Any) -> None:
    with pytest.raises(ValueError, match="histogram"):
        jaxdp.synthetic_records(Keys.insecure(0), np.array(histogram), 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"domain_size": 13}, "domain_size"),
        ({"num_queries": 2}, "num_queries"),
        ({"grid_bits": 4}, "grid_bits"),
    ],
)
def test_other_queries_are_refused(changes: dict[str, Any], named: str) -> None:
    plan = make(**changes)
    algorithm = jaxdp.synthetic_data(plan, Keys.insecure(0))
    state = algorithm.init(plan.uniform())
    with pytest.raises(ValueError, match=named):
        algorithm.step(state, CODES, value_fn=QUERIES)


def test_secrets_are_not_public() -> None:
    plan = make()
    algorithm = jaxdp.synthetic_data(plan, Keys.insecure(0))
    shown = jaxdp.public(algorithm.init(plan.uniform()))
    hidden = (shown.scores, shown.totals, shown.fractions, shown.roots)
    assert hidden == (None,) * 4
    assert shown.logits is not None and shown.total is not None
