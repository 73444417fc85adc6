"""The study of stationary points: its intervals are right, and what it has shown."""

import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp

pytestmark = [
    pytest.mark.slow,
    # These studies show what little the theorems promise at such sizes.
    pytest.mark.filterwarnings("ignore:the promise says next to nothing"),
]

BENCH = "sosp"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "sosp.json"


@pytest.fixture(scope="module")
def rules(bench: Any) -> Any:
    return bench.cells.rules


def made(bench: Any, alpha: Any, **more: Any) -> Any:
    """A cell of certified runs with these alphas, and promise 0.2."""
    alpha = np.asarray(alpha, float)
    num = len(alpha)
    counts = {
        name: np.full(num, 1000 * i)
        for i, name in enumerate(
            ("records", "hessian_records", "refreshes", "differences", "escapes"), 1
        )
    }
    fields = counts | {
        "alpha": alpha,
        "last": alpha,
        "certified": np.ones(num, bool),
        "saddle": np.zeros(num, bool),
        "steps": np.full(num, 30),
        "reached": np.full(num, 500.0),
    }
    cell = {"table": "c", "case": "case", "method": "certified", "n": 10_000} | more
    runs = fields | cell.pop("runs", {})
    return bench.Cell(runs=bench.cells.Runs(promised=0.2, **runs), **cell)


# --- rules -----------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "runs", "rank"), [(5, 3, 2), (4, 4, 4), (6, 2, 1)])
def test_law_of_a_rank(rules: Any, ours: int, runs: int, rank: int) -> None:
    """All orders of all values are equally likely: they are counted."""
    found = np.zeros(ours + 1)
    for theirs in itertools.combinations(range(ours + runs), runs):
        found[theirs[rank - 1] - (rank - 1)] += 1
    np.testing.assert_allclose(rules._below(ours, runs, rank), found / found.sum())


@pytest.mark.parametrize("rank", [1, 7, 15, 30])
def test_intervals_hold_what_they_should(rules: Any, rank: int) -> None:
    """By the exact law: at least 95%, and less with one value fewer on a side."""
    ours, runs = 40, 30
    law = rules._below(ours, runs, rank)
    low, high = rules.order_interval(np.arange(1, ours + 1), runs, rank)
    inside = [max(low, 0) <= k <= min(high, ours + 1) - 1 for k in range(ours + 1)]
    assert law @ inside >= 0.95
    if math.isfinite(low):
        assert law[: int(low) + 1].sum() > 0.025
    if math.isfinite(high):
        assert law[int(high) - 1 :].sum() > 0.025


def test_too_few_values_say_nothing(rules: Any) -> None:
    """One more value is beyond all of 20 with probability 2 / 21, of 40 with 2 / 41."""
    assert rules.order_interval(range(20), 1, 1) == (-math.inf, math.inf)
    assert rules.order_interval(range(40), 1, 1) == (0, 39)
    told = rules.Told(7.0, 1, 0.1)
    found = rules.compare(9.5, range(20), told, rules.median_interval)
    assert found.verdict == rules.UNKNOWN


def test_a_planted_number_is_seen(bench: Any, rules: Any) -> None:
    values = np.linspace(0, 1, 40)

    def verdict(value: float, interval_of: Any, unit: float = 1e-6) -> str:
        told = rules.Told(value, 30, unit)
        return rules.compare(0.5, values, told, interval_of).verdict

    assert verdict(0.5, rules.median_interval) == "agrees"
    assert verdict(0.8, rules.median_interval) == "differs"
    assert verdict(0.95, rules.median_interval) == "far off"
    assert verdict(0.95, rules.median_interval, unit=0.6) == "agrees"
    assert verdict(0.99, rules.largest_interval) == "agrees"
    assert verdict(0.5, rules.largest_interval) == "far off"
    assert rules.judge_share(20, 20, 27, 30) == "agrees"
    assert rules.judge_share(20, 20, 20, 30) == "differs"
    assert rules.judge_share(20, 20, 10, 30) == "far off"

    told = {"alpha": rules.Told(0.5, 30, 1e-3), "largest alpha": rules.Told(3, 30, 1)}
    cell = made(bench, values, table="a", told=told, told_certified=(10, 30))
    rows = {row.metric: row for row in bench.cells.rows(cell)}
    assert rows["alpha"].baseline == "prototype" and rows["alpha"].ratio == 1
    assert "agrees" in rows["alpha"].note
    assert "far off" in rows["share certified"].note
    assert rows["records"].baseline is None
    (row,) = bench.cells.agreement([cell])
    assert (row.value, row.ratio) == (2, pytest.approx(2 / 3))
    assert row.note == "of 3; far off: case, share certified"


def test_intervals_of_shares_and_medians(rules: Any) -> None:
    """Clopper-Pearson: 1 - .025^(1/20); of 20 values the 6th and the 15th: 95.9%."""
    assert rules.share_interval(20, 20).low == pytest.approx(0.025 ** (1 / 20))
    assert rules.spread(range(1, 21)) == (6, 15)
    assert rules.spread(range(5)) == (-math.inf, math.inf)


def test_slope(rules: Any) -> None:
    """Two seeds a factor of e apart at each of three sizes: residuals of 1/2."""
    sizes = np.array([1e3, 1e4, 1e5])
    line = 3 / np.sqrt(sizes)
    values = [[y * math.exp(-0.5), y * math.exp(0.5)] for y in line]
    found = rules.slope(sizes, values)
    assert found.value == pytest.approx(-0.5)
    scatter = 4 * math.log(10) ** 2  # Sum of squares of log n about its mean.
    assert found.error == pytest.approx(math.sqrt(6 * 0.25 / 4 / scatter))


# --- rows ------------------------------------------------------------------------------


def test_saddles_with_a_certificate_are_counted(bench: Any) -> None:
    flags = np.array([True, False, True])
    bad = {"saddle": flags, "certified": np.array([True, True, False])}
    cell = made(bench, [0.1, 0.3, 0.1], runs=bad)
    rows = {row.metric: row for row in bench.cells.certificates(cell)}
    assert rows["certified saddles"].value == 1
    assert rows["share certified"].value == pytest.approx(2 / 3)
    assert rows["share of certificates with alpha at most 0.2"].value == 0.5


def test_rows_and_plot(bench: Any, tmp_path: Any) -> None:
    cells = [
        made(bench, [1 / n, 2 / n, 3 / n], method=method, n=n)
        for method in ("certified", "independent", bench.compare.SGD_TUNED)
        for n in (1000, 10_000, 100_000)
    ]
    never = {"certified": np.zeros(3, bool), "records": np.full(3, 4000)}
    more = {"records": np.full(3, 1500)}
    cells += [
        made(bench, [0.1] * 3, table="b"),
        made(bench, [0.1] * 3, table="b", method="tree", runs=more),
        made(bench, [0.3] * 3, table="b", method="no escape", runs=never),
    ]
    rows = {(row.case, row.metric): row for row in bench.report(cells)}
    slope = rows["(c) cosine, saddle, epsilon 1: independent", "slope in n"]
    assert slope.value == pytest.approx(-1) and slope.ratio == pytest.approx(2)
    records = rows["(b) case: tree", "records to a certificate"]
    assert (records.baseline, records.ratio) == ("certified", 1.5)
    none = rows["(b) case: no escape", "records to a certificate"]
    assert none.value is None and none.note == "not in 3 of 3 runs"
    share = rows["(b) case: no escape", "share certified with alpha at most 0.2"]
    assert share.value == 0
    bench.plots.save(bench.plot.draw(cells), tmp_path / bench.PNG)
    assert (tmp_path / bench.PNG).read_bytes().startswith(b"\x89PNG")
    # Parts are kept, and not measured again.
    first = bench.run_part("one", lambda: cells[:1], tmp_path)
    (again,) = bench.run_part("one", list, tmp_path)
    assert (
        dataclasses.asdict(again.runs).keys()
        == dataclasses.asdict(first[0].runs).keys()
    )
    np.testing.assert_array_equal(again.runs.alpha, first[0].runs.alpha)
    assert bench.report([again]) == bench.report(first)


# The study keeps the digest's delta = 1e-6 at 1.5e6 records too.
@pytest.mark.filterwarnings("ignore:delta=1e-06 is above 1/num_examples")
def test_what_is_run(bench: Any) -> None:
    """All rows of the prototype's table; every method spends what it may."""
    cases = [case for of in bench.prototype.groups().values() for case in of]
    assert len(cases) == len(bench.prototype.CASES) == 15
    assert len(bench.parts()) == 27
    for size in bench.SIZES:
        every = bench.compare.methods(size)
        for name, plan in every.items():
            assert plan.epsilon(delta=1e-6) == pytest.approx(size.epsilon, rel=1e-6)
            assert plan.num_examples == size.n, name
        ours = bench.compare.promised(every["certified"])
        for name in ("tree", "sqrt_toeplitz", "independent", "independent, short"):
            # But for what their grids round off.
            assert bench.compare.promised(every[name]) == pytest.approx(ours, rel=0.02)
        # Else the saddle itself would be as good as a certificate says.
        saddle = size.of.points["saddle"].min_eigenvalue
        assert ours < saddle**2 / size.of.hessian_lipschitz


def test_numbers_of_the_digest(bench: Any) -> None:
    """The batches that it says it had."""
    batches = {
        (1.0, 100_000): (3712, 661, 17),
        (2.0, 20_000): (980, 205, 12),
        (2.0, 200_000): (8889, 504, 21),
        (math.inf, 200_000): (8889, 85, 21),
        (8.0, 1_000_000): (18_863, 3345, 125),
    }
    for case in bench.prototype.CASES:
        known = batches.get((case.epsilon, case.n))
        if known is None or case.hessian != "on_demand":
            continue
        plan = bench.prototype.plan_of(case)
        found = plan.refresh_batch_size, plan.hessian_batch_size, plan.escape_steps
        assert found == known
    tracked = bench.prototype.plan_of(bench.prototype.CASES[9])
    assert tracked.hessian == "tracked" and tracked.hessian_batch_size == 1125


# --- runs ------------------------------------------------------------------------------


def test_a_run_is_that_of_fit(bench: Any) -> None:
    """At the prototype's smallest size, and what is measured of it."""
    case = bench.prototype.CASES[3]
    (cell,) = bench.prototype.cells([case], range(2))
    problem, plan = bench.prototype.problem_of(case), bench.prototype.plan_of(case)
    result = jaxdp.fit(
        plan,
        jaxdp.Keys.insecure(1),
        jnp.asarray(problem.points["saddle"].x, jnp.float32),
        problem.make_data(case.n, 1),
        value_fn=problem.value_fn,
    )
    runs, told = cell.runs, result.report["outcome"]
    assert runs.records[1] == told["records_used"] <= case.n
    assert runs.certified[1] == told["certified"]
    assert runs.escapes[1] == told["escapes"] > 0
    alpha = jaxdp.metrics.sosp_alpha_of(
        problem.population_fn, result.params, problem.hessian_lipschitz
    )
    assert runs.alpha[1] == pytest.approx(float(alpha), abs=1e-5)
    # On its way every run passes a point as good as the one that it returns.
    assert np.all(runs.reached[runs.good] <= runs.records[runs.good])
    assert runs.alpha[0] != runs.alpha[1]
    assert not runs.saddle[runs.certified].any()
    points = np.stack([problem.points[name].x for name in ("saddle", "minimum")])
    found = bench.prototype.runs.alphas(problem, points.astype(np.float32))
    at_saddle = problem.points["saddle"].min_eigenvalue ** 2 / problem.hessian_lipschitz
    np.testing.assert_allclose(found, [at_saddle, 0], atol=1e-5)


# --- what was shown --------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(KEPT.read_text())["rows"]
    return {(row["case"], row["metric"]): row for row in rows}


def test_kept_certificates_hold(kept: dict[tuple[str, str], Any]) -> None:
    """No saddle ever; and ours always where the prototype says "all"."""
    saddles = [
        row for (_, metric), row in kept.items() if metric == "certified saddles"
    ]
    assert len(saddles) >= 40 and all(row["value"] == 0 for row in saddles)
    ours = [
        row
        for (case, metric), row in kept.items()
        if case.startswith("(b)")
        and case.endswith(": certified")
        and metric.startswith("share certified with alpha")
    ]
    assert len(ours) == 4 and all(row["value"] >= 0.95 for row in ours)


def test_kept_figures_are_those_of_the_digest(kept: dict[tuple[str, str], Any]) -> None:
    """But for the records of tracked Hessians, which it seems to have counted otherwise."""
    row = kept["(a) all figures of the prototype", "within sampling error"]
    assert row["ratio"] >= 0.85
    off = (row.get("note") or row["unit"]).split("far off: ")[1].split("; ")
    assert all("tracked" in name and name.endswith("records") for name in off)
