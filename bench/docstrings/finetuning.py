"""The pretrained model, tuned on the private records: DPZero, MeZO and DP-SGD.

All of them tune the dense layer and the norm of the masked-LM head (:func:`moves`) by the
prompt's loss, on batches of one sampler: so few steps along random directions teach a
million parameters little. DPZero and MeZO are ``jaxdp.fit``. DP-SGD has the clipped
gradients and the noise of ``jax_privacy``, and as its noise multiplier that of a plan of
ours with the same sampler, relation and budget. The seed draws directions, noise and
batches; data and initial model stay.

Step sizes were chosen by the accuracy on a fifth of the private records that was held out,
five seeds each, for DPZero and DP-SGD alike: a factor of two apart, at epsilon 2. MeZO's,
and the clips and steps, come from a few runs that were judged on the public records: read
the accuracies as slightly optimistic. Such choices are not in a run's epsilon.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench.docstrings.corpus import Corpus
from bench.docstrings.pretraining import Pretrained, encoded
from jaxdp import plans, sampling
from jaxdp.cli import recipes
from jaxdp.cli.recipes import Recipe
from jaxdp.models.language import LanguageModel, tasks

Algorithm = Literal["dpzero", "mezo", "dpsgd"]
Advance = Callable[[int], None]  # is told how many steps were done

RELATION = "replace_one"
DELTA = 1e-5
#: Expected records of a batch, and its rows: more are cut off, which is accounted for.
BATCH, ROWS = 48, 64

_DPZERO = Recipe(
    num_steps=400,
    l2_clip_norm=10.0,
    learning_rate=2e-2,
    schedule="cosine",
    num_directions=4,
    direction="rademacher",
)
RECIPES: dict[Algorithm, Recipe] = {
    "dpzero": _DPZERO,
    "mezo": dataclasses.replace(_DPZERO, learning_rate=1e-2),
    "dpsgd": Recipe(num_steps=100, l2_clip_norm=1.0, learning_rate=1.0),
}


def moves(path: str) -> bool:
    """``trainable=``: the parts of the head that are not the table of tokens."""
    return path.startswith(("head/dense/", "head/norm/"))


class Problem(NamedTuple):
    """What is tuned, on what, and where it starts."""

    task: tasks.Task
    params: Any
    train: Any  # private records as a batch
    eval: Any  # public ones
    classes: tuple[str, ...]

    @property
    def num_examples(self) -> int:
        return len(self.train["label"])

    def accuracy(self, params: Any) -> float:
        """Share of the public records that are classified rightly."""
        return tasks.accuracy(
            tasks.predict(self.task, params, self.eval), self.eval["label"]
        )

    @property
    def majority(self) -> float:
        """Accuracy of always naming the training records' most frequent class."""
        label = np.argmax(np.bincount(self.train["label"]))
        return float(np.mean(self.eval["label"] == label))


class Run(NamedTuple):
    """Accuracy on public records after some steps, from 0 to the last."""

    steps: list[int]
    accuracies: list[float]
    seconds: float  # of training alone, without compiling and evaluating


def problem(corpus: Corpus, start: Pretrained) -> Problem:
    """The task of a corpus in a pretrained model's tokens."""
    words = start.tokenizer.label_words(corpus.classes)
    return Problem(
        tasks.prompt(start.model, words),
        start.params,
        encoded(start.tokenizer, corpus.train, corpus.classes),
        encoded(start.tokenizer, corpus.eval, corpus.classes),
        corpus.classes,
    )


def sampler(num_examples: int) -> sampling.TruncatedPoisson:
    """Every method's batches."""
    return sampling.TruncatedPoisson(
        sampling_prob=BATCH / num_examples, max_batch_size=ROWS
    )


def run(
    of: Problem,
    algorithm: Algorithm,
    *,
    seed: int,
    epsilon: float = 0.0,
    recipe: Recipe | None = None,
    num_evals: int = 10,
    advance: Advance = lambda steps: None,
) -> Run:
    """One run.

    Args:
      of: the problem.
      algorithm: what runs; ``"mezo"`` is not private.
      seed: of ``Keys.insecure``.
      epsilon: at :data:`DELTA`.
      recipe: that of :data:`RECIPES` by default.
      num_evals: how often the public records are looked at.
      advance: is told of progress.
    """
    recipe = RECIPES[algorithm] if recipe is None else recipe
    chunk = max(1, recipe.num_steps // num_evals)
    if algorithm == "dpsgd":
        return _dp_sgd(of, recipe, epsilon, seed, chunk, advance)
    plan = recipes.make_plan(
        recipe,
        algorithm,
        num_examples=of.num_examples,
        sampling=sampler(of.num_examples),
        relation=RELATION,
        epsilon=epsilon,
        delta=DELTA,
    )
    steps, accuracies = [0], [of.accuracy(of.params)]

    def judge(step: int, params: Any, info: Any) -> None:
        del info
        advance(step - steps[-1])
        steps.append(step)
        accuracies.append(of.accuracy(params))

    result = jaxdp.fit(
        plan,
        jaxdp.Keys.insecure(seed),
        of.params,
        of.train,
        value_fn=of.task.value_fn,
        optimizer=recipes.make_optimizer(recipe),
        trainable=moves,
        stacked=LanguageModel.is_stacked,
        callback=judge,
        chunk=chunk,
    )
    return Run(steps, accuracies, result.report["train_seconds"])


def _dp_sgd(
    of: Problem, recipe: Recipe, epsilon: float, seed: int, chunk: int, advance: Advance
) -> Run:
    """DP-SGD by ``jax_privacy`` on the same batches, for the same budget."""
    import jax_privacy  # pyright: ignore[reportMissingImports]  (an extra)
    from jax_privacy import noise_addition  # pyright: ignore[reportMissingImports]

    plan = plans.DPGD(
        num_examples=of.num_examples,
        num_steps=recipe.num_steps,
        sampling=sampler(of.num_examples),
        relation=RELATION,
        l2_clip_norm=recipe.l2_clip_norm,
    ).calibrate(epsilon=epsilon, delta=DELTA)
    assert plan.noise_multiplier is not None
    keys = jaxdp.Keys.insecure(seed)

    def whole(part: Any) -> Any:
        return {**of.params, "head": {**of.params["head"], **part}}

    def loss(part: Any, one: Any) -> jax.Array:
        return jnp.sum(of.task.value_fn(whole(part), one))

    clipped = jax_privacy.clipped_grad(
        loss, l2_clip_norm=recipe.l2_clip_norm, normalize_by=BATCH, microbatch_size=16
    )
    after = recipes.make_optimizer(recipe)
    assert after is not None  # Only a plan that makes the steps itself has none.
    optimizer = optax.chain(
        noise_addition.gaussian_privatizer(
            stddev=plan.noise_multiplier * plan.sensitivity / BATCH,
            prng_key=jax.random.key(seed),
        ),
        after,
    )

    @jax.jit
    def step(params: Any, state: Any, data: Any, i: jax.Array) -> tuple[Any, Any]:
        batch = sampling.batch(plan, keys, i, data)
        gradient = clipped(params, batch.records, is_padding_example=~batch.mask)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    data = jax.tree.map(jnp.asarray, of.train)
    params = {name: of.params["head"][name] for name in ("dense", "norm")}
    state = optimizer.init(params)
    jax.block_until_ready(step(params, state, data, jnp.int32(0)))  # compiles
    steps, accuracies, seconds = [0], [of.accuracy(of.params)], 0.0
    while steps[-1] < recipe.num_steps:
        first, last = steps[-1], min(steps[-1] + chunk, recipe.num_steps)
        begin = time.perf_counter()
        for i in range(first, last):
            params, state = step(params, state, data, jnp.int32(i))
        jax.block_until_ready(params)
        seconds += time.perf_counter() - begin
        advance(last - first)
        steps.append(last)
        accuracies.append(of.accuracy(whole(params)))
    return Run(steps, accuracies, seconds)
