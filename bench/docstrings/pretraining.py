"""Two small models, made from the public text alone: a RoBERTa and a Llama.

Byte-level BPE; token embeddings that start as the leading factors of the tokens' positive
mutual information; then Adam on two losses of windows of text. One predicts tokens of the
window: RoBERTa those that are masked, Llama the next ones. The other predicts words that
stand near the window, not in it: what the text is about. RoBERTa does so at the mask token
of the prompt, "About <mask>: window"; Llama after the question, "window What is it about?",
and after such a word it predicts the end. Backpropagation is free here, for the text is
public.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse
import scipy.sparse.linalg

from bench.docstrings.corpus import Corpus
from jaxdp.models.language import (
    Config,
    DecoderConfig,
    LanguageModel,
    RobertaConfig,
    chats,
    checkpoint,
    text,
)

TEMPLATE = "About {mask}: {text}"  # of the encoder
QUESTION = " What is it about?"  # to the decoder
#: A conversation, whose answer ends with the end token.
CHAT = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
)
MAX_LENGTH = 32  # tokens of a record: of a conversation without its answer
SPAN = 2  # tokens of an answer: a word and the end
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # tokens 0 to 4

_SHARED: Any = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: Mapping[str, Config] = {
    "encoder": RobertaConfig(
        **_SHARED, intermediate_size=512, max_position_embeddings=MAX_LENGTH + 2
    ),
    "decoder": DecoderConfig(
        **_SHARED,
        model_type="llama",
        intermediate_size=352,
        num_key_value_heads=2,
        max_position_embeddings=2 * MAX_LENGTH,
    ),
}

BATCH_SIZE = 128
LEARNING_RATES = {"roberta": 1e-3, "llama": 2e-3}
MIN_WINDOW = 6  # tokens; the longest fills the template
PREDICTED = 0.15  # share of a window's tokens
NUM_NEAR, NEAR = 32, 64  # words that are predicted, at most so many tokens away
EMBEDDING_STD = 0.1


class Pretrained(NamedTuple):
    """A model, its parameters and its tokenizer."""

    model: LanguageModel
    params: Any
    tokenizer: text.Tokenizer


def train_tokenizer(corpus: Corpus, config: Config) -> text.Tokenizer:
    """Byte-level BPE of the public text, in which every class is one token."""
    import tokenizers  # An extra.

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[*SPECIAL],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    classes = [f" {label}" for label in corpus.classes] * 1000
    backend.train_from_iterator([*corpus.public, *classes], trainer)
    if config.is_decoder:
        return text.Tokenizer(backend, config, None, CHAT)
    return text.Tokenizer(backend, config, SPECIAL.index("<mask>"))


# --- windows of text ---------------------------------------------------------------


class Windows(NamedTuple):
    """All files as one sequence of tokens, and what stands around a window of them."""

    tokens: np.ndarray  # (N,)
    begin: np.ndarray  # (N,): where the file of a token begins
    end: np.ndarray  # (N,)
    words: np.ndarray  # (W,): the tokens that are told from one another
    share: np.ndarray  # (V,): how often a token is drawn as such a word
    weight: np.ndarray  # (V,): how often a token that is drawn counts
    before: np.ndarray  # tokens before a window
    after: np.ndarray  # tokens after it
    config: Config

    @property
    def room(self) -> int:
        """Tokens of the longest window."""
        return MAX_LENGTH - len(self.before) - len(self.after)


class Examples(NamedTuple):
    """A batch of windows."""

    tokens: np.ndarray  # (B, L)
    mask: np.ndarray  # (B, L)
    positions: np.ndarray  # (B, M): where tokens are predicted
    targets: np.ndarray  # (B, M)
    weights: np.ndarray  # (B, M): 1 where there is one
    asked: np.ndarray  # (B, 1): where the words around are predicted
    near: np.ndarray  # (B, K): words around
    near_weights: np.ndarray  # (B, K)


def windows(corpus: Corpus, tokenizer: text.Tokenizer) -> Windows:
    """The public text in tokens."""
    encoded = [e.ids for e in tokenizer.backend.encode_batch(corpus.public)]
    files = [np.array(ids, np.int32) for ids in encoded if len(ids) > MAX_LENGTH]
    sizes = np.array([len(file) for file in files])
    tokens, ends = np.concatenate(files), np.cumsum(sizes)
    config = tokenizer.config
    size = config.vocab_size
    pieces = [tokenizer.backend.id_to_token(i) or "" for i in range(size)]
    # A space, and four letters or more.
    word = np.array(
        [p[1:].isalpha() and p[0] == "\u0120" and len(p) > 4 for p in pieces]
    )
    count = np.bincount(tokens, minlength=size)
    # Frequent words say little: they count less, as Mikolov et al., 2013, have it.
    weight = word * np.minimum(1, np.sqrt(1e-3 * len(tokens) / np.maximum(count, 1)))
    share = weight * count / np.sum(weight * count)
    if config.is_decoder:  # It writes, so it learns that no other token is an answer.
        share = np.where(share > 0, share, 1 / size)
        before, after = [], tokenizer.encode(QUESTION)
    else:
        batch = text.encode_classification(
            tokenizer, [{"text": ""}], max_length=MAX_LENGTH, template=TEMPLATE
        )
        *before, end = batch["tokens"][0][batch["mask"][0]]
        after = [end]
    return Windows(
        tokens,
        np.repeat(ends - sizes, sizes),
        np.repeat(ends, sizes),
        np.flatnonzero(share),
        share,
        weight,
        np.array(before, np.int32),
        np.array(after, np.int32),
        config,
    )


def draw(of: Windows, rng: np.random.Generator) -> Examples:
    """Windows of random places and lengths, with words around them."""
    rows, config = np.arange(BATCH_SIZE)[:, None], of.config
    length = rng.integers(MIN_WINDOW, of.room + 1, size=(BATCH_SIZE, 1))
    first = rng.integers(len(of.tokens), size=(BATCH_SIZE, 1))
    begin, end = of.begin[first], of.end[first]
    first = np.minimum(first, end - length)
    inside = np.arange(of.room) < length
    window = of.tokens[np.minimum(first + np.arange(of.room), len(of.tokens) - 1)]

    away = rng.integers(1, NEAR + 1, size=(BATCH_SIZE, NUM_NEAR))
    side = rng.random(away.shape) < 0.5
    place = np.where(side, first - away, first + length - 1 + away)
    there = (place >= begin) & (place < end)
    place = np.where(there, place, first)
    near, near_weights = of.tokens[place], there * of.weight[of.tokens[place]]

    offset, behind = len(of.before), len(of.before) + length
    answer = SPAN if config.is_decoder else 0
    tokens = np.full((BATCH_SIZE, MAX_LENGTH + answer), config.padding, np.int32)
    tokens[:, :offset] = of.before
    tokens[:, offset : offset + of.room] = np.where(inside, window, config.padding)
    tokens[rows, behind + np.arange(len(of.after))] = of.after
    last = behind + len(of.after) - 1

    # The tokens with the smallest of uniform numbers; of short windows fewer.
    most = int(np.ceil(PREDICTED * of.room))
    order = np.argsort(np.where(inside, rng.random(inside.shape), 2), axis=1)
    positions = order[:, :most] + offset
    weights = np.arange(most) < np.maximum(1, np.round(PREDICTED * length))
    if config.is_decoder:
        asked = last
        tokens[rows, last + 1], tokens[rows, last + 2] = near[:, :1], config.ends[0]
        weights &= positions + 1 < behind  # the next token is in the window
        positions = np.concatenate([positions, last + 1], axis=1)  # before the end
        weights = np.concatenate([weights, near_weights[:, :1] > 0], axis=1)
        targets = tokens[rows, positions + 1]
    else:
        asked = np.full((BATCH_SIZE, 1), [*of.before].index(SPECIAL.index("<mask>")))
        targets = tokens[rows, positions]
        # As BERT: 80% become the mask token, 10% any token, 10% stay.
        kind = rng.random(positions.shape)
        other = rng.integers(len(SPECIAL), config.vocab_size, size=positions.shape)
        shown = np.where(kind < 0.8, SPECIAL.index("<mask>"), other)
        tokens[rows, positions] = np.where(weights & (kind < 0.9), shown, targets)
    return Examples(
        tokens,
        np.arange(tokens.shape[1]) <= last + answer,
        positions,
        targets,
        weights.astype(np.float32),
        asked,
        near,
        near_weights.astype(np.float32),
    )


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
    start = np.random.default_rng(0).normal(size=size).astype(np.float32)
    vectors, values, _ = scipy.sparse.linalg.svds(
        np.maximum(information, 0).astype(np.float32), k=width, v0=start
    )
    factors = vectors * np.sqrt(values)
    return factors * (EMBEDDING_STD / np.sqrt(np.mean(factors**2)))


# --- training ----------------------------------------------------------------------


def loss(model: LanguageModel, of: Windows, params: Any, batch: Examples) -> jax.Array:
    """Cross-entropy of the predicted tokens, and of the words around where they are asked.

    The latter's logits say how much more often than elsewhere a word stands around: what
    all texts have in common is no part of them.
    """
    x = model.hidden(params, batch.tokens, batch.mask)  # pyright: ignore

    def at(positions: Any) -> jax.Array:
        return jnp.take_along_axis(x, positions[..., None], axis=1)

    predicted = optax.softmax_cross_entropy_with_integer_labels(
        model.logits(params, at(batch.positions)), batch.targets
    )
    words = jnp.asarray(of.words)
    logits = model.logits(params, at(batch.asked), vocabulary=words)[:, 0]
    logs = jax.nn.log_softmax(logits + np.log(of.share[of.words]))
    index = np.zeros(len(of.share), np.int32)
    index[of.words] = np.arange(len(of.words))
    near = jnp.take_along_axis(logs, jnp.asarray(index)[batch.near], axis=1)
    return _mean(predicted, batch.weights) - _mean(near, batch.near_weights)


def _mean(x: jax.Array, weights: Any) -> jax.Array:
    return jnp.sum(x * weights) / jnp.sum(weights)


def pretrain(
    corpus: Corpus,
    config: Config,
    folder: pathlib.Path,
    *,
    num_steps: int,
    progress: Callable[[int, float], None] = lambda step, value: None,
) -> Pretrained:
    """Makes tokenizer and model and leaves both in a folder in Hugging Face's layout.

    Args:
      corpus: only its public text is read, and the names of its classes.
      config: of the model.
      folder: is made.
      num_steps: of Adam.
      progress: called with every step and its loss.

    """
    tokenizer = train_tokenizer(corpus, config)
    of, model = windows(corpus, tokenizer), LanguageModel(config=config)
    rng = np.random.default_rng(0)
    params = model.init(jax.random.key(0))
    params["embedding"]["tokens"] = jnp.asarray(embeddings(of, config.hidden_size))
    rate = LEARNING_RATES[config.model_type]
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, rate, max(1, num_steps // 20), num_steps, rate / 20
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
    if not config.is_decoder:
        params = centred(model, params, draw(of, rng))
    checkpoint.save(folder, config, params)
    tokenizer.save(folder)
    return Pretrained(model, params, tokenizer)


def centred(model: LanguageModel, params: Any, batch: Examples) -> Any:
    """The same function, with hidden states at the prompt's mask whose mean is zero.

    What all texts have in common moves from the states to the biases behind them. It makes
    up most of a state, and every direction of a weight behind it would shift all records'
    scores together: the steepest direction by far, of which there is nothing to learn.
    """
    head, norm = dict(params["head"]), dict(params["layers"]["mlp_norm"])
    states = model.hidden(params, batch.tokens, batch.mask)  # pyright: ignore
    states = states[:, int(batch.asked[0, 0])]
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
    tokenizer: text.Tokenizer, records: Sequence[dict[str, Any]], classes: Sequence[str]
) -> Any:
    """Records as a batch: of the encoder for ``prompt``, else for ``instruction``."""
    if tokenizer.is_decoder:
        return chats.encode_instruction(
            tokenizer,
            conversations(tokenizer, records),
            max_length=MAX_LENGTH + SPAN,
            span_length=SPAN,
        )
    batch = text.encode_classification(
        tokenizer, records, max_length=MAX_LENGTH, template=TEMPLATE
    )
    return batch | {"label": text.labels(records, "label", classes)}


def conversations(
    tokenizer: text.Tokenizer, records: Sequence[dict[str, str]]
) -> list[dict[str, Any]]:
    """Records as questions about the beginnings of their texts, with their classes."""
    room = MAX_LENGTH - len(tokenizer.encode(QUESTION))

    def messages(record: dict[str, str]) -> list[dict[str, str]]:
        begins = tokenizer.decode(tokenizer.encode(record["text"])[:room])
        return [
            {"role": "user", "content": begins + QUESTION},
            {"role": "assistant", "content": " " + record["label"]},
        ]

    return [{"messages": messages(record)} for record in records]
