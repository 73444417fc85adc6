"""Frank-Wolfe by the exponential mechanism, over one batch a step or all records."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import frank_wolfe, players
from jaxdp.saddle.grids import ScoreGrid
from jaxdp.saddle.theory import charges
from tests.saddle import reference

D, STEPS, SIZE = 4, 6, 3
N = STEPS * SIZE
DATA = np.random.default_rng(4).uniform(-1, 1, (N, D)).astype(np.float32)
ALL, ONCE = sampling.FullBatch(), sampling.SinglePass(SIZE)
SAMPLERS = pytest.mark.parametrize("sampler", [ALL, ONCE], ids=["full", "pass"])


def value(x: Any, batch: Any) -> jax.Array:
    return 0.5 * (batch @ x) ** 2


def make(**changes: Any) -> plans.FrankWolfe:
    numbers: dict[str, Any] = {
        "num_examples": N,
        "num_steps": STEPS,
        "sampling": ALL,
        "relation": "replace_one",
        "dim": D,
        "linf_clip_norm": 1.0,
        "inverse_temperature": 4.0,
    }
    return plans.FrankWolfe(**numbers | changes)


@SAMPLERS
def test_a_run_is_the_plain_algorithm(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores to a unit of a record's grid, given the vertices, and the iterate."""
    plan, script = make(sampling=sampler), reference.Script()
    monkeypatch.setattr(players, "draw", script.draw)
    algorithm = jaxdp.frank_wolfe(plan, Keys.insecure(1))
    drawn = [np.array([v]) for v in (2, 0, 3, 3, 1, 0)]
    step = jax.jit(functools.partial(algorithm.step, value_fn=value))

    def run() -> Any:
        state = algorithm.init(plan.uniform())
        for _ in range(STEPS):
            state, _ = step(state, DATA)
        found.append(algorithm.output(state))
        return found

    found: list[Any] = []
    x = np.full(D, 1 / D)
    for t, scores in enumerate(script.run(drawn, run)):
        batch = DATA if sampler == ALL else DATA[t * SIZE : (t + 1) * SIZE]
        total = reference.on_grid((batch @ x)[:, None] * batch, 1.0, plan.grid_bits)
        wanted = -4.0 * total / len(batch) / 2**plan.grid_bits  # In nats.
        np.testing.assert_allclose(
            scores * np.log(2) / 2**24, wanted - wanted.max(), atol=1e-3
        )
        x = x + 2 / (t + 3) * (np.eye(D)[drawn[t][0]] - x)
    np.testing.assert_allclose(found[0], x, rtol=1e-5)


def test_every_step_draws_anew() -> None:
    """Uniform vertices where nothing is known: each and no step's again, but for 1e-7."""
    steps, dim = 400, 16
    plan = make(num_steps=steps, dim=dim)
    releases = jaxdp.fit(
        plan, Keys.insecure(0), plan.uniform(), np.zeros((N, dim)), value_fn=value
    ).info.releases
    drawn = np.asarray(releases)[:, 0]
    assert set(drawn) == set(range(dim))
    for lag in (1, 2, 3):
        again = np.sum(drawn[lag:] == drawn[:-lag])
        assert abs(again - steps / dim) < 5.5 * np.sqrt(steps / dim)


@SAMPLERS
def test_draws_are_within_what_is_charged(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of one step, or of all, move by Delta at most, whatever a record is."""
    plan, share, script = make(sampling=sampler), 0.0, reference.Script()
    monkeypatch.setattr(players, "draw", script.draw)
    algorithm = jaxdp.frank_wolfe(plan, Keys.insecure(0))
    problem = jaxdp.Problem(lambda x, batch: batch @ x)
    step = functools.partial(algorithm.step, value_fn=problem)

    @jax.jit
    def run(data: Any) -> Any:
        state = algorithm.init(plan.uniform())
        return jax.lax.fori_loop(0, STEPS, lambda _, s: step(s, data)[0], state)

    for seed in range(8):
        rng = np.random.default_rng(seed)
        record = int(rng.integers(0, N))
        one, other = DATA.copy(), DATA.copy()
        one[record] = 30 * rng.permutation([1, 1, -1, -1])
        other[record] = np.nan if seed % 3 == 0 else -one[record]
        draws = [rng.integers(0, D, 1) for _ in range(STEPS)]
        found = [script.run(draws, lambda x=x: run(x)) for x in (one, other)]
        assert len(found[0]) == len(found[1]) == STEPS
        moved = []
        for a, b in zip(*found, strict=True):
            share = max(share, reference.check_draw(a, b, plan.sensitivity))
            moved.append(not np.array_equal(a, b))
        # A record is in the scores of its own batch, and in no others.
        assert sum(moved) == (STEPS if sampler == ALL else 1)
    assert share > 0.95
    each = (plan.sensitivity + simplex.LOG_ERROR) ** 2 / 2
    assert plan.rho == pytest.approx((STEPS if sampler == ALL else 1) * each)


def test_gradients_are_centred_before_they_are_clipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of (5, 5, 5, 0) at a clip of 1: (1, 1, 1, -1) then, and else (1, 1, 1, 0)."""
    script = reference.Script()
    monkeypatch.setattr(players, "draw", script.draw)
    data = np.tile(np.array([5, 5, 5, 0], np.float32), (N, 1))
    linear = jaxdp.Problem(lambda x, batch: batch @ x)
    apart = []
    for center in (False, True):
        plan = make(num_steps=1, center_gradients=center)
        algorithm = jaxdp.frank_wolfe(plan, Keys.insecure(0))
        begun = algorithm.init(plan.uniform())
        step = functools.partial(algorithm.step, begun, data, value_fn=linear)
        (scores,) = script.run([np.zeros(1, int)], step)
        apart.append(np.ptp(scores) * np.log(2) / 2**24)
    np.testing.assert_allclose(apart, [4, 8], rtol=1e-3)


def test_steep_scores_do_not_overflow_and_move_no_further() -> None:
    """Of all scales that a plan may have, and the largest totals: in exact integers."""
    rng = np.random.default_rng(0)
    for records, share in itertools.product((N, 2**22 - 1), (1e-8, 1e-3, 0.1, 1.0)):
        most_moved = make(num_examples=records)._most
        plan = make(
            num_examples=records, inverse_temperature=share * most_moved * records
        )
        grid: ScoreGrid = plan.grid
        most = records * 2**grid.bits
        totals = [rng.integers(-most, most + 1, 50), np.array([most, -most] * 25)]
        scores = jax.jit(functools.partial(frank_wolfe.scores_of, grid))
        for total in totals:
            found = np.asarray(scores(jnp.asarray(total, jnp.int32)), np.int64)
            above = reference.floored(total - total.min(), grid)
            np.testing.assert_array_equal(found, np.maximum(-above, simplex.LOWEST))
            # A record that moves every total by its most, up or down.
            by = 2 * 2**grid.bits * rng.choice([-1, 1], 50)
            moved = np.clip(total + by, -most, most)
            other = np.asarray(scores(jnp.asarray(moved, jnp.int32)), np.int64)
            spread = np.ptp((found - other) * np.log(2) / 2**24)
            assert spread <= 2 * plan.sensitivity * (1 + 1e-12)


def test_charges() -> None:
    """All records are charged in every step of a full batch, once in a pass."""
    budget = {"epsilon": 1.0, "delta": 1e-6}
    every, once = make().calibrate(**budget), make(sampling=ONCE).calibrate(**budget)
    assert every.epsilon() <= 1 and once.epsilon() <= 1
    each = charges.draw(every.sensitivity, simplex.LOG_ERROR)
    assert every.rho == pytest.approx(STEPS * each)
    # One draw reads a record of a pass: its pure epsilon is less than what zCDP gives.
    assert once.epsilon().accountant == "pure composition"
    assert 2 * (once.sensitivity + simplex.LOG_ERROR) == pytest.approx(1, rel=1e-3)
    assert every.spent(2) < 0.7 * every.epsilon()
    assert once.spent(1) == once.epsilon()
    # A record moves a mean over n / T of them T times as far.
    ratio = (every.inverse_temperature or 0) / (once.inverse_temperature or 1)
    moves = every.sensitivity / once.sensitivity
    assert ratio == pytest.approx(STEPS * moves, rel=1e-3)
    none = make(inverse_temperature=0.0)
    assert none.rho == 0 and none.epsilon(delta=1e-5) == 0


@pytest.mark.parametrize(
    "domain", [jaxdp.Simplex(6), jaxdp.L1Ball(3, 1.0)], ids=["simplex", "l1 ball"]
)
def test_without_privacy_it_converges_as_frank_wolfe_does(domain: Any) -> None:
    """At most 2 beta D^2 / (T + 2) above the least, on a quadratic: here D^2 <= 4."""
    target = jnp.linspace(-0.4, 0.8, domain.dim)
    problem = jaxdp.LinearModel(lambda p, t: 0.5 * (p - t) ** 2, domain_x=domain)
    features = np.eye(domain.dim, dtype=np.float32)
    data = features, np.asarray(target)
    plan = plans.FrankWolfe(
        num_examples=domain.dim,
        num_steps=200,
        sampling=ALL,
        relation="zero_out",
        dim=domain.num_vertices,
        linf_clip_norm=4.0,
        inverse_temperature=10.9 * domain.dim,  # The largest.
        delta=0.5,
    )
    weights = jaxdp.fit(
        plan, Keys.insecure(0), plan.uniform(), data, value_fn=problem
    ).params

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.mean(problem(domain.point(weights), data))

    gradient = jax.grad(loss)(weights)
    assert 0 <= gradient @ weights - gradient.min() < 4 * 4 / domain.dim / 202
