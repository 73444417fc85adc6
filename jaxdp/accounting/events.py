"""What is released, as events that an accountant understands."""

from collections.abc import Callable
from typing import NamedTuple, get_args

import dp_accounting as dp

from jaxdp import _validate
from jaxdp._types import Relation

RELATIONS: tuple[Relation, ...] = get_args(Relation)

_UNSAMPLED = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
_SAMPLED = {
    "replace_one": dp.NeighboringRelation.REPLACE_ONE,
    "zero_out": dp.NeighboringRelation.REPLACE_SPECIAL,
    "add_or_remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
}


class Guarantee(NamedTuple):
    """What is released, for an accountant: the two belong together.

    Attributes:
      event: the dp-accounting event of all releases.
      event_relation: the relation under which an accountant is to compose it.
    """

    event: dp.DpEvent
    event_relation: dp.NeighboringRelation


def sensitivity(relation: Relation, l2_clip_norm: float) -> float:
    """How far one record moves the sum of clipped contributions, in L2.

    The only place that knows the factor: 2 where a record may be replaced by any other
    (from +C to -C), 1 where it appears, disappears, or becomes zero.

    Args:
      relation: one of :data:`RELATIONS`.
      l2_clip_norm: C > 0, the bound on one contribution; infinity gives infinity.
    """
    _validate.one_of(RELATIONS, relation=relation)
    _validate.positive(allow_inf=True, l2_clip_norm=l2_clip_norm)
    return (2.0 if relation == "replace_one" else 1.0) * float(l2_clip_norm)


def full_batch_gaussian(
    noise_multiplier: float, num_steps: int, relation: Relation
) -> Guarantee:
    """``num_steps`` Gaussian sums over all records, each free to use the earlier ones.

    Args:
      noise_multiplier: std over the sensitivity, >= 0; 0 is not private.
      num_steps: >= 1.
      relation: one of :data:`RELATIONS`; it is in the sensitivity, not in the event.
    """
    _validate.one_of(RELATIONS, relation=relation)
    return _repeated(dp.GaussianDpEvent, noise_multiplier, num_steps, _UNSAMPLED)


def poisson_gaussian(
    noise_multiplier: float, num_steps: int, *, sampling_prob: float, relation: Relation
) -> Guarantee:
    """Gaussian sums over records that are drawn independently, anew at each step.

    Under ``"replace_one"`` PLD's worst pair is proved to be the worst for a release of
    one scalar; for vectors this was verified numerically, not proved.

    Args:
      noise_multiplier: std over the sensitivity, >= 0; 0 is not private.
      num_steps: >= 1.
      sampling_prob: in (0, 1), of each record at each step.
      relation: one of :data:`RELATIONS`.
    """
    _validate.probability(sampling_prob=sampling_prob)
    _validate.one_of(RELATIONS, relation=relation)

    def step(multiplier: float) -> dp.DpEvent:
        gaussian = dp.GaussianDpEvent(multiplier * sensitivity(relation, 1.0))
        return dp.PoissonSampledDpEvent(float(sampling_prob), gaussian)

    return _repeated(step, noise_multiplier, num_steps, _SAMPLED[relation])


def truncated_poisson_gaussian(
    noise_multiplier: float,
    num_steps: int,
    *,
    sampling_prob: float,
    num_examples: int,
    max_batch_size: int,
    relation: Relation,
) -> Guarantee:
    """Gaussian sums over a Poisson sample, cut to size by a uniformly random subset.

    dp-accounting conditions on whether the *other* records alone fill the batch. If not,
    this is Poisson sampling. If so, a record that is drawn and kept also pushes another
    one out, which can move the sum by 2C under every relation. For this part the event
    takes a pair that is 2C away on both sides, under all three relations: a bound, and a
    slightly loose one.

    The event wants the size of the larger of the two data sets: ``num_examples`` when a
    record is replaced or zeroed (a zeroed one keeps its place in the batch), and
    ``num_examples + 1`` when one may be added. That covers the removal of one too as long
    as the expected sample fits in the batch (checked numerically, for every epsilon).
    Where it does not, most batches are full and *fewer* records cost more, so it is
    refused.

    As to vectors, what :func:`poisson_gaussian` says of ``"replace_one"`` holds here of
    ``"zero_out"`` as well.

    Args:
      noise_multiplier: std over the sensitivity, >= 0; 0 is not private.
      num_steps: >= 1.
      sampling_prob: in (0, 1), of each record at each step.
      num_examples: n >= 1, the size of the data set; public.
      max_batch_size: >= 1; from ``q n + 4 sqrt(q n)`` on, truncation costs next to
        nothing.
      relation: one of :data:`RELATIONS`.

    Raises:
      ValueError: an argument is out of range, or under ``"add_or_remove"``
        ``max_batch_size < sampling_prob * (num_examples + 1)``.

    References:
      Method and event: https://arxiv.org/abs/2508.15089.
    """
    _validate.probability(sampling_prob=sampling_prob)
    _validate.integer(num_examples=num_examples, max_batch_size=max_batch_size)
    _validate.one_of(RELATIONS, relation=relation)
    larger = int(num_examples)
    if relation == "add_or_remove":
        larger += 1
        if max_batch_size < sampling_prob * larger:
            raise ValueError(
                "max_batch_size must be >= sampling_prob * (num_examples + 1) = "
                f"{sampling_prob * larger:g} under 'add_or_remove', "
                f"got {max_batch_size!r}"
            )

    def step(multiplier: float) -> dp.DpEvent:
        return dp.TruncatedSubsampledGaussianDpEvent(
            dataset_size=larger,
            sampling_probability=float(sampling_prob),
            truncated_batch_size=int(max_batch_size),
            noise_multiplier=multiplier * sensitivity(relation, 1.0),
        )

    return _repeated(step, noise_multiplier, num_steps, _SAMPLED[relation])


def _repeated(
    step: Callable[[float], dp.DpEvent],
    noise_multiplier: float,
    num_steps: int,
    event_relation: dp.NeighboringRelation,
) -> Guarantee:
    _validate.non_negative(noise_multiplier=noise_multiplier)
    _validate.integer(num_steps=num_steps)
    if noise_multiplier == 0:
        return Guarantee(dp.NonPrivateDpEvent(), event_relation)
    event = dp.SelfComposedDpEvent(step(float(noise_multiplier)), int(num_steps))
    return Guarantee(event, event_relation)
