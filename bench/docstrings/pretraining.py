"""A small RoBERTa, made from the public text alone.

Byte-level BPE; token embeddings that start as the leading factors of the tokens' positive
mutual information; then Adam on two losses of windows of text, each in the task's prompt,
"About <mask>: window". Some tokens of the window are masked and predicted, as RoBERTa does
it. And at the prompt's mask token the model predicts words that stand near the window, not
in it: what the text is about. Backpropagation is free here, for the text is public.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse
import scipy.sparse.linalg

from bench.docstrings.corpus import Corpus
from jaxdp.models.language import LanguageModel, RobertaConfig, checkpoint, text

TEMPLATE = "About {mask}: {text}"
MAX_LENGTH = 32
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # tokens 0 to 4

CONFIG = RobertaConfig(
    vocab_size=4096,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=512,
    max_position_embeddings=MAX_LENGTH + 2,
    bos_token_id=0,
    pad_token_id=1,
    eos_token_id=2,
)

BATCH_SIZE = 128
LEARNING_RATE = 1e-3
MIN_WINDOW = 6  # tokens; the longest fills the template
MASKED = 0.15  # share of a window's tokens
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
        special_tokens=[*SPECIAL],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    classes = [f" {label}" for label in corpus.classes] * 1000
    backend.train_from_iterator([*corpus.public, *classes], trainer)
    return text.Tokenizer(backend, CONFIG, SPECIAL.index("<mask>"))


# --- windows of text ---------------------------------------------------------------


class Windows(NamedTuple):
    """All files as one sequence of tokens, and how to put a window into the prompt."""

    tokens: np.ndarray  # (N,)
    begin: np.ndarray  # (N,): where the file of a token begins
    end: np.ndarray  # (N,)
    words: np.ndarray  # (W,): the tokens that a text may be about
    share: np.ndarray  # (V,): how often a token is drawn as such a word; sums to 1
    weight: np.ndarray  # (V,): how often a token that is drawn counts
    start: tuple[int, ...]  # tokens before a window
    position: int  # of the mask token
    vocab_size: int

    @property
    def room(self) -> int:
        """Tokens of the longest window."""
        return MAX_LENGTH - len(self.start) - 1


class Examples(NamedTuple):
    """A batch of windows."""

    tokens: np.ndarray  # (B, L)
    mask: np.ndarray  # (B, L)
    positions: np.ndarray  # (B, M): of masked tokens
    targets: np.ndarray  # (B, M)
    weights: np.ndarray  # (B, M): 1 where there is one
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
    example = text.encode_classification(
        tokenizer, [{"text": ""}], max_length=MAX_LENGTH, template=TEMPLATE
    )
    prompt = example["tokens"][0][example["mask"][0]][:-1]
    return Windows(
        tokens,
        np.repeat(ends - sizes, sizes),
        np.repeat(ends, sizes),
        np.flatnonzero(share),
        share,
        weight,
        tuple(int(token) for token in prompt),
        int(example["position"][0]),
        size,
    )


def draw(of: Windows, rng: np.random.Generator) -> Examples:
    """Windows of random places and lengths, masked, with words around them."""
    rows = np.arange(BATCH_SIZE)[:, None]
    length = rng.integers(MIN_WINDOW, of.room + 1, size=(BATCH_SIZE, 1))
    first = rng.integers(len(of.tokens), size=(BATCH_SIZE, 1))
    begin, end = of.begin[first], of.end[first]
    first = np.minimum(first, end - length)
    inside = np.arange(of.room) < length
    window = of.tokens[np.minimum(first + np.arange(of.room), len(of.tokens) - 1)]

    offset = len(of.start)
    pad: Any = CONFIG.pad_token_id
    end_of_text: Any = CONFIG.eos_token_id
    tokens = np.full((BATCH_SIZE, MAX_LENGTH), pad, np.int32)
    tokens[:, :offset] = of.start
    tokens[:, offset:-1] = np.where(inside, window, pad)
    tokens[rows, offset + length] = end_of_text
    mask = np.arange(MAX_LENGTH) <= offset + length

    # The tokens with the smallest of uniform numbers; of short windows fewer.
    most = int(np.ceil(MASKED * of.room))
    order = np.argsort(np.where(inside, rng.random(inside.shape), 2), axis=1)
    positions = order[:, :most] + offset
    weights = np.arange(most) < np.maximum(1, np.round(MASKED * length))
    targets = tokens[rows, positions]
    # As BERT: 80% become the mask token, 10% any token, 10% stay.
    kind = rng.random(positions.shape)
    other = rng.integers(len(SPECIAL), of.vocab_size, size=positions.shape)
    shown = np.where(kind < 0.8, SPECIAL.index("<mask>"), other)
    tokens[rows, positions] = np.where(weights & (kind < 0.9), shown, targets)

    away = rng.integers(1, NEAR + 1, size=(BATCH_SIZE, NUM_NEAR))
    before = rng.random(away.shape) < 0.5
    place = np.where(before, first - away, first + length - 1 + away)
    there = (place >= begin) & (place < end)
    place = np.where(there, place, first)
    near_weights = there * of.weight[of.tokens[place]]
    return Examples(
        tokens,
        mask,
        positions,
        targets,
        weights.astype(np.float32),
        of.tokens[place],
        near_weights.astype(np.float32),
    )


def embeddings(of: Windows, width: int) -> np.ndarray:
    """Factors of the tokens' positive pointwise mutual information: (V, width).

    Tokens count as together where they share one of the windows that cover the text.
    Levy and Goldberg, `Neural word embedding as implicit matrix factorization
    <https://papers.nips.cc/paper/5477>`_, 2014.
    """
    size = of.vocab_size
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
    start = np.random.default_rng(0).normal(size=size).astype(np.float32)
    vectors, values, _ = scipy.sparse.linalg.svds(
        np.maximum(information, 0).astype(np.float32), k=width, v0=start
    )
    factors = vectors * np.sqrt(values)
    return factors * (EMBEDDING_STD / np.sqrt(np.mean(factors**2)))


# --- training ----------------------------------------------------------------------


def loss(model: LanguageModel, of: Windows, params: Any, batch: Examples) -> jax.Array:
    """Cross-entropy of the masked tokens, and of the words around at the prompt's mask.

    The latter's logits say how much more often than elsewhere a word stands around: what
    all texts have in common is no part of them.
    """
    x = model.hidden(params, batch.tokens, batch.mask)  # pyright: ignore

    def at(positions: Any) -> jax.Array:
        return jnp.take_along_axis(x, positions[..., None], axis=1)

    masked = optax.softmax_cross_entropy_with_integer_labels(
        model.logits(params, at(batch.positions)), batch.targets
    )
    prompt = jnp.full((len(batch.tokens), 1), of.position)
    words = jnp.asarray(of.words)
    logits = model.logits(params, at(prompt), vocabulary=words)[:, 0]
    logs = jax.nn.log_softmax(logits + np.log(of.share[of.words]))
    index = np.zeros(of.vocab_size, np.int32)
    index[of.words] = np.arange(len(of.words))
    near = jnp.take_along_axis(logs, jnp.asarray(index)[batch.near], axis=1)
    return _mean(masked, batch.weights) - _mean(near, batch.near_weights)


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
    params = centred(model, params, draw(of, rng), of.position)
    checkpoint.save(folder, CONFIG, params)
    tokenizer.save(folder)
    return Pretrained(model, params, tokenizer)


def centred(model: LanguageModel, params: Any, batch: Examples, position: int) -> Any:
    """The same function, with hidden states at the prompt's mask whose mean is zero.

    What all texts have in common moves from the states to the biases behind them. It makes
    up most of a state, and every direction of a weight behind it would shift all records'
    scores together: the steepest direction by far, of which there is nothing to learn.
    """
    head, norm = dict(params["head"]), dict(params["layers"]["mlp_norm"])
    states = model.hidden(params, batch.tokens, batch.mask)[:, position]  # pyright: ignore
    mean = jnp.mean(states, axis=0)
    norm["bias"] = norm["bias"].at[-1].add(-mean)
    shift = mean @ head["dense"]["kernel"]
    head["dense"] = head["dense"] | {"bias": head["dense"]["bias"] + shift}
    # With unit vectors for words, the scores are what the head's norm puts out.
    words = {"tokens": jnp.eye(len(mean))}
    plain = params["head"] | {"bias": jnp.zeros(len(mean))}
    outputs = model.logits({"embedding": words, "head": plain}, states)
    mean = jnp.mean(outputs, axis=0)
    head["norm"] = head["norm"] | {"bias": head["norm"]["bias"] - mean}
    head["bias"] = head["bias"] + params["embedding"]["tokens"] @ mean
    return params | {"head": head, "layers": params["layers"] | {"mlp_norm": norm}}


def encoded(
    tokenizer: text.Tokenizer, records: Sequence[dict[str, str]], classes: Sequence[str]
) -> dict[str, np.ndarray]:
    """Records as a batch for the task ``prompt``."""
    batch = text.encode_classification(
        tokenizer, records, max_length=MAX_LENGTH, template=TEMPLATE
    )
    return batch | {"label": text.labels(records, "label", classes)}
