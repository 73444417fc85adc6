"""Common mistakes of calls: each is refused in one short line that says what to do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling

N = 40
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
PARAMS = {"w": jnp.ones(3)}
PLAN = plans.DPZero(
    num_examples=N,
    num_steps=2,
    sampling=sampling.FullBatch(),
    relation="replace_one",
    l2_clip_norm=1.0,
    smoothing_radius=1e-3,
    noise_multiplier=1.0,
)


def loss(params: Any, batch: Any) -> Any:
    return (batch[0] @ params["w"] - batch[1]) ** 2


def fit(**changes: Any) -> Any:
    given: dict[str, Any] = {"params": PARAMS, "data": (X, Y), "value_fn": loss}
    given |= {"optimizer": optax.sgd(0.1)} | changes
    return jaxdp.fit(PLAN, Keys.insecure(0), **given)


def traced(step: Any) -> Any:
    return plans.Saddle(
        num_examples=N,
        num_steps=2,
        sampling=sampling.SinglePass(20),
        relation="replace_one",
        dim_x=4,
        dim_y=4,
        linf_clip_norm_x=1.0,
        linf_clip_norm_y=1.0,
        step_size_x=step,
        step_size_y=0.1,
    )


MISTAKES = {
    "lists": (lambda: fit(data=(X.tolist(), Y.tolist())), "np.asarray makes one array"),
    "a list of records": (
        lambda: fit(data=list(zip(X, Y, strict=True))),
        r"got shape \(3,\) at data\[0\]\[0\]; lists are taken apart",
    ),
    "a generator": (lambda: fit(data=(x for x in X)), "40 records, got a generator"),
    "no data": (lambda: fit(data=None), "got no array"),
    "labels as strings": (
        lambda: fit(data=(X, np.where(Y == 0, "no", "yes"))),
        r"data must be numbers, got dtype text at data\[1\]: make integers of",
    ),
    "blanks": (
        lambda: fit(data=(X, np.array([None, 1] * 20, dtype=object))),
        r"got dtype object at data\[1\]",
    ),
    "a pair of losses": (
        lambda: fit(value_fn=lambda p, b: (loss(p, b), 0)),
        "shape [(]40,[)] for a batch of 40, got a tuple",
    ),
    "a mean": (
        lambda: fit(value_fn=lambda p, b: loss(p, b).mean()),
        "jaxdp.per_record lifts a loss of one record. A measure of the whole data set",
    ),
    "texts as parameters": (
        lambda: fit(params={"x": np.array(["Anna", "Bob"])}),
        "params must be arrays of numbers, got dtype text at 'x'$",
    ),
    "a module with a function": (
        lambda: fit(params=PARAMS | {"activation": jax.nn.relu}),
        "got a custom_jvp at 'activation': of a module take its arrays, as eqx.partition",
    ),
    "a plan under jit": (
        lambda: jax.jit(lambda s: [traced(s), 0.0][1])(0.1),
        "step_size_x must be .*, got a value that JAX traces: make plans outside",
    ),
    "no run": (
        lambda: jaxdp.resume("nowhere", PARAMS, (X, Y), value_fn=loss),
        "is not there; a run that was killed before it wrote one released nothing",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_in_one_line(name: str) -> None:
    call, said = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=said) as caught:
        call()
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
