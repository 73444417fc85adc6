r"""Parameters of the SOSP plan, and the guarantee that they imply.

A point x is :math:`\alpha`-second-order stationary if

.. math::
  \|\nabla F(x)\| \le \alpha, \qquad \nabla^2 F(x) \succeq -\sqrt{\rho\alpha}\, I ,

with F the mean loss over the population and :math:`\rho` the Lipschitz constant of every
record's Hessian. A run moves until the estimated gradient is at most ``trigger_norm`` and
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

References:
  Liu, Talwar, `Adaptive Batch Size for Privately Finding Second-Order Stationary Points
  <https://arxiv.org/abs/2410.07502>`_, 2025.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Relation

Hessian = Literal["on_demand", "tracked", "released"]
HessianNorm = Literal["operator", "frobenius"]
Basis = Literal["constants", "deviations", "rate"]

HESSIANS: tuple[Hessian, ...] = ("on_demand", "tracked", "released")
HESSIAN_NORMS: tuple[HessianNorm, ...] = ("operator", "frobenius")

_BASES: dict[Basis, str] = {
    "constants": "proven for these constants",
    "deviations": "if no sampling error is far above its typical size",
    "rate": "a rate, its hidden constants read as 1",
}


@dataclasses.dataclass(frozen=True)
class Printed:
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
class Promise:
    """Guarantee of a point that comes with a certificate, and its assumptions.

    Attributes:
      alpha: it is alpha-second-order stationary.
      accuracy: gamma, largest error of an estimated gradient where an escape begins.
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
    printed: Printed | None = None

    def __str__(self) -> str:
        guess = self.expected_records
        records = "" if guess is None else f", about {guess} records"
        return (
            f"alpha = {self.alpha:.4g} but for a probability of "
            f"{self.failure_probability:.3g}, {_BASES[self.basis]} (gradients to "
            f"{self.accuracy:.4g}{records})"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Plan fields, except the noise, and the guarantee that they imply.

    Attributes:
      name: of a theorem, or ``"certified"``.
      dim: d, parameters that move.
      num_examples: n, records of the single pass.
      num_steps: T, most iterations.
      relation: neighbours.
      l2_clip_norm: of one record's gradient; the Lipschitz constant G.
      smoothness: M; steps are of size 1 / M.
      refresh_batch_size: b.
      difference_batch_rate: c; a difference over a distance r reads c M r records.
      drift_limit: kappa, M times the path length that ends an epoch.
      max_differences: K, most differences of an epoch.
      prefix_noise: name of their noise kernel.
      trigger_norm: theta; an escape begins where the estimated gradient is no longer.
      escape_steps: Gamma, most steps of an escape; 1 with a released Hessian.
      escape_radius: Xi; an escape ends outside.
      escape_noise_std: least std of an escape's noise, on a gradient.
      hessian: mode.
      hessian_batch_size: b_H, records of one Hessian, or of an epoch's first.
      hessian_clip_norm: C_h, of one record's Hessian.
      hessian_norm: which norm of it.
      hessian_lipschitz: rho; None on demand, where nothing is clipped by it.
      hessian_difference_rate: records of a tracked Hessian's difference, over rho r.
      escapes_per_refresh: tau, of a tracked Hessian; 1 of another.
      curvature_threshold: a released Hessian is a certificate if its smallest eigenvalue
        is at least minus this.
      query_in_escape: whether differences are taken during escapes.
      stop_at_certificate: whether the first certificate ends the run.
      promise: of a point with a certificate.
    """

    name: str
    dim: int
    num_examples: int
    num_steps: int
    relation: Relation
    l2_clip_norm: float
    smoothness: float
    refresh_batch_size: int
    difference_batch_rate: float
    drift_limit: float
    max_differences: int
    prefix_noise: str
    trigger_norm: float
    escape_steps: int
    escape_radius: float
    escape_noise_std: float
    hessian: Hessian
    hessian_batch_size: int
    hessian_clip_norm: float
    hessian_norm: HessianNorm
    hessian_lipschitz: float | None
    hessian_difference_rate: float | None
    escapes_per_refresh: int
    curvature_threshold: float | None
    query_in_escape: bool
    stop_at_certificate: bool
    promise: Promise

    @property
    def alpha(self) -> float:
        """Level of second-order stationarity that the promise guarantees."""
        return self.promise.alpha

    def __str__(self) -> str:
        """Returns name and promise, for one row of a plan's table."""
        return f"{self.name}: {self.promise}"


def read(**fields: Any) -> Settings:
    """Builds settings from the fields of their JSON."""
    promise = dict(fields["promise"])
    if promise["printed"] is not None:
        promise["printed"] = Printed(**promise["printed"])
    nested: dict[str, Any] = {"promise": Promise(**promise)}
    return Settings(**fields | nested)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Checked arguments: the data, the budget, and constants of every record's loss.

    Attributes:
      num_examples: n >= 4.
      dim: d, parameters that move.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      lipschitz: G > 0, of the loss.
      smoothness: M > 0, of its gradient.
      hessian_lipschitz: rho > 0, of its Hessian, in operator norm.
      failure_probability: in (0, 1).
    """

    num_examples: int
    dim: int
    epsilon: float
    delta: float
    relation: Relation
    lipschitz: float
    smoothness: float
    hessian_lipschitz: float
    failure_probability: float

    def __post_init__(self) -> None:
        validate.integer(at_least=4, num_examples=self.num_examples)
        validate.integer(dim=self.dim)
        validate.probability(delta=self.delta)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        validate.positive(
            epsilon=self.epsilon,
            lipschitz=self.lipschitz,
            smoothness=self.smoothness,
            hessian_lipschitz=self.hessian_lipschitz,
        )
        validate.probability(failure_probability=self.failure_probability)

    @functools.cached_property
    def mu(self) -> float:
        """The largest mu of Gaussian DP within (epsilon, delta)."""
        return accounting.gaussian_mu(self.epsilon, self.delta)

    @property
    def moved(self) -> float:
        """Sensitivity of a sum in units of the clip: 2 under replace-one, else 1."""
        return accounting.sensitivity(self.relation, 1.0)


# --- formulas ------------------------------------------------------------------------


def rounded_up(x: float, at_least: int = 1) -> int:
    """Rounds x >= 0 up to an integer, ignoring a relative excess of 1e-9."""
    return max(at_least, math.ceil(min(x, 2.0**53) * (1 - 1e-9)))


def noise_radius(dim: int, failure: float) -> float:
    r"""Bounds the norm of a standard normal vector, but for probability ``failure``.

    .. math:: D = \sqrt d + \sqrt{2\ln(1/p)}
    """
    return math.sqrt(dim) + math.sqrt(2 * math.log(1 / failure))


def gradient_noise_std(accuracy: float, radius: float) -> float:
    r"""Returns the noise std of refreshes, and of prefix sums of differences.

    Together the two noises are at most :math:`\gamma/2` long.

    Args:
      accuracy: gamma.
      radius: D, how many stds a vector's length may be.
    """
    return accuracy / (2 * math.sqrt(2) * radius)


def private_batch_size(moved: float, mu: float, std: float) -> int:
    """Returns the batch size of a mean for which noise of ``std`` is mu-GDP.

    Args:
      moved: how far one record moves the sum, over all uses of the mean.
      mu: of Gaussian DP, > 0.
      std: of the noise on one coordinate of the mean.
    """
    return rounded_up(moved / (mu * std))


def private_rate(moved: float, mu: float, std: float, norms: float) -> float:
    """Returns the difference batch rate for which prefix-sum noise of ``std`` is mu-GDP.

    Args:
      moved: by how many clips one record moves a sum.
      mu: of Gaussian DP, > 0.
      std: of the noise on one coordinate of any prefix sum.
      norms: longest column times longest prefix row of the noise kernel.
    """
    return moved * norms / (mu * std)


def escape_radius(accuracy: float, hessian_lipschitz: float) -> float:
    r"""Returns :math:`\Xi = \sqrt{\gamma/\rho}`, where the model is gamma / 2 off."""
    return math.sqrt(accuracy / hessian_lipschitz)


def escape_deviation(
    num_steps: int, *, curvature: float, smoothness: float, noise_std: float
) -> float:
    """Returns the std of the displacement along a direction of curvature ``-curvature``.

    Args:
      num_steps: t >= 1, of an escape that is not ended by its radius.
      curvature: c > 0.
      smoothness: M; steps are of size 1 / M.
      noise_std: of every step's gradient.
    """
    log = math.log1p(curvature / smoothness)
    if num_steps * log > 300:  # Beyond any radius.
        return math.inf
    growth = math.expm1(2 * num_steps * log) / math.expm1(2 * log)
    return noise_std / smoothness * math.sqrt(growth)


def escape_failure(
    num_steps: int,
    *,
    curvature: float,
    smoothness: float,
    noise_std: float,
    radius: float,
) -> float:
    """Bounds the probability that an escape stays within ``radius``.

    The bound holds at this curvature or below.

    Args:
      num_steps: t >= 1.
      curvature: c > 0: some eigenvalue of the model's Hessian is at most -c.
      smoothness: M.
      noise_std: of every step's gradient.
      radius: Xi.
    """
    deviation = escape_deviation(
        num_steps, curvature=curvature, smoothness=smoothness, noise_std=noise_std
    )
    return math.erf(radius / (math.sqrt(2) * deviation))


def escape_steps(
    *,
    curvature: float,
    smoothness: float,
    noise_std: float,
    radius: float,
    failure: float,
) -> int:
    r"""Returns steps for which :func:`escape_failure` is at most ``failure``, at least 2.

    .. math::
      \Gamma = \left\lceil \frac{\ln(1 + (a^2 - 1)\,2\Xi^2/(\pi p^2\eta^2\sigma^2))}
        {2\ln a} \right\rceil

    Args:
      curvature: c > 0.
      smoothness: M.
      noise_std: of every step's gradient.
      radius: Xi.
      failure: p in (0, 1).
    """
    log = math.log1p(curvature / smoothness)
    needed = 2 / math.pi * (radius * smoothness / (failure * noise_std)) ** 2
    return rounded_up(math.log1p(math.expm1(2 * log) * needed) / (2 * log), 2)
