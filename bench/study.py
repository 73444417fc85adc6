"""A grid of settings and seeds: ``jaxdp.study`` against one ``jaxdp.fit`` after another.

DPZero on wine (142 records, 13 features, a linear softmax model, K = 4, 500 steps), at
epsilon 2: six learning rates, two clips, three seeds. Both run the same steps of the same
plans. Seconds are those that a caller waits, tracing and compilation in them: ``fit``
compiles for each setting, and for its seeds once. The programs that ``fit`` keeps are
dropped before each round. Accuracies are on the 36 held-out public records.
"""

import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench import _harness
from jaxdp import models, plans, sampling
from jaxdp.training import loop

CLIPS = (0.5, 1.0)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def loss(params: Any, record: Any) -> jax.Array:
    """Cross-entropy of one record, shape ()."""
    x, y = record
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def run(quick: bool) -> list[_harness.Row]:
    """Rows of seconds and of the best accuracy, for both."""
    rates, seeds, rounds = (RATES[2:4], 2, 1) if quick else (RATES, 3, 3)
    data = models.load("wine")
    x, y = data.test
    plan = plans.DPZero(
        num_examples=data.num_examples,
        num_steps=500,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
        num_directions=4,
    ).calibrate(epsilon=2.0, delta=1e-5)
    params = {"w": jnp.zeros((x.shape[1], 3)), "b": jnp.zeros(3)}
    value_fn = jaxdp.per_record(loss)

    def accuracy(result: jaxdp.FitResult) -> jax.Array:
        logits = x @ result.params["w"] + result.params["b"]
        return jnp.mean(jnp.argmax(logits, axis=1) == y)

    def one_by_one() -> np.ndarray:
        found = []
        for rate, clip in itertools.product(rates, CLIPS):
            clipped = dataclasses.replace(plan, l2_clip_norm=clip)
            optimizer = optax.sgd(rate)
            for seed in range(seeds):
                result = jaxdp.fit(
                    clipped,
                    jaxdp.Keys.insecure(seed),
                    params,
                    data.train,
                    value_fn=value_fn,
                    optimizer=optimizer,
                )
                found.append(float(accuracy(result)))
        return np.reshape(found, (-1, seeds))

    def as_one() -> np.ndarray:
        return jaxdp.study(
            plan,
            params,
            data.train,
            value_fn=value_fn,
            score_fn=accuracy,
            optimizer=optax.sgd,
            grid={"learning_rate": rates, "l2_clip_norm": CLIPS},
            seeds=seeds,
        ).scores

    sides = {"fit, one after another": one_by_one, "study": as_one}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    best = dict.fromkeys(sides, 0.0)
    for i in range(rounds):
        for name in list(sides)[:: -1 if i % 2 else 1]:
            loop._programs.clear()
            jax.clear_caches()
            begin = time.perf_counter()
            metrics = sides[name]()
            seconds[name].append(time.perf_counter() - begin)
            best[name] = float(metrics.mean(axis=1).max())
    case = f"{len(rates) * len(CLIPS)} settings, {seeds} seeds"
    base = next(iter(sides))
    pairs = zip(seconds["study"], seconds[base], strict=True)
    ratio = float(np.median([a / b for a, b in pairs]))
    rows = []
    for name in sides:
        compared = (None, None) if name == base else (base, ratio)
        middle = float(np.median(seconds[name]))
        rows.append(_harness.Row(case, f"seconds: {name}", middle, "s", *compared))
        rows.append(_harness.Row(case, f"best accuracy: {name}", best[name], ""))
    return rows
