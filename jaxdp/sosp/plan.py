"""The plan of private second-order stationary points."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Relation, ValueFn
from jaxdp.kernels import prefix_noise as noises
from jaxdp.mechanism import design as designs
from jaxdp.mechanism import sum_plan
from jaxdp.mechanism.design import Design
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Contributions, Description, Plan
from jaxdp.sampling import AdaptiveCursor
from jaxdp.sosp import gradients
from jaxdp.sosp import hessian as oracles
from jaxdp.sosp import roles as role_lib
from jaxdp.sosp import state as state_lib
from jaxdp.sosp.algorithm import sosp
from jaxdp.sosp.hessian import Hessian, HessianNorm
from jaxdp.sosp.roles import Products, Roles, SOSPNumbers
from jaxdp.sosp.theory import bounds, design, theorems

_ONE_PASS = AdaptiveCursor()
_BATCHES = ("refresh_batch_size", "difference_batch_size", "hessian_batch_size")
_POSITIVE = (
    *("smoothness", "difference_batch_rate", "drift_limit", "trigger_norm"),
    *("l2_clip_norm", "hessian_clip_norm", "hessian_lipschitz", "escape_radius"),
    "hessian_difference_rate",
)
_NON_NEGATIVE = ("escape_noise_std", "curvature_threshold")


def _within(low: float, high: float, name: str, value: float) -> None:
    """Checks a number of escapes of several steps."""
    if not low <= value <= high:
        raise ValueError(
            f"{name} must be in [{low:g}, {high:g}] where escapes take steps, got {value!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SOSP(Plan):
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
      escape_radius: :math:`\Xi`; an escape that comes so far has left. In [1e-12, 1e12],
        and times ``hessian_clip_norm`` in [1e-18, 1e18]. (A jump with
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
      hessian_lipschitz: Lipschitz constant :math:`\rho` of Hessians. ``"tracked"`` needs
        one of every record's, by which changes are clipped; ``"released"`` one of the
        mean, over which a jump is as long as the curvature.
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

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.SOSP(
      ...     num_examples=1000, num_steps=50, relation="replace_one", l2_clip_norm=1.0,
      ...     smoothness=1.0, refresh_batch_size=100, difference_batch_rate=100.0,
      ...     drift_limit=1.0, max_differences=7, trigger_norm=0.2, escape_steps=5,
      ...     escape_radius=0.5, escape_noise_std=0.1, hessian_batch_size=100,
      ...     hessian_clip_norm=1.0,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> bool(plan.epsilon() <= 2.0), plan.num_passes
      (True, 1)

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
    hessian: Hessian = "on_demand"
    hessian_norm: HessianNorm = "operator"
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
    theorem: Design | None = None

    family: ClassVar[str] = "sosp"
    trivial: ClassVar[Any] = (
        "alpha",
        lambda given: max(
            given["lipschitz"], given["smoothness"] ** 2 / given["hessian_lipschitz"]
        ),
    )
    released: ClassVar[str] = "queries of a search"
    makes_steps: ClassVar[bool] = True
    runs_algorithm: ClassVar[bool] = True
    runs: ClassVar[Any] = sosp
    numbers_read: ClassVar[Any] = SOSPNumbers
    may_stop: ClassVar[bool] = True
    nested: ClassVar[dict[str, Any]] = {
        "theorem": functools.partial(Design.read, {"promise": bounds.CertifiedPoint})
    }

    def __post_init__(self) -> None:
        validate.instance(AdaptiveCursor, sampling=self.sampling)
        validate.one_of(accounting.RELATIONS, relation=self.relation)
        validate.one_of(noises.NAMES, prefix_noise=self.prefix_noise)
        validate.one_of(oracles.HESSIANS, hessian=self.hessian)
        validate.one_of(oracles.HESSIAN_NORMS, hessian_norm=self.hessian_norm)
        for name in ("query_in_escape", "stop_at_certificate", "hessian_filter"):
            validate.instance(bool, **{name: getattr(self, name)})
        for name in ("l2_clip_norm", "hessian_clip_norm"):
            sum_plan.check_clip(name, getattr(self, name))
        # The cursor and what it is to be moved by are added in 32 bits.
        validate.integer(at_most=2**29, num_examples=self.num_examples)
        self._check(validate.integer, *_BATCHES, at_most=self.num_examples)
        self._check(validate.integer, "num_steps", "escapes_per_refresh", "dim")
        self._check(validate.integer, "max_differences", at_least=0)
        self._check(validate.positive, *_POSITIVE)
        self._check(validate.non_negative, *_NON_NEGATIVE)
        if self.noise_multiplier is not None:
            validate.noise_multiplier(self.noise_multiplier)
        self._check(validate.probability, "delta")
        self._check_escapes()
        self._coerce()
        self._drop_design()
        _ = self.correlation  # Raises for a period that is too long.
        if self.noise_multiplier is None:
            return
        if self.noise_multiplier > 0:
            accounting.self_check(self._guarantee)
        self._check_noise()

    def _check(self, check: Callable[..., None], *names: str, **limits: Any) -> None:
        """Checks fields, of which those whose default is None may be None."""
        optional = {field.name for field in self._fields() if field.default is None}
        for name in names:
            value = getattr(self, name)
            if value is not None or name not in optional:
                check(**limits, **{name: value})

    def _check_escapes(self) -> None:
        """Checks the fields of Hessians and escapes against the Hessian's mode."""
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
        if steps is not None and not jumps:
            # A product's bound rests on lengths, grids and inverses that float32 holds.
            longest = self.hessian_clip_norm * self.escape_radius
            _within(1e-12, 1e12, "escape_radius", self.escape_radius)
            _within(1e-18, 1e18, "hessian_clip_norm * escape_radius", longest)
            if self.hessian == "tracked":
                mean = self.hessian_clip_norm / self.hessian_batch_size
                _within(1e-30, 1e30, "hessian_clip_norm / hessian_batch_size", mean)
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
        alone = self.noise_multiplier == 0 or (
            self.hessian_filter and self.noise_multiplier is not None
        )
        if steps is not None and not jumps and self.escape_noise_std == 0 and alone:
            raise ValueError(
                "escape_noise_std must be > 0 with hessian_filter or without other noise, "
                "got 0: nothing would leave an exact saddle"
            )

    def _check_noise(self) -> None:
        """Checks that grids hold the noise, and the filter's budget is enough."""
        role = self.roles.hessian
        if not isinstance(role, Products):
            return
        _ = role.grid(1)
        # The shortest lengths that the products of a whole escape may count as.
        shortest = self.escape_radius * 2.0**-oracles.MAX_HALVINGS
        if role.budget < role.times * shortest**2:
            raise ValueError(
                "escape_noise_std or hessian_batch_size must be larger with "
                "hessian_filter: the budget of an escape ends before it can, got "
                f"{self.escape_noise_std} and {self.hessian_batch_size}"
            )

    # Designs.

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
        hessian_lipschitz: float,
        failure_probability: float = 0.1,
        accuracy: float | None = None,
        escape_failure_probability: float | None = None,
        num_steps: int | None = None,
        max_differences: int = 31,
        prefix_noise: str = "blt_3",
        trigger_factor: float | None = None,
        drift_limit: float | None = None,
        hessian: Hessian = "on_demand",
        hessian_norm: HessianNorm = "operator",
        hessian_clip_norm: float | None = None,
        escapes_per_refresh: int = 4,
        gradient_std: float | None = None,
        difference_std: float | None = None,
        hessian_std: float | None = None,
    ) -> Self:
        r"""Returns the calibrated plan of the best certificate, see ``theorem.promise``.

        Privacy rests on none of the constants. A warning says so where nearly every point
        fulfils the promise.

        Args:
          num_examples: n >= 4, independent records of a population.
          dim: d, parameters that move.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: G > 0, of every record's loss; the clip of gradients.
          smoothness: M > 0, of its gradient; steps are of size 1 / M.
          hessian_lipschitz: :math:`\rho` > 0, of the *expected* Hessian, in operator
            norm: that of the mean loss over the population. With ``hessian="tracked"`` it
            must be one of every record's Hessian, which is often far larger.
          failure_probability: in (0, 1), that a certificate of the run is wrong.
          accuracy: :math:`\gamma` > 0; a certificate is of alpha =
            (``trigger_factor`` + 1) :math:`\gamma`, and what grids round off, which grows
            with d. None takes the least for which four times the expected records fit
            into n.
          escape_failure_probability: of one escape that it wrongly fails, in (0, 1). None
            takes a share of ``failure_probability``.
          num_steps: T, most iterations. None is 2000 for a given accuracy; else 2000 more
            than eight escapes take.
          max_differences: K >= 1, most differences between two refreshes.
          prefix_noise: name of the noise kernel of differences.
          trigger_factor: > 0; an escape begins where the estimate is at most so many
            :math:`\gamma`. None is 3 for a given accuracy; else 1, with which alpha is
            smaller for as many records.
          drift_limit: > 0; a refresh is due when M times the way reaches it. None takes G.
          hessian: ``"on_demand"``, ``"tracked"`` or ``"released"``, as in :class:`SOSP`.
          hessian_norm: norm that bounds a record's tracked Hessian.
          hessian_clip_norm: bound on a record's Hessian. None takes M, a little more where
            the operator norm of matrices is bounded, and sqrt(d) M for Frobenius norms
            (also of released Hessians), which bounds any. M is enough where Hessians have
            rank 1.
          escapes_per_refresh: of a tracked Hessian.
          gradient_std: typical deviation of one record's gradient, in Euclidean norm; None
            for the constant that always holds, G. With any of the three, certificates hold
            if sampling errors are of their typical size.
          difference_std: of its change over a unit of distance; None for M.
          hessian_std: of its Hessian, in operator norm; None for M.

        Raises:
          ValueError: a constant out of range, too few records for a refresh and a
            Hessian, or so many dimensions that grids hide curvature from escapes.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SOSP.certified(
          ...     num_examples=200_000, dim=10, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     hessian_lipschitz=1.0, accuracy=0.1,
          ... )
          >>> round(plan.theorem.promise.alpha, 3), bool(plan.epsilon() <= 2.0)
          (0.4, True)
        """
        return cls._certified(**designs.given(locals()))

    @classmethod
    def from_theorem(
        cls,
        theorem: Literal["3.17", "3.17 as printed"],
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        smoothness: float,
        hessian_lipschitz: float,
        initial_gap: float,
        failure_probability: float = 0.1,
    ) -> Self:
        """Returns the calibrated plan that Theorem 3.17 prescribes.

        For study and comparison; :meth:`certified` is better. Nothing is proven at these
        numbers, for hidden constants are read as 1.

        Args:
          theorem: ``"3.17"``, corrected, or ``"3.17 as printed"``.
          num_examples: as in :meth:`certified`, like the next seven.
          dim: d.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: G.
          smoothness: M.
          hessian_lipschitz: of every record's Hessian, which is tracked.
          initial_gap: B > 0, F at the start less its infimum.
          failure_probability: the theorem's omega, which enters logarithms.

        Raises:
          ValueError: an unknown theorem, a constant out of range, or so few records that
            the theorem's first refresh does not fit.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SOSP.from_theorem(
          ...     "3.17", num_examples=200_000, dim=10, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     hessian_lipschitz=1.0, initial_gap=1.0,
          ... )
          >>> plan.theorem.name, plan.hessian
          ('3.17', 'tracked')
        """
        return cls._from_theorem(**designs.given(locals()))

    @classmethod
    def _designed(cls, name: str, **constants: Any) -> Design:
        if name == "certified":
            return design.certified(**constants)
        return theorems.prescribed(name, **constants)

    @classmethod
    def _of(cls, design: Design, *, epsilon: float, delta: float) -> Self:
        ours = {field.name for field in cls._fields()} & design.keys()
        plan = cls(**{name: design[name] for name in ours}, theorem=design)
        return plan.calibrate(epsilon=epsilon, delta=delta)

    def _fulfils(self, design: Design) -> bool:
        if self.num_passes > 1:
            return False
        if self.noise_multiplier is None:
            return True
        most = design.promise.noise_multiplier * designs.ideal_factor(self)
        return self.noise_multiplier <= most * (1 + 1e-6)

    # Privacy.

    @property
    def num_passes(self) -> int:
        """Number E of passes: the most queries that one record can be in."""
        return self.sampling.num_passes

    @property
    def _guarantee(self) -> accounting.Guarantee:
        return self._guarantee_of(validate.has_noise(self.noise_multiplier))

    def _guarantee_of(self, noise_multiplier: float) -> accounting.Guarantee:
        ideal = accounting.full_batch_gaussian(
            noise_multiplier, self.num_passes, self.relation
        )
        if not noise_multiplier:
            return ideal
        return accounting.drawn(
            ideal,
            num_steps=self.num_steps,
            numbers_per_step=self._numbers_per_step,
            reach=1 / noise_multiplier,
        )

    @property
    def _numbers_per_step(self) -> int:
        """Largest count of values in a step: a gradient, and a product or a matrix.

        Params of another size than ``dim`` are refused; where it is not given, any size
        is charged for.
        """
        if self.dim is None:
            return 2 * accounting.MAX_NUMBERS
        more = math.comb(self.dim + 1, 2) if self.hessian == "released" else self.dim
        return self.dim + more

    def calibrate(self, *, epsilon: float, delta: float) -> Self:
        """Returns a plan of at most (epsilon, delta), with the least noise.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SOSP.certified(
          ...     num_examples=200_000, dim=10, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     hessian_lipschitz=1.0, accuracy=0.1,
          ... )
          >>> more = plan.calibrate(epsilon=4.0, delta=1e-6)
          >>> more.noise_multiplier < plan.noise_multiplier
          True
        """
        self._check_budget(epsilon, delta)
        noise = accounting.calibrate_noise_multiplier(
            self._guarantee_of, epsilon, delta
        )
        return dataclasses.replace(self, noise_multiplier=noise, delta=delta)

    with_noise = sum_plan.with_noise

    # Roles.

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the sum of a refresh; other roles have their own."""
        return accounting.sensitivity(self.relation, self.l2_clip_norm)

    @property
    def correlation(self) -> noises.PrefixNoise:
        """Noise kernel of the differences between two refreshes, which holds C."""
        return _correlation(self.prefix_noise, max(self.max_differences, 1))

    @kept
    def roles(self) -> Roles:
        """Sensitivity, noise and grid of refreshes, differences and Hessians."""
        noise = validate.has_noise(self.noise_multiplier)
        moves = accounting.sensitivity(self.relation, 1.0)
        rows, rate = self.refresh_batch_size, self.difference_batch_rate
        return Roles(
            role_lib.mean("refresh", noise, moves, self.l2_clip_norm, rows),
            role_lib.differences(noise, moves, rate, self.correlation),
            self._hessian_role(noise, moves),
        )

    def _hessian_role(self, noise: float, moves: float) -> Any:
        clip, rows = self.hessian_clip_norm, self.hessian_batch_size
        if self.escape_steps is None:
            return None
        if self.hessian == "released":
            return role_lib.mean("Hessian", noise, moves, clip, rows)
        times = self.escape_steps - 1
        products: dict[str, Any] = {
            "noise_multiplier": noise,
            "moves": moves,
            "clip_norm": clip,
            "rows": rows,
            "radius": self.escape_radius,
            "least_std": self.escape_noise_std,
        }
        if self.hessian == "on_demand":
            return Products(**products, times=times, filtered=self.hessian_filter)
        assert self.dim is not None
        times *= self.escapes_per_refresh
        return role_lib.tracked(self.hessian_norm, self.dim, **products, times=times)

    @property
    def refresh_noise_std(self) -> float:
        """Standard deviation of a coordinate's noise in a refresh."""
        return self.roles.refresh.noise_std

    @property
    def node_std(self) -> float:
        """Standard deviation of a coordinate of one node's noise, in differences."""
        return self.roles.difference.node_std

    @property
    def difference_noise_std(self) -> float:
        """Largest standard deviation of the differences' noise in the estimate."""
        return self.roles.difference.noise_std

    @property
    def noise_std(self) -> float:
        """Largest standard deviation of the estimate's noise over its steps."""
        return math.hypot(self.refresh_noise_std, self.difference_noise_std)

    @property
    def escape_std(self) -> Any:
        """Standard deviation of the noise of an escape's steps, or of a released matrix.

        None without escapes.
        """
        return None if self.escape_steps is None else self.roles.hessian.noise_std

    # What runs, and what came out.

    def returned(self, state: Any, params: Any) -> Any:
        return state.best.point

    def _spent(self, num_steps: int) -> accounting.Epsilon:
        return dataclasses.replace(self, num_steps=num_steps).epsilon()

    def contributions(
        self,
        value_fn: ValueFn,
        params: Any,
        records: Any,
        key: Any,
        *,
        trainable: Any = None,
        stacked: Any = None,
    ) -> Contributions:
        del key, trainable, stacked  # All leaves move, and no direction is drawn.
        rows = gradients.each(value_fn, params, records)
        return Contributions(rows, self.l2_clip_norm, self.refresh_noise_std)

    def describe(self) -> Description:
        noise = (
            f"{self.noise_multiplier:.4g} x sensitivity on means of "
            f"{self.refresh_batch_size} gradients and on how they change "
            f"({self.prefix_noise}): {self.noise_std:.3g} a coordinate at most"
        )
        batch = f"means of {self.hessian_batch_size} Hessians"
        if self.escape_steps is not None and self.hessian == "released":
            noise += f"; on {batch}: {self.escape_std:.3g} an entry"
        elif self.escape_steps is not None:
            noise += f"; on products with {batch}: {self.escape_std:.3g}"
        return Description(noise, stds=self.noise_std, at_most=True)

    def mechanism(self) -> dict[str, Any]:
        names = ("l2_clip_norm", "noise_multiplier", "noise_std", "escape_std")
        return {name: getattr(self, name) for name in names}

    def _outcome(self, state: Any) -> dict[str, Any]:
        """Returns the result of a run and the records that it read, all from releases.

        ``certified`` is whether an escape from the returned point failed. Then, with the
        probability that ``theorem.promise`` states, and under its assumptions, the point
        is second-order stationary at ``alpha``. One of them is that losses are finite: a
        record whose loss is not counts zero, and nothing tells how many do.
        """
        spider = state.spider
        queries = {n: int(getattr(spider, n)) for n in ("refreshes", "differences")}
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


@functools.lru_cache(maxsize=64)
def _correlation(name: str, period: int) -> noises.PrefixNoise:
    return noises.make(name, period)


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
