"""Units of privacy: what a row of an audited data set is, a record or a user.

One user of the attack has the worst data: more records than are kept of a user, and all of
them saturate every bound. The neighbour's user has fewer records, or none. So a sum of
clipped records in place of a clipped mean, a divisor that counts records, or a record too
many that becomes a row of its own, each moves a release by more than one clip.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.core.types import UserRecords
from jaxdp.data import users
from jaxdp.kernels import finite_difference

#: Records that are kept of a user. A power of two: then a mean of equal losses is exact.
RECORDS_PER_USER = 4
#: Records of the one user, by its kind in ``canaries.VALUES``: so many that they would
#: fill several rows, or a single one. Others have one, two, or one too many.
_MANY = 4 * RECORDS_PER_USER
_RECORDS = {"plus": _MANY, "nan": _MANY, "minus": 1, "absent": 0}


class Unit(NamedTuple):
    """Unit of privacy: what neighbouring data sets differ in, and how a run reads it."""

    name: str
    #: (rows, index, kind) -> data: rows of records, of which the one at ``index`` has that
    #: kind, in the form in which a run gets them.
    data: Callable[[Any, int, str], Any]
    #: (loss of records) -> the loss for such data.
    loss: Callable[[Any], Any]


def _grouped(rows: Any, index: int, kind: str) -> UserRecords:
    """Groups users whose records all are their row of ``rows``."""
    ids = np.arange(finite_difference.num_rows(rows))
    counts = np.array([1, 2, RECORDS_PER_USER + 1])[(ids - index) % 3]
    counts[index] = _RECORDS[kind]
    # Owner of each place in the data: public, while rows may be traced. A user's records
    # do not follow each other, and the last ones come first.
    turn = np.arange(counts.max())[::-1, None] < counts
    owners = np.broadcast_to(ids, turn.shape)[turn]
    holds, mask = users.by_user(
        owners, owners, records_per_user=RECORDS_PER_USER, user_ids=ids
    )
    return UserRecords(jax.tree.map(lambda x: x[holds], rows), mask)


RECORD = Unit("record", lambda rows, index, kind: rows, lambda loss: loss)
USER = Unit("user", _grouped, users.per_user)
UNITS = {unit.name: unit for unit in (RECORD, USER)}
