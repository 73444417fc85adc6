"""Users as the unit of privacy: their records grouped, in shapes that are fixed.

A row of the data becomes a user, with at most so many records, and the loss of a user is
the mean of theirs. So all that the library bounds for a record, it bounds for a user: one
clip, whatever number of records a user has.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.core.types import UserRecords, ValueFn
from jaxdp.data import values
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.kernels.perturb import LazyLoss


def by_user(
    data: Any, users: Any, *, records_per_user: int, user_ids: Any = None
) -> UserRecords:
    """Groups records by user, for a run whose unit of privacy is a user.

    A plan's ``num_examples`` is then the number of users, and the loss that of
    :func:`per_user`. Of a user with more than ``records_per_user`` records the first ones
    are kept, in the order of the data: which these are depends on that user's alone.

    Privacy:
      Neighbouring data sets differ in one user: in what all records of the user are, in
      how many they are, or in whether the user is there. The list of users and its order
      are public: give ``user_ids`` where they do not follow from a public rule. Without
      it they are the users that occur, sorted, so that the data tell who they are.

    Args:
      data: pytree of arrays with n rows, one for each record.
      users: (n,), integers or strings; the user of each record.
      records_per_user: m; a row holds so many records. Those that a user lacks are masked
        and hold the user's first one, or zeros where there is none.
      user_ids: (U,), all users, each once; None takes those that occur.

    Returns:
      ``UserRecords(records, mask)``: NumPy arrays with leading axes (U, m), and bool
      (U, m). U m rows are held, whatever users have.

    Raises:
      ValueError: other numbers of rows, a user that is twice in ``user_ids``, or one of a
        record that is not there. TypeError: ``users`` are neither integers nor strings.

    Example:
      >>> import numpy as np
      >>> import jaxdp
      >>> data = {"x": np.array([[1.0], [2.0], [3.0], [4.0]])}
      >>> users = ["ann", "bob", "ann", "ann"]
      >>> grouped = jaxdp.by_user(data, users, records_per_user=2)
      >>> grouped.records["x"].shape, grouped.mask.tolist()
      ((2, 2, 1), [[True, True], [True, False]])
      >>> grouped.records["x"][..., 0].tolist()
      [[1.0, 3.0], [2.0, 2.0]]
    """
    validate.integer(records_per_user=records_per_user)
    names, size = _names(users, "users"), num_rows(data, "data")
    if len(names) != size:
        raise ValueError(
            f"users must name the user of each of the {size} records, got {len(names)}"
        )
    every = np.unique(names) if user_ids is None else _names(user_ids, "user_ids")
    if every.dtype.kind != names.dtype.kind:
        raise TypeError(
            "user_ids must be of the kind of users, "
            f"{validate.dtype_name(names.dtype)}, got {validate.dtype_name(every.dtype)}"
        )
    order = np.argsort(every, kind="stable")
    ranked = every[order]
    twice = ranked[1:][ranked[1:] == ranked[:-1]]
    if twice.size:
        raise ValueError(
            "user_ids must name a user once, and name one twice"
            f"{values.got(str(twice[0]))}"
        )
    at = np.minimum(np.searchsorted(ranked, names), max(len(ranked) - 1, 0))
    known = ranked[at] == names if len(ranked) else np.zeros(size, bool)
    if not known.all():
        raise ValueError(
            "user_ids must name every user of a record, and lack some"
            f"{values.got(str(names[~known][0]))}"
        )
    row = order[at]
    # The place of each record among those of its user.
    sequence = np.argsort(row, kind="stable")
    begins = np.searchsorted(row[sequence], np.arange(len(every)))
    place = np.empty(size, np.int64)
    place[sequence] = np.arange(size) - begins[row[sequence]]
    kept = np.flatnonzero(place < records_per_user)
    where = row[kept], place[kept]
    shape = len(every), records_per_user

    # What a user lacks holds the user's first record: a loss is finite where that is.
    held = np.zeros(len(every), bool)
    held[row] = True
    index = np.zeros(shape, np.int64)
    index[row[place == 0]] = np.flatnonzero(place == 0)[:, None]
    index[where] = kept

    def grouped(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        rows = leaf[index] if size else np.zeros((*shape, *leaf.shape[1:]), leaf.dtype)
        rows[~held] = 0
        return rows

    mask = np.zeros(shape, bool)
    mask[where] = True
    return UserRecords(jax.tree.map(grouped, data), mask)


def _names(users: Any, name: str) -> np.ndarray:
    try:
        names = np.asarray(users)
    except ValueError:  # Some records have more owners than others.
        names = np.asarray(users, object)
    if names.ndim != 1 or names.dtype.kind not in "iuUS":
        raise TypeError(
            f"{name} must be integers or strings of shape (n,), got "
            f"{validate.dtype_name(names.dtype)} of shape {names.shape}; of records with "
            "several owners choose some by jaxdp.data.users.one_per_owner"
        )
    return names


def per_user(value_fn: ValueFn | LazyLoss) -> ValueFn | LazyLoss:
    """Lifts a loss of records to one of users, for the data of :func:`by_user`.

    The loss of a user is the mean over the user's own records, 0 where there is none. So
    is the slope, and the gradient: a user is clipped once. A record whose loss is NaN or
    infinite makes the user's so, who then contributes zero.

    Args:
      value_fn: ``value_fn(params, batch) -> losses (B,)``, one of each record, or a
        ``jaxdp.LazyLoss``.

    Returns:
      ``fn(params, users) -> losses (U,)``, or a ``jaxdp.LazyLoss``, for ``UserRecords`` of
      leading axes (U, m). It evaluates U m records at once: ``microbatch_size`` counts
      users.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def value_fn(params, batch):
      ...     return (batch @ params) ** 2
      >>> data = jnp.array([[1.0], [2.0], [3.0]])
      >>> grouped = jaxdp.by_user(data, [0, 0, 1], records_per_user=2)
      >>> jaxdp.per_user(value_fn)(jnp.ones(1), grouped).tolist()
      [2.5, 9.0]
    """

    def flat(users: UserRecords) -> Any:
        if not isinstance(users, UserRecords):
            raise TypeError(
                "batch must be UserRecords for a loss of users, as jaxdp.by_user makes "
                f"them, got a {type(users).__name__}"
            )
        every = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # noqa: E731
        return jax.tree.map(every, users.records)

    def mean(losses: jax.Array, users: UserRecords) -> jax.Array:
        mask = jnp.asarray(users.mask)
        kept = jnp.where(mask, losses.reshape(mask.shape), 0)
        return kept.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)

    if isinstance(value_fn, LazyLoss):
        return LazyLoss(
            lambda p, users, at: mean(value_fn.fn(p, flat(users), at), users)
        )
    validate.is_callable(value_fn=value_fn)
    return lambda params, users: mean(value_fn(params, flat(users)), users)


def one_per_owner(owners: Sequence[Sequence[Any]]) -> np.ndarray:
    """Chooses records so that no owner has two of them, for records with several owners.

    Goes through the records in their order, and takes each whose owners have none yet. A
    run over the chosen ones protects each owner as it protects a record.

    Privacy:
      Who owns which record is public here, and only what the records hold is secret: an
      owner who is left out would change which records of others are chosen. If owners
      are secret, group each record by one of its owners (:func:`by_user`): a user is then
      protected in the records that were grouped by that user, not in those of others.

    Args:
      owners: of each record its owners, integers or strings; a record without any is
        chosen always.

    Returns:
      int64, the rows that are chosen, ascending.

    Raises:
      TypeError: the owners of a record are a string, not a sequence of owners; or some
        are neither integers nor strings, or some are these and some those.

    Example:
      >>> from jaxdp.data import users
      >>> users.one_per_owner([("ann", "bob"), ("bob",), ("cem",), ("cem", "ann")]).tolist()
      [0, 2]
    """
    taken: set[Any] = set()
    kinds: set[type | None] = set()
    chosen = []
    for row, of in enumerate(owners):
        if isinstance(of, str | bytes):
            raise TypeError(
                f"owners must be a sequence of owners for each record, at {row} too"
                f"{values.got(of)}"
            )
        of = tuple(of)  # It may be an iterator.
        kinds.update(map(_kind, of))
        if len(kinds) > 1 or None in kinds:
            # Of "7" and 7, or of two NaN, each would be an owner of its own.
            raise TypeError(
                "owners must be integers, or all of them strings, got one of another "
                f"type in record {row}"
            )
        if taken.isdisjoint(of):
            taken.update(of)
            chosen.append(row)
    return np.asarray(chosen, np.int64)


def _kind(owner: Any) -> type | None:
    """Returns what an owner is: an integer, a string or bytes; None for all else."""
    kinds = {int: int | np.integer, str: str, bytes: bytes}
    return next((k for k, types in kinds.items() if isinstance(owner, types)), None)
