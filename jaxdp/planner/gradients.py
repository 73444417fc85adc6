r"""Recommendation of a plan and its optimizer for a loss, from public numbers alone.

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
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import plans, sampling, training
from jaxdp.core import run_state
from jaxdp.core.averaging import polyak_average
from jaxdp.core.keys import Keys
from jaxdp.core.types import PathPredicate, ValueFn
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.planner import claims
from jaxdp.planner.results import PlannedRun, spread

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
#: Steps of plans of gradients, and of slopes; directions of a step of these.
GRADIENT_STEPS, SLOPE_STEPS, NUM_DIRECTIONS = 80, 1000, 4

#: What candidates are ranked by.
ERROR = "error at best: both are relative to the gradient"
#: Families for another question than the lowest loss.
OTHERS = (
    "Not compared: O2NC: a proven bound on stationarity; SOSP: a certificate that a point "
    "is no saddle; PrefixSum: updates of your own, in the order of the records. A problem "
    "of jaxdp in place of the loss: games, mixtures and tables."
)


def candidates(
    value_fn: ValueFn,
    params: Any,
    records: Any,
    budget: dict[str, Any],
    shared: dict[str, Any],
    *,
    backpropagation: bool,
    num_passes: float | None,
    batch_size: int | None,
    smoothing_radius: float,
    trainable: Any,
    stacked: Any,
    seed: int,
) -> Iterator[PlannedRun]:
    """Plans of gradients and of slopes, with their optimizers.

    Raises:
      ValueError: too few passes for a step of either.
    """
    sampler: Any = sampling.FullBatch()
    if batch_size is not None and batch_size < shared["num_examples"]:
        share = batch_size / shared["num_examples"]
        sampler = sampling.TruncatedPoisson(sampling_prob=share)
    read = sampler.expected_batch_size(shared["num_examples"]) / shared["num_examples"]
    slopes = {"smoothing_radius": smoothing_radius, "num_directions": NUM_DIRECTIONS}
    steps = _affordable(SLOPE_STEPS, num_passes, 2 * NUM_DIRECTIONS * read)
    kinds: list[tuple[Any, dict[str, Any], int]] = [(plans.DPZero, slopes, steps)]
    if backpropagation:
        steps = _affordable(GRADIENT_STEPS, num_passes, 3 * read)
        kinds.append((plans.DPGD, {}, steps))
    if not any(steps for *_, steps in kinds):
        least = (3 if backpropagation else 2 * NUM_DIRECTIONS) * read
        raise ValueError(
            f"num_passes must be at least {least:.3g}, which a step takes, got "
            f"{num_passes!r}"
        )
    given = {"trainable": trainable, "stacked": stacked, "seed": seed}
    for kind, fields, num_steps in kinds:
        if num_steps >= 1:
            numbers = {"num_steps": num_steps, "l2_clip_norm": 1.0}
            bare = kind(**shared, **fields, **numbers, sampling=sampler)
            plan = bare.calibrate(**budget)
            found = planned(plan, value_fn, params, records, **given)
            dim = run_state.size(params, run_state.moving(params, trainable))
            yield dataclasses.replace(
                found,
                memory=_memory(plan, value_fn, params, records, dim),
                **claims.of_loss(found.name, dim)._asdict(),
            )


def _memory(plan: Any, value_fn: ValueFn, params: Any, records: Any, dim: int) -> int:
    """Counts the bytes of a step's gradients, or of its forward pass and its slopes."""
    count = plan.sampling.rows(plan.num_examples)
    if isinstance(plan, plans.DPGD):
        return 4 * count * dim
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), records
    )
    forward = jax.jit(lambda *given: value_fn(*given)).lower(params, batch).compile()
    sizes: Any = forward.memory_analysis()
    return sizes.temp_size_in_bytes + 4 * count * plan.num_directions


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
    few = spread(records, _RECORDS)
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
      >>> from jaxdp.planner import gradients
      >>> gradients.median_norm([[3.0, 4.0], [0.0, float("nan")], [6.0, 8.0]])
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
      >>> from jaxdp.planner import gradients
      >>> gradients.longest_step(median=5.0, num_steps=100, noise_std=0.03)
      1.0
    """
    return _NOISE_IN_LOSS / (median * math.sqrt(num_steps) * noise_std)


def planned(
    plan: Any,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    *,
    l2_clip_norm: float | None = None,
    trainable: Any = None,
    stacked: PathPredicate | None = None,
    seed: int = 0,
) -> PlannedRun:
    """Chooses clip and step size of a plan of slopes or gradients, and forecasts its run.

    Both have three digits: processes that compute them, and whoever reads them, have the
    same numbers.

    Args:
      plan: calibrated; its clip does not matter, for its noise is in units of it.
      value_fn: as in :func:`jaxdp.recommend`, like the other arguments.
      params: where the run starts.
      records: public or made-up records.
      l2_clip_norm: the clip; None chooses it.
      trainable: as in :func:`jaxdp.fit`.
      stacked: as in :func:`jaxdp.fit`.
      seed: of the directions that measure the scale.

    Raises:
      ValueError: records whose gradients are zero or not finite.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> loss = lambda w, x: jnp.sum((w - x) ** 2, axis=-1)
      >>> made_up = jax.random.uniform(jax.random.key(0), (50, 2))
      >>> plan = jaxdp.plans.DPGD(
      ...     num_examples=1000, num_steps=80, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> found = jaxdp.planner.planned(plan, loss, jnp.zeros(2), made_up)
      >>> 0.3 < found.plan.l2_clip_norm < 0.7, float(found.plan.epsilon()) <= 2.0
      (True, True)
    """
    key = Keys.insecure(seed).direction
    given = {"trainable": trainable, "stacked": stacked}
    parts = plan.contributions(value_fn, params, records, key, **given)
    median = median_norm(parts.rows)
    numbers = max(parts.slopes, 1)
    clip = rounded(CLIP * median) if l2_clip_norm is None else l2_clip_norm
    plan = dataclasses.replace(plan, l2_clip_norm=clip)
    steps, length = plan.num_steps, median / math.sqrt(numbers)
    # Of a coordinate of the gradient; of K slopes it is the mean of as many products.
    coordinate = float(np.max(plan.describe().stds)) / math.sqrt(numbers)
    step = clip / math.sqrt(numbers)  # The longest signal of a step.
    rate = longest_step(length, steps, coordinate)
    rate *= _rehearsed(plan, rate, value_fn, params, records, given)
    rate = rounded(rate)
    dim = run_state.size(params, run_state.moving(params, trainable))
    noise = math.sqrt(dim / steps) * coordinate / step
    missed = math.sqrt(dim / (steps * numbers)) if parts.slopes else 0.0
    read = plan.sampling.expected_batch_size(plan.num_examples) / plan.num_examples
    passes = steps * read * (2 * numbers if parts.slopes else 3)
    return PlannedRun(plan, _optimizer(rate, steps), rate, passes, noise, missed)


def rounded(number: float) -> float:
    """Rounds a number to three digits.

    Example:
      >>> from jaxdp.planner import gradients
      >>> gradients.rounded(0.123456)
      0.123
    """
    return float(f"{number:.3g}")
