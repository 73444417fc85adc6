"""The table of private O2NC: its runs are the library's, and what it has shown."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import plans

pytestmark = [
    pytest.mark.slow,
    # These studies show what little the theorems promise at such sizes.
    pytest.mark.filterwarnings("ignore:the promise says next to nothing"),
]

BENCH = "o2nc"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "o2nc.json"

WINDOWS, SEEDS = 3, (4, 5)


@pytest.fixture(scope="module")
def table(bench: Any) -> dict[str, plans.O2NC]:
    return bench.variants(WINDOWS)


@pytest.fixture(scope="module")
def runs(bench: Any, table: dict[str, plans.O2NC]) -> Any:
    return bench.run_seeds(table[bench.BEST], SEEDS)


def test_plans_read_as_many_records(bench: Any, table: dict[str, plans.O2NC]) -> None:
    assert len(table) == 8
    for name, plan in table.items():
        assert plan.num_examples == 2 * 64 * WINDOWS
        assert plan.smoothing_radius == 0.5
        if name != "certified":
            assert (plan.window, plan.num_windows) == (64, WINDOWS)
            assert plan.sampling.max_steps(plan.num_examples) == plan.num_steps
            assert plan.max_step == 0.5 / 64 and plan.reset
    for name in set(table) - {"not private", "not private, orthonormal", bench.PAPER}:
        assert table[name].epsilon(delta=1e-5) == pytest.approx(8, rel=1e-6)
    assert table[bench.PAPER].epsilon(delta=1e-5) < 5


def test_a_run_is_that_of_fit(
    bench: Any, table: dict[str, plans.O2NC], runs: Any
) -> None:
    """Of the second seed; the bench's program has two runs side by side."""
    data = bench.PROBLEM.make_data(2 * 64 * WINDOWS, SEEDS[1])
    result = jaxdp.fit(
        table[bench.BEST],
        jaxdp.Keys.insecure(SEEDS[1]),
        jnp.asarray(bench.PROBLEM.x0),
        data,
        value_fn=bench.PROBLEM.value_fn,
    )
    found = jax.tree.map(lambda x: np.asarray(x[1]), runs)
    np.testing.assert_allclose(result.params, found.path.returned, atol=1e-5)
    assert np.linalg.norm(found.path.last - bench.PROBLEM.x0) > 0.1
    # The norm of a release is that of an estimate's change.
    estimates = found.path.estimates.reshape(WINDOWS, 64, 8)
    steps = np.linalg.norm(np.diff(estimates, axis=1, prepend=0), axis=-1)
    np.testing.assert_allclose(result.info.releases[:, 0], steps.ravel(), rtol=1e-3)


def test_the_noise_is_all_that_the_errors_are_not(
    bench: Any, table: dict[str, plans.O2NC], runs: Any
) -> None:
    """What remains has the size of one record's scatter, far below the noise."""
    plan = table[bench.BEST]
    found = bench.measured(plan, runs)
    assert all(x.shape == (2,) for x in found.values())
    assert np.all(found["sampling error"] < 0.02)
    # 6 windows of 64 correlated sums: a relative standard deviation of 0.19.
    energy = np.mean(found["noise energy"])
    assert 0.3 < energy / bench.predicted_energy(plan) < 2
    assert np.all(found["Goldstein norm returned, radius 1"] <= 1 + 1e-6)
    queries = np.asarray(runs.path.queries)
    np.testing.assert_array_equal(queries[:, 0], np.ones((2, 8)))
    assert np.ptp(queries[:, -1], axis=0).min() > 0  # Seeds differ.


def test_smoothed_gradients_in_closed_form(bench: Any) -> None:
    """Far from all kinks, and on them."""
    points = np.array([[2.0, -2.0] * 4, [0.0] * 8], np.float32)
    found = bench.smoothed_gradients(points)
    np.testing.assert_allclose(found, np.sign(points) / np.sqrt(8), rtol=1e-6)


def test_rows_and_plot(bench: Any, table: Any, runs: Any, tmp_path: Any) -> None:
    names = ("not private", bench.PAPER, bench.BEST, "certified")
    one = bench.measured(table[bench.BEST], runs)
    few = {name: table[name] for name in names}
    rows = bench.report(few, dict.fromkeys(few, one), tmp_path)
    metrics = {(row.case, row.metric): row for row in rows}
    for name in names:
        assert metrics[name, "stationarity"].count == len(SEEDS)
        energy = metrics[name, "noise energy"]
        assert (energy.ratio is None) == (name == "not private")
    assert metrics["certified", "Goldstein norm proven"].value > 0
    assert (rows[-1].baseline, rows[-1].ratio) == (bench.BEST, 1.0)
    assert (tmp_path / bench.PNG).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_over_seeds(bench: Any, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    fn = bench._harness.over_seeds(lambda a, b: {"sum": a + b.sum()})
    a, b = jnp.arange(3.0), jnp.ones((3, 2))
    text = str(jax.make_jaxpr(fn)(a, b))
    assert ("scan" in text) == (backend == "cpu")
    np.testing.assert_array_equal(jax.jit(fn)(a, b)["sum"], [2, 3, 4])


# --- what was shown ------------------------------------------------------------------

# Zhang et al. digest 6.11: stationarity, sampling error and ||x|| at the end; 3 seeds.
TABLE = {
    "not private": (0.091, 0.0092, 0.097),
    "not private, orthonormal": (0.070, 0.0040, 0.050),
    "paper's noise, tree": (0.675, 0.018, 0.520),
    "exact, tree": (0.563, 0.016, 0.425),
    "exact, tree, orthonormal": (0.343, 0.0046, 0.262),
    "exact, BLT-3, orthonormal": (0.334, 0.0048, 0.282),
}


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(KEPT.read_text())["rows"]
    compared = (None, "prediction")
    return {(r["case"], r["metric"]): r for r in rows if r["baseline"] in compared}


def test_kept_noise_is_as_predicted(kept: dict[tuple[str, str], Any]) -> None:
    ratios = [r["ratio"] for (_, m), r in kept.items() if m == "noise energy"]
    private = [ratio for ratio in ratios if ratio is not None]
    assert len(private) == 6 and max(abs(ratio - 1) for ratio in private) < 0.02
    paper, best = (
        kept[name, "noise energy"]["value"]
        for name in ("paper's noise, tree", "exact, BLT-3, orthonormal")
    )
    assert paper / best > 60


@pytest.mark.parametrize("name", TABLE)
def test_kept_runs_are_those_of_the_digest(
    kept: dict[tuple[str, str], Any], name: str
) -> None:
    """The end of a run scatters by a third, so its mean of three by a fifth."""
    stationarity, error, last = TABLE[name]
    assert kept[name, "stationarity"]["value"] == pytest.approx(stationarity, rel=0.05)
    assert kept[name, "sampling error"]["value"] == pytest.approx(error, rel=0.1)
    assert kept[name, "||x|| at the end"]["value"] == pytest.approx(last, rel=0.4)


def test_kept_certified_keeps_its_promise(kept: dict[tuple[str, str], Any]) -> None:
    promised = kept["certified", "Goldstein norm proven"]["value"]
    measured = kept["certified", "stationarity, own windows"]["value"]
    reached = kept["certified", "Goldstein norm returned, radius 1"]["value"]
    assert reached <= measured < promised
