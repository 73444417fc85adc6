"""The attacks on transcripts made by NumPy, of laws that are known."""

from typing import Any

import numpy as np
import pytest

from jaxdp import plans, sampling
from jaxdp.auditing import attacks, bounds, canaries, measured

PLAN = plans.DPZero(
    num_examples=8,
    num_steps=4,
    sampling=sampling.FullBatch(),
    relation="zero_out",
    l2_clip_norm=1.0,
    smoothing_radius=1e-3,
).with_noise(noise_multiplier=4.0, delta=1e-5)  # mu = 0.5
CANARY = canaries.of_sums(PLAN)[0]
RUNS = 20_000
SIGNS = np.array([1.0, 1.0, -1.0, 1.0])


def noise(seed: int, steps: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(RUNS, steps, 1))


def moved(x: np.ndarray, by: float = 1.0) -> np.ndarray:
    return x + by * (CANARY.moves * SIGNS)[:, None]


def found(first: np.ndarray, second: np.ndarray, plan: plans.DPZero = PLAN) -> dict:
    """The epsilon that each attack promises on the second half of the runs."""
    half = RUNS // 2
    learned = attacks.attacks(plan, CANARY, first[:half], second[:half])
    rule = bounds.Rule(1e-5, 1e-6, gaussian=True)
    return {
        name: bounds.best_threshold(score(first[half:]), score(second[half:]), rule)[1]
        for name, score in learned.items()
    }


def test_what_is_claimed_is_found_and_no_more() -> None:
    claimed = PLAN.epsilon()
    assert np.all(CANARY.moves == 0.25)
    for name, epsilon in found(moved(noise(0)), noise(1)).items():
        assert 0.4 * claimed < epsilon < claimed, name


def test_two_data_sets_of_one_law_are_not_told_apart() -> None:
    assert set(found(noise(0), noise(1)).values()) == {0.0}


def test_a_public_stream_is_subtracted() -> None:
    """Whatever is the same in all runs changes nothing: here up to 1e6 deviations."""
    stream = 1e6 * np.random.default_rng(9).normal(size=(4, 1))
    plain = found(moved(noise(0)), noise(1))
    shifted = found(moved(noise(0)) + stream, noise(1) + stream)
    for name, epsilon in plain.items():
        assert shifted[name] == pytest.approx(epsilon, rel=0.02), name


def test_noise_that_is_a_public_stream_hides_nothing() -> None:
    stream = noise(0)[:1] + np.zeros((RUNS, 1, 1))
    epsilons = found(moved(stream), stream)
    for name in ("likelihood ratio", "linear"):
        assert epsilons[name] > 20 * PLAN.epsilon(), name


def test_noise_shared_by_two_steps_is_found() -> None:
    shared = lambda seed: noise(seed, 2)[:, [0, 0, 1, 1]]  # noqa: E731
    epsilons = found(moved(shared(0)), shared(1))
    assert epsilons["linear"] > 20 * PLAN.epsilon()  # Steps 2 and 3 differ in sign.


def test_another_scale_is_found() -> None:
    epsilons = found(2 * noise(0), noise(1))
    assert epsilons["histogram"] > 2 * PLAN.epsilon()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_found(bad: float) -> None:
    first = np.where(np.arange(4)[:, None] == 2, bad, noise(0))
    assert found(first, noise(1))["histogram"] > 20 * PLAN.epsilon()
    assert found(noise(1), first)["histogram"] > 20 * PLAN.epsilon()


@pytest.mark.parametrize("groups", [1, 2])
def test_likelihood_ratio_of_a_mixture_is_the_best_for_it(groups: int) -> None:
    """With groups, in the steps of the first one alone: the others say nothing."""
    sampler: Any = sampling.TruncatedPoisson(sampling_prob=0.3, max_batch_size=8)
    if groups > 1:
        sampler = sampling.CyclicPoisson(
            num_groups=groups, sampling_prob=0.3, max_batch_size=4
        )
    plan = plans.DPZero(
        num_examples=8,
        num_steps=4,
        sampling=sampler,
        relation="zero_out",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
    ).with_noise(noise_multiplier=0.5, delta=1e-5)
    (canary, *_) = canaries.of_sums(plan)
    assert np.all(canary.moves == 2.0)
    turn = np.arange(4) % groups == 0
    reads = (np.random.default_rng(5).random((RUNS, 4, 1)) < 0.3) & turn[:, None]
    first, second = noise(0) + 2.0 * reads * SIGNS[:, None], noise(1)
    learned = attacks.attacks(plan, canary, first, second)
    x = second[:, :, 0] * SIGNS
    exact = np.log(0.7 + 0.3 * np.exp(2 * x - 2))[:, turn].sum(axis=1)
    # Location and direction are learned from 20000 runs.
    score = learned["likelihood ratio"](second)
    assert np.corrcoef(score, exact)[0, 1] > 0.9999
    np.testing.assert_allclose(score, exact, atol=0.2)


@pytest.mark.parametrize("shared", [False, True])
def test_noise_shared_by_rounds_of_marginals_is_found(shared: bool) -> None:
    plan = plans.MWEM(
        num_examples=20,
        num_steps=3,
        relation="replace_one",
        sizes=(2, 2),
        attributes=((0,), (1,), (0, 1)),
        num_start=1,
    ).calibrate(epsilon=1.0, delta=1e-5)
    (canary,) = measured.canaries(plan)

    def made(data: canaries.DataSet, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        drawn = np.concatenate(
            [np.full((RUNS, 1), -1), rng.integers(3, size=(RUNS, 2))], 1
        )
        each = rng.normal(size=(RUNS, 3, 4)) * plan.noise_std
        noise = each[:, [0, 0, 0] if shared else [0, 1, 2]]
        # Of the noise of a step, the cells of its marginal have the first numbers.
        shares = measured.true_counts(plan, data) / plan.num_examples
        shares = shares + noise[..., [0, 1, 0, 1, 0, 1, 2, 3]]
        model = np.zeros_like(shares)
        full = np.concatenate([drawn[..., None], shares, model], -1)
        seen = measured.measured_cells(plan, measured.read(plan, full))
        return np.concatenate([drawn[..., None], shares * seen, model], -1)

    one, other = made(canary.first, 0), made(canary.second, 1)
    half = RUNS // 2
    learned = measured.attacks(plan, canary, one[:half], other[:half])
    rule = bounds.Rule(1e-5, 1e-6, zcdp=True)
    epsilons = {
        name: bounds.best_threshold(score(one[half:]), score(other[half:]), rule)[1]
        for name, score in learned.items()
    }
    assert epsilons["likelihood ratio"] < plan.epsilon()
    assert (epsilons["covariance"] > 5 * plan.epsilon()) == shared
    if not shared:
        assert epsilons["covariance"] < plan.epsilon()
