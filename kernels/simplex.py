r"""Softmax of integer scores, and vertices drawn from it.

A *score* is int32, in units of :math:`2^{-24}` octaves: vertex j has weight
:math:`2^{s_j/2^{24}}`. Scores are kept with maximum 0 and at most 64 octaves apart
(:func:`normalized`). Sums of scores are exact, so what one record moves is known to the
bit, whatever the order of the sums and however many there are.

=====================  =======================================  =====================
sampler                error of a log-probability               use
=====================  =======================================  =====================
:func:`sample`         at most ``LOG_ERROR``, for every score   what is accounted for
:func:`sample_float`   unbounded: small ones become zero        no privacy bound
=====================  =======================================  =====================

Both walk down a tree of sums with 16 children a node, so that a draw reads 16 numbers a
level; the sums are 1/15 of the scores.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import threefry

#: A score of 2**BITS is one octave, a factor of two.
BITS = 24
#: Normalized scores are not below this, 64 octaves.
LOWEST = -(2**30)
#: A vertex further below the maximum than this many octaves is drawn as if it were this
#: far: at most ``dim * 2**-OCTAVES`` in total variation, and no privacy (see `sample`).
OCTAVES = 35
#: Range over the vertices, max - min, of log(realised probability) - log(softmax).
LOG_ERROR = 4e-7
#: Vertices at most, so that indices and the tree's seven levels fit their words.
MAX_DIM = 2**27

_FAN = 16  # Children of a node.


# --- scores ---


def scaled(total: jax.Array, multiplier: int, shift: int) -> jax.Array:
    """Computes ``floor(total * multiplier / 2**shift)`` exactly.

    Args:
      total: int32, any shape.
      multiplier: in [0, 2**16).
      shift: in [0, 46].

    Returns:
      int32, same shape. That the result fits is the caller's duty. Totals that differ by
      k have results that differ by at most ``k * multiplier / 2**shift + 1``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import simplex
      >>> simplex.scaled(jnp.array([100, -100]), multiplier=3, shift=1).tolist()
      [150, -150]
    """
    if not 0 <= multiplier < 2**16:
        raise ValueError(f"multiplier must be in [0, 2**16), got {multiplier}")
    if not 0 <= shift <= 46:
        raise ValueError(f"shift must be in [0, 46], got {shift}")
    # total = high 2**16 + low with 0 <= low < 2**16, and so is the product. Neither part
    # overflows: |high| <= 2**15 and low < 2**16 are multiplied by less than 2**16.
    low = (total & 0xFFFF).astype(jnp.uint32) * jnp.uint32(multiplier)
    high = (total >> 16) * jnp.int32(multiplier) + (low >> 16).astype(jnp.int32)
    low = (low & 0xFFFF).astype(jnp.int32)
    if shift >= 16:
        return high >> (shift - 16)
    return (high << (16 - shift)) + (low >> shift)


def normalized(scores: jax.Array) -> jax.Array:
    """Shifts scores to the maximum 0 and raises those below ``LOWEST`` to it.

    The law does not depend on a common shift. Saturation after it widens the range of no
    difference: t -> max(t, LOWEST) is 1-Lipschitz, and the maxima differ by something
    between min h and max h if the score vectors differ by h.

    From any int32 (d,) to int32 (d,) in [LOWEST, 0], the maximum 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import simplex
      >>> simplex.normalized(jnp.array([5, 3, 4])).tolist()
      [0, -2, -1]
    """
    top = jnp.max(scores)
    lowest = jnp.maximum(top, jnp.int32(-(2**31) - LOWEST)) + LOWEST  # No overflow.
    return jnp.maximum(scores, lowest) - top


def moved(scores: jax.Array, increment: jax.Array) -> jax.Array:
    """Returns ``normalized(scores + increment)``, of normalized scores (d,).

    The increment is int32 (d,), in [-2**30, 2**30]: the sum cannot overflow.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import simplex
      >>> simplex.moved(jnp.array([0, -1]), jnp.array([-4, 2])).tolist()
      [-5, 0]
    """
    return normalized(scores + increment)


def from_probabilities(probabilities: jax.Array) -> jax.Array:
    """Returns scores, int32 (d,), normalized, of probabilities (d,); 0 is ``LOWEST``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import simplex
      >>> scores = simplex.from_probabilities(jnp.array([0.5, 0.25, 0.25]))
      >>> (scores / 2**simplex.BITS).tolist()  # In octaves.
      [0.0, -1.0, -1.0]
    """
    relative = probabilities / jnp.max(probabilities)
    octaves = jnp.maximum(jnp.log2(relative), LOWEST / 2**BITS)
    return normalized(jnp.round(octaves * 2**BITS).astype(jnp.int32))


def entropic_step(
    logits: jax.Array,
    gradient: jax.Array,
    step_size: float | jax.Array,
    top: float | jax.Array = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Takes one step of mirror descent; returns float logits and their maximum.

    ``logits - top - step_size * gradient``. What is taken away changes no softmax; with
    the maximum of the step before, logits stay near 0 without a pass of their own.

    Logits and gradient are float32 (d,); the step size and ``top``, the maximum that the
    step before gave, have shape=().

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import simplex
      >>> gradient = jnp.array([1.0, -1.0])
      >>> logits, top = simplex.entropic_step(jnp.zeros(2), gradient, 0.5)
      >>> logits.tolist(), float(top)
      ([-0.5, 0.5], 0.5)
    """
    logits = logits - top - step_size * gradient
    return logits, jnp.max(logits)


def counts(indices: jax.Array, dim: int) -> jax.Array:
    """Counts the occurrences of each of ``dim`` vertices, int32 (dim,).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import simplex
      >>> simplex.counts(jnp.array([2, 0, 2]), dim=4).tolist()
      [1, 0, 2, 0]
    """
    return jnp.zeros(dim, jnp.int32).at[indices].add(1)


# --- weights ---

# 2**-x on [0, 1) as polynomials of least relative error, their signs alternating: of
# degree 5 (7.5e-8) in units of 2**-26, and of degree 3 (7.5e-5, raised so that rounding
# cannot take it below the other: at most 2.4e-4 above) in units of 2**-16.
_FINE = (67108859, 46515989, 16117683, 3709759, 616637, 63001)
_COARSE = (65536, 45289, 15079, 2557)


def _split(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits minus the scores into whole octaves, at most OCTAVES, and a 24-bit rest."""
    below = (-jnp.clip(scores, -(OCTAVES << BITS), 0)).astype(jnp.uint32)
    return below >> BITS, below & (2**BITS - 1)


def _power(fraction: jax.Array) -> jax.Array:
    """Approximates ``2**(24 - fraction / 2**24)``, uint32, for fractions below 2**24."""
    x1, x0 = fraction >> 12, fraction & 0xFFF
    total = jnp.full_like(fraction, _FINE[-1])
    for c in _FINE[-2::-1]:
        # total * fraction / 2**24, by less than 2 too low: total < 2**26, so the products
        # have at most 26 bits, 26 and 24.
        t1, t0 = total >> 12, total & 0xFFF
        total = c - (t1 * x1 + ((t1 * x0 + t0 * x1) >> 12))
    return total >> 2


def _weights(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes each vertex's weight ``2**32 * upper + lower``, an integer below 2**59.

    It is exactly ``_power(fraction) * 2**(OCTAVES - octaves)``, so the relative error is
    that of ``_power``, whatever the octave.
    """
    octaves, fraction = _split(scores)
    power = _power(fraction)
    return (power << 3) >> octaves, power << (OCTAVES - octaves)


def _bounds(scores: jax.Array) -> jax.Array:
    """Bounds the weights from above in one word each: the proposal of :func:`sample`.

    ``_bounds * 2**32`` is at least the weight and at most 1.00024 times it plus 2**32;
    uint32 in [1, 2**27 + 1].
    """
    octaves, fraction = _split(scores)
    x = fraction >> 8
    total = jnp.full_like(x, _COARSE[-1])
    for c in _COARSE[-2::-1]:
        total = c - ((total * x) >> 16)
    return ((total << 11) >> octaves) + 1


# --- a tree of sums ---


def _grouped(x: jax.Array) -> jax.Array:
    """Sums groups of 16 neighbours; the last group may be smaller."""
    whole = x.size // _FAN * _FAN
    sums = _total(x[:whole].reshape(-1, _FAN))
    if whole == x.size:
        return sums
    return jnp.concatenate([sums, _total(x[None, whole:])])


def _total(x: jax.Array) -> jax.Array:
    """Sums the rows of numbers >= 0.

    The maximum changes none. It keeps a plain float sum from XLA's library for CPUs, which
    writes the summands to new memory first: at d = 1e7 page faults are most of its work.
    """
    zero = np.zeros((), x.dtype)
    return jax.lax.reduce(x, zero, lambda a, b: jnp.maximum(a + b, zero), (1,))


def _levels(
    leaves: jax.Array, group: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Builds the tree of sums: groups of leaves, groups of groups, up to a single group."""
    levels = [group(leaves)]
    while levels[-1].size > 1:
        levels.append(group(levels[-1]))
    return levels


def _descend(
    levels: list[jax.Array],
    leaves: Callable[[jax.Array], jax.Array],
    dim: int,
    num: int,
    choose: Callable[..., tuple[jax.Array, Any]],
    state: Any,
) -> tuple[jax.Array, Any]:
    """Descends from the root to ``num`` of the ``dim`` leaves; returns indices and state.

    ``levels`` are those of :func:`_levels`; ``leaves`` computes the values at indices
    (16, num) again, so that none are kept. ``choose`` takes the depth, 0 below the root,
    the values of 16 children (16, num) and the state; it gives the child that is taken,
    int32 (num,), and the new state. XLA fuses nothing across the loop.
    """

    def children(node: jax.Array, size: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        child = _FAN * node[None] + jax.lax.iota(jnp.int32, _FAN)[:, None]
        return jnp.minimum(child, size - 1), child < size

    node, inner = jnp.zeros(num, jnp.int32), levels[-2::-1]
    if inner:
        table = jnp.concatenate(inner)
        sizes = np.array([level.size for level in inner], np.int32)
        begins = jnp.asarray(np.cumsum(sizes, dtype=np.int32) - sizes)

        def down(depth: jax.Array, carry: tuple) -> tuple:
            node, state = carry
            at, exists = children(node, jnp.asarray(sizes)[depth])
            values = jnp.where(exists, table[begins[depth] + at], 0)
            child, state = choose(depth, values, state)
            return _FAN * node + child, state

        node, state = jax.lax.fori_loop(0, len(inner), down, (node, state))
    at, exists = children(node, dim)
    child, state = choose(len(inner), jnp.where(exists, leaves(at), 0), state)
    return jnp.minimum(_FAN * node + child, dim - 1), state


# --- the certified sampler ---


def _shared(x: jax.Array) -> jax.Array:
    """Sums groups of 16 neighbours in units that are 16 times as large, rounded up."""
    # Bounds are at most 2**27 + 1: 16 of them and 15 are below 2**32, and a sixteenth of
    # their sum, rounded up, is again at most 2**27 + 1.
    return (_grouped(x) + (_FAN - 1)) >> 4


def _root(words: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws a uniform number in 0 ... total - 1 by rejection, from words (tries, num).

    Also returns True where a word was accepted. The last ``2**32 modulo total`` of 2**32
    words are rejected: so many that each remainder is left equally often.
    """
    rest = (jnp.uint32(2**32 - 1) % total + 1) % total
    last = jnp.uint32(2**32 - 1) - rest
    word = words[-1]
    for other in words[-2::-1]:
        word = jnp.where(other <= last, other, word)
    return word % total, word <= last


def _narrow(
    depth: int | jax.Array, values: jax.Array, state: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Descends one level: four more bits of the position, and the child that holds it."""
    del depth
    position, digits, inside = state
    position = position * _FAN + (digits & (_FAN - 1))  # Below 16 (2**27 + 1).
    prefix = before = jnp.zeros_like(position)
    child = jnp.zeros(position.shape, jnp.int32)
    for value in values:
        prefix = prefix + value
        passed = prefix <= position
        before = jnp.where(passed, prefix, before)
        child = child + passed.astype(jnp.int32)
    inside = inside & (child < _FAN)  # Or in what was rounded up: at most 15 positions.
    return jnp.minimum(child, _FAN - 1), (position - before, digits >> 4, inside)


def _locate(
    scores: jax.Array,
    levels: list[jax.Array],
    root: jax.Array,
    digits: jax.Array,
    low: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Finds the vertices at some positions, and which of them are accepted, each (num,).

    A position is ``root`` (a unit of the root), four bits of ``digits`` for every level,
    the lowest first, and the 32 bits of ``low``.
    """
    start = (root, digits, jnp.ones(root.shape, bool))
    index, (position, _, inside) = _descend(
        levels, lambda at: _bounds(scores[at]), scores.size, root.size, _narrow, start
    )
    upper, lower = _weights(scores[index])
    accepted = (position < upper) | ((position == upper) & (low < lower))
    return index, inside & accepted


def sample(key: jax.Array, scores: jax.Array, num: int) -> jax.Array:
    r"""Draws ``num`` vertices from the softmax of the scores, certified.

    Vertex j is drawn with probability :math:`W_j/\sum_iW_i`, exactly, given uniform
    bits. The weights are integers, computed from a vertex's score alone, in 32-bit
    integer arithmetic, the same on every device: with a score of -(2**24 q + r),
    :math:`W_j=m(r)\,2^{35-q}` and :math:`m(r)=2^{24-r/2^{24}}` up to its rounding and
    the error of a polynomial. So log(realised probability) - log(softmax) is the error
    of :math:`\log m(r)` minus a constant, and its range is that of the error over all
    r: 3.784e-7, found by going through all 2**24 of them, hence ``LOG_ERROR``. If the
    scores of neighbours differ by h, one draw is (range of h + 2 LOG_ERROR)-bounded
    range. A score below -35 octaves counts as -35: this t -> max(t, c) widens the range
    of no h, and moves the law by at most ``d * 2**-35`` in total variation.

    No exact sums of weights are needed. Each weight has a bound of one word, the bounds
    are summed in groups of 16, and groups of groups, every sum rounded up to a unit 16
    times as large, so that one word holds it. A position, uniform below the root's value,
    is refined by four bits a level while it goes down to a leaf, and then by 32 bits. It
    is accepted if it lies within the leaf's weight; what lies in a rounding or above the
    weight is drawn again. Every weight thus has as many accepted positions as it has
    units. A try succeeds with probability at least .999 / (1 + x), x = ((levels + 1) d +
    1.07 * 16**levels) / 2**27: .6 at d = 1e7, .94 at 1e6, where nearly all scores are 27
    octaves below the maximum, and .999 where they are not.

    Args:
      key: typed threefry key, shape=(): secret.
      scores: int32, shape=(d,), 1 <= d <= 2**27, with maximum 0 (:func:`normalized`):
        the caller's duty. Scores above 0 would count as 0.
      num: at least 1.

    Returns:
      int32, shape=(num,): iid, each from bits of its own, so that a part of them is iid
      too. Memory is about d / 15 words and 16 * num words.

    Raises:
      ValueError: the shape, the dtype, d or ``num`` is not one of these.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import simplex
      >>> scores = simplex.from_probabilities(jnp.array([0.75, 0.25]))
      >>> drawn = simplex.sample(jax.random.key(0), scores, num=10_000)
      >>> drawn.dtype, bool(abs(drawn.mean() - 0.25) < 0.02)
      (dtype('int32'), True)
    """
    if scores.dtype != jnp.int32:
        raise ValueError(f"scores must be int32, got {scores.dtype}")
    _check(scores, num, "scores")
    return _sample(key, scores, num)


def _check(x: jax.Array, num: int, name: str) -> None:
    if x.ndim != 1 or not 1 <= x.size <= MAX_DIM:
        raise ValueError(f"{name} must have shape (d,), 1 <= d <= 2**27, got {x.shape}")
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}")


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _sample(key: jax.Array, scores: jax.Array, num: int) -> jax.Array:
    levels = _levels(_bounds(scores), _shared)
    total = levels[-1][0]

    def attempt(carry: tuple) -> tuple:
        count, index, due = carry
        words = threefry.bits(threefry.fold_in(key, count), (5, num))
        root, uniform = _root(words[:3], total)
        new, accepted = _locate(scores, levels, root, words[3], words[4])
        return count + 1, jnp.where(due, new, index), due & ~(uniform & accepted)

    if threefry.is_secret(key):  # Once, and not in every round.
        key = threefry.settled(key)
    start = jnp.zeros((), jnp.int32), jnp.zeros(num, jnp.int32), jnp.ones(num, bool)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[2]), attempt, start)[1]


# --- the float sampler ---


def sample_float(
    key: jax.Array, logits: jax.Array, num: int, top: jax.Array | None = None
) -> jax.Array:
    """Draws ``num`` vertices from the softmax of float logits, without a privacy bound.

    A float32 inverse CDF at every level of the tree, each with a uniform of its own, a
    multiple of 2**-24. A vertex whose weight is below 2**-24 of its group's may have
    probability 0, and which ones do depends on all the logits.

    Args:
      key: typed threefry key, shape=().
      logits: float32, shape=(d,), 1 <= d <= 2**27; at least one is finite, none is NaN
        or +inf. One of -inf is never drawn.
      num: at least 1.
      top: the largest of the logits, shape=(), where it is known (:func:`entropic_step`).

    Returns:
      int32, shape=(num,): iid.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import simplex
      >>> logits = jnp.log(jnp.array([0.75, 0.25]))
      >>> drawn = simplex.sample_float(jax.random.key(0), logits, num=10_000)
      >>> bool(abs(drawn.mean() - 0.25) < 0.02)
      True
    """
    if logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")
    _check(logits, num, "logits")
    return _sample_float(key, logits, num, jnp.max(logits) if top is None else top)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _sample_float(
    key: jax.Array, logits: jax.Array, num: int, top: jax.Array
) -> jax.Array:
    levels = _levels(jnp.exp(logits - top), _grouped)
    words = threefry.bits(key, (len(levels), num))
    uniform = (words >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)

    def choose(depth: int | jax.Array, values: jax.Array, state: None) -> tuple:
        # The total is the last prefix, so that a position lies below it, and in the
        # interval of a child of positive weight.
        prefixes = [values[0]]
        for value in values[1:]:
            prefixes.append(prefixes[-1] + value)
        position = uniform[depth] * prefixes[-1]
        passed = [(prefix <= position).astype(jnp.int32) for prefix in prefixes]
        return jnp.minimum(functools.reduce(jnp.add, passed), _FAN - 1), state

    return _descend(
        levels, lambda at: jnp.exp(logits[at] - top), logits.size, num, choose, None
    )[0]
