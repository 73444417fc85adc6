"""The table of private saddle points: its rows are honest, and what it has shown."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow

BENCH = "saddle"  # For the fixture `bench`.

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "cpu" / "saddle.json"


def made(bench: Any, mean: float, **more: Any) -> Any:
    """A cell of 20 values with this mean and a standard deviation of .01."""
    values = np.linspace(-1, 1, 20)
    values = mean + 0.01 * values / np.std(values, ddof=1)
    usual = {"table": "a", "method": "algorithm 1, certified", "n": 10_000, "d": 10}
    usual |= more
    size = bench.cells.size(usual["n"], usual["d"])
    return bench.Cell(
        size=size, metric="gap", values=tuple(map(float, values)), **usual
    )


# --- honesty ---------------------------------------------------------------------------


def test_a_planted_number_is_seen(bench: Any) -> None:
    """The interval of both means is 2.09 * .01 * sqrt(1/20 + 1/20) + .0005 = .0071."""

    def told(value: float, **more: Any) -> str:
        prototype = bench.cells.Prototype(value, **{"runs": 20} | more)
        (row,) = bench.cells.rows(made(bench, 0.3, prototype=prototype))
        assert (row.baseline, row.ratio) == ("prototype", pytest.approx(0.3 / value))
        return row.note.rsplit(": ", 1)[1]

    assert told(0.3068) == told(0.2932) == "agrees"
    assert told(0.3075) == told(0.2925) == "differs"
    assert told(0.314) == told(0.286) == "far off"
    # Fewer runs and fewer digits say less.
    assert told(0.3075, runs=5) == told(0.3075, digits=2) == "agrees"


def test_all_cells_are_counted(bench: Any) -> None:
    prototype = bench.cells.Prototype(0.3, 20)
    good = made(bench, 0.3, prototype=prototype)
    bad = made(bench, 0.2, prototype=prototype, d=100)
    (row,) = bench.cells.agreement([good, bad, made(bench, 0.1)])
    assert (row.value, row.ratio) == (1, 0.5)
    assert row.note.startswith("of 2") and "d = 100" in row.note


def test_an_exceeded_bound_is_seen(bench: Any) -> None:
    below, above = (
        bench.cells.rows(made(bench, 0.3, bound=bound))[1] for bound in (0.31, 0.29)
    )
    assert (below.note, above.note) == ("not exceeded", "EXCEEDED")
    assert below.ratio == pytest.approx(0.31 / 0.3)


def test_cells_are_kept(bench: Any, tmp_path: Any) -> None:
    cell = made(
        bench, 0.3, prototype=bench.cells.Prototype(0.3, 4, 4), facts={"a": 1.0}
    )
    bench.cells.save(tmp_path / "x" / "part.json", [cell])
    assert bench.cells.load(tmp_path / "x" / "part.json") == [cell]
    # A part that is kept is not measured again.
    first = bench.run_part("one", lambda: [cell], tmp_path)
    assert first == bench.run_part("one", list, tmp_path) == [cell]


def test_slopes_and_growths(bench: Any) -> None:
    """Relative errors of the means are .01 / sqrt(20) / mean."""
    some = [made(bench, 30 / math.sqrt(n), n=n) for n in (10_000, 100_000)]
    m = bench.cells.slope(some)
    errors = [0.01 / math.sqrt(20) / cell.mean for cell in some]
    half = 2.093 * np.linalg.norm(errors) / math.log(10)
    assert m == (pytest.approx(-0.5), pytest.approx(half, rel=1e-3))
    value, low, high = bench.cells.growth(some)
    assert value == pytest.approx(10**-0.5)
    assert low * high == pytest.approx(value**2)
    assert low < value < high


def test_rows_and_plot(bench: Any, tmp_path: Any) -> None:
    names = (
        bench.games.PLAIN,
        bench.games.ALIKE,
        bench.games.SGDA_PLAIN,
        bench.games.SGDA_ALIKE,
    )
    found = [
        made(bench, 0.1 * i * math.log(d), table="b", method=name, n=n, d=d)
        for i, name in enumerate(names, 1)
        for n in (10_000, 100_000)
        for d in (10, 1000)
    ]
    found += [made(bench, 0.3), made(bench, 0.1, n=100_000)]
    rows = {(row.case, row.metric): row for row in bench.report(found)}
    grown = rows[f"(b) n = 100000, {names[0]}", "growth, d = 10 to 1000"]
    assert grown.value == pytest.approx(3)
    other = rows[f"(b) n = 10000, d = 10, {names[1]}", "gap over the other's"]
    assert (other.baseline, other.value) == (names[3], pytest.approx(0.5))
    slope = rows["(a) d = 10", "slope in n"]
    assert slope.value == pytest.approx(math.log10(1 / 3))
    bench.plots.save(bench.draw(found), tmp_path / bench.PNG)
    assert (tmp_path / bench.PNG).read_bytes().startswith(b"\x89PNG")


def test_parts(bench: Any) -> None:
    """All cells of the five tables are among the kept study's."""
    full = bench.full_parts()
    assert len(full) == len(set(full))
    for table, least in (("a_", 17), ("b_", 13), ("c_", 4), ("d_", 14), ("e_", 18)):
        assert sum(name.startswith(table) for name in full) == least
    assert len(bench.quick_parts()) < len(full) / 2


# --- runs ------------------------------------------------------------------------------


def test_explicit_bound_at_the_smallest_size(bench: Any) -> None:
    """The spread of a run is .06; 6 seeds and the prototype's 20: .19 is six errors."""
    (cell,) = bench.games.explicit(10, 1000, range(6))
    assert cell.prototype.value == 0.676
    assert cell.mean == pytest.approx(0.676, abs=0.19)
    assert len(set(cell.values)) > 1 and cell.mean < cell.bound
    assert cell.note.startswith("T = 100")


def test_all_vertices_are_in_the_releases(bench: Any) -> None:
    """The output is the mean of one of each two that were drawn."""
    d = 10
    g, problem = bench.games.game(d)
    plan = bench.games.by_steps(1000, d, 32)
    assert plan.epsilon(delta=1e-6) == pytest.approx(1, rel=1e-3)
    result = bench.games.fit(plan, problem, g.make_data(1000, 0), 0)
    drawn = np.asarray(result.info.releases).astype(int)
    for i, (point, every) in enumerate(
        zip(result.params, bench.games.all_vertices(result, d), strict=True)
    ):
        fresh = np.bincount(drawn[:, 2 * i + 1], minlength=d) / 32
        np.testing.assert_allclose(point, fresh, atol=1e-6)
        seen = np.bincount(drawn[:, 2 * i], minlength=d) / 32
        np.testing.assert_allclose(every, (fresh + seen) / 2, atol=1e-6)


def test_plans_of_tables_d_and_e(bench: Any) -> None:
    """All that call themselves certified spend all of epsilon, and "range 2" half of it."""
    for name, plan in bench.simplex.convex_plans(10_000).items():
        assert plan.epsilon(delta=1e-6) <= 1 + 1e-6
        if name in ("certified", "T = 64", "T = 256"):
            assert plan.epsilon(delta=1e-6) == pytest.approx(1, rel=1e-3)
    of = bench.simplex.synthetic_plans(10_000)
    for t in (300, 1000, 3000):
        one, two = (of[f"T = {t}, range {r}"] for r in (1, 2))
        assert one.epsilon(delta=1e-6) == pytest.approx(1, rel=1e-3)
        assert two.step_size_y / one.step_size_y == pytest.approx(1 / 2, rel=1e-2)
    assert of["printed T"].num_steps == 104
    assert of["corrected T"].num_steps == 247


# --- what was shown --------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(KEPT.read_text())["rows"]
    return {(row["case"], row["metric"]): row for row in rows}


def test_kept_cells_are_those_of_the_prototype(
    kept: dict[tuple[str, str], Any],
) -> None:
    """Chance alone lets one cell in twenty differ; bounds are never exceeded."""
    for table in ("(a)", "(e)"):
        found = kept[f"{table} all cells", "within sampling error"]
        assert (
            "far off: none" in (found.get("note") or found["unit"])
            and found["ratio"] >= 0.8
        )
    tuned = [
        row
        for (case, metric), row in kept.items()
        if case.endswith("algorithm 1, T tuned") and metric == "gap"
    ]
    assert len(tuned) == 6
    for row in tuned:
        assert "far off" not in (row.get("note") or row["unit"])
        assert row["ratio"] == pytest.approx(1, abs=0.3)
    bounds = [row for (_, metric), row in kept.items() if metric == "bound"]
    assert len(bounds) >= 11
    assert all((row.get("note") or row["unit"]) == "not exceeded" for row in bounds)


def test_kept_rates(kept: dict[tuple[str, str], Any]) -> None:
    """-.52 and -.53 with the prototype, -1/2 in theory."""
    for d in (10, 100):
        slope = kept[f"(a) d = {d}", "slope in n"]["value"]
        assert slope == pytest.approx(-0.525, abs=0.05)


def test_kept_growth_with_the_dimension(kept: dict[tuple[str, str], Any]) -> None:
    metric = "growth, d = 10 to 1000"
    one = kept["(b) n = 100000, algorithm 1, T tuned", metric]
    other = kept["(b) n = 100000, DP-SGDA, T and step tuned", metric]
    assert one["value"] <= 3 < other["value"]


def test_kept_certified_is_worth_it(kept: dict[tuple[str, str], Any]) -> None:
    """Three times the step at the same epsilon, of which the paper's spends a quarter."""
    for n in (10_000, 100_000):
        case = f"(paper) n = {n}, d = 100, theorem 4.1"
        assert kept[case, "epsilon"]["value"] == pytest.approx(0.282, abs=0.01)
        longer = kept[f"{case}'s T, all of epsilon", "step size over the paper's"]
        assert longer["value"] == pytest.approx(3.28, abs=0.05)
        better = kept[f"{case}'s T, all of epsilon", "gap over the paper's parameters'"]
        assert better["value"] < 0.8


def test_kept_synthetic_data_beside_mwem(kept: dict[tuple[str, str], Any]) -> None:
    for n in (10_000, 100_000):
        row = kept[f"(e) n = {n}, best of algorithm 5", "largest error over MWEM's"]
        assert row["baseline"] == "MWEM" and row["ratio"] > 0
        assert kept[f"(e) n = {n}, MWEM, tuned", "largest error"]["value"] > 0
