"""``fit``, ``resume`` and the record of algorithms that own their iterates."""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.training import ledger
from tests.methods import SADDLES, Method

DRAWS = pytest.mark.parametrize("method", SADDLES, ids=str)

D, STEPS, SIZE = 4, 10, 2
N = STEPS * SIZE
RNG = np.random.default_rng(0)
DATA = tuple(RNG.uniform(-1, 1, (N, D)).astype(np.float32) for _ in range(2))
GAME = jaxdp.MatrixGame(RNG.uniform(-1, 1, (D, D)))
PLAN = plans.Saddle(
    num_examples=N,
    num_steps=STEPS,
    sampling=sampling.SinglePass(SIZE),
    relation="replace_one",
    dim_x=D,
    dim_y=D,
    linf_clip_norm_x=1.0,
    linf_clip_norm_y=1.0,
).calibrate(epsilon=2.0, delta=1e-5)


def fit(**options: Any) -> jaxdp.FitResult:
    return jaxdp.fit(
        PLAN, Keys.insecure(1), PLAN.uniform(), DATA, value_fn=GAME, **options
    )


@functools.cache
def whole() -> jaxdp.FitResult:
    return fit()


def test_report_says_what_was_spent() -> None:
    for point in whole().params:
        assert np.isclose(point.sum(), 1, rtol=1e-5) and (point >= 0).all()
    report = whole().report
    assert report["algorithm"] == "saddle" and report["noise_multiplier"] is None
    assert report["epsilon"] == float(PLAN.epsilon()) <= 2.0
    assert report["accountant"] == "RDP" and report["steps_done"] == STEPS
    assert report["step_size_x"] == PLAN.step_size_x
    assert report["private"] is False
    algorithm = PLAN.algorithm(Keys.insecure(0))
    by_hand = jaxdp.report(PLAN, algorithm.init(PLAN.uniform()))
    assert by_hand["steps_done"] == 0


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_killed_run_goes_on_to_the_same_bits(
    checkpoint: bool, tmp_path: Path
) -> None:
    """From its checkpoint; without one it is computed again."""
    shown: list[Any] = []

    def die(step: int, params: Any, info: Any) -> None:
        shown.append(params)
        if step == 6:
            raise Killed

    with pytest.raises(Killed):
        fit(ledger=tmp_path / "run", chunk=2, callback=die)
    # The output so far, which is a point of the simplex.
    assert np.isclose(np.sum(shown[0][0]), 1)
    path = tmp_path / "run" / "secret" / "checkpoint.npz"
    assert path.exists()
    if not checkpoint:
        path.unlink()
    result = jaxdp.resume(tmp_path / "run", PLAN.uniform(), DATA, value_fn=GAME)
    for got, want in zip(result.params, whole().params, strict=True):
        np.testing.assert_array_equal(got, want)
    # Nothing of the scores is in what is public.
    lines = (tmp_path / "run" / ledger.LEDGER).read_text()
    assert "scores" not in lines
    shutil.rmtree(tmp_path / "run" / "secret")
    with pytest.raises(ValueError, match="replay"):
        jaxdp.replay(tmp_path / "run", PLAN.uniform())


def test_lost_steps_are_not_tried_anew(tmp_path: Path) -> None:
    """A batch that was read cannot be read again."""

    def die(step: int, params: Any, info: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        fit(ledger=tmp_path / "run", chunk=2, callback=die)
    with pytest.raises(ValueError, match="new_attempt"):
        jaxdp.resume(
            tmp_path / "run", PLAN.uniform(), DATA, value_fn=GAME, new_attempt=True
        )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"optimizer": optax.sgd(0.1)}, "optimizer"),
        ({"trainable": lambda path: True}, "trainable"),
        ({"stacked": lambda path: True}, "stacked"),
        ({"mesh": jax.make_mesh((1,), ("signs",))}, "mesh must have no axis"),
    ],
)
def test_what_is_for_transformations_is_refused(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        fit(**options)


def test_what_does_not_fit_spends_no_keys() -> None:
    keys = Keys.from_entropy()
    for params in (None, np.ones(D) / D, (np.ones(D, int), np.ones(D, int))):
        with pytest.raises(ValueError, match="params"):
            jaxdp.fit(PLAN, keys, params, DATA, value_fn=GAME)
    queries = jaxdp.Marginals((2, 2), 1)
    plan = plans.SyntheticData(
        num_examples=4,
        num_steps=3,
        relation="replace_one",
        domain_size=4,
        num_queries=8,
        step_size_y=0.1,
    )
    codes = np.arange(4, dtype=np.int8)
    options: Any = {"value_fn": queries}
    with pytest.raises(ValueError, match="microbatch_size"):
        jaxdp.fit(plan, keys, plan.uniform(), codes, microbatch_size=2, **options)
    jaxdp.fit(plan, keys, plan.uniform(), codes, **options)


def test_microbatches_change_nothing() -> None:
    result = fit(microbatch_size=1)
    np.testing.assert_array_equal(result.info.releases, whole().info.releases)


# --- every algorithm of draws --------------------------------------------------------


@DRAWS
def test_the_float_sampler_is_not_private(method: Method) -> None:
    plan = dataclasses.replace(method.plan, sampler="float")
    algorithm = method.make(plan, Keys.from_entropy())
    assert not bool(algorithm.init(plan.uniform()).horizon.private)
    assert plan.epsilon() == float("inf")


@DRAWS
def test_a_chosen_start_is_where_it_starts(method: Method) -> None:
    algorithm = method.make(method.plan, Keys.insecure(0))
    weights = np.array([0.5, 0.25, 0.125, 0.125], np.float32)
    two = isinstance(method.params, tuple)
    state = algorithm.init((weights, weights) if two else weights)
    if method.name == "synthetic":
        np.testing.assert_allclose(np.exp(state.logits), weights, rtol=1e-6)
    elif method.name == "frank_wolfe":
        np.testing.assert_array_equal(state.weights, weights)
    else:
        scores = state.scores_x if two else state.scores
        np.testing.assert_allclose(scores, np.array([0, -1, -2, -2]) * 2.0**24, atol=4)
