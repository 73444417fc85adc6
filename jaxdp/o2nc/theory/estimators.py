r"""Error and norm bounds of one record's gradient estimate.

All in units of L, the Lipschitz constant of the record's loss, of which nothing else is
known. :math:`\hat F` is the loss's mean over a ball of radius :math:`\delta`. GRAD
estimates its gradient at a query, DIFF the change of it between two queries r apart.

With values (the zeroth-order oracle and the scalar one) both are means over directions u
of the unit sphere; with gradients (the first-order oracle), over points of the ball.

References:
  Zhang, Tran & Cutkosky, ICLR 2024, section 3; Kornowski, Liu & Talwar, ICML 2025,
  sections 3 and 6.
  Pinelis, Optimum Bounds for the Distributions of Martingales in Banach Spaces, Annals of
  Probability 22, 1994.
  Ledoux, The Concentration of Measure Phenomenon, 2001, chapter 5: logarithmic Sobolev
  inequalities of spheres (constant d - 1) and of products.
  Meckes, The Random Matrix Theory of the Classical Compact Groups, 2019, chapter 5: the
  logarithmic Sobolev constant 4 / (d - 2) of rotations.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdp.o2nc.oracle import DEFAULT, ORACLES, Difference, Direction, Name, Oracle

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
    """Estimator of one record's gradient from values: the plan fields that define it."""

    num_directions: int  # m; of the ball, points at either query
    direction: Direction
    difference: Difference
    share_directions: bool = False

    oracle: ClassVar[Name] = DEFAULT
    #: The difference of which most is proven.
    proven: ClassVar[Difference] = "antithetic"
    #: Number m where none is given; None is as many as there may be.
    points: ClassVar[int | None] = None

    @staticmethod
    def of(found: Any) -> "Estimator":
        """Returns the estimator of a plan, or of a design."""
        names = (field.name for field in dataclasses.fields(Estimator))
        return ESTIMATORS[found.oracle](*(getattr(found, name) for name in names))

    @property
    def asks(self) -> Oracle:
        """The oracle that releases it."""
        return ORACLES[self.oracle]

    @property
    def calls(self) -> tuple[float, float]:
        """Number of loss values or gradients per record, at a restart and elsewhere."""
        m = float(self.num_directions)
        return 2 * m, (2 if self.difference == "one_sided" else 4) * m

    def energy(self, dim: int) -> float:
        """Returns E ||noise||^2 of an estimate, for noise of variance 1 on the releases."""
        return float(dim)

    def rounding(self, dim: int, unit: Number) -> Number:
        """Bounds an estimate's error, given a unit of the released numbers' grid."""
        return np.sqrt(self.energy(dim)) * unit

    # Errors.

    def grad_moments(self, dim: int) -> Moments:
        r"""Bounds the second moments of GRAD.

        GRAD is :math:`\frac{d}{2\delta m}\sum_j (f(x+\delta u_j) - f(x-\delta u_j)) u_j`.

        An odd Lipschitz function on the sphere has variance L^2 / (d - 1) at most, by
        Poincare. The vectors of orthonormal directions add in squares; independent ones
        have the mean's square besides. For d = 1 the estimate is exact.
        """
        mean = _slope(dim) / self.num_directions
        spread = mean if dim > 1 else 0.0
        if self.direction == "sphere":
            mean += 1 - 1 / self.num_directions
        return Moments(mean, spread)

    def diff_moments(self, dim: int, reach: Number) -> Moments:
        r"""Bounds the second moments of DIFF between two queries of a run.

        With the directions common to both points a score is at most :math:`dLr/\delta`;
        with independent ones the scatter of both ends stays, however near they are.
        ``reach`` is D / delta, the longest step over the smoothing radius.
        """
        square = MOVEMENT * np.square(reach)  # E r^2 / delta^2
        smooth = kappa(dim) ** 2 * square
        if self.difference == "independent":
            spread = 2 * self.grad_moments(dim).direction
            return Moments(spread + smooth, spread + 0 * square)
        spread = dim**2 / self.num_directions * square
        if self.direction == "sphere":
            return Moments(spread + (1 - 1 / self.num_directions) * smooth, spread)
        return Moments(spread, spread)

    # Clips that leave every Lipschitz loss alone: surely, or but for a probability of
    # ``failure`` for one record.

    def clips(
        self, dim: int, movement: Number, failure: Number | None = None
    ) -> tuple[Number, Number]:
        """Returns C1 / L and C2 / L, for a difference over a movement of so many radii."""
        return self.grad_clip(dim, failure), self.diff_clip(dim, movement, failure)

    def grad_clip(self, dim: int, failure: Number | None = None) -> Number:
        r"""Returns C1 / L, a bound on the norm of GRAD.

        Surely: :math:`d` if directions may coincide. Orthonormal ones: d sqrt(q) / m, since
        two scores together are at most sqrt(2) d.

        With probability, the least of those and of bounds by concentration. Orthonormal
        directions: all scores are small, by Levy's inequality; or their norm is near its
        mean, as a d-Lipschitz function on the rotations. Independent ones: all scores are
        small; or the mean's deviation is, by Bernstein's inequality in Hilbert space.
        """
        d, m = dim, self.num_directions
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
        not vanish with the movement.
        """
        d, m = dim, self.num_directions
        smooth = kappa(d) * movement
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

    # Clips that usual losses seldom reach: nothing is proven.

    def practical_clips(
        self, dim: int, movement: Number, fraction: float = 1.0
    ) -> tuple[float, Number]:
        r"""Returns C1 / L and C2 / L for usual losses.

        Linear losses, which have the longest estimates that are usual, exceed C1 once in
        1000 times at most: their root mean square is :math:`\sqrt{d/m}` with orthonormal
        directions, and :math:`\sqrt{1 + (d-1)/m}` with independent ones. ``movement`` is
        over the smoothing radius; of C2 a ``fraction`` in (0, 1] is taken.
        """
        grad = self._practical_grad_clip(dim)
        diff = np.minimum(
            self.diff_clip(dim, movement),
            self._practical_diff_clip(dim, movement, grad),
        )
        return grad, fraction * diff

    def _practical_grad_clip(self, dim: int) -> float:
        m = self.num_directions
        logs = math.log(1 / _SELDOM) / m
        grad = math.sqrt(dim / m) * (1 + math.sqrt(2 * logs))
        if self.direction == "sphere":
            grad += 1 + 2 * math.sqrt(logs)
        return min(float(self.grad_clip(dim)), grad)

    def _practical_diff_clip(self, dim: int, movement: Number, grad: float) -> Number:
        r"""Returns C2 / L for usual losses, given C1 / L.

        With common directions the root of DIFF's second moment,
        :math:`\sqrt{\kappa^2 + d^2/m}\, r/\delta` (:math:`d r / (\delta\sqrt m)` if they
        are orthonormal), which antithetic differences reach at kinks alone, and norms
        mostly stay below (``bench/o2nc_scaling.py``, "clips"). One-sided ones reach it on
        linear losses. With independent directions, of the scatter at both ends.
        """
        d, m = dim, self.num_directions
        smooth = kappa(d) * movement
        if self.difference == "independent":
            return smooth + math.sqrt(2) * grad
        return math.sqrt(kappa(d) ** 2 + d**2 / m) * movement


class BallEstimator(Estimator):
    """Estimator from gradients at points of the ball; at restarts, from one.

    A gradient is never longer than L. Those at two points, common or not, can differ by
    2 L however near the points are: those of a triangle wave of period 2 r do.
    """

    oracle = "first_order"
    proven = "independent"
    points = 64

    @property
    def calls(self) -> tuple[float, float]:
        return 1.0, 2 * float(self.num_directions)

    @property
    def _spread(self) -> float:
        """Bound on the variance of DIFF, over L^2.

        At common points a term is at most 2; at independent ones two are at most 1.
        """
        return (4 if self.difference == "common" else 2) / self.num_directions

    def grad_moments(self, dim: int) -> Moments:
        return Moments(1.0, 1.0)

    def diff_moments(self, dim: int, reach: Number) -> Moments:
        square = MOVEMENT * np.square(reach)
        spread = self._spread + 0 * square
        return Moments(spread + kappa(dim) ** 2 * square, spread)

    def grad_clip(self, dim: int, failure: Number | None = None) -> Number:
        return 1.0

    def diff_clip(
        self, dim: int, movement: Number, failure: Number | None = None
    ) -> Number:
        """Bounds the norm of DIFF by 2, and near its root mean square.

        McDiarmid: one point of the ball moves the norm by 2 / m, or one that is common to
        both queries by 4 / m. The sum of the squares of that is 4 times the variance's
        bound.
        """
        smooth = kappa(dim) * movement
        sure = 2.0 + 0 * smooth
        if failure is None:
            return sure
        rest = 1 - 1 / self.num_directions if self.difference == "common" else 1
        tail = np.sqrt(2 * self._spread * np.log(1 / failure))
        return np.minimum(sure, np.sqrt(smooth**2 * rest + self._spread) + tail)

    def _practical_grad_clip(self, dim: int) -> float:
        return 1.0

    def _practical_diff_clip(self, dim: int, movement: Number, grad: float) -> Number:
        """Returns C2 / L: of the scatter at both ends.

        At common points of what one kink does, which few of m points meet.
        """
        if self.difference != "common":
            return self.diff_clip(dim, movement, _SELDOM)
        # Bernstein: the gradient jumps by 2 at kappa r / 2 of the points.
        smooth, logs = kappa(dim) * movement, math.log(1 / _SELDOM)
        a = 2 * logs / (3 * self.num_directions)
        return smooth + a + np.sqrt(a**2 + 4 * smooth * logs / self.num_directions)


class SlopesEstimator(Estimator):
    """Estimator that is made of m released slopes, along directions of length sqrt(d).

    It has no differences: both clips are the same.
    """

    oracle = "scalar"

    def energy(self, dim: int) -> float:
        return dim / self.num_directions

    def rounding(self, dim: int, unit: Number) -> Number:
        total = super().rounding(dim, unit)
        if self.direction == "sphere":  # They may all be alike.
            total = total * np.sqrt(self.num_directions)
        return total

    def clips(
        self, dim: int, movement: Number, failure: Number | None = None
    ) -> tuple[Number, Number]:
        slopes = self.slopes_clip(dim, failure)
        return slopes, slopes

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

    def practical_clips(
        self, dim: int, movement: Number, fraction: float = 1.0
    ) -> tuple[float, Number]:
        """Returns the clips of linear losses, whose slopes are nearly normal."""
        near = math.sqrt(self.num_directions) + math.sqrt(2 * math.log(1 / _SELDOM))
        slopes = min(float(self.slopes_clip(dim)), near)
        return slopes, slopes


#: The estimator of each oracle.
ESTIMATORS: dict[Name, type[Estimator]] = {
    kind.oracle: kind for kind in (Estimator, BallEstimator, SlopesEstimator)
}


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
