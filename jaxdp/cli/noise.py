"""Noise on the releases of a run: descriptions, and standard deviations for plots."""

import math
from typing import Any

import numpy as np

from jaxdp import plans
from jaxdp.mechanism.sums import CorrelatedSums, WeighedSums


def said(plan: Any) -> str:
    """Describes the size of the noise, and the quantities that it is added to."""
    if isinstance(plan, plans.O2NC) and plan.multi_pass:
        return _of_passes(plan)
    sums = f"each of {plan.num_steps} {_averaged(plan)}"
    noise = f"{plan.noise_multiplier:.4g} x sensitivity {plan.sensitivity:.4g}"
    return f"{noise if plan.noise_multiplier else 'none'} on {sums}"


def _averaged(plan: Any) -> str:
    """Describes the sums or means that the noise is added to."""
    if not _is_of_means(plan):
        return f"sums of {plan.normalizer:.5g} records"
    sizes = " or ".join(str(size) for _, size in plan.clips.values())
    means = f"means of {sizes} records{_slopes(plan)}"
    if plan.noise_period == 1:
        return means
    return f"{means}, correlated over {plan.noise_period} steps ({plan.prefix_noise})"


def _is_of_means(plan: Any) -> bool:
    return isinstance(getattr(plan, "sums", None), CorrelatedSums | WeighedSums)


def _slopes(plan: Any) -> str:
    if not _is_scalar(plan):
        return ""
    return f", of {plan.num_directions} slope{'s' * (plan.num_directions > 1)} each"


def _of_passes(plan: plans.O2NC) -> str:
    """Describes the noise of a multi-pass plan, separately for restarts and changes."""
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
    """Returns the standard deviation of a released number's noise, for all steps or each.

    For the scalar oracle it is that of the coordinates of the gradient made of slopes.
    Where bound and noise follow how far a step moved, it is that of the longest move.
    """
    if not _is_of_means(plan):
        return plan.noise_std
    of_phases = [np.full(p.num_steps, plan.step_std(p.name)) for p in plan.phases]
    of_period = np.concatenate(of_phases) * plan.correlation.increment_norms()
    if _is_scalar(plan):
        released: Any = plan
        of_period = of_period / math.sqrt(released.num_directions)
    return np.resize(of_period, plan.num_steps)  # Repeats it.


def follows_movement(plan: Any) -> bool:
    """Returns True if the noise of a step may be smaller than that of :func:`of_steps`."""
    return isinstance(plan, plans.O2NC) and plan.scale_with_movement


def released(plan: Any) -> str:
    """Describes the releases of a step."""
    if _is_scalar(plan):
        return "gradient, made of slopes"
    if not _is_of_means(plan) or plan.noise_period == 1:
        return "gradient"
    return "gradient or its change"
