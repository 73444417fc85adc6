"""The plan of convex problems over a simplex or polytope."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxdp.core.types import Relation
from jaxdp.kernels import simplex
from jaxdp.mechanism.design import Design, given
from jaxdp.mechanism.plan import Description
from jaxdp.saddle.algorithms.convex import ConvexNumbers, output, simplex_convex
from jaxdp.saddle.plans.scores import OnePlayerPlan, Sampler, described
from jaxdp.saddle.theory import charges
from jaxdp.sampling import SinglePass


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvexSimplex(OnePlayerPlan):
    r"""Private mirror descent for a convex loss over a simplex or polytope.

    Gradients are taken at drawn means of K vertices of the average of the iterates so far,
    drawn anew at the steps 1, .., q, 2q, 3q, ... The output is one more such mean.

    The proof of :meth:`certified` wants steps of at most 1 / (4 L0 q), which privacy does
    not: what :meth:`calibrate` admits for the same T, K and q may be better.

    Attributes:
      num_examples: as in :class:`Saddle`, like the next three.
      num_steps: T.
      sampling: a ``sampling.SinglePass``.
      relation: which data sets are neighbours.
      dim: number of vertices.
      linf_clip_norm: C, bound on the coordinates of one record's vertex gradient.
      num_draws: K.
      refresh_every: q.
      step_size: :math:`\tau`, 1 over the units of the loss; None until :meth:`calibrate`.
      center_gradients: as in :class:`Saddle`.
      sampler: as in :class:`Saddle`, like all that follow.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.ConvexSimplex(
      ...     num_examples=1000, num_steps=50, sampling=jaxdp.sampling.SinglePass(20),
      ...     relation="replace_one", dim=20, linf_clip_norm=1.0, num_draws=4,
      ...     refresh_every=5,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> bool(plan.epsilon() <= 2.0), plan.step_size > 0
      (True, True)

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
    theorem: Design | None = None

    family: ClassVar[str] = "convex_simplex"
    released: ClassVar[str] = "vertices of iterates"
    numbers_read: ClassVar[Any] = ConvexNumbers
    runs: ClassVar[Any] = simplex_convex
    draws_each_step: ClassVar[bool] = False
    calibrated: ClassVar[str] = "step_size"
    step_size_fields: ClassVar[tuple[str, ...]] = ("step_size",)

    def __post_init__(self) -> None:
        self._check_pass(num_draws=self.num_draws, refresh_every=self.refresh_every)

    @classmethod
    def certified(
        cls,
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        smoothness: float,
        second_order_smoothness: float | None = None,
        num_steps: int | None = None,
    ) -> Self:
        """Returns the calibrated plan of least proven bound; ``theorem.promise`` states it.

        Privacy rests on none of the constants.

        Args:
          num_examples: n, records in the data set.
          dim: vertices, >= 2.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L0 > 0, bound on every partial derivative of a record's loss; the clip.
          smoothness: L1 >= 0, bound on how these change over an l1 distance of one.
          second_order_smoothness: L2 >= 0: the same of the derivatives' own; 0 for
            quadratic and bilinear losses, None where nothing is known.
          num_steps: T in [1, n]; None searches.

        Raises:
          ValueError: a constant out of range.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.ConvexSimplex.certified(
          ...     num_examples=100_000, dim=20, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     second_order_smoothness=0.0,
          ... )
          >>> plan.theorem.name, bool(plan.epsilon() <= 2.0)
          ('certified', True)
        """
        return cls._certified(**given(locals()))

    @classmethod
    def from_theorem(
        cls,
        theorem: Literal["5.1"],
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        smoothness: float,
        second_order_smoothness: float | None = None,
    ) -> Self:
        """Returns the plan that Theorem 5.1 prescribes, within the budget, corrected.

        For study and comparison; :meth:`certified` is better.

        Args:
          theorem: ``"5.1"``.
          num_examples: as in :meth:`certified`, like the next six.
          dim: vertices.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L0.
          smoothness: L1.
          second_order_smoothness: L2; None takes the numbers of a first-order-smooth loss.

        Raises:
          ValueError: a constant out of range, or an unknown theorem.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.ConvexSimplex.from_theorem(
          ...     "5.1",
          ...     num_examples=100_000, dim=20, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     second_order_smoothness=0.0,
          ... )
          >>> plan.theorem.name, bool(plan.epsilon() <= 2.0)
          ('5.1', True)
        """
        return cls._from_theorem(**given(locals()))

    def _cost_at(self, steps: list[float], *, pure: bool = False) -> float:
        return charges.convex(
            *self._totals.score_sensitivities(steps),
            num_steps=self.num_steps,
            num_draws=self.num_draws,
            refresh_every=self.refresh_every,
            error=simplex.LOG_ERROR,
            pure=pure,
        )

    def returned(self, state: Any, params: Any) -> Any:
        return output(self.numbers, state)

    def describe(self) -> Description:
        draws = f"{self.num_draws} vertices in each of {self.num_steps} steps"
        return described(f"{draws} of {self.batch_size} records", self.sensitivity)
