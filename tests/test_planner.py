"""The planner: its numbers follow from the budget and the scale of the loss alone."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import planner
from jaxdp.planner import claims

DIM, NUM = 400, 32
KNOWN: dict[str, Any] = {
    "num_examples": 500,
    "epsilon": 2.0,
    "delta": 1e-5,
    "relation": "replace_one",
}


def linear(params: Any, batch: Any) -> jax.Array:
    """Losses whose gradients are the records themselves, wherever it is."""
    return batch @ params["w"] + 10.0


def rows(seed: int = 0, num: int = NUM) -> np.ndarray:
    """Records of norm 3, all different."""
    x = np.random.default_rng(seed).normal(size=(num, DIM))
    return (3 * x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


START = {"w": jnp.zeros(DIM)}


@pytest.fixture(scope="module")
def found() -> planner.Recommendation:
    return jaxdp.recommend(linear, START, rows(), **KNOWN)


def test_clips_are_a_third_of_what_records_contribute(found: Any) -> None:
    """Gradients have norm 3, four slopes along directions of norm sqrt(d) about 6."""
    gradients, slopes = found.candidates
    assert gradients.plan.l2_clip_norm == pytest.approx(1.0)
    assert slopes.plan.l2_clip_norm == pytest.approx(2.0, rel=0.2)
    for one in found.candidates:
        assert one.plan.epsilon() <= 2.0
        assert one.plan.epsilon() == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("i", [0, 1], ids=["DPGD", "DPZero"])
def test_noise_of_a_run_moves_a_loss_by_as_much_as_it_says(found: Any, i: int) -> None:
    """Records that say nothing leave the noise alone; of 400 coordinates, 5.5 deviations.

    The deviation of a sample's deviation is 1 / sqrt(2 * 400) of it: 20% is 5.6 of them.
    """
    one = found.candidates[i]
    silent = np.full((500, DIM), np.nan, np.float32)
    run = jaxdp.fit(
        one.plan,
        jaxdp.Keys.insecure(5),
        START,
        silent,
        value_fn=linear,
        optimizer=optax.sgd(one.learning_rate),
    )
    moved = 3.0 * float(jnp.std(run.params["w"]))  # A gradient's norm is 3.
    # The rehearsal of a loss without curvature takes nothing away.
    assert moved == pytest.approx(1.5, rel=0.25 if i else 0.2)


def test_methods_pay_the_same_for_privacy(found: Any) -> None:
    """Noise over the signal is that of the budget, whatever clip, steps and directions."""
    gradients, slopes = found.candidates
    mu = jaxdp.accounting.gaussian_mu(2.0, 1e-5)
    least = 2 * math.sqrt(DIM) / (mu * 500)
    for one in (gradients, slopes):
        assert one.noise == pytest.approx(least, rel=0.02)
    assert gradients.missed == 0
    assert slopes.missed == pytest.approx(math.sqrt(DIM / 4000))
    assert found.plan is gradients.plan
    assert "least error" in found.reason


def test_scale_of_the_loss_does_not_matter(found: Any) -> None:
    """A loss times 100 has a clip times 100, and the same steps in the parameters."""
    scaled = jaxdp.recommend(
        lambda params, batch: 100 * linear(params, batch), START, rows(), **KNOWN
    )
    for one, other in zip(found.candidates, scaled.candidates, strict=True):
        assert other.plan.l2_clip_norm == pytest.approx(
            100 * one.plan.l2_clip_norm, rel=0.01
        )
        assert other.learning_rate == pytest.approx(one.learning_rate / 1e4, rel=0.02)


def test_minima_that_are_near_get_short_steps() -> None:
    """A run that noise allows to go far goes no further than it has to."""
    records = np.random.default_rng(1).uniform(-1, 1, (64, 2)).astype(np.float32)

    def bowl(w: Any, x: Any) -> jax.Array:
        return jnp.sum((w - x) ** 2, axis=-1)

    many = KNOWN | {"num_examples": 10**5, "delta": 1e-6}  # Next to no noise.
    found = jaxdp.recommend(bowl, jnp.full(2, 2.0), records, **many)
    for one in found.candidates:
        steps, slopes = one.plan.num_steps, getattr(one.plan, "num_directions", 1)
        way = steps * one.learning_rate * one.plan.l2_clip_norm / math.sqrt(slopes)
        assert 2 < way < 60  # The minimum is 2.8 away; the noise allows 1e5.


def test_passes_and_batches_limit_the_steps() -> None:
    few = jaxdp.recommend(linear, START, rows(), num_passes=60, **KNOWN)
    gradients, slopes = few.candidates
    assert (gradients.plan.num_steps, slopes.plan.num_steps) == (20, 7)
    assert gradients.num_passes == 60 and slopes.num_passes == 56
    sampled = jaxdp.recommend(
        linear, START, rows(), num_passes=60, batch_size=50, **KNOWN
    )
    assert sampled.candidates[0].plan.num_steps == 80  # A tenth of the records a step.
    assert sampled.candidates[1].plan.num_steps == 75
    assert all(x.plan.sampling.sampling_prob == 0.1 for x in sampled.candidates)
    alone = jaxdp.recommend(
        linear, START, rows(), backpropagation=False, num_passes=8, **KNOWN
    )
    assert [x.plan.family for x in alone.candidates] == ["dpzero"]
    assert alone.plan.num_steps == 1


def test_near_methods_are_chosen_by_cost() -> None:
    """With few parameters slopes miss nothing, and gradients need fewer passes."""
    made = planner.PlannedRun
    empty = optax.identity()
    plan = jaxdp.plans.DPGD(
        num_examples=8,
        num_steps=3,
        sampling=jaxdp.sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
    )
    dear = made(plan, empty, 1.0, 100.0, 0.20, 0.0)
    cheap = made(dataclasses.replace(plan, num_steps=4), empty, 1.0, 10.0, 0.21, 0.0)
    ranked, reason = planner._ranked([dear, cheap], "error", 1.1)
    assert ranked == (cheap, dear) and "fewer passes" in reason


def test_memory_is_of_gradients_or_of_a_forward_pass(found: Any) -> None:
    """500 gradients of 400 float32; of 500 losses far less, and four slopes each."""
    gradients, slopes = found.candidates
    assert gradients.memory == 4 * 500 * DIM
    assert 4 * 500 * 4 <= slopes.memory < gradients.memory / 4
    batch = jaxdp.recommend(linear, START, rows(), batch_size=50, **KNOWN)
    read = batch.plan.sampling.rows(500)
    assert batch.candidates[0].memory == 4 * read * DIM < gradients.memory


def test_claims_and_public_records_are_said(found: Any) -> None:
    for one in found.candidates:
        assert one.proven and one.measured.startswith("bench ")
        assert f"{one.name}: proven: {one.proven}" in found._repr_html_()
    assert not found.public
    known = KNOWN | {"num_passes": 60, "backpropagation": False}
    public = jaxdp.recommend(linear, START, rows(), num_public=90, **known)
    assert public.public.startswith("With 90 public records: train on them first")
    assert "With 90 public records" in repr(public)
    assert claims.of_loss("DPGD", 10**6) is claims.LANGUAGE["DPGD"]


def test_display(found: Any) -> None:
    text = repr(found)
    assert text.startswith("Recommendation: DPGD")
    assert (
        "DPZero" in text and "O2NC" in text and max(map(len, text.splitlines())) <= 100
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_examples": 0}, "num_examples must be"),
        (
            {"num_passes": 5.0, "backpropagation": False},
            "num_passes must be at least 8",
        ),
        ({"num_passes": -1.0}, "num_passes must be"),
        ({"batch_size": 501}, "batch_size must be"),
        ({"num_public": 0}, "num_public must be"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"delta": 0}, "delta must be"),
        ({"relation": "none"}, "relation must be"),
        ({"backpropagation": 1}, "backpropagation must be"),
    ],
    ids=str,
)
def test_bad_arguments(changes: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        jaxdp.recommend(linear, START, rows(), **KNOWN | changes)


def test_records_that_say_nothing_are_refused() -> None:
    for value in (0.0, math.nan):
        with pytest.raises(ValueError, match="records must have finite gradients"):
            jaxdp.recommend(
                linear, START, np.full((4, DIM), value, np.float32), **KNOWN
            )


def test_a_sorted_table_is_planned_like_another() -> None:
    """Its first records are all of one class, which a run without noise learns at once."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-1, 1, (640, 6)).astype(np.float32)
    y = (x[:, 0] + 0.5 * x[:, 1] + 0.3 * draw.normal(size=640) > 0).astype(np.float32)
    plan = jaxdp.plans.DPGD(
        num_steps=80,
        sampling=jaxdp.sampling.FullBatch(),
        l2_clip_norm=1.0,
        num_examples=3000,
        relation="replace_one",
    ).calibrate(epsilon=1.0, delta=1e-5)

    def logistic(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.logaddexp(0, (1 - 2 * y) * (x @ params[:6] + params[6]))

    def rate(order: Any) -> float:
        records = jnp.asarray(x[order]), jnp.asarray(y[order])
        return planner.planned(plan, logistic, jnp.zeros(7), records).learning_rate

    assert rate(np.argsort(y, kind="stable")) == rate(np.arange(640))
