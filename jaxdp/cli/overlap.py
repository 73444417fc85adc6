"""Checks against private records given as public ones, whose metrics are published."""

import math
import pathlib
from collections import Counter
from collections.abc import Hashable, Iterable

from scipy import stats

from jaxdp.cli.parsing import UsageError

#: The largest share of public records whose row is in the private file exactly once. Of two
#: honest samples of a population, whatever it is, at most 1/e are expected: of a file of m
#: records mp have a row that the other one of n has np times on average, once therefore
#: with probability np exp(-np) <= 1/e.
MOST = 0.5
#: The least probability that two honest samples are as alike as the two files are.
ALIKE = 1e-9


def same_file(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Returns True if two paths exist and are one file; OSError if that is unknown."""
    return one.exists() and other.exists() and one.samefile(other)


def refuse(
    private: Iterable[Hashable],
    public: Iterable[Hashable],
    option: str,
    of: str,
    path: object,
) -> None:
    """Refuses public records that are the private ones in any order, or a part of them.

    Rows that are in the private file several times are no sign by themselves: in a small
    domain honest samples share all their rows. Rows that are there once are, if they are
    most of the public ones: see :data:`MOST`. So are rows whose counts in the two files are
    in proportion, more closely than chance lets them: see :func:`likeness`.

    ``private`` and ``public`` are hashables, one a record; ``option`` is that of
    the public file, ``of`` that of the private one, and ``path`` the public file.

    Whether a command is refused has no noise: a file of one row tells whether that row is
    private. So it is for whoever holds both files, and must not be shown to who made the
    public one.
    """
    ours, theirs = Counter(private), Counter(public)
    total = sum(theirs.values())
    if ours == theirs:
        raise UsageError(
            f"{option} must be public records, not those of {of}, got {str(path)!r}, "
            f"whose {total} records are the same ones: metrics are published without noise"
        )
    shared = sum(times for row, times in theirs.items() if ours[row] == 1)
    if shared > MOST * total:
        raise UsageError(
            f"{option} must be public records, got {str(path)!r}, of whose {total} records "
            f"more than {MOST:.0%} are in {of} too, where each is once: metrics are "
            "published without noise"
        )
    if likeness(ours, theirs) < ALIKE:
        raise UsageError(
            f"{option} must be public records, got {str(path)!r}, whose {total} records "
            f"are a part of those of {of}, or the same ones several times: each row is "
            "there as often as in proportion, and closer than another sample would be; "
            "metrics are published without noise"
        )


def likeness(ours: Counter, theirs: Counter) -> float:
    """Returns the probability that another sample's counts are at least as proportional.

    By the chi-squared statistic of two samples, over the rows that are in both files
    together at least ten times, with half a record added to each difference.
    """
    rows = [row for row in ours | theirs if ours[row] + theirs[row] >= 10]
    n, m = sum(ours[row] for row in rows), sum(theirs[row] for row in rows)
    if not n or not m:
        return 1.0
    scale = math.sqrt(m / n)
    half = max(scale, 1 / scale) / 2
    found = sum(
        (abs(ours[row] * scale - theirs[row] / scale) + half) ** 2
        / (ours[row] + theirs[row])
        for row in rows
    )
    return float(stats.chi2.cdf(found, max(len(rows) - 1, 1)))
