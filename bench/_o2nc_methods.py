"""The plans of the scaling study: as they are prescribed, and in shapes to tune."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from bench import _o2nc_runs as runs
from jaxdp import plans, sampling
from jaxdp.o2nc.theory import bounds

EPSILON, DELTA = 8.0, 1e-5
#: So many restarts for every record is the most that a run of several passes may take.
PASSES = 250

OURS = "zeroth-order, certified"
FIRST = "first-order, certified"
SEVERAL = "multi-pass zeroth-order, certified"
SEVERAL_FIRST = "multi-pass first-order, certified"
SCALAR = "scalar release, certified"
NAIVE = "naive vector release (E)"
PRINTED = "Zhang et al. (4.9), printed noise"
EXACT = "Zhang et al. (4.9), exact noise"
KORNOWSKI = "Kornowski et al. (3.1)"
SINGLE_PASS = (OURS, FIRST, SCALAR, NAIVE, PRINTED, EXACT, KORNOWSKI)
MULTI_PASS = (SEVERAL, SEVERAL_FIRST)
METHODS = (*SINGLE_PASS, *MULTI_PASS)
CERTIFIED = (OURS, FIRST, SCALAR, SEVERAL, SEVERAL_FIRST)

#: Points of the ball that a first-order difference is the mean over.
POINTS = 16
KERNELS = ("tree", "honaker", "sqrt_toeplitz", "blt_2", "blt_3", "independent")


def constants(dim: int) -> dict[str, Any]:
    """What settings are told of the loss and of the budget."""
    of = runs.problem(dim)
    return {
        "dim": dim,
        "epsilon": EPSILON,
        "delta": DELTA,
        "relation": "replace_one",
        "lipschitz": of.lipschitz,
        "initial_gap": of.initial_gap,
        "smoothing_radius": runs.RADIUS,
    }


@functools.cache
def prescribed(method: str, n: int, dim: int) -> plans.O2NC:
    """The plan of a theorem, or of least proven bound."""
    known = {"num_examples": n, **constants(dim)}
    if method == PRINTED:
        exact = prescribed(EXACT, n, dim)
        assert exact.theorem is not None and exact.theorem.paper_noise_std is not None
        noise = exact.theorem.paper_noise_std / exact.sensitivity
        return with_rate(exact.with_noise(noise_multiplier=noise), dim)
    if method == EXACT:
        return plans.O2NC.from_theorem("4.9", **known)
    if method == KORNOWSKI:
        return plans.O2NC.from_theorem("3.1", **known)
    if method == NAIVE:
        return plans.O2NC.from_theorem("E", **known)
    choices: dict[str, Any] = {}
    if method in (FIRST, SEVERAL_FIRST):
        choices = {"oracle": "first_order", "num_directions": POINTS}
    if method == SCALAR:
        choices = {"oracle": "scalar"}
    if method == SEVERAL:  # One draw of directions a step, for all records.
        choices = {"share_directions": True}
    if method in MULTI_PASS:
        each = 1 if method == SEVERAL_FIRST else 2 * min(dim, 64)
        choices |= {"multi_pass": True, "max_evaluations": float(PASSES * n * each)}
    return plans.O2NC.certified(**known, **choices)


# --- in other shapes ---------------------------------------------------------------


class Shape(NamedTuple):
    """What is tuned; relative to what is prescribed at the same n and d."""

    stretch: float = 1.0  # the length of a window, whose queries reach as far
    period: int | None = None  # from restart to restart; None for what is prescribed
    batch: float = 1.0  # of a plan that restarts at every step
    fraction: float = 1.0  # of the practical clip of differences
    rate: float = 1.0  # of the step size D / (G sqrt(M))

    def __str__(self) -> str:
        given = {k: v for k, v in self._asdict().items() if v not in (None, 1.0)}
        return ", ".join(f"{k} {v:g}" for k, v in given.items()) or "as prescribed"


RATES = (0.3, 1.0, 3.0)
STRETCHES = (0.3, 1.0)
LONG = 16


def shapes(method: str) -> list[Shape]:
    """As many for every method, each to be run at all of :data:`RATES`."""
    if method in (SCALAR, NAIVE):  # They have no differences.
        others: tuple[dict[str, Any], ...] = ({"batch": 1.0}, {"batch": 0.25})
    elif method in (PRINTED, EXACT, KORNOWSKI):
        others = ({"fraction": 0.3}, {"fraction": 0.1})
    else:
        others = ({"period": 1}, {"period": LONG, "fraction": 0.1})
    return [Shape(stretch=s, **other) for s in STRETCHES for other in others]


def tuned(
    method: str, n: int, dim: int, shape: Shape, prefix_noise: str | None = None
) -> plans.O2NC:
    """A method in some shape, with practical clips and noise for the whole budget.

    Zhang et al.'s printed noise stays the same multiple of what their plan needs.
    """
    start = prescribed(method, n, dim)
    if prefix_noise is not None:
        start = dataclasses.replace(start, prefix_noise=prefix_noise)
    plan = reshaped(start, method, dim, shape)
    if method == PRINTED:
        assert start.noise_multiplier is not None
        plan = plan.with_noise(noise_multiplier=start.noise_multiplier)
    else:
        plan = plan.calibrate(epsilon=EPSILON, delta=DELTA)
    return with_rate(plan, dim, shape.rate)


def with_lipschitz(plan: plans.O2NC, factor: float) -> plans.O2NC:
    """The plan with the clips of another Lipschitz constant, and its own step size."""
    return dataclasses.replace(
        plan,
        restart_l2_clip_norm=factor * plan.restart_l2_clip_norm,
        l2_clip_norm=factor * plan.l2_clip_norm,
    )


def with_rate(plan: plans.O2NC, dim: int, factor: float = 1.0) -> plans.O2NC:
    """The plan with a multiple of D / (G sqrt(M)), G the size of a noisy gradient."""
    noise = math.sqrt(dim) * float(plan.noise_std)
    size = math.hypot(runs.problem(dim).lipschitz, noise)
    rate = factor * plan.max_step / (size * math.sqrt(plan.window))
    return dataclasses.replace(plan, learning_rate=rate)


def reshaped(plan: plans.O2NC, method: str, dim: int, shape: Shape) -> plans.O2NC:
    """The plan without noise in another shape, with practical clips.

    Queries reach as far from their window's mean as they may. Where a plan of ours has
    differences, its batches are such that a record of either kind moves as much; Zhang et
    al. and Kornowski et al. keep their batches, and the first their period.
    """
    n, period = plan.num_examples, shape.period or plan.sampling.period
    window = max(2, round(plan.window * shape.stretch))
    if method in (PRINTED, EXACT):
        period = window = min(window, n // 2)
    reach = float(bounds.window_radius(window, plan.reset))
    changes: dict[str, Any] = {
        "noise_multiplier": None,
        "learning_rate": None,
        "window": window,
        "max_step": plan.smoothing_radius / reach,
    }
    if plan.oracle == "first_order":
        changes["difference"] = "common"

    def with_batches(first: int, other: int) -> plans.O2NC:
        steps = int(bounds.num_steps(n, period, first, other))
        sampler = sampling.SinglePassRestarts(
            period=period, restart_batch_size=first, batch_size=other
        )
        return _with_clips(
            plan,
            dim,
            shape,
            sampling=sampler,
            num_steps=_whole(steps, window),
            **changes,
        )

    if isinstance(plan.sampling, sampling.MultiPassRestarts):
        steps = max(window, _whole(plan.num_steps, window))
        sampler = dataclasses.replace(plan.sampling, period=min(period, steps))
        return _with_clips(
            plan, dim, shape, sampling=sampler, num_steps=steps, **changes
        )
    if method in (PRINTED, EXACT, KORNOWSKI):
        return with_batches(period + (method != KORNOWSKI), 1)
    # Records of a step, on average, as prescribed.
    size = n / plan.num_steps
    if period == 1:
        return with_batches(max(1, round(size * shape.batch)), 1)
    equal = with_batches(max(1, int(size)), max(1, int(size)))
    columns = equal.correlation.column_norms()
    ratio = equal.restart_l2_clip_norm * float(columns[0])
    ratio /= equal.l2_clip_norm * float(max(columns[1:]))
    other = max(1, round(size * period / (ratio + period - 1)))
    return with_batches(max(1, round(size * period) - (period - 1) * other), other)


def _whole(steps: int, window: int) -> int:
    """So many steps as fill windows."""
    return steps // window * window


def _with_clips(plan: plans.O2NC, dim: int, shape: Shape, **changes: Any) -> plans.O2NC:
    moved = dataclasses.replace(plan, **changes)
    lipschitz = runs.problem(dim).lipschitz
    return moved.with_practical_clips(
        dim=dim, lipschitz=lipschitz, fraction=shape.fraction
    )


# --- what a run takes ----------------------------------------------------------------


class Calls(NamedTuple):
    """Of a whole run: values of one record's loss, and gradients of it."""

    values: float
    gradients: float


def calls(plan: plans.O2NC) -> Calls:
    """What a run asks the records for, in expectation over its samples."""
    m = plan.num_directions
    restarts = -(-plan.num_steps // plan.sampling.period)
    counts = {"restart": restarts, "difference": plan.num_steps - restarts}
    first_order = plan.oracle == "first_order"
    if first_order:
        each = {"restart": 1, "difference": 2 * m}
    else:
        each = {
            "restart": 2 * m,
            "difference": (2 if plan.difference == "one_sided" else 4) * m,
        }
    # What the sums are divided by is the expected number of records.
    total = sum(
        counts[name] * size * each[name] for name, (_, size) in plan.clips.items()
    )
    return Calls(0.0, total) if first_order else Calls(total, 0.0)
