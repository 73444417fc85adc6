"""Algorithms as transformations of Optax: where they stand, and what they leave alone.

Every method is trained in a chain in ``tests/test_conformance.py``, these too.
"""

import collections
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxdp
from jaxdp import Keys
from tests.methods import KEYS, METHODS, SADDLES, Method, numbers

NAMES = ("sosp", *map(str, SADDLES))
CASES = [m for m in METHODS if m.name in NAMES]
ALL = pytest.mark.parametrize("method", CASES, ids=str)
SADDLE, SYNTHETIC = (
    next(m for m in CASES if m.name == n) for n in ("saddle", "synthetic")
)


def made(method: Method, keys: Keys = KEYS) -> Any:
    return jaxdp.as_transform(method.make(method.plan, keys))


def given(method: Method) -> dict[str, Any]:
    return {
        "value_fn": method.value_fn,
        "batch": jax.tree.map(jnp.asarray, method.data),
    }


def same(one: Any, other: Any) -> bool:
    pairs = zip(numbers(one), numbers(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@functools.cache
def trained(method: Method, after: Any = optax.identity, moved: bool = False) -> Any:
    """Params and state after all steps of a chain; ``moved``: and params set anew."""
    tx = optax.chain(made(method), after())
    state, params = tx.init(method.params), method.params

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(None, state, params, **given(method))
        return optax.apply_updates(params, updates), state

    for _ in range(method.plan.num_steps):
        if moved:
            params = jax.tree.map(lambda x: 3 * x + 1, params)
        params, state = step(params, state)
    return params, state


def decay() -> Any:
    return optax.add_decayed_weights(0.1)


def half() -> Any:
    return optax.scale(0.5)


@pytest.mark.parametrize(
    ("after", "moved"), [(decay, False), (half, False), (half, True)]
)
@pytest.mark.parametrize("method", [SADDLE, CASES[0]], ids=str)
def test_params_decide_nothing_that_is_released(
    method: Method, after: Any, moved: bool
) -> None:
    """The state stays the same to the bit, whatever becomes of the params."""
    params, state = trained(method)
    others, other = trained(method, after, moved)
    assert not same(params, others)
    assert same(state[0], other[0])


@ALL
def test_the_params_are_the_output(method: Method) -> None:
    params, state = trained(method)
    point = method.make(method.plan, KEYS).output(state[0])
    chex.assert_trees_all_close(params, point, rtol=0, atol=1e-6)
    assert bool(state[0].exhausted)
    assert int(state[0].count) == method.plan.num_steps
    report = jaxdp.report(method.plan, state)
    assert report["steps_done"] == method.plan.num_steps


def test_of_params_elsewhere_an_update_leads_to_the_output() -> None:
    """Of other dtypes and containers too; and none past the horizon."""
    tx = made(SADDLE)
    state, far = (
        tx.init(SADDLE.params),
        [x.astype(jnp.bfloat16) + 7 for x in SADDLE.params],
    )
    step = jax.jit(lambda s, p: tx.update(None, s, p, **given(SADDLE)))
    updates, after = step(state, far)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, far)
    point = jax.tree.leaves(SADDLE.make(SADDLE.plan, KEYS).output(after))
    got = optax.apply_updates(far, updates)
    for a, b in zip(got, point, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2**-5)
    players = collections.namedtuple("Players", "x y")
    named, _ = step(state, players(*far))
    assert type(named) is players and same(named, updates)
    _, done = trained(SADDLE)
    updates, late = step(done[0], far)
    assert not any(map(np.any, updates))
    assert not np.any(late.release)
    assert same(late._replace(release=()), done[0]._replace(release=()))


@ALL
def test_secrets_are_dropped_from_a_chain(method: Method) -> None:
    _, state = trained(method)
    shown = jaxdp.public(state)
    assert same(shown[0].horizon, state[0].horizon)
    secret = {"scores", "scores_x", "scores_y", "totals", "roots"} & set(
        shown[0]._fields
    )
    assert all(getattr(shown[0], name) is None for name in secret)
    assert secret or shown[0].spider.noise.refresh is None


def test_what_is_no_algorithm_is_refused() -> None:
    for wrong in (optax.sgd(0.1), SADDLE.plan, None, jaxdp.saddle_mirror_descent):
        with pytest.raises(TypeError, match=r"^algorithm must be a jaxdp.Algorithm"):
            jaxdp.as_transform(wrong)  # pyright: ignore[reportArgumentType]


@ALL
def test_what_update_needs(method: Method) -> None:
    """Params of the shapes of init, losses and the whole data set, before any is read."""
    tx, these = made(method), given(method)
    state, params = tx.init(method.params), method.params
    for name in these:
        fewer = {k: v for k, v in these.items() if k != name}
        with pytest.raises(TypeError, match=f"'{name}'"):
            tx.update(None, state, params, **fewer)
    with pytest.raises(ValueError, match="params must be passed to update"):
        tx.update(None, state, **these)
    with pytest.raises(ValueError, match="mask must be None for as_transform"):
        tx.update(None, state, params, **these, mask=jnp.ones(24, bool))
    longer = jax.tree.map(lambda x: jnp.concatenate([x, x]), params)
    with pytest.raises(ValueError, match=r"^params must be like those of init: "):
        jax.eval_shape(lambda: tx.update(None, state, longer, **these))
    renamed = dict(enumerate(jax.tree.leaves(params), start=7))
    with pytest.raises(ValueError, match=r"^params must be like those of init: "):
        jax.eval_shape(lambda: tx.update(None, state, renamed, **these))
    drawn = jaxdp.sampling.batch(
        method.plan, KEYS, 0, method.data, phase=method.phases[0]
    )
    with pytest.raises(TypeError, match="num_examples = 24 records, got a Batch"):
        tx.update(None, state, params, **these | {"batch": drawn})


@ALL
def test_optax_must_not_call_it_where_it_has_no_effect(method: Method) -> None:
    """And a refused ``init`` spends no keys."""
    tx = made(method, Keys.from_entropy())
    leaves, tree = jax.tree.flatten(method.params)
    mask = jax.tree.unflatten(tree, [i > 0 for i in range(len(leaves))])
    labels = jax.tree.map(lambda x: "b" if x else "a", mask)
    parts = {"a": optax.set_to_zero(), "b": tx}
    for wrapped in (optax.masked(tx, mask), optax.partition(parts, labels)):
        with pytest.raises(
            ValueError, match=r"^as_transform .* some leaves are masked"
        ):
            wrapped.init(method.params)
    late = optax.chain(optax.sgd(0.1), tx)
    state = late.init(method.params)
    match = r"^as_transform must be first .*jaxdp.as_transform\(algorithm\)"
    with pytest.raises(ValueError, match=match):
        late.update(method.params, state, method.params, **given(method))


def test_under_multi_steps_one_release_leaves_for_each_step() -> None:
    """Every call shows it all the records, so that none is lost."""
    tx = optax.MultiSteps(made(SYNTHETIC), every_k_schedule=2)
    state = tx.init(SYNTHETIC.params)
    zeros = jnp.zeros_like(SYNTHETIC.params)
    step = jax.jit(lambda s: tx.update(zeros, s, SYNTHETIC.params, **given(SYNTHETIC)))
    for _ in range(2 * SYNTHETIC.plan.num_steps):
        _, state = step(state)
    _, once = trained(SYNTHETIC)
    assert same(state.inner_opt_state, once[0])


def test_under_inject_hyperparams_what_follows_varies() -> None:
    def chained(factor: Any) -> Any:
        return optax.chain(made(SADDLE), optax.scale(factor))

    tx = optax.inject_hyperparams(chained)(factor=1.0)
    state = tx.init(SADDLE.params)
    step = jax.jit(lambda s: tx.update(None, s, SADDLE.params, **given(SADDLE)))
    whole, after = step(state)
    state.hyperparams["factor"] = jnp.asarray(0.5)
    part, other = step(state)
    chex.assert_trees_all_equal(part, jax.tree.map(lambda x: x / 2, whole))
    assert same(after.inner_state[0], other.inner_state[0])


def test_seeds_side_by_side() -> None:
    def run(seed: Any) -> Any:
        tx = made(SADDLE, Keys.insecure(seed))

        def body(carry: Any, _: Any) -> Any:
            params, state = carry
            updates, state = tx.update(None, state, params, **given(SADDLE))
            return (optax.apply_updates(params, updates), state), state.release

        begun = (SADDLE.params, tx.init(SADDLE.params))
        return jax.lax.scan(body, begun, length=SADDLE.plan.num_steps)[0][0]

    params = jax.jit(jax.vmap(run))(jnp.array([3, 4]))
    want, _ = trained(SADDLE)
    for both, one in zip(params, want, strict=True):
        np.testing.assert_array_equal(both[0], one)


def searched() -> tuple[Any, Any, Any]:
    """A search whose params are those of a model, its losses, and its data."""
    search = next(m for m in CASES if m.name == "sosp")
    data = (jnp.asarray(search.data), jnp.ones(len(search.data)))

    def losses(predict: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.square(predict(x)[:, 0] - y)

    return search, losses, data


def test_inside_an_nnx_optimizer() -> None:
    search, losses, data = searched()
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    definition, _ = nnx.split(model)
    plan = dataclasses.replace(search.plan, dim=None)
    tx = optax.chain(jaxdp.as_transform(jaxdp.sosp(plan, KEYS)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def value_fn(params: Any, batch: Any) -> jax.Array:
        return losses(nnx.merge(definition, params), batch)

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer) -> None:
        params = nnx.state(model, nnx.Param)
        optimizer.update(model, params, value_fn=value_fn, batch=data)

    for _ in range(2):
        step(model, optimizer)
    state = optimizer.opt_state[0]
    assert int(state.horizon.count[...]) == 2
    np.testing.assert_allclose(
        model.kernel[...], state.best.point["kernel"][...], atol=1e-6
    )


def test_inside_a_train_state() -> None:
    search, losses, data = searched()
    params = {"w": jnp.ones((4, 1))}
    plan = dataclasses.replace(search.plan, dim=None)
    tx = optax.chain(jaxdp.as_transform(jaxdp.sosp(plan, KEYS)))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)

    @jax.jit
    def step(state: Any) -> Any:
        def value_fn(params: Any, batch: Any) -> jax.Array:
            return losses(lambda x: x @ params["w"], batch)

        return jaxdp.apply_gradients(state, value_fn=value_fn, batch=data)

    after = step(step(state))
    assert int(after.opt_state[0].count) == int(after.step) == 2
