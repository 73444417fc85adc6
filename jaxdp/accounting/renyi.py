r"""Renyi divergences of releases at one order, and what they mean as (epsilon, delta).

For the laws P and Q of a step's output on two neighbours, given all that was released
before, and an order :math:`\alpha > 1`,

.. math:: D_\alpha(P \| Q) = \frac1{\alpha-1} \log \mathbb E_Q (P/Q)^\alpha.

Here is a bound on it that holds for every past and both ways round. Steps add up.

* Gaussian sums of distance :math:`\mu`: :math:`\alpha\mu^2/2`. Discrete Gaussians on the
  lattice of the sums have no more (Canonne, Kamath and Steinke, Proposition 5).
* Poisson samples, where a record is blank or absent on one side: the sum of dp-accounting,
  exact at integer orders, where powers of the noise's ratio up to :math:`\alpha` are all
  that it rests on. The other way round is less (Mironov, Talwar and Zhang, Theorem 5).
* Poisson samples, where a record is replaced: the integral over PLD's pair. It is the
  worst at every threshold of the hockey-stick divergence (``docs/concepts/accounting.md``,
  "Sampled vectors"), hence for :math:`D_\alpha`, whose expectation is 1 plus an integral of
  them with weights >= 0.
* Truncated samples: either the other records fill the batch or not, with a probability
  that one record does not change, and which of the two may be shown. If they do, a record
  that is drawn and kept pushes another one out: the pair of a record that is replaced, at
  twice the distance, with a probability of at most that of being drawn. Both probabilities
  are largest in the largest data set. (PLD's pair has the exact probability of being kept
  in the larger of two data sets. In a smaller one it can be larger, which counts at very
  high orders.)
* Random subsets of one size: the integral of :mod:`jaxdp.accounting.subsets`' profile.
* Whatever is purely :math:`\varepsilon`-DP: the divergence of a coin of odds
  :math:`e^\varepsilon` and its opposite (Bun and Steinke, Proposition 3.3).
* The rest is dp-accounting's, where it reads the event as this package does.

References:
  Canonne, Kamath & Steinke, `The Discrete Gaussian for Differential Privacy
  <https://arxiv.org/abs/2004.00010>`_, 2020: also the conversion, Proposition 12. Mironov,
  Talwar & Zhang, `Renyi Differential Privacy of the Sampled Gaussian Mechanism
  <https://arxiv.org/abs/1908.10530>`_, 2019. Bun & Steinke, `Concentrated Differential
  Privacy <https://arxiv.org/abs/1605.02065>`_, 2016.
"""

import math
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant, rdp_privacy_accountant
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom

from jaxdp.accounting import spending, subsets
from jaxdp.accounting.spending import SelectionAccountant

#: Orders that are chosen from: integers, where dp-accounting is exact for samples.
ORDERS = range(2, 1025)
#: Distance in standard deviations beyond which no amplification is claimed.
_FAR = 8.0
#: Standard deviations beyond which nothing is integrated.
_TAIL = 13.0
#: What rounding may take off a logarithm of an expectation, over the order, and of itself.
_ROUNDED, _SHARE = 2.0**-49, 2.0**-44


def total(epsilon: float, delta: float, order: int) -> float:
    """Returns the divergence that implies this epsilon; negative if none does."""
    chance = math.log(delta * order) / (order - 1)
    rounded = 2.0**-50 * (epsilon + abs(chance))
    return epsilon - math.log1p(-1 / order) + chance - rounded


def implied(divergence: float, delta: float, order: int) -> float:
    """Returns the epsilon that a divergence at one order implies at ``delta``."""
    convert = rdp_privacy_accountant.compute_epsilon
    return float(convert([order], [divergence], delta)[0])


def best_order(epsilon: float, delta: float) -> int:
    """Returns the order at which one Gaussian release of least noise fits.

    Where nothing fits at any order that is chosen from, :func:`total` is not above 0 there.
    """
    return max(ORDERS, key=lambda order: total(epsilon, delta, order) / order)


def divergence(event: Any, relation: dp.NeighboringRelation, order: int) -> float:
    """Bounds the Renyi divergence of an event with ideal noise, both ways round.

    Args:
      event: any dp-accounting event.
      relation: the relation under which the event is stated.
      order: >= 2.

    Returns:
      The bound; infinite without noise.

    Raises:
      ValueError: a part of the event has none that is known.
    """
    leaves = spending.leaves_of(event, relation)
    return math.fsum(count * _step(leaf, relation, order) for leaf, count in leaves)


def _step(leaf: dp.DpEvent, relation: dp.NeighboringRelation, order: int) -> float:
    """Returns the least bound known of one occurrence of a basic event."""
    bounds = [_pure(spending.pure_epsilon(((leaf, 1),), relation), order)]
    if isinstance(leaf, dp.GaussianDpEvent):
        bounds.append(order * spending.step_mu(leaf, relation) ** 2 / 2)
    elif sampled := spending.as_gaussian(leaf):
        bounds.append(_sampled(leaf, *sampled, relation, order))
    elif (subset := subsets.sampled(leaf)) and spending.distance(relation) == 2:
        bounds.append(_of_log(_subset(*subset, order), order))
    elif isinstance(leaf, dp.NonPrivateDpEvent):
        return math.inf
    else:
        # What is selected from takes its bound at another order than what is selected.
        several = isinstance(leaf, RepeatAndSelectDpEvent)
        orders = sorted({order, *(RdpAccountant().orders.tolist() if several else ())})
        accountant = SelectionAccountant(orders, relation)
        if spending.supports(accountant, leaf):
            found = accountant.compose(leaf).rdp  # pyright: ignore
            bounds.append(float(found[orders.index(order)]))
        elif bounds == [math.inf]:
            raise ValueError(
                "event must be one whose Renyi divergence is known under "
                f"{relation.name}, got {leaf!r}; a budget whose composition is 'basic' "
                "takes every event that an accountant supports"
            )
    return min(bounds)


def _pure(epsilon: float, order: int) -> float:
    """Computes the largest divergence of what is purely epsilon-DP."""
    if epsilon == math.inf:
        return math.inf

    def log_cosh(x: float) -> float:
        if x < 1:
            return math.log1p(2 * math.sinh(x / 2) ** 2)
        return x + math.log1p(math.exp(-2 * x)) - math.log(2)

    both = log_cosh((order - 0.5) * epsilon) - log_cosh(epsilon / 2)
    return min(both / (order - 1), epsilon)


def _of_log(log_moment: float, order: int) -> float:
    """Converts the logarithm of an expectation that was computed in float64."""
    return (max(log_moment, 0.0) * (1 + _SHARE) + order * _ROUNDED) / (order - 1)


def _sampled(
    leaf: Any, q: float, m: float, relation: dp.NeighboringRelation, order: int
) -> float:
    """Bounds a Gaussian sum over a Poisson sample, truncated or not."""
    if m == 0 or q == 0:
        return math.inf if q else 0.0
    if spending.distance(relation) == 2:
        log_moment = _replaced(q, 1 / m, order)
    else:
        event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(m))
        accountant = RdpAccountant([order]).compose(event)
        log_moment = (order - 1) * float(accountant.rdp[0])  # pyright: ignore
    if isinstance(leaf, dp.TruncatedSubsampledGaussianDpEvent):
        size, others = leaf.truncated_batch_size, leaf.dataset_size - 1
        if full := min(float(binom.sf(size - 1, others, q)), 1 - 2.0**-53):
            pushed = _replaced(q, 2 / m, order)
            parts = math.log1p(-full) + log_moment, math.log(full) + pushed
            log_moment = float(np.logaddexp(*parts))
    return _of_log(log_moment, order)


def _replaced(q: float, shift: float, order: int) -> float:
    """Computes the log expectation of the pair of a record that moves by -shift or shift.

    Drawn with probability q, in noise of standard deviation 1. The trapezoidal rule's
    error falls as exp(-2 pi x / h) with the distance x from the singularities, the zeros of
    the density of Q at x = pi / shift: with these steps h, below 1e-30.
    """
    if q == 0:
        return 0.0
    if q == 1 or shift > _FAR:
        return order * (order - 1) * (2 * shift) ** 2 / 2
    step = min(1 / 8, 1 / (8 * shift))
    # The integrand peaks where P**order / Q**(order - 1) does: at most there.
    x: Any = np.arange(-_TAIL, (2 * order - 1) * shift + _TAIL, step)
    p, r = (
        np.logaddexp(math.log1p(-q), math.log(q) + move * (x - move / 2))
        for move in (shift, -shift)
    )
    scale = math.log(step / math.sqrt(2 * math.pi))
    log_sum: Any = logsumexp(order * p + (1 - order) * r - x**2 / 2)
    return float(log_sum) + scale


def _subset(q: float, m: float, order: int) -> float:
    r"""Computes the log expectation of a Gaussian sum over a random subset.

    With the profile h, :math:`\gamma = 1 + q (e^u - 1)` and the Gaussians' delta at u,

    .. math::
      \mathbb E - 1 = \alpha (\alpha - 1) \int_1^\infty
        (\gamma^{\alpha-2} + \gamma^{-\alpha-1}) h(\gamma) \,d\gamma, \quad
      h(\gamma) = q \,\delta(u).
    """
    if q == 0:
        return 0.0
    mu = 1 / m if m else math.inf
    if q == 1 or mu > _FAR:
        return order * (order - 1) * mu**2 / 2
    intervals = 2 * math.ceil(32 * ((order + 1) * mu + _TAIL))
    t, step = np.linspace(0.0, (order + 1) * mu + _TAIL, intervals + 1, retstep=True)
    u = mu * t
    log_gamma = np.logaddexp(math.log1p(-q), math.log(q) + u)
    powers = np.logaddexp((order - 2) * log_gamma, -(order + 1) * log_gamma)
    weights = np.where(np.arange(intervals + 1) % 2, 4.0, 2.0)  # Simpson's rule.
    weights[[0, -1]] = 1.0
    upper, lower = log_ndtr(mu / 2 - t), u + log_ndtr(-mu / 2 - t)
    with np.errstate(divide="ignore"):  # Of next to no distance.
        log_delta = upper + np.log(-np.expm1(np.minimum(lower - upper, 0.0)))
    log_sum: Any = logsumexp(powers + u + log_delta, b=weights * float(step) * mu / 3)
    both = math.log(order * (order - 1) * q**2)
    return float(np.logaddexp(0.0, both + log_sum))
