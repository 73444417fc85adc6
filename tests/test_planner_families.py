"""The planner for problems of players and for tables: rehearsals, and one rule for each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import planner, plans, sampling
from jaxdp.data import synthesis
from jaxdp.planner import problems, rehearsals

DIM = 5
BUDGET: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}
KNOWN: dict[str, Any] = BUDGET | {"num_examples": 4000, "relation": "replace_one"}
GAME = jaxdp.models.rock_paper_scissors(DIM)
PROBLEM = jaxdp.MatrixGame(GAME.matrix, scale=GAME.sign_scale)
UNIFORM = jnp.full(DIM, 1 / DIM)
PUBLIC = tuple(map(jnp.asarray, GAME.make_data(64, seed=7)))


def squared(prediction: Any, target: Any) -> Any:
    return (prediction - target) ** 2


MIXTURE = jaxdp.LinearModel(squared)


def mixed(num: int = 64, seed: int = 0) -> Any:
    """Records whose target is their second feature."""
    x = np.random.default_rng(seed).uniform(-1, 1, (num, DIM)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(x[:, 1])


def of_game(**changes: Any) -> problems.Players:
    shared = {"num_examples": 4000, "relation": "replace_one"} | changes
    return problems.players(PROBLEM, (UNIFORM, UNIFORM), PUBLIC, BUDGET, shared, None)


# --- rehearsals --------------------------------------------------------------------


@pytest.fixture
def of_records() -> rehearsals.Game:
    """A game of 64 records that are all different, and linear in both points."""
    problem = jaxdp.Problem(lambda x, y, b: b[:, 0] * x[0] + b[:, 1] * y[0] + 0 * y[1])
    numbers = np.random.default_rng(3).uniform(-1, 1, (64, 2)).astype(np.float32)
    start = (jnp.full(2, 0.5),) * 2
    domains = (jaxdp.Simplex(2),) * 2
    return rehearsals.Game(problem, jnp.asarray(numbers), domains, start)


@pytest.mark.parametrize(("step", "size"), [(0, 10), (2, 10), (6, 10), (3, 500)])
def test_batches_are_of_the_records_in_turn(
    of_records: rehearsals.Game, step: int, size: int
) -> None:
    """Means of their gradients, of the first coordinate of x and of y; all, if fewer."""
    of = of_records
    mean = rehearsals._mean(of, of.start, step, size, lambda rows, ok: (rows, ok))
    some = np.asarray(of.records)
    if size < 64:
        some = some[np.arange(step * size, (step + 1) * size) % 64]
    np.testing.assert_allclose([part[0] for part in mean], some.mean(0), atol=1e-6)


def test_records_that_are_not_finite_count_zero(of_records: rehearsals.Game) -> None:
    records = of_records.records.at[3, 1].set(jnp.nan)
    of = of_records._replace(records=records)
    found, _ = rehearsals._vertex_mean(of, of.start, 0, 64, (10.0, 10.0))
    # Centred: half of the difference from the derivative by the other vertex, zero.
    expected = (np.delete(np.asarray(records[:, 0]), 3)).sum() / 64 / 2
    np.testing.assert_allclose(found, [expected, -expected], atol=1e-6)


def test_rehearsals_have_the_noise_of_the_private_run(
    of_records: rehearsals.Game,
) -> None:
    """Of descent with clips so small that gradients say nothing: a step's deviation."""
    make = lambda rate: jaxdp.descent_ascent(rate, 0.0)  # noqa: E731
    plan = rehearsals.Descent(1, 1.0, 1e-9, 64, 0.02)
    keys = jax.random.split(jax.random.key(0), 2000)
    run = lambda key: rehearsals.descent_ascent(of_records, make, plan, key)  # noqa: E731
    x, y = jax.vmap(run)(keys)
    # Onto the simplex: half of the difference of two. Of 2000, by 6 deviations.
    assert float(jnp.std(x[:, 0])) == pytest.approx(0.02 / np.sqrt(2), rel=0.1)
    assert not np.any(np.asarray(y) - 0.5)


def test_errors_are_gaps_and_losses_on_the_public_records() -> None:
    of = of_game()
    x, y = jnp.eye(DIM)[0], jnp.eye(DIM)[1]
    a, b = (GAME.sign_scale * np.mean(np.asarray(part), axis=0) for part in PUBLIC)
    matrix = np.asarray(GAME.matrix)
    best_y = np.max(x @ matrix + b) + a[0]
    best_x = np.min(matrix @ y + a) + b[1]
    expected = pytest.approx(float(best_y - best_x), abs=2e-3)
    assert float(of.error(x, y)) == expected
    single = problems.players(
        MIXTURE, UNIFORM, mixed(), BUDGET, {"num_examples": 4000}, None
    )
    assert single.least() == pytest.approx(0, abs=1e-3)  # The second feature alone.
    there = float(single.error(jnp.eye(DIM)[0]))
    x, target = mixed()
    assert there == pytest.approx(float(jnp.mean((x[:, 0] - target) ** 2)), rel=1e-5)


def test_clips_follow_what_public_records_contribute() -> None:
    """Of signs: at uniform points the half range of A y, plus that of the signs."""
    x, y = of_game().half_ranges
    assert 0.5 < x < 1.0 and 0.5 < y < 1.0


def test_memory_is_of_gradients_and_of_scores() -> None:
    of = of_game()
    once = sampling.SinglePass(500)
    shared = {"num_examples": 4000, "relation": "replace_one", "num_steps": 8}
    steps = plans.DPGD(sampling=once, l2_clip_norm=0.7, **shared)
    assert problems._memory(of, steps) == 4 * 500 * 2 * DIM
    drawn = problems._game(of, plans.Saddle, 1.0, sampling=once, **shared)
    assert problems._memory(of, drawn) == 4 * 501 * 2 * DIM


@pytest.mark.parametrize("best", [(6, 2), (0, 0), (9, 4), (3, 1)], ids=str)
def test_the_best_point_of_a_grid_is_found(best: tuple[int, int]) -> None:
    tried = []

    def trial(count: int, other: int) -> Any:
        tried.append((count, other))
        error = abs(np.log2(count) - best[0]) + 3 * abs(other - best[1])
        return problems._Trial(
            (count, other), np.array([error]), lambda seed: np.array([error]), 1.0
        )

    found = problems._searched(trial, problems._halved(1024), range(5))
    assert found.plan == (2 ** best[0], best[1])
    assert len(tried) == len(set(tried)) < 50


def test_steps_are_halved() -> None:
    assert problems._halved(80) == [1, 2, 5, 10, 20, 40, 80]
    assert problems._halved(8) == [1, 2, 4, 8]
    assert problems._halved(1) == [1]


# --- recommendations ---------------------------------------------------------------


@pytest.mark.slow  # Compiles four programs, and runs of three plans; and five, of four.
@pytest.mark.parametrize("problem", [PROBLEM, jaxdp.Problem(GAME.value_fn)])
def test_a_game_s_plan_reaches_what_was_predicted(problem: Any) -> None:
    found = jaxdp.recommend(problem, (UNIFORM, UNIFORM), PUBLIC, **KNOWN)
    names = sorted(one.name for one in found.candidates)
    more = [] if problem is PROBLEM else ["SaddleBiasReduced"]
    assert names == ["DP-SGDA, full batches", "DP-SGDA, one pass", "Saddle", *more]
    errors = [one.error for one in found.candidates]
    assert found.best.error <= 1.02 * min(errors)
    rows = jax.tree.map(lambda leaf: leaf[np.arange(4000) % 64], PUBLIC)
    of = of_game()
    for one in found.candidates:
        assert float(one.plan.epsilon()) <= 2.0
        gaps = []
        for seed in range(20, 28):
            keys = jaxdp.Keys.insecure(seed)
            how = {"value_fn": problem, "optimizer": one.optimizer}
            result = jaxdp.fit(one.plan, keys, one.start, rows, **how)
            x, y = one.output(result)
            assert x.shape == y.shape == (DIM,)
            gaps.append(float(of.error(x, y)))
        # The means of eight; six deviations of their difference, by the larger spread.
        spread = max(float(np.std(gaps, ddof=1)), one.half_width * np.sqrt(8) / 2.36)
        assert abs(np.mean(gaps) - one.error) < 6 * spread / 2
    assert "least predicted error" in repr(found) or "alike" in repr(found)


@pytest.mark.slow  # Compiles three programs; and four.
@pytest.mark.parametrize("num_passes", [3.0, 30.0])
def test_plans_of_one_player_reach_what_was_predicted(num_passes: float) -> None:
    found = jaxdp.recommend(MIXTURE, UNIFORM, mixed(), **KNOWN, num_passes=num_passes)
    names = sorted(one.name for one in found.candidates)
    more = ["FrankWolfe, full batches"] if num_passes > 3 else []
    assert names == ["ConvexSimplex", *more, "FrankWolfe, one pass"]
    single = {"num_examples": 4000, "relation": "replace_one"}
    of = problems.players(MIXTURE, UNIFORM, mixed(), BUDGET, single, None)
    data = jax.tree.map(lambda leaf: leaf[np.arange(4000) % 64], mixed())
    for one in found.candidates:
        errors = []
        for seed in range(8):
            keys = jaxdp.Keys.insecure(seed)
            result = jaxdp.fit(one.plan, keys, one.start, data, value_fn=MIXTURE)
            errors.append(float(of.error(one.output(result))) - of.least())
        # The means of eight; six deviations of their difference, by the larger spread.
        spread = max(float(np.std(errors, ddof=1)), one.half_width * np.sqrt(8) / 2.36)
        assert abs(np.mean(errors) - one.error) < 6 * spread / 2 + 1e-6, one.name


def test_tables_are_chosen_by_the_rule_of_synthesize(monkeypatch: Any) -> None:
    table = jaxdp.Marginals(sizes=(4, 3, 5, 2, 2, 2), degree=2)
    found = jaxdp.recommend(table, **KNOWN)
    same = synthesis.planned(table, **KNOWN)
    assert (found.best.method, found.plan) == (same.method, same.plan)
    assert same.reason in found.reason and found.optimizer is None
    methods = [one.method for one in found.candidates]
    assert sorted(methods) == ["marginals", "mirror_descent", "mwem"]
    assert all(float(one.plan.epsilon()) <= 2.0 for one in found.candidates)
    assert found.best.num_measured == 15 and found.best.error is None
    assert all(one.memory == 4 * 4 * 3 * 5 * 2**3 for one in found.candidates)
    assert all(one.measured.startswith("bench tables") for one in found.candidates)
    assert all("proven" not in one.columns for one in found.candidates)
    monkeypatch.setattr(synthesis, "chosen", lambda queries, std: ("mwem", "so"))
    changed = jaxdp.recommend(table, **KNOWN)
    assert (changed.best.method, changed.reason) == ("mwem", "MWEM: so.")
    text = repr(found)
    assert "mirror_descent" in text and max(map(len, text.splitlines())) <= 100


def test_near_errors_are_decided_by_passes() -> None:
    def game(name: str, error: float, passes: float) -> planner.PlannedGame:
        made: Any = planner.PlannedGame
        return made(name, *[None] * 4, passes, 0.1, error, 0.0, "", lambda x: x)

    dear, cheap = game("a", 0.100, 240), game("b", 0.101, 3)
    assert planner._ranked([dear, cheap], "error", 1.02)[0] == (cheap, dear)
    assert planner._ranked([dear, game("b", 0.11, 3)], "error", 1.02)[0][0] is dear


def test_what_to_take_of_a_game_s_run_is_said() -> None:
    """Of descent the mean: the last points turn around the solution, far from it."""
    plan = plans.DPGD(
        num_examples=4000,
        num_steps=128,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=4.0,
    ).calibrate(**BUDGET)
    turning = jaxdp.descent_ascent(0.1, 0.1)
    shared: Any = {"num_passes": 9, "noise": 0.1, "error": 0.1, "half_width": 0.01}
    shared |= {"proven": "nothing", "points": lambda x: x, "start": (UNIFORM, UNIFORM)}
    one = planner.PlannedGame("DP-SGDA", plan, turning, 0.1, **shared)
    other = planner.PlannedGame("Saddle", plan, None, None, **shared)
    for best, said in ((one, "are its last points"), (other, "may be weights")):
        text = repr(planner.Recommendation((best,), "One."))
        assert f"take found.best.output(result): result.params {said}" in text
        assert max(map(len, text.splitlines())) <= 100
    start = (jnp.eye(DIM)[0], jnp.eye(DIM)[1])
    rows = jax.tree.map(lambda leaf: leaf[np.arange(4000) % 64], PUBLIC)
    how: Any = {"value_fn": PROBLEM, "optimizer": turning}
    result = jaxdp.fit(plan, jaxdp.Keys.insecure(0), start, rows, **how)
    gap = of_game().error
    assert float(gap(*one.output(result))) < 0.5 * float(gap(*result.params))


@pytest.mark.parametrize(
    ("problem", "params", "changes", "said"),
    [
        (PROBLEM, UNIFORM[None], {}, "params must be a point"),
        (MIXTURE, (UNIFORM, UNIFORM), {}, "params must be one point, as the problem"),
        (PROBLEM, UNIFORM, {}, r"params must be a pair of points, \(x, y\), as the"),
        (PROBLEM, (UNIFORM, UNIFORM), {"num_passes": 2.0}, "num_passes must be at"),
        (PROBLEM, (UNIFORM, UNIFORM), {"batch_size": 10}, "batch_size must be left"),
        (PROBLEM, (UNIFORM,) * 2, {"backpropagation": False}, "backpropagation must"),
        (PROBLEM, (UNIFORM,) * 2, {"num_public": 9}, "num_public must be left out"),
        (PROBLEM, None, {}, "params and records must be given"),
    ],
    ids=["matrix", "pair", "point", "passes", "batch", "forward", "public", "none"],
)
def test_bad_arguments(problem: Any, params: Any, changes: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        jaxdp.recommend(problem, params, PUBLIC, **KNOWN | changes)


def test_records_that_say_nothing_are_refused() -> None:
    silent = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan), PUBLIC)
    with pytest.raises(ValueError, match="records must have finite gradients"):
        jaxdp.recommend(PROBLEM, (UNIFORM, UNIFORM), silent, **KNOWN)
