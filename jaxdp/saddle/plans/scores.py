"""Base of the vertex-sampling plans: score grids, sensitivities and calibration."""

import dataclasses
import functools
import math
import warnings
from typing import Any, ClassVar, Literal, Self

import numpy as np

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.mechanism.design import Design
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description, Plan
from jaxdp.saddle.grids import ScoreGrid, Totals, record_bits
from jaxdp.saddle.theory import bounds, charges, design, theorems
from jaxdp.saddle.theory.step_sizes import StepSizes
from jaxdp.sampling import SinglePass

#: The largest step that scores can take, in nats: 2**30 units, with room for rounding.
_LONGEST = 44.0

#: Part of epsilon that a certified plan spends without a warning.
_SPENT = 0.9

Sampler = Literal["integer", "float"]


class VertexSamplingPlan(Plan):
    """Plan whose steps draw vertices from softmaxes of scores and release nothing else.

    Subclasses say what the draws cost at given step sizes; the rest follows. The constants
    of their ``certified`` and ``from_theorem`` are those of the function of the plan's
    ``family`` in :mod:`jaxdp.saddle.theory.design` and ``theorems``.
    """

    sampler: Sampler
    center_gradients: bool = False
    theorem: Design | None = None
    budget: float | None = None  # rho of a privacy filter

    makes_steps: ClassVar[bool] = True
    runs_algorithm: ClassVar[bool] = True
    unlogged: ClassVar[str] = "move scores that are secret and are not logged"
    nested: ClassVar[dict[str, Any]] = {
        "theorem": functools.partial(
            Design.read, {"promise": bounds.Promise, "steps": StepSizes}
        )
    }
    calibrated: ClassVar[str] = "step_size_x"
    #: Integers take a little off.
    tolerances: ClassVar[dict[str, float]] = {
        "step_size": 0.01,
        "step_size_x": 0.01,
        "step_size_y": 0.01,
    }
    #: Whether a step draws its own vertices alone: others draw those of later steps, too,
    #: so that the first step may spend all.
    draws_each_step: ClassVar[bool] = True
    #: Names of the fields that hold step sizes, and of their players' vertices and clips.
    step_size_fields: ClassVar[tuple[str, ...]] = ("step_size_x", "step_size_y")
    dim_fields: ClassVar[tuple[str, ...]] = ("dim_x", "dim_y")
    point_fields: ClassVar[tuple[str, ...]] = ("dim_x", "dim_y")  # sizes of the start
    clip_fields: ClassVar[tuple[str, ...]] = ("linf_clip_norm_x", "linf_clip_norm_y")
    #: Fields that no design speaks of, though :meth:`certified` takes them.
    free_fields: ClassVar[tuple[str, ...]] = ()
    #: How many times its step size times its clip one step may move a score, or what else
    #: moves it.
    amplification: float = 1.0
    mover: ClassVar[str] = "a step"
    #: Further entries of :meth:`mechanism`, and the attributes that they are.
    reported: ClassVar[dict[str, str]] = {}

    def _of_players(self, fields: tuple[str, ...]) -> list[Any]:
        return [getattr(self, name) for name in fields]

    def _check_pass(self, **counts: int) -> None:
        """Checks the fields of plans that read every record once, and some counts."""
        sampler: Any = self.sampling
        validate.instance(SinglePass, sampling=sampler)
        validate.integer(at_most=2**31 - 1, num_examples=self.num_examples)
        validate.integer(**counts)
        most = sampler.max_steps(self.num_examples)
        validate.integer(num_steps=self.num_steps, at_most=most)
        self._check()

    def _check(self) -> None:
        """Checks the fields that all vertex-sampling plans share."""
        # Numbers of vertices are logged as float32.
        dims = dict(zip(self.dim_fields, self.dims, strict=True))
        validate.integer(at_most=2**24, **dims)
        validate.instance(bool, center_gradients=self.center_gradients)
        validate.integer(num_examples=self.num_examples)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        validate.one_of(("integer", "float"), sampler=self.sampler)
        if self.delta is not None:
            self._check_delta(self.delta)
        for name in self.clip_fields:
            clip = getattr(self, name)
            validate.positive(**{name: clip})
            if not 1e-30 <= clip <= 1e30:
                raise ValueError(f"{name} must be in [1e-30, 1e30], got {clip!r}")
        self._drop_design()
        known = self.step_sizes
        if len({step is None for step in known}) == 2:
            raise ValueError(
                f"{' and '.join(self.step_size_fields)} must both be numbers or both be "
                f"None, got {known}"
            )
        self._coerce()
        if known[0] is None:
            return
        validate.non_negative(**dict(zip(self.step_size_fields, known, strict=True)))
        if self._longest(known) > self._most:
            raise ValueError(
                f"{' and '.join(self.step_size_fields)} must let {self.mover} move no "
                f"score by more than {self._most:.4g}, got {known}, which lets it move one "
                f"by {self._longest(known):.4g}"
            )
        self._cost_at(known)  # Raises if there are no grids for these numbers.

    # Designs.

    @classmethod
    def _designed(cls, name: str, **constants: Any) -> Design:
        free = {f: constants.pop(f) for f in cls.free_fields if f in constants}
        if name == "certified":
            found = getattr(design, cls.family)(**constants)
        else:
            found = getattr(theorems, cls.family)(name, **constants)
        return Design(**found, **free)

    @classmethod
    def _certified(cls, **constants: Any) -> Self:
        """Returns the plan of the design; warns if it leaves budget.

        The design's step sizes are those of the least bound, where privacy admits them:
        larger ones promise less, though they may well be better.
        """
        plan = super()._certified(**constants)
        budget, spent = constants["epsilon"], plan.epsilon()
        if spent < _SPENT * budget:
            warnings.warn(
                f"the plan spends {spent:.2g} of epsilon {budget:g}: its step sizes are "
                "those of the least bound. .calibrate(epsilon=..., delta=...) takes the "
                "largest, which promise less and may be better",
                stacklevel=3,  # Where certified was called.
            )
        return plan

    @classmethod
    def _of(cls, design: Design, *, epsilon: float, delta: float) -> Self:
        fields = {field.name for field in cls._fields()}
        numbers = {name: x for name, x in design.items() if name in fields}
        if "sampling" in fields:
            numbers["sampling"] = SinglePass(design.batch_size)
        named = {n: x for n, x in design.items() if n not in cls.free_fields}
        make: Any = cls
        plan = make(**numbers, delta=delta, theorem=Design(**named))
        if design.name != "certified":
            return plan
        most = plan.calibrate(epsilon=epsilon, delta=delta).step_sizes
        return plan._with(list(map(min, plan.step_sizes, most)), delta)

    def _fulfils(self, design: Design) -> bool:
        batch = design.get("batch_size")
        return (
            self.sampler == "integer"
            and getattr(self, "output", "fresh") == "fresh"
            and self.num_steps == design.num_steps
            and (batch is None or self.sampling == SinglePass(batch))
        )

    # What follows from the cost of a run.

    def _cost_at(self, steps: list[float], *, pure: bool = False) -> float:
        """Returns rho of the whole run at these step sizes, or the pure epsilon."""
        raise NotImplementedError

    @property
    def step_sizes(self) -> list[Any]:
        """Step sizes of the players whose vertices are drawn; None until calibrated."""
        return self._of_players(self.step_size_fields)

    @property
    def dims(self) -> tuple[int, ...]:
        """Numbers of vertices of the players whose vertices are drawn."""
        return tuple(self._of_players(self.dim_fields))

    @property
    def clips(self) -> tuple[float, ...]:
        """Clips of these players' gradients."""
        return tuple(self._of_players(self.clip_fields))

    @property
    def batch_size(self) -> int:
        """Records of a step, where all steps read as many."""
        return self.sampling.rows(self.num_examples)

    @kept
    def kappa(self) -> float:
        """Sensitivity of a total in units of the clip: 2 under replace-one, else 1."""
        return accounting.sensitivity(self.relation, 1.0)

    def check_ready(self) -> None:
        """Raises ValueError if the plan has no step sizes yet.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.Saddle(
          ...     num_examples=1000, num_steps=50, sampling=jaxdp.sampling.SinglePass(20),
          ...     relation="replace_one", dim_x=20, dim_y=10,
          ...     linf_clip_norm_x=1.0, linf_clip_norm_y=1.0,
          ... )
          >>> plan.with_step_size(0.1).check_ready()  # raises without step sizes
        """
        if getattr(self, self.calibrated) is None:
            raise ValueError(
                f"the plan has no {self.calibrated} yet: call "
                ".calibrate(epsilon=..., delta=...) or give it one"
            )

    @property
    def _most(self) -> float:
        """Largest change of a score, in nats, that :meth:`_longest` may give."""
        return _LONGEST

    def _longest(self, steps: list[float]) -> float:
        """Bounds the change of a score in one step, in nats, at these step sizes."""
        moved = (step * clip for step, clip in zip(steps, self.clips, strict=True))
        return self.amplification * max(moved)

    @kept
    def _totals(self) -> Totals:
        """Totals of the players over a batch, where all are of one size."""
        size = self.batch_size
        return Totals(self.clips, record_bits(size), size, self.kappa)

    @property
    def grid_bits(self) -> int:
        """Bits of a record's contribution: the grid unit is 2**-grid_bits of the clip."""
        return self._totals.bits

    @kept
    def rho(self) -> float:
        """Cost of the whole run in zCDP, including the certified sampler's error.

        Infinite with the float sampler, whose error has no bound.
        """
        self.check_ready()
        if self.sampler == "float":
            return math.inf
        # Scores that never move say nothing, however they are drawn from.
        return self._cost_at(self.step_sizes) if any(self.step_sizes) else 0.0

    @property
    def _pure_epsilon(self) -> float:
        """Epsilon at delta = 0; infinite with a filter, which bounds rho alone."""
        if self.budget is not None:
            return math.inf
        moves = any(self.step_sizes)
        return self._cost_at(self.step_sizes, pure=True) if moves else 0.0

    @property
    def _guarantee(self) -> accounting.Guarantee:
        if self.sampler == "float":
            return accounting.non_private()
        return accounting.zcdp(self.rho, self._pure_epsilon)

    def _check_delta(self, delta: float) -> None:
        if delta != 0 or self.sampler == "float" or self.budget is not None:
            validate.probability(delta=delta)

    def calibrate(self, *, epsilon: float, delta: float) -> Self:
        """Returns a plan of at most (epsilon, delta), with the largest step sizes.

        Draws are accounted by zCDP, and by adding up their pure epsilons, which costs less
        where they are few or delta is very small; the better counts.
        The proportion of two step sizes is kept where they are given. Without, it is that
        of sqrt(log dim) / clip, which is best for regret without privacy.

        Args:
          epsilon: > 0.
          delta: in (0, 1), or 0 for a pure guarantee.

        Raises:
          ValueError: no steps stay within the budget, the sampler is not certified, or a
            privacy filter takes step sizes as they are.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.Saddle(
          ...     num_examples=1000, num_steps=50, sampling=jaxdp.sampling.SinglePass(20),
          ...     relation="replace_one", dim_x=20, dim_y=10,
          ...     linf_clip_norm_x=1.0, linf_clip_norm_y=1.0,
          ... )
          >>> plan = plan.calibrate(epsilon=2.0, delta=1e-5)
          >>> bool(plan.epsilon() <= 2.0)
          True
        """
        self._check_budget(epsilon, delta)
        if self.budget is not None:
            raise ValueError(
                "budget must be None to be calibrated, for a filter takes step sizes as "
                f"they are; got {self.budget!r}"
            )
        if self.sampler == "float":
            raise ValueError(
                'sampler must be "integer" to be calibrated, got "float", whose draws have '
                "no bound"
            )
        start = self.step_sizes
        if len(start) == 1 or start[0] is None:
            players = zip(self.dims, self.clips, strict=True)
            start = [math.sqrt(math.log(max(dim, 2))) / clip for dim, clip in players]
        factor = self._largest_factor(start, float(epsilon), float(delta))
        # No longer than scores can move, whatever the budget.
        factor = min(factor, self._most / self._longest(start) * (1 - 1e-12))
        return self._with([factor * step for step in start], delta)

    def _largest_factor(
        self, start: list[float], epsilon: float, delta: float
    ) -> float:
        """Returns the most that step sizes can be multiplied by within a budget."""
        caps = {True: epsilon}
        if delta > 0:
            caps = {False: charges.rho_budget(epsilon, delta)} | caps
        found, refusals = [], []
        for pure, cap in caps.items():

            def cost(factor: float, pure: bool = pure) -> float:
                return self._cost_at([factor * step for step in start], pure=pure)

            try:
                found.append(charges.admissible(cost, cap))
            except ValueError as refusal:
                refusals.append(refusal)
        if not found:
            raise refusals[0]
        return max(found)

    def _with(self, steps: list[float], delta: float | None) -> Self:
        plan: Any = self  # Every subclass is a dataclass.
        made = dict(zip(self.step_size_fields, steps, strict=True))
        return dataclasses.replace(plan, delta=delta, **made)

    def with_step_size(self, step_size: float, *, delta: float | None = None) -> Self:
        """Returns the same plan with this step size, for both players if there are two.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.Saddle(
          ...     num_examples=1000, num_steps=50, sampling=jaxdp.sampling.SinglePass(20),
          ...     relation="replace_one", dim_x=20, dim_y=10,
          ...     linf_clip_norm_x=1.0, linf_clip_norm_y=1.0,
          ... )
          >>> plan = plan.with_step_size(0.1, delta=1e-5)
          >>> plan.step_size_x, plan.step_size_y
          (0.1, 0.1)
        """
        steps = [step_size] * len(self.step_size_fields)
        return self._with(steps, self.delta if delta is None else delta)

    # Runs and reports.

    def uniform(self) -> Any:
        """Returns the uniform starting point, float32 (dim,): a pair for two players.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.Saddle(
          ...     num_examples=1000, num_steps=50, sampling=jaxdp.sampling.SinglePass(20),
          ...     relation="replace_one", dim_x=20, dim_y=10,
          ...     linf_clip_norm_x=1.0, linf_clip_norm_y=1.0,
          ... )
          >>> x, y = plan.uniform()
          >>> x.shape, y.shape
          ((20,), (10,))
        """
        sizes = self._of_players(self.point_fields)
        points = [np.full((size,), 1 / size, np.float32) for size in sizes]
        return tuple(points) if len(points) > 1 else points[0]

    def _spent(self, num_steps: int) -> accounting.Epsilon:
        if not self.draws_each_step:
            return self.epsilon()
        plan: Any = self  # Every subclass is a dataclass.
        return dataclasses.replace(plan, num_steps=num_steps).epsilon()

    def mechanism(self) -> dict[str, Any]:
        steps = dict(zip(self.step_size_fields, self.step_sizes, strict=True))
        chosen = {"noise_multiplier": None, "sampler": self.sampler}
        more = {name: getattr(self, field) for name, field in self.reported.items()}
        return chosen | steps | more

    def _derived(self) -> list[tuple[str, float]]:
        return [] if getattr(self, self.calibrated) is None else [("rho", self.rho)]


class OnePlayerPlan(VertexSamplingPlan):
    """Plan whose one player has ``dim`` vertices, by scores of one grid."""

    dim_fields: ClassVar[tuple[str, ...]] = ("dim",)
    point_fields: ClassVar[tuple[str, ...]] = ("dim",)
    clip_fields: ClassVar[tuple[str, ...]] = ("linf_clip_norm",)

    @kept
    def grid(self) -> ScoreGrid:
        """Grid of the scores."""
        self.check_ready()
        return self._totals.grids(self.step_sizes)[0]

    @property
    def sensitivity(self) -> float:
        """Sensitivity of a score to one record, in nats, including rounding."""
        return self.grid.sensitivity(self.kappa)


def described(drawn: str, sensitivity: float) -> Description:
    """Describes draws of vertices from softmaxes of scores with that sensitivity."""
    moved = f"one record moves scores by at most {sensitivity:.3g}"
    return Description(f"none, but the draws of {drawn}; {moved}", released="vertices")
