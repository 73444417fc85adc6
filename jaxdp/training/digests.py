"""Digests of trees: of data and initial parameters, and of parameters between chunks."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels.sphere import path_str

#: Sums of a checksum, of 32 bits each.
_LANES = 4
#: What a checksum's text begins with; a SHA-256 is hexadecimal alone.
_CHECKSUM = "checksum:"


def sha256(tree: Any) -> "hashlib._Hash":
    """Returns SHA-256 over paths, dtypes, shapes and bytes of a tree's leaves."""
    state = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(jnp.asarray(leaf))  # As a run has it: in JAX's precision.
        state.update(_head(path, array).encode())
        # Read where it lies: bytes of it would be a second copy.
        octets: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        state.update(octets)
    return state


def scattered(tree: Any) -> bool:
    """Returns True if a leaf is split on devices of several processes: none can read it."""
    return any(
        isinstance(x, jax.Array)
        and not (x.is_fully_addressable or x.is_fully_replicated)
        for x in jax.tree.leaves(tree)
    )


def of_leaves(
    tree: Any, like: Mapping[str, str] | None = None, *, split: bool | None = None
) -> dict[str, str]:
    """Returns a digest of each leaf of a tree, by path.

    It is the SHA-256, but for a leaf that is :func:`scattered`: the checksum of
    :func:`on_devices`, for which all its processes must call this. ``split`` leaves out all
    leaves but the scattered ones (True) or but the others (False). ``like`` are digests to
    compare with: their kinds are computed where they can be.
    """
    like = like or {}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_str(path)
        if split not in (None, scattered(leaf)):
            continue
        summed = scattered(leaf) or is_checksum(like.get(name))
        found[name] = on_devices(leaf) if summed else sha256(leaf).hexdigest()
    return found


def is_checksum(digest: Any) -> bool:
    """Returns True for the kind of digest that :func:`on_devices` computes."""
    return str(digest).startswith(_CHECKSUM)


def of_scattered(params: Any) -> str:
    """Returns a digest of parameters that are :func:`scattered`; "" for others."""
    return on_devices(params) if scattered(params) else ""


def of_params(params: Any, like: str | None = None) -> str:
    """Returns a digest of parameters, or other arrays, by which their bits compare.

    On a CPU it is their SHA-256. Elsewhere they stay where they are: it is a checksum that
    is computed there. Parameters that differ by accident differ in it, but for one case in
    2^128. It stops nobody who chooses them, and need not: releases and initial parameters,
    from which a replay makes them, are authenticated by the ledger's chain.

    ``like`` is a digest to compare with: its kind is computed. All processes must call this
    for parameters that are :func:`scattered`.
    """
    if scattered(params):
        return on_devices(params)
    if like is None:
        on_host = platforms(params) <= {"cpu"}
    else:
        on_host = not is_checksum(like)
    if on_host:
        return sha256(params).hexdigest()
    return on_devices(params)


def platforms(params: Any) -> set[str]:
    """Returns the platforms on which the leaves are that JAX holds."""
    arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
    return {device.platform for x in arrays for device in x.devices()}


def on_devices(params: Any) -> str:
    """Returns a checksum of parameters as text, computed where they are."""
    words = np.asarray(checksum(params), "<u4")
    return _CHECKSUM + words.tobytes().hex()


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """Returns four sums (4,) of the bits of a tree's leaves, each hashed with its place.

    Sums of integers, so that no order of the additions changes them.
    """
    total = jnp.zeros(_LANES, jnp.uint32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        total += _sums(_head(path, leaf), leaf)
    return total


def _head(path: Any, leaf: Any) -> str:
    return f"{path_str(path)}:{leaf.dtype}:{leaf.shape};"


def _sums(head: str, leaf: jax.Array) -> jax.Array:
    words = _words(leaf)
    sums = []
    for lane in range(_LANES):
        seed = hashlib.shake_256(f"{lane}:{head}".encode()).digest(4 * (words.ndim + 1))
        first, *factors = np.frombuffer(seed, "<u4")
        place = jnp.full(words.shape, first)
        for axis, factor in enumerate(factors):
            index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
            place += index * (factor | np.uint32(1))
        sums.append(jnp.sum(_mixed(words ^ place), dtype=jnp.uint32))
    return jnp.stack(sums)


def _words(leaf: jax.Array) -> jax.Array:
    """Returns the bits of a leaf, 32 or fewer of them in each word."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    real = jnp.issubdtype(leaf.dtype, jnp.floating)
    bits = (jnp.finfo if real else jnp.iinfo)(leaf.dtype).bits  # Of int4 too.
    kind = f"uint{min(32, bits)}"
    return jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    """Mixes the bits of each word, by the last steps of MurmurHash3: a bijection."""
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        words = (words ^ (words >> 16)) * np.uint32(factor)
    return words ^ (words >> 16)
