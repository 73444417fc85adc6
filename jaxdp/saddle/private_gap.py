r"""The duality gap of private records: one number, noised and charged.

What :mod:`jaxdp.metrics.duality_gap` computes on private records is a statistic of them
that nobody paid for. Here a bound from one gradient is made insensitive to a single
record, by clipping, and released once.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting
from jaxdp.accounting import Guarantee
from jaxdp.core import keys as keys_lib
from jaxdp.core import noise, validate
from jaxdp.core.types import Relation, ReleaseBudget
from jaxdp.kernels import finite_difference
from jaxdp.saddle import oracles
from jaxdp.sampling import batches

#: The noise has this many steps of its grid to the sensitivity, in powers of two.
_NOISE_BITS = 20
#: Public weights are rounded to multiples of 2**-30: 2**30 gradients of 2**31 fit int64.
_WEIGHT_BITS = 30
_MOST_BITS = 16


class PrivateGap(NamedTuple):
    """Noised upper bound on the duality gap, with its guarantee.

    Attributes:
      value: the release: unbiased for the bound on the clipped records, but for a
        millionth of the sensitivity; may be negative.
      std: standard deviation of its noise.
      sensitivity: how far one record can move the bound.
      guarantee: to be composed with those of everything else released about the records.
    """

    value: float
    std: float
    sensitivity: float
    guarantee: Guarantee


def private_gap(
    problem: oracles.VertexGradients,
    weights_x: Any,
    weights_y: Any,
    data: Any,
    keys: keys_lib.Keys,
    *,
    noise_multiplier: float,
    relation: Relation,
    linf_clip_norm_x: float,
    linf_clip_norm_y: float | None = None,
    num_examples: int,
    center_gradients: bool = False,
    microbatch_size: int | None = None,
    budget: ReleaseBudget | None = None,
    delta: float | None = None,
) -> PrivateGap:
    r"""Releases an upper bound on the gap of private records, at public points.

    With :math:`g` and :math:`h` the means of the records' vertex gradients, each of their
    coordinates clipped to :math:`[-C_x,C_x]`, :math:`[-C_y,C_y]`, and :math:`\lambda,\mu`
    the weights of the points, it is the linear bound on the gap of the records,

    .. math:: G=\langle g,\lambda\rangle-\min_ig_i+\max_jh_j-\langle h,\mu\rangle,

    with noise. It bounds the gap on these records as long as nothing is clipped. The points
    count as public: they are released themselves, by a plan that accounts for it. If the
    same records chose them, G is that of the training data.

    Sensitivity: :math:`2\kappa(C_x+C_y)/n`, with :math:`\kappa=2` where a record is
    replaced and 1 otherwise, and some records reach it. Proof: the sum of the clipped
    gradients changes by a vector t with :math:`\|t\|_\infty\le\kappa C_x`, and
    :math:`\min_i(s+t)_i-\min_is_i` lies in :math:`[\min t,\max t]` as does
    :math:`\langle t,\lambda\rangle`, for :math:`\lambda\ge0` sum to 1. The difference of
    the two is at most :math:`\max t-\min t\le2\kappa C_x`. The same for y; the two add up.
    All of it in integers: clipped coordinates and weights lie on grids, sums are exact, and
    their combination is rounded down once, in units of :math:`2^{-20}` of the
    sensitivity. (Two reals that are at most an integer apart are no further apart after
    rounding down.) The noise is the exact discrete Gaussian, of one draw.

    A clip of half the range does for one-sided gradients, such as losses in [0, B], if
    ``center_gradients``: G ignores common shifts of a record's coordinates.

    Args:
      problem: a problem of :mod:`jaxdp.saddle.oracles`.
      weights_x: of the vertices of x, (m_x,), >= 0, of sum 1: for the simplex, the point.
        Public; rounded to multiples of 2**-30, and so that their sum is exactly 1.
      weights_y: of the vertices of y, (m_y,); None for problems without a y.
      data: pytree with leading axis n, the records; private.
      keys: serve one private gap, besides a run.
      noise_multiplier: std over the sensitivity, > 0.
      relation: one of :data:`jaxdp.accounting.RELATIONS`.
      linf_clip_norm_x: C_x > 0, of a coordinate of one record's vertex gradient.
      linf_clip_norm_y: C_y > 0; None without a y.
      num_examples: n, public; the sums are divided by it. With ``"add_or_remove"`` the data
        may have one record more or less.
      center_gradients: whether a record's coordinates are taken relative to the middle of
        their range, before they are clipped.
      microbatch_size: records evaluated at once.
      budget: a :class:`jaxdp.Budget`, in which the release is reserved before it is made.
      delta: in (0, 1), at which the budget is charged; needed with one.

    Returns:
      A :class:`PrivateGap`.

    Raises:
      TypeError: an argument of another type.
      ValueError: a number out of its range, weights of the wrong size, sign or sum, another
        number of records than n, keys that have served a private gap, or what a budget
        refuses.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> game = jaxdp.models.rock_paper_scissors(dim=4)
      >>> problem, even = jaxdp.MatrixGame(game.matrix, scale=0.5), jnp.full(4, 0.25)
      >>> gap = jaxdp.metrics.private_gap(
      ...     problem, even, even, game.make_data(1000, seed=0),
      ...     jaxdp.Keys.insecure(0), noise_multiplier=2.0, relation="replace_one",
      ...     linf_clip_norm_x=1.5, linf_clip_norm_y=1.5, num_examples=1000,
      ... )
      >>> round(gap.sensitivity, 3), round(gap.std, 3)
      (0.012, 0.024)
    """
    validate.positive(
        noise_multiplier=noise_multiplier, linf_clip_norm_x=linf_clip_norm_x
    )
    validate.integer(num_examples=num_examples, at_most=2**29)
    validate.instance(oracles.VertexGradients, problem=problem)
    kappa = accounting.sensitivity(relation, 1.0)
    keys_lib.check(keys)
    if (weights_y is None) != (linf_clip_norm_y is None):
        raise ValueError(
            "linf_clip_norm_y must be None if and only if weights_y is, got "
            f"{linf_clip_norm_y!r}"
        )
    validate.instance(bool, center_gradients=center_gradients)
    if budget is not None:
        validate.instance(ReleaseBudget, budget=budget)
    elif delta is not None:
        raise ValueError(f"delta must be None without a budget, got {delta!r}")
    if microbatch_size is not None:
        validate.integer(microbatch_size=microbatch_size)
    rows = finite_difference.num_rows(data, "data")
    slack = 1 if relation == "add_or_remove" else 0
    if abs(rows - num_examples) > slack:
        raise ValueError(
            f"data must have num_examples={num_examples} records, got {rows}"
        )
    data = jax.tree.map(batches.narrowed, data)
    clip_x, clip_y = Fraction(linf_clip_norm_x), Fraction(0)
    bits = min(_MOST_BITS, ((2**31 - 1) // (num_examples + 1)).bit_length() - 1)
    bound_x = oracles.Bound(float(linf_clip_norm_x), bits)
    counts_x, x = _public_point("weights_x", weights_x, problem.domain_x)
    counts_y = y = bound_y = None
    if linf_clip_norm_y is not None:
        validate.positive(linf_clip_norm_y=linf_clip_norm_y)
        clip_y = Fraction(linf_clip_norm_y)
        bound_y = oracles.Bound(float(linf_clip_norm_y), bits)
        counts_y, y = _public_point("weights_y", weights_y, problem.domain_y)
    # One shape for all neighbours: the same program, hence the same bits of a record.
    extra = num_examples + slack - rows
    if extra:
        data = jax.tree.map(
            lambda v: jnp.pad(v, [(0, extra)] + [(0, 0)] * (jnp.ndim(v) - 1)), data
        )
    mask = batches.present(data, jnp.arange(rows + extra) < rows)
    how = (problem, bound_x, bound_y, center_gradients, microbatch_size)
    shapes = jax.eval_shape(lambda *given: _sums(*given, *how), x, y, data, mask)
    for name, counts, total in zip(
        ("weights_x", "weights_y"), (counts_x, counts_y), shapes, strict=True
    ):
        if counts is not None and total.shape != (len(counts),):
            raise ValueError(
                f"{name} must be of {total.shape[0]} vertices, as the problem has them, "
                f"got {len(counts)}"
            )
    std = accounting.integer_std(noise_multiplier * 2**_NOISE_BITS)
    guarantee = accounting.full_batch_gaussian(noise_multiplier, 1, relation)
    if budget is not None:
        keys_lib.check_unspent(keys, "private_gap")
        how_charged = {"delta": delta, "relation": relation}
        unit = batches.unit_of(data)
        budget.reserve(guarantee, what="private gap", unit=unit, **how_charged)
    keys_lib.spend(keys, "private_gap")  # Nothing raises from here on.
    total_x, total_y = _sums(x, y, data, mask, *how)
    excess = clip_x * _excess(counts_x, total_x)
    if counts_y is not None:
        excess += clip_y * _excess(counts_y, -np.asarray(total_y, np.int64))
    # In units of 2**-(bits + 30) of n G; then in units of the noise's grid.
    worst = 2 * int(kappa) * (clip_x + clip_y)
    exact = math.floor(
        excess / worst * Fraction(2) ** (_NOISE_BITS - _WEIGHT_BITS - bits)
    )
    coins = noise.Coins(keys_lib.exact_noise_secret(keys), "private_gap")
    noised = exact + int(noise.discrete_gaussian(coins, std, 1)[0])
    sensitivity = worst / num_examples
    unit = sensitivity / 2**_NOISE_BITS
    return PrivateGap(
        value=float(noised * unit),
        std=float(std * unit),
        sensitivity=float(sensitivity),
        guarantee=guarantee,
    )


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _sums(x, y, data, mask, problem, bound_x, bound_y, center, microbatch_size) -> Any:
    """Computes the sums over all records in one program. Secret."""
    bounds, options = (bound_x, bound_y), {"microbatch_size": microbatch_size}
    return problem.gradient_sums(x, y, data, mask, *bounds, center=center, **options)


def _public_point(name: str, weights: Any, domain: Any) -> tuple[np.ndarray, jax.Array]:
    """Returns weights as integers of sum 2**30, and the point of these weights."""
    exact = np.asarray(weights, np.float64)
    if exact.ndim != 1 or not exact.size:
        raise ValueError(f"{name} must have shape (m,), got shape {exact.shape}")
    if domain is not None and len(exact) != domain.num_vertices:
        raise ValueError(
            f"{name} must have one number for each of {domain.num_vertices} vertices, "
            f"got {len(exact)}"
        )
    if not (exact >= 0).all() or not abs(exact.sum() - 1) <= 1e-3:
        raise ValueError(f"{name} must be >= 0, of sum 1; the sum is {exact.sum():g}")
    counts = np.floor(exact / exact.sum() * 2**_WEIGHT_BITS).astype(np.int64)
    counts[np.argmax(counts)] += 2**_WEIGHT_BITS - counts.sum()
    rounded = jnp.asarray(counts / 2**_WEIGHT_BITS, jnp.float32)
    return counts, rounded if domain is None else domain.point(rounded)


def _excess(counts: np.ndarray, total: Any) -> int:
    """Computes ``<total, counts> - 2**30 min(total)`` exactly; it is at least 0."""
    t = np.asarray(total, np.int64)
    return int(counts @ t) - 2**_WEIGHT_BITS * int(t.min())
