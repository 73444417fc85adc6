"""Plans: units, guarantees, text, refusals."""

import copy
import dataclasses
import json
import math
import pickle
from fractions import Fraction
from typing import Any

import dp_accounting as dp
import pytest

from jaxdp import accounting, plans, sampling

POISSON = sampling.TruncatedPoisson(sampling_prob=1 / 16, max_batch_size=96)
# Never truncated: plain Poisson sampling.
WHOLE = sampling.TruncatedPoisson(sampling_prob=1 / 16, max_batch_size=1024)
SAMPLERS = (
    sampling.FullBatch(),
    POISSON,
    WHOLE,
    sampling.FixedSize(64),
    sampling.SinglePass(10),
    sampling.ShuffledEpochs(64),
    sampling.External(64),
)
TUNING = plans.ClipTuning(
    target_unclipped_quantile=0.7, learning_rate=0.2, count_noise_multiplier=30.0
)
RELATIONS = ("replace_one", "zero_out", "add_or_remove")


def make(kind: type = plans.DPZero, **changes: Any) -> Any:
    base: dict[str, Any] = {
        "num_examples": 1024,
        "num_steps": 100,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 2.0,
    }
    if kind is plans.DPZero:
        base["smoothing_radius"] = 1e-3
    return kind(**(base | changes))


KINDS = pytest.mark.parametrize("kind", [plans.DPZero, plans.DPGD])


@KINDS
@pytest.mark.parametrize("relation", RELATIONS)
def test_units(kind: type, relation: str) -> None:
    plan = make(kind, relation=relation).with_noise(noise_multiplier=3.0)
    factor = 2 if relation == "replace_one" else 1
    assert plan.sensitivity == factor * 2.0
    assert plan.noise_std == pytest.approx(3.0 * plan.sensitivity / 1024)
    assert plan.normalizer == 1024
    grid = plan.grid_noise_std * plan.l2_clip_norm / 2**plan.grid_bits
    # Up to the next whole grid unit, for integer noise hides a little less.
    assert 0 < grid - 3.0 * plan.sensitivity <= plan.l2_clip_norm / 2**plan.grid_bits
    assert plan.phases == (("step", 1, 1024),)


@KINDS
@pytest.mark.parametrize("relation", RELATIONS)
def test_calibrated_full_batches_cost_the_same_under_every_relation(
    kind: type, relation: str
) -> None:
    plan = make(kind, relation=relation, num_steps=10_000)
    plan = plan.calibrate(epsilon=2.0, delta=1e-5)
    # mu* = 0.501552 (digest 4.2): noise over sensitivity is sqrt(T) / mu*.
    assert plan.noise_multiplier == pytest.approx(100 / 0.501552, rel=1e-5)
    spent = plan.epsilon()
    assert spent == pytest.approx(2.0, rel=1e-6)
    assert spent <= 2.0
    assert isinstance(spent.accountant, str)


@pytest.mark.parametrize(
    ("relation", "std_over_clip", "epsilon"),
    [("add_or_remove", 12.505, 2.0), ("zero_out", 12.505, None)],
)
def test_truncated_poisson(
    relation: str, std_over_clip: float, epsilon: float | None
) -> None:
    plan = make(sampling=POISSON, relation=relation, num_steps=10_000)
    plan = plan.with_noise(noise_multiplier=std_over_clip, delta=1e-5)
    assert plan.normalizer == 64
    assert plan.noise_std == pytest.approx(std_over_clip * 2.0 / 64)
    spent = plan.epsilon()
    if epsilon is None:  # Zeroing a record moves half as much as the pair of both.
        assert spent < 2.0
    else:
        assert spent == pytest.approx(epsilon, abs=2e-3)


def test_sampled_replace_one_is_relative_to_the_clip() -> None:
    """The same integers: 24.93 clips of noise are 12.465 sensitivities."""
    plan = make(sampling=POISSON, num_steps=10_000)
    plan = plan.with_noise(noise_multiplier=24.93 / 2, delta=1e-5)
    assert plan.noise_std == pytest.approx(24.93 * 2.0 / 64)
    assert plan.epsilon() == pytest.approx(2.0, abs=0.01)
    assert plan.event.event.noise_multiplier == pytest.approx(24.93)
    assert plan.event_relation.name == "REPLACE_ONE"


@pytest.mark.parametrize(
    ("sampler", "event"),
    [
        # 100 steps of 64 of 1024 records: 16 a pass, so seven passes at most.
        (sampling.SinglePass(10), dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 1)),
        (
            sampling.ShuffledEpochs(64),
            dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 7),
        ),
        (sampling.External(64), dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 100)),
        (
            sampling.FixedSize(64),
            dp.SelfComposedDpEvent(
                dp.SampledWithoutReplacementDpEvent(1024, 64, dp.GaussianDpEvent(3.0)),
                100,
            ),
        ),
        (
            WHOLE,
            dp.SelfComposedDpEvent(
                dp.PoissonSampledDpEvent(1 / 16, dp.GaussianDpEvent(6.0)), 100
            ),
        ),
    ],
    ids=repr,
)
@KINDS
def test_samplers_earn_their_events(kind: type, sampler: Any, event: Any) -> None:
    plan = make(kind, sampling=sampler).with_noise(noise_multiplier=3.0, delta=1e-5)
    assert plan.event == event
    amplified = sampler == WHOLE or isinstance(sampler, sampling.FixedSize)
    relation = "REPLACE_ONE" if amplified else "ADD_OR_REMOVE_ONE"
    assert plan.event_relation.name == relation
    rows = sampler.rows(1024)
    assert plan.phases == (("step", 1, rows),)
    assert plan.normalizer == (64 if sampler == WHOLE else rows)
    assert plan.noise_std == pytest.approx(3.0 * 4.0 / plan.normalizer)
    calibrated = plan.calibrate(epsilon=2.0, delta=1e-5)
    assert 2.0 * (1 - 1e-4) < calibrated.epsilon() <= 2.0


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_pass_costs_one_gaussian_under_every_relation(relation: str) -> None:
    once = make(num_steps=1, relation=relation).calibrate(epsilon=1.0, delta=1e-5)
    for sampler, steps in (
        (sampling.SinglePass(10), 102),
        (sampling.ShuffledEpochs(64), 16),
    ):
        plan = make(sampling=sampler, num_steps=steps, relation=relation)
        plan = plan.calibrate(epsilon=1.0, delta=1e-5)
        # But for the sampler of more numbers.
        assert plan.noise_multiplier == pytest.approx(once.noise_multiplier, rel=1e-7)
        again = plan.with_noise(noise_multiplier=once.noise_multiplier)
        assert again.event == once.event
        # Further steps of a pass are free, and there are no more than the data has.
        shorter = dataclasses.replace(plan, num_steps=steps - 1)
        most = shorter.calibrate(epsilon=1.0, delta=1e-5, vary="num_steps")
        assert most.num_steps == steps


# Laplace.


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("num", [1, 4])
def test_laplace_is_purely_private(relation: str, num: int) -> None:
    """Basic composition: scale T / epsilon, in units of the sensitivity."""
    plan = make(noise="laplace", relation=relation, num_directions=num)
    plan = plan.calibrate(epsilon=2.0, delta=0)
    assert plan.noise_multiplier == pytest.approx(math.sqrt(2) * 100 / 2.0, rel=1e-9)
    assert plan.delta == 0
    spent = plan.epsilon()
    assert 2.0 * (1 - 1e-9) <= spent <= 2.0
    assert spent.accountant == "pure composition"
    assert "pure composition" in str(plan)
    # The integers: an L1 sensitivity of 2**k, or twice that, over their scale.
    distance = 2 ** (plan.grid_bits + (relation == "replace_one"))
    exact = Fraction(100 * distance, plan.numbers.noise_scale)
    assert exact < Fraction(float(spent))
    assert exact > Fraction(199, 100)
    assert plan.grid("step").order == 1
    # A unit of scale more than asked for, for the sake of delta > 0.
    assert (
        plan.numbers.noise_scale - 1
    ) >= distance * plan.noise_multiplier / math.sqrt(2)
    assert plan.grid_noise_std >= math.sqrt(2) * plan.numbers.noise_scale
    again = plans.from_json(plan.to_json())
    assert again == plan


def test_laplace_with_a_delta_costs_less() -> None:
    pure = make(noise="laplace").calibrate(epsilon=2.0, delta=0)
    plan = make(noise="laplace").calibrate(epsilon=2.0, delta=1e-5)
    assert plan.noise_multiplier < pure.noise_multiplier / 2
    assert plan.epsilon().accountant == "PLD"
    assert plan.epsilon(delta=0) > 4.0


def test_laplace_on_poisson_samples() -> None:
    """Digest A8: log(1 + (exp(epsilon / T) - 1) / q) for each step."""
    plan = make(noise="laplace", sampling=WHOLE, relation="zero_out")
    plan = plan.calibrate(epsilon=2.0, delta=0)
    scale = 1 / math.log1p(16 * math.expm1(2.0 / 100))
    assert plan.noise_multiplier == pytest.approx(math.sqrt(2) * scale, rel=1e-9)
    steps = plan.calibrate(epsilon=4.0, delta=0, vary="num_steps").num_steps
    assert steps in (200, 201)


def test_laplace_sums_have_room_for_their_tails() -> None:
    plan = make(noise="laplace", noise_multiplier=1000.0)
    # exp(-40) of each draw lies beyond.
    assert 1024 * 2**plan.grid_bits + 40 * plan.numbers.noise_scale < 2**31


@pytest.mark.parametrize("delta", [0, 0.0])
def test_only_laplace_takes_no_delta(delta: float) -> None:
    for noise in ("discrete", "gaussian"):
        with pytest.raises(ValueError, match="delta"):
            make(noise=noise).calibrate(epsilon=1.0, delta=delta)
        with pytest.raises(ValueError, match="delta"):
            make(noise=noise, noise_multiplier=1.0).epsilon(delta=delta)
    assert make(noise="laplace", noise_multiplier=0).epsilon(delta=delta) == math.inf


# Clip tuning.


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("sampler", [sampling.FullBatch(), POISSON], ids=repr)
def test_clip_tuning_is_charged_within_the_step(relation: str, sampler: Any) -> None:
    plain = make(relation=relation, sampling=sampler, noise_multiplier=10.0)
    plan = make(
        relation=relation, sampling=sampler, noise_multiplier=10.0, clip_tuning=TUNING
    )
    assert plan.event == plain.event
    assert plan.event_relation == plain.event_relation
    assert plan.epsilon(delta=1e-5) == plain.epsilon(delta=1e-5)
    assert plan.sensitivity == plain.sensitivity
    slopes = (10.0**-2 - 30.0**-2) ** -0.5
    assert plan.noise_std == pytest.approx(slopes / 10.0 * plain.noise_std)
    # In integers: together they reveal no more than the one Gaussian that is charged.
    distance = 2 ** (plan.grid_bits + (relation == "replace_one"))
    both = Fraction(distance, plan.grid_noise_std) ** 2
    both += Fraction(distance, plan.numbers.count_grid.noise_std) ** 2
    assert Fraction(99, 10_000) < both <= Fraction(1, 100)


def test_clip_tuning_needs_a_share_of_the_noise() -> None:
    plan = make(clip_tuning=TUNING, num_steps=30)
    assert plan.calibrate(epsilon=2.0, delta=1e-5).noise_multiplier < 30
    with pytest.raises(ValueError, match="count_noise_multiplier must exceed"):
        plan.calibrate(epsilon=0.2, delta=1e-5)
    without = plan.with_noise(noise_multiplier=0)
    assert (
        without.noise_std
        == without.grid_noise_std
        == without.numbers.count_grid.noise_std
        == 0
    )


def test_a_slope_along_one_direction_has_no_tuned_clip() -> None:
    assert (
        plans.DPGDZerothOrder(
            num_examples=10,
            num_steps=1,
            sampling=sampling.FullBatch(),
            relation="zero_out",
            l2_clip_norm=1.0,
            smoothing_radius=0.1,
        ).clip_tuning
        is None
    )


@KINDS
def test_event_and_relation_are_what_epsilon_composes(kind: type) -> None:
    from dp_accounting.pld import PLDAccountant

    plan = make(kind).calibrate(epsilon=1.0, delta=1e-5)
    accountant = PLDAccountant(plan.event_relation).compose(plan.event)
    assert accountant.get_epsilon(1e-5) == pytest.approx(plan.epsilon(), rel=1e-3)


@KINDS
def test_steps_can_be_calibrated(kind: type) -> None:
    plan = make(kind).calibrate(epsilon=2.0, delta=1e-5)
    more = plan.calibrate(epsilon=4.0, delta=1e-5, vary="num_steps")
    assert more.noise_multiplier == plan.noise_multiplier
    assert more.num_steps > 250
    assert more.epsilon() <= 4.0
    beyond = dataclasses.replace(more, num_steps=more.num_steps + 1)
    assert beyond.epsilon() > 4.0


@KINDS
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_json_round_trip(kind: type, sampler: Any) -> None:
    plan = make(kind, sampling=sampler)
    for p in (plan, plan.with_noise(noise_multiplier=20.0, delta=1e-6)):
        again = plans.from_json(p.to_json())
        assert again == p
        assert again.digest == p.digest
        assert hash(again) == hash(p)
    assert kind.from_json(plan.to_json()) == plan


def test_json_round_trip_of_clip_tuning() -> None:
    np = pytest.importorskip("numpy")
    plan = make(clip_tuning=TUNING).with_noise(noise_multiplier=20.0)
    again = plans.from_json(plan.to_json())
    assert again == plan
    assert again.clip_tuning == TUNING
    assert again.digest == plan.digest != make(noise_multiplier=20.0).digest
    same = plans.ClipTuning(
        target_unclipped_quantile=0.7,
        learning_rate=np.float64(0.2),
        count_noise_multiplier=np.int32(30),
    )
    assert make(clip_tuning=same, noise_multiplier=20).digest == plan.digest
    fields = json.loads(plan.to_json())
    fields["clip_tuning"]["learning_rat"] = 1
    with pytest.raises(ValueError, match="learning_rat"):
        plans.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("target_unclipped_quantile", 1.0),
        ("learning_rate", 0.0),
        ("learning_rate", 101.0),
        ("count_noise_multiplier", math.inf),
    ],
)
def test_clip_tuning_names_wrong_numbers(field: str, bad: float) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(TUNING, **{field: bad})


def test_numpy_numbers_and_whole_floats_make_equal_plans() -> None:
    np = pytest.importorskip("numpy")
    plain = make(num_steps=7, noise_multiplier=5.0)
    other = make(
        num_examples=np.int64(1024),
        num_steps=np.int32(7),
        l2_clip_norm=np.float32(2),
        noise_multiplier=5,
    )
    assert plain == other
    assert plain.digest == other.digest


def test_infinity_is_strict_json() -> None:
    plan = make(l2_clip_norm=math.inf, noise_multiplier=0)
    fields = json.loads(plan.to_json(), parse_constant=pytest.fail)
    assert fields["l2_clip_norm"] == "inf"
    assert plans.from_json(plan.to_json()) == plan


def test_digests_tell_plans_apart() -> None:
    base = make().with_noise(noise_multiplier=1.0)
    changes: list[dict[str, Any]] = [
        {"num_steps": 101},
        {"l2_clip_norm": 2.5},
        {"relation": "zero_out"},
        {"smoothing_radius": 0.1},
        {"sampling": POISSON},
        {"direction": "gaussian"},
    ]
    digests = {dataclasses.replace(base, **c).digest for c in changes}
    assert len(digests | {base.digest}) == len(changes) + 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"plan": "Nope", "sampling": {"sampler": "FullBatch"}}'],
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="JSON of a plan"):
        plans.from_json(text)


def test_json_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match="DPGD"):
        plans.DPGD.from_json(make().to_json())
    fields = json.loads(make().to_json()) | {"num_stepz": 3}
    with pytest.raises(ValueError, match="num_stepz"):
        plans.from_json(json.dumps(fields))


def test_a_plan_prints_as_a_table() -> None:
    text = str(make().calibrate(epsilon=2.0, delta=1e-5))
    for part in ("num_examples", "1024", "noise_multiplier", "sensitivity", "epsilon"):
        assert part in text
    assert "FullBatch" in str(make())  # Without noise, too.


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"noise_multiplier": 1e-300}, ValueError, "noise_multiplier must be 0 or in"),
        ({"num_examples": 0}, ValueError, "num_examples"),
        ({"num_examples": 2.5}, TypeError, "num_examples"),
        ({"num_examples": 2**60}, ValueError, "num_examples must be .* <= 2147483647"),
        ({"num_steps": -1}, ValueError, "num_steps"),
        ({"num_steps": 2**31}, ValueError, "num_steps"),
        ({"sampling": "full"}, TypeError, "sampling"),
        ({"relation": "swap"}, ValueError, "relation.*zero_out"),
        ({"l2_clip_norm": 0}, ValueError, "l2_clip_norm"),
        ({"l2_clip_norm": math.nan}, ValueError, "l2_clip_norm"),
        ({"l2_clip_norm": 1e-38}, ValueError, "l2_clip_norm.*1e-30"),
        ({"l2_clip_norm": "2"}, TypeError, "l2_clip_norm"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"l2_clip_norm": math.inf, "noise_multiplier": 1.0}, ValueError, "finite"),
        ({"delta": 0}, ValueError, "delta"),
        ({"smoothing_radius": -1e-3}, ValueError, "smoothing_radius"),
        ({"smoothing_radius": math.inf}, ValueError, "smoothing_radius"),
        ({"num_directions": 0}, ValueError, "num_directions"),
        ({"num_directions": 1025}, ValueError, "num_directions.*1024"),
        ({"direction": "ball"}, ValueError, "direction.*rademacher"),
        ({"noise": "poisson"}, ValueError, "noise.*laplace"),
        ({"sampling": sampling.FixedSize(1025)}, ValueError, "batch_size.*1024"),
        (
            {"sampling": sampling.FixedSize(64), "relation": "zero_out"},
            ValueError,
            "relation must be 'replace_one'.*'zero_out'",
        ),
        (
            {"sampling": sampling.FixedSize(64), "relation": "add_or_remove"},
            ValueError,
            "relation must be 'replace_one'.*no accountant",
        ),
        ({"sampling": sampling.SinglePass(11)}, ValueError, "num_steps.*<= 93"),
        ({"clip_tuning": "median"}, TypeError, "clip_tuning"),
        ({"clip_tuning": TUNING, "noise": "gaussian"}, ValueError, "clip_tuning"),
        ({"clip_tuning": TUNING, "noise": "laplace"}, ValueError, "clip_tuning"),
        ({"clip_tuning": TUNING, "l2_clip_norm": math.inf}, ValueError, "clip_tuning"),
        (
            {"clip_tuning": TUNING, "noise_multiplier": 30.0},
            ValueError,
            "count_noise_multiplier must exceed.*30, which",
        ),
        (
            {"noise": "laplace", "sampling": sampling.FixedSize(64)},
            ValueError,
            "sampling must be unamplified",
        ),
        (
            {"noise": "laplace", "sampling": POISSON, "relation": "zero_out"},
            ValueError,
            "max_batch_size = num_examples",
        ),
        (
            {"noise": "laplace", "sampling": WHOLE, "relation": "replace_one"},
            ValueError,
            "relation must be 'zero_out'",
        ),
        ({"noise": "discrete", "delta": 0}, ValueError, "delta"),
        ({"num_examples": 10**9, "noise_multiplier": 1.0}, ValueError, "bits"),
    ],
)
def test_wrong_numbers_are_named(changes: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        make(**changes)


def test_the_relation_has_no_default() -> None:
    with pytest.raises(TypeError, match="relation"):
        plans.DPZero(  # pyright: ignore[reportCallIssue]
            num_examples=1,
            num_steps=1,
            sampling=sampling.FullBatch(),
            l2_clip_norm=1.0,
            smoothing_radius=0.1,
        )


def test_numbers_that_need_noise_ask_for_it() -> None:
    for read in ("noise_std", "event", "event_relation", "grid_bits"):
        with pytest.raises(ValueError, match="calibrate"):
            getattr(make(), read)
    with pytest.raises(ValueError, match="delta"):
        make().with_noise(noise_multiplier=1.0).epsilon()


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"epsilon": 0, "delta": 1e-5}, "epsilon"),
        ({"epsilon": 1.0, "delta": 0}, "delta"),
        ({"epsilon": 1.0, "delta": 1e-5, "vary": "clip"}, "vary"),
    ],
)
def test_calibration_names_wrong_targets(kwargs: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make().calibrate(**kwargs)


def test_without_noise_epsilon_is_infinite() -> None:
    assert make().with_noise(noise_multiplier=0).epsilon(delta=1e-5) == math.inf


def test_what_a_plan_charges_and_runs_follows_from_the_same_fields() -> None:
    """Even of a frozen plan that somebody changed after its numbers were computed."""
    plan = plans.DPGD(
        num_examples=40,
        num_steps=1,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
    ).calibrate(epsilon=1.0, delta=1e-5)
    _ = plan.run, plan.numbers, plan.digest
    object.__setattr__(plan, "num_steps", 30)
    honest = plans.from_json(plan.to_json())
    assert plan.epsilon() == honest.epsilon() > 5
    assert (plan.run, plan.numbers) == (honest.run, honest.numbers)
    assert plan.digest == honest.digest


def test_nobody_changes_the_numbers_that_a_plan_keeps() -> None:
    """A larger clip or less noise there would run, and epsilon be the old one."""
    fields: dict[str, Any] = {
        "num_examples": 40,
        "num_steps": 4,
        "relation": "replace_one",
        "restart_l2_clip_norm": 1.0,
        "l2_clip_norm": 1.0,
        "smoothing_radius": 0.1,
        "max_step": 0.01,
        "window": 2,
        "noise_multiplier": 3.0,
    }
    one = sampling.SinglePassRestarts(period=2, restart_batch_size=9, batch_size=9)
    several = sampling.MultiPassRestarts(period=2)
    for sampler, noise in ((one, "tree"), (several, "independent")):
        plan: Any = plans.O2NC(sampling=sampler, prefix_noise=noise, **fields)
        kept = [plan.clips, plan.sums.clips, plan.numbers.noise.grids]
        kept += [] if sampler is one else [plan.sums.unit_stds]
        for numbers in kept:
            with pytest.raises(TypeError, match="does not support item assignment"):
                numbers["restart"] = numbers["difference"]


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_of_a_plan_computes_its_numbers_again(again: Any) -> None:
    """A pickle may be of another version, whose noise this one does not account."""
    plan = make(noise_multiplier=3.0)
    numbers = plan.numbers
    fields, _ = vars(plan)["_kept_numbers"]
    grid = numbers.grid._replace(noise_std=1)
    vars(plan)["_kept_numbers"] = fields, numbers._replace(grid=grid)
    copied = again(plan)
    assert copied == plan
    assert copied.numbers == numbers


def test_a_slope_plan_needs_its_smoothing_radius() -> None:
    with pytest.raises(TypeError, match="smoothing_radius"):
        plans.DPZero(
            num_examples=8,
            num_steps=1,
            sampling=sampling.FullBatch(),
            relation="zero_out",
            l2_clip_norm=1.0,
        )  # pyright: ignore[reportCallIssue]


def test_phases_without_steps_leave_the_error_of_the_sampler_charged() -> None:
    def plan(steps: int) -> plans.O2NC:
        return plans.O2NC(
            num_examples=40,
            num_steps=steps,
            sampling=sampling.MultiPassRestarts(period=2),
            relation="replace_one",
            restart_l2_clip_norm=1.0,
            l2_clip_norm=1.0,
            smoothing_radius=0.1,
            max_step=0.01,
            window=2,
            prefix_noise="independent",
        ).with_noise(noise_multiplier=3.0)

    for steps in (1, 2):
        spent, _ = accounting.sampler_error(plan(steps).event)
        assert spent > 0
