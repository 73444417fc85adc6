"""The loss of a Llama-like decoder, layer by layer: for shapes that the library lacks.

Root-mean-square norms, rotary positions, queries in groups that share keys and values, a
gated feed-forward network (SwiGLU). ``Llama`` has the widths of Llama 3 8B (Grattafiori et
al., 2024). One loss of each record, that of a prompt's label words, as
:func:`jaxdp.models.language.tasks.prompt` has it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxdp
from jaxdp.kernels.perturb import At
from jaxdp.models.language.modules import in_layer, with_small_leaves
from jaxdp.models.losses import softmax_cross_entropy

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama:
    """Widths of a decoder; those of 8 B parameters, if none are given."""

    vocab_size: int = 128256
    hidden_size: int = 4096
    layers: int = 32
    heads: int = 32
    key_heads: int = 8
    intermediate_size: int = 14336
    base: float = 500_000.0
    epsilon: float = 1e-5
    dtype: str = "bfloat16"

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.heads

    def init(self, key: Array) -> Any:
        """Draws random parameters, of which the layers are stacked."""
        width, inner = self.hidden_size, self.intermediate_size
        keys_width = self.key_heads * self.head_size
        kernels = {
            "query": (width, width),
            "key": (width, keys_width),
            "value": (width, keys_width),
            "output": (width, width),
            "gate": (width, inner),
            "up": (width, inner),
            "down": (inner, width),
        }
        shapes = {
            "embedding": (self.vocab_size, width),
            "head": (self.vocab_size, width),
            **{f"layers/{n}": (self.layers, *s) for n, s in kernels.items()},
        }
        keys = jax.random.split(key, len(shapes))
        drawn = {
            name: (0.02 * jax.random.normal(k, shape)).astype(self.dtype)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        ones = jnp.ones((self.layers, width), self.dtype)
        layers = {name: drawn.pop(f"layers/{name}") for name in kernels}
        layers |= {"attention_norm": ones, "mlp_norm": ones}
        return {**drawn, "layers": layers, "final_norm": ones[0]}

    def prompt(self, words: Sequence[int]) -> jaxdp.LazyLoss:
        """The loss of classification by the word after a position, float32 (B,)."""
        vocabulary = jnp.asarray(words, jnp.int32)

        def loss(params: Any, batch: Any, at: At) -> Array:
            x = self._hidden(params, batch["tokens"], batch["mask"], at)
            x = jnp.take_along_axis(x, batch["position"][:, None, None], axis=1)[:, 0]
            table = at("head", params["head"], after=x, rows=vocabulary)
            scores = jnp.einsum(
                "bd,vd->bv", x, table, preferred_element_type=jnp.float32
            )
            return softmax_cross_entropy(scores, batch["label"])

        return jaxdp.LazyLoss(loss)

    def _hidden(self, params: Any, tokens: Array, mask: Array, at: At) -> Array:
        length = tokens.shape[1]
        attends = mask[:, None, None] & jnp.tri(length, dtype=bool)
        angles = self._angles(jnp.arange(length))
        x = at("embedding", params["embedding"], rows=tokens)

        def layer(x: Array, scanned: tuple[Array, Any]) -> tuple[Array, None]:
            index, own = scanned
            view = in_layer(at, index)

            def dense(name: str, x: Array, after: Array | None = None) -> Array:
                return x @ view(name, own[name], after=x if after is None else after)

            def heads(name: str, x: Array) -> Array:
                return dense(name, x).reshape(*x.shape[:2], -1, self.head_size)

            y = self._norm(x, own["attention_norm"])
            query, key = (rotated(heads(n, y), angles) for n in ("query", "key"))
            y = jax.nn.dot_product_attention(
                query, key, heads("value", y), mask=attends
            )
            x = x + dense("output", y.reshape(x.shape))
            y = self._norm(x, own["mlp_norm"])
            up = dense("up", y)
            y = jax.nn.silu(dense("gate", y)) * up
            return x + dense("down", y, after=up), None

        layers = with_small_leaves(params["layers"], at)
        x, _ = jax.lax.scan(layer, x, (jnp.arange(self.layers), layers))
        return self._norm(x, at("final_norm", params["final_norm"]))

    def _norm(self, x: Array, scale: Array) -> Array:
        wide = x.astype(jnp.float32)
        # The mean is a product with a constant: see the library's own LayerNorm.
        share = jnp.full((x.shape[-1], 1), 1 / x.shape[-1])
        mean = jnp.matmul(jnp.square(wide), share, precision=jax.lax.Precision.HIGHEST)
        return (wide * jax.lax.rsqrt(mean + self.epsilon) * scale).astype(x.dtype)

    def _angles(self, positions: Array) -> Array:
        powers = jnp.arange(0, self.head_size, 2) / self.head_size
        return positions[:, None] / self.base**powers


def rotated(x: Array, angles: Array) -> Array:
    """Rotates the two halves of each head, (B, L, H, D), by the angles of its position."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    both = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(both, axis=-1).astype(x.dtype)
