r"""Certificate of a nonsmooth, nonconvex search: a bound on a Goldstein norm.

A point x is :math:`(\delta,\varepsilon)`-Goldstein stationary for F if the convex hull of
gradients of F in the ball of radius :math:`\delta` around x has an element of norm at most
:math:`\varepsilon`. O2NC finds such points and does not know when. Here one mean of
gradients of private records, released once by DP-GD, bounds the least norm.

*What is bounded.* F is the mean loss over the population of the records, and every
record's loss is L-Lipschitz in the ball. Draw public points :math:`y_1,\dots,y_m` in the
ball, of a law with a density. Almost surely F and the losses of all records but a set of
probability zero are differentiable there (Rademacher, Fubini), and by dominated convergence
:math:`\nabla F(y_j)=\mathbb E\nabla f(y_j)`. So

.. math:: w=\frac1m\sum_j\nabla F(y_j)

is in the Goldstein subdifferential of F at x, whatever m is: sampling points costs nothing
in the statement, and more of them make w smaller. With :math:`w_n` the same for the mean
loss over the n given records, v for what is released before the noise, r the release with
noise of std :math:`\sigma` a coordinate, and :math:`t=\ln(3/p)`, the least norm is at most
:math:`\|w\|\le\|v\|+\|w_n-v\|+\|w-w_n\|`, where

* *noise*: but for probability 2p/3,

  .. math:: \|v\|\le\sigma\sqrt{2t}+\sqrt{2\sigma^2t+\|r\|^2-\sigma^2(d-2\sqrt{dt})}.

  For :math:`\|r\|^2=\|v\|^2+2\langle v,Z\rangle+\|Z\|^2`, where
  :math:`\langle v,Z\rangle\ge-\sigma\|v\|\sqrt{2t}` and
  :math:`\|Z\|^2\ge\sigma^2(d-2\sqrt{dt})` (Laurent and Massart) but for p/3 each. The
  noise's own length, about :math:`\sigma\sqrt d`, is taken off: what it adds grows as
  :math:`\sigma d^{1/4}`.
* *clip and grid*: L is the clip, so that nothing is clipped; a record's vector is rounded
  towards zero on its grid, by at most :math:`L(\sqrt d2^{-k}+2^{-18})`.
* *records*: given the points, :math:`w_n` is a mean of n independent vectors of norm at
  most L and of mean w. By McDiarmid's inequality, but for p/3,

  .. math:: \|w_n-w\|\le\frac L{\sqrt n}\big(1+\sqrt{2t}\big).

All of it in real arithmetic: gradients are those that float32 computes.

References:
  Zhang, Tran, Cutkosky, `Private zeroth-order nonsmooth nonconvex optimization
  <https://arxiv.org/abs/2406.19579>`_, 2024, Section 2: Goldstein stationarity.
  Laurent, Massart, Adaptive estimation of a quadratic functional by model selection,
  Annals of Statistics 28, 2000, Lemma 1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp import sampling
from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.core.types import Relation, ReleaseBudget, ValueFn
from jaxdp.dpgd.plan import DPGD
from jaxdp.kernels import finite_difference, perturb, sphere
from jaxdp.kernels.sphere import Direction
from jaxdp.sampling import batches

#: Numbers of records' gradients that are held at once.
_NUMBERS = 2**20
#: Of a clip, what :func:`jaxdp.kernels.clip.to_grid` takes off a row that reaches it.
_MARGIN = 2.0**-18
#: What float32 rounds in the norm of a release.
_ROUNDED = 1 + 2.0**-20


class PrivateGoldstein(NamedTuple):
    """Upper bound on the Goldstein norm of a mean loss, its parts and what it costs.

    Attributes:
      bound: on the least norm for the *population's* mean loss: the sum of
        ``mean_norm``, ``rounding`` and ``sampling_error``. It holds but for
        ``failure_probability``, if the records are independent draws that x does not
        depend on, and every record's loss is ``l2_clip_norm``-Lipschitz in the ball.
      records_bound: on the least norm for the mean loss over the given *records*:
        ``mean_norm + rounding``. It holds for records that x was chosen by, too.
      failure_probability: of the two together.
      release: tree like x; the noised mean of gradients.
      mean_norm: upper limit of the norm of that mean before the noise.
      rounding: what the grid of the release may take off the mean.
      sampling_error: how far the mean over records may be from the population's.
      plan: the ``jaxdp.plans.DPGD`` whose one step the release is: ``plan.epsilon(delta=)``
        is what it costs, ``plan.noise_std`` its noise, ``plan.sensitivity`` that of the
        sum of gradients.
    """

    bound: float
    records_bound: float
    failure_probability: float
    release: Any
    mean_norm: float
    rounding: float
    sampling_error: float
    plan: DPGD


def private_goldstein(
    value_fn: ValueFn,
    x: Any,
    data: Any,
    keys: keys_lib.Keys,
    *,
    radius: float,
    l2_clip_norm: float,
    noise_multiplier: float,
    relation: Relation,
    num_examples: int,
    num_points: int = 8,
    failure_probability: float = 0.05,
    microbatch_size: int | None = None,
    budget: ReleaseBudget | None = None,
    delta: float | None = None,
) -> PrivateGoldstein:
    r"""Bounds the Goldstein norm of a mean loss at a public point, privately.

    Releases the mean over records of their gradients, each a mean over ``num_points``
    public points in the ball around x, and bounds the least norm by it; the module's text
    has the proof. Give it records that were *held back*: a public random part of the data
    that no run reads. Run and certificate then read disjoint records, so a record costs
    what the one costs that reads it, and both together cost the larger of the two
    (parallel composition, for replace-one and zero-out within the parts). On the records
    that chose x the costs add up, and only ``records_bound`` holds.

    A bound near ``l2_clip_norm`` says nothing. What it can show is limited by the records:
    ``sampling_error`` is about ``4 l2_clip_norm / sqrt(n)``.

    Args:
      value_fn: ``(params, batch) -> losses (B,)``, differentiable almost everywhere.
      x: pytree of floating arrays, d elements in all; public.
      data: pytree with leading axis n, the records; private.
      keys: serve this alone, as they serve one run.
      radius: :math:`\delta` > 0 of the ball, in units of x.
      l2_clip_norm: L > 0; bound on one record's gradient, enforced. The bound rests on it
        being a Lipschitz constant of every record's loss in the ball; privacy does not.
      noise_multiplier: std of the noise on the sum over its sensitivity, > 0.
      relation: one of :data:`jaxdp.accounting.RELATIONS`.
      num_examples: n, public; the sum is divided by it.
      num_points: m >= 1; more make the mean shorter at kinks, and cost time alone.
      failure_probability: p in (0, 1), that ``bound`` is wrong.
      microbatch_size: records differentiated at once; None: about a million numbers.
      budget: a :class:`jaxdp.Budget`, in which the release is reserved before it is made.
      delta: in (0, 1), at which the budget is charged; needed with one.

    Returns:
      A :class:`PrivateGoldstein`.

    Privacy:
      One step of :class:`jaxdp.plans.DPGD` over all records, without sampling: one record
      moves the sum of gradients by at most ``l2_clip_norm`` in L2 (twice that if replaced),
      on integers. All else is post-processing.

    Raises:
      TypeError: an argument of another type, or a leaf of x that is not floating.
      ValueError: a number out of its range, a radius that the dtype of x does not resolve,
        another number of records than n, keys that have served a run, or what a budget
        refuses.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def losses(x, batch):  # 1-Lipschitz, of expectation |x| / 2, with a kink at 0
      ...     return jnp.maximum(batch[:, 0] * x[0], 0.0)
      >>> held_back = jnp.tile(jnp.array([[1.0], [-1.0]]), (20_000, 1))
      >>> found = jaxdp.metrics.private_goldstein(
      ...     losses, jnp.zeros(1), held_back, jaxdp.Keys.insecure(0), radius=0.1,
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, relation="replace_one",
      ...     num_examples=40_000, num_points=64,
      ... )
      >>> bool(found.bound < 0.25), found.plan.epsilon(delta=1e-6) < 3
      (True, True)
    """
    validate.positive(radius=radius, noise_multiplier=noise_multiplier)
    validate.integer(num_points=num_points)
    validate.probability(failure_probability=failure_probability)
    keys_lib.check(keys)
    plan = plan_of(num_examples, relation, l2_clip_norm, noise_multiplier)
    if budget is not None:
        validate.instance(ReleaseBudget, budget=budget)
    elif delta is not None:
        raise ValueError(f"delta must be None without a budget, got {delta!r}")
    x = jax.tree.map(jnp.asarray, x)
    flat = ravel_pytree(x)[0]
    reach = _reach(x, flat, radius)
    rows = finite_difference.num_rows(data, "data")
    if rows != num_examples:
        raise ValueError(
            f"data must have num_examples={num_examples} records, got {rows}"
        )
    data = jax.tree.map(batches.narrowed, data)
    if microbatch_size is None:
        microbatch_size = max(1, min(rows, _NUMBERS // flat.size))
    validate.integer(microbatch_size=microbatch_size)
    how = {"reach": reach, "num_points": num_points, "microbatch_size": microbatch_size}
    tx, release = step_of(plan, keys, x, value_fn, **how)
    if budget is not None:
        keys_lib.check_unspent(keys, "run")
    shapes = tx.init(jax.eval_shape(lambda: x))  # Of outlines: it spends no keys.
    # What raises, raises before anything is spent.
    jax.eval_shape(release, shapes, data)
    if budget is not None:
        unit = batches.unit_of(data)
        budget.reserve(plan, what="private goldstein", delta=delta, unit=unit)
    released = jax.jit(release)(tx.init(x), data)
    return _bounded(released, plan, flat.size, failure_probability)


def plan_of(
    num_examples: int, relation: Relation, l2_clip_norm: float, noise_multiplier: float
) -> DPGD:
    """Returns the plan whose one step a bound releases."""
    return DPGD(
        num_examples=num_examples,
        num_steps=1,
        sampling=sampling.FullBatch(),
        relation=relation,
        l2_clip_norm=l2_clip_norm,
    ).with_noise(noise_multiplier=noise_multiplier)


def step_of(
    plan: DPGD,
    keys: keys_lib.Keys,
    x: Any,
    value_fn: ValueFn,
    *,
    reach: float,
    num_points: int,
    microbatch_size: int,
) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Returns the transformation of the step, and its release ``(state, data) -> tree``."""
    key = keys_lib.stream(keys.direction, "points", 0, plan.run.context)
    points = sphere.directions(key, x, law="ball", num=num_points)
    size = ravel_pytree(x)[0].size
    losses = _at_points(value_fn, points, reach / math.sqrt(size))
    tx: Any = plan.transform(keys, microbatch_size=microbatch_size)

    def release(state: Any, data: Any) -> Any:
        return tx.update(None, state, x, value_fn=losses, batch=data)[0]

    return tx, release


def norm_limit(norm: float, std: float, dim: int, failure: float) -> float:
    r"""Bounds the norm of a vector from above, given that of it plus Gaussian noise.

    Args:
      norm: of the noised vector.
      std: of the noise of each coordinate.
      dim: d.
      failure: probability that the vector is longer.

    Example:
      >>> from jaxdp.metrics.private_goldstein import norm_limit
      >>> norm_limit(10.0, 0.1, 10_000, 1e-3) < 4  # Of noise alone, 10 long.
      True
    """
    t = math.log(2 / failure)
    along = std * math.sqrt(2 * t)
    least = std**2 * (dim - 2 * math.sqrt(dim * t))  # squared length of the noise
    return along + math.sqrt(max(along**2 + norm**2 - least, 0.0))


def _bounded(released: Any, plan: DPGD, dim: int, failure: float) -> PrivateGoldstein:
    """Returns the bound that follows from a release."""
    vector = np.asarray(ravel_pytree(released)[0], np.float64)
    norm = float(np.linalg.norm(vector)) * _ROUNDED
    clip, bits = plan.l2_clip_norm, plan.numbers.grid.bits
    assert bits is not None  # There is noise.
    limit = norm_limit(norm, plan.noise_std, dim, failure * 2 / 3)
    rounding = clip * (math.sqrt(dim) * 2.0**-bits + _MARGIN)
    deviation = 1 + math.sqrt(2 * math.log(3 / failure))
    sampling_error = clip / math.sqrt(plan.num_examples) * deviation
    return PrivateGoldstein(
        bound=limit + rounding + sampling_error,
        records_bound=limit + rounding,
        failure_probability=failure,
        release=released,
        mean_norm=limit,
        rounding=rounding,
        sampling_error=sampling_error,
        plan=plan,
    )


def _at_points(
    value_fn: ValueFn, points: Direction, scale: float
) -> Callable[[Any, Any], jax.Array]:
    """Returns losses whose gradient is the mean of the losses' gradients at points."""

    def losses(params: Any, batch: Any) -> jax.Array:
        # At the parameters themselves this is the point, and its derivative is one.
        here = jax.tree.map(jax.lax.stop_gradient, params)

        @jax.checkpoint
        def at(point: Direction) -> jax.Array:
            moved = perturb.perturb(here, point, jnp.float32(scale))
            there = jax.tree.map(lambda y, p, h: y + (p - h), moved, params, here)
            found = value_fn(there, batch)
            finite_difference.check_losses(found, finite_difference.num_rows(batch))
            return found

        return jax.lax.map(at, points).mean(axis=0)

    return losses


def _reach(x: Any, flat: Any, radius: float) -> float:
    """Returns a radius such that points in its ball are within ``radius`` once rounded."""
    if not flat.size or not np.isfinite(np.asarray(flat, np.float64)).all():
        raise ValueError("x must have elements, all of them finite")
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"x must have floating leaves, got {jnp.result_type(leaf)}")
    precision = max(
        float(jnp.finfo(jnp.result_type(leaf)).eps) for leaf in jax.tree.leaves(x)
    )
    norm = float(np.linalg.norm(np.asarray(flat, np.float64)))
    # Norms of directions are right to about 1e-6.
    rounding = precision * (norm + radius) + 1e-5 * radius
    if rounding > radius / 2:
        raise ValueError(
            f"radius must be well above the rounding of x, {rounding:.2g}; got {radius}"
        )
    return radius - rounding
