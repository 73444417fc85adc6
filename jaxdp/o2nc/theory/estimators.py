r"""Error and norm bounds of one record's gradient estimate.

All in units of L, the Lipschitz constant of the record's loss, of which nothing else is
known. :math:`\hat F` is the loss's mean over a ball of radius :math:`\delta`. GRAD
estimates its gradient at a query, DIFF the change of it between two queries r apart.

With values (the zeroth-order oracle and the scalar one) both are means over directions u
of the unit sphere; with gradients (the first-order oracle), over points of the ball.

References:
  Zhang, Tran, Cutkosky, `Private Zeroth-Order Nonsmooth Nonconvex Optimization
  <https://arxiv.org/abs/2406.19579>`_, 2024, section 3.
  Kornowski, Liu, Talwar, `Improved Sample Complexity for Private Nonsmooth Nonconvex
  Optimization <https://arxiv.org/abs/2410.05880>`_, 2025, sections 3 and 6.
  Pinelis, Optimum Bounds for the Distributions of Martingales in Banach Spaces, Annals of
  Probability 22, 1994.
  Ledoux, The Concentration of Measure Phenomenon, 2001, chapter 5: logarithmic Sobolev
  inequalities of spheres (constant d - 1) and of products.
  Meckes, The Random Matrix Theory of the Classical Compact Groups, 2019, chapter 5: the
  logarithmic Sobolev constant 4 / (d - 2) of rotations.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import numpy as np

Oracle = Literal["zeroth_order", "first_order", "scalar"]
Direction = Literal["orthonormal", "sphere", "ball"]
Difference = Literal["antithetic", "one_sided", "independent", "common"]

ORACLES: tuple[Oracle, ...] = ("zeroth_order", "first_order", "scalar")
#: The laws, and the ways to estimate a change, that go with each oracle.
DIRECTIONS: dict[Oracle, tuple[Direction, ...]] = {
    "zeroth_order": ("orthonormal", "sphere"),
    "first_order": ("ball",),
    "scalar": ("orthonormal", "sphere"),
}
DIFFERENCES: dict[Oracle, tuple[Difference, ...]] = {
    "zeroth_order": ("antithetic", "one_sided", "independent"),
    "first_order": ("common", "independent"),
    "scalar": ("antithetic", "one_sided", "independent"),  # It has no differences.
}

#: A number, or an array of them: a search asks for many settings at once.
Number = Any

#: E r^2 / D^2 of two queries r apart, (1 - s) D and s' D long with uniform s and s'.
MOVEMENT = 7 / 6


def kappa(dim: int) -> float:
    r"""Returns kappa: :math:`\nabla\hat F` is :math:`\kappa L/\delta`-Lipschitz.

    No smaller constant holds for every loss.

    .. math:: \kappa_d = 2\,\Gamma(d/2 + 1) / (\sqrt\pi\,\Gamma((d+1)/2))

    It is 1 at d = 1 and grows as sqrt(2 d / pi).
    """
    if dim > 10**6:  # Where the logarithms would cancel; the error is of order 1/d^2.
        return math.sqrt((2 * dim + 1) / math.pi)
    from scipy.special import gammaln  # Half as long to import as jax is.

    log = float(gammaln(dim / 2 + 1) - gammaln((dim + 1) / 2))
    return 2 / math.sqrt(math.pi) * math.exp(log)


class Moments(NamedTuple):
    """Second moments of one record's estimate, in units of L^2.

    Attributes:
      total: its second moment, of which only the true mean's square is not error. A mean
        over B independent records and directions has an error of at most total / B.
      direction: how much of the error of the population's own estimate is due to the
        directions, which records that share them do not average out.
    """

    total: Number
    direction: Number

    def of_mean(self, batch_size: Number, share_directions: bool) -> Number:
        """Returns the expected squared error of the mean over a batch, in units of L^2."""
        error = self.total / batch_size
        if share_directions:
            error = error + (1 - 1 / batch_size) * self.direction
        return error

    def of_all(self, num_examples: int, share_directions: bool) -> Number:
        """Returns the expected squared error about the records' mean if all are read."""
        return self.direction if share_directions else self.direction / num_examples


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Estimator of one record's gradient: the plan fields that define it."""

    num_directions: int  # m; of the ball, points at either query
    direction: Direction
    difference: Difference
    share_directions: bool = False
    oracle: Oracle = "zeroth_order"

    @classmethod
    def of(cls, found: Any) -> "Estimator":
        """Returns the estimator of a plan, or of a design."""
        return cls(*(getattr(found, field.name) for field in dataclasses.fields(cls)))

    @property
    def calls(self) -> tuple[float, float]:
        """Number of loss values or gradients per record, at a restart and elsewhere."""
        m = float(self.num_directions)
        if self.oracle == "first_order":
            return 1.0, 2 * m
        return 2 * m, (2 if self.difference == "one_sided" else 4) * m

    def energy(self, dim: int) -> float:
        """Returns E ||noise||^2 of an estimate, for noise of variance 1 on the releases."""
        return dim / self.num_directions if self.oracle == "scalar" else float(dim)

    # Errors.

    def grad_moments(self, dim: int) -> Moments:
        r"""Bounds the second moments of GRAD.

        GRAD is :math:`\frac{d}{2\delta m}\sum_j (f(x+\delta u_j) - f(x-\delta u_j)) u_j`.

        An odd Lipschitz function on the sphere has variance L^2 / (d - 1) at most, by
        Poincare. The vectors of orthonormal directions add in squares; independent ones
        have the mean's square besides. For d = 1 the estimate is exact.

        With ``"ball"``, one gradient at one point, which is never longer than L.
        """
        if self.direction == "ball":
            return Moments(1.0, 1.0)
        mean = _slope(dim) / self.num_directions
        spread = mean if dim > 1 else 0.0
        if self.direction == "sphere":
            mean += 1 - 1 / self.num_directions
        return Moments(mean, spread)

    def diff_moments(self, dim: int, reach: Number) -> Moments:
        r"""Bounds the second moments of DIFF between two queries of a run.

        With the directions common to both points a score is at most :math:`dLr/\delta`;
        with independent ones the scatter of both ends stays, however near they are.

        Gradients at two points, common or not, can differ by 2 L however near the points
        are: those of a triangle wave of period 2 r do.

        Args:
          dim: d.
          reach: D / delta, the longest step over the smoothing radius.
        """
        square = MOVEMENT * np.square(reach)  # E r^2 / delta^2
        smooth = kappa(dim) ** 2 * square
        if self.direction == "ball":
            spread = self._ball_spread + 0 * square
            return Moments(spread + smooth, spread)
        if self.difference == "independent":
            spread = 2 * self.grad_moments(dim).direction
            return Moments(spread + smooth, spread + 0 * square)
        spread = dim**2 / self.num_directions * square
        if self.direction == "sphere":
            return Moments(spread + (1 - 1 / self.num_directions) * smooth, spread)
        return Moments(spread, spread)

    @property
    def _ball_spread(self) -> float:
        """Bound on the variance of DIFF with gradients, over L^2.

        At common points a term is at most 2; at independent ones two are at most 1.
        """
        return (4 if self.difference == "common" else 2) / self.num_directions

    # Clips that leave every Lipschitz loss alone: surely, or but for a probability of
    # ``failure`` for one record.

    def clips(
        self, dim: int, movement: Number, failure: Number | None = None
    ) -> tuple[Number, Number]:
        """Returns C1 / L and C2 / L, for a difference over a movement of so many radii."""
        if self.oracle == "scalar":  # It has no differences: the same for both.
            slopes = self.slopes_clip(dim, failure)
            return slopes, slopes
        return self.grad_clip(dim, failure), self.diff_clip(dim, movement, failure)

    def grad_clip(self, dim: int, failure: Number | None = None) -> Number:
        r"""Returns C1 / L, a bound on the norm of GRAD.

        Surely: :math:`d` if directions may coincide. Orthonormal ones: d sqrt(q) / m, since
        two scores together are at most sqrt(2) d. A gradient: 1.

        With probability, the least of those and of bounds by concentration. Orthonormal
        directions: all scores are small, by Levy's inequality; or their norm is near its
        mean, as a d-Lipschitz function on the rotations. Independent ones: all scores are
        small; or the mean's deviation is, by Bernstein's inequality in Hilbert space.
        """
        d, m = dim, self.num_directions
        if self.direction == "ball":
            return 1.0
        if self.direction == "orthonormal":
            sure = d / m * math.sqrt(max(m / 2, 1 + (m - 1) * (math.sqrt(2) - 1) ** 2))
        else:
            sure = float(d)
        if failure is None or d < 3:
            return sure
        largest = d * np.sqrt(2 * np.log(2 * m / failure) / (d - 1))
        if self.direction == "orthonormal":
            mean = d / math.sqrt(m * (d - 1))
            near = mean + d / m * np.sqrt(8 * np.log(1 / failure) / (d - 2))
            return np.minimum(sure, np.minimum(largest / math.sqrt(m), near))
        near = 1 + _deviation(d, m, failure)
        return np.minimum(sure, np.minimum(largest, near))

    def diff_clip(
        self, dim: int, movement: Number, failure: Number | None = None
    ) -> Number:
        r"""Returns C2 / L, a bound on the norm of DIFF.

        With common directions it is proportional to the movement: d r / delta surely, over
        sqrt(m) if they are orthonormal. With independent ones it is twice GRAD's, and does
        not vanish with the movement; nor does what gradients need.
        """
        d, m = dim, self.num_directions
        smooth = kappa(d) * movement
        if self.direction == "ball":
            return self._ball_diff_clip(smooth, failure)
        if self.difference == "independent":
            each = None if failure is None else failure / 2
            bound = 2 * self.grad_clip(d, each) + 0 * smooth
            if self.direction == "sphere" and failure is not None and d > 1:
                bound = np.minimum(bound, smooth + _deviation(d, m, failure, points=2))
            return bound
        if self.direction == "orthonormal":
            return d / math.sqrt(m) * movement
        bound = d * movement
        if failure is not None:
            # McDiarmid: one direction moves the norm by 2 d r / (delta m).
            spread = d / math.sqrt(m) * (1 + np.sqrt(2 * np.log(1 / failure)))
            bound = np.minimum(bound, smooth + spread * movement)
        return bound

    def _ball_diff_clip(self, smooth: Number, failure: Number | None) -> Number:
        """Bounds the norm of DIFF with gradients by 2, and near its root mean square.

        McDiarmid: one point of the ball moves the norm by 2 / m, or one that is common to
        both queries by 4 / m. The sum of the squares of that is 4 times the variance's
        bound.
        """
        sure = 2.0 + 0 * smooth
        if failure is None:
            return sure
        spread = self._ball_spread
        rest = 1 - 1 / self.num_directions if self.difference == "common" else 1
        tail = np.sqrt(2 * spread * np.log(1 / failure))
        return np.minimum(sure, np.sqrt(smooth**2 * rest + spread) + tail)

    def slopes_clip(self, dim: int, failure: Number | None = None) -> Number:
        r"""Bounds the norm of m slopes along directions of length sqrt(d), over L.

        A slope is a score of GRAD over sqrt(d). Orthonormal: |slopes| = |GRAD| m / sqrt(d).
        Independent ones: sqrt(m) times the largest slope; or their norm is near its root
        mean square, as a sqrt(d)-Lipschitz function on a product of spheres.
        """
        d, m = dim, self.num_directions
        if self.direction == "orthonormal":
            return self.grad_clip(d, failure) * (m / math.sqrt(d))
        sure = math.sqrt(d * m)
        if failure is None or d < 3:
            return sure
        largest = np.sqrt(2 * m * np.log(2 * m / failure))
        near = math.sqrt(m) + np.sqrt(2 * np.log(1 / failure))
        return np.minimum(sure, math.sqrt(d / (d - 1)) * np.minimum(largest, near))

    # Clips that usual losses seldom reach: nothing is proven.

    def practical_clips(
        self, dim: int, movement: Number, fraction: float = 1.0
    ) -> tuple[float, Number]:
        r"""Returns C1 / L and C2 / L for usual losses.

        Linear losses, which have the longest estimates that are usual, exceed C1 once in
        1000 times at most: their root mean square is :math:`\sqrt{d/m}` with orthonormal
        directions, and :math:`\sqrt{1 + (d-1)/m}` with independent ones. Their slopes are
        nearly normal.

        Args:
          dim: d.
          movement: of a difference, over the smoothing radius.
          fraction: of C2, in (0, 1].
        """
        d, m = dim, self.num_directions
        if self.oracle == "scalar":
            near = math.sqrt(m) + math.sqrt(2 * math.log(1 / _SELDOM))
            slopes = min(float(self.slopes_clip(d)), near)
            return slopes, slopes
        grad = 1.0
        if self.direction != "ball":
            logs = math.log(1 / _SELDOM) / m
            grad = math.sqrt(d / m) * (1 + math.sqrt(2 * logs))
            if self.direction == "sphere":
                grad += 1 + 2 * math.sqrt(logs)
            grad = min(float(self.grad_clip(d)), grad)
        diff = np.minimum(
            self.diff_clip(d, movement), self._practical_diff_clip(d, movement, grad)
        )
        return grad, fraction * diff

    def _practical_diff_clip(self, dim: int, movement: Number, grad: float) -> Number:
        r"""Returns C2 / L for usual losses, given C1 / L.

        With common directions the root of DIFF's second moment,
        :math:`\sqrt{\kappa^2 + d^2/m}\, r/\delta` (:math:`d r / (\delta\sqrt m)` if they
        are orthonormal), which antithetic differences reach at kinks alone, and norms
        mostly stay below (``bench/o2nc_scaling.py``, "clips"). One-sided ones reach it on
        linear losses. With independent directions, or gradients at independent points, of
        the scatter at both ends. Common points of the ball: of what one kink does, which
        few of m points meet.
        """
        d, m = dim, self.num_directions
        smooth = kappa(d) * movement
        if self.direction == "ball" and self.difference == "common":
            # Bernstein: the gradient jumps by 2 at kappa r / 2 of the points.
            logs = math.log(1 / _SELDOM)
            a = 2 * logs / (3 * m)
            return smooth + a + np.sqrt(a**2 + 4 * smooth * logs / m)
        if self.direction == "ball":
            return self._ball_diff_clip(smooth, _SELDOM)
        if self.difference == "independent":
            return smooth + math.sqrt(2) * grad
        if self.direction == "orthonormal":
            return d / math.sqrt(m) * movement
        return math.sqrt(kappa(d) ** 2 + d**2 / m) * movement


#: Of a linear loss's estimates, how many may be longer.
_SELDOM = 1e-3


def _slope(dim: int) -> float:
    """Bounds E c^2 / L^2 of a score c of GRAD: the spectral gap of the sphere is d - 1."""
    return dim**2 / (dim - 1) if dim > 1 else 1.0


def _deviation(
    dim: int, num_directions: int, failure: Number, points: int = 1
) -> Number:
    """Bounds the norm of a mean over independent directions less its expectation, over L.

    Pinelis' form of Bernstein's inequality. A term is at most d + 1, which gives the scale
    (d + 1) / 3; and its norm is sub-Gaussian with d / sqrt(d - 1), of which the moments
    give 3 d / sqrt(d - 1).
    """
    variance = _slope(dim)
    scale = min((dim + 1) / 3, 3 * math.sqrt(variance))
    share = np.log(2 / failure) / num_directions
    a = scale * share
    return a + np.sqrt(a**2 + 2 * points * variance * share)
