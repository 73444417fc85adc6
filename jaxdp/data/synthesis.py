r"""Synthetic tables from marginals that are measured once, with noise.

Every cell of every marginal is counted, all counts get Gaussian noise of one release, and
the histogram is fitted to them afterwards. Sensitivity: a record counts once in each of M
marginals. Its vector, centred, has in a marginal of k cells the squared L2 norm 1 - 1/k;
the sum over marginals is the squared clip norm of a ``plans.DPGD`` with one step, whose
"gradients" the vectors are. So bound, integer noise, accountant and ledger are the
library's own.

Mirror descent (``plans.SyntheticData``) releases one query a step instead. Wherever either
was of use, measured marginals were better (``make bench ARGS="synthesize"``).

References:
  McKenna, Sheldon and Miklau, `Graphical-model based estimation and inference for
  differential privacy <https://arxiv.org/abs/1901.09136>`_, 2019.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import plans, sampling, training
from jaxdp.core import keys as keys_lib
from jaxdp.core.types import Relation
from jaxdp.saddle.oracles.queries import Marginals

Method = Literal["marginals", "mirror_descent"]

_FIT_STEPS = 1000
#: Weight of the divergence from the uniform histogram, in units of the noise's variance:
#: without it, a histogram of few records fits the noise. Tables of 300 to 20000 records
#: lose nothing by it where noise is small, and a fifth of the error where it is large.
_PRIOR_WEIGHT = 10.0
#: Records whose vectors are held at once.
_MICROBATCH = 1024


def marginals(sizes: Sequence[int], degrees: Sequence[int]) -> Marginals:
    """Returns the queries of all sets of columns of the given sizes.

    Args:
      sizes: cells of each column.
      degrees: numbers of columns of a set, each in [1, len(sizes)].

    Raises:
      ValueError: a degree that is out of range or there twice, named ``degree``.
    """
    width = len(sizes)
    if not degrees or len(set(degrees)) < len(degrees):
        raise ValueError(f"degree must be different integers, got {tuple(degrees)}")
    for degree in degrees:
        if not 1 <= degree <= width:
            raise ValueError(
                f"degree must be an integer >= 1 and <= {width}, got {degree}"
            )
    if len(degrees) == 1:
        return Marginals(tuple(sizes), degrees[0])
    sets = [itertools.combinations(range(width), degree) for degree in sorted(degrees)]
    return Marginals(tuple(sizes), attributes=tuple(itertools.chain(*sets)))


# --- the release -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CellCounts:
    """Losses whose gradients are minus the centred cells of each record.

    ``CellCounts(queries)(params, codes)`` has the losses (B,) at params (m,). A code
    outside the domain has loss and gradient zero.
    """

    queries: Marginals

    @property
    def center(self) -> np.ndarray:
        """Share that every cell of a marginal has where records are uniform, (m,)."""
        cells = np.diff(self.queries.offsets)
        return np.repeat(1 / cells, cells).astype(np.float32)

    @property
    def l2_norm(self) -> float:
        """L2 norm of the gradient of any record within the domain."""
        return math.sqrt(sum(1 - 1 / int(k) for k in np.diff(self.queries.offsets)))

    def __call__(self, params: jax.Array, codes: jax.Array) -> jax.Array:
        inside = (codes >= 0) & (codes < self.queries.domain_size)
        cells = self.queries.cells_of(jnp.where(inside, codes, 0))
        sums = jnp.sum(params[cells], axis=-1) - params @ jnp.asarray(self.center)
        return jnp.where(inside, -sums, 0.0)


def measurement(
    queries: Marginals, *, num_examples: int, relation: Relation
) -> plans.DPGD:
    """Returns the plan that releases all marginals once; noise is to be calibrated.

    One record moves the sum by at most ``plan.sensitivity``: ``CellCounts.l2_norm``, and
    twice that under replace-one.
    """
    return plans.DPGD(
        num_examples=num_examples,
        num_steps=1,
        sampling=sampling.FullBatch(),
        relation=relation,
        l2_clip_norm=CellCounts(queries).l2_norm,
    )


class Choice(NamedTuple):
    """A calibrated plan and its method; public."""

    method: Method
    plan: plans.DPGD | plans.SyntheticData
    #: Deviation of the noise on each measured share; None of mirror descent.
    noise_std: float | None


def planned(
    queries: Marginals,
    *,
    num_examples: int,
    relation: Relation,
    epsilon: float,
    delta: float,
    method: Method = "marginals",
    num_steps: int | None = None,
) -> Choice:
    """Returns the calibrated plan of a method.

    Args:
      queries: all marginals that are to be answered.
      num_examples: n; public.
      relation: which data sets are neighbours.
      epsilon: budget of the release.
      delta: budget of the release.
      method: how queries are answered.
      num_steps: of mirror descent; None is by its bound.

    Raises:
      ValueError: no noise meets the budget.
    """
    if method == "marginals":
        plan = measurement(queries, num_examples=num_examples, relation=relation)
        plan = plan.calibrate(epsilon=epsilon, delta=delta)
        return Choice(method, plan, plan.noise_std)
    steps = {} if num_steps is None else {"num_steps": num_steps}
    # The bound's step leaves budget where steps are few, of which ``certified`` warns; the
    # largest was better.
    played = plans.SyntheticData._from_theorem(
        "certified",
        num_examples=num_examples,
        domain_size=queries.domain_size,
        num_queries=2 * queries.num_queries,  # And the negations.
        query_range=queries.query_range,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        **steps,
    )
    return Choice(method, played.calibrate(epsilon=epsilon, delta=delta), None)


class Release(NamedTuple):
    """Result of a run; public."""

    histogram: np.ndarray  # shape=(domain_size,), dtype=float32
    #: Noised share of each query, shape=(m,), dtype=float32; of measured marginals.
    shares: np.ndarray | None
    report: dict[str, Any]


def release(
    choice: Choice,
    keys: keys_lib.Keys,
    codes: np.ndarray,
    queries: Marginals,
    *,
    progress: bool = False,
) -> Release:
    """Runs a plan on codes and returns the histogram.

    Args:
      choice: of :func:`planned`, for as many records.
      keys: of this run.
      codes: integers (n,); private. One outside the domain counts zero, which is a
        record that lies in all cells alike.
      queries: those of the plan.
      progress: draws a progress bar, where there is more than one step.
    """
    records = jnp.asarray(codes)
    if choice.noise_std is None:
        played: Any = queries  # Of three arguments, not two.
        start = jnp.full(queries.domain_size, 1 / queries.domain_size, jnp.float32)
        result = training.fit(
            choice.plan, keys, start, records, value_fn=played, progress=progress
        )
        return Release(np.asarray(result.params), None, result.report)
    counts = CellCounts(queries)
    result = training.fit(
        choice.plan,
        keys,
        jnp.zeros(queries.num_queries),
        records,
        value_fn=counts,
        optimizer=optax.sgd(1.0),  # From zero to minus the gradient: the mean itself.
        microbatch_size=min(_MICROBATCH, len(codes)),
    )
    shares = np.asarray(result.params) + counts.center
    histogram = fitted(queries, shares, choice.noise_std)
    return Release(histogram, shares, result.report)


def fitted(queries: Marginals, shares: Any, noise_std: float) -> np.ndarray:
    r"""Fits a histogram to noised answers: post-processing.

    Minimises :math:`\|Ap - s\|^2 / 2\sigma^2` plus ten times the divergence of p from
    uniform, over histograms p, by accelerated mirror descent with a proven step: the
    error is squared over marginals, each of which moves by at most the L1 norm of a step.

    Args:
      queries: m of them.
      shares: noised shares of records (m,).
      noise_std: deviation :math:`\sigma` of each share, > 0.

    Returns:
      float32 (domain_size,), of sum 1.

    References:
      Tseng, `On accelerated proximal gradient methods for convex-concave optimization
      <https://www.mit.edu/~dimitrib/PTseng/papers/apgm.pdf>`_, 2008, Algorithm 1, with the
      relative entropy as its distance.
    """
    # Queries are centred: 2 share - 1.
    answers = 2 * jnp.asarray(shares, jnp.float32) - 1
    weight = jnp.float32(4 * noise_std**2 * _PRIOR_WEIGHT)
    return np.asarray(_fitted(queries, answers, weight))


@functools.partial(jax.jit, static_argnums=0)
def _fitted(queries: Marginals, answers: jax.Array, weight: jax.Array) -> jax.Array:
    smoothness = 4.0 * len(
        queries.columns
    )  # In L1: a centred query has the values +-1.

    def step(carry: Any, _: None) -> Any:
        histogram, logits, momentum = carry
        moving = jax.nn.softmax(logits)
        at = histogram + momentum * (moving - histogram)
        gradient = queries.combined(queries.evaluate(at) - answers)
        scale = momentum * smoothness
        logits = (scale * logits - gradient) / (scale + weight)
        logits = logits - jnp.max(logits)
        histogram += momentum * (jax.nn.softmax(logits) - histogram)
        squared = momentum**2
        momentum = (jnp.sqrt(squared**2 + 4 * squared) - squared) / 2
        return (histogram, logits, momentum), None

    logits = jnp.zeros(queries.domain_size)
    start = jax.nn.softmax(logits), logits, jnp.float32(1)
    (histogram, *_), _ = jax.lax.scan(step, start, length=_FIT_STEPS)
    return histogram


def drawn(keys: keys_lib.Keys, histogram: np.ndarray, num_records: int) -> np.ndarray:
    """Draws records of a histogram by systematic sampling: post-processing.

    Every cell gets its expected number of records, rounded up or down, and the cells of
    the first columns together as well. Independent records (``jaxdp.synthetic_records``)
    would add the sampling error of a data set of that size.

    Args:
      keys: of the run; not spent.
      histogram: weights (domain_size,), >= 0, not all zero.
      num_records: how many.

    Returns:
      Codes, int64 (num_records,), in random order.
    """
    draws = keys_lib.uniforms(keys, (num_records + 1,))
    ends = np.cumsum(np.asarray(histogram, np.float64))
    places = (np.arange(num_records) + draws[-1]) / num_records * ends[-1]
    codes = np.searchsorted(ends, places, side="right")
    # A place may round up to the end of all; the last cell with weight is the one before.
    codes = np.minimum(codes, np.flatnonzero(histogram)[-1])
    return codes[np.argsort(draws[:-1])]
