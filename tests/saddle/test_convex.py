"""Algorithm 4: convex problems by anytime averages and lazy refreshes."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, accounting, plans, sampling
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import convex, players
from jaxdp.saddle.theory import charges
from tests.saddle import reference

D, STEPS, SIZE, NUM = 4, 9, 2, 3
N = STEPS * SIZE
DATA = np.random.default_rng(4).uniform(-1, 1, (N, D)).astype(np.float32)


def value(x: Any, batch: Any) -> jax.Array:
    return 0.5 * (batch @ x) ** 2


def make(**changes: Any) -> plans.ConvexSimplex:
    numbers: dict[str, Any] = {
        "num_examples": N,
        "num_steps": STEPS,
        "sampling": sampling.SinglePass(SIZE),
        "relation": "replace_one",
        "dim": D,
        "linf_clip_norm": 1.0,
        "num_draws": NUM,
        "refresh_every": 2,
        "step_size": 0.5,
    }
    return plans.ConvexSimplex(**numbers | changes)


@pytest.mark.parametrize(
    ("steps", "every", "times", "used"),
    [
        (16, 4, [1, 2, 3, 4, 8, 12, 16], [1, 2, 3, 4] + [4] * 3 + [8] * 4 + [12] * 4),
        (17, 4, [1, 2, 3, 4, 8, 12, 16], None),
        (10, 3, [1, 2, 3, 6, 9], None),
        (16, 1, list(range(1, 17)), list(range(1, 16))),
        (5, 8, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
    ],
)
def test_points_are_drawn_and_used_when_the_paper_does(
    steps: int, every: int, times: list[int], used: list[int] | None
) -> None:
    assert convex.refresh_times(steps, every) == times
    at = [int(convex._point_in_use(jnp.int32(t), every)) for t in range(steps)]
    assert [times[i] for i in at][: len(used or [])] == (used or [])


def test_schedule_draws_iterates_uniformly_and_every_vertex_once() -> None:
    """Of t iterates each alike: chi-square of 20 000 draws, failure 1e-7."""
    times = [1, 2, 4]
    schedule = convex.make_schedule(jax.random.key(0), times, 5, 20_000)
    assert sorted(np.asarray(schedule.slots)) == list(range(80_000))
    assert schedule.offsets[0] == 0 and schedule.offsets[-1] == 80_000
    step_of = np.zeros(80_000, int)
    for step in range(5):
        first, last = schedule.offsets[step], schedule.offsets[step + 1]
        step_of[np.asarray(schedule.slots[first:last])] = step
    for i, until in enumerate([*times, 5]):
        counts = np.bincount(step_of[i * 20_000 : (i + 1) * 20_000], minlength=5)
        assert not counts[until:].any()
        mean = 20_000 / until
        # 4 degrees of freedom at most.
        assert ((counts[:until] - mean) ** 2 / mean).sum() < 40


@pytest.mark.slow  # A study of what is scripted below.
def test_points_have_the_law_of_the_averages() -> None:
    """Scores that move the same way every step: each point's law is a known mixture.

    Three steps, 3000 runs of 24 draws each: chi-square with 2 degrees of freedom, 1e-7.
    """
    plan = make(
        num_steps=3, dim=3, num_draws=24, num_examples=6, step_size=2.0, refresh_every=1
    )
    slope = jnp.asarray([0.9, 0.1, -0.6])

    def runs(seed: jax.Array) -> jax.Array:
        algorithm = jaxdp.simplex_convex(plan, Keys.insecure(seed))
        state = algorithm.init(plan.uniform())
        step = functools.partial(algorithm.step, value_fn=linear_problem())
        data = jnp.broadcast_to(slope, (6, 3))
        state = jax.lax.fori_loop(0, 3, lambda i, s: step(s, data)[0], state)
        return state.drawn

    drawn = np.asarray(jax.jit(jax.vmap(runs))(jnp.arange(3000)))
    laws, scores = [], np.zeros(3)
    for _ in range(3):
        laws.append(np.exp(scores) / np.exp(scores).sum())
        scores = scores - 2.0 * np.asarray(slope)
    for i, until in enumerate([1, 2, 3, 3]):
        law = np.mean(laws[:until], axis=0)
        counts = np.bincount(drawn[:, i].ravel(), minlength=3)
        mean = law * counts.sum()
        assert ((counts - mean) ** 2 / mean).sum() < 33


def test_a_run_is_the_plain_algorithm() -> None:
    """Scores to the bit, given the points; the output is the last one that was drawn."""
    plan = make()
    algorithm = jaxdp.simplex_convex(plan, Keys.insecure(1))
    step = jax.jit(functools.partial(algorithm.step, value_fn=value))
    state = algorithm.init(plan.uniform())
    scores = np.zeros(D, np.int64)
    for t in range(STEPS):
        state, info = step(state, DATA)
        point = np.bincount(np.asarray(info.release, int), minlength=D) / NUM
        batch = DATA[t * SIZE : (t + 1) * SIZE]
        gradients = (batch @ point)[:, None] * batch
        total = reference.on_grid(gradients, 1.0, plan.grid_bits)
        scores = reference.moved(scores, -reference.floored(total, plan.grid))
        # A float32 product may put one number of a record on the next integer.
        np.testing.assert_allclose(state.scores, scores, atol=4 * STEPS * 2**9)
    assert bool(state.horizon.exhausted)
    last = np.bincount(np.asarray(state.drawn)[-1], minlength=D) / NUM
    np.testing.assert_allclose(algorithm.output(state), last, rtol=1e-6)


def test_draws_are_within_what_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every vertex comes from a softmax whose scores one record moves by Delta at most."""
    plan, share, script = make(refresh_every=4), 0.0, reference.Script()
    monkeypatch.setattr(players, "draw", script.draw)
    algorithm = jaxdp.simplex_convex(plan, Keys.insecure(0))
    step = functools.partial(algorithm.step, value_fn=linear_problem())

    @jax.jit
    def run(data: Any) -> Any:
        state = algorithm.init(plan.uniform())
        return jax.lax.fori_loop(0, STEPS, lambda _, s: step(s, data)[0], state)

    for seed in range(8):
        rng = np.random.default_rng(seed)
        record = int(rng.integers(0, N)) if seed else 0
        one, other = DATA.copy(), DATA.copy()
        one[record] = 30 * rng.choice([-1, 1], D)
        other[record] = np.nan if seed % 3 == 0 else -one[record]
        draws = [rng.integers(0, D, NUM) for _ in range(300)]
        found = [script.run(draws, lambda x=x: run(x)) for x in (one, other)]
        assert len(found[0]) == len(found[1]) > 5
        for a, b in zip(*found, strict=True):
            share = max(share, reference.check_draw(a, b, plan.sensitivity))
    assert share > 0.95


def linear_problem() -> jaxdp.Problem:
    return jaxdp.Problem(lambda x, batch: batch @ x)


@pytest.mark.slow  # A study.
def test_least_squares_finds_its_solution() -> None:
    """Digest problem 20 without privacy: excess 0.185 at the start, d = 100."""
    dim, steps = 100, 64
    solution = np.zeros(dim, np.float32)
    solution[:3] = 0.5, 0.3, 0.2
    rng = np.random.default_rng(0)
    data = rng.choice([-1.0, 1.0], (steps * 100, dim)).astype(np.float32)

    def square(x: Any, batch: Any) -> jax.Array:
        return 0.5 * (batch @ (x - jnp.asarray(solution))) ** 2

    plan = plans.ConvexSimplex(
        num_examples=len(data),
        num_steps=steps,
        sampling=sampling.SinglePass(100),
        relation="replace_one",
        dim=dim,
        linf_clip_norm=2.0,
        num_draws=60,
        refresh_every=4,
        step_size=0.7,
    )
    result = jaxdp.fit(plan, Keys.insecure(0), plan.uniform(), data, value_fn=square)
    start = 0.5 * ((plan.uniform() - solution) ** 2).sum()
    assert 0.18 < start < 0.19
    assert 0.5 * ((np.asarray(result.params) - solution) ** 2).sum() < 0.03


def test_charges() -> None:
    """K (q + floor(T / q) - 1) draws; nothing is charged where nothing moves."""
    plan = make(num_steps=8, refresh_every=4)
    each = (plan.sensitivity + jaxdp.kernels.simplex.LOG_ERROR) ** 2 / 2
    assert math.isclose(plan.rho, NUM * (4 + 2 - 1) * each, rel_tol=1e-9)
    assert make(step_size=0.0).rho == 0


@pytest.mark.parametrize("steps", [1, 5, 40, 100, 300])
def test_a_part_of_a_run_is_charged_for_what_it_has_drawn(steps: int) -> None:
    """Early steps draw vertices of later points, which ``jaxdp.public`` shows."""
    plan = make(
        num_examples=300 * SIZE, num_steps=300, refresh_every=10, num_draws=5
    ).calibrate(epsilon=1.0, delta=1e-5)
    times = convex.refresh_times(300, 10)
    for seed in range(3):
        offsets = convex.make_schedule(jax.random.key(seed), times, 300, 5).offsets
        drawn = int(offsets[steps] - offsets[1])  # The first point is uniform.
        rho = drawn * charges.draw(plan.sensitivity, simplex.LOG_ERROR)
        spent = accounting.epsilon(*accounting.zcdp(rho), 1e-5)
        assert plan.spent(steps) >= spent
