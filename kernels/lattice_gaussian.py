r"""Discrete Gaussians drawn on the device: integers from first to last.

A float cannot carry noise: its own lattice shows what it was added to. Here a number is

.. math:: X = hT + \sum_{i=1}^{6} U_i - 3(h-1), \qquad h = 2^{s},

with T drawn from a table of exact counts (2**127 in all, alias method: one look-up whatever
comes out), and each U_i uniform on {0, ..., h-1}: bits, shifted and added. Time and memory
access do not depend on what was rejected, for nothing is; one evaluation of a block cipher
for the table and one for the bits; no float, no 64-bit word, no loop.

What T must be. The sum of the U_i smooths the lattice of hT: at the frequencies
:math:`2\pi k/h` of that lattice its characteristic function has a zero of order six. What
it does to the frequencies of a Gaussian is undone beforehand: T has the law of the
Gaussian *deconvolved* with the sum, :math:`e^{-j^2/2v}` times a polynomial that takes the
cumulants of the U_i off (their variance, fourth, sixth and eighth; the rest is below
2**-50 at 12 standard deviations). What remains is the zero's order,

.. math:: r(x) \approx 2\cos(2\pi x/h)\,(2\pi\sigma_T)^{-6} He_6(x/\sigma),
          \qquad \sigma_T \ge 75,

relative to the ideal law :math:`\propto e^{-x^2/2\sigma^2}` on the integers (for large h;
seven times as much for h = 2), and what counts of 2**-127 round. A test goes through all
cells of the table for many deviations and finds the constants below;
``jaxdp.accounting`` charges them for every number of a run.

With a *fine* law the same is drawn on a lattice of 2**-32: see :mod:`fixed_point`.

References:
  Micciancio & Walter, Gaussian Sampling over the Integers: Efficient, Generic,
  Constant-Time, 2017 (small tables, strides, how to measure closeness); Poeppelmann,
  Ducas, Gueneysu, Enhanced Lattice-Based Signatures on Reconfigurable Hardware, 2014
  (convolution); Walker, 1977 (alias method).
"""

import decimal
import functools
import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import threefry

#: The largest standard deviation, in units. Eight of them fit into an int32. (Draws wrap
#: modulo 2**32 as the sums do that they are added to.)
MAX_STD = 2**28
#: Up to so many standard deviations the law is close to the ideal one.
REACH = 11.0
#: Mean square of log(realised probability) - log(ideal one) there, for every std.
MEAN_SQUARE = 2.0**-89
#: Bound on the difference in its exponential moments. The mean square weighted with
#: exp(ORDER * abs(log ratio)) is still at most ``MEAN_SQUARE``.
ORDER = 2.0**33

_SLOTS = 2**11
_SLOT_BITS = 116  # Of a slot's threshold: 20 in the first word, and three words.
_WIDEST = 150  # Standard deviations of T are below; 13 of them are in the table.
_TERMS = 6
_PRECISION = 70  # Decimal digits.


class Law(NamedTuple):
    """The tables of one standard deviation. Public.

    Laws of different deviations have the same shapes: they can be stacked, and picked
    inside a program.

    Example:
      >>> from jaxdp.kernels import lattice_gaussian
      >>> law = lattice_gaussian.law(1000)
      >>> law.alias.shape, len(law.thresholds), int(law.shift)
      ((2048,), 4, 3)
    """

    alias: np.ndarray  # shape=(2048,), dtype=int32
    thresholds: tuple[np.ndarray, ...]  # 4 of shape=(2048,), dtype=uint32
    shift: np.ndarray  # shape=(), dtype=int32; s


@functools.lru_cache(maxsize=256)
def law(std: int, *, fine: bool = False) -> Law:
    """Returns the tables of a standard deviation, the same on every machine.

    Args:
      std: integer from 1 to 2**28, in units.
      fine: for :func:`draw_fine`; ``std`` is then at least 75.

    Raises:
      TypeError: not an integer. ValueError: out of range.

    Example:
      >>> from jaxdp.kernels import lattice_gaussian
      >>> lattice_gaussian.law(1000).alias.shape
      (2048,)
      >>> lattice_gaussian.law(0)
      Traceback (most recent call last):
          ...
      ValueError: std must be from 1 to 2**28, got 0
    """
    shift = shift_of(std)
    if fine and std < _WIDEST / 2:
        raise ValueError(
            f"std must be at least {_WIDEST // 2} on a fine grid, got {std}"
        )
    counts = _counts(std, shift, fine)
    thresholds, alias = _aliased(counts)
    words = [
        np.array([(t >> (32 * i)) & 0xFFFFFFFF for t in thresholds], np.uint32)
        for i in (3, 2, 1, 0)
    ]
    tables = np.array(alias, np.int32), *words, np.array(shift, np.int32)
    for table in tables:  # Whoever writes into one would change all later noise.
        table.setflags(write=False)
    return Law(tables[0], tuple(words), tables[-1])


def shift_of(std: int) -> int:
    """Returns s, the logarithm of the table's stride.

    Example:
      >>> from jaxdp.kernels import lattice_gaussian
      >>> lattice_gaussian.shift_of(100), lattice_gaussian.shift_of(1000)
      (0, 3)
    """
    if isinstance(std, bool) or not isinstance(std, int | np.integer):
        raise TypeError(f"std must be an integer, got {std!r}")
    if not 1 <= std <= MAX_STD:
        raise ValueError(f"std must be from 1 to 2**28, got {std}")
    return max(0, math.ceil(math.log2(int(std) / _WIDEST)))


def _counts(std: int, shift: int, fine: bool) -> list[int]:
    """Returns the counts of abs(T) = 0, 1, ...: integers of sum 2**127.

    The count of zero is half of its weight, because zero is drawn with both signs.
    """
    stride = Fraction(2) ** shift
    step = Fraction(1, 2**32) if fine else Fraction(1)  # Of the lattice of the U_i.
    low = step / stride
    # Cumulants of the U_i in strides: B_n (1 - low**n) / n.
    second, fourth, sixth, eighth = (
        _TERMS * bernoulli * (1 - low**n) / n
        for n, bernoulli in (
            (2, Fraction(1, 6)),
            (4, Fraction(-1, 30)),
            (6, Fraction(1, 42)),
            (8, Fraction(-1, 30)),
        )
    )
    if shift == 0 and not fine:
        second = fourth = sixth = eighth = Fraction(0)
    variance = (std / stride) ** 2 - second
    with decimal.localcontext(decimal.Context(prec=_PRECISION)) as context:

        def real(x: Fraction) -> decimal.Decimal:
            return context.divide(x.numerator, x.denominator)

        k4, k6, k8 = (
            -cumulant / variance**power
            for cumulant, power in ((fourth, 2), (sixth, 3), (eighth, 4))
        )
        c4, c6 = real(k4 / 24), real(k6 / 720)
        c8 = real(k8 / 40320 + k4**2 / 1152)
        inverse = real(1 / variance)
        # exp(-j**2 / 2v) by ratios, which fall by one factor.
        factor = (-inverse).exp()
        ratio, power = (-inverse / 2).exp(), decimal.Decimal(1)
        weights = []
        for j in range(_SLOTS):
            z = j * j * inverse
            he4 = (z - 6) * z + 3
            he6 = ((z - 15) * z + 45) * z - 15
            he8 = (((z - 28) * z + 210) * z - 420) * z + 105
            weights.append(power * (1 + c4 * he4 + c6 * he6 + c8 * he8))
            power, ratio = power * ratio, ratio * factor
        weights[0] /= 2
        total = sum(weights)
        scale = decimal.Decimal(_SLOTS * 2**_SLOT_BITS) / total
        counts = [int((w * scale).to_integral_value()) for w in weights]
    counts[0] += _SLOTS * 2**_SLOT_BITS - sum(counts)
    return counts


def _aliased(counts: list[int]) -> tuple[list[int], list[int]]:
    """Computes thresholds and aliases of the slots; each count is kept exactly."""
    full = 2**_SLOT_BITS
    thresholds, alias = [0] * _SLOTS, list(range(_SLOTS))
    left = list(counts)
    small = [i for i, c in enumerate(left) if c < full]
    large = [i for i, c in enumerate(left) if c >= full]
    while small:
        i, j = small.pop(), large[-1]
        thresholds[i], alias[i] = left[i], j
        left[j] -= full - left[i]
        if left[j] < full:
            small.append(large.pop())
    return thresholds, alias  # A slot that is its own alias needs no threshold.


@functools.partial(jax.jit, static_argnums=1, inline=True)
def draw(key: jax.Array, shape: tuple[int, ...], law: Law) -> jax.Array:
    """Draws integers of the discrete Gaussian of a law.

    Args:
      key: a secret typed key (``threefry.secret_key``), shape=(). Element i depends on it
        and on i alone: a longer array begins with a shorter one's.
      shape: of fewer than 2**32 elements.
      law: of :func:`law`.

    Returns:
      int32, of that shape.

    Example:
      >>> import numpy as np
      >>> from jaxdp.kernels import lattice_gaussian, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> noise = lattice_gaussian.draw(key, (10_000,), lattice_gaussian.law(1000))
      >>> noise.dtype, bool(abs(noise.std() - 1000) < 50)
      (dtype('int32'), True)
    """
    return draw_at(key, threefry._counters(shape), law)


@functools.partial(jax.jit, inline=True)
def draw_at(key: jax.Array, index: jax.Array, law: Law) -> jax.Array:
    """Draws elements of ``draw(key, shape, law).reshape(-1)`` at uint32 indices.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from jaxdp.kernels import lattice_gaussian, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> law, index = lattice_gaussian.law(1000), jnp.array([4, 2], jnp.uint32)
      >>> some = lattice_gaussian.draw_at(key, index, law)
      >>> bool((some == lattice_gaussian.draw(key, (5,), law)[index]).all())
      True
    """
    key = threefry.held(key)
    table = _look_up(law, threefry.secret_block(key, index))
    shift = jnp.asarray(law.shift).astype(jnp.uint32)
    smooth = _slices(threefry.secret_block(key, index, 1), shift)
    centre = (3 << jnp.asarray(law.shift)) - 3
    return (table << jnp.asarray(law.shift)) + (smooth - centre)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def draw_fine(
    key: jax.Array, shape: tuple[int, ...], law: Law
) -> tuple[jax.Array, jax.Array]:
    """Draws from the discrete Gaussian of a law on the lattice of 2**-32 units.

    As :func:`draw`, with a law of ``fine=True``; returns int32 and uint32 of that shape:
    ``high + low * 2**-32``.

    Example:
      >>> import numpy as np
      >>> from jaxdp.kernels import lattice_gaussian, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> law = lattice_gaussian.law(1000, fine=True)
      >>> high, low = lattice_gaussian.draw_fine(key, (5,), law)
      >>> high.dtype, low.dtype
      (dtype('int32'), dtype('uint32'))
    """
    return draw_fine_at(key, threefry._counters(shape), law)


@functools.partial(jax.jit, inline=True)
def draw_fine_at(
    key: jax.Array, index: jax.Array, law: Law
) -> tuple[jax.Array, jax.Array]:
    """Draws elements of :func:`draw_fine` at uint32 indices, as :func:`draw_at` does.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from jaxdp.kernels import lattice_gaussian, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> law, index = lattice_gaussian.law(1000, fine=True), jnp.uint32(3)
      >>> high, _ = lattice_gaussian.draw_fine_at(key, index, law)
      >>> bool(high == lattice_gaussian.draw_fine(key, (5,), law)[0][3])
      True
    """
    key, shape = threefry.held(key), index.shape
    table = _look_up(law, threefry.secret_block(key, index))
    shift = jnp.asarray(law.shift).astype(jnp.uint32)
    smooth = _slices(threefry.secret_block(key, index, 1), shift)
    # Each U_i has 32 bits more. All of them less 3 (2**s - 2**-32).
    parts = threefry.secret_block(key, index, 2)
    parts += threefry.secret_block(key, index, 3)[:2]
    low, carries = jnp.full(shape, 3, jnp.uint32), jnp.zeros(shape, jnp.int32)
    for part in parts:
        low = low + part
        carries = carries + (low < part).astype(jnp.int32)
    centre = 3 << jnp.asarray(law.shift)
    high = (table << jnp.asarray(law.shift)) + (smooth + carries - centre)
    return high, low


def _look_up(law: Law, words: threefry.Block) -> jax.Array:
    """Draws T: a sign bit, eleven bits of a slot, and 116 bits against its threshold."""
    slot = (words[0] >> jnp.uint32(20)) & jnp.uint32(_SLOTS - 1)

    # Each table is read once, so that XLA keeps one program and draws no word twice.
    def read(table: np.ndarray | jax.Array) -> jax.Array:
        return jnp.asarray(table).at[slot].get(mode="promise_in_bounds")

    limits = [read(table) for table in law.thresholds]
    have = [words[0] & jnp.uint32(2**20 - 1), *words[1:]]
    below = have[3] < limits[3]
    for a, b in zip(have[2::-1], limits[2::-1], strict=True):
        below = (a < b) | ((a == b) & below)
    size = jnp.where(below, slot.astype(jnp.int32), read(law.alias))
    return jnp.where(words[0] >> jnp.uint32(31) != 0, -size, size)


def _slices(words: threefry.Block, shift: jax.Array) -> jax.Array:
    """Returns the sum of six numbers of ``shift`` bits, out of four words: int32.

    (Shifts by 32 give zero: XLA defines them so.)
    """
    mask = (jnp.uint32(1) << shift) - jnp.uint32(1)
    total = functools.reduce(jnp.add, [w & mask for w in words])
    for one, other in (words[:2], words[2:]):
        rest = (one >> shift) | ((other >> shift) << (jnp.uint32(32) - shift))
        total = total + (rest & mask)
    return total.astype(jnp.int32)
