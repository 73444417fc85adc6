import math

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant

from jaxdp import accounting
from jaxdp.accounting import spending
from jaxdp.core.types import Relation

DELTA = 1e-5


def full(m: float, steps: int, relation: Relation) -> accounting.Guarantee:
    return accounting.full_batch_gaussian(m, steps, relation)


def poisson(m: float, steps: int, relation: Relation) -> accounting.Guarantee:
    return accounting.poisson_gaussian(m, steps, sampling_prob=0.1, relation=relation)


def truncated(m: float, steps: int, relation: Relation) -> accounting.Guarantee:
    return accounting.truncated_poisson_gaussian(
        m,
        steps,
        sampling_prob=0.1,
        num_examples=400,
        max_batch_size=72,
        relation=relation,
    )


@pytest.mark.parametrize(
    ("make", "relation"),
    [
        (full, "zero_out"),
        (full, "replace_one"),
        (poisson, "add_or_remove"),
        pytest.param(poisson, "replace_one", marks=pytest.mark.slow),
        pytest.param(truncated, "add_or_remove", marks=pytest.mark.slow),
        (truncated, "replace_one"),
    ],
)
@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_noise_and_steps_fit_and_nothing_is_left(make, relation, epsilon):
    steps = 1000
    noise = accounting.calibrate_noise_multiplier(
        lambda m: make(m, steps, relation), epsilon, DELTA
    )
    assert accounting.epsilon(*make(noise, steps, relation), DELTA) <= epsilon
    less = noise * (1 - (1e-11 if make is full else 2e-5))
    assert accounting.epsilon(*make(less, steps, relation), DELTA) > epsilon

    most = accounting.calibrate_num_steps(
        lambda t: make(noise, t, relation), epsilon, DELTA
    )
    assert most == steps
    most = accounting.calibrate_num_steps(
        lambda t: make(0.7 * noise, t, relation), epsilon, DELTA
    )
    assert 1 < most < steps
    guarantee = make(0.7 * noise, most, relation)
    assert accounting.epsilon(*guarantee, DELTA) <= epsilon
    guarantee = make(0.7 * noise, most + 1, relation)
    assert accounting.epsilon(*guarantee, DELTA) > epsilon


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("steps", [1, 3000, 10**6])
def test_full_batch_noise_is_the_closed_form(epsilon: float, steps: int):
    noise = accounting.calibrate_noise_multiplier(
        lambda m: full(m, steps, "zero_out"), epsilon, 1e-6
    )
    want = math.sqrt(steps) / accounting.gaussian_mu(epsilon, 1e-6)
    assert noise == pytest.approx(want, rel=1e-11)


def test_agrees_with_the_librarys_own_search():
    def event(m: float) -> dp.DpEvent:
        step = dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(m))
        return dp.SelfComposedDpEvent(step, 1000)

    theirs = dp.calibrate_dp_mechanism(
        PLDAccountant, event, 1.0, DELTA, dp.ExplicitBracketInterval(2.0, 3.0), tol=1e-4
    )
    ours = accounting.calibrate_noise_multiplier(
        lambda m: accounting.poisson_gaussian(
            m, 1000, sampling_prob=0.02, relation="add_or_remove"
        ),
        1.0,
        DELTA,
    )
    assert ours == pytest.approx(theirs, abs=1.5e-4)


def recipe(m: float) -> accounting.Guarantee:
    return accounting.truncated_poisson_gaussian(
        m,
        3000,
        sampling_prob=64 / 1437,
        num_examples=1437,
        max_batch_size=96,
        relation="replace_one",
    )


@pytest.mark.parametrize("lie", [None, 0.5, 1.001, 3.0])
def test_estimates_say_where_to_look_and_nothing_else(
    lie: float | None, monkeypatch: pytest.MonkeyPatch
):
    """At most two full tables in place of six, for the same noise; lies do no harm."""
    estimated, full = spending.estimated_epsilon, spending._composed
    if lie is not None:
        monkeypatch.setattr(
            spending, "estimated_epsilon", lambda *args: lie * estimated(*args)
        )
    full.cache_clear()
    noise = accounting.calibrate_noise_multiplier(recipe, 4.0, DELTA)
    assert lie is not None or full.cache_info().misses <= 2
    assert accounting.epsilon(*recipe(noise), DELTA) <= 4.0
    assert accounting.epsilon(*recipe(noise * (1 - 2e-5)), DELTA) > 4.0


def test_estimates_are_close_and_of_pld_alone():
    guarantee = recipe(3.0)
    exact = accounting.epsilon(*guarantee, DELTA)
    for coarser, tolerance in (((32,), 0.1), ((8, 16), 1e-4), ((4, 8, 16), 1e-5)):
        found = spending.estimated_epsilon(*guarantee, DELTA, coarser)
        assert found == pytest.approx(exact, rel=tolerance)
    zcdp, laplace = (
        accounting.zcdp(0.1),
        accounting.full_batch_laplace(9, 5, "zero_out"),
    )
    for other, delta in ((full(1, 9, "zero_out"), DELTA), (zcdp, DELTA), (laplace, 0)):
        assert math.isnan(spending.estimated_epsilon(*other, delta, (2,)))


def test_families_without_a_mu_are_calibrated_too():
    """zCDP, which RDP accounts: no central limit theorem to start from."""

    def make(m: float, steps: int = 1) -> accounting.Guarantee:
        event = dp.SelfComposedDpEvent(dp.ZCDpEvent(0.5 / m**2), steps)
        return accounting.Guarantee(event, dp.NeighboringRelation.REPLACE_ONE)

    noise = accounting.calibrate_noise_multiplier(make, 2.0, DELTA)
    assert 2.0 * (1 - 1e-4) < accounting.epsilon(*make(noise), DELTA) <= 2.0
    steps = accounting.calibrate_num_steps(lambda t: make(50.0, t), 2.0, DELTA)
    assert accounting.epsilon(*make(50.0, steps), DELTA) <= 2.0
    assert accounting.epsilon(*make(50.0, steps + 1), DELTA) > 2.0


@pytest.mark.parametrize("q", [None, 1 / 16])
@pytest.mark.parametrize("delta", [0, DELTA])
def test_laplace_is_calibrated_with_and_without_delta(q: float | None, delta: float):
    def make(m: float, steps: int = 500) -> accounting.Guarantee:
        if q is None:
            return accounting.full_batch_laplace(m, steps, "replace_one")
        return accounting.poisson_laplace(
            m, steps, sampling_prob=q, relation="zero_out"
        )

    noise = accounting.calibrate_noise_multiplier(make, 2.0, delta)
    rel = 1e-12 if delta == 0 else 1e-4
    assert 2.0 * (1 - rel) <= accounting.epsilon(*make(noise), delta) <= 2.0
    most = accounting.calibrate_num_steps(lambda t: make(noise, t), 2.0, delta)
    assert most in (500, 501)  # 501 where the last bit of noise pays for one more.
    if delta == 0 and q is None:
        assert noise == pytest.approx(math.sqrt(2) * 500 / 2.0, rel=1e-12)


def test_laplace_is_calibrated_to_an_epsilon_that_protects_nobody():
    def make(m: float) -> accounting.Guarantee:
        return accounting.poisson_laplace(m, 9, sampling_prob=0.1, relation="zero_out")

    noise = accounting.calibrate_noise_multiplier(make, 1e4, DELTA)
    assert 1e4 * (1 - 1e-4) <= accounting.epsilon(*make(noise), DELTA) <= 1e4


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_what_is_selected_from_is_calibrated(shape: float):
    def make(m: float, steps: int = 3000) -> accounting.Guarantee:
        one = full(m, steps, "replace_one")
        return accounting.repeat_and_select(one, mean=10, shape=shape)

    noise = accounting.calibrate_noise_multiplier(make, 2.0, DELTA)
    assert 2.0 * (1 - 1e-4) <= accounting.epsilon(*make(noise), DELTA) <= 2.0
    one = accounting.calibrate_noise_multiplier(
        lambda m: full(m, 3000, "replace_one"), 2.0, DELTA
    )
    assert 1.5 * one < noise < 3.5 * one
    most = accounting.calibrate_num_steps(lambda t: make(noise, t), 2.0, DELTA)
    assert most == 3000


def test_steps_stop_at_the_maximum():
    for cap in (1, 7):
        got = accounting.calibrate_num_steps(
            lambda t: full(1e6, t, "zero_out"), 2.0, DELTA, max_steps=cap
        )
        assert got == cap


def test_one_step_that_costs_too_much_is_refused_with_its_cost():
    with pytest.raises(
        ValueError, match=r"epsilon must be at least 4\.37718.*got 1\.0"
    ):
        accounting.calibrate_num_steps(
            lambda t: full(1.0, t, "replace_one"), 1.0, DELTA
        )
    with pytest.raises(ValueError, match="epsilon must be at least inf"):
        accounting.calibrate_num_steps(lambda t: full(0, t, "zero_out"), 1.0, DELTA)


def test_noise_out_of_reach_is_refused():
    for constant, bound in (
        (0.0, "epsilon or delta must be larger, got epsilon = 2: .* or more"),
        (1.0, "epsilon must be larger, got epsilon = 2: noise_multiplier"),
        (4.0, "epsilon must be smaller, got epsilon = 2: noise_multiplier"),
    ):
        with pytest.raises(ValueError, match=bound):
            accounting.calibrate_noise_multiplier(
                lambda m, constant=constant: full(constant, 1, "zero_out"), 2.0, DELTA
            )


@pytest.mark.parametrize(
    ("epsilon", "delta", "names"),
    [(0.0, 1e-5, "epsilon"), (math.inf, 1e-5, "epsilon"), (1.0, 0.0, "delta")],
)
def test_refuses(epsilon: float, delta: float, names: str):
    with pytest.raises(ValueError, match=names):
        accounting.calibrate_noise_multiplier(
            lambda m: full(m, 1, "zero_out"), epsilon, delta
        )
    with pytest.raises(ValueError, match=names):
        accounting.calibrate_num_steps(
            lambda t: full(1.0, t, "zero_out"), epsilon, delta
        )


def test_losses_too_small_for_coarse_grids():
    """They raise in dp-accounting; the search among bounds goes on without them."""

    def guarantee(m: float) -> accounting.Guarantee:
        event = dp.PoissonSampledDpEvent(1e-6, dp.GaussianDpEvent(m))
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        return accounting.Guarantee(dp.SelfComposedDpEvent(event, 10), relation)

    found = accounting.calibrate_noise_multiplier(guarantee, 0.1, 1e-7)
    assert 0.0999 < spending.epsilon(*guarantee(found), 1e-7) <= 0.1


def test_guesses_that_are_far_off_and_small_losses_take_few_tables():
    """Six full tables where the first guess has no finite epsilon; twelve were needed."""

    def rare(m: float) -> accounting.Guarantee:
        return accounting.poisson_gaussian(
            m, 10000, sampling_prob=1e-4, relation="add_or_remove"
        )

    full = spending._composed
    full.cache_clear()
    noise = accounting.calibrate_noise_multiplier(rare, 1.0, 1e-8)
    assert full.cache_info().misses <= 6
    assert 1 - 1e-4 <= accounting.epsilon(*rare(noise), 1e-8) <= 1.0


def test_small_losses_of_truncated_samples_take_few_tables():
    """Four full tables at most, after coarse grids; eight were needed."""

    def rare(m: float) -> accounting.Guarantee:
        return accounting.truncated_poisson_gaussian(
            m,
            10_000,
            sampling_prob=1e-3,
            num_examples=100_000,
            max_batch_size=160,
            relation="add_or_remove",
        )

    full = spending._composed
    full.cache_clear()
    noise = accounting.calibrate_noise_multiplier(rare, 1.0, DELTA)
    assert full.cache_info().misses <= 4
    assert 1 - 1e-5 <= accounting.epsilon(*rare(noise), DELTA) <= 1.0


def test_budgets_of_next_to_no_noise_are_calibrated():
    """Grids grew with the square of an estimate that is far above the truth there."""

    def guarantee(m: float) -> accounting.Guarantee:
        return accounting.poisson_gaussian(
            m, 10, sampling_prob=0.01, relation="replace_one"
        )

    noise = accounting.calibrate_noise_multiplier(guarantee, 50.0, DELTA)
    assert 50 * (1 - 1e-4) < accounting.epsilon(*guarantee(noise), DELTA) <= 50.0
