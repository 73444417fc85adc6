"""Noise and sensitivity of the search for second-order points: the mathematics.

On the kernels' matrices and on the reference: why the noise begins again at a refresh and
at a pass, and how far one record moves the whole sequence of releases.

Of the library only the matrices of kernels/ are run: how it draws and adds noise is seen in
test_sosp_against_reference.py and in transforms/test_private_spider.py.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxdp.kernels import prefix_noise, tree_noise
from tests.sosp import reference as ref
from tests.sosp.cases import Records, Streams, blocks, branches, oracles, plan

# --- noise: the tree, its laws, and why it begins again ---

TRAILING = [0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0, 4]
#: K: worst and mean variance of the tree, and the worst of the square root's factor.
VARIANCES = {
    1: (1, 1, 1),
    7: (9, 5.14, 2.80),
    15: (16, 8.53, 3.698),
    31: (25, 12.9, 4.65),
    127: (49, 24.7, 6.800),
    1023: (100, 50.0, 10.71),
}


def test_the_tree_of_the_kernels_is_that_of_the_reference() -> None:
    """Streamed, as sums of blocks, and as the kernel's matrix: for all prefixes."""
    size = 31
    rows = {block: i for i, block in enumerate(sorted(set(map_blocks(size))))}
    streamed = np.zeros((5, len(rows)))
    kernel = tree_noise.Stored(size)
    prefix = np.tri(size) @ np.linalg.inv(kernel.strategy())
    before: set[tuple[int, int]] = set()
    for t in range(1, size + 1):
        h = ((t & -t) - 1).bit_count()
        if t <= 16:
            assert h == TRAILING[t - 1]
        assert kernel.increment_norms()[t - 1] ** 2 == pytest.approx(1 + h)
        streamed[:h] = 0
        streamed[h] = np.eye(len(rows))[rows[t - 2**h + 1, t]]
        assert np.count_nonzero(streamed.any(axis=1)) == t.bit_count()
        here = blocks(t)
        expected = np.zeros(len(rows))
        expected[[rows[block] for block in here]] = 1
        np.testing.assert_array_equal(streamed.sum(axis=0), expected)
        # The kernel's draw of step u is the noise of the block that ends at u.
        ends = np.zeros(size)
        ends[[last - 1 for _, last in here]] = 1
        np.testing.assert_allclose(prefix[t - 1], ends, atol=1e-12)
        # Nothing is let out on old noise alone.
        assert set(here) - before
        before = set(here)
    used = np.zeros(8, int)
    for first, last in set(map_blocks(8)):
        used[first - 1 : last] += 1
    assert used.tolist() == [4, 3, 3, 2, 3, 2, 2, 1]


def map_blocks(size: int) -> list[tuple[int, int]]:
    return [block for t in range(1, size + 1) for block in blocks(t)]


@pytest.mark.parametrize("period", VARIANCES)
def test_variances_at_equal_sensitivity(period: int) -> None:
    worst, mean, root = VARIANCES[period]
    tree, toeplitz, alone = (
        prefix_noise.make(name, period)
        for name in ("tree", "sqrt_toeplitz", "independent")
    )

    def law(kernel: prefix_noise.PrefixNoise) -> np.ndarray:
        return kernel.prefix_norms() ** 2 * np.max(kernel.column_norms()) ** 2

    assert law(tree).max() == pytest.approx(worst)
    # Of the digits that are printed.
    assert law(tree).mean() == pytest.approx(mean, rel=3e-3)
    assert law(toeplitz).max() == pytest.approx(root, abs=6e-3)
    assert law(alone).max() == pytest.approx(period)
    # Both factors are A_K.
    f = np.cumprod([1.0, *((2 * i - 1) / (2 * i) for i in range(1, period))])
    a = np.cumsum(f**2)
    np.testing.assert_allclose(toeplitz.prefix_norms() ** 2, a)
    assert np.max(toeplitz.column_norms()) ** 2 == pytest.approx(a[-1])
    assert a[-1] ** 2 == pytest.approx(root, abs=6e-3)


def test_the_variance_of_the_estimate() -> None:
    """base^2 + popcount(k) node^2, and from the begin at a refresh.

    4000 coordinates: a relative error of .15 is 6.7 standard errors, 3e-11 each.
    """
    dim, base, node = 4000, 0.3, 0.2
    made = plan(num_steps=12, max_differences=7, num_examples=1000)
    records = ref.run(
        made,
        np.zeros(dim),
        np.zeros(1000),
        **oracles(lambda x, z: np.zeros(dim)),
        noise=Streams(5, dim, base=base, node=node),
        points=[np.full(dim, t / dim) for t in range(12)],
    )
    for r in records:
        law = base**2 + r.k.bit_count() * node**2
        assert np.mean(r.gtilde**2) == pytest.approx(law, rel=0.15)
    # Another epoch has other noise.
    np.testing.assert_array_less(
        0.2, np.abs(records[8].gtilde - records[0].gtilde).max()
    )


def sequence_sensitivity(strategy: np.ndarray, first: int, end: int) -> float:
    """How far prefix sums move, in stds, when steps first..end - 1 (from 1) hold 1 more."""
    move = np.zeros(len(strategy))
    move[first - 1 : end - 1] = 1
    increments = np.diff(move, prepend=0)
    return float(np.linalg.norm(strategy @ increments))


@pytest.mark.parametrize(("steps", "squared"), [(15, 7), (31, 9), (127, 13)])
def test_noise_that_does_not_begin_again_is_too_small(steps: int, squared: int) -> None:
    """A record counts from its step until the refresh; the tree goes on, or begins again.

    sqrt(2 L - 1) against sqrt(L), the worst for the first record and a refresh after the
    longest block.
    """
    levels = steps.bit_length()
    whole = tree_noise.Stored(steps).strategy()
    found = {
        (j, q): sequence_sensitivity(whole, j, q)
        for q in range(2, steps + 2)
        for j in range(1, q)
    }
    worst = max(found, key=lambda key: found[key])
    assert found[worst] ** 2 == pytest.approx(squared) and squared == 2 * levels - 1
    assert found[1, 2 ** (levels - 1) + 1] == pytest.approx(found[worst])
    restarted = max(
        sequence_sensitivity(tree_noise.Stored(q - 1).strategy(), j, q)
        for q in (2 ** (levels - 1) + 1, steps, steps + 1)
        for j in range(1, q)
    )
    assert restarted**2 == pytest.approx(levels)


@pytest.mark.parametrize("levels", [4, 10])
def test_a_tree_across_two_passes_is_too_small(levels: int) -> None:
    """A record at leaves 1 and 2 of one tree costs 4 L - 3, where 2 L is charged."""
    strategy = tree_noise.Stored(2**levels - 1).strategy()
    both = np.linalg.norm(strategy[:, 0] + strategy[:, 1]) ** 2
    assert both == pytest.approx(4 * levels - 3)
    charged = 2 * np.max(np.linalg.norm(strategy, axis=0)) ** 2
    assert charged == pytest.approx(2 * levels)


@pytest.mark.parametrize(("period", "ratio"), [(15, 1.66), (127, 1.75)])
def test_the_square_root_across_two_passes(period: int, ratio: float) -> None:
    columns = prefix_noise.make("sqrt_toeplitz", period).strategy()
    gram = columns.T @ columns
    pairs = np.diag(gram)[:, None] + np.diag(gram) + 2 * gram
    np.fill_diagonal(pairs, 0)
    assert pairs.max() / (2 * np.diag(gram).max()) == pytest.approx(ratio, abs=0.006)


# --- what one record can do to the sequence ---

STEPS, DIM, RATE, REFRESH = 16, 3, 20.0, 8


def walk(scale: float = 0.3) -> list[np.ndarray]:
    steps = np.random.default_rng(2).normal(size=(STEPS, DIM))
    steps /= np.linalg.norm(steps, axis=1, keepdims=True)
    return list(np.cumsum(scale * steps, axis=0))


def releases(records: Records, field: str = "gtilde") -> np.ndarray:
    return np.stack([getattr(r, field) for r in records])


def moves(one: Records, other: Records, strategy: np.ndarray) -> list[float]:
    """What each epoch's refresh moves, and its differences through the strategy."""
    found = []
    changes = releases(one) - releases(other)
    starts = [r.t for r in one if r.branch == "refresh"] + [len(one)]
    for begin, end in itertools.pairwise(starts):
        rows = np.diff(changes[begin:end], axis=0)
        c = strategy[: len(rows), : len(rows)]
        found += [np.linalg.norm(changes[begin]), np.linalg.norm(c @ rows)]
    return found


#: Losses' gradients that reach a bound, or go far beyond it, with z = +-1 or worse.
LOSSES: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "linear": lambda x, z: z * np.eye(DIM)[0],
    "quadratic": lambda x, z: z * x,
    "adversarial": lambda x, z: 1e6 * z * (1 + x),
}


@pytest.mark.parametrize("name", ["tree", "sqrt_toeplitz", "blt_3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_one_record_moves(loss: str, name: str) -> None:
    """One role's sensitivity, in the epoch that read the record, and nothing elsewhere."""
    made = plan(
        num_examples=150,
        num_steps=STEPS,
        l2_clip_norm=1.0,
        refresh_batch_size=REFRESH,
        difference_batch_rate=RATE,
        max_differences=7,
    )
    strategy = prefix_noise.make(name, 7).strategy()
    signs = np.random.default_rng(1).choice([-1.0, 1.0], 150)

    def run(data: np.ndarray) -> Records:
        return ref.run(
            made,
            np.zeros(DIM),
            data,
            **oracles(LOSSES[loss]),
            noise=ref.Silence(DIM),
            points=walk(),
        )

    base = run(signs)
    assert branches(base) == ("r" + "d" * 7) * 2
    ratios: dict[str, float] = {"gradient": 0.0, "difference": 0.0}
    for r in base:
        ((role, _, first, _),) = r.reads
        # Replaced by its opposite; or absent, which moves half.
        for factor, kappa in ((-1.0, 2), (np.nan, 1)):
            data = signs.copy()
            data[first] *= factor
            other = run(data)
            assert [o.reads for o in other] == [o.reads for o in base]
            of_role = kappa / REFRESH if role == "gradient" else kappa / RATE
            if role == "difference":
                of_role *= np.linalg.norm(strategy, axis=0).max()
            found = moves(base, other, strategy)
            place = 2 * r.epoch + (role == "difference")
            assert found[place] <= of_role * (1 + 1e-9)
            others = found[:place] + found[place + 1 :]
            assert np.allclose(others, 0, atol=1e-12)
            ratios[role] = max(ratios[role], float(found[place] / of_role))
    # The bounds are reached, where the loss can.
    if loss == "adversarial":
        assert min(ratios.values()) == pytest.approx(1)
    if loss == "linear":
        assert ratios["gradient"] == pytest.approx(1) and ratios["difference"] < 1e-12
    if loss == "quadratic":  # Batches are rounded up: not quite.
        assert ratios["difference"] > 0.99 - 1 / (RATE * 0.3)


def test_a_step_of_the_tree_moves_its_blocks() -> None:
    """The root of the number of blocks times 2 C / b_t, exactly, for all steps."""
    made = plan(
        num_examples=150,
        num_steps=8,
        l2_clip_norm=1.0,
        difference_batch_rate=RATE,
        max_differences=7,
    )
    data, strategy = np.ones(150), tree_noise.Stored(7).strategy()
    run: dict[str, Any] = {
        **oracles(LOSSES["adversarial"]),
        "noise": ref.Silence(DIM),
        "points": walk(),
    }
    base = ref.run(made, np.zeros(DIM), data, **run)
    for k, count in enumerate([3, 2, 2, 1, 2, 1, 1]):
        changed = data.copy()
        changed[base[k + 1].reads[0][2]] = -1
        found = moves(base, ref.run(made, np.zeros(DIM), changed, **run), strategy)
        assert found[0] == pytest.approx(0, abs=1e-12)
        assert found[1] == pytest.approx(math.sqrt(count) * 2 / RATE)


@pytest.mark.parametrize("hessian", ["on_demand", "tracked"])
@pytest.mark.parametrize("huge", [False, True])
def test_what_one_record_moves_in_products(hessian: str, huge: bool) -> None:
    """At most 2 C_h / b_H times the radius in each, and in all but the first steps.

    The points of two escapes are given: .45 from each anchor, of a radius of .5; that M
    is large keeps the steps inside.
    """
    steps, radius, clip, batch = 6, 0.5, 0.7, 7
    made = plan(
        num_steps=2 * steps + 1,
        smoothness=1000.0,
        difference_batch_rate=0.02,
        trigger_norm=1e9,
        escape_steps=steps,
        escape_radius=radius,
        stop_at_certificate=False,
        hessian=hessian,
        hessian_clip_norm=clip,
        hessian_batch_size=batch,
        hessian_difference_rate=batch / clip,
        query_in_escape=hessian == "tracked",
    )
    size = 1e6 if huge else clip
    points = np.zeros((2 * steps + 1, DIM))
    for t in (t for t in range(2 * steps + 1) if t not in (0, steps, steps + 1)):
        points[t, 1:] = [0.45 * math.cos(t), 0.45 * math.sin(t)]

    def hess(x: np.ndarray, z: Any) -> np.ndarray:
        return size * z * np.diag([0, 1.0 + x[1], 0.0]) / 1.45

    def run(data: np.ndarray) -> Records:
        return ref.run(
            made,
            np.zeros(DIM),
            data,
            **oracles(
                lambda x, z: np.zeros(DIM),
                hessian_product=lambda x, z, v: size * z * v,
                hessian=hess,
            ),
            noise=ref.Silence(DIM),
            points=points,
        )

    signs = np.random.default_rng(1).choice([-1.0, 1.0], 400)
    base = run(signs)
    # Where a failed escape ended, the trigger waits for one step.
    assert [r.t for r in base if r.triggered] == [0, steps + 1]
    assert [r.t for r in base if r.failed] == [steps - 1, 2 * steps]
    roles = ("product", "hessian", "hessian_difference")
    reads = [read for r in base for read in r.reads if read[0] in roles]
    escapes = 1 if hessian == "on_demand" else 2
    each = clip / batch * radius
    most = 0.0
    for _, _, first, _ in reads:
        for factor, kappa in ((-1.0, 2), (np.nan, 1)):
            data = signs.copy()
            data[first] *= factor
            change = [
                float(np.linalg.norm(one.product - other.product))
                for one, other in zip(base, run(data), strict=True)
                if one.product is not None and other.product is not None
            ]
            assert len(change) == 2 * steps
            assert max(change) <= kappa * each * (1 + 1e-9)
            total = math.sqrt(sum(c**2 for c in change) / (escapes * (steps - 1)))
            assert total <= kappa * each * (1 + 1e-9)
            most = max(most, total / (kappa * each))
    if hessian == "on_demand":  # The clip is at the radius, beyond v.
        assert most == pytest.approx(1.0 if huge else 0.9)
    else:  # Of v, the part along one axis.
        assert most > 0.4
