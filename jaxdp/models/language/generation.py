"""Generation of text by a decoder, greedily or by draws, one token after the other.

The prompt is read once. Each token after it is read once too, and attends to the keys and
values that were kept of those before it: :meth:`LanguageModel.hidden_after
<jaxdp.models.language.LanguageModel.hidden_after>`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.models.language._batches import in_batches
from jaxdp.models.language.config import check_decoder
from jaxdp.models.language.network import LanguageModel

Array = jax.Array
Batch = dict[str, Any]


class _Law(NamedTuple):
    """Choice of a token by its logits."""

    temperature: float
    top_k: int | None
    top_p: float | None


def generate(
    model: LanguageModel,
    params: Any,
    data: Batch,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    batch_size: int = 16,
    progress: bool = False,
) -> np.ndarray:
    """Generates continuations, int32 (n, max_new_tokens), padded after an end token.

    A continuation depends on its own record, and if it is drawn on the record's number, and
    on the padded length of the prompts: not on other records, nor on the batches.

    Args:
      model: a decoder.
      params: its parameters.
      data: ``tokens`` and ``mask``, padded on the right. Where there is ``span`` too, a
        prompt ends before the first token that it marks: of a batch of
        :func:`text.encode_generation` the answer is not read, and of one of
        :func:`chats.encode_instruction` no answer that counts, nor what comes after the
        first one. (:func:`chats.encode_prompts` asks for the last answer.)
      max_new_tokens: the most tokens that are written.
      temperature: what logits are divided by before a token is drawn by their softmax. At 0
        the most likely token is taken.
      top_k: draws among the so many most likely tokens alone.
      top_p: draws among the most likely tokens alone, the fewest that have this
        probability together, at the temperature and among those of ``top_k``.
      key: a typed JAX key, for draws. It is public: records must be, whose continuations
        are shown.
      batch_size: records at once.
      progress: whether to draw a progress bar.

    Raises:
      TypeError: a key that is no typed JAX key.
      ValueError: no decoder, a text that would grow longer than the model reads, a number
        out of range, a prompt that is not padded on the right, or draws without a key.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, generation, tiny_config
      >>> model = LanguageModel(config=tiny_config("opt", num_hidden_layers=1))
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
      >>> data = {"tokens": jnp.ones((3, 5), jnp.int32), "mask": jnp.ones((3, 5), bool)}
      >>> generation.generate(model, params, data, max_new_tokens=4).shape
      (3, 4)
    """
    check_decoder(model.config)
    validate.integer(max_new_tokens=max_new_tokens)
    law = _law(temperature, top_k, top_p, key)
    asked = np.asarray(data["mask"], bool)
    if "span" in data:  # What ends a turn is read no more than the answer before it.
        asked = asked & ~np.logical_or.accumulate(
            np.asarray(data["span"], bool), axis=1
        )
    gaps = np.flatnonzero(np.any(asked[:, 1:] > asked[:, :-1], axis=1))
    if len(gaps):
        raise ValueError(
            "mask must be True from the first token of a prompt to its last one, with "
            f"padding on the right, got a row with padding before a token: {gaps[0]}"
        )
    longest, limit = int(asked.sum(axis=1).max(initial=0)), model.config.max_length
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens must be at most {limit - longest}, what the longest prompt "
            f"leaves of {limit} tokens, got {max_new_tokens}"
        )
    room = max(limit - max_new_tokens, 1)
    prompts = {
        "tokens": np.asarray(data["tokens"])[:, :room],
        "mask": asked[:, :room],
        "record": np.arange(len(asked), dtype=np.int32),
    }
    program = functools.partial(_generator(model, max_new_tokens, law), key)
    said = "generated texts" if progress else ""
    return in_batches(program, params, prompts, batch_size, said)


def _law(temperature: float, top_k: int | None, top_p: float | None, key: Any) -> _Law:
    """Checks how tokens are chosen."""
    validate.non_negative(temperature=temperature)
    if top_k is not None:
        validate.integer(top_k=top_k)
    if top_p is not None:
        validate.probability(allow_one=True, top_p=top_p)
    if key is None:
        if temperature:
            raise ValueError(
                f"key must be given with temperature {temperature}, got None"
            )
    elif not jnp.issubdtype(getattr(key, "dtype", float), jax.dtypes.prng_key):
        raise TypeError(f"key must be a typed JAX key or None, got {key!r}")
    return _Law(float(temperature), top_k, top_p)


@functools.lru_cache(maxsize=32)  # A run is judged many times.
def _generator(
    model: LanguageModel, max_new_tokens: int, law: _Law
) -> Callable[..., Array]:
    config, ends = model.config, np.asarray(model.config.ends, np.int32)

    def continued(key: Array | None, params: Any, batch: Batch) -> Array:
        size, length = batch["tokens"].shape
        start, rows = jnp.sum(batch["mask"], axis=1), jnp.arange(size)
        keys = None if key is None else _folded(key, batch["record"])

        def chosen(x: Array, i: Array | int, done: Array) -> Array:
            logits = model.logits(params, x)
            token = _choose(logits, law, keys, i)
            return jnp.where(done, config.padding, token)

        def write(state: tuple[Any, ...]) -> tuple[Any, ...]:
            i, token, done, cache, written = state
            places = (start + i - 1)[:, None]
            x, cache = model.hidden_after(params, token[:, None], places, cache)
            token = chosen(x[:, 0], i, done)
            done = done | jnp.isin(token, ends)
            return i + 1, token, done, cache, written.at[:, i].set(token)

        cache = model.empty_cache(params, size, length + max_new_tokens)
        places = jnp.broadcast_to(jnp.arange(length), (size, length))
        x, cache = model.hidden_after(params, batch["tokens"], places, cache)
        x = x[rows, jnp.maximum(start - 1, 0)]
        token = chosen(x, 0, jnp.zeros(size, bool))
        written = jnp.full((size, max_new_tokens), config.padding, jnp.int32)
        written = written.at[:, 0].set(token)
        state = jnp.int32(1), token, jnp.isin(token, ends), cache, written
        more = lambda s: (s[0] < max_new_tokens) & ~jnp.all(s[2])  # noqa: E731
        return jax.lax.while_loop(more, write, state)[-1]

    return jax.jit(continued)


_folded = jax.vmap(jax.random.fold_in, (None, 0))


def _choose(logits: Array, law: _Law, keys: Any, i: Array | int) -> Array:
    """Chooses the token i of each record, int32 (B,), by logits (B, V)."""
    if not law.temperature:
        return jnp.argmax(logits, axis=1).astype(jnp.int32)
    logits = logits / law.temperature
    if law.top_k is not None:
        least = jax.lax.top_k(logits, min(law.top_k, logits.shape[1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if law.top_p is not None:
        falling = jnp.sort(logits, axis=1, descending=True)
        shares = jax.nn.softmax(falling, axis=1)
        above = jnp.cumsum(shares, axis=1) - shares  # of those that are more likely
        kept = jnp.where(above < law.top_p, falling, jnp.inf)
        least = jnp.min(kept, axis=1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
