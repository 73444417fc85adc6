"""Runs in which large leaves stay apart release what joined ones do."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import release
from jaxdp.kernels import parts
from jaxdp.kernels.fixed_point import Fixed
from tests.training.problem import DATA, D, N

PARAMS = {
    "in": jnp.cos(jnp.arange(D * 8.0)).reshape(D, 8) / 3,
    "middle": jnp.sin(jnp.arange(64.0)).reshape(8, 8) / 3,
    "bias": jnp.zeros(8),
    "out": jnp.linspace(-1, 1, 8),
    "frozen": jnp.ones((9, 9)),
}
GRADIENTS: dict[str, Any] = {"num_examples": N, "relation": "replace_one"}
QUERIES = plans.O2NC(
    **GRADIENTS,
    num_steps=4,
    sampling=sampling.SinglePassRestarts(period=2, restart_batch_size=6),
    restart_l2_clip_norm=2.0,
    l2_clip_norm=2.0,
    smoothing_radius=0.1,
    max_step=0.1,
    window=2,
    direction="sphere",
    learning_rate=0.1,
    noise_multiplier=3.0,
)
BALL: dict[str, Any] = {
    "oracle": "first_order",
    "direction": "ball",
    "difference": "common",
    "prefix_noise": "honaker",
}
FULL = plans.DPGD(
    **GRADIENTS,
    num_steps=4,
    sampling=sampling.FullBatch(),
    l2_clip_norm=0.5,
    noise_multiplier=2.0,
)
TUNED = plans.ClipTuning(
    target_unclipped_quantile=0.5, learning_rate=0.3, count_noise_multiplier=8.0
)
PLANS: dict[str, Any] = {
    "dpgd": FULL,
    "dpgd-tuned": dataclasses.replace(FULL, clip_tuning=TUNED),
    "o2nc": QUERIES,
    "o2nc-gradients": dataclasses.replace(QUERIES, **BALL),
}


def value_fn(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    hidden = jnp.tanh(x @ params["in"]) @ params["middle"] + params["bias"]
    z = jnp.tanh(hidden) @ params["out"] + params["frozen"].sum()
    return jnp.logaddexp(0, z) - y * z


@pytest.mark.parametrize("name", PLANS)  # Two runs are compiled: O2NC takes over 10 s.
def test_a_run_releases_what_it_does_of_one_vector(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the order in which a norm is summed; of a record with a NaN, too."""
    data = (DATA[0].at[3].set(jnp.nan), DATA[1])
    optimizer = optax.sgd(0.1) if name.startswith("dpgd") else None
    given: dict[str, Any] = {"optimizer": optimizer, "microbatch_size": 5}
    given |= {"trainable": lambda path: path != "frozen"}
    ends = []
    for large in (2**22, 20):
        monkeypatch.setattr(parts, "LARGE", large)
        apart = set(parts.leaves_apart(PARAMS))
        assert apart == (set() if large > 100 else {"in", "middle", "frozen"})
        # A function of its own: compiled programs are found again by it.
        given["value_fn"] = lambda params, batch: value_fn(params, batch)
        run = jaxdp.fit(PLANS[name], Keys.insecure(2), PARAMS, data, **given)
        ends.append(run)
    one, many = ends
    chex.assert_trees_all_close(many.params, one.params, rtol=0, atol=2e-5)
    chex.assert_trees_all_close(many.info.releases, one.info.releases, rtol=1e-4)
    moved = {k: np.max(np.abs(one.params[k] - x)) for k, x in PARAMS.items()}
    assert moved.pop("frozen") == 0
    assert min(moved.values()) > 1e-3


def test_sums_of_updates_are_what_they_are_of_one_vector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plans.PrefixSum(
        **GRADIENTS,
        num_steps=3,
        sampling=sampling.SinglePass(8),
        l2_clip_norm=1.0,
        noise_multiplier=2.0,
    )
    keys, ends = Keys.insecure(0), []
    for large in (2**22, 20):
        monkeypatch.setattr(parts, "LARGE", large)
        tx = jaxdp.private_prefix_sum(plan, keys)
        state, outs = tx.init(PARAMS), []
        for step in range(3):
            batch = jaxdp.sampling.batch(plan, keys, step, DATA)
            each = jax.vmap(lambda x: jax.tree.map(lambda p: p * x[0][0], PARAMS))
            out, state = tx.update(each(batch.records), state, batch=batch)
            outs.append(out)
        ends.append((outs, state.total, state.release))
    chex.assert_trees_all_close(*ends, rtol=0, atol=2e-6)
    assert max(jnp.max(jnp.abs(x)) for x in jax.tree.leaves(ends[0][1])) > 0.1


def test_updates_of_other_shapes_are_refused() -> None:
    """One number under the noise of several is released several times."""
    plan = plans.PrefixSum(
        **GRADIENTS,
        num_steps=3,
        sampling=sampling.SinglePass(8),
        l2_clip_norm=1.0,
        noise_multiplier=2.0,
    )
    keys = Keys.insecure(0)
    tx = jaxdp.private_prefix_sum(plan, keys)
    batch = jaxdp.sampling.batch(plan, keys, 0, DATA)
    with pytest.raises(
        ValueError, match=r"got \(8, 1\) for the leaf 'w' of shape \(5,\)"
    ):
        tx.update({"w": jnp.ones((8, 1))}, tx.init({"w": jnp.ones(5)}), batch=batch)
    grid = plan.grid("step")
    one, many = jnp.zeros(1, jnp.int32), Fixed(jnp.zeros(5, jnp.int32))
    with pytest.raises(ValueError, match="noise must have the shape"):
        release.noised_mean(grid, one, many)
