"""The noise on what a run releases: in words, and for plots."""

import math
from typing import Any

import numpy as np

from jaxdp import plans
from jaxdp.plans._correlated import CorrelatedPlan


def said(plan: Any) -> str:
    """How much noise, and what it is on."""
    if isinstance(plan, plans.O2NC) and plan.multi_pass:
        return _of_passes(plan)
    sums = f"each of {plan.num_steps} {_averaged(plan)}"
    noise = f"{plan.noise_multiplier:.4g} x sensitivity {plan.sensitivity:.4g}"
    return f"{noise if plan.noise_multiplier else 'none'} on {sums}"


def _averaged(plan: Any) -> str:
    """What the noise is on."""
    if not isinstance(plan, CorrelatedPlan):
        return f"sums of {plan.normalizer:.5g} records"
    sizes = " or ".join(str(size) for _, size in plan.clips.values())
    means = f"means of {sizes} records{_slopes(plan)}"
    if plan.noise_period == 1:
        return means
    return f"{means}, correlated over {plan.noise_period} steps ({plan.prefix_noise})"


def _slopes(plan: Any) -> str:
    if not _is_scalar(plan):
        return ""
    return f", of {plan.num_directions} slope{'s' * (plan.num_directions > 1)} each"


def _of_passes(plan: plans.O2NC) -> str:
    """Where a record is in every step, restarts and changes have noise of their own."""
    restarts = -(-plan.num_steps // plan.sampling.period)
    size = plan.clips["restart"][1]
    std = plan.step_std("restart")
    parts = [f"{std:.4g} on each of {restarts} means of {size:.5g} records"]
    parts[0] += _slopes(plan)
    if changes := plan.num_steps - restarts:
        size, std = plan.clips["difference"][1], plan.step_std("difference")
        at_most = "at most " if plan.scale_with_movement else ""
        parts.append(
            f"{at_most}{std:.4g} on each of {changes} means of {size:.5g} changes"
        )
    return f"standard deviation {' and '.join(parts)}"


def _is_scalar(plan: Any) -> bool:
    return isinstance(plan, plans.O2NC) and plan.oracle == "scalar"


def of_steps(plan: Any) -> float | np.ndarray:
    """Standard deviation of the noise on a released number: of all steps, or each.

    Of slopes that a gradient is made of, that of the gradient's coordinates. Where bound
    and noise follow how far a step moved, that of the longest move.
    """
    if not isinstance(plan, CorrelatedPlan):
        return plan.noise_std
    of_phases = [np.full(p.num_steps, plan.step_std(p.name)) for p in plan.phases]
    of_period = np.concatenate(of_phases) * plan.correlation.increment_norms()
    if _is_scalar(plan):
        released: Any = plan
        of_period = of_period / math.sqrt(released.num_directions)
    return np.resize(of_period, plan.num_steps)  # Repeats it.


def follows_movement(plan: Any) -> bool:
    """Whether the noise of a step is at most that of :func:`of_steps`."""
    return isinstance(plan, plans.O2NC) and plan.scale_with_movement


def released(plan: Any) -> str:
    """What the releases of a step are, in words."""
    if _is_scalar(plan):
        return "gradient, made of slopes"
    if not isinstance(plan, CorrelatedPlan) or plan.noise_period == 1:
        return "gradient"
    return "gradient or its change"
