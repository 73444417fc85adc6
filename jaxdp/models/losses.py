"""Losses of single records, and the metrics that a model is judged by."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import validate

Array = jax.Array
Rows = jax.Array | np.ndarray  # with a leading axis of records
NetworkTask = Literal["classification", "regression"]
Loss = Literal["cross_entropy", "hinge", "squared_error"]
TASKS: tuple[NetworkTask, ...] = ("classification", "regression")


def softmax_cross_entropy(logits: Array, y: Rows) -> Array:
    """Computes -log softmax(logits)[y]: (B, k), (B,) integers -> (B,) float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.models import losses
      >>> logits = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
      >>> found = jnp.exp(-losses.softmax_cross_entropy(logits, jnp.array([0, 1])))
      >>> bool(jnp.allclose(found, jnp.array([0.5, 0.75])))
      True
    """
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), y
    )


def hinge(logits: Array, y: Rows) -> Array:
    r"""Computes the multi-class hinge loss: (B, k), (B,) integers -> (B,) float32.

    :math:`\max(0, 1 + \max_{j \ne y} o_j - o_y)`: 0 where the class wins by a margin of 1.
    (Crammer and Singer, `On the Algorithmic Implementation of Multiclass Kernel-based
    Vector Machines <https://jmlr.org/papers/v2/crammer01a.html>`_, 2001.)

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.models import losses
      >>> logits = jnp.array([[3.0, 0.0], [0.5, 0.0]])
      >>> losses.hinge(logits, jnp.array([0, 0])).tolist()
      [0.0, 0.5]
    """
    outputs = logits.astype(jnp.float32)
    y = jnp.asarray(y)[:, None]
    own = jnp.take_along_axis(outputs, y, axis=1)
    is_own = jnp.arange(outputs.shape[1]) == y
    other = jnp.max(jnp.where(is_own, -jnp.inf, outputs), axis=1)
    return jnp.maximum(0, 1 + other - own[:, 0])


def squared_error(predictions: Array, y: Rows) -> Array:
    """Computes (prediction - y)^2: (B,), (B,) -> (B,) float32; not clipped, not halved.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.models import losses
      >>> losses.squared_error(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])).tolist()
      [0.0, 4.0]
    """
    return (predictions.astype(jnp.float32) - y.astype(jnp.float32)) ** 2


def accuracy(logits: Array, y: Rows) -> Array:
    """Computes the share of records whose largest logit is their class; () float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.models import losses
      >>> logits = jnp.array([[3.0, 0.0], [0.5, 0.0]])
      >>> losses.accuracy(logits, jnp.array([0, 1])).item()
      0.5
    """
    return jnp.mean(jnp.argmax(logits, -1) == y, dtype=jnp.float32)


#: Name -> loss of a network's outputs (B, k).
LOSSES: Mapping[Loss, Callable[[Array, Rows], Array]] = MappingProxyType(
    {
        "cross_entropy": softmax_cross_entropy,
        "hinge": hinge,
        "squared_error": lambda outputs, y: squared_error(outputs[:, 0], y),
    }
)
_OF_TASK: Mapping[NetworkTask, tuple[Loss, ...]] = MappingProxyType(
    {"classification": ("cross_entropy", "hinge"), "regression": ("squared_error",)}
)


def loss_of(task: NetworkTask, loss: Loss | None) -> Loss:
    """Returns the given loss, or the task's default for None.

    Raises:
      ValueError: an unknown task, or a loss that is not of it.

    Example:
      >>> from jaxdp.models import losses
      >>> losses.loss_of("classification", None), losses.loss_of("regression", None)
      ('cross_entropy', 'squared_error')
    """
    validate.one_of(TASKS, task=task)
    allowed = _OF_TASK[task]
    if loss is not None and loss not in allowed:
        names = " or ".join(map(repr, allowed))
        raise ValueError(f"loss must be {names} for {task}, got {loss!r}")
    return loss or allowed[0]


def check_batch(x: Rows, y: Rows) -> None:
    """Raises unless the batch has one target for each record.

    Example:
      >>> import numpy as np
      >>> from jaxdp.models import losses
      >>> losses.check_batch(np.zeros((3, 2)), np.zeros(3))
    """
    # (B, 1) targets would broadcast to a (B, B) table: losses of pairs of records.
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(
            f"batch must be (x, y) of shapes (B, d) and (B,), got {x.shape} and "
            f"{y.shape}"
        )
