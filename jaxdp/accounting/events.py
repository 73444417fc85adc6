"""Privacy events of releases, as an accountant understands them."""

import math
import numbers
from collections.abc import Callable, Sequence

import attr
import dp_accounting as dp
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from jaxdp.accounting.basics import RELATIONS, Guarantee, sensitivity
from jaxdp.core import validate
from jaxdp.core.types import Relation

_UNSAMPLED = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
_SAMPLED = {
    "replace_one": dp.NeighboringRelation.REPLACE_ONE,
    "zero_out": dp.NeighboringRelation.REPLACE_SPECIAL,
    "add_or_remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
}


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureZCDpEvent(dp.ZCDpEvent):
    """A zCDP event of which a pure epsilon is known, too.

    To other accountants it is the zCDP event; this package takes the better of both.

    Attributes:
      pure_epsilon: at delta = 0.
    """

    pure_epsilon: float = math.inf


def full_batch_gaussian(
    noise_multiplier: float,
    num_steps: int,
    relation: Relation,
    *,
    among_sampled: bool = False,
) -> Guarantee:
    """Returns the guarantee of ``num_steps`` adaptive Gaussian sums over all records.

    The same holds of sums over parts of the records, if ``num_steps`` counts those that
    one record can enter: the others tell nothing of it.

    Args:
      noise_multiplier: std over the sensitivity, >= 0; 0 is not private.
      num_steps: >= 1.
      relation: one of :data:`RELATIONS`; it is in the sensitivity, not in the event.
      among_sampled: whether the event is stated as those of sampled Gaussians are, to be
        composed with them: relative to C, under the relation itself.
    """
    step, stated = dp.GaussianDpEvent, relation if among_sampled else None
    validate.one_of(RELATIONS, relation=relation)
    return _repeated(step, noise_multiplier, num_steps, stated)


def composed(guarantees: Sequence[Guarantee]) -> Guarantee:
    """Composes mechanisms on the same records, each free to use the earlier releases.

    Args:
      guarantees: at least one, all stated under one relation.

    Raises:
      ValueError: none, or under different relations, whose events mean different things.
    """
    relations = {each.event_relation for each in guarantees}
    if len(relations) != 1:
        names = sorted(relation.name for relation in relations)
        raise ValueError(f"guarantees must be of one relation, got {names}")
    event = dp.ComposedDpEvent([each.event for each in guarantees])
    return Guarantee(event, relations.pop())


def poisson_gaussian(
    noise_multiplier: float, num_steps: int, *, sampling_prob: float, relation: Relation
) -> Guarantee:
    """Returns the guarantee of Gaussian sums over Poisson samples, drawn at each step.

    PLD's worst pair of a scalar is the worst of vectors too, under every relation: the
    lemma is in ``docs/concepts/accounting.md``, "Sampled vectors".

    The arguments are those of :func:`full_batch_gaussian`, and ``sampling_prob`` in (0, 1)
    that of each record at each step.
    """
    validate.probability(sampling_prob=sampling_prob)

    def step(multiplier: float) -> dp.DpEvent:
        event = dp.GaussianDpEvent(multiplier)
        return dp.PoissonSampledDpEvent(float(sampling_prob), event)

    return _repeated(step, noise_multiplier, num_steps, relation)


def truncated_poisson_gaussian(
    noise_multiplier: float,
    num_steps: int,
    *,
    sampling_prob: float,
    num_examples: int,
    max_batch_size: int,
    relation: Relation,
) -> Guarantee:
    """Returns the guarantee of Gaussian sums over Poisson samples that are truncated.

    A sample is cut to size by a uniformly random subset.

    dp-accounting conditions on whether the *other* records alone fill the batch. If not,
    this is Poisson sampling. If so, a record that is drawn and kept also pushes another
    one out, which can move the sum by 2C under every relation. For this part the event
    takes a pair that is 2C away on both sides, under all three relations: a bound, and a
    slightly loose one.

    The event wants the size of the larger of the two data sets, which is ``num_examples``
    under every relation: that is public, and a record that is zeroed or absent keeps its
    place. It may be drawn, and then takes a place of the batch.

    It holds for vectors, too, by the lemma that :func:`poisson_gaussian` names.

    Args:
      noise_multiplier: as of :func:`poisson_gaussian`, and so is what is not named here.
      num_steps: >= 1.
      sampling_prob: in (0, 1).
      num_examples: n >= 1, the size of the data set; public.
      max_batch_size: >= 1; what truncation costs is in ``docs/guides/pitfalls.md``,
        "Truncated batches".
      relation: one of :data:`RELATIONS`.

    Raises:
      ValueError: an argument is out of range.

    References:
      Method and event: https://arxiv.org/abs/2508.15089.
    """
    validate.probability(sampling_prob=sampling_prob)
    validate.integer(num_examples=num_examples, max_batch_size=max_batch_size)

    def step(multiplier: float) -> dp.DpEvent:
        return dp.TruncatedSubsampledGaussianDpEvent(
            dataset_size=int(num_examples),
            sampling_probability=float(sampling_prob),
            truncated_batch_size=int(max_batch_size),
            noise_multiplier=multiplier,
        )

    return _repeated(step, noise_multiplier, num_steps, relation)


def fixed_size_gaussian(
    noise_multiplier: float,
    num_steps: int,
    *,
    num_examples: int,
    batch_size: int,
    relation: Relation,
) -> Guarantee:
    """Returns the guarantee of Gaussian sums over uniformly random subsets of one size.

    They are drawn anew at each step.

    Accounted for ``"replace_one"`` by PLD, whose worst pair is exact for one step and
    composes adaptively (:mod:`jaxdp.accounting.subsets`). Elsewhere the event is a valid
    one of RDP, which charges about twice as much. Poisson sampling costs less: little less
    where the noise is well above the clip, and many times less where it is below.

    Args:
      noise_multiplier: as of :func:`full_batch_gaussian`.
      num_steps: >= 1.
      num_examples: n >= 1, the size of the data set; public.
      batch_size: in [1, n]; n is the full batch.
      relation: must be ``"replace_one"``.

    Raises:
      ValueError: an argument is out of range, or another relation.

    References:
      Zhu, Dong & Wang, `Optimal Accounting of Differential Privacy via Characteristic
      Function <https://arxiv.org/abs/2106.08567>`_, 2022; by RDP: Wang, Balle &
      Kasiviswanathan, `Subsampled Renyi Differential Privacy
      <https://arxiv.org/abs/1808.00087>`_, 2019, Theorem 27.
    """
    validate.integer(num_examples=num_examples)
    validate.integer(at_most=num_examples, batch_size=batch_size)
    validate.one_of(RELATIONS, relation=relation)
    if relation != "replace_one":
        raise ValueError(
            "relation must be 'replace_one' with random batches of a fixed size, got "
            f"{relation!r}: a record that joins or leaves changes how often the others "
            "are drawn, for which no accountant has a bound. (To zero a record is to "
            "replace it, so 'replace_one' covers 'zero_out'.)"
        )
    if batch_size == num_examples:
        return full_batch_gaussian(noise_multiplier, num_steps, relation)

    def step(multiplier: float) -> dp.DpEvent:
        # Relative to 2C: so dp-accounting documents it, for this event alone.
        gaussian = dp.GaussianDpEvent(multiplier / sensitivity(relation, 1.0))
        return dp.SampledWithoutReplacementDpEvent(
            int(num_examples), int(batch_size), gaussian
        )

    return _repeated(step, noise_multiplier, num_steps, relation)


def full_batch_laplace(
    noise_multiplier: float, num_steps: int, relation: Relation
) -> Guarantee:
    """Returns the guarantee of sums over all records with Laplace noise: pure DP.

    With an integer query of sensitivity S and the discrete Laplace noise of
    :func:`jaxdp.core.noise.discrete_laplace`, this holds for an integer scale b if
    ``b - 1`` is still S times the scale accounted for. (To divide S by b for epsilon makes
    it purely epsilon-DP; its curve at delta > 0 is that of a continuous Laplace whose
    epsilon is larger by ``2 log cosh(1 / 2b)``, for which one unit of scale pays.)

    Args:
      noise_multiplier: std over the L1 sensitivity, >= 0; the scale is std / sqrt(2).
      num_steps: >= 1.
      relation: one of :data:`RELATIONS`; it is in the sensitivity, not in the event.
    """
    validate.one_of(RELATIONS, relation=relation)
    return _repeated(_laplace, noise_multiplier, num_steps, None)


def poisson_laplace(
    noise_multiplier: float, num_steps: int, *, sampling_prob: float, relation: Relation
) -> Guarantee:
    """Returns the guarantee of Laplace sums over Poisson samples, drawn at each step.

    Pure as well: a step costs ``log(1 + q (exp(1 / scale) - 1))``.

    Args:
      noise_multiplier: as of :func:`full_batch_laplace`.
      num_steps: >= 1.
      sampling_prob: q in (0, 1), of each record at each step.
      relation: ``"zero_out"`` or ``"add_or_remove"``.

    Raises:
      ValueError: an argument is out of range, or ``"replace_one"``.
    """
    validate.probability(sampling_prob=sampling_prob)
    validate.one_of(RELATIONS, relation=relation)
    if relation == "replace_one":
        raise ValueError(
            "relation must be 'zero_out' or 'add_or_remove' with sampled Laplace noise, "
            "got 'replace_one', for which dp-accounting has no bound; without sampling "
            "every relation is accounted"
        )

    def step(multiplier: float) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(float(sampling_prob), _laplace(multiplier))

    return _repeated(step, noise_multiplier, num_steps, relation)


def non_private() -> Guarantee:
    """Returns the guarantee of releases that nothing bounds."""
    return Guarantee(dp.NonPrivateDpEvent(), _UNSAMPLED)


def zcdp(rho: float, pure_epsilon: float = math.inf) -> Guarantee:
    """Returns the guarantee of a mechanism of which its zCDP is known.

    Args:
      rho: >= 0, finite, for the relation that matters: it is not in the event. That of
        Gaussian sums is :func:`gaussian_rho`.
      pure_epsilon: >= 0, its epsilon at delta = 0; infinite where none is known. What is
        reported of it alone, or of a composition of such mechanisms, is the better of the
        sums of both.
    """
    validate.non_negative(rho=rho)
    if pure_epsilon == math.inf:
        return Guarantee(dp.ZCDpEvent(float(rho)), _UNSAMPLED)
    validate.non_negative(pure_epsilon=pure_epsilon)
    event = PureZCDpEvent(float(rho), pure_epsilon=float(pure_epsilon))
    return Guarantee(event, _UNSAMPLED)


def repeat_and_select(guarantee: Guarantee, *, mean: float, shape: float) -> Guarantee:
    """Returns the guarantee of the best of a random number of runs, the others not shown.

    Each run has the same guarantee, fresh noise, and a score by which it is selected. The
    score must be an output of the run: computed from its releases and from public data.
    The law of the number of runs is named by ``shape``: 0 the logarithmic, 1 the
    geometric, infinity the Poisson (which may run nothing at all), and in between the
    truncated negative binomial.

    Only RDP accounts this, so every event in ``guarantee`` must be one that RDP supports:
    Gaussians, Poisson samples that are never truncated and not under replace-one, random
    subsets of a fixed size, Laplace without sampling, zCDP.

    Args:
      guarantee: of one run.
      mean: >= 1, finite; expected number of runs.
      shape: >= 0 or infinity.

    Raises:
      TypeError, ValueError: an argument is of the wrong type or out of range.

    References:
      Papernot & Steinke, `Hyperparameter Tuning with Renyi Differential Privacy
      <https://arxiv.org/abs/2110.03620>`_, 2022, Theorems 2 and 6.
    """
    validate.instance(Guarantee, guarantee=guarantee)
    validate.positive(mean=mean)
    if mean < 1:
        raise ValueError(f"mean must be a number >= 1, got {mean!r}")
    if isinstance(shape, bool) or not isinstance(shape, numbers.Real):
        raise TypeError(f"shape must be a number >= 0 or infinity, got {shape!r}")
    if math.isnan(shape) or shape < 0:
        raise ValueError(f"shape must be a number >= 0 or infinity, got {shape!r}")
    event = RepeatAndSelectDpEvent(guarantee.event, float(mean), float(shape))
    return Guarantee(event, guarantee.event_relation)


def _laplace(noise_multiplier: float) -> dp.DpEvent:
    """Returns the Laplace event of a multiplier; dp-accounting's parameter is its scale."""
    return dp.LaplaceDpEvent(noise_multiplier / math.sqrt(2))


def _repeated(
    step: Callable[[float], dp.DpEvent],
    noise_multiplier: float,
    num_steps: int,
    relation: Relation | None,
) -> Guarantee:
    """Composes equal steps: relative to C, under a relation, or else to the sensitivity."""
    validate.non_negative(noise_multiplier=noise_multiplier)
    validate.integer(num_steps=num_steps)
    unit = 1.0 if relation is None else sensitivity(relation, 1.0)
    stated = _UNSAMPLED if relation is None else _SAMPLED[relation]
    if noise_multiplier == 0:
        return Guarantee(dp.NonPrivateDpEvent(), stated)
    multiplier = float(noise_multiplier) * unit
    return Guarantee(dp.SelfComposedDpEvent(step(multiplier), int(num_steps)), stated)
