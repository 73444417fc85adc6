"""Whole runs of O2NC: one program, chunks to the same bits, records, what is refused."""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from bench import problems
from jaxdp import Keys, plans, sampling
from jaxdp.core.types import Phase
from jaxdp.training import loop

PROBLEM = problems.l1_linear(8)
N = 400
DATA = PROBLEM.make_data(N, 0)


def make(**changes: Any) -> plans.O2NC:
    base: dict[str, Any] = {
        "num_examples": N,
        "num_steps": 35,  # Four periods of eight steps, and three steps.
        "sampling": sampling.SinglePassRestarts(period=8, restart_batch_size=9),
        "relation": "replace_one",
        "restart_l2_clip_norm": 3.0,
        "l2_clip_norm": 0.5,
        "smoothing_radius": 0.5,
        "max_step": 0.06,
        "window": 5,
        "num_directions": 8,
        "learning_rate": 0.02,
        "noise_multiplier": 0.2,
        "delta": 1e-5,
    }
    return plans.O2NC(**base | changes)


def fit(plan: plans.O2NC, seed: int = 0, **options: Any) -> jaxdp.FitResult:
    return jaxdp.fit(
        plan,
        Keys.insecure(seed),
        PROBLEM.x0,
        DATA,
        value_fn=PROBLEM.value_fn,
        **options,
    )


class Counted(NamedTuple):
    """The state of a maker that releases the number of its step, and then zeros."""

    count: jax.Array
    release: jax.Array


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (1, 2), (3, 1), (1, 1, 1)], ids=str)
def test_a_run_may_end_within_a_period(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that are no longer due none runs: their zeros would overwrite releases."""
    monkeypatch.setattr(sampling, "batch", lambda *args, phase: phase)
    identity, steps = optax.identity(), 7
    phases = tuple(Phase(f"{i}", n, 1) for i, n in enumerate(lengths))
    plan: Any = SimpleNamespace(phases=phases, may_stop=False, num_steps=steps)

    def update(
        updates: Any, state: Counted, params: Any, *, phase: str, batch: str, **_: Any
    ) -> tuple[Any, Counted]:
        assert phase == batch
        number = 100 * int(phase) + state.count + 1
        shown = jnp.where(state.count < steps, number, 0)
        release = shown.astype(jnp.float32)[None]
        return jax.tree.map(jnp.zeros_like, params), Counted(state.count + 1, release)

    def init(params: Any) -> Counted:
        return Counted(jnp.int32(0), jnp.zeros(1))

    maker: Any = optax.GradientTransformationExtraArgs(init, update)
    program: Any = loop.make_program(plan, maker, identity, PROBLEM.value_fn)
    carry = loop.start(plan, maker, identity, jnp.zeros(2))
    done = jax.jit(program)(carry, jaxdp.Keys.insecure(0), None, 0, steps)
    of_period = [i for i, n in enumerate(lengths) for _ in range(n)]
    expected = [100 * of_period[t % len(of_period)] + t + 1 for t in range(steps)]
    np.testing.assert_array_equal(done.releases[:, 0], expected)
    assert done.opt_state[0].count == steps


def test_a_run_is_one_program_that_loops_over_phases() -> None:
    """One trace of each phase, a loop within a loop, whatever the number of periods."""
    plan = make(num_examples=20_000, num_steps=8 * 150)
    traced = []

    def value_fn(x: jax.Array, batch: Any) -> jax.Array:
        traced.append(jnp.shape(batch[0])[0])
        return PROBLEM.value_fn(x, batch)

    keys = Keys.insecure(1)
    maker, identity = plan.transform(keys), optax.identity()
    program = loop.make_program(plan, maker, identity, value_fn)
    carry = jax.eval_shape(lambda: loop.start(plan, maker, identity, PROBLEM.x0))
    data = PROBLEM.make_data(20_000, 0)
    lowered = jax.jit(lambda c, k, d: program(c, k, d, 0, plan.num_steps)).lower(
        carry, keys, data
    )
    assert len(traced) < 30  # Not a number of steps.
    assert lowered.as_text().count("stablehlo.while") >= 2


@pytest.mark.slow  # Three programs of a whole run.
def test_seeds_in_one_program() -> None:
    """lax.map and vmap over seeds give what each seed gives."""
    plan = make(num_steps=16)

    def run(seed: jax.Array) -> jax.Array:
        keys = Keys.insecure(seed)
        maker, identity = plan.transform(keys), optax.identity()
        program = loop.make_program(plan, maker, identity, PROBLEM.value_fn)
        carry = loop.start(plan, maker, identity, PROBLEM.x0)
        carry = program(carry, keys, DATA, 0, plan.num_steps)
        return plan.returned(carry.opt_state[0], carry.params)

    one = np.stack([fit(plan, seed).params for seed in (0, 1)])
    mapped = jax.jit(lambda s: jax.lax.map(run, s))(jnp.arange(2))
    beside = jax.jit(jax.vmap(run))(jnp.arange(2))
    np.testing.assert_allclose(mapped, one, atol=1e-4)
    np.testing.assert_allclose(beside, one, atol=1e-4)
    assert not np.allclose(one[0], one[1], atol=1e-3)


def test_an_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer must be None for o2nc"):
        fit(make(), optimizer=optax.sgd(0.1))


@pytest.mark.slow  # A whole run; its integers are in test_gradient_variants.py.
def test_noise_only_where_it_is_due() -> None:
    """With noise off and all directions, the run finds the minimum of the l1 part."""
    plan = dataclasses.replace(
        make(), noise_multiplier=0.0, num_examples=4000, num_steps=1600, window=20
    )
    data = PROBLEM.make_data(4000, 1)
    result = jaxdp.fit(
        plan, Keys.insecure(0), PROBLEM.x0, data, value_fn=PROBLEM.value_fn
    )
    assert np.linalg.norm(result.params) < 0.4 < np.linalg.norm(PROBLEM.x0)
    assert result.report["epsilon"] is None
