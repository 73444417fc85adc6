r"""Releases of the O2NC oracles: checks of their numbers, and their mechanism.

An estimate is released where a period begins, and its changes until the next restart. With
``SinglePassRestarts`` a record is in one step of a run, and the noise is that of
:class:`~jaxdp.mechanism.sums.CorrelatedSums`.

With ``MultiPassRestarts`` it may be in all. The noise of the steps is independent, adds up
in the running estimate until the next restart, and is divided between restarts and
differences as :mod:`jaxdp.o2nc.theory.budget` derives. ``sensitivity`` is its
:math:`r_1 + r_2`, and with full batches the run is exactly :math:`\mu`-GDP with
:math:`\mu` = 1 / ``noise_multiplier``. With samples the same noise costs about as much:
more where a record that is drawn, which weighs 1/q times as much, is large beside it. What
samples save is time.
"""

import math
from typing import Any

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.mechanism import blt
from jaxdp.mechanism.clip_tuning import ClipTuning
from jaxdp.mechanism.sum_plan import check_clip
from jaxdp.mechanism.sums import CorrelatedSums, WeighedSums, steps_of
from jaxdp.o2nc.oracle import ORACLES
from jaxdp.o2nc.theory import budget


def check(plan: Any) -> None:
    """Checks the numbers of the oracle and its releases against each other."""
    check_clip("restart_l2_clip_norm", plan.restart_l2_clip_norm)
    check_clip("l2_clip_norm", plan.l2_clip_norm)
    if math.isinf(plan.restart_l2_clip_norm) != math.isinf(plan.l2_clip_norm):
        raise ValueError(
            "restart_l2_clip_norm must be finite if and only if l2_clip_norm is, got "
            f"{plan.restart_l2_clip_norm!r} and {plan.l2_clip_norm!r}"
        )
    validate.positive(smoothing_radius=plan.smoothing_radius, max_step=plan.max_step)
    validate.one_of(tuple(ORACLES), oracle=plan.oracle)
    oracle = ORACLES[plan.oracle]
    validate.one_of(oracle.directions, direction=plan.direction)
    validate.one_of(oracle.differences, difference=plan.difference)
    most = MAX_ORTHONORMAL if plan.direction == "orthonormal" else None
    validate.integer(num_directions=plan.num_directions, at_most=most)
    for name in ("share_directions", "scale_with_movement"):
        validate.instance(bool, **{name: getattr(plan, name)})
    oracle.check_shares(plan.oracle, plan.share_directions)
    if oracle.slopes and plan.sampling.period != 1:
        raise ValueError(
            f"sampling.period must be 1 with oracle={plan.oracle!r}, got "
            f"{plan.sampling.period}: slopes along other directions do not add up"
        )
    if plan.multi_pass and plan.prefix_noise != "independent":
        raise ValueError(
            "prefix_noise must be 'independent' with sampling.MultiPassRestarts, got "
            f"{plan.prefix_noise!r}: a record is in every step"
        )
    if plan.scale_with_movement and not plan.multi_pass:
        raise ValueError(
            "scale_with_movement must be False with sampling.SinglePassRestarts, got "
            "True: a record is in one step, and the longest move decides"
        )
    if plan.scale_with_movement and plan.l2_clip_norm < 1e-22:
        raise ValueError(
            "l2_clip_norm must be at least 1e-22 with scale_with_movement, which takes "
            f"a share of it, got {plan.l2_clip_norm!r}"
        )
    blt.check_names(plan.prefix_noise, plan.blt_numbers)
    if plan.clip_tuning is not None:
        validate.instance(ClipTuning, clip_tuning=plan.clip_tuning)
        if math.isinf(plan.l2_clip_norm):
            raise ValueError("clip_tuning must be None without finite clips")


def sums_of(plan: Any) -> CorrelatedSums | WeighedSums:
    """Returns the mechanism of a plan's releases."""
    period = plan.sampling.period
    bounds_of = {"restart": plan.restart_l2_clip_norm, "difference": plan.l2_clip_norm}
    samplers = {p.name: plan.sampling.of_phase(p.name) for p in plan.phases}
    clips = {
        name: (bounds_of[name], sampler.expected_batch_size(plan.num_examples))
        for name, sampler in samplers.items()
    }
    numbers = plan._common() | {
        "clips": clips,
        "phases": plan.phases,
        "correlation": blt.kernel(plan.prefix_noise, plan.blt_numbers, period),
        "slopes": plan.num_directions if ORACLES[plan.oracle].slopes else 1,
    }
    if (tuning := plan.clip_tuning) is not None:
        numbers["count_noise_multiplier"] = tuning.count_noise_multiplier
        if (
            plan.multi_pass
        ):  # A record is in all of them, or as below in a sample of them.
            counts = steps_of(plan.num_steps, period)["restart"]
            share = clips["restart"][1] / plan.num_examples
            numbers["count_share"] = math.sqrt(counts) * share
    if not plan.multi_pass:
        return CorrelatedSums(**numbers)
    # As if all records were read: a sample's larger share is paid less often.
    restart, rest = (
        accounting.sensitivity(plan.relation, bound) / plan.num_examples
        for bound in bounds_of.values()
    )
    steps, scaled = plan.num_steps, plan.scale_with_movement
    rest = rest if steps_of(steps, period)["difference"] else 0.0
    division = budget.divided(restart, rest, period, steps, scaled)
    stds = {name: float(getattr(division, name)) for name in clips}
    weighed = float(division.estimate)
    return WeighedSums(**numbers, unit_stds=stds, weighed=weighed)
