"""A private choice among candidates: its integers, its law, its charge, its refusals."""

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxdp
import jaxdp.saddle.algorithms.frank_wolfe as wolfe
from jaxdp import Keys, metrics
from jaxdp.core import keys as keys_lib
from jaxdp.core.types import UserRecords
from jaxdp.kernels import simplex
from jaxdp.metrics.private_choice import PrivateChoice
from jaxdp.saddle.algorithms import players
from jaxdp.saddle.oracles import Bound
from jaxdp.saddle.oracles.candidates import Candidates
from tests.saddle import reference

C = 0.5
NAN, INF = np.nan, np.inf


def losses(k: Any, batch: Any) -> jax.Array:
    """Candidate k has the loss that is in column k of a record."""
    return batch[:, k]


def centred(column: jax.Array) -> jax.Array:
    """Subtracts the mean of all that Python is given, which ``vmap`` makes the batch."""
    return jax.pure_callback(
        lambda x: np.asarray(x - np.mean(x)),
        jax.ShapeDtypeStruct(column.shape, column.dtype),
        column,
        vmap_method="expand_dims",
    )


def candidates(num: int) -> list[Any]:
    return [jnp.int32(k) for k in range(num)]


def choose(table: Any, *, seed: int = 0, **changes: Any) -> PrivateChoice:
    """A choice by the losses (n, K) of a table."""
    table = np.asarray(table, np.float32)
    options: dict[str, Any] = {
        "epsilon": 2.0,
        "relation": "replace_one",
        "num_examples": len(table),
        "linf_clip_norm": C,
    }
    given = {"candidates": candidates(table.shape[1]), "loss": losses, "data": table}
    given |= changes
    loss, of, data = (given.pop(name) for name in ("loss", "candidates", "data"))
    return metrics.private_choice(
        loss, of, data, Keys.insecure(seed), **options | given
    )


def plainly(table: Any, plan: Any) -> np.ndarray:
    """The scores in whole numbers: median, clip, grid, sum, scale, one after the other."""
    total = np.zeros(plan.dim, np.int64)
    for row in np.asarray(table, np.float64):
        known = row[np.isfinite(row)]
        if len(known):
            apart = np.where(np.isfinite(row), row - np.median(known), INF)
            units = np.clip(apart, -C, C) / C * 2**plan.grid_bits
            total += np.rint(units).astype(np.int64)
    down = reference.floored(total - total.min(), plan.grid)
    return np.maximum(-down, simplex.LOWEST)


def scores(
    monkeypatch: pytest.MonkeyPatch, table: Any, **changes: Any
) -> tuple[np.ndarray, Any]:
    """What is drawn from, and the plan."""
    with monkeypatch.context() as patch:
        script = reference.Script()
        patch.setattr(players, "draw", script.draw)
        found: list[Any] = []
        (seen,) = script.run(
            [np.array([1])], lambda: found.append(choose(table, **changes))
        )
    assert found[0].index == 1
    return seen, found[0].plan


def counts_of(plan: Any, tables: Any, num: int) -> np.ndarray:
    """How often each candidate is chosen with ``num`` keys, by the program that chooses."""

    def one(table: Any, seed: jax.Array) -> jax.Array:
        algorithm = wolfe.frank_wolfe(plan, Keys.insecure(seed))
        problem = Candidates(losses, candidates(plan.dim))
        state = algorithm.init(jnp.asarray(plan.uniform()))
        return algorithm.step(state, table, value_fn=problem)[1].release[0]

    seeds = jax.vmap(one, in_axes=(None, 0))
    program = jax.jit(
        lambda tables: jax.lax.map(lambda t: seeds(t, jnp.arange(num)), tables)
    )
    drawn = np.asarray(program(jnp.asarray(tables, jnp.float32)), int)
    return np.array([np.bincount(of, minlength=plan.dim) for of in drawn])


# Sixty-fourths, so that no rounding of float32 tells the two ways apart.
TABLE = np.random.default_rng(0).integers(-64, 64, (9, 5)) / 64
SPOILT = TABLE.copy()
SPOILT[0, :] = NAN  # counts zero
SPOILT[1, :] = -INF  # as well
SPOILT[2, 1], SPOILT[2, 3] = NAN, INF  # count as the largest
SPOILT[3, :4] = -INF  # one loss alone is finite
SPOILT[4, 2] = 3e38
SPOILT[5, :2] = 3e38, -3e38


@pytest.mark.parametrize("table", [TABLE, SPOILT, TABLE[:, :2]])
def test_scores_are_those_of_the_plain_rule(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plan = scores(monkeypatch, table)
    np.testing.assert_array_equal(found, plainly(table, plan))


def test_rows_of_nan_and_microbatches_change_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record that is absent leaves its row; how many are read at once is no matter."""
    padded = np.concatenate([TABLE, np.full((3, 5), NAN)])
    want, _ = scores(monkeypatch, padded, relation="add_or_remove")
    for size in (5, 12):
        moved = np.roll(padded, size, axis=0)
        found, plan = scores(
            monkeypatch, moved, relation="add_or_remove", microbatch_size=size
        )
        np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(want, plainly(TABLE, plan))


@pytest.mark.parametrize(("relation", "kappa"), [("replace_one", 2), ("zero_out", 1)])
def test_sensitivity_of_every_neighbour(relation: Any, kappa: int) -> None:
    """All pairs of records with losses in {-9, 0, .25, 9, NaN}^3, on integers; reached."""
    values = (-9.0, 0.0, 0.25, 9.0, NAN)
    records = np.array(list(itertools.product(values, repeat=3)), np.float32)
    problem, bound = Candidates(losses, candidates(3)), Bound(C, 8)

    def total(record: jax.Array) -> jax.Array:
        """Sums over this record and a fixed one."""
        batch = jnp.stack([record, jnp.array([0.5, -0.25, 3.0])])
        mask = jnp.ones(2, bool)
        point = jnp.ones(3)
        return problem.gradient_sums(point, None, batch, mask, bound, None)[0]

    sums = np.asarray(jax.jit(jax.vmap(total))(records))
    none = np.asarray(total(jnp.full(3, NAN)))
    others = sums if relation == "replace_one" else none[None]
    moved = np.abs(sums[:, None] - others[None])
    assert moved.max() == kappa * 2**8
    # In opposite directions for two candidates: the whole range is needed.
    assert np.ptp(sums[:, None] - others[None], axis=-1).max() == 2 * kappa * 2**8
    assert np.all(sums[np.isnan(records).all(axis=1)] == none)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out", "add_or_remove"])
def test_draws_are_within_what_is_charged(
    relation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the exact laws of neighbours, pure and Renyi; almost all of it is reached."""
    one, other = TABLE.copy(), TABLE.copy()
    one[4] = 30, 30, 0, -30, -30
    other[4] = -one[4] if relation == "replace_one" else NAN
    (a, plan), (b, _) = (
        scores(monkeypatch, t, relation=relation) for t in (one, other)
    )
    assert plan.epsilon(delta=0.0) <= 2.0
    charged = 2 * (plan.sensitivity + simplex.LOG_ERROR)
    assert charged == pytest.approx(2.0, rel=1e-4)
    assert reference.check_draw(a, b, plan.sensitivity) > 0.99


def test_candidates_are_drawn_from_the_law() -> None:
    """Chi-square of 2**14 draws: by chance with 1e-6; another temperature fails."""
    table = np.concatenate([TABLE[:4, :3], np.zeros((4, 3))])
    plan = choose(table, epsilon=4.0).plan
    (counts,) = counts_of(plan, table[None], 2**14)
    want = reference.law(plainly(table, plan))
    assert min(want) > 0.05

    def p_value(law: np.ndarray) -> float:
        return float(scipy.stats.chisquare(counts, law / law.sum() * 2**14).pvalue)

    assert p_value(want) > 1e-6 > max(p_value(want**1.2), p_value(want**0.8))


def test_the_caller_s_keys_draw() -> None:
    """Of records that count zero: one index of two for all keys has a chance of 2**-19."""
    table = np.full((300, 2), np.nan)
    assert {choose(table, seed=seed).index for seed in range(20)} == {0, 1}


def test_an_audit_finds_no_more_than_epsilon() -> None:
    """A record that is zeroed is told from it, within epsilon; but for 1e-6.

    One that is replaced, of which the plan knows nothing, is seen to cost more.
    """
    table = np.zeros((5, 2))
    table[0], table[1] = (-9, 9), (9, -9)
    zeroed, replaced = table.copy(), table.copy()
    zeroed[1], replaced[1] = NAN, (-9, 9)
    plan = choose(table, relation="zero_out", epsilon=3.0).plan
    num, level = 2**14, 5e-7 / 2
    p, *others = counts_of(plan, [table, zeroed, replaced], num)[:, 1]
    low = scipy.stats.beta.ppf(level, p, num - p + 1)
    found = [
        math.log(low / scipy.stats.beta.isf(level, q + 1, num - q)) for q in others
    ]
    assert 2.0 < found[0] < 3.0 < found[1]


def test_blank_records_count_zero_whatever_the_loss_makes_of_them() -> None:
    """A loss that compares is finite on NaN, and other at each candidate."""

    def wrong(side: jax.Array, batch: Any) -> jax.Array:
        return jnp.where(batch["x"] > 0, side[0], side[1]) != batch["y"]

    given = [jnp.array([0.0, 0.0]), jnp.array([0.0, 1.0])]
    problem = Candidates(lambda *of: wrong(*of).astype(jnp.float32), given)
    x, y = np.full(5, -1.0, np.float32), np.ones(5, np.int32)
    x[0], y[0] = np.nan, 0
    totals = [
        problem.gradient_sums(
            *(jnp.full(2, 0.5), None, {"x": x, "y": y}, jnp.asarray(kept)),
            *(Bound(0.5, 16), None),
        )[0]
        for kept in (np.ones(5, bool), np.arange(5) > 0)
    ]
    np.testing.assert_array_equal(*totals)
    assert totals[0].any()


def test_one_candidate_far_off_hides_no_difference() -> None:
    """A diverged one is not chosen, and the best of the others is; but for 1e-6."""
    table = np.tile([0.3, 0.1, 0.6, NAN, 1e30], (60, 1))
    found = choose(table, epsilon=4.0)
    assert found.index == 1
    assert reference.law(plainly(table, found.plan))[1] > 1 - 1e-6


def test_the_chosen_is_as_good_as_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the exact law: the mean exceeds the least by no more, but for p."""
    rng = np.random.default_rng(1)
    table = rng.integers(-16, 17, (60, 40)) / 64
    table[:, 7] -= 0.25
    found, _ = scores(monkeypatch, table, epsilon=2.0)
    middle = np.median(table, axis=1, keepdims=True)
    means = np.clip(table - middle, -C, C).mean(axis=0)
    for p in (0.5, 0.3, 0.1, 0.01):
        most = 2 * 2 * C * math.log(40 / p) / (60 * 2.0)
        worse = means - means.min() > most * (1 + 1e-4)
        assert reference.law(found)[worse].sum() <= p


def test_returns_the_parameters_that_were_given() -> None:
    """Of any structure; evaluated record by record at the parameters of each."""
    rng = np.random.default_rng(2)
    data = rng.normal(size=(300, 2)).astype(np.float32)
    given = [{"w": jnp.full(2, c), "b": np.float32(0)} for c in (3.0, 0.0, -3.0)]

    def value_fn(params: Any, batch: Any) -> jax.Array:
        assert batch.shape == (1, 2)
        return jnp.sum((batch - params["w"]) ** 2, axis=1) + params["b"]

    found = metrics.private_choice(
        *(value_fn, given, data, Keys.from_entropy()),
        epsilon=2.0,
        relation="zero_out",
        num_examples=300,
        linf_clip_norm=1.0,
    )
    assert found.index == 1  # But for 1e-6: every other is worse by 1.
    assert found.params is given[1]


def test_users_who_are_not_there_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loss makes of one."""
    records = np.tile(np.array([1.0, 0.0, 5.0], np.float32), (6, 2, 1))
    there = np.arange(6)[:, None] < np.array([4, 2])
    found = []
    for lost in (0.0, 100.0):
        script = reference.Script()
        monkeypatch.setattr(players, "draw", script.draw)

        def value_fn(k: Any, of: Any, lost: float = lost) -> jax.Array:
            gone = ~of.mask.any(axis=1)
            return of.records[:, 0, k] + lost * gone * (k == 1)

        def program(value_fn: Any = value_fn) -> Any:
            return metrics.private_choice(
                *(value_fn, candidates(3), UserRecords(records, there)),
                Keys.insecure(0),
                epsilon=1.0,
                relation="zero_out",
                num_examples=6,
                linf_clip_norm=1.0,
            )

        found += script.run([np.array([0])], program)
    np.testing.assert_array_equal(*found)
    assert found[0].argmax() == 1


def test_it_is_reserved_before_it_is_made(tmp_path: Path) -> None:
    """A second one that the budget refuses, or keys that are spent, cost nothing."""
    budget = jaxdp.Budget.create(
        tmp_path, epsilon=3.0, delta=1e-6, relation="replace_one"
    )
    found = choose(TABLE, budget=budget)
    (made,) = budget.reservations
    assert (made.what, made.delta) == ("private choice", 0.0)
    assert made.epsilon == pytest.approx(float(found.plan.epsilon(delta=0.0)))
    with pytest.raises(ValueError, match="budget"):
        choose(TABLE, budget=budget)
    keys = Keys.from_entropy()
    given: Any = (losses, candidates(5), np.float32(TABLE), keys)
    options: Any = {"epsilon": 0.75, "relation": "replace_one", "linf_clip_norm": C}
    for wrong in (
        lambda: metrics.private_choice(*given, num_examples=8, **options),
        lambda: metrics.private_choice(
            lambda k, batch: jnp.sum(batch), *given[1:], num_examples=9, **options
        ),
    ):
        with pytest.raises(ValueError):
            wrong()
    keys_lib.check_unspent(keys, "run")  # What is refused spends no keys.
    metrics.private_choice(*given, num_examples=9, **options)
    with pytest.raises(ValueError, match="already served"):
        metrics.private_choice(*given, num_examples=9, **options, budget=budget)
    assert budget.reservations == (made,)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"relation": "swap"}, ValueError, "relation"),
        ({"linf_clip_norm": -1.0}, ValueError, "linf_clip_norm"),
        ({"num_examples": 8}, ValueError, "num_examples"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size"),
        ({"budget": 3.0}, TypeError, "budget must be"),
        ({"candidates": candidates(1)}, ValueError, "at least two pytrees"),
        ({"candidates": jnp.arange(3)}, TypeError, "must be a sequence"),
        ({"candidates": [None, None]}, ValueError, r"got None .* at candidates\[0\]"),
        ({"candidates": ["a", "b"]}, TypeError, r"got one of str at candidates\[0\]"),
        (
            {"candidates": [{"k": 0}, {"k": np.array(["b"])}]},
            TypeError,
            r"got one of <U1 at candidates\[1\]\['k'\]",
        ),
        ({"loss": 3}, TypeError, "value_fn must be callable, got 3"),
        ({"data": "x"}, TypeError, r"data must be arrays .* got a str at data"),
        (
            {"candidates": [jnp.int32(0), jnp.zeros(2, jnp.int32)]},
            ValueError,
            "candidate 1 differs from candidate 0",
        ),
        ({"loss": lambda k, batch: batch}, ValueError, r"shape \(B\)"),
        (
            {"loss": lambda k, batch: centred(batch[:, k])},
            ValueError,
            "record by record",
        ),
    ],
)
def test_refusals(changes: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        choose(TABLE, **changes)
