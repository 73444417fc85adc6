"""Groups of records: who belongs to which, their errors, the worst group's problem."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import models
from jaxdp.data.datasets import DIABETES_BOUNDS
from jaxdp.models import groups
from jaxdp.models.networks import Network
from jaxdp.saddle.oracles import Bound

P = (0.2, 0.5, 0.3)
RADIUS = 2.0
N, D, K = 12, 3, 4


def small() -> models.Dataset:
    """Records of 3 features in [-1, 1], the last one in {-1, 0, 1}, and 4 classes."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(N, D)).astype(np.float32)
    x[:, -1] = rng.integers(0, 3, N) / 2
    x = 2 * x - 1
    y = rng.integers(0, K, N).astype(np.int32)
    return models.Dataset(
        name="small",
        train=(x, y),
        test=(x[:5].copy(), y[:5].copy()),
        task="classification",
        num_classes=K,
        feature_names=("a", "b", "c"),
    )


def test_a_column_s_values_are_groups_as_the_features_are_scaled() -> None:
    dataset = small()
    found = groups.grouped(
        dataset,
        "c",
        group_values=(30, 10),
        bounds=(10, 30),
        group_probabilities=(0.3, 0.7),
    )
    c = dataset.train[0][:, 2]
    want = np.where(c == 1, 0, np.where(c == -1, 1, -1))  # 20 is of no group.
    np.testing.assert_array_equal(found.train, want)
    np.testing.assert_array_equal(found.test, want[:5])
    assert {-1, 0, 1} == set(want.tolist())
    assert (found.names, found.probabilities) == (("c 30", "c 10"), (0.3, 0.7))
    x, y, group = found.records
    order = np.lexsort(x.T)
    before = np.lexsort(dataset.train[0].T)
    for now, was in zip((x, y, group), (*dataset.train, want), strict=True):
        np.testing.assert_array_equal(now[order], was[before])
    assert not np.array_equal(x, dataset.train[0])  # Files may be sorted.


def test_classes_are_groups() -> None:
    found = groups.grouped(small(), groups.CLASS)
    np.testing.assert_array_equal(found.train, found.dataset.train[1])
    assert (found.names, found.probabilities) == (("0", "1", "2", "3"), (0.25,) * 4)


def test_diabetes_by_sex_above_a_round_number() -> None:
    whole = models.load("diabetes")
    dataset = groups.above(whole, groups.DIABETES_THRESHOLD)
    np.testing.assert_array_equal(
        dataset.train[1], 400 * whole.train[1].astype(np.float64) > 150
    )
    both = np.concatenate([dataset.train[1], dataset.test[1]])
    assert len(both) == 442
    assert 0.4 < both.mean() < 0.5  # No median of theirs, which would be private.
    found = groups.grouped(
        dataset,
        "sex",
        group_values=groups.DIABETES_SEXES,
        bounds=DIABETES_BOUNDS,
    )
    counts = np.bincount(np.concatenate([found.train, found.test]))
    np.testing.assert_array_equal(counts, [235, 207])
    assert "above 150" in dataset.note


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("d", {}, "group must be one of 'class', 'a', 'b', 'c'; got 'd'"),
    ("c", {}, "group_values must be two finite numbers or more"),
    ("c", {"group_values": (1,)}, "group_values must be two finite numbers or more"),
    ("c", {"group_values": (1, math.nan)}, "group_values must be two finite"),
    ("c", {"group_values": (1, 1)}, "group_values must be different ones"),
    ("c", {"group_values": (9, 8), "bounds": (0, 1)}, "must be different ones within"),
    ("class", {"group_values": (1, 2)}, "group_values must be None for"),
    (
        "class",
        {"group_probabilities": (0.5, 0.5)},
        "must be 4 numbers > 0 that sum to 1",
    ),
    (
        "class",
        {"group_probabilities": (0.3, 0.3, 0.3, 0.3)},
        "got (0.3, 0.3, 0.3, 0.3)",
    ),
    ("class", {"group_probabilities": (0.5, 0.5, 0.5, -0.5)}, "must be 4 numbers > 0"),
]


@pytest.mark.parametrize(("group", "given", "said"), WRONG)
def test_wrong_groups_are_named(group: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        groups.grouped(small(), group, **given)
    assert said in str(caught.value)


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="dataset must be a classification"):
        groups.grouped(models.load("diabetes"), "sex")
    with pytest.raises(ValueError, match="dataset must be a regression"):
        groups.above(small(), 1.0)


def test_group_errors_are_shares_of_wrong_records() -> None:
    outputs = np.array([[2, 1], [0, 1], [3, 1], [0, 1], [1, 0], [9, 0]], np.float32)
    y = np.array([0, 0, 0, 1, 1, 1])
    group = np.array([0, 0, 1, 1, 1, -1])
    found = np.asarray(groups.group_errors(outputs, y, group, 3))
    np.testing.assert_allclose(found, [1 / 2, 1 / 3, np.nan], rtol=1e-6)


# --- the worst group's problem -----------------------------------------------------


@pytest.fixture(scope="module")
def game() -> tuple[models.Dataset, Network, groups.WorstGroup]:
    dataset = small()
    network = models.network_for(dataset)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return dataset, network, groups.worst_group(network, shapes, P, RADIUS)


def reference(
    params: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Losses (B,) from log k and gradients (B, D + 1, K) of features in [-1, 1]."""
    features = np.c_[x.astype(np.float64), np.ones(len(x))]
    outputs = features @ params
    outputs -= outputs.max(axis=1, keepdims=True)
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    losses = -np.log(shares[rows, y]) - math.log(K)
    shares[rows, y] -= 1
    return losses, features[:, :, None] * shares[:, None, :]


def as_vector(params: np.ndarray) -> np.ndarray:
    """Parameters (D + 1, K), the bias last, in the order of the ball's coordinates."""
    return np.concatenate([params[-1], params[:-1].ravel()])


def test_sums_are_those_of_numpy(game: Any) -> None:
    dataset, _, worst = game
    rng = np.random.default_rng(1)
    params = rng.normal(size=(D + 1, K))
    params *= RADIUS / np.abs(params).sum()
    group = rng.integers(0, 3, N).astype(np.int32)
    group[0] = -1  # Of no group.
    mask = np.arange(N) != 3
    weights = np.array([0.2, 0.7, 0.1], np.float32)
    batch = (*dataset.train, group)
    bound_x, bound_y = Bound(worst.linf_bound_x, 16), Bound(worst.linf_bound_y, 16)
    total_x, total_y = jax.jit(
        lambda *given: worst.problem.gradient_sums(
            *given, bound_x, bound_y, center=True
        )
    )(jnp.asarray(as_vector(params), jnp.float32), weights, batch, jnp.asarray(mask))
    losses, gradients = reference(params, *dataset.train)
    counts = mask & (group >= 0)
    shares = np.where(counts, 1 / np.array(P)[group], 0)
    of_x = np.einsum("b,bij->ij", shares * weights[group], gradients)
    of_x = RADIUS * as_vector(of_x)
    own = losses * shares
    of_y = [own[group == i].sum() - own.sum() / 2 for i in range(3)]
    unit_x, unit_y = (bound.clip / 2**16 for bound in (bound_x, bound_y))
    # Half a unit for each record.
    np.testing.assert_allclose(
        np.asarray(total_x) * unit_x, np.r_[of_x, -of_x], atol=N * unit_x
    )
    np.testing.assert_allclose(np.asarray(total_y) * unit_y, of_y, atol=N * unit_y)
    values = worst.problem(jnp.asarray(as_vector(params)), weights, batch)
    np.testing.assert_allclose(
        values, np.where(group >= 0, weights[group] / np.array(P)[group], 0) * losses,
        rtol=1e-4, atol=1e-6,
    )  # fmt: skip


def test_bounds_hold_and_are_reached(game: Any) -> None:
    _, _, worst = game
    corners = np.array(np.meshgrid(*[[-1, 1]] * D)).reshape(D, -1).T.astype(np.float32)
    points = [
        sign * RADIUS * np.eye((D + 1) * K)[j].reshape(D + 1, K)
        for sign in (1, -1)
        for j in range((D + 1) * K)
    ]
    slopes, losses = [], []
    for point in points:
        for y in range(K):
            found = reference(point, corners, np.full(len(corners), y))
            losses.append(np.abs(found[0]).max())
            slopes.append(np.abs(found[1]).max())
    least = min(P)
    assert worst.linf_bound_y == pytest.approx(max(losses) / least / 2)
    assert worst.linf_bound_x == pytest.approx(RADIUS * max(slopes) / least)


def test_parameters_are_of_features_as_they_are(game: Any) -> None:
    dataset, network, worst = game
    rng = np.random.default_rng(2)
    weights = rng.dirichlet(np.ones(worst.num_vertices))
    x = RADIUS * (weights[: (D + 1) * K] - weights[(D + 1) * K :])
    params = np.vstack([x[K:].reshape(D, K), x[:K]])
    features = np.c_[dataset.train[0], np.ones(N)]
    outputs = network.apply(
        worst.params_fn(jnp.asarray(weights, jnp.float32)), dataset.train[0]
    )
    np.testing.assert_allclose(outputs, features @ params, rtol=1e-4, atol=1e-5)
    # The same of features in another range, which are moved.
    half = groups.worst_group(
        network, network.init(jax.random.key(0)), P, RADIUS, (0, 1)
    )
    outputs = network.apply(
        half.params_fn(jnp.asarray(weights, jnp.float32)), (dataset.train[0] + 1) / 2
    )
    np.testing.assert_allclose(outputs, features @ params, rtol=1e-4, atol=1e-5)
    # A radius of any size.
    wide = groups.worst_group(network, worst.params_fn(jnp.asarray(weights)), P, 1e4)
    assert wide.linf_bound_y == pytest.approx((1e4 + math.log(3 / 4)) / 0.4)


def test_other_networks_are_refused() -> None:
    dataset = small()
    for network in (
        models.network_for(dataset, "mlp", hidden=(3,)),
        models.network_for(dataset, loss="hinge"),
        models.network_for(dataset, "residual_stack", width=2, num_layers=2),
    ):
        shapes = jax.eval_shape(network.init, jax.random.key(0))
        with pytest.raises(ValueError, match="network must be linear with cross-ent"):
            groups.worst_group(network, shapes, P, RADIUS)
    network = models.network_for(dataset)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    with pytest.raises(ValueError, match="radius must be"):
        groups.worst_group(network, shapes, P, 0.0)
