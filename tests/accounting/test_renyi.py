"""Renyi divergences of events: against laws of outputs that are computed in full."""

import itertools
import math
from collections.abc import Iterator

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.dp_event import DiscreteLaplaceDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.special import logsumexp

from jaxdp import accounting
from jaxdp.accounting import renyi
from jaxdp.accounting.spending import SelectionAccountant
from jaxdp.core.types import Relation

ADD = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp.NeighboringRelation.REPLACE_ONE
SPECIAL = dp.NeighboringRelation.REPLACE_SPECIAL
Law = list[tuple[float, float]]  # probabilities and sums


def divergence_of(p: np.ndarray, q: np.ndarray, order: int, step: float) -> float:
    """Divergence of two log densities on a grid."""
    log_moment = logsumexp(order * p + (1 - order) * q) + math.log(step)
    return float(log_moment) / (order - 1)


def log_density(law: Law, std: float, x: np.ndarray) -> np.ndarray:
    parts = [
        math.log(chance) - ((x - total) / std) ** 2 / 2
        for chance, total in law
        if chance > 0
    ]
    return logsumexp(parts, axis=0) - math.log(std * math.sqrt(2 * math.pi))


def poisson(records: tuple[int, ...], q: float, most: int) -> Law:
    """Law of the sum over a Poisson sample, cut to size by a random subset."""
    law: Law = []
    for size in range(len(records) + 1):
        chance = q**size * (1 - q) ** (len(records) - size)
        for drawn in itertools.combinations(records, size):
            kept = list(itertools.combinations(drawn, min(size, most)))
            law += [(chance / len(kept), float(sum(each))) for each in kept]
    return law


def subset(records: tuple[int, ...], size: int) -> Law:
    drawn = list(itertools.combinations(records, size))
    return [(1 / len(drawn), float(sum(each))) for each in drawn]


def neighbours(relation: str, n: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All data sets of records in {-1, 0, 1}, and those next to them."""
    for records in itertools.product((-1, 0, 1), repeat=n):
        others = {"replace_one": (-1, 0, 1), "zero_out": (0,)}.get(relation)
        if others is None:
            yield records, records[1:]
        else:
            yield from ((records, (other, *records[1:])) for other in others)


SAMPLED = {
    "poisson": lambda m, relation: accounting.poisson_gaussian(
        m, 1, sampling_prob=0.3, relation=relation
    ),
    "truncated": lambda m, relation: accounting.truncated_poisson_gaussian(
        m, 1, sampling_prob=0.3, num_examples=3, max_batch_size=2, relation=relation
    ),
    "subset": lambda m, relation: accounting.fixed_size_gaussian(
        m, 1, num_examples=3, batch_size=1, relation=relation
    ),
}
LAWS = {
    "poisson": lambda records: poisson(records, 0.3, 9),
    "truncated": lambda records: poisson(records, 0.3, 2),
    "subset": lambda records: subset(records, 1),
}


@pytest.mark.parametrize("order", [2, 5, 12])
@pytest.mark.parametrize("std", [0.6, 2.5])
@pytest.mark.parametrize(
    ("kind", "relation"),
    [
        *itertools.product(("poisson", "truncated"), accounting.RELATIONS),
        ("subset", "replace_one"),
    ],
)
def test_no_data_sets_are_further_apart(
    kind: str, relation: Relation, std: float, order: int
) -> None:
    """All data sets of three records and all neighbours, either way round."""
    event, stated = SAMPLED[kind](std / accounting.sensitivity(relation, 1.0), relation)
    bound = renyi.divergence(event, stated, order)
    step = std / 20
    x = np.arange(-3.0 * order - 12 * std, 3.0 * order + 12 * std, step)
    pairs = list(neighbours(relation, 3))
    laws = {
        records: log_density(LAWS[kind](records), std, x)
        for records in {*itertools.chain(*pairs)}
    }
    found = [
        divergence_of(laws[one], laws[other], order, step)
        for pair in pairs
        for one, other in (pair, pair[::-1])
    ]
    assert max(found) <= bound * (1 + 1e-9)
    # (What a record that pushes another one out is charged leaves much, as in PLD's pair.)
    least = {"poisson": 1 - 1e-6, "truncated": 0.0, "subset": 0.6}[kind]
    assert max(found) >= least * bound


@pytest.mark.parametrize("order", [2, 7, 40])
@pytest.mark.parametrize("std", [1, 4])
def test_discrete_noise_has_no_larger_divergence(std: int, order: int) -> None:
    """Sums in units of the sensitivity or of a fraction of it, sampled or not."""
    for units, q in itertools.product((1, 3), (1.0, 0.2)):
        x = np.arange(-60 * std - 4 * units * order, 60 * std + 4 * units * order)

        def law(*moved: int, std: int = std, q: float = q, x: np.ndarray = x):
            parts = [-(((x - move) / std) ** 2) / 2 for move in moved]
            weights = np.array([1 - q, q])[:, None] if len(moved) == 2 else [[1.0]]
            at = logsumexp(parts, b=weights, axis=0)
            return at - logsumexp(at)

        one = accounting.poisson_gaussian if q < 1 else accounting.full_batch_gaussian
        more = {"sampling_prob": q} if q < 1 else {}
        for relation, pair in [
            ("zero_out", (law(0, units), law(0))),
            ("replace_one", (law(0, units), law(0, -units))),
        ]:
            if q == 1:
                pair = law(units), law(0 if relation == "zero_out" else -units)
            m = std / units / accounting.sensitivity(relation, 1.0)
            bound = renyi.divergence(*one(m, 1, relation=relation, **more), order)
            for p, r in (pair, pair[::-1]):
                assert divergence_of(p, r, order, 1.0) <= bound * (1 + 1e-9)


def test_what_dp_accounting_computes_is_taken() -> None:
    """Of samples under the two relations that it covers, of Laplace noise, and of zCDP."""
    for order in (2, 9, 64):
        for guarantee in [
            accounting.poisson_gaussian(
                0.8, 30, sampling_prob=0.02, relation="add_or_remove"
            ),
            accounting.poisson_gaussian(
                5.0, 30, sampling_prob=0.2, relation="zero_out"
            ),
            accounting.full_batch_gaussian(3.0, 7, "replace_one"),
            accounting.full_batch_laplace(2.0, 3, "replace_one"),
            accounting.zcdp(0.1),
            accounting.composed(
                [
                    accounting.zcdp(0.2),
                    accounting.full_batch_gaussian(1.0, 1, "zero_out"),
                ]
            ),
        ]:
            theirs = RdpAccountant([order], guarantee.event_relation)
            want = theirs.compose(guarantee.event).rdp[0]
            found = renyi.divergence(*guarantee, order)
            assert found == pytest.approx(want, rel=1e-9)
            assert found >= want * (1 - 1e-15)


def test_random_subsets_cost_less_than_by_the_theorem_of_dp_accounting() -> None:
    guarantee = accounting.fixed_size_gaussian(
        2.0, 5, num_examples=100, batch_size=5, relation="replace_one"
    )
    theirs = RdpAccountant([8], REPLACE).compose(guarantee.event).rdp[0]
    assert 0.2 * theirs < renyi.divergence(*guarantee, 8) < 0.6 * theirs


@pytest.mark.parametrize("order", [2, 64, 1024])
def test_a_smaller_data_set_costs_no_more(order: int) -> None:
    """Exact pairs of truncated samples, of every number of records up to the event's.

    At the highest order the pair of half the records is the worse, so that the event's own
    number of records does not do.
    """
    n, q, size, m = 101, 0.01, 2, 20.0
    event = dp.TruncatedSubsampledGaussianDpEvent(n, q, size, m)
    bound = renyi.divergence(event, ADD, order)
    poisson = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(m))
    plain = (order - 1) * RdpAccountant([order]).compose(poisson).rdp[0]
    exact = {}
    for k in (n, n // 2, 5):
        full = renyi.binom.sf(size - 1, k - 1, q)
        kept = renyi.binom.sf(size, k, q) * size / k / full
        pushed = renyi._replaced(kept, 2 / m, order)
        parts = math.log1p(-full) + plain, math.log(full) + pushed
        exact[k] = np.logaddexp(*parts) / (order - 1)
    assert max(exact.values()) <= bound
    assert (exact[n // 2] > exact[n]) == (order == 1024)


@pytest.mark.parametrize(
    ("left_out", "shift", "order"), [(1e-15, 0.129, 1024), (1e-6, 1.0, 64)]
)
def test_nearly_all_records_are_drawn(
    left_out: float, shift: float, order: int
) -> None:
    """Where the mass lies far out: at nearly twice the order, in shifts."""
    q, x = 1 - left_out, np.arange(-60.0, 3 * order * shift + 60, 1e-3)
    p, r = (
        np.logaddexp(math.log1p(-q), math.log(q) + move * (x - move / 2))
        for move in (shift, -shift)
    )
    log_density = -(x**2) / 2 - math.log(2 * math.pi) / 2 + math.log(1e-3)
    want = logsumexp(order * p + (1 - order) * r + log_density)
    assert renyi._replaced(q, shift, order) == pytest.approx(float(want), rel=1e-9)


@pytest.mark.parametrize("relation", accounting.RELATIONS)
def test_truncation_that_never_happens_is_free(relation: Relation) -> None:
    plain, cut, often = (
        renyi.divergence(event, stated, 16)
        for event, stated in (
            accounting.poisson_gaussian(2.0, 3, sampling_prob=0.01, relation=relation),
            *(
                accounting.truncated_poisson_gaussian(
                    2.0,
                    3,
                    sampling_prob=0.01,
                    num_examples=10_000,
                    max_batch_size=size,
                    relation=relation,
                )
                for size in (250, 144)
            ),
        )
    )
    assert cut == pytest.approx(plain, rel=1e-6)
    assert cut < often


def test_pure_guarantees_are_those_of_a_coin() -> None:
    for epsilon, order in itertools.product((1e-6, 0.05, 0.7, 4.0, 30.0), (2, 9, 300)):
        odds = [0.0, -epsilon]
        p = np.array(odds) - np.logaddexp(*odds)
        coin = divergence_of(p, p[::-1], order, 1.0)
        found = renyi.divergence(*accounting.zcdp(1e9, epsilon), order)
        assert found == pytest.approx(coin, rel=1e-3 if epsilon < 1e-3 else 1e-9)
        assert found <= min(epsilon, order * epsilon**2 / 2) * (1 + 1e-12)
    assert renyi.divergence(*accounting.zcdp(1e-3, 4.0), 5) == pytest.approx(5e-3)
    sampled = accounting.poisson_laplace(1.0, 1, sampling_prob=0.1, relation="zero_out")
    pure = accounting.epsilon(*sampled, 0.0)
    assert renyi.divergence(*sampled, 9) == renyi._pure(float(pure), 9)


def test_a_selection_takes_other_orders_for_what_it_selects_from() -> None:
    one = accounting.full_batch_gaussian(20.0, 5, "replace_one")
    search = accounting.repeat_and_select(one, mean=10.0, shape=1.0)
    found = renyi.divergence(*search, 12)
    alone = RdpAccountant([12]).compose(search.event).rdp[0]
    many = SelectionAccountant()
    several = many.compose(search.event).rdp[list(many.orders).index(12)]
    assert found == pytest.approx(several, rel=1e-12)
    assert renyi.divergence(*one, 12) < found < alone


def test_extremes_are_finite_or_not_private() -> None:
    """No overflow, no warning, and no more than without sampling."""
    for q, m, order in itertools.product(
        (1e-9, 0.5, 1 - 1e-9), (1e-3, 0.15, 1.0, 1e5, 1e18), (2, 1024)
    ):
        gaussian = dp.GaussianDpEvent(m)
        poisson = dp.PoissonSampledDpEvent(q, gaussian)
        fixed = dp.SampledWithoutReplacementDpEvent(10**9, round(q * 1e9), gaussian)
        for event, far in ((poisson, 2), (fixed, 1)):
            bound = renyi.divergence(event, REPLACE, order)
            most = order * (far / m) ** 2 / 2
            assert 0 < bound <= most * (1 + 1e-9) + 1e-13
    for event in (dp.GaussianDpEvent(0.0), dp.NonPrivateDpEvent()):
        assert renyi.divergence(event, ADD, 2) == math.inf
    for relation in (ADD, SPECIAL, REPLACE):
        silent = dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(0.0))
        assert renyi.divergence(silent, relation, 2) == math.inf
        never = dp.PoissonSampledDpEvent(0.0, dp.GaussianDpEvent(1.0))
        assert renyi.divergence(never, relation, 2) == 0


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (DiscreteLaplaceDpEvent(1.0, 1), ADD),
        (dp.LaplaceDpEvent(1.0), REPLACE),
        (dp.SampledWithoutReplacementDpEvent(9, 3, dp.GaussianDpEvent(1.0)), ADD),
        (dp.PoissonSampledDpEvent(0.1, DiscreteLaplaceDpEvent(1.0, 1)), ADD),
    ],
)
def test_other_events_are_refused(
    event: dp.DpEvent, relation: dp.NeighboringRelation
) -> None:
    known = dp.ComposedDpEvent([dp.GaussianDpEvent(9.0), event])
    with pytest.raises(ValueError, match=r"Renyi divergence is known .* 'basic'"):
        renyi.divergence(known, relation, 4)


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 2.0, 8.0, 40.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_totals_are_what_the_conversion_gives(epsilon: float, delta: float) -> None:
    order = renyi.best_order(epsilon, delta)
    most = renyi.total(epsilon, delta, order)
    theirs = RdpAccountant([order]).compose(dp.ZCDpEvent(most / order))
    assert epsilon * (1 - 1e-12) <= renyi.implied(most, delta, order) <= epsilon
    assert theirs.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-12)
    # One Gaussian release is most of what the closed form allows, at no order more.
    best = math.sqrt(2 * most / order)
    assert 0.8 < best / accounting.gaussian_mu(epsilon, delta) < 1
    for other in {max(order - 1, 2), order + 1}:
        assert renyi.total(epsilon, delta, other) / other <= most / order


def test_no_order_is_high_enough_for_a_small_total() -> None:
    best = renyi.best_order(1e-3, 1e-6)
    assert max(renyi.total(1e-3, 1e-6, order) for order in renyi.ORDERS) <= 0
    assert best in renyi.ORDERS
