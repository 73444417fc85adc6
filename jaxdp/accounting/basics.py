"""Vocabulary of accounting, without an accountant: relations, guarantees, epsilons."""

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
