"""Audits of plans with correlated noise: every leaf of a period, and the worst one."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import auditing, plans, sampling
from jaxdp.accounting import gaussian_epsilon
from jaxdp.auditing import attacks, bounds, canaries, simulation
from jaxdp.cli import main
from tests.auditing.mutations import plan_named

RULE = bounds.Rule(1e-5, 1e-6, gaussian=True)


def make(**changes: Any) -> plans.O2NC:
    numbers: dict[str, Any] = {"num_directions": 2, "noise_multiplier": 2.0}  # 2.0
    plan = plan_named("tree")
    assert isinstance(plan, plans.O2NC)
    return dataclasses.replace(plan, **numbers | changes)


@pytest.mark.slow  # A study: 250000 runs. Each leaf moves as claimed, below.
@pytest.mark.parametrize("kind", ["tree", "blt_2"])
def test_worst_leaf_is_met_to_85_percent(kind: str) -> None:
    """Below the accounted epsilon with probability 1 - 1e-6, from 250000 runs."""
    plan = make(prefix_noise=kind, l2_clip_norm=0.5)  # The first leaf is worse by far.
    found = auditing.audit(plan, num_runs=250_000)
    assert found.epsilon == plan.epsilon()
    assert found.failure_prob == 1e-6
    assert 0.85 * found.epsilon < found.epsilon_lower < found.epsilon
    assert "leaf 1 of 4" in found.canary
    assert "(worst)" in found.canary
    assert found.method.endswith("Gaussian trade-off")


@pytest.mark.slow  # Where nothing is planted; test_mutations.py plants.
@pytest.mark.parametrize("name", ["one direction", "large estimate"])
def test_plans_of_the_mutations_pass_as_they_are(name: str) -> None:
    found = auditing.audit(plan_named(name), num_runs=10_000)
    assert found.passed
    assert found.epsilon_lower > 0.2 * found.epsilon


MOVED = {
    "two directions": make(difference="one_sided", prefix_noise="blt_2"),
    "own directions": make(
        direction="sphere",
        difference="independent",
        share_directions=False,
        prefix_noise="sqrt_toeplitz",
        relation="zero_out",
    ),
    "half a period": make(num_directions=1, num_steps=3, prefix_noise="honaker"),
}


@pytest.mark.parametrize(
    "name",
    # Of other laws and correlations, which tests/o2nc and tests/mechanism have too.
    [
        name if name == "two directions" else pytest.param(name, marks=pytest.mark.slow)
        for name in MOVED
    ],
)
def test_a_canary_moves_its_leaf_by_what_is_claimed_and_no_other(name: str) -> None:
    """The same noise on both data sets, so that the difference is the record's alone."""
    plan = MOVED[name]
    pairs = canaries.of_increments(plan)
    data = [data for canary in pairs for data in (canary.first, canary.second)]
    made = simulation.transcripts(plan, data, 3, seed=0)[..., :-1]
    for canary, one, other in zip(pairs, made[::2], made[1::2], strict=True):
        here, there = canary.shifts()
        moved = np.linalg.norm(one - other, axis=-1)
        np.testing.assert_allclose(moved, np.tile(here - there, (3, 1)), atol=3e-5)
    read = {int(np.argmax(c.moves)): c.first.index for c in pairs}
    if plan.num_steps == 8:  # Of two periods of (2, 1, 1, 1) records.
        assert read.items() >= {0: 1, 1: 2, 2: 3, 3: 4}.items()
    # The worst leaf moves by what the plan is charged for.
    columns = np.tile(plan.correlation.column_norms(), 2)[: plan.num_steps]
    moves = [np.subtract(*c.shifts()) * columns for c in pairs]
    assert np.max(moves) == pytest.approx(1 / 2.0, rel=1e-9)


@pytest.mark.slow  # One more law of directions.
def test_directions_in_the_ball_move_nothing_further() -> None:
    """The bound is on the vector that is released, whatever it was made of."""
    plan = make(direction="sphere", num_directions=1)
    object.__setattr__(plan, "direction", "ball")
    pairs = canaries.of_increments(plan)[:2]
    data = [data for canary in pairs for data in (canary.first, canary.second)]
    made = simulation.transcripts(plan, data, 3, seed=0)[..., :-1]
    for canary, one, other in zip(pairs, made[::2], made[1::2], strict=True):
        most = np.subtract(*canary.shifts()) + 3e-5
        assert np.all(np.linalg.norm(one - other, axis=-1) <= most)


@pytest.mark.slow  # A second program of every oracle.
def test_transcripts_are_those_of_the_library() -> None:
    """By a loop over the oracle alone, whose losses are written out."""
    plan = make(prefix_noise="tree")
    data = canaries.of_increments(plan)[1].first
    made = simulation.transcripts(plan, [data], 4, seed=7)[0, 2]
    own = jaxdp.Keys.insecure(int(simulation.run_seeds(4, 7)[2]))
    public = jaxdp.Keys.insecure(7)
    keys = dataclasses.replace(
        own, direction=public.direction, sampling=public.sampling
    )
    slopes = np.zeros((10, 2), np.float32)
    slopes[data.index, data.axis] = 1e5
    oracle = jaxdp.private_oracle(plan, keys, trainable=lambda path: path == "x")

    @functools.partial(jax.jit, static_argnames="phase")
    def update(state: Any, step: jax.Array, phase: str) -> Any:
        batch = sampling.batch(plan, keys, step, jnp.asarray(slopes), phase=phase)
        params = {"x": jnp.zeros(2), "time": step}
        return oracle.update(
            None,
            state,
            params,
            value_fn=lambda p, z: (p["time"] + 1) * (z @ p["x"]),
            batch=batch,
            phase=phase,
        )

    state = oracle.init({"x": jnp.zeros(2), "time": jnp.zeros((), jnp.int32)})
    before = np.zeros(2, np.float32)
    for step in range(8):
        phase = "difference" if step % 4 else "restart"
        out, state = update(state, jnp.int32(step), phase)
        increment = np.asarray(out["x"]) - before * (step % 4 > 0)
        before = np.asarray(out["x"])
        released = np.append(increment, np.linalg.norm(increment))
        want = released / plan.node_std
        np.testing.assert_allclose(made[step], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [8, 7])
def test_the_likelihood_ratio_undoes_the_correlation(steps: int) -> None:
    """On transcripts by NumPy, where the truth is known; in a last period cut short."""
    plan = make(prefix_noise="sqrt_toeplitz", num_steps=steps)
    strategy = np.kron(np.eye(2), plan.correlation.strategy())[:steps, :steps]
    along = np.array([0.6, -0.8])
    rng = np.random.default_rng(steps)
    distance = 0.4
    for step in (0, 5):
        first, second = canaries.DataSet("plus"), canaries.DataSet("minus")
        moves, weights = (
            distance * np.eye(steps)[step],
            canaries.leaf_weights(plan, step),
        )
        canary = canaries.Canary("", first, second, moves, weights)

        def made(sign: int, step: int = step) -> np.ndarray:
            xi = rng.normal(size=(40_000, steps, 2))
            x = np.einsum("st,ntr->nsr", np.linalg.inv(strategy), xi)
            x[:, step] += sign * distance * along
            return np.concatenate([x, np.linalg.norm(x, axis=2, keepdims=True)], 2)

        one, other = made(1), made(-1)
        learned = attacks.attacks(plan, canary, one[:20_000], other[:20_000], logged=1)
        score = learned["likelihood ratio"]
        a, b = score(one[20_000:]), score(other[20_000:])
        mu = 2 * distance * np.linalg.norm(strategy[:, step])
        apart = (a.mean() - b.mean()) / np.sqrt((a.var() + b.var()) / 2)
        # Five standard deviations of the mean of 20000, and the learned direction.
        assert apart == pytest.approx(mu, abs=0.05)
        found = bounds.best_threshold(a, b, RULE)[1]
        assert 0.8 * gaussian_epsilon(mu, 1e-5) < found < gaussian_epsilon(mu, 1e-5)


LONG = make(
    num_examples=200, num_steps=128, noise_multiplier=None, prefix_noise="blt_3"
)
LONG = dataclasses.replace(
    LONG,
    sampling=sampling.SinglePassRestarts(period=64, restart_batch_size=9, batch_size=1),
    window=64,
).calibrate(epsilon=2.0, delta=1e-5)


def test_shortened_plan_has_two_periods_and_the_same_epsilon() -> None:
    for num_steps, period, records in ((4, 2, 20), (9, 4, 36), (1, 1, 9)):
        short = auditing.shortened(LONG, num_steps)
        assert isinstance(short, plans.O2NC)
        assert (short.num_steps, short.noise_period) == (num_steps, period)
        assert short.num_examples == records
        assert short.sampling.restart_batch_size == 9
        assert short.epsilon() == pytest.approx(LONG.epsilon(), rel=1e-6)
        assert short.epsilon() <= LONG.epsilon()
    assert auditing.shortened(LONG, 128) is LONG
    # Periods that are short enough stay.
    fewer = auditing.shortened(make(), 7)
    assert isinstance(fewer, plans.O2NC)
    assert (fewer.num_steps, fewer.noise_period) == (7, 3)


@pytest.mark.slow  # test_command.py has the command, of another family.
def test_the_command_audits_a_long_plan(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text(LONG.to_json(), encoding="utf-8")
    assert main(["audit", str(path), "--num-runs", "20000", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"] is True
    assert answer["plan"] == "O2NC, 128 steps, replace_one"
    assert (answer["audited_num_steps"], answer["audited_period"]) == (4, 2)
    assert answer["epsilon"] == pytest.approx(2.0)
    assert 1.0 < answer["epsilon_lower"] < answer["epsilon"]
    assert "leaf" in answer["canary"]


def test_prefix_sums_of_updates_from_elsewhere_are_refused() -> None:
    plan = plans.PrefixSum(
        num_examples=8,
        num_steps=8,
        sampling=sampling.SinglePass(1),
        relation="zero_out",
        l2_clip_norm=1.0,
        noise_multiplier=2.0,
        delta=1e-5,
    )
    for call in (auditing.audit, lambda p: auditing.shortened(p, 4)):
        with pytest.raises(ValueError, match="got PrefixSum"):
            call(plan)
