"""Parameters of 16 bits train: small steps are rounded at random, and replayed."""

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import precision
from jaxdp.training import resolution
from tests.training.kills import killed
from tests.training.problem import DATA, PARAMS, make_plan, value_fn

KEYS = Keys.insecure(3)
#: Leaves of both formats, and one of float32.
MIXED = {
    "hidden": {"w": PARAMS["hidden"]["w"].astype(jnp.bfloat16)},
    "out": PARAMS["out"].astype(jnp.float16),
    "bias": jnp.zeros((), jnp.float32),
}


def loss(params: Any, batch: Any) -> jax.Array:
    wide = precision.widened(params)
    return value_fn(wide, batch) + wide["bias"] ** 2


def as_bits(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).view(f"u{x.dtype.itemsize}"), tree)


def assert_same_bits(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, as_bits(one), as_bits(other))


def test_the_small_steps_of_the_issue_move_16_bits() -> None:
    """300 numbers, 50 steps of 1e-4 from 1: their mean, to 6 standard errors (2e-9).

    A step moves one of 78 numbers by 2**-7; nearest rounding moves none.
    """
    start = {"w": jnp.ones(300, jnp.bfloat16)}
    update = {"w": jnp.full(300, 1e-4)}

    def step(carry: Any, i: Any) -> Any:
        near, random = carry
        near = optax.apply_updates(near, update)
        return (near, jaxdp.apply_updates(random, update, keys=KEYS, step=i)), None

    (near, random), _ = jax.lax.scan(step, (start, start), jnp.arange(50))
    assert_same_bits(near, start)
    std = math.sqrt(50 * 1e-4 * 2**-7 / 300)
    assert abs(float(random["w"].astype(jnp.float32).mean()) - 1.005) < 6 * std


def test_leaves_and_steps_have_bits_of_their_own() -> None:
    """Other leaves, steps and keys other bits; the same again the same, also traced."""
    one = {name: jnp.ones(2000, jnp.bfloat16) for name in "ab"}
    update = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-8), one)
    add = functools.partial(jaxdp.apply_updates, one, update)
    first = add(keys=KEYS, step=0)
    assert_same_bits(jax.jit(add)(keys=KEYS, step=jnp.int32(0)), first)
    others = (first["b"], add(keys=KEYS, step=1)["a"])
    for other in (*others, add(keys=Keys.insecure(4), step=0)["a"]):
        assert 0.4 < float((first["a"] == other).mean()) < 0.6
    # A leaf's bits do not depend on the leaves beside it.
    alone = jaxdp.apply_updates({"a": one["a"]}, {"a": update["a"]}, keys=KEYS, step=0)
    assert_same_bits(alone["a"], first["a"])


def test_other_leaves_are_added_as_optax_adds_them() -> None:
    params = {"w": jnp.asarray([0.1, -0.0]), "ids": jnp.arange(2), "none": None}
    update = {"w": jnp.asarray([1e-9, 0.0]), "ids": jnp.zeros(2, int), "none": None}
    want = optax.apply_updates(params, update)
    for half in ({}, {"half": jnp.ones(2, jnp.float16)}):
        got = jaxdp.apply_updates(
            params | half,
            update | jax.tree.map(jnp.zeros_like, half),
            keys=KEYS,
            step=0,
        )
        assert_same_bits(got, want | half)
    with pytest.raises(TypeError, match=r"keys must be a jaxdp\.Keys"):
        jaxdp.apply_updates(params, update, keys=jax.random.key(0), step=0)  # pyright: ignore


CASES = {
    "DPZero": (make_plan(output="random"), optax.adam(3e-3)),
    "DPGD": (
        plans.DPGD(
            num_examples=24,
            num_steps=9,
            sampling=sampling.FullBatch(),
            relation="replace_one",
            l2_clip_norm=1.0,
            noise_multiplier=2.0,
            delta=1e-5,
        ),
        optax.adam(1e-4),
    ),
    "O2NC": (
        plans.O2NC(
            num_examples=24,
            num_steps=6,
            sampling=sampling.SinglePassRestarts(period=2, restart_batch_size=4),
            relation="replace_one",
            restart_l2_clip_norm=1.0,
            l2_clip_norm=0.5,
            smoothing_radius=0.1,
            max_step=0.2,
            window=2,
            noise_multiplier=2.0,
            delta=1e-5,
        ),
        None,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "DPZero",
        pytest.param("DPGD", marks=pytest.mark.slow),
        pytest.param("O2NC", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    """Of every plan; where its log rebuilds it, so does a replay. Moments are float32."""
    plan, optimizer = CASES[name]
    given: dict[str, Any] = {"value_fn": loss, "optimizer": optimizer}
    fit = functools.partial(jaxdp.fit, plan, KEYS, MIXED, DATA, chunk=2, **given)
    whole = fit(ledger=tmp_path / "whole")
    with killed(6):
        fit(ledger=tmp_path / "run")
    resumed = jaxdp.resume(tmp_path / "run", MIXED, DATA, **given)
    assert_same_bits(resumed.params, whole.params)
    if plan.replayable:
        again = jaxdp.replay(tmp_path / "whole", MIXED, optimizer=optimizer)
        assert_same_bits(again.params, whole.params)
    dtypes = jax.tree.map(lambda x: x.dtype, (whole.params, MIXED))
    assert dtypes[0] == dtypes[1]
    floats = [x for x in jax.tree.leaves(whole.info.state) if x.dtype != jnp.int32]
    assert all(x.dtype == jnp.float32 for x in floats)


def test_they_train_as_far_as_float32() -> None:
    """A quadratic, whose steps are below half a spacing of bfloat16 (2**-8, from 1 to 2).

    The loss falls by ten times, as in float32, within a twentieth of the first loss: one
    seed, of which the widest gap is a hundredth.
    """
    data = jnp.ones((8, 64))
    plan = make_plan(
        num_examples=8, num_steps=3000, noise_multiplier=0.01, l2_clip_norm=50.0
    )

    def distance(w: jax.Array, x: jax.Array) -> jax.Array:
        return 0.5 * ((w.astype(jnp.float32) - x) ** 2).sum(axis=-1)

    def trained(dtype: str) -> float:
        start = jnp.full(64, 1.5, dtype)
        found = jaxdp.fit(
            plan, KEYS, start, data, value_fn=distance, optimizer=optax.sgd(6e-4)
        )
        return float(distance(found.params, data).mean())

    first = float(distance(jnp.full(64, 1.5), data).mean())
    wide = trained("float32")
    assert wide < 0.1 * first
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Of parameters that did not move.
        for dtype in ("bfloat16", "float16"):
            assert abs(trained(dtype) - wide) < 0.05 * first


def test_a_train_state_takes_keys_or_warns() -> None:
    update = jax.tree.map(lambda x: jnp.full(x.shape, 1e-4), MIXED)
    tx = optax.stateless(lambda _, params: update)
    state = TrainState.create(apply_fn=None, params=MIXED, tx=tx).replace(step=7)
    moved = jaxdp.apply_gradients(state, keys=KEYS)
    assert int(moved.step) == 8
    want = jaxdp.apply_updates(MIXED, update, keys=KEYS, step=7)
    assert_same_bits(moved.params, want)
    with pytest.warns(UserWarning, match="keys should be given") as at:
        jaxdp.apply_gradients(state)
    assert [w.filename for w in at] == [__file__]


def test_steps_that_rounding_outruns_are_warned_of() -> None:
    """At 1 numbers of bfloat16 are 2**-7 apart upwards: 0.0625 for a step in R^64."""
    scattered = resolution.warn_if_scattered
    params = {"w": jnp.ones(64, jnp.bfloat16), "wide": jnp.ones(1000)}
    with pytest.warns(UserWarning, match=r"max_step=0.062 .* at least 0.062"):
        scattered(0.062, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scattered(0.063, params)
        scattered(1e-9, params, trainable=lambda path: path == "wide")
