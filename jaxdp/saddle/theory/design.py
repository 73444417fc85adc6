"""Certified designs: settings of least proven bound, with exactly charged step sizes.

The bounds of :mod:`jaxdp.saddle.theory.bounds` are computed for many settings, from public
constants alone, each at the step size that is best for the bound or the largest that the
budget admits, whichever is smaller, and the least one is taken. The bounds are pessimistic:
fewer steps than they ask for, at the admitted step size itself (``steps.certified``), are
often better. ``num_steps`` is there to try.
"""

import math
from typing import Any

import numpy as np

from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.saddle.theory import bounds, charges, levels, settings, steps
from jaxdp.saddle.theory.settings import (
    BiasReducedSettings,
    ConvexSettings,
    Problem,
    SaddleSettings,
    SyntheticSettings,
    least,
)

#: Of the numbers on the grids, from the first search to the last.
_RATIOS = (1.3, 1.05, 1.01)


def saddle(
    *,
    num_examples: int,
    dim_x: int,
    dim_y: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float | None = None,
    num_steps: int | None = None,
) -> SaddleSettings:
    """Searches for T, K and the step size of Algorithm 1 of least proven bound.

    Args:
      num_examples: n, read in a single pass.
      dim_x: vertices of the player that minimises, >= 2.
      dim_y: vertices of the player that maximises, >= 2.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      lipschitz: L0; the clip of both players.
      smoothness: L1.
      second_order_smoothness: L2; 0 for quadratics, where one vertex is enough; None
        where nothing is known.
      num_steps: T in [1, n]; None searches.

    Returns:
      The settings, of the name ``"certified"``.

    Raises:
      ValueError: an argument out of range. TypeError: not a number.
    """
    p = Problem(
        num_examples=num_examples,
        dims={"dim_x": dim_x, "dim_y": dim_y},
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        lipschitz=lipschitz,
        smoothness=smoothness,
        second_order_smoothness=second_order_smoothness,
    )
    counts = _step_counts(num_examples, num_steps)[:, None]

    def evaluate(draws: np.ndarray) -> tuple[float, int, int]:
        # In exact arithmetic the charge at step size 1 is what divides rho.
        moved = p.moved / (num_examples // counts)
        charge = (counts - 1) * (draws + 1) * moved**2
        with np.errstate(divide="ignore"):
            private = np.sqrt(p.rho / charge)
        best = bounds.saddle_step_size(counts, p.log_dim, lipschitz)
        value: Any = bounds.saddle(
            num_steps=counts,
            num_draws=draws,
            step_size=np.minimum(best, private),
            **p.constants,
        ).bound
        i, j = np.unravel_index(np.argmin(value), value.shape)
        return float(value[i, j]), int(counts[i, 0]), int(draws[j])

    if second_order_smoothness == 0:
        _, steps_, draws_ = evaluate(np.ones(1, np.int64))
    else:
        _, steps_, draws_ = evaluate(_around(1, num_examples, _RATIOS[0], 60))
        for ratio in _RATIOS[1:]:
            _, steps_, draws_ = evaluate(_around(draws_, num_examples, ratio, 8))
    admitted = steps.saddle(
        num_steps=steps_,
        num_draws=draws_,
        batch_size=num_examples // steps_,
        **p.budget,
    )
    best = float(bounds.saddle_step_size(steps_, p.log_dim, lipschitz))
    step = least(best, admitted.certified)
    return settings.settled_saddle("certified", p, steps_, draws_, step, admitted)


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
    num_examples: int,
    dim_x: int,
    dim_y: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float,
    vertex_budget: int | None = None,
    max_level: int | None = None,
    level_seed: int = 0,
) -> BiasReducedSettings:
    """Searches for U, M and the step size of Algorithm 3, with equalized batches.

    U and M are best at the expected charge for a bound whose second moment of gradients
    has the proven order and no constants: those that can be proven are in the thousands,
    and ask for steps so short that nothing moves. The step size is then admitted by the
    levels that the seed has. The promise is the proven bound, and says nothing at most
    sizes.

    Args:
      num_examples: n, read in a single pass.
      dim_x: vertices of the player that minimises, >= 2.
      dim_y: vertices of the player that maximises, >= 2.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      lipschitz: L0; the clip of each of a gradient's parts.
      smoothness: L1.
      second_order_smoothness: L2.
      vertex_budget: U in [4, n]; None searches.
      max_level: M with 2^M <= U / 2; None searches.
      level_seed: public seed of the levels.

    Raises:
      ValueError: an argument out of range. TypeError: not a number.
    """
    p = Problem(
        num_examples=num_examples,
        dims={"dim_x": dim_x, "dim_y": dim_y},
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        lipschitz=lipschitz,
        smoothness=smoothness,
        second_order_smoothness=second_order_smoothness,
    )
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
    return settings.settled_bias_reduced(
        "certified",
        p,
        vertex_budget=budget,
        max_level=top,
        level_seed=level_seed,
        useful_step=float(best),
    )


def _usual_moment(p: Problem, max_level: int) -> float:
    """Returns the proven second moment of gradients without its constants."""
    l0, l1, l2 = p.lipschitz, p.smoothness, p.second_order_smoothness or 0.0
    return l0**2 + l2**2 + (max_level + 1) * p.log_dim * l1**2


def _best_budget(
    p: Problem, budgets: np.ndarray, max_level: int
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
    private = np.sqrt(p.rho / charge) / (p.moved * np.max(a / sizes, axis=1))
    moment = _usual_moment(p, max_level)
    best = bounds.saddle_bias_reduced_step_size(low, moment, p.log_dim, p.lipschitz)
    value: Any = bounds.saddle_bias_reduced(
        vertex_budget=budgets,
        max_level=max_level,
        step_size=np.minimum(best, private),
        moment=moment,
        **p.constants,
    ).bound
    i = int(np.argmin(value))
    return float(value[i]), int(budgets[i]), max_level


def convex_simplex(
    *,
    num_examples: int,
    dim: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float | None = None,
    num_steps: int | None = None,
) -> ConvexSettings:
    """Searches for T, K, q and the step size of Algorithm 4 of least proven bound.

    The step size is at most 1 / (4 L0 q), which the proof needs and privacy does not:
    ``steps.certified`` may be larger, and was better where it was tried.

    Args:
      num_examples: n, read in a single pass.
      dim: vertices, >= 2.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      lipschitz: L0; the clip.
      smoothness: L1.
      second_order_smoothness: L2; 0 for quadratics; None where nothing is known.
      num_steps: T in [1, n]; None searches.

    Raises:
      ValueError: an argument out of range. TypeError: not a number.
    """
    p = Problem(
        num_examples=num_examples,
        dims={"dim": dim},
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        lipschitz=lipschitz,
        smoothness=smoothness,
        second_order_smoothness=second_order_smoothness,
    )
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
    admitted = steps.convex(**numbers, batch_size=num_examples // t, **p.budget)
    useful = float(bounds.convex_step_size(**numbers, **p.constants))
    step = least(useful, admitted.certified)
    return settings.settled_convex("certified", p, t, k, q, step, admitted)


def _best_convex(
    p: Problem, counts: np.ndarray, draws: np.ndarray, periods: np.ndarray
) -> tuple[float, int, int, int]:
    """Returns the combination of least bound: bound, T, K and q."""
    t, k, q = np.meshgrid(counts, draws, periods, indexing="ij", sparse=True)
    times = np.minimum(q, t)
    numbers = {"num_steps": t, "num_draws": k, "refresh_every": times}
    charge = k * (times + t // times - 1) * (t > 1) / 2
    with np.errstate(divide="ignore"):
        private = np.sqrt(p.rho / charge) * (p.num_examples // t) / p.moved
    step = np.minimum(bounds.convex_step_size(**numbers, **p.constants), private)
    value: Any = bounds.convex(**numbers, step_size=step, **p.constants).bound
    i, j, m = np.unravel_index(np.argmin(value), value.shape)
    return (
        float(value[i, j, m]),
        int(counts[i]),
        int(draws[j]),
        int(min(periods[m], counts[i])),
    )


def synthetic_data(
    *,
    num_examples: int,
    domain_size: int,
    num_queries: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    query_range: float = 2.0,
    last_draw: bool = True,
    num_steps: int | None = None,
) -> SyntheticSettings:
    """Computes T and the step sizes of Algorithm 5.

    The bound's best T is about 11 n sqrt(rho log(domain)) / (k log(queries)), where one
    record moves a sum of answers by at most k; a third of it costs little accuracy and
    is taken.

    Args:
      num_examples: n, all read at every step.
      domain_size: cells, >= 2.
      num_queries: closed under negation, >= 2.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      query_range: largest less smallest answer of one query, in (0, 2].
      last_draw: whether the last step's query is drawn, which no iterate needs.
      num_steps: T; None takes a third of the best.

    Raises:
      ValueError: an argument out of range. TypeError: not a number.
    """
    settings.check_synthetic(
        num_examples, domain_size, num_queries, query_range, delta, relation
    )
    validate.positive(epsilon=epsilon)
    log_z, log_q = math.log(domain_size), math.log(num_queries)
    if num_steps is None:
        moved = steps.query_sensitivity(query_range, relation)
        root = math.sqrt(120 * charges.rho_budget(epsilon, delta) * log_z)
        best = num_examples * root / (moved * log_q)
        num_steps = max(1, round(best / 3))
    validate.integer(num_steps=num_steps)
    admitted = steps.synthetic(
        num_examples=num_examples,
        num_steps=num_steps,
        query_range=query_range,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        last_draw=last_draw,
    )
    # Best for answers in [-1, 1]; narrower ones have gradients as much smaller.
    wider = 2 / query_range
    useful = wider * math.sqrt(log_q / (2 * num_steps))
    return settings.settled_synthetic(
        "certified",
        num_examples=num_examples,
        domain_size=domain_size,
        num_queries=num_queries,
        query_range=query_range,
        relation=relation,
        num_steps=num_steps,
        step_size_x=wider * float(bounds.synthetic_step_size_x(num_steps, domain_size)),
        step_size_y=least(useful, admitted.certified),
        admitted=admitted,
    )
