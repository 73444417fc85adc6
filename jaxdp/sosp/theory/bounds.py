r"""Guarantee of a certified point, constants that it rests on, and formulas.

A point x is :math:`\alpha`-second-order stationary if

.. math::
  \|\nabla F(x)\| \le \alpha, \qquad \nabla^2 F(x) \succeq -\sqrt{\rho\alpha}\, I ,

with F the mean loss over the population and :math:`\rho` a Lipschitz constant of its
Hessian. A run moves until the estimated gradient is at most ``trigger_norm`` and
tests the curvature there: an *escape*, up to ``escape_steps`` noisy gradient steps of size
1 / ``smoothness`` on a quadratic model. One that stays within ``escape_radius`` is the
certificate.

With gradient and Hessian of the model frozen, an escape is a linear Gaussian recursion.
Along a direction of curvature -c the displacement after t steps is Gaussian, with std

.. math::
  \mathrm{sd}_t = \eta\sigma\sqrt{\frac{a^{2t} - 1}{a^2 - 1}},
  \qquad \eta = \frac1M,\quad a = 1 + \eta c ,

whatever its mean is, so that an escape of t steps stays within a radius r with probability
at most :math:`\mathrm{erf}(r / (\sqrt2\,\mathrm{sd}_t))`.

*Whose constants.* Privacy rests on none: each record's contribution is clipped. A
certificate rests on no clip acting, for the mean of clipped records is another mean. So G
and M are of *every record*, wherever the run asks: G bounds its gradient, M the change of
that over a distance of 1 and its Hessian times a unit vector. They bound deviations from
the mean too.

:math:`\rho` is of the *expected* Hessian :math:`\nabla^2F` where an escape has records of
its own (``"on_demand"``, ``"released"``). Proof. Suppose an escape begins at x, and
:math:`\nabla^2F(x)` has a unit eigenvector v of an eigenvalue below
:math:`-\sqrt{\rho\alpha}`. Both are determined before the escape's records are read. So the
numbers :math:`v^\top\nabla^2f_i(x)v` of these are independent, in [-M, M], of a mean below
:math:`-\sqrt{\rho\alpha}`. Their own mean is below :math:`-\sqrt{\rho\alpha} + \chi`, but
for the probability of Hoeffding's inequality; then the mean Hessian H of these records has
an eigenvalue below that, and the law above bounds how probable it is that the escape stays.
Gradient and H are those of x until it ends: Hessians at two points are never compared, and
:math:`\rho` enters as a number alone. The two inequalities above are thus proven for *any*
:math:`\rho > 0`. They are :math:`\alpha`-second-order stationarity where :math:`\rho` is a
Lipschitz constant of :math:`\nabla^2F`. The least of every record's is one (a mean changes
by no more than its terms can), and often far from the best.

A ``"tracked"`` Hessian is different: it adds changes of records' Hessians from point to
point, each clipped to :math:`\rho` times the distance or a little more. There
:math:`\rho` is of *every record's* Hessian.

References:
  Liu, Talwar, `Adaptive Batch Size for Privately Finding Second-Order Stationary Points
  <https://arxiv.org/abs/2410.07502>`_, 2025.
"""

import dataclasses
import math
import statistics
from typing import Literal

from jaxdp.core import display, validate
from jaxdp.mechanism.design import PopulationConstants

#: Squares of smaller probabilities are no floats.
_LEAST_FAILURE = 1e-150
#: Of a clip, what :func:`jaxdp.kernels.clip.to_grid` takes off a row that reaches it.
_MARGIN = 2.0**-18

Basis = Literal["constants", "deviations", "rate"]

_BASES: dict[Basis, str] = {
    "constants": "proven for these constants",
    "deviations": "if no sampling error is far above its typical size",
    "rate": "a rate, its hidden constants read as 1",
}


@dataclasses.dataclass(frozen=True)
class PrintedNoise:
    """Values of the paper's formulas that no plan uses: such noise is not private.

    Attributes:
      escapes_per_refresh: tau, below 1 in most settings.
      noise_std: Theorem 3.17's, of every node of the tree and every step of an escape.
      node_noise_std: Lemma 3.13's of a node.
      escape_noise_std: Lemma 3.13's of a step of an escape.
    """

    escapes_per_refresh: float
    noise_std: float
    node_noise_std: float
    escape_noise_std: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertifiedPoint:
    """Guarantee of a point that comes with a certificate, and its assumptions.

    Attributes:
      alpha: it is alpha-second-order stationary. Of a certified design what grids round
        off is included.
      accuracy: gamma, largest error of an estimated gradient where an escape begins, but
        for what grids round off.
      failure_probability: that any certificate of the run is wrong. With typical
        deviations, sampling errors are not part of it.
      escape_failure_probability: the share of one escape: that it does not leave a point
        which is not alpha-second-order stationary.
      basis: ``"constants"`` (proven, if they hold of every record), ``"deviations"``
        (sampling errors are taken to be of their typical size) or ``"rate"`` (nothing is
        proven at these numbers).
      noise_multiplier: the largest at which it holds.
      max_refreshes: how many refreshes the records allow, each with its share of failures.
      max_escapes: how many escapes they allow.
      expected_records: a guess of what a run uses: two refreshes, differences over twice
        the drift limit, two escapes. None for a theorem, which is made to use all.
      printed: of a theorem.
    """

    alpha: float
    accuracy: float
    failure_probability: float
    escape_failure_probability: float
    basis: Basis
    noise_multiplier: float
    max_refreshes: int
    max_escapes: int
    expected_records: int | None = None
    printed: PrintedNoise | None = None

    def __post_init__(self) -> None:
        if isinstance(self.printed, dict):  # From JSON.
            object.__setattr__(self, "printed", PrintedNoise(**self.printed))

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        return display.fields(self)

    def __str__(self) -> str:
        guess = self.expected_records
        records = "" if guess is None else f", about {guess} records"
        return (
            f"alpha = {self.alpha:.4g} but for a probability of "
            f"{self.failure_probability:.3g}, {_BASES[self.basis]} (gradients to "
            f"{self.accuracy:.4g}{records})"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants(PopulationConstants):
    """Checked constants: the data, read in a single pass, the budget, and the loss.

    Attributes:
      lipschitz: G > 0, of every record's loss; the clip of gradients.
      smoothness: M > 0, of its gradient; steps are of size 1 / M.
      hessian_lipschitz: rho > 0, of the expected Hessian, in operator norm; of every
        record's if it is tracked.
      failure_probability: in (0, 1), that a certificate of the run is wrong.
    """

    smoothness: float
    hessian_lipschitz: float
    failure_probability: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(
            smoothness=self.smoothness, hessian_lipschitz=self.hessian_lipschitz
        )
        validate.probability(failure_probability=self.failure_probability)


# --- formulas ------------------------------------------------------------------------


def rounded_up(x: float, at_least: int = 1) -> int:
    """Rounds x >= 0 up to an integer, ignoring a relative excess of 1e-9."""
    return max(at_least, math.ceil(min(x, 2.0**53) * (1 - 1e-9)))


def grid_rounding(size: int, bits: int) -> float:
    r"""Bounds what a grid takes off a row of ``size`` numbers, in clips.

    .. math:: \sqrt D\,2^{-k} + 2^{-18}

    Numbers are rounded towards zero, by less than a unit of :math:`2^{-k}` each, after a
    row that reaches its clip was made a little shorter. Means over records are as far off.
    """
    return math.sqrt(size) * 2.0**-bits + _MARGIN


def noise_radius(dim: int, failure: float) -> float:
    r"""Bounds the norm of a standard normal vector, but for probability ``failure``.

    .. math:: D = \sqrt d + \sqrt{2\ln(1/p)}
    """
    return math.sqrt(dim) + math.sqrt(2 * math.log(1 / failure))


def gradient_noise_std(accuracy: float, radius: float) -> float:
    r"""Returns the noise std of refreshes, and of prefix sums of differences.

    Together the two noises are at most :math:`\gamma/2` long, where a vector is at most
    ``radius`` stds long.
    """
    return accuracy / (2 * math.sqrt(2) * radius)


def private_batch_size(sensitivity: float, mu: float, std: float) -> int:
    """Returns the batch size of a mean for which noise of ``std`` is mu-GDP.

    ``sensitivity`` is that of the sum, over all uses of the mean.
    """
    return rounded_up(sensitivity / (mu * std))


def private_rate(clips: float, mu: float, std: float, norms: float) -> float:
    """Returns the difference batch rate for which prefix-sum noise of ``std`` is mu-GDP.

    One record moves a sum by so many ``clips``; ``norms`` is the longest column times the
    longest prefix row of the noise kernel.
    """
    return clips * norms / (mu * std)


def escape_radius(accuracy: float, hessian_lipschitz: float) -> float:
    r"""Returns :math:`\Xi = \sqrt{\gamma/\rho}`, where the model is gamma / 2 off."""
    return math.sqrt(accuracy / hessian_lipschitz)


def escape_steps(
    *,
    curvature: float,
    smoothness: float,
    noise_std: float,
    radius: float,
    failure: float,
    rounding: float = 0.0,
) -> int | None:
    r"""Returns steps, at least 2, after which an escape is inside with at most ``failure``.

    .. math::
      \Gamma = \left\lceil \frac{\ln(1 + (a^2 - 1)\,2\Xi^2/(\pi p^2\eta^2\sigma^2))}
        {2\ln a} \right\rceil

    Some eigenvalue of the model's Hessian is at most ``-curvature`` (-c); ``noise_std`` is
    that of every step's gradient, ``radius`` is Xi and ``failure`` p.

    With ``rounding`` e, every step but the first may be shifted by up to e stds of its
    noise, in whatever way by the steps before it. Then p is less: ``failure`` is it
    :func:`shifted` by :math:`e\sqrt{\Gamma - 1}`. None where no number of steps is enough.
    """
    log = math.log1p(curvature / smoothness)
    steps, left = 0, failure
    while left > _LEAST_FAILURE:
        needed = 2 / math.pi * (radius * smoothness / (left * noise_std)) ** 2
        more = rounded_up(math.log1p(math.expm1(2 * log) * needed) / (2 * log), 2)
        if more <= steps:
            return steps
        steps = more
        if rounding:
            left = shifted(failure, -rounding * math.sqrt(steps - 1))
    return None


def shifted(probability: float, by: float) -> float:
    r"""Returns :math:`\Phi(\Phi^{-1}(p) + s)` for a p and a shift s, in stds.

    An event of Gaussian draws that has probability p has at most this one where each draw
    is moved by what was drawn before it, and the squares of the moves, in stds, sum up to
    at most :math:`s^2`.
    """
    at = statistics.NormalDist().inv_cdf(probability) + by
    return math.erfc(-at / math.sqrt(2)) / 2
