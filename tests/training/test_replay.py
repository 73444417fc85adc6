"""From initial parameters and a ledger to the parameters of the run, to the bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.core import keys
from jaxdp.kernels import sphere
from jaxdp.training import ledger
from jaxdp.training.loop import FitInfo
from tests.training.problem import DATA, PARAMS, make_plan, value_fn

TUNING = plans.ClipTuning(
    target_unclipped_quantile=0.5, learning_rate=0.2, count_noise_multiplier=4.0
)
OPTIMIZERS = {
    "plain": optax.sgd(0.1),
    # Two products in one sum, which may be contracted either way.
    "average": optax.chain(optax.ema(0.9, debias=False), optax.sgd(0.1)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.01),
}
LAWS = [
    *(("sphere", 1), ("gaussian", 1), ("rademacher", 1), ("orthonormal", 3)),
    *(("sphere", 2), ("gaussian", 3), ("rademacher", 4)),
]


def run(folder: Path, plan: Any, **kwargs: Any) -> jaxdp.FitResult:
    args: dict[str, Any] = {"value_fn": value_fn, "optimizer": OPTIMIZERS["plain"]}
    keys = Keys.insecure(1)
    return jaxdp.fit(plan, keys, PARAMS, DATA, ledger=folder, **(args | kwargs))


@pytest.mark.parametrize(
    ("law", "num", "optimizer"),
    [
        # One and several directions, a chain and an optimizer of two states.
        ("rademacher", 4, "adam"),
        # One law with all optimizers, one optimizer with all laws, and several directions.
        *(
            pytest.param(law, num, name, marks=pytest.mark.slow)
            for law, num, name in (
                *(("gaussian", 1, "plain"), ("orthonormal", 3, "momentum")),
                ("sphere", 1, "average"),
                *((law, num, "average") for law, num in LAWS[1:4]),
                *(("sphere", 1, name) for name in OPTIMIZERS if name != "average"),
                *((law, num, "adam") for law, num in LAWS[4:6]),
            )
        ),
    ],
)
def test_replay_is_bit_exact(
    law: str, num: int, optimizer: str, tmp_path: Path
) -> None:
    plan = make_plan(direction=law, num_directions=num)
    chosen = OPTIMIZERS[optimizer]
    result = run(tmp_path / "run", plan, optimizer=chosen, chunk=5)
    again = jaxdp.replay(tmp_path / "run", PARAMS, optimizer=chosen)
    chex.assert_trees_all_equal(again.params, result.params)
    chex.assert_trees_all_equal(again.info, result.info)
    assert not np.array_equal(result.params["out"], PARAMS["out"])


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": sampling.TruncatedPoisson(sampling_prob=0.4)},
        pytest.param({"noise": "laplace"}, marks=pytest.mark.slow),
        pytest.param({"output": "random"}, marks=pytest.mark.slow),
        # With one direction in dpzero/test_clip_tuning.py.
        pytest.param(
            {"clip_tuning": TUNING, "num_directions": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"smoothing_radius": 0.0}, marks=pytest.mark.slow),
        pytest.param(
            {"noise_multiplier": 0.0, "l2_clip_norm": float("inf")},
            marks=pytest.mark.slow,
        ),
    ],
    ids=repr,
)
def test_replay_of_other_plans(changes: Any, tmp_path: Path) -> None:
    result = run(tmp_path / "run", make_plan(**changes), chunk=6)
    again = jaxdp.replay(tmp_path / "run", PARAMS, optimizer=OPTIMIZERS["plain"])
    chex.assert_trees_all_equal(again.params, result.params)


@pytest.mark.slow  # Of a shorter run in test_conformance.py.
def test_replay_of_dpgd_zeroth_order(tmp_path: Path) -> None:
    """The noise across the direction is public: releases alone rebuild the run."""
    fields = dataclasses.asdict(make_plan())
    del fields["num_directions"], fields["sampling"]
    chosen: Any = {
        k: v for k, v in fields.items() if k in _names(plans.DPGDZerothOrder)
    }
    plan = plans.DPGDZerothOrder(sampling=sampling.FullBatch(), **chosen)
    result = run(tmp_path / "run", plan, chunk=6)
    again = jaxdp.replay(tmp_path / "run", PARAMS, optimizer=OPTIMIZERS["plain"])
    chex.assert_trees_all_close(again.params, result.params, rtol=1e-6, atol=1e-6)
    assert result.info.releases.shape == (plan.num_steps, 1)


def _names(plan: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(plan)}


@pytest.mark.slow  # One more run; leaves are those of test_conformance.py.
def test_frozen_and_stacked_leaves(tmp_path: Path) -> None:
    """The header holds which leaves move and which count layers."""
    result = run(
        tmp_path / "run",
        make_plan(direction="rademacher"),
        trainable=lambda path: path != "out",
        stacked=lambda path: path == "hidden/w",
    )
    again = jaxdp.replay(tmp_path / "run", PARAMS, optimizer=OPTIMIZERS["plain"])
    chex.assert_trees_all_equal(again.params, result.params)
    chex.assert_trees_all_equal(again.params["out"], PARAMS["out"])


@pytest.mark.slow  # One more run; paths are those of kernels/test_sphere.py.
def test_flat_tree_in_the_same_order_replays_too(tmp_path: Path) -> None:
    """Directions know paths and their order, not how a tree nests."""
    from collections import OrderedDict

    result = run(tmp_path / "run", make_plan(), optimizer=OPTIMIZERS["momentum"])
    named = jax.tree_util.tree_leaves_with_path(PARAMS)
    flat = OrderedDict((sphere.path_str(path), leaf) for path, leaf in named)
    again = jaxdp.replay(tmp_path / "run", flat, optimizer=OPTIMIZERS["momentum"])
    chex.assert_trees_all_equal(
        list(again.params.values()), jax.tree.leaves(result.params)
    )


def test_rademacher_replays_in_numpy(tmp_path: Path) -> None:
    """Signs are exact, so a step is one rounding on any machine, in any program.

    With a step size that is a power of two, which multiplies exactly.
    """
    plan, rate = make_plan(direction="rademacher"), 2.0**-4
    result = run(tmp_path / "run", plan, optimizer=optax.sgd(rate))
    record = ledger.read(tmp_path / "run")
    role = keys.stream(keys.root_from_hex(record.header["direction"]), "direction")
    params = jax.tree.map(np.array, PARAMS)

    @jax.jit
    def direction(step: jax.Array) -> Any:
        rows = sphere.directions(keys.at_step(role, step), PARAMS, law="rademacher")
        return sphere.materialise(sphere.select(rows, 0), PARAMS)

    for step, (y,) in enumerate(record.releases):
        u = direction(jnp.int32(step))
        moves = jax.tree.map(lambda d, y=y: np.float32(rate) * y * np.asarray(d), u)
        params = jax.tree.map(np.subtract, params, moves)
    chex.assert_trees_all_equal(params, jax.tree.map(np.asarray, result.params))


def test_a_part_of_a_run(tmp_path: Path) -> None:
    seen = []
    run(tmp_path / "run", make_plan(), chunk=5, callback=lambda *x: seen.append(x))
    path = tmp_path / "run" / ledger.LEDGER
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6]))  # Two chunks, and the intent of the third.
    path.write_text("".join(lines[:2]))  # Nothing yet.
    nothing = jaxdp.replay(path, PARAMS, optimizer=OPTIMIZERS["plain"])
    chex.assert_trees_all_equal(nothing.params, PARAMS)
    path.write_text("".join(lines[:6]))
    again = jaxdp.replay(path, PARAMS, optimizer=OPTIMIZERS["plain"])
    step, params, info = seen[1]
    assert step == 10 == len(again.info.releases)
    chex.assert_trees_all_equal(again.params, params)
    chex.assert_trees_all_equal(again.info, FitInfo(*info))


def test_header_says_what_a_reader_needs(tmp_path: Path) -> None:
    plan = make_plan(direction="gaussian")
    run(tmp_path / "run", plan, chunk=5, note={"who": "me"})
    header = ledger.read(tmp_path / "run").header
    assert header["plan"] == json.loads(plan.to_json())
    assert (header["law"], header["chunk"], header["private"]) == ("gaussian", 5, False)
    assert header["prng"]["impl"] == "threefry2x32"
    assert header["versions"]["jax"] == jax.__version__
    assert header["device"] == jax.devices()[0].device_kind
    assert header["leaves"]["out"] == [sphere.leaf_id("out"), "float32", [5]]
    assert header["note"] == {"who": "me"}
    assert len(header["run"]) == 32
    for note in ({"who": {1}}, {"x": float("nan")}):
        with pytest.raises((TypeError, ValueError), match="note must be what JSON"):
            run(tmp_path / "other", plan, note=note)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow  # A size, of a run of 10 000 steps.
def test_ten_thousand_steps_fit_in_400_kB(tmp_path: Path) -> None:
    plan = make_plan(num_steps=10_000, num_directions=4)
    run(tmp_path / "run", plan)
    assert (tmp_path / "run" / ledger.LEDGER).stat().st_size < 400_000


def test_refusals(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, make_plan())
    other = jax.tree.map(lambda x: x + 1, PARAMS)
    with pytest.raises(ValueError, match="params must be the initial parameters"):
        jaxdp.replay(folder, other)
    with pytest.raises(ValueError, match="params must have the leaves"):
        jaxdp.replay(folder, {"w": jnp.zeros(3)})
    with pytest.raises(ValueError, match="ledger must be a run's folder"):
        jaxdp.replay(tmp_path, PARAMS)
    lines = (folder / ledger.LEDGER).read_text().splitlines(keepends=True)
    header = json.loads(lines[0]) | {"direction_version": 0}
    (folder / ledger.LEDGER).write_text(json.dumps(header) + "\n" + "".join(lines[1:]))
    with pytest.raises(ValueError, match="ledger must be of directions"):
        jaxdp.replay(folder, PARAMS)
    common = {f: getattr(make_plan(), f) for f in _names(plans.DPGD)}
    run(tmp_path / "dpgd", plans.DPGD(**common))
    with pytest.raises(ValueError, match="plan must be one of slopes to be replayed"):
        jaxdp.replay(tmp_path / "dpgd", PARAMS)
