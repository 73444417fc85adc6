"""What plans of one noised sum a step share: bound, grid, event, calibration."""

import dataclasses
import hashlib
import json
import math
import numbers
from typing import Any, ClassVar, Literal, Self, get_args

import optax

from jaxdp import _validate, accounting, sampling
from jaxdp._types import Phase, Relation
from jaxdp.kernels import clip
from jaxdp.keys import Keys
from jaxdp.plans import _events

_SAMPLERS = {kind.__name__: kind for kind in get_args(sampling.AnySampler)}
#: Those whose batches have one size.
_ONE_SIZE = tuple(
    kind for kind in _SAMPLERS.values() if kind is not sampling.SinglePassRestarts
)
_PLANS: dict[str, type["SumPlan"]] = {}

Vary = Literal["noise_multiplier", "num_steps"]


def check_clip(name: str, value: Any) -> None:
    """What the bound on one record's contribution may be."""
    _validate.positive(allow_inf=True, **{name: value})
    # Where float32 holds the clip, its grid and their inverses with room to spare.
    if not (1e-30 <= value <= 1e30 or math.isinf(value)):
        raise ValueError(
            f"{name} must be in [1e-30, 1e30], or infinity without noise, got {value!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumPlan:
    """Each step releases one bounded sum over the records of a batch, plus noise.

    Attributes:
      num_examples: n, records in the data set; public.
      num_steps: T, how many sums are released.
      sampling: which records a step reads.
      relation: which data sets are neighbours; no default.
      l2_clip_norm: C, bound on one record's contribution; infinity only without noise.
        (With Laplace noise it bounds the L1 norm, and so the L2 norm.)
      noise_multiplier: standard deviation of the noise on the released sum over
        ``sensitivity``; None until :meth:`calibrate` or :meth:`with_noise`.
      delta: what :meth:`calibrate` aimed at; used by reports.
    """

    num_examples: int
    num_steps: int
    sampling: sampling.AnySampler
    relation: Relation
    l2_clip_norm: float
    noise_multiplier: float | None = None
    delta: float | None = None

    family: ClassVar[str]
    #: Whether the releases of a step are few enough to be logged, so that the log alone
    #: rebuilds the parameters.
    replayable: ClassVar[bool] = False
    #: Whether it draws directions, so that leaves of layers may be declared.
    draws_directions: ClassVar[bool] = False
    #: Whether its transformation makes steps, which no optimizer may rescale.
    makes_steps: ClassVar[bool] = False
    #: Kinds of samplers that its accounting covers.
    samplers: ClassVar[tuple[type, ...]] = _ONE_SIZE
    #: Fields that hold several numbers, by name: how JSON gives them back.
    nested: ClassVar[dict[str, Any]] = {}

    @property
    def noise(self) -> _events.Noise:
        """The law of the noise: here, float32 Gaussians rounded to the grid."""
        return "gaussian"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "family" in vars(cls):  # Not for classes that others build on.
            _PLANS[cls.__name__] = cls

    def __post_init__(self) -> None:
        _validate.integer(num_examples=self.num_examples)
        _validate.instance(self.samplers, sampling=self.sampling)
        most = self.sampling.max_steps(self.num_examples)
        _validate.integer(num_steps=self.num_steps, at_most=most)
        _validate.one_of(accounting.RELATIONS, relation=self.relation)
        check_clip("l2_clip_norm", self.l2_clip_norm)
        if self.delta is not None:
            self._check_delta(self.delta)
        self._coerce()
        # Raises if noise, sampler and relation cannot be accounted together.
        self._guarantee_of(1.0, self.num_steps)
        if self.noise_multiplier is None:
            return
        _validate.non_negative(noise_multiplier=self.noise_multiplier)
        if self.noise_multiplier > 0:
            if math.isinf(self.l2_clip_norm):
                raise ValueError(
                    "l2_clip_norm must be finite when noise_multiplier > 0, got inf: "
                    "without a bound no noise is private"
                )
            accounting.self_check(self._guarantee)
        _ = self.grid_bits  # Raises if the sum cannot fit.

    def _check_delta(self, delta: float) -> None:
        if not (delta == 0 and self.noise == "laplace"):
            _validate.probability(delta=delta)

    def _coerce(self) -> None:
        """Makes plain numbers of NumPy's: equal plans have equal digests."""
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                whole = field.type in (int, int | None)
                number: Any = value
                plain = int(number) if whole else float(number)
                object.__setattr__(self, field.name, plain)

    # Bound and noise.

    @property
    def sensitivity(self) -> float:
        """How far one record moves the released sum, in the norm that is bounded."""
        return accounting.sensitivity(self.relation, self.l2_clip_norm)

    @property
    def normalizer(self) -> float:
        """The constant that sums are divided by: the expected batch size."""
        return self.sampling.expected_batch_size(self.num_examples)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on what updates the parameters."""
        noise = self._sum_noise
        return noise * self.sensitivity / self.normalizer if noise else 0.0

    @property
    def grid_bits(self) -> int | None:
        """k: sums are integers in units of 2**-k of the clip; None without a clip."""
        if math.isinf(self.l2_clip_norm):
            return None
        return clip.grid_bits(
            self.sampling.rows(self.num_examples),
            self._largest_noise * self._sensitivity_over_clip,
            exact_noise=self.noise != "gaussian",
            # Where either law has a mass below 1e-14.
            deviations=32 if self.noise == "laplace" else 8,
        )

    @property
    def grid_noise_std(self) -> int:
        """Standard deviation of the integer noise, rounded up."""
        if self.grid_bits is None:
            return 0
        over_clip = self._sum_noise * self._sensitivity_over_clip
        return math.ceil(over_clip * 2**self.grid_bits)

    @property
    def _sensitivity_over_clip(self) -> float:
        return accounting.sensitivity(self.relation, 1.0)

    @property
    def _noise(self) -> float:
        if self.noise_multiplier is None:
            raise ValueError(
                "the plan has no noise_multiplier yet: call "
                ".calibrate(epsilon=..., delta=...) or .with_noise(noise_multiplier=...)"
            )
        return self.noise_multiplier

    @property
    def _sum_noise(self) -> float:
        """The noise multiplier of the sum; more than what a whole step is charged for."""
        return self._noise

    @property
    def _largest_noise(self) -> float:
        """The largest noise multiplier of all that a step releases."""
        return self._sum_noise

    # Accounting.

    @property
    def _guarantee(self) -> accounting.Guarantee:
        return self._guarantee_of(self._noise, self.num_steps)

    def _guarantee_of(
        self, noise_multiplier: float, steps: int
    ) -> accounting.Guarantee:
        return _events.guarantee(
            self.noise,
            self.sampling,
            self.relation,
            num_examples=self.num_examples,
            num_steps=steps,
            noise_multiplier=noise_multiplier,
        )

    @property
    def event(self) -> Any:
        """The dp-accounting event of all releases together."""
        return self._guarantee.event

    @property
    def event_relation(self) -> Any:
        """The dp-accounting relation under which :attr:`event` is to be composed."""
        return self._guarantee.event_relation

    def epsilon(self, *, delta: float | None = None) -> accounting.Epsilon:
        """The epsilon of the whole run at ``delta`` (default: the calibrated one).

        A float that also names the accountant which computed it. Infinite without noise.
        """
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ValueError("delta must be a number in (0, 1); the plan has none")
        self._check_delta(delta)
        return accounting.epsilon(*self._guarantee, delta)

    def calibrate(
        self, *, epsilon: float, delta: float, vary: Vary = "noise_multiplier"
    ) -> Self:
        """A plan of at most (epsilon, delta): least noise, or with it most steps.

        Args:
          epsilon: > 0.
          delta: in (0, 1); with Laplace noise also 0.
          vary: ``"noise_multiplier"``, or ``"num_steps"`` for a plan that has noise.
        """
        _validate.positive(epsilon=epsilon)
        self._check_delta(delta)
        _validate.one_of(("noise_multiplier", "num_steps"), vary=vary)
        if vary == "num_steps":
            steps = accounting.calibrate_num_steps(
                lambda t: self._guarantee_of(self._noise, t),
                epsilon,
                delta,
                max_steps=min(self.sampling.max_steps(self.num_examples), 1_000_000),
            )
            return dataclasses.replace(self, num_steps=steps, delta=delta)
        if math.isinf(self.l2_clip_norm):
            raise ValueError("l2_clip_norm must be finite to calibrate noise, got inf")
        noise = accounting.calibrate_noise_multiplier(
            lambda m: self._guarantee_of(m, self.num_steps), epsilon, delta
        )
        return dataclasses.replace(self, noise_multiplier=noise, delta=delta)

    def with_noise(
        self, *, noise_multiplier: float, delta: float | None = None
    ) -> Self:
        """The same plan with this noise; 0 is the non-private limit."""
        delta = self.delta if delta is None else delta
        return dataclasses.replace(self, noise_multiplier=noise_multiplier, delta=delta)

    # Structure.

    @property
    def phases(self) -> tuple[Phase, ...]:
        size = self.sampling.rows(self.num_examples)
        return (Phase("step", 1, size),)

    def transform(
        self, keys: Keys, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        """The gradient maker that runs under this plan."""
        raise NotImplementedError

    def returned(self, state: Any, params: Any) -> Any:
        """What a run returns, from its transformation's state and the last iterate."""
        return params

    def replay(
        self, direction: Any, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        """The gradient maker of a run whose releases are known; it reads no data.

        Args:
          direction: the run's direction root, a typed key, shape=(); public.
          **kwargs: ``trainable`` and ``stacked``, as in the run.

        Raises:
          ValueError: the plan is not ``replayable``.
        """
        raise ValueError(
            f"plan must be one of slopes to be replayed, got {type(self).__name__}, whose "
            "releases are as large as the parameters and are not logged"
        )

    # Text.

    def to_json(self) -> str:
        """The plan as JSON; :func:`jaxdp.plans.from_json` reads it back."""
        fields: dict[str, Any] = {"plan": type(self).__name__}
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, float) and math.isinf(value):
                value = "inf"  # Strict JSON has no infinity.
            if field.name == "sampling":
                chosen = dataclasses.asdict(self.sampling)
                value = {"sampler": type(self.sampling).__name__, **chosen}
            elif field.name in self.nested and value is not None:
                part: Any = value
                value = dataclasses.asdict(part)
            fields[field.name] = value
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what :meth:`to_json` wrote.

        Raises:
          ValueError: not such a text, or a plan of another class.
        """
        plan = from_json(text)
        if not isinstance(plan, cls):
            raise ValueError(
                f"text must hold a {cls.__name__}, got a {type(plan).__name__}"
            )
        return plan

    @property
    def digest(self) -> str:
        """SHA-256 of the plan's numbers, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) of every number of the plan, for tables."""
        out = [("plan", type(self).__name__)]
        out += [(f.name, f"{getattr(self, f.name)}") for f in dataclasses.fields(self)]
        if self.noise_multiplier is not None:
            out.append(("sensitivity", f"{self.sensitivity:.6g}"))
            out.append(("noise_std", f"{self.noise_std:.6g}"))
            if self.delta is not None:
                spent = self.epsilon()
                out.append(("epsilon", f"{spent:.6g} ({spent.accountant})"))
        return out

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows())


def from_json(text: str) -> SumPlan:
    """The plan that ``to_json`` wrote.

    Raises:
      ValueError: not JSON of a plan, an unknown plan or sampler, or fields that are
        missing, unknown or out of range.
    """
    try:
        fields = json.loads(text)
        kind, chosen = fields.pop("plan"), fields.pop("sampling")
        sampler = _SAMPLERS[chosen.pop("sampler")](**chosen)
        for name, make in _PLANS[kind].nested.items():
            if fields.get(name) is not None:
                fields[name] = make(**fields[name])
        fields |= {name: math.inf for name, v in fields.items() if v == "inf"}
        return _PLANS[kind](sampling=sampler, **fields)
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"text must be the JSON of a plan ({', '.join(sorted(_PLANS))}): {error!r}"
        ) from error
