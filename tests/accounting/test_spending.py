import copy
import json
import math
import pickle

import dp_accounting as dp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from jaxdp import accounting
from jaxdp.accounting import Epsilon, spending
from jaxdp.core.types import Relation

ADD, SWAP, SPECIAL = (
    dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dp.NeighboringRelation.REPLACE_ONE,
    dp.NeighboringRelation.REPLACE_SPECIAL,
)
DELTA = 1e-5


def rdp(event: dp.DpEvent, relation: dp.NeighboringRelation, delta: float) -> float:
    accountant = RdpAccountant(neighboring_relation=relation)
    return accountant.compose(event).get_epsilon(delta)


def pld(event: dp.DpEvent, relation: dp.NeighboringRelation, delta: float) -> float:
    return PLDAccountant(relation).compose(event).get_epsilon(delta)


def poisson(m: float, steps: int, q: float, relation: Relation) -> Epsilon:
    guarantee = accounting.poisson_gaussian(
        m, steps, sampling_prob=q, relation=relation
    )
    return accounting.epsilon(*guarantee, DELTA)


# The numbers of the notes. m is there the std over C, so noise_multiplier is m / 2 under
# "replace_one".


def test_relation_trap():
    """PLD and RDP read one event differently; we read it as PLD does, always."""
    event = dp.GaussianDpEvent(2.0)
    for relation, want in ((SWAP, 4.377), (ADD, 1.993), (SPECIAL, 1.993)):
        assert rdp(event, relation, DELTA) == pytest.approx(2.166, abs=6e-4)
        assert pld(event, relation, DELTA) == pytest.approx(want, abs=6e-4)
        got = accounting.epsilon(event, relation, DELTA)
        assert got == pytest.approx(want, abs=6e-4)
        assert got.accountant == "Gaussian closed form"


def test_relation_trap_of_multiplier_one():
    event = dp.GaussianDpEvent(1.0)
    for relation, want in ((SWAP, 11.00), (ADD, 4.89), (SPECIAL, 4.89)):
        assert rdp(event, relation, 1e-6) == pytest.approx(5.22, abs=6e-3)
        got = accounting.epsilon(event, relation, 1e-6)
        assert got == pytest.approx(want, abs=6e-3)


def test_printed_full_batch():
    for relation in accounting.RELATIONS:
        event, event_relation = accounting.full_batch_gaussian(
            199.3812, 10_000, relation
        )
        got = accounting.epsilon(event, event_relation, DELTA)
        assert got == pytest.approx(2.0, abs=6e-6)
        assert pld(event, event_relation, DELTA) == pytest.approx(2.0, abs=6e-6)
        assert rdp(event, event_relation, DELTA) == pytest.approx(2.17318, abs=6e-6)


def test_printed_poisson():
    for relation in ("zero_out", "add_or_remove"):
        event, event_relation = accounting.poisson_gaussian(
            12.5, 10_000, sampling_prob=1 / 16, relation=relation
        )
        got = accounting.epsilon(event, event_relation, DELTA)
        assert got == pytest.approx(1.99943, abs=6e-6)
        assert got.accountant == "PLD"
        assert rdp(event, event_relation, DELTA) == pytest.approx(2.17301, abs=6e-6)
    for m, epsilon in ((13.469, 2), (5.153, 6)):
        event = dp.PoissonSampledDpEvent(1 / 16, dp.GaussianDpEvent(m))
        event = dp.SelfComposedDpEvent(event, 10_000)
        assert rdp(event, ADD, DELTA) == pytest.approx(epsilon, rel=1e-3)


# n, B, T, epsilon; std of the noise in units of C on the mean: the paper's formula, exact
# full batch, the authors' code and its m, Poisson add/remove and its m, Poisson
# replace-one and its m.
SETTINGS = [
    (1024, 64, 10_000, 2, 0.9650, 0.3894, 0.4224, 13.516, 0.1953, 12.50, 0.3895, 24.93),
    (1024, 64, 10_000, 6, 0.3358, 0.1491, 0.1611, 5.156, 0.0756, 4.838, 0.1491, 9.544),
    (1536, 64, 10_000, 2, 0.6433, 0.2596, 0.2820, 9.023, 0.1306, 8.356, 0.2596, 16.62),
    (1536, 64, 10_000, 6, 0.2239, 0.0994, 0.1088, 3.481, 0.0511, 3.271, 0.0994, 6.362),
    (2560, 64, 10_000, 2, 0.3860, 0.1558, 0.1703, 5.449, 0.0789, 5.052, 0.1558, 9.970),
    (2560, 64, 10_000, 6, 0.1343, 0.0597, 0.0678, 2.168, 0.0319, 2.044, 0.0596, 3.817),
    (1000, 8, 20_000, 2, 1.3975, 0.5639, 0.6372, 2.549, 0.2966, 2.373, 0.5642, 4.513),
    (1000, 8, 20_000, 6, 0.4863, 0.2160, 0.2866, 1.146, 0.1370, 1.096, 0.2177, 1.741),
]


@pytest.mark.parametrize("row", SETTINGS)
def test_printed_settings(row: tuple[float, ...]):
    n, batch, steps, epsilon, paper, full, code, m_code, add, m_add, swap, m_swap = row
    steps, half = int(steps), 6e-5

    formula = 2 * math.sqrt(2 * steps * math.log(math.e + epsilon / DELTA)) / epsilon
    assert 2 * formula / n == pytest.approx(paper, abs=half)
    noise_multiplier = accounting.calibrate_noise_multiplier(
        lambda m: accounting.full_batch_gaussian(m, steps, "replace_one"),
        epsilon,
        DELTA,
    )
    std = noise_multiplier * accounting.sensitivity("replace_one", 1.0)
    assert std / n == pytest.approx(full, abs=half)

    assert 2 * m_code / batch == pytest.approx(code, abs=2e-4)  # m is rounded
    assert m_add / batch == pytest.approx(add, abs=9e-5)
    assert m_swap / batch == pytest.approx(swap, abs=9e-5)
    q = batch / n
    got = poisson(m_add, steps, q, "add_or_remove")
    assert got == pytest.approx(epsilon, rel=1e-3)
    got = poisson(m_swap / 2, steps, q, "replace_one")
    assert got == pytest.approx(epsilon, rel=1e-3)


def test_printed_true_epsilon_of_the_authors_noise():
    assert poisson(2 * 13.516, 10_000, 1 / 16, "add_or_remove") == pytest.approx(
        0.85, abs=6e-3
    )
    assert poisson(2 * 5.156, 10_000, 1 / 16, "add_or_remove") == pytest.approx(
        2.48, abs=6e-3
    )


@pytest.mark.parametrize(
    ("batch", "m", "tolerance"),
    [(112, 12.497, 1e-3), (96, 12.505, 1e-3), (80, 14.46, 1e-3), (72, 22.1, 3e-3)],
)
def test_printed_truncation(batch: int, m: float, tolerance: float):
    """The notes' n of 1024 is the larger data set's."""

    def spent(relation: Relation, num_examples: int, noise: float) -> Epsilon:
        guarantee = accounting.truncated_poisson_gaussian(
            noise,
            10_000,
            sampling_prob=1 / 16,
            num_examples=num_examples,
            max_batch_size=batch,
            relation=relation,
        )
        return accounting.epsilon(*guarantee, DELTA)

    assert spent("add_or_remove", 1024, m) == pytest.approx(2, rel=tolerance)
    assert spent("zero_out", 1024, m) == spent("add_or_remove", 1024, m)
    if batch >= 96:  # Where truncation is free, it is so under every relation.
        assert spent("replace_one", 1024, 24.93 / 2) == pytest.approx(2, rel=1e-3)


def test_printed_sampling_without_replacement():
    """Relative to 2C: what the authors' noise would give, by RDP as it was printed."""
    step = dp.SampledWithoutReplacementDpEvent(1024, 64, dp.GaussianDpEvent(13.516))
    event = dp.SelfComposedDpEvent(step, 10_000)
    assert rdp(event, SWAP, DELTA) == pytest.approx(4.36, abs=6e-3)
    got = accounting.epsilon(event, SWAP, DELTA)
    assert got == pytest.approx(1.8848, abs=6e-5)
    assert got.accountant == "PLD"


# Which accountant, and how events nest.


def test_nested_gaussians_add_up_in_closed_form():
    twice = dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 2)
    four = dp.GaussianDpEvent(4.0)
    event = dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(dp.ComposedDpEvent([twice, four]), 5),
            dp.NoOpDpEvent(),
            dp.GaussianDpEvent(3.0),
            dp.SelfComposedDpEvent(dp.GaussianDpEvent(0.1), 0),
        ]
    )
    mu = math.sqrt(11 / 9 + 5 / 16)
    for relation, distance in ((ADD, 1), (SPECIAL, 1), (SWAP, 2)):
        got = accounting.epsilon(event, relation, DELTA)
        assert got.accountant == "Gaussian closed form"
        assert got == pytest.approx(accounting.gaussian_epsilon(distance * mu, DELTA))
        slow = PLDAccountant(relation, 1e-3)
        for m, count in ((3.0, 11), (4.0, 5)):
            slow.compose(dp.GaussianDpEvent(m), count)
        assert got == pytest.approx(slow.get_epsilon(DELTA), rel=1e-3)
        back = accounting.delta(event, relation, float(got))
        assert back == pytest.approx(DELTA, rel=1e-9)


def test_a_list_is_counted():
    step = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0))
    listed = dp.ComposedDpEvent([step] * 50)
    counted = dp.SelfComposedDpEvent(step, 50)
    for relation in (ADD, SWAP):
        got = accounting.epsilon(listed, relation, DELTA)
        assert got == accounting.epsilon(counted, relation, DELTA)
        back = accounting.delta(listed, relation, float(got))
        assert back == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("relation", [ADD, SPECIAL, SWAP])
def test_sampled_and_unsampled_share_one_unit(relation: dp.NeighboringRelation):
    """At a sampling probability near 1 a sampled Gaussian is the unsampled one."""
    plain = dp.GaussianDpEvent(5.0)
    nearly = dp.PoissonSampledDpEvent(1 - 1e-9, plain)
    mixed = dp.ComposedDpEvent([plain, nearly])
    got = accounting.epsilon(mixed, relation, DELTA)
    assert got.accountant == "PLD"
    want = accounting.epsilon(dp.SelfComposedDpEvent(plain, 2), relation, DELTA)
    assert got == pytest.approx(want, rel=1e-3)


def test_nothing_costs_nothing_and_no_noise_everything():
    nothing = dp.ComposedDpEvent([dp.NoOpDpEvent()])
    assert accounting.epsilon(nothing, ADD, DELTA) == 0
    assert accounting.delta(nothing, ADD, 0.0) == 0
    for event in (
        dp.NonPrivateDpEvent(),
        dp.ComposedDpEvent([dp.ZCDpEvent(0.1), dp.NonPrivateDpEvent()]),
        dp.SelfComposedDpEvent(dp.GaussianDpEvent(0.0), 3),
        dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.0)),
    ):
        assert accounting.epsilon(event, SWAP, DELTA) == math.inf
        assert accounting.delta(event, SWAP, 1.0) == 1
    assert accounting.epsilon(dp.NonPrivateDpEvent(), ADD, DELTA).accountant == (
        "no noise"
    )


@pytest.mark.parametrize("relation", [ADD, SPECIAL, SWAP])
def test_rdp_accounts_what_pld_cannot(relation: dp.NeighboringRelation):
    rho = 0.1257771
    got = accounting.epsilon(dp.ZCDpEvent(rho), relation, DELTA)
    assert got.accountant == "RDP"
    assert 2.0 < got < 2.4993


@pytest.mark.parametrize(("rho", "want"), [(3.2104e-4, 0.1), (2.43558e-2, 1.0)])
def test_orders_for_zcdp_leave_nothing_on_the_table(rho: float, want: float):
    """dp-accounting's own orders make 0.1038 of the first."""
    got = accounting.epsilon(dp.ZCDpEvent(rho), ADD, 1e-6)
    assert got == pytest.approx(want, abs=6e-5)
    assert got <= rdp(dp.ZCDpEvent(rho), ADD, 1e-6)
    # The bound over all orders; and many events are one.
    a = 1 + np.geomspace(1e-2, 1e5, 1_000_000)
    best = rho * a + np.log1p(-1 / a) - np.log(1e-6 * a) / (a - 1)
    assert best.min() <= got <= best.min() * (1 + 1e-4)
    parts = dp.ComposedDpEvent([dp.ZCDpEvent(rho / 4), dp.ZCDpEvent(rho / 2)] * 2)
    assert accounting.epsilon(parts, ADD, 1e-6) == pytest.approx(
        accounting.epsilon(dp.ZCDpEvent(1.5 * rho), ADD, 1e-6), rel=1e-9
    )


# Laplace: a pure guarantee too.


def laplace(scale: float, steps: int, q: float | None = None) -> accounting.Guarantee:
    if q is None:
        return accounting.full_batch_laplace(scale * math.sqrt(2), steps, "replace_one")
    return accounting.poisson_laplace(
        scale * math.sqrt(2), steps, sampling_prob=q, relation="zero_out"
    )


@pytest.mark.parametrize("q", [None, 0.3])
@pytest.mark.parametrize("scale", [0.001, 0.5, 30.0])
def test_pure_epsilons_add_up(q: float | None, scale: float):
    got = accounting.epsilon(*laplace(scale, 40, q), 0)
    assert got.accountant == "pure composition"
    step = 1 / scale
    if q is not None and step < 700:
        step = math.log1p(q * math.expm1(step))
    elif q is not None:
        step += math.log(q)
    assert got == pytest.approx(40 * step, rel=1e-12)
    assert accounting.delta(*laplace(scale, 40, q), float(got)) == 0


@pytest.mark.parametrize("q", [None, 0.3])
def test_a_little_delta_pays_where_steps_are_many(q: float | None):
    many = laplace(30.0, 400, q)
    got = accounting.epsilon(*many, DELTA)
    assert got.accountant == "PLD"
    assert got < 0.7 * accounting.epsilon(*many, 0)
    assert accounting.delta(*many, float(got)) == pytest.approx(DELTA, rel=1e-6)
    # In one step it does not: nearly all of the loss is at its largest.
    one = accounting.epsilon(*laplace(0.01, 1, q), DELTA)
    assert one <= accounting.epsilon(*laplace(0.01, 1, q), 0)


@pytest.mark.parametrize("q", [None, 0.3])
@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-3, 1 / 755])
def test_laplace_of_next_to_no_noise_has_its_pure_epsilon(
    q: float | None, scale: float
):
    """Of which PLD's tables cannot hold the exponential of a loss."""
    most = accounting.epsilon(*laplace(scale, 10, q), 0)
    assert 0.5 * most < accounting.epsilon(*laplace(scale, 10, q), DELTA) <= most
    assert 1 - 1e-9 < accounting.delta(*laplace(scale, 10, q), 1.0) <= 1
    assert accounting.delta(*laplace(scale, 10, q), float(most)) == 0
    poisson = accounting.poisson_gaussian(
        1e-6, 10, sampling_prob=0.1, relation="zero_out"
    )
    assert accounting.epsilon(*poisson, DELTA) == math.inf
    assert accounting.delta(*poisson, 1.0) == 1


def test_epsilon_of_laplace_tends_to_that_of_the_gaussian_of_equal_information():
    """A Laplace of scale b informs about its mean as a Gaussian of deviation b does."""
    scale, steps = 100.0, 20_000
    want = accounting.gaussian_epsilon(math.sqrt(steps) / scale, DELTA)
    got = accounting.epsilon(*laplace(scale, steps), DELTA)
    assert got == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize("event", [dp.GaussianDpEvent(1.0), dp.ZCDpEvent(0.1)])
def test_only_laplace_is_pure(event: dp.DpEvent):
    mixed = dp.ComposedDpEvent([dp.LaplaceDpEvent(1.0), event])
    for refused in (event, mixed):
        with pytest.raises(ValueError, match="delta"):
            accounting.epsilon(refused, ADD, 0)
    assert accounting.epsilon(dp.NonPrivateDpEvent(), ADD, 0) == math.inf
    assert accounting.epsilon(dp.ComposedDpEvent([]), ADD, 0) == 0


# The best of several runs.


def best_of(m: float, mean: float, shape: float) -> accounting.Guarantee:
    one = accounting.full_batch_gaussian(m, 1, "zero_out")
    return accounting.repeat_and_select(one, mean=mean, shape=shape)


@pytest.mark.parametrize(("mean", "shape"), [(10, 1.0), (50, 0.0), (5, 0.5)])
def test_selection_is_the_theorem_of_papernot_and_steinke(mean: float, shape: float):
    """Theorem 2, over the same orders, and Definition 1's mean, by summing its law."""
    m = 2.0

    def mean_of(gamma: float) -> float:
        k = np.arange(1, 20_000)
        steps = np.log1p((shape - 1) / np.arange(2, 20_000)) + math.log1p(-gamma)
        weights = np.exp(np.concatenate([[0.0], np.cumsum(steps)]))
        return float((k * weights).sum() / weights.sum())

    gamma = scipy.optimize.brentq(lambda g: mean_of(g) - mean, 1e-3, 1 - 1e-9)
    orders = np.array(RdpAccountant().orders)
    once = orders / (2 * m**2)
    extra = (1 + shape) * np.min((1 - 1 / orders) * once - math.log(gamma) / orders)  # pyright: ignore
    rdp = once + extra + math.log(mean) / (orders - 1)
    # The conversion of Canonne, Kamath and Steinke.
    candidates = rdp + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)
    got = accounting.epsilon(*best_of(m, mean, shape), DELTA)
    assert got.accountant == "RDP"
    assert got == pytest.approx(candidates.min(), rel=1e-6)


@pytest.mark.parametrize(("m", "mean"), [(2.0, 10.0), (1.0, 4.0), (0.5, 100.0)])
def test_a_poisson_number_of_runs_takes_their_exact_delta(m: float, mean: float):
    """Theorem 6, over the same orders; twice, and of samples, too; never above RDP's."""
    orders = np.array(RdpAccountant().orders)
    at = np.log1p(1 / (orders - 1))
    missed = [accounting.gaussian_delta(1 / m, float(e)) for e in at]
    rdp_of = orders / (2 * m**2) + mean * np.array(missed) + np.log(mean) / (orders - 1)
    for times in (1, 2):
        rdp_curve = times * rdp_of
        candidates = rdp_curve + np.log1p(-1 / orders)
        candidates -= np.log(DELTA * orders) / (orders - 1)
        one = best_of(m, mean, math.inf)
        event = dp.SelfComposedDpEvent(one.event, times)
        got = accounting.epsilon(event, one.event_relation, DELTA)
        assert got.accountant == "RDP"
        assert got == pytest.approx(candidates.min(), rel=1e-6)
        assert got < 0.999 * rdp(event, one.event_relation, DELTA)
    sampled = accounting.poisson_gaussian(
        m, 20, sampling_prob=0.1, relation="add_or_remove"
    )
    best = accounting.repeat_and_select(sampled, mean=mean, shape=math.inf)
    got = accounting.epsilon(*best, DELTA)
    assert accounting.epsilon(*sampled, DELTA) < got < rdp(*best, DELTA)


def test_selection_bounds_the_largest_of_geometrically_many_gaussians():
    """The exact delta of the largest output, and that selection does cost something."""
    m, mean = 1.0, 5.0
    gamma = 1 / mean
    x = np.linspace(-10, 14, 400_001)

    def density(shift: float) -> np.ndarray:
        """Of the largest of k draws: the derivative of gamma F / (1 - (1 - gamma) F)."""
        cdf = scipy.stats.norm.cdf(x, shift)
        return gamma * scipy.stats.norm.pdf(x, shift) / (1 - (1 - gamma) * cdf) ** 2

    def exact(epsilon: float) -> float:
        p, q = density(1 / m), density(0.0)
        excess = [np.maximum(a - math.exp(epsilon) * b, 0) for a, b in ((p, q), (q, p))]
        return max(float(e.sum() * (x[1] - x[0])) for e in excess)

    tuned = accounting.epsilon(*best_of(m, mean, 1.0), DELTA)
    once = accounting.epsilon(*accounting.full_batch_gaussian(m, 1, "zero_out"), DELTA)
    assert exact(float(tuned)) < DELTA < exact(float(once))


def test_selection_from_what_rdp_misreads_is_refused():
    for event in (
        dp.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 2.0),
        dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0)),
        dp.GaussianDpEvent(2.0),
    ):
        guarantee = accounting.repeat_and_select(
            accounting.Guarantee(event, SWAP), mean=3, shape=1
        )
        with pytest.raises(ValueError, match=r"REPLACE_ONE.*RepeatAndSelect"):
            accounting.epsilon(*guarantee, DELTA)
    subsets = accounting.fixed_size_gaussian(
        3, 7, num_examples=100, batch_size=16, relation="replace_one"
    )
    tuned = accounting.repeat_and_select(subsets, mean=3, shape=1)
    assert accounting.epsilon(*tuned, DELTA) > accounting.epsilon(*subsets, DELTA)


def test_events_that_hold_lists_are_accounted():
    event = dp.SingleEpochTreeAggregationDpEvent(10.0, [4, 8])
    assert accounting.epsilon(event, SPECIAL, DELTA).accountant == "RDP"


def test_losses_of_the_size_of_the_grid_are_not_inflated():
    """With dp-accounting's grid of 1e-4 this would be reported as 0.37."""
    q, m, steps = 1e-3, 40.0, 200_000
    guarantee = accounting.poisson_gaussian(
        m, steps, sampling_prob=q, relation="zero_out"
    )
    limit = accounting.gaussian_epsilon(q * math.sqrt(steps) / m, 1e-8)
    assert accounting.epsilon(*guarantee, 1e-8) == pytest.approx(limit, rel=0.04)


@pytest.mark.parametrize("m", [0.001, 0.05, 1.0, 100.0])
def test_tables_stay_small(m: float):
    for q, count in ((1e-6, 1), (0.5, 10**6)):
        for leaf in (
            dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(m)),
            dp.TruncatedSubsampledGaussianDpEvent(10**6, q, 10**6, m),
            dp.GaussianDpEvent(m),
        ):
            width = spending.loss_width(leaf, SWAP, count)
            assert width / spending._interval(((leaf, count),), SWAP) <= 3.001e5


# The number and its name.


def test_epsilon_is_a_number_with_a_name():
    epsilon = Epsilon(2.5, "PLD")
    assert epsilon == 2.5
    assert epsilon + 1 == 3.5
    assert str(epsilon) == f"{epsilon}" == "2.5"
    assert f"{epsilon:.3f}" == "2.500"
    assert repr(epsilon) == "Epsilon(2.5, accountant='PLD')"
    assert json.loads(json.dumps({"epsilon": epsilon})) == {"epsilon": 2.5}
    for same in (copy.deepcopy(epsilon), pickle.loads(pickle.dumps(epsilon))):
        assert (float(same), same.accountant) == (2.5, "PLD")


# What is refused.


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (dp.UnsupportedDpEvent(), ADD),
        (dp.SampledWithReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.0)), ADD),
        (dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.0)), ADD),
        (dp.LaplaceDpEvent(2.0), SWAP),
        (dp.SingleEpochTreeAggregationDpEvent(2.0, 8), SWAP),
        (dp.ComposedDpEvent([dp.ZCDpEvent(0.1), dp.GaussianDpEvent(1.0)]), SWAP),
    ],
)
def test_refuses_by_name(event: dp.DpEvent, relation: dp.NeighboringRelation):
    leaf = event.events[0] if isinstance(event, dp.ComposedDpEvent) else event
    for call in (
        lambda: accounting.epsilon(event, relation, DELTA),
        lambda: accounting.delta(event, relation, 1.0),
        lambda: accounting.self_check(accounting.Guarantee(event, relation)),
    ):
        with pytest.raises(ValueError) as refusal:
            call()
        assert relation.name in str(refusal.value)
        assert repr(leaf) in str(refusal.value)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: accounting.epsilon("x", ADD, DELTA), TypeError, "event must"),  # pyright: ignore
        (
            lambda: accounting.epsilon(dp.GaussianDpEvent(1.0), "zero_out", DELTA),  # pyright: ignore
            TypeError,
            "event_relation must",
        ),
        (
            lambda: accounting.epsilon(dp.GaussianDpEvent(1.0), ADD, 0.0),
            ValueError,
            "delta",
        ),
        (
            lambda: accounting.delta(dp.GaussianDpEvent(1.0), ADD, -1.0),
            ValueError,
            "epsilon",
        ),
    ],
)
def test_refuses(call, error, names):
    with pytest.raises(error, match=names):
        call()
