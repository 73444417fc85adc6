r"""Parameters that the papers' theorems on private O2NC prescribe, as plain numbers.

A theorem turns (n, d, epsilon, delta), L, the gap and a radius into windows, batches and
a longest step. It does not choose the noise: plans calibrate that exactly. What its own
formula gives is reported, and so is its number of directions.

=====================  =========  =========  ===========  ==============  ================
theorem                restart    window     longest      directions, or  batches
                       period                step         points
=====================  =========  =========  ===========  ==============  ================
``"4.9"``              T          T          radius / T   common, m = d   T + 1, then 1
``"3.1"``              Sigma      M          D            of each query   Sigma, then 1
``"4.1"``              Sigma      M          D            of each query   all, every step
``"6.1"``              Sigma      M          D            of each query   Sigma, then 1
``"4.1 first-order"``  Sigma      M          D            of each query   all, every step
``"E"``                1          T          radius / T   m = 1           B
=====================  =========  =========  ===========  ==============  ================

4.9 and E are of the first paper, the others of the second. 6.1 is 3.1 with gradients, and
``"4.1 first-order"`` is 4.1 with gradients, of which the paper only says that it can be
done. E is the simple method to which appendix E compares.

The radius is that of the smoothed loss, :math:`\delta` in 4.9 and :math:`\alpha` in 3.1.
All prove something of the Goldstein subdifferential at *twice* that radius; 4.9 as
printed promises the radius itself. Other corrections:

* 4.9: the epoch is the larger, not the smaller, of two numbers (else the error can
  exceed the claim without bound), and at least 2; the learner's step size is ours.
* 3.1: the learner is not reset, which costs 5/2 where the paper has 3/2, and the error
  of a release enters twice. The paper's m (10^10 and up) is what makes the difference of
  two independent estimates small; with any m that can be run it is not, and neither is
  the noise. Use 3.1 to compare with, and a certified design to work with.
* 4.1: D and T as printed have wrong units. It takes a target for the norm; here that is
  what n records allow, by its own condition with constant 1. Its m does not give the
  sensitivities that it claims, and its noise with constant 1 is short of
  its epsilon. It can ask for more steps than anyone can run: T grows as n squared.
* E: the batch of one record that is printed needs d^3 / (rho^2 eps^3) records; the rate
  that is claimed needs B = max(d, d^(3/2) / rho). The printed noise is half of what is
  needed where a record is replaced.

The bound is what is proven with these corrections, exact noise and the constants of
:mod:`jaxdp.o2nc.theory.bounds`. It is often above L, where it says nothing.

Source: Zhang, Tran & Cutkosky, ICLR 2024, Theorem 4.9 and appendix E; Kornowski, Liu &
Talwar, ICML 2025, Theorems 3.1, 4.1 and 6.1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdp.core import validate
from jaxdp.mechanism.design import Design
from jaxdp.o2nc.oracle import Difference, Direction
from jaxdp.o2nc.theory import bounds
from jaxdp.o2nc.theory.bounds import Constants, Schedule
from jaxdp.o2nc.theory.design import Printed, designed
from jaxdp.o2nc.theory.estimators import BallEstimator, Estimator


def prescribed(
    theorem: str, *, num_directions: int | None = None, **constants: Any
) -> Design:
    """Computes the parameters that a theorem prescribes.

    Args:
      theorem: a key of :data:`THEOREMS`.
      num_directions: m; None takes d, 64 points of the ball, or 1 for E.
      **constants: those of :class:`~jaxdp.o2nc.theory.bounds.Constants`. The papers replace
        a record; under the other relations one record moves a sum half as far. Only the
        exact noise depends on it.

    Returns:
      The design: see :func:`jaxdp.o2nc.theory.design.designed`.

    Raises:
      ValueError: an argument out of range, or so few records that a theorem has no
        whole window. TypeError: not a number, or missing.
    """
    validate.one_of(tuple(THEOREMS), theorem=theorem)
    name = str(theorem)
    formulas, kind, direction, difference = THEOREMS[name]
    p = Constants(**constants)
    default = 1 if name == "E" else kind.points or p.dim
    m = default if num_directions is None else num_directions
    validate.integer(num_directions=m)
    estimator = kind(int(m), direction, difference)
    schedule, printed = formulas(p, estimator)
    # The second paper, which does not reset the learner, has clips that may bite, and
    # a step size of its own.
    failure, factor = (None, None) if schedule.reset else (bounds.FAILURE, 1.0)
    return designed(name, p, estimator, schedule, failure, factor, printed)


# --- Zhang, Tran, Cutkosky -----------------------------------------------------------


def _four_nine(p: Constants, estimator: Estimator) -> tuple[Schedule, Printed]:
    n = p.num_examples
    epoch = min(max(math.ceil(max(balanced_epochs(p, p.mu))), 2), n // 2)
    # The printed noise.
    leaf = 4 * p.dim * p.lipschitz / epoch
    schedule = Schedule(
        period=epoch,
        restart_batch_size=epoch + 1,
        batch_size=1,
        window=epoch,
        num_windows=n // (2 * epoch),
        max_step=p.smoothing_radius / epoch,
        prefix_noise="tree",
    )
    std = math.sqrt(2 * math.log(epoch)) * leaf / _printed_rho(p)
    return schedule, Printed(std, p.dim)


def balanced_epochs(p: Constants, rho: float) -> tuple[float, float]:
    """Returns the two epoch lengths of Theorem 4.9, of which it needs the larger.

    The bound's growing term equals the sampling error at the first, and the error of
    private noise at the second.
    """
    gap = p.initial_gap + p.lipschitz * p.smoothing_radius
    scale = p.lipschitz * p.smoothing_radius * p.num_examples / gap
    return (math.sqrt(p.dim) * scale) ** (2 / 3), math.sqrt(p.dim**1.5 * scale / rho)


def _printed_rho(p: Constants) -> float:
    """Returns the paper's rho, a mu of Gaussian DP, by its own conversion."""
    return p.epsilon / (2 * math.sqrt(math.log(1 / p.delta)))


def _naive(p: Constants, estimator: Estimator) -> tuple[Schedule, Printed]:
    n, d = p.num_examples, p.dim
    # At least two steps in a window.
    batch = min(math.ceil(max(d, d**1.5 / p.mu)), n // 2)
    epoch = min(max(math.ceil(naive_epoch(p, batch)), 2), n // batch)
    schedule = Schedule(
        period=1,
        restart_batch_size=batch,
        batch_size=1,
        window=epoch,
        num_windows=n // (batch * epoch),
        max_step=p.smoothing_radius / epoch,
        prefix_noise="tree",
    )
    return schedule, Printed(d * p.lipschitz / (batch * _printed_rho(p)), 1)


def naive_epoch(p: Constants, batch: int) -> float:
    """Returns the epoch T at which the bound's growing term is the regret L / sqrt(T).

    With its B, an estimate and its noise are of the order of L.
    """
    gap = p.initial_gap + p.lipschitz * p.smoothing_radius
    return (p.lipschitz * p.smoothing_radius * p.num_examples / (gap * batch)) ** (
        2 / 3
    )


# --- Kornowski, Liu, Talwar ----------------------------------------------------------


def _single_pass(p: Constants, estimator: Estimator) -> tuple[Schedule, Printed]:
    n, d, lip, alpha = p.num_examples, p.dim, p.lipschitz, p.smoothing_radius
    # At least as many steps; the theorem is about gaps of at least L alpha.
    steps, gap = n / 2, max(p.initial_gap, lip * alpha)
    # The theorem's first number is never the smallest. A window has a step at least.
    step = min(
        math.sqrt(gap * alpha * p.epsilon / (d * lip * steps)),
        (gap**3 * alpha**2 * p.epsilon / (d**1.5 * lip**3 * steps**3)) ** (1 / 5),
        (gap**2 * alpha / (lip**2 * steps**2 * math.sqrt(d))) ** (1 / 3),
        alpha / 4,
    )
    reach = alpha / step
    period = math.ceil((reach / p.epsilon) ** (2 / 3) + reach / math.sqrt(d))
    period = min(period, (n + 1) // 2)
    total = int(bounds.num_steps(n, period, period, 1))
    window = min(max(1, math.floor(reach / 4)), total)
    leaf = lip / period + lip * math.sqrt(d) / reach
    logs = math.log(period) * math.log(1 / p.delta)
    if estimator.asks.gradients:
        paper_m = math.log(d / p.delta) * reach**2 / d
    else:
        paper_m = math.log(d * period / p.delta) * ((d * period) ** 2 + d * reach**2)
    schedule = Schedule(
        period=period,
        restart_batch_size=period,
        batch_size=1,
        window=window,
        num_windows=total // window,
        max_step=step,
        reset=False,
        prefix_noise="tree",
    )
    std = 4 * leaf * math.sqrt(logs) / p.epsilon
    return schedule, Printed(std, max(1, math.ceil(paper_m)))


class MultiPass(NamedTuple):
    """Parameters of Theorem 4.1 for a target, corrected; the last three as printed."""

    max_step: float
    num_steps: int
    period: int
    window: int
    restart_std: float
    difference_std: float
    num_directions: int


def multi_pass_target(p: Constants) -> float:
    r"""Returns the norm that n records allow by Theorem 4.1, its constant taken as 1.

    :math:`n = \sqrt\Phi L d^{3/4} / (\epsilon \alpha^{1/2} \beta^{3/2})`, and at most L/2,
    above which a step is longer than a window.
    """
    gap = max(p.initial_gap, p.lipschitz * p.smoothing_radius)
    root = math.sqrt(gap / p.smoothing_radius) * p.lipschitz * p.dim**0.75
    return min((root / (p.epsilon * p.num_examples)) ** (2 / 3), p.lipschitz / 2)


def multi_pass_numbers(p: Constants, target: float) -> MultiPass:
    """Computes the parameters of Theorem 4.1 for any target."""
    n, d, lip, alpha = p.num_examples, p.dim, p.lipschitz, p.smoothing_radius
    gap = max(p.initial_gap, lip * alpha)
    ratio = (lip / target) ** 2
    tiny = 1e-9  # Of rounding, that no whole number is missed by.
    steps = max(1, math.ceil(gap * ratio / (alpha * target) * (1 - tiny)))
    period = max(1, math.floor(ratio / math.sqrt(d) * (1 + tiny)))
    root = math.sqrt(steps * math.log(1 / p.delta)) / (n * p.epsilon)
    first = lip * root / math.sqrt(period)
    other = lip * math.sqrt(d) * root / ratio
    paper_m = lip**2 * d * (period / first**2 + 1 / other**2) / n
    return MultiPass(
        max_step=alpha / ratio,
        num_steps=steps,
        period=min(period, steps),
        window=min(max(1, math.floor(ratio / 4 * (1 + tiny))), steps),
        restart_std=first,
        difference_std=other,
        num_directions=max(1, math.ceil(paper_m)),
    )


def _multi_pass(p: Constants, estimator: Estimator) -> tuple[Schedule, Printed]:
    found = multi_pass_numbers(p, multi_pass_target(p))
    schedule = Schedule(
        period=found.period,
        restart_batch_size=p.num_examples,
        batch_size=p.num_examples,
        window=found.window,
        num_windows=found.num_steps // found.window,
        max_step=found.max_step,
        reset=False,
        multi_pass=True,
    )
    m = None if estimator.asks.gradients else found.num_directions
    return schedule, Printed(found.restart_std, m, found.difference_std)


_Formulas = Callable[[Constants, Estimator], tuple[Schedule, Printed]]
#: Formulas, estimator, law of the directions and differences of each theorem.
THEOREMS: dict[str, tuple[_Formulas, type[Estimator], Direction, Difference]] = {
    "4.9": (_four_nine, Estimator, "sphere", "one_sided"),
    "3.1": (_single_pass, Estimator, "sphere", "independent"),
    "4.1": (_multi_pass, Estimator, "sphere", "independent"),
    "6.1": (_single_pass, BallEstimator, "ball", "independent"),
    "4.1 first-order": (_multi_pass, BallEstimator, "ball", "independent"),
    "E": (_naive, Estimator, "sphere", "antithetic"),
}
