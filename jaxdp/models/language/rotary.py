"""Rotary positions: each pair of numbers of a head is turned by an angle of its place.

Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021, and what a checkpoint's
``rope_scaling`` does to the frequencies so that a model reads longer texts.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate

ORIGINAL = "original_max_position_embeddings"
#: Kinds of scaling -> the numbers that each must have.
KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", ORIGINAL),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
    """Frequencies of the rotary positions of a layer.

    Attributes:
      size: numbers of a head that are turned, the first ones; even.
      base: of the frequencies, ``rope_theta``.
      scaling: items of ``rope_scaling``.
      longest: tokens that the model reads, ``max_position_embeddings``.
    """

    size: int
    base: float
    longest: int
    scaling: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        validate.positive(rope_theta=self.base)
        if self.size % 2 or self.size < 2:
            raise ValueError(
                f"rotary positions need a width of heads that is even, got {self.size}"
            )
        given = dict(self.scaling)
        if self.kind not in KINDS:
            raise ValueError(
                f"rope_scaling must be of the type {', '.join(KINDS)}, got {self.kind!r}"
            )
        missing = [name for name in KINDS[self.kind] if given.get(name) is None]
        if missing:
            raise ValueError(
                f"rope_scaling of the type {self.kind!r} must have {', '.join(missing)}, "
                f"got {given}"
            )
        for name in ("short_factor", "long_factor"):
            if name in given and len(given[name]) != self.size // 2:
                raise ValueError(
                    f"{name} of rope_scaling must have {self.size // 2} numbers, got "
                    f"{len(given[name])}"
                )

    @property
    def kind(self) -> str:
        """Type of the scaling; old files call it ``type``, and longrope ``su``."""
        given = dict(self.scaling)
        kind = given.get("rope_type") or given.get("type") or "default"
        return "longrope" if kind == "su" else kind

    def frequencies(self, length: int) -> tuple[np.ndarray, float]:
        """Returns angles from one token to the next, (size / 2,), and a factor of both.

        ``length`` is that of the padded batch: longrope has other frequencies for one that
        is longer than the model read at first.
        """
        given: dict[str, Any] = dict(self.scaling)
        base = self.base ** (np.arange(0, self.size, 2) / self.size)
        plain, factor, kind = 1 / base, given.get("factor", 1.0), self.kind
        first = given.get(ORIGINAL) or self.longest
        if kind == "linear":
            return plain / factor, 1.0
        if kind == "llama3":
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            turns = first * plain / (2 * math.pi)
            share = np.clip((turns - low) / (high - low), 0, 1)
            return plain * (share + (1 - share) / factor), 1.0
        if kind == "yarn":
            share = self._ramp(first, given)
            return plain * (share + (1 - share) / factor), _yarn_factor(factor, given)
        if kind == "longrope":
            by = given["long_factor" if length > first else "short_factor"]
            ratio = given.get("factor") or self.longest / first
            scale = math.sqrt(1 + math.log(ratio) / math.log(first)) if ratio > 1 else 1
            return plain / np.asarray(by), given.get("attention_factor") or scale
        return plain, 1.0

    def _ramp(self, first: int, given: Mapping[str, Any]) -> np.ndarray:
        """Returns YaRN's share of each frequency that stays as it is, from 1 to 0."""

        def place(turns: float) -> float:
            return (
                self.size
                * math.log(first / (turns * 2 * math.pi))
                / (2 * math.log(self.base))
            )

        low = place(given.get("beta_fast") or 32)
        high = place(given.get("beta_slow") or 1)
        if given.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        high += 0.001 * (low == high)
        return 1 - np.clip((np.arange(self.size // 2) - low) / (high - low), 0, 1)


def _yarn_factor(factor: float, given: Mapping[str, Any]) -> float:
    """Returns what YaRN multiplies queries and keys by."""

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return given["attention_factor"]
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)


def angles(
    rotation: Rotation | None, size: int, length: int, places: jax.Array
) -> jax.Array:
    """Returns cosines and sines at places: (..., L) -> (2, ..., L, size / 2) float32.

    ``length`` is that of the padded batch; None does not turn.
    """
    plain = np.zeros(size // 2), 1.0
    turn, factor = rotation.frequencies(length) if rotation is not None else plain
    angle = places[..., None] * jnp.asarray(turn, jnp.float32)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)]) * factor


def rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turns the first numbers of each head, (B, L, H, D), in float32.

    The angles are (2, L, r), or (2, B, L, r) where records are at places of their own.
    """
    cos, sin = angles[..., None, :]
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    one, two, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = one * cos - two * sin, two * cos + one * sin, rest
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
