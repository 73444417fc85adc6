"""Fine-tuning tasks of a language model: one loss per record, and predictions.

A batch is a dict of arrays with a leading axis of records, padded to one fixed length L
on the right; :mod:`jaxdp.models.language.text` makes them:

- all tasks: ``tokens`` int32 (B, L), ``mask`` bool (B, L);
- ``prompt``: ``position`` int32 (B,), whose output names the class, and ``label`` (B,);
- ``head``: ``label`` int32 (B,);
- ``choice``: ``tokens``, ``mask`` and ``span`` (B, C, L), ``valid`` bool (B, C) and
  ``label`` (B,): ``span`` marks the tokens of each choice;
- ``generation`` and ``instruction``: ``span`` bool (B, L) marks the answer, or the tokens
  of several;
- ``preference``: ``tokens``, ``mask`` and ``span`` (B, 2, L), of the chosen text and the
  rejected one, and ``reference`` float32 (B, 2): their log-likelihoods before the run.

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
from jaxdp.models.language._batches import in_batches
from jaxdp.models.language.config import check_decoder
from jaxdp.models.language.network import LanguageModel
from jaxdp.models.losses import softmax_cross_entropy

Array = jax.Array
Batch = dict[str, Array]

_NEVER = -1e9  # The score of a choice that is not there.
_OF_TEXTS = ("tokens", "mask", "span")  # What likelihoods are made of.


@dataclasses.dataclass(frozen=True)
class Task:
    """A loss and, for tasks with classes, the scores that it compares.

    Attributes:
      name: ``"prompt"``, ``"head"``, ``"choice"``, ``"generation"``, ``"instruction"`` or
        ``"preference"``.
      model: what it tunes.
      value_fn: ``value_fn(params, batch) -> (B,)`` float32, lazy.
      scores: ``scores(params, batch) -> (B, C)`` float32; None where texts are written.
      likelihood: ``likelihood(params, batch)``, where answers are tokens of any text: their
        log-likelihood and their number, (B,) each, or (B, 2) of pairs; None for others.

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
    likelihood: Callable[[Any, Batch], tuple[Array, Array]] | None = None


def _classes(
    name: str, model: LanguageModel, scores: Callable[[Any, Batch, At], Array]
) -> Task:
    def loss(params: Any, batch: Batch, at: At) -> Array:
        label = batch["label"]
        losses = softmax_cross_entropy(scores(params, batch, at), jnp.maximum(label, 0))
        return jnp.where(label < 0, jnp.nan, losses)  # Of no class: counts zero.

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
        flat = {n: _flat(batch[n]) for n in _OF_TEXTS}
        mean = _mean(*_log_likelihood(model, params, flat, span_length, at))
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
        return -_mean(*_log_likelihood(model, params, batch, span_length, at))

    def likelihood(params: Any, batch: Batch) -> tuple[Array, Array]:
        return _log_likelihood(model, params, batch, span_length, perturb.identity)

    return Task("generation", model, LazyLoss(loss), likelihood=likelihood)


def instruction(model: LanguageModel, *, span_length: int) -> Task:
    """Makes the task of answering as the assistant does, in conversations of any turns.

    The loss of a record is minus the mean log-likelihood of its own answers' tokens, which
    ``span`` marks anywhere: of a record without any it is 0. No other record's tokens count
    in it, nor a number of the batch.

    Args:
      model: a decoder.
      span_length: the most tokens of answers that a record has; logits are taken at them
        alone. A constant, not read from data.

    Example:
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> tasks.instruction(LanguageModel(config=tiny_config("opt")), span_length=4).name
      'instruction'
    """
    task = generation(model, span_length=span_length)
    return dataclasses.replace(task, name="instruction")


def preference(
    model: LanguageModel,
    *,
    span_length: int,
    beta: float = 0.1,
    reference_free: bool = False,
) -> Task:
    r"""Makes the task of preferring one text to another, by likelihoods alone.

    Rafailov et al., `Direct Preference Optimization <https://arxiv.org/abs/2305.18290>`_,
    2023. The loss of a record, which is one pair, is

    .. math:: -\log \sigma\Bigl(\beta \Bigl(\log\frac{\pi(y_+ | x)}{\pi_0(y_+ | x)}
        - \log\frac{\pi(y_- | x)}{\pi_0(y_- | x)}\Bigr)\Bigr)

    with log-likelihoods summed over a text's tokens. Those of :math:`\pi_0`, the model
    before the run, are two numbers of the record, ``reference``, which
    :func:`log_likelihoods` computes once. They are as private as the record, and are in
    nothing that a run releases. The loss is bounded by nothing: as for every task, what
    enters a release is clipped record by record, so the plan's sensitivity holds for any
    beta.

    Args:
      model: a decoder.
      span_length: the most tokens that a text has. A constant, not read from data.
      beta: how much a change of likelihood counts.
      reference_free: leave :math:`\pi_0` out; a batch needs no ``reference``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> model = LanguageModel(config=tiny_config("opt"))
      >>> task = tasks.preference(model, span_length=4, beta=0.5)
      >>> params = jax.eval_shape(model.init, jax.random.key(0))  # Shapes alone.
      >>> mask = jnp.ones((3, 2, 5), bool)
      >>> batch = {"tokens": jnp.ones((3, 2, 5), jnp.int32), "mask": mask, "span": mask}
      >>> batch["reference"] = jnp.zeros((3, 2))
      >>> jax.eval_shape(task.value_fn, params, batch).shape
      (3,)
    """
    _check_decoder(model, span_length)
    validate.positive(beta=beta)

    def found(params: Any, batch: Batch, at: At) -> tuple[Array, Array]:
        flat = {n: _flat(batch[n]) for n in _OF_TEXTS}  # One forward.
        both = _log_likelihood(model, params, flat, span_length, at)
        return both[0].reshape(-1, 2), both[1].reshape(-1, 2)

    def scores(params: Any, batch: Batch, at: At) -> Array:
        total, _ = found(params, batch, at)
        return beta * (total if reference_free else total - batch["reference"])

    def loss(params: Any, batch: Batch, at: At) -> Array:
        both = scores(params, batch, at)
        return softmax_cross_entropy(both, jnp.zeros(len(both), jnp.int32))

    return Task(
        "preference",
        model,
        LazyLoss(loss),
        scores=lambda params, batch: scores(params, batch, perturb.identity),
        likelihood=lambda params, batch: found(params, batch, perturb.identity),
    )


def log_likelihoods(
    task: Task, params: Any, data: Batch, *, batch_size: int = 64
) -> np.ndarray:
    """Computes the log-likelihood of every record's answer, or of both texts of a pair.

    Returns:
      float32 (n,), or (n, 2) for a task of :func:`preference`, in batches of one size:
      the same parameters and records have the same bits whenever they are asked.

    Raises:
      ValueError: a task of classes.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> model = LanguageModel(config=tiny_config("opt", num_hidden_layers=1))
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
      >>> mask = jnp.ones((3, 2, 5), bool)
      >>> data = {"tokens": jnp.ones((3, 2, 5), jnp.int32), "mask": mask, "span": mask}
      >>> task = tasks.preference(model, span_length=5)
      >>> found = tasks.log_likelihoods(task, params, data)
      >>> found.shape, bool(np.allclose(found, -4 * np.log(model.config.vocab_size)))
      ((3, 2), True)
    """
    return _sums(task, params, data, batch_size)[0]


def _check_decoder(model: LanguageModel, span_length: int) -> None:
    validate.integer(span_length=span_length)
    check_decoder(model.config)


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _log_likelihood(
    model: LanguageModel, params: Any, batch: Batch, span_length: int, at: At
) -> tuple[Array, Array]:
    """Sums log p(token | those before) over a span's tokens, and counts them: (B,)."""
    tokens, span = batch["tokens"], batch["span"]
    x = model.hidden(params, tokens, batch["mask"], at)
    # Logits at the span alone: over the whole vocabulary they are the largest array.
    length = tokens.shape[1]
    index = jnp.sort(jnp.where(span, jnp.arange(length), length), axis=1)
    index = index[:, :span_length]
    inside = jnp.minimum(index, length - 1)
    counts = (index == inside) & (index > 0)
    before = jnp.maximum(inside - 1, 0)
    x = jnp.take_along_axis(x, before[..., None], axis=1)
    targets = jnp.take_along_axis(tokens, inside, axis=1)
    each = -softmax_cross_entropy(model.logits(params, x, at), targets)
    return jnp.sum(jnp.where(counts, each, 0), axis=1), jnp.sum(counts, axis=1)


def _mean(total: Array, count: Array) -> Array:
    return total / jnp.maximum(count, 1)


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
    return in_batches(_predictor(task), params, data, batch_size)


@functools.lru_cache(maxsize=32)  # A run is judged many times.
def _predictor(task: Task) -> Callable[..., Array]:
    scores: Any = task.scores
    return jax.jit(lambda params, batch: jnp.argmax(scores(params, batch), axis=1))


def perplexity(
    task: Task,
    params: Any,
    data: Batch,
    *,
    batch_size: int = 16,
    progress: bool = False,
) -> float:
    """Computes the perplexity of the answers: exp(-mean log p(token | those before)).

    The mean is over all tokens of all records, so a record counts by its answer's length.
    (The loss of a record is minus its own mean.) It is infinite where float64 ends, and NaN
    if a likelihood is.

    Args:
      task: of :func:`generation` or :func:`instruction`.
      params: the parameters.
      data: ``tokens``, ``mask`` and ``span``.
      batch_size: records at once.
      progress: whether to draw a progress bar.

    Raises:
      ValueError: another task, or no answer has a token.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, tasks, tiny_config
      >>> model = LanguageModel(config=tiny_config("opt", num_hidden_layers=1))
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
      >>> mask = jnp.ones((3, 5), bool)
      >>> data = {"tokens": jnp.ones((3, 5), jnp.int32), "mask": mask, "span": mask}
      >>> round(tasks.perplexity(tasks.generation(model, span_length=5), params, data))
      50
    """
    said = "likelihoods" if progress else ""
    total, count = _sums(task, params, data, batch_size, said)
    if not count.sum():
        raise ValueError("data must have answers of one token or more, got none")
    mean = total.sum(dtype=np.float64) / count.sum()
    with np.errstate(over="ignore"):
        return float(np.exp(-mean))


def _sums(
    task: Task, params: Any, data: Batch, batch_size: int, said: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Computes log-likelihoods of answers, and how many tokens these have."""
    if task.likelihood is None:
        raise ValueError(f"task must be one of texts, got {task.name!r}")
    data = {name: data[name] for name in _OF_TEXTS}
    return in_batches(_likelihoods(task), params, data, batch_size, said)


@functools.lru_cache(maxsize=32)
def _likelihoods(task: Task) -> Callable[..., tuple[Array, Array]]:
    likelihood: Any = task.likelihood
    return jax.jit(likelihood)


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


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Computes 1.0 if a text has the words of one of some answers, else 0.0.

    In their order; as SQuAD does, without case, punctuation and articles.

    Example:
      >>> from jaxdp.models.language import tasks
      >>> tasks.exact_match("The cat.", ["a cat", "one dog"])
      1.0
      >>> tasks.exact_match("black cat", ["cat"])
      0.0
    """
    return float(_words(prediction) in [_words(answer) for answer in answers])


def _words(text: str) -> list[str]:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _f1(one: list[str], other: list[str]) -> float:
    if not one or not other:  # Nothing is right where nothing was asked for.
        return float(one == other)
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other))
