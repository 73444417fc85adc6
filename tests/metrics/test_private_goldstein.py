"""The private bound on a Goldstein norm: its release, its sensitivity, what it bounds."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, metrics
from jaxdp.core import keys as keys_lib
from jaxdp.dpgd import oracle
from jaxdp.kernels import perturb, sphere
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.metrics.private_goldstein import PrivateGoldstein, norm_limit

D = 3


def losses(x: Any, batch: Any) -> jax.Array:
    """|x| with a slope of each record's own, of any size: F = |x| where they cancel."""
    return jnp.linalg.norm(x) + batch @ x


def bound(
    x: Any, data: Any, *, seed: int = 0, loss: Any = losses, **changes: Any
) -> PrivateGoldstein:
    options: dict[str, Any] = {
        "radius": 0.5,
        "l2_clip_norm": 1.3,
        "noise_multiplier": 2.0,
        "relation": "replace_one",
        "num_examples": len(data),
    }
    return metrics.private_goldstein(
        loss,
        jnp.asarray(x, jnp.float32),
        jnp.asarray(data, jnp.float32),
        Keys.insecure(seed),
        **options | changes,
    )


def slopes(n: int, seed: int, dim: int = D) -> np.ndarray:
    """Vectors of norm 0.3, of mean zero."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (n, dim))
    return 0.3 / math.sqrt(dim) * signs


def test_the_release_is_a_mean_of_gradients_at_points_in_the_ball() -> None:
    """Against float64, at the points that the public root gives again."""
    x, data = np.array([0.4, -0.1, 0.2]), slopes(50, 0)
    found = bound(x, data, noise_multiplier=1e-2)
    root = Keys.insecure(0).direction
    key = keys_lib.stream(root, "points", 0, found.plan.run.context)
    rows = sphere.directions(key, jnp.zeros(D), law="ball", num=8)
    gradients = []
    for k in range(8):
        row, scale = sphere.select(rows, k), jnp.float32(0.5 / math.sqrt(D))
        y = np.asarray(perturb.perturb(jnp.asarray(x), row, scale), np.float64)
        assert np.linalg.norm(y - x) <= 0.5 * (1 + 1e-6)
        gradients.append(y / np.linalg.norm(y))
    mean = np.mean(gradients, axis=0) + data.mean(axis=0)
    far = 6 * found.plan.noise_std + found.rounding + 1e-4
    np.testing.assert_allclose(np.asarray(found.release), mean, atol=far)
    # Its parts.
    std = 1e-2 * 2 * 1.3 / 50
    assert found.plan.noise_std == pytest.approx(std, rel=1e-4)
    norm = float(np.linalg.norm(np.asarray(found.release, np.float64)))
    assert found.mean_norm == pytest.approx(norm_limit(norm, std, D, 0.1 / 3), rel=1e-3)
    deviation = 1 + math.sqrt(2 * math.log(3 / 0.05))
    assert found.sampling_error == pytest.approx(1.3 / math.sqrt(50) * deviation)
    assert found.records_bound == found.mean_norm + found.rounding
    assert found.bound == found.records_bound + found.sampling_error
    assert np.linalg.norm(mean) <= found.records_bound


@pytest.mark.parametrize("place", ["kink", "edge"])
def test_it_bounds_the_least_norm(place: str) -> None:
    """Of |x|: 0 at 0, and sqrt(1 - (radius / |x|)^2) away. Wrong with probability 1e-7."""
    x = np.zeros(D) if place == "kink" else np.eye(D)[0]
    options = {"num_points": 64, "failure_probability": 1e-7}
    found = bound(x, slopes(20_000, 1), **options)
    least = 0.0 if place == "kink" else math.sqrt(0.75)
    assert least <= found.bound < least + 0.4


@pytest.mark.parametrize("dim", [1, 4, 300])
@pytest.mark.parametrize("length", [0.0, 3.0, 40.0])
def test_the_limit_of_a_norm_holds_as_often_as_it_says(dim: int, length: float) -> None:
    """Of 4000 draws of noise, more are wrong by chance with probability 1e-7 at most."""
    rng = np.random.default_rng(dim)
    noised = rng.standard_normal((4000, dim))
    noised[:, 0] += length
    limits = np.array(
        [norm_limit(norm, 1.0, dim, 0.2) for norm in np.linalg.norm(noised, axis=1)]
    )
    wrong = int(np.sum(limits < length))
    assert wrong <= 4000 * 0.2 + 5.2 * math.sqrt(4000 * 0.2 * 0.8)
    if dim == 300:  # It is of use: the noise's own length is taken off.
        assert np.median(limits) < np.median(np.linalg.norm(noised, axis=1))


def largest_move(relation: Any = "replace_one") -> float:
    """How far the release moves between neighbours that are as different as can be."""
    x, data = np.full(D, 5.0), np.zeros((4, D))
    data[0] = [9e8, 0, 0]
    first = bound(x, data, relation=relation).release
    data[0] = [-9e8, 0, 0] if relation == "replace_one" else np.nan
    second = bound(x, data, relation=relation).release
    return float(np.linalg.norm(np.asarray(first) - np.asarray(second)))


@pytest.mark.parametrize(
    ("relation", "moves"),
    [("replace_one", 2), ("zero_out", 1)],
)
def test_sensitivity_is_a_bound_and_reached(relation: Any, moves: int) -> None:
    """The noise is the same in both. A record of NaN counts zero."""
    limit = moves * 1.3 / 4
    assert 0.999 * limit <= largest_move(relation) <= limit * (1 + 1e-6)


def is_noise(found: PrivateGoldstein) -> bool:
    """Whether a release of zeros has the plan's standard deviation (failure 1e-6)."""
    noise = np.asarray(found.release, np.float64) / found.plan.noise_std
    return bool(abs(np.mean(noise**2) - 1) < 5 * math.sqrt(2 / noise.size))


def of_zeros() -> PrivateGoldstein:
    return bound(
        np.zeros(3000), np.zeros((4, 1)), loss=lambda x, batch: 0 * x[0] * batch[:, 0]
    )


def test_noise_is_that_of_the_plan_and_taken_off() -> None:
    found = of_zeros()
    assert is_noise(found)
    length = found.plan.noise_std * math.sqrt(3000)
    assert found.mean_norm < 0.5 * length
    epsilon = found.plan.epsilon(delta=1e-6)
    assert epsilon == pytest.approx(
        jaxdp.accounting.gaussian_epsilon(0.5, 1e-6), rel=1e-3
    )


@pytest.mark.parametrize("fault", ["no clip", "half the noise"])
def test_planted_faults_are_found(fault: str, monkeypatch: Any) -> None:
    if fault == "no clip":

        def unclipped(grid: Any, rows: Any, mask: Any) -> Any:
            units = rows * np.float32(2**grid.bits / grid.l2_clip_norm)
            return jnp.clip(jnp.trunc(units), -(2**30), 2**30).astype(jnp.int32).sum(0)

        monkeypatch.setattr(oracle.release, "bounded_sum", unclipped)
        assert largest_move() > 2 * 1.3 / 4 * 1.001
    else:
        added = oracle.release.noised_mean

        def halved(grid: Any, total: Any, noise: Fixed) -> Any:
            return added(grid, total, Fixed(noise.high // 2))

        monkeypatch.setattr(oracle.release, "noised_mean", halved)
        assert not is_noise(of_zeros())


def test_points_ignore_the_noise_root() -> None:
    """Who knows the points knows nothing of the noise, and the other way round."""
    one, other = Keys.insecure(0), Keys.insecure(1)
    mixed = jax.tree.map(lambda x: x, one)
    object.__setattr__(mixed, "direction", other.direction)
    data, x = jnp.zeros((4, D)), jnp.asarray([0.2, 0.0, 0.0])
    given: dict[str, Any] = {"radius": 0.5, "l2_clip_norm": 1.3, "num_examples": 4}
    given |= {"relation": "zero_out", "num_points": 1, "noise_multiplier": 1.0}
    a, b = (
        np.asarray(metrics.private_goldstein(losses, x, data, k, **given).release)
        for k in (one, mixed)
    )
    # The same noise, about gradients of norm one at different points.
    moved = np.linalg.norm(a - b)
    assert 0.01 < moved <= 2 + 1e-3


def test_it_is_reserved_before_it_is_made(tmp_path: Path) -> None:
    budget = jaxdp.Budget.create(
        tmp_path, epsilon=4.0, delta=1e-5, relation="replace_one"
    )
    options = {"budget": budget, "delta": 1e-6}
    found = bound(np.ones(D), np.zeros((3, D)), **options)
    (made,) = budget.reservations
    assert made.what == "private goldstein"
    assert made.epsilon == pytest.approx(float(found.plan.epsilon(delta=1e-6)))
    with pytest.raises(ValueError, match="budget"):
        bound(np.ones(D), np.zeros((3, D)), **options)
    # What is refused spends no keys; keys serve one.
    keys = Keys.from_entropy()
    given: dict[str, Any] = {"radius": 0.5, "l2_clip_norm": 1.0, "num_points": 1}
    given |= {"relation": "replace_one", "noise_multiplier": 40.0}
    data = jnp.zeros((3, D))
    for loss, num in ((losses, 4), (lambda x, batch: jnp.sum(x), 3)):
        with pytest.raises(ValueError):
            metrics.private_goldstein(
                loss, jnp.ones(D), data, keys, num_examples=num, **given
            )
    keys_lib.check_unspent(keys, "run")
    given |= {"num_examples": 3}
    metrics.private_goldstein(losses, jnp.ones(D), data, keys, **given)
    with pytest.raises(ValueError, match="already served"):
        metrics.private_goldstein(losses, jnp.ones(D), data, keys, **given, **options)
    assert budget.reservations == (made,)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"radius": 0.0}, ValueError, "radius"),
        ({"radius": 1e-9}, ValueError, "radius must be well above the rounding"),
        ({"l2_clip_norm": -1.0}, ValueError, "l2_clip_norm"),
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier"),
        ({"relation": "swap"}, ValueError, "relation"),
        (
            {"num_examples": 4},
            ValueError,
            "data must have num_examples=4 records, got 3",
        ),
        ({"num_points": 0}, ValueError, "num_points"),
        ({"failure_probability": 1.0}, ValueError, "failure_probability"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size"),
        ({"delta": 1e-6}, ValueError, "delta must be None without a budget"),
        ({"budget": 3.0}, TypeError, "budget must be"),
        ({"loss": lambda x, batch: jnp.sum(x)}, ValueError, "one loss per record"),
    ],
)
def test_refusals(changes: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        bound(np.ones(D), np.zeros((3, D)), **changes)
