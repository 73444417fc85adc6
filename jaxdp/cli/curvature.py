"""Recipe of ``jaxdp train --algorithm sosp``, and the plan that it makes."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

from jaxdp import plans
from jaxdp.core.types import Relation
from jaxdp.sosp.hessian import Hessian
from jaxdp.sosp.theory import design

#: An escape begins where the estimated gradient is no longer than so many of its errors.
#: The error's noise is about a quarter of its bound: what is left goes into alpha.
_TRIGGER_FACTOR = 0.4
#: Differences between two refreshes, at most: the way down takes about half as many.
_MAX_DIFFERENCES = 24
#: Most steps: an escape is one step, or some hundreds.
_MAX_STEPS = {"released": 100, "on_demand": 1000, "tracked": 1000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondOrder:
    """Recipe of a ``sosp`` run: settings of a ``plans.SOSP.certified``.

    ``accuracy`` None is the least for which the records are expected to be enough;
    ``num_steps`` None is more than those allow. The rest follows from public constants of
    the problem, except for the threshold of escapes and the number of differences between
    refreshes, which were chosen after a few runs on the training records of the digits.
    """

    average: ClassVar[float] = 0.0  # The plan returns a point of its own.

    num_steps: int | None = None
    rank: int = 1
    accuracy: float | None = None
    failure_probability: float = 0.1
    hessian: Hessian = "released"
    prefix_noise: str = "sqrt_toeplitz"


class Smooth(NamedTuple):
    """Public constants of a problem: size, radius, bounds on derivatives, deviation.

    Attributes:
      dim: parameters.
      radius: of the ball around the start that the constants and the minimum are in.
      lipschitz: of every record's loss.
      smoothness: of every record's gradient.
      hessian_lipschitz: of every record's Hessian.
      hessian_frobenius: bound on the Frobenius norm of every record's Hessian.
      deviation: typical deviation of one record's Hessian along a direction.
    """

    dim: int
    radius: float
    lipschitz: float
    smoothness: float
    hessian_lipschitz: float
    hessian_frobenius: float
    deviation: float


def make_plan(
    recipe: SecondOrder,
    problem: Smooth,
    *,
    num_examples: int,
    relation: Relation = "replace_one",
    epsilon: float,
    delta: float,
) -> plans.SOSP:
    """Returns the calibrated plan for a problem that starts in the middle of its ball.

    Raises:
      ValueError, TypeError: a number out of range, named; or too few records for it.
    """
    released = recipe.hessian == "released"
    numbers: dict[str, Any] = {
        "num_examples": num_examples,
        "dim": problem.dim,
        "relation": relation,
        "lipschitz": problem.lipschitz,
        "smoothness": problem.smoothness,
        "hessian_lipschitz": problem.hessian_lipschitz,
        "failure_probability": recipe.failure_probability,
        "num_steps": recipe.num_steps or _MAX_STEPS[recipe.hessian],
        "max_differences": _MAX_DIFFERENCES,
        "prefix_noise": recipe.prefix_noise,
        "trigger_factor": _TRIGGER_FACTOR,
        # The whole way is one epoch.
        "drift_limit": problem.smoothness * problem.radius,
        "hessian": recipe.hessian,
        "hessian_clip_norm": problem.hessian_frobenius if released else None,
        # The gradient is linear in the Hessian's part that depends on the record.
        "gradient_std": problem.deviation * problem.radius,
        "difference_std": problem.deviation,
        "hessian_std": problem.deviation,
    }
    budget = {"epsilon": epsilon, "delta": delta}
    accuracy = recipe.accuracy or _least_accuracy(numbers | budget)
    return plans.SOSP.certified(**numbers, **budget, accuracy=accuracy)


def _least_accuracy(numbers: dict[str, Any]) -> float:
    """Finds the least accuracy at which a run is expected to end within the records.

    It reads one refresh, differences over the whole way, and the Hessians of the start and
    of the end. At the largest accuracy an escape begins anywhere, and alpha says nothing.
    """

    def fits(accuracy: float) -> bool:
        try:
            found = design.certified(**numbers, accuracy=accuracy)
        except ValueError:  # Not even a refresh and a Hessian.
            return False
        needed = found.promise.expected_records
        assert needed is not None  # It is of two of each, a tracked Hessian apart.
        needed /= 2
        if found.hessian != "tracked":
            needed += found.hessian_batch_size
        return needed <= found.num_examples

    low, high = 1e-6 * numbers["lipschitz"], numbers["lipschitz"] / _TRIGGER_FACTOR
    if not fits(high):
        raise ValueError(
            f"epsilon must be larger, or there must be more than num_examples = "
            f"{numbers['num_examples']} records, got {numbers['epsilon']}: at any accuracy "
            "a run would take more"
        )
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
