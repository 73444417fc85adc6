"""Base class of all plans: guarantee, phases, JSON and tables."""

import dataclasses
import hashlib
import inspect
import json
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import optax

from jaxdp import accounting, sampling
from jaxdp.core import display, validate
from jaxdp.core.algorithm import Algorithm
from jaxdp.core.keys import Keys
from jaxdp.core.run_state import Trainable
from jaxdp.core.types import PathPredicate, Perturbation, Phase, Relation, Run
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.mechanism.design import Design, coerce, noise_cost
from jaxdp.mechanism.kept import kept
from jaxdp.mechanism.laws import LAWS, Noise
from jaxdp.sampling import samplers

_PLANS: dict[str, type["Plan"]] = {}
#: Above it, nothing is left to protect and searches overflow.
_MOST_EPSILON = 1e12
#: Number of the format of plan files; texts without a number are of the first.
FORMAT = 1


class Description(NamedTuple):
    """Noise and releases of a run, for tables and plots.

    Attributes:
      noise: its size, and the quantities that it is added to, in words.
      released: what a step releases, in words.
      stds: standard deviation of the noise on a released number, of all steps or float64
        (num_steps,).
      at_most: whether the noise of a step may be smaller than ``stds``.
      slopes: how many numbers a released gradient is made of, each times a direction of
        length sqrt(d); 0 for one that is released itself.
    """

    noise: str
    released: str = "gradient"
    stds: float | np.ndarray = 0.0
    at_most: bool = False
    slopes: int = 0


class Contributions(NamedTuple):
    """Contributions of records to a step: neither bounded nor private.

    Attributes:
      rows: float32 (B, m), one row a record.
      l2_clip_norm: bound on a row's norm.
      noise_std: standard deviation of the noise on each of the m means.
      slopes: how many slopes along directions a gradient is the mean of; 0 of rows that
        are gradients themselves.
    """

    rows: Any
    l2_clip_norm: float
    noise_std: float
    slopes: int = 0


class Plan:
    """Frozen numbers that couple sampling, bound, randomness and accounting.

    A subclass is a frozen dataclass; its fields are the plan.
    """

    num_examples: int
    num_steps: int  # how many releases there are
    sampling: sampling.AnySampler  # which records a step reads
    relation: Relation
    delta: float | None
    noise: Noise = "discrete"  # law of the noise
    share_directions: bool = True  # between the records of a batch

    family: ClassVar[str]
    #: Kind of numbers that a run releases, by which ``jaxdp.auditing`` attacks it.
    released: ClassVar[str] = ""
    #: Function of (numbers, direction root) that gives the transformation which replays a
    #: run, where the releases of a step are few enough to be logged; else None.
    _replayed: ClassVar[Callable[..., Any] | None] = None
    #: Function of dim that gives the perturbation, where it is not along a direction.
    _perturbed: ClassVar[Callable[..., Perturbation] | None] = None
    #: Properties that a table shows last.
    extras: ClassVar[tuple[str, ...]] = ()
    #: Why the log of another plan does not rebuild them: what its releases are.
    unlogged: ClassVar[str] = "are as large as the parameters and are not logged"
    #: Whether it draws directions, so that leaves of layers may be declared.
    draws_directions: ClassVar[bool] = False
    #: Whether it sums vectors as long as the parameters, which stay where those are.
    sums_vectors: ClassVar[bool] = False
    #: Whether its steps are slopes of two signs, which two devices may share.
    shares_signs: ClassVar[bool] = False
    #: Whether it makes steps itself, which no optimizer may rescale.
    makes_steps: ClassVar[bool] = False
    #: Whether an ``Algorithm`` runs it, not a transformation of gradients.
    runs_algorithm: ClassVar[bool] = False
    #: Constructor of that algorithm, of a plan and keys; and the numbers that it reads, a
    #: NamedTuple of the plan's attributes.
    runs: ClassVar[Any] = None
    numbers_read: ClassVar[Any] = None
    #: Whether it differentiates records, which may be done in parts.
    differentiates: ClassVar[bool] = True
    #: Whether a step may cost more than a later one, so that none takes its place.
    charges_fall: ClassVar[bool] = False
    #: Whether a run may end before its last step.
    may_stop: ClassVar[bool] = False
    #: Whether bounded updates come from elsewhere, which it does not compute itself.
    takes_updates: ClassVar[bool] = False
    #: Fields that hold several numbers, by name: how JSON gives them back.
    nested: ClassVar[dict[str, Any]] = {}
    #: The field that calibration chooses.
    calibrated: ClassVar[str] = "noise_multiplier"
    #: Promise of a design that every point fulfils: its name, and its size, a function of
    #: the design's constants.
    trivial: ClassVar[tuple[str, Callable[[Any], float]] | None] = None
    #: Method that some plans have: the entries of a run's report, from its state.
    _outcome: ClassVar[Any] = None
    #: Relative tolerance of fields that a design may choose up to rounding, by name.
    tolerances: ClassVar[dict[str, float]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # In the class itself, where the decorator of dataclasses leaves it alone.
        cls.__repr__ = display.as_text
        if "family" in vars(cls):  # Not for classes that others build on.
            _PLANS[cls.__name__] = cls

    @classmethod
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        subclass: Any = cls  # Every subclass is a dataclass.
        return dataclasses.fields(subclass)

    def _check_delta(self, delta: float) -> None:
        if delta != 0 or not LAWS[self.noise].exact:
            validate.probability(delta=delta)

    def _check_budget(self, epsilon: float, delta: float) -> None:
        """Checks a budget; warns of one that makes no sense for the records."""
        validate.positive(epsilon=epsilon)
        if epsilon > _MOST_EPSILON:
            raise ValueError(
                f"epsilon must be at most {_MOST_EPSILON:g}, got {epsilon!r}"
            )
        self._check_delta(delta)
        accounting.warn_of_budget(epsilon, delta, self.num_examples, stacklevel=3)

    def _coerce(self) -> None:
        """Converts NumPy numbers to Python's, so that equal plans have equal digests."""
        coerce(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields alone, for copies and pickles.

        What was computed from them stays behind: another version of this library may
        compute other noise, and would account for that.
        """
        return {field.name: getattr(self, field.name) for field in self._fields()}

    # Accounting.

    @property
    def _guarantee(self) -> accounting.Guarantee:
        raise NotImplementedError

    @property
    def event(self) -> Any:
        """The dp-accounting event of all releases together."""
        return self._guarantee.event

    @property
    def event_relation(self) -> Any:
        """The dp-accounting relation under which :attr:`event` is to be composed."""
        return self._guarantee.event_relation

    def epsilon(self, *, delta: float | None = None) -> accounting.Epsilon:
        """Returns the epsilon of the whole run at ``delta`` (default: the calibrated one).

        The float also names the accountant that computed it. It is infinite without noise.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=1437, num_steps=1000, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).calibrate(epsilon=2.0, delta=1e-5)
          >>> spent = plan.epsilon(delta=1e-6)
          >>> bool(spent > 2.0), spent.accountant
          (True, 'Gaussian closed form')
        """
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ValueError("delta must be a number in (0, 1); the plan has none")
        self._check_delta(delta)
        return accounting.epsilon(*self._guarantee, delta)

    def spent(self, num_steps: int) -> accounting.Epsilon:
        """Returns the epsilon of the first ``num_steps`` steps of a run, at its delta.

        Privacy:
          The number of steps must be fixed before the run. A run that is stopped by its own
          releases has spent the epsilon of the whole plan, which is what
          :func:`jaxdp.report` states.

        Raises:
          ValueError: no steps, or more than the plan has: a run has no others, and a loop
            that goes on releases nothing. A longer run has another plan.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=1437, num_steps=1000, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).calibrate(epsilon=2.0, delta=1e-5)
          >>> bool(plan.spent(500) < plan.spent(1000)), float(round(plan.spent(1000), 2))
          (True, 2.0)
        """
        validate.integer(at_most=self.num_steps, num_steps=num_steps)
        return self._spent(num_steps)

    def _spent(self, num_steps: int) -> accounting.Epsilon:
        """Returns the epsilon of the first steps, whose number was checked."""
        raise NotImplementedError

    # Designs.

    @classmethod
    def _designed(cls, name: str, **constants: Any) -> Design:
        """Returns the design of a theorem, or ``"certified"``, for a problem."""
        raise NotImplementedError

    @classmethod
    def _certified(cls, **constants: Any) -> Self:
        """Returns the plan of the design ``"certified"``; warns if it promises nothing."""
        plan: Any = cls._from_theorem("certified", **constants)
        if cls.trivial is not None and plan.theorem is not None:
            name, size = cls.trivial
            promised, most = getattr(plan.theorem.promise, name), size(constants)
            if promised > 0.9 * most:
                warnings.warn(
                    f"the promise says next to nothing: {name} {promised:.3g}, where every "
                    f"point has at most {most:.3g}, the start too. Better constants, from "
                    "public records, more records or a larger epsilon are needed",
                    stacklevel=3,  # Where certified was called.
                )
        return plan

    @classmethod
    def _from_theorem(
        cls, theorem: str, *, epsilon: float, delta: float, **constants: Any
    ) -> Self:
        """Returns the calibrated plan of a design."""
        found = cls._designed(theorem, epsilon=epsilon, delta=delta, **constants)
        plan: Any = cls._of(found, epsilon=epsilon, delta=delta)
        cost = 1.0 if plan.theorem is not None else noise_cost(plan)
        if cost <= 1:
            return plan
        # Its noise is more than the design's: design for the noise that it has.
        mu = accounting.gaussian_mu(epsilon, delta) / (1.001 * cost)
        less = accounting.gaussian_epsilon(mu, delta)
        found = cls._designed(theorem, epsilon=less, delta=delta, **constants)
        return cls._of(found, epsilon=epsilon, delta=delta)

    @classmethod
    def _of(cls, design: Design, *, epsilon: float, delta: float) -> Self:
        """Builds the plan of a design, calibrated to a budget."""
        raise NotImplementedError

    def _fulfils(self, design: Design) -> bool:
        """Returns True if sampler and noise are no worse than the design's."""
        raise NotImplementedError

    def _drop_design(self) -> None:
        """Removes a design that does not describe this plan any more."""
        design: Design | None = getattr(self, "theorem", None)
        if design is None:
            return
        names = {field.name for field in self._fields()} & design.keys()
        same = all(self._matches(name, design[name]) for name in names)
        if not (same and self._fulfils(design)):
            object.__setattr__(self, "theorem", None)

    def _matches(self, name: str, promised: Any) -> bool:
        value = getattr(self, name)
        if name not in self.tolerances or value is None:
            return value == promised or name in self.tolerances
        return math.isclose(value, promised, rel_tol=self.tolerances[name])

    # Structure.

    @property
    def evaluates_batches(self) -> bool:
        """True if losses of a whole batch are evaluated in one call.

        A loss could then let one record reach another's, which ``fit`` checks.
        """
        return self.draws_directions and self.share_directions

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of a period, by the shape of their batches."""
        return self.sampling.phases_of(self.num_examples)

    @kept
    def run(self) -> Run:
        """Frozen numbers that the loop, samplers and every method read."""
        return Run(*(getattr(self, name) for name in Run._fields))

    @kept
    def numbers(self) -> Any:
        """Frozen numbers that the transformation or algorithm reads."""
        read = self.numbers_read
        return read(**{name: getattr(self, name) for name in read._fields})

    @property
    def replayable(self) -> bool:
        """True if a run's log alone rebuilds the parameters."""
        return self._replayed is not None

    def transform(self, keys: Keys) -> optax.GradientTransformationExtraArgs:
        """Builds the gradient transformation that runs under this plan.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> tx = plan.transform(jaxdp.Keys.insecure(0))
          >>> int(tx.init(jnp.zeros(2)).count)
          0
        """
        raise NotImplementedError

    def algorithm(
        self,
        keys: Keys,
        *,
        microbatch_size: int | None = None,
        axis_name: AxisName | None = None,
    ) -> Algorithm:
        """Builds the algorithm that runs under this plan, if it ``runs_algorithm``.

        Args:
          keys: a ``jaxdp.Keys``.
          microbatch_size: records evaluated at once; None is all. To be None for ``MWEM``
            and ``SyntheticData``, which count records.
          axis_name: mesh axis, or several, whose devices share the records of a batch, as
            in :func:`jaxdp.dpzero`. To be None for ``MWEM`` and ``SyntheticData``.

        Raises:
          ValueError: an option that the algorithm does not have.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.SOSP.certified(
          ...     num_examples=200_000, dim=10, epsilon=2.0, delta=1e-6,
          ...     relation="replace_one", lipschitz=1.0, smoothness=1.0,
          ...     hessian_lipschitz=1.0, accuracy=0.1,
          ... )
          >>> algorithm = plan.algorithm(jaxdp.Keys.insecure(0))
          >>> algorithm._fields
          ('init', 'step', 'output')
        """
        if not self.runs_algorithm:
            raise NotImplementedError
        make, options = type(self).runs, {}
        known = inspect.signature(make).parameters
        given = {"microbatch_size": microbatch_size, "axis_name": axis_name}
        for name, value in given.items():
            if name in known:
                options[name] = value
            elif value is not None:
                raise ValueError(
                    f"{name} must be None for {type(self).__name__}, got {value!r}"
                )
        return make(self, keys, **options)

    def returned(self, state: Any, params: Any) -> Any:
        """Returns the result of a run, given its state and the last iterate.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> state = plan.transform(jaxdp.Keys.insecure(0)).init(jnp.zeros(2))
          >>> plan.returned(state, jnp.ones(2)).tolist()
          [1.0, 1.0]
        """
        raise NotImplementedError

    def shown(self, state: Any, params: Any) -> Any:
        """Returns the public value that a callback is shown during a run.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> state = plan.transform(jaxdp.Keys.insecure(0)).init(jnp.zeros(2))
          >>> plan.shown(state, jnp.ones(2)).tolist()
          [1.0, 1.0]
        """
        return self.returned(state, params) if self.runs_algorithm else params

    def outcome(self, state: Any) -> dict[str, Any]:
        """Returns the entries of a report on a run, given its state; all are public.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> state = plan.transform(jaxdp.Keys.insecure(0)).init(jnp.zeros(2))
          >>> plan.outcome(state)
          {}
        """
        return {} if self._outcome is None else self._outcome(state)

    def mechanism(self) -> dict[str, Any]:
        """Returns clip and randomness of a step, for reports.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> plan.mechanism()
          {'l2_clip_norm': 1.0, 'noise_multiplier': 2.0, 'noise_std': 0.5}
        """
        raise NotImplementedError

    def describe(self) -> Description:
        """Returns a description of noise and releases, for tables and plots.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> plan.describe().released
          'gradient'
        """
        raise NotImplementedError

    def contributions(
        self,
        value_fn: Any,
        params: Any,
        records: Any,
        key: Any,
        *,
        trainable: Any = None,
        stacked: Any = None,
    ) -> Contributions:
        """Computes what records contribute to a run's first step, for a diagnosis.

        Args:
          value_fn: per-record losses.
          params: where a run starts.
          records: pytree with leading axis B.
          key: of the directions, a typed key.
          trainable: which leaves move.
          stacked: leaves whose first axis counts layers.

        Raises:
          ValueError: the plan's steps release no sums over records.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPGD(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0,
          ... ).with_noise(noise_multiplier=2.0)
          >>> value_fn = lambda w, x: (x * w).sum(axis=-1)
          >>> found = plan.contributions(
          ...     value_fn, jnp.zeros(2), jnp.ones((4, 2)), jax.random.key(0)
          ... )
          >>> found.rows.shape, found.l2_clip_norm
          ((4, 2), 1.0)
        """
        raise ValueError(
            "plan must be one whose steps release sums of slopes or gradients, got "
            f"{type(self).__name__}"
        )

    def perturbation(self, dim: int) -> Perturbation:
        """Returns size and kind of the parameter perturbation; radius 0 means none.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> plan.perturbation(dim=10).smoothing_radius
          0.001
        """
        if self._perturbed is not None:
            return self._perturbed(dim)
        # 0 of plans whose radius is the distance of the points.
        return Perturbation(getattr(self, "smoothing_radius", 0.0))

    def replay(
        self,
        direction: Any,
        *,
        trainable: Trainable = None,
        stacked: PathPredicate | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the transformation that replays known releases; it reads no data.

        Args:
          direction: the run's direction root, a typed key, shape=(); public.
          trainable: which leaves moved, as in the run.
          stacked: which leaves have layers in front, as in the run.

        Raises:
          ValueError: the plan is not ``replayable``.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> keys = jaxdp.Keys.insecure(0)
          >>> tx = plan.replay(keys.direction)
          >>> params = jnp.zeros(2)
          >>> updates, _ = tx.update(None, tx.init(params), params, release=jnp.ones(1))
          >>> updates.shape
          (2,)
        """
        replayed = type(self)._replayed
        if replayed is not None:
            return replayed(
                self.numbers, direction, trainable=trainable, stacked=stacked
            )
        raise ValueError(
            f"plan must be one of slopes to be replayed, got {type(self).__name__}, whose "
            f"releases {self.unlogged}"
        )

    # Text.

    def to_json(self) -> str:
        """Returns the plan as JSON, which :func:`jaxdp.plans.from_json` reads back.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> print(plan.to_json()[:60])
          {
            "plan": "DPZero",
            "num_examples": 8,
            "num_steps": 3,
        """
        fields: dict[str, Any] = {"plan": type(self).__name__}
        for field in self._fields():
            if field.metadata.get("omit_none") and getattr(self, field.name) is None:
                continue
            value: Any = getattr(self, field.name)
            if field.name == "sampling":
                value = samplers.as_dict(value)
            elif field.name in self.nested and value is not None:
                design = isinstance(value, Design)
                value = value.as_dict() if design else dataclasses.asdict(value)
            fields[field.name] = _written(value)
        return json.dumps(fields, indent=2, allow_nan=False)

    def file_text(self) -> str:
        """Returns the text of a plan file: :meth:`to_json` and the number of its format.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> jaxdp.plans.from_json(plan.file_text()) == plan
          True
        """
        return json.dumps({"format": FORMAT, **json.loads(self.to_json())}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a plan from the JSON that :meth:`to_json` wrote.

        Raises:
          ValueError: not such a text, or a plan of another class.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> jaxdp.plans.DPZero.from_json(plan.to_json()) == plan
          True
        """
        plan = from_json(text)
        if not isinstance(plan, cls):
            raise ValueError(
                f"text must hold a {cls.__name__}, got a {type(plan).__name__}"
            )
        return plan

    @kept
    def digest(self) -> str:
        """SHA-256 of the plan's numbers, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def rows(self) -> list[tuple[str, str]]:
        """Returns (name, value) of every number of the plan, for tables.

        Example:
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0)
          >>> plan.rows()[:3]
          [('plan', 'DPZero'), ('num_examples', '8'), ('num_steps', '3')]
        """
        out = [("plan", type(self).__name__)]
        out += [(f.name, f"{getattr(self, f.name)}") for f in self._fields()]
        derived = self._derived()
        out += [(name, f"{value:.6g}") for name, value in derived]
        if derived and self.delta is not None:
            spent = self.epsilon()
            out.append(("epsilon", f"{spent:.6g} ({spent.accountant})"))
        return out + [(name, f"{getattr(self, name):.6g}") for name in self.extras]

    def _derived(self) -> list[tuple[str, float]]:
        """Returns names and values of what follows from the noise; none without it."""
        raise NotImplementedError

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows())

    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        rows = [(n, x) for n, x in self.rows() if n not in ("plan", "epsilon")]
        return display.Table(f"{type(self).__name__}: {self._promised()}", rows)

    def _promised(self) -> str:
        """Returns the guarantee in one line, or what is missing for one."""
        if getattr(self, self.calibrated) is None:
            return (
                "no noise yet, so no guarantee; "
                "plan.calibrate(epsilon=..., delta=...) chooses it"
            )
        if self.delta is None:
            return (
                f"no delta yet, {self.relation}; plan.epsilon(delta=...) says epsilon"
            )
        spent = self.epsilon()
        if math.isinf(spent):
            return "not private, epsilon is infinite"
        return (
            f"epsilon {spent:.6g} at delta {self.delta:g}, {self.relation} "
            f"({spent.accountant})"
        )


def _written(value: Any) -> Any:
    """Replaces infinity, which JSON lacks, by a string."""
    if isinstance(value, dict):
        return {name: _written(part) for name, part in value.items()}
    return "inf" if value == math.inf else value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _read(part) for name, part in value.items()}
    return math.inf if value == "inf" else value


def from_json(text: str) -> Plan:
    """Reads a plan from the JSON that ``to_json`` wrote.

    Raises:
      ValueError: not JSON of a plan, an unknown plan or sampler, fields that are
        missing, unknown or out of range, or a format that is newer than this library's.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> jaxdp.plans.from_json(plan.to_json()) == plan
      True
    """
    wrong = (json.JSONDecodeError, AttributeError, KeyError, ArithmeticError, TypeError)
    try:
        fields = json.loads(text)
        version = fields.pop("format", FORMAT)
        if type(version) is not int or not 1 <= version <= FORMAT:
            raise ValueError(
                f"format must be an integer from 1 to {FORMAT}, got {version!r}: the plan "
                "was written by a newer version of jaxdp"
            )
        kind = _PLANS[fields.pop("plan")]
        if "sampling" in fields:
            fields["sampling"] = samplers.from_dict(fields["sampling"])
        fields = {name: _read(value) for name, value in fields.items()}
        for name, make in kind.nested.items():
            if fields.get(name) is not None:
                fields[name] = make(**fields[name])
        return kind(**fields)
    except wrong as error:
        raise ValueError(
            f"text must be the JSON of a plan ({', '.join(sorted(_PLANS))}): {error!r}"
        ) from error
