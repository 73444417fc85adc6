"""Laws of integer noise, and the guarantees of law, sampler and relation together."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from jaxdp import accounting, sampling
from jaxdp.core.types import Relation

#: Names of the laws, as plans have them.
Noise = Literal["discrete", "laplace"]


@dataclasses.dataclass(frozen=True)
class Law:
    """Law of noise: bound and size of the noise on a sum.

    Attributes:
      order: of the norm in which one record's contribution is bounded: 1 or 2.
      deviations: standard deviations beyond which it has a mass below 1e-14.
      scale: from a standard deviation in grid units to the law's integer parameter.
      std: from a standard deviation in grid units to that of the integers, rounded up.
      exact: whether it is drawn exactly, on the host: its guarantee may be pure, delta = 0.
    """

    order: int
    deviations: int
    scale: Callable[[float], int]
    std: Callable[[float], int]
    exact: bool = False


def _laplace_scale(units: float) -> int:
    """Returns the scale of integer Laplace noise, rounded up and one more.

    That unit makes up for what discrete noise is worse than the continuous one that is
    accounted (``accounting.full_batch_laplace``).
    """
    return math.ceil(units / math.sqrt(2)) + 1 if units else 0


def _laplace_std(units: float) -> int:
    return math.ceil(math.sqrt(2) * _laplace_scale(units))


LAWS: dict[Noise, Law] = {
    "discrete": Law(
        order=2,
        deviations=8,
        scale=accounting.integer_std,
        std=accounting.integer_std,
    ),
    "laplace": Law(
        order=1,
        deviations=32,
        scale=_laplace_scale,
        std=_laplace_std,
        exact=True,
    ),
}


def guarantee(
    law: Law,
    sampler: sampling.AnySampler,
    relation: Relation,
    *,
    num_examples: int,
    num_steps: int,
    noise_multiplier: float,
    among_sampled: bool = False,
) -> accounting.Guarantee:
    """Returns the guarantee of ``num_steps`` noised sums over a sampler's batches.

    With ``among_sampled``, full batches are stated so that they compose with sampled ones.

    Raises:
      ValueError: no accountant has a bound for the three together.
    """
    rows = sampler.rows(num_examples)
    # So many sums can read one record; the others tell nothing of it.
    num_steps = sampler.max_participations(num_examples, num_steps)
    within, num_examples = sampler.within_group(num_examples)
    match within:
        case sampling.TruncatedPoisson(sampling_prob=q) if rows == num_examples:
            # What cannot overflow is never truncated.
            poisson = accounting.poisson_gaussian
            if law.exact:
                poisson = accounting.poisson_laplace
            return poisson(
                noise_multiplier, num_steps, sampling_prob=q, relation=relation
            )
        case sampling.TruncatedPoisson() | sampling.FixedSize() if law.exact:
            raise ValueError(
                'sampling must be unamplified with noise="laplace", or TruncatedPoisson '
                f"with max_batch_size = num_examples = {num_examples}; got {within!r}, "
                "for which no accountant has a bound"
            )
        case sampling.TruncatedPoisson(sampling_prob=q):
            return accounting.truncated_poisson_gaussian(
                noise_multiplier,
                num_steps,
                sampling_prob=q,
                num_examples=num_examples,
                max_batch_size=rows,
                relation=relation,
            )
        case sampling.FixedSize():
            return accounting.fixed_size_gaussian(
                noise_multiplier,
                num_steps,
                num_examples=num_examples,
                batch_size=rows,
                relation=relation,
            )
    if law.exact:
        return accounting.full_batch_laplace(noise_multiplier, num_steps, relation)
    return accounting.full_batch_gaussian(
        noise_multiplier, num_steps, relation, among_sampled=among_sampled
    )
