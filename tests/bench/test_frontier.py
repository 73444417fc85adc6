"""The study of public records: its draws, its methods, and what it has shown."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxdp import models

pytestmark = pytest.mark.slow

BENCH = "frontier"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "frontier.json"


def rows_of(x: Any) -> set[bytes]:
    return {np.asarray(row).tobytes() for row in x}


def test_public_and_private_records_are_others(bench: Any) -> None:
    data = models.load("digits")
    of = bench.draw(data, 0)
    assert (len(of.public[1]), len(of.private[1])) == (100, 1337)
    whole = rows_of(data.train[0])
    assert rows_of(of.public[0]) | rows_of(of.private[0]) == whole
    assert not rows_of(of.public[0]) & rows_of(of.private[0])
    assert rows_of(bench.draw(data, 1).public[0]) != rows_of(of.public[0])


def test_a_shift_moves_public_records_alone(bench: Any) -> None:
    data = models.load("digits")
    of = bench.draw(data, 0)
    labels, inverted, noise = (bench.draw(data, 0, shift) for shift in bench.SHIFTS)
    np.testing.assert_array_equal(labels.public[1], (of.public[1] + 1) % 10)
    np.testing.assert_array_equal(inverted.public[0], 1 - of.public[0])
    assert np.abs(noise.public[0] - of.public[0]).max() > 0.5
    for shifted in (labels, inverted, noise):
        for a, b in zip(shifted.private, of.private, strict=True):
            np.testing.assert_array_equal(a, b)


def test_rows_and_plot(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    values = np.array([0.5, 0.75])
    monkeypatch.setattr(bench.Study, "alone", lambda *given: values - 0.25)
    monkeypatch.setattr(bench.Study, "private", lambda *given: (values, 0.5))
    rows = bench.run(False, tmp_path)
    cases = [(row.case, row.metric) for row in rows]
    assert len(set(cases)) == len(cases)
    gains = [row for row in rows if row.metric == bench.GAIN]
    assert {(row.value, row.half_width) for row in gains} == {(0.25, 0.0)}
    assert (tmp_path / bench.PNG).stat().st_size > 10_000
    kept = json.loads(KEPT.read_text())["rows"]
    assert [(row["case"], row["metric"]) for row in kept] == cases
