r"""PLD of Gaussian sums over random subsets of one size, which dp-accounting lacks.

A batch holds a given record with probability :math:`q`, its size over that of the data set.
If a mechanism's outputs on neighbours under replace-one are at most as far apart as
:math:`(P, Q)` and :math:`(Q, P)`, those over random batches have the profile

.. math:: h(\alpha) = H_\alpha((1-q)Q + qP \,\|\, Q) = q H_a(P \,\|\, Q),
          \quad \alpha = 1 + q (a - 1) \ge 1,

and :math:`h(\alpha) = \alpha h(1/\alpha) + 1 - \alpha` below 1, since the relation is
symmetric. It is attained at every :math:`\alpha`, and is the profile of one pair, which
composes adaptively. For vectors, too: nothing is asked of the mechanism but (P, Q).

*Proof.* A batch without the record is one batch of the others, S, and a batch with it is
such an S with the record in the place of one, chosen uniformly. Given S and the place, let
A be the output on S, and B and B' those with either value of the record: any two of them
are outputs on neighbours. With :math:`\beta = \alpha / a`, which is at most 1,

.. math::
  H_\alpha((1-q)A + qB \,\|\, (1-q)A + qB') = q H_a(B \,\|\, (1-\beta)A + \beta B')
  \le q H_a(P \,\|\, Q)

by collecting terms, and convexity. The mixture over S and the place is convex again.

References:
  Zhu, Dong and Wang, `Optimal Accounting of Differential Privacy via Characteristic
  Function <https://arxiv.org/abs/2106.08567>`_, 2022; Balle, Barthe and Gaboardi, `Privacy
  Amplification by Subsampling <https://arxiv.org/abs/1807.01647>`_, 2018.
"""

import math

import dp_accounting as dp
import numpy as np
from dp_accounting import pld
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import log_ndtr, ndtri_exp

#: Logarithm of the mass of losses that count as infinite, as in dp-accounting.
_LOG_TAIL = -50.0
#: Beyond this interval between losses, exponentials of one overflow: no privacy is left.
_WIDEST = 500.0


def sampled(leaf: dp.DpEvent) -> tuple[float, float] | None:
    """Returns sampling probability and multiplier of random subsets' Gaussian, or None.

    The multiplier is relative to 2C, the distance of a replaced record.
    """
    match leaf:
        case dp.SampledWithoutReplacementDpEvent(
            event=dp.GaussianDpEvent(noise_multiplier=m)
        ):
            return leaf.sample_size / leaf.source_dataset_size, m
    return None


def deltas(q: float, mu: float, epsilons: np.ndarray) -> np.ndarray:
    """Computes the profile h of one step at ``exp(epsilons)``.

    Args:
      q: sampling probability in (0, 1].
      mu: > 0, distance of the Gaussians P and Q in standard deviations.
      epsilons: >= 0, float64.
    """
    small = np.minimum(epsilons, 1.0)
    inner = np.where(
        epsilons < 1.0,
        np.log1p(np.expm1(small) / q),
        epsilons - math.log(q) + np.log1p((q - 1) * np.exp(-epsilons)),
    )
    upper = log_ndtr(mu / 2 - inner / mu)
    lower = inner + log_ndtr(-mu / 2 - inner / mu)
    return -q * np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0))


def distribution(q: float, mu: float, interval: float) -> PrivacyLossDistribution:
    """Discretises the losses of one step, pessimistically: Connect-the-Dots.

    The pair is symmetric, so the mass at minus a loss is exp(-loss) times that at the loss.
    That keeps the total at 1, where differences of deltas near 1 - exp(epsilon) would not.
    """
    inner = mu * (mu / 2 - float(ndtri_exp(_LOG_TAIL)))
    largest = np.logaddexp(math.log1p(-q), math.log(q) + inner) if q < 1 else inner
    last = max(math.ceil(largest / interval), 1)
    losses = np.arange(last + 1) * interval
    curve = np.minimum.accumulate(deltas(q, mu, losses))
    steps = np.diff(curve)
    grown = math.expm1(interval)
    inside = (steps[1:] - math.exp(interval) * steps[:-1]) / grown
    above = np.maximum(np.append(inside, steps[-1] / math.expm1(-interval)), 0.0)
    below = above * np.exp(-losses[1:])
    # Denormals overflow dp-accounting's sums. What is left out goes up, to 0.
    below[below < 1e-250] = 0.0
    beyond = float(curve[-1])
    rest = max(1.0 - beyond - float(above.sum() + below.sum()), 0.0)
    masses = np.concatenate([below[::-1], [rest], above])
    places = range(-last, last + 1)
    table = dict(zip(places, masses, strict=True))
    return PrivacyLossDistribution(
        pld_pmf.create_pmf(table, interval, beyond, pessimistic_estimate=True)
    )


class PLDAccountant(pld.PLDAccountant):
    """PLD accountant of dp-accounting that takes Gaussians over random subsets, too."""

    def _maybe_compose(self, event: dp.DpEvent, count: int, do_compose: bool):
        found = sampled(event)
        swapped = self.neighboring_relation is dp.NeighboringRelation.REPLACE_ONE
        if found is None or not swapped:
            return super()._maybe_compose(event, count, do_compose)
        if do_compose:
            q, multiplier = found
            interval = self._value_discretization_interval
            if multiplier == 0 or interval > _WIDEST:
                self._contains_non_dp_event = True
            elif q > 0:
                one = distribution(q, 1 / multiplier, interval)
                self._pld = self._pld.compose(one.self_compose(count))
        return None
