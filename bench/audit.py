"""Lower bounds on epsilon from attacks on the compiled mechanism, beside the accounted one.

``jaxdp.auditing.audit`` on four plans of DPZero, at failure probability 1e-6: the ratio is
the bound over the accounted epsilon, and must stay below 1.
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


def run(quick: bool) -> list[_harness.Row]:
    """One row a plan: the bound, and its share of the accounted epsilon."""
    runs = 20_000 if quick else 250_000
    return [_row(case, runs, *CASES[case]) for case in CASES]


def _row(case: str, runs: int, changes: dict[str, Any], epsilon: float) -> _harness.Row:
    fields: dict[str, Any] = {
        "num_examples": 16,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "smoothing_radius": 1e-3,
    }
    plan = plans.DPZero(**(fields | changes)).calibrate(epsilon=epsilon, delta=1e-5)
    found = auditing.audit(plan, num_runs=runs)
    return _harness.Row(
        f"{case}, {runs} runs",
        "lower bound on epsilon",
        found.epsilon_lower,
        "",
        f"accounted {found.epsilon:.4g}",
        found.epsilon_lower / found.epsilon,
    )
