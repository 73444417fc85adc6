"""Losses that need no derivative: counts, F1 scores, scorers outside JAX.

A loss in [a, b] has slopes of at most (b - a) / (2 smoothing_radius), whatever it is:
with that as ``l2_clip_norm`` one direction is never clipped. Seeds are fixed, so that a
threshold far from the value seen fails only where another machine rounds otherwise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys as keys_lib

RADIUS = 0.1


def make_plan(num_examples: int, **changes: Any) -> plans.DPZero:
    given: dict[str, Any] = {
        "num_examples": num_examples,
        "num_steps": 300,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1 / (2 * RADIUS),
        "smoothing_radius": RADIUS,
        "num_directions": 4,
    }
    return plans.DPZero(**given | changes)


def linear(params: Any, x: Any) -> jax.Array:
    return x @ params["w"] + params["b"]


def zeros(inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"w": jnp.zeros((inputs, outputs)), "b": jnp.zeros(outputs)}


def error(params: Any, batch: Any) -> jax.Array:
    """0-1 loss (B,): one where the largest score is not the record's class."""
    x, y = batch
    return jnp.where(jnp.argmax(linear(params, x), axis=-1) == y, 0.0, 1.0)


def f1_loss(params: Any, batch: Any) -> jax.Array:
    """One minus the F1 score (B,) of the set of labels whose scores are positive."""
    x, labels = batch
    chosen = linear(params, x) > 0
    both = jnp.sum(chosen & labels, axis=-1)
    total = jnp.sum(chosen, axis=-1) + jnp.sum(labels, axis=-1)
    return 1 - jnp.where(total == 0, 1.0, 2 * both / jnp.maximum(total, 1))


def mean(loss: Callable[..., Any], params: Any, records: Any) -> float:
    return float(jnp.mean(loss(params, records)))


@pytest.mark.slow  # A study.
def test_accuracy_itself_is_trained() -> None:
    """Digits at (4, 1e-5): from 0.08 to 0.8 on held-out records; 0.6 is asked for."""
    data = jaxdp.models.load("digits")
    plan = make_plan(data.num_examples).calibrate(epsilon=4.0, delta=1e-5)
    start = zeros(64, 10)
    result = jaxdp.fit(
        plan,
        Keys.insecure(0),
        start,
        data.train,
        value_fn=error,
        optimizer=optax.sgd(0.4 * RADIUS),
    )
    assert result.report["epsilon"] <= 4.0
    assert 1 - mean(error, start, data.test) < 0.15
    assert 1 - mean(error, result.params, data.test) > 0.6


LABELS = 6


def multi_label(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Records with a set of labels each: signs of linear scores."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 8)).astype(np.float32)
    truth = np.random.default_rng(7).normal(size=(8, LABELS))
    return x, x @ truth - 0.5 > 0


@pytest.mark.slow  # A study.
def test_f1_of_a_records_labels_is_trained() -> None:
    train, test = multi_label(1000, 0), multi_label(500, 1)
    plan = make_plan(1000, num_steps=200).calibrate(epsilon=4.0, delta=1e-5)
    start = zeros(8, LABELS)
    result = jaxdp.fit(
        plan,
        Keys.insecure(0),
        start,
        train,
        value_fn=f1_loss,
        optimizer=optax.sgd(0.4 * RADIUS),
    )
    before, after = (mean(f1_loss, p, test) for p in (start, result.params))
    assert after < before - 0.3


@pytest.mark.parametrize(
    ("loss", "num"),
    [(error, 1), pytest.param(f1_loss, 4, marks=pytest.mark.slow)],  # Another loss.
)
def test_the_bound_of_the_loss_bounds_the_slopes(
    loss: Callable[..., Any], num: int
) -> None:
    """Without noise the clip changes nothing, but for the grid it sums on.

    K slopes are one vector, so that its bound is sqrt(K) times that of one. Half of the
    bound does clip: some record's loss goes from one end to the other.
    """
    x, labels = multi_label(200, 2)
    y = labels if loss is f1_loss else np.sum(labels, axis=1)
    params = zeros(8, LABELS if loss is f1_loss else LABELS + 1)

    def first_release(clip: float) -> np.ndarray:
        plan = make_plan(
            200,
            num_steps=1,
            num_directions=num,
            l2_clip_norm=clip,
            noise_multiplier=0.0,
        )
        tx = jaxdp.dpzero(plan, Keys.insecure(3))
        step = jax.jit(lambda s, b: tx.update(None, s, params, value_fn=loss, batch=b))
        return np.asarray(step(tx.init(params), (x, y))[1].release)

    bound = np.sqrt(num) / (2 * RADIUS)
    free = first_release(np.inf)
    assert np.abs(free).max() > 0.01
    np.testing.assert_allclose(first_release(bound), free, atol=bound * 2.0**-15)
    assert np.abs(first_release(bound / 2 / np.sqrt(num)) - free).max() > 0.01


def scored_outside(scorer: Callable[..., np.ndarray]) -> Callable[..., jax.Array]:
    """The losses of a NumPy function of scores (..., B, C) and classes (..., B).

    Small models evaluate both signs and all directions at once, by vmap: the function is
    called once a step, with the axes that vmap adds in front (of length 1 where an
    argument does not vary).
    """

    def losses(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        shape = jax.ShapeDtypeStruct(y.shape, jnp.float32)
        return jax.pure_callback(
            scorer, shape, linear(params, x), y, vmap_method="expand_dims"
        )

    return losses


def test_a_scorer_outside_jax_gives_the_same_run() -> None:
    """To the bit: the same counts reach the same sum. One compiled program calls NumPy."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 6)).astype(np.float32)
    data = (x, np.argmax(x[:, :3], axis=1))
    plan = make_plan(120, num_steps=30, noise_multiplier=5.0)
    shapes: list[tuple[int, ...]] = []

    def scorer(scores: Any, y: Any) -> np.ndarray:
        shapes.append(np.shape(scores))
        wrong = np.argmax(np.asarray(scores), axis=-1) != np.asarray(y)
        return wrong.astype(np.float32)

    inside, outside = (
        jaxdp.fit(
            plan,
            Keys.insecure(1),
            zeros(6, 3),
            data,
            value_fn=value_fn,
            optimizer=optax.sgd(0.4 * RADIUS),
        )
        for value_fn in (error, scored_outside(scorer))
    )
    np.testing.assert_array_equal(inside.info.releases, outside.info.releases)
    # Before the run, made-up records: do losses keep them apart?
    assert shapes == [(4, 3)] * 5 + [(4, 2, 120, 3)] * 30
    assert mean(error, outside.params, data) < 0.5 < mean(error, zeros(6, 3), data)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (error, "zero everywhere"),
        (f1_loss, "zero everywhere"),
        (scored_outside(lambda scores, y: scores[..., 0]), "JVP"),
    ],
)
def test_without_a_radius_such_losses_are_refused(
    loss: Callable[..., Any], reason: str
) -> None:
    """Their derivative is zero or unknown: the run would learn nothing, at full cost."""
    x, labels = multi_label(50, 3)
    y = labels if loss is f1_loss else np.sum(labels, axis=1)
    plan = make_plan(50, smoothing_radius=0.0, noise_multiplier=5.0, delta=1e-5)
    keys = Keys.from_entropy()
    with pytest.raises(ValueError, match=rf"smoothing_radius must be > 0 .*{reason}"):
        jaxdp.fit(
            plan,
            keys,
            zeros(8, LABELS),
            (x, y),
            value_fn=loss,
            optimizer=optax.sgd(0.1),
        )
    keys_lib.check_unspent(keys, plan.family)
