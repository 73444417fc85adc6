"""Vocabulary of accounting, without an accountant: relations, guarantees, epsilons."""

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_args

from jaxdp.core import validate
from jaxdp.core.types import Relation

if TYPE_CHECKING:
    import dp_accounting as dp

RELATIONS: tuple[Relation, ...] = get_args(Relation)

#: Numbers of a step at most, where a plan does not know how many: counters have 32 bits.
MAX_NUMBERS = 2**32


class Guarantee(NamedTuple):
    """Event of all releases, and the relation under which it is to be composed.

    Attributes:
      event: the dp-accounting event of all releases.
      event_relation: the relation under which an accountant is to compose it.
    """

    event: "dp.DpEvent"
    event_relation: "dp.NeighboringRelation"


def sensitivity(relation: Relation, l2_clip_norm: float) -> float:
    """Returns the L2 sensitivity of the sum of clipped contributions.

    The only place that knows the factor: 2 where a record may be replaced by any other
    (from +C to -C), 1 where it appears, disappears, or becomes zero.

    Args:
      relation: one of :data:`RELATIONS`.
      l2_clip_norm: C > 0, the bound on one contribution; infinity gives infinity.
    """
    validate.one_of(RELATIONS, relation=relation)
    validate.positive(allow_inf=True, l2_clip_norm=l2_clip_norm)
    return (2.0 if relation == "replace_one" else 1.0) * float(l2_clip_norm)


def integer_std(units: float) -> int:
    r"""Returns a deviation of integer noise as private as normal noise of ``units``.

    Guarantees are computed for normal noise. The discrete Gaussian of the same deviation
    can have a delta that is larger by a share of 4e-5, where the deviation is 200. But add
    normal noise of deviation u to integers, and round each sum at random, by the discrete
    Gaussian of deviation 2 that is centred there: :math:`e^{-(z-y)^2/8}` over its sum over
    the integers z, which by Poisson summation is :math:`\sqrt{8\pi}` for every y but for a
    share of :math:`2e^{-8\pi^2}`. So what comes out has the law of the discrete Gaussian of
    deviation :math:`\sqrt{u^2+4}`, but for a factor within 1e-33 of one for each number:
    such noise is a function of normal noise of deviation u.

    Args:
      units: standard deviation of normal noise in grid units, >= 0; 0 is no noise.

    References:
      Peikert, `An Efficient and Parallel Gaussian Sampler for Lattices
      <https://eprint.iacr.org/2010/088>`_, 2010, Theorem 3.1, is such a convolution.
    """
    return math.ceil(math.hypot(units, 2.0) * (1 + 2**-52)) if units else 0


def warn_of_budget(
    epsilon: float, delta: float, num_examples: int, stacklevel: int = 2
) -> None:
    """Warns of a budget that protects nobody, or leaves nothing but noise.

    Args:
      epsilon: > 0.
      delta: in [0, 1).
      num_examples: records; 1 where nobody said how many.
      stacklevel: whose line the warning names: 1 is the caller's, 2 its caller's.
    """
    if epsilon < 1e-2 < delta:
        advice = f"epsilon={epsilon:g} and delta={delta:g} look swapped"
    elif num_examples > 1 and delta > 1 / num_examples:
        advice = (
            f"delta={delta:g} is above 1/num_examples = {1 / num_examples:.3g}, which "
            "publishing a record as it is would keep to; choose at most a tenth of that"
        )
    elif epsilon > 50:
        advice = (
            f"epsilon={epsilon:g} lets a release raise somebody's odds by a factor of "
            "exp(epsilon), which protects nobody; choose at most 10"
        )
    elif num_examples > 1 and num_examples * min(epsilon, 1.0) < 5:
        advice = (
            f"num_examples={num_examples} is too few for epsilon={epsilon:g}: a mean over "
            "so few records is mostly noise; use more, or a larger epsilon"
        )
    else:
        return
    warnings.warn(advice, stacklevel=stacklevel + 1)


class Epsilon(float):
    """Bound on the privacy loss: a float that also names its accountant.

    Attributes:
      accountant: "Gaussian closed form", "PLD", "RDP", "pure composition" or "no noise".
    """

    accountant: str

    def __new__(cls, value: float, accountant: str) -> Self:
        self = super().__new__(cls, value)
        self.accountant = accountant
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (float(self), self.accountant)

    def __repr__(self) -> str:
        return f"Epsilon({float(self)!r}, accountant={self.accountant!r})"

    def __str__(self) -> str:
        return repr(float(self))
