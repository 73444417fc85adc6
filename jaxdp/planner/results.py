"""Planned runs of any family, side by side."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jaxdp.core import display
from jaxdp.core.averaging import polyak_output
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.planner import claims


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedRun:
    """Calibrated plan, the optimizer that goes with it, and its errors at best.

    Attributes:
      plan: with noise for the budget.
      optimizer: of :func:`jaxdp.fit`; steps of ``learning_rate``, and the mean of the last
        quarter of the iterates, for :func:`jaxdp.polyak_output` of ``result.info.state``.
      learning_rate: the step size.
      num_passes: evaluations of each record's loss in the whole run; a gradient counts 3.
      noise: of the gradient that a run sees, over its length if all records agreed.
      missed: part of it that is along no direction that was drawn; 0 for gradients.
      memory: bytes beyond parameters and data, at least, with all records of a batch at
        once: B x d float32 gradients, or a forward pass and B x K slopes. A
        ``microbatch_size`` in place of B makes it less. None if unknown.
      proven: what is proven of the error; privacy always is.
      measured: how the method fared in the most similar kept benchmark.
    """

    plan: Any
    optimizer: optax.GradientTransformation
    learning_rate: float
    num_passes: float
    noise: float
    missed: float
    memory: int | None = None
    proven: str = ""
    measured: str = ""

    @property
    def name(self) -> str:
        """Name of the plan's class."""
        return type(self.plan).__name__

    @property
    def error(self) -> float:
        """Both errors together, relative to the gradient: what candidates are ranked by."""
        return math.hypot(self.noise, self.missed)

    @property
    def columns(self) -> dict[str, str]:
        """Cells of a table, by the names of its columns."""
        return {
            "plan": self.name,
            "steps": f"{self.plan.num_steps}",
            "clip": f"{self.plan.l2_clip_norm:.3g}",
            "learning rate": f"{self.learning_rate:.3g}",
            "passes": f"{self.num_passes:.4g}",
            "memory": _size(self.memory),
            "noise": f"{self.noise:.2g}",
            "missed": f"{self.missed:.2g}",
        }


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedGame:
    """Calibrated plan for a game or a problem over a simplex, and its predicted error.

    Attributes:
      name: of the family, and how it reads the records.
      plan: with noise for the budget.
      optimizer: of :func:`jaxdp.fit`; None where the plan makes the steps itself.
      learning_rate: step size of both players; None where the plan makes the steps.
      start: the params that :func:`jaxdp.fit` starts from.
      num_passes: gradients of each record in the whole run, times three.
      noise: deviation of what privacy adds to a coordinate of the run's mean gradient. A
        draw from a softmax adds as much as the Gumbel noise that it is equal to.
      error: predicted duality gap, or excess loss of one player, on the public records:
        the mean over rehearsals with all noise.
      half_width: of its 95% interval, by the spread of the rehearsals.
      proven: what is proven of the error; privacy always is.
      memory: bytes beyond params and data, at least, with all records of a batch at once:
        their float32 gradients, and scores of vertices where these are drawn.
      measured: how the method fared in the most similar kept benchmark.
    """

    name: str
    plan: Any
    optimizer: optax.GradientTransformation | None
    learning_rate: float | None
    start: Any
    num_passes: float
    noise: float
    error: float
    half_width: float
    proven: str
    points: Callable[[Any], Any] = dataclasses.field(repr=False)
    memory: int | None = None
    measured: str = ""

    def output(self, result: Any) -> Any:
        """Returns the players' points of a run: of a ``jaxdp.fit`` of this plan.

        Args:
          result: the :class:`jaxdp.FitResult`.
        """
        if self.optimizer is not None:
            return polyak_output(result.info.state)
        return self.points(result.params)

    @property
    def use(self) -> str:
        """Advice on what to take of a run: not its params."""
        what = "are its last points, whose error is larger"
        if self.optimizer is None:
            what = "may be weights of vertices"
        return f"In Python take found.best.output(result): result.params {what}."

    @property
    def columns(self) -> dict[str, str]:
        """Cells of a table, by the names of its columns."""
        sizes = {"K": "num_draws", "U": "vertex_budget"}
        more = [
            f"{letter} = {getattr(self.plan, name)}"
            for letter, name in sizes.items()
            if hasattr(self.plan, name)
        ]
        return {
            "method": self.name,
            "steps": ", ".join([f"{self.plan.num_steps}", *more]),
            "clip": f"{clip_of(self.plan):.3g}",
            "passes": f"{self.num_passes:.4g}",
            "memory": _size(self.memory),
            "noise": f"{self.noise:.2g}",
            "error": f"{self.error:.3g} +- {self.half_width:.2g}",
        }


def _size(count: int | None) -> str:
    """Writes a number of bytes."""
    if count is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def spread(records: Any, count: int) -> Any:
    """Returns at most ``count`` of the records, from the first to the last of them.

    Evenly: the first ones of a table that is sorted may all be of one class.
    """
    size = num_rows(records)
    count = min(size, count)
    where = np.arange(count) * size // count
    return jax.tree.map(lambda leaf: leaf[where], records)


def clip_of(plan: Any) -> float:
    """Returns the clip of a plan; of two players that of x."""
    names = ("l2_clip_norm", "linf_clip_norm_x", "linf_clip_norm")
    return float(next(getattr(plan, name) for name in names if hasattr(plan, name)))


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedTable:
    """Calibrated plan for a synthetic table, and its noise.

    Attributes:
      plan: with noise for the budget.
      method: its name in ``jaxdp synthesize --method``.
      noise: by how much noise moves a measured marginal, in total variation, on average;
        None where no marginal is measured.
      num_measured: marginals that are measured.
      error: a proven bound on the largest error of a query; None where there is none.
      memory: bytes beyond data, at least: a float32 histogram over all cells.
      measured: how the method fared in the kept benchmark.
    """

    plan: Any
    method: str
    noise: float | None
    num_measured: int
    error: float | None
    memory: int | None = None
    measured: str = ""

    @property
    def name(self) -> str:
        """The method."""
        return self.method

    @property
    def proven(self) -> str:
        """Proof of the error, in words; privacy is proven always."""
        if self.error is None:
            return claims.NONE
        return f"expected largest error of a query <= {self.error:.2g}"

    @property
    def columns(self) -> dict[str, str]:
        """Cells of a table, by the names of its columns."""
        return {
            "plan": type(self.plan).__name__,
            "method": self.method,
            "steps": f"{self.plan.num_steps}",
            "measured": f"{self.num_measured}",
            "memory": _size(self.memory),
            "noise": "-" if self.noise is None else f"{self.noise:.2g}",
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Recommendation:
    """Plans for one problem, side by side, and the one to take.

    Attributes:
      candidates: the better ones first; :class:`PlannedRun` of a loss,
        :class:`PlannedGame` of a problem of players, :class:`PlannedTable` of marginals.
      reason: why the first one is, in a sentence.
      note: what was not compared, or what the numbers are.
      public: what public records would do; empty unless their number was given.
    """

    candidates: tuple[Any, ...]
    reason: str
    note: str = ""
    public: str = ""

    @property
    def best(self) -> Any:
        """The first candidate."""
        return self.candidates[0]

    @property
    def plan(self) -> Any:
        """Plan to take."""
        return self.best.plan

    @property
    def optimizer(self) -> optax.GradientTransformation | None:
        """Optimizer that goes with :attr:`plan`, if it needs one."""
        return getattr(self.best, "optimizer", None)

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        rows = [list(one.columns.values()) for one in self.candidates]
        title = f"Recommendation: {type(self.plan).__name__}"
        head = tuple(self.best.columns)
        said = [
            f"{one.name}: proven: {one.proven}; measured: {one.measured}."
            for one in self.candidates
        ]
        use = getattr(self.best, "use", "")
        said = filter(None, [self.reason, *said, use, self.note, self.public])
        return display.Table(title, rows, head, "\n".join(said))
