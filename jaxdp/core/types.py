"""Types that all layers share: relations, phases, frozen numbers of runs and grids."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax

from jaxdp.core import display

Relation = Literal["replace_one", "zero_out", "add_or_remove"]

#: ``value_fn(params, batch) -> losses (B,)``.
ValueFn = Callable[[Any, Any], jax.Array]
#: Predicate on a leaf's path, its keys joined by ``/``.
PathPredicate = Callable[[str], bool]


class Phase(NamedTuple):
    """A static stretch of steps of one shape; a plan's phases repeat."""

    name: str
    num_steps: int
    batch_size: int


@runtime_checkable
class ReleaseBudget(Protocol):
    """Budget to which a release is charged before it is made: a ``jaxdp.Budget``."""

    def reserve(
        self,
        release: Any,
        *,
        what: str = "",
        delta: float | None = None,
        relation: Relation | None = None,
        unit: str = "record",
    ) -> Any: ...


class UserRecords(NamedTuple):
    """Records grouped by user: a row is a user, and the user is the unit of privacy."""

    records: Any  # pytree with leading axes (U, m)
    mask: Any  # shape=(U, m), dtype=bool; False where a user has no such record

    def __repr__(self) -> str:
        """Returns shapes and dtypes: the numbers are private."""
        records, mask = map(display.tree, self)
        return f"UserRecords(records={records}, mask={mask})"


class Run(NamedTuple):
    """Frozen numbers of a plan that the loop, samplers and every method read."""

    family: str
    num_examples: int  # n
    num_steps: int  # releases of the whole run
    sampling: Any  # a sampler: hashable, static
    relation: Relation
    phases: tuple[Phase, ...]
    digest: str  # SHA-256 of the plan's numbers, in hex

    @property
    def context(self) -> int:
        """Number by which the plan enters its streams of keys."""
        return int(self.digest[:8], 16)


class Perturbation(NamedTuple):
    """Size and kind of the parameter perturbation at which a plan evaluates losses.

    Attributes:
      smoothing_radius: the plan's, in units of the parameters; 0 where it moves none.
      share: how much of it one parameter moves, in root mean square.
      differences: whether losses are subtracted there, or else differentiated.
      may_be_zero: whether the plan may have the radius 0, and derivatives.
    """

    smoothing_radius: float
    share: float = 1.0
    differences: bool = True
    may_be_zero: bool = True


class Grid(NamedTuple):
    """Clip, grid, noise and normalizer of the sum of one phase's contributions."""

    l2_clip_norm: float | jax.Array  # bound on one record's contribution; public
    bits: int | None  # a grid unit is 2**-bits of it; None: no bound, no noise
    normalizer: float  # what the sum is divided by
    noise_std: int  # of a node's noise, in units of the noise
    limit: int | None = None  # so many units are the bound, instead of 2**bits
    shift: int = 0  # a grid unit is 2**shift units of the noise
    order: int = 2  # of the norm that is bounded: 1 or 2

    @property
    def noise_unit(self) -> Any:
        """Value of one unit of the noise in the released mean."""
        assert self.bits is not None
        units = 2.0**self.bits if self.limit is None else self.limit
        return self.l2_clip_norm / (units * 2.0**self.shift * self.normalizer)
