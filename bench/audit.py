"""Lower bounds on epsilon from attacks on the compiled mechanism, beside the accounted one.

``jaxdp.auditing.audit`` on plans of DPZero and O2NC, at failure probability 1e-6: the ratio
is the bound over the accounted epsilon, and must stay below 1. Of O2NC every released
increment is seen, with canaries in the first, a middle, the last and the worst leaf of a
period; rows name the one that gave the bound.
"""

from typing import Any

from bench import _harness
from jaxdp import auditing, plans, sampling

#: name -> changes to the common plan, and its epsilon.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "full batch, 8 steps": ({"num_steps": 8}, 2.0),
    "n = 1437, K = 4, 4 steps": (
        {"num_examples": 1437, "num_steps": 4, "num_directions": 4},
        2.0,
    ),
    "Poisson q = 0.5, 2 steps": (
        {"num_steps": 2, "sampling": sampling.TruncatedPoisson(sampling_prob=0.5)},
        3.0,
    ),
    "Poisson q = 0.3, 8 steps": (
        {"num_steps": 8, "sampling": sampling.TruncatedPoisson(sampling_prob=0.3)},
        3.0,
    ),
}

#: Noise of the oracle's releases: two periods of 8 steps, epsilon 2.
NOISES = ("tree", "blt_2")


def run(quick: bool) -> list[_harness.Row]:
    """One row a plan: the bound, and its share of the accounted epsilon."""
    runs = 20_000 if quick else 250_000
    rows = [_row(case, runs, _dpzero(*CASES[case])) for case in CASES]
    return rows + [
        _row(f"O2NC, {name}, 2 periods of 8", runs, _o2nc(name)) for name in NOISES
    ]


def _dpzero(changes: dict[str, Any], epsilon: float) -> plans.DPZero:
    fields: dict[str, Any] = {
        "num_examples": 16,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "smoothing_radius": 1e-3,
    }
    return plans.DPZero(**(fields | changes)).calibrate(epsilon=epsilon, delta=1e-5)


def _o2nc(prefix_noise: str) -> plans.O2NC:
    sampler = sampling.SinglePassRestarts(period=8, restart_batch_size=9, batch_size=1)
    return plans.O2NC(
        num_examples=32,
        num_steps=16,
        sampling=sampler,
        relation="replace_one",
        restart_l2_clip_norm=4.5,
        l2_clip_norm=0.5,
        smoothing_radius=1e-3,
        max_step=1e-3,
        window=8,
        num_directions=2,
        prefix_noise=prefix_noise,
    ).calibrate(epsilon=2.0, delta=1e-5)


def _row(case: str, runs: int, plan: plans.DPZero | plans.O2NC) -> _harness.Row:
    found = auditing.audit(plan, num_runs=runs)
    canary = found.canary.split(", against")[0]
    return _harness.Row(
        f"{case}, {runs} runs",
        "lower bound on epsilon",
        found.epsilon_lower,
        "",
        f"accounted {found.epsilon:.4g}; {canary}",
        found.epsilon_lower / found.epsilon,
    )
