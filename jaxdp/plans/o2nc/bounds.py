r"""What is proven of O2NC with the variance-reduced oracle, as plain numbers.

Every record's loss is L-Lipschitz; nothing else is assumed. F is their mean over the
population, :math:`\hat F` its mean over a ball of radius :math:`\delta`, the smoothing
radius, and h the gap: F at the start above its infimum. The output is the mean
:math:`\bar w` of a random window of M query points, none of them further than
:math:`\delta` from it, so that the mean gradient of :math:`\hat F` over the window bounds
the least norm in the Goldstein subdifferential of F at radius :math:`2\delta`:

.. math::
  \mathbb E\|\partial_{2\delta} F(\bar w)\| \le \frac{h + L\delta}{D K M}
    + c_R \frac{G}{\sqrt M} + \gamma \sqrt V + \beta L,
  \qquad \mathbb E\|\tilde g_t - \nabla\hat F(w_t)\|^2 \le V,
  \quad \mathbb E\|\tilde g_t\|^2 \le G^2 .

K windows, D the longest step. The terms are ``start``, ``regret``, ``estimation`` and
``clip_bias`` of :class:`Promise`, where V is split as well.

That is for a constant step size: an adaptive one has other constants. The papers have
:math:`\gamma = 2`. With an oracle that restarts every P steps it is less:

* A release's error has mean 0 given all before the period's restart. So errors of two
  periods are uncorrelated, and the mean error of a window, which meets the window's
  comparator, has a standard deviation of at most
  :math:`\min(1, \sqrt{P/M})\sqrt V`.
* The step :math:`\Delta_t` is correlated with the error only as far as it has moved since
  the restart: by at most :math:`(t - t_0)\eta G`, and it is at most D.

Hence :math:`\gamma = \min(1, \sqrt{P/M}) + \frac1P\sum_{r<P}\min(1, r\eta G/D)`, which is
:math:`1/\sqrt M` for fresh estimates at every step, and nearly 2 for P above M.

References:
  Zhang, Tran, Cutkosky, `Private Zeroth-Order Nonsmooth Nonconvex Optimization
  <https://arxiv.org/abs/2406.19579>`_, 2024, section 4.
  Kornowski, Liu, Talwar, `Improved Sample Complexity for Private Nonsmooth Nonconvex
  Optimization <https://arxiv.org/abs/2410.05880>`_, 2025, section 3.
  Pinelis, Optimum Bounds for the Distributions of Martingales in Banach Spaces, Annals of
  Probability 22, 1994.
  Meckes, The Random Matrix Theory of the Classical Compact Groups, 2019, chapter 5: the
  logarithmic Sobolev constant 4 / (d - 2) of rotations.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import gammaln

Direction = Literal["orthonormal", "sphere"]
Difference = Literal["antithetic", "one_sided", "independent"]

DIRECTIONS: tuple[Direction, ...] = ("orthonormal", "sphere")
DIFFERENCES: tuple[Difference, ...] = ("antithetic", "one_sided", "independent")

#: Probability that any clip is active, where clips rest on concentration.
FAILURE = 1e-6

#: A number, or an array of them: a search asks for many settings at once.
Number = Any

#: E r^2 / D^2 of two queries r apart, (1 - s) D and s' D long with uniform s and s'.
_MOVEMENT = 7 / 6


# --- the smoothed loss and its estimators --------------------------------------------


def kappa(dim: int) -> float:
    r"""The gradient of :math:`\hat F` is :math:`\kappa L/\delta`-Lipschitz, and no better.

    .. math:: \kappa_d = 2\,\Gamma(d/2 + 1) / (\sqrt\pi\,\Gamma((d+1)/2))

    It is 1 at d = 1 and grows as sqrt(2 d / pi).
    """
    if dim > 10**6:  # Where the logarithms would cancel; the error is of order 1/d^2.
        return math.sqrt((2 * dim + 1) / math.pi)
    log = float(gammaln(dim / 2 + 1) - gammaln((dim + 1) / 2))
    return 2 / math.sqrt(math.pi) * math.exp(log)


class Moments(NamedTuple):
    """Of one record's estimate, in units of L^2.

    Attributes:
      total: its second moment, of which only the true mean's square is not error. A mean
        over B independent records and directions has an error of at most total / B.
      direction: how much of the error of the population's own estimate is due to the
        directions, which records that share them do not average out.
    """

    total: Number
    direction: Number

    def of_mean(self, batch_size: Number, share_directions: bool) -> Number:
        """Expected squared error of the mean over a batch, in units of L^2."""
        error = self.total / batch_size
        if share_directions:
            error = error + (1 - 1 / batch_size) * self.direction
        return error


def _slope(dim: int) -> float:
    """E c^2 / L^2 of a score of GRAD: the spectral gap of the sphere is d - 1."""
    return dim**2 / (dim - 1) if dim > 1 else 1.0


def grad_moments(dim: int, num_directions: int, direction: Direction) -> Moments:
    r"""Of GRAD, :math:`\frac{d}{2\delta m}\sum_j (f(x+\delta u_j) - f(x-\delta u_j)) u_j`.

    An odd Lipschitz function on the sphere has variance L^2 / (d - 1) at most, by
    Poincare. The vectors of orthonormal directions add in squares; independent ones have
    the mean's square besides. For d = 1 the estimate is exact.
    """
    mean = _slope(dim) / num_directions
    spread = mean if dim > 1 else 0.0
    if direction == "sphere":
        mean += 1 - 1 / num_directions
    return Moments(mean, spread)


def diff_moments(
    dim: int,
    num_directions: int,
    direction: Direction,
    difference: Difference,
    reach: Number,
) -> Moments:
    r"""Of DIFF, between two queries of a run.

    With the directions common to both points a score is at most :math:`dLr/\delta`;
    with independent ones the scatter of both ends stays, however near they are.

    Args:
      dim: d.
      num_directions: m.
      direction: law of the directions.
      difference: how the two points share them.
      reach: D / delta, the longest step over the smoothing radius.
    """
    square = _MOVEMENT * np.square(reach)  # E r^2 / delta^2
    smooth = kappa(dim) ** 2 * square
    if difference == "independent":
        spread = 2 * grad_moments(dim, num_directions, direction).direction
        return Moments(spread + smooth, spread + 0 * square)
    spread = dim**2 / num_directions * square
    if direction == "sphere":
        return Moments(spread + (1 - 1 / num_directions) * smooth, spread)
    return Moments(spread, spread)


# --- clips that leave every Lipschitz loss alone -------------------------------------


def grad_clip(
    dim: int, num_directions: int, direction: Direction, failure: float | None = None
) -> float:
    r"""C1 / L: no record's GRAD is longer, surely or but for a probability.

    Surely: :math:`d` if directions may coincide. Orthonormal ones: d sqrt(q) / m, since
    two scores together are at most sqrt(2) d.

    With probability, the least of those and of bounds by concentration. Orthonormal
    directions: all scores are small, by Levy's inequality; or their norm is near its
    mean, as a d-Lipschitz function on the rotations. Independent ones: all scores are
    small; or the mean's deviation is, by Bernstein's inequality in Hilbert space.

    Args:
      dim: d.
      num_directions: m, at most d if orthonormal.
      direction: law of the directions.
      failure: probability for one record that the bound is exceeded; None for surely.
    """
    d, m = dim, num_directions
    if direction == "orthonormal":
        sure = d / m * math.sqrt(max(m / 2, 1 + (m - 1) * (math.sqrt(2) - 1) ** 2))
    else:
        sure = float(d)
    if failure is None or d < 3:
        return sure
    largest = d * math.sqrt(2 * math.log(2 * m / failure) / (d - 1))
    if direction == "orthonormal":
        mean = d / math.sqrt(m * (d - 1))
        near = mean + d / m * math.sqrt(8 * math.log(1 / failure) / (d - 2))
        return min(sure, largest / math.sqrt(m), near)
    return min(sure, largest, 1 + _deviation(d, m, failure))


def _deviation(dim: int, num_directions: int, failure: float, points: int = 1) -> float:
    """How far a mean over independent directions is from its own mean, over L.

    Pinelis' form of Bernstein's inequality. A term is at most d + 1, which gives the scale
    (d + 1) / 3; and its norm is sub-Gaussian with d / sqrt(d - 1), of which the moments
    give 3 d / sqrt(d - 1).
    """
    variance = _slope(dim)
    scale = min((dim + 1) / 3, 3 * math.sqrt(variance))
    share = math.log(2 / failure) / num_directions
    a = scale * share
    return a + math.sqrt(a**2 + 2 * points * variance * share)


def diff_clip(
    dim: int,
    num_directions: int,
    direction: Direction,
    difference: Difference,
    movement: Number,
    failure: float | None = None,
) -> Number:
    r"""C2 / L: no record's DIFF is longer, surely or but for a probability.

    With common directions it is proportional to the movement: d r / delta surely, over
    sqrt(m) if they are orthonormal. With independent ones it is twice GRAD's, and does
    not vanish with the movement.

    Args:
      dim: d.
      num_directions: m.
      direction: law of the directions.
      difference: how the two points share them.
      movement: r / delta, the distance of the points over the smoothing radius.
      failure: probability for one record that the bound is exceeded; None for surely.
    """
    d, m = dim, num_directions
    smooth = kappa(d) * movement
    if difference == "independent":
        each = None if failure is None else failure / 2
        bound = 2 * grad_clip(d, m, direction, each) + 0 * smooth
        if direction == "sphere" and failure is not None and d > 1:
            bound = np.minimum(bound, smooth + _deviation(d, m, failure, points=2))
        return bound
    if direction == "orthonormal":
        return d / math.sqrt(m) * movement
    bound = d * movement
    if failure is not None:
        # McDiarmid: one direction moves the norm by 2 d r / (delta m).
        spread = d / math.sqrt(m) * (1 + math.sqrt(2 * math.log(1 / failure)))
        bound = np.minimum(bound, smooth + spread * movement)
    return bound


# --- windows and records -------------------------------------------------------------


def window_radius(window: Number, reset: bool) -> Number:
    """How far a query can be from its window's mean, in units of the longest step D.

    Attained by a straight line. With a reset the window's first step does not move.

    Args:
      window: M, at least 2 with a reset: one query of a window that starts at rest is
        its own mean.
      reset: whether a window starts at rest.
    """
    return (window + 1) / 2 - (2 if reset else 1) / window


def num_steps(
    num_examples: int, period: int, restart_batch_size: Number, batch_size: Number
) -> Number:
    """T: how many steps a single pass allows, the last period being cut."""
    rest = period - 1
    cost = restart_batch_size + rest * batch_size
    whole = num_examples // cost
    left = num_examples - whole * cost
    partial = 1 + (left - restart_batch_size) // batch_size
    return whole * period + np.where(left >= restart_batch_size, partial, 0)


# --- the bound -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Promise:
    """The guarantee on a run's output, and what it is the sum of.

    L bounds the norm always, so a larger bound says nothing.

    Attributes:
      bound: on the expected least norm in the Goldstein subdifferential at the output.
      goldstein_radius: radius of the subdifferential: twice the smoothing radius.
      start: (gap + L * smoothing radius) / (D K M).
      regret: of the online learner against the best step of each window.
      estimation: errors of the releases.
      clip_bias: for clips that a Lipschitz loss can exceed with some probability.
      restart_variance: what the restarts' batches leave of V, the expected squared error
        of a release.
      difference_variance: what the differences add to V until the end of a period.
      noise_variance: what the noise adds.
      learning_rate: eta, the learner's step size that the bound is about.
    """

    bound: float
    goldstein_radius: float
    start: float
    regret: float
    estimation: float
    clip_bias: float
    restart_variance: float
    difference_variance: float
    noise_variance: float
    learning_rate: float

    def __str__(self) -> str:
        return (
            f"E|grad| <= {self.bound:.4g} at Goldstein radius "
            f"{self.goldstein_radius:.4g} (start {self.start:.3g}, regret "
            f"{self.regret:.3g}, estimation {self.estimation:.3g}, clips "
            f"{self.clip_bias:.3g}; variance: restarts {self.restart_variance:.3g}, "
            f"differences {self.difference_variance:.3g}, noise "
            f"{self.noise_variance:.3g})"
        )


def promise(
    *,
    dim: int,
    lipschitz: float,
    initial_gap: float,
    radius: float,
    num_directions: int,
    direction: Direction,
    difference: Difference,
    share_directions: bool,
    period: int,
    restart_batch_size: Number,
    batch_size: Number,
    window: Number,
    num_windows: Number,
    max_step: Number,
    reset: bool,
    noise_variance: Number,
    clip_bias: float = 0.0,
    rate_factor: float | None = None,
) -> Promise:
    r"""The bound for any setting; no more than what a run does enters it.

    Args:
      dim: d.
      lipschitz: L > 0, of every record's loss.
      initial_gap: F at the start above its infimum, >= 0.
      radius: delta, the smoothing radius; no query may be further from its window's mean.
      num_directions: m.
      direction: law of the directions.
      difference: how DIFF's points share them.
      share_directions: whether the records of a batch do.
      period: P, steps from one restart of the oracle to the next.
      restart_batch_size: records of a period's first step.
      batch_size: records of each other step.
      window: M, queries that one output is the mean of.
      num_windows: K. Steps behind the last whole window count for nothing.
      max_step: D.
      reset: whether the learner starts at rest in every window.
      noise_variance: d times the largest variance of the noise on one coordinate of a
        release.
      clip_bias: upper bound for the difference that clipping makes.
      rate_factor: eta G sqrt(M) / D; None takes the best, 1 with a reset and 2 without.

    Returns:
      A promise; its fields are arrays where arguments are.

    Raises:
      ValueError: a window that leaves the ball of the radius.
    """
    reach = window_radius(window, reset) * max_step
    if np.any(reach > radius * (1 + 1e-9)):
        raise ValueError(
            f"max_step must be such that no query of a window is further than radius = "
            f"{radius!r} from their mean, got {max_step!r}, which reaches {reach!r}"
        )
    grad = grad_moments(dim, num_directions, direction)
    diff = diff_moments(dim, num_directions, direction, difference, max_step / radius)
    square = lipschitz**2
    restarts = square * grad.of_mean(restart_batch_size, share_directions)
    differences = square * (period - 1) * diff.of_mean(batch_size, share_directions)
    error = np.sqrt(restarts + differences + noise_variance)
    # Only a fresh estimate is known to be uncorrelated with the gradient.
    size = np.hypot(lipschitz, error) if period == 1 else lipschitz + error

    root = np.sqrt(window)
    span = 1 if reset else 2  # |Delta_1 - u| <= span * D
    h = span if rate_factor is None else rate_factor
    start = (initial_gap + lipschitz * radius) / (max_step * num_windows * window)
    regret = (span**2 / h + h) / 2 * size / root
    estimation = (
        np.minimum(1, np.sqrt(period) / root) + _moved(period, h / root)
    ) * error
    return Promise(
        bound=start + regret + estimation + clip_bias,
        goldstein_radius=2 * radius,
        start=start,
        regret=regret,
        estimation=estimation,
        clip_bias=clip_bias,
        restart_variance=restarts,
        difference_variance=differences,
        noise_variance=noise_variance,
        learning_rate=h * max_step / (size * root),
    )


def _moved(period: int, rate: Number) -> Number:
    """The mean of min(1, r * rate) over r < period."""
    below = np.minimum(period - 1, np.floor(1 / rate))
    return (rate * below * (below + 1) / 2 + period - 1 - below) / period
