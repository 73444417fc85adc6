"""The loop: one program, chunks to the same bits, reports, refusals."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling, training
from jaxdp.core import keys as keys_lib
from jaxdp.models import networks
from jaxdp.training import loop, preparing, recording

N, D = 60, 6
X = jax.random.normal(jax.random.key(0), (N, D))
Y = (X[:, 0] > 0).astype(jnp.int32)
DATA = (X, Y)
SGD = optax.sgd(0.1)


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


@functools.cache
def network(name: str) -> tuple[Any, Any]:
    """Initial params and loss of the linear model or the MLP: one loss, one program."""
    net = (
        networks.linear(num_outputs=2, num_features=D)
        if name == "linear"
        else networks.mlp(num_outputs=2, num_features=D, hidden=(8,))
    )
    return net.init(jax.random.key(1)), net.value_fn


POISSON = sampling.TruncatedPoisson(sampling_prob=0.3)


# Every method, in chunks of 2 steps, is in test_conformance.py.
@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        pytest.param("mlp", sampling.FullBatch(), marks=pytest.mark.slow),
        pytest.param("linear", POISSON, marks=pytest.mark.slow),
    ],
    ids=str,
)
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


def test_a_report_is_of_the_plan_of_the_state() -> None:
    params, _ = network("linear")
    plan = make_plan(num_steps=5)
    state = jaxdp.dpzero(plan, Keys.insecure(3)).init(params)
    assert jaxdp.report(plan, state)["steps_done"] == 0
    with pytest.raises(ValueError, match="another plan"):
        jaxdp.report(dataclasses.replace(plan, l2_clip_norm=2.0), state)
    named = optax.named_chain(
        ("dpzero", plan.transform(Keys.insecure(3))), ("sgd", SGD)
    )
    assert jaxdp.report(plan, named.init(params))["steps_done"] == 0
    for other in (None, (), {}, params, jnp.zeros(2)):
        with pytest.raises(ValueError, match="state must be the state of dpzero"):
            jaxdp.report(plan, other)


def test_the_callers_params_survive_and_data_are_no_constants() -> None:
    params, value_fn = network("linear")
    before = jax.tree.map(np.array, params)
    jaxdp.fit(
        make_plan(), Keys.insecure(0), params, DATA, value_fn=value_fn, optimizer=SGD
    )
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


def test_data_that_the_caller_changes_are_those_that_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where JAX shares the memory of a NumPy array, as ``asarray`` is free to do."""
    # On a boundary of 64 bytes: only such memory is shared.
    raw = np.empty(4 * N * D + 64, np.uint8)
    first = -raw.ctypes.data % 64
    x = raw[first : first + 4 * N * D].view(np.float32).reshape(N, D)
    convert = jnp.asarray

    def asarray(given: Any, *args: Any, **kwargs: Any) -> jax.Array:
        if given is x:
            return jax.device_put(given)
        return convert(given, *args, **kwargs)

    def run(spoil: bool) -> np.ndarray:
        x[:] = X

        def callback(*_: Any) -> None:
            if spoil:
                x[:] = 7

        def loss(w: jax.Array, batch: jax.Array) -> jax.Array:
            return batch @ w

        plan, start = make_plan(num_steps=6), jnp.zeros(D)
        given: Any = {"value_fn": loss, "chunk": 2, "callback": callback}
        given["optimizer"] = SGD
        result = jaxdp.fit(plan, Keys.insecure(0), start, x, **given)
        return np.asarray(result.info.releases)

    monkeypatch.setattr(jnp, "asarray", asarray)
    want = run(spoil=False)
    np.testing.assert_array_equal(run(spoil=True), want)
    assert np.all(x == 7)


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_averages_hold_frozen_leaves_as_they_are(dtype: Any) -> None:
    """Whatever the updates say that are averaged."""
    params = {"w": jnp.ones(D), "base": {"b": jnp.array([0.3, jnp.inf], dtype)}}
    optimizer = optax.chain(
        optax.adamw(0.1, weight_decay=0.5),
        optax.masked(jaxdp.polyak_average(2), {"w": True, "base": True}),
    )
    result = jaxdp.fit(
        make_plan(num_steps=6),
        *(Keys.insecure(0), params, DATA),
        value_fn=lambda p, batch: jnp.tanh(batch[0] @ p["w"]) * p["base"]["b"][0],
        optimizer=optimizer,
        trainable=lambda path: path == "w",
    )
    mean = jaxdp.polyak_output(result.info.state)
    for tree in (mean, result.params):
        want = np.asarray(params["base"]["b"], np.float32)
        np.testing.assert_array_equal(np.asarray(tree["base"]["b"], np.float32), want)
    assert np.all(mean["w"] != result.params["w"]) and np.all(mean["w"] != 1)


def test_report() -> None:
    params, value_fn = network("linear")
    plan = make_plan()
    insecure = jaxdp.fit(
        plan, Keys.insecure(0), params, DATA, value_fn=value_fn, optimizer=SGD
    )
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
    entropy = jaxdp.fit(
        plan, Keys.from_entropy(), params, DATA, value_fn=value_fn, optimizer=SGD
    )
    assert entropy.report["private"] is True
    assert entropy.report["seed_source"] == "entropy"
    silent = plan.with_noise(noise_multiplier=0)
    bare = jaxdp.fit(
        silent, Keys.from_entropy(), params, DATA, value_fn=value_fn, optimizer=SGD
    )
    assert bare.report["private"] is False
    assert bare.report["epsilon"] is None
    text = json.dumps(insecure.report).lower()
    assert not any(word in text for word in ("loss", "accuracy", "gradient"))


def test_keys_from_entropy_serve_one_fit() -> None:
    params, value_fn = network("linear")
    keys = Keys.from_entropy()
    plan = make_plan()
    with pytest.raises(ValueError, match="num_examples"):  # Mistakes spend nothing.
        jaxdp.fit(
            plan, keys, params, (X[:-1], Y[:-1]), value_fn=value_fn, optimizer=SGD
        )
    with pytest.raises(ValueError, match="one loss per record"):
        jaxdp.fit(
            plan, keys, params, DATA, value_fn=lambda p, b: jnp.zeros(()), optimizer=SGD
        )
    jaxdp.fit(plan, keys, params, DATA, value_fn=value_fn, optimizer=SGD)
    with pytest.raises(ValueError, match="already served"):
        jaxdp.fit(plan, keys, params, DATA, value_fn=value_fn, optimizer=SGD)


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


@pytest.mark.slow  # One more program of a run.
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
        optimizer=SGD,
        trainable=trainable,
    )


def test_progress_is_drawn_and_changes_nothing(capsys: Any) -> None:
    params, value_fn = network("linear")
    plan = make_plan()
    run = lambda **kwargs: jaxdp.fit(  # noqa: E731
        plan, Keys.insecure(0), params, DATA, value_fn=value_fn, optimizer=SGD, **kwargs
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
        ({"optimizer": None}, ValueError, "optimizer must be given for dpzero"),
        ({"check_isolation": "no"}, TypeError, "check_isolation"),
        ({"keep_noise_roots": "no"}, TypeError, "keep_noise_roots must be a bool"),
        ({"progress": 1}, TypeError, "progress must be a bool"),
        ({"stacked": 3}, TypeError, "stacked must be callable"),
        ({"params": {}}, ValueError, "params must have at least one leaf"),
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
        "optimizer": SGD,
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

    for at in (params, jnp.zeros(D)):  # Where a mean does not reach the losses.
        with pytest.raises(ValueError, match="not per record"):
            jaxdp.check_isolation(batch_norm, at, DATA)
    for dtype in (jnp.bfloat16, jnp.float16):
        half = lambda p, b, dtype=dtype: jnp.tanh(b[0] @ p).astype(dtype)  # noqa: E731
        jaxdp.check_isolation(half, params, DATA)
    with pytest.raises(ValueError, match="at least two"):
        jaxdp.check_isolation(batch_norm, params, (X[:1], Y[:1]))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_loss_that_changed_is_checked_anew(lazy: bool) -> None:
    """A module in its training mode normalises by the batch, at the same shapes."""
    mode = {"train": False}

    def value_fn(p: jax.Array, batch: Any) -> jax.Array:
        mean = batch[0].mean(axis=0) if mode["train"] else 0.0
        return jnp.tanh((batch[0] - mean) @ p)

    loss = jaxdp.lazy(value_fn) if lazy else value_fn

    def run(num_steps: int, value_fn: Any = loss, **options: Any) -> Any:
        plan, options = make_plan(num_steps=num_steps), {"optimizer": SGD} | options
        options["value_fn"] = value_fn
        return jaxdp.fit(plan, Keys.insecure(0), jnp.ones(D), DATA, **options)

    run(3)
    mode["train"] = True
    with pytest.raises(ValueError, match="not per record"):
        run(4)
    # The refused program is not that of a later run, in another mode.
    mode["train"] = False
    fresh = (
        jaxdp.lazy(lambda p, b: value_fn(p, b)) if lazy else lambda p, b: value_fn(p, b)
    )
    np.testing.assert_array_equal(run(4).params, run(4, fresh).params)
    # Nor is one that nobody checked.
    mode["train"] = True
    unchecked = run(5, check_isolation=False).params
    mode["train"] = False
    checked = run(5).params
    assert not np.array_equal(checked, unchecked)
    np.testing.assert_array_equal(checked, run(5, fresh).params)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("lazy", [False, True])
def test_what_jax_remembers_of_a_part_of_a_loss_is_not_taken(
    wrap: Any, lazy: bool
) -> None:
    """Neither by the program, traced at N records, nor by the check, traced at four."""

    class Net:
        train = False

        def __init__(self) -> None:
            self.block = wrap(self.norm)

        def norm(self, z: jax.Array) -> jax.Array:
            return z - z.mean(axis=0) if self.train else z

        def loss(self, p: jax.Array, batch: Any) -> jax.Array:
            return jnp.tanh(self.block(batch[0]) @ p)

    def run(net: Net) -> Any:
        loss = jaxdp.lazy(net.loss) if lazy else net.loss
        given = make_plan(num_steps=2), Keys.insecure(0), jnp.ones(D), DATA
        return jaxdp.fit(*given, value_fn=loss, optimizer=SGD).params

    net = Net()
    net.train = True  # Pretraining on as many public records.
    net.loss(jnp.ones(D), DATA)
    net.train = False
    np.testing.assert_array_equal(run(net), run(Net()))
    net = Net()
    net.loss(jnp.ones(D), (X[:4], Y[:4]))  # Evaluated on four.
    net.train = True
    with pytest.raises(ValueError, match="not per record"):
        run(net)


def test_parameters_that_are_data_of_a_program_are_checked_in_each_run() -> None:
    """A flag among frozen leaves, or a threshold, is in no program's key."""

    def loss(p: Any, batch: Any) -> jax.Array:
        z = batch[0] @ p["w"]
        return jnp.tanh(z - jnp.where(p["train"] | (p["w"].sum() > 50), z.mean(), 0))

    def run(size: float, train: bool) -> Any:
        params = {"w": jnp.full(D, size), "train": jnp.array(train)}
        given = make_plan(num_steps=2), Keys.insecure(0), params, DATA
        return jaxdp.fit(
            *given, value_fn=loss, optimizer=SGD, trainable=lambda path: path == "w"
        )

    run(1.0, False)
    for size, train in ((1.0, True), (100.0, False)):
        with pytest.raises(ValueError, match="not per record"):
            run(size, train)


@pytest.mark.parametrize("lazy", [False, True])
def test_frozen_floats_are_checked_as_they_are(lazy: bool) -> None:
    """A flag that is compared with 1 is another one where the check has moved it."""

    def value_fn(p: Any, batch: Any) -> jax.Array:
        z = batch[0] @ p["w"]
        return jnp.tanh(z - jnp.where(p["train"] == 1.0, z.mean(), 0))

    def run(train: float) -> Any:
        params = {"w": jnp.ones(D), "train": jnp.array(train)}
        loss = jaxdp.lazy(value_fn) if lazy else value_fn
        given = make_plan(num_steps=2), Keys.insecure(0), params, DATA
        return jaxdp.fit(
            *given, value_fn=loss, optimizer=SGD, trainable=lambda path: path == "w"
        )

    run(0.5)
    with pytest.raises(ValueError, match="not per record"):
        run(1.0)


def test_a_refused_program_is_not_kept() -> None:
    """Not even for a run that asks for no check."""
    mode = {"train": True}

    def loss(p: jax.Array, batch: Any) -> jax.Array:
        mean = batch[0].mean(axis=0) if mode["train"] else 0.0
        return jnp.tanh((batch[0] - mean) @ p)

    def run(value_fn: Any, check: bool) -> Any:
        given = make_plan(num_steps=2), Keys.insecure(0), jnp.ones(D), DATA
        options: dict[str, Any] = {"value_fn": value_fn, "check_isolation": check}
        return jaxdp.fit(*given, **options, optimizer=SGD).params

    with pytest.raises(ValueError, match="not per record"):
        run(loss, True)
    mode["train"] = False
    fresh = run(lambda p, batch: loss(p, batch), True)
    np.testing.assert_array_equal(run(loss, False), fresh)


def test_per_record_lifts_a_loss_of_one_record() -> None:
    loss = jaxdp.per_record(lambda p, record: jnp.sum(p * record[0]) + record[1])
    got = loss(jnp.ones(D), DATA)
    np.testing.assert_allclose(got, X.sum(axis=1) + Y, rtol=1e-5)


# What fit checks of a loss on made-up records.


def linear_loss(p: jax.Array, b: Any) -> jax.Array:
    return jnp.tanh(b[0] @ p)


def centred(p: jax.Array, b: Any) -> jax.Array:
    """Batch normalisation: no change at zero parameters shows it."""
    return jnp.tanh((b[0] - b[0].mean(axis=0)) @ p)


def largest(p: jax.Array, b: Any) -> jax.Array:
    return p[0] * jnp.max(b[0]) + 0 * b[0][:, 0]


def least(p: jax.Array, b: Any) -> jax.Array:
    return p[0] * jnp.min(b[0]) + 0 * b[0][:, 0]


def balanced(p: jax.Array, b: Any) -> jax.Array:
    """Classes weighted by how many of the batch have them."""
    return jnp.tanh(b[0] @ p) / (1 + jnp.sum(b[1][:, None] == b[1], axis=0))


def demeaned(p: jax.Array, b: Any) -> jax.Array:
    losses = jnp.tanh(b[0] @ p)
    return losses - losses.mean()


def lazily_centred(p: jax.Array, b: Any, at: Any) -> jax.Array:
    return centred(at("", p), b)


ACROSS = [
    *(centred, jaxdp.LazyLoss(lazily_centred)),
    *(
        pytest.param(loss, marks=pytest.mark.slow)
        for loss in (largest, least, balanced, demeaned)
    ),
]


@pytest.mark.parametrize("loss", ACROSS, ids=lambda f: getattr(f, "__name__", "lazy"))
def test_losses_across_records_are_refused_before_anything_is_spent(
    loss: Any, tmp_path: Path
) -> None:
    keys, start = Keys.from_entropy(), jnp.zeros(D)
    run = {"optimizer": SGD, "ledger": tmp_path / "run"}
    with pytest.raises(
        ValueError, match=r"value_fn is not per record.*check_isolation"
    ):
        jaxdp.fit(make_plan(num_steps=2), keys, start, DATA, value_fn=loss, **run)
    assert not (tmp_path / "run").exists()
    keys_lib.check_unspent(keys, "dpzero")


@pytest.mark.parametrize(
    "loss",
    [
        linear_loss,
        jaxdp.per_record(lambda p, record: jnp.tanh(record[0] @ p)),
        jaxdp.LazyLoss(lambda p, b, at: linear_loss(at("", p), b)),
        # Cannot take numbers below zero: the made-up record that has them is lost.
        lambda p, b: jnp.log(b[0]) @ p,
    ],
)
def test_losses_of_single_records_pass(loss: Any) -> None:
    data = (jnp.abs(X), Y)
    preparing.check_losses(make_plan(num_steps=2), jnp.zeros(D), data, loss, True)


def test_the_check_reads_shapes_alone_and_can_be_left_out() -> None:
    """What reaches the loss outside of the run has no number of the data."""
    seen: list[np.ndarray] = []

    def outside(x: np.ndarray) -> np.ndarray:
        seen.append(np.asarray(x))
        return np.sum(x, axis=-1)

    def loss(p: jax.Array, b: Any) -> jax.Array:
        shape = jax.ShapeDtypeStruct(b[0].shape[:1], b[0].dtype)
        return jax.pure_callback(outside, shape, b[0], vmap_method="expand_dims") + p[0]

    data = (jnp.full((N, D), 0.123456, jnp.float32), Y)
    plan = make_plan()
    preparing.check_losses(plan, jnp.zeros(D), data, loss, True)
    assert len(seen) == 5
    assert not any(np.any(x == np.float32(0.123456)) for x in seen)
    preparing.check_losses(plan, jnp.zeros(D), data, lambda p, b: loss(p, b), False)
    assert len(seen) == 5


def test_a_loss_that_made_up_records_break_names_the_flag() -> None:
    def strict(x: np.ndarray) -> np.ndarray:
        if len(x) < N:
            raise ValueError("rows are missing")
        return np.sum(x, axis=-1)

    def loss(p: jax.Array, b: Any) -> jax.Array:
        shape = jax.ShapeDtypeStruct(b[0].shape[:1], b[0].dtype)
        return jax.pure_callback(strict, shape, b[0], vmap_method="sequential") + p[0]

    plan, keys, start = make_plan(num_steps=1), Keys.from_entropy(), jnp.zeros(D)
    run: dict[str, Any] = {"value_fn": loss, "optimizer": SGD}
    with pytest.raises(ValueError, match=r"rows are missing.*check_isolation=False"):
        jaxdp.fit(plan, keys, start, DATA, **run)
    jaxdp.fit(plan, keys, start, DATA, check_isolation=False, **run)


def test_nothing_is_claimed_where_all_made_up_losses_are_nan() -> None:
    run: dict[str, Any] = {
        "value_fn": lambda p, b: jnp.log(-1 - jnp.abs(b[0])) @ p,
        "optimizer": SGD,
    }
    given = (make_plan(num_steps=2), Keys.insecure(0), jnp.zeros(D), DATA)
    with pytest.warns(UserWarning, match="NaN on all made-up records") as at:
        jaxdp.fit(*given, **run)
    assert [w.filename for w in at] == [__file__]
    jaxdp.fit(*given, check_isolation=False, **run)


def test_plans_that_read_each_record_alone_need_no_check() -> None:
    """They differentiate one record at a time: no other is there."""
    plan = plans.DPGD(
        num_examples=N,
        num_steps=2,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        noise_multiplier=2.0,
    )
    assert make_plan().evaluates_batches
    assert not plan.evaluates_batches
    start = jnp.zeros(D)
    jaxdp.fit(plan, Keys.insecure(0), start, DATA, value_fn=centred, optimizer=SGD)


@pytest.mark.parametrize(
    ("update", "match"),
    [
        (
            lambda u, s: ({"w": u["w"][None]}, s),
            r"updates of the shapes .*'w'.*\(1, 6\)",
        ),
        (lambda u, s: ({"v": u["w"]}, s), "updates of the shapes of the params"),
        (
            lambda u, s: (u, s + 0.5),
            "keep the shapes and dtypes of its state: .*float32",
        ),
    ],
    ids=["shape", "structure", "state"],
)
def test_an_optimizer_that_does_not_fit_is_told_so(update: Any, match: str) -> None:
    optimizer = optax.GradientTransformation(
        lambda _: 0, lambda u, s, p=None: update(u, s)
    )
    params, value_fn = {"w": jnp.zeros(D)}, lambda p, b: jnp.tanh(b[0] @ p["w"]) * b[1]
    with pytest.raises(ValueError, match=f"(?s)optimizer must .*{match}"):
        jaxdp.fit(
            *(make_plan(), Keys.insecure(0), params, DATA),
            value_fn=value_fn,
            optimizer=optimizer,
        )


def test_without_an_optimizer_nothing_climbs(tmp_path: Path) -> None:
    params, value_fn = network("linear")
    keys = Keys.from_entropy()
    with pytest.raises(ValueError, match="optimizer must be given for dpzero"):
        jaxdp.fit(
            make_plan(), keys, params, DATA, value_fn=value_fn, ledger=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
    keys_lib.check_unspent(keys, "dpzero")


@pytest.mark.parametrize(("platform", "count"), [("cpu", 1), ("cuda", 0), ("tpu", 0)])
def test_a_step_has_no_branch_on_an_accelerator(platform: str, count: int) -> None:
    """The host would read its predicate, and both of its sides would be copied."""
    params, value_fn = network("linear")
    plan = make_plan()
    maker = plan.transform(Keys.insecure(0))
    replay = plan.replay(Keys.insecure(0).direction, trainable=None, stacked=None)
    program = training.make_program(plan, maker, SGD, value_fn, replay)
    carry = training.start(plan, maker, SGD, params)
    traced = jax.jit(lambda c, k, d: program(c, k, d, 0, 3)).trace(
        carry, Keys.insecure(0), DATA
    )
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # A choice by platform alone has a constant for its predicate, and is no branch.
    predicate = r'-> tensor<i32>\n\s*%\S+ = "stablehlo.case"'
    branches = re.findall(rf"convert %\S+ : \(tensor<i1>\) {predicate}", text)
    assert len(branches) == count
    walls = text.count("stablehlo.optimization_barrier")
    assert platform == "cpu" or walls >= 2


@pytest.mark.parametrize("law", ["sphere", "rademacher"])
def test_wider_vectors_change_no_bit(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU has them: elsewhere both programs are one. (A loss of its own each.)"""
    params, value_fn = network("mlp")
    plan = make_plan(direction=law, num_steps=3)
    found, asked = [], loop.compiler_options("cpu")
    assert asked == {"xla_cpu_prefer_vector_width": 512}
    compile_with, used = jax.stages.Lowered.compile, []

    def spy(self: Any, compiler_options: Any = None) -> Any:
        used.append(compiler_options)
        return compile_with(self, compiler_options=compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    for options in (asked, {}):
        monkeypatch.setattr(
            loop, "compiler_options", lambda at, options=options: options
        )
        found.append(
            jaxdp.fit(
                plan,
                Keys.insecure(0),
                params,
                DATA,
                value_fn=lambda p, b: value_fn(p, b),
                optimizer=SGD,
                check_isolation=False,
            )
        )
    chex.assert_trees_all_equal(*((x.params, x.info) for x in found))
    assert used == [asked, {}]
    monkeypatch.undo()
    assert loop.compiler_options("gpu") == {}
    # Those of the run's device, whatever the default one is.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = jax.devices()[0]
    assert recording.machines(None, device)["compiler_options"] == asked
    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    few = make_plan(direction=law, num_steps=2)
    how = {"value_fn": value_fn, "optimizer": SGD, "check_isolation": False}
    jaxdp.fit(few, Keys.insecure(0), params, DATA, **how)
    assert used[2:] == [asked]


@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_data_are_there_once_and_nothing_is_compiled_between_chunks(kind: Any) -> None:
    """NumPy data are copied to the device once, JAX's not at all; no chunk compiles."""
    size = 4099  # Records, of which no other array has so many.
    plan = make_plan(num_examples=size, num_steps=5, sampling=POISSON)
    data = kind(np.linspace(-1, 1, size, dtype=np.float32))
    compiled: list[str] = []
    copies: list[int] = []
    seen: list[int] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def look(*_: Any) -> None:
        found = [x for x in jax.live_arrays() if x.shape == (size,)]
        copies.append(len({x.unsafe_buffer_pointer() for x in found}))
        seen.append(len(compiled))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jaxdp.fit(
            plan,
            Keys.insecure(0),
            jnp.zeros(()),
            data,
            value_fn=lambda w, x: (w - x) ** 2,
            optimizer=SGD,
            chunk=1,
            callback=look,
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert copies == [1] * 5
    assert seen[0] > 0
    assert (
        seen[1:] == [seen[1]] * 4
    )  # What a callback is shown was compiled for the first.
