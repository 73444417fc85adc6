"""Result of a design: the plan's fields and the bound that they imply."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.kernels import prefix_noise as kernels
from jaxdp.o2nc.theory import bounds

#: Of a record's contribution, for a plan to be possible.
_LEAST_BITS = 8
#: The variance of noise that is scaled with the movement, over that at the largest.
MOVED = bounds.MOVEMENT / 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Plan fields, except the noise, and the bound that they imply.

    Attributes:
      name: of a theorem, or ``"certified"``.
      dim: d, parameters that move.
      num_examples: n, records of the single pass, or of every step.
      num_steps: T, queries in all: whole windows.
      period: steps from one restart of the oracle to the next.
      restart_batch_size: fresh records of a period's first step; n in several passes.
      batch_size: fresh records of each other step; n in several passes.
      relation: neighbours.
      restart_l2_clip_norm: C1, bound on one record's GRAD estimate; of the scalar oracle,
        on its slopes along directions of length sqrt(d).
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
      paper_noise_std: standard deviation of a node's noise by the theorem's formula (of a
        restart's in several passes), for comparison with the plan's. None if certified.
      paper_num_directions: m by the theorem. None if certified, or if it says none.
      oracle: what a record is asked for: see :data:`bounds.ORACLES`.
      multi_pass: whether every step reads all records.
      scale_with_movement: whether bound and noise of a difference are proportional to the
        movement; only in several passes.
      evaluations: values of one record's loss that the whole run takes.
      gradients: gradients of one record's loss that the whole run takes.
      paper_difference_noise_std: in several passes, what the theorem's formula gives at
        the other steps. None elsewhere.
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
    oracle: bounds.Oracle
    multi_pass: bool
    scale_with_movement: bool
    evaluations: float
    gradients: float
    paper_difference_noise_std: float | None = None

    @property
    def bound(self) -> float:
        """Bound on the expected least norm in the Goldstein subdifferential."""
        return self.promise.bound

    def cost(self, gradient_cost: float = 1.0) -> float:
        """Returns the cost of the run, in evaluations of one record's loss.

        Args:
          gradient_cost: how many of them a gradient costs.
        """
        return self.evaluations + gradient_cost * self.gradients

    def __str__(self) -> str:
        """Returns name and promise, for one row of a plan's table."""
        return f"{self.name}: {self.promise}"


def read(**fields: Any) -> Settings:
    """Builds settings from the fields of their JSON."""
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
        validate.integer(at_least=4, num_examples=self.num_examples)
        validate.integer(dim=self.dim)
        validate.positive(
            epsilon=self.epsilon, lipschitz=self.lipschitz, radius=self.radius
        )
        validate.probability(delta=self.delta)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        validate.non_negative(initial_gap=self.initial_gap)

    @property
    def mu(self) -> float:
        """The largest mu of Gaussian DP within (epsilon, delta)."""
        return accounting.gaussian_mu(self.epsilon, self.delta)

    @property
    def moved(self) -> float:
        """Sensitivity of a sum in units of the clip: 2 under replace-one, else 1."""
        return accounting.sensitivity(self.relation, 1.0)


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Estimator of one record's gradient: the plan fields that define it."""

    num_directions: int
    direction: bounds.Direction
    difference: bounds.Difference
    share_directions: bool = False
    oracle: bounds.Oracle = "zeroth_order"

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


def clips(
    p: Problem,
    estimator: Estimator,
    max_step: bounds.Number,
    failure: float | None,
    reads: bounds.Number = 1,
) -> tuple[bounds.Number, bounds.Number, bounds.Number]:
    """Returns C1, C2 at the largest movement, and the bias from clipping.

    The bias is 0 if neither clip is ever exceeded. Every record takes an equal share of
    the failures each time it is read, None for none. Where nothing fails, clipping changes
    nothing; elsewhere the norm is at most L.

    Args:
      p: the problem.
      estimator: how gradients are estimated.
      max_step: D.
      failure: probability that any clip of the run is active.
      reads: how often every record is read.
    """
    e = estimator
    movement = 2 * max_step / p.radius

    def both(failure: bounds.Number | None) -> tuple[bounds.Number, bounds.Number]:
        if e.oracle == "scalar":  # It has no differences: the same for both.
            slopes = bounds.slopes_clip(p.dim, e.num_directions, e.direction, failure)
            return p.lipschitz * slopes, p.lipschitz * slopes
        grad = bounds.grad_clip(p.dim, e.num_directions, e.direction, failure)
        diff = bounds.diff_clip(
            p.dim, e.num_directions, e.direction, e.difference, movement, failure
        )
        return p.lipschitz * grad, p.lipschitz * diff

    sure = both(None)
    if failure is None:
        return *sure, 0.0
    likely = both(failure / p.num_examples / reads)  # Their product can overflow.
    same = np.equal(likely[0], sure[0]) & np.equal(likely[1], sure[1])
    return *likely, np.where(same, 0.0, failure * p.lipschitz)


def multi_pass_noise(
    p: Problem,
    estimator: Estimator,
    period: bounds.Number,
    steps: bounds.Number,
    c1: bounds.Number,
    c2: bounds.Number,
    scale_with_movement: bool,
) -> bounds.Number:
    r"""Returns E ||noise||^2 of a period's worst estimate if every step reads all records.

    The noise of a period adds up: :math:`\sigma_1^2 + (P - 1)\sigma_2^2`, of which
    :math:`(r_1 + r_2)^2/\mu^2` is the least at the cost
    :math:`N_1 s_1^2/\sigma_1^2 + N_2 s_2^2/\sigma_2^2 = \mu^2`, with
    :math:`r_1 = s_1\sqrt{N_1}` and :math:`r_2 = s_2\sqrt{(P-1) N_2}`. Noise that is scaled
    with the movement r is at most :math:`\mathbb E r^2/(2D)^2 = 7/24` of that at the
    largest, and costs the same.
    """
    first, rest = _sequence(period, steps, c1, c2, scale_with_movement)
    std = p.moved / p.num_examples * (first + rest) / p.mu
    return estimator.energy(p.dim) * std**2


def _sequence(
    period: bounds.Number,
    steps: bounds.Number,
    c1: bounds.Number,
    c2: bounds.Number,
    scale_with_movement: bool,
) -> tuple[bounds.Number, bounds.Number]:
    """Returns r_1 and r_2 of :func:`multi_pass_noise` for sensitivities C1 and C2."""
    steps = np.asarray(steps, float)  # A theorem may ask for more than 2^63.
    restarts = np.ceil(steps / period)
    scaled = MOVED if scale_with_movement else 1.0
    first = np.sqrt(restarts) * c1
    return first, np.sqrt(scaled * (period - 1) * (steps - restarts)) * c2


def multi_pass_rounding(
    p: Problem,
    estimator: Estimator,
    period: bounds.Number,
    steps: bounds.Number,
    c1: bounds.Number,
    c2: bounds.Number,
    scale_with_movement: bool,
) -> bounds.Number:
    """Bounds the L2 norm of an estimate's rounding to the grid; infinite below 8 bits.

    The sum of n contributions and its noise fill 32 bits (``jaxdp.kernels.clip.grid_bits``,
    here for arrays); each number of a contribution is rounded by less than a unit.
    """
    first, rest = _sequence(period, steps, c1, c2, scale_with_movement)
    scaled = MOVED if scale_with_movement else 1.0
    over = p.moved / p.mu * np.sqrt(first + rest)
    later = np.maximum(period - 1, 1)
    noises = (
        over * np.sqrt(first) / c1,
        over * np.sqrt(rest / (scaled * later)) / c2,
    )
    units = [
        np.floor(np.log2((2**31 - 1) / (p.num_examples + 8 * noise)))
        for noise in noises
    ]
    least = np.where(np.asarray(period) > 1, np.minimum(*units), units[0])
    sizes = [
        c * 2.0 ** -np.minimum(16, bits)
        for c, bits in zip((c1, c2), units, strict=True)
    ]
    total = np.sqrt(estimator.energy(p.dim)) * (sizes[0] + (period - 1) * sizes[1])
    if estimator.oracle == "scalar" and estimator.direction == "sphere":
        total = total * np.sqrt(estimator.num_directions)  # They may all be alike.
    return np.where(least >= _LEAST_BITS, total, np.inf)


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
    multi_pass: bool = False,
    scale_with_movement: bool = False,
    paper_noise_std: float | None = None,
    paper_difference_noise_std: float | None = None,
    paper_num_directions: int | None = None,
) -> Settings:
    """Builds settings: adds clips, the bound at exact noise, its step size, and costs."""
    steps = num_windows * window
    reads = steps if multi_pass else 1
    c1, c2, bias = (float(x) for x in clips(p, estimator, max_step, failure, reads))
    if multi_pass:
        of_sums = (period, steps, c1, c2, scale_with_movement)
        noise = multi_pass_noise(p, estimator, *of_sums)
        rounding = multi_pass_rounding(p, estimator, *of_sums)
        # Of a theorem's numbers no plan need be possible: they are reported without it.
        rounding = float(rounding) if np.isfinite(rounding) else 0.0
    else:
        rounding = 0.0
        kernel = kernels.make(prefix_noise, period)
        leaves = np.full(period, p.moved * c2 / batch_size)
        leaves[0] = p.moved * c1 / restart_batch_size
        std = kernels.sensitivity(kernel, leaves) / p.mu * max(kernel.prefix_norms())
        noise = estimator.energy(p.dim) * std**2
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
        noise_variance=noise,
        clip_bias=bias,
        rate_factor=rate_factor,
        multi_pass=multi_pass,
        rounding=rounding,
        **law(estimator),
    )
    promise = bounds.Promise(*(float(x) for x in dataclasses.astuple(promise)))
    restarts = math.ceil(steps / period)
    calls = (
        float(restarts) * restart_batch_size * estimator.calls[0]
        + float(steps - restarts) * batch_size * estimator.calls[1]
    )
    first_order = estimator.oracle == "first_order"
    return Settings(
        name=name,
        dim=int(p.dim),
        num_examples=int(p.num_examples),
        num_steps=int(steps),
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
        multi_pass=multi_pass,
        scale_with_movement=scale_with_movement,
        evaluations=0.0 if first_order else calls,
        gradients=calls if first_order else 0.0,
        paper_noise_std=paper_noise_std,
        paper_difference_noise_std=paper_difference_noise_std,
        paper_num_directions=paper_num_directions,
        **dataclasses.asdict(estimator),
    )


def law(estimator: Estimator) -> dict[str, Any]:
    """Returns the estimator's fields except the oracle: arguments of ``bounds.promise``."""
    fields = dataclasses.asdict(estimator)
    del fields["oracle"]
    return fields
