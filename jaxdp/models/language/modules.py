"""Flax modules of encoders and decoders, and of their adapters.

Every parameter is taken where it is used, through a view that may perturb it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.core import validate
from jaxdp.kernels.perturb import At
from jaxdp.kernels.sphere import path_str
from jaxdp.models.language.config import Config, ModernBertConfig, RobertaConfig
from jaxdp.models.language.rotary import rotated

Array = jax.Array
Params = dict[str, Any]

#: ``view(path, leaf, after=None)``: the leaf at a path below some module's.
View = Callable[..., Array]


def as_it_is(path: str, leaf: Array, after: Array | None = None) -> Array:
    """Returns the leaf unperturbed: the view of an unperturbed evaluation."""
    del path, after
    return leaf


def below(prefix: str, at: At) -> View:
    """Returns the view of the leaves below a prefix."""

    def view(path: str, leaf: Array, after: Array | None = None) -> Array:
        return at(f"{prefix}/{path}", leaf, after=after)

    return view


def in_layer(at: At, layer: Array) -> View:
    """Returns the view of one layer's leaves, of which the small ones come perturbed."""

    def view(path: str, leaf: Array, after: Array | None = None) -> Array:
        if leaf.ndim == 1:
            return leaf
        return at(f"layers/{path}", leaf, layer=layer, after=after)

    return view


def with_small_leaves(layers: Params, at: At) -> Params:
    """Perturbs biases and norms of the stacked layers as ``at`` does; kernels stay.

    A vector that is perturbed in its layer is perturbed again for every token that it is
    added to: XLA fuses the one into the other. Zeros stand for what the first layer lacks.
    """
    count = max(map(len, jax.tree.leaves(layers)))

    def leaf(path: Any, x: Array) -> Array:
        x = at(f"layers/{path_str(path)}", x) if x.ndim == 2 else x
        absent = count - len(x)
        return jnp.pad(x, ((absent, 0), (0, 0))) if absent else x

    return jax.tree_util.tree_map_with_path(leaf, layers)


# --- adapters ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank updates of the query and value kernels: ``x W + (alpha / rank) x A B``.

    Starts at zero, so the model starts as it was. Hu et al., `LoRA
    <https://arxiv.org/abs/2106.09685>`_, 2021.

    Example:
      >>> from jaxdp.models.language import LoRA
      >>> LoRA(rank=4).alpha
      16.0
    """

    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self) -> None:
        validate.integer(rank=self.rank)
        validate.positive(alpha=self.alpha)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """Keys and values that every token of every layer also attends to.

    Li and Liang, `Prefix-Tuning <https://arxiv.org/abs/2101.00190>`_, 2021, without the
    network that makes the prefix.

    Example:
      >>> from jaxdp.models.language import Prefix
      >>> Prefix(length=3).length
      3
    """

    length: int = 5

    def __post_init__(self) -> None:
        validate.integer(length=self.length)


Adapter = LoRA | Prefix


def adapter_only(path: str) -> bool:
    """Selects leaves of LoRA, a prefix and a classification head, for ``trainable=``.

    Example:
      >>> from jaxdp.models.language import adapter_only
      >>> adapter_only("layers/lora/a"), adapter_only("embedding/tokens")
      (True, False)
    """
    return path.startswith(("layers/lora/", "layers/prefix/", "classifier/"))


# --- modules -----------------------------------------------------------------------


#: Dtypes of rounded kernels.
INTEGERS = ("int8", "int4")


def quantised(params: Params, dtype: Any = "int8") -> Params:
    """Rounds the layers' kernels to small integers, which are frozen: a base for adapters.

    Each column of a kernel, which makes one output, has a scale of its own: its largest
    number becomes 127, or 7. The kernels are most of a large model; embeddings, norms and
    biases stay as they are. One leaf after the other is rounded.

    Args:
      params: as :class:`~jaxdp.models.language.network.LanguageModel` lays them out, of
        any floating dtypes. Adapters stay; train them with ``trainable=adapter_only``.
      dtype: ``"int8"`` or ``"int4"``.

    Returns:
      The same tree, where each kernel of a layer is of that dtype and has its scales beside
      it: ``kernel_scale``, float32 (layers, outputs). The model multiplies them in the
      layer, so that one layer's kernels at a time are floats.

    Example:
      >>> import jax
      >>> from jaxdp.models.language import LanguageModel, quantised, tiny_config
      >>> config = tiny_config("opt")
      >>> params = jax.eval_shape(LanguageModel(config=config).init, jax.random.key(0))
      >>> up = jax.eval_shape(quantised, params)["layers"]["mlp"]["up"]  # Shapes alone.
      >>> up["kernel"].dtype.name, up["kernel_scale"].shape
      ('int8', (2, 32))
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    validate.one_of(INTEGERS, dtype=name)

    def below_layers(tree: Params) -> Params:
        out = {
            n: below_layers(x) if isinstance(x, dict) else x for n, x in tree.items()
        }
        if "kernel" in tree:
            out["kernel"], out["kernel_scale"] = integers(tree["kernel"], name)
        return out

    return {**params, "layers": below_layers(params["layers"])}


@functools.partial(jax.jit, static_argnums=1)
def integers(kernel: Array, dtype: str) -> tuple[Array, Array]:
    """Rounds kernels (..., in, out) to integers, with scales float32 (..., out)."""
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=-2)
    scale = jnp.where(largest > 0, largest, 1) / jnp.iinfo(dtype).max
    return jnp.round(kernel / scale[..., None, :]).astype(dtype), scale


def dequantised(kernel: Array, scale: Array) -> Array:
    """Returns the kernel (..., in, out) that integers and scales (..., out) stand for.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.language import dequantised
      >>> kernel = jnp.array([[1, -127], [127, 0]], jnp.int8)
      >>> dequantised(kernel, jnp.array([0.5, 1.0])).tolist()
      [[0.5, -127.0], [63.5, 0.0]]
    """
    return kernel.astype(scale.dtype) * scale[..., None, :]


class Dense(nn.Module):
    """``x W + b`` in the compute dtype, the kernel perturbed after ``x`` exists.

    A kernel of integers is frozen: what ``quantised`` made.
    """

    features: int
    dtype: Any
    view: View = as_it_is
    use_bias: bool = True
    init_std: float = 0.02

    @nn.compact
    def __call__(self, x: Array, after: Array | None = None) -> Array:
        normal = nn.initializers.normal(self.init_std)
        kernel = self.param("kernel", normal, (x.shape[-1], self.features))
        # Only the large leaf waits: a bias that waited too would keep activations alive.
        after = x if after is None else after
        if jnp.issubdtype(kernel.dtype, jnp.integer):
            ones = nn.initializers.ones
            scale = self.param("kernel_scale", ones, (self.features,))
            kernel = dequantised(kernel, scale)
        else:
            kernel = self.view(_path(self, "kernel"), kernel, after=after)
        y = x.astype(self.dtype) @ kernel.astype(self.dtype)
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return y + self.view(_path(self, "bias"), bias).astype(self.dtype)


class Norm(nn.Module):
    """Normalisation over the last axis in float32, cast to the compute dtype.

    By mean and variance, but for ModernBERT with a bias; or by the mean square alone
    (Zhang and Sennrich, 2019), in Gemma with a scale that counts from 1.
    """

    config: Config
    dtype: Any
    view: View = as_it_is

    @nn.compact
    def __call__(self, x: Array) -> Array:
        offset, rms = self.config.unit_offset, self.config.rms
        ones = nn.initializers.zeros if offset else nn.initializers.ones
        scale = self.param("scale", ones, x.shape[-1:])
        x = x.astype(jnp.float32)
        centred = x if rms else x - _mean(x)
        y = centred * jax.lax.rsqrt(
            _mean(jnp.square(centred)) + self.config.layer_norm_eps
        )
        scale = self.view(_path(self, "scale"), scale)
        y = y * (1 + scale if offset else scale)
        if self.config.norm_bias:
            bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
            y = y + self.view(_path(self, "bias"), bias)
        return y.astype(self.dtype)


def _mean(x: Array) -> Array:
    """Computes the mean over the last axis, kept, as a product with a constant.

    A reduction is fused with what makes its operand, perturbed or not, and then adds in
    another order: the lazy loss would be an ulp off the loss of perturbed parameters.
    """
    size = x.shape[-1]
    weights = jnp.full((size, 1), 1 / size, x.dtype)
    return jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST)


def _path(module: nn.Module, name: str) -> str:
    return "/".join((*module.path, name))


class Cache(NamedTuple):
    """Keys and values that were computed before, by layer, record and place.

    An adapter's prefix has the first places. Heads that share keys have them once.
    """

    key: Array  # shape=(layers, B, P + L, H, D), in the compute dtype
    value: Array  # the same

    def written(self, layer: Array, places: Array, key: Array, value: Array) -> "Cache":
        """Writes one layer's keys and values (B, T, H, D) at places (B, T)."""
        rows = jnp.arange(places.shape[0])[:, None]
        new = (key, value)
        return Cache(
            *(x.at[layer, rows, places].set(y) for x, y in zip(self, new, strict=True))
        )


#: A cache, the layer that it is read by, and the places (B, T) of new tokens.
Past = tuple[Cache, Array, Array]


class Attention(nn.Module):
    """Attention of a sequence to itself, with heads of queries that may share keys.

    With a cache, to what that holds and what is written there now.
    """

    config: Config
    dtype: Any
    view: View = as_it_is

    @nn.compact
    def __call__(
        self,
        x: Array,
        mask: Array,
        angles: Array | None,
        low_rank: Params | None,
        prefix: Params | None,
        past: Past | None,
    ) -> tuple[Array, Cache | None]:
        # (B, L, d), (B, 1, L, L or P + L), (2, L, r) -> (B, L, d)
        config = self.config
        widths = head_widths(config)
        parts = _parts(self, x, widths, "qkv", config.qkv_bias)

        def heads(name: str) -> Array:
            y = parts[name]
            if low_rank is not None and name in low_rank:
                y = y + low_rank[name](x).astype(y.dtype)
            y = y.reshape(*y.shape[:2], -1, config.head_dim)
            if config.norm_heads and name != "value":
                y = Norm(config, self.dtype, self.view, name=f"{name}_norm")(y)
            if angles is not None and name != "value":
                y = rotated(y, angles)
            if prefix is not None and name in prefix and past is None:
                before = prefix[name].astype(y.dtype)
                before = before.reshape(-1, *y.shape[2:])
                before = jnp.broadcast_to(before, (x.shape[0], *before.shape))
                y = jnp.concatenate([before, y], axis=1)
            return y

        query, key, value = (heads(name) for name in widths)
        cache = None
        if past is not None:
            cache, layer, places = past
            cache = cache.written(layer, places, key, value)
            key, value = cache.key[layer], cache.value[layer]
        y = _attend(config, query, key, value, mask)
        bias = config.output_bias
        output = Dense(x.shape[-1], self.dtype, self.view, bias, name="output")
        return output(y.reshape(*x.shape[:2], -1)), cache


def head_widths(config: Config) -> dict[str, int]:
    """Returns the widths of all heads together, of queries, keys and values."""
    keys = config.num_key_value_heads * config.head_dim
    queries = config.num_attention_heads * config.head_dim
    return {"query": queries, "key": keys, "value": keys}


def _parts(
    module: Any, x: Array, widths: Mapping[str, int], fused: str, use_bias: bool
) -> dict[str, Array]:
    """Projects to several widths, by a kernel for each or by one of the name ``fused``."""

    def dense(name: str, width: int) -> Array:
        return Dense(width, module.dtype, module.view, use_bias, name=name)(x)

    if not module.config.fused:
        return {name: dense(name, width) for name, width in widths.items()}
    ends = list(itertools.accumulate(widths.values()))
    return dict(
        zip(widths, jnp.split(dense(fused, ends[-1]), ends[:-1], axis=-1), strict=True)
    )


def _attend(
    config: Config, query: Array, key: Array, value: Array, mask: Array
) -> Array:
    """Computes softmax(scale query key) value, with capped scores where there is a cap."""
    scale = 1 / math.sqrt(config.query_pre_attn_scalar or config.head_dim)
    cap = config.attn_logit_softcapping
    if cap is None:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale)
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum(
        "blhd,bmhd->bhlm", query, key, preferred_element_type=jnp.float32
    )
    scores = capped(scores * scale, cap)
    scores = jnp.where(mask, scores, -0.7 * jnp.finfo(jnp.float32).max)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhlm,bmhd->blhd", shares, value)


def capped(x: Array, cap: float | None) -> Array:
    """Squeezes numbers smoothly into (-cap, cap); None leaves them."""
    return x if cap is None else cap * jnp.tanh(x / cap)


_ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class MLP(nn.Module):
    """Two dense layers with an activation between them, or three with a gate."""

    config: Config
    dtype: Any
    view: View = as_it_is

    @nn.compact
    def __call__(self, x: Array) -> Array:
        config, inner = self.config, self.config.intermediate_size
        widths = {"gate": inner, "up": inner} if config.gated else {"up": inner}
        parts = _parts(self, x, widths, "gate_up", config.mlp_bias)
        up = parts["up"]
        y = _ACTIVATIONS[config.activation](parts.get("gate", up))
        y = y * up if config.gated else y
        down = Dense(x.shape[-1], self.dtype, self.view, config.mlp_bias, name="down")
        # After the product, not the activation: XLA would compute parts of that twice.
        return down(y, after=up)


class Block(nn.Module):
    """One layer; RoBERTa (and one OPT) normalises after each part, others before."""

    config: Config
    dtype: Any
    adapter: Adapter | None = None
    view: View = as_it_is

    @nn.compact
    def __call__(
        self,
        x: Array,
        mask: Array,
        angles: Array | None = None,
        index: Array | int = 0,
        past: Past | None = None,
    ) -> tuple[Array, Cache | None]:
        config, cache = self.config, None
        attention = Attention(config, self.dtype, self.view, name="attention")

        def attends(y: Array) -> Array:
            nonlocal cache
            y, cache = attention(y, mask, angles, *self._adapters(), past)
            return y

        mlp = MLP(config, self.dtype, self.view, name="mlp")
        parts = {"attention": attends, "mlp": mlp}
        for name, part in parts.items():
            norm = Norm(config, self.dtype, self.view, name=f"{name}_norm")
            if not config.norm_first:
                x = norm(x + part(x))
                continue
            y = norm(x)
            if name == "attention" and not config.first_norm:
                y = jnp.where(index > 0, y, x)
            y = part(y)
            if config.norm_after:
                y = Norm(config, self.dtype, self.view, name=f"{name}_norm_after")(y)
            x = x + y
        return x, cache

    def _adapters(self) -> tuple[Params | None, Params | None]:
        """Returns LoRA's updates of query and value, and the prefix of key and value."""
        widths = head_widths(self.config)
        if isinstance(self.adapter, LoRA):
            queries, values = widths["query"], widths["value"]
            of = _LowRanks(
                self.adapter, queries, values, self.dtype, self.view, name="lora"
            )
            return {"query": of.query, "value": of.value}, None
        if isinstance(self.adapter, Prefix):
            keys = widths["key"]
            return None, _Prefixes(self.adapter, keys, self.view, name="prefix")()
        return None, None


class _LowRanks(nn.Module):
    adapter: LoRA
    queries: int
    values: int
    dtype: Any
    view: View

    def setup(self) -> None:
        self.query = _LowRank(self.adapter, self.queries, self.dtype, self.view)
        self.value = _LowRank(self.adapter, self.values, self.dtype, self.view)


class _LowRank(nn.Module):
    adapter: LoRA
    width: int
    dtype: Any
    view: View

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width, rank = x.shape[-1], self.adapter.rank
        # B starts at zero, so that the model starts as it was.
        a = self.param("a", nn.initializers.normal(width**-0.5), (width, rank))
        b = self.param("b", nn.initializers.zeros, (rank, self.width))
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
    """Transform of a masked language model's head: dense layer, GELU, layer norm."""

    config: RobertaConfig | ModernBertConfig
    dtype: Any
    view: View = as_it_is

    @nn.compact
    def __call__(self, x: Array) -> Array:
        bias = self.config.mlp_bias
        y = Dense(x.shape[-1], self.dtype, self.view, bias, name="dense")(x)
        y = jax.nn.gelu(y, approximate=False)
        return Norm(self.config, self.dtype, self.view, name="norm")(y)


class Classifier(nn.Module):
    """A classification head: encoders have a bias, and RoBERTa a hidden layer."""

    num_labels: int
    config: Config
    dtype: Any
    view: View = as_it_is

    @nn.compact
    def __call__(self, x: Array) -> Array:  # (B, d) -> (B, num_labels)
        bias = not self.config.is_decoder
        if bias and not self.config.head_classifies:
            dense = Dense(x.shape[-1], self.dtype, self.view, name="dense")
            x = jnp.tanh(dense(x))
        output = Dense(self.num_labels, self.dtype, self.view, bias, name="output")
        return output(x).astype(jnp.float32)
