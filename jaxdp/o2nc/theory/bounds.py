r"""Convergence bounds of O2NC with an oracle that restarts, as plain numbers.

Every record's loss is L-Lipschitz; nothing else is assumed. F is their mean over the
population, :math:`\hat F` its mean over a ball of radius :math:`\delta`, the smoothing
radius, and h the gap: F at the start above its infimum. The output is the mean
:math:`\bar w` of a random window of M query points, none of them further than
:math:`\delta` from it, so that the mean gradient of :math:`\hat F` over the window bounds
the least norm in the Goldstein subdifferential of F at radius :math:`2\delta`:

.. math::
  \mathbb E\|\partial_{2\delta} F(\bar w)\| \le \frac{h + L\delta}{D K M}
    + c_R \frac{G}{\sqrt M} + \gamma \sqrt V + \beta L + \Gamma,
  \qquad \mathbb E\|\tilde g_t - \nabla\hat F(w_t)\|^2 \le V,
  \quad \mathbb E\|\tilde g_t\|^2 \le G^2 .

K windows, D the longest step. The terms are ``start``, ``regret``, ``estimation``,
``clip_bias`` and ``generalisation`` of :class:`GoldsteinPromise`, where V is split as well.

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

**Several passes.** If every step reads all n records, the same holds with the mean loss
:math:`F_n` of these records for F: h is its gap, and given the records only directions and
noise make errors, which start anew in every period as above. A point of the window has the
gradients of :math:`\hat F_n` and :math:`\hat F` at most :math:`\Gamma` apart, wherever the
run, which has seen the records, has gone: so does the window's mean, and it is the
population's :math:`\|\nabla\hat F\|` that bounds Goldstein's subdifferential at radius
:math:`2\delta`. With queries in a ball of radius R about a start that knows no record,

.. math:: \Gamma = \mathbb E\sup_w\|\nabla\hat F_n(w) - \nabla\hat F(w)\| \le
  \frac L{\sqrt n}\Bigl[2 + \sqrt{2d\ln(1 + 4R\kappa\sqrt n/\delta)}\Bigr] .

At one point the norm is at most :math:`L/\sqrt n` in expectation, and sub-Gaussian about it
with :math:`L/\sqrt n` (McDiarmid: a record moves it by 2 L / n); a net of radius
:math:`\delta/(2\kappa\sqrt n)` and the smoothness of :math:`\hat F_n - \hat F` do the rest.
Without smoothing there is no such bound (the second paper's Proposition 5.1 is false): on
the line, with slopes 0 and 1 by the toss of a coin for each record and each of
:math:`N \gg 2^n` small cells, F has slope 1/2 everywhere, and :math:`F_n` slope 0 in some
cell, for every n.

Source: Zhang, Tran & Cutkosky, ICLR 2024, section 4; Kornowski, Liu & Talwar, ICML 2025,
sections 3 to 6.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxdp.core import display, validate
from jaxdp.mechanism.design import PopulationConstants
from jaxdp.o2nc.theory.estimators import Estimator, Number, kappa

#: Probability that any clip is active, where clips rest on concentration.
FAILURE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants(PopulationConstants):
    """Checked constants of a problem: the data, the budget, and the loss.

    Attributes:
      initial_gap: F at the start above its infimum, >= 0, in expectation; in several
        passes, of the records' mean loss. A public bound, not computed from the records.
      smoothing_radius: of the smoothed loss, > 0; what is proven is about Goldstein's
        subdifferential at twice that.
    """

    initial_gap: float
    smoothing_radius: float

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(smoothing_radius=self.smoothing_radius)
        validate.non_negative(initial_gap=self.initial_gap)


class Schedule(NamedTuple):
    """Lengths, batches and step of a run; arrays where many are compared at once.

    Attributes:
      period: P, steps from one restart of the oracle to the next.
      restart_batch_size: records of a period's first step; n if ``multi_pass``.
      batch_size: records of each other step; n if ``multi_pass``.
      window: M, queries that one output is the mean of.
      num_windows: K. Steps behind the last whole window count for nothing.
      max_step: D.
      reset: whether the learner starts at rest in every window.
      multi_pass: whether every step reads all records.
      scale_with_movement: whether bound and noise of a difference are proportional to the
        movement; only in several passes.
      prefix_noise: name of the noise kernel of a single pass.
    """

    period: Number
    restart_batch_size: Number
    batch_size: Number
    window: Number
    num_windows: Number
    max_step: Number
    reset: bool = True
    multi_pass: bool = False
    scale_with_movement: bool = False
    prefix_noise: str = "independent"

    @property
    def num_steps(self) -> Number:
        """Number T of queries in whole windows."""
        return self.window * self.num_windows


# --- windows and records -------------------------------------------------------------


def window_radius(window: Number, reset: bool) -> Number:
    """Returns the largest distance of a query from its window's mean, in units of D.

    D is the longest step. A straight line attains it. With a reset the window's first
    step does not move, and M is at least 2: one query alone is its own mean.
    """
    return (window + 1) / 2 - (2 if reset else 1) / window


def num_steps(
    num_examples: int, period: int, restart_batch_size: Number, batch_size: Number
) -> Number:
    """Returns T, the number of steps of a single pass; its last period may be cut."""
    rest = period - 1
    cost = restart_batch_size + rest * batch_size
    whole = num_examples // cost
    left = num_examples - whole * cost
    partial = 1 + (left - restart_batch_size) // batch_size
    return whole * period + np.where(left >= restart_batch_size, partial, 0)


# --- the records and the population --------------------------------------------------


def generalisation(
    dim: int,
    num_examples: int,
    lipschitz: float,
    radius: float,
    reach: Number,
    failure: float | None = None,
) -> Number:
    r"""Bounds the uniform deviation of n records' smoothed gradient from the population's.

    It bounds the supremum over a ball of radius ``reach``, whose centre must not depend on
    the records, by at most 2 L: in expectation, or but for a probability ``failure``. Then
    :math:`2\ln(1/\text{failure})` stands under the root as well.
    """
    root = np.sqrt(num_examples)
    points = dim * np.log1p(4 * reach * kappa(dim) * root / radius)  # ln of the net's
    if failure is not None:
        points = points + np.log(1 / failure)
    return lipschitz * np.minimum(2.0, (2 + np.sqrt(2 * points)) / root)


# --- the bound -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GoldsteinPromise:
    """Bound on the output's Goldstein stationarity, and the terms that it is the sum of.

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
      generalisation: what n records that are read in every step can differ from the
        population by. 0 for a single pass, whose steps meet fresh records.
      rounding: of records' estimates to the grid, which several passes, with many rows and
        much noise, leave coarser. In a single pass the bound is of real arithmetic: there
        the grid mostly has its full 16 bits.
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
    generalisation: float = 0.0
    rounding: float = 0.0

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        return display.fields(self)

    def __str__(self) -> str:
        records = f", generalisation {self.generalisation:.3g}"
        records += f", rounding {self.rounding:.3g}"
        return (
            f"E|grad| <= {self.bound:.4g} at Goldstein radius "
            f"{self.goldstein_radius:.4g} (start {self.start:.3g}, regret "
            f"{self.regret:.3g}, estimation {self.estimation:.3g}, clips "
            f"{self.clip_bias:.3g}{records if self.generalisation else ''}; variance: "
            f"restarts {self.restart_variance:.3g}, differences "
            f"{self.difference_variance:.3g}, noise {self.noise_variance:.3g})"
        )


def promise(
    c: Constants,
    e: Estimator,
    s: Schedule,
    *,
    noise_variance: Number,
    clip_bias: Number = 0.0,
    rate_factor: float | None = None,
    rounding: Number = 0.0,
) -> GoldsteinPromise:
    r"""Computes the bound and its terms for any schedule.

    Args:
      c: the problem.
      e: how gradients are estimated.
      s: the run; no query may be further than the radius from its window's mean.
      noise_variance: d times the largest variance of the noise on one coordinate of a
        release.
      clip_bias: upper bound for the difference that clipping makes.
      rate_factor: eta G sqrt(M) / D; None takes the best, 1 with a reset and 2 without.
      rounding: by how much the grid may shorten an estimate: a bias, which meets
        :math:`\|\Delta_t - u\| \le 2D` in every step.

    Returns:
      A promise; its fields are arrays where the schedule's are.

    Raises:
      ValueError: a window that leaves the ball of the radius.
    """
    radius, lipschitz, share = c.smoothing_radius, c.lipschitz, e.share_directions
    reach = window_radius(s.window, s.reset) * s.max_step
    if np.any(reach > radius * (1 + 1e-9)):
        raise ValueError(
            f"max_step must be such that no query of a window is further than radius = "
            f"{radius!r} from their mean, got {s.max_step!r}, which reaches {reach!r}"
        )
    grad, diff = e.grad_moments(c.dim), e.diff_moments(c.dim, s.max_step / radius)
    if s.multi_pass:
        first = grad.of_all(s.restart_batch_size, share)
        other = diff.of_all(s.batch_size, share)
        # Of D T to the last query; the radius more, for all that is averaged there.
        ball = s.max_step * s.num_windows * s.window + radius
        records = generalisation(c.dim, s.batch_size, lipschitz, radius, ball)
    else:
        first = grad.of_mean(s.restart_batch_size, share)
        other = diff.of_mean(s.batch_size, share)
        records = 0.0
    restarts = lipschitz**2 * first
    differences = lipschitz**2 * (s.period - 1) * other
    error = np.sqrt(restarts + differences + noise_variance)
    # Only a fresh estimate is known to be uncorrelated with the gradient.
    size = np.where(s.period == 1, np.hypot(lipschitz, error), lipschitz + error)
    size = size + rounding

    root = np.sqrt(s.window)
    span = 1 if s.reset else 2  # |Delta_1 - u| <= span * D
    h = span if rate_factor is None else rate_factor
    start = (c.initial_gap + lipschitz * radius) / (
        s.max_step * s.num_windows * s.window
    )
    regret = (span**2 / h + h) / 2 * size / root
    drift = _mean_drift(s.period, h / root)
    estimation = (np.minimum(1, np.sqrt(s.period) / root) + drift) * error
    return GoldsteinPromise(
        bound=start + regret + estimation + clip_bias + records + 2 * rounding,
        goldstein_radius=2 * radius,
        start=start,
        regret=regret,
        estimation=estimation,
        clip_bias=clip_bias,
        restart_variance=restarts,
        difference_variance=differences,
        noise_variance=noise_variance,
        learning_rate=h * s.max_step / (size * root),
        generalisation=records,
        rounding=2 * rounding,
    )


def _mean_drift(period: Number, rate: Number) -> Number:
    """Returns the mean of min(1, r * rate) over r < period."""
    below = np.minimum(period - 1, np.floor(1 / rate))
    return (rate * below * (below + 1) / 2 + period - 1 - below) / period
