"""The study of public docstrings: what is public, what chooses, and what it has shown."""

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.slow

BENCH = "public_docstrings"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "public_docstrings.json"


def records(rng: np.random.Generator, count: int) -> Any:
    """Records of two classes that a line parts."""
    x = rng.standard_normal((count, 3))
    return {"x": jnp.float32(x), "label": jnp.asarray(x[:, 0] > 0, jnp.int32)}


def head(bench: Any) -> Any:
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    return bench.Head(records(rng, 100), records(rng, 20), records(rng, 30), params)


def test_methods_have_as_many_tries(bench: Any) -> None:
    for how in bench.LINEAR.values():
        settings = how.rates, how.num_directions, how.weights, how.floors
        assert np.prod([len(values) for values in settings]) == 6


def test_held_out_private_records_choose(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that choose see no record that measures; the best of their means is taken."""
    of, seen = head(bench), []

    def scores(given: Any, how: Any, setting: Any, seeds: int, steps: int) -> Any:
        seen.append(given)
        means = np.array([rate - abs(setting[0] - 3) for rate in how.rates])
        return SimpleNamespace(means=means, scores=np.arange(seeds)[None])

    monkeypatch.setattr(bench, "scores", scores)
    how = bench.Linear((1.0, 2.0), num_directions=(2, 3))
    values, note = bench.tuned([of], how, 4)
    np.testing.assert_array_equal(values, np.arange(bench.SEEDS) + bench.TRIED)
    assert note == "step size 2, directions 3"
    assert [given is of for given in seen] == [False, False, True]
    for tried in seen[:2]:
        assert (len(tried.train["x"]), len(tried.shown["x"])) == (80, 20)
        rows = np.concatenate([tried.train["x"], tried.shown["x"]])
        assert {*map(bytes, rows)} == {*map(bytes, np.asarray(of.train["x"]))}


def test_settings_reach_the_run(bench: Any) -> None:
    """Each use of the public records changes the result of one and the same seed.

    Over 10 s on a busy machine: each is a program of its own.
    """
    of = head(bench)._replace(shown=records(np.random.default_rng(1), 5000))
    found = set()
    for setting in ((0, 0.0, 0.0), (2, 0.0, 0.0), (0, 0.5, 0.0), (0, 0.0, 0.1)):
        scores = bench.scores(of, bench.Linear((1.0,)), setting, 1, 2).scores
        assert scores.shape == (1, 1)
        found.add(scores.item())
    assert len(found) == 4


def test_all_slopes_are_the_projected_gradient(bench: Any) -> None:
    """With as many orthonormal directions as dimensions DPZero has DPGD's noise."""
    of = head(bench)
    plans = []
    for algorithm in ("DPGD", "DPZero"):
        how = bench.Linear((1.0,), algorithm, num_directions=(3,))
        patch = pytest.MonkeyPatch()
        patch.setattr(bench.jaxdp, "study", lambda plan, *_, **__: plans.append(plan))
        bench.scores(of, how, (3, 0.0, 0.0), 1, 4)
        patch.undo()
    gradient, slopes = plans
    of_estimate = slopes.noise_std / 3 * 3**0.5  # K rows of length sqrt(m), over K
    np.testing.assert_allclose(of_estimate, gradient.noise_std, rtol=1e-3)


def test_rows(bench: Any) -> None:
    values = {bench.ALONE: np.array([0.25])}
    values |= {name: np.array([0.5, 0.75]) for name in bench.LINEAR}
    found = bench.rows("linear", {name: (x, "") for name, x in values.items()})
    gains = {row.case: row.value for row in found if row.metric == bench.GAIN}
    assert gains["linear, start, mixing"] == 0
    assert gains[f"linear, {bench.ALONE}"] == -0.375
    kept = json.loads(KEPT.read_text())["rows"]
    assert [
        (row["case"], row["metric"]) for row in kept if row["case"].startswith("linear")
    ] == [(row.case, row.metric) for row in found if row.case.startswith("linear")]
