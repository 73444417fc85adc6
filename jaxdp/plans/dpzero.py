"""The plan of DPZero."""

import dataclasses
from typing import Any, ClassVar, Literal

import optax

from jaxdp import _validate
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.keys import Keys
from jaxdp.plans._base import GaussianSumPlan
from jaxdp.transforms.dpzero import dpzero

DirectionLaw = Literal["sphere", "gaussian", "rademacher", "orthonormal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPZero(GaussianSumPlan):
    r"""Private zeroth-order optimisation: K noised sums of slopes a step.

    Privacy: one record moves the K sums by at most ``sensitivity`` in L2, whatever the
    loss. The K numbers share one vector clip and cost what one number costs. Where
    batches are sampled and K >= 2, the accountant's statement under replace-one and
    zero-out has been verified numerically for vectors and proved for one number only.

    Attributes:
      smoothing_radius: :math:`\lambda` >= 0, in units of the parameters, times a vector of
        norm about sqrt(d); 0 takes exact directional derivatives, forward-mode.
      num_directions: K; at most 64.
      direction: law of the directions.
      noise: ``"discrete"``, exact discrete Gaussians drawn on the host, or
        ``"gaussian"``, float32 Gaussians drawn in the loop and rounded to the grid.

    References:
      Zhang et al., `DPZero <https://arxiv.org/abs/2310.09639>`_, 2024.
    """

    smoothing_radius: float
    num_directions: int = 1
    direction: DirectionLaw = "sphere"
    noise: Literal["discrete", "gaussian"] = "discrete"  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    family: ClassVar[str] = "dpzero"

    def __post_init__(self) -> None:
        _validate.non_negative(smoothing_radius=self.smoothing_radius)
        _validate.integer(num_directions=self.num_directions, at_most=MAX_ORTHONORMAL)
        laws = ("sphere", "gaussian", "rademacher", "orthonormal")
        _validate.one_of(laws, direction=self.direction)
        _validate.one_of(("discrete", "gaussian"), noise=self.noise)
        super().__post_init__()

    def transform(
        self, keys: Keys, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        return dpzero(self, keys, **kwargs)
