"""Base of the plans of two-player games."""

from typing import Any

import numpy as np

from jaxdp.core import validate
from jaxdp.saddle.algorithms import mirror_descent
from jaxdp.saddle.plans.scores import VertexSamplingPlan, proportion, uniform


class TwoPlayers(VertexSamplingPlan):
    """Base class of the plans of two-player games."""

    dim_x: int
    dim_y: int
    linf_clip_norm_x: float
    linf_clip_norm_y: float

    @property
    def _clips(self) -> tuple[float, float]:
        return self.linf_clip_norm_x, self.linf_clip_norm_y

    def _check_players(self) -> None:
        # Numbers of vertices are logged as float32.
        validate.integer(at_most=2**24, dim_x=self.dim_x, dim_y=self.dim_y)
        given: Any = self
        validate.instance(bool, center_gradients=given.center_gradients)
        self._check(
            linf_clip_norm_x=self.linf_clip_norm_x,
            linf_clip_norm_y=self.linf_clip_norm_y,
        )

    def _start(self) -> list[float]:
        given = [getattr(self, name) for name in self.steps]
        if given[0] is not None:
            return given
        dims = (self.dim_x, self.dim_y)
        return [proportion(d, c) for d, c in zip(dims, self._clips, strict=True)]

    def uniform(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the uniform starting points, float32 (dim_x,) and (dim_y,)."""
        return uniform(self.dim_x), uniform(self.dim_y)

    def returned(self, state: Any, params: Any) -> Any:
        return mirror_descent.output(state)
