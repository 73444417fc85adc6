"""Levels, batch sizes and refresh times: what is decided before any data are read."""

import math

import numpy as np
import pytest
import scipy.stats

from jaxdp.saddle.theory import charges, levels
from tests.saddle import reference

# --- the law -------------------------------------------------------------------------


def test_law_is_the_digests() -> None:
    """Section 6, test 1."""
    c = [1, 1.5, 1.75, 1.875, 1.9375, 1.96875]
    size = [1, 1.3333, 1.7143, 2.1333, 2.5806, 3.0476]
    assert [levels.normalizer(m) for m in range(6)] == c
    assert [levels.mean_size(m) for m in range(6)] == pytest.approx(size, abs=6e-5)
    want = [0.50794, 0.25397, 0.12698, 0.06349, 0.03175, 0.01587]
    assert levels.pmf(5) == pytest.approx(want, abs=6e-6)
    for m in range(12):
        law = levels.pmf(m)
        assert math.fsum(law) == pytest.approx(1, abs=1e-15)
        assert law @ 2.0 ** np.arange(m + 1) == pytest.approx(levels.mean_size(m))


def test_amplification_is_that_of_the_ramp_functions() -> None:
    """Section 6, test 5: 2 a(N) at M = 6."""
    want = [5.9375, 17.875, 33.75, 65.5, 129.0]
    assert (2 * levels.amplification(6)[:5]).tolist() == want
    assert levels.amplification(0).tolist() == [1.0]


@pytest.mark.parametrize("max_level", [0, 1, 3, 5])
def test_draws_follow_the_law(max_level: int) -> None:
    """Chi-square at a failure probability of 1e-6, for this and the next level."""
    drawn = reference.levels(7, max_level, 40_000)
    assert drawn.dtype == np.int64 and drawn.max() <= max_level
    law = levels.pmf(max_level)
    if max_level == 0:
        assert not drawn.any()
        return
    counts = np.bincount(drawn, minlength=max_level + 1)
    assert scipy.stats.chisquare(counts, law * len(drawn)).pvalue > 1e-6
    pairs = np.bincount(
        drawn[::2] * (max_level + 1) + drawn[1::2], minlength=(max_level + 1) ** 2
    )
    joint = np.outer(law, law).ravel() * (len(drawn) // 2)
    assert scipy.stats.chisquare(pairs, joint).pvalue > 1e-6


def test_draws_are_a_function_of_the_seed() -> None:
    """Public and the same everywhere: these integers are part of what a seed means."""
    assert reference.levels(0, 3, 12).tolist() == FIRST
    assert reference.levels(0, 3, 5).tolist() == FIRST[:5]
    assert reference.levels(1, 3, 12).tolist() != FIRST
    assert reference.levels(np.int64(0), 3, 12).tolist() == FIRST
    assert reference.levels(2**200, 3, 0).tolist() == []


FIRST = [0, 0, 2, 0, 1, 1, 0, 2, 0, 1, 0, 2]


def test_highest_level_is_exact() -> None:
    for u, m in ((1, 0), (3, 0), (4, 1), (15, 1), (16, 2), (4**10 - 1, 9), (4**10, 10)):
        assert levels.largest_level(u) == m


# --- the stopping rule ---------------------------------------------------------------


@pytest.mark.parametrize("vertex_budget", [1, 4, 7, 16, 63, 64, 1000, 2308])
def test_steps_use_the_vertex_budget(vertex_budget: int) -> None:
    """Section 6, test 3."""
    m = levels.largest_level(vertex_budget)
    for seed in range(20):
        found = levels.executed(seed, vertex_budget=vertex_budget)
        used = int(np.sum(2**found))
        assert vertex_budget - 2**m < used <= vertex_budget
        assert found.tolist() == reference.levels(seed, m, len(found)).tolist()


def test_steps_of_level_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_coins", lambda seed: iter(lambda: 1, None))
    assert len(levels.executed(0, vertex_budget=16, max_level=2)) == 13
    assert len(levels.executed(0, vertex_budget=16)) == 13


def test_expected_number_of_steps() -> None:
    """U = 2308, M = 5: at most 757.4; 749.4 was observed. Within 5 standard errors."""
    counts = [len(levels.executed(s, vertex_budget=2308)) for s in range(300)]
    error = np.std(counts) / math.sqrt(len(counts))
    assert abs(np.mean(counts) - 749.4) < 5 * error + 1
    assert np.mean(counts) < 757.4 + 5 * error
    assert error < 5


# --- batches -------------------------------------------------------------------------


@pytest.mark.parametrize("vertex_budget", [16, 231, 2308])
def test_equalized_batches_use_the_data_and_equalize(vertex_budget: int) -> None:
    m, n = levels.largest_level(vertex_budget), 100_000
    for seed in range(5):
        executed = levels.executed(seed, vertex_budget=vertex_budget)
        sizes = levels.equalized(executed, num_examples=n, max_level=m)
        used = int(sizes[executed].sum())
        assert n - len(executed) <= used <= n
        a = levels.amplification(m)
        want = np.floor(n * a / a[executed].sum())
        assert np.array_equal(sizes, want)
        weights = a / sizes
        assert weights.max() / weights.min() < 1 + 2 / sizes.min()


def test_equalized_batches_of_few_records() -> None:
    assert levels.equalized(np.zeros(5, np.int64), num_examples=5, max_level=2)[0] == 1
    with pytest.raises(ValueError, match="num_examples must be enough for 6 steps"):
        levels.equalized(np.zeros(6, np.int64), num_examples=5, max_level=2)
    lopsided = np.array([0] * 9 + [3])  # Level 0 is clamped, and the sum exceeds n.
    with pytest.raises(ValueError, match="num_examples"):
        levels.equalized(lopsided, num_examples=11, max_level=3)


def test_proportional_batches_are_the_papers() -> None:
    assert levels.proportional(3, alpha=0.00462).tolist() == [217, 433, 866, 1732]
    assert levels.proportional(3, alpha=3.0).tolist() == [1, 1, 2, 3]


# --- the filter ----------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["rho", "records", "vertices"])
def test_filter_takes_the_longest_prefix_that_fits(limit: str) -> None:
    m, seed, error = 3, 11, 1e-4
    sizes = np.array([3, 11, 20, 41])
    deltas = np.array([3e-3, 4e-3, 3.5e-3, 3.4e-3]), np.array([1e-3, 2e-3, 0.0, 5e-3])
    n = 500 if limit == "records" else 10_000
    rho = 2e-2 if limit == "rho" else 1.0
    budget = 200 if limit == "vertices" else None
    found = levels.filtered(
        seed,
        max_level=m,
        batch_sizes=sizes,
        deltas_x=deltas[0],
        deltas_y=deltas[1],
        rho=rho,
        num_examples=n,
        vertex_budget=budget,
        error=error,
    )
    longer = reference.levels(seed, m, len(found) + 1)
    assert found.tolist() == longer[:-1].tolist()

    def fits(taken: np.ndarray) -> tuple[bool, bool, bool]:
        x, y = (d[taken] for d in deltas)
        before = int(np.sum(2 ** taken[:-1]))
        return (
            charges.bias_reduced(x, y, taken, error=error) <= rho,
            int(sizes[taken].sum()) <= n,
            budget is None or before <= budget - 2**m,
        )

    assert all(fits(found))
    names = ("rho", "records", "vertices")
    assert fits(longer) == tuple(name != limit for name in names)
    assert len(found) > 20


def test_filter_takes_no_step_without_records() -> None:
    none = levels.filtered(
        0,
        max_level=0,
        batch_sizes=np.array([3]),
        deltas_x=np.ones(1),
        deltas_y=np.ones(1),
        rho=1e-9,
        num_examples=2,
    )
    assert none.shape == (0,) and none.dtype == np.int64
    one = levels.filtered(  # The first step's draws cost nothing.
        0,
        max_level=0,
        batch_sizes=np.array([1]),
        deltas_x=np.ones(1),
        deltas_y=np.ones(1),
        rho=1e-9,
        num_examples=2,
    )
    assert one.tolist() == [0]


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: levels.normalizer(-1), ValueError, "max_level"),
        (lambda: levels.normalizer(31), ValueError, "max_level"),
        (lambda: levels.executed(0.5, vertex_budget=2), TypeError, "seed"),  # pyright: ignore
        (lambda: levels.executed(True, vertex_budget=2), TypeError, "seed"),
        (lambda: levels.executed(0, vertex_budget=0), ValueError, "vertex_budget"),
        (
            lambda: levels.executed(0, vertex_budget=3, max_level=2),
            ValueError,
            "vertex_budget must be an integer >= 4",
        ),
        (lambda: levels.proportional(2, alpha=0.0), ValueError, "alpha"),
        (
            lambda: levels.equalized(np.zeros(1, int), num_examples=0, max_level=1),
            ValueError,
            "num_examples",
        ),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_filter_errors() -> None:
    ones = np.ones(2)
    with pytest.raises(ValueError, match="vertex_budget"):
        levels.filtered(
            0,
            max_level=1,
            batch_sizes=ones,
            deltas_x=ones,
            deltas_y=ones,
            rho=1.0,
            num_examples=5,
            vertex_budget=1,
        )
