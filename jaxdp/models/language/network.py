"""RoBERTa and OPT in flax, with one scan over stacked layers.

Every parameter is taken where it is used, through a view that may perturb it: a model
never holds a second copy of its parameters, and of the tables of tokens and positions it
perturbs the rows that are read. Kernels have flax's layout (in, out); the layers are one
leaf for each of their parameters, with the layers in front.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp import _validate
from jaxdp.kernels import perturb
from jaxdp.kernels.perturb import At
from jaxdp.models.language.config import Config, OPTConfig, RobertaConfig

Array = jax.Array
Params = dict[str, Any]
ComputeDtype = Literal["float32", "bfloat16"]

#: ``view(path, leaf, after=None)``: the leaf at a path below some module's.
View = Callable[..., Array]


def _as_it_is(path: str, leaf: Array, after: Array | None = None) -> Array:
    del path, after
    return leaf


def _below(prefix: str, at: At, layer: Array | None = None) -> View:
    """The view of the leaves below a prefix, in one layer where they are stacked."""

    def view(path: str, leaf: Array, after: Array | None = None) -> Array:
        return at(f"{prefix}/{path}", leaf, layer=layer, after=after)

    return view


# --- adapters ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank updates of the query and value kernels: ``x W + (alpha / rank) x A B``.

    Starts at zero, so the model starts as it was. Hu et al., `LoRA
    <https://arxiv.org/abs/2106.09685>`_, 2021.
    """

    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self) -> None:
        _validate.integer(rank=self.rank)
        _validate.positive(alpha=self.alpha)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """Keys and values that every token of every layer also attends to.

    Li and Liang, `Prefix-Tuning <https://arxiv.org/abs/2101.00190>`_, 2021, without the
    network that makes the prefix.
    """

    length: int = 5

    def __post_init__(self) -> None:
        _validate.integer(length=self.length)


Adapter = LoRA | Prefix


def adapter_only(path: str) -> bool:
    """``trainable=``: the leaves of LoRA, of a prefix, and of a classification head."""
    return path.startswith(("layers/lora/", "layers/prefix/", "classifier/"))


# --- modules -----------------------------------------------------------------------


class Dense(nn.Module):
    """``x W + b`` in the compute dtype, the kernel perturbed after ``x`` exists."""

    features: int
    dtype: Any
    view: View = _as_it_is
    use_bias: bool = True
    init_std: float = 0.02

    @nn.compact
    def __call__(self, x: Array, after: Array | None = None) -> Array:
        normal = nn.initializers.normal(self.init_std)
        kernel = self.param("kernel", normal, (x.shape[-1], self.features))
        # Only the large leaf waits: a bias that waited too would keep activations alive.
        after = x if after is None else after
        kernel = self.view(_path(self, "kernel"), kernel, after=after)
        y = x.astype(self.dtype) @ kernel.astype(self.dtype)
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return y + self.view(_path(self, "bias"), bias).astype(self.dtype)


class LayerNorm(nn.Module):
    """Over the last axis, in float32; the result has the compute dtype."""

    epsilon: float
    dtype: Any
    view: View = _as_it_is

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        x = x.astype(jnp.float32)
        centred = x - _mean(x)
        variance = _mean(jnp.square(centred))
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        y = y * self.view(_path(self, "scale"), scale)
        return (y + self.view(_path(self, "bias"), bias)).astype(self.dtype)


def _mean(x: Array) -> Array:
    """Mean over the last axis, kept: a product with a constant.

    A reduction is fused with what makes its operand, perturbed or not, and then adds in
    another order: the lazy loss would be an ulp off the loss of perturbed parameters.
    """
    size = x.shape[-1]
    weights = jnp.full((size, 1), 1 / size, x.dtype)
    return jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST)


def _path(module: nn.Module, name: str) -> str:
    return "/".join((*module.path, name))


class Attention(nn.Module):
    """Multi-head attention of a sequence to itself."""

    config: Config
    dtype: Any
    view: View = _as_it_is

    @nn.compact
    def __call__(
        self, x: Array, mask: Array, low_rank: Params | None, prefix: Params | None
    ) -> Array:  # (B, L, d), (B, 1, L, L or P + L) -> (B, L, d)
        width, heads = x.shape[-1], self.config.num_attention_heads

        def project(name: str) -> Array:
            y = Dense(width, self.dtype, self.view, name=name)(x)
            if low_rank is not None and name in low_rank:
                y = y + low_rank[name](x).astype(y.dtype)
            if prefix is not None and name in prefix:
                before = prefix[name].astype(y.dtype)
                before = jnp.broadcast_to(before, (x.shape[0], *before.shape))
                y = jnp.concatenate([before, y], axis=1)
            return y.reshape(*y.shape[:2], heads, width // heads)

        query, key, value = (project(name) for name in ("query", "key", "value"))
        y = jax.nn.dot_product_attention(query, key, value, mask=mask)
        return Dense(width, self.dtype, self.view, name="output")(y.reshape(x.shape))


class MLP(nn.Module):
    """Two dense layers with RoBERTa's GELU or OPT's ReLU between them."""

    config: Config
    dtype: Any
    view: View = _as_it_is

    @nn.compact
    def __call__(self, x: Array) -> Array:
        up = Dense(self.config.intermediate_size, self.dtype, self.view, name="up")(x)
        if isinstance(self.config, RobertaConfig):
            y = jax.nn.gelu(up, approximate=False)
        else:
            y = jax.nn.relu(up)
        # After the product, not the activation: XLA would compute parts of that twice.
        return Dense(x.shape[-1], self.dtype, self.view, name="down")(y, after=up)


class Block(nn.Module):
    """One layer; RoBERTa normalises after each part, OPT (but for one size) before."""

    config: Config
    dtype: Any
    adapter: Adapter | None = None
    view: View = _as_it_is

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        config = self.config
        norm = functools.partial(
            LayerNorm, config.layer_norm_eps, self.dtype, self.view
        )
        attention = Attention(config, self.dtype, self.view, name="attention")
        attend = lambda y: attention(y, mask, *self._adapters(y.shape[-1]))  # noqa: E731
        mlp = MLP(config, self.dtype, self.view, name="mlp")
        first, second = norm(name="attention_norm"), norm(name="mlp_norm")
        if isinstance(config, OPTConfig) and config.do_layer_norm_before:
            x = x + attend(first(x))
            return x + mlp(second(x))
        x = first(x + attend(x))
        return second(x + mlp(x))

    def _adapters(self, width: int) -> tuple[Params | None, Params | None]:
        """What LoRA adds to query and value, and the prefix of key and value."""
        if isinstance(self.adapter, LoRA):
            lora = _LowRanks(self.adapter, self.dtype, self.view, name="lora")
            return {"query": lora.query, "value": lora.value}, None
        if isinstance(self.adapter, Prefix):
            return None, _Prefixes(self.adapter, width, self.view, name="prefix")()
        return None, None


class _LowRanks(nn.Module):
    adapter: LoRA
    dtype: Any
    view: View

    def setup(self) -> None:
        self.query = _LowRank(self.adapter, self.dtype, self.view)
        self.value = _LowRank(self.adapter, self.dtype, self.view)


class _LowRank(nn.Module):
    adapter: LoRA
    dtype: Any
    view: View

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width, rank = x.shape[-1], self.adapter.rank
        # B starts at zero, so that the model starts as it was.
        a = self.param("a", nn.initializers.normal(width**-0.5), (width, rank))
        b = self.param("b", nn.initializers.zeros, (rank, width))
        a, b = self.view(_path(self, "a"), a), self.view(_path(self, "b"), b)
        y = x.astype(self.dtype) @ a.astype(self.dtype) @ b.astype(self.dtype)
        return y * (self.adapter.alpha / rank)


class _Prefixes(nn.Module):
    adapter: Prefix
    width: int
    view: View

    @nn.compact
    def __call__(self) -> Params:
        shape = (self.adapter.length, self.width)
        return {
            name: self.view(
                _path(self, name), self.param(name, nn.initializers.normal(0.02), shape)
            )
            for name in ("key", "value")
        }


class Head(nn.Module):
    """Dense, activation, and what follows: RoBERTa's heads."""

    width: int
    config: RobertaConfig
    dtype: Any
    view: View = _as_it_is

    @nn.compact
    def __call__(self, x: Array) -> Array:
        y = Dense(self.width, self.dtype, self.view, name="dense")(x)
        y = jax.nn.gelu(y, approximate=False)
        epsilon = self.config.layer_norm_eps
        return LayerNorm(epsilon, self.dtype, self.view, name="norm")(y)


class Classifier(nn.Module):
    """A classification head: RoBERTa has a hidden layer, OPT has none and no bias."""

    num_labels: int
    config: Config
    dtype: Any
    view: View = _as_it_is

    @nn.compact
    def __call__(self, x: Array) -> Array:  # (B, d) -> (B, num_labels)
        hidden = isinstance(self.config, RobertaConfig)
        if hidden:
            dense = Dense(x.shape[-1], self.dtype, self.view, name="dense")
            x = jnp.tanh(dense(x))
        output = Dense(
            self.num_labels, self.dtype, self.view, use_bias=hidden, name="output"
        )
        return output(x).astype(jnp.float32)


# --- the model ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A RoBERTa encoder or an OPT decoder as pure functions of its parameters.

    Parameters are a nested dict, float32 as they are loaded. Every function takes ``at``,
    the view through which a :class:`jaxdp.LazyLoss` perturbs; without it the parameters
    are taken as they are. Tokens are int32 (B, L), padded on the right to one fixed
    length; masks are bool (B, L), True where there is a token. No token of one record
    enters what is computed of another.

    Attributes:
      config: a ``RobertaConfig`` or an ``OPTConfig``.
      compute_dtype: of activations and matrix products. Parameters are perturbed in
        float32 and cast in the layer; normalisation, attention weights, losses and
        whatever is released are float32.
      adapter: ``LoRA`` or ``Prefix``, whose leaves are in the parameters then.
      num_labels: of the classification head; None has none.
    """

    config: Config
    compute_dtype: ComputeDtype = "float32"
    adapter: Adapter | None = None
    num_labels: int | None = None

    def __post_init__(self) -> None:
        _validate.instance((RobertaConfig, OPTConfig), config=self.config)
        _validate.one_of(get_args(ComputeDtype), compute_dtype=self.compute_dtype)
        if self.adapter is not None:
            _validate.instance((LoRA, Prefix), adapter=self.adapter)
        if self.num_labels is not None:
            _validate.integer(at_least=2, num_labels=self.num_labels)

    # --- parameters ---

    @staticmethod
    def is_stacked(path: str) -> bool:
        """``stacked=``: whether the first axis of a leaf counts layers."""
        return path.startswith("layers/")

    def init(self, key: Array) -> Params:
        """Random parameters, float32.

        Args:
          key: a typed JAX key. Initial parameters are public.
        """
        return jax.jit(self._init)(key)

    def _init(self, key: Array) -> Params:
        config, width = self.config, self.config.hidden_size
        keys = iter(jax.random.split(key, 8))
        std = config.initializer_range
        table = lambda *shape: std * jax.random.normal(next(keys), shape)  # noqa: E731
        x, dtype = jnp.zeros((1, 1, width)), jnp.float32
        params: Params = {"embedding": {}, "layers": self._init_layers(next(keys))}
        embedding, head = params["embedding"], {}
        norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        embedding["positions"] = table(config.position_rows, width)
        if isinstance(config, RobertaConfig):
            embedding["tokens"] = table(config.vocab_size, width)
            embedding["types"] = table(config.type_vocab_size, width)
            embedding["norm"] = norm
            if self.num_labels is None:
                head = Head(width, config, dtype).init(next(keys), x)["params"]
                head = {**head, "bias": jnp.zeros(config.vocab_size)}
        else:
            size = config.embedding_size
            embedding["tokens"] = table(config.vocab_size, size)
            if size != width:
                embedding["projection"] = {"kernel": table(size, width)}
                head["projection"] = {"kernel": table(width, size)}
            if config.do_layer_norm_before:
                params["final_norm"] = norm
        if not config.tie_word_embeddings and self.num_labels is None:
            head["decoder"] = table(*embedding["tokens"].shape)
        if head:
            params["head"] = head
        if self.num_labels is not None:
            x = jnp.zeros((1, embedding["tokens"].shape[1]))
            module = self._classifier(_as_it_is)
            params["classifier"] = module.init(next(keys), x)["params"]
        return params

    def _init_layers(self, key: Array) -> Params:
        x = jnp.zeros((1, 1, self.config.hidden_size))
        mask = self._attention_mask(jnp.ones((1, 1), bool))

        def one(key: Array) -> Any:
            return self._block(_as_it_is).init(key, x, mask)["params"]

        return jax.vmap(one)(jax.random.split(key, self.config.num_hidden_layers))

    def with_new_parts(self, params: Params, key: Array) -> Params:
        """``params`` and what they lack of this model: an adapter, a classification head.

        Args:
          params: as a checkpoint has them.
          key: a typed JAX key.
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

    def _classifier(self, view: View) -> Classifier:
        return Classifier(self.num_labels or 0, self.config, self._dtype(), view)

    def hidden(
        self, params: Params, tokens: Array, mask: Array, at: At = perturb.identity
    ) -> Array:
        """Last hidden states: (B, L), (B, L) -> (B, L, d) in the compute dtype."""
        x = self._embed(params["embedding"], tokens, mask, at)
        attends = self._attention_mask(mask)

        def layer(x: Array, scanned: tuple[Array, Params]) -> tuple[Array, None]:
            # Slices of the parameters are read here and never returned: a scan that
            # returned them would stack a second copy.
            index, slices = scanned
            block = self._block(_below("layers", at, index))
            return block.apply({"params": slices}, x, attends), None  # pyright: ignore

        layers = jnp.arange(self.config.num_hidden_layers), params["layers"]
        x, _ = jax.lax.scan(layer, x, layers)
        if "final_norm" in params:
            x = self._norm(params["final_norm"], "final_norm", x, at)
        if "projection" in params.get("head", {}):
            x = self._project(params["head"], "head", x, at)
        return x  # pyright: ignore[reportReturnType]

    def logits(
        self,
        params: Params,
        hidden: Array,
        at: At = perturb.identity,
        vocabulary: Array | None = None,
    ) -> Array:
        """Logits over the tokens: (..., d) -> float32 (..., V).

        Args:
          params: with the masked-LM head, where the model has one.
          hidden: some of the hidden states; where few of them count, select them first.
          at: the view.
          vocabulary: int32 (C,): the tokens that count; (..., C) comes back. Rows of the
            output embedding that are not asked for are not perturbed.
        """
        y, head = hidden, params.get("head", {})
        if isinstance(self.config, RobertaConfig):
            module = Head(
                self.config.hidden_size, self.config, self._dtype(), _below("head", at)
            )
            parts = {name: head[name] for name in ("dense", "norm")}
            y: Any = module.apply({"params": parts}, y)
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
        return scores

    def classify(
        self,
        params: Params,
        tokens: Array,
        mask: Array,
        at: At = perturb.identity,
    ) -> Array:
        """Logits of the classification head: float32 (B, num_labels).

        RoBERTa's reads the first token, OPT's the last.

        Raises:
          ValueError: the model has no such head.
        """
        if self.num_labels is None:
            raise ValueError(
                "num_labels must be given to classify with a head, got None"
            )
        x = self.hidden(params, tokens, mask, at)
        if isinstance(self.config, RobertaConfig):
            x = x[:, 0]
        else:
            last = jnp.maximum(jnp.sum(mask, axis=1) - 1, 0)
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        module = self._classifier(_below("classifier", at))
        return module.apply({"params": params["classifier"]}, x)  # pyright: ignore

    def _embed(self, params: Params, tokens: Array, mask: Array, at: At) -> Array:
        """Sums of the embeddings of tokens and positions, normalised in RoBERTa."""
        look_up = functools.partial(_look_up, at, params)
        # Both families count from where their tables say the first position is.
        before = 1 if isinstance(self.config, OPTConfig) else self.config.pad_token_id
        positions = jnp.cumsum(mask, axis=1, dtype=jnp.int32) * mask + before
        x = look_up("tokens", tokens)
        if "projection" in params:
            x = self._project(params, "embedding", x, at)
        x = x + look_up("positions", positions)
        if isinstance(self.config, RobertaConfig):
            x = x + look_up("types", jnp.zeros((1, 1), jnp.int32))
            return self._norm(params["norm"], "embedding/norm", x, at)
        return x.astype(self._dtype())

    def _norm(self, params: Params, path: str, x: Array, at: At) -> Array:
        epsilon = self.config.layer_norm_eps
        module = LayerNorm(epsilon, self._dtype(), _below(path, at))
        return module.apply({"params": params}, x)  # pyright: ignore[reportReturnType]

    def _project(self, params: Params, path: str, x: Array, at: At) -> Array:
        """Between the width of OPT's table of tokens and that of its layers."""
        leaves, view = params["projection"], _below(f"{path}/projection", at)
        width = leaves["kernel"].shape[1]
        module = Dense(width, self._dtype(), view, use_bias=False)
        return module.apply({"params": leaves}, x)  # pyright: ignore[reportReturnType]

    def _attention_mask(self, mask: Array) -> Array:
        """Which token may look at which: (B, L) -> bool (B, 1, L, L or P + L)."""
        length = mask.shape[1]
        attends = jnp.broadcast_to(
            mask[:, None, None, :], (len(mask), 1, length, length)
        )
        if isinstance(self.config, OPTConfig):
            attends = attends & jnp.tri(length, dtype=bool)
        if isinstance(self.adapter, Prefix):
            before = ((0, 0), (0, 0), (0, 0), (self.adapter.length, 0))
            attends = jnp.pad(attends, before, constant_values=True)
        return attends


def _look_up(at: At, params: Params, name: str, rows: Array) -> Array:
    """Rows of a table; of a small one, which is read more than once, all of them."""
    path, table = f"embedding/{name}", params[name]
    if rows.size < table.shape[0]:
        return at(path, table, rows=rows)
    return at(path, table)[rows]


def num_parameters(params: Any) -> int:
    """d: the number of elements of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
