import math

import dp_accounting as dp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from jaxdp import accounting
from jaxdp.core.types import Relation

ADD, SWAP, SPECIAL = (
    dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dp.NeighboringRelation.REPLACE_ONE,
    dp.NeighboringRelation.REPLACE_SPECIAL,
)


def test_relations_and_sensitivity():
    assert accounting.RELATIONS == ("replace_one", "zero_out", "add_or_remove")
    got = [accounting.sensitivity(r, 1.5) for r in accounting.RELATIONS]
    assert got == [3.0, 1.5, 1.5]
    assert accounting.sensitivity("zero_out", math.inf) == math.inf


@pytest.mark.parametrize("relation", accounting.RELATIONS)
def test_unsampled_is_relative_to_the_sensitivity(relation: Relation):
    event, event_relation = accounting.full_batch_gaussian(3, 7, relation)
    assert event == dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 7)
    assert event_relation is ADD


@pytest.mark.parametrize(
    ("relation", "event_relation", "per_clip", "larger"),
    [
        ("replace_one", SWAP, 6.0, 100),
        ("zero_out", SPECIAL, 3.0, 100),
        ("add_or_remove", ADD, 3.0, 100),
    ],
)
def test_sampled_is_relative_to_the_clip(relation, event_relation, per_clip, larger):
    poisson = accounting.poisson_gaussian(3, 7, sampling_prob=0.1, relation=relation)
    gaussian = dp.GaussianDpEvent(per_clip)
    event = dp.PoissonSampledDpEvent(0.1, gaussian)
    assert poisson == (dp.SelfComposedDpEvent(event, 7), event_relation)
    truncated = accounting.truncated_poisson_gaussian(
        3,
        7,
        sampling_prob=0.1,
        num_examples=100,
        max_batch_size=16,
        relation=relation,
    )
    event = dp.TruncatedSubsampledGaussianDpEvent(larger, 0.1, 16, per_clip)
    assert truncated == (dp.SelfComposedDpEvent(event, 7), event_relation)


def test_random_subsets_are_relative_to_the_sensitivity():
    got = accounting.fixed_size_gaussian(
        3, 7, num_examples=100, batch_size=16, relation="replace_one"
    )
    step = dp.SampledWithoutReplacementDpEvent(100, 16, dp.GaussianDpEvent(3.0))
    assert got == (dp.SelfComposedDpEvent(step, 7), SWAP)
    full = accounting.fixed_size_gaussian(
        3, 7, num_examples=100, batch_size=100, relation="replace_one"
    )
    assert full == accounting.full_batch_gaussian(3, 7, "replace_one")


def test_laplace_is_told_its_scale():
    """Whose standard deviation is sqrt(2) scales."""
    scale = dp.LaplaceDpEvent(3 / math.sqrt(2))
    for relation in accounting.RELATIONS:
        got = accounting.full_batch_laplace(3, 7, relation)
        assert got == (dp.SelfComposedDpEvent(scale, 7), ADD)
    for relation, event_relation in (("zero_out", SPECIAL), ("add_or_remove", ADD)):
        got = accounting.poisson_laplace(3, 7, sampling_prob=0.1, relation=relation)  # pyright: ignore
        step = dp.PoissonSampledDpEvent(0.1, scale)
        assert got == (dp.SelfComposedDpEvent(step, 7), event_relation)


def test_zcdp_of_gaussians_is_their_closed_form():
    rho = accounting.gaussian_rho(199.3812, 10_000)
    assert rho == pytest.approx(0.1257771, rel=1e-6)  # 10_000 / (2 * 199.3812**2)
    event, relation = accounting.zcdp(rho)
    assert event == dp.ZCDpEvent(rho)
    gaussian = accounting.full_batch_gaussian(199.3812, 10_000, "zero_out")
    # RDP knows no more of Gaussians than their rho.
    from dp_accounting.rdp import RdpAccountant

    theirs = RdpAccountant().compose(gaussian.event).get_epsilon(1e-5)
    assert accounting.epsilon(event, relation, 1e-5) == pytest.approx(theirs, rel=1e-12)
    assert accounting.epsilon(*accounting.zcdp(0.0), 1e-5) == 0


def test_selection_wraps_the_event_of_one_run():
    one = accounting.full_batch_gaussian(3, 7, "replace_one")
    got = accounting.repeat_and_select(one, mean=10, shape=1)
    assert (got.event.event, got.event.mean, got.event.shape) == (one.event, 10.0, 1.0)  # pyright: ignore
    assert got.event_relation is one.event_relation


@pytest.mark.parametrize("relation", accounting.RELATIONS)
def test_no_noise_is_not_private(relation: Relation):
    zero = accounting.full_batch_gaussian(0, 7, relation)
    tuned = accounting.repeat_and_select(zero, mean=3, shape=1)
    assert accounting.epsilon(*tuned, 1e-5) == math.inf
    for guarantee in (
        zero,
        accounting.full_batch_laplace(0, 7, relation),
        accounting.poisson_gaussian(0, 7, sampling_prob=0.1, relation=relation),
    ):
        assert guarantee.event == dp.NonPrivateDpEvent()
        assert accounting.epsilon(*guarantee, 1e-5) == math.inf


def independent_std(epsilon: float, delta: float, distance: float, steps: int) -> float:
    """Least std of ``steps`` Gaussians at a distance, from the definition of delta."""

    def gap(std: float) -> float:
        # The steps are one Gaussian in the direction of the move, sqrt(steps) as far.
        mu = math.sqrt(steps) * distance / std
        cut = epsilon / mu + mu / 2
        norm = scipy.stats.norm
        return float(norm.sf(cut, mu) - math.exp(epsilon) * norm.sf(cut) - delta)

    return scipy.optimize.brentq(gap, 1e-3 * distance, 1e5 * distance, rtol=1e-12)  # pyright: ignore


@pytest.mark.parametrize("relation", accounting.RELATIONS)
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_integer_noise_follows_from_epsilon_alone(relation: Relation, epsilon: float):
    """Mixing up std over C and std over the sensitivity would halve the noise."""
    clip, bits, steps, delta = 0.7, 16, 3000, 1e-5
    worst = {"replace_one": 2 ** (bits + 1), "zero_out": 2**bits}
    want = independent_std(epsilon, delta, worst.get(relation, 2**bits), steps)

    noise_multiplier = accounting.calibrate_noise_multiplier(
        lambda m: accounting.full_batch_gaussian(m, steps, relation), epsilon, delta
    )
    std = noise_multiplier * accounting.sensitivity(relation, clip)
    assert std * 2**bits / clip == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("relation", accounting.RELATIONS)
def test_sampled_integer_noise_follows_from_epsilon_alone(relation: Relation):
    """Many small sampled steps are nearly one Gaussian, q sqrt(T) from its neighbour."""
    q, steps, bits = 1 / 16, 10_000, 12
    worst = 2 ** (bits + (relation == "replace_one"))
    want = independent_std(2.0, 1e-5, q * worst, steps)
    noise_multiplier = accounting.calibrate_noise_multiplier(
        lambda m: accounting.poisson_gaussian(
            m, steps, sampling_prob=q, relation=relation
        ),
        2.0,
        1e-5,
    )
    std = noise_multiplier * accounting.sensitivity(relation, 1.0) * 2**bits
    assert std == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize(
    ("n", "q", "batch", "m", "delta"),
    [
        (2, 0.333, 1, 0.25, 0.23),
        (3, 0.4995, 2, 0.25, 0.397),
        (6, 0.285, 2, 0.25, 0.215),
    ],
)
def test_a_record_is_charged_as_often_as_it_is_kept(n, q, batch, m, delta):
    """All others contribute 0: then it is a Gaussian that is seen with that probability.

    A record that is absent keeps its place: it would be kept less often among n + 1.
    """
    drawn = np.arange(n + 1)
    kept = np.minimum(drawn, batch) @ scipy.stats.binom.pmf(drawn, n, q) / n

    def true_delta(epsilon: float) -> float:
        loss = np.log1p(np.expm1(epsilon) / kept)
        there = scipy.stats.norm.sf(m * loss - 0.5 / m)
        return kept * (there - np.exp(loss) * scipy.stats.norm.sf(m * loss + 0.5 / m))

    for relation in ("add_or_remove", "zero_out"):
        guarantee = accounting.truncated_poisson_gaussian(
            m,
            1,
            sampling_prob=q,
            num_examples=n,
            max_batch_size=batch,
            relation=relation,
        )
        assert true_delta(accounting.epsilon(*guarantee, delta)) <= delta * (1 + 1e-9)


def selected(**changes):
    one = accounting.full_batch_gaussian(3, 7, "replace_one")
    return accounting.repeat_and_select(one, **{"mean": 2.0, "shape": 1.0} | changes)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: accounting.sensitivity("replace", 1.0), ValueError, "relation"),  # pyright: ignore
        (lambda: accounting.sensitivity("zero_out", 0.0), ValueError, "l2_clip_norm"),
        (
            lambda: accounting.full_batch_gaussian(-1, 5, "zero_out"),
            ValueError,
            "noise_multiplier",
        ),
        (
            lambda: accounting.full_batch_gaussian(math.inf, 5, "zero_out"),
            ValueError,
            "noise_multiplier",
        ),
        (
            lambda: accounting.full_batch_gaussian(1, 0, "zero_out"),
            ValueError,
            "num_steps",
        ),
        (
            lambda: accounting.full_batch_gaussian(1, 2.0, "zero_out"),  # pyright: ignore
            TypeError,
            "num_steps",
        ),
        (
            lambda: accounting.full_batch_gaussian(1, 5, "swap"),  # pyright: ignore
            ValueError,
            "relation",
        ),
        (
            lambda: accounting.poisson_gaussian(
                1, 5, sampling_prob=1.0, relation="zero_out"
            ),
            ValueError,
            "sampling_prob",
        ),
        (
            lambda: accounting.poisson_gaussian(
                1,
                5,
                sampling_prob=0.1,
                relation="swap",  # pyright: ignore
            ),
            ValueError,
            "relation",
        ),
        (
            lambda: accounting.truncated_poisson_gaussian(
                1.0,
                5,
                sampling_prob=0.5,
                num_examples=100,
                max_batch_size=0,
                relation="zero_out",
            ),
            ValueError,
            "max_batch_size",
        ),
        (
            lambda: accounting.fixed_size_gaussian(
                1, 5, num_examples=10, batch_size=5, relation="zero_out"
            ),
            ValueError,
            "relation must be 'replace_one'.*no accountant",
        ),
        (
            lambda: accounting.fixed_size_gaussian(
                1, 5, num_examples=10, batch_size=11, relation="replace_one"
            ),
            ValueError,
            "batch_size",
        ),
        (
            lambda: accounting.poisson_laplace(
                1, 5, sampling_prob=0.1, relation="replace_one"
            ),
            ValueError,
            "relation must be 'zero_out' or 'add_or_remove'.*no bound",
        ),
        (lambda: accounting.full_batch_laplace(1, 0, "zero_out"), ValueError, "steps"),
        (lambda: accounting.zcdp(-1.0), ValueError, "rho"),
        (lambda: accounting.zcdp(math.inf), ValueError, "rho"),
        (lambda: accounting.gaussian_rho(0.0), ValueError, "noise_multiplier"),
        (lambda: selected(mean=0.5), ValueError, "mean"),
        (lambda: selected(mean=math.inf), ValueError, "mean"),
        (lambda: selected(shape=-0.5), ValueError, "shape"),
        (lambda: selected(shape=math.nan), ValueError, "shape"),
        (lambda: selected(shape="geometric"), TypeError, "shape"),
        (
            lambda: accounting.repeat_and_select(
                dp.GaussianDpEvent(1.0),  # pyright: ignore
                mean=2,
                shape=1,
            ),
            TypeError,
            "guarantee",
        ),
    ],
)
def test_refuses(call, error, names):
    with pytest.raises(error, match=names):
        call()
