"""The study of the dimension: its runs are the library's, and what it has shown."""

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting, models, plans, sampling
from jaxdp.data.problems import HESSIANS

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "h100" / "dpzero_dimension.json"

# Table 7.1 of the digest: the best train gradient norm, DPZero and DPGD-0th; one seed.
TABLE = {
    ("identity", 20): (0.0257, 0.0545),
    ("identity", 200): (0.411, 2.21),
    ("identity", 2000): (24.7, 39.1),
    ("inverse_sqrt", 20): (0.0118, 0.0255),
    ("inverse_sqrt", 200): (0.0570, 0.381),
    ("inverse_sqrt", 2000): (0.960, 1.79),
    ("inverse", 20): (0.0079, 0.0257),
    ("inverse", 200): (0.0306, 0.120),
    ("inverse", 2000): (0.0624, 0.241),
}


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """``bench`` is run from the root of the repository and never installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from bench import dpzero_dimension

        yield dpzero_dimension


# --- runs, against the library and against NumPy -----------------------------------

NUM, DIM, STEPS, SEED = 40, 6, 9, 3


@pytest.fixture(scope="module")
def runs(study: Any) -> Any:
    grid = study.FULL._replace(
        num_steps=(STEPS,), rates=(0.05, 0.3), clips=(0.7, 4.0, 1e3)
    )
    (records,) = models.load("quadratic_identity", num_examples=NUM, dim=DIM).train
    return study.make_runs(grid, DIM, SEED, records)[0]


@pytest.fixture(scope="module")
def ends(study: Any, runs: Any) -> dict[str, np.ndarray]:
    found = study.zeroth_order(runs) | study.first_order(runs)
    return {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.parametrize("h", range(3))
@pytest.mark.parametrize(("c", "r"), [(0, 1), (1, 0)])
def test_a_run_of_dpzero_is_the_librarys(
    study: Any, runs: Any, ends: dict[str, np.ndarray], h: int, c: int, r: int
) -> None:
    """The same directions, and the same noise handed in as the exact table."""
    plan = plans.DPZero(
        num_examples=NUM,
        num_steps=STEPS,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=float(runs.clips[c, 0, 0]),
        smoothing_radius=0.25,
    ).calibrate(epsilon=2.0, delta=1e-6)
    assert plan.noise_std == pytest.approx(float(runs.noise_std[c, 0, 0]), rel=1e-6)
    z = [runs.normal("DPZero", jnp.int32(t), 1)[h, c, r] for t in range(STEPS)]
    table = jnp.round(jnp.stack(z) * plan.grid_noise_std).astype(jnp.int32)
    maker = jaxdp.dpzero(plan, jaxdp.Keys.insecure(SEED), noise_table=table)
    tx = optax.chain(maker, optax.sgd(runs.rates[r]))
    problem = models.centered_quadratic(HESSIANS[h], DIM)
    batch = (runs.records,)

    @jax.jit
    def step(x: Any, state: Any) -> tuple[Any, Any]:
        kwargs: dict[str, Any] = {"value_fn": problem.value_fn, "batch": batch}
        updates, state = tx.update(None, state, x, **kwargs)
        return optax.apply_updates(x, updates), state

    x = jnp.zeros(DIM)
    state = tx.init(x)
    for _ in range(STEPS):
        x, state = step(x, state)
    # The grid of 2**-16 of the clip, and losses in float32.
    np.testing.assert_allclose(x, ends["DPZero"][h, c, r], rtol=1e-3, atol=1e-3)
    assert np.max(np.abs(x)) > 0.05


@pytest.mark.parametrize("name", ["DPZero", "DPGD-0th", "DP-GD"])
def test_runs_against_numpy(
    study: Any, runs: Any, ends: dict[str, np.ndarray], name: str
) -> None:
    """Algorithms as they are printed: every record's vector formed and clipped."""
    records = np.asarray(runs.records, np.float64)
    u = np.asarray(runs.directions, np.float64)
    np.testing.assert_allclose(np.linalg.norm(u, axis=1), math.sqrt(DIM), rtol=1e-5)
    width = 1 if name == "DPZero" else DIM
    z = np.stack([runs.normal(name, jnp.int32(t), width) for t in range(STEPS)])
    for h, c, r in np.ndindex(*ends[name].shape[:-1]):
        a, clip, std = (
            np.asarray(v[i], np.float64).reshape(-1)
            for v, i in ((runs.hessians, h), (runs.clips, c), (runs.noise_std, c))
        )
        x = np.zeros(DIM)
        for t in range(STEPS):
            gradients = a * (x - records)
            contributions = gradients
            if name != "DP-GD":
                contributions = (gradients @ u[t])[:, None]
            if name == "DPGD-0th":
                contributions = contributions * u[t]
            norms = np.linalg.norm(contributions, axis=1, keepdims=True)
            clipped = contributions * np.minimum(1, clip / norms)
            released = clipped.mean(0) + std * z[t, h, c, r]
            if name == "DPZero":
                released = released * u[t]
            x = x - float(runs.rates[r]) * released
        np.testing.assert_allclose(ends[name][h, c, r], x, rtol=1e-4, atol=1e-5)


def test_noise_is_calibrated_exactly_and_differs_between_runs(
    study: Any, runs: Any
) -> None:
    mu = accounting.gaussian_mu(2.0, 1e-6)
    expected = 2 * np.array([0.7, 4.0, 1e3]) * math.sqrt(STEPS) / (NUM * mu)
    np.testing.assert_allclose(runs.noise_std[:, 0, 0], expected, rtol=1e-6)
    assert study.noise_multiplier(2560) == pytest.approx(math.sqrt(2560) * 2.230476)
    z = [runs.normal(name, jnp.int32(t), 1) for name in study.NAMES for t in (0, 1)]
    assert len(np.unique(np.stack(z))) == np.size(z)


# --- what is shown -----------------------------------------------------------------


def test_metrics_are_those_of_the_loss(study: Any) -> None:
    data = models.load("quadratic_identity", num_examples=30, dim=4)
    x = np.random.default_rng(0).normal(size=(3, 2, 1, 4))
    found = study.measure(x, data)
    assert found.shape == (4, 3, 2, 1)
    for h, c in np.ndindex(3, 2):
        problem = models.centered_quadratic(HESSIANS[h], 4)
        point = jnp.asarray(x[h, c, 0], jnp.float32)
        values = []
        for batch in (data.train, data.test):
            gradient = problem.gradient_fn(point, batch).mean(0)
            values += [jnp.linalg.norm(gradient), problem.value_fn(point, batch).mean()]
        expected = [float(values[i]) for i in (0, 2, 1, 3)]
        np.testing.assert_allclose(found[:, h, c, 0], expected, rtol=1e-5)


def test_the_best_is_chosen_on_training_records(study: Any) -> None:
    metrics = np.full((4, 2, 3, 2, 1), 9.0)
    metrics[:, 1, :, 0, 0] = np.array([3.0, 5.0, 7.0, 8.0])[:, None]
    metrics[:, 0, :, 1, 0] = np.array([4.0, 1.0, 6.0, 2.0])[:, None]
    metrics[0, 0, 1, 0, 0] = np.nan  # A run that diverged.
    found = study.best(metrics)
    np.testing.assert_array_equal(found, np.repeat([[3], [5], [6], [2]], 3, 1))


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_study_gives_rows_and_plots(
    study: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, backend: str
) -> None:
    grid = study.FULL._replace(
        dims=(4, 6), first_order_dims=(4,), num_steps=(3,), seeds=2, first_order_seeds=1
    )
    grid = grid._replace(rates=(0.1,), clips=(1.0, 3.0))
    both = grid._replace(first_order_dims=grid.dims)
    monkeypatch.setattr(study, "NUM_EXAMPLES", 50)
    monkeypatch.setattr(study, "FULL", grid)
    monkeypatch.setattr(study, "GPU", both)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rows = study.run(False, tmp_path / "plots")
    assert len(list((tmp_path / "plots").glob("*.png"))) == 2
    cases = {row.case: row for row in rows if row.metric == "train gradient norm"}
    assert len(cases) == 3 * (4 + 1 if backend == "cpu" else 4 + 2)
    row = cases["inverse, d = 6, DPZero"]
    assert row.half_width > 0 and row.count == 2
    assert row.baseline == "start" and row.ratio is not None
    for row in rows:
        assert row.value is not None and math.isfinite(row.value)


# --- what was found ----------------------------------------------------------------


@pytest.mark.parametrize(("dim", "num_steps"), [(20, (640, 2560)), (200, (2560,))])
def test_small_cases_are_those_of_the_table(
    study: Any, dim: int, num_steps: tuple[int, ...]
) -> None:
    """Of the grid, the part in which all the best lie."""
    grid = study.FULL._replace(
        num_steps=num_steps,
        rates=(0.03, 0.1, 0.3, 1.0),
        clips=(0.1, 0.3, 1.0, 3.0),
        first_order_seeds=0,
    )
    found = study.run_seed(grid, dim, 0)
    for h, hessian in enumerate(HESSIANS):
        for name, expected in zip(study.NAMES[1:], TABLE[hessian, dim], strict=True):
            assert found[name][0, h] == pytest.approx(expected, rel=0.3)


Kept = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def kept() -> Kept:
    """The rows of the kept result, by case and metric."""
    rows = json.loads(KEPT.read_text())["rows"]
    return {(row["case"], row["metric"]): row for row in rows}


@pytest.mark.parametrize(("hessian", "dim"), TABLE)
def test_kept_values_are_those_of_the_table(kept: Kept, hessian: str, dim: int) -> None:
    """DPZero's may be half: the table has three numbers of steps, the study ten."""
    for name, expected in zip(("DPZero", "DPGD-0th"), TABLE[hessian, dim], strict=True):
        row = kept[f"{hessian}, d = {dim}, {name}", "train gradient norm"]
        # Where noise alone decides, in few dimensions, the best of a grid scatters: ten
        # seeds gave 0.067 to 0.091 where the table's one seed has 0.0545.
        lucky = (hessian, dim, name) == ("identity", 20, "DPGD-0th")
        least, most = 0.5 if name == "DPZero" else 0.7, 1.6 if lucky else 1.3
        assert least < row["value"] / expected < most


def test_kept_dpzero_hardly_grows_where_the_rank_does_not(kept: Kept) -> None:
    """At most a tenth of its growth on the identity, from d = 20 to 2000."""
    rows = {h: kept[f"{h}, DPZero", "growth, d = 20 to 2000"] for h in HESSIANS}
    assert rows["inverse"]["baseline"] == "identity"
    assert rows["inverse"]["ratio"] < 0.1
    assert rows["inverse"]["value"] < rows["inverse_sqrt"]["value"]
    assert rows["inverse_sqrt"]["value"] < rows["identity"]["value"]


def test_kept_dpgd_0th_is_worst_everywhere(kept: Kept) -> None:
    norms = {c: r["value"] for (c, m), r in kept.items() if m == "train gradient norm"}
    assert len(norms) == 3 * (7 + 7 + 7)
    for case, value in norms.items():
        where, name = case.rsplit(", ", 1)
        assert value < norms[f"{where}, DPGD-0th"] or name == "DPGD-0th"
    for other in ("DPZero", "DP-GD"):
        case = f"DPGD-0th over {other}, everywhere"
        assert kept[case, "train gradient norm, at least"]["ratio"] > 1
