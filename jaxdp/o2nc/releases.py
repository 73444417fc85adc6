"""Releases of the O2NC oracles: clips, noise and accounting."""

import dataclasses
import functools
import math
from typing import ClassVar, Self

import numpy as np

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Perturbation, Phase
from jaxdp.kernels import smoothed_gradient
from jaxdp.kernels.sphere import MAX_ORTHONORMAL
from jaxdp.mechanism import events
from jaxdp.mechanism.correlated_plan import CorrelatedPlan
from jaxdp.mechanism.sum_plan import Vary, check_clip
from jaxdp.o2nc.theory import budget, estimators
from jaxdp.sampling import MultiPassRestarts, SinglePassRestarts


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleReleases(CorrelatedPlan):
    r"""Base of the O2NC plan: releases of an estimate and of its changes until a restart.

    With ``SinglePassRestarts`` a record is in one step of a run: see
    :class:`~jaxdp.mechanism.correlated_plan.CorrelatedPlan`.

    With ``MultiPassRestarts`` it may be in all. The noise of the steps is independent, and
    adds up in the running estimate until the next restart: :mod:`jaxdp.o2nc.theory.budget`
    divides it, by :math:`r_1` of the restarts and :math:`r_2` of the changes.

    So ``sensitivity`` is :math:`r_1 + r_2`, and with full batches the run is exactly
    :math:`\mu`-GDP with :math:`\mu` = 1 / ``noise_multiplier``. With samples the same noise
    costs about as much: more where a record that is drawn, which weighs 1/q times as much,
    is large beside it. What samples save is time.
    """

    sampling: SinglePassRestarts | MultiPassRestarts  # pyright: ignore[reportIncompatibleVariableOverride]
    restart_l2_clip_norm: float
    smoothing_radius: float
    max_step: float
    oracle: estimators.Oracle = "zeroth_order"
    num_directions: int = 1
    direction: estimators.Direction = "orthonormal"
    difference: estimators.Difference = "antithetic"
    share_directions: bool = False
    scale_with_movement: bool = False

    samplers: ClassVar[tuple[type, ...]] = (SinglePassRestarts, MultiPassRestarts)

    def __post_init__(self) -> None:
        validate.instance(self.samplers, sampling=self.sampling)
        check_clip("restart_l2_clip_norm", self.restart_l2_clip_norm)
        check_clip("l2_clip_norm", self.l2_clip_norm)
        if math.isinf(self.restart_l2_clip_norm) != math.isinf(self.l2_clip_norm):
            raise ValueError(
                "restart_l2_clip_norm must be finite if and only if l2_clip_norm is, got "
                f"{self.restart_l2_clip_norm!r} and {self.l2_clip_norm!r}"
            )
        validate.positive(
            smoothing_radius=self.smoothing_radius, max_step=self.max_step
        )
        validate.one_of(estimators.ORACLES, oracle=self.oracle)
        validate.one_of(estimators.DIRECTIONS[self.oracle], direction=self.direction)
        validate.one_of(estimators.DIFFERENCES[self.oracle], difference=self.difference)
        most = MAX_ORTHONORMAL if self.direction == "orthonormal" else None
        validate.integer(num_directions=self.num_directions, at_most=most)
        for name in ("share_directions", "scale_with_movement"):
            validate.instance(bool, **{name: getattr(self, name)})
        self._check_oracle()
        if self.multi_pass and self.prefix_noise != "independent":
            raise ValueError(
                "prefix_noise must be 'independent' with sampling.MultiPassRestarts, got "
                f"{self.prefix_noise!r}: a record is in every step"
            )
        if self.scale_with_movement and not self.multi_pass:
            raise ValueError(
                "scale_with_movement must be False with sampling.SinglePassRestarts, got "
                "True: a record is in one step, and the longest move decides"
            )
        if self.scale_with_movement and self.l2_clip_norm < 1e-22:
            raise ValueError(
                "l2_clip_norm must be at least 1e-22 with scale_with_movement, which takes "
                f"a share of it, got {self.l2_clip_norm!r}"
            )
        super().__post_init__()

    def _check_oracle(self) -> None:
        """Checks that directions and restart period suit the oracle."""
        if self.oracle == "first_order" and self.share_directions:
            raise ValueError(
                "share_directions must be False with oracle='first_order', got True: "
                "every record has points of its own"
            )
        if self.oracle != "scalar":
            return
        if not self.share_directions:
            raise ValueError(
                "share_directions must be True with oracle='scalar', got False: slopes "
                "are added over the records of a batch"
            )
        if self.sampling.period != 1:
            raise ValueError(
                "sampling.period must be 1 with oracle='scalar', got "
                f"{self.sampling.period}: slopes along other directions do not add up"
            )

    def perturbation(self, dim: int) -> Perturbation:
        return Perturbation(
            self.smoothing_radius,
            share=smoothed_gradient.scale(1.0, dim),
            differences=self.oracle != "first_order",
            may_be_zero=False,
        )

    @property
    def multi_pass(self) -> bool:
        """True if every step may read every record."""
        return isinstance(self.sampling, MultiPassRestarts)

    @property
    def noise_period(self) -> int:
        return self.sampling.period

    @property
    def phases(self) -> tuple[Phase, ...]:
        if isinstance(self.sampling, MultiPassRestarts):
            return self.sampling.phases_of(self.num_examples)
        return self.sampling.phases

    @property
    def clips(self) -> dict[str, tuple[float, float]]:
        bound = {
            "restart": self.restart_l2_clip_norm,
            "difference": self.l2_clip_norm,
        }
        return {p.name: (bound[p.name], self._size(p)) for p in self.phases}

    def _size(self, phase: Phase) -> float:
        """Returns the normalizer of a phase: its expected batch size."""
        if isinstance(self.sampling, MultiPassRestarts):
            sampler = self.sampling.of_phase(phase.name)
            return sampler.expected_batch_size(self.num_examples)
        return phase.batch_size

    @functools.cached_property
    def leaf_sensitivities(self) -> np.ndarray:
        moves = {
            name: accounting.sensitivity(self.relation, bound) / size
            for name, (bound, size) in self.clips.items()
        }
        steps = [np.full(p.num_steps, moves[p.name]) for p in self.phases]
        leaves = np.concatenate(steps)
        leaves.flags.writeable = False  # It is kept: nobody else may change it.
        return leaves

    # Where every step may read a record.

    def _counts(self, steps: int) -> dict[str, int]:
        """Counts the restarts and the differences among the first ``steps`` steps."""
        restarts = -(-steps // self.sampling.period)
        return {"restart": restarts, "difference": steps - restarts}

    @functools.cached_property
    def _division(self) -> budget.Division:
        """Noise of several passes for ``noise_multiplier`` 1, as if all records were read.

        A sample's larger share is paid less often.
        """
        moves = [
            accounting.sensitivity(self.relation, bound) / self.num_examples
            for bound in (self.restart_l2_clip_norm, self.l2_clip_norm)
        ]
        if not self._counts(self.num_steps)["difference"]:
            moves[1] = 0.0
        scaled, period = self.scale_with_movement, self.sampling.period
        division = budget.divided(moves[0], moves[1], period, self.num_steps, scaled)
        return budget.Division(*map(float, division))

    def _unit_std(self, phase: str) -> float:
        """Returns the standard deviation of a step's noise over the noise multiplier."""
        return getattr(self._division, phase)

    @functools.cached_property
    def sensitivity(self) -> float:
        """L2 sensitivity of all releases, to which ``noise_multiplier`` refers.

        In one pass, that of the sequence Cd of means. In several, r_1 + r_2: the root of a
        sum of squares in which the steps are weighed by their noise, such that
        ``noise_multiplier`` times it is the largest standard deviation of the running
        estimate.
        """
        if self.multi_pass:
            return self._division.estimate
        return super().sensitivity

    @property
    def noise_std(self) -> float:
        """Largest standard deviation of a coordinate's noise in the running estimate.

        With ``scale_with_movement`` in expectation over the learner's random places, if
        every step is the longest. Of the scalar oracle the mean over coordinates.
        """
        std = self.node_std if self.multi_pass else super().noise_std
        return std / math.sqrt(self.num_directions) if self.oracle == "scalar" else std

    def step_std(self, phase: str) -> float:
        """Returns the standard deviation of a coordinate's noise in a phase's means.

        With ``scale_with_movement`` at the largest move. In a single pass that of a node.
        """
        if self.multi_pass:
            return self._noise * self._unit_std(phase) if self._noise else 0.0
        return self.node_std

    def _guarantee_of(
        self, noise_multiplier: float, steps: int
    ) -> accounting.Guarantee:
        if not isinstance(self.sampling, MultiPassRestarts):
            return super()._guarantee_of(noise_multiplier, steps)
        sampler = self.sampling
        if math.isinf(self.l2_clip_norm) or not noise_multiplier:
            return accounting.full_batch_gaussian(noise_multiplier, 1, self.relation)
        counts = self._counts(steps)
        parts = [
            events.guarantee(
                self.noise,
                sampler.of_phase(name),
                self.relation,
                num_examples=self.num_examples,
                num_steps=counts[name],
                noise_multiplier=noise_multiplier
                * self._unit_std(name)
                * size
                / accounting.sensitivity(self.relation, bound),
                among_sampled=sampler.amplifies,
            )
            for name, (bound, size) in self.clips.items()
            if counts[name]
        ]
        # The smallest noise of a phase, for it is moved the farthest.
        least = min(
            noise_multiplier
            * self._unit_std(name)
            * size
            / accounting.sensitivity(self.relation, bound)
            for name, (bound, size) in self.clips.items()
        )
        return self._drawn(accounting.composed(parts), least, steps)

    def calibrate(
        self, *, epsilon: float, delta: float, vary: Vary = "noise_multiplier"
    ) -> Self:
        if self.multi_pass and vary == "num_steps":
            raise ValueError(
                "vary must be 'noise_multiplier' for this plan, got 'num_steps': what its "
                "noise costs does not depend on the number of steps, which make the noise "
                "larger instead"
            )
        return super().calibrate(epsilon=epsilon, delta=delta, vary=vary)

    def rows(self) -> list[tuple[str, str]]:
        out = super().rows()
        if self.multi_pass and self.noise_multiplier is not None:
            at = [name for name, _ in out].index("node_std")
            stds = [
                (f"{p.name}_std", f"{self.step_std(p.name):.6g}") for p in self.phases
            ]
            out[at : at + 1] = stds
        return out
