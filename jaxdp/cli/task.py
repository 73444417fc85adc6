"""Task of ``jaxdp train``: a model on a data set, with its metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxdp import models
from jaxdp.metrics.second_order import SospAlpha


class Task(NamedTuple):
    """Data set and model of a run: parameters, losses and metrics.

    What the loop moves (``params`` below) is the model's parameters; for ``saddle`` weights
    of vertices and of groups; for ``sosp`` a factor of second moments.
    """

    dataset: models.Dataset
    model: str
    loss: str
    init: Callable[[jax.Array], Any]  # key -> params
    value_fn: Callable[..., jax.Array]  # (params, batch) -> losses (B,); or a problem
    metric: str  # its name in the report
    metric_fn: Callable[[Any], jax.Array]  # params -> () on the public records
    data: Any  # what the loop reads
    saved_fn: Callable[[Any], Any] = lambda params: params  # params -> what is written
    groups: models.Grouped | None = None
    errors_fn: Callable[[Any], jax.Array] | None = None  # params -> (num_groups,)
    # How stationary params are on the public records.
    alpha_fn: Callable[[Any], SospAlpha] | None = None
