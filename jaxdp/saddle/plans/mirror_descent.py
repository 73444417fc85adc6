"""The plan of mirror descent for saddle points."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.kernels import simplex
from jaxdp.mechanism.design import Design, given
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description
from jaxdp.saddle.algorithms.mirror_descent import (
    SaddleNumbers,
    output,
    saddle_mirror_descent,
)
from jaxdp.saddle.grids import ScoreGrid
from jaxdp.saddle.plans.scores import Sampler, VertexSamplingPlan
from jaxdp.saddle.theory import charges
from jaxdp.sampling import SinglePass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saddle(VertexSamplingPlan):
    r"""Private mirror descent for a convex-concave problem, by vertex sampling.

    Each of T steps draws K + 1 vertices of either player from the softmax of its scores,
    takes the gradients of a fresh batch at the mean of K, and moves the scores by them. No
    noise is added: the draws are exponential mechanisms, and the error grows with the
    logarithm of the number of vertices.

    Attributes:
      num_examples: n, records in the data set; public.
      num_steps: T; ``num_steps * batch_size`` is at most n.
      sampling: a ``sampling.SinglePass``.
      relation: which data sets are neighbours; no default. A record that is zeroed or
        absent leaves its row, which counts nothing: one of NaN does, if its gradient is.
      dim_x: number of vertices of the minimising player's polytope (of the simplex: its
        dimension).
      dim_y: of the maximising player's.
      linf_clip_norm_x: :math:`C_x`, bound on the coordinates of one record's vertex
        gradient by x; in units of the loss.
      linf_clip_norm_y: :math:`C_y`, of that by y.
      num_draws: K, vertices that a gradient's point is the mean of.
      step_size_x: :math:`\tau_x`, 1 over the units of the loss; None until
        :meth:`calibrate`.
      step_size_y: :math:`\tau_y`.
      center_gradients: whether a record's vertex gradient is taken from the middle of its
        range before it is clipped: half the clip then suffices, and no iterate changes.
      output: ``"fresh"``: the mean of one further vertex a step, which the theorems are
        about; or ``"mean"``: of all K + 1.
      sampler: ``"integer"``, the certified one; or ``"float"``, which is fast and has no
        guarantee (epsilon is infinite).
      delta: what :meth:`calibrate` aimed at; used by reports.
      theorem: where :meth:`from_theorem` or :meth:`certified` chose the numbers: what
        they promise. None elsewhere, and where a number was changed since.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.Saddle(
      ...     num_examples=1000, num_steps=50, sampling=jaxdp.sampling.SinglePass(20),
      ...     relation="replace_one", dim_x=20, dim_y=10,
      ...     linf_clip_norm_x=1.0, linf_clip_norm_y=1.0,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> bool(plan.epsilon() <= 2.0), plan.step_size_x > 0
      (True, True)

    References:
      As for :func:`jaxdp.saddle_mirror_descent`; accounting by bounded range and zCDP.
    """

    num_examples: int
    num_steps: int
    sampling: SinglePass
    relation: Relation
    dim_x: int
    dim_y: int
    linf_clip_norm_x: float
    linf_clip_norm_y: float
    num_draws: int = 1
    step_size_x: float | None = None
    step_size_y: float | None = None
    center_gradients: bool = False
    output: Literal["fresh", "mean"] = "fresh"
    sampler: Sampler = "integer"
    delta: float | None = None
    theorem: Design | None = None

    family: ClassVar[str] = "saddle"
    released: ClassVar[str] = "vertices"
    numbers_read: ClassVar[Any] = SaddleNumbers
    runs: ClassVar[Any] = saddle_mirror_descent

    def __post_init__(self) -> None:
        validate.one_of(("fresh", "mean"), output=self.output)
        self._check_pass(num_draws=self.num_draws)

    @classmethod
    def certified(
        cls,
        *,
        num_examples: int,
        dim_x: int,
        dim_y: int,
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
          dim_x: vertices of the player that minimises, >= 2.
          dim_y: vertices of the player that maximises, >= 2.
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
          >>> plan = jaxdp.plans.Saddle.certified(
          ...     num_examples=100_000, dim_x=20, dim_y=10, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     second_order_smoothness=0.0,
          ... )
          >>> plan.theorem.promise.bound < 0.5, bool(plan.epsilon() <= 2.0)
          (True, True)
        """
        return cls._certified(**given(locals()))

    @classmethod
    def from_theorem(
        cls,
        theorem: Literal["4.1", "4.2"],
        *,
        num_examples: int,
        dim_x: int,
        dim_y: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        smoothness: float,
        second_order_smoothness: float | None = None,
    ) -> Self:
        """Returns the plan that a theorem prescribes, within the budget, corrected.

        For study and comparison; :meth:`certified` is better.

        Args:
          theorem: ``"4.1"``, for second-order-smooth problems, or ``"4.2"``, for
            first-order-smooth ones.
          num_examples: as in :meth:`certified`, like the next seven.
          dim_x: vertices of the player that minimises.
          dim_y: vertices of the player that maximises.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L0.
          smoothness: L1.
          second_order_smoothness: L2; a number for ``"4.1"``.

        Raises:
          ValueError: a constant out of range, or an unknown theorem.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.Saddle.from_theorem(
          ...     "4.1",
          ...     num_examples=100_000, dim_x=20, dim_y=10, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     second_order_smoothness=0.0,
          ... )
          >>> plan.theorem.name, bool(plan.epsilon() <= 2.0)
          ('4.1', True)
        """
        return cls._from_theorem(**given(locals()))

    @kept
    def grids(self) -> tuple[ScoreGrid, ScoreGrid]:
        """Grids of the score updates, of x and of y."""
        self.check_ready()
        x, y = self._totals.grids(self.step_sizes)
        return x, y

    @property
    def sensitivity_x(self) -> float:
        """Sensitivity of a score of x to one record, in nats, including rounding."""
        return self.grids[0].sensitivity(self.kappa)

    @property
    def sensitivity_y(self) -> float:
        """Sensitivity of a score of y to one record, in nats, including rounding."""
        return self.grids[1].sensitivity(self.kappa)

    @property
    def sensitivity(self) -> float:
        """Larger of the two players' score sensitivities, in nats."""
        return max(self.sensitivity_x, self.sensitivity_y)

    def _cost_at(self, steps: list[float], *, pure: bool = False) -> float:
        return charges.vertex_sampling(
            *self._totals.score_sensitivities(steps),
            num_steps=self.num_steps,
            num_draws=self.num_draws,
            error=simplex.LOG_ERROR,
            pure=pure,
        )

    def returned(self, state: Any, params: Any) -> Any:
        return output(state)

    def describe(self) -> Description:
        return Description(
            f"none, but the draws of {self.num_draws + 1} vertices of either player in "
            f"each of {self.num_steps} steps of {self.batch_size} records; one "
            f"record moves scores by at most {self.sensitivity_x:.3g} and "
            f"{self.sensitivity_y:.3g}",
            released="vertices",
        )
