"""The reference of the search for second-order points: whole runs.

What is true of every run, gradient descent as its limit, and the numbers of the prototype.

It runs tests/sosp/reference.py alone: no fault of the library is seen here. That
is for test_sosp_against_reference.py, which compares the two step by step.
"""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.sosp import reference as ref
from tests.sosp.cases import CosineGrid, Records, Streams, branches, plan, problem


@dataclasses.dataclass
class Config:
    """Of a random run."""

    seed: int

    def make(self) -> tuple[Any, np.ndarray, Any, Any]:
        rng = np.random.default_rng(self.seed)

        def pick(*options: Any) -> Any:
            return options[rng.integers(len(options))]

        n, dim = int(rng.integers(60, 400)), int(rng.integers(1, 4))
        loss, data = problem(dim, n, 0.5, self.seed)
        kind = pick("on_demand", "tracked", "released")
        made = plan(
            num_examples=n,
            num_steps=pick(25, 60),
            num_passes=pick(1, 1, 2, 3),
            smoothness=pick(1.0, 0.5, loss.a),
            l2_clip_norm=pick(0.3, 1.0),
            refresh_batch_size=int(rng.integers(5, 40)),
            difference_batch_rate=pick(5.0, 30.0, 200.0),
            difference_batch_size=pick(None, None, None, 4),
            drift_limit=pick(0.5, 1.5, 1e9),
            max_differences=pick(0, 3, 7, 31),
            trigger_norm=pick(0.1, 0.3, 1e9),
            escape_steps=pick(2, 5, 12, None),
            escape_radius=pick(0.1, 0.4),
            hessian=kind,
            hessian_norm=pick("operator", "frobenius"),
            hessian_clip_norm=pick(0.2, 1.0),
            hessian_batch_size=int(rng.integers(2, 15)),
            escapes_per_refresh=pick(1, 2),
            query_in_escape=bool(kind != "released" and rng.random() < 0.4),
            stop_at_certificate=bool(rng.random() < 0.5),
            hessian_filter=bool(kind == "on_demand" and rng.random() < 0.3),
            noise_multiplier=pick(0.1, 3.0),
            escape_noise_std=0.03,
        )
        noise = Streams(self.seed, dim, base=0.02, node=0.01, escape=0.03, hessian=0.02)
        return made, data, loss, noise


def check(made: Any, x0: np.ndarray, records: Records) -> None:
    """What is true of every run."""
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


def test_rules_of_random_runs() -> None:
    seen: dict[str, int] = {}
    for seed in range(90):
        made, data, loss, noise = Config(seed).make()
        x0 = np.random.default_rng(seed + 10**6).uniform(-3, 3, loss.dim)
        records = ref.run(made, x0, data, **loss.oracles(), noise=noise)
        check(made, x0, records)
        again = ref.run(made, x0, data, **loss.oracles(), noise=noise)
        np.testing.assert_array_equal(again[-1].x, records[-1].x)
        for r in records:
            for name in ("triggered", "escaped", "failed", "filtered", "done"):
                seen[name] = seen.get(name, 0) + bool(getattr(r, name))
            seen[r.branch] = seen.get(r.branch, 0) + 1
        for name in (records[-1].why, f"rank {records[-1].best[2]}"):
            seen[name] = seen.get(name, 0) + 1
    # Everything that can happen did.
    assert min(seen.values()) >= 3 and len(seen) == 5 + 4 + 4 + 4, seen


def test_the_size_of_a_batch_does_not_depend_on_what_it_holds() -> None:
    loss, data = problem(3, 300, 0.5)
    made = plan(num_examples=300, num_steps=12, max_differences=3)
    run = {"noise": ref.Silence(3), **loss.oracles()}
    x0 = np.array([0.4, -1.0, 2.0])
    records = ref.run(made, x0, data, **run)
    for r in records:
        ((_, _, first, last),) = r.reads
        changed = data.copy()
        changed[first:last] = 0.77
        other = ref.run(made, x0, changed, **run)[r.t]
        assert other.reads == r.reads and np.any(other.gtilde != r.gtilde)


# --- without noise, on constant data ---


@pytest.mark.parametrize("fixed", [None, 3])
def test_gradient_descent_on_constant_data(fixed: int | None) -> None:
    loss = CosineGrid(4)
    shift = np.array([0.3, -0.2, 0.0, 0.1])
    made = plan(
        num_examples=600,
        num_steps=20,
        smoothness=2 * loss.a,
        drift_limit=1.0,
        difference_batch_size=fixed,
        l2_clip_norm=1.0,
    )
    x = x0 = np.array([0.3, 2.0, -1.0, 0.5])
    records = ref.run(
        made, x0, np.tile(shift, (600, 1)), **loss.oracles(), noise=ref.Silence(4)
    )
    assert len(records) == 20 and {"r", "d"} == set(branches(records))
    for r in records:
        g = loss.gradient(x, shift)
        np.testing.assert_allclose(r.x, x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(r.gtilde, g, rtol=0, atol=1e-13)
        x = x - g / (2 * loss.a)
    need = [last - first for r in records for _, _, first, last in r.reads]
    assert records[-1].cur == sum(need)
    assert records[-1].best[1] == min(r.norm for r in records)


# --- against the numbers of the prototype ---


@pytest.mark.parametrize(
    ("mu", "n", "gamma", "b", "b_h", "steps", "samples", "counts"),
    [
        (math.inf, 200_000, 0.03, 8889, 85, 21, 2.07e4, (2, 6, 2)),
        (0.448335, 50_000, 0.06, 2223, 298, 15, 2.4e4, (2, 5, 3)),
    ],
)
def test_rows_of_the_prototype(
    mu: float,
    n: int,
    gamma: float,
    b: int,
    b_h: int,
    steps: int,
    samples: float,
    counts: tuple[int, int, int],
) -> None:
    """The cosine grid at d = 10 from a saddle: medians of few seeds, certified all.

    They print 2/6/2 and 2/5/3 as medians of 20 and 30 runs. Here a vectorised loss stands
    in for a batch, which is what the clips, all no-ops, allow.
    """
    d, levels, limit = 10, 10, 1.0
    loss = CosineGrid(d)
    reach = math.sqrt(d) + math.sqrt(2 * math.log(2 * 2000 / 0.1))
    node = gamma / (2 * math.sqrt(2) * reach * math.sqrt(levels))
    private = mu < math.inf
    rate = max(2 * limit / gamma**2, 2 * math.sqrt(levels) / (mu * node))
    if private and gamma == 0.03:
        assert rate == pytest.approx(32662, rel=1e-4)
    stds = {
        "base": 2 / (b * mu),
        "node": node if private else 0.0,
        "escape": gamma / reach,
    }
    made = plan(
        num_examples=n,
        num_steps=2000,
        l2_clip_norm=1.0,
        smoothness=loss.a,
        refresh_batch_size=b,
        difference_batch_rate=rate,
        drift_limit=limit,
        max_differences=2**levels - 1,
        trigger_norm=3 * gamma,
        escape_steps=steps,
        escape_radius=math.sqrt(gamma / loss.a),
        hessian_batch_size=b_h,
        hessian_clip_norm=loss.a,
    )
    found = []
    for seed in range(3):
        data = np.random.default_rng(seed).uniform(-0.5, 0.5, (n, d))
        records = ref.run(
            made,
            loss.saddle(2),
            data,
            **loss.oracles(),
            noise=Streams(seed, d, **stds),
        )
        # How far from the certified alpha: the population's gradient and curvature.
        point, _, rank = records[-1].best
        shrunk = math.sin(0.5) / 0.5 * loss.a
        gradient = np.linalg.norm(shrunk * np.sin(point))
        curvature = max(0.0, shrunk * np.max(np.cos(point)))
        alpha = max(gradient, curvature**2 / loss.a)
        assert rank < 2 or alpha <= 4 * gamma
        number = [branches(records).count(letter) for letter in "rd"]
        number.append(sum(r.triggered for r in records))
        found.append((records[-1].cur, *number, rank == 2))
    median = np.median(np.array(found, float), axis=0)
    assert median[0] == pytest.approx(samples, rel=0.25)
    np.testing.assert_allclose(median[1:4], counts, atol=1)
    assert all(row[-1] for row in found)
