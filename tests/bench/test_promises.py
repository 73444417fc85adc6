"""What the kept figures must still say when a benchmark is run again."""

from typing import Any

import pytest

from bench import _kept


def kept(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {at: row for at, (row, *_) in _kept.rows(name).items()}


@pytest.mark.parametrize(("epsilon", "least"), [("0.5", 0.80), ("2", 0.93)])
def test_digits_with_100_public_records(epsilon: str, least: float) -> None:
    """The best of 8 seeds on average, and more than without public records."""
    means = {
        case: row["value"]
        for (case, metric), row in kept("frontier").items()
        if metric == "test accuracy" and case.endswith(f"epsilon {epsilon}")
    }
    alone = [x for case, x in means.items() if "private records alone" in case]
    assert max(means.values()) >= least and len(alone) == 2
    assert max(means.values()) > max(alone) + 0.03


def test_the_planner_loses_two_points_at_most() -> None:
    lost = {
        case: row["value"]
        for (case, metric), row in kept("planner").items()
        if metric == "points lost"
    }
    assert {"wine", "breast_cancer", "made-up table"} <= set(lost)
    assert max(lost.values()) <= 2


@pytest.mark.parametrize("size", [1000, 10000])
def test_ten_mixed_columns_are_below_every_peer(size: int) -> None:
    case, metric = f"c: pairs of ten columns, n = {size}", "total variation: "
    found = {
        what.removeprefix(metric): row["value"]
        for (name, what), row in kept("tables").items()
        if name == case and what.startswith(metric)
    }
    peers = [value for name, value in found.items() if name.startswith("mbi")]
    assert len(peers) == 3 and found["synthesize"] < min(peers)


@pytest.mark.parametrize(("law", "most"), [("rademacher", 1.0), ("gaussian", 1.1)])
def test_a_step_of_a_llama_over_two_forwards(law: str, most: float) -> None:
    assert kept("lm_step")[f"Llama, 21.0 M, {law}", "step"]["ratio"] < most


@pytest.mark.parametrize(
    "case",
    [
        *(
            "K = 1",
            "K = 256",
            "network, K = 64",
            "network, K = 256",
            "signs",
            "normals",
        ),
        *("one class at a time", "rank 4, new every 32 steps", "radius 1"),
        *("rank 4, new every 256 steps", "second half: half in the released span"),
    ],
)
def test_what_the_study_of_directions_says_loses(case: str) -> None:
    row = kept("zeroth_order")[case, "more than K = 4"]
    assert row["count"] >= 20 and row["value"] + row["half_width"] < 0


def test_what_auto_predicts_is_on_the_safe_side() -> None:
    """By half at most: else runs that fit would go without gradients."""
    for method in ("dp-lora", "dpzero"):
        row = kept("auto_memory")[method, "predicted"]
        assert row["baseline"] == "needed" and 1 < row["ratio"] < 1.5
