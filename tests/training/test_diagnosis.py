"""Diagnoses: their numbers are NumPy's, and each piece of advice has its case."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from tests.methods import METHODS, Method

N, D = 50, 4
_RNG = np.random.default_rng(0)
X = _RNG.uniform(-1, 1, (N, D)).astype(np.float32)
Y = (X @ np.ones(D) > 0).astype(np.float32)
START = jnp.asarray([0.1, -0.2, 0.3, 0.0])


def loss(params: jax.Array, batch: Any) -> jax.Array:
    x, y = batch
    return (x @ params - y) ** 2


def gradients(x: Any = X, y: Any = Y) -> np.ndarray:
    residual = x @ np.asarray(START, np.float64) - y
    return 2 * residual[:, None] * np.asarray(x, np.float64)


def base(**changes: Any) -> dict[str, Any]:
    return {
        "num_examples": N,
        "num_steps": 25,
        "sampling": sampling.FullBatch(),
        "relation": "zero_out",
        "l2_clip_norm": 1.0,
        "noise_multiplier": 4.0,
    } | changes


def of_gradients(plan: Any = None, records: Any = (X, Y), **options: Any) -> Any:
    plan = plans.DPGD(**base()) if plan is None else plan
    return jaxdp.diagnose(plan, START, records, loss, **options)


def test_numbers_of_gradients() -> None:
    found = of_gradients(optimizer=optax.sgd(0.3))
    norms = np.linalg.norm(gradients(), axis=1)
    want = np.quantile(norms, (0.1, 0.5, 0.9, 0.99))
    np.testing.assert_allclose(found.quantiles, want, rtol=1e-5)
    assert found.clipped == pytest.approx((norms > 1).mean())
    clipped = gradients() * np.minimum(1, 1 / norms)[:, None]
    signal = np.linalg.norm(clipped.mean(axis=0))
    assert found.signal == pytest.approx(signal, rel=1e-5)
    assert found.noise == pytest.approx(math.sqrt(D) * 4 / N)
    assert found.signal_to_noise == pytest.approx(found.signal / found.noise)
    assert found.signal_to_noise_of_run == pytest.approx(5 * found.signal_to_noise)
    losses = (X @ np.asarray(START) - Y) ** 2
    assert found.loss == pytest.approx(losses.mean(), rel=1e-5)
    assert found.gain == pytest.approx(25 * 0.3 * signal**2 / losses.mean(), rel=1e-4)
    assert (found.unmoved, found.finite, found.private) == (0.0, 1.0, False)
    assert found.advice == ()


@pytest.mark.parametrize("radius", [0.0, 1e-2])
@pytest.mark.parametrize("family", [plans.DPZero, plans.DPGDZerothOrder])
def test_numbers_of_slopes(family: Any, radius: float) -> None:
    """One direction of length sqrt(d): of a quadratic its slope is exact at any radius."""
    plan = family(smoothing_radius=radius, **base(l2_clip_norm=0.5))
    found = jaxdp.diagnose(plan, START, (X, Y), loss)
    parts = plan.contributions(loss, START, (X, Y), Keys.insecure(0).direction)
    slopes = np.asarray(parts.rows)[:, 0]
    # The slopes lie in the span of one direction: least squares finds it.
    along, *_ = np.linalg.lstsq(gradients(), slopes, rcond=None)
    np.testing.assert_allclose(gradients() @ along, slopes, rtol=1e-2, atol=1e-3)
    assert np.linalg.norm(along) == pytest.approx(math.sqrt(D), rel=1e-2)
    length = math.sqrt(D) if family is plans.DPGDZerothOrder else 1.0
    bound = 0.5 / length
    assert found.signal == pytest.approx(abs(np.clip(slopes, -bound, bound).mean()))
    assert found.noise == pytest.approx(4 * 0.5 / N / length)
    assert (found.gain, found.unmoved) == (None, None)


def test_gain_of_slopes_is_that_of_the_gradient() -> None:
    """On average over directions, with many of them and no clip in the way."""
    plan = plans.DPZero(
        smoothing_radius=0.0, num_directions=64, **base(l2_clip_norm=1e3)
    )
    gains = [
        jaxdp.diagnose(plan, START, (X, Y), loss, optimizer=optax.sgd(0.1), seed=s).gain
        for s in range(4)
    ]
    norm = np.linalg.norm(gradients().mean(axis=0))
    want = 25 * 0.1 * norm**2 / ((X @ np.asarray(START) - Y) ** 2).mean()
    # The length of the step is that of a gradient with noise: larger, by its directions.
    assert np.mean(gains) == pytest.approx(want, rel=0.25)


#: Part of the advice, and what is off.
OFF: dict[str, dict[str, Any]] = {
    "20.0% of the records have a loss": {"nans": 10},
    "Nearly every record is clipped": {"scale": 1e3},
    "times what 99% of the records need": {"scale": 1e-3},
    "Over the whole run the noise is": {"plan": base(noise_multiplier=1e3)},
    "The steps would lower the loss by 0.0%": {"rate": 1e-6},
    "so the steps go far beyond": {"rate": 1e4},
    "A step leaves 75% of the parameters": {"rate": 1e-12},
    "No record's loss changes": {"scale": 0.0},
}


@pytest.mark.parametrize("message", OFF, ids=str)
def test_advice(message: str) -> None:

    off = {"nans": 0, "scale": 1.0, "plan": base(), "rate": 0.3} | OFF[message]
    x = X * off["scale"]
    y = Y.copy()
    y[: off["nans"]] = np.nan
    plan, optimizer = plans.DPGD(**off["plan"]), optax.sgd(off["rate"])
    said = of_gradients(plan, (x, y), optimizer=optimizer).advice
    assert any(re.search(message, line) for line in said), said
    usual = of_gradients(optimizer=optax.sgd(0.3)).advice
    assert not any(re.search(message, line) for line in usual)


def test_advice_on_losses() -> None:
    """What fit refuses or warns of: losses that mix records, radii below the rounding."""
    mixing = lambda params, batch: loss(params, batch) - loss(params, batch).mean()  # noqa: E731
    plan = plans.DPZero(smoothing_radius=1e-9, **base())
    said = jaxdp.diagnose(plan, START, (X, Y), mixing).advice
    assert any("value_fn is not per record" in line for line in said)
    assert any("is below what float32 resolves" in line for line in said)


def test_all_records_lost() -> None:
    found = of_gradients(records=(X, Y * np.nan))
    assert found.finite == 0 and math.isnan(found.loss)
    assert str(found).startswith("Not private")


SUMMED = ("dpzero", "dpgd_zeroth_order", "dpgd", "o2nc", "sosp")
FITTED = [m for m in METHODS if m.fits]


@pytest.mark.parametrize("method", FITTED, ids=str)
def test_every_plan(method: Method) -> None:
    """Of sums a diagnosis, of draws an error; no keys are asked for."""
    given = (method.plan, method.params, method.data, method.value_fn)
    if method.plan.family not in SUMMED:
        with pytest.raises(
            ValueError, match="plan must be one whose steps release sums"
        ):
            jaxdp.diagnose(*given)
        return
    found = jaxdp.diagnose(*given, optimizer=method.optimizer)
    assert found.noise > 0 and 0 < found.finite <= 1 and found.signal > 0
    assert "signal / noise" in str(found)


def test_mistakes() -> None:
    plan = plans.DPGD(**base())
    with pytest.raises(TypeError, match="plan must be"):
        jaxdp.diagnose("dpgd", START, (X, Y), loss)  # pyright: ignore
    with pytest.raises(TypeError, match="value_fn must be callable"):
        jaxdp.diagnose(plan, START, (X, Y), 1.0)
    with pytest.raises(TypeError, match="optimizer must be"):
        jaxdp.diagnose(plan, START, (X, Y), loss, optimizer=0.1)  # pyright: ignore
    with pytest.raises(ValueError, match="one loss per record"):
        jaxdp.diagnose(
            plans.DPZero(smoothing_radius=1e-3, **base()),
            START,
            (X, Y),
            lambda p, b: 0 * p,
        )


def test_a_run_is_the_same_after_it() -> None:
    keys = Keys.from_entropy()
    plan = plans.DPGD(**base(delta=1e-5))
    of_gradients(plan)
    jaxdp.fit(plan, keys, START, (X, Y), value_fn=loss, optimizer=optax.sgd(0.1))
