"""Refuses private records that are given as public ones: what is judged is published."""

import pathlib
from collections import Counter
from collections.abc import Hashable, Iterable

from jaxdp.cli.errors import UsageError

#: The largest share of public records that may be in the private file too, and only once
#: in each. Of two honest samples of a population, whatever it is, at most 1/e are expected:
#: a row that a file of m records has np times on average in the other one of n is there
#: once in both with probability mp exp(-mp) np exp(-np) <= mp / e.
MOST = 0.5


def same_file(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two names are of one file; OSError if that cannot be found out."""
    return one.exists() and other.exists() and one.samefile(other)


def refuse(
    private: Iterable[Hashable],
    public: Iterable[Hashable],
    option: str,
    of: str,
    path: object,
) -> None:
    """Refuses the private records in any order, and a large part of them.

    Rows that are there several times are no sign: in a small domain honest samples share
    all their rows. Rows that are once in each file are, if they are most of the public
    ones: see :data:`MOST`.

    Args:
      private: one hashable a record.
      public: likewise.
      option: the public file's option.
      of: the private file's option.
      path: the public file.

    Raises:
      UsageError: one line that names ``option`` and how many records are in both.
    """
    ours, theirs = Counter(private), Counter(public)
    total = sum(theirs.values())
    if ours == theirs:
        raise UsageError(
            f"{option} must be public records, not those of {of}, got {str(path)!r}, "
            f"whose {total} records are the same ones: metrics are published without noise"
        )
    shared = sum(1 for row, times in theirs.items() if times == 1 == ours[row])
    if shared > MOST * total:
        raise UsageError(
            f"{option} must be public records, got {str(path)!r}, of whose {total} records "
            f"{shared} are in {of} too, once in each file, which is more than {MOST:.0%}: "
            "metrics are published without noise"
        )
