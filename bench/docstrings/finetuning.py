"""The pretrained model, tuned on the private records by gradients and by slopes.

Two tasks are made of the same records. In ``classification`` the model names the class by
the likeliest of four label words, or by a head that starts as these words' rows of the
table of tokens. In ``instruction`` it writes its answer, greedily, from all tokens, and the
answer counts where it is the class to the letter.

DPZero takes slopes along random directions, DP-SGD clipped gradients (of LoRA's matrices:
DP-LoRA), both by ``jaxdp.fit`` on batches of one sampler. What moves is the head, LoRA of
queries and values, or all parameters. Without clip and noise they are MeZO and SGD. The
seed draws directions, noise and batches; data and initial model stay.

Clips are about a third of the median norm of what records contribute. Step sizes come from
at most five single runs each, at epsilon 2, judged by a fifth of the private records that
was held out; DPZero's had the fewest with LoRA and with all parameters, and with LoRA the
instruction has that of the classification. Such a choice is not in a run's epsilon. The
public records took no part in it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from bench.docstrings.corpus import Corpus
from bench.docstrings.pretraining import MAX_LENGTH, PROMPT, SPAN, Pretrained
from jaxdp import sampling
from jaxdp.cli import recipes
from jaxdp.cli.recipes import Recipe
from jaxdp.models.language import (
    LanguageModel,
    LoRA,
    adapter_only,
    generation,
    tasks,
    text,
)

TaskName = Literal["classification", "instruction"]
Moving = Literal["head", "LoRA", "all parameters"]
Words = tuple[str, ...]


class Method(NamedTuple):
    """A way to tune the model."""

    algorithm: Any
    moving: Moving
    recipe: Recipe


RELATION, DELTA = "replace_one", 1e-5
#: Expected records of a batch, and its rows: more are cut off, which is accounted for.
BATCH, ROWS = 48, 64

#: MeZO and gradient descent are the methods without clip and noise.
NOT_PRIVATE: dict[str, Any] = {"dpzero": "mezo", "dpgd": "gd"}


def _slopes(clip: float, rate: float, num_directions: int = 1) -> Recipe:
    return Recipe(
        num_steps=200,
        l2_clip_norm=clip,
        learning_rate=rate,
        schedule="cosine",
        num_directions=num_directions,
        direction="rademacher",
    )


def _gradients(clip: float, rate: float, num_steps: int = 100) -> Recipe:
    return Recipe(
        num_steps=num_steps, l2_clip_norm=clip, learning_rate=rate, schedule="cosine"
    )


#: The methods of each task. Directions of a head cost next to nothing: what is below it is
#: computed once.
METHODS: dict[TaskName, dict[str, Method]] = {
    "classification": {
        "DPZero, head": Method("dpzero", "head", _slopes(17.0, 0.18, 32)),
        "DPZero, LoRA": Method("dpzero", "LoRA", _slopes(3.0, 3e-3)),
        "DPZero, all parameters": Method(
            "dpzero", "all parameters", _slopes(8.0, 1e-4)
        ),
        "DP-SGD, head": Method("dpgd", "head", _gradients(3.0, 0.3)),
        "DP-SGD, LoRA": Method("dpgd", "LoRA", _gradients(1.0, 0.5)),
    },
    "instruction": {
        "DPZero, LoRA": Method("dpzero", "LoRA", _slopes(3.0, 3e-3)),
        "DPZero, all parameters": Method(
            "dpzero", "all parameters", _slopes(8.0, 3e-4)
        ),
        "DP-SGD, LoRA": Method("dpgd", "LoRA", _gradients(1.0, 0.5)),
        "DP-SGD, all parameters": Method(
            "dpgd", "all parameters", _gradients(1.0, 0.2, 50)
        ),
    },
}
#: What also runs without clip and noise.
OPEN = ("DPZero, head", "DP-SGD, head", "DP-SGD, LoRA")


class Problem(NamedTuple):
    """What is tuned, on what, and where it starts."""

    task: tasks.Task
    params: Any
    train: Any  # private records as a batch
    eval: Any  # public ones
    trainable: Callable[[str], bool] | None

    def accuracy(self, params: Any) -> float:
        """Share of the public records that are answered rightly."""
        if self.task.scores is not None:
            found = tasks.predict(self.task, params, self.eval)
            return tasks.accuracy(found, self.eval["label"])
        answer = self.eval["tokens"][self.eval["span"]].reshape(-1, SPAN)
        model = self.task.model
        found = generation.generate(model, params, self.eval, max_new_tokens=SPAN)
        return float(np.mean((found == answer).all(axis=1)))


def problem(
    corpus: Corpus, start: Pretrained, name: TaskName, moving: Moving
) -> Problem:
    """A task of a corpus for the model with the parts that move."""
    tokenizer, classes = start.tokenizer, corpus.classes
    words = tokenizer.label_words(classes)
    head = moving == "head"
    model = LanguageModel(
        config=start.model.config,
        adapter=LoRA(rank=4) if moving == "LoRA" else None,
        num_labels=len(classes) if head else None,
    )
    params = model.with_new_parts(start.params, jax.random.key(0))
    encode: Any
    if name == "instruction":
        task = tasks.generation(model, span_length=SPAN)
        encode = functools.partial(
            text.encode_generation,
            max_length=MAX_LENGTH + SPAN,
            template="{text}" + PROMPT,
            answer="label",
            span_length=SPAN,
        )
    else:
        task = tasks.prompt(model, words)
        if moving == "head":
            rows = params["embedding"]["tokens"][jnp.asarray(words)]
            params["classifier"]["output"]["kernel"] = rows.T
            task = tasks.head(model)
        encode = functools.partial(_labelled, classes=classes)
    train, shown = (
        encode(tokenizer, records) for records in (corpus.train, corpus.eval)
    )
    moves = None if moving == "all parameters" else adapter_only
    return Problem(task, params, train, shown, moves)


def _labelled(
    tokenizer: text.Tokenizer, records: Sequence[dict[str, str]], classes: Words
) -> Any:
    batch = text.encode_classification(
        tokenizer, records, max_length=MAX_LENGTH, template="{text}" + PROMPT
    )
    return batch | {"label": text.labels(records, "label", classes)}


class Run(NamedTuple):
    """Accuracy on the public records after the last step."""

    accuracy: float
    seconds: float  # of training alone, without compiling and evaluating


def run(of: Problem, method: Method, epsilon: float | None, seed: int) -> Run:
    """One run, by ``Keys.insecure(seed)``; without ``epsilon`` it is not private."""
    count = len(of.train["tokens"])
    plan = recipes.make_plan(
        method.recipe,
        method.algorithm if epsilon else NOT_PRIVATE[method.algorithm],
        num_examples=count,
        sampling=sampling.TruncatedPoisson(
            sampling_prob=BATCH / count, max_batch_size=ROWS
        ),
        relation=RELATION,
        epsilon=epsilon or 0.0,
        delta=DELTA,
    )
    found = jaxdp.fit(
        plan,
        jaxdp.Keys.insecure(seed),
        of.params,
        of.train,
        value_fn=of.task.value_fn,
        optimizer=recipes.make_optimizer(method.recipe),
        trainable=of.trainable,
        stacked=LanguageModel.is_stacked if method.algorithm == "dpzero" else None,
    )
    return Run(of.accuracy(found.params), found.report["train_seconds"])
