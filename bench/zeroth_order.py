"""What the numbers of DPZero bring: directions, clips, radii, momentum, averages.

Digits, a linear softmax model (650 parameters) or a network of one hidden layer (2410),
epsilon 2, delta = 1e-5, replace-one, full batches. All configurations have the same budget
and the same number of slopes of each record, directions times steps, so the same forward
passes; one number is changed at a time. Clip and step size of each are chosen from the same
grid by two runs on a validation split of the training records, without noise for the
choice: that is what epsilon does not contain. Accuracies are on 360 held-out records: means
over seeds with the 95% interval of Student's t.

"without the clip's error" is a run whose clip never binds and whose noise is that of the
clip chosen beside it. It is not private: it shows what clipping costs.

*Records clipped* is the share at the start, of held-out records.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench import _harness
from jaxdp import models, plans, sampling
from jaxdp.core.averaging import polyak_output
from jaxdp.models import networks

EPSILON, DELTA, SLOPES = 2.0, 1e-5, 2048
DIRECTIONS = (1, 4, 16, 64)
#: Of the vector of K slopes, over the root of K.
CLIPS = (0.5, 1.5)
#: Of K = 4; of others times the root of K / 4, for they take fewer steps.
RATES = (0.1, 0.3, 1.0, 3.0)
METRIC, CLIPPED = "test accuracy", "records clipped"
NETWORKS = {
    "linear": lambda: networks.linear(64, 10),
    "network": lambda: networks.mlp(64, 10, hidden=(32,)),
}


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

    def plan(self, num_examples: int, clip: float) -> plans.DPZero:
        """The plan at a clip, calibrated."""
        num = self.num_directions
        plan = plans.DPZero(
            num_examples=num_examples,
            num_steps=SLOPES // num,
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
    **{f"network, K = {k}": Config("network", num_directions=k) for k in (1, 4, 64)},
    **{
        f"K = {k}, without the clip's error": Config(num_directions=k, unclipped=True)
        for k in (1, 4, 64)
    },
    "orthonormal": Config(direction="orthonormal"),
    "orthonormal, K = 64": Config(direction="orthonormal", num_directions=64),
    "signs": Config(direction="rademacher"),
    "normals": Config(direction="gaussian"),
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
QUICK = ("K = 4", "clip at quantile 0.5")


def scores(
    config: Config, dataset: models.Dataset, clip: float, rates: Any, seeds: int
) -> np.ndarray:
    """Accuracies on a data set's held-out records, (rates, seeds)."""
    net = NETWORKS[config.network]()
    x, y = dataset.test
    plan = config.plan(dataset.num_examples, clip)
    steps = plan.num_steps

    def optimizer(learning_rate: Any) -> optax.GradientTransformation:
        parts = [config.optimizer(learning_rate)]
        if config.decay:
            parts.append(optax.scale_by_schedule(lambda t: 1 - t / steps))
        first = steps - round(config.average * steps)
        return optax.chain(*parts, jaxdp.polyak_average(first))

    def accuracy(run: jaxdp.FitResult) -> jax.Array:
        params = polyak_output(run.info.state) if config.average else run.params
        return jnp.mean(jnp.argmax(net.apply(params, x), axis=1) == y)

    found = jaxdp.study(
        plan,
        net.init(jax.random.key(0)),
        dataset.train,
        value_fn=net.value_fn,
        score_fn=accuracy,
        optimizer=optimizer,
        grid={"learning_rate": rates},
        seeds=seeds,
    )
    return np.asarray(found.scores)


def clipped(config: Config, dataset: models.Dataset, clip: float) -> float:
    """Share of held-out records beyond the clip in the first step."""
    net, plan = NETWORKS[config.network](), config.plan(dataset.num_examples, clip)
    test = jax.tree.map(jnp.asarray, dataset.test)
    found = plan.contributions(
        net.value_fn, net.init(jax.random.key(0)), test, jax.random.key(0)
    )
    return float(jnp.mean(jnp.linalg.norm(found.rows, axis=1) > found.l2_clip_norm))


def run(quick: bool) -> list[_harness.Row]:
    """Rows of every configuration."""
    whole = models.load("digits")
    split = models.validation_split(whole)
    clips, rates, seeds = (CLIPS[:1], RATES[1:3], 2) if quick else (CLIPS, RATES, 5)
    rows: list[_harness.Row] = []
    for name in QUICK if quick else CONFIGS:
        config = CONFIGS[name]
        own = [rate * math.sqrt(config.num_directions / 4) for rate in rates]
        means = [scores(config, split, c, own, 2).mean(axis=1) for c in clips]
        at, place = np.unravel_index(np.argmax(means), np.shape(means))
        clip, rate = clips[at], own[place]
        found = scores(config, whole, clip, [rate], seeds)[0]
        note = f"clip {clip:g}, step size {rate:g}"
        rows.append(_harness.averaged(name, METRIC, _harness.mean(found), seeds, note))
        share = clipped(config, whole, clip)
        rows.append(_harness.Row(name, CLIPPED, share, "share"))
        print(rows[-2], flush=True)
    return rows
