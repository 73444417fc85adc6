"""The loop: one program, chunks to the same bits, reports, refusals."""

import dataclasses
import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, models, plans, sampling, training

N, D = 60, 6
X = jax.random.normal(jax.random.key(0), (N, D))
Y = (X[:, 0] > 0).astype(jnp.int32)
DATA = (X, Y)


def make_plan(**changes: Any) -> plans.DPZero:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": 23,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "smoothing_radius": 1e-2,
        "noise_multiplier": 2.0,
        "delta": 1e-5,
    }
    return plans.DPZero(**(base | changes))


def network(name: str) -> tuple[Any, Any]:
    """Initial params and loss of the linear model or the MLP."""
    net = (
        models.linear(num_outputs=2, num_features=D)
        if name == "linear"
        else models.mlp(num_outputs=2, num_features=D, hidden=(8,))
    )
    return net.init(jax.random.key(1)), net.value_fn


POISSON = sampling.TruncatedPoisson(sampling_prob=0.3)


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("sampler", [sampling.FullBatch(), POISSON], ids=repr)
def test_chunks_give_the_bits_of_the_one_program(name: str, sampler: Any) -> None:
    """Chunks of 7, 7, 7 and 2 of 23 steps; momentum carries over."""
    params, value_fn = network(name)
    plan = make_plan(sampling=sampler)
    optimizer = optax.sgd(0.1, momentum=0.9)
    seen = []

    def run(**kwargs: Any) -> jaxdp.FitResult:
        return jaxdp.fit(
            plan,
            Keys.insecure(0),
            params,
            DATA,
            value_fn=value_fn,
            optimizer=optimizer,
            **kwargs,
        )

    whole = run()
    parts = run(chunk=7, callback=lambda step, p, info: seen.append((step, p, info)))
    chex.assert_trees_all_equal(whole.params, parts.params)
    chex.assert_trees_all_equal(whole.info, parts.info)
    assert [step for step, _, _ in seen] == [7, 14, 21, 23]
    chex.assert_trees_all_equal(seen[-1][1], whole.params)
    np.testing.assert_array_equal(seen[0][2].releases, whole.info.releases[:7])
    chex.assert_trees_all_equal_shapes_and_dtypes(whole.params, params)


def test_fit_is_the_loop_written_by_hand() -> None:
    params, value_fn = network("linear")
    plan = make_plan(sampling=POISSON, num_steps=5)
    keys = Keys.insecure(3)
    got = jaxdp.fit(
        plan, keys, params, DATA, value_fn=value_fn, optimizer=optax.sgd(0.1)
    )
    tx = optax.chain(jaxdp.dpzero(plan, keys), optax.sgd(0.1))
    state, p = tx.init(params), params

    @jax.jit
    def step(state: Any, p: Any, t: Any) -> Any:
        batch = sampling.batch(plan, keys, t, DATA)
        updates, state = tx.update(None, state, p, value_fn=value_fn, batch=batch)
        return state, optax.apply_updates(p, updates)

    for t in range(plan.num_steps):
        state, p = step(state, p, t)
    chex.assert_trees_all_close(got.params, p, rtol=1e-5, atol=1e-6)
    by_hand = jaxdp.report(plan, state)
    for name, value in by_hand.items():
        assert got.report[name] == value, name
    with pytest.raises(ValueError, match="another plan"):
        jaxdp.report(dataclasses.replace(plan, l2_clip_norm=2.0), state)


def test_the_callers_params_survive_and_data_are_no_constants() -> None:
    params, value_fn = network("linear")
    before = jax.tree.map(np.array, params)
    jaxdp.fit(make_plan(), Keys.insecure(0), params, DATA, value_fn=value_fn)
    chex.assert_trees_all_equal(params, before)
    plan = make_plan()
    maker, optimizer = plan.transform(Keys.insecure(0)), optax.identity()
    program = training.make_program(plan, maker, optimizer, value_fn)
    carry = training.start(plan, maker, optimizer, params)
    text = (
        jax.jit(lambda c, k, d: program(c, k, d, 0, 3))
        .lower(carry, Keys.insecure(0), DATA)
        .as_text()
    )
    assert f"dense<{float(X[0, 0]):.6e}"[:12] not in text
    assert text.count("stablehlo.while") >= 1


def test_programs_are_compiled_once_for_all_keys() -> None:
    params, value_fn = network("linear")
    plan, optimizer = make_plan(num_steps=4), optax.sgd(0.1)
    results = [
        jaxdp.fit(
            plan, Keys.insecure(s), params, DATA, value_fn=value_fn, optimizer=optimizer
        )
        for s in range(3)
    ]
    assert results[0].report["compile_seconds"] > 0
    assert [r.report["compile_seconds"] for r in results[1:]] == [0, 0]
    assert not np.array_equal(results[0].info.releases, results[1].info.releases)
    # Other options are other programs.
    frozen = jaxdp.fit(
        plan,
        Keys.insecure(0),
        params,
        DATA,
        value_fn=value_fn,
        optimizer=optimizer,
        trainable=lambda path: path.endswith("bias"),
    )
    assert frozen.report["compile_seconds"] > 0
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), frozen.params, params)
    flags = {
        jax.tree_util.keystr(path, simple=True): flag
        for path, flag in jax.tree_util.tree_leaves_with_path(moved)
    }
    assert all(flag == path.endswith("bias") for path, flag in flags.items())


def test_report() -> None:
    params, value_fn = network("linear")
    plan = make_plan()
    insecure = jaxdp.fit(plan, Keys.insecure(0), params, DATA, value_fn=value_fn)
    report = json.loads(json.dumps(insecure.report))
    assert report["private"] is False
    assert report["seed_source"] == "insecure"
    assert report["epsilon"] == pytest.approx(plan.epsilon())
    assert report["steps_done"] == report["num_steps"] == 23
    wanted = {
        "algorithm",
        "num_examples",
        "delta",
        "relation",
        "accountant",
        "noise_multiplier",
        "compile_seconds",
        "train_seconds",
        "steps_per_second",
        "device",
        "versions",
    }
    assert wanted <= set(report)
    entropy = jaxdp.fit(plan, Keys.from_entropy(), params, DATA, value_fn=value_fn)
    assert entropy.report["private"] is True
    assert entropy.report["seed_source"] == "entropy"
    silent = plan.with_noise(noise_multiplier=0)
    bare = jaxdp.fit(silent, Keys.from_entropy(), params, DATA, value_fn=value_fn)
    assert bare.report["private"] is False
    assert bare.report["epsilon"] is None
    text = json.dumps(insecure.report).lower()
    assert not any(word in text for word in ("loss", "accuracy", "gradient"))


def test_keys_from_entropy_serve_one_fit() -> None:
    params, value_fn = network("linear")
    keys = Keys.from_entropy()
    plan = make_plan(num_steps=2)
    with pytest.raises(ValueError, match="num_examples"):  # Mistakes spend nothing.
        jaxdp.fit(plan, keys, params, (X[:-1], Y[:-1]), value_fn=value_fn)
    with pytest.raises(ValueError, match="one loss per record"):
        jaxdp.fit(plan, keys, params, DATA, value_fn=lambda p, b: jnp.zeros(()))
    jaxdp.fit(plan, keys, params, DATA, value_fn=value_fn)
    with pytest.raises(ValueError, match="already served"):
        jaxdp.fit(plan, keys, params, DATA, value_fn=value_fn)


def test_the_optimizer_sees_releases_and_nothing_else() -> None:
    """Whatever it asks for: data that reached it would leave un-noised."""
    params, value_fn = network("linear")
    seen: list[set[str]] = []

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        seen.append(set(extra))
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda p: (), update)
    jaxdp.fit(
        make_plan(num_steps=2),
        Keys.insecure(0),
        params,
        DATA,
        value_fn=value_fn,
        optimizer=spy,
    )
    assert seen
    assert set.union(*seen) == set()


def test_what_cannot_be_hashed_still_runs() -> None:
    params, value_fn = network("linear")

    class Loss:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __call__(self, p: Any, b: Any) -> jax.Array:
            return value_fn(p, b)

    trainable = jax.tree.map(lambda _: jnp.array(True), params)
    jaxdp.fit(
        make_plan(num_steps=2),
        Keys.insecure(0),
        params,
        DATA,
        value_fn=Loss(),
        trainable=trainable,
    )


def test_progress_is_drawn_and_changes_nothing(capsys: Any) -> None:
    params, value_fn = network("linear")
    plan = make_plan(num_steps=4)
    run = lambda **kwargs: jaxdp.fit(  # noqa: E731
        plan, Keys.insecure(0), params, DATA, value_fn=value_fn, **kwargs
    )
    chex.assert_trees_all_equal(run().params, run(progress=True).params)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"plan": "x"}, TypeError, "plan"),
        ({"plan": make_plan(noise_multiplier=None)}, ValueError, "noise_multiplier"),
        ({"keys": 0}, TypeError, "keys"),
        ({"data": (X[:5], Y[:5])}, ValueError, "num_examples"),
        ({"value_fn": None}, TypeError, "value_fn"),
        ({"value_fn": lambda p, b: jnp.zeros(())}, ValueError, "value_fn"),
        ({"trainable": lambda path: False}, ValueError, "trainable"),
        ({"trainable": {"nope": True}}, ValueError, "trainable"),
        ({"chunk": 0}, ValueError, "chunk"),
        ({"callback": 3}, TypeError, "callback"),
        ({"optimizer": 0.1}, TypeError, "optimizer"),
        ({"microbatch_size": 1.5}, TypeError, "microbatch_size"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_wrong_arguments_are_named(changes: dict, error: type, match: str) -> None:
    params, value_fn = network("linear")
    given: dict[str, Any] = {
        "plan": make_plan(),
        "keys": Keys.insecure(0),
        "params": params,
        "data": DATA,
        "value_fn": value_fn,
    }
    given |= changes
    first = [given.pop(name) for name in ("plan", "keys", "params", "data")]
    with pytest.raises(error, match=match):
        jaxdp.fit(*first, **given)


def test_isolation_check_finds_cross_record_losses() -> None:
    params = jnp.ones(D)
    jaxdp.check_isolation(lambda p, b: jnp.tanh(b[0] @ p), params, DATA)

    def batch_norm(p: jax.Array, batch: Any) -> jax.Array:
        return (batch[0] - batch[0].mean(axis=0)) @ p

    with pytest.raises(ValueError, match="not per record"):
        jaxdp.check_isolation(batch_norm, params, DATA)
    for dtype in (jnp.bfloat16, jnp.float16):
        half = lambda p, b, dtype=dtype: jnp.tanh(b[0] @ p).astype(dtype)  # noqa: E731
        jaxdp.check_isolation(half, params, DATA)
    with pytest.raises(ValueError, match="at least two"):
        jaxdp.check_isolation(batch_norm, params, (X[:1], Y[:1]))


def test_per_record_lifts_a_loss_of_one_record() -> None:
    loss = jaxdp.per_record(lambda p, record: jnp.sum(p * record[0]) + record[1])
    got = loss(jnp.ones(D), DATA)
    np.testing.assert_allclose(got, X.sum(axis=1) + Y, rtol=1e-5)
