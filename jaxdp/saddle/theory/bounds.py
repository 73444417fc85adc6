r"""Convergence bounds of mirror descent with vertex sampling, as plain numbers.

Every record's f is convex in x, concave in y, and in the l1 norm of both together
:math:`L_0`-Lipschitz and :math:`L_1`-smooth; where :math:`L_2` is given, so is every
partial derivative :math:`L_2`-smooth ("second-order-smooth"; 0 for quadratics), and None
says that it need not be ("first-order-smooth"). :math:`\ell = \log d_x + \log d_y`.
The bounds are on the expected duality gap, for the population, if no clip is ever active.
``num_steps`` is T, ``num_draws`` K, ``refresh_every`` q, ``step_size`` tau > 0 of all
players, ``vertex_budget`` U and ``max_level`` M; ``log_dim`` is l, of one player log d.

The paper hides constants; these are explicit, and corrected: output vertices cost
:math:`4 L_1\sqrt{\ell/T}`, the bias of a gradient at K drawn vertices of both players is
twice that of one, and it meets an l1 distance of 4.

Reference:
  Gonzalez, Guzman, Paquette (arXiv 2403.02912), 2024: Lemmas 4.1 to 4.3 and appendices
  D, F and G.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxdp.core import display

#: A number, or an array of them: a search asks for many settings at once.
Number = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
    """Bound on the expected error, and the terms that it is the sum of.

    Attributes:
      bound: the sum.
      optimization: of mirror descent with exact gradients.
      sampling: bias and variance of gradients at drawn vertices.
      output: for an output of drawn vertices.
      staleness: of points that are not refreshed.
      generalization: of the data set against the population.
    """

    bound: float
    optimization: float
    sampling: float = 0.0
    output: float = 0.0
    staleness: float = 0.0
    generalization: float = 0.0

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        return display.fields(self)

    def scaled(self, factor: float = 1.0) -> "Promise":
        """Returns the terms times a factor, as Python floats, for JSON."""
        terms = dataclasses.asdict(self).items()
        return Promise(**{name: float(factor * x) for name, x in terms})

    def __str__(self) -> str:
        parts = [
            f"{field.name} {getattr(self, field.name):.3g}"
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name)
        ]
        return f"expected error <= {self.bound:.4g} ({', '.join(parts)})"


def promised(**terms: Number) -> Promise:
    """Builds a promise from its terms; fields are arrays where terms are."""
    return Promise(bound=sum(terms.values()), **terms)


# --- gradients at drawn vertices -----------------------------------------------------


def joint_bias(
    num_draws: Number, smoothness: float, second_order_smoothness: float | None
) -> Number:
    """Bounds the bias of a gradient at the means of K vertices of each player.

    The bound is on the largest entry: 4 L2 / K, or 4 sqrt(2) L1 / sqrt(K) if
    first-order-smooth only.
    """
    if second_order_smoothness is None:
        return 4 * math.sqrt(2) * smoothness / np.sqrt(num_draws)
    return 4 * second_order_smoothness / num_draws


def single_bias(
    num_draws: Number, smoothness: float, second_order_smoothness: float | None
) -> Number:
    """Bounds the error due to the bias of one player's gradient: twice that bias.

    4 L2 / K, or 8 L1 / sqrt(K) if first-order-smooth only.
    """
    if second_order_smoothness is None:
        return 8 * smoothness / np.sqrt(num_draws)
    return 4 * second_order_smoothness / num_draws


def single_variance(
    num_draws: Number,
    log_dim: float,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float | None,
) -> Number:
    """Bounds the mean squared error of one player's gradient at a mean of K vertices.

    The error is the largest entry's. Corollary D.3 with the constants that its proof
    gives, and D.4.
    """
    k, l1 = num_draws, smoothness
    if second_order_smoothness is None:
        root = math.sqrt(12 + log_dim)
        far = 17 * (lipschitz**2 + l1**2) * root / np.sqrt(k)
        return 43 * l1**2 / (root * k**1.5) + far
    return 16 * second_order_smoothness**2 / k**2 + (8 + 4 * log_dim) * l1**2 / k


def bias_reduced_moment(
    max_level: Number,
    log_dim: float,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float,
) -> Number:
    """Bounds the second moment of a bias-reduced gradient (Lemma 4.3).

    That is :math:`E|g|^2` of the largest entry of both players. With constants that the
    proof does give; the printed ones it does not.
    """
    levels = (384 + 96 * log_dim) * (max_level + 1)
    return 4 * lipschitz**2 + 2560 * second_order_smoothness**2 + levels * smoothness**2


# --- the algorithms ------------------------------------------------------------------


def saddle(
    *,
    num_steps: Number,
    num_draws: Number,
    step_size: Number,
    log_dim: float,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float | None,
) -> Promise:
    """Bounds the duality gap of Algorithm 1, with a fresh output vertex at each step."""
    bias = joint_bias(num_draws, smoothness, second_order_smoothness)
    return promised(
        optimization=2 * log_dim / (step_size * num_steps)
        + 5 * step_size * lipschitz**2,
        sampling=4 * bias + 0 * step_size,
        output=_output(num_steps, log_dim, smoothness),
    )


def saddle_step_size(num_steps: Number, log_dim: float, lipschitz: float) -> Number:
    """Returns the tau of least bound, if privacy allows it."""
    return np.sqrt(2 * log_dim / (5 * num_steps)) / lipschitz


def _output(num_steps: Number, log_dim: float, smoothness: float) -> Number:
    return 4 * smoothness * (1 / num_steps + np.sqrt(log_dim / num_steps))


def expected_steps(vertex_budget: Number, max_level: Number) -> tuple[Number, Number]:
    """Bounds E S, the expected steps of Algorithm 3, from below and above."""
    rate = (2 - 0.5**max_level) / (max_level + 1)
    return (vertex_budget - 2**max_level) * rate, vertex_budget * rate


def saddle_bias_reduced(
    *,
    vertex_budget: Number,
    max_level: Number,
    step_size: Number,
    log_dim: float,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float,
    moment: Number | None = None,
) -> Promise:
    """Bounds E[S gap] / E[S] of Algorithm 3, whose number of steps S is random.

    The paper's statement is on the gap itself, with constant probability and constants
    that it hides: S is a stopping time, and levels have heavy tails. This is its proof's
    expectation, for a step size that is fixed before the levels. ``moment`` is another
    second moment of the gradients than the proven one; U exceeds 2^M.
    """
    steps, _ = expected_steps(vertex_budget, max_level)
    l0, l1, l2 = lipschitz, smoothness, second_order_smoothness
    proven = bias_reduced_moment(max_level, log_dim, l0, l1, l2)
    square: Number = proven if moment is None else moment
    return promised(
        optimization=2 * log_dim / (step_size * steps) + 5 * step_size * l0**2,
        # The bias 2 L2 / 2^M meets a distance of 4; the moment is 3 |g|^2 + 2 L0^2.
        sampling=8 * l2 / 2.0**max_level + 3 * step_size * (square - l0**2),
        output=_output(steps, log_dim, l1),
    )


def saddle_bias_reduced_step_size(
    steps: Number, moment: Number, log_dim: float, lipschitz: float
) -> Number:
    """Returns the tau of least bound, if privacy allows it."""
    return np.sqrt(2 * log_dim / (steps * (3 * moment + 2 * lipschitz**2)))


def convex(
    *,
    num_steps: Number,
    num_draws: Number,
    refresh_every: Number,
    step_size: Number,
    log_dim: float,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float | None,
) -> Promise:
    """Bounds the excess of F at the output of Algorithm 4.

    For q <= T and tau <= 1 / (4 L0 q), without which nothing is proven.
    """
    t, k, q, tau = num_steps, num_draws, refresh_every, step_size
    constants = (lipschitz, smoothness, second_order_smoothness)
    variance = single_variance(k, log_dim, *constants)
    return promised(
        optimization=log_dim / (tau * t) + tau * lipschitz**2 / 2,
        sampling=single_bias(k, *constants[1:]) + 4 * tau * q * variance,
        staleness=4 * smoothness * q * (1 + np.log(t / q)) / t,
        output=2 * smoothness / k,
    )


def convex_step_size(
    *,
    num_steps: Number,
    num_draws: Number,
    refresh_every: Number,
    log_dim: float,
    lipschitz: float,
    smoothness: float,
    second_order_smoothness: float | None,
) -> Number:
    """Returns the tau of least bound that the proof allows, if privacy does too."""
    constants = (lipschitz, smoothness, second_order_smoothness)
    variance = single_variance(num_draws, log_dim, *constants)
    slope = lipschitz**2 / 2 + 4 * refresh_every * variance
    best = np.sqrt(log_dim / (num_steps * slope))
    return np.minimum(best, convex_longest_step(lipschitz, refresh_every))


def convex_longest_step(lipschitz: float, refresh_every: Number) -> Number:
    """Returns the proof's largest step size, 1 / (4 L0 q); privacy does not need it."""
    return 1 / (4 * lipschitz * refresh_every)


def synthetic_step_size_x(num_steps: Number, domain_size: int) -> Number:
    """Returns the tau_x of least bound, for answers in [-1, 1]."""
    return np.sqrt(0.8 * math.log(domain_size) / num_steps)


def synthetic(
    *,
    num_examples: int,
    num_steps: Number,
    step_size_x: Number,
    step_size_y: Number,
    log_domain: float,
    log_queries: float,
) -> Promise:
    """Bounds the largest query error of Algorithm 5, for answers in [-1, 1].

    Step sizes are those of the distribution and of the queries; the latter are counted
    with their negations.
    """
    return promised(
        optimization=2 * log_domain / (step_size_x * num_steps)
        + 5 / 2 * step_size_x
        + log_queries / (step_size_y * num_steps)
        + 2 * step_size_y,
        generalization=10 * math.sqrt(log_queries / num_examples),
    )
