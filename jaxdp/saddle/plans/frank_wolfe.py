"""The plan of Frank-Wolfe over vertices."""

import dataclasses
from typing import Any, ClassVar

from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.kernels import simplex
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Description
from jaxdp.saddle.algorithms.frank_wolfe import (
    FrankWolfeNumbers,
    frank_wolfe,
    output,
)
from jaxdp.saddle.grids import UNIT, Totals, record_bits
from jaxdp.saddle.plans.scores import OnePlayerPlan, Sampler, described
from jaxdp.saddle.theory import charges
from jaxdp.sampling import FullBatch, SinglePass


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrankWolfe(OnePlayerPlan):
    r"""Private Frank-Wolfe for a convex loss over a simplex or polytope.

    Each of T steps draws one vertex by the exponential mechanism, of its records' clipped
    gradients at the iterate, and moves the iterate towards it. The iterate is released. It
    is a mixture of T vertices and the start, so few steps are usual.

    Attributes:
      num_examples: n, records in the data set; public.
      num_steps: T.
      sampling: a ``sampling.FullBatch``, of which all records are charged in every step;
        or a ``sampling.SinglePass``, of which each is charged once.
      relation: which data sets are neighbours; no default. A record that is zeroed or
        absent leaves its row, which counts nothing: one of NaN does, if its gradient is.
      dim: number of vertices.
      linf_clip_norm: C, bound on the coordinates of one record's vertex gradient; in units
        of the loss.
      inverse_temperature: :math:`\tau`, of the mean of the batch's clipped vertex
        gradients g, where a vertex is drawn with probability proportional to
        :math:`e^{-\tau g_v}`; 1 over the units of the loss. None until :meth:`calibrate`.
      center_gradients: as in :class:`Saddle`.
      sampler: as in :class:`Saddle`, like ``delta``.
      delta: what :meth:`calibrate` aimed at; used by reports.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.FrankWolfe(
      ...     num_examples=1000, num_steps=20, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", dim=20, linf_clip_norm=1.0,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> bool(plan.epsilon() <= 2.0), plan.inverse_temperature > 0
      (True, True)

    References:
      As for :func:`jaxdp.frank_wolfe`; accounting by bounded range: zCDP, or
      the pure sum of the draws where it is less.
    """

    num_examples: int
    num_steps: int
    sampling: FullBatch | SinglePass
    relation: Relation
    dim: int
    linf_clip_norm: float
    inverse_temperature: float | None = None
    center_gradients: bool = False
    sampler: Sampler = "integer"
    delta: float | None = None

    family: ClassVar[str] = "frank_wolfe"
    released: ClassVar[str] = "vertices of batches"
    numbers_read: ClassVar[Any] = FrankWolfeNumbers
    runs: ClassVar[Any] = frank_wolfe
    calibrated: ClassVar[str] = "inverse_temperature"
    step_size_fields: ClassVar[tuple[str, ...]] = ("inverse_temperature",)
    mover: ClassVar[str] = "a record"
    unlogged: ClassVar[str] = "are vertices: their average by its rule is the result"

    def __post_init__(self) -> None:
        validate.instance((FullBatch, SinglePass), sampling=self.sampling)
        validate.integer(at_most=2**31 - 1, num_examples=self.num_examples)
        most = self.sampling.max_steps(self.num_examples)
        validate.integer(num_steps=self.num_steps, at_most=most)
        if self.batch_size >= 2**22:
            raise ValueError(
                "sampling must read less than 2**22 records in a step, whose totals fit 32 "
                f"bits, got {self.sampling} of {self.num_examples} records"
            )
        self._check()

    @property
    def full_batch(self) -> bool:
        """True if every step reads, and charges, all records."""
        return isinstance(self.sampling, FullBatch)

    @property
    def amplification(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Share of one record in a mean, for it is what it moves that is limited."""
        return 1 / self.batch_size

    @property
    def _most(self) -> float:
        """As far as a multiplier of 16 bits takes a record's contribution, if less."""
        return min(super()._most, UNIT * 2.0 ** (15 + self.grid_bits))

    @kept
    def _totals(self) -> Totals:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Totals over a batch, of which the difference of two fits int32 as well."""
        size = self.batch_size
        return Totals(self.clips, record_bits(2 * size), size, self.kappa)

    def _cost_at(self, steps: list[float], *, pure: bool = False) -> float:
        (delta,) = self._totals.score_sensitivities(steps)
        # A draw by a batch without the record tells nothing of it.
        draws = self.num_steps if self.full_batch else 1
        return draws * float(charges.draw(delta, simplex.LOG_ERROR, pure=pure))

    def returned(self, state: Any, params: Any) -> Any:
        return output(state)

    def describe(self) -> Description:
        draws = f"a vertex in each of {self.num_steps} steps"
        return described(f"{draws} of {self.batch_size} records", self.sensitivity)
