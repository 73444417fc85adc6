"""Base of the vertex-sampling plans: score grids, sensitivities and calibration."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, Self

import dp_accounting as dp
import numpy as np

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import ScoreGrid
from jaxdp.kernels import simplex
from jaxdp.mechanism.plan import Plan
from jaxdp.saddle.theory import charges, settings
from jaxdp.sampling import SinglePass

#: One unit of a score, in nats.
UNIT = math.log(2) / 2**simplex.BITS
#: The largest step that scores can take, in nats: 2**30 units, with room for rounding.
_LONGEST = 44.0

Sampler = Literal["integer", "float"]


def score_grid(step_size: float, clip: float, bits: int, records: float) -> ScoreGrid:
    """Returns the grid that moves scores by ``step_size`` times a mean over ``records``.

    Scores move by slightly less, because the multiplier is rounded down.

    Args:
      step_size: >= 0.
      clip: bound on a coordinate of one record's gradient.
      bits: one unit of a total is ``clip * 2**-bits``.
      records: what totals are divided by.
    """
    units = step_size * clip / (records * 2.0**bits) / UNIT  # of one unit of a total
    if units == 0:
        return ScoreGrid(clip, bits, 0, 0)
    shift = min(15 - math.floor(math.log2(units)), 46)
    return ScoreGrid(clip, bits, math.floor(units * 2.0**shift), shift)


def sensitivity(grid: ScoreGrid, moves: float) -> float:
    """Returns the sensitivity of a score to one record, in nats.

    Args:
      grid: of the scores.
      moves: by how many clips it moves a total.
    """
    if grid.multiplier == 0:
        return 0.0
    # One unit more, for the floor of the product.
    return (moves * 2**grid.bits * grid.multiplier / 2**grid.shift + 1) * UNIT


def record_bits(rows: int) -> int:
    """Returns the bits of a record's contribution for which a sum of ``rows`` fits int32.

    Raises:
      ValueError: fewer than 8 would be left.
    """
    bits = min(16, math.floor(math.log2((2**31 - 1) / rows)))
    if bits < 8:
        raise ValueError(
            "num_steps must be so many that a step's records leave 8 bits for the "
            f"contribution of one: the largest total here is over {rows} of them, which "
            f"leaves {bits}"
        )
    return bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class VertexSamplingPlan(Plan):
    """Plan whose steps draw vertices from softmaxes of scores and release nothing else.

    Subclasses say what the draws cost at given step sizes; the rest follows.
    """

    makes_steps: ClassVar[bool] = True
    runs_algorithm: ClassVar[bool] = True
    unlogged: ClassVar[str] = "move scores that are secret"
    #: Names of the fields that hold step sizes.
    steps: ClassVar[tuple[str, ...]] = ("step_size_x", "step_size_y")

    def _check(self, **clips: float) -> None:
        """Checks the fields that all vertex-sampling plans share."""
        given: Any = self
        validate.integer(num_examples=self.num_examples)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        validate.one_of(("integer", "float"), sampler=given.sampler)
        if self.delta is not None:
            self._check_delta(self.delta)
        for name, clip in clips.items():
            validate.positive(allow_inf=False, **{name: clip})
            if not 1e-30 <= clip <= 1e30:
                raise ValueError(f"{name} must be in [1e-30, 1e30], got {clip!r}")
        theorem = getattr(self, "theorem", None)
        if theorem is not None and not self._keeps(theorem):
            object.__setattr__(self, "theorem", None)
        known = [getattr(self, name) for name in self.steps]
        if len({step is None for step in known}) == 2:
            raise ValueError(
                f"{self.steps[0]} and {self.steps[1]} must both be numbers or both be "
                f"None, got {known}"
            )
        self._coerce()
        if known[0] is None:
            return
        for name, step in zip(self.steps, known, strict=True):
            validate.non_negative(**{name: step})
        if self.longest(known) > _LONGEST:
            raise ValueError(
                f"{' and '.join(self.steps)} must move no score by more than {_LONGEST} "
                f"in a step, got {known}, which move one by {self.longest(known):.4g}"
            )
        self.rho_at(known)  # Raises if there are no grids for these numbers.

    def _keeps(self, found: settings.Settings) -> bool:
        """Returns True if ``found`` still describes this plan.

        Step sizes may differ by one per cent, because integers take a little off.
        """
        given: Any = self
        if given.sampler != "integer" or self.num_steps != found.num_steps:
            return False
        for field in self._fields():
            if field.name not in vars(found):
                continue
            promised = getattr(found, field.name)
            value: Any = getattr(self, field.name)
            if field.name.startswith("step_size"):
                if value is not None and not math.isclose(
                    value, promised, rel_tol=0.01
                ):
                    return False
            elif value != promised:
                return False
        batch = getattr(found, "batch_size", None)
        return batch is None or self.sampling == SinglePass(batch)

    # What a subclass says.

    def longest(self, steps: list[float]) -> float:
        """Bounds the change of a score in one step, in nats, at these step sizes."""
        raise NotImplementedError

    def rho_at(self, steps: list[float]) -> float:
        """Returns the zCDP cost of the whole run at these step sizes."""
        raise NotImplementedError

    def _start(self) -> list[float]:
        """Returns step sizes in the proportion that calibration keeps."""
        raise NotImplementedError

    # What follows.

    @property
    def kappa(self) -> float:
        """Sensitivity of a total in units of the clip: 2 under replace-one, else 1."""
        return accounting.sensitivity(self.relation, 1.0)

    def check_ready(self) -> None:
        """Raises ValueError if the plan has no step sizes yet."""
        if getattr(self, self.steps[0]) is None:
            raise ValueError(
                f"the plan has no {self.steps[0]} yet: call .calibrate(epsilon=..., "
                "delta=...) or give it one"
            )

    @functools.cached_property
    def rho(self) -> float:
        """Cost of the whole run in zCDP, including the certified sampler's error.

        Infinite with the float sampler, whose error has no bound.
        """
        self.check_ready()
        given: Any = self
        if given.sampler == "float":
            return math.inf
        steps = [getattr(self, name) for name in self.steps]
        # Scores that never move say nothing, however they are drawn from.
        return self.rho_at(steps) if any(steps) else 0.0

    @property
    def _guarantee(self) -> accounting.Guarantee:
        given: Any = self
        if given.sampler == "float":
            relation = accounting.zcdp(1.0).event_relation
            return accounting.Guarantee(dp.NonPrivateDpEvent(), relation)
        return accounting.zcdp(self.rho)

    def calibrate(self, *, epsilon: float, delta: float) -> Self:
        """Returns a plan of at most (epsilon, delta), with the largest step sizes.

        The proportion of two step sizes is kept where they are given. Without, it is that
        of sqrt(log dim) / clip, which is best for regret without privacy.

        Args:
          epsilon: > 0.
          delta: in (0, 1).

        Raises:
          ValueError: no steps stay within the budget, or the sampler is not certified.
        """
        validate.positive(epsilon=epsilon)
        self._check_delta(delta)
        given: Any = self
        if given.sampler == "float":
            raise ValueError(
                'sampler must be "integer" to be calibrated, got "float", whose draws have '
                "no bound"
            )
        start = self._start()
        rho = charges.rho_budget(float(epsilon), float(delta))
        factor = charges.admissible(
            lambda f: self.rho_at([f * step for step in start]), rho
        )
        # No longer than scores can move, whatever the budget.
        factor = min(factor, _LONGEST / self.longest(start) * (1 - 1e-12))
        steps = {
            name: factor * step for name, step in zip(self.steps, start, strict=True)
        }
        return dataclasses.replace(self, delta=delta, **steps)

    @classmethod
    def _of(cls, found: settings.Settings, **more: Any) -> Self:
        """Builds a plan from settings, with their step sizes."""
        names = {field.name for field in cls._fields()}
        same = {k: v for k, v in vars(found).items() if k in names}
        if "sampling" in names:
            same["sampling"] = SinglePass(vars(found)["batch_size"])
        make: Any = cls
        return make(**same | more, theorem=found)

    def _at_most(self, *, epsilon: float, delta: float) -> Self:
        """Returns the same plan, its step sizes limited to what (epsilon, delta) admits."""
        most = self.calibrate(epsilon=epsilon, delta=delta)
        names = {
            name: min(getattr(self, name), getattr(most, name)) for name in self.steps
        }
        return dataclasses.replace(self, delta=delta, **names)

    def with_step_size(self, step_size: float, *, delta: float | None = None) -> Self:
        """Returns the same plan with this step size, for both players if there are two."""
        delta = self.delta if delta is None else delta
        steps: dict[str, Any] = dict.fromkeys(self.steps, step_size)
        return dataclasses.replace(self, delta=delta, **steps)

    def mechanism(self) -> dict[str, Any]:
        given: Any = self
        steps = {name: getattr(self, name) for name in self.steps}
        return {"noise_multiplier": None, "sampler": given.sampler, **steps}

    def returned(self, state: Any, params: Any) -> Any:
        raise NotImplementedError

    def shown(self, state: Any, params: Any) -> Any:
        return self.returned(state, params)

    def _derived(self) -> list[tuple[str, float]]:
        known = getattr(self, self.steps[0]) is not None
        return [("rho", self.rho)] if known else []


def proportion(dim: int, clip: float) -> float:
    """Returns the step size of least regret, but for a factor of the horizon."""
    return math.sqrt(math.log(max(dim, 2))) / clip


def uniform(size: int) -> np.ndarray:
    """Returns the center of the simplex: float32 (size,)."""
    return np.full((size,), 1 / size, np.float32)
