"""What public docstrings bring to private training of a small RoBERTa.

The classification task of :mod:`bench.docstrings`. Half of its public records serve as
public ones and the other half measures, then the other way round; a figure is the mean of
both. Epsilon 2, delta = 1e-5, replace-one. LoRA is first trained on the public records
alone, by Adam, for a number of steps that cross-validation on them chooses. Two things then
move in private:

- *Linear*: a linear head on the hidden states that the model so trained has at the prompt's
  mask, which are computed once. Its start is a regression on the public records. Full
  batches, of which a slope along a direction costs little: DPZero takes as many orthonormal
  directions as its subspace has, and so all of the projected gradient. Every method has
  six settings, of which the best is taken: by three seeds that are not reported, on a fifth
  of the private records that is held out. (The clip was chosen so for the baseline.)
- *LoRA*: on, by sampled batches of 4800 records in all. Settings come from four such tries
  of each method that starts from the public training, of one run a half; without that they
  are those of :mod:`bench.docstrings`.

Such choices are not in epsilon. Subspace and scale are of public gradients at the start.
Gains are over the run of the same seed that takes nothing but its start from the public
records.
"""

import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench import _harness
from jaxdp.cli import recipes
from jaxdp.kernels.sphere import path_str
from jaxdp.models import losses
from jaxdp.training import loop
from jaxdp.training.studies import StudyResult

EPSILON, DELTA, RELATION = 2.0, 1e-5, "replace_one"
ACCURACY, GAIN, ALONE, BASELINE = (
    "accuracy",
    "gain in accuracy",
    "public alone",
    "start",
)
PRETRAINING_STEPS = 400
#: Seeds that choose, and those that are reported; of LoRA the first of these.
TRIED, SEEDS, LORA_SEEDS = 3, 10, 5
#: Of training on public records: the step size of Adam, numbers of steps, folds.
RATE, STEPS, FOLDS, PUBLIC_BATCH = 1e-3, (40, 80, 120), 3, 48
LINEAR_STEPS, HELD_OUT = 100, 5
CLIP = 0.5


class Linear(NamedTuple):
    """A way to move the linear head, and what is tried of it."""

    rates: tuple[float, ...] = (4.0, 8.0, 16.0)
    algorithm: Any = "DPGD"
    num_directions: tuple[int, ...] = (0,)  # of a subspace; 0 for none
    weights: tuple[float, ...] = (0.0,)  # of public gradients
    floors: tuple[float, ...] = (0.0,)  # of a scale; 0 for none


LINEAR = {
    BASELINE: Linear((1.0, 2.0, 4.0, 8.0, 16.0, 32.0)),
    "start, mixing": Linear(weights=(0.1, 0.3)),
    "start, scale": Linear(floors=(0.1, 0.5)),
    "start, subspace": Linear(num_directions=(64, 128)),
    "start, subspace, DPZero": Linear(num_directions=(32, 64), algorithm="DPZero"),
}


class Lora(NamedTuple):
    """A run of DP-LoRA, and what it makes of the public records."""

    rate: float
    batch: int = 48  # expected records
    num_steps: int = 100
    start: bool = True
    num_directions: int = 0  # of the subspace; 0 for none


LORA = {
    "no public records": Lora(0.5, start=False),
    BASELINE: Lora(0.8, 160, 30),
    "start, subspace": Lora(1.0, num_directions=64),
}


class Half(NamedTuple):
    """What private runs are given where one half of the public records is public."""

    problem: Any  # bench.docstrings.finetuning.Problem, as pretrained
    public: Any  # the public half, as a batch
    shown: Any  # the half that measures
    start: Any  # parameters trained on the public half
    num_steps: int  # of that training


class Head(NamedTuple):
    """A linear head on hidden states: its data, and its parameters by public records."""

    train: Any
    public: Any
    shown: Any
    params: Any


def take(batch: Any, rows: Any) -> Any:
    """Some records of a batch."""
    return jax.tree.map(lambda x: x[rows], batch)


# --- training on the public records ------------------------------------------------


def trained(problem: Any, public: Any, steps: Sequence[int]) -> Iterator[Any]:
    """Parameters after each number of steps of Adam on the public records."""
    moves = jax.tree_util.tree_map_with_path(
        lambda path, _: problem.trainable(path_str(path)), problem.params
    )
    rules: Any = {True: optax.adam(RATE), False: optax.set_to_zero()}
    optimizer = optax.partition(rules, moves)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss = lambda p: jnp.mean(problem.task.value_fn(p, batch))  # noqa: E731
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    options = loop.compiler_options(jax.default_backend())
    step = jax.jit(step, compiler_options=options)
    rng, count = np.random.default_rng(0), len(public["label"])
    params, state = problem.params, optimizer.init(problem.params)
    for i in range(1, steps[-1] + 1):
        rows = rng.choice(count, min(PUBLIC_BATCH, count), replace=False)
        params, state = step(params, state, take(public, rows))
        if i in steps:
            yield params


def halved(corpus: Any, start: Any, half: int, steps: Sequence[int] = STEPS) -> Half:
    """Every other public record as public, and the others to measure by."""
    from bench.docstrings import finetuning, pretraining

    public, rest = corpus.eval[half::2], corpus.eval[1 - half :: 2]
    problem = finetuning.problem(corpus._replace(eval=rest), start, "LoRA")
    public, shown = (
        pretraining.encoded(start.tokenizer, records, corpus.classes)
        for records in (public, rest)
    )
    value_fn, folds = jax.jit(problem.task.value_fn), np.arange(len(public["label"]))
    found = np.zeros(len(steps))
    for fold in range(FOLDS) if len(steps) > 1 else ():
        out = folds % FOLDS == fold
        for i, params in enumerate(trained(problem, take(public, ~out), steps)):
            found[i] += value_fn(params, take(public, out)).sum()
    count = steps[int(np.argmin(found))]
    (params,) = trained(problem, public, [count])
    return Half(problem, public, shown, params, count)


# --- a linear head -----------------------------------------------------------------


def value_fn(params: Any, batch: Any) -> jax.Array:
    """Cross-entropy of each record, (B,)."""
    scores = batch["x"] @ params["w"] + params["b"]
    return losses.softmax_cross_entropy(scores, batch["label"])


def accuracy(params: Any, batch: Any) -> jax.Array:
    """Share of records whose class has the largest score, ()."""
    return losses.accuracy(batch["x"] @ params["w"] + params["b"], batch["label"])


def head(of: Half) -> Head:
    """Hidden states by the public training, moved and scaled by public means."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    model = of.problem.task.model

    @jax.jit
    def states(batch: Any) -> jax.Array:
        x = model.hidden(of.start, batch["tokens"], batch["mask"])
        return jnp.take_along_axis(x, batch["position"][:, None, None], axis=1)[:, 0]

    every = [of.problem.train, of.public, of.shown]
    found = [np.asarray(states(batch)) for batch in every]
    mean, scale = found[1].mean(axis=0), found[1].std() * found[1].shape[1] ** 0.5
    train, public, shown = (
        {"x": jnp.asarray((x - mean) / scale), "label": jnp.asarray(batch["label"])}
        for x, batch in zip(found, every, strict=True)
    )
    grid, regression = {"C": np.logspace(-3, 3, 7)}, LogisticRegression(max_iter=1000)
    search = GridSearchCV(regression, grid, cv=FOLDS, scoring="neg_log_loss")
    fitted = search.fit(public["x"], public["label"]).best_estimator_
    params = {"w": jnp.asarray(fitted.coef_.T), "b": jnp.asarray(fitted.intercept_)}
    return Head(train, public, shown, jax.tree.map(jnp.float32, params))


def scores(of: Head, how: Linear, setting: Any, seeds: int, steps: int) -> StudyResult:
    """Accuracies of step sizes and seeds, of one setting of all else."""
    count, weight, floor = setting
    losses_of, params, restore = value_fn, of.params, lambda point: point
    if count:
        basis = jaxdp.public_basis(value_fn, params, of.public, num_directions=count)
        losses_of, params, restore = jaxdp.in_subspace(value_fn, params, basis)
    if floor:
        scale = jaxdp.public_scale(value_fn, params, of.public, floor=floor)
        losses_of, params, restore = jaxdp.in_scale(value_fn, params, scale)
    shared: dict[str, Any] = {
        "num_examples": len(of.train["label"]),
        "num_steps": steps,
        "sampling": jaxdp.sampling.FullBatch(),
        "relation": RELATION,
        "l2_clip_norm": CLIP,
    }
    if how.algorithm == "DPZero":
        # The slopes along rows of length sqrt(m) are so much longer than the gradient.
        plan = jaxdp.plans.DPZero(
            **shared | {"l2_clip_norm": CLIP * count**0.5},
            smoothing_radius=1e-3,
            num_directions=count,
            direction="orthonormal",
        )
    else:
        plan = jaxdp.plans.DPGD(**shared)

    def optimizer(learning_rate: Any) -> Any:
        parts = [optax.sgd(learning_rate), jaxdp.polyak_average(steps // 2)]
        if weight:
            parts.insert(0, jaxdp.mix_public(losses_of, of.public, weight))
        return optax.chain(*parts)

    return jaxdp.study(
        plan.calibrate(epsilon=EPSILON, delta=DELTA),
        params,
        of.train,
        value_fn=losses_of,
        score_fn=lambda result: accuracy(restore(result.params), of.shown),
        optimizer=optimizer,
        grid={"learning_rate": how.rates},
        seeds=seeds,
    )


def tuned(heads: Sequence[Head], how: Linear, steps: int) -> tuple[np.ndarray, str]:
    """Accuracies of the reported seeds, (seeds,), by the setting that was chosen."""
    out = np.arange(len(heads[0].train["label"])) % HELD_OUT == 0
    found = {}
    for setting in itertools.product(how.num_directions, how.weights, how.floors):
        parts = [
            scores(
                of._replace(train=take(of.train, ~out), shown=take(of.train, out)),
                *(how, setting, TRIED, steps),
            )
            for of in heads
        ]
        means = np.mean([part.means for part in parts], axis=0)
        for rate, mean in zip(how.rates, means, strict=True):
            found[setting, rate] = mean
    setting, rate = max(found, key=lambda key: found[key])
    one = how._replace(rates=(rate,))
    every = TRIED + SEEDS
    parts = [scores(of, one, setting, every, steps).scores[0] for of in heads]
    count, weight, floor = setting
    said = {"step size": rate, "directions": count, "weight": weight}
    said |= {"floor": floor}
    note = ", ".join(f"{name} {value:g}" for name, value in said.items() if value)
    return np.mean(parts, axis=0)[TRIED:], note


# --- LoRA --------------------------------------------------------------------------


def lora(of: Half, how: Lora, seeds: Sequence[int]) -> list[float]:
    """Accuracy of the run of each seed."""
    from bench.docstrings import finetuning

    problem = of.problem._replace(params=of.start) if how.start else of.problem
    if how.num_directions:
        losses_of, params = problem.task.value_fn, problem.params
        basis = jaxdp.public_basis(
            *(losses_of, params, of.public),
            num_directions=how.num_directions,
            trainable=problem.trainable,
        )
        part = jaxdp.in_subspace(losses_of, params, basis)
        problem = problem._replace(
            task=dataclasses.replace(problem.task, value_fn=part.value_fn),
            params=part.params,
            trainable=None,
            accuracy=lambda point: of.problem.accuracy(part.restore(point)),
        )
    recipe = recipes.Recipe(
        num_steps=how.num_steps,
        l2_clip_norm=1.0,
        learning_rate=how.rate,
        schedule="cosine",
    )
    method = finetuning.Method("dpgd", "LoRA", recipe, how.batch)
    return [finetuning.run(problem, method, EPSILON, seed) for seed in seeds]


# --- the study ---------------------------------------------------------------------


def run(quick: bool) -> list[_harness.Row]:
    """Rows of what moves and every method; quick: few steps, and two methods."""
    for package in ("tokenizers", "safetensors"):
        if said := _harness.missing(package):
            return [_harness.Row("public docstrings", ACCURACY, None, said)]
    from bench.docstrings import corpus, pretraining

    text = corpus.load()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        start = pretraining.pretrain(
            *(text, pretraining.CONFIGS["encoder"], pathlib.Path(folder)),
            num_steps=4 if quick else PRETRAINING_STEPS,
        )
        steps = STEPS[:1] if quick else STEPS  # A run fills one core.
        halves = [*pool.map(lambda i: halved(text, start, i, steps), range(2))]
        waiting = [] if quick else [pool.submit(of_lora, halves)]
        waiting.append(pool.submit(of_linear, halves, quick))
        return [row for part in waiting for row in part.result()]


def of_linear(halves: Sequence[Half], quick: bool) -> list[_harness.Row]:
    """Rows of the linear head."""
    heads = [head(of) for of in halves]
    names = [BASELINE, "start, subspace, DPZero"] if quick else [*LINEAR]
    found = {ALONE: (np.mean([[accuracy(of.params, of.shown)] for of in heads], 0), "")}
    for name in names:
        found[name] = tuned(heads, LINEAR[name], 2 if quick else LINEAR_STEPS)
    return rows("linear", found)


def of_lora(halves: Sequence[Half]) -> list[_harness.Row]:
    """Rows of LoRA."""
    alone = np.mean([[of.problem.accuracy(of.start)] for of in halves], axis=0)
    counts = " and ".join(str(of.num_steps) for of in halves)
    found = {ALONE: (alone, f"{counts} steps")}
    seeds = range(TRIED, TRIED + LORA_SEEDS)
    for name, how in LORA.items():
        note = f"step size {how.rate:g}, {how.num_steps} batches of {how.batch}"
        found[name] = np.mean([lora(of, how, seeds) for of in halves], axis=0), note
    return rows("LoRA", found)


def rows(case: str, found: Mapping[str, tuple[Any, str]]) -> list[_harness.Row]:
    """Rows of accuracies, and of gains over the baseline by the same seeds."""
    made = []
    for name, (values, note) in found.items():
        mean, count = _harness.mean(values), len(values)
        row = _harness.averaged(f"{case}, {name}", ACCURACY, mean, count)
        made.append(dataclasses.replace(row, note=note))
        if name != BASELINE:
            gains = values - found[BASELINE][0]
            gain, base = _harness.mean(gains), f"{case}, {BASELINE}"
            made.append(_harness.averaged(row.case, GAIN, gain, len(gains), "", base))
    return made
