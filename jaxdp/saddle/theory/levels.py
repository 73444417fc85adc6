r"""Levels and batch sizes: all that is decided without the data.

The bias-reduced gradient of level N costs :math:`2^{N+1}` vertices of each player. Levels
follow the truncated geometric law: N = k in 0..M with probability :math:`2^{-k}/C_M`, where
:math:`C_M = 2 - 2^{-M}`. They are public, a function of an integer seed, and say nothing of
the data: what is private given any levels is private, and so step sizes and stopping
times may be chosen after them. A filter that stops where the budget of the realised levels
ends needs no other argument.

Reference:
  Gonzalez, Guzman, Paquette (arXiv 2403.02912), 2024, Algorithms 3 and 4.
"""

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np

from jaxdp.core import validate
from jaxdp.saddle.theory import charges

#: The highest level that is allowed: 2^31 vertices are more than any step can draw.
MAX_LEVEL = 30


# --- the law -------------------------------------------------------------------------


def normalizer(max_level: int) -> float:
    """Returns C_M: 1, 1.5, 1.75, ...; it also multiplies the difference of two levels."""
    validate.integer(at_least=0, at_most=MAX_LEVEL, max_level=max_level)
    return 2 - 0.5**max_level


def pmf(max_level: int) -> np.ndarray:
    """Returns the probabilities of the levels, (M + 1,)."""
    return 0.5 ** np.arange(max_level + 1) / normalizer(max_level)


def mean_size(max_level: int) -> float:
    """Returns E 2^N = (M + 1) / C_M."""
    return (max_level + 1) / normalizer(max_level)


def amplification(max_level: int) -> np.ndarray:
    """Returns the bound on a bias-reduced gradient in clips, by level: (M + 1,).

    2 C_M - 1 for N = 0, where two of its three points are one; 2 C_M 2^N + 1 above.
    """
    c = normalizer(max_level)
    a = 2 * c * 2.0 ** np.arange(max_level + 1) + 1
    a[0] = 2 * c - 1
    return a


def largest_level(vertex_budget: int) -> int:
    """Returns M = floor(log2(sqrt(U))), exactly, and ``MAX_LEVEL`` at most."""
    validate.integer(vertex_budget=vertex_budget)
    return min((int(vertex_budget).bit_length() - 1) // 2, MAX_LEVEL)


# --- draws ---------------------------------------------------------------------------


def _coins(seed: int) -> Iterator[int]:
    """Yields fair bits without end: SHAKE-256 of a label, the seed and a counter."""
    for block in itertools.count():
        text = f"jaxdp/saddle/levels/{int(seed)}/{block}"
        digest = np.frombuffer(hashlib.shake_256(text.encode()).digest(1024), np.uint8)
        yield from np.unpackbits(digest, bitorder="little").tolist()


def _levels(seed: int, max_level: int) -> Iterator[int]:
    """Yields levels: tails before the first head, started again above M."""
    tails = 0
    for head in _coins(seed):
        if head:
            yield tails
            tails = 0
        else:
            tails = (tails + 1) % (max_level + 1)


def executed(
    seed: int, *, vertex_budget: int, max_level: int | None = None
) -> np.ndarray:
    """Returns the levels of Algorithm 3: steps are taken while 2^M vertices are left of U.

    So the sum of 2^N over them is above U - 2^M and at most U.
    ``max_level`` is M, None the paper's, floor(log2(sqrt(U))); U >= 2^M. int64 (S,), S > 0.
    """
    m = largest_level(vertex_budget) if max_level is None else max_level
    _check(seed, m)
    validate.integer(at_least=2**m, vertex_budget=vertex_budget)
    return np.array([*_within(_levels(seed, m), vertex_budget, m)], np.int64)


def filtered(
    seed: int,
    *,
    max_level: int,
    batch_sizes: np.ndarray,
    deltas_x: np.ndarray,
    deltas_y: np.ndarray,
    rho: float,
    num_examples: int,
    vertex_budget: int | None = None,
    error: float = 0.0,
) -> np.ndarray:
    """Returns the levels that a privacy budget allows at given step sizes.

    This is the fully adaptive version of :func:`executed`. Steps are taken until the
    realised charge of the worst record, the records, or the vertices would not suffice for
    the next. No record costs more than rho whatever the levels are. The sequence stops
    before the first step that does not fit, so that it never depends on anything but the
    seed.

    Args:
      seed: as for :func:`executed`, like ``vertex_budget``, for which None is no limit.
      max_level: M.
      batch_sizes: (M + 1,) records >= 1 of a step, by level.
      deltas_x: (M + 1,) how far a record of a step moves a score of x, by level.
      deltas_y: (M + 1,) the same of y.
      rho: the budget, > 0.
      num_examples: n >= 1 records in all.
      vertex_budget: U.
      error: of the sampler.

    Returns:
      (S,) int64; empty where the first step finds too few records.
    """
    _check(seed, max_level)
    each = charges.draw(deltas_x, error) + charges.draw(deltas_y, error)
    draws = _levels(seed, max_level)
    if vertex_budget is not None:
        validate.integer(at_least=2**max_level, vertex_budget=vertex_budget)
        draws = _within(draws, vertex_budget, max_level)
    # Draws after the first record of each level, which is the worst of its level.
    later = np.zeros(max_level + 1, np.int64)
    seen = np.zeros(max_level + 1, bool)
    found, left = [], num_examples
    for level in draws:
        left -= int(batch_sizes[level])
        later += np.where(seen, charges.vertices(level), 0)
        if left < 0 or np.max(each * later) > rho:
            break
        seen[level] = True
        found.append(level)
    return np.array(found, np.int64)


def _within(draws: Iterator[int], vertex_budget: int, max_level: int) -> Iterator[int]:
    used = 0
    while used <= vertex_budget - 2**max_level:
        level = next(draws)
        used += 2**level
        yield level


def _check(seed: int, max_level: int) -> None:
    validate.integer(at_least=-(2**256), seed=seed)
    validate.integer(at_least=0, at_most=MAX_LEVEL, max_level=max_level)


# --- batches -------------------------------------------------------------------------


def equalized(levels: np.ndarray, *, num_examples: int, max_level: int) -> np.ndarray:
    """Returns batch sizes that use all records and give each the same weight.

    b(N) = floor(n a(N) / sum of a over the steps), a the :func:`amplification`; at least
    1. Exact integers (M + 1,), by level, whose sum over the executed ``levels`` (S,) is at
    most n; ValueError where n is too few for so many steps.
    """
    validate.integer(num_examples=num_examples)
    # a(N) in units of 2^-M, of which float64 holds all digits.
    a = [int(x * 2**max_level) for x in amplification(max_level).tolist()]
    counts = np.bincount(levels, minlength=max_level + 1)
    total = sum(int(c) * x for c, x in zip(counts, a, strict=True))
    sizes = [max(1, num_examples * x // max(total, 1)) for x in a]
    used = sum(int(c) * b for c, b in zip(counts, sizes, strict=True))
    if used > num_examples:
        raise ValueError(
            f"num_examples must be enough for {len(levels)} steps of at least one "
            f"record, their levels' batches need {used}, got {num_examples}"
        )
    return np.array(sizes, np.int64)


def proportional(max_level: int, *, alpha: float) -> np.ndarray:
    """Returns the paper's batch sizes, max(1, ceil(2^N / alpha)): (M + 1,), by level."""
    validate.integer(at_least=0, at_most=MAX_LEVEL, max_level=max_level)
    validate.positive(alpha=alpha)
    if 2.0**max_level / alpha > 2**31:
        raise ValueError(
            f"alpha must leave batches of at most 2**31 records, got {alpha!r}"
        )
    return np.ceil(2.0 ** np.arange(max_level + 1) / alpha).astype(np.int64)
