"""Measured marginals: what is released, the fit to it, the choice, and the draws."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import plans
from jaxdp.core import keys as keys_lib
from jaxdp.data import binning, quality, synthesis

SIZES = (4, 2, 3)
BUDGET: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}


def codes_of(n: int, seed: int = 0) -> np.ndarray:
    """Draws records whose first two columns depend on each other."""
    rng = np.random.default_rng(seed)
    first = rng.choice(4, n, p=[0.4, 0.3, 0.2, 0.1])
    second = (rng.random(n) < np.where(first < 2, 0.8, 0.1)).astype(int)
    return np.ravel_multi_index((first, second, rng.integers(0, 3, n)), SIZES)


def reference(codes: np.ndarray, sets: Any) -> np.ndarray:
    """Counts shares by NumPy, marginal by marginal."""
    inside = codes[codes >= 0]
    table = np.bincount(inside, minlength=24).reshape(SIZES) / len(inside)
    axes = range(len(SIZES))
    tables = (table.sum(tuple(a for a in axes if a not in one)) for one in sets)
    return np.concatenate([one.reshape(-1) for one in tables])


SETS = [*((i,) for i in range(3)), *itertools.combinations(range(3), 2)]


# --- queries and their plan --------------------------------------------------------


def test_marginals_of_several_degrees() -> None:
    queries = synthesis.marginals(SIZES, (2, 1))
    assert list(queries.columns) == SETS
    assert synthesis.marginals(SIZES, (2,)).columns == ((0, 1), (0, 2), (1, 2))
    for degrees, said in (
        ((0,), ">= 1 and <= 3, got 0"),
        ((1, 4), "got 4"),
        ((1, 1), "different"),
    ):
        with pytest.raises(ValueError, match=f"^degree must be .*{said}"):
            synthesis.marginals(SIZES, degrees)


def test_cells_of_a_code_are_the_queries_that_are_1() -> None:
    queries = synthesis.marginals(SIZES, (1, 2))
    found = np.asarray(queries.cells_of(jnp.arange(24)))
    assert found.shape == (24, 6)
    every = np.stack(
        [np.asarray(queries.values(j)) for j in range(queries.num_queries)]
    )
    for code in range(24):
        np.testing.assert_array_equal(np.flatnonzero(every[:, code] > 0), found[code])


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_shares_are_the_true_ones_and_the_plans_noise(relation: Any) -> None:
    """Each of 32 x 8 cells has Gaussian noise of the plan's deviation.

    The sum of squares of 255 normal numbers: beyond these quantiles with 1e-7 each.
    """
    sizes = (32, 8)
    codes = np.random.default_rng(0).integers(0, 256, 500)
    queries = synthesis.marginals(sizes, (2,))
    choice = synthesis.planned(queries, num_examples=500, relation=relation, **BUDGET)
    assert isinstance(choice.plan, plans.MWEM)
    assert choice.plan.num_steps == 1
    assert choice.plan.epsilon() == pytest.approx(2, rel=1e-3)
    result = synthesis.release(choice, jaxdp.Keys.insecure(1), codes, queries)
    assert result.measured is not None
    true = np.bincount(codes, minlength=256) / 500
    z = (result.measured.shares - true) / choice.plan.noise_std
    assert np.sum(z) == pytest.approx(0, abs=1e-2)  # Whose sum is made one.
    assert 150 < np.sum(z**2) < 394
    assert result.measured.noise_stds == pytest.approx([choice.noise_std])
    assert result.report["num_steps"] == 1


def test_records_outside_count_as_uniform() -> None:
    queries = synthesis.marginals(SIZES, (1, 2))
    codes = np.where(np.arange(1000) < 400, codes_of(1000), -1)
    choice = synthesis.planned(
        queries, num_examples=1000, relation="replace_one", epsilon=40.0, delta=1e-5
    )
    # Of which 32 bits are the code of the first cell.
    given = np.where(np.arange(1000) < 700, codes, 2**32)
    result = synthesis.release(choice, jaxdp.Keys.insecure(0), given, queries)
    assert result.measured is not None and choice.noise_std is not None
    cells = np.diff(queries.offsets)
    wanted = 0.4 * reference(codes, SETS) + 0.6 * np.repeat(1 / cells, cells)
    shares = result.measured.shares
    np.testing.assert_allclose(shares, wanted, atol=7 * choice.noise_std)


#: Records of two columns, by their cells; the last of each are the blanks.
CELLS = np.array([[3, 1], [1, 1], [0, 0], [2, 1], [0, 2], [0, 0], [1, 0], [2, 0]] * 100)
TEXTS = [[("0", "1", "2", "NA")[a], ("x", "y", "")[b]] for a, b in CELLS.tolist()]
UNMARKED: Any = {"a": {"edges": [0, 1, 2, 3]}, "b": {"values": ["x", "y"]}}
MARKED = {name: one | {"missing": "mark"} for name, one in UNMARKED.items()}


def distance(one: np.ndarray, other: np.ndarray, axes: tuple[int, ...] = ()) -> float:
    return np.abs((one - other).sum(axes)).sum() / 2


@pytest.mark.parametrize(
    ("method", "spec"),
    [("marginals", MARKED), ("marginals", UNMARKED), ("mwem", UNMARKED)],
)
def test_intervals_hold_the_distance_to_a_table_with_blanks(
    method: Any, spec: Any
) -> None:
    """Where blanks are marked; else to the table over which such records are spread.

    Of 100 runs an interval of 95% misses more than 20 with probability 2.1e-8. They take
    over 10 s where cores are shared, and fewer would not see noise that is told too small.
    """
    bins = binning.binning(spec)
    private = np.zeros((4, 3))
    np.add.at(private, tuple(CELLS.T), 1 / len(CELLS))
    rows, columns = bins.sizes
    described = private[:rows, :columns]
    share = 0.25 if spec is UNMARKED else 0.0
    assert described.sum() == pytest.approx(1 - share)
    spread = described + share / described.size
    codes, queries = bins.encode(TEXTS), synthesis.marginals(bins.sizes, (1, 2))
    choice = synthesis.planned(
        queries, num_examples=800, relation="replace_one", method=method, **BUDGET
    )
    missed: Any = dict.fromkeys(((0,), (1,), (0, 1), "share", "private"), 0)
    for seed in range(100):
        keys = jaxdp.Keys.insecure(seed)
        found = synthesis.release(choice, keys, codes, queries)
        assert found.measured is not None and found.outside is not None
        records = synthesis.drawn(keys, found.histogram, 800)
        own = np.bincount(records, minlength=bins.domain_size) / 800
        table, counts = own.reshape(bins.sizes), quality.measured(found.measured)
        for axes, noised in counts.tables.items():
            others = tuple(i for i in range(2) if i not in axes)
            low, high = quality.distance_interval(
                table.sum(others), noised, counts.stds[axes]
            )
            missed[axes] += not low <= distance(table, spread, others) <= high
            if not others:
                full = np.pad(table, ((0, 4 - rows), (0, 3 - columns)))
                missed["private"] += not low <= distance(full, private) <= high
        low, high = found.outside
        missed["share"] += not low <= share <= high
        assert high - low < 0.1
    if spec is UNMARKED:
        assert missed.pop("private") > 75
    assert max(missed.values()) <= 20


# --- the choice --------------------------------------------------------------------


def test_rounds_are_taken_where_noise_would_drown_tables() -> None:
    """By public numbers: 9 cells a pair, at 0.1 of total variation."""
    queries = synthesis.marginals((3,) * 6, (2,))
    size: dict[str, Any] = {"relation": "replace_one", "epsilon": 1.0, "delta": 1e-5}
    found = {n: synthesis.planned(queries, num_examples=n, **size) for n in (300, 3000)}
    few, many = found[300], found[3000]
    assert (few.method, many.method) == ("mwem", "marginals")
    assert isinstance(few.plan, plans.MWEM) and isinstance(many.plan, plans.MWEM)
    assert (few.plan.num_start, few.plan.num_steps) == (6, 1 + 6)
    assert few.plan.attributes[:7] == (*((i,) for i in range(6)), (0, 1))
    assert (many.plan.num_start, many.plan.num_steps) == (15, 1)
    noise = synthesis.expected_noise(queries, many.plan.noise_std)
    assert noise == pytest.approx(9 * many.plan.noise_std / math.sqrt(2 * math.pi))
    assert f"each of 15 tables by {noise:.2g} in total" in many.reason
    assert many.reason.endswith("not over 0.1") and few.reason.endswith("over 0.1")
    # Rounds would measure as many: 3 columns and 3 more.
    small = synthesis.marginals(SIZES, (2, 1))
    why = "marginals", "6 tables are no more than rounds would measure"
    assert synthesis.chosen(small, 1.0) == why


# --- the other method --------------------------------------------------------------


def test_mirror_descent_is_the_plan_of_its_paper() -> None:
    queries = synthesis.marginals(SIZES, (2,))
    choice = synthesis.planned(
        queries,
        num_examples=5000,
        relation="zero_out",
        method="mirror_descent",
        num_steps=50,
        **BUDGET,
    )
    assert isinstance(choice.plan, plans.SyntheticData)
    assert choice.plan.num_queries == 2 * queries.num_queries
    assert 1.9 < choice.plan.epsilon() <= 2
    result = synthesis.release(choice, jaxdp.Keys.insecure(0), codes_of(5000), queries)
    assert result.measured is None
    assert result.histogram.sum() == pytest.approx(1, abs=1e-5)


# --- records -----------------------------------------------------------------------


def test_records_are_as_many_as_expected_of_every_cell() -> None:
    histogram = np.random.default_rng(0).dirichlet(np.ones(24)).astype(np.float32)
    histogram[[0, 5, 23]] = 0
    expected = 777 * histogram / histogram.sum()
    for seed in range(20):
        codes = synthesis.drawn(jaxdp.Keys.insecure(seed), histogram, 777)
        counts = np.bincount(codes, minlength=24)
        assert counts.sum() == 777
        assert np.all(np.abs(counts - expected) < 1 + 1e-3)
        assert not counts[[0, 5, 23]].any()
        assert np.any(np.diff(codes) < 0)  # In no order.


def test_draws_of_a_rare_cell_are_unbiased(monkeypatch: Any) -> None:
    """1000 draws of one record, of probability 1/4: within 5.3 deviations (1e-7)."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(keys_lib, "uniforms", lambda keys, shape: rng.random(shape))
    histogram = np.array([0.75, 0.25], np.float32)
    keys = jaxdp.Keys.insecure(0)
    hits = sum(int(synthesis.drawn(keys, histogram, 1)[0]) for _ in range(1000))
    assert abs(hits - 250) < 5.3 * math.sqrt(1000 * 0.25 * 0.75)
