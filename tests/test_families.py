"""What every family of plans keeps to: a line in FAMILIES puts it through all of this.

Of runs without signal, whose releases are noise alone: which roots it comes from, and what
reports say of keys.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling

N, D = 24, 4
COMMON: dict[str, Any] = {
    "num_examples": N,
    "num_steps": 3,
    "sampling": sampling.FullBatch(),
    "relation": "replace_one",
    "l2_clip_norm": 1.0,
    "noise_multiplier": 1.0,
    "delta": 1e-5,
}
SLOPES = COMMON | {"smoothing_radius": 0.1}
ORACLE: dict[str, Any] = SLOPES | {
    "sampling": sampling.SinglePassRestarts(
        period=2, restart_batch_size=6, batch_size=2
    ),
    "restart_l2_clip_norm": 1.0,
    "max_step": 0.1,
    "window": 2,
    "num_steps": 4,
}
SEVERAL = ORACLE | {
    "sampling": sampling.MultiPassRestarts(period=1),
    "prefix_noise": "independent",
}
SEARCH: dict[str, Any] = COMMON | {
    "num_steps": 4,
    "sampling": sampling.AdaptiveCursor(),
    "smoothness": 1.0,
    "refresh_batch_size": 4,
    "difference_batch_rate": 1.0,
    "drift_limit": 2.0,
    "max_differences": 4,
    # Every step is small: after a refresh there is an escape.
    "trigger_norm": 1e6,
    "escape_steps": 3,
    "escape_radius": 1e3,
    "escape_noise_std": 0.1,
    "hessian_batch_size": 2,
    "hessian_clip_norm": 1.0,
}
PASS = {"sampling": sampling.SinglePass(3), "num_steps": 4}
VERTICES: dict[str, Any] = {"num_examples": N, "relation": "replace_one"}
PLAYERS: dict[str, Any] = VERTICES | {
    "dim_x": 16,
    "dim_y": 16,
    "linf_clip_norm_x": 1.0,
    "linf_clip_norm_y": 1.0,
}
QUERIES = jaxdp.Marginals((4, 4), 1)


def silent(params: Any, batch: Any) -> jax.Array:
    return 0 * (batch @ params)


class Case(NamedTuple):
    """A plan, and a problem on which its data say nothing."""

    plan: Any
    data: Any = np.ones((N, D), np.float32)
    value_fn: Any = silent
    #: Releases that no direction root decides, of the first steps; None: all.
    rows: int | None = None


ZEROS = (np.zeros((N, 16), np.float32),) * 2
FAMILIES = {
    "DPZero": Case(plans.DPZero(**SLOPES, num_directions=3)),
    "DPZero, Laplace": Case(plans.DPZero(**SLOPES, noise="laplace")),
    "DPZero, clip tuning": Case(
        plans.DPZero(
            **SLOPES,
            clip_tuning=plans.ClipTuning(
                target_unclipped_quantile=0.7,
                learning_rate=0.2,
                count_noise_multiplier=3.0,
            ),
        )
    ),
    "DPGDZerothOrder": Case(plans.DPGDZerothOrder(**SLOPES)),
    "DPGD": Case(plans.DPGD(**COMMON)),
    "O2NC": Case(plans.O2NC(**ORACLE, num_directions=2)),
    "O2NC, gradients": Case(
        plans.O2NC(
            **SEVERAL, oracle="first_order", direction="ball", difference="common"
        )
    ),
    "O2NC, slopes": Case(
        plans.O2NC(
            **SEVERAL,
            oracle="scalar",
            difference="antithetic",
            share_directions=True,
        )
    ),
    "PrefixSum": Case(
        plans.PrefixSum(**COMMON | PASS),
        data=np.zeros((N, D), np.float32),
    ),
    "SOSP": Case(plans.SOSP(**SEARCH)),
    "SOSP, released Hessians": Case(
        plans.SOSP(
            **SEARCH
            | {"hessian": "released", "hessian_lipschitz": 1.0, "dim": D}
            | {"escape_steps": 1, "curvature_threshold": 0.3}
        )
    ),
    "Saddle": Case(plans.Saddle(**PLAYERS, **PASS), ZEROS, jaxdp.MatrixGame()),
    "SaddleBiasReduced": Case(
        plans.SaddleBiasReduced(**PLAYERS, vertex_budget=5, level_seed=1),
        ZEROS,
        jaxdp.MatrixGame(),
    ),
    "ConvexSimplex": Case(
        plans.ConvexSimplex(
            **VERTICES,
            **PASS,
            dim=16,
            linf_clip_norm=1.0,
            num_draws=2,
            refresh_every=2,
        ),
        ZEROS[0],
        jaxdp.Problem(lambda x, batch: batch @ x),
        rows=1,  # Later ones are of iterates that the public root chooses.
    ),
    "SyntheticData": Case(
        plans.SyntheticData(
            **VERTICES,
            num_steps=4,
            domain_size=16,
            num_queries=2 * QUERIES.num_queries,
        ),
        np.arange(N, dtype=np.int32) % 16,
        QUERIES,
    ),
}
NAMES = pytest.mark.parametrize("name", FAMILIES)


def ready(name: str) -> Case:
    case = FAMILIES[name]
    if hasattr(case.plan, "noise_multiplier"):
        return case
    return case._replace(plan=case.plan.calibrate(epsilon=5.0, delta=1e-5))


def begun(case: Case, keys: Keys) -> tuple[Any, Any]:
    """What runs, and its state before the first step."""
    plan = case.plan
    if plan.runs_algorithm:
        start = jnp.zeros(D) if plan.family == "sosp" else plan.uniform()
        made: Any = plan.algorithm(keys)
    else:
        start, made = jnp.zeros(D), plan.transform(keys)
    return made, made.init(start)


def released(case: Case, keys: Keys) -> tuple[np.ndarray, dict[str, Any]]:
    """All releases of a run, and its report."""
    plan, start = case.plan, jnp.zeros(D)
    if plan.family != "prefix_sum":
        if plan.runs_algorithm and plan.family != "sosp":
            start = plan.uniform()
        own = plan.makes_steps or plan.runs_algorithm  # Else updates are gradients.
        run = jaxdp.fit(
            plan,
            keys,
            start,
            case.data,
            value_fn=case.value_fn,
            optimizer=None if own else optax.sgd(0.1),
        )
        return np.asarray(run.info.releases), run.report
    tx, state = begun(case, keys)
    means = []
    for t in range(plan.num_steps):
        batch = sampling.batch(plan, keys, t, case.data)
        mean, state = tx.update(batch.records, state, batch=batch)
        means.append(np.asarray(mean))
    return np.array(means), jaxdp.report(plan, state)


def test_every_family_is_here() -> None:
    own = {name for name, kind in vars(plans).items() if hasattr(kind, "family")}
    assert own == {type(case.plan).__name__ for case in FAMILIES.values()}


@NAMES
def test_noise_comes_from_secret_roots_alone(name: str) -> None:
    """Another direction root changes no noise; the others under one direction root do.

    Whatever the secret roots are, they are taken together.
    """
    case, (one, two) = ready(name), (Keys.insecure(i) for i in (1, 2))
    first, report = released(case, one)
    moved, _ = released(case, dataclasses.replace(one, direction=two.direction))
    np.testing.assert_allclose(moved[: case.rows], first[: case.rows], rtol=1e-5)
    other, _ = released(case, dataclasses.replace(two, direction=one.direction))
    assert np.any(first) and np.any(other != first)
    # Where a release is a norm of what was noised: every one of them.
    if first.shape[1] == 1:
        assert np.all(other != first)
    assert report["private"] is False


@NAMES
def test_a_report_says_private_of_keys_from_entropy_alone(name: str) -> None:
    case = ready(name)
    for keys in (Keys.from_entropy(), Keys.insecure(3)):
        _, state = begun(case, keys)
        report = jaxdp.report(case.plan, state)
        assert report["private"] is keys.private
        assert report["epsilon"] == float(case.plan.epsilon())
