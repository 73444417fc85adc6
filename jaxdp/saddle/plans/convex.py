"""The plan of convex problems over a simplex or polytope."""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp.core import validate
from jaxdp.core.keys import Keys
from jaxdp.core.types import Relation, ScoreGrid
from jaxdp.kernels import simplex
from jaxdp.saddle.algorithms import convex
from jaxdp.saddle.plans.scores import (
    Sampler,
    VertexSamplingPlan,
    proportion,
    record_bits,
    score_grid,
    sensitivity,
    uniform,
)
from jaxdp.saddle.theory import charges, design, settings, theorems
from jaxdp.sampling import SinglePass


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvexSimplex(VertexSamplingPlan):
    r"""Private mirror descent for a convex loss over a simplex or polytope.

    Gradients are taken at drawn means of K vertices of the average of the iterates so far,
    drawn anew at the steps 1, .., q, 2q, 3q, ... The output is one more such mean.

    Attributes:
      num_examples: n, records in the data set; public.
      num_steps: T; ``num_steps * batch_size`` is at most n.
      sampling: a ``sampling.SinglePass``.
      relation: which data sets are neighbours; no default. A record that is zeroed or
        absent leaves its row, which counts nothing: one of NaN does.
      dim: number of vertices.
      linf_clip_norm: C, bound on the coordinates of one record's vertex gradient.
      num_draws: K.
      refresh_every: q.
      step_size: :math:`\tau`, 1 over the units of the loss; None until :meth:`calibrate`.
      center_gradients: as in :class:`Saddle`.
      sampler: as in :class:`Saddle`.
      delta: what :meth:`calibrate` aimed at; used by reports.
      theorem: where :meth:`from_theorem` or :meth:`certified` chose the numbers: what
        they promise. None elsewhere, and where a number was changed since.

    References:
      As for :class:`Saddle`, Algorithm 4.
    """

    num_examples: int
    num_steps: int
    sampling: SinglePass
    relation: Relation
    dim: int
    linf_clip_norm: float
    num_draws: int
    refresh_every: int
    step_size: float | None = None
    center_gradients: bool = False
    sampler: Sampler = "integer"
    delta: float | None = None
    theorem: settings.ConvexSettings | None = None

    family: ClassVar[str] = "convex_simplex"
    released: ClassVar[str] = "vertices of iterates"
    nested: ClassVar[dict[str, Any]] = {
        "theorem": functools.partial(settings.read, settings.ConvexSettings)
    }
    steps: ClassVar[tuple[str, ...]] = ("step_size",)

    def __post_init__(self) -> None:
        validate.instance(SinglePass, sampling=self.sampling)
        validate.integer(
            num_examples=self.num_examples,
            num_draws=self.num_draws,
            refresh_every=self.refresh_every,
        )
        most = self.sampling.max_steps(self.num_examples)
        validate.integer(num_steps=self.num_steps, at_most=most)
        validate.integer(at_most=2**24, dim=self.dim)
        validate.instance(bool, center_gradients=self.center_gradients)
        self._check(linf_clip_norm=self.linf_clip_norm)

    @classmethod
    def from_theorem(cls, theorem: str, *, delta: float, **numbers: Any) -> Self:
        """Returns the plan that Theorem 5.1 prescribes, for study.

        :meth:`certified` is better.

        Args:
          theorem: ``"5.1"``.
          delta: in (0, 1).
          **numbers: ``num_examples``, ``dim``, ``epsilon``, ``relation``, ``lipschitz``,
            ``smoothness``, ``second_order_smoothness``; as in :meth:`Saddle.from_theorem`.

        Raises:
          ValueError, TypeError: as :func:`jaxdp.saddle.theory.theorems.convex_simplex`.
        """
        found = theorems.convex_simplex(theorem, delta=delta, **numbers)
        return cls._of(found, delta=delta)

    @classmethod
    def certified(cls, *, epsilon: float, delta: float, **numbers: Any) -> Self:
        """Returns the plan of least proven bound: T, K, q and the step size chosen.

        The proof wants steps of at most 1 / (4 L0 q), which privacy does not: what
        :meth:`calibrate` admits for the same T, K and q may be better.

        Args:
          epsilon: > 0.
          delta: in (0, 1).
          **numbers: as for :meth:`from_theorem`, and ``num_steps``, which is searched
            where it is None.

        Raises:
          ValueError, TypeError: as :func:`jaxdp.saddle.theory.design.convex_simplex`.
        """
        found = design.convex_simplex(epsilon=epsilon, delta=delta, **numbers)
        return cls._of(found)._at_most(epsilon=epsilon, delta=delta)

    @property
    def grid_bits(self) -> int:
        """Bits of a record's contribution: the grid unit is 2**-grid_bits of the clip."""
        return record_bits(self.sampling.batch_size)

    def _grid_at(self, step: float) -> ScoreGrid:
        size = self.sampling.batch_size
        return score_grid(step, self.linf_clip_norm, self.grid_bits, size)

    @property
    def grid(self) -> ScoreGrid:
        """Grid of the score updates."""
        self.check_ready()
        return self._grid_at(self.step_size or 0.0)

    @property
    def sensitivity(self) -> float:
        """Sensitivity of a score to one record, in nats, including rounding."""
        return sensitivity(self.grid, self.kappa)

    def longest(self, steps: list[float]) -> float:
        return steps[0] * self.linf_clip_norm

    def rho_at(self, steps: list[float]) -> float:
        return charges.convex(
            sensitivity(self._grid_at(steps[0]), self.kappa),
            num_steps=self.num_steps,
            num_draws=self.num_draws,
            refresh_every=self.refresh_every,
            error=simplex.LOG_ERROR,
        )

    def _start(self) -> list[float]:
        return [proportion(self.dim, self.linf_clip_norm)]

    def uniform(self) -> np.ndarray:
        """Returns the uniform starting point, float32 (dim,)."""
        return uniform(self.dim)

    def algorithm(self, keys: Keys, **kwargs: Any) -> Any:
        return convex.simplex_convex(self, keys, **kwargs)

    def returned(self, state: Any, params: Any) -> Any:
        return convex.output(self, state)
