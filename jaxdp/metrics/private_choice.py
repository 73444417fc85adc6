r"""A choice among public parameters by private records: one draw, charged once.

The exponential mechanism takes candidate k with probability proportional to
:math:`e^{-\tau g_k}`, g the mean over the records of their losses at the candidates, each
relative to the record's median and clipped to [-C, C]. It is the draw of one step of
:class:`jaxdp.plans.FrankWolfe`, whose vertices are the candidates: the same integers,
sampler and accounting.

Sensitivity: a record's numbers depend on this record alone, and each of them lies in
[-C, C], on a grid. So a record that is added, removed or zeroed moves every sum by at most
C, one that is replaced by at most 2C: a score by :math:`\Delta=\tau\kappa C/n` and a unit
of rounding, and the logarithm of a probability by at most :math:`2\Delta`, whatever K is.
The candidates may depend on one another and on all public records; what in them depends on
private records must have been charged.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxdp.saddle.algorithms.frank_wolfe as wolfe
from jaxdp import sampling
from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.core.types import Relation, ReleaseBudget, ValueFn
from jaxdp.saddle.oracles.candidates import Candidates
from jaxdp.saddle.plans.frank_wolfe import FrankWolfe
from jaxdp.sampling import batches


class PrivateChoice(NamedTuple):
    """Choice among candidates, with what it costs.

    Attributes:
      index: number of the chosen candidate, from 0; the release.
      params: that candidate.
      plan: the ``jaxdp.plans.FrankWolfe`` whose one draw the choice is:
        ``plan.epsilon(delta=0)`` is what it costs, ``plan.inverse_temperature`` tells how
        sharp it is.
    """

    index: int
    params: Any
    plan: FrankWolfe


def private_choice(
    value_fn: ValueFn,
    candidates: Sequence[Any],
    data: Any,
    keys: keys_lib.Keys,
    *,
    epsilon: float,
    relation: Relation,
    num_examples: int,
    linf_clip_norm: float,
    microbatch_size: int | None = None,
    budget: ReleaseBudget | None = None,
) -> PrivateChoice:
    r"""Chooses one of several public parameters by its loss on private records.

    For parameters that cost no privacy, where it is not known which are best: those of
    training on public records with several step sizes or weights, or without them.
    The charge is the same for two candidates and for a thousand.

    Candidate k is chosen with probability proportional to :math:`e^{-\tau g_k}`, where
    :math:`g_k` is the mean over records of their loss at k, relative to the median of the
    record's losses and clipped to [-C, C]. With :math:`\kappa=2` where a record is replaced
    and 1 otherwise, :math:`\tau` is :math:`\varepsilon n/2\kappa C`. But for probability p
    the chosen mean is above the least by at most
    :math:`2\kappa C\ln(K/p)/(n\varepsilon)`.

    Args:
      value_fn: ``(params, batch) -> losses (B,)``; less is better. It need not be
        differentiable: 0.0 and 1.0 for a right and a wrong class do as well.
      candidates: K >= 2 pytrees of arrays, of one structure and the same shapes. Public,
        or released before; all of them are held at once.
      data: pytree with leading axis n, the records; private.
      keys: serve this alone, as they serve one run.
      epsilon: > 0, of the choice: a pure guarantee, at delta = 0.
      relation: one of :data:`jaxdp.accounting.RELATIONS`. A record that is zeroed or absent
        leaves its row, which counts nothing: one whose floating numbers are all NaN does.
        (Records without any can be users' of ``jaxdp.by_user``, which have a mask.)
      num_examples: n, public; below 2**22.
      linf_clip_norm: C > 0, in units of the loss. A smaller C chooses more sharply, by
        losses that are clipped more.
      microbatch_size: records evaluated at once.
      budget: a :class:`jaxdp.Budget`, in which the choice is reserved before it is made.

    Returns:
      A :class:`PrivateChoice`.

    Privacy:
      One draw of the exponential mechanism by the certified integer sampler. One record
      moves each candidate's sum by at most C (2C if replaced), on integers. A loss that is
      not finite counts C, and a record none of whose losses is finite counts zero.

    Raises:
      TypeError: an argument of another type.
      ValueError: a number out of its range, fewer than two candidates or of differing
        shapes, another number of records than n, losses of another shape than (B,), keys
        that have served a run, or what a budget refuses.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> losses = lambda w, x: ((w - x) ** 2).sum(axis=-1)
      >>> candidates = [jnp.full(2, c) for c in (0.0, 0.9, 5.0)]
      >>> found = jaxdp.metrics.private_choice(
      ...     losses, candidates, jnp.ones((200, 2)), jaxdp.Keys.insecure(0), epsilon=1.0,
      ...     relation="replace_one", num_examples=200, linf_clip_norm=1.0,
      ... )
      >>> found.index, bool(found.plan.epsilon(delta=0) <= 1.0)
      (1, True)

    References:
      McSherry & Talwar, Mechanism Design via Differential Privacy, 2007. Among public
      steps: Gong & Li, `Private Zeroth-Order Optimization with Public Data
      <https://arxiv.org/abs/2511.10859>`_, 2025.
    """
    validate.is_callable(value_fn=value_fn)
    made = _checked(candidates)
    keys_lib.check(keys)
    if budget is not None:
        validate.instance(ReleaseBudget, budget=budget)
    if microbatch_size is not None:
        validate.integer(microbatch_size=microbatch_size)
    plan = FrankWolfe(
        num_examples=num_examples,
        num_steps=1,
        sampling=sampling.FullBatch(),
        relation=relation,
        dim=len(made),
        linf_clip_norm=linf_clip_norm,
    ).calibrate(epsilon=epsilon, delta=0.0)
    batches.check_data(plan.run, data)
    data = jax.tree.map(batches.narrowed, data)
    algorithm = wolfe.frank_wolfe(plan, keys, microbatch_size=microbatch_size)

    def draw(state: Any, data: Any, candidates: list[Any]) -> jax.Array:
        problem = Candidates(value_fn, candidates)
        return algorithm.step(state, data, value_fn=problem)[1].release

    outlines = jax.eval_shape(lambda: jnp.asarray(plan.uniform()))
    # What raises, raises before anything is spent.
    jax.eval_shape(draw, algorithm.init(outlines), data, made)
    if budget is not None:
        keys_lib.check_unspent(keys, "run")
        budget.reserve(plan, what="private choice", unit=batches.unit_of(data))
    release = jax.jit(draw)(algorithm.init(plan.uniform()), data, made)
    index = int(release[0])
    return PrivateChoice(index, candidates[index], plan)


def _checked(candidates: Any) -> list[Any]:
    """Returns candidates as arrays; TypeError or ValueError if they are no candidates."""
    wanted = "candidates must be a sequence of at least two pytrees of numeric arrays"
    if not isinstance(candidates, Sequence) or isinstance(candidates, str):
        raise TypeError(f"{wanted}, got {type(candidates).__name__}")
    if len(candidates) < 2:
        raise ValueError(f"{wanted}, got {len(candidates)}")
    for i, candidate in enumerate(candidates):
        named = jax.tree_util.tree_leaves_with_path(candidate)
        if not named:
            raise ValueError(
                f"{wanted}, got {candidate!r} without any at candidates[{i}]"
            )
        for path, leaf in named:
            if not validate.is_numeric(leaf):
                kind = getattr(leaf, "dtype", type(leaf).__name__)
                place = f"candidates[{i}]{jax.tree_util.keystr(path)}"
                raise TypeError(f"{wanted}, got one of {kind} at {place}")
    made = [jax.tree.map(jnp.asarray, candidate) for candidate in candidates]
    outlines = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in made]
    for i, other in enumerate(outlines[1:], 1):
        if other != outlines[0]:
            raise ValueError(
                "candidates must have one structure, and the same shapes and dtypes, but "
                f"candidate {i} differs from candidate 0"
            )
    return made
