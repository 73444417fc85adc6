r"""Parameters that Theorem 3.17 on private second-order stationary points prescribes.

The theorem turns (n, d, epsilon, delta), constants of the loss and the gap B into batches
and thresholds, up to constants and logarithms, which are read as 1: gamma is alpha, and
alpha solves the equation of what a run reads,

.. math::
  \text{refreshes}\cdot b + \sum_t b_t = n, \qquad \sum_t M\|x_{t+1} - x_t\|
    = \frac{BM}{\gamma}, \quad T = \frac{BM}{\gamma^2} .

So alpha is a rate; nothing is proven at these numbers, and the trigger, gamma times the
cube of a logarithm, is often above every gradient. Use them to compare with, and certified
settings to work with. The plan calibrates its noise exactly; the paper's is reported.

* ``"3.17 as printed"``: Lemma 3.15 = n. A Hessian has batches of its own, which that does
  not count, so the data end earlier. tau is rounded up to at least 1.
* ``"3.17"``: :math:`\tau = \max(1, \lceil G^2/(M^2\Xi^2\Gamma)\rceil)` instead of
  :math:`\alpha^{3/2}/(M\sqrt\rho)`, which is below 1 and has a unit; batches that pay for
  tau escapes; all that a run reads in the equation; the logarithm of :math:`dT/\omega`
  instead of :math:`BMd/(\rho\omega)`, which has a unit too; and the noise of escapes such
  that it is gamma long with the probability that is stated. Then another unit of length
  leaves every integer as it was, and alpha has the rate that the paper claims,
  :math:`n^{-1/3} + (\sqrt d/n\varepsilon)^{1/2}`; with the printed tau it has
  :math:`n^{-2/7} + (\sqrt d/n\varepsilon)^{2/5}`.

A change of a tracked Hessian reads as many records as that of a gradient, or more where
its sensitivity asks for it (not in the equation either).

Reference:
  Liu, Talwar, `Adaptive Batch Size for Privately Finding Second-Order Stationary Points
  <https://arxiv.org/abs/2410.07502>`_, 2025, Lemmas 3.13 to 3.16 and Theorem 3.17.
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdp.core import validate
from jaxdp.mechanism import design
from jaxdp.mechanism.design import Design
from jaxdp.sosp.theory.bounds import (
    CertifiedPoint,
    Constants,
    PrintedNoise,
    escape_radius,
    noise_radius,
    rounded_up,
)


class Theorem(enum.StrEnum):
    """Theorem 3.17: with corrected parameters, and with its own."""

    CORRECTED = "3.17"
    AS_PRINTED = "3.17 as printed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TheoremConstants(Constants):
    """Constants of the theorem; its failure probability (omega) enters logarithms.

    Attributes:
      initial_gap: B > 0, F at the start above its infimum.
    """

    initial_gap: float

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(initial_gap=self.initial_gap)
        design.coerce(self)


class Formula(NamedTuple):
    """Values of a theorem's formulas at one alpha, before anything is rounded but tau.

    Attributes:
      records: what a run reads by it.
      batch: b.
      rate: c, of differences.
      drift_limit: kappa.
      escapes_per_refresh: tau.
    """

    records: float
    batch: float
    rate: float
    drift_limit: float
    escapes_per_refresh: float


def prescribed(theorem: str, **constants: Any) -> Design:
    """Computes the parameters of Theorem 3.17.

    Args:
      theorem: ``"3.17"`` or ``"3.17 as printed"``.
      **constants: the attributes of :class:`TheoremConstants`.

    Returns:
      The design, of the theorem's name.

    Raises:
      ValueError: a constant out of range, or so few records that the theorem's first
        refresh does not fit. TypeError: one of the wrong kind, missing or unknown.
    """
    validate.one_of([str(t) for t in Theorem], theorem=theorem)
    p = TheoremConstants(**constants)
    as_printed = Theorem(theorem) is Theorem.AS_PRINTED
    formula = printed if as_printed else corrected
    alpha = solved(lambda x: formula(p, x).records, p)
    f = formula(p, alpha)
    batch = rounded_up(f.batch)
    if 2 * batch > p.num_examples:
        raise ValueError(
            f"num_examples must be such that a refresh of Theorem {theorem} fits, got "
            f"{p.num_examples!r}, where one takes {2 * batch} records at these constants"
        )
    num_steps = rounded_up(p.initial_gap * p.smoothness / alpha**2)
    if as_printed:
        scale = p.initial_gap * p.smoothness * p.dim / p.hessian_lipschitz
        escape_noise = alpha / math.sqrt(p.dim)
    else:
        scale = p.dim * num_steps
        escape_noise = alpha / noise_radius(
            p.dim, p.failure_probability / (4 * num_steps)
        )
    log = max(1.0, math.log(scale / p.failure_probability))
    return Design(
        name=theorem,
        dim=p.dim,
        num_examples=p.num_examples,
        num_steps=num_steps,
        relation=p.relation,
        l2_clip_norm=p.lipschitz,
        smoothness=p.smoothness,
        refresh_batch_size=batch,
        difference_batch_rate=f.rate,
        drift_limit=f.drift_limit,
        # A difference reads a record at least: the data allow no more.
        max_differences=min(num_steps, p.num_examples - batch, 2**30),
        prefix_noise="tree",
        trigger_norm=alpha * log**3,
        escape_steps=rounded_up(_escape_steps(p, alpha), 2),
        escape_radius=escape_radius(alpha, p.hessian_lipschitz),
        escape_noise_std=escape_noise,
        hessian="tracked",
        hessian_batch_size=batch,
        hessian_clip_norm=p.smoothness,
        hessian_norm="operator",
        hessian_lipschitz=p.hessian_lipschitz,
        hessian_difference_rate=max(
            f.rate * p.smoothness / p.hessian_lipschitz, batch / p.smoothness
        ),
        escapes_per_refresh=rounded_up(f.escapes_per_refresh),
        curvature_threshold=None,
        query_in_escape=True,
        stop_at_certificate=False,
        promise=CertifiedPoint(
            alpha=alpha,
            accuracy=alpha,
            failure_probability=p.failure_probability,
            escape_failure_probability=p.failure_probability,
            basis="rate",
            noise_multiplier=1 / p.mu,
            max_refreshes=p.num_examples // (2 * batch),
            max_escapes=num_steps,
            printed=printed_noise(p, alpha, batch, f.rate),
        ),
    )


def solved(records: Callable[[float], float], p: Constants) -> float:
    """Solves for the alpha at which a run reads n records, or just fewer at a jump.

    Bisection over alpha / G, so that another unit of length changes nothing.
    """
    low, high = -100.0, 100.0  # binary exponents
    for _ in range(60):
        middle = (low + high) / 2
        if records(p.lipschitz * 2.0**middle) <= p.num_examples:
            high = middle
        else:
            low = middle
    return p.lipschitz * 2.0**high


def _escape_steps(p: Constants, alpha: float) -> float:
    return p.smoothness / math.sqrt(p.hessian_lipschitz * alpha)


def printed_escapes(p: Constants, alpha: float) -> float:
    """Returns the paper's tau, escapes per refresh."""
    return alpha**1.5 / (p.smoothness * math.sqrt(p.hessian_lipschitz))


def printed(p: TheoremConstants, alpha: float) -> Formula:
    """Computes Theorem 3.17 as printed, and the records by Lemma 3.15."""
    g, m, rho = p.lipschitz, p.smoothness, p.hessian_lipschitz
    noise = math.sqrt(p.dim) / p.epsilon
    kappa = max(alpha * noise, (p.initial_gap * g * m) ** (1 / 3))
    batch = (
        g * noise / alpha + (g / alpha) ** 2 + m * noise / rho + m**2 / (rho * alpha)
    )
    rates = (noise / alpha, kappa / alpha**2, rho * kappa / (m**2 * alpha))
    drift = p.initial_gap * m / alpha
    records = batch * drift / kappa + drift * (sum(rates) + 1 / alpha)
    return Formula(records, batch, max(rates), kappa, printed_escapes(p, alpha))


def corrected(p: TheoremConstants, alpha: float) -> Formula:
    """Computes Theorem 3.17 with escapes paid for and every record that a run reads."""
    g, m, rho = p.lipschitz, p.smoothness, p.hessian_lipschitz
    noise = math.sqrt(p.dim) / p.epsilon
    kappa = (p.initial_gap * g * m) ** (1 / 3)
    radius, steps = escape_radius(alpha, rho), _escape_steps(p, alpha)
    tau = rounded_up((g / (m * radius)) ** 2 / steps)
    spread = radius * math.sqrt(steps * tau)  # S
    batch = (g + m * spread) * noise / alpha + (g / alpha) ** 2 + m**2 / (rho * alpha)
    rate = max(
        noise / alpha * max(1.0, rho * spread / m),
        kappa / alpha**2,
        rho * kappa / (m**2 * alpha),
    )
    drift = p.initial_gap * m / alpha
    escapes = p.initial_gap * math.sqrt(rho) / alpha**1.5
    refreshes = 1 + drift / kappa + escapes / tau
    # Batches of gradients, and as large ones of Hessians.
    records = 2 * (batch * refreshes + drift * rate + drift / alpha)
    return Formula(records, batch, rate, kappa, tau)


def printed_noise(p: Constants, alpha: float, batch: int, rate: float) -> PrintedNoise:
    """Returns the paper's noise, for its sensitivities G / b and 1 / c of a mean."""
    log = math.log(1 / p.delta)
    m, rho = p.smoothness, p.hessian_lipschitz
    tau = printed_escapes(p, alpha)
    reach = escape_radius(alpha, rho) * math.sqrt(_escape_steps(p, alpha) * tau * log)
    return PrintedNoise(
        escapes_per_refresh=tau,
        noise_std=alpha / math.sqrt(p.dim),
        node_noise_std=(p.lipschitz / batch + 1 / rate) * log / p.epsilon,
        escape_noise_std=(m / batch + rho / (m * rate)) * 2 * reach / p.epsilon,
    )
