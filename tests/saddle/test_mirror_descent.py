"""Algorithms 1 to 3: mirror descent for saddle points by vertex sampling."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.saddle.algorithms import bias_reduced, players
from jaxdp.saddle.grids import UNIT
from jaxdp.saddle.theory import levels as levels_lib
from tests.saddle import reference

D = 4
STEPS, SIZE = 6, 3
N = STEPS * SIZE
RNG = np.random.default_rng(5)
GAME = RNG.uniform(-1, 1, (D, D + 1)).astype(np.float32)
DATA = (
    RNG.uniform(-1, 1, (N, D)).astype(np.float32),
    RNG.uniform(-1, 1, (N, D + 1)).astype(np.float32),
)


def value(x: Any, y: Any, batch: Any) -> jax.Array:
    """x A y + <a, x> + <b, y>, a little curved so that bias reduction has work."""
    a, b = batch
    return x @ jnp.asarray(GAME) @ y + a @ x + b @ y + 0.25 * jnp.sum(x**2)


def make(**changes: Any) -> plans.Saddle:
    numbers: dict[str, Any] = {
        "num_examples": N,
        "num_steps": STEPS,
        "sampling": sampling.SinglePass(SIZE),
        "relation": "replace_one",
        "dim_x": D,
        "dim_y": D + 1,
        "linf_clip_norm_x": 1.5,
        "linf_clip_norm_y": 1.0,
        "num_draws": 2,
        "step_size_x": 0.3,
        "step_size_y": 0.2,
    }
    return plans.Saddle(**numbers | changes)


def make_reduced(**changes: Any) -> plans.SaddleBiasReduced:
    numbers: dict[str, Any] = {
        "num_examples": 60,
        "relation": "replace_one",
        "dim_x": D,
        "dim_y": D + 1,
        "linf_clip_norm_x": 1.5,
        "linf_clip_norm_y": 1.0,
        "vertex_budget": 16,
        "level_seed": 1,
        "step_size_x": 0.1,
        "step_size_y": 0.1,
    }
    return plans.SaddleBiasReduced(**numbers | changes)


@functools.cache
def stepper(plan: Any) -> tuple[jaxdp.Algorithm, Any]:
    make_algorithm = jaxdp.saddle_mirror_descent
    if isinstance(plan, plans.SaddleBiasReduced):
        make_algorithm = jaxdp.saddle_bias_reduced
    algorithm = make_algorithm(plan, Keys.insecure(0))
    return algorithm, jax.jit(functools.partial(algorithm.step, value_fn=value))


def gradients(x: np.ndarray, y: np.ndarray, rows: slice) -> tuple[np.ndarray, ...]:
    a, b = DATA[0][rows], DATA[1][rows]
    return a + GAME @ y + 0.5 * x, b + GAME.T @ x


# --- Algorithm 1 -----------------------------------------------------------------


@pytest.mark.parametrize("output", ["fresh", "mean"])
def test_a_run_is_the_plain_algorithm(output: str) -> None:
    """Scores to the bit, outputs, and what is logged, given the vertices that came up."""
    plan = make(output=output)
    algorithm, step = stepper(plan)
    state = algorithm.init(plan.uniform())
    x, y = np.zeros(D, np.int64), np.zeros(D + 1, np.int64)
    counts = np.zeros(D), np.zeros(D + 1)
    for t in range(STEPS):
        np.testing.assert_array_equal(state.scores_x, x)
        np.testing.assert_array_equal(state.scores_y, y)
        state, info = step(state, DATA)
        drawn = np.asarray(info.release, int).reshape(2, 3)
        points = [
            np.bincount(row[:2], minlength=size) / 2
            for row, size in zip(drawn, (D, D + 1), strict=True)
        ]
        rows = slice(t * SIZE, (t + 1) * SIZE)
        gx, gy = gradients(points[0], points[1], rows)
        total = reference.on_grid(gx, 1.5, plan.grids[0].bits)
        x = reference.moved(x, -reference.floored(total, plan.grids[0]))
        total = reference.on_grid(gy, 1.0, plan.grids[1].bits)
        y = reference.moved(y, reference.floored(total, plan.grids[1]))
        for count, row in zip(counts, drawn, strict=True):
            kept = row[2:] if output == "fresh" else row
            np.add.at(count, kept, 1)
    for got, count in zip(algorithm.output(state), counts, strict=True):
        np.testing.assert_allclose(got, count / count.sum(), rtol=1e-6)
    assert bool(state.horizon.exhausted) and int(state.horizon.count) == STEPS


def test_step_sizes_are_what_the_scores_move_by() -> None:
    """Grids hold tau / B of a clip, rounded down, in units of 2**-24 octaves."""
    plan = make()
    for grid, step, clip in zip(plan.grids, (0.3, 0.2), (1.5, 1.0), strict=True):
        per_clip = 2**grid.bits * grid.multiplier / 2**grid.shift
        wanted = step * clip / SIZE / math.log(2) * 2**24
        assert wanted * (1 - 2**-15) <= per_clip <= wanted


@pytest.mark.slow  # A study: 1000 steps.
def test_known_equilibrium_and_the_sign_of_y() -> None:
    """Both players descending, as printed, stay at a gap of 0.75 (uniform: 0.84)."""
    steps, dim = 1000, 10
    game = reference.padded_game(dim)
    plan = plans.Saddle(
        num_examples=steps,
        num_steps=steps,
        sampling=sampling.SinglePass(1),
        relation="replace_one",
        dim_x=dim,
        dim_y=dim,
        linf_clip_norm_x=1.0,
        linf_clip_norm_y=1.0,
        step_size_x=0.05,
        step_size_y=0.05,
        num_draws=4,
    )
    zeros = np.zeros((steps, dim), np.float32)
    problem = jaxdp.MatrixGame(game)
    result = jaxdp.fit(
        plan, Keys.insecure(3), plan.uniform(), (zeros, zeros), value_fn=problem
    )
    uniform = reference.gap(game, *plan.uniform())
    assert 0.83 < uniform < 0.85
    bound = 2 * math.log(dim) / (0.05 * steps) + 2 * 0.05
    assert reference.gap(game, *result.params) < bound + 0.1
    assert np.asarray(result.params[0])[3:].sum() < 0.1  # Dominated strategies.


def test_past_the_horizon_nothing_happens() -> None:
    plan = make()
    algorithm, step = stepper(plan)
    state = algorithm.init(plan.uniform())
    for _ in range(STEPS):
        state, _ = step(state, DATA)
    after, info = step(state, DATA)
    assert not np.any(info.release)
    for name in ("scores_x", "scores_y", "counts_x", "counts_y"):
        np.testing.assert_array_equal(getattr(after, name), getattr(state, name))


def test_every_record_is_read_once_and_bad_ones_count_nothing() -> None:
    """A record of another value moves the scores after its own step and no others."""
    plan = make()
    algorithm, step = stepper(plan)

    def states(data: Any) -> list[Any]:
        state, found = algorithm.init(plan.uniform()), []
        for _ in range(STEPS):
            state, _ = step(state, data)
            found.append(state)
        return found

    base = states(DATA)
    for record in (0, 4, N - 1):
        for bad in (np.nan, np.inf, -np.inf):
            data = (DATA[0].copy(), DATA[1])
            data[0][record, 1] = bad
            got = states(data)
            for early, late in zip(base[: record // SIZE], got, strict=False):
                np.testing.assert_array_equal(early.scores_x, late.scores_x)
            at = record // SIZE
            assert np.isfinite(np.asarray(got[at].scores_x)).all()
            assert np.any(got[at].scores_x != base[at].scores_x)
            # It counts zero for the other player as well.
            assert np.any(got[at].scores_y != base[at].scores_y)


def neighbours(seed: int) -> tuple[Any, Any, int]:
    """Two data sets that differ in one record of batch r, and r; some of them extreme."""
    rng = np.random.default_rng(seed)
    big = 1e6 if seed % 2 else 1.0
    record = int(rng.integers(0, N)) if seed else 0
    other = tuple(leaf.copy() for leaf in DATA)
    one = tuple(leaf.copy() for leaf in DATA)
    for leaf, size in zip(one, (D, D + 1), strict=True):
        leaf[record] = big * rng.choice([-1, 1], size)
    for leaf, before in zip(other, one, strict=True):
        leaf[record] = -before[record]
    return one, other, record // SIZE


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_draws_are_within_what_is_charged(
    relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours' laws at every step, the released vertices held fixed: and it is tight."""
    plan = make(relation=relation)
    algorithm = jaxdp.saddle_mirror_descent(plan, Keys.insecure(0))
    share = 0.0
    for seed in range(12):
        one, other, batch = neighbours(seed)
        if relation == "zero_out":
            for leaf in other:
                leaf[(other[0] != one[0]).any(axis=1)] = np.nan
        rng = np.random.default_rng(seed + 100)
        script = [rng.integers(0, D, 3) for _ in range(2 * STEPS)]
        found = []
        for data in (one, other):
            seen: list[np.ndarray] = []
            monkeypatch.setattr(
                players, "draw", reference.scripted({"draws": script}, seen)
            )
            state = algorithm.init(plan.uniform())
            for _ in range(STEPS):
                state, _ = algorithm.step(state, data, value_fn=problem_of_game())
            found.append(seen)
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            delta = (plan.sensitivity_x, plan.sensitivity_y)[i % 2]
            if i // 2 <= batch:
                np.testing.assert_array_equal(a, b)
            else:
                share = max(share, reference.check_draw(a, b, delta))
    assert share > 0.95


@functools.cache
def problem_of_game() -> jaxdp.MatrixGame:
    return jaxdp.MatrixGame(GAME)


# --- Algorithms 2 and 3 ------------------------------------------------------------


def test_sensitivity_of_the_bias_reduced_gradient() -> None:
    """Erratum E3: 2 (2 C_M - 1) at level 0, and 2 (2 C_M 2^N + 1) above; in clips."""
    plan = make_reduced(
        num_examples=20_000, vertex_budget=4096, max_level=6, batch_alpha=1.0
    )
    deltas = plan._deltas([0.1, 0.1])[:, 0]
    clips = deltas * np.array(plan.batch_sizes) / (0.1 * 1.5)
    wanted = [5.9375, 17.875, 33.75, 65.5, 129.0]
    np.testing.assert_allclose(clips[:5], wanted, rtol=1e-3)
    assert (clips[:5] < np.array(wanted) * (1 + 1e-4) + 1e-3).all()


def test_increments_are_algorithm_2() -> None:
    """C_M 2^N (g_all - g_half) + g_one, whatever the gradients; the bound is hard."""
    plan = make_reduced(max_level=2)
    c = levels_lib.normalizer(2)
    rng = np.random.default_rng(0)
    for level in range(3):
        grids = plan.grids[level][0]
        most = plan.batch_sizes[level] * 2**grids.base.bits
        every, half, one = (rng.integers(-most, most + 1, (3, 50))).astype(np.int32)
        if level == 0:
            half = one
        got = bias_reduced.combined(level, grids, *map(jnp.asarray, (every, half, one)))
        mean = (c * 2.0**level * (every.astype(float) - half) + one) / plan.batch_sizes[
            level
        ]
        nats = 0.1 * 1.5 * 2.0**-grids.base.bits * mean
        units = nats / math.log(2) * 2**24
        np.testing.assert_allclose(got, units, rtol=2e-4, atol=2e3)


def test_bias_is_that_of_the_largest_sample() -> None:
    r"""F = sum x^3 / 3, M = 3: E g_j = x_j^2 + x_j (1 - x_j) / 2^{M+1}.

    (Plainly x_j^2; without C_M it would be .375, .195, .086, .026.) 40 000 draws, which
    all levels share and which count with their probabilities: within 6 standard errors of
    the mean of their sums.
    """
    x = np.array([0.5, 0.3, 0.15, 0.05])
    draws, top = 40_000, 3
    plan = make_reduced(
        dim_x=4, max_level=top, vertex_budget=64, num_examples=600, batch_alpha=1.0
    )
    vertices = np.random.default_rng(0).choice(4, (draws, 2 ** (top + 1)), p=x)

    def totals(part: np.ndarray) -> jax.Array:
        """Of one record's gradient at the mean of these vertices."""
        points = np.stack([(part == j).mean(axis=1) for j in range(4)], axis=1)
        return jnp.asarray(np.rint(points**2 / 1.5 * 2**plan.grid_bits), jnp.int32)

    moves = np.zeros((draws, 4))
    for level, share in enumerate(levels_lib.pmf(top)):
        parts = vertices[:, : 2 ** (level + 1)], vertices[:, : max(2**level, 1)]
        every, half = map(totals, parts)
        grids = plan.grids[level][0]
        units = bias_reduced.combined(
            level, grids, every, half, totals(vertices[:, :1])
        )
        moves += share * np.asarray(units, np.float64) * plan.batch_sizes[level]
    moves *= UNIT / 0.1
    error = moves.std(axis=0) / math.sqrt(draws)
    wanted = np.array([0.265625, 0.103125, 0.030469, 0.005469])
    assert (np.abs(moves.mean(axis=0) - wanted) < 6 * error + 2e-4).all()
    assert (np.abs(moves.mean(axis=0) - x**2)[:3] > 4 * error[:3]).all()


def test_a_bias_reduced_run_moves_as_its_levels_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches in a row, each read once, of the sizes of their levels; scores to the bit."""
    plan = make_reduced()
    algorithm = jaxdp.saddle_bias_reduced(plan, Keys.insecure(0))
    data = tuple(
        np.random.default_rng(1).uniform(-1, 1, (60, size)).astype(np.float32)
        for size in (D, D + 1)
    )
    rng = np.random.default_rng(2)
    x, y = np.zeros(D, np.int64), np.zeros(D + 1, np.int64)
    state = algorithm.init(plan.uniform())
    first = 0
    for level in plan.levels[:4]:
        # As many as the highest level takes: those after a level's own are not read.
        draws = [rng.integers(0, D, 2 ** (max(plan.levels) + 1) + 1) for _ in range(2)]
        monkeypatch.setattr(players, "draw", reference.scripted({"draws": draws}, []))
        with jax.disable_jit():  # So that one branch alone is run.
            state, info = algorithm.step(state, data, value_fn=problem_of_game())
        put_out = [drawn[2 ** (level + 1)] for drawn in draws]
        np.testing.assert_array_equal(info.release, put_out)
        size = plan.batch_sizes[level]
        rows = slice(first, first + size)
        first += size
        totals = []
        for count in (2 ** (level + 1), max(2**level, 1), 1):
            px, py = (
                np.bincount(v[:count], minlength=d) / count
                for v, d in zip(draws, (D, D + 1), strict=True)
            )
            gx, gy = data[0][rows] + GAME @ py, data[1][rows] + GAME.T @ px
            bits = plan.grid_bits
            totals.append(
                (reference.on_grid(gx, 1.5, bits), reference.on_grid(gy, 1.0, bits))
            )
        for player, sign in ((0, -1), (1, 1)):
            every, half, one = (t[player] for t in totals)
            grids = plan.grids[level][player]
            if level:
                by = reference.floored(every - half, grids.difference)
                by = by + reference.floored(one, grids.base)
            else:
                by = reference.floored(every, grids.difference)
                by = by - reference.floored(one, grids.base)
            if player:
                y = reference.moved(y, sign * by)
            else:
                x = reference.moved(x, sign * by)
        # A float32 product may put one number of a record on the next integer.
        np.testing.assert_allclose(state.scores_x, x, atol=2 * 2**8)
        np.testing.assert_allclose(state.scores_y, y, atol=2 * 2**8)


@pytest.mark.slow  # tests/test_conformance.py runs it too.
def test_bias_reduced_runs_in_one_program() -> None:
    plan = make_reduced()
    algorithm, step = stepper(plan)
    data = tuple(np.zeros((60, size), np.float32) for size in (D, D + 1))
    state = algorithm.init(plan.uniform())
    for _ in range(plan.num_steps + 1):
        state, _ = step(state, data)
    x, y = algorithm.output(state)
    assert int(state.horizon.count) == plan.num_steps == int(state.counts_x.sum())
    np.testing.assert_allclose([x.sum(), y.sum()], 1, rtol=1e-6)


# --- contracts -----------------------------------------------------------------------


def test_secrets_are_not_public() -> None:
    plan = make()
    algorithm = jaxdp.saddle_mirror_descent(plan, Keys.insecure(0))
    shown = jaxdp.public(algorithm.init(plan.uniform()))
    assert shown.scores_x is None and shown.scores_y is None and shown.roots is None
    assert shown.counts_x is not None


@pytest.mark.parametrize(
    ("params", "data", "problem", "named"),
    [
        ((np.ones(D) / D, np.ones(D) / D), DATA, value, "params"),
        ((np.ones(D), np.ones(D + 1) / (D + 1)), DATA, value, "params"),
        (np.ones(D) / D, DATA, value, "params"),
        ((np.ones(D, int), np.ones(D + 1, int)), DATA, value, "params"),
        (None, DATA, jaxdp.MatrixGame(np.ones((D, D))), "matrix"),
        (None, (DATA[1], DATA[1]), jaxdp.MatrixGame(GAME), "batch"),
        (None, (DATA[0][:-1], DATA[1][:-1]), value, "num_examples"),
        (None, DATA, jaxdp.Problem(value, domain_x=jaxdp.L1Ball(D, 1.0)), "domain_x"),
    ],
)
def test_wrong_sizes_are_named(
    params: Any, data: Any, problem: Any, named: str
) -> None:
    plan = make()
    algorithm = jaxdp.saddle_mirror_descent(plan, Keys.insecure(0))

    def run() -> None:
        state = algorithm.init(plan.uniform() if params is None else params)
        algorithm.step(state, data, value_fn=problem)

    with pytest.raises(ValueError, match=named):
        run()


def test_needs_a_plan_with_steps_and_keys() -> None:
    with pytest.raises(ValueError, match="calibrate"):
        jaxdp.saddle_mirror_descent(
            make(step_size_x=None, step_size_y=None), Keys.insecure(0)
        )
    with pytest.raises(ValueError, match="family"):
        jaxdp.saddle_mirror_descent(make_reduced(), Keys.insecure(0))
    bare: Any = jax.random.key(0)
    with pytest.raises(TypeError, match="keys"):
        jaxdp.saddle_mirror_descent(make(), bare)


def test_keys_from_entropy_serve_one_run() -> None:
    plan = make()
    algorithm = jaxdp.saddle_mirror_descent(plan, Keys.from_entropy())
    state = algorithm.init(plan.uniform())
    assert bool(state.horizon.private)
    with pytest.raises(ValueError, match="already served"):
        algorithm.init(plan.uniform())


@pytest.mark.slow  # One more program; polytopes are in kernels/test_polytope.py.
def test_over_polytopes() -> None:
    """An l1 ball and a given triangle, through their vertices."""
    triangle = jaxdp.Polytope(np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, -1.0]]))
    ball = jaxdp.L1Ball(2, 0.5)
    plan = make(dim_x=4, dim_y=3, num_steps=2)

    def f(x: Any, y: Any, batch: Any) -> jax.Array:
        return batch @ x + y @ x

    data = np.zeros((N, 2), np.float32)
    result = jaxdp.fit(
        plan,
        Keys.insecure(0),
        plan.uniform(),
        data,
        value_fn=jaxdp.Problem(f, domain_x=ball, domain_y=triangle),
    )
    assert result.params[0].shape == (4,) and result.params[1].shape == (3,)
    assert np.abs(ball.point(result.params[0])).sum() <= 0.5
