r"""Recommendation of a plan and its optimizer, from public numbers alone.

Nobody should have to guess five numbers. All of them follow from the budget and from the
scale of one record's gradient, which is read on public or made-up records.

* The clip is a third of the median norm of what records contribute. Nearly all of them are
  clipped then, and its size no longer matters.
* The step size is such that the noise of the whole run moves a record's loss by about 1.5.
  T steps of size :math:`\eta`, with noise of deviation :math:`\sigma` on a coordinate of
  the gradient, displace a coordinate by :math:`\eta\sqrt T\sigma`, and a loss of gradient
  norm g by g times that:

  .. math:: \eta = \frac{1.5}{g \sqrt T \sigma}.

  This is the most that it may be. A run without noise on the records at hand is rehearsed
  with it, a third of it, a ninth and so on, and the smallest takes the place whose loss
  falls by as much as the best one's, up to 3%: a minimum that is near needs no more.

What a run learns of a gradient of d numbers is off by noise and, along random directions,
by the directions that were not drawn. If all records agreed, the parts would be

.. math:: \frac{\sqrt d\,\sigma}{C \sqrt T} \quad\text{and}\quad \sqrt{\frac{d}{T K}}

of its length, C the clip of a gradient; the second is zero for gradients themselves. The
first does not depend on T, C or K, for :math:`\sigma` is in proportion to
:math:`C\sqrt T`: so the methods pay the same for privacy.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import plans, sampling, training
from jaxdp.core import display, run_state, validate
from jaxdp.core.averaging import polyak_average
from jaxdp.core.keys import Keys
from jaxdp.core.types import PathPredicate, Relation, ValueFn
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.mechanism.sum_plan import SumPlan

#: What the noise of a run moves a record's loss by. ``bench planner`` searches from a
#: tenth of it to three times as much.
_NOISE_IN_LOSS = 1.5
#: A rehearsal's step sizes, over the one that the noise allows; the most records that it is
#: made on; and the share of the best one's gain that the chosen one may miss.
_REHEARSED, _RECORDS, _TOLERANCE = tuple(3.0**-i for i in range(8)), 64, 0.03
#: The clip, of the median norm of what records contribute.
CLIP = 1 / 3
#: Share of the last iterates whose mean is returned.
AVERAGED = 0.25
_GRADIENT_STEPS, _SLOPE_STEPS, _NUM_DIRECTIONS = 80, 1000, 4
#: Errors as near as this count as equal: then the cost decides.
_NEAR = 1.1


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedRun:
    """Calibrated plan, the optimizer that goes with it, and its errors at best.

    Attributes:
      plan: with noise for the budget.
      optimizer: of :func:`jaxdp.fit`; steps of ``learning_rate``, and the mean of the last
        quarter of the iterates.
      learning_rate: the step size.
      num_passes: evaluations of each record's loss in the whole run; a gradient counts 3.
      noise: of the gradient that a run sees, over its length if all records agreed.
      missed: part of it that is along no direction that was drawn; 0 for gradients.
    """

    plan: SumPlan
    optimizer: optax.GradientTransformation
    learning_rate: float
    num_passes: float
    noise: float
    missed: float

    @property
    def error(self) -> float:
        """Both errors together, relative to the gradient: what candidates are ranked by."""
        return math.hypot(self.noise, self.missed)


@dataclasses.dataclass(frozen=True, eq=False)
class Recommendation:
    """Plans for one problem, side by side, and the one to take.

    Attributes:
      candidates: the better ones first.
      reason: why the first one is, in a sentence.
    """

    candidates: tuple[PlannedRun, ...]
    reason: str

    @property
    def plan(self) -> SumPlan:
        """Plan to take."""
        return self.candidates[0].plan

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Optimizer that goes with :attr:`plan`."""
        return self.candidates[0].optimizer

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        head = ("plan", "steps", "clip", "learning rate", "passes", "noise", "missed")
        rows = [
            (
                type(one.plan).__name__,
                f"{one.plan.num_steps}",
                f"{one.plan.l2_clip_norm:.3g}",
                f"{one.learning_rate:.3g}",
                f"{one.num_passes:.4g}",
                f"{one.noise:.2g}",
                f"{one.missed:.2g}",
            )
            for one in self.candidates
        ]
        title = f"Recommendation: {type(self.plan).__name__}"
        others = "; ".join(f"{name}: {said}" for name, said in _OTHERS)
        return display.Table(
            title, rows, head, f"{self.reason} Not compared: {others}."
        )


#: Families for another question than the lowest loss.
_OTHERS = (
    ("O2NC", "a proven bound on stationarity"),
    ("SOSP", "a certificate that a point is no saddle"),
    ("PrefixSum", "updates of your own, in the order of the records"),
    ("Saddle", "two players, or the worst of several groups"),
    ("ConvexSimplex", "mixtures"),
)


def recommend(
    value_fn: ValueFn,
    params: Any,
    records: Any,
    *,
    num_examples: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    backpropagation: bool = True,
    num_passes: float | None = None,
    batch_size: int | None = None,
    smoothing_radius: float = 1e-3,
    trainable: Any = None,
    stacked: PathPredicate | None = None,
    seed: int = 0,
) -> Recommendation:
    """Chooses method, clip, step size and steps for a loss, without private data.

    The numbers follow from the budget, the sizes and the scale of the loss on ``records``,
    which must be **public or made up**. Nothing private is read and nothing is charged.

    Args:
      value_fn: as in :func:`jaxdp.fit`.
      params: where the run starts.
      records: public records, or made-up ones of the same kind, whose labels may be made
        up, too; pytree with leading axis B. Fifty are enough.
      num_examples: n, private records of the run; public.
      epsilon: > 0; the budget.
      delta: in (0, 1); the budget.
      relation: which data sets are neighbours.
      backpropagation: whether gradients of single records fit into memory. ``False`` plans
        for forward passes alone.
      num_passes: the most evaluations of each record's loss, on average, in the whole
        run; a gradient counts as three. None: 240 for gradients, 8000 for slopes.
      batch_size: expected records of a step, drawn by Poisson sampling; None: all.
      smoothing_radius: of ``DPZero``: wider for a loss that is no smooth function.
      trainable: as in :func:`jaxdp.fit`.
      stacked: as in :func:`jaxdp.fit`.
      seed: of the directions that measure the scale.

    Returns:
      Plans with their optimizers, the one to take first::

        found = jaxdp.recommend(loss, params, public, num_examples=n, ...)
        jaxdp.fit(found.plan, keys, params, data, value_fn=loss, optimizer=found.optimizer)

    Raises:
      ValueError: records whose gradients are zero or not finite, too few passes for a
        step, or numbers out of range.
      TypeError: of the wrong kind, or missing.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> loss = lambda w, x: jnp.sum((w - x) ** 2, axis=-1)
      >>> made_up = jax.random.uniform(jax.random.key(0), (50, 2))
      >>> found = jaxdp.recommend(
      ...     loss, jnp.zeros(2), made_up, num_examples=1000, epsilon=2.0, delta=1e-5,
      ...     relation="replace_one",
      ... )
      >>> type(found.plan).__name__, found.plan.num_steps
      ('DPGD', 80)
      >>> keys = jaxdp.Keys.insecure(0)
      >>> data = jax.random.uniform(jax.random.key(1), (1000, 2))
      >>> fitted = jaxdp.fit(
      ...     found.plan, keys, jnp.zeros(2), data, value_fn=loss,
      ...     optimizer=found.optimizer,
      ... )
      >>> bool(jnp.all(jnp.abs(fitted.params - 0.5) < 0.05))  # The mean is near 0.5.
      True
    """
    if not callable(value_fn):
        raise TypeError(f"value_fn must be callable, got {value_fn!r}")
    validate.integer(num_examples=num_examples)
    validate.positive(epsilon=epsilon)
    validate.probability(delta=delta)
    validate.instance(bool, backpropagation=backpropagation)
    if num_passes is not None:
        validate.positive(num_passes=num_passes)
    sampler: Any = sampling.FullBatch()
    if batch_size is not None:
        validate.integer(at_most=num_examples, batch_size=batch_size)
        if batch_size < num_examples:
            share = batch_size / num_examples
            sampler = sampling.TruncatedPoisson(sampling_prob=share)
    params, records = jax.tree.map(jnp.asarray, (params, records))
    shared = {"num_examples": num_examples, "sampling": sampler, "relation": relation}
    read = sampler.expected_batch_size(num_examples) / num_examples
    slopes: dict[str, Any] = {"smoothing_radius": smoothing_radius}
    steps = _affordable(_SLOPE_STEPS, num_passes, 2 * _NUM_DIRECTIONS * read)
    slopes["num_directions"] = _NUM_DIRECTIONS
    kinds: list[tuple[Any, dict[str, Any], int]] = [(plans.DPZero, slopes, steps)]
    if backpropagation:
        steps = _affordable(_GRADIENT_STEPS, num_passes, 3 * read)
        kinds.append((plans.DPGD, {}, steps))
    candidates = []
    dim = run_state.size(params, run_state.moving(params, trainable))
    for kind, fields, num_steps in kinds:
        if num_steps < 1:
            continue
        bare = kind(**shared, **fields, num_steps=num_steps, l2_clip_norm=1.0)
        given = {"trainable": trainable, "stacked": stacked}
        found = _planned(
            bare, value_fn, params, records, epsilon, delta, dim, seed, given
        )
        candidates.append(found)
    if not candidates:
        least = (3 if backpropagation else 2 * _NUM_DIRECTIONS) * read
        raise ValueError(
            f"num_passes must be at least {least:.3g}, which a step takes, got "
            f"{num_passes!r}"
        )
    return Recommendation(*_ranked(candidates))


def _affordable(most: int, num_passes: float | None, each: float) -> int:
    """Returns the number of steps that the passes suffice for, at ``each`` a step."""
    return most if num_passes is None else min(most, math.floor(num_passes / each))


def _mean_loss(value_fn: ValueFn, params: Any, records: Any) -> jax.Array:
    """Computes the mean of the finite losses; infinite if there is none."""
    losses = value_fn(params, records)
    finite = jnp.isfinite(losses)
    total = jnp.sum(jnp.where(finite, losses, 0))
    return jnp.where(finite.any(), total / jnp.sum(finite), jnp.inf)


def _optimizer(learning_rate: Any, num_steps: int) -> optax.GradientTransformation:
    last = min(round((1 - AVERAGED) * num_steps), num_steps - 1)
    return optax.chain(optax.sgd(learning_rate), polyak_average(last))


def _rehearsed(
    plan: Any,
    rate: float,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    given: dict[str, Any],
) -> float:
    """Returns the least of the factors of a step size that learns as much as any."""
    few = jax.tree.map(lambda x: x[:_RECORDS], records)
    alone = dataclasses.replace(
        plan,
        num_examples=num_rows(few),
        sampling=sampling.FullBatch(),
        noise_multiplier=0.0,
        delta=None,
    )
    found = training.study(
        alone,
        params,
        few,
        value_fn=value_fn,
        score_fn=lambda run: -_mean_loss(value_fn, run.params, few),
        optimizer=lambda learning_rate: _optimizer(learning_rate, plan.num_steps),
        grid={"learning_rate": [rate * factor for factor in _REHEARSED]},
        seeds=1,
        check_isolation=False,
        **given,
    )
    ends = -np.nan_to_num(found.means, nan=-np.inf, neginf=-np.inf)
    start = float(_mean_loss(value_fn, params, few))
    most = ends.min() + _TOLERANCE * max(start - ends.min(), 0.0)
    return min(x for x, end in zip(_REHEARSED, ends, strict=True) if end <= most)


def median_norm(rows: Any) -> float:
    """Computes the median of the norms of what records contribute, (B, K) or (B, d).

    Raises:
      ValueError: it is zero, or no row is finite.

    Example:
      >>> from jaxdp import planner
      >>> planner.median_norm([[3.0, 4.0], [0.0, float("nan")], [6.0, 8.0]])
      7.5
    """
    rows = np.asarray(rows, np.float64)
    rows = rows[np.isfinite(rows).all(axis=1)]
    median = float(np.median(np.linalg.norm(rows, axis=1))) if rows.size else 0.0
    if not median > 0:
        raise ValueError(
            "records must have finite gradients that are not all zero at params; their "
            f"median norm is {median:.3g}: look for NaN features, dead units, or a "
            "smoothing_radius that is too small"
        )
    return median


def longest_step(median: float, num_steps: int, noise_std: float) -> float:
    """Computes the step size whose noise moves a loss as much as it may in a run.

    Args:
      median: of the norms of gradients.
      num_steps: of the run.
      noise_std: of a coordinate of a step's gradient.

    Example:
      >>> from jaxdp import planner
      >>> planner.longest_step(median=5.0, num_steps=100, noise_std=0.03)
      1.0
    """
    return _NOISE_IN_LOSS / (median * math.sqrt(num_steps) * noise_std)


def _planned(
    bare: Any,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    epsilon: float,
    delta: float,
    dim: int,
    seed: int,
    given: dict[str, Any],
) -> PlannedRun:
    """Chooses clip and step size of a plan, and forecasts its run."""
    key = Keys.insecure(seed).direction
    noiseless = bare.with_noise(noise_multiplier=1.0)
    parts = noiseless.contributions(value_fn, params, records, key, **given)
    median = median_norm(parts.rows)
    numbers = max(parts.slopes, 1)
    clip = CLIP * median
    plan = dataclasses.replace(bare, l2_clip_norm=clip)
    plan = plan.calibrate(epsilon=epsilon, delta=delta)
    steps, length = plan.num_steps, median / math.sqrt(numbers)
    # Of a coordinate of the gradient; of K slopes it is the mean of as many products.
    coordinate = float(np.max(plan.describe().stds)) / math.sqrt(numbers)
    step = clip / math.sqrt(numbers)  # The longest signal of a step.
    rate = longest_step(length, steps, coordinate)
    rate *= _rehearsed(plan, rate, value_fn, params, records, given)
    noise = math.sqrt(dim / steps) * coordinate / step
    missed = math.sqrt(dim / (steps * numbers)) if parts.slopes else 0.0
    read = plan.sampling.expected_batch_size(plan.num_examples) / plan.num_examples
    passes = steps * read * (2 * numbers if parts.slopes else 3)
    return PlannedRun(plan, _optimizer(rate, steps), rate, passes, noise, missed)


def _ranked(found: list[PlannedRun]) -> tuple[tuple[PlannedRun, ...], str]:
    """Returns candidates with the one to take first, and why it is taken."""
    found = sorted(found, key=lambda one: one.error)
    near = [one for one in found if one.error <= _NEAR * found[0].error]
    first = min(near, key=lambda one: one.num_passes)
    name = type(first.plan).__name__
    if len(found) == 1:
        reason = f"{name} is the one that fits."
    elif len(near) == 1:
        reason = (
            f"{name} has the least error at best: both are relative to the gradient."
        )
    else:
        reason = f"The errors at best are alike, and {name} needs fewer passes."
    return (first, *(one for one in found if one is not first)), reason
