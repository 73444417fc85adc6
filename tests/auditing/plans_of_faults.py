"""The plans that planted faults are looked for in. Each passes where nothing is planted."""

from typing import Any

from bench._lattice_plans import LATTICE_PLANS
from jaxdp import plans, sampling

#: Of ``plans.DPZero``, by what they change.
PLANS: dict[str, dict[str, Any]] = {
    "full": {"noise_multiplier": 5.3},  # epsilon 1
    "laplace": {"noise_multiplier": 5.3, "noise": "laplace"},
    # Where a record may be absent, a mean tells how many there are: epsilon 0.5.
    "absent": {
        "noise_multiplier": 14.0,
        "relation": "add_or_remove",
        "num_examples": 2,
        "num_steps": 4,
    },
    # Epsilon 1.
    "sampled": {
        "noise_multiplier": 0.86,
        "sampling": sampling.TruncatedPoisson(sampling_prob=0.1, max_batch_size=20),
        "num_examples": 20,
        "num_steps": 4,
    },
    # 32 records join a step, and 2 of them are kept: epsilon 0.5.
    "truncated": {
        "noise_multiplier": 1.3,
        "sampling": sampling.TruncatedPoisson(sampling_prob=0.5, max_batch_size=2),
        "num_examples": 64,
        "num_steps": 4,
    },
    # Four of a hundred thousand records join a step: epsilon 2e-4.
    "few of many": {
        "noise_multiplier": 0.7,
        "sampling": sampling.TruncatedPoisson(sampling_prob=2**-15, max_batch_size=16),
        "num_examples": 2**17 + 8,
        "num_steps": 4,
    },
    # A record can be in one step of eight, and mostly is: epsilon 2.4.
    "groups": {
        "noise_multiplier": 1.5,
        "sampling": sampling.CyclicPoisson(num_groups=8, sampling_prob=0.9),
        "num_examples": 16,
        "num_steps": 8,
    },
    # A record is in two steps of eight: epsilon 1.6.
    "epochs": {
        "noise_multiplier": 3.5,
        "sampling": sampling.CyclicEpochs(4),
        "num_examples": 16,
        "num_steps": 8,
    },
}

#: Of ``plans.O2NC``, two periods each: epsilon 1.
O2NC_PLANS: dict[str, dict[str, Any]] = {
    # The first leaf of four is the worst, the second almost as bad.
    "tree": {"prefix_noise": "tree", "num_directions": 2},
    "one direction": {"direction": "sphere"},
    # The estimate is 2000 times the noise in it, and half-way between two bfloat16.
    "large estimate": {
        "prefix_noise": "independent",
        "num_directions": 2,
        "sampling": sampling.SinglePassRestarts(
            period=2, restart_batch_size=2**14, batch_size=1
        ),
        "num_examples": 2 * (2**14 + 1),
        "num_steps": 4,
        "restart_l2_clip_norm": 1 + 2**-8,
        "l2_clip_norm": (1 + 2**-8) / 2**14,
    },
}

#: In several passes: a record is in every step. Epsilon 2, as are all below.
SEVERAL: dict[str, Any] = {
    "sampling": sampling.MultiPassRestarts(period=4),
    "num_examples": 6,
    "prefix_noise": "independent",
    "num_directions": 2,
    "difference": "one_sided",
    "noise_multiplier": 2.0,
}
GRADIENTS: dict[str, Any] = {
    "oracle": "first_order",
    "direction": "ball",
    "difference": "common",
    "share_directions": False,
    "num_directions": 2,
    "noise_multiplier": 2.0,
}

#: Of the other oracles of ``plans.O2NC``.
ORACLE_PLANS: dict[str, dict[str, Any]] = {
    "several passes": SEVERAL,
    "moved": SEVERAL | {"scale_with_movement": True},
    "gradients": SEVERAL | GRADIENTS,
    "gradients of one pass": GRADIENTS,
    # Most of the budget is the count's, which a record that is zeroed moves. The second
    # period has smaller clips, for in the first one nothing reaches them.
    "tuned": GRADIENTS
    | {
        "relation": "zero_out",
        "clip_tuning": plans.ClipTuning(
            target_unclipped_quantile=0.01,
            learning_rate=2.0,
            count_noise_multiplier=2.4,
        ),
    },
    "slopes": {
        "oracle": "scalar",
        "sampling": sampling.SinglePassRestarts(period=1, restart_batch_size=2),
        "num_steps": 4,
        "num_directions": 4,
        "noise_multiplier": 2.0,
    },
    "slopes of several passes": SEVERAL
    | {
        "oracle": "scalar",
        "sampling": sampling.MultiPassRestarts(period=1),
        "difference": "antithetic",
        "num_directions": 4,
        "num_steps": 4,
    },
    "samples": SEVERAL
    | {
        "sampling": sampling.MultiPassRestarts(
            period=4, restart_sampling_prob=0.25, sampling_prob=0.25
        ),
        "num_examples": 8,
        "num_steps": 4,
        "share_directions": False,
        "noise_multiplier": 2.0,
    },
}

O2NC_PLANS |= ORACLE_PLANS


#: Of ``plans.Saddle``: epsilon 9, for half of a rho is told from the whole where both are
#: large. Batches of two records, so that one may read a record of the last again.
SADDLE_PLANS: dict[str, dict[str, Any]] = {
    "saddle": {"step_size_x": 0.5, "step_size_y": 1.0},
}


#: Of ``plans.FrankWolfe``: epsilon 9.
WOLFE_PLANS: dict[str, dict[str, Any]] = {
    "frank_wolfe": {"sampling": sampling.SinglePass(2), "inverse_temperature": 1.7},
    "frank_wolfe of all": {
        "sampling": sampling.FullBatch(),
        "inverse_temperature": 3.4,
    },
    # That of ``metrics.private_choice``, by its pure epsilon: 6.
    "choice": {"sampling": sampling.FullBatch(), "num_steps": 1, "delta": 0.0},
}

#: Of ``plans.MWEM``: epsilon 3; of the second, most is what the draws may cost.
MWEM_PLANS: dict[str, dict[str, Any]] = {
    "marginals": {"num_steps": 1, "num_start": 5},
    "drawn marginals": {"num_steps": 4, "num_start": 1, "selection_share": 0.95},
}


#: Of ``plans.SOSP``: epsilon 2.
SOSP_PLANS: dict[str, dict[str, Any]] = {
    "sosp": {},
    "tracked": {"hessian": "tracked", "hessian_lipschitz": 1.0, "dim": 2},
    # Two queries a pass; without refreshes a period would go on through all passes.
    "passes": {
        "sampling": sampling.AdaptiveCursor(num_passes=8),
        "num_examples": 3,
        "num_steps": 16,
        "refresh_batch_size": 1,
        "max_differences": 8,
        "escape_steps": None,
        "noise_multiplier": 5.6,
    },
    # Two queries of two records, and slices of three.
    "short data": {
        "num_examples": 4,
        "refresh_batch_size": 2,
        "max_differences": 1,
        "escape_steps": None,
    },
}


def plan_named(name: str) -> Any:
    if name in LATTICE_PLANS:
        return LATTICE_PLANS[name]
    if name in SOSP_PLANS:
        fields: dict[str, Any] = {
            "num_examples": 100,
            "num_steps": 40,
            "relation": "replace_one",
            "l2_clip_norm": 1.4,
            "smoothness": 1.0,
            "refresh_batch_size": 4,
            "difference_batch_rate": 5.0,
            "drift_limit": 2.0,
            "max_differences": 4,
            "prefix_noise": "tree",
            "trigger_norm": 0.1,
            "escape_steps": 4,
            "escape_radius": 0.3,
            "escape_noise_std": 0.0,
            "hessian_batch_size": 2,
            "hessian_clip_norm": 0.9,
            "noise_multiplier": 2.0,
            "delta": 1e-5,
        }
        return plans.SOSP(**fields | SOSP_PLANS[name])
    if name in MWEM_PLANS:
        table: dict[str, Any] = {
            "num_examples": 20,
            "relation": "replace_one",
            "sizes": (2, 2, 2),
            "attributes": ((0,), (1,), (2,), (0, 1), (1, 2)),
        }
        made = plans.MWEM(**table | MWEM_PLANS[name])
        return made.calibrate(epsilon=3.0, delta=1e-5)
    if name in SADDLE_PLANS:
        numbers: dict[str, Any] = {
            "num_examples": 8,
            "num_steps": 4,
            "sampling": sampling.SinglePass(2),
            "relation": "replace_one",
            "dim_x": 6,
            "dim_y": 6,
            "linf_clip_norm_x": 1.0,
            "linf_clip_norm_y": 0.5,
            "num_draws": 1,
            "delta": 1e-5,
        }
        return plans.Saddle(**numbers | SADDLE_PLANS[name])
    if name in WOLFE_PLANS:
        fields = {
            "num_examples": 8,
            "num_steps": 4,
            "relation": "replace_one",
            "dim": 6,
            "linf_clip_norm": 1.0,
            "delta": 1e-5,
        }
        made = plans.FrankWolfe(**fields | WOLFE_PLANS[name])
        if made.inverse_temperature is None:
            return made.calibrate(epsilon=6.0, delta=0.0)
        return made
    if name in O2NC_PLANS:
        fields: dict[str, Any] = {
            "num_examples": 10,
            "num_steps": 8,
            "sampling": sampling.SinglePassRestarts(
                period=4, restart_batch_size=2, batch_size=1
            ),
            "relation": "replace_one",
            "restart_l2_clip_norm": 1.4,
            "l2_clip_norm": 0.85,
            "smoothing_radius": 1e-3,
            "max_step": 1e-3,
            "window": 4,
            "share_directions": True,
            "noise_multiplier": 3.75,
            "delta": 1e-5,
        }
        return plans.O2NC(**fields | O2NC_PLANS[name])
    numbers = {
        "num_examples": 6,
        "num_steps": 2,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 0.7,
        "smoothing_radius": 1e-3,
        "delta": 1e-5,
    }
    if name == "tuned gradients":  # Most of the budget is the count's: epsilon 1.
        del numbers["smoothing_radius"]
        tuning = plans.ClipTuning(
            target_unclipped_quantile=0.5, learning_rate=0.1, count_noise_multiplier=5.5
        )
        numbers |= {"relation": "zero_out", "noise_multiplier": 5.3}
        return plans.DPGD(**numbers, clip_tuning=tuning)
    return plans.DPZero(**numbers | PLANS[name])
