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

Reference:
  Gonzalez, Guzman, Paquette, `Mirror Descent Algorithms with Nearly Dimension-Independent
  Rates for Differentially-Private Stochastic Saddle-Point Problems
  <https://arxiv.org/abs/2403.02912>`_, 2024.
"""

import enum
import math
import warnings

from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.saddle.theory import bounds, levels, settings, steps
from jaxdp.saddle.theory.settings import (
    BiasReducedSettings,
    ConvexSettings,
    Problem,
    SaddleSettings,
    SyntheticSettings,
    least,
)


class Theorem(enum.StrEnum):
    """The theorems on private mirror descent with vertex sampling."""

    FOUR_ONE = "4.1"
    FOUR_TWO = "4.2"
    FOUR_THREE = "4.3"
    FIVE_ONE = "5.1"
    G_ONE = "G.1"


SADDLE = (Theorem.FOUR_ONE, Theorem.FOUR_TWO)
SADDLE_BIAS_REDUCED = (Theorem.FOUR_THREE,)
CONVEX_SIMPLEX = (Theorem.FIVE_ONE,)
SYNTHETIC_DATA = (Theorem.G_ONE,)


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


def saddle(
    theorem: str,
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
) -> SaddleSettings:
    """Computes the settings of Theorems 4.1 and 4.2.

    Args:
      theorem: ``"4.1"`` or ``"4.2"``.
      num_examples: n, read in a single pass.
      dim_x: vertices of the player that minimises, >= 2.
      dim_y: vertices of the player that maximises, >= 2.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours. The paper replaces a record.
      lipschitz: L0.
      smoothness: L1.
      second_order_smoothness: L2, for 4.1; 4.2 does without.

    Raises:
      ValueError: an argument out of range. TypeError: not a number.
    """
    validate.one_of([str(t) for t in SADDLE], theorem=theorem)
    first_order = Theorem(theorem) is Theorem.FOUR_TWO
    p = Problem(
        num_examples=num_examples,
        dims={"dim_x": dim_x, "dim_y": dim_y},
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        lipschitz=lipschitz,
        smoothness=smoothness,
        second_order_smoothness=None if first_order else second_order_smoothness,
    )
    n, log, ell = num_examples, p.log_inverse_delta, p.log_dim
    if first_order:
        num_steps = _num_steps(n, (n * epsilon) ** (2 / 3) / log ** (1 / 3))
        num_draws = _clamped("num_draws", round(num_steps / ell))
    else:
        p.need_second_order("Theorem 4.1")
        if p.second_order_smoothness == 0:
            num_steps = _num_steps(n, n * epsilon / math.sqrt(ell * log))
            num_draws = 1
        else:
            scale = n * epsilon / (ell**0.25 * math.sqrt(log))
            num_steps = _num_steps(n, scale**0.8)
            num_draws = _clamped("num_draws", round(math.sqrt(num_steps / ell)))
    admitted = steps.saddle(
        num_steps=num_steps,
        num_draws=num_draws,
        batch_size=n // num_steps,
        **p.budget,
    )
    return settings.settled_saddle(
        theorem,
        p,
        num_steps,
        num_draws,
        least(math.sqrt(ell / num_steps) / lipschitz, admitted.paper),
        admitted,
    )


def _num_steps(num_examples: int, formula: float) -> int:
    return _clamped("num_steps", math.floor(min(num_examples, formula)))


def saddle_bias_reduced(
    theorem: str,
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
    level_seed: int = 0,
) -> BiasReducedSettings:
    """Computes the settings of Theorem 4.3: vertex budget, step size, batches, levels.

    Args:
      theorem: ``"4.3"``.
      num_examples: n, of which the proof uses about half.
      dim_x: vertices of the player that minimises, >= 2.
      dim_y: vertices of the player that maximises, >= 2.
      epsilon: in (0, 8 log(1/delta)).
      delta: in (0, 1).
      relation: neighbours. The paper replaces a record.
      lipschitz: L0.
      smoothness: L1.
      second_order_smoothness: L2.
      level_seed: public seed of the levels.

    Raises:
      ValueError: an argument out of range, or a vertex budget below 4, for which the
        theorem says nothing. TypeError: not a number.
    """
    validate.one_of([str(t) for t in SADDLE_BIAS_REDUCED], theorem=theorem)
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
    p.need_second_order("Theorem 4.3")
    n, log, ell, l0 = num_examples, p.log_inverse_delta, p.log_dim, lipschitz
    if epsilon >= 8 * log:
        raise ValueError(
            f"epsilon must be < 8 log(1/delta) = {8 * log:.4g} for Theorem 4.3, got "
            f"{epsilon!r}"
        )
    g = math.sqrt(l0**2 + second_order_smoothness**2 + ell * smoothness**2)
    private = n * epsilon * g / (math.sqrt(4 * 48 * 81 * ell * log) * l0)
    budget = min(private, n / 2)
    if budget < 4:
        raise ValueError(
            f"num_examples must be such that the vertex budget of Theorem 4.3 is >= 4, "
            f"got {n!r}, for which it is {budget:.3g}"
        )
    step = math.sqrt(ell / budget) / g
    alpha = (2 * (epsilon / (step * l0)) ** 2 / (48 * 81 * log * n)) ** (1 / 3)
    max_level = levels.largest_level(math.floor(budget))
    rate = math.sqrt(ell / budget) * g * max_level
    return settings.settled_bias_reduced(
        "4.3",
        p,
        vertex_budget=math.floor(budget),
        max_level=max_level,
        level_seed=level_seed,
        useful_step=step,
        paper={
            "batch_alpha": alpha,
            "paper_vertex_budget": budget,
            "paper_rate": rate,
        },
    )


def convex_simplex(
    theorem: str,
    *,
    num_examples: int,
    dim: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float | None = None,
) -> ConvexSettings:
    """Computes the settings of Theorem 5.1; without L2, of a first-order-smooth loss.

    Args:
      theorem: ``"5.1"``.
      num_examples: n, read in a single pass.
      dim: vertices, >= 2.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours. The paper replaces a record.
      lipschitz: L0.
      smoothness: L1.
      second_order_smoothness: L2, or None.

    Raises:
      ValueError: an argument out of range. TypeError: not a number.
    """
    validate.one_of([str(t) for t in CONVEX_SIMPLEX], theorem=theorem)
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
    n, log, ell = num_examples, p.log_inverse_delta, p.log_dim
    l0, l1 = lipschitz, smoothness
    if second_order_smoothness is None:
        formula = (n * epsilon) ** 0.8 / (ell * log) ** 0.4
        num_steps = _num_steps(n, formula)
        refresh = _clamped("refresh_every", round(math.sqrt(num_steps) / ell))
        num_draws = _clamped("num_draws", round(num_steps / ell))
        q, k = refresh, num_draws
        spread = (l0**2 + l1**2) * q * math.sqrt(ell / k)
        spread += l1**2 * q / (math.sqrt(ell) * k**1.5)
    else:
        formula = n * epsilon / (ell * math.sqrt(log))
        num_steps = _num_steps(n, formula)
        refresh = _clamped("refresh_every", round(math.sqrt(num_steps / ell)))
        num_draws = _clamped("num_draws", round(math.sqrt(num_steps * ell)))
        q, k = refresh, num_draws
        spread = l1**2 * q * ell / k + second_order_smoothness**2 * q / k**2
    useful = math.sqrt(ell / ((l0**2 + spread) * num_steps))
    useful = min(useful, bounds.convex_longest_step(l0, refresh))
    admitted = steps.convex(
        num_steps=num_steps,
        num_draws=num_draws,
        refresh_every=refresh,
        batch_size=n // num_steps,
        **p.budget,
    )
    step = least(useful, admitted.paper)
    return settings.settled_convex(
        "5.1", p, num_steps, num_draws, refresh, step, admitted
    )


def synthetic_data(
    theorem: str,
    *,
    num_examples: int,
    domain_size: int,
    num_queries: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    query_range: float = 2.0,
    last_draw: bool = True,
    printed: bool = False,
) -> SyntheticSettings:
    """Computes the settings of Theorem G.1.

    Args:
      theorem: ``"G.1"``.
      num_examples: n, all read at every step.
      domain_size: cells, >= 2.
      num_queries: closed under negation, >= 2.
      epsilon: in (0, 1].
      delta: in (0, 1).
      relation: neighbours. The paper replaces a record.
      query_range: largest less smallest answer of one query; at most 2. For the exact
        charges only.
      last_draw: whether the last step's query is drawn, which no iterate needs.
      printed: the number of steps as printed, too small by sqrt(log(domain_size)).

    Raises:
      ValueError: an argument out of range. TypeError: not a number.
    """
    validate.one_of([str(t) for t in SYNTHETIC_DATA], theorem=theorem)
    settings.check_synthetic(
        num_examples, domain_size, num_queries, query_range, delta, relation
    )
    validate.probability(allow_one=True, epsilon=epsilon)
    n, log_z, log_q = num_examples, math.log(domain_size), math.log(num_queries)
    log = math.log(1 / delta)
    formula = 6 * n * epsilon / (16 * math.sqrt(2 * log) * log_q)
    if not printed:
        formula *= math.sqrt(log_z)
    num_steps = _clamped("num_steps", math.floor(formula))
    admitted = steps.synthetic(
        num_examples=n,
        num_steps=num_steps,
        query_range=query_range,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        last_draw=last_draw,
    )
    useful = log_q / (6 * math.sqrt(num_steps * log_z))
    factor = 2 * ((12 if printed else 18) + log_q / log_z / 3)
    scale = (log * log_z) ** 0.25 * math.sqrt(log_q / (n * epsilon))
    return settings.settled_synthetic(
        "G.1",
        num_examples=n,
        domain_size=domain_size,
        num_queries=num_queries,
        query_range=query_range,
        relation=relation,
        num_steps=num_steps,
        step_size_x=math.sqrt(log_z / (9 * num_steps)),
        step_size_y=least(useful, admitted.paper),
        admitted=admitted,
        paper_bound=20 * math.sqrt(log_q / n) + factor * scale,
    )
