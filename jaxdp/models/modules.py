r"""Modules of Flax, and their forward passes in a form that asks for every leaf.

A network's *lazy* loss is ``fn(params, batch, at) -> (B,)``; it asks ``at(path, leaf,
layer=None, after=None)`` for every leaf where it uses it:

- path: the leaf's key path in ``params``, ``jax.tree_util.keystr(path, simple=True,
  separator="/")``, e.g. ``"Dense_0/kernel"``;
- leaf: that leaf, or (in a layer scan) its slice ``leaf[layer]``;
- layer: the index of the slice of a stacked leaf, which may be traced;
- after: an array the returned leaf must wait for, here (for kernels) the layer's
  input. It puts the layers in order, so that a compiler does not form all perturbed
  layers at once.

``at`` returns the leaf, perturbed or not, so a deep network never holds a second copy
of its parameters. With ``perturb.identity`` the lazy form is the plain loss.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.kernels.perturb import At
from jaxdp.models.losses import Rows

Array = jax.Array
Params = dict[str, Any]


# --- modules -----------------------------------------------------------------------


class MLP(nn.Module):
    """Dense layers with ReLU between them; no hidden layer is the linear model.

    Attributes:
      num_outputs: classes, or 1 for regression.
      hidden: widths of the hidden layers.
      output_scale: standard deviation of the last kernel at initialisation; 0 starts
        at the same loss for every class. Biases start at 0, hidden kernels with
        variance 2 / fan-in.
    """

    num_outputs: int
    hidden: tuple[int, ...] = ()
    output_scale: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:  # (B, d) -> (B, num_outputs)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width, kernel_init=nn.initializers.he_normal())(x))
        last = nn.initializers.normal(self.output_scale)
        return nn.Dense(self.num_outputs, kernel_init=last)(x)


class ResidualStack(nn.Module):
    """x -> embed; then ``num_layers`` blocks h + relu(h W_l + b_l); then a head.

    The blocks are one leaf each for W and b, of shape (num_layers, ...), applied by
    ``lax.scan``: the shape of a deep network whose layers compile once.

    Attributes:
      num_outputs: classes, or 1 for regression. width: of h. num_layers: blocks.
      output_scale: as for ``MLP``.
    """

    num_outputs: int
    width: int = 32
    num_layers: int = 4
    output_scale: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:  # (B, d) -> (B, num_outputs)
        x = nn.Dense(self.width, kernel_init=nn.initializers.he_normal(), name="in")(x)
        x = _Blocks(self.width, self.num_layers, name="blocks")(x)
        last = nn.initializers.normal(self.output_scale)
        return nn.Dense(self.num_outputs, kernel_init=last, name="out")(x)


class _Blocks(nn.Module):
    width: int
    num_layers: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        # Small blocks: the stack starts close to the identity at any depth.
        scale = (self.width * self.num_layers) ** -0.5
        shape = (self.num_layers, self.width, self.width)
        kernel = self.param("kernel", nn.initializers.normal(scale), shape)
        bias = self.param("bias", nn.initializers.zeros, shape[:2])

        def block(h: Array, layer: tuple[Array, Array]) -> tuple[Array, None]:
            return h + nn.relu(h @ layer[0] + layer[1]), None

        return jax.lax.scan(block, x, (kernel, bias))[0]


# --- lazy forward passes -----------------------------------------------------------


def mlp_outputs(params: Params, x: Rows, at: At) -> Array:
    """Evaluates ``MLP`` with all leaves taken through ``at``: (B, num_outputs)."""
    h, depth = jnp.asarray(x), len(params)
    for i in range(depth):
        h = _dense(params, f"Dense_{i}", h, at)
        h = nn.relu(h) if i < depth - 1 else h
    return h


def residual_stack_outputs(params: Params, x: Rows, at: At) -> Array:
    """Evaluates ``ResidualStack`` with all leaves, or slices, taken through ``at``."""

    def block(h: Array, scanned: tuple[Array, Params]) -> tuple[Array, None]:
        layer, slices = scanned
        kernel = at("blocks/kernel", slices["kernel"], layer=layer, after=h)
        bias = at("blocks/bias", slices["bias"], layer=layer)
        return h + nn.relu(h @ kernel + bias), None

    num_layers = params["blocks"]["kernel"].shape[0]
    h = _dense(params, "in", jnp.asarray(x), at)
    h, _ = jax.lax.scan(block, h, (jnp.arange(num_layers), params["blocks"]))
    return _dense(params, "out", h, at)


def is_stacked(path: str) -> bool:
    """Returns True if a leaf of ``ResidualStack`` is stacked, for ``stacked=``."""
    return path.startswith("blocks/")


def _dense(params: Params, name: str, x: Array, at: At) -> Array:
    # Only the large leaf waits. A bias that waited too would make each layer's order
    # depend on all the layers before it, and keep their activations alive.
    kernel = at(f"{name}/kernel", params[name]["kernel"], after=x)
    return x @ kernel + at(f"{name}/bias", params[name]["bias"])
