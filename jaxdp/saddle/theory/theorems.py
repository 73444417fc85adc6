r"""Parameters that the paper's theorems prescribe, as plain numbers.

=========  ==================  =====================================================
theorem    plan                for
=========  ==================  =====================================================
``"4.1"``  Saddle              second-order-smooth; one vertex is enough for quadratics
``"4.2"``  Saddle              first-order-smooth
``"4.3"``  SaddleBiasReduced   second-order-smooth, with constant probability
``"5.1"``  ConvexSimplex       second-order-smooth, or first-order if L2 is None
``"G.1"``  SyntheticData       queries closed under negation, answers in [-1, 1]
=========  ==================  =====================================================

Hidden constants are read as 1, integers are rounded, and what rounds to 0 is 1, with a
warning. The step size is the least of the entries for utility and of what the paper's
privacy proposition proves (the theorems print that entry without its constant, which
would not be private). Corrections:

* 4.3: logarithms of levels are to base 2. Its data are halved by the proof.
* G.1: the number of steps lacks a factor sqrt(log(domain)) and the constant 12 is 18.
  ``printed=True`` gives the number as printed.

The promise is the explicit bound of :mod:`jaxdp.saddle.theory.bounds` at these numbers.

A function's ``**problem`` are the fields of the class that it names; one that is missing,
unknown or out of range is named in a TypeError or ValueError.

Reference:
  Gonzalez, Guzman, Paquette (arXiv 2403.02912), 2024.
"""

import math
import warnings
from typing import Any

from jaxdp.core import validate
from jaxdp.mechanism.design import Design
from jaxdp.saddle.theory import bounds, constants, levels, step_sizes
from jaxdp.saddle.theory.constants import (
    GameConstants,
    QueryConstants,
    SimplexConstants,
)


def _clamped(name: str, value: float) -> int:
    """Returns a number as an integer, or 1 with a warning where it is 0."""
    if value >= 1:
        return int(value)
    warnings.warn(
        f"{name} rounds to 0 by the theorem's formula; 1 is taken, for which nothing is "
        "proven",
        UserWarning,
        stacklevel=3,
    )
    return 1


# --- the theorems --------------------------------------------------------------------


def saddle(theorem: str, **problem: Any) -> Design:
    """Computes the numbers of Theorems 4.1 and 4.2.

    Args:
      theorem: ``"4.1"`` or ``"4.2"``, which does without L2.
      **problem: :class:`~jaxdp.saddle.theory.constants.GameConstants`.
    """
    validate.one_of(("4.1", "4.2"), theorem=theorem)
    if theorem == "4.2":
        problem["second_order_smoothness"] = None
    p = GameConstants(**problem)
    n, log, ell = p.num_examples, math.log(1 / p.delta), p.log_dim
    if theorem == "4.2":
        num_steps = _num_steps(n, (n * p.epsilon) ** (2 / 3) / log ** (1 / 3))
        num_draws = _clamped("num_draws", round(num_steps / ell))
    elif p.need_second_order("Theorem 4.1") == 0:
        num_steps = _num_steps(n, n * p.epsilon / math.sqrt(ell * log))
        num_draws = 1
    else:
        scale = n * p.epsilon / (ell**0.25 * math.sqrt(log))
        num_steps = _num_steps(n, scale**0.8)
        num_draws = _clamped("num_draws", round(math.sqrt(num_steps / ell)))
    useful = math.sqrt(ell / num_steps) / p.lipschitz
    algorithm = bounds.saddle, step_sizes.saddle
    return constants.single_pass(
        theorem, p, *algorithm, useful, num_steps=num_steps, num_draws=num_draws
    )


def _num_steps(num_examples: int, formula: float) -> int:
    return _clamped("num_steps", math.floor(min(num_examples, formula)))


def saddle_bias_reduced(theorem: str, *, level_seed: int = 0, **problem: Any) -> Design:
    """Computes the numbers of Theorem 4.3: vertex budget, step size, batches, levels.

    Args:
      theorem: ``"4.3"``.
      level_seed: public seed of the levels.
      **problem: as for :func:`saddle`, with an L2 and epsilon below 8 log(1/delta); of
        the n records the proof uses about half.

    Raises:
      ValueError: besides, a vertex budget below 4, for which the theorem says nothing.
    """
    validate.one_of(("4.3",), theorem=theorem)
    p = GameConstants(**problem)
    l2 = p.need_second_order("Theorem 4.3")
    n, log, ell, l0 = p.num_examples, math.log(1 / p.delta), p.log_dim, p.lipschitz
    if p.epsilon >= 8 * log:
        raise ValueError(
            f"epsilon must be < 8 log(1/delta) = {8 * log:.4g} for Theorem 4.3, got "
            f"{p.epsilon!r}"
        )
    g = math.sqrt(l0**2 + l2**2 + ell * p.smoothness**2)
    private = n * p.epsilon * g / (math.sqrt(4 * 48 * 81 * ell * log) * l0)
    budget = min(private, n / 2)
    if budget < 4:
        raise ValueError(
            f"num_examples must be such that the vertex budget of Theorem 4.3 is >= 4, "
            f"got {n!r}, for which it is {budget:.3g}"
        )
    step = math.sqrt(ell / budget) / g
    max_level = levels.largest_level(math.floor(budget))
    return constants.bias_reduced(
        "4.3",
        p,
        vertex_budget=math.floor(budget),
        max_level=max_level,
        level_seed=level_seed,
        useful_step=step,
        batch_alpha=(2 * (p.epsilon / (step * l0)) ** 2 / (48 * 81 * log * n))
        ** (1 / 3),
        paper_vertex_budget=budget,
        paper_rate=math.sqrt(ell / budget) * g * max_level,
    )


def convex_simplex(theorem: str, **problem: Any) -> Design:
    """Computes the numbers of Theorem 5.1; without L2, of a first-order-smooth loss.

    Args:
      theorem: ``"5.1"``.
      **problem: :class:`~jaxdp.saddle.theory.constants.SimplexConstants`.
    """
    validate.one_of(("5.1",), theorem=theorem)
    p = SimplexConstants(**problem)
    n, log, ell = p.num_examples, math.log(1 / p.delta), p.log_dim
    l0, l1, l2 = p.lipschitz, p.smoothness, p.second_order_smoothness
    if l2 is None:
        num_steps = _num_steps(n, (n * p.epsilon) ** 0.8 / (ell * log) ** 0.4)
        q = _clamped("refresh_every", round(math.sqrt(num_steps) / ell))
        k = _clamped("num_draws", round(num_steps / ell))
        spread = (l0**2 + l1**2) * q * math.sqrt(ell / k)
        spread += l1**2 * q / (math.sqrt(ell) * k**1.5)
    else:
        num_steps = _num_steps(n, n * p.epsilon / (ell * math.sqrt(log)))
        q = _clamped("refresh_every", round(math.sqrt(num_steps / ell)))
        k = _clamped("num_draws", round(math.sqrt(num_steps * ell)))
        spread = l1**2 * q * ell / k + l2**2 * q / k**2
    useful = math.sqrt(ell / ((l0**2 + spread) * num_steps))
    useful = min(useful, bounds.convex_longest_step(l0, q))
    numbers = {"num_steps": num_steps, "num_draws": k, "refresh_every": q}
    algorithm = bounds.convex, step_sizes.convex
    return constants.single_pass("5.1", p, *algorithm, useful, **numbers)


def synthetic_data(
    theorem: str, *, last_draw: bool = True, printed: bool = False, **problem: Any
) -> Design:
    """Computes the numbers of Theorem G.1.

    Args:
      theorem: ``"G.1"``.
      last_draw: whether the last step's query is drawn, which no iterate needs.
      printed: the number of steps as printed, too small by sqrt(log(domain_size)).
      **problem: :class:`~jaxdp.saddle.theory.constants.QueryConstants`, epsilon at most 1;
        ``query_range`` is for the exact charges only.
    """
    validate.one_of(("G.1",), theorem=theorem)
    p = QueryConstants(**problem)
    validate.probability(allow_one=True, epsilon=p.epsilon)
    (log_z, log_q), n, log = p.log_sizes, p.num_examples, math.log(1 / p.delta)
    formula = 6 * n * p.epsilon / (16 * math.sqrt(2 * log) * log_q)
    if not printed:
        formula *= math.sqrt(log_z)
    num_steps = _clamped("num_steps", math.floor(formula))
    factor = 2 * ((12 if printed else 18) + log_q / log_z / 3)
    scale = (log * log_z) ** 0.25 * math.sqrt(log_q / (n * p.epsilon))
    return constants.synthetic(
        "G.1",
        p,
        20 * math.sqrt(log_q / n) + factor * scale,
        num_steps=num_steps,
        last_draw=last_draw,
        step_size_x=math.sqrt(log_z / (9 * num_steps)),
        useful=log_q / (6 * math.sqrt(num_steps * log_z)),
    )
