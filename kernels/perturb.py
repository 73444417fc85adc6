"""Perturbed parameters: ``params + scale * direction``, formed where they are used.

A loss comes in one of two forms. A plain function ``value_fn(params, batch)`` gets the
whole perturbed tree. A :class:`LazyLoss` asks for each leaf, or each layer of a
stacked leaf, through a view ``at``, so that at most one layer of perturbed
parameters need exist. Both see the same bits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxdp.kernels.sphere import Direction, leaf_direction, path_str, wide
from jaxdp.kernels.threefry import keys_after, rounded, zero_after


class At(Protocol):
    """The leaf as it is seen at one evaluation.

    ``path`` is the leaf's key path joined by ``/``; ``leaf`` is the leaf itself, or its
    slice of layer ``layer`` where the leaf was declared stacked. ``after`` is an
    array that the perturbation must wait for (the layer's input): it orders the
    layers, so that XLA does not form all perturbed layers at once. ``rows`` are indices
    into the first axis of a leaf that is not stacked: what comes back is ``leaf[rows]``,
    perturbed, so that an embedding costs the rows that are read.
    """

    def __call__(
        self,
        path: str,
        leaf: jax.Array,
        layer: int | jax.Array | None = None,
        after: jax.Array | None = None,
        rows: jax.Array | None = None,
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class LazyLoss:
    """A loss ``fn(params, batch, at) -> losses (B,)`` that perturbs as it goes.

    Called as a plain loss it evaluates the unperturbed parameters.
    """

    fn: Callable[[Any, Any, At], jax.Array]

    def __call__(self, params: Any, batch: Any) -> jax.Array:
        return self.fn(params, batch, identity)


def identity(
    path: str,
    leaf: jax.Array,
    layer: int | jax.Array | None = None,
    after: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Returns the leaf unperturbed: the view of an unperturbed evaluation."""
    del path, layer, after
    return leaf if rows is None else leaf[rows]


def _ordered(
    direction: Direction, scale: jax.Array, after: jax.Array | None
) -> tuple[Direction, jax.Array]:
    """Returns the same direction and scale, to the bit, not available before ``after``.

    Without this order XLA forms every perturbed layer of both signs at once, and
    keeps one copy of a regenerated direction alive from its first use to its last.
    """
    if after is None:
        return direction, scale
    leaf_keys = keys_after(direction.leaf_keys, after)
    # Added as a number, not to the bits: a bitcast would drop the tangent of scale.
    tied = scale + zero_after(after).astype(scale.dtype)
    return dataclasses.replace(direction, leaf_keys=leaf_keys), tied


def view(direction: Direction, scale: jax.Array) -> At:
    """Returns the ``at`` of one evaluation: leaf + scale * direction.

    Computed in float32 (or the leaf's own dtype if wider), then cast to the leaf's.
    """

    def at(
        path: str,
        leaf: jax.Array,
        layer: int | jax.Array | None = None,
        after: jax.Array | None = None,
        rows: jax.Array | None = None,
    ) -> jax.Array:
        x = leaf if rows is None else leaf[rows]
        if path not in direction.paths:
            return x
        one, s = _ordered(direction, scale, after)
        wider = wide(leaf.dtype)
        u = leaf_direction(one, path, leaf.shape, layer, rows).astype(wider)
        moved = (x.astype(wider) + s.astype(wider) * u).astype(leaf.dtype)
        return rounded(moved, zero_after(jax.random.key_data(one.leaf_keys)))

    return at


def perturb(params: Any, direction: Direction, scale: jax.Array) -> Any:
    """Returns ``params + scale * direction`` as a tree; frozen leaves stay as they are."""
    at = view(direction, jnp.asarray(scale))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: at(path_str(path), leaf), params
    )


def losses_at(
    value_fn: Callable[[Any, Any], jax.Array] | LazyLoss,
    params: Any,
    batch: Any,
    direction: Direction,
    scale: jax.Array,
    after: jax.Array | None = None,
) -> jax.Array:
    """Computes the losses (B,) of ``params + scale * direction``, for either form of loss.

    ``after``: an array that must exist before this evaluation starts.

    Raises:
      ValueError: orthonormal directions for a ``LazyLoss``.
    """
    direction, scale = _ordered(direction, scale, after)
    if isinstance(value_fn, LazyLoss):
        if direction.law == "orthonormal":
            raise ValueError(
                "direction must be 'sphere', 'gaussian' or 'rademacher' for a LazyLoss, "
                "got 'orthonormal', whose rows are stored: several copies of the "
                "parameters"
            )
        return value_fn.fn(params, batch, view(direction, scale))
    return value_fn(perturb(params, direction, scale), batch)
