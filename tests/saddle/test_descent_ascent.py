"""DP-SGDA: ``plans.DPGD`` with descent ascent, on the problems of ``plans.Saddle``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling

D, N, STEPS = 4, 24, 6
RNG = np.random.default_rng(0)
MATRIX = RNG.uniform(-1, 1, (D, D)).astype(np.float32)
VECTORS = tuple(RNG.uniform(-1, 1, (N, D)).astype(np.float32) for _ in range(2))
GAME = jaxdp.MatrixGame(MATRIX, scale=0.5)
START = (jnp.full(D, 1 / D), jnp.full(D, 1 / D))


def make(**changes: Any) -> plans.DPGD:
    numbers: dict[str, Any] = {
        "num_examples": N,
        "num_steps": STEPS,
        "sampling": sampling.SinglePass(N // STEPS),
        "relation": "replace_one",
        "l2_clip_norm": 0.6,
        "noise_multiplier": 0.0,
        "delta": 1e-5,
    }
    return plans.DPGD(**numbers | changes)


def simplex(v: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex, by sorting (Held, Wolfe and Crowder, 1974)."""
    u = np.sort(v)[::-1]
    tops = (np.cumsum(u) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - tops[u > tops][-1], 0)


def l1_ball(v: np.ndarray, radius: float) -> np.ndarray:
    inside = np.abs(v).sum() <= radius
    return v if inside else np.sign(v) * radius * simplex(np.abs(v) / radius)


@pytest.mark.parametrize("ball", [False, True], ids=["simplex", "l1 ball"])
def test_a_run_is_the_plain_algorithm(ball: bool) -> None:
    """Without noise: gradients clipped together, both players' steps, and their mean."""
    domain = jaxdp.L1Ball(D, 0.4) if ball else None
    game = jaxdp.MatrixGame(MATRIX, scale=0.5, domain_x=domain)
    start = (jnp.zeros(D), START[1]) if ball else START
    optimizer = jaxdp.descent_ascent(0.3, lambda t: 0.5 / (t + 1), domain_x=domain)
    task = {"value_fn": game, "optimizer": optimizer}
    result = jaxdp.fit(make(), Keys.insecure(0), start, VECTORS, **task)
    (x, y), points = (np.float64(p) for p in start), []
    for t in range(STEPS):
        a, b = (v[t * N // STEPS : (t + 1) * N // STEPS] for v in VECTORS)
        rows = np.hstack([MATRIX @ y + 0.5 * a, x @ MATRIX + 0.5 * b])
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        assert (norms > 0.6).any()
        g = (rows * np.minimum(1, 0.6 / norms)).mean(axis=0)
        x = x - 0.3 * g[:D]
        x = l1_ball(x, 0.4) if ball else simplex(x)
        y = simplex(y + 0.5 / (t + 1) * g[D:])
        points.append((x, y))
    for got, want in zip(result.params, points[-1], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    mean = jaxdp.polyak_output(result.info.state)
    for got, want in zip(mean, np.mean(points, axis=0), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def squares(x: Any, batch: Any) -> jax.Array:
    return (batch[0] - x) ** 2


PROBLEMS = {
    "vectors": (GAME, VECTORS),
    "matrices": (
        jaxdp.MatrixGame(MATRIX, records="matrices"),
        RNG.uniform(-1, 1, (N, D, D)).astype(np.float32),
    ),
    "function": (
        jaxdp.Problem(lambda x, y, batch: (batch[0] @ x) ** 2 - batch[1] @ y),
        VECTORS,
    ),
    "losses": (jaxdp.MaxOfLosses(squares), VECTORS),
    "groups": (
        jaxdp.MaxOfLosses(
            lambda x, batch: squares(x, batch)[:, 0],
            group_fn=lambda batch: (batch[1][:, 0] > 0).astype(jnp.int32),
            group_probabilities=(0.5, 0.25, 0.15, 0.1),
        ),
        VECTORS,
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_are_those_of_saddle(name: str) -> None:
    """Their gradients at a pair of points are the vertex gradients of both players."""
    problem, data = PROBLEMS[name]
    x, y = (RNG.dirichlet(np.ones(D)).astype(np.float32) for _ in range(2))
    found = make().contributions(problem, (x, y), data, jax.random.key(0)).rows
    bound = jaxdp.saddle.oracles.Bound(16.0, 16)
    sums = problem.gradient_sums(x, y, data, jnp.ones(N, bool), bound, bound)
    wanted = np.concatenate([np.asarray(total) for total in sums]) * 16 / 2**16
    np.testing.assert_allclose(found.sum(axis=0), wanted, atol=N * 2e-4)
    one, other = problem(x, y, data), problem((x, y), data)
    np.testing.assert_array_equal(one, other)


def test_it_finds_a_saddle_point_privately() -> None:
    """Rock, paper, scissors: the gap of uniform points is 0.84; seeds are fixed."""
    game = jaxdp.models.rock_paper_scissors(dim=10)
    problem = jaxdp.MatrixGame(game.matrix, scale=game.sign_scale)
    plan = make(
        num_examples=20_000,
        num_steps=64,
        sampling=sampling.SinglePass(312),
        l2_clip_norm=1.0,
        noise_multiplier=None,
    ).calibrate(epsilon=1.0, delta=1e-6)
    uniform = jnp.full(10, 0.1)
    task = {"value_fn": problem, "optimizer": jaxdp.descent_ascent(0.5, 0.5)}
    data = game.make_data(20_000, 0)
    result = jaxdp.fit(plan, Keys.insecure(0), (uniform, uniform), data, **task)
    assert game.gap_fn(uniform, uniform) > 0.8
    assert game.gap_fn(*jaxdp.polyak_output(result.info.state)) < 0.25


@pytest.mark.parametrize(
    ("given", "params", "said"),
    [
        ({"step_size_x": -1.0}, START, "step_size_x"),
        (
            {"domain_y": jaxdp.Polytope(np.eye(4))},
            START,
            "domain_y must be a jaxdp.Simplex.*got a Polytope; .* weights of its vert",
        ),
        ({}, jnp.ones(4), "params must be a pair of points"),
        ({"domain_x": jaxdp.Simplex(3)}, START, r"shapes \(3,\) and \(p,\)"),
        ({}, (*START, jnp.ones(4)), "params must be a pair of points"),
        ({}, (jnp.ones((2, 2)), jnp.ones(4)), "params must be a pair of points"),
    ],
)
def test_what_cannot_be_projected_is_refused(
    given: Any, params: Any, said: str
) -> None:
    sizes = {"step_size_x": 0.1, "step_size_y": 0.1} | given
    with pytest.raises((TypeError, ValueError), match=said):
        jaxdp.descent_ascent(**sizes).init(params)


def test_it_stands_in_a_chain() -> None:
    tx = optax.chain(optax.clip(10.0), jaxdp.descent_ascent(0.1, 0.1))
    state = tx.init(START)
    with pytest.raises(ValueError, match="params must be passed"):
        tx.update(START, state)
    updates, state = jax.jit(tx.update)((jnp.arange(4.0), jnp.zeros(4)), state, START)
    moved = optax.apply_updates(START, updates)
    np.testing.assert_allclose(moved[0], simplex(0.25 - 0.1 * np.arange(4)), atol=1e-6)
    np.testing.assert_allclose(moved[1], START[1], atol=1e-6)
