"""Audits of what the library really does, and of what they simulate."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import auditing, plans, sampling
from jaxdp.auditing import canaries, cases, simulation
from jaxdp.mechanism.clip_tuning import ClipTuning
from tests.auditing.mutations import plan_named

POISSON = sampling.TruncatedPoisson(sampling_prob=0.5, max_batch_size=8)
TUNING = ClipTuning(
    target_unclipped_quantile=0.5, learning_rate=0.3, count_noise_multiplier=8.0
)


def make(kind: Any = plans.DPZero, **changes: Any) -> Any:
    numbers: dict[str, Any] = {
        "num_examples": 8,
        "num_steps": 2,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 0.7,
        "noise_multiplier": 2.8,  # epsilon 2
        "delta": 1e-5,
    }
    if kind is not plans.DPGD:
        numbers["smoothing_radius"] = 1e-3
    return kind(**numbers | changes)


# --- the numbers -------------------------------------------------------------------
# Each of the two draws 500000 integers: 10 s on an idle core.


def test_unsampled_gaussian_is_met_to_85_percent() -> None:
    """Below the accounted epsilon with probability 1 - 1e-6, from 250000 runs."""
    plan = make()
    assert plan.noise == "discrete"
    mu = math.sqrt(plan.num_steps) / plan.noise_multiplier
    assert 0.5 <= mu < 0.51
    found = auditing.audit(plan, num_runs=250_000)
    assert found.epsilon == plan.epsilon()
    assert found.failure_prob == 1e-6
    assert 0.85 * found.epsilon < found.epsilon_lower < found.epsilon
    assert found.passed
    assert found.method.endswith("Gaussian trade-off")


@pytest.mark.slow  # A study; that samples are audited is below.
def test_sampled_gaussian_is_met_to_40_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same without the trade-off, with the sampler inside the simulation."""
    plan = make(sampling=POISSON, noise_multiplier=0.96)  # epsilon 3
    kept = Kept(plan, monkeypatch)
    found = auditing.audit(plan, num_runs=250_000)
    kept.check()
    assert 0.4 * found.epsilon < found.epsilon_lower < found.epsilon
    assert found.passed
    assert found.method.endswith("definition of (epsilon, delta)")


OTHERS = {
    "directions": make(relation="zero_out", num_directions=3, direction="orthonormal"),
    "laplace": make(relation="zero_out", noise="laplace"),
    "tuned clip": make(relation="zero_out", clip_tuning=TUNING),
    # "gaussian" is an older name of "discrete".
    "records added": make(relation="add_or_remove", noise="gaussian"),
    "tuned clip, replaced": make(clip_tuning=TUNING, num_steps=3),
    "records added, sampled": make(
        relation="add_or_remove", sampling=POISSON, num_steps=3
    ),
    "tuned clip of gradients": make(plans.DPGD, clip_tuning=TUNING),
    "isotropic": make(plans.DPGDZerothOrder),
    "isotropic, zeroed": make(plans.DPGDZerothOrder, relation="zero_out"),
    "one pass": make(plans.DPGD, sampling=sampling.SinglePass(4), noise_multiplier=2.0),
    "shuffled": make(plans.DPGD, sampling=sampling.ShuffledEpochs(4), num_steps=4),
    "external": make(plans.DPGD, sampling=sampling.External(4), relation="zero_out"),
    "fixed size": make(plans.DPGD, sampling=sampling.FixedSize(4)),
}


#: With the two above each noise and relation, and a sampler; others have other events.
FIRST = ("laplace", "records added", "one pass")


@pytest.mark.parametrize(
    "name",
    [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in OTHERS],
)
def test_every_family_and_sampler_can_be_audited(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(OTHERS[name], monkeypatch)
    found = auditing.audit(OTHERS[name], num_runs=10_000)
    if name not in ("laplace", "external"):  # Other noise, and batches from elsewhere.
        kept.check()
    assert found.passed
    # Of random samples an attack tells few.
    least = 0 if name in ("fixed size", "records added, sampled") else 0.5
    assert found.epsilon_lower > least * found.epsilon


@pytest.mark.slow  # Two audits; test_attacks.py has the score.
def test_an_attack_on_groups_knows_whose_turn_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its likelihood ratio finds more than that of a record that any step may read."""
    sampler = sampling.CyclicPoisson(num_groups=8, sampling_prob=0.5, max_batch_size=2)
    plan = make(
        num_examples=16,
        num_steps=32,
        sampling=sampler,
        relation="zero_out",
        noise_multiplier=0.8,
    )
    found = auditing.audit(plan, num_runs=10_000)
    assert found.passed and found.method.startswith("likelihood ratio")
    monkeypatch.setattr(sampling.CyclicPoisson, "inclusion", sampling.Sampler.inclusion)
    blurred = auditing.audit(plan, num_runs=10_000)
    assert 1.02 * blurred.epsilon_lower < found.epsilon_lower < found.epsilon


@pytest.mark.slow  # Where nothing is planted; test_mutations.py plants.
@pytest.mark.parametrize("name", ["absent", "sampled", "truncated", "groups", "epochs"])
def test_plans_of_the_mutations_pass_as_they_are(name: str) -> None:
    assert auditing.audit(plan_named(name), num_runs=10_000).passed


def test_an_audit_is_a_function_of_its_seed() -> None:
    plan = make(plans.DPGD)
    first = auditing.audit(plan, num_runs=2000, seed=1)
    assert auditing.audit(plan, num_runs=2000, seed=1) == first
    seeds = [simulation.run_seeds(2000, seed) for seed in (1, 2)]
    assert not set(seeds[0]) & set(seeds[1])


# --- what is simulated -------------------------------------------------------------


class Kept:
    """Audits, and sees whether what they simulate is what the library releases."""

    def __init__(self, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Begins to keep the transcripts of audits of plans of one kind."""
        self.plan, self.seeds = plan, np.zeros(0, np.uint32)
        self.run: dict[canaries.DataSet, np.ndarray] = {}
        case = cases.case_of(plan)

        def transcripts(plan: Any, data: Any, num_runs: int, seed: int) -> np.ndarray:
            made = case.transcripts(plan, data, num_runs, seed)
            self.seeds = simulation.run_seeds(num_runs, seed)
            self.run = dict(zip(data, made[:, 5], strict=True))
            return made

        keeping = case._replace(transcripts=transcripts)
        monkeypatch.setitem(cases.CASES, plan.released, keeping)

    def check(self) -> None:
        """Requires the sixth run to the last digits, by a loop that hands in no noise."""
        plan, public = self.plan, jaxdp.Keys.insecure(0)
        assert len(set(self.seeds.tolist())) == len(self.seeds)
        own = jaxdp.Keys.insecure(int(self.seeds[5]))
        keys = dataclasses.replace(own, direction=public.direction)
        if not plan.sampling.amplifies:
            keys = dataclasses.replace(keys, sampling=public.sampling)
        pairs = canaries.of_sums(plan)
        for data in (pairs[0].first, pairs[1].second):
            want = np.stack(list(_releases(plan, keys, data)))
            # The unit of the transcript is a constant but for rounding.
            np.testing.assert_allclose(self.run[data], want, rtol=1e-6, atol=0)


@functools.cache
def updater(plan: Any) -> Any:
    """One program for all keys: the state has what it needs of them."""
    tx = plan.transform(jaxdp.Keys.insecure(0))
    return jax.jit(
        lambda state, params, batch: tx.update(
            None,
            state,
            params,
            value_fn=lambda p, records: records[0] @ p["x"],
            batch=batch,
        )
    )


def _releases(plan: Any, keys: jaxdp.Keys, data: canaries.DataSet) -> Any:
    sign = {"plus": 1.0, "minus": -1.0}.get(data.record, 0.0)
    params = {"x": jnp.zeros(max(2, getattr(plan, "num_directions", 1)))}
    gradients = np.zeros((plan.num_examples, params["x"].size), np.float32)
    gradients[data.index, data.axis] = 1e5 * sign
    absent = np.arange(plan.num_examples) == data.index
    absent &= data.record == "absent"
    state = plan.transform(keys).init(params)
    for step in range(plan.num_steps):
        batch = sampling.batch(plan, keys, step, (jnp.asarray(gradients), absent))
        batch = dataclasses.replace(batch, mask=batch.mask & ~batch.records[1])
        tuned = getattr(state, "clip", None)
        scale = 1.0 if tuned is None else tuned / plan.l2_clip_norm
        gradient, state = updater(plan)(state, params, batch)
        std = plan.noise_std * scale
        released = gradient["x"] if plan.family == "dpgd" else state.release[:1]
        if tuned is not None:
            # A record counts a half or minus a half, or nothing if it is taken out.
            by = 1 if plan.relation == "replace_one" else 0.5
            count_std = by * plan.clip_tuning.count_noise_multiplier / plan.normalizer
            yield np.append(released / std, state.release[-1] / count_std)
        elif plan.family == "dpgd":
            yield np.asarray(released / std)
        else:
            length = math.sqrt(2) if plan.isotropic else 1
            yield np.asarray(state.release / std * length)


def test_a_canary_moves_a_release_by_what_is_claimed() -> None:
    """The same noise on both data sets, so the difference is the record's alone."""
    for relation in ("replace_one", "zero_out"):
        plan = make(relation=relation, num_steps=4, noise="gaussian")
        pairs = canaries.of_sums(plan)
        data = [data for canary in pairs for data in (canary.first, canary.second)]
        made = simulation.transcripts(plan, data, 10, seed=0)[..., 0]
        for canary, one, other in zip(pairs, made[::2], made[1::2], strict=True):
            here, there = canary.shifts()
            assert np.ptp(np.sign(one - other), axis=0).max() == 0
            np.testing.assert_allclose(
                np.abs(one - other), np.tile(here - there, (10, 1)), atol=1e-5
            )


def test_some_canary_parts_any_two_steps() -> None:
    plan = make(num_steps=7)
    active = np.array([c.shifts()[0] for c in canaries.of_sums(plan)])
    for step in range(7):
        for other in range(step):
            assert np.any(active[:, step] != active[:, other])


@pytest.mark.slow  # Of the tool: it is compiled in two sizes.
def test_simulation_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(plans.DPGD, sampling=POISSON)
    data = [canaries.of_sums(plan)[0].first]
    whole = simulation.transcripts(plan, data, 100, seed=0)
    monkeypatch.setattr(simulation, "_CELLS", 16 * 30)
    parts = simulation.transcripts(plan, data, 100, seed=0)
    np.testing.assert_array_equal(parts, whole)


def test_noise_that_is_not_the_librarys_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fake(numbers: Any, keys: Any, name: str) -> np.ndarray:
        return np.zeros((numbers.run.num_steps, numbers.num_directions), np.int32)

    monkeypatch.setattr(simulation, "laplace_noise", fake)
    with pytest.raises(RuntimeError, match="would say nothing"):
        auditing.audit(OTHERS["laplace"], num_runs=1000)


# --- arguments ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"num_runs": 999}, ValueError, "num_runs must be"),
        ({"num_runs": 1e4}, TypeError, "num_runs must be"),
        ({"delta": 0.0}, ValueError, "delta must be"),
        ({"delta": "a"}, TypeError, "delta must be"),
        ({"failure_prob": 0.0}, ValueError, "failure_prob must be"),
        ({"failure_prob": 1}, ValueError, "failure_prob must be"),
        ({"seed": -1}, ValueError, "seed must be"),
        ({"seed": 2**32}, ValueError, "seed must be"),
        ({"seed": True}, TypeError, "seed must be"),
    ],
)
def test_bad_arguments_are_named(changes: Any, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        auditing.audit(make(), **changes)


def test_plans_that_cannot_be_audited_are_refused() -> None:
    bare = dataclasses.replace(make(), noise_multiplier=None)
    for plan in (bare, bare.with_noise(noise_multiplier=0)):
        with pytest.raises(ValueError, match="plan must have noise"):
            auditing.audit(plan)
        with pytest.raises(ValueError, match="plan must have noise"):
            auditing.shortened(plan, 4)
    no_delta = dataclasses.replace(make(), delta=None)
    with pytest.raises(ValueError, match="delta must be"):
        auditing.audit(no_delta)
    other: Any = "plan"
    with pytest.raises(TypeError, match="plan must be a"):
        auditing.audit(other)


def test_shortened_plan_has_the_same_epsilon() -> None:
    # (With less noise in all, that of four steps would be moved beyond its law's reach.)
    plan = make(num_steps=3000, num_directions=4, noise_multiplier=60.0)
    short = auditing.shortened(plan, 4)
    assert short.num_steps == 4
    assert short.noise_multiplier < plan.noise_multiplier / 20
    assert short.epsilon() == pytest.approx(plan.epsilon(), rel=1e-6)
    assert short.epsilon() <= plan.epsilon()
    same = {"num_steps": 3000, "noise_multiplier": plan.noise_multiplier}
    assert dataclasses.replace(short, **same) == plan
    assert auditing.shortened(plan, 3000) is plan
    at = auditing.shortened(plan, 4, delta=1e-6)
    assert at.epsilon(delta=1e-6) == pytest.approx(plan.epsilon(delta=1e-6), rel=1e-6)
    with pytest.raises(ValueError, match="num_steps must be"):
        auditing.shortened(plan, 0)


def test_a_pure_guarantee_is_audited_at_delta_zero() -> None:
    plan = plans.DPZero(
        num_examples=8,
        num_steps=2,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
        noise="laplace",
    ).calibrate(epsilon=2.0, delta=0)
    found = auditing.audit(plan, num_runs=5000)
    assert found.delta == 0
    assert 0.5 * found.epsilon < found.epsilon_lower < found.epsilon
