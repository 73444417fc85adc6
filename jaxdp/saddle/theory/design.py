"""Certified designs: numbers of least proven bound, with exactly charged step sizes.

The bounds of :mod:`jaxdp.saddle.theory.bounds` are computed for many numbers, from public
constants alone, each at the step size that is best for the bound or the largest that the
budget admits, whichever is smaller, and the least one is taken. The bounds are pessimistic:
5 to 20 times fewer steps than they ask for, at all of the admitted step size
(``steps.certified``, a plan's ``calibrate``), were better where it was tried, for which
there is ``num_steps``.

A function's ``**problem`` are the fields of the class that it names; one that is missing,
unknown or out of range is named in a TypeError or ValueError.
"""

import math
from typing import Any

import numpy as np

from jaxdp.core import validate
from jaxdp.mechanism.design import Design
from jaxdp.saddle.theory import bounds, constants, levels, step_sizes
from jaxdp.saddle.theory.constants import (
    Constants,
    GameConstants,
    QueryConstants,
    SimplexConstants,
)

#: Of the numbers on the grids, from the first search to the last.
_RATIOS = (1.3, 1.05, 1.01)


def saddle(*, num_steps: int | None = None, **problem: Any) -> Design:
    """Searches for T, K and the step size of Algorithm 1 of least proven bound.

    Args:
      num_steps: T in [1, n]; None searches.
      **problem: :class:`~jaxdp.saddle.theory.constants.GameConstants`. For an L2 of 0,
        quadratics, one vertex is enough.
    """
    p = GameConstants(**problem)
    n = p.num_examples
    counts = _step_counts(n, num_steps)[:, None]

    def evaluate(draws: np.ndarray) -> tuple[float, int, int]:
        # In exact arithmetic the charge at step size 1 is what divides rho.
        charge = (counts - 1) * (draws + 1) * (p.sum_sensitivity / (n // counts)) ** 2
        with np.errstate(divide="ignore"):
            private = np.sqrt(p.rho / charge)
        best = bounds.saddle_step_size(counts, p.log_dim, p.lipschitz)
        value: Any = bounds.saddle(
            num_steps=counts,
            num_draws=draws,
            step_size=np.minimum(best, private),
            **p.loss,
        ).bound
        i, j = np.unravel_index(np.argmin(value), value.shape)
        return float(value[i, j]), int(counts[i, 0]), int(draws[j])

    if p.second_order_smoothness == 0:
        _, t, k = evaluate(np.ones(1, np.int64))
    else:
        _, t, k = evaluate(_around(1, n, _RATIOS[0], 60))
        for ratio in _RATIOS[1:]:
            _, t, k = evaluate(_around(k, n, ratio, 8))
    useful = float(bounds.saddle_step_size(t, p.log_dim, p.lipschitz))
    algorithm = bounds.saddle, step_sizes.saddle
    return constants.single_pass(
        "certified", p, *algorithm, useful, num_steps=t, num_draws=k
    )


def _step_counts(num_examples: int, num_steps: int | None) -> np.ndarray:
    """Returns the numbers of steps that can be best: the largest of each batch size."""
    if num_steps is not None:
        validate.integer(at_most=num_examples, num_steps=num_steps)
        return np.array([num_steps])
    root = math.isqrt(num_examples)
    small = np.arange(1, root + 1)
    return np.unique(np.concatenate([small, num_examples // small]))


def _around(x: int, at_most: int, ratio: float, reach: int) -> np.ndarray:
    """Returns integers in [1, at_most] at powers of a ratio from x, and x's neighbours."""
    powers = np.rint(x * ratio ** np.arange(-reach, reach + 1.0))
    powers = np.append(powers, [x - 1, x + 1])
    return np.unique(np.clip(powers, 1, at_most)).astype(np.int64)


def saddle_bias_reduced(
    *,
    vertex_budget: int | None = None,
    max_level: int | None = None,
    level_seed: int = 0,
    **problem: Any,
) -> Design:
    """Searches for U, M and the step size of Algorithm 3, with equalized batches.

    U and M are best at the expected charge for a bound whose second moment of gradients
    has the proven order and no constants: those that can be proven are in the thousands,
    and ask for steps so short that nothing moves. The step size is then admitted by the
    levels that the seed has. The promise is the proven bound, and says nothing at most
    sizes.

    Args:
      vertex_budget: U in [4, n]; None searches.
      max_level: M with 2^M <= U / 2; None searches.
      level_seed: public seed of the levels.
      **problem: as for :func:`saddle`, with an L2.
    """
    p = GameConstants(**problem)
    num_examples = p.num_examples
    p.need_second_order("bias reduction")
    validate.integer(at_least=4, num_examples=num_examples)
    if vertex_budget is None:
        reach = math.ceil(math.log(num_examples, 1.05))
        budgets = _around(4, num_examples, 1.05, reach)
        budgets = budgets[budgets >= 4]
    else:
        validate.integer(at_least=4, at_most=num_examples, vertex_budget=vertex_budget)
        budgets = np.array([vertex_budget])
    highest = int(budgets[-1]).bit_length() - 2
    if max_level is not None:
        validate.integer(at_least=0, at_most=highest, max_level=max_level)
    tops = range(highest + 1) if max_level is None else [max_level]
    found = [_best_budget(p, budgets, m) for m in tops]
    _, budget, top = min(x for x in found if x is not None)
    low, _ = bounds.expected_steps(budget, top)
    moment = _usual_moment(p, top)
    best = bounds.saddle_bias_reduced_step_size(low, moment, p.log_dim, p.lipschitz)
    return constants.bias_reduced(
        "certified",
        p,
        vertex_budget=budget,
        max_level=top,
        level_seed=level_seed,
        useful_step=float(best),
    )


def _usual_moment(p: Constants, max_level: int) -> float:
    """Returns the proven second moment of gradients without its constants."""
    l0, l1, l2 = p.lipschitz, p.smoothness, p.second_order_smoothness or 0.0
    return l0**2 + l2**2 + (max_level + 1) * p.log_dim * l1**2


def _best_budget(
    p: Constants, budgets: np.ndarray, max_level: int
) -> tuple[float, int, int] | None:
    """Returns the least bound, U and M, at the charge of expected draws and weights.

    Tries budgets for which no levels leave a step without a record; None without any.
    """
    n, law, a = p.num_examples, levels.pmf(max_level), levels.amplification(max_level)
    most = budgets * np.max(a / 2.0 ** np.arange(max_level + 1))
    budgets = budgets[(budgets >= 2 ** (max_level + 1)) & (most <= n * a[0])]
    if not budgets.size:
        return None
    low, high = bounds.expected_steps(budgets, max_level)
    sizes = np.floor(n * a / (high * float(law @ a))[:, None])  # (budgets, levels)
    charge = high * (2 * levels.mean_size(max_level) + 1)
    private = np.sqrt(p.rho / charge) / (p.sum_sensitivity * np.max(a / sizes, axis=1))
    moment = _usual_moment(p, max_level)
    best = bounds.saddle_bias_reduced_step_size(low, moment, p.log_dim, p.lipschitz)
    value: Any = bounds.saddle_bias_reduced(
        vertex_budget=budgets,
        max_level=max_level,
        step_size=np.minimum(best, private),
        moment=moment,
        **p.loss,
    ).bound
    i = int(np.argmin(value))
    return float(value[i]), int(budgets[i]), max_level


def convex_simplex(*, num_steps: int | None = None, **problem: Any) -> Design:
    """Searches for T, K, q and the step size of Algorithm 4 of least proven bound.

    The step size is at most 1 / (4 L0 q), which the proof needs and privacy does not:
    ``steps.certified`` may be larger, and was better where it was tried.

    Args:
      num_steps: T in [1, n]; None searches.
      **problem: :class:`~jaxdp.saddle.theory.constants.SimplexConstants`.
    """
    p = SimplexConstants(**problem)
    num_examples = p.num_examples
    counts = _step_counts(num_examples, num_steps)
    reach = math.ceil(math.log(num_examples, _RATIOS[0])) + 1
    wide = _around(1, num_examples, _RATIOS[0], reach)
    # Few of the counts first; all of them near the best one.
    few = counts[np.unique(np.searchsorted(counts, wide).clip(0, len(counts) - 1))]
    best = _best_convex(p, few, wide, wide)
    for ratio in _RATIOS[1:]:
        _, t, k, q = best
        span = (counts >= t / ratio**8) & (counts <= t * ratio**8)
        near = [_around(x, num_examples, ratio, 8) for x in (k, q)]
        best = min(best, _best_convex(p, counts[span], *near))
    _, t, k, q = best
    numbers = {"num_steps": t, "num_draws": k, "refresh_every": q}
    useful = float(bounds.convex_step_size(**numbers, **p.loss))
    algorithm = bounds.convex, step_sizes.convex
    return constants.single_pass("certified", p, *algorithm, useful, **numbers)


def _best_convex(
    p: Constants, counts: np.ndarray, draws: np.ndarray, periods: np.ndarray
) -> tuple[float, int, int, int]:
    """Returns the combination of least bound: bound, T, K and q."""
    t, k, q = np.meshgrid(counts, draws, periods, indexing="ij", sparse=True)
    times = np.minimum(q, t)
    numbers = {"num_steps": t, "num_draws": k, "refresh_every": times}
    charge = k * (times + t // times - 1) * (t > 1) / 2
    with np.errstate(divide="ignore"):
        private = np.sqrt(p.rho / charge) * (p.num_examples // t) / p.sum_sensitivity
    step = np.minimum(bounds.convex_step_size(**numbers, **p.loss), private)
    value: Any = bounds.convex(**numbers, step_size=step, **p.loss).bound
    i, j, m = np.unravel_index(np.argmin(value), value.shape)
    period = int(min(periods[m], counts[i]))
    return float(value[i, j, m]), int(counts[i]), int(draws[j]), period


def synthetic_data(
    *, num_steps: int | None = None, last_draw: bool = True, **problem: Any
) -> Design:
    """Computes T and the step sizes of Algorithm 5.

    The bound's best T is about 11 n sqrt(rho log(domain)) / (k log(queries)), where one
    record moves a sum of answers by at most k; a third of it costs little accuracy and
    is taken.

    Args:
      num_steps: T; None takes a third of the best.
      last_draw: whether the last step's query is drawn, which no iterate needs.
      **problem: :class:`~jaxdp.saddle.theory.constants.QueryConstants`; ``query_range`` is
        1 here if it is not given, for marginals.
    """
    problem.setdefault("query_range", 1.0)
    p = QueryConstants(**problem)
    log_z, log_q = p.log_sizes
    if num_steps is None:
        each = step_sizes.query_sensitivity(p.query_range, p.relation)
        root = math.sqrt(120 * p.rho * log_z)
        num_steps = max(1, round(p.num_examples * root / (each * log_q) / 3))
    validate.integer(num_steps=num_steps)
    # Best for answers in [-1, 1]; narrower ones have gradients as much smaller.
    wider = 2 / p.query_range
    rate_x = float(bounds.synthetic_step_size_x(num_steps, p.domain_size))
    return constants.synthetic(
        "certified",
        p,
        num_steps=num_steps,
        last_draw=last_draw,
        step_size_x=wider * rate_x,
        useful=wider * math.sqrt(log_q / (2 * num_steps)),
    )
