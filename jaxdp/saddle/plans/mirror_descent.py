"""The plan of mirror descent for saddle points."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, Self

from jaxdp.core import validate
from jaxdp.core.keys import Keys
from jaxdp.core.types import Relation, ScoreGrid
from jaxdp.kernels import simplex
from jaxdp.mechanism.plan import Description
from jaxdp.saddle.algorithms import mirror_descent
from jaxdp.saddle.plans.scores import Sampler, record_bits, score_grid, sensitivity
from jaxdp.saddle.plans.two_players import TwoPlayers
from jaxdp.saddle.theory import charges, design, settings, theorems
from jaxdp.sampling import SinglePass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saddle(TwoPlayers):
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
        absent leaves its row, which counts nothing: one of NaN does.
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

    References:
      Gonzalez, Guzman, Paquette, `Mirror Descent Algorithms with Nearly
      Dimension-Independent Rates for Differentially-Private Stochastic Saddle-Point
      Problems <https://arxiv.org/abs/2403.02912>`_, 2024, Algorithm 1; accounting by
      bounded range and zCDP.
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
    theorem: settings.SaddleSettings | None = None

    family: ClassVar[str] = "saddle"
    nested: ClassVar[dict[str, Any]] = {
        "theorem": functools.partial(settings.read, settings.SaddleSettings)
    }

    def __post_init__(self) -> None:
        validate.instance(SinglePass, sampling=self.sampling)
        validate.integer(num_examples=self.num_examples, num_draws=self.num_draws)
        most = self.sampling.max_steps(self.num_examples)
        validate.integer(num_steps=self.num_steps, at_most=most)
        validate.one_of(("fresh", "mean"), output=self.output)
        self._check_players()

    def _keeps(self, found: settings.Settings) -> bool:
        return self.output == "fresh" and super()._keeps(found)

    @classmethod
    def from_theorem(
        cls,
        theorem: str,
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
        """Returns the plan that a theorem prescribes, for study.

        :meth:`certified` is better. The step sizes are those of the paper's privacy proof,
        which spend less than the budget: :meth:`epsilon` says how much.

        Args:
          theorem: ``"4.1"`` or ``"4.2"``.
          num_examples: n.
          dim_x: vertices of the minimising player, >= 2.
          dim_y: vertices of the maximising player, >= 2.
          epsilon: > 0.
          delta: in (0, 1).
          relation: which data sets are neighbours; the paper's is ``"replace_one"``.
          lipschitz: L0: bound on every partial derivative of a record's loss; the clips.
          smoothness: L1: bound on how these change over an l1 distance of one.
          second_order_smoothness: L2, for ``"4.1"``; 0 for quadratic and bilinear losses.

        Raises:
          ValueError, TypeError: as :func:`jaxdp.saddle.theory.theorems.saddle`.
        """
        found = theorems.saddle(
            theorem,
            num_examples=num_examples,
            dim_x=dim_x,
            dim_y=dim_y,
            epsilon=epsilon,
            delta=delta,
            relation=relation,
            lipschitz=lipschitz,
            smoothness=smoothness,
            second_order_smoothness=second_order_smoothness,
        )
        return cls._of(found, delta=delta)

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
        """Returns the plan of least proven bound: T, K and step sizes, exactly charged.

        The bound is pessimistic: 5 to 20 times fewer steps with all of the step that
        :meth:`calibrate` admits did better where it was tried.

        Args:
          num_examples: n.
          dim_x: as in :meth:`from_theorem`, like the next seven.
          dim_y: of the maximising player.
          epsilon: > 0.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L0.
          smoothness: L1.
          second_order_smoothness: L2; None where nothing is known.
          num_steps: T; None searches.

        Raises:
          ValueError, TypeError: as :func:`jaxdp.saddle.theory.design.saddle`.
        """
        found = design.saddle(
            num_examples=num_examples,
            dim_x=dim_x,
            dim_y=dim_y,
            epsilon=epsilon,
            delta=delta,
            relation=relation,
            lipschitz=lipschitz,
            smoothness=smoothness,
            second_order_smoothness=second_order_smoothness,
            num_steps=num_steps,
        )
        return cls._of(found)._at_most(epsilon=epsilon, delta=delta)

    @property
    def grid_bits(self) -> int:
        """Bits of a record's contribution: the grid unit is 2**-grid_bits of the clip."""
        return record_bits(self.sampling.batch_size)

    def grids_at(self, steps: list[float]) -> tuple[ScoreGrid, ScoreGrid]:
        size, bits = self.sampling.batch_size, self.grid_bits
        x, y = (
            score_grid(step, clip, bits, size)
            for step, clip in zip(steps, self._clips, strict=True)
        )
        return x, y

    @property
    def grids(self) -> tuple[ScoreGrid, ScoreGrid]:
        """Grids of the score updates, of x and of y."""
        self.check_ready()
        return self.grids_at([getattr(self, name) for name in self.steps])

    @property
    def sensitivity_x(self) -> float:
        """Sensitivity of a score of x to one record, in nats, including rounding."""
        return sensitivity(self.grids[0], self.kappa)

    @property
    def sensitivity_y(self) -> float:
        """Sensitivity of a score of y to one record, in nats, including rounding."""
        return sensitivity(self.grids[1], self.kappa)

    @property
    def sensitivity(self) -> float:
        """Larger of the two players' score sensitivities, in nats."""
        return max(self.sensitivity_x, self.sensitivity_y)

    def longest(self, steps: list[float]) -> float:
        return max(s * c for s, c in zip(steps, self._clips, strict=True))

    def rho_at(self, steps: list[float]) -> float:
        x, y = (sensitivity(grid, self.kappa) for grid in self.grids_at(steps))
        return charges.vertex_sampling(
            x,
            y,
            num_steps=self.num_steps,
            num_draws=self.num_draws,
            error=simplex.LOG_ERROR,
        )

    def algorithm(self, keys: Keys, **kwargs: Any) -> Any:
        return mirror_descent.saddle_mirror_descent(self, keys, **kwargs)

    def describe(self) -> Description:
        return Description(
            f"none, but the draws of {self.num_draws + 1} vertices of either player in "
            f"each of {self.num_steps} steps of {self.sampling.batch_size} records; one "
            f"record moves scores by at most {self.sensitivity_x:.3g} and "
            f"{self.sensitivity_y:.3g}"
        )
