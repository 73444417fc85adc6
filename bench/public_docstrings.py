"""What public docstrings bring to private training of a small RoBERTa.

The classification task of :mod:`bench.docstrings`. Half of its public records serve as
public ones and the other half measures, then the other way round; a figure is the mean of
both, over seeds of directions, noise and batches. LoRA moves, at epsilon 2, delta = 1e-5,
replace-one. The start is LoRA trained on the public records alone, by Adam, whose step size
and number of steps cross-validation on these records chooses. Subspace and scale are those
of public gradients at the start.

Every method had six tries, of one run a half by a seed of its own, judged by a fifth of the
private records that was held out. These choices are not in epsilon.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
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

EPSILON, SEEDS = 2.0, range(5)
ACCURACY, GAIN = "accuracy", "gain in accuracy"
ALONE, BASELINE = "public records alone", "DP-LoRA, start"
#: Of training on public records: step sizes of Adam, numbers of steps, folds.
RATES, STEPS, FOLDS, PUBLIC_BATCH = (1e-3, 3e-3), (20, 40, 60, 80), 3, 48


class Method(NamedTuple):
    """A private run, and what it makes of the public records."""

    rate: float
    num_steps: int = 100
    clip: float = 1.0
    batch: int = 48
    average: float = 0.0
    algorithm: Any = "dpgd"
    start: bool = True
    num_directions: int = 0  # of the subspace; 0 for none
    weight: float = 0.0  # of public gradients
    scaled: bool = False


METHODS = {
    "DP-LoRA, no public records": Method(0.5, start=False),
    BASELINE: Method(0.5),
}


class Half(NamedTuple):
    """What private runs are given where one half of the public records is public."""

    problem: Any  # bench.docstrings.finetuning.Problem, as pretrained
    public: Any  # the public half as a batch
    start: Any  # parameters trained on it
    chosen: tuple[float, int]  # by which step size and number of steps


def take(batch: Any, rows: Any) -> Any:
    """Some records of a batch."""
    return jax.tree.map(lambda x: x[rows], batch)


def trained(problem: Any, public: Any, rate: float, steps: Sequence[int]) -> Iterator[Any]:
    """Parameters after each number of steps of Adam on the public records."""
    moves = jax.tree_util.tree_map_with_path(
        lambda path, _: problem.trainable(path_str(path)), problem.params
    )
    rules = {True: optax.adam(rate), False: optax.set_to_zero()}
    optimizer = optax.partition(rules, moves)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss = lambda p: jnp.mean(problem.task.value_fn(p, batch))  # noqa: E731
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    rng, count = np.random.default_rng(0), len(public["label"])
    params, state = problem.params, optimizer.init(problem.params)
    for i in range(1, steps[-1] + 1):
        rows = rng.choice(count, min(PUBLIC_BATCH, count), replace=False)
        params, state = step(params, state, take(public, rows))
        if i in steps:
            yield params


def choose(problem: Any, public: Any, steps: Sequence[int]) -> tuple[float, int]:
    """The step size and number of steps of the least mean loss on folds held out."""
    rows = np.arange(len(public["label"]))
    found = np.zeros((len(RATES), len(steps)))
    for i, rate in enumerate(RATES):
        for fold in range(FOLDS):
            out = rows % FOLDS == fold
            every = trained(problem, take(public, rows[~out]), rate, steps)
            for j, params in enumerate(every):
                found[i, j] += problem.task.value_fn(params, take(public, rows[out])).sum()
    i, j = np.unravel_index(np.argmin(found), found.shape)
    return RATES[i], steps[j]


def halved(corpus: Any, start: Any, half: int, steps: Sequence[int] = STEPS) -> Half:
    """Every other public record as public, and the others to measure by."""
    from bench.docstrings import finetuning, pretraining

    public, rest = corpus.eval[half::2], corpus.eval[1 - half :: 2]
    problem = finetuning.problem(corpus._replace(eval=rest), start, "LoRA")
    batch = pretraining.encoded(start.tokenizer, public, corpus.classes)
    rate, count = chosen = choose(problem, batch, steps)
    (params,) = trained(problem, batch, rate, [count])
    return Half(problem, batch, params, chosen)


def accuracies(of: Half, method: Method, seeds: Sequence[int]) -> list[float]:
    """Accuracy of the run of each seed."""
    from bench.docstrings import finetuning

    problem, public = of.problem, of.public
    if method.start:
        problem = problem._replace(params=of.start)
    value_fn, params, moves = problem.task.value_fn, problem.params, problem.trainable
    part = None
    if method.num_directions:
        basis = jaxdp.public_basis(
            *(value_fn, params, public),
            num_directions=method.num_directions,
            trainable=moves,
        )
        part = jaxdp.in_subspace(value_fn, params, basis)
    elif method.scaled:
        scale = jaxdp.public_scale(value_fn, params, public, trainable=moves)
        part = jaxdp.in_scale(value_fn, params, scale)
    if part is not None:
        task = dataclasses.replace(problem.task, value_fn=part.value_fn)
        accuracy = lambda point: of.problem.accuracy(part.restore(point))  # noqa: E731
        problem = finetuning.Problem(task, part.params, problem.train, None, accuracy)
    recipe = recipes.Recipe(
        num_steps=method.num_steps,
        l2_clip_norm=method.clip,
        learning_rate=method.rate,
        schedule="cosine",
        average=method.average,
        num_directions=method.num_directions or 1,
        direction="orthonormal",
    )
    optimizer = recipes.make_optimizer(recipe)
    if method.weight:
        mix = jaxdp.mix_public(
            *(problem.task.value_fn, public, method.weight),
            l2_clip_norm=method.clip,
            trainable=problem.trainable,
        )
        optimizer = optax.chain(mix, optimizer)
    tuned = finetuning.Method(method.algorithm, "LoRA", recipe, method.batch)
    return [
        finetuning.run(problem, tuned, EPSILON, seed, optimizer) for seed in seeds
    ]
