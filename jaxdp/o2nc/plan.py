"""The plan of private online-to-non-convex conversion."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, Self

import numpy as np
import optax

from jaxdp.core import run_state, validate
from jaxdp.core.keys import Keys
from jaxdp.core.types import PathPredicate, Perturbation, Relation, ValueFn
from jaxdp.kernels import smoothed_gradient
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.mechanism import blt
from jaxdp.mechanism.clip_tuning import ClipTuning
from jaxdp.mechanism.design import Design, given, ideal_factor
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.plan import Contributions, Description
from jaxdp.mechanism.sum_plan import SumPlan, noise_on_each
from jaxdp.mechanism.sums import CorrelatedSums, WeighedSums
from jaxdp.o2nc import conversion as driver
from jaxdp.o2nc import oracle as oracles
from jaxdp.o2nc import releases
from jaxdp.o2nc.gradient import private_oracle
from jaxdp.o2nc.oracle import IncrementNumbers
from jaxdp.o2nc.theory import bounds, design, estimators, theorems
from jaxdp.o2nc.theory import recommend as recommendations
from jaxdp.sampling import MultiPassRestarts, SinglePassRestarts


@dataclasses.dataclass(frozen=True, kw_only=True)
class O2NC(SumPlan):
    r"""Plan for a Goldstein-stationary point of a nonsmooth loss, in one or many passes.

    An oracle releases how a smoothed gradient changes from query to query and restarts
    every ``sampling.period`` steps; online-to-non-convex conversion turns its gradients
    into the next queries, in windows of ``window`` steps. The two lengths are independent.

    In a single pass every record is read in one step: all releases together are one
    Gaussian mechanism, whatever the losses are. In several, every step is charged.
    Lipschitz constants choose the clips; nothing rests on them.

    Attributes:
      num_steps: T, queries (releases) in all.
      sampling: the restart period, and which records a step reads: a
        ``sampling.SinglePassRestarts``, or a ``sampling.MultiPassRestarts``.
      restart_l2_clip_norm: :math:`C_1`, bound on one record's estimate where a period
        begins (a gradient; of the scalar oracle its slopes, along directions of length
        :math:`\sqrt d`).
      l2_clip_norm: :math:`C_2`, bound on one record's estimate elsewhere (the change of a
        gradient over a move of up to ``2 max_step``).
      smoothing_radius: :math:`\delta > 0` (:math:`\alpha`), how far a perturbation moves a
        point; what is estimated is the gradient of the mean loss over such a ball.
      max_step: D, the longest increment.
      window: M, steps of a window; its mean query is a candidate for the output.
      oracle: a key of :data:`jaxdp.o2nc.oracle.ORACLES`, which says what each asks.
      num_directions: m, for each record, or shared. The first-order oracle takes the mean
        gradient of so many points in differences, and one gradient at restarts.
      direction: ``"orthonormal"`` (m <= min(d, 64)) or ``"sphere"``, independent ones;
        ``"ball"`` for the first-order oracle.
      difference: how the change is estimated: ``"antithetic"`` (four evaluations a
        direction; nothing on linear losses), ``"one_sided"`` (two; Zhang et al.) or
        ``"independent"`` (four; Kornowski et al.). Of gradients: at ``"common"`` or
        ``"independent"`` points of the ball.
      share_directions: one set of directions for a whole batch: fewer perturbed models,
        more variance.
      scale_with_movement: of several passes: whether bound and noise of a difference are
        proportional to the distance of the two queries, which is public. (For estimates
        that are so too: ``"antithetic"`` and ``"one_sided"``.)
      learning_rate: :math:`\eta` of the online learner; None adapts it.
      reset: whether the learner starts from zero in each window.
      skip_last_query: whether a window's last query is not asked: with ``reset`` nothing
        depends on its gradient.
      prefix_noise: of a single pass, the name of the noise's matrix C, one of
        ``jaxdp.kernels.prefix_noise.NAMES``; of several passes ``"independent"``.
      blt_numbers: of a buffered Toeplitz C, in place of those that ship for the name; see
        :meth:`with_optimised_noise`.
      clip_tuning: None, or how both clips move from the plan's, by one factor. It follows
        the norms at restarts, one count each, and moves there alone: ``learning_rate`` is
        per restart. In several passes ``count_noise_multiplier`` is of all counts together.
        The clips of differences keep their ratio to those of restarts.
      theorem: where :meth:`from_theorem` or :meth:`certified` chose the numbers: what they
        promise. None elsewhere, where a number was changed since, and where clips move.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.O2NC(
      ...     num_examples=1000, num_steps=16, relation="replace_one", l2_clip_norm=0.5,
      ...     sampling=jaxdp.sampling.SinglePassRestarts(
      ...         period=4, restart_batch_size=100, batch_size=40
      ...     ),
      ...     restart_l2_clip_norm=1.0, smoothing_radius=0.1, max_step=0.01, window=4,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> bool(plan.epsilon() <= 2.0), plan.num_windows
      (True, 4)

    References:
      Zhang, Tran, Cutkosky, `Private Zeroth-Order Nonsmooth Nonconvex Optimization
      <https://arxiv.org/abs/2406.19579>`_, 2024; Kornowski, Liu, Talwar, `Improved Sample
      Complexity for Private Nonsmooth Nonconvex Optimization
      <https://arxiv.org/abs/2410.05880>`_, 2025.
    """

    sampling: SinglePassRestarts | MultiPassRestarts  # pyright: ignore[reportIncompatibleVariableOverride]
    prefix_noise: str = "blt_3"
    blt_numbers: blt.BLTNumbers | None = None
    restart_l2_clip_norm: float
    smoothing_radius: float
    max_step: float
    oracle: oracles.Name = oracles.DEFAULT
    num_directions: int = 1
    direction: oracles.Direction = "orthonormal"
    difference: oracles.Difference = "antithetic"
    share_directions: bool = False
    scale_with_movement: bool = False
    window: int
    learning_rate: float | None = None
    reset: bool = True
    skip_last_query: bool = False
    clip_tuning: ClipTuning | None = dataclasses.field(
        default=None, metadata={"omit_none": True}
    )
    theorem: Design | None = None

    family: ClassVar[str] = "o2nc"
    trivial: ClassVar[Any] = ("bound", lambda given: given["lipschitz"])
    released: ClassVar[str] = "increments"
    draws_directions: ClassVar[bool] = True
    makes_steps: ClassVar[bool] = True
    sums_vectors: ClassVar[bool] = True
    samplers: ClassVar[tuple[type, ...]] = (SinglePassRestarts, MultiPassRestarts)
    nested: ClassVar[dict[str, Any]] = {
        "blt_numbers": blt.BLTNumbers,
        "clip_tuning": ClipTuning,
        "theorem": functools.partial(Design.read, {"promise": bounds.GoldsteinPromise}),
    }
    extras: ClassVar[tuple[str, ...]] = ("goldstein_radius",)

    def __post_init__(self) -> None:
        for name in ("reset", "skip_last_query"):
            validate.instance(bool, **{name: getattr(self, name)})
        if self.learning_rate is not None:
            validate.positive(learning_rate=self.learning_rate)
        # A learner that is reset after every step never moves.
        validate.integer(window=self.window, at_least=2 if self.reset else 1)
        if self.skip_last_query and not self.reset:
            raise ValueError(
                "skip_last_query must be False where reset is False, got True: the next "
                "window's first increment depends on that query"
            )
        validate.instance(self.samplers, sampling=self.sampling)
        releases.check(self)
        super().__post_init__()
        if self.clip_tuning is not None and self.num_steps <= self.sampling.period:
            raise ValueError(
                "clip_tuning must be None where a run has one restart, for clips move at "
                f"the next one, got num_steps = {self.num_steps} and sampling.period = "
                f"{self.sampling.period}"
            )
        self._drop_design()

    def _perturbed(self, dim: int) -> Perturbation:
        """Returns the perturbation of points by a vector in a ball."""
        return Perturbation(
            self.smoothing_radius,
            share=smoothed_gradient.scale(1.0, dim),
            differences=not self._oracle.gradients,
            may_be_zero=False,
        )

    @property
    def _oracle(self) -> oracles.Oracle:
        return oracles.ORACLES[self.oracle]

    @property
    def multi_pass(self) -> bool:
        """True if every step may read every record."""
        return isinstance(self.sampling, MultiPassRestarts)

    def _sums(self) -> CorrelatedSums | WeighedSums:
        return releases.sums_of(self)

    @kept
    def numbers(self) -> IncrementNumbers:
        noise, names = self._correlated(self.num_steps), IncrementNumbers._fields[2:]
        given = (getattr(self, name) for name in names)
        return IncrementNumbers(noise, self.sums.count_grid, *given)

    @kept
    def driver(self) -> driver.DriverNumbers:
        """Frozen numbers that the conversion reads; with or without noise."""
        names = driver.DriverNumbers._fields
        return driver.DriverNumbers(*(getattr(self, name) for name in names))

    with_optimised_noise = blt.with_optimised_noise

    def _fulfils(self, design: Design) -> bool:
        if self.clip_tuning is not None:
            return False
        # Across a query that is skipped a change is over two steps.
        skips = self.skip_last_query and self.sampling.period > 1
        if skips or self.sampling != _sampler(design):
            return False
        if self.noise_multiplier is None:
            return True
        energy = design.dim * self.noise_std**2
        most = design.promise.noise_variance * (1 + 1e-6)
        return energy <= most or energy <= most * ideal_factor(self) ** 2

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
        initial_gap: float,
        smoothing_radius: float,
        oracle: oracles.Name = oracles.DEFAULT,
        multi_pass: bool = False,
        direction: oracles.Direction | None = None,
        num_directions: int | None = None,
        difference: oracles.Difference | None = None,
        share_directions: bool | None = None,
        prefix_noise: str | None = None,
        gradient_cost: float = 1.0,
        max_evaluations: float | None = None,
    ) -> Self:
        """Returns the calibrated plan of least proven bound; ``theorem.promise`` states it.

        Privacy rests on none of the constants. A warning says so where nearly every point
        fulfils the promise. :meth:`recommend` compares the oracles.

        Args:
          num_examples: n >= 4, independent records of a population.
          dim: d, parameters that move.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L, of every record's loss.
          initial_gap: F at the start less its infimum, in expectation; in several passes,
            of the records' mean loss. A public bound, not computed from the records.
          smoothing_radius: how far perturbations move a point; the promise is about
            Goldstein's subdifferential at twice that.
          oracle: how gradients are estimated, a key of ``jaxdp.o2nc.oracle.ORACLES``.
          multi_pass: whether every step reads all records, not one pass.
          direction: law of the directions; None takes ``"orthonormal"``, or ``"ball"`` for
            the first-order oracle.
          num_directions: m; None takes the smaller of d and 64, or 64 points of the ball.
          difference: how changes are estimated; None takes ``"antithetic"``, or
            ``"independent"`` points of the ball.
          share_directions: whether the records of a batch share directions, which is
            cheaper; None for the scalar oracle alone, which must.
          prefix_noise: name of the noise kernel; None takes ``"blt_3"``, or
            ``"independent"``, the only one with ``multi_pass``.
          gradient_cost: how many values of a loss a gradient costs; for
            ``max_evaluations``.
          max_evaluations: the most values of one record's loss, gradients included, that
            the run may take.

        Raises:
          ValueError: a constant out of range.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.O2NC.certified(
          ...     num_examples=100_000, dim=20, epsilon=8.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, initial_gap=1.0,
          ...     smoothing_radius=0.5,
          ... )
          >>> plan.theorem.promise.bound < 0.5, plan.goldstein_radius
          (True, 1.0)
        """
        return cls._certified(**given(locals()))

    @classmethod
    def from_theorem(
        cls,
        theorem: Literal["4.9", "E", "3.1", "6.1", "4.1", "4.1 first-order"],
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        initial_gap: float,
        smoothing_radius: float,
        num_directions: int | None = None,
    ) -> Self:
        """Returns the calibrated plan that a theorem prescribes, corrected.

        For study and comparison; :meth:`certified` is better.

        Args:
          theorem: of Zhang, Tran, Cutkosky ``"4.9"``, or ``"E"`` for the simple method of
            their appendix; of Kornowski, Liu, Talwar ``"3.1"``, ``"6.1"`` (first-order),
            ``"4.1"`` (several passes) or ``"4.1 first-order"``.
          num_examples: as in :meth:`certified`, like the next seven.
          dim: d.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: the papers replace a record; under the other relations one record moves
            a sum half as far. Only the exact noise depends on it.
          lipschitz: L.
          initial_gap: F at the start less its infimum.
          smoothing_radius: how far perturbations move a point.
          num_directions: m; None takes d, 64 points of the ball, or 1 for E.

        Raises:
          ValueError: an unknown theorem, a constant out of range, or so few records that
            the theorem has no whole window.
          TypeError: a constant of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.O2NC.from_theorem(
          ...     "3.1",
          ...     num_examples=100_000, dim=20, epsilon=8.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, initial_gap=1.0,
          ...     smoothing_radius=0.5,
          ... )
          >>> plan.theorem.name, plan.prefix_noise
          ('3.1', 'tree')
        """
        return cls._from_theorem(**given(locals()))

    @classmethod
    def _designed(cls, name: str, **constants: Any) -> Design:
        if name == "certified":
            return design.certified(**constants)
        return theorems.prescribed(name, **constants)

    @classmethod
    def _of(cls, design: Design, *, epsilon: float, delta: float) -> Self:
        names = {field.name for field in dataclasses.fields(cls)} & design.keys()
        plan = cls(
            sampling=_sampler(design),
            theorem=design,
            **{name: design[name] for name in names},
        )
        return plan.calibrate(epsilon=epsilon, delta=delta)

    @classmethod
    def recommend(
        cls,
        *,
        num_examples: int,
        dim: int,
        epsilon: float,
        delta: float,
        relation: Relation,
        lipschitz: float,
        initial_gap: float,
        smoothing_radius: float,
        gradient_cost: float | None = None,
        max_evaluations: float | None = None,
    ) -> recommendations.Recommendation:
        """Compares the certified plans of all oracles, and calibrates one as its ``plan``.

        Taken is the least proven bound; or, of those within 5% of it, what costs least. A
        bound is proven of the worst loss with these constants: it is not a forecast.

        Args:
          num_examples: as in :meth:`certified`, like the next seven.
          dim: d.
          epsilon: > 0; the budget.
          delta: in (0, 1).
          relation: which data sets are neighbours.
          lipschitz: L.
          initial_gap: F at the start less its infimum, a bound for the population and for
            the records' mean.
          smoothing_radius: how far perturbations move a point.
          gradient_cost: how many values of a record's loss its gradient costs; None where
            there are no gradients, and no first-order oracle is compared.
          max_evaluations: the most values of one record's loss, gradients included, that
            the run may take.

        Returns:
          The comparison; ``str`` of it is a table and the reason.

        Raises:
          ValueError: an argument out of range, or no oracle within ``max_evaluations``.
          TypeError: an argument of the wrong kind, missing or unknown.

        Example:
          >>> import jaxdp
          >>> found = jaxdp.plans.O2NC.recommend(
          ...     num_examples=100_000, dim=20, epsilon=8.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, initial_gap=1.0,
          ...     smoothing_radius=0.5,
          ... )
          >>> found.plan.oracle, len(found.candidates), bool(found.plan.epsilon() <= 8.0)
          ('zeroth_order', 4, True)
        """
        constants = given(locals())
        found = recommendations.recommend(**constants)
        plan = cls._of(found.design, epsilon=epsilon, delta=delta)
        return dataclasses.replace(found, plan=plan)

    def with_practical_clips(
        self, *, dim: int, lipschitz: float, fraction: float = 1.0
    ) -> Self:
        """Returns the same plan with clips that records of usual losses seldom reach.

        Those of :meth:`certified` are proven to leave every Lipschitz loss alone, and are
        several times longer than nearly all estimates. The noise follows the clips, so the
        guarantee stays; nothing is promised of the result. Where steps read samples of the
        records, what the noise costs depends on the ratio of the two clips: calibrate such
        a plan afterwards.

        Args:
          dim: d, parameters that move.
          lipschitz: L, of every record's loss.
          fraction: in (0, 1], of the clip of differences: 1 is reached by kinks alone.

        Raises:
          ValueError, TypeError: an argument out of range; noise in a plan whose steps
            read samples.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.O2NC.certified(
          ...     num_examples=100_000, dim=20, epsilon=8.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, initial_gap=1.0,
          ...     smoothing_radius=0.5,
          ... )
          >>> other = plan.with_practical_clips(dim=20, lipschitz=1.0)
          >>> other.restart_l2_clip_norm < plan.restart_l2_clip_norm, other.theorem
          (True, None)
        """
        validate.integer(dim=dim)
        validate.positive(lipschitz=lipschitz, fraction=fraction)
        if self.sampling.amplifies and self.noise_multiplier:
            raise ValueError(
                "noise_multiplier must be None or 0 where steps read samples, got "
                f"{self.noise_multiplier!r}: with other clips its cost is another; call "
                "calibrate afterwards"
            )
        if fraction > 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction!r}")
        movement = 2 * self.max_step / self.smoothing_radius
        restart, rest = estimators.Estimator.of(self).practical_clips(
            dim, movement, fraction
        )
        return dataclasses.replace(
            self,
            restart_l2_clip_norm=lipschitz * restart,
            l2_clip_norm=lipschitz * float(rest),
        )

    @property
    def goldstein_radius(self) -> float:
        """Radius of the Goldstein subdifferential that contains the window's gradients.

        The largest distance of a query from its window's mean, plus the smoothing radius.
        """
        reach = bounds.window_radius(self.window, self.reset) * self.max_step
        return float(reach) + self.smoothing_radius

    @property
    def num_windows(self) -> int:
        """Number of complete windows, all equally likely to be returned."""
        return self.num_steps // (self.window - self.skip_last_query)

    def transform(
        self,
        keys: Keys,
        *,
        trainable: run_state.Trainable = None,
        stacked: PathPredicate | None = None,
        microbatch_size: int | None = None,
        axis_name: AxisName | None = None,
        shardings: Any = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the oracle and the conversion: what ``optax.chain`` of the two does.

        The options are those of :func:`jaxdp.private_oracle`.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> sampling = jaxdp.sampling.SinglePassRestarts(period=2, restart_batch_size=4)
          >>> plan = jaxdp.plans.O2NC(
          ...     num_examples=20, num_steps=4, sampling=sampling, relation="replace_one",
          ...     restart_l2_clip_norm=1.0, l2_clip_norm=0.5, smoothing_radius=0.1,
          ...     max_step=0.01, window=2,
          ... ).with_noise(noise_multiplier=2.0)
          >>> tx = plan.transform(jaxdp.Keys.insecure(0))
          >>> tx.init(jnp.zeros(2)).driver.increment.shape
          (2,)
        """
        oracle = private_oracle(
            self,
            keys,
            trainable=trainable,
            stacked=stacked,
            microbatch_size=microbatch_size,
            axis_name=axis_name,
            shardings=shardings,
        )
        return driver.conversion(oracle, driver.o2nc(self, keys))

    def returned(self, state: Any, params: Any) -> Any:
        return driver.o2nc_output(state, params)

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
        moves = run_state.moving(params, trainable)
        rows = oracles.estimates(
            self.numbers, value_fn, params, records, key, moves, stacked
        )
        slopes = self.num_directions if self._oracle.slopes else 0
        bound, std = self.restart_l2_clip_norm, self.step_std("restart")
        return Contributions(rows, bound, std, slopes)

    def describe(self) -> Description:
        slopes = self.num_directions if self._oracle.slopes else 0
        by_phase = [np.full(p.num_steps, self.step_std(p.name)) for p in self.phases]
        stds = np.concatenate(by_phase) * self.correlation.increment_norms()
        if slopes:  # Of the coordinates of the gradient that is made of them.
            stds = stds / math.sqrt(slopes)
        kind = f", of {slopes} slope{'s' * (slopes > 1)} each"
        changes = "" if self.noise_period == 1 else " or its change"
        return Description(
            self._noise_in_words(kind if slopes else ""),
            "gradient, made of slopes" if slopes else f"gradient{changes}",
            np.resize(stds, self.num_steps),  # Repeats it.
            self.scale_with_movement,
            slopes,
        )

    def _noise_in_words(self, kind: str) -> str:
        """Describes the noise of means of records, of which ``kind`` says more."""
        if not self.multi_pass:
            batches = " or ".join(str(size) for _, size in self.clips.values())
            noise = noise_on_each(self, f"means of {batches} records{kind}")
            if (period := self.noise_period) == 1:
                return noise
            return f"{noise}, correlated over {period} steps ({self.prefix_noise})"
        restarts = -(-self.num_steps // self.sampling.period)
        size, std = self.clips["restart"][1], self.step_std("restart")
        noise = f"standard deviation {std:.4g} on each of {restarts} means of "
        noise += f"{size:.5g} records{kind}"
        if changes := self.num_steps - restarts:
            size, std = self.clips["difference"][1], self.step_std("difference")
            most = "at most " * self.scale_with_movement
            noise += f" and {most}{std:.4g} on each of {changes} means of "
            noise += f"{size:.5g} changes"
        return noise


def _sampler(design: Design) -> SinglePassRestarts | MultiPassRestarts:
    """Returns the sampler of a design."""
    if design.multi_pass:
        return MultiPassRestarts(period=design.period)
    return SinglePassRestarts(
        period=design.period,
        restart_batch_size=design.restart_batch_size,
        batch_size=design.batch_size,
    )
