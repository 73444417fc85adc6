"""Audits of the oracles of ``plans.O2NC`` besides the single pass of values."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import auditing, plans, sampling
from jaxdp.auditing import canaries, cases, simulation
from tests.auditing.plans_of_faults import ORACLE_PLANS, plan_named


def changed(name: str, **changes: Any) -> plans.O2NC:
    plan = plan_named(name)
    assert isinstance(plan, plans.O2NC)
    return dataclasses.replace(plan, **changes)


MIXED: Any = sampling.MultiPassRestarts(period=2, sampling_prob=0.5)
PLANS = {
    **{name: changed(name) for name in ORACLE_PLANS},
    "some samples": changed(
        "gradients",
        sampling=MIXED,
        relation="add_or_remove",
        num_steps=4,
        noise_multiplier=1.5,
    ),
}


#: Slopes; vectors are in test_o2nc.py.
FIRST = ("slopes",)


@pytest.mark.parametrize(
    "name",
    [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in PLANS],
)
def test_every_oracle_can_be_audited(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the accounted epsilon with probability 1 - 1e-6, and near it."""
    plan, kept = PLANS[name], []
    case = cases.case_of(plan)

    def transcripts(*args: Any) -> np.ndarray:
        made = case.transcripts(*args)
        kept.append((args[1], made[:, :3]))
        return made

    keeping = case._replace(transcripts=transcripts)
    monkeypatch.setitem(cases.CASES, plan.released, keeping)
    found = auditing.audit(plan, num_runs=20_000)
    assert found.passed
    assert found.epsilon == plan.epsilon()
    gaussian = not plan.sampling.amplifies
    assert found.method.endswith("Gaussian trade-off") == gaussian
    assert found.epsilon_lower > (0.6 if gaussian else 0.2) * found.epsilon
    if gaussian and plan.clip_tuning is None:  # Else later noise follows the count.
        ((data, made),) = kept
        _moves_as_claimed(plan, dict(zip(data, made, strict=True)))


def _moves_as_claimed(plan: plans.O2NC, made: dict[Any, np.ndarray]) -> None:
    """The same noise on both data sets, so that the difference is the record's alone."""
    # A step without a move is noised by so little that the estimate's digits show.
    slack = np.where(simulation.walk(plan)[1] < 0.1, 0.5, 1e-4)
    pairs = canaries.of_increments(plan)
    for canary in pairs:
        here, there = canary.shifts()
        one, other = (made[x][..., :-1] for x in (canary.first, canary.second))
        moved = np.linalg.norm(one - other, axis=-1)
        assert np.all(np.abs(moved - (here - there)) < slack), canary.name
    if plan.multi_pass:
        # A record in all steps moves them by what the plan is charged for.
        whole = np.linalg.norm(np.subtract(*pairs[0].shifts()))
        assert whole == pytest.approx(1 / plan.noise_multiplier, rel=1e-9)


def test_some_canary_parts_any_two_steps() -> None:
    pairs = canaries.of_increments(PLANS["several passes"])
    signs = np.array([c.first.signs for c in pairs if c.first.signs is not None])
    for step in range(8):
        for other in range(step):
            assert np.any(signs[:, step] != signs[:, other])


def test_amplitudes_make_changes_of_the_canarys_signs() -> None:
    plan = plan_named("several passes")
    for canary in canaries.of_increments(plan):
        if canary.first.signs is None:
            continue
        signs, grown = (
            np.array(canary.first.signs),
            canaries.amplitudes(plan, canary.first),
        )
        changes = grown - np.where(np.arange(8) % 4 == 0, 0, np.roll(grown, 1))
        np.testing.assert_array_equal(np.nan_to_num(np.sign(changes)), signs)


def test_the_walk_has_moves_of_several_lengths() -> None:
    queries, scales = simulation.walk(plan_named("moved"))
    moved = np.abs(np.diff(queries)) / 2e-3
    np.testing.assert_allclose(moved, [0.5, 2, 0, 1, 0.5, 2, 0], atol=1e-6)
    want = [1, 0.5, 1, 2**-20, 1, 0.5, 1, 2**-20]
    np.testing.assert_allclose(scales, want, rtol=1e-6)
    assert not simulation.walk(plan_named("several passes"))[0].any()


WRITTEN_OUT = {
    "moved": changed("gradients", scale_with_movement=True, relation="zero_out"),
    "sampled": PLANS["samples"],
}


@pytest.mark.slow  # test_o2nc.py compares another plan's.
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_transcripts_are_those_of_the_library(name: str) -> None:
    """By a loop over the oracle alone, whose losses and steps are written out."""
    plan = WRITTEN_OUT[name]
    data = canaries.of_increments(plan)[3 if plan.multi_pass else 0].first
    made = simulation.transcripts(plan, [data], 4, seed=7)[0, 2]
    own = jaxdp.Keys.insecure(int(simulation.run_seeds(4, 7)[2]))
    public = jaxdp.Keys.insecure(7)
    keys = dataclasses.replace(own, direction=public.direction)
    if not plan.sampling.amplifies:
        keys = dataclasses.replace(keys, sampling=public.sampling)
    dim, steps, period = max(2, plan.num_directions), plan.num_steps, plan.noise_period
    slopes = np.zeros((plan.num_examples, dim), np.float32)
    slopes[data.index, data.axis] = 1e5
    signs = np.array(data.signs or [1] * steps) * np.arange(1, steps + 1)
    queries = simulation.walk(plan)[0]
    oracle = jaxdp.private_oracle(plan, keys, trainable=lambda path: path == "x")

    def loss(params: Any, records: Any) -> jax.Array:
        moved = params["x"] - params["here"]
        return jnp.asarray(signs)[params["time"]] * (records @ moved)

    @functools.partial(jax.jit, static_argnames="phase")
    def update(state: Any, step: jax.Array, phase: str) -> Any:
        batch = sampling.batch(plan, keys, step, jnp.asarray(slopes), phase=phase)
        here = jnp.zeros(dim).at[0].set(jnp.asarray(queries)[step])
        params = {"x": here, "here": here, "time": step}
        return oracle.update(
            None, state, params, value_fn=loss, batch=batch, phase=phase
        )

    zeros = jnp.zeros(dim)
    state = oracle.init({"x": zeros, "here": zeros, "time": jnp.int32(0)})
    before, last = np.zeros(dim, np.float32), 0.0
    for step in range(steps):
        phase = "difference" if step % period else "restart"
        out, state = update(state, jnp.int32(step), phase)
        increment = np.asarray(out["x"]) - before * (step % period > 0)
        before = np.asarray(out["x"])
        unit = plan.step_std(phase)
        if plan.scale_with_movement and step % period:
            unit *= max(min(abs(queries[step] - last) / 2e-3, 1), 2**-20)
        last = queries[step]
        released = np.append(increment, np.linalg.norm(increment)) / unit
        # Where nothing moves, the noise is as small as the digits of the estimate.
        slack = 0.5 if unit < 1e-3 * plan.step_std(phase) else 2e-4
        np.testing.assert_allclose(made[step], released, rtol=1e-4, atol=slack)


LONG = changed(
    "moved",
    num_examples=500,
    num_steps=128,
    noise_multiplier=None,
    sampling=sampling.MultiPassRestarts(period=32),
    window=32,
).calibrate(epsilon=2.0, delta=1e-5)


@pytest.mark.slow  # Lengths alone; runs are in test_o2nc.py.
def test_shortened_plan_has_two_periods_and_the_same_epsilon() -> None:
    sampled = dataclasses.replace(
        LONG,
        num_examples=8,
        sampling=sampling.MultiPassRestarts(
            period=32, restart_sampling_prob=0.3, sampling_prob=0.2
        ),
    )
    for plan, records in ((LONG, 64), (sampled, 8)):
        short = auditing.shortened(plan, 4)
        assert isinstance(short, plans.O2NC)
        assert (short.num_steps, short.noise_period) == (4, 2)
        assert short.num_examples == records
        assert short.sampling == dataclasses.replace(plan.sampling, period=2)
        assert short.epsilon() == pytest.approx(plan.epsilon(), rel=1e-5)
        assert short.epsilon() <= plan.epsilon()
        assert auditing.shortened(plan, 128) is plan
