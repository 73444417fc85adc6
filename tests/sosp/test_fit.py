"""``fit``, ``resume`` and the record of a run that ends before its last step."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.training import ledger

D, N, STEPS = 3, 4000, 60
DATA = np.random.default_rng(0).uniform(-0.5, 0.5, (N, D)).astype(np.float32)
#: At an exact saddle: one coordinate at its maximum, the others at their minimum.
START = {"x": jnp.asarray([0.0, np.pi]), "y": jnp.asarray([np.pi])}
PLAN = plans.SOSP(
    num_examples=N,
    num_steps=STEPS,
    relation="replace_one",
    l2_clip_norm=float(np.sqrt(D)),
    smoothness=1.0,
    refresh_batch_size=600,
    difference_batch_rate=300.0,
    drift_limit=1.0,
    max_differences=15,
    trigger_norm=0.5,
    escape_steps=8,
    escape_radius=0.4,
    escape_noise_std=0.08,
    hessian_batch_size=300,
    hessian_clip_norm=1.0,
).calibrate(epsilon=8.0, delta=1e-5)


def loss(params: Any, batch: jax.Array) -> jax.Array:
    """Cosines, shifted by each record."""
    x = jnp.concatenate([params["x"], params["y"]])
    return jnp.cos(x + batch).sum(axis=-1)


def fit(seed: int = 1, **options: Any) -> jaxdp.FitResult:
    return jaxdp.fit(PLAN, Keys.insecure(seed), START, DATA, value_fn=loss, **options)


@functools.cache
def whole() -> jaxdp.FitResult:
    return fit()


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_certificate_of_the_start_is_told() -> None:
    """Which is a minimum here; nothing tells it from a saddle of little curvature."""
    start = {"x": jnp.full(2, np.pi), "y": jnp.full(1, np.pi)}
    with pytest.warns(
        UserWarning, match="certified .* is the one that the run began at"
    ):
        result = jaxdp.fit(PLAN, Keys.insecure(0), start, DATA, value_fn=loss)
    same(result.params, start)


def test_a_run_ends_where_it_is_certified() -> None:
    report = whole().report
    found = report["outcome"]
    assert found["certified"] and found["ended"] == "certificate"
    assert report["steps_done"] < STEPS
    assert found["escapes"] >= 2  # The start was refuted.
    assert found["records_used"] <= N
    # No promise, for no theorem chose the numbers.
    assert found["alpha"] is None
    np.testing.assert_allclose(jax.tree.leaves(whole().params)[1], np.pi, atol=0.5)
    assert abs(abs(float(whole().params["x"][0])) - np.pi) < 0.7
    done = report["steps_done"]
    assert not np.any(whole().info.releases[done:])
    assert np.all(whole().info.releases[:done, 2] > 0)
    json.dumps(report, allow_nan=False)


@pytest.mark.slow  # A killed run goes in chunks too.
def test_chunks_give_the_same_bits_and_end_early_too() -> None:
    shown: list[Any] = []
    result = fit(chunk=4, callback=lambda step, params, info: shown.append(step))
    same(result.params, whole().params)
    same(result.info.releases, whole().info.releases)
    done = whole().report["steps_done"]
    assert shown[-1] == -(-done // 4) * 4 < STEPS


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("at", [3, 12])
def test_a_killed_run_goes_on_to_the_same_bits(at: int, tmp_path: Path) -> None:
    """In the middle of a period of correlated noise, and of an escape."""

    def die(step: int, params: Any, info: Any) -> None:
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        fit(ledger=tmp_path / "run", chunk=3, callback=die)
    result = jaxdp.resume(tmp_path / "run", START, DATA, value_fn=loss)
    same(result.params, whole().params)
    same(result.info.releases, whole().info.releases)
    assert result.report["outcome"] == whole().report["outcome"]
    # Once more, of a run that has ended: the same, and nothing is written.
    lines = (tmp_path / "run" / ledger.LEDGER).read_text()
    again = jaxdp.resume(tmp_path / "run", START, DATA, value_fn=loss)
    same(again.params, whole().params)
    assert (tmp_path / "run" / ledger.LEDGER).read_text() == lines


def test_a_run_without_its_checkpoint_is_computed_again(tmp_path: Path) -> None:
    def die(step: int, params: Any, info: Any) -> None:
        if step == 9:
            raise Killed

    with pytest.raises(Killed):
        fit(ledger=tmp_path / "run", chunk=3, callback=die)
    (tmp_path / "run" / "secret" / "checkpoint.npz").unlink()
    result = jaxdp.resume(tmp_path / "run", START, DATA, value_fn=loss)
    same(result.params, whole().params)


@pytest.mark.parametrize(
    "passes",
    [1, pytest.param(STEPS + 1, marks=pytest.mark.slow)],  # Refused alike.
)
def test_lost_steps_are_not_tried_anew(passes: int, tmp_path: Path) -> None:
    """A step may read a record twice: however many passes, none are charged for it."""
    plan = dataclasses.replace(
        PLAN, sampling=sampling.AdaptiveCursor(num_passes=passes)
    )

    def die(step: int, params: Any, info: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        jaxdp.fit(
            plan.calibrate(epsilon=8.0, delta=1e-5),
            Keys.insecure(1),
            START,
            DATA,
            value_fn=loss,
            ledger=tmp_path / "run",
            chunk=3,
            callback=die,
        )
    with pytest.raises(ValueError, match="new_attempt"):
        jaxdp.resume(tmp_path / "run", START, DATA, value_fn=loss, new_attempt=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"optimizer": optax.sgd(0.1)}, "optimizer"),
        ({"trainable": lambda path: True}, "trainable"),
        ({"mesh": jax.make_mesh((1,), ("signs",))}, "mesh must have no axis"),
        ({"microbatch_size": 2**15}, "microbatch_size"),
    ],
)
def test_what_it_has_no_use_for_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit(**options)


# Keys from entropy have noise of their own: some certify where they began.
@pytest.mark.filterwarnings("ignore:the point that is certified:UserWarning")
def test_what_does_not_fit_spends_no_keys() -> None:
    keys = Keys.from_entropy()
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), START)
    for params in ({}, halves):
        with pytest.raises(ValueError, match="params"):
            jaxdp.fit(PLAN, keys, params, DATA, value_fn=loss)
    with pytest.raises(ValueError, match="data"):
        jaxdp.fit(PLAN, keys, START, DATA[1:], value_fn=loss)
    report = jaxdp.fit(PLAN, keys, START, DATA, value_fn=loss).report
    assert report["private"] and report["epsilon"] <= 8.0
    with pytest.raises(ValueError, match="already served"):
        jaxdp.fit(PLAN, keys, START, DATA, value_fn=loss)
