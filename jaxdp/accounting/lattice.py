r"""Privacy cost of sampling integer noise from a law that is close to the ideal one.

Let :math:`\ell = \log(\tilde P/P)` compare a drawn number's law with the ideal discrete
Gaussian's, where that is within :data:`~jaxdp.kernels.lattice_gaussian.REACH` standard
deviations. ``lattice_gaussian`` states a constant :math:`v` for every deviation,
:math:`\mathbb E[\ell^2 e^{a|\ell|}] \le v` for :math:`a` up to ``ORDER``. Of N numbers,
drawn adaptively, the sum of the :math:`\ell` exceeds

.. math:: L = \min_{a \le \mathrm{ORDER}} \frac{(a + 1) N v}2 + \frac{\log(1/\beta)}a

with probability at most :math:`\beta` (Chernoff), and so does minus the sum under the ideal
law: the means, two divergences of at most :math:`v/2` a number, are in the first term. Let
A be a run on one data set and B on its neighbour, as they are drawn, and A', B' with ideal
noise. Outputs at which a number of B would lie beyond the reach are set aside: on A they
have the probability that a number lies there, after a record moved it. On the others, but
for those of probability :math:`\beta` where a bound fails,

.. math:: A(S) \le e^L A'(S) \le e^L (e^\varepsilon B'(S) + \delta)
          \le e^{\varepsilon + 2L} B(S) + e^L \delta.

The second failure happens under B' and counts :math:`e^{\varepsilon + L}\beta`: with
:math:`\beta = 10^{-40}` both together are below 2e-18 for every epsilon up to 50. A record
moves the numbers of a step by no more than one over the noise multiplier in all, so the
edge has about the probability of N numbers at rest and of one a step that is moved all the
way; what many small moves have more is far below the 2e-18.

Batches, as sets, are within 2**-179 of the sampler's law in total variation, each given
those before (:mod:`jaxdp.kernels.subset`: random subsets, and which of records with equal
words). As above that costs :math:`T 2^{-179} (1 + e^{\varepsilon+L})` of delta in T steps:
below 1e-22 for every T that a counter of steps holds and every epsilon up to 50, of which
the 2e-18 has room for 1e-18. Every guarantee of such batches is a :func:`drawn` one:
sampled Laplace noise, which may ask for delta = 0, is of batches that are as large as the
data set.
"""

import math
from typing import Any

import attr
import dp_accounting as dp
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy.special import ndtr

from jaxdp.accounting.basics import Guarantee
from jaxdp.core import validate
from jaxdp.kernels import lattice_gaussian

_BETA = 1e-40
_FAILURES = 2e-18  # What both bounds may fail, up to an epsilon of 50.


@attr.s(frozen=True, auto_attribs=True, eq=False)
class LatticeDpEvent(dp.SelfComposedDpEvent):
    """An event whose noise was drawn by ``kernels.lattice_gaussian``.

    To other accountants it is the event with ideal noise, and equal to it; those of this
    package add what the sampler costs.

    Attributes:
      sampler_epsilon: added to epsilon.
      sampler_delta: added to delta.
    """

    sampler_epsilon: float = 0.0
    sampler_delta: float = 0.0

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, dp.SelfComposedDpEvent):
            return NotImplemented
        return (self.event, self.count) == (other.event, other.count)

    def __hash__(self) -> int:
        return hash(dp.SelfComposedDpEvent(self.event, self.count))


def drawn(
    guarantee: Guarantee, *, num_steps: int, numbers_per_step: int, reach: float
) -> Guarantee:
    """Returns the guarantee of a run with noise from ``kernels.lattice_gaussian``.

    Args:
      guarantee: of the run with ideal noise.
      num_steps: >= 1.
      numbers_per_step: noised numbers of a step, >= 1.
      reach: how far one record moves a step's numbers, in standard deviations.
    """
    validate.integer(num_steps=num_steps, numbers_per_step=numbers_per_step)
    if isinstance(guarantee.event, dp.NonPrivateDpEvent):
        return guarantee
    count = num_steps * numbers_per_step
    spent = 2 * closeness(count)
    edge = lattice_gaussian.REACH
    beyond = 2 * (count * ndtr(-edge) + num_steps * ndtr(-max(edge - reach, 0.0)))
    delta = min(float(beyond) + _FAILURES, 1.0)
    event, times = guarantee.event, 1
    if type(event) is dp.SelfComposedDpEvent:
        event, times = event.event, event.count
    return Guarantee(
        LatticeDpEvent(event, times, spent, delta), guarantee.event_relation
    )


def closeness(count: int) -> float:
    """Returns L, the bound on the sum of the log ratios of ``count`` drawn numbers."""
    spread, log = lattice_gaussian.MEAN_SQUARE, -math.log(_BETA)
    order = min(lattice_gaussian.ORDER, math.sqrt(2 * log / (count * spread)))
    return count * spread * (order + 1) / 2 + log / order


def sampler_error(event: dp.DpEvent) -> tuple[float, float]:
    """Returns the epsilon and delta that the samplers of an event's noise cost in all.

    Of a random number of runs, of which one is selected: no law that
    :func:`jaxdp.accounting.repeat_and_select` knows has more than ``200 mean
    (1 + log(mean))`` of them but with probability 1e-30, and the bound on so many runs'
    log ratios is at most their root times that of one, and a hundredth.
    """
    if isinstance(event, LatticeDpEvent):
        epsilon, delta = sampler_error(event.event)
        return (
            event.count * epsilon + event.sampler_epsilon,
            event.count * delta + event.sampler_delta,
        )
    if isinstance(event, dp.SelfComposedDpEvent):
        epsilon, delta = sampler_error(event.event)
        return event.count * epsilon, event.count * delta
    if isinstance(event, RepeatAndSelectDpEvent):
        epsilon, delta = sampler_error(event.event)
        most = 200 * event.mean * (1 + math.log(event.mean))
        return 1.01 * math.sqrt(most) * epsilon, most * delta
    if isinstance(event, dp.ComposedDpEvent):
        parts = [sampler_error(part) for part in event.events]
        return sum(p[0] for p in parts), sum(p[1] for p in parts)
    inner = getattr(event, "event", None)  # Of a sample: closeness is not amplified.
    return sampler_error(inner) if isinstance(inner, dp.DpEvent) else (0.0, 0.0)


def ideal(event: dp.DpEvent) -> dp.DpEvent:
    """Returns the event with ideal noise, for which :func:`sampler_error` is zero."""
    if isinstance(event, dp.SelfComposedDpEvent):
        return dp.SelfComposedDpEvent(ideal(event.event), event.count)
    if isinstance(event, dp.ComposedDpEvent):
        return dp.ComposedDpEvent([ideal(part) for part in event.events])
    inner = getattr(event, "event", None)
    return (
        attr.evolve(event, event=ideal(inner))  # pyright: ignore[reportArgumentType]
        if isinstance(inner, dp.DpEvent)
        else event
    )
