r"""Parameters that the papers' theorems on private O2NC prescribe, as plain numbers.

A theorem turns (n, d, epsilon, delta), L, the gap and a radius into windows, batches and
a longest step. It does not choose the noise: plans calibrate that exactly. What its own
formula gives is reported, and so is its number of directions.

=========  ============  ========  ===========  ================  ===================
theorem    restart       window    longest      directions        batches
           period                  step
=========  ============  ========  ===========  ================  ===================
``"4.9"``  T             T         radius / T   common, m = d     T + 1, then 1
``"3.1"``  Sigma         M         D            of each point     Sigma, then 1
=========  ============  ========  ===========  ================  ===================

The radius is that of the smoothed loss, :math:`\delta` in 4.9 and :math:`\alpha` in 3.1.
Both prove something of the Goldstein subdifferential at *twice* that radius; 4.9 as
printed promises the radius itself. Other corrections:

* 4.9: the epoch is the larger, not the smaller, of two numbers (else the error can
  exceed the claim without bound), and at least 2; the learner's step size is ours.
* 3.1: the learner is not reset, which costs 5/2 where the paper has 3/2, and the error
  of a release enters twice. The paper's m (10^10 and up) is what makes the difference of
  two independent estimates small; with any m that can be run it is not, and neither is
  the noise. Use 3.1 to compare with, and a certified design to work with.

The bound is what is proven with these corrections, exact noise and the constants of
:mod:`jaxdp.plans.o2nc.bounds`. It is often above L, where it says nothing.

References:
  Zhang, Tran, Cutkosky, `Private Zeroth-Order Nonsmooth Nonconvex Optimization
  <https://arxiv.org/abs/2406.19579>`_, 2024, Theorem 4.9.
  Kornowski, Liu, Talwar, `Improved Sample Complexity for Private Nonsmooth Nonconvex
  Optimization <https://arxiv.org/abs/2410.05880>`_, 2025, Theorem 3.1.
"""

import dataclasses
import enum
import math
from typing import Any

import numpy as np

from jaxdp import _validate, accounting
from jaxdp._types import Relation
from jaxdp.kernels import prefix_noise as kernels
from jaxdp.plans.o2nc import bounds


class Theorem(enum.StrEnum):
    """The theorems on private O2NC with function values only."""

    FOUR_NINE = "4.9"
    THREE_ONE = "3.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A plan's numbers, save for the noise, and what they promise.

    Attributes:
      name: of a theorem, or ``"certified"``.
      dim: d, parameters that move.
      num_examples: n, records of the single pass.
      num_steps: T, queries in all: whole windows.
      period: steps from one restart of the oracle to the next.
      restart_batch_size: fresh records of a period's first step.
      batch_size: fresh records of each other step.
      relation: neighbours.
      restart_l2_clip_norm: C1, bound on one record's GRAD estimate.
      l2_clip_norm: C2, bound on one record's DIFF estimate at the largest movement,
        2 * max_step.
      smoothing_radius: in units of the parameters.
      num_directions: m.
      direction: law of the directions.
      difference: how DIFF's two points share directions.
      share_directions: whether the records of a batch share them.
      prefix_noise: name of the noise kernel.
      max_step: D.
      learning_rate: eta of the online learner.
      window: queries that one output is the mean of.
      reset: whether the learner starts at rest in every window.
      promise: the bound, at exactly calibrated noise, and its parts.
      paper_noise_std: standard deviation of a node's noise by the theorem's formula, for
        comparison with the plan's. None if certified.
      paper_num_directions: m by the theorem. None if certified.
    """

    name: str
    dim: int
    num_examples: int
    num_steps: int
    period: int
    restart_batch_size: int
    batch_size: int
    relation: Relation
    restart_l2_clip_norm: float
    l2_clip_norm: float
    smoothing_radius: float
    num_directions: int
    direction: bounds.Direction
    difference: bounds.Difference
    share_directions: bool
    prefix_noise: str
    max_step: float
    learning_rate: float
    window: int
    reset: bool
    promise: bounds.Promise
    paper_noise_std: float | None = None
    paper_num_directions: int | None = None

    @property
    def bound(self) -> float:
        """The promise's bound on the expected norm."""
        return self.promise.bound

    def __str__(self) -> str:
        """What a plan's table shows of it, for the rest stands in its other rows."""
        return f"{self.name}: {self.promise}"


def read(**fields: Any) -> Settings:
    """Settings from their JSON's fields."""
    promise: Any = bounds.Promise(**fields["promise"])
    return Settings(**fields | {"promise": promise})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Checked arguments: the data, the budget, and constants of the loss.

    Attributes:
      num_examples: n >= 4.
      dim: d, parameters that move.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours.
      lipschitz: L > 0, of every record's loss.
      initial_gap: F at the start above its infimum, >= 0.
      radius: of the smoothed loss, > 0.
    """

    num_examples: int
    dim: int
    epsilon: float
    delta: float
    relation: Relation
    lipschitz: float
    initial_gap: float
    radius: float

    def __post_init__(self) -> None:
        _validate.integer(at_least=4, num_examples=self.num_examples)
        _validate.integer(dim=self.dim)
        _validate.positive(
            epsilon=self.epsilon, lipschitz=self.lipschitz, radius=self.radius
        )
        _validate.probability(delta=self.delta)
        _validate.one_of(accounting.RELATIONS, relation=self.relation)
        _validate.non_negative(initial_gap=self.initial_gap)

    @property
    def mu(self) -> float:
        """The largest mu of Gaussian DP within (epsilon, delta)."""
        return accounting.gaussian_mu(self.epsilon, self.delta)

    @property
    def moved(self) -> float:
        """How many clips one record moves a sum by."""
        return accounting.sensitivity(self.relation, 1.0)


def settings(
    theorem: str,
    *,
    num_examples: int,
    dim: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
    initial_gap: float,
    radius: float,
    num_directions: int | None = None,
) -> Settings:
    """The parameters of a theorem.

    Args:
      theorem: an entry of :class:`Theorem`.
      num_examples: n >= 4, read in a single pass.
      dim: d, parameters that move.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours. The papers replace a record; under the other relations one
        record moves a sum half as far. Only the exact noise depends on it.
      lipschitz: L, of every record's loss.
      initial_gap: F at the start above its infimum.
      radius: of the smoothed loss; the guarantee is at twice that.
      num_directions: m; None takes d.

    Returns:
      The settings.

    Raises:
      ValueError: an argument out of range, or so few records that a theorem has no
        whole window. TypeError: not a number.
    """
    _validate.one_of([str(t) for t in Theorem], theorem=theorem)
    problem = Problem(
        num_examples=num_examples,
        dim=dim,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        lipschitz=lipschitz,
        initial_gap=initial_gap,
        radius=radius,
    )
    m = dim if num_directions is None else num_directions
    _validate.integer(num_directions=m)
    formula = _four_nine if Theorem(theorem) is Theorem.FOUR_NINE else _three_one
    return formula(problem, int(m))


def _four_nine(p: Problem, num_directions: int) -> Settings:
    n = p.num_examples
    epoch = min(max(math.ceil(max(balanced_epochs(p, p.mu))), 2), n // 2)
    # The printed noise, with the printed conversion of rho.
    rho = p.epsilon / (2 * math.sqrt(math.log(1 / p.delta)))
    leaf = 4 * p.dim * p.lipschitz / epoch
    return settled(
        "4.9",
        p,
        estimator=Estimator(num_directions, "sphere", "one_sided"),
        period=epoch,
        restart_batch_size=epoch + 1,
        batch_size=1,
        window=epoch,
        num_windows=n // (2 * epoch),
        max_step=p.radius / epoch,
        reset=True,
        prefix_noise="tree",
        failure=None,
        paper_noise_std=math.sqrt(2 * math.log(epoch)) * leaf / rho,
        paper_num_directions=p.dim,
    )


def balanced_epochs(p: Problem, rho: float) -> tuple[float, float]:
    """The two epochs of Theorem 4.9, of which it needs the larger.

    The bound's growing term equals the sampling error at the first, and the error of
    private noise at the second.
    """
    gap = p.initial_gap + p.lipschitz * p.radius
    scale = p.lipschitz * p.radius * p.num_examples / gap
    return (math.sqrt(p.dim) * scale) ** (2 / 3), math.sqrt(p.dim**1.5 * scale / rho)


def _three_one(p: Problem, num_directions: int) -> Settings:
    n, d, lip, alpha = p.num_examples, p.dim, p.lipschitz, p.radius
    # At least as many steps; the theorem is about gaps of at least L alpha.
    steps, gap = n / 2, max(p.initial_gap, lip * alpha)
    # The theorem's first number is never the smallest. A window has a step at least.
    step = min(
        math.sqrt(gap * alpha * p.epsilon / (d * lip * steps)),
        (gap**3 * alpha**2 * p.epsilon / (d**1.5 * lip**3 * steps**3)) ** (1 / 5),
        (gap**2 * alpha / (lip**2 * steps**2 * math.sqrt(d))) ** (1 / 3),
        alpha / 4,
    )
    reach = alpha / step
    period = math.ceil((reach / p.epsilon) ** (2 / 3) + reach / math.sqrt(d))
    period = min(period, (n + 1) // 2)
    total = int(bounds.num_steps(n, period, period, 1))
    window = min(max(1, math.floor(reach / 4)), total)
    leaf = lip / period + lip * math.sqrt(d) / reach
    logs = math.log(period) * math.log(1 / p.delta)
    paper_m = math.log(d * period / p.delta) * ((d * period) ** 2 + d * reach**2)
    return settled(
        "3.1",
        p,
        estimator=Estimator(num_directions, "sphere", "independent"),
        period=period,
        restart_batch_size=period,
        batch_size=1,
        window=window,
        num_windows=total // window,
        max_step=step,
        reset=False,
        prefix_noise="tree",
        failure=bounds.FAILURE,
        rate_factor=1.0,  # The paper's step size.
        paper_noise_std=4 * leaf * math.sqrt(logs) / p.epsilon,
        paper_num_directions=max(1, math.ceil(paper_m)),
    )


@dataclasses.dataclass(frozen=True)
class Estimator:
    """How a record's gradient is estimated: what stands in a plan under these names."""

    num_directions: int
    direction: bounds.Direction
    difference: bounds.Difference
    share_directions: bool = False


def clips(
    p: Problem, estimator: Estimator, max_step: bounds.Number, failure: float | None
) -> tuple[float, bounds.Number, float]:
    """C1, C2 at the largest movement, and the bias: 0 if neither is ever exceeded.

    Every record is read once and takes an equal share of the failures, None for none.
    Where nothing fails, clipping changes nothing; elsewhere the norm is at most L.
    """
    e = estimator
    movement = 2 * max_step / p.radius

    def both(failure: float | None) -> tuple[float, bounds.Number]:
        grad = bounds.grad_clip(p.dim, e.num_directions, e.direction, failure)
        diff = bounds.diff_clip(
            p.dim, e.num_directions, e.direction, e.difference, movement, failure
        )
        return p.lipschitz * grad, p.lipschitz * diff

    sure = both(None)
    likely = sure if failure is None else both(failure / p.num_examples)
    same = likely[0] == sure[0] and np.array_equal(likely[1], sure[1])
    return *likely, 0.0 if failure is None or same else failure * p.lipschitz


def settled(
    name: str,
    p: Problem,
    *,
    estimator: Estimator,
    period: int,
    restart_batch_size: int,
    batch_size: int,
    window: int,
    num_windows: int,
    max_step: float,
    reset: bool,
    prefix_noise: str,
    failure: float | None,
    rate_factor: float | None = None,
    paper_noise_std: float | None = None,
    paper_num_directions: int | None = None,
) -> Settings:
    """Adds clips, the bound at exact noise, and the step size it is about."""
    c1, c2, bias = clips(p, estimator, max_step, failure)
    c2 = float(c2)
    kernel = kernels.make(prefix_noise, period)
    leaves = np.full(period, p.moved * c2 / batch_size)
    leaves[0] = p.moved * c1 / restart_batch_size
    std = kernels.sensitivity(kernel, leaves) / p.mu * max(kernel.prefix_norms())
    promise = bounds.promise(
        dim=p.dim,
        lipschitz=p.lipschitz,
        initial_gap=p.initial_gap,
        radius=p.radius,
        period=period,
        restart_batch_size=restart_batch_size,
        batch_size=batch_size,
        window=window,
        num_windows=num_windows,
        max_step=max_step,
        reset=reset,
        noise_variance=p.dim * std**2,
        clip_bias=bias,
        rate_factor=rate_factor,
        **dataclasses.asdict(estimator),
    )
    promise = bounds.Promise(*(float(x) for x in dataclasses.astuple(promise)))
    return Settings(
        name=name,
        dim=int(p.dim),
        num_examples=int(p.num_examples),
        num_steps=int(num_windows * window),
        period=int(period),
        restart_batch_size=int(restart_batch_size),
        batch_size=int(batch_size),
        relation=p.relation,
        restart_l2_clip_norm=c1,
        l2_clip_norm=c2,
        smoothing_radius=float(p.radius),
        prefix_noise=prefix_noise,
        max_step=float(max_step),
        learning_rate=promise.learning_rate,
        window=int(window),
        reset=reset,
        promise=promise,
        paper_noise_std=paper_noise_std,
        paper_num_directions=paper_num_directions,
        **dataclasses.asdict(estimator),
    )
