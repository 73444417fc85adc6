"""Evaluation of the searches on functions that JAX traces, in float64."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.envelopes.searches import Search, Smoothed

_LARGEST_BATCH = 4096  # points evaluated at once


class Method(NamedTuple):
    """A search to start for each record.

    Attributes:
      start: makes a new search.
      reads_gradients: whether it is sent gradients.
      asks_for_one: a point at a time; then all records are searched side by side.
    """

    start: Callable[[], Search]
    reads_gradients: bool
    asks_for_one: bool


def solve(
    method: Method,
    value_fn: Callable[..., Any],
    gradient_fn: Callable[..., Any] | None,
    x: np.ndarray,
    data: Any = None,
    num: int = 1,
) -> list[Smoothed]:
    """Runs one search around x for each of ``num`` records; ``data`` None is no record."""
    found: dict[int, Smoothed] = {}
    group = num if method.asks_for_one else 1
    for first in range(0, num, group):
        searches = {i: method.start() for i in range(first, first + group)}
        asked = {i: next(search) for i, search in searches.items()}
        while asked:
            counts = [len(offsets) for offsets in asked.values()]
            values, gradients = _evaluate(
                value_fn,
                gradient_fn,
                method.reads_gradients,
                x + np.concatenate(list(asked.values())),
                data,
                np.repeat(list(asked), counts),
            )
            ends = np.cumsum(counts)
            for i, end, count in zip(list(asked), ends, counts, strict=True):
                mine = slice(end - count, end)
                slopes = None if gradients is None else gradients[mine]
                try:
                    asked[i] = searches[i].send((values[mine], slopes))
                except StopIteration as stop:
                    found[i] = stop.value
                    del asked[i]
    return [found[i] for i in range(num)]


def _evaluate(
    value_fn: Callable[..., Any],
    gradient_fn: Callable[..., Any] | None,
    with_gradients: bool,
    points: np.ndarray,
    data: Any,
    rows: np.ndarray,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Evaluates record ``rows[j]`` at ``points[j]``: values (k,), gradients (k, d).

    The gradients are None if they are not asked for.
    """
    values, gradients = [], []
    with jax.enable_x64(True):
        for first in range(0, len(points), _LARGEST_BATCH):
            part = slice(first, first + _LARGEST_BATCH)
            count = len(points[part])
            # Few shapes, so that few programs are compiled.
            size = 4 ** max(math.ceil(math.log(count, 4)), 1)
            padded = np.resize(points[part], (size, points.shape[1]))
            chosen = np.resize(rows[part], size)
            value, gradient = _values_and_gradients(
                value_fn, gradient_fn, with_gradients, padded, data, chosen
            )
            values.append(np.asarray(value)[:count])
            if gradient is not None:
                gradients.append(np.asarray(gradient)[:count])
    value = np.concatenate(values)
    gradient = np.concatenate(gradients) if with_gradients else None
    if not np.isfinite(value).all():
        raise ValueError("value_fn must return finite values; got one that is not")
    if gradient is not None and not np.isfinite(gradient).all():
        raise ValueError("gradients must be finite; got one that is not")
    return value, gradient


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _values_and_gradients(
    value_fn: Callable[..., Any],
    gradient_fn: Callable[..., Any] | None,
    with_gradients: bool,
    points: jax.Array,
    data: Any,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    def of_record(fn: Callable[..., Any], y: jax.Array, row: jax.Array) -> jax.Array:
        if data is None:
            return fn(y)
        out = fn(y, jax.tree.map(lambda leaf: jnp.asarray(leaf)[row][None], data))
        if jnp.shape(out)[:1] != (1,):
            raise ValueError(
                "value_fn and gradient_fn must have one row a record; of one record got "
                f"shape {jnp.shape(out)}"
            )
        return out[0]

    def value_of(y: jax.Array, row: jax.Array) -> jax.Array:
        value = jnp.asarray(of_record(value_fn, y, row))
        if value.shape != () or value.dtype != jnp.float64:
            raise ValueError(
                "value_fn must give one float64 number a point (a record) for float64 "
                f"points; got {value.dtype} of shape {value.shape}"
            )
        return value

    def one(y: jax.Array, row: jax.Array) -> Any:
        if not with_gradients:
            return value_of(y, row), None
        if gradient_fn is None:
            return jax.value_and_grad(value_of)(y, row)
        gradient = jnp.asarray(of_record(gradient_fn, y, row), y.dtype)
        if gradient.shape != y.shape:
            raise ValueError(
                f"gradient_fn must return shape {y.shape}, got {gradient.shape}"
            )
        return value_of(y, row), gradient

    return jax.vmap(one)(points, rows)
