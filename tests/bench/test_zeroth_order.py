"""The study of DPZero's numbers: equal budgets, and every row that is kept."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCH = "zeroth_order"  # For the fixture `bench`.
KEPT = (
    pathlib.Path(__file__).resolve().parents[2] / "bench/results/cpu/zeroth_order.json"
)


def test_all_configurations_cost_the_same(bench: Any) -> None:
    for name, config in bench.CONFIGS.items():
        staged = config.staged(1437, 0.5)
        slopes = [plan.num_steps * plan.num_directions for _, plan in staged]
        assert slopes == [bench.SLOPES // len(staged)] * len(staged), name
        assert len({plan.noise_multiplier for _, plan in staged}) == 1
        if config.unclipped:
            bound = dataclasses.replace(config, unclipped=False).staged(1437, 0.5)[0][1]
            assert staged[0][1].noise_std == pytest.approx(bound.noise_std)
            assert staged[0][1].l2_clip_norm > 50 * bound.l2_clip_norm
            continue
        steps = sum(plan.num_steps for _, plan in staged)
        whole = dataclasses.replace(staged[0][1], num_steps=steps)
        assert float(whole.epsilon()) <= bench.EPSILON, name
        assert bench.spent(staged) == pytest.approx(whole.epsilon(), rel=1e-6)
        for _, plan in staged:
            assert plan.l2_clip_norm == 0.5 * math.sqrt(plan.num_directions)


@pytest.mark.parametrize("name", ["one class at a time", "rank 4, new every 32 steps"])
def test_lifted_directions_are_as_long_on_average(name: str, bench: Any) -> None:
    """A A^T of the steps is the identity on average; the low rank is random, within 2%."""
    lift = bench.CONFIGS[name].lift
    basis, nothing = jnp.eye(lift.dim), jnp.zeros((bench.PARTS, 650))

    @jax.vmap
    def squares(step: jax.Array) -> jax.Array:
        columns = jax.vmap(lambda v: lift.fn(v, step, nothing))(basis)
        return (columns**2).sum(axis=0)

    found = squares(32 * jnp.arange(200)).mean(axis=0)
    if "class" in name:
        found = squares(jnp.arange(10)).mean(axis=0)
        np.testing.assert_allclose(found, 1.0, rtol=1e-6)
    assert float(found.mean()) == pytest.approx(1.0, rel=0.02)


def test_second_halves_follow_what_was_released(bench: Any) -> None:
    released = jnp.zeros((bench.PARTS, 65, 10)).at[:, 3].set(1.0)
    released += 0.01 * jax.random.normal(jax.random.key(0), released.shape)
    released = released.reshape(bench.PARTS, -1)
    for name, config in bench.CONFIGS.items():
        if not name.startswith("second half"):
            continue
        first, second = (one.lift for one, _ in config.staged(1437, 0.5))
        assert first is None
        lift = jax.vmap(lambda v, lift=second: lift.fn(v, jnp.int32(0), released))
        lengths = (lift(jnp.eye(second.dim)) ** 2).sum(axis=0)
        assert float(lengths.mean()) == pytest.approx(1.0, rel=1e-4), name
        pixel = lengths.reshape(65, 10).mean(axis=1)
        assert int(jnp.argmax(pixel)) == 3 and pixel[3] > 2 * jnp.delete(pixel, 3).max()


def test_every_row_is_kept(bench: Any) -> None:
    rows = json.loads(KEPT.read_text())["rows"]
    found = [(row["case"], row["metric"]) for row in rows]
    metrics = bench.METRIC, bench.MORE, bench.CLIPPED
    assert found == [(name, metric) for name in bench.CONFIGS for metric in metrics]
    assert all(0 <= row["value"] <= 1 for row in rows if row["metric"] != bench.MORE)
