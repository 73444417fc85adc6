r"""Exact samplers on the host: integers whose law is a formula, not a float's.

A floating-point sampler of noise leaks, because the set of numbers that it can return,
added to a sum, depends on the sum. These samplers compute with integers alone, follow
their law exactly, and take their coins from SHAKE-256 keyed by a secret. Whoever does
not have the secret cannot tell the coins from uniform ones.

They are meant for what a run draws once, before it starts. They do not run in constant
time: an adversary who can time single draws is not covered.

References:
  Canonne, Kamath & Steinke, `The Discrete Gaussian for Differential Privacy
  <https://arxiv.org/abs/2004.00010>`_, 2020, Algorithms 1 to 3.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np

from jaxdp.core import validate

Shape = int | tuple[int, ...]

_WORD = 64
_WORDS_PER_BLOCK = 512
# Up to here a draw leaves int64 only beyond 2**7 scales: probability below exp(-127).
_LARGEST_SCALE = 2**56


class Coins:
    """Endless stream of coins: a function of a secret and a context.

    Block i of the stream is SHAKE-256(encoding of secret and context, i), so that a long
    stream costs linear time. The encoding writes the type and the length of each part,
    so that no two different (secret, context) share a stream. The same ones give the
    same coins on every machine and Python version.

    Args:
      secret: bytes, at least one; whoever has it can subtract the noise.
      *context: bytes, str or int; public, what the stream is used for.
    """

    __slots__ = ("_next_word",)

    def __init__(self, secret: bytes, *context: str | bytes | int):
        validate.instance(bytes, secret=secret)
        if not secret:
            raise ValueError("secret must have at least one byte, got none")
        parts = b"".join(map(_encode, context))
        self._next_word = _words(_encode(secret) + parts).__next__

    def __repr__(self) -> str:
        return "Coins(<secret>)"

    def __reduce__(self) -> NoReturn:
        # A copy would hand out the same coins a second time.
        raise TypeError("Coins cannot be copied or pickled; make them from the secret")

    def bits(self, k: int) -> int:
        """Draws ``k`` uniform bits, as an integer in [0, 2**k)."""
        validate.integer(at_least=0, k=k)
        return self._bits(k)

    def below(self, n: int) -> int:
        """Draws a uniform integer in [0, n)."""
        validate.integer(n=n)
        return self._below(n)

    # The same without the checks, for the samplers' inner loops.

    def _bits(self, k: int) -> int:
        value = 0
        for _ in range(-(-k // _WORD)):
            value = value << _WORD | self._next_word()
        return value >> -k % _WORD

    def _below(self, n: int) -> int:
        k = (n - 1).bit_length()
        while True:
            value = self._bits(k)
            if value < n:
                return value

    def _bernoulli(self, num: int, den: int) -> bool:
        """Draws True with probability num/den <= 1: a uniform real against it, by words.

        One word decides, but for a probability of 2**-64.
        """
        while True:
            threshold, num = divmod(num << _WORD, den)
            word = self._next_word()
            if word != threshold:
                return word < threshold

    def _bernoulli_exp_unit(self, num: int, den: int) -> bool:
        """Draws True with probability exp(-num/den), for num <= den.

        The first k at which a coin of probability num/(k den) fails is odd with the
        probability sum_k (-num/den)**k / k!.
        """
        k = den
        while self._bernoulli(num, k):
            k += den
        return bool(k // den & 1)

    def _bernoulli_exp(self, num: int, den: int) -> bool:
        """Draws True with probability exp(-num/den) exactly, for num >= 0, den > 0."""
        while num > den:
            if not self._bernoulli_exp_unit(1, 1):
                return False
            num -= den
        return self._bernoulli_exp_unit(num, den)


def discrete_gaussian(coins: Coins, std: int, shape: Shape) -> np.ndarray:
    r"""Draws integers with :math:`P[Z=z] \propto \exp(-z^2/2\,\mathrm{std}^2)`.

    Args:
      coins: where the randomness comes from; they advance.
      std: :math:`\sigma`, an integer in [0, 2**56]; 0 gives zeros. The variance is at
        most ``std**2``, and equal to it up to a relative :math:`e^{-2\pi^2\sigma^2}`.
        (Callers round a real one up, so that all arithmetic stays in integers.)
      shape: an integer or a tuple of them.

    Returns:
      int64 array of that shape, filled in row-major order.

    Privacy:
      Added to an integer query of L2 sensitivity ``s``, each coordinate with its own
      draw, it is :math:`s^2/2\sigma^2`-zCDP, as the continuous Gaussian is; its Renyi
      divergence under an integer shift is at most the continuous one's.
    """
    validate.integer(at_least=0, at_most=_LARGEST_SCALE, std=std)
    if std == 0:
        return np.zeros(_shape(shape), np.int64)
    std = int(std)
    two_variance = 2 * std**2
    accept = coins._bernoulli_exp

    def draw() -> int:
        # exp(-|y|/std), the proposal, times exp(-(|y| - std)**2 / 2 std**2) is the
        # target up to a constant. Three proposals in four are accepted.
        while True:
            y = _laplace(coins, std, 1)
            if accept((abs(y) - std) ** 2, two_variance):
                return y

    return _fill(draw, shape)


def discrete_laplace(coins: Coins, scale: int | Fraction, shape: Shape) -> np.ndarray:
    r"""Draws integers with :math:`P[Z=z] \propto \exp(-|z|/\mathrm{scale})`.

    Args:
      coins: as in :func:`discrete_gaussian`.
      scale: an integer or a fraction in [0, 2**56]; 0 gives zeros.
      shape: as in :func:`discrete_gaussian`, which returns the same.

    Privacy:
      Added to an integer query of L1 sensitivity ``s`` it is s/scale-DP, purely.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | np.integer | Fraction):
        raise TypeError(
            f"scale must be an integer or a Fraction, got {scale!r} of type "
            f"{type(scale).__name__}"
        )
    scale = Fraction(scale)
    if not 0 <= scale <= _LARGEST_SCALE:
        raise ValueError(f"scale must be in [0, 2**56], got {scale!r}")
    if scale == 0:
        return np.zeros(_shape(shape), np.int64)
    num, den = scale.numerator, scale.denominator
    return _fill(lambda: _laplace(coins, num, den), shape)


def _laplace(coins: Coins, num: int, den: int) -> int:
    """Draws one integer z with probability proportional to exp(-abs(z) den/num)."""
    unit = coins._bernoulli_exp_unit
    while True:
        # low + num * high is geometric of ratio exp(-1/num).
        low = coins._below(num)
        if not unit(low, num):
            continue
        high = 0
        while unit(1, 1):
            high += 1
        z = (low + num * high) // den
        if coins._next_word() & 1:
            return z
        if z:  # Zero would otherwise come with both signs.
            return -z


def _encode(part: Any) -> bytes:
    """Encodes a part of a context unambiguously: type, length, content."""
    if isinstance(part, bytes):
        kind, content = b"b", part
    elif isinstance(part, str):
        kind, content = b"s", part.encode("utf-8", "surrogatepass")
    elif isinstance(part, int) and not isinstance(part, bool):
        kind, content = b"i", b"%d" % part
    else:
        raise TypeError(
            f"context must be str, bytes or int, got {part!r} of type "
            f"{type(part).__name__}"
        )
    return kind + struct.pack("<Q", len(content)) + content


def _words(prefix: bytes) -> Iterator[int]:
    """Yields uniform 64-bit words, block after block."""
    start = hashlib.shake_256(prefix)
    unpack = struct.Struct(f"<{_WORDS_PER_BLOCK}Q").unpack
    index = 0
    while True:
        block = start.copy()
        block.update(b"#" + struct.pack("<Q", index))
        yield from unpack(block.digest(8 * _WORDS_PER_BLOCK))
        index += 1


def _shape(shape: Shape) -> tuple[int, ...]:
    dims = shape if isinstance(shape, tuple) else (shape,)
    for dim in dims:
        validate.integer(at_least=0, shape=dim)
    return tuple(int(dim) for dim in dims)


def _fill(draw: Any, shape: Shape) -> np.ndarray:
    dims = _shape(shape)
    count = math.prod(dims)
    flat = np.fromiter((draw() for _ in range(count)), np.int64, count)
    return flat.reshape(dims)
