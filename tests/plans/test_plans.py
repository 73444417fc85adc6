"""Plans: units, guarantees, text, refusals."""

import dataclasses
import json
import math
from typing import Any

import pytest

from jaxdp import plans, sampling

POISSON = sampling.TruncatedPoisson(sampling_prob=1 / 16, max_batch_size=96)
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
    # Rounded up to a whole grid unit, never down.
    assert 0 <= grid - 3.0 * plan.sensitivity < plan.l2_clip_norm / 2**plan.grid_bits
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
@pytest.mark.parametrize("sampler", [sampling.FullBatch(), POISSON], ids=repr)
def test_json_round_trip(kind: type, sampler: Any) -> None:
    plan = make(kind, sampling=sampler, relation="zero_out")
    for p in (plan, plan.with_noise(noise_multiplier=20.0, delta=1e-6)):
        again = plans.from_json(p.to_json())
        assert again == p
        assert again.digest == p.digest
        assert hash(again) == hash(p)
    assert kind.from_json(plan.to_json()) == plan


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
        ({"num_examples": 0}, ValueError, "num_examples"),
        ({"num_examples": 2.5}, TypeError, "num_examples"),
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
        ({"num_directions": 65}, ValueError, "num_directions.*64"),
        ({"direction": "ball"}, ValueError, "direction.*rademacher"),
        ({"noise": "laplace"}, ValueError, "noise"),
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
