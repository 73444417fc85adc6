"""A small decoder in the manner of Llama, made from the public text alone.

Byte-level BPE; token embeddings that start as the leading factors of the tokens' positive
mutual information; then Adam on two losses of windows of text, each with the task's prompt
behind it. The model predicts the next token everywhere in the window. And after the prompt
it predicts words that stand near the window, not in it, what the text is about, and after
such a word the end. Backpropagation is free here, for the text is public.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse
from sklearn.utils.extmath import randomized_svd

from bench.docstrings.corpus import Corpus
from jaxdp.models.language import DecoderConfig, LanguageModel, checkpoint, text

PROMPT = " What is it about?"
MAX_LENGTH = 32  # tokens of window and prompt
SPAN = 2  # tokens of an answer: a word and the end
END = "<end>"  # token 0

CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=4096,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=352,
    max_position_embeddings=2 * MAX_LENGTH,
    eos_token_id=0,
)

BATCH_SIZE = 128
LEARNING_RATE = 2e-3
MIN_WINDOW = 6  # tokens; the longest leaves room for the prompt
NUM_NEAR, NEAR = 8, 64  # words that are predicted, at most so many tokens away
EMBEDDING_STD = 0.1


class Pretrained(NamedTuple):
    """A model, its parameters and its tokenizer."""

    model: LanguageModel
    params: Any
    tokenizer: text.Tokenizer


def train_tokenizer(corpus: Corpus) -> text.Tokenizer:
    """Byte-level BPE of the public text, in which every class is one token."""
    import tokenizers  # An extra.

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    classes = [f" {label}" for label in corpus.classes] * 1000
    backend.train_from_iterator([*corpus.public, *classes], trainer)
    return text.Tokenizer(backend, CONFIG, None)


# --- windows of text ---------------------------------------------------------------


class Windows(NamedTuple):
    """All files as one sequence of tokens, and what a window is put together with."""

    tokens: np.ndarray  # (N,)
    begin: np.ndarray  # (N,): where the file of a token begins
    end: np.ndarray  # (N,)
    words: np.ndarray  # (W,): the tokens that a text may be about
    share: np.ndarray  # (V,): how often a token is drawn as such a word; sums to 1
    weight: np.ndarray  # (V,): how often a token that is drawn counts
    prompt: np.ndarray  # (P,): tokens after a window

    @property
    def room(self) -> int:
        """Tokens of the longest window."""
        return MAX_LENGTH - len(self.prompt)


class Examples(NamedTuple):
    """A batch of windows with the prompt behind them."""

    tokens: np.ndarray  # (B, L + 2): with the first of the words around, and the end
    mask: np.ndarray  # (B, L + 2)
    length: np.ndarray  # (B,): of the window
    last: np.ndarray  # (B,): place of the prompt's last token
    near: np.ndarray  # (B, K): words around
    near_weights: np.ndarray  # (B, K)


def windows(corpus: Corpus, tokenizer: text.Tokenizer) -> Windows:
    """The public text in tokens."""
    encoded = [e.ids for e in tokenizer.backend.encode_batch(corpus.public)]
    files = [np.array(ids, np.int32) for ids in encoded if len(ids) > MAX_LENGTH]
    sizes = np.array([len(file) for file in files])
    tokens, ends = np.concatenate(files), np.cumsum(sizes)
    size = tokenizer.config.vocab_size
    pieces = [tokenizer.backend.id_to_token(i) or "" for i in range(size)]
    # A space, and four letters or more.
    word = np.array(
        [p[1:].isalpha() and p[0] == "\u0120" and len(p) > 4 for p in pieces]
    )
    count = np.bincount(tokens, minlength=size)
    # Frequent words say little: they count less, as Mikolov et al., 2013, have it.
    weight = word * np.minimum(1, np.sqrt(1e-3 * len(tokens) / np.maximum(count, 1)))
    share = weight * count / np.sum(weight * count)
    return Windows(
        tokens,
        np.repeat(ends - sizes, sizes),
        np.repeat(ends, sizes),
        np.flatnonzero(share),
        share,
        weight,
        np.array(tokenizer.encode(PROMPT)),
    )


def draw(of: Windows, rng: np.random.Generator) -> Examples:
    """Windows of random places and lengths, with words around them."""
    rows = np.arange(BATCH_SIZE)[:, None]
    length = rng.integers(MIN_WINDOW, of.room + 1, size=(BATCH_SIZE, 1))
    first = rng.integers(len(of.tokens), size=(BATCH_SIZE, 1))
    begin, end = of.begin[first], of.end[first]
    first = np.minimum(first, end - length)
    inside = np.arange(of.room) < length
    window = of.tokens[np.minimum(first + np.arange(of.room), len(of.tokens) - 1)]
    tokens = np.full((BATCH_SIZE, MAX_LENGTH + SPAN), CONFIG.padding, np.int32)
    tokens[:, : of.room] = np.where(inside, window, CONFIG.padding)
    tokens[rows, length + np.arange(len(of.prompt))] = of.prompt
    last = length + len(of.prompt) - 1

    away = rng.integers(1, NEAR + 1, size=(BATCH_SIZE, NUM_NEAR))
    before = rng.random(away.shape) < 0.5
    place = np.where(before, first - away, first + length - 1 + away)
    there = (place >= begin) & (place < end)
    place = np.where(there, place, first)
    near_weights = (there * of.weight[of.tokens[place]]).astype(np.float32)
    near = of.tokens[place]
    tokens[rows, last + 1] = near[:, :1]
    mask = np.arange(tokens.shape[1]) <= last + 1
    return Examples(tokens, mask, length[:, 0], last[:, 0], near, near_weights)


def embeddings(of: Windows, width: int) -> np.ndarray:
    """Factors of the tokens' positive pointwise mutual information: (V, width).

    Tokens count as together where they share one of the windows that cover the text.
    Levy and Goldberg, `Neural word embedding as implicit matrix factorization
    <https://papers.nips.cc/paper/5477>`_, 2014.
    """
    size = len(of.share)
    number = np.arange(len(of.tokens)) // of.room
    shared = scipy.sparse.csr_matrix(
        (np.ones(len(of.tokens), np.float32), (number, of.tokens)),
        shape=(int(number[-1]) + 1, size),
    )
    shared.data[:] = 1
    together = (shared.T @ shared).toarray()
    np.fill_diagonal(together, 0)
    marginal = together.sum(axis=0) + 1
    with np.errstate(divide="ignore"):
        information = np.log(together * marginal.sum() / np.outer(marginal, marginal))
    vectors, values, _ = randomized_svd(
        np.maximum(information, 0).astype(np.float32), width, random_state=0
    )
    factors = vectors * np.sqrt(values)
    return factors * (EMBEDDING_STD / np.sqrt(np.mean(factors**2)))


# --- training ----------------------------------------------------------------------


def loss(model: LanguageModel, of: Windows, params: Any, batch: Examples) -> jax.Array:
    """Cross-entropy of the next tokens, and of the words around after the prompt.

    The latter's logits say how much more often than elsewhere a word stands around: what
    all texts have in common is no part of them.
    """
    x = model.hidden(params, batch.tokens, batch.mask)  # pyright: ignore
    following = optax.softmax_cross_entropy_with_integer_labels(
        model.logits(params, x[:, : of.room - 1]), batch.tokens[:, 1 : of.room]
    )
    there = jnp.arange(1, of.room) < batch.length[:, None]
    index = batch.last[:, None, None] + jnp.arange(SPAN)[:, None]
    asked, word = jnp.unstack(jnp.take_along_axis(x, index, axis=1), axis=1)
    ends = jax.nn.log_softmax(model.logits(params, word))[:, CONFIG.ends[0]]
    logits = model.logits(params, asked, vocabulary=jnp.asarray(of.words))
    logs = jax.nn.log_softmax(logits + np.log(of.share[of.words]))
    index = np.zeros(len(of.share), np.int32)
    index[of.words] = np.arange(len(of.words))
    near = jnp.take_along_axis(logs, jnp.asarray(index)[batch.near], axis=1)
    near = _mean(near, batch.near_weights) + _mean(ends, batch.near_weights[:, 0] > 0)
    return _mean(following, there) - near


def _mean(x: jax.Array, weights: Any) -> jax.Array:
    return jnp.sum(x * weights) / jnp.sum(weights)


def pretrain(
    corpus: Corpus,
    folder: pathlib.Path,
    *,
    num_steps: int,
    progress: Callable[[int, float], None] = lambda step, value: None,
) -> Pretrained:
    """Makes tokenizer and model and leaves both in a folder in Hugging Face's layout.

    Args:
      corpus: only its public text is read, and the names of its classes.
      folder: is made.
      num_steps: of Adam.
      progress: called with every step and its loss.

    """
    tokenizer = train_tokenizer(corpus)
    of, model = windows(corpus, tokenizer), LanguageModel(config=CONFIG)
    rng = np.random.default_rng(0)
    params = model.init(jax.random.key(0))
    params["embedding"]["tokens"] = jnp.asarray(embeddings(of, CONFIG.hidden_size))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, max(1, num_steps // 20), num_steps, LEARNING_RATE / 20
    )
    optimizer = optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Examples) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(lambda p: loss(model, of, p, batch))(
            params
        )
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    for i in range(num_steps):
        params, state, value = step(params, state, draw(of, rng))
        progress(i + 1, float(value))
    checkpoint.save(folder, CONFIG, params)
    tokenizer.save(folder)
    return Pretrained(model, params, tokenizer)
