"""Results of designs: the fields of a plan and the promise that they imply."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp import accounting
from jaxdp.core import display, validate
from jaxdp.core.types import Relation


class Design(Mapping[str, Any]):
    """Numbers of a design by name: plan fields, a promise, the paper's own numbers.

    Numbers are read as items or as attributes (``design.promise.bound``). Frozen, hashable,
    and equal to a design of the same numbers.

    Attributes:
      name: of a theorem, or ``"certified"``.
      promise: what is proven of the numbers, a dataclass.
    """

    def __init__(self, **numbers: Any) -> None:
        self._numbers = {name: _frozen(value) for name, value in numbers.items()}

    @classmethod
    def read(cls, parts: Mapping[str, Any], **fields: Any) -> "Design":
        """Builds a design from the fields of its JSON.

        Args:
          parts: the dataclass of each field that holds one, by the field's name.
          **fields: as :meth:`as_dict` gave them.
        """
        made = {n: make(**fields[n]) for n, make in parts.items() if n in fields}
        return cls(**fields | made)

    def as_dict(self) -> dict[str, Any]:
        """Returns the numbers for JSON; a part that is a dataclass becomes a dictionary."""
        return {
            name: dataclasses.asdict(value)
            if dataclasses.is_dataclass(value) and not isinstance(value, type)
            else value
            for name, value in self._numbers.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getattr__(self, name: str) -> Any:
        numbers = vars(self).get("_numbers", {})  # Empty while it is copied.
        if name in numbers:
            return numbers[name]
        raise AttributeError(f"design has no number {name!r}; it has {list(numbers)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._numbers]

    def __hash__(self) -> int:
        return hash(tuple(self._numbers.items()))

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        rows = [(n, display.number(x)) for n, x in self.items() if n != "promise"]
        return display.Table(f"Design {self}", rows)

    def __str__(self) -> str:
        """Returns name and promise, for one row of a plan's table."""
        return f"{self.name}: {self.promise}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PopulationConstants:
    """Checked records, budget and Lipschitz constant, with which problems begin.

    Attributes:
      num_examples: n >= 4, independent records of a population.
      dim: d, parameters that move.
      epsilon: > 0; the budget.
      delta: in (0, 1).
      relation: which data sets are neighbours.
      lipschitz: > 0, of every record's loss.
    """

    num_examples: int
    dim: int
    epsilon: float
    delta: float
    relation: Relation
    lipschitz: float

    def __post_init__(self) -> None:
        validate.integer(at_least=4, num_examples=self.num_examples)
        validate.integer(dim=self.dim)
        validate.positive(epsilon=self.epsilon, lipschitz=self.lipschitz)
        validate.probability(delta=self.delta)
        validate.one_of(accounting.RELATIONS, relation=self.relation)

    @functools.cached_property
    def mu(self) -> float:
        """The largest mu of Gaussian DP within (epsilon, delta)."""
        return accounting.gaussian_mu(self.epsilon, self.delta)

    @property
    def sensitivity_over_clip(self) -> float:
        """Sensitivity of a sum in units of the clip: 2 under replace-one, else 1."""
        return accounting.sensitivity(self.relation, 1.0)


def given(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a class method by name, given its ``locals()``."""
    return {name: value for name, value in frame.items() if name != "cls"}


def _frozen(value: Any) -> Any:
    """Replaces lists, which JSON has, by tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def coerce(record: Any) -> None:
    """Converts a frozen dataclass's NumPy numbers to Python's, by the fields' types.

    Equal records then have equal texts and digests.
    """
    for field in dataclasses.fields(record):
        value: Any = getattr(record, field.name)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            kind: Any = int if field.type in (int, int | None) else float
            object.__setattr__(record, field.name, kind(value))


def noise_cost(plan: Any) -> float:
    """Returns the factor by which a plan's noise exceeds ideal noise of the same budget.

    Promises are of ideal Gaussian noise; a plan has a little more, for what its integer
    sampler costs: next to nothing, unless a record moves so little noise far. 1 where the
    noise was not calibrated, batches are sampled, or that cost is all of the budget.
    """
    if plan.delta is None or plan.sampling.amplifies:
        return 1.0
    spent, missed = accounting.sampler_error(plan.event)
    epsilon = float(plan.epsilon())
    left = (plan.delta - missed) * math.exp(-spent)
    if not spent < epsilon < math.inf or left <= 0:
        return 1.0
    ideal = accounting.gaussian_mu(epsilon - spent, left)
    return accounting.gaussian_mu(epsilon, plan.delta) / ideal


def ideal_factor(plan: Any) -> float:
    """Returns :func:`noise_cost` up to 1.001: a promise of less noise would be false."""
    cost = noise_cost(plan)
    return cost if cost <= 1.001 else 1.0
