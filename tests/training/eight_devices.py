"""What holds on eight devices. ``tests/training/test_parallel.py`` runs this file.

In a process of its own, for JAX asks how many devices there are once: with
``XLA_FLAGS=--xla_force_host_platform_device_count=8``.
"""

import contextlib
import dataclasses
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxdp
from jaxdp import Keys, plans, sampling, training
from jaxdp.core.types import Grid
from jaxdp.kernels import finite_difference, sphere, stretch
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.models import language
from jaxdp.models.language import tasks
from jaxdp.sosp import hessian
from jaxdp.sosp.gradients import Records
from jaxdp.training import loop, parallel
from tests import methods, test_finetune
from tests.sosp import test_fit as search
from tests.test_cli import run
from tests.test_finetune import home as home
from tests.training import kills
from tests.training.problem import DATA, PARAMS, D, N, make_plan, value_fn
from tests.training.two_processes import all_reduces, source

MESH = jax.make_mesh((8,), ("data",))
GRID = jax.make_mesh((2, 4), ("rows", "columns"))
EVERYWHERE = PartitionSpec()
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
STEPS = 6
# A record of NaN and one of infinities: they count zero, wherever they are evaluated.
BROKEN = (DATA[0].at[3].set(jnp.nan).at[20].set(jnp.inf), DATA[1])

LAYERS = {
    "in": jnp.cos(jnp.arange(D * 6.0)).reshape(D, 6),
    "layers": {"w": jnp.sin(jnp.arange(72.0)).reshape(2, 6, 6)},
    "out": jnp.linspace(-1, 1, 6),
}


def layered(params: Any, batch: Any, at: Any) -> jax.Array:
    """Two layers in a scan, each perturbed where it is used."""
    x, y = batch

    def layer(h: jax.Array, slot: Any) -> tuple[jax.Array, None]:
        index, w = slot
        return h + jnp.tanh(h @ at("layers/w", w, layer=index, after=h)), None

    h = jnp.tanh(x @ at("in", params["in"]))
    h, _ = jax.lax.scan(layer, h, (jnp.arange(2), params["layers"]["w"]))
    z = h @ at("out", params["out"])
    return jnp.logaddexp(0, z) - y * z


LAZY: dict[str, Any] = {
    "value_fn": jaxdp.LazyLoss(layered),
    "stacked": lambda path: path.startswith("layers"),
}


def plan_of(**changes: Any) -> Any:
    return make_plan(**{"num_steps": STEPS} | changes)


def dpgd_plan() -> plans.DPGD:
    plan = plan_of(sampling=POISSON)
    names = {field.name for field in dataclasses.fields(plans.DPGD)}
    return plans.DPGD(**{name: getattr(plan, name) for name in names})


def fit(plan: Any, params: Any = PARAMS, data: Any = DATA, **kwargs: Any) -> Any:
    args = {"value_fn": value_fn, "optimizer": OPTIMIZER} | kwargs
    return jaxdp.fit(plan, Keys.insecure(1), params, data, **args)


def assert_replicas_agree(tree: Any, devices: int = 8) -> None:
    for leaf in jax.tree.leaves(tree):
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(copies) == devices
        assert len(set(copies)) == 1


POISSON = sampling.TruncatedPoisson(sampling_prob=0.5)
TUNED = plans.ClipTuning(
    target_unclipped_quantile=0.5, learning_rate=0.2, count_noise_multiplier=8.0
)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    # 24 records in slices of 3, one for each device; on one device, a loop over eight
    "full": (plan_of(), {"data": BROKEN}),
    # 5 slices for 8 devices, the last of them short
    "poisson": (
        plan_of(sampling=POISSON, num_directions=4, direction="gaussian"),
        {"data": BROKEN, "microbatch_size": 5},
    ),
    # 13 records do not divide: slices of 2, the last device idle
    "fixed": (
        plan_of(sampling=sampling.FixedSize(13), direction="gaussian"),
        LAZY | {"params": LAYERS, "mesh": GRID},
    ),
    "lazy": (
        plan_of(num_directions=4, direction="rademacher"),
        LAZY | {"params": LAYERS, "microbatch_size": 2},
    ),
    # one slice: every device evaluates it, and it counts once
    "tuned": (
        plan_of(num_directions=2, clip_tuning=TUNED),
        {"data": BROKEN, "microbatch_size": 24},
    ),
    "dpgd": (dpgd_plan(), {"data": BROKEN, "microbatch_size": 4}),
    "dpgd-tuned": (
        dataclasses.replace(dpgd_plan(), clip_tuning=TUNED),
        {"data": BROKEN, "microbatch_size": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_of_one_device(name: str) -> None:
    plan, options = CASES[name]
    options = {"mesh": MESH} | options
    mesh = options.pop("mesh")
    many = fit(plan, **options, mesh=mesh)
    rows = plan.sampling.rows(N)
    one = fit(plan, **{"microbatch_size": -(-rows // 8)} | options)
    chex.assert_trees_all_equal(many.params, one.params)
    chex.assert_trees_all_equal(many.info, one.info)
    assert_replicas_agree((many.params, many.info))
    assert np.all(np.isfinite(many.info.releases))
    timing = {"compile_seconds", "train_seconds", "steps_per_second"}
    for field in many.report.keys() - timing:
        assert many.report[field] == one.report[field], field


def mesh_of(**shape: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(shape.values())]
    return jax.make_mesh(tuple(shape.values()), tuple(shape), devices=devices)


def baseline_plan() -> plans.DPGDZerothOrder:
    plan = plan_of()
    names = {field.name for field in dataclasses.fields(plans.DPGDZerothOrder)}
    same = names - {"noise"}
    return plans.DPGDZerothOrder(**{name: getattr(plan, name) for name in same})


MODEL = language.LanguageModel(
    config=language.OPTConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        ffn_dim=32,
    )
)


def model_task() -> dict[str, Any]:
    """A language model whose layers are perturbed in its scan."""
    numbers = np.arange(N * 6).reshape(N, 6)
    return {
        "params": MODEL.init(jax.random.key(0)),
        "data": {
            "tokens": (numbers * 7 % 20 + 4).astype(np.int32),
            "mask": np.ones(numbers.shape, bool),
            "position": np.arange(N, dtype=np.int32) % 6,
            "label": np.arange(N, dtype=np.int32) % 2,
        },
        "value_fn": tasks.prompt(MODEL, (4, 5)).value_fn,
        "stacked": MODEL.is_stacked,
        "microbatch_size": 6,
    }


SIGNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (plan_of(num_steps=5), {"data": BROKEN}),
    "bfloat16": (
        plan_of(num_steps=2),
        {"params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)},
    ),
    **{name: CASES[name] for name in ("poisson", "lazy", "tuned")},
    "baseline": (baseline_plan(), {"data": BROKEN, "microbatch_size": 5}),
    "model": (plan_of(num_steps=2, num_directions=2), {}),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [("full", {"signs": 2}), *((name, {"signs": 2, "data": 2}) for name in SIGNS)],
)
def test_signs_on_two_devices(
    name: str, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases what one device does that takes the signs one after the other.

    (Small models take both at once, in one product: it may round otherwise.)
    """
    monkeypatch.setattr(finite_difference, "_SMALL", 0)
    plan, options = SIGNS[name]
    plan = dataclasses.replace(plan, delta=2e-5)  # No program of another test.
    options = options or model_task()
    options = {"microbatch_size": N} | options
    many = fit(plan, **options, mesh=mesh_of(**shape))
    one = fit(plan, **options)
    chex.assert_trees_all_equal(many.info, one.info)
    chex.assert_trees_all_equal(many.params, one.params)
    assert_replicas_agree((many.params, many.info), math.prod(shape.values()))
    assert np.all(np.isfinite(many.info.releases))


PAIRS = [(1, 1), (np.inf, np.inf), (np.inf, -np.inf), (np.inf, 1), (np.nan, 1)]
PAIRS += [(1, np.inf), (1, np.nan)]


@pytest.mark.parametrize("pair", PAIRS)
def test_signs_give_the_difference(pair: tuple[float, float]) -> None:
    """NaN and infinite losses included."""
    rows = sphere.directions(jax.random.key(0), jnp.zeros(1), law="rademacher")
    up = float(sphere.materialise(sphere.select(rows, 0), jnp.zeros(1))[0])

    def losses(x: jax.Array, batch: Any) -> jax.Array:
        return jnp.where(x[0] * up > 0, *pair) + 0.3 * batch

    def table(share: bool) -> Any:
        return finite_difference.slopes(
            losses,
            jnp.zeros(1),
            jnp.arange(3.0),
            rows,
            smoothing_radius=0.1,
            share_signs=share,
        )

    shared = jax.shard_map(
        lambda: table(True), mesh=mesh_of(signs=2), in_specs=(), out_specs=EVERYWHERE
    )
    with jax.numpy_dtype_promotion("strict"):
        many = jax.jit(shared)()
    np.testing.assert_array_equal(many, jax.jit(lambda: table(False))())


def test_signs_are_refused_where_there_are_none() -> None:
    signs = mesh_of(signs=2, data=2)

    def never(params: Any, batch: Any) -> jax.Array:
        raise AssertionError("the loss was traced")

    for plan, mesh, said in (
        (plan_of(), mesh_of(signs=4), "mesh must have 2 devices along 'signs'"),
        (plan_of(), mesh_of(signs=1), "got 1: records are shared along axes of other"),
        (plan_of(smoothing_radius=0), signs, "mesh must have no axis 'signs' where"),
        (dpgd_plan(), signs, "mesh must have no axis 'signs' for dpgd"),
    ):
        with pytest.raises(ValueError, match=said):
            fit(plan, mesh=mesh, value_fn=never)
    plan = dataclasses.replace(dpgd_plan(), sampling=sampling.FullBatch())
    maker = plan.transform(Keys.insecure(1), axis_name=("signs", "data"))

    def step(state: Any, data: Any) -> Any:
        return maker.update(None, state, PARAMS, value_fn=value_fn, batch=data)

    specs = {"in_specs": EVERYWHERE, "out_specs": EVERYWHERE}
    shared: Any = jax.shard_map(step, mesh=signs, **specs)
    with pytest.raises(ValueError, match="axis_name must not be 'signs' here"):
        jax.eval_shape(shared, maker.init(PARAMS), DATA)
    for twice in ("signs", "signs"), ("data", "data"):
        with pytest.raises(ValueError, match="axis_name must name each axis once"):
            finite_difference.axes_of(twice)


def test_a_record_moves_the_sum_as_far_as_on_one_device() -> None:
    """At most by the sensitivity, whichever it is; the noise is the same."""
    plan = CASES["full"][0]

    def first_sum(data: Any) -> np.ndarray:
        return plan.normalizer * np.asarray(fit(plan, data=data, mesh=MESH).info[0][0])

    before = first_sum(DATA)
    moved = []
    for index in range(0, N, 5):
        sign = np.sign(DATA[0][index, 0])
        other = (DATA[0].at[index].multiply(-sign * 1e6), DATA[1].at[index].add(1e6))
        moved.append(np.linalg.norm(first_sum(other) - before))
    assert max(moved) <= plan.sensitivity * (1 + 1e-5)
    assert max(moved) > plan.l2_clip_norm / 2  # The replaced records were read.


def test_floats_of_the_non_private_limit_agree_on_all_devices() -> None:
    plan = plan_of(l2_clip_norm=float("inf"), noise_multiplier=0.0, delta=None)
    many, one = fit(plan, mesh=MESH), fit(plan)
    assert_replicas_agree((many.params, many.info))
    chex.assert_trees_all_close(many.params, one.params, rtol=1e-4)
    with pytest.raises(
        ValueError, match="mesh must be given where params are on several"
    ):
        fit(plan, params=many.params)


def test_donated_params_are_those_of_the_mesh() -> None:
    """On every device in place; what would be copied there first is refused."""
    plan, params = plan_of(), jax.tree.map(jnp.array, PARAMS)
    with pytest.raises(ValueError, match="where the run needs it on NamedSharding"):
        fit(plan, params=params, mesh=MESH, donate_params=True)
    place = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())
    spread = jax.tree.map(jnp.array, jax.device_put(params, place))
    got = fit(plan, params=spread, mesh=MESH, donate_params=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(spread))
    want = fit(plan, mesh=MESH)
    chex.assert_trees_all_equal((got.params, got.info), (want.params, want.info))
    other = params | {"out": jax.device_put(params["out"], jax.devices()[3])}
    with pytest.raises(ValueError, match="where the run needs it on SingleDevice"):
        fit(plan, params=other, donate_params=True)
    got = fit(plan, params=jax.device_put(other, jax.devices()[3]), donate_params=True)
    chex.assert_trees_all_equal(got.params, fit(plan).params)


@pytest.mark.parametrize("which", ["params", "one leaf", "data", "both"])
def test_a_run_is_where_its_arguments_are(which: str, tmp_path: Path) -> None:
    """To the bits of the default device, on which it may be resumed."""
    plan, device = plan_of(), jax.devices()[1]
    one, given = fit(plan), {"params": PARAMS, "data": DATA}
    if which == "one leaf":
        out = jax.device_put(PARAMS["out"], device)
        given["params"] = PARAMS | {"out": out}
    for name in {"both": given}.get(which, {which} & given.keys()):
        given[name] = jax.device_put(given[name], device)
    with kills.killed(4):
        fit(plan, ledger=tmp_path / "run", chunk=2, **given)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    task = {"value_fn": value_fn, "optimizer": OPTIMIZER}
    runs = [fit(plan, **given)]
    runs += [
        jaxdp.resume(tmp_path / "run", **given, **task) for _ in ("goes on", "over")
    ]
    for got in runs:
        assert all(leaf.device == device for leaf in jax.tree.leaves(got.params))
        # What is computed from them stays there, as another run does.
        assert all(leaf.committed for leaf in jax.tree.leaves(got.params))
        chex.assert_trees_all_equal((got.params, got.info), (one.params, one.info))
    again = jaxdp.resume(tmp_path / "copy", PARAMS, DATA, **task)
    chex.assert_trees_all_equal(again.params, one.params)


def test_arguments_on_other_devices_than_each_other_are_refused(tmp_path: Path) -> None:
    """Before keys are spent, or a budget is."""
    plan, keys = plan_of(), Keys.from_entropy()
    here, there = (jax.device_put(PARAMS, device) for device in jax.devices()[:2])
    data = jax.device_put(DATA, jax.devices()[0])
    everywhere = jax.device_put(DATA, jax.sharding.NamedSharding(MESH, EVERYWHERE))
    budget = jaxdp.Budget.create(
        tmp_path / "budget", epsilon=1e3, delta=1e-3, relation="replace_one"
    )
    task: dict[str, Any] = {"value_fn": value_fn, "optimizer": OPTIMIZER}
    with kills.killed(4):
        fit(plan, ledger=tmp_path / "run", chunk=2)
    for params, records, said in (
        (there, data, "data must be on .*1, where leaves of params are, got .* '0' on"),
        (here | {"out": there["out"]}, DATA, "params must be on .* the leaf 'out' on"),
        (
            PARAMS,
            everywhere,
            "mesh must be given where data are on several .* leaf '0'",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            jaxdp.fit(plan, keys, params, records, budget=budget, **task)
        with pytest.raises(ValueError, match=said):
            jaxdp.resume(tmp_path / "run", params, records, **task)
    assert not budget.reservations
    jaxdp.fit(plan, keys, PARAMS, DATA, **task)


def test_one_integer_a_direction_is_all_that_devices_exchange() -> None:
    """In the program of the loop, which holds the step once, in its body."""
    plan = plan_of(sampling=POISSON, num_directions=4)
    maker = plan.transform(Keys.insecure(0), axis_name=("data",))
    again = plan.replay(Keys.insecure(0).direction)
    program = training.make_program(plan, maker, OPTIMIZER, value_fn, again)
    carry = training.start(plan, maker, OPTIMIZER, PARAMS)
    step = jnp.int32(0)
    given = (carry, Keys.insecure(0), DATA, step, step)
    text = parallel.lowered(MESH, program, *given).compile().as_text()
    assert all_reduces(text) == ["s32[4] all-reduce"]


def signs_program(plan: Any, mesh: jax.sharding.Mesh, **options: Any) -> Any:
    """Lowers the loop on a mesh that shares the signs."""
    maker = plan.transform(Keys.insecure(0), axis_name=mesh.axis_names, **options)
    again = plan.replay(Keys.insecure(0).direction)
    program = training.make_program(plan, maker, OPTIMIZER, value_fn, again)
    carry = training.start(plan, maker, OPTIMIZER, PARAMS)
    step = jnp.int32(0)
    return parallel.lowered(mesh, program, carry, Keys.insecure(0), DATA, step, step)


def test_signs_exchange_one_float_a_slope() -> None:
    """Of a device's records, B / 4 here, along K directions."""
    plan, mesh = plan_of(num_directions=3), mesh_of(signs=2, data=4)
    text = signs_program(plan, mesh).compile().as_text()
    assert sorted(all_reduces(text)) == ["f32[6,3] all-reduce", "s32[3] all-reduce"]


def test_signs_on_two_devices_lower_for_accelerators() -> None:
    plan, mesh = plan_of(num_directions=3), mesh_of(signs=2, data=4)
    tx = plan.transform(Keys.insecure(0), axis_name=mesh.axis_names)
    state = tx.init(PARAMS)

    def step(params: Any, data: Any) -> Any:
        made, after = tx.update(None, state, params, value_fn=value_fn, batch=data)
        return made, after.release

    specs = {"in_specs": EVERYWHERE, "out_specs": EVERYWHERE}
    shared = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    exported = jax.export.export(shared, platforms=("cuda", "rocm", "tpu"))(
        PARAMS, DATA
    )
    assert exported.nr_devices == 8
    assert exported.mlir_module().count("stablehlo.all_reduce") == 2


def test_every_record_counts_once() -> None:
    """Whatever the rows, the slice and the devices; and masked ones do not."""

    def counts(rows: int, size: int | None) -> np.ndarray:
        def total(part: Any) -> jax.Array:
            index, kept = part
            return jnp.where(kept[:, None], jax.nn.one_hot(index, rows), 0).sum(axis=0)

        def shared(batch: Any) -> jax.Array:
            return finite_difference.sum_microbatches(total, batch, size, "data")

        batch = (jnp.arange(rows), jnp.arange(rows) != 2)
        run = jax.shard_map(
            shared, mesh=MESH, in_specs=EVERYWHERE, out_specs=EVERYWHERE
        )
        return np.asarray(jax.jit(run)(parallel.on_all(MESH, batch)))

    for rows, size in [(1, None), (7, 3), (9, None), (17, 2), (24, 24), (24, 30)]:
        want = (np.arange(rows) != 2).astype(np.float32)
        np.testing.assert_array_equal(
            counts(rows, size), want, err_msg=f"{rows} {size}"
        )


# --- loops written by hand -----------------------------------------------------------


def penalised(params: Any, batch: Any) -> jax.Array:
    """The loss and its squared gradient: a loss that differentiates by the params."""

    def one(params: Any, record: Any) -> jax.Array:
        return value_fn(params, jax.tree.map(lambda x: x[None], record))[0]

    gradients = jax.vmap(jax.grad(one), (None, 0))(params, batch)
    squares = jax.vmap(lambda g: optax.tree.norm(g, squared=True))(gradients)
    return value_fn(params, batch) + squares


def by_hand(plan: Any, data: Any, mesh: Any = MESH, **options: Any) -> Any:
    """A step in a ``shard_map`` that checks that what it gives is the same everywhere."""
    names = mesh.axis_names
    tx = plan.transform(Keys.insecure(1), axis_name=names, microbatch_size=3)
    specs = {"in_specs": EVERYWHERE, "out_specs": EVERYWHERE} | options

    @jax.jit
    @lambda step: jax.shard_map(step, mesh=mesh, **specs)
    def step(params: Any, state: Any, batch: Any) -> Any:
        return tx.update(None, state, params, value_fn=penalised, batch=batch)

    args = parallel.on_all(mesh, (PARAMS, tx.init(PARAMS)))
    return step(*args, data)


def assert_by_hand_as_on_one_device(plan: Any, mesh: jax.sharding.Mesh) -> None:
    got, state = by_hand(plan, parallel.on_all(mesh, BROKEN), mesh)
    tx = plan.transform(Keys.insecure(1), microbatch_size=3)

    @jax.jit
    def update(state: Any, params: Any) -> Any:
        return tx.update(None, state, params, value_fn=penalised, batch=BROKEN)

    want, alone = update(tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(got, want)
    np.testing.assert_array_equal(state.release, alone.release)
    assert_replicas_agree((got, state.release), mesh.size)


@pytest.mark.parametrize("family", [plans.DPZero, plans.DPGD])
def test_a_loop_by_hand(family: Any) -> None:
    """Derivatives are by each device's own records: not summed over all of them."""
    plan: Any = plan_of()
    if family is plans.DPGD:
        plan = dataclasses.replace(dpgd_plan(), sampling=sampling.FullBatch())
    assert_by_hand_as_on_one_device(plan, MESH)


@pytest.mark.parametrize("shape", [{"signs": 2}, {"signs": 2, "data": 4}], ids=str)
def test_signs_of_a_loop_by_hand(
    shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Derivatives within a loss are by each device's own losses here, too."""
    monkeypatch.setattr(finite_difference, "_SMALL", 0)
    assert_by_hand_as_on_one_device(plan_of(num_directions=2), mesh_of(**shape))


BALL = {"oracle": "first_order", "direction": "ball", "difference": "common"}
SCALED = {"scale_with_movement": True, "direction": "sphere"}
SLOPES = {
    "oracle": "scalar",
    "share_directions": True,
    "sampling": sampling.MultiPassRestarts(period=1),
}


def oracle_plan(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": 2,
        "sampling": sampling.MultiPassRestarts(period=2),
        "relation": "replace_one",
        "restart_l2_clip_norm": 2.0,
        "l2_clip_norm": 2.0,
        "smoothing_radius": 0.1,
        "max_step": 0.1,
        "window": 2,
        "num_directions": 2,
        "prefix_noise": "independent",
        "noise_multiplier": 1.0,
    }
    return plans.O2NC(**base | changes)


@pytest.mark.parametrize("size", [3, N], ids=["slices", "one slice"])
@pytest.mark.parametrize("changes", [SCALED, BALL, SLOPES])
def test_an_oracle_by_hand(changes: dict[str, Any], size: int) -> None:
    """A restart and, where there are any, a difference: the bits of one device."""
    plan, keys, x = oracle_plan(**changes), Keys.insecure(1), jnp.ones(D)

    def losses(x: jax.Array, batch: Any) -> jax.Array:
        return jnp.abs(batch[0] @ x - batch[1])

    def steps(axis: str | None) -> Any:
        tx = jaxdp.private_oracle(plan, keys, axis_name=axis, microbatch_size=size)

        def run(x: jax.Array, data: Any) -> Any:
            state, releases = tx.init(x), []
            for t, phase in enumerate(plan.phases):
                batch = sampling.batch(plan, keys, t, data, phase=phase.name)
                given = {"value_fn": losses, "batch": batch, "phase": phase.name}
                gradient, state = tx.update(None, state, x, **given)
                x = x - 0.01 * gradient
                releases.append(state.release)
            return x, releases

        return run

    specs = {"in_specs": EVERYWHERE, "out_specs": EVERYWHERE}
    shared = jax.jit(jax.shard_map(steps("data"), mesh=MESH, **specs))
    traced = shared.lower(*parallel.on_all(MESH, (x, BROKEN)))
    if size == N:
        return  # What may differ from device to device is known, and checked.
    many = traced.compile()(*parallel.on_all(MESH, (x, BROKEN)))
    one = jax.jit(steps(None))(x, BROKEN)
    chex.assert_trees_all_equal(many, one)
    assert_replicas_agree(many)
    assert np.all(np.isfinite(many[1]))


def test_parts_of_a_batch_are_refused() -> None:
    parts = jax.device_put(DATA, jax.NamedSharding(MESH, PartitionSpec("data")))
    specs = (EVERYWHERE, EVERYWHERE, PartitionSpec("data"))
    with pytest.raises(ValueError, match="batch must be the same on every device"):
        by_hand(plan_of(), parts, in_specs=specs)


# --- algorithms ----------------------------------------------------------------------


def test_every_record_of_a_stretch_counts_once() -> None:
    """Wherever it begins and ends: the words of one device, low and high."""
    rows = jnp.sin(jnp.arange(46.0) ** 2).reshape(23, 2).at[7].set(jnp.nan)

    def total(axis: str | None) -> Any:
        def summed(first: jax.Array, count: jax.Array) -> stretch.Wide:
            given = (lambda x: 9 * x, 2, rows, None, first, count)
            how: dict[str, Any] = {"bound": 1.0, "bits": 16, "size": 2}
            return stretch.grid_sum(*given, **how, axis_name=axis)

        return summed

    specs = {"in_specs": EVERYWHERE, "out_specs": EVERYWHERE}
    shared = jax.jit(jax.shard_map(total("data"), mesh=MESH, **specs))
    alone = jax.jit(total(None))
    for first, count in ((0, 23), (0, 0), (3, 1), (5, 17), (4, 16), (22, 1), (6, 9)):
        place = jnp.int32(first), jnp.int32(count)
        many, one = shared(*place), alone(*place)
        chex.assert_trees_all_equal(many, one)
        assert_replicas_agree(many)
    assert np.all(np.abs(stretch.to_float(one)) > 0)


MATRICES: dict[str, Any] = {"dim": search.D, "hessian_lipschitz": 1.3}
#: Changes of a plan, and how many numbers each of its queries sums.
SEARCHES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "on_demand": ({}, [3, 3, 3]),
    "tracked": ({"hessian": "tracked", **MATRICES}, [3, 3, 9, 9]),
    "released": (
        {"hessian": "released", "curvature_threshold": 0.3, "escape_steps": 1}
        | MATRICES,
        [3, 3, 6],
    ),
}


def search_plan(mode: str) -> plans.SOSP:
    """Has a smoothness that is no power of two, by which a quotient is rounded."""
    changes = {"smoothness": 1.3, **SEARCHES[mode][0]}
    return dataclasses.replace(search.PLAN, **changes)


@pytest.mark.parametrize("mode", SEARCHES)
def test_a_search_on_eight_devices(mode: str, tmp_path: Path) -> None:
    """Killed on its way and resumed: the bits of one device, integers exchanged."""
    data = search.DATA.copy()
    data[[3, 610, 2001]] = np.array([np.nan, np.inf, np.nan])[:, None]
    plan, keys, task = search_plan(mode), Keys.insecure(1), (search.START, data)
    # The 600 records of a refresh are 19 slices for 8 devices.
    how: dict[str, Any] = {"value_fn": search.loss, "microbatch_size": 32}
    folder = tmp_path / "run"
    with kills.killed(3):
        jaxdp.fit(plan, keys, *task, **how, mesh=MESH, ledger=folder, chunk=2)
    program = next(reversed(loop._programs.values())).program  # That fit compiled last.
    many = jaxdp.resume(folder, *task, **how, mesh=MESH)
    one = jaxdp.fit(plan, keys, *task, **how)
    chex.assert_trees_all_equal(many.params, one.params)
    chex.assert_trees_all_equal(many.info, one.info)
    assert_replicas_agree((many.params, many.info))
    assert np.all(np.isfinite(many.info.releases))
    assert many.report["outcome"] == one.report["outcome"]
    assert one.report["outcome"]["escapes"] >= 1
    # No record, and no float of any device.
    sums = (f"s32[{size}]" for size in SEARCHES[mode][1])
    wanted = [f"({part}, {part}) all-reduce" for part in sums]
    assert all_reduces(program.as_text()) == wanted


@pytest.mark.parametrize("mode", SEARCHES)
def test_a_search_by_hand_sums_integers_alone(mode: str) -> None:
    """Derivatives are by each device's own records, wherever a shard_map looks at them.

    A refresh, a difference and the mode's Hessians are summed, two words each.
    """
    algorithm = search_plan(mode).algorithm(Keys.insecure(1), axis_name="data")

    def step(state: Any, data: Any) -> Any:
        return algorithm.step(state, data, value_fn=search.loss)

    specs = {"in_specs": EVERYWHERE, "out_specs": EVERYWHERE}
    shared: Any = jax.shard_map(step, mesh=MESH, **specs)
    text = str(jax.make_jaxpr(shared)(algorithm.init(search.START), search.DATA))
    found = re.findall(r":(\w+)\[(\d*)\] = psum", text)
    assert sorted(found) == sorted(("i32", str(size)) for size in 2 * SEARCHES[mode][1])


def test_a_released_matrix_is_rounded_as_on_one_device() -> None:
    """Its floats too, of a constant that a program on a mesh keeps out of a branch."""
    dim, noise = 30, Fixed(7919 * jnp.arange(465, dtype=jnp.int32))
    rows = jnp.sin(jnp.arange(24.0 * dim) ** 2).reshape(24, dim)

    def released(axis: str | None) -> Any:
        def matrix(point: jax.Array, count: jax.Array) -> jax.Array:
            records = Records(rows, None, jnp.int32(0), count, 2, axis)
            grid, loss = Grid(1.0, 16, 24.0, 1), lambda w, x: jnp.tanh(w @ x)

            def look() -> jax.Array:
                return hessian.release_matrix(grid, loss, point, records, noise)

            return jax.lax.cond(count > 0, look, lambda: jnp.zeros((dim, dim)))

        return matrix

    specs = {"in_specs": EVERYWHERE, "out_specs": EVERYWHERE}
    shared = jax.shard_map(released("data"), mesh=MESH, **specs)
    given = jnp.linspace(-1, 1, dim), jnp.int32(24)
    np.testing.assert_array_equal(
        jax.jit(shared)(*given), jax.jit(released(None))(*given)
    )


@pytest.mark.parametrize("method", methods.SADDLES[:-1], ids=str)
def test_a_game_by_hand(method: methods.Method) -> None:
    """Scores, which are secret, and all else: the bits of one device."""
    data = jax.tree.map(lambda x: jnp.asarray(x).at[1].set(jnp.nan), method.data)
    plan = method.plan

    def two(axis: str | None) -> Any:
        how: dict[str, Any] = {"microbatch_size": 1, "axis_name": axis}
        algorithm = plan.algorithm(Keys.insecure(1), **how)

        def steps(state: Any, data: Any) -> Any:
            def one(state: Any, _: None) -> Any:
                return algorithm.step(state, data, value_fn=method.value_fn)

            return jax.lax.scan(one, state, length=2)

        return algorithm.init(plan.uniform()), steps

    start, steps = two("data")
    specs = {"in_specs": EVERYWHERE, "out_specs": EVERYWHERE}
    shared = jax.jit(jax.shard_map(steps, mesh=MESH, **specs))
    many = shared(*parallel.on_all(MESH, (start, data)))
    start, steps = two(None)
    one = jax.jit(steps)(start, data)
    chex.assert_trees_all_equal(many, one)


@pytest.mark.parametrize("name", ["sosp", *(m.name for m in methods.SADDLES[:-1])])
def test_records_of_a_device_s_own_are_refused_by_hand(name: str) -> None:
    """Each device would take its part of other data; a record of two would count twice."""
    if name == "sosp":
        plan, start, data, loss = search.PLAN, search.START, search.DATA, search.loss
    else:
        (m,) = (m for m in methods.SADDLES if m.name == name)
        plan, start, data, loss = m.plan, m.plan.uniform(), m.data, m.value_fn
    algorithm = plan.algorithm(Keys.insecure(1), axis_name="data")
    specs = {"in_specs": (EVERYWHERE, PartitionSpec("data")), "out_specs": EVERYWHERE}
    shared = jax.shard_map(
        lambda state, own: algorithm.step(state, own, value_fn=loss), mesh=MESH, **specs
    )
    every = jax.tree.map(lambda x: jnp.concatenate([jnp.asarray(x)] * 8), data)
    parts = jax.device_put(every, jax.NamedSharding(MESH, PartitionSpec("data")))
    with pytest.raises(ValueError, match="data must be the same on every device"):
        jax.eval_shape(shared, algorithm.init(start), parts)


def test_a_game_on_eight_devices() -> None:
    plan, how = methods.SADDLES[0].plan, {"value_fn": methods.GAME}
    task = (Keys.insecure(1), plan.uniform(), methods.SADDLES[0].data)
    many = jaxdp.fit(plan, *task, **how, microbatch_size=2, mesh=MESH)
    program = next(reversed(loop._programs.values())).program
    one = jaxdp.fit(plan, *task, **how, microbatch_size=2)
    chex.assert_trees_all_equal((many.params, many.info), (one.params, one.info))
    assert_replicas_agree((many.params, many.info))
    both = sum(plan.dims)
    assert all_reduces(program.as_text()) == [f"s32[{both}] all-reduce"]


def test_descent_ascent_on_eight_devices() -> None:
    plan = plans.DPGD(**methods.COMMON | {"num_examples": methods.N})
    start = tuple(jnp.full(methods.D, 1 / methods.D) for _ in range(2))
    task = (Keys.insecure(1), start, methods.SADDLES[0].data)
    step = jaxdp.descent_ascent(0.3, 0.2)
    how: dict[str, Any] = {"value_fn": methods.GAME, "optimizer": step}
    many = jaxdp.fit(plan, *task, **how, microbatch_size=1, mesh=MESH)
    one = jaxdp.fit(plan, *task, **how, microbatch_size=1)
    chex.assert_trees_all_equal((many.params, many.info), (one.params, one.info))
    assert_replicas_agree((many.params, many.info))


def test_algorithms_are_refused_where_they_cannot_be() -> None:
    """Before anything is traced or spent."""

    def never(*given: Any) -> jax.Array:
        raise AssertionError("the loss was traced")

    synthetic = methods.SADDLES[-1]
    split = jax.device_put(jnp.ones(8), jax.NamedSharding(MESH, PartitionSpec("data")))
    signs, game = mesh_of(signs=2, data=2), methods.SADDLES[0]
    scores = jax.device_put(
        game.plan.uniform(), jax.NamedSharding(GRID, PartitionSpec("columns"))
    )
    for plan, params, data, mesh, said in (
        (search.PLAN, split, search.DATA, MESH, "params must be whole on every device"),
        (game.plan, scores, game.data, GRID, "whole on every device for saddle, got"),
        (search.PLAN, search.START, search.DATA, signs, "mesh must have no axis 'sig"),
        (synthetic.plan, synthetic.params, synthetic.data, MESH, "mesh must be None"),
    ):
        with pytest.raises(ValueError, match=said):
            jaxdp.fit(plan, Keys.insecure(1), params, data, value_fn=never, mesh=mesh)
    with pytest.raises(ValueError, match="axis_name must not be 'signs' here"):
        search.PLAN.algorithm(Keys.insecure(1), axis_name="signs")
    for kinds, several in ((["old", "new"], False), (["old", "old"], True)):
        devices = np.array([SimpleNamespace(device_kind=kind) for kind in kinds])
        other: Any = SimpleNamespace(devices=devices, is_multi_process=several)
        with pytest.raises(
            ValueError, match="mesh must have devices of one kind in on"
        ):
            parallel.check_algorithm(other, search.PLAN, search.START)


# --- the record ----------------------------------------------------------------------


def test_a_recorded_run_is_resumed_and_replayed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    seen: list[Any] = []
    plan = plan_of(sampling=POISSON, num_directions=2, direction="gaussian")
    run = {"mesh": MESH, "microbatch_size": 5}
    whole = fit(plan, ledger=folder, chunk=2, callback=lambda *x: seen.append(x), **run)
    chex.assert_trees_all_equal(seen[-1][1], whole.params)
    chex.assert_trees_all_equal(
        jaxdp.replay(folder, PARAMS, optimizer=OPTIMIZER).params, whole.params
    )
    # Killed in the second chunk.
    folder = tmp_path / "killed"
    with kills.killed(4):
        fit(plan, ledger=folder, chunk=2, **run)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    given = {"value_fn": value_fn, "optimizer": OPTIMIZER}
    again = jaxdp.resume(folder, PARAMS, DATA, **given, **run)
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)
    assert_replicas_agree(again.params)
    with pytest.raises(ValueError, match="devices is 1 and was 8"):
        jaxdp.resume(copy, PARAMS, DATA, **given, microbatch_size=5)


@pytest.mark.parametrize("mesh", [None, MESH])
def test_an_explicit_mesh_that_is_set_is_refused(mesh: Any, tmp_path: Path) -> None:
    """Before keys are spent, and with a way out; one of the type Auto changes nothing."""
    plan, keys = plan_of(), Keys.from_entropy()
    task = {"value_fn": value_fn, "optimizer": OPTIMIZER}
    scored = {"value_fn": value_fn, "score_fn": lambda result: 0.0}
    given = keys, PARAMS, DATA
    fit(plan, ledger=tmp_path, mesh=mesh)
    calls = (
        lambda: jaxdp.fit(plan, keys, PARAMS, DATA, mesh=mesh, **task),
        lambda: jaxdp.resume(tmp_path, PARAMS, DATA, mesh=mesh, **task),
        lambda: jaxdp.replay(tmp_path, PARAMS, optimizer=OPTIMIZER),
        lambda: jaxdp.study(plan, PARAMS, DATA, optimizer=lambda: OPTIMIZER, **scored),
        lambda: jaxdp.tune([(plan, OPTIMIZER)], *given, mean_trials=2.0, **scored),
    )
    want = fit(plan, mesh=mesh)
    with jax.set_mesh(MESH):
        for call in calls:
            with pytest.raises(
                ValueError, match=r"explicit mesh \{'data': 8\} of jax.set"
            ):
                call()
        with jax.set_mesh(None):  # pyright: ignore[reportArgumentType]
            got = fit(plan, mesh=mesh)
            jaxdp.fit(
                plan, keys, PARAMS, DATA, mesh=mesh, **task
            )  # They are not spent.
    chex.assert_trees_all_equal(got.params, want.params)
    automatic = jax.sharding.AxisType.Auto
    if mesh is not None:
        with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(automatic,))):
            got = fit(plan, mesh=mesh)
        chex.assert_trees_all_equal(got.params, want.params)


def test_a_source_gives_the_bits_of_arrays() -> None:
    plan = plan_of(sampling=POISSON)
    run = {"mesh": MESH, "microbatch_size": 2, "chunk": 4}
    whole, again = (fit(plan, data=data, **run) for data in (DATA, source()))
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)
    assert_replicas_agree(again.params)


def test_signs_are_part_of_what_is_resumed(tmp_path: Path) -> None:
    plan, folder = plan_of(), tmp_path / "run"
    run = {"mesh": mesh_of(signs=2, data=2), "microbatch_size": 6}
    whole = fit(plan, ledger=folder, chunk=2, **run)
    chex.assert_trees_all_equal(
        jaxdp.replay(folder, PARAMS, optimizer=OPTIMIZER).params, whole.params
    )
    folder = tmp_path / "killed"
    with kills.killed(4):
        fit(plan, ledger=folder, chunk=2, **run)
    given = {"value_fn": value_fn, "optimizer": OPTIMIZER, "microbatch_size": 6}
    with pytest.raises(ValueError, match=r"mesh is \{'data': 4\} and was \{'signs'"):
        jaxdp.resume(folder, PARAMS, DATA, mesh=mesh_of(data=4), **given)
    again = jaxdp.resume(folder, PARAMS, DATA, mesh=run["mesh"], **given)
    chex.assert_trees_all_equal(again.info, whole.info)
    chex.assert_trees_all_equal(again.params, whole.params)


# --- sharded parameters --------------------------------------------------------------

TWO_BY_FOUR = jax.make_mesh(
    (2, 4), ("data", "model")
)  # Explicit axes, as JAX makes them.
WIDTH = 32
SPECS = {
    "in": PartitionSpec(None, "model"),
    "layers": {"w": PartitionSpec(None, None, "model")},
    "out": PartitionSpec("model"),
}
WIDE = {
    "in": jnp.cos(jnp.arange(D * 1.0 * WIDTH)).reshape(D, WIDTH) / 3,
    "layers": {"w": jnp.sin(jnp.arange(2.0 * WIDTH**2)).reshape(2, WIDTH, WIDTH) / 6},
    "out": jnp.linspace(-1, 1, WIDTH),
}
SHARDED: dict[str, Any] = LAZY | {"mesh": TWO_BY_FOUR, "microbatch_size": 6}


def sharded(params: Any = WIDE, specs: Any = SPECS, mesh: Any = TWO_BY_FOUR) -> Any:
    places = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    return jax.device_put(params, places)


def bytes_of_each_device(tree: Any) -> set[int]:
    shards = [
        part for leaf in jax.tree.leaves(tree) for part in leaf.addressable_shards
    ]
    devices = {part.device for part in shards}
    assert len(devices) == 8
    return {sum(p.data.nbytes for p in shards if p.device == d) for d in devices}


@pytest.mark.parametrize("law", ["sphere", "gaussian", "rademacher"])
def test_sharded_params_release_what_whole_ones_do(law: Any) -> None:
    """Up to the order of the losses' own sums; and no device has more than its quarter.

    A loss of 1 rounds by 2^-24, and a slope divides that by twice the radius: by 3e-6. The
    releases are means over 24 records of about 20 such roundings at most.
    """
    plan, params = plan_of(num_steps=3, direction=law), sharded()
    many = fit(plan, params=params, **SHARDED)
    one = fit(plan, params=WIDE, **SHARDED | {"mesh": None})
    chex.assert_trees_all_close(many.info, one.info, atol=6e-5)
    chex.assert_trees_all_close(many.params, one.params, atol=6e-5)
    assert_replicas_agree(many.info.releases)
    quarter = sum(leaf.nbytes for leaf in jax.tree.leaves(WIDE)) // 4
    assert bytes_of_each_device(many.params) == {quarter}
    assert bytes_of_each_device(many.info.state[0].trace) == {quarter}
    for leaf, given in zip(*map(jax.tree.leaves, (many.params, params)), strict=True):
        assert leaf.sharding.spec == given.sharding.spec


THREE_AXES = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
LINES = {
    "in": (jnp.cos(jnp.arange(D * 8.0)).reshape(D, 8), (None, "tensor")),
    "middle": (jnp.sin(jnp.arange(64.0)).reshape(8, 8), ("fsdp", "tensor")),
    "out": (jnp.linspace(-1, 1, 8), (("fsdp", "tensor"),)),
}


def three_lines(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    z = jnp.tanh(jnp.tanh(x @ params["in"]) @ params["middle"]) @ params["out"]
    return jnp.logaddexp(0, z) - y * z


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        (dpgd_plan(), OPTIMIZER),
        (baseline_plan(), OPTIMIZER),
        (oracle_plan(**BALL, learning_rate=0.1), None),
        (oracle_plan(**SLOPES, learning_rate=0.1), None),
    ],
    ids=["dpgd", "dpgd_zeroth_order", "first-order", "scalar"],
)
def test_sharded_params_on_three_axes(plan: Any, optimizer: Any) -> None:
    """Records along one, a matrix over the two others: what one device does.

    Up to the order of sums. A sum of a few terms of about 1 is off by 1e-6 at most, and a
    slope divides losses by twice the radius: by 0.02 at least.
    """
    start = {name: leaf for name, (leaf, _) in LINES.items()}
    specs = {name: PartitionSpec(*of) for name, (_, of) in LINES.items()}
    task = {"value_fn": three_lines, "optimizer": optimizer, "microbatch_size": 6}
    params = sharded(start, specs, THREE_AXES)
    said: Any = contextlib.nullcontext([])
    if rows := getattr(plan, "direction", "") == "orthonormal":
        said = pytest.warns(UserWarning, match=r"2 x 128 .*'sphere' are made where")
    with said as at:
        many = fit(plan, params=params, mesh=THREE_AXES, **task)
    assert [w.filename for w in at] == [__file__] * rows
    one = fit(plan, params=start, **task)
    chex.assert_trees_all_close(many.params, one.params, rtol=0, atol=5e-5)
    chex.assert_trees_all_close(many.info, one.info, rtol=0, atol=5e-5)
    for name, leaf in many.params.items():
        assert leaf.sharding.spec == specs[name]
        assert np.max(np.abs(leaf - start[name])) > 1e-3  # It has moved.
    parts = (
        start["in"].nbytes // 2,
        start["middle"].nbytes // 4,
        start["out"].nbytes // 4,
    )
    assert bytes_of_each_device(many.params) == {sum(parts)}
    assert_replicas_agree(many.info.releases)
    if plan.sampling == POISSON:
        again = fit(plan, params=params, data=source(), mesh=THREE_AXES, **task)
        chex.assert_trees_all_equal(
            (again.params, again.info), (many.params, many.info)
        )
        assert bytes_of_each_device(again.params) == {sum(parts)}


def test_sharded_params_are_trained_from_a_source() -> None:
    """To the bit as on arrays: blocks are whole on every device, parameters are not."""
    plan, params = plan_of(sampling=POISSON, direction="gaussian"), sharded()
    whole, again = (
        fit(plan, params=params, data=data, chunk=4, **SHARDED)
        for data in (DATA, source())
    )
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)
    assert bytes_of_each_device(again.params) == bytes_of_each_device(params)
    assert np.unique(again.info.releases).size == STEPS


@pytest.mark.parametrize(
    ("start", "step"), [(jnp.zeros(64), 2**-4), (jnp.ones(64, jnp.bfloat16), 2**-10)]
)
def test_sharded_params_of_exact_losses_release_the_same_bits(
    start: jax.Array, step: float
) -> None:
    """Small multiples of powers of two, whose sums are exact in any order.

    On a mesh whose axes are all the model's, too: there all devices read all records.
    Steps of an eighth of a spacing of 16 bits are rounded at random, as on one device.
    """
    x = jnp.round(4 * jnp.sin(jnp.arange(N * 64.0))).reshape(N, 64)
    plan = plan_of(num_steps=4, direction="rademacher", smoothing_radius=2.0**-4)

    def sign(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda u: -jnp.sign(u) * step, updates)

    given = {"value_fn": lambda w, x: (x @ w) ** 2 / 64, "microbatch_size": 6}
    given |= {"optimizer": optax.stateless(sign), "data": x}
    one = fit(plan, params=start, **given)
    assert np.unique(one.info.releases).size == 4
    assert one.params.dtype == start.dtype and np.unique(one.params).size > 2
    all_model = jax.make_mesh((2, 4), ("tensor", "model"))
    for mesh, spec, parts in (
        (TWO_BY_FOUR, PartitionSpec("model"), 4),
        (all_model, PartitionSpec(("tensor", "model")), 8),
    ):
        params = sharded(start, spec, mesh)
        many = fit(plan, params=params, mesh=mesh, donate_params=True, **given)
        chex.assert_trees_all_equal(many.info, one.info)
        chex.assert_trees_all_equal(many.params, one.params)
        assert bytes_of_each_device(many.params) == {start.nbytes // parts}


def test_sharded_params_are_never_gathered() -> None:
    """In the program of the loop, which holds the step once, in its body.

    Beside one integer a direction, devices exchange what the losses' own products need: a
    layer's activations of a slice at both signs, and its losses. Of an activation that a
    perturbation waits for they exchange one word.
    """
    plan = plan_of(direction="gaussian")
    mesh, params = parallel.check_mesh(TWO_BY_FOUR, sharded())
    options = {"microbatch_size": 6, "stacked": LAZY["stacked"]}
    maker = plan.transform(Keys.insecure(0), axis_name=("data",), **options)
    again = plan.replay(Keys.insecure(0).direction, stacked=LAZY["stacked"])
    program = training.make_program(plan, maker, OPTIMIZER, LAZY["value_fn"], again)
    carry, step = training.start(plan, maker, OPTIMIZER, params), jnp.int32(0)
    given = (carry, Keys.insecure(0), DATA, step, step)
    made = parallel.lowered(mesh, program, *given).compile()
    found = sorted(all_reduces(made.as_text()))
    words, activations = "u32[2,1,1]", f"f32[2,6,{WIDTH}] all-gather"
    losses = ["f32[2,6] all-reduce", "s32[1] all-reduce"]
    assert found == [f"({words}, {words}) all-reduce", activations, *losses]
    # Arguments: a quarter of the parameters and of their momentum, data and little else.
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(WIDE))
    data = sum(leaf.nbytes for leaf in DATA)
    assert made.memory_analysis().argument_size_in_bytes < 2 * size / 4 + data + 200


BROAD = 256
BROAD_PARAMS = {
    "in": jnp.cos(jnp.arange(D * 1.0 * BROAD)).reshape(D, BROAD) / 3,
    "middle": jnp.sin(jnp.arange(1.0 * BROAD**2)).reshape(BROAD, BROAD) / BROAD,
    "bias": jnp.zeros(BROAD),
    "out": jnp.linspace(-1, 1, BROAD) / BROAD,
}
BROAD_SPECS = {
    "in": PartitionSpec(None, "model"),
    "middle": PartitionSpec(None, "model"),
    "bias": PartitionSpec(),
    "out": PartitionSpec("model"),
}


def broad(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    hidden = jnp.tanh(x @ params["in"]) @ params["middle"] + params["bias"]
    z = jnp.tanh(hidden) @ params["out"]
    return jnp.logaddexp(0, z) - y * z


@pytest.mark.parametrize(
    ("plan", "optimizer", "arguments", "temporaries"),
    [
        (dpgd_plan(), OPTIMIZER, 2, 5),
        (oracle_plan(**BALL, learning_rate=0.1), None, 6, 20),
        (oracle_plan(**SLOPES, direction="sphere", learning_rate=0.1), None, 6, 14),
    ],
    ids=["dpgd", "first-order", "scalar"],
)
def test_sharded_vectors_are_never_gathered(
    plan: Any, optimizer: Any, arguments: float, temporaries: float
) -> None:
    """Gradients, their sums, noise and the state stay where the parameters are.

    What devices exchange of floats is as long as a layer's activations or shorter; of
    integers between groups each device's own part of the sum. The bounds are in shares of
    a device, a quarter of the parameters each: nothing but the 2^16 lanes of a norm, which
    count here, is whole.
    """
    mesh, params = parallel.check_mesh(
        TWO_BY_FOUR, sharded(BROAD_PARAMS, BROAD_SPECS, TWO_BY_FOUR)
    )
    places = jax.tree.map(lambda x: x.sharding, params)
    maker = plan.transform(
        Keys.insecure(0), axis_name=("data",), microbatch_size=1, shardings=places
    )
    optimizer = optax.identity() if optimizer is None else optimizer
    program = training.make_program(plan, maker, optimizer, broad, None)
    carry, step = training.start(plan, maker, optimizer, params), jnp.int32(0)
    given = (carry, Keys.insecure(0), DATA, step, step)
    made = parallel.lowered(mesh, program, *given).compile()
    share = sum(leaf.nbytes for leaf in jax.tree.leaves(BROAD_PARAMS)) / 4
    for found in all_reduces(made.as_text()):
        floats = re.findall(r"f32\[([\d,]*)\]", found)
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in floats]
        assert max(sizes, default=0) <= 4 * BROAD, found  # Two directions, two signs.
        assert "all-to-all" not in found
        integers = re.findall(r"s32\[([\d,]*)\]", found)
        sizes = [
            math.prod(map(int, filter(None, dims.split(",")))) for dims in integers
        ]
        assert sum(sizes) * 4 <= share * 1.02, found
    memory = made.memory_analysis()
    assert memory.argument_size_in_bytes < (arguments + 0.2) * share
    assert memory.temp_size_in_bytes < temporaries * share


@pytest.mark.parametrize("family", [plans.DPZero, plans.DPGD, plans.O2NC])
def test_sharded_params_of_a_loop_by_hand(family: Any) -> None:
    """Explicit axes are refused before keys are spent, Auto ones work."""
    plan: Any = plan_of(sampling=sampling.FullBatch())
    if family is plans.DPGD:
        plan = dataclasses.replace(dpgd_plan(), sampling=sampling.FullBatch())
    elif family is plans.O2NC:
        plan = oracle_plan(**BALL, learning_rate=0.1)
    params = {"w": jnp.cos(jnp.arange(D * 8.0)).reshape(D, 8)}
    specs = {"w": PartitionSpec(None, "model")}

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.tanh(batch[0] @ params["w"]).sum(axis=1)

    batch: Any = DATA
    given: dict[str, Any] = {"value_fn": loss}
    if family is plans.O2NC:
        given["phase"] = "restart"
        batch = sampling.batch(plan, Keys.insecure(1), 0, DATA, phase="restart")
    step = jax.jit(lambda s, p: tx.update(None, s, p, batch=batch, **given)[0])
    split, options = sharded(params, specs), {"microbatch_size": 6}
    if family is not plans.DPZero:
        options["shardings"] = jax.tree.map(lambda x: x.sharding, split)
    tx = plan.transform(Keys.insecure(1), **options)
    with pytest.raises(ValueError, match=r"axes of the type Auto, got 'w' of the type"):
        tx.init(split)
    auto = jax.sharding.Mesh(TWO_BY_FOUR.devices, TWO_BY_FOUR.axis_names)
    split = sharded(params, specs, auto)
    many, one = (step(tx.init(p), p) for p in (split, params))
    chex.assert_trees_all_close(many, one, atol=1e-5)


@pytest.mark.parametrize("name", ["dpzero", "dpgd", "o2nc"])
@pytest.mark.parametrize("axis_name", ["data", None])
def test_parts_of_parameters_that_a_shard_map_splits_are_refused(
    name: str, axis_name: Any
) -> None:
    """Each device would clip its part alone, and all would draw the same noise."""
    full = sampling.FullBatch()
    plan: Any = {
        "dpzero": plan_of(sampling=full),
        "dpgd": dataclasses.replace(dpgd_plan(), sampling=full),
        "o2nc": oracle_plan(**BALL, learning_rate=0.1),
    }[name]
    auto = jax.sharding.Mesh(TWO_BY_FOUR.devices, TWO_BY_FOUR.axis_names)
    specs = {"w": PartitionSpec(None, "model")}
    params = sharded({"w": jnp.ones((D, 8))}, specs, auto)
    keys, options = Keys.insecure(1), {"microbatch_size": N, "axis_name": axis_name}

    def loss(params: Any, batch: Any) -> jax.Array:
        return (batch[0] @ params["w"]).sum(axis=1)

    def update(tx: Any, checked: bool) -> None:
        phase = {"phase": "restart"} if name == "o2nc" else {}
        batch = sampling.batch(plan, keys, 0, DATA, **phase)
        state = tx.init(params)

        def step(params: Any) -> Any:
            given = {"value_fn": loss, "batch": batch} | phase
            return tx.update(None, state, params, **given)[0]

        how: Any = {"in_specs": (specs,), "out_specs": specs, "check_vma": checked}
        jax.eval_shape(jax.shard_map(step, mesh=auto, **how), params)

    # (JAX itself refuses the running mean of an oracle's directions.)
    said = "devices along 'model' have sums of their own|manual axis types do not match"
    with pytest.raises((ValueError, TypeError), match=said):
        update(plan.transform(keys, **options), checked=True)
    if name != "dpzero":
        shardings = jax.tree.map(lambda x: x.sharding, params)
        tx = plan.transform(keys, **options, shardings=shardings)
        for checked in (True, False):
            with pytest.raises(
                ValueError, match="shardings must not split the leaf 'w'"
            ):
                update(tx, checked)


def test_sums_of_devices_with_one_noise_are_refused() -> None:
    """Whatever they come from: updates, a loss's own arrays, a noise that is no key's."""
    split, keys = PartitionSpec("data"), Keys.insecure(1)
    auto = jax.sharding.Mesh(MESH.devices, MESH.axis_names)
    specs: dict[str, Any] = {"mesh": auto, "in_specs": split, "out_specs": split}
    said = pytest.raises(
        ValueError, match="devices along 'data' have sums of their own"
    )
    sums: Any = plans.PrefixSum(
        num_examples=N,
        num_steps=2,
        sampling=sampling.SinglePass(4),
        relation="replace_one",
        l2_clip_norm=1.0,
        noise_multiplier=2.0,
    )
    tx = jaxdp.private_prefix_sum(sums, keys)
    state, batch = tx.init(jnp.zeros(1)), sampling.batch(sums, keys, 0, DATA)

    def mean(x: jax.Array) -> Any:
        return tx.update(jnp.tile(x, (4, 1)), state, batch=batch)[0]

    with said:
        jax.eval_shape(jax.shard_map(mean, **specs), jnp.ones(8))
    full = plan_of(sampling=sampling.FullBatch())
    for law in ("discrete", "laplace"):
        plan = dataclasses.replace(full, noise=law)
        own = plan.transform(keys)
        begun: Any = own.init(PARAMS)

        def step(x: jax.Array, own: Any = own, begun: Any = begun) -> jax.Array:
            index = jax.lax.axis_index("data").astype(jnp.uint32)
            direction = jaxdp.kernels.threefry.fold_in(begun.direction, index)
            given = {"batch": DATA, "value_fn": lambda p, b: value_fn(p, b) * x[0]}
            state = begun._replace(direction=direction)
            return own.update(None, state, PARAMS, **given)[1].release

        with said:
            jax.eval_shape(jax.shard_map(step, **specs), jnp.ones(8))


def test_a_sum_that_devices_share_needs_no_whole_params() -> None:
    """Frozen leaves that a shard_map splits, in a loss that adds over the devices."""
    plan: Any = dataclasses.replace(dpgd_plan(), sampling=sampling.FullBatch())
    specs = {"frozen": PartitionSpec("data"), "w": EVERYWHERE}
    params = whole = {"frozen": jnp.arange(8.0), "w": jnp.ones(D)}
    tx = plan.transform(Keys.insecure(1), trainable=lambda path: path == "w")
    auto = jax.sharding.Mesh(MESH.devices, MESH.axis_names)
    places = {name: jax.NamedSharding(auto, spec) for name, spec in specs.items()}
    named = plan.transform(
        Keys.insecure(1), trainable=lambda path: path == "w", shardings=places
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        total = params["frozen"].sum()
        if jax.sharding.get_abstract_mesh().manual_axes:
            total = jax.lax.psum(total, "data")
        return batch[0] @ params["w"] * total / 9

    def step(params: Any, tx: Any) -> jax.Array:
        given = {"value_fn": loss, "batch": DATA}
        return tx.update(None, tx.init(whole), params, **given)[0]["w"]

    one = step(params, tx)
    for each in (tx, named):
        shared = jax.shard_map(
            lambda p, each=each: step(p, each),
            mesh=auto,
            in_specs=(specs,),
            out_specs=EVERYWHERE,
        )
        chex.assert_trees_all_close(jax.jit(shared)(params), one, rtol=1e-5)


def test_runs_with_keys_of_their_own_are_apart_on_devices() -> None:
    """Each device has its own noise, params and state."""
    plan: Any = dataclasses.replace(dpgd_plan(), sampling=sampling.FullBatch())
    tx = plan.transform(Keys.insecure(1))

    def step(params: Any, state: Any) -> Any:
        of = jax.lax.axis_index("data").astype(jnp.uint32)
        own = state._replace(noise=jaxdp.kernels.threefry.fold_in(state.noise, of))
        given = {"value_fn": value_fn, "batch": DATA}
        params = jax.lax.pcast(params, "data", to="varying")
        out = tx.update(None, own, params, **given)[0]
        return jax.tree.map(lambda x: x[None], out)

    specs: Any = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec("data")}
    many = jax.jit(jax.shard_map(step, mesh=MESH, **specs))(PARAMS, tx.init(PARAMS))
    rows = np.asarray(jax.tree.leaves(many)[0])
    assert len({row.tobytes() for row in rows}) == 8


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [(TWO_BY_FOUR, "model"), (THREE_AXES, ("fsdp", "tensor"))],
    ids=["one axis", "two axes"],
)
def test_sharded_language_models_have_rules(mesh: Any, axis: Any) -> None:
    """Large leaves are split, none along its layers, and what does not divide is named."""
    params = jax.eval_shape(MODEL.init, jax.random.key(0))
    places = language.shardings(params, mesh, axis=axis)
    pairs = zip(*map(jax.tree.leaves_with_path, (params, places)), strict=True)
    for (path, leaf), (_, place) in pairs:
        part = math.prod(place.shard_shape(leaf.shape))
        large = leaf.ndim > 1 and not jax.tree_util.keystr(path).endswith("['bias']")
        large = large and "norm" not in jax.tree_util.keystr(path)
        assert part * (4 if large else 1) == leaf.size
        if MODEL.is_stacked(sphere.path_str(path)) and large:
            assert place.spec[0] is None


@pytest.mark.parametrize("shape", [(2, 4), (1, 4)], ids=str)
def test_sharded_language_models_are_trained_by_gradients(shape: Any) -> None:
    """All parameters, beside records that devices share, and where one has them all.

    A gradient of a layer is off by some 1e-6 of the clip, in its last bit of the grid too.
    """
    mesh = jax.make_mesh(
        shape, ("data", "model"), devices=jax.devices()[: math.prod(shape)]
    )
    task = model_task()
    del task["stacked"]
    plan = dataclasses.replace(dpgd_plan(), num_steps=2)
    places = language.shardings(task["params"], mesh)
    split = task | {"params": jax.device_put(task["params"], places), "mesh": mesh}
    many, one = (fit(plan, **given) for given in (split, task))
    chex.assert_trees_all_close(many.params, one.params, rtol=0, atol=5e-5)
    moved = jax.tree.map(
        lambda x, y: jnp.max(jnp.abs(x - y)), one.params, task["params"]
    )
    assert min(jax.tree.leaves(moved)) > 1e-3
    for leaf, place in zip(*map(jax.tree.leaves, (many.params, places)), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


def test_sharded_language_models_of_other_sizes_are_refused() -> None:
    params = jax.eval_shape(MODEL.init, jax.random.key(0))
    for axis, said in (
        ("rows", "axis must be of the mesh"),
        ("model", "the leaf 'embed"),
    ):
        mesh = jax.make_mesh((1, 3), ("data", "model"), devices=jax.devices()[:3])
        with pytest.raises(ValueError, match=said):
            language.shardings(params, mesh, axis=axis)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_runs_are_resumed_and_replayed(tmp_path: Path, dtype: Any) -> None:
    start = jax.tree.map(lambda x: x.astype(dtype), WIDE)
    plan, params = plan_of(direction="gaussian"), sharded(start)
    seen: list[Any] = []
    whole = fit(
        plan,
        params=params,
        ledger=tmp_path / "run",
        chunk=2,
        # One program takes them all, those that are split and those that are not.
        callback=lambda step, params, info: seen.append(jax.jit(lambda p: p)(params)),
        **SHARDED,
    )
    assert seen[0]["out"].sharding.spec == SPECS["out"]
    chex.assert_trees_all_equal(seen[-1], whole.params)
    again = jaxdp.replay(tmp_path / "run", params, optimizer=OPTIMIZER)
    chex.assert_trees_all_equal(again.params, whole.params)
    assert bytes_of_each_device(again.params) == bytes_of_each_device(params)
    with kills.killed(4):  # In the second chunk.
        fit(plan, params=params, ledger=tmp_path / "killed", chunk=2, **SHARDED)
    shutil.copytree(tmp_path / "killed", tmp_path / "copy")
    given = {name: SHARDED[name] for name in ("value_fn", "mesh", "microbatch_size")}
    given |= {"optimizer": OPTIMIZER}
    again = jaxdp.resume(tmp_path / "killed", params, DATA, **given)
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)
    specs = SPECS | {"layers": {"w": PartitionSpec(None, "model")}}
    with pytest.raises(ValueError, match=r"sharding is .*layers/w.* and was \{'in'"):
        jaxdp.resume(tmp_path / "copy", sharded(start, specs), DATA, **given)
    with pytest.raises(ValueError, match=r"sharding is None and was \{'in'"):
        jaxdp.resume(tmp_path / "copy", start, DATA, **given)


@pytest.mark.parametrize("prefix_noise", ["tree", "honaker"])
def test_sharded_noise_is_carried_and_resumed(
    tmp_path: Path, prefix_noise: Any
) -> None:
    """What an oracle carries lies where its parameters do, in a checkpoint's copy, too."""
    plan = oracle_plan(
        sampling=sampling.SinglePassRestarts(period=4, restart_batch_size=6),
        num_steps=4,
        prefix_noise=prefix_noise,
        learning_rate=0.1,
        noise_multiplier=3.0,
        **SCALED | {"scale_with_movement": False},
    )
    task: dict[str, Any] = {"value_fn": broad, "optimizer": None, "microbatch_size": 6}
    split = {"params": sharded(BROAD_PARAMS, BROAD_SPECS), "mesh": TWO_BY_FOUR}
    one = fit(plan, params=BROAD_PARAMS, **task)
    many = fit(plan, **split, ledger=tmp_path / "whole", chunk=1, **task)
    chex.assert_trees_all_close(many.params, one.params, rtol=0, atol=5e-5)
    mesh, params = parallel.check_mesh(TWO_BY_FOUR, split["params"])
    assert mesh is not None
    places = jax.tree.map(lambda x: x.sharding, params)
    state = plan.transform(Keys.insecure(1), shardings=places).init(params)
    carried = parallel.shardings(mesh, params, state).oracle
    for tree in (carried.estimate.apart, carried.noise.state.apart):
        assert all(place.spec[-1] == "model" for place in jax.tree.leaves(tree))
        assert len(jax.tree.leaves(tree)) >= 3
    with kills.killed(3):
        fit(plan, **split, ledger=tmp_path / "killed", chunk=1, **task)
    again = jaxdp.resume(
        tmp_path / "killed", split["params"], DATA, mesh=TWO_BY_FOUR, **task
    )
    chex.assert_trees_all_equal(again.params, many.params)


def test_sharded_params_are_refused_where_they_cannot_be() -> None:
    """Before anything is compiled or spent."""

    def never(params: Any, batch: Any) -> jax.Array:
        raise AssertionError("the loss was traced")

    along = sharded(specs=SPECS | {"layers": {"w": PartitionSpec("data")}})
    signs = mesh_of(signs=2, data=4)
    on_signs = sharded(jnp.zeros(4), PartitionSpec("signs"), signs)
    four = jax.device_put({"w": jnp.zeros(4, jnp.int4)}, jax.devices()[0])
    for params, mesh, said in (
        (four, None, "8 bits or more on a mesh of CPUs.*got int4 for the leaf 'w'"),
        (four, TWO_BY_FOUR, "got int4 for the leaf 'w': JAX's compiled programs"),
        (sharded(), None, "mesh must be given .* the leaf 'in' on NamedSharding"),
        (sharded(), GRID, r"params must be on the mesh \{'rows': 2.*the leaf 'in' on"),
        (along, TWO_BY_FOUR, "must not be split along the layers .* got 'layers/w'"),
        (on_signs, signs, "params must not be split along 'signs'"),
    ):
        given = {"mesh": mesh, "value_fn": never, "stacked": LAZY["stacked"]}
        with pytest.raises(ValueError, match=said):
            fit(plan_of(), params=params, **given)


def test_sharded_models_are_tuned_from_the_command_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Split by --mesh, a model ends where the whole one does; its run is replayed."""
    public = ("--eval", home / "eval.jsonl", "--seed", 1, "--direction", "sphere")
    given = ("--model", home / "roberta", "--train", home / "train.jsonl", *public)
    words = ("finetune", *given, *test_finetune.QUICK, *test_finetune.PROMPT)
    ends = {}
    for name, mesh in (("whole", ()), ("split", ("--mesh", "data=2,model=2"))):
        out = tmp_path / name
        assert run(*words, "--out", out, *mesh) == 0
        _, params = language.checkpoint.load(out / "model")
        ends[name] = jax.tree.map(np.asarray, params)
    chex.assert_trees_all_close(*ends.values(), atol=1e-5)
    assert run("replay", tmp_path / "split", "--json") == 0
    assert "identical to model" in capsys.readouterr().out
    assert run(*words, "--out", tmp_path / "none", "--mesh", "data=2,model=3") == 2
    assert "--mesh: params must have axes that 3 devices" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
