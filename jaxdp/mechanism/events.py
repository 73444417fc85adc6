"""Accounting events of noise, sampler and neighbouring relation together."""

from typing import Literal

from jaxdp import accounting, sampling
from jaxdp.core.types import Relation

#: Discrete Gaussians, drawn where they are used; exact integer Laplace noise from the
#: host, which has a pure guarantee.
Noise = Literal["discrete", "laplace"]


def guarantee(
    noise: Noise,
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
    laplace = noise == "laplace"
    rows = sampler.rows(num_examples)
    match sampler:
        case sampling.TruncatedPoisson(sampling_prob=q) if rows == num_examples:
            # What cannot overflow is never truncated.
            make = (
                accounting.poisson_laplace if laplace else accounting.poisson_gaussian
            )
            return make(noise_multiplier, num_steps, sampling_prob=q, relation=relation)
        case sampling.TruncatedPoisson() | sampling.FixedSize() if laplace:
            raise ValueError(
                'sampling must be unamplified with noise="laplace", or TruncatedPoisson '
                f"with max_batch_size = num_examples = {num_examples}; got {sampler!r}, "
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
    # So many sums read one record; the others tell nothing of it.
    sums = sampler.max_participations(num_examples, num_steps)
    if laplace:
        return accounting.full_batch_laplace(noise_multiplier, sums, relation)
    return accounting.full_batch_gaussian(
        noise_multiplier, sums, relation, among_sampled=among_sampled
    )
