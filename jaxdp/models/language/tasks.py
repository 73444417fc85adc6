"""Fine-tuning tasks of a language model: one loss per record, and predictions.

A batch is a dict of arrays with a leading axis of records, padded to one fixed length L
on the right; :mod:`jaxdp.models.language.text` makes them:

- all tasks: ``tokens`` int32 (B, L), ``mask`` bool (B, L);
- ``prompt``: ``position`` int32 (B,), whose output names the class, and ``label`` (B,);
- ``head``: ``label`` int32 (B,);
- ``choice``: ``tokens``, ``mask`` and ``span`` (B, C, L), ``valid`` bool (B, C) and
  ``label`` (B,): ``span`` marks the tokens of each choice;
- ``generation``: ``span`` bool (B, L) marks the answer.

All losses are float32, read one record each, and perturb lazily.
"""

import dataclasses
import functools
import operator
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.kernels import perturb
from jaxdp.kernels.perturb import At, LazyLoss
from jaxdp.models.language.network import LanguageModel
from jaxdp.models.losses import softmax_cross_entropy

Array = jax.Array
Batch = dict[str, Array]

_NEVER = -1e9  # The score of a choice that is not there.


@dataclasses.dataclass(frozen=True)
class Task:
    """A loss and, for tasks with classes, the scores that it compares.

    Attributes:
      name: ``"prompt"``, ``"head"``, ``"choice"`` or ``"generation"``.
      model: what it tunes.
      value_fn: ``value_fn(params, batch) -> (B,)`` float32, lazy.
      scores: ``scores(params, batch) -> (B, C)`` float32; None for generation.

    Example:
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> task = tasks.generation(LanguageModel(config=tiny_config("opt")), span_length=4)
      >>> task.name, task.scores is None
      ('generation', True)
    """

    name: str
    model: LanguageModel
    value_fn: LazyLoss
    scores: Callable[[Any, Batch], Array] | None = None


def _classes(
    name: str, model: LanguageModel, scores: Callable[[Any, Batch, At], Array]
) -> Task:
    def loss(params: Any, batch: Batch, at: At) -> Array:
        return softmax_cross_entropy(scores(params, batch, at), batch["label"])

    plain = lambda params, batch: scores(params, batch, perturb.identity)  # noqa: E731
    return Task(name, model, LazyLoss(loss), plain)


def prompt(model: LanguageModel, label_words: Sequence[int]) -> Task:
    """Makes the task of classification by the word that the model puts at a position.

    The loss is the cross-entropy over the label words alone: at the mask token for an
    encoder, after the last token of the prompt for a decoder.

    Args:
      model: with its language-model head.
      label_words: a token for each class.

    Raises:
      ValueError: fewer than two words, one twice, or one outside the vocabulary.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> model = LanguageModel(config=tiny_config("opt"))
      >>> task = tasks.prompt(model, label_words=[7, 9])
      >>> params = jax.eval_shape(model.init, jax.random.key(0))  # Shapes alone.
      >>> batch = {
      ...     "tokens": jnp.ones((3, 5), jnp.int32), "mask": jnp.ones((3, 5), bool),
      ...     "position": jnp.full(3, 4), "label": jnp.array([0, 1, 0]),
      ... }
      >>> jax.eval_shape(task.value_fn, params, batch).shape
      (3,)
    """
    words = [operator.index(word) for word in label_words]
    size = model.config.vocab_size
    if len(words) < 2 or len(set(words)) < len(words):
        raise ValueError(
            f"label_words must be two or more different tokens, got {words}"
        )
    if not all(0 <= word < size for word in words):
        raise ValueError(f"label_words must be tokens below {size}, got {words}")
    vocabulary = np.asarray(words, np.int32)

    def scores(params: Any, batch: Batch, at: At) -> Array:
        x = model.hidden(params, batch["tokens"], batch["mask"], at)
        where = batch["position"][:, None, None]
        x = jnp.take_along_axis(x, where, axis=1)[:, 0]
        return model.logits(params, x, at, jnp.asarray(vocabulary))

    return _classes("prompt", model, scores)


def head(model: LanguageModel) -> Task:
    """Makes the task of classification by a head, which reads what ``classify`` says.

    Raises:
      ValueError: the model has no classification head.

    Example:
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> tasks.head(LanguageModel(config=tiny_config("opt"), num_labels=3)).name
      'head'
    """
    if model.num_labels is None:
        raise ValueError("num_labels of the model must be given for a head, got None")

    def scores(params: Any, batch: Batch, at: At) -> Array:
        return model.classify(params, batch["tokens"], batch["mask"], at)

    return _classes("head", model, scores)


def choice(model: LanguageModel, *, span_length: int) -> Task:
    """Makes the task of choice by the mean log-likelihood of each choice's tokens.

    The loss is the cross-entropy over the choices of a record.

    Args:
      model: a decoder.
      span_length: the most tokens that a choice has. A constant, not read from data.

    Example:
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> tasks.choice(LanguageModel(config=tiny_config("opt")), span_length=4).name
      'choice'
    """
    _check_decoder(model, span_length)

    def scores(params: Any, batch: Batch, at: At) -> Array:
        flat = {n: _flat(batch[n]) for n in ("tokens", "mask", "span")}
        mean = _mean_log_likelihood(model, params, flat, span_length, at)
        return jnp.where(batch["valid"], mean.reshape(batch["valid"].shape), _NEVER)

    return _classes("choice", model, scores)


def generation(model: LanguageModel, *, span_length: int) -> Task:
    """Makes the task of generation: the loss is minus the answer's mean log-likelihood.

    Args:
      model: a decoder.
      span_length: the most tokens that an answer has. A constant, not read from data.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> model = LanguageModel(config=tiny_config("opt"))
      >>> task = tasks.generation(model, span_length=4)
      >>> params = jax.eval_shape(model.init, jax.random.key(0))  # Shapes alone.
      >>> mask = jnp.ones((3, 5), bool)
      >>> batch = {"tokens": jnp.ones((3, 5), jnp.int32), "mask": mask, "span": mask}
      >>> jax.eval_shape(task.value_fn, params, batch).shape
      (3,)
    """
    _check_decoder(model, span_length)

    def loss(params: Any, batch: Batch, at: At) -> Array:
        return -_mean_log_likelihood(model, params, batch, span_length, at)

    return Task("generation", model, LazyLoss(loss))


def _check_decoder(model: LanguageModel, span_length: int) -> None:
    validate.integer(span_length=span_length)
    if not model.config.is_decoder:
        raise ValueError(
            "model must be a decoder, whose tokens have a likelihood, got "
            f"{model.config.model_type!r}"
        )


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _mean_log_likelihood(
    model: LanguageModel, params: Any, batch: Batch, span_length: int, at: At
) -> Array:
    """Averages log p(token | those before) over a contiguous span's tokens: (B,)."""
    tokens, span = batch["tokens"], batch["span"]
    x = model.hidden(params, tokens, batch["mask"], at)
    # Logits at the span alone: over the whole vocabulary they are the largest array.
    index = jnp.argmax(span, axis=1)[:, None] + jnp.arange(span_length)
    inside = jnp.minimum(index, tokens.shape[1] - 1)
    counts = (index == inside) & (index > 0)
    counts = counts & jnp.take_along_axis(span, inside, axis=1)
    before = jnp.maximum(inside - 1, 0)
    x = jnp.take_along_axis(x, before[..., None], axis=1)
    targets = jnp.take_along_axis(tokens, inside, axis=1)
    each = -softmax_cross_entropy(model.logits(params, x, at), targets)
    total = jnp.sum(jnp.where(counts, each, 0), axis=1)
    return total / jnp.maximum(jnp.sum(counts, axis=1), 1)


# --- predictions -------------------------------------------------------------------


def predict(
    task: Task, params: Any, data: Batch, *, batch_size: int = 64
) -> np.ndarray:
    """Predicts the class of every record, int (n,), in batches of one size.

    Raises:
      ValueError: the task has no classes.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> config = tiny_config("opt", num_hidden_layers=1)
      >>> model = LanguageModel(config=config, num_labels=2)
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
      >>> data = {"tokens": jnp.ones((3, 5), jnp.int32), "mask": jnp.ones((3, 5), bool)}
      >>> tasks.predict(tasks.head(model), params, data).tolist()
      [0, 0, 0]
    """
    if task.scores is None:
        raise ValueError(f"task must have classes, got {task.name!r}")
    return _in_batches(_predictor(task), params, data, batch_size)


@functools.lru_cache(maxsize=32)  # A run is judged many times.
def _predictor(task: Task) -> Callable[..., Array]:
    scores: Any = task.scores
    return jax.jit(lambda params, batch: jnp.argmax(scores(params, batch), axis=1))


def generate(
    model: LanguageModel,
    params: Any,
    data: Batch,
    *,
    max_new_tokens: int,
    batch_size: int = 16,
) -> np.ndarray:
    """Generates greedy continuations, int32 (n, max_new_tokens), padded after the end.

    Args:
      model: a decoder.
      params: its parameters.
      data: ``tokens`` and ``mask``; what ``span`` marks, an answer, is left out.
      max_new_tokens: the most tokens that are written.
      batch_size: records at once.

    Raises:
      ValueError: no decoder, or a text that would grow longer than the model reads.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> model = LanguageModel(config=tiny_config("opt", num_hidden_layers=1))
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
      >>> data = {"tokens": jnp.ones((3, 5), jnp.int32), "mask": jnp.ones((3, 5), bool)}
      >>> tasks.generate(model, params, data, max_new_tokens=4).shape
      (3, 4)
    """
    _check_decoder(model, max_new_tokens)
    asked = np.asarray(data["mask"])
    if "span" in data:
        asked = asked & ~np.asarray(data["span"])
    longest, limit = int(asked.sum(axis=1).max(initial=0)), model.config.max_length
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens must be at most {limit - longest}, what the longest prompt "
            f"leaves of {limit} tokens, got {max_new_tokens}"
        )
    return _in_batches(_generator(model, max_new_tokens), params, data, batch_size)


@functools.lru_cache(maxsize=32)
def _generator(model: LanguageModel, max_new_tokens: int) -> Callable[..., Array]:
    config, ends = model.config, np.asarray(model.config.ends, np.int32)

    def continued(params: Any, batch: Batch) -> Array:
        mask = batch["mask"] & ~batch["span"] if "span" in batch else batch["mask"]
        rows = jnp.arange(mask.shape[0])
        start = jnp.sum(mask, axis=1)
        more = ((0, 0), (0, max_new_tokens))
        tokens = jnp.where(mask, batch["tokens"], config.padding)
        tokens = jnp.pad(tokens, more, constant_values=config.padding)
        mask = jnp.pad(mask, more)

        def write(i: Array, state: tuple[Array, Array, Array]) -> tuple:
            tokens, mask, done = state
            x = model.hidden(params, tokens, mask)
            last = x[rows, jnp.maximum(start + i - 1, 0)]
            best = jnp.argmax(model.logits(params, last), axis=1).astype(jnp.int32)
            best = jnp.where(done, config.padding, best)
            tokens = tokens.at[rows, start + i].set(best)
            mask = mask.at[rows, start + i].set(~done)
            return tokens, mask, done | jnp.isin(best, ends)

        done = jnp.zeros(mask.shape[0], bool)
        tokens, _, _ = jax.lax.fori_loop(0, max_new_tokens, write, (tokens, mask, done))
        index = start[:, None] + jnp.arange(max_new_tokens)
        return jnp.take_along_axis(tokens, index, axis=1)

    return jax.jit(continued)


def _in_batches(
    program: Callable[..., Array], params: Any, data: Batch, batch_size: int
) -> np.ndarray:
    """Applies ``program`` to slices of one size, the last filled up, and concatenates."""
    validate.integer(batch_size=batch_size)
    count = len(data["tokens"])
    parts = []
    for start in range(0, count, batch_size):
        index = np.minimum(np.arange(start, start + batch_size), count - 1)
        parts.append(
            np.asarray(program(params, {n: x[index] for n, x in data.items()}))
        )
    return np.concatenate(parts)[:count]


# --- metrics -----------------------------------------------------------------------


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Computes the share of predictions that are right.

    Example:
      >>> from jaxdp.models.language import tasks
      >>> tasks.accuracy([0, 1, 1, 0], [0, 1, 0, 0])
      0.75
    """
    return float(np.mean(np.asarray(predictions) == np.asarray(labels)))


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Computes the mean over the classes of their F1 scores.

    Example:
      >>> from jaxdp.models.language import tasks
      >>> round(tasks.macro_f1([0, 1, 1, 0], [0, 1, 0, 0]), 3)
      0.733
    """
    from sklearn.metrics import f1_score

    options: Any = {"average": "macro", "zero_division": 0.0}
    return float(f1_score(labels, predictions, **options))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Computes the F1 of a text's words against the best of some answers, as SQuAD does.

    Rajpurkar et al., `SQuAD <https://arxiv.org/abs/1606.05250>`_, 2016: without case,
    punctuation and articles; words count as often as they stand there.

    Example:
      >>> from jaxdp.models.language import tasks
      >>> tasks.token_f1("The cat.", ["a cat", "one dog"])
      1.0
      >>> round(tasks.token_f1("black cat", ["cat"]), 3)
      0.667
    """
    return max(_f1(_words(prediction), _words(answer)) for answer in answers)


def _words(text: str) -> list[str]:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _f1(one: list[str], other: list[str]) -> float:
    if not one or not other:  # Nothing is right where nothing was asked for.
        return float(one == other)
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other))
