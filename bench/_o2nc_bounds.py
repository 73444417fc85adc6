"""Records that the explicit proven bounds need: no runs."""

import math
from collections.abc import Callable
from typing import Any

from bench import _harness
from bench import _o2nc_methods as methods
from bench import _o2nc_runs as runs
from jaxdp.kernels import prefix_noise
from jaxdp.o2nc.theory import bounds, design, theorems
from jaxdp.o2nc.theory.settings import Settings, law

DIMS = (20, 100)
#: Of the norm, over L: above 1 a bound says nothing.
TARGETS = (0.5, 0.25)
Bound = Callable[[int, int], float]


def _known(n: int, dim: int) -> dict[str, Any]:
    known = methods.constants(dim)
    return {"num_examples": n, "radius": known.pop("smoothing_radius"), **known}


def certified(n: int, dim: int) -> float:
    """Of the single-pass zeroth-order oracle."""
    return design.certified(**_known(n, dim)).bound


def exact(n: int, dim: int) -> float:
    """Of Theorem 4.9 with exact noise and this library's constants."""
    return theorems.settings("4.9", **_known(n, dim)).bound


def printed(n: int, dim: int) -> float:
    """Of Theorem 4.9 with its printed noise, all else as in :func:`exact`."""
    found = theorems.settings("4.9", **_known(n, dim))
    return with_printed_noise(found, runs.problem(dim).initial_gap)


def with_printed_noise(found: Settings, initial_gap: float) -> float:
    """The bound of settings at the noise that their theorem prints."""
    assert found.paper_noise_std is not None
    kernel = prefix_noise.make(found.prefix_noise, found.period)
    std = found.paper_noise_std * float(max(kernel.prefix_norms()))
    estimator = theorems.Estimator(
        found.num_directions, found.direction, found.difference, found.share_directions
    )
    promise = bounds.promise(
        dim=found.dim,
        lipschitz=runs.problem(found.dim).lipschitz,
        initial_gap=initial_gap,
        radius=found.smoothing_radius,
        period=found.period,
        restart_batch_size=found.restart_batch_size,
        batch_size=found.batch_size,
        window=found.window,
        num_windows=found.num_steps // found.window,
        max_step=found.max_step,
        reset=found.reset,
        noise_variance=found.dim * std**2,
        **law(estimator),
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
