r"""Designs with explicit constants, whose certificates are proven.

Where an escape fails, the estimated gradient is at most :math:`\theta = c_g\gamma`. So the
point is :math:`\alpha`-second-order stationary with :math:`\alpha = (c_g + 1)\gamma + r`,
or a little more, if

1. the estimate's error is at most :math:`\gamma + r`: noise and sampling are half of gamma
   each, and r is what grids round off;
2. an escape from a point of curvature below :math:`-\sqrt{\rho\alpha}` does not fail.

All numbers are chosen for :math:`\alpha_0 = (c_g + 1)\gamma`; rounding is added to what
they promise.

Each of four kinds of failure takes a quarter of the failure probability p:

* *Noise of gradients.* Refresh and prefix sums of differences have std
  :math:`\gamma/(2\sqrt2 D)`. Which sums of an epoch are reached depends on their noise, so
  all K + 1 sums of all J epochs share: :math:`D = \sqrt d + \sqrt{2\ln(4J(K+1)/p)}`.
* *Sampling of gradients.* The errors of an epoch are a martingale over its records, with
  variance at most :math:`G^2/b + \kappa/c` and steps of at most
  :math:`2\max(1/c, G/b)` while the drift is below :math:`\kappa`, as it is where escapes
  begin. Bernstein's inequality (Pinelis; of the maximum, so that an epoch is one event)
  asks for :math:`b = 16\ell(1+x)G^2/\gamma^2` and :math:`c = 16\ell(1+x)\kappa/\gamma^2`
  with :math:`\ell = \ln(8J/p)` and :math:`x = \gamma/(6\min(G, \kappa))`.
* *Sampling of Hessians.* An escape's own records know nothing of the eigenvector v of the
  true Hessian at its start, so :math:`v^\top H v` is a mean of numbers in [-M, M]: by
  Hoeffding's inequality :math:`b_H = 2M^2\ln(4E/p)/\chi^2` records leave H a curvature
  below :math:`-\sqrt{\rho\alpha_0} + \chi`, with :math:`\chi = \sqrt{\rho\gamma}/2`; no
  dimension enters. Points do depend on a tracked Hessian's records; there Freedman's
  inequality for matrices (Tropp) asks for :math:`16\ell_H(1+y)M^2/(\rho\gamma)` records
  and a rate of :math:`16\ell_H(1+y)\kappa/(M\gamma)`, with
  :math:`\ell_H = \ln(4dJ/p)` and :math:`y = \frac\chi3\max(1/M, M/(\rho\kappa))`.
* *Escapes.* ``escape_steps`` for the curvature that is left, each of E escapes failing
  with probability p / (4 E). A released Hessian has noise instead: along v it is one
  Gaussian number, whatever d is.

J and E are what the records allow: as many refreshes and Hessians as fit, or T.

*Rounding.* A row of D numbers with clip C is put on a grid of :math:`2^{-k}C` towards zero,
and is off by at most :math:`w_k(D)C`, with :math:`w_k(D) = \sqrt D2^{-k} + 2^{-18}`
(``bounds.grid_rounding``); k is 16, less only under noise of 512 clips and more. All
records may be rounded to the same side, so a mean is off by as much: a bias.

* *Gradients.* A refresh is off by :math:`w_k(d)G`. A difference over a distance s reads
  :math:`\lceil cMs\rceil` records, and their clip is that number over c, at most
  :math:`Ms + 1/c`. An epoch has at most K of them, and the sum of Ms is below
  :math:`\kappa`. With the bits k' of differences,

  .. math:: r = w_k(d)\,G + w_{k'}(d)\,(\kappa + K/c) .

* *Hessians' matrices.* A released one is off by at most :math:`r_H = w_k(d(d+1)/2)\,C_h`,
  in Frobenius norm. In a tracked sum the clips of a Hessian and of its changes are
  together :math:`qC_h` with :math:`q = 1 + (c_H\rho\kappa/M + K)/b_H`, at most 4 (beyond,
  a refresh is due), so :math:`r_H = qw_{16}(d^2)\,2^jC_h`, with the integer
  :math:`j \ge \log_2\sqrt d` for the operator norm and j = 0 for Frobenius norms. The
  matrix is fixed before the escape's noise is drawn, so the curvature that is left is as
  much less: :math:`\alpha \ge (\sqrt{\rho\alpha_0} + r_H)^2/\rho`.
* *Products with Hessians on demand.* Within the ball a product is off by at most
  :math:`w_{16}(d)\,C_h\Xi`, and :math:`\sqrt d` units of the noise's grid. By how much
  depends on where the escape is, so it is not another Hessian, of other curvature. It is a
  shift of the noise, whose std is :math:`\sigma`, by at most :math:`e\sigma` in each step
  but the first. By composition of Gaussian trade-offs (Dong, Roth, Su), an escape that
  fails with probability p' without it fails with it with at most

  .. math:: \Phi\big(\Phi^{-1}(p') + e\sqrt{\Gamma - 1}\big) .

  :math:`\Gamma` is chosen for this probability. Where :math:`e^2` is above about twice the
  logarithm of an escape's growth in a step there is none, and a design is refused:
  directions of negative curvature could be rounded away. e is about
  :math:`2^{-16}dM/\sqrt{\rho\gamma}`.

What float32 rounds (losses, gradients, points, products with a tracked Hessian, which are
then put on a grid far below their noise) is not included: these are taken for real numbers.

The noise of each role is private by its batch alone: clips, not constants, bound what one
record does.

*Typical deviations.* Worst-case constants often ask for more records than there are. With
``gradient_std`` s_g, ``difference_std`` s_d and ``hessian_std`` s_h, of one record's
gradient, of its change over a unit of distance and of its Hessian, sampling asks for
:math:`8 s_g^2/\gamma^2`, :math:`2\kappa(s_d/M)^2/\gamma^2` and :math:`8 s_h^2/\chi^2`
records, where :math:`\chi = \sqrt{\rho\gamma}` unless the Hessian is released. Then
certificates hold if sampling errors are of their typical size. Privacy is not touched.

*How many records a run takes* is not proven, for it depends on how many anchors it meets.
``expected_records`` counts two: two refreshes, two escapes, and differences over twice the
drift limit. Without an ``accuracy``, the least is taken for which :data:`PLANNED` times as
many fit, so for eight anchors. A certificate is proven whatever was planned: every anchor
of the run has its share of the failure probability.

References:
  Liu, Talwar, `Adaptive Batch Size for Privately Finding Second-Order Stationary Points
  <https://arxiv.org/abs/2410.07502>`_, 2025 (the algorithm; constants are ours).
  Dong, Roth, Su, Gaussian Differential Privacy, Journal of the Royal Statistical Society B
  84, 2022.
  Pinelis, Optimum Bounds for the Distributions of Martingales in Banach Spaces, Annals of
  Probability 22, 1994.
  Tropp, Freedman's Inequality for Matrix Martingales, Electronic Communications in
  Probability 16, 2011.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdp.core import validate
from jaxdp.kernels import prefix_noise as kernels
from jaxdp.mechanism import design
from jaxdp.mechanism.design import Design
from jaxdp.sosp import hessian as oracles
from jaxdp.sosp import roles
from jaxdp.sosp.hessian import HESSIAN_NORMS, HESSIANS, Hessian, HessianNorm
from jaxdp.sosp.theory import bounds
from jaxdp.sosp.theory.bounds import CertifiedPoint, Constants, rounded_up

#: How many times the expected records are to fit, if no accuracy is given. Runs past a few
#: saddles took up to so many.
PLANNED = 4
#: Most steps: all of them for a given accuracy, else those outside of escapes.
_STEPS = 2000
#: Of noise that is too large for 16 bits: its std in units of its grid, at least.
_LEAST_UNITS = 2.0**23
#: Above the promise's noise multiplier, all that a plan of the design may have.
_MORE = 1.0011


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices(Constants):
    """Checked constants of a certified design, and what may be chosen in it.

    Attributes:
      accuracy: gamma > 0; a certificate is of alpha = (trigger_factor + 1) gamma, and
        what grids round off. None takes the least for which PLANNED times the expected
        records fit into n.
      escape_failure_probability: of one escape that it wrongly fails, in (0, 1). None
        takes a share of ``failure_probability``, for all escapes that the records allow.
      num_steps: T, most iterations. None is 2000 for a given accuracy; else 2000 more than
        the planned escapes take.
      max_differences: K >= 1, most differences between two refreshes.
      prefix_noise: name of the noise kernel of differences.
      trigger_factor: c_g > 0; an escape begins where the estimate is at most c_g gamma.
        None is 3 for a given accuracy; else 1, with which alpha is smaller for as many
        records.
      drift_limit: kappa > 0; None takes G. A longer one means fewer refreshes and, where
        sampling decides, larger differences.
      hessian: mode.
      hessian_norm: norm that bounds a record's tracked Hessian.
      hessian_clip_norm: bound on it; None takes M, a little more where the operator norm of
        matrices is bounded, and sqrt(d) M for Frobenius norms (also of released
        Hessians), which bounds any. Certificates rest on its clipping
        nothing: M is enough where Hessians have rank 1.
      escapes_per_refresh: tau, of a tracked Hessian.
      gradient_std: s_g >= 0; None for the constant that always holds, G. For one record,
        in Euclidean norm.
      difference_std: s_d >= 0, over the distance of two points; None for M.
      hessian_std: s_h >= 0, in operator norm; None for M.
    """

    accuracy: float | None = None
    escape_failure_probability: float | None = None
    num_steps: int | None = None
    max_differences: int = 31
    prefix_noise: str = "blt_3"
    trigger_factor: float | None = None
    drift_limit: float | None = None
    hessian: Hessian = "on_demand"
    hessian_norm: HessianNorm = "operator"
    hessian_clip_norm: float | None = None
    escapes_per_refresh: int = 4
    gradient_std: float | None = None
    difference_std: float | None = None
    hessian_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is not None:
            validate.integer(num_steps=self.num_steps)
        validate.integer(
            max_differences=self.max_differences,
            escapes_per_refresh=self.escapes_per_refresh,
        )
        validate.one_of(kernels.NAMES, prefix_noise=self.prefix_noise)
        validate.one_of(HESSIANS, hessian=self.hessian)
        validate.one_of(HESSIAN_NORMS, hessian_norm=self.hessian_norm)
        optional = {name: getattr(self, name) for name in _OPTIONAL}
        for name, value in optional.items():
            if value is not None:
                _OPTIONAL[name](**{name: value})
        design.coerce(self)

    @property
    def trigger(self) -> float:
        """Largest estimate at which an escape begins, in gammas."""
        if self.trigger_factor is not None:
            return self.trigger_factor
        return 1.0 if self.accuracy is None else 3.0

    @property
    def most_steps(self) -> int:
        """Most iterations, but for those of planned escapes."""
        return _STEPS if self.num_steps is None else self.num_steps

    @property
    def kappa(self) -> float:
        """Drift that ends an epoch."""
        return self.lipschitz if self.drift_limit is None else self.drift_limit

    @property
    def norm(self) -> HessianNorm:
        """Norm of one record's Hessian that is bounded."""
        return "frobenius" if self.hessian == "released" else self.hessian_norm

    @property
    def hessian_clip(self) -> float:
        """Bound on that norm."""
        if self.hessian_clip_norm is not None:
            return self.hessian_clip_norm
        slack = 1.0
        if self.hessian != "on_demand" and self.norm == "frobenius":
            slack = math.sqrt(self.dim)
        elif self.hessian == "tracked":  # Norms are bounded from above, not computed.
            slack = oracles.operator_slack(self.dim)
        return slack * self.smoothness

    @property
    def tau(self) -> int:
        """Escapes per refresh that a Hessian serves in."""
        return self.escapes_per_refresh if self.hessian == "tracked" else 1


_OPTIONAL: dict[str, Callable[..., None]] = {
    "escape_failure_probability": validate.probability,
    **dict.fromkeys(
        ("accuracy", "trigger_factor", "drift_limit", "hessian_clip_norm"),
        validate.positive,
    ),
    **dict.fromkeys(
        ("gradient_std", "difference_std", "hessian_std"), validate.non_negative
    ),
}


def certified(**constants: Any) -> Design:
    """Computes batches and thresholds by explicit constants, for one accuracy.

    Args:
      **constants: the attributes of :class:`Choices`.

    Returns:
      The design, of the name ``"certified"``.

    Raises:
      ValueError: a constant out of range, too few records for a refresh and a Hessian,
        or so many dimensions that grids hide curvature from escapes. TypeError: one of
        the wrong kind, missing or unknown.
    """
    c = Choices(**constants)
    accuracy = least_accuracy(c) if c.accuracy is None else c.accuracy
    found = long_enough(c, accuracy)
    needed = found.refresh_batch_size + found.hessian_batch_size
    if needed > c.num_examples:
        raise ValueError(
            f"accuracy must be such that a refresh and a Hessian fit into num_examples = "
            f"{c.num_examples}, got {accuracy!r}, where they take {needed} records: a "
            "larger accuracy takes fewer, and so do typical deviations (gradient_std, "
            "difference_std, hessian_std)"
        )
    return found


def long_enough(c: Choices, accuracy: float) -> Design:
    """Computes the design at one accuracy, with steps for escapes if none are given."""
    found = at_accuracy(c, accuracy)
    if c.accuracy is None and c.num_steps is None:
        more = 2 * PLANNED * found.escape_steps
        longer = dataclasses.replace(c, num_steps=c.most_steps + more)
        found = at_accuracy(longer, accuracy)
    return found


class Gradients(NamedTuple):
    """Batch sizes of gradients, and the noise radius D."""

    radius: float
    batch: int
    rate: float


class Hessians(NamedTuple):
    """Batch sizes of Hessians, and the parameters of their escapes."""

    batch: int
    rate: float | None
    escape_steps: int
    escape_noise_std: float
    curvature_threshold: float | None
    failure: float
    rounding: float  # of a matrix, in operator norm


@functools.lru_cache(maxsize=64)
def _norms(prefix_noise: str, period: int) -> tuple[float, float]:
    """Returns the noise kernel's largest prefix-row norm, and that of its increments.

    Both are times its largest column norm.
    """
    kernel = kernels.make(prefix_noise, period)
    column = float(max(kernel.column_norms()))
    return column * float(max(kernel.prefix_norms())), column * kernel.largest_norm()


def gradient_rounding(c: Choices, rate: float) -> float:
    """Bounds what grids take off an estimated gradient, where an escape may begin."""
    noise = _MORE * c.sensitivity_over_clip / c.mu  # in clips
    longest = _norms(c.prefix_noise, c.max_differences)[1]
    refresh = bounds.grid_rounding(c.dim, roles.grid_bits("refresh", noise))
    bits = roles.grid_bits("difference", noise * longest)
    way = c.kappa + c.max_differences / rate
    return refresh * c.lipschitz + bounds.grid_rounding(c.dim, bits) * way


def matrix_rounding(c: Choices, batch: int, rate: float | None) -> float:
    """Bounds what grids take off a released or a tracked Hessian, in operator norm."""
    if c.hessian == "released":
        bits = roles.grid_bits("Hessian", _MORE * c.sensitivity_over_clip / c.mu)
        return bounds.grid_rounding(math.comb(c.dim + 1, 2), bits) * c.hessian_clip
    if rate is None:
        return 0.0
    changes = rate * c.hessian_lipschitz * c.kappa / c.smoothness + c.max_differences
    clips = min(roles.GROWTH, 1 + changes / batch) * c.hessian_clip
    wide = oracles.frobenius_bits(c.dim) if c.norm == "operator" else 0
    return bounds.grid_rounding(c.dim**2, oracles.RECORD_BITS) * 2**wide * clips


def product_rounding(c: Choices, reach: float, noise_std: float) -> float:
    """Bounds what grids take off a product on demand within ``reach``, in noise stds."""
    if c.hessian != "on_demand":
        return 0.0
    longest = c.hessian_clip * reach / noise_std
    units = min(2.0**oracles.RECORD_BITS * c.sensitivity_over_clip / c.mu, _LEAST_UNITS)
    record = bounds.grid_rounding(c.dim, oracles.RECORD_BITS)
    return longest * record + math.sqrt(c.dim) / units


def gradients(c: Choices, accuracy: float, refreshes: int) -> Gradients:
    """Computes the batch sizes of gradients for a number of epochs."""
    share, gamma, g = c.failure_probability / 4, accuracy, c.lipschitz
    sums = refreshes * (c.max_differences + 1)
    radius = bounds.noise_radius(c.dim, share / sums)
    std = bounds.gradient_noise_std(gamma, radius)
    # Bernstein's.
    scale = 16 * math.log(2 * refreshes / share) / gamma**2
    scale *= 1 + gamma / (6 * min(g, c.kappa))
    sampled = scale * g**2
    if c.gradient_std is not None:
        sampled = 8 * (c.gradient_std / gamma) ** 2
    rate = scale * c.kappa
    if c.difference_std is not None:
        rate = 2 * c.kappa * (c.difference_std / c.smoothness) ** 2 / gamma**2
    norms, moves = _norms(c.prefix_noise, c.max_differences)[0], c.sensitivity_over_clip
    return Gradients(
        radius,
        max(rounded_up(sampled), bounds.private_batch_size(moves * g, c.mu, std)),
        max(rate, bounds.private_rate(moves, c.mu, std, norms)),
    )


def hessians(
    c: Choices, accuracy: float, radius: float, refreshes: int, escapes: int
) -> Hessians:
    """Computes batch sizes of Hessians for a number of escapes, and epochs if tracked."""
    m, rho, gamma = c.smoothness, c.hessian_lipschitz, accuracy
    share = c.failure_probability / 4
    tracked, released = c.hessian == "tracked", c.hessian == "released"
    failure = c.escape_failure_probability
    if failure is None:
        failure = share / escapes
    typical = c.hessian_std is not None
    error = math.sqrt(rho * gamma) * (1.0 if typical and not released else 0.5)
    rate = None
    if tracked:
        log = math.log(c.dim * refreshes / share)
        more = 1 + error / 3 * max(1 / m, m / (rho * c.kappa))
        scale = 4 * log * more / error**2
        sampled, rate = scale * m**2, scale * rho * c.kappa / m
    else:
        sampled = 2 * math.log(escapes / share) * (m / error) ** 2
    if c.hessian_std is not None:
        sampled = 8 * (c.hessian_std / error) ** 2
        rate = c.kappa / (m * gamma) if tracked else None
    bad = math.sqrt((c.trigger + 1) * rho * gamma)  # curvature to be found
    noise_std = gamma / radius
    sensitivity = c.sensitivity_over_clip * c.hessian_clip
    reach = bounds.escape_radius(gamma, rho)
    if released:
        far = math.sqrt(2 * math.log(1 / failure))
        # A Hessian without negative curvature is to pass: also the noise's own.
        std = (bad - 2 * error) / (math.sqrt(2 * c.dim) + 2 * far)
        batch = max(
            rounded_up(sampled), bounds.private_batch_size(sensitivity, c.mu, std)
        )
        threshold = bad - error - sensitivity / (c.mu * batch) * far
        lost = matrix_rounding(c, batch, None)
        return Hessians(batch, None, 1, noise_std, threshold, failure, lost)
    shift = product_rounding(c, reach, noise_std)
    steps = bounds.escape_steps(
        curvature=bad - error,
        smoothness=m,
        noise_std=noise_std,
        radius=reach,
        failure=failure,
        rounding=shift,
    )
    if steps is None:
        raise ValueError(
            f"dim must be such that curvature shows beside what a grid rounds off the "
            f"products of an escape, got {c.dim}, where at accuracy {gamma:.4g} that is up "
            f"to {shift:.3g} stds of its noise: fewer dimensions, a larger accuracy or a "
            "larger trigger_factor are needed"
        )
    products = math.sqrt(c.tau * (steps - 1))
    private = bounds.private_batch_size(sensitivity * reach * products, c.mu, noise_std)
    batch = max(rounded_up(sampled), private)
    if rate is not None:
        # Of a change, the norm that is clipped is to its operator norm as the clip is to M.
        rate = max(rate, batch / min(m, c.hessian_clip))
    lost = matrix_rounding(c, batch, rate)
    return Hessians(batch, rate, steps, noise_std, None, failure, lost)


def _least(at_most: int, enough: Callable[[int], bool]) -> int:
    """Returns the least integer that is enough, as all above it are, or ``at_most``."""
    low, high = 0, at_most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def at_accuracy(c: Choices, accuracy: float) -> Design:
    """Computes the design at one accuracy, whether or not the records suffice.

    Batches grow with the number of failures that share; that many do not fit for long.
    """
    n, most, tracked = c.num_examples, c.most_steps, c.hessian == "tracked"
    hessian = functools.partial(hessians, c, accuracy)

    def epoch(refreshes: int) -> tuple[Gradients, Hessians]:
        first = gradients(c, accuracy, refreshes)
        escapes = min(most, c.tau * refreshes)
        return first, hessian(first.radius, refreshes, escapes)

    def records(refreshes: int) -> int:
        first, second = epoch(refreshes)
        return first.batch + (second.batch if tracked else 0)

    refreshes = _least(most, lambda j: n // records(j) <= j)
    first, second = epoch(refreshes)
    escapes = min(most, c.tau * refreshes)
    if not tracked:
        left = max(n - first.batch, 0)
        escapes = _least(
            most, lambda e: left // hessian(first.radius, refreshes, e).batch <= e
        )
        second = hessian(first.radius, refreshes, escapes)
    changes = first.rate + (second.rate or 0.0) * c.hessian_lipschitz / c.smoothness
    guess = 2 * (first.batch + second.batch + c.kappa * changes)
    share = c.failure_probability / 4
    total = min(1.0, 3 * share + escapes * second.failure)
    # What is promised, with what grids round off: of the gradient, and of the curvature.
    rho, alpha = c.hessian_lipschitz, (c.trigger + 1) * accuracy
    curved = math.sqrt(rho * alpha) + second.rounding
    # (No curvature is below -M.)
    curved = min(curved, max(c.smoothness, math.sqrt(rho * alpha))) ** 2 / rho
    alpha = max(alpha + gradient_rounding(c, first.rate), curved)
    typical = (c.gradient_std, c.difference_std, c.hessian_std) != (None,) * 3
    return Design(
        name="certified",
        dim=c.dim,
        num_examples=n,
        num_steps=most,
        relation=c.relation,
        l2_clip_norm=c.lipschitz,
        smoothness=c.smoothness,
        refresh_batch_size=first.batch,
        difference_batch_rate=first.rate,
        drift_limit=c.kappa,
        max_differences=c.max_differences,
        prefix_noise=c.prefix_noise,
        trigger_norm=c.trigger * accuracy,
        escape_steps=second.escape_steps,
        escape_radius=bounds.escape_radius(accuracy, c.hessian_lipschitz),
        escape_noise_std=second.escape_noise_std,
        hessian=c.hessian,
        hessian_batch_size=second.batch,
        hessian_clip_norm=c.hessian_clip,
        hessian_norm=c.norm,
        hessian_lipschitz=None if c.hessian == "on_demand" else c.hessian_lipschitz,
        hessian_difference_rate=second.rate,
        escapes_per_refresh=c.tau,
        curvature_threshold=second.curvature_threshold,
        query_in_escape=False,
        stop_at_certificate=True,
        promise=CertifiedPoint(
            alpha=alpha,
            accuracy=accuracy,
            failure_probability=total,
            escape_failure_probability=second.failure,
            basis="deviations" if typical else "constants",
            noise_multiplier=1 / c.mu,
            max_refreshes=refreshes,
            max_escapes=escapes,
            expected_records=rounded_up(guess),
        ),
    )


def least_accuracy(c: Choices, times: float = PLANNED) -> float:
    """Returns the least gamma at which ``times`` the expected records fit into n.

    The largest that is tried makes alpha vacuous.

    There every gradient and every curvature is allowed.

    Raises:
      ValueError: not even there; or grids are too coarse for it.
    """

    def fits(accuracy: float) -> bool:
        try:
            guess = long_enough(c, accuracy).promise.expected_records
        except ValueError:  # Grids are too coarse for it.
            return False
        return guess is not None and times * guess <= c.num_examples

    largest = max(c.lipschitz, c.smoothness**2 / c.hessian_lipschitz)
    high = largest / (c.trigger + 1)
    if not fits(high):
        long_enough(c, high)  # Raises, if that is because of grids.
        raise ValueError(
            f"num_examples must be such that some accuracy says anything, got "
            f"{c.num_examples!r}: even alpha = {largest:.4g}, which every point has, would "
            "take more; more records, a larger epsilon or typical deviations are needed"
        )
    low = high * 2.0**-60
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
