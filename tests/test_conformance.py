"""What every gradient maker of the registry must do."""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxdp
from jaxdp import sampling
from jaxdp.core import keys as keys_lib
from tests.conftest import BATCH, COMMON, PARAMS, Case, value_fn

KEYS = jaxdp.Keys.insecure(3)


@functools.cache
def jitted(case: Case) -> Any:
    """The update of a case, compiled once: it reads its keys from the state alone."""
    tx = case.make(case.plan, KEYS)

    @jax.jit
    def update(state: Any, params: Any = PARAMS, batch: Any = BATCH, mask: Any = None):
        return tx.update(None, state, params, value_fn=value_fn, batch=batch, mask=mask)

    return update


def steps(case: Case, keys: jaxdp.Keys = KEYS, count: int = 3) -> tuple[Any, Any, Any]:
    """Runs ``count`` steps; returns params, state and all updates."""
    params, seen = PARAMS, []
    state = case.make(case.plan, keys).init(params)
    for _ in range(count):
        updates, state = jitted(case)(state, params)
        params = optax.apply_updates(params, updates)
        seen.append(updates)
    return params, state, seen


def test_same_keys_same_updates(case: Case) -> None:
    _, _, first = steps(case)
    _, _, again = steps(case, jaxdp.Keys.insecure(3))
    _, _, other = steps(case, jaxdp.Keys.insecure(4))
    chex.assert_trees_all_equal(first, again)
    assert not np.allclose(first[0]["w"], other[0]["w"])
    assert not np.allclose(first[0]["w"], first[1]["w"])


def test_state_structure_is_stable(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    before = tx.init(PARAMS)
    _, after, _ = steps(case)
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)


def test_traced_once(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state: Any, params: Any) -> Any:
        updates, state = tx.update(None, state, params, value_fn=value_fn, batch=BATCH)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, state = step(state, params)


def test_incoming_updates_and_unknown_keywords_are_ignored(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    state = tx.init(PARAMS)
    plain, _ = jitted(case)(state)
    noisy = jax.tree.map(lambda x: x + 5, PARAMS)
    other, _ = jax.jit(
        lambda s: tx.update(
            noisy, s, PARAMS, value_fn=value_fn, batch=BATCH, value=1.0, loss="x"
        )
    )(state)
    chex.assert_trees_all_equal(plain, other)


def test_updates_have_the_dtypes_of_the_params(case: Case) -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = case.make(case.plan, KEYS)
    updates, _ = tx.update(
        None, tx.init(params), params, value_fn=value_fn, batch=BATCH
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


def test_scan_equals_the_loop(case: Case) -> None:
    tx = case.make(case.plan, KEYS)

    def body(carry: Any, _: None) -> Any:
        params, state = carry
        updates, state = tx.update(None, state, params, value_fn=value_fn, batch=BATCH)
        return (optax.apply_updates(params, updates), state), updates

    run = jax.jit(lambda carry: jax.lax.scan(body, carry, None, length=3))
    (params, _), _ = run((PARAMS, tx.init(PARAMS)))
    chex.assert_trees_all_close(params, steps(case)[0], rtol=1e-5, atol=1e-6)


def test_vmap_over_insecure_keys(case: Case) -> None:
    """Noise is drawn inside: one program for many seeds."""
    # Laplace noise is drawn on the host, which a traced key does not reach.
    changes = {"noise": "discrete"} if case.plan.noise == "laplace" else {}
    plan = dataclasses.replace(case.plan, **changes)

    def run(seed: jax.Array) -> Any:
        tx = case.make(plan, jaxdp.Keys.insecure(seed))
        updates, _ = tx.update(
            None, tx.init(PARAMS), PARAMS, value_fn=value_fn, batch=BATCH
        )
        return updates

    many = jax.vmap(run)(jnp.arange(3))
    one = run(jnp.asarray(2))
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x[2], many), one, rtol=1e-4, atol=1e-5
    )
    assert not np.allclose(many["w"][0], many["w"][1])


def test_zero_noise_and_infinite_clip_recover_the_non_private_method(
    case: Case,
) -> None:
    plan = dataclasses.replace(case.plan, l2_clip_norm=math.inf, noise_multiplier=0)
    tx = case.make(plan, KEYS)
    state = tx.init(PARAMS)
    updates, _ = tx.update(None, state, PARAMS, value_fn=value_fn, batch=BATCH)
    want = case.non_private(PARAMS, BATCH, state)
    chex.assert_trees_all_close(updates, want, rtol=1e-3, atol=1e-4)
    assert plan.epsilon(delta=1e-5) == math.inf


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_whole_run_exports_without_the_device(case: Case, platform: str) -> None:
    from jaxdp import training

    maker, optimizer = case.make(case.plan, KEYS), optax.sgd(0.1)
    program = training.make_program(case.plan, maker, optimizer, value_fn)
    carry = training.start(case.plan, maker, optimizer, PARAMS)
    # Typed keys have no serialised form as arguments; their words have.
    flat, tree = jax.tree.flatten((carry, KEYS))
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in flat]
    words = [
        jax.random.key_data(x) if key else x
        for x, key in zip(flat, is_key, strict=True)
    ]

    def run(words: list[jax.Array], data: Any) -> Any:
        leaves = [
            keys_lib.from_words(x) if key else x
            for x, key in zip(words, is_key, strict=True)
        ]
        carry, keys = jax.tree.unflatten(tree, leaves)
        out = program(carry, keys, data, 0, case.plan.num_steps)
        return out.params, out.releases

    exported = jax.export.export(jax.jit(run), platforms=[platform])(words, BATCH)
    assert exported.platforms == (platform,)
    assert len(exported.mlir_module_serialized) > 1000


def test_past_the_horizon_nothing_leaves(case: Case) -> None:
    count = case.plan.num_steps
    _, state, updates = steps(case, count=count + 2)
    assert int(state.count) == count and bool(state.exhausted)
    assert not np.any(state.release)
    for late in updates[count:]:
        assert not any(np.any(x) for x in jax.tree.leaves(late))
    assert np.any(updates[count - 1]["w"])


def test_not_exhausted_before_the_horizon(case: Case) -> None:
    _, state, _ = steps(case, count=case.plan.num_steps - 1)
    assert not bool(state.exhausted)


def test_public_state_has_no_secret(case: Case) -> None:
    tx = optax.chain(case.make(case.plan, KEYS), optax.adam(0.1))
    shown = jaxdp.public(tx.init(PARAMS))
    assert shown[0].noise is None
    assert shown[0].release is not None
    assert "noise" in type(tx.init(PARAMS)[0]).SECRET


def test_public_looks_inside_every_pytree(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    shown = jaxdp.public({"train": state, "keys": KEYS})
    assert shown["train"].opt_state.noise is None
    assert shown["keys"] is None
    with pytest.raises(TypeError, match="hides"):
        jaxdp.public([object()])


def test_keys_from_entropy_begin_one_run(case: Case) -> None:
    """Two runs of one plan would share their noise."""
    tx = case.make(case.plan, jaxdp.Keys.from_entropy())
    for traced in (jax.jit(tx.init), jax.jit(lambda _: tx.init(PARAMS))):
        with pytest.raises(ValueError, match=r"^keys .*jax.jit\(tx.init\)"):
            traced(PARAMS)
    tx.init(PARAMS)
    with pytest.raises(ValueError, match="already served"):
        tx.init(PARAMS)


def test_plans_of_another_family_are_refused(case: Case) -> None:
    other = jaxdp.dpzero if case.make is jaxdp.dpgd else jaxdp.dpgd
    with pytest.raises(ValueError, match="family"):
        other(case.plan, KEYS)


@pytest.mark.parametrize("bad", [jax.random.key(0), 0, None, "x"], ids=repr)
def test_bare_keys_are_refused(case: Case, bad: Any) -> None:
    with pytest.raises(TypeError, match=r"keys must be a jaxdp\.Keys"):
        case.make(case.plan, bad)


def test_a_plan_without_noise_is_refused(case: Case) -> None:
    for clip in (case.plan.l2_clip_norm, math.inf):
        plan = dataclasses.replace(case.plan, noise_multiplier=None, l2_clip_norm=clip)
        with pytest.raises(ValueError, match="noise_multiplier"):
            case.make(plan, KEYS)


def test_masked_and_partitioned_params_are_refused(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    mask = {"w": True, "layers": {"b": False}}
    with pytest.raises(ValueError, match="trainable="):
        optax.masked(tx, mask).init(PARAMS)
    labels = {"w": "a", "layers": {"b": "b"}}
    with pytest.raises(ValueError, match="trainable="):
        optax.partition({"a": tx, "b": optax.set_to_zero()}, labels).init(PARAMS)


@pytest.mark.parametrize(
    "trainable",
    [{"w": True, "layers": {"b": False}}, lambda path: path == "w"],
    ids=["tree", "predicate"],
)
def test_trainable_names_the_leaves_that_move(case: Case, trainable: Any) -> None:
    params = {**PARAMS, "layers": {"b": jnp.zeros((2, 2))}}
    tx = case.make(case.plan, KEYS, trainable=trainable)
    if case.name == "dpzero-orthonormal-3":
        tx.init(params)  # Three rows fit the three elements of w.
    updates, _ = tx.update(
        None, tx.init(params), params, value_fn=value_fn, batch=BATCH
    )
    assert np.any(updates["w"]) and not np.any(updates["layers"]["b"])


def test_integer_leaves_raise_with_their_path_unless_frozen(case: Case) -> None:
    params = {**PARAMS, "layers": {"b": jnp.ones((2, 2), jnp.int32)}}
    with pytest.raises(ValueError, match=r"'layers/b'.*int32.*trainable="):
        case.make(case.plan, KEYS).init(params)
    tx = case.make(case.plan, KEYS, trainable=lambda path: path == "w")
    updates, _ = tx.update(
        None, tx.init(params), params, value_fn=value_fn, batch=BATCH
    )
    assert updates["layers"]["b"].dtype == jnp.int32


def test_params_are_needed(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    with pytest.raises(ValueError, match="params"):
        tx.update(None, tx.init(PARAMS), value_fn=value_fn, batch=BATCH)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_record_contributes_zero(case: Case, bad: float) -> None:
    """As if the record were masked: nothing else moves by a bit."""
    tx = case.make(case.plan, KEYS)
    state = tx.init(PARAMS)
    x, y = BATCH
    broken = (x, y.at[5].set(bad))
    keep = jnp.arange(x.shape[0]) != 5
    got, _ = jitted(case)(state, batch=broken, mask=jnp.ones_like(keep))
    want, _ = jitted(case)(state, mask=keep)
    chex.assert_trees_all_equal(got, want)


def test_padding_never_changes_a_bit(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    state = tx.init(PARAMS)
    rows = COMMON["num_examples"]
    padded = jax.tree.map(lambda x: jnp.concatenate([x, 1e3 + x[:8]]), BATCH)
    mask = jnp.arange(rows + 8) < rows
    got, _ = jitted(case)(state, batch=padded, mask=mask)
    want, _ = jitted(case)(state)
    chex.assert_trees_all_equal(got, want)


def test_no_more_rows_count_than_the_plan_has_records(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    state = tx.init(PARAMS)
    many = jax.tree.map(lambda x: jnp.concatenate([x, 1e3 + x]), BATCH)
    got, _ = jitted(case)(state, batch=many, mask=jnp.ones(many[1].shape, bool))
    chex.assert_trees_all_equal(got, jitted(case)(state)[0])


def test_an_empty_batch_is_pure_noise(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    state = tx.init(PARAMS)
    mask = jnp.zeros((COMMON["num_examples"],), bool)
    got, after = jitted(case)(state, mask=mask)
    huge = jax.tree.map(lambda x: x * 1e6, BATCH)
    same, _ = jitted(case)(state, batch=huge, mask=mask)
    chex.assert_trees_all_equal(got, same)
    assert np.all(np.isfinite(after.release)) and np.any(after.release)


@pytest.mark.parametrize("size", [1, 7, 24, 100])
def test_a_microbatch_size_changes_nothing_for_elementwise_losses(
    case: Case, size: int
) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, _ = batch  # Sums written out: elementwise in the record.
        terms = [x[:, i] * params["w"][i] for i in range(3)]
        return jnp.sqrt(1 + jnp.square(terms[0] + terms[1] + terms[2]))

    whole = case.make(case.plan, KEYS)
    parts = case.make(case.plan, KEYS, microbatch_size=size)
    state = whole.init(PARAMS)
    want, _ = jax.jit(
        lambda s: whole.update(None, s, PARAMS, value_fn=loss, batch=BATCH)
    )(state)
    got, _ = jax.jit(
        lambda s: parts.update(None, s, PARAMS, value_fn=loss, batch=BATCH)
    )(state)
    assert case.plan.grid_bits is not None
    unit = case.plan.l2_clip_norm * 2.0**-case.plan.grid_bits
    slack = 0.0 if case.name != "dpgd" else 2 * unit  # Gradients contract sums anew.
    if "dpzero" in case.name:
        chex.assert_trees_all_equal(got, want)
    else:
        chex.assert_trees_all_close(got, want, rtol=0, atol=slack)


def test_foreign_batches_are_refused_when_traced(case: Case) -> None:
    # More than there are records, so never truncated: sampled Laplace noise is accounted
    # for nothing else.
    sampler = sampling.TruncatedPoisson(sampling_prob=0.25, max_batch_size=100)
    other = dataclasses.replace(case.plan, sampling=sampler)
    drawn = sampling.batch(other, KEYS, 0, BATCH)
    full = case.make(case.plan, KEYS)
    with pytest.raises(ValueError, match="TruncatedPoisson"):
        full.update(None, full.init(PARAMS), PARAMS, value_fn=value_fn, batch=drawn)
    sampled = case.make(other, KEYS)
    state = sampled.init(PARAMS)
    with pytest.raises(ValueError, match="raw"):
        sampled.update(None, state, PARAMS, value_fn=value_fn, batch=BATCH)
    sampled.update(None, state, PARAMS, value_fn=value_fn, batch=drawn)
    # Drawn with a seed that everybody knows, a sample amplifies nothing.
    secret = case.make(other, jaxdp.Keys.from_entropy())
    state = secret.init(PARAMS)
    with pytest.raises(ValueError, match="insecure"):
        secret.update(None, state, PARAMS, value_fn=value_fn, batch=drawn)
    larger = dataclasses.replace(other, num_examples=COMMON["num_examples"] + 1)
    foreign = case.make(larger, KEYS)
    state = foreign.init(PARAMS)
    with pytest.raises(ValueError, match="num_examples"):
        foreign.update(None, state, PARAMS, value_fn=value_fn, batch=drawn)


def test_wrong_numbers_of_rows_are_refused(case: Case) -> None:
    tx = case.make(case.plan, KEYS)
    state = tx.init(PARAMS)
    short = jax.tree.map(lambda x: x[:-1], BATCH)
    with pytest.raises(ValueError, match="num_examples"):
        tx.update(None, state, PARAMS, value_fn=value_fn, batch=short)
    with pytest.raises(ValueError, match="mask"):
        tx.update(
            None, state, PARAMS, value_fn=value_fn, batch=BATCH, mask=jnp.ones(3, bool)
        )


# Inside optax and flax.


def test_under_inject_hyperparams_step_sizes_vary(case: Case) -> None:
    def chained(learning_rate: Any) -> Any:
        return optax.chain(case.make(case.plan, KEYS), optax.scale(-learning_rate))

    tx = optax.inject_hyperparams(chained)(learning_rate=0.1)
    state = tx.init(PARAMS)
    small, _ = tx.update(None, state, PARAMS, value_fn=value_fn, batch=BATCH)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2)
    large, _ = tx.update(None, state, PARAMS, value_fn=value_fn, batch=BATCH)
    chex.assert_trees_all_close(jax.tree.map(lambda x: 2 * x, small), large, rtol=1e-6)


def test_privacy_constants_refuse_to_be_injected(case: Case) -> None:
    def chained(l2_clip_norm: Any) -> Any:
        plan = dataclasses.replace(case.plan, l2_clip_norm=l2_clip_norm)
        return case.make(plan, KEYS)

    tx = optax.inject_hyperparams(chained)(l2_clip_norm=1.0)
    with pytest.raises(TypeError, match="l2_clip_norm"):
        tx.init(PARAMS)


def test_one_release_per_logical_step_under_multi_steps(case: Case) -> None:
    tx = optax.MultiSteps(case.make(case.plan, KEYS), every_k_schedule=2)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    state = tx.init(PARAMS)
    update = jax.jit(
        lambda s: tx.update(zeros, s, PARAMS, value_fn=value_fn, batch=BATCH)
    )
    updates = []
    for _ in range(4):
        out, state = update(state)
        updates.append(out)
    assert int(state.inner_opt_state.count) == 2
    moved = [bool(np.any(out["w"])) for out in updates]
    assert moved == [False, True, False, True]
    plain = case.make(case.plan, KEYS)
    first, _ = jitted(case)(plain.init(PARAMS))
    chex.assert_trees_all_close(updates[1], first, rtol=1e-5, atol=1e-5)


def test_chains_with_momentum_adam_schedule_free_and_decay(case: Case) -> None:
    for after in (
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(0.1),
        optax.contrib.schedule_free_sgd(0.1),
        optax.sgd(optax.cosine_decay_schedule(0.1, 5)),
    ):
        # The maker inside is conformant by the other tests: here it is what follows it.
        tx = optax.chain(case.make(case.plan, KEYS), after)
        state = tx.init(PARAMS)

        @jax.jit
        def update(state: Any, params: Any, tx: Any = tx) -> Any:
            updates, state = tx.update(
                None, state, params, value_fn=value_fn, batch=BATCH
            )
            return optax.apply_updates(params, updates), state

        params, _ = update(state, PARAMS)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(params))
        assert np.any(params["w"] != PARAMS["w"])


def test_inside_a_linen_train_state(case: Case) -> None:
    model = nn.Dense(1)
    x, y = BATCH
    variables = model.init(jax.random.key(0), x[:1])
    tx = optax.chain(case.make(case.plan, KEYS), optax.sgd(0.1))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    def losses(params: Any, batch: Any) -> jax.Array:
        features, target = batch
        return jnp.square(state.apply_fn({"params": params}, features)[:, 0] - target)

    @jax.jit
    def step(state: TrainState) -> TrainState:
        updates, opt_state = state.tx.update(
            None, state.opt_state, state.params, value_fn=losses, batch=(x, y)
        )
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    after = step(step(state))
    assert int(after.opt_state[0].count) == 2
    assert np.any(after.params["kernel"] != state.params["kernel"])


def test_inside_an_nnx_optimizer(case: Case) -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    definition, _ = nnx.split(model)
    start = np.array(model.kernel[...])
    tx = optax.chain(case.make(case.plan, KEYS), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def losses(params: Any, batch: Any) -> jax.Array:
        features, target = batch
        return jnp.square(nnx.merge(definition, params)(features)[:, 0] - target)

    for _ in range(2):
        params = nnx.state(model, nnx.Param)
        optimizer.update(model, params, value_fn=losses, batch=BATCH)
    assert int(optimizer.opt_state[0].horizon.count[...]) == 2
    assert np.any(np.asarray(model.kernel[...]) != start)
