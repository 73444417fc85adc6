"""The study of DPZero's numbers: equal budgets, and every row that is kept."""

import json
import math
import pathlib
from typing import Any

import pytest

BENCH = "zeroth_order"  # For the fixture `bench`.
KEPT = (
    pathlib.Path(__file__).resolve().parents[2] / "bench/results/cpu/zeroth_order.json"
)


def test_all_configurations_cost_the_same(bench: Any) -> None:
    for name, config in bench.CONFIGS.items():
        plan = config.plan(1437, 0.5)
        assert plan.num_steps * plan.num_directions == bench.SLOPES, name
        if config.unclipped:
            bound = bench.Config(num_directions=config.num_directions).plan(1437, 0.5)
            assert plan.noise_std == pytest.approx(bound.noise_std)
            assert plan.l2_clip_norm > 50 * bound.l2_clip_norm
            continue
        assert float(plan.epsilon()) <= bench.EPSILON, name
        assert plan.l2_clip_norm == 0.5 * math.sqrt(plan.num_directions)


def test_every_row_is_kept(bench: Any) -> None:
    rows = json.loads(KEPT.read_text())["rows"]
    found = [(row["case"], row["metric"]) for row in rows]
    metrics = bench.METRIC, bench.CLIPPED
    assert found == [(name, metric) for name in bench.CONFIGS for metric in metrics]
    assert all(0 <= row["value"] <= 1 for row in rows)
