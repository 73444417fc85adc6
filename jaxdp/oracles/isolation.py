"""A debug check of the one assumption that no clip can enforce: isolation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp._types import ValueFn
from jaxdp.kernels.finite_difference import num_rows


def check_isolation(value_fn: ValueFn, params: Any, batch: Any, row: int = 0) -> None:
    """Replaces one record and requires every other loss to be bit-identical.

    One record's loss must not depend on another: no batch norm, no capacity-limited
    routing, no padding to the longest of the batch. A loss that breaks this breaks the
    sensitivity of every release, and no clip can mend it. Run it once on public or made
    up records; it is a check, not a proof.

    Args:
      value_fn: ``value_fn(params, batch) -> losses (B,)``.
      params: parameters to try it at.
      batch: at least two records that differ.
      row: the record to replace, by the next one and by zeros.

    Raises:
      ValueError: ``batch`` is too small, or another record's loss changed.
    """
    rows = num_rows(batch)
    if rows < 2 or not 0 <= row < rows:
        raise ValueError(
            f"batch must hold at least two records and row={row} be one of them, "
            f"got {rows} records"
        )
    losses = jax.jit(value_fn)
    before = np.asarray(losses(params, batch))
    others = np.arange(rows) != row
    for replace in (lambda x: x[(row + 1) % rows], lambda x: jnp.zeros_like(x[row])):
        changed = jax.tree.map(
            lambda x, replace=replace: x.at[row].set(replace(x)),
            jax.tree.map(jnp.asarray, batch),
        )
        after = np.asarray(losses(params, changed))
        moved = np.flatnonzero(others & _differ(before, after))
        if moved.size:
            raise ValueError(
                f"value_fn is not per record: replacing record {row} changed the losses "
                f"of records {moved[:8].tolist()}"
            )


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether two losses differ in a bit, of any dtype; shape=(B,)."""
    as_bytes = [np.ascontiguousarray(x).view(np.uint8) for x in (a, b)]
    return (as_bytes[0] != as_bytes[1]).reshape(a.shape[0], -1).any(axis=1)
