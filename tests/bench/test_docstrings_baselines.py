"""The baselines of the study of docstrings: what differs from it, and what is kept."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import _kept
from bench import docstrings as study
from bench.docstrings import finetuning

pytestmark = pytest.mark.slow  # As those of the study: it needs the extra `lm`.

BENCH = "docstrings_baselines"  # For the fixture `bench`.


def taken(monkeypatch: pytest.MonkeyPatch, method: Any, epsilon: float | None) -> Any:
    """The plan and the optimizer that a run hands to ``fit``."""
    found: list[Any] = []

    def fit(plan: Any, *_: Any, optimizer: Any, **__: Any) -> Any:
        found.extend((plan, optimizer))
        return SimpleNamespace(params=None)

    monkeypatch.setattr(finetuning.jaxdp, "fit", fit)
    of: Any = finetuning.Problem(
        SimpleNamespace(value_fn=None),  # pyright: ignore
        *({}, {"tokens": np.zeros((480, 1))}, None, lambda params: 0.0),
    )
    finetuning.run(of, method, epsilon, 0)
    return found


def test_an_infinite_budget_has_neither_noise_nor_clip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for methods in finetuning.METHODS.values():
        for how in methods.values():
            plan, _ = taken(monkeypatch, how, math.inf)
            assert plan.noise_std == 0 and math.isinf(plan.l2_clip_norm)
            plan, _ = taken(monkeypatch, how, None)
            assert plan.noise_std == 0 and plan.l2_clip_norm == how.recipe.l2_clip_norm


def test_cells_differ_from_the_study_as_they_say(bench: Any) -> None:
    for cell in bench.CELLS:
        found, name = bench.method(cell), cell.name
        of = finetuning.METHODS[cell.task]["DP-LoRA" if name == bench.ADAMW else name]
        names = {
            field.name
            for field in dataclasses.fields(of.recipe)
            if getattr(found.recipe, field.name) != getattr(of.recipe, field.name)
        }
        assert found._replace(recipe=of.recipe) == of
        if name == bench.ADAMW:
            assert names == {"optimizer", "learning_rate"}
        else:
            assert names <= {"learning_rate"}
            assert not names or cell.epsilon == math.inf


def test_parts_have_seconds_of_both_clocks() -> None:
    rows: list[Any] = []
    with study.clocked(rows, "one"), study.clocked(rows, "other"):
        pass
    assert [(row.case, row.metric, row.unit) for row in rows] == [
        (part, clock, "s")
        for part in ("other", "one")
        for clock in (study.WALL, study.PROCESSOR)
    ]


def test_kept_rows_are_the_cells(bench: Any) -> None:
    kept = _kept.rows("docstrings_baselines")
    for cell in bench.CELLS:
        (row,) = kept[cell.task, f"{cell.name}, {study.told(cell.epsilon)}"]
        assert row["count"] == len(bench.SEEDS) and row["half_width"] > 0
        assert row["note"] == f"step size {bench.method(cell).recipe.learning_rate:g}"


def test_kept_gradients_lose_to_noise_and_clip() -> None:
    """What the page says of DP-LoRA: its baseline is above its interval in both tasks."""
    kept = _kept.rows("docstrings_baselines")
    for task in study.TASKS.values():
        private, free = (
            kept[task, f"DP-LoRA, {study.told(epsilon)}"][0]
            for epsilon in (2.0, math.inf)
        )
        gap = free["value"] - private["value"]
        assert gap > free["half_width"] + private["half_width"]
