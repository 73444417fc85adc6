"""Lower bounds on epsilon from attacks on the compiled mechanism, beside the accounted one.

``jaxdp.auditing.audit`` on plans of DPZero and O2NC, and of those that draw vertices, at
failure probability 1e-6: the ratio is the bound over the accounted epsilon, and must stay
below 1. Of O2NC every released increment is seen, with canaries in the first, a middle, the
last and the worst leaf of a period, or in every step of several passes, whose queries move
where the noise is scaled with that; rows name the canary that gave the bound. Of draws
every vertex is seen, and the bound follows from the least rho of zCDP that allows the
errors.
Of SOSP the gradients and the products with Hessians of a short run are seen, with canaries
in each role.

The lattice adversary looks at the low digits of what a plan releases in its first steps,
with the noise of the whole plan: its bound is to be 0, and the p-value of the digits of no
release below 5e-7 over their number.

The private gap and the private Goldstein bound are released without a plan of their own; of
a search the law of the number of trials is enumerated, and has no runs.

One draw at d = 4096 is enumerated, from scores that spread over 60 octaves and neighbours
3.5e-3 apart: for the integers of the certified sampler, the ratio is the range of the
logarithms of the two laws' ratio over what is accounted; for a float32 inverse CDF it is
above 1 by as much as 64 bits allow, and delta, which should be 0, is a row.
"""

from typing import Any

from bench import _harness, _vertex_laws
from bench._lattice_plans import LATTICE_PLANS
from jaxdp import auditing, plans, sampling
from jaxdp.auditing import draws, functions
from jaxdp.kernels import simplex

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

#: The oracle's other releases: epsilon 2, where batches are sampled 3.
_SEVERAL: dict[str, Any] = {
    "sampling": sampling.MultiPassRestarts(period=4),
    "num_examples": 16,
    "num_steps": 8,
    "prefix_noise": "independent",
    "difference": "one_sided",
}
_GRADIENTS: dict[str, Any] = {
    "oracle": "first_order",
    "direction": "ball",
    "difference": "common",
}
ORACLES: dict[str, tuple[dict[str, Any], float]] = {
    "O2NC, several passes, noise scaled, 2 periods of 4": (
        _SEVERAL | {"scale_with_movement": True},
        2.0,
    ),
    "O2NC, several passes, q = 0.3, 2 periods of 4": (
        _SEVERAL
        | {
            "sampling": sampling.MultiPassRestarts(
                period=4, restart_sampling_prob=0.3, sampling_prob=0.3
            ),
        },
        3.0,
    ),
    "O2NC, gradients, tree, 2 periods of 8": (
        _GRADIENTS | {"prefix_noise": "tree"},
        2.0,
    ),
    "O2NC, gradients, several passes, 2 periods of 4": (_SEVERAL | _GRADIENTS, 2.0),
    "O2NC, slopes, m = 4, 16 steps": (
        {
            "oracle": "scalar",
            "sampling": sampling.SinglePassRestarts(period=1, restart_batch_size=2),
            "num_directions": 4,
            "share_directions": True,
        },
        2.0,
    ),
}

#: Dimensions of the plans of draws, and their steps and draws: epsilon 6.
SADDLES = {
    "Saddle, d = 5, 4 steps, K = 1": (5, 4, 1),
    "Saddle, d = 50, 4 steps, K = 1": (50, 4, 1),
    "Saddle, d = 16, 3 steps, K = 15": (16, 3, 15),
}

#: What the escapes of SOSP release: epsilon 2, two periods of 4 differences.
SOSP: dict[str, dict[str, Any]] = {
    "SOSP, products": {},
    "SOSP, tree, running Hessian": {
        "prefix_noise": "tree",
        "hessian": "tracked",
        "hessian_lipschitz": 1.0,
        "dim": 2,
    },
}
#: Marginals that are measured at once, and rounds after them, of plans.MWEM: epsilon 3.
MWEM = {"MWEM, 5 marginals at once": (1, 5), "MWEM, 3 rounds": (4, 1)}
#: The lattice adversary's plans, as they are: epsilon 1, of correlated noise less.
LATTICES = tuple(LATTICE_PLANS)
_ENUMERATED = 3.5e-3  # sensitivity of the enumerated draw


def run(quick: bool) -> list[_harness.Row]:
    """One row a plan: the bound, and its share of the accounted epsilon."""
    runs = 20_000 if quick else 250_000
    rows = [_row(case, runs, _dpzero(*CASES[case])) for case in CASES]
    rows += [
        _row(f"O2NC, {name}, 2 periods of 8", runs, _o2nc({"prefix_noise": name}))
        for name in NOISES
    ]
    cases = list(ORACLES)[: 1 if quick else None]
    rows += [_row(case, runs, _o2nc(*ORACLES[case])) for case in cases]
    cases = list(SOSP)[: 1 if quick else None]
    rows += [_row(case, runs, _sosp(SOSP[case])) for case in cases]
    runs = 5000 if quick else 100_000  # One takes longer, and most of it to compile.
    cases = list(SADDLES)[: 1 if quick else None]
    rows += [_row(case, runs, _saddle(*SADDLES[case])) for case in cases]
    if not quick:
        rows.append(_row("ConvexSimplex, d = 16, 4 steps, K = 15", runs, _convex()))
        rows.append(_row("SyntheticData, 32 queries, 8 steps", runs, _synthetic()))
        rows.append(_row("FrankWolfe, full batch, 4 steps", runs, _frank_wolfe()))
        rows += [_row(case, runs, _mwem(*MWEM[case])) for case in MWEM]
    rows += _functions(quick)
    cases = LATTICES[: 2 if quick else None]
    rows += [row for name in cases for row in _lattice(name, 200 if quick else 2000)]
    return rows + _enumerated()


def _functions(quick: bool) -> list[_harness.Row]:
    """Rows of what is released without a plan of its own."""
    gaps, bounds = (400, 20_000) if quick else (5000, 250_000)
    gap = functions.private_gap(gaps)
    bound = functions.private_goldstein(bounds)
    return [
        _bound(f"private gap, {gaps} runs", gap),
        _bound(f"private Goldstein bound, {bounds} runs", bound),
        _bound("search, 8 trials on average", functions.tune()),
    ]


def _lattice(name: str, runs: int) -> list[_harness.Row]:
    """What the digits of a plan's releases show: a bound, and the least p-value."""
    found = auditing.lattice(LATTICE_PLANS[name], num_runs=runs)
    worst = found.worst
    assert worst is not None
    case = f"lattice, {name}, {runs} runs"
    against = f"accounted {found.epsilon:.4g}; {found.method}"
    fits = f"{worst.num_numbers} numbers, {worst.even:.5f} even; {worst.statistic}"
    ratio = found.epsilon_lower / found.epsilon
    return [
        _harness.Row(
            case, "lower bound on epsilon", found.epsilon_lower, "", against, ratio
        ),
        _harness.Row(
            case, "least p-value of its digits", worst.p_value, "", fits, None
        ),
    ]


def _enumerated() -> list[_harness.Row]:
    """The exact laws of one draw: its range, and its delta at what is accounted."""
    both = draws.neighbours(_ENUMERATED)
    claimed = 2 * _ENUMERATED + 2 * simplex.LOG_ERROR
    rows = []
    for name, law in (
        ("certified sampler", draws.certified_law),
        ("float32 inverse CDF", draws.float_law),
    ):
        case = f"one draw enumerated, d = {draws.DIM}, {name}"
        found = _vertex_laws.compare(law(both[0]), law(both[1]), claimed)
        against, ratio = f"accounted {claimed:.6g}", found.bounded_range / claimed
        rows += [
            _harness.Row(
                case, "range of log-ratios", found.bounded_range, "", against, ratio
            ),
            _harness.Row(
                case, "delta at the accounted epsilon", found.delta, "", "0", None
            ),
        ]
    return rows


def _dpzero(changes: dict[str, Any], epsilon: float) -> plans.DPZero:
    fields: dict[str, Any] = {
        "num_examples": 16,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "smoothing_radius": 1e-3,
    }
    return plans.DPZero(**(fields | changes)).calibrate(epsilon=epsilon, delta=1e-5)


def _o2nc(changes: dict[str, Any], epsilon: float = 2.0) -> plans.O2NC:
    sampler = sampling.SinglePassRestarts(period=8, restart_batch_size=9, batch_size=1)
    fields: dict[str, Any] = {
        "num_examples": 32,
        "num_steps": 16,
        "sampling": sampler,
        "relation": "replace_one",
        "restart_l2_clip_norm": 4.5,
        "l2_clip_norm": 0.5,
        "smoothing_radius": 1e-3,
        "max_step": 1e-3,
        "window": 8,
        "num_directions": 2,
    }
    return plans.O2NC(**fields | changes).calibrate(epsilon=epsilon, delta=1e-5)


def _sosp(changes: dict[str, Any]) -> plans.SOSP:
    fields: dict[str, Any] = {
        "num_examples": 10_000,
        "num_steps": 100,
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "smoothness": 1.0,
        "refresh_batch_size": 100,
        "difference_batch_rate": 50.0,
        "drift_limit": 1.0,
        "max_differences": 4,
        "trigger_norm": 0.1,
        "escape_steps": 8,
        "escape_radius": 0.3,
        "escape_noise_std": 0.0,
        "hessian_batch_size": 100,
        "hessian_clip_norm": 1.0,
    }
    return plans.SOSP(**fields | changes).calibrate(epsilon=2.0, delta=1e-5)


_DRAWS: dict[str, Any] = {
    "sampling": sampling.SinglePass(4),
    "relation": "replace_one",
}


def _saddle(dim: int, num_steps: int, num_draws: int) -> plans.Saddle:
    return plans.Saddle(
        num_examples=4 * num_steps,
        num_steps=num_steps,
        dim_x=dim,
        dim_y=dim,
        linf_clip_norm_x=1.0,
        linf_clip_norm_y=1.0,
        num_draws=num_draws,
        **_DRAWS,
    ).calibrate(epsilon=6.0, delta=1e-5)


def _convex() -> plans.ConvexSimplex:
    return plans.ConvexSimplex(
        num_examples=16,
        num_steps=4,
        dim=16,
        linf_clip_norm=1.0,
        num_draws=15,
        refresh_every=2,
        **_DRAWS,
    ).calibrate(epsilon=6.0, delta=1e-5)


def _frank_wolfe() -> plans.FrankWolfe:
    return plans.FrankWolfe(
        num_examples=16,
        num_steps=4,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        dim=16,
        linf_clip_norm=1.0,
    ).calibrate(epsilon=6.0, delta=1e-5)


def _synthetic() -> plans.SyntheticData:
    return plans.SyntheticData(
        num_examples=64,
        num_steps=8,
        relation="replace_one",
        domain_size=16,
        num_queries=32,
    ).calibrate(epsilon=6.0, delta=1e-5)


def _mwem(num_steps: int, num_start: int) -> plans.MWEM:
    return plans.MWEM(
        num_examples=20,
        relation="replace_one",
        sizes=(2, 2, 2),
        attributes=((0,), (1,), (2,), (0, 1), (1, 2)),
        num_steps=num_steps,
        num_start=num_start,
    ).calibrate(epsilon=3.0, delta=1e-5)


def _row(case: str, runs: int, plan: Any) -> _harness.Row:
    return _bound(f"{case}, {runs} runs", auditing.audit(plan, num_runs=runs))


def _bound(case: str, found: auditing.AuditResult) -> _harness.Row:
    canary = found.canary.split(", against")[0]
    return _harness.Row(
        case,
        "lower bound on epsilon",
        found.epsilon_lower,
        "",
        f"accounted {found.epsilon:.4g}; {canary}",
        found.epsilon_lower / found.epsilon,
    )
