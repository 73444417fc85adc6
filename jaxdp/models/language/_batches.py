"""Evaluation of many records by a compiled program, in batches of one size."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdp.core import validate
from jaxdp.training import parallel


def in_batches(
    program: Callable[..., Any],
    params: Any,
    data: dict[str, Any],
    batch_size: int,
    progress: str = "",
) -> Any:
    """Applies ``program`` to slices of one size, the last filled up, and concatenates.

    ``progress`` is what a bar says; there is none where it is empty.
    """
    validate.integer(batch_size=batch_size)
    count = len(data["tokens"])
    if not count:
        raise ValueError("data must have one record or more, got none")
    parts, starts = [], range(0, count, batch_size)
    for start in _shown(starts, progress) if progress else starts:
        index = np.minimum(np.arange(start, start + batch_size), count - 1)
        found = program(params, {n: x[index] for n, x in data.items()})
        parts.append(jax.tree.map(parallel.on_host, found))
    return jax.tree.map(lambda *each: np.concatenate(each)[:count], *parts)


def _shown(starts: range, description: str) -> Iterator[int]:
    from rich import errors, progress

    try:
        yield from progress.track(starts, description, transient=True)
    except errors.LiveError:  # Before rich 14.1 no bar stood below that of a run.
        yield from starts
