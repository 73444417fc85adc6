"""The reference's escapes by hand: what the library is compared with is as it is meant.

It runs reference.py alone; a comparison then shows it of the library
(test_against_reference.py).
"""

import math
from typing import Any

import numpy as np
import pytest

from tests.sosp import reference as ref
from tests.sosp.cases import (
    Records,
    Scripted,
    Streams,
    branches,
    constant,
    oracles,
    plan,
)


def test_an_escape_by_hand() -> None:
    """From (0, 0) of (-x^2 + y^2) / 2 with step 1: pushed to x = -.1, then doubled.

    x_a - x: .1, .2, .4, .8; the radius .5 is reached by the fourth step.
    """
    hess = np.diag([-1.0, 1.0])
    records = ref.run(
        plan(trigger_norm=0.05, escape_steps=6, num_steps=6),
        np.zeros(2),
        np.zeros((400, 2)),
        **constant(lambda x: hess @ x, hess),
        noise=Scripted(np.array([0.1, 0.0])),
    )
    assert branches(records) == "rnnndd"
    assert [r.triggered for r in records] == [True] + [False] * 5
    assert [r.x[0] for r in records[1:5]] == pytest.approx([-0.1, -0.2, -0.4, -0.8])
    assert [r.left for r in records[:4]] == [5, 4, 3, 2]
    assert [r.esc for r in records] == [True] * 3 + [False] * 3
    assert records[0].reads == [("gradient", 0, 0, 10), ("product", 0, 10, 17)]
    # Product by product: none at the anchor, then what the eigenvalue says.
    assert records[0].product_bound == 0
    np.testing.assert_array_equal(records[0].product, [0, 0])
    assert records[3].product == pytest.approx([0.4, 0])
    # One difference bridges the escape: .8 long, 4 records of the rate 5.
    assert records[4].reads == [("difference", 0, 17, 21)]
    assert records[4].gtilde == pytest.approx(hess @ [-0.8, 0])
    # The anchor, its gradient smallest of all, was refuted: it is forgotten.
    assert records[3].escaped and records[3].best[1:] == (math.inf, -1)
    assert records[-1].best[2] == 0
    assert records[-1].best[0] == pytest.approx([-0.8, 0])


@pytest.mark.parametrize("hessian", ["on_demand", "tracked", "released"])
def test_no_exit_from_a_strict_minimum(hessian: str) -> None:
    """H = I and g = 0: rank 2 after the steps that there are, and back at the anchor."""
    steps = 5
    records = ref.run(
        plan(trigger_norm=0.2, escape_steps=steps, hessian=hessian),
        np.zeros(3),
        np.zeros((400, 3)),
        **constant(lambda x: x, np.eye(3)),
        noise=Streams(3, 3, escape=0.01, hessian=0.01),
    )
    last = records[-1]
    assert len(records) == (1 if hessian == "released" else steps)
    assert last.failed and last.done and last.why == "certificate"
    assert last.best[1:] == (0.0, 2) and not last.best[0].any()
    assert last.x_new is not None and not last.x_new.any()
    assert last.cool == 1 and not last.esc


def test_after_a_failed_escape_one_plain_step_then_armed_again() -> None:
    """At the anchor again no query is needed, and none is made."""
    records = ref.run(
        plan(trigger_norm=0.2, escape_steps=2, stop_at_certificate=False, num_steps=12),
        np.full(2, 0.1),
        np.zeros((400, 2)),
        **constant(lambda x: x / 4, np.eye(2) / 4),
        noise=Streams(3, 2, escape=0.01),
    )
    #          escape fails, the plain step, difference and so on
    assert branches(records) == "rnndnndnndnn"
    fails = [r.t for r in records if r.failed]
    assert fails == [1, 4, 7, 10]
    assert [r.t for r in records if r.triggered] == [0, 3, 6, 9]
    for t in fails[:-1]:
        after = records[t + 1]
        assert after.mv == 0 and after.reads == [] and after.cool == 0
        np.testing.assert_array_equal(after.gtilde, records[t].gtilde)
        np.testing.assert_allclose(after.x, records[t - 1].x)
    # The best certificate is the one of the smallest gradient: the last.
    assert records[-1].best[2] == 2
    np.testing.assert_allclose(records[-1].best[0], records[9].x)


def test_an_exit_arms_the_trigger_at_once() -> None:
    """Everything is small, so each escape ends where the next one begins."""
    hess = np.diag([-1.0, 1.0])
    records = ref.run(
        plan(trigger_norm=1e3, escape_steps=6, num_steps=12),
        np.zeros(2),
        np.zeros((400, 2)),
        **constant(lambda x: np.zeros(2), hess),
        noise=Scripted(np.array([0.1, 0.0]), tuple(range(0, 12, 4))),
    )
    assert [r.t for r in records if r.escaped] == [3, 7, 11]
    assert [r.t for r in records if r.triggered] == [0, 4, 8]
    assert branches(records) == "rnnndnnndnnn"
    assert all(r.cool == 0 for r in records)


@pytest.mark.parametrize("query", [False, True])
def test_tracked_hessians(query: bool) -> None:
    """After so many escapes an epoch ends, but not before the escape does.

    H follows the point exactly: the loss has a linear Hessian, and products are with what
    it was at the anchor.
    """

    def hess(x: np.ndarray, z: Any = None) -> np.ndarray:
        return np.diag([-1.0 + 0.1 * x[0], 1.0])

    tracked = plan(
        hessian="tracked",
        trigger_norm=1e3,
        escape_steps=6,
        query_in_escape=query,
        num_steps=16,
    )
    records = ref.run(
        tracked,
        np.zeros(2),
        np.zeros((400, 2)),
        **oracles(lambda x, z: np.zeros(2), hessian=hess),
        noise=Scripted(np.array([0.1, 0.0]), tuple(range(0, 16, 4))),
    )
    starts = [r.t for r in records if r.triggered]
    assert starts[:3] == [0, 4, 8]
    inside = "d" if query else "n"
    assert branches(records)[:12] == "".join(("r", inside * 3, "d", inside * 3)) + (
        "r" + inside * 3
    )
    assert [r.n_esc for r in records[:12]] == [1] * 4 + [2] * 4 + [1] * 4
    for r in records[:12]:
        anchor = records[max(t for t in starts if t <= r.t)].x
        np.testing.assert_allclose(r.product, hess(anchor) @ (r.x - anchor), atol=1e-12)
    # Gradients first, then Hessians, of records of their own.
    assert records[0].reads == [("gradient", 0, 0, 10), ("hessian", 0, 10, 17)]
    (_, _, _, middle), (role, _, first, last) = records[4].reads
    assert role == "hessian_difference" and first == middle
    # As many records for a change of the Hessian as its own rate says: 4 a unit.
    assert last - first == max(1, math.ceil(4.0 * records[4].mv))


def test_a_released_hessian_is_one_step() -> None:
    """Of |lambda| / rho along the lowest eigenvector, with the sign that goes downhill."""
    for slope in (0.01, -0.01):
        records = ref.run(
            plan(
                hessian="released",
                trigger_norm=0.1,
                escape_steps=2,
                hessian_lipschitz=4.0,
                num_steps=1,
            ),
            np.array([0.5, 0.5]),
            np.zeros((400, 2)),
            **constant(lambda x, s=slope: np.array([s, 0.0]), np.diag([-1.0, 1.0])),
            noise=ref.Silence(2),
        )
        (r,) = records
        assert r.escaped and r.curvature == -1
        assert r.x_new == pytest.approx([0.5 - math.copysign(0.25, slope), 0.5])


def test_the_filter_ends_an_escape_without_a_certificate() -> None:
    """Products of .1, .2 and .4 count as eighths, quarters, halves: costs 1 : 4 : 16."""
    hess = np.diag([-1.0, 1.0])
    batch, std, clip, multiplier = 7, 0.01, 2.0, 5.0
    unit = (2 * clip * 0.125 / (batch * std * multiplier**-1)) ** 2

    def run(multiplier: float) -> Records:
        return ref.run(
            plan(
                trigger_norm=0.05,
                escape_steps=6,
                hessian_filter=True,
                hessian_clip_norm=clip,
                escape_noise_std=std,
                noise_multiplier=multiplier,
                num_steps=4,
            ),
            np.zeros(2),
            np.zeros((400, 2)),
            **constant(lambda x: hess @ x, hess),
            noise=Scripted(np.array([0.1, 0.0])),
        )

    assert unit > 1  # The first product alone is too much at this multiplier.
    records = run(multiplier)[:2]
    assert [r.filtered for r in records] == [False, True]
    assert [r.product_bound for r in records] == pytest.approx([0, 0.25])
    assert records[-1].failed and records[-1].cool == 1 and not records[-1].done
    assert records[-1].best[1:] == (0.0, 1)
    np.testing.assert_array_equal(records[-1].x_new, 0)
    for budget, steps in ((1.2, 2), (4.9, 2), (5.1, 3), (20.9, 3), (21.1, None)):
        filtered = [
            r.t for r in run(multiplier / math.sqrt(unit * budget)) if r.filtered
        ]
        assert filtered == ([] if steps is None else [steps]), budget


def test_an_anchor_that_cannot_be_tested_has_rank_1() -> None:
    for n, rank in ((16, 1), (17, 2)):
        records = ref.run(
            plan(num_examples=n, trigger_norm=0.1, escape_steps=2),
            np.zeros(2),
            np.zeros((n, 2)),
            **constant(lambda x: x, np.eye(2)),
            noise=Streams(3, 2, escape=0.01),
        )
        assert records[-1].best[2] == rank
        if rank == 1:
            (r,) = records
            assert r.g is None and not r.triggered and r.cur == 10
            assert r.why == "no records for a Hessian"


def test_a_hessian_batch_may_begin_a_pass() -> None:
    """Then the next gradient, after the escape, is a refresh."""
    hess = np.diag([-1.0, 1.0])
    records = ref.run(
        plan(
            num_examples=18,
            num_passes=2,
            trigger_norm=0.05,
            escape_steps=6,
            refresh_batch_size=11,
            hessian_batch_size=8,
        ),
        np.zeros(2),
        np.zeros((18, 2)),
        **constant(lambda x: hess @ x, hess),
        noise=Scripted(np.array([0.1, 0.0])),
    )
    assert branches(records) == "rnnnx"
    assert records[0].reads == [("gradient", 0, 0, 11), ("product", 1, 0, 8)]
    assert records[3].escaped and records[3].k == -1
    assert records[-1].cur == 8 and records[-1].best[2] == -1
