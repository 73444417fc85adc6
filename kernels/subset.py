r"""Secret random subsets: of a large set at a cost that grows with the subset alone.

A Poisson sample of ``[0, n)`` is its size, which is binomial, and given the size a uniform
subset. Both are drawn here from the blocks of one secret key, by integers alone.

*The subset.* i.i.d. indices are drawn, and those that were drawn exactly once are kept, in
the order of the draws; the first k of them are the subset. An index is
``u * n // 2**64`` of a uniform 64-bit integer u, and where ``u * n % 2**64`` is below
``2**64 % n`` (one draw in 2**33, or fewer) the draw is thrown away: what is left is exactly
uniform (Lemire). What is kept depends on which draws are equal, never on what they are. So
a permutation of ``[0, n)`` changes neither the law of the draws nor the choice between
them, and any ordered k-subset is as likely as any other: exactly, whenever there are k.

With M draws there are fewer than k with a probability that :func:`num_draws` keeps below
2**-180. Let R count the draws that are thrown away or equal an earlier one. A value that
is drawn m > 1 times costs m draws and adds m - 1 >= m/2 to R, so at most 2R are lost. Each
draw is one of the R with probability at most ``p = (M-1)/n + 2**-33`` whatever came before,
so R exceeds a bound no more often than Bin(M, p) does:
:math:`\Pr[R \ge b] \le e^{-M\,\mathrm{kl}(b/M, p)}` for ``b > Mp`` (Chernoff).

*The size.* Its distribution function is tabulated on the host in integers of 400 bits,
rounded down to 256 bits, and compared with 256 uniform bits. What is left out beyond both
ends of the table has a mass below 2**-219, and so has what is rounded. The table is as long
as some forty standard deviations, or ``most``.

So for ideal words a draw is within 2**-179 of the ideal law in total variation, the place
of every record included.

*The smallest.* Where the subset is a large part, every element has a word
(:func:`smallest`), and those of the smallest words are a uniform subset if no two words tie
at its edge. ``top_k`` is fast on floats alone, which hold 30 bits: of many elements some do
tie. To take the lower index would draw the first element 2**-31 too often. So ties are
decided by 256 further bits, within 64 places around the edge. Of n words, 64 others tie
with the one at the edge with a probability below ``(n / 2**30)**64 / 64!``, 2**-231 for
every n; and of those within, two have equal bits with one below 2**-241.

References:
  Lemire, Fast Random Integer Generation in an Interval, 2019.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import fixed_point, threefry

#: Bits of a threshold, and of what is compared with it: two blocks.
_FINE = 256
#: Places on each side of a subset's edge within which ties are decided.
_EDGE = 64
#: Numbers of blocks: those of the indices, and the first of two of the size.
_INDEX, _SIZE = 0, 1
#: Bits behind the point while a table is made, and those that an entry may fall by.
_BITS, _FALL = 400, 220
#: Natural logarithm of the probability with which draws may run out; 2**-180, and a bit.
_LOG_FAILURE = -181 * math.log(2)


@functools.cache
def num_draws(size: int, num: int) -> int:
    """Returns how many draws hold ``num`` different ones, but for a chance of 2**-180.

    Raises:
      ValueError: ``num`` is too large a part of ``size``; a 16th of 2**17 or more is not.

    Example:
      >>> from jaxdp.kernels import subset
      >>> subset.num_draws(10**6, 1000)
      1092
    """
    draws = num
    while 2 * draws < size:
        p = (draws - 1) / size + 2.0**-33
        lost = (draws - num) // 2 + 1  # So many cost more than there are to spare.
        share = lost / draws
        if share > p:
            kl = share * math.log(share / p)
            kl += (1 - share) * math.log((1 - share) / (1 - p)) if share < 1 else 0.0
            if -draws * kl <= _LOG_FAILURE:
                return draws
        draws += max(2, draws // 1024)
    raise ValueError(
        f"num must be a smaller part of size = {size}, such as a 16th of a large one, got "
        f"{num}"
    )


def distinct(
    key: jax.Array, size: int, num: int, draws: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draws a uniformly random subset of ``[0, size)``, in a random order.

    Args:
      key: a secret key, shape=().
      size: at most 2**31 - 1.
      num: of how many elements: few, as :func:`num_draws` says.
      draws: how many draws it is chosen from; None is :func:`num_draws`.

    Returns:
      int32 (num,), and bool (num,) of the places that are filled: all, but with probability
      2**-180. No element is in two of them.

    Example:
      >>> import numpy as np
      >>> from jaxdp.kernels import subset, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> index, found = subset.distinct(key, 10**9, 5)
      >>> len(set(index.tolist())), bool(found.all())
      (5, True)
    """
    if not 1 <= size < 2**31:
        raise ValueError(f"size must be from 1 to 2**31 - 1, got {size}")
    return _distinct(key, size, num, draws or num_draws(size, num))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _distinct(
    key: jax.Array, size: int, num: int, draws: int
) -> tuple[jax.Array, jax.Array]:
    drawn = _indices(key, size, draws)
    ranked = jnp.sort(drawn)
    place = jnp.searchsorted(ranked, drawn)
    following = jnp.append(ranked[1:], np.int32(-1))[place]
    once = (following != drawn) & (drawn != size)
    # Beyond the end, nothing is written.
    to = jnp.where(once, jnp.cumsum(once) - 1, num)
    index = jnp.full((num,), size, jnp.int32)
    index = index.at[to].set(drawn, mode="drop")
    found = index != size
    return jnp.where(found, index, 0), found


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def smallest(
    key: jax.Array, words: jax.Array, num: int, below: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses the elements of the smallest words, smallest first; ties at random.

    Args:
      key: a secret key, of which the words are ``threefry.bits``; others decide ties.
      words: uint32 (n,).
      num: of how many elements, from 1 to n.
      below: words from this one on are not chosen; None takes all.

    Returns:
      int32 (num,), and bool (num,) of the places that are filled.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from jaxdp.kernels import subset, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> words = jnp.array([90, 20, 70, 50], jnp.uint32)
      >>> index, found = subset.smallest(key, words, 3, 60)
      >>> index[:2].tolist(), found.tolist()
      ([1, 3], [True, True, False])
    """
    # Of 30 bits, as floats below zero: the largest of these are the smallest words.
    floats = jax.lax.bitcast_convert_type((words >> 2) + np.uint32(2**23), jnp.float32)
    score = -floats
    if below is not None:
        score = jnp.where(words < np.uint32(below), score, -jnp.inf)
    found = jax.lax.top_k(score, min(num + _EDGE, len(words)))
    # Held: of what is sliced at once, XLA's compiler for CPUs sorts all. (One by one: of
    # both together it crashes on a mesh.)
    best, index = (jax.lax.optimization_barrier(x) for x in found)
    if num == len(words):  # There is no edge.
        return index, best > -jnp.inf
    begin = max(num - _EDGE, 0)
    near, at = best[begin:], index[begin:]
    place = jnp.arange(len(at))
    earlier = place[:, None] < place[None]

    def block(number: jax.Array) -> threefry.Block:  # Block 0 has the words.
        return threefry.secret_block(key, at, number, threefry._BITS)

    # From a loop: else the cipher would be fused into what compares, and run for each pair.
    more = jax.lax.map(block, jnp.array([1, 2], jnp.uint32))
    decided = earlier
    for word in [both[i] for i in (0, 1) for both in more]:
        one, other = word[:, None], word[None]
        decided = (one < other) | ((one == other) & decided)
    tied = (near[:, None] == near[None]) & (near > -jnp.inf)[None]
    rank = jnp.sum(jnp.where(tied, decided, earlier), axis=0)
    at = jnp.zeros_like(at).at[rank].set(at, unique_indices=True)
    index = jnp.concatenate([index[:begin], at])[:num]
    return index, best[:num] > -jnp.inf


def _indices(key: jax.Array, size: int, draws: int) -> jax.Array:
    """Draws i.i.d. uniform integers in ``[0, size)``; ``size`` where one is thrown away."""
    counters = jax.lax.iota(jnp.uint32, draws)
    high, low, *_ = threefry.secret_block(threefry.held(key), counters, _INDEX)
    n = jnp.uint32(size)
    # The product of 64 by 31 bits: three words, of which the first is the index.
    middle = high * n + fixed_point.high_product(low, n)
    carry = (middle < high * n).astype(jnp.uint32)
    index = fixed_point.high_product(high, n) + carry
    thrown = (middle == 0) & (low * n < np.uint32(2**64 % size))
    return jnp.where(thrown, n, index).astype(jnp.int32)


class Sizes(NamedTuple):
    """Table of a truncated binomial law.

    Attributes:
      least: the smallest size.
      thresholds: uint32 (rows, 8), first word first; of 256 bits the size is larger than
        ``least`` by as many as are at most these bits.

    Example:
      >>> from jaxdp.kernels import subset
      >>> table = subset.sizes(10**6, 2**22, 1200)
      >>> table.least, table.thresholds.shape
      (484, (716, 8))
    """

    least: int
    thresholds: np.ndarray


@functools.lru_cache(maxsize=64)
def sizes(size: int, numerator: int, most: int) -> Sizes:
    """Tabulates the law of ``min(Bin(size, numerator / 2**32), most)``.

    Args:
      size: n >= 1.
      numerator: from 0 to 2**32 - 1.
      most: from 1 to n.

    Example:
      >>> from jaxdp.kernels import subset
      >>> table = subset.sizes(3, 2**31, 2)  # of 0, 1 and 2, or 3
      >>> (table.thresholds[:, 0] / 2**32).round(6).tolist()
      [0.125, 0.5]
    """
    stay = 2**32 - numerator
    mode = ((size + 1) * numerator) >> 32
    one, least = 1 << _BITS, 1 << (_BITS - _FALL)
    below, at, mass = [], mode, one
    while at > 0 and mass >= least:
        mass = mass * at * stay // ((size - at + 1) * numerator)
        below.append(mass)
        at -= 1
    first, above, at, mass = at, [], mode, one
    while at < size and mass >= least:
        mass = mass * (size - at) * numerator // ((at + 1) * stay)
        above.append(mass)
        at += 1
    masses = [*below[::-1], one, *above]
    total, found, bounds = sum(masses), 0, []
    for mass in masses[: max(min(most, at) - first, 0)]:
        found += mass
        bounds.append(min((found << _FINE) // total, (1 << _FINE) - 1))
    # (In an empty window, all sizes that are not negligible are truncated.)
    words = [bound.to_bytes(_FINE // 8, "big") for bound in bounds]
    thresholds = np.frombuffer(b"".join(words), ">u4").astype(np.uint32)
    return Sizes(min(first, most), thresholds.reshape(-1, _FINE // 32))


def drawn_size(key: jax.Array, table: Sizes) -> jax.Array:
    """Draws a number from a table's law.

    Args:
      key: a secret key, shape=(); that of :func:`distinct` may be the same.
      table: of :func:`sizes`.

    Returns:
      int32, shape=().

    Example:
      >>> import numpy as np
      >>> from jaxdp.kernels import subset, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> 800 < int(subset.drawn_size(key, subset.sizes(10**6, 2**22, 1200))) < 1200
      True
    """
    at, zero = threefry.held(key), jnp.zeros((), jnp.uint32)
    words = [w for i in (0, 1) for w in threefry.secret_block(at, zero, _SIZE + i)]
    smaller = jnp.zeros(len(table.thresholds), bool)  # The 256 bits than a threshold.
    for word, bound in zip(words[::-1], table.thresholds.T[::-1], strict=True):
        smaller = (word < bound) | ((word == bound) & smaller)
    return table.least + jnp.sum(~smaller, dtype=jnp.int32)
