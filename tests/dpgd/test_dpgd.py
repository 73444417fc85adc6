"""DP-GD: which integers a step releases; the rest is in the conformance tests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import Keys, dpgd, plans, sampling
from tests import drawn

N, D, STEPS = 12, 7, 5


def silent(params: jax.Array, batch: jax.Array) -> jax.Array:
    return 0 * (batch @ params)


@pytest.mark.parametrize("sampler", [sampling.FullBatch(), sampling.SinglePass(2)])
@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_gradients_without_signal_are_the_noise(relation: str, sampler: object) -> None:
    """Every integer of a run, from the plan's numbers and its keys."""
    plan = plans.DPGD(
        num_examples=N,
        num_steps=STEPS,
        sampling=sampler,
        relation=relation,
        l2_clip_norm=0.7,
        noise_multiplier=1.3,
    )
    keys, data = Keys.insecure(5), jnp.ones((N, D))
    tx = dpgd(plan, keys)
    params = jnp.ones(D)

    def step(state: Any, t: jax.Array) -> tuple[Any, Any]:
        batch = sampling.batch(plan, keys, t, data)
        given = {"value_fn": silent, "batch": batch}
        gradient, state = tx.update(None, state, params, **given)
        return state, gradient

    run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(STEPS))[1])
    got = drawn.in_units(run(tx.init(params)), drawn.unit_of_sum(plan))
    np.testing.assert_array_equal(got, drawn.sums(plan, keys, D))
    assert plan.grid_noise_std == drawn.std_of_sum(plan)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: ((w - x) ** 2).mean(),
        lambda w, x: ((w - x) ** 2).sum(axis=-1, keepdims=True),
        lambda w, x: (w - x) ** 2,
        lambda w, x: (((w - x) ** 2).sum(axis=-1), {"aux": w}),
    ],
)
def test_what_is_no_loss_a_record_is_named(loss: Any) -> None:
    plan = plans.DPGD(
        num_examples=N,
        num_steps=STEPS,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
    )
    tx = dpgd(plan, Keys.insecure(0))
    params = jnp.zeros(D)
    state = tx.init(params)
    with pytest.raises(ValueError, match="value_fn must return one loss per record"):
        tx.update(None, state, params, value_fn=loss, batch=jnp.ones((N, D)))
    with pytest.raises(TypeError, match="given 'value_fn' and 'batch' by name"):
        tx.update(params, state, params)
    with pytest.raises(TypeError, match="given 'batch' by name"):
        tx.update(None, state, params, value_fn=silent)
