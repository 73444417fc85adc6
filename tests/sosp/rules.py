"""Rules of a search for second-order points that are true of every run."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.sosp.cases import Records


def check(made: Any, x0: np.ndarray, records: Records) -> None:
    """Checks records, passes, queries, triggers, escapes and the output of a run."""
    passes, at, esc, cool = 0, 0, False, 0
    epochs: list[dict[int, int]] = []
    for t, r in enumerate(records):
        assert r.t == t and (r.done == (r is records[-1]))
        passes_before = passes
        # Each record is in one query of a pass, in order; no batch is a part of one.
        for role, of_pass, first, last in r.reads:
            if of_pass != passes:
                assert of_pass == passes + 1 and first == 0
                assert r.branch == "refresh" or role in ("product", "hessian")
                passes, at = of_pass, 0
            assert first == at < last <= made.num_examples
            at = last
            if role in ("gradient", "difference"):
                epochs.extend({} for _ in range(passes + 1 - len(epochs)))
                epochs[passes].update(dict.fromkeys(range(first, last), r.epoch))
        assert (r.cur, r.cur_pass) == (at, passes) and passes < made.sampling.num_passes
        # Queries.
        allowed = not esc or made.query_in_escape
        if t == 0:
            assert r.branch in ("refresh", "stopped")
        if r.branch in ("refresh", "difference"):
            assert allowed
        before = records[t - 1] if t else None
        if r.branch == "refresh" and esc:
            assert before is not None
            assert (
                before.k == made.max_differences
                or r.cur_pass > before.cur_pass
                or before.k == -1
                or made.difference_batch_size is not None
                or made.hessian == "tracked"  # Its running sum may have grown too long.
            )
        if r.branch == "difference":
            size = r.reads[0][3] - r.reads[0][2]
            assert size >= 1 and r.bound >= r.mv * (1 - 1e-12)
            assert r.bound / size == pytest.approx(1 / made.difference_batch_rate)
            assert esc or r.drift < made.drift_limit
            turned = any(of_pass > passes_before for _, of_pass, _, _ in r.reads)
            assert 1 <= r.k <= made.max_differences or (turned and r.k == -1)
            np.testing.assert_array_equal(r.x_ref, r.x)
        # Triggers and escapes.
        if r.triggered:
            assert not esc and cool <= 0 and r.norm <= made.trigger_norm
            assert made.escape_steps is not None
            anchor, steps = r.x, 0
        if esc or r.triggered:
            steps += 1
            assert steps <= made.escape_steps
            if r.x_new is not None and not r.failed and made.hessian != "released":
                out = np.linalg.norm(r.x_new - anchor) >= made.escape_radius
                assert r.escaped == out
            if r.product_bound:
                most = made.hessian_clip_norm * made.escape_radius
                assert r.product_bound <= most
                if r.product is not None:
                    assert np.linalg.norm(r.product) <= r.product_bound * (1 + 1e-12)
            if r.failed:
                np.testing.assert_array_equal(r.x_new, anchor)
        elif r.g is not None:
            np.testing.assert_array_equal(r.g, r.gtilde)
        assert r.esc == ((esc or r.triggered) and not (r.escaped or r.failed))
        esc, cool = r.esc, r.cool
    # A record that was met in two passes was met in two epochs.
    for one, other in itertools.combinations(epochs, 2):
        assert all(one[i] != other[i] for i in one.keys() & other.keys())
    check_output(made, x0, records)


def check_output(made: Any, x0: np.ndarray, records: Records) -> None:
    """The point that is returned, from the whole history."""
    begin, offers = 0, []
    for r in records:
        if r.escaped and not any(rank == 2 for _, rank, _ in offers):
            offers, begin = [], r.t + 1
            continue
        if r.g is None and r.branch == "stopped":
            continue
        inside = r.t > 0 and records[r.t - 1].esc
        if not inside:
            tested = r.triggered or r.why == "no records for a Hessian"
            offers.append((r.norm, 1 if tested else 0, r.x))
        if r.failed and not r.filtered:
            anchor = max(s.t for s in records[: r.t + 1] if s.triggered)
            offers.append((records[anchor].norm, 2, records[anchor].x))
    point, norm, rank = records[-1].best
    if not offers:
        assert (norm, rank) == (math.inf, -1)
        expected = x0 if begin == 0 else records[begin - 1].x_new
    else:
        top = max(offer[1] for offer in offers)
        least = min(offer[0] for offer in offers if offer[1] == top)
        assert (norm, rank) == (least, top)
        expected = next(x for n, k, x in offers if (n, k) == (least, top))
    np.testing.assert_array_equal(point, expected)
