"""The pretrained models, tuned on the private records by slopes and by gradients.

Two tasks are made of the same records. In ``classification`` the encoder names the class by
the likeliest of four words at the prompt's mask. In ``instruction`` the decoder is asked
what a text is about and writes its answer, greedily, from all tokens; an answer counts
where it matches the class exactly.

DPZero takes slopes along random directions, DP-SGD clipped gradients (of LoRA's matrices:
DP-LoRA), both by ``jaxdp.fit`` on batches of one sampler. What moves is the dense layer and
the norm of the encoder's head, LoRA of queries and values, or all parameters. Not private
is a method without its noise. The seed draws directions, noise and batches; data and
initial model stay.

Step sizes were chosen at epsilon 2, and of gradients the number of steps: by single runs, a
factor of two or three apart, judged by a fifth of the private records that was held out. So
was how the decoder is pretrained. Clip and steps of the head come from a few earlier runs,
some judged by the public records: read its accuracies as slightly optimistic. Such choices
are not in a run's epsilon.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import jaxdp
from bench.docstrings.corpus import Corpus
from bench.docstrings.pretraining import SPAN, Pretrained, conversations, encoded
from jaxdp import sampling
from jaxdp.cli import recipes
from jaxdp.cli.recipes import Recipe
from jaxdp.models.language import (
    LanguageModel,
    LoRA,
    adapter_only,
    chats,
    generation,
    tasks,
)

TaskName = Literal["classification", "instruction"]
Moving = Literal["head", "LoRA", "all parameters"]


class Method(NamedTuple):
    """A way to tune a model."""

    algorithm: Any
    moving: Moving
    recipe: Recipe
    batch: int = 48  # expected records of a batch


RELATION, DELTA = "replace_one", 1e-5
#: Without noise and clip a recipe is that of another algorithm.
FREE: dict[str, Any] = {"dpzero": "mezo", "dpgd": "gd"}
#: Rows of a batch over its expected records: more are cut off, which is accounted for.
ROWS = 4 / 3


def _slopes(clip: float, rate: float, num_steps: int, num_directions: int) -> Recipe:
    return Recipe(
        num_steps=num_steps,
        l2_clip_norm=clip,
        learning_rate=rate,
        schedule="cosine",
        num_directions=num_directions,
        direction="rademacher",
    )


def _gradients(rate: float, num_steps: int) -> Recipe:
    return Recipe(
        num_steps=num_steps, l2_clip_norm=1.0, learning_rate=rate, schedule="cosine"
    )


#: Directions of a head cost little: what is below it is computed once.
METHODS: dict[TaskName, dict[str, Method]] = {
    "classification": {
        "DPZero, head": Method("dpzero", "head", _slopes(10.0, 2e-2, 400, 4)),
        "DPZero, LoRA": Method("dpzero", "LoRA", _slopes(3.0, 3e-2, 200, 2)),
        "DPZero, all parameters": Method(
            "dpzero", "all parameters", _slopes(8.0, 3e-3, 200, 2)
        ),
        "DP-LoRA": Method("dpgd", "LoRA", _gradients(0.5, 100)),
    },
    "instruction": {
        "DPZero, LoRA": Method("dpzero", "LoRA", _slopes(3.0, 3e-2, 200, 2)),
        "DP-LoRA": Method("dpgd", "LoRA", _gradients(0.5, 100)),
        "DP-SGD, all parameters": Method("dpgd", "all parameters", _gradients(0.2, 50)),
    },
}


class Problem(NamedTuple):
    """What is tuned, on what, where it starts, and how it is judged."""

    task: tasks.Task
    params: Any
    train: Any  # private records as a batch
    trainable: Callable[[str], bool] | None
    #: Share of public records that are answered rightly.
    accuracy: Callable[[Any], float]


def head_only(path: str) -> bool:
    """``trainable=``: the parts of the encoder's head that are not the table of tokens."""
    return path.startswith(("head/dense/", "head/norm/"))


_TRAINABLE = {"head": head_only, "LoRA": adapter_only, "all parameters": None}


def problem(corpus: Corpus, start: Pretrained, moving: Moving) -> Problem:
    """The task of a pretrained model, with the parts that move."""
    tokenizer, classes = start.tokenizer, corpus.classes
    adapter = LoRA(rank=8) if moving == "LoRA" else None
    model = LanguageModel(config=start.model.config, adapter=adapter)
    train, shown = (
        encoded(tokenizer, records, classes) for records in (corpus.train, corpus.eval)
    )
    if tokenizer.is_decoder:
        task = tasks.instruction(model, span_length=SPAN)
        answers = chats.answers(conversations(tokenizer, corpus.eval))

        def accuracy(params: Any) -> float:
            found = generation.generate(
                model, params, shown, max_new_tokens=SPAN, batch_size=64
            )
            texts = [chats.decode_answer(tokenizer, tokens) for tokens in found]
            pairs = zip(texts, answers, strict=True)
            return float(
                np.mean([tasks.exact_match(x, [answer]) for x, answer in pairs])
            )

    else:
        task = tasks.prompt(model, tokenizer.label_words(classes))

        def accuracy(params: Any) -> float:
            return tasks.accuracy(tasks.predict(task, params, shown), shown["label"])

    params = model.with_new_parts(start.params, jax.random.key(0))
    return Problem(task, params, train, _TRAINABLE[moving], accuracy)


def run(of: Problem, method: Method, epsilon: float | None, seed: int) -> float:
    """Accuracy after a run by ``Keys.insecure(seed)``.

    Without epsilon it has no noise, and with an infinite one no clip either.
    """
    free = epsilon == math.inf
    count = len(of.train["tokens"])
    plan = recipes.make_plan(
        method.recipe,
        FREE[method.algorithm] if free else method.algorithm,
        num_examples=count,
        sampling=sampling.TruncatedPoisson(
            sampling_prob=method.batch / count,
            max_batch_size=round(ROWS * method.batch),
        ),
        relation=RELATION,
        epsilon=epsilon or 1.0,
        delta=DELTA,
    )
    if epsilon is None:
        plan = plan.with_noise(noise_multiplier=0.0)
    found = jaxdp.fit(
        plan,
        jaxdp.Keys.insecure(seed),
        of.params,
        of.train,
        value_fn=of.task.value_fn,
        optimizer=recipes.make_optimizer(method.recipe, of.trainable),
        trainable=of.trainable,
        stacked=LanguageModel.is_stacked if method.algorithm == "dpzero" else None,
    )
    return of.accuracy(found.params)
