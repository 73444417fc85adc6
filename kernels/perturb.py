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

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import perturb
      >>> perturb.identity("w", jnp.arange(3.0)).tolist()
      [0.0, 1.0, 2.0]
      >>> perturb.identity("table", jnp.eye(3), rows=jnp.array([2])).tolist()
      [[0.0, 0.0, 1.0]]
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

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def squared(params, batch, at):
      ...     w = at("w", params["w"])
      ...     return (batch @ w) ** 2
      >>> loss = jaxdp.LazyLoss(squared)
      >>> loss({"w": jnp.ones(2)}, jnp.array([[1.0, 2.0], [0.0, 1.0]])).tolist()
      [9.0, 1.0]
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
    """Returns the leaf unperturbed: the view of an unperturbed evaluation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import perturb
      >>> perturb.identity("w", jnp.arange(3.0), rows=jnp.array([1, 2])).tolist()
      [1.0, 2.0]
    """
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


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """View of one evaluation: ``leaf + scale * direction``, as :func:`view` makes it.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import perturb, sphere
      >>> rows = sphere.directions(jax.random.key(0), {"w": jnp.zeros(4)}, law="sphere")
      >>> at = perturb.View(sphere.select(rows, 0), jnp.float32(0.0))
      >>> at("w", jnp.ones(4)).tolist()
      [1.0, 1.0, 1.0, 1.0]
    """

    direction: Direction
    scale: jax.Array

    def __call__(
        self,
        path: str,
        leaf: jax.Array,
        layer: int | jax.Array | None = None,
        after: jax.Array | None = None,
        rows: jax.Array | None = None,
    ) -> jax.Array:
        x = leaf if rows is None else leaf[rows]
        if path not in self.direction.paths:
            return x
        one, s = _ordered(self.direction, self.scale, after)
        wider = wide(leaf.dtype)
        u = leaf_direction(one, path, leaf.shape, layer, rows).astype(wider)
        moved = (x.astype(wider) + s.astype(wider) * u).astype(leaf.dtype)
        return rounded(moved, zero_after(jax.random.key_data(one.leaf_keys)))


def view(direction: Direction, scale: jax.Array) -> At:
    """Returns the ``at`` of one evaluation: leaf + scale * direction.

    Computed in float32 (or the leaf's own dtype if wider), then cast to the leaf's.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import perturb, sphere
      >>> params = {"w": jnp.zeros(4)}
      >>> rows = sphere.directions(jax.random.key(0), params, law="rademacher")
      >>> at = perturb.view(sphere.select(rows, 0), jnp.float32(0.5))
      >>> jnp.abs(at("w", params["w"])).tolist()
      [0.5, 0.5, 0.5, 0.5]
    """
    return View(direction, scale)


def perturb(params: Any, direction: Direction, scale: jax.Array) -> Any:
    """Returns ``params + scale * direction`` as a tree; frozen leaves stay as they are.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import perturb, sphere
      >>> params = {"w": jnp.zeros(4)}
      >>> rows = sphere.directions(jax.random.key(0), params, law="sphere")
      >>> moved = perturb.perturb(params, sphere.select(rows, 0), 0.1)
      >>> round(float(jnp.linalg.norm(moved["w"])), 4)
      0.2
    """
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

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import perturb, sphere
      >>> def value_fn(params, batch):
      ...     return batch @ params
      >>> rows = sphere.directions(jax.random.key(0), jnp.zeros(2), law="sphere")
      >>> one, scale = sphere.select(rows, 0), jnp.float32(0.0)
      >>> perturb.losses_at(value_fn, jnp.ones(2), jnp.eye(2), one, scale).tolist()
      [1.0, 1.0]
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
