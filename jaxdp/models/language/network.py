"""Encoders and decoders as pure functions of their parameters, with one scan over layers.

A model never holds a second copy of its parameters: each is perturbed where it is used,
and of the tables of tokens and positions the rows that are read. Kernels have flax's
layout (in, out); the layers are one leaf for each of their parameters, with the layers in
front.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxdp.core import validate
from jaxdp.kernels import perturb
from jaxdp.kernels.perturb import At
from jaxdp.models.language import rotary
from jaxdp.models.language.config import Config, RobertaConfig, check_decoder
from jaxdp.models.language.modules import Adapter as Adapter
from jaxdp.models.language.modules import (
    Block,
    Cache,
    Classifier,
    Dense,
    Head,
    Norm,
    Params,
    View,
    as_it_is,
    below,
    capped,
    in_layer,
    with_small_leaves,
)
from jaxdp.models.language.modules import LoRA as LoRA
from jaxdp.models.language.modules import Prefix as Prefix
from jaxdp.models.language.modules import adapter_only as adapter_only

Array = jax.Array
ComputeDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """An encoder or a decoder as pure functions of its parameters.

    Parameters are a nested dict, float32 as they are drawn; each leaf may be of 16 bits.
    Every function takes ``at``,
    the view through which a :class:`jaxdp.LazyLoss` perturbs; without it the parameters
    are taken as they are. Tokens are int32 (B, L), padded on the right to one fixed
    length; masks are bool (B, L), True where there is a token. No token of one record
    enters what is computed of another.

    Attributes:
      config: a ``RobertaConfig``, ``ModernBertConfig``, ``OPTConfig`` or
        ``DecoderConfig``.
      compute_dtype: of activations and matrix products. Parameters are perturbed in
        float32 and cast in the layer; normalisation, the softmax of attention, losses
        and whatever is released are float32. Products of float32 have the precision of
        ``jax.default_matmul_precision``, which on some devices is less than float32's.
      adapter: ``LoRA`` or ``Prefix``, whose leaves are in the parameters then.
      num_labels: of the classification head; None has none.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import LanguageModel, num_parameters, tiny_config
      >>> model = LanguageModel(config=tiny_config("opt"))
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
      >>> num_parameters(shapes)
      5632
      >>> tokens, mask = jnp.ones((3, 7), jnp.int32), jnp.ones((3, 7), bool)
      >>> jax.eval_shape(model.hidden, shapes, tokens, mask).shape
      (3, 7, 16)
    """

    config: Config
    compute_dtype: ComputeDtype = "float32"
    adapter: Adapter | None = None
    num_labels: int | None = None

    def __post_init__(self) -> None:
        validate.instance(get_args(Config), config=self.config)
        validate.one_of(get_args(ComputeDtype), compute_dtype=self.compute_dtype)
        if self.adapter is not None:
            validate.instance((LoRA, Prefix), adapter=self.adapter)
        if self.num_labels is not None:
            validate.integer(at_least=2, num_labels=self.num_labels)

    # --- parameters ---

    @staticmethod
    def is_stacked(path: str) -> bool:
        """Returns True if the first axis of a leaf counts layers, for ``stacked=``.

        Example:
          >>> from jaxdp.models.language import LanguageModel
          >>> LanguageModel.is_stacked("layers/query/kernel")
          True
          >>> LanguageModel.is_stacked("embedding/tokens")
          False
        """
        return path.startswith("layers/")

    def init(self, key: Array) -> Params:
        """Draws random parameters, float32.

        Args:
          key: a typed JAX key. Initial parameters are public.

        Example:
          >>> import jax
          >>> from jaxdp.models.language import LanguageModel, tiny_config
          >>> model = LanguageModel(config=tiny_config("opt"))
          >>> params = jax.eval_shape(model.init, jax.random.key(0))  # Shapes alone.
          >>> params["embedding"]["tokens"].shape
          (50, 16)
        """
        return jax.jit(self._init)(key)

    def _init(self, key: Array) -> Params:
        config, width = self.config, self.config.hidden_size
        keys = iter(jax.random.split(key, 8))
        std = config.initializer_range
        table = lambda *shape: std * jax.random.normal(next(keys), shape)  # noqa: E731
        x, dtype = jnp.zeros((1, 1, width)), jnp.float32
        params: Params = {"embedding": {}, "layers": self._init_layers(next(keys))}
        embedding, head, size = params["embedding"], {}, config.embedding_size
        if (rows := getattr(config, "position_rows", 0)) > 0:
            embedding["positions"] = table(rows, width)
        embedding["tokens"] = table(config.vocab_size, size)
        norm = Norm(config, dtype).init(key, x)["params"]
        if isinstance(config, RobertaConfig):
            embedding["types"] = table(config.type_vocab_size, width)
        if config.norm_embedding:
            embedding["norm"] = norm
        if not config.is_decoder and (
            self.num_labels is None or config.head_classifies
        ):
            head = {**self._head(as_it_is).init(next(keys), x)["params"]}
            if self.num_labels is None:
                head["bias"] = jnp.zeros(config.vocab_size)
        if config.norm_first:
            params["final_norm"] = norm
        if size != width:
            embedding["projection"] = {"kernel": table(size, width)}
            head["projection"] = {"kernel": table(width, size)}
        if not config.tie_word_embeddings and self.num_labels is None:
            head["decoder"] = table(*embedding["tokens"].shape)
        if head:
            params["head"] = head
        if self.num_labels is not None:
            x = jnp.zeros((1, embedding["tokens"].shape[1]))
            module = self._classifier(as_it_is)
            params["classifier"] = module.init(next(keys), x)["params"]
        return params

    def _init_layers(self, key: Array) -> Params:
        x = jnp.zeros((1, 1, self.config.hidden_size))
        _, sees, angles = self._looks(jnp.arange(1), 1)
        mask = self._attention_mask(jnp.ones((1, 1), bool), sees[0])
        turns = None if angles is None else angles[0]

        def one(key: Array) -> Any:
            return self._block(as_it_is).init(key, x, mask, turns)["params"]

        layers = jax.vmap(one)(jax.random.split(key, self.config.num_hidden_layers))
        if not self.config.first_norm:
            norm = layers["attention_norm"]
            layers = {**layers, "attention_norm": jax.tree.map(lambda x: x[1:], norm)}
        return layers

    def with_new_parts(self, params: Params, key: Array) -> Params:
        """Adds the parts that ``params`` lack: an adapter, a classification head.

        Args:
          params: as a checkpoint has them.
          key: a typed JAX key.

        Example:
          >>> import jax
          >>> from jaxdp.models.language import LanguageModel, LoRA, tiny_config
          >>> config = tiny_config("opt")
          >>> key, plain = jax.random.key(0), LanguageModel(config=config)
          >>> params = jax.eval_shape(plain.init, key)  # Shapes alone.
          >>> model = LanguageModel(config=config, adapter=LoRA(rank=2))
          >>> whole = jax.eval_shape(model.with_new_parts, params, key)
          >>> sorted(set(whole["layers"]) - set(params["layers"]))
          ['lora']
        """

        def lacking(key: Array) -> tuple[Params, Params]:
            fresh = self._init(key)
            layers = {
                n: x for n, x in fresh["layers"].items() if n not in params["layers"]
            }
            head = {
                n: x for n, x in fresh.items() if n == "classifier" and n not in params
            }
            return head, layers

        head, layers = jax.jit(lacking)(key)  # XLA draws what is asked for alone.
        return {**params, **head, "layers": {**params["layers"], **layers}}

    # --- forward ---

    def _dtype(self) -> Any:
        return jnp.dtype(self.compute_dtype)

    def _block(self, view: View) -> Block:
        return Block(self.config, self._dtype(), self.adapter, view)

    def _head(self, view: View) -> Head:
        config: Any = self.config
        return Head(config, self._dtype(), view)

    def _classifier(self, view: View) -> Classifier:
        return Classifier(self.num_labels or 0, self.config, self._dtype(), view)

    def hidden(
        self, params: Params, tokens: Array, mask: Array, at: At = perturb.identity
    ) -> Array:
        """Computes last hidden states: (B, L), (B, L) -> (B, L, d) in the compute dtype.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from jaxdp.models.language import LanguageModel, tiny_config
          >>> model = LanguageModel(config=tiny_config("opt"))
          >>> params = jax.eval_shape(model.init, jax.random.key(0))  # Shapes alone.
          >>> tokens, mask = jnp.ones((3, 7), jnp.int32), jnp.ones((3, 7), bool)
          >>> jax.eval_shape(model.hidden, params, tokens, mask).shape
          (3, 7, 16)
        """
        config = self.config
        # Both families count from where their tables say the first position is.
        before = 1 if config.is_decoder else config.padding
        positions = jnp.cumsum(mask, axis=1, dtype=jnp.int32) * mask + before
        x = self._embed(params["embedding"], tokens, positions, at)
        looks = self._looks(jnp.arange(mask.shape[1]), mask.shape[1])
        return self._through_layers(params, x, mask, looks, at)[0]

    def empty_cache(self, params: Params, size: int, length: int) -> Cache:
        """Makes room for the keys and values of ``size`` texts of ``length`` tokens.

        Raises:
          ValueError: no decoder.

        Example:
          >>> import jax
          >>> from jaxdp.models.language import LanguageModel, tiny_config
          >>> model = LanguageModel(config=tiny_config("opt"))
          >>> params = jax.eval_shape(model.init, jax.random.key(0))  # Shapes alone.
          >>> model.empty_cache(params, size=3, length=7).key.shape
          (2, 3, 7, 2, 8)
        """
        check_decoder(self.config)
        config, dtype = self.config, self._dtype()
        heads = config.num_key_value_heads, config.head_dim

        def room(name: str) -> Array:
            empty = jnp.zeros((config.num_hidden_layers, size, length, *heads), dtype)
            if not isinstance(self.adapter, Prefix):
                return empty
            before = params["layers"]["prefix"][name].astype(dtype)
            before = before.reshape(*before.shape[:2], *heads)[:, None]
            before = jnp.broadcast_to(before, (len(before), size, *before.shape[2:]))
            return jnp.concatenate([before, empty], axis=2)

        return Cache(room("key"), room("value"))

    def hidden_after(
        self, params: Params, tokens: Array, places: Array, cache: Cache
    ) -> tuple[Array, Cache]:
        """Computes last hidden states of a decoder's tokens that follow those of a cache.

        One token after the other this is :meth:`hidden` of the whole text, at the cost of
        one token each.

        Args:
          params: as they are; nothing is perturbed.
          tokens: int32 (B, T).
          places: int32 (B, T), from 0: where in its text each token stands. It sees the
            places before it, which must have been written; what was there is overwritten.
          cache: of :meth:`empty_cache`, or what this function returned.

        Returns:
          The states (B, T, d), and the cache with these tokens.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from jaxdp.models.language import LanguageModel, tiny_config
          >>> model = LanguageModel(config=tiny_config("opt"))
          >>> params = jax.jit(model.init)(jax.random.key(0))
          >>> tokens, mask = jnp.array([[7, 4, 9]]), jnp.ones((1, 3), bool)
          >>> cache = model.empty_cache(params, size=1, length=3)
          >>> _, cache = model.hidden_after(
          ...     params, tokens[:, :2], jnp.array([[0, 1]]), cache)
          >>> x, cache = model.hidden_after(
          ...     params, tokens[:, 2:], jnp.array([[2]]), cache)
          >>> whole = model.hidden(params, tokens, mask)
          >>> bool(jnp.allclose(x[:, 0], whole[:, 2], atol=1e-5))
          True
        """
        length = cache.key.shape[2] - self._before
        x = self._embed(params["embedding"], tokens, places + 2, perturb.identity)
        kinds, sees, angles = self._looks(places, length)
        looks = kinds, sees[:, :, None], angles
        mask = jnp.ones((1, length), bool)
        places = places + self._before
        return self._through_layers(
            params, x, mask, looks, perturb.identity, cache, places
        )

    @property
    def _before(self) -> int:
        """Keys and values of a prefix."""
        return self.adapter.length if isinstance(self.adapter, Prefix) else 0

    def _through_layers(
        self,
        params: Params,
        x: Array,
        mask: Array,
        looks: tuple[Array, Array, Any],
        at: At,
        cache: Cache | None = None,
        places: Array | None = None,
    ) -> tuple[Array, Any]:
        """Applies the layers and what follows them, all tokens at once or by a cache."""
        kinds, sees, angles = looks

        def layer(carry: Any, scanned: tuple[Array, Array, Params]) -> tuple[Any, None]:
            # Slices of the parameters are read here and never returned: a scan that
            # returned them would stack a second copy. So is the cache, written in place.
            (x, cache), (index, kind, slices) = carry, scanned
            block = self._block(in_layer(at, index))
            attends = self._attention_mask(mask, sees[kind])
            turns = None if angles is None else angles[kind]
            past = None if cache is None else (cache, index, places)
            inputs = x, attends, turns, index, past
            return block.apply({"params": slices}, *inputs), None  # pyright: ignore

        layers = with_small_leaves(params["layers"], at)
        scanned = jnp.arange(len(kinds)), kinds, layers
        (x, cache), _ = jax.lax.scan(layer, (x, cache), scanned)
        if "final_norm" in params:
            x = self._norm(params["final_norm"], "final_norm", x, at)
        if "projection" in params.get("head", {}):
            x = self._project(params["head"], "head", x, at)
        return x, cache

    def logits(
        self,
        params: Params,
        hidden: Array,
        at: At = perturb.identity,
        vocabulary: Array | None = None,
    ) -> Array:
        """Computes logits over the tokens: (..., d) -> float32 (..., V).

        Args:
          params: with the masked-LM head, where the model has one.
          hidden: some of the hidden states; where few of them count, select them first.
          at: the view.
          vocabulary: int32 (C,): the tokens that count; (..., C) comes back. Rows of the
            output embedding that are not asked for are not perturbed.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from jaxdp.models.language import LanguageModel, tiny_config
          >>> model = LanguageModel(config=tiny_config("opt"))
          >>> params = jax.eval_shape(model.init, jax.random.key(0))  # Shapes alone.
          >>> last = jnp.ones((3, 16))  # Hidden states.
          >>> jax.eval_shape(model.logits, params, last).shape
          (3, 50)
        """
        head = params.get("head", {})
        y = hidden if self.config.is_decoder else self._transform(head, hidden, at)
        path = "embedding/tokens" if self.config.tie_word_embeddings else "head/decoder"
        top, name = path.split("/")
        table = at(path, params[top][name], after=y, rows=vocabulary)
        dtype = self._dtype()
        scores = jnp.einsum(
            "...d,vd->...v",
            y.astype(dtype),
            table.astype(dtype),
            preferred_element_type=jnp.float32,
        )
        if "bias" in head:
            scores = scores + at("head/bias", head["bias"], rows=vocabulary)
        return capped(scores, self.config.final_logit_softcapping)

    def classify(
        self,
        params: Params,
        tokens: Array,
        mask: Array,
        at: At = perturb.identity,
    ) -> Array:
        """Computes logits of the classification head: float32 (B, num_labels).

        RoBERTa's reads the first token, ModernBERT's that or the mean of all, as its
        ``classifier_pooling`` says, a decoder's the last.

        Raises:
          ValueError: the model has no such head.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from jaxdp.models.language import LanguageModel, tiny_config
          >>> model = LanguageModel(config=tiny_config("opt"), num_labels=2)
          >>> params = jax.eval_shape(model.init, jax.random.key(0))  # Shapes alone.
          >>> tokens, mask = jnp.ones((3, 7), jnp.int32), jnp.ones((3, 7), bool)
          >>> jax.eval_shape(model.classify, params, tokens, mask).shape
          (3, 2)
        """
        if self.num_labels is None:
            raise ValueError(
                "num_labels must be given to classify with a head, got None"
            )
        x = self.hidden(params, tokens, mask, at)
        pooling = self.config.classifier_pooling
        if pooling == "cls":
            x = x[:, 0]
        elif pooling == "mean":
            total = jnp.sum(jnp.where(mask[..., None], x, 0), axis=1, dtype=jnp.float32)
            x = (total / jnp.maximum(jnp.sum(mask, axis=1), 1)[:, None]).astype(x.dtype)
        else:
            last = jnp.maximum(jnp.sum(mask, axis=1) - 1, 0)
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        if self.config.head_classifies:
            x = self._transform(params["head"], x, at)
        module = self._classifier(below("classifier", at))
        return module.apply({"params": params["classifier"]}, x)  # pyright: ignore

    def _transform(self, head: Params, x: Array, at: At) -> Array:
        """Applies what the head of a masked language model begins with."""
        parts = {name: head[name] for name in ("dense", "norm")}
        return self._head(below("head", at)).apply({"params": parts}, x)  # pyright: ignore

    def _embed(self, params: Params, tokens: Array, positions: Array, at: At) -> Array:
        """Sums the embeddings of tokens and positions, normalised in encoders."""

        def look_up(name: str, rows: Array) -> Array:
            return _look_up(at, params, name, rows).astype(jnp.float32)

        config = self.config
        x = look_up("tokens", tokens)
        if config.unit_offset:
            x = x * config.hidden_size**0.5
        if "projection" in params:
            x = self._project(params, "embedding", x, at)
        if "positions" in params:
            x = x + look_up("positions", positions)
        if "types" in params:
            x = x + look_up("types", jnp.zeros((1, 1), jnp.int32))
        if "norm" in params:
            return self._norm(params["norm"], "embedding/norm", x, at)
        return x.astype(self._dtype())

    def _norm(self, params: Params, path: str, x: Array, at: At) -> Array:
        module = Norm(self.config, self._dtype(), below(path, at))
        return module.apply({"params": params}, x)  # pyright: ignore[reportReturnType]

    def _project(self, params: Params, path: str, x: Array, at: At) -> Array:
        """Projects between the width of OPT's table of tokens and that of its layers."""
        leaves, view = params["projection"], below(f"{path}/projection", at)
        width = leaves["kernel"].shape[1]
        module = Dense(width, self._dtype(), view, use_bias=False)
        return module.apply({"params": leaves}, x)  # pyright: ignore[reportReturnType]

    def _looks(self, places: Array, length: int) -> tuple[Array, Array, Any]:
        """Returns the kind of each layer, and masks and angles of the kinds.

        ``places`` (..., T), of texts of a padded length L, see masks (K, ..., T, L).
        """
        looks, size = self.config.looks, self.config.head_dim
        kinds = list(dict.fromkeys(looks))
        back = places[..., None] - jnp.arange(length)
        back = back if self.config.is_decoder else jnp.abs(back)
        sees = [(back >= 0) & (back < (window or length)) for window, _ in kinds]
        angles = None
        if not hasattr(self.config, "position_rows"):
            angles = jnp.stack(
                [rotary.angles(r, size, length, places) for _, r in kinds]
            )
        numbers = jnp.asarray([kinds.index(look) for look in looks])
        return numbers, jnp.stack(sees), angles

    def _attention_mask(self, mask: Array, sees: Array) -> Array:
        """Returns a layer's mask: (B, L), (L, L) -> bool (B, 1, L, L or P + L)."""
        attends = mask[:, None, None, :] & sees
        if isinstance(self.adapter, Prefix):
            before = ((0, 0), (0, 0), (0, 0), (self._before, 0))
            attends = jnp.pad(attends, before, constant_values=True)
        return attends


def _look_up(at: At, params: Params, name: str, rows: Array) -> Array:
    """Looks up rows of a table; perturbs all of a table no larger than the look-up."""
    path, table = f"embedding/{name}", params[name]
    if rows.size < table.shape[0]:
        return at(path, table, rows=rows)
    return at(path, table)[rows]


def num_parameters(params: Any) -> int:
    """Returns d, the number of elements of all leaves.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import num_parameters
      >>> num_parameters({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)})
      8
    """
    return sum(leaf.size for leaf in jax.tree.leaves(params))
