"""The plan of private second-order stationary points."""

import dataclasses
import math
from typing import Any, ClassVar, Self

from jaxdp import accounting
from jaxdp.accounting import lattice
from jaxdp.core import validate
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.keys import Keys
from jaxdp.core.types import Relation
from jaxdp.kernels import prefix_noise as noises
from jaxdp.mechanism.sum_plan import check_clip
from jaxdp.sampling import AdaptiveCursor
from jaxdp.sosp import hessian as oracles
from jaxdp.sosp import state as state_lib
from jaxdp.sosp.algorithm import sosp
from jaxdp.sosp.roles import RolesPlan
from jaxdp.sosp.theory import design, settings, theorems

_ONE_PASS = AdaptiveCursor()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SOSP(RolesPlan):
    r"""Plan for second-order stationary points by adaptive batches and noisy escapes.

    Three roles share the data, and every record is in one of them in each pass: means of
    gradients (refreshes), means of how they changed (differences), and Hessians (escapes).
    Each role is a Gaussian mechanism of the same ``noise_multiplier`` over its own exact
    sensitivity, so the run is one Gaussian event a pass, whatever it does: batches,
    triggers, restarts and the end follow from releases. With kappa = 2 under
    ``"replace_one"`` and 1 otherwise, one record moves

    * a refresh by ``kappa l2_clip_norm / refresh_batch_size``;
    * a difference by ``kappa / difference_batch_rate``, in one of ``max_differences``;
    * each of the ``escape_steps - 1`` products with a Hessian by ``kappa
      hessian_clip_norm escape_radius / hessian_batch_size`` at most.

    Attributes:
      num_examples: n, records in the data set; public.
      num_steps: T, the most steps.
      sampling: a ``sampling.AdaptiveCursor``.
      relation: which data sets are neighbours; no default. A record that is zeroed or
        absent leaves its row, which counts nothing: one of NaN does.
      l2_clip_norm: C_g, bound on one record's gradient.
      smoothness: M, Lipschitz constant of the gradients: what batches are chosen by; a
        step is 1 / M times the gradient. If it is too small, differences are clipped.
      refresh_batch_size: b.
      difference_batch_rate: c; a difference reads ``ceil(c M distance)`` records, at least
        1. 1 / c bounds how far one record, taken out, moves its mean.
      drift_limit: :math:`\kappa`; a refresh is due when M times the way since the last one
        reaches it.
      max_differences: K, differences between two refreshes; with 0 each query is a refresh
        (DP-SGD).
      prefix_noise: the noise of differences, one of ``jaxdp.kernels.prefix_noise.NAMES``.
      difference_batch_size: so many records in each difference instead, and a refresh
        where c M distance would be more: batches that do not adapt, to compare with.
      trigger_norm: :math:`\theta`; an escape begins where the estimate is at most as long.
      escape_steps: :math:`\Gamma`, at least 2; 1 with ``hessian="released"``; None: no
        escapes.
      escape_radius: :math:`\Xi`; an escape that comes so far has left. (A jump with
        ``hessian="released"`` needs neither this nor ``escape_noise_std``.)
      escape_noise_std: the least noise of an escape's steps, which it needs to leave an
        exact saddle; more is added where privacy asks for it.
      hessian: ``"on_demand"`` (products over an escape's own records; any d),
        ``"tracked"`` (a running d x d sum, secret; small d) or ``"released"`` (one noised
        matrix an escape, and a jump along its lowest eigenvector).
      hessian_batch_size: b_H.
      hessian_clip_norm: C_h, bound on one record's Hessian: on its product with a unit
        vector, or on its norm.
      hessian_norm: which norm, with ``"tracked"``: ``"operator"`` or ``"frobenius"``.
        ``"released"`` bounds the Frobenius norm.
      hessian_lipschitz: Lipschitz constant of the Hessians; ``"tracked"`` and
        ``"released"`` need it.
      hessian_difference_rate: with ``"tracked"``: records of a change of the Hessian over
        ``hessian_lipschitz`` times the way; None is ``b_H / min(C_h, M)``, which does not
        clip where C_h bounds the Hessians themselves.
      escapes_per_refresh: :math:`\tau`, with ``"tracked"``: after so many a refresh is due.
      curvature_threshold: with ``"released"``: an anchor is certified whose noised Hessian
        has no eigenvalue below minus this.
      query_in_escape: whether gradients (and a tracked Hessian) follow an escape's steps.
      stop_at_certificate: whether the run ends with the first certificate.
      hessian_filter: counts what an escape's products really cost, and ends it where the
        budget does; then ``escape_noise_std`` is the noise, and longer escapes cost the
        same. ``"on_demand"`` only.
      dim: d; needed unless the Hessian is ``"on_demand"``.
      noise_multiplier: standard deviation of each role's noise over its sensitivity; None
        until :meth:`calibrate` or :meth:`with_noise`. With 0 nothing is private; clips and
        ``escape_noise_std`` stay.
      delta: what :meth:`calibrate` aimed at; used by reports.
      theorem: where :meth:`from_theorem` or :meth:`certified` chose the numbers: what they
        promise. None elsewhere, and where a number was changed since.

    References:
      Liu, Talwar, `Adaptive Batch Size for Privately Finding Second-Order Stationary
      Points <https://arxiv.org/abs/2410.07502>`_, 2025, Algorithm 3 and Theorem 3.17,
      corrected.
    """

    num_examples: int
    num_steps: int
    sampling: AdaptiveCursor = _ONE_PASS  # pyright: ignore[reportIncompatibleVariableOverride]
    relation: Relation
    l2_clip_norm: float
    smoothness: float
    refresh_batch_size: int
    difference_batch_rate: float
    drift_limit: float
    max_differences: int
    trigger_norm: float
    escape_steps: int | None
    escape_radius: float
    escape_noise_std: float
    hessian_batch_size: int
    hessian_clip_norm: float
    prefix_noise: str = "blt_3"
    difference_batch_size: int | None = None
    hessian: settings.Hessian = "on_demand"
    hessian_norm: settings.HessianNorm = "operator"
    hessian_lipschitz: float | None = None
    hessian_difference_rate: float | None = None
    escapes_per_refresh: int = 1
    curvature_threshold: float | None = None
    query_in_escape: bool = False
    stop_at_certificate: bool = True
    hessian_filter: bool = False
    dim: int | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    theorem: settings.Settings | None = None

    family: ClassVar[str] = "sosp"
    makes_steps: ClassVar[bool] = True
    runs_algorithm: ClassVar[bool] = True
    may_stop: ClassVar[bool] = True
    nested: ClassVar[dict[str, Any]] = {"theorem": settings.read}

    def __post_init__(self) -> None:
        validate.instance(AdaptiveCursor, sampling=self.sampling)
        # The cursor and what it is to be moved by are added in 32 bits.
        validate.integer(at_most=2**29, num_examples=self.num_examples)
        validate.integer(num_steps=self.num_steps)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        for name in ("l2_clip_norm", "hessian_clip_norm"):
            check_clip(name, getattr(self, name))
        for name in (
            "l2_clip_norm",
            "hessian_clip_norm",
            "smoothness",
            "difference_batch_rate",
            "drift_limit",
            "trigger_norm",
            "escape_radius",
        ):
            validate.positive(**{name: getattr(self, name)})
        validate.non_negative(escape_noise_std=self.escape_noise_std)
        most = self.num_examples
        validate.integer(at_most=most, refresh_batch_size=self.refresh_batch_size)
        validate.integer(at_most=most, hessian_batch_size=self.hessian_batch_size)
        validate.integer(at_least=0, max_differences=self.max_differences)
        validate.integer(escapes_per_refresh=self.escapes_per_refresh)
        if self.difference_batch_size is not None:
            size = self.difference_batch_size
            validate.integer(at_most=most, difference_batch_size=size)
        validate.one_of(noises.NAMES, prefix_noise=self.prefix_noise)
        validate.one_of(settings.HESSIANS, hessian=self.hessian)
        validate.one_of(settings.HESSIAN_NORMS, hessian_norm=self.hessian_norm)
        for name in ("query_in_escape", "stop_at_certificate", "hessian_filter"):
            validate.instance(bool, **{name: getattr(self, name)})
        if self.delta is not None:
            self._check_delta(self.delta)
        self._check_escapes()
        self._coerce()
        if self.theorem is not None and not self._keeps(self.theorem):
            object.__setattr__(self, "theorem", None)
        _ = self.correlation  # Raises for a period that is too long.
        if self.noise_multiplier is None:
            return
        validate.non_negative(noise_multiplier=self.noise_multiplier)
        if self.noise_multiplier > 0:
            accounting.self_check(self._guarantee)
        # Raise if there are no grids for these numbers.
        _ = self.refresh_grid, self.difference_grid
        if self.escape_steps is not None:
            self._check_noise()

    def _check_escapes(self) -> None:
        """Checks the fields of Hessians and escapes against the Hessian's mode."""
        for name in ("hessian_lipschitz", "hessian_difference_rate"):
            if getattr(self, name) is not None:
                validate.positive(**{name: getattr(self, name)})
        if self.curvature_threshold is not None:
            validate.non_negative(curvature_threshold=self.curvature_threshold)
        if self.dim is not None:
            validate.integer(dim=self.dim)
        needed = {
            "on_demand": (),
            "tracked": ("dim", "hessian_lipschitz"),
            "released": ("dim", "hessian_lipschitz", "curvature_threshold"),
        }
        for name in needed[self.hessian]:
            if getattr(self, name) is None:
                raise ValueError(
                    f"{name} must be a number with hessian={self.hessian!r}, got None"
                )
        both = self.refresh_batch_size + self.hessian_batch_size
        if self.hessian == "tracked" and both > self.num_examples:
            raise ValueError(
                "refresh_batch_size and hessian_batch_size must be at most num_examples = "
                f"{self.num_examples} together, got {self.refresh_batch_size} and "
                f"{self.hessian_batch_size}"
            )
        steps, jumps = self.escape_steps, self.hessian == "released"
        if steps is not None:
            validate.integer(at_least=1 if jumps else 2, escape_steps=steps)
            if jumps and steps != 1:
                raise ValueError(
                    'escape_steps must be 1 (or None) with hessian="released", whose '
                    f"escapes are one jump, got {steps}"
                )
        if self.hessian_filter and self.hessian != "on_demand":
            raise ValueError(
                'hessian_filter must be False unless hessian="on_demand", got True with '
                f"{self.hessian!r}, whose records serve in several escapes"
            )
        if (
            steps is not None
            and not jumps
            and self.escape_noise_std == 0
            and (self.hessian_filter or not self.noise_multiplier)
            and self.noise_multiplier is not None
        ):
            raise ValueError(
                "escape_noise_std must be > 0 with hessian_filter or without other noise, "
                "got 0: nothing would leave an exact saddle"
            )

    def _check_noise(self) -> None:
        """Checks that a grid holds the noise of escapes, and that their budget suffices."""
        if self.hessian == "released":
            _ = self.matrix_grid  # Raises if there is none for these numbers.
            return
        if self.hessian == "on_demand":
            _ = self.product_grid(1)
        else:
            _ = self.tracked_grid
        assert self.escape_steps is not None
        # The shortest lengths that the products of a whole escape may count as.
        shortest = self.escape_radius * 2.0**-oracles.MAX_HALVINGS
        if self.hessian_budget < (self.escape_steps - 1) * shortest**2:
            raise ValueError(
                "escape_noise_std or hessian_batch_size must be larger with "
                "hessian_filter: the budget of an escape ends before it can, got "
                f"{self.escape_noise_std} and {self.hessian_batch_size}"
            )

    def _keeps(self, found: settings.Settings) -> bool:
        """Returns True if ``found`` still describes this plan, with no more noise."""
        for field in self._fields():
            name = field.name
            if name in vars(found) and getattr(self, name) != getattr(found, name):
                return False
        if self.num_passes > 1:
            return False
        if self.noise_multiplier is None:
            return True
        # Promises are of ideal noise for the same budget, which is less by what its
        # sampler costs: next to nothing, unless a record moves so little noise far.
        spent, missed = lattice.sampler_error(self.event)
        most = found.promise.noise_multiplier
        budget = math.inf if self.delta is None else float(self.epsilon())
        if self.delta is not None and spent < budget < math.inf:
            left = (self.delta - missed) * math.exp(-spent)
            ideal = accounting.gaussian_mu(budget - spent, left)
            most *= accounting.gaussian_mu(budget, self.delta) / ideal
        return self.noise_multiplier <= most * (1 + 1e-6)

    @classmethod
    def from_theorem(
        cls, theorem: str, *, epsilon: float, delta: float, **numbers: Any
    ) -> Self:
        """Returns the plan that Theorem 3.17 prescribes, with exactly calibrated noise.

        For study; :meth:`certified` is what to use. ``plan.theorem`` has the printed
        noise, which is not private, and the printed tau, which are only reported.

        Args:
          theorem: ``"3.17"``, with corrected parameters, or ``"3.17 as printed"``.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          **numbers: as :func:`jaxdp.sosp.theory.theorems.settings`.

        Raises:
          ValueError, TypeError: as that function.
        """
        found = theorems.settings(theorem, epsilon=epsilon, delta=delta, **numbers)
        return cls._of(found).calibrate(epsilon=epsilon, delta=delta)

    @classmethod
    def certified(cls, *, epsilon: float, delta: float, **numbers: Any) -> Self:
        """Returns the plan with explicit constants; ``theorem.promise`` is its guarantee.

        Privacy rests on none of the constants. Whether a run ends with a certificate
        before the data do is not promised.

        Args:
          epsilon: > 0; the budget.
          delta: in (0, 1).
          **numbers: as :func:`jaxdp.sosp.theory.design.certified`.

        Raises:
          ValueError, TypeError: as that function.
        """
        found = design.certified(epsilon=epsilon, delta=delta, **numbers)
        return cls._of(found).calibrate(epsilon=epsilon, delta=delta)

    @classmethod
    def _of(cls, found: settings.Settings) -> Self:
        """Builds a plan from settings, without noise."""
        ours = {field.name for field in cls._fields()}
        same = {k: v for k, v in vars(found).items() if k in ours}
        return cls(**same, theorem=found)

    def calibrate(self, *, epsilon: float, delta: float) -> Self:
        """Returns a plan of at most (epsilon, delta), with the least noise.

        Args:
          epsilon: > 0.
          delta: in (0, 1).
        """
        validate.positive(epsilon=epsilon)
        self._check_delta(delta)
        noise = accounting.calibrate_noise_multiplier(
            self._guarantee_of,
            epsilon,
            delta,
        )
        return dataclasses.replace(self, noise_multiplier=noise, delta=delta)

    def with_noise(
        self, *, noise_multiplier: float, delta: float | None = None
    ) -> Self:
        """Returns the same plan with this noise; 0 is the non-private limit."""
        delta = self.delta if delta is None else delta
        return dataclasses.replace(self, noise_multiplier=noise_multiplier, delta=delta)

    # What runs, and what came out.

    def algorithm(self, keys: Keys, **kwargs: Any) -> Algorithm:
        return sosp(self, keys, **kwargs)

    def returned(self, state: Any, params: Any) -> Any:
        return state.best.point

    def shown(self, state: Any, params: Any) -> Any:
        return self.returned(state, params)

    def mechanism(self) -> dict[str, Any]:
        return {
            "l2_clip_norm": self.l2_clip_norm,
            "noise_multiplier": self.noise_multiplier,
            "noise_std": self.noise_std,
            "escape_std": None if self.escape_steps is None else self.escape_std,
        }

    def outcome(self, state: Any) -> dict[str, Any]:
        """Returns the result of a run and the records that it read, all from releases.

        ``certified`` is whether an escape from the returned point failed. Then, with the
        probability that ``theorem.promise`` states, and under its assumptions, the point
        is second-order stationary at ``alpha``. One of them is that losses are finite: a
        record whose loss is not counts zero, and nothing tells how many do.
        """
        spider = state.spider
        queries = {
            "refreshes": int(spider.refreshes),
            "differences": int(spider.differences),
        }
        if not isinstance(state, state_lib.SOSPState):  # Of the gradient alone.
            return {"records_used": int(spider.records), **queries}
        best = state.best
        rank, norm = int(best.rank), float(best.norm)
        certified = rank == state_lib.CERTIFIED
        promise = None if self.theorem is None else self.theorem.promise
        return {
            "certified": certified,
            "alpha": promise.alpha if certified and promise is not None else None,
            "rank": _RANKS[rank],
            "ended": _ENDS[int(state.ended)],
            "estimated_gradient_norm": norm if math.isfinite(norm) else None,
            "records_used": int(spider.records) + int(state.records),
            "hessian_records": int(state.records),
            **queries,
            "escapes": int(state.escapes),
        }

    def _derived(self) -> list[tuple[str, float]]:
        if self.noise_multiplier is None:
            return []
        names = ["refresh_noise_std", "difference_noise_std"]
        names += ["escape_std"] * (self.escape_steps is not None)
        return [(name, getattr(self, name)) for name in names]


_RANKS = {
    state_lib.NOTHING: "nothing known",
    state_lib.SEEN: "small gradient among those seen",
    state_lib.UNTESTED: "small gradient, curvature not tested",
    state_lib.CERTIFIED: "certified",
}
_ENDS = {
    state_lib.RUNNING: "not yet",
    state_lib.CERTIFICATE: "certificate",
    state_lib.DATA: "out of data",
    state_lib.STEPS: "out of steps",
}
