"""What the numbers of DPZero bring: directions, clips, radii, schedules, averages.

Digits, a linear softmax model (650 parameters) or a network of one hidden layer (2410),
epsilon 2, delta = 1e-5, replace-one, full batches. All configurations have the same budget
and the same number of slopes of each record, directions times steps, so the same forward
passes; one number is changed at a time. Clip and step size of each are chosen from the same
grid by two runs on a validation split of the training records, without noise for the
choice: that is what epsilon does not contain. Accuracies are on 360 held-out records: means
over seeds with the 95% interval of Student's t. *More than K = 4* is the difference to that
row of the same model, with Welch's interval.

A schedule is two runs, one after the other, each with half of the slopes. Both have the
noise multiplier of one run with as many steps, and cost together what that run costs.

Directions of another law are lifted: v is of the library's sphere, and A v is tried on the
parameters, with a public linear map A whose mean A A^T is the identity. A depends on the
step, on public randomness and on what the first half released: slopes are those of the loss
of v, bounded and noised like any other, and the rest is post-processing.

"without the clip's error" is a run whose clip never binds and whose noise is that of the
clip chosen beside it. It is not private: it shows what clipping costs.

*Records clipped* is the share at the start, of held-out records.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from jax.flatten_util import ravel_pytree

import jaxdp
from bench import _harness
from jaxdp import accounting, models, plans, sampling
from jaxdp.core.averaging import polyak_output
from jaxdp.models import networks

EPSILON, DELTA, SLOPES = 2.0, 1e-5, 2048
DIRECTIONS = (4, 1, 16, 64, 256)
#: Of the vector of K slopes, over the root of K.
CLIPS = (0.5, 1.5)
#: Of K = 4; of others times the root of K / 4, for they take fewer steps.
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
SEEDS = 20
#: Parts of a stage of whose released gradients the sums are kept, and the shape of the
#: linear model's parameters, flat: the biases, then a row of each pixel.
PARTS, SHAPE = 8, (65, 10)
METRIC, MORE, CLIPPED = "test accuracy", "more than K = 4", "records clipped"
NETWORKS = {
    "linear": lambda: networks.linear(64, 10),
    "network": lambda: networks.mlp(64, 10, hidden=(32,)),
}


class Lift(NamedTuple):
    """A map A of variables of ``dim`` numbers to the linear model's parameters, flat.

    ``fn(v, step, released)``; ``released`` float32 (PARTS, 650), the sums of the first
    stage's released gradients: over the earliest eighth of its steps, and so on.
    """

    dim: int
    fn: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _block(v: jax.Array, step: jax.Array, released: jax.Array) -> jax.Array:
    """The parameters of one class, the classes in turn."""
    classes = SHAPE[1]
    column = jnp.zeros(SHAPE).at[:, step % classes].set(v)
    return math.sqrt(classes) * column.ravel()


def _low_rank(every: int, rank: int = 4) -> Lift:
    """Matrices U V, with U public and random, the same for some steps (LOZO's)."""
    rows, classes = SHAPE

    def fn(v: jax.Array, step: jax.Array, released: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(1), step // every)
        left = jax.random.normal(key, (rows, rank)) / math.sqrt(rank)
        return (left @ v.reshape(rank, classes)).ravel()

    return Lift(rank * classes, fn)


def _scaled(axis: int | tuple[int, ...]) -> Lift:
    """Diagonal: root of the released mean square over axes of (part, row, class)."""

    def fn(v: jax.Array, step: jax.Array, released: jax.Array) -> jax.Array:
        square = (released.reshape(-1, *SHAPE) ** 2).mean(axis, keepdims=True)[0]
        return (v.reshape(SHAPE) * jnp.sqrt(square / square.mean())).ravel()

    return Lift(math.prod(SHAPE), fn)


def _spanned(v: jax.Array, step: jax.Array, released: jax.Array) -> jax.Array:
    """Half of the variance in the span of what was released (guided evolution's)."""
    dim = math.prod(SHAPE)
    basis = jnp.linalg.qr(released.T)[0]
    return math.sqrt(0.5) * (v[:dim] + math.sqrt(dim / PARTS) * basis @ v[dim:])


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration; all but what is named are the same."""

    network: str = "linear"
    num_directions: int = 4
    direction: str = "sphere"
    smoothing_radius: float = 1e-3
    quantile: float | None = None  # that the clip follows
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd
    decay: bool = False  # of the step size, to zero
    average: float = 0.25  # share of the last iterates whose mean is judged
    unclipped: bool = False
    lift: Lift | None = None
    #: What differs in each of the stages, which share the slopes equally.
    stages: tuple[Mapping[str, Any], ...] = ({},)

    def staged(
        self, num_examples: int, clip: float
    ) -> "list[tuple[Config, plans.DPZero]]":
        """The stages and their plans at a clip, all of the noise of one run."""
        each = [dataclasses.replace(self, stages=({},), **own) for own in self.stages]
        steps = [SLOPES // len(each) // one.num_directions for one in each]
        noise: Any = each[0].plan(num_examples, clip, sum(steps)).noise_multiplier
        return [
            (
                one,
                dataclasses.replace(
                    one.plan(num_examples, clip, num), noise_multiplier=noise
                ),
            )
            for one, num in zip(each, steps, strict=True)
        ]

    def variables(self, params: jax.Array) -> jax.Array:
        """What the directions are of: zeros, of as many numbers as there are variables."""
        return jnp.zeros(self.lift.dim) if self.lift else jnp.zeros_like(params)

    def lifted(self, v: jax.Array, step: jax.Array, released: jax.Array) -> jax.Array:
        """Maps variables to the parameters."""
        return self.lift.fn(v, step, released) if self.lift else v

    def plan(self, num_examples: int, clip: float, num_steps: int) -> plans.DPZero:
        """A plan at a clip, calibrated."""
        num = self.num_directions
        plan = plans.DPZero(
            num_examples=num_examples,
            num_steps=num_steps,
            sampling=sampling.FullBatch(),
            relation="replace_one",
            l2_clip_norm=clip * math.sqrt(num),
            smoothing_radius=self.smoothing_radius,
            num_directions=num,
            direction=self.direction,  # pyright: ignore[reportArgumentType]
        ).calibrate(epsilon=EPSILON, delta=DELTA)
        noise: Any = plan.noise_multiplier
        if self.quantile is not None:
            tuning = plans.ClipTuning(
                target_unclipped_quantile=self.quantile,
                learning_rate=min(20 / plan.num_steps, 0.5),
                count_noise_multiplier=3 * noise,
            )
            plan = dataclasses.replace(plan, clip_tuning=tuning)
        if self.unclipped:
            far = 100.0
            plan = dataclasses.replace(
                plan,
                l2_clip_norm=far * plan.l2_clip_norm,
                noise_multiplier=noise / far,
            )
        return plan


CONFIGS: dict[str, Config] = {
    **{f"K = {k}": Config(num_directions=k) for k in DIRECTIONS},
    **{
        f"network, K = {k}": Config("network", num_directions=k)
        for k in (4, 1, 64, 256)
    },
    **{
        f"K = {k}, without the clip's error": Config(num_directions=k, unclipped=True)
        for k in (1, 4, 64, 256)
    },
    "orthonormal": Config(direction="orthonormal"),
    "orthonormal, K = 64": Config(direction="orthonormal", num_directions=64),
    "signs": Config(direction="rademacher"),
    "normals": Config(direction="gaussian"),
    "one class at a time": Config(lift=Lift(SHAPE[0], _block)),
    **{f"rank 4, new every {n} steps": Config(lift=_low_rank(n)) for n in (32, 256)},
    **{
        f"second half: {name}": Config(stages=({}, {"lift": lift}))
        for name, lift in {
            "scaled by coordinate": _scaled(0),
            "scaled by pixel": _scaled((0, 2)),
            "half in the released span": Lift(math.prod(SHAPE) + PARTS, _spanned),
        }.items()
    },
    **{
        f"K = {a}, then {b}": Config(
            stages=({"num_directions": a}, {"num_directions": b})
        )
        for a, b in ((4, 64), (64, 4))
    },
    "radius 0.1, then 0.001": Config(stages=({"smoothing_radius": 0.1}, {})),
    **{f"radius {r:g}": Config(smoothing_radius=r) for r in (1e-1, 1.0)},
    **{f"clip at quantile {q:g}": Config(quantile=q) for q in (0.3, 0.5, 0.7)},
    "momentum 0.9": Config(
        optimizer=lambda rate: optax.chain(
            optax.trace(0.9), optax.scale_by_learning_rate(0.1 * rate)
        )
    ),
    "Adam": Config(optimizer=lambda rate: optax.adam(0.1 * rate)),
    "step size to zero": Config(decay=True),
    "last iterate": Config(average=0.0),
    "mean of all iterates": Config(average=1.0),
    "step size to zero, last iterate": Config(decay=True, average=0.0),
}
QUICK = ("K = 4", "K = 64, then 4")


def spent(staged: list[tuple[Config, plans.DPZero]]) -> float:
    """Epsilon of the stages together: of their composed events."""
    each = [accounting.Guarantee(plan.event, plan.event_relation) for _, plan in staged]
    return float(accounting.epsilon(*accounting.composed(each), DELTA))


def _stage(
    config: Config,
    plan: plans.DPZero,
    loss: Callable[[jax.Array, Any], jax.Array],
    begin: float,
) -> Callable[..., Any]:
    """One run of a plan from flat parameters; ``begin``: share of steps not averaged."""
    transform: Any = plan.transform(jaxdp.Keys.insecure(0))
    steps = plan.num_steps

    def run(rate: Any, params: Any, made: Any, released: Any, data: Any) -> Any:
        parts = [config.optimizer(rate * math.sqrt(config.num_directions / 4))]
        if config.decay:
            parts.append(optax.scale_by_schedule(lambda t: 1 - t / steps))
        optimizer = optax.chain(*parts, jaxdp.polyak_average(round(begin * steps)))
        zero = config.variables(params)

        def step(carry: Any, t: jax.Array) -> Any:
            params, made, state, sums = carry
            gradient, made = transform.update(
                None,
                made,
                zero,
                value_fn=lambda v, rows: loss(
                    params + config.lifted(v, t, released), rows
                ),
                batch=data,
            )
            gradient = config.lifted(gradient, t, released)
            updates, state = optimizer.update(gradient, state, params)
            sums = sums.at[t * PARTS // steps].add(gradient)
            return (params + updates, made, state, sums), None

        carry = params, made, optimizer.init(params), jnp.zeros_like(released)
        (params, _, state, sums), _ = jax.lax.scan(step, carry, jnp.arange(steps))
        return params, polyak_output(state), sums

    return run


def scores(
    config: Config, dataset: models.Dataset, clip: float, rates: Any, seeds: int
) -> np.ndarray:
    """Accuracies on a data set's held-out records, (rates, seeds)."""
    net = NETWORKS[config.network]()
    data, (x, y) = jax.tree.map(jnp.asarray, (dataset.train, dataset.test))
    start, shaped = ravel_pytree(net.init(jax.random.key(0)))
    staged = config.staged(dataset.num_examples, clip)
    first = 1 - config.average * len(staged)
    runs = [
        _stage(
            one, plan, lambda w, rows: net.value_fn(shaped(w), rows), max(first, 0.0)
        )
        for one, plan in staged
    ]

    def states(seed: int) -> list[Any]:
        """States before the stages, whose keys differ."""
        keys = [jaxdp.Keys.insecure(seed + i * SLOPES) for i in range(len(staged))]
        return [
            plan.transform(key).init(one.variables(start))
            for (one, plan), key in zip(staged, keys, strict=True)
        ]

    def accuracies(begun: list[Any]) -> jax.Array:
        def accuracy(rate: jax.Array) -> jax.Array:
            params, mean, released = start, start, jnp.zeros((PARTS, start.size))
            for run, made in zip(runs, begun, strict=True):
                params, mean, released = run(rate, params, made, released, data)
            return jnp.mean(jnp.argmax(net.apply(shaped(mean), x), axis=1) == y)

        return jax.vmap(accuracy)(jnp.asarray(rates, jnp.float32))

    begun = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(states, range(seeds)))
    program = jax.jit(_harness.over_seeds(accuracies)).lower(begun)
    return np.asarray(_harness.compiled(program)(begun), np.float64).T


def clipped(config: Config, dataset: models.Dataset, clip: float) -> float:
    """Share of held-out records beyond the clip in the first step."""
    net = NETWORKS[config.network]()
    start, shaped = ravel_pytree(net.init(jax.random.key(0)))
    one, plan = config.staged(dataset.num_examples, clip)[0]
    nothing = jnp.zeros((PARTS, start.size))

    def loss(v: Any, rows: Any) -> jax.Array:
        return net.value_fn(shaped(start + one.lifted(v, jnp.int32(0), nothing)), rows)

    test = jax.tree.map(jnp.asarray, dataset.test)
    found = plan.contributions(loss, one.variables(start), test, jax.random.key(0))
    return float(jnp.mean(jnp.linalg.norm(found.rows, axis=1) > found.l2_clip_norm))


def more(found: np.ndarray, base: np.ndarray) -> _harness.Mean:
    """Difference of two means, with Welch's 95% interval; none to itself."""
    if found is base:
        return _harness.Mean(0.0, 0.0)
    interval = scipy.stats.ttest_ind(found, base, equal_var=False).confidence_interval()
    value = float(np.mean(found) - np.mean(base))
    return _harness.Mean(value, float(interval.high - interval.low) / 2)


def run(quick: bool) -> list[_harness.Row]:
    """Rows of every configuration."""
    whole = models.load("digits")
    split = models.validation_split(whole)
    clips, rates, seeds = (CLIPS[:1], RATES[2:4], 2) if quick else (CLIPS, RATES, SEEDS)
    rows: list[_harness.Row] = []
    bases: dict[str, np.ndarray] = {}
    for name in QUICK if quick else CONFIGS:
        config = CONFIGS[name]
        means = [scores(config, split, c, rates, 2).mean(axis=1) for c in clips]
        at, place = np.unravel_index(np.argmax(means), np.shape(means))
        clip, rate = clips[at], rates[place]
        found = scores(config, whole, clip, [rate], seeds)[0]
        base = bases.setdefault(config.network, found)  # K = 4 comes first.
        staged = config.staged(whole.num_examples, clip)
        assert config.unclipped or spent(staged) <= EPSILON * (1 + 1e-6)
        own = rate * math.sqrt(staged[0][0].num_directions / 4)
        note = f"clip {clip:g}, step size {own:g}"
        rows += [
            _harness.averaged(name, METRIC, _harness.mean(found), seeds, note),
            _harness.averaged(name, MORE, more(found, base), seeds),
            _harness.Row(name, CLIPPED, clipped(config, whole, clip), "share"),
        ]
        print(*rows[-3:-1], flush=True)
    return rows
