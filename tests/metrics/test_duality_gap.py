"""Gaps against closed forms; the private one against every neighbour of small data."""

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from bench import problems
from jaxdp import accounting, metrics, models
from jaxdp.core import noise
from jaxdp.core.keys import exact_noise_secret
from jaxdp.kernels.polytope import L1Ball, Polytope
from jaxdp.models.games import Game
from jaxdp.saddle.algorithms import players
from jaxdp.saddle.oracles import Problem
from jaxdp.saddle.private_gap import PrivateGap

GAMES = (
    models.rock_paper_scissors(10),
    problems.max_loss(),
    problems.quadratic_game(),
)


def linear_bound(value_fn: Any, x: Any, y: Any) -> float:
    """The upper bound of one gradient, on simplices; the gap itself if F is bilinear."""
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    down, up = jax.grad(value_fn, (0, 1))(x, y)
    return float(jnp.vdot(down, x) - down.min() + up.max() - jnp.vdot(up, y))


@pytest.mark.parametrize(
    "game",
    [
        GAMES[0],
        *(pytest.param(g, marks=pytest.mark.slow) for g in GAMES[1:]),
    ],  # Others.
    ids=lambda g: g.name,
)
def test_interval_holds_the_gap(game: Game) -> None:
    """At random points, at the uniform one and at the equilibrium."""
    rng = np.random.default_rng(1)
    points = [(game.equilibrium_x, game.equilibrium_y)]
    points += [(np.full(game.dim_x, 1 / game.dim_x), np.eye(game.dim_y)[0])]
    points += [
        (rng.dirichlet(np.ones(game.dim_x)), rng.dirichlet(np.ones(game.dim_y)))
        for _ in range(3)
    ]
    for x, y in points:
        exact = game.gap_fn(x, y)
        found = metrics.duality_gap(game.population_fn, x, y, tolerance=1e-4)
        rounding = 2e-6
        assert found.lower - rounding <= exact <= found.upper + rounding
        assert found.upper - found.lower <= 2e-4 + rounding
        assert abs(found.value - exact) <= found.error + rounding
        bound = linear_bound(game.population_fn, x, y)
        assert bound >= exact - rounding
        if game.matrix is not None:
            assert found.num_steps == 2 and found.error < rounding
            assert bound == pytest.approx(exact, abs=rounding)


def test_mixture_of_losses_is_exact_in_y() -> None:
    """Where all y has to do is to pick the largest loss."""
    game = problems.max_loss()
    x = np.full(4, 0.25)
    found = metrics.duality_gap(
        lambda x, y: -game.population_fn(y, x), game.equilibrium_y, x, max_steps=1
    )  # the players swapped: x picks, y has one step
    assert found.num_steps == 2
    assert found.lower <= game.gap_fn(x, game.equilibrium_y) <= found.upper + 1e-6


@pytest.mark.slow  # A measure on public data.
def test_dense_quadratic_game() -> None:
    """Curvature across coordinates; the linear bound is strict."""
    rng = np.random.default_rng(5)
    p, q, a = (rng.normal(size=(6, 6)).astype(np.float32) for _ in range(3))
    p, q = p @ p.T / 6, q @ q.T / 6

    def value_fn(x: Any, y: Any) -> Any:
        return x @ p @ x / 2 + x @ a @ y - y @ q @ y / 2

    u = jnp.full(6, 1 / 6)
    found = metrics.duality_gap(value_fn, u, u, tolerance=1e-5)
    assert found.error < 2e-5
    grid = rng.dirichlet(np.full(6, 0.3), 20_000).astype(np.float32)
    best = jax.jit(jax.vmap(value_fn, (None, 0)))(u, grid).max()
    worst = jax.jit(jax.vmap(value_fn, (0, None)))(grid, u).min()
    assert best - worst <= found.upper + 1e-6
    assert found.upper < 1.2 * float(best - worst)
    assert found.upper + 0.05 < linear_bound(value_fn, u, u)


@pytest.mark.slow  # A measure on public data.
def test_polytopes() -> None:
    """A square and an l1 ball: as matrices of vertices, and as objects."""
    a = np.array([[1.0, -0.5], [0.25, 2.0]])
    b, c = np.array([0.5, -1.0]), np.array([0.25, 0.5])
    square = np.array(list(itertools.product((-1.0, 1.0), repeat=2)))
    ball = L1Ball(2, 3.0)
    corners = 3 * np.concatenate([np.eye(2), -np.eye(2)])
    x, y = np.array([0.5, -0.25]), np.array([1.0, 0.5])
    exact = (
        b @ x + (corners @ (a.T @ x + c)).max() - c @ y - (square @ (a @ y + b)).min()
    )

    def value_fn(x: Any, y: Any) -> Any:
        return b @ x + c @ y + x @ jnp.asarray(a) @ y

    for domain_x, domain_y in ((square, corners), (Polytope(square), ball)):
        domains = {"domain_x": domain_x, "domain_y": domain_y}
        found = metrics.duality_gap(value_fn, x, y, **domains)
        assert found.value == pytest.approx(exact, abs=1e-5)


def test_one_player_alone_is_the_excess_risk() -> None:
    # Over the l1 ball of radius 1/2 the nearest point to x* has norm 1/2.
    target = jnp.array([1.0, 0.0, -1.0])
    found = metrics.duality_gap(
        lambda x, y: jnp.sum((x - target) ** 2) * jnp.sum(y),
        jnp.zeros(3),
        jnp.ones(1),
        domain_x=L1Ball(3, 0.5),
        tolerance=1e-5,
    )
    assert found.value == pytest.approx(2 - 2 * 0.75**2, abs=1e-4)


def test_a_short_search_says_so() -> None:
    game = problems.quadratic_game()
    x, y = np.eye(game.dim_x)[0], np.eye(game.dim_y)[0]
    few = metrics.duality_gap(game.population_fn, x, y, tolerance=1e-6, max_steps=2)
    assert few.num_steps == 4 and few.error > 1e-4
    assert few.lower - 1e-6 <= game.gap_fn(x, y) <= few.upper + 1e-6


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: metrics.duality_gap(jnp.vdot, jnp.ones(0), jnp.ones(1)), "x must"),
        (
            lambda: metrics.duality_gap(
                jnp.vdot, jnp.ones(2), jnp.ones(2), domain_y=L1Ball(3, 1.0)
            ),
            "domain_y",
        ),
        (
            lambda: metrics.duality_gap(
                jnp.vdot, jnp.ones(2), jnp.ones(2), tolerance=0.0
            ),
            "tolerance",
        ),
        (
            lambda: metrics.duality_gap(
                lambda x, y: jnp.nan * x.sum() * y.sum(), jnp.ones(2), jnp.ones(1)
            ),
            "finite",
        ),
    ],
)
def test_refuses(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


# --- the private gap -----------------------------------------------------------------


def linear(x: Any, y: Any, batch: Any) -> Any:
    """A record is its own pair of gradients."""
    a, b = batch
    return a @ x + b @ y


PROBLEM = Problem(linear)
CLIP = {"linf_clip_norm_x": 1.0, "linf_clip_norm_y": 0.5}


def released(
    a: Any,
    b: Any,
    x: Any,
    y: Any,
    *,
    seed: int = 0,
    noise_multiplier: float = 1e-6,
    relation: Any = "replace_one",
    **changes: Any,
) -> PrivateGap:
    """Next to no noise: at most 20 of the 2**20 units of the sensitivity."""
    batch = (jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    kwargs = {"num_examples": len(batch[0])} | CLIP | changes
    return metrics.private_gap(
        PROBLEM,
        x,
        y,
        batch,
        jaxdp.Keys.insecure(seed),
        noise_multiplier=noise_multiplier,
        relation=relation,
        **kwargs,
    )


def bound(a: Any, b: Any, x: Any, y: Any) -> float:
    """G in float64, from clipped gradients."""
    g = np.clip(np.asarray(a, float), -1, 1).mean(axis=0)
    h = np.clip(np.asarray(b, float), -0.5, 0.5).mean(axis=0)
    return float(g @ x - g.min() + h.max() - h @ y)


def test_private_gap_is_the_bound() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 4)), rng.normal(size=(7, 3))
    x, y = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(3))
    assert released(a, b, x, y).value == pytest.approx(bound(a, b, x, y), abs=1e-3)
    a[2] = np.nan  # counts zero, for both players
    kept_a, kept_b = a.copy(), b.copy()
    kept_a[2], kept_b[2] = 0, 0
    found = released(a, b, x, y).value
    assert found == pytest.approx(bound(kept_a, kept_b, x, y), abs=1e-3)


@pytest.mark.parametrize(("relation", "kappa"), [("replace_one", 2), ("zero_out", 1)])
def test_sensitivity_is_a_bound_and_reached(relation: Any, kappa: int) -> None:
    """Random neighbours stay within it; the worst ones move by all of it."""
    x, y = np.eye(3)[0], np.eye(2)[0]
    stated = 2 * kappa * (1.0 + 0.5) / 4
    # The minimum is at vertex 1 of x and the maximum at vertex 1 of y, before and after.
    a = np.tile([0.0, -9, 9], (4, 1))
    b = np.tile([0.0, 9], (4, 1))
    a[0], b[0] = [9, -9, 9], [-9, 9]
    high = released(a, b, x, y, relation=relation)
    assert high.sensitivity == pytest.approx(stated)
    a[0], b[0] = ([-9, 9, 9], [9, -9]) if kappa == 2 else (0, 0)
    low = released(a, b, x, y, relation=relation)
    assert high.value - low.value == pytest.approx(stated, rel=1e-4)
    rng = np.random.default_rng(kappa)
    for trial in range(12):
        a, b = rng.normal(size=(4, 3)) * 3, rng.normal(size=(4, 2)) * 3
        x, y = rng.dirichlet(np.full(3, 0.3)), rng.dirichlet(np.full(2, 0.3))
        before = released(a, b, x, y, relation=relation).value
        sizes = rng.choice([1, np.inf if trial % 3 else 100], size=5)
        record = sizes * rng.choice([-1, 1], size=5) if kappa == 2 else np.zeros(5)
        a[1], b[1] = record[:3], record[3:]
        after = released(a, b, x, y, relation=relation).value
        assert abs(after - before) <= stated * (1 + 1e-4)


def test_sensitivity_of_every_neighbour() -> None:
    """All data sets of two records with gradients in {-1, 0, 1}^3, all replacements."""
    rows = np.array(list(itertools.product((-1, 0, 1), repeat=3)))
    largest = 0.0
    for weights in ([1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]):
        totals = rows[:, None] + rows[None]
        excess = totals @ np.array(weights) - totals.min(axis=-1)
        change = excess.max(axis=1) - excess.min(axis=1)  # the first record is replaced
        largest = max(largest, float(change.max()))
        assert change.max() <= 2 * 2 * 1.0 + 1e-12
    assert largest == 4.0  # 2 kappa C


def test_noise_and_guarantee() -> None:
    """The release is exact integers plus the exact noise of its own stream."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(9, 3)), rng.normal(size=(9, 2))
    x, y = np.full(3, 1 / 3), np.array([0.25, 0.75])
    plain = released(a, b, x, y).value
    found = [released(a, b, x, y, seed=i, noise_multiplier=2.5) for i in range(48)]
    first = found[0]
    assert first.sensitivity == pytest.approx(4 * 1.5 / 9)
    assert first.std == pytest.approx(2.5 * first.sensitivity, rel=1e-6)
    units = math.ceil(math.hypot(2.5 * 2**20, 2))
    coins = noise.Coins(exact_noise_secret(jaxdp.Keys.insecure(0)), "private_gap")
    drawn = int(noise.discrete_gaussian(coins, units, 1)[0]) / 2**20
    assert first.value == pytest.approx(
        plain + drawn * first.sensitivity, abs=3e-5 * first.sensitivity
    )
    z = np.array([(f.value - plain) / f.std for f in found])
    # Chi-square of 48: outside [12, 115] with probability below 1e-6.
    assert 12 < np.sum(z**2) < 115 and abs(z.mean()) < 5 / math.sqrt(48)
    epsilon = accounting.epsilon(*first.guarantee, 1e-5)
    assert epsilon == pytest.approx(
        accounting.gaussian_epsilon(1 / 2.5, 1e-5), rel=1e-5
    )


def test_centring_halves_the_clip() -> None:
    """Losses in [0, 1]: half of the clip, the same number, half of the sensitivity."""
    rng = np.random.default_rng(4)
    a, b = rng.uniform(size=(6, 3)), rng.uniform(size=(6, 2))
    x, y = np.eye(3)[1], np.eye(2)[0]
    clips = {"linf_clip_norm_x": 1.0, "linf_clip_norm_y": 1.0}
    whole = released(a, b, x, y, **clips)
    halves = {name: clip / 2 for name, clip in clips.items()}
    half = released(a, b, x, y, center_gradients=True, **halves)
    assert half.value == pytest.approx(whole.value, abs=1e-3)
    assert half.sensitivity == pytest.approx(whole.sensitivity / 2)


def test_polytope_without_y() -> None:
    ball = L1Ball(3, 2.0)
    problem = Problem(lambda x, batch: batch[0] @ x, domain_x=ball)
    rng = np.random.default_rng(6)
    a = rng.uniform(-1, 1, (5, 3)).astype(np.float32)
    weights = rng.dirichlet(np.ones(6))
    found = metrics.private_gap(
        problem,
        weights,
        None,
        (jnp.asarray(a),),
        jaxdp.Keys.insecure(0),
        noise_multiplier=1e-6,
        relation="add_or_remove",
        linf_clip_norm_x=2.0,
        num_examples=6,
    )
    g = np.asarray(ball.vertex_gradient(jnp.asarray(a.sum(axis=0) / 6)))
    assert found.value == pytest.approx(g @ weights - g.min(), abs=1e-3)
    assert found.sensitivity == pytest.approx(2 * 2.0 / 6)


def test_keys_serve_one_private_gap() -> None:
    keys = jaxdp.Keys.from_entropy()
    a, b = jnp.zeros((2, 2)), jnp.zeros((2, 2))
    half = np.full(2, 0.5)
    kwargs: Any = {"noise_multiplier": 1.0, "relation": "zero_out", "num_examples": 2}
    metrics.private_gap(PROBLEM, half, half, (a, b), keys, **kwargs, **CLIP)
    with pytest.raises(ValueError, match="already served"):
        metrics.private_gap(PROBLEM, half, half, (a, b), keys, **kwargs, **CLIP)


def test_a_private_gap_is_reserved_before_it_is_made(tmp_path: Path) -> None:
    """A second one that the budget refuses, or keys that are spent, cost nothing."""
    half, zero = np.full(2, 0.5), np.zeros((3, 2))
    budget = jaxdp.Budget.create(
        tmp_path, epsilon=1.5, delta=1e-5, relation="replace_one"
    )
    options = {"budget": budget, "delta": 1e-6}
    found = released(zero, zero, half, half, noise_multiplier=5.0, **options)
    (made,) = budget.reservations
    assert made.what == "private gap" and made.delta == 1e-6
    assert made.epsilon == pytest.approx(accounting.epsilon(*found.guarantee, 1e-6))
    with pytest.raises(ValueError, match="budget"):
        released(zero, zero, half, half, noise_multiplier=5.0, **options)
    with pytest.raises(ValueError, match="delta must be given"):
        released(zero, zero, half, half, noise_multiplier=5.0, budget=budget)
    with pytest.raises(TypeError, match="budget must be"):
        released(zero, zero, half, half, budget=3.0, delta=1e-6)
    with pytest.raises(ValueError, match="delta must be None without a budget"):
        released(zero, zero, half, half, delta=1e-6)
    with pytest.raises(ValueError, match="relation must be the budget's"):
        released(zero, zero, half, half, relation="zero_out", **options)
    keys = jaxdp.Keys.from_entropy()
    given = (PROBLEM, half, half, (jnp.zeros((3, 2)),) * 2, keys)
    kwargs: Any = {"relation": "replace_one", "num_examples": 3} | CLIP
    metrics.private_gap(*given, noise_multiplier=1.0, **kwargs)
    with pytest.raises(ValueError, match="already served"):
        metrics.private_gap(*given, noise_multiplier=50.0, **kwargs, **options)
    assert budget.reservations == (made,)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier"),
        ({"relation": "swap"}, ValueError, "relation"),
        ({"linf_clip_norm_x": -1.0}, ValueError, "linf_clip_norm_x"),
        ({"linf_clip_norm_y": None}, ValueError, "linf_clip_norm_y"),
        ({"num_examples": 4}, ValueError, "records"),
        ({"x": [0.5, 0.6]}, ValueError, "weights_x"),
        ({"y": [-0.5, 1.5]}, ValueError, "weights_y"),
        ({"x": [[1.0, 0.0]]}, ValueError, "weights_x"),
    ],
)
def test_private_gap_refuses(changes: Any, error: Any, match: str) -> None:
    points = {"x": [0.5, 0.5], "y": [0.5, 0.5]} | changes
    with pytest.raises(error, match=match):
        released(np.zeros((3, 2)), np.zeros((3, 2)), **points)


def test_what_is_refused_spends_no_keys() -> None:
    keys = jaxdp.Keys.from_entropy()
    half, data = np.full(2, 0.5), (jnp.zeros((2, 2)), jnp.zeros((2, 2)))
    kwargs: Any = {"noise_multiplier": 1.0, "relation": "zero_out", "num_examples": 2}

    def gap(x: Any, data: Any, **more: Any) -> None:
        metrics.private_gap(PROBLEM, x, half, data, keys, **kwargs, **CLIP, **more)

    for given, error, match in (
        ((half, ()), ValueError, "data"),
        ((half, (data[0], data[1][:1])), ValueError, "data"),
        ((np.full(3, 1 / 3), data), (ValueError, TypeError), None),
    ):
        with pytest.raises(error, match=match):
            gap(*given)
    with pytest.raises(TypeError, match="center_gradients"):
        gap(half, data, center_gradients=1)
    with pytest.raises(ValueError, match="microbatch_size"):
        gap(half, data, microbatch_size=0)
    gap(half, data)  # The keys are as good as new.


@pytest.mark.parametrize("which", ["gap", "goldstein", "step", "players"])
def test_a_number_that_float32_does_not_hold_warns_of_nothing(which: str) -> None:
    """JAX's warning would be about one record."""
    data = np.full((8, 2), 0.5)
    data[3, 1] = 1e300
    keys, half = jaxdp.Keys.insecure(0), jnp.full(2, 0.5)
    noise: Any = {"noise_multiplier": 1.0, "relation": "zero_out", "num_examples": 8}
    losses = lambda w, rows: rows @ w  # noqa: E731
    plan = jaxdp.plans.DPGD(
        num_examples=8,
        num_steps=1,
        sampling=jaxdp.sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
    ).with_noise(noise_multiplier=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if which == "gap":
            problem = Problem(lambda x, rows: rows @ x)
            metrics.private_gap(
                *(problem, half, None, data, keys), linf_clip_norm_x=1.0, **noise
            )
        elif which == "goldstein":
            metrics.private_goldstein(
                *(losses, half, data, keys), radius=0.1, l2_clip_norm=1.0, **noise
            )
        elif which == "step":
            tx: Any = plan.transform(keys)
            tx.update(None, tx.init(half), half, value_fn=losses, batch=data)
        else:
            active = jnp.ones((), bool)
            players.batch(plan.run, data, jnp.int32(0), 4, active)
