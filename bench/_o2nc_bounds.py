"""Records that the explicit proven bounds need: no runs."""

import math
from collections.abc import Callable
from typing import Any

from bench import _harness
from bench import _o2nc_methods as methods
from bench import _o2nc_runs as runs
from jaxdp.kernels import prefix_noise
from jaxdp.o2nc.theory import bounds, design, estimators, theorems

DIMS = (20, 100)
#: Of the norm, over L: above 1 a bound says nothing.
TARGETS = (0.5, 0.25)
Bound = Callable[[int, int], float]


def _known(n: int, dim: int) -> dict[str, Any]:
    return {"num_examples": n, **methods.constants(dim)}


def certified(n: int, dim: int) -> float:
    """Of the single-pass zeroth-order oracle."""
    return design.certified(**_known(n, dim)).promise.bound


def exact(n: int, dim: int) -> float:
    """Of Theorem 4.9 with exact noise and this library's constants."""
    return theorems.prescribed("4.9", **_known(n, dim)).promise.bound


def printed(n: int, dim: int) -> float:
    """Of Theorem 4.9 with its printed noise, all else as in :func:`exact`."""
    found = theorems.prescribed("4.9", **_known(n, dim))
    assert found.paper_noise_std is not None
    kernel = prefix_noise.make(found.prefix_noise, found.period)
    std = found.paper_noise_std * float(max(kernel.prefix_norms()))
    fields = {x: found[x] for x in bounds.Schedule._fields if x in found}
    promise = bounds.promise(
        bounds.Constants(**_known(n, dim)),
        estimators.Estimator.of(found),
        bounds.Schedule(num_windows=found.num_steps // found.window, **fields),
        noise_variance=found.dim * std**2,
    )
    return float(promise.bound)


def needed(bound: Bound, dim: int, norm: float, at_most: float = 1e11) -> float:
    """The least n of a bound, to 2%; infinite beyond ``at_most``."""
    high = 1e3
    while bound(round(high), dim) > norm:
        high *= 4
        if high > at_most:
            return math.inf
    low = high / 4
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if bound(round(middle), dim) <= norm else (middle, high)
        )
    return high


def rows(dims: tuple[int, ...] = DIMS) -> list[_harness.Row]:
    """What certified settings need, and what Theorem 4.9 does."""
    found = []
    for dim in dims:
        for share in TARGETS:
            norm = share * runs.problem(dim).lipschitz
            case = f"proven bound of {norm:g}, d = {dim}"
            ours = needed(certified, dim, norm)
            found.append(_harness.Row(case, "records", ours, methods.OURS))
            for name, bound in ((methods.EXACT, exact), (methods.PRINTED, printed)):
                theirs = needed(bound, dim, norm)
                found.append(
                    _harness.Row(
                        case, "records", theirs, name, methods.OURS, theirs / ours
                    )
                )
    return found
