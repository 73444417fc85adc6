"""A plan of every family that adds noise to integers, most at large noise: epsilon 1.

There the grid is so fine that noise is near the most that it may be, where float32 is
coarsest.
"""

from typing import Any

from jaxdp import plans, sampling

_COMMON: dict[str, Any] = {
    "num_examples": 64,
    "num_steps": 1000,
    "sampling": sampling.FullBatch(),
    "relation": "replace_one",
    "l2_clip_norm": 1.0,
}


_EPOCHS = sampling.ShuffledEpochs(1)


def _slopes(kind: Any = plans.DPZero, **changes: Any) -> Any:
    return kind(**_COMMON | {"smoothing_radius": 1e-3} | changes).calibrate(
        epsilon=1.0, delta=1e-5
    )


def _dpgd(**changes: Any) -> Any:
    return plans.DPGD(**_COMMON | changes).calibrate(epsilon=1.0, delta=1e-5)


def _prefix_sum(name: str, sampler: Any, **changes: Any) -> Any:
    changes |= {"sampling": sampler, "num_steps": 400}
    return plans.PrefixSum(**_COMMON | changes, prefix_noise=name).calibrate(
        epsilon=0.2, delta=1e-5
    )


_ONE_PASS: dict[str, Any] = {
    "num_examples": 64,
    "num_steps": 32,
    "sampling": sampling.SinglePassRestarts(
        period=4, restart_batch_size=4, batch_size=1
    ),
    "relation": "replace_one",
    "restart_l2_clip_norm": 2.0,
    "l2_clip_norm": 0.5,
    "smoothing_radius": 1e-3,
    "max_step": 1e-3,
    "window": 4,
}
_SEVERAL: dict[str, Any] = {
    "num_examples": 16,
    "num_steps": 400,
    "sampling": sampling.MultiPassRestarts(period=4),
    "prefix_noise": "independent",
    "difference": "one_sided",
}
_GRADIENTS: dict[str, Any] = {
    "oracle": "first_order",
    "direction": "ball",
    "difference": "common",
}
_SLOPES: dict[str, Any] = {
    "oracle": "scalar",
    "share_directions": True,
    "num_directions": 4,
}


def _o2nc(*changes: dict[str, Any], epsilon: float = 0.1) -> Any:
    fields = dict(_ONE_PASS)
    for each in changes:
        fields |= each
    return plans.O2NC(**fields).calibrate(epsilon=epsilon, delta=1e-5)


def _sosp(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "num_examples": 640,
        "num_steps": 40,
        "sampling": sampling.AdaptiveCursor(num_passes=30),
        "relation": "replace_one",
        "l2_clip_norm": 2.0,
        "smoothness": 3.0,
        "refresh_batch_size": 20,
        "difference_batch_rate": 5.0,
        "drift_limit": 5.0,
        "max_differences": 4,
        "trigger_norm": 0.1,
        "escape_steps": 4,
        "escape_radius": 0.3,
        "escape_noise_std": 0.0,
        "hessian_batch_size": 30,
        "hessian_clip_norm": 3.0,
    }
    return plans.SOSP(**fields | changes).calibrate(epsilon=1.0, delta=1e-5)


_TUNING = plans.ClipTuning(
    target_unclipped_quantile=0.5, learning_rate=0.1, count_noise_multiplier=300.0
)
#: Plans whose noise is drawn as float32 where a mutation makes it so.
LATTICE_PLANS: dict[str, Any] = {
    "DPZero": _slopes(),
    "DPZero, several directions": _slopes(num_directions=4),
    "DPZero, Poisson": _slopes(
        sampling=sampling.TruncatedPoisson(sampling_prob=0.5),
    ),
    "DPZero, clip tuning": _slopes(
        clip_tuning=_TUNING,
    ),
    "DPZero, Laplace": _slopes(noise="laplace"),
    "DPGDZerothOrder": _slopes(plans.DPGDZerothOrder),
    "DPGD": _dpgd(),
    "DPGD, clip tuning": _dpgd(clip_tuning=_TUNING),
    "DPGD, Poisson": _dpgd(sampling=sampling.TruncatedPoisson(sampling_prob=0.5)),
    "PrefixSum, buffers": _prefix_sum("blt_3", _EPOCHS),
    "PrefixSum, tree": _prefix_sum("tree", _EPOCHS),
    "PrefixSum, passes of one order": _prefix_sum("blt_3", sampling.CyclicEpochs(1)),
    "PrefixSum, sampled bands": _prefix_sum(
        "sqrt_toeplitz", sampling.CyclicPoisson(num_groups=4, sampling_prob=0.5)
    ),
    "PrefixSum, optimised bands": _prefix_sum(
        "toeplitz",
        sampling.CyclicPoisson(num_groups=4, sampling_prob=0.5),
        coefficients=(1.0, 0.846, 0.782, 0.711),
    ),
    "O2NC, values, buffers": _o2nc({"prefix_noise": "blt_2"}),
    "O2NC, values, tree": _o2nc({"prefix_noise": "tree"}),
    "O2NC, gradients": _o2nc(_GRADIENTS),
    "O2NC, clip tuning": _o2nc({"prefix_noise": "tree", "clip_tuning": _TUNING}),
    "O2NC, several passes, moved": _o2nc(
        _SEVERAL, {"scale_with_movement": True}, epsilon=1.0
    ),
    "O2NC, several passes, gradients": _o2nc(_SEVERAL, _GRADIENTS, epsilon=1.0),
    "O2NC, slopes": _o2nc(
        _SLOPES,
        {"sampling": sampling.SinglePassRestarts(period=1, restart_batch_size=2)},
    ),
    "O2NC, slopes, several passes": _o2nc(
        _SEVERAL,
        _SLOPES,
        {"sampling": sampling.MultiPassRestarts(period=1), "difference": "antithetic"},
        epsilon=1.0,
    ),
    "SOSP": _sosp(),
    "SOSP, running Hessian": _sosp(
        hessian="tracked", hessian_lipschitz=1.0, dim=2, prefix_noise="tree"
    ),
    "SOSP, no escapes": _sosp(escape_steps=None),
}
